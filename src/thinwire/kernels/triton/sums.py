"""The sum over ranks of a tile, from their wires: a fast one for usual scales, and one for all others.

Usual scales are zero or in the middle domain ([Note: Three domains] in schema.py), so they are used as they are. A tile
that meets another scale is added again, by all rules of the reference. Codes are small integers and scales have 8 bits,
so their products are exact, and a fused multiply-add rounds as the reference's multiplication and addition do.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from thinwire.kernels.triton.exact_sums import exact_sum, integers_of
from thinwire.kernels.triton.four_bytes import PERMUTE
from thinwire.kernels.triton.frame import sections
from thinwire.kernels.triton.memory import filled, instruction, look_up
from thinwire.kernels.triton.numbers import (
    HUGE_BITS,
    INF_BITS,
    LOWER,
    NORMAL_BITS,
    ONE_BITS,
    SIGN_BIT,
    UNLIFT,
    UNLOWER,
    WIDENER,
    WIDENER_BITS,
    float_of,
)
from thinwire.kernels.triton.scaled import cast_value
from thinwire.kernels.triton.tiles import code_of, load_codes, load_scale
from thinwire.kernels.triton.trellis import indices

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
    """Where block `first` of all wires of a stack is, whose stride has 64 bits."""
    scales, minima, planes = sections(wire, frame, first, T)
    return Wires(scales, minima, planes, stack.stride, stack.world, levels, own)


@triton.jit
def _row(wires, w):
    """How far wire w is from the first."""
    return tl.where(w == wires.own, wires.world, w) * wires.stride


@triton.jit
def worst_scale(wires, at, T: tl.constexpr):
    """The largest size of the wires' scales, as bits: those of a number that is not finite where a block is not."""
    worst = tl.zeros((T.rows, T.columns), tl.int32)
    for w in range(wires.world):
        worst = tl.maximum(worst, load_scale(wires.scales + _row(wires, w), at, T) & 0x7FFFFFFF)
    return worst


# A sum has two steps and a branch between them, decided by the scales that the first step loads. It only loads up to 8
# wires, since adding them too would take too many registers; more wires it adds in a loop.


@triton.jit
def begin_sum(wires, at, T: tl.constexpr):
    """(begun, odd): what usual_sum takes; odd where a row's scales ask for sum_any."""
    if T.world:
        words, scale_bits, minimum_bits, odd = _load_wires(wires, at, T)
        if T.narrow and T.world > 1:
            scales, odd = integers_of(scale_bits, T)
            return (words, scales), odd
        else:
            return (words, scale_bits, minimum_bits), odd
    else:
        return _sum_wires(wires, at, T)


@triton.jit
def usual_sum(begun, table, T: tl.constexpr):
    """(z, unit): the sum of wires with usual scales, in a unit that is a power of two for each row."""
    one = tl.full((T.rows, T.columns), 1.0, tl.float32)
    if T.world > 1 and T.narrow:
        words, scales = begun
        return exact_sum(words, scales, table, T)
    elif T.world:
        words, scale_bits, minimum_bits = begun
        z = _zeros(T)
        if T.affine:
            for w in tl.static_range(T.world):
                minimum = float_of(minimum_bits[w])
                z = [x + minimum for x in z]
        for w in tl.static_range(T.world):
            z = _add_codes(z, words[w * T.count : (w + 1) * T.count], table, float_of(scale_bits[w]), T, True)
        return z, one
    else:
        return begun, one


@triton.jit
def _load_wires(wires, at, T: tl.constexpr):
    """(words, scales, minima, odd) of T.world wires, all asked for before the first is used."""
    words = ()
    scale_bits = ()
    minimum_bits = ()
    odd = tl.zeros((T.rows, T.columns), tl.int32)
    for w in tl.static_range(T.world):
        bits = load_scale(wires.scales + _row(wires, w), at, T)
        scale_bits = scale_bits + (bits,)
        odd = odd | _is_odd(bits).to(tl.int32)
        if T.affine:
            minimum = load_scale(wires.minima + _row(wires, w), at, T)
            minimum_bits = minimum_bits + (minimum,)
            odd = odd | ((minimum & 0x7FFFFFFF) >= HUGE_BITS).to(tl.int32)
    for w in tl.static_range(T.world):
        words = words + _codes_of(wires, w, at, T)
    return words, scale_bits, minimum_bits, odd


@triton.jit
def _sum_wires(wires, at, T: tl.constexpr):
    """(tile, odd): the sum of any number of wires as they are."""
    z = _zeros(T)
    odd = tl.zeros((T.rows, T.columns), tl.int32)
    if T.affine:
        for w in range(wires.world):
            minimum = load_scale(wires.minima + _row(wires, w), at, T)
            odd = odd | ((minimum & 0x7FFFFFFF) >= HUGE_BITS).to(tl.int32)
            z = [x + float_of(minimum) for x in z]
    for w in range(wires.world):
        bits = load_scale(wires.scales + _row(wires, w), at, T)
        odd = odd | _is_odd(bits).to(tl.int32)
        z = _add_codes(z, _codes_of(wires, w, at, T), wires.levels, float_of(bits), T, True)
    return z, odd


@triton.jit
def _codes_of(wires, w, at, T: tl.constexpr):
    """The words of wire w; of trellis codes the places of their levels."""
    words = load_codes([plane + _row(wires, w) for plane in wires.planes], at, T)
    if T.trellis:
        return indices(words, at, T)
    else:
        return words


@triton.jit
def sum_any(wires, at, T: tl.constexpr):
    """(tile, post): the sum in the domain that the scales ask for, and the factor that undoes it."""
    post, all_lifted, any_huge = _domain(wires, at, T)
    lower = tl.where((any_huge != 0) & (all_lifted == 0), LOWER, 1.0)
    z = _zeros(T)
    if T.affine:
        for w in range(wires.world):
            bits = load_scale(wires.scales + _row(wires, w), at, T)
            into = tl.where((bits < 0) & (all_lifted == 0), UNLIFT, 1.0)
            minimum = float_of(load_scale(wires.minima + _row(wires, w), at, T)) * into * lower
            z = [x + minimum for x in z]
    for w in range(wires.world):
        bits = load_scale(wires.scales + _row(wires, w), at, T)
        into = tl.where((bits < 0) & (all_lifted == 0), UNLIFT, 1.0)
        scale = scale_size(bits) * into * lower
        z = _add_codes(z, _codes_of(wires, w, at, T), wires.levels, scale, T, False)
    return z, post


@triton.jit
def _zeros(T: tl.constexpr):
    return [tl.zeros((T.rows, T.columns), tl.float32) for _ in T.each]


@triton.jit
def scale_size(bits):
    """|scale|; what is smaller than any scale an encoder writes counts as zero."""
    bits = bits & 0x7FFFFFFF
    return float_of(tl.where(bits < NORMAL_BITS, 0, bits))


@triton.jit
def _is_odd(bits):
    """Neither zero nor a scale of the middle domain."""
    return (bits != 0) & ((bits < NORMAL_BITS) | (bits >= HUGE_BITS))


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
    """z + value of every code * scale. USUAL: so is the scale, and powers of two move between it and the value."""
    if T.cast:  # subnormal products round: twice, as the reference does
        return [z[i] + (words[i] if T.bits == 16 else cast_value(code_of(words, i, T), T)) * scale for i in T.each]
    elif T.gaussian:
        return _add_levels(z, words, table, scale, T)
    elif T.bits == 8:
        return [tl.fma(_whole_byte(words, i, T), scale, z[i]) for i in T.each]
    elif USUAL and len(T.planes) == 1:
        return _add_in_place(z, words, scale, T)
    else:
        return [tl.fma(_integer(code_of(words, i, T), T), scale, z[i]) for i in T.each]


@triton.jit
def _integer(code, T: tl.constexpr):
    """The number an integer code stands for: its bits below those of 2**23, from which that is subtracted."""
    return float_of(code | WIDENER_BITS) - (WIDENER + T.zero)


@triton.jit
def _whole_byte(words, i: tl.constexpr, T: tl.constexpr):
    """The number that an integer code of 8 bits stands for, without a shift."""
    return float_of(_byte(words[i // T.vector], i % T.vector)) - (WIDENER + T.zero)


@triton.jit
def _byte(word, k: tl.constexpr):
    """Byte k of a word below the bits of 2**23."""
    widener = tl.full(word.shape, WIDENER_BITS, tl.int32)
    return instruction(filled(PERMUTE, 0x7540 + k), "=r,r,r", (word, widener))  # two zeros, and its upper byte


@triton.jit
def _bits_below(word, MASK: tl.constexpr):
    """Some bits of a word where they stand, below those of 2**23: one instruction, the constant in a register."""
    return instruction(filled(BELOW, MASK), "=r,r,r", (word, tl.full(word.shape, WIDENER_BITS, tl.int32)))


@triton.jit
def _add_in_place(z, words, scale, T: tl.constexpr):
    """The same without shifting codes to the right: each is read where it stands in its word, 2**place too large."""
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
# A byte permutation looks up four levels at once, among 8 bytes. Bytes hold 128 more than a level.


@triton.jit
def _add_levels(z, words, table, scale, T: tl.constexpr):
    if T.trellis:
        return [tl.fma(float_of(look_up(table, words[i], 0)), scale, z[i]) for i in T.each]
    elif T.bits == 4 and T.vector == 4:
        quads = ()
        for bank in tl.static_range(T.banks[0]):
            quads = quads + (_four_levels(words[bank], T), _four_levels(words[bank] >> 16, T))
        return [tl.fma(_level_of_quads(quads, i // 4, i % 4, T), scale, z[i]) for i in T.each]
    else:
        return [tl.fma(_level(words, i, table, T), scale, z[i]) for i in T.each]


@triton.jit
def _four_levels(word, T: tl.constexpr):
    """The levels of the four codes in the lower half of a word, as bytes."""
    V: tl.constexpr = T.levels
    return instruction(four_levels_text(V[0], V[1], V[2], V[3], V[4], V[5], V[6], V[7]), "=r,r", (word,))


@triton.constexpr_function
def four_levels_text(*levels):
    """PTX: both halves of the table by the lower three bits of each code, and the choice between them by the upper."""
    above = sum((128 + level) << (8 * i) for i, level in enumerate(levels))
    below = sum((128 - level) << (8 * i) for i, level in enumerate(reversed(levels)))
    mask = 0xFFFFFFFF
    return f"""{{
        .reg .b32 low, positive, negative, high;
        and.b32 low, $1, 0x7777;
        prmt.b32 positive, {above & mask}, {above >> 32}, low;
        prmt.b32 negative, {below & mask}, {below >> 32}, low;
        shr.u32 high, $1, 3;
        and.b32 high, high, 0x1111;
        prmt.b32 high, 0xff00, 0, high;
        lop3.b32 $0, high, positive, negative, 0xCA;
    }}"""


@triton.jit
def _level_of_quads(quads, lane: tl.constexpr, v: tl.constexpr, T: tl.constexpr):
    PLACE: tl.constexpr = 2 * v + lane // T.banks[0]
    word = quads[2 * (lane % T.banks[0]) + PLACE // 4]
    return float_of(_byte(word, PLACE % 4)) - (WIDENER + 128)


@triton.jit
def _level(words, index: tl.constexpr, table, T: tl.constexpr):
    """The levels of tensor `index`."""
    if T.bits == 1:
        word = words[(index // T.vector) % T.banks[0]] ^ -1
        PLACE: tl.constexpr = 8 * (index % T.vector) + index // T.vector // T.banks[0]
        return float_of(((word << (31 - PLACE)) & SIGN_BIT) | ONE_BITS)
    else:
        code = code_of(words, index, T)
        if T.bits == 2:
            found = instruction(two_bit_text(T.levels[0], T.levels[1]), "=r,r", (code,))
            return float_of(found) - (WIDENER + 128)
        else:
            return float_of(look_up(table, code, 0))


@triton.constexpr_function
def two_bit_text(inner, outer):
    """PTX: the byte of a code among four, below the upper byte of 2**23."""
    table = sum((128 + level) << (8 * i) for i, level in enumerate((-outer, -inner, inner, outer)))
    return f"{{ .reg .b32 place; or.b32 place, $1, 0x7540; prmt.b32 $0, {table}, {0x4B000000}, place; }}"
