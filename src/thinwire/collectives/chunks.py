"""How a message is laid out: lanes that share a codec, chunks that follow each other, shards that belong to ranks.

All ranks cut alike: how depends on lengths, codec and world alone. A codec may ask for elements to stay together
(`Codec.unit`): chunks and shards then begin on multiples of so many elements.

[Note: Lanes] A message may hold several lanes. The wires of all lanes for one rank lie side by side, so that they
travel as one message whatever the number of lanes. A lane is described once (`LaneSpec`), gets its tensors at every
call (`Lane`), and is sent in chunks.

[Note: Feedback] A lane may carry feedback (thinwire.feedback). What a rank sends of it is then not x but a message made
of x and of what was remembered; a rank's own part of its own shard does not travel, so it is added exactly, and what
the second rounding loses is remembered by the shard's rank, as if its own part had lost it. So one residual serves both
phases. It is updated at the end, and only if all wires of the chunk were finite; until then the candidate waits in the
memory of x, which nobody needs while the wires travel.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.codecs import Codec, Identity
from thinwire.errors import CollectiveError
from thinwire.feedback import Carry
from thinwire.kernels import hashing
from thinwire.kernels.rows import Watch

# [Note: Chunks] A chunk costs about half a millisecond of messages and wake-ups whatever its size; what it gains is
# that its encoding and decoding overlap with other chunks' travel. So there are few, and the first and the last, whose
# encoding and decoding nothing hides, are a quarter as long. With more than two ranks several streams share a link,
# none of them fairly, and it takes more chunks, fewer of them under way at once, to keep the ranks in step: int8 of 8 M
# floats over four ranks at 100 Mbit took 1130 ms in 8 chunks and 1054 in 26 (the link's limit: 1021). Where chunks
# are small, messages cost more than that gains: one bit of the same numbers took 141 ms in 8 chunks, 158 in 14.
CHUNKS_OF_TWO = 2  # whole ones between two ranks; more => more overlap, more messages
CHUNKS_PER_PEER = 8  # the same with more ranks, for each other one
MOST_CHUNKS = 32
MIN_CHUNK = 1 << 18  # elements; less is not cut
MIN_CHUNK_BYTES = 1 << 17  # of wire
MAX_CHUNK_BYTES = 1 << 24  # of wire; more takes more scratch
UNDER_WAY_BYTES = 5 << 18  # of wire, in 3 to 6 chunks; more => ranks get further out of step
NOTE_BYTES = 16  # that a message of rows with feedback has more; wires begin on multiples of it
SCRATCH_ALIGN = 64  # chunks' parts of scratch begin on multiples of it
_WHOLE = 1024  # shards of large chunks end on multiples of it, so that they hold whole blocks


class Span(NamedTuple):
    """Elements begin <= i < end."""

    begin: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Chunking:
    """A message of `numel` elements in chunks of `chunk`, the first and the last of `edge` if that is not 0.

    A message of nothing has one empty chunk, and one that a single chunk holds is not cut. Chunks begin on multiples of
    `unit`, of which `chunk` and `edge` are multiples.
    """

    numel: int
    chunk: int
    edge: int = 0
    unit: int = 1

    @property
    def num_chunks(self) -> int:
        """The number of chunks, at least 1."""
        if self.numel <= self.chunk:
            return 1
        return -(-(self.numel - 2 * self.edge) // self.chunk) + 2 * bool(self.edge)

    def span(self, index: int) -> Span:
        """The elements of chunk `index`; empty past the end."""
        last = self.num_chunks - 1
        return Span(self._begin(index, last), self._begin(index + 1, last))

    def _begin(self, index: int, last: int) -> int:
        if index > last or not last or not self.edge:
            return min(index * self.chunk, self.numel)
        if index == last:
            return (self.numel - self.edge) // self.unit * self.unit
        return self.edge + (index - 1) * self.chunk if index else 0


def choose_chunking(numel: int, wire_bytes: int, world: int, shards: int = 1, unit: int = 1) -> Chunking:
    """Cut a message whose wire takes `wire_bytes`, so that chunks fall into `shards` shards of whole blocks."""
    most = CHUNKS_OF_TWO if world == 2 else min(CHUNKS_PER_PEER * (world - 1), MOST_CHUNKS)
    whole = min(most, numel // MIN_CHUNK, wire_bytes // MIN_CHUNK_BYTES)
    whole = max(whole, -(-wire_bytes // MAX_CHUNK_BYTES))
    if whole < 2:
        return Chunking(numel, max(numel, 1))
    multiple = whole_chunk(shards, unit)
    chunk = -(-2 * numel // ((2 * whole + 1) * multiple)) * multiple
    return Chunking(numel, chunk, chunk // 4, unit)


def whole_chunk(shards: int, unit: int) -> int:
    """Chunks of a multiple of so many elements fall into `shards` shards of whole blocks."""
    return math.lcm(4 * _WHOLE * shards, 4 * unit)


def shards(span: Span, count: int, unit: int = 1) -> list[Span]:
    """`count` consecutive parts of a span, equal but for the last ones, which may be short or empty."""
    each = -(-span.numel // count)
    multiple = math.lcm(_WHOLE, unit) if each >= 16 * _WHOLE else unit
    each = -(-each // multiple) * multiple
    edges = [min(span.begin + i * each, span.end) for i in range(count + 1)]
    return [Span(begin, end) for begin, end in itertools.pairwise(edges)]


def aligned(nbytes: int, to: int = 16) -> int:
    """Round up the bytes of a part of scratch: parts begin on multiples of 16, as wires do."""
    return -(-nbytes // to) * to


class Scratch:
    """The scratch of one chunk, handed out part by part."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self._at = 0

    def take(self, nbytes: int) -> Tensor:
        if self._at + nbytes > self._buffer.numel():
            raise CollectiveError(f"a chunk needs more scratch than the {self._buffer.numel()} bytes it was given")
        part = self._buffer[self._at : self._at + nbytes]
        self._at += aligned(nbytes)
        return part

    def numbers(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.take(numel * dtype.itemsize).view(dtype)


def is_row(tensor: Tensor) -> bool:
    """Whether kernels can work on its memory as one row of numbers."""
    return tensor.is_contiguous() and not tensor.is_neg()


class Flat:
    """One or several tensors as one row of numbers, read and written by spans.

    A span inside one contiguous tensor is a view of it; one that touches several is copied into scratch and back.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = [tensor.detach() for tensor in tensors]
        self._parts = [t.view(-1) if is_row(t) else t.reshape(-1).resolve_neg().contiguous() for t in self.tensors]
        self.numel = sum(part.numel() for part in self._parts)
        self.dtype = self._parts[0].dtype
        self.device = self._parts[0].device

    @property
    def memory(self) -> list[Tensor]:
        """The tensors, and the rows that are not views of them."""
        return [*self.tensors, *self._parts]

    def read(self, span: Span, scratch: Scratch) -> Tensor:
        """The numbers of a span; after changing them, pass them to `write`."""
        pieces = self._pieces(span)
        if len(pieces) == 1:
            return pieces[0]
        copy = scratch.numbers(span.numel, self.dtype)
        if pieces:
            torch.cat(pieces, out=copy)
        return copy

    def write(self, span: Span, values: Tensor) -> None:
        """Write the numbers that `read` returned back to the tensors."""
        if len(pieces := self._pieces(span)) > 1:
            torch._foreach_copy_(pieces, values.split([piece.numel() for piece in pieces]))

    def finish(self) -> None:
        """Copy the numbers back to tensors that could not be viewed as a row; tell autograd of kernels' writes."""
        for tensor, part in zip(self.tensors, self._parts, strict=True):
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)
            if not is_row(tensor):
                tensor.copy_(part.view(tensor.shape))

    def _pieces(self, span: Span) -> list[Tensor]:
        found = []
        start = 0
        for part in self._parts:
            begin = max(span.begin - start, 0)
            end = min(span.end - start, part.numel())
            if begin < end:
                found.append(part[begin:end])
            start += part.numel()
        return found


def wire_sizes(codec: Codec, parts: Sequence[Span], dtype: torch.dtype) -> list[int]:
    """Bytes of the wire of every span; an empty span has none."""
    return [codec.wire_bytes(part.numel, dtype) if part.numel else 0 for part in parts]


def scratch_limit(wire: int, chunk_wire: int, chunk_bytes: int, num_chunks: int) -> int:
    """Scratch an operation may hold: a wire of the message and two of a chunk; never less than one chunk needs."""
    chunk = aligned(chunk_bytes, SCRATCH_ALIGN)
    depth = max(3, min(6, num_chunks, UNDER_WAY_BYTES // max(chunk_wire, 1)))
    return max(chunk, min(depth * chunk, wire + 2 * chunk_wire))


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
