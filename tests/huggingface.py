"""Accelerate and transformers inside the ranks of a test: the environment of torchrun, and no memory of other tests."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cases import half_ulp
from replicas import Group


@contextmanager
def launched(group: Group, *, local_rank: int | None = None) -> Iterator[None]:
    """Let Accelerate find what torchrun would tell it; its process group is there already."""
    from accelerate.state import AcceleratorState, GradientState

    told = {"RANK": group.rank(), "LOCAL_RANK": group.rank() if local_rank is None else local_rank}
    told |= {"WORLD_SIZE": group.size(), "LOCAL_WORLD_SIZE": group.size(), "MASTER_PORT": 0}
    with mock.patch.dict(os.environ, {"MASTER_ADDR": "localhost", **{name: str(n) for name, n in told.items()}}):
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


def shard_on_cpu(accelerator: Any, plugin: Any) -> None:
    """Switch the FSDP plugin on, as AcceleratorState does where it finds GPUs; on a CPU it leaves the plugin unused."""
    from accelerate import DistributedType, PartialState

    accelerator.state.fsdp_plugin = plugin
    accelerator.state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def watch_gradients(model: nn.Module) -> dict[str, Tensor]:
    """By parameter, the largest number of this rank's own gradients; those of several passes are added up."""
    peaks = {name: torch.zeros(()) for name, _ in model.named_parameters()}

    def note(name: str, gradient: Tensor) -> None:
        peaks[name] += gradient.abs().max().float()

    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: note(name, gradient))
    return peaks


def assert_within_int8(got: Sequence[Tensor], want: Sequence[Tensor], peaks: Sequence[Tensor], rate: float) -> None:
    """Parameters after one step of SGD at this rate, whose gradients travelled in int8 or were averaged exactly.

    Both roundings of a sum cost half a step of 1/127 of the largest number of any rank.
    """
    for mine, exact, peak in zip(got, want, peaks, strict=True):
        lost = rate * peak * 1.02 / 127 + 8 * half_ulp(torch.float32) * exact.abs().max()
        assert (mine - exact).abs().max() <= lost
    assert any(not torch.equal(mine, exact) for mine, exact in zip(got, want, strict=True))


def largest_of_all(group: Group, peaks: dict[str, Tensor]) -> list[Tensor]:
    """The largest numbers of any rank."""
    for peak in peaks.values():
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
    return list(peaks.values())
