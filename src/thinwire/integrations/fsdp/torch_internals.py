"""All private names of torch's FSDP2 that thinwire uses.

FSDP2 cuts a model into parameter groups. Each gathers its parameters with an `AllGather` and reduces their gradients
with a `ReduceScatter`; both can be replaced. Neither learns which parameters it carries, and torch itself sums over
replicas of shards (HSDP). So this file wraps `foreach_reduce`, the one function that reduces a group's gradients:
before it runs, a thinwire `ReduceScatter` gets its arguments by name. Other models are not affected.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from thinwire.errors import CollectiveError
from thinwire.integrations.models import plain_name

try:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_groups
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
        DefaultAllGather,
        DefaultAllocMixin,
        DefaultReduceScatter,
    )
    from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo, TrainingState
    from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
except ImportError as error:
    raise CollectiveError(
        f"compress_fsdp needs FSDP2 as torch 2.11 to 2.15 have it; torch {torch.__version__} lacks some names "
        f"({error}): use one of those, or torch's own hooks with thinwire.reduce_scatter_tensor"
    ) from error

gather_exactly = DefaultAllGather()  # gathers like FSDP2 itself
# torch's own, of every parameter group.
_DEFAULTS: dict[str, type] = {"_reduce_scatter_comm": DefaultReduceScatter, "_all_gather_comm": DefaultAllGather}


class ShardedParameter(NamedTuple):
    """A parameter, and where its parts lie: one in every rank's row of a flat buffer."""

    name: str
    shape: torch.Size  # of the whole parameter
    numel: int  # of a part, padding included
    held: int  # of this rank's part, without padding
    in_tensor_parallel: bool  # whether tensor parallelism shards it, too
    source: Any  # torch's own FSDPParam

    @property
    def gradient(self) -> Tensor | None:
        """This rank's part of the mean gradient; None before it is computed."""
        found: Any = self.source.sharded_param.grad
        return None if found is None else found.to_local()

    def held_by(self, rank: int) -> int:
        """Elements of a rank's part, without padding."""
        if self.source.fsdp_placement.dim != 0:
            return self.numel
        return max(0, min(self.numel, self.shape.numel() - rank * self.numel))

    def whole(self, rows: Tensor) -> Tensor:
        """The whole parameter, from all ranks' parts (one per row)."""
        parts, dim = rows.view(-1, *self.source.padded_sharded_param_size).unbind(), self.source.fsdp_placement.dim
        return torch.cat(parts, dim).narrow(dim, 0, self.shape[dim])

    def rows(self, whole: Tensor, world: int) -> Tensor:
        """All ranks' parts (one per row), padded with zeros."""
        rows = whole.new_zeros(world, self.numel)
        for row, part in zip(rows, whole.chunk(world, self.source.fsdp_placement.dim), strict=False):
            row[: part.numel()] = part.reshape(-1)
        return rows

    def shard(self, part: Tensor, *, of_replica: bool = False) -> DTensor:
        """This rank's part as a DTensor sharded like the parameter, or with `of_replica` over this replica alone."""
        local = part[: self.held].reshape(self.source.sharded_size).clone()
        if not of_replica:
            return self.source.to_sharded_dtensor(local)  # type: ignore[no-any-return]
        mesh = self.source.mesh_info.mesh
        own = mesh[mesh.mesh_dim_names[-1]] if mesh.mesh_dim_names else mesh
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            local, own, [self.source.fsdp_placement], run_check=False, shape=self.shape, stride=stride
        )

    def part(self, shard: Tensor) -> Tensor:
        """The reverse of `shard`, padded; a whole plain tensor is cut first."""
        if not isinstance(shard, DTensor):
            mesh = self.source.mesh_info
            return self.rows(shard.view(self.shape), mesh.shard_mesh_size)[mesh.shard_mesh_rank]
        local = shard.to_local()
        padded = local.new_zeros(self.numel)
        padded[: local.numel()] = local.reshape(-1)
        return padded


class ParameterGroup:
    """A parameter group of FSDP2: parameters that are gathered together, and whose gradients are reduced together."""

    def __init__(self, group: Any, names: dict[int, str]) -> None:
        self._group = group
        self._names = names  # of modules, by id
        self._found: dict[tuple[int, ...], list[ShardedParameter]] = {}
        self.name = names.get(id(group.modules[0]), "") or "the root"  # of the first module in it
        self.device: torch.device = group.device  # that it communicates from
        info = group.mesh_info
        # The ranks with the other shards of this replica, and those with the same shard; None without such a group.
        self.shards = info.shard_process_group if isinstance(info, FSDPMeshInfo) else None
        self.replicas = info.replicate_process_group if isinstance(info, DDPMeshInfo) else None
        self.members = [group for group in (self.shards, self.replicas) if group is not None]
        self.ranks: dist.ProcessGroup | DeviceMesh = info.mesh if len(self.members) == 2 else self.members[0]

    @property
    def keeps_weights(self) -> bool:
        """Whether gathered parameters are kept from the forward to the backward pass."""
        return not getattr(self._group, "_reshard_after_forward", True)

    @property
    def in_backward(self) -> bool:
        """Whether parameters are being gathered for the backward pass, and a forward pass has had the same."""
        return bool(self._group._training_state == TrainingState.PRE_BACKWARD)

    def parameters(self, sources: Sequence[Any] | None = None) -> list[ShardedParameter]:
        """These parameters of torch's, or all of the group, in the order of the flat buffer."""
        given = self._group.fsdp_params if sources is None else sources
        key = tuple(map(id, given))
        if key not in self._found:
            self._found[key] = [
                ShardedParameter(
                    name=f"{self._names.get(id(at.module), '')}.{at.param_name}".removeprefix("."),
                    shape=source._orig_size,
                    numel=source.padded_sharded_param_size.numel(),
                    held=source.sharded_size.numel(),
                    in_tensor_parallel=source.is_dtensor,
                    source=source,
                )
                for source in given
                for at in [source._module_info]
            ]
        return self._found[key]

    @property
    def is_resharded(self) -> bool:
        """Whether the forward pass has left parameters in larger shards (reshard_after_forward=2)."""
        return any(source.sharded_state == ShardedState.SHARDED_POST_FORWARD for source in self._group.fsdp_params)

    def check(self, *, gathers: bool) -> None:
        """Raise unless gradients are reduced by torch's default and, if `gathers`, weights gathered by it."""
        for attribute, default in _DEFAULTS.items():
            present = getattr(self._group, attribute)
            if isinstance(present, CompressedComm):
                raise CollectiveError("this model is already compressed: close() the handle of compress_fsdp first")
            if type(present) is not default and (gathers or default is DefaultReduceScatter):
                raise CollectiveError(
                    f"{self.name} has a communication of its own, {type(present).__name__}: compress_fsdp replaces "
                    "only torch's default"
                )

    def install(self, scatter: "CompressedComm", gather: "CompressedComm") -> None:
        """Replace torch's defaults, which the new ones call for what is not compressed."""
        self._group._reduce_scatter_comm = scatter
        if type(self._group._all_gather_comm) is DefaultAllGather:
            self._group._all_gather_comm = gather

    def restore(self) -> None:
        """Return to plain FSDP2."""
        for attribute, default in _DEFAULTS.items():
            if isinstance(getattr(self._group, attribute), CompressedComm):
                setattr(self._group, attribute, default())


class CompressedComm(DefaultAllocMixin, AllGather, ReduceScatter):
    """Gathers a group's parameters or, with the argument `op`, reduces its gradients, by `run`.

    Where `run` returns False, torch's default does it. Just before gradients, `expect` gets all arguments by name.
    """

    def __init__(self, run: Callable[..., bool], expect: "Callable[[ReduceCall], None] | None" = None) -> None:
        self.expect = expect
        self._run = run
        self._plain: Any = DefaultReduceScatter() if expect else gather_exactly

    def __call__(  # type: ignore[override]
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False, **op: Any
    ) -> Any:
        if self._run(output_tensor, input_tensor, group, **op):
            return None
        return self._plain(output_tensor, input_tensor, group, async_op=async_op, **op)


@dataclass
class ReduceCall:
    """The arguments of one call of `foreach_reduce` that thinwire uses, by torch's names, or sets."""

    fsdp_params: list[Any]
    unsharded_grads: list[Tensor]  # this rank's, one for each of the parameters
    reduce_scatter_group: dist.ProcessGroup | None
    reduce_scatter_comm: Any
    reduce_dtype: torch.dtype | None
    gradient_divide_factor: float | None
    all_reduce_group: dist.ProcessGroup | None
    all_reduce_grads: bool
    partial_reduce_output: Tensor | None
    all_reduce_hook: Callable[[Tensor], None] | None
    force_sum_reduction_for_comms: bool

    @property
    def dtype(self) -> torch.dtype:
        """What is reduced in."""
        return self.reduce_dtype or self.unsharded_grads[0].dtype

    @property
    def sums_replicas(self) -> bool:
        """Whether torch sums over replicas, too."""
        return self.all_reduce_grads and self.all_reduce_group is not None

    def sum_replicas(self, average: Callable[[Tensor, dist.ProcessGroup], None]) -> None:
        """Replace torch's own sum over replicas by `average`.

        torch then knows the shards' group alone, and divides by its size. So replicas are averaged; if the user gave a
        divisor, which stands for all ranks, they are summed.
        """
        group, shards = self.all_reduce_group, self.reduce_scatter_group
        partial, then = self.partial_reduce_output, self.all_reduce_hook
        assert group is not None
        in_sums = self.force_sum_reduction_for_comms or self.dtype == torch.float16
        if in_sums and self.gradient_divide_factor is None and shards is not None and shards.size() > 1:
            self.gradient_divide_factor = float(group.size() * shards.size())  # torch divides in two steps
        summed = self.gradient_divide_factor is not None

        def hook(gradients: Tensor) -> None:
            if partial is not None:
                gradients += partial
            average(gradients, group)
            if summed:
                gradients.mul_(group.size())
            if gradients.is_cuda:  # torch may free them while this stream still uses them
                gradients.record_stream(torch.cuda.current_stream())
            if then is not None:
                then(gradients)

        self.all_reduce_group, self.partial_reduce_output, self.all_reduce_hook = None, None, hook


@functools.cache
def watch_reductions() -> None:
    """Wrap `foreach_reduce`, once per process."""
    module: Any = param_groups
    original = module.foreach_reduce
    signature = inspect.signature(original)
    used = [field.name for field in fields(ReduceCall)]
    missing = [name for name in used if name not in signature.parameters]
    if missing:
        raise CollectiveError(
            f"compress_fsdp knows FSDP2 as torch 2.11 to 2.15 have it; in torch {torch.__version__} foreach_reduce has "
            f"no {', '.join(missing)}: use one of those versions"
        )

    @functools.wraps(original)
    def foreach_reduce(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        comm = bound.arguments["reduce_scatter_comm"]
        if isinstance(comm, CompressedComm) and comm.expect is not None:
            comm.expect(call := ReduceCall(**{name: bound.arguments[name] for name in used}))
            bound.arguments.update(vars(call))
        return original(*bound.args, **bound.kwargs)

    module.foreach_reduce = foreach_reduce


def groups_of(model: nn.Module) -> list[ParameterGroup]:
    """The parameter groups of every module that fully_shard was called on, in the order of the modules."""
    names = {id(module): plain_name(name) for name, module in reversed(list(model.named_modules()))}
    found = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            if hasattr(state, "_fsdp_param_groups"):
                found += state._fsdp_param_groups
            elif state._fsdp_param_group is not None:  # torch 2.11 has at most one
                found.append(state._fsdp_param_group)
    unique = {id(group): group for group in found}  # several modules may share one
    return [ParameterGroup(group, names) for group in unique.values()]


def check_whole(model: nn.Module) -> None:
    """Raise if fully_shard has made parameter groups since compress_fsdp looked for them."""
    late = [g.name for g in groups_of(model) if not isinstance(g._group._reduce_scatter_comm, CompressedComm)]
    if late:
        raise CollectiveError(f"call compress_fsdp last: fully_shard was called on {', '.join(late)} after it")
