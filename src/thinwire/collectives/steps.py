"""What happens to one chunk: the algorithms, as coroutines that yield the messages they wait for.

Legend: W ranks, N bytes of one wire. Every rank decodes the same wires, its own too, so all end with the same bits.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.collectives.chunks import Cut, Desk, Flat, Span, shards, wires_bytes
from thinwire.collectives.primitives import Transport, Waitable
from thinwire.collectives.schedule import Operation, Steps
from thinwire.kernels import hashing

TAGS = 8  # an operation draws as many, whatever it is: ranks may not differ in how many they drew
_SHARD = 4  # stream of the hash


class Key(NamedTuple):
    """Which wires share rotation and dither: one key a call and chunk, one step a shard of it."""

    step: int
    chunk: int

    def of(self, shard: int) -> int:
        """The codec's `step` for a shard."""
        return hashing.key(self.step, self.chunk << 16 | shard, _SHARD)


def _known(step: int, device: torch.device) -> int | None:
    """Headers are checked where that is free: on the CPU."""
    return None if device.type == "cpu" else step


class Reducer(Protocol):
    """Sums a chunk over ranks."""

    def scratch_bytes(self, span: Span, dtype: torch.dtype) -> int:
        """Scratch of a chunk."""

    def steps(self, x: Tensor, out: Tensor, scale: float, key: Key, tags: tuple[int, ...], desk: Desk) -> Steps:
        """out = scale * sum of x over the ranks. x and out may be the same memory."""


@dataclass(frozen=True)
class OneShot:
    """All-gather of the wire: one message, one rounding, (W-1) wires a rank."""

    transport: Transport
    codec: Codec

    def scratch_bytes(self, span: Span, dtype: torch.dtype) -> int:
        """W wires of the chunk."""
        return self.transport.world * self.codec.wire_bytes(span.numel, dtype)

    def steps(self, x: Tensor, out: Tensor, scale: float, key: Key, tags: tuple[int, ...], desk: Desk) -> Steps:
        """Encode, send to all, add all."""
        codec, link, step = self.codec, self.transport, key.of(0)
        wires_WN = desk.matrix(link.world, codec.wire_bytes(x.numel(), x.dtype))
        codec.encode(x, wires_WN[link.rank], step=step)
        yield link.gather(wires_WN.unbind(), tags[0])
        codec.decode_sum(wires_WN, out, scale=scale, step=_known(step, x.device))


@dataclass(frozen=True)
class TwoPhase:
    """Every rank reduces its shard: two messages, two roundings, 2(W-1)/W wires a rank."""

    transport: Transport
    codec: Codec

    def scratch_bytes(self, span: Span, dtype: torch.dtype) -> int:
        """Wires of all shards to send, and W wires of the own shard; the reduced wires take the place of the first."""
        return _shards_bytes(self.codec, shards(span, self.transport.world), dtype)

    def steps(self, x: Tensor, out: Tensor, scale: float, key: Key, tags: tuple[int, ...], desk: Desk) -> Steps:
        """Encode the shards, send each to its rank, recode the own one's sum, send it to all, decode all."""
        codec, link, rank = self.codec, self.transport, self.transport.rank
        parts, wires, own_WN = yield from _send_shards(link, codec, x, key, tags[0], desk)
        numel, step, trusted = parts[rank].numel, key.of(rank), x.device.type != "cpu"
        if numel:
            codec.recode(own_WN, wires[rank], numel, scale=abs(scale), step=step, dtype=x.dtype, trusted=trusted)
        yield link.gather(wires, tags[0] + 1)
        _decode(codec, wires, parts, out, key, -1.0 if scale < 0 else 1.0)


@dataclass(frozen=True)
class Hierarchical:
    """Inside a node by one codec, across nodes by another: the slow link carries 1/B of a two-phase sum of B ranks."""

    across: Transport
    inside: Transport
    inside_codec: Codec
    across_codec: Codec

    def scratch_bytes(self, span: Span, dtype: torch.dtype) -> int:
        """Both phases inside, the sum of the own shard in fp32, and what travels across."""
        parts, total = shards(span, self.inside.world), _total_dtype(dtype)
        inner, shard = _shards_bytes(self.inside_codec, parts, dtype), Span(0, parts[0].numel)
        return inner + -(-shard.numel * total.itemsize // 16) * 16 + self._outer.scratch_bytes(shard, total)

    @property
    def _outer(self) -> OneShot | TwoPhase:
        return (OneShot if self.across.world == 2 else TwoPhase)(self.across, self.across_codec)

    def steps(self, x: Tensor, out: Tensor, scale: float, key: Key, tags: tuple[int, ...], desk: Desk) -> Steps:
        """Reduce-scatter inside, sum across, all-gather inside."""
        codec, link, rank = self.inside_codec, self.inside, self.inside.rank
        parts, wires, own_WN = yield from _send_shards(link, codec, x, key, tags[1], desk)
        numel = parts[rank].numel
        total = desk.numbers(numel, _total_dtype(x.dtype))
        if numel:
            codec.decode_sum(own_WN, total, step=_known(key.of(rank), x.device))
            outer_key = Key(key.of(rank), key.chunk)
            if self.across.world > 1:
                yield from self._outer.steps(total, total, scale, outer_key, tags, desk)
            else:
                total.mul_(scale)
            codec.encode(total.to(x.dtype), wires[rank], step=key.of(rank))
        yield link.gather(wires, tags[1] + 1)
        _decode(codec, wires, parts, out, key, 1.0)


def _shards_bytes(codec: Codec, parts: Sequence[Span], dtype: torch.dtype) -> int:
    """Scratch of `_send_shards`; the first shard is the longest."""
    return wires_bytes(codec, parts, dtype) + len(parts) * wires_bytes(codec, parts[:1], dtype)


def _send_shards(
    link: Transport, codec: Codec, x: Tensor, key: Key, tag: int, desk: Desk
) -> Generator[Sequence[Waitable], None, tuple[list[Span], list[Tensor], Tensor]]:
    """The first phase of a sum: every rank gets its shard from all ranks.

    Gives the shards, their wires (the own one still to be written) and the W wires of the own shard.
    """
    parts, rank = shards(Span(0, x.numel()), link.world), link.rank
    wires = desk.rows(_sizes(codec, parts, x.dtype))
    own_WN = desk.matrix(link.world, wires[rank].numel())
    filled = [shard for shard in _others_first(rank, link.world) if parts[shard].numel]
    for shard in filled:
        wire = own_WN[rank] if shard == rank else wires[shard]
        codec.encode(x[parts[shard].begin : parts[shard].end], wire, step=key.of(shard))
    sends = [(shard, wires[shard]) for shard in filled if shard != rank]
    receives = [(peer, own_WN[peer]) for peer in range(link.world) if peer != rank and parts[rank].numel]
    yield link.exchange(sends, receives, tag)
    return parts, wires, own_WN


def _total_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _others_first(rank: int, world: int) -> list[int]:
    """Ranks in the order in which each meets another first, the own one last."""
    return [(rank + 1 + i) % world for i in range(world)]


def _sizes(codec: Codec, parts: Sequence[Span], dtype: torch.dtype) -> list[int]:
    return [codec.wire_bytes(part.numel, dtype) if part.numel else 0 for part in parts]


def _decode(
    codec: Codec, wires: Sequence[Tensor], parts: Sequence[Span], out: Tensor, key: Key, scale: float = 1.0
) -> None:
    for shard, (wire, part) in enumerate(zip(wires, parts, strict=True)):
        if part.numel:
            codec.decode(wire, out[part.begin : part.end], scale=scale, step=_known(key.of(shard), out.device))


@dataclass(frozen=True)
class Setting:
    """What the operations have in common."""

    link: Transport
    codec: Codec
    step: int
    tags: tuple[int, ...]  # the first of TAGS in each group: across nodes, inside a node
    chunk_bytes: int  # scratch of one chunk
    scratch_bytes: int  # scratch of the operation


class _Base(Operation):
    def __init__(self, setting: Setting, num_chunks: int, outputs: Sequence[Flat], inputs: Sequence[Flat] = ()) -> None:
        self._link, self._codec, self._step, self._tags = setting.link, setting.codec, setting.step, setting.tags
        self.num_chunks, self.chunk_bytes, self.scratch_bytes = num_chunks, setting.chunk_bytes, setting.scratch_bytes
        self._outputs, self._inputs = outputs, inputs
        self.outputs = [tensor for flat in outputs for tensor in flat.tensors]
        self._copies: Sequence[tuple[Tensor, Tensor]] = ()

    def copies_back(self, outputs: Sequence[Tensor], copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        """The caller's outputs, and (tensor, numbers) of those that were worked on elsewhere."""
        self.outputs, self._copies = list(outputs), copies

    def memory(self) -> Sequence[Tensor]:
        """Outputs, inputs, and the copies made of either."""
        flats = [tensor for flat in (*self._outputs, *self._inputs) for tensor in flat.memory]
        return [*flats, *(numbers for _, numbers in self._copies)]

    def finish(self) -> None:
        """Outputs that are not contiguous get their numbers now."""
        for flat in self._outputs:
            flat.finish()
        for tensor, numbers in self._copies:
            tensor.detach().copy_(numbers.view(tensor.shape))


class AllReduce(_Base):
    """Sum `flat` over the ranks, in place."""

    def __init__(self, setting: Setting, flat: Flat, cut: Cut, reducer: Reducer, scale: float) -> None:
        super().__init__(setting, cut.num_chunks, [flat])
        self._flat, self._cut, self._reducer, self._scale = flat, cut, reducer, scale
        self.in_order = isinstance(reducer, Hierarchical)

    def chunk(self, index: int, scratch: Tensor) -> Steps:
        """The reducer's steps on one span."""
        span, desk = self._cut.span(index), Desk(scratch)
        x = self._flat.read(span, desk)
        yield from self._reducer.steps(x, x, self._scale, Key(self._step, index), self._tags, desk)
        self._flat.write(span, x)


class ReduceScatter(_Base):
    """output = scale * sum over ranks of their input's shard for this rank. One message, one rounding."""

    def __init__(self, setting: Setting, output: Flat, input: Flat, cut: Cut, scale: float) -> None:
        super().__init__(setting, cut.num_chunks, [output], [input])
        self._output, self._input, self._cut, self._scale = output, input, cut, scale

    def chunk(self, index: int, scratch: Tensor) -> Steps:
        """Encode every rank's part, send it there, add what came."""
        codec, link, span = self._codec, self._link, self._cut.span(index)
        desk, key, shard = Desk(scratch), Key(self._step, index), self._cut.numel
        nbytes = codec.wire_bytes(span.numel, self._input.dtype)
        sent_WN, own_WN = desk.matrix(link.world, nbytes), desk.matrix(link.world, nbytes)
        for rank in _others_first(link.rank, link.world):
            part = Span(rank * shard + span.begin, rank * shard + span.end)
            wire = (own_WN if rank == link.rank else sent_WN)[rank]
            codec.encode(self._input.read(part, desk), wire, step=key.of(rank))
        peers = [rank for rank in range(link.world) if rank != link.rank]
        yield link.exchange([(p, sent_WN[p]) for p in peers], [(p, own_WN[p]) for p in peers], self._tags[0])
        out = self._output.read(span, desk)
        codec.decode_sum(own_WN, out, scale=self._scale, step=_known(key.of(link.rank), out.device))


class Gather(_Base):
    """outputs[r] = rank r's input, of any length, on every rank. One message, one rounding."""

    def __init__(self, setting: Setting, outputs: Sequence[Flat], input: Flat, cut: Cut) -> None:
        super().__init__(setting, cut.num_chunks, outputs, [input])
        self._input, self._cuts = input, [Cut(flat.numel, cut.chunk, cut.edge) for flat in outputs]

    def chunk(self, index: int, scratch: Tensor) -> Steps:
        """Encode the own part, send it to all, decode all."""
        codec, link, desk, key = self._codec, self._link, Desk(scratch), Key(self._step, index)
        parts = [cut.span(index) for cut in self._cuts]
        wires = desk.rows(_sizes(codec, parts, self._input.dtype))
        if parts[link.rank].numel:
            codec.encode(self._input.read(parts[link.rank], desk), wires[link.rank], step=key.of(link.rank))
        yield link.gather(wires, self._tags[0])
        for rank, (wire, part) in enumerate(zip(wires, parts, strict=True)):
            if part.numel:
                out = self._outputs[rank].read(part, desk)
                codec.decode(wire, out, step=_known(key.of(rank), out.device))


class Exchange(_Base):
    """outputs[r] = what rank r's inputs hold for this rank, any lengths. What a rank keeps is copied exactly."""

    def __init__(self, setting: Setting, outputs: Sequence[Flat], inputs: Sequence[Flat], chunk: int) -> None:
        chunks = max(Cut(flat.numel, chunk).num_chunks for flat in (*outputs, *inputs))
        super().__init__(setting, chunks, outputs, inputs)
        self._chunk = chunk

    def chunk(self, index: int, scratch: Tensor) -> Steps:
        """Encode what goes to each rank, send, decode what came from each."""
        codec, link, desk, key = self._codec, self._link, Desk(scratch), Key(self._step, index)
        sends = self._messages(self._inputs, index, desk)
        receives = self._messages(self._outputs, index, desk)
        for peer, wire, part in sends:
            codec.encode(self._inputs[peer].read(part, desk), wire, step=key.of(link.rank))
        moving = link.exchange([(p, w) for p, w, _ in sends], [(p, w) for p, w, _ in receives], self._tags[0])
        kept = Cut(self._inputs[link.rank].numel, self._chunk).span(index)
        self._outputs[link.rank].read(kept, desk).copy_(self._inputs[link.rank].read(kept, desk))
        yield moving
        for peer, wire, part in receives:
            out = self._outputs[peer].read(part, desk)
            codec.decode(wire, out, step=_known(key.of(peer), out.device))

    def _messages(self, flats: Sequence[Flat], index: int, desk: Desk) -> list[tuple[int, Tensor, Span]]:
        """(other rank, wire, span) of every message of a chunk."""
        spans = [Cut(flat.numel, self._chunk).span(index) for flat in flats]
        peers = [r for r in _others_first(self._link.rank, self._link.world)[:-1] if spans[r].numel]
        return [(r, desk.take(self._codec.wire_bytes(spans[r].numel, flats[r].dtype)), spans[r]) for r in peers]


class Broadcast(_Base):
    """flat = the source's, decoded from the source's wires on every rank, its own too.

    The source sends every other rank a share of the wires, and these pass their shares on: no link carries more than
    one wire in either direction.
    """

    def __init__(self, setting: Setting, flat: Flat, source: int, cut: Cut) -> None:
        super().__init__(setting, cut.num_chunks, [flat])
        self._flat, self._source, self._cut = flat, source, cut

    def chunk(self, index: int, scratch: Tensor) -> Steps:
        """From the source to each, from each to the others, decode all."""
        codec, link, span = self._codec, self._link, self._cut.span(index)
        desk, key = Desk(scratch), Key(self._step, index)
        x = self._flat.read(span, desk)
        others = [rank for rank in range(link.world) if rank != self._source]
        parts = shards(Span(0, span.numel), len(others))
        wires = desk.rows(_sizes(codec, parts, self._flat.dtype))
        shares = {rank: wire for rank, wire in zip(others, wires, strict=True) if wire.numel()}
        if link.rank == self._source:
            for shard, (wire, part) in enumerate(zip(wires, parts, strict=True)):
                if part.numel:
                    codec.encode(x[part.begin : part.end], wire, step=key.of(shard))
            yield link.exchange(list(shares.items()), [], self._tags[0])
        else:
            own = shares.pop(link.rank, None)
            yield link.exchange([], [] if own is None else [(self._source, own)], self._tags[0])
            sends = [] if own is None else [(rank, own) for rank in others if rank != link.rank]
            yield link.exchange(sends, list(shares.items()), self._tags[0] + 1)
        _decode(codec, wires, parts, x, key)
        self._flat.write(span, x)
