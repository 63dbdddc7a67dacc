"""The benchmark of quantization-aware training. A run has parts:

speed   what fake quantization costs beside plain copies and torch's own op (qat_speed.py)
train   what a network of three convolutions reaches on scikit-learn's digits at a few bits, by method

A seed fixes the split into training and test images, the first weights and every batch. The network is trained in fp32
once per seed; every method starts from there and takes the same steps on the same batches. The methods are thinwire's
quantizers, torch's, and controls that ought to fail. All quantize the same layers of the same network, weights by
output channel and activations by tensor. To add one: write a function that quantizes a network in place and enter it in
`METHODS`.
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
from functools import cache, partial
from itertools import product
from statistics import fmean
from typing import Annotated, NamedTuple

import torch
import typer
from torch import Tensor, nn
from torch.ao.quantization._learnable_fake_quantize import _LearnableFakeQuantize
from torch.ao.quantization.observer import MovingAverageMinMaxObserver, MovingAveragePerChannelMinMaxObserver
from torch.nn import functional

from benchmarks import clock, data, qat_speed
from benchmarks.command import MOST, check_device, show_with_notes, start, words
from thinwire.qat import LSQ, LearnableFakeQuantize, LSQPlus, fake_quantize, prepare
from thinwire.qat.layers import QuantizedLayer
from thinwire.qat.lsq import Start
from thinwire.tools.bench import timing
from thinwire.tools.bench.record import Progress, Record, Row, collect
from thinwire.tools.cli import flags
from thinwire.tools.cli.bench import deliver
from thinwire.tools.cli.flags import Device, Json, Quick, Words, count, option

PARTS = ("speed", "train")
BITS = (2, 3, 4, 8)
QUICK_BITS = (2,)
SEEDS = 5
QUICK_SEEDS = 2
LATER = 1 << 16  # added to a seed: other batches than in fp32
MOST_WORKERS = 8  # each holds a torch of its own
TASK = "digits"
HELD_OUT = 5  # one image in so many is a test image
START = 256  # images from which quantizers take their first ranges
MOMENTUM = 0.9
FULL_BITS = 32  # of fp32
COARSE = 4  # bits up to which a grid is coarse
RATE = 0.05
BATCH = 64
FP32 = "fp32"


@dataclass(frozen=True)
class Method:
    """How all layers of a network are quantized in place, given the bits of weights and activations."""

    name: str
    quantize: Callable[[nn.Module, int], None]
    control: bool = False  # ought to fail
    peer: bool = False  # torch's own
    at_all_bits: bool = True  # False => unless asked for, trained at the fewest bits alone: at more it tells nothing

    def start(self, model: nn.Module, images: Tensor, bits: int) -> None:
        """Quantize a trained network, let its quantizers take their ranges from some images, and let them learn."""
        self.quantize(model, bits)
        with torch.no_grad():
            model.eval()(images)
        for module in model.modules():
            if isinstance(module, LearnableFakeQuantize | _LearnableFakeQuantize):
                module.enable_param_learning()


class NoFloor(LSQ):
    """LSQ as the paper has it: nothing catches a scale on its way past zero."""

    floor_share = 0.0


class NoGradientScale(NoFloor):
    """The paper's LSQ without the factor of its scales' gradients."""

    scale_gradient = False


class FloorAlone(LSQ):
    """LSQ without that factor, but with thinwire's floor under its scales."""

    scale_gradient = False


class AbsmaxStart(LSQ):
    """LSQ whose scales start where nothing is clipped: at max|x| / quant_max."""

    def estimate(self, x: Tensor) -> Start | None:
        start = super().estimate(x)
        if start is None:
            return None
        rows = x.detach().flatten(1) if self.axis == 0 else x.detach().reshape(1, -1)
        largest = rows.abs().amax(1) / self._range(start.signed)[1]
        return start._replace(scale_C=largest.where(largest > 0, start.scale_C.to(largest)))


class AbsmaxAlways(AbsmaxStart):
    """Nothing is learned: every tensor is rounded on the grid of its own largest element, straight through."""

    def forward(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        start = self.estimate(x)
        if start is None:
            return x
        low, high = self._range(start.signed)
        return fake_quantize(x, start.scale_C, quant_min=low, quant_max=high, axis=self.axis, gradient="torch")


class FakeQuantAdapter(nn.Sequential):
    """A quantizer by torch's names in the place of one of thinwire's."""

    group = 0


def _by_lsq(kind: type[LSQ], model: nn.Module, bits: int) -> None:
    prepare(model, weight_bits=bits, act_bits=bits, first_last_bits=None, quantizer=kind)


def _by_fake_quant(kind: Callable[..., nn.Module], model: nn.Module, bits: int) -> None:
    """As torch's module is meant: observers give the first ranges, symmetric for weights, affine for activations."""
    _by_lsq(LSQ, model, bits)
    for layer in [module for module in model.modules() if isinstance(module, QuantizedLayer)]:
        weights = kind(
            MovingAveragePerChannelMinMaxObserver,
            quant_min=-(1 << bits - 1),
            quant_max=(1 << bits - 1) - 1,
            channel_len=len(layer.weight),
            use_grad_scaling=True,
            dtype=torch.qint8,
            qscheme=torch.per_channel_symmetric,
            ch_axis=0,
        )
        layer.register_module("weight_quantizer", FakeQuantAdapter(weights))
        inputs = kind(MovingAverageMinMaxObserver, quant_min=0, quant_max=(1 << bits) - 1, use_grad_scaling=True)
        layer.register_module("act_quantizer", FakeQuantAdapter(inputs))


_ALL = (
    Method(FP32, lambda model, bits: None),
    Method("lsq", partial(_by_lsq, LSQ)),
    Method("lsqplus", partial(_by_lsq, LSQPlus)),
    Method("learnable", partial(_by_fake_quant, LearnableFakeQuantize)),
    Method("torch_learnable", partial(_by_fake_quant, _LearnableFakeQuantize), peer=True),
    Method("absmax_ste", partial(_by_lsq, AbsmaxAlways), control=True),
    Method("lsq_absmax_init", partial(_by_lsq, AbsmaxStart), control=True, at_all_bits=False),
    Method("lsq_no_grad_scale", partial(_by_lsq, NoGradientScale), control=True, at_all_bits=False),
    Method("lsq_floor_alone", partial(_by_lsq, FloorAlone), at_all_bits=False),
    Method("lsq_no_floor", partial(_by_lsq, NoFloor), at_all_bits=False),
)
METHODS: dict[str, Method] = {method.name: method for method in _ALL}


def rate_at(bits: int) -> float:
    """The rate of SGD, which falls from there by half a cosine to nothing.

    At more than 4 bits, short of fp32, it is a tenth, as in the LSQ paper: scales are so small there that a step of the
    optimizer can take them past zero.
    """
    return RATE / 10 if COARSE < bits < FULL_BITS else RATE


@dataclass(frozen=True)
class QATSchedule:
    """The network, the epochs in fp32, and those that every method goes on from there."""

    before: int
    after: int
    widths: tuple[int, int, int] = (16, 32, 32)  # channels of the convolutions


FULL = QATSchedule(20, 20)
QUICK = QATSchedule(4, 2)


@dataclass(frozen=True)
class Split:
    """Images and labels: those to learn from, and those to be judged by."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def split(seed: int, device: torch.device) -> Split:
    images, labels = data.digits()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    images = images.view(-1, 1, 8, 8)[order].to(device)
    labels = labels[order].to(device)
    test = len(labels) // HELD_OUT
    return Split(images[test:], labels[test:], images[:test], labels[:test])


def network(schedule: QATSchedule, seed: int) -> nn.Module:
    """Three convolutions, each normalized by the batch, and a linear layer. torch's generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        a, b, c = schedule.widths
        layers = [*_convolution(1, a, stride=1), *_convolution(a, b, stride=2), *_convolution(b, c, stride=2)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * c, 10))


def _convolution(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]


def train(model: nn.Module, seen: Split, epochs: int, rate: float, seed: int) -> bool:
    """Train in place. False where a loss or a scale stopped being a number that can go on."""
    model.train()
    count = len(seen.labels)
    used = count // BATCH * BATCH
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=MOMENTUM)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * (count // BATCH))
    generator = torch.Generator().manual_seed(seed)
    try:
        for _ in range(epochs):
            for batch in torch.randperm(count, generator=generator)[:used].split(BATCH):
                optimizer.zero_grad()
                functional.cross_entropy(model(seen.images[batch]), seen.labels[batch]).backward()
                optimizer.step()
                schedule.step()
    except ValueError:  # what a quantizer raises whose scale fell to zero
        return False
    return True


class Result(NamedTuple):
    """Of a run: cross-entropy on all training images, and the share of right test images; NaN where it diverged."""

    train_loss: float
    accuracy: float
    seconds: float  # of training


@torch.no_grad()
def judge(model: nn.Module, seen: Split, seconds: float) -> Result:
    model.eval()
    loss = functional.cross_entropy(model(seen.images), seen.labels).item()
    right = model(seen.test_images).argmax(1) == seen.test_labels
    return Result(loss, right.double().mean().item() if math.isfinite(loss) else math.nan, seconds)


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

    with clock.threads(qat_speed.THREADS):
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
    with clock.threads(1):
        seen, trained = _trained_in_fp32(run.schedule, run.seed, run.device)
        model = copy.deepcopy(trained)
        METHODS[run.method].start(model, seen.images[:START], run.bits)
        begun = time.perf_counter()
        ended = train(model, seen, run.schedule.after, rate_at(run.bits), run.seed + LATER)
        seconds = time.perf_counter() - begun
        return judge(model, seen, seconds) if ended else Result(math.nan, math.nan, seconds)


@cache
def _trained_in_fp32(schedule: QATSchedule, seed: int, device: torch.device) -> tuple[Split, nn.Module]:
    seen = split(seed, device)
    model = network(schedule, seed).to(device)
    train(model, seen, schedule.before, RATE, seed)
    return seen, model


def row_of(run: QATRun, results: Sequence[Result], workers: int) -> Row:
    method = METHODS[run.method]
    losses, accuracies, seconds = zip(*results, strict=True)
    return {
        "task": TASK,
        "method": run.method,
        "weight_bits": run.bits,
        "act_bits": run.bits,
        "seeds": len(results),
        "train_loss": timing.mean(losses),
        "train_loss_error": clock.standard_error(losses),
        "accuracy": timing.mean(accuracies),
        "accuracy_error": clock.standard_error(accuracies),
        "diverged": sum(not math.isfinite(loss) for loss in losses),
        "first_last_bits": run.bits,
        "control": method.control,
        "peer": method.peer,
        "optimizer": f"sgd, momentum {MOMENTUM}",
        "rate": rate_at(run.bits),
        "epochs": run.schedule.after,
        "batch": BATCH,
        "fp32_rate": RATE,
        "fp32_epochs": run.schedule.before,
        "device": run.device.type,
        "seconds": fmean(seconds),
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


def command(
    parts: Annotated[Words, option(f"Among {', '.join(PARTS)}; default all.")] = None,
    methods: Annotated[Words, option(f"To train, among {', '.join(METHODS)}; default all.")] = None,
    bits: Annotated[Words, option("Of weights and activations alike; default 2,3,4,8, quick 2.", "N,M")] = None,
    seeds: Annotated[int | None, count("Trainings of each method; default 5, quick 2.")] = None,
    device: Annotated[Device, typer.Option(help="Where the tensors are.")] = Device.cpu,
    numel: Annotated[int | None, count("Of the speed part; default 2**22, GPU 2**25.", most=MOST)] = None,
    json: Json = None,
    quick: Quick = False,
) -> None:
    """What fake quantization costs, and what networks trained with it reach.

    \b
    Parts:
      speed   forward and backward, per tensor and per channel, in fp32 and bf16
      train   a network of three convolutions on scikit-learn's digits, trained in fp32, then on at few bits

    Speed: ×floor is the time over that of reading and writing each tensor once, by plain copies; ×torch is the time of
    torch's own learnable op over ours. Bytes are allocated at the peak beyond the input, the output and the gradient of
    the output, per element. Training: all layers are quantized; every method has the same recipe, and the same batches
    from the same start. Controls ought to fail (absmax_ste, lsq_absmax_init, lsq_no_grad_scale); they are trained at
    the fewest bits only, unless asked for.
    """
    check_device(device)
    pieces = words(parts, PARTS, "--parts")
    chosen = words(methods, METHODS, "--methods")
    widths = flags.counts(bits, "--bits", 2, 8)
    if pieces == ["speed"]:
        flags.refuse("is of the part train, which --parts leaves out", methods=methods, bits=bits, seeds=seeds)
    if pieces == ["train"]:
        flags.refuse("is of the part speed, which --parts leaves out", numel=numel)
    deliver(partial(run, device.value, pieces, chosen, widths, seeds, numel, quick), json, show=show_with_notes)


if __name__ == "__main__":
    from benchmarks import qat as study  # under its own name, by which ranks find its functions

    start(study.command)
