"""The PTX of the Triton kernels, which the interpreter does not see, run instruction by instruction in Python.

ptxas and a GPU take the same texts; what they are to compute is what the kernels do under the interpreter.
"""

import importlib.util
import random
import re
import struct
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch

from thinwire.kernels.schema import LLOYD

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

from thinwire.kernels.triton import exact_sums, four_bytes, launch, lloyd, memory, rotation
from thinwire.wire import Kind

WORDS = [0, 1, 0x80, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, *(random.Random(7).getrandbits(32) for _ in range(200))]


def float_of(bits: int) -> float:
    (value,) = struct.unpack("<f", struct.pack("<I", bits))
    return float(value)


def bits_of(value: float | Fraction) -> int:
    """The bits of the fp32 number nearest to a fraction of less than 53 bits."""
    (bits,) = struct.unpack("<I", struct.pack("<f", float(value)))
    return int(bits)


def byte(word: int, k: int) -> int:
    return word >> 8 * k & 0xFF


def prmt(a: int, b: int, select: int) -> int:
    """Each digit of `select` chooses a byte of b:a; its highest bit takes the byte's sign instead."""
    chosen = 0
    for i in range(4):
        digit = select >> 4 * i & 15
        found = byte(a | b << 32, digit & 7)
        chosen |= (255 * (found >> 7) if digit & 8 else found) << 8 * i
    return chosen


def dp2a(upper: bool) -> Callable[[int, int, int], int]:
    return lambda a, b, c: (a & 0xFFFF) * byte(b, 2 * upper) + (a >> 16) * byte(b, 2 * upper + 1) + c & 0xFFFFFFFF


def saturated(a: int, b: int, c: int) -> int:
    exact = Fraction(float_of(a)) * Fraction(float_of(b)) + Fraction(float_of(c))
    return bits_of(min(max(exact, Fraction(0)), Fraction(1)))


MEANING: dict[str, Callable[..., int]] = {
    "prmt.b32": prmt,
    "dp2a.lo.u32.u32": dp2a(False),
    "dp2a.hi.u32.u32": dp2a(True),
    "dp4a.u32.u32": lambda a, b, c: sum(byte(a, k) * byte(b, k) for k in range(4)) + c & 0xFFFFFFFF,
    "popc.b32": lambda a: a.bit_count(),
    "fma.rn.sat.f32": saturated,
    "and.b32": lambda a, b: a & b,
    "lop3.b32": lambda a, b, c, table: sum(
        (table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i for i in range(32)
    ),
    "setp.ne.b32": lambda a, b: int(a != b),
    "mov.b32": lambda a: a,
    "neg.f32": lambda a: a ^ 0x80000000,
}


def run(text: str, *operands: int) -> int:
    """What a text leaves in $0."""
    named = {f"${i + 1}": value for i, value in enumerate(operands)}

    def value(name: str) -> int:
        if name in named:
            return named[name]
        return int(name[2:], 16) if name.startswith("0f") else int(name, 0)

    for line in text.strip("{} ").split(";"):
        guard, op, rest = re.fullmatch(r"\s*(?:@(\w+) )?\s*(\S*)(.*)", line).groups()  # type: ignore[union-attr]
        if op and op != ".reg" and (guard is None or named[guard]):
            target, *sources = rest.replace(" ", "").split(",")
            named[target] = MEANING[op](*map(value, sources))
    return named["$0"]


@pytest.mark.parametrize("select", [0x5140, 0x7362, 0x5410, 0x7632])
def test_permuted_is_what_its_digits_say(select: int) -> None:
    for a, b in zip(WORDS, reversed(WORDS), strict=True):
        bytes_of_both = [*a.to_bytes(4, "little"), *b.to_bytes(4, "little")]
        want = bytes(bytes_of_both[select >> 4 * i & 7] for i in range(4))
        assert run(memory.filled(four_bytes.PERMUTE.value, select), a, b) == int.from_bytes(want, "little")


def test_levels_come_in_two_bytes() -> None:
    table, levels = LLOYD[4], words_in_memory(4)[16:]
    for word in WORDS:
        below = run(four_bytes.CHOOSE.value, levels[0], levels[1], word)
        above = run(four_bytes.CHOOSE.value, levels[2], levels[3], word ^ 0x8888)
        found = [byte(below, i) + byte(above, i) - 255 for i in range(4)]
        assert found == [table.signed_levels[word >> 4 * i & 15] for i in range(4)]


def test_four_levels_are_one_word() -> None:
    (found,) = words_in_memory(2)[4:5]
    for word in WORDS:
        levels = run(four_bytes.CHOOSE.value, found, found, word & 0x3333)
        found_levels = [byte(levels, i) - 128 for i in range(4)]
        assert found_levels == [LLOYD[2].signed_levels[word >> 4 * i & 3] for i in range(4)]


def words_in_memory(bits: int) -> list[int]:
    """What kernels of levels find in memory."""
    return [word & 0xFFFFFFFF for word in launch.levels(Kind.LLOYD, bits, torch.device("cpu")).tolist()]


def test_mixed_takes_each_bit_from_one_of_two_words() -> None:
    for a, b in zip(WORDS, reversed(WORDS), strict=True):
        assert run(memory.filled(four_bytes.MIX.value, 0x0F0F0F0F), a, b) == a & 0x0F0F0F0F | b & 0xF0F0F0F0


@pytest.mark.parametrize("upper", [False, True])
def test_dotted_adds_two_products(upper: bool) -> None:
    for pair, four in zip(WORDS, reversed(WORDS), strict=True):
        low, high = struct.pack("<I", four)[2 * upper :][:2]
        want = 5 + (pair & 0xFFFF) * low + (pair >> 16) * high
        assert run((four_bytes.DOT_HIGH if upper else four_bytes.DOT_LOW).value, pair, four, 5) == want & 0xFFFFFFFF


def test_squared_and_bits_set() -> None:
    for word in WORDS:
        assert run(four_bytes.SQUARE.value, word, 3) == 3 + sum(b * b for b in word.to_bytes(4, "little"))
        assert run(four_bytes.COUNT.value, word) == bin(word).count("1")


@pytest.mark.parametrize("v", range(4))
def test_flipped_negates_where_the_bit_is_set(v: int) -> None:
    for x, signs in zip(WORDS, reversed(WORDS), strict=True):
        assert run(memory.filled(rotation.FLIP.value, 1 << v), x, signs) == x ^ (signs >> v & 1) << 31


def test_the_parabola_gives_every_cell_its_rank() -> None:
    rounder = Fraction(float(lloyd.ROUNDER.value))
    slope, bend = (Fraction(float_of(bits_of(c.value))) for c in (lloyd.RANK_SLOPE, lloyd.RANK_BEND))
    offset = bits_of(-(rounder + lloyd.RANK_START.value) / 128)
    for cell in [*range(6000), 1 << 20]:
        near = Fraction(float_of(run(lloyd.SATURATE.value, bits_of(rounder + cell), offset)))
        inner = Fraction(float_of(bits_of(near * bend + slope)))
        rank = bits_of(inner * near + rounder) - bits_of(rounder)
        assert rank == sum(cell >= edge for edge in LLOYD[4].edges), cell


@pytest.mark.parametrize("reach", [1, 2, 8, 20, 104])
@pytest.mark.parametrize("world", range(2, 9))
def test_sums_of_scales_so_far_apart_are_exact(reach: int, world: int) -> None:
    largest = 255 << exact_sums.furthest(reach, world)  # in units
    assert largest < 1 << 15
    assert reach * world * largest < 1 << 24
    if reach <= 20:
        assert world * largest * max(reach, 8) < 1 << 22  # 8: a code of 1 bit, or twice 2 of 2 bits, at its last place
