"""Trellis codes: the best path through the levels of every strand, and the levels on a path: see kernels/trellis.py.

A lane of a tile of full blocks is a position of all strands, and a column is a strand, so that a thread has a strand in
its registers. In a short last block a lane has several positions, and a column works on the strand of its own elements;
columns of the same strand repeat the work.

[Note: Path and cost] A state's word has the cost of the best path to it in its upper half, and the path itself in the
lower one: bit t is p[i-2] of the segment's position i = t. The newest bit is the highest, so the smaller of two words
belongs to the cheaper path, or in a tie to the one with p[i-2] = 0, as in the reference. A segment's bits are put aside
when it ends. Costs are counted in full; the reference cuts them at 255, which the best path never reaches.
"""

import triton
import triton.language as tl

from thinwire.kernels import schema, trellis
from thinwire.kernels.triton.memory import look_up
from thinwire.kernels.triton.numbers import ROUNDER, ROUNDER_BITS, bits_of, shifted
from thinwire.kernels.triton.tiles import code_of, packed, row_total

HALF = tl.constexpr(schema.CELLS // 2)
CELLS = tl.constexpr(schema.CELLS)
MOST = tl.constexpr(trellis.MOST << 16)
COST = tl.constexpr(0x7F << 16)
PATH = tl.constexpr(0xFFFF)


@triton.jit
def best_codes(tile, gain, table, at, T: tl.constexpr, VALUES: tl.constexpr):
    """(words, values, along, square): codes, packed; levels, if VALUES; every row's <cell, level> and <level, level>.

    table: for every cell four costs, by subset, each with the lowest index bit of its level above it; then four levels.
    """
    path, one, two = _best_path(tile, gain, table, at, T)
    turned = (path[0] ^ two[0], path[1] ^ two[1])
    codes = ()
    values = ()
    along = tl.zeros((T.rows, T.columns), tl.int32)
    square = along
    for i in tl.static_range(T.size):
        subset = _bit(turned, i, at, T) * 16 + _bit(one, i, at, T) * 8
        near = _near(tile[i], gain)
        level = (look_up(table, near, ROUNDER_BITS - HALF - CELLS) << (24 - subset)) >> 24
        code = _bit(path, i, at, T)
        if T.bits > 1:
            code = code + ((level >> 31) + 1) * (1 << (T.bits - 1))
        if T.bits > 2:
            code = code + ((look_up(table, near, ROUNDER_BITS - HALF) >> (subset + 7)) & 1) * 2
        codes = codes + (code,)
        if VALUES:
            values = values + (level.to(tl.float32),)
        along = along + _cell(tile[i], gain, -128, 127) * level
        square = square + level * level
    if not T.whole:
        square = tl.where(at.there, square, 0)
    along = tl.maximum(row_total(along, T), 1)
    return packed(codes, 0, T), values, along.to(tl.float32), row_total(square, T).to(tl.float32)


@triton.jit
def indices(words, at, T: tl.constexpr):
    """The places of the codes' levels in the table, from the words of the codes' planes."""
    codes = [code_of(words, i, T) for i in T.each]
    one = _before([code & 1 for code in codes], at, T)
    two = _before(one, at, T)
    return [(codes[i] >> 1) * 4 + ((codes[i] & 1) ^ two[i]) * 2 + one[i] for i in T.each]


@triton.jit
def _before(bits, at, T: tl.constexpr):
    """For every position, the bit of the one before it in its strand; zeros at the start."""
    done = ()
    last = tl.zeros((T.rows, T.columns), tl.int32)
    if T.loose:
        strands = _strands(at)
        inner = at.column >= strands
        source = tl.where(inner, at.column, at.column + at.span) - strands
        for lane in tl.static_range(T.lanes):
            moved = tl.gather(bits[lane], source, axis=1)
            done = done + (tl.where(inner, moved, last),)
            last = moved
    else:
        for lane in tl.static_range(T.lanes):
            done = done + (last,)
            last = bits[lane]
    return done


# --- the search -------------------------------------------------------------------------------------------------------


@triton.jit
def _best_path(tile, gain, table, at, T: tl.constexpr):
    """(p[i], p[i-1], p[i-2]) of every strand: bit i % 32 of word i // 32."""
    LANES: tl.constexpr = 2 if T.loose else 16  # of a segment
    COUNT: tl.constexpr = T.lanes // LANES
    start = tl.zeros((T.rows, T.columns), tl.int32)
    states = (start, start + MOST, start + MOST, start + MOST)
    segments = ()
    for lane in tl.static_range(T.lanes):
        cost = look_up(table, _near(tile[lane], gain), ROUNDER_BITS - HALF)
        if T.loose:
            strands = _strands(at)
            each = at.span // strands
            for j in range(each):
                here = tl.gather(cost, j * strands + at.column % strands, axis=1)
                states = _step(states, here, 1 << (lane % LANES * each + j))
        else:
            states = _step(states, cost, 1 << (lane % LANES))
        if lane % LANES == LANES - 1:
            for s in tl.static_range(4):
                segments = segments + (states[s] & PATH,)
            states = [state & ~PATH for state in states]
    state = _end(states)
    each = LANES * _positions(at, T)
    path = _put((start, start), COUNT * each - 2, (state >> 1) | ((state & 1) << 1))
    two = (start, start)
    for k in tl.static_range(COUNT):
        word = _of_state(segments, COUNT - 1 - k, state)
        two = _put(two, (COUNT - 1 - k) * each, word)
        state = ((word >> 1) & 1) | ((word & 1) << 1)
    path = (path[0] | shifted(two[0], 2) | (two[1] << 30), path[1] | shifted(two[1], 2))
    return path, (path[0] << 1, (path[1] << 1) | shifted(path[0], 31)), two


@triton.jit
def _put(words, place, bits):
    """Two words, with `bits` set from a place on; none cross from the first word to the second."""
    bits = bits << (place % 32)
    return words[0] | tl.where(place < 32, bits, 0), words[1] | tl.where(place < 32, 0, bits)


@triton.jit
def _step(states, cost, bit):
    """The best paths one position further: the two states that lead to each, with p[i-2] = 0 and with 1."""
    a, b, c, d = states
    c0 = (cost << 16) & COST
    c1 = (cost << 8) & COST
    c2 = cost & COST
    c3 = (cost >> 8) & COST
    return (
        tl.minimum(a + c0, c + c2 + bit),
        tl.minimum(a + c2, c + c0 + bit),
        tl.minimum(b + c1, d + c3 + bit),
        tl.minimum(b + c3, d + c1 + bit),
    )


@triton.jit
def _end(states):
    """The state that the best path ends in; of equal ones, the first."""
    best = states[0] >> 14
    for s in tl.static_range(1, 4):
        best = tl.minimum(best, (states[s] >> 14) + s)
    return best & 3


@triton.jit
def _of_state(segments, k: tl.constexpr, state):
    """The path in segment k that leads to a state."""
    even = tl.where((state & 2) != 0, segments[4 * k + 2], segments[4 * k])
    odd = tl.where((state & 2) != 0, segments[4 * k + 3], segments[4 * k + 1])
    return tl.where((state & 1) != 0, odd, even)


# --- cells and positions ----------------------------------------------------------------------------------------------


@triton.jit
def _cell(x, gain, LOW: tl.constexpr, HIGH: tl.constexpr):
    """The cell of x, clamped to LOW..HIGH."""
    cell = bits_of(tl.fma(x, gain, ROUNDER))
    return tl.minimum(tl.maximum(cell, ROUNDER_BITS + LOW), ROUNDER_BITS + HIGH) - ROUNDER_BITS


@triton.jit
def _near(x, gain):
    """The cell of x, clamped to those with costs of their own, with the bits of ROUNDER."""
    return _cell(x, gain, -HALF, HALF - 1) + ROUNDER_BITS


@triton.jit
def _strands(at):
    """Strands of a short last block."""
    return tl.maximum(at.span // 8, 1)


@triton.jit
def _positions(at, T: tl.constexpr):
    """Positions of a lane."""
    if T.loose:
        return at.span // _strands(at)
    else:
        return 1


@triton.jit
def _bit(words, lane: tl.constexpr, at, T: tl.constexpr):
    """The bit of every element of a lane, by its position in its strand."""
    if T.loose:
        each = _positions(at, T)
        place = lane * each + tl.minimum(at.column // _strands(at), each - 1)
        word = tl.where(place < 32, words[0], words[1])
        return (word >> (place % 32)) & 1
    else:
        return (words[lane // 32] >> (lane % 32)) & 1
