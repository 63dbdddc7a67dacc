"""Predictions of `thinwire advise` beside every committed step on a link; for figures.py and test_advise.py.

Inputs are the link, world, sizes and cores of a row, its compute, and a machine; never a time that is predicted. Of
steps on NCCL, the records hold no compute and no rate. Compute is plain torch's step on one host, where messages cost
next to nothing; the rate over TCP is that of torch's sum of 16 M floats in the record of collectives.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from thinwire.codecs import Identity, codec
from thinwire.tools.advise import cluster as clusters, model, units
from thinwire.tools.advise.cluster import Cluster, LinkModel, Machine
from thinwire.tools.advise.model import BF16, DDP, DILOCO, FSDP2, PLAIN, Scheme, TrainingJob
from thinwire.tools.advise.verdict import column
from thinwire.tools.bench import record
from thinwire.tools.bench.record import Row

ROOT = Path(__file__).parent.parent / "benchmarks"
LINES = ("collectives_1gbit", "collectives_100mbit", "collectives_nodes_100mbit")  # sums on shaped links
STEPS = (
    *("train_mlp_1gbit", "train_mlp_100mbit", "demo_1gbit", "demo_100mbit"),
    *("fsdp_steps_1gbit", "train_diloco_20mbit"),
)
ON_GPUS = sorted(p.stem for p in ROOT.glob("*_steps_*h200*.json") if not p.stem.endswith("mb"))  # the usual buckets
PIECES = {"mlp": 2}  # two tensors hold 99 % of the weights of that task, and DDP cuts no tensor
LAYERS = {124_475_904: 13, 25_051_850: 4}  # that FSDP2 shards, by weights


@dataclass(frozen=True)
class Checked:
    """A time that was measured, and what the model says of it."""

    what: str
    scheme: Scheme
    kind: str
    measured_s: float
    predicted_s: float
    ranks: int

    @property
    def off(self) -> float:
        """By how much the prediction is too long; negative where it is too short."""
        return self.predicted_s / self.measured_s - 1


def read(name: str) -> record.Record:
    return record.read(str(ROOT / f"{name}.json"))


def everything(cpu: Machine, gpu: Machine) -> list[Checked]:
    """All times on links; torch's own, which stand beside every row of a case, once."""
    found = [item for name in LINES for row in read(name).rows for item in _sum(row, cpu)]
    found += [item for name in STEPS for row in read(name).rows for item in _step(row, cpu)]
    found += [item for name in ON_GPUS for row in read(name).rows for item in _on_gpu(row, name, gpu)]
    return list({(item.what, item.scheme, round(item.measured_s, 9)): item for item in found}.values())


def misses(found: Sequence[Checked]) -> dict[str, tuple[float, float]]:
    """Measured over predicted speedup over fp32: the least and the most, by kind of scheme."""
    ratios: dict[str, list[float]] = {}
    for item, plain in speedups(found):
        ratios.setdefault(item.kind, []).append((1 + item.off) / (1 + plain.off))
    return {kind: (min(found), max(found)) for kind, found in ratios.items()}


def speedups(found: Sequence[Checked]) -> Iterator[tuple[Checked, Checked]]:
    """Every compressed one beside the plain one of its case."""
    plain = {item.what: item for item in found if item.scheme == PLAIN}
    return ((item, plain[item.what]) for item in found if item.scheme != PLAIN and item.what in plain)


def _checked(what: str, scheme: Scheme, ms: float, job: TrainingJob, where: tuple[Cluster, Machine]) -> Checked:
    kind = "rounds" if job.parallel == DILOCO else scheme.kind
    return Checked(what, scheme, kind, 1e-3 * ms, model.predict(job, scheme, *where).step_s, where[0].world)


def placed(row: Row, machine: Machine) -> tuple[Cluster, Machine]:
    """The ranks of a row: every rank, or every node, behind a link of its own ("20mbit+50ms"), all on one computer."""
    rate, _, delay = str(row["link"]).partition("+")
    latency = (units.seconds(delay) if delay else 0.0) + clusters.LATENCY_S["gloo"]
    world = int(column(row, "world", 1))
    nodes = int(row.get("nodes") or world)
    inside = LinkModel(1 / clusters.BYTE_S["cpu"], clusters.INSIDE_LATENCY_S["gloo"]) if nodes < world else None
    cluster = Cluster(world, world // nodes, LinkModel.of_rate(units.rate(rate), latency), inside, "gloo")
    return cluster, machine.shared(world, int(column(row, "cores", 1)))


def _sum(row: Row, machine: Machine) -> Iterator[Checked]:
    """The row's own time, and torch's in fp32 and bf16 beside it."""
    numel = int(column(row, "numel"))
    cluster, own = placed(row, machine)
    what = f"all_reduce of {numel} floats, {cluster.world} ranks on {cluster.nodes} nodes, {row['link']}"
    job = TrainingJob(numel, 0.0, bucket_bytes=4 * numel)
    name = "int8" if row["codec"] == "auto" else str(row["codec"])  # bench's auto has this codec
    first, _, across = name.partition("/")
    used = codec(across or first), codec(first) if across else None
    mine = PLAIN if row["algorithm"] == "plain" else Scheme(str(row["algorithm"]), *used)
    for scheme, ms in ((mine, "ms_p50"), (PLAIN, "plain_ms"), (BF16, "bf16_ms")):
        one = model.times(model.piece(numel, scheme, cluster, own, job), numel, cluster, own)
        yield Checked(what, scheme, scheme.kind, 1e-3 * column(row, ms), one.alone_s, cluster.world)


def _step(row: Row, machine: Machine) -> Iterator[Checked]:
    """A step on a shaped link; peers beside torch's bf16, replicas, and feedback by hand are not predicted."""
    params, parallel = int(column(row, "params")), str(row["parallel"])
    pieces = PIECES.get(str(row["task"]))
    job = TrainingJob(
        params,
        1e-3 * column(row, "compute_ms"),
        bucket_bytes=model.BUCKET_BYTES if pieces is None else -(-4 * params // pieces),
        optimizer=str(row["optimizer"]),
        parallel=parallel,
        gathered=torch.float32,
        every=int(column(row, "every")) if parallel == DILOCO else 1,
        units=LAYERS.get(params, 0),
    )
    where = placed(row, machine)
    scheme = _scheme(str(row["codec"]).partition("@")[0], str(row.get("weights") or "none"), job, where[0].world)
    what = f"{parallel} step of {params} parameters, {where[0].world} ranks, {row['link']}, every {job.every}"
    if scheme is not None and row["feedback"] in (scheme.feedback(job), "none"):
        yield _checked(what, scheme, column(row, "step_ms"), job, where)


def _scheme(name: str, weights: str, job: TrainingJob, world: int) -> Scheme | None:
    if name == "none":
        return PLAIN
    if name in ("bf16", "mixed"):
        return BF16
    if name.startswith(("powersgd", "auto")) or "@" in weights:
        return None
    algorithm = "sharded" if job.parallel == FSDP2 else model.usual(world)
    return Scheme(algorithm, codec(name), None, Identity() if weights == "none" else codec(weights))


def _on_gpu(row: Row, source: str, machine: Machine) -> Iterator[Checked]:
    params, world = int(column(row, "numel")), int(column(row, "world"))
    hosts = int(row.get("nodes") or (world if row["link"] == "tcp" else 1))
    large = params > 10**8
    rate = step_rate(params, world) if large and hosts == world else sum_rate(world, hosts)
    link = LinkModel(rate, clusters.LATENCY_S["nccl"])
    inside = LinkModel(sum_rate(world, 1), clusters.INSIDE_LATENCY_S["nccl"]) if hosts < world else None
    cluster = Cluster(world, world // hosts, link if hosts > 1 else None, inside)
    parallel = DDP if row["verb"] == "ddp_step" else FSDP2
    job = TrainingJob(
        params,
        compute_s(parallel, world) if large else 0.0,  # a network of a few layers, whose steps wait for messages
        parallel=parallel,
        gathered=torch.bfloat16 if large else torch.float32,
        units=-(-LAYERS[params] // int(row.get("wrap") or 1)),
    )
    gradients, _, weights = str(row["codec"]).partition("/")
    scheme = _scheme(gradients, weights or "none", job, world)
    if scheme is not None:
        what = f"{parallel} step of {params} parameters, {world} ranks on {hosts} hosts, NCCL, {source}"
        yield _checked(what, scheme, column(row, "ms_p50"), job, (cluster, machine))


def sum_rate(world: int, hosts: int) -> float:
    """Bytes per second of a host in torch's sum of 16 M floats, on so many hosts; inside a host, of a rank."""
    for row in read(f"collectives_nccl_h200_2026-11-17_{world}ranks").rows:
        nodes = row["nodes"] or (world if row["link"] == "tcp" else 1)
        if (row["verb"], row["numel"], nodes) == ("all_reduce", 16_000_000, hosts):
            return 2 * (world - 1) / world * 64e6 / (1e-3 * column(row, "plain_ms"))
    raise AssertionError(f"no sum of {world} ranks on {hosts} hosts is recorded")


def step_rate(params: int, world: int) -> float:
    """Bytes per second of a host in plain torch's step of DDP, most of which waits for the link."""
    row = read(f"ddp_steps_gpt124m_h200_2026-11-{'19' if world == 2 else '18_4hosts'}").rows[0]
    return 2 * (world - 1) / world * 4 * params / (1e-3 * column(row, "plain_ms"))


def compute_s(parallel: str, world: int) -> float:
    """Plain torch's step on one host; FSDP2's takes as many times DDP's on all machines, with four ranks too."""

    def plain(name: str) -> float:
        ranks = "18_1host_4ranks" if name == "ddp" and world == 4 else "19_1host_2ranks"
        rows = read(f"{name}_steps_gpt124m_h200_2026-11-{ranks}").rows
        return 1e-3 * next(column(row, "ms_p50") for row in rows if row["codec"] == "none")

    if parallel == DDP:
        return plain("ddp")
    two = read("ddp_steps_gpt124m_h200_2026-11-19_1host_2ranks_100mb").rows[0]  # on the machine of FSDP2's record
    return plain("fsdp") * plain("ddp") / (1e-3 * column(two, "ms_p50"))
