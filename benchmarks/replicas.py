"""Training with simulated replicas, on a CPU or one GPU, in slices of minutes.

A run is a scheme and a seed. Finished runs are kept in a file, so that the next call goes on with what is missing. All
replicas share one network: gradients are taken one replica after the other, averaged by simulated.py, and one
optimizer takes the step. On a GPU the network computes in bf16 (autocast), its gradient is one CUDA graph, and weights,
gradients and optimizer stay in fp32.
"""

import gc
import json
import time
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from torch import Tensor

from benchmarks import clock, schemes, simulated, tasks, train
from benchmarks.command import start
from benchmarks.schemes import BF16, NONE, TrainScheme
from benchmarks.tasks import Bytes, Task
from benchmarks.train import TrainingRun
from thinwire.errors import CodecError
from thinwire.integrations.choice.options import DDPOptions, Feedback, Weigh
from thinwire.tools.bench import timing
from thinwire.tools.bench.models import Batch
from thinwire.tools.bench.record import CURVE, Progress, Record, Row, collect
from thinwire.tools.cli import flags, screen
from thinwire.tools.cli.bench import deliver
from thinwire.tools.cli.flags import Device, Json, Quick, Words, count, option
from thinwire.tools.cli.training import loss_columns
from thinwire.tools.local.link import BenchError

SIMULATED = "simulated"
WORLD = 8
CODECS = (BF16, "int8", "lloyd4", "lloyd2", "lloyd2@none", "auto:2.5", *schemes.CONTROLS)


@dataclass(frozen=True)
class Plan:
    task: Task
    schemes: tuple[TrainScheme, ...]  # the uncompressed one first
    world: int
    optimizer: str
    device: torch.device
    compiled: bool = False  # whether torch.compile has the network's blocks

    @property
    def fixed(self) -> dict[str, Any]:
        """All that decides what a scheme and a seed end with, besides the code."""
        task = asdict(self.task)
        del task["seeds"]
        text = self.task.digest() if isinstance(self.task, Bytes) else None
        # A list, as JSON makes of the rates.
        return {**task, "rates": [list(rate) for rate in self.task.rates], "world": self.world,
                "optimizer": self.optimizer, "device": self.device.type, "text": text}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What is kept of a run."""

    loss: float
    val_loss: float | None
    curve: Sequence[tuple[float, float]]  # see tasks.curve
    feedback: str
    params: int
    bytes_per_step: int
    step_ms: float
    seconds: float  # of all of it
    chosen: str


def plan_of(
    task: Task, names: Sequence[str] | None, optimizer: str | None, world: int, device: torch.device, *, compiled: bool
) -> Plan:
    """The uncompressed scheme first, then those asked for, or the usual ones; errors where something does not fit."""
    kind = task.trained_with(optimizer)
    lined_up = train.lineup(task.name, names or CODECS)
    if odd := [scheme.name for scheme in lined_up if scheme.label in schemes.RANKS or scheme.codec == "auto"]:
        raise CodecError(f"simulated replicas have no {', '.join(odd)}: nothing is timed, and PowerSGD is torch's own")
    return Plan(task, lined_up, world, kind, device, compiled)


def run(plan: Plan, kept: str | None = None, minutes: float | None = None, progress: Progress = iter) -> Record:
    """A record of kind "train", of the schemes whose seeds are all done. `kept`: the file of finished runs.

    After so many minutes no run begins that would not end in time, were it as long as the last one.
    """
    return collect("train", plan.device, rows(plan, Shelf(kept), minutes, progress))


def rows(plan: Plan, shelf: "Shelf", minutes: float | None, progress: Progress) -> Generator[Row]:
    runs = [TrainingRun(scheme, seed) for scheme in plan.schemes for seed in range(plan.task.seeds)]
    outcomes: dict[TrainScheme, list[Outcome]] = {scheme: [] for scheme in plan.schemes}
    began = time.monotonic()
    last = 0.0  # seconds
    for case in progress(runs):
        outcome = shelf.get(plan, case)
        if outcome is None:
            if minutes is not None and time.monotonic() - began + last > 60 * minutes:
                continue
            outcome = train_run(plan, case)
            last = outcome.seconds
            shelf.put(plan, case, outcome)
        outcomes[case.scheme].append(outcome)
        if all(len(outcomes[one]) == plan.task.seeds for one in (case.scheme, plan.schemes[0])):
            yield row_of(plan, case.scheme, outcomes)


class Shelf:
    """Finished runs in a file, one per line, with all that fixes them."""

    def __init__(self, path: str | None) -> None:
        self._path = Path(path) if path else None
        try:
            lines = self._path.read_text().splitlines() if self._path and self._path.exists() else []
            self._found = {
                json.dumps(one["run"], sort_keys=True): Outcome(**one["outcome"]) for one in map(json.loads, lines)
            }
        except (ValueError, KeyError, TypeError):
            raise BenchError(f"{path} does not hold runs of benchmarks.replicas: name another file") from None

    def get(self, plan: Plan, run: TrainingRun) -> Outcome | None:
        return self._found.get(_key(plan, run))

    def put(self, plan: Plan, run: TrainingRun, outcome: Outcome) -> None:
        if self._path is not None:
            line = json.dumps({"run": json.loads(_key(plan, run)), "outcome": asdict(outcome)})
            with self._path.open("a") as file:
                file.write(f"{line}\n")


def _key(plan: Plan, run: TrainingRun) -> str:
    return json.dumps({**plan.fixed, "scheme": run.scheme.name, "seed": run.seed}, sort_keys=True)


def row_of(plan: Plan, scheme: TrainScheme, outcomes: dict[TrainScheme, list[Outcome]]) -> Row:
    mine = outcomes[scheme]
    plain = outcomes[plan.schemes[0]]
    return {
        "task": plan.task.name,
        "parallel": SIMULATED,
        "optimizer": plan.optimizer,
        "codec": scheme.label,
        "weights": None,
        "feedback": mine[0].feedback,
        "world": plan.world,
        "link": "none",
        "seeds": plan.task.seeds,
        **loss_columns([one.loss for one in mine], [one.loss for one in plain]),
        **train.val_columns(_held_out(mine), _held_out(plain)),
        "step_ms": timing.mean([one.step_ms for one in mine]),
        "compute_ms": None,
        "speedup_plain": None,
        "speedup_bf16": None,
        "bytes_per_step": mine[0].bytes_per_step,
        "bytes_over_plain": mine[0].bytes_per_step / plain[0].bytes_per_step,
        "chosen": mine[0].chosen or None,
        "control": scheme.control,
        "peer": scheme.peer,
        "steps": plan.task.steps,
        "batch": plan.task.rows,
        "params": mine[0].params,
        "text": plan.fixed["text"],
        CURVE: train.mean_curve([one.curve for one in mine]),
    }


def _held_out(outcomes: Sequence[Outcome]) -> list[float]:
    return [one.val_loss for one in outcomes if one.val_loss is not None]


# --- one run ----------------------------------------------------------------------------------------------------------


def train_run(plan: Plan, run: TrainingRun) -> Outcome:
    began = time.monotonic()
    trainer = Trainer(plan, run)
    timing.synchronize(plan.device)
    stepped = time.monotonic()
    for step in range(plan.task.steps):
        trainer.step(step)
    timing.synchronize(plan.device)
    step_ms = 1e3 * (time.monotonic() - stepped) / plan.task.steps
    outcome = trainer.finish(began, step_ms)
    del trainer
    gc.collect()  # a graph and its memory
    if plan.device.type == "cuda":
        torch.cuda.empty_cache()
    return outcome


class Trainer:
    """One network, the gradients of W replicas, and what averages them.

    On a GPU a gradient is one CUDA graph: its thousand launches would wait for the host.
    """

    def __init__(self, plan: Plan, run: TrainingRun) -> None:
        task = plan.task
        self._plan = plan
        self._run = run
        self._network = task.model(run.seed).to(plan.device)
        if plan.compiled:
            for block in task.blocks(self._network):
                block.compile()
        parameters = self._network.parameters()
        self._optimizer = schemes.optimizer_for(plan.optimizer, parameters)
        options = DDPOptions(
            run.scheme.codec or NONE,
            feedback=cast(Feedback, run.scheme.feedback if run.scheme.codec else "none"),
            exempt=run.scheme.exempt,
            weigh=cast(Weigh, run.scheme.weigh),
            optimizer=self._optimizer,
            measure_every=0,
        )
        self._averager = simulated.ReplicaAverager(self._network, options, plan.world)
        self._rows_WN = self._averager.new_rows()
        self._losses = torch.zeros(task.steps, device=plan.device)
        self._batch = tuple(tensor.clone() for tensor in self._drawn(0, 0))
        self._row_N = torch.empty(self._rows_WN.shape[1], device=plan.device)  # the gradient of the batch
        self._views = self._averager.views(self._row_N)
        self._loss = torch.zeros((), device=plan.device)
        self._differentiate = clock.captured(self._compute) if plan.device.type == "cuda" else self._compute

    def _drawn(self, step: int, rank: int) -> Batch:
        plan = self._plan
        inputs, targets = plan.task.batch(step, self._run.seed, rank, plan.world)
        return inputs.to(plan.device, non_blocking=True), targets.to(plan.device, non_blocking=True)

    def _compute(self) -> None:
        inputs, targets = self._batch
        with autocast(self._plan.device):
            loss = self._plan.task.loss(self._network, (inputs, targets))
        gradients: Sequence[Tensor] = torch.autograd.grad(loss, self._averager.parameters)
        torch._foreach_copy_(self._views, list(gradients))
        self._loss.copy_(loss.detach())

    def step(self, step: int) -> None:
        for rank, row in enumerate(self._rows_WN):
            for mine, drawn in zip(self._batch, self._drawn(step, rank), strict=True):
                mine.copy_(drawn)
            self._differentiate()
            row.copy_(self._row_N)
            self._losses[step] += self._loss / self._plan.world
        if self._run.scheme.codec is None:
            self._rows_WN[0] = simulated.mean_of(self._rows_WN, bf16=self._run.scheme.label == BF16)
        else:
            self._averager.average(self._rows_WN, step)
        views = self._averager.views(self._rows_WN[0])
        for parameter, gradient in zip(self._averager.parameters, views, strict=True):
            parameter.grad = gradient
        rate = self._plan.task.rate(self._plan.optimizer, step, self._plan.task.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()

    def finish(self, began: float, step_ms: float) -> Outcome:
        """Judge the network."""
        task = self._plan.task
        with torch.no_grad(), autocast(self._plan.device):
            loss = tasks.mean([task.train_loss(self._network, 0, 1)])
            held_out = task.val_loss(self._network, 0, 1)
        numel = self._rows_WN.shape[1]
        ring = 2 * (self._plan.world - 1) * numel // self._plan.world  # numbers that torch's own sum sends
        sent = self._averager.bytes_per_step or (2 if self._run.scheme.label == BF16 else 4) * ring
        return Outcome(
            loss=loss,
            val_loss=None if held_out is None else tasks.mean([held_out]),
            curve=tasks.curve(self._losses.tolist()),
            feedback=self._averager.feedback,
            params=numel,
            bytes_per_step=sent,
            step_ms=step_ms,
            seconds=time.monotonic() - began,
            chosen=self._averager.chooser.why,
        )


def autocast(device: torch.device) -> torch.autocast:
    """bf16 on a GPU, fp32 elsewhere. Nothing is cached: a graph must not hold copies of weights from outside."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False)


TaskName = StrEnum("TaskName", ["bytes", "digits", "gpt", "wide"])
Size = StrEnum("Size", ["250k", "3m", "30m", "124m"])


def command(
    task: Annotated[
        TaskName, typer.Option(help="bytes: a transformer on the sources of Python and torch.")
    ] = TaskName.bytes,
    size: Annotated[Size | None, typer.Option(help="Weights of the network of bytes; default 30m.")] = None,
    device: Annotated[Device, typer.Option(help="Of the replicas; a GPU computes in bf16.")] = Device.cpu,
    world: Annotated[int, count("Replicas.", least=2)] = WORLD,
    codecs: Annotated[Words, option("As for benchmarks.train, without powersgd and auto.")] = None,
    optimizer: Annotated[str | None, option("adam, sgd, adamw, muon; default by task.", "NAME")] = None,
    seeds: Annotated[int | None, count("Runs of each codec; default by task.")] = None,
    steps: Annotated[int | None, count("Of a run; default by task.")] = None,
    batch: Annotated[int | None, count("Rows of a replica's batch; default by task.")] = None,
    resume: Annotated[str | None, option("Keep finished runs in that file, and run what it lacks.", "FILE")] = None,
    minutes: Annotated[float | None, typer.Option(metavar="M", help="Begin no run that would end later.")] = None,
    compile: Annotated[bool, typer.Option("--compile", help="torch.compile the network.")] = False,
    json: Json = None,
    quick: Quick = False,
) -> None:
    """Losses of compressed gradients with simulated replicas: all in this process, on a CPU or one GPU.

    Their gradients go through the same codecs, feedback and kernels as those of ranks. Runs may be split over several
    calls with --resume and --minutes: the record has the codecs of which all seeds are done.
    """
    if task is not TaskName.bytes:
        flags.refuse("goes with --task bytes", size=size)
    flags.check_device(device)
    flags.writable(resume, "--resume")
    with screen.usage_errors(None, BenchError, CodecError):
        found = tasks.find(task.value, size, quick=quick, seeds=seeds, steps=steps, rows=batch)
        where = torch.device(device.value)
        plan = plan_of(found, flags.specs(codecs) or None, optimizer, world, where, compiled=compile)
    deliver(partial(run, plan, resume, minutes), json)


if __name__ == "__main__":
    from benchmarks import replicas as study  # under its own name, by which ranks find its functions

    start(study.command)
