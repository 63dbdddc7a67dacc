"""What `thinwire demo` measures: a small GPT trained plainly and with each codec, from the same seeds and batches.

The text is that of Python's help pages; nothing is downloaded. Times are those of `thinwire bench step`. The record is
of kind "train".
"""

import gc
import importlib
import math
import os
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from statistics import fmean, median

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.tools import pairs
from thinwire.tools.bench import models, step, timing
from thinwire.tools.bench.models import Batch, StepModel, Transformer, TransformerBlock
from thinwire.tools.bench.record import Progress, Record, Row, collect
from thinwire.tools.bench.step import BF16, COMPUTE, NONE, Replica, StepCase, StepSample, StepScheme
from thinwire.tools.bench.timing import Effort
from thinwire.tools.local import launch
from thinwire.tools.local.launch import RankSetup
from thinwire.tools.local.link import ShapedLink

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
    lined_up = tuple(dict.fromkeys(step.parse(name) for name in (NONE, *(codecs or CODECS))))
    plan = replace(usual, schemes=lined_up, world=world, link=link, steps=steps or usual.steps)
    return collect("train", timing.CPU, _rows(plan, progress), launch.THREADS)


def _rows(plan: DemoPlan, progress: Progress) -> Generator[Row]:
    """Times come first, so that a row is complete as soon as its last seed is trained."""
    setup = RankSetup(world=plan.world, link=plan.link)
    timed = tuple(dict.fromkeys((*plan.schemes, step.parse(BF16))))  # torch's bf16 hook always among them
    runs = [f"{scheme.name}, seed {seed}" for scheme in plan.schemes for seed in range(plan.seeds)]
    results: dict[str, list[list[Trained]]] = {scheme.name: [] for scheme in plan.schemes}
    times: list[dict[str, StepSample]] = []
    with launch.ranks(setup) as world:
        for case in progress([STEP_TIMES, *runs]):
            if case == STEP_TIMES:
                times = world.run(step.measure, StepCase(setup, timed, "demo", plan.model), plan.effort)
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
    for number in range(plan.steps):
        for group in replica.optimizer.param_groups:
            group["lr"] = plan.learning_rate(number)
        replica.step(plan.batch(number, seed, rank))
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
