"""The cost model: what each algorithm takes in this group, measured once at a few sizes, and what `auto` makes of it.

[Note: Measured, not assumed] A time put together from link speed and kernel speed is wrong where it matters: messages
and kernels compete for the same cores and caches, and wake-ups cost more than either says. So the algorithms themselves
are timed, plain and compressed by turns, all ranks together, at sizes that rise until a call takes long enough; between
and beyond these sizes times are on straight lines. All ranks take the slowest rank's times, so they choose alike.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from thinwire.codecs import Codec
from thinwire.collectives import primitives
from thinwire.collectives.schedule import Channel

_GAIN = 0.9  # a compressed algorithm must be predicted below this share of plain
_ROUNDS = 7
_ENOUGH_S = 0.02  # sizes rise until a call takes as long
_SIZES = (1 << 8, 1 << 13, 1 << 16, 1 << 19, 1 << 22)  # elements

Points = tuple[tuple[int, float], ...]  # (size, seconds), both rising
Prepare = Callable[[int], Callable[[], object]]  # the call on a message of so many elements
Formula = Callable[[int, int], int]  # (bytes of a message, world) -> bytes that a rank sends


@dataclass(frozen=True)
class Link:
    """Messages between all ranks at once: bytes a rank sends, and the seconds until all has come."""

    points: Points

    @property
    def latency_s(self) -> float:
        """Seconds of the smallest message."""
        return self.points[0][1]

    @property
    def bytes_per_s(self) -> float:
        """Bytes a second in the largest message measured."""
        nbytes, seconds = self.points[-1]
        return nbytes / seconds


@dataclass(frozen=True)
class Estimate:
    """One algorithm's prediction."""

    algorithm: str
    seconds: float
    sent: int  # bytes a rank


@dataclass(frozen=True)
class Choice:
    """What `auto` chose for a call, and why: str() tells it."""

    verb: str
    codec: str
    numel: int
    world: int
    link: Link
    estimates: tuple[Estimate, ...]  # plain first

    @property
    def algorithm(self) -> str:
        """Plain, unless another is clearly faster."""
        plain = self.estimates[0]
        best = min(self.estimates[1:], key=lambda estimate: estimate.seconds, default=plain)
        return best.algorithm if best.seconds < _GAIN * plain.seconds else plain.algorithm

    def __str__(self) -> str:
        link = self.link
        lines = [
            f"{self.verb} of {self.numel} elements over {self.world} ranks, codec {self.codec}: {self.algorithm}",
            f"link: {8e-9 * link.bytes_per_s:.3g} Gbit/s a rank, {1e6 * link.latency_s:.0f} us a message (measured)",
        ]
        for estimate in self.estimates:
            chosen = "  <- chosen" if estimate.algorithm == self.algorithm else ""
            figures = f"{1e3 * estimate.seconds:9.3f} ms predicted, {estimate.sent} bytes sent a rank"
            lines.append(f"  {estimate.algorithm:<12} {figures}{chosen}")
        lines.append(f"a compressed algorithm is taken when it is predicted at least {1 - _GAIN:.0%} faster than plain")
        return "\n".join(lines)


def choose(
    channel: Channel, verb: str, numel: int, dtype: torch.dtype, codec: Codec, calls: Mapping[str, Prepare]
) -> Choice:
    """Predict the algorithms of `verb`, prepared by `calls`, for a message of `numel` elements in all.

    The first choice of a verb, codec and dtype in a group measures; every rank of the group must then call.
    """
    with channel.measuring:
        _link(channel)
        _curves(channel, verb, dtype, codec, calls)
    choice = recall(channel, verb, numel, dtype, codec)
    assert choice is not None
    return choice


def recall(channel: Channel, verb: str, numel: int, dtype: torch.dtype, codec: Codec) -> Choice | None:
    """What `choose` says, where it has measured already."""
    link, curves = channel.settled.get(Link), channel.settled.get(("curves", verb, dtype, codec))
    if link is None or curves is None:
        return None
    world, plain, wire = channel.transport.world, numel * dtype.itemsize, codec.wire_bytes(numel, dtype)
    estimates = tuple(
        Estimate(name, at(points, numel), SENT[verb, name](plain if name == "plain" else wire, world))
        for name, points in curves.items()
    )
    return Choice(verb, str(codec), numel, world, link, estimates)


def _share(nbytes: int, world: int) -> int:
    return nbytes * (world - 1) // world


def _all(nbytes: int, world: int) -> int:
    return nbytes


SENT: dict[tuple[str, str], Formula] = {
    ("all_reduce", "plain"): lambda nbytes, world: 2 * _share(nbytes, world),
    ("all_reduce", "two_phase"): lambda nbytes, world: 2 * _share(nbytes, world),
    ("all_reduce", "one_shot"): lambda nbytes, world: nbytes * (world - 1),
    **{(verb, "plain"): _share for verb in ("reduce_scatter", "all_gather", "all_to_all")},
    **{(verb, "compressed"): _share for verb in ("reduce_scatter", "all_gather", "all_to_all")},
    ("all_reduce", "hierarchical"): lambda nbytes, world: 2 * _share(nbytes, world),
    ("broadcast", "plain"): _all,
    ("broadcast", "compressed"): _all,
}


def at(points: Points, size: float) -> float:
    """Seconds at `size`: between points on the line through them, beyond on the line of the last two; never less."""
    if size <= points[0][0]:
        return points[0][1]
    if len(points) == 1:
        return points[0][1] * size / points[0][0]
    upper = next((i for i, point in enumerate(points) if point[0] >= size), len(points) - 1)
    (x0, y0), (x1, y1) = points[upper - 1], points[upper]
    return y0 + (size - x0) * max(0.0, y1 - y0) / (x1 - x0)


def _link(channel: Channel) -> None:
    """Messages themselves; measured once."""
    if Link not in channel.settled:
        calls = {"exchange": lambda size: _exchange(channel, size)}
        (points,) = _measure(channel, calls).values()
        others = channel.transport.world - 1
        channel.settled[Link] = Link(tuple((size * others, seconds) for size, seconds in points))


def _exchange(channel: Channel, size: int) -> Callable[[], object]:
    """Send `size` bytes to each other rank and take as many from each."""
    link = channel.transport
    tag = link.draw_tags(1)
    sent, came = (torch.zeros(link.world, size, dtype=torch.uint8, device=channel.device) for _ in range(2))
    others = [rank for rank in range(link.world) if rank != link.rank]

    def call() -> None:
        for work in link.exchange([(p, sent[p]) for p in others], [(p, came[p]) for p in others], tag):
            work.wait()

    return call


def _curves(channel: Channel, verb: str, dtype: torch.dtype, codec: Codec, calls: Mapping[str, Prepare]) -> None:
    """Seconds of every algorithm over elements; measured once a verb, codec and dtype."""
    key = ("curves", verb, dtype, codec)
    if key not in channel.settled:
        channel.settled[key] = _measure(channel, calls)


def _measure(channel: Channel, calls: Mapping[str, Prepare]) -> dict[str, Points]:
    """Time the calls by turns at rising sizes. As many rounds and sizes on every rank: both depend on agreed times."""
    points: dict[str, list[tuple[int, float]]] = {name: [] for name in calls}
    slowest = 0.0
    for size in _SIZES:
        ready = {name: prepare(size) for name, prepare in calls.items()}
        rounds = 2 if slowest > _ENOUGH_S / 8 else _ROUNDS
        for name, seconds in _timed(channel, ready, rounds).items():
            points[name].append((size, seconds))
        slowest = max(row[-1][1] for row in points.values())
        if slowest > _ENOUGH_S and size > _SIZES[0]:
            break
    return {name: _levelled(row) for name, row in points.items()}


def _levelled(row: Sequence[tuple[int, float]]) -> Points:
    """Noise only adds time, so a message takes no longer than a larger one did."""
    level, found = float("inf"), []
    for size, seconds in reversed(row):
        level = min(level, seconds)
        found.append((size, level))
    return tuple(reversed(found))


def _timed(channel: Channel, calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Lower quartiles of calls that all ranks start together, in the slowest rank."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            for link in channel.transports:
                primitives.barrier(link.group, channel.device)
            start = time.perf_counter()
            call()
            if isinstance(channel.transport, primitives.StreamTransport):
                torch.cuda.synchronize(channel.device)
            taken[name].append(time.perf_counter() - start)
    return _agreed(channel, {name: sorted(times[1:])[rounds // 4] for name, times in taken.items()})


def _agreed(channel: Channel, seconds: Mapping[str, float]) -> dict[str, float]:
    """The slowest rank's times, on every rank."""
    shared = torch.tensor(list(seconds.values()), dtype=torch.float64, device=channel.device)
    for link in channel.transports:
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=link.group)
    return dict(zip(seconds, shared.tolist(), strict=True))
