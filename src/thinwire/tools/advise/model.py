"""The cost model: what a scheme makes of a training step.

A bucket of n elements has stages: kernels, then a message. Of all its stages together,

    wire = bytes on the busiest link / its rate           (no faster than the processor copies them)
    work = kernels + the host's time for calls and messages
    T    = max(wire, work) + min(wire, work) / chunks + messages in a row * latency

gloo pipelines a bucket in chunks; NCCL runs kernels and messages on one stream (one chunk). Of b buckets, the first
b - 1 add their busiest resource each and the last one adds T. Backward compute hides that, except for the work that
needs the processor the backward pass runs on:

    C = (b - 1) * busy + T;  exposed = max(T, taken + (C - taken) * (1 - min(1, hidden / C)))
    step = compute + copies into and out of DDP's buckets + exposed

Legend: W ranks, G of them in a node, M nodes; w bytes of the wire of n elements.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from thinwire.codecs import BlockInt, Cast, Codec, Identity, Lloyd
from thinwire.tools.advise.cluster import Cluster, Machine
from thinwire.tools.recommend import BF16_HOOK

CODECS = ("bf16", "int8", "lloyd4", "lloyd2", "lloyd1")
INSIDE: tuple[Codec, ...] = (Cast("bf16"), BlockInt(8))  # of a node, where the link is fast
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BUCKET_BYTES = 25 << 20  # DDP's default
BACKWARD = 0.5  # of a step's compute: two thirds of forward and backward pass, less what optimizer and data take
CHUNK = 1 << 18  # elements
CLASSIC_COPIES = 5.0  # passes of classic feedback over the gradients, in copies, beside another decode


@dataclass(frozen=True)
class TrainingJob:
    """What one rank computes, and sends, in a step."""

    params: int
    step_s: float  # without any communication
    dtype: torch.dtype = torch.float32  # of the gradients
    bucket_bytes: int = BUCKET_BYTES  # more => fewer messages, less overlap
    overlap: float | None = None  # share of step_s that communication may hide behind; None: by the buckets
    adaptive: bool = True  # whether the optimizer is an Adam, which gets no feedback

    @property
    def buckets(self) -> int:
        return min(self.params, -(-self.params * self.dtype.itemsize // self.bucket_bytes))

    def hidden_s(self, machine: Machine) -> float:
        """The part of the backward pass after the first bucket is ready; none where it keeps the only core busy."""
        spare = 1.0 if machine.device == "cuda" else min(1.0, machine.cores - 1)
        share = BACKWARD * (1 - 1 / self.buckets) * spare if self.overlap is None else self.overlap
        return share * self.step_s


def bits_of(codec: Codec) -> float:
    return 8 * codec.wire_bytes(1 << 20) / (1 << 20)


@dataclass(frozen=True)
class SumScheme:
    """A codec and an algorithm; in a hierarchy `codec` serves inside a node, `across` between nodes."""

    algorithm: str  # "ring" is torch's own all_reduce in `codec`, which is "none" or a cast
    codec: Codec
    across: Codec | None = None

    @property
    def compresses(self) -> bool:
        return not isinstance(self.codec, Identity)

    @property
    def narrowest(self) -> Codec:
        return self.across or self.codec

    def feedback(self, job: TrainingJob) -> str:
        """What compress_ddp adds by itself below 4 bits: Adam's units, or classic feedback; none over a mesh."""
        few = isinstance(self.codec, BlockInt | Lloyd) and self.codec.bits < 4
        return ("none+moments" if job.adaptive else "classic") if few and self.across is None else "none"

    def how(self, cluster: Cluster) -> str:
        """The line of code that does it."""
        if self.algorithm == "ring":
            return BF16_HOOK if self.compresses else "plain DDP, no hook"
        if self.across is not None:
            device = "cuda" if cluster.transport == "nccl" else "cpu"
            mesh = f'torch.distributed.init_device_mesh("{device}", ({cluster.nodes}, {cluster.per_node}))'
            return f'thinwire.compress_ddp(model, "{self.across}", mesh={mesh}, inside="{self.codec}")'
        other = "" if self.algorithm == usual(cluster.world) else f', algorithm="{self.algorithm}"'
        return f'thinwire.compress_ddp(model, "{self.codec}"{other})'

    def __str__(self) -> str:
        if self.across is not None:
            return f"{self.codec} inside / {self.across} across (hierarchical)"
        return f"{self.codec} (ring)" if self.algorithm == "ring" else f"{self.codec} {self.algorithm}"


PLAIN = SumScheme("ring", Identity())


def usual(world: int) -> str:
    """What compress_ddp takes by itself: two ranks that exchange everything round once."""
    return "one_shot" if world <= 2 else "two_phase"


def candidates(cluster: Cluster, codecs: Sequence[Codec], dtype: torch.dtype) -> list[SumScheme]:
    """No compression, torch's bf16, thinwire's codecs: flat, and in a hierarchy where there are levels."""
    narrow = [SumScheme("ring", Cast("bf16"))] if dtype == torch.float32 else []
    used = [codec for codec in codecs if not isinstance(codec, Identity)]
    flat = [SumScheme(usual(cluster.world), codec) for codec in used]
    levels = [
        SumScheme("hierarchical", inside, across)
        for inside in INSIDE
        for across in used
        if cluster.has_levels and bits_of(across) <= bits_of(inside)
    ]
    return [PLAIN, *narrow, *flat, *levels]


@dataclass(frozen=True)
class Bucket:
    """What one bucket takes, of all its stages together; see the formula above."""

    kernels_s: float = 0.0
    calls: int = 0  # of kernels
    stages: int = 0
    hops: float = 0.0  # seconds of latency of messages in a row
    messages: int = 0  # that a rank's host sends and receives
    across_s: float = 0.0  # seconds of a node's link
    inside_s: float = 0.0  # seconds of a rank's link inside its node
    sent: float = 0.0  # bytes per rank
    crossed: float = 0.0  # of these, to other nodes
    plain: bool = False  # torch's own

    def plus(self, other: "Bucket") -> "Bucket":
        sums = {name: getattr(self, name) + value for name, value in vars(other).items() if name != "plain"}
        return Bucket(**sums, plain=self.plain)


def bucket(numel: int, scheme: SumScheme, cluster: Cluster, machine: Machine, job: TrainingJob) -> Bucket:
    if scheme.algorithm == "ring":
        return _ring(numel, scheme, cluster, machine, job)
    if scheme.across is None:
        return _flat(numel, scheme.codec, scheme.algorithm, cluster, machine, scheme.feedback(job) == "classic")
    # Sum a node's shards, sum those over nodes, gather them in the node.
    node, shard = cluster.node, -(-numel // cluster.per_node)
    inner = _flat(numel, scheme.codec, "two_phase", node, machine)
    return inner.plus(_flat(shard, scheme.across, usual(cluster.nodes), cluster.rail, machine))


def _ring(numel: int, scheme: SumScheme, cluster: Cluster, machine: Machine, job: TrainingJob) -> Bucket:
    """torch's all_reduce sends 2(W-1)/W of its bytes per rank; of a node's ranks one sends them to the next node."""
    nbytes = scheme.codec.wire_bytes(numel) if scheme.compresses else numel * job.dtype.itemsize
    sent = 2 * (cluster.world - 1) / cluster.world * nbytes
    speed = machine.speed(scheme.codec)
    casts = numel * (speed.encode + speed.decode) if scheme.compresses else 0.0
    calls = 3 if scheme.compresses else 1
    return replace(_around(cluster, sent), kernels_s=casts, calls=calls, hops=cluster.sum_latency_s, plain=True)


def _flat(
    numel: int, codec: Codec, algorithm: str, cluster: Cluster, machine: Machine, feedback: bool = False
) -> Bucket:
    """one_shot: encode n, send w to all, sum W wires.

    two_phase: encode n, send w/W to each, recode the sum of W shards, gather them, decode n.
    """
    speed, world = machine.speed(codec), cluster.world
    fed = speed.decode + CLASSIC_COPIES * machine.copy_s if feedback else 0.0
    if algorithm == "one_shot":
        kernels = numel * (speed.encode + speed.decode + speed.wire * (world - 1) + fed)
        return Bucket(kernels, 2, 2).plus(_gather(cluster, codec.wire_bytes(numel)))
    part = codec.wire_bytes(-(-numel // world))
    again = numel / world * (speed.recode + speed.wire * (world - 1))
    kernels = numel * (speed.encode + speed.decode + fed) + again
    return Bucket(kernels, 2 * world + 1, 3).plus(_exchange(cluster, part)).plus(_gather(cluster, part))


def _exchange(cluster: Cluster, part: float) -> Bucket:
    """Every rank sends `part` bytes to each other: a node's link carries G(W-G) parts, a rank's own G-1."""
    inner = cluster.per_node - 1
    outer = cluster.world - 1 - inner
    across = cluster.per_node * outer * part / cluster.across.bytes_per_s if cluster.across else 0.0
    inside = inner * part / cluster.inside.bytes_per_s if cluster.inside else 0.0
    both = (inner + outer) * part
    messages = 2 * (inner + outer)
    return Bucket(0.0, 0, 0, cluster.latency_s, messages, across, inside, both, outer * part)


def _gather(cluster: Cluster, part: float) -> Bucket:
    """Every rank gets every other's `part`. NCCL passes them round a ring, which enters and leaves a node once."""
    if cluster.transport == "gloo":
        return _exchange(cluster, part)
    steps = cluster.world - 1
    return replace(_around(cluster, steps * part), hops=steps * cluster.latency_s, messages=1)


def _around(cluster: Cluster, sent: float) -> Bucket:
    """Each rank passes `sent` bytes on around a ring; of a node's ranks one sends them to the next node."""
    across, inside = (sent / link.bytes_per_s if link else 0.0 for link in (cluster.across, cluster.inside))
    return Bucket(across_s=across, inside_s=inside, sent=sent, crossed=sent / cluster.per_node if across else 0.0)


@dataclass(frozen=True)
class BucketTimes:
    """Seconds of one bucket."""

    alone_s: float  # T
    busy_s: float  # what it adds where others go before and after it
    taken_s: float  # of it, what the backward pass loses
    wire_s: float
    work_s: float


def times(one: Bucket, numel: int, cluster: Cluster, machine: Machine) -> BucketTimes:
    wire = max(one.across_s, one.inside_s, one.sent * machine.byte_s)
    if machine.device == "cuda":
        host = machine.plain_s if one.plain else one.stages * machine.stage_s
        work, taken = max(one.kernels_s, host), one.kernels_s
        alone = wire + work + one.hops
        return BucketTimes(alone, max(host, wire + one.kernels_s + one.hops), taken, wire, work)
    most = 4 if cluster.world == 2 else 8 * (cluster.world - 1)
    chunks = 1 if one.plain else max(1, min(most, 32, numel // CHUNK))
    work = one.kernels_s + chunks * (one.calls * machine.call_s + one.messages * machine.message_s)
    taken = (work + one.sent * machine.byte_s) / machine.cores
    alone = max(wire, work) + min(wire, work) / chunks + one.hops
    busy = max(wire + one.hops / 2 if one.plain else wire, work, taken)  # torch's gloo runs two sums at a time
    return BucketTimes(max(alone, taken), busy, taken, wire, work)


@dataclass(frozen=True)
class Prediction:
    """What a scheme makes of a step. `thinwire advise --json` prints the fields under these names."""

    scheme: SumScheme
    bytes: float  # sent per rank and step
    bytes_across: float  # of these, to other nodes
    step_s: float
    exposed_s: float  # communication that the backward pass does not hide
    wire_s: float  # of the busiest link
    work_s: float  # of kernels, calls and messages
    feedback: str
    bucket_bytes: int


def predict(job: TrainingJob, scheme: SumScheme, cluster: Cluster, machine: Machine) -> Prediction:
    """A step of `job`; see the formula above."""
    count, numel = job.buckets, -(-job.params // job.buckets)
    one = bucket(numel, scheme, cluster, machine, job)
    each = times(one, numel, cluster, machine)
    whole = (count - 1) * each.busy_s + each.alone_s
    taken = count * each.taken_s
    seen = 1 - min(1.0, job.hidden_s(machine) / whole) if whole > 0 else 1.0
    exposed = max(each.alone_s, taken + (whole - taken) * seen) if cluster.world > 1 else 0.0
    copies = 2 * job.params * machine.copy_s * job.dtype.itemsize / 4 if cluster.world > 1 else 0.0
    return Prediction(
        scheme,
        bytes=count * one.sent,
        bytes_across=count * one.crossed,
        step_s=job.step_s + copies + exposed,
        exposed_s=exposed,
        wire_s=count * each.wire_s,
        work_s=count * each.work_s,
        feedback=scheme.feedback(job),
        bucket_bytes=job.bucket_bytes,
    )
