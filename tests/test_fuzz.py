"""Corrupted wires: no crash, no byte written outside the output, the same numbers from every backend."""

import random
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import cases
from cases import CPU, Place, on_ranks
from thinwire import BlockInt, Cast, Codec, Identity, Lloyd, WireError, use_backend

CODECS = [*cases.ONE_OF_EACH, BlockInt(7, 1032, "affine"), BlockInt(6, 8), Cast("e4m3", 2048)]
CODECS.append(Lloyd(4, 1024, rotate=False))
ON_CUDA = [  # few: kernels take seconds to compile
    *(Identity(), BlockInt(8), BlockInt(3, 40, "affine"), BlockInt(6, 8), Cast("e4m3", 64)),
    *(Lloyd(4), Lloyd(1, 256, scale="unbiased"), Lloyd(3, 32, rotate=False)),
]
LENGTHS = (1, 9, 33, 129, 1000, 2500)
HEADER = 32
# bfloat16 with either sign: zero, subnormals, the smallest, 2**-40 and 2**48 where domains end, the largest, Inf, NaN
SIZES = (0x0000, 0x0001, 0x007F, 0x0080, 0x2B7F, 0x2B80, 0x3F80, 0x577F, 0x5780, 0x7F00, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0)
SCALES = torch.tensor([size - sign for size in SIZES for sign in (0, 0x8000)], dtype=torch.int16)


def _random(n: int, rng: random.Random) -> Tensor:
    return torch.frombuffer(bytearray(rng.randbytes(n)), dtype=torch.uint8) if n else torch.empty(0, dtype=torch.uint8)


def _sections(codec: Codec, n: int) -> tuple[int, int]:
    """(where the scales end, where the codes start)"""
    layout = codec.encoding(torch.float32).format.layout(n)
    return layout.scales_at + 2 * layout.num_blocks, layout.planes[0][1]


def numbers(wire: Tensor, begin: int, end: int) -> Tensor:
    """A section of scales as 16-bit integers, to be written into."""
    return wire[begin:end].view(torch.int16)


def body(codec: Codec, wire: Tensor, n: int, rng: random.Random) -> None:
    wire[HEADER:] = _random(wire.numel() - HEADER, rng)


def codes(codec: Codec, wire: Tensor, n: int, rng: random.Random) -> None:
    at = _sections(codec, n)[1]
    wire[at:] = _random(wire.numel() - at, rng)


def scales(codec: Codec, wire: Tensor, n: int, rng: random.Random) -> None:
    at = _sections(codec, n)[1]
    wire[HEADER:at] = _random(at - HEADER, rng)


def special_scales(codec: Codec, wire: Tensor, n: int, rng: random.Random) -> None:
    section = numbers(wire, HEADER, _sections(codec, n)[1])
    g = torch.Generator().manual_seed(rng.randrange(1 << 30))
    chosen = SCALES[torch.randint(len(SCALES), section.shape, generator=g)]
    section.copy_(torch.where(torch.rand(section.shape, generator=g) < 0.7, chosen, section))


def bits(codec: Codec, wire: Tensor, n: int, rng: random.Random) -> None:
    for _ in range(rng.randrange(1, 6)):
        wire[rng.randrange(HEADER, wire.numel())] ^= 1 << rng.randrange(8)


Way = Callable[[Codec, Tensor, int, random.Random], None]
WAYS: list[Way] = [body, codes, scales, special_scales, bits]


def tame(codec: Codec, wire: Tensor, n: int) -> None:
    """Divide by 2**128 every scale whose sign bit says "lifted" and whose size is 2**112 or more.

    No encoder writes a lifted scale of 2**24 or more. Those near 2**128 overflow when they meet their codes, and a
    fused multiply-add overflows later than a multiplication: there, and only there, backends may differ.
    """
    scales = numbers(wire, HEADER, _sections(codec, n)[0])
    unsigned = scales.int() & 0xFFFF
    scales[(unsigned >= 0xF780) & (unsigned < 0xFF80)] &= ~0x4000


def broken_wires(codec: Codec, n: int, world: int, way: Way, rng: random.Random) -> Tensor:
    wires_WN = cases.wires_of(codec, [cases.content("gaussian", n, seed=rank) for rank in range(world)])
    for rank in range(world):
        if rank == 0 or rng.random() < 0.5:
            way(codec, wires_WN[rank], n, rng)
    return wires_WN


def read_all(codec: Codec, wires_WN: Tensor, n: int, scale: float) -> dict[str, Tensor]:
    """Everything that reads wires, into guarded buffers."""
    results = {}
    narrow = torch.float32 if codec == Identity() else torch.float16
    for what, wires, dtype in (("decoded", wires_WN[:1], torch.float32), ("sum", wires_WN, torch.float32),
                               ("narrow sum", wires_WN, narrow)):  # fmt: skip
        room, out = cases.guarded(n, dtype, device=wires_WN.device)
        codec.decode_sum(wires, out, scale=1.0 if what == "decoded" else scale)
        cases.assert_untouched(room, out, what)
        results[what] = out.cpu()
    room, wire = cases.guarded(wires_WN.shape[1], torch.uint8, device=wires_WN.device)
    codec.recode(wires_WN, wire, n, scale=scale, step=1)
    cases.assert_untouched(room, wire, "recoded")
    return {**results, "recoded": wire.cpu()}


def assert_read_alike(codec: Codec, wires_WN: Tensor, n: int, scale: float, place: Place, way: str) -> None:
    for wire in wires_WN:
        tame(codec, wire, n)
    with use_backend("reference"):
        want = read_all(codec, wires_WN, n, scale)
    with use_backend(place.backend):
        got = read_all(codec, wires_WN.to(place.device), n, scale)
    for what in want:
        cases.assert_same(got[what], want[what], f"{n} elements, {len(wires_WN)} wires, broken {way}: {what}")


@cases.placed(CODECS, ON_CUDA)
def test_backends_read_broken_wires_alike(codec: Codec, place: Place) -> None:
    rng = random.Random(str(codec))
    for way in WAYS:
        for n in rng.sample(LENGTHS, 2):
            wires_WN = broken_wires(codec, n, rng.choice((2, 3)) if place.device == CPU else 2, way, rng)
            assert_read_alike(codec, wires_WN, n, rng.choice((1.0, 1 / 3)), place, way.__name__)


@cases.placed(*([c for c in codecs if 8 <= cases.block_of(c) <= 128] for codecs in (CODECS, ON_CUDA)))
def test_every_pair_of_scales_is_read_alike(codec: Codec, place: Place) -> None:
    """Block by block, two wires with every pair of zero, subnormal, huge, infinite and missing scales."""
    count = len(SCALES) ** 2
    n = count * cases.block_of(codec)
    wires_WN = cases.wires_of(codec, [cases.content("gaussian", n, seed=rank) for rank in range(2)])
    layout = codec.encoding(torch.float32).format.layout(n)
    for rank, scales in enumerate(torch.cartesian_prod(SCALES, SCALES).t()):
        numbers(wires_WN[rank], HEADER, HEADER + 2 * count).copy_(scales)
        if getattr(codec, "mode", "") == "affine":
            any_of = torch.randint(len(SCALES), (count,), generator=cases.seeded(2, rank))
            numbers(wires_WN[rank], layout.minima_at, layout.minima_at + 2 * count).copy_(SCALES[any_of])
    assert_read_alike(codec, wires_WN, n, 1.0, place, "in pairs")


def torture(rounds: int) -> None:
    """Broken wires through every codec, length and way; run where a crash ends a rank."""
    rng = random.Random(rounds)
    for i in range(rounds):
        codec = rng.choice([*cases.CODECS, *CODECS])
        n = rng.choice((rng.randrange(1, 300), rng.randrange(1, 5000)))
        wires_WN = broken_wires(codec, n, rng.choice((1, 2, 5, 9)), WAYS[i % len(WAYS)], rng)
        read_all(codec, wires_WN, n, rng.choice((1.0, 0.3, 0.0, 1e30)))
        spoiled = wires_WN.clone()
        spoiled[rng.randrange(len(spoiled)), rng.randrange(HEADER)] ^= 1 << rng.randrange(8)
        try:
            codec.decode_sum(spoiled, torch.empty(n))
        except WireError:
            pass
        else:
            assert len(spoiled) == 1, f"{codec} took a broken header"  # the key of a wire alone is any


@on_ranks(1)
def test_no_wire_crashes_the_process(group: dist.ProcessGroup) -> None:
    """A rank that died would be told of."""
    for name in cases.SERVING:
        with use_backend(name):
            torture(400 if name in cases.OTHERS else 25)


@cases.over("codec", cases.ONE_OF_EACH)
def test_a_broken_header_is_refused(codec: Codec) -> None:
    """Any change of any of its bits, in either of two wires."""
    good = cases.wires_of(codec, [torch.ones(77), torch.zeros(77)])
    rng = random.Random(1)
    for at in range(HEADER):
        for mask in (1, 0x80, rng.randrange(1, 256)):
            wires_WN = good.clone()
            wires_WN[at % 2, at] ^= mask
            with pytest.raises(WireError, match=r"wire \d"):
                cases.summed(codec, wires_WN, 77)
            with pytest.raises(WireError, match=r"wire \d"):
                cases.recoded(codec, wires_WN, 77)
    for _ in range(20):
        wires_WN = good.clone()
        wires_WN[0, :HEADER] = _random(HEADER, rng)
        with pytest.raises(WireError, match="wire 0"):
            cases.decoded(codec, wires_WN[0], 77)
