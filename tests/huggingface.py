"""Accelerate and transformers inside the ranks of a test: the environment of torchrun, and no memory of other tests."""

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire
from cases import half_ulp
from replicas import Group, flat


class Found(NamedTuple):
    """What a training gave."""

    weights: list[Tensor]
    peak: float  # of the ranks' own gradients, where they were watched
    stats: "thinwire.Stats | None"
    owed: Tensor  # what this rank remembers
    graphs: int = 0  # that torch.compile captured
    logs: Sequence[dict[str, Any]] = ()
    reported: Sequence[dict[str, Any]] = ()  # by a callback that stands before ours


def remembered(handle: Any) -> Tensor:
    """What this rank remembers, in a row."""
    (kept,) = handle.state_dict()["ranks"].values()
    return flat([torch.zeros(0), *(kept[name] for name in sorted(kept))])


@contextmanager
def launched(group: Group | None, *, local_rank: int | None = None) -> Iterator[None]:
    """Let Accelerate find what torchrun would tell it, or nothing; its process group is there already."""
    from accelerate.state import AcceleratorState, GradientState

    told = {}
    if group is not None:
        told = {"RANK": group.rank(), "LOCAL_RANK": group.rank() if local_rank is None else local_rank}
        told |= {"WORLD_SIZE": group.size(), "LOCAL_WORLD_SIZE": group.size(), "MASTER_PORT": 0}
    environment = {"MASTER_ADDR": "localhost", **{name: str(number) for name, number in told.items()}}
    with mock.patch.dict(os.environ, environment), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")  # Dynamo looks at that of every tensor
        warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # in bf16, on some CPUs
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


def assert_within_int8(got: Sequence[Tensor], want: Sequence[Tensor], peak: float, rate: float) -> None:
    """Parameters after one step of SGD at this rate, whose gradients travelled in int8 or were averaged exactly.

    Both roundings of a sum cost half a step of 1/127 of the largest number of a block on any rank. Blocks may hold
    gradients of several parameters, so `peak` is the largest number of all.
    """
    for mine, exact in zip(got, want, strict=True):
        lost = rate * peak * 1.02 / 127 + 8 * half_ulp(torch.float32) * float(exact.abs().max())
        assert float((mine - exact).abs().max()) <= lost
    assert any(not torch.equal(mine, exact) for mine, exact in zip(got, want, strict=True))


def largest(group: Group, peaks: dict[str, Tensor]) -> float:
    """The largest number of any parameter on any rank."""
    peak = torch.stack([torch.zeros(()), *peaks.values()]).max()
    dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
    return float(peak)


def assert_compressed(plain: Found, none: Found, exact: Found, int8: Found, *, rate: float, share: float) -> None:
    """Runs without thinwire, with what rounds nothing, and after one step of SGD: averaged exactly, or in int8."""
    assert all(torch.equal(mine, other) for mine, other in zip(none.weights, plain.weights, strict=True))
    assert_within_int8(int8.weights, exact.weights, exact.peak, rate)
    assert (none.stats.steps, int8.stats.steps) == (4, 1)
    assert int8.stats.bytes_sent < share * int8.stats.bytes_plain
