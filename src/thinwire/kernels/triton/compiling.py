"""Kernels compiled before they are launched, several at once; and a word to whoever waits for a compiler.

[Note: Compiled ahead] Inside `compiling()` a launch notes its kernel and does nothing else, so that the calls
themselves say which kernels they need. A third of a compilation is Python and the rest is not, so that threads make
several kernels two to three times as fast as one after the other. Kernels in Triton's cache take milliseconds.
"""

import os
import platform
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.kernels.triton import INTERPRETED
from thinwire.log import announce

PATIENCE_S = 1.0  # what takes longer is announced
MOST_THREADS = 8
_told = threading.Event()


@dataclass(frozen=True)
class Noted:
    """A kernel to compile."""

    name: str
    compile: Callable[[], Any]


noted: ContextVar[dict[Hashable, Noted] | None] = ContextVar("noted", default=None)  # None where launches launch


def is_ahead() -> bool:
    """Whether launches only note their kernels, so that nothing is there to be sent or read."""
    return noted.get() is not None


@contextmanager
def compiling(follow: Callable[[Sequence[Any]], Iterable[Any]] = iter) -> Iterator[None]:
    """Launches inside do nothing; when it ends, their kernels are compiled. [Note: Compiled ahead]

    follow: hands on what is to be waited for, each with the name of its kernel as `str`, and may show how far it is.
    The interpreter has nothing to compile: there, and on the CPU, calls do their work.
    """
    kernels: dict[Hashable, Noted] = {}
    token = noted.set(None if INTERPRETED else kernels)
    try:
        yield
    finally:
        noted.reset(token)
    if not kernels:
        return
    start = time.perf_counter()
    with telling(f"compiling {len(kernels)} GPU kernels"), _alone(), ThreadPoolExecutor(_threads()) as pool:
        waits = [_Wait(kernel.name, pool.submit(kernel.compile)) for kernel in kernels.values()]
        try:
            for wait in follow(waits):
                wait.done.result()
        finally:
            pool.shutdown(cancel_futures=True)
    seconds = time.perf_counter() - start
    if seconds > PATIENCE_S:
        tell(f"compiled {len(kernels)} GPU kernels in {seconds:.0f} s")


@dataclass(frozen=True)
class _Wait:
    name: str
    done: Future[Any]

    def __str__(self) -> str:
        return self.name


def _threads() -> int:
    return max(2, min(MOST_THREADS, os.cpu_count() or 2))


@contextmanager
def _alone() -> Iterator[None]:
    """Ranks of a machine need the same kernels: one at a time compiles, and the next find them in Triton's cache."""
    from triton import knobs  # here, where it is imported already

    with ExitStack() as stack:
        with suppress(OSError, ImportError):  # a folder that cannot be locked: each compiles for itself
            import fcntl

            folder = Path(knobs.cache.dir)
            folder.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((folder / f"thinwire-{platform.node()}.lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def telling(what: str) -> Iterator[None]:
    """Announce `what`, and where its result is kept, if what is done inside takes long; once per process."""
    if _told.is_set():
        yield
        return
    timer = threading.Timer(PATIENCE_S, _tell_once, [what])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _tell_once(what: str) -> None:
    from triton import knobs  # here, where it is imported already

    _told.set()
    tell(f"{what}, some seconds each; kept for later runs in {knobs.cache.dir}")


def tell(text: str) -> None:
    """Announce on the first rank of a machine."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        announce(text)
