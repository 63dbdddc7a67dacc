"""The cost model: what each algorithm takes in a group, from what was measured there, and what `auto` makes of it.

Pure functions of measured points (measuring.py takes them): between two sizes times lie on a straight line.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from thinwire.codecs import Codec, Identity

_GAIN = 0.9  # a compressed algorithm must be predicted to take less than this share of plain's time

Points = tuple[tuple[int, float], ...]  # (size, seconds), both rising
Curves = dict[str, Points]  # of every algorithm, over elements


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


def explained(measured: Measured, key: CurveKey, numel: int, world: int) -> Choice:
    """What `auto` does with a call in a group; where there is nothing to choose, that is plain, without measuring."""
    if world == 1 or numel == 0 or isinstance(key.codecs[0], Identity):
        return Choice(key.verb, str(key.codecs[0]), numel, world, (), (Estimate("plain", 0.0, 0),))
    return choice(measured, key, numel, world)


def choice(measured: Measured, key: CurveKey, numel: int, world: int) -> Choice:
    """What `auto` does with a message of `numel` elements in all, by the measurements there are."""
    codec = key.codecs[-1]
    plain = numel * key.dtype.itemsize
    wire = codec.wire_bytes(numel, key.dtype)  # raises where the codec does not take the dtype, as the call would
    curves = measured.curves.get(key)
    if not measured.exchange or curves is None:
        return Choice(key.verb, str(codec), numel, world, (), ())
    estimates = tuple(
        Estimate(name, at(points, numel), _sent(key.verb, name, plain if name == "plain" else wire, world))
        for name, points in curves.items()
    )
    return Choice(key.verb, str(codec), numel, world, measured.exchange, estimates)


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
