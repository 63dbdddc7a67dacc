"""The cost model: what a scheme makes of a training step.

Gradients travel in pieces: DDP's buckets, or the modules that FSDP2 shards. Of one piece,

    wire = bytes on the busiest link / its rate           (no faster than the processor copies them)
    work = kernels + the host's time for calls and messages
    T    = max(wire, work) + min(wire, work) / chunks + messages in a row * latency

gloo pipelines a piece in chunks; on NCCL kernels and messages share a stream, and T is their sum. Of b pieces the first
b - 1 add their busiest resource each, the last one T. Compute hides that, except for work on the processor that the
backward pass runs on:

    C = (b - 1) * busy + T;  exposed = max(T, C - (C - taken) * min(1, hidden / C))
    step = compute + copies into and out of buckets + exposed

DiLoCo adds a sum between sites to every `every`-th step. Legend: W ranks, G of them in a node, M nodes; w bytes of the
wire of n elements.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from thinwire.codecs import BlockInt, Cast, Codec, Identity, Lloyd
from thinwire.collectives.sums import fewest_roundings
from thinwire.integrations.choice import feedback_of
from thinwire.tools.advise.cluster import Cluster, Machine
from thinwire.tools.recommend import BF16_HOOK

DDP, FSDP2, DILOCO = "ddp", "fsdp2", "diloco"
CODECS = ("bf16", "int8", "lloyd4", "trellis3", "trellis2", "lloyd2", "lloyd1")
FAMILIES = {"adam": "adaptive", "sgd": "linear", "muon": "muon"}  # of optimizers, as compress_ddp calls them
WIDE = 8  # bits of weights; with fewer, rounding them at every step costs accuracy
NOTHING = Identity()
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BUCKET_BYTES = 25 << 20  # DDP's default
BACKWARD = 0.5  # of a step's compute: two thirds of forward and backward pass, less what optimizer and data take
PASSES = 0.75  # forward pass and backward pass: FSDP2 gathers ahead in both
CHUNK = 1 << 18  # elements
CLASSIC_COPIES = 5.0  # passes of classic feedback over the gradients, in copies, beside another decode
MOMENTS = 2.0  # what sums in Adam's units take of the host, over others (ddp_steps_gpt124m_h200_*_1host_*.json)
OUTER_COPIES = 8.0  # passes of DiLoCo's outer step over the parameters
EVERY = 30  # steps between DiLoCo's rounds
LAYER = 12 * 128**2  # a transformer 128 times as wide as deep has this times layers³ weights


@dataclass(frozen=True)
class TrainingJob:
    """What one rank computes, and sends, in a step."""

    params: int
    step_s: float  # without any communication
    dtype: torch.dtype = torch.float32  # of the gradients
    bucket_bytes: int = BUCKET_BYTES  # more => fewer messages, less overlap
    overlap: float | None = None  # share of step_s that communication may hide behind; None: by the pieces
    optimizer: str = "adam"  # one of FAMILIES: decides the feedback of few bits
    parallel: str = DDP
    trained: int = 0  # parameters that learn; 0: all
    gathered: torch.dtype = torch.bfloat16  # FSDP2's weights
    every: int = EVERY
    units: int = 0  # that FSDP2 shards; 0: a transformer's layers

    @property
    def learns(self) -> int:
        return self.trained or self.params

    @property
    def pieces(self) -> int:
        if self.parallel == FSDP2:
            return min(self.params, self.units or max(1, round(math.cbrt(self.params / LAYER))))
        return min(self.learns, -(-self.learns * self.dtype.itemsize // self.bucket_bytes))

    def hidden_s(self, machine: Machine) -> float:
        """The passes after the first piece is ready; none on a CPU, whose only core they keep busy."""
        share = (PASSES if self.parallel == FSDP2 else BACKWARD) * (1 - 1 / self.pieces) * (machine.device == "cuda")
        return (share if self.overlap is None else self.overlap) * self.step_s


def bits_of(codec: Codec) -> float:
    return 8 * codec.wire_bytes(1 << 20) / (1 << 20)


@dataclass(frozen=True)
class Scheme:
    """A codec and an algorithm; where there are two levels `inside` serves inside a node, `codec` between nodes."""

    algorithm: str  # "ring" is torch's own, in `codec`, which is "none" or a cast; "sharded" has weights, too
    codec: Codec
    inside: Codec | None = None
    weights: Codec = NOTHING

    @property
    def compresses(self) -> bool:
        return not (isinstance(self.codec, Identity) and isinstance(self.weights, Identity))

    @property
    def exactness(self) -> tuple[float, ...]:
        """The less, the more exact."""
        return tuple(-bits_of(codec or NOTHING) for codec in (self.codec, self.weights, self.inside))

    @property
    def kind(self) -> str:
        return "flat" if self.algorithm in ("one_shot", "two_phase") else self.algorithm

    def feedback(self, job: TrainingJob) -> str:
        """What compress_ddp and DiLoCo add to few bits: feedback, or Adam's units. FSDP2 and levels have none."""
        if job.parallel == FSDP2 or self.inside is not None:
            return "none"
        outer = job.parallel == DILOCO
        family = "linear" if outer else FAMILIES[job.optimizer]
        few = isinstance(self.codec, BlockInt | Lloyd) and self.codec.bits < 4
        units = "+moments" if few and family == "adaptive" else ""
        return (feedback_of("auto", self.codec, family, outer=outer) or "none") + units

    def how(self, job: TrainingJob, cluster: Cluster) -> str:
        """The line of code that does it."""
        given = f'"{self.codec}"'
        if job.parallel == DILOCO:
            group = ', group=mesh.get_group("site")' if cluster.per_node > 1 else ""
            return f"thinwire.DiLoCo(model, optimizer, every={job.every}, codec={given}{group})"
        if job.parallel == FSDP2:
            if self.algorithm == "ring":
                return "fully_shard(..., mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16))"
            weights = "" if isinstance(self.weights, Identity) else f', weights="{self.weights}"'
            return f"thinwire.compress_fsdp(model, gradients={given}{weights})"
        if self.algorithm == "ring":
            return BF16_HOOK
        if self.inside is not None:
            device = "cuda" if cluster.transport == "nccl" else "cpu"
            mesh = f'torch.distributed.init_device_mesh("{device}", ({cluster.nodes}, {cluster.per_node}))'
            return f'thinwire.compress_ddp(model, {given}, mesh={mesh}, inside="{self.inside}")'
        return f"thinwire.compress_ddp(model, {given})"

    def __str__(self) -> str:
        both = f"{self.codec}" if isinstance(self.weights, Identity) else f"{self.codec}/{self.weights}"
        return f"{both} across nodes, {self.inside} inside" if self.inside is not None else both


PLAIN = Scheme("ring", NOTHING)
BF16 = Scheme("ring", Cast("bf16"))
usual = fewest_roundings  # what compress_ddp takes by itself


def candidates(job: TrainingJob, cluster: Cluster, codecs: Sequence[Codec]) -> list[Scheme]:
    """No compression, torch's bf16, thinwire's codecs: flat, and in levels where there are some."""
    narrow = [BF16] if job.dtype == torch.float32 and job.parallel != DILOCO else []
    used = [codec for codec in codecs if not isinstance(codec, Identity)]
    real = [codec for codec in used if not isinstance(codec, Cast)]
    if job.parallel == DILOCO:
        return [PLAIN, *(Scheme(usual(cluster.nodes), codec) for codec in used)]
    if job.parallel == FSDP2:
        kept = [codec for codec in real if isinstance(codec, BlockInt) and codec.bits >= WIDE]
        return [PLAIN, *narrow, *(Scheme("sharded", c, None, w) for c in real for w in (NOTHING, *kept))]
    flat = [Scheme(usual(cluster.world), codec) for codec in real]
    inner = [Cast("bf16"), BlockInt(8)] if cluster.has_levels else []
    levels = [Scheme("hierarchical", c, i) for i in inner for c in used if bits_of(c) <= bits_of(i)]
    return [PLAIN, *narrow, *flat, *levels]


@dataclass(frozen=True)
class Portion:
    """What one bucket or module takes, of all its stages together; see the formula above."""

    kernels_s: float = 0.0
    calls: int = 0  # of kernels
    sums: float = 0  # of thinwire's collectives
    hops: float = 0.0  # seconds of latency of messages in a row
    messages: int = 0  # that a rank's host sends and receives
    across_s: float = 0.0  # seconds of a node's link
    inside_s: float = 0.0  # seconds of a rank's link inside its node
    sent: float = 0.0  # bytes per rank
    crossed: float = 0.0  # of these, to other nodes

    def __add__(self, other: "Portion") -> "Portion":
        return Portion(*(getattr(self, name) + value for name, value in vars(other).items()))


def piece(numel: int, scheme: Scheme, cluster: Cluster, machine: Machine, job: TrainingJob) -> Portion:
    """Of `numel` elements; FSDP2's frozen ones are gathered and not summed."""
    if job.parallel == FSDP2:
        return _sharded(numel, scheme, cluster, machine, job)
    if scheme.algorithm == "ring":
        return _ring(numel, scheme.codec, cluster, machine, job.dtype)
    if scheme.inside is None:
        feedback = scheme.feedback(job)
        fed = feedback.startswith(("classic", "ef21"))
        found = _flat(numel, scheme.codec, scheme.algorithm, cluster, machine, fed)
        return replace(found, sums=MOMENTS if "moments" in feedback else 1)
    # Sum a node's shards, sum those over nodes, gather them in the node.
    inner = _flat(numel, scheme.inside, "two_phase", cluster.node, machine)
    shard = -(-numel // cluster.per_node)
    return inner + _flat(shard, scheme.codec, usual(cluster.nodes), cluster.rail, machine)


def _sharded(numel: int, scheme: Scheme, cluster: Cluster, machine: Machine, job: TrainingJob) -> Portion:
    """Weights are gathered before either pass, and gradients go to the ranks that own them."""
    learns = -(-numel * job.learns // job.params)
    weights, gradients, world = scheme.weights, scheme.codec, cluster.world
    narrow = isinstance(scheme.codec, Cast) and scheme.algorithm == "ring"
    if isinstance(weights, Identity):
        gathered = _passed(numel * (2 if narrow else job.gathered.itemsize), cluster)
    else:
        speed, part = machine.speed(weights), -(-numel // world)
        kernels = part * speed.encode + numel * speed.decode
        gathered = Portion(kernels, 1 + world, 1) + _gather(cluster, weights.wire_bytes(part))
    if scheme.algorithm == "ring":
        twice = 2 if cluster.transport == "gloo" else 1  # gloo sums everywhere, and drops what is not a rank's own
        scattered = _passed(twice * learns * (2 if narrow else job.dtype.itemsize), cluster)
    else:
        speed, part = machine.speed(gradients), -(-learns // world)
        kernels = learns * speed.encode + part * (speed.decode + speed.wire * (world - 1))
        scattered = Portion(kernels, 1 + world, 1) + _exchange(cluster, gradients.wire_bytes(part))
    return gathered + gathered + scattered


def _passed(nbytes: float, cluster: Cluster) -> Portion:
    """torch's gather or scatter of so many bytes: once around a ring."""
    return replace(_around(cluster, (cluster.world - 1) / cluster.world * nbytes), calls=1, hops=cluster.ring_s)


def _ring(numel: int, codec: Codec, cluster: Cluster, machine: Machine, dtype: torch.dtype) -> Portion:
    """torch's all_reduce sends 2(W-1)/W of its bytes per rank; of a node's ranks one sends them to the next node."""
    narrow = not isinstance(codec, Identity)
    nbytes = codec.wire_bytes(numel) if narrow else numel * dtype.itemsize
    speed = machine.speed(codec)
    casts = numel * (speed.encode + speed.decode) if narrow else 0.0
    around = _around(cluster, 2 * (cluster.world - 1) / cluster.world * nbytes)
    return replace(around, kernels_s=casts, calls=3 if narrow else 1, hops=cluster.sum_latency_s)


def _flat(
    numel: int, codec: Codec, algorithm: str, cluster: Cluster, machine: Machine, feedback: bool = False
) -> Portion:
    """one_shot: encode n, send w to all, sum W wires.

    two_phase: encode n, send w/W to each, recode the sum of W shards, gather them, decode n.
    """
    speed, world = machine.speed(codec), cluster.world
    fed = speed.decode + CLASSIC_COPIES * machine.copy_s if feedback else 0.0
    if algorithm == "one_shot":
        kernels = numel * (speed.encode + speed.decode + speed.wire * (world - 1) + fed)
        return Portion(kernels, 2, 1) + _gather(cluster, codec.wire_bytes(numel))
    part = codec.wire_bytes(-(-numel // world))
    again = numel / world * (speed.recode + speed.wire * (world - 1))
    kernels = numel * (speed.encode + speed.decode + fed) + again
    return Portion(kernels, 2 * world + 1, 1) + _exchange(cluster, part) + _gather(cluster, part)


def _exchange(cluster: Cluster, part: float) -> Portion:
    """Every rank sends `part` bytes to each other: a node's link carries G(W-G) parts, a rank's own G-1."""
    inner = cluster.per_node - 1
    outer = cluster.world - 1 - inner
    across = cluster.per_node * outer * part / cluster.across.bytes_per_s if cluster.across else 0.0
    inside = inner * part / cluster.inside.bytes_per_s if cluster.inside else 0.0
    both = (inner + outer) * part
    return Portion(0.0, 0, 0, cluster.latency_s, 2 * (inner + outer), across, inside, both, outer * part)


def _gather(cluster: Cluster, part: float) -> Portion:
    """Every rank gets every other's `part`. NCCL passes them round a ring, which enters and leaves a node once."""
    if cluster.transport == "gloo":
        return _exchange(cluster, part)
    return replace(_around(cluster, (cluster.world - 1) * part), hops=cluster.ring_s, messages=1)


def _around(cluster: Cluster, sent: float) -> Portion:
    """Each rank passes `sent` bytes on around a ring; of a node's ranks one sends them to the next node."""
    across, inside = (sent / link.bytes_per_s if link else 0.0 for link in (cluster.across, cluster.inside))
    return Portion(across_s=across, inside_s=inside, sent=sent, crossed=sent / cluster.per_node if across else 0.0)


@dataclass(frozen=True)
class PortionTimes:
    """Seconds of one piece."""

    alone_s: float  # T
    busy_s: float  # what it adds where others go before and after it
    taken_s: float  # of it, what the passes lose


def times(one: Portion, numel: int, cluster: Cluster, machine: Machine) -> PortionTimes:
    wire = max(one.across_s, one.inside_s, one.sent * machine.byte_s)
    if machine.device == "cuda":
        taken = one.kernels_s + one.sums * machine.sum_s
        alone = wire + taken + one.hops
        return PortionTimes(alone, alone, taken)
    most = 4 if cluster.world == 2 else 8 * (cluster.world - 1)
    chunks = max(1, min(most, 32, numel // CHUNK)) if one.sums else 1
    work = one.kernels_s + chunks * (one.calls * machine.call_s + one.messages * machine.message_s)
    taken = work + one.sent * machine.byte_s
    alone = max(wire, work) + min(wire, work) / chunks + one.hops
    busy = max(wire if one.sums else wire + one.hops / 2, work, taken)  # torch's gloo runs two sums at a time
    return PortionTimes(max(alone, taken), busy, taken)


@dataclass(frozen=True)
class Prediction:
    """What a scheme makes of a step. `thinwire advise --json` prints the fields under these names."""

    scheme: Scheme
    bytes: float  # sent per rank and step
    bytes_across: float  # of these, to other nodes
    step_s: float
    exposed_s: float  # communication that compute does not hide; of DiLoCo with its round's share
    round_s: float  # DiLoCo's sum between sites, every `every` steps
    host_s: float  # of thinwire's calls and, on a CPU, kernels
    messages: int  # that a rank sends and receives per step
    bucket_bytes: int


def predict(job: TrainingJob, scheme: Scheme, cluster: Cluster, machine: Machine) -> Prediction:
    """A step of `job`; see the formula above."""
    if job.parallel == DILOCO:
        return _rounds(job, scheme, cluster, machine)
    count = job.pieces
    numel = -(-(job.params if job.parallel == FSDP2 else job.learns) // count)
    one = piece(numel, scheme, cluster, machine, job)
    each = times(one, numel, cluster, machine)
    whole = (count - 1) * each.busy_s + each.alone_s
    taken = count * each.taken_s
    seen = min(1.0, job.hidden_s(machine) / whole) if whole > 0 else 0.0
    exposed = max(each.alone_s, whole - (whole - taken) * seen) if cluster.world > 1 else 0.0
    copies = 2 * job.learns * machine.copy_s * job.dtype.itemsize / 4 if cluster.world > 1 else 0.0
    return Prediction(
        scheme,
        bytes=count * one.sent,
        bytes_across=count * one.crossed,
        step_s=job.step_s + copies + exposed,
        exposed_s=exposed,
        round_s=0.0,
        host_s=taken if machine.device == "cpu" else count * one.sums * machine.sum_s,
        messages=count * one.messages,
        bucket_bytes=job.bucket_bytes,
    )


def _rounds(job: TrainingJob, scheme: Scheme, cluster: Cluster, machine: Machine) -> Prediction:
    """Sites are nodes: FSDP2 inside one, and the ranks that hold the same shard average it between sites."""
    inner = predict(replace(job, parallel=FSDP2 if cluster.per_node > 1 else DDP), PLAIN, cluster.node, machine)
    shard = -(-job.learns // cluster.per_node)
    alone = replace(job, parallel=DDP, bucket_bytes=shard * 4)
    one = piece(shard, scheme, cluster.rail, machine, alone)
    outer = times(one, shard, cluster.rail, machine).alone_s + OUTER_COPIES * shard * machine.copy_s
    round_s = outer if cluster.nodes > 1 else 0.0
    return replace(
        inner,
        scheme=scheme,
        bytes=inner.bytes + one.sent / job.every,
        bytes_across=one.crossed / job.every,
        step_s=inner.step_s + round_s / job.every,
        exposed_s=inner.exposed_s + round_s / job.every,
        round_s=round_s,
        host_s=inner.host_s + one.sums * machine.sum_s / job.every,
        messages=inner.messages + math.ceil(one.messages / job.every),
    )
