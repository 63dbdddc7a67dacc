"""Sums on a mesh of nodes: inside a node by one codec, across nodes by another.

The slow link between nodes carries 1/B of a sum of B ranks. Without feedback; a lane's watch sees what is lost across.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from thinwire.codecs import Codec, Identity
from thinwire.collectives.checks import check_recodes
from thinwire.collectives.chunks import Desk, Flat, Span, aligned, shards
from thinwire.collectives.lane import Key, Lane, LaneChunk, LaneSpec, Watch, check_finite
from thinwire.collectives.sums import OneShot, TwoPhase, finish, send_shards, sums_are_finite
from thinwire.collectives.transport import Stages, Transport
from thinwire.errors import CollectiveError
from thinwire.kernels import reference

_MOST_HALF = 65280.0  # the largest float16 that bfloat16 has too: rounded up, it would be infinite


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


@dataclass(frozen=True)
class Hierarchical:
    """A reduce-scatter inside every node, a sum across nodes, an all-gather inside."""

    across: Transport
    inside: Transport

    def scratch_bytes(self, codec: Codec, numel: int, dtype: torch.dtype, across: Codec) -> int:
        """Both phases inside, the sums of the own shards in fp32, and what travels across."""
        outer_dtype = total_dtype(across, dtype)
        shard = shards(Span(0, numel), self.inside.world, codec.unit)[0].numel
        sums = aligned(shard * outer_dtype.itemsize)
        inner = TwoPhase(self.inside).scratch_bytes(codec, numel, dtype)
        return inner + sums + self._outer.scratch_bytes(across, shard, outer_dtype)

    def sent_bytes(self, codec: Codec, numel: int, dtype: torch.dtype, across: Codec) -> int:
        """Both phases inside, and the own shard's sum across."""
        shard = shards(Span(0, numel), self.inside.world, codec.unit)[self.inside.rank].numel
        inner = TwoPhase(self.inside).sent_bytes(codec, numel, dtype)
        return inner + self._outer.sent_bytes(across, shard, total_dtype(across, dtype))

    @property
    def _outer(self) -> OneShot | TwoPhase:
        return flat_reducer(self.across, fewest_roundings(self.across.world))

    @property
    def messages(self) -> int:
        """How often a chunk waits, the same on all ranks, whether their shards hold anything or not."""
        if self.across.world == 1:
            return 2
        return 3 if isinstance(self._outer, OneShot) else 4

    def stages(self, chunks: Sequence[LaneChunk], scale: float, tags: tuple[int, ...], desk: Desk) -> Stages:
        link = self.inside
        inner = [replace(chunk, lane=replace(chunk.lane, watch=None)) for chunk in chunks]
        wires, moving = send_shards(link, inner, tags[1], desk)
        yield moving
        filled = [i for i, chunk in enumerate(inner) if chunk.shards[link.rank].numel]
        sums = {i: self._sum(inner[i], desk) for i in filled}
        if self.across.world == 1:
            for total in sums.values():
                total.mul_(scale)
        elif sums:
            outer = [self._outer_chunk(inner[i], sums[i], chunks[i].lane.watch) for i in filled]
            yield from self._outer.stages(outer, scale, tags, desk)
        else:
            for _ in range(self.messages - 2):
                yield ()
        for i, total in sums.items():
            lane = inner[i].lane
            numbers = fitted(total, inner[i].x.dtype, lane.spec.across_codecs[0])
            lane.codec.encode(numbers, inner[i].wires[link.rank], step=inner[i].key.of(link.rank))
        yield link.gather(wires, tags[1] + 1)
        fine = check_finite(inner, sums_are_finite)
        for chunk in inner:
            finish(chunk, link, 1.0, fine)

    def _sum(self, chunk: LaneChunk, desk: Desk) -> Tensor:
        x = chunk.x
        codec = chunk.lane.codec
        numel = chunk.shards[self.inside.rank].numel
        total = desk.numbers(numel, total_dtype(chunk.lane.spec.across_codecs[0], x.dtype))
        step = chunk.key.of(self.inside.rank)
        if isinstance(codec, Identity) and x.dtype != total.dtype:  # its wires hold numbers of 16 bits
            each = torch.empty(numel, dtype=x.dtype, device=x.device)
            total.zero_()
            for wire in chunk.received_WN:
                codec.decode(wire, each, step=step)
                total += each
        else:
            codec.decode_sum(chunk.received_WN, total, step=step)
        return total

    def _outer_chunk(self, chunk: LaneChunk, total: Tensor, watch: Watch | None) -> LaneChunk:
        """The sum of the own shard as what travels across nodes."""
        rank = self.inside.rank
        spec = LaneSpec(total.numel(), *chunk.lane.spec.across_codecs, dtype=total.dtype)
        lane = Lane(spec, Flat([total]), watch=watch)
        key = Key(chunk.key.of(rank), chunk.key.chunk)
        return LaneChunk(lane, total, total, key, chunk.begin + chunk.shards[rank].begin)


Reducer = OneShot | TwoPhase | Hierarchical


def fitted(total: Tensor, dtype: torch.dtype, codec: Codec) -> Tensor:
    """A decoded sum in `dtype`; numbers that the codec's error pushed past its largest number become that number."""
    if dtype.itemsize >= total.itemsize:
        return total.to(dtype)
    most = _MOST_HALF if dtype == torch.float16 else torch.finfo(dtype).max
    return reference.saturate(codec.encoding(total.dtype).format, total, most).to(dtype)


def total_dtype(across: Codec, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a node's sums of numbers of `dtype`, which go across nodes."""
    return torch.float64 if dtype == torch.float64 and dtype in across.inputs else torch.float32


def check_order(mesh: DeviceMesh) -> None:
    """Raise unless a rank has the same number in its node as the ranks it meets across nodes."""
    order = mesh.mesh.argsort(1)
    if not bool((order == order[0]).all()):
        raise CollectiveError(
            f"every row of the mesh, a node, must list its ranks in the same order, got {mesh.mesh.tolist()}: "
            "sort each row"
        )
