"""1-bit Adam: after a warm-up the momentum, not the gradient, travels in one bit per number.

    torchrun --nproc-per-node 2 examples/onebit_adam.py

Adam divides by the variance of gradients, and one bit per number inflates it. So gradients travel uncompressed during a
warm-up, and this is AdamW. Then the variance is frozen: every rank adds its gradient to its momentum, and the momentum
travels with error feedback (Tang et al., "1-bit Adam", 2021), in units of the variance's root, so that a number that is
small beside its neighbors is not lost in their error. A hook on every parameter puts the momentum in the place of the
gradient before DDP sees it; `compress_ddp` does the rest.
"""

import argparse
import os
from collections.abc import Iterable
from functools import partial
from pydoc_data.topics import topics
from statistics import mean

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import thinwire

TEXT = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)
CONTEXT = 16  # bytes from which the next one is guessed
BATCH = 128


class OneBitAdam(torch.optim.Optimizer):
    """AdamW for `warmup_steps` steps, then momentum SGD divided by the variance that the warm-up found.

    Accumulate gradients inside DDP's no_sync(), and do not rescale them from step to step: they become momentum.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        *,
        warmup_steps: int,  # 15 to 20 % of the run; more => a better variance, fewer steps in one bit
        floor: float = 1e-3,  # least variance, as a share of its tensor's mean; more => closer to momentum SGD
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "floor": floor})
        self.warmup_steps = warmup_steps
        self.steps = 0
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"momentum": torch.zeros_like(p), "square": torch.zeros_like(p)}
                p.register_hook(partial(self._travels, p, group["betas"][0]))

    @property
    def frozen(self) -> bool:
        return self.steps >= self.warmup_steps

    def _travels(self, p: Tensor, beta: float, grad: Tensor) -> Tensor:
        """What this rank sends of a parameter."""
        if not self.frozen:
            return grad
        return torch.lerp(grad, self.state[p]["momentum"], beta).div_(self.state[p]["square"].sqrt())

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step, from the means that DDP left in `.grad`."""
        frozen = self.frozen
        self.steps += 1
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                momentum, square = self.state[p]["momentum"], self.state[p]["square"]
                if frozen:
                    root = square.sqrt()
                    momentum.copy_(p.grad * root)
                else:
                    momentum.lerp_(p.grad, 1 - beta1)
                    square.lerp_(p.grad.square(), 1 - beta2)
                    root = (square / (1 - beta2**self.steps)).sqrt_().add_(1e-8)
                update = (momentum / (1 - beta1**self.steps)).div_(root).clamp_(-1.0, 1.0)
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])
                if self.frozen and not frozen:  # without its bias, and nowhere too small to divide by
                    square.div_(1 - beta2**self.steps)
                    square.clamp_(min=max(group["floor"] * float(square.mean()), 1e-16))


def start() -> torch.device:
    """Join the other ranks and return this rank's device."""
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    return device


def batch(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    starts = torch.randint(len(TEXT) - CONTEXT, (BATCH, 1), generator=generator)
    text = TEXT[starts + torch.arange(CONTEXT + 1)].long().to(device)
    return text[:, :-1], text[:, -1]


def run(options: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(0)
    layers = (nn.Embedding(256, 32), nn.Flatten(), nn.Linear(32 * CONTEXT, 256), nn.ReLU(), nn.Linear(256, 256))
    model = DistributedDataParallel(nn.Sequential(*layers).to(device))
    warmup = max(1, options.steps // 5)
    optimizer = OneBitAdam(model.parameters(), lr=3e-3, warmup_steps=warmup)
    codec = {0: "none", warmup: options.codec}
    handle = thinwire.compress_ddp(model, codec, feedback="classic", weigh="none")
    losses: list[float] = []
    for step in range(options.steps):
        x, y = batch(step, device)
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == warmup - 1:
            warm = handle.stats()
    sums = [torch.empty_like(sums_of(model)) for _ in range(dist.get_world_size())]
    dist.all_gather(sums, sums_of(model))
    stats = handle.stats()
    fewer = (stats.bytes_plain - warm.bytes_plain) / (stats.bytes_sent - warm.bytes_sent)
    if dist.get_rank() == 0:
        same = all(torch.equal(one, sums[0]) for one in sums)
        print(f"loss {mean(losses[-10:]):.3f}, {fewer:.2f} times fewer bytes after {warmup} steps of warm-up")
        print(f"all ranks have the same model: {same}")


def sums_of(model: nn.Module) -> Tensor:
    return torch.stack([parameter.detach().double().sum() for parameter in model.parameters()])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--codec", default="lloyd1")
    run(parser.parse_args(), start())
    dist.destroy_process_group()
