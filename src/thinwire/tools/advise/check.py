"""Predictions beside what `thinwire bench collectives` and `thinwire bench train` measured on shaped links.

Inputs are the link, world, sizes and cores of a row, its `compute_ms`, and a machine; never a time that is predicted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from thinwire.codecs import Cast, Codec, codec
from thinwire.collectives.hierarchical import fewest_roundings
from thinwire.errors import AdviceError, CodecError, RecordError
from thinwire.tools.advise import model, units
from thinwire.tools.advise.links import INSIDE_LATENCY_S, LATENCY_S, Cluster, LinkModel
from thinwire.tools.advise.machine import BYTE_S, Machine, column
from thinwire.tools.advise.model import TrainingJob
from thinwire.tools.advise.schemes import PLAIN, SumScheme
from thinwire.tools.bench.record import Record, Row

ALGORITHMS = ("one_shot", "two_phase")
BF16 = SumScheme("ring", Cast("bf16"))
# Two tensors hold 99 % of the weights of `bench train --task mlp`, and DDP cuts no tensor.
BUCKETS = {"mlp": 2}


@dataclass(frozen=True)
class Checked:
    what: str
    scheme: SumScheme
    measured_s: float
    predicted_s: float

    @property
    def off(self) -> float:
        """By how much the prediction is too long; negative where it is too short."""
        return self.predicted_s / self.measured_s - 1


def compare(record: Record, machine: Machine) -> list[Checked]:
    """All times of a record that the model predicts; `machine` is one rank's alone on that computer."""
    if record.kind not in ("collectives", "train"):
        raise RecordError(f"expected a record of kind collectives or train, got {record.kind!r}")
    rows = [row for row in record.rows if row["link"] != "loopback" and row.get("backend", "gloo") == "gloo"]
    found = [item for row in rows for item in _KINDS[record.kind](row, machine)]
    if not found:
        raise RecordError("nothing to compare: the record has no all_reduce or DDP step over a shaped link (--link)")
    # Every row of a case has torch's times beside its own.
    return list({(item.what, item.scheme, round(item.measured_s, 9)): item for item in found}.values())


def misses(found: Sequence[Checked]) -> dict[str, tuple[float, float]]:
    """How many times the predicted gain over fp32 or bf16 was measured: the least and the most, by kind of scheme."""
    ratios: dict[str, list[float]] = {}
    for item in found:
        kind = item.scheme.algorithm if item.scheme.algorithm in ("ring", "hierarchical") else "flat"
        others = [other for other in found if other.what == item.what and other.scheme in (PLAIN, BF16)]
        ratios.setdefault(kind, []).extend((1 + item.off) / (1 + other.off) for other in others if other is not item)
    return {kind: (min(found), max(found)) for kind, found in ratios.items()}


def described(row: Row, machine: Machine) -> tuple[TrainingJob, Cluster, Machine]:
    """What a train row says of its job, its ranks and their links, and what the machine is for each of them."""
    return _job(row), _cluster(row), _shared(row, machine)


def _collective(row: Row, machine: Machine) -> Iterator[Checked]:
    """The row's own time, and torch's in fp32 and bf16 beside it."""
    if row["verb"] != "all_reduce":
        return
    numel = _count(row, "numel")
    cluster = _cluster(row)
    own = _shared(row, machine)
    ranks = f"{cluster.world} ranks" if cluster.per_node == 1 else f"{cluster.world} ranks on {cluster.nodes} nodes"
    what = f"all_reduce of {numel} floats, {ranks}, {row['link']}"
    for scheme, name in ((_scheme(row), "ms_p50"), (PLAIN, "plain_ms"), (BF16, "bf16_ms")):
        sent = model.message(numel, scheme, cluster, own, torch.float32, "")
        yield Checked(what, scheme, 1e-3 * column(row, name), model.alone_s(sent, own))


def _scheme(row: Row) -> SumScheme:
    name = str(row["codec"])
    algorithm = str(row["algorithm"])
    if algorithm == "plain":
        return PLAIN
    if algorithm == "hierarchical" and name.count("/") == 1:
        inside, across = map(_codec, name.split("/"))
        return SumScheme(algorithm, inside, across)
    if algorithm not in ALGORITHMS:
        raise RecordError(f"algorithm must be one of plain, {', '.join(ALGORITHMS)}, got {algorithm!r}")
    return SumScheme(algorithm, _codec("int8" if name == "auto" else name))  # bench's auto has this codec


def _codec(name: str) -> Codec:
    try:
        return codec(name)
    except CodecError as error:
        raise RecordError(str(error)) from None


def _step(row: Row, machine: Machine) -> Iterator[Checked]:
    """A step of DDP, and that of torch's bf16 hook beside it; peers of other kinds are not predicted."""
    measured = 1e-3 * column(row, "step_ms")
    job = _job(row)
    cluster = _cluster(row)
    what = f"DDP step of {job.params} parameters, {cluster.world} ranks, {row['link']}"
    for scheme, seconds in ((_step_scheme(row), measured), (BF16, column(row, "speedup_bf16") * measured)):
        if scheme is not None:
            step = model.predict(job, scheme, cluster, _shared(row, machine))
            yield Checked(what, scheme, seconds, step.step_s)


def _job(row: Row) -> TrainingJob:
    params = _count(row, "params")
    return TrainingJob(
        params,
        1e-3 * column(row, "compute_ms", 0.0),
        bucket_bytes=-(-4 * params // BUCKETS[str(row["task"])]) if row["task"] in BUCKETS else model.BUCKET_BYTES,
        family=_family(row),
    )


def _family(row: Row) -> str:
    return "linear" if row["optimizer"] == "sgd" else "adaptive"


def _step_scheme(row: Row) -> SumScheme | None:
    """The scheme of a row, where the model knows it and the row's feedback is what compress_ddp adds by itself."""
    name = str(row["codec"]).partition("@")[0]
    if name == "none":
        return PLAIN
    if row.get("peer") or row.get("control") or not isinstance(row.get("chosen"), str | None):
        return None
    if name == "auto":
        name = str(row.get("chosen") or "").partition(";")[0]
    try:
        scheme = SumScheme(fewest_roundings(_count(row, "world")), codec(name))
    except CodecError:
        return None
    known = scheme.feedback(_family(row)) or "none"
    return scheme if row["feedback"] in (known, f"{known}+moments") else None


def _cluster(row: Row) -> Cluster:
    """Every rank, or every node, behind a link of its own; inside a node the processor is the limit."""
    try:
        across = LinkModel.of_rate(units.rate(str(row["link"])), LATENCY_S["gloo"])
    except AdviceError as error:
        raise RecordError(f"column 'link': {error}") from None
    world = _count(row, "world")
    nodes = world if row.get("nodes") is None else _count(row, "nodes")
    if world % nodes:
        raise RecordError(f"column 'nodes': {world} ranks do not make {nodes} nodes")
    inside = LinkModel(1 / BYTE_S["cpu"], INSIDE_LATENCY_S["gloo"]) if nodes < world else None
    return Cluster(world, world // nodes, across=across, inside=inside, transport="gloo")


def _shared(row: Row, machine: Machine) -> Machine:
    """All ranks of a bench run on one computer."""
    return machine.shared(_count(row, "world"), _count(row, "cores"))


def _count(row: Row, name: str) -> int:
    value = column(row, name, 1)
    if not value.is_integer():
        raise RecordError(f"expected a whole number in column {name!r}, got {row[name]!r}")
    return int(value)


_KINDS = {"collectives": _collective, "train": _step}
