"""The advice: every scheme predicted and ranked, one of them advised, and why."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from thinwire.codecs import Codec, codec
from thinwire.integrations.auto import GAIN
from thinwire.tools.advise import model, schemes
from thinwire.tools.advise.links import Cluster
from thinwire.tools.advise.machine import Machine
from thinwire.tools.advise.model import Prediction, TrainingJob

ERROR_BUDGET = 0.15  # of the whole sum; compress_ddp's, of the same size, is that of one rounding
BUCKETS = tuple(model.BUCKET_BYTES * 4**power for power in range(4))  # 25 MiB to 1.6 GiB; DDP's bucket_cap_mb


@dataclass(frozen=True)
class Verdict:
    ranked: tuple[Prediction, ...]
    plain: Prediction
    advised: Prediction
    reason: str
    notes: tuple[str, ...]

    @property
    def compress(self) -> bool:
        return self.advised.scheme.compresses

    def speedup(self, prediction: Prediction) -> float:
        """Against no compression."""
        return self.plain.step_s / prediction.step_s if prediction.step_s else 1.0


def judge(
    job: TrainingJob,
    cluster: Cluster,
    machine: Machine,
    *,
    codecs: Sequence[Codec] = tuple(map(codec, schemes.CODECS)),
    error_budget: float = ERROR_BUDGET,
    buckets: Sequence[int] = BUCKETS,
) -> Verdict:
    """Predict all schemes, each with the best size of buckets, and choose by the rule of `compress_ddp(model, "auto")`.

    From the most to the least exact, within the error budget, a scheme has to be GAIN faster than the best so far.
    """
    found = [
        _with_best_buckets(job, scheme, cluster, machine, buckets)
        for scheme in schemes.candidates(cluster, codecs, job.dtype)
    ]
    plain = best = found[0]
    for prediction in sorted(found[1:], key=lambda prediction: prediction.error):
        if prediction.error <= error_budget and prediction.step_s < (1 - GAIN) * best.step_s:
            best = prediction
    ranked = tuple(sorted(found, key=lambda prediction: prediction.step_s))
    if best is plain:
        reason = _why_not(job, plain, ranked, cluster, machine, error_budget)
    else:
        steps = (_parts(job, prediction, machine) for prediction in (plain, best))
        told = f"an uncompressed step takes {{}}; with {best.scheme} {{}}".format(*steps)
        reason = f"{told}. Expected error {best.error:.2g}, of {error_budget:g} allowed"
    notes = [
        *_alternatives(best, ranked, error_budget),
        *_launches(job, plain, ranked, cluster, machine, error_budget),
    ]
    return Verdict(ranked, plain, best, reason, tuple(notes))


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


def _nothing_to_win(plain: Prediction) -> bool:
    return plain.exposed_s < GAIN * plain.step_s


def _why_not(
    job: TrainingJob, plain: Prediction, ranked: Sequence[Prediction], cluster: Cluster, machine: Machine, budget: float
) -> str:
    """What stands against compression; `ranked` may be led by schemes that lose too much."""
    others = [prediction for prediction in ranked if prediction is not plain]
    if cluster.world == 1 or not others:
        return "there is nobody to send to" if cluster.world == 1 else "no codec was given"
    if _nothing_to_win(plain):
        return f"a step takes {_parts(job, plain, machine)}: there is next to nothing to win"
    exact = [prediction for prediction in others if prediction.error <= budget]
    if not exact:
        return f"every codec is over the error budget of {budget:g}"
    best = exact[0]
    if best.work_s > plain.wire_s:
        return (
            f"the links move the gradients in {duration(plain.wire_s)}; {best.scheme}, the fastest within the error "
            f"budget, takes {duration(best.work_s)} for kernels and messages alone"
        )
    change = plain.step_s / best.step_s - 1
    return (
        f"{best.scheme}, the fastest within the error budget, is predicted {change:+.1%}: less than {GAIN:.0%} is noise"
    )


def _alternatives(best: Prediction, ranked: Sequence[Prediction], budget: float) -> Iterator[str]:
    """What would be faster and loses too much; which buckets the advice is for."""
    faster = [p for p in ranked if p.error > budget and p.step_s < (1 - GAIN) * best.step_s]
    if faster:
        first = min(faster, key=lambda prediction: (schemes.omega(prediction.scheme.narrowest), prediction.step_s))
        fed = f" with {first.feedback} feedback" if first.feedback != "none" else ""
        yield (
            f"{first.scheme}{fed} would take {duration(first.step_s)}, but its error of {first.error:.2g} is over the "
            f"budget: watch the training loss if you try it"
        )
    if best.scheme.compresses and best.bucket_bytes != model.BUCKET_BYTES:
        size = mebibytes(best.bucket_bytes)
        yield f"predicted for buckets of {size} MiB: DDP(bucket_cap_mb={size})"


def _launches(
    job: TrainingJob, plain: Prediction, ranked: Sequence[Prediction], cluster: Cluster, machine: Machine, budget: float
) -> Iterator[str]:
    """Where one figure of the host decides about compression: most of what the best such scheme adds."""
    exact = [p for p in ranked if p.scheme.algorithm != "ring" and p.error <= budget]
    if machine.device != "cuda" or not exact or _nothing_to_win(plain):
        return
    first = exact[0]
    same_buckets = replace(job, bucket_bytes=first.bucket_bytes)
    free = replace(machine, call_s=0.0, nccl=machine.nccl and replace(machine.nccl, stage_s=0.0))
    without = model.predict(same_buckets, first.scheme, cluster, free)
    extra = first.step_s - job.step_s
    launches = first.step_s - without.step_s
    each = f"kernels, {duration(machine.call_s)} each on {machine.source}"
    if machine.nccl is not None:
        each = f"kernels and messages, {duration(machine.nccl.stage_s)} for a pair on {machine.nccl.source}"
    if launches > extra / 2:
        yield (
            f"of the {duration(extra)} that {first.scheme} adds to the compute, {duration(launches)} are launches of "
            f"{each}: without them (a CUDA graph needs next to none) a step would take {duration(without.step_s)}"
        )


def mebibytes(nbytes: int) -> str:
    """As DDP's bucket_cap_mb counts them, with a decimal where there is one."""
    return f"{nbytes / 2**20:.1f}".removesuffix(".0")


def duration(seconds: float) -> str:
    if seconds >= 1 or seconds == 0:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.3g} us"
