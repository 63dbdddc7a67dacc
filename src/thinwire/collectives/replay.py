"""The launches of a program as one CUDA graph, which is replayed at every step.

[Note: Replayed] To start a graph costs the host less than one message of torch's, whatever is in it. NCCL asks that all
ranks capture and replay alike. So what a rank does next must not depend on its addresses: the first meeting with a
bucket in a room is launched, the second captured, and every later one replayed. A graph holds the memory that it reads
and writes; a bucket that lies elsewhere by then, as of a rank that has joined early, is copied there and back.
NCCL waits for ever to close a group that a graph uses, so graphs are dropped before. torch's watchdog does not see the
messages of a graph; [Note: Watchdog] in watchdog.py.
"""

import atexit
import contextlib
import functools
import os
import threading
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
from thinwire.errors import CollectiveError
from thinwire.kernels.later import Memo, Number
from thinwire.ranges import ranged

_Launch = Callable[[Tensor, Room, Number, Number], None]  # the last two: the mixed step, and the number of the call


@dataclass
class _Captured:
    """What was launched once in a room, and is captured at the next meeting."""

    memo: Memo
    graph: torch.cuda.CUDAGraph | None = None
    held: tuple[Tensor, ...] = ()  # the bucket and the scratch that the graph reads and writes
    sent: int = 0  # bytes of messages in it
    received: int = 0


class Replay:
    """A program's graphs, one per room."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._captured: dict[int, _Captured] = {}
        _drop_before_groups_end()
        with _lock:
            _live.add(self)

    @ranged("thinwire::replay")
    def run(self, launch: _Launch, room: TurnRoom, buffer: Tensor, mixed: int, call: int) -> None:
        """Launch, or replay on the numbers of a bucket what was captured. The current stream is the room's."""
        found = self._captured.get(id(room))
        if found is None:
            found = self._captured[id(room)] = _Captured(Memo(room.device))
            launch(buffer, room, *found.memo.begin(mixed, call))
            return
        if found.graph is None:
            self._capture(launch, found, room, buffer)
        assert found.graph is not None
        bucket = found.held[0]
        moved = bucket.data_ptr() != buffer.data_ptr()
        if moved:
            bucket.copy_(buffer)
        found.memo.write(mixed, call)
        found.graph.replay()
        if moved:
            buffer.copy_(bucket)
        link = self._channel.transport
        link.note()
        link.sent += found.sent
        link.received += found.received

    def release(self, group: dist.ProcessGroup | None = None) -> None:
        """Drop the graphs, of this group or of any."""
        if group is None or self._channel.transport._group() is group:
            self._captured.clear()

    @property
    def has_graphs(self) -> bool:
        return any(found.graph is not None for found in self._captured.values())

    def _capture(self, launch: _Launch, found: _Captured, room: TurnRoom, buffer: Tensor) -> None:
        link = self._channel.transport
        before = link.sent, link.received
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")  # other threads go on with theirs
        try:
            launch(buffer, room, *found.memo.begin(0, 0, captured=True))
        except BaseException:
            with contextlib.suppress(RuntimeError):  # what happened before matters
                graph.capture_end()
            raise
        graph.capture_end()
        found.graph = graph
        found.held = (buffer, room.buffer)
        found.sent, found.received = link.sent - before[0], link.received - before[1]
        link.sent, link.received = before


# --- what can be replayed ---------------------------------------------------------------------------------------------


def check_replay(replay: object) -> None:
    """Raise where replay= is neither True nor False, or torch or NCCL are set to what does not go with CUDA graphs."""
    if not isinstance(replay, bool):
        raise CollectiveError(f"replay must be True or False, got {replay!r}")
    if not replay:
        return
    for name, usual in (("TORCH_NCCL_BLOCKING_WAIT", "0"), ("NCCL_GRAPH_MIXING_SUPPORT", "1")):
        if (value := os.environ.get(name) or usual) != usual:
            raise CollectiveError(f"replay=True does not go with {name}={value}: leave one of them out")
    memory = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if "expandable_segments:true" in memory.lower() and os.environ.get("NCCL_GRAPH_REGISTER") != "0":
        raise CollectiveError(
            "replay=True with expandable_segments:True needs NCCL_GRAPH_REGISTER=0, or NCCL may access memory that "
            "has moved: set it, or leave one of them out"
        )


def check_not_captured() -> None:
    """Raise where the user captures the current stream."""
    if torch.cuda.is_current_stream_capturing():
        raise CollectiveError("replay=True cannot be captured in a CUDA graph of yours: leave replay out")


# --- all graphs of the process ----------------------------------------------------------------------------------------

_live: "weakref.WeakSet[Replay]" = weakref.WeakSet()
_lock = threading.Lock()  # of the set


def _release(group: dist.ProcessGroup | None = None) -> None:
    with _lock:
        found = list(_live)
    for replay in found:
        replay.release(group)


@functools.cache
def _drop_before_groups_end() -> None:
    """Have graphs dropped before a group is closed or aborted, by torch's functions or by thinwire itself."""
    group_type: Any = dist.ProcessGroup
    for name in ("shutdown", "abort"):
        ends = getattr(group_type, name)

        def end(group: dist.ProcessGroup, *args: Any, ends: Any = ends, **kwargs: Any) -> Any:
            _release(group)
            return ends(group, *args, **kwargs)

        setattr(group_type, name, end)
    transport.before_abort.append(_release)
    atexit.register(_release)


_parents: list[Replay] = []  # in a child, which must not touch the graphs of the process that forked it


def _before_fork() -> None:
    _lock.acquire()
    _parents.extend(_live)


def _after_in_parent() -> None:
    _parents.clear()
    _lock.release()


def _after_in_child() -> None:
    """A child has no graphs."""
    global _lock
    _live.clear()
    _lock = threading.Lock()


os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
