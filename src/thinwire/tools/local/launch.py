"""The ranks of a benchmark: processes to which functions are sent, or the job of torchrun that this process is in.

    with launch.ranks(RankSetup(world=4)) as world:
        parts = world.run(fn, *args)      # [fn(*args) on rank 0, on rank 1, ...]; fn is pickled by name

Ranks that are started here run gloo over loopback, or each on a host behind a shaped link. They live and die with the
block: a rank that loses the pipe to this process exits, whatever it was doing.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
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

    def __init__(self, pools: Sequence[ProcessPoolExecutor], folder: Path) -> None:
        self._pools = pools  # of one process each, in rank order
        self._folder = folder  # of what they write on standard error

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """[fn(*args) on rank 0, on rank 1, ...], or RankError with what the first rank that failed says."""
        return self.results([pool.submit(_answer, fn, args) for pool in self._pools])

    def results(self, calls: Sequence[Future[Any]]) -> list[Any]:
        """What one call on each rank gives."""
        done, _ = wait(calls, return_when=FIRST_EXCEPTION)
        for rank, call in enumerate(calls):
            error = call.exception() if call in done else None
            if isinstance(error, BrokenProcessPool):
                texts = (path.read_text(errors="replace").strip() for path in sorted(self._folder.glob("*.log")))
                raise RankError("\n".join([f"rank {rank} died.", *(text[-2000:] for text in texts if text)]))
            if error is not None:
                raise RankError(f"rank {rank}: {error}") from None
        return [call.result() for call in calls]


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
        hosts: Sequence[str | None] = [None] * setup.world
        if setup.link:
            hosts = stack.enter_context(links.hosts(setup.world, setup.link))
        watched, held = multiprocessing.Pipe(duplex=False)
        # Spawned: a fork would copy the locks of torch's threads.
        how: dict[str, Any] = {"mp_context": multiprocessing.get_context("spawn"), "initializer": _watch}
        pools = [stack.enter_context(ProcessPoolExecutor(1, **how, initargs=(watched,))) for _ in hosts]
        stack.callback(held.close)
        resource_tracker.ensure_running()  # the first start would do that, and unblock signals by it
        world = World(pools, folder)
        # A terminal sends Ctrl-C to all; this process alone decides what it means.
        with links.blocked(signal.SIGINT):
            places = zip(pools, range(setup.world), hosts, strict=True)
            joins = [pool.submit(_answer, _join, (setup, rank, host, folder)) for pool, rank, host in places]
        world.results(joins)
        yield world
        wait([pool.submit(dist.destroy_process_group) for pool in pools], STOP_S)


# The ranks' side.


def _watch(pipe: Connection) -> None:
    """End this rank, whatever it is doing, when the process that started it closes its end, or is no more."""

    def end() -> None:
        with contextlib.suppress(EOFError, OSError):
            pipe.recv_bytes()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


def _join(setup: RankSetup, rank: int, host: str | None, folder: Path) -> None:
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(THREADS)
    setup.join(rank, host, str(folder / "store"))


def _answer(fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    """fn(*args). What it raises becomes a text: not every exception can be pickled."""
    try:
        return fn(*args)
    except ThinwireError as error:
        raise RankError(str(error)) from None
    except Exception:
        raise RankError(f"failed\n{traceback.format_exc()}") from None
