"""Random calls with delays, kills, stops and failures, until the time is up. `make soak` runs it.

    python tests/soak.py --seconds 600 --seed 1 --json FILE
    python tests/soak.py --episode "kill 3 1290"        # again what a line of trouble named

An episode is a run of random calls on two to four ranks: verbs, codecs, dtypes, lengths, in flight or not, ranks that
come late. Every result is compared to the bit with tests/defined.py, which computes it from all ranks' inputs, one in
ten by the slow reference; what all ranks hold alike is also compared between them. In episodes with a fault one rank is
killed or stopped at a random moment, has no memory left, or makes another call than the others. The others must raise
an error that names the group, in time; those that lost a rank then form a smaller group and go on, and new ranks are
started. Other episodes train with FSDP2, HSDP and DiLoCo, and publish weights as exact differences, twice, with ranks
that come late at other moments: both must end with the same bits, on all ranks.

Mismatches are wrong results and wrong errors. Hangs are ranks that gave no answer. Leaks are files, threads and memory
that ranks hold beyond what they held after their first episodes. All three must be 0, else the exit status is 1.
"""

import argparse
import itertools
import os
import random
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import cases
import defined
import thinwire
from cases import CONTENTS, STOOD_S, TRIES, Standstill, assert_same, content, digest, seeded, small_chunks, to_dtype
from ranks import RankError, RankPool
from thinwire.errors import CollectiveError, DisagreementError
from thinwire.kernels import cpu
from thinwire.tools.bench import record

Group = dist.ProcessGroup
CPU = torch.device("cpu")
CALLS = 40  # of an episode
WORLDS = (2, 3, 4)
FAULTS = ("kill", "stop", "fail", "differ")
FAULTY = 0.2  # share of episodes with a fault
TRAINING = 0.15  # share of episodes that train
LATE = 0.05  # share of calls to which a rank comes late
STOPPED_S = 2.0  # the timeout of groups in which a rank stops
SOON_S = 10.0  # until survivors know, beyond that timeout
EPISODE_S = 60.0
EPISODES = 20  # of a world, before its ranks are asked what they hold: earlier, caches still fill up
CODECS = (
    *("none", "bf16", "fp16", "e4m3:block=64", "e5m2", "int8", "int4:block=32", "int3:block=40,mode=affine"),
    *("int5:block=64,rounding=stochastic", "lloyd4", "lloyd2:block=64", "lloyd1:block=256,scale=unbiased", "topk"),
    *("trellis2", "trellis3:block=64", "trellis1:block=256,scale=unbiased"),
)
TRAINED = ("int8", "int4", "lloyd4", "lloyd2", "trellis2", "trellis3")  # of gradients
WEIGHTS = ("none", "bf16", "int8", "lloyd4", "exact")
STEPS = 8  # of a training
VERBS = ("all_reduce", "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16)


# --- calls ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One call of a verb, the same on all ranks; late: how many seconds each rank comes late."""

    verb: str
    codec: str
    algorithm: str
    lengths: tuple[int, ...]  # of what each rank gives, or gives each other one; all_gather and all_to_all: any
    dtype: torch.dtype
    kind: str  # of its numbers
    average: bool
    source: int
    seed: int  # of its numbers, and its step
    late: tuple[float, ...]

    @classmethod
    def drawn(cls, rng: random.Random, world: int) -> "Call":
        """Any."""
        verb = rng.choice(VERBS)
        codec = rng.choice(CODECS)
        known = ("two_phase", "one_shot") if verb == "all_reduce" else ("compressed",)
        if codec == "topk":
            verb = {"all_to_all": "all_gather", "broadcast": "all_reduce"}.get(verb, verb)
            known = ("one_shot",) if verb == "all_reduce" else ("compressed",)
        algorithm = "plain" if rng.random() < 0.1 else rng.choice(known)
        numel = length(rng)
        uneven = verb in ("all_gather", "all_to_all")
        return cls(
            verb,
            codec,
            algorithm,
            tuple(length(rng) % (2 * numel + 2) if uneven else numel for _ in range(world)),
            rng.choice(DTYPES),
            "whole" if algorithm == "plain" else rng.choice(list(CONTENTS)),
            rng.random() < 0.5 and algorithm != "plain",
            rng.randrange(world),
            rng.randrange(1 << 30),
            tuple(rng.random() * 0.03 if rng.random() < LATE else 0.0 for _ in range(world)),
        )

    def numbers(self, rank: int, numel: int, target: int = 0) -> Tensor:
        """A rank's; small whole ones are exact however torch adds them."""
        if self.kind == "whole":
            return torch.randint(-8, 9, (numel,), generator=seeded(self.seed, rank, target)).to(self.dtype)
        return to_dtype(content(self.kind, numel, seed=self.seed + 16 * rank + target), self.dtype)

    def given(self, rank: int) -> list[Tensor]:
        """What a rank gives: one tensor, or one for each rank."""
        world = len(self.lengths)
        if self.verb == "all_to_all":  # rank r gets lengths[r] from everyone
            return [self.numbers(rank, numel, target) for target, numel in enumerate(self.lengths)]
        many = world if self.verb == "reduce_scatter" else 1
        return [self.numbers(rank, self.lengths[rank] * many)]

    def start(self, group: Group, *, codec: str = "") -> tuple[thinwire.Work, list[Tensor]]:
        """The work, and the tensors that will hold the result."""
        rank = group.rank()
        inputs = self.given(rank)
        how: Any = {"group": group, "async_op": True, "codec": codec or self.codec, "algorithm": self.algorithm}
        how["step"] = self.seed
        op = dist.ReduceOp.AVG if self.average else dist.ReduceOp.SUM
        outputs = inputs
        if self.verb == "all_reduce":
            work = thinwire.all_reduce(inputs[0], op, **how)
        elif self.verb == "broadcast":
            work = thinwire.broadcast(inputs[0], group_src=self.source, **how)
        elif self.verb == "reduce_scatter":
            outputs = [torch.empty(self.lengths[rank], dtype=self.dtype)]
            work = thinwire.reduce_scatter_tensor(outputs[0], inputs[0], op, **how)
        elif self.verb == "all_gather":
            outputs = [torch.empty(numel, dtype=self.dtype) for numel in self.lengths]
            work = thinwire.all_gather(outputs, inputs[0], **how)
        else:
            outputs = [torch.empty(self.lengths[rank], dtype=self.dtype) for _ in self.lengths]
            work = thinwire.all_to_all(outputs, inputs, **how)
        assert work is not None
        return work, outputs

    def expected(self, rank: int) -> list[Tensor]:
        """What a rank must hold."""
        world = len(self.lengths)
        codec = thinwire.codec("none" if self.algorithm == "plain" else self.codec)
        given = [self.given(other) for other in range(world)]
        scale = 1 / world if self.average else 1.0
        firsts = [parts[0] for parts in given]
        if self.verb == "all_reduce":
            algorithm = "two_phase" if self.algorithm == "plain" else self.algorithm
            return [defined.all_reduce(codec, firsts, algorithm, scale, self.seed)]
        if self.verb == "broadcast":
            return [defined.broadcast(codec, firsts[self.source], world, self.seed)]
        if self.verb == "reduce_scatter":
            return [defined.reduce_scatter(codec, firsts, rank, scale, self.seed)]
        if self.verb == "all_gather":
            return defined.all_gather(codec, firsts, self.seed)
        return defined.all_to_all(codec, [parts[rank] for parts in given], rank, self.seed)

    @property
    def alike(self) -> bool:
        """Whether all ranks hold the same."""
        return self.verb in ("all_reduce", "all_gather", "broadcast")


def length(rng: random.Random) -> int:
    """Mostly some hundred; nothing, one, and forty thousand, too."""
    return rng.choice((0, 1, rng.randrange(70), rng.randrange(3000), rng.randrange(3000)) * 12 + (40_000,))


def calls_of(seed: int, world: int) -> list[Call]:
    rng = random.Random(seed)
    return [Call.drawn(rng, world) for _ in range(CALLS)]


# --- episodes, on every rank ------------------------------------------------------------------------------------------


@dataclass
class Told:
    """What a rank tells of an episode."""

    calls: int = 0
    wrong: list[str] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)  # of what all ranks hold alike
    left: list[str] = field(default_factory=list)  # what a lost group leaves
    held: dict[str, int] = field(default_factory=dict)  # before the episode
    pid: int = 0


def episode(group: Group, how: str, seed: int, folder: str = "") -> Told:
    """With whole messages, or with many small chunks: plans hold the cuts, so all make groups of their own."""
    run: Any = {"peace": peace, "train": train, "fail": fail, "differ": differ}.get(how)
    with small_chunks() if seed % 2 else nullcontext():
        return run(group, seed) if run else lose(group, seed, how, folder)


def peace(group: Group, seed: int) -> Told:
    """Calls by turns on two groups, up to eight in flight, and steps of DDP between them."""
    told = Told(pid=os.getpid(), held=held())
    rng = random.Random(seed)
    groups = [dist.new_group(), dist.new_group()]
    model = ddp_model(groups[1], rng)
    waiting: list[tuple[Call, Any, list[Tensor]]] = []
    for call in calls_of(seed, group.size()):
        time.sleep(call.late[group.rank()])
        waiting.append((call, *call.start(rng.choice(groups))))
        if rng.random() < 0.3 or len(waiting) == 8:
            rng.shuffle(waiting)
            finish(waiting, group.rank(), told)
        if rng.random() < 0.1:
            told.digests.append(step(model, seed + group.rank()))
            told.calls += 1
    finish(waiting, group.rank(), told)
    return told


def finish(waiting: list[tuple[Call, Any, list[Tensor]]], rank: int, told: Told) -> None:
    """Wait for all, then compare: the reference is set for a process, so nothing may be in flight."""
    for _, work, _ in waiting:
        work.wait()
    for call, _, outputs in waiting:
        told.calls += 1
        if call.alike:
            told.digests.append(digest(*outputs))
        if not call.alike or call.seed % len(call.lengths) == rank:  # where ranks hold the same, one of them checks
            check(call, rank, outputs, told)
    waiting.clear()


def check(call: Call, rank: int, outputs: list[Tensor], told: Told) -> None:
    with thinwire.use_backend("auto" if call.seed % 10 else "reference"):
        expected = call.expected(rank)
    for at, (got, want) in enumerate(zip(outputs, expected, strict=True)):
        try:
            assert_same(got, want)
        except AssertionError as error:
            told.wrong.append(f"output {at} of rank {rank} of {call}: {error}")


def ddp_model(group: Group, rng: random.Random) -> DistributedDataParallel:
    torch.manual_seed(rng.randrange(1 << 30))
    wide = rng.randrange(1, 400)
    layers = nn.Sequential(nn.Linear(7, wide), nn.ReLU(), nn.Linear(wide, 3))
    model = DistributedDataParallel(layers, process_group=group, bucket_cap_mb=rng.choice((0.002, 25)))
    thinwire.compress_ddp(model, rng.choice(("int8", "int4", "lloyd4", "lloyd2", "trellis2", "topk")))
    return model


def step(model: DistributedDataParallel, seed: int) -> str:
    """One of SGD; what all ranks must hold alike after it."""
    model(torch.randn(5, 7, generator=seeded(seed))).square().sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=1e-4)
            parameter.grad = None
    return digest(*model.parameters())


def train(group: Group, seed: int) -> Told:
    """FSDP2, DiLoCo and a publisher of weights, each twice."""
    told = Told(pid=os.getpid(), held=held())
    member = dist.new_group()
    for trained in (sharded, averaged, published):
        ends = [trained(member, seed, random.Random(seed + 16 * turn + group.rank())) for turn in range(2)]
        told.calls += 2 * STEPS
        if ends[0] != ends[1]:
            told.wrong.append(f"{trained.__name__} twice, seed {seed}: ranks that come late change the result")
        told.digests += ends
    return told


def sharded(group: Group, seed: int, lateness: random.Random) -> str:
    """Steps of FSDP2, or of HSDP on four ranks; all weights at the end."""
    rng = random.Random(seed)
    shape = (2, 2) if group.size() == 4 and rng.random() < 0.5 else (group.size(),)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
    model = layers(rng)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    gradients, weights, feedback = rng.choice(TRAINED), rng.choice(WEIGHTS), rng.choice(("none", "classic"))
    replica = True if weights == "lloyd4" else None  # else it warns
    thinwire.compress_fsdp(model, gradients, weights, replica=replica, feedback=feedback, exempt="none")
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for at in range(STEPS):
        train_step(model, optimizer, seed + 4 * at + group.rank(), lateness)
    return digest(*(parameter.full_tensor() for parameter in model.parameters()))


def averaged(group: Group, seed: int, lateness: random.Random) -> str:
    """Steps of DiLoCo; all weights at the end."""
    rng = random.Random(seed)
    model = layers(rng)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    how: Any = {"codec": rng.choice((*TRAINED, "topk")), "fragments": rng.choice((1, 2))}
    with thinwire.DiLoCo(model, optimizer, every=4, overlap=rng.choice((0, 1)), group=group, **how):
        for at in range(STEPS):
            train_step(model, optimizer, seed + 4 * at + group.rank(), lateness)
    return digest(*model.parameters())


def published(group: Group, seed: int, lateness: random.Random) -> str:
    """Steps of one rank, whose weights the others follow; all weights at the end."""
    rng = random.Random(seed)
    model, trainer = layers(rng).to(rng.choice((torch.float32, torch.bfloat16))), rng.randrange(group.size())
    optimizer = torch.optim.Adam(model.parameters(), 10 ** rng.uniform(-6, -2))
    if group.rank() == trainer:
        publisher = thinwire.WeightPublisher(model)
        for at in range(STEPS):
            train_step(model, optimizer, seed + 4 * at, lateness)
            publisher.publish(group=group)
    else:
        subscriber = thinwire.WeightSubscriber(model)
        for _ in range(STEPS):
            subscriber.receive(group)
    return digest(*model.parameters())


def layers(rng: random.Random) -> nn.Sequential:
    torch.manual_seed(rng.randrange(1 << 30))
    wide = rng.randrange(1, 300)
    return nn.Sequential(nn.Linear(7, wide), nn.Linear(wide, wide), nn.Linear(wide, 3))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, lateness: random.Random) -> None:
    if lateness.random() < LATE:
        time.sleep(lateness.random() * 0.03)
    inputs = torch.randn(5, 7, generator=seeded(seed)).to(next(model.parameters()).dtype)
    model(inputs).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def lose(group: Group, seed: int, how: str, folder: str) -> Told:
    """A rank is killed or stopped at a random moment of the calls; the others form a group of their own and go on."""
    told = Told(pid=os.getpid())
    rng = random.Random(seed)
    victim = group.size() - 1  # of a pool's world, the one whose answer nobody waits for
    moment = rng.random() * 0.3
    member = dist.new_group(timeout=timedelta(seconds=STOPPED_S if how == "stop" else EPISODE_S))
    dist.barrier(member)
    if group.rank() == victim:
        number = signal.SIGSTOP if how == "stop" else signal.SIGKILL
        threading.Timer(moment, os.kill, (os.getpid(), number)).start()
    name = member.group_name
    for number in itertools.count():
        start = time.monotonic()
        try:
            for call in calls_of(seed + number, group.size()):
                start = time.monotonic()
                finish([(call, *call.start(member))], group.rank(), told)
        except Exception as error:
            seconds = time.monotonic() - start
            judge(error, seconds, STOPPED_S if how == "stop" else 0.0, f"of group '{name}'", told)
            break
    del member
    go_on(group.rank(), group.size() - 1, f"{folder}/again", seed + 1, told)
    told.digests.clear()  # survivors got to different calls
    return told


def judge(error: Exception, seconds: float, timeout: float, says: str, told: Told) -> None:
    """An error of ours, that says what it must, in time."""
    if not isinstance(error, CollectiveError) or says not in str(error):
        told.wrong.append(f"expected a CollectiveError that says {says!r}, got {type(error).__name__}: {error}")
    if seconds > timeout + SOON_S:
        told.wrong.append(f"took {seconds:.1f} s to raise {error}")


def go_on(rank: int, world: int, store: str, seed: int, told: Told) -> None:
    """Without the lost rank: nothing of the old groups is left, and a new one works."""
    dist.destroy_process_group()
    if not cases.until(lambda: not ours()):
        told.left.append(f"threads of a lost group: {ours()}")
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    assert dist.group.WORLD is not None
    for call in calls_of(seed, world)[:5] if world > 1 else ():
        finish([(call, *call.start(dist.group.WORLD))], rank, told)
    dist.destroy_process_group()


def fail(group: Group, seed: int) -> Told:
    """A rank has no memory left in a call; all are told, and the next group works."""
    told = Told(pid=os.getpid(), held=held())
    victim = random.Random(seed).randrange(group.size())
    member = dist.new_group()
    start = time.monotonic()
    kept = cpu.encode

    def encode(*args: Any, **kwargs: Any) -> Any:
        if group.rank() == victim:
            raise MemoryError("no room")
        return kept(*args, **kwargs)

    try:
        with patch.object(cpu, "encode", encode):
            thinwire.all_reduce(torch.ones(500), group=member, codec="int8", algorithm="two_phase")
        told.wrong.append("a failure of one rank was not told")
    except MemoryError:
        if group.rank() != victim:
            told.wrong.append("a MemoryError on another rank")
    except Exception as error:
        judge(error, time.monotonic() - start, 0.0, f"rank {victim} failed", told)
    some_more(dist.new_group(), seed, told)
    return told


def differ(group: Group, seed: int) -> Told:
    """A rank makes another call than the others; all are told, and the group goes on."""
    told = Told(pid=os.getpid(), held=held())
    victim = random.Random(seed).randrange(group.size())
    member = dist.new_group()
    start = time.monotonic()
    codec = "lloyd3" if group.rank() == victim else "int6"
    numel = 700 + victim
    try:
        thinwire.all_reduce(torch.ones(numel), group=member, codec=codec, algorithm="two_phase")
        told.wrong.append("a call that differs was not noticed")
    except DisagreementError as error:
        judge(error, time.monotonic() - start, 0.0, "lloyd3", told)
    some_more(member, seed, told)
    return told


def some_more(group: Group, seed: int, told: Told) -> None:
    for call in calls_of(seed, group.size())[:5]:
        finish([(call, *call.start(group))], group.rank(), told)


def ours() -> list[str]:
    """Threads of thinwire that run."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("thinwire-")]


_first: dict[str, int] = {}  # what this rank held at first


def held() -> dict[str, int]:
    """Files, threads and kilobytes of this process; what ends by itself is given a moment."""
    cases.until(lambda: not _first or all(counted()[name] <= _first[name] for name in ("files", "threads")))
    found = counted()
    _first.update(_first or found)
    return found


def counted() -> dict[str, int]:
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024
    return {
        **{name: len(os.listdir(f"/proc/self/{at}")) for name, at in (("files", "fd"), ("threads", "task"))},
        "kB": resident,
    }


def grown(readings: Sequence[dict[str, int]]) -> list[str]:
    """What a process holds more of at the end than its first third allows.

    Files and threads: the most of the first third. Memory may grow once more by what it grew by in the first third,
    its first tenth left out: a leak of the same amount per call grows by more than twice that in the rest, caches that
    fill up by less. malloc gives memory back in pieces of 128 kB.
    """
    first = readings[len(readings) // 10 : len(readings) // 3 + 1]
    found = []
    for name in readings[0]:
        most = max(row[name] for row in first)
        bound = most if name != "kB" else 2 * most - min(row[name] for row in first) + 2 * 128
        if min(row[name] for row in readings[-3:]) > bound:  # what comes and goes is no leak
            found.append(f"{name}: {[row[name] for row in readings]}, expected at most {bound} at the end")
    return found


# --- the soak ---------------------------------------------------------------------------------------------------------


@dataclass
class Soak:
    """Counts by world, and what ranks held before every episode, by world and process."""

    pool: RankPool
    counts: Counter[tuple[int, str]] = field(default_factory=Counter)
    held: dict[tuple[int, int], list[dict[str, int]]] = field(default_factory=dict)

    def run(self, how: str, world: int, seed: int) -> None:
        """One episode; trouble is printed with what repeats it.

        One with a fault is run again where the machine has stood still meanwhile: ranks may have been late for that.
        """
        for left in range(TRIES, 0, -1):
            with Standstill() as stood:
                trouble = self._found(how, world, seed)
            if not trouble or how not in FAULTS or left == 1 or stood.seconds < STOOD_S:
                break
        for what, text in trouble:
            self._trouble(what, world, text, f"{how} {world} {seed}")

    def _found(self, how: str, world: int, seed: int) -> list[tuple[str, str]]:
        """What is wrong in an episode; the rest is counted."""
        try:
            answers = self._answers(how, world, seed)
        except RankError as error:
            return [("mismatches" if " failed on " in str(error) else "hangs", str(error))]
        self.counts[world, "operations"] += max(told.calls for told in answers)
        self.counts[world, "faults"] += how in FAULTS
        for told in answers:
            if told.held:
                self.held.setdefault((world, told.pid), []).append(told.held)
        wrong = [("mismatches", text) for told in answers for text in told.wrong]
        if len({tuple(told.digests) for told in answers}) > 1:
            wrong.append(("mismatches", "ranks hold different numbers"))
        return wrong + [("leaks", text) for told in answers for text in told.left]

    def _answers(self, how: str, world: int, seed: int) -> list[Told]:
        if how in ("kill", "stop"):
            with tempfile.TemporaryDirectory() as folder:
                fresh = self.pool.fresh(world)  # of their own: they end with the episode
                return fresh.run(episode, how, seed, folder, timeout=EPISODE_S, lost=world - 1)
        if how == "train" and world == 4:  # torch keeps the groups of HSDP's meshes, also without thinwire
            fresh = self.pool.fresh(world)
            try:
                return fresh.run(episode, how, seed, timeout=EPISODE_S)
            finally:
                fresh.close()
        return self.pool(world).run(episode, how, seed, timeout=EPISODE_S)

    def _trouble(self, what: str, world: int, text: str, again: str = "") -> None:
        self.counts[world, what] += 1
        print(
            f"{what}: {text}",
            *([f'  again: python tests/soak.py --episode "{again}"'] if again else []),
            sep="\n",
            flush=True,
        )

    def find_leaks(self) -> None:
        """Of ranks that lived through many episodes."""
        for (world, pid), readings in self.held.items():
            for text in grown(readings) if len(readings) >= EPISODES else ():
                self._trouble("leaks", world, f"process {pid} holds more {text}")

    def rows(self, seed: int, seconds: float) -> list[record.Row]:
        names = ("operations", "faults", "mismatches", "hangs", "leaks")
        worlds = sorted({world for world, _ in self.counts})
        return [
            {"world": world, **{name: self.counts[world, name] for name in names}, "seed": seed, "seconds": seconds}
            for world in worlds
        ]


def episodes(seed: int, seconds: float) -> Iterator[tuple[str, int, int]]:
    """(how, world, seed) until the time is up."""
    rng = random.Random(seed)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        how = rng.choices(("fault", "train", "peace"), (FAULTY, TRAINING, 1 - FAULTY - TRAINING))[0]
        yield rng.choice(FAULTS) if how == "fault" else how, rng.choice(WORLDS), rng.randrange(1 << 30)


def main() -> int:
    parser = argparse.ArgumentParser(description="Random calls and faults on ranks of this machine.")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the whole run; printed")
    parser.add_argument("--episode", help='"HOW WORLD SEED": this one alone')
    parser.add_argument("--json", help="where the record goes")
    asked = parser.parse_args()
    print(f"soak: seed {asked.seed}, {asked.seconds:g} s", flush=True)
    pool = RankPool()
    pool.imports(["soak"])
    soak = Soak(pool)
    start = time.monotonic()
    try:
        if asked.episode:
            how, world, seed = asked.episode.split()
            soak.run(how, int(world), int(seed))
        else:
            for episode in episodes(asked.seed, asked.seconds):
                soak.run(*episode)
        soak.find_leaks()
    finally:
        pool.close()
    rows = soak.rows(asked.seed, round(time.monotonic() - start, 1))
    totals = Counter[str]()
    for row in rows:
        totals.update({name: row[name] for name in ("operations", "faults", "mismatches", "hangs", "leaks")})
        print(", ".join(f"{name} {value}" for name, value in row.items()))
    print(", ".join(f"{name} {value}" for name, value in totals.items()))
    if asked.json:
        command = shlex.join(["python", "tests/soak.py", "--seconds", f"{asked.seconds:g}", "--seed", str(asked.seed)])
        conditions = {**record.conditions(CPU), "command": command}
        record.write(record.Record("soak", conditions, rows), asked.json)
    return int(any(totals[name] for name in ("mismatches", "hangs", "leaks")))


if __name__ == "__main__":
    import soak  # so that ranks find its functions by name

    sys.exit(soak.main())
