"""The ranks of a benchmark: processes started by torch's elastic launcher, to which functions are sent.

    with launch.ranks(4, link) as world:
        parts = world.run(fn, *args)      # [fn(*args) on rank 0, on rank 1, ...]; fn is pickled by name

Ranks run gloo over loopback, or on hosts behind shaped links, one or several on each. They live and die with the block:
a rank that loses the pipe to this process exits, whatever it was doing.
"""

import contextlib
import logging
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from thinwire.errors import ThinwireError
from thinwire.tools.bench import link as links
from thinwire.tools.bench.link import Link

PORT = 29533  # of the store on the first host, where nothing else listens
START_S = 120.0  # imports of torch by all ranks at once, on a busy machine
STOP_S = 20.0
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class RankError(ThinwireError, RuntimeError):
    """A rank of a benchmark raised, died or did not start."""


class World:
    """Ranks that wait for calls."""

    def __init__(self, pipes: Sequence[Connection], log: Callable[[], str]) -> None:
        self._pipes, self._log = pipes, log  # in rank order; what they wrote on standard error

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """[fn(*args) on rank 0, on rank 1, ...], or RankError with what the first rank that failed says."""
        call = pickle.dumps((fn, args))
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # a rank that died is told of by its silence
                pipe.send_bytes(call)
        return self.answers()

    def answers(self) -> list[Any]:
        """One answer of every rank."""
        found: dict[int, Any] = {}
        while len(found) < len(self._pipes):
            silent = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in found}
            for pipe in wait(list(silent)):
                assert isinstance(pipe, Connection)
                found[silent[pipe]] = self._receive(silent[pipe], pipe)
        return [found[rank] for rank in range(len(self._pipes))]

    def dismiss(self) -> None:
        """Tell the ranks to end when they have done what they were asked."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send_bytes(b"")

    def _receive(self, rank: int, pipe: Connection) -> Any:
        try:
            good, value = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            raise RankError(f"rank {rank} died. {self._log()}") from None
        if not good:
            raise RankError(f"rank {rank}: {value}")
        return value


@contextlib.contextmanager
def ranks(size: int, link: Link | None = None, threads: int = 1, nodes: int | None = None) -> Iterator[World]:
    """Start `size` ranks with `threads` torch threads each, end them with the block.

    With a link, `nodes` hosts have equally many of them, in order; without it ranks find each other over loopback.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(links.sigterm_as_ctrl_c())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="thinwire-bench-")))
        hosts = stack.enter_context(links.hosts(nodes or size, link)) if link else []
        launcher = _Launcher(size, folder, [hosts[rank * len(hosts) // size] for rank in range(size) if hosts], threads)
        stack.callback(launcher.end)
        door = stack.enter_context(_listen(folder / "door"))
        launcher.start()
        # On the way out pipes and door close first: that ends ranks which did not end by themselves.
        pipes = [stack.enter_context(pipe) for pipe in _admit(door, size, launcher)]
        world = World(pipes, launcher.log)
        world.answers()  # each says when it has joined the group
        yield world
        world.dismiss()
        launcher.join(STOP_S)


class _Launcher(threading.Thread):
    """torch's launcher blocks while its ranks run: it gets a thread. What ranks have to say comes by their pipes."""

    def __init__(self, size: int, folder: Path, hosts: list[str], threads: int) -> None:
        super().__init__(name="thinwire-launcher", daemon=True)
        self._size, self._folder = size, folder
        self._arguments = (str(folder / "door"), hosts, threads)

    def start(self) -> None:
        # The launcher would start it, and unblock the signals of its thread by that.
        resource_tracker.ensure_running()
        super().start()

    def run(self) -> None:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        # Ranks inherit this mask: Ctrl-C in a terminal reaches every process, and the parent alone decides.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=self._size,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.05,
            shutdown_timeout=5,
            logs_specs=DefaultLogsSpecs(log_dir=str(self._folder), redirects=Std.ALL),
        )
        with _quiet_elastic(), contextlib.suppress(Exception):  # a rank that failed has told why, or left its log
            elastic_launch(config, _serve)(*self._arguments)

    def end(self) -> None:
        """Wait for the ranks to be gone, where they were started."""
        if self.is_alive():
            self.join()

    def log(self) -> str:
        """The end of what the ranks wrote on standard error."""
        texts = (path.read_text(errors="replace").strip() for path in sorted(self._folder.rglob("stderr.log")))
        return "\n".join(text[-2000:] for text in texts if text)


@contextlib.contextmanager
def _quiet_elastic() -> Iterator[None]:
    """The launcher warns of running in a thread, and shows a traceback for each rank that ends early."""
    elastic = logging.getLogger("torch.distributed.elastic")
    loggers = [elastic, *(logging.getLogger(name) for name in logging.root.manager.loggerDict if "elastic" in name)]
    before = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL + 1)
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _listen(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as door:  # a file: ranks in other network namespaces reach it too
        door.bind(str(path))
        door.listen(64)
        door.settimeout(0.2)
        yield door


def _admit(door: socket.socket, size: int, launcher: _Launcher) -> list[Connection]:
    """The pipes of all ranks, in rank order."""
    pipes: dict[int, Connection] = {}
    for _ in range(int(START_S / 0.2) + size):
        with contextlib.suppress(TimeoutError):
            pipe = Connection(door.accept()[0].detach())
            pipes[pipe.recv()] = pipe
        if len(pipes) == size:
            return [pipes[rank] for rank in range(size)]
        if not launcher.is_alive():
            break
    raise RankError(f"{size - len(pipes)} of {size} ranks did not start. {launcher.log()}")


# The ranks' side.


def _serve(door: str, hosts: list[str], threads: int) -> None:
    """Join the group, say so, answer calls until dismissed."""
    rank = int(os.environ["RANK"])
    pipe = Client(door)
    pipe.send(rank)
    calls: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_hear, args=(pipe, calls), daemon=True).start()
    torch.set_num_threads(threads)
    pipe.send_bytes(_answer(pickle.dumps((_join, (rank, hosts)))))
    while call := calls.get():
        pipe.send_bytes(_answer(call))
    dist.destroy_process_group()


def _hear(pipe: Connection, calls: SimpleQueue[bytes]) -> None:
    # A thread of its own: the parent may go away while this rank waits in a collective.
    with contextlib.suppress(EOFError, OSError):
        while True:
            calls.put(pipe.recv_bytes())
    os._exit(1)


def _join(rank: int, hosts: list[str]) -> None:
    world, patience = int(os.environ["WORLD_SIZE"]), timedelta(minutes=10)
    if not hosts:
        os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
        dist.init_process_group("gloo", timeout=patience)
        return
    links.enter(hosts[rank])  # before the first thread and the first socket of the group
    os.environ["GLOO_SOCKET_IFNAME"] = links.INTERFACE
    store = dist.TCPStore(links.address(0), PORT, world, is_master=rank == 0, timeout=patience)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=patience)


def _answer(call: bytes) -> bytes:
    try:
        fn, args = pickle.loads(call)
        return pickle.dumps((True, fn(*args)))
    except ThinwireError as error:
        return pickle.dumps((False, str(error)))
    except Exception:
        return pickle.dumps((False, f"failed\n{traceback.format_exc()}"))
