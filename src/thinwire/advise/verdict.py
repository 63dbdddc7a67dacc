"""The advice: every scheme predicted and ranked, one of them advised, and why."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from thinwire.advise import loss, model, schemes
from thinwire.advise.links import Cluster
from thinwire.advise.machine import Machine
from thinwire.advise.model import Job, Prediction
from thinwire.codecs import Codec, codec
from thinwire.integrations.auto import GAIN

ERROR_BUDGET = 0.15  # compress_ddp's own
BUCKETS = tuple(model.BUCKET_BYTES * 4**power for power in range(4))  # 25 MiB to 1.6 GiB; DDP's bucket_cap_mb


@dataclass(frozen=True)
class Verdict:
    """Predictions, the fastest first, and what to make of them."""

    ranked: tuple[Prediction, ...]
    plain: Prediction
    advised: Prediction
    reason: str
    notes: tuple[str, ...]

    @property
    def compress(self) -> bool:
        """Whether compression is advised."""
        return self.advised.scheme.compresses

    def speedup(self, prediction: Prediction) -> float:
        """Against no compression."""
        return self.plain.step_s / prediction.step_s if prediction.step_s else 1.0


def judge(
    job: Job,
    cluster: Cluster,
    machine: Machine,
    *,
    codecs: Sequence[Codec] = tuple(map(codec, schemes.CODECS)),
    error_budget: float = ERROR_BUDGET,
    buckets: Sequence[int] = BUCKETS,
) -> Verdict:
    """Predict all schemes, each with the best size of buckets, and choose as `compress_ddp(model, "auto")` would.

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
    reason = _why(plain, best, error_budget) if best is not plain else _why_not(plain, ranked, cluster, error_budget)
    return Verdict(ranked, plain, best, reason, tuple(_notes(plain, best, ranked, error_budget)))


def _with_best_buckets(
    job: Job, scheme: schemes.Scheme, cluster: Cluster, machine: Machine, buckets: Sequence[int]
) -> Prediction:
    """The smallest buckets that are not clearly slower than others."""
    whole = job.params * job.dtype.itemsize
    sizes = [size for size in sorted(buckets) if size < whole] or [min(buckets)]
    tried = [model.predict(replace(job, bucket_bytes=size), scheme, cluster, machine) for size in sizes]
    fastest = min(prediction.step_s for prediction in tried)
    return next(prediction for prediction in tried if (1 - GAIN) * prediction.step_s <= fastest)


def _why(plain: Prediction, best: Prediction, budget: float) -> str:
    return (
        f"of {duration(plain.step_s)} an uncompressed step waits {duration(plain.exposed_s)} for its gradients, with "
        f"{best.scheme} {duration(best.exposed_s)} of {duration(best.step_s)}. Expected error {best.error:.2g}, of "
        f"{budget:g} allowed"
    )


def _why_not(plain: Prediction, ranked: Sequence[Prediction], cluster: Cluster, budget: float) -> str:
    """What stands against compression; `ranked` may be led by schemes that lose too much."""
    others = [prediction for prediction in ranked if prediction is not plain]
    if cluster.world == 1 or not others:
        return "there is nobody to send to" if cluster.world == 1 else "no codec was given"
    if plain.exposed_s < GAIN * plain.step_s:
        waits = duration(plain.exposed_s)
        return f"of {duration(plain.step_s)} a step waits {waits} for the links: there is next to nothing to win"
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


def _notes(plain: Prediction, best: Prediction, ranked: Sequence[Prediction], budget: float) -> list[str]:
    """What else a person should know."""
    found = []
    faster = [p for p in ranked if p.error > budget and p.step_s < (1 - GAIN) * best.step_s]
    if faster:
        first = min(faster, key=lambda prediction: (loss.omega(prediction.scheme.narrowest), prediction.step_s))
        fed = f" with {first.feedback} feedback" if first.feedback else ""
        found.append(
            f"{first.scheme}{fed} would take {duration(first.step_s)}, but its error of {first.error:.2g} is over the "
            f"budget: watch the training loss if you try it"
        )
    if best is not plain and best.bucket_bytes != model.BUCKET_BYTES:
        found.append(
            f"predicted for buckets of {best.bucket_bytes >> 20} MiB: DDP(bucket_cap_mb={best.bucket_bytes >> 20})"
        )
    return found


def duration(seconds: float) -> str:
    """Three digits and a unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size or (unit == "ms" and seconds >= 1e-4) or seconds == 0:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
