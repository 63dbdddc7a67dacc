"""How the operations of a group run: in order, cut into chunks that overlap, in one scratch buffer.

[Note: Issue order] Every group has one pipeline of operations. An operation is cut into chunks; a chunk is a coroutine
that encodes, starts messages, yields what it waits for, and resumes when that is done. The pipeline keeps as many
chunks under way as the scratch holds and always waits for the one whose messages were started first, so chunk 0 is
being reduced while chunk 1 travels and chunk 2 is encoded, and the next operation's first chunk fills the gap that the
last one's end leaves. The pipeline is one thread; messages carry tags drawn when the operation was called, so delays
change no result. On NCCL there is no pipeline: a stream of the GPU runs the chunks one after the other (programs.py).

[Note: No deadlock] Ranks may hold different numbers of chunks, since their scratch fills at different times. A chunk
of at most two messages is safe: before a rank waits for a later chunk's first message, it has waited for the first and
started the second message of all earlier ones, so everything that another rank needs for those is on its way. With
more messages per chunk this does not hold: such operations are one chunk to the pipeline, which is waited for until it
is done, and overlap their parts in an order of their own (operations.py, [Note: In step]).
"""

import contextlib
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.checks import check_step
from thinwire.collectives.chunks import SCRATCH_ALIGN, Flat, Scratch, aligned
from thinwire.collectives.peers import CallSite, Failures
from thinwire.collectives.transport import Moving, Stages
from thinwire.collectives.work import Work, serving
from thinwire.errors import CollectiveError
from thinwire.ranges import ranged

if TYPE_CHECKING:
    from thinwire.collectives.channel import IssuedCall

_IDLE_S = 1.0  # how often an idle pipeline asks whether its group still exists


class Operation:
    """One call of a verb: what its chunks do, how much scratch each of them needs, and who waits for it."""

    in_step: bool = False  # see [Note: No deadlock]
    copies: Sequence[tuple[Tensor, Tensor]] = ()  # at the end tensor = numbers, for results from elsewhere
    work: Work
    site: CallSite
    groups: tuple[dist.ProcessGroup, ...] = ()  # alive until the operation is done
    started: int = 0  # chunks
    ended: int = 0

    def __init__(
        self, call: "IssuedCall", num_chunks: int, outputs: Sequence[Flat], inputs: Sequence[Flat] = ()
    ) -> None:
        self._link = call.channel.transport
        self._step = call.site.step = call.channel.next_step() if call.step is None else check_step(call.step)
        fingerprint = zlib.crc32(call.site.text.encode()) ^ self._step & 0xFFFFFFFF
        # The first of TAGS tags in each group: across nodes, inside a node.
        self._tags = tuple(link.draw_tags(fingerprint) for link in call.channel.transports)
        self.num_chunks = num_chunks
        self.chunk_bytes = call.plan.chunk_bytes
        self.scratch_bytes = call.plan.scratch_bytes
        self._outputs = outputs
        self._inputs = inputs

    def memory(self) -> Sequence[Tensor]:
        """Every tensor that is read or written, apart from scratch."""
        flats = [tensor for flat in (*self._outputs, *self._inputs) for tensor in flat.memory]
        return [*flats, *(numbers for _, numbers in self.copies)]

    def chunk(self, index: int, scratch: Scratch) -> Stages:
        """The coroutine of one chunk; the scratch is its own until it ends."""
        raise NotImplementedError

    def finish(self) -> None:
        """Copy the results to outputs that are not contiguous; called once when all chunks are done."""
        for flat in self._outputs:
            flat.finish()
        for tensor, numbers in self.copies:
            tensor.detach().copy_(numbers.view(tensor.shape))

    def fail(self, error: BaseException) -> None:
        """Raise the error in all who wait for the operation."""
        self.groups = ()  # the error's traceback holds the operation, which would hold the group
        if not self.work.is_completed():
            self.work.failed(error)


class ScratchRing:
    """One buffer handed out in turn: chunks end about in the order they start, so a ring is enough.

    It grows to the largest need it has met and is then never allocated again.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._lent: deque[tuple[int, int]] = deque()  # (from, to) of what is out, in the order it was taken
        self._back: set[int] = set()  # starts of those that came back out of turn

    @property
    def nbytes(self) -> int:
        return self._buffer.numel()

    def take(self, nbytes: int, limit: int) -> Tensor | None:
        """`nbytes` of scratch, or None while too much is out. `limit` is how large the buffer may have to be."""
        wanted = aligned(max(limit, nbytes, 1), SCRATCH_ALIGN)
        if wanted > self.nbytes and not self._lent:
            self._buffer = torch.empty(wanted, dtype=torch.uint8, device=self.device)
        size = aligned(max(nbytes, 1), SCRATCH_ALIGN)  # no two regions start at one place
        at = self._place(size)
        if at is None:
            return None
        self._lent.append((at, at + size))
        return self._buffer[at : at + nbytes]

    def give(self, part: Tensor) -> None:
        self._back.add(int(part.storage_offset()))
        while self._lent and self._lent[0][0] in self._back:
            self._back.remove(self._lent.popleft()[0])

    def release(self) -> None:
        """Free the buffer, even while parts of it are out."""
        self._lent.clear()
        self._back.clear()
        self._buffer = torch.empty(0, dtype=torch.uint8, device=self.device)

    def _place(self, nbytes: int) -> int | None:
        if not self._lent:
            return 0 if nbytes <= self.nbytes else None
        first = self._lent[0][0]
        last, end = self._lent[-1]
        wrapped = last < first
        if not wrapped and end + nbytes <= self.nbytes:
            return end
        start = end if wrapped else 0
        return start if start + nbytes <= first else None


@dataclass
class _Running:
    operation: Operation
    scratch: Tensor
    stages: Stages
    awaited: Moving = field(default_factory=Moving)


_wait = ranged("thinwire::wire")(Moving.wait)


class Pipeline:
    """Runs operations one after the other, their chunks overlapping. See [Note: Issue order]."""

    def __init__(self, scratch: ScratchRing, failures: Failures) -> None:
        self.scratch = scratch
        self._failures = failures
        self._under_way: deque[_Running] = deque()
        self.entry: Operation | None = None  # the one whose chunks are being started
        self._current: _Running | None = None  # the one that is being started or resumed
        self.failure: str | None = None  # not the error: its traceback would hold the group

    @property
    def idle(self) -> bool:
        return not self._under_way and self.entry is None

    def advance(self) -> None:
        """Start a chunk if there is scratch for it, else resume the chunk that has waited longest."""
        try:
            running = self._new_chunk()
            is_resumed = running is None
            if running is None:
                if not self._under_way:
                    return
                self._current = running = self._under_way.popleft()
                _wait(running.awaited)
            try:
                with torch.inference_mode():  # outputs may be inference tensors; the pipeline's thread has no mode set
                    running.awaited = next(running.stages)
            except StopIteration:
                self._end(running)
            else:
                if running.operation.in_step and is_resumed:
                    self._under_way.appendleft(running)
                else:
                    self._under_way.append(running)
        except BaseException as error:
            self._fail(error)
        finally:
            self._current = None

    def _new_chunk(self) -> _Running | None:
        """The next chunk of the operation whose turn it is, if there is one and scratch for it."""
        operation = self.entry
        if operation is None:
            return None
        scratch = self.scratch.take(operation.chunk_bytes, operation.scratch_bytes)
        if scratch is None:
            return None
        self._current = _Running(operation, scratch, operation.chunk(operation.started, Scratch(scratch)))
        operation.started += 1
        if operation.started >= operation.num_chunks:
            self.entry = None
        return self._current

    def _end(self, running: _Running) -> None:
        self.scratch.give(running.scratch)
        operation = running.operation
        operation.ended += 1
        if operation.ended == operation.num_chunks:
            with torch.inference_mode():
                operation.finish()
            operation.groups = ()
            operation.work.finished()

    def _fail(self, error: BaseException) -> None:
        """Messages of a failed operation may still be under way: nothing can run on this group any more."""
        running = [*self._under_way, *([] if self._current is None else [self._current])]
        failed = {id(chunk.operation): chunk.operation for chunk in running}
        if self.entry is not None:
            failed[id(self.entry)] = self.entry
        self.entry = None
        self._under_way.clear()
        raised = self._failures.ended(error, next(iter(failed.values())).site)
        self.failure = f"{type(raised).__name__}: {raised}"
        self.scratch.release()
        for operation in failed.values():
            operation.fail(raised)


def broken(cause: str) -> CollectiveError:
    """What every call gets after one has failed half-way."""
    return CollectiveError(f"an earlier collective of this group failed ({cause}); create a new group to continue")


def refuse(inbox: "SimpleQueue[Operation | None]", cause: str) -> None:
    """Fail all operations still in the inbox of a pipeline that has failed."""
    with contextlib.suppress(Empty):
        while True:
            operation = inbox.get(block=False)
            if operation is not None:
                operation.fail(broken(cause))


def serve(inbox: "SimpleQueue[Operation | None]", pipeline: Pipeline, is_over: Callable[[], bool]) -> None:
    """The pipeline's thread, until None comes, it fails, or it is idle and over. While it sleeps it holds no group."""
    if pipeline.scratch.device.type == "cuda":
        torch.cuda.set_device(pipeline.scratch.device)
    serving.pipeline = weakref.ref(pipeline)
    closing = False
    while pipeline.failure is None and not (closing and pipeline.idle):
        if pipeline.entry is None and not closing:
            try:
                pipeline.entry = inbox.get(block=pipeline.idle, timeout=_IDLE_S)
                closing = pipeline.entry is None
            except Empty:
                if pipeline.idle and is_over():
                    return
        pipeline.advance()
    if pipeline.failure is not None:
        refuse(inbox, pipeline.failure)
