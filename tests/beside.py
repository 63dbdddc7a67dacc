"""pytest --beside: some tests run in a second process, at a low priority.

The test process waits for ranks half of the time. So it forks when the tests are collected, before it starts a thread:
the child runs the tests that need no ranks, and those of MODULES; the parent repeats their reports as if they had run
there.
"""

import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from programs import WAIT_S, kill

# Their ranks import, compile or train for long, and none of their tests has a deadline.
MODULES = (
    *("test_accelerate", "test_compile", "test_examples", "test_group_clients", "test_lightning", "test_readme"),
    *("test_rehearse", "test_trainer"),
)


def is_possible() -> bool:
    """A process that has looked for a GPU cannot be forked, nor one of macOS that has loaded its frameworks."""
    return sys.platform == "linux" and not torch.cuda.is_available()


def is_beside(item: pytest.Item) -> bool:
    """Whether a test runs in the child."""
    needs = {*getattr(item, "fixturenames", ()), *(mark.name for mark in item.iter_markers())}
    return not needs & {"program", "cuda"} and ("ranks" not in needs or item.path.stem in MODULES)


class Beside:
    """The tests that a session leaves to a child, and their reports."""

    def __init__(self, session: pytest.Session) -> None:
        self._config = session.config
        self.items = [item for item in session.items if is_beside(item)]
        session.items[:] = [item for item in session.items if not is_beside(item)]
        self._folder = tempfile.TemporaryDirectory(prefix="thinwire-beside-")
        self._file, self._log = (Path(self._folder.name) / name for name in ("reports.jsonl", "log"))
        self._pid = 0

    def __len__(self) -> int:
        return len(self.items)

    def start(self) -> bool:
        """Fork; whether this is the child."""
        capture: Any = self._config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()  # or both processes would write to one file
        with warnings.catch_warnings(action="ignore"):  # of threads: numpy has one, at rest
            self._pid = os.fork()
        os.setpgid(self._pid, 0)  # of the child, by whoever comes first
        if self._pid == 0:
            os.nice(5)  # programs have 10
            log = os.open(self._log, os.O_WRONLY | os.O_CREAT)
            for stream in (1, 2):
                os.dup2(log, stream)
        capture.start_global_capturing()
        return self._pid == 0

    def run(self, last: Callable[[], None]) -> None:
        """In the child: run the tests, write their reports, do what is last, and exit."""
        try:
            with self._file.open("w") as self._out:
                self._config.pluginmanager.register(self)
                for item, following in zip(self.items, [*self.items[1:], None], strict=True):
                    self._config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            last()
        finally:
            os._exit(0)  # a report that is missing shows a failure

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """In the child."""
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        print(json.dumps(data), file=self._out)

    def reports(self) -> Iterator[pytest.TestReport]:
        """Wait for the child; its reports."""
        deadline = time.monotonic() + WAIT_S
        while os.waitpid(self._pid, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.02)
        kill(self._pid)
        hook = self._config.hook
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        reports = [hook.pytest_report_from_serializable(config=self._config, data=json.loads(line)) for line in lines]
        missing = {item.nodeid for item in self.items} - {report.nodeid for report in reports}
        if missing:
            log = self._log.read_text()[-6000:]
            raise RuntimeError(f"{len(missing)} tests beside did not run, such as {min(missing)}: {log}")
        yield from reports

    def close(self) -> None:
        """Kill the child, if it still runs."""
        if self._pid:
            kill(self._pid)
        self._folder.cleanup()
