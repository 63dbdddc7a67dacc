"""The benchmark of quantisation-aware training. A run has parts:

speed   what fake quantisation costs beside plain copies and torch's own op (bench/qat_speed.py)
train   what a network reaches at a few bits, by method (bench/qat_tasks.py, bench/qat_methods.py)
"""

import contextlib
import copy
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev

import torch
from torch import nn

from thinwire.tools.bench import qat_speed, qat_tasks, timing
from thinwire.tools.bench.qat_methods import FP32, METHODS
from thinwire.tools.bench.qat_tasks import DIVERGED, FULL_BITS, Digits, Outcome, Split
from thinwire.tools.bench.record import Progress, Record, Row, collect

PARTS = ("speed", "train")
BITS, QUICK_BITS = (2, 3, 4, 8), (2,)
SEEDS, QUICK_SEEDS = 5, 2
LATER = 1 << 16  # added to a seed: other batches than in fp32
MOST_WORKERS = 8  # unless asked for: each holds a torch of its own


@dataclass(frozen=True)
class Lesson:
    """One training of one method. All layers get the bits: with 8 in the first and the last, methods hardly differ."""

    task: Digits
    method: str
    bits: int
    seed: int
    device: torch.device

    def __str__(self) -> str:
        width = "" if self.method == FP32 else f" W{self.bits}A{self.bits}"
        return f"train, {self.method}{width}, seed {self.seed}"


@dataclass(frozen=True)
class Learned:
    """What came of a lesson, and how long its training took."""

    outcome: Outcome
    seconds: float


@dataclass(frozen=True)
class Plan:
    """The trainings of a run."""

    task: Digits
    methods: tuple[str, ...] | None  # None => all, each where it tells something
    bits: tuple[int, ...]
    seeds: int
    workers: int
    device: torch.device

    def lessons(self) -> list[Lesson]:
        """By bits, then by method; fp32 has no bits and comes first, once."""
        methods = METHODS if self.methods is None else self.methods
        plain = [(FULL_BITS, FP32)] if FP32 in methods else []
        others = [(bits, name) for bits in self.bits for name in methods if name != FP32 and self._tells(name, bits)]
        return [
            Lesson(self.task, name, bits, seed, self.device)
            for bits, name in plain + others
            for seed in range(self.seeds)
        ]

    def _tells(self, name: str, bits: int) -> bool:
        return self.methods is not None or METHODS[name].at_all_bits or bits == min(self.bits)

    def rows(self, progress: Progress) -> Iterator[Row]:
        """One for each method at each number of bits, as soon as its last seed is trained."""
        lessons, found = self.lessons(), list[Learned]()
        with _pool(self.workers) as learn_all:
            for lesson, learned in zip(progress(lessons), learn_all(learn, lessons), strict=False):
                found.append(learned)
                if len(found) == self.seeds:
                    yield row_of(lesson, found, self.workers)
                    found = []


def run(
    device: str | torch.device = "cpu",
    parts: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    bits: Sequence[int] | None = None,
    seeds: int | None = None,
    numel: int | None = None,
    threads: int = 1,
    workers: int | None = None,
    quick: bool = False,
    progress: Progress = iter,
) -> Record:
    """A record of kind "qat"; what is None is the usual.

    `numel` and `threads`, the CPU's, are of the speed part; `workers` are processes of one thread that train.
    """
    device, chosen = torch.device(device), parts or PARTS
    if "train" in chosen:
        qat_tasks.check()
    cases = qat_speed.cases(device, numel, threads, quick)
    plan = Plan(
        task=qat_tasks.QUICK if quick else qat_tasks.FULL,
        methods=tuple(methods) if methods else None,
        bits=tuple(bits or (QUICK_BITS if quick else BITS)),
        seeds=seeds or (QUICK_SEEDS if quick else SEEDS),
        workers=workers or (1 if quick or device.type == "cuda" else min(os.cpu_count() or 1, MOST_WORKERS)),
        device=device,
    )
    rows = {"speed": _speed(cases, progress), "train": plan.rows(progress)}
    drawn = _chained(rows[part] for part in PARTS if part in chosen)
    with timing.threads(threads), contextlib.closing(drawn) as found:
        return collect("qat", device, found)


def _speed(cases: Sequence[qat_speed.Case], progress: Progress) -> Iterator[Row]:
    for case in progress(cases):
        yield from case.rows()


def _chained(parts: Iterable[Iterator[Row]]) -> Generator[Row]:
    for part in parts:
        yield from part


def learn(lesson: Lesson) -> Learned:
    """Train once; one thread, so that the sums of a training have one order on every machine."""
    with timing.threads(1):
        seen, trained = _trained(lesson.task, lesson.seed, lesson.device)
        model = copy.deepcopy(trained)
        METHODS[lesson.method].start(model, seen.images[: qat_tasks.START], lesson.bits)
        begun = time.perf_counter()
        ended = qat_tasks.train(model, seen, lesson.task.after(lesson.bits), lesson.seed + LATER)
        seconds = time.perf_counter() - begun
        return Learned(qat_tasks.judge(model, seen) if ended else DIVERGED, seconds)


@cache
def _trained(task: Digits, seed: int, device: torch.device) -> tuple[Split, nn.Module]:
    """What all lessons of a seed start from."""
    seen, model = qat_tasks.split(seed, device), qat_tasks.network(task, seed).to(device)
    qat_tasks.train(model, seen, task.before, seed)
    return seen, model


def row_of(lesson: Lesson, learned: Sequence[Learned], workers: int) -> Row:
    """What all seeds of a method came to."""
    recipe, method = lesson.task.after(lesson.bits), METHODS[lesson.method]
    return {
        "task": lesson.task.name,
        "method": lesson.method,
        "weight_bits": lesson.bits,
        "act_bits": lesson.bits,
        "seeds": len(learned),
        **_over_seeds("train_loss", [each.outcome.train_loss for each in learned]),
        **_over_seeds("accuracy", [each.outcome.accuracy for each in learned]),
        "diverged": sum(each.outcome.diverged for each in learned),
        "first_last_bits": lesson.bits,
        "control": method.control,
        "peer": method.peer,
        "optimizer": f"sgd, momentum {qat_tasks.MOMENTUM}",
        "rate": recipe.rate,
        "epochs": recipe.epochs,
        "batch": recipe.batch,
        "fp32_rate": lesson.task.before.rate,
        "fp32_epochs": lesson.task.before.epochs,
        "device": lesson.device.type,
        "seconds": fmean(each.seconds for each in learned),
        "workers": workers,
    }


def _over_seeds(name: str, values: Sequence[float]) -> Row:
    """Mean and standard error, which more seeds would make smaller; no mean where one diverged, no error of one."""
    finite = all(map(math.isfinite, values))
    error = stdev(values) / math.sqrt(len(values)) if finite and len(values) > 1 else None
    return {name: fmean(values) if finite else None, f"{name}_error": error}


@contextlib.contextmanager
def _pool(workers: int) -> Iterator[Callable[[Callable[[Lesson], Learned], Iterable[Lesson]], Iterator[Learned]]]:
    """What maps in order: in processes of their own, which end with the block, or here where one is enough."""
    if workers == 1:
        yield map
        return
    # Spawned: a fork would copy the locks of torch's threads. Ctrl-C is this process's alone to answer.
    with multiprocessing.get_context("spawn").Pool(workers, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        yield pool.imap
