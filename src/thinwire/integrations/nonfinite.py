"""Steps whose gradients hold NaN or Inf: what `on_nonfinite` of compress_ddp and compress_fsdp makes of them.

[Note: After backward] DDP and FSDP2 put the means into `.grad` in callbacks that autograd runs when a backward pass is
over. A callback that such a callback asks for comes after all of them. There gradients may be looked at and dropped,
and an error comes out of `backward()` as it is, with nothing left half done: the next step works.

"propagate", the default, looks at nothing, so that nobody waits for a GPU.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Variable

from thinwire.errors import NonfiniteError
from thinwire.integrations.stats import Tally
from thinwire.log import announce


class Place(NamedTuple):
    """Which rank of how many this one is, in messages."""

    rank: int
    world: int


class Guard:
    """Looks at the gradients of every step before and after they are averaged. Its `choice` is "raise" or "skip"."""

    def __init__(self, choice: str, tally: Tally) -> None:
        self._choice = choice
        self._tally = tally
        self.forget()

    def forget(self) -> None:
        """A step begins."""
        self._names: list[str] = []  # of parameters, in the order of the backward pass
        self._fine: list[Tensor] = []  # which of them this rank's gradients are finite of

    @property
    def looked(self) -> bool:
        """Whether this step has brought gradients."""
        return bool(self._names)

    def look(self, names: Sequence[str], gradients: Sequence[Tensor]) -> None:
        """These gradients of this rank, all of one dtype, are about to be averaged."""
        self._names += [name for name, part in zip(names, gradients, strict=True) if part.numel()]
        self._fine.append(which_are_finite(gradients))

    def code(self, place: Place, *, spoiled: bool) -> int:
        """One number per rank; the least of all ranks tells where the first bad gradient was.

        spoiled: whether the means on this rank hold NaN or Inf. They may where no gradient does: sums overflow.
        """
        fine = torch.cat(self._fine).tolist()
        first = fine.index(False) if False in fine else len(fine) + (not spoiled)
        return first * place.world + place.rank

    def judge(self, least: int, place: Place, step: int, parameters: Iterable[Tensor]) -> None:
        """Raise, or drop the gradients of `parameters`, if the least code of all ranks says so."""
        first, rank = divmod(least, place.world)
        names = self._names
        self.forget()
        if first > len(names):
            return
        what = "a sum over ranks overflowed"
        if first < len(names):
            what = f"the gradient of {names[first]} on rank {rank} holds NaN or Inf, the first that backward brought"
        if self._choice == "raise":
            raise NonfiniteError(
                f"step {step}: {what}. Look for its origin with torch.autograd.set_detect_anomaly(True), or pass "
                "on_nonfinite='skip' to go on without such steps"
            )
        for parameter in parameters:
            parameter.grad = None
        if not self._tally.skipped and not place.rank:
            announce(f"step {step} is skipped: {what}; stats().skipped counts such steps")
        self._tally.skipped += 1


def which_are_finite(tensors: Sequence[Tensor]) -> Tensor:
    """A truth value for each that has elements; all are of one dtype."""
    real = [torch.view_as_real(part) if part.is_complex() else part for part in tensors if part.numel()]
    if not real:
        return torch.ones(0, dtype=torch.bool, device=tensors[0].device if tensors else None)
    return torch.stack(torch._foreach_norm(real, math.inf)).isfinite()


def after_backward(judge: Callable[[], None]) -> bool:
    """Call `judge` when means are in `.grad`, see [Note: After backward]; False if no backward pass is running."""
    queue = Variable._execution_engine.queue_callback
    try:
        queue(lambda: queue(judge))
    except RuntimeError:
        return False
    return True
