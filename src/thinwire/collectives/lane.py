"""Lanes: the numbers of a message that share a codec, their description and their tensors in one call.

[Note: Lanes] A message may hold several lanes. The wires of all lanes for one rank lie side by side, so that they
travel as one message whatever the number of lanes. A lane is described once (`LaneSpec`), gets its tensors at every
call (`Lane`), and is sent in chunks.

[Note: Feedback] A lane may carry feedback (thinwire.feedback). What a rank sends of it is then not x but a message made
of x and of what was remembered; a rank's own part of its own shard does not travel, so it is added exactly, and what
the second rounding loses is remembered by the shard's rank, as if its own part had lost it. So one residual serves both
phases. It is updated at the end, and only if all wires of the chunk were finite; until then the candidate waits in the
memory of x, which nobody needs while the wires travel.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.codecs import Codec, Identity
from thinwire.collectives.chunks import Chunking, Flat, Scratch, aligned
from thinwire.feedback import Carry
from thinwire.kernels import hashing
from thinwire.kernels.rows import Watch


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
    scattered: bool = False  # True => its numbers lie in several tensors
    across: tuple[Codec, Codec] | None = None  # in a hierarchy: codec and first_phase of the sums of nodes
    chunking: Chunking = Chunking(0, 1)  # a plan decides it

    @property
    def encoded(self) -> torch.dtype:
        """The dtype in which numbers are encoded: fp32 with feedback, or if the codec does not take or keep `dtype`."""
        keeps = self.dtype in self.codec.inputs and (self.dtype != torch.float64 or isinstance(self.codec, Identity))
        return self.dtype if keeps and not self.feedback else torch.float32

    def outer(self, numel: int) -> "LaneSpec":
        """A lane of sums of nodes, which travel across them: in fp32, or in fp64 if that is what they are made of."""
        codec, first_phase = self.across or (self.codec, self.codec)
        is_double = self.encoded == torch.float64 and torch.float64 in codec.inputs
        return LaneSpec(numel, codec, first_phase, dtype=torch.float64 if is_double else torch.float32)

    def copy_bytes(self, numel: int) -> int:
        """Scratch for `numel` numbers that are encoded in another dtype."""
        return aligned(numel * self.encoded.itemsize) if self.encoded != self.dtype else 0


@dataclass(frozen=True)
class Lane:
    """A lane with the tensors of one call."""

    spec: LaneSpec
    flat: Flat
    carry: Carry | None = None
    watch: Watch | None = None

    @property
    def codec(self) -> Codec:
        return self.spec.codec

    @property
    def dtype(self) -> torch.dtype:
        return self.spec.encoded

    def converted(self, source: Tensor, scratch: Scratch) -> Tensor:
        """Numbers in the dtype in which they are encoded; kernels convert those with feedback."""
        if self.carry is not None or source.dtype == self.dtype:
            return source
        return scratch.numbers(source.numel(), self.dtype).copy_(source)
