"""Trains one network per run, and keeps finished runs in a file, one JSON line each.

    python -m benchmarks.loss.runs --size 25m --seeds 1,2 --arms fp32,null,lloyd4 --out runs.jsonl --minutes 20

A run is a size, an optimizer, an arm and a seed. Arms are codecs of gradients; `weights:int8` and the like are codecs
of FSDP2's weights; with `--optimizer diloco30` they are codecs between two sites
(`diloco30@0.5`: with an outer momentum of 0.5). The replicas share one network: gradients are taken one replica after
the other, and one optimizer takes the step. On a GPU the network computes in bf16, and a gradient is one CUDA graph. A
command that is called again trains what the file lacks.
"""

import argparse
import gc
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import clock, schemes, tasks
from benchmarks.loss import arms, sites, task
from thinwire.tools.bench import record
from thinwire.tools.local import torchrun

CLIP = 1.0
DECAY = 0.1
ROUNDS = re.compile(r"diloco(\d+)(?:@([.\d]+))?")  # steps between two rounds, and the outer momentum
POINTS = 50  # of a curve
BETAS = (0.9, 0.95)
ARMS = "fp32,null,bf16,int8,int4,lloyd4,trellis3,lloyd3,trellis2,lloyd2,auto:2.5,lloyd1,powersgd4,int2,sign"


@dataclass(frozen=True)
class Run:
    """What decides a result, besides the code and the text."""

    size: str
    optimizer: str
    arm: str
    seed: int
    steps: int  # 0: the size's own
    world: int = task.WORLD

    @property
    def recipe(self) -> task.Size:
        """The size, with this run's steps."""
        size = task.SIZES[self.size]
        return replace(size, steps=self.steps) if self.steps else size


def optimizer_of(kind: str, network: nn.Module) -> Any:
    """AdamW that decays matrices alone, or Muon for the matrices of blocks and AdamW for the rest."""
    matrices = [p for p in network.parameters() if p.dim() == 2]
    others = [p for p in network.parameters() if p.dim() != 2]
    if kind == "muon":
        return schemes.MuonAndAdamW(network.parameters(), lr=0.0)
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=BETAS, fused=matrices[0].is_cuda)


class Trainer:
    """One network, and the gradients of W replicas, of which the first has the number `first` in the whole run."""

    def __init__(
        self, run: Run, text: task.Text, device: torch.device, *, compiled: bool, first: int = 0, of: int = 0
    ) -> None:
        self.run, self.text, self.device = run, text, device
        self.size = run.recipe
        self.network = task.network_of(self.size, run.seed).to(device)
        if compiled:
            for block in self.network.blocks:
                block.compile()
        self.optimizer = optimizer_of(run.optimizer, self.network)
        self.arm, self._layout = arms.arm_of(run.arm, self.network, self.optimizer, run.world)
        self._rows_WN = self._layout.new_rows()
        self._rounded = None
        if run.arm.startswith(arms.WEIGHTS):
            self._rounded = arms.RoundedWeights(self.network, run.arm.removeprefix(arms.WEIGHTS), run.world)
        self.bits: Callable[[], float] = lambda: (self._rounded or self.arm).bits
        starts = task.starts_of(text, self.size, run.seed, of or run.world)
        self._starts = starts[:, first : first + run.world].to(device)
        self._start_B = self._starts[0, 0].clone()
        self._row_N = torch.empty(self._rows_WN.shape[1], device=device)
        self._views = self._layout.views(self._row_N)
        self._loss = torch.zeros((), device=device)
        self.losses = torch.zeros(self.size.steps, device=device)
        self._differentiate = clock.captured(self._compute) if device.type == "cuda" else self._compute

    def _compute(self) -> None:
        with task.autocast(self.device):
            loss = self.network(task.windows(self.text.train, self._start_B, self.size.context))
        gradients: Sequence[Tensor] = torch.autograd.grad(loss, self._layout.parameters)
        torch._foreach_copy_(self._views, list(gradients))
        self._loss.copy_(loss.detach())

    def step(self, step: int) -> None:
        """Gradients of all replicas, their mean by way of the arm, one step of the optimizer."""
        if self._rounded is not None:
            self._rounded.load(step)
        for rank, row in enumerate(self._rows_WN):
            self._start_B.copy_(self._starts[step, rank])
            self._differentiate()
            row.copy_(self._row_N)
            self.losses[step] += self._loss / self.run.world
        if self._rounded is not None:
            self._rounded.restore()
        self.arm.average(self._rows_WN, step)
        for parameter, gradient in zip(self._layout.parameters, self._layout.views(self._rows_WN[0]), strict=True):
            parameter.grad = gradient
        torch.nn.utils.clip_grad_norm_(self._layout.parameters, CLIP, foreach=True)
        for group in self.optimizer.param_groups:
            group["lr"] = task.rate_of(self.size, step)
        self.optimizer.step()


def rounds_of(optimizer: str) -> tuple[int, float] | None:
    """Of DiLoCo the steps between two rounds, and the momentum of the outer optimizer."""
    found = ROUNDS.fullmatch(optimizer)
    return found and (int(found[1]), float(found[2] or sites.MOMENTUM))


class SiteTrainer:
    """DiLoCo: sites of replicas, which average every so many steps, and at the end."""

    def __init__(self, run: Run, text: task.Text, device: torch.device, *, compiled: bool) -> None:
        rounds = rounds_of(run.optimizer)
        assert rounds is not None
        self._every, momentum = rounds
        world = run.world // sites.SITES
        inner = replace(run, optimizer="adamw", arm=arms.FP32, world=world)
        self._sites = [
            Trainer(inner, text, device, compiled=compiled, first=at * world, of=run.world) for at in range(sites.SITES)
        ]
        self.size = run.recipe
        self.network = self._sites[0].network
        self.losses = torch.zeros(self.size.steps, device=device)
        self._outer = sites.OuterAverage(self.network, run.arm, sites.SITES, momentum)
        self.bits: Callable[[], float] = lambda: self._outer.bits

    def step(self, step: int) -> None:
        """A step of every site, and a round if it is due."""
        for site in self._sites:
            site.step(step)
            self.losses[step] += site.losses[step] / len(self._sites)
        if (step + 1) % self._every == 0 or step + 1 == self.size.steps:
            self._outer.round([site.network for site in self._sites])


def train(run: Run, text: task.Text, device: torch.device, *, compiled: bool) -> dict[str, Any]:
    """A finished run, as it is kept."""
    began = time.monotonic()
    torch.manual_seed(run.seed)  # of the null arm's noise
    kind = SiteTrainer if rounds_of(run.optimizer) else Trainer
    trainer = kind(run, text, device, compiled=compiled)
    torchrun.synchronize(device)
    stepped = time.monotonic()
    for step in range(trainer.size.steps):
        trainer.step(step)
        if step % 100 == 0 and not math.isfinite(float(trainer.losses[step])):
            break
    torchrun.synchronize(device)
    step_ms = 1e3 * (time.monotonic() - stepped) / trainer.size.steps
    found = {
        **vars(run),
        "steps": trainer.size.steps,
        "val_loss": task.judge(trainer.network, text, trainer.size),
        "bits": trainer.bits(),
        "weights": sum(p.numel() for p in trainer.network.parameters()),
        "tokens": trainer.size.steps * run.world * trainer.size.rows * trainer.size.context,
        "curve": [[at, round(loss, 5)] for at, loss in tasks.curve(trainer.losses.tolist(), POINTS)],
        "step_ms": round(step_ms, 2),
        "seconds": round(time.monotonic() - began, 1),
        "compiled": compiled,
        "text": text.digest,
    }
    del trainer
    gc.collect()  # a graph and its memory
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


# --- the queue --------------------------------------------------------------------------------------------------------


def key_of(found: dict[str, Any], text: str) -> tuple[object, ...]:
    """Two results with the same key are the same run."""
    names = ("size", "optimizer", "arm", "seed", "steps", "world")
    return *(found[name] for name in names), text


def read(path: Path) -> list[dict[str, Any]]:
    """Finished runs."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def queue(runs: Sequence[Run], path: Path, text: task.Text, minutes: float) -> Iterator[Run]:
    """The runs that the file lacks, as long as one more would end in time, were it as long as the last."""
    began = last = time.monotonic()
    taken = 0.0
    for run in runs:
        done = {key_of(one, one["text"]) for one in read(path)}
        if key_of({**vars(run), "steps": run.recipe.steps}, text.digest) in done:
            continue
        if last - began + taken > 60 * minutes:
            return
        yield run
        taken, last = time.monotonic() - last, time.monotonic()


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=task.SIZES, default="25m")
    parser.add_argument("--optimizer", default="adamw", help="adamw, muon, diloco30 (sites average every 30 steps) ...")
    parser.add_argument("--arms", default=ARMS, help="; separates codecs that have commas")
    parser.add_argument("--seeds", default="1,2,3,4,5")
    parser.add_argument("--steps", type=int, default=0, help="default: the size's own")
    parser.add_argument("--world", type=int, default=task.WORLD, help="replicas")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="finished runs, one JSON line each")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run that would end later")
    parser.add_argument("--compile", action="store_true", help="torch.compile the network's blocks")
    parser.add_argument("--text", type=int, metavar="BYTES", help="use a part of the text")
    options = parser.parse_args()
    if options.optimizer not in ("adamw", "muon") and not rounds_of(options.optimizer):
        parser.error(f"--optimizer must be adamw, muon, or such as diloco30 or diloco30@0.5, got {options.optimizer}")
    return options


def main() -> None:
    """Train what the file lacks."""
    options = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
    found = task.sources(options.text)
    text = replace(found, train=found.train.to(device), held_out=found.held_out.to(device))
    names = options.arms.split(";" if ";" in options.arms else ",")
    runs = [
        Run(options.size, options.optimizer, name, int(seed), options.steps, options.world)
        for seed in options.seeds.split(",")
        for name in names
    ]
    made = {name: value for name, value in record.conditions(device).items() if name in ("commit", "torch", "device")}
    for run in queue(runs, options.out, text, options.minutes):
        result = {
            **train(run, text, device, compiled=options.compile),
            **{n: made[n] for n in ("commit", "torch", "device")},
        }
        with options.out.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(f"{run}: {result['val_loss']:.5f} nats, {result['step_ms']:.1f} ms per step", flush=True)


if __name__ == "__main__":
    main()
