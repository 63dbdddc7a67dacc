"""encode of wires with blocks: codes and scales of x + residual, and what they leave for the next residual.

Programs are those of decode_blocks.py. The first one also writes the header and the gaps between sections.
"""

import triton
import triton.language as tl

from thinwire.kernels.triton.decode_blocks import finish, leave
from thinwire.kernels.triton.frame import CHANGING, Sections, sections, wide, write_frame
from thinwire.kernels.triton.lloyd import codes_per_block, in_domain, put_levels
from thinwire.kernels.triton.memory import load_floats
from thinwire.kernels.triton.numbers import INF_BITS, LOWER, domain_factor, float_of, size_bits, undo
from thinwire.kernels.triton.rotation import flip, hadamard
from thinwire.kernels.triton.scaled import extent_of, no_extent, put_scaled, widened
from thinwire.kernels.triton.sums import is_huge, post_of, scale_size
from thinwire.kernels.triton.tiles import added, anywhere, load, piece, position, store


@triton.jit(do_not_specialize=CHANGING)
def encode_kernel(
    x, residual, wire, cells,
    head0, head1, head2, key_low, key_high, numel_low, numel_high, dither_low, dither_high,
    full, length, span,
    scales_at, scales_end, minima_at, minima_end, plane0, plane1, plane2, codes_end, nbytes,
    root, tail_root,
    T: tl.constexpr, TAIL: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """wire = encode(x + residual); residual = x + residual - decode(wire), non-finite blocks left as they were.

    full: blocks but a short last one, which has `length` elements and codes in lanes of `span`. root: 1 / sqrt(codes).
    """
    program = tl.program_id(0)
    if program == 0:
        header = (head0, head1, head2, 0, key_low, key_high, numel_low, numel_high)
        write_frame(wire, header, (scales_end, minima_at, minima_end, plane0, codes_end, nbytes))
    keys = (key_low, key_high)
    dither = (dither_low, dither_high)
    offsets = Sections(scales_at, minima_at, (plane0, plane1, plane2))
    if program < tl.cdiv(full, T.rows):
        first = program.to(tl.int64) * T.rows
        target = sections(wire, offsets, first, T)
        if T.pieces:
            _encode_pieces(x, residual, target, dither, first, wide(T.block), wide(T.span), T, RESIDUAL)
        else:
            tile_at = position(first, full, T.block, T.span, T)
            _encode_tile(x, residual, target, cells, keys, dither, root, tile_at, T, RESIDUAL)
    elif TAIL:
        first = wide(full)
        target = sections(wire, offsets, first, T)
        if T.ragged.pieces:
            _encode_pieces(x, residual, target, dither, first, wide(length), wide(span), T.ragged, RESIDUAL)
        else:
            tail_at = position(first, full + 1, length, span, T.ragged)
            _encode_tile(x, residual, target, cells, keys, dither, tail_root, tail_at, T.ragged, RESIDUAL)


@triton.jit
def _encode_tile(x, residual, target, cells, keys, dither, root, at, T: tl.constexpr, RESIDUAL: tl.constexpr):
    last = 0.0
    if T.loose and T.affine:
        last = _last(x, residual, at.first, at.length, T, RESIDUAL)
    tile = _input(x, residual, last, at, T, RESIDUAL)
    if T.loose and RESIDUAL:
        tl.debug_barrier()  # a short tile is held by several warps, and none may store what another has still to load
    if T.lloyd:
        scale, values = _put_lloyd(tile, target, cells, keys, root, at, T, RESIDUAL)
        minimum = scale
    else:
        extent = extent_of(tile, at, T)
        factor = domain_factor(extent.peak)
        scale, minimum, values = put_scaled(tile, extent, factor, undo(factor), target, dither, at, T)
    if RESIDUAL:
        _store_residual(residual, tile, _decoded(values, scale, minimum, root, keys, at, T), at, T)


@triton.jit
def _encode_pieces(x, residual, target, dither, first, length, span, T: tl.constexpr, RESIDUAL: tl.constexpr):
    """A block longer than a tile: once for its scale, once for its codes."""
    last = 0.0
    if T.affine:  # before a residual is written
        last = _last(x, residual, first, length, T, RESIDUAL)
        tl.debug_barrier()
    extent = no_extent(T)
    for start in range(0, span, T.columns):
        at = piece(first, length, span, start, T)
        extent = widened(extent, extent_of(_input(x, residual, last, at, T, RESIDUAL), at, T))
    factor = domain_factor(extent.peak)
    for start in range(0, span, T.columns):
        at = piece(first, length, span, start, T)
        tile = _input(x, residual, last, at, T, RESIDUAL)
        scale, minimum, values = put_scaled(tile, extent, factor, undo(factor), target, dither, at, T)
        if RESIDUAL:
            decoded = _decoded(values, scale, minimum, 1.0, (0, 0), at, T)
            _store_residual(residual, tile, decoded, at, T)


@triton.jit
def _input(x, residual, last, at, T: tl.constexpr, RESIDUAL: tl.constexpr):
    """x + residual. Past the end of a loose block zeros, or its `last` element where a zero would widen its range."""
    start = at.first * T.block
    tile = load(x + start, at, T)
    if RESIDUAL:
        tile = added(tile, load(residual + start, at, T))
    if T.loose and T.affine:
        filled = ()
        for i in tl.static_range(T.size):
            filled = filled + (tl.where(i * at.span + at.column < at.length, tile[i], last),)
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
def _put_lloyd(tile, target, cells, keys, root, at, T: tl.constexpr, VALUES: tl.constexpr):
    """Rotate, write scales and codes; (stored scale, values of the codes)."""
    one = tl.full((T.rows, T.columns), 1.0, tl.float32)
    tile, power, up, post, bad = in_domain(tile, one, False, T)
    if T.rotated:  # by a transform that is not normalised: the sum of squares is the mean square after it
        tile = hadamard(flip(tile, keys, at, T), at, T)
    else:
        power = tl.div_rn(power, codes_per_block(at, T))
        root = 1.0
    return put_levels(tile, power, up, post, bad, root, target, cells, at, T, VALUES)


# --- the residual -----------------------------------------------------------------------------------------------------


@triton.jit
def _decoded(values, stored, stored_minimum, root, keys, at, T: tl.constexpr):
    """What a decoder will make of values under the scales that were stored."""
    bits = stored << 16
    lifted = bits < 0
    huge = is_huge(bits)
    base = tl.zeros((T.rows, T.columns), tl.float32)
    if T.affine:
        huge = huge | is_huge(stored_minimum << 16)
    lower = tl.where(huge & (lifted == 0), LOWER, 1.0)
    post = post_of(lifted, huge)
    if T.affine:
        base = base + float_of(stored_minimum << 16) * lower
    scale = scale_size(bits) * lower
    if T.cast:
        z = [base + value * scale for value in values]
    else:
        z = [tl.fma(value, scale, base) for value in values]
    if not T.rotated:
        root = 1.0
    z = finish(z, keys, root, at, T)
    if anywhere((post != 1).to(tl.int32)) > 0:
        z = leave(z, post, T)
    return z


@triton.jit
def _store_residual(residual, tile, decoded, at, T: tl.constexpr):
    """residual = tile - decoded, where decoded is finite."""
    target = residual + at.first * T.block
    left = ()
    worst = size_bits(decoded[0])
    for i in tl.static_range(T.size):
        left = left + (tile[i] - decoded[i],)
        worst = tl.maximum(worst, size_bits(decoded[i]))
    if anywhere(worst) >= INF_BITS:
        before = load(target, at, T)
        mended = ()
        for i in tl.static_range(T.size):
            mended = mended + (tl.where(size_bits(decoded[i]) < INF_BITS, left[i], before[i]),)
        left = mended
    store(target, left, at, T)
