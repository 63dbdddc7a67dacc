"""encode and recode of wires with blocks: codes and scales, and what they leave for the next residual.

What is encoded is x + residual, or, without leaving the rotated domain, the sum of some wires. The first program also
writes the header and the gaps between sections.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from thinwire.kernels.triton.decode_blocks import finish, leave
from thinwire.kernels.triton.frame import check_headers, on_blocks, sections, write_frame
from thinwire.kernels.triton.lloyd import in_domain, per_code, put_levels
from thinwire.kernels.triton.memory import load_floats, wide
from thinwire.kernels.triton.numbers import (
    INF_BITS,
    LIFT,
    LOWER,
    TINY_BITS,
    UNLIFT,
    domain_factor,
    float_of,
    size_bits,
    undo,
)
from thinwire.kernels.triton.rotation import flip, hadamard
from thinwire.kernels.triton.scaled import extent_of, no_extent, put_scaled, widened
from thinwire.kernels.triton.sums import is_huge, post_of, scale_size, sum_any, summed, wires_from
from thinwire.kernels.triton.tiles import (
    ALONE,
    CHANGE,
    OWED,
    RESIDUAL,
    added,
    anywhere,
    fused,
    kept,
    load,
    minus,
    piece,
    position,
    store,
    times,
)


@triton.jit
def encode_kernel(x, residual, wire, cells, keys, frame, T: tl.constexpr):
    """wire = encode(x + residual); residual = x + residual - decode(wire), unchanged in non-finite blocks."""
    if tl.program_id(0) == 0:
        write_frame(wire, frame, keys.rotation)
    on_blocks(encode_blocks, (Source(x, residual, residual, 1.0), wire, cells, keys), frame, T)


@triton.jit
def recode_kernel(wire, out, levels, cells, stack, keys, scale, frame, T: tl.constexpr):
    """out = encode(scale * sum of decode(wires)). Headers are checked as in decode_kernel."""
    rotation = keys.rotation
    if T.check:
        rotation, fine = check_headers(wire, stack, frame, rotation, T.rotated)
        scale = tl.where(fine, scale, float("nan"))
    if tl.program_id(0) == 0:
        write_frame(out, frame, rotation)
    on_blocks(_recode_blocks, (wire, out, levels, cells, stack, keys, scale), frame, T)


class Source(NamedTuple):
    """What is encoded, and where to store what is left; tiles.py has the modes."""

    x: Any
    memory: Any
    left: Any
    factor: Any
    last: Any = 0.0  # fills a loose block past its end


@triton.jit
def encode_blocks(task, frame, blocks, T: tl.constexpr):
    """Encode blocks of a source."""
    source, wire, cells, keys = task
    target = sections(wire, frame, blocks.first, T)
    if T.loose and T.affine:  # before a residual is written
        x, memory, left, factor, _ = source
        source = Source(x, memory, left, factor, _last(source, blocks, T))
        tl.debug_barrier()
    if T.pieces:
        _put_pieces(_input, source, target, keys.dither, blocks, T, False)
    else:
        at = position(blocks, T)
        root = frame.tail_root if T.loose else frame.root
        tile, post = _input(source, at, T)
        if T.loose and T.mode != ALONE:
            tl.debug_barrier()  # several warps share a short tile: none may store what another has yet to load
        read = put_tile(tile, post, target, cells, keys, root, at, T, T.mode != ALONE, False)
        if T.mode != ALONE:
            _store_left(source, tile, read, at, T)


@triton.jit
def _recode_blocks(task, frame, blocks, T: tl.constexpr):
    """Encode the sum of the wires' blocks, times `scale`."""
    wire, out, levels, cells, stack, keys, scale = task
    wires = wires_from(wire, stack, frame, levels, -1, blocks.first, T)
    target = sections(out, frame, blocks.first, T)
    if T.loose and not T.gaussian:
        _put_pieces(_sum, (wires, scale), target, keys.dither, blocks, T, True)
    else:
        at = position(blocks, T)
        tile, post, _unusual = summed(wires, at, T)
        tile = kept(tile, at, 0.0, T) if T.gaussian else times(tile, scale)
        put_tile(tile, post, target, cells, keys, scale, at, T, False, True)


@triton.jit
def put_tile(tile, post, target, cells, keys, root, at, T: tl.constexpr, READ: tl.constexpr, SUM: tl.constexpr):
    """Write the scales and codes of a tile in the domain that `post` undoes; if READ, return what a decoder will read.

    SUM: the tile is a sum; one of Lloyd or trellis wires is rotated already, and its scales take the factor `root`.
    """
    if T.gaussian:
        tile, power, up, post, bad = in_domain(tile, post, T)
        if SUM:
            factor = tl.zeros((T.rows, T.columns), tl.float32) + root
            bad = bad | (factor != factor)  # wires do not match
        if T.rotated and not SUM:  # the transform is not normalized: the energy is the mean square after it
            tile = hadamard(flip(tile, keys.rotation, at, T), at, T)
        else:
            power = per_code(power, at, T)
            root = root if SUM else 1.0
        scale, values = put_levels(tile, power, up, post, bad, root, target, cells, at, T, READ)
        minimum = scale
    else:
        extent = extent_of(tile, at, T)
        factor, post = _domain_of(extent.peak, post, SUM)
        scale, minimum, values = put_scaled(tile, extent, factor, post, target, keys.dither, at, T)
    if READ:
        return _decoded(values, scale, minimum, root, keys.rotation, at, T)
    else:
        return tile


@triton.jit
def _put_pieces(read: tl.constexpr, source, target, dither, blocks, T: tl.constexpr, SUM: tl.constexpr):
    """Encode a block longer than a tile, or a short one, by two passes over its pieces: for the scale and the codes."""
    extent = no_extent(T)
    post = tl.full((T.rows, T.columns), 1.0, tl.float32)
    for start in range(0, wide(blocks.span), T.columns):
        at = piece(blocks, start, T)
        tile, post = read(source, at, T)
        extent = widened(extent, extent_of(tile, at, T))
    factor, post = _domain_of(extent.peak, post, SUM)
    for start in range(0, wide(blocks.span), T.columns):
        at = piece(blocks, start, T)
        tile, _ = read(source, at, T)
        scale, minimum, values = put_scaled(tile, extent, factor, post, target, dither, at, T)
        if T.mode != ALONE:
            _store_left(source, tile, _decoded(values, scale, minimum, 1.0, (0, 0), at, T), at, T)


@triton.jit
def _domain_of(peak, post, SUM: tl.constexpr):
    """(factor, post): what takes a block into its domain, and what undoes that. A sum can only be lifted."""
    if SUM:
        tiny = (peak < TINY_BITS) & (peak > 0) & (post == 1)
        return tl.where(tiny, LIFT, 1.0), tl.where(tiny, UNLIFT, post)
    else:
        factor = domain_factor(peak)
        return factor, undo(factor)


@triton.jit
def _sum(source, at, T: tl.constexpr):
    """(tile, post) of a piece of a sum."""
    wires, scale = source
    z, post = sum_any(wires, at, T)
    return times(z, scale), post


@triton.jit
def _input(source, at, T: tl.constexpr):
    """(tile, post) of the numbers. Past a loose block come zeros, or its last element if they would widen its range."""
    start = at.first * T.block
    tile = load(source.x + start, at, T)
    if T.mode != ALONE:
        tile = carried(tile, load(source.memory + start, at, T), source.factor, T.mode)
    if T.loose and T.affine:
        tile = [tl.where(i * at.span + at.column < at.length, tile[i], source.last) for i in T.each]
    return tile, tl.full((T.rows, T.columns), 1.0, tl.float32)


@triton.jit
def carried(tile, memory, factor, MODE: tl.constexpr):
    """The tile plus the memory, as MODE adds it."""
    if MODE == CHANGE:
        return fused(memory, factor, tile)
    elif MODE == OWED:
        return added(tile, times(memory, factor))
    else:
        return added(tile, memory)


@triton.jit
def _last(source, blocks, T: tl.constexpr):
    """The last element of the block to encode, in all columns."""
    start = blocks.first * T.block
    at = tl.zeros((T.rows, T.columns), tl.int32) + (wide(blocks.length) - 1)
    last = load_floats(source.x + start, at, at >= 0, 1, True)
    if T.mode != ALONE:
        last = carried(last, load_floats(source.memory + start, at, at >= 0, 1, True), source.factor, T.mode)
    return last[0]


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
    """`left`, but the previous residual where the decoded value is not finite."""
    worst = size_bits(read[0])
    for i in tl.static_range(1, T.size):
        worst = tl.maximum(worst, size_bits(read[i]))
    if anywhere(worst) >= INF_BITS:
        before = load(target, at, T)
        left = [tl.where(size_bits(read[i]) < INF_BITS, left[i], before[i]) for i in T.each]
    return left
