"""Optimisers made for few bits: Adam whose momentum, not its gradients, travels.

optimizer = thinwire.optim.OneBitAdam(model.parameters(), lr=1e-3, warmup_steps=1000)
handle = thinwire.compress_ddp(model, "lloyd1", optimizer=optimizer)
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["OneBitAdam"]


class OneBitAdam(Optimizer):
    """Adam for 1-bit gradients: Adam while it warms up, then momentum SGD with the variance that Adam had found.

    Adam divides by the variance of gradients, and one bit a number inflates it. So for `warmup_steps` steps gradients
    travel uncompressed and this is AdamW. Then the variance is frozen, and what is left is linear: every rank adds its
    gradient to its momentum, and the momentum travels in one bit with error feedback (Tang et al., "1-bit Adam", 2021).
    A parameter whose frozen variance is small would take enormous steps; `floor` bounds it from below.

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
        floor: float = 0.1,  # least variance, as a share of its tensor's mean; larger => closer to momentum SGD
    ) -> None:
        _check(lr=lr, eps=eps, weight_decay=weight_decay, floor=floor)
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas must be from 0 up to, not including, 1, got {betas}")
        if not isinstance(warmup_steps, int) or warmup_steps < 1:
            raise ValueError(f"warmup_steps must be 1 or more: the variance comes from them; got {warmup_steps!r}")
        defaults = {
            "lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "warmup_steps": warmup_steps,
            "floor": floor, "steps": 0,
        }  # fmt: skip
        super().__init__(params, defaults)
        self._arrived: set[int] = set()  # parameters whose gradient is the momentum already

    @property
    def frozen(self) -> bool:
        """Whether the warm-up is over: the variance stays, and momentum travels."""
        group = self.param_groups[0]
        return bool(group["steps"] >= group["warmup_steps"])

    @torch.no_grad()
    def put_momentum(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """The gradients become this rank's new momentum, in place."""
        owners = {id(p): group for group in self.param_groups for p in group["params"]}
        for parameter, gradient in zip(parameters, gradients, strict=True):
            group = owners.get(id(parameter))
            if group is None:
                raise ValueError("OneBitAdam has to own every parameter of the model that DDP averages gradients of")
            beta = group["betas"][0]
            gradient.mul_(1 - beta).add_(self._state(parameter)["exp_avg"], alpha=beta)
            self._arrived.add(id(parameter))

    def _state(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group)
        self._arrived.clear()
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        frozen = group["steps"] >= group["warmup_steps"]
        group["steps"] += 1
        parameters = [p for p in group["params"] if p.grad is not None]
        for p in parameters:
            if p.grad.is_sparse or p.is_complex():
                raise ValueError("OneBitAdam takes real parameters and dense gradients")
            momentum, variance = self._moments(p, group, frozen)
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.addcdiv_(momentum, variance, value=-group["lr"])
        if group["steps"] == group["warmup_steps"]:
            self._freeze(group)

    def _moments(self, p: Tensor, group: dict[str, Any], frozen: bool) -> tuple[Tensor, Tensor]:
        """The momentum, its bias removed, and what it is divided by."""
        beta1, beta2 = group["betas"]
        state, grad, t = self._state(p), p.grad, group["steps"]
        assert grad is not None
        momentum, square = state["exp_avg"], state["exp_avg_sq"]
        if id(p) in self._arrived:
            momentum.copy_(grad)
        else:
            momentum.lerp_(grad, 1 - beta1)
        if not frozen:
            square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = square.sqrt() if frozen else (square / (1 - beta2**t)).sqrt_()
        return momentum / (1 - beta1**t), root.add_(group["eps"])

    def _freeze(self, group: dict[str, Any]) -> None:
        """The variance without its bias, nowhere under its floor: what every later step divides by."""
        squares = [self._state(p)["exp_avg_sq"] for p in group["params"] if p.numel()]
        torch._foreach_div_(squares, 1 - group["betas"][1] ** group["steps"])
        everywhere = sum(float(s.double().sum()) for s in squares) / max(1, sum(s.numel() for s in squares))
        for square in squares:
            mean = float(square.double().mean()) or everywhere  # nothing is known of one that had no gradient
            square.clamp_(min=group["floor"] * mean)


def _check(**values: float) -> None:
    for name, value in values.items():
        if not value >= 0.0:
            raise ValueError(f"{name} must be 0 or more, got {value}")
