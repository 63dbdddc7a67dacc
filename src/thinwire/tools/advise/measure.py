"""What the ranks of a running job measure before they are advised: their links, their kernels. Not pure, alone here.

All ranks call `links` and `kernels` together, as torchrun starts them; all get the figures of the slowest rank.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median

import torch
import torch.distributed as dist

from thinwire.codecs import Codec
from thinwire.tools.advise import cluster as clusters
from thinwire.tools.advise.cluster import Cluster, CodecSpeed, LinkModel, Machine
from thinwire.tools.local import torchrun

_NUMEL = {"cpu": 1 << 20, "cuda": 1 << 26}  # on a GPU enough that kernels take longer than their launch
_SIZES = (1 << 10, 1 << 20, 1 << 22)  # bytes: a latency, and a rate between the two larger ones
_WIRES = 4
_ROUNDS = 5


def links(device: torch.device, per_node: int) -> Cluster:
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
    """The link of the slowest rank, from messages that all ranks of the group send at once."""
    latency, short, long = (median(torchrun.exchange_s(size, device, group=group)) for size in _SIZES)
    rate = (_SIZES[2] - _SIZES[1]) / (long - short) if long > short else _SIZES[2] / long
    slowest, latest = _agreed([-rate, latency], device)
    return LinkModel(-slowest, latest)


def kernels(codecs: Sequence[Codec], device: torch.device, per_node: int) -> Machine:
    """What one rank has, while all run the kernels, so that what they share counts."""
    x = torch.linspace(-1, 1, _NUMEL[device.type], device=device)
    speeds = {str(codec): _speed(codec, x) for codec in codecs}
    copy_s = _timed({"copy": lambda: torch.empty_like(x).copy_(x)}, device)["copy"] / x.numel()
    return replace(
        clusters.recorded(device.type),
        source=f"measured by {dist.get_world_size()} ranks",
        copy_s=copy_s,
        codecs=speeds,
        byte_s=0.0,  # what bytes cost the processor is in the link's time
        cores=max(1.0, (os.cpu_count() or 1) / per_node),
    )


def _speed(codec: Codec, x: torch.Tensor) -> CodecSpeed:
    numel = x.numel()
    wire = torch.empty(codec.wire_bytes(numel), dtype=torch.uint8, device=x.device)
    codec.encode(x, wire)
    wires_WN = wire.repeat(_WIRES, 1)
    out = torch.empty_like(x)
    again = torch.empty_like(wire)
    taken = _timed(
        {
            "encode": lambda: codec.encode(x, wire),
            "decode": lambda: codec.decode(wire, out, step=0),
            "decode_sum": lambda: codec.decode_sum(wires_WN, out, step=0),
            "recode": lambda: codec.recode(wires_WN, again, numel, trusted=True),
        },
        x.device,
    )
    return CodecSpeed.of_ops(_WIRES, *(seconds / numel for seconds in taken.values()))


def _timed(work: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Median seconds of calls that all ranks start together, on the slowest rank."""
    taken: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(_ROUNDS + 1):
        for name, call in work.items():
            dist.barrier()
            start = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            taken[name].append(time.perf_counter() - start)
    return dict(zip(work, _agreed([median(times[1:]) for times in taken.values()], device), strict=True))


def _agreed(values: Sequence[float], device: torch.device) -> list[float]:
    """The largest over ranks, on every rank."""
    shared = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    found: list[float] = shared.tolist()
    return found
