"""Tiles from and to memory: floats in groups of neighbours, codes packed into the bytes of their planes.

Every function takes the tile T ([Note: A tile] in tile.py) and the span of its lanes, which is a number known at
compile time for full blocks and one of the launch for the short last block. All tensors have the shape (rows, columns),
also the numbers that a row has once: these are the same in all columns. `inside` masks what exists.
"""

import triton
import triton.language as tl

from thinwire.kernels.triton.memory import load_floats, load_words, opaque, store_floats, store_words


@triton.jit
def places(T: tl.constexpr):
    """Row and column numbers."""
    row = tl.broadcast_to(tl.arange(0, T.rows)[:, None], (T.rows, T.columns))
    column = tl.broadcast_to(tl.arange(0, T.columns)[None, :], (T.rows, T.columns))
    return row, column


@triton.jit
def row_start(row, STEP: tl.constexpr, T: tl.constexpr):
    """row * STEP; a step that 32 bits do not hold occurs in tiles of one row only."""
    if T.rows > 1:
        row = row * STEP
    return row


@triton.jit
def load(pointer, row, column, span, length, inside, T: tl.constexpr, RAGGED: tl.constexpr):
    """The tile of floats that starts at `pointer`, as fp32; zeros past the `length` of a ragged block."""
    tile = ()
    for lane in tl.static_range(T.lanes):
        at = lane * span + column * T.vector
        mask = _before(at, length, inside, RAGGED)
        tile = tile + load_floats(pointer, row_start(row, T.block, T) + at, mask, T.vector, T.grouped)
    return tile


@triton.jit
def store(pointer, tile, row, column, span, length, inside, T: tl.constexpr, RAGGED: tl.constexpr):
    """Write a tile of floats in the dtype of `pointer`."""
    for lane in tl.static_range(T.lanes):
        at = lane * span + column * T.vector
        mask = _before(at, length, inside, RAGGED)
        group = tile[lane * T.vector : (lane + 1) * T.vector]
        store_floats(pointer, group, row_start(row, T.block, T) + at, mask, T.vector, T.grouped)


@triton.jit
def _before(element, length, inside, RAGGED: tl.constexpr):
    if RAGGED:
        inside = inside & (element < length)
    return inside


@triton.jit
def load_bytes(pointer, at, inside, WHOLE: tl.constexpr, COUNT: tl.constexpr):
    """COUNT little-endian bytes, `at` times COUNT from the pointer, as an int32; one by one where they may lie odd."""
    pointer = pointer + at * COUNT
    if WHOLE or COUNT == 1:
        return load_words(pointer, inside, COUNT)[0]
    else:
        word = load_words(pointer, inside, 1)[0]
        for i in tl.static_range(1, COUNT):
            word = word | (load_words(pointer + i, inside, 1)[0] << (8 * i))
        return word


@triton.jit
def store_bytes(pointer, at, word, inside, WHOLE: tl.constexpr, COUNT: tl.constexpr):
    """The opposite of load_bytes."""
    pointer = pointer + at * COUNT
    if WHOLE or COUNT == 1:
        store_words(pointer, (word,), inside, COUNT)
    else:
        for i in tl.static_range(COUNT):
            store_words(pointer + i, (word >> (8 * i),), inside, 1)


# --- code planes ------------------------------------------------------------------------------------------------------
# Lane k is in bank k % banks of a plane, its bits k // banks places up in the byte. A word holds the bytes of a
# column's `vector` neighbours in one bank.


@triton.jit
def store_codes(planes, words, row, column, span, inside, bad, zero, T: tl.constexpr):
    """Write the packed codes of a tile. Bad rows get zeros, Lloyd rows of zeros the smallest positive level's code."""
    for p in tl.static_range(len(T.planes)):
        for bank in tl.static_range(T.banks[p]):
            word = words[T.starts[p] + bank]
            if T.lloyd:
                word = tl.where(zero, everywhere(T.half >> T.shifts[p], T.planes[p], T.vector), word)
            at = row_start(row, T.span * T.banks[p] // T.vector, T) + bank * (span // T.vector) + column
            store_bytes(planes[p], at, tl.where(bad, 0, word), inside, T.words[p], T.vector)


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
    """The word of one bank. With one plane the biases are subtracted together, at the end: one operation a code."""
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
    total = sum(code << (8 * i + place) for i in range(count) for place in range(0, 8, width))
    return (total + (1 << 31)) % (1 << 32) - (1 << 31)


@triton.jit
def load_codes(planes, row, column, span, inside, T: tl.constexpr):
    """The words of every bank of every plane; of 16-bit casts the numbers."""
    if T.bits == 16:
        return load_halves(planes[0], row, column, span, inside, T)
    else:
        words = ()
        for p in tl.static_range(len(T.planes)):
            for bank in tl.static_range(T.banks[p]):
                at = row_start(row, T.span * T.banks[p] // T.vector, T) + bank * (span // T.vector) + column
                words = words + (load_bytes(planes[p], at, inside, T.words[p], T.vector),)
        return words


@triton.jit
def load_halves(plane, row, column, span, inside, T: tl.constexpr):
    """The tile of a plane of 16-bit floats."""
    tile = ()
    for lane in tl.static_range(T.lanes):
        at = row_start(row, T.block, T) + lane * span + column * T.vector
        if T.even:
            tile = tile + load_floats(plane.to(tl.pointer_type(tl.float16)), at, inside, T.vector, T.words[0])
        else:
            for v in tl.static_range(T.vector):
                word = load_bytes(plane, at + v, inside, False, 2)
                tile = tile + (word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32),)
    return tile


@triton.jit
def store_halves(plane, tile, row, column, span, inside, T: tl.constexpr):
    """The opposite of load_halves."""
    for lane in tl.static_range(T.lanes):
        at = row_start(row, T.block, T) + lane * span + column * T.vector
        if T.even:
            group = tile[lane * T.vector : (lane + 1) * T.vector]
            store_floats(plane.to(tl.pointer_type(tl.float16)), group, at, inside, T.vector, T.words[0])
        else:
            for v in tl.static_range(T.vector):
                short = tile[lane * T.vector + v].to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
                store_bytes(plane, at + v, short, inside, False, 2)


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
def load_scale(pointer, row, inside, T: tl.constexpr):
    """The bits of the bfloat16 of each row, as those of an fp32."""
    return load_bytes(pointer, row, inside, T.even, 2) << 16


@triton.jit
def store_scale(pointer, bits, row, inside, T: tl.constexpr):
    """The 16 bits of each row, once."""
    store_bytes(pointer, row, bits, inside, T.even, 2)


# --- between columns --------------------------------------------------------------------------------------------------


@triton.constexpr_function
def log2(n):
    """Of a power of two."""
    return n.bit_length() - 1


@triton.jit
def partner(x, column, STRIDE: tl.constexpr):
    """The number STRIDE columns away, by the bits of the column's number: one shuffle."""
    return tl.gather(x, column ^ STRIDE, axis=1)


@triton.jit
def largest(tile, column, T: tl.constexpr):
    """The largest number of each row of int32 or float tensors, in all columns."""
    most = tile[0]
    for i in tl.static_range(1, T.size):
        most = tl.maximum(most, tile[i])
    if T.columns > 32 and not T.lloyd:  # more than a warp
        return tl.broadcast_to(tl.max(most, axis=1, keep_dims=True), (T.rows, T.columns))
    else:
        for stage in tl.static_range(log2(T.columns)):
            most = tl.maximum(most, partner(most, column, T.columns >> (stage + 1)))
        return most


@triton.jit
def row_total(x, column, T: tl.constexpr):
    """The sum of each row of one int32 tensor, in all columns."""
    for stage in tl.static_range(log2(T.columns)):
        x = x + partner(x, column, T.columns >> (stage + 1))
    return x


@triton.jit
def anywhere(x):
    """The largest number of one int32 tensor."""
    return tl.max(tl.max(x, axis=1), axis=0)
