"""The cost model: a link measured once a group, the codec's own speed, and what follows for each algorithm.

Times add up as if nothing overlapped, so a compressed algorithm is chosen only where it wins without that help.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.collectives.primitives import StreamTransport, Transport
from thinwire.collectives.schedule import Channel, Operation, Steps
from thinwire.collectives.steps import TAGS

_GAIN = 0.9  # a compressed algorithm must be predicted below this share of plain
_ROUNDS = 5
_ENOUGH_S = 0.02  # sizes grow until a message takes as long
_SIZES = (1 << 8, 1 << 13, 1 << 16, 1 << 19, 1 << 22)
_SAMPLES = (1 << 10, 1 << 17)  # elements on which a codec is timed

Points = tuple[tuple[int, float], ...]  # (bytes, seconds), both rising


@dataclass(frozen=True)
class Link:
    """What was measured in one group."""

    line_s: float  # from the call to the line and back
    exchange: Points  # bytes a rank sends to the others together, and the seconds until all has come
    all_reduce: Points  # bytes of a tensor, and the seconds of torch's own all_reduce

    @property
    def latency_s(self) -> float:
        """Seconds of the smallest message."""
        return self.exchange[0][1]

    @property
    def bytes_per_s(self) -> float:
        """Bytes a second in the largest message measured."""
        nbytes, seconds = self.exchange[-1]
        return nbytes / seconds


@dataclass(frozen=True)
class Speed:
    """What a codec costs in one rank: seconds a call and seconds an element."""

    encode: tuple[float, float]
    decode: tuple[float, float]  # of one wire
    add: tuple[float, float]  # decode_sum of W wires
    recode: tuple[float, float]  # of W wires


@dataclass(frozen=True)
class Estimate:
    """One algorithm's prediction."""

    algorithm: str
    seconds: float
    sent: int  # bytes a rank


@dataclass(frozen=True)
class Choice:
    """What `auto` chose for a call, and why."""

    verb: str
    codec: str
    numel: int
    world: int
    link: Link
    estimates: tuple[Estimate, ...]

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
            time_and_bytes = f"{1e3 * estimate.seconds:9.3f} ms predicted, {estimate.sent} bytes sent a rank"
            lines.append(f"  {estimate.algorithm:<12} {time_and_bytes}{chosen}")
        lines.append(f"a compressed algorithm is taken when it is predicted at least {1 - _GAIN:.0%} faster than plain")
        return "\n".join(lines)


def choose(channel: Channel, verb: str, numel: int, dtype: torch.dtype, codec: Codec) -> Choice:
    """Predict every algorithm of `verb` for a message of `numel` elements in all. All ranks get the same answer."""
    with channel.lock:
        link, speed = _link(channel), _speed(channel, codec, dtype)
    world = channel.transport.world
    plain = _plain(verb, link, numel * dtype.itemsize, world)
    predicted = _ESTIMATES[verb](link, speed, codec.wire_bytes(numel, dtype), numel, world)
    compressed = [Estimate(e.algorithm, link.line_s + e.seconds, e.sent) for e in predicted]
    return Choice(verb, str(codec), numel, world, link, (plain, *compressed))


def _plain(verb: str, link: Link, nbytes: int, world: int) -> Estimate:
    if verb == "all_reduce":
        return Estimate("plain", _at(link.all_reduce, nbytes), 2 * nbytes * (world - 1) // world)
    sent = nbytes if verb == "broadcast" else nbytes * (world - 1) // world
    return Estimate("plain", _at(link.exchange, sent), sent)


def _all_reduce(link: Link, speed: Speed, wire: int, numel: int, world: int) -> list[Estimate]:
    shot = (world - 1) * wire
    one_shot = _at(link.exchange, shot) + _cost(speed.encode, numel) + _cost(speed.add, numel)
    phase = wire * (world - 1) // world
    shard = numel / world
    codec = world * (_cost(speed.encode, shard) + _cost(speed.decode, shard)) + _cost(speed.recode, shard)
    two_phase = 2 * _at(link.exchange, phase) + codec
    return [Estimate("one_shot", one_shot, shot), Estimate("two_phase", two_phase, 2 * phase)]


def _reduce_scatter(link: Link, speed: Speed, wire: int, numel: int, world: int) -> list[Estimate]:
    sent = wire * (world - 1) // world
    codec = world * _cost(speed.encode, numel / world) + _cost(speed.add, numel / world)
    return [Estimate("compressed", _at(link.exchange, sent) + codec, sent)]


def _all_gather(link: Link, speed: Speed, wire: int, numel: int, world: int) -> list[Estimate]:
    sent = wire * (world - 1) // world
    codec = _cost(speed.encode, numel / world) + world * _cost(speed.decode, numel / world)
    return [Estimate("compressed", _at(link.exchange, sent) + codec, sent)]


def _all_to_all(link: Link, speed: Speed, wire: int, numel: int, world: int) -> list[Estimate]:
    sent = wire * (world - 1) // world
    codec = (world - 1) * (_cost(speed.encode, numel / world) + _cost(speed.decode, numel / world))
    return [Estimate("compressed", _at(link.exchange, sent) + codec, sent)]


def _broadcast(link: Link, speed: Speed, wire: int, numel: int, world: int) -> list[Estimate]:
    hops = _at(link.exchange, wire) + (link.latency_s if world > 2 else 0.0)
    codec = (world - 1) * (_cost(speed.encode, numel / (world - 1)) + _cost(speed.decode, numel / (world - 1)))
    return [Estimate("compressed", hops + codec, wire)]


_ESTIMATES: dict[str, Callable[[Link, Speed, int, int, int], list[Estimate]]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
}


def _at(points: Points, nbytes: float) -> float:
    """Seconds at `nbytes`: between two points on the line through them, outside on the line of the two nearest."""
    if nbytes <= points[0][0]:
        return points[0][1]
    upper = next((i for i, point in enumerate(points) if point[0] >= nbytes), len(points) - 1)
    (x0, y0), (x1, y1) = points[upper - 1], points[upper]
    return y0 + (nbytes - x0) * max(0.0, y1 - y0) / (x1 - x0)


def _cost(speed: tuple[float, float], numel: float) -> float:
    return speed[0] + speed[1] * numel


def _link(channel: Channel) -> Link:
    """The measured link of a channel; measured now if it is the first time, by all ranks together."""
    found = channel.settled.get(Link)
    if found is None:
        found = channel.settled[Link] = measure(channel)
    return found


def measure(channel: Channel) -> Link:
    """Time messages and torch's all_reduce of rising size. Every rank of the group must call."""
    link, device = channel.transport, channel.device
    tag = link.draw_tags(TAGS)
    others = [rank for rank in range(link.world) if rank != link.rank]
    exchanged: list[tuple[int, float]] = []
    reduced: list[tuple[int, float]] = []
    for size in _SIZES:
        sent, came = (torch.zeros(link.world, size, dtype=torch.uint8, device=device) for _ in range(2))
        tensor = torch.zeros(size, device=device)

        def exchange(sent: Tensor = sent, came: Tensor = came) -> None:
            for work in link.exchange([(p, sent[p]) for p in others], [(p, came[p]) for p in others], tag):
                work.wait()

        def reduce(tensor: Tensor = tensor) -> None:
            dist.all_reduce(tensor, group=link.group)

        rounds = 2 if reduced and reduced[-1][1] > _ENOUGH_S / 8 else _ROUNDS
        exchanged.append((size * len(others), _agreed(link, _together(exchange, link, device, rounds), device)))
        reduced.append((4 * size, _agreed(link, _together(reduce, link, device, rounds), device)))
        if exchanged[-1][1] + reduced[-1][1] > _ENOUGH_S:
            break
    line_s = _agreed(link, _alone(lambda: void(channel.run(_Nothing()).wait()), device), device)
    return Link(line_s, _rising(exchanged), _rising(reduced))


class _Nothing(Operation):
    """Goes through the line and does nothing there."""

    num_chunks, chunk_bytes, scratch_bytes = 1, 0, 0

    def __init__(self) -> None:
        self.outputs = []

    def chunk(self, index: int, scratch: Tensor) -> Steps:
        """One step that waits for no message."""
        yield ()


def void(_: object) -> None:
    """Drop a value."""


def _together(call: Callable[[], None], link: Transport, device: torch.device, rounds: int) -> float:
    """The median of a few calls that all ranks start together; as many on every rank."""
    taken = []
    for _ in range(rounds + 1):
        dist.barrier(group=link.group)
        start = time.perf_counter()
        call()
        if isinstance(link, StreamTransport):
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return median(taken[1:])


def _agreed(link: Transport, seconds: float, device: torch.device) -> float:
    """The slowest rank's time, on every rank."""
    shared = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(shared, dist.ReduceOp.MAX, group=link.group)
    return float(shared)


def _rising(points: Sequence[tuple[int, float]]) -> Points:
    """A larger message never takes less time: noise that says so is levelled."""
    level, found = 0.0, []
    for nbytes, seconds in points:
        level = max(level, seconds)
        found.append((nbytes, level))
    return tuple(found)


def _speed(channel: Channel, codec: Codec, dtype: torch.dtype) -> Speed:
    """The codec's costs in the slowest rank; measured once a codec and dtype by all ranks together."""
    key = (Speed, codec, dtype)
    if key not in channel.settled:
        channel.settled[key] = _measure_codec(channel, codec, dtype)
    found: Speed = channel.settled[key]
    return found


def _measure_codec(channel: Channel, codec: Codec, dtype: torch.dtype) -> Speed:
    link, device = channel.transport, channel.device
    taken: list[list[float]] = []
    for numel in _SAMPLES:
        x = torch.randn(numel, device=device).to(dtype)
        wires_WN = torch.empty(link.world, codec.wire_bytes(numel, dtype), dtype=torch.uint8, device=device)
        out, wire = torch.empty_like(x), torch.empty_like(wires_WN[0])
        for row in wires_WN:
            codec.encode(x, row)
        calls: list[Callable[[], None]] = [
            lambda x=x, wire=wire: codec.encode(x, wire),  # type: ignore[misc]
            lambda wire=wire, out=out: codec.decode(wire, out, step=0),  # type: ignore[misc]
            lambda wires=wires_WN, out=out: codec.decode_sum(wires, out, step=0),  # type: ignore[misc]
            lambda w=wires_WN, wire=wire, n=numel: codec.recode(w, wire, n, dtype=dtype, trusted=True),  # type: ignore[misc]
        ]
        taken.append([_agreed(link, _alone(call, device), device) for call in calls])
    return Speed(*(_affine(small, large) for small, large in zip(*taken, strict=True)))


def _alone(call: Callable[[], None], device: torch.device) -> float:
    taken = []
    for _ in range(_ROUNDS + 1):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return median(taken[1:])


def _affine(small: float, large: float) -> tuple[float, float]:
    slope = max(0.0, large - small) / (_SAMPLES[1] - _SAMPLES[0])
    return max(0.0, small - slope * _SAMPLES[0]), slope
