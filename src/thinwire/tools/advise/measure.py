"""What the ranks of a running job measure before they are advised: their links, their kernels. Not pure, alone here.

All ranks call `links` and `kernels` together, as torchrun starts them; all get the figures of the slowest rank.
"""

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from thinwire.codecs import Codec
from thinwire.collectives import groups, measuring
from thinwire.collectives.channel import channel_of
from thinwire.collectives.groups import Group
from thinwire.errors import AdviceError, ThinwireError
from thinwire.tools.advise.links import TRANSPORTS, Cluster, LinkModel
from thinwire.tools.advise.machine import MESSAGE_S, CodecSpeed, Machine, recorded_calls

_NUMEL = {"cpu": 1 << 20, "cuda": 1 << 26}  # on a GPU enough that kernels take longer than their launch
_WIRES = 4
_ROUNDS = 5
_CALLS = 50
ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Place(NamedTuple):
    rank: int
    world: int
    local_rank: int
    per_node: int


def place() -> Place:
    world = _told("WORLD_SIZE", 1)
    rank = _told("RANK", 0, world - 1)
    per_node = _told("LOCAL_WORLD_SIZE", 1, world, default="1")
    return Place(rank, world, _told("LOCAL_RANK", 0, default="0"), per_node)


def _told(name: str, least: int, most: float = math.inf, default: str = "") -> int:
    text = os.environ.get(name, default)
    if not (text.isdecimal() and least <= int(text) <= most):
        allowed = f"{least} .. {most}" if most < math.inf else f"{least} or more"
        raise AdviceError(f"{name} must be a whole number, {allowed}, got {text!r}")
    return int(text)


@contextlib.contextmanager
def job(device: torch.device, timeout: timedelta | None = None) -> Iterator[None]:
    """The group of all ranks, made unless there is one; what was made ends with the block. timeout: torch's own."""
    made = not dist.is_initialized()
    if made:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        try:
            dist.init_process_group(TRANSPORTS[device.type], timeout=timeout)
        except (RuntimeError, ValueError) as error:
            raise ThinwireError(f"the ranks did not find each other ({error}); start them all with torchrun") from None
    try:
        yield
    finally:
        if made:
            dist.destroy_process_group()


def links(device: torch.device, per_node: int) -> Cluster:
    world = dist.get_world_size()
    transport = TRANSPORTS[device.type]
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
    across = LinkModel(per_node * rail.bytes_per_s, rail.latency_s)
    return Cluster(world, per_node, across, inside, transport)


def _link(group: Group, device: torch.device) -> LinkModel:
    """The link of the slowest rank, from messages that all ranks of the group send at once."""
    found = measuring.link(channel_of(group, device))
    # Between the two largest messages: that leaves out what each one costs, and buffers that swallow small ones.
    (n0, s0), (n1, s1) = found.points[-2:] if len(found.points) > 1 else ((0, 0.0), found.points[0])
    bytes_per_s = (n1 - n0) / (s1 - s0) if s1 > s0 else found.bytes_per_s
    rate, latency = _agreed([-bytes_per_s, found.latency_s], device)
    return LinkModel(-rate, latency)


def kernels(codecs: Sequence[Codec], device: torch.device, per_node: int) -> Machine:
    """What one rank has, while all run the kernels, so that what they share counts."""
    numel = _NUMEL[device.type]
    x = torch.linspace(-1, 1, numel, device=device)
    speeds = {str(codec): _speed(codec, x) for codec in codecs}
    copy_s = _timed({"copy": lambda: torch.empty_like(x).copy_(x)}, device)["copy"] / numel
    return Machine(
        device.type,
        f"measured by {dist.get_world_size()} ranks",
        copy_s,
        speeds,
        call_s=_call_s(codecs[0], device),
        message_s=MESSAGE_S[device.type],
        byte_s=0.0,  # what bytes cost the processor is in the link's time
        cores=max(1.0, (os.cpu_count() or 1) / per_node),
        nccl=recorded_calls(device.type),
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


def _call_s(codec: Codec, device: torch.device) -> float:
    """Of the host, for one kernel: many on next to nothing."""
    x = torch.zeros(16, device=device)
    wire = torch.empty(codec.wire_bytes(16), dtype=torch.uint8, device=device)

    def repeat() -> None:
        for _ in range(_CALLS):
            codec.encode(x, wire)

    return _timed({"calls": repeat}, device)["calls"] / _CALLS


def _timed(work: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Median seconds of calls that all ranks start together, on the slowest rank."""
    taken: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(_ROUNDS + 1):
        for name, call in work.items():
            groups.barrier(groups.resolve(None), device)
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
