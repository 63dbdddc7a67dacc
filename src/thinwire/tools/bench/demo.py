"""The demonstration: the small GPT trained plainly and in a few codecs, watched while it trains.

Seeds, batches, timing and columns are those of `bench train`. Its rows have a `curve` beside them, and bytes of torch's
own all_reduce too: by formula, where no interface counts them (`bytes_from` says which).
"""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch

from thinwire.tools.bench import tasks, train
from thinwire.tools.bench.launch import World
from thinwire.tools.bench.link import ShapedLink
from thinwire.tools.bench.record import CURVE, Record, Row
from thinwire.tools.bench.schemes import BF16, NONE, TrainScheme
from thinwire.tools.bench.timing import Effort
from thinwire.tools.bench.train import Trained, Trainer, TrainingRun, TrainPlan

WORLD = 2
CODECS = ("bf16", "int8", "lloyd4", "lloyd2")
EFFORT = Effort(rounds=7, most=30, seconds=1.0)
LOOKS = 40  # at a run, while it trains: points of its curve
RING_BYTES = {NONE: 4, BF16: 2}  # of a weight, in torch's own all_reduce


@dataclass(frozen=True)
class Tick:
    scheme: TrainScheme
    step: int  # done, over all seeds
    steps: int  # in all
    loss: float  # of the last batches
    sent: float | None  # bytes by the rank that sends most, over all seeds; None where nobody knows
    seconds: float  # since the first step


Watch = Callable[[Tick], None]  # called after every few steps


def lineup(codecs: Sequence[str] | None) -> tuple[TrainScheme, ...]:
    """What is trained, the uncompressed one first; CodecError where a name is not known."""
    return train.lineup("gpt", codecs or CODECS)


def run(
    watch: Watch,
    world: int = WORLD,
    codecs: Sequence[str] | None = None,
    steps: int | None = None,
    link: ShapedLink | None = None,
    quick: bool = False,
) -> Record:
    """A record of kind "train". Ctrl-C raises Interrupted with the rows of the schemes that were finished."""
    task = tasks.QUICK_DEMO if quick else tasks.DEMO
    task = replace(task, steps=steps or task.steps)
    plan = TrainPlan(task, lineup(codecs), world, link, task.optimizer, train.QUICK if quick else EFFORT)
    return train.recorded(plan, _rows(plan, watch))


def _rows(plan: TrainPlan, watch: Watch) -> Generator[Row]:
    runs = _WatchedRuns(plan, watch)
    for scheme, row in zip(plan.schemes, train.rows(plan, iter, runs.train), strict=True):
        # [step, loss of the batches since the last point]: the mean over ranks and seeds
        curve: Row = {CURVE: [[step, fmean(losses)] for step, losses in runs.losses.items()]}
        yield row | _bytes_columns(plan, scheme, row) | curve


class _WatchedRuns:
    """Runs in pieces, with a tick after each; a scheme's are told from its first seed on."""

    def __init__(self, plan: TrainPlan, watch: Watch) -> None:
        self._plan = plan
        self._watch = watch
        self.losses: dict[int, list[float]] = {}  # of the scheme at hand: by step, then by seed

    def train(self, world: World, run: TrainingRun) -> list[Trained]:
        if run.seed == 0:
            self.losses = {}
            self._begun = time.monotonic()
            self._sent: float | None = 0.0
        world.run(begin, self._plan, run)
        before = self._sent
        task = self._plan.task
        for first, last in _slices(task.steps):
            looks: list[Look] = world.run(advance, last - first)
            self.losses.setdefault(last, []).append(fmean(look.loss for look in looks))
            sent = self._sent_in(run.scheme, last, looks)
            self._sent = None if before is None or sent is None else before + sent
            done = run.seed * task.steps + last
            seconds = time.monotonic() - self._begun
            self._watch(Tick(run.scheme, done, task.seeds * task.steps, self.losses[last][-1], self._sent, seconds))
        trained: list[Trained] = world.run(finish)
        return trained

    def _sent_in(self, scheme: TrainScheme, steps: int, looks: "list[Look]") -> float | None:
        counted = [look.sent for look in looks if look.sent is not None]
        if counted:
            return float(max(counted))
        each = ring_bytes(scheme, looks[0].params, self._plan.world)
        return None if each is None else steps * each


def _slices(steps: int) -> Iterator[tuple[int, int]]:
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
    loss: float  # the mean of their batches'
    sent: int | None  # bytes since the run began
    params: int


def begin(plan: TrainPlan, run: TrainingRun) -> None:
    """Make the replica; all ranks do it together, and so with the rest."""
    _at_work[:] = [Trainer(plan, run)]


def advance(steps: int) -> Look:
    trainer = _at_work[0]
    losses = [trainer.step() for _ in range(steps)]
    return Look(float(torch.stack(losses).mean()), trainer.replica.bytes_sent, trainer.params)


def finish() -> Trained:
    return _at_work.pop().finish()
