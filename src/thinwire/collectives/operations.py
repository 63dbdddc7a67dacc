"""The operations: what happens to one chunk of each verb, as coroutines that yield the messages they wait for.

Legend: W ranks, N bytes of one wire. Every rank decodes the same wires, its own too, so all end with the same bits.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from thinwire.collectives import chunks
from thinwire.collectives.channel import IssuedCall
from thinwire.collectives.chunks import NOTE_BYTES, Chunking, Flat, Key, Lane, Scratch, Span, wire_sizes
from thinwire.collectives.pipeline import Operation
from thinwire.collectives.programs import job_of
from thinwire.collectives.sums import after
from thinwire.collectives.transport import Moving, Stages, Transport
from thinwire.kernels import rows
from thinwire.kernels.rows import Feedback, Fine, Memory, is_fine
from thinwire.kernels.schema import Rows

# Takes (place, began, ended) of a chunk's work: place 0 before its first message, 1 between two, -1 after the last.
Meter = Callable[[int, float, float], None]
OnFinite = Callable[[Fine], None]  # called for every chunk with whether all of it was finite


class AllReduce(Operation):
    """Sum every lane over the ranks, in place.

    [Note: In step] Chunks that wait more than twice are one chunk to the pipeline. Each is a stage behind the one
    before it. In a round one is started, and then all that are under way are waited for once, the youngest first: so
    its next message is on its way while older ones are waited for. All ranks do this in the same order whatever their
    delays, so that each has started what others wait for.
    """

    def __init__(
        self, call: IssuedCall, lanes: Sequence[Lane], on_finite: OnFinite | None = None, meter: Meter | None = None
    ) -> None:
        program = call.plan.sum
        assert program is not None
        super().__init__(call, program.count, [lane.flat for lane in lanes])
        self._lanes = lanes
        self._on_finite = on_finite
        self._program = program
        self._meter = meter or (lambda *_: None)
        if program.waits and not self._link.on_stream:
            self.in_step = True
            self.num_chunks = 1
            self._each = chunks.aligned(self.chunk_bytes)  # of one
            self._slots = min(program.count, program.waits + 1)
            self.chunk_bytes = self._slots * self._each
            self.scratch_bytes = max(self.scratch_bytes, self.chunk_bytes)

    def chunk(self, index: int, scratch: Scratch) -> Stages:
        return self._all_in_step(scratch) if self.in_step else self._sum(index, scratch)

    def _sum(self, index: int, scratch: Scratch) -> Stages:
        """The stages of one span of every lane."""
        chunk = self._program.chunks[index][1]
        views = chunk.split(scratch.take(chunk.nbytes))
        parts = self._program.parts(index, self._lanes)
        sources = [lane.flat.read(span, scratch) for lane, span in parts]
        xs = [lane.converted(x, scratch) for (lane, _), x in zip(parts, sources, strict=True)]
        noted = self._on_finite is not None
        stages, bad = self._program.begin(index, views, parts, xs, self._step, self._tags, noted=noted)
        began = time.perf_counter()
        for place, awaited in enumerate(stages):
            self._meter(place, began, time.perf_counter())
            yield awaited
            began = time.perf_counter()
        self._meter(-1, began, time.perf_counter())
        for (lane, span), source, x in zip(parts, sources, xs, strict=True):
            if x is not source:
                source.copy_(x)
            lane.flat.write(span, source)
        if self._on_finite is not None:
            self._on_finite(is_fine(bad))

    def _all_in_step(self, scratch: Scratch) -> Stages:
        """All chunks. See [Note: In step]."""
        under_way: list[tuple[Stages, Moving]] = []  # the youngest first
        slots = [scratch.take(self._each) for _ in range(self._slots)]
        for place in itertools.count():
            begun = []
            if place < self._program.count:
                stages = self._sum(place, Scratch(slots[place % self._slots]))
                begun = [(stages, next(stages))]
            elif not under_way:
                return
            left = []
            for stages, awaited in under_way:
                yield awaited
                with contextlib.suppress(StopIteration):
                    left.append((stages, next(stages)))
            under_way = begun + left


class ReduceScatter(Operation):
    """outputs = scale * sum over ranks of their rows for this rank, of every lane. One message, one rounding.

    A lane holds one row per rank, and its chunks are those of a row. If lanes have feedback, every message also
    says whether all that its rank sends is finite; if anything is not, no rank remembers anything.
    """

    def __init__(
        self, call: IssuedCall, lanes: Sequence[Lane], outputs: Sequence[Flat], on_finite: OnFinite | None = None
    ) -> None:
        assert call.plan.scale is not None
        num_chunks = max(lane.spec.chunking.num_chunks for lane in lanes)
        super().__init__(call, num_chunks, outputs, [lane.flat for lane in lanes])
        self._lanes = lanes
        self._scale = call.plan.scale
        self._on_finite = on_finite
        self._note = NOTE_BYTES if any(lane.carry for lane in lanes) else 0

    def chunk(self, index: int, scratch: Scratch) -> Stages:
        link = self._link
        spans = [lane.spec.chunking.span(index) for lane in self._lanes]
        some = [at for at, span in enumerate(spans) if span.numel]
        sizes = [self._lanes[at].codec.wire_bytes(spans[at].numel, self._lanes[at].dtype) for at in some]
        stride = sum(sizes) + self._note
        sent_WN, received_WN = (scratch.take(link.world * stride).view(link.world, stride) for _ in range(2))
        *sent_LWN, _ = sent_WN.split([*sizes, self._note], 1)
        *received_LWN, _ = received_WN.split([*sizes, self._note], 1)
        parts = [
            _LaneRows(self._lanes[at], spans[at], Key(self._step, index, at).mixed(), link, stride, self._scale)
            for at in some
        ]
        for rank in (*link.others, link.rank):
            for part, wires_WN in zip(parts, sent_LWN, strict=True):
                part.encode(rank, wires_WN[rank], scratch)
        if self._note:  # every message notes whether all that this rank sends is finite
            sent_WN[:, -NOTE_BYTES] = _finite(parts, sent_LWN)
        received_WN[link.rank] = sent_WN[link.rank]
        peers = sorted(link.others) if stride else []
        yield link.exchange([(p, sent_WN[p]) for p in peers], [(p, received_WN[p]) for p in peers], self._tags[0])
        fine = _known((received_WN[:, -NOTE_BYTES] == 1).all()) if self._note else True
        if self._on_finite is not None and parts:
            self._on_finite(_known(_finite(parts, received_LWN)))
        for at, part, wires_WN in zip(some, parts, received_LWN, strict=True):
            part.add(wires_WN, self._outputs[at], fine, scratch)


class _LaneRows:
    """A span of a lane's rows: on every rank, one of each rank's."""

    def __init__(self, lane: Lane, span: Span, mixed: int, link: Transport, stride: int, scale: float) -> None:
        self._lane = lane
        self._span = span
        self._mixed = mixed
        self._link = link
        self._scale = scale
        spec = lane.spec if lane.carry else lane.spec._replace(dtype=lane.dtype)
        self.job = job_of(spec.codec, Rows(span.numel, span.numel, 1), spec, lane.flat.device, stride, fused=False)
        self._feedback = None
        if lane.carry is not None:
            self._feedback = Feedback(spec.feedback, 1.0 / scale if spec.feedback == "classic" else -1.0 / scale)
        self._encode = rows.encoder(self.job, by_row=0, feedback=self._feedback)
        self._memories: list[Memory] = []

    def encode(self, rank: int, wire: Tensor, scratch: Scratch) -> None:
        """Write the wire of the row for a rank."""
        lane = self._lane
        begin = rank * lane.spec.chunking.numel + self._span.begin
        span = Span(begin, begin + self._span.numel)
        x = lane.converted(lane.flat.read(span, scratch), scratch)
        memory = None
        if lane.carry is not None:
            left = x if x.dtype == torch.float32 else scratch.numbers(span.numel, torch.float32)
            memory = lane.carry.part(span, x, self._span if rank == self._link.rank else None)._replace(left=left)
            self._memories.append(memory)
        self._encode(x, wire, self._mixed ^ rank, memory, after(lane.watch, begin))

    def add(self, wires_WN: Tensor, output: Flat, fine: Fine, scratch: Scratch) -> None:
        """Write the sum of all ranks' rows for this rank, and update what feedback remembers."""
        out = output.read(self._span, scratch)
        total = out if out.dtype == self._lane.dtype else scratch.numbers(self._span.numel, self._lane.dtype)
        decode = rows.decoder(self.job, world=self._link.world, scale=self._scale)
        decode(wires_WN, total, None, None, mixed=self._mixed ^ self._link.rank)
        for memory in self._memories:
            assert self._feedback is not None
            rows.remember(memory, self._feedback, 0, self._span.numel, total, False, self._scale, fine)
        if total is not out:
            out.copy_(total)


def _finite(parts: Sequence[_LaneRows], wires_LWN: Sequence[Tensor]) -> Tensor:
    """Whether all wires of all rows are."""
    found = [rows.all_finite(part.job, wires, len(wires)) for part, wires in zip(parts, wires_LWN, strict=True)]
    return torch.stack(found).all()


def _known(fine: Tensor) -> Fine:
    """A bool on the CPU; on a GPU the tensor, for which the host does not wait."""
    return bool(fine) if fine.is_cpu else fine


class AllGather(Operation):
    """outputs_LW[lane][r] = rank r's numbers of the lane, on every rank. One message, one rounding.

    Rows may have any lengths; the chunks of a lane are those of the longest.
    """

    def __init__(self, call: IssuedCall, lanes: Sequence[Lane], outputs_LW: Sequence[Sequence[Flat]]) -> None:
        outputs = [flat for row in outputs_LW for flat in row]
        num_chunks = max(lane.spec.chunking.num_chunks for lane in lanes)
        super().__init__(call, num_chunks, outputs, [lane.flat for lane in lanes])
        self._lanes = lanes
        self._outputs_LW = outputs_LW

    def chunk(self, index: int, scratch: Scratch) -> Stages:
        link = self._link
        keys = [Key(self._step, index, at) for at in range(len(self._lanes))]
        pairs = list(zip(self._lanes, self._outputs_LW, strict=True))
        parts_LW = [[replace(n.spec.chunking, numel=flat.numel).span(index) for flat in row] for n, row in pairs]
        sized = zip(self._lanes, parts_LW, strict=True)
        sizes_WL = list(zip(*[wire_sizes(n.codec, parts, n.flat.dtype) for n, parts in sized], strict=True))
        wires = [scratch.take(sum(sizes)) for sizes in sizes_WL]
        wires_WL = [wire.split(sizes) for wire, sizes in zip(wires, sizes_WL, strict=True)]
        for at, (lane, _) in enumerate(pairs):
            part = parts_LW[at][link.rank]
            if part.numel:
                lane.codec.encode(lane.flat.read(part, scratch), wires_WL[link.rank][at], step=keys[at].of(link.rank))
        yield link.all_gather_rows(wires, self._tags[0])
        for at, (lane, row) in enumerate(pairs):
            for rank, part in enumerate(parts_LW[at]):
                if part.numel:
                    lane.codec.decode(wires_WL[rank][at], row[rank].read(part, scratch), step=keys[at].of(rank))


class Exchange(Operation):
    """outputs[r] = what rank r's inputs hold for this rank, any lengths. What a rank keeps is copied exactly."""

    def __init__(self, call: IssuedCall, outputs: Sequence[Flat], inputs: Sequence[Flat]) -> None:
        (lane,) = call.plan.lanes
        self._codec = lane.codec
        self._chunk = lane.chunking.chunk
        num_chunks = max(Chunking(flat.numel, self._chunk).num_chunks for flat in (*outputs, *inputs))
        super().__init__(call, num_chunks, outputs, inputs)
        sent = [flat.numel for flats in (outputs, inputs) for r, flat in enumerate(flats) if r != self._link.rank]
        self.chunk_bytes = sum(lane.codec.wire_bytes(min(numel, self._chunk), lane.dtype) for numel in sent)
        wire = sum(lane.codec.wire_bytes(numel, lane.dtype) for numel in sent)
        depth = -(-max(sent) // self._chunk)
        self.scratch_bytes = chunks.scratch_limit(wire, self.chunk_bytes, self.chunk_bytes, depth)

    def chunk(self, index: int, scratch: Scratch) -> Stages:
        codec = self._codec
        link = self._link
        key = Key(self._step, index)
        sends = self._messages(self._inputs, index, scratch)
        receives = self._messages(self._outputs, index, scratch)
        for _, wire, x in sends:
            if x.numel():
                codec.encode(x, wire, step=key.of(link.rank))
        lengths = [self._inputs[p].numel for p, _, _ in sends], [self._outputs[p].numel for p, _, _ in receives]
        moving = link.exchange([(p, w) for p, w, _ in sends], [(p, w) for p, w, _ in receives], self._tags[0], lengths)
        kept = Chunking(self._inputs[link.rank].numel, self._chunk).span(index)
        self._outputs[link.rank].read(kept, scratch).copy_(self._inputs[link.rank].read(kept, scratch))
        yield moving
        for peer, wire, x in receives:
            if x.numel():
                codec.decode(wire, x, step=key.of(peer))

    def _messages(self, flats: Sequence[Flat], index: int, scratch: Scratch) -> list[tuple[int, Tensor, Tensor]]:
        """(other rank, wire, numbers) of every message of a chunk.

        On gloo an empty one travels where ranks have nothing for each other: one that expects something waits for it.
        """
        spans = [Chunking(flat.numel, self._chunk).span(index) for flat in flats]
        empty = index == 0 and not self._link.on_stream
        peers = [r for r in self._link.others if spans[r].numel or empty]
        sizes = [self._codec.wire_bytes(spans[r].numel, flats[r].dtype) if spans[r].numel else 0 for r in peers]
        return [(r, scratch.take(n), flats[r].read(spans[r], scratch)) for r, n in zip(peers, sizes, strict=True)]


class Broadcast(Operation):
    """lane = the source's numbers, which every rank, the source too, decodes from the source's wires.

    The source sends every other rank a share of the wires, and these pass their shares on: no link carries more than
    one wire in either direction.
    """

    def __init__(self, call: IssuedCall, lane: Lane) -> None:
        super().__init__(call, lane.spec.chunking.num_chunks, [lane.flat])
        assert call.plan.source is not None
        self._lane = lane
        self._source = call.plan.source

    def chunk(self, index: int, scratch: Scratch) -> Stages:
        codec = self._lane.codec
        link = self._link
        span = self._lane.spec.chunking.span(index)
        key = Key(self._step, index)
        x = self._lane.flat.read(span, scratch)
        others = [rank for rank in range(link.world) if rank != self._source]
        parts = chunks.shards(Span(0, span.numel), len(others), codec.unit)
        wires = [scratch.take(size) for size in wire_sizes(codec, parts, x.dtype)]
        shares = {rank: wire for rank, wire in zip(others, wires, strict=True) if wire.numel()}
        pieces = [
            (x[slice(*part)], wire, key.of(shard))
            for shard, (part, wire) in enumerate(zip(parts, wires, strict=True))
            if part.numel
        ]
        if link.rank == self._source:
            for piece, wire, step in pieces:
                codec.encode(piece, wire, step=step)
            yield link.exchange(list(shares.items()), [], self._tags[0])
        else:
            own = [shares.pop(link.rank)] if link.rank in shares else []
            yield link.exchange([], [(self._source, wire) for wire in own], self._tags[0])
            sends = [(rank, wire) for wire in own for rank in others if rank != link.rank]
            yield link.exchange(sends, list(shares.items()), self._tags[0] + 1)
        for piece, wire, step in pieces:
            codec.decode(wire, piece, step=step)
