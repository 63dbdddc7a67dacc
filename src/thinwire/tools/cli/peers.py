"""What `thinwire doctor --peers` looks at: whether the ranks of a job see each other and agree, and how fast they are.

Ranks meet in a store at MASTER_ADDR:MASTER_PORT: torchrun's own where it started them, else one of rank 0. Each leaves
a card of itself there. Rank 0 judges them and tells the others; where nothing is wrong, all exchange messages. Nobody
waits without a limit: what a rank does not say in time is missing.
"""

import json
import os
import platform
import re
import socket
import time
from collections.abc import Mapping, Sequence
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

_GRACE_S = 5.0  # for what others have said already to be read
_POLL_S = 0.02
_MEASURE_S = 3.0  # of all exchanges together, about
_ROUNDS = 3
_SMALL = 1 << 16  # bytes of the first message, which decides on the size of the others
_LARGE = 1 << 25
_SAME = "Install the same everywhere"
# What ranks have to agree on: how it is called, and what to do where they do not.
_AGREED = {
    "world": ("WORLD_SIZE", "Start all ranks with the same number"),
    "thinwire": ("thinwire", _SAME),
    "torch": ("torch", _SAME),
    "python": ("python", _SAME),
    "wire": ("the wire format", "Install the same thinwire everywhere"),
    "backend": (
        "backend",
        "Either every rank has a GPU of its own or none uses one: set CUDA_VISIBLE_DEVICES= to hide them",
    ),
}

Card = Mapping[str, Any]  # what a rank says of itself; see own_card


@dataclass(frozen=True)
class Found:
    """What rank 0 knows in the end; whoever is missing has no card. Other ranks know the problems alone."""

    world: int
    cards: Mapping[int, Card]
    problems: list[str]
    received: list[dict[int, float]]  # by rank: bytes per second from each other rank


def examine(place: RankPlace, patience_s: float) -> Found:
    """Rates are measured only where nothing was found wrong before: a disagreement may leave ranks waiting."""
    meeting = Meeting(place, patience_s)  # to the end: others may still use its store
    cards, problems = meeting.hold(own_card(place))
    received: list[dict[int, float]] = []
    if not problems:
        try:
            received = exchange(place, patience_s)
        except ThinwireError as error:
            if place.rank:
                raise
            problems = [str(error)]
    return Found(place.world, cards, problems, received)


class Meeting:
    """The ranks' store, as one rank uses it."""

    def __init__(self, place: RankPlace, patience_s: float) -> None:
        self.place = place
        self.patience_s = patience_s
        self.address = os.environ["MASTER_ADDR"]
        port = os.environ["MASTER_PORT"]
        if not port.isdecimal():
            raise ThinwireError(f"MASTER_PORT must be a number such as 29500, got {port!r}")
        self.port = int(port)
        # torchrun's store has a server already; without it rank 0 has one.
        hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or place.rank > 0
        limit = timedelta(seconds=patience_s)
        try:
            joined = c10d.TCPStore(
                self.address, self.port, is_master=not hosted, timeout=limit, wait_for_workers=False, multi_tenant=True
            )
        except (RuntimeError, ValueError) as error:
            where = f"{self.address}:{self.port} (MASTER_ADDR, MASTER_PORT) within {self.patience_s:g} s"
            todo = "start rank 0 there, name an address of it that this machine reaches, and open the port"
            own = "; localhost is every machine's own: torchrun has --master-addr and --local-addr for that"
            own = own if self.address == "localhost" else ""
            raise ThinwireError(f"rank {self.place.rank} did not reach {where} ({_line(error)}): {todo}{own}") from None
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = c10d.PrefixStore(f"thinwire/doctor/{attempt}", joined)

    def hold(self, card: Card) -> tuple[dict[int, Card], list[str]]:
        """All cards, which rank 0 alone has, and what is wrong with them, which it tells the others."""
        self._put(f"card/{self.place.rank}", card)
        if self.place.rank:
            problems = self._answer()
            self._put(f"read/{self.place.rank}", True)
            return {}, problems
        cards = self._told("card", range(self.place.world), self.patience_s)
        problems = [*disagreements(cards), *unreachable(cards)]
        if absent := [rank for rank in range(self.place.world) if rank not in cards]:
            told = f"{_names(absent)} of {self.place.world} did not come within {self.patience_s:g} s"
            problems.insert(0, f"{told}: start every rank, and let each reach {self.address}:{self.port}")
        self._put("problems", problems)
        # The store may end with this process: it stays until those who came have heard it.
        self._told("read", [rank for rank in cards if rank], _GRACE_S)
        return cards, problems

    def _put(self, key: str, value: object) -> None:
        self._store.set(key, json.dumps(value))

    def _told(self, what: str, ranks: Sequence[int], patience_s: float) -> dict[int, Any]:
        """What these ranks say in time; the store's own wait would not say who is missing."""
        found: dict[int, Any] = {}
        deadline = time.monotonic() + patience_s
        while len(found) < len(ranks) and time.monotonic() < deadline:
            for rank in ranks:
                if rank not in found and self._store.check([f"{what}/{rank}"]):
                    found[rank] = json.loads(self._store.get(f"{what}/{rank}"))
            time.sleep(_POLL_S)
        return dict(sorted(found.items()))

    def _answer(self) -> list[str]:
        """The problems that rank 0 found, which may have waited for others first."""
        patience_s = self.patience_s + _GRACE_S
        try:
            self._store.wait(["problems"], timedelta(seconds=patience_s))
            problems: list[str] = json.loads(self._store.get("problems"))
        except RuntimeError as error:  # no answer in time, or the store went away
            told = f"rank {self.place.rank} heard nothing from rank 0 within {patience_s:g} s ({_line(error)})"
            raise ThinwireError(f"{told}: see whether rank 0 was started, and what it says") from None
        return problems


def own_card(place: RankPlace) -> Card:
    device = place.device
    backend = torchrun.BACKENDS[device.type]
    return {
        "host": socket.gethostname(),
        "interface": way_out(backend),
        "route": route(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "backend": backend,
        "world": place.world,
        "thinwire": thinwire.__version__,
        "torch": torch.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "wire": thinwire.wire.VERSION,
    }


# What ranks say, judged.


def disagreements(cards: Mapping[int, Card]) -> list[str]:
    """Another version may say less of itself."""
    told = []
    for name, (label, remedy) in _AGREED.items():
        sides: dict[object, list[int]] = {}
        for rank, card in cards.items():
            sides.setdefault(card.get(name, "?"), []).append(rank)
        if len(sides) > 1:
            named = "; ".join(f"{value} on {_names(ranks)}" for value, ranks in sides.items())
            told.append(f"{label} differs: {named}. {remedy}")
    return told


def unreachable(cards: Mapping[int, Card]) -> list[str]:
    """Ranks whose messages would stay on loopback although there are several machines."""
    if len({card["route"] for card in cards.values()}) == 1:
        return []
    return [
        f"rank {rank} on {card['host']} uses {card['interface']}, which no other machine reaches: set "
        f"{card['backend'].upper()}_SOCKET_IFNAME there to its interface towards the others"
        + (f", the one of {card['route']}" if not card["route"].startswith("127.") else "")
        for rank, card in cards.items()
        if card["interface"].startswith("127.") or card["interface"] == "lo"
    ]


# The exchange.


def exchange(place: RankPlace, patience_s: float) -> list[dict[int, float]]:
    """By rank: the bytes per second that come from each other rank. ThinwireError where that cannot be measured."""
    device = place.device
    try:
        with torchrun.job(device, timedelta(seconds=patience_s)):
            mine = _rates(device)
            found = [mine] * place.world
            dist.all_gather_object(found, mine)
            return found
    except Exception as error:  # whatever a transport throws is the finding
        todo = "see whether the machines' ports are open to each other, and whether the interface is the right one"
        raise ThinwireError(f"rank {place.rank} could not exchange: {_line(error)}; {todo}") from None


def _rates(device: torch.device) -> dict[int, float]:
    """Bytes per second by sender. All ranks send at once, each to the one `shift` ranks further on."""
    rank = dist.get_rank()
    world = dist.get_world_size()
    if world == 1:
        return {}
    first_s = torch.tensor(
        median(torchrun.exchange_s(_SMALL, device, rounds=_ROUNDS)), dtype=torch.float64, device=device
    )
    dist.all_reduce(first_s, dist.ReduceOp.MAX)
    share_s = _MEASURE_S / (world - 1) / (_ROUNDS + 1)
    size = min(max(_SMALL, int(_SMALL * share_s / float(first_s))), _LARGE)
    taken = {shift: torchrun.exchange_s(size, device, shift=shift, rounds=_ROUNDS) for shift in range(1, world)}
    return {(rank - shift) % world: size / median(times) for shift, times in taken.items()}


# Addresses.


def way_out(backend: str) -> str:
    """The interface that this rank's messages leave by where it is named, else their address.

    gloo takes the address of the host's name, and stays on this machine where that has none. NCCL chooses by itself, as
    a rule what leads to the others.
    """
    if named := os.environ.get(f"{backend.upper()}_SOCKET_IFNAME"):
        return named
    if backend == "nccl":
        return route()
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def route() -> str:
    """The address from which this machine would reach MASTER_ADDR; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            asked.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
            return str(asked.getsockname()[0])
    except OSError:
        return ""


def _names(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _line(error: Exception) -> str:
    """The first line, without the place in gloo's own source."""
    said = re.sub(r"\[/\S+:\d+\] ?", "", str(error)).strip().split("\n")[0]
    return said or type(error).__name__
