"""The rule that recommends a scheme. `thinwire demo` and `thinwire advise` both print what it says.

From the most to the least exact, a scheme replaces the one recommended so far if
- its loss stays within the seed-to-seed spread, in a committed record or in the run at hand,
- the whole range of its speedup over no compression lies above 1, and
- its step is GAIN shorter.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GAIN = 0.03  # of a step; less may be noise. That of compress_ddp(model, "auto")
LEAST_SEEDS = 3  # with fewer the seed-to-seed spread is unknown
BF16_HOOK = (
    "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks; "
    "model.register_comm_hook(None, default_hooks.bf16_compress_hook)"
)
_FEEDBACK = {"ef21": "EF21"}


def name(codec: str, feedback: str = "none", weights: str | None = None) -> str:
    """What a scheme is called everywhere: fp32, int8, lloyd2 + EF21, lloyd4/int8 with weights in int8."""
    narrow = codec in ("bf16", "mixed") and weights == "bf16"
    both = codec if weights in (None, "none") or narrow else f"{codec}/{weights}"
    more = [_FEEDBACK.get(part, part) for part in feedback.split("+") if part not in ("", "none")]
    return " + ".join(["fp32" if both == "none" else both, *more])


def scheme_of(row: Mapping[str, Any]) -> str:
    """The name of the scheme of a training row."""
    found = name(str(row["codec"]), str(row["feedback"]), None if row.get("weights") is None else str(row["weights"]))
    return f"{found} every {row['every']}" if row.get("every") else found


@dataclass(frozen=True)
class Loss:
    """What a scheme did to the loss in one record."""

    log_ratio: float | None  # mean of ln(loss / fp32's loss) over seeds; None: it diverged
    floor: float | None  # the same between two seeds of fp32; None: there were too few
    seeds: int
    source: str

    @property
    def is_kept(self) -> bool:
        return self.log_ratio is not None and self.floor is not None and self.log_ratio <= self.floor

    @property
    def change(self) -> str:
        """+0.5 %."""
        return "diverged" if self.log_ratio is None else f"{100 * math.expm1(self.log_ratio):+.1f} %"

    def __str__(self) -> str:
        if self.floor is None:
            return f"{self.change}; seed-to-seed spread unknown (seeds in {self.source}: {self.seeds})"
        spread = f"seed-to-seed spread ±{100 * math.expm1(self.floor):.1f} %"
        return f"{self.change}; {spread} ({self.source}, {self.seeds} seeds)"


@dataclass(frozen=True)
class Way:
    """One scheme as the rule sees it."""

    name: str
    code: str  # the line to paste
    step_s: float
    low: float = 1.0  # the speedup may be between so many times what step_s says,
    high: float = 1.0  # and so many times
    loss: Loss | None = None  # None: not measured
    is_exact: bool = False  # no compression, and bf16: their loss needs no record

    @property
    def keeps_the_loss(self) -> bool:
        return self.is_exact or (self.loss is not None and self.loss.is_kept)

    def gain(self, other: "Way") -> float:
        return other.step_s / self.step_s if self.step_s else 1.0

    def range(self, other: "Way") -> str:
        """The speedup over another scheme: 1.4–1.6 ×."""
        ends = [self.gain(other) * share for share in (self.low, self.high)]
        shown = [f"{gain:.{2 if gain < 0.95 else 1 if gain < 10 else 0}f}" for gain in ends]
        return f"{'–'.join(dict.fromkeys(shown))} ×"


@dataclass(frozen=True)
class Recommendation:
    """What to use, and the three lines that say so."""

    chosen: Way
    plain: Way
    bf16: Way | None  # torch's own hook, where gradients are wider
    rival: Way | None  # the fastest that keeps the loss, where nothing is to be compressed
    lossy: Way | None  # the fastest that does not, where it is faster than the chosen one
    basis: str  # where the times come from: "predicted for 1gbit"

    @property
    def compress(self) -> bool:
        return self.chosen is not self.plain

    @property
    def others(self) -> list[Way]:
        """What the chosen one is compared with, bf16 first."""
        return [way for way in (self.bf16, self.plain) if way is not None and way is not self.chosen]

    @property
    def notes(self) -> list[str]:
        """Why a faster scheme is not recommended."""
        if self.lossy is None:
            return []
        gain = f"{self.lossy.range(self.plain)} over {self.plain.name}"
        why = f"its loss is {self.lossy.loss}" if self.lossy.loss else "its loss was not measured"
        return [f"{self.lossy.name} would be faster ({gain}), but {why}"]

    @property
    def lines(self) -> tuple[str, str, str]:
        """Use X · the speedup over bf16 and over fp32 · the cost in loss."""
        return self.use, f"Gain: {self.gain} ({self.basis})", f"Loss: {self.loss}"

    @property
    def use(self) -> str:
        return f"Use {self.chosen.name}: {self.chosen.code}" if self.compress else f"Do not compress: {self.plain.code}"

    @property
    def gain(self) -> str:
        if self.compress:
            return ", ".join(f"{self.chosen.range(other)} over {other.name}" for other in self.others)
        if self.rival is None:
            return "none; no other scheme keeps the loss"
        return f"none; {self.rival.name}, the best that keeps the loss, has {self.rival.range(self.plain)} the speed"

    @property
    def loss(self) -> str:
        if not self.compress:
            return f"that of {self.plain.name}"
        return str(self.chosen.loss or "not measured in these records; it is torch's own hook")


def choose(ways: Sequence[Way], basis: str) -> Recommendation:
    """Decide between `ways`, which go from the most to the least exact; the first is no compression."""
    plain = best = ways[0]
    kept = [way for way in ways[1:] if way.keeps_the_loss]
    for way in kept:
        if way.gain(plain) * way.low > 1 and way.step_s < (1 - GAIN) * best.step_s:
            best = way
    rival = min(kept, key=lambda way: way.step_s, default=None) if best is plain else None
    bf16 = next((way for way in ways[1:] if way.name == "bf16"), None)
    faster = [way for way in ways if not way.keeps_the_loss and way.step_s < (1 - GAIN) * best.step_s]
    lossy = min(faster, key=lambda way: way.step_s, default=None)
    return Recommendation(best, plain, bf16, rival, lossy, basis)
