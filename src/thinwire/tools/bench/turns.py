"""Calls that all ranks make together, timed by turns: the ranks' side (`take`) and what is made of it."""

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.tools.bench import link as links
from thinwire.tools.bench.timing import Call, Effort

NOTHING = "nothing"  # a call beside the others: it shows what the barriers around a call send


@dataclass
class Sample:
    """One rank's measurements of one call, round by round."""

    ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    interface_bytes: list[int] = field(default_factory=list)
    transport_bytes: list[int] = field(default_factory=list)  # empty where torch sends by itself


Samples = Sequence[Mapping[str, Sample]]  # by rank, then by call


def take(
    calls: Mapping[str, Call],
    samples: Mapping[str, Sample],
    effort: Effort,
    *,
    shaped: bool,
    transport: Callable[[str], int | None],
    prepare: Call = lambda: None,
) -> None:
    """Fill `samples`, of all calls and NOTHING; rank 0 decides when there are enough rounds.

    A call follows `prepare` and a barrier. `shaped`: bytes are counted at the interface of this rank's host;
    `transport` says what a call has handed to thinwire's transport so far, or None.
    """
    names = list(samples)
    begun = time.monotonic()
    rounds = 0
    while _rank_0_says(effort.goes_on(rounds, (time.monotonic() - begun) / len(names))):
        first = rounds % len(names)  # each has every place in turn: what runs before a call may help or hurt
        for name in names[first:] + names[:first]:
            prepare()
            _time(calls.get(name, lambda: None), samples[name], shaped, partial(transport, name))
        rounds += 1


def _time(call: Call, sample: Sample, shaped: bool, transport: Callable[[], int | None]) -> None:
    dist.barrier()
    interface = links.sent() if shaped else 0
    handed = transport()
    cpu = time.process_time()
    start = time.perf_counter()
    call()
    sample.ms.append(1e3 * (time.perf_counter() - start))
    sample.cpu_ms.append(1e3 * (time.process_time() - cpu))
    # A call is over when all was received; what this rank still has in its buffers is sent by then.
    dist.barrier()
    sample.interface_bytes.append((links.sent() if shaped else 0) - interface)
    if handed is not None:
        sample.transport_bytes.append((transport() or 0) - handed)


def _rank_0_says(mine: bool) -> bool:
    flag = torch.tensor([mine])
    dist.broadcast(flag, 0)
    return bool(flag.item())


def digest(tensors: Iterable[Tensor]) -> str:
    """The same where all bits are."""
    found = hashlib.blake2b()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def slowest(samples: Samples, name: str) -> list[float]:
    """Milliseconds of each round of a call: those of the slowest rank."""
    return [max(of_ranks) for of_ranks in zip(*(part[name].ms for part in samples), strict=True)]


def sent(samples: Samples, name: str, counter: str) -> float | None:
    """Bytes per call by the rank that sends most, less those of the barriers; None where `counter` counted none."""
    counted = [
        median(getattr(part[name], counter)) - median(getattr(part[NOTHING], counter) or [0])
        for part in samples
        if getattr(part[name], counter)
    ]
    return max(counted, default=None)
