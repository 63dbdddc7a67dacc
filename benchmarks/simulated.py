"""Replicas of one network in one process, whose gradients are averaged as DDP's are, without ranks.

The decisions, rules, feedback and launches are those that `compress_ddp` uses on NCCL (integrations/choice,
integrations/sync.py, collectives/programs.py). Two things are different: wires change hands by a copy, and all
gradients are one bucket, in which the parameters that a rule exempts come last. thinwire.rehearsal plays ranks in the
pipeline's stages, as a user's micro-batches come, with twenty times as many launches for a network of 25 M weights.

Legend: W replicas, N numbers of a replica's gradients, S bytes of one row of wires.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from thinwire.codecs import Identity
from thinwire.collectives.sums import SumChunk, SumKernels, lane_rows
from thinwire.feedback import Memories
from thinwire.integrations.choice import Chooser
from thinwire.integrations.choice.options import DDPOptions
from thinwire.integrations.lanes import BucketLane, lanes_of
from thinwire.integrations.models import ParameterNames, ParameterSize
from thinwire.integrations.stats import Tally
from thinwire.kernels import compiled, hashing
from thinwire.kernels.rows import Bad, Memory, message

_LINE = 1024  # elements


class Spot(NamedTuple):
    """A replica's place among the others."""

    rank: int
    world: int
    device: torch.device


class Lane(NamedTuple):
    """Parameters that share a codec and a feedback, on all replicas."""

    lane: BucketLane
    launches_W: list[SumKernels]
    carries_W: list[Any]
    start: int  # of its wires in a row
    mixed: int  # what the step is mixed with (hashing.row_step)

    def numbers(self, rows_WN: Tensor) -> list[Tensor]:
        """This lane's numbers of every replica, each in one piece."""
        spans = self.lane.stretches
        return [
            row[slice(*spans[0])] if len(spans) == 1 else torch.cat([row[a:b] for a, b in spans]) for row in rows_WN
        ]

    def memory(self, rank: int, x: Tensor) -> Memory | None:
        """What feedback remembers of a replica; `x` is where the launches leave what they need of each other."""
        carry = self.carries_W[rank]
        return carry and Memory(carry.kept, x, carry.mean)


class ReplicaAverager:
    """Averages the gradients of W replicas of a network."""

    def __init__(self, network: nn.Module, options: DDPOptions, world: int) -> None:
        names = ParameterNames()
        names.take(network)
        self.chooser = Chooser(options, names, whole=True)
        rules = options.rules
        named = sorted(
            names.sizes.items(), key=lambda item: rules.fixed(item[0], item[1].shape, item[1].dtype) is not None
        )
        self.sizes: dict[str, ParameterSize] = dict(named)
        found = dict(network.named_parameters())
        self.parameters = [found[name] for name in self.sizes]
        self.world = world
        self.device = self.parameters[0].device
        self.bytes_per_step = 0  # that the replica which sends most would hand to a transport
        self._memories = [Memories(options.residual_dtype) for _ in range(world)]
        self._tally = Tally()
        self._lanes: list[Lane] = []
        self._note = torch.zeros(2, dtype=torch.int32, device=self.device)  # of steps that were not finite
        self._new = False  # whether the lanes have not been sent yet
        self._setting: object = None  # the decisions that the lanes were made with

    def new_rows(self, device: str | torch.device | None = None) -> Tensor:
        """A row for the gradients of each replica; rows begin on whole lines of memory, as buckets do."""
        numel = sum(p.numel() for p in self.parameters)
        return torch.zeros(self.world, -(-numel // _LINE) * _LINE, device=device or self.device)[:, :numel]

    def views(self, row_N: Tensor) -> list[Tensor]:
        """A replica's gradients in a row, shaped as the parameters are."""
        parts = row_N.split([size.numel for size in self.sizes.values()])
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]

    @property
    def feedback(self) -> str:
        """The kinds that are in use, or "none"."""
        return self.chooser.feedback_in_use(lane.lane.spec.feedback for lane in self._lanes)

    def average(self, rows_WN: Tensor, step: int) -> None:
        """The first row = the mean of all rows, as every replica reads it. The other rows are used up."""
        tally = self._tally
        self.chooser.begin(step, 0.0, tally.errors_by_name(), tally.end_step(), lambda values, _: list(values))
        if self.chooser.policy.setting != self._setting:
            self._setting = self.chooser.policy.setting
            self._lanes = self._new_lanes()
            self._new = True
        if all(isinstance(lane.lane.spec.codec, Identity) for lane in self._lanes):
            rows_WN[0] = rows_WN.mean(0)
            return
        weighed = self.chooser.weighed(tuple(self.sizes))
        roots = self.chooser.moments.roots([self.parameters[i] for i in weighed]) if weighed else []
        for row in rows_WN if weighed else ():
            views = self.views(row)
            torch._foreach_div_([views[i] for i in weighed], roots)
        if self._new and self.device.type == "cuda":
            self._send(self.new_rows("meta"), step)  # which computes nothing
            compiled()
        self._new = False
        if self.chooser.measuring:
            self._measure([lane.numbers(rows_WN) for lane in self._lanes], step)
        self._send(rows_WN, step)
        if weighed:
            views = self.views(rows_WN[0])
            torch._foreach_mul_([views[i] for i in weighed], roots)

    def _send(self, rows_WN: Tensor, step: int) -> None:
        world = self.world
        xs_L = [lane.numbers(rows_WN) for lane in self._lanes]
        mixed = hashing.mix64(step)
        stride = self._stride
        sent_WWS = torch.empty(world, world, stride, dtype=torch.uint8, device=rows_WN.device)
        for lane, xs in zip(self._lanes, xs_L, strict=True):
            for rank, x in enumerate(xs):
                wires = sent_WWS[rank].view(-1)[lane.start :]
                lane.launches_W[rank].encode(x, wires, mixed ^ lane.mixed, lane.memory(rank, x))
        came_WWS = sent_WWS.transpose(0, 1).contiguous()
        whole_WS = torch.empty(world, stride, dtype=torch.uint8, device=rows_WN.device)
        for lane, xs in zip(self._lanes, xs_L, strict=True):
            for rank, (launches, x) in enumerate(zip(lane.launches_W, xs, strict=True)):
                if launches.recode is not None:
                    wire = whole_WS[rank, lane.start :][: launches.job.layout(rank).nbytes]
                    own = x if launches.keeps_local else None
                    came = came_WWS[rank].view(-1)[lane.start :]
                    launches.recode(came, wire, mixed ^ lane.mixed, own, lane.memory(rank, x))
        self._receive(rows_WN, xs_L, whole_WS.view(-1), Bad(self._note, step + 1))

    def _receive(self, rows_WN: Tensor, xs_L: Sequence[Sequence[Tensor]], wires: Tensor, bad: Bad) -> None:
        """Decode; lanes with feedback, which must not remember what is not finite, have to know of all others first."""
        for lane in self._lanes:
            if scan := lane.launches_W[0].scan:
                scan(wires[lane.start :], bad)
        pairs = list(zip(self._lanes, xs_L, strict=True))
        for lane, xs in sorted(pairs, key=lambda pair: bool(pair[0].lane.spec.feedback)):
            for rank in range(self.world if lane.lane.spec.feedback else 1):  # all of them read the same
                lane.launches_W[rank].decode(wires[lane.start :], xs[rank], lane.memory(rank, xs[rank]), bad)
            spans = lane.lane.stretches
            if len(spans) > 1:
                for (begin, end), part in zip(spans, xs[0].split([b - a for a, b in spans]), strict=True):
                    rows_WN[0, begin:end] = part

    def _measure(self, xs_L: Sequence[Sequence[Tensor]], step: int) -> None:
        """What one rounding of every replica's message loses, by parameter."""
        for lane, xs in zip(self._lanes, xs_L, strict=True):
            codec = lane.lane.spec.first_phase
            watch = self._tally.watch(lane.lane.pieces, self.device)
            feedback = lane.launches_W[0].feedback
            for rank, x in enumerate(xs):
                sent, numel = x.clone(), x.numel()
                memory = lane.memory(rank, sent)
                if memory is not None and feedback is not None:
                    message(x, memory, feedback, 0, numel)
                wire = torch.empty(codec.wire_bytes(numel), dtype=torch.uint8, device=self.device)
                codec.encode(sent, wire, step=step)
                codec.decode(wire, read := torch.empty_like(sent), step=step)
                watch((0, numel), sent, read)

    def _new_lanes(self) -> list[Lane]:
        specs = [self.chooser.spec(name, size) for name, size in self.sizes.items()]
        found = lanes_of(list(self.sizes), specs, bridge=math.inf)
        spots = [Spot(rank, self.world, self.device) for rank in range(self.world)]
        streamed = [s._replace(exact_local=not isinstance(s.codec, Identity)) for s in (lane.spec for lane in found)]
        shapes = [lane_rows(s, self.world, two_phase=True) for s in streamed]
        sizes = [s.codec.wire_bytes(shape.each, s.encoded) for s, shape in zip(streamed, shapes, strict=True)]
        self._stride = stride = sum(sizes)
        of: Any = functools.partial(SumKernels, scale=1.0 / self.world, stride=stride, two_phase=True, fused=True)
        links: list[Any] = list(spots)
        self.bytes_per_step = max(
            sum(SumChunk(link, [s], 1.0, two_phase=True, fused=False).sent_bytes for s in streamed) for link in links
        )
        return [
            Lane(
                lane=lane,
                launches_W=[of(s, shape, link) for link in links],
                carries_W=[m.carry(lane.spec.feedback, lane.pieces, self.device) for m in self._memories],
                start=sum(sizes[:i]),
                mixed=i << 48,
            )
            for i, (lane, s, shape) in enumerate(zip(found, streamed, shapes, strict=True))
        ]


def mean_of(rows_WN: Tensor, *, bf16: bool) -> Tensor:
    """The mean that torch's own all-reduce gives; bf16: divided and added in bf16, as its bf16 hook does."""
    if not bf16:
        return rows_WN.mean(0)
    total: Tensor = functools.reduce(torch.add, (rows_WN / len(rows_WN)).bfloat16())
    return total.float()
