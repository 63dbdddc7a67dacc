"""Measures what each algorithm takes in a group, at a few sizes, for `auto`.

[Note: Measured, not assumed] A time put together from link speed and kernel speed is wrong where it matters: messages
and kernels compete for the same cores and caches, and wake-ups cost more than either says. So the algorithms themselves
are timed, plain and compressed by turns, all ranks together, at sizes that rise up to the one asked for, or until a
call takes long enough. All ranks take the slowest rank's times, so they choose alike.
"""

import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from thinwire import log
from thinwire.codecs import Codec
from thinwire.collectives import cost
from thinwire.collectives.channel import Channel
from thinwire.collectives.cost import CurveKey, Curves, Points
from thinwire.collectives.plan import Choose

_ROUNDS = 7
_ENOUGH_S = 0.02  # sizes rise until a call takes as long
_SIZES = (1 << 8, 1 << 13, 1 << 16, 1 << 19, 1 << 22)  # elements, or bytes of a message
Prepare = Callable[[int], Callable[[], object]]  # the call on a message of so many elements
Trial = Callable[..., object]  # a verb, called with tensors, a codec, an algorithm and a step
# Whether each of a trial's tensors holds all ranks' parts of the message, or one.
_WHOLE = {"all_gather": (True, False), "reduce_scatter": (False, True), "all_to_all": (True, True)}


def fastest(channel: Channel, verb: str, dtype: torch.dtype, numel: int, trial: Trial) -> Choose:
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
            _measure_link(channel, numel * dtype.itemsize)
            known = channel.measured.curves.get(key, dict.fromkeys(calls, ()))
            channel.measured.curves[key] = _extended(channel, known, numel, calls)
        return cost.choice(channel.measured, key, numel, channel.transport.world).algorithm

    return choose


def _measure_link(channel: Channel, nbytes: int) -> None:
    """Measure messages of up to `nbytes` to every other rank, unless that has been done."""
    measured = channel.measured
    if not measured.exchange and all(member.rank == 0 for member in channel.transports):
        log.announce("measuring the link of this group (about a second)")
    calls = {"exchange": lambda size: _exchange(channel, size)}
    measured.exchange = _extended(channel, {"exchange": measured.exchange}, nbytes, calls)["exchange"]


def _exchange(channel: Channel, size: int) -> Callable[[], object]:
    """Send `size` bytes to each other rank and take as many from each."""
    link = channel.transport
    tag = link.draw_tags()
    sent, received = (torch.zeros(link.world, size, dtype=torch.uint8, device=channel.device) for _ in range(2))

    def call() -> None:
        link.exchange([(p, sent[p]) for p in link.others], [(p, received[p]) for p in link.others], tag).wait()

    return call


def _missing(points: Points, wanted: int) -> list[int]:
    """Sizes to measure so that `wanted` is at most twice as large as one of them; none once calls take long enough."""
    largest, seconds = points[-1] if points else (0, 0.0)
    if largest and (wanted <= 2 * largest or (seconds > _ENOUGH_S and largest > _SIZES[0])):
        return []
    sizes = [size for size in _SIZES if size <= wanted] or [_SIZES[0]]
    top = min(wanted, _SIZES[-1])
    if top > 2 * sizes[-1]:
        sizes.append(top)
    return [size for size in sizes if size > largest]


def _extended(channel: Channel, curves: Curves, wanted: int, calls: Mapping[str, Prepare]) -> Curves:
    """Extend curves to `wanted`: time the calls in turn at rising sizes. Agreed times decide alike on all ranks."""
    points = {name: list(row) for name, row in curves.items()}
    slowest = max((row[-1][1] for row in points.values() if row), default=0.0)
    for size in _missing(max(curves.values(), key=lambda row: row[-1][1] if row else 0.0), wanted):
        ready = {name: prepare(size) for name, prepare in calls.items()}
        rounds = 2 if slowest > _ENOUGH_S / 8 else _ROUNDS
        for name, seconds in _timed(channel, ready, rounds).items():
            points[name].append((size, seconds))
        slowest = max(row[-1][1] for row in points.values())
        if slowest > _ENOUGH_S and size > _SIZES[0]:
            break
    return {name: _leveled(row) for name, row in points.items()}


def _leveled(row: Sequence[tuple[int, float]]) -> Points:
    """Noise only adds time, so a message counts as no slower than a larger one."""
    levels = list(itertools.accumulate((seconds for _, seconds in reversed(row)), min))
    return tuple((size, level) for (size, _), level in zip(row, reversed(levels), strict=True))


def _timed(channel: Channel, calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
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
