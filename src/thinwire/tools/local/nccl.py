"""NCCL ranks that this machine's GPUs are spread over, as one host or as several.

More ranks than GPUs share them, which needs NCCL 2.30 or newer, and MPS, without which they take turns of milliseconds.
NCCL treats ranks with different NCCL_HOSTIDs as different machines and sends over TCP between them.
"""

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from thinwire.tools.local.link import BenchError

# Ranks of one GPU want more multiprocessors together than it has, and would wait for each other forever.
SHARED_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "8", "NCCL_NVLS_ENABLE": "0"}
OVER_TCP = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket"}
MPS = "CUDA_MPS_PIPE_DIRECTORY"


@dataclass(frozen=True)
class NcclRanks:
    """How the ranks of a world are spread."""

    world: int
    gpus: int
    hosts: int = 1  # that NCCL takes them for, equally many ranks on each

    @property
    def shared(self) -> bool:
        return self.world > self.gpus

    @property
    def link(self) -> str:
        """What connects hosts; on one host the memory of a shared GPU, or whatever connects its GPUs."""
        return "tcp" if self.hosts > 1 else "memory" if self.shared else "gpus"

    @property
    def nodes(self) -> int | None:
        """Hosts of several ranks; None where there is one, or where each rank is one."""
        return self.hosts if 1 < self.hosts < self.world else None

    def gpu(self, rank: int) -> torch.device:
        return torch.device("cuda", rank % self.gpus)

    def columns(self) -> dict[str, str | int | bool | None]:
        """Where a row's ranks ran."""
        mps = (Path(os.environ.get(MPS, "/tmp/nvidia-mps")) / "control").exists() if self.shared else None
        return {"nodes": self.nodes, "cards": self.gpus, "nccl": nccl_version(), "mps": mps}

    def environment(self, rank: int) -> dict[str, str]:
        """What NCCL needs in a rank's environment; what the user has set there stays."""
        found = dict(SHARED_GPU) if self.shared else {}
        if self.hosts > 1:
            found |= OVER_TCP | {"NCCL_HOSTID": f"thinwire{rank * self.hosts // self.world}"}
        return {name: value for name, value in found.items() if name == "NCCL_HOSTID" or name not in os.environ}


def nccl_ranks(worlds: Sequence[int], hosts: Sequence[int]) -> list[NcclRanks]:
    """Each world on each number of hosts that its ranks fill evenly; BenchError where they could not start."""
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        lacking = "a torch without NCCL" if torch.cuda.is_available() else "no CUDA device that torch sees"
        raise BenchError(f"--backend nccl: expected a GPU and NCCL, got {lacking}: run it on a GPU, or on gloo")
    for count in hosts:
        if all(world % count for world in worlds):
            listed = ", ".join(map(str, worlds))
            raise BenchError(f"expected a number of hosts that divides {listed} ranks evenly, got {count}")
    gpus = torch.cuda.device_count()
    return [NcclRanks(world, gpus, count) for world in worlds for count in hosts if world % count == 0]


def nccl_version() -> str:
    """The version of the NCCL that is loaded, which LD_PRELOAD may have put before torch's own."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):  # linked into torch itself
        return ".".join(map(str, torch.cuda.nccl.version()[:3]))
    return f"{number.value // 10_000}.{number.value // 100 % 100}.{number.value % 100}"
