"""The training benchmark: what compressed gradients do to the loss, and to the time of a step.

Losses: every scheme trains from the same seeds on the same batches as uncompressed fp32, and is compared with it seed
by seed. Times: all schemes share one network and step by turns, each after a barrier, at a rate of zero; a step takes
as long as on its slowest rank, and medians are compared. torch's own bf16 hook is always timed.
"""

import gc
import hashlib
import math
import os
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import combinations
from statistics import fmean, median, stdev

import torch
import torch.distributed as dist

from thinwire.errors import CodecError
from thinwire.tools.bench import launch, link as links, schemes, tasks, timing
from thinwire.tools.bench.link import Link, Sent
from thinwire.tools.bench.record import Progress, Record, Row, collect
from thinwire.tools.bench.schemes import BF16, NONE, ONEBIT, RANKS, Replica, Scheme
from thinwire.tools.bench.tasks import Task, Total

WORLD = 4
CODECS = {
    "digits": ("int8", "lloyd4", "lloyd2", "lloyd2@none", ONEBIT, *schemes.CONTROLS),
    "gpt": ("int8", "lloyd4", "lloyd2", *schemes.CONTROLS),
    "mlp": ("int8", "lloyd4", "lloyd2", "auto", BF16, *RANKS),
}
COMPUTE, NOTHING = "a step alone", "nothing"  # what is timed beside the schemes


@dataclass(frozen=True)
class Effort:
    """How long steps are timed."""

    seconds: float = 2.0  # a scheme; longer => more rounds, steadier medians
    least: int = 7  # rounds, however slow the link
    most: int = 100  # rounds, however small the network


FULL, QUICK = Effort(), Effort(seconds=0.1, least=3, most=10)


@dataclass(frozen=True)
class Plan:
    """What a run measures."""

    task: Task
    world: int
    link: Link | None
    optimizer: str
    schemes: tuple[Scheme, ...]  # the uncompressed one first
    seeds: int
    steps: int
    effort: Effort
    threads: int

    @property
    def timed(self) -> tuple[Scheme, ...]:
        """The schemes, and torch's bf16."""
        peer = schemes.parse(BF16)
        return self.schemes if peer in self.schemes else (*self.schemes, peer)

    def jobs(self) -> "list[Clock | Lesson]":
        """Times first: then a row is complete as soon as its last seed is."""
        return [Clock(), *(Lesson(scheme, seed) for scheme in self.schemes for seed in range(self.seeds))]


@dataclass(frozen=True)
class Clock:
    """Take the times of all schemes."""

    def __str__(self) -> str:
        return "step times"


@dataclass(frozen=True)
class Lesson:
    """Train once."""

    scheme: Scheme
    seed: int

    def __str__(self) -> str:
        return f"{self.scheme}, seed {self.seed}"


@dataclass
class Sample:
    """One rank's measurements of one scheme's steps, round by round."""

    ms: list[float] = field(default_factory=list)
    interface_bytes: list[int] = field(default_factory=list)
    transport_bytes: list[int] = field(default_factory=list)
    extra_bytes: int | None = None
    chosen: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What one rank holds after a lesson."""

    train: Total
    val: Total | None
    digest: str
    feedback: str
    params: int


Times = list[dict[str, Sample]]  # by rank, then by scheme
Class = list[list[Outcome]]  # of one scheme: by seed, then by rank


def run(
    task: str = "digits",
    world: int = WORLD,
    codecs: Sequence[str] | None = None,
    optimizer: str | None = None,
    seeds: int | None = None,
    link: Link | None = None,
    feedback: str = "auto",
    steps: int | None = None,
    quick: bool = False,
    threads: int = 1,
    progress: Progress = iter,
) -> Record:
    """A record of kind "train", of DDP on gloo; what is None is the task's own."""
    chosen = tasks.find(task, quick=quick)
    if link is not None:
        links.check()
    plan = Plan(
        task=chosen,
        world=world,
        link=link,
        optimizer=optimizer or chosen.optimizer,
        schemes=lineup(task, codecs, feedback, optimizer),
        seeds=seeds or chosen.seeds,
        steps=steps or chosen.steps,
        effort=QUICK if quick else FULL,
        threads=threads,
    )
    with timing.threads(threads), closing(_rows(plan, progress)) as rows:
        return collect("train", torch.device("cpu"), rows)


def lineup(
    task: str, names: Sequence[str] | None = None, feedback: str = "auto", optimizer: str | None = None
) -> tuple[Scheme, ...]:
    """The schemes of a run: the uncompressed one first, then those asked for, or the task's own, each once."""
    adam = (optimizer or tasks.TASKS[task].optimizer) == "adam"
    found = [schemes.parse(name, feedback) for name in names or CODECS[task] if names or adam or name != ONEBIT]
    if not adam and any(scheme.label == ONEBIT for scheme in found):
        raise CodecError(f"{ONEBIT} is an Adam and is compared with Adam: use --optimizer adam, or leave it out")
    return tuple(dict.fromkeys([schemes.parse(NONE), *found]))


def _rows(plan: Plan, progress: Progress) -> Generator[Row]:
    with launch.ranks(plan.world, plan.link, plan.threads) as world:
        times: Times = []
        trained: dict[Scheme, Class] = {scheme: [] for scheme in plan.schemes}
        for job in progress(plan.jobs()):
            if isinstance(job, Clock):
                times = world.run(clock, plan)
                continue
            trained[job.scheme].append(world.run(learn, plan, job.scheme, job.seed))
            if len(trained[job.scheme]) == plan.seeds:
                yield row_of(plan, job.scheme, trained, times)


def row_of(plan: Plan, scheme: Scheme, trained: dict[Scheme, Class], times: Times) -> Row:
    """The row of a scheme, from what each rank measured."""
    mine, plain = trained[scheme], trained[plan.schemes[0]]
    return {
        "task": plan.task.name,
        "parallel": "ddp",
        "optimizer": plan.optimizer,
        "codec": scheme.label,
        "feedback": mine[0][0].feedback,
        "world": plan.world,
        "link": str(plan.link or "loopback"),
        "seeds": plan.seeds,
        **_loss_columns(mine, plain),
        **_val_columns(mine, plain),
        **_time_columns(plan, scheme, times),
        "identical": all(len({outcome.digest for outcome in ranks}) == 1 for ranks in mine),
        "control": scheme.control,
        "peer": scheme.peer,
        "steps": plan.steps,
        "params": mine[0][0].params,
        "threads": plan.threads,
        "cores": os.cpu_count(),
    }


def _loss_columns(mine: Class, plain: Class) -> Row:
    losses, fp32 = _losses(mine), _losses(plain)
    ratios = log_ratios(losses, fp32)
    return {
        "loss_log_ratio": _mean(ratios),
        "loss_log_ratio_error": _error(ratios),
        "noise_floor": noise_floor(fp32),
        "loss": _mean(losses),
        "fp32_loss": _mean(fp32),
        "diverged": not all(math.isfinite(loss) for loss in losses),
    }


def _val_columns(mine: Class, plain: Class) -> Row:
    if plain[0][0].val is None:
        return {"val_gap_nats": None}
    losses, fp32 = _val_losses(mine), _val_losses(plain)
    gaps = [a - b for a, b in zip(losses, fp32, strict=True)]
    spread = [abs(a - b) for a, b in combinations(fp32, 2)]
    return {
        "val_gap_nats": _mean(gaps),
        "val_gap_error": _error(gaps),
        "val_noise_floor": _mean(spread),
        "val_loss": _mean(losses),
        "fp32_val_loss": _mean(fp32),
    }


def _losses(trained: Class) -> list[float]:
    return [tasks.mean([outcome.train for outcome in ranks]) for ranks in trained]


def _val_losses(trained: Class) -> list[float]:
    return [tasks.mean([outcome.val for outcome in ranks if outcome.val]) for ranks in trained]


def log_ratios(losses: Sequence[float], fp32: Sequence[float]) -> list[float]:
    """ln(loss / fp32 loss), seed by seed; NaN where one of them is zero or not finite."""
    pairs = zip(losses, fp32, strict=True)
    return [math.log(a / b) if 0 < min(a, b) <= max(a, b) < math.inf else math.nan for a, b in pairs]


def noise_floor(losses: Sequence[float]) -> float | None:
    """Mean over pairs of seeds of |ln| of the ratio of their losses: what another seed does. None for one seed."""
    return _mean([abs(ratio) for a, b in combinations(losses, 2) for ratio in log_ratios([a], [b])])


def _mean(values: Sequence[float]) -> float | None:
    """None where there is nothing, or where one of them diverged."""
    return fmean(values) if values and all(map(math.isfinite, values)) else None


def _error(values: Sequence[float]) -> float | None:
    """The standard error of the mean: what more seeds would make smaller."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 and all(map(math.isfinite, values)) else None


def _time_columns(plan: Plan, scheme: Scheme, times: Times) -> Row:
    mine, plain, bf16, compute = (_step_ms(times, name) for name in (scheme.name, NONE, BF16, COMPUTE))
    p20, _, p80 = timing.percentiles(_rounds(times, scheme.name))
    power = [_step_ms(times, peer.name) for peer in plan.schemes if peer.label in RANKS]
    sent = _sent(plan, scheme, times)
    limit = compute + 8e3 * sent / plan.link.rate if plan.link and sent is not None else None
    return {
        "step_ms": mine,
        "step_ms_p20": p20,
        "step_ms_p80": p80,
        "compute_ms": compute,
        "speedup_plain": plain / mine,
        "speedup_bf16": bf16 / mine,
        "speedup_powersgd": min(power) / mine if power else None,
        "bytes_per_step": sent,
        "limit_ms": limit,
        "over_limit": mine / limit - 1 if limit else None,
        "extra_bytes": _most(part[scheme.name].extra_bytes for part in times),
        "chosen": times[0][scheme.name].chosen,
        "rounds": len(times[0][scheme.name].ms),
    }


def _step_ms(times: Times, name: str) -> float:
    return median(_rounds(times, name))


def _rounds(times: Times, name: str) -> list[float]:
    """Of each round: the time of the slowest rank."""
    return [max(of_ranks) for of_ranks in zip(*(part[name].ms for part in times), strict=True)]


def _sent(plan: Plan, scheme: Scheme, times: Times) -> float | None:
    """By the rank that sends most: at its interface on a shaped link, without the barrier's; else by the transport."""
    if plan.link is None:
        return _most(_median(part[scheme.name].transport_bytes) for part in times)
    return max(median(part[scheme.name].interface_bytes) - median(part[NOTHING].interface_bytes) for part in times)


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _most(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


# The ranks' side.


def learn(plan: Plan, scheme: Scheme, seed: int) -> Outcome:
    """Train this rank's replica; all ranks run it together."""
    pupil = Pupil(plan, scheme, seed)
    for _ in range(plan.steps):
        pupil.step()
    return pupil.finish()


class Pupil:
    """This rank's replica on its way through a lesson; all ranks take every step together."""

    def __init__(self, plan: Plan, scheme: Scheme, seed: int) -> None:
        self._plan, self._seed, self._steps = plan, seed, 0
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._network = plan.task.model(seed)
        warmup, weights = round(schemes.WARMUP * plan.steps), self._network.parameters()
        self._replica = Replica(scheme, self._network, schemes.optimizer_for(scheme, plan.optimizer, weights, warmup))

    def step(self) -> torch.Tensor:
        """The next step, and the loss of this rank's batch before it."""
        plan, step = self._plan, self._steps
        batch = plan.task.batch(step, self._seed, self._rank, self._world)
        self._steps += 1
        return self._replica.step(plan.task, batch, plan.task.rate(plan.optimizer, step, plan.steps))

    @property
    def bytes_sent(self) -> int | None:
        """Handed to the transport so far; None where torch sends by itself."""
        return self._replica.bytes_sent

    @property
    def params(self) -> int:
        """Weights of the network."""
        return sum(parameter.numel() for parameter in self._network.parameters())

    def finish(self) -> Outcome:
        """Judge the network and let go of the replica; nothing can follow."""
        task, network = self._plan.task, self._network
        with torch.no_grad():
            train = task.train_loss(network, self._rank, self._world)
            val = task.val_loss(network, self._rank, self._world)
        outcome = Outcome(train, val, digest(network), self._replica.feedback, self.params)
        self._replica.close()
        del self._replica
        gc.collect()  # DDP and its hooks hold each other: 25 million weights a lesson would not wait
        return outcome


def digest(network: torch.nn.Module) -> str:
    """Of all weights, bit by bit."""
    found = hashlib.sha256()
    for parameter in network.parameters():
        found.update(parameter.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def clock(plan: Plan) -> dict[str, Sample]:
    """This rank's times; all ranks run it together."""
    bench = _Clock(plan)
    bench.settle()
    bench.time(plan.effort)
    bench.close()
    return bench.samples


class _Clock:
    """Replicas that share one network, and the times of their steps."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.rank, self.world, self.steps = plan, dist.get_rank(), dist.get_world_size(), 0
        network = plan.task.model(0)
        # One optimiser for all but onebit: at a rate of zero they do not disturb each other, and memory is short.
        shared = schemes.optimizer_for(plan.timed[0], plan.optimizer, network.parameters(), 1)
        self.replicas = {}
        for scheme in plan.timed:
            own = schemes.optimizer_for(scheme, plan.optimizer, network.parameters(), 1)
            self.replicas[scheme.name] = Replica(scheme, network, own if scheme.label == ONEBIT else shared)
        self.samples = {name: Sample() for name in (*self.replicas, COMPUTE, NOTHING)}

    def settle(self) -> None:
        """Steps that are not counted, one scheme after the other: an automatic codec times its own steps in a row."""
        for name, replica in self.replicas.items():
            for _ in range(replica.scheme.settled):
                self._step(name)
        self._step(COMPUTE)

    def time(self, effort: Effort) -> None:
        """Rounds until there are enough of them: rank 0 decides."""
        names = list(self.samples)
        rounds, end = 0, time.monotonic() + effort.seconds * len(names)
        while _agreed(rounds < effort.least or (rounds < effort.most and time.monotonic() < end)):
            first = rounds % len(names)  # each has every place in turn: what runs before a step may help or hurt
            for name in names[first:] + names[:first]:
                self._time(name)
            rounds += 1

    def close(self) -> None:
        """Note what the replicas hold, and let it go."""
        for name, replica in self.replicas.items():
            self.samples[name].extra_bytes, self.samples[name].chosen = replica.extra_bytes, replica.chosen
            replica.close()
        self.replicas.clear()
        gc.collect()

    def _time(self, name: str) -> None:
        sample = self.samples[name]
        dist.barrier()
        interface, transport = _at_interface(self.plan), self._handed(name)
        start = time.perf_counter()
        self._step(name)
        sample.ms.append(1e3 * (time.perf_counter() - start))
        dist.barrier()  # by then all of this step's bytes have left
        sample.interface_bytes.append(_at_interface(self.plan).total - interface.total)
        if (now := self._handed(name)) is not None and transport is not None:
            sample.transport_bytes.append(now - transport)

    def _handed(self, name: str) -> int | None:
        """Bytes given to the transport so far."""
        return self.replicas[name].bytes_sent if name in self.replicas else None

    def _step(self, name: str) -> None:
        if name == NOTHING:
            return
        replica = self.replicas[NONE if name == COMPUTE else name]
        batch = self.plan.task.batch(self.steps, 0, self.rank, self.world)
        replica.step(self.plan.task, batch, 0.0, alone=name == COMPUTE)
        self.steps += 1


def _at_interface(plan: Plan) -> Sent:
    return links.sent() if plan.link else Sent(0, 0)


def _agreed(mine: bool) -> bool:
    """What rank 0 says."""
    flag = torch.tensor([mine])
    dist.broadcast(flag, 0)
    return bool(flag.item())
