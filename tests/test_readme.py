"""The README's Python runs as it is printed, each block a script of two ranks."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from programs import Ended

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


def play(index: int) -> None:
    """Run a block under torchrun, in the working directory."""
    Path("block.py").write_text(BLOCKS[index])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "block.py"]
    sys.exit(subprocess.run(command).returncode)


def test_every_block_is_run() -> None:
    assert len(BLOCKS) == 4


def _check(program: Ended, told: str) -> None:
    assert program.status == 0, program.told
    assert told in program.out, program.told
    assert "Warning" not in program.err, program.told


@pytest.mark.program("-c", "import test_readme; test_readme.play(0)", OMP_NUM_THREADS="1")
def test_the_first_snippet_trains(program: Ended) -> None:
    _check(program, "int8")


@pytest.mark.program("-c", "import test_readme; test_readme.play(1)", OMP_NUM_THREADS="1")
def test_every_verb(program: Ended) -> None:
    _check(program, "<- chosen")


@pytest.mark.program("-c", "import test_readme; test_readme.play(2)", OMP_NUM_THREADS="1")
def test_codecs_alone(program: Ended) -> None:
    _check(program, "4.06 bits")


@pytest.mark.program("-c", "import test_readme; test_readme.play(3)", OMP_NUM_THREADS="1")
def test_quantization_aware_training(program: Ended) -> None:
    _check(program, "SQNR")
