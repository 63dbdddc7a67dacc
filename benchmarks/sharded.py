"""FSDP2 and DiLoCo in benchmarks.train: networks in shards, and networks that train alone."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer

from benchmarks.schemes import ALONE, BF16, MIXED, REPLICA, Replica, TrainScheme, optimizer_for
from benchmarks.tasks import Task
from thinwire.collectives import groups
from thinwire.integrations.choice.options import Feedback
from thinwire.integrations.diloco import DiLoCo
from thinwire.integrations.fsdp import compress_fsdp

_DTYPES = {  # of mixed the whole network's; bf16 has bf16 on the wire alone, and _gather_narrow for the weights
    MIXED: MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16),
    BF16: MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
}


def shard(scheme: TrainScheme, network: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Replace the network's parameters by this rank's shards: each block is a group, and what is left is one."""
    mesh = init_device_mesh(next(network.parameters()).device.type, (dist.get_world_size(),))
    policy = _DTYPES.get(scheme.name, MixedPrecisionPolicy())
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(network, mesh=mesh, mp_policy=replace(policy, output_dtype=torch.float32))  # the loss's


class ShardedReplica(Replica):
    """A network that `shard` cut up, on this rank; it shares nothing with others."""

    def __init__(self, scheme: TrainScheme, network: nn.Module, optimizer: Optimizer) -> None:
        self.scheme = scheme
        self.optimizer = optimizer
        self.model = network
        self._modules = [module for module in network.modules() if isinstance(module, FSDPModule)]
        if scheme.codec is not None:
            self._compress(scheme.codec)
        for module in self._modules:
            if scheme.name in (BF16, ALONE.name):
                gather = _gather_narrow if scheme.name == BF16 else _gather_nothing
                module.set_custom_all_gather(cast(Any, _Comm(gather)))
            if scheme == ALONE:
                module.set_custom_reduce_scatter(cast(Any, _Comm(_scatter_nothing)))

    def _compress(self, gradients: str) -> None:
        weights, _, how = (self.scheme.weights or "none").partition("@")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that narrow weights cost accuracy is what controls show
            self._handle = compress_fsdp(
                self.model,
                gradients,
                weights,
                feedback=cast(Feedback, self.scheme.feedback),
                exempt=self.scheme.exempt,
                replica=how == REPLICA,
                optimizer=self.optimizer,
            )

    @property
    def bytes_sent(self) -> int | None:
        """None also where torch gathers the weights by itself: nobody would know all of them."""
        return None if self.scheme.weights == "none" else super().bytes_sent

    def weights(self) -> dict[str, Tensor]:
        """Gathered as for a step, so rounded where they travel so."""
        for module in self._modules:
            module.unshard()
        found = {name: parameter.detach().float() for name, parameter in self.model.named_parameters()}
        found = {name: weight.clone() for name, weight in found.items()}
        for module in self._modules:
            module.reshard()
        return found


class _Comm:
    """What FSDP2 asks of a communication: memory, and the call, here without what it may be told besides."""

    def __init__(self, call: Callable[[Tensor, Tensor, dist.ProcessGroup], None]) -> None:
        self._call = call

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **told: Any) -> None:
        self._call(output_tensor, input_tensor, group)


def _gather_narrow(out: Tensor, x: Tensor, group: dist.ProcessGroup) -> None:
    """Weights in bf16 on the wire, in their own dtype before and after it."""
    rows = torch.empty(out.shape, dtype=torch.bfloat16)
    groups.all_gather_single(rows, x.bfloat16(), group=group)
    out.copy_(rows)


def _gather_nothing(out: Tensor, x: Tensor, group: dist.ProcessGroup) -> None:
    """This rank's weights in the place of all: the copies of a gather without the gather."""
    out.view(group.size(), -1).copy_(x.clone())


def _scatter_nothing(out: Tensor, x: Tensor, group: dist.ProcessGroup) -> None:
    """This rank's gradients in the place of the sum."""
    out.copy_(x.view(group.size(), -1)[group.rank()])


class OuterReplica(Replica):
    """A network of this rank, which shares nothing with others; `every` steps lie between two rounds."""

    def __init__(self, scheme: TrainScheme, network: nn.Module, optimizer: Optimizer, every: int) -> None:
        assert scheme.codec is not None
        self.scheme = scheme
        self.optimizer = optimizer
        self.model = network
        feedback = cast(Feedback, scheme.feedback)
        self._handle = DiLoCo(network, optimizer, every=every, codec=scheme.codec, feedback=feedback)

    def weights(self) -> dict[str, Tensor]:
        self._handle.close()
        return dict(self.model.named_parameters())

    @property
    def extra_bytes(self) -> int | None:
        """Outer parameters and what the outer optimizer remembers of them are held, too."""
        outer = self._handle.outer_optimizer
        kept = [p for group in outer.param_groups for p in group["params"]]
        kept += [value for state in outer.state.values() for value in state.values() if isinstance(value, Tensor)]
        return (super().extra_bytes or 0) + sum(int(tensor.nbytes) for tensor in kept)


def replica_of(task: Task, scheme: TrainScheme, network: nn.Module, kind: str, every: int | None = None) -> Replica:
    """This rank's replica, with an optimizer of its own; of FSDP2 in shards, of DiLoCo with rounds."""
    if scheme.weights is None and every is None:
        return Replica(scheme, network, optimizer_for(kind, network.parameters()))
    if scheme.weights is not None:
        shard(scheme, network, task.blocks(network))  # before the optimizer is given the shards
    optimizer = optimizer_for(kind, network.parameters())
    if every is not None:
        return OuterReplica(scheme, network, optimizer, every)
    return ShardedReplica(scheme, network, optimizer)
