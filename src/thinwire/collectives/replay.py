"""The launches of a program as one CUDA graph, which is replayed at every step.

[Note: Replayed] To start a graph costs the host less than one message of torch's, whatever is in it. A graph holds
addresses, so it is captured again where a tensor has moved. NCCL's messages in a graph have two peculiarities. NCCL
waits for ever to close a group that a graph uses, so graphs are dropped when torch closes the group. And torch's
watchdog does not see them: a thread of thinwire's ends the process, as that would, if the stream stands still for the
timeout of the group.
"""

import atexit
import functools
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives import transport
from thinwire.collectives.channel import Channel
from thinwire.collectives.rooms import Room, TurnRoom
from thinwire.kernels.later import Memo, Number
from thinwire.ranges import ranged

_LOOK_S = 1.0
_Launch = Callable[[Room, Number, Number], None]  # in a room, with the mixed step and the number of the call


@dataclass
class _Captured:
    """What was launched once in a room, and at the next step captured."""

    where: tuple[int, ...]  # the addresses of what it reads and writes
    memo: Memo
    graph: torch.cuda.CUDAGraph | None = None
    sent: int = 0  # bytes of messages in it
    received: int = 0


class Replay:
    """A program's graphs, one per room."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._captured: dict[int, _Captured] = {}
        _live.add(self)
        _close_before_groups()

    @ranged("thinwire::replay")
    def run(self, launch: _Launch, room: TurnRoom, tensors: list[Tensor], mixed: int, call: int) -> None:
        """Launch, or replay if these tensors were met before. The current stream is the room's."""
        found = self._captured.get(id(room))
        if found is None or found.where != _where(room, tensors):
            memo = Memo(room.device)
            launch(room, *memo.begin(mixed, call))
            self._captured[id(room)] = _Captured(_where(room, tensors), memo)
            return
        if found.graph is None:
            self._capture(launch, found, room)
        assert found.graph is not None
        found.memo.write(mixed, call)
        found.graph.replay()
        link = self._channel.transport
        link.sent += found.sent
        link.received += found.received

    def release(self, group: dist.ProcessGroup | None = None) -> None:
        """Drop the graphs, of this group or of any."""
        if group is None or self._channel.transport._group() is group:
            self._captured.clear()

    @property
    def has_graphs(self) -> bool:
        return any(found.graph is not None for found in list(self._captured.values()))

    def _capture(self, launch: _Launch, found: _Captured, room: TurnRoom) -> None:
        link = self._channel.transport
        before = link.sent, link.received
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")  # other threads go on with theirs
        try:
            launch(room, *found.memo.begin(0, 0, captured=True))
        finally:
            graph.capture_end()
        found.graph = graph
        found.sent, found.received = link.sent - before[0], link.received - before[1]
        link.sent, link.received = before
        watch.add(room, self._channel)


def _where(room: Room, tensors: list[Tensor]) -> tuple[int, ...]:
    return (room.buffer.data_ptr(), *[tensor.data_ptr() for tensor in tensors])


# --- the ends of groups -----------------------------------------------------------------------------------------------

_live: "weakref.WeakSet[Replay]" = weakref.WeakSet()


def _release(group: dist.ProcessGroup | None = None) -> None:
    for replay in list(_live):
        replay.release(group)


@functools.cache
def _close_before_groups() -> None:
    """Have graphs dropped before a group is closed, in whatever way torch is asked to do that."""
    closes: Any = dist.ProcessGroup.shutdown

    def shutdown(group: dist.ProcessGroup) -> None:
        _release(group)
        closes(group)

    dist.ProcessGroup.shutdown = shutdown  # type: ignore[method-assign, assignment]
    atexit.register(_release)


class Watch:
    """The thread of [Note: Replayed]: it runs while there are graphs."""

    def __init__(self) -> None:
        self._rooms: weakref.WeakKeyDictionary[TurnRoom, _Watched] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._over = threading.Event()

    def add(self, room: TurnRoom, channel: Channel) -> None:
        """Watch the stream of a room, in which graphs of a channel are replayed."""
        with self._lock:
            if room not in self._rooms:
                self._rooms[room] = _Watched(channel)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="thinwire-watch", daemon=True)
                self._thread.start()
                atexit.register(self._end, self._thread)

    def _run(self) -> None:
        while not self._over.wait(_LOOK_S):
            with self._lock:
                if not any(replay.has_graphs for replay in list(_live)):
                    self._rooms.clear()
                    self._thread = None
                    return
                rooms = list(self._rooms.items())
            for room, watched in rooms:
                watched.look(room, time.monotonic())
            del rooms

    def _end(self, thread: threading.Thread) -> None:
        """At the end of the process, which a thread must not outlive."""
        self._over.set()
        thread.join(2 * _LOOK_S)


class _Watched:
    """An event in the stream of a room, and since when it has not come up."""

    def __init__(self, channel: Channel) -> None:
        link = channel.transport
        self._lock = channel.lock
        self._rank = link.rank
        self._name = link.group.group_name
        self._timeout_s = transport.timeout_s(link.group)
        self._event: torch.cuda.Event | None = None
        self._since = 0.0

    def look(self, room: TurnRoom, now: float) -> None:
        """Put another event into the stream if the last has come up; end the process if it has not for too long."""
        if self._event is not None and not self._event.query():
            if now - self._since > self._timeout_s:
                self._end()
            return
        self._event = None
        if self._lock.acquire(blocking=False):  # nothing is being captured
            try:
                self._event = torch.cuda.Event()
                self._event.record(room.stream)
                self._since = now
            finally:
                self._lock.release()

    def _end(self) -> None:
        print(
            f"thinwire: rank {self._rank} waited in replayed averages of group {self._name!r} for the group's timeout "
            f"of {self._timeout_s:g} s: see whether the other ranks still run. This process ends",
            file=sys.stderr,
            flush=True,
        )
        os.kill(os.getpid(), signal.SIGABRT)  # as torch's watchdog does


watch = Watch()
