"""The kernels of wires with blocks: encode, decode_sum and recode.

A program works on one tile of full blocks; the last one on the short last block, if there is one, and where a block is
longer than a tile, every program on one block, piece by piece. The first program writes the header and the gaps between
sections. Offsets inside a tile are 32-bit numbers; where a tile starts is a 64-bit one.
"""

import triton
import triton.language as tl

from thinwire import wire as wire_format
from thinwire.kernels import schema
from thinwire.kernels.triton.lloyd import SURELY_NOT_HUGE, SURELY_NOT_TINY, lloyd_words, settle
from thinwire.kernels.triton.memory import load_floats
from thinwire.kernels.triton.numbers import (
    HUGE_BITS,
    INF_BITS,
    LIFT,
    LOWER,
    ROUNDER_BITS,
    SIGN_BIT,
    TINY_BITS,
    UNLIFT,
    UNLOWER,
    bits_of,
    domain_factor,
    float_of,
    round_bf16,
    size_bits,
    stored_scale,
    undo,
)
from thinwire.kernels.triton.rotation import flip, hadamard, square_sum
from thinwire.kernels.triton.scaled import (
    BF16_MAX,
    FLOAT_MAX,
    cast_codes,
    cast_value,
    cast_values,
    integer_codes,
    integer_value,
    scale_of,
)
from thinwire.kernels.triton.sums import load_wires, scale_size, sum_any, sum_loaded, sum_wires
from thinwire.kernels.triton.tiles import (
    anywhere,
    largest,
    load,
    load_bytes,
    packed,
    places,
    store,
    store_codes,
    store_halves,
    store_scale,
)

LLOYD_REACH, OTHER_REACH = tl.constexpr(schema.LLOYD_REACH), tl.constexpr(schema.OTHER_REACH)
KEY_WORD = tl.constexpr(wire_format.KEY_AT // 4)  # of the header's words; the next one is its upper half
# Arguments that change from call to call: a kernel compiled for one value serves all.
_CHANGING = (
    *("head0", "head1", "head2", "key_low", "key_high", "numel_low", "numel_high", "dither_low", "dither_high"),
    *("full", "length", "span", "stride", "world", "scales_at", "scales_end", "minima_at", "minima_end"),
    *("plane0", "plane1", "plane2", "codes_end", "nbytes"),
)


# --- encode -----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=_CHANGING)
def encode_kernel(
    x,
    residual,
    wire,
    table,
    head0,
    head1,
    head2,
    key_low,
    key_high,
    numel_low,
    numel_high,
    dither_low,
    dither_high,
    full,
    length,
    span,
    scales_at,
    scales_end,
    minima_at,
    minima_end,
    plane0,
    plane1,
    plane2,
    codes_end,
    nbytes,
    root,
    tail_root,
    T: tl.constexpr,
    TAIL: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    """wire = encode(x + residual); residual = x + residual - decode(wire), non-finite blocks left as they were.

    full: blocks but a short last one, which has `length` elements and codes in lanes of `span`. root: 1 / sqrt(codes).
    """
    program = tl.program_id(0)
    if program == 0:
        header = (head0, head1, head2, 0, key_low, key_high, numel_low, numel_high)
        write_frame(wire, header, scales_end, minima_at, minima_end, plane0, codes_end, nbytes)
    keys = (key_low, key_high, dither_low, dither_high)
    if program < tl.cdiv(full, T.rows):
        first = program.to(tl.int64) * T.rows
        wires = sections(wire, first, scales_at, minima_at, plane0, plane1, plane2, T)
        if T.pieces:
            _encode_pieces(x, residual, wires, keys, first, wide(T.block), wide(T.span), T, RESIDUAL)
        else:
            _encode_tile(x, residual, wires, table, keys, first, full, T.block, T.span, root, T, False, RESIDUAL)
    elif TAIL:
        first = wide(full)
        wires = sections(wire, first, scales_at, minima_at, plane0, plane1, plane2, T)
        if T.ragged.pieces:
            _encode_pieces(x, residual, wires, keys, first, wide(length), wide(span), T.ragged, RESIDUAL)
        else:
            end = full + 1
            _encode_tile(x, residual, wires, table, keys, first, end, length, span, tail_root, T.ragged, True, RESIDUAL)


@triton.jit
def _encode_tile(
    x,
    residual,
    wires,
    table,
    keys,
    first,
    end,
    length,
    span,
    root,
    T: tl.constexpr,
    RAGGED: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    row, column = places(T)
    inside = masks(row, column, first, end, span, T)
    last = 0.0
    if RAGGED and T.affine:
        last = _last(x, residual, first, length, T, RESIDUAL)
    tile = _input(x, residual, first, row, column, span, length, last, inside, T, RAGGED, RESIDUAL)
    if RAGGED and RESIDUAL:
        tl.debug_barrier()  # a short tile is held by several warps, and none may store what another has still to load
    if T.lloyd:
        scale, minimum, values = _put_lloyd(
            tile, wires, table, keys, first, row, column, span, root, inside, T, RAGGED, RESIDUAL
        )
    else:
        peak, low, high = _extent(tile, column, inside, T)
        factor = domain_factor(peak)
        scale, minimum, values = _put_scaled(
            tile, peak, low, high, factor, undo(factor), wires, keys, first, row, column, span, inside, T
        )
    if RESIDUAL:
        decoded = _decoded(values, scale, minimum, root, keys, first, row, column, span, T, RAGGED)
        _store_residual(residual, tile, decoded, first, row, column, span, length, inside, T, RAGGED)


@triton.jit
def _input(
    x,
    residual,
    first,
    row,
    column,
    span,
    length,
    last,
    inside,
    T: tl.constexpr,
    RAGGED: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    """x + residual. Past the end of a ragged block zeros, or its `last` element where a zero would widen its range."""
    start = first * T.block
    tile = load(x + start, row, column, span, length, inside, T, RAGGED)
    if RESIDUAL:
        carried = load(residual + start, row, column, span, length, inside, T, RAGGED)
        summed = ()
        for i in tl.static_range(T.size):
            summed = summed + (tile[i] + carried[i],)
        tile = summed
    if RAGGED and T.affine:
        filled = ()
        for i in tl.static_range(T.size):
            filled = filled + (tl.where(i * span + column < length, tile[i], last),)
        tile = filled
    return tile


@triton.jit
def _last(x, residual, first, length, T: tl.constexpr, RESIDUAL: tl.constexpr):
    """The last element of a block of x + residual, everywhere."""
    at = tl.zeros((T.rows, T.columns), tl.int32) + (length - 1)
    last = load_floats(x + first * T.block, at, at >= 0, 1, True)[0]
    if RESIDUAL:
        last = last + load_floats(residual + first * T.block, at, at >= 0, 1, True)[0]
    return last


@triton.jit
def _encode_pieces(x, residual, wires, keys, first, length, span, T: tl.constexpr, RESIDUAL: tl.constexpr):
    """A block longer than a tile: once for its scale, once for its codes."""
    row, column = places(T)
    there = row >= 0
    last = 0.0
    if T.affine:  # before a residual is written
        last = _last(x, residual, first, length, T, RESIDUAL)
        tl.debug_barrier()
    peak = tl.zeros((T.rows, T.columns), tl.int32)
    low = tl.full((T.rows, T.columns), float("inf"), tl.float32)
    high = tl.full((T.rows, T.columns), float("-inf"), tl.float32)
    for start in range(0, span, T.columns):
        inside = there & (column + start < span)
        tile = _input(x, residual, first, row, column + start, span, length, last, inside, T, True, RESIDUAL)
        piece_peak, piece_low, piece_high = _extent(tile, column, inside, T)
        peak = tl.maximum(peak, piece_peak)
        low = tl.minimum(low, piece_low)
        high = tl.maximum(high, piece_high)
    factor = domain_factor(peak)
    for start in range(0, span, T.columns):
        at = column + start
        inside = there & (at < span)
        tile = _input(x, residual, first, row, at, span, length, last, inside, T, True, RESIDUAL)
        scale, minimum, values = _put_scaled(
            tile, peak, low, high, factor, undo(factor), wires, keys, first, row, at, span, inside, T
        )
        if RESIDUAL:
            decoded = _decoded(values, scale, minimum, 1.0, keys, first, row, at, span, T, True)
            _store_residual(residual, tile, decoded, first, row, at, span, length, inside, T, True)


@triton.jit
def _extent(tile, column, inside, T: tl.constexpr):
    """(peak_bits, low, high) of the columns inside; the latter two for affine rows only."""
    sizes = ()
    for i in tl.static_range(T.size):
        sizes = sizes + (_kept(size_bits(tile[i]), inside, 0, T),)
    peak = largest(sizes, column, T)
    low = tl.zeros((T.rows, T.columns), tl.float32)
    high = tl.zeros((T.rows, T.columns), tl.float32)
    if T.affine:
        turned = ()
        kept = ()
        for i in tl.static_range(T.size):
            turned = turned + (_kept(-tile[i], inside, float("-inf"), T),)
            kept = kept + (_kept(tile[i], inside, float("-inf"), T),)
        low = -largest(turned, column, T)
        high = largest(kept, column, T)
    return peak, low, high


@triton.jit
def _kept(x, inside, other, T: tl.constexpr):
    """x, or `other` in columns that do not exist."""
    if not T.whole:
        x = tl.where(inside, x, other)
    return x


@triton.jit
def _put_scaled(tile, peak, low, high, factor, post, wires, keys, first, row, column, span, inside, T: tl.constexpr):
    """Write scales, minima and codes of tile * factor; (stored scale, stored minimum, values of the codes)."""
    scales, minima, planes = wires
    scale, minimum, most, bad = scale_of(bits_of(float_of(peak) * factor), low * factor, high * factor, post, T)
    stored = stored_scale(scale, post, bad)
    small = tl.where(post < 1, minimum, minimum * post)
    stored_minimum = tl.where(bad, 0, round_bf16(bits_of(small)))
    store_scale(scales, stored, row, inside & (column == 0), T)
    if T.affine:
        store_scale(minima, stored_minimum, row, inside & (column == 0), T)
    values = ()
    if T.bits == 16:
        values = cast_values(tile, factor, scale, most, bad, T)
        store_halves(planes[0], values, row, column, span, inside, T)
        rounded = ()
        for i in tl.static_range(T.size):
            rounded = rounded + (values[i].to(tl.float16).to(tl.float32),)
        values = rounded
    elif T.cast:
        codes = cast_codes(cast_values(tile, factor, scale, most, bad, T), T)
        store_codes(planes, packed(codes, 0, T), row, column, span, inside, bad, bad, T)
        for i in tl.static_range(T.size):
            values = values + (cast_value(codes[i], T),)
    else:
        dither = (keys[2], keys[3])
        codes = integer_codes(tile, factor, scale, minimum, most, first * T.block, row, column, span, dither, T)
        store_codes(planes, packed(codes, ROUNDER_BITS, T), row, column, span, inside, bad, bad, T)
        for i in tl.static_range(T.size):
            values = values + (integer_value(codes[i], T),)
    return stored, stored_minimum, values


@triton.jit
def _put_lloyd(
    tile,
    wires,
    table,
    keys,
    first,
    row,
    column,
    span,
    root,
    inside,
    T: tl.constexpr,
    RAGGED: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Rotate, write scales and codes; (stored scale, the same in place of a minimum, values of the codes)."""
    post = tl.full((T.rows, T.columns), 1.0, tl.float32)
    tile, energy, up, post, bad = _in_domain(tile, post, column, False, T)
    count = span * T.lanes
    if T.rotated:
        first_word = (first * T.block // 32).to(tl.uint32)
        tile = flip(tile, first_word, row, column, span, keys[0], keys[1], T)
        tile = hadamard(tile, column, span, T, not RAGGED)
        return _put_levels(tile, energy, up, post, bad, root, wires, table, row, column, span, inside, T, VALUES)
    else:
        power = tl.div_rn(energy, tl.full((), 0.0, tl.float32) + count)
        return _put_levels(tile, power, up, post, bad, 1.0, wires, table, row, column, span, inside, T, VALUES)


@triton.jit
def _in_domain(tile, post, column, settled: tl.constexpr, T: tl.constexpr):
    """(tile, energy, up, post, bad): as it is where its energy proves the middle domain, settled otherwise."""
    energy = square_sum(tile, column, T)
    up = tl.full((T.rows, T.columns), 1.0, tl.float32)
    bad = tl.full((T.rows, T.columns), 0, tl.int1)
    if settled:
        tile, energy, up, post, bad = settle(tile, post, column, T)
    else:
        odd = ((energy >= SURELY_NOT_TINY) & (energy < SURELY_NOT_HUGE)).to(tl.int32) ^ 1
        if anywhere(odd) > 0:
            tile, energy, up, post, bad = settle(tile, post, column, T)
    return tile, energy, up, post, bad


@triton.jit
def _put_levels(
    tile,
    power,
    up,
    post,
    bad,
    scale,
    wires,
    table,
    row,
    column,
    span,
    inside,
    T: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Write the codes of rows with this mean square, and the scales that fit, times `scale` and `up`."""
    scales, _minima, planes = wires
    count = tl.full((), 0.0, tl.float32) + span * T.lanes
    words, values, fit = lloyd_words(tile, power, table, count, column, inside, T, VALUES)
    zero = power == 0
    stored = stored_scale(tl.where(zero, 0.0, fit * scale * up), post, bad)
    store_scale(scales, stored, row, inside & (column == 0), T)
    store_codes(planes, words, row, column, span, inside, bad, zero, T)
    return stored, stored, values


@triton.jit
def _decoded(values, stored, minimum, root, keys, first, row, column, span, T: tl.constexpr, RAGGED: tl.constexpr):
    """What a decoder will make of values under the scales that were stored."""
    bits = stored << 16
    lifted = bits < 0
    size = bits & 0x7FFFFFFF
    huge = (size >= HUGE_BITS) & (size <= INF_BITS)
    base = tl.zeros((T.rows, T.columns), tl.float32)
    if T.affine:
        minimum_bits = minimum << 16
        huge = huge | ((minimum_bits & 0x7FFFFFFF) >= HUGE_BITS)
    lower = tl.where(huge & (lifted == 0), LOWER, 1.0)
    post = tl.where(lifted, UNLIFT, tl.where(huge, UNLOWER, 1.0))
    if T.affine:
        base = base + float_of(minimum << 16) * lower
    scale = scale_size(bits) * lower
    z = ()
    for i in tl.static_range(T.size):
        if T.cast:
            z = z + (base + values[i] * scale,)
        else:
            z = z + (tl.fma(values[i], scale, base),)
    if not T.rotated:
        root = 1.0
    z = _finish(z, root, keys, first, row, column, span, T, RAGGED)
    if anywhere((post != 1).to(tl.int32)) > 0:
        z = _leave(z, post, T)
    return z


@triton.jit
def _finish(z, norm, keys, first, row, column, span, T: tl.constexpr, RAGGED: tl.constexpr):
    """Rotate a sum back and multiply by `norm`."""
    if T.rotated:
        z = hadamard(z, column, span, T, not RAGGED)
        z = flip(z, (first * T.block // 32).to(tl.uint32), row, column, span, keys[0], keys[1], T)
    return _times(z, norm, T)


@triton.jit
def _leave(z, post, T: tl.constexpr):
    """z out of the domain that `post` undoes."""
    done = ()
    for i in tl.static_range(T.size):
        done = done + (tl.where(post > 1, saturated(z[i], FLOAT_MAX * LOWER, T), z[i]) * post,)
    return done


@triton.jit
def saturated(z, MOST: tl.constexpr, T: tl.constexpr):
    """MOST in place of what the codes' error took past it. Further out is an overflow, and stays."""
    REACH: tl.constexpr = LLOYD_REACH if T.lloyd else OTHER_REACH
    size = tl.abs(z)
    cut = float_of(bits_of(tl.full(z.shape, MOST, tl.float32)) | (bits_of(z) & SIGN_BIT))
    return tl.where((size > MOST) & (size <= beyond(MOST, REACH)), cut, z)


@triton.constexpr_function
def beyond(most, reach):
    """The end of what is still the codes' error."""
    import struct

    largest_float = 3.4028234663852886e38
    product = min(most * reach, largest_float)
    (rounded,) = struct.unpack("<f", struct.pack("<f", product))
    return rounded


@triton.jit
def _store_residual(
    residual,
    tile,
    decoded,
    first,
    row,
    column,
    span,
    length,
    inside,
    T: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """residual = tile - decoded, where decoded is finite."""
    target = residual + first * T.block
    left = ()
    worst = size_bits(decoded[0])
    for i in tl.static_range(T.size):
        left = left + (tile[i] - decoded[i],)
        worst = tl.maximum(worst, size_bits(decoded[i]))
    if anywhere(worst) >= INF_BITS:
        before = load(target, row, column, span, length, inside, T, RAGGED)
        kept = ()
        for i in tl.static_range(T.size):
            kept = kept + (tl.where(size_bits(decoded[i]) < INF_BITS, left[i], before[i]),)
        left = kept
    store(target, left, row, column, span, length, inside, T, RAGGED)


# --- decode_sum -------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=_CHANGING)
def decode_kernel(
    wire,
    out,
    table,
    stride,
    world,
    head0,
    head1,
    head2,
    key_low,
    key_high,
    numel_low,
    numel_high,
    full,
    length,
    span,
    scales_at,
    minima_at,
    plane0,
    plane1,
    plane2,
    norm,
    tail_norm,
    T: tl.constexpr,
    TAIL: tl.constexpr,
    WORLD: tl.constexpr,
    CHECK: tl.constexpr,
    CALM: tl.constexpr,
):
    """out = scale * sum over ranks, in rank order in fp32, of decode(wire). norm: scale, over sqrt(codes) if rotated.

    CHECK: the headers are compared on the device and the key is theirs; where they differ the sum is NaN. CALM: norm is
    so small that a usual sum stays inside the range of the output.
    """
    program = tl.program_id(0)
    stride = wide(stride)
    keys = (key_low, key_high)
    if CHECK:
        header = (head0, head1, head2, 0, key_low, key_high, numel_low, numel_high)
        key_low, key_high, fine = check_headers(wire, stride, world, header, T.rotated)
        keys = (key_low, key_high)
        norm = tl.where(fine, norm, float("nan"))
        tail_norm = tl.where(fine, tail_norm, float("nan"))
    if program < tl.cdiv(full, T.rows):
        first = program.to(tl.int64) * T.rows
        wires = sections(wire, first, scales_at, minima_at, plane0, plane1, plane2, T)
        _decode_block(
            out, wires, stride, world, table, keys, first, full, T.block, T.span, norm, T, T.pieces, WORLD, CALM
        )
    elif TAIL:
        first = wide(full)
        wires = sections(wire, first, scales_at, minima_at, plane0, plane1, plane2, T)
        end = full + 1
        _decode_block(
            out, wires, stride, world, table, keys, first, end, length, span, tail_norm, T.ragged, True, WORLD, CALM
        )


@triton.jit
def _decode_block(
    out,
    wires,
    stride,
    world,
    table,
    keys,
    first,
    end,
    length,
    span,
    norm,
    T: tl.constexpr,
    RAGGED: tl.constexpr,
    WORLD: tl.constexpr,
    CALM: tl.constexpr,
):
    row, column = places(T)
    if RAGGED and not T.lloyd:
        span = wide(span)
        for start in range(0, span, T.columns):
            at = column + start
            _decode_tile(
                out, wires, stride, world, table, keys, first, end, length, span, norm, row, at, T, True, WORLD, CALM
            )
    else:
        _decode_tile(
            out, wires, stride, world, table, keys, first, end, length, span, norm, row, column, T, RAGGED, WORLD, CALM
        )


@triton.jit
def _decode_tile(
    out,
    wires,
    stride,
    world,
    table,
    keys,
    first,
    end,
    length,
    span,
    norm,
    row,
    column,
    T: tl.constexpr,
    RAGGED: tl.constexpr,
    WORLD: tl.constexpr,
    CALM: tl.constexpr,
):
    inside = masks(row, column, first, end, span, T)
    scales, minima, planes = wires
    target = out + first * T.block
    if WORLD:
        words, bits, low_bits, odd = load_wires(planes, scales, minima, stride, row, column, span, inside, T, WORLD)
    else:
        z, odd = sum_wires(planes, scales, minima, stride, table, row, column, span, inside, T, world)
    trouble = anywhere(odd)
    if not CALM:
        trouble = trouble | 1
    if trouble == 0:
        if WORLD:
            z = sum_loaded(words, bits, low_bits, table, T, WORLD)
        z = _finish(z, norm, keys, first, row, column, span, T, RAGGED)
        store(target, _fitted(z, out, T, False), row, column, span, length, inside, T, RAGGED)
    else:
        z, post = sum_any(planes, scales, minima, stride, table, row, column, span, inside, T, world)
        z = _leave(_finish(z, norm, keys, first, row, column, span, T, RAGGED), post, T)
        store(target, _fitted(z, out, T, True), row, column, span, length, inside, T, RAGGED)


@triton.jit
def _fitted(z, out, T: tl.constexpr, ANY: tl.constexpr):
    """z where it goes into a 16-bit output: values just past its largest number become that."""
    done = ()
    for i in tl.static_range(T.size):
        if out.dtype.element_ty == tl.float16:
            done = done + (saturated(z[i], 65504.0, T),)
        elif out.dtype.element_ty == tl.bfloat16 and ANY:
            done = done + (saturated(z[i], BF16_MAX, T),)
        else:
            done = done + (z[i],)
    return done


# --- recode -----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=_CHANGING)
def recode_kernel(
    wire,
    out,
    table,
    cells,
    stride,
    world,
    head0,
    head1,
    head2,
    key_low,
    key_high,
    numel_low,
    numel_high,
    dither_low,
    dither_high,
    full,
    length,
    span,
    scales_at,
    scales_end,
    minima_at,
    minima_end,
    plane0,
    plane1,
    plane2,
    codes_end,
    nbytes,
    scale,
    T: tl.constexpr,
    TAIL: tl.constexpr,
    WORLD: tl.constexpr,
    CHECK: tl.constexpr,
):
    """out = encode(scale * sum of decode(wires)), without leaving the rotated domain."""
    program = tl.program_id(0)
    stride = wide(stride)
    if CHECK:
        header = (head0, head1, head2, 0, key_low, key_high, numel_low, numel_high)
        key_low, key_high, fine = check_headers(wire, stride, world, header, T.rotated)
        scale = tl.where(fine, scale, float("nan"))
    if program == 0:
        header = (head0, head1, head2, 0, key_low, key_high, numel_low, numel_high)
        write_frame(out, header, scales_end, minima_at, minima_end, plane0, codes_end, nbytes)
    keys = (key_low, key_high, dither_low, dither_high)
    if program < tl.cdiv(full, T.rows):
        first = program.to(tl.int64) * T.rows
        wires = sections(wire, first, scales_at, minima_at, plane0, plane1, plane2, T)
        target = sections(out, first, scales_at, minima_at, plane0, plane1, plane2, T)
        if T.pieces:
            _recode_pieces(wires, target, stride, world, table, keys, first, wide(T.span), scale, T)
        else:
            _recode_tile(wires, target, stride, world, table, cells, keys, first, full, T.span, scale, T, WORLD)
    elif TAIL:
        first = wide(full)
        wires = sections(wire, first, scales_at, minima_at, plane0, plane1, plane2, T)
        target = sections(out, first, scales_at, minima_at, plane0, plane1, plane2, T)
        if T.lloyd:
            _recode_tile(
                wires, target, stride, world, table, cells, keys, first, full + 1, span, scale, T.ragged, WORLD
            )
        else:
            _recode_pieces(wires, target, stride, world, table, keys, first, wide(span), scale, T.ragged)


@triton.jit
def _recode_tile(
    wires, target, stride, world, table, cells, keys, first, end, span, scale, T: tl.constexpr, WORLD: tl.constexpr
):
    row, column = places(T)
    inside = masks(row, column, first, end, span, T)
    scales, minima, planes = wires
    if WORLD:
        words, bits, low_bits, odd = load_wires(planes, scales, minima, stride, row, column, span, inside, T, WORLD)
    else:
        z, odd = sum_wires(planes, scales, minima, stride, table, row, column, span, inside, T, world)
    if anywhere(odd) == 0:
        if WORLD:
            z = sum_loaded(words, bits, low_bits, table, T, WORLD)
        one = tl.full((T.rows, T.columns), 1.0, tl.float32)
        _put_sum(z, one, scale, target, cells, keys, first, row, column, span, inside, T, False)
    else:
        z, post = sum_any(planes, scales, minima, stride, table, row, column, span, inside, T, world)
        _put_sum(z, post, scale, target, cells, keys, first, row, column, span, inside, T, True)


@triton.jit
def _put_sum(z, post, scale, target, cells, keys, first, row, column, span, inside, T: tl.constexpr, ANY: tl.constexpr):
    """Encode a sum that `post` takes back to its own size, times `scale`."""
    if T.lloyd:
        kept = ()
        for i in tl.static_range(T.size):
            kept = kept + (_kept(z[i], inside, 0.0, T),)
        tile, energy, up, post, bad = _in_domain(kept, post, column, ANY, T)
        factor = tl.zeros((T.rows, T.columns), tl.float32) + scale
        bad = bad | (factor != factor)  # of wires that do not fit
        power = tl.div_rn(energy, tl.full((), 0.0, tl.float32) + span * T.lanes)
        _put_levels(tile, power, up, post, bad, scale, target, cells, row, column, span, inside, T, False)
    else:
        tile = _times(z, scale, T)
        peak, low, high = _extent(tile, column, inside, T)
        factor, post = _lift(peak, post)
        _put_scaled(tile, peak, low, high, factor, post, target, keys, first, row, column, span, inside, T)


@triton.jit
def _times(tile, scale, T: tl.constexpr):
    scaled = ()
    for i in tl.static_range(T.size):
        scaled = scaled + (tile[i] * scale,)
    return scaled


@triton.jit
def _lift(peak, post):
    """(factor, post) of a sum: out of the middle domain up, if its peak is tiny there."""
    tiny = (peak < TINY_BITS) & (peak > 0) & (post == 1)
    return tl.where(tiny, LIFT, 1.0), tl.where(tiny, UNLIFT, post)


@triton.jit
def _recode_pieces(wires, target, stride, world, table, keys, first, span, scale, T: tl.constexpr):
    """A block longer than a tile, or a short one: once for its scale, once for its codes."""
    row, column = places(T)
    there = row >= 0
    scales, minima, planes = wires
    peak = tl.zeros((T.rows, T.columns), tl.int32)
    low = tl.full((T.rows, T.columns), float("inf"), tl.float32)
    high = tl.full((T.rows, T.columns), float("-inf"), tl.float32)
    post = tl.full((T.rows, T.columns), 1.0, tl.float32)
    for start in range(0, span, T.columns):
        at = column + start
        inside = there & (at < span)
        z, post = sum_any(planes, scales, minima, stride, table, row, at, span, inside, T, world)
        piece_peak, piece_low, piece_high = _extent(_times(z, scale, T), column, inside, T)
        peak = tl.maximum(peak, piece_peak)
        low = tl.minimum(low, piece_low)
        high = tl.maximum(high, piece_high)
    factor, lifted = _lift(peak, post)
    for start in range(0, span, T.columns):
        at = column + start
        inside = there & (at < span)
        z, post = sum_any(planes, scales, minima, stride, table, row, at, span, inside, T, world)
        _put_scaled(_times(z, scale, T), peak, low, high, factor, lifted, target, keys, first, row, at, span, inside, T)


# --- where things are -------------------------------------------------------------------------------------------------


@triton.jit
def sections(wire, first, scales_at, minima_at, plane0, plane1, plane2, T: tl.constexpr):
    """(scales, minima, planes): where those of block `first` start."""
    planes = (wire + plane0 + first * (T.block * T.planes[0] // 8),)
    if len(T.planes) > 1:
        planes = planes + (wire + plane1 + first * (T.block * T.planes[1] // 8),)
    if len(T.planes) > 2:
        planes = planes + (wire + plane2 + first * (T.block * T.planes[2] // 8),)
    return wire + scales_at + 2 * first, wire + minima_at + 2 * first, planes


@triton.jit
def wide(number):
    """A number of 64 bits, for blocks that 32 do not count."""
    return tl.full((), 0, tl.int64) + number


@triton.jit
def masks(row, column, first, end, span, T: tl.constexpr):
    """What exists."""
    there = first + row < end
    if not T.whole:
        there = there & (column * T.vector < span)
    return there


@triton.jit
def write_frame(wire, header, scales_end, minima_at, minima_end, planes_at, codes_end, nbytes):
    """The header, and zeros between the sections and after the last."""
    i = tl.arange(0, 32)
    word = tl.zeros((32,), tl.int32)
    for k in tl.static_range(8):
        word = tl.where(i // 4 == k, header[k], word)
    tl.store(wire + i, ((word >> (8 * (i % 4))) & 0xFF).to(tl.uint8))
    nothing = tl.zeros((32,), tl.uint8)
    tl.store(wire + (wide(scales_end) + i), nothing, mask=wide(scales_end) + i < minima_at)
    tl.store(wire + (wide(minima_end) + i), nothing, mask=wide(minima_end) + i < planes_at)
    tl.store(wire + (wide(codes_end) + i), nothing, mask=wide(codes_end) + i < nbytes)


@triton.jit
def check_headers(wires, stride, world, header, ROTATED: tl.constexpr):
    """(key_low, key_high, fine): the key of wire 0, and whether every header is the expected one with that key."""
    i = tl.arange(0, 8)
    expected = tl.zeros((8,), tl.int32)
    for k in tl.static_range(8):
        expected = tl.where(i == k, header[k], expected)
    found = load_bytes(wires, i, i >= 0, False, 4)
    if ROTATED:
        expected = tl.where((i == KEY_WORD) | (i == KEY_WORD + 1), found, expected)
    wrong = tl.zeros((8,), tl.int32)
    for w in range(world):
        wrong = wrong | (load_bytes(wires + w * stride, i, i >= 0, False, 4) ^ expected)
    fine = tl.max((wrong != 0).to(tl.int32), axis=0) == 0
    key_low = tl.sum(tl.where(i == KEY_WORD, expected, 0), axis=0)
    key_high = tl.sum(tl.where(i == KEY_WORD + 1, expected, 0), axis=0)
    return key_low, key_high, fine
