"""Compares losses of runs by pairs: the same seed, with and without compression.

Runs of one seed share weights and batches, so the difference of a pair is far less noisy than a loss. An interval is
Student's t over the differences of several seeds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, linear_regression, variance
from typing import Any

from thinwire.errors import RecordError

MARGIN = 0.003  # nats: differences inside it count as none
# Student's t that 95 % of draws stay inside of, both signs, for 1, 2, ... degrees of freedom; then the normal's.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
_NORMAL95 = 1.960


@dataclass(frozen=True)
class Difference:
    """How far a validation loss is above the uncompressed runs', in nats, by pairs of the same seed."""

    gap: float  # mean over seeds
    half: float | None  # of the 95 % interval; None with fewer than two seeds
    seeds: int

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "Difference":
        """What a row of a record holds."""
        half = None if row["delta_high"] is None else (row["delta_high"] - row["delta_low"]) / 2
        return cls(row["delta_nats"], half, row["seeds"])

    @property
    def columns(self) -> dict[str, float | None]:
        """As records hold it."""
        return {"delta_nats": self.gap, "delta_low": self.low, "delta_high": self.high}

    @property
    def low(self) -> float | None:
        return None if self.half is None else self.gap - self.half

    @property
    def high(self) -> float | None:
        return None if self.half is None else self.gap + self.half

    @property
    def none_seen(self) -> bool:
        """Whether the whole interval lies inside the margin."""
        return self.half is not None and abs(self.gap) + self.half <= MARGIN

    def __str__(self) -> str:
        return f"{self.gap:+z.4f}" + ("" if self.half is None else f" ± {self.half:.4f}") + " nats"


def t95(freedom: int) -> float:
    """Student's t for a 95 % interval; between the table's end and the normal it falls as 1 / freedom."""
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    return _NORMAL95 + (_T95[-1] - _NORMAL95) * len(_T95) / freedom


def difference(losses: Mapping[int, float], plain: Mapping[int, float]) -> Difference:
    """Of the seeds that both have; raises RecordError if there are none."""
    found = [losses[seed] - plain[seed] for seed in sorted(losses.keys() & plain.keys())]
    if not found:
        raise RecordError("no seed was trained both ways")
    count = len(found)
    half = t95(count - 1) * math.sqrt(variance(found) / count) if count > 1 else None
    return Difference(fmean(found), half, count)


def slope(curve: Sequence[Sequence[float]]) -> float:
    """Nats per doubling of tokens (negative where it learns), fitted over the last half of [[step, loss], ...]."""
    last = curve[len(curve) // 2 :]
    xs = [math.log2(step) for step, _ in last]
    return linear_regression(xs, [loss for _, loss in last]).slope if len(set(xs)) > 1 else 0.0


def more_tokens(nats: float, per_doubling: float | None) -> float | None:
    """The % of tokens that plain training needs in addition to undo a difference; None where that is not known."""
    return None if per_doubling is None or per_doubling >= 0 else 100 * (2.0 ** (nats / -per_doubling) - 1)


def verdict(name: str, found: Difference, per_doubling: float | None = None) -> str:
    """One sentence about one arm."""
    most = more_tokens(max(0.0, found.gap + (found.half or 0.0)), per_doubling)
    cost = "" if most is None else f"; {most:.1f} % more tokens at most"
    if found.low is None or found.high is None:
        return f"{name}: {found} from one pair of runs: add seeds for an interval"
    if found.none_seen:
        return f"{name}: {found}, no difference seen{cost}"
    if found.low > 0:
        return f"{name}: {found}, a loss{cost}"
    if found.high < 0:
        return f"{name}: {found}, better than without compression"
    return f"{name}: {found}, undecided: add seeds or train longer{cost}"
