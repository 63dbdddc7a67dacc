"""Calls on a GPU's stream as fixed series of launches: made once for calls of one kind, started at every call.

[Note: Programs] The host takes longer to start a kernel than the kernel takes for a small message, so there are few,
whatever the number of ranks: all shards of a tensor are one launch (kernels/rows.py), and travel in one collective as
rows that are padded to the longest shard's wire, the own row too. A sum in two phases is three kernels per lane and two
messages; a sum in one phase, and every other verb, two kernels and one message. Nothing waits, and nothing is allocated
except for non-contiguous tensors.
The bytes are those that the operations of operations.py make of the same shards.

Legend: W ranks, `stride` bytes from one row to the next.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.collectives import chunks
from thinwire.collectives.chunks import Chunking, Span, aligned
from thinwire.collectives.lane import Key, LaneSpec
from thinwire.collectives.sums import fewest_roundings, fitted
from thinwire.collectives.transport import Transport
from thinwire.collectives.workspaces import Region, Workspace
from thinwire.kernels import hashing, rows
from thinwire.kernels.rows import Bad, Feedback, Memory, Picked
from thinwire.kernels.schema import RowJob, Rows

MAX_WIRE_BYTES = 1 << 26  # of a chunk; a longer message is cut, so that scratch stays bounded
MOST_WIRES = 4  # so long that a chunk's scratch holds; a sum in one phase has one of every rank
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
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


def _job(codec: Codec, shape: Rows, lane: LaneSpec, device: torch.device, stride: int) -> RowJob:
    return RowJob(codec.encoding(lane.encoded), codec.seed, shape, lane.dtype, device, stride)


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


# --- sums -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Views:
    """The parts of the scratch that a sum uses; L: one per lane."""

    sent: Tensor  # the rows that are sent, and later those that are gathered
    local: Tensor  # the row of this rank in them
    received: Tensor  # the rows that come
    sent_L: list[Tensor]  # each lane's part of all rows
    received_L: list[Tensor]
    local_L: list[Tensor]  # each lane's wire in the local row
    floats_L: list[Tensor]  # numbers of fp32, as many as a lane asks for


def _split_rows(
    link: Transport,
    sizes: Sequence[int],
    local_sizes: Sequence[int],
    floats: Sequence[int],
    matrices: int,
    buffer: Tensor,
) -> _Views:
    """One or two matrices of rows, then the floats. By lane: bytes in a row, of the local wire, and of the floats."""
    stride = sum(sizes)
    matrix = link.world * stride
    sent = buffer[:matrix]
    received = buffer[matrix * (matrices - 1) : matrix * matrices]
    local = sent[link.rank * stride : (link.rank + 1) * stride]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    local_L = [local[start : start + nbytes] for start, nbytes in zip(starts, local_sizes, strict=True)]
    at = [matrices * matrix + sum(map(aligned, floats[:i])) for i in range(len(floats))]
    floats_L = [buffer[b : b + nbytes].view(torch.float32) for b, nbytes in zip(at, floats, strict=True)]
    return _Views(sent, local, received, [sent[b:] for b in starts], [received[b:] for b in starts], local_L, floats_L)


class SumKernels:
    """The launches of a lane on the rank at `link`."""

    def __init__(self, lane: LaneSpec, link: Transport, scale: float, stride: int, *, two_phase: bool) -> None:
        world = link.world
        self.lane = lane
        self.shape = lane_rows(lane, world, two_phase=two_phase)
        feedback = None
        if lane.feedback:
            feedback = Feedback(lane.feedback, world if lane.feedback == "classic" else -world)
        self.keeps_local = two_phase and (lane.exact_local or bool(lane.feedback))
        own = link.rank if self.keeps_local else -1
        encode_job = _job(lane.first_phase if two_phase else lane.codec, self.shape, lane, link.device, stride)
        self.job = _job(lane.codec, self.shape, lane, link.device, stride)
        self.encode = rows.encoder(encode_job, skip=own, by_row=int(two_phase), feedback=feedback)
        self.recode: rows.Recode | None = None
        self.row = link.rank if two_phase else 0
        if two_phase and self.shape.span(link.rank)[1] > self.shape.span(link.rank)[0]:
            size = scale if self.keeps_local else abs(scale)
            self.recode = rows.recoder(self.job, link.rank, world, scale=size, own=own, feedback=feedback)
        sign = -1.0 if scale < 0 and not self.keeps_local else 1.0
        added = 1 if two_phase else world
        scale_out = sign if two_phase else scale
        self.decode = rows.decoder(self.job, world=added, scale=scale_out, own=own, share=scale, feedback=feedback)
        self.scan = rows.scanner(self.job, added) if feedback else None
        self.left_bytes = 4 * lane.numel if feedback and lane.dtype != torch.float32 else 0


def lane_rows(lane: LaneSpec, world: int, *, two_phase: bool) -> Rows:
    """The shards of a lane, one per rank; in one phase there is one."""
    if not two_phase:
        return Rows(lane.numel, lane.numel, 1)
    longest = chunks.shards(Span(0, lane.numel), world, lane.codec.unit)[0]
    return Rows(lane.numel, longest.numel, world)


class SumChunk:
    """A sum of lanes over the ranks, in place, all in one message; no lane is empty."""

    def __init__(
        self, link: Transport, lanes: Sequence[LaneSpec], scale: float, *, two_phase: bool, begin: int = 0
    ) -> None:
        self._link = link
        self._two_phase = two_phase
        shapes = [lane_rows(lane, link.world, two_phase=two_phase) for lane in lanes]
        pairs = zip(lanes, shapes, strict=True)
        self._sizes = [lane.codec.wire_bytes(shape.each, lane.encoded) for lane, shape in pairs]
        self._stride = sum(self._sizes)
        self._matrices = (2 if two_phase else 1) * link.world * self._stride
        self._lanes = [SumKernels(lane, link, scale, self._stride, two_phase=two_phase) for lane in lanes]
        # Lanes without feedback may be Picked: encoded before the first lane, where they leave zeros, decoded after it.
        # Lanes without feedback find out, as they are decoded, whether they are finite; the others have to know before.
        self._last_first = sorted(range(len(lanes)), key=lambda i: bool(lanes[i].feedback))
        self._nothing: list[Memory | None] = [None] * len(lanes)
        self._floats = [lane.left_bytes for lane in self._lanes]
        self.scratch = Region(self._matrices + sum(map(aligned, self._floats)), self._split, begin)

    def run(
        self,
        space: Workspace,
        xs: Sequence[Any],
        mixed: Sequence[int],
        memories: Sequence[Memory | None] | None = None,
        bad: Bad | None = None,
    ) -> None:
        """x = scale * sum of x over the ranks. By lane: the mixed step, and the memory where there is feedback."""
        views = self.scratch.views(space)
        link = self._link
        kept = self._nothing if memories is None else _with_left(memories, xs, views.floats_L)
        sent_L = views.sent_L if self._two_phase else views.local_L
        for i in self._last_first[::-1]:
            self._lanes[i].encode(xs[i], sent_L[i], mixed[i], kept[i])
        if self._two_phase:
            if not space.dry_run:
                link.all_to_all(views.received, views.sent)
            self._reduce(space, views, xs, mixed, kept)
        if not space.dry_run:
            link.all_gather(views.sent, views.local)
        if bad is not None:
            for lane, wires in zip(self._lanes, views.sent_L, strict=True):
                if lane.scan is not None:
                    lane.scan(wires, bad)
        for i in self._last_first:
            self._lanes[i].decode(views.sent_L[i], xs[i], kept[i], bad)

    def _reduce(self, space: Workspace, views: _Views, xs: Sequence[Any], mixed: Sequence[int], kept: Any) -> None:
        """Write the wire of the own shard's sum, of every lane."""
        for i, lane in enumerate(self._lanes):
            if lane.recode is not None:
                x = xs[i].copy if isinstance(xs[i], Picked) else xs[i]
                lane.recode(views.received_L[i], views.local_L[i], mixed[i], x if lane.keeps_local else None, kept[i])

    def _split(self, buffer: Tensor) -> _Views:
        local_sizes = [lane.job.layout(lane.row).nbytes for lane in self._lanes]
        return _split_rows(self._link, self._sizes, local_sizes, self._floats, 2 if self._two_phase else 1, buffer)


def _with_left(memories: Sequence[Memory | None], xs: Sequence[Tensor], lefts: Sequence[Tensor]) -> list[Memory | None]:
    """The memories with a place for `left`: x itself, or scratch if x has too few bits."""
    return [
        memory and memory._replace(left=left if left.numel() else x)
        for memory, x, left in zip(memories, xs, lefts, strict=True)
    ]


class NodesChunk(SumChunk):
    """A sum on a mesh of nodes: inside every node, across nodes, and back inside; see sums.py.

    There is no feedback. The scale is applied across nodes.
    """

    def __init__(self, links: Sequence[Transport], lanes: Sequence[LaneSpec], scale: float, chunk: int) -> None:
        across, inside = links
        super().__init__(inside, lanes, 1.0, two_phase=True)
        self._chunk = chunk
        self._scale = scale
        spans = [lane.shape.span(inside.rank) for lane in self._lanes]
        numels = {i: end - begin for i, (begin, end) in enumerate(spans) if end > begin}
        jobs = {i: replace(self._lanes[i].job, rows=Rows(numel, numel, 1)) for i, numel in numels.items()}
        self._adds = {i: rows.decoder(job, world=inside.world) for i, job in jobs.items()}
        self._puts = {i: rows.encoder(job, by_row=0, first_row=inside.rank) for i, job in jobs.items()}
        self._floats = [4 * (end - begin) for begin, end in spans]  # the sums of the own shards inside a node
        self._outer: SumChunk | None = None
        end = self._matrices + sum(map(aligned, self._floats))
        if numels and across.world > 1:
            outer = [lanes[i].outer(numel) for i, numel in numels.items()]
            phases = fewest_roundings(across.world) == "two_phase"
            self._outer = SumChunk(across, outer, scale, two_phase=phases, begin=end)
            end = self._outer.scratch.end
        self.scratch = Region(end, self._split)

    def _reduce(self, space: Workspace, views: _Views, xs: Sequence[Any], mixed: Sequence[int], kept: Any) -> None:
        """Add the own shards inside the node, then over the nodes, where the step is the shard's key."""
        for i, add in self._adds.items():
            add(views.received_L[i], views.floats_L[i], None, None)
        totals = {i: views.floats_L[i] for i in self._adds}
        if self._outer is None:
            for total in totals.values():
                total.mul_(self._scale)
        else:
            steps = [hashing.row_step(mixed[i], self._link.rank) for i in totals]
            self._outer.run(space, list(totals.values()), [Key(step, self._chunk).mixed() for step in steps])
        for i, put in self._puts.items():
            lane = self._lanes[i].lane
            total = fitted(totals[i], lane.dtype, lane.outer(0).codec)
            put(total, views.local_L[i], mixed[i], None)


class SumProgram:
    """A sum of lanes, in chunks where the message is long; over one link, or two of a mesh: across nodes, inside."""

    def __init__(self, links: Sequence[Transport], algorithm: str, lanes: Sequence[LaneSpec], scale: float) -> None:
        self._chunkings = [lane.chunking for lane in lanes]
        self.count = max(chunking.num_chunks for chunking in self._chunkings)
        # The lanes that have anything in a chunk, and their sum.
        self._chunks: list[tuple[list[int], SumChunk]] = []
        made: dict[tuple[int, ...], SumChunk] = {}  # chunks of the same lengths have the same
        for index in range(self.count):
            lengths = tuple(chunking.span(index).numel for chunking in self._chunkings)
            some = [i for i, numel in enumerate(lengths) if numel]
            parts = [lanes[i]._replace(numel=lengths[i]) for i in some]
            if len(links) == 2:
                made[lengths] = NodesChunk(links, parts, scale, index)
            elif lengths not in made:
                made[lengths] = SumChunk(links[0], parts, scale, two_phase=algorithm == "two_phase")
            self._chunks.append((some, made[lengths]))
        self._places = [lane << 48 for lane in range(len(lanes))]
        self.scratch_end = aligned(max(chunk.scratch.end for _, chunk in self._chunks))

    def __call__(
        self,
        space: Workspace,
        xs: Sequence[Any],
        step: int,
        memories: Sequence[Memory | None] | None = None,
        bad: Bad | None = None,
    ) -> None:
        """See Program; with the memories of lanes, and a place to note which of `count` chunks are not finite."""
        mixed = hashing.mix64(step)
        if self.count == 1:
            self._chunks[0][1].run(space, xs, [mixed ^ place for place in self._places], memories, bad)
            return
        for index, (some, chunk) in enumerate(self._chunks):
            spans = [self._chunkings[i].span(index) for i in some]
            parts = [xs[i].view(-1)[span.begin : span.end] for i, span in zip(some, spans, strict=True)]
            steps = [mixed ^ (self._places[i] | index << 16) for i in some]
            pieces = None
            if memories is not None:
                pieces = [_slice(memories[i], span) for i, span in zip(some, spans, strict=True)]
            noted = None if bad is None else bad._replace(call=bad.call + index)
            chunk.run(space, parts, steps, pieces, noted)


def _slice(memory: Memory | None, span: Span) -> Memory | None:
    if memory is None:
        return None
    mean = None if memory.mean is None else memory.mean[span.begin : span.end]
    return Memory(memory.kept[span.begin : span.end], memory.left[span.begin : span.end], mean)


# --- other verbs: one message -----------------------------------------------------------------------------------------


class RowProgram:
    """(*outputs, *inputs), one of each per lane: encode the inputs, send one message, decode the outputs.

    `move` sends the scratch's sent rows and receives those that come. With `keeps_local` the output's own row is the
    input's; one tensor alone is input and output.
    """

    def __init__(
        self,
        scratch: Region[_Views],
        encodes: Sequence[rows.Encode],
        move: Callable[[Tensor, Tensor], None],
        decodes: Sequence[rows.Decode],
        *,
        in_place: bool = False,
        keeps_local: bool = False,
    ) -> None:
        self._scratch = scratch
        self._encodes = encodes
        self._move = move
        self._decodes = decodes
        self._in_place = in_place  # True => rows come where they are sent from, this rank's among them
        self._keeps_local = keeps_local

    def __call__(self, space: Workspace, tensors: Sequence[Any], step: int, bad: Bad | None = None) -> None:
        """See Program; with a place to note that numbers are not finite. Small lanes may be Picked, as in SumChunk."""
        views = self._scratch.views(space)
        count = len(self._decodes)
        inputs = tensors[-count:]
        mixed = hashing.mix64(step)
        sent_L = views.local_L if self._in_place else views.sent_L
        for i in range(len(self._encodes))[::-1]:
            self._encodes[i](inputs[i], sent_L[i], mixed ^ i << 48, None)
        if not space.dry_run:
            self._move(views.received, views.local if self._in_place else views.sent)
        for i, decode in enumerate(self._decodes):
            decode(views.received_L[i], tensors[i], None, bad, inputs[i] if self._keeps_local else None)


def _rows_of(
    link: Transport, lanes: Sequence[LaneSpec], matrices: int
) -> tuple[list[RowJob], list[RowJob], Region[_Views]]:
    """By lane, whose `numel` is that of a row: the job of one row, and of all ranks' rows; then matrices of rows.

    The wires for one rank lie side by side.
    """
    sizes = [lane.codec.wire_bytes(lane.numel, lane.dtype) for lane in lanes]
    one, every = (
        [_job(lane.codec, Rows(n * lane.numel, lane.numel, n), lane, link.device, sum(sizes)) for lane in lanes]
        for n in (1, link.world)
    )
    split = functools.partial(_split_rows, link, sizes, sizes, (), matrices)
    return one, every, Region(matrices * link.world * sum(sizes), split)


def scatter_program(link: Transport, lanes: Sequence[LaneSpec], scale: float) -> RowProgram:
    """output = scale * the sum over ranks of their row for this rank."""
    one, every, scratch = _rows_of(link, lanes, 2)
    decodes = [rows.decoder(job, world=link.world, scale=scale) for job in one]
    return RowProgram(scratch, [rows.encoder(job) for job in every], link.all_to_all, decodes)


def gather_program(link: Transport, lanes: Sequence[LaneSpec]) -> RowProgram:
    """output = every rank's input, as decoded from its wire."""
    one, every, scratch = _rows_of(link, lanes, 1)
    encodes = [rows.encoder(job, by_row=0, first_row=link.rank) for job in one]
    decodes = [rows.decoder(job) for job in every]
    return RowProgram(scratch, encodes, link.all_gather, decodes, in_place=True)


def exchange_program(link: Transport, lane: LaneSpec, numel: int) -> RowProgram:
    """Row r of output = rank r's row for this rank, all of `numel` elements; the own row is copied exactly."""
    _, (job,), scratch = _rows_of(link, [lane._replace(numel=numel)], 2)
    encode = rows.encoder(job, skip=link.rank, by_row=0, first_row=link.rank)
    each = [job.stride] * link.world
    move = functools.partial(link.exchange_rows, received_R=each, sent_R=each)  # others may have rows of other lengths
    decode = rows.decoder(job, skip=link.rank)
    return RowProgram(scratch, [encode], move, [decode], keeps_local=True)


def broadcast_program(link: Transport, lane: LaneSpec, source: int) -> RowProgram:
    """(tensor,): becomes the source's tensor, as every rank decodes it from the source's wires."""
    count = link.world - 1
    longest = chunks.shards(Span(0, lane.numel), count, lane.codec.unit)[0].numel
    stride = lane.codec.wire_bytes(longest, lane.dtype)
    job = _job(lane.codec, Rows(lane.numel, longest, count), lane, link.device, stride)
    encodes = [rows.encoder(job)] if link.rank == source else []
    scratch = Region(count * stride, lambda buffer: _Views(buffer, buffer, buffer, [buffer], [buffer], [buffer], []))
    return RowProgram(scratch, encodes, lambda wires, _: link.broadcast(wires, source), [rows.decoder(job)])


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
