"""DiLoCo on a link: what a round sends, how long it takes, and what is left of that when training goes on meanwhile."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from thinwire.codecs import Codec
from thinwire.collectives.hierarchical import fewest_roundings
from thinwire.integrations import choice
from thinwire.tools import rule
from thinwire.tools.advise import evidence, model
from thinwire.tools.advise.links import Cluster
from thinwire.tools.advise.machine import Machine
from thinwire.tools.advise.model import TrainingJob
from thinwire.tools.advise.schemes import PLAIN, SumScheme
from thinwire.tools.rule import Loss

CODECS = ("none", "int8", "lloyd4", "lloyd2")
EVERY = (10, 30, 100, 300)


@dataclass(frozen=True)
class OuterRound:
    every: int  # steps between two rounds
    codec: Codec
    feedback: str
    bytes: float  # sent per rank and round
    round_s: float  # of the average alone
    step_s: float  # of an inner step
    loss: Loss | None  # beside fp32 outer gradients; None: not measured

    @property
    def name(self) -> str:
        return rule.name(str(self.codec), self.feedback)

    @property
    def overlap(self) -> int:
        """Steps that hide the average; no more than lie between two rounds."""
        most = self.every - 1
        return min(most, math.ceil(self.round_s / self.step_s)) if self.step_s else most

    def lost(self, overlap: int) -> float:
        """Share of all time in which nothing is trained."""
        waits = max(0.0, self.round_s - overlap * self.step_s)
        whole = waits + self.every * self.step_s
        return waits / whole if whole else 1.0

    @property
    def code(self) -> str:
        overlap = f", overlap={self.overlap}" if self.overlap else ""
        return f'thinwire.DiLoCo(model, optimizer, every={self.every}, codec="{self.codec}"{overlap})'


def rounds(
    job: TrainingJob, cluster: Cluster, machine: Machine, codecs: Sequence[Codec], every: Sequence[int]
) -> Iterator[OuterRound]:
    """Every codec with every number of steps between rounds. Outer gradients are in fp32."""
    known = evidence.shipped().losses
    for codec in codecs:
        feedback = choice.feedback_of("auto", codec, "linear", outer=True) or "none"
        scheme = SumScheme(fewest_roundings(cluster.world), codec)
        scheme = scheme if scheme.compresses else PLAIN
        fed = feedback if scheme.compresses and feedback != "none" else ""
        sent = model.message(job.params, scheme, cluster, machine, torch.float32, fed)
        taken = model.alone_s(sent, machine)
        nbytes = sum(hop.sent for hop in sent.hops)
        for steps in every:
            name = f"{rule.name(str(codec), feedback)} every {steps}"
            loss = evidence.find(name, known, "diloco")
            yield OuterRound(steps, codec, feedback, nbytes, taken, job.step_s, loss)
