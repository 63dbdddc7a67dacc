"""The advice: every scheme predicted and ranked, one recommended by `tools.recommend`, and why.

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
from thinwire.errors import AdviceError, RecordError
from thinwire.tools import recommend
from thinwire.tools.advise import model, units
from thinwire.tools.advise.cluster import BYTE_S, INSIDE_LATENCY_S, LATENCY_S, Cluster, LinkModel, Machine
from thinwire.tools.advise.model import Prediction, SumScheme, TrainingJob
from thinwire.tools.bench.record import Record, Row
from thinwire.tools.recommend import GAIN, Loss, Recommendation, Way

BUCKETS = tuple(model.BUCKET_BYTES * 4**power for power in range(4))  # 25 MiB to 1.6 GiB; DDP's bucket_cap_mb
_SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
Losses = Mapping[str, Loss]  # by name of the scheme


@dataclass(frozen=True)
class Evidence:
    losses: Losses  # of the largest model that has the scheme
    misses: Mapping[str, Sequence[float]]  # measured over predicted speedup, least and most, by kind of scheme
    most_ranks: int  # of the steps and sums that predictions were compared with
    fastest_bytes_per_s: float  # their fastest link


@functools.cache
def shipped() -> Evidence:
    kept: dict[str, Any] = json.loads(resources.files(__package__).joinpath("evidence.json").read_text())
    return Evidence({name: Loss(*found) for name, found in kept.pop("losses").items()}, **kept)


def losses_of(record: Record, source: str) -> dict[str, Loss]:
    """By scheme, the losses of a training record; the spread is unknown below LEAST_SEEDS seeds."""
    found = {}
    for row in record.rows:
        if not row.get("control"):
            seeds = int(column(row, "seeds"))
            known = seeds >= recommend.LEAST_SEEDS and row["noise_floor"] is not None
            ratio = None if row.get("diverged") else column(row, "loss_log_ratio", -1e18)
            floor = column(row, "noise_floor", 0.0) if known else None
            found[recommend.scheme_of(row)] = Loss(ratio, floor, seeds, source)
    return found


def column(row: Row, name: str, least: float = 1e-18) -> float:
    """The number in a column, from `least` to 1e18."""
    value = row.get(name)
    if not isinstance(value, int | float) or not least <= value <= 1e18:
        raise RecordError(f"expected a number from {least:g} to 1e18 in column {name!r}, got {value!r}")
    return float(value)


def described(row: Row, machine: Machine, buckets: int | None = None) -> tuple[TrainingJob, Cluster, Machine]:
    """The job, ranks and links of a train row, and what the machine is for each rank."""
    params = int(column(row, "params", 1))
    size = model.BUCKET_BYTES if buckets is None else -(-4 * params // buckets)
    compute_s = 1e-3 * column(row, "compute_ms", 0.0)
    job = TrainingJob(params, compute_s, bucket_bytes=size, adaptive=row["optimizer"] != "sgd")
    return job, *placed(row, machine)


def placed(row: Row, machine: Machine) -> tuple[Cluster, Machine]:
    """Every rank, or every node, behind a link of its own, all on one computer: inside a node it is the limit."""
    try:
        across = LinkModel.of_rate(units.rate(str(row["link"])), LATENCY_S["gloo"])
    except AdviceError as error:
        raise RecordError(f"column 'link': {error}") from None
    world = int(column(row, "world", 1))
    nodes = world if row.get("nodes") is None else int(column(row, "nodes", 1))
    inside = LinkModel(1 / BYTE_S["cpu"], INSIDE_LATENCY_S["gloo"]) if nodes < world else None
    cluster = Cluster(world, world // nodes, across=across, inside=inside, transport="gloo")
    return cluster, machine.shared(world, int(column(row, "cores", 1)))


@dataclass(frozen=True)
class Verdict:
    ranked: tuple[Prediction, ...]  # the fastest first
    ways: Mapping[SumScheme, Way]  # what the rule saw of each
    choice: Recommendation
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
    codecs: Sequence[Codec] = tuple(map(codec, model.CODECS)),
    losses: Losses | None = None,
    buckets: Sequence[int] = BUCKETS,
) -> Verdict:
    """Predict all schemes, each with the best size of buckets, and choose by the rule.

    `losses` are those of a run of one's own, which count before the committed ones.
    """
    found = [
        _with_best_buckets(job, scheme, cluster, machine, buckets)
        for scheme in model.candidates(cluster, codecs, job.dtype)
    ]
    ordered = [found[0], *sorted(found[1:], key=lambda prediction: -model.bits_of(prediction.scheme.narrowest))]
    known = {**shipped().losses, **(losses or {})}
    ways = {prediction.scheme: _way(prediction, job, cluster, known) for prediction in ordered}
    choice = recommend.choose(list(ways.values()), "predicted")
    best = next(prediction for prediction in found if ways[prediction.scheme] is choice.chosen)
    ranked = tuple(sorted(found, key=lambda prediction: prediction.step_s))
    return Verdict(
        ranked, ways, choice, best, _why(job, found, best, choice, cluster), tuple(_notes(choice, best, cluster))
    )


def _way(prediction: Prediction, job: TrainingJob, cluster: Cluster, losses: Losses) -> Way:
    scheme = prediction.scheme
    kind = scheme.algorithm if scheme.algorithm in ("ring", "hierarchical") else "flat"
    low, high = shipped().misses[kind] if scheme.compresses else (1.0, 1.0)
    name = recommend.name(str(scheme.narrowest), prediction.feedback)
    exact = not scheme.compresses or scheme.narrowest == Cast("bf16")
    shown = name
    if scheme.across is not None:
        shown = f"{scheme.across} across nodes, {scheme.codec} inside"
    elif not scheme.compresses:
        shown = _SHORT[job.dtype]
    elif scheme.algorithm != "ring" and exact:
        shown = f"{name}, {scheme.algorithm}"  # torch's own has the short name
    return Way(shown, scheme.how(cluster), prediction.step_s, low, high, losses.get(name), exact)


def _with_best_buckets(
    job: TrainingJob, scheme: SumScheme, cluster: Cluster, machine: Machine, buckets: Sequence[int]
) -> Prediction:
    """The smallest buckets that are not clearly slower than others; of sizes that hold the whole model one is tried."""
    whole = job.params * job.dtype.itemsize
    sizes = sorted(buckets)[: sum(size < whole for size in buckets) + 1]
    tried = [model.predict(replace(job, bucket_bytes=size), scheme, cluster, machine) for size in sizes]
    fastest = min(prediction.step_s for prediction in tried)
    return next(prediction for prediction in tried if (1 - GAIN) * prediction.step_s <= fastest)


def _why(
    job: TrainingJob, found: Sequence[Prediction], best: Prediction, choice: Recommendation, cluster: Cluster
) -> str:
    """The times behind the recommendation; `found` begins with no compression."""
    plain = found[0]
    alone = f"a step without compression takes {_parts(job, plain)}"
    if choice.compress:
        return f"{alone}; with {choice.chosen.name} {_parts(job, best)}"
    if cluster.world == 1:
        return "there is no other rank to send to"
    if plain.exposed_s < GAIN * plain.step_s:
        return f"{alone}: there is next to nothing to gain"
    rival = choice.rival
    return f"{alone}; {rival.name if rival else 'no other scheme'}, the best that keeps the loss, is not clearly faster"


def _parts(job: TrainingJob, prediction: Prediction) -> str:
    copies = max(0.0, prediction.step_s - job.step_s - prediction.exposed_s)
    shown = [units.duration(seconds) for seconds in (prediction.step_s, job.step_s, copies, prediction.exposed_s)]
    return "{}: {} of compute, {} of copies, {} of exposed communication".format(*shown)


def _notes(choice: Recommendation, advised: Prediction, cluster: Cluster) -> Iterator[str]:
    """What would be faster; which buckets the advice is for; what was never compared with a measurement."""
    yield from choice.notes
    if choice.compress and advised.bucket_bytes != model.BUCKET_BYTES:
        size = units.mebibytes(advised.bucket_bytes)
        yield f"predicted for buckets of {size} MiB: DDP(bucket_cap_mb={size})"
    known = shipped()
    beyond = ["NCCL between ranks"] if cluster.transport == "nccl" else []
    beyond += [f"more than {known.most_ranks} ranks"] if cluster.world > known.most_ranks else []
    fast = any(link.bytes_per_s > known.fastest_bytes_per_s for link in cluster.links)
    beyond += [f"links above {8e-9 * known.fastest_bytes_per_s:.2g} Gbit/s"] if fast else []
    if beyond and cluster.world > 1:
        yield f"never compared with a measured step: {', '.join(beyond)}. The ranges are from what was compared"
