"""Exact differences: every bit pattern returns, every backend writes the same bytes, damage is noticed or harmless."""

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

import cases
from cases import CPU, Place
from thinwire import CodecError, WireError, exact, use_backend
from thinwire.kernels import exact as definition
from thinwire.wire import EXACT_BLOCK, EXACT_TABLES_AT

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = (0, 1, 7, 8, 63, 64, 65, 1000, EXACT_BLOCK - 1, EXACT_BLOCK, EXACT_BLOCK + 1)
RATES = (0.0, 1e-6, 1e-4, 1e-2)
OVERHEAD = EXACT_TABLES_AT + 2  # bytes of a wire with at most one block that is not its numbers


def signed(dtype: torch.dtype) -> torch.dtype:
    return definition.FORMATS[dtype].signed


def weights(n: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (0.02 * torch.randn(n, generator=cases.seeded(seed, n))).to(dtype)


def patterns(n: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """Any bits: NaNs with payloads, infinities, subnormals and zeros of both signs among them."""
    info = torch.iinfo(signed(dtype))
    drawn = torch.randint(info.min, info.max + 1, (n,), generator=cases.seeded(seed, n), dtype=torch.int64)
    return drawn.to(signed(dtype)).view(dtype)


def moved(base: Tensor, rate: float, seed: int = 2) -> Tensor:
    """What an optimizer that moves every weight by about `rate` makes of the base."""
    step = rate * torch.randn(base.numel(), generator=cases.seeded(seed, base.numel()))
    return (base.double() + step).to(base.dtype)


def changes(n: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    base = weights(n, dtype)
    pairs = [(moved(base, rate), base) for rate in RATES]
    return [*pairs, (patterns(n, dtype), base), (base, patterns(n, dtype)), (patterns(n, dtype, 5), patterns(n, dtype))]


def assert_same_bits(got: Tensor, want: Tensor) -> None:
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert torch.equal(got.view(signed(want.dtype)), want.view(signed(want.dtype)))


def encoded(new: Tensor, base: Tensor, place: Place) -> Tensor:
    with use_backend(place.backend):
        return exact.encode(new.to(place.device), base.to(place.device)).cpu()


def decoded(wire: Tensor, base: Tensor, place: Place) -> Tensor:
    with use_backend(place.backend):
        return exact.decode(wire.to(place.device), base.to(place.device)).cpu()


def result_of(act: Callable[[], Tensor], backend: str) -> Tensor | str:
    """What a backend makes of it, or the kind of its error."""
    try:
        with use_backend(backend):
            return act()
    except WireError as error:
        return type(error).__name__


REFERENCE = Place("reference", CPU)


@cases.each_place
@pytest.mark.parametrize("dtype", DTYPES)
def test_backends_write_the_bytes_of_the_definition(dtype: torch.dtype, place: Place) -> None:
    for n in SIZES:
        for new, base in changes(n, dtype):
            wire = encoded(new, base, place)
            assert torch.equal(wire, encoded(new, base, REFERENCE))
            assert_same_bits(decoded(wire, base, place), new)
            assert wire.numel() <= new.nbytes * 1.02 + OVERHEAD


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_patterns_of_16_bits_return(dtype: torch.dtype, served: None) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    for base in (every, every.flip(0), every.roll(1), torch.zeros_like(every)):
        assert_same_bits(exact.decode(exact.encode(every, base), base), every)


@cases.generated(60)
@given(
    dtype=st.sampled_from(DTYPES),
    n=st.integers(0, 9000),
    rate=st.floats(0, 1e-2),
    odd=st.integers(0, 40),
    seed=st.integers(0, 9),
)
def test_any_change_returns(dtype: torch.dtype, n: int, rate: float, odd: int, seed: int) -> None:
    base = weights(n, dtype, seed)
    new = moved(base, rate, seed + 1)
    if n:
        at = torch.randint(n, (odd,), generator=cases.seeded(seed))
        new[at] = patterns(odd, dtype, seed)
        base[at.flip(0) // 2] = patterns(odd, dtype, seed + 1)
    wire = exact.encode(new, base)
    assert_same_bits(exact.decode(wire, base), new)
    assert wire.numel() <= new.nbytes * 1.02 + OVERHEAD


def entropy(new: Tensor, base: Tensor) -> float:
    """Bits per number of the differences, given the exponent of the base."""
    pairs = torch.stack([definition.exponents(base), definition.differences(new, base)])
    _, joint = pairs.unique(dim=1, return_counts=True)
    _, given_ = pairs[0].unique(return_counts=True)

    def total(counts: Tensor) -> float:
        return float(-(counts * (counts / base.numel()).log2()).sum())

    return (total(joint.double()) - total(given_.double())) / base.numel()


@pytest.mark.parametrize("rate", [1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3])
def test_differences_take_little_more_than_their_entropy(rate: float, served: None) -> None:
    """Steps as Adam's: about the rate, whatever the weight. benchmarks/exact.py has trained ones."""
    base = weights(1 << 17, torch.float32)
    steps = rate * torch.randn(base.shape, generator=cases.seeded(3)).clamp(-3, 3)
    old, new = base.bfloat16(), (base + steps).bfloat16()
    assert 8 * exact.encode(new, old).numel() / old.numel() <= 1.25 * entropy(new, old)


def test_blocks_that_do_not_shrink_are_sent_as_they_are(served: None) -> None:
    base, new = weights(3 * EXACT_BLOCK, torch.bfloat16), patterns(3 * EXACT_BLOCK, torch.bfloat16)
    new[:EXACT_BLOCK] = base[:EXACT_BLOCK]
    new[-EXACT_BLOCK:] = base[-EXACT_BLOCK:]
    wire = exact.encode(new, base)
    assert 2 * EXACT_BLOCK < wire.numel() < 2 * EXACT_BLOCK + 2 * 512 + OVERHEAD  # a bit for each unchanged number
    assert_same_bits(exact.decode(wire, base), new)


def test_shapes_and_strides(served: None) -> None:
    base = weights(6 * 35, torch.bfloat16).view(35, 6).t()
    new = moved(base.reshape(-1), 1e-3).view(6, 35)
    assert_same_bits(exact.decode(exact.encode(new, base), base), new)
    assert exact.decode(exact.encode(new[0, 0], base[0, 0]), base[0, 0]).shape == ()
    long = moved(weights(400, torch.bfloat16), 1e-3)
    for strided in (long[::2], long.view(200, 2)[:, :1], long[:1].expand(200), torch.randn(200, 3)[:, 1:2]):
        still = weights(200, strided.dtype).view(strided.shape)
        assert_same_bits(exact.decode(exact.encode(strided, still), still), strided)
        assert_same_bits(exact.decode(exact.encode(still, strided), strided), still)


@pytest.mark.parametrize(
    ("new", "base", "says"),
    [
        (torch.zeros(2, dtype=torch.int8), torch.zeros(2, dtype=torch.int8), "got torch.int8"),
        (torch.zeros(2), torch.zeros(2).bfloat16(), "torch.float32 on cpu"),
        (torch.zeros(2), torch.zeros(3), r"\(3,\)"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(new: Tensor, base: Tensor, says: str) -> None:
    with pytest.raises(CodecError, match=says):
        exact.encode(new, base)


def test_wires_of_another_kind_are_refused(served: None) -> None:
    base = weights(5000, torch.bfloat16)
    wire = exact.encode(moved(base, 1e-4), base)
    for bad, says in [
        (wire[:20], "64 bytes or more"),
        (wire[:-1], "cut short"),
        (wire[: EXACT_TABLES_AT + 1], "cut short"),
        (torch.cat([wire, wire[:1]]), "cut short"),
        (wire.float(), "torch.uint8"),
        (wire.view(1, -1), "one dimension"),
        (torch.cat([wire[:1] + 1, wire[1:]]), "no wire of exact differences"),
    ]:
        with pytest.raises(WireError, match=says):
            exact.decode(bad, base)
    for other, says in [(base[:-1], "4999"), (base.half(), "float16"), (base.float(), "float32")]:
        with pytest.raises(WireError, match=says):
            exact.decode(wire, other)


@cases.each_place
def test_damaged_wires_raise_or_decode(place: Place) -> None:
    """Never outside the wire or the output: `make sanitize` runs this too."""
    rng = random.Random(0)
    refused = 0
    for turn in range(150):
        dtype = DTYPES[turn % 3]
        base = weights(rng.choice((1, 70, 4095, 5000)), dtype, turn)
        wire = exact.encode(moved(base, 10 ** -rng.uniform(2, 6), turn), base)
        start = rng.choice((0, 32, EXACT_TABLES_AT, min(EXACT_TABLES_AT + 4, wire.numel() - 1)))
        for _ in range(rng.choice((1, 3, 200))):
            wire[rng.randrange(start, wire.numel())] = rng.randrange(256)
        wire = wire[: rng.choice((wire.numel(), wire.numel(), rng.randrange(wire.numel())))].clone()
        try:
            assert decoded(wire, base, place).shape == base.shape
        except WireError:
            refused += 1
    assert 30 < refused < 150


def test_backends_refuse_the_same_wires() -> None:
    rng = random.Random(1)
    places = [*((name, CPU) for name in cases.SERVING), *([("triton", cases.CUDA)] * torch.cuda.is_available())]
    base = weights(60, torch.bfloat16)
    for turn in range(6):
        wire = exact.encode(moved(base, 1e-3, turn), base)
        wire[rng.randrange(EXACT_TABLES_AT + 1, wire.numel())] ^= 1 << rng.randrange(8)
        first, *others = (
            result_of(lambda wire=wire, on=on: exact.decode(wire.to(on), base.to(on)).cpu(), backend)
            for backend, on in places
        )
        for other in others:
            if isinstance(first, str) or isinstance(other, str):
                assert other == first
            else:
                assert_same_bits(other, first)


@pytest.mark.usefixtures("restored_threads")
def test_threads_write_the_same_bytes(served: None) -> None:
    base = weights((1 << 19) + 77, torch.bfloat16)
    new = moved(base, 1e-5)
    one = exact.encode(new, base)
    torch.set_num_threads(2)
    assert torch.equal(exact.encode(new, base), one)
    assert_same_bits(exact.decode(one, base), new)
