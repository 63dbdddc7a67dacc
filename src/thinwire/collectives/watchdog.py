"""Whether messages that torch does not know of come to their end.

[Note: Watchdog] torch's watchdog sees what torch sends, but not what NCCL is given directly. So an event follows such
messages, one for all of a tape, and a thread of thinwire's ends the process, as the watchdog would, if one does not
come up within the timeout of the group, or soon after NCCL has lost a connection. The lookout cannot do that: it asks
the store, which may be on the host that has stopped. Where it can, it is given time to say what happened.
"""

import atexit
import contextlib
import ctypes
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable

import torch

from thinwire.collectives.rooms import current_stream

_LOOK_S = 1.0
_GRACE_S = 15.0  # after NCCL reports an error; the lookouts of all ranks look more often
_RELAXED = 2  # CUDA's CU_STREAM_CAPTURE_MODE_RELAXED


class Watchdog:
    """The messages of one group."""

    def __init__(
        self,
        name: str,
        rank: int,
        timeout_s: Callable[[], float],
        device: torch.device,
        error: Callable[[], int],
    ) -> None:
        self._name = name
        self._rank = rank
        self._device = device
        self._timeout_s = timeout_s  # asked anew, for it may be changed
        self._error = error  # what NCCL says while a message is under way
        self._broken: float | None = None  # since when it says something
        self._last = torch.cuda.Event()  # recorded anew with every message, until the thread takes it
        self._taken: tuple[torch.cuda.Event, float] | None = None  # by the thread, and since when it looks at it
        self._known = False  # to the thread

    def note(self) -> None:
        """The current stream was given messages."""
        if torch.cuda.is_current_stream_capturing():
            return
        self._last.record(current_stream(self._device.index))
        if not self._known:
            self._known = True
            _watch(self)

    def look(self, now: float) -> None:
        """End the process if a message is late. In the thread."""
        if self._taken is None or self._taken[0].query():
            self._taken = self._broken = None
            if not self._last.query():
                self._taken = self._last, now
                self._last = torch.cuda.Event()
            return
        began = self._taken[1]
        code = self._error()
        self._broken = (now if self._broken is None else self._broken) if code else None
        if self._broken is not None and now - self._broken > _GRACE_S:
            self._end(f"lost a rank: NCCL reports error {code}")
        elif now - began > (limit := self._timeout_s()):
            self._end(f"waited for the group's timeout of {limit:g} s")

    def _end(self, what: str) -> None:
        try:
            print(
                f"thinwire: rank {self._rank}, in messages of group {self._name!r}, {what}: see whether the other "
                "ranks still run. This process ends",
                file=sys.stderr,
                flush=True,
            )
        finally:  # where nobody reads it any more
            os.abort()  # as torch's watchdog does


# --- all groups of the process ----------------------------------------------------------------------------------------

_live: "weakref.WeakSet[Watchdog]" = weakref.WeakSet()
_lock = threading.Lock()  # of the set, and of the thread
_over = threading.Event()
_thread: threading.Thread | None = None


def _watch(added: Watchdog) -> None:
    global _thread
    with _lock:
        _live.add(added)
        if _thread is None:
            _thread = threading.Thread(target=_run, name="thinwire-watchdog", daemon=True)
            _thread.start()


def _run() -> None:
    """Look at all groups, as long as there are any."""
    global _thread
    with contextlib.suppress(OSError, AttributeError):
        # Or a question about an event would spoil a graph that somebody captures meanwhile.
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))
    while not _over.wait(_LOOK_S):
        with _lock:
            if not _live:
                _thread = None
                return
        look_at_all()


def look_at_all() -> None:
    """Afterwards nobody holds them."""
    with _lock:
        found = list(_live)
    for watchdog in found:
        with contextlib.suppress(RuntimeError):  # of CUDA, which every other thread is told as well
            watchdog.look(time.monotonic())


@atexit.register
def _end() -> None:
    """A thread must not outlive the interpreter."""
    _over.set()
    if _thread is not None:
        _thread.join(2 * _LOOK_S)


def _after_in_child() -> None:
    """A child has no thread, nor its parent's groups."""
    global _lock, _thread
    _live.clear()
    _lock = threading.Lock()
    _thread = None


os.register_at_fork(
    before=lambda: _lock.acquire(), after_in_parent=lambda: _lock.release(), after_in_child=_after_in_child
)
