"""The ranks of a benchmark: processes to which functions are sent.

    with launch.ranks(4, link) as world:
        parts = world.run(fn, *args)      # [fn(*args) on rank 0, on rank 1, ...]; fn is pickled by name

Ranks run gloo over loopback, or on hosts behind shaped links, one or several per host; or NCCL, on this machine's GPUs.
They live and die with the block: a rank that loses the pipe to this process exits, whatever it was doing.

More NCCL ranks than GPUs share them, which needs NCCL 2.30 or newer. NCCL treats ranks with different NCCL_HOSTIDs as
different machines and sends over TCP between them.
"""

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from thinwire.errors import ThinwireError
from thinwire.tools.local import link as links
from thinwire.tools.local.link import BenchError, ShapedLink

STOP_S = 20.0
THREADS = 1
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
# Ranks of one GPU want more multiprocessors together than it has, and would wait for each other forever.
SHARED_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "8", "NCCL_NVLS_ENABLE": "0"}
OVER_TCP = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket"}
MPS = "CUDA_MPS_PIPE_DIRECTORY"


class RankError(ThinwireError, RuntimeError):
    """A rank of a benchmark raised, died or did not start."""


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


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """How the ranks of a case run: gloo over loopback or a shaped link, or NCCL."""

    world: int
    link: ShapedLink | None = None
    on_nccl: NcclRanks | None = None

    @property
    def link_name(self) -> str:
        return self.on_nccl.link if self.on_nccl else str(self.link or "loopback")

    def device(self, rank: int) -> torch.device:
        return self.on_nccl.gpu(rank) if self.on_nccl else torch.device("cpu")

    def columns(self) -> dict[str, str | int | bool | None]:
        """Where a row's ranks ran; without MPS, ranks that share a GPU take turns of milliseconds."""
        ranks = self.on_nccl
        found: dict[str, str | int | bool | None] = {
            "world": self.world,
            "nodes": ranks.nodes if ranks else None,
            "link": self.link_name,
            "threads": THREADS,
            "cores": os.cpu_count(),
            "backend": "nccl" if ranks else "gloo",
        }
        if ranks is not None:
            pipe = Path(os.environ.get(MPS, "/tmp/nvidia-mps")) / "control"
            found |= {"cards": ranks.gpus, "nccl": nccl_version(), "mps": pipe.exists() if ranks.shared else None}
        return found


def setups(worlds: Sequence[int], link: ShapedLink | None, hosts: Sequence[int] | None) -> list[RankSetup]:
    """One for each world; with `hosts`, on NCCL as so many hosts. An error where they could not start here."""
    if link is not None:
        links.check()
    if hosts is None:
        return [RankSetup(world=world, link=link) for world in worlds]
    return [RankSetup(world=one.world, on_nccl=one) for one in nccl_ranks(worlds, hosts)]


class World:
    def __init__(self, pipes: Sequence[Connection], folder: Path) -> None:
        self._pipes = pipes  # in rank order
        self._folder = folder  # of what they write on standard error

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """[fn(*args) on rank 0, on rank 1, ...], or RankError with what the first rank that failed says."""
        self.send(pickle.dumps((fn, args)))
        return self.answers()

    def send(self, call: bytes) -> None:
        """Send a pickled call to every rank; an empty one ends it."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # answers() notices a rank that died
                pipe.send_bytes(call)

    def answers(self) -> list[Any]:
        found: dict[int, Any] = {}
        while len(found) < len(self._pipes):
            silent = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in found}
            for pipe in wait(list(silent)):
                assert isinstance(pipe, Connection)
                found[silent[pipe]] = self._receive(silent[pipe], pipe)
        return [found[rank] for rank in range(len(self._pipes))]

    def _receive(self, rank: int, pipe: Connection) -> Any:
        try:
            good, value = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            texts = (path.read_text(errors="replace").strip() for path in sorted(self._folder.glob("*.log")))
            raise RankError("\n".join([f"rank {rank} died.", *(text[-2000:] for text in texts if text)])) from None
        if not good:
            raise RankError(f"rank {rank}: {value}")
        return value


@contextlib.contextmanager
def ranks(size: int, link: ShapedLink | None = None, on_nccl: NcclRanks | None = None) -> Iterator[World]:
    """Start `size` ranks of THREADS torch threads each, end them with the block.

    With a link each has a host of its own; without one, ranks use loopback. With `on_nccl` they run NCCL, not gloo.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(links.sigterm_as_ctrl_c())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="thinwire-bench-")))
        hosts = stack.enter_context(links.hosts(size, link)) if link else []
        pipes: list[Connection] = []
        resource_tracker.ensure_running()  # the first start would do that, and unblock signals by it
        # A terminal sends Ctrl-C to all; this process alone decides what it means.
        with links.blocked(signal.SIGINT):
            for rank in range(size):
                host = hosts[rank] if hosts else None
                near, far = multiprocessing.Pipe()
                pipes.append(near)
                arguments = (far, rank, size, host, folder, on_nccl)
                # Spawned: a fork would copy the locks of torch's threads.
                process = multiprocessing.get_context("spawn").Process(target=_serve, args=arguments)
                process.start()
                far.close()
                stack.callback(_end, process, near)
        world = World(pipes, folder)
        world.answers()  # each says when it has joined the group
        yield world
        world.send(b"")
        for pipe in pipes:
            pipe.poll(STOP_S)  # a rank that ends closes its end


def _end(process: BaseProcess, pipe: Connection) -> None:
    pipe.close()  # that ends a rank, whatever it is doing
    process.join(STOP_S)
    process.kill()
    process.join()


# The ranks' side.


def _serve(pipe: Connection, rank: int, size: int, host: str | None, folder: Path, on_nccl: NcclRanks | None) -> None:
    """Join the group, say so, answer calls until an empty one."""
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    calls: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_hear, args=(pipe, calls), daemon=True).start()
    torch.set_num_threads(THREADS)
    pipe.send_bytes(_answer(pickle.dumps((_join, (rank, size, host, str(folder / "store"), on_nccl)))))
    while call := calls.get():
        pipe.send_bytes(_answer(call))
    dist.destroy_process_group()


def _join(rank: int, size: int, host: str | None, path: str, on_nccl: NcclRanks | None) -> None:
    if host is not None:
        links.enter(host)  # before the first thread and the first socket of the group
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK if host is None else links.INTERFACE
    store = dist.FileStore(path, size)  # type: ignore[attr-defined]
    how: dict[str, Any] = {"backend": "gloo", "timeout": timedelta(minutes=10)}
    if on_nccl is not None:
        os.environ.update(on_nccl.environment(rank))  # before anything of CUDA
        torch.cuda.set_device(on_nccl.gpu(rank))
        how = {"backend": "nccl", "timeout": timedelta(minutes=2), "device_id": on_nccl.gpu(rank)}
    dist.init_process_group(store=store, rank=rank, world_size=size, **how)


def _hear(pipe: Connection, calls: SimpleQueue[bytes]) -> None:
    # A thread of its own: the parent may go away while this rank waits in a collective.
    with contextlib.suppress(EOFError, OSError):
        while True:
            calls.put(pipe.recv_bytes())
    os._exit(1)


def _answer(call: bytes) -> bytes:
    try:
        fn, args = pickle.loads(call)
        return pickle.dumps((True, fn(*args)))
    except ThinwireError as error:
        return pickle.dumps((False, str(error)))
    except Exception:
        return pickle.dumps((False, f"failed\n{traceback.format_exc()}"))
