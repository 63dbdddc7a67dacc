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


TOLD = ("int8", "<- chosen", "4.06 bits", "SQNR")  # by the first script of DDP, the verbs, the codecs, qat


def test_every_block_is_run() -> None:
    assert len(BLOCKS) == len(TOLD)


@pytest.mark.parametrize(
    "told",
    [
        pytest.param(
            told,
            marks=pytest.mark.program("-c", f"import test_readme; test_readme.play({index})", OMP_NUM_THREADS="1"),
        )
        for index, told in enumerate(TOLD)
    ],
)
def test_a_block_runs_as_it_is_printed(program: Ended, told: str) -> None:
    assert program.status == 0, program.told
    assert told in program.out, program.told
    assert "Warning" not in program.err, program.told
