"""The launches of a program as one CUDA graph, which is replayed at every step.

[Note: Replayed] To start a graph costs the host less than one message of torch's, whatever is in it. NCCL asks that all
ranks capture and replay alike. So what a rank does next must not depend on its addresses: the first call in a room is
launched, the second captured, and every later one replayed. A graph holds the memory that it reads and writes; numbers
that lie elsewhere by then, as the bucket of a rank that has joined early, are copied there and back.
NCCL waits for ever to close a group that a graph uses, so graphs are dropped before. And torch's watchdog does not see
the messages of a graph: a thread of thinwire's ends the process, as that would, if one does not come to its end within
the timeout of the group. The lookout cannot do that: it asks the store, which may be on the host that has stopped.
"""

import atexit
import contextlib
import ctypes
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives import transport
from thinwire.collectives.channel import Channel
from thinwire.collectives.programs import Sum
from thinwire.collectives.rooms import Room
from thinwire.errors import CollectiveError
from thinwire.kernels import hashing, is_ahead
from thinwire.kernels.later import Memo, Number
from thinwire.ranges import ranged

_LOOK_S = 1.0
_RELAXED = 2  # CUDA's CU_STREAM_CAPTURE_MODE_RELAXED
_Launch = Callable[[Room, Number, Number], None]  # in a room, with the mixed step and the number of the call


@dataclass
class _Captured:
    """What was launched once in a room, and is captured at the next meeting."""

    memo: Memo
    graph: torch.cuda.CUDAGraph | None = None
    held: tuple[Tensor, ...] = ()  # the numbers and the scratch that the graph reads and writes
    sent: int = 0  # bytes of messages in it
    received: int = 0
    stream: torch.cuda.Stream | None = None  # of the last call
    ended: torch.cuda.Event | None = None  # and its end
    watched: tuple[torch.cuda.Event, float] | None = None  # one that has not come up, and since when it is looked at

    def enter(self, stream: torch.cuda.Stream) -> None:
        """The next call is on this stream, after the last one: there is one scratch."""
        if self.stream != stream:
            if self.ended is not None:
                stream.wait_event(self.ended)
            self.stream = stream
            self.keep()

    def keep(self) -> None:
        """Memory is not given to others before the stream is done with it, should the graph go."""
        if self.stream is not None:
            for tensor in (*self.held, self.memo.memory):
                tensor.record_stream(self.stream)

    def late(self, now: float) -> float:
        """Seconds for which a replay has not come to its end. In the thread that watches."""
        if self.watched is None or self.watched[0].query():
            last = self.ended
            self.watched = None if last is None or last.query() else (last, now)
        return 0.0 if self.watched is None else now - self.watched[1]


class Replay:
    """A program's graphs, one per room."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._captured: dict[int, _Captured] = {}
        _drop_before_groups_end()
        with _lock:
            _live.add(self)

    @ranged("thinwire::replay")
    def run(self, launch: _Launch, room: Room, x: Tensor, mixed: int, call: int = 0) -> None:
        """Launch on the current stream, or replay on the numbers of `x` what was captured in this room."""
        found = self._captured.get(id(room))
        if found is None:
            found = self._captured[id(room)] = _Captured(Memo(room.device))
            found.enter(torch.cuda.current_stream(room.device))
            launch(room, *found.memo.begin(mixed, call))
        else:
            found.enter(torch.cuda.current_stream(room.device))
            if found.graph is None:
                self._capture(launch, found, room, x)
            self._replay(found, x, mixed, call)
        found.ended = torch.cuda.Event()
        found.ended.record()

    def release(self, group: dist.ProcessGroup | None = None) -> None:
        """Drop the graphs, of this group or of any."""
        if group is None or self._channel.transport._group() is group:
            self._captured.clear()

    @property
    def has_graphs(self) -> bool:
        return any(found.graph is not None for found in list(self._captured.values()))

    def look(self, now: float) -> None:
        """End the process if a replay has not come to its end within the group's timeout."""
        board = self._channel.board
        if any(found.late(now) > board.timeout_s for found in list(self._captured.values())):
            print(
                f"thinwire: rank {board.rank} waited in replayed calls of group {board.names!r} for the group's "
                f"timeout of {board.timeout_s:g} s: see whether the other ranks still run. This process ends",
                file=sys.stderr,
                flush=True,
            )
            os.abort()  # as torch's watchdog does

    def _replay(self, found: _Captured, x: Tensor, mixed: int, call: int) -> None:
        assert found.graph is not None
        place = found.held[0]
        moved = place.data_ptr() != x.data_ptr()
        if moved:
            place.copy_(x)
        found.memo.write(mixed, call)
        found.graph.replay()
        if moved:
            x.copy_(place)
        link = self._channel.transport
        link.sent += found.sent
        link.received += found.received

    def _capture(self, launch: _Launch, found: _Captured, room: Room, x: Tensor) -> None:
        link = self._channel.transport
        before = link.sent, link.received
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._channel.stream):  # not the caller's, which may be the one that cannot be captured
            graph.capture_begin(capture_error_mode="thread_local")  # other threads go on with theirs
            try:
                launch(room, *found.memo.begin(0, 0, captured=True))
            except BaseException:
                with contextlib.suppress(RuntimeError):  # what happened before matters
                    graph.capture_end()
                raise
            graph.capture_end()
        found.graph = graph
        found.held = (x, room.buffer)
        found.keep()
        found.sent, found.received = link.sent - before[0], link.received - before[1]
        link.sent, link.received = before
        _watch()


class ReplayedSum:
    """A sum by one CUDA graph, in scratch of its own."""

    def __init__(self, program: Sum, channel: Channel) -> None:
        self._program = program
        self._room = Room(channel.device)
        self._replay = Replay(channel)

    def run(self, room: Room, tensors: Sequence[Tensor], step: int) -> None:
        """See Program. The room is for kernels that are compiled."""
        (x,) = tensors
        flat = x.view(-1)

        def launch(room: Room, mixed: Number, call: Number) -> None:
            self._program.run_lanes(room, [flat], mixed)

        if is_ahead():
            launch(room, *Memo(room.device).begin(0, 0))
        else:
            self._replay.run(launch, self._room, flat, hashing.mix64(step))


# --- what can be replayed ---------------------------------------------------------------------------------------------


def check_replay(replay: object) -> None:
    """Raise where replay= is neither True nor False, or torch or NCCL are set to what does not go with CUDA graphs."""
    if not isinstance(replay, bool):
        raise CollectiveError(f"replay must be True or False, got {replay!r}")
    for name, usual in (("TORCH_NCCL_BLOCKING_WAIT", "0"), ("NCCL_GRAPH_MIXING_SUPPORT", "1")):
        if replay and (value := os.environ.get(name) or usual) != usual:
            raise CollectiveError(f"replay=True does not go with {name}={value}: leave one of them out")


def check_not_captured() -> None:
    """Raise where the user captures the current stream."""
    if torch.cuda.is_current_stream_capturing():
        raise CollectiveError("replay=True cannot be captured in a CUDA graph of yours: leave replay out")


def replayed(program: object, channel: Channel, text: str) -> ReplayedSum | None:
    """A sum as one CUDA graph; one rank alone has nothing to send."""
    if channel.world == 1:
        return None
    if not isinstance(program, Sum) or not program.replays:
        raise refusal(text)
    return ReplayedSum(program, channel)


def refusal(text: str) -> CollectiveError:
    """The error of a call that is not a series of launches."""
    return CollectiveError(
        "replay=True: this call is not made of launches that a CUDA graph can repeat. It needs Triton, a group on "
        "NCCL, no mesh, a residual_dtype of floats, tensors of 16 or 32 bits, and a codec that is not top-k, nor in "
        f"two phases affine or of blocks above 8192; got {text}"
    )


# --- all graphs of the process ----------------------------------------------------------------------------------------

_live: "weakref.WeakSet[Replay]" = weakref.WeakSet()
_lock = threading.Lock()  # of the set, and of the thread that watches
_over = threading.Event()
_thread: threading.Thread | None = None


def _replays() -> list[Replay]:
    with _lock:
        return list(_live)


def _release(group: dist.ProcessGroup | None = None) -> None:
    for replay in _replays():
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
    atexit.register(_end)


def _watch() -> None:
    """Watch replays, as long as there are graphs."""
    global _thread
    with _lock:
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_run, name="thinwire-watch", daemon=True)
            _thread.start()


def _run() -> None:
    global _thread
    with contextlib.suppress(OSError, AttributeError):
        # Or a question about an event would spoil a graph that somebody captures meanwhile.
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))
    while not _over.wait(_LOOK_S):
        with _lock:
            if not any(replay.has_graphs for replay in _live):
                _thread = None
                return
        for replay in _replays():
            with contextlib.suppress(RuntimeError):  # of CUDA, which every other thread is told as well
                replay.look(time.monotonic())


def _end() -> None:
    """At the end of the process, which a thread must not outlive."""
    _over.set()
    if _thread is not None:
        _thread.join(2 * _LOOK_S)
    _release()
