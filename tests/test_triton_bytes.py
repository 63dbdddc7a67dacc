"""What the Triton kernels rest on, for all numbers: the interpreter tries some."""

import importlib.util

import numpy as np
import pytest

import ptx
from thinwire.kernels.schema import LLOYD

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

from thinwire.kernels.triton import lloyd, numbers, sums


def test_the_parabola_gives_every_cell_its_rank() -> None:
    cells = np.array([*range(6000), 1 << 20], np.float32)
    rounder, start, slope, bend = (
        np.full_like(cells, c.value) for c in (lloyd.ROUNDER, lloyd.RANK_START, lloyd.RANK_SLOPE, lloyd.RANK_BEND)
    )
    near = ptx.run(lloyd.SATURATE.value, (rounder + cells, -(rounder + start) / 128))[0].view(np.float32)
    ranks = ptx.fused(ptx.fused(near, bend, slope), near, rounder) - rounder
    assert (ranks == sum(cells >= edge for edge in LLOYD[4].edges)).all()


def test_sums_of_usual_scales_lose_no_bits_where_they_are_small() -> None:
    least, most = np.array([sums.USUAL_BITS.value, numbers.HUGE_BITS.value], np.int32).view(np.float32).astype(float)
    assert sums.UP.value == sums.DOWN.value * 2**133
    assert least / 128 * sums.DOWN.value >= 2**-149  # the last bit of a product
    assert most * sums.UP.value < np.finfo(np.float32).max
