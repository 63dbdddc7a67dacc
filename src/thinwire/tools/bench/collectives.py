"""The collectives benchmark: sums with codecs beside torch's own in fp32 and bf16, interleaved in one run.

Every round runs each of them once, after a barrier; its time is that of the slowest rank. bf16 is torch's own sum of
bfloat16 tensors, with the casts before and after it. Inputs are Gaussian, and differ from rank to rank.
"""

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import groupby, product
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import collectives
from thinwire.codecs import Codec, codec
from thinwire.collectives.plan import SumAlgorithm
from thinwire.collectives.sums import fewest_roundings
from thinwire.tools.bench import timing
from thinwire.tools.bench.record import Progress, Record, Row, collect
from thinwire.tools.bench.timing import NOTHING, Call, Effort, Sample
from thinwire.tools.local import launch
from thinwire.tools.local.launch import RankSetup

VERB = "all_reduce"
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
    algorithm: SumAlgorithm

    @property
    def key(self) -> str:
        return f"{self.name} {self.algorithm}"


@dataclass(frozen=True)
class CollectiveCase:
    """What is interleaved: rows that share their ranks and size."""

    setup: RankSetup
    numel: int
    entries: tuple[TimedCodec, ...]

    def __str__(self) -> str:
        return f"{VERB}, {self.numel} floats, world {self.setup.world}, {self.setup.link_name}"


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
    codecs: Sequence[str] | None = None,
    rounds: int | None = None,
    quick: bool = False,
    progress: Progress = iter,
) -> Record:
    """A record of kind "collectives"; without `rounds`, as the clock allows."""
    link = setups[0].link
    usual = QUICK_NUMEL if quick else SLOW_NUMEL if link is not None and link.rate < SLOW else NUMEL
    cases = [
        CollectiveCase(setup, numel, tuple(entries(codecs or CODECS, setup.world)))
        for setup, numel in product(setups, numels or [usual])
    ]
    effort = Effort(rounds) if rounds else QUICK if quick else FULL
    return collect("collectives", setups[0].device(0), rows(cases, effort, progress), setups[0].threads)


def entries(names: Sequence[str], world: int) -> list[TimedCodec]:
    """Codecs always compress, by what sends least; "auto" is int8 where it pays, "plain" is exact."""
    own = {AUTO: TimedCodec(AUTO, codec("int8"), "auto"), PLAIN: TimedCodec(PLAIN, codec("none"), "plain")}
    usual = fewest_roundings(world)
    return list(dict.fromkeys(own.get(name) or TimedCodec(str(codec(name)), codec(name), usual) for name in names))


def bytes_formula(algorithm: str, world: int, chosen: Codec, numel: int) -> float:
    """Payload that each rank sends at least: wires of `numel` elements, or fp32 where the algorithm is plain."""
    wire = 4 * numel if algorithm == "plain" else chosen.wire_bytes(numel)
    return (world - 1) * wire * (1 if algorithm == "one_shot" else 2 / world)


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
        least = bytes_formula(ran, case.setup.world, entry.codec, case.numel)
        ms = median(timing.slowest(parts, entry.key))
        yield {
            "verb": VERB,
            "codec": entry.name,
            "algorithm": ran,
            "numel": case.numel,
            # Torch's own sums do not use thinwire's transport: what they send over loopback is unknown.
            "bytes_per_rank": timing.sent(parts, entry.key, "interface_bytes" if link else "transport_bytes") or None,
            "bytes_formula": least,
            "wire_limit_share": 8e3 * least / link.rate / ms if link else None,
            "rel_error": max(math.sqrt(sample.lost) for sample in samples),
            "identical": len({sample.digest for sample in samples}) == 1,
            **timing.beside(parts, entry.key, FP32, BF16),
            **case.setup.columns(),
        }


# The ranks' side.


def measure(case: CollectiveCase, effort: Effort) -> dict[str, CallSample]:
    """This rank's part of a case; all ranks run it together."""
    rank, device = dist.get_rank(), case.setup.device(dist.get_rank())
    source = inputs(rank, case, device)
    exact = reduce(Tensor.add_, (inputs(other, case, device).double() for other in range(case.setup.world)))
    out = torch.empty_like(source)
    out16 = out.bfloat16()  # made once, which favors torch

    def restore() -> None:
        out.copy_(source)

    def in_bf16() -> None:
        out16.copy_(out)
        dist.all_reduce(out16)
        out.copy_(out16)

    calls: dict[str, Call] = {FP32: lambda: dist.all_reduce(out), BF16: in_bf16}
    for one in case.entries:
        calls[one.key] = partial(collectives.all_reduce, out, codec=one.codec, algorithm=one.algorithm)
    samples = {NOTHING: CallSample()}
    for name, call in calls.items():  # auto decides at its first call
        restore()
        call()
        lost = float((exact - out.double()).square().sum() / exact.square().sum())
        samples[name] = CallSample(lost=lost, digest=timing.digest([out]))
    for one in case.entries:
        explained = one.algorithm == AUTO and collectives.explain(out, codec=one.codec).algorithm
        samples[one.key].algorithm = explained or one.algorithm
    how: dict[str, Any] = {"prepare": restore, "device": device, "shaped": bool(case.setup.link)}
    timing.take(calls, samples, effort, transport=lambda name: collectives.traffic().sent, **how)
    return samples


def inputs(rank: int, case: CollectiveCase, device: torch.device) -> Tensor:
    """A rank's input: standard normal, the same whichever rank asks."""
    return torch.randn(case.numel, generator=torch.Generator(device).manual_seed(rank), device=device)
