"""The wire format as bytes: golden wires, the header, and every wire and buffer that must be refused."""

import math
import re
import struct
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import cases
from thinwire import BlockInt, Cast, Codec, CodecError, Identity, Lloyd, WireError, codec as make, use_backend
from thinwire.kernels import hashing

pytestmark = pytest.mark.usefixtures("served")
each_backend = pytest.mark.parametrize("backend", cases.SERVING)
one_of_each = cases.over("codec", cases.ONE_OF_EACH)


# What version 1 of the format says of ten numbers, step 7. A change of these bytes is a change of the version.
INPUT = torch.tensor([0.0, 1.0, -2.5, 3.140625, 100.0, -0.0078125, 0.001, -77.25, 42.0, -6.5])
INPUTS = {
    "numbers": INPUT,
    "tiny": INPUT * 2.0**-133,
    "huge": INPUT * 2.0**120,
    "broken": torch.cat((torch.tensor([math.nan]), INPUT)),
}
GOLDEN_WIRES = """
none numbers
    54570100200000000000000000000000 00000000000000000a00000000000000
    000000000000803f000020c000004940 0000c842000000bc6f12833a00809ac2 000028420000d0c00000000000000000
bf16 numbers
    54570101100000000000000000000000 00000000000000000a00000000000000
    0000803f20c04940c84200bc833a9ac2 2842d0c0000000000000000000000000
fp16:block=8 numbers
    54570101100100000800000000000000 00000000000000000a00000000000000
    803b003b000000000000000000000000 0000005c00e14862407600c01934d4f4 407580ea000000000000000000000000
e4m3 numbers
    54570101080200008000000000000000 00000000000000000a00000000000000
    003f0000000000000000000000000000 0040ca4d748801f26ad5000000000000
e5m2:block=8 numbers
    54570101080300000800000000000000 00000000000000000a00000000000000
    803b003b000000000000000000000000 005ce16276c034f575ea000000000000
int8 numbers
    54570102080000008000000000000000 00000000000000000a00000000000000
    4a3f0000000000000000000000000000 80817d84ff80801eb578808080808080
int4 numbers
    54570102040000008000000000000000 00000000000000000a00000000000000
    65410000000000000000000000000000 b88888888f8888830000000000000000
int3:block=8 numbers
    54570102030000000800000000000000 00000000000000000a00000000000000
    05426041000000000000000000000000 308003007fff00000000000000000000
int5 numbers
    54570102050000008000000000000000 00000000000000000a00000000000000
    d5400000000000000000000000000000 60f000000f000004ffe7000000000000
int8:mode=affine numbers
    54570102080100008000000000000000 00000000000000000a00000000000000
    333f0000000000000000000000000000 9bc20000000000000000000000000000 6f706b73fe6f6f00ab66666666666666
int6:rounding=stochastic,seed=1 numbers
    54570102060000008000000000000000 00000000000000000a00000000000000
    4e400000000000000000000000000000 d0e10f010f000008ae9aa9a200000000
lloyd2:block=32 numbers
    54570103020100002000000000000000 44da302fa84930250a00000000000000
    1c400000000000000000000000000000 a57233a5000000000000000000000000
lloyd1:block=32,rotate=false numbers
    54570103010000002000000000000000 00000000000000000a00000000000000
    67410000000000000000000000000000 fde30000000000000000000000000000
lloyd4:block=32,scale=unbiased numbers
    54570103040100002000000000000000 44da302fa84930250a00000000000000
    603f0000000000000000000000000000 97dbdba7864232850000000000000000
int8 tiny
    54570102080000008000000000000000 00000000000000000a00000000000000
    ca9c0000000000000000000000000000 80817d84ff80801eb578808080808080
int8 huge
    54570102080000008000000000000000 00000000000000000a00000000000000
    4a7b0000000000000000000000000000 80817d84ff80801eb578808080808080
int8:block=8 broken
    54570102080000000800000000000000 00000000000000000b00000000000000
    c07f1c3f000000000000000000000000 000000000000000001c5758080808080
int4:mode=affine tiny
    54570102040100008000000000000000 00000000000000000a00000000000000
    be9e0000000000000000000000000000 1ba00000000000000000000000000000 a76766676f6767600000000000000000
"""  # codec and input, then header and sections by 16 bytes
GOLDEN = [entry.split() for entry in re.split(r"\n(?=\S)", GOLDEN_WIRES.strip())]


@each_backend
@cases.over("golden", GOLDEN)
def test_golden_wires(golden: list[str], backend: str) -> None:
    name, given, *wire = golden
    with use_backend(backend):
        got = bytes(cases.wire_of(make(name), INPUTS[given], step=7).tolist())
    assert got.hex(" ", -16).split() == wire


@each_backend
def test_golden_numbers(backend: str) -> None:
    """The golden wire of int8, read by hand: scale 0x3f4a = 0.7890625, codes less 128."""
    (golden,) = (wire for name, given, *wire in GOLDEN if (name, given) == ("int8", "numbers"))
    wire = torch.tensor(list(bytes.fromhex("".join(golden))))
    codes = [0, 1, -3, 4, 127, 0, 0, -98, 53, -8]
    with use_backend(backend):
        assert cases.decoded(BlockInt(8), wire.to(torch.uint8), 10).tolist() == [0.7890625 * code for code in codes]


HEADERS = [  # codec, then kind, bits, variant and block
    (Identity(), 0, 32, 0, 0),
    (Cast("bf16"), 1, 16, 0, 0),
    (Cast("fp16", 64), 1, 16, 1, 64),
    (Cast("e4m3"), 1, 8, 2, 128),
    (Cast("e5m2"), 1, 8, 3, 128),
    (BlockInt(5, 2**32 - 8), 2, 5, 0, 2**32 - 8),
    (BlockInt(3, 40, "affine", "stochastic", seed=9), 2, 3, 1, 40),
    (Lloyd(2, 64, rotate=False), 3, 2, 0, 64),
    (Lloyd(4, 1024, seed=3), 3, 4, 1, 1024),
]


@cases.over("header", HEADERS)
def test_header_fields(header: tuple[Codec, int, int, int, int]) -> None:
    codec, kind, bits, variant, block = header
    wire = cases.wire_of(codec, torch.ones(21), step=5)
    rotated = isinstance(codec, Lloyd) and codec.rotate
    key = hashing.key(codec.seed, 5, hashing.ROTATION) if rotated else 0
    want = (b"TW", 1, kind, bits, variant, 0, block, 0, key, 21)
    assert struct.unpack("<2sBBBBHIIQQ", bytes(wire[:32].tolist())) == want
    for number, dtype in enumerate((*cases.DTYPES, torch.float64) if kind == 0 else ()):
        wire = cases.wire_of(codec, torch.ones(3, dtype=dtype))
        assert wire[3:6].tolist() == [0, 8 * dtype.itemsize, number]


@one_of_each
def test_an_empty_tensor_is_a_header(codec: Codec) -> None:
    wire = cases.wire_of(codec, torch.empty(0))
    assert wire.numel() == codec.wire_bytes(0) == 32
    assert cases.summed(codec, torch.stack((wire, wire)), 0).shape == (0,)
    cases.assert_same(cases.recoded(codec, wire[None], 0), wire)


N = 100


def acts(codec: Codec, wire: Tensor) -> list[Callable[[], None]]:
    """Everything that reads a wire; with `wire` broken each must raise and leave its output as it was."""
    good = torch.zeros(codec.wire_bytes(N), dtype=torch.uint8)
    return [
        lambda: codec.decode(wire, torch.zeros(N)),
        lambda: codec.decode_sum(wire[None], torch.zeros(N)),
        lambda: codec.recode(wire[None], good, N),
    ]


def assert_refused(codec: Codec, wire: Tensor, said: str) -> None:
    for act in acts(codec, wire):
        with pytest.raises(WireError, match=said):
            act()


@one_of_each
def test_wrong_length(codec: Codec) -> None:
    wire = cases.wire_of(codec, torch.ones(N))
    right = rf"expected wires of {wire.numel()} bytes for {N} elements, one per rank, got shape"
    longer = (torch.cat((wire, wire[:16])), torch.cat((wire, wire)))
    for wrong in (wire[:-1], wire[:32], wire[:31], wire[:1], wire[:0], *longer):
        assert_refused(codec, wrong, right)
        with pytest.raises(WireError, match=right):
            codec.encode(torch.ones(N), wrong)


@one_of_each
def test_wrong_dtype_device_or_dimensions(codec: Codec) -> None:
    wire = cases.wire_of(codec, torch.ones(N))
    for dtype in (torch.int8, torch.int32, torch.float32, torch.bool):
        assert_refused(codec, wire.to(dtype), f"a wire is a torch.uint8 tensor, got {dtype}")
        with pytest.raises(WireError, match=r"torch\.uint8"):
            codec.encode(torch.ones(N), wire.to(dtype))
    away, x = wire.to("meta"), torch.ones(N)
    recode = partial(codec.recode, wire[None])
    for act in (lambda: codec.decode(away, x), lambda: codec.encode(x, away), lambda: recode(away, N)):
        with pytest.raises(WireError, match="on one device, got meta and cpu"):
            act()
    for dims in (wire[None], wire.view(2, -1), wire[0]):
        with pytest.raises(WireError, match="1-D uint8 tensor"):
            codec.encode(torch.ones(N), dims)
        with pytest.raises(WireError, match=r"got shape|1-D"):
            codec.decode(dims, torch.zeros(N))


@one_of_each
def test_a_matrix_of_wires_has_contiguous_rows(codec: Codec) -> None:
    wires_WN = cases.wires_of(codec, [torch.ones(N), torch.zeros(N)])
    spread = torch.zeros(2, 2 * wires_WN.shape[1], dtype=torch.uint8)[:, ::2].copy_(wires_WN)
    good = torch.zeros(wires_WN.shape[1], dtype=torch.uint8)
    for wrong, said in (
        (spread, r"must be contiguous, got strides \(\d+, 2\)"),
        (wires_WN.t().contiguous().t(), "must be contiguous"),
        (wires_WN[0], "one per rank, got shape"),
        (wires_WN[None], "one per rank, got shape"),
        (wires_WN[:0], r"got shape \(0, "),
        (wires_WN[:, :-1], "expected wires of"),
    ):
        with pytest.raises(WireError, match=said):
            codec.decode_sum(wrong, torch.zeros(N))
        with pytest.raises(WireError, match=said):
            codec.recode(wrong, good, N)
    for act in (lambda: codec.encode(torch.ones(N), spread[0]), lambda: codec.decode(spread[0], torch.zeros(N))):
        with pytest.raises(WireError, match="must be contiguous"):
            act()


BROKEN_HEADERS = [  # where, the byte there, and what is said
    (0, 0x55, "does not start with b'TW'.*not a thinwire wire"),
    (1, 0, "does not start with b'TW'"),
    (2, 2, "has version 2, this thinwire reads version 1: use one version on all ranks"),
    (2, 0, "has version 0"),
    (3, 3, "was encoded as lloyd bits=8.*expected block_int bits=8"),
    (3, 200, "was encoded as .*200 bits=8"),
    (4, 7, "bits=7 .*expected block_int bits=8"),
    (5, 1, "variant=1 .*expected block_int bits=8 variant=0"),
    (8, 64, "block=64 .*block=128"),
    (11, 1, "block=16777344"),
    (24, 99, "numel=99, .*numel=100"),
    (31, 128, "numel=9223372036854775908"),
    (6, 1, "non-zero reserved bytes"),
    (15, 1, "non-zero reserved bytes"),
    (16, 1, "key"),  # a wire that is not rotated has none
]


@cases.over("rank", [0, 2])
@cases.over("broken", BROKEN_HEADERS)
def test_wrong_header(broken: tuple[int, int, str], rank: int) -> None:
    at, value, said = broken
    wires_WN = cases.wires_of(BlockInt(8), [torch.ones(N)] * 3)
    wires_WN[rank, at] = value
    out = torch.full((N,), 7.0)
    with pytest.raises(WireError, match=f"wire {rank} .*{said}"):
        BlockInt(8).decode_sum(wires_WN, out)
    assert (out == 7).all()
    wire = torch.full((wires_WN.shape[1],), 9, dtype=torch.uint8)
    with pytest.raises(WireError, match=said):
        BlockInt(8).recode(wires_WN, wire, N)
    assert (wire == 9).all()


UNLIKE = [
    *(("int8", "int8:mode=affine"), ("int8", "e4m3"), ("int4", "lloyd4:block=128,rotate=false"), ("fp16", "bf16")),
    *(("e4m3", "e5m2"), ("int8:block=128", "int8:block=256"), ("lloyd4", "lloyd4:rotate=false"), ("lloyd2", "lloyd3")),
]


@cases.over("pair", UNLIKE)
def test_wire_of_another_codec(pair: tuple[str, str]) -> None:
    encoder, decoder = map(make, pair)
    wire = cases.wire_of(encoder, torch.ones(N))
    n = decoder.wire_bytes(N)
    fitted = torch.cat((wire, wire.new_zeros(max(0, n - wire.numel()))))[:n]
    assert_refused(decoder, fitted, "encode and decode with the same codec and length")


def test_wire_of_another_length_or_dtype() -> None:
    assert BlockInt(8).wire_bytes(99) == BlockInt(8).wire_bytes(N)
    assert_refused(BlockInt(8), cases.wire_of(BlockInt(8), torch.ones(99)), "numel=99, expected .*numel=100")
    halves = cases.wire_of(Identity(), torch.ones(N, dtype=torch.float16))
    with pytest.raises(WireError, match=r"variant=2 .*expected identity bits=16 variant=1"):
        Identity().decode(halves, torch.zeros(N, dtype=torch.bfloat16))


def test_wires_rotated_by_unlike_keys_do_not_add() -> None:
    x = torch.ones(N)
    other_step = torch.stack((cases.wire_of(Lloyd(4), x, step=1), cases.wire_of(Lloyd(4), x, step=2)))
    other_seed = torch.stack((cases.wire_of(Lloyd(4), x), cases.wire_of(Lloyd(4, seed=1), x)))
    for wires_WN in (other_step, other_seed):
        said = "wire 1 was rotated with key 0x.*all ranks must encode with the same seed"
        with pytest.raises(WireError, match=said):
            cases.summed(Lloyd(4), wires_WN, N)
        with pytest.raises(WireError, match="same seed and step"):
            cases.recoded(Lloyd(4), wires_WN, N)


def test_a_wire_carries_its_key() -> None:
    """decode needs neither seed nor step: the key is in the header, and recode keeps it."""
    x = cases.content("gaussian", 300)
    wire = cases.wire_of(Lloyd(4, seed=77), x, step=12)
    cases.assert_same(cases.decoded(Lloyd(4), wire, 300), cases.decoded(Lloyd(4, seed=77), wire, 300))
    again = cases.recoded(Lloyd(4, seed=5), wire[None], 300, step=99)
    assert torch.equal(again[:32], wire[:32])


@one_of_each
def test_wrong_outputs(codec: Codec) -> None:
    wire = cases.wire_of(codec, torch.ones(N))
    for n in (0, 1, N - 1, N + 1, 2 * N):
        with pytest.raises(WireError):
            codec.decode(wire, torch.zeros(n))
        with pytest.raises(WireError):
            codec.recode(wire[None], torch.zeros_like(wire), n)
    for dtype in (torch.int32, torch.bool, torch.complex64, torch.uint8):
        with pytest.raises(CodecError, match="takes"):
            codec.decode(wire, torch.zeros(N, dtype=dtype))
    with pytest.raises(WireError, match="on one device, got cpu and meta"):
        codec.decode(wire, torch.zeros(N, device="meta"))
    with pytest.raises(WireError, match="expected wires of"):
        codec.recode(wire[None], torch.zeros(wire.numel() + 16, dtype=torch.uint8), N)
    with pytest.raises(WireError, match="1-D"):
        codec.recode(wire[None], torch.zeros_like(wire)[None], N)
