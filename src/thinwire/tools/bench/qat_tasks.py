"""What `bench qat` trains: a network of three convolutions on scikit-learn's digits, and the recipe for every method.

A seed fixes the split into training and test images, the first weights and every batch. The network is trained in fp32
once per seed; every method starts from there and takes the same steps on the same batches.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinwire.tools.bench import data

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


def check() -> None:
    data.check_digits("the training part", "take --parts speed, which needs nothing")


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
