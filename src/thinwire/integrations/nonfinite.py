"""on_nonfinite="raise": gradients with NaN or Inf raise the same NonfiniteError on all ranks.

[Note: After backward] DDP and FSDP2 put the means into `.grad` in callbacks that autograd runs when a backward pass is
over. A callback that such a callback queues runs after all of them. An error raised there leaves `backward()` as it is,
with nothing half done: the next step works.

"propagate", the default, looks at nothing, so that nobody waits for a GPU.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import Variable

from thinwire.errors import NonfiniteError


class NonfiniteGuard:
    """Looks at this rank's gradients before they are averaged, and compares with all ranks afterwards."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self._names: list[str] = []  # of parameters, in the order of the backward pass
        self._fine: list[Tensor] = []  # which of them have finite gradients on this rank

    @property
    def looked(self) -> bool:
        """Whether this step has brought gradients."""
        return bool(self._names)

    def look(self, names: Sequence[str], gradients: Sequence[Tensor]) -> None:
        """These gradients of this rank, all of one dtype, are about to be averaged."""
        self._names += [name for name, part in zip(names, gradients, strict=True) if part.numel()]
        self._fine.append(which_are_finite(gradients))

    def code(self, rank: int, world: int, *, spoiled: bool) -> int:
        """One number per rank; the least of all ranks says where the first bad gradient is.

        spoiled: whether the means on this rank hold NaN or Inf. They may where no gradient does: sums overflow.
        """
        fine = torch.cat(self._fine).tolist()
        first = fine.index(False) if False in fine else len(fine) + (not spoiled)
        return first * world + rank

    def check(self, least: int, world: int, step: int) -> None:
        """Raise if the least code of all ranks says that something is not finite."""
        first, rank = divmod(least, world)
        names = self._names
        self.begin()
        if first > len(names):
            return
        what = "a sum over ranks overflowed"
        if first < len(names):
            what = f"the gradient of {names[first]} on rank {rank} holds NaN or Inf, the first that backward brought"
        raise NonfiniteError(
            f"step {step}: {what}. Look for its origin with torch.autograd.set_detect_anomaly(True), or pass "
            "on_nonfinite='propagate' and skip steps whose gradient norm is not finite"
        )


def which_are_finite(tensors: Sequence[Tensor]) -> Tensor:
    """A truth value for each that has elements; all are of one dtype."""
    real = [torch.view_as_real(part) if part.is_complex() else part for part in tensors if part.numel()]
    if not real:
        return torch.ones(0, dtype=torch.bool, device=tensors[0].device if tensors else None)
    return torch.stack(torch._foreach_norm(real, math.inf)).isfinite()


def after_backward(check: Callable[[], None]) -> bool:
    """Call `check` when means are in `.grad`, see [Note: After backward]; False if no backward pass is running."""
    queue = Variable._execution_engine.queue_callback
    try:
        queue(lambda: queue(check))
    except RuntimeError:
        return False
    return True
