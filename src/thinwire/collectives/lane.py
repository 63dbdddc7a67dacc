"""Lanes: the numbers of a message that share a codec, from their description to one chunk of them.

[Note: Lanes] A message may hold several lanes. The wires of all lanes for one rank lie side by side, so that they
travel as one message whatever the number of lanes. A lane is described once (`LaneSpec`), gets its tensors at every
call (`Lane`), and goes through the pipeline in chunks (`LaneChunk`).

[Note: Feedback] A lane may carry feedback (thinwire.feedback). What a rank sends of it is then not x but a message made
of x and of what was remembered; a rank's own part of its own shard does not travel, so it is added exactly, and what
the second rounding loses is remembered by the shard's rank, as if its own part had lost it. So one residual serves both
phases. It is updated at the end, and only if all wires of the chunk were finite; until then the candidate waits in the
memory of x, which nobody needs while the wires travel.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.codecs import Codec, Identity
from thinwire.collectives.chunks import Chunking, Flat, Scratch, Span, aligned, shards
from thinwire.feedback import Carry, Fine
from thinwire.kernels import hashing

_NO_WIRES = torch.empty(0, dtype=torch.uint8)
# Called with the span, the message and what its wire decodes to.
Watch = Callable[[Span, Tensor, Tensor], None]


class Key(NamedTuple):
    """Which wires share rotation and dither: one key per call, lane and chunk, one step per shard of it."""

    step: int
    chunk: int
    lane: int = 0

    def of(self, shard: int) -> int:
        """The codec's `step` for a shard."""
        return hashing.row_step(self.mixed(), shard)

    def mixed(self) -> int:
        """What the steps of all shards are made of (hashing.row_step)."""
        return hashing.mix64(self.step) ^ (self.lane << 48 | self.chunk << 16)


class LaneSpec(NamedTuple):
    """A lane's description, the same at every call."""

    numel: int
    codec: Codec
    first_phase: Codec  # of the first of two phases: the same wire format, perhaps another choice of scales
    feedback: str = ""
    dtype: torch.dtype = torch.float32
    exact_local: bool = False  # True => in two phases a rank's part of its own shard, which does not travel, is exact
    across: tuple[Codec, Codec] | None = None  # in a hierarchy: codec and first_phase of the sums of nodes
    chunking: Chunking = Chunking(0, 1)  # a plan decides it

    @property
    def encoded(self) -> torch.dtype:
        """The dtype in which numbers are encoded: fp32 with feedback, or if the codec does not take `dtype`."""
        return torch.float32 if self.feedback or self.dtype not in self.codec.inputs else self.dtype

    def outer(self, numel: int) -> "LaneSpec":
        """A lane of sums of nodes, which travel across them: in fp32, or in fp64 if that is what they are made of."""
        codec, first_phase = self.across or (self.codec, self.codec)
        is_double = self.encoded == torch.float64 and torch.float64 in codec.inputs
        return LaneSpec(numel, codec, first_phase, dtype=torch.float64 if is_double else torch.float32)

    def copy_bytes(self, numel: int, *, scattered: bool = False) -> int:
        """Scratch for `numel` numbers that cannot be worked on where they are."""
        copied = aligned(numel * self.dtype.itemsize) if scattered else 0
        return copied + (aligned(numel * self.encoded.itemsize) if self.encoded != self.dtype else 0)


@dataclass(frozen=True)
class Lane:
    """A lane with the tensors of one call."""

    spec: LaneSpec
    flat: Flat
    carry: Carry | None = None
    watch: Watch | None = None
    on_finite: Callable[[Fine], None] | None = None  # called for every chunk with whether all of it was finite

    @property
    def codec(self) -> Codec:
        return self.spec.codec

    @property
    def dtype(self) -> torch.dtype:
        return self.spec.encoded

    @property
    def keeps_local(self) -> bool:
        """Whether a rank's part of its own shard stays as it is."""
        return self.spec.exact_local or self.carry is not None

    def chunk(self, span: Span, key: Key, scratch: Scratch) -> "LaneChunk":
        """A span of the lane's numbers."""
        source = self.flat.read(span, scratch)
        x = source if self.dtype == source.dtype else scratch.numbers(span.numel, self.dtype)
        return LaneChunk(self, source, x, key, span.begin)


@dataclass
class LaneChunk:
    """A lane's numbers in one chunk: `source` as the caller has them, `x` as they are encoded."""

    lane: Lane
    source: Tensor
    x: Tensor
    key: Key
    begin: int  # of the chunk in the lane
    shards: Sequence[Span] = ()  # of x: one per rank, or all of it
    wires: Sequence[Tensor] = ()  # one per shard
    received_WN: Tensor = _NO_WIRES  # every rank's wire of the shard that this rank sums

    @property
    def whole(self) -> Span:
        return Span(0, self.x.numel())

    def split(self, world: int) -> list[Span]:
        """x in shards, one per rank, the first being the longest."""
        self.shards = shards(self.whole, world, self.lane.codec.unit)
        return self.shards

    def span(self, part: Span) -> Span:
        """A span of x as one of the lane."""
        return Span(self.begin + part.begin, self.begin + part.end)

    def numbers(self, part: Span) -> Tensor:
        return self.x[part.begin : part.end]

    def all_finite(self) -> Tensor:
        """Whether what all ranks sent is finite."""
        return self.lane.codec.all_finite(self.received_WN, self.x.numel(), self.x.dtype)

    def load(self) -> None:
        """x = source, unless feedback makes it."""
        if self.x is not self.source and self.lane.carry is None:
            self.x.copy_(self.source)

    def write(self) -> None:
        """source = x, the result."""
        if self.x is not self.source:
            self.source.copy_(self.x)

    def compensate(self, part: Span) -> Tensor:
        """Add to a span of x what its feedback owes; returns it."""
        x = self.numbers(part)
        if self.lane.carry is not None:
            self.lane.carry.compensate(self.span(part), self.source[part.begin : part.end], x)
        return x

    def encode(self, part: Span, codec: Codec, wire: Tensor, step: int) -> None:
        """Write the wire of a span of x; with feedback, x then holds what it has to remember."""
        carry = self.lane.carry
        watch = self.lane.watch
        if carry is not None and watch is None:
            x = self.numbers(part)
            owed = carry.owed(self.span(part), self.source[part.begin : part.end], x)
            if owed is not None:  # one pass encodes the sum, and leaves in x what was lost of it
                codec.encode(owed, wire, step=step, residual=x)
                return
        x = self.compensate(part)
        codec.encode(x, wire, step=step)
        if carry is None and watch is None:
            return
        read = decoded(codec, wire, x.numel(), step, x.dtype)
        if watch is not None:
            watch(self.span(part), x, read)
        if carry is not None:
            carry.sent(x, read)


def decoded(codec: Codec, wire: Tensor, numel: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode a wire in fp32, or in `dtype` if it holds the numbers themselves."""
    out = torch.empty(numel, dtype=dtype if isinstance(codec, Identity) else torch.float32, device=wire.device)
    codec.decode(wire, out, step=step)
    return out


def all_true(found: Tensor) -> Fine:
    """Whether all are true: a bool on the CPU; on a GPU a tensor, for which the host does not wait."""
    whole = found.all()
    return bool(whole) if whole.device.type == "cpu" else whole


def check_finite(chunks: Sequence[LaneChunk], is_finite: Callable[[LaneChunk], Tensor]) -> Fine:
    """Whether all lanes of a chunk are finite; True, unchecked, if none has feedback or an `on_finite`."""
    lanes = [chunk.lane for chunk in chunks]
    if not any(lane.carry or lane.on_finite for lane in lanes):
        return True
    fine = all_true(torch.stack([is_finite(chunk) for chunk in chunks]))
    callbacks = [lane.on_finite for lane in lanes if lane.on_finite is not None]
    if callbacks:  # a chunk counts once, however many of its lanes are not finite
        callbacks[0](fine)
    return fine


def lane_chunks(lanes: Sequence[Lane], index: int, step: int, scratch: Scratch) -> list[LaneChunk]:
    """Chunk `index` of every lane that has one; the first chunk is there even if it is empty."""
    spans = [lane.spec.chunking.span(index) for lane in lanes]
    return [
        lane.chunk(span, Key(step, index, at), scratch)
        for at, (lane, span) in enumerate(zip(lanes, spans, strict=True))
        if span.numel or index == 0
    ]
