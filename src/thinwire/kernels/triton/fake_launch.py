"""From a request for fake quantisation to a launch: how a tensor is cut into tiles.

[Note: Partial sums] A channel is shared by many programs. Each leaves one number for each of its rows (columns) and
sum, and torch adds them: the result does not hang on the order in which programs end. The longer of outer and inner is
the one that programs run along, so that these numbers are few.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
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

    programs: int
    sizes: tuple[int, ...]  # rows, columns, channels, inner, steps
    constants: tuple[Any, ...]  # ROWS, COLUMNS, BY_ROW, FAR
    parts: tuple[int, int, int]  # what programs leave for each sum, as (outer, channels, inner)


def fake_quantize(grid: Grid, x_OCI: Tensor, scale_C: Tensor, shift_C: Tensor | None, out_OCI: Tensor) -> None:
    """See schema.Backend."""
    cut = _cut(x_OCI.shape, _FORWARD_BYTES // x_OCI.itemsize, False)
    shift = scale_C if shift_C is None else shift_C
    choices = (*cut.constants, shift_C is not None, grid.offset)
    launch.run(
        fake.forward_kernel,
        cut.programs,
        (x_OCI, out_OCI, scale_C, shift, *cut.sizes, float(grid.quant_min), float(grid.quant_max)),
        dict(zip(_CONSTANTS, choices, strict=False)),
        _WARPS,
        _kind(cut, choices, x_OCI, out_OCI, scale_C, shift),
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
    cut = _cut(x_OCI.shape, _BACKWARD, True)
    shift = scale_C if shift_C is None else shift_C
    sums_SC = sums_2C if shift_C is not None else sums_2C[:1]
    partial = sums_SC if cut.parts[0] * cut.parts[2] == 1 else sums_2C.new_empty(len(sums_SC), *cut.parts)
    tensors = (x_OCI, grad_OCI, x_OCI if dx_OCI is None else dx_OCI, partial, scale_C, shift)
    choices = (*cut.constants, shift_C is not None, grid.offset, grid.paper, dx_OCI is not None)
    launch.run(
        fake.backward_kernel,
        cut.programs,
        (*tensors, *cut.sizes, float(grid.quant_min), float(grid.quant_max), factor),
        dict(zip(_CONSTANTS, choices, strict=True)),
        _WARPS,
        _kind(cut, choices, *tensors),
    )
    if partial is not sums_SC:
        torch.sum(partial, (1, 3), out=sums_SC)


_CONSTANTS = ("ROWS", "COLUMNS", "BY_ROW", "FAR", "SHIFT", "OFFSET", "PAPER", "WANT_DX")


def _kind(cut: _Cut, choices: tuple[Any, ...], *tensors: Tensor) -> Any:
    """What Triton distinguishes, as short as it can be said where all tensors are on 16 bytes; None elsewhere."""
    addresses = 0
    for tensor in tensors:
        addresses |= tensor.data_ptr()
    columns, far = cut.sizes[1], max(cut.sizes) >= 1 << 31
    return None if addresses % 16 or far else (choices, columns == 1, columns % 16 == 0, tensors[0].dtype)


@lru_cache(maxsize=1024)
def _cut(shape: tuple[int, int, int], elements: int, sums: bool) -> _Cut:
    """[Note: Partial sums]. Where nothing is summed, a program that stays in its rows has one tile."""
    outer, channels, inner = shape
    by_row = inner >= min(outer, _LONG)
    rows, columns = (outer * channels, inner) if by_row else (outer, channels * inner)
    wide = min(_power(columns), elements if by_row else _COLUMNS)
    high = min(_power(rows), elements // wide)
    down, across = -(-rows // high), -(-columns // wide)
    beside, along = (down, across) if by_row else (across, down)
    steps = 1 if by_row and not sums else min(max(down * across // _PROGRAMS, 1), along)
    strips = -(-along // steps)
    parts = (outer, channels, strips) if by_row else (strips, channels, inner)
    far = high * columns >= 1 << 31
    return _Cut(beside * strips, (rows, columns, channels, inner, steps), (high, wide, by_row, far), parts)


def _power(n: int) -> int:
    """The power of two from n up."""
    return 1 << (n - 1).bit_length()
