"""Sums of narrow wires in integers, for blocks whose scales are near enough to each other.

A scale has 8 bits. Let a unit be the last bit of the smallest scale of a block that is not zero: if no scale is too far
above, all are integers of 16 bits in that unit, and so many of them times a small value add up to less than 2**24. Then
no sum of the reference is ever rounded, and any order and form of the sum gives its bytes. Here four wires change place
with the four neighbours in their words, and one instruction multiplies and adds two scales and two codes.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from thinwire.kernels.triton.memory import INTERPRETED, instruction
from thinwire.kernels.triton.numbers import HUGE_BITS, WIDENER, WIDENER_BITS, bits_of, float_of

LEAST = tl.constexpr(16)  # exponent, as a scale's bits have it: units and their inverses from here on are usual numbers


class Integers(NamedTuple):
    """The scales of the wires of each row as integers."""

    pairs: Any  # two 16-bit scales in a word
    total: Any
    unit: Any


@triton.jit
def integers_of(scale_bits, T: tl.constexpr, WORLD: tl.constexpr):
    """(Integers, odd): what exact_sum takes; odd where scales are too far apart, or not usual."""
    lowest = tl.full((T.rows, T.columns), 0xFFFFFFFF, tl.uint32)
    highest = tl.full((T.rows, T.columns), 0, tl.uint32)
    for w in tl.static_range(WORLD):
        bits = scale_bits[w].to(tl.uint32, bitcast=True)
        lowest = tl.minimum(lowest, bits - 1)  # zero is the highest there
        highest = tl.maximum(highest, bits)
    least = tl.maximum(((lowest + 1) >> 23).to(tl.int32), LEAST)
    odd = (lowest < (LEAST << 23) - 1) | (highest >= HUGE_BITS)
    odd = odd | ((highest >> 23).to(tl.int32) - least > furthest(T.reach, WORLD))
    inverse = float_of((261 + (T.bits == 1) - least) << 23)  # of 1 bit scales are even: its levels are halves
    words = ()
    total = tl.full((T.rows, T.columns), 0, tl.int32)
    for w in tl.static_range(WORLD):
        word = bits_of(tl.fma(float_of(scale_bits[w]), inverse, WIDENER))
        words = words + (word,)
        total = total + (word - WIDENER_BITS)
    pairs = ()
    for w in tl.static_range(0, WORLD, 2):
        if w + 1 < WORLD:
            pairs = pairs + (permuted(words[w], words[w + 1], 0x5410),)
        else:
            pairs = pairs + (words[w] & 0xFFFF,)
    return Integers(pairs, total, float_of((least - 7) << 23)), odd.to(tl.int32)


@triton.constexpr_function
def furthest(reach, world):
    """How many powers of two scales may be apart: at most 7, and values up to `reach` add up to 2**24 units at most."""
    return max(d for d in range(8) if d == 0 or reach * world << 8 + d <= 1 << 24)


@triton.jit
def exact_sum(words, scales, T: tl.constexpr, WORLD: tl.constexpr):
    """The sum of wires whose scales are these integers."""
    ZERO: tl.constexpr = zero_of(T.lloyd, T.bits, T.reach)
    turned = ()
    for w in tl.static_range(0, WORLD, 4):
        for bank in tl.static_range(T.banks[0]):
            four = ()
            for k in tl.static_range(4):
                if w + k < WORLD:
                    four = four + (words[(w + k) * T.count + bank],)
                else:
                    four = four + (tl.zeros((T.rows, T.columns), tl.int32),)
            if T.lloyd and T.bits == 4:
                turned = turned + _levels_of(four, T)
            else:
                turned = turned + _turned(four)
    starts = ()
    units = ()
    for place in tl.static_range(4 // T.bits if T.bits < 4 else 1):
        starts = starts + ((scales.total * -ZERO if T.bits > 1 else -(scales.total >> 1)) << (place * T.bits),)
        units = units + (scales.unit * (2.0 ** -(place * T.bits)),)
    z = ()
    for i in tl.static_range(T.size):
        z = z + (_sum_of(i // 4, i % 4, turned, starts, units, scales.pairs, T, WORLD),)
    return z


@triton.constexpr_function
def zero_of(lloyd, bits, reach):
    """What the bytes of codes are more than their values; of 1 bit it is a half."""
    return 0 if lloyd and bits == 4 else reach


@triton.jit
def _sum_of(
    lane: tl.constexpr, v: tl.constexpr, turned, starts, units, pairs, T: tl.constexpr, WORLD: tl.constexpr
):  # fmt: skip
    BANK: tl.constexpr = lane % T.banks[0]
    PLACE: tl.constexpr = lane // T.banks[0]
    SIGNED: tl.constexpr = T.lloyd and T.bits == 4
    PER: tl.constexpr = 8 if SIGNED else 4  # tensors of a bank
    IN_PLACE: tl.constexpr = 0 if T.bits == 4 else PLACE % (4 // T.bits)  # codes this many places up stay there
    total = starts[IN_PLACE]
    for w in tl.static_range(0, WORLD, 4):
        if SIGNED:
            four = turned[(w // 4 * T.banks[0] + BANK) * PER + PLACE * 4 + v]
        else:
            four = _field(turned[(w // 4 * T.banks[0] + BANK) * PER + v], PLACE, T)
        total = dotted(pairs[w // 2], four, total, 0, SIGNED)
        if w + 2 < WORLD:
            total = dotted(pairs[w // 2 + 1], four, total, 1, SIGNED)
    return total.to(tl.float32) * units[IN_PLACE]


@triton.jit
def _turned(four):
    """Four words of four bytes: byte v of all in word v, the first word's lowest."""
    low = permuted(four[0], four[1], 0x5140)
    high = permuted(four[0], four[1], 0x7362)
    upper_low = permuted(four[2], four[3], 0x5140)
    upper_high = permuted(four[2], four[3], 0x7362)
    return (
        permuted(low, upper_low, 0x5410),
        permuted(low, upper_low, 0x7632),
        permuted(high, upper_high, 0x5410),
        permuted(high, upper_high, 0x7632),
    )


@triton.jit
def _field(four, PLACE: tl.constexpr, T: tl.constexpr):
    """The values at a place of every byte, reach more than they are; of 1 bit the codes. The lower half of a byte stays
    where it is, so that values are 2**(place * bits) times too large.
    """
    SHIFT: tl.constexpr = PLACE * T.bits // 4 * 4
    LEFT: tl.constexpr = PLACE * T.bits - SHIFT
    codes = (four >> SHIFT) & in_bytes(((1 << T.bits) - 1) << LEFT)
    if T.lloyd and T.bits == 2:
        INNER: tl.constexpr = T.levels[0]
        OUTER: tl.constexpr = T.levels[1]
        return codes * (OUTER - INNER) + (codes & in_bytes(2 << LEFT)) * ((3 * INNER - OUTER) // 2)
    else:
        return codes


@triton.constexpr_function
def in_bytes(value):
    """The same in all four bytes, as a signed number."""
    return (value * 0x01010101 + (1 << 31)) % (1 << 32) - (1 << 31)


# --- 16 levels --------------------------------------------------------------------------------------------------------


@triton.jit
def _levels_of(four, T: tl.constexpr):
    """The levels of four words of eight codes, as signed bytes: of each place and neighbour those of all words."""
    found = ()
    for place in tl.static_range(2):
        low = _nibbles(four[0], four[1], place)
        high = _nibbles(four[2], four[3], place)
        for half in tl.static_range(2):
            codes = permuted(low, high, 0x7362 if half else 0x5140)
            rest = codes & 0x77777777
            top = (codes >> 3) & 0x11111111
            found = found + (_four_levels(rest, top, T), _four_levels(rest >> 16, top >> 16, T))
    return found


@triton.jit
def _nibbles(a, b, UPPER: tl.constexpr):
    """The lower, or UPPER, halves of all bytes of two words: those of `a` below."""
    if UPPER:
        return ((a >> 4) & 0x0F0F0F0F) | (b & in_bytes(0xF0))
    else:
        return (a & 0x0F0F0F0F) | ((b << 4) & in_bytes(0xF0))


@triton.jit
def _four_levels(rest, top, T: tl.constexpr):
    """The signed levels of four codes, from their lower three bits and their highest."""
    if INTERPRETED:
        found = tl.zeros_like(rest)
        for i in tl.static_range(4):
            index = (rest >> (4 * i)) & 7
            above = (top >> (4 * i)) & 1
            level = tl.zeros_like(rest)
            for k in tl.static_range(8):
                level = tl.where(index == k, tl.where(above != 0, T.levels[k], -T.levels[7 - k]), level)
            found = found | ((level & 0xFF) << (8 * i))
        return found
    else:
        table = ()
        for k in tl.static_range(4):
            table = table + (tl.full(rest.shape, table_word(T.levels, k), tl.int32),)
        return instruction(FOUR_LEVELS, "=r,r,r,r,r,r,r", (rest, top) + table)


# PTX: both halves of the table by the lower three bits of each code, and the choice between them by the upper.
FOUR_LEVELS = tl.constexpr("""{
    .reg .b32 positive, negative, which;
    prmt.b32 positive, $3, $4, $1;
    prmt.b32 negative, $5, $6, $1;
    prmt.b32 which, 0xff00, 0, $2;
    lop3.b32 $0, which, positive, negative, 0xCA;
}""")


@triton.constexpr_function
def table_word(levels, k):
    """Word k of the four that hold the levels as bytes: the positive ones, then the negative."""
    values = [level for level in levels]
    values = [*values, *(-level for level in reversed(values))]
    word = sum((value & 0xFF) << (8 * i) for i, value in enumerate(values[4 * k : 4 * k + 4]))
    return word - ((word >> 31) << 32)


# --- instructions -----------------------------------------------------------------------------------------------------


@triton.jit
def permuted(a, b, SELECT: tl.constexpr):
    """Four bytes of two words, each chosen by a hexadecimal digit: 0..3 of a, 4..7 of b; the last digit the lowest."""
    if INTERPRETED:
        chosen = tl.zeros_like(a)
        for i in tl.static_range(4):
            byte = (b if (SELECT >> (4 * i)) & 4 else a) >> (8 * ((SELECT >> (4 * i)) & 3))
            chosen = chosen | ((byte & 0xFF) << (8 * i))
        return chosen
    else:
        return instruction(permute_text(SELECT), "=r,r,r", (a, b))


@triton.constexpr_function
def permute_text(select):
    """PTX of a byte permutation."""
    return f"prmt.b32 $0, $1, $2, {select};"


@triton.jit
def dotted(pair, four, total, UPPER: tl.constexpr, SIGNED: tl.constexpr):
    """total + both 16-bit numbers of `pair` times the lower, or UPPER, two bytes of `four`."""
    if INTERPRETED:
        for k in tl.static_range(2):
            byte = (four >> (16 * UPPER + 8 * k)) & 0xFF
            if SIGNED:
                byte = (byte ^ 128) - 128
            total = total + ((pair >> (16 * k)) & 0xFFFF) * byte
        return total
    else:
        return instruction(dot_text(UPPER, SIGNED), "=r,r,r,r", (pair, four, total))


@triton.constexpr_function
def dot_text(upper, signed):
    """PTX of two multiplications and additions of integers."""
    return f"dp2a.{'hi' if upper else 'lo'}.u32.{'s32' if signed else 'u32'} $0, $1, $2, $3;"
