"""The inputs of the codec benchmark: five random distributions and one real gradient. The global RNG is untouched."""

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from importlib.util import find_spec
from itertools import pairwise

import torch
from torch import Generator, Tensor

from thinwire.errors import ThinwireError
from thinwire.tools.local.link import BenchError

REGION = 512  # mean length of a region of one scale in `hetero`: scales change inside blocks too
LOG_SIGMA = 1.0  # of the scales in `hetero`; larger => a few regions hold all the energy and decide the error alone
DENSITY = 0.01  # share of non-zeros in `sparse`
# The network behind `gradient`: 64-1024-1024-10, 1.1 M weights.
WIDTH = 1024
STEPS = 40
BATCH = 128
RATE = 0.05


@lru_cache(maxsize=1)
def sample(name: str, numel: int, seed: int = 0) -> Tensor:
    """A flat fp32 tensor of the named distribution, the same for the same arguments. A gradient has its own length.

    The last one is kept and handed out again: do not write into it.
    """
    check([name])
    if numel < 1:
        raise BenchError(f"numel must be 1 or more, got {numel}")
    return DISTRIBUTIONS[name](numel, Generator().manual_seed(seed))


def check(names: Iterable[str]) -> None:
    for name in names:
        if name not in DISTRIBUTIONS:
            raise BenchError(f"unknown distribution {name!r}; known: {', '.join(DISTRIBUTIONS)}")
        if name == "gradient":
            check_digits("distribution 'gradient'", "name the distributions without it")


def check_digits(what: str, instead: str) -> None:
    """Raise unless `what`, which reads scikit-learn's digits, can have them."""
    if find_spec("sklearn") is None:
        raise ThinwireError(
            f"{what} needs scikit-learn, which is not installed: pip install 'thinwire[bench]', or {instead}"
        )


def gaussian(numel: int, generator: Generator) -> Tensor:
    return torch.randn(numel, generator=generator)


def laplace(numel: int, generator: Generator) -> Tensor:
    one, other = (torch.empty(numel).exponential_(generator=generator) for _ in range(2))
    return one - other


def student3(numel: int, generator: Generator) -> Tensor:
    """Student's t with 3 degrees of freedom: a normal over the root of a mean of three squared normals."""
    square = sum(gaussian(numel, generator).square() for _ in range(3)) / 3
    return gaussian(numel, generator) * torch.as_tensor(square).rsqrt()


def hetero(numel: int, generator: Generator) -> Tensor:
    """Normal times a log-normal scale (sigma 1) that holds for a region of random (geometric, mean 512) length."""
    starts = torch.rand(numel, generator=generator) < 1 / REGION
    region = starts.cumsum(0)
    scale = (LOG_SIGMA * gaussian(int(region[-1]) + 1, generator)).exp()
    return gaussian(numel, generator) * scale[region]


def sparse(numel: int, generator: Generator) -> Tensor:
    """1 % of the elements are +1 or -1, the others 0."""
    sign = torch.randint(0, 2, (numel,), generator=generator).float() * 2 - 1
    return torch.where(torch.rand(numel, generator=generator) < DENSITY, sign, 0.0)


def gradient(numel: int, generator: Generator) -> Tensor:
    """That of all weights of a ReLU network on scikit-learn's digits after 40 steps of SGD. Its length is its own."""
    images, labels = digits()
    sizes = (images.shape[1], WIDTH, WIDTH, 10)
    starts = (torch.randn(b, a, generator=generator) * math.sqrt(2 / a) for a, b in pairwise(sizes))
    weights = [start.requires_grad_() for start in starts]
    for _ in range(STEPS):
        for weight, slope in zip(weights, _slopes(weights, images, labels, generator), strict=True):
            weight.data.sub_(RATE * slope)
    return torch.cat([slope.reshape(-1) for slope in _slopes(weights, images, labels, generator)])


def digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits  # an optional dependency, see check_digits

    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images).float() / 16, torch.from_numpy(labels).long()


def _slopes(weights: list[Tensor], images: Tensor, labels: Tensor, generator: Generator) -> tuple[Tensor, ...]:
    """The gradient of the cross-entropy on one random batch."""
    batch = torch.randint(0, len(images), (BATCH,), generator=generator)
    hidden = images[batch]
    for weight in weights[:-1]:
        hidden = (hidden @ weight.T).relu()
    loss = torch.nn.functional.cross_entropy(hidden @ weights[-1].T, labels[batch])
    return torch.autograd.grad(loss, weights)


DISTRIBUTIONS: dict[str, Callable[[int, Generator], Tensor]] = {
    "gaussian": gaussian,
    "laplace": laplace,
    "student3": student3,
    "hetero": hetero,
    "sparse": sparse,
    "gradient": gradient,
}
