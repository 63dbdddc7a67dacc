"""The advice: every scheme predicted and ranked, two answers by `tools.recommend`, and why.

`evidence.json` holds losses of committed records and the model's error; `python tests/figures.py` writes it.
"""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

import torch

from thinwire.codecs import Cast, Codec, codec
from thinwire.errors import CodecError, RecordError
from thinwire.tools import pairs, recommend
from thinwire.tools.advise import model, units
from thinwire.tools.advise.cluster import Cluster, Machine
from thinwire.tools.advise.model import Prediction, Scheme, TrainingJob
from thinwire.tools.bench.record import Record, Row
from thinwire.tools.recommend import GAIN, Loss, Recommendation, Way

BUCKETS = tuple(model.BUCKET_BYTES * 4**power for power in range(4))  # 25 MiB to 1.6 GiB; DDP's bucket_cap_mb
FEW = 0.1  # a trainable share below this gets a hint
_SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
Losses = Mapping[str, Loss]  # by name of the scheme


@dataclass(frozen=True)
class Evidence:
    losses: Mapping[str, Losses]  # by parallel, with Adam; "ddp muon" and the like: with Muon
    misses: Mapping[str, Sequence[float]]  # measured over predicted speedup, least and most, by kind of scheme
    most_ranks: int  # of the steps that predictions were compared with


@functools.cache
def shipped() -> Evidence:
    kept: dict[str, Any] = json.loads(resources.files(__package__).joinpath("evidence.json").read_text())
    losses = {how: {name: Loss(*one) for name, one in found.items()} for how, found in kept.pop("losses").items()}
    return Evidence(losses, **kept)


def losses_of(record: Record, source: str, optimizer: str = "adam") -> dict[str, Loss]:
    """By scheme, what a record of kind "loss" or "train" says of an optimizer; RecordError where it says nothing."""
    read = {"loss": _paired, "train": trained}.get(record.kind)
    if read is None:
        raise RecordError(f"expected losses (a record of kind loss or train), got one of kind {record.kind}")
    rows = [row for row in record.rows if row["optimizer"] in (None, optimizer, f"{optimizer}w")]  # None: a rehearsal's
    found = {name: loss for row in rows for name, loss in read(row, source, optimizer)}
    if not found:
        few = f"expected a codec trained with {optimizer} and two seeds or more, got none"
        raise RecordError(f"{few}: thinwire rehearse --seeds 3")
    return found


def _paired(row: Row, source: str, optimizer: str) -> Iterator[tuple[str, Loss]]:
    """An arm of `thinwire rehearse` or of the loss study: lloyd2, or lloyd4+feedback=classic."""
    arm, _, asked = str(row["arm"]).partition("+feedback=")
    gap, parallel = pairs.Difference.of(row), row.get("parallel") or model.DDP
    if gap.half is None or row.get("control") or arm in ("fp32", "none", "null") or parallel == model.FSDP2:
        return
    job = TrainingJob(1, 0.0, optimizer=optimizer, parallel=str(parallel))
    try:
        feedback = asked or Scheme("two_phase", codec(arm)).feedback(job)
    except CodecError:  # a peer, such as powersgd4
        feedback = "none"
    size = int(column(row, "params")) if row.get("params") else None
    loss = Loss(gap.gap, gap.half, int(column(row, "seeds")), size, source)
    yield recommend.scheme_of({**row, "codec": arm, "feedback": feedback}), loss


def trained(row: Row, source: str, optimizer: str = "adam") -> Iterator[tuple[str, Loss]]:
    """Of the training records: the gap of validation losses and its standard error over seeds."""
    if row.get("control") or row.get("diverged") or row["codec"] == "none":
        return
    gap, error = row["val_gap_nats"], row.get("val_gap_error")
    seeds = int(column(row, "seeds"))
    if isinstance(gap, float | int) and isinstance(error, float | int) and seeds > 1:
        half = pairs.t95(seeds - 1) * error
        yield recommend.scheme_of(row), Loss(gap, half, seeds, int(column(row, "params")), source)


def column(row: Row, name: str, least: float = 1e-18) -> float:
    """The number in a column, from `least` to 1e18."""
    value = row.get(name)
    if not isinstance(value, int | float) or not least <= value <= 1e18:
        raise RecordError(f"expected a number from {least:g} to 1e18 in column {name!r}, got {value!r}")
    return float(value)


@dataclass(frozen=True)
class Verdict:
    ranked: Mapping[Way, Prediction]  # the fastest first
    choice: Recommendation
    lines: tuple[str, ...]  # the answers, why, and notes


def judge(
    job: TrainingJob,
    cluster: Cluster,
    machine: Machine,
    *,
    codecs: Sequence[Codec] = tuple(map(codec, model.CODECS)),
    losses: Losses | None = None,
) -> Verdict:
    """Predict all schemes, each with the best size of buckets, and choose by the rule.

    `losses` are those of a run of one's own, which count before the committed ones.
    """
    found = [_with_best_buckets(job, one, cluster, machine) for one in model.candidates(job, cluster, codecs)]
    where = f"{job.parallel} muon" if job.optimizer == "muon" else job.parallel
    measured = {**shipped().losses.get(where, {}), **(losses or {})}
    ordered = [found[0], *sorted(found[1:], key=lambda one: one.scheme.exactness)]
    by_way = {_way(one, job, cluster, measured): one for one in ordered}
    choice = recommend.choose(list(by_way))
    more = _why(job, cluster, choice, by_way), _notes(job, cluster, choice, by_way, losses)
    ranked = dict(sorted(by_way.items(), key=lambda pair: pair[1].step_s))
    return Verdict(ranked, choice, (*answers(job, choice), *more[0], *more[1]))


def _way(prediction: Prediction, job: TrainingJob, cluster: Cluster, losses: Losses) -> Way:
    scheme = prediction.scheme
    kind = "rounds" if job.parallel == model.DILOCO else scheme.kind
    low, high = shipped().misses[kind] if scheme.compresses else (1.0, 1.0)
    weights = str(scheme.weights) if job.parallel == model.FSDP2 else None
    known = recommend.name(str(scheme.codec), scheme.feedback(job), weights)
    if job.parallel == model.DILOCO:
        known += f" every {job.every}"
    exact = not scheme.compresses or (scheme.codec == Cast("bf16") and scheme.weights == model.NOTHING)
    shown = str(scheme) if scheme.compresses else _SHORT[job.dtype]
    code = scheme.how(job, cluster) if scheme.compresses else "nothing to add"
    return Way(shown, code, prediction.step_s, low, high, losses.get(known), exact)


def _with_best_buckets(job: TrainingJob, scheme: Scheme, cluster: Cluster, machine: Machine) -> Prediction:
    """The smallest buckets that are not clearly slower than others; of sizes that hold the whole model one is tried."""
    whole = job.learns * job.dtype.itemsize
    sizes = BUCKETS[: sum(size < whole for size in BUCKETS) + 1]
    if job.parallel != model.DDP:
        sizes = (job.bucket_bytes,)
    tried = [model.predict(replace(job, bucket_bytes=size), scheme, cluster, machine) for size in sizes]
    fastest = min(prediction.step_s for prediction in tried)
    return next(prediction for prediction in tried if (1 - GAIN) * prediction.step_s <= fastest)


def answers(job: TrainingJob, choice: Recommendation) -> Iterator[str]:
    """Safe, and Faster; the code of each on a line of its own."""
    if not choice.compress:
        yield "Do not compress."
        return
    if choice.safe is choice.plain:
        yield "Safe: no compression; what is faster has a loss that is not proven equal."
    else:
        yield f"Safe: {choice.safe.name}, {choice.speedup(choice.safe)}. {loss_text(job, choice.safe)}."
        yield f"    {choice.safe.code}"
    if (way := choice.faster) is not None:
        yield f"Faster: {way.name}, {choice.speedup(way)}; check the loss. {loss_text(job, way)}."
        yield f"    {way.code}"


def loss_text(job: TrainingJob, way: Way) -> str:
    """Loss: +0.0004 ± 0.0020 nats on 25 M; yours is 50 × larger."""
    if way.loss is None:
        return "Loss: that of bf16, not measured" if way.is_exact else "Loss: not measured"
    text = f"Loss: {way.loss} ({way.loss.source}, {way.loss.seeds} seeds)"
    if way.loss.params is None:
        return text
    times = job.params / way.loss.params
    larger = f"; yours is {float(f'{times:.2g}'):,.0f} × larger" if times >= 2 else ""
    return f"{text} on {units.amount(way.loss.params)} weights{larger}"


def _why(job: TrainingJob, cluster: Cluster, choice: Recommendation, by_way: Mapping[Way, Prediction]) -> Iterator[str]:
    plain = by_way[choice.plain]
    if cluster.world == 1:
        yield "Why: there is no other rank to send to."
        return
    alone = f"a step takes {units.duration(plain.step_s)} uncompressed"
    waits = f"waits {units.duration(plain.exposed_s)} of it for the network"
    if plain.exposed_s < GAIN * plain.step_s:
        yield f"Why: {alone} and {waits}: next to nothing to gain."
    elif choice.compress:
        yield f"Why: {alone} and {waits}; with {choice.best.name} {units.duration(by_way[choice.best].exposed_s)}."
    else:
        yield f"Why: {alone} and {waits}; no scheme whose loss was measured is faster over its whole range."
    if job.parallel == model.DILOCO:
        ways = [way for way in dict.fromkeys((choice.plain, choice.safe, choice.faster)) if way is not None]
        rounds = [f"{way.name} {units.duration(by_way[way].round_s)}" for way in ways]
        yield f"A round between {cluster.nodes} sites, every {job.every} steps: {', '.join(rounds)}."


def _notes(
    job: TrainingJob, cluster: Cluster, choice: Recommendation, by_way: Mapping[Way, Prediction], own: Losses | None
) -> Iterator[str]:
    """What is not in the answers: buckets, frozen weights, DiLoCo's own cost, what was never compared."""
    if cluster.world == 1:
        return
    buckets = by_way[choice.best].bucket_bytes
    if choice.compress and job.parallel == model.DDP and buckets != model.BUCKET_BYTES:
        yield f"Note: predicted for DDP(bucket_cap_mb={buckets / 2**20:.4g})."
    if job.learns < FEW * job.params:
        sent = units.nbytes(by_way[choice.plain].bytes)
        yield f"Note: {100 * job.learns / job.params:.2g} % of the weights learn, so a rank sends {sent} per step."
    if job.parallel == model.FSDP2 and cluster.has_levels and choice.compress:
        yield "Note: with shards inside a node (HSDP) far less travels between nodes."
    if job.parallel == model.DILOCO:
        yield "Note: DiLoCo itself trains differently from DDP; losses are against DiLoCo without compression."
    if job.optimizer == "sgd" and choice.compress and not own:
        yield "Note: the committed losses are of Adam, not of SGD: thinwire rehearse measures your own."
    if cluster.world > shipped().most_ranks and choice.compress:
        yield f"Note: steps were measured with up to {shipped().most_ranks} ranks; beyond, this is the formula alone."
