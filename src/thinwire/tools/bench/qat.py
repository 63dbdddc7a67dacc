"""The benchmark of quantisation-aware training. A run has parts:

speed   what fake quantisation costs beside plain copies and torch's own op (bench/qat_speed.py)
train   what a network of three convolutions reaches on scikit-learn's digits at a few bits, by method (qat_methods.py)

A seed fixes the split into training and test images, the first weights and every batch. The network is trained in fp32
once per seed; every method starts from there and takes the same steps on the same batches.
"""

import contextlib
import copy
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinwire.tools.bench import data, qat_speed, timing
from thinwire.tools.bench.qat_methods import FP32, METHODS
from thinwire.tools.bench.record import Progress, Record, Row, collect

PARTS = ("speed", "train")
BITS = (2, 3, 4, 8)
QUICK_BITS = (2,)
SEEDS = 5
QUICK_SEEDS = 2
LATER = 1 << 16  # added to a seed: other batches than in fp32
MOST_WORKERS = 8  # each holds a torch of its own
TASK = "digits"
HELD_OUT = 5  # one image in so many is a test image
START = 256  # images from which quantisers take their first ranges
MOMENTUM = 0.9
FULL_BITS = 32  # of fp32
COARSE = 4  # bits up to which a grid is coarse


@dataclass(frozen=True)
class Recipe:
    """How a network is trained: SGD with momentum, its rate falling by half a cosine to nothing."""

    epochs: int
    rate: float = 0.05
    batch: int = 64

    def at(self, bits: int) -> "Recipe":
        """This recipe for a method at these bits.

        At up to 4 bits, and in fp32, the rate stays. At more it is a tenth of that, as in the LSQ paper: scales are so
        small there that a step of the optimiser can take them past zero.
        """
        return replace(self, rate=self.rate / 10) if COARSE < bits < FULL_BITS else self


@dataclass(frozen=True)
class QATSchedule:
    """The network, how it is trained in fp32, and how every method goes on from there."""

    before: Recipe
    after: Recipe
    widths: tuple[int, int, int] = (16, 32, 32)  # channels of the convolutions


FULL = QATSchedule(Recipe(epochs=20), Recipe(epochs=20))
QUICK = QATSchedule(Recipe(epochs=4), Recipe(epochs=2))


@dataclass(frozen=True)
class Split:
    """Images and labels: those to learn from, and those to be judged by."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor


@dataclass(frozen=True)
class Judgement:
    """Cross-entropy on all training images, and the share of right test images; NaN where the training diverged."""

    train_loss: float
    accuracy: float

    @property
    def diverged(self) -> bool:
        return not math.isfinite(self.train_loss)


DIVERGED = Judgement(math.nan, math.nan)


def split(seed: int, device: torch.device) -> Split:
    images, labels = data.digits()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    images = images.view(-1, 1, 8, 8)[order].to(device)
    labels = labels[order].to(device)
    test = len(labels) // HELD_OUT
    return Split(images[test:], labels[test:], images[:test], labels[:test])


def network(schedule: QATSchedule, seed: int) -> nn.Module:
    """Three convolutions, each normalised by the batch, and a linear layer. torch's generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        a, b, c = schedule.widths
        layers = [*_convolution(1, a, stride=1), *_convolution(a, b, stride=2), *_convolution(b, c, stride=2)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * c, 10))


def _convolution(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]


def train(model: nn.Module, seen: Split, recipe: Recipe, seed: int) -> bool:
    """Train in place. False where a loss or a scale stopped being a number that can go on."""
    model.train()
    count = len(seen.labels)
    used = count // recipe.batch * recipe.batch
    optimizer = torch.optim.SGD(model.parameters(), recipe.rate, momentum=MOMENTUM)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, recipe.epochs * (count // recipe.batch))
    generator = torch.Generator().manual_seed(seed)
    try:
        for _ in range(recipe.epochs):
            for batch in torch.randperm(count, generator=generator)[:used].split(recipe.batch):
                optimizer.zero_grad()
                functional.cross_entropy(model(seen.images[batch]), seen.labels[batch]).backward()
                optimizer.step()
                schedule.step()
    except ValueError:  # what a quantiser raises whose scale fell to zero
        return False
    return True


@torch.no_grad()
def judge(model: nn.Module, seen: Split) -> Judgement:
    model.eval()
    loss = functional.cross_entropy(model(seen.images), seen.labels).item()
    right = model(seen.test_images).argmax(1) == seen.test_labels
    return Judgement(loss, right.double().mean().item()) if math.isfinite(loss) else DIVERGED


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
        data.check_digits("the training part", "take --parts speed, which needs nothing")
    schedule = QUICK if quick else FULL
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
        for run, result in zip(progress(runs), map_runs(train_run, runs), strict=False):
            results.append(result)
            if len(results) == seeds:
                yield row_of(run, results, workers)
                results = []


def train_run(run: QATRun) -> Result:
    """Train once; one thread, so that the sums of a training have one order on every machine."""
    with timing.threads(1):
        seen, trained = _trained_in_fp32(run.schedule, run.seed, run.device)
        model = copy.deepcopy(trained)
        METHODS[run.method].start(model, seen.images[:START], run.bits)
        begun = time.perf_counter()
        ended = train(model, seen, run.schedule.after.at(run.bits), run.seed + LATER)
        seconds = time.perf_counter() - begun
        return judge(model, seen) if ended else DIVERGED, seconds


@cache
def _trained_in_fp32(schedule: QATSchedule, seed: int, device: torch.device) -> tuple[Split, nn.Module]:
    seen = split(seed, device)
    model = network(schedule, seed).to(device)
    train(model, seen, schedule.before, seed)
    return seen, model


def row_of(run: QATRun, results: Sequence[Result], workers: int) -> Row:
    recipe = run.schedule.after.at(run.bits)
    method = METHODS[run.method]
    losses = [judgement.train_loss for judgement, _ in results]
    accuracies = [judgement.accuracy for judgement, _ in results]
    return {
        "task": TASK,
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
        "optimizer": f"sgd, momentum {MOMENTUM}",
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
