"""The collectives benchmark: a verb in a codec beside torch's own in fp32 and bf16, interleaved in one run.

Every round runs each of them once, after a barrier; its time is that of the slowest rank. bf16 is torch's own verb on
bfloat16 tensors, with the casts before and after it. Inputs are Gaussian, and differ from rank to rank.

[Note: Nodes] With nodes several ranks share a host and its link, which what they send to each other does not cross.
Bytes are then those that a node sends across. A pair of codecs, int8/lloyd4, is summed inside the nodes in the first
and across them in the second; a single one is summed flat, whoever is where.
"""

import math
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from thinwire import collectives
from thinwire.codecs import Codec, codec
from thinwire.collectives import cost, transport
from thinwire.collectives.channel import channel_of
from thinwire.tools.bench import launch, link as links, timing, turns
from thinwire.tools.bench.codec import nmse
from thinwire.tools.bench.launch import World
from thinwire.tools.bench.link import ShapedLink
from thinwire.tools.bench.record import BenchError, Progress, Record, Row, collect
from thinwire.tools.bench.timing import Call, Effort
from thinwire.tools.bench.turns import NOTHING, Sample

VERBS = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "all_to_all_single", "broadcast")
IN_PLACE = ("all_reduce", "broadcast")  # the others cut a tensor into equal parts, one per rank
SHARED = (*IN_PLACE, "all_gather_into_tensor")  # after them all ranks hold the same
PAIR = "/"  # between the codec inside a node and that across
AUTO, PLAIN = "auto", "plain"  # names beside the codecs: int8 where it pays, and thinwire's uncompressed path
FP32, BF16 = "torch fp32", "torch bf16"  # what runs beside the entries
CODECS = ("int8", "lloyd4", "lloyd2", "lloyd1", AUTO)
WORLDS = (2, 4)
NUMEL = 25_000_000
SLOW_NUMEL = 8_000_000
QUICK_NUMEL = 1 << 18
SLOW = 1e9  # bits per second; below, SLOW_NUMEL
FULL = Effort(rounds=5, most=300, seconds=2.0)
QUICK = Effort(rounds=3, most=20, seconds=0.2)


@dataclass(frozen=True)
class Entry:
    name: str  # a codec, a pair of them, "auto" or "plain"
    codec: Codec  # of a hierarchy: of what goes across nodes
    algorithm: str
    inside: Codec | None = None  # of a hierarchy


@dataclass(frozen=True)
class CollectiveCase:
    """What is interleaved: rows that share their verb, world, link and size."""

    verb: str
    world: int
    link: ShapedLink | None
    numel: int
    entries: tuple[Entry, ...]
    nodes: int | None = None  # None => every rank has a link of its own

    def __str__(self) -> str:
        nodes = f" on {self.nodes} nodes" if self.nodes else ""
        return f"{self.verb}, {self.numel} floats, world {self.world}{nodes}, {self.link or 'loopback'}"


@dataclass
class CallSample(Sample):
    lost: float = 0.0  # NMSE against the exact result
    digest: str = ""
    repeats: bool = True  # a second call gave the same bytes; asked only where ranks hold different results
    algorithm: str = ""  # the one that ran


Parts = Sequence[dict[str, CallSample]]  # by rank, then by entry


def run(
    worlds: Sequence[int] = WORLDS,
    link: ShapedLink | None = None,
    numels: Sequence[int] | None = None,
    verbs: Sequence[str] = ("all_reduce",),
    codecs: Sequence[str] = CODECS,
    rounds: int | None = None,
    quick: bool = False,
    nodes: int | None = None,
    progress: Progress = iter,
) -> Record:
    """A record of kind "collectives", on gloo; without `rounds`, as many as the clock allows."""
    if link is not None:
        links.check()
    for world in worlds:
        check_nodes(nodes, world, link, codecs, verbs)
    cases = [
        CollectiveCase(verb, world, link, divisible(verb, world, numel), entries(codecs, verb, world), nodes)
        for world, verb, numel in product(worlds, verbs, numels or [default_numel(link, quick)])
    ]
    effort = Effort(rounds) if rounds else QUICK if quick else FULL
    with timing.threads(launch.THREADS):
        return collect("collectives", torch.device("cpu"), _rows(cases, effort, progress))


def check_nodes(
    nodes: int | None, world: int, link: ShapedLink | None, codecs: Sequence[str], verbs: Sequence[str]
) -> None:
    """Refuse nodes that ranks do not fill evenly, and pairs of codecs where there is nothing to be inside of."""
    pairs = [name for name in codecs if PAIR in name]
    if any(name.count(PAIR) > 1 for name in pairs):
        raise BenchError(f"expected pairs of codecs, inside nodes and across them, got {', '.join(pairs)}")
    if nodes is None and pairs:
        raise BenchError(f"{pairs[0]} is a pair of codecs, inside nodes and across them: say how many nodes")
    if pairs and set(verbs) != {"all_reduce"}:
        raise BenchError(f"{pairs[0]} is a pair of codecs, and only all_reduce takes one")
    if nodes is not None and (nodes < 2 or world % nodes or world == nodes):
        raise BenchError(f"{world} ranks do not make {nodes} nodes: take 2 or more, of 2 or more ranks each")
    if nodes is not None and link is None:
        raise BenchError("nodes differ from ranks by what their link carries: name one")


def default_numel(link: ShapedLink | None, quick: bool) -> int:
    """Elements of a message where none are asked for: fewer on a slow link, or a run would take an hour."""
    if quick:
        return QUICK_NUMEL
    return SLOW_NUMEL if link is not None and link.rate < SLOW else NUMEL


def divisible(verb: str, world: int, numel: int) -> int:
    """The nearest size not above `numel` that the verb can cut into equal parts."""
    return numel if verb in IN_PLACE else max(world, numel - numel % world)


def entries(names: Sequence[str], verb: str, world: int) -> tuple[Entry, ...]:
    """The entries of codecs, which always compress, of "auto" and of "plain"."""
    return tuple(_entry(name, compressing(verb, world)) for name in names)


def _entry(name: str, algorithm: str) -> Entry:
    if name == AUTO:
        return Entry(name, codec("int8"), "auto")
    if name == PLAIN:
        return Entry(name, codec("none"), "plain")
    if PAIR in name:
        inside, across = map(codec, name.split(PAIR))
        return Entry(f"{inside}{PAIR}{across}", across, "hierarchical", inside)
    return Entry(str(codec(name)), codec(name), algorithm)


def compressing(verb: str, world: int) -> str:
    """The algorithm that sends least and uses the codec whatever the size."""
    if verb != "all_reduce":
        return "compressed"
    return "one_shot" if world == 2 else "two_phase"


def bytes_across(algorithm: str, world: int, nodes: int, chosen: Codec, numel: int) -> float:
    """Payload of an all_reduce that a node sends to others at least. [Note: Nodes]"""
    if algorithm == "hierarchical":
        return bytes_formula("all_reduce", compressing("all_reduce", nodes), nodes, chosen, numel)
    outside = world - world // nodes
    if algorithm == "plain":  # a ring crosses from a node to the next once
        return 2 * (world - 1) / world * 4 * numel
    wires = outside if algorithm == "one_shot" else 2 * outside / world  # of each rank
    return world // nodes * wires * chosen.wire_bytes(numel)


def bytes_formula(verb: str, algorithm: str, world: int, chosen: Codec, numel: int) -> float:
    """Payload that each rank sends at least: wires of `numel` elements, or fp32 where the algorithm is plain."""
    wire = 4 * numel if algorithm == "plain" else chosen.wire_bytes(numel)
    if algorithm == "one_shot":
        return (world - 1) * wire
    if verb == "broadcast":
        return wire  # by the source: a part to each rank, and these exchange their parts
    return (2 if verb == "all_reduce" else 1) * (world - 1) / world * wire


def _rows(cases: Sequence[CollectiveCase], effort: Effort, progress: Progress) -> Generator[Row]:
    """Ranks stay for all cases of a world, which follow each other; their link and nodes are the same."""
    started: dict[int, World] = {}
    with ExitStack() as stack:
        for case in progress(cases):
            if case.world not in started:
                stack.close()
                started = {case.world: stack.enter_context(launch.ranks(case.world, case.link, case.nodes))}
            yield from rows_of(case, started[case.world].run(measure, case, effort))


def rows_of(case: CollectiveCase, parts: Parts) -> Iterator[Row]:
    for entry in case.entries:
        samples, plain, bf16 = ([part[name] for part in parts] for name in (entry.name, FP32, BF16))
        times = turns.slowest(parts, entry.name)
        plain_ms, bf16_ms = (median(turns.slowest(parts, name)) for name in (FP32, BF16))
        yield {
            "verb": case.verb,
            "codec": entry.name,
            "algorithm": samples[0].algorithm,
            "world": case.world,
            "nodes": case.nodes,
            "link": str(case.link or "loopback"),
            "numel": case.numel,
            **timing.columns(times),
            "plain_ms": plain_ms,
            "bf16_ms": bf16_ms,
            "speedup_plain": plain_ms / median(times),
            "speedup_bf16": bf16_ms / median(times),
            **_byte_columns(case, entry, parts),
            "cpu_ms_per_rank": _cpu_ms(samples),
            "rel_error": _rel_error(samples),
            "identical": _identical(case.verb, samples),
            "auto": entry.algorithm == "auto",
            "rounds": len(times),
            "threads": launch.THREADS,
            "cores": os.cpu_count(),
            "plain_cpu_ms": _cpu_ms(plain),
            "bf16_cpu_ms": _cpu_ms(bf16),
            "bf16_rel_error": _rel_error(bf16),
        }


def _byte_columns(case: CollectiveCase, entry: Entry, parts: Parts) -> Row:
    least = _least(case, parts[0][entry.name].algorithm, entry.codec)
    # Torch's own verbs do not go through thinwire's transport: what they send over loopback is not known.
    sent = turns.sent(parts, entry.name, "transport_bytes") or None
    share = None
    if least is not None and case.link is not None:
        share = 8e3 * least / case.link.rate / median(turns.slowest(parts, entry.name))
    return {
        "bytes_per_rank": turns.sent(parts, entry.name, "interface_bytes") if case.link else sent,
        "bytes_formula": least,
        "wire_limit_share": share,
        "bytes_sent": sent,
    }


def _least(case: CollectiveCase, algorithm: str, chosen: Codec) -> float | None:
    """Bytes that a rank has to send, or a node; nobody has worked out what other verbs send between nodes."""
    if case.nodes is None:
        return bytes_formula(case.verb, algorithm, case.world, chosen, case.numel)
    return bytes_across(algorithm, case.world, case.nodes, chosen, case.numel) if case.verb == "all_reduce" else None


def _cpu_ms(samples: Sequence[Sample]) -> float:
    return fmean(median(sample.cpu_ms) for sample in samples)


def _rel_error(samples: Sequence[CallSample]) -> float:
    return max(math.sqrt(sample.lost) for sample in samples)


def _identical(verb: str, samples: Sequence[CallSample]) -> bool:
    if verb in SHARED:
        return len({sample.digest for sample in samples}) == 1
    return all(sample.repeats for sample in samples)


# The ranks' side.


def measure(case: CollectiveCase, effort: Effort) -> dict[str, CallSample]:
    """This rank's part of a case; all ranks run it together."""
    with torch.no_grad():
        bench = _RankBench(case)
        for name in bench.calls:
            bench.check(name)
        bench.samples[NOTHING] = CallSample()
        turns.take(
            bench.calls,
            bench.samples,
            effort,
            shaped=case.link is not None,
            transport=lambda name: bench.sent(),
            prepare=bench.restore,
        )
    return bench.samples


class _RankBench:
    """The tensors of a case on this rank, the calls that are compared, and what was measured of them."""

    def __init__(self, case: CollectiveCase) -> None:
        self.case = case
        rank = dist.get_rank()
        self.source = inputs(rank, case)
        self.out = torch.empty(output_numel(case))
        self.exact = exact(rank, case)
        # Nodes, and the ranks inside them.
        self.mesh = init_device_mesh("cpu", (case.nodes, case.world // case.nodes)) if case.nodes else None
        self.calls: dict[str, Call] = {FP32: lambda: TORCH[case.verb](self.out, self.source), BF16: self._in_bf16()}
        self.calls |= {entry.name: self._compressed(entry) for entry in case.entries}
        self.samples = {name: CallSample(algorithm="plain") for name in (FP32, BF16)}
        for entry in case.entries:
            self._call(entry.name)  # auto decides at its first call
            self.samples[entry.name] = CallSample(algorithm=_algorithm(case, entry, self.out))

    def _in_bf16(self) -> Call:
        """torch's verb on bfloat16 copies, the casts included. Buffers are made once, which favours it."""
        source = self.out if self.case.verb in IN_PLACE else self.source
        out16 = self.out.bfloat16()
        source16 = out16 if source is self.out else source.bfloat16()

        def call() -> None:
            source16.copy_(source)
            TORCH[self.case.verb](out16, source16)
            self.out.copy_(out16)

        return call

    def _compressed(self, entry: Entry) -> Call:
        verb = getattr(collectives, self.case.verb)
        given = {"all_reduce": (self.out,), "broadcast": (self.out, 0)}.get(self.case.verb, (self.out, self.source))
        how: dict[str, Any] = {"codec": entry.codec, "algorithm": entry.algorithm}
        if entry.inside is not None:
            how |= {"codec": (entry.inside, entry.codec), "group": self.mesh}
        return lambda: verb(*given, **how)

    def check(self, name: str) -> None:
        """Call once, and compare the result with the exact one; it warms up what is timed later, too."""
        sample = self.samples[name]
        self._call(name)
        sample.lost = nmse(self.exact, self.out)
        sample.digest = turns.digest([self.out])
        if self.case.verb not in SHARED:
            self._call(name)
            sample.repeats = turns.digest([self.out]) == sample.digest

    def sent(self) -> int:
        """Bytes that thinwire sent: in the group of all, inside the node and across."""
        groups = [None] if self.mesh is None else [None, *self.mesh.get_all_groups()]
        return sum(collectives.traffic(group).sent for group in groups)

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
    "reduce_scatter_tensor": lambda out, source: transport.reduce_scatter_single(out, source),
    "all_gather_into_tensor": lambda out, source: transport.all_gather_single(out, source),
    "all_to_all_single": lambda out, source: dist.all_to_all_single(out, source),
    "broadcast": lambda out, source: dist.broadcast(out, 0),
}


def inputs(rank: int, case: CollectiveCase) -> Tensor:
    """What a rank puts in: standard normal, the same whoever asks."""
    numel = case.numel // case.world if case.verb == "all_gather_into_tensor" else case.numel
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def output_numel(case: CollectiveCase) -> int:
    return case.numel // case.world if case.verb == "reduce_scatter_tensor" else case.numel


def exact(rank: int, case: CollectiveCase) -> Tensor:
    part = slice(rank * (case.numel // case.world), (rank + 1) * (case.numel // case.world))
    if case.verb == "broadcast":
        return inputs(0, case).double()
    if case.verb == "all_gather_into_tensor":
        return torch.cat([inputs(other, case) for other in range(case.world)]).double()
    if case.verb == "all_to_all_single":
        return torch.cat([inputs(other, case)[part] for other in range(case.world)]).double()
    total = torch.zeros(case.numel, dtype=torch.float64)
    for other in range(case.world):
        total += inputs(other, case)
    return total[part].clone() if case.verb == "reduce_scatter_tensor" else total


def _algorithm(case: CollectiveCase, entry: Entry, out: Tensor) -> str:
    """The algorithm that a call runs: what was asked for, or what auto has taken."""
    if entry.algorithm != "auto":
        return entry.algorithm
    channel = channel_of(None, out.device)
    verb = case.verb.removesuffix("_single").removesuffix("_tensor").removesuffix("_into")
    key = cost.CurveKey(verb, out.dtype, (entry.codec.pick(shape=out.shape),))
    return cost.choice(channel.measured, key, case.numel, channel.world).algorithm
