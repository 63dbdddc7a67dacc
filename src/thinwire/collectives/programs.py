"""Calls on a GPU's stream as fixed series of launches: made once for calls of one kind, started at every call.

[Note: Programs] The host takes longer to start a kernel than the kernel takes for a small message, so there are few,
whatever the number of ranks: all shards of a tensor are one launch (kernels/rows.py), and travel in one collective as
rows that are padded to the longest shard's wire, the own row too. A sum in two phases is three kernels per lane and two
messages; a sum in one phase, and every other verb, two kernels and one message. Nothing waits, and nothing is allocated
except for non-contiguous tensors. A sum is the description of sums.py, run here without waiting; of the other verbs,
whose bytes are those of operations.py, this file has its own.

Legend: W ranks, `stride` bytes from one row to the next.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.collectives import chunks
from thinwire.collectives.chunks import Chunking, Span
from thinwire.collectives.lane import Key, LaneSpec
from thinwire.collectives.transport import Transport
from thinwire.collectives.workspaces import Region, Workspace
from thinwire.kernels import hashing, rows
from thinwire.kernels.rows import Bad
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


def job_of(
    codec: Codec, shape: Rows, lane: LaneSpec, device: torch.device, stride: int, *, fused: bool = True
) -> RowJob:
    return RowJob(codec.encoding(lane.encoded), codec.seed, shape, lane.dtype, device, stride, fused)


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


@dataclass(frozen=True)
class Views:
    """The parts of the scratch that a message uses; L: one per lane."""

    sent: Tensor  # the rows that are sent, and later those that are gathered
    local: Tensor  # the row of this rank in them
    received: Tensor  # the rows that come
    sent_L: list[Tensor]  # each lane's part of all rows
    received_L: list[Tensor]
    local_L: list[Tensor]  # each lane's wire in the local row
    floats_L: Sequence[Tensor] = ()  # of a sum: as many numbers as a lane asks for


def views_of(
    link: Transport,
    starts: Sequence[int],
    local_sizes: Sequence[int],
    sent: Tensor,
    received: Tensor,
    floats_L: Sequence[Tensor] = (),
) -> Views:
    """Views of matrices of rows. By lane: where its wires start in a row, and the bytes of the local one."""
    stride = sent.numel() // link.world
    local = sent[link.rank * stride : (link.rank + 1) * stride]
    local_L = [local[start : start + nbytes] for start, nbytes in zip(starts, local_sizes, strict=True)]
    return Views(sent, local, received, [sent[b:] for b in starts], [received[b:] for b in starts], local_L, floats_L)


class RowProgram:
    """(*outputs, *inputs), one of each per lane: encode the inputs, send one message, decode the outputs.

    `move` sends the scratch's sent rows and receives those that come. With `keeps_local` the output's own row is the
    input's; one tensor alone is input and output.
    """

    def __init__(
        self,
        scratch: Region[Views],
        encodes: Sequence[rows.Encode],
        move: Callable[[Tensor, Tensor], object],
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
        views = space.view(self._scratch)
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
) -> tuple[list[RowJob], list[RowJob], Region[Views]]:
    """By lane, whose `numel` is that of a row: the job of one row, and of all ranks' rows; then matrices of rows.

    The wires for one rank lie side by side.
    """
    sizes = [lane.codec.wire_bytes(lane.numel, lane.dtype) for lane in lanes]
    one, every = (
        [job_of(lane.codec, Rows(n * lane.numel, lane.numel, n), lane, link.device, sum(sizes)) for lane in lanes]
        for n in (1, link.world)
    )
    matrix = link.world * sum(sizes)

    def split(buffer: Tensor) -> Views:
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return views_of(link, starts, sizes, buffer[:matrix], buffer[-matrix:])

    return one, every, Region(matrices * matrix, split)


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
    job = job_of(lane.codec, Rows(lane.numel, longest, count), lane, link.device, stride)
    encodes = [rows.encoder(job)] if link.rank == source else []
    scratch = Region(count * stride, lambda buffer: Views(buffer, buffer, buffer, [buffer], [buffer], [buffer]))
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
