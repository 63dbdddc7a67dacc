"""A case of the kernel benchmark, and what kernels are held against: copies of as many bytes, by turns with them.

On a GPU every call goes round sets of buffers that together are several times its cache, so that small tensors come
from memory as large ones do, kernel and copies alike.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.kernels import Backend
from thinwire.tools.bench import timing
from thinwire.tools.bench.record import TIMES, Row
from thinwire.tools.bench.timing import Call, Effort

COLUMNS = (*TIMES, "copy_ms", "times_copy", "copy_share", "copy_same_ms", "minimal_bytes", "cold", "rounds")
FOOTPRINT = 1 << 28  # bytes that a call goes round on a GPU
MOST_SETS = 256  # of buffers


@dataclass(frozen=True, kw_only=True)
class KernelCase(ABC):
    """One row of the kernel benchmark."""

    part: str
    op: str
    name: str  # in the column `codec`
    numel: int
    dtype: torch.dtype = torch.float32
    world: int = 1  # wires that the op reads
    threads: int
    device: torch.device

    def __str__(self) -> str:
        size = f"{self.threads} threads" if self.device.type == "cpu" else f"{self.numel} elements"
        return f"{self.op} {self.name} {timing.dtype_name(self.dtype)}, {size}"

    @property
    @abstractmethod
    def minimal_bytes(self) -> int:
        """Each input byte read once, each output byte written once."""

    @abstractmethod
    def measure(self, backend: Backend, effort: Effort, x: Tensor) -> Row:
        """The time columns, of x or of a part of it."""

    def backend_name(self, backend: Backend) -> str:
        """What the column `backend` says where `backend` serves the device."""
        return timing.name_of(backend)


def beside(
    x: Tensor,
    make: Callable[[Tensor], Call],
    moved: int,
    effort: Effort,
    *,
    cold: bool = True,
    sets: int | None = None,
    wrap: Callable[[Call], Call] = lambda call: call,
) -> Row:
    """The time columns of what `make` prepares on x, which moves at least `moved` bytes.

    `cold`: on a GPU, from memory rather than from its cache. `sets` of buffers, by default as many as fill the
    footprint; `wrap` is put around all calls that are compared.
    """
    cold = cold and x.device.type == "cuda"
    footprint = FOOTPRINT if cold else 0
    half = _bytes(x, -(-moved // 32) * 16)  # whole vectors: a copy that ends in odd bytes may go by bytes
    calls = {
        "copy": _ring(x, _copy, wrap, sets_for(2 * x.numel() * x.itemsize, footprint)),
        "same": _ring(half, _copy, wrap, sets_for(moved, footprint)),
        "ours": _ring(x, make, wrap, sets or sets_for(moved, footprint)),
    }
    times = timing.interleave(calls, effort.rounds, x.device, effort.launches)
    copy_ms, same_ms, ours_ms = (timing.percentiles(taken)[1] for taken in times.values())
    return {
        **timing.columns(times["ours"]),
        "copy_ms": copy_ms,
        "times_copy": ours_ms / copy_ms,
        "copy_share": same_ms / ours_ms,
        "copy_same_ms": same_ms,
        "minimal_bytes": moved,
        "cold": cold,
        "rounds": effort.rounds,
    }


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
