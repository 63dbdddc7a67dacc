"""Issue order, threads, streams and scratch: how operations of a group run.

[Note: Issue order] Every group has one line of operations. An operation is cut into chunks; a chunk is a coroutine
that encodes, starts messages, yields what it waits for, and goes on when that is done. The line keeps as many chunks
under way as the scratch holds and always waits for the one whose messages were started first, so chunk 0 is being
reduced while chunk 1 travels and chunk 2 is encoded, and the next operation's first chunk fills the gap that the
last one's end leaves. On gloo the line is one thread; messages carry tags drawn when the operation was called, so
delays change no result. On NCCL the line runs in the calling thread and everything is ordered by one stream.

[Note: No deadlock] Ranks may hold different numbers of chunks, since their scratch fills at different times. A chunk
of at most two messages is safe: before a rank waits for a later chunk's first message, it has waited for the first and
started the second message of all earlier ones, so everything that another rank needs for those is on its way. With
more messages a chunk this does not hold: such operations are one chunk to the line, which is waited for until it is
done, and overlap their parts in an order of their own (steps.py, [Note: In step]).
"""

import atexit
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import kernels
from thinwire.collectives import primitives
from thinwire.collectives.primitives import Transport, Waitable
from thinwire.errors import CollectiveError

Steps = Generator[Sequence[Waitable], None, None]
_ALIGN = 64
_GRACE_S = 0.5  # how long the end of the process waits for a line
_LOOK_S = 1.0  # how often a waiting caller looks whether the ranks disagree


class Operation:
    """One call of a verb: what its chunks do, and how much scratch each of them needs."""

    num_chunks: int
    chunk_bytes: int  # scratch of one chunk
    scratch_bytes: int  # scratch the operation may hold at most; at least chunk_bytes
    in_order: bool = False  # see [Note: No deadlock]
    outputs: list[Tensor]

    def memory(self) -> Sequence[Tensor]:
        """Every tensor that is read or written, apart from scratch."""
        return self.outputs

    def chunk(self, index: int, scratch: Tensor) -> Steps:
        """The coroutine of one chunk; `scratch` is its own until it ends."""
        raise NotImplementedError

    def finish(self) -> None:
        """Called once when all chunks are done."""


class Work:
    """A collective under way: torch.distributed.Work's wait, is_completed and get_future."""

    def __init__(self, outputs: list[Tensor]) -> None:
        self._outputs = outputs
        self._done = threading.Event()
        devices: list[Any] = list({tensor.device for tensor in outputs if tensor.device.type == "cuda"})
        self._device = devices[0] if devices else None
        self._future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=devices)
        self._error: BaseException | None = None
        self._ready: torch.cuda.Event | None = None
        self.look: Callable[[], None] | None = None  # raises when the ranks turn out to disagree

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when the outputs may be read (on a GPU: by what the current stream runs next), or raise."""
        left = float("inf") if timeout is None else timeout.total_seconds()
        while not self._done.wait(min(left, _LOOK_S)):
            left -= _LOOK_S
            if left <= 0:
                raise TimeoutError(f"the collective did not end within {timeout}")
            if self.look is not None:
                self.look()
        if self._error is not None:
            raise self._error
        if self._ready is not None:
            self._ready.wait(torch.cuda.current_stream(self._device))
        return True

    def is_completed(self) -> bool:
        """Whether the outputs are final, without waiting."""
        if self._ready is not None:
            return bool(self._ready.query())
        return self._done.is_set()

    def get_future(self) -> "torch.futures.Future[list[Tensor]]":
        """A future of the list of outputs. Its callbacks must not wait for collectives of the same group."""
        return self._future

    def finished(self) -> "Work":
        """Mark as done; on a GPU as done when what the current stream has so far is."""
        if self._device is not None:
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(self._device))
        self._done.set()
        self._future.set_result(self._outputs)
        return self

    def failed(self, error: BaseException) -> "Work":
        """Mark as failed: waiting raises `error`."""
        self._error = error
        self._done.set()
        self._future.set_exception(error)  # type: ignore[arg-type]
        return self


def settle(work: Work, async_op: bool) -> Work | None:
    """What a verb returns: the work itself, or None once it is done."""
    if async_op:
        return work
    work.wait()
    return None


class Scratch:
    """One buffer handed out in turn: chunks end about in the order they start, so a ring is enough.

    It grows to the largest need it has met and is then never allocated again. With `exact` an operation gets no more
    than its own limit, whatever the buffer has grown to: all ranks then start the same chunks in the same order, which
    NCCL needs.
    """

    def __init__(self, device: torch.device, *, exact: bool = False) -> None:
        self.device, self._exact = device, exact
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._lent: deque[tuple[int, int]] = deque()  # (from, to) of what is out, in the order it was taken
        self._back: set[int] = set()  # starts of those that came back out of turn

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._buffer.numel()

    def take(self, nbytes: int, limit: int) -> Tensor | None:
        """`nbytes` of scratch, or None while too much is out. `limit` is how large the buffer may have to be."""
        if (wanted := max(limit, nbytes, _ALIGN)) > self.nbytes and not self._lent:
            self._buffer = torch.empty(-(-wanted // _ALIGN) * _ALIGN, dtype=torch.uint8, device=self.device)
        size = -(-max(nbytes, 1) // _ALIGN) * _ALIGN  # no two regions start at one place
        at = self._place(size, min(self.nbytes, -(-wanted // _ALIGN) * _ALIGN) if self._exact else self.nbytes)
        if at is None:
            return None
        self._lent.append((at, at + size))
        return self._buffer[at : at + nbytes]

    def give(self, part: Tensor) -> None:
        """Take back what was lent."""
        self._back.add(int(part.storage_offset()))
        while self._lent and self._lent[0][0] in self._back:
            self._back.remove(self._lent.popleft()[0])

    def _place(self, nbytes: int, capacity: int) -> int | None:
        if not self._lent:
            return 0 if nbytes <= capacity else None
        first, end = self._lent[0][0], self._lent[-1][1]
        wrapped = self._lent[-1][0] < first
        if not wrapped and end + nbytes <= capacity:
            return end
        start = end if wrapped else 0
        return start if start + nbytes <= first else None


@dataclass
class _Running:
    """A chunk under way."""

    task: "_Task"
    scratch: Tensor
    steps: Steps
    awaited: Sequence[Waitable] = ()
    steps_taken: int = 0


@dataclass
class _Task:
    """An operation in the line."""

    operation: Operation
    work: Work
    groups: tuple[dist.ProcessGroup, ...]  # alive until the operation is done
    started: int = 0
    ended: int = 0

    @property
    def all_started(self) -> bool:
        return self.started >= self.operation.num_chunks


class Line:
    """Runs operations one after the other, their chunks overlapping. See [Note: Issue order]."""

    def __init__(self, scratch: Scratch) -> None:
        self.scratch = scratch
        self._under_way: deque[_Running] = deque()
        self._task: _Task | None = None  # the one whose chunks are being started
        self._current: _Running | None = None  # the one that is being taken on
        self.failure: str | None = None  # not the error: its traceback would hold the group

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._under_way and self._task is None

    @property
    def wants_task(self) -> bool:
        """Whether another operation can be entered."""
        return self._task is None

    def enter(self, task: _Task) -> None:
        """Make `task` the next whose chunks are started."""
        if self.failure is not None:
            task.work.failed(_broken(self.failure))
            return
        self._task = task

    def advance(self) -> None:
        """Start a chunk if there is room, else take the chunk that has waited longest one step on."""
        try:
            if self._start() or not self._under_way:
                return
            self._current = running = self._under_way.popleft()
            for waitable in running.awaited:
                waitable.wait()
            self._step(running)
        except BaseException as error:
            self._fail(error)
        finally:
            self._current = None

    def _start(self) -> bool:
        task = self._task
        if task is None:
            return False
        if not task.all_started:
            operation = task.operation
            scratch = self.scratch.take(operation.chunk_bytes, operation.scratch_bytes)
            if scratch is None:
                return False
            self._current = _Running(task, scratch, operation.chunk(task.started, scratch))
            task.started += 1
            self._step(self._current)
        if task.all_started:
            self._task = None
            self._end_if_done(task)
        return True

    def _step(self, running: _Running) -> None:
        try:
            running.steps_taken += 1
            with torch.inference_mode():  # outputs may be inference tensors; the line's thread knows no mode of its own
                running.awaited = next(running.steps)
        except StopIteration:
            self.scratch.give(running.scratch)
            running.task.ended += 1
            self._end_if_done(running.task)
        else:
            self._put(running)

    def _put(self, running: _Running) -> None:
        if running.task.operation.in_order and running.steps_taken > 1:
            self._under_way.appendleft(running)
        else:
            self._under_way.append(running)

    def _end_if_done(self, task: _Task) -> None:
        if task.all_started and task.ended == task.operation.num_chunks and not task.work._done.is_set():
            with torch.inference_mode():
                task.operation.finish()
            task.groups = ()
            task.work.finished()

    def _fail(self, error: BaseException) -> None:
        """Messages of a failed operation may still arrive in the scratch: nothing can run on this group any more."""
        self.failure = f"{type(error).__name__}: {error}"
        running = [*self._under_way, *([] if self._current is None else [self._current])]
        tasks = {id(chunk.task): chunk.task for chunk in running}
        if self._task is not None:
            tasks[id(self._task)] = self._task
        self._task = None
        self._under_way.clear()
        for task in tasks.values():
            task.groups = ()  # the error's traceback holds the task, and its keeper would hold the group
            if not task.work._done.is_set():
                task.work.failed(error)


def _broken(cause: str) -> CollectiveError:
    return CollectiveError(f"an earlier collective of this group failed ({cause}); make a new group to go on")


def _serve(inbox: "SimpleQueue[_Task | None]", line: Line) -> None:
    """The thread of a line. It holds no group while it sleeps, so that a group can end."""
    if line.scratch.device.type == "cuda":
        torch.cuda.set_device(line.scratch.device)
    closing = False
    while not (closing and line.idle):
        if line.wants_task and not closing:
            with contextlib.suppress(Empty):
                task = inbox.get(block=line.idle)
                closing = task is None
                if task is not None:
                    line.enter(task)
                del task
        line.advance()


@dataclass(eq=False)
class Channel:
    """What thinwire keeps about one group and one kind of device."""

    transports: tuple[Transport, ...]  # one; two for a mesh: across nodes, inside a node
    device: torch.device
    settled: dict[Any, Any] = field(default_factory=dict)  # what was decided for calls of one kind
    calls: int = 0
    disagreed: str | None = None  # what made the group unusable
    lock: threading.RLock = field(default_factory=threading.RLock)
    measuring: threading.RLock = field(default_factory=threading.RLock)  # not `lock`: callbacks start calls meanwhile

    def __post_init__(self) -> None:
        kernels.select(self.device)  # a slow backend is announced in the caller's thread, not in the line's
        self._inline = isinstance(self.transports[0], primitives.StreamTransport)
        self.scratch = Scratch(self.device, exact=self._inline)
        self._line = Line(self.scratch)
        self._inbox: SimpleQueue[_Task | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.stream = torch.cuda.Stream(self.device) if self._inline else None

    @property
    def transport(self) -> Transport:
        """The only transport, or that across nodes."""
        return self.transports[0]

    @property
    def failure(self) -> str | None:
        """What made the group unusable, if anything did."""
        return self.disagreed or self._line.failure

    def check_usable(self) -> None:
        """Raise if an earlier operation of this channel failed half-way."""
        if self.failure is not None:
            raise _broken(self.failure)

    def run(self, operation: Operation) -> Work:
        """Enter an operation into the line. Every tensor it holds lives until it is done."""
        work = Work(operation.outputs)
        task = _Task(operation, work, tuple(transport.group for transport in self.transports))
        if self._inline:
            with self.lock:
                self._run_on_stream(task)
        else:
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()  # gloo's thread has no stream of the caller's
                _record(operation, torch.cuda.default_stream(self.device))
            self._start_thread()
            self._inbox.put(task)
        return work

    def close(self) -> None:
        """End the thread once it has nothing more to do."""
        self._inbox.put(None)

    def _run_on_stream(self, task: _Task) -> None:
        stream = self.stream
        assert stream is not None
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self._line.enter(task)
            while not self._line.idle:
                self._line.advance()
        _record(task.operation, stream)

    def _start_thread(self) -> None:
        if self._thread is not None:
            return
        with self.lock:
            if self._thread is None:
                name = f"thinwire-{self.transport.group.group_name}"
                thread = threading.Thread(target=_serve, args=(self._inbox, self._line), name=name, daemon=True)
                thread.start()
                self._thread = thread
                _threads[thread] = self._inbox


def _record(operation: Operation, stream: torch.cuda.Stream) -> None:
    """Memory that is freed by its owner meanwhile is not given to others before `stream` is done with it."""
    for tensor in operation.memory():
        tensor.record_stream(stream)


# What is kept about a group is dropped with it: channels and transports refer to their groups weakly.
_kept: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, Any]]" = weakref.WeakKeyDictionary()
_threads: "weakref.WeakKeyDictionary[threading.Thread, SimpleQueue[_Task | None]]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()


@atexit.register
def _end_threads() -> None:
    """A daemon thread that comes back from C++ after the interpreter has gone would abort the process."""
    for inbox in list(_threads.values()):
        inbox.put(None)
    for thread in list(_threads):
        thread.join(_GRACE_S)


def channel(group: dist.ProcessGroup, device: torch.device, inside: dist.ProcessGroup | None = None) -> Channel:
    """The channel of a group (with `inside`: of a mesh, `group` running across its nodes) for tensors on `device`."""
    try:
        found: Channel = _kept[group][device, inside and inside.group_name]
    except KeyError:
        return _new_channel(group, device, inside)
    return found


def known(group: Any, device: torch.device) -> Channel:
    """The channel of a group that has one; KeyError or TypeError otherwise."""
    found: Channel = _kept[group][device, None]
    return found


def _new_channel(group: dist.ProcessGroup, device: torch.device, inside: dist.ProcessGroup | None) -> Channel:
    with _lock:
        groups = (group,) if inside is None else (group, inside)
        made = Channel(tuple(_transport(member, device) for member in groups), device)
        weakref.finalize(group, made.close)
        found: Channel = _kept[group].setdefault((device, inside and inside.group_name), made)
    return found


def _transport(group: dist.ProcessGroup, device: torch.device) -> Transport:
    kept = _kept.setdefault(group, {})
    if device not in kept:
        kept[device] = primitives.transport(group, device, kept.setdefault("tags", primitives.Tags()))
    found: Transport = kept[device]
    return found


def transports(group: dist.ProcessGroup) -> list[Transport]:
    """The transports that were used in this group, one a device."""
    return [kept for kept in _kept.get(group, {}).values() if isinstance(kept, Transport)]
