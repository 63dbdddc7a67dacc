"""The collectives benchmark: a verb with a codec beside torch's own in fp32 and bf16, interleaved in one run.

Every round runs each of them once, after a barrier; its time is that of the slowest rank. bf16 is torch's own verb on
bfloat16 tensors, with the casts before and after it. Inputs are Gaussian, and differ from rank to rank.
"""

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import collectives
from thinwire.codecs import Codec, codec
from thinwire.collectives import groups
from thinwire.tools.bench import timing
from thinwire.tools.bench.record import Progress, Record, Row, collect
from thinwire.tools.bench.timing import CPU, NOTHING, Call, Effort, Sample
from thinwire.tools.local import launch
from thinwire.tools.local.launch import RankSetup

VERBS = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "all_to_all_single", "broadcast")
IN_PLACE = ("all_reduce", "broadcast")  # the others cut a tensor into equal parts, one per rank
SHARED = (*IN_PLACE, "all_gather_into_tensor")  # after them all ranks hold the same
ALGORITHMS = ("one_shot", "two_phase")
AUTO, PLAIN = "auto", "plain"  # names beside the codecs: int8 where it pays, and thinwire's uncompressed path
FP32, BF16 = "torch fp32", "torch bf16"  # what runs beside the entries
CODECS = ("int8", "lloyd4", "lloyd2", "lloyd1", AUTO)
WORLDS = (2, 4)
NUMEL, SLOW_NUMEL, QUICK_NUMEL = 25_000_000, 8_000_000, 1 << 18
SLOW = 1e9  # bits per second; below, SLOW_NUMEL: a run would take an hour
FULL = Effort(rounds=5, most=300, seconds=2.0)
QUICK = Effort(rounds=3, most=20, seconds=0.2)


@dataclass(frozen=True)
class TimedCodec:
    """One line of a table: a codec and an algorithm."""

    name: str  # a codec, "auto" or "plain"
    codec: Codec
    algorithm: str

    @property
    def key(self) -> str:
        return f"{self.name} {self.algorithm}"


@dataclass(frozen=True)
class CollectiveCase:
    """What is interleaved: rows that share their verb, ranks and size."""

    setup: RankSetup
    verb: str
    numel: int
    entries: tuple[TimedCodec, ...]

    @property
    def world(self) -> int:
        return self.setup.world

    def __str__(self) -> str:
        return f"{self.verb}, {self.numel} floats, world {self.world}, {self.setup.link_name}"


@dataclass
class CallSample(Sample):
    lost: float = 0.0  # NMSE against the exact result
    digest: str = ""
    algorithm: str = ""  # the one that ran


Parts = Sequence[dict[str, CallSample]]  # by rank, then by entry


def run(
    setups: Sequence[RankSetup],
    *,
    numels: Sequence[int] | None = None,
    verbs: Sequence[str] = ("all_reduce",),
    codecs: Sequence[str] | None = None,
    rounds: int | None = None,
    quick: bool = False,
    progress: Progress = iter,
) -> Record:
    """A record of kind "collectives"; without `rounds`, as the clock allows."""
    link = setups[0].link
    usual = QUICK_NUMEL if quick else SLOW_NUMEL if link is not None and link.rate < SLOW else NUMEL
    cases = [
        case_of(setup, verb, numel, entries(codecs or CODECS, verb, setup.world))
        for setup, verb, numel in product(setups, verbs, numels or [usual])
    ]
    effort = Effort(rounds) if rounds else QUICK if quick else FULL
    return collect("collectives", setups[0].device(0), rows(cases, effort, progress), setups[0].threads)


def case_of(setup: RankSetup, verb: str, numel: int, timed: Sequence[TimedCodec]) -> CollectiveCase:
    """A tensor that is cut into parts has a number of elements that the ranks divide."""
    whole = numel if verb in IN_PLACE else max(setup.world, numel - numel % setup.world)
    return CollectiveCase(setup, verb, whole, tuple(timed))


def entries(names: Sequence[str], verb: str, world: int) -> list[TimedCodec]:
    """Codecs always compress, a sum by what sends least; "auto" is int8 where it pays, "plain" is exact."""
    algorithm = "compressed" if verb != "all_reduce" else ALGORITHMS[world > 2]
    own = {name: TimedCodec(name, codec(other), name) for name, other in ((AUTO, "int8"), (PLAIN, "none"))}
    return list(dict.fromkeys(own.get(name) or TimedCodec(str(codec(name)), codec(name), algorithm) for name in names))


def bytes_formula(verb: str, algorithm: str, world: int, chosen: Codec, numel: int) -> float:
    """Payload that each rank sends at least: wires of `numel` elements, or fp32 where the algorithm is plain."""
    wire = 4 * numel if algorithm == "plain" else chosen.wire_bytes(numel)
    if algorithm == "one_shot":
        return (world - 1) * wire
    if verb == "broadcast":
        return wire  # by the source: a part to each rank, and these exchange their parts
    return (2 if verb == "all_reduce" else 1) * (world - 1) / world * wire


def rows(cases: Sequence[CollectiveCase], effort: Effort, progress: Progress) -> Generator[Row]:
    """Ranks stay for all cases of a world and placement, which follow each other."""
    for setup, of_setup in groupby(progress(cases), lambda case: case.setup):
        with launch.ranks(setup) as world:
            for case in of_setup:
                yield from rows_of(case, world.run(measure, case, effort))


def rows_of(case: CollectiveCase, parts: Parts) -> Iterator[Row]:
    link = case.setup.link
    for entry in case.entries:
        samples = [part[entry.key] for part in parts]
        ran = samples[0].algorithm
        least = bytes_formula(case.verb, ran, case.world, entry.codec, case.numel)
        ms = median(timing.slowest(parts, entry.key))
        yield {
            "verb": case.verb,
            "codec": entry.name,
            "algorithm": ran,
            "numel": case.numel,
            # Torch's own verbs do not use thinwire's transport: what they send over loopback is unknown.
            "bytes_per_rank": timing.sent(parts, entry.key, "interface_bytes" if link else "transport_bytes") or None,
            "bytes_formula": least,
            "wire_limit_share": 8e3 * least / link.rate / ms if link else None,
            "rel_error": max(math.sqrt(sample.lost) for sample in samples),
            "identical": len({sample.digest for sample in samples}) == 1 if case.verb in SHARED else None,
            **timing.beside(parts, entry.key, FP32, BF16),
            **case.setup.columns(),
        }


# The ranks' side.


def measure(case: CollectiveCase, effort: Effort) -> dict[str, CallSample]:
    """This rank's part of a case; all ranks run it together."""
    with torch.no_grad():
        bench = _RankBench(case)
        for name in bench.calls:
            bench.check(name)
        bench.samples[NOTHING] = CallSample()
        how: dict[str, Any] = {"prepare": bench.restore, "device": bench.out.device, "shaped": bool(case.setup.link)}
        timing.take(bench.calls, bench.samples, effort, transport=lambda name: collectives.traffic().sent, **how)
    return bench.samples


class _RankBench:
    """The tensors of a case on this rank, the calls that are compared, and what was measured of them."""

    def __init__(self, case: CollectiveCase) -> None:
        self.case = case
        rank = dist.get_rank()
        device = case.setup.device(rank)
        self.source = inputs(rank, case, device)
        parts = case.world if case.verb == "reduce_scatter_tensor" else 1
        self.out = torch.empty(case.numel // parts, device=device)
        self.exact = exact(rank, case, device)
        self.torch = TORCH[case.verb]
        self.calls: dict[str, Call] = {FP32: lambda: self.torch(self.out, self.source), BF16: self._in_bf16()}
        self.calls |= {entry.key: self._compressed(entry) for entry in case.entries}
        self.samples = {name: CallSample(algorithm="plain") for name in (FP32, BF16)}
        for entry in case.entries:
            self._call(entry.key)  # auto decides at its first call
            is_auto = entry.algorithm == "auto" and case.verb == "all_reduce"
            ran = collectives.explain(self.out, codec=entry.codec).algorithm if is_auto else entry.algorithm
            self.samples[entry.key] = CallSample(algorithm=ran)

    def _in_bf16(self) -> Call:
        """torch's verb on bfloat16 copies, the casts included. Buffers are made once, which favors it."""
        source = self.out if self.case.verb in IN_PLACE else self.source
        out16 = self.out.bfloat16()
        source16 = out16 if source is self.out else source.bfloat16()

        def call() -> None:
            source16.copy_(source)
            self.torch(out16, source16)
            self.out.copy_(out16)

        return call

    def _compressed(self, entry: TimedCodec) -> Call:
        verb = getattr(collectives, self.case.verb)
        given = {"all_reduce": (self.out,), "broadcast": (self.out, 0)}.get(self.case.verb, (self.out, self.source))
        return lambda: verb(*given, codec=entry.codec, algorithm=entry.algorithm)

    def check(self, name: str) -> None:
        """Call once, and compare the result with the exact one; it warms up what is timed later, too."""
        sample = self.samples[name]
        self._call(name)
        error = self.exact - self.out.double()
        sample.lost = float(error.square().sum() / self.exact.square().sum())
        sample.digest = timing.digest([self.out])

    def restore(self) -> None:
        if self.case.verb in IN_PLACE:
            self.out.copy_(self.source)
        else:
            self.out.zero_()

    def _call(self, name: str) -> None:
        self.restore()
        self.calls[name]()


TORCH: dict[str, Callable[[Tensor, Tensor], object]] = {
    "all_reduce": lambda out, source: dist.all_reduce(out),
    "reduce_scatter_tensor": lambda out, source: groups.reduce_scatter_single(out, source),
    "all_gather_into_tensor": lambda out, source: groups.all_gather_single(out, source),
    "all_to_all_single": lambda out, source: dist.all_to_all_single(out, source),
    "broadcast": lambda out, source: dist.broadcast(out, 0),
}


def inputs(rank: int, case: CollectiveCase, device: torch.device = CPU) -> Tensor:
    """A rank's input: standard normal, the same whichever rank asks."""
    numel = case.numel // case.world if case.verb == "all_gather_into_tensor" else case.numel
    return torch.randn(numel, generator=torch.Generator(device).manual_seed(rank), device=device)


def exact(rank: int, case: CollectiveCase, device: torch.device = CPU) -> Tensor:
    """What a verb should give a rank, in fp64."""
    part = slice(rank * (case.numel // case.world), (rank + 1) * (case.numel // case.world))
    every = (inputs(other, case, device).double() for other in range(case.world))
    if case.verb == "broadcast":
        return next(every)
    if case.verb == "all_gather_into_tensor":
        return torch.cat(list(every))
    if case.verb == "all_to_all_single":
        return torch.cat([found[part] for found in every])
    total = torch.zeros(case.numel, dtype=torch.float64, device=device)
    for found in every:
        total += found
    return total[part].clone() if case.verb == "reduce_scatter_tensor" else total
