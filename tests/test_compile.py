"""torch.compile and compress_ddp: graphs are captured, gradients are those of the uncompiled model, both orders."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.parallel import DistributedDataParallel

from cases import on_ranks, thorough
from replicas import Group, same_everywhere
from thinwire import compress_ddp

STEPS = 4
ORDERS: dict[str, Callable[[Any, nn.Module], nn.Module]] = {
    "DDP of a compiled model": lambda backend, model: DistributedDataParallel(torch.compile(model, backend=backend)),
    "a compiled DDP model": lambda backend, model: torch.compile(DistributedDataParallel(model), backend=backend),
}


class Block(nn.Module):
    """A module with a forward of its own: torch.compile captures nothing of a DDP model around an nn.Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(24, 72)
        self.down = nn.Linear(72, 24)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(torch.relu(self.up(x)))
        return (x + hidden).square().mean()


def trained(group: Group, make: Callable[[nn.Module], nn.Module]) -> tuple[Tensor, float]:
    torch.manual_seed(2)
    model = make(Block())
    handle = compress_ddp(model, "lloyd4", policy={"up.weight": "int8"})  # named as without torch.compile
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        x = torch.randn(6, 24, generator=torch.Generator().manual_seed(10 * step + group.rank()))
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
    found = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    assert same_everywhere(group, found)
    return found, handle.stats().ratio


@pytest.mark.parametrize(
    ("backend", "names", "bound"),
    [
        ("eager", [*ORDERS], 0.0),
        ("aot_eager", [*ORDERS], 1e-2),  # another rounding of a gradient may move a code, by a level at most
        *thorough(("inductor", [*ORDERS], 1e-2)),  # compiles for twenty seconds; test_functional.py has it, too
    ],
)
@on_ranks(2)
def test_a_compiled_model_is_compressed(group: Group, backend: str, names: list[str], bound: float) -> None:
    expected, _ = trained(group, DistributedDataParallel)
    for name in names:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(backend)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's own
            got, ratio = trained(group, functools.partial(ORDERS[name], counter))
        assert counter.frame_count > 0, name
        assert ratio > 3.5, name
        assert (got - expected).abs().max() <= bound, name
