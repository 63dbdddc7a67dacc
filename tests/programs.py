"""Programs that tests wait for: started with the session, beside the other tests, at a low priority.

    @pytest.mark.program("-m", "thinwire", "bench", "codec", "--json", "found.json", OMP_NUM_THREADS="1")
    def test_the_bench(program: Ended) -> None:                    # Python's arguments, and the environment's
        assert program.status == 0, program.told
        record.read(program.folder / "found.json")                 # where it ran

Most tests keep one core busy; these programs have the others. Tests that wait for one come last (tests/conftest.py).
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

AT_ONCE = 2
WAIT_S = 900.0  # of a test; until one waits for it, a program may take as long as it likes
LEAVE_S = 30.0  # for what a program started to end after it
TESTS = Path(__file__).parent


@dataclass(frozen=True)
class Ended:
    """The results of a program that has ended."""

    status: int
    out: str
    err: str
    folder: Path  # in which it ran
    alone: bool  # whether every process it started has ended, too

    @property
    def told(self) -> str:
        """The status and the end of the output."""
        return f"status {self.status}\n{self.out[-6000:]}\n{self.err[-4000:]}"


class Programs:
    """The programs of all tests of a session that have one."""

    def __init__(self, items: Iterable[pytest.Item]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="thinwire-programs-")
        self._pool, self._groups = ThreadPoolExecutor(AT_ONCE), dict[str, int]()
        self._environment = dict(os.environ)  # as it is before any test changes it
        marks = {item.nodeid: item.get_closest_marker("program") for item in items}
        self._ended: dict[str, Future[Ended]] = {
            name: self._pool.submit(self._run, name, mark.args, mark.kwargs)
            for name, mark in reversed(marks.items())  # Triton's take longest, and come last
            if mark
        }

    def ended(self, name: str) -> Ended:
        """Wait for the program of a test, and kill it after WAIT_S."""
        with suppress(TimeoutError):
            return self._ended[name].result(WAIT_S)
        if group := self._groups.get(name):
            kill(group)
        return self._ended[name].result()

    def close(self) -> None:
        """Kill the programs that still run."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for group in list(self._groups.values()):
            kill(group)
        self._pool.shutdown()
        self._folder.cleanup()

    def _run(self, name: str, arguments: tuple[str, ...], environment: Mapping[str, str]) -> Ended:
        folder = Path(tempfile.mkdtemp(dir=self._folder.name))
        path = filter(None, (str(TESTS), self._environment.get("PYTHONPATH")))
        process = subprocess.Popen(
            ["nice", "-n", "10", sys.executable, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**self._environment, "PYTHONPATH": os.pathsep.join(path), **environment},
            process_group=0,  # that of all it starts; in a session of its own its priority would count in there only
        )
        self._groups[name] = process.pid
        out, err = process.communicate()
        alone = _is_gone(process.pid)
        kill(process.pid)
        del self._groups[name]
        return Ended(process.returncode, out, err, folder, alone)


def _is_gone(group: int) -> bool:
    deadline = time.monotonic() + LEAVE_S
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


def kill(group: int) -> None:
    """End a process group, if it is still there."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
