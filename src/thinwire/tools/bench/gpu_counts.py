"""What calls put on a GPU, counted by torch's profiler: launches, and the time of kernels and copies.

Counts are steady where times are not. A call's launches are those the host made while it ran; its kernels are those
that belong to these launches, whenever they ran. A kernel of NCCL that waits for other ranks counts as long as it does.
"""

import json
import tempfile
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from torch.profiler import profile, record_function

from thinwire.tools.bench.record import Row
from thinwire.tools.bench.timing import Call

MARK = "thinwire bench: "  # before the name of a call
CALLS = 3  # of each, profiled
LAUNCHES = ("Launch", "Memcpy", "Memset")  # in the names of what the host asks of CUDA
HOST = ("cuda_runtime", "cuda_driver")
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")

Event = Mapping[str, Any]  # of a trace, as torch's profiler exports it


@dataclass(frozen=True)
class GpuCount:
    """Of one call."""

    launches: int
    busy_ms: float


def take(calls: Mapping[str, Call], prepare: Call, meet: Call) -> dict[str, list[GpuCount]]:
    """Counts of CALLS calls each, after `prepare`; `meet` returns when nothing is under way and all ranks are there."""
    with profile() as seen:
        for name, call in [*calls.items()] * CALLS:
            prepare()
            meet()
            with record_function(f"{MARK}{name}"):
                call()
        meet()
    with tempfile.TemporaryDirectory(prefix="thinwire-bench-") as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        return counts(json.loads(path.read_text())["traceEvents"])


def counts(events: Sequence[Event]) -> dict[str, list[GpuCount]]:
    """By name, in the order of the calls."""
    timed = sorted((event for event in events if "dur" in event and "cat" in event), key=_start)
    starts = list(map(_start, timed))
    busy: dict[Any, float] = {}
    for event in timed:
        if event["cat"] in DEVICE:
            launch = event["args"]["correlation"]
            busy[launch] = busy.get(launch, 0.0) + event["dur"]
    found: dict[str, list[GpuCount]] = {}
    for event in timed:
        if event["cat"] == "user_annotation" and event["name"].startswith(MARK):
            end = _start(event) + event["dur"]
            within = timed[bisect_left(starts, _start(event)) : bisect_left(starts, end)]
            found.setdefault(event["name"].removeprefix(MARK), []).append(_count(within, busy))
    return found


def _start(event: Event) -> float:
    return float(event["ts"])


def _count(events: Iterable[Event], busy: Mapping[Any, float]) -> GpuCount:
    launched: set[Any] = {
        event["args"]["correlation"]
        for event in events
        if event["cat"] in HOST and any(word in event["name"] for word in LAUNCHES)
    }
    if busy:  # a launch inside another has no kernel of its own
        launched &= busy.keys()
    return GpuCount(len(launched), 1e-3 * sum(busy.get(launch, 0.0) for launch in launched))


def columns(by_rank: Sequence[Sequence[GpuCount]]) -> Row:
    """Of a call: the usual number of launches, the shortest time a GPU was busy with it."""
    every = [count for of_rank in by_rank for count in of_rank]
    if not every:
        return dict.fromkeys(("gpu_busy_ms", "launches"))
    return {
        "gpu_busy_ms": min(count.busy_ms for count in every) or None,
        "launches": int(median(count.launches for count in every)),
    }
