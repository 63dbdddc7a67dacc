"""Clocks, interleaved rounds and percentiles: how every benchmark takes its times."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch

from thinwire.kernels import BACKENDS, Backend

Call = Callable[[], None]
_AHEAD_CYCLES = 2_000_000  # about 1 ms: the device waits while the host queues, so that no launch gap is timed


def name_of(backend: Backend) -> str:
    """The name a backend has in kernels.BACKENDS."""
    return next(name for name, entry in BACKENDS.items() if entry is backend)


def interleave(calls: Mapping[str, Call], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Milliseconds of every call in every round: all calls once a round, so that a slow spell hits them alike.

    One round before them is not counted: it touches the buffers, fills caches, compiles what is compiled late.
    """
    clock = cuda_ms if device.type == "cuda" else host_ms
    taken = [{name: clock(call) for name, call in calls.items()} for _ in range(rounds + 1)][1:]
    return {name: [times[name] for times in taken] for name in calls}


def host_ms(call: Call) -> float:
    """Milliseconds of a call that returns when its work is done."""
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def cuda_ms(call: Call) -> float:
    """Milliseconds that the work of a call takes on the current stream."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(_AHEAD_CYCLES)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    taken: float = start.elapsed_time(end)
    return taken


def percentiles(times: Sequence[float]) -> tuple[float, float, float]:
    """p20, p50, p80."""
    p20, p50, p80 = (float(p) for p in np.percentile(times, [20, 50, 80]))
    return p20, p50, p80


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """torch, and thinwire's kernels with it, use `count` threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
