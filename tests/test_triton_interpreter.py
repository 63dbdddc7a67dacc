"""The Triton kernels give the reference's bytes on a CPU, too, where Triton's interpreter runs them."""

import importlib.util

import pytest

from programs import Ended

ALL = ("interpreted", "interpreted_fakes", "interpreted_rows")  # by one program: importing takes as long as one of them
CALLS = "; ".join(f"import {name}; bad += {name}.main()" for name in ALL)
CODE = f"bad = 0; {CALLS}; raise SystemExit(bad > 0)"
APART = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize(
    (),
    [
        pytest.param(marks=pytest.mark.program("-c", CODE, **APART), id="some"),
        pytest.param(marks=(pytest.mark.program("-c", CODE, "everything", **APART), pytest.mark.thorough), id="all"),
    ],
)
def test_interpreted_kernels_give_the_references_bytes(program: Ended) -> None:
    assert program.status == 0, program.told
    assert [line.split()[:2] for line in program.out.splitlines()] == [["0", "of"]] * len(ALL), program.out
