"""Signs and the Walsh-Hadamard transform of a tile, strides from the longest to 1: lanes, columns, neighbours.

Between lanes and between neighbours a butterfly is two additions of tensors. Between columns each thread takes its
partner's number by a shuffle and adds it to its own, whose sign changes in the upper half: one multiply-add by 1 or -1.
"""

import triton
import triton.language as tl

from thinwire.kernels.triton.numbers import SIGN_BIT, bits_of, float_of, hash32
from thinwire.kernels.triton.tiles import log2, partner, row_start


@triton.jit
def hadamard(tile, column, span, T: tl.constexpr, WHOLE: tl.constexpr):
    """The transform of every row, not normalised. WHOLE: the columns are exactly those of the span."""
    V: tl.constexpr = T.vector
    tile = _between(tile, T.lanes, V, T)
    for stage in tl.static_range(log2(T.columns)):
        tile = _between_columns(tile, column, span, T.columns >> (stage + 1), T, WHOLE)
    return _between(tile, V, 1, T)


@triton.jit
def _between(tile, COUNT: tl.constexpr, STEP: tl.constexpr, T: tl.constexpr):
    """Butterflies between tensors of the tuple: of COUNT, each STEP from the next."""
    for stage in tl.static_range(log2(COUNT)):
        tile = _butterfly(tile, STEP * (COUNT >> (stage + 1)), T)
    return tile


@triton.jit
def _butterfly(tile, STRIDE: tl.constexpr, T: tl.constexpr):
    done = ()
    for i in tl.static_range(T.size):
        if i % (2 * STRIDE) < STRIDE:
            done = done + (tile[i] + tile[i + STRIDE],)
        else:
            done = done + (tile[i - STRIDE] - tile[i],)
    return done


@triton.jit
def _between_columns(tile, column, span, STRIDE: tl.constexpr, T: tl.constexpr, WHOLE: tl.constexpr):
    sign = tl.where((column & STRIDE) != 0, -1.0, 1.0)
    done = ()
    for i in tl.static_range(T.size):
        turned = tl.fma(tile[i], sign, partner(tile[i], column, STRIDE))
        if not WHOLE:
            turned = tl.where(span > STRIDE, turned, tile[i])
        done = done + (turned,)
    return done


@triton.jit
def square_sum(tile, column, T: tl.constexpr):
    """The sum of squares of every row, by the reference's tree, in all columns alike; (rows, columns)."""
    squares = ()
    for i in tl.static_range(T.size):
        squares = squares + (tile[i] * tile[i],)
    squares = _fold(squares, T.lanes, T.vector)
    for stage in tl.static_range(log2(T.columns)):
        folded = ()
        for v in tl.static_range(T.vector):
            folded = folded + (squares[v] + partner(squares[v], column, T.columns >> (stage + 1)),)
        squares = folded
    return _fold(squares, T.vector, 1)[0]


@triton.jit
def _fold(tile, COUNT: tl.constexpr, STEP: tl.constexpr):
    """Halves of COUNT tensors (or groups of STEP of them) added until one is left."""
    for stage in tl.static_range(log2(COUNT)):
        tile = _halved(tile, STEP * (COUNT >> (stage + 1)))
    return tile


@triton.jit
def _halved(tile, HALF: tl.constexpr):
    folded = ()
    for i in tl.static_range(HALF):
        folded = folded + (tile[i] + tile[i + HALF],)
    return folded


@triton.jit
def flip(tile, first_word, row, column, span, key_low, key_high, T: tl.constexpr):
    """Change the sign of element i of the tensor where bit i % 32 of hash(i // 32) is set.

    `first_word` is i // 32 of the tile's first element; every block starts on a multiple of 32.
    """
    if T.whole:
        hashes = _shared_hashes(first_word, row, column, key_low, key_high, T)
    done = ()
    for lane in tl.static_range(T.lanes):
        if T.whole:
            word = _word_of(hashes, lane, column, T)
            at = (lane * T.span) % 32 + column * T.vector
        else:
            at = row_start(row, T.block, T) + lane * span + column * T.vector
            word = hash32(first_word + (at >> 5).to(tl.uint32), tl.zeros_like(at), key_low, key_high)
        signs = (word.to(tl.uint32, bitcast=True) >> (at & 31).to(tl.uint32)).to(tl.int32, bitcast=True)
        for v in tl.static_range(T.vector):
            done = done + (float_of(bits_of(tile[lane * T.vector + v]) ^ ((signs << (31 - v)) & SIGN_BIT)),)
    return done


@triton.jit
def _shared_hashes(first_word, row, column, key_low, key_high, T: tl.constexpr):
    """The words of a row's signs, each made by one thread: number n by column n % columns, in tensor n // columns."""
    hashes = ()
    for n in tl.static_range(0, T.block // 32, T.columns):
        index = row * (T.block // 32) + n + column
        word = hash32(first_word + index.to(tl.uint32), tl.zeros_like(index), key_low, key_high)
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
