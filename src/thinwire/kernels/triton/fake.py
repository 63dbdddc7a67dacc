"""Fake quantisation, forward and backward in one pass each. `schema.Grid` has the formulas.

A tensor (outer, channels, inner) is a matrix of ROWS x COLUMNS tiles, a tile a program. BY_ROW the rows are outer times
channels and a row has one channel; else the columns are channels times inner and a column has one. The sums of a tile,
one for each of its rows or columns, are left for the host to add: [Note: Partial sums] in fake_launch.py.
"""

import triton
import triton.language as tl

from thinwire.kernels.triton.numbers import ROUNDER


@triton.jit
def forward_kernel(
    x,
    out,
    scale,
    shift,
    rows,
    columns,
    channels,
    inner,
    quant_min,
    quant_max,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BY_ROW: tl.constexpr,
    SINGLE: tl.constexpr,
    SHIFT: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """out = y. SINGLE: there is one row; SHIFT: there is a shift, and by OFFSET it is an offset."""
    row, start, at, inside, whole = _tile(rows, columns, ROWS, COLUMNS, SINGLE)
    s, inverse, b, low, high = _channel(
        scale, shift, row, start, rows, columns, channels, inner, quant_min, quant_max, COLUMNS, BY_ROW, SHIFT, OFFSET
    )
    value = _load(x, at, inside, whole)
    _v, r = _place(value, inverse, b, low, high)
    y = _clamp(r, low, high) * s + b
    _store(out, at, y, inside, whole)


@triton.jit
def backward_kernel(
    x,
    grad,
    dx,
    partial,
    scale,
    shift,
    rows,
    columns,
    channels,
    inner,
    quant_min,
    quant_max,
    factor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BY_ROW: tl.constexpr,
    SINGLE: tl.constexpr,
    SHIFT: tl.constexpr,
    OFFSET: tl.constexpr,
    PAPER: tl.constexpr,
    WANT_DX: tl.constexpr,
):
    """dx and the tile's part of ds, and with a SHIFT of db or dz; PAPER chooses what is outside."""
    row, start, at, inside, whole = _tile(rows, columns, ROWS, COLUMNS, SINGLE)
    s, inverse, b, low, high = _channel(
        scale, shift, row, start, rows, columns, channels, inner, quant_min, quant_max, COLUMNS, BY_ROW, SHIFT, OFFSET
    )
    value = _load(x, at, inside, whole)
    g = _load(grad, at, inside, whole)
    v, r = _place(value, inverse, b, low, high)
    if PAPER:
        outside = (v <= low) | (v >= high)
    else:
        outside = (r < low) | (r > high)
    if WANT_DX:
        _store(dx, at, tl.where(outside, 0.0, g), inside, whole)
    term = g * tl.where(outside, _clamp(r, low, high), r - v)
    column_tiles = tl.cdiv(columns, COLUMNS)
    tile = tl.program_id(0).to(tl.int64)
    AXIS: tl.constexpr = 1 if BY_ROW else 0
    if BY_ROW:
        place = row * column_tiles + tile % column_tiles
        kept, parts = row < rows, column_tiles.to(tl.int64) * rows
    else:
        column = start + tl.arange(0, COLUMNS)
        place = (tile // column_tiles) * columns + column
        kept, parts = column < columns, tl.cdiv(rows, ROWS).to(tl.int64) * columns
    if SHIFT:
        ds, db = tl.reduce((term, tl.where(outside, g, 0.0)), AXIS, _add_both)
        db = db * factor
        if not OFFSET:
            db = db * -tl.reshape(s, db.shape)
        tl.store(partial + parts + place, db, kept)
    else:
        ds = tl.sum(term, AXIS)
    tl.store(partial + place, ds * factor, kept)


@triton.jit
def _tile(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SINGLE: tl.constexpr):
    """Rows, first column, offsets, which of them are inside, and whether all are."""
    column_tiles = tl.cdiv(columns, COLUMNS)
    program = tl.program_id(0).to(tl.int64)
    row = (program // column_tiles) * ROWS + tl.arange(0, ROWS)
    start = (program % column_tiles) * COLUMNS
    column = tl.arange(0, COLUMNS)[None, :]
    if SINGLE:
        at = start + column
    else:
        at = (row * columns)[:, None] + (start + column)
    inside = (row < rows)[:, None] & (start + column < columns)
    whole = ((program // column_tiles) * ROWS + ROWS <= rows) & (start + COLUMNS <= columns)
    return row, start, at, inside, whole


@triton.jit
def _channel(
    scale,
    shift,
    row,
    start,
    rows,
    columns,
    channels,
    inner,
    quant_min,
    quant_max,
    COLUMNS: tl.constexpr,
    BY_ROW: tl.constexpr,
    SHIFT: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """s, 1 / s, b, lo and hi of the rows, or of the columns, to be broadcast."""
    if BY_ROW:
        channel, known = row % channels, row < rows
    else:
        column = start + tl.arange(0, COLUMNS)
        channel, known = column // inner, column < columns
    s = tl.load(scale + channel, known, other=1.0)
    inverse = tl.div_rn(1.0, s)
    good = (s > 0) & (s < float("inf")) & (inverse < float("inf"))
    b, z = tl.zeros_like(s), tl.zeros_like(s)
    if SHIFT:
        value = tl.load(shift + channel, known, other=0.0)
        if OFFSET:
            b = value
        else:
            good = good & (value == value)
            z = _round(_clamp(value, quant_min, quant_max))
    s = tl.where(good, s, float("nan"))
    inverse = tl.where(good, inverse, float("nan"))
    AXIS: tl.constexpr = 1 if BY_ROW else 0
    low, high = quant_min - z, quant_max - z
    return (
        tl.expand_dims(s, AXIS),
        tl.expand_dims(inverse, AXIS),
        tl.expand_dims(b, AXIS),
        tl.expand_dims(low, AXIS),
        tl.expand_dims(high, AXIS),
    )


@triton.jit
def _place(value, inverse, b, low, high):
    """v and r. What lies beyond the range by a step or more is rounded as if by one: r need only be outside."""
    v = (value - b) * inverse
    return v, _round(_clamp(v, low - 1, high + 1))


@triton.jit
def _clamp(x, low, high):
    """NaN where x is."""
    return tl.minimum(tl.maximum(x, low, tl.PropagateNan.ALL), high, tl.PropagateNan.ALL)


@triton.jit
def _add_both(a, b, c, d):
    """The sums of two reductions at once."""
    return a + c, b + d


@triton.jit
def _round(x):
    """Ties to even, for |x| < 2**22."""
    return (x + ROUNDER) - ROUNDER


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
