"""The rank pool itself: reuse, results, and what is said when a rank raises, dies or hangs."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cases import on_ranks
from ranks import RankPool


def sum_ranks(group: dist.ProcessGroup, scale: float) -> torch.Tensor:
    x = torch.tensor([group.rank() * scale, 1.0])
    dist.all_reduce(x, group=group)
    return x


def pid(group: dist.ProcessGroup) -> int:
    return os.getpid()


def raise_on_odd(group: dist.ProcessGroup) -> None:
    if group.rank() % 2:
        raise KeyError(f"odd one out: {group.rank()}")


def raise_before_collective(group: dist.ProcessGroup) -> None:
    if group.rank() == 0:
        raise ValueError("rank 0 never gets there")
    dist.barrier(group=group)


def hang_in_collective(group: dist.ProcessGroup) -> None:
    if group.rank() != 0:
        dist.barrier(group=group)


def die_on_one(group: dist.ProcessGroup) -> None:
    if group.rank() == 1:
        os.abort()


def unpicklable(group: dist.ProcessGroup) -> object:
    return lambda: None


def test_exceptions_name_their_ranks_and_leave_the_pool_alone(ranks: RankPool) -> None:
    pids = ranks(4).run(pid)
    with pytest.raises(RuntimeError, match=r"raise_on_odd \(world 4\) failed on ranks 1, 3") as caught:
        ranks(4).run(raise_on_odd)
    assert "KeyError: 'odd one out: 3'" in str(caught.value)
    with pytest.raises(RuntimeError, match=r"unpicklable \(world 1\) failed on rank 0"):
        ranks(1).run(unpicklable)
    assert ranks(4).run(pid) == pids


def test_stuck_ranks_are_named_and_killed(ranks: RankPool) -> None:
    pids, start = ranks(3).run(pid), time.monotonic()
    with pytest.raises(RuntimeError, match=r"\(world 3\) got no answer from ranks (0, )?1, 2 within 0.5 s") as caught:
        ranks(3).run(hang_in_collective, timeout=0.5)
    assert time.monotonic() - start < 60
    assert str(caught.value).count("in hang_in_collective") == 2  # the stacks
    assert not any(alive(pid) for pid in pids)
    assert [result[1].item() for result in ranks(3).run(sum_ranks, 1.0)] == [3.0, 3.0, 3.0]


def test_a_failure_does_not_wait_for_those_it_left_hanging(ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ranks.GRACE_S", 0.5)
    ranks(2).run(pid)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"failed on rank 0 and got no answer from rank 1") as caught:
        ranks(2).run(raise_before_collective)
    assert "rank 0 never gets there" in str(caught.value)
    assert time.monotonic() - start < 60


def test_a_dead_rank_is_named(ranks: RankPool) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)failed on rank 1.*died with exit status -6.*in die_on_one"):
        ranks(2).run(die_on_one)


@on_ranks(2, gives=0)
def number(group: dist.ProcessGroup) -> int:
    return group.rank()


@on_ranks(2)
def not_agreed(group: dist.ProcessGroup) -> int:
    return group.rank()


@pytest.mark.parametrize("body", [number, not_agreed])
def test_a_body_that_returns_something_else_fails(ranks: RankPool, body: Callable[..., None]) -> None:
    with pytest.raises(AssertionError, match=r"expected 0 on all ranks, got \{1: 1\}"):
        body(ranks=ranks)


def test_ranks_end_when_their_pipes_close(ranks: RankPool) -> None:
    """As they do when the test process ends."""
    world = ranks.fresh(2)
    pids = world.run(pid)
    world.close()
    assert not any(alive(pid) for pid in pids)


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"  # an orphan may wait to be reaped
