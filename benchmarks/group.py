"""The group that compresses: calls beside torch's own, the size from which on a codec pays, whole steps, losses.

Two gloo ranks on this machine. Times are interleaved: each call once per round, after a barrier. A small GPT runs in
tensor parallelism as Megatron does it (columns, then rows, and a sum) and in torch's own pipeline of two stages. So
does, in a pipeline and with larger batches, the network of the example, which computes less for what it sends. Under
torchrun, on GPUs, calls alone are timed, beside NCCL's: small ones until they return, large ones until they are done.
Losses are paired: the same seed, plainly and by a rule, differs only in what travels. All plain runs of a seed compute
the same, in another order: "null" is the difference of the two kinds of parallelism.
"""

import functools
import math
import os
import runpy
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy, linear

import thinwire
from benchmarks import tasks
from benchmarks.command import start
from benchmarks.networks import GptBlock, GptNetwork
from benchmarks.tasks import Gpt
from thinwire.codecs import codec
from thinwire.collectives import groups
from thinwire.tools import pairs
from thinwire.tools.bench import timing
from thinwire.tools.bench.record import Progress, Record, Row, collect, conditions, write
from thinwire.tools.bench.timing import CPU, NOTHING, Call, Effort, Sample
from thinwire.tools.cli.bench import deliver
from thinwire.tools.cli.flags import Json, Quick, option
from thinwire.tools.local import launch, link as links, torchrun
from thinwire.tools.local.launch import RankSetup

WORLD = 2
LINKS = (None, "1gbit", "100mbit")
SLOW = "100mbit"  # where steps are timed
SIZES = tuple(1 << power for power in range(10, 21))
SMALL, LARGE = 256, 1 << 23  # elements: a kilobyte, 8 million
AT_ONCE = 50  # small calls that are timed together
PARTS = 4  # of a batch, in the pipeline
RULES = {"tp": "all_reduce={}", "pp": "send={}"}
CODECS = ("int8", "lloyd4")
SEEDS = 5
STEPS = 300  # of a training
ROWS = 32  # of a batch whose step is timed
TIMES = 16  # as many rows as the example has in a batch
EXAMPLE = Path(__file__).parent.parent / "examples" / "pipeline.py"
EFFORTS = {True: Effort(rounds=3), False: Effort(rounds=15, most=200, seconds=1.0)}


# The small GPT, in parallel.


class _Enter(torch.autograd.Function):
    """x; the gradients of ranks are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Leave(torch.autograd.Function):
    """The sum of the ranks' x; gradients stay as they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class Part(nn.Module):
    """This rank's part of a linear layer: of its outputs, or (`rows`) of its inputs, and then results are summed."""

    def __init__(self, whole: nn.Linear, group: Any, *, rows: bool, of: int = 1) -> None:
        super().__init__()
        rank, world = group.rank(), group.size()
        shape = (of, -1, whole.in_features)  # of queries, keys and values each a part
        weight = whole.weight.detach()
        part = weight.chunk(world, 1)[rank] if rows else weight.view(shape).chunk(world, 1)[rank].flatten(0, 1)
        bias = whole.bias.detach()
        self.weight = nn.Parameter(part.clone())
        self.bias = nn.Parameter(bias if rows else bias.view(of, -1).chunk(world, 1)[rank].flatten())
        self.rows = rows
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        if self.rows:
            summed: Tensor = _Leave.apply(linear(x, self.weight), self.group)  # type: ignore[no-untyped-call]
            return summed + self.bias
        return linear(_Enter.apply(x, self.group), self.weight, self.bias)  # type: ignore[no-untyped-call]


class Tensors:
    """Tensor parallelism: every rank has a part of each layer, and the whole batch."""

    def __init__(self, task: Gpt, seed: int, group: Any) -> None:
        self.task, self.seed = task, seed
        self.network = task.model(seed)
        for block in task.blocks(self.network):
            assert isinstance(block, GptBlock)
            block.heads //= group.size()
            for name, rows, of in (("mixed", False, 3), ("out", True, 1), ("wide", False, 1), ("narrow", True, 1)):
                setattr(block, name, Part(getattr(block, name), group, rows=rows, of=of))
        self.optimizer = torch.optim.Adam(self.network.parameters())

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.task.loss(self.network, self.task.batch(step, self.seed, 0, 1)).backward()
        self.optimizer.step()

    def judge(self, plain: Any) -> float:
        for module in self.network.modules():
            if isinstance(module, Part):
                module.group = plain
        return tasks.mean([self.task.val_loss(self.network, 0, 1)])


class Stages:
    """A pipeline: the first rank has the letters and the first half of the blocks, the second what is left."""

    def __init__(self, task: Gpt, seed: int, group: Any) -> None:
        self.task, self.seed, self.rank = task, seed, group.rank()
        whole = self.network = task.model(seed)
        assert isinstance(whole, GptNetwork)
        half = len(whole.blocks) // 2
        rest = list(whole.blocks)[half:]
        self.stages = [_First(whole, half), nn.Sequential(*rest, whole.norm, whole.head)]
        stage: Any = PipelineStage(self.stages[self.rank], self.rank, group.size(), CPU, group=group)
        self.schedule = Schedule1F1B(stage, PARTS, loss_fn=lambda y, t: cross_entropy(y.flatten(0, -2), t.flatten()))
        self.optimizer = torch.optim.Adam(self.stages[self.rank].parameters())

    def step(self, step: int) -> None:
        inputs, targets = self.task.batch(step, self.seed, 0, 1)
        self.optimizer.zero_grad()
        _pass(self.schedule, self.rank, inputs, targets)
        self.optimizer.step()

    def judge(self, plain: Any) -> float:
        for rank, stage in enumerate(self.stages):
            for parameter in stage.parameters():
                dist.broadcast(parameter.data, rank, group=plain)
        return tasks.mean([self.task.val_loss(self.network, 0, 1)])


def _pass(schedule: Any, rank: int, inputs: Tensor, targets: Tensor) -> None:
    if rank == 0:
        schedule.step(inputs)
    else:
        schedule.step(target=targets)


class _First(nn.Module):
    def __init__(self, whole: GptNetwork, half: int) -> None:
        super().__init__()
        self.letters, self.places, self.blocks = whole.letters, whole.places, whole.blocks[:half]

    def forward(self, codes: Tensor) -> Tensor:
        out: Tensor = self.blocks(self.letters(codes) + self.places.weight[: codes.shape[-1]])
        return out


class ExampleStages:
    """The network of examples/pipeline.py, which computes little for what it sends."""

    def __init__(self, task: Gpt, seed: int, group: Any) -> None:
        self.example = runpy.run_path(str(EXAMPLE))
        self.rank = group.rank()
        torch.manual_seed(seed)
        model = self.example["stage_of"](self.rank, group.size())
        stage = PipelineStage(model, self.rank, group.size(), CPU, group=group)
        self.schedule = Schedule1F1B(stage, self.example["PARTS"], loss_fn=cross_entropy)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def step(self, step: int) -> None:
        inputs, targets = (torch.cat([part] * TIMES) for part in self.example["batch"](step, CPU))
        self.optimizer.zero_grad()
        _pass(self.schedule, self.rank, inputs, targets)
        self.optimizer.step()


CLIENTS: dict[str, Callable[[Gpt, int, Any], Any]] = {"tp": Tensors, "pp": Stages}
TIMED = {"tp": ("tp", "gpt"), "pp": ("pp", "gpt"), "example": ("pp", "examples/pipeline.py")}  # client, network


# On the ranks.


def _made(rules: str) -> Any:
    return dist.new_group(backend="cpu:thinwire", pg_options=thinwire.GroupOptions(rules))


def _taken(
    made: Mapping[str, Any], call: Callable[[Any], object], effort: Effort, shaped: bool, prepare: Call = lambda: None
) -> dict[str, Sample]:
    """A call in turns on several groups, which end here."""
    calls = {name: functools.partial(call, group) for name, group in made.items()}
    for one in calls.values():  # compares calls, plans them, fills caches
        prepare()
        one()
    samples = {name: Sample() for name in (*calls, NOTHING)}
    timing.take(calls, samples, effort, shaped=shaped, transport=lambda name: None, prepare=prepare)
    for group in made.values():
        dist.destroy_process_group(group)
    return samples


def small_calls(effort: Effort) -> dict[str, Sample]:
    """A kilobyte, plainly, through gloo's own group and through one that has rules for larger sums."""
    x = torch.ones(SMALL)

    def many(group: Any) -> None:
        for _ in range(AT_ONCE):
            dist.all_reduce(x, group=group)

    made = {"plain": dist.new_group(backend="gloo"), "group": dist.new_group(backend="cpu:thinwire")}
    return _taken(made, many, effort, False)


def large_calls(effort: Effort) -> dict[str, Sample]:
    """8 million floats in int8, through the group and by thinwire's verb on a plain one."""
    x = torch.ones(LARGE)
    made = {"verb": dist.new_group(backend="gloo"), "group": _made("all_reduce=int8")}

    def call(group: Any) -> None:
        if group is made["group"]:
            dist.all_reduce(x, group=group)
        else:
            thinwire.all_reduce(x, group=group, codec="int8", algorithm="one_shot")

    return _taken(made, call, effort, False, prepare=lambda: x.fill_(1.0))


def sums(verb: str, numel: int, effort: Effort, shaped: bool) -> dict[str, Sample]:
    """A sum of this size in int8, beside gloo's."""
    x = torch.ones(numel)
    part = torch.empty(numel // WORLD)
    call: Callable[[Any], object] = {
        "all_reduce": lambda group: dist.all_reduce(x, group=group),
        "reduce_scatter": lambda group: groups.reduce_scatter_single(part, x, group=group),
    }[verb]
    made = {"plain": dist.new_group(backend="gloo"), "group": _made(f"{verb}=int8")}
    return _taken(made, call, effort, shaped, prepare=lambda: x.fill_(1.0))


def steps(name: str, task: Gpt, effort: Effort, shaped: bool) -> dict[str, Sample]:
    """Steps of a network, plainly and in int8."""
    made = {"plain": dist.new_group(backend="gloo"), "group": _made(RULES[TIMED[name][0]].format("int8"))}
    client = CLIENTS.get(name, ExampleStages)
    trained = {group: client(task, 0, group) for group in made.values()}
    return _taken(made, lambda group: trained[group].step(0), effort, shaped)


def loss(client: str, name: str, task: Gpt, seed: int) -> float:
    """The validation loss after a training with this codec, or "none"."""
    torch.manual_seed(seed)
    plain = dist.new_group(backend="gloo")
    mine = _made(RULES[client].format(name))
    run = CLIENTS[client](task, seed, mine)
    for step in range(task.steps):
        for part in run.optimizer.param_groups:
            part["lr"] = task.rate("adam", step, task.steps)
        run.step(step)
    with torch.no_grad():
        found: float = run.judge(plain)
    for group in (mine, plain):
        dist.destroy_process_group(group)
    return found


# Records.


def _row(found: Sequence[Mapping[str, Sample]], client: str, rules: str, link: str | None, beside: str) -> Row:
    """Times of the slowest rank, round by round; bytes of the rank that sends most."""
    ms = {name: [max(times) for times in zip(*(part[name].ms for part in found), strict=True)] for name in found[0]}
    ratios = [ours / other for ours, other in zip(ms["group"], ms[beside], strict=True)]
    nbytes = [max(median(part[name].interface_bytes) for part in found) for name in ("group", beside, NOTHING)]
    sent = [None if link is None else int(one - nbytes[2]) for one in nbytes[:2]]
    return {
        "client": client,
        "rules": rules,
        "world": WORLD,
        "link": link or "loopback",
        "beside": "gloo" if beside == "plain" else "thinwire.all_reduce",
        **timing.columns(ms["group"]),
        "plain_ms": median(ms[beside]),
        "times_plain": median(ratios),
        "speedup_plain": 1 / median(ratios),
        "speedup_p20": timing.percentiles(ms[beside])[0] / timing.percentiles(ms["group"])[0],
        "bytes_per_step": sent[0],
        "plain_bytes_per_step": sent[1],
        "rounds": len(ratios),
    }


def run(*, quick: bool = False, progress: Progress = iter) -> Record:
    """A record of kind "group"."""
    return collect("group", CPU, _rows(quick, progress))


def _rows(quick: bool, progress: Progress) -> Generator[Row]:
    effort = EFFORTS[quick]
    task = tasks.find("gpt", quick=quick, rows=None if quick else ROWS)
    assert isinstance(task, Gpt)
    sizes = SIZES[::5] if quick else SIZES
    for rate in progress(LINKS[:1] if quick else LINKS):
        with launch.ranks(RankSetup(world=WORLD, link=None if rate is None else links.parse(rate))) as world:
            shaped = rate is not None
            if not shaped:
                yield {**_row(world.run(small_calls, effort), "verb", "default", rate, "plain"), "numel": SMALL}
                yield {**_row(world.run(large_calls, effort), "verb", "all_reduce=int8", rate, "verb"), "numel": LARGE}
            for verb, numel in product(("all_reduce", "reduce_scatter"), sizes):
                found = world.run(sums, verb, numel, effort, shaped)
                yield {**_row(found, "verb", f"{verb}=int8", rate, "plain"), "numel": numel}
            for name in TIMED if quick or rate == SLOW else ():
                client, network = TIMED[name]
                found = world.run(steps, name, task, effort, shaped)
                row = _row(found, client, RULES[client].format("int8"), rate, "plain")
                yield {**row, "numel": None, "network": network}


def run_nccl(rounds: int = 40) -> Record:
    """A record of kind "group", by ranks that torchrun started, on one GPU or on one each."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    with torchrun.job(device):
        made = {"plain": dist.new_group(backend="nccl"), "group": dist.new_group(backend="cuda:thinwire")}
        small, large = torch.ones(SMALL, device=device), torch.ones(LARGE, device=device)
        options = thinwire.GroupOptions("all_reduce=int8")
        int8 = dist.new_group(backend="cuda:thinwire", pg_options=options)
        verb = functools.partial(thinwire.all_reduce, large, group=made["plain"], codec="int8", algorithm="one_shot")
        calls: dict[str, tuple[str, dict[str, Call]]] = {
            "default": ("plain", {k: functools.partial(dist.all_reduce, small, group=g) for k, g in made.items()}),
            "all_reduce=int8": ("verb", {"verb": verb, "group": functools.partial(dist.all_reduce, large, group=int8)}),
        }
        found = {rules: _host_times(each, device, rounds, rules == "default") for rules, (_, each) in calls.items()}
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, found)
    rows: list[Row] = []
    for rules, (beside, _) in calls.items():
        row = _row([part[rules] for part in gathered], "verb", rules, None, beside)
        rows.append({**row, "world": len(gathered), "numel": SMALL if beside == "plain" else LARGE})
        rows[-1] |= {"beside": "nccl"} if beside == "plain" else {}
    return Record("group", conditions(device), rows)


def _host_times(calls: Mapping[str, Call], device: torch.device, rounds: int, until_return: bool) -> dict[str, Sample]:
    """Calls in turns: how long some take to return, or one to be done."""
    found = {name: Sample(interface_bytes=[0]) for name in (*calls, NOTHING)}
    for turn in range(rounds + 3):
        for name, call in calls.items():
            torch.cuda.synchronize(device)
            dist.barrier()
            began = time.perf_counter()
            for _ in range(AT_ONCE if until_return else 1):
                call()
            if not until_return:
                torch.cuda.synchronize(device)
            if turn >= 3:
                found[name].ms.append(1e3 * (time.perf_counter() - began))
    found[NOTHING].ms = [0.0] * rounds
    return found


def run_losses(seeds: int = SEEDS, *, quick: bool = False, progress: Progress = iter) -> Record:
    """A record of kind "loss"."""
    return collect("loss", CPU, _loss_rows(seeds, quick, progress))


def _loss_rows(seeds: int, quick: bool, progress: Progress) -> Generator[Row]:
    task = tasks.find("gpt", quick=quick, steps=None if quick else STEPS)
    assert isinstance(task, Gpt)
    params = sum(parameter.numel() for parameter in task.model(0).parameters())
    losses: dict[tuple[str, str], dict[int, float]] = {}
    with launch.ranks(RankSetup(world=WORLD)) as world:
        for seed, client, name in progress(list(product(range(seeds), CLIENTS, ("none", *CODECS)))):
            losses.setdefault((client, name), {})[seed] = world.run(loss, client, name, task, seed)[0]
    known: Row = {"size": "gpt", "optimizer": "adam", "params": params, "world": WORLD, "steps": task.steps}
    known |= {"tokens": task.steps * task.rows * task.context, "seeds": seeds, "tokens_more_percent": None}
    for client, name in product(CLIENTS, ("null", *CODECS)):
        other = next(one for one in CLIENTS if one != client)
        plain = losses[client, "none"]
        mine = losses[other, "none"] if name == "null" else losses[client, name]
        gap = pairs.difference(mine, plain)
        bits = 32.0 if name == "null" else 8 * codec(name).wire_bytes(1 << 16) / (1 << 16)
        yield {
            **known,
            "parallel": client,
            "arm": name,
            "bits": bits,
            "val_loss": math.fsum(mine.values()) / seeds,
            "fp32_val_nats": math.fsum(plain.values()) / seeds,
            **gap.columns,
            "none_seen": gap.none_seen,
        }


def command(
    losses: Annotated[bool, option("Train, and compare losses, instead of times.")] = False,
    json: Json = None,
    quick: Quick = False,
) -> None:
    """What calls and steps through a group that compresses cost beside torch's own; with --losses, what they lose."""
    if torchrun.place() is not None and torch.cuda.is_available():
        found = run_nccl()
        if json and os.environ["RANK"] == "0":
            write(found, json)
        return
    study = functools.partial(run_losses, 2 if quick else SEEDS) if losses else run
    deliver(functools.partial(study, quick=quick), json)


if __name__ == "__main__":
    from benchmarks import group as study  # under its own name: ranks import it

    start(study.command)
