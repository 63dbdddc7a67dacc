"""`thinwire advise`: which codec and algorithm, if any, make a step faster on these links."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

from thinwire.codecs import Codec
from thinwire.errors import AdviceError, RecordError
from thinwire.tools.advise import (
    check as checks,
    evidence,
    machine as machines,
    measure,
    model,
    rounds,
    schemes,
    units,
    verdict,
)
from thinwire.tools.advise.links import INSIDE_LATENCY_S, LATENCY_S, PAYLOAD, TRANSPORTS, Cluster, LinkModel, payload_of
from thinwire.tools.advise.machine import Machine
from thinwire.tools.advise.model import TrainingJob
from thinwire.tools.advise.verdict import duration
from thinwire.tools.bench import record
from thinwire.tools.cli import advice, flags, screen
from thinwire.tools.cli.flags import Device, Optimizer
from thinwire.tools.report import tables
from thinwire.tools.report.cells import TextGrid

FAMILIES = {Optimizer.adam: "adaptive", Optimizer.sgd: "linear"}
MEASURED = ("world", "inter", "intra", "latency", "intra_latency", "efficiency", "cores", "kernels")
CHECKED = ("check", "kernels", "as_json")  # the flags that go with --check
DDP_ONLY = ("losses", "memory", "optimizer", "overlap", "bucket", "dtype")  # and those that do not go with --diloco
LEAST_EFFICIENCY = 0.001
LEAST_BUCKET = 1 << 20  # bytes; below, a bucket's messages are all latency
PER_NODE = ("--gpus-per-node", "--ranks-per-node")
EFFICIENCY = f"Of a link's rate that is payload; default {PAYLOAD:.3f} for TCP, 1 for NVLink and InfiniBand."
DEVICE = "cpu: processes on gloo; cuda: one GPU per rank, on NCCL. Default cuda."
OVERLAP = "Of --step that may hide messages; default 0.5 (1 - 1/buckets), on a CPU with one core per rank 0."
CODECS = f"Codecs to compare; default {','.join(schemes.CODECS)}."
LOSSES = "Losses of a record of `bench train` or `demo`, which counts before the committed ones."
MEMORY = "Per GPU; default 80GB. On a CPU it is judged only where it is given."
DILOCO = "DiLoCo on these links instead of DDP: steps between rounds, and codecs."
CHECK = "Compare the model with a record of bench collectives or train --link."
Whole = int | None
Number = float | None
Dtype = StrEnum("Dtype", ["float32", "bfloat16", "float16"])


def _bucket_size(text: str) -> int:
    found = units.size(text)
    if found < LEAST_BUCKET:
        raise AdviceError(f"expected at least 1MiB, got {text!r}")
    return found


def _efficiency(text: str) -> float:
    return units.share(text, LEAST_EFFICIENCY)


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
    latency: Annotated[Number, _option(units.seconds, "TIME", "Per message; default 10us, on the CPU 250us.")] = None,
    intra_latency: Annotated[Number, _option(units.seconds, "TIME", "Inside a node; default 3us, CPU 250us.")] = None,
    efficiency: Annotated[Number, _option(_efficiency, "SHARE", EFFICIENCY)] = None,
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
    check: Annotated[str | None, typer.Option(metavar="FILE", help=CHECK)] = None,
    no_measure: Annotated[bool, typer.Option("--no-measure", help="Under torchrun too, trust the flags.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what to use on your links: predict a training step with every codec, and choose.

    The advice is the fastest scheme among those whose loss stays within what another seed does. It may be not to
    compress; where DDP cannot hold the model, it is FSDP2. Steps are predicted from the links and from kernel times of
    committed records (docs/reference/advise.md has the formulas). A gain is a range: so far off was the model where it
    was compared.

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
      thinwire advise --check collectives.json --kernels kernels.json
    """
    if check is not None:
        others = [name for name in context.params if name not in CHECKED]
        _refuse(context, others, "--check reads it from the record: leave it out")
        _compare(check, kernels, as_json)
        return
    if diloco:
        _refuse(context, DDP_ONLY, "it is for DDP: leave it out, or leave --diloco out")
    place = None if no_measure else _place()
    chosen = flags.codecs(codecs, rounds.CODECS if diloco else schemes.CODECS)
    known = _losses(losses)
    links = _Links(inter, intra, latency, intra_latency, efficiency)
    needed: dict[str, object] = {"--params": params, "--step": step}
    if place is None:
        needed |= {"--world": world, **links.needed(world, per_node or 1)}
    else:
        _refuse(context, MEASURED, "under torchrun it is measured: leave it out, or add --no-measure")
    missing = ", ".join(flag for flag, value in needed.items() if value is None)
    if missing or params is None or step is None:
        context.fail(f"Missing: {missing}; see thinwire advise --help")
    if place is None:
        cluster, own = _described(world or 1, per_node or 1, links, _machine(device, kernels), cores)
    else:
        cluster, own = _measured(place, device, per_node, chosen)
    family = FAMILIES[optimizer]
    job = TrainingJob(params, step, model.DTYPES[dtype], bucket or model.BUCKET_BYTES, overlap, family)
    if place is not None and place.rank:
        return
    if diloco:
        found = list(rounds.rounds(job, cluster, own, chosen, rounds.EVERY))
        (advice.print_rounds_json if as_json else advice.print_rounds)(job, cluster, own, found)
        return
    needs = model.memory(job)
    has = memory or (model.GPU_BYTES if own.device == Device.cuda else None)
    if has is not None and sum(needs.values()) > has:
        (advice.print_sharded_json if as_json else advice.print_sharded)(needs, has)
        return
    buckets = (bucket,) if bucket else verdict.BUCKETS
    judged = verdict.judge(job, cluster, own, codecs=chosen, losses=known, buckets=buckets)
    (advice.print_json if as_json else advice.print_verdict)(job, cluster, own, judged)


def _losses(path: str | None) -> list[evidence.Losses]:
    with screen.usage_errors("--losses", RecordError):
        return [] if path is None else [evidence.losses_of(record.read(path), Path(path).name)]


def _refuse(context: typer.Context, names: Iterable[str], why: str) -> None:
    """No flag is accepted and then ignored."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            flag = next(flag.opts[0] for flag in context.command.params if flag.name == name)
            raise typer.BadParameter(why, param_hint=flag)


def _place() -> measure.Place | None:
    """Of this rank under torchrun; None elsewhere."""
    if not measure.under_torchrun():
        return None
    try:
        return measure.place()
    except AdviceError as error:
        hint = f"{error}; add --no-measure if it is not torchrun's"
        raise typer.BadParameter(hint, param_hint="environment") from None


class _Links(NamedTuple):
    inter: float | None
    intra: float | None
    latency: float | None
    intra_latency: float | None
    efficiency: float | None

    def needed(self, ranks: int | None, node: int) -> dict[str, float | None]:
        """The rates that have to be given; where the number of ranks is missing too, those of several nodes."""
        across = {"--inter": self.inter} if ranks is None or ranks > node else {}
        return {**across, "--intra": self.intra} if node > 1 else across

    def link(self, flag: str, transport: str, needed: bool) -> LinkModel | None:
        """Between nodes (--inter) or inside a node (--intra), where there is somebody to send to."""
        inter = flag == "--inter"
        rate = self.inter if inter else self.intra
        if not needed and rate is not None:
            raise typer.BadParameter("there is nobody at the end of that link: leave it out", param_hint=flag)
        if rate is None:
            return None
        latency = self.latency if inter else self.intra_latency
        usual = LATENCY_S[transport] if inter else INSIDE_LATENCY_S[transport]
        payload = payload_of(rate, transport, inside=not inter) if self.efficiency is None else self.efficiency
        return LinkModel.of_rate(rate, usual if latency is None else latency, payload=payload)


def _described(ranks: int, per_node: int, links: _Links, own: Machine, cores: int | None) -> tuple[Cluster, Machine]:
    node = _node(ranks, per_node)
    transport = TRANSPORTS[own.device]
    across = links.link("--inter", transport, ranks > node)
    inside = links.link("--intra", transport, node > 1)
    if cores is not None and own.device == Device.cuda:
        raise typer.BadParameter("goes with --device cpu", param_hint="--cores")
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


def _compare(path: str, kernels: str | None, as_json: bool) -> None:
    own = _machine(Device.cpu, kernels)
    with screen.usage_errors("--check", RecordError):
        found = checks.compare(record.read(path), own)
    if as_json:
        rows = [asdict(item) | {"scheme": str(item.scheme), "off": item.off} for item in found]
        typer.echo(json.dumps({"machine": own.source, "rows": rows}, indent=1, allow_nan=False))
        return
    cells = [
        [item.what, str(item.scheme), duration(item.measured_s), duration(item.predicted_s), f"{item.off:+.1%}"]
        for item in found
    ]
    grid = TextGrid(f"Kernels: {own.source}", ["what", "scheme", "measured", "predicted", "off"], cells, labels=2)
    tables.show_grid(grid, screen.console())
