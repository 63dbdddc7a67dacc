"""No thread of ours outlives its group or the interpreter, in whatever order a script ends. See tests/exits.py."""

import subprocess
import sys
from pathlib import Path

import pytest

from programs import Ended

EXITS = str(Path(__file__).parent / "exits.py")
OFTEN = ("verb", "ddp", "fsdp", "diloco")  # each is a race that a single job may win
ENDS = ("never_waited", "held", "unanswered")


def check(program: Ended, out: str = "") -> None:
    assert program.status == 0, program.told
    assert program.out == out, program.told
    assert "terminate called" not in program.err, program.told


@pytest.mark.program(EXITS, "fork", "1", *["verb"] * 12, *ENDS * 3, "exits", *OFTEN[1:])  # who trains imports long
def test_forked_jobs_end(program: Ended) -> None:
    check(program, "exits: rank 0 ended with status 7\n")


@pytest.mark.program(
    "-m", "torch.distributed.run", "--nproc-per-node", "2", EXITS, "torchrun", "1", "verb", OMP_NUM_THREADS="1"
)
def test_torchrun_ends(program: Ended) -> None:
    check(program)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [*OFTEN, *ENDS])
@pytest.mark.parametrize("start", ["spawn", "torchrun"])
def test_started_jobs_end_twenty_times(start: str, kind: str) -> None:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d")
    before, times = (torchrun, 20) if start == "torchrun" else ((), 1)
    for _ in range(times):
        command = [sys.executable, *before, EXITS, start, "1" if start == "torchrun" else "20", kind]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr[-3000:]
