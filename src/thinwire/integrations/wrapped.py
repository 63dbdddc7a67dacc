"""The model and the optimizer inside what a framework, torch.compile or Fabric put around them."""

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thinwire.errors import CollectiveError

_INSIDE = ("optim", "_optimizer", "optimizer")  # where ZeroRedundancyOptimizer, Lightning and Accelerate keep theirs


def find_ddp(given: object) -> DistributedDataParallel:
    """The one DDP model in `given`, or an error that says what is there instead."""
    found = _modules(given, DistributedDataParallel)
    if len(found) == 1:
        model: DistributedDataParallel = found[0]
        return model
    if found:
        raise CollectiveError(
            f"expected one DistributedDataParallel model, {type(given).__name__} holds {len(found)}: compress them "
            "one by one"
        )
    raise CollectiveError(f"expected a torch.nn.parallel.DistributedDataParallel, got {describe(given)}")


def describe(given: object) -> str:
    """What was passed, and the function it belongs to."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel  # much comes with them, for an error alone

    name = type(given).__name__
    if _modules(given, DistributedDataParallel):
        return f"{name}, a DistributedDataParallel model: call thinwire.compress_ddp"
    if _modules(given, FSDPModule):
        return f"{name}, which FSDP2 shards: call thinwire.compress_fsdp"
    if _modules(given, FullyShardedDataParallel):
        return f"{name}, which FSDP1 shards: shard it with torch.distributed.fsdp.fully_shard (FSDP2) instead"
    if any(kind.__module__ == "torch.distributed._composable.replicate" for kind in type(given).__mro__):
        return f"{name}, which replicate() was called on: wrap the model in DistributedDataParallel instead"
    if not isinstance(given, nn.Module):
        return f"{name}: pass the model"
    return (
        f"{name}, which nothing wraps or shards: wrap it in DistributedDataParallel, or call fully_shard, first. Where "
        "a framework has done so, pass what it made: what accelerator.prepare gave, trainer.model_wrapped of "
        "transformers, trainer.strategy.model of Lightning"
    )


def _modules(given: object, kind: Any) -> list[Any]:
    return [module for module in given.modules() if isinstance(module, kind)] if isinstance(given, nn.Module) else []


def bare_optimizer(given: Any, *, whole: bool = False) -> Any:
    """The optimizer that a framework's wraps, or `given` itself; if `whole`, not a rank's part of a sharded one."""
    held = {} if whole and is_sharded(given) else getattr(given, "__dict__", {})
    inner = [bare_optimizer(held[name], whole=whole) for name in _INSIDE if name in held]
    return next((one for one in inner if isinstance(one, Optimizer)), given)


def is_sharded(optimizer: object) -> bool:
    """Whether it is a ZeroRedundancyOptimizer: ranks step a part of the parameters each, and then exchange them."""
    return any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__)
