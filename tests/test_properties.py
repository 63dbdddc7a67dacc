"""What holds for any codec, dtype, length and content, on generated cases: 5,500 in all."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor

import cases
from thinwire import BlockInt, Cast, Codec, Identity, Lloyd, use_backend

GUARD = 48  # bytes before and behind a buffer


def generated(count: int) -> settings:
    """The same cases in every run, so that a failure is one for all."""
    return settings(
        max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )


# --- strategies -------------------------------------------------------------------------------------------------------

blocks = st.one_of(st.integers(1, 40).map(lambda k: 8 * k), st.sampled_from([512, 1000, 1024, 1032, 2048]))
codecs: st.SearchStrategy[Codec] = st.one_of(
    st.sampled_from([Identity(), Cast("bf16")]),
    st.builds(Cast, st.sampled_from(["fp16", "e4m3", "e5m2"]), blocks),
    st.builds(
        BlockInt,
        st.integers(2, 8),
        blocks,
        st.sampled_from(["symmetric", "affine"]),
        st.sampled_from(["nearest", "stochastic"]),
        st.integers(0, 3),
    ),
    st.builds(
        Lloyd,
        st.integers(1, 4),
        st.sampled_from([32, 64, 128, 256, 512, 1024]),
        st.sampled_from([True, True, False]),
        st.sampled_from(["mmse", "unbiased"]),
        st.integers(0, 3),
    ),
)
numbers = st.lists(st.floats(width=32), min_size=1, max_size=12)


@dataclass(frozen=True)
class Content:
    """A kind of numbers, some of them replaced: enough to say, and to shrink, a tensor of any length."""

    kind: str
    seed: int
    replaced: list[float]  # put at every eleventh place
    exponent: int  # all times 2**exponent

    def tensor(self, n: int, dtype: torch.dtype) -> Tensor:
        x = cases.CONTENTS[self.kind](n, cases.seeded(self.seed, n))
        x[::11] = torch.tensor(self.replaced).repeat(n // len(self.replaced) + 1)[: x[::11].numel()]
        return cases.to_dtype(x * 2.0**self.exponent, dtype)


contents = st.one_of(
    st.builds(Content, st.sampled_from(list(cases.CONTENTS)), st.integers(0, 9), st.just([0.0]), st.just(0)),
    st.builds(Content, st.sampled_from(cases.FINITE), st.integers(0, 9), st.just([1.0, -0.0]), st.integers(-140, 120)),
    st.builds(Content, st.just("zeros"), st.just(0), numbers, st.integers(-4, 4)),
    st.builds(Content, st.just("gaussian"), st.just(0), numbers, st.just(0)),
)


@st.composite
def lengths(draw: st.DrawFn, codec: Codec) -> int:
    """Short ones, ends of blocks, and others."""
    block = cases.block_of(codec)
    at_an_end = draw(st.integers(0, 3)) * block + draw(st.integers(-1, 1))
    return max(0, draw(st.sampled_from([at_an_end, draw(st.integers(0, 40)), draw(st.integers(0, 2200))])))


@dataclass(frozen=True)
class Case:
    """A codec and what it is asked to do."""

    codec: Codec
    xs: list[Tensor]  # of the ranks
    dtype: torch.dtype
    step: int
    scale: float

    @property
    def n(self) -> int:
        return self.xs[0].numel()


@st.composite
def any_case(draw: st.DrawFn, most_ranks: int = 1) -> Case:
    codec, dtype = draw(codecs), draw(st.sampled_from(cases.DTYPES))
    n = draw(lengths(codec))
    xs = [draw(contents).tensor(n, dtype) for _ in range(draw(st.integers(1, most_ranks)))]
    return Case(codec, xs, dtype, draw(st.integers(0, 2)), draw(st.sampled_from([1.0, 1 / 3, 0.25, 1e-3, 7.0])))


serving = st.sampled_from([*cases.SERVING[:1] * 3, "reference"])  # mostly the fastest, so that they are many


# --- properties -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not cases.OTHERS, reason="only the reference runs here")
@generated(2500)
@given(case=any_case(most_ranks=3), backend=st.sampled_from(cases.OTHERS or ["reference"]), carry=st.booleans())
def test_backends_agree_in_every_bit(case: Case, backend: str, carry: bool) -> None:
    with use_backend("reference"):
        want = everything(case, carry)
    with use_backend(backend):
        got = everything(case, carry, want["wires"])
    for what in want:
        cases.assert_same(got[what], want[what], f"{case.codec}: {what}")


def everything(case: Case, carry: bool, wires_WN: Tensor | None = None) -> dict[str, Tensor]:
    """The results of every operation; sums are of `wires_WN` where given."""
    codec, results = case.codec, {"wires": cases.wires_of(case.codec, case.xs, step=case.step)}
    wires_WN = results["wires"] if wires_WN is None else wires_WN
    if carry:
        results["residual"] = case.xs[-1].float().flip(0)
        wire = cases.wire_of(codec, case.xs[0], step=case.step, residual=results["residual"])
        results["wire of x + residual"] = wire
    results["sum"] = cases.summed(codec, wires_WN, case.n, case.dtype, case.scale)
    results["recoded"] = cases.recoded(codec, wires_WN, case.n, case.scale, case.step, case.dtype)
    return results


@generated(1500)
@given(any_case(), serving)
def test_decoded_numbers_are_within_the_bound(case: Case, backend: str) -> None:
    """Finite where the block is finite, NaN where not, zero where zero, and no further off than the definition says."""
    with use_backend(backend):
        wire = cases.wire_of(case.codec, case.xs[0], step=case.step)
        y = cases.decoded(case.codec, wire, case.n, case.dtype if case.codec == Identity() else torch.float32)
    cases.assert_within_bound(case.codec, case.xs[0], y.float())


@generated(1500)
@given(any_case(most_ranks=2), serving, st.integers(0, 16))
def test_nothing_is_written_outside_the_buffers(case: Case, backend: str, shift: int) -> None:
    """Into the middle of a larger buffer, at any address: the same bytes there, and none around."""
    codec, n = case.codec, case.n
    nbytes = codec.wire_bytes(n, case.dtype)
    with use_backend(backend):
        wires_WN = cases.wires_of(codec, case.xs, step=case.step)
        room, wire = guarded(nbytes, torch.uint8, shift)
        codec.encode(case.xs[0], wire, step=case.step)
        assert_guarded(room, wire, wires_WN[0], "wire")
        room, out = guarded(n, case.dtype, shift)
        codec.decode_sum(wires_WN, out, scale=case.scale)
        assert_guarded(room, out, cases.summed(codec, wires_WN, n, case.dtype, case.scale), "out")
        room, wire = guarded(nbytes, torch.uint8, shift)
        codec.recode(wires_WN, wire, n, scale=case.scale, step=case.step, dtype=case.dtype)
        recoded = cases.recoded(codec, wires_WN, n, case.scale, case.step, case.dtype)
        assert_guarded(room, wire, recoded, "recoded wire")
        room, residual = guarded(n, torch.float32, shift)
        residual.zero_()
        codec.encode(case.xs[0], wire, step=case.step, residual=residual)
        straight = torch.zeros(n)
        cases.wire_of(codec, case.xs[0], step=case.step, residual=straight)
        assert_guarded(room, residual, straight, "residual")


def guarded(n: int, dtype: torch.dtype, shift: int) -> tuple[Tensor, Tensor]:
    """A buffer of n elements inside a room of bytes; a wire may lie at any byte, floats on a multiple of their size."""
    start = GUARD + shift // dtype.itemsize * dtype.itemsize
    room = torch.full((start + n * dtype.itemsize + GUARD,), cases.GARBAGE, dtype=torch.uint8)
    return room, room[start : start + n * dtype.itemsize].view(dtype)


def assert_guarded(room: Tensor, buffer: Tensor, want: Tensor, what: str) -> None:
    cases.assert_same(buffer, want, what)
    start = math.ceil(buffer.storage_offset() * buffer.element_size())
    around = torch.cat((room[:start], room[start + buffer.nbytes :]))
    assert (around == cases.GARBAGE).all(), f"{what}: bytes outside were written"
