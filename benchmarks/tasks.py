"""What `bench train` trains: models, data and rates. A seed fixes the weights and every rank's batches.

To add a task: write a class with the methods of `Task`, enter one of it in `TASKS` and a small one in `QUICK_TASKS`.
Nothing is downloaded: the digits come with scikit-learn, the text of `gpt` with CPython. That of `bytes` is the Python
sources of the standard library, help pages included, and of torch. It depends on the installed versions: `digest` tells
texts apart.
"""

import hashlib
import math
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn

from benchmarks import data
from thinwire.kernels import hashing
from thinwire.tools.bench import models
from thinwire.tools.bench.models import Batch, Transformer, TransformerBlock
from thinwire.tools.cli.training import help_pages
from thinwire.tools.local.link import BenchError

RAMP = 0.03
POINTS = 60  # of a curve
HELD_OUT = ("asyncio", "email", "logging", "xml", "torch/distributions", "torch/onnx", "torch/optim")
_ELSEWHERE = {"site-packages", "dist-packages", "__pycache__"}  # what else is installed differs between machines

_RATES = {"adamw": "adam", "muon": "adam"}  # optimizers with the rate of another, where a task gives them none


@dataclass(frozen=True)
class Total:
    """A sum of losses and how many there were: ranks judge a part each, and the parts are added."""

    loss: float
    count: int


def mean(totals: Sequence[Total]) -> float:
    return math.fsum(total.loss for total in totals) / sum(total.count for total in totals)


def curve(losses: Sequence[float]) -> list[tuple[float, float]]:
    """(step, mean loss of the batches since the point before it) of a training."""
    each = -(-len(losses) // POINTS)
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
        return Transformer(len(help_pages()[0]), self.context, self.width, self.heads, self.depth)

    def blocks(self, network: nn.Module) -> list[nn.Module]:
        return [block for block in network.modules() if isinstance(block, TransformerBlock)]

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


@dataclass(frozen=True)
class Bytes(Gpt):
    """A transformer on bytes; the rate rises for a tenth of the steps, since a large network wants that."""

    ramp: float = field(default=0.1, kw_only=True)
    judged: int = 1 << 20

    def network(self) -> nn.Module:
        """Rotary positions and small weights: with learned positions 600 steps end at twice the loss."""
        network = RotaryTransformer(256, self.context, self.width, self.heads, self.depth)
        for name, layer in network.named_modules():
            if isinstance(layer, nn.Linear):
                adds = name.endswith(("out", "narrow"))  # to what the next blocks see
                nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * self.depth) if adds else 0.02)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)
        return network

    def texts(self) -> tuple[Tensor, Tensor]:
        return sources()

    def digest(self) -> str:
        """The same for the same text."""
        return hashlib.sha256(b"".join(bytes(text.numpy()) for text in self.texts())).hexdigest()[:16]


class RotaryTransformer(Transformer):
    """Queries and keys are rotated by their positions; the input has none."""

    def __init__(self, letters: int, context: int, width: int, heads: int, depth: int) -> None:
        super().__init__(letters, context, width, heads, depth)
        del self.places
        self.blocks = nn.Sequential(*(RotaryBlock(width, heads) for _ in range(depth)))

    def forward(self, codes: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(self.letters(codes))))
        return logits


class RotaryBlock(TransformerBlock):
    def turned(self, x_BHTD: Tensor) -> Tensor:
        """Each pair of numbers rotated by the position's angle."""
        context, width = x_BHTD.shape[-2:]
        rates_E = 10_000.0 ** (-torch.arange(0, width, 2, device=x_BHTD.device) / width)
        angles_TE = torch.arange(context, device=x_BHTD.device)[:, None] * rates_E
        cos_TE, sin_TE = angles_TE.cos().to(x_BHTD.dtype), angles_TE.sin().to(x_BHTD.dtype)
        a, b = x_BHTD.chunk(2, dim=-1)
        return torch.cat([a * cos_TE - b * sin_TE, a * sin_TE + b * cos_TE], dim=-1)


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


def _bytes(size: str, rate: float, width: int, heads: int, depth: int, context: int = 1024, rows: int = 4) -> Bytes:
    rates = (("adamw", rate), ("muon", rate))
    return Bytes(f"bytes-{size}", 600, 2, rates, width, heads, depth, context, rows=rows)


SIZES = {
    "250k": _bytes("250k", 3e-3, 96, 4, 2, context=128, rows=8),
    "3m": _bytes("3m", 2e-3, 256, 4, 4, context=512, rows=8),
    "30m": _bytes("30m", 1e-3, 512, 8, 9),
    "124m": _bytes("124m", 6e-4, 768, 12, 17),
}
QUICK_BYTES = replace(
    SIZES["250k"], name="bytes-quick", steps=6, width=32, heads=2, depth=1, context=64, rows=4, judged=1 << 12
)


def find(name: str, size: str | None = None, *, quick: bool = False, **own: int | None) -> Task:
    """The task of that name, with steps, seeds and rows of one's own; `size` is that of bytes.

    BenchError where the name is unknown, ThinwireError where scikit-learn is missing.
    """
    if name == "bytes":
        task: Task = QUICK_BYTES if quick else SIZES[size or "30m"]
    elif name in TASKS:
        task = (QUICK_TASKS if quick else TASKS)[name]
    else:
        raise BenchError(f"unknown task {name!r}; known: {', '.join(TASKS)}, bytes")
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


@lru_cache(maxsize=1)
def sources() -> tuple[Tensor, Tensor]:
    """Of `bytes`: to train on, and whole packages that are held out.

    Files are in the order of the hash of their names, so that every rank's part is like the others.
    """
    files = sorted(_files(), key=lambda named: hashlib.sha256(named[0].encode()).digest())
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for name, path in files:
        parts[any(name.startswith(f"{package}/") for package in HELD_OUT)].append(path.read_bytes())
    train, held_out = (torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in parts)
    return train, held_out


def _files() -> Iterator[tuple[str, Path]]:
    """Every source with its name: from the root of the standard library, or from torch's parent."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    package = Path(torch.__file__).parent
    for root, base in ((stdlib, stdlib), (package, package.parent)):
        for path in root.rglob("*.py"):
            name = path.relative_to(base)
            if path.is_file() and not _ELSEWHERE.intersection(name.parts):
                yield name.as_posix(), path


def _part(whole: Tensor, rank: int, world: int) -> Tensor:
    """A rank's shard of what is in order; the shards cover it all."""
    return whole[rank * len(whole) // world : (rank + 1) * len(whole) // world]


def _generator(seed: int, step: int, rank: int) -> Generator:
    """The generator of one batch. torch looks at 32 bits of a seed only, so these are mixed first."""
    return Generator().manual_seed(hashing.key(seed, step, rank) & 0xFFFFFFFF)
