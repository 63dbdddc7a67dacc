"""The Triton kernels of fake quantization under Triton's interpreter, against the reference: a script of its own.

`TRITON_INTERPRET=1 python tests/interpreted_fakes.py [everything]`, as tests/interpreted.py for the codecs. Prints a
line for every case that differs, and ends with their number.
"""

import itertools
import sys
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

import cases
import interpreted
from thinwire.kernels import FakeGradients, Grid, reference, triton

SHAPES = [  # (outer, channels, inner): tiles by row and by column, whole and cut, one row and several, groups
    *((1, 1, 1), (1, 1, 4096), (1, 1, 5000), (2, 2, 5000)),
    *((1, 7, 33), (5, 3, 49), (1, 300, 128), (1, 40, 4)),
    *((9, 6, 1), (200, 5, 1), (70, 3, 2), (3, 130, 3)),
]
SPECIAL = (
    *(torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e4, -1e4),
    *(0.0625, 0.1875, -0.9375, -1.0, -1.0625, 0.875, 0.9375),  # on the grid's edges and halfway between its points
)
BAD_SCALES = (-1.0, 0.0, torch.inf, torch.nan, 1e-40)
GRIDS = [Grid(-8, 7), Grid(-8, 7, paper=True), Grid(0, 15, offset=True), Grid(0, 255, offset=True, paper=True)]


def made(shape: tuple[int, int, int], dtype: torch.dtype, grid: Grid) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, a gradient, scales and shifts, with special numbers in all."""
    generator = torch.Generator().manual_seed(sum(shape))
    x, g = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    x.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL)[: x.numel()]
    channels = shape[1]
    scale = torch.rand(channels, generator=generator) * 0.3 + 0.05
    scale[0] = 0.125
    shift = torch.randn(channels, generator=generator) * (0.3 if grid.offset else 8)
    if channels > len(BAD_SCALES) + 2:
        scale[1 : 1 + len(BAD_SCALES)] = torch.tensor(BAD_SCALES)
        shift[-1] = torch.nan
    return x, g, scale, shift


def differences(shape: tuple[int, int, int], dtype: torch.dtype, grid: Grid, shifted: bool) -> Iterator[str]:
    """What the kernels do unlike the reference. Sums of fp32 numbers may differ by their order."""
    x, g, scale, shift = made(shape, dtype, grid)
    parameters = (scale, shift if shifted else None)
    ys = [torch.empty_like(x) for _ in range(2)]
    dxs = [torch.empty_like(x) for _ in range(2)]
    sums = [torch.zeros(2, shape[1]) for _ in range(2)]
    for backend, y, dx, ds in zip((reference, triton), ys, dxs, sums, strict=True):
        backend.fake_quantize(grid, x, *parameters, y)
        backend.fake_quantize_grad(grid, FakeGradients(x, g, *parameters, dx, ds), 0.37)
    for what, (want, got) in {"y": ys, "dx": dxs}.items():
        try:
            cases.assert_same(got, want, what)
        except AssertionError as error:
            yield f"{what}: {error}"
    bound = x.numel() // shape[1] * 2.0**-23 * 256 * g.abs().float().nan_to_num().max()
    rows = slice(None) if shifted else slice(1)
    if not torch.allclose(sums[1][rows], sums[0][rows], rtol=0, atol=float(bound), equal_nan=True):
        yield f"sums: {(sums[1] - sums[0]).abs().max()} above {bound}"


def main() -> int:
    """Run all cases."""
    interpreted.mend()
    np.seterr(all="ignore")
    torch.set_num_threads(1)
    bad = run = 0
    dtypes = itertools.cycle((torch.float32, torch.bfloat16, torch.float32, torch.float16, torch.float32))
    for (i, shape), (j, grid) in itertools.product(enumerate(SHAPES), enumerate(GRIDS)):
        shifted = (i + j) % 2 == 0
        dtype = next(dtypes)  # 5 and the number of grids have no common divisor: every grid meets every dtype
        if (i + j // 2) % 2 and not interpreted.everything():
            continue
        run += 1
        for difference in differences(shape, dtype, grid, shifted):
            bad += 1
            print(f"{shape} {dtype} {grid} {shifted=}: {difference}", flush=True)
    print(f"{bad} of {run} differ")
    return bad


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
