"""`thinwire advise`: which codec and algorithm, if any, make a step faster on these links."""

import functools
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import torch
import typer

from thinwire.codecs import Codec
from thinwire.errors import RecordError
from thinwire.tools.advise import check as checks, machine as machines, measure, model, schemes, units, verdict
from thinwire.tools.advise.links import INSIDE_LATENCY_S, LATENCY_S, PAYLOAD, Cluster, Link
from thinwire.tools.advise.machine import Machine
from thinwire.tools.advise.model import Job, Prediction
from thinwire.tools.advise.verdict import Verdict, duration
from thinwire.tools.bench import record
from thinwire.tools.cli import flags, screen
from thinwire.tools.report import tables
from thinwire.tools.report.cells import Grid, Tone

T = TypeVar("T")
FAMILIES = {"adam": "adaptive", "sgd": "linear"}
TRANSPORTS = {"cpu": "gloo", "gpu": "nccl"}
MEASURED = ("world", "inter", "intra", "latency", "intra_latency", "efficiency", "cores", "kernels")
CHECKED = ("check", "kernels", "as_json")  # the flags that go with --check
LEAST_EFFICIENCY = 0.001
LEAST_BUCKET = 1 << 20  # bytes; below, a bucket's messages are all latency


class Device(StrEnum):
    """Where the ranks compute."""

    cpu = "cpu"
    gpu = "gpu"


class Dtype(StrEnum):
    """Of the gradients."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Optimizer(StrEnum):
    """Which feedback narrow codecs get."""

    adam = "adam"
    sgd = "sgd"


def _flag(parse: Callable[[str], T]) -> Callable[[str], T]:
    """A parser whose errors say what is allowed."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return parsed


def _bucket_size(text: str) -> int:
    found = units.size(text)
    if found < LEAST_BUCKET:
        raise ValueError(f"expected at least 1MiB, got {text!r}")
    return found


def _option(parse: Callable[[str], Any], metavar: str, text: str, *names: str) -> Any:
    return typer.Option(*names, parser=_flag(parse), metavar=metavar, help=text)


def command(
    context: typer.Context,
    params: Annotated[int | None, _option(units.count, "N", "Parameters of the model: 7e9, 125M.")] = None,
    world: Annotated[int | None, _option(units.count, "N", "Ranks in all.")] = None,
    per_node: Annotated[
        int | None, _option(units.count, "N", "Ranks of a node; default 1.", "--gpus-per-node", "--ranks-per-node")
    ] = None,
    inter: Annotated[
        float | None,
        _option(units.rate, "RATE", "The link of a node to the others, one direction: 25gbit, 1gbit, 3GB/s."),
    ] = None,
    intra: Annotated[
        float | None, _option(units.rate, "RATE", "The link of a rank to the others of its node: 400GB/s.")
    ] = None,
    step: Annotated[
        float | None, _option(units.seconds, "TIME", "What a step computes, without communication: 1.2s, 350ms.")
    ] = None,
    latency: Annotated[
        float | None, _option(units.seconds, "TIME", "Of a message between nodes; default 10us, on the CPU 250us.")
    ] = None,
    intra_latency: Annotated[
        float | None, _option(units.seconds, "TIME", "Of a message inside a node; default 3us, on the CPU 250us.")
    ] = None,
    efficiency: Annotated[
        float | None,
        _option(
            functools.partial(units.share, least=LEAST_EFFICIENCY),
            "SHARE",
            f"Of a link's rate that is payload; default {PAYLOAD:.3f}, that of TCP.",
        ),
    ] = None,
    device: Annotated[
        Device | None, typer.Option(help="cpu: processes on gloo; gpu: one GPU a rank, on NCCL. Default gpu.")
    ] = None,
    cores: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Of a node, with --device cpu; default one a rank.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of the gradients.")] = Dtype.float32,
    optimizer: Annotated[Optimizer, typer.Option(help="Decides the feedback of 1 to 3 bits.")] = Optimizer.adam,
    overlap: Annotated[
        float | None,
        _option(
            units.share,
            "SHARE",
            "Of --step that communication may hide behind; default 0.5 (1 - 1/buckets), and 0 on a CPU where a rank "
            "has one core.",
        ),
    ] = None,
    bucket: Annotated[
        int | None, _option(_bucket_size, "SIZE", "DDP's bucket_cap_mb: 25MiB; default the best of 25 to 1600 MiB.")
    ] = None,
    codecs: Annotated[
        list[str] | None, typer.Option(metavar="A,B", help=f"Codecs to compare; default {','.join(schemes.CODECS)}.")
    ] = None,
    error_budget: Annotated[
        float, typer.Option(min=0.0, metavar="X", help="Largest expected error of what is advised, relative, RMS.")
    ] = verdict.ERROR_BUDGET,
    kernels: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Kernel times from a record of `thinwire bench kernels --json FILE`."),
    ] = None,
    check: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Compare the model with a record of bench collectives or train --link."),
    ] = None,
    no_measure: Annotated[
        bool, typer.Option("--no-measure", help="Under torchrun too: measure nothing, take the flags as given.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict a training step on your links in every codec and algorithm, rank them, and say what to do.

    The answer may be not to compress. Values that are missing are asked for on a terminal; elsewhere they are an error.
    Everything is predicted (docs/advise.md has the formulas) from the links and from kernel times of committed records.

    Under torchrun the ranks measure their links and kernels first; --params and --step are needed, the rest is known.
    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment count as torchrun, unless --no-measure is given.

    \b
    Columns:
      bytes     sent by a rank in a step; across: of these, to other nodes
      step      predicted time, and speed-up against no compression
      error     expected, relative, RMS, of the summed gradients, were they Gaussian
      bucket    DDP's bucket_cap_mb that the prediction is for

    \b
    Exit status:
      0  advice was printed, whatever it is
      1  the ranks could not measure
      2  a value is missing or not understood

    \b
    Example:
      thinwire advise --params 7e9 --world 64 --gpus-per-node 8 --inter 25gbit --intra 400GB/s --step 1.2s
      thinwire advise --params 25M --world 4 --inter 100mbit --step 200ms --device cpu --json
      torchrun --nproc-per-node 8 -m thinwire advise --params 7e9 --step 1.2s
      thinwire advise --check collectives.json --kernels kernels.json
    """
    if check is not None:
        others = [name for name in context.params if name not in CHECKED]
        _refuse(context, others, "--check reads it from the record: leave it out")
        _compare(check, kernels, as_json)
        return
    place = None if no_measure else _place()
    if place is not None:
        _refuse(context, MEASURED, "under torchrun it is measured: leave it out, or add --no-measure")
    chosen, ask = flags.codecs(codecs, schemes.CODECS), _Ask(place is None and _somebody_listens())
    links = _Links(inter, intra, latency, intra_latency, efficiency)
    if not ask.asking:
        needed = {} if place is not None else {"--world": world, **links.needed(world, per_node or 1)}
        _complete({"--params": params, "--step": step, **needed})
    count = ask("--params", params)
    if place is None:
        cluster, own = _described(ask, world, per_node, links, _machine(device, kernels), cores)
    else:
        cluster, own = _measured(place, device, per_node, chosen)
    dtypes, family = model.DTYPES[dtype.value], FAMILIES[optimizer.value]
    job = Job(count, ask("--step", step), dtypes, bucket or model.BUCKET_BYTES, overlap, family)
    if place is not None and place.rank:
        return
    buckets = (bucket,) if bucket else verdict.BUCKETS
    found = verdict.judge(job, cluster, own, codecs=chosen, error_budget=error_budget, buckets=buckets)
    if as_json:
        typer.echo(json.dumps(_answer(job, cluster, own, found), indent=1, allow_nan=False))
    else:
        _print(job, cluster, own, found)


# --- what was given ---------------------------------------------------------------------------------------------------


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
    except ValueError as error:
        raise typer.BadParameter(
            f"{error}; add --no-measure if it is not torchrun's", param_hint="environment"
        ) from None


def _somebody_listens() -> bool:
    return sys.stdin.isatty()


class _Missing(typer.BadParameter):
    """What was not given, rather than what was given wrongly."""

    def format_message(self) -> str:
        """Without "Invalid value"."""
        return self.message


def _complete(values: Mapping[str, object]) -> None:
    """Where nobody can be asked, all that is missing is said at once."""
    missing = [flag for flag, value in values.items() if value is None]
    if missing:
        told = ", ".join(missing)
        raise _Missing(f"Missing: {told}. There is no terminal to ask on; see thinwire advise --help")


@dataclass(frozen=True)
class _Ask:
    """Values that have no default: given, or asked for where somebody can answer."""

    asking: bool

    def __call__(self, flag: str, given: T | None, default: str | None = None) -> T:
        if given is not None:
            return given
        question, parse = _QUESTIONS[flag]
        assert self.asking, flag  # else _complete has found it
        answer: T = typer.prompt(question, default=default, value_proc=_flag(parse))
        return answer


_QUESTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "--params": ("Parameters of the model (such as 7e9)", units.count),
    "--world": ("Ranks in all", units.count),
    "--gpus-per-node": ("Ranks of a node", units.count),
    "--inter": ("Link of a node to the others (such as 25gbit)", units.rate),
    "--intra": ("Link of a rank to the others of its node (such as 400GB/s)", units.rate),
    "--step": ("What a step computes, without communication (such as 1.2s)", units.seconds),
}


class _Links(NamedTuple):
    """The flags of the links."""

    inter: float | None
    intra: float | None
    latency: float | None
    intra_latency: float | None
    efficiency: float | None

    def needed(self, ranks: int | None, node: int) -> dict[str, float | None]:
        """The rates that have to be given; where the number of ranks is not known yet, several nodes."""
        across = {"--inter": self.inter} if ranks is None or ranks > node else {}
        return {**across, "--intra": self.intra} if node > 1 else across

    def across(self, ask: _Ask, transport: str, needed: bool) -> Link | None:
        """Between nodes."""
        latency = LATENCY_S[transport] if self.latency is None else self.latency
        return self._link(ask, "--inter", self.inter, latency, needed)

    def inside(self, ask: _Ask, transport: str, needed: bool) -> Link | None:
        """Inside a node."""
        latency = INSIDE_LATENCY_S[transport] if self.intra_latency is None else self.intra_latency
        return self._link(ask, "--intra", self.intra, latency, needed)

    def _link(self, ask: _Ask, flag: str, rate: float | None, latency: float, needed: bool) -> Link | None:
        if needed:
            payload = PAYLOAD if self.efficiency is None else self.efficiency
            return Link.of_rate(ask(flag, rate), latency, payload=payload)
        if rate is not None:
            raise typer.BadParameter("there is nobody at the end of that link: leave it out", param_hint=flag)
        return None


def _described(
    ask: _Ask, world: int | None, per_node: int | None, links: _Links, own: Machine, cores: int | None
) -> tuple[Cluster, Machine]:
    """What the flags say, and the answers to questions."""
    ranks: int = ask("--world", world)
    if per_node is None and ask.asking and ranks > 1:
        per_node = ask("--gpus-per-node", per_node, default="1")
    node, transport = _node(ranks, per_node or 1), TRANSPORTS[own.device]
    across, inside = links.across(ask, transport, ranks > node), links.inside(ask, transport, node > 1)
    if cores is not None and own.device == "gpu":
        raise typer.BadParameter("goes with --device cpu", param_hint="--cores")
    return Cluster(ranks, node, across, inside, transport), own.shared(node, cores or node)


def _node(ranks: int, per_node: int) -> int:
    if per_node > ranks or ranks % per_node:
        raise typer.BadParameter(f"{ranks} ranks do not make nodes of {per_node}", param_hint="--gpus-per-node")
    return per_node


def _machine(device: Device | None, kernels: str | None) -> Machine:
    if kernels is None:
        return machines.recorded((device or Device.gpu).value)
    with screen.usage_errors("--kernels", RecordError):
        found = machines.from_record(record.read(kernels), Path(kernels).name)
    if device is not None and found.device != device.value:
        raise typer.BadParameter(f"it was measured on a {found.device}, not a {device.value}", param_hint="--kernels")
    return found


def _measured(
    place: measure.Place, device: Device | None, per_node: int | None, codecs: Sequence[Codec]
) -> tuple[Cluster, Machine]:
    """What the ranks that torchrun started find."""
    cuda = torch.cuda.is_available()
    if device is Device.gpu and not cuda:
        raise typer.BadParameter("torch sees no CUDA device here; use --device cpu", param_hint="--device")
    where = torch.device("cuda", place.local_rank) if cuda and device is not Device.cpu else torch.device("cpu")
    node = _node(place.world, per_node or place.per_node)
    with screen.plain_errors(), measure.job(where):
        every = list(dict.fromkeys([*codecs, *schemes.INSIDE]))
        return measure.links(where, node), measure.kernels(every, where, node)


# --- what is printed --------------------------------------------------------------------------------------------------


def _print(job: Job, cluster: Cluster, own: Machine, found: Verdict) -> None:
    console = screen.console()
    for line in _conditions(job, cluster, own):
        console.print(line, soft_wrap=True)
    tables.show_grid(_grid(cluster, found), console)
    best = found.advised
    advice = (
        f"{best.scheme}, predicted {found.speedup(best):.3g} times as fast" if found.compress else "do not compress"
    )
    console.print(f"Advice: {advice}.", style="bold", soft_wrap=True)
    console.print(f"Why: {found.reason}.", soft_wrap=True)
    console.print(f"How: {best.scheme.how(cluster)}", soft_wrap=True)
    for note in found.notes:
        console.print(f"Note: {note}.", soft_wrap=True)


def _conditions(job: Job, cluster: Cluster, own: Machine) -> list[str]:
    dtype = str(job.dtype).removeprefix("torch.")
    hidden = job.hidden_s(own)
    links = [
        f"{name} {_bytes(link.bytes_per_s)}/s, {duration(link.latency_s)} a message"
        for name, link in (("across nodes", cluster.across), ("inside a node", cluster.inside))
        if link is not None
    ]
    ranks = f"{cluster.world} ranks in nodes of {cluster.per_node}" if cluster.world > 1 else "1 rank"
    return [
        f"{job.params} parameter{'s' if job.params > 1 else ''}, {dtype} gradients, {ranks}; a step computes "
        f"{duration(job.step_s)}, {duration(hidden)} of it may hide messages",
        f"Payload: {'; '.join(links) or 'none'}. Kernels: {own.source}",
    ]


def _grid(cluster: Cluster, found: Verdict) -> Grid:
    header = [
        "",
        "scheme",
        "bytes",
        *(["across"] if cluster.has_levels else []),
        "step",
        "speed-up",
        "error",
        "feedback",
    ]
    rows = [_cells(cluster, found, prediction) for prediction in found.ranked]
    tones: list[Tone] = ["good" if prediction is found.advised else "" for prediction in found.ranked]
    return Grid("Predicted, the fastest first; * is advised", [*header, "bucket"], rows, labels=2, tones=tones)


def _cells(cluster: Cluster, found: Verdict, prediction: Prediction) -> list[str]:
    return [
        "*" if prediction is found.advised else "",
        str(prediction.scheme),
        _bytes(prediction.sent),
        *([_bytes(prediction.crossed)] if cluster.has_levels else []),
        duration(prediction.step_s),
        f"{found.speedup(prediction):.2f}",
        f"{prediction.error:.2g}",
        prediction.feedback or "none",
        f"{verdict.mebibytes(prediction.bucket_bytes)} MiB",
    ]


def _bytes(count: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1e3:.3g} kB"


def _answer(job: Job, cluster: Cluster, own: Machine, found: Verdict) -> dict[str, Any]:
    """What --json prints."""
    links = {"across": cluster.across, "inside": cluster.inside}
    return {
        "job": {
            "params": job.params,
            "step_s": job.step_s,
            "dtype": str(job.dtype).removeprefix("torch."),
            "hidden_s": job.hidden_s(own),
        },
        "cluster": {
            "world": cluster.world,
            "per_node": cluster.per_node,
            "transport": cluster.transport,
            **{name: None if link is None else asdict(link) for name, link in links.items()},
        },
        "machine": {"device": own.device, "source": own.source, "cores": own.cores},
        "schemes": [_figures(found, prediction) for prediction in found.ranked],
        "advice": {
            "compress": found.compress,
            "scheme": str(found.advised.scheme),
            "how": found.advised.scheme.how(cluster),
            "reason": found.reason,
            "notes": list(found.notes),
        },
    }


def _figures(found: Verdict, prediction: Prediction) -> dict[str, Any]:
    scheme = prediction.scheme
    return {
        "scheme": str(scheme),
        "codec": str(scheme.codec),
        "across_codec": str(scheme.across) if scheme.across else None,
        "algorithm": scheme.algorithm,
        "bytes": prediction.sent,
        "bytes_across": prediction.crossed,
        "step_s": prediction.step_s,
        "speedup": found.speedup(prediction),
        "exposed_s": prediction.exposed_s,
        "wire_s": prediction.wire_s,
        "work_s": prediction.work_s,
        "handled_s": prediction.handled_s,
        "error": prediction.error,
        "feedback": prediction.feedback or "none",
        "bucket_bytes": prediction.bucket_bytes,
    }


def _compare(path: str, kernels: str | None, as_json: bool) -> None:
    """The model beside a record."""
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
    grid = Grid(f"Kernels: {own.source}", ["what", "scheme", "measured", "predicted", "off"], cells, labels=2)
    tables.show_grid(grid, screen.console())
