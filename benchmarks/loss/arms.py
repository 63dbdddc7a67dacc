"""What happens to gradients on their way from W replicas to one mean. To add an arm: an entry in `PEERS`.

Legend: W replicas, N numbers of a replica's gradients.
"""

import functools
import re
from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks import simulated
from benchmarks.schemes import CONTROLS
from thinwire import codecs
from thinwire.collectives.chunks import Key
from thinwire.feedback import RowCopy
from thinwire.integrations.choice.options import CodecChoice, DDPOptions, Feedback

FP32 = "fp32"
NULL = "null"
NOISE = 1e-6  # of the null arm, relative
FIRST = re.compile(r"first\d+")  # the first steps, in another codec
WEIGHTS = "weights:"  # begins the names of arms whose weights travel compressed, and gradients do not
POWERSGD_START = 10  # steps in fp32 before PowerSGD begins


class Arm(Protocol):
    """Makes one mean of W gradients."""

    @property
    def bits(self) -> float:
        """On the wire, per element and phase."""

    def average(self, rows_WN: Tensor, step: int) -> None:
        """The first row = what every replica gets; the other rows are used up."""


class Mean:
    """As torch's own all-reduce; `noise` is a relative error, `bf16` as torch's bf16 hook."""

    def __init__(self, bits: float, noise: float = 0.0) -> None:
        self.bits: float = bits
        self._noise = noise

    def average(self, rows_WN: Tensor, step: int) -> None:
        """See Arm."""
        rows_WN[0] = simulated.mean_of(rows_WN, bf16=self.bits == 16)
        if self._noise:
            rows_WN[0] *= 1 + self._noise * torch.randn_like(rows_WN[0])


class PowerSGD:
    """torch's PowerSGD hook with warm start and error feedback, for W replicas in one process."""

    def __init__(self, parameters: Sequence[nn.Parameter], rank: int, world: int) -> None:
        self._rank = rank
        self._shapes = [p.shape for p in parameters]
        device = parameters[0].device
        generator = torch.Generator().manual_seed(0)
        self._q = [
            torch.randn(s[1], rank, generator=generator).to(device) if len(s) == 2 else None for s in self._shapes
        ]
        numel = sum(s.numel() for s in self._shapes)
        self._errors_WN = torch.zeros(world, numel, device=device)
        sent = sum(rank * sum(s) if len(s) == 2 else s.numel() for s in self._shapes)
        self.bits = 32 * sent / numel

    def average(self, rows_WN: Tensor, step: int) -> None:
        """See Arm."""
        if step < POWERSGD_START:
            rows_WN[0] = rows_WN.mean(0)
            return
        rows_WN += self._errors_WN
        at = 0
        for place, (shape, q) in enumerate(zip(self._shapes, self._q, strict=True)):
            span = slice(at, at + shape.numel())
            at += shape.numel()
            if q is None:
                rows_WN[0, span] = rows_WN[:, span].mean(0)
                self._errors_WN[:, span] = 0
                continue
            matrices = rows_WN[:, span].view(-1, *shape)
            p = torch.linalg.qr((matrices @ q).mean(0)).Q
            q = self._q[place] = (matrices.mT @ p).mean(0)
            sent = p @ q.T
            torch.sub(matrices, sent, out=self._errors_WN[:, span].view(-1, *shape))
            rows_WN[0, span] = sent.view(-1)


class Compressed:
    """As `compress_ddp` averages with this codec, on the kernels that it uses."""

    def __init__(self, averager: simulated.ReplicaAverager) -> None:
        self._averager = averager

    def average(self, rows_WN: Tensor, step: int) -> None:
        """See Arm."""
        self._averager.average(rows_WN, step)

    @property
    def bits(self) -> float:
        """On the wire, headers and scales included."""
        world = self._averager.world
        numel = sum(size.numel for size in self._averager.sizes.values())
        return 8 * self._averager.bytes_per_step * world / (2 * (world - 1)) / numel


class RoundedWeights:
    """The weights that replicas of FSDP2 compute with: as decoded from every shard's wire. See `compress_fsdp`.

    Weights travel in bf16, in one row per replica and block. Parameters of one dimension travel as they are, with zeros
    in their places in a row ([Note: Bridges] in integrations/lanes.py), and so do the gradients of all.
    """

    def __init__(self, network: nn.Module, name: str, world: int) -> None:
        spelled, _, replica = name.partition("@")
        self._codec = codecs.codec(spelled)
        self._world = world
        blocks = [list(block.parameters()) for block in network.blocks]  # type: ignore[union-attr]
        within = {id(p) for block in blocks for p in block}
        self._groups = [*blocks, [p for p in network.parameters() if id(p) not in within]]
        self._copies = [RowCopy() if replica else None for _ in self._groups]
        self._matrices = [p for group in self._groups for p in group if p.dim() > 1]
        self._exact: list[Tensor] = []  # while the network computes with others
        numels = [sum(p.numel() for p in group) for group in self._groups]
        self.bits = 8 * world * sum(self._codec.wire_bytes(n // world) for n in numels) / sum(numels)

    @torch.no_grad()
    def load(self, step: int) -> None:
        """Put what replicas gather in the place of the matrices."""
        self._exact = [p.clone() for p in self._matrices]
        for group, copy in zip(self._groups, self._copies, strict=True):
            shards = [p.view(self._world, -1) for p in group]
            parts = [s if p.dim() > 1 else torch.zeros_like(s) for p, s in zip(group, shards, strict=True)]
            gathered_WN = self._gathered(torch.cat(parts, 1).bfloat16(), copy, step)
            found = gathered_WN.split([s.shape[1] for s in shards], 1)
            for parameter, shard, values in zip(group, shards, found, strict=True):
                if parameter.dim() > 1:
                    shard.copy_(values)

    def _gathered(self, rows_WN: Tensor, copy: RowCopy | None, step: int) -> Tensor:
        if copy is not None and copy.tensor is None:  # the first is exact
            copy.begin(rows_WN)
            return rows_WN
        sent_WN = rows_WN if copy is None or copy.tensor is None else rows_WN - copy.tensor
        got_WN = torch.empty_like(sent_WN)
        wire = torch.empty(self._codec.wire_bytes(rows_WN.shape[1]), dtype=torch.uint8, device=rows_WN.device)
        for rank, row in enumerate(sent_WN):
            key = Key(step if copy else 0, 0).of(rank)
            self._codec.encode(row, wire, step=key)
            self._codec.decode(wire, got_WN[rank], step=key)
        if copy is not None:
            copy.add_to(got_WN)
        return got_WN

    @torch.no_grad()
    def restore(self) -> None:
        """The exact weights again, for the optimizer."""
        torch._foreach_copy_(self._matrices, self._exact)
        self._exact = []


PEERS = {
    FP32: functools.partial(Mean, 32.0),
    NULL: functools.partial(Mean, 32.0, NOISE),
    "bf16": functools.partial(Mean, 16.0),
}


def arm_of(name: str, network: nn.Module, optimizer: Optimizer, world: int) -> tuple[Arm, simulated.ReplicaAverager]:
    """The arm of that name, and what lays out gradients; any codec string of `compress_ddp` is a name.

    "lloyd2+first100=lloyd4" begins with 100 steps of lloyd4; "lloyd2+letters*=lloyd4" has lloyd4 for the parameters of
    that name pattern, and "lloyd4+feedback=classic" a feedback. A control ("int2", "sign") compresses every parameter,
    with no feedback and no units.
    """
    control = name in CONTROLS
    named = name in PEERS or name.startswith(("powersgd", WEIGHTS))
    spelled, *extras = name.split("+")
    pairs = dict(extra.split("=", 1) for extra in extras)
    feedback = pairs.pop("feedback", "none" if control else "auto")
    begun = {int(key.removeprefix("first")): pairs.pop(key) for key in list(pairs) if FIRST.fullmatch(key)}
    codec: CodecChoice = "none" if named else CONTROLS.get(spelled, spelled)
    for steps, other in begun.items():
        codec = {0: other, steps: spelled}
    options = DDPOptions(
        codec,
        policy=pairs or None,
        feedback=cast(Feedback, feedback),
        exempt="none" if control else "auto",
        weigh="none" if control else "auto",
        optimizer=optimizer,
        measure_every=0,
    )
    averager = simulated.ReplicaAverager(network, options, world)
    if name in PEERS:
        return PEERS[name](), averager
    if name.startswith(WEIGHTS):
        return Mean(32.0), averager
    if named:
        return PowerSGD(averager.parameters, int(name.removeprefix("powersgd")), world), averager
    return Compressed(averager), averager
