"""The links of the ranks that torchrun started, as they measure them. All ranks call together, and agree."""

from statistics import median

import torch
import torch.distributed as dist

from thinwire.tools.advise.cluster import Cluster, LinkModel
from thinwire.tools.local import torchrun

_SIZES = (1 << 10, 1 << 20, 1 << 22)  # bytes: a latency, and a rate between the two larger ones


def links(device: torch.device, per_node: int) -> Cluster:
    """Of the slowest rank."""
    world = dist.get_world_size()
    transport = torchrun.BACKENDS[device.type]
    if world == 1:
        return Cluster(1, transport=transport)
    if not 1 < per_node < world:
        link = _link(None, device)
        return Cluster(world, per_node, link if per_node == 1 else None, link if per_node > 1 else None, transport)
    from torch.distributed.device_mesh import init_device_mesh  # slow to import, and only needed here

    mesh = init_device_mesh(device.type, (world // per_node, per_node))
    inside = _link(mesh.get_group(1), device)
    rail = _link(mesh.get_group(0), device)
    # All ranks of a node were measured at once: each had its share of the node's link.
    return Cluster(world, per_node, LinkModel(per_node * rail.bytes_per_s, rail.latency_s), inside, transport)


def _link(group: dist.ProcessGroup | None, device: torch.device) -> LinkModel:
    """From messages that all ranks of the group send at once."""
    latency, short, long = (median(torchrun.exchange_s(size, device, group=group)) for size in _SIZES)
    rate = (_SIZES[2] - _SIZES[1]) / (long - short) if long > short else _SIZES[2] / long
    slowest = torch.tensor([-rate, latency], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return LinkModel(-float(slowest[0]), float(slowest[1]))
