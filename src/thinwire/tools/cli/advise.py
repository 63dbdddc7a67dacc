"""`thinwire advise`: which codec and algorithm, if any, make a step faster on these links."""

import json
from collections.abc import Callable
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated, Any

import torch
import typer

from thinwire.errors import AdviceError
from thinwire.tools.advise import cluster as clusters, model, units, verdict
from thinwire.tools.advise.cluster import INSIDE_LATENCY_S, LATENCY_S, Cluster, LinkModel, Machine
from thinwire.tools.advise.model import Prediction, TrainingJob
from thinwire.tools.advise.verdict import Verdict
from thinwire.tools.cli import flags, screen
from thinwire.tools.cli.flags import Device
from thinwire.tools.local import torchrun
from thinwire.tools.report import tables
from thinwire.tools.report.cells import ABSENT, TextGrid, Tone, counted

LEAST_BUCKET = 1 << 20  # bytes; below, a bucket's messages are all latency
PER_NODE = ("--gpus-per-node", "--ranks-per-node")
LATENCY = "Per message between nodes; default 10us, on the CPU 300us."
DEVICE = "cpu: processes on gloo; cuda: one GPU per rank, on NCCL. Default cuda."
OVERLAP = "Of --step that may hide messages; default 0.5 (1 - 1/buckets), on a CPU with one core per rank 0."
CODECS = f"Codecs to compare; default {','.join(model.CODECS)}."
Optimizer = StrEnum("Optimizer", ["adam", "sgd"])
Dtype = StrEnum("Dtype", ["float32", "bfloat16", "float16"])
Whole = int | None
Number = float | None


def _bucket_size(text: str) -> int:
    found = units.size(text)
    if found < LEAST_BUCKET:
        raise AdviceError(f"expected at least 1MiB, got {text!r}")
    return found


def _option(parse: Callable[[str], Any], metavar: str, text: str, *names: str) -> Any:
    def parsed(given: str) -> Any:
        with screen.usage_errors(None, AdviceError):
            return parse(given)

    return typer.Option(*names, parser=parsed, metavar=metavar, help=text)


def command(
    context: typer.Context,
    params: Annotated[Whole, _option(units.count, "N", "Parameters of the model: 7e9, 125M.")] = None,
    world: Annotated[Whole, _option(units.count, "N", "Ranks in all.")] = None,
    per_node: Annotated[Whole, _option(units.count, "N", "Ranks per node; default 1.", *PER_NODE)] = None,
    inter: Annotated[Number, _option(units.rate, "RATE", "A node's link to others, one way: 25gbit, 3GB/s.")] = None,
    intra: Annotated[Number, _option(units.rate, "RATE", "A rank's link to others of its node: 400GB/s.")] = None,
    step: Annotated[Number, _option(units.seconds, "TIME", "Compute per step, no communication: 1.2s, 350ms.")] = None,
    latency: Annotated[Number, _option(units.seconds, "TIME", LATENCY)] = None,
    device: Annotated[Device | None, typer.Option(help=DEVICE)] = None,
    cores: Annotated[Whole, typer.Option(min=1, metavar="N", help="Per node of CPUs; default one per rank.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of the gradients.")] = Dtype.float32,
    optimizer: Annotated[Optimizer, typer.Option(help="Decides the feedback of 1 to 3 bits.")] = Optimizer.adam,
    overlap: Annotated[Number, _option(units.share, "SHARE", OVERLAP)] = None,
    bucket: Annotated[Whole, _option(_bucket_size, "SIZE", "bucket_cap_mb; default the best of 25 to 1600MiB.")] = None,
    codecs: Annotated[list[str] | None, typer.Option(metavar="A,B", help=CODECS)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what to use on your links: predict a training step with every codec, and choose.

    The advice is the fastest scheme among those whose loss stays within the seed-to-seed spread. It may be not to
    compress. Steps are predicted from the links and from kernel times of committed records (docs/reference/cli.md has
    the formula). A gain is a range: the error observed against measured steps. To measure a link, run
    thinwire bench link under torchrun.

    \b
    Columns:
      step      predicted time
      over X    speedup over bf16, and over no compression
      loss      its change in a committed record, if there is one
      bytes     sent per rank and step; across: of these, to other nodes
      bucket    DDP's bucket_cap_mb that the prediction is for

    \b
    Exit status:
      0  advice was printed, whatever it is
      2  a value is missing or not understood

    \b
    Example:
      thinwire advise --params 1.3e9 --world 64 --gpus-per-node 8 --inter 25gbit --intra 400GB/s --step 1.2s
      thinwire advise --params 25M --world 4 --inter 100mbit --step 200ms --device cpu --json
    """
    chosen = flags.codecs(codecs, model.CODECS)
    node = per_node or 1
    needed: dict[str, object] = {"--params": params, "--step": step, "--world": world}
    if world is None or world > node:  # where the number of ranks is missing too, there are several nodes
        needed["--inter"] = inter
    if node > 1:
        needed["--intra"] = intra
    missing = ", ".join(flag for flag, value in needed.items() if value is None)
    if missing or params is None or step is None or world is None:
        context.fail(f"Missing: {missing}; see thinwire advise --help")
    own = clusters.recorded(device or Device.cuda)
    cluster, own = _described(world, node, inter, intra, latency, own, cores)
    adaptive = optimizer is Optimizer.adam
    job = TrainingJob(params, step, model.DTYPES[dtype], bucket or model.BUCKET_BYTES, overlap, adaptive)
    judged = verdict.judge(job, cluster, own, codecs=chosen, buckets=(bucket,) if bucket else verdict.BUCKETS)
    (print_json if as_json else print_verdict)(job, cluster, own, judged)


def _described(
    ranks: int, node: int, inter: Number, intra: Number, latency: Number, own: Machine, cores: int | None
) -> tuple[Cluster, Machine]:
    """What the flags say of the links, and what the machine is for each rank."""
    if node > ranks or ranks % node:
        raise typer.BadParameter(f"{ranks} ranks do not make nodes of {node}", param_hint="--gpus-per-node")
    for flag, rate, needed in (("--inter", inter, ranks > node), ("--intra", intra, node > 1)):
        if rate is not None and not needed:
            raise typer.BadParameter("no other rank uses that link: leave it out", param_hint=flag)
    if cores is not None and own.device == Device.cuda:
        raise typer.BadParameter("goes with --device cpu", param_hint="--cores")
    transport = torchrun.BACKENDS[own.device]
    between = LATENCY_S[transport] if latency is None else latency
    across = None if inter is None else LinkModel.of_rate(inter, between, transport)
    inside = None if intra is None else LinkModel.of_rate(intra, INSIDE_LATENCY_S[transport], transport, inside=True)
    return Cluster(ranks, node, across, inside, transport), own.shared(node, cores or node)


def print_verdict(job: TrainingJob, cluster: Cluster, own: Machine, found: Verdict) -> None:
    ranks = f"{counted(cluster.nodes, 'node')} of {counted(cluster.per_node, 'rank')}"
    rates = [f"{units.nbytes(link.bytes_per_s)}/s and {units.duration(link.latency_s)}" for link in cluster.links]
    summary = f"{job.params:.3g} parameters in {_name(job.dtype)}, {units.duration(job.step_s)} of compute, {ranks}"
    screen.say(f"{summary}; links: {', '.join(rates) or 'none'} per message; kernels: {own.source}")
    screen.say_choice(found.choice)
    screen.say(f"Why: {found.reason}.")
    screen.say_notes(found.notes)
    tables.show_grid(_grid(cluster, found), screen.console())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _grid(cluster: Cluster, found: Verdict) -> TextGrid:
    across = ["across"] if cluster.has_levels else []
    others = [way for way in (found.choice.bf16, found.choice.plain) if way is not None]
    header = [
        "",
        "scheme",
        "step",
        *(f"over {way.name}" for way in others),
        "loss",
        "bytes",
        *across,
        "bucket",
    ]
    rows = [
        [
            "*" if prediction is found.advised else "",
            found.way(prediction).name,
            units.duration(prediction.step_s),
            *(found.way(prediction).range(way) for way in others),
            _loss(found, prediction),
            units.nbytes(prediction.bytes),
            *(units.nbytes(prediction.bytes_across) for _ in across),
            f"{units.mebibytes(prediction.bucket_bytes)} MiB",
        ]
        for prediction in found.ranked
    ]
    tones: list[Tone] = ["good" if prediction is found.advised else "" for prediction in found.ranked]
    return TextGrid("Predicted, the fastest first; * is advised", header, rows, labels=2, tones=tones)


def _loss(found: Verdict, prediction: Prediction) -> str:
    """+0.5 %, with a mark where that is more than the seed-to-seed spread."""
    way = found.way(prediction)
    if way is found.choice.plain or (way.loss is None and way.is_exact):
        return ABSENT
    if way.loss is None:
        return "not measured"
    return way.loss.change if way.loss.is_kept else f"{way.loss.change}: too high"


def print_json(job: TrainingJob, cluster: Cluster, own: Machine, found: Verdict) -> None:
    choice = found.choice
    machine = {"device": own.device, "source": own.source, "cores": own.cores}
    figures = {"params": job.params, "step_s": job.step_s, "dtype": _name(job.dtype), "hidden_s": job.hidden_s(own)}
    advice = {"compress": choice.compress, "scheme": choice.chosen.name, "how": choice.chosen.code}
    said = {"lines": list(choice.lines), "reason": found.reason, "notes": list(found.notes)}
    answer = {
        "job": figures,
        "cluster": asdict(cluster),
        "machine": machine,
        "parallel": "ddp",
        "schemes": [_figures(found, prediction) for prediction in found.ranked],
        "advice": {**advice, **said},
    }
    typer.echo(json.dumps(answer, indent=1, allow_nan=False))


def _figures(found: Verdict, prediction: Prediction) -> dict[str, Any]:
    scheme, way = prediction.scheme, found.way(prediction)
    speedup = way.gain(found.choice.plain)
    return {
        "scheme": str(scheme),
        "codec": str(scheme.codec),
        "across_codec": scheme.across and str(scheme.across),
        "algorithm": scheme.algorithm,
        "speedup": speedup,
        "speedup_range": [speedup * way.low, speedup * way.high],
        "loss": way.loss and asdict(way.loss),
        "keeps_the_loss": way.keeps_the_loss,
        **{name: value for name, value in vars(prediction).items() if name != "scheme"},
    }
