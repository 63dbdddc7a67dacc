"""From a request for fake quantisation to a launch: how a tensor is cut into tiles.

[Note: Partial sums] Channels are shared by many tiles. A tile writes one number for each of its rows (columns) and sum,
and torch adds them: the result does not hang on the order in which tiles end. Of the two ways to cut a tensor that with
fewer such numbers is taken, which is also the one whose tiles are long in memory. They are a small part of the tensor,
except where channels themselves are as short.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from thinwire.kernels.schema import Grid
from thinwire.kernels.triton import fake, launch

_ELEMENTS = 2048  # a tile; more => fewer sums, more registers
_COLUMNS = 128  # a tile whose columns are channels: short rows leave more rows for a column to add
_WARPS = 4


class _Cut(NamedTuple):
    """A tensor as a matrix of tiles."""

    rows: int
    columns: int
    tile: tuple[int, int]
    by_row: bool
    parts: tuple[int, int, int]  # the partial sums as (outer, channels, inner)

    @property
    def tiles(self) -> int:
        return int(triton.cdiv(self.rows, self.tile[0]) * triton.cdiv(self.columns, self.tile[1]))

    def constants(self) -> dict[str, Any]:
        return {
            "ROWS": self.tile[0],
            "COLUMNS": self.tile[1],
            "BY_ROW": self.by_row,
            "SINGLE": self.rows == 1,
        }


def fake_quantize(grid: Grid, x_OCI: Tensor, scale_C: Tensor, shift_C: Tensor | None, out_OCI: Tensor) -> None:
    """See schema.Backend."""
    cut = _cut(*x_OCI.shape)
    launch.run(
        fake.forward_kernel,
        cut.tiles,
        (x_OCI, out_OCI, *_parameters(grid, x_OCI, cut, scale_C, shift_C)),
        {**cut.constants(), "SHIFT": shift_C is not None, "OFFSET": grid.offset},
        _WARPS,
    )


def fake_quantize_grad(
    grid: Grid,
    x_OCI: Tensor,
    grad_OCI: Tensor,
    scale_C: Tensor,
    shift_C: Tensor | None,
    dx_OCI: Tensor | None,
    sums_2C: Tensor,
    factor: float,
) -> None:
    """See schema.Backend."""
    cut = _cut(*x_OCI.shape)
    sums_SC = sums_2C if shift_C is not None else sums_2C[:1]
    partial = sums_SC if cut.parts[0] * cut.parts[2] == 1 else sums_2C.new_empty(len(sums_SC), *cut.parts)
    want = x_OCI if dx_OCI is None else dx_OCI
    launch.run(
        fake.backward_kernel,
        cut.tiles,
        (x_OCI, grad_OCI, want, partial, *_parameters(grid, x_OCI, cut, scale_C, shift_C), factor),
        {
            **cut.constants(),
            "SHIFT": shift_C is not None,
            "OFFSET": grid.offset,
            "PAPER": grid.paper,
            "WANT_DX": dx_OCI is not None,
        },
        _WARPS,
    )
    if partial is not sums_SC:
        torch.sum(partial, (1, 3), out=sums_SC)


def _parameters(grid: Grid, x_OCI: Tensor, cut: _Cut, scale_C: Tensor, shift_C: Tensor | None) -> tuple[Any, ...]:
    _, channels, inner = x_OCI.shape
    shift = scale_C if shift_C is None else shift_C
    ends = float(grid.quant_min), float(grid.quant_max)
    return scale_C, shift, cut.rows, cut.columns, channels, inner, *ends


def _cut(outer: int, channels: int, inner: int) -> _Cut:
    """The way to cut with the fewer partial sums. [Note: Partial sums]"""
    by_row, by_column = _by_row(outer, channels, inner), _by_column(outer, channels, inner)
    return by_row if by_row.parts[0] * by_row.parts[2] <= by_column.parts[0] * by_column.parts[2] else by_column


def _by_row(outer: int, channels: int, inner: int) -> _Cut:
    columns = min(triton.next_power_of_2(inner), _ELEMENTS)
    rows = min(triton.next_power_of_2(outer * channels), _ELEMENTS // columns)
    return _Cut(outer * channels, inner, (rows, columns), True, (outer, channels, triton.cdiv(inner, columns)))


def _by_column(outer: int, channels: int, inner: int) -> _Cut:
    columns = min(triton.next_power_of_2(channels * inner), _COLUMNS)
    rows = min(triton.next_power_of_2(outer), _ELEMENTS // columns)
    return _Cut(outer, channels * inner, (rows, columns), False, (triton.cdiv(outer, rows), channels, inner))
