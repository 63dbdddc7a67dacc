"""How one chunk of a message is summed over ranks: coroutines that yield the messages they wait for.

Legend: W ranks, N bytes of one wire. Every rank decodes the same wires, its own too, so all end with the same bits.

[Note: Lanes] A message may hold several lanes: numbers that share a codec. The wires of all lanes for one rank lie side
by side, so that they travel as one message whatever the number of lanes.

[Note: Feedback] A lane may carry feedback (thinwire.feedback). What a rank sends of it is then not x but a message made
of x and of what was remembered; a rank's own part of its own shard does not travel, so it is added exactly, and what
the second rounding loses is remembered by the shard's rank, as if its own part had lost it. So one residual serves both
phases. It is updated at the end, and only if all wires of the chunk were finite; until then the candidate waits in the
memory of x, which nobody needs while the wires travel.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from thinwire.codecs import Codec, Identity
from thinwire.collectives.chunks import Cut, Desk, Flat, Span, aligned, others_first, shards, wires_bytes
from thinwire.collectives.primitives import Transport, Waitable
from thinwire.collectives.schedule import Steps
from thinwire.kernels import hashing, reference

_SHARD = 4  # stream of the hash
_MOST_HALF = 65280.0  # the largest float16 that bfloat16 has too: rounded up, it would be infinite
Fine = bool | Tensor  # whether every number of a chunk is finite; on a GPU nobody waits to know


class Key(NamedTuple):
    """Which wires share rotation and dither: one key a call, lane and chunk, one step a shard of it."""

    step: int
    chunk: int
    lane: int = 0

    def of(self, shard: int) -> int:
        """The codec's `step` for a shard."""
        return hashing.key(self.step, self.lane << 48 | self.chunk << 16 | shard, _SHARD)


class Carry(Protocol):
    """Feedback of a lane. Spans count the lane's elements; every shard is a span of its own, the same at every call."""

    def message(self, span: Span, x: Tensor, out: Tensor) -> None:
        """out = what travels instead of x. They may be the same memory."""

    def sent(self, message: Tensor, decoded: Tensor) -> None:
        """message = what `keep` needs, where `decoded` is what the other ranks read."""

    def reduced(self, own: Tensor, total: Tensor, scale: float) -> None:
        """total += scale * own, the rank's own message; own = what `keep_own` needs."""

    def keep(self, span: Span, kept: Tensor, scale: float, fine: Fine) -> None:
        """Remember what `sent` left, if `fine`."""

    def keep_own(self, span: Span, kept: Tensor, result: Tensor, fine: Fine) -> None:
        """Remember what `reduced` left, where `result` is what everybody read, if `fine`."""

    def result(self, span: Span, x: Tensor, fine: Fine) -> None:
        """x, the mean of what was sent, becomes the mean of what was meant."""


class Watch(Protocol):
    """Looks at what the wires of a lane lose."""

    def lost(self, span: Span, message: Tensor, decoded: Tensor, codec: Codec, wire: Tensor) -> None:
        """`message` was encoded as `wire`, which says `decoded`."""


def encoded_dtype(codec: Codec, dtype: torch.dtype, *, fed_back: bool) -> torch.dtype:
    """In which numbers of `dtype` are encoded: with feedback, and where the codec takes nothing wider, fp32."""
    return torch.float32 if fed_back or dtype not in codec.inputs else dtype


def fewest_roundings(world: int) -> str:
    """Two ranks that exchange everything send as many bytes as in two phases, and round once."""
    return "one_shot" if world <= 2 else "two_phase"


@dataclass(frozen=True)
class Lane:
    """Numbers of a message that share a codec."""

    flat: Flat
    cut: Cut
    codec: Codec
    first: Codec  # of the first of two phases: the same wire format, perhaps another choice of scales
    carry: Carry | None = None
    watch: Watch | None = None
    checked: Callable[[Fine], None] | None = None  # is told of every chunk whether all of it was finite
    exact_own: bool = False  # True => in two phases a rank's part of its own shard, which does not travel, is exact
    across: tuple[Codec, Codec] | None = None  # in a hierarchy: codec and first of the sums of nodes

    @property
    def outer(self) -> tuple[Codec, Codec]:
        """Codec and first of the sums of nodes."""
        return self.across or (self.codec, self.codec)

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers that are encoded."""
        return encoded_dtype(self.codec, self.flat.dtype, fed_back=self.carry is not None)

    def room_bytes(self, numel: int) -> int:
        """Scratch of `numel` numbers that cannot be worked on where they are."""
        copied = aligned(numel * self.flat.dtype.itemsize) if self.flat.scattered else 0
        return copied + (aligned(numel * self.dtype.itemsize) if self.dtype != self.flat.dtype else 0)


@dataclass(frozen=True)
class Part:
    """A lane's numbers in one chunk: `source` as the caller has them, `x` as they are encoded."""

    lane: Lane
    source: Tensor
    x: Tensor
    key: Key
    begin: int  # of the span in the lane

    def span(self, part: Span) -> Span:
        """A span of x as one of the lane."""
        return Span(self.begin + part.begin, self.begin + part.end)

    def load(self) -> None:
        """x = source, unless feedback makes it."""
        if self.x is not self.source and self.lane.carry is None:
            self.x.copy_(self.source)

    def message(self, part: Span) -> Tensor:
        """The numbers of a span as they are to be encoded."""
        x = self.x[part.begin : part.end]
        if self.lane.carry is not None:
            self.lane.carry.message(self.span(part), self.source[part.begin : part.end], x)
        return x

    def write(self) -> None:
        """source = x, the result."""
        if self.x is not self.source:
            self.source.copy_(self.x)


class Size(NamedTuple):
    """What fixes the wires of a part."""

    codec: Codec
    numel: int
    dtype: torch.dtype
    across: Codec | None = None


class Reducer(Protocol):
    """Sums a chunk over ranks."""

    def scratch_bytes(self, sizes: Sequence[Size]) -> int:
        """Scratch of a chunk of these parts."""

    def steps(self, parts: Sequence[Part], scale: float, tags: tuple[int, ...], desk: Desk) -> Steps:
        """x = scale * sum of x over the ranks, for every part."""


def known(step: int, device: torch.device) -> int | None:
    """The step that a decoder is told. Headers are checked where that is free: on the CPU."""
    return None if device.type == "cpu" else step


def _check(parts: Sequence["_Whole"] | Sequence["_Split"]) -> Fine:
    """Whether the chunk is finite, where somebody wants to know."""
    lanes = [part.part.lane for part in parts]
    if not any(lane.carry or lane.checked for lane in lanes):
        return True
    whole = torch.stack([part.is_finite() for part in parts]).all()
    fine = bool(whole) if whole.device.type == "cpu" else whole
    for lane in lanes:
        if lane.checked is not None:
            lane.checked(fine)
    return fine


def _decoded(codec: Codec, wire: Tensor, numel: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What a wire says, in fp32; one that holds the numbers themselves, in their `dtype`."""
    out = torch.empty(numel, dtype=dtype if isinstance(codec, Identity) else torch.float32, device=wire.device)
    codec.decode(wire, out, step=known(step, wire.device))
    return out


# --- one shot ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OneShot:
    """All-gather of the wire: one message, one rounding, (W-1) wires a rank."""

    transport: Transport

    def scratch_bytes(self, sizes: Sequence[Size]) -> int:
        """W wires of the chunk."""
        return self.transport.world * sum(size.codec.wire_bytes(size.numel, size.dtype) for size in sizes)

    def steps(self, parts: Sequence[Part], scale: float, tags: tuple[int, ...], desk: Desk) -> Steps:
        """Encode, send to all, add all."""
        link = self.transport
        sizes = [part.lane.codec.wire_bytes(part.x.numel(), part.x.dtype) for part in parts]
        wires_WN = desk.matrix(link.world, sum(sizes))
        wholes = [_Whole(part, wires, link.rank) for part, wires in zip(parts, _columns(wires_WN, sizes), strict=True)]
        for whole in wholes:
            whole.encode()
        yield link.gather(wires_WN.unbind(), tags[0])
        fine = _check(wholes)
        for whole in wholes:
            whole.finish(scale, fine)


def _columns(wires_WN: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The lanes' parts of rows of wires."""
    edges = [0, *itertools.accumulate(sizes)]
    return [wires_WN[..., begin:end] for begin, end in itertools.pairwise(edges)]


@dataclass(frozen=True)
class _Whole:
    """A part that every rank sends to every other."""

    part: Part
    wires_WN: Tensor
    rank: int

    @property
    def _span(self) -> Span:
        return Span(0, self.part.x.numel())

    def encode(self) -> None:
        """Write the own wire."""
        part, lane = self.part, self.part.lane
        part.load()
        x, wire, step = part.message(self._span), self.wires_WN[self.rank], part.key.of(0)
        lane.codec.encode(x, wire, step=step)
        if lane.carry is not None or lane.watch is not None:
            _look_back(part, self._span, x, lane.codec, wire, step)

    def is_finite(self) -> Tensor:
        """Whether all ranks' numbers are."""
        return self.part.lane.codec.all_finite(self.wires_WN, self.part.x.numel(), self.part.x.dtype)

    def finish(self, scale: float, fine: Fine) -> None:
        """Remember, add, write."""
        part, codec, carry = self.part, self.part.lane.codec, self.part.lane.carry
        if carry is not None:
            carry.keep(part.span(self._span), part.x, scale, fine)
        codec.decode_sum(self.wires_WN, part.x, scale=scale, step=known(part.key.of(0), part.x.device))
        if carry is not None:
            carry.result(part.span(self._span), part.x, fine)
        part.write()


def _look_back(part: Part, span: Span, x: Tensor, codec: Codec, wire: Tensor, step: int) -> None:
    """Compare what was encoded with what the others will read."""
    decoded = _decoded(codec, wire, x.numel(), step, x.dtype)
    if part.lane.watch is not None:
        part.lane.watch.lost(part.span(span), x, decoded, codec, wire)
    if part.lane.carry is not None:
        part.lane.carry.sent(x, decoded)


# --- two phases -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TwoPhase:
    """Every rank reduces its shard: two messages, two roundings, 2(W-1)/W wires a rank."""

    transport: Transport

    def scratch_bytes(self, sizes: Sequence[Size]) -> int:
        """Wires of all shards to send, and W wires of the own shard; the reduced wires take the place of the first."""
        return sum(_shards_bytes(size, self.transport.world) for size in sizes)

    def steps(self, parts: Sequence[Part], scale: float, tags: tuple[int, ...], desk: Desk) -> Steps:
        """Encode the shards, send each to its rank, recode the own one's sum, send it to all, decode all."""
        splits, wires, moving = _send_shards(self.transport, parts, tags[0], desk)
        yield moving
        for split in splits:
            split.reduce(scale)
        yield self.transport.gather(wires, tags[0] + 1)
        fine = _check(splits)
        for split in splits:
            split.finish(scale, fine)


def _shards_bytes(size: Size, world: int) -> int:
    """Scratch of `_send_shards` for one lane; the first shard is the longest."""
    cut = shards(Span(0, size.numel), world)
    return wires_bytes(size.codec, cut, size.dtype) + world * wires_bytes(size.codec, cut[:1], size.dtype)


class _Split:
    """A part in shards, one a rank: the first phase of a sum. `wires` has one a shard, `own_WN` the own shard's W."""

    def __init__(
        self, part: Part, link: Transport, cut: Sequence[Span], wires: Sequence[Tensor], own_WN: Tensor
    ) -> None:
        self.part, self.cut, self.wires, self.own_WN = part, cut, wires, own_WN
        self.rank, self.world = link.rank, link.world
        self.numel, self.step = cut[self.rank].numel, part.key.of(self.rank)  # of the own shard

    def _others_first(self) -> list[tuple[int, Span]]:
        """Shards that hold anything, the own one last."""
        order = others_first(self.rank, self.world)
        return [(shard, self.cut[shard]) for shard in order if self.cut[shard].numel]

    @property
    def _exact_own(self) -> bool:
        return self.part.lane.carry is not None or self.part.lane.exact_own

    def encode(self) -> None:
        """Write the wires of all shards; the own one may stay as it is."""
        part, lane = self.part, self.part.lane
        part.load()
        for shard, span in self._others_first():
            x = part.message(span)
            if shard == self.rank and self._exact_own:
                continue
            wire, step = self.own_WN[shard] if shard == self.rank else self.wires[shard], part.key.of(shard)
            lane.first.encode(x, wire, step=step)
            if lane.carry is not None or lane.watch is not None:
                _look_back(part, span, x, lane.first, wire, step)

    def reduce(self, scale: float) -> None:
        """Write the wire of the own shard's sum."""
        if not self.numel:
            return
        lane, x, step, wire = self.part.lane, self.part.x, self.step, self.wires[self.rank]
        if not self._exact_own:
            trusted = x.device.type != "cpu"
            lane.codec.recode(
                self.own_WN, wire, self.numel, scale=abs(scale), step=step, dtype=x.dtype, trusted=trusted
            )
            return
        total, own = self._sum_of_others(scale), self._shard(self.rank)
        if lane.carry is None:
            total.add_(own, alpha=scale)
        else:
            lane.carry.reduced(own, total, scale)
        lane.codec.encode(total, wire, step=step)

    def _sum_of_others(self, scale: float) -> Tensor:
        """In place of the own wire, which was not written, goes the last one."""
        last = self.world - 1
        if self.rank != last:
            self.own_WN[self.rank].copy_(self.own_WN[last])
        total = torch.empty(self.numel, dtype=torch.float32, device=self.part.x.device)
        step = known(self.step, total.device)
        self.part.lane.codec.decode_sum(self.own_WN[:last], total, scale=scale, step=step)
        return total

    def is_finite(self) -> Tensor:
        """Whether all ranks' numbers of all shards are: the sums hold what was not."""
        codec, dtype = self.part.lane.codec, self.part.x.dtype
        filled = self._others_first()
        checks = [codec.all_finite(self.wires[shard][None], span.numel, dtype) for shard, span in filled]
        return torch.stack(checks).all() if checks else torch.ones((), dtype=torch.bool, device=self.part.x.device)

    def finish(self, scale: float, fine: Fine) -> None:
        """Remember, decode, write."""
        part, codec, carry = self.part, self.part.lane.codec, self.part.lane.carry
        for shard, span in self._others_first():
            x, step = self._shard(shard), part.key.of(shard)
            if carry is None:
                sign = -1.0 if scale < 0 else 1.0
                codec.decode(self.wires[shard], x, scale=sign, step=known(step, x.device))
                continue
            if shard == self.rank:
                result = _decoded(codec, self.wires[shard], span.numel, step)
                carry.keep_own(part.span(span), x, result, fine)
                x.copy_(result)
            else:
                carry.keep(part.span(span), x, scale, fine)
                codec.decode(self.wires[shard], x, step=known(step, x.device))
            carry.result(part.span(span), x, fine)
        part.write()

    def _shard(self, shard: int) -> Tensor:
        return self.part.x[self.cut[shard].begin : self.cut[shard].end]


def _send_shards(
    link: Transport, parts: Sequence[Part], tag: int, desk: Desk
) -> tuple[list[_Split], list[Tensor], Sequence[Waitable]]:
    """The first phase of a sum: every rank gets its shard from all ranks.

    Gives the parts in shards, the wires of every rank's shards (the own ones still to be written), and what moves.
    """
    world, rank = link.world, link.rank
    cuts = [shards(Span(0, part.x.numel()), world) for part in parts]
    sizes_WL = [
        [wires_bytes(part.lane.codec, [cut[shard]], part.x.dtype) for part, cut in zip(parts, cuts, strict=True)]
        for shard in range(world)
    ]
    wires = desk.rows([sum(sizes) for sizes in sizes_WL])
    own_WN = desk.matrix(world, wires[rank].numel())
    wires_WL = [_columns(wire, sizes) for wire, sizes in zip(wires, sizes_WL, strict=True)]
    owns_L = _columns(own_WN, sizes_WL[rank])
    splits = [
        _Split(part, link, cuts[lane], [wires_WL[shard][lane] for shard in range(world)], owns_L[lane])
        for lane, part in enumerate(parts)
    ]
    for split in splits:
        split.encode()
    peers = others_first(rank, world)[:-1]
    sends = [(peer, wires[peer]) for peer in peers if wires[peer].numel()]
    receives = [(peer, own_WN[peer]) for peer in sorted(peers) if wires[rank].numel()]
    return splits, wires, link.exchange(sends, receives, tag)


def reducer(transport: Transport, algorithm: str) -> OneShot | TwoPhase:
    """What sums over one group."""
    return (OneShot if algorithm == "one_shot" else TwoPhase)(transport)


# --- hierarchy --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hierarchical:
    """Inside a node by the lanes' codec, across nodes by another: the slow link carries 1/B of a sum of B ranks.

    Without feedback. A lane's watch sees what is lost across nodes.
    """

    across: Transport
    inside: Transport

    def scratch_bytes(self, sizes: Sequence[Size]) -> int:
        """Both phases inside, the sums of the own shards in fp32, and what travels across."""
        shard_sizes = [_shard_size(size, self.inside.world) for size in sizes]
        inner = sum(_shards_bytes(size, self.inside.world) for size in sizes)
        sums = sum(aligned(size.numel * size.dtype.itemsize) for size in shard_sizes)
        return inner + sums + self._outer.scratch_bytes(shard_sizes)

    @property
    def _outer(self) -> OneShot | TwoPhase:
        return reducer(self.across, fewest_roundings(self.across.world))

    @property
    def _outer_messages(self) -> int:
        return 0 if self.across.world == 1 else 1 if isinstance(self._outer, OneShot) else 2

    @property
    def messages(self) -> int:
        """How often a chunk waits, the same on all ranks, whether their shards hold anything or not."""
        return 2 + self._outer_messages

    def steps(self, parts: Sequence[Part], scale: float, tags: tuple[int, ...], desk: Desk) -> Steps:
        """Reduce-scatter inside, sum across, all-gather inside."""
        unwatched = [replace(part, lane=replace(part.lane, watch=None)) for part in parts]
        splits, wires, moving = _send_shards(self.inside, unwatched, tags[1], desk)
        yield moving
        sums = [(split, self._sum(split, desk)) for split in splits if split.numel]
        if self.across.world == 1:
            for _, total in sums:
                total.mul_(scale)
        elif sums:
            watches = [part.lane.watch for part, split in zip(parts, splits, strict=True) if split.numel]
            outer = [self._outer_part(*one, watch) for one, watch in zip(sums, watches, strict=True)]
            yield from self._outer.steps(outer, scale, tags, desk)
        else:
            for _ in range(self._outer_messages):
                yield ()
        for split, total in sums:
            fitted = _fitted(total, split.part.x.dtype, split.part.lane.outer[0])
            split.part.lane.codec.encode(fitted, split.wires[split.rank], step=split.step)
        yield self.inside.gather(wires, tags[1] + 1)
        fine = _check(splits)
        for split in splits:
            split.finish(1.0, fine)

    def _sum(self, split: _Split, desk: Desk) -> Tensor:
        """The own shard's, of this node."""
        x, codec = split.part.x, split.part.lane.codec
        total = desk.numbers(split.numel, total_dtype(split.part.lane.outer[0], x.dtype))
        step = known(split.step, x.device)
        if isinstance(codec, Identity) and x.dtype != total.dtype:  # its wires hold numbers of 16 bits
            each = torch.empty(split.numel, dtype=x.dtype, device=x.device)
            total.zero_()
            for wire in split.own_WN:
                codec.decode(wire, each, step=step)
                total += each
        else:
            codec.decode_sum(split.own_WN, total, step=step)
        return total

    def _outer_part(self, split: _Split, total: Tensor, watch: Watch | None) -> Part:
        part = split.part
        lane = Lane(Flat([total]), Cut(total.numel(), total.numel()), *part.lane.outer, watch=watch)
        return Part(lane, total, total, Key(split.step, part.key.chunk), part.begin + split.cut[split.rank].begin)


def _shard_size(size: Size, world: int) -> Size:
    """What of a part goes across nodes: the first shard is the longest."""
    across = size.across or size.codec
    return Size(across, shards(Span(0, size.numel), world)[0].numel, total_dtype(across, size.dtype))


def _fitted(total: Tensor, dtype: torch.dtype, codec: Codec) -> Tensor:
    """A decoded sum as numbers of `dtype`: what the codec's error took past the largest of them becomes that."""
    if dtype.itemsize >= total.itemsize:
        return total.to(dtype)
    most = _MOST_HALF if dtype == torch.float16 else torch.finfo(dtype).max
    return reference.saturate(codec.encoding(total.dtype).format, total, most).to(dtype)


def total_dtype(across: Codec, dtype: torch.dtype) -> torch.dtype:
    """Of a node's sums of numbers of `dtype`, which go across nodes."""
    return encoded_dtype(across, torch.float64 if dtype == torch.float64 else torch.float32, fed_back=False)
