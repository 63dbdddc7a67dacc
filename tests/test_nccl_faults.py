"""A rank dies or stops on NCCL: in first calls, and in all with TORCH_NCCL_BLOCKING_WAIT=1, the other names it in time.

What ranks need is in tests/test_nccl.py. Without MPS: a client of MPS that is killed takes the others with it.
"""

import functools
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C import _distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

import thinwire
from benchmarks import collectives_nccl
from cases import in_time, thorough, until
from ranks import RankPool
from test_faults import SOON_S, failure, threads
from test_nccl import Group, on_nccl, on_worlds

LATE_S = 4.0  # the timeout of groups in which a rank is lost
HOW: Any = {"codec": "int8", "algorithm": "two_phase"}


def calls_of(verb: str, group: Group, device: torch.device) -> Callable[[int], Any]:
    """A call of some kind on so many elements, whose end the host waits for."""
    if verb == "ddp":
        model = DistributedDataParallel(nn.Linear(40, 40).to(device), process_group=group)
        thinwire.compress_ddp(model, "int8")
        return lambda numel: model(torch.ones(2, 40, device=device)).sum().backward()
    return lambda numel: thinwire.all_reduce(torch.ones(numel, device=device), group=group, **HOW)


def lose(group: Group, verb: str, first: bool, how: int, folder: str) -> dict[str, Any]:
    """Rank 1 ends in the middle of calls, of which the next is the first of its kind or not; what rank 0 finds."""
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "0" if first else "1"
    warm = on_nccl(group)  # its timeout is long: kernels are compiled
    call = calls_of(verb, warm.group, warm.device)
    for numel in (5000, 6000):
        call(numel)
    torch.cuda.synchronize()
    dist.barrier(group)
    member = dist.new_group(backend="nccl", timeout=timedelta(seconds=LATE_S))
    call = calls_of(verb, member, warm.device)
    for _ in range(3):
        call(5000)
    torch.cuda.synchronize()
    dist.barrier(group)
    if group.rank() == 1:
        os.kill(os.getpid(), how)
    time.sleep(0.2)
    start = time.monotonic()
    error = failure(functools.partial(call, 6000 if first else 5000))
    seconds = time.monotonic() - start
    x = torch.ones(5, device=warm.device)
    refused = failure(functools.partial(thinwire.all_reduce, x, group=member, **HOW))
    torch.cuda.synchronize()  # nothing on the GPU waits for the other rank any more
    name = member.group_name
    warm.group._get_backend(warm.device).abort()  # torch waits for ever to close a group whose other rank has stopped
    on_nccl.cache_clear()
    del call, member, warm
    dist.destroy_process_group()
    ended = until(lambda: not threads())
    store = c10d.FileStore(f"{folder}/again", 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, timeout=timedelta(seconds=60))
    again = torch.full((3,), 127.0, device="cuda")
    thinwire.all_reduce(again, **HOW)
    return {
        "error": f"{type(error).__name__}: {error}",
        "refused": str(refused),
        "group": name,
        "seconds": seconds,
        "again": again.tolist(),
        "ended": ended or threads(),
    }


LOST = [
    ("all_reduce", False, signal.SIGKILL),
    ("ddp", False, signal.SIGSTOP),
    ("all_reduce", True, signal.SIGSTOP),
    *thorough(("all_reduce", False, signal.SIGSTOP), ("ddp", False, signal.SIGKILL)),
]


@on_worlds(2)
@pytest.mark.parametrize(("verb", "first", "how"), LOST)
@in_time
def test_a_lost_rank_is_named_and_the_other_goes_on(
    ranks: RankPool, tmp_path: Path, world: int, verb: str, first: bool, how: signal.Signals
) -> None:
    folder = tempfile.mkdtemp(dir=tmp_path)
    (told,) = ranks.fresh(world).run(lose, verb, first, how, folder, lost=1)
    text = told["error"]
    assert re.search("rank 0 (waited for|lost) rank 1 in ", text), text  # torch's watchdog may be the first to see it
    assert ("gradients(" if verb == "ddp" else "all_reduce(") in text, text
    assert f"of group '{told['group']}')" in text, text
    assert 0.5 * LATE_S < told["seconds"] < LATE_S + SOON_S, told
    assert "create a new group to continue" in told["refused"], told
    assert told["again"] == [127.0] * 3
    assert told["ended"] is True, told


def stop_in_steps(group: Group) -> None:
    """Rank 1 stops in steps of DDP; the other waits for the GPU, which waits for rank 1."""
    place = on_nccl(group)
    member = dist.new_group(backend="nccl", timeout=timedelta(seconds=LATE_S))
    model = DistributedDataParallel(nn.Linear(40, 40).to(place.device), process_group=member)
    thinwire.compress_ddp(model, "int8")
    x = torch.ones(2, 40, device=place.device)
    for _ in range(8):
        model(x).sum().backward()
    torch.cuda.synchronize()
    dist.barrier(group)
    if group.rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    model(x).sum().backward()
    torch.cuda.synchronize()


def die_over_tcp(group: Group) -> None:
    """Rank 1 dies on what NCCL takes for another host; the other waits for the GPU, which waits for rank 1."""
    os.environ.update(collectives_nccl.OVER_TCP, NCCL_HOSTID=f"host{group.rank()}")
    place = on_nccl(group)  # its timeout is long
    x = torch.ones(5000, device=place.device)
    for _ in range(3):
        thinwire.all_reduce(x, group=place.group, **HOW)
    torch.cuda.synchronize()
    dist.barrier(group)
    if group.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    thinwire.all_reduce(x, group=place.group, **HOW)
    torch.cuda.synchronize()


@on_worlds(2)
@in_time
def test_nobody_waits_for_a_connection_that_nccl_has_lost(ranks: RankPool, world: int) -> None:
    start = time.monotonic()
    with pytest.raises(RuntimeError):  # torch's watchdog raises in the rank, or ends it
        ranks.fresh(world).run(die_over_tcp, lost=1)
    assert time.monotonic() - start < 120


@on_worlds(2)
@in_time
def test_a_rank_that_stops_ends_the_others(ranks: RankPool, world: int) -> None:
    start = time.monotonic()
    with pytest.raises(RuntimeError):  # torch's watchdog raises in the rank, or ends it
        ranks.fresh(world).run(stop_in_steps, lost=1)
    assert time.monotonic() - start > LATE_S
