"""`thinwire advise`: which codec, if any, makes a step faster on these links, and what it costs."""

import json
from collections.abc import Callable
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from thinwire.errors import AdviceError, RecordError
from thinwire.tools import report
from thinwire.tools.advise import cluster as clusters, model, units, verdict
from thinwire.tools.advise.cluster import INSIDE_LATENCY_S, LATENCY_S, Cluster, LinkModel, Machine
from thinwire.tools.advise.model import TrainingJob
from thinwire.tools.advise.verdict import Verdict
from thinwire.tools.bench import record
from thinwire.tools.cli import flags, screen
from thinwire.tools.cli.flags import Device
from thinwire.tools.local import torchrun
from thinwire.tools.report import TextGrid, counted

PER_NODE = ("--gpus-per-node", "--ranks-per-node")
LATENCY = "Per message between nodes; default 10us, on the CPU 300us."
DEVICE = "cpu: processes on gloo; cuda: one GPU per rank, on NCCL."
OVERLAP = "Of --step that may hide messages; default 0.5, FSDP2 0.75; less with few pieces, on CPUs 0."
CODECS = f"Codecs to compare; default {','.join(model.CODECS)}."
INTRA = "A rank's link to others of its node: 400GB/s; 12GB/s without NVLink."
SITES = "Ranks per node, for DiLoCo per site; default 1."
LOSSES = "A record of `thinwire rehearse`, whose losses count before the committed ones."
Parallel = StrEnum("Parallel", ["ddp", "fsdp2", "diloco"])
Optimizer = StrEnum("Optimizer", ["adam", "sgd", "muon"])
Dtype = StrEnum("Dtype", ["float32", "bfloat16", "float16"])
Whole = int | None
Number = float | None


def _option(parse: Callable[[str], Any], metavar: str, text: str, *names: str) -> Any:
    def parsed(given: str) -> Any:
        with screen.usage_errors(None, AdviceError):
            return parse(given)

    return typer.Option(*names, parser=parsed, metavar=metavar, help=text)


def command(
    context: typer.Context,
    params: Annotated[Whole, _option(units.count, "N", "Parameters of the model: 7e9, 125M.")] = None,
    world: Annotated[Whole, _option(units.count, "N", "Ranks in all.")] = None,
    per_node: Annotated[Whole, _option(units.count, "N", SITES, *PER_NODE)] = None,
    inter: Annotated[Number, _option(units.rate, "RATE", "A node's link to others, one way: 25gbit, 3GB/s.")] = None,
    intra: Annotated[Number, _option(units.rate, "RATE", INTRA)] = None,
    step: Annotated[Number, _option(units.seconds, "TIME", "Compute per step, no communication: 1.2s, 350ms.")] = None,
    parallel: Annotated[Parallel, typer.Option(help="How ranks share the work.")] = Parallel.ddp,
    trainable: Annotated[Whole, _option(units.count, "N", "Parameters that learn (LoRA): 21M; default all.")] = None,
    every: Annotated[Whole, typer.Option(min=1, metavar="N", help="DiLoCo: steps between rounds; default 30.")] = None,
    latency: Annotated[Number, _option(units.seconds, "TIME", LATENCY)] = None,
    device: Annotated[Device, typer.Option(help=DEVICE)] = Device.cuda,
    dtype: Annotated[Dtype, typer.Option(help="Of the gradients.")] = Dtype.float32,
    optimizer: Annotated[Optimizer, typer.Option(help="Whose losses count; feedback below 8 bits.")] = Optimizer.adam,
    overlap: Annotated[Number, _option(units.share, "SHARE", OVERLAP)] = None,
    codecs: Annotated[list[str] | None, typer.Option(metavar="A,B", help=CODECS)] = None,
    losses: Annotated[str | None, typer.Option(metavar="FILE", help=LOSSES)] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Print every scheme in a table, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what to use on your links: predict a training step with every codec, and choose.

    "Safe" is the fastest scheme whose loss was measured and does not differ; "Faster" one whose loss was measured and
    rose little, or not certainly. Often neither pays, and the answer is not to compress. Steps are predicted from links
    and from times of committed records (docs/reference/cli.md has the formula); a gain is a range: the error observed
    against measured steps. To measure a link, run thinwire bench link under torchrun.

    \b
    Example:
      thinwire advise --params 1.3e9 --world 64 --gpus-per-node 8 --inter 25gbit --intra 400GB/s --step 1.2s
      thinwire advise --parallel fsdp2 --params 7B --world 64 --gpus-per-node 8 --inter 25gbit --intra 400GB/s --step 2s
      thinwire advise --params 8B --trainable 21M --world 8 --gpus-per-node 8 --intra 12GB/s --step 900ms
    """
    node = per_node or 1
    needed: dict[str, object] = {"--params": params, "--step": step, "--world": world}
    if world is None or world > node:  # where the number of ranks is missing too, there are several nodes
        needed["--inter"] = inter
    if node > 1:
        needed["--intra"] = intra
    missing = ", ".join(flag for flag, value in needed.items() if value is None)
    if missing or params is None or step is None or world is None:
        context.fail(f"Missing: {missing}; see thinwire advise --help")
    if trainable is not None and trainable > params:
        raise typer.BadParameter(f"expected at most --params, got {trainable}", param_hint="--trainable")
    flags.refuse("goes with --parallel diloco", every=None if parallel is Parallel.diloco else every)
    flags.refuse("holds no losses of DiLoCo", losses=losses if parallel is Parallel.diloco else None)
    cluster = _described(world, node, inter, intra, latency, torchrun.BACKENDS[device])
    own = clusters.recorded(device).shared(node, node)
    job = TrainingJob(
        *(params, step, model.DTYPES[dtype], model.BUCKET_BYTES, overlap, optimizer.value),
        parallel=parallel.value,
        trained=trainable or 0,
        gathered=model.DTYPES["bfloat16" if device is Device.cuda else "float32"],
        every=every or model.EVERY,
    )
    with screen.usage_errors("--losses", RecordError):
        found = verdict.losses_of(record.read(losses), Path(losses).name, job.optimizer) if losses else None
    judged = verdict.judge(job, cluster, own, codecs=flags.codecs(codecs, model.CODECS), losses=found)
    if as_json:
        typer.echo(json.dumps(_answer(job, cluster, own, judged), indent=1, allow_nan=False, default=str))
        return
    rates = [f"{units.bits(inter)} between nodes"] if inter else []
    rates += [f"{units.nbytes(intra)}/s inside"] if intra else []
    console = screen.console()
    console.print(_conditions(job, cluster, own, rates))
    console.print("\n".join(judged.lines))
    if show_all:
        report.show_grid(_grid(judged, job), console)


def _described(ranks: int, node: int, inter: Number, intra: Number, latency: Number, transport: str) -> Cluster:
    """What the flags say of the links."""
    if ranks % node:
        raise typer.BadParameter(f"expected a divisor of --world {ranks}, got {node}", param_hint="--gpus-per-node")
    for flag, rate, needed in (("--inter", inter, ranks > node), ("--intra", intra, node > 1)):
        if rate is not None and not needed:
            raise typer.BadParameter("no other rank uses that link: leave it out", param_hint=flag)
    between = LATENCY_S[transport] if latency is None else latency
    across = None if inter is None else LinkModel.of_rate(inter, between, transport)
    inside = None if intra is None else LinkModel.of_rate(intra, INSIDE_LATENCY_S[transport], transport, inside=True)
    return Cluster(ranks, node, across, inside, transport)


def _conditions(job: TrainingJob, cluster: Cluster, own: Machine, links: list[str]) -> str:
    learns = "" if job.learns == job.params else f", of which {units.amount(job.learns)} learn"
    ranks = f"{counted(cluster.nodes, 'node')} of {counted(cluster.per_node, 'rank')}"
    step = f"{units.duration(job.step_s)} of compute"
    parts = [f"{counted(units.amount(job.params), 'parameter')}{learns}, {job.parallel}, {ranks}", *links, step]
    return f"{'; '.join(parts)}. Kernels: {own.source}."


def _grid(found: Verdict, job: TrainingJob) -> TextGrid:
    others = [way for way in (found.choice.plain, found.choice.bf16) if way is not None]
    buckets = ["bucket"] if job.parallel == model.DDP else []
    header = ["scheme", "step", *(f"over {way.name}" for way in others), "loss, nats", "bytes", "across", *buckets]
    rows = []
    for way, one in found.ranked.items():
        measured = "–" if way.is_exact and way.loss is None else "not measured"
        loss = measured if way.loss is None else str(way.loss).removesuffix(" nats")
        sizes = [units.nbytes(one.bytes), units.nbytes(one.bytes_across)]
        sizes += [f"{one.bucket_bytes / 2**20:.4g} MiB" for _ in buckets]
        rows.append([way.name, units.duration(one.step_s), *(way.range(other) for other in others), loss, *sizes])
    return TextGrid("Predicted, the fastest first", header, rows)


def _answer(job: TrainingJob, cluster: Cluster, own: Machine, found: Verdict) -> dict[str, Any]:
    choice = found.choice
    answers = {"safe": choice.safe, "faster": choice.faster}
    advice = {name: way and {"scheme": way.name, "how": way.code} for name, way in answers.items()}
    schemes = []
    for way, one in found.ranked.items():
        gain = way.gain(choice.plain)
        more = {"speedup": gain, "speedup_range": [gain * way.low, gain * way.high]}
        loss = {"loss": way.loss and asdict(way.loss), "safe": way.is_safe}
        schemes.append({**vars(one), "algorithm": one.scheme.algorithm, **more, **loss})
    return {
        "job": {**vars(job), "hidden_s": job.hidden_s(own)},
        "cluster": asdict(cluster),
        "machine": {"device": own.device, "source": own.source},
        "schemes": schemes,
        "advice": {"compress": choice.compress, **advice, "lines": found.lines},
    }
