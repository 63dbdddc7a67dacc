"""encode of wires with blocks: codes and scales of x + residual, and what they leave for the next residual.

Programs are those of decode_blocks.py. The first one also writes the header and the gaps between sections.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from thinwire.kernels.triton.decode_blocks import finish, leave
from thinwire.kernels.triton.frame import sections, wide, write_frame
from thinwire.kernels.triton.lloyd import in_domain, per_code, put_levels
from thinwire.kernels.triton.memory import load_floats
from thinwire.kernels.triton.numbers import INF_BITS, LOWER, domain_factor, float_of, size_bits, undo
from thinwire.kernels.triton.rotation import flip, hadamard
from thinwire.kernels.triton.scaled import extent_of, no_extent, put_scaled, widened
from thinwire.kernels.triton.sums import is_huge, post_of, scale_size
from thinwire.kernels.triton.tiles import (
    ALONE,
    CHANGE,
    OWED,
    RESIDUAL,
    added,
    anywhere,
    fused,
    load,
    minus,
    piece,
    position,
    store,
    times,
)


@triton.jit
def encode_kernel(x, residual, wire, cells, keys, frame, T: tl.constexpr):
    """wire = encode(x + residual); residual = x + residual - decode(wire), non-finite blocks left as they were."""
    if tl.program_id(0) == 0:
        write_frame(wire, frame, keys.rotation)
    encode_blocks(Source(x, residual, residual, 1.0), wire, cells, keys, frame, T)


class Source(NamedTuple):
    """What is encoded, and where the rest goes; tiles.py has the modes."""

    x: Any
    memory: Any
    left: Any
    factor: Any


@triton.jit
def encode_blocks(source, wire, cells, keys, frame, T: tl.constexpr):
    """Encode the program's blocks."""
    program = tl.program_id(0)
    if program < tl.cdiv(frame.full, T.rows):
        first = program.to(tl.int64) * T.rows
        target = sections(wire, frame, first, T)
        if T.pieces:
            _encode_pieces(source, target, keys.dither, first, wide(T.block), wide(T.span), T)
        else:
            tile_at = position(first, frame.full, T.block, T.span, T)
            _encode_tile(source, target, cells, keys, frame.root, tile_at, T)
    elif T.tail:
        is_last = (frame.length > 0) & (program == tl.cdiv(frame.full, T.rows))
        if is_last:
            first = wide(frame.full)
            target = sections(wire, frame, first, T)
            if T.ragged.pieces:
                _encode_pieces(source, target, keys.dither, first, wide(frame.length), wide(frame.span), T.ragged)
            else:
                tail_at = position(first, frame.full + 1, frame.length, frame.span, T.ragged)
                _encode_tile(source, target, cells, keys, frame.tail_root, tail_at, T.ragged)


@triton.jit
def _encode_tile(source, target, cells, keys, root, at, T: tl.constexpr):
    last = 0.0
    if T.loose and T.affine:
        last = _last(source, at.first, at.length, T)
    tile = _input(source, last, at, T)
    if T.loose and T.mode != ALONE:
        tl.debug_barrier()  # a short tile is held by several warps, and none may store what another has still to load
    read = put_tile(tile, target, cells, keys, root, at, T, T.mode != ALONE)
    if T.mode != ALONE:
        _store_left(source, tile, read, at, T)


@triton.jit
def put_tile(tile, target, cells, keys, root, at, T: tl.constexpr, READ: tl.constexpr):
    """Write the scales and codes of a tile; what a decoder will make of them, if READ."""
    if T.gaussian:
        scale, values = _put_lloyd(tile, target, cells, keys.rotation, root, at, T, READ)
        minimum = scale
    else:
        extent = extent_of(tile, at, T)
        factor = domain_factor(extent.peak)
        scale, minimum, values = put_scaled(tile, extent, factor, undo(factor), target, keys.dither, at, T)
    if READ:
        return _decoded(values, scale, minimum, root, keys.rotation, at, T)
    else:
        return tile


@triton.jit
def _encode_pieces(source, target, dither, first, length, span, T: tl.constexpr):
    """A block longer than a tile: once for its scale, once for its codes."""
    last = 0.0
    if T.affine:  # before a residual is written
        last = _last(source, first, length, T)
        tl.debug_barrier()
    extent = no_extent(T)
    for start in range(0, span, T.columns):
        at = piece(first, length, span, start, T)
        extent = widened(extent, extent_of(_input(source, last, at, T), at, T))
    factor = domain_factor(extent.peak)
    for start in range(0, span, T.columns):
        at = piece(first, length, span, start, T)
        tile = _input(source, last, at, T)
        scale, minimum, values = put_scaled(tile, extent, factor, undo(factor), target, dither, at, T)
        if T.mode != ALONE:
            read = _decoded(values, scale, minimum, 1.0, (0, 0), at, T)
            _store_left(source, tile, read, at, T)


@triton.jit
def _input(source, last, at, T: tl.constexpr):
    """The numbers; past the end of a loose block zeros, or its `last` element where a zero would widen its range."""
    start = at.first * T.block
    tile = load(source.x + start, at, T)
    if T.mode != ALONE:
        tile = carried(tile, load(source.memory + start, at, T), source.factor, T.mode)
    if T.loose and T.affine:
        tile = [tl.where(i * at.span + at.column < at.length, tile[i], last) for i in T.each]
    return tile


@triton.jit
def carried(tile, memory, factor, MODE: tl.constexpr):
    """The tile plus the memory of earlier ones, as MODE adds them."""
    if MODE == CHANGE:
        return fused(memory, factor, tile)
    elif MODE == OWED:
        return added(tile, times(memory, factor))
    else:
        return added(tile, memory)


@triton.jit
def _last(source, first, length, T: tl.constexpr):
    """The last element of a block of what is encoded, everywhere."""
    at = tl.zeros((T.rows, T.columns), tl.int32) + (length - 1)
    last = load_floats(source.x + first * T.block, at, at >= 0, 1, True)
    if T.mode != ALONE:
        last = carried(last, load_floats(source.memory + first * T.block, at, at >= 0, 1, True), source.factor, T.mode)
    return last[0]


@triton.jit
def _put_lloyd(tile, target, cells, keys, root, at, T: tl.constexpr, VALUES: tl.constexpr):
    """Rotate, then write codes and scales: (stored scale, values of the codes)."""
    one = tl.full((T.rows, T.columns), 1.0, tl.float32)
    tile, power, up, post, bad = in_domain(tile, one, T)
    if T.rotated:  # by a transform that is not normalized: the sum of squares is the mean square after it
        tile = hadamard(flip(tile, keys, at, T), at, T)
    else:
        power = per_code(power, at, T)
        root = 1.0
    return put_levels(tile, power, up, post, bad, root, target, cells, at, T, VALUES)


# --- what is left -----------------------------------------------------------------------------------------------------


@triton.jit
def _decoded(values, stored, stored_minimum, root, keys, at, T: tl.constexpr):
    """What a decoder will read: the codes' values under the stored scales."""
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
def _store_left(source, tile, read, at, T: tl.constexpr):
    """Store what T.mode leaves of a tile that decodes to `read`."""
    target = source.left + at.first * T.block
    if T.mode == CHANGE:
        store(target, read, at, T)
    else:
        left = minus(tile, read)
        if T.mode == RESIDUAL:
            left = _restored(left, read, target, at, T)
        store(target, left, at, T)


@triton.jit
def _restored(left, read, target, at, T: tl.constexpr):
    """The previous residual where the decoded value is not finite."""
    worst = size_bits(read[0])
    for i in tl.static_range(1, T.size):
        worst = tl.maximum(worst, size_bits(read[i]))
    if anywhere(worst) >= INF_BITS:
        before = load(target, at, T)
        left = [tl.where(size_bits(read[i]) < INF_BITS, left[i], before[i]) for i in T.each]
    return left
