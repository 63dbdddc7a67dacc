"""What records say: losses by scheme, and the job, ranks and links of a training row.

Committed ones also tell of steps of FSDP2, and how far predicted gains were from measured ones.

`evidence.json` ships it with the package; `python tests/figures.py` writes that file from `benchmarks/`.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from thinwire.errors import AdviceError, RecordError
from thinwire.tools import rule
from thinwire.tools.advise import model, units
from thinwire.tools.advise.links import INSIDE_LATENCY_S, LATENCY_S, Cluster, LinkModel
from thinwire.tools.advise.machine import BYTE_S, Machine, column
from thinwire.tools.advise.model import TrainingJob
from thinwire.tools.bench.record import Record, Row
from thinwire.tools.rule import Loss, Way


@dataclass(frozen=True)
class Losses:
    """The losses of one training record."""

    source: str
    parallel: str  # "ddp", "fsdp2" or "diloco"
    params: int
    world: int
    seeds: int
    floor: float | None
    ratios: Mapping[str, float | None]  # by name of the scheme; None: it diverged

    def of(self, name: str) -> Loss | None:
        floor = self.floor if self.seeds >= rule.LEAST_SEEDS else None
        return Loss(self.ratios[name], floor, self.seeds, self.source) if name in self.ratios else None


def losses_of(record: Record, source: str) -> Losses:
    """The losses of a record of `thinwire bench train` or `thinwire demo`."""
    if record.kind != "train" or not record.rows:
        got = repr(record.kind) if record.rows else f"{record.kind!r} without rows"
        raise RecordError(f"expected a record of `thinwire bench train` or `thinwire demo`, got {got}")
    parallel = record.rows[-1]["parallel"]  # the first may be a peer: DDP beside DiLoCo
    rows = [row for row in record.rows if row["parallel"] == parallel]
    first = rows[0]
    seeds = int(column(first, "seeds"))
    floor = None if first["noise_floor"] is None or seeds < 2 else column(first, "noise_floor", 0.0)
    ratios = {
        rule.scheme_of(row): None if row.get("diverged") else column(row, "loss_log_ratio", -1e18)
        for row in rows
        if not row.get("control")
    }
    params, world = (int(column(first, name)) for name in ("params", "world"))
    return Losses(source, str(parallel or "ddp"), params, world, seeds, floor, ratios)


def find(name: str, known: Sequence[Losses], parallel: str = "ddp") -> Loss | None:
    """The loss of a scheme in the first record that has it, unless it was not kept in one of at least that size.

    Where it was not kept in a smaller one, that is said beside it.
    """
    found = [losses for losses in known if losses.parallel == parallel and name in losses.ratios]
    if not found:
        return None
    first, *others = found
    loss = first.of(name)
    for other in others:
        said = other.of(name)
        if loss is None or said is None or not loss.is_kept or said.is_kept or said.floor is None:
            continue
        if (other.params, other.world) >= (first.params, first.world):
            return said
        loss = replace(loss, against=str(said)) if not loss.against else loss
    return loss


@dataclass(frozen=True)
class Evidence:
    losses: tuple[Losses, ...]  # that of the largest model first
    misses: Mapping[str, tuple[float, float]]  # measured over predicted gains, least and most, by kind of scheme
    most_ranks: int  # of those that predictions were compared with
    fastest_bytes_per_s: float  # their fastest link
    fsdp: Mapping[str, Any]  # steps of FSDP2: where, and seconds (p20, p50, p80) by scheme


@functools.cache
def shipped() -> Evidence:
    kept = json.loads(resources.files(__package__).joinpath("evidence.json").read_text())
    losses = tuple(Losses(**found) for found in kept.pop("losses"))
    misses = {name: (low, high) for name, (low, high) in kept.pop("misses").items()}
    return Evidence(losses, misses, **kept)


def sharded(evidence: Evidence) -> rule.Choice:
    """What to use with FSDP2, from its committed steps and losses."""
    ways = []
    for scheme, (p20, p50, p80) in evidence.fsdp["seconds"].items():
        gradients, _, weights = scheme.partition("/")
        kept, _, replica = weights.partition("@")
        own = ", replica=True" if replica else ""
        code = f'thinwire.compress_fsdp(model, gradients="{gradients}", weights="{kept}"{own})'
        torchs = {"fp32": "plain fully_shard", "bf16": "fully_shard(mp_policy=MixedPrecisionPolicy(torch.bfloat16))"}
        loss = find(scheme, evidence.losses, "fsdp2")
        ways.append(Way(scheme, torchs.get(scheme, code), p50, p50 / p80, p50 / p20, loss, scheme in torchs))
    return rule.choose(ways, f"measured by {evidence.fsdp['where']}; not predicted for your links")


# Two tensors hold 99 % of the weights of `bench train --task mlp`, and DDP cuts no tensor.
_BUCKETS = {"mlp": 2}


def described(row: Row, machine: Machine) -> tuple[TrainingJob, Cluster, Machine]:
    """What a train row says of its job, its ranks and their links, and what the machine is for each of them."""
    params = count(row, "params")
    buckets = _BUCKETS.get(str(row["task"]))
    job = TrainingJob(
        params,
        1e-3 * column(row, "compute_ms", 0.0),
        bucket_bytes=-(-4 * params // buckets) if buckets else model.BUCKET_BYTES,
        family="linear" if row["optimizer"] == "sgd" else "adaptive",
    )
    return job, *placed(row, machine)


def placed(row: Row, machine: Machine) -> tuple[Cluster, Machine]:
    """Every rank, or every node, behind a link of its own, all on one computer: inside a node it is the limit."""
    try:
        across = LinkModel.of_rate(units.rate(str(row["link"])), LATENCY_S["gloo"])
    except AdviceError as error:
        raise RecordError(f"column 'link': {error}") from None
    world = count(row, "world")
    nodes = world if row.get("nodes") is None else count(row, "nodes")
    inside = LinkModel(1 / BYTE_S["cpu"], INSIDE_LATENCY_S["gloo"]) if nodes < world else None
    cluster = Cluster(world, world // nodes, across=across, inside=inside, transport="gloo")
    return cluster, machine.shared(world, count(row, "cores"))


def count(row: Row, name: str) -> int:
    """The whole number in a column, from 1 on."""
    value = column(row, name, 1)
    if not value.is_integer():
        raise RecordError(f"expected a whole number in column {name!r}, got {row[name]!r}")
    return int(value)
