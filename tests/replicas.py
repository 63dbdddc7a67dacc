"""DDP models for the tests: one whose gradients are what it is called with, one that learns, and what ranks compare."""

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import thinwire
from cases import CPU, digest, seeded

Group = dist.ProcessGroup
Device = torch.device
Shapes = Mapping[str, tuple[int, ...]]
Dtypes = torch.dtype | Mapping[str, torch.dtype]
SHAPES: Shapes = {"a": (40, 50), "b": (70,), "c": (33, 61), "d": (9,), "e": (64, 32)}
READY = ("c", "a", "e", "b", "d")  # in another order than DDP's first buckets
PAIR: Shapes = {"a": (40, 50), "c": (40, 60)}
WHOLE: Shapes = {"w": (61, 33)}
WORLDS = [2, 3, 4]
CODED = ("one_shot", "two_phase")
CAP = 8.0  # kilobytes: every weight of SHAPES fills a bucket of its own


class Given(nn.Module):
    """Parameters whose gradients are the tensors it is called with; None leaves a parameter out.

    Gradients are ready in the order of `ready`, in which DDP rebuilds its buckets: backwards unless it is given.
    """

    def __init__(self, shapes: Shapes = SHAPES, dtypes: Dtypes = torch.float32, ready: Sequence[str] = ()) -> None:
        super().__init__()
        for i, (name, shape) in enumerate(shapes.items()):
            self.register_parameter(
                name, nn.Parameter(torch.randn(shape, generator=seeded(i)).to(dtype_of(dtypes, name)))
            )
        self._order = [*ready][::-1] or list(shapes)

    def forward(self, *gradients: Tensor | None) -> Tensor:
        """The sum of products; the factors of a product are each other's gradients."""
        given = dict(zip((name for name, _ in self.named_parameters()), gradients, strict=True))
        total = torch.zeros(())
        for name in self._order:
            if (gradient := given[name]) is not None:
                parameter = self.get_parameter(name)
                product = parameter * gradient.to(parameter.device).conj()
                total = total + (product.real if product.is_complex() else product).sum()
        return total


def dtype_of(dtypes: Dtypes, name: str) -> torch.dtype:
    """The dtype of one parameter; float32 where nothing is said."""
    return dtypes if isinstance(dtypes, torch.dtype) else dtypes.get(name, torch.float32)


def mesh_of(*shape: int) -> DeviceMesh:
    """Ranks that hold shards, or replicas of shards."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])


def wrap(
    module: nn.Module, group: Group | None = None, cap: float = CAP, *, device: torch.device = CPU, **options: Any
) -> DistributedDataParallel:
    """DDP with buckets of `cap` kilobytes, of 1024 bytes, and parameters on `device`."""
    return DistributedDataParallel(module.to(device), process_group=group, bucket_cap_mb=cap / 1024, **options)


def join_buckets(handle: "thinwire.DDPHandle", nbytes: int) -> None:
    """Let `handle` join buckets into messages of so many bytes, as it does on NCCL."""
    vars(handle)["_size_to_join"] = lambda *_: nbytes


def draw(
    rank: int, step: int = 0, shapes: Shapes = SHAPES, dtypes: Dtypes = torch.float32, spread: float = 1.0
) -> list[Tensor]:
    """A rank's gradients at a step: Gaussian; `spread` is the ratio of one parameter's size to the last one's."""
    return [
        (torch.randn(shape, generator=seeded(i, rank, step), dtype=torch.complex128) * spread**i * 2**0.5).to(dtype)
        if (dtype := dtype_of(dtypes, name)).is_complex
        else (torch.randn(shape, generator=seeded(i, rank, step)) * spread**i).to(dtype)
        for i, (name, shape) in enumerate(shapes.items())
    ]


def flat(tensors: Sequence[Tensor | None]) -> Tensor:
    """All numbers in a row."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors if tensor is not None])


def mean_of(world: int, step: int = 0, shapes: Shapes = SHAPES, spread: float = 1.0) -> Tensor:
    """The exact mean over ranks of `draw`, in a row."""
    return torch.stack([flat(draw(r, step, shapes, spread=spread)).double() for r in range(world)]).mean(0)


def backward(model: DistributedDataParallel, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """What DDP makes of a rank's gradients: those of all ranks, averaged."""
    model.zero_grad()
    model(*gradients).backward()
    return grads_of(model)


def grads_of(model: nn.Module) -> list[Tensor | None]:
    """Copies of the gradients, on the CPU."""
    return [None if p.grad is None else p.grad.to(CPU, copy=True) for p in model.parameters()]


def residuals(handle: "thinwire.DDPHandle", shapes: Shapes = SHAPES) -> Tensor:
    """What this rank remembers, in a row; zero where nothing is."""
    (kept,) = handle.state_dict()["ranks"].values()
    return flat([kept.get(name, torch.zeros(shape)).cpu().double() for name, shape in shapes.items()])


def gradients_saved(stats: "thinwire.Stats", numel: int, world: int = 2) -> float:
    """The share of the gradients' bytes that FSDP2 did not send, where it gathers weights as they are."""
    return stats.bytes_saved / (stats.steps * 4 * numel * (world - 1) / world)


def through_file(value: Any, *, weights_only: bool = True) -> Any:
    """Saved and loaded, with nothing but plain data in the file unless that is allowed."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def same_everywhere(group: Group, *tensors: Tensor) -> bool:
    """Whether all ranks hold the same bytes."""
    told: list[Any] = [None] * group.size()
    dist.all_gather_object(told, digest(*tensors), group=group)
    return len(set(told)) == 1


def message_of(call: Callable[[], Any]) -> str:
    """What an error about arguments or states says; every one of thinwire's is a ValueError."""
    try:
        call()
    except ValueError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}!: {error}"
    return "accepted!"


def network(*, norm: bool = False) -> nn.Module:
    """Two weights that are large enough to be compressed; with `norm` buffers too. The same on every rank."""
    torch.manual_seed(3)
    between = [nn.ReLU(), *([nn.BatchNorm1d(64)] if norm else [])]
    return nn.Sequential(nn.Linear(20, 64), *between, nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """16 examples of a rank; the answer is linear in them."""
    x = torch.randn(16, 20, generator=seeded(rank, step))
    return x, x @ torch.linspace(-1, 1, 20)[:, None]


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda params: torch.optim.SGD(params, 0.03, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, 3e-3),
    "adamw": lambda params: torch.optim.AdamW(params, 3e-3),
}


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> list[float]:
    """Train; the losses of this rank."""
    losses = []
    device = next(model.parameters()).device
    for step in steps:
        x, y = (t.to(device) for t in batch(rank, step))
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
