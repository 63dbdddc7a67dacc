"""Feedback that remembers too much: a warning, once per parameter, at the steps whose errors are measured.

[Note: Drift] A codec loses a share d of the squares of what it encodes. Classic feedback encodes x + r, where r is what
the last message lost, so |r'| <= sqrt(d) (|x| + |r|): with gradients of size |x| it never holds more than
sqrt(d) / (1 - sqrt(d)) |x|. EF21 encodes the difference to what was sent before, which moves by up to 2 |x|: it holds
no more than twice that. A residual beyond the bound says that the codec loses more of these gradients than of Gaussian
ones, for which d is measured: a few large numbers make the others of their block vanish, say. Old gradients then drown
the new ones.

A residual smaller than its gradient drowns nothing, whatever d: the bound is never below 1. After a burst of large
gradients what is owed is sent off in a few steps: so two measured steps in a row have to show the residual, and the
second at least half of the squares of the first.
"""

import functools
import math
from collections.abc import Iterable, Sequence

import torch

from thinwire.codecs import Codec
from thinwire.collectives.lane import decoded
from thinwire.integrations.stats import ErrorWatch

_NUMBERS = 1 << 14  # by which a codec is judged
_SHOWN = 3  # parameters that a warning names


@functools.cache
def residual_bound(codec: Codec, feedback: str, device: torch.device) -> float:
    """How many times its gradients a residual may be, by the kernels of a device. See [Note: Drift]."""
    x = torch.randn(_NUMBERS, generator=torch.Generator().manual_seed(1)).to(device)
    wire = torch.empty(codec.wire_bytes(_NUMBERS), dtype=torch.uint8, device=device)
    codec.encode(x, wire, step=0)
    root = float((x - decoded(codec, wire, _NUMBERS, 0)).norm() / x.norm())
    held = root / (1.0 - root) if root < 1.0 else math.inf
    return max(1.0, 2.0 * held if feedback == "ef21" else held)


class Drift:
    def __init__(self) -> None:
        self._over: dict[str, float] = {}  # squares of residuals that were too large at the last measured step
        self._told: set[str] = set()

    def look(self, watches: Sequence[ErrorWatch]) -> str:
        """What is to be told after a measured step, which these saw; "" if nothing."""
        if not watches:
            return ""
        over: dict[str, float] = {}
        times: dict[str, tuple[float, float]] = {}  # the residual, and its bound, in multiples of the gradient
        for name, lost, given, bound in _residuals(watches):
            if given > 0.0 and math.isfinite(lost) and lost > bound * bound * given:
                over[name] = lost
                times[name] = math.sqrt(lost / given), bound
        lasting = [name for name, lost in over.items() if lost >= 0.5 * self._over.get(name, math.inf)]
        self._over = over
        news = [name for name in lasting if name not in self._told]
        self._told.update(news)
        if not news:
            return ""
        shown = ", ".join(f"{n} ({times[n][0]:.1f} times, at most {times[n][1]:.1f} expected)" for n in news[:_SHOWN])
        more = f" and {len(news) - _SHOWN} more" if len(news) > _SHOWN else ""
        return (
            f"error feedback remembers many times the present gradients of {shown}{more}. Old gradients drown the new "
            f"ones there: give them more bits, policy={{{news[0]!r}: 'int4'}}, or name them in exempt="
        )


def _residuals(watches: Sequence[ErrorWatch]) -> Iterable[tuple[str, float, float, float]]:
    """(name, squares of what was lost, squares of what was given, bound) of every parameter."""
    lost: dict[str, float] = {}
    given: dict[str, float] = {}
    bounds: dict[str, float] = {}
    for watch in watches:
        assert watch.codec is not None
        bound = residual_bound(watch.codec, watch.feedback, watch.lost_P.device)
        for name, one, other in zip(watch.names, watch.lost_P.tolist(), watch.given_P.tolist(), strict=True):
            if name is not None:
                lost[name] = lost.get(name, 0.0) + one
                given[name] = given.get(name, 0.0) + other
                bounds[name] = bound
    return [(name, lost[name], given[name], bounds[name]) for name in lost]
