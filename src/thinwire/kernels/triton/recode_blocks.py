"""recode of wires with blocks: their sum, encoded again without leaving the rotated domain.

Programs are those of decode_blocks.py. The first one also writes the header and the gaps between sections.
"""

import triton
import triton.language as tl

from thinwire.kernels.triton.frame import Stack, check_headers, sections, wide, write_frame
from thinwire.kernels.triton.lloyd import in_domain, per_code, put_levels
from thinwire.kernels.triton.numbers import LIFT, TINY_BITS, UNLIFT
from thinwire.kernels.triton.scaled import extent_of, no_extent, put_scaled, widened
from thinwire.kernels.triton.sums import sum_any, summed, wires_from
from thinwire.kernels.triton.tiles import kept, piece, position, times


@triton.jit
def recode_kernel(wire, out, levels, cells, stack, keys, scale, frame, T: tl.constexpr):
    """out = encode(scale * sum of decode(wires)). Headers are checked as in decode_kernel."""
    program = tl.program_id(0)
    rotation = keys.rotation
    if T.check:
        rotation, fine = check_headers(wire, stack, frame, rotation, T.rotated)
        scale = tl.where(fine, scale, float("nan"))
    if program == 0:
        write_frame(out, frame, rotation)
    stack = Stack(wide(stack.stride), stack.world)
    if program < tl.cdiv(frame.full, T.rows):
        first = program.to(tl.int64) * T.rows
        wires = wires_from(wire, stack, frame, levels, -1, first, T)
        target = sections(out, frame, first, T)
        if T.pieces:
            _recode_pieces(wires, target, keys.dither, scale, first, wide(T.span), T)
        else:
            at = position(first, frame.full, T.block, T.span, T)
            _recode_tile(wires, target, cells, keys.dither, scale, at, T)
    elif T.tail:
        is_short = frame.length > 0
        if is_short:
            first = wide(frame.full)
            wires = wires_from(wire, stack, frame, levels, -1, first, T)
            target = sections(out, frame, first, T)
            if T.gaussian:
                tail_at = position(first, frame.full + 1, frame.length, frame.span, T.ragged)
                _recode_tile(wires, target, cells, keys.dither, scale, tail_at, T.ragged)
            else:
                _recode_pieces(wires, target, keys.dither, scale, first, wide(frame.span), T.ragged)


@triton.jit
def _recode_tile(wires, target, cells, dither, scale, at, T: tl.constexpr):
    """Encode the sum of a tile's wires, times `scale`."""
    z, post, _unusual = summed(wires, at, T)
    if T.gaussian:
        tile, energy, up, post, bad = in_domain(kept(z, at, 0.0, T), post, T)
        factor = tl.zeros((T.rows, T.columns), tl.float32) + scale
        bad = bad | (factor != factor)  # of wires that do not fit
        put_levels(tile, per_code(energy, at, T), up, post, bad, scale, target, cells, at, T, False)
    else:
        tile = times(z, scale)
        extent = extent_of(tile, at, T)
        factor, post = _lift(extent.peak, post)
        put_scaled(tile, extent, factor, post, target, dither, at, T)


@triton.jit
def _lift(peak, post):
    """(factor, post) of a sum: out of the middle domain up, if its peak is tiny there."""
    tiny = (peak < TINY_BITS) & (peak > 0) & (post == 1)
    return tl.where(tiny, LIFT, 1.0), tl.where(tiny, UNLIFT, post)


@triton.jit
def _recode_pieces(wires, target, dither, scale, first, span, T: tl.constexpr):
    """A block longer than a tile, or a short one: once for its scale, once for its codes."""
    extent = no_extent(T)
    post = tl.full((T.rows, T.columns), 1.0, tl.float32)
    for start in range(0, span, T.columns):
        at = piece(first, span * T.lanes, span, start, T)
        z, post = sum_any(wires, at, T)
        extent = widened(extent, extent_of(times(z, scale), at, T))
    factor, lifted = _lift(extent.peak, post)
    for start in range(0, span, T.columns):
        at = piece(first, span * T.lanes, span, start, T)
        z, post = sum_any(wires, at, T)
        put_scaled(times(z, scale), extent, factor, lifted, target, dither, at, T)
