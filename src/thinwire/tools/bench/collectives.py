"""The collectives benchmark: a verb in a codec beside torch's own in fp32 and bf16, interleaved in one run.

Every round runs each of them once, after a barrier; its time is that of the slowest rank. bf16 is torch's own verb on
bfloat16 tensors, with the casts before and after it. Inputs are Gaussian, and differ from rank to rank. On NCCL sums
are averages, every codec runs in both algorithms, and what a call costs the host is told apart from what it takes.

[Note: Nodes] With nodes several ranks share a host and its link, which what they send to each other does not cross.
Bytes are then those that a node sends across. A pair of codecs, int8/lloyd4, is summed inside the nodes in the first
and across them in the second; a single one is summed flat, whoever is where.
"""

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from thinwire import collectives
from thinwire.codecs import Codec, codec
from thinwire.collectives import cost, groups
from thinwire.collectives.channel import channel_of
from thinwire.tools.bench import ddp_steps, launch, link as links, timing, turns
from thinwire.tools.bench.codec import nmse
from thinwire.tools.bench.ddp_steps import StepCase
from thinwire.tools.bench.launch import NcclRanks, World
from thinwire.tools.bench.link import ShapedLink
from thinwire.tools.bench.record import BenchError, Progress, Record, Row, collect
from thinwire.tools.bench.timing import Call, Effort
from thinwire.tools.bench.turns import CPU, NOTHING, Sample

VERBS = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "all_to_all_single", "broadcast")
IN_PLACE = ("all_reduce", "broadcast")  # the others cut a tensor into equal parts, one per rank
ALGORITHMS = ("one_shot", "two_phase")
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
NCCL_VERBS = ("all_reduce", ddp_steps.VERB)
STEPS = (ddp_steps.VERB, ddp_steps.SHARDED)
NCCL_CODECS = (PLAIN, "bf16", "int8", "lloyd4", "lloyd2")
NCCL_NUMELS = (1_000, 256_000, 1_000_000, 4_000_000, 16_000_000, 64_000_000)
NCCL_QUICK_NUMELS = (1_000, 1_000_000)
NCCL_FULL = Effort(rounds=5, most=50, seconds=0.3)
NCCL_QUICK = Effort(rounds=3, most=10, seconds=0.1)


@dataclass(frozen=True)
class Entry:
    name: str  # a codec, a pair of them, "auto" or "plain"
    codec: Codec  # of a hierarchy: of what goes across nodes
    algorithm: str
    inside: Codec | None = None  # of a hierarchy

    @property
    def key(self) -> str:
        return f"{self.name} {self.algorithm}"


@dataclass(frozen=True)
class CollectiveCase:
    """What is interleaved: rows that share their verb, world, link and size."""

    verb: str
    world: int
    link: ShapedLink | None
    numel: int
    entries: tuple[Entry, ...]
    nodes: int | None = None  # None => every rank has a link of its own
    cards: NcclRanks | None = None  # None => gloo, on the CPU

    @property
    def told_link(self) -> str:
        return self.cards.link if self.cards else str(self.link or "loopback")

    @property
    def averages(self) -> bool:
        return self.cards is not None and self.verb == "all_reduce"

    def rows(self, world: World, effort: Effort) -> Iterator[Row]:
        return rows_of(self, world.run(measure, self, effort))

    def __str__(self) -> str:
        nodes = f" on {self.nodes} nodes" if self.nodes else ""
        return f"{self.verb}, {self.numel} floats, world {self.world}{nodes}, {self.told_link}"


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
    check_pairs(nodes is not None, codecs, verbs)
    for world in worlds:
        if nodes is not None and (nodes < 2 or world % nodes or world == nodes):
            raise BenchError(f"{world} ranks do not make {nodes} nodes: take 2 or more, of 2 or more ranks each")
    if nodes is not None and link is None:
        raise BenchError("nodes differ from ranks by what their link carries: name one")
    cases = []
    for world, verb, numel in product(worlds, verbs, numels or [default_numel(link, quick)]):
        found = entries(codecs, verb, world)
        cases.append(CollectiveCase(verb, world, link, divisible(verb, world, numel), found, nodes))
    effort = Effort(rounds) if rounds else QUICK if quick else FULL
    with timing.threads(launch.THREADS):
        return collect("collectives", CPU, _rows(cases, effort, progress))


def run_on_nccl(
    worlds: Sequence[int] = WORLDS,
    hosts: Sequence[int] = (1,),
    numels: Sequence[int] | None = None,
    verbs: Sequence[str] = NCCL_VERBS,
    codecs: Sequence[str] = NCCL_CODECS,
    rounds: int | None = None,
    quick: bool = False,
    progress: Progress = iter,
) -> Record:
    """The same on NCCL, each world on each number of hosts; steps of DDP too."""
    placed = launch.nccl_ranks(worlds, hosts)
    check_pairs(any(cards.nodes for cards in placed), codecs, verbs)
    sizes = numels or (NCCL_QUICK_NUMELS if quick else NCCL_NUMELS)
    cases = [case for cards in placed for case in nccl_cases(cards, sizes, verbs, codecs)]
    effort = Effort(rounds) if rounds else NCCL_QUICK if quick else NCCL_FULL
    with timing.threads(launch.THREADS):
        return collect("collectives", torch.device("cuda"), _rows(cases, effort, progress))


def nccl_cases(
    cards: NcclRanks, numels: Sequence[int], verbs: Sequence[str], codecs: Sequence[str]
) -> Iterator[CollectiveCase | StepCase]:
    """Those of one world; pairs of codecs only where hosts have several ranks."""
    names = [name for name in codecs if cards.nodes or PAIR not in name]
    for verb, numel in product([verb for verb in verbs if verb not in STEPS], numels):
        size = divisible(verb, cards.world, numel)
        found = entries(names, verb, cards.world, every=True)
        yield CollectiveCase(verb, cards.world, None, size, found, cards.nodes, cards)
    some = [name for name in names if name not in (AUTO, PLAIN)]
    if ddp_steps.VERB in verbs:
        yield StepCase(cards.world, ddp_steps.lineup(some), cards)
    if ddp_steps.SHARDED in verbs:
        lineup = ddp_steps.sharded_lineup(some)
        yield StepCase(cards.world, lineup, cards, ddp_steps.SHARDED, ddp_steps.SHARDED_TASK)


def check_pairs(has_nodes: bool, codecs: Sequence[str], verbs: Sequence[str]) -> None:
    """Refuse pairs of codecs where there is nothing to be inside of."""
    pairs = [name for name in codecs if PAIR in name]
    if any(name.count(PAIR) > 1 for name in pairs):
        raise BenchError(f"expected pairs of codecs, inside nodes and across them, got {', '.join(pairs)}")
    if pairs and not has_nodes:
        raise BenchError(f"{pairs[0]} is a pair of codecs, inside nodes and across them: say how many nodes")
    if pairs and set(verbs) != {"all_reduce"}:
        raise BenchError(f"{pairs[0]} is a pair of codecs, and only all_reduce takes one")


def default_numel(link: ShapedLink | None, quick: bool) -> int:
    """Elements of a message where none are asked for: fewer on a slow link, or a run would take an hour."""
    if quick:
        return QUICK_NUMEL
    return SLOW_NUMEL if link is not None and link.rate < SLOW else NUMEL


def divisible(verb: str, world: int, numel: int) -> int:
    """The nearest size not above `numel` that the verb can cut into equal parts."""
    return numel if verb in IN_PLACE else max(world, numel - numel % world)


def entries(names: Sequence[str], verb: str, world: int, every: bool = False) -> tuple[Entry, ...]:
    """The entries of codecs, which always compress (sums in `every` algorithm, if asked), of "auto" and of "plain"."""
    algorithms = ALGORITHMS if every and verb == "all_reduce" else (compressing(verb, world),)
    return tuple(dict.fromkeys(_entry(name, algorithm) for name in names for algorithm in algorithms))


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


def _rows(cases: Sequence[CollectiveCase | StepCase], effort: Effort, progress: Progress) -> Generator[Row]:
    """Ranks on gloo stay for all cases of a world, which follow each other; their link and nodes are the same.

    On NCCL every case has ranks of its own: see [Note: Counts] in turns.py.
    """
    started: dict[tuple[int, NcclRanks | None], World] = {}
    with ExitStack() as stack:
        for case in progress(cases):
            place = (case.world, case.cards)
            if place not in started or case.cards is not None:
                stack.close()
                started = {place: stack.enter_context(launch.ranks(case.world, case.link, case.nodes, case.cards))}
            yield from case.rows(started[place], effort)


def rows_of(case: CollectiveCase, parts: Parts) -> Iterator[Row]:
    for entry in case.entries:
        samples, plain, bf16 = ([part[name] for part in parts] for name in (entry.key, FP32, BF16))
        same = len({sample.digest for sample in samples}) == 1
        yield {
            "verb": case.verb,
            "codec": entry.name,
            "algorithm": samples[0].algorithm,
            "world": case.world,
            "nodes": case.nodes,
            "link": case.told_link,
            "numel": case.numel,
            **_byte_columns(case, entry, parts),
            "rel_error": _rel_error(samples),
            "identical": same if case.verb in SHARED else all(sample.repeats for sample in samples),
            "auto": entry.algorithm == "auto",
            "plain_cpu_ms": turns.cpu_ms(plain),
            "bf16_cpu_ms": turns.cpu_ms(bf16),
            "bf16_rel_error": _rel_error(bf16),
            **ddp_steps.time_columns(parts, entry.key, FP32, BF16, case.cards),
            **({} if case.cards is None else {"asked": entry.algorithm}),
        }


def _byte_columns(case: CollectiveCase, entry: Entry, parts: Parts) -> Row:
    least = _least(case, parts[0][entry.key].algorithm, entry.codec)
    # Torch's own verbs do not go through thinwire's transport: what they send over loopback is not known.
    sent = turns.sent(parts, entry.key, "transport_bytes") or None
    share = None
    if least is not None and case.link is not None:
        share = 8e3 * least / case.link.rate / median(turns.slowest(parts, entry.key))
    return {
        "bytes_per_rank": turns.sent(parts, entry.key, "interface_bytes") if case.link else sent,
        "bytes_formula": least,
        "wire_limit_share": share,
        "bytes_sent": sent,
    }


def _least(case: CollectiveCase, algorithm: str, chosen: Codec) -> float | None:
    """Bytes that a rank has to send, or a node on shaped links; None where nobody has worked it out."""
    if case.cards is not None and algorithm == "hierarchical":
        return None
    if case.nodes is None or case.cards is not None:
        return bytes_formula(case.verb, algorithm, case.world, chosen, case.numel)
    return bytes_across(algorithm, case.world, case.nodes, chosen, case.numel) if case.verb == "all_reduce" else None


def _rel_error(samples: Sequence[CallSample]) -> float:
    return max(math.sqrt(sample.lost) for sample in samples)


# The ranks' side.


def measure(case: CollectiveCase, effort: Effort) -> dict[str, CallSample]:
    """This rank's part of a case; all ranks run it together."""
    with torch.no_grad():
        bench = _RankBench(case)
        for name in bench.calls:
            bench.check(name)
        bench.samples[NOTHING] = CallSample()
        how: dict[str, Any] = {"prepare": bench.restore, "device": bench.out.device, "shaped": case.link is not None}
        turns.take(bench.calls, bench.samples, effort, transport=lambda name: bench.sent(), **how)
    return bench.samples


class _RankBench:
    """The tensors of a case on this rank, the calls that are compared, and what was measured of them."""

    def __init__(self, case: CollectiveCase) -> None:
        self.case = case
        rank = dist.get_rank()
        device = CPU if case.cards is None else case.cards.card(rank)
        self.source = inputs(rank, case, device)
        self.out = torch.empty(output_numel(case), device=device)
        self.exact = exact(rank, case, device)
        # Nodes, and the ranks inside them.
        self.mesh = init_device_mesh(device.type, (case.nodes, case.world // case.nodes)) if case.nodes else None
        self.group = groups.resolve(None)
        self.torch = average if case.averages else TORCH[case.verb]
        self.calls: dict[str, Call] = {FP32: lambda: self.torch(self.out, self.source), BF16: self._in_bf16()}
        self.calls |= {entry.key: self._compressed(entry) for entry in case.entries}
        self.samples = {name: CallSample(algorithm="plain") for name in (FP32, BF16)}
        for entry in case.entries:
            self._call(entry.key)  # auto decides at its first call
            self.samples[entry.key] = CallSample(algorithm=_algorithm(case, entry, self.out, self.group))

    def _in_bf16(self) -> Call:
        """torch's verb on bfloat16 copies, the casts included. Buffers are made once, which favours it."""
        source = self.out if self.case.verb in IN_PLACE else self.source
        out16 = self.out.bfloat16()
        source16 = out16 if source is self.out else source.bfloat16()

        def call() -> None:
            source16.copy_(source)
            self.torch(out16, source16)
            self.out.copy_(out16)

        return call

    def _compressed(self, entry: Entry) -> Call:
        verb = getattr(collectives, self.case.verb)
        given = {"all_reduce": (self.out,), "broadcast": (self.out, 0)}.get(self.case.verb, (self.out, self.source))
        how: dict[str, Any] = {"codec": entry.codec, "algorithm": entry.algorithm, "group": self.group}
        if self.case.averages:
            how["op"] = dist.ReduceOp.AVG
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
        groups = [self.group, *([] if self.mesh is None else self.mesh.get_all_groups())]
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
    "reduce_scatter_tensor": lambda out, source: groups.reduce_scatter_single(out, source),
    "all_gather_into_tensor": lambda out, source: groups.all_gather_single(out, source),
    "all_to_all_single": lambda out, source: dist.all_to_all_single(out, source),
    "broadcast": lambda out, source: dist.broadcast(out, 0),
}


def average(out: Tensor, source: Tensor) -> object:
    return dist.all_reduce(out, dist.ReduceOp.AVG)


def inputs(rank: int, case: CollectiveCase, device: torch.device = CPU) -> Tensor:
    """What a rank puts in: standard normal, the same whoever asks."""
    numel = case.numel // case.world if case.verb == "all_gather_into_tensor" else case.numel
    return torch.randn(numel, generator=torch.Generator(device).manual_seed(rank), device=device)


def output_numel(case: CollectiveCase) -> int:
    return case.numel // case.world if case.verb == "reduce_scatter_tensor" else case.numel


def exact(rank: int, case: CollectiveCase, device: torch.device = CPU) -> Tensor:
    part = slice(rank * (case.numel // case.world), (rank + 1) * (case.numel // case.world))
    if case.verb == "broadcast":
        return inputs(0, case, device).double()
    if case.verb == "all_gather_into_tensor":
        return torch.cat([inputs(other, case, device) for other in range(case.world)]).double()
    if case.verb == "all_to_all_single":
        return torch.cat([inputs(other, case, device)[part] for other in range(case.world)]).double()
    total = torch.zeros(case.numel, dtype=torch.float64, device=device)
    for other in range(case.world):
        total += inputs(other, case, device)
    if case.averages:
        total /= case.world
    return total[part].clone() if case.verb == "reduce_scatter_tensor" else total


def _algorithm(case: CollectiveCase, entry: Entry, out: Tensor, group: dist.ProcessGroup) -> str:
    """The algorithm that a call runs: what was asked for, or what auto has taken."""
    if entry.algorithm != "auto":
        return entry.algorithm
    channel = channel_of(group, out.device)
    verb = case.verb.removesuffix("_single").removesuffix("_tensor").removesuffix("_into")
    key = cost.CurveKey(verb, out.dtype, (entry.codec.pick(shape=out.shape),))
    return cost.choice(channel.measured, key, case.numel, channel.world).algorithm
