"""What a kernel is held against: a copy of its tensor, and a copy of as many bytes as it has to move, by turns with it.

On a GPU every call goes round sets of buffers that together are several times its cache, so that small tensors come
from memory as large ones do, kernel and copies alike.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.tools.bench import timing
from thinwire.tools.bench.record import TIMES, Row
from thinwire.tools.bench.timing import Call

COLUMNS = (*TIMES, "copy_ms", "times_copy", "copy_share", "copy_same_ms", "minimal_bytes", "cold", "rounds")
MOST_SETS = 256  # of buffers


@dataclass(frozen=True)
class Effort:
    """How much a run measures."""

    rounds: int = 9  # more => steadier medians
    launches: int = 1  # of a call in a row, on a GPU; more => less of the clock's own error
    footprint: int = 0  # bytes a call goes round, on a GPU; several times the cache, or 0: one set of buffers
    eager_rounds: int = 3  # the reference is slow: fewer rounds,
    eager_numel: int = 1 << 21  # and on at most this many elements, with the kernel beside it on as many
    replays: int = 50  # of a graph in a row


def beside(
    x: Tensor,
    make: Callable[[Tensor], Call],
    moved: int,
    effort: Effort,
    *,
    sets: int | None = None,
    wrap: Callable[[Call], Call] = lambda call: call,
) -> Row:
    """The time columns of what `make` prepares on x, which moves at least `moved` bytes.

    `sets` of buffers, by default as many as fill the footprint; `wrap` is put around all calls that are compared.
    """
    cold = x.device.type == "cuda" and effort.footprint > 0
    footprint = effort.footprint if cold else 0
    half = _bytes(x, -(-moved // 32) * 16)  # whole vectors: a copy that ends in odd bytes may go by bytes
    calls = {
        "copy": _ring(x, _copy, wrap, sets_for(2 * x.numel() * x.itemsize, footprint)),
        "same": _ring(half, _copy, wrap, sets_for(moved, footprint)),
        "ours": _ring(x, make, wrap, sets or sets_for(moved, footprint)),
    }
    times = timing.interleave(calls, effort.rounds, x.device, effort.launches)
    p20, p50, p80 = timing.percentiles(times["ours"])
    copy_ms, copy_same_ms = (timing.percentiles(times[name])[1] for name in ("copy", "same"))
    shares = {"copy_ms": copy_ms, "times_copy": p50 / copy_ms, "copy_share": copy_same_ms / p50}
    extras = {"copy_same_ms": copy_same_ms, "minimal_bytes": moved, "cold": cold, "rounds": effort.rounds}
    return {"ms_p50": p50, "ms_p20": p20, "ms_p80": p80, **shares, **extras}


def sets_for(nbytes: int, footprint: int) -> int:
    """Sets of buffers of `nbytes` that fill the footprint: at least one, and not too many to make."""
    return min(MOST_SETS, max(1, -(-footprint // nbytes)))


def _ring(source: Tensor, make: Callable[[Tensor], Call], wrap: Callable[[Call], Call], sets: int) -> Call:
    sources = [source, *(source.clone() for _ in range(sets - 1))]
    return timing.rotate([wrap(make(each)) for each in sources])


def _copy(source: Tensor) -> Call:
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    return copy


def _bytes(x: Tensor, count: int) -> Tensor:
    """`count` bytes: those of x, over and over."""
    content = x.view(torch.uint8)
    return content.repeat(-(-count // content.numel()))[:count]
