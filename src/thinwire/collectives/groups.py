"""Groups of ranks: which one is meant, which backend serves it, how long its ranks wait for each other."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from thinwire.errors import CollectiveError

Group = dist.ProcessGroup | DeviceMesh | None  # None is the world
# torch 2.13 warns on the older names.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# The same verbs of a group itself, without the checks of torch's Python side.
_GROUP: Any = dist.ProcessGroup
group_all_gather: Any = getattr(_GROUP, "all_gather_single", None) or _GROUP._allgather_base
group_reduce_scatter: Any = getattr(_GROUP, "reduce_scatter_single", None) or _GROUP._reduce_scatter_base
group_all_to_all: Any = getattr(_GROUP, "all_to_all_single", None) or _GROUP.alltoall_base


def inner(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the plain group inside one that compresses by itself (thinwire.group); any other group as it is.

    While Dynamo traces, which cannot look inside a group, every group is returned as it is.
    """
    if type(group) is dist.ProcessGroup or torch.compiler.is_compiling():
        return group
    found: dist.ProcessGroup = getattr(group, "inner", group)
    return found


def resolve(group: object) -> dist.ProcessGroup:
    """The process group meant by None (the world), a ProcessGroup or a DeviceMesh of one dimension; see `inner`."""
    if group is None:
        if not dist.is_initialized():
            raise CollectiveError("there is no process group yet: call torch.distributed.init_process_group first")
        world = dist.group.WORLD
        assert world is not None
        return inner(world)
    if isinstance(group, dist.ProcessGroup):
        return inner(group)
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise CollectiveError(
                f"expected a DeviceMesh of one dimension, got {group.ndim}: "
                "slice it (mesh['dp']), or all_reduce with algorithm='hierarchical' on a mesh of two"
            )
        return inner(group.get_group())
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise CollectiveError("this rank is not a member of the group; only its members may call")
    raise CollectiveError(f"expected a ProcessGroup, a DeviceMesh or None, got {group!r}")


def rank_in(group: dist.ProcessGroup, what: str, rank: int | None, group_rank: int | None) -> int | None:
    """The rank in the group of a rank that was named by its rank in the world or in the group; None if by neither."""
    if rank is not None and group_rank is not None:
        raise CollectiveError(f"{what}: expected one rank, got {rank} in the world and {group_rank} in the group")
    found = group_rank if rank is None else dist.get_group_rank(group, rank)
    if found is not None and not 0 <= found < group.size():  # torch accepts any number in the world
        raise CollectiveError(f"{what}: the rank in the group must be 0..{group.size() - 1}, got {found}")
    return found


def mesh_of_nodes(group: Group) -> DeviceMesh | None:
    """`group` itself if it is a mesh of two dimensions: nodes, and the ranks inside each."""
    # torch.compile cannot trace isinstance(ProcessGroup, DeviceMesh), so groups are ruled out first.
    if group is None or isinstance(group, dist.ProcessGroup) or not isinstance(group, DeviceMesh):
        return None
    return group if group.ndim == 2 else None


# What torch 2.11 to 2.15 call the backends that they build on NCCL.
_NCCL_NAMES = frozenset({"nccl", "nccl-legacy", "nccl2", "nccl-lazy"})


def backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """Which backend serves tensors on `device`: "gloo", "nccl" for every kind of NCCL group, or torch's name for it."""
    try:
        name: str = backend_impl(group, device).name()
    except RuntimeError:
        raise CollectiveError(
            f"this group has no backend for {device.type} tensors; initialize it with one, e.g. backend='gloo'"
        ) from None
    return "nccl" if name in _NCCL_NAMES else name


def on_nccl(group: dist.ProcessGroup) -> bool:
    """Whether NCCL serves any of the group's devices."""
    return any(backend(group, device) == "nccl" for device in group._device_types)


def backend_impl(group: dist.ProcessGroup, device: torch.device) -> Any:
    """torch's object behind `group` for tensors on `device`; raises RuntimeError where there is none."""
    public = getattr(dist, "get_backend_impl", None)  # since torch 2.14
    return group._get_backend(device) if public is None else public(group, device)


def named(elsewhere: Mapping[int, int], *ranks: int) -> str:
    """Ranks of a group as errors name them: with their ranks in the world, where those are others (`elsewhere`)."""
    plural = "s" if len(ranks) > 1 else ""
    local, world = (", ".join(map(str, each)) for each in (ranks, [elsewhere.get(rank, rank) for rank in ranks]))
    return f"rank{plural} {local}{'' if local == world else f' of the group (global rank{plural} {world})'}"


def timeout_s(group: dist.ProcessGroup) -> float:
    """How long the ranks of a group wait for each other: the shortest timeout of its backends, as it is now."""
    found = [getattr(backend_impl(group, device), "options", None) for device in group._device_types]
    limits = [options._timeout.total_seconds() for options in found if options is not None]
    return min(limits, default=dist.default_pg_timeout.total_seconds())
