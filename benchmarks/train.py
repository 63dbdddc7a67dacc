"""The training benchmark: what compressed gradients do to the loss, and to the time of a step.

Losses: every scheme trains from the same seeds on the same batches as uncompressed fp32, and is compared with it seed
by seed. Times: all schemes share one network and step by turns, each after a barrier, at a rate of zero; a step takes
as long as on its slowest rank, and medians are compared. torch's own bf16 hook is always timed.

With FSDP2 and DiLoCo (see `python -m benchmarks.train --help`) every scheme has a network of its own. A round of
DiLoCo is timed after one step. Training itself is timed too: after every round, and now and then in DDP, the loss is
taken while the clock stands still.
"""

import gc
import math
import os
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import combinations, count as count_up
from statistics import median
from typing import Annotated

import torch
import torch.distributed as dist
import typer

from benchmarks import clock, schemes, sharded, tasks
from benchmarks.command import shaped, start
from benchmarks.schemes import BF16, DDP, DILOCO, FSDP2, NONE, Replica, TrainSample, TrainScheme
from benchmarks.tasks import Task, Total
from thinwire.errors import CodecError
from thinwire.tools.bench import timing
from thinwire.tools.bench.record import CURVE, Curve, Progress, Record, Row, collect
from thinwire.tools.bench.timing import NOTHING, Call, Effort
from thinwire.tools.cli import flags, screen
from thinwire.tools.cli.bench import deliver
from thinwire.tools.cli.flags import Json, Quick, Words, count, option
from thinwire.tools.local import launch, link as links
from thinwire.tools.local.launch import RankSetup
from thinwire.tools.local.link import ShapedLink

WORLD = 4
CODECS = {
    "digits": ("int8", "lloyd4", "lloyd2", "lloyd2@none", *schemes.CONTROLS),
    "gpt": ("int8", "lloyd4", "lloyd2", *schemes.CONTROLS),
    "mlp": ("int8", "lloyd4", "lloyd2", "auto", BF16, *schemes.RANKS),
    "wide": ("int8", "lloyd4", "lloyd2", *schemes.CONTROLS),
}
_SHARDED_LOSSES = ("int8", "lloyd4", "int8/int8", "lloyd4/lloyd4@replica", "int8/lloyd4")
SHARDED_CODECS = {
    "digits": _SHARDED_LOSSES,
    "gpt": _SHARDED_LOSSES,
    "mlp": ("int8/int8", "lloyd4/int8", "lloyd4/lloyd4@replica", BF16),
    "wide": _SHARDED_LOSSES,
}
OUTER_CODECS = ("lloyd4", "lloyd2", "lloyd2@classic", "lloyd1", "lloyd1@classic", "topk")
EVERY = (10, 30)  # steps between two rounds of DiLoCo
COMPUTE = "a step alone"  # timed beside the schemes
STEP_TIMES = "step times"  # the case before all runs
_POINTS = 100  # of DDP's loss beside DiLoCo's, over time
FULL = Effort(rounds=7, most=100, seconds=2.0)
QUICK = Effort(rounds=3, most=10, seconds=0.1)


@dataclass(frozen=True)
class TrainPlan:
    task: Task
    schemes: tuple[TrainScheme, ...]  # the uncompressed one first
    world: int
    link: ShapedLink | None
    optimizer: str
    effort: Effort
    parallel: str = DDP

    @property
    def timed(self) -> tuple[TrainScheme, ...]:
        """One of each name, and torch's bf16."""
        peer = (schemes.parse_sharded if self.parallel == FSDP2 else schemes.parse)(BF16)
        return tuple({scheme.name: scheme for scheme in (*self.schemes, peer)}.values())

    def plain(self, scheme: TrainScheme) -> TrainScheme:
        """The uncompressed one that a scheme's loss is compared with."""
        if scheme.every is None:
            return self.schemes[0]
        return next(one for one in self.schemes if one.name == NONE and one.every == scheme.every)


@dataclass(frozen=True)
class TrainingRun:
    scheme: TrainScheme
    seed: int

    def __str__(self) -> str:
        return f"{self.scheme}, seed {self.seed}"


@dataclass(frozen=True)
class Trained:
    train: Total
    val: Total | None
    digest: str
    feedback: str
    params: int
    course: tuple[tuple[float, Total], ...] = ()  # of DiLoCo and of DDP beside it: seconds of training, loss by then
    curve: Sequence[tuple[float, float]] = ()  # of this rank's batches, see tasks.curve


Times = Sequence[dict[str, TrainSample]]  # by rank, then by scheme
Results = list[list[Trained]]  # of one scheme: by seed, then by rank


def run(
    task: str = "digits",
    world: int = WORLD,
    codecs: Sequence[str] | None = None,
    optimizer: str | None = None,
    seeds: int | None = None,
    link: ShapedLink | None = None,
    steps: int | None = None,
    quick: bool = False,
    progress: Progress = iter,
    *,
    parallel: str = DDP,
    batch: int | None = None,
    every: Sequence[int] | None = None,
) -> Record:
    """A record of kind "train", on gloo; what is None is the task's own."""
    found = tasks.find(task, quick=quick, seeds=seeds, steps=steps, rows=batch)
    lined_up = lineup(task, codecs, parallel, every)
    effort = QUICK if quick else FULL
    plan = TrainPlan(found, lined_up, world, link, found.trained_with(optimizer), effort, parallel)
    return recorded(plan, rows(plan, progress))


def recorded(plan: TrainPlan, rows: Generator[Row]) -> Record:
    """The record of the rows of a plan, where its link can be had."""
    if plan.link is not None:
        links.check()
    with clock.threads(launch.THREADS):
        return collect("train", torch.device("cpu"), rows)


def lineup(
    task: str,
    names: Sequence[str] | None = None,
    parallel: str = DDP,
    every: Sequence[int] | None = None,
) -> tuple[TrainScheme, ...]:
    """The schemes of a run: the uncompressed one first, then those asked for, or the task's own, each once.

    Of DiLoCo: DDP first, then the schemes for each number of steps between rounds, the uncompressed one first.
    """
    if parallel == DILOCO:
        outer = dict.fromkeys(schemes.parse_outer(name) for name in (NONE, *(names or OUTER_CODECS)))
        return schemes.SYNCHRONOUS, *(replace(scheme, every=steps) for steps in every or EVERY for scheme in outer)
    parse = schemes.parse_sharded if parallel == FSDP2 else schemes.parse
    usual = names or (SHARDED_CODECS if parallel == FSDP2 else CODECS)[task]
    return tuple(dict.fromkeys([parse(NONE), *map(parse, usual)]))


def rows(plan: TrainPlan, progress: Progress) -> Generator[Row]:
    """Times first: then a row is complete as soon as its last seed is."""
    runs = [TrainingRun(scheme, seed) for scheme in plan.schemes for seed in range(plan.task.seeds)]
    results: dict[TrainScheme, Results] = {scheme: [] for scheme in plan.schemes}
    times: Times = []
    with launch.ranks(RankSetup(world=plan.world, link=plan.link)) as world:
        for case in progress([STEP_TIMES, *runs]):
            if case == STEP_TIMES:
                times = world.run(time_steps, plan)
                continue
            results[case.scheme].append(world.run(train, plan, case))
            if case.seed == plan.task.seeds - 1:
                yield row_of(plan, case.scheme, results, times)


def row_of(plan: TrainPlan, scheme: TrainScheme, results: dict[TrainScheme, Results], times: Times) -> Row:
    mine = results[scheme]
    plain = results[plan.plain(scheme)]
    curve = mean_curve([trained.curve for ranks in mine for trained in ranks])
    return {
        "task": plan.task.name,
        "parallel": DDP if scheme == schemes.SYNCHRONOUS else plan.parallel,
        "optimizer": plan.optimizer,
        "codec": NONE if scheme == schemes.SYNCHRONOUS else scheme.label,
        **(_outer_columns(scheme, results) if plan.parallel == DILOCO else {CURVE: curve}),
        "weights": scheme.weights,
        "feedback": mine[0][0].feedback,
        "world": plan.world,
        "link": str(plan.link or "loopback"),
        "seeds": plan.task.seeds,
        **loss_columns(losses(mine), losses(plain)),
        **val_columns(val_losses(mine), val_losses(plain)),
        **_time_columns(plan, scheme, times),
        "identical": all(len({trained.digest for trained in ranks}) == 1 for ranks in mine),
        "control": scheme.control,
        "peer": scheme.peer,
        "steps": plan.task.steps,
        "batch": plan.task.rows,
        "params": mine[0][0].params,
        "threads": launch.THREADS,
        "cores": os.cpu_count(),
    }


def mean_curve(curves: Sequence[Sequence[tuple[float, float]]]) -> Curve:
    """The mean of curves over the same steps: those of seeds and ranks."""
    points = (zip(*point, strict=True) for point in zip(*curves, strict=True))
    return [[steps[0], timing.mean(losses)] for steps, losses in points]


def _outer_columns(scheme: TrainScheme, results: dict[TrainScheme, Results]) -> Row:
    """Of DiLoCo and of DDP beside it: steps between two messages, ln(loss / DDP's), and who is sooner at a loss."""
    ratios = log_ratios(losses(results[scheme]), losses(results[schemes.SYNCHRONOUS]))
    mine, ddp = ([course(ranks) for ranks in results[one]] for one in (scheme, schemes.SYNCHRONOUS))
    reached = [both_reached(*pair) for pair in zip(mine, ddp, strict=True)]
    loss, seconds, ddp_seconds = (timing.mean(values) for values in zip(*reached, strict=True))
    return {
        "every": scheme.every or 1,
        "ddp_log_ratio": timing.mean(ratios),
        "ddp_log_ratio_error": clock.standard_error(ratios),
        "reached_loss": loss,
        "reached_s": seconds,
        "ddp_reached_s": ddp_seconds,
        "sooner_than_ddp": ddp_seconds / seconds if seconds and ddp_seconds else None,
        CURVE: [[timing.mean(values) for values in zip(*points, strict=True)] for points in zip(*mine, strict=True)],
    }


def course(ranks: Sequence[Trained]) -> list[tuple[float, float]]:
    """Seconds of training by the slowest rank, and the loss by then."""
    points = (list(zip(*point, strict=True)) for point in zip(*(trained.course for trained in ranks), strict=True))
    return [(max(seconds), tasks.mean(totals)) for seconds, totals in points]


def both_reached(
    mine: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]
) -> tuple[float, float, float]:
    """The lowest loss that two runs came to, and the seconds that each took; NaN where one never had a loss."""
    lowest = [min((loss for _, loss in run if math.isfinite(loss)), default=math.nan) for run in (mine, other)]
    target = math.nan if any(map(math.isnan, lowest)) else max(lowest)
    first, second = (next((at for at, loss in run if loss <= target), math.nan) for run in (mine, other))
    return target, first, second


def losses(results: Results) -> list[float]:
    return [tasks.mean([trained.train for trained in ranks]) for ranks in results]


def val_losses(results: Results) -> list[float]:
    """The loss of each seed on the held-out data; none where the task holds nothing out."""
    held_out = [[trained.val for trained in ranks if trained.val] for ranks in results]
    return [tasks.mean(totals) for totals in held_out if totals]


def val_columns(mine: Sequence[float], fp32: Sequence[float]) -> Row:
    if not fp32:
        return {"val_gap_nats": None}
    gaps = [a - b for a, b in zip(mine, fp32, strict=True)]
    return {
        "val_gap_nats": timing.mean(gaps),
        "val_gap_error": clock.standard_error(gaps),
        "val_noise_floor": timing.mean([abs(a - b) for a, b in combinations(fp32, 2)]),
        "val_loss": timing.mean(mine),
        "fp32_val_loss": timing.mean(fp32),
    }


def _time_columns(plan: TrainPlan, scheme: TrainScheme, times: Times) -> Row:
    def step_ms(name: str) -> float:
        return median(timing.slowest(times, name))

    every = scheme.every or 1
    plain_name = plan.schemes[0].name
    pairs = zip(timing.slowest(times, scheme.name), timing.slowest(times, COMPUTE), strict=True)
    p20, mine, p80 = timing.percentiles([alone + (ms - alone) / every for ms, alone in pairs])
    compute = step_ms(COMPUTE)
    alone_cpu = timing.cpu_ms([part[COMPUTE] for part in times])
    power = [step_ms(peer.name) for peer in plan.schemes if peer.label in schemes.RANKS]
    counter = "interface_bytes" if plan.link else "transport_bytes"
    whole = timing.sent(times, scheme.name, counter)
    sent = None if whole is None else whole / every
    plain = timing.sent(times, plain_name, counter)
    limit = compute + 8e3 * sent / plan.link.rate if plan.link and sent is not None else None
    held = [part[scheme.name].extra_bytes for part in times]
    return {
        "step_ms": mine,
        "step_ms_p20": p20,
        "step_ms_p80": p80,
        "compute_ms": compute,
        "cpu_ms_per_rank": alone_cpu + (timing.cpu_ms([part[scheme.name] for part in times]) - alone_cpu) / every,
        "speedup_plain": step_ms(plain_name) / mine,
        "speedup_bf16": step_ms(BF16) / mine,
        "speedup_powersgd": min(power) / mine if power else None,
        "bytes_per_step": sent,
        "bytes_over_plain": sent / plain if sent is not None and plain else None,
        "limit_ms": limit,
        "over_limit": mine / limit - 1 if limit else None,
        "extra_bytes": max((nbytes for nbytes in held if nbytes is not None), default=None),
        "chosen": times[0][scheme.name].chosen,
        "rounds": len(times[0][scheme.name].ms),
    }


def loss_columns(mine: Sequence[float], fp32: Sequence[float]) -> Row:
    ratios = log_ratios(mine, fp32)
    return {
        "loss_log_ratio": timing.mean(ratios),
        "loss_log_ratio_error": clock.standard_error(ratios),
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


def train(plan: TrainPlan, run: TrainingRun) -> Trained:
    """Train this rank's replica and judge it; all ranks run it together."""
    task = plan.task
    place = (dist.get_rank(), plan.world)
    network = task.model(run.seed)
    params = sum(parameter.numel() for parameter in network.parameters())
    replica = sharded.replica_of(task, run.scheme, network, plan.optimizer, run.scheme.every)
    losses: list[torch.Tensor] = []
    course: list[tuple[float, Total]] = []
    seconds = 0.0
    pause = run.scheme.every or max(1, task.steps // _POINTS)
    for step in range(task.steps):
        begun = time.perf_counter()
        batch = task.batch(step, run.seed, *place)
        losses.append(replica.step(task, batch, task.rate(plan.optimizer, step, task.steps)))
        seconds += time.perf_counter() - begun
        if plan.parallel == DILOCO and (step + 1) % pause == 0:
            with torch.no_grad():
                course.append((seconds, task.train_loss(replica.model, *place)))
            dist.barrier()
    judged = task.model(run.seed)
    judged.load_state_dict(replica.weights())
    with torch.no_grad():
        found = (task.train_loss(judged, *place), task.val_loss(judged, *place))
    digest = timing.digest(judged.parameters())
    curve = tasks.curve(torch.stack(losses).tolist())
    trained = Trained(*found, digest, replica.feedback, params, tuple(course), curve)
    replica.close()
    del replica
    gc.collect()  # DDP and its hooks hold each other: 25 million weights per run would not wait
    return trained


def time_steps(plan: TrainPlan) -> dict[str, TrainSample]:
    """This rank's times; all ranks run it together."""
    replicas = _replicas(plan)
    samples = {name: TrainSample() for name in (*replicas, COMPUTE, NOTHING)}
    batches = (plan.task.batch(step, 0, dist.get_rank(), plan.world) for step in count_up())

    def step(replica: Replica, alone: bool = False) -> None:
        replica.step(plan.task, next(batches), 0.0, alone=alone)

    calls: dict[str, Call] = {name: partial(step, replica) for name, replica in replicas.items()}
    for name, replica in replicas.items():  # one after the other: an automatic codec times its own steps in a row
        for _ in range(replica.scheme.settled):
            calls[name]()
    if COMPUTE not in calls:
        calls[COMPUTE] = partial(step, replicas[plan.schemes[0].name], alone=True)
        calls[COMPUTE]()
    schemes.time_steps(replicas, calls, samples, plan.effort, shaped=plan.link is not None)
    return samples


def _replicas(plan: TrainPlan) -> dict[str, Replica]:
    """One per scheme: with DDP on one network, else on one each, and with FSDP2 one that sends nothing.

    With DiLoCo every step is a round.
    """
    task = plan.task
    if plan.parallel != DDP:
        alone = {COMPUTE: schemes.ALONE} if plan.parallel == FSDP2 else {}
        each = {**alone, **{scheme.name: scheme for scheme in plan.timed}}
        rounds = {name: None if scheme.every is None else 1 for name, scheme in each.items()}
        return {
            name: sharded.replica_of(task, scheme, task.model(0), plan.optimizer, rounds[name])
            for name, scheme in each.items()
        }
    network = task.model(0)
    # One optimizer for all: at a rate of zero they do not disturb each other, and memory is short.
    shared = schemes.optimizer_for(plan.optimizer, network.parameters())
    return {scheme.name: Replica(scheme, network, shared) for scheme in plan.timed}


TaskName = StrEnum("TaskName", ["digits", "gpt", "mlp", "wide"])
TrainOptimizer = StrEnum("TrainOptimizer", ["adam", "sgd", "adamw", "muon"])
Parallel = StrEnum("Parallel", ["ddp", "fsdp2", "diloco"])


def command(
    task: Annotated[TaskName, typer.Option(help="digits, gpt and wide for losses, mlp for times.")] = TaskName.digits,
    parallel: Annotated[Parallel, typer.Option(help="What the codecs are used for.")] = Parallel.ddp,
    world: Annotated[int, count("Ranks.", least=2, most=links.MOST_HOSTS)] = WORLD,
    codecs: Annotated[Words, option("Codecs, and the other names below; default by task.")] = None,
    optimizer: Annotated[TrainOptimizer | None, typer.Option(help="Default adam, for mlp sgd.")] = None,
    seeds: Annotated[int | None, count("Runs of each codec; default 5, gpt and wide 3, quick 2, mlp 1.")] = None,
    link: Annotated[str | None, option("For every rank, such as 1gbit or 20mbit+50ms; needs root.", "RATE")] = None,
    steps: Annotated[int | None, count("Of a run; default by task.")] = None,
    batch: Annotated[int | None, count("Rows of a rank's batch; default by task.")] = None,
    every: Annotated[Words, option("Of diloco: steps between two rounds; default 10,30.", "N,N")] = None,
    json: Json = None,
    quick: Quick = False,
) -> None:
    """What compressed gradients, and weights, do to the loss, and to the time of a step.

    Every codec trains from the same seeds on the same batches as uncompressed fp32 (none), which is always run.

    Codecs may name their error feedback: lloyd2@none, @classic, @ef21; and with @none+moments that gradients travel in
    Adam's units. There are also auto, auto:2.5, the controls sign and int2, which ought to fail, and torch's own hooks:
    bf16, powersgd1, powersgd2, powersgd4.

    With --parallel fsdp2 a name says how gradients and weights travel: lloyd4 (weights as they are), lloyd4/int8,
    lloyd4/lloyd4@replica (weights as differences to a copy on every rank). Weights of less than 8 bits without @replica
    are controls. torch's own are bf16, which sends bf16 and computes in fp32, and mixed, which computes in bf16 too.

    With --parallel diloco ranks train alone and average how far they have moved, every 10 and every 30 steps. A codec
    is compared with outer gradients in fp32 (none); DDP in fp32 takes as many steps beside them.

    \b
    Tasks:
      digits   a small network on scikit-learn's digits, every rank with labels of its own
      gpt      a small transformer on the characters of Python's help pages
      mlp      25 million weights: what a step takes, and how far that is from compute plus bytes over the link's rate
      wide     a million weights on digits of all labels: what sites reach over a slow link
    """
    named = flags.specs(codecs) or None
    kind = optimizer.value if optimizer else None
    if parallel is not Parallel.diloco:
        flags.refuse("is for --parallel diloco", every=every)
    apart = flags.counts(every, "--every")
    with screen.usage_errors("--codecs", CodecError):
        lineup(task.value, named, parallel.value, apart)
    study = partial(run, task.value, world, named, kind, seeds, shaped(link), steps, quick)
    deliver(partial(study, parallel=parallel.value, batch=batch, every=apart), json)


if __name__ == "__main__":
    from benchmarks import train as study  # under its own name, by which ranks find its functions

    start(study.command)
