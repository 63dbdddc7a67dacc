"""The Triton kernels give the reference's bytes on a CPU, too, where Triton's interpreter runs them."""

import importlib.util
from pathlib import Path

import pytest

from programs import Ended

HERE = Path(__file__).parent
APART = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
PROGRAMS = [
    pytest.param(marks=pytest.mark.program(HERE / f"{name}.py", **APART), id=name)
    for name in ("interpreted", "interpreted_fakes", "interpreted_rows")
]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize((), PROGRAMS)
def test_interpreted_kernels_give_the_references_bytes(program: Ended) -> None:
    assert program.status == 0, program.told
    assert program.out.startswith("0 of "), program.out
