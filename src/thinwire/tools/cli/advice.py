"""What `thinwire advise` prints: the three lines of the rule, why, and the table behind them; or the same as JSON."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import typer

from thinwire.tools.advise import evidence, model, verdict
from thinwire.tools.advise.links import Cluster
from thinwire.tools.advise.machine import Machine
from thinwire.tools.advise.model import Prediction, TrainingJob
from thinwire.tools.advise.rounds import OuterRound
from thinwire.tools.advise.verdict import Verdict, duration
from thinwire.tools.cli import screen
from thinwire.tools.report import tables
from thinwire.tools.report.cells import ABSENT, TextGrid, Tone, counted
from thinwire.tools.rule import Choice

NOT_MEASURED = "not measured"


def print_verdict(job: TrainingJob, cluster: Cluster, own: Machine, found: Verdict) -> None:
    console = screen.console()
    _say_conditions(job, cluster, own)
    tables.show_grid(_grid(cluster, found), console)
    screen.say_choice(found.choice, console)
    screen.say(f"Why: {found.reason}.", console)
    _say_notes(found.notes)


def _say_notes(notes: Iterable[str]) -> None:
    for note in notes:
        screen.say(f"Note: {note}.", screen.console())


def _say_conditions(job: TrainingJob, cluster: Cluster, own: Machine) -> None:
    shared = f", shared by {cluster.per_node} ranks" if cluster.per_node > 1 else ""
    links = [
        f"{name} {sent(link.bytes_per_s)}/s{more}, {duration(link.latency_s)} per message"
        for name, link, more in (("across nodes", cluster.across, shared), ("inside a node", cluster.inside, ""))
        if link is not None
    ]
    ranks = f"{cluster.world} ranks in nodes of {cluster.per_node}" if cluster.world > 1 else "1 rank"
    console = screen.console()
    screen.say(
        f"{counted(job.params, 'parameter')}, {_name(job.dtype)} gradients, {ranks}. Compute per step: "
        f"{duration(job.step_s)}, of which {duration(job.hidden_s(own))} may hide messages",
        console,
    )
    screen.say(f"Payload: {'; '.join(links) or 'none'}. Kernels: {own.source}{_calls(own)}", console)


def _calls(own: Machine) -> str:
    """Where the host's time of calls comes from, on NCCL."""
    if own.device == "cpu":
        return ""
    assumed = f"not known, {duration(own.message_s)} per message assumed"
    return f". Host's calls of NCCL: {own.nccl.source if own.nccl else assumed}"


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


def print_sharded(needs: Mapping[str, float], has: int, world: int) -> None:
    """DDP cannot hold the model: what it would need, and the advice for FSDP2, or how many ranks that takes."""
    console = screen.console()
    parts = ", ".join(f"{name} {sent(count)}" for name, count in needs.items())
    told = f"DDP cannot hold this model: it needs about {sent(sum(needs.values()))} per rank, and there are {sent(has)}"
    screen.say(f"{told} (--memory). By rule of thumb: {parts}.", console)
    part = model.sharded_memory(needs, world)
    if part > has:
        least = math.ceil(part * world / has)
        screen.say(
            f"Nor can FSDP2 on {counted(world, 'rank')}: weights, gradients and optimizer alone take {sent(part)} on "
            f"each. At least {least} ranks of {sent(has)} could hold them. Activations come on top.",
            console,
        )
        return
    screen.say(f"Shard it with FSDP2 (torch's fully_shard): {sent(part)} per rank, and activations. Then:", console)
    choice = evidence.sharded(evidence.shipped())
    screen.say_choice(choice, console)
    _say_notes(choice.notes)


def print_sharded_json(needs: Mapping[str, float], has: int, world: int) -> None:
    part = model.sharded_memory(needs, world)
    fits = part <= has
    advice = _advice(evidence.sharded(evidence.shipped())) if fits else None
    memory = {**needs, "has": has, "sharded": part}
    _dump({"memory": memory, "parallel": "fsdp2" if fits else None, "schemes": [], "advice": advice})


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
    speedup = found.speedup(prediction)
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
    console = screen.console()
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
    tables.show_grid(TextGrid(title, header, rows), console)
    for one in _affordable(found):
        screen.say(f"Use {one.name}, every {one.every}: {one.code}", console)
        screen.say(f"Loss: {one.loss or NOT_MEASURED}", console)
        _say_notes([one.loss.risk] if one.loss and one.loss.risk else [])


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
