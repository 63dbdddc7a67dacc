"""The ranks of a benchmark: processes to which functions are sent, or the job of torchrun that this process is in.

    with launch.ranks(RankSetup(world=4)) as world:
        parts = world.run(fn, *args)      # [fn(*args) on rank 0, on rank 1, ...]; fn is pickled by name

Ranks that are started here run gloo over loopback, or each on a host behind a shaped link. They live and die with the
block: a rank that loses the pipe to this process exits, whatever it was doing.
"""

import contextlib
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
from thinwire.tools.local import link as links, torchrun
from thinwire.tools.local.link import ShapedLink
from thinwire.tools.local.torchrun import BACKENDS, RankPlace

STOP_S = 20.0
THREADS = 1
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class RankError(ThinwireError, RuntimeError):
    """A rank of a benchmark raised, died or did not start."""


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """How ranks run: gloo over loopback or a shaped link, one rank per host; or as torchrun started them."""

    world: int
    link: ShapedLink | None = None
    place: RankPlace | None = None

    @property
    def link_name(self) -> str:
        return "torchrun" if self.place else str(self.link or "loopback")

    def device(self, rank: int) -> torch.device:
        return self.place.device if self.place else torch.device("cpu")

    @property
    def backend(self) -> str:
        return BACKENDS[self.device(0).type]

    @property
    def threads(self) -> int:
        return torch.get_num_threads() if self.place else THREADS

    def columns(self) -> dict[str, str | int | bool | None]:
        """Where a row's ranks ran."""
        where = {"link": self.link_name, "backend": self.backend}
        return {**where, "world": self.world, "threads": self.threads, "cores": os.cpu_count()}

    def join(self, rank: int, host: str | None, path: str, **how: Any) -> None:
        """On a rank that was started here: make the group of all."""
        if host is not None:
            links.enter(host)  # before the first thread and the first socket of the group
        os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK if host is None else links.INTERFACE
        store = dist.FileStore(path, self.world)  # type: ignore[attr-defined]
        group: dict[str, Any] = {"rank": rank, "world_size": self.world, "timeout": timedelta(minutes=10), **how}
        dist.init_process_group(self.backend, store=store, **group)


class World:
    """Ranks that were started here."""

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


class JobWorld:
    """The ranks of torchrun, each of which calls this."""

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """What fn(*args) gives on every rank, on all of them."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, fn(*args))
        return found


@contextlib.contextmanager
def ranks(setup: RankSetup) -> Iterator[World | JobWorld]:
    """Start ranks of THREADS torch threads each, end them with the block; or use those of torchrun."""
    with contextlib.ExitStack() as stack:
        if setup.place:
            stack.enter_context(torchrun.job(setup.place.device))
            yield JobWorld()
            return
        stack.enter_context(links.sigterm_as_ctrl_c())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="thinwire-bench-")))
        hosts = stack.enter_context(links.hosts(setup.world, setup.link)) if setup.link else []
        pipes: list[Connection] = []
        resource_tracker.ensure_running()  # the first start would do that, and unblock signals by it
        # A terminal sends Ctrl-C to all; this process alone decides what it means.
        with links.blocked(signal.SIGINT):
            for rank in range(setup.world):
                host = hosts[rank] if hosts else None
                near, far = multiprocessing.Pipe()
                pipes.append(near)
                arguments = (far, rank, host, folder, setup)
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


def _serve(pipe: Connection, rank: int, host: str | None, folder: Path, setup: RankSetup) -> None:
    """Join the group, say so, answer calls until an empty one."""
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    calls: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_hear, args=(pipe, calls), daemon=True).start()
    torch.set_num_threads(THREADS)
    pipe.send_bytes(_answer(pickle.dumps((setup.join, (rank, host, str(folder / "store"))))))
    while call := calls.get():
        pipe.send_bytes(_answer(call))
    dist.destroy_process_group()


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
