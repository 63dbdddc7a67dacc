"""How `auto` decides: what each algorithm takes in a group, as measured there, at a few sizes.

[Note: Measured, not assumed] A time put together from link speed and kernel speed is wrong where it matters: messages
and kernels compete for the same cores and caches, and wake-ups cost more than either says. So the algorithms themselves
are timed, plain and compressed by turns, all ranks together, at sizes that rise up to the one asked for, or until a
call takes long enough. All ranks take the slowest rank's times, so they choose alike. Between two sizes times lie on a
straight line.
"""

import functools
import itertools
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from thinwire import log
from thinwire.codecs import Codec, Identity

if TYPE_CHECKING:
    from thinwire.collectives.channel import Channel

_GAIN = 0.9  # a compressed algorithm must be predicted to take less than this share of plain's time
_ROUNDS = 7
_ENOUGH_S = 0.02  # sizes rise until a call takes as long
_SIZES = (1 << 8, 1 << 13, 1 << 16, 1 << 19, 1 << 22)  # elements, or bytes of a message

Points = tuple[tuple[int, float], ...]  # (size, seconds), both rising
Curves = dict[str, Points]  # of every algorithm, over elements
Choose = Callable[[tuple[Codec, ...], Sequence[str]], str]  # the fastest of these algorithms with these codecs
Prepare = Callable[[int], Callable[[], object]]  # the call on a message of so many elements
Trial = Callable[..., object]  # a verb, called with tensors, a codec, an algorithm and a step
# Whether each of a trial's tensors holds all ranks' parts of the message, or one.
_WHOLE = {"all_gather": (True, False), "reduce_scatter": (False, True), "all_to_all": (True, True)}


class CurveKey(NamedTuple):
    verb: str
    dtype: torch.dtype
    codecs: tuple[Codec, ...]  # two of a hierarchy: inside a node, across nodes


@dataclass
class Measured:
    exchange: Points = ()  # of messages between all ranks at once: bytes to each other rank, seconds until all came
    curves: dict[CurveKey, Curves] = field(default_factory=dict)


@dataclass(frozen=True)
class Estimate:
    algorithm: str
    seconds: float
    sent: int  # bytes per rank


@dataclass(frozen=True)
class Choice:
    """What `auto` does with a call; str() explains why."""

    verb: str
    codec: str
    numel: int
    world: int
    exchange: Points  # as Measured has it
    estimates: tuple[Estimate, ...]  # plain first

    @property
    def algorithm(self) -> str:
        """Plain, unless another is clearly faster; "" where nothing was measured."""
        if not self.estimates:
            return ""
        plain = self.estimates[0]
        best = min(self.estimates[1:], key=lambda estimate: estimate.seconds, default=plain)
        return best.algorithm if best.seconds < _GAIN * plain.seconds else plain.algorithm

    def __str__(self) -> str:
        call = f"{self.verb} of {self.numel} elements over {self.world} ranks, codec {self.codec}"
        if not self.exchange and self.estimates:
            return f"{call}: plain (with one rank, no elements or no compression there is nothing to choose)"
        if not self.exchange:
            return (
                f"{call}: not measured yet\n"
                "algorithm='auto' measures this group at its first call of that kind; to measure now, call "
                f"thinwire.measure(tensor, group, codec={self.codec!r}) on all of its ranks"
            )
        nbytes, seconds = self.exchange[-1]
        rate = f"{8e-9 * nbytes * (self.world - 1) / seconds:.3g} Gbit/s per rank"
        latency = f"{1e6 * self.exchange[0][1]:.0f} us per message"
        lines = [f"{call}: {self.algorithm}", f"link: {rate}, {latency} (measured)"]
        for estimate in self.estimates:
            chosen = "  <- chosen" if estimate.algorithm == self.algorithm else ""
            figures = f"{1e3 * estimate.seconds:9.3f} ms predicted, {estimate.sent} bytes sent per rank"
            lines.append(f"  {estimate.algorithm:<12} {figures}{chosen}")
        lines.append(f"a compressed algorithm is taken when it is predicted at least {1 - _GAIN:.0%} faster than plain")
        return "\n".join(lines)


def choice(measured: Measured, key: CurveKey, numel: int, world: int) -> Choice:
    """What `auto` does with a message of `numel` elements in all, by the measurements there are."""
    codec = key.codecs[-1]
    if world == 1 or numel == 0 or (len(key.codecs) == 1 and isinstance(codec, Identity)):  # nothing to choose
        return Choice(key.verb, str(codec), numel, world, (), (Estimate("plain", 0.0, 0),))
    plain = numel * key.dtype.itemsize
    wire = codec.wire_bytes(numel, key.dtype)  # raises where the codec does not take the dtype, as the call would
    curves = measured.curves.get(key, {}) if measured.exchange else {}
    estimates = tuple(
        Estimate(name, at(points, numel), _sent(key.verb, name, plain if name == "plain" else wire, world))
        for name, points in curves.items()
    )
    return Choice(key.verb, str(codec), numel, world, measured.exchange if curves else (), estimates)


def at(points: Points, size: float) -> float:
    """Seconds at `size`: between points on the line through them, beyond on the line of the last two; never less."""
    if size <= points[0][0]:
        return points[0][1]
    if len(points) == 1:
        return points[0][1] * size / points[0][0]
    upper = next((i for i, point in enumerate(points) if point[0] >= size), len(points) - 1)
    (x0, y0), (x1, y1) = points[upper - 1], points[upper]
    return y0 + (size - x0) * max(0.0, y1 - y0) / (x1 - x0)


def _sent(verb: str, algorithm: str, nbytes: int, world: int) -> int:
    """Bytes that a rank sends of a message of `nbytes`."""
    if verb == "broadcast":
        return nbytes
    if algorithm == "one_shot":
        return nbytes * (world - 1)
    return (2 if verb == "all_reduce" else 1) * (nbytes * (world - 1) // world)


def fastest(channel: "Channel", verb: str, dtype: torch.dtype, numel: int, trial: Trial) -> Choose:
    """For a plan: the fastest algorithm for a message of `numel` elements, measured if it has not been yet."""

    def prepare(codecs: tuple[Codec, ...], algorithm: str, size: int) -> Callable[[], object]:
        part = -(-size // channel.world)
        numels = [part * (channel.world if whole else 1) for whole in _WHOLE.get(verb, (True,))]
        tensors = [torch.linspace(-1, 1, each, device=channel.device).to(dtype) for each in numels]
        codec = codecs[0] if len(codecs) == 1 else codecs
        return functools.partial(trial, *tensors, codec=codec, algorithm=algorithm, step=0)

    def choose(codecs: tuple[Codec, ...], names: Sequence[str]) -> str:
        key = CurveKey(verb, dtype, codecs)
        calls = {name: functools.partial(prepare, codecs, name) for name in names}
        with channel.measuring:
            measured = channel.measured
            if not measured.exchange and all(member.rank == 0 for member in channel.transports):
                log.announce("measuring the link of this group (about a second)")
            messages = {"exchange": functools.partial(_exchange, channel)}
            link = _extended(channel, {"exchange": measured.exchange}, numel * dtype.itemsize, messages)
            measured.exchange = link["exchange"]
            known = measured.curves.get(key, dict.fromkeys(calls, ()))
            measured.curves[key] = _extended(channel, known, numel, calls)
        return choice(measured, key, numel, channel.world).algorithm

    return choose


def _exchange(channel: "Channel", size: int) -> Callable[[], object]:
    """Send `size` bytes to each other rank and take as many from each."""
    link = channel.transport
    tag = link.draw_tags()
    sent, received = (torch.zeros(link.world, size, dtype=torch.uint8, device=channel.device) for _ in range(2))

    def call() -> None:
        link.exchange([(p, sent[p]) for p in link.others], [(p, received[p]) for p in link.others], tag).wait()

    return call


def _extended(channel: "Channel", curves: Curves, wanted: int, calls: Mapping[str, Prepare]) -> Curves:
    """Extend curves until `wanted` is at most twice a measured size, or calls take long enough.

    The calls are timed in turn at rising sizes. Agreed times decide alike on all ranks.
    """
    points = {name: list(row) for name, row in curves.items()}
    largest, slowest = max((row[-1] for row in points.values() if row), key=operator.itemgetter(1), default=(0, 0.0))
    sizes = [size for size in _SIZES if size <= wanted] or [_SIZES[0]]
    for size in (*sizes, min(wanted, _SIZES[-1])):
        if largest and (size <= largest or wanted <= 2 * largest or (slowest > _ENOUGH_S and largest > _SIZES[0])):
            continue
        ready = {name: prepare(size) for name, prepare in calls.items()}
        rounds = 2 if slowest > _ENOUGH_S / 8 else _ROUNDS
        for name, seconds in _timed(channel, ready, rounds).items():
            points[name].append((size, seconds))
        largest, slowest = size, max(row[-1][1] for row in points.values())
    return {name: _leveled(row) for name, row in points.items()}


def _leveled(row: Sequence[tuple[int, float]]) -> Points:
    """Noise only adds time, so a message counts as no slower than a larger one."""
    levels = list(itertools.accumulate((seconds for _, seconds in reversed(row)), min))
    return tuple((size, level) for (size, _), level in zip(row, reversed(levels), strict=True))


def _timed(channel: "Channel", calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Lower quartiles of calls that all ranks start together, on the slowest rank."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            for member in channel.transports:
                member.agree([0])
            start = time.perf_counter()
            call()
            if channel.stream is not None:  # waiting for a message does not make the host wait
                torch.cuda.current_stream(channel.device).synchronize()  # not those that the user's own work keeps busy
            taken[name].append(time.perf_counter() - start)
    quartiles = [sorted(times[1:])[rounds // 4] for times in taken.values()]
    slowest = [int(1e9 * seconds) for seconds in quartiles]
    for member in channel.transports:
        slowest = member.agree(slowest)
    return {name: 1e-9 * nanoseconds for name, nanoseconds in zip(calls, slowest, strict=True)}
