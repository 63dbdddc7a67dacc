"""The collectives benchmark on NCCL, with this machine's GPUs spread over ranks as one host or as several.

More ranks than GPUs share them, which needs NCCL 2.30 or newer, and MPS, without which they take turns of milliseconds.
NCCL treats ranks with different NCCL_HOSTIDs as different machines and sends over TCP between them. Every codec runs in
both algorithms of a sum. Where each rank has a GPU, `torchrun ... -m thinwire bench collectives` does without this.
"""

import ctypes
import os
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist

from benchmarks.command import start
from thinwire.errors import CodecError
from thinwire.tools.bench import collectives
from thinwire.tools.bench.collectives import CollectiveCase, TimedCodec
from thinwire.tools.bench.record import Progress, Record, Row, collect
from thinwire.tools.bench.timing import Effort
from thinwire.tools.cli import flags, screen
from thinwire.tools.cli.bench import Rounds, Worlds, deliver
from thinwire.tools.cli.flags import Json, Quick, Words, option
from thinwire.tools.local import launch, link as links
from thinwire.tools.local.launch import RankSetup
from thinwire.tools.local.link import BenchError

# Ranks of one GPU want more multiprocessors together than it has, and would wait for each other forever.
SHARED_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "8", "NCCL_NVLS_ENABLE": "0"}
OVER_TCP = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket"}
MPS = "CUDA_MPS_PIPE_DIRECTORY"
CODECS = (collectives.PLAIN, "bf16", "int8", "lloyd4", "lloyd2")
NUMELS = (1_000, 256_000, 1_000_000, 4_000_000, 16_000_000, 64_000_000)
QUICK_NUMELS = (1_000, 1_000_000)
FULL = Effort(rounds=5, most=50, seconds=0.3)
QUICK = Effort(rounds=3, most=10, seconds=0.1)


@dataclass(frozen=True, kw_only=True)
class NcclRanks(RankSetup):
    """How the ranks of a world are spread."""

    gpus: int
    hosts: int = 1  # that NCCL takes them for, equally many ranks on each

    @property
    def shared(self) -> bool:
        return self.world > self.gpus

    @property
    def link_name(self) -> str:
        """What connects hosts; on one host the memory of a shared GPU, or whatever connects its GPUs."""
        return "tcp" if self.hosts > 1 else "memory" if self.shared else "gpus"

    @property
    def nodes(self) -> int | None:
        """Hosts of several ranks; None where there is one, or where each rank is one."""
        return self.hosts if 1 < self.hosts < self.world else None

    def device(self, rank: int) -> torch.device:
        return torch.device("cuda", rank % self.gpus)

    def columns(self) -> dict[str, str | int | bool | None]:
        mps = (Path(os.environ.get(MPS, "/tmp/nvidia-mps")) / "control").exists() if self.shared else None
        return {**super().columns(), "nodes": self.nodes, "cards": self.gpus, "nccl": nccl_version(), "mps": mps}

    def environment(self, rank: int) -> dict[str, str]:
        """What NCCL needs in a rank's environment; what the user has set there stays."""
        found = dict(SHARED_GPU) if self.shared else {}
        if self.hosts > 1:
            found |= OVER_TCP | {"NCCL_HOSTID": f"thinwire{rank * self.hosts // self.world}"}
        return {name: value for name, value in found.items() if name == "NCCL_HOSTID" or name not in os.environ}

    def join(self, rank: int, host: str | None, path: str, **how: Any) -> None:
        os.environ.update(self.environment(rank))  # before anything of CUDA
        torch.cuda.set_device(self.device(rank))
        super().join(rank, host, path, device_id=self.device(rank), **how)


def nccl_ranks(worlds: Sequence[int], hosts: Sequence[int]) -> list[NcclRanks]:
    """Each world on each number of hosts that its ranks fill evenly; BenchError where they could not start."""
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        lacking = "a torch without NCCL" if torch.cuda.is_available() else "no CUDA device that torch sees"
        raise BenchError(f"expected a GPU and NCCL, got {lacking}: run it on a GPU, or thinwire bench collectives")
    for count in hosts:
        if all(world % count for world in worlds):
            listed = ", ".join(map(str, worlds))
            raise BenchError(f"expected a number of hosts that divides {listed} ranks evenly, got {count}")
    gpus = torch.cuda.device_count()
    return [NcclRanks(world=world, gpus=gpus, hosts=count) for world in worlds for count in hosts if world % count == 0]


def nccl_version() -> str:
    """The version of the NCCL that is loaded, which LD_PRELOAD may have put before torch's own."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):  # linked into torch itself
        return ".".join(map(str, torch.cuda.nccl.version()[:3]))
    return f"{number.value // 10_000}.{number.value // 100 % 100}.{number.value % 100}"


def entries(names: Sequence[str]) -> list[TimedCodec]:
    """Each codec in both algorithms of a sum."""
    return list(dict.fromkeys(one for world in (2, 4) for one in collectives.entries(names, world)))


def run(
    worlds: Sequence[int],
    hosts: Sequence[int],
    *,
    numels: Sequence[int] | None = None,
    codecs: Sequence[str] = CODECS,
    rounds: int | None = None,
    quick: bool = False,
    progress: Progress = iter,
) -> Record:
    """A record of kind "collectives"."""
    sizes = numels or (QUICK_NUMELS if quick else NUMELS)
    cases = [
        CollectiveCase(setup, numel, tuple(entries(codecs)))
        for setup, numel in product(nccl_ranks(worlds, hosts), sizes)
    ]
    effort = Effort(rounds) if rounds else QUICK if quick else FULL
    asked = [entry.algorithm for case in cases for entry in case.entries]

    def rows() -> Generator[Row]:
        found = collectives.rows(cases, effort, progress)
        yield from ({**row, "asked": algorithm} for row, algorithm in zip(found, asked, strict=True))

    return collect("collectives", torch.device("cuda"), rows(), launch.THREADS)


def command(
    world: Worlds = None,
    hosts: Annotated[Words, option("Hosts that NCCL takes the ranks for; default 1.", "N,M")] = None,
    numel: Annotated[Words, option("Floats; default 1000 to 64 million.", "N,M")] = None,
    codecs: Annotated[Words, option(f"Codecs, auto, plain; default {','.join(CODECS)}.")] = None,
    rounds: Rounds = None,
    json: Json = None,
    quick: Quick = False,
) -> None:
    """Sums with codecs beside torch's own in fp32 and bf16 on NCCL; by default 2 and 4 ranks."""
    names = flags.specs(codecs) or CODECS
    with screen.usage_errors("--codecs", CodecError):
        entries(names)
    run_it = partial(
        run,
        flags.counts(world, "--world", 2, links.MOST_HOSTS) or collectives.WORLDS,
        flags.counts(hosts, "--hosts") or [1],
        numels=flags.counts(numel, "--numel"),
        codecs=names,
        rounds=rounds,
        quick=quick,
    )
    deliver(run_it, json)


if __name__ == "__main__":
    from benchmarks import collectives_nccl as study  # under its own name, by which ranks find its functions

    start(study.command)
