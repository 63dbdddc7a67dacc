"""What is inside the model and the optimizer that a user passes: DDP, the bare optimizer, parameters and their names.

Frameworks, torch.compile and Fabric wrap models and optimizers; names in rules and checkpoints are without wrappers.
"""

import gc
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from thinwire.errors import CollectiveError

Names = tuple[str, ...]
Kind = TypeVar("Kind")
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_forward_module")  # torch.compile's, torch's and Fabric's
_INSIDE = ("optim", "_optimizer", "optimizer")  # where ZeroRedundancyOptimizer, Lightning and Accelerate keep theirs
PADDING = "\0"  # before the name of a parameter: the padding after its elements in a buffer


def plain_name(name: str) -> str:
    """The name of a module or parameter without the names of wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


class ParameterSize(NamedTuple):
    """The size of a parameter's gradient: complex numbers count twice."""

    shape: torch.Size
    numel: int
    dtype: torch.dtype


class ParameterNames:
    """Parameters' names in a model, or numbers in the order in which DDP passes them: the same in every run."""

    def __init__(self, find: Callable[[Tensor], str | None] | None = None) -> None:
        self._find = find  # names tensors that `put` was not given
        self.sizes: dict[str, ParameterSize] = {}  # of those whose gradients travel
        self.frozen: dict[str, ParameterSize] = {}  # of the model's other parameters: they may travel later
        self.frozen_travel = True  # whether DDP may pass gradients of those, too
        self.from_model = False  # whether any name was put here
        self._names: MutableMapping[Tensor, str] = WeakTensorKeyDictionary()
        self._known: dict[tuple[int, ...], tuple[weakref.ref[Tensor], Names, list[torch.Size]]] = {}

    def take(self, model: nn.Module) -> None:
        ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
        for name, parameter in model.named_parameters():
            self.put(parameter, plain_name(name))
            if not parameter.requires_grad or name in ignored:
                self.frozen[plain_name(name)] = self.sizes.pop(plain_name(name))

    def put(self, parameter: Tensor, name: str) -> None:
        self.from_model = True
        self._names[parameter] = name
        real = torch.view_as_real(parameter) if parameter.is_complex() else parameter
        self.sizes[name] = ParameterSize(parameter.shape, real.numel(), real.dtype)

    def size(self, name: str) -> ParameterSize | None:
        """Of a parameter of the model, whether or not it is frozen."""
        return self.sizes.get(name) or self.frozen.get(name)

    def tensors(self) -> dict[str, Tensor]:
        """Those whose gradients travel, by name."""
        return {name: parameter for parameter, name in self._names.items() if name in self.sizes}

    def get(self, parameter: Tensor) -> str | None:
        return self._find(parameter) if self._find else self._names.get(parameter)

    def of(self, parameters: Sequence[Tensor]) -> tuple[Names, list[torch.Size]]:
        """Names and shapes of a bucket's parameters; cached, since DDP passes the same at every step."""
        key = tuple(map(id, parameters))
        found = self._known.get(key)
        if found is None or found[0]() is not parameters[0]:
            # DDP passes the same parameters in the same order at the first step of every run.
            names = tuple(self.get(p) or self._names.setdefault(p, f"parameter {len(self._names)}") for p in parameters)
            found = self._known[key] = weakref.ref(parameters[0]), names, [p.shape for p in parameters]
        return found[1:]


def find_ddp(given: object) -> DistributedDataParallel:
    """The only DDP model in `given`; raises an error that says what it is instead."""
    found: list[DistributedDataParallel] = modules_in(given, DistributedDataParallel)
    if not found:
        raise CollectiveError(f"expected a torch.nn.parallel.DistributedDataParallel, got {describe(given)}")
    if len(found) > 1:
        raise CollectiveError(
            f"expected one DistributedDataParallel model, {type(given).__name__} holds {len(found)}: compress them "
            "one by one"
        )
    return found[0]


def describe(given: object) -> str:
    """What was passed, and what to pass instead, for errors."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel  # slow to import, for an error only

    name = type(given).__name__
    if modules_in(given, DistributedDataParallel):
        return f"{name}, a DistributedDataParallel model: call thinwire.compress_ddp"
    if modules_in(given, FSDPModule):
        return f"{name}, which FSDP2 shards: call thinwire.compress_fsdp"
    if modules_in(given, FullyShardedDataParallel):
        return f"{name}, which FSDP1 shards: shard it with torch.distributed.fsdp.fully_shard (FSDP2) instead"
    if any(kind.__module__ == "torch.distributed._composable.replicate" for kind in type(given).__mro__):
        return f"{name}, which replicate() was called on: wrap the model in DistributedDataParallel instead"
    if not isinstance(given, nn.Module):
        return f"{name}: pass the model"
    return (
        f"{name}, which nothing wraps or shards: wrap it in DistributedDataParallel, or call fully_shard, first. If "
        "a framework has done so, pass its result: that of accelerator.prepare, trainer.model_wrapped of "
        "transformers, trainer.strategy.model of Lightning"
    )


def modules_in(given: object, kind: Any) -> list[Any]:
    """The modules of a class in a model; none in anything else."""
    return [module for module in given.modules() if isinstance(module, kind)] if isinstance(given, nn.Module) else []


def live_objects(kind: type[Kind]) -> list[Kind]:
    """All objects of a class in this process: frameworks pass us no reference to some."""
    return [found for found in gc.get_objects() if issubclass(type(found), kind)]  # isinstance would run properties


def bare_optimizer(given: Any, *, whole: bool = False) -> Any:
    """The optimizer inside a framework's, or `given` itself; if `whole`, not one rank's part of a sharded one."""
    held = {} if whole and is_sharded(given) else getattr(given, "__dict__", {})
    inner = [bare_optimizer(held[name], whole=whole) for name in _INSIDE if name in held]
    return next((one for one in inner if isinstance(one, Optimizer)), given)


def is_sharded(optimizer: object) -> bool:
    """Whether it is a ZeroRedundancyOptimizer: each rank steps a part of the parameters, then they exchange them."""
    return any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__)
