"""The benchmark of quantisation-aware training. A run has parts:

speed   what fake quantisation costs beside plain copies and torch's own op (bench/qat_speed.py)
train   what a network reaches at a few bits, by method (bench/qat_tasks.py, bench/qat_methods.py)
"""

import copy
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Protocol

import torch
from torch import nn

from thinwire.bench import qat_speed, qat_tasks, timing
from thinwire.bench.qat_methods import FP32, METHODS, Method
from thinwire.bench.qat_tasks import DIVERGED, FULL_BITS, Digits, Outcome, Split
from thinwire.bench.record import Progress, Record, Row, collect

PARTS = ("speed", "train")
BITS = (2, 3, 4, 8)
SEEDS, QUICK_SEEDS = 5, 2
QUICK_BITS = (2,)


class Job(Protocol):
    """What is measured in one go; a progress bar shows it by its text."""

    def rows(self) -> Iterator[Row]: ...


def run(
    device: str | torch.device = "cpu",
    parts: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    bits: Sequence[int] | None = None,
    seeds: int | None = None,
    numel: int | None = None,
    threads: int = 1,
    quick: bool = False,
    progress: Progress = iter,
) -> Record:
    """A record of kind "qat"; what is None is the usual. `numel` is of the speed part, `threads` are the CPU's."""
    device, chosen = torch.device(device), parts or PARTS
    jobs: list[Job] = []
    if "speed" in chosen:
        jobs += qat_speed.cases(device, numel, threads, quick)
    if "train" in chosen:
        qat_tasks.check()
        school = School(
            task=qat_tasks.QUICK if quick else qat_tasks.FULL,
            bits=tuple(bits or (QUICK_BITS if quick else BITS)),
            seeds=seeds or (QUICK_SEEDS if quick else SEEDS),
            threads=threads,
            device=device,
        )
        jobs += school.lessons([METHODS[name] for name in methods or METHODS])
    return collect("qat", device, _rows(jobs, progress))


def _rows(jobs: Sequence[Job], progress: Progress) -> Iterator[Row]:
    for job in progress(jobs):
        yield from job.rows()


@dataclass
class School:
    """All trainings of a run: the networks they start from, and what came of them."""

    task: Digits
    bits: tuple[int, ...]
    seeds: int
    threads: int
    device: torch.device
    _starts: dict[int, tuple[Split, nn.Module]] = field(default_factory=dict)  # by seed, trained in fp32
    _outcomes: dict[tuple[str, int], list[Outcome]] = field(default_factory=lambda: defaultdict(list))
    _seconds: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))

    def lessons(self, methods: Sequence[Method]) -> "list[Lesson]":
        """By bits, then by method; fp32 has no bits and comes first, once."""
        plain = [(method, FULL_BITS) for method in methods if method.name == FP32]
        others = [(method, bits) for bits in self.bits for method in methods if method.name != FP32]
        return [Lesson(self, method, bits, seed) for method, bits in plain + others for seed in range(self.seeds)]

    def learn(self, method: Method, bits: int, seed: int) -> None:
        """Train once, and keep the outcome."""
        seen, trained = self._start(seed)
        model = copy.deepcopy(trained)
        method.start(model, seen.images[: qat_tasks.START], bits, self._first_last(bits))
        begun = time.perf_counter()
        ended = qat_tasks.train(model, seen, self.task.after(bits), seed + self.seeds)  # other batches than in fp32
        self._seconds[method.name, bits].append(time.perf_counter() - begun)
        self._outcomes[method.name, bits].append(qat_tasks.judge(model, seen) if ended else DIVERGED)

    def _start(self, seed: int) -> tuple[Split, nn.Module]:
        if seed not in self._starts:
            seen, model = qat_tasks.split(seed, self.device), qat_tasks.network(self.task, seed).to(self.device)
            qat_tasks.train(model, seen, self.task.before, seed)
            self._starts[seed] = seen, model
        return self._starts[seed]

    def _first_last(self, bits: int) -> int:
        """All layers are alike: with the first and the last at 8 bits, two bits in the others hardly tell methods."""
        return bits

    def row(self, method: Method, bits: int) -> Row:
        """What all seeds of a method came to."""
        outcomes, recipe = self._outcomes[method.name, bits], self.task.after(bits)
        return {
            "task": self.task.name,
            "method": method.name,
            "weight_bits": bits,
            "act_bits": bits,
            "seeds": self.seeds,
            **_over_seeds("train_loss", [each.train_loss for each in outcomes]),
            **_over_seeds("accuracy", [each.accuracy for each in outcomes]),
            "diverged": sum(each.diverged for each in outcomes),
            "first_last_bits": self._first_last(bits),
            "control": method.control,
            "peer": method.peer,
            "optimizer": f"sgd, momentum {qat_tasks.MOMENTUM}",
            "rate": recipe.rate,
            "epochs": recipe.epochs,
            "rows": recipe.rows,
            "fp32_rate": self.task.before.rate,
            "fp32_epochs": self.task.before.epochs,
            "device": self.device.type,
            "threads": self.threads,
            "seconds": fmean(self._seconds[method.name, bits]),
        }


@dataclass(frozen=True)
class Lesson:
    """One training. The last seed of a method makes its row."""

    school: School
    method: Method
    bits: int
    seed: int

    def __str__(self) -> str:
        width = "" if self.method.name == FP32 else f" W{self.bits}A{self.bits}"
        return f"train, {self.method}{width}, seed {self.seed}"

    def rows(self) -> Iterator[Row]:
        """The row of the method, or none yet."""
        with timing.threads(self.school.threads):
            self.school.learn(self.method, self.bits, self.seed)
        if self.seed + 1 == self.school.seeds:
            yield self.school.row(self.method, self.bits)


def _over_seeds(name: str, values: Sequence[float]) -> Row:
    """Mean and standard error, which more seeds would make smaller; no mean where one diverged, no error of one."""
    finite = all(map(math.isfinite, values))
    error = stdev(values) / math.sqrt(len(values)) if finite and len(values) > 1 else None
    return {name: fmean(values) if finite else None, f"{name}_error": error}
