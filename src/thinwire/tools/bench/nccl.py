"""Ranks on NCCL: the card and the host of each, and what has to be there before they can start.

More ranks than cards share them; NCCL allows that from 2.30 on. With an NCCL_HOSTID of its own, a rank is a machine of
its own to NCCL, which then sends over TCP to it.
"""

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from thinwire.tools.bench.record import BenchError, Row

SHARING_FROM = (2, 30, 0)  # of NCCL
SHARE = "NCCL_MULTI_RANK_GPU_ENABLE"
# Ranks of one card want more multiprocessors together than it has, and then wait for each other for ever.
SHARED_CARD = {SHARE: "1", "NCCL_MAX_CTAS": "8", "NCCL_NVLS_ENABLE": "0"}
OVER_TCP = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket"}
MPS = "CUDA_MPS_PIPE_DIRECTORY"


@dataclass(frozen=True)
class NcclRanks:
    """How the ranks of a world are spread."""

    world: int
    cards: int
    hosts: int = 1  # that NCCL takes them for, equally many ranks on each

    @property
    def shared(self) -> bool:
        return self.world > self.cards

    @property
    def link(self) -> str:
        """What connects hosts; on one host the memory of a shared card, or whatever there is between cards."""
        return "tcp" if self.hosts > 1 else "memory" if self.shared else "cards"

    @property
    def nodes(self) -> int | None:
        """Hosts of several ranks; None where there is one, or where each rank is one."""
        return self.hosts if 1 < self.hosts < self.world else None

    def card(self, rank: int) -> torch.device:
        return torch.device("cuda", rank % self.cards)

    def environment(self, rank: int) -> dict[str, str]:
        """What NCCL has to be told in a rank's process; what the user has set there stays."""
        found = dict(SHARED_CARD) if self.shared else {}
        if self.hosts > 1:
            found |= OVER_TCP | {"NCCL_HOSTID": f"thinwire{rank * self.hosts // self.world}"}
        return {name: value for name, value in found.items() if name == "NCCL_HOSTID" or name not in os.environ}


def spread(worlds: Sequence[int], hosts: Sequence[int]) -> list[NcclRanks]:
    """Each world on each number of hosts that its ranks fill evenly; BenchError where they could not start."""
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        lacking = "a torch without NCCL" if torch.cuda.is_available() else "no CUDA device that torch sees"
        raise BenchError(f"--backend nccl: expected a GPU and NCCL, got {lacking}: run it on a GPU, or on gloo")
    cards = torch.cuda.device_count()
    for count in hosts:
        if all(world % count for world in worlds):
            told = ", ".join(map(str, worlds))
            raise BenchError(f"expected hosts that ranks fill evenly, got {count} for {told} ranks: take a divisor")
    if max(worlds) > cards:
        _check_sharing(max(worlds), cards)
    return [NcclRanks(world, cards, count) for world in worlds for count in hosts if world % count == 0]


def _check_sharing(world: int, cards: int) -> None:
    needs = f"{world} ranks on {cards} GPU{'s' if cards > 1 else ''} have to share, which needs"
    found = version()
    if found < SHARING_FROM:
        raise BenchError(
            f"{needs} NCCL {_text(SHARING_FROM)} or newer, got {_text(found)}: name a newer libnccl.so.2 in "
            "LD_PRELOAD, or run on more GPUs"
        )
    if os.environ.get(SHARE, "1") != "1":
        raise BenchError(f"{needs} {SHARE}=1, got {os.environ[SHARE]!r}: unset it, or run on more GPUs")


def version() -> tuple[int, ...]:
    """Of the NCCL that is loaded, which LD_PRELOAD may have put before the one torch was built with."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):  # linked into torch itself
        built: tuple[int, ...] = torch.cuda.nccl.version()
        return built[:3]
    return number.value // 10_000, number.value // 100 % 100, number.value % 100


def _text(found: tuple[int, ...]) -> str:
    return ".".join(map(str, found))


def columns(ranks: NcclRanks) -> Row:
    """What a row says of where its ranks were; without MPS ranks of one card take turns of milliseconds."""
    pipe = Path(os.environ.get(MPS, "/tmp/nvidia-mps")) / "control"
    return {"cards": ranks.cards, "nccl": _text(version()), "mps": pipe.exists() if ranks.shared else None}
