"""Clocks, interleaved rounds and percentiles: how every benchmark takes its times."""

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch

from thinwire.kernels import BACKENDS, Backend

Call = Callable[[], None]
_CYCLES_A_MS = 2_000_000  # about
_WARM_UPS = 3  # calls before a capture: kernels are compiled and tables made, which no graph can hold


def name_of(backend: Backend) -> str:
    """The name a backend has in kernels.BACKENDS."""
    return next(name for name, entry in BACKENDS.items() if entry is backend)


def interleave(
    calls: Mapping[str, Call], rounds: int, device: torch.device, launches: int = 1, ahead_ms: float = 1.0
) -> dict[str, list[float]]:
    """Milliseconds of every call in every round: all calls once a round, so that a slow spell hits them alike.

    One round before them is not counted: it touches the buffers, fills caches, compiles what is compiled late. On a
    GPU a call is launched `launches` times in a row, and its time is their mean; see `cuda_ms`.
    """
    on_device = functools.partial(cuda_ms, launches=launches, ahead_ms=ahead_ms)
    clock = on_device if device.type == "cuda" else host_ms
    taken = [{name: clock(call) for name, call in calls.items()} for _ in range(rounds + 1)][1:]
    return {name: [times[name] for times in taken] for name in calls}


def host_ms(call: Call) -> float:
    """Milliseconds of a call that returns when its work is done."""
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def cuda_ms(call: Call, launches: int = 1, ahead_ms: float = 1.0) -> float:
    """Milliseconds that the work of a call takes on the current stream: the mean of `launches` in a row.

    The device waits for `ahead_ms` while the host queues them; where that is long enough, no launch gap is timed.

    Where there are several, one goes before them untimed: the caches then hold, and have yet to write back, what such
    a call leaves there, not what another did.
    """
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(int(ahead_ms * _CYCLES_A_MS))
    if launches > 1:
        call()
    start.record()
    for _ in range(launches):
        call()
    end.record()
    torch.cuda.synchronize()
    taken: float = start.elapsed_time(end)
    return taken / launches


def launched_ms(call: Call, launches: int, device: torch.device) -> float:
    """Milliseconds a call takes where nothing runs ahead: `launches` in a row, by the host's clock, launching too."""
    synchronize(device)

    def all_of_them() -> None:
        for _ in range(launches):
            call()
        synchronize(device)

    return host_ms(all_of_them) / launches


def synchronize(device: torch.device) -> None:
    """Wait for the device; the CPU is always ready."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def rotate(calls: Sequence[Call]) -> Call:
    """A call that does one of `calls` each time, in turn."""
    turns = itertools.cycle(calls)
    return lambda: next(turns)()


def captured(call: Call) -> Call:
    """A call that replays, as one CUDA graph, what `call` does on the current stream."""
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for _ in range(_WARM_UPS):
            call()
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return functools.partial(_replay, graph, call)


def _replay(graph: torch.cuda.CUDAGraph, held: Call) -> None:
    # `held` is the captured call: a graph knows addresses alone, and its buffers must stay as long as it is replayed.
    graph.replay()


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
