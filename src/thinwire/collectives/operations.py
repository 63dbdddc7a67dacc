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

from thinwire.collectives.channel import IssuedCall
from thinwire.collectives.chunks import (
    NOTE_BYTES,
    Chunking,
    Flat,
    Scratch,
    Span,
    aligned,
    others_first,
    shards,
    wire_sizes,
)
from thinwire.collectives.lane import Key, Lane, LaneChunk, LaneSpec, all_true, check_finite, lane_chunks
from thinwire.collectives.pipeline import Operation
from thinwire.collectives.sums import Hierarchical, Reducer, columns
from thinwire.collectives.transport import Stages, Waitable
from thinwire.feedback import Fine

# Takes (place, began, ended) of a chunk's work: place 0 before its first message, 1 between two, -1 after the last.
Meter = Callable[[int, float, float], None]


class AllReduce(Operation):
    """Sum every lane over the ranks, in place.

    [Note: In step] Chunks that wait more than twice are one chunk to the pipeline. Each is a stage behind the one
    before it. In a round one is started, and then all that are under way are waited for once, the youngest first: so
    its next message is on its way while older ones are waited for. All ranks do this in the same order whatever their
    delays, so that each has started what others wait for.
    """

    def __init__(
        self, call: IssuedCall, lanes: Sequence[Lane], reducer: Reducer, scale: float, meter: Meter | None = None
    ) -> None:
        super().__init__(call, max(lane.spec.chunking.num_chunks for lane in lanes), [lane.flat for lane in lanes])
        self._lanes = lanes
        self._reducer = reducer
        self._scale = scale
        self._meter = meter
        if isinstance(reducer, Hierarchical):
            self.in_order = True
            self._count = self.num_chunks
            self.num_chunks = 1
            self._each = aligned(self.chunk_bytes)  # of one
            self._slots = min(self._count, reducer.messages + 1)
            self.chunk_bytes = self._slots * self._each
            self.scratch_bytes = max(self.scratch_bytes, self.chunk_bytes)

    def chunk(self, index: int, scratch: Scratch) -> Stages:
        return self._in_step(scratch) if self.in_order else self._sum(index, scratch)

    def _sum(self, index: int, scratch: Scratch) -> Stages:
        """The reducer's stages on one span of every lane."""
        chunks = lane_chunks(self._lanes, index, self._step, scratch)
        stages = self._reducer.stages(chunks, self._scale, self._tags, scratch)
        if self._meter is None:
            yield from stages
        else:
            began = time.perf_counter()
            for place, awaited in enumerate(stages):
                self._meter(place, began, time.perf_counter())
                yield awaited
                began = time.perf_counter()
            self._meter(-1, began, time.perf_counter())
        for chunk in chunks:
            chunk.lane.flat.write(chunk.span(chunk.whole), chunk.source)

    def _in_step(self, scratch: Scratch) -> Stages:
        """All chunks. See [Note: In step]."""
        under_way: list[tuple[Stages, Sequence[Waitable]]] = []  # the youngest first
        for place in itertools.count():
            begun = []
            if place < self._count:
                begin = place % self._slots * self._each
                stages = self._sum(place, scratch.part(begin, self._each))
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

    def __init__(self, call: IssuedCall, lanes: Sequence[Lane], outputs: Sequence[Flat], scale: float) -> None:
        chunks = max(lane.spec.chunking.num_chunks for lane in lanes)
        super().__init__(call, chunks, outputs, [lane.flat for lane in lanes])
        self._lanes = lanes
        self._scale = scale
        self._note = NOTE_BYTES if any(lane.carry for lane in lanes) else 0

    def chunk(self, index: int, scratch: Scratch) -> Stages:
        link = self._link
        spans = [lane.spec.chunking.span(index) for lane in self._lanes]
        pairs = zip(self._lanes, spans, strict=True)
        sizes = [
            lane.codec.wire_bytes(span.numel, lane.dtype) if span.numel or not index else 0 for lane, span in pairs
        ]
        sent_WN = scratch.matrix(link.world, sum(sizes) + self._note)
        received_WN = scratch.matrix(link.world, sum(sizes) + self._note)
        rows: list[list[LaneChunk]] = [[] for _ in self._lanes]
        for rank in others_first(link.rank, link.world):
            wires = columns((received_WN if rank == link.rank else sent_WN)[rank], sizes)
            for at, (lane, span) in enumerate(zip(self._lanes, spans, strict=True)):
                if sizes[at]:
                    rows[at].append(self._encoded(Key(self._step, index, at), lane, rank, span, wires[at], scratch))
        if self._note:
            parts = [part for parts in rows for part in parts]
            found = [part.lane.codec.all_finite(part.wires[0][None], part.x.numel(), part.x.dtype) for part in parts]
            # Every message, and the own row, notes whether all that this rank sends is finite.
            fine_here = torch.stack(found).all().to(torch.uint8)
            sent_WN[:, -NOTE_BYTES] = fine_here
            received_WN[link.rank, -NOTE_BYTES] = fine_here
        peers = [rank for rank in range(link.world) if rank != link.rank]
        yield link.exchange([(p, sent_WN[p]) for p in peers], [(p, received_WN[p]) for p in peers], self._tags[0])
        fine = all_true(received_WN[:, -NOTE_BYTES] == 1) if self._note else True
        for parts, wires_WN in zip(rows, columns(received_WN, sizes), strict=True):
            for part in parts:
                part.received_WN = wires_WN
        check_finite([parts[0] for parts in rows if parts], LaneChunk.all_finite)
        for at, parts in enumerate(rows):
            if parts:
                self._add(at, spans[at], parts, fine, scratch)

    def _encoded(self, key: Key, lane: Lane, rank: int, span: Span, wire: Tensor, scratch: Scratch) -> LaneChunk:
        """Write the wire of a span of the row for a rank."""
        begin = rank * lane.spec.chunking.numel + span.begin
        part = lane.chunk(Span(begin, begin + span.numel), key, scratch)
        part.wires = [wire]
        part.load()
        part.encode(part.whole, lane.codec, wire, key.of(rank))
        return part

    def _add(self, at: int, span: Span, rows: Sequence[LaneChunk], fine: Fine, scratch: Scratch) -> None:
        """Write a span of the output of lane `at`, and update what its feedback remembers."""
        lane = self._lanes[at]
        output = self._outputs[at]
        step = rows[0].key.of(self._link.rank)
        out = output.read(span, scratch)
        total = out if out.dtype == lane.dtype else scratch.numbers(span.numel, lane.dtype)
        lane.codec.decode_sum(rows[0].received_WN, total, scale=self._scale, step=step)
        if lane.carry is not None:
            for part in rows:
                lane.carry.keep(part.span(part.whole), part.x, self._scale, fine)
            lane.carry.result(span, total, fine)
        if total is not out:
            out.copy_(total)
        output.write(span, out)


class Gather(Operation):
    """outputs_LW[lane][r] = rank r's numbers of the lane, on every rank. One message, one rounding.

    Rows may have any lengths; the chunks of a lane are those of the longest.
    """

    def __init__(self, call: IssuedCall, lanes: Sequence[Lane], outputs_LW: Sequence[Sequence[Flat]]) -> None:
        outputs = [flat for row in outputs_LW for flat in row]
        chunks = max(lane.spec.chunking.num_chunks for lane in lanes)
        super().__init__(call, chunks, outputs, [lane.flat for lane in lanes])
        self._lanes = lanes
        self._outputs_LW = outputs_LW
        pairs = zip(lanes, outputs_LW, strict=True)
        self._chunkings_LW = [[replace(lane.spec.chunking, numel=flat.numel) for flat in row] for lane, row in pairs]

    def chunk(self, index: int, scratch: Scratch) -> Stages:
        link = self._link
        keys = [Key(self._step, index, at) for at in range(len(self._lanes))]
        parts_LW = [[chunking.span(index) for chunking in row] for row in self._chunkings_LW]
        pairs = zip(self._lanes, parts_LW, strict=True)
        sizes_LW = [wire_sizes(lane.codec, parts, lane.flat.dtype) for lane, parts in pairs]
        sizes_WL = list(zip(*sizes_LW, strict=True))
        wires = [scratch.take(sum(sizes)) for sizes in sizes_WL]
        wires_WL = [columns(wire, sizes) for wire, sizes in zip(wires, sizes_WL, strict=True)]
        for at, lane in enumerate(self._lanes):
            part = parts_LW[at][link.rank]
            if part.numel:
                lane.codec.encode(lane.flat.read(part, scratch), wires_WL[link.rank][at], step=keys[at].of(link.rank))
        yield link.gather(wires, self._tags[0])
        for at, lane in enumerate(self._lanes):
            for rank, part in enumerate(parts_LW[at]):
                if part.numel:
                    out = self._outputs_LW[at][rank].read(part, scratch)
                    lane.codec.decode(wires_WL[rank][at], out, step=keys[at].of(rank))


class Exchange(Operation):
    """outputs[r] = what rank r's inputs hold for this rank, any lengths. What a rank keeps is copied exactly."""

    def __init__(self, call: IssuedCall, lane: LaneSpec, outputs: Sequence[Flat], inputs: Sequence[Flat]) -> None:
        self._codec = lane.codec
        self._chunk = lane.chunking.chunk
        chunks = max(Chunking(flat.numel, self._chunk).num_chunks for flat in (*outputs, *inputs))
        super().__init__(call, chunks, outputs, inputs)

    def chunk(self, index: int, scratch: Scratch) -> Stages:
        codec = self._codec
        link = self._link
        key = Key(self._step, index)
        sends = self._messages(self._inputs, index, scratch)
        receives = self._messages(self._outputs, index, scratch)
        for peer, wire, part in sends:
            if part.numel:
                codec.encode(self._inputs[peer].read(part, scratch), wire, step=key.of(link.rank))
        lengths = [self._inputs[p].numel for p, _, _ in sends], [self._outputs[p].numel for p, _, _ in receives]
        moving = link.exchange([(p, w) for p, w, _ in sends], [(p, w) for p, w, _ in receives], self._tags[0], lengths)
        kept = Chunking(self._inputs[link.rank].numel, self._chunk).span(index)
        self._outputs[link.rank].read(kept, scratch).copy_(self._inputs[link.rank].read(kept, scratch))
        yield moving
        for peer, wire, part in receives:
            if part.numel:
                out = self._outputs[peer].read(part, scratch)
                codec.decode(wire, out, step=key.of(peer))

    def _messages(self, flats: Sequence[Flat], index: int, scratch: Scratch) -> list[tuple[int, Tensor, Span]]:
        """(other rank, wire, span) of every message of a chunk.

        On gloo an empty one travels where ranks have nothing for each other: one that expects something waits for it.
        """
        spans = [Chunking(flat.numel, self._chunk).span(index) for flat in flats]
        empty = index == 0 and not self._link.on_stream
        peers = [r for r in others_first(self._link.rank, self._link.world)[:-1] if spans[r].numel or empty]
        sizes = [self._codec.wire_bytes(spans[r].numel, flats[r].dtype) if spans[r].numel else 0 for r in peers]
        return [(r, scratch.take(nbytes), spans[r]) for r, nbytes in zip(peers, sizes, strict=True)]


class Broadcast(Operation):
    """lane = the source's numbers, which every rank, the source too, decodes from the source's wires.

    The source sends every other rank a share of the wires, and these pass their shares on: no link carries more than
    one wire in either direction.
    """

    def __init__(self, call: IssuedCall, lane: Lane, source: int) -> None:
        super().__init__(call, lane.spec.chunking.num_chunks, [lane.flat])
        self._lane = lane
        self._source = source

    def chunk(self, index: int, scratch: Scratch) -> Stages:
        codec = self._lane.codec
        link = self._link
        span = self._lane.spec.chunking.span(index)
        key = Key(self._step, index)
        x = self._lane.flat.read(span, scratch)
        others = [rank for rank in range(link.world) if rank != self._source]
        parts = shards(Span(0, span.numel), len(others), codec.unit)
        wires = [scratch.take(size) for size in wire_sizes(codec, parts, x.dtype)]
        shares = {rank: wire for rank, wire in zip(others, wires, strict=True) if wire.numel()}
        if link.rank == self._source:
            for shard, (wire, part) in enumerate(zip(wires, parts, strict=True)):
                if part.numel:
                    codec.encode(x[part.begin : part.end], wire, step=key.of(shard))
            yield link.exchange(list(shares.items()), [], self._tags[0])
        else:
            share = shares.pop(link.rank, None)
            yield link.exchange([], [] if share is None else [(self._source, share)], self._tags[0])
            sends = [] if share is None else [(rank, share) for rank in others if rank != link.rank]
            yield link.exchange(sends, list(shares.items()), self._tags[0] + 1)
        for shard, (wire, part) in enumerate(zip(wires, parts, strict=True)):
            if part.numel:
                codec.decode(wire, x[part.begin : part.end], step=key.of(shard))
        self._lane.flat.write(span, x)
