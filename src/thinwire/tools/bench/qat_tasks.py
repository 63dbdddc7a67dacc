"""What `bench qat` trains: a network of three convolutions on scikit-learn's digits, and the recipe for every method.

A seed fixes the split into training and test images, the first weights and every batch. The network is trained in fp32
once a seed; every method starts from there and takes the same steps on the same batches.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinwire.errors import ThinwireError
from thinwire.tools.bench import data

HELD_OUT = 5  # one image in so many is a test image
START = 256  # images from which quantisers take their first ranges
MOMENTUM = 0.9
COARSE, FULL_BITS = 4, 32  # bits up to which a grid is coarse; those of fp32


@dataclass(frozen=True)
class Recipe:
    """How a network is trained: SGD with momentum, its rate falling by half a cosine to nothing."""

    epochs: int
    rate: float
    batch: int = 64

    def steps(self, images: int) -> int:
        """Of a whole training."""
        return self.epochs * (images // self.batch)


@dataclass(frozen=True)
class Digits:
    """The task: how it is trained in fp32, and then by every method.

    At up to 4 bits the rate is the same as before, in fp32 too. At more it is a tenth of that, as in the LSQ paper:
    scales are so small there that a step of the optimiser can take them past zero.
    """

    before: Recipe
    epochs: int  # of a method
    name: str = "digits"
    widths: tuple[int, int, int] = (16, 32, 32)  # channels of the convolutions

    def after(self, bits: int) -> Recipe:
        """The recipe of every method at these bits."""
        rate = self.before.rate
        return Recipe(self.epochs, rate / 10 if COARSE < bits < FULL_BITS else rate)


FULL = Digits(Recipe(epochs=20, rate=0.05), epochs=20)
QUICK = Digits(Recipe(epochs=4, rate=0.05), epochs=2)


@dataclass(frozen=True)
class Split:
    """Images and labels: those to learn from, and those to be judged by."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor


@dataclass(frozen=True)
class Outcome:
    """Of one training: cross-entropy on all training images, the share of right test images. NaN where it diverged."""

    train_loss: float
    accuracy: float

    @property
    def diverged(self) -> bool:
        """Whether it ended without a finite loss."""
        return not math.isfinite(self.train_loss)


DIVERGED = Outcome(math.nan, math.nan)


def check() -> None:
    """Raise unless the digits are there."""
    if find_spec("sklearn") is None:
        raise ThinwireError(
            "the training part needs scikit-learn, which is not installed: pip install 'thinwire[bench]', "
            "or take --parts speed, which needs nothing"
        )


def split(seed: int, device: torch.device) -> Split:
    """The digits of a seed."""
    images, labels = data.digits()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    images, labels = images.view(-1, 1, 8, 8)[order].to(device), labels[order].to(device)
    test = len(labels) // HELD_OUT
    return Split(images[test:], labels[test:], images[:test], labels[:test])


def network(task: Digits, seed: int) -> nn.Module:
    """Three convolutions, each normalised by the batch, and a linear layer. torch's generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        a, b, c = task.widths
        layers = [*_convolution(1, a, stride=1), *_convolution(a, b, stride=2), *_convolution(b, c, stride=2)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * c, 10))


def _convolution(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]


def train(model: nn.Module, seen: Split, recipe: Recipe, seed: int) -> bool:
    """Train in place. False where a loss or a scale stopped being a number that can go on."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), recipe.rate, momentum=MOMENTUM)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, recipe.steps(len(seen.labels)))
    try:
        for batch in _batches(len(seen.labels), recipe, seed):
            optimizer.zero_grad()
            functional.cross_entropy(model(seen.images[batch]), seen.labels[batch]).backward()
            optimizer.step()
            schedule.step()
    except ValueError:  # what a quantiser raises whose scale fell to zero
        return False
    return True


def _batches(count: int, recipe: Recipe, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(recipe.epochs):
        yield from torch.randperm(count, generator=generator)[: count // recipe.batch * recipe.batch].split(
            recipe.batch
        )


@torch.no_grad()
def judge(model: nn.Module, seen: Split) -> Outcome:
    """On all training and all test images."""
    model.eval()
    loss = functional.cross_entropy(model(seen.images), seen.labels).item()
    right = model(seen.test_images).argmax(1) == seen.test_labels
    return Outcome(loss, right.double().mean().item()) if math.isfinite(loss) else DIVERGED
