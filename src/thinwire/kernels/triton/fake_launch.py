"""From a request for fake quantisation to a launch: how a tensor is cut into tiles.

[Note: Partial sums] A channel is shared by many programs. Each leaves one number for each of its rows (columns) and
sum, and torch adds them: the result does not hang on the order in which programs end. The longer of outer and inner is
the one that programs run along, so that these numbers are few.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from thinwire.kernels.schema import Grid
from thinwire.kernels.triton import fake, launch

_FORWARD_BYTES, _BACKWARD = 4096, 512  # a tile's bytes, elements; more => fewer reductions, more registers
_COLUMNS = 128  # a tile whose columns are channels: short rows leave more rows for a column to add
_LONG = 128  # a row with as many elements keeps a warp busy
_WARPS = 4
_PROGRAMS = 4096  # enough to fill a large GPU several times; beyond them a program that sums takes several tiles


class _Cut(NamedTuple):
    """A tensor as a matrix of tiles, and how many of them a program takes."""

    rows: int
    columns: int
    tile: tuple[int, int]
    by_row: bool
    sums: bool

    @property
    def tiles(self) -> tuple[int, int]:
        return triton.cdiv(self.rows, self.tile[0]), triton.cdiv(self.columns, self.tile[1])

    @property
    def steps(self) -> int:
        down, across = self.tiles
        if self.by_row and not self.sums:
            return 1
        return min(max(down * across // _PROGRAMS, 1), across if self.by_row else down)

    @property
    def programs(self) -> tuple[int, int]:
        """Beside, and along, the way that a program takes."""
        down, across = self.tiles
        beside, along = (down, across) if self.by_row else (across, down)
        return beside, triton.cdiv(along, self.steps)

    def constants(self) -> dict[str, Any]:
        return {
            "ROWS": self.tile[0],
            "COLUMNS": self.tile[1],
            "BY_ROW": self.by_row,
            "FAR": self.tile[0] * self.columns >= 1 << 31,
        }


def fake_quantize(grid: Grid, x_OCI: Tensor, scale_C: Tensor, shift_C: Tensor | None, out_OCI: Tensor) -> None:
    """See schema.Backend."""
    cut = _cut(x_OCI, _FORWARD_BYTES // x_OCI.itemsize, sums=False)
    launch.run(
        fake.forward_kernel,
        math.prod(cut.programs),
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
    cut = _cut(x_OCI, _BACKWARD, sums=True)
    outer, channels, inner = x_OCI.shape
    along = cut.programs[1]
    parts = (outer, channels, along) if cut.by_row else (along, channels, inner)
    sums_SC = sums_2C if shift_C is not None else sums_2C[:1]
    partial = sums_SC if parts[0] * parts[2] == 1 else sums_2C.new_empty(len(sums_SC), *parts)
    want = x_OCI if dx_OCI is None else dx_OCI
    launch.run(
        fake.backward_kernel,
        math.prod(cut.programs),
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
    return scale_C, shift, cut.rows, cut.columns, channels, inner, cut.steps, *ends


def _cut(x_OCI: Tensor, elements: int, *, sums: bool) -> _Cut:
    """[Note: Partial sums]"""
    outer, channels, inner = x_OCI.shape
    if inner >= min(outer, _LONG):
        columns = min(triton.next_power_of_2(inner), elements)
        rows = min(triton.next_power_of_2(outer * channels), elements // columns)
        return _Cut(outer * channels, inner, (rows, columns), True, sums)
    columns = min(triton.next_power_of_2(channels * inner), _COLUMNS)
    rows = min(triton.next_power_of_2(outer), elements // columns)
    return _Cut(outer, channels * inner, (rows, columns), False, sums)
