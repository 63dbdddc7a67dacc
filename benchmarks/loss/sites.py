"""DiLoCo in the loss study: two sites of replicas train alone for some steps, and then average what they learned.

Inside a site gradients are averaged in fp32. What travels between sites goes the way of `thinwire.DiLoCo`: its codecs,
feedback, stages and outer optimizer, in one process (thinwire.rehearsal).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from benchmarks.loss import arms
from thinwire.integrations.choice.options import DDPOptions
from thinwire.integrations.models import ParameterNames
from thinwire.rehearsal import RehearsedRanks

SITES = 2
BETA = 0.95  # DiLoCo's: the share of a residual that is kept after a round
RATE, MOMENTUM = 0.7, 0.9  # of its outer optimizer, by default


class OuterAverage:
    """The outer parameters of some sites, and their rounds."""

    def __init__(self, network: nn.Module, arm: str, sites: int, momentum: float = MOMENTUM) -> None:
        codec = "none" if arm in (arms.FP32, arms.NULL) else arm
        names = ParameterNames()
        names.take(network)
        options = DDPOptions(codec, optimizer="linear", measure_every=0)
        self._ranks = RehearsedRanks(options, names, sites, outer=True)
        self._parameters = list(network.parameters())
        self._noise = arms.NOISE if arm == arms.NULL else 0.0
        self.outer = [nn.Parameter(p.detach().clone()) for p in self._parameters]
        self._stepper = torch.optim.SGD(self.outer, lr=RATE, momentum=momentum, nesterov=True)
        self._rounds = 0
        self.bits = 32.0

    @torch.no_grad()
    def round(self, networks: Sequence[nn.Module]) -> None:
        """Average what the sites learned, step the outer parameters with it, and give them to all sites."""
        (total,) = self._ranks.begin_step(self._rounds, [self._parameters])
        flat = torch.cat([p.view(-1) for p in self.outer])
        for network, memories in zip(networks, self._ranks.memories, strict=True):
            learned = flat - torch.cat([p.view(-1) for p in network.parameters()])
            lost = [name for name, kind in memories.kinds.items() if kind == "classic"]
            memories.residuals.decay(lost, BETA)
            total.turn(learned)
        average = torch.empty_like(flat)
        total.mean(average)
        if self._noise:
            average *= 1 + self._noise * torch.randn_like(average)
        self._step(average)
        for network in networks:
            torch._foreach_copy_(list(network.parameters()), list(self.outer))
        self._rounds += 1
        if not total.bucket.plain:
            self.bits = 8 * total.bucket.wire_bytes / total.bucket.numel

    def _step(self, average: Tensor) -> None:
        parts = average.split([p.numel() for p in self.outer])
        for parameter, part in zip(self.outer, parts, strict=True):
            parameter.grad = part.view(parameter.shape)
        self._stepper.step()
