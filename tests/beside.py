"""pytest --beside: tests that need no ranks run in a second process, at a low priority, as a program does.

The test process keeps one core busy, and waits for ranks half of the time. So the other tests are left to another
pytest (--reports-to), which writes what it found; that is told as if they had run here.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from programs import Programs

NAME = "beside"
FOUND = "reports.jsonl"


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--beside", action="store_true", help="run some tests in a second process, see tests/beside.py")
    parser.addoption("--reports-to", metavar="FILE", help="only those tests; their reports go to FILE")


def is_alone(item: pytest.Item) -> bool:
    """Whether a test is one of those; what needs a GPU is not."""
    needs = {*getattr(item, "fixturenames", ()), *(mark.name for mark in item.iter_markers())}
    return not needs & {"ranks", "program", "cuda"}


class Reporter:
    """In the second process: writes reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._out = config, Path(config.option.reports_to).open("w")  # noqa: SIM115
        os.chdir(config.rootpath)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        print(json.dumps(data), file=self._out)

    def pytest_sessionfinish(self) -> None:
        self._out.close()


class Beside:
    """In the first: leaves tests out, and tells what became of them."""

    def __init__(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        self._config = config
        self._left = [item for item in items if is_alone(item)]
        items[:] = [item for item in items if not is_alone(item)]

    def __len__(self) -> int:
        return len(self._left)

    def command(self) -> tuple[str, ...]:
        """Of the second process, as arguments of Python."""
        root = self._config.rootpath
        flags = ["--thorough"] if self._config.option.thorough else []
        paths = dict.fromkeys(str(item.path) for item in self._left)
        where = ("-c", str(root / "pyproject.toml"), "--rootdir", str(root), "-p", "no:cacheprovider")
        return "-m", "pytest", *where, "--reports-to", FOUND, *flags, *paths

    def tell(self, programs: Programs) -> Iterator[pytest.TestReport]:
        """Every report, once all have come."""
        ended = programs.ended(NAME)
        hook = self._config.hook
        found = ended.folder / FOUND
        lines = found.read_text().splitlines() if found.exists() else []
        reports = [hook.pytest_report_from_serializable(config=self._config, data=json.loads(line)) for line in lines]
        missing = {item.nodeid for item in self._left} - {report.nodeid for report in reports}
        if missing:
            raise RuntimeError(f"{len(missing)} tests beside did not run, such as {min(missing)}: {ended.told}")
        yield from reports
