"""`thinwire demo`: train a small GPT plainly and compressed, from the same seeds and batches, and show what that did.

The text is that of Python's help pages; nothing is downloaded. Times are those of `thinwire bench step`. The record is
of kind "train".
"""

import gc
import importlib
import math
import os
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from statistics import fmean, median
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from torch import Tensor, nn

from thinwire.errors import CodecError, RecordError
from thinwire.tools import pairs, recommend, report
from thinwire.tools.advise import verdict
from thinwire.tools.advise.model import TrainingJob
from thinwire.tools.bench import models, step as steps_bench, timing
from thinwire.tools.bench.models import Batch, StepModel, Transformer, TransformerBlock
from thinwire.tools.bench.record import Progress, Record, Row, collect
from thinwire.tools.bench.step import BF16, COMPUTE, NONE, Replica, StepCase, StepSample, StepScheme
from thinwire.tools.bench.timing import Effort
from thinwire.tools.cli import flags, screen
from thinwire.tools.cli.bench import deliver
from thinwire.tools.local import launch, link as links
from thinwire.tools.local.launch import RankSetup
from thinwire.tools.local.link import LinkError, ShapedLink
from thinwire.tools.recommend import BF16_HOOK, Recommendation, Way
from thinwire.tools.report import SPEEDUPS, Column, TextGrid, fixed, grid, number, scaled, significant, text, texts

CODECS = (BF16, "int8", "lloyd4", "lloyd2")
STEP_TIMES = "step times"
EFFORT = Effort(rounds=7, most=30, seconds=0.7)
RING_BYTES = {NONE: 4, BF16: 2}  # of a weight, in torch's own all_reduce


@dataclass(frozen=True)
class DemoPlan:
    """What is trained, and how long."""

    schemes: tuple[StepScheme, ...] = ()  # the uncompressed one first
    world: int = 2
    link: ShapedLink | None = None
    steps: int = 60
    seeds: int = 3
    width: int = 192
    depth: int = 2
    heads: int = 4
    context: int = 64
    rows: int = 2  # of a batch; few, so that a step of so small a network sends enough for a link to matter
    rate: float = 3e-3
    judged: int = 1 << 14  # characters that a loss is taken over
    effort: Effort = EFFORT

    @property
    def model(self) -> StepModel:
        letters, _, _ = help_pages()
        network = partial(Transformer, letters, self.context, self.width, self.heads, self.depth)
        return StepModel(network, TransformerBlock, (self.rows, self.context), letters)

    def batch(self, number: int, seed: int, rank: int) -> Batch:
        """Windows that start anywhere in this rank's part of the text."""
        text = _part(help_pages()[1], rank, self.world)
        mixed = hash((seed, number, rank)) & 0xFFFFFFFF  # of small integers: the same in every process
        starts = torch.randint(len(text) - self.context, (self.rows,), generator=torch.Generator().manual_seed(mixed))
        windows = torch.stack([text[start : start + self.context + 1] for start in starts.tolist()])
        return windows[:, :-1], windows[:, 1:]

    def learning_rate(self, number: int) -> float:
        """Warmup, then cosine decay to zero: at a constant rate the last few batches decide the loss."""
        rise = min(1.0, (number + 1) / (0.03 * self.steps + 1))
        return self.rate * rise * 0.5 * (1 + math.cos(math.pi * number / self.steps))


QUICK = DemoPlan(steps=12, seeds=2, width=32, depth=1, judged=1 << 12, effort=Effort(rounds=3, most=10, seconds=0.1))


@lru_cache(maxsize=1)
def help_pages() -> tuple[int, Tensor, Tensor]:
    """How many letters there are, and the text as codes: nine tenths to train on, the rest is held out."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    text = "".join(topics[name] for name in sorted(topics))
    places = {letter: code for code, letter in enumerate(sorted(set(text)))}
    codes = torch.tensor([places[letter] for letter in text])
    train, held_out = codes.tensor_split([9 * len(codes) // 10])
    return len(places), train, held_out


def _part(whole: Tensor, rank: int, world: int) -> Tensor:
    return whole[rank * len(whole) // world : (rank + 1) * len(whole) // world]


@dataclass(frozen=True)
class Trained:
    """One rank's result of a training run."""

    loss: float  # nats per letter of its part of the text held out of training
    digest: str
    feedback: str
    params: int


WHICH = f"Beside the uncompressed run; default {','.join(CODECS)}. Also auto. bf16 is torch's hook."
STEPS = f"Per run; default {DemoPlan.steps}, quick {QUICK.steps}."
LINK = "A shaped link for every rank, or loopback; default 1gbit where network namespaces work, else loopback."
LOOPBACK = "loopback"
USUAL = "1gbit"
LABELS = texts("task", "world", "cores", "link", "params", "seeds", "steps", "scheme")
COLUMNS = (
    *(*LABELS, Column("loss", "loss", lambda value: value if isinstance(value, str) else significant(value))),
    Column("gap", "val_gap_nats", fixed(4, "+"), "loss less fp32's of the same seed, in nats"),
    Column("±", "half", fixed(4), "half of its 95 % interval"),
    *(Column("step ms", "step_ms", significant), *SPEEDUPS),
    Column("kB", "bytes_per_step", scaled(1e-3), "sent per rank and step, torch's own on loopback by formula"),
    Column("fewer ×", "fewer", fixed(1)),
)


def command(
    world: Annotated[int, typer.Option(min=2, max=links.MOST_HOSTS, metavar="N", help="Ranks.")] = 2,
    codecs: Annotated[list[str] | None, typer.Option(metavar="A,B", help=WHICH)] = None,
    steps: Annotated[int | None, typer.Option(min=1, metavar="N", help=STEPS)] = None,
    link: Annotated[str | None, typer.Option(metavar="RATE", help=LINK)] = None,
    json: flags.Json = None,
    quick: Annotated[bool, typer.Option("--quick", help="A smaller network and few steps: seconds.")] = False,
) -> None:
    """See it work: ranks on this machine train a small GPT, plainly and once per codec.

    The network learns the text of Python's help pages. Nothing is downloaded, and no GPU is needed. Every codec trains
    from the same three seeds on the same batches. As root, or where users may create network namespaces, ranks talk
    over a link shaped to 1 Gbit/s, else over loopback, where bytes cost nothing. The demo prints loss, bytes and time
    per step as measured here, and a verdict from this run's own losses. It takes about two minutes on two cores. After
    Ctrl-C the codecs that were finished are printed and written, and the exit status is 130.

    \b
    Example:
      thinwire demo
      thinwire demo --codecs int8,lloyd4:block=256,bf16 --steps 300 --json demo.json
      thinwire demo --link 100mbit
      thinwire demo --quick --link loopback --json - > demo.json
    """
    named = flags.specs(codecs) or None
    with screen.usage_errors("--codecs", CodecError):
        steps_bench.lineup(named or ())
    shaped = _usual_link() if link is None else None if link == LOOPBACK else flags.shaped(link)
    deliver(partial(run, world, named, steps, shaped, quick), json, show=show)


def _usual_link() -> ShapedLink | None:
    """A gigabit, where a link can be shaped."""
    links.become_root()
    try:
        with links.hosts(1, links.parse(USUAL)):
            return links.parse(USUAL)
    except LinkError:
        return None


def show(record: Record, console: Console) -> None:
    """Print what was measured, and the verdict."""
    if not record.rows:
        return
    for laid in grids(record.rows):
        report.show_grid(laid, console)
    for line in _verdict(record):
        console.print(line)
    console.print("For your own model, ranks and links: thinwire advise.")


def grids(rows: Sequence[Row]) -> list[TextGrid]:
    """The table of a record of kind "train"."""
    sent = number(rows[0]["bytes_per_step"])
    shown: list[Row] = []
    for row in rows:
        seeds, own = (number(row[name]) for name in ("seeds", "bytes_per_step"))
        half = number(row.get("val_gap_error"), pairs.t95(int(seeds) - 1)) if seeds and seeds > 1 else None
        fewer = sent / own if sent and own else None
        loss = "diverged" if row.get("diverged") else row["loss"]
        shown.append({**row, "scheme": recommend.scheme_of(row), "loss": loss, "half": half or None, "fewer": fewer})
    return [grid("", shown, COLUMNS, len(LABELS), "over fp32, over bf16: speedup over torch's own")]


def _verdict(record: Record) -> Iterator[str]:
    """By the rule of thinwire advise, from this run's steps and losses."""
    first = record.rows[0]
    link = text(first["link"])
    try:
        own = verdict.losses_of(record, "this run")
    except RecordError:
        yield "No verdict: it needs a codec beside fp32, and two seeds or more."
        return
    yield f"Verdict for this network over {link}, from this run's steps and losses:"
    job = TrainingJob(int(verdict.column(first, "params", 1)), 0.0)
    yield from verdict.answers(job, measured(record.rows, own))
    if link == LOOPBACK:
        yield (
            "Loopback is faster than any network: bytes cost nothing here, so compression cannot pay. As root, or "
            "where users may create network namespaces, the demo runs over a link shaped to 1gbit."
        )


def measured(rows: Sequence[Row], losses: verdict.Losses) -> Recommendation:
    """What the rule says of steps as the run timed them."""
    torchs = {"fp32": "nothing to add", "bf16": BF16_HOOK}
    ways = []
    for row in rows:
        name = recommend.scheme_of(row)
        p20, p50, p80 = (1e-3 * (number(row.get(key)) or 0.0) for key in ("step_ms_p20", "step_ms", "step_ms_p80"))
        code = torchs.get(name, f'thinwire.compress_ddp(model, "{row["codec"]}")')
        ways.append(Way(name, code, p50, p50 / p80, p50 / p20, losses.get(name), name in torchs))
    return recommend.choose(ways)


# What is measured.


def run(
    world: int,
    codecs: Sequence[str] | None = None,
    steps: int | None = None,
    link: ShapedLink | None = None,
    quick: bool = False,
    progress: Progress = iter,
) -> Record:
    """A record of kind "train". Ctrl-C raises Interrupted with the rows of the schemes that were finished."""
    usual = QUICK if quick else DemoPlan()
    lined_up = tuple(dict.fromkeys(steps_bench.parse(name) for name in (NONE, *(codecs or CODECS))))
    plan = replace(usual, schemes=lined_up, world=world, link=link, steps=steps or usual.steps)
    return collect("train", timing.CPU, _rows(plan, progress), launch.THREADS)


def _rows(plan: DemoPlan, progress: Progress) -> Generator[Row]:
    """Times come first, so that a row is complete as soon as its last seed is trained."""
    setup = RankSetup(world=plan.world, link=plan.link)
    timed = tuple(dict.fromkeys((*plan.schemes, steps_bench.parse(BF16))))  # torch's bf16 hook always among them
    runs = [f"{scheme.name}, seed {seed}" for scheme in plan.schemes for seed in range(plan.seeds)]
    results: dict[str, list[list[Trained]]] = {scheme.name: [] for scheme in plan.schemes}
    times: list[dict[str, StepSample]] = []
    with launch.ranks(setup) as world:
        for case in progress([STEP_TIMES, *runs]):
            if case == STEP_TIMES:
                times = world.run(steps_bench.measure, StepCase(setup, timed, "demo", plan.model), plan.effort)
                continue
            place, seed = divmod(runs.index(case), plan.seeds)
            scheme = plan.schemes[place]
            results[scheme.name].append(world.run(train, plan, scheme, seed))
            if seed == plan.seeds - 1:
                yield row_of(plan, scheme, results, times)


def row_of(
    plan: DemoPlan, scheme: StepScheme, results: dict[str, list[list[Trained]]], times: Sequence[dict[str, StepSample]]
) -> Row:
    mine = results[scheme.name]
    losses, fp32 = (
        {seed: fmean(one.loss for one in ranks) for seed, ranks in enumerate(found)} for found in (mine, results[NONE])
    )
    finite = all(map(math.isfinite, losses.values()))
    gap = pairs.difference(losses, fp32) if finite else pairs.Difference(math.inf, None, plan.seeds)
    ratios = [math.log(losses[seed] / fp32[seed]) if finite else math.nan for seed in fp32]
    p20, p50, p80 = timing.percentiles(timing.slowest(times, scheme.name))
    step_ms = {name: median(timing.slowest(times, name)) for name in (NONE, BF16, COMPUTE)}
    source = "interface" if plan.link else "transport"
    sent = timing.sent(times, scheme.name, f"{source}_bytes")
    if sent is None and scheme.name in RING_BYTES:  # torch's own all_reduce, over loopback: by formula
        sent, source = 2 * (plan.world - 1) / plan.world * RING_BYTES[scheme.name] * mine[0][0].params, "formula"
    return {
        **{"task": "gpt", "parallel": "ddp", "optimizer": "adam", "codec": scheme.name},
        **{"feedback": mine[0][0].feedback, "world": plan.world, "link": str(plan.link or "loopback")},
        **{"seeds": plan.seeds, "steps": plan.steps, "params": mine[0][0].params, "diverged": not finite},
        **{"loss": timing.mean(list(losses.values())), "fp32_loss": timing.mean(list(fp32.values()))},
        **{"loss_log_ratio": timing.mean(ratios), "noise_floor": None, "val_gap_nats": gap.gap if finite else None},
        "val_gap_error": None if gap.half is None else gap.half / pairs.t95(plan.seeds - 1),
        **{"step_ms": p50, "step_ms_p20": p20, "step_ms_p80": p80, "compute_ms": step_ms[COMPUTE]},
        "cpu_ms_per_rank": timing.cpu_ms([part[scheme.name] for part in times]),
        **{"speedup_plain": step_ms[NONE] / p50, "speedup_bf16": step_ms[BF16] / p50},
        **{"bytes_per_step": sent, "bytes_from": None if sent is None else source},
        "identical": all(len({trained.digest for trained in ranks}) == 1 for ranks in mine),
        **{"threads": launch.THREADS, "cores": os.cpu_count()},
    }


# The ranks' side.


def train(plan: DemoPlan, scheme: StepScheme, seed: int) -> Trained:
    """Train this rank's replica and judge it; all ranks run it together."""
    rank = dist.get_rank()
    network = plan.model.build(seed)
    replica = Replica(scheme, network, torch.optim.AdamW(network.parameters(), lr=0.0, weight_decay=0.0))
    for at in range(plan.steps):
        for group in replica.optimizer.param_groups:
            group["lr"] = plan.learning_rate(at)
        replica.step(plan.batch(at, seed, rank))
    with torch.no_grad():
        judged = _judge(plan, network, _part(help_pages()[2], rank, plan.world))
    feedback = replica.feedback
    replica.close()
    del replica
    gc.collect()  # DDP and its hooks refer to each other
    params = sum(parameter.numel() for parameter in network.parameters())
    return Trained(judged, timing.digest(network.parameters()), feedback, params)


def _judge(plan: DemoPlan, network: nn.Module, text: Tensor) -> float:
    """The mean loss over windows side by side, as many on every rank."""
    length = (plan.judged // plan.world - 1) // plan.context * plan.context
    inputs, targets = (text[i : i + length].view(-1, plan.context) for i in (0, 1))
    return models.loss_of(network, (inputs, targets)).item()
