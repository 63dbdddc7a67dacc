"""Lloyd-Max levels: a tile in its domain, its codes, the scale that fits them to it, and both on the wire."""

import triton
import triton.language as tl

from thinwire.kernels.triton.four_bytes import bits_set, chosen, dotted, four_levels, permuted, signed, squared
from thinwire.kernels.triton.memory import instruction, look_up
from thinwire.kernels.triton.numbers import (
    INF_BITS,
    ONE_BITS,
    ROUNDER,
    ROUNDER_BITS,
    SIGN_BIT,
    bits_of,
    domain_factor,
    float_of,
    shifted,
    size_bits,
    stored_scale,
    undo,
)
from thinwire.kernels.triton.rotation import square_sum
from thinwire.kernels.triton.tiles import (
    anywhere,
    everywhere,
    largest,
    packed,
    place_index,
    row_total,
    store_codes,
    store_scale,
)
from thinwire.kernels.triton.trellis import best_codes

# Sums of squares between these prove that the block's peak is in the middle domain: peak**2 <= sum <= 1024 * peak**2.
SURELY_NOT_TINY = tl.constexpr(2.0**-68)
SURELY_NOT_HUGE = tl.constexpr(2.0**95)
LAST_CELL = tl.constexpr(127)  # cells from here on have the outermost level


@triton.jit
def in_domain(tile, post, T: tl.constexpr):
    """(tile, energy, up, post, bad): unchanged if all rows are in the middle domain and their energy proves that they
    belong there, else settled.

    energy: sums of squares. up: a factor of the scale. post: undoes the domain. bad: rows with NaN or Inf.
    """
    energy = square_sum(tile, T)
    up = tl.full((T.rows, T.columns), 1.0, tl.float32)
    bad = tl.full((T.rows, T.columns), 0, tl.int1)
    odd = ((energy >= SURELY_NOT_TINY) & (energy < SURELY_NOT_HUGE) & (post == 1)).to(tl.int32) ^ 1
    if anywhere(odd) > 0:
        tile, energy, up, post, bad = _settle(tile, post, T)
    return tile, energy, up, post, bad


@triton.jit
def _settle(tile, post, T: tl.constexpr):
    """Take rows into their domain, and outside the middle one bring their peak to [1, 2).

    A row in the middle domain (`post` is 1) moves to its own; others stay in theirs. Bad rows become zeros.
    """
    peak_bits = largest([size_bits(x) for x in tile], T)
    bad = peak_bits >= INF_BITS
    factor = tl.where(post == 1, domain_factor(peak_bits), 1.0)
    post = tl.where(post == 1, undo(factor), post)
    exponent = (bits_of(float_of(peak_bits) * factor) >> 23) - 127
    exponent = tl.where(post == 1, 0, tl.minimum(tl.maximum(exponent, -126), 126))
    down = float_of((127 - exponent) << 23)
    settled = [tl.where(bad, 0.0, x * factor * down) for x in tile]
    return settled, square_sum(settled, T), float_of((127 + exponent) << 23), post, bad


@triton.jit
def put_levels(tile, power, up, post, bad, scale, target, table, at, T: tl.constexpr, VALUES: tl.constexpr):
    """Write the codes of rows with the mean square `power`, and the scales that fit, times `scale` and `up`.

    Returns (stored scale, values of the codes), the latter only if VALUES.
    """
    words, values, fit = _fitted(tile, power, table, at, T, VALUES)
    zero = power == 0
    stored = stored_scale(tl.where(zero, 0.0, fit * scale * up), post, bad)
    store_scale(target.scales, stored, at, T)
    store_codes(target.planes, words, bad, zero, at, T)
    return stored, values


@triton.jit
def _codes_per_block(at, T: tl.constexpr):
    """Codes of a block, with the padding of a short one, as fp32."""
    return tl.full((), 0.0, tl.float32) + at.span * T.lanes


@triton.jit
def per_code(total, at, T: tl.constexpr):
    """total / codes of a block; by a multiplication if the number of codes is known to be a power of two."""
    if T.whole:
        return total * (1.0 / T.block)
    else:
        return tl.div_rn(total, _codes_per_block(at, T))


@triton.jit
def _fitted(tile, power, table, at, T: tl.constexpr, VALUES: tl.constexpr):
    """(words, values, fit): the packed codes of rows with the mean square `power`, and the scale that fits them.

    values, only if VALUES: the signed levels as floats.
    """
    GRID: tl.constexpr = 1.0 * T.grid
    some = power > 0
    rms = tl.sqrt_rn(power)
    gain = tl.where(some, tl.div_rn(GRID, tl.where(some, rms, 1.0)), 0.0)
    if T.trellis:
        words, values, along, square = best_codes(tile, gain, table, at, T, VALUES)
    else:
        words, values, along, square = _nearest_codes(tile, gain, table, at, T, VALUES)
    if T.unbiased:
        fit = tl.div_rn(_codes_per_block(at, T), tl.where(along > 0, along, 1.0)) * (rms * GRID)
    elif T.bits == 1 and not T.trellis:
        fit = per_code(along, at, T) * (rms * (1 / GRID))
    else:
        fit = tl.div_rn(along, square) * (rms * (1 / GRID))
    return words, values, fit


@triton.jit
def _nearest_codes(tile, gain, table, at, T: tl.constexpr, VALUES: tl.constexpr):
    """(words, values, along, square): codes, packed; levels, if VALUES; every row's <cell, level> and <level, level>.

    A bank's codes are packed as soon as they are made, so that few registers hold them.
    """
    nothing = tl.zeros((T.rows, T.columns), tl.int32)
    sums = (nothing, nothing, nothing)
    if T.bits == 2:
        sums = (nothing.to(tl.float32), nothing.to(tl.float32), nothing)
    words = ()
    values = ()
    if len(T.planes) == 1:
        for bank in tl.static_range(T.banks[0]):
            word, sums = _bank(tile, gain, sums, bank, T)
            words = words + (word,)
    else:
        codes_of = ()
        for i in tl.static_range(T.size):
            entry, sums = _code(tile[i], gain, table, sums)
            code = (entry >> (32 - T.bits)) ^ (bits_of(tile[i]) >> 31)
            codes_of = codes_of + (code & (2 * T.half - 1),)
        words = packed(codes_of, 0, T)
    if VALUES:
        values = [_signed_level(x, gain, table, T) for x in tile]
    along, square = _sums(sums, at, T)
    return words, values, along, square


@triton.jit
def _bank(tile, gain, sums, bank: tl.constexpr, T: tl.constexpr):
    """(word, sums) of a bank: signs are shifted into one word from below, and the codes of sizes into another."""
    PLACES: tl.constexpr = T.vector * (8 // T.bits)
    total, away, count = sums
    word = tl.zeros((T.rows, T.columns), tl.int32)
    signs = word
    cells = ()
    for i in tl.static_range(PLACES):
        x = tile[place_index(PLACES - 1 - i, T.bits, bank, T.banks[0], T.vector)]
        cell = tl.fma(tl.abs(x), gain, ROUNDER)
        cells = (bits_of(cell),) + cells
        signs = _shift_in(signs, bits_of(x), T.bits)
        if T.bits == 2:
            beyond = cell - (ROUNDER + T.edges[0])
            word = _shift_in(word, bits_of(beyond), 2)
            total = total + beyond
            away = away + tl.abs(beyond)
        elif T.bits == 4:
            word = word * 16 + bits_of(_rank(cell))
    if T.bits == 1:
        for i in tl.static_range(PLACES):
            total = total + cells[i]
        return signs ^ -1, (total, away, count)
    elif T.bits == 2:
        signs = signs & everywhere(2, 2, 4)
        outer = (word ^ -1) & everywhere(2, 2, T.vector)
        sums = (total, away, count + bits_set(outer))
        return (signs ^ everywhere(2, 2, 4)) | shifted(outer ^ signs, 1), sums
    else:
        ranks = word - everywhere(ROUNDER_BITS, 4, T.vector)
        tops = shifted(signs & everywhere(8, 4, 4), 3)
        return (ranks | everywhere(8, 4, 4)) ^ (tops * 15), _sums_of_ranks(cells, ranks, sums, T)


@triton.jit
def _rank(cell):
    """How many edges of the 4-bit table are at or below a cell. The cell and its rank both have the bits of ROUNDER.

    A parabola differs from the rank of every cell by less than a half; a test checks each cell.
    """
    near = _saturated(cell)
    return tl.fma(tl.fma(near, RANK_BEND, RANK_SLOPE), near, ROUNDER)


SATURATE = tl.constexpr("fma.rn.sat.f32 $0, $1, 0f3C000000, $2;")  # that is 1 / 128
RANK_START = tl.constexpr(7)
RANK_SLOPE = tl.constexpr(11.709)
RANK_BEND = tl.constexpr(-4.629)


@triton.jit
def _saturated(cell):
    """(cell - RANK_START) / 128, between 0 and 1, of a cell with the bits of ROUNDER."""
    OFFSET: tl.constexpr = -(ROUNDER + RANK_START) / 128
    offset = tl.full(cell.shape, OFFSET, tl.float32)
    return float_of(instruction(SATURATE, "=r,f,f", (cell, offset)))


@triton.jit
def _sums_of_ranks(cells, ranks, sums, T: tl.constexpr):
    """The sums, plus those of a bank's cells. Their ranks are the digits of a word: a permutation gives four levels."""
    along, square, nothing = sums
    for first in tl.static_range(0, len(cells), 4):
        levels = chosen(four_levels(0, T), four_levels(4, T), ranks >> (4 * first))
        if T.vector == 1:  # two cells
            levels = levels & 0xFFFF
        for k in tl.static_range(first, min(first + 4, len(cells)), 2):
            along = dotted(permuted(cells[k], cells[k + 1], 0x5410), levels, along, k > first)
        square = squared(levels, square)
    return along, square, nothing


@triton.jit
def _shift_in(word, other, WIDTH: tl.constexpr):
    """word << WIDTH, with the top bits of `other` below."""
    return (word << WIDTH) | shifted(other, 32 - WIDTH)


# [Note: Sums of table entries]
# An entry of the table has the code of a size in its top bits, at most 4, and a level in its lowest: modulo 2**28 sums
# of entries, of their squares and of their products with cells are those of the levels. Cells, too, keep the bits of
# ROUNDER; `_sums` removes both once per thread.
LOW_28 = tl.constexpr((1 << 28) - 1)


@triton.jit
def _code(x, gain, table, sums):
    """(table entry of |x|, sums with this one)."""
    cell = bits_of(tl.fma(tl.abs(x), gain, ROUNDER))
    along, square, entries = sums
    entry = _entry(cell, table)
    return entry, (along + cell * entry, square + entry * entry, entries + entry)


@triton.jit
def _sums(sums, at, T: tl.constexpr):
    """(sum of cell * level, sum of level**2) of each row."""
    along, square, entries = sums
    if T.bits == 1:
        along = along - signed(ROUNDER_BITS * T.size)
        square = tl.full((T.rows, T.columns), T.size, tl.int32)
    elif T.bits == 2:
        along, square = _sums_of_two(along.to(tl.int32), square.to(tl.int32), entries, T)
    elif T.bits == 3:
        along = (along - entries * ROUNDER_BITS) & LOW_28
        square = square & LOW_28
    if not T.whole:
        square = tl.where(at.there, square, 0)
    return row_total(along, T).to(tl.float32), row_total(square, T).to(tl.float32)


@triton.jit
def _sums_of_two(beyond, away, outer, T: tl.constexpr):
    """(sum of cell * level, sum of level**2) for two levels, from the sums of cell - edge and of |cell - edge|, and the
    number of cells with the outer level. Half of these sums together is the sum of cell - edge over those cells.
    """
    EDGE: tl.constexpr = T.edges[0]
    INNER: tl.constexpr = T.levels[0]
    OUTER: tl.constexpr = T.levels[1]
    cells = beyond + EDGE * T.size
    outer_cells = ((beyond + away) >> 1) + EDGE * outer
    along = INNER * cells + (OUTER - INNER) * outer_cells
    return along, INNER * INNER * T.size + (OUTER * OUTER - INNER * INNER) * outer


@triton.jit
def _signed_level(x, gain, table, T: tl.constexpr):
    if T.bits == 1:
        return float_of((bits_of(x) & SIGN_BIT) | ONE_BITS)
    else:
        level = _entry(bits_of(tl.fma(tl.abs(x), gain, ROUNDER)), table) & LOW_28
        return float_of(bits_of(level.to(tl.float32)) | (bits_of(x) & SIGN_BIT))


@triton.jit
def _entry(cell, table):
    """The table's entry of a cell that still has the bits of ROUNDER."""
    return look_up(table, tl.minimum(cell, ROUNDER_BITS + LAST_CELL), ROUNDER_BITS)
