"""What benchmarks.train trains: models, data and rates. A seed fixes the weights and every rank's batches.

To add a task: write a class with the methods of `Task`, enter one of it in `TASKS` and a small one in `QUICK_TASKS`.
Nothing is downloaded: the digits come with scikit-learn, the text of `gpt` with CPython.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Generator, Tensor, nn

from benchmarks import data
from benchmarks.networks import GptBlock, GptNetwork
from thinwire.kernels import hashing
from thinwire.tools.bench import models
from thinwire.tools.bench.models import Batch
from thinwire.tools.cli.demo import help_pages
from thinwire.tools.local.link import BenchError

RAMP = 0.03
POINTS = 60  # of a curve

_RATES = {"adamw": "adam", "muon": "adam"}  # optimizers with the rate of another, where a task gives them none


@dataclass(frozen=True)
class Total:
    """A sum of losses and how many there were: ranks judge a part each, and the parts are added."""

    loss: float
    count: int


def mean(totals: Sequence[Total]) -> float:
    return math.fsum(total.loss for total in totals) / sum(total.count for total in totals)


def curve(losses: Sequence[float], points: int = POINTS) -> list[tuple[float, float]]:
    """(step, mean loss of the batches since the point before it) of a training."""
    each = -(-len(losses) // points)
    parts = [losses[at : at + each] for at in range(0, len(losses), each)]
    return [(min((place + 1) * each, len(losses)), math.fsum(part) / len(part)) for place, part in enumerate(parts)]


@dataclass(frozen=True)
class Task(ABC):
    name: str
    steps: int
    seeds: int
    rates: tuple[tuple[str, float], ...]  # by optimizer, the usual one first
    ramp: float = field(default=RAMP, kw_only=True)  # share of the steps in which the rate rises
    rows: int = field(default=32, kw_only=True)  # of a batch

    @abstractmethod
    def network(self) -> nn.Module:
        """The network, its weights drawn from torch's generator."""

    @abstractmethod
    def blocks(self, network: nn.Module) -> list[nn.Module]:
        """What FSDP2 shards one by one, before what is left."""

    @abstractmethod
    def batch(self, step: int, seed: int, rank: int, world: int) -> Batch:
        """What a rank trains on in a step: drawn from its own shard."""

    @abstractmethod
    def train_loss(self, network: nn.Module, rank: int, world: int) -> Total:
        """Over what this rank is given of the training data to judge."""

    def val_loss(self, network: nn.Module, rank: int, world: int) -> Total | None:
        """Over this rank's part of the held-out data; None where a task holds nothing out."""
        return None

    @property
    def optimizer(self) -> str:
        return self.rates[0][0]

    def trained_with(self, optimizer: str | None) -> str:
        """The optimizer asked for, or the usual one; BenchError where there is no rate for it."""
        known = self._all_rates
        if optimizer is not None and optimizer not in known:
            raise BenchError(f"task {self.name!r} is trained with {' or '.join(known)}, got {optimizer!r}")
        return optimizer or self.optimizer

    def __str__(self) -> str:
        return self.name

    def model(self, seed: int) -> nn.Module:
        """The network as a seed makes it, on every rank the same. torch's generator is left as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.network()

    def loss(self, network: nn.Module, batch: Batch, reduction: str = "mean") -> Tensor:
        return models.loss_of(network, batch, reduction)

    def rate(self, optimizer: str, step: int, steps: int) -> float:
        """A short rise, then half a cosine down to nothing.

        At a constant rate the last few batches decide the final loss: runs that differ by one rounding then end several
        per cent apart, and so, a few tenths of one.
        """
        rise = min(1.0, (step + 1) / (self.ramp * steps + 1))
        return self._all_rates[optimizer] * rise * 0.5 * (1 + math.cos(math.pi * step / steps))

    @property
    def _all_rates(self) -> dict[str, float]:
        own = dict(self.rates)
        return {name: own[other] for name, other in _RATES.items() if other in own} | own


@dataclass(frozen=True)
class Digits(Task):
    """scikit-learn's digits, sorted by label: each rank sees its own few of the ten, so that gradients differ.

    Or not: then a rank has some of each.
    """

    sizes: tuple[int, ...]
    sorted: bool = True

    def network(self) -> nn.Module:
        return models.mlp(*self.sizes)

    def blocks(self, network: nn.Module) -> list[nn.Module]:
        return [layer for layer in network.children() if isinstance(layer, nn.Linear)]

    def batch(self, step: int, seed: int, rank: int, world: int) -> Batch:
        images, labels = shard(rank, world, self.sorted)
        chosen = torch.randint(len(images), (self.rows,), generator=_generator(seed, step, rank))
        return images[chosen], labels[chosen]

    def train_loss(self, network: nn.Module, rank: int, world: int) -> Total:
        images, labels = shard(rank, world, self.sorted)
        return Total(self.loss(network, (images, labels), "sum").item(), len(labels))


@dataclass(frozen=True)
class Gpt(Task):
    """A small transformer on the characters of the help pages inside CPython; the last tenth is held out.

    Losses are taken over the first characters of each rank's part.
    """

    width: int
    heads: int
    depth: int
    context: int = 64
    rows: int = field(default=8, kw_only=True)
    judged: int = 1 << 16  # characters that a loss is taken over, at most; the held-out text has fewer

    def network(self) -> nn.Module:
        return GptNetwork(help_pages()[0], self.context, self.width, self.heads, self.depth)

    def blocks(self, network: nn.Module) -> list[nn.Module]:
        return [block for block in network.modules() if isinstance(block, GptBlock)]

    def texts(self) -> tuple[Tensor, Tensor]:
        """To train on, and held out, as codes."""
        return help_pages()[1:]

    def batch(self, step: int, seed: int, rank: int, world: int) -> Batch:
        """Windows that start anywhere in this rank's shard of the text."""
        text = _part(self.texts()[0], rank, world)
        starts = torch.randint(len(text) - self.context, (self.rows,), generator=_generator(seed, step, rank))
        windows = torch.stack([text[start : start + self.context + 1] for start in starts.tolist()]).long()
        return windows[:, :-1], windows[:, 1:]

    def train_loss(self, network: nn.Module, rank: int, world: int) -> Total:
        return self._judge(network, _part(self.texts()[0], rank, world)[: self.judged // world])

    def val_loss(self, network: nn.Module, rank: int, world: int) -> Total:
        return self._judge(network, _part(self.texts()[1], rank, world)[: self.judged // world])

    def _judge(self, network: nn.Module, text: Tensor) -> Total:
        """Windows side by side; what does not fill one is left out."""
        text = text.to(next(network.parameters()).device).long()
        count = (len(text) - 1) // self.context
        inputs, targets = (text[i : i + count * self.context].view(count, self.context) for i in (0, 1))
        batches = zip(inputs.split(64), targets.split(64), strict=True)
        return Total(math.fsum(self.loss(network, batch, "sum").item() for batch in batches), targets.numel())


_DIGITS = Digits("digits", 600, 5, (("adam", 1e-3), ("sgd", 0.05)), sizes=(64, 128, 128, 10))
_GPT = Gpt("gpt", 600, 3, (("adam", 3e-3), ("sgd", 0.3)), width=96, heads=4, depth=2)
# 25 million weights: what is on the wire decides the time of a step.
_MLP = Digits("mlp", 40, 1, (("sgd", 0.1), ("adam", 1e-4)), sizes=(64, 3520, 3520, 3520, 10))

# A million weights, little to compute, shards alike: sites that a slow link joins.
_WIDE = Digits("wide", 150, 3, (("adam", 1e-3), ("sgd", 0.05)), sizes=(64, 1024, 1024, 10), sorted=False)

TASKS: dict[str, Task] = {task.name: task for task in (_DIGITS, _GPT, _MLP, _WIDE)}
QUICK_TASKS: dict[str, Task] = {
    "digits": replace(_DIGITS, steps=12, seeds=2),
    "gpt": replace(_GPT, steps=6, seeds=2, width=32, depth=1, judged=1 << 12),
    "mlp": replace(_MLP, steps=4, sizes=(64, 256, 256, 256, 10)),
    "wide": replace(_WIDE, steps=4, seeds=2, sizes=(64, 256, 10)),
}


def find(name: str, *, quick: bool = False, **own: int | None) -> Task:
    """The task of that name, with steps, seeds and rows of one's own.

    BenchError where the name is unknown, ThinwireError where scikit-learn is missing.
    """
    if name not in TASKS:
        raise BenchError(f"unknown task {name!r}; known: {', '.join(TASKS)}")
    task = (QUICK_TASKS if quick else TASKS)[name]
    if isinstance(task, Digits):
        data.check_digits(f"task {name!r}", "take --task gpt, which needs nothing")
    changes: dict[str, Any] = {column: value for column, value in own.items() if value is not None}
    return replace(task, **changes) if changes else task


@lru_cache(maxsize=2)
def shard(rank: int, world: int, by_label: bool = True) -> Batch:
    """A rank's digits: images and labels, in order of the labels, or as they come."""
    images, labels = data.digits()
    whole = torch.sort(labels, stable=True).indices if by_label else torch.arange(len(labels))
    order = _part(whole, rank, world)
    return images[order], labels[order]


def _part(whole: Tensor, rank: int, world: int) -> Tensor:
    """A rank's shard of what is in order; the shards cover it all."""
    return whole[rank * len(whole) // world : (rank + 1) * len(whole) // world]


def _generator(seed: int, step: int, rank: int) -> Generator:
    """The generator of one batch. torch looks at 32 bits of a seed only, so these are mixed first."""
    return Generator().manual_seed(hashing.key(seed, step, rank) & 0xFFFFFFFF)
