"""Block integers and scaled casts: the range of every row, its scale, its codes, and both on the wire."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from thinwire.kernels import reference
from thinwire.kernels.triton.numbers import (
    INF_BITS,
    ROUNDER,
    ROUNDER_BITS,
    bits_of,
    dither,
    float_of,
    floor_bf16,
    inverse,
    round_bf16,
    size_bits,
    stored_scale,
)
from thinwire.kernels.triton.tiles import kept, largest, packed, row_start, store_codes, store_halves, store_scale

BF16_MAX = tl.constexpr(reference.BF16_MAX)
FLOAT_MAX = tl.constexpr(reference.FLOAT_MAX)
NEAR_FLOAT_MAX = tl.constexpr(reference.FLOAT_MAX * (1 - 2.0**-20))
LAST_POWER = tl.constexpr(2.0**127)


class Extent(NamedTuple):
    """The range of the numbers in every row."""

    peak: Any  # bits of the largest |x|
    low: Any  # of affine rows only
    high: Any  # of affine rows only


@triton.jit
def extent_of(tile, at, T: tl.constexpr):
    """The range of the columns that exist."""
    peak = largest(kept([size_bits(x) for x in tile], at, 0, T), T)
    low = tl.zeros((T.rows, T.columns), tl.float32)
    high = tl.zeros((T.rows, T.columns), tl.float32)
    if T.affine:
        low = -largest(kept([-x for x in tile], at, float("-inf"), T), T)
        high = largest(kept(tile, at, float("-inf"), T), T)
    return Extent(peak, low, high)


@triton.jit
def no_extent(T: tl.constexpr):
    """The range of nothing, to be widened by the pieces of a block."""
    low = tl.full((T.rows, T.columns), float("inf"), tl.float32)
    high = tl.full((T.rows, T.columns), float("-inf"), tl.float32)
    return Extent(tl.zeros((T.rows, T.columns), tl.int32), low, high)


@triton.jit
def widened(a, b):
    """The range that holds both."""
    return Extent(tl.maximum(a.peak, b.peak), tl.minimum(a.low, b.low), tl.maximum(a.high, b.high))


@triton.jit
def put_scaled(tile, extent, factor, post, target, keys, at, T: tl.constexpr):
    """Write scales, minima and codes of tile * factor; return (stored scale, stored minimum, values of the codes).

    post: undoes the domain that `factor` leads to. keys: those of the dither.
    """
    peak = bits_of(float_of(extent.peak) * factor)
    scale, minimum, most, bad = _scale_of(peak, extent.low * factor, extent.high * factor, post, T)
    stored = stored_scale(scale, post, bad)
    small = tl.where(post < 1, minimum, minimum * post)
    stored_minimum = tl.where(bad, 0, round_bf16(bits_of(small)))
    store_scale(target.scales, stored, at, T)
    if T.affine:
        store_scale(target.minima, stored_minimum, at, T)
    if T.bits == 16:
        cast = _cast_values(tile, factor, scale, most, bad, T)
        store_halves(target.planes[0], cast, at, T)
        values = [x.to(tl.float16).to(tl.float32) for x in cast]
    elif T.cast:
        codes = _cast_codes(_cast_values(tile, factor, scale, most, bad, T), T)
        store_codes(target.planes, packed(codes, 0, T), bad, bad, at, T)
        values = [cast_value(code, T) for code in codes]
    else:
        codes = _integer_codes(tile, factor, scale, minimum, most, keys, at, T)
        store_codes(target.planes, packed(codes, ROUNDER_BITS, T), bad, bad, at, T)
        values = [float_of(code) - (ROUNDER + T.zero) for code in codes]
    return stored, stored_minimum, values


@triton.jit
def _scale_of(peak_bits, low, high, post, T: tl.constexpr):
    """(scale, minimum, most, bad) of rows whose |x| reaches `peak` and whose x lies in low..high.

    most: the largest code of an affine row, or the largest value of a cast one; inf if nothing has to be clamped.
    """
    peak = float_of(peak_bits)
    bad = size_bits(peak * post) >= INF_BITS
    peak = tl.where(bad, 0.0, peak)
    size = tl.maximum(post, 1.0)
    minimum = tl.zeros_like(peak)
    most = tl.zeros_like(peak)
    if T.cast:
        scale, most = _cast_scale(peak, size, T)
    elif T.affine:
        scale, minimum, most = _affine_scale(tl.where(bad, 0.0, low), tl.where(bad, 0.0, high), size, T)
    else:
        QMAX: tl.constexpr = T.half - 1.0
        near = float_of(round_bf16(bits_of(tl.div_rn(peak, QMAX))) << 16)
        cap = floor_bf16(tl.full((), FLOAT_MAX / QMAX, tl.float32))
        scale = tl.minimum(near, tl.div_rn(cap, size))
    return scale, minimum, most, bad


@triton.jit
def _affine_scale(low, high, size, T: tl.constexpr):
    TOP: tl.constexpr = 2.0 * T.half - 1
    limit = tl.div_rn(BF16_MAX, size)
    minimum = tl.maximum(floor_bf16(low), -limit) + 0.0
    scale = tl.abs(floor_bf16(tl.div_rn(minimum - high, TOP)))
    headroom = tl.div_rn(NEAR_FLOAT_MAX, size) - minimum
    most = tl.minimum(tl.floor(tl.div_rn(headroom, tl.where(scale == 0, 1.0, scale))), TOP)
    return scale, minimum, tl.where(scale == 0, TOP, most)


@triton.jit
def _cast_scale(peak, size, T: tl.constexpr):
    """(scale, most): the power of two that brings the peak to the top of the format, and where to clamp values."""
    if T.e4m3:
        TOP: tl.constexpr = 7
        BELOW: tl.constexpr = 2.0**8 * (1 - 2.0**-4)
    elif T.bits == 8:
        TOP: tl.constexpr = 14
        BELOW: tl.constexpr = 2.0**15 * (1 - 2.0**-3)
    else:
        TOP: tl.constexpr = 14
        BELOW: tl.constexpr = 2.0**15 * (1 - 2.0**-11)
    exponent = tl.maximum((bits_of(peak) >> 23) - 127, -100) - TOP
    scale = tl.where(peak > 0, float_of((exponent + 127) << 23), 0.0)
    return scale, tl.where(peak * size >= LAST_POWER, BELOW, float("inf"))


@triton.jit
def _integer_codes(tile, factor, scale, minimum, most, keys, at, T: tl.constexpr):
    """The codes of x * factor, each plus ROUNDER_BITS (numbers.py): they are the bits of a float that was rounded."""
    V: tl.constexpr = T.vector
    QMAX: tl.constexpr = T.half - 1.0
    near = inverse(scale)
    codes = ()
    for i in tl.static_range(T.size):
        x = tile[i] * factor
        if T.affine:
            x = x - minimum
        t = x * near
        if T.stochastic:
            element = row_start(at.row, T.block, T) + (i // V) * at.span + at.column * V + i % V
            t = t + dither(at.first * T.block, element, keys)
        if T.affine:
            t = tl.minimum(tl.maximum(t, 0.0), most)
        elif T.stochastic or T.bits > 6:  # else scale * QMAX is within 1/128 of the peak: none rounds past QMAX
            t = tl.minimum(tl.maximum(t, -QMAX), QMAX)
        codes = codes + (bits_of(t + (ROUNDER + T.zero)),)
    return codes


@triton.jit
def _cast_values(tile, factor, scale, most, bad, T: tl.constexpr):
    """x * factor / scale, clamped to `most`; zeros for a bad row."""
    near = inverse(scale)
    return [tl.where(bad, 0.0, tl.minimum(tl.maximum(x * factor * near, -most), most)) for x in tile]


@triton.jit
def _cast_codes(values, T: tl.constexpr):
    """The bits of 8-bit floats, as int32."""
    KIND: tl.constexpr = tl.float8e4nv if T.e4m3 else tl.float8e5
    return [value.to(KIND).to(tl.uint8, bitcast=True).to(tl.int32) for value in values]


@triton.jit
def cast_value(code, T: tl.constexpr):
    """The number of an 8-bit float's bits."""
    KIND: tl.constexpr = tl.float8e4nv if T.e4m3 else tl.float8e5
    return code.to(tl.uint8).to(KIND, bitcast=True).to(tl.float32)
