"""What `thinwire doctor --peers` looks at: whether the ranks of a job see each other and agree, and how fast they are.

Ranks meet in a store at MASTER_ADDR:MASTER_PORT: torchrun's own where it started them, else one of rank 0. Each leaves
a card of itself there, then what it measured. Rank 0 reads all of it, judges, and tells the others. Nobody waits
without a limit: what a rank does not say in time is missing.
"""

import json
import os
import platform
import re
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

import thinwire.wire
from thinwire.collectives import transport as transports
from thinwire.errors import ThinwireError
from thinwire.tools.advise import measure
from thinwire.tools.advise.links import TRANSPORTS
from thinwire.tools.advise.measure import Place
from thinwire.tools.cli import addresses

_GRACE_S = 5.0  # for what others have said already to be read
_POLL_S = 0.02
_MEASURE_S = 3.0  # of all exchanges together, about
_ROUNDS = 3
_SMALL = 1 << 16  # bytes of the first message, which decides on the size of the others
_LARGE = 1 << 25
_AGREED = ("world", "thinwire", "torch", "python", "wire", "backend")


@dataclass(frozen=True)
class Card:
    """What a rank says of itself."""

    host: str
    interface: str  # its messages leave by, as far as that can be told; "" where it cannot
    address: str
    route: str  # the address from which it reaches MASTER_ADDR, and the interface that has it
    route_interface: str
    device: str
    backend: str
    world: int
    thinwire: str
    torch: str
    python: str
    wire: int  # version of the wire format


@dataclass(frozen=True)
class Exchanged:
    """What a rank measured: bytes per second that came from each other rank, or why there are none."""

    received: dict[int, float] = field(default_factory=dict)
    problem: str = ""
    stuck: bool = False  # a thread of this process still waits


@dataclass(frozen=True)
class Found:
    """What rank 0 knows in the end; whoever is missing has no card."""

    world: int
    cards: dict[int, Card]
    exchanged: dict[int, Exchanged]
    problems: list[str]


class Meeting:
    """The ranks' store, as one rank uses it."""

    def __init__(self, place: Place, patience_s: float) -> None:
        self.place = place
        self.patience_s = patience_s
        self.address = os.environ["MASTER_ADDR"]
        port = os.environ["MASTER_PORT"]
        if not port.isdecimal():
            raise ThinwireError(f"MASTER_PORT must be a number such as 29500, got {port!r}")
        self.port = int(port)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = c10d.PrefixStore(f"thinwire/doctor/{attempt}", self._joined())
        self.exchanged = Exchanged()

    def examine(self) -> Found | None:
        """On rank 0 what was found; it has to call `close` then. None on other ranks, which call `verdict`.

        Rates are measured only where nothing was found wrong before: a disagreement may leave ranks waiting.
        """
        self._put(f"card/{self.place.rank}", asdict(own_card(self.place)))
        if self.place.rank:
            self._wait_for("card/0", self.patience_s)
            if self._wait_for("go", self.patience_s + _GRACE_S):
                self._exchange()
            return None
        cards = {rank: _card(told) for rank, told in self._all("card", self.patience_s).items()}
        problems = [*self._absent(cards), *disagreements(cards), *unreachable(cards)]
        self._put("go", not problems)
        if problems:
            return Found(self.place.world, cards, {}, problems)
        self._exchange()
        told = self._all("exchanged", self.patience_s + _GRACE_S)
        exchanged = {rank: _exchanged(part) for rank, part in told.items()}
        return Found(self.place.world, cards, exchanged, _failures(cards, exchanged))

    def verdict(self) -> bool:
        """On ranks other than 0: whether all is well, once rank 0 has said so."""
        works = bool(self._wait_for("works", self.patience_s + 3 * _GRACE_S))
        self._put(f"read/{self.place.rank}", True)
        return works

    def close(self, found: Found) -> None:
        """On rank 0: tell the others, and stay until they have heard it, since the store may end with this process."""
        self._put("works", not found.problems)
        self._all("read", _GRACE_S, [rank for rank in found.cards if rank])

    def _joined(self) -> c10d.Store:
        """torchrun's store has a server already; without it rank 0 has one."""
        hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or self.place.rank > 0
        where = f"{self.address}:{self.port} (MASTER_ADDR, MASTER_PORT)"
        if hosted:
            self._reach(where)
        limit = timedelta(seconds=self.patience_s)
        try:
            return c10d.TCPStore(
                self.address, self.port, is_master=not hosted, timeout=limit, wait_for_workers=False, multi_tenant=True
            )
        except (RuntimeError, ValueError) as error:
            todo = "name the machine of rank 0 and a free port of it"
            raise ThinwireError(f"rank {self.place.rank} found no store at {where}: {_line(error)}; {todo}") from None

    def _reach(self, where: str) -> None:
        """Wait until somebody listens there; what stands in the way is said better here than by the store."""
        deadline = time.monotonic() + self.patience_s
        while True:
            try:
                left = max(0.1, deadline - time.monotonic())
                socket.create_connection((self.address, self.port), timeout=left).close()
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    told = f"rank {self.place.rank} did not reach {where} within {self.patience_s:g} s ({error})"
                    todo = "start rank 0 there, name an address of it that this machine reaches, and open the port"
                    own = "; localhost is every machine's own: torchrun has --master-addr and --local-addr for that"
                    raise ThinwireError(f"{told}: {todo}{own if self.address == 'localhost' else ''}") from None
            time.sleep(_POLL_S)

    def _put(self, key: str, value: object) -> None:
        self._store.set(key, json.dumps(value))

    def _all(self, key: str, patience_s: float, ranks: Iterable[int] | None = None) -> dict[int, Any]:
        """What these ranks (all, by default) put there in time; the store's own wait would not say who is missing."""
        waited = list(range(self.place.world) if ranks is None else ranks)
        found: dict[int, Any] = {}
        deadline = time.monotonic() + patience_s
        while len(found) < len(waited):
            for rank in waited:
                if rank not in found and self._store.check([f"{key}/{rank}"]):
                    found[rank] = json.loads(self._store.get(f"{key}/{rank}"))
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        return dict(sorted(found.items()))

    def _wait_for(self, key: str, patience_s: float) -> Any:
        """What rank 0 put there."""
        deadline = time.monotonic() + patience_s
        try:
            while time.monotonic() < deadline:
                if self._store.check([key]):
                    return json.loads(self._store.get(key))
                time.sleep(_POLL_S)
        except RuntimeError as error:  # the store went away
            raise ThinwireError(f"rank {self.place.rank} lost rank 0: {_line(error)}; see what rank 0 says") from None
        told = f"rank {self.place.rank} heard nothing from rank 0 for {patience_s:g} s"
        raise ThinwireError(f"{told}: see whether rank 0 was started, and what it says")

    def _absent(self, cards: Mapping[int, Card]) -> list[str]:
        absent = [rank for rank in range(self.place.world) if rank not in cards]
        if not absent:
            return []
        told = f"{_names(absent)} of {self.place.world} did not come within {self.patience_s:g} s"
        return [f"{told}: start every rank, and let each reach {self.address}:{self.port}"]

    def _exchange(self) -> None:
        self.exchanged = exchange(self.place, self.patience_s)
        self._put(f"exchanged/{self.place.rank}", asdict(self.exchanged))


def own_card(place: Place) -> Card:
    device = own_device(place)
    backend = TRANSPORTS[device.type]
    interface, address = addresses.way_out(backend)
    return Card(
        host=socket.gethostname(),
        interface=interface,
        address=address,
        route=addresses.route(),
        route_interface=addresses.interface_of(addresses.route()),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        backend=backend,
        world=place.world,
        thinwire=thinwire.__version__,
        torch=torch.__version__,
        python=".".join(platform.python_version_tuple()[:2]),
        wire=thinwire.wire.VERSION,
    )


def own_device(place: Place) -> torch.device:
    """A GPU where every rank of this machine has one of its own."""
    has_gpu = torch.cuda.device_count() >= max(place.per_node, place.local_rank + 1)
    return torch.device("cuda", place.local_rank) if has_gpu else torch.device("cpu")


# What ranks say, judged.


def disagreements(cards: Mapping[int, Card]) -> list[str]:
    told = []
    for name in _AGREED:
        sides: dict[object, list[int]] = {}
        for rank, card in cards.items():
            sides.setdefault(getattr(card, name), []).append(rank)
        if len(sides) > 1:
            named = "; ".join(f"{value} on {_names(ranks)}" for value, ranks in sides.items())
            told.append(f"{_LABELS[name]} differs: {named}. {_REMEDIES.get(name, 'Install the same everywhere')}")
    return told


_LABELS = {name: name for name in _AGREED} | {"world": "WORLD_SIZE", "wire": "the wire format"}
_REMEDIES = {
    "world": "Start all ranks with the same number",
    "wire": "Install the same thinwire everywhere",
    "backend": "Either every rank has a GPU of its own or none uses one: set CUDA_VISIBLE_DEVICES= to hide them",
}


def unreachable(cards: Mapping[int, Card]) -> list[str]:
    """Ranks whose messages would stay on loopback although there are several machines."""
    if len({card.route for card in cards.values()}) == 1:
        return []
    return [
        f"rank {rank} on {card.host} uses {card.address}, which no other machine reaches: set "
        f"{card.backend.upper()}_SOCKET_IFNAME there to its interface towards the others{_towards(card)}"
        for rank, card in cards.items()
        if card.address.startswith("127.")
    ]


def _towards(card: Card) -> str:
    return f", {card.route_interface}" if card.route_interface and not card.route.startswith("127.") else ""


def _failures(cards: Mapping[int, Card], exchanged: Mapping[int, Exchanged]) -> list[str]:
    silent = [rank for rank in cards if rank not in exchanged]
    told = [f"{_names(silent)} came, and then fell silent: see what was printed there"] if silent else []
    todo = "see whether the machines' ports are open to each other, and whether the interface is the right one"
    return told + [
        f"rank {rank} could not exchange: {part.problem}; {todo}" for rank, part in exchanged.items() if part.problem
    ]


def _card(told: Mapping[str, Any]) -> Card:
    """Another version may say more or less of itself."""
    return Card(*(told.get(part.name, "?") for part in fields(Card)))


def _exchanged(told: Mapping[str, Any]) -> Exchanged:
    """From JSON, whose keys are texts."""
    received = {int(rank): rate for rank, rate in told["received"].items()}
    return Exchanged(received, told["problem"], told["stuck"])


# The exchange.


def exchange(place: Place, patience_s: float) -> Exchanged:
    """What every other rank sends to this one, and at what rate; a thread of its own is given up after `patience_s`."""
    found = [Exchanged(problem=f"no end within {patience_s:g} s", stuck=True)]

    def work() -> None:
        try:
            device = own_device(place)
            with measure.job(device, timedelta(seconds=0.9 * patience_s)):
                found[0] = Exchanged(_rates(device))
        except Exception as error:  # whatever a transport throws is the finding
            found[0] = Exchanged(problem=_line(error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(patience_s)
    return found[0]


def _rates(device: torch.device) -> dict[int, float]:
    """Bytes per second by sender. All ranks send at once, each to the one `shift` ranks further on."""
    rank = dist.get_rank()
    world = dist.get_world_size()
    if world == 1:
        return {}
    first_s = torch.tensor(_exchange_s(1, _SMALL, device), dtype=torch.float64, device=device)
    dist.all_reduce(first_s, dist.ReduceOp.MAX)
    share_s = _MEASURE_S / (world - 1) / (_ROUNDS + 1)
    size = min(max(_SMALL, int(_SMALL * share_s / float(first_s))), _LARGE)
    return {(rank - shift) % world: size / _exchange_s(shift, size, device) for shift in range(1, world)}


def _exchange_s(shift: int, size: int, device: torch.device) -> float:
    """Seconds until what the rank `shift` before this one sends is here."""
    rank = dist.get_rank()
    world = dist.get_world_size()
    sent = torch.zeros(size, dtype=torch.uint8, device=device)
    came = torch.empty_like(sent)
    taken = []
    for _ in range(_ROUNDS + 1):
        transports.barrier(transports.resolve(None), device)
        start = time.perf_counter()
        receive = dist.P2POp(dist.irecv, came, (rank - shift) % world)
        send = dist.P2POp(dist.isend, sent, (rank + shift) % world)
        first, *others = dist.batch_isend_irecv([receive, send])
        first.wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
        for work in others:
            work.wait()
    return median(taken[1:])


def _names(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _line(error: Exception) -> str:
    """The first line, without the place in gloo's own source."""
    said = re.sub(r"\[/\S+:\d+\] ?", "", str(error)).strip().split("\n")[0]
    return said or type(error).__name__
