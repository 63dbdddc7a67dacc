"""Clocks for kernels: interleaved rounds on a CPU or a GPU, captured graphs; threads, and errors of means."""

import contextlib
import functools
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import stdev

import torch

from thinwire.kernels import BACKENDS, Backend
from thinwire.tools.bench.timing import Call, Effort, mean
from thinwire.tools.local.torchrun import synchronize

_CYCLES_PER_MS = 2_000_000  # about
_WARM_UPS = 3  # calls before a capture: kernels are compiled and tables made, which no graph can hold


@dataclass(frozen=True)
class KernelEffort(Effort):
    """How much a run measures; more rounds => steadier medians."""

    launches: int = 1  # of a call in a row, on a GPU; more => less of the clock's own error
    slow_rounds: int = 3  # of what is slow: torch eager
    slow_numel: int = 1 << 21  # elements at most, where something slow is compared


_EFFORTS = {
    ("cpu", False): KernelEffort(9),
    ("cpu", True): KernelEffort(3, slow_rounds=1, slow_numel=1 << 18),
    ("cuda", False): KernelEffort(20, launches=5, slow_numel=1 << 24),
    ("cuda", True): KernelEffort(5, launches=3, slow_rounds=1, slow_numel=1 << 18),
}


def effort_on(device: torch.device, quick: bool) -> KernelEffort:
    return _EFFORTS["cuda" if device.type == "cuda" else "cpu", quick]


def name_of(backend: Backend) -> str:
    return next(name for name, entry in BACKENDS.items() if entry is backend)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def interleave(
    calls: Mapping[str, Call], rounds: int, device: torch.device, launches: int = 1, ahead_ms: float = 1.0
) -> dict[str, list[float]]:
    """Milliseconds of every call in every round: all calls once per round, so that a slow spell hits them alike.

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
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(int(ahead_ms * _CYCLES_PER_MS))
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
    """Milliseconds per call where nothing runs ahead: `launches` in a row, by the host's clock, launching too."""

    def all_of_them() -> None:
        for _ in range(launches):
            call()
        synchronize(device)

    synchronize(device)
    return host_ms(all_of_them) / launches


def rotate(calls: Sequence[Call]) -> Call:
    turns = itertools.cycle(calls)
    return lambda: next(turns)()


def captured(call: Call) -> Call:
    """A call that replays, as one CUDA graph, what `call` does on the current stream."""
    side = torch.cuda.Stream()
    current = torch.cuda.current_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for _ in range(_WARM_UPS):
            call()
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    # A graph knows addresses alone: the captured call holds its buffers as long as it is replayed.
    return functools.partial(lambda held: graph.replay(), call)


def note_of(error: Exception) -> str:
    """What a row says of a case that failed: the kind of the error and the first line of its text."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first[:200]}"


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """torch, and thinwire's kernels with it, use `count` threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def standard_error(values: Sequence[float]) -> float | None:
    """The standard error of the mean; None where there is no mean, or one seed."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 and mean(values) is not None else None
