"""Optimisers made for few bits: Adam whose momentum, not its gradients, travels.

optimizer = thinwire.optim.OneBitAdam(model.parameters(), lr=1e-3, warmup_steps=1000)
handle = thinwire.compress_ddp(model, "lloyd1", optimizer=optimizer)
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.errors import OptimizerError

__all__ = ["OneBitAdam"]
_LEAST_FLOOR = 1e-6  # a number that was always zero would become endless in units of its own


class OneBitAdam(Optimizer):
    """Adam for 1 bit: AdamW during a warm-up, then momentum SGD divided by the variance that the warm-up found.

    Adam divides by the variance of gradients, and one bit per number inflates it. So gradients travel uncompressed for
    `warmup_steps` steps, and this is AdamW. Then the variance is frozen. From there on every rank adds its gradient to
    its momentum, and the momentum travels in one bit with error feedback (Tang et al., "1-bit Adam", 2021).

    The momentum travels in units of the variance's root, so that a number that is small beside its neighbours is not
    lost in their error. A small frozen variance would let a parameter take enormous steps later: `floor` is the least
    variance, and after the warm-up nothing moves by more than the learning rate in a step.

    Through `thinwire.compress_ddp(model, codec, optimizer=optimizer)` the momentum arrives where gradients do: after
    the warm-up `p.grad` holds the new momentum. Gradients must not be rescaled from step to step (no GradScaler), and
    clipping clips the momentum. Without compress_ddp it is the same optimiser on the gradients it finds.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,  # decoupled, as in AdamW
        *,
        warmup_steps: int = 1000,  # 15 to 20 % of the run; more => a better variance, fewer steps in one bit
        floor: float = 1e-3,  # least variance, as a share of its tensor's mean; larger => closer to momentum SGD
    ) -> None:
        _check(lr=lr, eps=eps, weight_decay=weight_decay, floor=floor)
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise OptimizerError(f"betas must be from 0 up to, not including, 1, got {betas}")
        if not isinstance(warmup_steps, int) or warmup_steps < 1:
            raise OptimizerError(f"warmup_steps must be 1 or more: the variance comes from them; got {warmup_steps!r}")
        defaults = {
            "lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "warmup_steps": warmup_steps,
            "floor": floor, "steps": 0, "mean_variance": 1.0,
        }  # fmt: skip
        super().__init__(params, defaults)
        self._arrived: set[int] = set()  # parameters whose gradient is the momentum already

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._arrived = set()

    @property
    def frozen(self) -> bool:
        """Whether the warm-up is over: the variance stays, and momentum travels. The first group counts for all."""
        group = self.param_groups[0]
        return bool(group["steps"] >= group["warmup_steps"])

    def groups_of(self, parameters: Iterable[Tensor]) -> list[dict[str, Any]]:
        """The settings of each of these parameters, which are all its own, or an error."""
        owners = {id(p): group for group in self.param_groups for p in group["params"]}
        found = [owners.get(id(parameter)) for parameter in parameters]
        groups = [group for group in found if group is not None]
        if len(groups) < len(found):
            raise OptimizerError("OneBitAdam has to own every parameter of the model that DDP averages gradients of")
        return groups

    @torch.no_grad()
    def put_momentum(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """The gradients become this rank's new momentum, in place."""
        for parameter, gradient, group in zip(parameters, gradients, self.groups_of(parameters), strict=True):
            if id(parameter) in self._arrived:
                raise OptimizerError(
                    "OneBitAdam: gradients were averaged twice before step(), and the first time they became momentum: "
                    "accumulate them inside DDP's no_sync(); after a skipped step call the optimiser's zero_grad()"
                )
            beta = group["betas"][0]
            gradient.mul_(1 - beta).add_(self._state(parameter)["exp_avg"], alpha=beta)
            self._arrived.add(id(parameter))

    @torch.no_grad()
    def roots(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """What momenta are divided by before they travel, and their means multiplied by."""
        return [self._state(parameter)["exp_avg_sq"].float().sqrt() for parameter in parameters]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, and that they were momentum: a step may be skipped."""
        super().zero_grad(set_to_none)
        self._arrived.clear()

    def _state(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            if self.frozen:  # it came after the warm-up
                state["exp_avg_sq"].fill_(self.param_groups[0]["mean_variance"])
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        frozen = self.frozen
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                if p.grad.is_sparse or p.is_complex():
                    raise OptimizerError("OneBitAdam takes real parameters and dense gradients")
                update = self._update(p, group, frozen)
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
        self.param_groups[0]["steps"] += 1
        if self.frozen and not frozen:
            self._freeze()
        self._arrived.clear()
        return loss

    def _update(self, p: Tensor, group: dict[str, Any], frozen: bool) -> Tensor:
        """The momentum, its bias removed, over the root of the variance."""
        beta1, beta2 = group["betas"]
        state = self._state(p)
        grad = p.grad
        assert grad is not None
        state["step"] = t = state["step"] + 1
        momentum = state["exp_avg"]
        square = state["exp_avg_sq"]
        if id(p) in self._arrived:
            momentum.copy_(grad)
        else:
            momentum.lerp_(grad, 1 - beta1)
        if not frozen:
            square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = square.sqrt() if frozen else (square / (1 - beta2**t)).sqrt_()
        update: Tensor = (momentum / (1 - beta1**t)).div_(root.add_(group["eps"]))
        return update.clamp_(-1.0, 1.0) if frozen else update

    def _freeze(self) -> None:
        """The variance without its bias, nowhere under its floor: what every later step divides by.

        A parameter that had no gradient in the warm-up gets the mean of all that had.
        """
        owned = [(p, group) for group in self.param_groups for p in group["params"] if self.state.get(p)]
        known = [(p, group) for p, group in owned if self.state[p]["step"] and p.numel()]
        for p, group in known:
            self.state[p]["exp_avg_sq"].div_(1 - group["betas"][1] ** self.state[p]["step"])
        total = sum(float(self.state[p]["exp_avg_sq"].double().sum()) for p, _ in known)
        everywhere = total / max(1, sum(p.numel() for p, _ in known)) or 1.0
        self.param_groups[0]["mean_variance"] = everywhere
        for p, group in owned:
            square = self.state[p]["exp_avg_sq"]
            if self.state[p]["step"] and square.any():
                square.clamp_(min=max(group["floor"], _LEAST_FLOOR) * float(square.double().mean()))
            else:
                square.fill_(everywhere)


def _check(**values: float) -> None:
    for name, value in values.items():
        if not value >= 0.0:
            raise OptimizerError(f"{name} must be 0 or more, got {value}")
