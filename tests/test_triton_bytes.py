"""What the Triton kernels rest on, for all numbers: the interpreter tries some."""

import importlib.util

import numpy as np
import pytest

import ptx
from thinwire.kernels.schema import LLOYD

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

from thinwire.kernels.triton import exact_sums, lloyd


def test_the_parabola_gives_every_cell_its_rank() -> None:
    cells = np.array([*range(6000), 1 << 20], np.float32)
    rounder, start, slope, bend = (
        np.full_like(cells, c.value) for c in (lloyd.ROUNDER, lloyd.RANK_START, lloyd.RANK_SLOPE, lloyd.RANK_BEND)
    )
    near = ptx.run(lloyd.SATURATE.value, (rounder + cells, -(rounder + start) / 128))[0].view(np.float32)
    ranks = ptx.fused(ptx.fused(near, bend, slope), near, rounder) - rounder
    assert (ranks == sum(cells >= edge for edge in LLOYD[4].edges)).all()


@pytest.mark.parametrize("reach", [1, 2, 8, 20, 104])
@pytest.mark.parametrize("world", range(2, 9))
def test_sums_of_scales_so_far_apart_are_exact(reach: int, world: int) -> None:
    largest = 255 << exact_sums.furthest(reach, world)  # in units
    assert largest < 1 << 15
    assert reach * world * largest < 1 << 24
    if reach <= 20:
        assert world * largest * max(reach, 8) < 1 << 22  # 8: a code of 1 bit, or twice 2 of 2 bits, at its last place
