"""How a group sums: in one shot or in two phases. Every rank decodes the same wires, so all end with the same bits.

One shot is an all-gather of wires: one message, one rounding, W - 1 wires sent per rank. In two phases every rank sums
its shard: two messages, two roundings, 2 (W - 1) / W wires sent per rank.

Legend: W ranks, N bytes of one wire.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.collectives.chunks import Desk, Span, others_first, shards, wire_sizes
from thinwire.collectives.lane import LaneChunk, check_finite, decoded
from thinwire.collectives.transport import Stages, Transport, Waitable
from thinwire.feedback import Fine


@dataclass(frozen=True)
class OneShot:
    """Every rank sends all of its numbers to every other."""

    transport: Transport

    def scratch_bytes(self, codec: Codec, numel: int, dtype: torch.dtype, across: Codec | None = None) -> int:
        """W wires of a lane's part of a chunk."""
        return self.transport.world * codec.wire_bytes(numel, dtype)

    def sent_bytes(self, codec: Codec, numel: int, dtype: torch.dtype, across: Codec | None = None) -> int:
        """The wire, to all others."""
        return (self.transport.world - 1) * codec.wire_bytes(numel, dtype) if numel else 0

    def stages(self, chunks: Sequence[LaneChunk], scale: float, tags: tuple[int, ...], desk: Desk) -> Stages:
        """Encode, send to all, add all: x = scale * sum of x over the ranks."""
        link = self.transport
        sizes = [chunk.lane.codec.wire_bytes(chunk.x.numel(), chunk.x.dtype) for chunk in chunks]
        wires_WN = desk.matrix(link.world, sum(sizes))
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

    def scratch_bytes(self, codec: Codec, numel: int, dtype: torch.dtype, across: Codec | None = None) -> int:
        """Wires of all shards to send, and W wires of the own shard; the reduced wires take the place of the first."""
        sizes = wire_sizes(codec, shards(Span(0, numel), self.transport.world, codec.unit), dtype)
        return sum(sizes) + self.transport.world * sizes[0]  # the first shard is the longest

    def sent_bytes(self, codec: Codec, numel: int, dtype: torch.dtype, across: Codec | None = None) -> int:
        """The wires of others' shards to them, then the own shard's to all others."""
        link = self.transport
        sizes = wire_sizes(codec, shards(Span(0, numel), link.world, codec.unit), dtype)
        return sum(sizes) + (link.world - 2) * sizes[link.rank]

    def stages(self, chunks: Sequence[LaneChunk], scale: float, tags: tuple[int, ...], desk: Desk) -> Stages:
        """Encode the shards, send each to its rank, recode the own one's sum, send it to all, decode all."""
        link = self.transport
        wires, moving = send_shards(link, chunks, tags[0], desk)
        yield moving
        for chunk in chunks:
            _reduce_shard(chunk, link, scale)
        yield link.gather(wires, tags[0] + 1)
        fine = check_finite(chunks, sums_are_finite)
        for chunk in chunks:
            finish(chunk, link, scale, fine)


def send_shards(
    link: Transport, chunks: Sequence[LaneChunk], tag: int, desk: Desk
) -> tuple[list[Tensor], Sequence[Waitable]]:
    """The first phase of a sum: every rank gets its shard from all ranks.

    Gives the wires of every rank's shards, of all lanes (the own ones are still to be written), and what moves.
    """
    sizes_LW = [wire_sizes(chunk.lane.codec, chunk.split(link.world), chunk.x.dtype) for chunk in chunks]
    sizes_WL = [[sizes[shard] for sizes in sizes_LW] for shard in range(link.world)]
    wires = [desk.take(sum(sizes)) for sizes in sizes_WL]
    received_WN = desk.matrix(link.world, wires[link.rank].numel())
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
    """Of the own shard. In place of the own wire, which was not written, goes the last one."""
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
