"""The private names of torch.distributed that the group uses: all of them are in this file.

torch lets the creator of a backend return a ProcessGroup of its own. torch 2.11 to 2.15 call the methods of a Python
subclass, from Python and from C++ (DDP's reducer, functional collectives); what it does not define runs on the backends
that are registered with it.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist

from thinwire.errors import CollectiveError

try:
    from torch._C._distributed_c10d import Backend, PrefixStore, ProcessGroupGloo

    Options = Backend.Options
    _world = dist.distributed_c10d._world
    _plugins: Mapping[str, Any] = dist.Backend._plugins
except (ImportError, AttributeError) as error:
    raise CollectiveError(
        f"the backend 'thinwire' needs torch.distributed as torch 2.11 to 2.15 have it; torch {torch.__version__} "
        f"lacks some names ({error}): use one of those, or thinwire's verbs on a gloo or nccl group"
    ) from error

PythonGroup: Any = dist.ProcessGroup  # the base of groups in Python, whose methods torch declares overloaded
# What older versions of torch call a method of a group.
OLDER = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}


def method(name: str) -> Any:
    """A method of plain groups, under the name that this version of torch has for it."""
    return getattr(dist.ProcessGroup, name, None) or getattr(dist.ProcessGroup, OLDER[name])


def plain_group(options: Any) -> dist.ProcessGroup:
    """A group of gloo on the CPU and, where there is one, NCCL on GPUs, which torch's list of groups does not have."""
    group = PythonGroup(options.store, options.group_rank, options.group_size)
    kinds = dist.ProcessGroup.BackendType
    cuda = torch.device("cuda")
    gloo = _made("gloo", options)
    group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    if torch.cuda.is_available():
        has_nccl = dist.is_nccl_available()
        backend = _made("nccl", options) if has_nccl else gloo
        group._register_backend(cuda, kinds.NCCL if has_nccl else kinds.GLOO, backend)
    group._set_default_backend(kinds.GLOO)
    group._set_group_name(options.group_id)  # in errors
    return cast(dist.ProcessGroup, group)


def _made(name: str, options: Any) -> Any:
    """torch's own backend of this name, as it makes one itself."""
    plugin = _plugins.get(name.upper())  # since torch 2.14
    store = PrefixStore(f"thinwire/{name}/", options.store)
    if plugin is not None:
        before, options.store = options.store, store
        try:
            return plugin.creator_fn(options, None)
        finally:
            options.store = before
    if name == "gloo":
        made: Any = ProcessGroupGloo(store, options.group_rank, options.group_size, timeout=options.timeout)
        made.options.global_ranks_in_group = options.global_ranks_in_group
        made.options.group_name = options.group_id
    else:
        how: Any = dist.ProcessGroupNCCL.Options()
        how._timeout = options.timeout
        how.global_ranks_in_group = options.global_ranks_in_group
        how.group_name = options.group_id
        made = dist.ProcessGroupNCCL(store, options.group_rank, options.group_size, how)
    made._set_sequence_number_for_group()
    return made


def adopt(group: Any, plain: Any) -> None:
    """Serve what `group` does not define by the backends of a plain one."""
    kinds = dist.ProcessGroup.BackendType
    for device in plain._device_types:
        backend = plain._get_backend(device)
        group._register_backend(device, kinds.GLOO if backend.name() == "gloo" else kinds.NCCL, backend)
    group._set_default_backend(kinds.GLOO)


def enter_ranks(group: dist.ProcessGroup, world_ranks: list[int]) -> None:
    """Let torch's functions know the ranks of a group that its list of groups does not have."""
    _world.pg_group_ranks[group] = {rank: group_rank for group_rank, rank in enumerate(world_ranks)}


def leave_ranks(group: dist.ProcessGroup) -> None:
    _world.pg_group_ranks.pop(group, None)
