"""Which optimizers step the parameters, and gradients in Adam's units.

[Note: Moments] A codec spreads its error evenly over a block, and Adam divides every number by the root of its second
moment. Where gradients are small beside their neighbors in the block, most of what Adam sees is the neighbors' error,
its second moment grows by it, and steps there become short and blind. In Adam's units, divided by that root before they
travel and multiplied by it afterwards, all numbers of a block are of one size. Every rank has the same moments, because
every rank takes the same steps, so nothing more is sent or remembered.
"""

import functools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from thinwire.integrations.choice.options import family, has_moments, leading
from thinwire.integrations.models import ParameterNames, live_objects

_KEYS = ("exp_avg_sq", "square_avg")  # in an optimizer's state
# Added to every moment, as a share of the tensor's largest: dividing by a zero moment would give infinity. The largest
# is the same on every rank, however many threads compute it; a mean might not be.
FLOOR = 1e-6
_LEAST = 1e-18  # the smallest root: all moments of a tensor may decay to zero, and gradients must stay finite
_TRIES = (1, 2, 4, 8, 16, 32)  # steps at which ranks look for moments that they all have
Agree = Callable[[Sequence[float], Any], list[float]]  # the sum or maximum over ranks
Undo = Callable[..., None]


class Moments:
    """The optimizers of the parameters, and the second moments that all ranks have alike."""

    def __init__(self, optimizers: Sequence[object]) -> None:
        self._optimizers = [weakref.ref(one) for one in optimizers if isinstance(one, Optimizer)]
        self.shared: frozenset[str] = frozenset()  # the parameters of which all ranks have them
        self.uneven = False  # whether ranks may have taken different numbers of steps, so that moments differ
        self.seen: dict[str, str] = {}  # families of optimizers that stepped on this rank, by parameter
        self._tried = 0
        self.watching: Callable[[], object] | None = None  # while optimizers are noted: what ends that

    def watch(self, names: ParameterNames) -> None:
        """Note which optimizers step the named parameters from now on."""
        handle = register_optimizer_step_pre_hook(functools.partial(_stepped, weakref.ref(self), names))
        self.watching = weakref.finalize(self, handle.remove)

    def stop(self) -> None:
        """Stop noting them."""
        if self.watching is not None:
            self.watching()
            self.watching = None

    def saw(self, optimizer: Optimizer) -> None:
        """Record an optimizer that may keep moments."""
        if all(known() is not optimizer for known in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))

    @property
    def expected(self) -> bool:
        """Whether an optimizer is known that keeps moments."""
        return any(has_moments(known()) for known in self._optimizers)

    @property
    def settled(self) -> bool:
        """Whether ranks have stopped looking."""
        return self._tried >= _TRIES[-1]

    def look(self, parameters: Mapping[str, Tensor], agree: Agree) -> None:
        """Compare with the other ranks which moments there are; all ranks call it at the same steps.

        If moments are gone, because the optimizer was replaced or its state cleared, ranks look again. Moments that are
        zero or not finite are no unit. If ranks are uneven, they compare moments at every step until none are alike.
        """
        if any(name in self.shared and self._of(parameter) is None for name, parameter in parameters.items()):
            self.forget()
        self._tried += 1
        again = self.uneven and bool(self.shared)
        if not again and (self.settled or self._tried not in _TRIES or len(self.shared) == len(parameters) > 0):
            return
        if self._tried == 1 and not self.expected:  # the optimizers of a resumed run have moments before they step
            mine = {id(parameter) for parameter in parameters.values()}
            for optimizer in live_objects(Optimizer):
                if any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"]):
                    self.saw(optimizer)
        names = sorted(parameters)
        found = [self._of(parameters[name]) for name in names]
        peaks = [-1.0 if moment is None else float(moment.max()) for moment in found]
        agreed = agree([*peaks, *(-peak for peak in peaks)], dist.ReduceOp.MAX)
        pairs = zip(agreed, agreed[len(names) :], strict=False)  # the largest, and less the smallest
        alike = [name for name, (most, least) in zip(names, pairs, strict=True) if 0.0 < -least == most < math.inf]
        self.shared = frozenset(alike)
        if again and not alike:
            self._tried = _TRIES[-1]

    def forget(self) -> None:
        """Search again for moments that all ranks have."""
        self.shared = frozenset()
        self._tried = 0

    def roots(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The divisors of these parameters' gradients; all of them are shared."""
        moments = [moment.float() for moment in map(self._of, parameters) if moment is not None]
        assert len(moments) == len(parameters), "`look` comes before"
        torch._foreach_mul_(floors := torch._foreach_max(moments), FLOOR)
        roots = torch._foreach_add(moments, floors)
        torch._foreach_sqrt_(roots)
        torch._foreach_clamp_min_(roots, _LEAST)
        return list(roots)

    def weigh(self, parameters: Sequence[Tensor], gradients: list[Tensor]) -> Undo:
        """Convert gradients to Adam's units; what is returned converts their means back.

        `moved`: the current stream may be another one than that of the roots, which owns their memory.
        """
        roots = self.roots(parameters)
        torch._foreach_div_(gradients, roots)

        def undo(moved: bool = True) -> None:
            torch._foreach_mul_(gradients, roots)
            for root in roots if moved else ():
                if root.is_cuda:
                    root.record_stream(torch.cuda.current_stream(root.device))

        return undo

    def _of(self, parameter: Tensor) -> Tensor | None:
        for known in self._optimizers:
            optimizer = known()
            state = {} if optimizer is None else optimizer.state.get(parameter, {})
            for key in _KEYS:
                moment = state.get(key)
                if isinstance(moment, Tensor) and moment.shape == parameter.shape and moment.numel():
                    return None if moment.is_complex() else moment  # complex gradients are not weighed
        return None


def _stepped(
    found: "weakref.ref[Moments]", names: ParameterNames, optimizer: Optimizer, args: object, kwargs: object
) -> None:
    moments = found()
    mine = [name for group in optimizer.param_groups for p in group["params"] if (name := names.get(p)) is not None]
    if moments is None or not mine:
        return
    moments.saw(optimizer)
    kind = family(optimizer)
    for name in mine:
        moments.seen[name] = leading([kind, moments.seen.get(name, kind)])
