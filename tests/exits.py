"""Jobs of two ranks that end in every way a script may end; prints the exit status of each rank that is not 0.

    python exits.py fork 20 verb ddp          jobs are forked from a process that has imported what they need
    python exits.py spawn 20 verb             ... started by torch.multiprocessing.spawn
    torchrun --nproc-per-node 2 exits.py torchrun 1 verb

Every job runs to the end of its interpreter: a thread that still runs then aborts the process.
"""

import functools
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire

WORLD = 2
_left: list[object] = []  # what a script still holds when it ends
_sum = functools.partial(thinwire.all_reduce, codec="int8", algorithm="two_phase")


def verb(rank: int) -> None:
    thinwire.all_reduce(torch.ones(5000), codec="int8", algorithm="one_shot")


def never_waited(rank: int) -> None:
    _sum(torch.ones(500_000), async_op=True)


def held(rank: int) -> None:
    """The script holds a group that was destroyed, and the work of its last call."""
    group = dist.new_group([0, 1])
    _left.extend((group, _sum(torch.ones(5000), group=group, async_op=True)))


def unanswered(rank: int) -> None:
    """Another rank never makes the call, and ends."""
    _sum(torch.ones(5000))
    if rank == 0:
        _left.append(_sum(torch.ones(5000), async_op=True))


def exits(rank: int) -> None:
    """The script exits by itself while a call is under way, which leaves its exit code alone."""
    told = [os.getpid()]
    dist.broadcast_object_list(told)
    _sum(torch.ones(500))
    if rank == 0:
        _left.append(_sum(torch.ones(500), async_op=True))
        sys.exit(7)
    while True:  # until the other has ended
        try:
            os.kill(told[0], 0)
            time.sleep(0.02)
        except ProcessLookupError:
            os._exit(0)


def ddp(rank: int) -> None:
    model = DistributedDataParallel(nn.Linear(64, 64))
    thinwire.compress_ddp(model, "int8")
    _train(model)


def fsdp(rank: int) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    fully_shard(model, mesh=DeviceMesh("cpu", [0, 1]))
    thinwire.compress_fsdp(model, "int8", "int8")
    _train(model)


def diloco(rank: int) -> None:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    outer = thinwire.DiLoCo(model, optimizer, every=1, codec="int8")
    _left.append(outer)
    _train(model, optimizer)


def _train(model: nn.Module, optimizer: Any = None) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    loss: Tensor = model(torch.ones(4, 64)).sum()
    loss.backward()
    optimizer.step()


KINDS: dict[str, Callable[[int], None]] = {
    f.__name__: f for f in (verb, never_waited, held, unanswered, exits, ddp, fsdp, diloco)
}


def job(rank: int, kind: str, where: str) -> None:
    """One rank of a job, up to the end of its script."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=WORLD)
    KINDS[kind](rank)
    dist.destroy_process_group()


def main() -> None:
    start, times, *kinds = sys.argv[1:]
    if start == "torchrun":
        job(int(os.environ["RANK"]), kinds[0], "env://")
        return
    gc.freeze()  # collections of forked ranks need not look at what was imported
    for kind in kinds:
        for _ in range(int(times)):
            where = f"file://{tempfile.mktemp(prefix='thinwire-exit-')}"
            if start == "spawn":
                try:
                    torch.multiprocessing.spawn(job, (kind, where), WORLD)
                except torch.multiprocessing.ProcessException as error:
                    print(kind, error, flush=True)
            elif _fork(kind, where):
                return  # the script of a rank ends here


def _fork(kind: str, where: str) -> bool:
    """Whether this is one of the forked ranks; the parent waits for them."""
    ranks = []
    for rank in range(WORLD):
        pid = os.fork()
        if pid == 0:
            job(rank, kind, where)
            return True
        ranks.append(pid)
    for rank, pid in enumerate(ranks):
        if status := os.waitpid(pid, 0)[1]:
            print(f"{kind}: rank {rank} ended with status {os.waitstatus_to_exitcode(status)}", flush=True)
    return False


if __name__ == "__main__":
    main()
