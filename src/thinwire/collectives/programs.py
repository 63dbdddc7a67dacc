"""Calls on a GPU's stream as fixed series of launches: made once for calls of one kind, started at every call.

[Note: Programs] The host takes longer to start a kernel than the kernel takes for a small message, so there are few,
whatever the number of ranks: all shards of a tensor are one launch (kernels/rows.py), and travel in one collective as
rows that are padded to the longest shard's wire, the own row too. A sum in two phases is three kernels per lane and two
messages; a sum in one phase, and every other verb, two kernels and one message. Nothing waits, and nothing is allocated
except for non-contiguous tensors. A sum is the description of sums.py, run here without waiting; of the other verbs,
whose bytes are those of operations.py, this file has its own.

[Note: Workspaces] A blocking call runs on the caller's own stream, without an event; two streams have scratch of their
own. An asynchronous one runs on one of two streams of the group, by turns: while the wires of one call travel, the next
one encodes. Every stream has scratch of its own, so nobody waits for it. NCCL itself keeps the messages of a group in
the order in which they were started, on whatever stream.

Legend: W ranks, `stride` bytes from one row to the next.
"""

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.collectives import chunks
from thinwire.collectives.chunks import Chunking, Key, LaneSpec, Scratch, Span
from thinwire.collectives.transport import Transport
from thinwire.errors import CollectiveError
from thinwire.kernels import hashing, rows
from thinwire.kernels.rows import Bad
from thinwire.kernels.schema import RowJob, Rows

if TYPE_CHECKING:
    from thinwire.collectives.pipeline import Operation

MAX_WIRE_BYTES = 1 << 26  # of a chunk; a longer message is cut, so that scratch stays bounded
MOST_WIRES = 4  # of that length that a chunk's scratch holds; a sum in one shot holds one of every rank
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Workspace:
    """Scratch for one call at a time. It grows to the largest size that a call has needed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.dry_run = device.type == "meta"  # programs send nothing: they run only to have their kernels compiled
        self.buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._views: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def reserve(self, nbytes: int) -> Tensor:
        """A buffer of at least `nbytes`, used by the current stream."""
        if self.buffer.numel() < nbytes:
            self._views.clear()
            self.buffer = torch.empty(0, dtype=torch.uint8, device=self.device)  # frees the old one
            self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return self.buffer

    def views(self, user: Any) -> Any:
        """What `user.split` makes of the first `user.nbytes`, kept while the buffer is."""
        buffer = self.reserve(user.nbytes)
        found = self._views.get(user)
        if found is None:
            found = self._views[user] = user.split(buffer[: user.nbytes])
        return found


class CallerWorkspace(Workspace):
    """A workspace of blocking calls, which come from any stream."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream: torch.cuda.Stream | None = None  # the one that used it last
        self.handle = -1  # of that stream

    def reserve(self, nbytes: int) -> Tensor:
        if self.device.type == "cuda" and torch._C._cuda_getCurrentRawStream(self.device.index) != self.handle:
            self._move()
        return self.buffer if self.buffer.numel() >= nbytes else super().reserve(nbytes)

    def _move(self) -> None:
        """Wait for the stream that used the scratch last."""
        current = current_stream(self.device.index)
        if self._stream is not None and self.buffer.numel():
            if torch.cuda.is_current_stream_capturing():
                raise CollectiveError(
                    "a CUDA graph cannot capture this call: its scratch was used on another stream before; warm up and "
                    "capture on one stream, or leave collectives out of the graph"
                )
            current.wait_stream(self._stream)
            self.buffer.record_stream(current)
        self._stream = current
        self.handle = current.cuda_stream


class StreamWorkspace(Workspace):
    """One of the workspaces of asynchronous calls, with a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.stream = torch.cuda.Stream(device)
        self._begun = torch.cuda.Event()
        self._before = self.stream  # the caller's stream,
        self._current_device = -1  # device
        self._memory: Iterable[Tensor] = ()  # and tensors, while it is entered

    def entered(self, memory: Iterable[Tensor]) -> Self:
        """Inside, its stream is the current one, and runs after everything queued on the caller's.

        A faster torch.cuda.stream(). The allocator does not reuse `memory`, should its owner free it, before the stream
        is done with it.
        """
        self._before = current_stream(self.device.index)
        self._begun.record(self._before)
        self.stream.wait_event(self._begun)
        self._memory = memory
        self._current_device = torch._C._cuda_getDevice()  # which changes with the stream
        return self

    def __enter__(self) -> torch.cuda.Stream:
        _set_stream(self.stream)
        return self.stream

    def __exit__(self, *error: object) -> None:
        memory, self._memory = self._memory, ()
        _set_stream(self._before)
        if self._current_device != self.stream.device_index:
            torch.cuda.set_device(self._current_device)
        for tensor in memory:
            tensor.record_stream(self.stream)


def current_stream(index: int) -> torch.cuda.Stream:
    """A faster torch.cuda.current_stream()."""
    return _stream_of(torch._C._cuda_getCurrentStream(index))


@functools.lru_cache(maxsize=64)
def _stream_of(triple: tuple[int, int, int]) -> torch.cuda.Stream:
    """The stream with this id on the device of this index and type."""
    number, index, kind = triple
    return torch.cuda.Stream(stream_id=number, device_index=index, device_type=kind)


def _set_stream(stream: torch.cuda.Stream) -> None:
    torch._C._cuda_setStream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


# Starts a series of launches on the tensors of a call, at a step: on the current stream, which owns the scratch of the
# workspace. In a dry run it sends nothing.
Program = Callable[[Workspace, Sequence[Tensor], int], None]


def stream_chunking(numel: int, wire_bytes: int, shards: int, unit: int, held: int = 2) -> Chunking:
    """Cut a message into as few chunks as the scratch, for `held` wires, allows: on a GPU more chunks gain nothing."""
    count = -(-wire_bytes * max(held, MOST_WIRES) // (MAX_WIRE_BYTES * MOST_WIRES))
    if count < 2:
        return Chunking(numel, max(numel, 1))
    multiple = chunks.whole_chunk(shards, unit)
    return Chunking(numel, -(-numel // (count * multiple)) * multiple, 0, unit)


def fits(codec: Codec, dtype: torch.dtype, feedback: str = "") -> bool:
    """Whether one launch can encode rows of `dtype` with this codec, which must not depend on their lengths."""
    if dtype not in _DTYPES or dtype not in codec.inputs or codec.pick(shape=(1,)) != codec or not codec.recodes:
        return False
    return not feedback or codec.encoding(torch.float32).format.block > 0


def job_of(
    codec: Codec, shape: Rows, lane: LaneSpec, device: torch.device, stride: int, *, fused: bool = True
) -> RowJob:
    return RowJob(codec.encoding(lane.encoded), codec.seed, shape, lane.dtype, device, stride, fused)


def run_on_stream(operation: "Operation", space: Workspace, tensors: Sequence[Tensor], step: int) -> None:
    """An operation as a program, for GPU calls that have no program: its chunks run in order on the stream."""
    nbytes = operation.chunk_bytes
    # An operation without scratch waits for no other stream.
    buffer = space.reserve(nbytes)[:nbytes] if nbytes else space.buffer[:0]
    with torch.inference_mode():  # outputs may be inference tensors
        for index in range(operation.num_chunks):
            for awaited in operation.chunk(index, Scratch(buffer)):
                awaited.wait()  # the stream waits, not the host
        operation.finish()


def copying(program: Program, written: int, space: Workspace, tensors: Sequence[Tensor], step: int) -> None:
    """A program on copies of non-contiguous tensors; the first `written` are copied back."""
    pieces = [tensor.contiguous() for tensor in tensors]
    program(space, pieces, step)
    for tensor, piece in zip(tensors[:written], pieces, strict=False):
        if piece is not tensor:
            tensor.copy_(piece)


def coalesced(program: Program, space: Workspace, tensors: Sequence[Tensor], step: int) -> None:
    """A program of one tensor on several: they are copied into one row, and back."""
    row = torch.cat([tensor.reshape(-1) for tensor in tensors])
    program(space, [row], step)
    parts = row.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(list(tensors), [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)])


class RowProgram:
    """(*outputs, *inputs), one of each per lane: encode the inputs, send one message, decode the outputs.

    `jobs`, by lane: of all rows. `move` gets a matrix for the rows that come, and what is sent: another one or, in
    place, the same one or its row `only`. With `keeps_local` the output's own row is the input's; one tensor alone is
    input and output.
    """

    def __init__(
        self,
        jobs: Sequence[RowJob],
        encodes: Sequence[rows.Encode],
        move: Callable[[Tensor, Tensor], object],
        decodes: Sequence[rows.Decode],
        *,
        in_place: bool = False,
        only: int | None = None,
        keeps_local: bool = False,
    ) -> None:
        stride = jobs[0].stride
        matrix = jobs[0].rows.count * stride
        self.nbytes = matrix if in_place else 2 * matrix  # of scratch
        self._sent = slice(0, matrix) if only is None else slice(only * stride, (only + 1) * stride)
        self._received = slice(self.nbytes - matrix, self.nbytes)
        self._starts = [0, *itertools.accumulate(job.layout(0).nbytes for job in jobs[:-1])]
        self._encodes = encodes
        self._move = move
        self._decodes = decodes
        self._keeps_local = keeps_local

    def split(self, buffer: Tensor) -> tuple[Tensor, list[Tensor], Tensor, list[Tensor]]:
        """What is sent, each lane's part of it, and the same of what comes; the wires of a row lie side by side."""
        sent, received = buffer[self._sent], buffer[self._received]
        return sent, [sent[start:] for start in self._starts], received, [received[start:] for start in self._starts]

    def __call__(self, space: Workspace, tensors: Sequence[Any], step: int, bad: Bad | None = None) -> None:
        """See Program; with a place to note that numbers are not finite. Small lanes may be Picked, as in SumChunk."""
        sent, sent_L, received, received_L = space.views(self)
        count = len(self._decodes)
        inputs = tensors[-count:]
        mixed = hashing.mix64(step)
        for i in range(len(self._encodes))[::-1]:
            self._encodes[i](inputs[i], sent_L[i], mixed ^ i << 48, None)
        if not space.dry_run:
            self._move(received, sent)
        for i, decode in enumerate(self._decodes):
            decode(received_L[i], tensors[i], None, bad, inputs[i] if self._keeps_local else None)


def _jobs(link: Transport, lanes: Sequence[LaneSpec], count: int) -> list[RowJob]:
    """By lane, whose `numel` is that of a row: the job of so many rows."""
    stride = sum(lane.codec.wire_bytes(lane.numel, lane.dtype) for lane in lanes)
    shapes = [Rows(count * lane.numel, lane.numel, count) for lane in lanes]
    return [job_of(n.codec, shape, n, link.device, stride) for n, shape in zip(lanes, shapes, strict=True)]


def row_program(link: Transport, lanes: Sequence[LaneSpec], scale: float | None) -> RowProgram:
    """A gather: output = every rank's input, as decoded; with a scale a scatter: the sum of all rows for this rank."""
    jobs, own = _jobs(link, lanes, link.world), _jobs(link, lanes, 1)
    if scale is not None:
        decodes = [rows.decoder(job, world=link.world, scale=scale) for job in own]
        return RowProgram(jobs, [rows.encoder(job) for job in jobs], link.all_to_all, decodes)
    encodes = [rows.encoder(job, by_row=0, first_row=link.rank) for job in own]
    decodes = [rows.decoder(job) for job in jobs]
    return RowProgram(jobs, encodes, link.all_gather, decodes, in_place=True, only=link.rank)


def exchange_program(link: Transport, lane: LaneSpec, numel: int) -> RowProgram:
    """Row r of output = rank r's row for this rank, all of `numel` elements; the own row is copied exactly."""
    (job,) = _jobs(link, [lane._replace(numel=numel)], link.world)
    encode = rows.encoder(job, skip=link.rank, by_row=0, first_row=link.rank)
    each = [job.stride] * link.world
    move = functools.partial(link.exchange_rows, received_R=each, sent_R=each)  # others may have rows of other lengths
    decode = rows.decoder(job, skip=link.rank)
    return RowProgram([job], [encode], move, [decode], keeps_local=True)


def broadcast_program(link: Transport, lane: LaneSpec, source: int) -> RowProgram:
    """(tensor,): becomes the source's tensor, as every rank decodes it from the source's wires."""
    count = link.world - 1
    longest = chunks.shards(Span(0, lane.numel), count, lane.codec.unit)[0].numel
    stride = lane.codec.wire_bytes(longest, lane.dtype)
    job = job_of(lane.codec, Rows(lane.numel, longest, count), lane, link.device, stride)
    encodes = [rows.encoder(job)] if link.rank == source else []
    move = functools.partial(link.broadcast, source=source)
    return RowProgram([job], encodes, move, [rows.decoder(job)], in_place=True)


def exchange_uneven(link: Transport, codec: Codec, space: Workspace, tensors: Sequence[Tensor], step: int) -> None:
    """(*outputs, *inputs): output r = what rank r sends to this rank, of any length; the own part is copied exactly.

    Lengths change from call to call, so every message is a launch of its own.
    """
    if space.dry_run:
        return
    outputs = tensors[: link.world]
    inputs = tensors[link.world :]
    key = Key(step, 0)
    received_R, sent_R = (
        [codec.wire_bytes(t.numel(), t.dtype) if t.numel() and r != link.rank else 0 for r, t in enumerate(parts)]
        for parts in (outputs, inputs)
    )
    buffer = space.reserve(sum(sent_R) + sum(received_R))
    sent = buffer[: sum(sent_R)]
    received = buffer[sum(sent_R) : sum(sent_R) + sum(received_R)]
    for peer, wire in enumerate(sent.split(sent_R)):
        if wire.numel():
            codec.encode(inputs[peer], wire, step=key.of(link.rank))
    link.exchange_rows(received, sent, received_R, sent_R)
    for peer, wire in enumerate(received.split(received_R)):
        if wire.numel():
            codec.decode(wire, outputs[peer], step=key.of(peer))
    outputs[link.rank].copy_(inputs[link.rank].view(outputs[link.rank].shape))
