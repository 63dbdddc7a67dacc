"""Signs and the Walsh-Hadamard transform of a tile, strides from the longest to 1: lanes, columns, neighbors.

Between lanes and between neighbors a butterfly is two additions of tensors. Between columns each thread takes its
partner's number by a shuffle and adds it to its own, whose sign changes in the upper half: one multiply-add by 1 or -1.
"""

import triton
import triton.language as tl

from thinwire.kernels.triton.memory import filled, instruction
from thinwire.kernels.triton.numbers import float_of, hash32
from thinwire.kernels.triton.tiles import added, log2, partner, row_start

TEST = ".reg .pred p; .reg .b32 t; and.b32 t, $2, {}; setp.ne.b32 p, t, 0;"
FLIP = tl.constexpr(f"{{ {TEST} mov.b32 $0, $1; @p neg.f32 $0, $0; }}")


@triton.jit
def hadamard(tile, at, T: tl.constexpr):
    """The transform of every row, not normalized."""
    tile = _between(tile, T.lanes, T.vector, T)
    for stage in tl.static_range(log2(T.columns)):
        tile = _between_columns(tile, at, T.columns >> (stage + 1), T)
    return _between(tile, T.vector, 1, T)


@triton.jit
def _between(tile, COUNT: tl.constexpr, STEP: tl.constexpr, T: tl.constexpr):
    """Butterflies between tensors of the tuple: of COUNT, each STEP from the next."""
    for stage in tl.static_range(log2(COUNT)):
        tile = _butterfly(tile, STEP * (COUNT >> (stage + 1)), T)
    return tile


@triton.jit
def _butterfly(tile, STRIDE: tl.constexpr, T: tl.constexpr):
    return [tile[i] + tile[i + STRIDE] if i % (2 * STRIDE) < STRIDE else tile[i - STRIDE] - tile[i] for i in T.each]


@triton.jit
def _between_columns(tile, at, STRIDE: tl.constexpr, T: tl.constexpr):
    sign = tl.where((at.column & STRIDE) != 0, -1.0, 1.0)
    if T.loose:
        return [tl.where(at.span > STRIDE, tl.fma(x, sign, partner(x, STRIDE, T)), x) for x in tile]
    else:
        return [tl.fma(x, sign, partner(x, STRIDE, T)) for x in tile]


@triton.jit
def square_sum(tile, T: tl.constexpr):
    """(rows, columns): the sum of squares of every row, by the reference's tree, the same in all columns."""
    squares = _fold([x * x for x in tile], T.lanes, T.vector)
    for stage in tl.static_range(log2(T.columns)):
        squares = [x + partner(x, T.columns >> (stage + 1), T) for x in squares]
    return _fold(squares, T.vector, 1)[0]


@triton.jit
def _fold(tile, COUNT: tl.constexpr, STEP: tl.constexpr):
    """Halves of COUNT tensors (or groups of STEP of them) added until one is left."""
    for stage in tl.static_range(log2(COUNT)):
        tile = _halved(tile, STEP * (COUNT >> (stage + 1)))
    return tile


@triton.jit
def _halved(tile, HALF: tl.constexpr):
    return added(tile[0:HALF], tile[HALF : 2 * HALF])


@triton.jit
def flip(tile, keys, at, T: tl.constexpr):
    """Change the sign of element i of the tensor where bit i % 32 of hash(i // 32) is set.

    Every block starts on a multiple of 32.
    """
    first_word = (at.first * T.block // 32).to(tl.uint32)
    if T.whole:
        hashes = _shared_hashes(first_word, keys, at, T)
    done = ()
    for lane in tl.static_range(T.lanes):
        if T.whole:
            word = _word_of(hashes, lane, at.column, T)
            element = (lane * T.span) % 32 + at.column * T.vector
        else:
            element = row_start(at.row, T.block, T) + lane * at.span + at.column * T.vector
            word = hash32(first_word + (element >> 5).to(tl.uint32), tl.zeros_like(element), keys)
        signs = (word.to(tl.uint32, bitcast=True) >> (element & 31).to(tl.uint32)).to(tl.int32, bitcast=True)
        for v in tl.static_range(T.vector):
            done = done + (_flipped(tile[lane * T.vector + v], signs, 1 << v),)
    return done


@triton.jit
def _flipped(x, signs, BIT: tl.constexpr):
    """-x where a bit is set. The bit is a predicate, as ptxas takes up to seven of these from a register at once."""
    return float_of(instruction(filled(FLIP, BIT), "=r,f,r", (x, signs)))


@triton.jit
def _shared_hashes(first_word, keys, at, T: tl.constexpr):
    """The words of a row's signs, each made by one thread: number n by column n % columns, in tensor n // columns."""
    hashes = ()
    for n in tl.static_range(0, T.block // 32, T.columns):
        index = at.row * (T.block // 32) + n + at.column
        word = hash32(first_word + index.to(tl.uint32), tl.zeros_like(index), keys)
        hashes = hashes + (word.to(tl.int32, bitcast=True),)
    return hashes


@triton.jit
def _word_of(hashes, lane: tl.constexpr, column, T: tl.constexpr):
    """The word that holds the signs of a lane's elements in each column."""
    first: tl.constexpr = lane * T.span // 32
    if T.span <= 32:
        return tl.gather(hashes[first // T.columns], column * 0 + first % T.columns, axis=1)
    else:
        return tl.gather(hashes[first // T.columns], (first % T.columns) + column * T.vector // 32, axis=1)
