"""The Triton kernels give the reference's bytes on a CPU, too, where Triton's interpreter runs them."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("interpreted.py")


@pytest.mark.timeout(200)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_interpreted_kernels_give_the_references_bytes() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    halves = [
        subprocess.Popen([sys.executable, SCRIPT, half], env=environment, text=True, **pipes)
        for half in ("even", "odd")
    ]
    for half in halves:
        out, err = half.communicate(timeout=190)
        assert half.returncode == 0, f"{out[-6000:]}\n{err[-3000:]}"
        assert out.startswith("0 of "), out
