"""Compiles kernels in background threads, several at once, and announces long waits for them.

[Note: Compiled ahead] A launch on meta tensors, which have no memory, computes nothing: it begins to compile its kernel
and returns. So launches on meta tensors tell which kernels are needed, and `compiled` waits for all of them. Only a
third of a compilation is Python, so threads compile several kernels two to three times as fast as a loop. Kernels in
Triton's cache take milliseconds.

[Note: Loaded without the lock] CUDA may delay the load of a kernel until all running kernels of the process end. An
NCCL kernel ends only when other ranks send, and these may be waiting for the lock. So no rank holds it while it loads.
"""

import os
import platform
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from thinwire.log import announce

PATIENCE_S = 1.0  # longer waits are announced
MOST_THREADS = 8
_LOCKS = 64  # files; kernels that share one are compiled one after the other
_announced = threading.Event()
_begun: list[Future[Any]] = []  # since `compiled` was last called


def begin(name: str, make: Callable[[], Any], load: Callable[[Any], object]) -> Future[Any]:
    """Compile a kernel and load it, in a thread. name: the same in all processes that compile the same kernel."""
    future = _pool().submit(_make, name, make, load)
    _begun.append(future)
    return future


def compiled() -> None:
    """Wait for the kernels that are being compiled, and raise what a compilation raised."""
    waiting = _begun.copy()
    _begun.clear()
    start = time.perf_counter()
    with announcing(f"compiling {len(waiting)} GPU kernels"):
        for future in waiting:
            future.result()
    seconds = time.perf_counter() - start
    if seconds > PATIENCE_S:
        say(f"compiled {len(waiting)} GPU kernels in {seconds:.0f} s")


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(2, min(MOST_THREADS, os.cpu_count() or 2)), "thinwire-compiler")


def _make(name: str, make: Callable[[], Any], load: Callable[[Any], object]) -> Any:
    with _alone(name):
        made = make()
    load(made)  # [Note: Loaded without the lock]
    return made


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """The ranks on a machine need the same kernels: one compiles each, and the others find it in Triton's cache."""
    from triton import knobs  # here, where it is imported already

    with ExitStack() as stack:
        with suppress(OSError, ImportError):  # the folder cannot be locked: each rank compiles
            import fcntl

            folder = Path(knobs.cache.dir)
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / f"thinwire-{platform.node()}-{zlib.crc32(name.encode()) % _LOCKS}.lock"
            lock = stack.enter_context(file.open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def announcing(what: str) -> Iterator[None]:
    """Announce `what`, and where its result is kept, if the body takes long; once per process."""
    if _announced.is_set():
        yield
        return
    timer = threading.Timer(PATIENCE_S, _announce_once, [what])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _announce_once(what: str) -> None:
    from triton import knobs  # here, where it is imported already

    _announced.set()
    say(f"{what}, some seconds each; kept for later runs in {knobs.cache.dir}")


def say(text: str) -> None:
    """Announce on the first rank of a machine."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        announce(text)
