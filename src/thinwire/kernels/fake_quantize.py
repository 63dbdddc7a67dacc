"""The definition of fake quantization, in plain torch: a part of the reference.

Shape suffixes: O outer, C channels, I inner, as in `x.flatten(axis + 1).flatten(0, axis - 1)`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.kernels.schema import FakeGradients, Grid


class _Placed(NamedTuple):
    """Where elements fall on the grid of their channel. Letters as in `Grid`."""

    scale_C1: Tensor
    offset_C1: Tensor
    low_C1: Tensor
    high_C1: Tensor
    v_OCI: Tensor
    r_OCI: Tensor

    def codes(self) -> Tensor:
        return self.r_OCI.clamp(self.low_C1, self.high_C1)


def fake_quantize(grid: Grid, x_OCI: Tensor, scale_C: Tensor, shift_C: Tensor | None, out_OCI: Tensor) -> bool | None:
    """out = y of `Grid`. Returns whether all scales are valid, or None if the host would have to wait for a device."""
    at = _place(grid, x_OCI, scale_C, shift_C)
    out_OCI.copy_(at.codes() * at.scale_C1 + at.offset_C1)
    return bool(at.scale_C1.isfinite().all()) if x_OCI.device.type == "cpu" else None


def fake_quantize_grad(grid: Grid, of: FakeGradients, factor: float) -> None:
    """dx and the parameters' gradients of `Grid`, added in doubles."""
    at = _place(grid, of.x_OCI, of.scale_C, of.shift_C)
    if grid.paper:
        outside = (at.v_OCI <= at.low_C1) | (at.v_OCI >= at.high_C1)
    else:
        outside = (at.r_OCI < at.low_C1) | (at.r_OCI > at.high_C1)
    if of.dx_OCI is not None:
        of.dx_OCI.copy_(of.grad_OCI.masked_fill(outside, 0))
    g_OCI = of.grad_OCI.double()
    ds_C = (g_OCI * torch.where(outside, at.codes(), at.r_OCI - at.v_OCI)).sum((0, 2))
    db_C = g_OCI.masked_fill(~outside, 0).sum((0, 2))
    of.sums_2C[0] = factor * ds_C
    of.sums_2C[1] = factor * (db_C if grid.offset else -at.scale_C1[:, 0] * db_C)


def _place(grid: Grid, x_OCI: Tensor, scale_C: Tensor, shift_C: Tensor | None) -> _Placed:
    compute = torch.promote_types(x_OCI.dtype, torch.float32)
    scale_C1 = scale_C.to(compute).unsqueeze(1)
    usable = (scale_C1 > 0) & (scale_C1 < torch.inf) & (1 / scale_C1 < torch.inf)
    scale_C1 = scale_C1.where(usable, torch.nan)  # other scales are invalid
    offset_C1 = zero_C1 = torch.zeros_like(scale_C1)
    if shift_C is not None and grid.offset:
        offset_C1 = shift_C.to(compute).unsqueeze(1) + 0.0  # no negative zero: it would let a zero y have r's sign
    elif shift_C is not None:
        zero_C1 = shift_C.to(compute).round().clamp(grid.quant_min, grid.quant_max).unsqueeze(1)
        scale_C1 = scale_C1.where(zero_C1.isfinite(), torch.nan)
    v_OCI = (x_OCI.to(compute) - offset_C1) * (1 / scale_C1)
    return _Placed(scale_C1, offset_C1, grid.quant_min - zero_C1, grid.quant_max - zero_C1, v_OCI, v_OCI.round())


# --- the integers themselves, for weights that are kept or sent as such -----------------------------------------------


def codes_of(grid: Grid, x_OCI: Tensor, scale_C: Tensor, shift_C: Tensor | None) -> Tensor:
    """clamp(r, lo, hi) - lo of `Grid`: 0 for the lowest level, and for NaN. uint8, so at most 256 levels."""
    at = _place(grid, x_OCI, scale_C, shift_C)
    return (at.codes() - at.low_C1).nan_to_num(nan=0.0).to(torch.uint8)


def values_of(grid: Grid, codes_OCI: Tensor, scale_C: Tensor, shift_C: Tensor | None, out_OCI: Tensor) -> None:
    """out = the numbers that these codes stand for: for the codes of x, y of `Grid`."""
    at = _place(grid, out_OCI.new_zeros(1, *scale_C.shape, 1), scale_C, shift_C)
    out_OCI.copy_((codes_OCI.to(at.scale_C1.dtype) + at.low_C1) * at.scale_C1 + at.offset_C1)
