"""Every Triton kernel compiles with the Triton that is installed, for GPUs that need not be there."""

import importlib.util

import pytest

from programs import TESTS, Ended

COMPILED = str(TESTS / "compiled.py")
APART = {"OMP_NUM_THREADS": "1"}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize(
    (),
    [
        pytest.param(marks=pytest.mark.program(COMPILED, **APART), id="some"),
        pytest.param(marks=(pytest.mark.program(COMPILED, "everything", **APART), pytest.mark.thorough), id="all"),
    ],
)
def test_every_kernel_compiles(program: Ended) -> None:
    assert program.status == 0, program.told
    failed, compiled = (int(number) for number in program.out.split()[0:3:2])
    assert failed == 0
    assert compiled > 40
