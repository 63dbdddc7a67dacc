"""Predictions of `thinwire advise` beside what records on shaped links measured; for figures.py and test_advise.py.

Inputs are the link, world, sizes and cores of a row, its `compute_ms`, and a machine; never a time that is predicted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from thinwire.codecs import Cast, codec
from thinwire.errors import CodecError
from thinwire.tools.advise import model, verdict
from thinwire.tools.advise.cluster import Machine
from thinwire.tools.advise.model import PLAIN, SumScheme, TrainingJob
from thinwire.tools.advise.verdict import column
from thinwire.tools.bench.record import Record, Row

BF16 = SumScheme("ring", Cast("bf16"))
BUCKETS = {"mlp": 2}  # two tensors hold 99 % of the weights of that task, and DDP cuts no tensor


@dataclass(frozen=True)
class Checked:
    """A time that was measured, and what the model says of it."""

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
    kinds = {"collectives": _collective, "train": _step}
    found = [item for row in record.rows for item in kinds[record.kind](row, machine)]
    # Every row of a case has torch's times beside its own.
    return list({(item.what, item.scheme, round(item.measured_s, 9)): item for item in found}.values())


def misses(found: Sequence[Checked]) -> dict[str, tuple[float, float]]:
    """Measured over predicted speedup over fp32 or bf16: the least and the most, by kind of scheme."""
    ratios: dict[str, list[float]] = {}
    for item in found:
        kind = item.scheme.algorithm if item.scheme.algorithm in ("ring", "hierarchical") else "flat"
        others = [other for other in found if other.what == item.what and other.scheme in (PLAIN, BF16)]
        ratios.setdefault(kind, []).extend((1 + item.off) / (1 + other.off) for other in others if other is not item)
    return {kind: (min(found), max(found)) for kind, found in ratios.items()}


def _collective(row: Row, machine: Machine) -> Iterator[Checked]:
    """The row's own time, and torch's in fp32 and bf16 beside it."""
    numel = int(column(row, "numel"))
    cluster, own = verdict.placed(row, machine)
    ranks = f"{cluster.world} ranks" if cluster.per_node == 1 else f"{cluster.world} ranks on {cluster.nodes} nodes"
    what = f"all_reduce of {numel} floats, {ranks}, {row['link']}"
    job = TrainingJob(numel, 0.0)
    for scheme, name in ((_scheme(row), "ms_p50"), (PLAIN, "plain_ms"), (BF16, "bf16_ms")):
        one = model.bucket(numel, scheme, cluster, own, job)
        yield Checked(what, scheme, 1e-3 * column(row, name), model.times(one, numel, cluster, own).alone_s)


def _scheme(row: Row) -> SumScheme:
    name = "int8" if row["codec"] == "auto" else str(row["codec"])  # bench's auto has this codec
    if row["algorithm"] == "plain":
        return PLAIN
    return SumScheme(str(row["algorithm"]), *map(codec, name.split("/")))


def _step(row: Row, machine: Machine) -> Iterator[Checked]:
    """A step of DDP, and that of torch's bf16 hook beside it; peers of other kinds are not predicted."""
    measured = 1e-3 * column(row, "step_ms")
    job, cluster, own = verdict.described(row, machine, BUCKETS.get(str(row["task"])))
    what = f"DDP step of {job.params} parameters, {cluster.world} ranks, {row['link']}"
    for scheme, seconds in ((_step_scheme(row, job), measured), (BF16, column(row, "speedup_bf16") * measured)):
        if scheme is not None:
            yield Checked(what, scheme, seconds, model.predict(job, scheme, cluster, own).step_s)


def _step_scheme(row: Row, job: TrainingJob) -> SumScheme | None:
    """The scheme of a row, where the model knows it and the row's feedback is what compress_ddp adds by itself."""
    name = str(row["codec"]).partition("@")[0]
    if name == "none":
        return PLAIN
    if row.get("peer") or row.get("control"):
        return None
    if name == "auto":
        name = str(row.get("chosen") or "").partition(";")[0]
    try:
        scheme = SumScheme(model.usual(int(column(row, "world"))), codec(name))
    except CodecError:
        return None
    return scheme if row["feedback"] in (scheme.feedback(job), scheme.feedback(job).partition("+")[0]) else None
