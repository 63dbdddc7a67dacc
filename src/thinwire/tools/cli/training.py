"""What `thinwire demo` measures: a small GPT trained plainly and with each codec, from the same seeds and batches.

The text is that of Python's help pages; nothing is downloaded. Times are those of steps taken by turns at a rate of
zero. The record is of kind "train".
"""

import gc
import importlib
import math
import os
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import combinations
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.tools.bench import models, step, timing
from thinwire.tools.bench.models import Batch, Transformer
from thinwire.tools.bench.record import Progress, Record, Row, collect
from thinwire.tools.bench.step import BF16, NONE, Replica, StepSample, StepScheme
from thinwire.tools.bench.timing import NOTHING, Call, Effort
from thinwire.tools.local import launch, link as links
from thinwire.tools.local.link import ShapedLink

CODECS = (BF16, "int8", "lloyd4", "lloyd2")
COMPUTE = "a step alone"
STEP_TIMES = "step times"
EFFORT = Effort(rounds=7, most=30, seconds=0.7)
RING_BYTES = {NONE: 4, BF16: 2}  # of a weight, in torch's own all_reduce


@dataclass(frozen=True)
class DemoPlan:
    """What is trained, and how long."""

    schemes: tuple[StepScheme, ...] = ()  # the uncompressed one first
    world: int = 2
    link: ShapedLink | None = None
    steps: int = 100
    seeds: int = 3
    width: int = 96
    depth: int = 2
    heads: int = 4
    context: int = 64
    rows: int = 4  # of a batch; short, so that a step of so small a network sends enough for a link to matter
    rate: float = 3e-3
    judged: int = 1 << 14  # characters that a loss is taken over
    effort: Effort = EFFORT

    def network(self, seed: int) -> nn.Module:
        """As a seed makes it, on every rank the same. torch's generator is left as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Transformer(len(help_pages()[0]), self.context, self.width, self.heads, self.depth)

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
def help_pages() -> tuple[str, Tensor, Tensor]:
    """The letters, and the text as codes, nine tenths to train on; the rest is held out."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    text = "".join(topics[name] for name in sorted(topics))
    letters = "".join(sorted(set(text)))
    places = {letter: code for code, letter in enumerate(letters)}
    codes = torch.tensor([places[letter] for letter in text])
    train, held_out = codes.tensor_split([9 * len(codes) // 10])
    return letters, train, held_out


def _part(whole: Tensor, rank: int, world: int) -> Tensor:
    return whole[rank * len(whole) // world : (rank + 1) * len(whole) // world]


@dataclass(frozen=True)
class Trained:
    """One rank's result of a training run."""

    loss: float  # a sum over its part of the text
    count: int  # of the letters in it
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
    if link is not None:
        links.check()
    usual = QUICK if quick else DemoPlan()
    lined_up = tuple(dict.fromkeys(step.parse(name) for name in (NONE, *(codecs or CODECS))))
    plan = replace(usual, schemes=lined_up, world=world, link=link, steps=steps or usual.steps)
    with timing.threads(launch.THREADS):
        return collect("train", timing.CPU, _rows(plan, progress))


def _rows(plan: DemoPlan, progress: Progress) -> Generator[Row]:
    """Times come first, so that a row is complete as soon as its last seed is trained."""
    runs = [f"{scheme.name}, seed {seed}" for scheme in plan.schemes for seed in range(plan.seeds)]
    results: dict[str, list[list[Trained]]] = {scheme.name: [] for scheme in plan.schemes}
    times: list[dict[str, StepSample]] = []
    with launch.ranks(plan.world, plan.link) as world:
        for case in progress([STEP_TIMES, *runs]):
            if case == STEP_TIMES:
                times = world.run(time_steps, plan)
                continue
            place, seed = divmod(runs.index(case), plan.seeds)
            scheme = plan.schemes[place]
            results[scheme.name].append(world.run(train, plan, scheme, seed))
            if seed == plan.seeds - 1:
                yield row_of(plan, scheme, results, times)


def row_of(
    plan: DemoPlan, scheme: StepScheme, results: dict[str, list[list[Trained]]], times: Sequence[dict[str, StepSample]]
) -> Row:
    mine, plain = results[scheme.name], results[NONE]
    params = mine[0][0].params
    p20, p50, p80 = timing.percentiles(timing.slowest(times, scheme.name))
    step_ms = {name: median(timing.slowest(times, name)) for name in (NONE, BF16, COMPUTE)}
    sent = timing.sent(times, scheme.name, "interface_bytes" if plan.link else "transport_bytes")
    source = "interface" if plan.link else "transport"
    if sent is None and scheme.name in RING_BYTES:  # torch's own all_reduce, over loopback: by formula
        sent, source = 2 * (plan.world - 1) / plan.world * RING_BYTES[scheme.name] * params, "formula"
    return {
        "task": "gpt",
        "parallel": "ddp",
        "optimizer": "adam",
        "codec": scheme.name.partition("@")[0],
        "feedback": mine[0][0].feedback,
        "world": plan.world,
        "link": str(plan.link or "loopback"),
        "seeds": plan.seeds,
        **loss_columns(_losses(mine), _losses(plain)),
        "val_gap_nats": None,
        "step_ms": p50,
        "step_ms_p20": p20,
        "step_ms_p80": p80,
        "compute_ms": step_ms[COMPUTE],
        "cpu_ms_per_rank": timing.cpu_ms([part[scheme.name] for part in times]),
        "speedup_plain": step_ms[NONE] / p50,
        "speedup_bf16": step_ms[BF16] / p50,
        "bytes_per_step": sent,
        "bytes_from": None if sent is None else source,
        "identical": all(len({trained.digest for trained in ranks}) == 1 for ranks in mine),
        "peer": scheme.name == BF16,
        "steps": plan.steps,
        "batch": plan.rows,
        "params": params,
        "threads": launch.THREADS,
        "cores": os.cpu_count(),
    }


def _losses(results: Sequence[Sequence[Trained]]) -> list[float]:
    """By seed."""
    return [sum(one.loss for one in ranks) / sum(one.count for one in ranks) for ranks in results]


def loss_columns(mine: Sequence[float], fp32: Sequence[float]) -> Row:
    ratios = log_ratios(mine, fp32)
    return {
        "loss_log_ratio": timing.mean(ratios),
        "loss_log_ratio_error": timing.standard_error(ratios),
        "noise_floor": noise_floor(fp32),
        "loss": timing.mean(mine),
        "fp32_loss": timing.mean(fp32),
        "diverged": not all(math.isfinite(loss) for loss in mine),
    }


def log_ratios(losses: Sequence[float], fp32: Sequence[float]) -> list[float]:
    """ln(loss / fp32 loss), seed by seed; NaN where one of them is zero or not finite."""
    pairs = zip(losses, fp32, strict=True)
    return [math.log(a / b) if 0 < min(a, b) <= max(a, b) < math.inf else math.nan for a, b in pairs]


def noise_floor(losses: Sequence[float]) -> float | None:
    """The seed-to-seed spread: mean over pairs of seeds of |ln| of the ratio of their losses; None for one seed."""
    return timing.mean([abs(ratio) for a, b in combinations(losses, 2) for ratio in log_ratios([a], [b])])


# The ranks' side.


def train(plan: DemoPlan, scheme: StepScheme, seed: int) -> Trained:
    """Train this rank's replica and judge it; all ranks run it together."""
    rank = dist.get_rank()
    network = plan.network(seed)
    replica = Replica(scheme, network, torch.optim.AdamW(network.parameters(), lr=0.0, weight_decay=0.0))
    for number in range(plan.steps):
        for group in replica.optimizer.param_groups:
            group["lr"] = plan.learning_rate(number)
        replica.step(plan.batch(number, seed, rank))
    with torch.no_grad():
        judged = _judge(plan, network, _part(help_pages()[1], rank, plan.world))
    feedback = replica.feedback
    replica.close()
    del replica
    gc.collect()  # DDP and its hooks refer to each other
    params = sum(parameter.numel() for parameter in network.parameters())
    return Trained(*judged, timing.digest(network.parameters()), feedback, params)


def _judge(plan: DemoPlan, network: nn.Module, text: Tensor) -> tuple[float, int]:
    """The sum of losses over windows side by side, and how many letters they hold."""
    text = text[: plan.judged // plan.world]
    count = (len(text) - 1) // plan.context
    inputs, targets = (text[i : i + count * plan.context].view(count, plan.context) for i in (0, 1))
    batches = zip(inputs.split(64), targets.split(64), strict=True)
    return math.fsum(models.loss_of(network, batch, "sum").item() for batch in batches), targets.numel()


def time_steps(plan: DemoPlan) -> dict[str, StepSample]:
    """This rank's times at a rate of zero; all ranks run it together. torch's bf16 hook is always timed."""
    network = plan.network(0)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.0, weight_decay=0.0)
    timed = {scheme.name: scheme for scheme in (*plan.schemes, step.parse(BF16))}
    replicas = {name: Replica(scheme, network, optimizer) for name, scheme in timed.items()}
    batch = plan.batch(0, 0, dist.get_rank())
    calls: dict[str, Call] = {name: partial(replica.step, batch) for name, replica in replicas.items()}
    for name, replica in replicas.items():
        for _ in range(replica.scheme.settled):
            calls[name]()

    def alone() -> None:
        with replicas[NONE].model.no_sync():
            replicas[NONE].step(batch)

    calls[COMPUTE] = alone
    samples: dict[str, Any] = {name: StepSample() for name in (*calls, NOTHING)}

    def sent(name: str) -> int | None:
        return replicas[name].bytes_sent if name in replicas else None

    timing.take(calls, samples, plan.effort, shaped=plan.link is not None, transport=sent)
    for replica in replicas.values():
        replica.close()
    return samples
