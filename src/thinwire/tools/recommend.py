"""The rule that recommends schemes. `thinwire demo` and `thinwire advise` both print what it says.

It gives two answers. "Safe" is the fastest scheme whose measured loss does not differ (the whole 95 % interval lies
inside ±MARGIN nats) or that needs no measurement (bf16). "Faster" is the fastest one whose interval ends below
TOLERATED nats. Either counts only if the whole range of its speedup lies above 1 and its step is GAIN shorter than that
of a more exact one. A scheme whose loss was not measured is never recommended.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.tools.pairs import Difference

GAIN = 0.03  # of a step; less may be noise. That of compress_ddp(model, "auto")
TOLERATED = 0.03  # nats
BF16_HOOK = (
    "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks; "
    "model.register_comm_hook(None, default_hooks.bf16_compress_hook)"
)


def name(codec: str, feedback: str = "none", weights: str | None = None) -> str:
    """What a scheme is called everywhere: fp32, int8, lloyd2 + EF21, lloyd4/int8 with weights in int8."""
    narrow = codec in ("bf16", "mixed") and weights == "bf16"
    both = codec if weights in (None, "none") or narrow else f"{codec}/{weights}"
    more = [part for part in feedback.replace("ef21", "EF21").split("+") if part not in ("", "none")]
    return " + ".join(["fp32" if both == "none" else both, *more])


def scheme_of(row: Mapping[str, Any]) -> str:
    """The name of the scheme of a training row."""
    found = name(str(row["codec"]), str(row["feedback"]), None if row.get("weights") is None else str(row["weights"]))
    return f"{found} every {row['every']}" if row.get("every") else found


@dataclass(frozen=True)
class Loss(Difference):
    """What a scheme did to the validation loss in one record."""

    params: int | None  # of the model; None: a script of the user's
    source: str


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
    def is_safe(self) -> bool:
        return self.is_exact or (self.loss is not None and self.loss.none_seen)

    @property
    def is_tolerable(self) -> bool:
        high = None if self.loss is None else self.loss.high
        return self.is_safe or (high is not None and high <= TOLERATED)

    def gain(self, other: "Way") -> float:
        return other.step_s / self.step_s if self.step_s else 1.0

    def range(self, other: "Way") -> str:
        """The speedup over another scheme: 1.4–1.6 ×."""
        ends = [self.gain(other) * share for share in (self.low, self.high)]
        shown = [f"{gain:.{2 if gain < 0.95 else 1 if gain < 10 else 0}f}" for gain in ends]
        return f"{'–'.join(dict.fromkeys(shown))} ×"


@dataclass(frozen=True)
class Recommendation:
    """What to use: `safe`, which is `plain` where nothing pays, and `faster` where a lossier scheme pays more."""

    plain: Way
    safe: Way
    faster: Way | None
    bf16: Way | None  # torch's own, where gradients are wider

    @property
    def compress(self) -> bool:
        return self.best is not self.plain

    @property
    def best(self) -> Way:
        return self.faster or self.safe

    def speedup(self, way: Way) -> str:
        """1.8–2.9 × over fp32, 1.0–1.7 × over bf16."""
        others = [way.range(self.plain) + f" over {self.plain.name}"]
        if self.bf16 is not None and self.bf16 is not way:
            others.append(way.range(self.bf16) + f" over {self.bf16.name}")
        return ", ".join(others)


def choose(ways: Sequence[Way]) -> Recommendation:
    """Decide between `ways`, which go from the most to the least exact; the first is no compression."""
    plain = ways[0]

    def best(start: Way, allowed: Callable[[Way], bool]) -> Way:
        for way in ways[1:]:
            if allowed(way) and way.gain(plain) * way.low > 1 and way.step_s < (1 - GAIN) * start.step_s:
                start = way
        return start

    safe = best(plain, lambda way: way.is_safe)
    faster = best(safe, lambda way: way.is_tolerable)
    bf16 = next((way for way in ways[1:] if way.name == "bf16"), None)
    return Recommendation(plain, safe, None if faster is safe else faster, bf16)
