"""What `codec="auto"` and `codec="auto:2.5"` make of measurements: pure functions."""

import collections
import functools
import heapq
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from thinwire.codecs import BlockInt, Cast, Codec, Identity, Lloyd
from thinwire.errors import CodecError

CANDIDATES: tuple[Codec, ...] = (Identity(), Cast("bf16"), BlockInt(8), Lloyd(4))  # from the most to the least exact
SETTLE_STEPS = 2  # DDP rebuilds its buckets, kernels and links warm up
ROUNDS = 6  # of which the first is not timed
MAY_LOSE = 1  # rounds in which a faster codec may be slower than none
GAIN = 0.03  # share of a step by which a less exact codec has to be faster, because of noise


@dataclass
class Race:
    """Times of real steps: SETTLE_STEPS uncompressed, then the candidates in turn, ROUNDS times."""

    times: dict[int, list[float]] = field(default_factory=lambda: {i: [] for i in range(len(CANDIDATES))})
    errors: dict[int, float] = field(default_factory=dict)
    steps: int = 0

    @property
    def candidate(self) -> int:
        """Which candidate runs the present step."""
        return max(0, self.steps - SETTLE_STEPS) % len(CANDIDATES)

    @property
    def measures_error(self) -> bool:
        """Whether to measure the error of this step's codec: until one step was finite."""
        return self.steps >= SETTLE_STEPS and self.candidate > 0 and self.candidate not in self.errors

    @property
    def over(self) -> bool:
        return self.steps >= SETTLE_STEPS + ROUNDS * len(CANDIDATES)

    def ended(self, seconds: float, error: float | None) -> None:
        """This step took `seconds`, and its relative error was `error`."""
        if self.measures_error and error is not None:
            self.errors[self.candidate] = error
        # The first round is not timed: it includes handshakes and the measuring of errors.
        if self.steps >= SETTLE_STEPS + len(CANDIDATES):
            self.times[self.candidate].append(seconds)
        self.steps += 1

    def result(self) -> list[float]:
        """Median seconds, errors, and rounds lost to no compression, of all candidates: the worst over ranks counts."""
        others = range(1, len(CANDIDATES))
        medians = [statistics.median(times) for times in self.times.values()]
        errors = [self.errors.get(i, math.inf) for i in others]
        lost = [sum(mine >= plain for mine, plain in zip(self.times[i], self.times[0], strict=True)) for i in others]
        return [*medians, 0.0, *errors, 0.0, *map(float, lost)]


def decide(result: Sequence[float], error_budget: float) -> tuple[Codec, str]:
    """The fastest candidate inside the budget, and a line that says why."""
    count = len(CANDIDATES)
    seconds, errors, lost = (result[at : at + count] for at in range(0, len(result), count))
    best = 0
    for i in range(1, count):
        allowed = errors[i] <= error_budget and lost[i] <= MAY_LOSE
        if allowed and seconds[i] < (1 - GAIN) * seconds[best]:
            best = i
    figures = [f"{error:.2g}" if math.isfinite(error) else "unknown, so" for error in errors]
    times = ", ".join(
        f"{'uncompressed' if i == 0 else c} {1e3 * seconds[i]:.3g} ms"
        + (f" (error {figures[i]} over the budget)" if not errors[i] <= error_budget else "")
        + (f" (slower in {lost[i]:.0f} of {ROUNDS - 1} rounds)" if lost[i] > MAY_LOSE else "")
        for i, c in enumerate(CANDIDATES)
    )
    name = "no compression" if best == 0 else str(CANDIDATES[best])
    return CANDIDATES[best], f"{name}; a step took: {times} (relative error at most {error_budget:g})"


# From few bits to many, with the share of a Gaussian's squares that each loses.
WIDTHS: tuple[tuple[Codec, float], ...] = (
    (Lloyd(1), 0.363),
    (Lloyd(2), 0.1175),
    (Lloyd(3), 0.0345),
    (Lloyd(4), 0.0095),
    (BlockInt(5), 3.0e-3),
    (BlockInt(6), 7.0e-4),
    (BlockInt(8), 4.2e-5),
)


def squares_of(codec: Codec, lost: float) -> float:
    """The sum of squares of numbers of which a width has `lost` so much."""
    return lost / dict(WIDTHS)[codec]


def deal_bits(
    layers: Mapping[str, tuple[int, float]], fixed_bytes: int, fixed_numel: int, bits: float
) -> dict[str, Codec]:
    """The codec of every layer, by its elements and their sum of squares: least error, `bits` per element on average.

    `fixed_bytes` are those of parameters that have no choice (exemptions, rules). From the smallest width up, the bytes
    go where each buys the largest drop of error: widths lose less and less, so this is the best, up to one upgrade.
    """
    numels, squares = [n for n, _ in layers.values()], [square for _, square in layers.values()]
    budget = bits / 8 * (fixed_numel + sum(numels)) - fixed_bytes
    width = [0] * len(layers)
    spent = sum(map(WIDTHS[0][0].wire_bytes, numels))
    if spent > budget:
        least = 8 * (spent + fixed_bytes) / max(fixed_numel + sum(numels), 1)
        raise CodecError(f"{bits:g} bits per element are too few: exempt fewer parameters, or ask for {least:.3g}")

    def upgrade(i: int) -> tuple[float, int, int]:
        """(minus the drop of error per byte, layer, bytes) of the layer's next width."""
        (now, loses), (wider, loses_less) = WIDTHS[width[i] : width[i] + 2]
        cost = max(1, wider.wire_bytes(numels[i]) - now.wire_bytes(numels[i]))
        return -squares[i] * (loses - loses_less) / cost, i, cost

    heap = [upgrade(i) for i in range(len(layers))]
    heapq.heapify(heap)
    while heap:
        _, i, cost = heapq.heappop(heap)
        if spent + cost > budget:
            continue
        spent += cost
        width[i] += 1
        if width[i] + 1 < len(WIDTHS):
            heapq.heappush(heap, upgrade(i))
    return {name: WIDTHS[at][0] for name, at in zip(layers, width, strict=True)}


@functools.cache
def start_width(bits: float) -> Codec:
    """The widest codec inside a budget: what travels until the errors are known."""
    inside = [codec for codec, _ in WIDTHS if 8 * codec.wire_bytes(1 << 20) / (1 << 20) <= bits]
    return inside[-1] if inside else WIDTHS[0][0]


def counted(widths: Mapping[str, Codec]) -> str:
    """How many layers have which codec."""
    counts = collections.Counter(str(chosen) for chosen in widths.values())
    return ", ".join(f"{count} x {name}" for name, count in sorted(counts.items()))
