"""The collectives benchmark: a verb in a codec beside torch's own in fp32 and bf16, interleaved in one run.

Every round runs each of them once, after a barrier; its time is that of the slowest rank. bf16 is torch's own verb on
bfloat16 tensors, with the casts before and after it. Inputs are Gaussian, and differ from rank to rank.

[Note: Nodes] With nodes several ranks share a host and its link, which what they send to each other does not cross.
Bytes are then those that a node sends across. A pair of codecs, int8/lloyd4, is summed inside the nodes in the first
and across them in the second; a single one is summed flat, whoever is where.
"""

import hashlib
import math
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import collectives
from thinwire.codecs import Codec, codec
from thinwire.collectives import cost, transport
from thinwire.collectives.channel import channel_of
from thinwire.tools.bench import launch, link as links, timing
from thinwire.tools.bench.codec import nmse
from thinwire.tools.bench.link import Link, Sent
from thinwire.tools.bench.record import Progress, Record, Row, collect
from thinwire.tools.bench.timing import Call

ALGORITHMS = {
    "all_reduce": ("auto", "two_phase", "one_shot", "plain"),
    "reduce_scatter_tensor": ("auto", "compressed", "plain"),
    "all_gather_into_tensor": ("auto", "compressed", "plain"),
    "all_to_all_single": ("auto", "compressed", "plain"),
    "broadcast": ("auto", "compressed", "plain"),
}
VERBS = tuple(ALGORITHMS)
COST_NAMES = dict(zip(VERBS, ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"), strict=True))
IN_PLACE = ("all_reduce", "broadcast")
SHARED = ("all_reduce", "all_gather_into_tensor", "broadcast")  # after them all ranks hold the same
WHOLE = ("all_reduce", "broadcast")  # the others cut a tensor into one equal part a rank
PAIR = "/"  # between the codec inside a node and that across
AUTO, PLAIN = "auto", "plain"  # names beside the codecs: int8 where it pays, and thinwire's uncompressed path
FP32, BF16, NOTHING = "torch fp32", "torch bf16", "nothing"  # what runs beside the entries
CODECS = ("int8", "lloyd4", "lloyd2", "lloyd1", AUTO)
WORLDS = (2, 4)
NUMEL, SLOW_NUMEL, QUICK_NUMEL = 25_000_000, 8_000_000, 1 << 18
SLOW = 1e9  # bits a second; below, SLOW_NUMEL


@dataclass(frozen=True)
class Effort:
    """How much a run measures."""

    seconds: float = 2.0  # a call of a case; longer => more rounds, steadier medians
    least: int = 5  # rounds, however slow the link
    most: int = 300  # rounds, however small the message


FULL, QUICK = Effort(), Effort(seconds=0.2, least=3, most=20)


@dataclass(frozen=True)
class Entry:
    """What one row measures."""

    name: str  # a codec, a pair of them, "auto" or "plain"
    codec: Codec  # in a hierarchy of what goes across nodes
    algorithm: str
    inside: Codec | None = None  # of a hierarchy


@dataclass(frozen=True)
class Case:
    """What is interleaved: rows that share their verb, world, link and size."""

    verb: str
    world: int
    link: Link | None
    numel: int
    threads: int
    entries: tuple[Entry, ...]
    nodes: int | None = None  # None => every rank has a link of its own

    @property
    def setting(self) -> tuple[int, Link | None, int, int | None]:
        """What the ranks are started with."""
        return self.world, self.link, self.threads, self.nodes

    def __str__(self) -> str:
        nodes = f" on {self.nodes} nodes" if self.nodes else ""
        return f"{self.verb}, {self.numel} floats, world {self.world}{nodes}, {self.link or 'loopback'}"


@dataclass
class Sample:
    """One rank's measurements of one call, round by round, and what came out of it."""

    ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    interface_bytes: list[int] = field(default_factory=list)
    interface_payload: list[int] = field(default_factory=list)  # without headers
    transport_bytes: list[int] = field(default_factory=list)
    lost: float = 0.0  # NMSE against the exact result
    digest: str = ""
    repeats: bool = True  # a second call gave the same bytes; asked only where ranks hold different results
    algorithm: str = ""  # the one that ran


def run(
    worlds: Sequence[int] = WORLDS,
    link: Link | None = None,
    numels: Sequence[int] | None = None,
    verbs: Sequence[str] = ("all_reduce",),
    codecs: Sequence[str] = CODECS,
    algorithm: str | None = None,
    rounds: int | None = None,
    quick: bool = False,
    threads: int = 1,
    nodes: int | None = None,
    progress: Progress = iter,
) -> Record:
    """A record of kind "collectives", on gloo. algorithm None: the one that sends least; rounds None: by the clock."""
    if link is not None:
        links.check()
    for world in worlds:
        check_nodes(nodes, world, link, codecs, verbs)
    sizes = numels or [default_numel(link, quick)]
    cases = [
        Case(verb, world, link, divisible(verb, world, numel), threads, entries(codecs, verb, world, algorithm), nodes)
        for world in worlds
        for verb in verbs
        for numel in sizes
    ]
    effort = QUICK if quick else FULL
    if rounds is not None:
        effort = Effort(math.inf, rounds, rounds)
    with timing.threads(threads), closing(_rows(cases, effort, progress)) as rows:
        return collect("collectives", torch.device("cpu"), rows)


def check_nodes(nodes: int | None, world: int, link: Link | None, codecs: Sequence[str], verbs: Sequence[str]) -> None:
    """Refuse nodes that ranks do not fill evenly, and pairs of codecs where there is nothing to be inside of."""
    pairs = [name for name in codecs if PAIR in name]
    if any(name.count(PAIR) > 1 for name in pairs):
        raise ValueError(f"expected pairs of codecs, inside nodes and across them, got {', '.join(pairs)}")
    if nodes is None and pairs:
        raise ValueError(f"{pairs[0]} is a pair of codecs, inside nodes and across them: say how many nodes")
    if pairs and set(verbs) != {"all_reduce"}:
        raise ValueError(f"{pairs[0]} is a pair of codecs, and only all_reduce takes one")
    if nodes is not None and (nodes < 2 or world % nodes or world == nodes):
        raise ValueError(f"{world} ranks do not make {nodes} nodes: take 2 or more, of 2 or more ranks each")
    if nodes is not None and link is None:
        raise ValueError("nodes differ from ranks by what their link carries: name one")


def default_numel(link: Link | None, quick: bool) -> int:
    """Elements of a message where none are asked for: fewer on a slow link, or a run would take an hour."""
    if quick:
        return QUICK_NUMEL
    return SLOW_NUMEL if link is not None and link.rate < SLOW else NUMEL


def divisible(verb: str, world: int, numel: int) -> int:
    """The nearest size not above `numel` that the verb can cut into equal parts."""
    return numel if verb in WHOLE else max(world, numel - numel % world)


def entries(names: Sequence[str], verb: str, world: int, algorithm: str | None = None) -> tuple[Entry, ...]:
    """The entries of codecs, "auto" and "plain"; a codec always compresses unless `algorithm` says otherwise."""
    return tuple(_entry(name, algorithm or compressing(verb, world)) for name in names)


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
        across = compressing("all_reduce", nodes)
        return bytes_formula("all_reduce", across, nodes, chosen, numel)
    outside = world - world // nodes
    if algorithm == "plain":  # a ring crosses from a node to the next once
        return 2 * (world - 1) / world * 4 * numel
    wires = outside if algorithm == "one_shot" else 2 * outside / world  # of each rank
    return world // nodes * wires * chosen.wire_bytes(numel)


def bytes_formula(verb: str, algorithm: str, world: int, chosen: Codec, numel: int) -> float:
    """Payload a rank sends at least: wires of `numel` elements, or fp32 where the algorithm is plain."""
    wire = 4 * numel if algorithm == "plain" else chosen.wire_bytes(numel)
    if algorithm == "one_shot":
        return (world - 1) * wire
    if verb == "broadcast":
        return wire  # by the source: a part to each rank, and these exchange their parts
    return (2 if verb == "all_reduce" else 1) * (world - 1) / world * wire


def _rows(cases: Sequence[Case], effort: Effort, progress: Progress) -> Generator[Row]:
    """Ranks stay for the cases that follow each other on the same world and link."""
    world, setting = None, None
    with ExitStack() as stack:
        for case in progress(cases):
            if world is None or case.setting != setting:
                stack.close()
                world, setting = stack.enter_context(launch.ranks(*case.setting)), case.setting
            yield from rows_of(case, world.run(measure, case, effort))


def rows_of(case: Case, parts: Sequence[dict[str, Sample]]) -> Iterator[Row]:
    """The rows of a case, from what each rank measured."""
    for entry in case.entries:
        samples, plain, bf16 = (_of(parts, name) for name in (entry.name, FP32, BF16))
        yield {
            "verb": case.verb,
            "codec": entry.name,
            "algorithm": samples[0].algorithm,
            "world": case.world,
            "nodes": case.nodes,
            "link": str(case.link or "loopback"),
            "numel": case.numel,
            **_time_columns(samples, plain, bf16),
            **_byte_columns(case, entry, parts),
            "cpu_ms_per_rank": _cpu_ms(samples),
            "rel_error": _rel_error(samples),
            "identical": _identical(case.verb, samples),
            "auto": entry.algorithm == "auto",
            "rounds": len(samples[0].ms),
            "threads": case.threads,
            "cores": os.cpu_count(),
            "plain_cpu_ms": _cpu_ms(plain),
            "bf16_cpu_ms": _cpu_ms(bf16),
            "bf16_rel_error": _rel_error(bf16),
        }


def _time_columns(samples: list[Sample], plain: list[Sample], bf16: list[Sample]) -> Row:
    p20, p50, p80 = timing.percentiles(_times(samples))
    plain_ms, bf16_ms = median(_times(plain)), median(_times(bf16))
    times: Row = {"ms_p50": p50, "ms_p20": p20, "ms_p80": p80, "plain_ms": plain_ms, "bf16_ms": bf16_ms}
    return {**times, "speedup_plain": plain_ms / p50, "speedup_bf16": bf16_ms / p50}


def _byte_columns(case: Case, entry: Entry, parts: Sequence[dict[str, Sample]]) -> Row:
    samples = _of(parts, entry.name)
    least = _least(case, samples[0].algorithm, entry.codec)
    # Torch's own verbs do not go through thinwire's transport: what they send over loopback is not known.
    sent = _bytes(parts, entry.name, "transport_bytes") or None
    return {
        "bytes_per_rank": _bytes(parts, entry.name, "interface_bytes") if case.link else sent,
        "bytes_formula": least,
        "wire_limit_share": None if least is None or not case.link else _share(least, case.link, samples),
        "bytes_sent": sent,
        "bytes_payload": _bytes(parts, entry.name, "interface_payload") if case.link else None,
    }


def _least(case: Case, algorithm: str, chosen: Codec) -> float | None:
    """Bytes that a rank has to send, or a node; nobody has worked out what other verbs send between nodes."""
    if case.nodes is None:
        return bytes_formula(case.verb, algorithm, case.world, chosen, case.numel)
    return bytes_across(algorithm, case.world, case.nodes, chosen, case.numel) if case.verb == "all_reduce" else None


def _share(least: float, link: Link, samples: Sequence[Sample]) -> float:
    """Of the link's rate, that these bytes took."""
    return 8e3 * least / link.rate / median(_times(samples))


def _of(parts: Sequence[dict[str, Sample]], name: str) -> list[Sample]:
    return [part[name] for part in parts]


def _times(samples: Sequence[Sample]) -> list[float]:
    """Of each round: that of the slowest rank."""
    return [max(of_ranks) for of_ranks in zip(*(sample.ms for sample in samples), strict=True)]


def _cpu_ms(samples: Sequence[Sample]) -> float:
    return fmean(median(sample.cpu_ms) for sample in samples)


def _bytes(parts: Sequence[dict[str, Sample]], name: str, counter: str) -> float:
    """Of a call, by the rank that sends most. The barrier after it is counted too; NOTHING tells what that sends."""
    counted: list[float] = [
        median(getattr(part[name], counter)) - median(getattr(part[NOTHING], counter)) for part in parts
    ]
    return max(counted)


def _rel_error(samples: Sequence[Sample]) -> float:
    return max(math.sqrt(sample.lost) for sample in samples)


def _identical(verb: str, samples: Sequence[Sample]) -> bool:
    if verb in SHARED:
        return len({sample.digest for sample in samples}) == 1
    return all(sample.repeats for sample in samples)


# The ranks' side.


def measure(case: Case, effort: Effort) -> dict[str, Sample]:
    """This rank's part of a case; all ranks run it together."""
    with torch.no_grad():
        bench = _Bench(case)
        for name in bench.calls:
            bench.check(name)
        bench.time(effort)
    return bench.samples


class _Bench:
    """The tensors of a case on this rank, the calls that are compared, and what was measured of them."""

    def __init__(self, case: Case) -> None:
        self.case, self.rank = case, dist.get_rank()
        self.source = inputs(self.rank, case)
        self.out = torch.empty(output_numel(case))
        self.mesh = _mesh(case)
        self.calls: dict[str, Call] = {FP32: self._torch, BF16: _Bf16(case, self.source, self.out)}
        self.calls |= {
            entry.name: _Quantised(case.verb, entry, self.source, self.out, self.mesh) for entry in case.entries
        }
        for entry in case.entries:
            self._call(entry.name)  # auto decides at its first call
        self.samples = {name: Sample(algorithm=_algorithm(case, name, self.out)) for name in self.calls}
        self.exact = exact(self.rank, case)

    def check(self, name: str) -> None:
        """Call once, and compare the result with the exact one; it warms up what is timed later, too."""
        sample = self.samples[name]
        self._call(name)
        sample.lost, sample.digest = nmse(self.exact, self.out), _digest(self.out)
        if self.case.verb not in SHARED:
            self._call(name)
            sample.repeats = _digest(self.out) == sample.digest

    def time(self, effort: Effort) -> None:
        """Rounds until there are enough of them: rank 0 decides."""
        self.calls[NOTHING], self.samples[NOTHING] = _nothing, Sample()
        names = list(self.calls)
        rounds, end = 0, time.monotonic() + effort.seconds * len(self.calls)
        while _agreed(rounds < effort.least or (rounds < effort.most and time.monotonic() < end)):
            first = rounds % len(self.calls)  # each has every place in turn: what runs before a call may help or hurt
            for name in names[first:] + names[:first]:
                self._time(name)
            rounds += 1

    def _time(self, name: str) -> None:
        call, sample = self.calls[name], self.samples[name]
        self._restore()
        dist.barrier()
        interface, transport = _at_interface(self.case), self._sent()
        cpu, start = time.process_time(), time.perf_counter()
        call()
        sample.ms.append(1e3 * (time.perf_counter() - start))
        sample.cpu_ms.append(1e3 * (time.process_time() - cpu))
        # A call is over when all was received; what this rank still has in its buffers is sent by then.
        dist.barrier()
        now = _at_interface(self.case)
        sample.interface_bytes.append(now.total - interface.total)
        sample.interface_payload.append(now.payload - interface.payload)
        sample.transport_bytes.append(self._sent() - transport)

    def _sent(self) -> int:
        """By thinwire: in the group of all, inside the node and across."""
        groups = [None] if self.mesh is None else [None, *self.mesh.get_all_groups()]
        return sum(collectives.traffic(group).sent for group in groups)

    def _call(self, name: str) -> None:
        self._restore()
        self.calls[name]()

    def _restore(self) -> None:
        if self.case.verb in IN_PLACE:
            self.out.copy_(self.source)
        else:
            self.out.zero_()

    def _torch(self) -> None:
        TORCH[self.case.verb](self.out, self.source)


class _Bf16:
    """torch's verb on bfloat16 copies, the casts included. Buffers are made once, which favours it."""

    def __init__(self, case: Case, source: Tensor, out: Tensor) -> None:
        self._in_place, self._verb = case.verb in IN_PLACE, TORCH[case.verb]
        self._source, self._out = source, out
        self._out16 = out.bfloat16()
        self._source16 = self._out16 if self._in_place else source.bfloat16()

    def __call__(self) -> None:
        self._source16.copy_(self._out if self._in_place else self._source)
        self._verb(self._out16, self._source16)
        self._out.copy_(self._out16)


class _Quantised:
    """thinwire's verb."""

    def __init__(self, verb: str, entry: Entry, source: Tensor, out: Tensor, mesh: Any) -> None:
        self._verb, self._source, self._out = verb, source, out
        self._how: dict[str, Any] = {"codec": entry.codec, "algorithm": entry.algorithm}
        if entry.inside is not None:
            self._how |= {"codec": (entry.inside, entry.codec), "group": mesh}

    def __call__(self) -> None:
        given = {"all_reduce": (self._out,), "broadcast": (self._out, 0)}.get(self._verb, (self._out, self._source))
        getattr(collectives, self._verb)(*given, **self._how)


def _mesh(case: Case) -> Any:
    """Nodes, and the ranks inside them; None where there are none."""
    if case.nodes is None:
        return None
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (case.nodes, case.world // case.nodes))


TORCH: dict[str, Callable[[Tensor, Tensor], object]] = {
    "all_reduce": lambda out, source: dist.all_reduce(out),
    "reduce_scatter_tensor": lambda out, source: transport.reduce_scatter_single(out, source),
    "all_gather_into_tensor": lambda out, source: transport.all_gather_single(out, source),
    "all_to_all_single": lambda out, source: dist.all_to_all_single(out, source),
    "broadcast": lambda out, source: dist.broadcast(out, 0),
}


def inputs(rank: int, case: Case) -> Tensor:
    """What a rank puts in: standard normal, the same whoever asks."""
    numel = case.numel // case.world if case.verb == "all_gather_into_tensor" else case.numel
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def output_numel(case: Case) -> int:
    """Elements a rank gets."""
    return case.numel // case.world if case.verb == "reduce_scatter_tensor" else case.numel


def exact(rank: int, case: Case) -> Tensor:
    """What a rank should get, in fp64."""
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


def _algorithm(case: Case, name: str, out: Tensor) -> str:
    """The algorithm that a call runs: what was asked for, or what auto takes."""
    asked = next((entry for entry in case.entries if entry.name == name), None)
    if asked is None or asked.algorithm != "auto":
        return asked.algorithm if asked else "plain"
    channel = channel_of(None, out.device)
    key = cost.CurveKey(COST_NAMES[case.verb], out.dtype, (asked.codec.pick(shape=out.shape),))
    return cost.choice(channel.measured, key, case.numel, channel.world).algorithm


def _agreed(mine: bool) -> bool:
    """What rank 0 says."""
    flag = torch.tensor([mine])
    dist.broadcast(flag, 0)
    return bool(flag.item())


def _nothing() -> None:
    pass


def _at_interface(case: Case) -> Sent:
    return links.sent() if case.link else Sent(0, 0)


def _digest(out: Tensor) -> str:
    return hashlib.blake2b(out.numpy().data).hexdigest()
