"""How ranks sum: in one shot, in two phases or by nodes. Every rank decodes the same wires: all end with the same bits.

One shot is an all-gather of wires: one message, one rounding, W - 1 wires sent per rank. In two phases every rank sums
its shard: two messages, two roundings, 2 (W - 1) / W wires sent per rank. On a mesh of nodes ranks sum inside a node by
one codec, across nodes by another: the slow link between nodes carries 1/B of a sum of B ranks.

A sum is described once: a chunk of it is a coroutine that encodes, starts messages and yields what it waits for. On
gloo the group's pipeline runs it (operations.AllReduce); on a stream of a GPU, which does the waiting, it is a series
of launches ([Note: Programs] in programs.py).

Legend: W ranks, N bytes of one wire; L: one per lane, R: one per rank.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from thinwire.codecs import Codec
from thinwire.collectives import chunks
from thinwire.collectives.checks import check_recodes
from thinwire.collectives.chunks import Key, Lane, LaneSpec, Scratch, Span, aligned
from thinwire.collectives.programs import Workspace, job_of
from thinwire.collectives.transport import Moving, Stages, Transport
from thinwire.errors import CollectiveError
from thinwire.kernels import hashing, reference, rows
from thinwire.kernels.rows import Bad, Feedback, Memory, Picked, Watch
from thinwire.kernels.schema import Rows

_MOST_HALF = 65280.0  # the largest float16 that bfloat16 has too: rounded up, it would be infinite
_UNTAGGED = (0, 0)  # messages of a stream, which keeps their order


@dataclass(frozen=True)
class Views:
    """The parts of its scratch that a chunk uses; L: one per lane."""

    sent: Tensor  # the rows that are sent, and later those that are gathered
    local: Tensor  # the row of this rank in them
    received: Tensor  # the rows that are received
    sent_L: list[Tensor]  # each lane's part of all rows
    received_L: list[Tensor]
    local_L: list[Tensor]  # each lane's wire in the local row
    floats_L: Sequence[Tensor]  # as many numbers as a lane asks for
    outer: "Views | None" = None  # of the sum across nodes


class SumKernels:
    """What is done to a lane on the rank at `link`; if `fused`, in one launch each where the backend has them."""

    def __init__(
        self, lane: LaneSpec, shape: Rows, link: Transport, scale: float, stride: int, *, two_phase: bool, fused: bool
    ) -> None:
        world = link.world
        self.lane = lane
        self.feedback = feedback = None
        if lane.feedback:
            self.feedback = feedback = Feedback(lane.feedback, world if lane.feedback == "classic" else -world)
        self.keeps_local = two_phase and (lane.exact_local or bool(lane.feedback))
        own = link.rank if self.keeps_local else -1
        first = lane.first_phase if two_phase else lane.codec
        encode_job = job_of(first, shape, lane, link.device, stride, fused=fused)
        self.job = job_of(lane.codec, shape, lane, link.device, stride, fused=fused)
        self.encode = rows.encoder(encode_job, skip=own, by_row=int(two_phase), feedback=feedback)
        self.recode: rows.Recode | None = None
        self.row = link.rank if two_phase else 0
        if two_phase and link.rank <= shape.short:
            size = scale if self.keeps_local else abs(scale)
            self.recode = rows.recoder(self.job, link.rank, world, scale=size, own=own, feedback=feedback)
        sign = -1.0 if scale < 0 and not self.keeps_local else 1.0
        added = 1 if two_phase else world
        scale_out = sign if two_phase else scale
        self.decode = rows.decoder(self.job, world=added, scale=scale_out, own=own, share=scale, feedback=feedback)
        self.scan = rows.scanner(self.job, added) if feedback else None
        self.left = lane.numel if feedback and lane.dtype != torch.float32 else 0  # numbers that x has too few bits for


def lane_rows(lane: LaneSpec, world: int, *, two_phase: bool) -> Rows:
    """The shards of a lane, one per rank; in one phase there is one."""
    if not two_phase:
        return Rows(lane.numel, lane.numel, 1)
    longest = chunks.shards(Span(0, lane.numel), world, lane.codec.unit)[0]
    return Rows(lane.numel, longest.numel, world)


class SumChunk:
    """A sum of lanes over the ranks, in place, all in one message; no lane is empty."""

    _outer_watched = False  # True => watches see another sum

    def __init__(
        self, link: Transport, lanes: Sequence[LaneSpec], scale: float, *, two_phase: bool, fused: bool = True
    ) -> None:
        self._link = link
        self._two_phase = two_phase
        shapes = [lane_rows(lane, link.world, two_phase=two_phase) for lane in lanes]
        pairs = list(zip(lanes, shapes, strict=True))
        sizes = [lane.codec.wire_bytes(shape.each, lane.encoded) for lane, shape in pairs]
        self.stride = stride = sum(sizes)
        order = sorted(range(len(sizes)), key=sizes.__getitem__)  # the longest last: only what a shard fills is sent
        starts = dict(zip(order, itertools.accumulate([0, *(sizes[i] for i in order)]), strict=False))
        self._starts = [starts[i] for i in range(len(sizes))]  # of lanes in a row
        self._matrix = link.world * self.stride
        self.kernels = [SumKernels(*pair, link, scale, stride, two_phase=two_phase, fused=fused) for pair in pairs]
        self._local_sizes = [lane.job.layout(lane.row).nbytes for lane in self.kernels]
        # Lanes without feedback may be Picked: encoded before the first lane, where they leave zeros, decoded after it.
        # Lanes without feedback find out, as they are decoded, whether they are finite; the others have to know before.
        self._last_first = sorted(range(len(lanes)), key=lambda i: bool(lanes[i].feedback))
        self._used_R = [self._used(rank) for rank in range(link.world)]
        self.floats = [(lane.left, torch.float32) for lane in self.kernels]
        self.nbytes = (1 + two_phase) * self._matrix + _nbytes(self.floats)  # of its scratch

    @property
    def sent_bytes(self) -> int:
        """Bytes of wires that this rank hands to the transport; of padding it sends none but on a stream."""
        own = self._used_R[self._link.rank]
        shards = sum(self._used_R) - own if self._two_phase else 0
        return shards + (self._link.world - 1) * own

    def stages(
        self,
        views: Views,
        xs: Sequence[Any],
        mixed: Sequence[int],
        tags: Sequence[int] | None,
        memories: Sequence[Memory | None] | None = None,
        bad: Bad | None = None,
        watches: Sequence[Watch | None] | None = None,
    ) -> Stages:
        """x = scale * sum of x over the ranks: encode the shards, send each to one rank, encode sums, send them to all.

        In one shot there is one shard, which every rank sends to all others. By lane: flat numbers, or Picked; the step
        (hashing.row_step); the memory where there is feedback; what looks at each row as it is encoded. Without tags
        (across nodes, inside) nothing is sent: kernels are to be compiled. No message is awaited on a stream.
        """
        link = self._link
        kept: Sequence[Memory | None] = [None] * len(xs)
        if memories is not None:  # what is left goes to x itself, or to scratch if x has too few bits
            lefts = [left if left.numel() else x for x, left in zip(xs, views.floats_L, strict=True)]
            kept = [memory and memory._replace(left=left) for memory, left in zip(memories, lefts, strict=True)]
        sent_L = views.sent_L if self._two_phase else views.local_L
        for i in self._last_first[::-1]:
            look = () if watches is None or self._outer_watched else (watches[i],)
            self.kernels[i].encode(xs[i], sent_L[i], mixed[i], kept[i], *look)
        if self._two_phase:
            if tags is not None:
                moving = link.all_to_all(views.received, views.sent, self._used_R, tags[-1])
                if moving is not None:
                    yield moving
            yield from self._reduce(views, xs, mixed, tags, kept, watches)
        if tags is not None:
            moving = link.all_gather(views.sent, views.local, self._used_R, tags[-1] + self._two_phase)
            if moving is not None:
                yield moving
        if bad is not None:
            for lane, wires in zip(self.kernels, views.sent_L, strict=True):
                if lane.scan is not None:
                    lane.scan(wires, bad)
        for i in self._last_first:
            self.kernels[i].decode(views.sent_L[i], xs[i], kept[i], bad, mixed=mixed[i])

    def _reduce(
        self, views: Views, xs: Sequence[Any], mixed: Sequence[int], tags: Any, kept: Any, watches: Any
    ) -> Iterable[Moving]:
        """Write the wire of the own shard's sum, of every lane."""
        for i, lane in enumerate(self.kernels):
            if lane.recode is not None:
                x = xs[i].copy if isinstance(xs[i], Picked) else xs[i]
                own = x if lane.keeps_local else None
                lane.recode(views.received_L[i], views.local_L[i], mixed[i], own, kept[i])
        return ()

    def views(self, sent: Tensor, received: Tensor, floats_L: Sequence[Tensor]) -> Views:
        """The views of matrices of rows."""
        local = sent[self._link.rank * self.stride :][: self.stride]
        local_L = [local[b : b + nbytes] for b, nbytes in zip(self._starts, self._local_sizes, strict=True)]
        sent_L, received_L = ([rows[b:] for b in self._starts] for rows in (sent, received))
        return Views(sent, local, received, sent_L, received_L, local_L, floats_L)

    def split(self, buffer: Tensor) -> Views:
        """One or two matrices of rows, then the floats."""
        scratch = Scratch(buffer)
        sent = scratch.take(self._matrix)
        received = scratch.take(self._matrix) if self._two_phase else sent
        return self.views(sent, received, [scratch.numbers(*each) for each in self.floats])

    def _used(self, row: int) -> int:
        """How much of a row is used, up to the last wire in it."""
        if not self._two_phase:
            return self.stride
        filled = [(start, lane.job) for start, lane in zip(self._starts, self.kernels, strict=True)]
        return max((start + job.layout(row).nbytes for start, job in filled if row <= job.rows.short), default=0)


def _nbytes(floats: Sequence[tuple[int, torch.dtype]]) -> int:
    return sum(aligned(numel * dtype.itemsize) for numel, dtype in floats)


class NodesChunk(SumChunk):
    """A reduce-scatter inside every node, a sum across nodes, an all-gather inside.

    There is no feedback; watches see what is lost across. The scale is applied across nodes.
    """

    _outer_watched = True

    def __init__(
        self, links: Sequence[Transport], lanes: Sequence[LaneSpec], scale: float, chunk: int, *, fused: bool
    ) -> None:
        across, inside = links
        super().__init__(inside, lanes, 1.0, two_phase=True, fused=fused)
        self._chunk = chunk
        self._scale = scale
        self._spans = [lane.job.rows.span(inside.rank) for lane in self.kernels]  # the own shards
        numels = {i: end - begin for i, (begin, end) in enumerate(self._spans) if end > begin}
        jobs = {i: replace(self.kernels[i].job, rows=Rows(numel, numel, 1)) for i, numel in numels.items()}
        self._adds = {i: rows.decoder(job, world=inside.world) for i, job in jobs.items()}
        self._puts = {i: rows.encoder(job, by_row=0, first_row=inside.rank) for i, job in jobs.items()}
        self.floats = [(numels.get(i, 0), lane.outer(0).dtype) for i, lane in enumerate(lanes)]  # their sums
        self._outer: SumChunk | None = None
        self._own_bytes = self.nbytes = self.nbytes + _nbytes(self.floats)
        phases = 1 + (fewest_roundings(across.world) == "two_phase")
        totals = [lanes[i].outer(numel) for i, numel in numels.items()]
        self._outer_specs = [total._replace(dtype=total.encoded) for total in totals]
        if numels and across.world > 1:
            self._outer = SumChunk(across, self._outer_specs, scale, two_phase=phases == 2, fused=fused)
            self.nbytes += self._outer.nbytes
        self._outer_waits = phases if across.world > 1 else 0  # whether the own shards hold anything or not

    @property
    def sent_bytes(self) -> int:
        """Both phases inside, and the own shards' sums across."""
        return super().sent_bytes + (self._outer.sent_bytes if self._outer else 0)

    def split(self, buffer: Tensor) -> Views:
        """The own views, then those of the sum across nodes."""
        outer = None if self._outer is None else self._outer.split(buffer[self._own_bytes :])
        return replace(super().split(buffer), outer=outer)

    def _reduce(
        self, views: Views, xs: Sequence[Any], mixed: Sequence[int], tags: Any, kept: Any, watches: Any
    ) -> Iterable[Moving]:
        """Add the own shards inside the node, then over the nodes, where the step is the shard's key."""
        rank = self._link.rank
        for i, add in self._adds.items():
            add(views.received_L[i], views.floats_L[i], None, None, mixed=mixed[i] ^ rank)
        pairs = zip(self._adds, self._outer_specs, strict=True)
        totals = {i: views.floats_L[i].to(spec.dtype) for i, spec in pairs}
        if self._outer is not None:
            assert views.outer is not None
            steps = [Key(hashing.row_step(mixed[i], rank), self._chunk).mixed() for i in totals]
            looks = watches and [after(watches[i], self._spans[i][0]) for i in totals]
            yield from self._outer.stages(views.outer, [*totals.values()], steps, tags and tags[:1], watches=looks)
        elif self._outer_waits:  # other ranks' shards hold something
            yield from [Moving()] * self._outer_waits
        else:
            for total in totals.values():
                total.mul_(self._scale)
        for i, put in self._puts.items():
            lane = self.kernels[i].lane
            put(fitted(totals[i], lane.dtype, lane.outer(0).codec), views.local_L[i], mixed[i], None)


def after(watch: Watch | None, begin: int) -> Watch | None:
    """A watch of numbers that lie behind `begin` others."""
    return watch and (lambda span, x, read: watch(Span(begin + span[0], begin + span[1]), x, read))


class SumProgram:
    """A sum of lanes, in chunks where the message is long; over one link, or two of a mesh: across nodes, inside."""

    def __init__(
        self, links: Sequence[Transport], algorithm: str, lanes: Sequence[LaneSpec], scale: float, *, fused: bool
    ) -> None:
        self.chunkings = [lane.chunking for lane in lanes]
        self.count = max(chunking.num_chunks for chunking in self.chunkings)
        # The lanes that have anything in a chunk, and their sum.
        self.chunks: list[tuple[list[int], SumChunk]] = []
        made: dict[tuple[int, ...], SumChunk] = {}  # shared by chunks of the same lengths
        for index in range(self.count):
            lengths = tuple(chunking.span(index).numel for chunking in self.chunkings)
            some = [i for i, numel in enumerate(lengths) if numel]
            parts = [lanes[i]._replace(numel=lengths[i]) for i in some]
            parts = [lane if lane.feedback else lane._replace(dtype=lane.encoded) for lane in parts]
            if len(links) == 2:
                made[lengths] = NodesChunk(links, parts, scale, index, fused=fused)
            elif lengths not in made:
                made[lengths] = SumChunk(links[0], parts, scale, two_phase=algorithm == "two_phase", fused=fused)
            self.chunks.append((some, made[lengths]))
        self.waits = 0  # of a chunk on a mesh of nodes, which waits more than twice
        if len(links) == 2 and links[0].world > 1:
            self.waits = 3 + (fewest_roundings(links[0].world) == "two_phase")
        self.scratch_bytes = aligned(max(chunk.nbytes for _, chunk in self.chunks))

    @property
    def sent_bytes(self) -> int:
        """Bytes of wires that this rank hands to the transport."""
        return sum(chunk.sent_bytes for _, chunk in self.chunks)

    def parts(self, index: int, lanes: Sequence[Any]) -> list[tuple[Any, Span]]:
        """The lanes that have anything in a chunk, with their spans; instead of lanes, what belongs to each."""
        return [(lanes[i], self.chunkings[i].span(index)) for i in self.chunks[index][0]]

    def begin(
        self,
        index: int,
        views: Views,
        parts: Sequence[tuple[Lane, Span]],
        xs: Sequence[Tensor],
        step: int,
        tags: Any,
        *,
        noted: bool,
    ) -> tuple[Stages, Bad | None]:
        """A chunk of parts of lanes, whose numbers are xs, where kernels are not fused; and where it notes bad ones."""
        some, chunk = self.chunks[index]
        memories = [n.carry and n.carry.part(span, x, span) for (n, span), x in zip(parts, xs, strict=True)]
        looks = [after(lane.watch, span.begin) for lane, span in parts]
        bad = None
        if noted or any(memories):
            bad = Bad(torch.zeros(2, dtype=torch.int32, device=xs[0].device), 1)
        mixed = [Key(step, index, i).mixed() for i in some]
        how = mixed, tags, memories if any(memories) else None, bad, looks if any(looks) else None
        return chunk.stages(views, xs, *how), bad

    def __call__(
        self,
        space: Workspace,
        xs: Sequence[Any],
        step: int,
        memories: Sequence[Memory | None] | None = None,
        bad: Bad | None = None,
    ) -> None:
        """See Program; with the memories of lanes, and a place to note which of `count` chunks are not finite."""
        tags = None if space.dry_run else _UNTAGGED
        mixed = hashing.mix64(step)
        for index, (some, chunk) in enumerate(self.chunks):
            parts, pieces = xs, memories
            if self.count > 1:
                parts = [x.view(-1)[slice(*span)] for x, span in self.parts(index, xs)]
                if memories is not None:
                    pieces = [memory and memory.part(*span) for memory, span in self.parts(index, memories)]
            noted = None if bad is None else bad._replace(call=bad.call + index)
            steps = [mixed ^ (i << 48 | index << 16) for i in some]  # as Key mixes them
            for _ in chunk.stages(space.views(chunk), parts, steps, tags, pieces, noted):
                pass  # the stream waits


def fewest_roundings(world: int) -> Literal["one_shot", "two_phase"]:
    """one_shot for two ranks: they send as many bytes as in two phases, and round once."""
    return "one_shot" if world <= 2 else "two_phase"


def flat_algorithm(asked: str, codecs: Sequence[Codec], world: int) -> str:
    """How lanes in these codecs are summed on one group; "auto" depends on nothing else, so that runs repeat."""
    if asked == "two_phase":
        check_recodes(codecs, "a sum in two phases")
    if asked != "auto":
        return asked
    return fewest_roundings(world) if all(codec.recodes for codec in codecs) else "one_shot"


def fitted(total: Tensor, dtype: torch.dtype, codec: Codec) -> Tensor:
    """A decoded sum in `dtype`; numbers that the codec's error pushed past its largest number become that number."""
    if dtype.itemsize >= total.itemsize:
        return total.to(dtype)
    most = _MOST_HALF if dtype == torch.float16 else torch.finfo(dtype).max
    return reference.saturate(codec.encoding(total.dtype).format, total, most).to(dtype)


def check_order(mesh: DeviceMesh) -> None:
    """Raise unless a rank has the same number in its node as the ranks it meets across nodes."""
    order = mesh.mesh.argsort(1)
    if not bool((order == order[0]).all()):
        raise CollectiveError(
            f"every row of the mesh, a node, must list its ranks in the same order, got {mesh.mesh.tolist()}: "
            "sort each row"
        )
