"""No thread of ours outlives its group or the interpreter, in whatever order a script ends. See tests/exits.py."""

import subprocess
import sys
from pathlib import Path

import pytest

from programs import Ended

EXITS = str(Path(__file__).parent / "exits.py")
OFTEN = ("verb", "ddp", "fsdp", "diloco")  # each is a race that a single job may win
ENDS = ("never_waited", "held", "unanswered")


@pytest.mark.program(EXITS, "fork", "1", *["verb"] * 3, *ENDS, "exits", *OFTEN[1:])
def test_forked_jobs_end(program: Ended) -> None:
    assert (program.status, program.out) == (0, "exits: rank 0 ended with status 7\n"), program.told
    assert "terminate called" not in program.err, program.told


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
