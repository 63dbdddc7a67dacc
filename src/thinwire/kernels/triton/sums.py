"""The sum over ranks of a tile, from their wires: a fast sum for usual scales, and one for all scales.

Usual scales are zero or in the middle domain ([Note: Three domains] in schema.py), so they are used as they are. A tile
with any other scale is summed again, by all rules of the reference. Codes are small integers and scales have 8 bits,
so their products are exact, and a fused multiply-add rounds as the reference's multiplication and addition do.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from thinwire.kernels.triton.four_bytes import chosen, four_levels, in_bytes, permuted
from thinwire.kernels.triton.frame import sections
from thinwire.kernels.triton.memory import filled, instruction, look_up, wide
from thinwire.kernels.triton.numbers import (
    HUGE_BITS,
    INF_BITS,
    LOWER,
    NORMAL_BITS,
    UNLIFT,
    UNLOWER,
    WIDENER,
    WIDENER_BITS,
    float_of,
    shifted,
)
from thinwire.kernels.triton.scaled import cast_value
from thinwire.kernels.triton.tiles import anywhere, code_of, load_codes, load_scale, times
from thinwire.kernels.triton.trellis import indices

USUAL_BITS = tl.constexpr(47 << 23)  # 2**-80; encoders write smaller scales only in the lifted domain
BELOW = tl.constexpr("lop3.b32 $0, $1, {}, $2, 0xEA;")  # (a & mask) | b


class Wires(NamedTuple):
    """The sections of the first wire, and how to get from there to those of others."""

    scales: Any
    minima: Any
    planes: Any
    stride: Any
    world: Any
    levels: Any  # of Lloyd and trellis wires: the table of signed levels
    own: Any  # the wire that is left out, and replaced by the one after all others; -1: none


@triton.jit
def wires_from(wire, stack, frame, levels, own, first, T: tl.constexpr):
    """Where block `first` of all wires of a stack is."""
    scales, minima, planes = sections(wire, frame, first, T)
    return Wires(scales, minima, planes, wide(stack.stride), stack.world, levels, own)


@triton.jit
def _row(wires, w):
    """How far wire w is from the first."""
    return tl.where(w == wires.own, wires.world, w) * wires.stride


@triton.jit
def worst_scale(wires, at, T: tl.constexpr):
    """The largest |scale| of the wires, as bits: it is not finite where a block is not."""
    worst = tl.zeros((T.rows, T.columns), tl.int32)
    for w in range(wires.world):
        worst = tl.maximum(worst, load_scale(wires.scales + _row(wires, w), at, T) & 0x7FFFFFFF)
    return worst


@triton.jit
def summed(wires, at, T: tl.constexpr):
    """(tile, post, unusual): the sum, what undoes its domain, and whether it may be outside the range of the output."""
    unusual = True
    post = tl.full((T.rows, T.columns), 1.0, tl.float32)
    if T.rare:
        z, post = sum_any(wires, at, T)
    else:
        z, odd = _sum(wires, at, 0, 1.0, T, True)
        if T.paired:
            z = times(z, 1 / DOWN)
        if T.calm:
            unusual = anywhere(odd) != 0
        if unusual:
            z, post = sum_any(wires, at, T)
    return z, post, unusual


@triton.jit
def sum_any(wires, at, T: tl.constexpr):
    """(tile, post): the sum in the domain that the scales ask for, and the factor that undoes it."""
    post, all_lifted, any_huge = _domain(wires, at, T)
    lower = tl.where((any_huge != 0) & (all_lifted == 0), LOWER, 1.0)
    z, _odd = _sum(wires, at, all_lifted, lower, T, False)
    return z, post


@triton.jit
def _sum(wires, at, all_lifted, lower, T: tl.constexpr, USUAL: tl.constexpr):
    """(tile, odd): the sum, if USUAL with scales used as they are; odd is not 0 where a row's scales are not usual."""
    z = [tl.zeros((T.rows, T.columns), tl.float32) for _ in T.each]
    odd = tl.zeros((T.rows, T.columns), tl.int32)
    if T.affine:
        for w in range(wires.world):
            bits = load_scale(wires.minima + _row(wires, w), at, T)
            odd = odd | ((bits & 0x7FFFFFFF) >= HUGE_BITS).to(tl.int32)
            minimum = float_of(bits)
            if not USUAL:
                minimum = minimum * _into(load_scale(wires.scales + _row(wires, w), at, T), all_lifted) * lower
            z = [x + minimum for x in z]
    if USUAL and T.world:
        for w in tl.static_range(T.world):
            z, odd = _add_wire(z, odd, wires, w, at, all_lifted, lower, T, True)
    else:
        for w in range(wires.world):
            z, odd = _add_wire(z, odd, wires, w, at, all_lifted, lower, T, USUAL)
    return z, odd


@triton.jit
def _add_wire(z, odd, wires, w, at, all_lifted, lower, T: tl.constexpr, USUAL: tl.constexpr):
    bits = load_scale(wires.scales + _row(wires, w), at, T)
    scale = float_of(bits)
    if not USUAL:
        scale = scale_size(bits) * _into(bits, all_lifted) * lower
    z = _add_codes(z, _codes_of(wires, w, at, T), wires.levels, scale, T, USUAL)
    return z, odd | ((bits != 0) & ((bits < USUAL_BITS) | (bits >= HUGE_BITS))).to(tl.int32)


@triton.jit
def _into(bits, all_lifted):
    """The factor that takes a wire into the domain of a sum."""
    return tl.where((bits < 0) & (all_lifted == 0), UNLIFT, 1.0)


@triton.jit
def _codes_of(wires, w, at, T: tl.constexpr):
    """The words of wire w; for trellis codes, the places of their levels."""
    words = load_codes([plane + _row(wires, w) for plane in wires.planes], at, T)
    if T.trellis:
        return indices(words, at, T)
    else:
        return words


@triton.jit
def scale_size(bits):
    """|scale|; what is smaller than any scale an encoder writes counts as zero."""
    bits = bits & 0x7FFFFFFF
    return float_of(tl.where(bits < NORMAL_BITS, 0, bits))


@triton.jit
def _domain(wires, at, T: tl.constexpr):
    """(post, all_lifted, any_huge) of the wires of each row."""
    lifted_or_blank = tl.full((T.rows, T.columns), 1, tl.int32)
    any_lifted = tl.zeros((T.rows, T.columns), tl.int32)
    any_huge = tl.zeros((T.rows, T.columns), tl.int32)
    for w in range(wires.world):
        bits = load_scale(wires.scales + _row(wires, w), at, T)
        lifted = (bits < 0).to(tl.int32)
        huge = is_huge(bits)
        blank = (bits & 0x7FFFFFFF) < NORMAL_BITS
        if T.affine:
            minimum = load_scale(wires.minima + _row(wires, w), at, T)
            huge = huge | is_huge(minimum)
            blank = blank & ((minimum & 0x7FFFFFFF) == 0)
        lifted_or_blank = lifted_or_blank & (lifted | blank.to(tl.int32))
        any_lifted = any_lifted | lifted
        any_huge = any_huge | (huge.to(tl.int32) & (1 - lifted))
    all_lifted = lifted_or_blank & any_lifted
    return post_of(all_lifted != 0, any_huge != 0), all_lifted, any_huge


@triton.jit
def is_huge(bits):
    """Whether a stored scale or minimum is above the middle domain; NaN is not compared."""
    size = bits & 0x7FFFFFFF
    return (size >= HUGE_BITS) & (size <= INF_BITS)


@triton.jit
def post_of(lifted, huge):
    """The factor that undoes the domain of a sum."""
    return tl.where(lifted, UNLIFT, tl.where(huge, UNLOWER, 1.0))


@triton.jit
def _add_codes(z, words, table, scale, T: tl.constexpr, USUAL: tl.constexpr):
    """z + value of every code * scale. USUAL: the scale is, so powers of two can move between it and the value."""
    if T.cast:  # subnormal products round: twice, as the reference does
        return [z[i] + (words[i] if T.bits == 16 else cast_value(code_of(words, i, T), T)) * scale for i in T.each]
    elif T.gaussian:
        return _add_levels(z, words, table, scale, T, USUAL)
    elif T.bits == 8:
        return [tl.fma(_whole_byte(words, i, T), scale, z[i]) for i in T.each]
    elif USUAL and len(T.planes) == 1:
        return _add_in_place(z, words, scale, T)
    else:
        return [tl.fma(_integer(code_of(words, i, T), T), scale, z[i]) for i in T.each]


@triton.jit
def _integer(code, T: tl.constexpr):
    """The number an integer code stands for: the code becomes the low bits of 2**23, which is then subtracted."""
    return float_of(code | WIDENER_BITS) - (WIDENER + T.zero)


@triton.jit
def _whole_byte(words, i: tl.constexpr, T: tl.constexpr):
    """The number that an integer code of 8 bits stands for, without a shift."""
    widener = tl.full((T.rows, T.columns), WIDENER_BITS, tl.int32)  # two zeros, and its upper byte
    return float_of(permuted(words[i // T.vector], widener, 0x7540 + i % T.vector)) - (WIDENER + T.zero)


@triton.jit
def _bits_below(word, MASK: tl.constexpr):
    """The bits of a word under MASK as the low bits of 2**23: one instruction, with that constant in a register."""
    return instruction(filled(BELOW, MASK), "=r,r,r", (word, tl.full(word.shape, WIDENER_BITS, tl.int32)))


@triton.jit
def _add_in_place(z, words, scale, T: tl.constexpr):
    """The same without shifting codes to the right: each is read in place, as 2**place times its value."""
    halves = ()
    for bank in tl.static_range(T.banks[0]):
        halves = halves + (words[bank], words[bank] >> 16)
    scales = ()
    for place in tl.static_range(0, 16, T.bits):
        scales = scales + (scale * (2.0**-place),)
    return [_add_one(z[i], halves, scales, i // T.vector, i % T.vector, T) for i in T.each]


@triton.jit
def _add_one(z, halves, scales, lane: tl.constexpr, v: tl.constexpr, T: tl.constexpr):
    PLACE: tl.constexpr = 8 * v + (lane // T.banks[0]) * T.bits
    LOW: tl.constexpr = PLACE % 16
    word = halves[2 * (lane % T.banks[0]) + PLACE // 16]
    value = float_of(_bits_below(word, ((1 << T.bits) - 1) << LOW)) - (WIDENER + (T.zero << LOW))
    return tl.fma(value, scales[LOW // T.bits], z)


# --- Lloyd levels -----------------------------------------------------------------------------------------------------
# A byte permutation looks up the sizes of four levels, and another their signs. A third makes a float of one of each,
# with exponent 0, so that no bit is implied: level * 2**-133. As scale * 2**133 would be infinite, sums are multiplied
# by DOWN. That loses no bit: 2**-149 still divides all products of levels and usual scales.
UP = tl.constexpr(2.0**73)
DOWN = tl.constexpr(2.0**-60)


@triton.jit
def _add_levels(z, words, table, scale, T: tl.constexpr, USUAL: tl.constexpr):
    if T.trellis:
        return [tl.fma(float_of(look_up(table, words[i], 0)), scale, z[i]) for i in T.each]
    elif USUAL and T.paired:
        sums = ()
        for bank in tl.static_range(T.banks[0]):
            fours = _fours_of(words[bank], T)
            for place in tl.static_range(8 // T.bits):
                for v in tl.static_range(T.vector):
                    level = _level(fours, place, v, T)
                    sums = sums + (tl.fma(level, scale * UP, z[(bank + place * T.banks[0]) * T.vector + v]),)
        return [sums[by_bank(i, T.vector, T.banks[0], 8 // T.bits)] for i in T.each]
    else:
        return [tl.fma(float_of(look_up(table, code_of(words, i, T), 0)), scale, z[i]) for i in T.each]


@triton.jit
def _fours_of(word, T: tl.constexpr):
    """(sizes, signs) of all levels in a word, four in each."""
    fours = ()
    if T.bits == 1:
        for place in tl.static_range(8):
            signs = ((word ^ -1) << (7 - place)) & in_bytes(0x80)
            fours = fours + ((tl.full(word.shape, in_bytes(1), tl.int32), signs),)
    else:
        for place in tl.static_range(4 // T.bits):
            if T.bits == 4:
                signs = shifted(word, 3) & 0x11111111
                sizes = ((word ^ (signs * 7)) ^ -1) & 0x77777777  # codes of negative levels count down
            else:
                signs = (word >> (2 * place)) & 0x33333333
                sizes = signs
            negative = tl.full(word.shape, 0x80 if T.bits == 4 else 0x8080, tl.int32)
            for half in tl.static_range(0, 32, 16):
                found = chosen(four_levels(0, T), four_levels(4, T), sizes >> half)
                fours = fours + ((found, chosen(negative, negative, signs >> half)),)
    return fours


@triton.jit
def _level(fours, place: tl.constexpr, v: tl.constexpr, T: tl.constexpr):
    """The level * 2**-133 of the code at a place of byte v."""
    FOUR: tl.constexpr = four_of(T.bits, place, v) // 4
    K: tl.constexpr = four_of(T.bits, place, v) % 4
    sizes, signs = fours[FOUR]
    return float_of(permuted(sizes, signs, 0x4088 + 0x1100 * K))


@triton.constexpr_function
def four_of(bits, place, v):
    """The index of the code at a place of byte v in the fours of its word."""
    if bits == 1:
        return 4 * place + v
    shifts = 4 // bits
    return 8 * (place % shifts) + 2 * v + place // shifts


@triton.constexpr_function
def by_bank(index, vector, banks, places):
    """The index of a tensor of a tile in the order of banks, places and neighbors."""
    lane, v = divmod(index, vector)
    return (lane % banks * places + lane // banks) * vector + v
