"""Ranks that torchrun started: where each one is, their group, and how long a message takes."""

import contextlib
import math
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from thinwire.errors import AdviceError, ThinwireError

ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}  # by device
ROUNDS = 5


class RankPlace(NamedTuple):
    """What torchrun's environment says of this rank."""

    rank: int
    world: int
    local_rank: int
    per_node: int

    @property
    def device(self) -> torch.device:
        """A GPU where every rank of this machine has one of its own."""
        has_gpu = torch.cuda.device_count() >= max(self.per_node, self.local_rank + 1)
        return torch.device("cuda", self.local_rank) if has_gpu else torch.device("cpu")


def place() -> RankPlace | None:
    """This rank's place under torchrun; None elsewhere, AdviceError where the environment makes no sense."""
    if any(name not in os.environ for name in ENVIRONMENT):
        return None
    world = _number("WORLD_SIZE", 1)
    rank = _number("RANK", 0, world - 1)
    per_node = _number("LOCAL_WORLD_SIZE", 1, world, default="1")
    return RankPlace(rank, world, _number("LOCAL_RANK", 0, default="0"), per_node)


def _number(name: str, least: int, most: float = math.inf, default: str = "") -> int:
    text = os.environ.get(name, default)
    if not (text.isdecimal() and least <= int(text) <= most):
        allowed = f"{least} .. {most}" if most < math.inf else f"{least} or more"
        raise AdviceError(f"{name} must be a whole number, {allowed}, got {text!r}")
    return int(text)


@contextlib.contextmanager
def job(device: torch.device, timeout: timedelta | None = None) -> Iterator[None]:
    """The group of all ranks, made unless there is one; what was made ends with the block. timeout: torch's default."""
    made = not dist.is_initialized()
    if made:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        try:
            dist.init_process_group(BACKENDS[device.type], timeout=timeout)
        except (RuntimeError, ValueError) as error:
            raise ThinwireError(f"the ranks did not find each other ({error}); start them all with torchrun") from None
    try:
        yield
    finally:
        if made:
            dist.destroy_process_group()


def exchange_s(size: int, device: torch.device) -> list[float]:
    """Seconds until `size` bytes from the rank before this one are here, round by round; all ranks send at once."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sent = torch.zeros(size, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    taken = []
    for _ in range(ROUNDS + 1):  # the first connects
        dist.barrier()
        synchronize(device)
        start = time.perf_counter()
        receive = dist.P2POp(dist.irecv, received, (rank - 1) % world)
        send = dist.P2POp(dist.isend, sent, (rank + 1) % world)
        first, *others = dist.batch_isend_irecv([receive, send])
        first.wait()
        synchronize(device)
        taken.append(time.perf_counter() - start)
        for work in others:
            work.wait()
    return taken[1:]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
