"""Fake quantization, forward and backward in one pass each. `schema.Grid` has the formulas.

A tensor (outer, channels, inner) is read as a matrix, and a program takes `steps` tiles of ROWS x COLUMNS of it. If
BY_ROW, the matrix has outer * channels rows, each of one channel, and a program's tiles lie side by side; else it has
channels * inner columns, each of one channel, and the tiles lie below each other. So a program reads scale and shift
once, and writes the sums over its tiles once, a number for each row or column: [Note: Partial sums] in fake_launch.py.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from thinwire.kernels.triton.numbers import ROUNDER


class Shape(NamedTuple):
    """The shape of the matrix, and the tiles of a program: an argument of kernels.

    `columns` is an argument of its own, so that Triton knows if it is a multiple of 16: then rows start on 16 bytes.
    """

    rows: Any
    channels: Any
    inner: Any
    steps: Any


class Range(NamedTuple):
    """The range of the integers: an argument of kernels."""

    low: Any
    high: Any


@triton.jit
def forward_kernel(
    x, out, scale, shift,
    shape, columns, integers,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BY_ROW: tl.constexpr, FAR: tl.constexpr,
    SHIFT: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """out = y. FAR: a tile spans 2**31 elements or more; SHIFT: there is a shift; OFFSET: it is no zero point."""
    row, column, _place, _parts = _first(shape, columns, ROWS, COLUMNS, BY_ROW)
    channel, known = _channels(row, column, shape, columns, ROWS, COLUMNS, BY_ROW)
    s, inverse, b, low, high = _grid(scale, shift, channel, known, integers, BY_ROW, SHIFT, OFFSET)
    for _ in range(shape.steps):
        start, at, inside, whole = _tile(row, column, shape.rows, columns, ROWS, COLUMNS, FAR)
        _v, r = _place_on(_load(x + start, at, inside, whole), inverse, b, low, high)
        _store(out + start, at, _clamp(r, low, high) * s + b, inside, whole)
        row, column = _next(row, column, ROWS, COLUMNS, BY_ROW)


@triton.jit
def backward_kernel(
    x, grad, dx, partial, scale, shift,
    shape, columns, integers, factor,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BY_ROW: tl.constexpr, FAR: tl.constexpr,
    SHIFT: tl.constexpr, OFFSET: tl.constexpr, PAPER: tl.constexpr, WANT_DX: tl.constexpr,
):  # fmt: skip
    """dx, and the program's part of ds, and if SHIFT of db or dz. PAPER: the paper's rule for what is outside."""
    row, column, place, parts = _first(shape, columns, ROWS, COLUMNS, BY_ROW)
    channel, known = _channels(row, column, shape, columns, ROWS, COLUMNS, BY_ROW)
    s, inverse, b, low, high = _grid(scale, shift, channel, known, integers, BY_ROW, SHIFT, OFFSET)
    ds = tl.zeros((ROWS, COLUMNS), tl.float32)
    db = tl.zeros((ROWS, COLUMNS), tl.float32)
    for _ in range(shape.steps):
        start, at, inside, whole = _tile(row, column, shape.rows, columns, ROWS, COLUMNS, FAR)
        g = _load(grad + start, at, inside, whole)
        v, r = _place_on(_load(x + start, at, inside, whole), inverse, b, low, high)
        if PAPER:
            outside = (v <= low) | (v >= high)
        else:
            outside = (r < low) | (r > high)
        if WANT_DX:
            _store(dx + start, at, tl.where(outside, 0.0, g), inside, whole)
        ds += g * tl.where(outside, _clamp(r, low, high), r - v)
        if SHIFT:
            db += tl.where(outside, g, 0.0)
        row, column = _next(row, column, ROWS, COLUMNS, BY_ROW)
    AXIS: tl.constexpr = 1 if BY_ROW else 0
    if SHIFT:
        total, below = tl.reduce((ds, db), AXIS, _add_both)
        below = below * factor
        if not OFFSET:
            below = below * -tl.reshape(s, below.shape)
        tl.store(partial + parts + place, below, known)
    else:
        total = tl.sum(ds, AXIS)
    tl.store(partial + place, total * factor, known)


# --- where a program is -----------------------------------------------------------------------------------------------


@triton.jit
def _first(shape, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BY_ROW: tl.constexpr):
    """Row and column of the first tile, where its sums go, and how many numbers all programs write for each sum."""
    program = tl.program_id(0).to(tl.int64)
    rows, steps = shape.rows, shape.steps
    if BY_ROW:
        strips = tl.cdiv(tl.cdiv(columns, COLUMNS), steps)
        row = (program // strips) * ROWS
        column = (program % strips) * steps * COLUMNS
        place = (row + tl.arange(0, ROWS)) * strips + program % strips
        parts = strips.to(tl.int64) * rows
    else:
        across = tl.cdiv(columns, COLUMNS)
        row = (program // across) * steps * ROWS
        column = (program % across) * COLUMNS
        place = (program // across) * columns + column + tl.arange(0, COLUMNS)
        parts = tl.cdiv(tl.cdiv(rows, ROWS), steps).to(tl.int64) * columns
    return row, column, place, parts


@triton.jit
def _next(row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BY_ROW: tl.constexpr):
    if BY_ROW:
        column += COLUMNS
    else:
        row += ROWS
    return row, column


@triton.jit
def _tile(row, column, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FAR: tl.constexpr):
    """Where the tile starts, offsets from there, which of them are inside, and whether all are."""
    down = tl.arange(0, ROWS)[:, None]
    right = tl.arange(0, COLUMNS)[None, :]
    inside = (row + down < rows) & (column + right < columns)
    whole = (row + ROWS <= rows) & (column + COLUMNS <= columns)
    if ROWS == 1:
        at = right
    elif FAR:
        at = down.to(tl.int64) * columns + right
    else:
        at = down * columns + right
    return row * columns + column, at, inside, whole


# --- what its channels are --------------------------------------------------------------------------------------------


@triton.jit
def _channels(row, column, shape, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BY_ROW: tl.constexpr):
    """The channel of each row or column, and whether that exists. One 64-bit division per program, then 32-bit ones."""
    if BY_ROW:
        down = tl.arange(0, ROWS)
        channel = ((row % shape.channels).to(tl.int32) + down) % shape.channels.to(tl.int32)
        known = row + down < shape.rows
    else:
        right = tl.arange(0, COLUMNS)
        inner = shape.inner
        channel = (column // inner).to(tl.int32) + ((column % inner).to(tl.int32) + right) // inner.to(tl.int32)
        known = column + right < columns
    return channel, known


@triton.jit
def _grid(
    scale, shift, channel, known, integers,
    BY_ROW: tl.constexpr, SHIFT: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """s, 1 / s, b, lo and hi of channels, to be broadcast."""
    s = tl.load(scale + channel, known, other=1.0)
    inverse = tl.div_rn(1.0, s)
    good = (s > 0) & (s < float("inf")) & (inverse < float("inf"))
    b = tl.zeros_like(s)
    z = tl.zeros_like(s)
    if SHIFT:
        value = tl.load(shift + channel, known, other=0.0)
        if OFFSET:
            b = value + 0.0  # no negative zero
        else:
            good = good & (value == value)
            z = _round(_clamp(value, integers.low, integers.high))
    s = tl.where(good, s, float("nan"))
    inverse = tl.where(good, inverse, float("nan"))
    AXIS: tl.constexpr = 1 if BY_ROW else 0
    return [tl.expand_dims(x, AXIS) for x in (s, inverse, b, integers.low - z, integers.high - z)]


# --- numbers ----------------------------------------------------------------------------------------------------------


@triton.jit
def _place_on(value, inverse, b, low, high):
    """v and r. A v more than a step beyond the range is rounded as if by one step: r need only be outside."""
    v = (value - b) * inverse
    return v, _round(_clamp(v, low - 1, high + 1))


@triton.jit
def _clamp(x, low, high):
    """x, brought into low..high; NaN where x is."""
    return tl.minimum(tl.maximum(x, low, tl.PropagateNan.ALL), high, tl.PropagateNan.ALL)


@triton.jit
def _round(x):
    """Ties to even, for |x| < 2**22."""
    return (x + ROUNDER) - ROUNDER


@triton.jit
def _add_both(a, b, c, d):
    """Two sums in one reduction."""
    return a + c, b + d


@triton.jit
def _load(x, at, inside, whole):
    """A tile in fp32, zeros beyond the end. Without a mask threads read 16 bytes at once."""
    if whole:
        value = tl.load(x + at)
    else:
        value = tl.load(x + at, inside, other=0.0)
    return value.to(tl.float32)


@triton.jit
def _store(out, at, value, inside, whole):
    if whole:
        tl.store(out + at, value.to(out.dtype.element_ty))
    else:
        tl.store(out + at, value.to(out.dtype.element_ty), inside)
