"""Lanes of rows, one row per rank, that travel again and again, all in one message: decided once, run at every step.

A scatter sums over ranks what they have for each rank; a gather gives every rank what all have. Other sharded trainers
than FSDP2 may use both: a row is whatever a rank owns of a flat buffer.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from thinwire.collectives import chunks, operations, programs
from thinwire.collectives.call import Call
from thinwire.collectives.channel import channel_of
from thinwire.collectives.chunks import Cut, Flat
from thinwire.collectives.lane import Carry, Fine, Lane, LaneSpec, Watch, encoded_dtype
from thinwire.collectives.plan import CallPlan, verb_cut
from thinwire.collectives.programs import Program, StreamLane
from thinwire.collectives.transport import Group, RowTransport
from thinwire.kernels.rows import Bad

Make = Callable[[RowTransport, Sequence[StreamLane]], Program]  # a program of lanes of rows


@dataclass(frozen=True)
class LaneWatch:
    """What looks on at a lane: its feedback, and who is told of its errors and of numbers that are not finite."""

    carry: Carry | None = None
    watch: Watch | None = None
    checked: Callable[[Fine], None] | None = None


class RowCarries(Protocol):
    """What thinwire.RowFeedback is to a call."""

    kind: str

    def carry(self, numel: int, part: int, scale: float, device: torch.device) -> Carry:
        """The feedback of rows of `numel` elements in all, `part` each, whose sum is multiplied by `scale`."""


class _RowMessage:
    """`numel` of a spec is that of a row, the same for every rank."""

    verb = ""
    wires_held = 1  # matrices of wires in a chunk's scratch

    def __init__(self, specs: Sequence[LaneSpec], like: Tensor, group: Group, make: Make, how: str = "") -> None:
        self.specs = tuple(specs)
        self.channel = channel_of(group, like.device)
        self._dtype = like.dtype
        named = "; ".join(f"{spec.numel} {spec.codec} {spec.feedback}".strip() for spec in self.specs)
        self._text = f"{self.verb}({named}; {str(like.dtype).removeprefix('torch.')}{how})"
        self._cuts = [self._cut(spec) for spec in self.specs]
        self._plan = CallPlan(self._text, self.specs[0].codec, self._cuts[0], *self._scratch())
        self._program = self._made(make)

    @property
    def on_stream(self) -> bool:
        """Whether a program on a stream of a GPU runs it, unless lanes are watched."""
        return self._program is not None

    @functools.cached_property
    def wire_bytes(self) -> int:
        """Bytes of the wires of one row."""
        return sum(spec.codec.wire_bytes(spec.numel, self._encoded(spec)) for spec in self.specs)

    @functools.cached_property
    def sent_bytes(self) -> int:
        """Bytes of wires that this rank hands to the transport at one step: a row to every other rank."""
        row = sum(
            spec.codec.wire_bytes(cut.span(index).numel, self._encoded(spec))
            for spec, cut in zip(self.specs, self._cuts, strict=True)
            for index in range(cut.num_chunks)
        )
        return (self.channel.world - 1) * row

    def _encoded(self, spec: LaneSpec) -> torch.dtype:
        return encoded_dtype(spec.codec, self._dtype, fed_back=bool(spec.feedback))

    def _cut(self, spec: LaneSpec) -> Cut:
        wire = self.channel.world * spec.codec.wire_bytes(spec.numel, self._encoded(spec))
        return verb_cut(spec.codec, spec.numel, wire, self.channel.transport)

    def _scratch(self) -> tuple[int, int]:
        """Scratch of one chunk, and of all of them."""
        world = self.channel.world
        wire = 0
        chunk_wire = 0
        room = 0
        for spec, cut in zip(self.specs, self._cuts, strict=True):
            dtype = self._encoded(spec)
            numel = min(cut.chunk, spec.numel)
            wire += world * spec.codec.wire_bytes(spec.numel, dtype)
            chunk_wire += world * spec.codec.wire_bytes(numel, dtype)
            if dtype != self._dtype:
                room += (world + 1) * chunks.aligned(numel * dtype.itemsize)
        notes = world * operations.NOTE_BYTES
        chunk_bytes = self.wires_held * (chunk_wire + notes) + room
        most = max(cut.num_chunks for cut in self._cuts)
        return chunk_bytes, chunks.scratch_limit(wire, chunk_wire, chunk_bytes, most)

    def _made(self, make: Make) -> Any:
        """The program that runs it on a stream of a GPU; None where an operation has to."""
        link = self.channel.transport
        if not isinstance(link, RowTransport) or any(cut.num_chunks > 1 for cut in self._cuts):
            return None
        for spec in self.specs:
            if not spec.numel or spec.feedback or not programs.fits(spec.codec, self._dtype):
                return None
        return make(link, [StreamLane(spec.numel, self._dtype, spec.codec, spec.first) for spec in self.specs])


class ScatterMessage(_RowMessage):
    """Sums of rows: every rank gets scale * the sum over ranks of their rows for it."""

    verb = "scatter"
    wires_held = 2

    def __init__(self, specs: Sequence[LaneSpec], like: Tensor, group: Group, scale: float) -> None:
        self.scale = scale
        make = functools.partial(programs.ReduceScatter, scale=scale)
        super().__init__(specs, like, group, make, f", scale={scale:g}")

    def run(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        step: int,
        watched: Sequence[LaneWatch] | None = None,
        note: Bad | None = None,
    ) -> None:
        """By lane: a row for the sum, and the rows of all ranks; what has feedback is changed.

        It returns when the outputs are there or, on a GPU, when the current stream will have them. `note`: where a
        program notes numbers that are not finite.
        """
        call = Call(self.channel, self._text)
        if self._program is not None and watched is None:
            program = self._program if note is None else programs.Noting(self._program, note)
            call.start(program, [*outputs, *inputs], outputs, step, False, written=len(outputs))
            return
        parts = zip(inputs, self._cuts, self.specs, watched or [LaneWatch()] * len(inputs), strict=True)
        lanes = [
            Lane(Flat([x]), cut, spec.codec, spec.codec, seen.carry, seen.watch, seen.checked)
            for x, cut, spec, seen in parts
        ]
        rows = [Flat([output]) for output in outputs]
        operation = operations.ReduceScatter(call.setting(self._plan, step), lanes, rows, self.scale)
        self.channel.run(operation, call.site).wait()


class GatherMessage(_RowMessage):
    """Every rank's row, on every rank, as decoded from its wire."""

    verb = "gather"

    def __init__(self, specs: Sequence[LaneSpec], like: Tensor, group: Group) -> None:
        super().__init__(specs, like, group, programs.Gather)

    def run(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], step: int) -> None:
        """By lane: the rows of all ranks, and the own one, which may be a part of them."""
        call = Call(self.channel, self._text)
        if self._program is not None:
            call.start(self._program, [*outputs, *inputs], outputs, step, False, written=len(outputs))
            return
        world = self.channel.world
        lanes = [
            operations.GatherLane([Flat([row]) for row in out.view(world, -1).unbind()], Flat([x]), cut, spec.codec)
            for out, x, cut, spec in zip(outputs, inputs, self._cuts, self.specs, strict=True)
        ]
        operation = operations.Gather(call.setting(self._plan, step), lanes)
        self.channel.run(operation, call.site).wait()
