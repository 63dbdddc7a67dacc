"""Tiles from and to memory: floats in groups of neighbors, codes packed into the bytes of their planes.

Every function takes the tile T ([Note: A tile] in tile.py), and most take its position. All tensors have the shape
(rows, columns), even if a row has only one number: it is then the same in all columns.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from thinwire.kernels.triton.four_bytes import signed
from thinwire.kernels.triton.memory import load_bytes, load_floats, opaque, store_bytes, store_floats, wide

# Modes of feedback: what is encoded, and what is stored for later.
ALONE = tl.constexpr(0)  # x
RESIDUAL = tl.constexpr(1)  # x + residual; residual = what was lost of it, unchanged in non-finite blocks
OWED = tl.constexpr(2)  # x + factor * memory; left = what was lost of it
CHANGE = tl.constexpr(3)  # x + factor * memory, rounded once; left = what the wire decodes to


class Blocks(NamedTuple):
    """The blocks of a program. Length and span are known at compile time for full ones, at launch for a short one."""

    first: Any
    end: Any  # all blocks of this length are before it
    length: Any  # elements per block
    span: Any  # elements per lane


class Position(NamedTuple):
    """Where a tile is."""

    first: Any  # the block of its first row
    length: Any  # as in Blocks
    span: Any  # as in Blocks
    row: Any  # past the last block, that block's row again, so that loads need no mask
    column: Any
    inside: Any  # rows and columns that exist
    there: Any  # columns that exist: what can be loaded


@triton.jit
def position(blocks, T: tl.constexpr):
    """The position of the tile that holds the blocks."""
    row, column = rows_and_columns(T)
    inside = blocks.first + row < blocks.end
    there = tl.full((T.rows, T.columns), 1, tl.int1)
    if not T.whole:
        there = column * T.vector < blocks.span
        inside = inside & there
    if T.rows > 1:
        row = tl.minimum(row, (blocks.end - 1 - blocks.first).to(tl.int32))
    return Position(blocks.first, blocks.length, blocks.span, row, column, inside, there)


@triton.jit
def piece(blocks, start, T: tl.constexpr, END: tl.constexpr = False):
    """The position of the columns from `start` on of a block that is worked on piece by piece.

    END: compare with the end, which all blocks precede: ptxas then takes fewer registers (fp16 on sm_90: 32, not 47).
    """
    row, column = rows_and_columns(T)
    column = column + start
    inside = (blocks.first + row < blocks.end if END else row >= 0) & (column < blocks.span)
    return Position(blocks.first, wide(blocks.length), wide(blocks.span), row, column, inside, inside)


@triton.jit
def rows_and_columns(T: tl.constexpr):
    """The number of the row, and of the column, that each thread holds."""
    row = tl.broadcast_to(tl.arange(0, T.rows)[:, None], (T.rows, T.columns))
    column = tl.broadcast_to(tl.arange(0, T.columns)[None, :], (T.rows, T.columns))
    return row, column


@triton.jit
def row_start(row, STEP: tl.constexpr, T: tl.constexpr):
    """row * STEP. A step of more than 32 bits occurs only in tiles of one row, whose row is 0."""
    if T.rows > 1:
        row = row * STEP
    return row


@triton.jit
def load(pointer, at, T: tl.constexpr):
    """The tile of floats that starts at `pointer`, as fp32; zeros past the length of its blocks."""
    tile = ()
    start = pointer + (row_start(at.row, T.block, T) + at.column * T.vector)
    for lane in tl.static_range(T.lanes):
        there = at.there & (lane * at.span + at.column * T.vector < at.length) if T.loose else at.there
        tile = tile + load_floats(start, lane * at.span, there, T.vector, T.grouped)
    return tile


@triton.jit
def store(pointer, tile, at, T: tl.constexpr):
    """Write a tile of floats in the dtype of `pointer`."""
    start = pointer + (row_start(at.row, T.block, T) + at.column * T.vector)
    for lane in tl.static_range(T.lanes):
        inside = at.inside & (lane * at.span + at.column * T.vector < at.length) if T.loose else at.inside
        group = tile[lane * T.vector : (lane + 1) * T.vector]
        store_floats(start, group, lane * at.span, inside, T.vector, T.grouped)


# --- code planes ------------------------------------------------------------------------------------------------------
# Lane k is in bank k % banks of a plane, its bits k // banks places up in the byte. A word holds the bytes of a
# column's `vector` neighbors in one bank.


@triton.jit
def store_codes(planes, words, bad, zero, at, T: tl.constexpr):
    """Write the packed codes of a tile. Bad rows get zeros; if codes are levels, `zero` rows get the code `blank`."""
    for p in tl.static_range(len(T.planes)):
        for bank in tl.static_range(T.banks[p]):
            word = words[T.starts[p] + bank]
            if T.gaussian:
                word = tl.where(zero, everywhere(T.blank >> T.shifts[p], T.planes[p], T.vector), word)
            start, place = _word_at(planes, p, bank, at, T)
            store_bytes(start, place, tl.where(bad, 0, word), at.inside, T.words[p], T.vector)


@triton.jit
def _word_at(planes, p: tl.constexpr, bank: tl.constexpr, at, T: tl.constexpr):
    """Where the words of bank 0 are in plane p, and how many words further, in all threads, those of `bank` are."""
    start = planes[p] + (row_start(at.row, T.span * T.banks[p] // T.vector, T) + at.column) * T.vector
    return start, bank * (at.span // T.vector)


@triton.jit
def packed(codes, BIAS: tl.constexpr, T: tl.constexpr):
    """The words of every bank of every plane. `codes` are int32, each BIAS, a multiple of 256, more than the code."""
    words = ()
    for p in tl.static_range(len(T.planes)):
        for bank in tl.static_range(T.banks[p]):
            words = words + (pack(codes, p, bank, BIAS, T),)
    return words


@triton.jit
def pack(codes, p: tl.constexpr, bank: tl.constexpr, BIAS: tl.constexpr, T: tl.constexpr):
    """The word of one bank. With one plane all biases are subtracted at once, at the end: one operation per code."""
    WIDTH: tl.constexpr = T.planes[p]
    word = tl.zeros_like(codes[0])
    for v in tl.static_range(T.vector):
        for high in tl.static_range(8 // WIDTH):
            code = codes[(bank + high * T.banks[p]) * T.vector + v]
            if len(T.planes) > 2:
                code = opaque(code)
            if len(T.planes) > 1:
                code = (code >> T.shifts[p]) & ((1 << WIDTH) - 1)
            word = word + (code << (8 * v + high * WIDTH))
    if len(T.planes) == 1:
        word = word - everywhere(BIAS, WIDTH, T.vector)
    return word


@triton.constexpr_function
def place_index(place, width, bank, banks, vector):
    """The tensor of a tile whose codes stand at a place of a bank's word."""
    v, high = divmod(place, 8 // width)
    return (bank + high * banks) * vector + v


@triton.constexpr_function
def everywhere(code, width, count):
    """The sum of a code in every place of `count` bytes of a plane, modulo 2**32, as a signed number."""
    code = code & ((1 << width) - 1) if code < 256 else code
    return signed(sum(code << (8 * i + place) for i in range(count) for place in range(0, 8, width)))


@triton.jit
def load_codes(planes, at, T: tl.constexpr):
    """The words of every bank of every plane; for 16-bit casts, the numbers."""
    if T.bits == 16:
        return load_halves(planes[0], at, T)
    else:
        words = ()
        for p in tl.static_range(len(T.planes)):
            for bank in tl.static_range(T.banks[p]):
                start, place = _word_at(planes, p, bank, at, T)
                words = words + (load_bytes(start, place, at.there, T.words[p], T.vector),)
        return words


@triton.jit
def load_halves(plane, at, T: tl.constexpr):
    """The tile of a plane of 16-bit floats."""
    tile = ()
    halves = plane.to(tl.pointer_type(tl.float16))
    for lane in tl.static_range(T.lanes):
        element = row_start(at.row, T.block, T) + lane * at.span + at.column * T.vector
        tile = tile + load_floats(halves, element, at.there, T.vector, T.words[0], T.even)
    return tile


@triton.jit
def store_halves(plane, tile, at, T: tl.constexpr):
    """The opposite of load_halves."""
    halves = plane.to(tl.pointer_type(tl.float16))
    for lane in tl.static_range(T.lanes):
        element = row_start(at.row, T.block, T) + lane * at.span + at.column * T.vector
        group = tile[lane * T.vector : (lane + 1) * T.vector]
        store_floats(halves, group, element, at.inside, T.vector, T.words[0], T.even)


@triton.jit
def code_of(words, index: tl.constexpr, T: tl.constexpr):
    """The codes of tensor `index` of a tile, from the words of its planes."""
    code = _part(words, 0, index // T.vector, index % T.vector, T)
    for p in tl.static_range(1, len(T.planes)):
        code = code | (_part(words, p, index // T.vector, index % T.vector, T) << T.shifts[p])
    return code


@triton.jit
def _part(words, p: tl.constexpr, lane: tl.constexpr, v: tl.constexpr, T: tl.constexpr):
    """The bits of a lane's codes that lie in plane p."""
    word = words[T.starts[p] + lane % T.banks[p]]
    return (word >> (8 * v + (lane // T.banks[p]) * T.planes[p])) & ((1 << T.planes[p]) - 1)


@triton.jit
def load_scale(pointer, at, T: tl.constexpr):
    """The bits of the bfloat16 of each row, as those of an fp32."""
    return load_bytes(pointer, at.row, at.there, T.even, 2) << 16


@triton.jit
def store_scale(pointer, bits, at, T: tl.constexpr):
    """Write the 16 bits of each row, from one column."""
    store_bytes(pointer, at.row, bits, at.inside & (at.column == 0), T.even, 2)


# --- tiles as numbers -------------------------------------------------------------------------------------------------


@triton.jit
def added(a, b):
    """a + b."""
    done = ()
    for i in tl.static_range(len(a)):
        done = done + (a[i] + b[i],)
    return done


@triton.jit
def minus(a, b):
    """a - b."""
    done = ()
    for i in tl.static_range(len(a)):
        done = done + (a[i] - b[i],)
    return done


@triton.jit
def fused(tile, factor, b):
    """tile * factor + b, rounded once."""
    done = ()
    for i in tl.static_range(len(tile)):
        done = done + (tl.fma(tile[i], factor, b[i]),)
    return done


@triton.jit
def times(tile, factor):
    """tile * factor."""
    return [x * factor for x in tile]


@triton.jit
def kept(tile, at, other, T: tl.constexpr):
    """The tile, with `other` in columns that do not exist."""
    if T.whole:
        return tile
    else:
        return [tl.where(at.there, x, other) for x in tile]


# --- between columns --------------------------------------------------------------------------------------------------


@triton.constexpr_function
def log2(n):
    """The logarithm of a power of two."""
    return n.bit_length() - 1


@triton.jit
def partner(x, STRIDE: tl.constexpr, T: tl.constexpr):
    """The number in column `column ^ STRIDE`, by one shuffle."""
    _row, column = rows_and_columns(T)
    return tl.gather(x, column ^ STRIDE, axis=1)


@triton.jit
def largest(tile, T: tl.constexpr):
    """The largest number of each row of int32 or float tensors, in all columns."""
    most = tile[0]
    for i in tl.static_range(1, T.size):
        most = tl.maximum(most, tile[i])
    if T.columns > 32 and not T.gaussian:  # more than a warp
        return tl.broadcast_to(tl.max(most, axis=1, keep_dims=True), (T.rows, T.columns))
    else:
        for stage in tl.static_range(log2(T.columns)):
            most = tl.maximum(most, partner(most, T.columns >> (stage + 1), T))
        return most


@triton.jit
def row_total(x, T: tl.constexpr):
    """The sum of each row of one int32 tensor, in all columns."""
    for stage in tl.static_range(log2(T.columns)):
        x = x + partner(x, T.columns >> (stage + 1), T)
    return x


@triton.jit
def anywhere(x):
    """The largest number of one int32 tensor."""
    return tl.max(tl.max(x, axis=1), axis=0)
