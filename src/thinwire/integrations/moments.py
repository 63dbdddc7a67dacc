"""Gradients in Adam's units: divided by the root of the second moment before they travel, multiplied by it afterwards.

[Note: Moments] A codec spreads its error evenly over a block, and Adam divides every number by the root of its second
moment. So where gradients are small beside their neighbours in the block, the neighbours' error is most of what Adam
sees, and its second moment grows by it: the steps there become short and blind. In Adam's units all numbers of a block
are of one size. Every rank has the same moments, since every rank takes the same steps, so nothing more is sent, and
nothing is remembered.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from thinwire.integrations.names import living

KINDS = ("Adam", "AdamW", "NAdam", "RAdam", "RMSprop")  # optimisers, and those made of them, that keep such moments
_KEYS = ("exp_avg_sq", "square_avg")  # in an optimiser's state
# Of the largest moment of a tensor, added to all: a number that was always zero would become endless. A maximum is the
# same on every rank, however many threads look for it; a mean need not be.
FLOOR = 1e-6
_LEAST = 1e-18  # root: a tensor's moments may fade to zeros, and what a gradient becomes has to be finite
_TRIES = (1, 2, 4, 8, 16, 32)  # steps at which ranks look for moments that they all have
Agree = Callable[[Sequence[float], Any], list[float]]  # the sum or maximum over ranks


def has_moments(optimizer: object) -> bool:
    return any(kind.__name__ in KINDS for kind in type(optimizer).__mro__)


class Moments:
    """The second moments of the parameters, where all ranks have the same."""

    def __init__(self, optimizers: Sequence[object]) -> None:
        self._optimizers = [weakref.ref(one) for one in optimizers if isinstance(one, Optimizer)]
        self.shared: frozenset[str] = frozenset()  # the parameters of which all ranks have them
        self.uneven = False  # whether ranks may have taken different numbers of steps, so that moments differ
        self._tried = 0

    def saw(self, optimizer: Optimizer) -> None:
        """It may have moments too."""
        if all(known() is not optimizer for known in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))

    def _search(self, parameters: Mapping[str, Tensor]) -> None:
        """Find the optimisers of a resumed run before they step: they have their moments already."""
        mine = {id(parameter) for parameter in parameters.values()}
        for found in living(Optimizer):
            if any(id(parameter) in mine for group in found.param_groups for parameter in group["params"]):
                self.saw(found)

    @property
    def expected(self) -> bool:
        """Whether an optimiser is known that keeps moments."""
        return any(has_moments(known()) for known in self._optimizers)

    @property
    def settled(self) -> bool:
        """Whether ranks look for no more."""
        return self._tried >= _TRIES[-1]

    def look(self, parameters: Mapping[str, Tensor], agree: Agree) -> None:
        """Compare with the other ranks which moments there are; all ranks call it at the same steps.

        Where moments are gone, since the optimiser was replaced or its state cleared, ranks look for them anew. Where a
        tensor's are zeros, as after gradients of zeros, it has no unit yet. Where ranks are uneven, those that were
        alike are compared at every step, until none are.
        """
        if any(name in self.shared and self._of(parameter) is None for name, parameter in parameters.items()):
            self.shared = frozenset()
            self._tried = 0
        self._tried += 1
        again = self.uneven and bool(self.shared)
        if not again and (self.settled or self._tried not in _TRIES or len(self.shared) == len(parameters) > 0):
            return
        if self._tried == 1 and not self.expected:
            self._search(parameters)
        names = sorted(parameters)
        found = [self._of(parameters[name]) for name in names]
        peaks = [-1.0 if moment is None else float(moment.max()) for moment in found]
        agreed = agree([*peaks, *(-peak for peak in peaks)], dist.ReduceOp.MAX)
        most = agreed[: len(names)]
        least = [-value for value in agreed[len(names) :]]
        alike = [name for name, low, high in zip(names, least, most, strict=True) if 0.0 < low == high]
        self.shared = frozenset(alike)
        if again and not alike:
            self._tried = _TRIES[-1]

    def roots(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """What the gradients of these parameters, which are all shared, are divided by."""
        moments = [moment.float() for moment in map(self._of, parameters) if moment is not None]
        assert len(moments) == len(parameters), "`look` comes before"
        roots = torch._foreach_add(moments, torch._foreach_mul(torch._foreach_max(moments), FLOOR))
        torch._foreach_sqrt_(roots)
        torch._foreach_clamp_min_(roots, _LEAST)
        return list(roots)

    def _of(self, parameter: Tensor) -> Tensor | None:
        for known in self._optimizers:
            optimizer = known()
            state = {} if optimizer is None else optimizer.state.get(parameter, {})
            for key in _KEYS:
                moment = state.get(key)
                if isinstance(moment, Tensor) and moment.shape == parameter.shape and moment.numel():
                    return None if moment.is_complex() else moment  # complex gradients are not weighed
        return None
