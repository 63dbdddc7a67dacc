"""The Triton kernels give the reference's bytes on a CPU, too, where Triton's interpreter runs them."""

import importlib.util
from pathlib import Path

import pytest

from programs import Ended

SCRIPT = Path(__file__).with_name("interpreted.py")
HALVES = [
    pytest.param(marks=pytest.mark.program(SCRIPT, half, TRITON_INTERPRET="1", OMP_NUM_THREADS="1"), id=half)
    for half in ("even", "odd")
]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize((), HALVES)
def test_interpreted_kernels_give_the_references_bytes(program: Ended) -> None:
    assert program.status == 0, program.told
    assert program.out.startswith("0 of "), program.out
