"""What holds for any codec, dtype, length and content, on generated cases: 1,000 in all."""

import itertools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

import cases
from cases import generated
from thinwire import BlockInt, Cast, Codec, Identity, Lloyd, use_backend

BLOCKS = [8 * k for k in range(1, 41)] + [512, 1000, 1024, 1032, 2048]
ROUNDINGS = [
    (mode, rounding, seed)
    for mode in ("symmetric", "affine")
    for rounding in ("nearest", "stochastic")
    for seed in (0, 1)
]
LLOYDS = list(
    itertools.product((1, 2, 3, 4), (32, 64, 128, 256, 512, 1024), (True, False), ("mmse", "unbiased"), (0, 1))
)
codecs: st.SearchStrategy[Codec] = st.one_of(
    st.sampled_from([Identity(), Cast("bf16")]),
    st.sampled_from([Cast(format, block) for format in ("fp16", "e4m3", "e5m2") for block in BLOCKS]),
    st.sampled_from([BlockInt(bits, block, *how) for bits in range(2, 9) for block in BLOCKS for how in ROUNDINGS]),
    st.sampled_from([Lloyd(*how) for how in LLOYDS]),
)


@dataclass(frozen=True)
class Content:
    """A kind of numbers times a power of two, every eleventh replaced: says, and shrinks, a tensor of any length."""

    kind: str
    exponent: int = 0
    replaced: tuple[float, ...] = (0.0,)

    def tensor(self, n: int, dtype: torch.dtype) -> Tensor:
        x = cases.CONTENTS[self.kind](n, cases.seeded(n, self.exponent)) * 2.0**self.exponent
        places = x[::11]
        places.copy_(torch.tensor(self.replaced).repeat(places.numel() // len(self.replaced) + 1)[: places.numel()])
        return cases.to_dtype(x, dtype)


numbers = st.lists(st.floats(width=32), min_size=1, max_size=3).map(tuple)
contents = st.one_of(
    st.sampled_from([Content(kind) for kind in cases.CONTENTS]),
    st.sampled_from([Content(kind, e, (2.0**e, -0.0)) for e in range(-140, 121, 4) for kind in cases.FINITE]),
    st.builds(Content, st.sampled_from(["zeros", "gaussian"]), st.just(0), numbers),
)


def length_of(pick: int, block: int) -> int:
    """A number of 0 .. 2399 as a short length, one at the end of a block, or any up to 2400."""
    way, rest = divmod(pick, 800)
    return [rest % 41, max(0, rest // 3 % 4 * block + rest % 3 - 1), 3 * rest][way]


@dataclass(frozen=True)
class Case:
    """A codec and what it is asked to do."""

    codec: Codec
    xs: list[Tensor]  # of the ranks
    step: int
    scale: float

    @property
    def n(self) -> int:
        return self.xs[0].numel()

    @property
    def dtype(self) -> torch.dtype:
        return self.xs[0].dtype


@st.composite
def any_case(draw: st.DrawFn, most_ranks: int = 1) -> Case:
    codec = draw(codecs)
    dtype = draw(st.sampled_from(cases.DTYPES))
    n = length_of(draw(st.integers(0, 2399)), cases.block_of(codec))
    ranks, step, scale = draw(st.sampled_from([*itertools.product(range(1, most_ranks + 1), (0, 1), SUM_SCALES)]))
    return Case(codec, [draw(contents).tensor(n, dtype) for _ in range(ranks)], step, scale)


SUM_SCALES = (1.0, 1 / 3, 0.25, 1e-3, 7.0)
serving = st.sampled_from([*cases.SERVING[:1] * 7, "reference"])  # mostly the fastest, so that they are many


@pytest.mark.skipif(not cases.OTHERS, reason="only the reference runs here")
@generated(400)
@given(
    case=any_case(most_ranks=2),
    backend=st.sampled_from(cases.OTHERS or ["reference"]),
    carry=st.integers(0, 2).map(lambda k: k == 0),
)
def test_backends_agree_in_every_bit(case: Case, backend: str, carry: bool) -> None:
    with use_backend("reference"):
        want = everything(case, carry)
    with use_backend(backend):
        got = everything(case, carry, want["wires"])
    for what in want:
        cases.assert_same(got[what], want[what], f"{case.codec}: {what}")


def everything(case: Case, carry: bool, wires_WN: Tensor | None = None) -> dict[str, Tensor]:
    """The results of every operation; sums are of `wires_WN` where given."""
    codec = case.codec
    results = {"wires": cases.wires_of(case.codec, case.xs, step=case.step)}
    wires_WN = results["wires"] if wires_WN is None else wires_WN
    if carry:
        results["residual"] = case.xs[-1].float().flip(0)
        wire = cases.wire_of(codec, case.xs[0], step=case.step, residual=results["residual"])
        results["wire of x + residual"] = wire
    results["sum"] = cases.summed(codec, wires_WN, case.n, case.dtype, case.scale)
    results["recoded"] = cases.recoded(codec, wires_WN, case.n, case.scale, case.step, case.dtype)
    return results


@generated(300)
@given(any_case(most_ranks=2), serving, st.integers(0, 16))
def test_nothing_is_written_outside_the_buffers(case: Case, backend: str, shift: int) -> None:
    """Into the middle of a larger buffer, at any address: the same bytes there, and none around."""
    codec, n = case.codec, case.n
    nbytes = codec.wire_bytes(n, case.dtype)
    with use_backend(backend):
        wires_WN = cases.wires_of(codec, case.xs, step=case.step)
        room, wire = cases.guarded(nbytes, torch.uint8, shift)
        codec.encode(case.xs[0], wire, step=case.step)
        assert_guarded(room, wire, wires_WN[0], "wire")
        room, out = cases.guarded(n, case.dtype, shift)
        codec.decode_sum(wires_WN, out, scale=case.scale)
        assert_guarded(room, out, cases.summed(codec, wires_WN, n, case.dtype, case.scale), "out")
        room, wire = cases.guarded(nbytes, torch.uint8, shift)
        codec.recode(wires_WN, wire, n, scale=case.scale, step=case.step, dtype=case.dtype)
        recoded = cases.recoded(codec, wires_WN, n, case.scale, case.step, case.dtype)
        assert_guarded(room, wire, recoded, "recoded wire")
        room, residual = cases.guarded(n, torch.float32, shift)
        residual.zero_()
        codec.encode(case.xs[0], wire, step=case.step, residual=residual)
        straight = torch.zeros(n)
        cases.wire_of(codec, case.xs[0], step=case.step, residual=straight)
        assert_guarded(room, residual, straight, "residual")


def assert_guarded(room: Tensor, buffer: Tensor, want: Tensor, what: str) -> None:
    cases.assert_same(buffer, want, what)
    cases.assert_untouched(room, buffer, what)
