"""Sums of narrow wires in integers, for blocks whose scales are near enough to each other.

A scale has 8 bits. Let a unit be the last bit of the smallest scale of a block that is not zero: if no scale is too far
above, all are integers of 16 bits in that unit, and so many of them times a small value add up to less than 2**24. Then
no sum of the reference is ever rounded, and any order and form of the sum gives its bytes. Here four wires change place
with the four neighbors in their words, and one instruction multiplies and adds two scales and two codes.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from thinwire.kernels.triton.four_bytes import chosen, dotted, in_bytes, mixed, permuted
from thinwire.kernels.triton.memory import look_up
from thinwire.kernels.triton.numbers import HUGE_BITS, ROUNDER, ROUNDER_BITS, WIDENER, WIDENER_BITS, bits_of, float_of

LEAST = tl.constexpr(16)  # exponent, as a scale's bits have it: units and their inverses from here on are usual numbers


class Integers(NamedTuple):
    """The scales of the wires of each row as integers."""

    pairs: Any  # two 16-bit scales in a word
    total: Any
    unit: Any


@triton.jit
def integers_of(scale_bits, T: tl.constexpr):
    """(Integers, odd): what exact_sum takes; odd where scales are too far apart, or not usual."""
    lowest = tl.full((T.rows, T.columns), 0xFFFFFFFF, tl.uint32)
    highest = tl.full((T.rows, T.columns), 0, tl.uint32)
    for w in tl.static_range(T.world):
        bits = scale_bits[w].to(tl.uint32, bitcast=True)
        lowest = tl.minimum(lowest, bits - 1)  # zero is the highest there
        highest = tl.maximum(highest, bits)
    least = tl.maximum(((lowest + 1) >> 23).to(tl.int32), LEAST)
    odd = (lowest < (LEAST << 23) - 1) | (highest >= HUGE_BITS)
    odd = odd | ((highest >> 23).to(tl.int32) - least > furthest(T.reach, T.world))
    inverse = float_of((261 + (T.bits == 1) - least) << 23)  # of 1 bit scales are even: its levels are halves
    words = ()
    total = tl.full((T.rows, T.columns), 0, tl.int32)
    for w in tl.static_range(T.world):
        word = bits_of(tl.fma(float_of(scale_bits[w]), inverse, WIDENER))
        words = words + (word,)
        total = total + (word - WIDENER_BITS)
    pairs = ()
    for w in tl.static_range(0, T.world, 2):
        if w + 1 < T.world:
            pairs = pairs + (permuted(words[w], words[w + 1], 0x5410),)
        else:
            pairs = pairs + (words[w] & 0xFFFF,)
    return Integers(pairs, total, float_of((least - 7) << 23)), odd.to(tl.int32)


@triton.constexpr_function
def furthest(reach, world):
    """How many powers of two scales may be apart: at most 6, and values up to `reach` add up to 2**24 units at most."""
    return max(d for d in range(7) if d == 0 or reach * world << 8 + d <= 1 << 24)


@triton.jit
def exact_sum(words, scales, levels, T: tl.constexpr):
    """(z, unit): the sum of wires whose scales are these integers, in a unit that is a power of two for each row."""
    if T.gaussian and T.bits > 1:
        return _sum_levels(words, scales, levels, T), scales.unit
    else:
        return _sum_codes(words, scales, T), tl.full((T.rows, T.columns), 1.0, tl.float32)


@triton.jit
def _sum_codes(words, scales, T: tl.constexpr):
    turned = ()
    for w in tl.static_range(0, T.world, 4):
        for bank in tl.static_range(T.banks[0]):
            turned = turned + _turned(_four(words, w, bank, T))
    starts = ()
    units = ()
    for place in tl.static_range(4 // T.bits):  # of half a byte
        zeros = scales.total >> 1 if T.bits == 1 else scales.total * T.reach
        starts = starts + ((-zeros << (place * T.bits)) + ROUNDER_BITS,)
        units = units + (scales.unit * (2.0 ** -(place * T.bits)),)
    return [_sum_fields(i // 4, i % 4, turned, starts, units, scales.pairs, T) for i in T.each]


@triton.jit
def _sum_fields(lane: tl.constexpr, v: tl.constexpr, turned, starts, units, pairs, T: tl.constexpr):
    PLACE: tl.constexpr = lane // T.banks[0]
    total = starts[PLACE % len(starts)]
    for w in tl.static_range(0, T.world, 4):
        four = _field(turned[w * T.banks[0] + lane % T.banks[0] * 4 + v], PLACE, T)
        total = _added(total, four, pairs, w, T)
    unit = units[PLACE % len(starts)]
    return tl.fma(float_of(total), unit, unit * -ROUNDER)


@triton.jit
def _sum_levels(words, scales, levels, T: tl.constexpr):
    zero = scales.total >> 31  # not known to ptxas, which would keep the table where each use takes a move
    table = ()
    for k in tl.static_range(T.bits * T.bits // 4):
        table = table + (look_up(levels, zero, -2 * T.half - k),)
    below = ()
    above = ()
    for w in tl.static_range(0, T.world, 4):
        for bank in tl.static_range(T.banks[0]):
            low, high = _levels_of(_four(words, w, bank, T), table, T)
            below = below + low
            above = above + high
    z = ()
    for i in tl.static_range(T.size):
        if T.bits == 4:
            total = _sum_bytes(scales.total * -255, i, below, scales.pairs, T)
            z = z + (_sum_bytes(total, i, above, scales.pairs, T).to(tl.float32),)
        else:
            total = _sum_bytes(scales.total * -128 + ROUNDER_BITS, i, below, scales.pairs, T)
            z = z + (float_of(total) - ROUNDER,)
    return z


@triton.jit
def _sum_bytes(total, i: tl.constexpr, found, pairs, T: tl.constexpr):
    PLACES: tl.constexpr = 8 // T.bits
    lane: tl.constexpr = i // 4
    INDEX: tl.constexpr = (lane % T.banks[0] * PLACES + lane // T.banks[0]) * 4 + i % 4
    for w in tl.static_range(0, T.world, 4):
        total = _added(total, found[w * PLACES * T.banks[0] + INDEX], pairs, w, T)
    return total


@triton.jit
def _four(words, w: tl.constexpr, bank: tl.constexpr, T: tl.constexpr):
    """A bank's words of four wires from w on; zeros past the last."""
    four = ()
    for k in tl.static_range(w, w + 4):
        if k < T.world:
            four = four + (words[k * T.count + bank],)
        else:
            four = four + (tl.zeros((T.rows, T.columns), tl.int32),)
    return four


@triton.jit
def _added(total, four, pairs, w: tl.constexpr, T: tl.constexpr):
    """total + the scales of wires from w on times the bytes of `four`."""
    total = dotted(pairs[w // 2], four, total, False)
    if w + 2 < T.world:
        total = dotted(pairs[w // 2 + 1], four, total, True)
    return total


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
    """The codes at a place of every byte. The lower half of a byte stays where it is, so that these are
    2**(place * bits) times too large.
    """
    SHIFT: tl.constexpr = PLACE * T.bits // 4 * 4
    LEFT: tl.constexpr = PLACE * T.bits - SHIFT
    return (four >> SHIFT) & in_bytes(((1 << T.bits) - 1) << LEFT)


# --- 4 and 16 levels --------------------------------------------------------------------------------------------------
# A permutation looks up four codes, each in four bits. Of 2 bits their levels + 128 are one word. Of 4 bits half of the
# codes have a byte in the 8 of a permutation, and for the others it repeats the sign of a byte. So a level is the sum
# of two bytes: one from a table of positive levels, whose signs are 0, and one from a table with signs 1:
#
#   code >= 8: above = level      below = 255              above + below = level + 255
#   code <  8: above = 0          below = level + 255      above + below = level + 255


@triton.jit
def _levels_of(four, table, T: tl.constexpr):
    """(below, above) of the codes in four words, as bytes: of each place and neighbor those of all words.

    table: of 4 bits two words of the negative levels + 255, and two of the positive ones.
    """
    below = ()
    above = ()
    for place in tl.static_range(8 // T.bits):
        low = _nibbles(four[0], four[1], place * T.bits // 4)
        high = _nibbles(four[2], four[3], place * T.bits // 4)
        for half in tl.static_range(2):
            codes = permuted(low, high, 0x7362 if half else 0x5140)
            if T.bits == 2:
                codes = (codes >> (place % 2 * 2)) & 0x33333333
            others = codes ^ in_bytes(0x88)
            for shift in tl.static_range(0, 32, 16):
                if T.bits == 2:
                    below = below + (chosen(table[0], table[0], codes >> shift),)
                else:
                    below = below + (chosen(table[0], table[1], codes >> shift),)
                    above = above + (chosen(table[2], table[3], others >> shift),)
    return below, above


@triton.jit
def _nibbles(a, b, UPPER: tl.constexpr):
    """The lower, or UPPER, halves of all bytes of two words: those of `a` below."""
    if UPPER:
        return mixed(a >> 4, b, 0x0F0F0F0F)
    else:
        return mixed(a, b << 4, 0x0F0F0F0F)
