"""The cost model: what a message takes on a cluster, and what a step with it takes. Pure; see docs/reference/advise.md.

Legend: W ranks, G of them in a node, M nodes; n elements of a chunk, w bytes of its wire.

A message is cut into chunks as `collectives.chunks` cuts it, and a chunk passes through stages: kernels, a hop over a
link, kernels again. The line of `collectives.pipeline` is played through with these times: kernels of a rank run one
after the other, so do the hops of a link, and a chunk waits for its own hop. All ranks do the same at the same time.

[Note: Latency in a row] NCCL runs the collectives of a communicator one after the other, so each holds its link for
its latency too. gloo has two threads for torch's all_reduce; what it sends between pairs waits for nothing but bytes.

[Note: One stream] On NCCL one stream runs the kernels of all messages and waits for their hops, so a message begins
when the one before it is done. The host waits for nothing and launches ahead, as far as it is fast enough.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from thinwire.codecs import Codec, Identity
from thinwire.collectives import chunks
from thinwire.collectives.hierarchical import fewest_roundings
from thinwire.tools.advise.links import Cluster
from thinwire.tools.advise.machine import Machine
from thinwire.tools.advise.schemes import SumScheme

BUCKET_BYTES = 25 << 20  # DDP's default
BACKWARD = 0.5  # of a step's compute: two thirds of forward and backward pass, less what the optimiser and data take
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MOST_PLAYED = 256  # chunks of a message; of longer ones as many groups of chunks, which changes T by less than 1 %
RING_AT_ONCE = {"gloo": 2, "nccl": 1}  # see [Note: Latency in a row]
# Passes of feedback over the gradients beside encode and decode, in copies (8 bytes of memory traffic per element).
FEEDBACK_COPIES = {"": 0.0, "classic": 5.0, "ef21": 7.5}
GPU_BYTES = 80 * 10**9  # of an A100 or an H100, where nothing else is said
STATE_BYTES = {"adaptive": 8, "linear": 4}  # of the optimizer, per parameter: Adam's two moments, SGD's momentum
MASTER_BYTES = 4  # of the fp32 copy of a parameter that trains in 16 bits
ACTIVATIONS = 0.25  # of all the rest, with activation checkpointing


@dataclass(frozen=True)
class TrainingJob:
    """What one rank computes, and sends, in a step."""

    params: int
    step_s: float  # without any communication
    dtype: torch.dtype = torch.float32  # of the gradients
    bucket_bytes: int = BUCKET_BYTES  # more => fewer messages, less overlap
    overlap: float | None = None  # share of step_s that communication may hide behind; None: by the buckets
    family: str = "adaptive"  # of the optimiser: what feedback narrow codecs get

    @property
    def buckets(self) -> int:
        """Messages per step."""
        return min(self.params, -(-self.params * self.dtype.itemsize // self.bucket_bytes))

    @property
    def bucket(self) -> int:
        """Elements per bucket."""
        return -(-self.params // self.buckets)

    def hidden_s(self, machine: Machine) -> float:
        """Of the backward pass, after the first bucket is ready: what communication may hide behind."""
        share = BACKWARD * (1 - 1 / self.buckets) * machine.spare if self.overlap is None else self.overlap
        return share * self.step_s


def memory(job: TrainingJob) -> dict[str, float]:
    """Bytes that a rank needs under DDP, by rule of thumb and by what holds them. DDP copies gradients into buckets."""
    width = job.dtype.itemsize
    state = STATE_BYTES[job.family] + (MASTER_BYTES if width < MASTER_BYTES else 0)
    parts = {"weights": width, "gradients and DDP's buckets": 2 * width, "optimizer": state}
    found = {name: float(job.params * size) for name, size in parts.items()}
    return {**found, "activations": ACTIVATIONS * sum(found.values())}


def sharded_memory(needs: Mapping[str, float], world: int) -> float:
    """Bytes of weights, gradients and optimizer that each of `world` ranks holds under FSDP2, which has no buckets."""
    return (needs["weights"] + needs["gradients and DDP's buckets"] / 2 + needs["optimizer"]) / world


class Hop(NamedTuple):
    """Bytes on their way from every rank at once."""

    link: str
    seconds: float
    latency_s: float
    messages: int  # that a rank's host sends and receives
    sent: float  # bytes per rank
    crossed: float = 0.0  # of these, to other nodes
    at_once: float = math.inf  # hops of a link whose latencies overlap: see [Note: Latency in a row]

    def times(self, count: int) -> "Hop":
        """The same `count` times in a row."""
        sent = self._replace(sent=count * self.sent, crossed=count * self.crossed, messages=count * self.messages)
        return sent._replace(seconds=count * self.seconds, latency_s=count * self.latency_s)


def exchange(cluster: Cluster, part: float, link: str = "") -> Hop:
    """Every rank sends `part` bytes to each other: a node's link carries G(W-G) parts, a rank's own G-1."""
    peers = cluster.world - 1
    inner = cluster.per_node - 1
    outer = peers - inner
    slow = cluster.per_node * outer * part / cluster.across.bytes_per_s if cluster.across else 0.0
    fast = inner * part / cluster.inside.bytes_per_s if cluster.inside else 0.0
    at_once = 1 if cluster.transport == "nccl" else math.inf
    return Hop(link, max(slow, fast), cluster.latency_s, 2 * peers, peers * part, outer * part, at_once)


def gather(cluster: Cluster, row: float, link: str = "") -> Hop:
    """Every rank gets every other's row. NCCL passes rows round a ring, which enters and leaves a node once."""
    if cluster.transport == "gloo" or cluster.world == 1:
        return exchange(cluster, row, link)
    steps = cluster.world - 1
    sent = steps * row
    return Hop(link, sent / _slowest(cluster), steps * cluster.latency_s, 1, sent, _crossing(cluster, sent), 1)


def ring(cluster: Cluster, nbytes: float) -> Hop:
    """torch's own all_reduce of `nbytes`: 2(W-1)/W of them per rank. NCCL takes a tree where that is sooner."""
    latency = cluster.tree_latency_s if cluster.sums_in_tree else cluster.ring_latency_s
    sent = 2 * (cluster.world - 1) / cluster.world * nbytes
    at_once = RING_AT_ONCE[cluster.transport]
    return Hop("", sent / _slowest(cluster), latency, 0, sent, _crossing(cluster, sent), at_once)


def _slowest(cluster: Cluster) -> float:
    """Bytes per second of a ring through all ranks."""
    return min((link.bytes_per_s for link in cluster.links), default=math.inf)


def _crossing(cluster: Cluster, sent: float) -> float:
    """Of what a rank sends in a ring, to other nodes: one rank of a node sends there all of it."""
    return sent / cluster.per_node if cluster.nodes > 1 else 0.0


class Stage(NamedTuple):
    """What a rank does before a hop, or at the end."""

    kernels_s: float
    calls: int = 0  # of kernels
    hop: Hop | None = None
    chunks: int = 1  # that it is a stage of; 0: there is nothing to do
    plain: bool = False  # torch's own

    def times(self, count: int) -> "Stage":
        """The same `count` times in a row."""
        hop = self.hop and self.hop.times(count)
        return Stage(count * self.kernels_s, count * self.calls, hop, count * self.chunks, self.plain)


Chunk = tuple[Stage, ...]


@dataclass(frozen=True)
class ChunkedSum:
    chunks: tuple[Chunk, ...]
    depth: int = 1  # chunks under way at once
    in_step: bool = False  # each chunk is one stage behind the one before it, and no other message between them
    on_stream: bool = False  # see [Note: One stream]

    @property
    def stages(self) -> Iterator[Stage]:
        return (stage for chunk in self.chunks for stage in chunk)

    @property
    def hops(self) -> Iterator[Hop]:
        return (stage.hop for stage in self.stages if stage.hop is not None)


def message(
    numel: int, scheme: SumScheme, cluster: Cluster, machine: Machine, dtype: torch.dtype, feedback: str
) -> ChunkedSum:
    if scheme.algorithm == "ring":
        return _ringed(numel, scheme.codec, cluster, machine, dtype)
    wire = scheme.codec.wire_bytes(numel, dtype)
    shards = cluster.per_node if scheme.across else cluster.world
    cut = chunks.cut(numel, wire, cluster.world, shards)
    groups = list(_groups(cut))
    made = {}
    for each, count in set(groups):
        stages = _flat(each, scheme.codec, scheme.algorithm, cluster, machine, feedback)
        if scheme.across is not None:
            stages = _hierarchical(each, scheme.codec, scheme.across, cluster, machine)
        made[each, count] = tuple(stage.times(count) for stage in stages)
    largest = scheme.codec.wire_bytes(max(groups)[0], dtype)
    rooms = cluster.world if scheme.algorithm == "one_shot" else 2  # wires that a chunk's scratch holds
    depth = chunks.scratch_limit(wire, largest, rooms * largest, cut.num_chunks) // (rooms * largest)
    on_stream = cluster.transport == "nccl"
    return ChunkedSum(tuple(made[group] for group in groups), depth, scheme.across is not None, on_stream)


def _groups(cut: chunks.Cut) -> Iterator[tuple[int, int]]:
    """(elements of each chunk, chunks) of at most MOST_PLAYED groups of chunks that are played as one."""
    each = -(-cut.num_chunks // MOST_PLAYED)
    for first in range(0, cut.num_chunks, each):
        end = min(first + each, cut.num_chunks)
        numel = cut.span(end - 1).end - cut.span(first).begin
        yield -(-numel // (end - first)), end - first


def _flat(
    numel: int, codec: Codec, algorithm: str, cluster: Cluster, machine: Machine, feedback: str = ""
) -> Iterator[Stage]:
    """one_shot: encode n, send w to all, sum W wires.

    two_phase: encode n, send w/W to each, recode the sum of W shards, gather them, decode n. Feedback decodes the wire
    again and passes over n in memory, half of it before the first message and half after the last.
    """
    speed = machine.speed(codec)
    world = cluster.world
    fed_s = (speed.decode + FEEDBACK_COPIES[feedback] * machine.copy_s) / 2 if feedback else 0.0
    parts = 1 if algorithm == "one_shot" else world
    part = codec.wire_bytes(-(-numel // parts))
    first_s = numel * (speed.encode + fed_s)
    calls = parts * (1 + bool(feedback))
    if algorithm == "one_shot":
        yield Stage(first_s, calls, gather(cluster, part))
        yield Stage(numel * (speed.decode_sum(world) + fed_s), 1)
    else:
        yield Stage(first_s, calls, exchange(cluster, part))
        yield Stage(numel / world * (speed.recode + speed.wire * (world - 1)), 1, gather(cluster, part))
        yield Stage(numel * (speed.decode + fed_s), parts)


def _hierarchical(numel: int, inside: Codec, across: Codec, cluster: Cluster, machine: Machine) -> Iterator[Stage]:
    """Encode n, send w/G to each rank of the node, sum; the shard's sum over nodes; encode it, gather, decode n."""
    speed = machine.speed(inside)
    node = cluster.node
    shard = -(-numel // cluster.per_node)
    part = inside.wire_bytes(shard)
    yield Stage(numel * speed.encode, node.world, exchange(node, part, "inside"))
    before = shard * speed.decode_sum(node.world)
    for stage in _flat(shard, across, fewest_roundings(cluster.nodes), cluster.rail, machine):
        if stage.hop is None:
            yield Stage(stage.kernels_s + shard * speed.encode, stage.calls + 1, gather(node, part, "inside"))
        else:
            yield Stage(before + stage.kernels_s, stage.calls + bool(before), stage.hop._replace(link="across"))
        before = 0.0
    yield Stage(numel * speed.decode, node.world)


def _ringed(numel: int, codec: Codec, cluster: Cluster, machine: Machine, dtype: torch.dtype) -> ChunkedSum:
    """torch's all_reduce; a cast before and after it that nothing hides."""
    if isinstance(codec, Identity):
        return ChunkedSum(((Stage(0.0, 1, ring(cluster, numel * dtype.itemsize), plain=True), Stage(0.0, chunks=0)),))
    speed = machine.speed(codec)
    cast = ring(cluster, codec.wire_bytes(numel))
    after = Stage(numel * speed.decode, 1, plain=True)
    return ChunkedSum(((Stage(numel * speed.encode, 2, cast, plain=True), after),))


def alone_s(sent: ChunkedSum, machine: Machine) -> float:
    """Seconds of one message: the line played through, and no less than the work of a rank's core."""
    return max(_played_s(sent, machine), taken_s(sent, machine))


def _played_s(sent: ChunkedSum, machine: Machine) -> float:
    """The line: start a chunk where there is room, else go on with the one that has waited longest.

    In step (collectives.operations), a round starts one chunk and goes on with all under way, the youngest first.
    """
    player = _Player(sent, machine)
    waiting = deque(sent.chunks)
    under_way: deque[_Waiting] = deque()
    while waiting or under_way:
        if sent.in_step:
            begun = player.play(0.0, waiting.popleft()) if waiting else []
            under_way = deque(begun + [entry for older in under_way for entry in player.play(*older)])
        elif waiting and len(under_way) < sent.depth:
            under_way.extend(player.play(0.0, waiting.popleft()))
        else:
            under_way.extend(player.play(*under_way.popleft()))
    return player.now


_Waiting = tuple[float, Chunk]  # when a hop has arrived, and the stages after it


class _Player:
    """The clock of a rank, its host's, and those of the links."""

    def __init__(self, sent: ChunkedSum, machine: Machine) -> None:
        self._sent = sent
        self._machine = machine
        self.now = 0.0
        self._host = 0.0
        self._free = dict.fromkeys((hop.link for hop in sent.hops), 0.0)

    def play(self, arrival: float, chunk: Chunk) -> list[_Waiting]:
        """The first stage of these, from its arrival to its hop; what follows, if anything does."""
        stage = chunk[0]
        machine = self._machine
        start = max(self.now, arrival)
        if self._sent.on_stream:
            start = max(start, self._host)
            self._host += _host_s(stage, machine)
            self.now = max(start + stage.kernels_s, self._host)
        else:
            self.now = start + _work_s(stage, machine)
        hop = stage.hop
        if hop is None:
            return []
        sent_from = max(self.now, self._free[hop.link])
        self._free[hop.link] = sent_from + _held_s(hop, machine)
        return [(sent_from + _hop_s(hop, machine) + hop.latency_s, chunk[1:])]


def busy_s(sent: ChunkedSum, machine: Machine) -> float:
    """Seconds that a message adds where others go before and after it: of what is busiest."""
    if sent.on_stream:
        host = sum(_host_s(stage, machine) for stage in sent.stages)
        return max(
            host, taken_s(sent, machine), _played_s(sent, replace(machine, call_s=0.0, message_s=0.0, nccl=None))
        )
    hops: dict[str, float] = {}
    for hop in sent.hops:
        hops[hop.link] = hops.get(hop.link, 0.0) + _held_s(hop, machine)
    # In step, a message is done before the next one's second stage.
    work = _played_s(sent, machine) if sent.in_step else sum(_work_s(stage, machine) for stage in sent.stages)
    return max(work, taken_s(sent, machine), *hops.values(), 0.0)


def taken_s(sent: ChunkedSum, machine: Machine) -> float:
    """Seconds of a message that the backward pass misses."""
    kernels = sum(stage.kernels_s for stage in sent.stages)
    calls = sum(stage.calls for stage in sent.stages)
    messages = sum(hop.messages for hop in sent.hops)
    return machine.taken_s(kernels, calls, messages, sum(hop.sent for hop in sent.hops))


def _work_s(stage: Stage, machine: Machine) -> float:
    if machine.nccl is not None:
        return max(stage.kernels_s, _host_s(stage, machine))
    return machine.work_s(stage.kernels_s, stage.calls, stage.hop.messages if stage.hop else 0)


def _host_s(stage: Stage, machine: Machine) -> float:
    """Of it, what the host takes to hand over kernels and messages."""
    if machine.nccl is not None:
        return stage.chunks * (machine.nccl.plain_s if stage.plain else machine.nccl.stage_s)
    return _work_s(stage._replace(kernels_s=0.0), machine)


def _hop_s(hop: Hop, machine: Machine) -> float:
    """A link is no faster than the processor that feeds it."""
    return max(hop.seconds, hop.sent * machine.byte_s)


def _held_s(hop: Hop, machine: Machine) -> float:
    """Until the next may follow: see [Note: Latency in a row]."""
    seconds = _hop_s(hop, machine)
    return max(seconds, (seconds + hop.latency_s) / hop.at_once)


@dataclass(frozen=True)
class Prediction:
    """What a scheme makes of a step. `thinwire advise --json` prints the fields under these names."""

    scheme: SumScheme
    bytes: float  # sent per rank and step
    bytes_across: float  # of these, to other nodes
    step_s: float
    exposed_s: float  # communication that the backward pass does not hide
    wire_s: float  # of the busiest link
    work_s: float  # of kernels, and on a CPU of messages
    handled_s: float  # copies, and of exposed_s what takes the processor: kernels, and on a CPU messages
    error: float  # RMS of what a sum loses, over RMS of the sum
    feedback: str  # "none", "classic" or "ef21"
    bucket_bytes: int


def predict(job: TrainingJob, scheme: SumScheme, cluster: Cluster, machine: Machine) -> Prediction:
    """A step of `job`: compute, the copies of gradients into DDP's buckets and back, and exposed communication."""
    feedback = scheme.feedback(job.family)
    count = job.buckets
    bucket = message(job.bucket, scheme, cluster, machine, job.dtype, feedback)
    hops = list(bucket.hops)
    exposed = exposed_s(bucket, count, job.hidden_s(machine), machine) if cluster.world > 1 else 0.0
    copies = 2 * job.params * machine.copy_s * job.dtype.itemsize / 4 if cluster.world > 1 else 0.0
    return Prediction(
        scheme,
        bytes=count * sum(hop.sent for hop in hops),
        bytes_across=count * sum(hop.crossed for hop in hops),
        step_s=job.step_s + copies + exposed,
        exposed_s=exposed,
        wire_s=count * max(sum(hop.seconds for hop in hops if hop.link == link) for link in {hop.link for hop in hops}),
        work_s=count * sum(_work_s(stage, machine) for stage in bucket.stages),
        handled_s=copies + min(exposed, count * taken_s(bucket, machine)),
        error=scheme.error(cluster, job.dtype),
        feedback=feedback or "none",
        bucket_bytes=job.bucket_bytes,
    )


def exposed_s(bucket: ChunkedSum, count: int, hidden_s: float, machine: Machine) -> float:
    """Communication of `count` buckets that a step waits for: max(T, K + (C - K)(1 - min(1, V/C))).

    C is the time of all buckets in a row, V = hidden_s what of the backward pass they may hide behind. K of C is work
    that takes the processor from the backward pass and so hides nowhere. T, the last bucket, comes after it.
    """
    last = alone_s(bucket, machine)
    whole = last + (count - 1) * busy_s(bucket, machine)
    taken = count * taken_s(bucket, machine)
    seen = 1 - min(1.0, hidden_s / whole) if whole > 0 else 1.0
    return max(last, taken + (whole - taken) * seen)
