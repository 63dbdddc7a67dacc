"""What `thinwire doctor --peers` looks at: whether the ranks of a job see each other and agree, and how fast they are.

Ranks meet in a store at MASTER_ADDR:MASTER_PORT: torchrun's own where it started them, else one of rank 0. Each leaves
a description of itself there and compares all of them. Without problems all exchange messages. Every wait has a limit;
a rank that has not come by then is missing.
"""

import contextlib
import json
import os
import platform
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

import thinwire.wire
from thinwire.errors import ThinwireError
from thinwire.tools.local import torchrun
from thinwire.tools.local.torchrun import RankPlace

_GRACE_S = 5.0  # for reading what others have said already
_MESSAGE = 1 << 22  # bytes
_SAME = "Install the same everywhere"
# What ranks have to agree on: its name, and what to do where they do not.
_AGREED = {
    "world": ("WORLD_SIZE", "Start all ranks with the same number"),
    **{name: (name, _SAME) for name in ("thinwire", "torch", "python")},
    "wire": ("the wire format", "Install the same thinwire everywhere"),
    "backend": ("backend", "Give every rank a GPU of its own, or set CUDA_VISIBLE_DEVICES= to hide them all"),
}
Description = dict[str, Any]  # of a rank, by itself


@dataclass(frozen=True)
class Found:
    """The result; a missing rank has no description."""

    world: int
    ranks: Mapping[int, Description]
    problems: list[str]


def examine(place: RankPlace, patience_s: float) -> Found:
    """Compare the ranks; measure rates only if they agree, since a disagreement may leave ranks waiting."""
    store = meet(place, patience_s)  # kept to the end: others may still use it
    store.set(f"rank/{place.rank}", json.dumps(describe(place)))
    try:
        ranks = {rank: json.loads(said) for rank, said in _read(store, "rank", range(place.world), patience_s).items()}
        problems = [*_absent(ranks, place, patience_s), *disagreements(ranks), *unreachable(ranks)]
        store.set(f"read/{place.rank}", "")
        if place.rank == 0:  # the store may end with this process
            _read(store, "read", list(ranks), _GRACE_S)
    except RuntimeError as error:
        silent = f"rank {place.rank} lost rank 0's store ({_line(error)})"
        raise ThinwireError(f"{silent}: check whether rank 0 was started, and what it says") from None
    if not problems and place.world > 1:
        try:
            rates = exchange(place, patience_s)
        except ThinwireError as error:
            if place.rank:
                raise
            return Found(place.world, ranks, [str(error)])
        ranks = {rank: {**said, "gbit_per_s": rates[rank]} for rank, said in ranks.items()}
    return Found(place.world, ranks, problems)


def meet(place: RankPlace, patience_s: float) -> Any:
    """The ranks' store: torchrun's, where it has one; else rank 0 has a server."""
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if not port.isdecimal():
        raise ThinwireError(f"MASTER_PORT must be a number such as 29500, got {port!r}")
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or place.rank > 0
    how: dict[str, Any] = {"is_master": not hosted, "wait_for_workers": False, "multi_tenant": True}
    try:
        joined = c10d.TCPStore(address, int(port), timeout=timedelta(seconds=patience_s), **how)
    except (RuntimeError, ValueError) as error:
        own = "; localhost is every machine's own: torchrun has --master-addr and --local-addr for that"
        raise ThinwireError(
            f"rank {place.rank} did not reach {address}:{port} (MASTER_ADDR, MASTER_PORT) within {patience_s:g} s "
            f"({_line(error)}): start rank 0 there, name an address of it that this machine reaches, and open the "
            f"port{own if address == 'localhost' else ''}"
        ) from None
    return c10d.PrefixStore(f"thinwire/doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", joined)


def _read(store: Any, what: str, ranks: Sequence[int], patience_s: float) -> dict[int, bytes]:
    """What these ranks set in time."""
    with contextlib.suppress(dist.DistStoreError):  # it does not say who is missing
        store.wait([f"{what}/{rank}" for rank in ranks], timedelta(seconds=patience_s))
    return {rank: store.get(f"{what}/{rank}") for rank in ranks if store.check([f"{what}/{rank}"])}


def _absent(ranks: Mapping[int, Description], place: RankPlace, patience_s: float) -> Iterator[str]:
    if absent := [rank for rank in range(place.world) if rank not in ranks]:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        late = f"{_names(absent)} of {place.world} did not come within {patience_s:g} s"
        yield f"{late}: start every rank, and let each reach {where}"


def describe(place: RankPlace) -> Description:
    device = place.device
    backend = torchrun.BACKENDS[device.type]
    return {
        "host": socket.gethostname(),
        "interface": interface_of(backend),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "backend": backend,
        "world": place.world,
        "thinwire": thinwire.__version__,
        "torch": torch.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "wire": thinwire.wire.VERSION,
    }


def disagreements(ranks: Mapping[int, Description]) -> list[str]:
    """One sentence for each setting that differs; another version may not describe all of them."""
    found = []
    for key, (label, remedy) in _AGREED.items():
        sides: dict[object, list[int]] = {}
        for rank, said in ranks.items():
            sides.setdefault(said.get(key, "?"), []).append(rank)
        if len(sides) > 1:
            named = "; ".join(f"{value} on {_names(which)}" for value, which in sides.items())
            found.append(f"{label} differs: {named}. {remedy}")
    return found


def unreachable(ranks: Mapping[int, Description]) -> list[str]:
    """Ranks whose messages would stay on loopback although there are several machines."""
    if len({said["host"] for said in ranks.values()}) == 1:
        return []
    return [
        f"rank {rank} on {said['host']} uses {said['interface']}, which no other machine reaches: set "
        f"{said['backend'].upper()}_SOCKET_IFNAME there to its interface towards the others"
        for rank, said in ranks.items()
        if said["interface"].startswith("127.") or said["interface"] == "lo"
    ]


def exchange(place: RankPlace, patience_s: float) -> list[float]:
    """By rank: the Gbit/s that come from the rank before, while all send. ThinwireError where nothing comes."""
    try:
        with torchrun.job(place.device, timedelta(seconds=patience_s)):
            mine = 8e-9 * _MESSAGE / median(torchrun.exchange_s(_MESSAGE, place.device))
            found = [mine] * place.world
            dist.all_gather_object(found, mine)
            return found
    except Exception as error:  # whatever a transport throws is the finding
        todo = "see whether the machines' ports are open to each other, and whether the interface is the right one"
        raise ThinwireError(f"rank {place.rank} could not exchange: {_line(error)}; {todo}") from None


def interface_of(backend: str) -> str:
    """The interface this rank's messages leave by, or its address: gloo takes that of the hostname, or loopback."""
    if backend == "nccl":
        return os.environ.get("NCCL_SOCKET_IFNAME", "chosen by NCCL")
    try:
        return os.environ.get("GLOO_SOCKET_IFNAME") or socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def _names(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _line(error: Exception) -> str:
    """The first line, without the place in gloo's own source."""
    return re.sub(r"\[/\S+:\d+\] ?", "", str(error)).strip().split("\n")[0] or type(error).__name__
