"""recode of wires with blocks: their sum, encoded again without leaving the rotated domain.

Programs are those of decode_blocks.py. The first one also writes the header and the gaps between sections.
"""

import triton
import triton.language as tl

from thinwire.kernels.triton.frame import CHANGING, Sections, check_headers, sections, wide, write_frame
from thinwire.kernels.triton.lloyd import in_domain, per_code, put_levels
from thinwire.kernels.triton.numbers import LIFT, TINY_BITS, UNLIFT
from thinwire.kernels.triton.scaled import extent_of, no_extent, put_scaled, widened
from thinwire.kernels.triton.sums import Wires, begin_sum, sum_any, usual_sum, wires_from
from thinwire.kernels.triton.tiles import anywhere, kept, piece, position, times


@triton.jit(do_not_specialize=CHANGING)
def recode_kernel(
    wire, out, levels, cells, stride, world,
    head0, head1, head2, key_low, key_high, numel_low, numel_high, dither_low, dither_high,
    full, length, span,
    scales_at, scales_end, minima_at, minima_end, plane0, plane1, plane2, codes_end, nbytes,
    scale,
    T: tl.constexpr, TAIL: tl.constexpr, WORLD: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """out = encode(scale * sum of decode(wires)). CHECK: as in decode_kernel."""
    program = tl.program_id(0)
    stride = wide(stride)
    if CHECK:
        header = (head0, head1, head2, 0, key_low, key_high, numel_low, numel_high)
        key_low, key_high, fine = check_headers(wire, stride, world, header, T.rotated)
        scale = tl.where(fine, scale, float("nan"))
    if program == 0:
        header = (head0, head1, head2, 0, key_low, key_high, numel_low, numel_high)
        write_frame(out, header, (scales_end, minima_at, minima_end, plane0, codes_end, nbytes))
    dither = (dither_low, dither_high)
    offsets = Sections(scales_at, minima_at, (plane0, plane1, plane2))
    all_wires = Wires(scales_at, minima_at, (plane0, plane1, plane2), stride, world, levels, -1)
    if program < tl.cdiv(full, T.rows):
        first = program.to(tl.int64) * T.rows
        wires = wires_from(wire, all_wires, first, T)
        target = sections(out, offsets, first, T)
        if T.pieces:
            _recode_pieces(wires, target, dither, scale, first, wide(T.span), T)
        else:
            _recode_tile(wires, target, cells, dither, scale, position(first, full, T.block, T.span, T), T, WORLD)
    elif TAIL:
        is_short = length > 0
        if is_short:
            first = wide(full)
            wires = wires_from(wire, all_wires, first, T)
            target = sections(out, offsets, first, T)
            if T.gaussian:
                at = position(first, full + 1, length, span, T.ragged)
                _recode_tile(wires, target, cells, dither, scale, at, T.ragged, WORLD)
            else:
                _recode_pieces(wires, target, dither, scale, first, wide(span), T.ragged)


@triton.jit
def _recode_tile(wires, target, cells, dither, scale, at, T: tl.constexpr, WORLD: tl.constexpr):
    """Encode the sum of a tile's wires, times `scale`."""
    unit = tl.full((T.rows, T.columns), 1.0, tl.float32)
    post = unit
    if T.rare:
        z, post = sum_any(wires, at, T)
    else:
        begun, odd = begin_sum(wires, at, T, WORLD)
        if anywhere(odd) == 0:
            z, unit = usual_sum(begun, wires.levels, T, WORLD)
        else:
            z, post = sum_any(wires, at, T)
    if T.gaussian:
        tile, energy, unit, up, post, bad = in_domain(kept(z, at, 0.0, T), unit, post, T)
        factor = tl.zeros((T.rows, T.columns), tl.float32) + scale
        bad = bad | (factor != factor)  # of wires that do not fit
        put_levels(tile, per_code(energy, at, T), unit, up, post, bad, scale, target, cells, at, T, False)
    else:
        tile = times(times(z, unit), scale)
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
