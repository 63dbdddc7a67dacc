"""Calls that all ranks make together, timed by turns on each rank (`take`), and the columns made of those times."""

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, median

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.tools.bench.record import Row
from thinwire.tools.local import link as links
from thinwire.tools.local.torchrun import synchronize

Call = Callable[[], object]
CPU = torch.device("cpu")
NOTHING = "nothing"  # an empty call: it shows what the barriers around a call send


@dataclass(frozen=True)
class Effort:
    """How much a run measures; more rounds => steadier medians."""

    rounds: int  # at least
    most: int = 0  # rounds, while `seconds` last
    seconds: float = 0.0  # per call

    def goes_on(self, rounds: int, seconds: float) -> bool:
        """Whether another round follows after so many, which took so many seconds per call."""
        return rounds < self.rounds or (rounds < self.most and seconds < self.seconds)


@dataclass
class Sample:
    """One rank's measurements of one call, round by round."""

    ms: list[float] = field(default_factory=list)  # until all is done
    cpu_ms: list[float] = field(default_factory=list)
    interface_bytes: list[int] = field(default_factory=list)
    transport_bytes: list[int] = field(default_factory=list)  # empty where torch sends by itself
    host_ms: list[float] = field(default_factory=list, kw_only=True)  # until the call returns; a GPU works on


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

    A call follows `prepare` and a barrier. `shaped`: bytes are counted at the interface of this rank's host.
    `transport` returns the bytes a call has passed to thinwire's transport so far, or None.
    """
    names = list(samples)
    begun = time.monotonic()
    rounds = 0
    while _rank_0_decides(effort.goes_on(rounds, (time.monotonic() - begun) / len(names)), device):
        first = rounds % len(names)  # each has every place in turn: what runs before a call may help or hurt
        for name in names[first:] + names[:first]:
            prepare()
            _time(calls.get(name, lambda: None), samples[name], shaped, partial(transport, name), device)
        rounds += 1


def _time(call: Call, sample: Sample, shaped: bool, transport: Callable[[], int | None], device: torch.device) -> None:
    meet(device)
    interface = links.sent() if shaped else 0
    before = transport()
    cpu = time.process_time()
    start = time.perf_counter()
    call()
    sample.host_ms.append(1e3 * (time.perf_counter() - start))
    synchronize(device)
    sample.ms.append(1e3 * (time.perf_counter() - start))
    sample.cpu_ms.append(1e3 * (time.process_time() - cpu))
    dist.barrier()  # by then this rank's buffers are sent, too
    sample.interface_bytes.append((links.sent() if shaped else 0) - interface)
    if before is not None:
        sample.transport_bytes.append((transport() or 0) - before)


def meet(device: torch.device) -> None:
    """Return when all ranks are here and their GPUs are idle."""
    synchronize(device)
    dist.barrier()
    synchronize(device)


def _rank_0_decides(mine: int, device: torch.device) -> int:
    shared = torch.tensor([mine], device=device)
    dist.broadcast(shared, 0)
    return int(shared)


def digest(tensors: Iterable[Tensor]) -> str:
    """The same where all bits are the same."""
    found = hashlib.blake2b()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().cpu().numpy().tobytes())
    return found.hexdigest()


# Columns.


def percentiles(times: Sequence[float]) -> tuple[float, float, float]:
    p20, p50, p80 = (float(p) for p in np.percentile(times, [20, 50, 80]))
    return p20, p50, p80


def columns(times: Sequence[float]) -> Row:
    p20, p50, p80 = percentiles(times)
    return {"ms_p50": p50, "ms_p20": p20, "ms_p80": p80}


def mean(values: Sequence[float]) -> float | None:
    """The mean over seeds; None where there is none, or where one of them diverged."""
    return fmean(values) if values and all(map(math.isfinite, values)) else None


def slowest(samples: Samples, name: str, clock: str = "ms") -> list[float]:
    """Milliseconds of each round of a call: those of the slowest rank."""
    return [max(of_ranks) for of_ranks in zip(*(getattr(part[name], clock) for part in samples), strict=True)]


def beside(samples: Samples, name: str, plain: str, bf16: str) -> Row:
    """A call's times, beside torch's own in fp32 and bf16."""
    times = slowest(samples, name)
    plain_ms, bf16_ms = (median(slowest(samples, other)) for other in (plain, bf16))
    return {
        **columns(times),
        "plain_ms": plain_ms,
        "bf16_ms": bf16_ms,
        "speedup_plain": plain_ms / median(times),
        "speedup_bf16": bf16_ms / median(times),
        "cpu_ms_per_rank": cpu_ms([part[name] for part in samples]),
        "rounds": len(times),
        "host_ms": median(slowest(samples, name, "host_ms")),
    }


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
