"""Calls that all ranks make together, timed by turns: the ranks' side (`take`) and what is made of it.

[Note: Counts] What calls put on a GPU is counted by torch's profiler, since counts are steady where times are not. A
call's launches are those the host made while it ran; its kernels are those that belong to these launches, whenever they
ran. A kernel of NCCL that waits for other ranks counts as long as it does. A process that was profiled stays slower: on
an H200 its calls then cost the host a third more. So counting comes last, and nothing is timed in that process again.
"""

import hashlib
import json
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import profile, record_function

from thinwire.tools.bench import link as links, timing
from thinwire.tools.bench.record import Row
from thinwire.tools.bench.timing import Call, Effort

CPU = torch.device("cpu")
STEADY_S = 0.3  # of calls in a row, at most
STEADY = (6, 24)  # calls in a row, at least and at most; the first third only warms up
NOTHING = "nothing"  # a call beside the others: it shows what the barriers around a call send
MARK = "thinwire bench: "  # before the name of a call
PROFILED = 3  # calls of each
LAUNCHES = ("Launch", "Memcpy", "Memset")  # in the names of what the host asks of CUDA
HOST = ("cuda_runtime", "cuda_driver")
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
Event = Mapping[str, Any]  # of a trace, as torch's profiler exports it


@dataclass(frozen=True)
class GpuCount:
    """Of one call: [Note: Counts]."""

    launches: int
    busy_ms: float


@dataclass
class Sample:
    """One rank's measurements of one call, round by round."""

    ms: list[float] = field(default_factory=list)  # until all is done
    cpu_ms: list[float] = field(default_factory=list)
    interface_bytes: list[int] = field(default_factory=list)
    transport_bytes: list[int] = field(default_factory=list)  # empty where torch sends by itself
    host_ms: list[float] = field(default_factory=list, kw_only=True)  # until the call returns
    steady_ms: list[float] = field(default_factory=list, kw_only=True)  # the same, of calls that follow each other
    gpu: list[GpuCount] = field(default_factory=list, kw_only=True)  # of a few calls after the timed ones


Samples = Sequence[Mapping[str, Sample]]  # by rank, then by call


def take(
    calls: Mapping[str, Call],
    samples: Mapping[str, Sample],
    effort: Effort,
    *,
    shaped: bool,
    transport: Callable[[str], int | None],
    prepare: Call = lambda: None,
    device: torch.device = CPU,
) -> None:
    """Fill `samples`, of all calls and NOTHING; rank 0 decides when there are enough rounds.

    A call follows `prepare` and a barrier. `shaped`: bytes are counted at the interface of this rank's host;
    `transport` says what a call has handed to thinwire's transport so far, or None. What calls work on is on `device`.
    """
    names = list(samples)
    begun = time.monotonic()
    rounds = 0
    while _rank_0_says(effort.goes_on(rounds, (time.monotonic() - begun) / len(names)), device):
        first = rounds % len(names)  # each has every place in turn: what runs before a call may help or hurt
        for name in names[first:] + names[:first]:
            prepare()
            _time(calls.get(name, lambda: None), samples[name], shaped, partial(transport, name), device)
        rounds += 1
    if device.type == "cuda":
        for name, call in calls.items():
            samples[name].steady_ms = _in_a_row(call, samples[name], device)
        for name, counted in profiled(calls, prepare, partial(meet, device)).items():
            samples[name].gpu = counted


def _time(call: Call, sample: Sample, shaped: bool, transport: Callable[[], int | None], device: torch.device) -> None:
    meet(device)
    interface = links.sent() if shaped else 0
    handed = transport()
    cpu = time.process_time()
    start = time.perf_counter()
    call()
    sample.host_ms.append(1e3 * (time.perf_counter() - start))
    timing.synchronize(device)
    sample.ms.append(1e3 * (time.perf_counter() - start))
    sample.cpu_ms.append(1e3 * (time.process_time() - cpu))
    # A call is over when all was received; what this rank still has in its buffers is sent by then.
    dist.barrier()
    sample.interface_bytes.append((links.sent() if shaped else 0) - interface)
    if handed is not None:
        sample.transport_bytes.append((transport() or 0) - handed)


def _in_a_row(call: Call, sample: Sample, device: torch.device) -> list[float]:
    """Milliseconds until each of several calls returns, none of which waits for the one before; rank 0 counts them."""
    least, most = STEADY
    count = _rank_0_says(int(1e3 * STEADY_S / max(median(sample.ms), 1e-3)), device)
    times = []
    meet(device)
    for _ in range(min(most, max(least, count))):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    meet(device)
    return times[len(times) // 3 :]


def meet(device: torch.device) -> None:
    """Go on when all ranks are here; a GPU then has nothing left to do."""
    timing.synchronize(device)
    dist.barrier()
    timing.synchronize(device)


def _rank_0_says(mine: int, device: torch.device) -> int:
    said = torch.tensor([mine], device=device)
    dist.broadcast(said, 0)
    return int(said)


def digest(tensors: Iterable[Tensor]) -> str:
    """The same where all bits are."""
    found = hashlib.blake2b()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().cpu().numpy().tobytes())
    return found.hexdigest()


def slowest(samples: Samples, name: str, clock: str = "ms") -> list[float]:
    """Milliseconds of each round of a call: those of the slowest rank."""
    return [max(of_ranks) for of_ranks in zip(*(getattr(part[name], clock) for part in samples), strict=True)]


def beside(samples: Samples, name: str, plain: str, bf16: str) -> Row:
    """The times of a call, and of torch's own in fp32 and bf16."""
    times = slowest(samples, name)
    plain_ms, bf16_ms = (median(slowest(samples, other)) for other in (plain, bf16))
    return {
        **timing.columns(times),
        "plain_ms": plain_ms,
        "bf16_ms": bf16_ms,
        "speedup_plain": plain_ms / median(times),
        "speedup_bf16": bf16_ms / median(times),
    }


def on_gpu(samples: Samples, name: str, plain: str) -> Row:
    """What a call costs the host and the GPU, and what torch's own does; nothing where there was no GPU."""
    counted, usual = (gpu_columns([part[call].gpu for part in samples]) for call in (name, plain))
    if counted["launches"] is None:
        return {"host_ms": None, **counted}
    host_ms, plain_host_ms = (median(slowest(samples, call, "host_ms")) for call in (name, plain))
    steady_ms, plain_steady_ms = (median(slowest(samples, call, "steady_ms")) for call in (name, plain))
    beside = {"plain_host_ms": plain_host_ms, "plain_host_steady_ms": plain_steady_ms}
    return {"host_ms": host_ms, "host_steady_ms": steady_ms, **counted, **beside, "plain_launches": usual["launches"]}


def cpu_ms(samples: Sequence[Sample]) -> float:
    return fmean(median(sample.cpu_ms) for sample in samples)


def sent(samples: Samples, name: str, counter: str) -> float | None:
    """Bytes per call by the rank that sends most, less those of the barriers; None where `counter` counted none."""
    counted = [
        median(getattr(part[name], counter)) - median(getattr(part[NOTHING], counter) or [0])
        for part in samples
        if getattr(part[name], counter)
    ]
    return max(counted, default=None)


def profiled(calls: Mapping[str, Call], prepare: Call, meet: Call) -> dict[str, list[GpuCount]]:
    """Counts of PROFILED calls each, after `prepare`; `meet` returns when nothing is under way on any rank."""
    with profile() as seen:
        for name, call in [*calls.items()] * PROFILED:
            prepare()
            meet()
            with record_function(f"{MARK}{name}"):
                call()
        meet()
    with tempfile.TemporaryDirectory(prefix="thinwire-bench-") as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        return launches_in(json.loads(path.read_text())["traceEvents"])


def launches_in(events: Sequence[Event]) -> dict[str, list[GpuCount]]:
    """By name, in the order of the calls."""
    timed = sorted((event for event in events if "dur" in event and "cat" in event), key=lambda event: event["ts"])
    starts = [event["ts"] for event in timed]
    busy: dict[Any, float] = {}
    for event in timed:
        if event["cat"] in DEVICE:
            launch = event["args"]["correlation"]
            busy[launch] = busy.get(launch, 0.0) + event["dur"]
    found: dict[str, list[GpuCount]] = {}
    for event in timed:
        if event["cat"] == "user_annotation" and event["name"].startswith(MARK):
            within = timed[bisect_left(starts, event["ts"]) : bisect_left(starts, event["ts"] + event["dur"])]
            found.setdefault(event["name"].removeprefix(MARK), []).append(_count(within, busy))
    return found


def _count(events: Iterable[Event], busy: Mapping[Any, float]) -> GpuCount:
    launched: set[Any] = {
        event["args"]["correlation"]
        for event in events
        if event["cat"] in HOST and any(word in event["name"] for word in LAUNCHES)
    }
    if busy:  # a launch inside another has no kernel of its own
        launched &= busy.keys()
    return GpuCount(len(launched), 1e-3 * sum(busy.get(launch, 0.0) for launch in launched))


def gpu_columns(by_rank: Sequence[Sequence[GpuCount]]) -> Row:
    """Of a call: the usual number of launches, the shortest time a GPU was busy with it."""
    every = [count for of_rank in by_rank for count in of_rank]
    if not every:
        return dict.fromkeys(("gpu_busy_ms", "launches"))
    return {
        "gpu_busy_ms": min(count.busy_ms for count in every) or None,
        "launches": int(median(count.launches for count in every)),
    }
