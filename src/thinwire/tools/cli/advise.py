"""`thinwire advise`: which codec and algorithm, if any, make a step faster on these links.

It prints the three lines of the rule, why, and the table behind them; or the same as JSON.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from thinwire.codecs import Codec
from thinwire.errors import AdviceError, RecordError
from thinwire.tools.advise import evidence, machine as machines, measure, model, rounds, schemes, units, verdict
from thinwire.tools.advise.links import INSIDE_LATENCY_S, LATENCY_S, TRANSPORTS, Cluster, LinkModel, payload_of
from thinwire.tools.advise.machine import Machine
from thinwire.tools.advise.model import Prediction, TrainingJob
from thinwire.tools.advise.rounds import OuterRound
from thinwire.tools.advise.verdict import Verdict, duration
from thinwire.tools.bench import record
from thinwire.tools.cli import flags, screen
from thinwire.tools.cli.flags import Device, Optimizer
from thinwire.tools.report import tables
from thinwire.tools.report.cells import ABSENT, TextGrid, Tone, counted
from thinwire.tools.rule import Choice

FAMILIES = {Optimizer.adam: "adaptive", Optimizer.sgd: "linear"}
MEASURED = ("world", "inter", "intra", "latency", "cores", "kernels")  # under torchrun
DDP_ONLY = ("losses", "memory", "optimizer", "overlap", "bucket", "dtype")  # what does not go with --diloco
LEAST_BUCKET = 1 << 20  # bytes; below, a bucket's messages are all latency
PER_NODE = ("--gpus-per-node", "--ranks-per-node")
LATENCY = "Per message between nodes; default 10us, on the CPU 300us."
DEVICE = "cpu: processes on gloo; cuda: one GPU per rank, on NCCL. Default cuda."
OVERLAP = "Of --step that may hide messages; default 0.5 (1 - 1/buckets), on a CPU with one core per rank 0."
CODECS = f"Codecs to compare; default {','.join(schemes.CODECS)}."
LOSSES = "Losses of a record of `bench train` or `demo`, which counts before the committed ones."
MEMORY = "Per GPU; default 80GB. On a CPU it is judged only where it is given."
NOT_MEASURED = "not measured"
DILOCO = "DiLoCo on these links instead of DDP: steps between rounds, and codecs."
Whole = int | None
Number = float | None
Dtype = StrEnum("Dtype", ["float32", "bfloat16", "float16"])


def _bucket_size(text: str) -> int:
    found = units.size(text)
    if found < LEAST_BUCKET:
        raise AdviceError(f"expected at least 1MiB, got {text!r}")
    return found


def _parser(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def parsed(given: str) -> Any:
        with screen.usage_errors(None, AdviceError):
            return parse(given)

    return parsed


def _option(parse: Callable[[str], Any], metavar: str, text: str, *names: str) -> Any:
    return typer.Option(*names, parser=_parser(parse), metavar=metavar, help=text)


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
    losses: Annotated[str | None, typer.Option(metavar="FILE", help=LOSSES)] = None,
    memory: Annotated[Whole, _option(units.size, "SIZE", MEMORY)] = None,
    diloco: Annotated[bool, typer.Option("--diloco", help=DILOCO)] = False,
    kernels: Annotated[str | None, typer.Option(metavar="FILE", help="Kernel times: `bench kernels --json`.")] = None,
    no_measure: Annotated[bool, typer.Option("--no-measure", help="Under torchrun too, trust the flags.")] = False,
    whole: screen.All = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what to use on your links: predict a training step with every codec, and choose.

    The advice is the fastest scheme among those whose loss stays within what another seed does. It may be not to
    compress; where DDP cannot hold the model, it is FSDP2, or more ranks. Steps are predicted from the links and from
    kernel times of committed records (docs/reference/advise.md has the formulas). A gain is a range: so far off was
    the model where it was compared. Values that are missing are asked for on a terminal; elsewhere they are an error.

    Under torchrun the ranks measure their links and kernels first; --params and --step are needed, the rest is known.
    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment count as torchrun, unless --no-measure is given.

    \b
    Columns:
      step      predicted time
      over X    gain over bf16, and over no compression
      loss      its change in a committed record, if there is one
      bytes     sent per rank and step; across: of these, to other nodes
      error     expected, relative, RMS, of the summed gradients, if they were Gaussian
      bucket    DDP's bucket_cap_mb that the prediction is for

    \b
    Exit status:
      0  advice was printed, whatever it is
      1  the ranks could not measure
      2  a value is missing or not understood

    \b
    Example:
      thinwire advise --params 1.3e9 --world 64 --gpus-per-node 8 --inter 25gbit --intra 400GB/s --step 1.2s
      thinwire advise --params 25M --world 4 --inter 100mbit --step 200ms --device cpu --json
      torchrun --nproc-per-node 8 -m thinwire advise --params 1.3e9 --step 1.2s
      thinwire advise --params 1.3e9 --world 4 --inter 100mbit --step 1.2s --diloco
    """
    if diloco:
        _refuse(context, DDP_ONLY, "it is for DDP: leave it out, or leave --diloco out")
    place = None if no_measure else _place()
    chosen = flags.codecs(codecs, rounds.CODECS if diloco else schemes.CODECS)
    with screen.usage_errors("--losses", RecordError):
        known = [] if losses is None else [evidence.losses_of(record.read(losses), Path(losses).name)]
    if place is None and _somebody_listens():
        params = _asked("--params", params)
        world = _asked("--world", world)
        per_node = _asked("--gpus-per-node", per_node, default="1") if world > 1 else per_node
        inter = _asked("--inter", inter) if world > (per_node or 1) else inter
        intra = _asked("--intra", intra) if (per_node or 1) > 1 else intra
        step = _asked("--step", step)
    node = per_node or 1
    needed: dict[str, object] = {"--params": params, "--step": step}
    if place is None:  # where the number of ranks is missing too, there are several nodes
        needed |= {"--world": world, **({"--inter": inter} if world is None or world > node else {})}
        needed |= {"--intra": intra} if node > 1 else {}
    else:
        _refuse(context, MEASURED, "under torchrun it is measured: leave it out, or add --no-measure")
    missing = ", ".join(flag for flag, value in needed.items() if value is None)
    if missing or params is None or step is None:
        context.fail(f"Missing: {missing}; see thinwire advise --help")
    if place is None:
        cluster, own = _described(world or 1, node, inter, intra, latency, _machine(device, kernels), cores)
    else:
        cluster, own = _measured(place, device, per_node, chosen)
    family = FAMILIES[optimizer]
    job = TrainingJob(params, step, model.DTYPES[dtype], bucket or model.BUCKET_BYTES, overlap, family)
    if place is not None and place.rank:
        return
    if diloco:
        found = list(rounds.rounds(job, cluster, own, chosen, rounds.EVERY))
        (print_rounds_json if as_json else print_rounds)(job, cluster, own, found)
        return
    needs = model.memory(job)
    has = memory or (model.GPU_BYTES if own.device == Device.cuda else None)
    if has is not None and sum(needs.values()) > has:
        _print_sharded(needs, has, cluster.world, as_json)
        return
    buckets = (bucket,) if bucket else verdict.BUCKETS
    judged = verdict.judge(job, cluster, own, codecs=chosen, losses=known, buckets=buckets)
    (print_json if as_json else print_verdict)(job, cluster, own, judged)


def _somebody_listens() -> bool:
    return sys.stdin.isatty()


_QUESTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "--params": ("Parameters of the model (such as 7e9)", units.count),
    "--world": ("Ranks in all", units.count),
    "--gpus-per-node": ("Ranks per node", units.count),
    "--inter": ("Link of a node to the others (such as 25gbit)", units.rate),
    "--intra": ("Link of a rank to the others of its node (such as 400GB/s)", units.rate),
    "--step": ("Compute per step, without communication (such as 1.2s)", units.seconds),
}


def _asked(flag: str, given: Any, default: str | None = None) -> Any:
    """A value that was given, or else that somebody types."""
    question, parse = _QUESTIONS[flag]
    return typer.prompt(question, default=default, value_proc=_parser(parse)) if given is None else given


def _refuse(context: typer.Context, names: Iterable[str], why: str) -> None:
    """No flag is accepted and then ignored."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            flag = next(flag.opts[0] for flag in context.command.params if flag.name == name)
            raise typer.BadParameter(why, param_hint=flag)


def _place() -> measure.Place | None:
    """Of this rank under torchrun; None elsewhere."""
    if any(name not in os.environ for name in measure.ENVIRONMENT):
        return None
    try:
        return measure.place()
    except AdviceError as error:
        hint = f"{error}; add --no-measure if it is not torchrun's"
        raise typer.BadParameter(hint, param_hint="environment") from None


def _described(
    ranks: int, per_node: int, inter: Number, intra: Number, latency: Number, own: Machine, cores: int | None
) -> tuple[Cluster, Machine]:
    """What the flags say of the links, and what the machine is for each rank."""
    node = _node(ranks, per_node)
    for flag, rate, needed in (("--inter", inter, ranks > node), ("--intra", intra, node > 1)):
        if rate is not None and not needed:
            raise typer.BadParameter("there is nobody at the end of that link: leave it out", param_hint=flag)
    if cores is not None and own.device == Device.cuda:
        raise typer.BadParameter("goes with --device cpu", param_hint="--cores")
    transport = TRANSPORTS[own.device]

    def link(rate: Number, latency_s: float, inside: bool) -> LinkModel | None:
        if rate is None:
            return None
        return LinkModel.of_rate(rate, latency_s, payload=payload_of(rate, transport, inside))

    across = link(inter, LATENCY_S[transport] if latency is None else latency, inside=False)
    inside = link(intra, INSIDE_LATENCY_S[transport], inside=True)
    return Cluster(ranks, node, across, inside, transport), own.shared(node, cores or node)


def _node(ranks: int, per_node: int) -> int:
    if per_node > ranks or ranks % per_node:
        raise typer.BadParameter(f"{ranks} ranks do not make nodes of {per_node}", param_hint="--gpus-per-node")
    return per_node


def _machine(device: Device | None, kernels: str | None) -> Machine:
    if kernels is None:
        return machines.recorded(device or Device.cuda)
    with screen.usage_errors("--kernels", RecordError):
        found = machines.from_record(record.read(kernels), Path(kernels).name)
    if device is not None and found.device != device:
        raise typer.BadParameter(f"it was measured on {found.device}, not on {device}", param_hint="--kernels")
    return found


def _measured(
    place: measure.Place, device: Device | None, per_node: int | None, codecs: Sequence[Codec]
) -> tuple[Cluster, Machine]:
    flags.check_device(device)
    on_cpu = device is Device.cpu or not torch.cuda.is_available()
    where = torch.device("cpu") if on_cpu else torch.device("cuda", place.local_rank)
    node = _node(place.world, per_node or place.per_node)
    with screen.plain_errors(), measure.job(where):
        every = list(dict.fromkeys([*codecs, *schemes.INSIDE]))
        return measure.links(where, node), measure.kernels(every, where, node)


# What is printed.


def print_verdict(job: TrainingJob, cluster: Cluster, own: Machine, found: Verdict) -> None:
    _say_conditions(job, cluster, own)
    tables.show_grid(_grid(cluster, found), screen.console())
    screen.say_choice(found.choice)
    screen.say(f"Why: {found.reason}.")
    screen.say_notes(found.notes)


def _say_conditions(job: TrainingJob, cluster: Cluster, own: Machine) -> None:
    shared = f", shared by {cluster.per_node} ranks" if cluster.per_node > 1 else ""
    links = [
        f"{name} {sent(link.bytes_per_s)}/s{more}, {duration(link.latency_s)} per message"
        for name, link, more in (("across nodes", cluster.across, shared), ("inside a node", cluster.inside, ""))
        if link is not None
    ]
    ranks = f"{cluster.world} ranks in nodes of {cluster.per_node}" if cluster.world > 1 else "1 rank"
    assumed = f"not known, {duration(own.message_s)} per message assumed"
    calls = f". Host's calls of NCCL: {own.nccl.source if own.nccl else assumed}" if own.device != "cpu" else ""
    screen.say(
        f"{counted(job.params, 'parameter')}, {_name(job.dtype)} gradients, {ranks}. Compute per step: "
        f"{duration(job.step_s)}, of which {duration(job.hidden_s(own))} may hide messages"
    )
    screen.say(f"Payload: {'; '.join(links) or 'none'}. Kernels: {own.source}{calls}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _grid(cluster: Cluster, found: Verdict) -> TextGrid:
    across = ["across"] if cluster.has_levels else []
    others = [way for way in (found.choice.bf16, found.choice.plain) if way is not None]
    gains = [f"over {way.name}" for way in others]
    header = ["", "scheme", "step", *gains, "loss", "bytes", *across, "error", "bucket"]
    rows = [
        [
            "*" if prediction is found.advised else "",
            found.way(prediction).name,
            duration(prediction.step_s),
            *(found.way(prediction).range(way) for way in others),
            _loss(found, prediction),
            sent(prediction.bytes),
            *(sent(prediction.bytes_across) for _ in across),
            f"{prediction.error:.2g}",
            f"{verdict.mebibytes(prediction.bucket_bytes)} MiB",
        ]
        for prediction in found.ranked
    ]
    tones: list[Tone] = ["good" if prediction is found.advised else "" for prediction in found.ranked]
    return TextGrid("Predicted, the fastest first; * is advised", header, rows, labels=2, tones=tones)


def _loss(found: Verdict, prediction: Prediction) -> str:
    """+0.5 %, with a mark where that is more than another seed does."""
    way = found.way(prediction)
    if way is found.choice.plain:
        return ABSENT
    if way.loss is None:
        return ABSENT if way.is_exact else NOT_MEASURED
    return way.loss.change if way.loss.is_kept else f"{way.loss.change}: too high"


def sent(count: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1e3:.3g} kB"


def _print_sharded(needs: Mapping[str, float], has: int, world: int, as_json: bool) -> None:
    """DDP cannot hold the model: what it would need, and the advice for FSDP2, or how many ranks that takes."""
    part = model.sharded_memory(needs, world)
    choice = evidence.sharded(evidence.shipped()) if part <= has else None
    if as_json:
        memory = {**needs, "has": has, "sharded": part}
        advice = choice and _advice(choice)
        _dump({"memory": memory, "parallel": "fsdp2" if choice else None, "schemes": [], "advice": advice})
        return
    parts = ", ".join(f"{name} {sent(count)}" for name, count in needs.items())
    told = f"DDP cannot hold this model: it needs about {sent(sum(needs.values()))} per rank, and there are {sent(has)}"
    screen.say(f"{told} (--memory). By rule of thumb: {parts}.")
    if choice is None:
        least = math.ceil(part * world / has)
        screen.say(
            f"Nor can FSDP2 on {counted(world, 'rank')}: weights, gradients and optimizer alone take {sent(part)} on "
            f"each. At least {least} ranks of {sent(has)} could hold them. Activations come on top."
        )
        return
    screen.say(f"Shard it with FSDP2 (torch's fully_shard): {sent(part)} per rank, and activations. Then:")
    screen.say_choice(choice)
    screen.say_notes(choice.notes)


def _advice(choice: Choice) -> dict[str, Any]:
    chosen = choice.chosen
    lines = {"lines": list(choice.lines), "notes": choice.notes}
    return {"compress": choice.compress, "scheme": chosen.name, "how": chosen.code, **lines}


def print_json(job: TrainingJob, cluster: Cluster, own: Machine, found: Verdict) -> None:
    reasons = {"reason": found.reason, "notes": list(found.notes)}
    _dump(
        {
            **_conditions(job, cluster, own),
            "parallel": "ddp",
            "schemes": [_figures(found, prediction) for prediction in found.ranked],
            "advice": {**_advice(found.choice), **reasons},
        }
    )


def _conditions(job: TrainingJob, cluster: Cluster, own: Machine) -> dict[str, Any]:
    machine = {"device": own.device, "source": own.source, "cores": own.cores, "nccl": own.nccl and own.nccl.source}
    figures = {"params": job.params, "step_s": job.step_s, "dtype": _name(job.dtype), "hidden_s": job.hidden_s(own)}
    return {"job": figures, "cluster": asdict(cluster), "machine": machine}


def _figures(found: Verdict, prediction: Prediction) -> dict[str, Any]:
    scheme = prediction.scheme
    way = found.way(prediction)
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


def _dump(answer: Mapping[str, Any]) -> None:
    typer.echo(json.dumps(answer, indent=1, allow_nan=False))


def print_rounds(job: TrainingJob, cluster: Cluster, own: Machine, found: Sequence[OuterRound]) -> None:
    _say_conditions(job, cluster, own)
    rows = [
        [
            f"{one.name}, every {one.every}",
            sent(one.bytes / one.every),
            duration(one.round_s),
            f"{one.lost(0):.1%}",
            str(one.overlap),
            f"{one.lost(one.overlap):.1%}",
            NOT_MEASURED if one.loss is None else one.loss.change,
        ]
        for one in found
    ]
    header = ["outer gradients", "bytes per step", "round", "lost", "overlap", "then lost", "loss"]
    title = (
        "DiLoCo, predicted. lost: share of all time that ranks wait in rounds; overlap: steps that are trained "
        "while an average is under way, and what is lost then; loss: beside fp32 outer gradients"
    )
    tables.show_grid(TextGrid(title, header, rows), screen.console())
    for one in _affordable(found):
        screen.say(f"Use {one.name}, every {one.every}: {one.code}")
        screen.say(f"Loss: {one.loss or NOT_MEASURED}")
        screen.say_notes([one.loss.risk] if one.loss and one.loss.risk else [])


LOST = 0.05  # of all time: more is worth another codec, or fewer rounds


def _affordable(found: Sequence[OuterRound]) -> list[OuterRound]:
    """Of the rounds that lose little time and are not known to cost loss, the most frequent, widest one."""
    fine = [one for one in found if one.loss is None or one.loss.floor is None or one.loss.is_kept]
    cheap = [one for one in fine if one.lost(one.overlap) <= LOST]
    return sorted(cheap, key=lambda one: one.every)[:1]


def print_rounds_json(job: TrainingJob, cluster: Cluster, own: Machine, found: Sequence[OuterRound]) -> None:
    rows = [
        {
            **{name: value for name, value in vars(one).items() if name not in ("codec", "loss")},
            "codec": str(one.codec),
            "loss": one.loss and asdict(one.loss),
            "overlap": one.overlap,
            "lost": one.lost(0),
            "lost_with_overlap": one.lost(one.overlap),
            "how": one.code,
        }
        for one in found
    ]
    chosen = [one.code for one in _affordable(found)]
    advice = {"how": chosen[0] if chosen else None}
    _dump({**_conditions(job, cluster, own), "parallel": "diloco", "rounds": rows, "advice": advice})
