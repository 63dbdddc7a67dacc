"""Fixtures every test can use."""

import gc
import multiprocessing
from collections.abc import Generator, Iterator
from multiprocessing import forkserver

import pytest
import torch

import beside
from programs import Ended, Programs
from ranks import RankPool
from thinwire.kernels import BACKENDS, use_backend

PROGRAM_TEST_S = 1200  # programs have a limit of their own, below that
BENCHMARKS = (
    "thinwire.tools.bench.collectives",
    "thinwire.tools.cli.demo",
    "torch._dynamo",
    "thinwire.integrations.fsdp",
)
PROGRAMS = pytest.StashKey[Programs]()
RANKS = pytest.StashKey[RankPool]()
BESIDE = pytest.StashKey[beside.Beside]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """--thorough, for every combination of what the tests try by turns (cases.by_turns)."""
    parser.addoption("--thorough", action="store_true", help="run every combination, not each value once")
    parser.addoption("--beside", action="store_true", help="run some tests in a second process, see tests/beside.py")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark of what runs with --thorough only, and take one thread: tests of threads ask for theirs."""
    config.addinivalue_line("markers", "thorough: runs with --thorough only")
    torch.set_num_threads(1)  # others would wait for their turn in every call: ranks and programs have the cores


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of ranks come when these can be forked; tests of programs come last, and may take longer where watched."""
    if not config.option.thorough:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("thorough")])
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]
    items.sort(key=_turn)
    if config.pluginmanager.hasplugin("timeout"):
        for item in items:
            if item.get_closest_marker("program"):
                item.add_marker(pytest.mark.timeout(PROGRAM_TEST_S))


def _turn(item: pytest.Item) -> tuple[bool, bool]:
    return item.get_closest_marker("program") is not None, "ranks" in getattr(item, "fixturenames", ())


def pytest_itemcollected(item: pytest.Item) -> None:
    """Start the processes that fork ranks with the first test that needs some: they import while others are found."""
    stash, needs_ranks = item.config.stash, "ranks" in getattr(item, "fixturenames", ())
    if needs_ranks and RANKS not in stash and not item.config.option.collectonly:
        stash[RANKS] = RankPool()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the tests beside, the programs, and the processes that fork ranks."""
    if session.config.option.collectonly:
        return
    stash = session.config.stash
    if RANKS in stash:
        modules = dict.fromkeys(item.module for item in session.items if isinstance(item, pytest.Function))
        stash[RANKS].imports(dict.fromkeys(name for module in modules for name in getattr(module, "RANKS_IMPORT", ())))
    gc.freeze()  # what was imported stays: collections need not look at it
    if session.config.option.beside and beside.is_possible() and (left := beside.Beside(session)):
        stash[BESIDE] = left
        if left.start():
            _start_forkserver(left.items)
            left.run(stash[RANKS].end if RANKS in stash else lambda: None)
    stash[PROGRAMS] = Programs(session.items)
    _start_forkserver(session.items)


def _start_forkserver(items: list[pytest.Item]) -> None:
    """For tests whose benchmarks start ranks of their own."""
    if any("forked" in getattr(item, "fixturenames", ()) for item in items):
        multiprocessing.get_context("forkserver").set_forkserver_preload(["pytest", *BENCHMARKS])
        forkserver.ensure_running()


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Repeat the reports of the tests beside after the tests here."""
    left = session.config.stash.get(BESIDE, None)
    session.testscollected += len(left or ())
    result = yield
    for report in left.reports() if left else ():
        session.config.hook.pytest_runtest_logreport(report=report)
    return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Stop the ranks, the programs and the tests beside that still run."""
    for key in (PROGRAMS, BESIDE, RANKS):
        if key in session.config.stash:
            session.config.stash[key].close()
    gc.unfreeze()  # or Triton reports its own functions as leaked when the interpreter ends


@pytest.fixture
def program(request: pytest.FixtureRequest) -> Ended:
    """The test's program, ended; see tests/programs.py."""
    return request.config.stash[PROGRAMS].ended(request.node.nodeid)


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> RankPool:
    """ranks(world).run(fn, *args) -> [fn(group, *args) on each rank]; see tests/ranks.py."""
    return request.config.stash[RANKS]


@pytest.fixture
def restored_threads() -> Iterator[None]:
    """For a test that sets the number of threads."""
    yield
    torch.set_num_threads(1)


@pytest.fixture
def served() -> Iterator[None]:
    """Ask for the reference where the C kernels were not built: standing in for them warns."""
    with use_backend("auto" if BACKENDS["cpu"].unavailable() is None else "reference"):
        yield


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the ranks that a benchmark starts from a process that has imported what they need."""
    context = multiprocessing.get_context("forkserver")
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)
