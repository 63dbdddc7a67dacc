"""What ranks compute together: all communication of qat/.

torch promises that all_reduce leaves the same bits on every rank, so what is computed from its results is the same on
every rank too.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives import groups, torch_verbs
from thinwire.errors import QatError

Ranks = dist.ProcessGroup | Literal["local"] | None


class Agreement:
    """The ranks whose statistics count as one: a process group, the world (None), or this process alone ("local").

    It is looked up when it is needed, so that quantizers can be made before torch.distributed is initialized. Copies
    share the group; a pickle cannot hold it and comes back with the world.
    """

    def __init__(self, ranks: Ranks = None) -> None:
        if not (ranks is None or isinstance(ranks, dist.ProcessGroup) or ranks == "local"):
            raise QatError(
                f"process_group must be a ProcessGroup of this rank, None (the world) or 'local', got {ranks!r}"
            )
        self._ranks = ranks

    def __deepcopy__(self, memo: dict[int, Any]) -> "Agreement":
        return Agreement(self._ranks)

    def __reduce__(self) -> tuple[Callable[..., "Agreement"], tuple[str, ...]]:
        return Agreement, ("local",) if self._ranks == "local" else ()

    def total(self, x: Tensor) -> Tensor:
        """The sum over ranks."""
        return self._reduced(x, dist.ReduceOp.SUM)

    def largest(self, x: Tensor) -> Tensor:
        """The largest of every element over ranks."""
        return self._reduced(x, dist.ReduceOp.MAX)

    def range(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """The ranges that hold those of all ranks."""
        less, high = self.largest(torch.cat([-low, high])).chunk(2)
        return -less, high

    def _reduced(self, x: Tensor, op: Any) -> Tensor:
        if self._ranks == "local" or not (dist.is_available() and dist.is_initialized()):
            return x
        if torch.compiler.is_compiling():
            shared = x.to(x.device, copy=True).contiguous()
            dist.all_reduce(shared, op=op, group=self._ranks)
            return shared
        group: Any = dist.group.WORLD if self._ranks is None else self._ranks
        served = group._device_types
        # Where NCCL alone serves and the model is still on the CPU, x travels from the GPU of this rank.
        device = x.device if any(one.type == x.device.type for one in served) else served[0]
        shared = x.to(device, copy=True).contiguous()
        if groups.backend(group, shared.device) == "gloo":
            torch_verbs.combine("qat", shared, op, group)  # whose errors tell what was lost
        else:
            dist.all_reduce(shared, op=op, group=group)
        return shared.to(x.device)


def is_sharded(x: Tensor) -> bool:
    """Whether x is a DTensor, without importing the module that defines it."""
    return hasattr(x, "placements") and hasattr(x, "full_tensor")


def whole(x: Tensor) -> Tensor:
    """x itself, or all of a DTensor: that gathers, so every rank of its mesh must call."""
    found: Tensor = x.full_tensor() if is_sharded(x) else x  # type: ignore[attr-defined]
    return found.detach()


def widest(x: Tensor) -> torch.dtype:
    """The widest floating-point type of x's device, in which statistics are added."""
    return torch.float32 if x.device.type == "mps" else torch.float64
