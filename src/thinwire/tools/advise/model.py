"""The cost model: what a message takes on a cluster, and what a step with it takes. Pure; docs/advise.md explains it.

Legend: W ranks, G of them in a node, M nodes; n elements of a chunk, w bytes of its wire.

A message is cut into chunks as `collectives.chunks` cuts it, and a chunk passes through stages: kernels, a hop over a
link, kernels again. The line of `collectives.schedule` is played through with these times: kernels of a rank run one
after the other, so do the hops of a link, and a chunk waits for its own hop. All ranks do the same at the same time.

[Note: Latency in a row] NCCL runs the collectives of a communicator one after the other, so each holds its link for
its latency too. gloo has two threads for torch's all_reduce; what it sends between pairs waits for nothing but bytes.

[Note: One stream] On NCCL one stream runs the kernels of all messages and waits for their hops, so a message begins
when the one before it is done. The host waits for nothing and launches ahead, as far as it is fast enough.
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from thinwire.codecs import Codec, Identity
from thinwire.collectives import chunks
from thinwire.collectives.hierarchical import fewest_roundings
from thinwire.integrations import policy
from thinwire.tools.advise.links import Cluster
from thinwire.tools.advise.machine import CodecSpeed, Machine
from thinwire.tools.advise.schemes import Scheme

BUCKET_BYTES = 25 << 20  # DDP's default
BACKWARD = 0.5  # of a step's compute: two thirds of forward and backward pass, less what the optimiser and data take
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MOST_PLAYED = 256  # chunks of a message; of longer ones as many groups of chunks, which changes T by less than 1 %
RING_AT_ONCE = {"gloo": 2, "nccl": 1}  # see [Note: Latency in a row]
# Passes of feedback over the gradients beside encode and decode, in copies (8 bytes of memory traffic an element).
FEEDBACK_COPIES = {"": 0.0, "classic": 5.0, "ef21": 7.5}


@dataclass(frozen=True)
class Job:
    """What one rank computes, and sends, in a step."""

    params: int
    step_s: float  # without any communication
    dtype: torch.dtype = torch.float32  # of the gradients
    bucket_bytes: int = BUCKET_BYTES  # more => fewer messages, less overlap
    overlap: float | None = None  # share of step_s that communication may hide behind; None: by the buckets
    family: str = "adaptive"  # of the optimiser: what feedback narrow codecs get

    def __post_init__(self) -> None:
        if self.params < 1 or self.bucket_bytes < 1:
            raise ValueError(f"params and bucket_bytes must be 1 or more, got {self.params} and {self.bucket_bytes}")
        if not 0 <= self.step_s < math.inf:
            raise ValueError(f"step_s must be 0 or more and finite, got {self.step_s}")
        if self.overlap is not None and not 0 <= self.overlap <= 1:
            raise ValueError(f"overlap must be 0 .. 1, got {self.overlap}")
        if self.dtype not in DTYPES.values():
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype}")
        if self.family not in policy.FAMILIES:
            raise ValueError(f"family must be one of {', '.join(policy.FAMILIES)}, got {self.family!r}")

    @property
    def buckets(self) -> int:
        """How many messages a step sends."""
        return min(self.params, -(-self.params * self.dtype.itemsize // self.bucket_bytes))

    @property
    def bucket(self) -> int:
        """Elements of each."""
        return -(-self.params // self.buckets)

    def hidden_s(self, machine: Machine) -> float:
        """Of the backward pass, after the first bucket is ready: what communication may hide behind."""
        share = BACKWARD * (1 - 1 / self.buckets) * machine.spare if self.overlap is None else self.overlap
        return share * self.step_s


# --- hops -------------------------------------------------------------------------------------------------------------


class Hop(NamedTuple):
    """Bytes on their way from every rank at once."""

    link: str
    seconds: float
    latency_s: float
    messages: int  # that a rank's host sends and receives
    sent: float  # bytes a rank
    crossed: float = 0.0  # of these, to other nodes
    at_once: float = math.inf  # hops of a link whose latencies overlap: see [Note: Latency in a row]

    def times(self, count: int) -> "Hop":
        """So many in a row."""
        return self._replace(
            seconds=count * self.seconds,
            latency_s=count * self.latency_s,
            messages=count * self.messages,
            sent=count * self.sent,
            crossed=count * self.crossed,
        )


def exchange(cluster: Cluster, part: float, link: str = "") -> Hop:
    """Every rank sends `part` bytes to each other: a node's link carries G(W-G) parts, a rank's own G-1."""
    peers, inner = cluster.world - 1, cluster.per_node - 1
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
    """torch's own all_reduce of so many bytes: 2(W-1)/W of them a rank. NCCL takes a tree where that is sooner."""
    latency = cluster.tree_latency_s if cluster.sums_in_tree else cluster.ring_latency_s
    sent = 2 * (cluster.world - 1) / cluster.world * nbytes
    at_once = RING_AT_ONCE[cluster.transport]
    return Hop("", sent / _slowest(cluster), latency, 0, sent, _crossing(cluster, sent), at_once)


def _slowest(cluster: Cluster) -> float:
    """Bytes a second of a ring through all ranks."""
    links = [link.bytes_per_s for link in (cluster.across, cluster.inside) if link is not None]
    return min(links, default=math.inf)


def _crossing(cluster: Cluster, sent: float) -> float:
    """Of what a rank sends in a ring, to other nodes: one rank of a node sends there all of it."""
    return sent / cluster.per_node if cluster.nodes > 1 else 0.0


# --- messages ---------------------------------------------------------------------------------------------------------


class Stage(NamedTuple):
    """What a rank does before a hop, or at the end."""

    kernels_s: float
    calls: int = 0  # of kernels
    hop: Hop | None = None

    def times(self, count: int) -> "Stage":
        """So many in a row."""
        return Stage(count * self.kernels_s, count * self.calls, self.hop and self.hop.times(count))


Chunk = tuple[Stage, ...]


@dataclass(frozen=True)
class Message:
    """A sum over ranks."""

    chunks: tuple[Chunk, ...]
    depth: int = 1  # chunks under way at once
    in_step: bool = False  # each chunk goes a step behind the one before it, and no other message between them
    on_stream: bool = False  # see [Note: One stream]

    @property
    def stages(self) -> Iterator[Stage]:
        """Of all chunks."""
        return (stage for chunk in self.chunks for stage in chunk)

    @property
    def hops(self) -> Iterator[Hop]:
        """Of all chunks."""
        return (stage.hop for stage in self.stages if stage.hop is not None)


def message(
    numel: int, scheme: Scheme, cluster: Cluster, machine: Machine, dtype: torch.dtype, feedback: str
) -> Message:
    """The sum of `numel` elements in a scheme."""
    if scheme.algorithm == "ring":
        return _ringed(numel, scheme.codec, cluster, machine, dtype)
    codec, wire = scheme.codec, scheme.codec.wire_bytes(numel, dtype)
    shards = cluster.per_node if scheme.across else cluster.world
    cut = chunks.cut(numel, wire, cluster.world, shards)
    groups = list(_groups(cut))
    made = {group: _chunk(group, scheme, cluster, machine, feedback) for group in set(groups)}
    largest = codec.wire_bytes(max(group.numel for group in groups), dtype)
    rooms = cluster.world if scheme.algorithm == "one_shot" else 2  # wires that a chunk's scratch holds
    depth = chunks.scratch_limit(wire, largest, rooms * largest, cut.num_chunks) // (rooms * largest)
    return Message(
        tuple(made[group] for group in groups),
        depth,
        in_step=scheme.across is not None,
        on_stream=cluster.transport == "nccl",
    )


class _Group(NamedTuple):
    """Chunks that follow each other and are played as one."""

    numel: int  # of each
    chunks: int


def _groups(cut: chunks.Cut) -> Iterator[_Group]:
    """At most MOST_PLAYED, of all chunks; a group of one where they are no more than that."""
    each = -(-cut.num_chunks // MOST_PLAYED)
    for first in range(0, cut.num_chunks, each):
        end = min(first + each, cut.num_chunks)
        numel = cut.span(end - 1).end - cut.span(first).begin
        yield _Group(-(-numel // (end - first)), end - first)


def _chunk(group: _Group, scheme: Scheme, cluster: Cluster, machine: Machine, feedback: str) -> Chunk:
    if scheme.across is not None:
        stages = _hierarchical(group.numel, scheme.codec, scheme.across, cluster, machine)
    else:
        fed = _feedback_s(machine.speed(scheme.codec), machine, feedback)
        stages = _flat(group.numel, scheme.codec, scheme.algorithm, cluster, machine, fed, bool(feedback))
    return tuple(stage.times(group.chunks) for stage in stages)


def _flat(
    numel: int, codec: Codec, algorithm: str, cluster: Cluster, machine: Machine, fed_s: float = 0.0, fed: bool = False
) -> Iterator[Stage]:
    """one_shot: encode n, send w to all, sum W wires.

    two_phase: encode n, send w/W to each, recode the sum of W shards, gather them, decode n. Feedback's passes over n
    are half before the first message and half after the last.
    """
    speed, world = machine.speed(codec), cluster.world
    parts = 1 if algorithm == "one_shot" else world
    calls = parts * (1 + fed)
    part = codec.wire_bytes(-(-numel // parts))
    first = numel * (speed.encode + fed_s / 2)
    if algorithm == "one_shot":
        yield Stage(first, calls, gather(cluster, part))
        yield Stage(numel * (speed.decode_sum(world) + fed_s / 2), 1)
    else:
        yield Stage(first, calls, exchange(cluster, part))
        yield Stage(numel / world * speed.recode_sum(world), 1, gather(cluster, part))
        yield Stage(numel * (speed.decode + fed_s / 2), parts)


def _feedback_s(speed: CodecSpeed, machine: Machine, feedback: str) -> float:
    """Seconds an element more: the wire is decoded again, and memory is read and written."""
    return speed.decode + FEEDBACK_COPIES[feedback] * machine.copy_s if feedback else 0.0


def _hierarchical(numel: int, inside: Codec, across: Codec, cluster: Cluster, machine: Machine) -> Iterator[Stage]:
    """Encode n, send w/G to each rank of the node, sum; the shard's sum over nodes; encode it, gather, decode n."""
    speed, node, shard = machine.speed(inside), cluster.node, -(-numel // cluster.per_node)
    part = inside.wire_bytes(shard)
    yield Stage(numel * speed.encode, node.world, exchange(node, part, "inside"))
    before = shard * speed.decode_sum(node.world)
    for stage in _flat(shard, across, fewest_roundings(cluster.nodes), cluster.rail, machine):
        if stage.hop is None:
            hop = gather(node, part, "inside")
            yield Stage(stage.kernels_s + shard * speed.encode, stage.calls + 1, hop)
        else:
            yield Stage(before + stage.kernels_s, stage.calls + bool(before), stage.hop._replace(link="across"))
        before = 0.0
    yield Stage(numel * speed.decode, node.world)


def _ringed(numel: int, codec: Codec, cluster: Cluster, machine: Machine, dtype: torch.dtype) -> Message:
    """torch's all_reduce; a cast before and after it that nothing hides."""
    if isinstance(codec, Identity):
        return Message(((Stage(0.0, 1, ring(cluster, numel * dtype.itemsize)), Stage(0.0)),))
    speed, cast = machine.speed(codec), ring(cluster, codec.wire_bytes(numel))
    return Message(((Stage(numel * speed.encode, 2, cast), Stage(numel * speed.decode, 1)),))


# --- times ------------------------------------------------------------------------------------------------------------


def alone_s(sent: Message, machine: Machine) -> float:
    """Seconds of one message: the line played through, and no less than the work of a rank's core."""
    return max(_played_s(sent, machine), taken_s(sent, machine))


def _played_s(sent: Message, machine: Machine) -> float:
    """The line: start a chunk where there is room, else go on with the one that has waited longest."""
    player, waiting, under_way = _Player(sent, machine), deque(sent.chunks), deque[_Waiting]()
    if sent.in_step:
        return _in_step_s(player, waiting)
    while waiting or under_way:
        start = waiting and len(under_way) < sent.depth
        under_way.extend(player.play(*((0.0, waiting.popleft()) if start else under_way.popleft())))
    return player.now


def _in_step_s(player: "_Player", waiting: deque[Chunk]) -> float:
    """A round: one chunk is started, and those under way go on, the youngest first (collectives.steps, In step)."""
    under_way: list[_Waiting] = []
    while waiting or under_way:
        begun = player.play(0.0, waiting.popleft()) if waiting else []
        under_way = begun + [entry for older in under_way for entry in player.play(*older)]
    return player.now


_Waiting = tuple[float, Chunk]  # when a hop has arrived, and the stages after it


class _Player:
    """The clock of a rank, its host's, and those of the links."""

    def __init__(self, sent: Message, machine: Machine) -> None:
        self._sent, self._machine = sent, machine
        self.now, self._host = 0.0, 0.0
        self._free = dict.fromkeys((hop.link for hop in sent.hops), 0.0)

    def play(self, arrival: float, chunk: Chunk) -> list[_Waiting]:
        """The first stage of these, from its arrival to its hop; what follows, if anything does."""
        stage, machine, now = chunk[0], self._machine, max(self.now, arrival)
        if self._sent.on_stream:
            start, self._host = max(now, self._host), self._host + _host_s(stage, machine)
            self.now = max(start + stage.kernels_s, self._host)
        else:
            self.now = now + _work_s(stage, machine)
        hop = stage.hop
        if hop is None:
            return []
        sent_from = max(self.now, self._free[hop.link])
        self._free[hop.link] = sent_from + _held_s(hop, machine)
        return [(sent_from + _hop_s(hop, machine) + hop.latency_s, chunk[1:])]


def busy_s(sent: Message, machine: Machine) -> float:
    """Seconds that a message adds where others go before and after it: of what is busiest."""
    if sent.on_stream:
        host = sum(_host_s(stage, machine) for stage in sent.stages)
        return max(host, taken_s(sent, machine), _played_s(sent, replace(machine, call_s=0.0, message_s=0.0)))
    hops: dict[str, float] = {}
    for hop in sent.hops:
        hops[hop.link] = hops.get(hop.link, 0.0) + _held_s(hop, machine)
    # In step, a message is done before the next one's second stage.
    work = _played_s(sent, machine) if sent.in_step else sum(_work_s(stage, machine) for stage in sent.stages)
    return max(work, taken_s(sent, machine), *hops.values(), 0.0)


def taken_s(sent: Message, machine: Machine) -> float:
    """Seconds of a message that the backward pass misses."""
    stages, hops = list(sent.stages), list(sent.hops)
    kernels, calls = sum(stage.kernels_s for stage in stages), sum(stage.calls for stage in stages)
    return machine.taken_s(kernels, calls, sum(hop.messages for hop in hops), sum(hop.sent for hop in hops))


def _work_s(stage: Stage, machine: Machine) -> float:
    return machine.work_s(stage.kernels_s, stage.calls, stage.hop.messages if stage.hop else 0)


def _host_s(stage: Stage, machine: Machine) -> float:
    """Of it, what the host takes to hand over kernels and messages."""
    return machine.work_s(0.0, stage.calls, stage.hop.messages if stage.hop else 0)


def _hop_s(hop: Hop, machine: Machine) -> float:
    """A link is no faster than the processor that feeds it."""
    return max(hop.seconds, hop.sent * machine.byte_s)


def _held_s(hop: Hop, machine: Machine) -> float:
    """Until the next may follow: see [Note: Latency in a row]."""
    seconds = _hop_s(hop, machine)
    return max(seconds, (seconds + hop.latency_s) / hop.at_once)


# --- steps ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """What a scheme makes of a step."""

    scheme: Scheme
    step_s: float
    sent: float  # bytes a rank and step
    crossed: float  # of these, to other nodes
    wire_s: float  # of the busiest link
    work_s: float  # of kernels, and on a CPU of messages
    exposed_s: float  # communication that the backward pass does not hide
    handled_s: float  # copies, and of exposed_s what takes the processor: kernels, and on a CPU messages
    error: float  # RMS of what a sum loses, over RMS of the sum
    feedback: str
    bucket_bytes: int


def predict(job: Job, scheme: Scheme, cluster: Cluster, machine: Machine) -> Prediction:
    """A step of `job`: compute, the copies of gradients into DDP's buckets and back, and exposed communication."""
    feedback, count = scheme.feedback(job.family), job.buckets
    bucket = message(job.bucket, scheme, cluster, machine, job.dtype, feedback)
    hops = list(bucket.hops)
    exposed = exposed_s(bucket, count, job.hidden_s(machine), machine) if cluster.world > 1 else 0.0
    copies = 2 * job.params * machine.copy_s * job.dtype.itemsize / 4 if cluster.world > 1 else 0.0
    return Prediction(
        scheme,
        job.step_s + copies + exposed,
        sent=count * sum(hop.sent for hop in hops),
        crossed=count * sum(hop.crossed for hop in hops),
        wire_s=count * max(sum(hop.seconds for hop in hops if hop.link == link) for link in {hop.link for hop in hops}),
        work_s=count * sum(_work_s(stage, machine) for stage in bucket.stages),
        exposed_s=exposed,
        handled_s=copies + min(exposed, count * taken_s(bucket, machine)),
        error=scheme.error(cluster, job.dtype),
        feedback=feedback,
        bucket_bytes=job.bucket_bytes,
    )


def exposed_s(bucket: Message, count: int, hidden_s: float, machine: Machine) -> float:
    """Communication of `count` buckets that a step waits for: max(T, K + (C - K)(1 - min(1, V/C))).

    C is the time of all buckets in a row, V = hidden_s what of the backward pass they may hide behind. K of C is work
    that takes the processor from the backward pass and so hides nowhere. T, the last bucket, comes after it.
    """
    last = alone_s(bucket, machine)
    whole, taken = last + (count - 1) * busy_s(bucket, machine), count * taken_s(bucket, machine)
    seen = 1 - min(1.0, hidden_s / whole) if whole > 0 else 1.0
    return max(last, taken + (whole - taken) * seen)
