"""The demonstration: the small GPT trained plainly and in a few codecs, observed while it trains.

Seeds, batches, timing and columns are those of `bench train`. Its rows have a `curve` beside them, and bytes of torch's
own all_reduce too: by formula, where no interface counts them (`bytes_from` says which).
"""

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

import torch

from thinwire.tools.bench import launch, tasks, train
from thinwire.tools.bench.launch import World
from thinwire.tools.bench.link import ShapedLink
from thinwire.tools.bench.record import CURVE, Record, Row
from thinwire.tools.bench.schemes import BF16, NONE, TrainScheme
from thinwire.tools.bench.timing import Effort
from thinwire.tools.bench.train import Results, Trained, Trainer, TrainingRun, TrainPlan

WORLD = 2
CODECS = ("bf16", "int8", "lloyd4", "lloyd2")
EFFORT = Effort(rounds=7, most=30, seconds=1.0)
LOOKS = 40  # at a run, while it trains: points of its curve
RING_BYTES = {NONE: 4, BF16: 2}  # of a weight, in torch's own all_reduce


@dataclass(frozen=True)
class Tick:
    """How far the runs of one scheme have come."""

    scheme: TrainScheme
    step: int  # done, over all seeds
    steps: int  # in all
    loss: float  # of the last batches
    sent: float | None  # bytes by the rank that sends most, over all seeds; None where nobody knows
    seconds: float  # since the first step


class Observer(Protocol):
    """Whoever looks on."""

    def stage(self, text: str) -> None:
        """What is done before the runs."""

    def tick(self, tick: Tick) -> None:
        """After every few steps."""


def lineup(codecs: Sequence[str] | None) -> tuple[TrainScheme, ...]:
    """What is trained, the uncompressed one first; CodecError where a name is not known."""
    return train.lineup("gpt", codecs or CODECS)


def run(
    observer: Observer,
    world: int = WORLD,
    codecs: Sequence[str] | None = None,
    steps: int | None = None,
    link: ShapedLink | None = None,
    quick: bool = False,
) -> Record:
    """A record of kind "train". Ctrl-C raises Interrupted with the rows of the schemes that were finished."""
    task = tasks.QUICK_DEMO if quick else tasks.DEMO
    plan = TrainPlan(
        task=task,
        world=world,
        link=link,
        optimizer=task.optimizer,
        schemes=lineup(codecs),
        seeds=task.seeds,
        steps=steps or task.steps,
        effort=train.QUICK if quick else EFFORT,
    )
    return train.recorded(plan, _rows(plan, observer))


def _rows(plan: TrainPlan, observer: Observer) -> Generator[Row]:
    observer.stage(f"starting {plan.world} ranks")
    with launch.ranks(plan.world, plan.link, plan.threads) as world:
        observer.stage("timing steps")
        times = world.run(train.time_steps, plan)
        results: dict[TrainScheme, Results] = {}
        for scheme in plan.schemes:
            runs = _ObservedRuns(plan, scheme, observer)
            results[scheme] = [runs.train(world, seed) for seed in range(plan.seeds)]
            row = train.row_of(plan, scheme, results, times)
            # [step, loss of the batches since the last point]: the mean over ranks and seeds
            curve: Row = {CURVE: [[step, fmean(losses)] for step, losses in runs.losses.items()]}
            yield row | _bytes_columns(plan, scheme, row) | curve


class _ObservedRuns:
    """The runs of one scheme, seed after seed."""

    def __init__(self, plan: TrainPlan, scheme: TrainScheme, observer: Observer) -> None:
        self._plan = plan
        self._scheme = scheme
        self._observer = observer
        self._begun = time.monotonic()
        self._sent = 0.0
        self.losses: dict[int, list[float]] = {}  # by step, then by seed

    def train(self, world: World, seed: int) -> list[Trained]:
        """One run; what each rank holds after it."""
        world.run(begin, self._plan, TrainingRun(self._scheme, seed))
        before = self._sent
        for first, last in _slices(self._plan.steps):
            looks: list[Look] = world.run(advance, last - first)
            self.losses.setdefault(last, []).append(fmean(look.loss for look in looks))
            self._show(seed, last, before, looks)
        trained: list[Trained] = world.run(finish)
        return trained

    def _show(self, seed: int, step: int, before: float, looks: "list[Look]") -> None:
        sent = self._sent_in(step, looks)
        self._sent = before + (sent or 0.0)
        tick = Tick(
            scheme=self._scheme,
            step=seed * self._plan.steps + step,
            steps=self._plan.seeds * self._plan.steps,
            loss=self.losses[step][-1],
            sent=None if sent is None else self._sent,
            seconds=time.monotonic() - self._begun,
        )
        self._observer.tick(tick)

    def _sent_in(self, steps: int, looks: "list[Look]") -> float | None:
        counted = [look.sent for look in looks if look.sent is not None]
        if counted:
            return float(max(counted))
        each = ring_bytes(self._scheme, looks[0].params, self._plan.world)
        return None if each is None else steps * each


def _slices(steps: int) -> Iterator[tuple[int, int]]:
    """Cut the steps of a run where it is looked at."""
    size = -(-steps // LOOKS)
    return ((first, min(first + size, steps)) for first in range(0, steps, size))


def ring_bytes(scheme: TrainScheme, params: int, world: int) -> float | None:
    """What each rank sends in a ring, 2(W-1)/W of its gradients; None where torch does not send them so."""
    width = RING_BYTES.get(scheme.name)
    return None if width is None else 2 * (world - 1) / world * width * params


def _bytes_columns(plan: TrainPlan, scheme: TrainScheme, row: Row) -> Row:
    if row["bytes_per_step"] is not None:
        return {"bytes_from": "interface" if plan.link else "transport"}
    params = row["params"]
    assert isinstance(params, int)
    each = ring_bytes(scheme, params, plan.world)
    return {"bytes_per_step": each, "bytes_from": None if each is None else "formula"}


# The ranks' side.

_at_work: list[Trainer] = []  # one at most: it stays between calls


@dataclass(frozen=True)
class Look:
    """What one rank shows of its last steps."""

    loss: float  # the mean of their batches'
    sent: int | None  # bytes since the run began
    params: int


def begin(plan: TrainPlan, run: TrainingRun) -> None:
    """Make the replica; all ranks do it together, and so with the rest."""
    _at_work[:] = [Trainer(plan, run)]


def advance(steps: int) -> Look:
    """Train for so many steps."""
    trainer = _at_work[0]
    losses = [trainer.step() for _ in range(steps)]
    return Look(float(torch.stack(losses).mean()), trainer.bytes_sent, trainer.params)


def finish() -> Trained:
    """Judge it."""
    return _at_work.pop().finish()
