"""Sums by an all-gather of the wire: one message, one rounding, W - 1 wires sent per rank.

Legend: W ranks, N bytes of one wire. Every rank decodes the same wires, its own too, so all end with the same bits.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.collectives.chunks import Desk
from thinwire.collectives.lane import LaneChunk, check_finite, known_step
from thinwire.collectives.transport import Stages, Transport


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
        for chunk, own_WN in zip(chunks, columns(wires_WN, sizes), strict=True):
            chunk.own_WN = own_WN
            chunk.load()
            chunk.encode(chunk.whole, chunk.lane.codec, own_WN[link.rank], chunk.key.of(0))
        yield link.gather(wires_WN.unbind(), tags[0])
        fine = check_finite(chunks, lambda c: c.lane.codec.all_finite(c.own_WN, c.x.numel(), c.x.dtype))
        for chunk in chunks:
            carry = chunk.lane.carry
            span = chunk.span(chunk.whole)
            if carry is not None:
                carry.keep(span, chunk.x, scale, fine)
            step = known_step(chunk.key.of(0), chunk.x.device)
            chunk.lane.codec.decode_sum(chunk.own_WN, chunk.x, scale=scale, step=step)
            if carry is not None:
                carry.result(span, chunk.x, fine)
            chunk.write()


def columns(wires_WN: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The lanes' parts of rows of wires."""
    edges = [0, *itertools.accumulate(sizes)]
    return [wires_WN[..., begin:end] for begin, end in itertools.pairwise(edges)]
