"""From a request for fake quantization to a launch: how a tensor is cut into tiles.

[Note: Partial sums] Many programs share a channel. For each sum a program writes one number for each of its rows (or
columns), and torch adds these, so the result does not depend on the order in which programs end. Programs run along
the longer of outer and inner, so that there are few numbers to add.
"""

from functools import lru_cache

import torch
from torch import Tensor

from thinwire.kernels.schema import FakeGradients, Grid
from thinwire.kernels.triton import fake
from thinwire.kernels.triton.prepared import Prepared
from thinwire.kernels.triton.tile import power_of_two

_FORWARD_BYTES = 4096  # of a tile
_BACKWARD = 512  # elements of a tile; more => fewer reductions, more registers
_COLUMNS = 128  # of a tile whose columns are channels; more => fewer rows for a column to add
_LONG = 128  # a row of so many elements keeps a warp busy
_WARPS = 4
_PROGRAMS = 4096  # enough to fill a large GPU several times; if there would be more, one that sums takes several tiles


def fake_quantize(grid: Grid, x_OCI: Tensor, scale_C: Tensor, shift_C: Tensor | None, out_OCI: Tensor) -> None:
    """See schema.Backend."""
    elements = _FORWARD_BYTES // x_OCI.itemsize
    launch, _ = _prepare("forward", grid, x_OCI.shape, x_OCI.device, elements, SHIFT=shift_C is not None)
    launch(x=x_OCI, out=out_OCI, scale=scale_C, shift=scale_C if shift_C is None else shift_C)


def fake_quantize_grad(grid: Grid, of: FakeGradients, factor: float) -> None:
    """See schema.Backend."""
    x_OCI, grad_OCI, scale_C, shift_C, dx_OCI, sums_2C = of
    constants = {"SHIFT": shift_C is not None, "WANT_DX": dx_OCI is not None}
    launch, parts = _prepare("backward", grid, x_OCI.shape, x_OCI.device, _BACKWARD, **constants)
    sums_SC = sums_2C if shift_C is not None else sums_2C[:1]
    partial = sums_SC if parts[0] * parts[2] == 1 else sums_2C.new_empty(len(sums_SC), *parts)
    launch(
        x=x_OCI,
        grad=grad_OCI,
        dx=x_OCI if dx_OCI is None else dx_OCI,
        partial=partial,
        scale=scale_C,
        shift=scale_C if shift_C is None else shift_C,
        factor=float(factor),
    )
    if partial is not sums_SC:
        torch.sum(partial, (1, 3), out=sums_SC)


@lru_cache(maxsize=1024)
def _prepare(
    way: str, grid: Grid, shape: tuple[int, int, int], device: torch.device, elements: int, **constants: bool
) -> tuple[Prepared, tuple[int, int, int]]:
    """A launch in tiles of `elements`, and the shape of the numbers it writes for each sum. [Note: Partial sums]

    If nothing is summed, a program by rows has one tile.
    """
    outer, channels, inner = shape
    by_row = inner >= min(outer, _LONG)
    rows, columns = (outer * channels, inner) if by_row else (outer, channels * inner)
    wide = min(power_of_two(columns), elements if by_row else _COLUMNS)
    high = min(power_of_two(rows), elements // wide)
    down = -(-rows // high)
    across = -(-columns // wide)
    beside, along = (down, across) if by_row else (across, down)
    steps = 1 if by_row and way == "forward" else min(max(down * across // _PROGRAMS, 1), along)
    strips = -(-along // steps)
    known = {
        "shape": fake.Shape(rows, channels, inner, steps),
        "columns": columns,
        "integers": fake.Range(float(grid.quant_min), float(grid.quant_max)),
    }
    tiles = {"ROWS": high, "COLUMNS": wide, "BY_ROW": by_row, "FAR": high * columns >= 1 << 31}
    choices = {**tiles, "OFFSET": grid.offset, "PAPER": grid.paper, **constants}
    parts = (outer, channels, strips) if by_row else (strips, channels, inner)
    kernel = fake.forward_kernel if way == "forward" else fake.backward_kernel
    return Prepared(kernel, device, beside * strips, _WARPS, known, choices), parts
