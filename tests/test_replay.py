"""Averages replayed as CUDA graphs, without a GPU: numbers in memory, and what is captured when."""

import os
import struct
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from ranks import RankPool
from test_faults import failure
from thinwire.collectives import replay, transport
from thinwire.collectives.replay import Replay
from thinwire.integrations.options import DDPOptions
from thinwire.kernels import hashing
from thinwire.kernels.later import Memo, Number, numbers

CPU = torch.device("cpu")
BIG = (1 << 63) + 12345


def split(number: int) -> tuple[int, int]:
    """The halves of 64 bits, signed."""
    low, high = struct.unpack("<2i", struct.pack("<Q", number))
    return low, high


def test_numbers_are_made_at_once_or_stand_in_memory() -> None:
    memo = Memo(CPU)
    step, call = memo.begin(BIG, 7)
    placed = [numbers(split, step ^ 5), numbers(lambda n: (n, -n), call + 2), numbers(split, step)]
    found = [[int(x) for x in row] for row in placed]
    assert found == [[*split(BIG ^ 5)], [9, -9], [*split(BIG)]]
    assert numbers(split, BIG ^ 5) == split(BIG ^ 5)
    memo.write(3, 1 << 30)
    assert [[int(x) for x in row] for row in placed] == [[*split(6)], [(1 << 30) + 2, -(1 << 30) - 2], [*split(3)]]


class Graph:
    """Stands in for a CUDA graph: what is launched while it is captured runs when it is replayed."""

    capturing: "Graph | None" = None

    def __init__(self) -> None:
        self.launches: list[Callable[[], None]] = []

    def capture_begin(self, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        Graph.capturing = self

    def capture_end(self) -> None:
        Graph.capturing = None

    def replay(self) -> None:
        for launch in self.launches:
            launch()


class Job:
    """A program that notes the step and the call at every run, in a channel that is none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.captured)
        self.captured = False  # by the user
        self.noted = 0
        self.link = SimpleNamespace(sent=0, received=0, _group=lambda: self, note=self.note)
        channel: Any = SimpleNamespace(transport=self.link)
        self.replay = Replay(channel)
        self.seen: list[tuple[int, int]] = []
        self.launched = 0

    def note(self) -> None:
        self.noted += 1

    def launch(self, buffer: Tensor, room: Any, mixed: Number, call: Number) -> None:
        self.launched += 1
        self.link.sent += 100
        self.link.received += 10
        low, high = numbers(split, mixed)
        (number,) = numbers(lambda n: (n,), call)

        def run() -> None:
            assert all(isinstance(found, Tensor) for found in (low, high, number))
            buffer.add_(1)
            self.seen.append((int(low) & 0xFFFFFFFF | (int(high) & 0xFFFFFFFF) << 32, int(number)))

        if Graph.capturing is None:
            run()
        else:
            Graph.capturing.launches.append(run)

    def step(self, room: Any, buffer: Tensor, step: int) -> None:
        self.replay.run(self.launch, room, buffer, hashing.mix64(step), step + 1)


def rooms_of(count: int) -> Any:
    return [SimpleNamespace(buffer=torch.zeros(8), device=CPU) for _ in range(count)]


def test_a_bucket_is_launched_then_captured_then_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it lies: what ranks do must not depend on addresses."""
    job = Job(monkeypatch)
    rooms = rooms_of(2)
    buffers = [torch.zeros(5) for _ in range(3)]
    want = []
    for step in range(11):
        x = buffers[0 if step < 1 else 1 if step < 7 else 2]
        if step == 6:
            rooms[0].buffer = torch.zeros(16)
        job.step(rooms[step % 2], x, step)
        want.append((hashing.mix64(step), step + 1))
        assert job.seen == want
    assert [x.tolist() for x in buffers] == [[n] * 5 for n in (1, 4, 4)]  # the second is the place of the graphs
    assert job.launched == 2 + 2  # in each room once by itself and once into a graph
    assert (job.link.sent, job.link.received) == (1100, 110)
    assert job.noted == 11 - 2  # replays: torch's watchdog does not see them


def test_a_forked_child_keeps_graphs_without_touching_them(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch)
    (room,) = rooms_of(1)
    for step in range(3):
        job.step(room, torch.zeros(5), step)
    assert job.replay in replay._live
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        free = replay._lock.acquire(blocking=False)
        os.write(writing, bytes([free, job.replay in replay._parents, not replay._live]))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 9) == bytes([True] * 3)
    os.close(reading)
    os.close(writing)
    assert not replay._parents
    assert not replay._lock.locked()


def test_a_graph_holds_what_it_reads_and_goes_with_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch)
    (room,) = rooms_of(1)
    x = torch.zeros(5)
    held = weakref.ref(x.untyped_storage())
    for step in range(3):
        job.step(room, x, step)
    job.captured = True
    with pytest.raises(thinwire.CollectiveError, match="a CUDA graph of yours"):
        replay.check_not_captured()
    job.captured = False
    replay.check_not_captured()
    del x
    assert held() is not None
    other: Any = object()
    job.replay.release(other)
    assert held() is not None
    group: Any = job
    for drop in transport.before_abort:
        drop(group)
    assert held() is None


def refused(group: dist.ProcessGroup) -> str:
    """What the first step says on gloo."""
    model = DistributedDataParallel(nn.Linear(40, 40))
    thinwire.compress_ddp(model, "int8", replay=True)
    return str(failure(lambda: model(torch.ones(2, 40)).sum().backward()))


def test_replay_is_refused_where_there_is_no_stream(ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    for said in ranks(2).run(refused):
        assert "replay=True: " in said, said
        assert "a group on NCCL" in said, said
    odd: Any = 1
    with pytest.raises(thinwire.CollectiveError, match="replay must be True or False, got 1"):
        DDPOptions("int8", replay=odd)
    for name, value in (("TORCH_NCCL_BLOCKING_WAIT", "1"), ("NCCL_GRAPH_MIXING_SUPPORT", "0")):
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            with pytest.raises(thinwire.CollectiveError, match=f"does not go with {name}={value}"):
                DDPOptions("int8", replay=True)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    with pytest.raises(thinwire.CollectiveError, match="needs NCCL_GRAPH_REGISTER=0"):
        DDPOptions("int8", replay=True)
    DDPOptions("int8", replay=False)
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    DDPOptions("int8", replay=True)
    assert "replay" not in DDPOptions("int8").agreed
