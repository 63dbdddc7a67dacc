"""The definition of every kernel, in plain torch. Other backends must produce the same bytes.

Shape suffixes: W ranks, K blocks, B codes of a block (padded), N elements.
"""

import ctypes
import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.kernels import topk, trellis
from thinwire.kernels.exact import exact_decode as exact_decode, exact_encode as exact_encode
from thinwire.kernels.fake_quantize import fake_quantize as fake_quantize, fake_quantize_grad as fake_quantize_grad
from thinwire.kernels.packing import BF16_MAX, pack, put, read, tree_sum, unpack, write_header
from thinwire.kernels.schema import (
    HUGE_PEAK,
    LIFT,
    LLOYD,
    LLOYD_REACH,
    LOWER,
    OTHER_REACH,
    TINY_PEAK,
    Encoding,
    table_of,
)
from thinwire.wire import CastVariant, Format, IntVariant, Kind, Layout, LloydVariant, read_key

FLOAT_MAX = torch.finfo(torch.float32).max
SMALLEST_SCALE = torch.finfo(torch.bfloat16).tiny
_CASTS = {  # dtype, exponent that a block's peak is brought to
    CastVariant.FP16: (torch.float16, 14),
    CastVariant.E4M3: (torch.float8_e4m3fn, 7),
    CastVariant.E5M2: (torch.float8_e5m2, 14),
}


def serves(device: torch.device) -> bool:
    """Always: torch runs on every device."""
    return True


def unavailable() -> str | None:
    """None: plain torch can always run."""
    return None


# --- the three operations ---------------------------------------------------------------------------------------------


def encode(how: Encoding, x: Tensor, wire: Tensor, residual: Tensor | None, *, rotation: int, dither: int) -> None:
    """wire = encode(x + residual); residual = x + residual - decode(wire), unchanged in non-finite blocks."""
    layout = how.format.layout(x.numel())
    if residual is not None:
        x = x + residual
    if not layout.format.block:
        _write_plain(layout, x, wire, computed=residual is not None)
    elif how.format.kind == Kind.TOPK:
        topk.encode(layout, x, wire)
    else:
        parts = [
            _encode_blocks(how, _pad(layout, x[span.lo : span.hi], span.codes), span.lo, rotation, dither)
            for span in _spans(layout)
        ]
        _write(layout, parts, wire, rotation)
    if residual is not None:
        decoded = torch.empty_like(x)
        decode_sum(how.format, wire[None], decoded, scale=1.0, rotation=rotation)
        residual.copy_(torch.where(decoded.isfinite(), x - decoded, residual))


def decode_sum(format: Format, wires_WN: Tensor, out: Tensor, *, scale: float, rotation: int | None) -> None:
    """out = scale * sum over ranks, in rank order in fp32, of decode(wire)."""
    layout = format.layout(out.numel())
    if rotation is None:
        rotation = read_key(layout, wires_WN)
    if not layout.format.block:
        total = _read_plain(layout, wires_WN[0])
        for wire in wires_WN[1:]:
            total = total + _read_plain(layout, wire)
        out.copy_(total * scale)
        return
    if format.kind == Kind.TOPK:
        out.copy_(_fit_dtype(format, topk.decode_sum(layout, wires_WN) * scale, out.dtype))
        return
    for span in _spans(layout):
        z_KB, post_K1 = _sum_blocks(layout, wires_WN, span)
        norm = f32(scale)
        if format.rotated:
            z_KB = _flip(_hadamard(z_KB), span.lo, rotation)
            norm = norm * root(span.codes)
        z_KB = z_KB * norm
        z_KB = torch.where(post_K1 > 1, saturate(format, z_KB, FLOAT_MAX * LOWER), z_KB) * post_K1
        out[span.lo : span.hi] = _fit_dtype(format, z_KB.reshape(-1)[: span.hi - span.lo], out.dtype)


def saturate(format: Format, z: Tensor, most: float) -> Tensor:
    """Clamp to `most` the values that quantization error took past it. Larger ones are overflows, and stay."""
    reach = LLOYD_REACH if format.gaussian else OTHER_REACH
    beyond = min(f32(most * reach), FLOAT_MAX)
    return torch.where((z.abs() > most) & (z.abs() <= beyond), z.sign() * most, z)


def _fit_dtype(format: Format, z: Tensor, dtype: torch.dtype) -> Tensor:
    """z for an output of `dtype`: values just past the largest number of 16 bits become that number."""
    return z if dtype == torch.float32 else saturate(format, z, torch.finfo(dtype).max)


def recode(
    how: Encoding, wires_WN: Tensor, wire: Tensor, numel: int, *, scale: float, rotation: int | None, dither: int
) -> None:
    """wire = encode(scale * sum of decode(wires)), without leaving the rotated domain."""
    layout = how.format.layout(numel)
    if rotation is None:
        rotation = read_key(layout, wires_WN)
    if not layout.format.block:
        total = torch.empty(numel, dtype=torch.float64 if how.format.bits == 64 else torch.float32, device=wire.device)
        decode_sum(how.format, wires_WN, total, scale=scale, rotation=rotation)
        _write_plain(layout, total, wire, computed=True)
        return
    parts = []
    for span in _spans(layout):
        z_KB, post_K1 = _sum_blocks(layout, wires_WN, span)
        if how.format.gaussian:
            z_KB, down_K1, post_K1 = _settle(*_enter_sum(z_KB, post_K1))
            power_K1 = tree_sum(z_KB * z_KB) / span.codes
            parts.append(_encode_lloyd(how, z_KB, power_K1, 1 / down_K1, post_K1, f32(scale)))
        else:
            parts.append(_encode_scaled(how, *_enter_sum(z_KB * f32(scale), post_K1, lift_only=True), span.lo, dither))
    _write(layout, parts, wire, rotation)


# --- bytes ------------------------------------------------------------------------------------------------------------


class _Span(NamedTuple):
    """Blocks of one length: the full ones, or a short last one."""

    lo: int  # first element
    hi: int  # end
    num_blocks: int
    codes: int  # of each block


def _spans(layout: Layout) -> list[_Span]:
    block = layout.format.block
    full = layout.numel // block
    spans = [_Span(0, full * block, full, block)] if full else []
    if full < layout.num_blocks:
        spans.append(_Span(full * block, layout.numel, 1, layout.tail))
    return spans


def _pad(layout: Layout, x: Tensor, codes: int) -> Tensor:
    """x as (K, codes) in fp32. Past its end zeros, or its last element if a zero would widen the block's range."""
    filler = x[-1:].float() if layout.affine else x.new_zeros(1, dtype=torch.float32)
    return torch.cat((x.float(), filler.expand(-x.numel() % codes))).view(-1, codes)


@lru_cache(maxsize=64)
def _constant(values: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A small table on a device, made once: making it waits for the device."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)


def _write_plain(layout: Layout, x: Tensor, wire: Tensor, *, computed: bool) -> None:
    """A wire without scales: the numbers themselves."""
    values = x.to(layout.plain_dtype)
    if computed or layout.format.kind == Kind.CAST:
        values = torch.where(values.isnan(), torch.nan, values)  # one NaN, whatever the hardware makes of its payload
    write_header(layout, wire, 0)
    put(wire, layout.planes[0][1], values)


def _read_plain(layout: Layout, wire: Tensor) -> Tensor:
    values = read(wire, layout.planes[0][1], layout.numel, layout.plain_dtype)
    return values if values.dtype == torch.float64 else values.float()


def _write(layout: Layout, parts: list[tuple[Tensor, Tensor, Tensor]], wire: Tensor, rotation: int) -> None:
    """Lay out (scales, minima, codes) of each span."""
    write_header(layout, wire, rotation if layout.format.rotated else 0)
    if not parts:
        return
    put(wire, layout.scales_at, torch.cat([scales.reshape(-1) for scales, _, _ in parts]))
    if layout.affine:
        put(wire, layout.minima_at, torch.cat([minima.reshape(-1) for _, minima, _ in parts]))
    shift = 0
    for width, at in layout.planes:
        for _, _, codes_KB in parts:
            plane = pack(codes_KB, shift, width)
            put(wire, at, plane)
            at += plane.nbytes
        shift += width


def _unpack(layout: Layout, wire: Tensor, span: _Span) -> Tensor:
    """The (K, codes) codes of a span: uint8, or int16 where a code has 16 bits."""
    lo, _, num_blocks, codes = span
    if layout.format.bits == 16:
        at = layout.planes[0][1] + 2 * lo
        return read(wire, at, num_blocks * codes, torch.int16).view(num_blocks, codes)
    codes_KB = torch.zeros(num_blocks, codes, dtype=torch.uint8, device=wire.device)
    shift = 0
    for width, at in layout.planes:
        at += lo * width // 8
        codes_KB |= unpack(wire[at : at + num_blocks * codes * width // 8].view(num_blocks, -1), width) << shift
        shift += width
    return codes_KB


# --- scales and domains: [Note: Three domains] in schema.py -----------------------------------------------------------


def _into_domain(x_KB: Tensor) -> tuple[Tensor, Tensor]:
    """x times 2**64, 1 or 2**-32 by the size of its peak, and the factor that undoes it."""
    peak_K1 = x_KB.abs().amax(1, keepdim=True)
    tiny = (peak_K1 < TINY_PEAK) & (peak_K1 > 0)
    huge = peak_K1 >= HUGE_PEAK
    one = torch.ones_like(peak_K1)
    factor_K1 = torch.where(tiny, LIFT * one, torch.where(huge, LOWER * one, one))
    return x_KB * factor_K1, 1 / factor_K1


def _enter_sum(x_KB: Tensor, post_K1: Tensor, *, lift_only: bool = False) -> tuple[Tensor, Tensor]:
    """Move a sum from the middle domain into its own; with `lift_only` (if no squares are needed) only a tiny one."""
    inner_KB, inner_K1 = _into_domain(x_KB)
    enter = (post_K1 == 1) & (inner_K1 < 1 if lift_only else inner_K1 != 1)
    return torch.where(enter, inner_KB, x_KB), torch.where(enter, inner_K1, post_K1)


def _store(scale_K1: Tensor, post_K1: Tensor) -> Tensor:
    """A scale as bfloat16: times 2**32 if it is in the lowered domain, with its sign bit set if in the lifted one."""
    lifted = post_K1 < 1
    value = torch.where(lifted, -scale_K1, scale_K1 * post_K1)
    return value.clamp(-BF16_MAX, BF16_MAX).to(torch.bfloat16)


def _read_scales(layout: Layout, wires_WN: Tensor, span: _Span, at: int) -> Tensor:
    """(W, K, 1) bfloat16 values of the section at byte `at`, as fp32."""
    at += 2 * (span.lo // layout.format.block)
    return read(wires_WN, at, span.num_blocks, torch.bfloat16).float()[:, :, None]


def _sum_blocks(layout: Layout, wires_WN: Tensor, span: _Span) -> tuple[Tensor, Tensor]:
    """Sum over ranks of a span's blocks, in the domain their scales ask for, and the factor that undoes it."""
    scale_WK1 = _read_scales(layout, wires_WN, span, layout.scales_at)
    lifted = scale_WK1.signbit()
    scale_WK1 = scale_WK1.abs()
    scale_WK1 = torch.where(scale_WK1 < SMALLEST_SCALE, torch.zeros_like(scale_WK1), scale_WK1)  # never written
    huge = (scale_WK1 >= HUGE_PEAK) & ~lifted
    if layout.affine:
        minimum_WK1 = _read_scales(layout, wires_WN, span, layout.minima_at)
        huge |= (minimum_WK1.abs() >= HUGE_PEAK) & ~lifted
        blank = (scale_WK1 == 0) & (minimum_WK1 == 0)
    else:
        minimum_WK1 = torch.zeros_like(scale_WK1)
        blank = scale_WK1 == 0
    all_lifted = (lifted | blank).all(0) & lifted.any(0)
    any_huge = huge.any(0)
    one = torch.ones_like(scale_WK1[0])
    post_K1 = torch.where(all_lifted, one / LIFT, torch.where(any_huge, one / LOWER, one))
    into_WK1 = torch.where(lifted & ~all_lifted, one / LIFT, one)
    lower_K1 = torch.where(any_huge & ~all_lifted, LOWER * one, one)
    z_KB = torch.zeros(span.num_blocks, 1, dtype=torch.float32, device=wires_WN.device)
    for minimum_K1, into_K1 in zip(minimum_WK1, into_WK1, strict=True):
        z_KB = z_KB + minimum_K1 * into_K1 * lower_K1
    for wire, scale_K1, into_K1 in zip(wires_WN, scale_WK1, into_WK1, strict=True):
        values_KB = _values(layout, _unpack(layout, wire, span))
        z_KB = z_KB + values_KB * (scale_K1 * into_K1 * lower_K1)
    return z_KB, post_K1


def _values(layout: Layout, codes_KB: Tensor) -> Tensor:
    """The number each code stands for, in units of its block's scale."""
    format = layout.format
    if format.kind == Kind.CAST:
        return codes_KB.view(_CASTS[CastVariant(format.variant)][0]).float()
    if format.gaussian:
        levels = _constant(table_of(format).signed_levels, torch.float32, codes_KB.device)
        return levels[(trellis.indices(codes_KB) if format.kind == Kind.TRELLIS else codes_KB).long()]
    if layout.affine:
        return codes_KB.float()
    return codes_KB.float() - (1 << format.bits - 1)


# --- block codecs -----------------------------------------------------------------------------------------------------


def _encode_blocks(how: Encoding, x_KB: Tensor, lo: int, rotation: int, dither: int) -> tuple[Tensor, Tensor, Tensor]:
    if not how.format.gaussian:
        return _encode_scaled(how, *_into_domain(x_KB), lo, dither)
    z_KB, down_K1, post_K1 = _settle(*_into_domain(x_KB))
    energy_K1 = tree_sum(z_KB * z_KB)
    if how.format.variant == LloydVariant.PLAIN:
        return _encode_lloyd(how, z_KB, energy_K1 / z_KB.shape[1], 1 / down_K1, post_K1)
    z_KB = _hadamard(_flip(z_KB, lo, rotation))  # multiplies the energy by the length of a block
    return _encode_lloyd(how, z_KB, energy_K1, 1 / down_K1, post_K1, root(z_KB.shape[1]))


def _settle(x_KB: Tensor, post_K1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Outside the middle domain bring the peak to [1, 2), so that squares are safe: (x * down, down, post)."""
    exponent_K1 = _exponent(x_KB.abs().amax(1, keepdim=True)).clamp(-126, 126)
    down_K1 = torch.where(post_K1 == 1, torch.ones_like(post_K1), _power_of_two(-exponent_K1))
    return x_KB * down_K1, down_K1, post_K1


def _encode_scaled(how: Encoding, x_KB: Tensor, post_K1: Tensor, lo: int, dither: int) -> tuple[Tensor, Tensor, Tensor]:
    """Block integers and scaled casts of values that `post` takes back to their own size."""
    peak_K1 = x_KB.abs().amax(1, keepdim=True)
    bad_K1 = ~(peak_K1 * post_K1).isfinite()
    x_KB = torch.where(bad_K1, torch.zeros_like(x_KB), x_KB)
    peak_K1 = torch.where(bad_K1, torch.zeros_like(peak_K1), peak_K1)
    minimum_K1 = torch.zeros_like(peak_K1)
    if how.format.kind == Kind.CAST:
        scale_K1, codes_KB = _cast(CastVariant(how.format.variant), x_KB, peak_K1, post_K1)
    elif how.format.variant == IntVariant.AFFINE:
        scale_K1, minimum_K1, codes_KB = _affine(how, x_KB, post_K1, lo, dither)
    else:
        scale_K1, codes_KB = _symmetric(how, x_KB, peak_K1, post_K1, lo, dither)
    stored_K1 = torch.where(bad_K1, torch.nan, _store(scale_K1, post_K1))
    codes_KB = torch.where(bad_K1, torch.zeros_like(codes_KB), codes_KB)
    lifted = post_K1 < 1
    stored_minimum_K1 = torch.where(lifted, minimum_K1, minimum_K1 * post_K1).to(torch.bfloat16)
    return stored_K1, torch.where(bad_K1, torch.zeros_like(stored_minimum_K1), stored_minimum_K1), codes_KB


def _symmetric(
    how: Encoding, x_KB: Tensor, peak_K1: Tensor, post_K1: Tensor, lo: int, dither: int
) -> tuple[Tensor, Tensor]:
    """scale = peak / qmax in bfloat16; code = round(x / scale) + 2**(bits-1)."""
    half = 1 << how.format.bits - 1
    qmax = half - 1
    cap_K1 = _truncate_bf16(torch.full_like(peak_K1, FLOAT_MAX / qmax)) / post_K1.clamp(min=1)
    scale_K1 = torch.minimum(_divided(peak_K1, qmax).to(torch.bfloat16).float(), cap_K1)
    t_KB = x_KB * _inverse(scale_K1)
    if how.stochastic:
        t_KB = t_KB + _dither(x_KB, lo, dither)
    return scale_K1, (t_KB.round().clamp(-qmax, qmax) + half).to(torch.uint8)


def _affine(how: Encoding, x_KB: Tensor, post_K1: Tensor, lo: int, dither: int) -> tuple[Tensor, Tensor, Tensor]:
    """minimum = floor of min(x) in bfloat16; scale = (max(x) - minimum) / (2**bits - 1), rounded up."""
    top = (1 << how.format.bits) - 1
    size_K1 = post_K1.clamp(min=1)
    limit_K1 = _over(BF16_MAX, size_K1)
    minimum_K1 = torch.maximum(_floor_bf16(x_KB.amin(1, keepdim=True)), -limit_K1) + 0.0  # no -0
    scale_K1 = _floor_bf16(_divided(minimum_K1 - x_KB.amax(1, keepdim=True), top)).abs()
    most_K1 = ((_over(FLOAT_MAX * (1 - 2.0**-20), size_K1) - minimum_K1) / scale_K1).floor().clamp(max=top)
    most_K1 = torch.where(scale_K1 == 0, torch.full_like(most_K1, top), most_K1)
    t_KB = (x_KB - minimum_K1) * _inverse(scale_K1)
    if how.stochastic:
        t_KB = t_KB + _dither(x_KB, lo, dither)
    codes_KB = torch.minimum(t_KB.round().clamp(min=0), most_K1)
    return scale_K1, minimum_K1, codes_KB.to(torch.uint8)


def _cast(variant: CastVariant, x_KB: Tensor, peak_K1: Tensor, post_K1: Tensor) -> tuple[Tensor, Tensor]:
    """scale = the power of two that brings the peak to the top of the format; code = x / scale in the format."""
    dtype, top = _CASTS[variant]
    scale_K1 = torch.where(peak_K1 > 0, _power_of_two(_exponent(peak_K1).clamp(min=-100) - top), 0)
    below = 2.0 ** (top + 1) * (1 - torch.finfo(dtype).eps / 2)  # the last number before the next power of two
    last_K1 = peak_K1 * post_K1.clamp(min=1) >= 2.0**127  # there is no next power of two
    values_KB = x_KB * _inverse(scale_K1)
    values_KB = torch.where(last_K1, values_KB.clamp(-below, below), values_KB)
    return scale_K1, values_KB.to(dtype).view(torch.int16 if dtype.itemsize == 2 else torch.uint8)


def _encode_lloyd(
    how: Encoding, z_KB: Tensor, power_K1: Tensor, unscale_K1: Tensor, post_K1: Tensor, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """code = level q nearest to z / rms (trellis: of the best path).

    scale = <z, q> / <q, q>, or unbiased <z, z> / <z, q>; power: mean square of z. The products are taken of integers:
    y = round(grid * z / rms), and levels as in LevelTable.
    """
    grid = table_of(how.format).grid
    codes = z_KB.shape[1]
    bad_K1 = ~z_KB.isfinite().all(1, keepdim=True)
    z_KB = torch.where(bad_K1, torch.zeros_like(z_KB), z_KB)
    blank_K1 = bad_K1 | (power_K1 == 0)
    rms_K1 = power_K1.sqrt()
    gain_K1 = torch.where(blank_K1, torch.zeros_like(rms_K1), _over(grid, rms_K1))
    y_KB = (z_KB.double() * gain_K1.double()).round().int()  # rounds the exact product
    if how.format.kind == Kind.TRELLIS:
        y_KB = y_KB.clamp(-128, 127)
        codes_KB, level_KB = trellis.choose(how.format.bits, y_KB)
        codes_KB = torch.where(blank_K1, torch.zeros_like(codes_KB), codes_KB)
    else:
        codes_KB, level_KB = _nearest(how.format.bits, y_KB, z_KB.signbit() & ~blank_K1)
    along_K1 = (y_KB * level_KB).sum(1, keepdim=True, dtype=torch.int32).clamp(min=1).float()  # <y, q> * grid
    if how.unbiased:
        fit_K1 = _over(codes, along_K1) * (rms_K1 * grid)
    else:
        square_K1 = level_KB.square().sum(1, keepdim=True, dtype=torch.int32).float()
        fit_K1 = (along_K1 / square_K1) * (rms_K1 * f32(1 / grid))
    fit_K1 = torch.where(blank_K1, torch.zeros_like(fit_K1), fit_K1 * scale * unscale_K1)
    stored_K1 = torch.where(bad_K1, torch.nan, _store(fit_K1, post_K1))
    codes_KB = torch.where(bad_K1, torch.zeros_like(codes_KB), codes_KB)
    return stored_K1, torch.zeros_like(stored_K1), codes_KB.to(torch.uint8)


def _nearest(bits: int, y_KB: Tensor, negative_KB: Tensor) -> tuple[Tensor, Tensor]:
    """The Lloyd codes of cells, and their levels. Signs are those of z, as a cell of 0 has none."""
    table = LLOYD[bits]
    rank_KB = torch.zeros_like(y_KB)
    for edge in table.edges:
        rank_KB += y_KB.abs() >= edge
    level_KB = _constant(table.levels, torch.int32, y_KB.device)[rank_KB]
    codes_KB = (1 << bits - 1) + torch.where(negative_KB, -1 - rank_KB, rank_KB)
    return codes_KB, torch.where(negative_KB, -level_KB, level_KB)


# --- arithmetic -------------------------------------------------------------------------------------------------------


def f32(value: float) -> float:
    """value rounded to fp32, so that a scalar operand is the same number in every backend."""
    return ctypes.c_float(value).value


def root(codes: int) -> float:
    """1 / sqrt(codes), which normalizes the transform of a block."""
    return f32(1 / math.sqrt(codes))


def _over(numerator: float, x: Tensor) -> Tensor:
    """numerator / x with one rounding; `number / tensor` would multiply by a reciprocal."""
    return torch.full_like(x, numerator) / x


def _inverse(scale_K1: Tensor) -> Tensor:
    return torch.where(scale_K1 > 0, 1 / scale_K1, 0)


def _exponent(peak_K1: Tensor) -> Tensor:
    """floor(log2(peak)) of a normal number; below -126 for zero and subnormals, 128 for NaN and Inf."""
    return (peak_K1.view(torch.int32) >> 23) - 127


def _power_of_two(exponent_K1: Tensor) -> Tensor:
    """2**exponent, exactly, for -126 .. 127."""
    return (exponent_K1 + 127 << 23).view(torch.float32)


def _truncate_bf16(x: Tensor) -> Tensor:
    return (x.view(torch.int32) & -65536).view(torch.float32)


def _floor_bf16(x: Tensor) -> Tensor:
    """The largest bfloat16 that is not above x."""
    down = _truncate_bf16(x)
    below = (down.view(torch.int32) + 65536).view(torch.float32)
    return torch.where(down > x, below, down)


def _hadamard(z_KB: Tensor) -> Tensor:
    """Walsh-Hadamard transform, not normalized, strides from B/2 down to 1."""
    codes = z_KB.shape[1]
    stride = codes // 2
    while stride:
        a, b = z_KB.view(-1, codes // (2 * stride), 2, stride).unbind(2)
        z_KB = torch.stack((a + b, a - b), 2).view(-1, codes)
        stride //= 2
    return z_KB


def _hash(index: Tensor, key: int) -> Tensor:
    """32 hashed bits of a 64-bit counter, in an int64 tensor."""
    mask = 0xFFFFFFFF
    low = index & mask
    high = index >> 32
    h = low ^ (key & mask) ^ (high * 0x9E3779B9 & mask)
    h = (h ^ h >> 16) * 0x7FEB352D & mask
    h = (h ^ h >> 15) + (key >> 32) & mask
    h = h * 0x846CA68B & mask
    return h ^ h >> 16


def _flip(z_KB: Tensor, lo: int, key: int) -> Tensor:
    """Change the sign of element i where bit i % 32 of hash(i // 32) is set."""
    words = _hash(torch.arange(lo // 32, -(-(lo + z_KB.numel()) // 32), device=z_KB.device), key)
    bits = words[:, None] >> torch.arange(32, device=z_KB.device) & 1
    return torch.where(bits.view(-1)[: z_KB.numel()].view_as(z_KB) != 0, -z_KB, z_KB)


def _dither(x_KB: Tensor, lo: int, key: int) -> Tensor:
    """Uniform in [-1/2, 1/2), 24 bits, by element index."""
    index = torch.arange(lo, lo + x_KB.numel(), device=x_KB.device)
    return (((_hash(index, key) >> 8) - (1 << 23)).float() * 2.0**-24).view_as(x_KB)


def _divided(x: Tensor, by: float) -> Tensor:
    """x / by, rounded once on every device: on a GPU, torch multiplies by the inverse of a Python number."""
    return x / torch.full_like(x, by)
