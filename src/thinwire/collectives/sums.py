"""How ranks sum: in one shot, in two phases or by nodes. Every rank decodes the same wires: all end with the same bits.

One shot is an all-gather of wires: one message, one rounding, W - 1 wires sent per rank. In two phases every rank sums
its shard: two messages, two roundings, 2 (W - 1) / W wires sent per rank. On a mesh of nodes ranks sum inside a node by
one codec, across nodes by another: the slow link between nodes carries 1/B of a sum of B ranks.

Legend: W ranks, N bytes of one wire.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from thinwire.codecs import Codec, Identity
from thinwire.collectives.checks import check_recodes
from thinwire.collectives.chunks import Flat, Scratch, Span, aligned, others_first, shards, wire_sizes
from thinwire.collectives.lane import Key, Lane, LaneChunk, LaneSpec, Watch, check_finite, decoded
from thinwire.collectives.transport import Stages, Transport, Waitable
from thinwire.errors import CollectiveError
from thinwire.feedback import Fine
from thinwire.kernels import reference

_MOST_HALF = 65280.0  # the largest float16 that bfloat16 has too: rounded up, it would be infinite


@dataclass(frozen=True)
class OneShot:
    """Every rank sends all of its numbers to every other."""

    transport: Transport

    def scratch_bytes(self, lane: LaneSpec, numel: int) -> int:
        """W wires of a lane's part of a chunk."""
        return self.transport.world * lane.codec.wire_bytes(numel, lane.encoded)

    def sent_bytes(self, lane: LaneSpec, numel: int) -> int:
        """The wire, to all others."""
        return (self.transport.world - 1) * lane.codec.wire_bytes(numel, lane.encoded) if numel else 0

    def stages(self, chunks: Sequence[LaneChunk], scale: float, tags: tuple[int, ...], scratch: Scratch) -> Stages:
        """Encode, send to all, add all: x = scale * sum of x over the ranks."""
        link = self.transport
        sizes = [chunk.lane.codec.wire_bytes(chunk.x.numel(), chunk.x.dtype) for chunk in chunks]
        wires_WN = scratch.matrix(link.world, sum(sizes))
        for chunk, received_WN in zip(chunks, columns(wires_WN, sizes), strict=True):
            chunk.received_WN = received_WN
            chunk.load()
            chunk.encode(chunk.whole, chunk.lane.codec, received_WN[link.rank], chunk.key.of(0))
        yield link.gather(wires_WN.unbind(), tags[0])
        fine = check_finite(chunks, LaneChunk.all_finite)
        for chunk in chunks:
            carry = chunk.lane.carry
            span = chunk.span(chunk.whole)
            if carry is not None:
                carry.keep(span, chunk.x, scale, fine)
            chunk.lane.codec.decode_sum(chunk.received_WN, chunk.x, scale=scale, step=chunk.key.of(0))
            if carry is not None:
                carry.result(span, chunk.x, fine)
            chunk.write()


def columns(wires_WN: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The lanes' parts of rows of wires."""
    edges = [0, *itertools.accumulate(sizes)]
    return [wires_WN[..., begin:end] for begin, end in itertools.pairwise(edges)]


@dataclass(frozen=True)
class TwoPhase:
    """A reduce-scatter of wires, and an all-gather of wires."""

    transport: Transport

    def scratch_bytes(self, lane: LaneSpec, numel: int) -> int:
        """Wires of all shards to send, and W wires of the own shard; the reduced wires take the place of the first."""
        sizes = self._sizes(lane, numel)
        return sum(sizes) + self.transport.world * sizes[0]  # the first shard is the longest

    def sent_bytes(self, lane: LaneSpec, numel: int) -> int:
        """The wires of others' shards to them, then the own shard's to all others."""
        sizes = self._sizes(lane, numel)
        return sum(sizes) + (self.transport.world - 2) * sizes[self.transport.rank]

    def _sizes(self, lane: LaneSpec, numel: int) -> list[int]:
        return wire_sizes(lane.codec, shards(Span(0, numel), self.transport.world, lane.codec.unit), lane.encoded)

    def stages(self, chunks: Sequence[LaneChunk], scale: float, tags: tuple[int, ...], scratch: Scratch) -> Stages:
        """Encode the shards, send each to its rank, recode the own one's sum, send it to all, decode all."""
        link = self.transport
        wires, moving = send_shards(link, chunks, tags[0], scratch)
        yield moving
        for chunk in chunks:
            _reduce_shard(chunk, link, scale)
        yield link.gather(wires, tags[0] + 1)
        fine = check_finite(chunks, sums_are_finite)
        for chunk in chunks:
            finish(chunk, link, scale, fine)


def send_shards(
    link: Transport, chunks: Sequence[LaneChunk], tag: int, scratch: Scratch
) -> tuple[list[Tensor], Sequence[Waitable]]:
    """The first phase of a sum: every rank gets its shard from all ranks.

    Returns the wires of all shards, with all lanes (the own shard's are not written yet), and the messages under way.
    """
    sizes_LW = [wire_sizes(chunk.lane.codec, chunk.split(link.world), chunk.x.dtype) for chunk in chunks]
    sizes_WL = [[sizes[shard] for sizes in sizes_LW] for shard in range(link.world)]
    wires = [scratch.take(sum(sizes)) for sizes in sizes_WL]
    received_WN = scratch.matrix(link.world, wires[link.rank].numel())
    wires_WL = [columns(wire, sizes) for wire, sizes in zip(wires, sizes_WL, strict=True)]
    for lane, (chunk, received) in enumerate(zip(chunks, columns(received_WN, sizes_WL[link.rank]), strict=True)):
        chunk.wires = [wires_L[lane] for wires_L in wires_WL]
        chunk.received_WN = received
        chunk.load()
        for shard, part in _filled(chunk, link):
            if shard == link.rank and chunk.lane.keeps_local:
                chunk.compensate(part)  # its numbers stay as they are
                continue
            wire = received[shard] if shard == link.rank else chunk.wires[shard]
            chunk.encode(part, chunk.lane.spec.first_phase, wire, chunk.key.of(shard))
    peers = others_first(link.rank, link.world)[:-1]
    sends = [(peer, wires[peer]) for peer in peers if wires[peer].numel()]
    receives = [(peer, received_WN[peer]) for peer in sorted(peers) if wires[link.rank].numel()]
    return wires, link.exchange(sends, receives, tag)


def _filled(chunk: LaneChunk, link: Transport) -> list[tuple[int, Span]]:
    """Shards that hold anything, this rank's own last."""
    order = others_first(link.rank, link.world)
    return [(shard, chunk.shards[shard]) for shard in order if chunk.shards[shard].numel]


def _reduce_shard(chunk: LaneChunk, link: Transport, scale: float) -> None:
    """Write the wire of the own shard's sum."""
    part = chunk.shards[link.rank]
    if not part.numel:
        return
    lane = chunk.lane
    step = chunk.key.of(link.rank)
    wire = chunk.wires[link.rank]
    if not lane.keeps_local:
        dtype = chunk.x.dtype
        lane.codec.recode(chunk.received_WN, wire, part.numel, scale=abs(scale), step=step, dtype=dtype, trusted=True)
        return
    total = _sum_of_others(chunk, link, scale)
    local = chunk.numbers(part)
    if lane.carry is None:
        total.add_(local, alpha=scale)
    else:
        lane.carry.reduced(local, total, scale)
    lane.codec.encode(total, wire, step=step)


def _sum_of_others(chunk: LaneChunk, link: Transport, scale: float) -> Tensor:
    """Sum the others' wires of the own shard. The last one moves to the place of the own, which was not written."""
    last = link.world - 1
    if link.rank != last:
        chunk.received_WN[link.rank].copy_(chunk.received_WN[last])
    total = torch.empty(chunk.shards[link.rank].numel, dtype=torch.float32, device=chunk.x.device)
    chunk.lane.codec.decode_sum(chunk.received_WN[:last], total, scale=scale, step=chunk.key.of(link.rank))
    return total


def sums_are_finite(chunk: LaneChunk) -> Tensor:
    """Whether all ranks' numbers of all shards are: the sums hold what was not."""
    checks = [
        chunk.lane.codec.all_finite(wire[None], part.numel, chunk.x.dtype)
        for wire, part in zip(chunk.wires, chunk.shards, strict=True)
        if part.numel
    ]
    return torch.stack(checks).all() if checks else torch.ones((), dtype=torch.bool, device=chunk.x.device)


def finish(chunk: LaneChunk, link: Transport, scale: float, fine: Fine) -> None:
    codec = chunk.lane.codec
    carry = chunk.lane.carry
    sign = -1.0 if scale < 0 else 1.0
    for shard, part in _filled(chunk, link):
        x = chunk.numbers(part)
        step = chunk.key.of(shard)
        if carry is None:
            codec.decode(chunk.wires[shard], x, scale=sign, step=step)
            continue
        span = chunk.span(part)
        if shard == link.rank:
            result = decoded(codec, chunk.wires[shard], part.numel, step)
            carry.keep_local(span, x, result, fine)
            x.copy_(result)
        else:
            carry.keep(span, x, scale, fine)
            codec.decode(chunk.wires[shard], x, step=step)
        carry.result(span, x, fine)
    chunk.write()


@dataclass(frozen=True)
class Hierarchical:
    """A reduce-scatter inside every node, a sum across nodes, an all-gather inside.

    Without feedback; a lane's watch sees what is lost across.
    """

    across: Transport
    inside: Transport

    def scratch_bytes(self, lane: LaneSpec, numel: int) -> int:
        """Both phases inside, the sums of the own shards, and what travels across."""
        outer = lane.outer(shards(Span(0, numel), self.inside.world, lane.codec.unit)[0].numel)
        sums = aligned(outer.numel * outer.dtype.itemsize)
        inner = TwoPhase(self.inside).scratch_bytes(lane, numel)
        return inner + sums + self._outer.scratch_bytes(outer, outer.numel)

    def sent_bytes(self, lane: LaneSpec, numel: int) -> int:
        """Both phases inside, and the own shard's sum across."""
        outer = lane.outer(shards(Span(0, numel), self.inside.world, lane.codec.unit)[self.inside.rank].numel)
        return TwoPhase(self.inside).sent_bytes(lane, numel) + self._outer.sent_bytes(outer, outer.numel)

    @property
    def _outer(self) -> OneShot | TwoPhase:
        return flat_reducer(self.across, fewest_roundings(self.across.world))

    @property
    def messages(self) -> int:
        """How often a chunk waits, the same on all ranks, whether their shards hold anything or not."""
        if self.across.world == 1:
            return 2
        return 3 if isinstance(self._outer, OneShot) else 4

    def stages(self, chunks: Sequence[LaneChunk], scale: float, tags: tuple[int, ...], scratch: Scratch) -> Stages:
        link = self.inside
        inner = [replace(chunk, lane=replace(chunk.lane, watch=None)) for chunk in chunks]
        wires, moving = send_shards(link, inner, tags[1], scratch)
        yield moving
        filled = [i for i, chunk in enumerate(inner) if chunk.shards[link.rank].numel]
        outer = [self._node_sum(inner[i], chunks[i].lane.watch, scratch) for i in filled]
        if self.across.world == 1:
            for node in outer:
                node.x.mul_(scale)
        elif outer:
            yield from self._outer.stages(outer, scale, tags, scratch)
        else:
            for _ in range(self.messages - 2):
                yield ()
        for i, node in zip(filled, outer, strict=True):
            chunk = inner[i]
            numbers = fitted(node.x, chunk.x.dtype, node.lane.codec)
            chunk.lane.codec.encode(numbers, chunk.wires[link.rank], step=chunk.key.of(link.rank))
        yield link.gather(wires, tags[1] + 1)
        fine = check_finite(inner, sums_are_finite)
        for chunk in inner:
            finish(chunk, link, 1.0, fine)

    def _node_sum(self, chunk: LaneChunk, watch: Watch | None, scratch: Scratch) -> LaneChunk:
        """The sum of the own shard inside the node, as what travels across nodes."""
        rank = self.inside.rank
        codec = chunk.lane.codec
        part = chunk.shards[rank]
        spec = chunk.lane.spec.outer(part.numel)
        total = scratch.numbers(part.numel, spec.dtype)
        step = chunk.key.of(rank)
        if isinstance(codec, Identity) and chunk.x.dtype != total.dtype:  # its wires hold numbers of 16 bits
            each = torch.empty(part.numel, dtype=chunk.x.dtype, device=chunk.x.device)
            total.zero_()
            for wire in chunk.received_WN:
                codec.decode(wire, each, step=step)
                total += each
        else:
            codec.decode_sum(chunk.received_WN, total, step=step)
        lane = Lane(spec, Flat([total]), watch=watch)
        return LaneChunk(lane, total, total, Key(step, chunk.key.chunk), chunk.begin + part.begin)


Reducer = OneShot | TwoPhase | Hierarchical


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


def flat_reducer(transport: Transport, algorithm: str) -> OneShot | TwoPhase:
    return OneShot(transport) if algorithm == "one_shot" else TwoPhase(transport)


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
