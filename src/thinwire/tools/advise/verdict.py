"""The advice: every scheme predicted and ranked, one of them advised by `tools.rule`, and why."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from thinwire.codecs import Cast, Codec, codec
from thinwire.collectives.hierarchical import fewest_roundings
from thinwire.tools import rule
from thinwire.tools.advise import evidence, model, schemes
from thinwire.tools.advise.evidence import Losses
from thinwire.tools.advise.links import Cluster
from thinwire.tools.advise.machine import Machine
from thinwire.tools.advise.model import Prediction, TrainingJob
from thinwire.tools.rule import GAIN, Choice, Way

BUCKETS = tuple(model.BUCKET_BYTES * 4**power for power in range(4))  # 25 MiB to 1.6 GiB; DDP's bucket_cap_mb
PREDICTED = "predicted"
_SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Verdict:
    ranked: tuple[Prediction, ...]  # the fastest first
    ways: Mapping[schemes.SumScheme, Way]  # what the rule saw of each
    choice: Choice
    advised: Prediction
    reason: str
    notes: tuple[str, ...]

    def way(self, prediction: Prediction) -> Way:
        return self.ways[prediction.scheme]


def judge(
    job: TrainingJob,
    cluster: Cluster,
    machine: Machine,
    *,
    codecs: Sequence[Codec] = tuple(map(codec, schemes.CODECS)),
    losses: Sequence[Losses] = (),
    buckets: Sequence[int] = BUCKETS,
) -> Verdict:
    """Predict all schemes, each with the best size of buckets, and choose by the rule.

    `losses` are those of runs of one's own, which count before the committed ones.
    """
    found = [
        _with_best_buckets(job, scheme, cluster, machine, buckets)
        for scheme in schemes.candidates(cluster, codecs, job.dtype)
    ]
    ordered = [found[0], *sorted(found[1:], key=lambda prediction: prediction.error)]
    known = [*losses, *evidence.shipped().losses]
    ways = {prediction.scheme: _way(prediction, job, cluster, known) for prediction in ordered}
    choice = rule.choose(list(ways.values()), PREDICTED)
    ranked = tuple(sorted(found, key=lambda prediction: prediction.step_s))
    best = next(prediction for prediction in found if ways[prediction.scheme] is choice.chosen)
    reason = _why_not(job, ordered, choice, cluster, machine)
    if choice.compress:
        steps = (_parts(job, prediction, machine) for prediction in (found[0], best))
        reason = f"a step without compression takes {{}}; with {choice.chosen.name} {{}}".format(*steps)
    return Verdict(ranked, ways, choice, best, reason, tuple(_notes(choice, best, cluster)))


def _way(prediction: Prediction, job: TrainingJob, cluster: Cluster, known: Sequence[Losses]) -> Way:
    scheme = prediction.scheme
    kind = scheme.algorithm if scheme.algorithm in ("ring", "hierarchical") else "flat"
    low, high = evidence.shipped().misses[kind] if scheme.compresses else (1.0, 1.0)
    fed = f"{prediction.feedback}{'+moments' if scheme.weighs(job.family) else ''}"
    loss = evidence.find(rule.name(str(scheme.narrowest), fed), known)
    exact = not scheme.compresses or scheme.narrowest == Cast("bf16")
    code = scheme.how(cluster)
    return Way(_name(scheme, fed, job.dtype, cluster), code, prediction.step_s, low, high, loss, exact)


def _name(scheme: schemes.SumScheme, feedback: str, dtype: torch.dtype, cluster: Cluster) -> str:
    if scheme.across is not None:
        return f"{scheme.across} across nodes, {scheme.codec} inside"
    if scheme.algorithm == "ring":
        return str(scheme.codec) if scheme.compresses else _SHORT[dtype]
    found = rule.name(str(scheme.codec), feedback)
    usual = scheme.algorithm == fewest_roundings(cluster.world) and found != "bf16"  # torch's own has that name
    return found if usual else f"{found}, {scheme.algorithm}"


def _with_best_buckets(
    job: TrainingJob, scheme: schemes.SumScheme, cluster: Cluster, machine: Machine, buckets: Sequence[int]
) -> Prediction:
    """The smallest buckets that are not clearly slower than others; of sizes that hold the whole model one is tried."""
    whole = job.params * job.dtype.itemsize
    sizes = sorted(buckets)[: sum(size < whole for size in buckets) + 1]
    tried = [model.predict(replace(job, bucket_bytes=size), scheme, cluster, machine) for size in sizes]
    fastest = min(prediction.step_s for prediction in tried)
    return next(prediction for prediction in tried if (1 - GAIN) * prediction.step_s <= fastest)


def _parts(job: TrainingJob, prediction: Prediction, machine: Machine) -> str:
    """A step, and what it is the sum of."""
    handled = prediction.handled_s
    waits = max(0.0, prediction.step_s - job.step_s - handled)
    what = "copies and kernels" if machine.device == "cuda" else "copies, kernels and messages"
    return (
        f"{duration(prediction.step_s)}: {duration(job.step_s)} of compute, {duration(handled)} of {what}, "
        f"{duration(waits)} of waiting for gradients"
    )


def _why_not(
    job: TrainingJob, ordered: Sequence[Prediction], choice: Choice, cluster: Cluster, machine: Machine
) -> str:
    """What stands against compression; `ordered` begins with none."""
    plain, *others = ordered
    if cluster.world == 1 or not others:
        return "there is no other rank to send to" if cluster.world == 1 else "no codec was given"
    if plain.exposed_s < GAIN * plain.step_s:
        return f"a step takes {_parts(job, plain, machine)}: there is next to nothing to win"
    if choice.rival is None:
        return "no other scheme is known to keep the loss"
    best = min((found for found in others if found.step_s == choice.rival.step_s), key=lambda found: found.error)
    if best.work_s > plain.wire_s:
        return (
            f"the links move the gradients in {duration(plain.wire_s)}; {choice.rival.name}, the best that keeps the "
            f"loss, takes {duration(best.work_s)} for kernels and messages alone"
        )
    return f"{choice.rival.name}, the best that keeps the loss, may be no faster"


def _notes(choice: Choice, advised: Prediction, cluster: Cluster) -> Iterator[str]:
    """What the advice risks, and what is faster; which buckets the advice is for; what nobody has measured."""
    yield from choice.notes
    if choice.compress and advised.bucket_bytes != model.BUCKET_BYTES:
        size = mebibytes(advised.bucket_bytes)
        yield f"predicted for buckets of {size} MiB: DDP(bucket_cap_mb={size})"
    known = evidence.shipped()  # steps that predictions were compared with
    beyond = ["NCCL between ranks"] if cluster.transport == "nccl" else []
    beyond += [f"more than {known.most_ranks} ranks"] if cluster.world > known.most_ranks else []
    fast = any(link.bytes_per_s > known.fastest_bytes_per_s for link in cluster.links)
    beyond += [f"links above {8e-9 * known.fastest_bytes_per_s:.2g} Gbit/s"] if fast else []
    if beyond and cluster.world > 1:
        yield f"never compared with a measured step: {', '.join(beyond)}. The ranges are those of what was compared"


def mebibytes(nbytes: int) -> str:
    """As DDP's bucket_cap_mb counts them, with a decimal where there is one."""
    return f"{nbytes / 2**20:.1f}".removesuffix(".0")


def duration(seconds: float) -> str:
    if seconds >= 1 or seconds == 0:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.3g} us"
