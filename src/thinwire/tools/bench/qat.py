"""The benchmark of quantisation-aware training. A run has parts:

speed   what fake quantisation costs beside plain copies and torch's own op (bench/qat_speed.py)
train   what a network reaches at a few bits, by method (bench/qat_tasks.py, bench/qat_methods.py)
"""

import contextlib
import copy
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from statistics import fmean

import torch
from torch import nn

from thinwire.tools.bench import qat_speed, qat_tasks, timing
from thinwire.tools.bench.qat_methods import FP32, METHODS
from thinwire.tools.bench.qat_tasks import DIVERGED, FULL_BITS, Judgement, QATSchedule, Split
from thinwire.tools.bench.record import Progress, Record, Row, collect

PARTS = ("speed", "train")
BITS = (2, 3, 4, 8)
QUICK_BITS = (2,)
SEEDS = 5
QUICK_SEEDS = 2
LATER = 1 << 16  # added to a seed: other batches than in fp32
MOST_WORKERS = 8  # each holds a torch of its own


@dataclass(frozen=True)
class QATRun:
    """One training of one method. All layers get the bits: with 8 in the first and the last, methods hardly differ."""

    schedule: QATSchedule
    method: str
    bits: int
    seed: int
    device: torch.device

    def __str__(self) -> str:
        width = "" if self.method == FP32 else f" W{self.bits}A{self.bits}"
        return f"train, {self.method}{width}, seed {self.seed}"


Result = tuple[Judgement, float]  # of a run, and the seconds its training took


def runs(
    schedule: QATSchedule, methods: Sequence[str] | None, bits: Sequence[int], seeds: int, device: torch.device
) -> list[QATRun]:
    """By bits, then by method; fp32 has no bits and comes first, once. Of all methods (None), each where it tells."""
    kinds = [(FULL_BITS, FP32)] if methods is None or FP32 in methods else []
    for width, name in product(bits, METHODS if methods is None else methods):
        if name != FP32 and (methods is not None or METHODS[name].at_all_bits or width == min(bits)):
            kinds.append((width, name))
    return [QATRun(schedule, name, width, seed, device) for width, name in kinds for seed in range(seeds)]


def run(
    device: str | torch.device = "cpu",
    parts: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    bits: Sequence[int] | None = None,
    seeds: int | None = None,
    numel: int | None = None,
    quick: bool = False,
    progress: Progress = iter,
) -> Record:
    """A record of kind "qat"; what is None is the usual. `numel` is of the speed part."""
    device = torch.device(device)
    chosen = parts or PARTS
    if "train" in chosen:
        qat_tasks.check()
    schedule = qat_tasks.QUICK if quick else qat_tasks.FULL
    seeds = seeds or (QUICK_SEEDS if quick else SEEDS)
    trainings = runs(schedule, methods, bits or (QUICK_BITS if quick else BITS), seeds, device)
    workers = 1 if quick or device.type == "cuda" else min(os.cpu_count() or 1, MOST_WORKERS)

    def rows() -> Generator[Row]:
        if "speed" in chosen:
            for case in progress(qat_speed.cases(device, numel, quick)):
                yield from case.rows()
        if "train" in chosen:
            yield from _trained_rows(trainings, seeds, workers, progress)

    with timing.threads(qat_speed.THREADS):
        return collect("qat", device, rows())


def _trained_rows(runs: Sequence[QATRun], seeds: int, workers: int, progress: Progress) -> Iterator[Row]:
    """One for each method at each number of bits, as soon as its last seed is trained."""
    results: list[Result] = []
    with _pool(workers) as map_runs:
        for run, result in zip(progress(runs), map_runs(train, runs), strict=False):
            results.append(result)
            if len(results) == seeds:
                yield row_of(run, results, workers)
                results = []


def train(run: QATRun) -> Result:
    """Train once; one thread, so that the sums of a training have one order on every machine."""
    with timing.threads(1):
        seen, trained = _trained_in_fp32(run.schedule, run.seed, run.device)
        model = copy.deepcopy(trained)
        METHODS[run.method].start(model, seen.images[: qat_tasks.START], run.bits)
        begun = time.perf_counter()
        ended = qat_tasks.train(model, seen, run.schedule.after.at(run.bits), run.seed + LATER)
        seconds = time.perf_counter() - begun
        return qat_tasks.judge(model, seen) if ended else DIVERGED, seconds


@cache
def _trained_in_fp32(schedule: QATSchedule, seed: int, device: torch.device) -> tuple[Split, nn.Module]:
    seen = qat_tasks.split(seed, device)
    model = qat_tasks.network(schedule, seed).to(device)
    qat_tasks.train(model, seen, schedule.before, seed)
    return seen, model


def row_of(run: QATRun, results: Sequence[Result], workers: int) -> Row:
    recipe = run.schedule.after.at(run.bits)
    method = METHODS[run.method]
    losses = [judgement.train_loss for judgement, _ in results]
    accuracies = [judgement.accuracy for judgement, _ in results]
    return {
        "task": qat_tasks.TASK,
        "method": run.method,
        "weight_bits": run.bits,
        "act_bits": run.bits,
        "seeds": len(results),
        "train_loss": timing.mean(losses),
        "train_loss_error": timing.standard_error(losses),
        "accuracy": timing.mean(accuracies),
        "accuracy_error": timing.standard_error(accuracies),
        "diverged": sum(judgement.diverged for judgement, _ in results),
        "first_last_bits": run.bits,
        "control": method.control,
        "peer": method.peer,
        "optimizer": f"sgd, momentum {qat_tasks.MOMENTUM}",
        "rate": recipe.rate,
        "epochs": recipe.epochs,
        "batch": recipe.batch,
        "fp32_rate": run.schedule.before.rate,
        "fp32_epochs": run.schedule.before.epochs,
        "device": run.device.type,
        "seconds": fmean(seconds for _, seconds in results),
        "workers": workers,
    }


@contextlib.contextmanager
def _pool(workers: int) -> Iterator[Callable[[Callable[[QATRun], Result], Iterable[QATRun]], Iterator[Result]]]:
    """What maps in order: in processes of their own, which end with the block, or here where one is enough."""
    if workers == 1:
        yield map
        return
    # Spawned: a fork would copy the locks of torch's threads. Ctrl-C is this process's alone to answer.
    with multiprocessing.get_context("spawn").Pool(workers, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        yield pool.imap
