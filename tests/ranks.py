"""Gloo ranks for the tests: processes, started once per world size, that run the functions sent to them.

    def total(group: dist.ProcessGroup, x: float) -> float:      # at module level: it is pickled by name
        ...group.rank(), group.size(), dist.all_reduce(t, group=group)...

    def test_total(ranks: RankPool) -> None:
        assert ranks(3).run(total, 1.0) == [3.0, 3.0, 3.0]       # one result per rank, in rank order

`group` is the default group, as in a user's job. [Note: One default group per world] Sub-groups of four shared ranks
would not do: torch names a new group by a count that each rank keeps for itself, so once ranks differ in what they
belong to, a function that makes a group (as collectives do for their second phase) hangs.

[Note: Two fork servers] Ranks are forked, in milliseconds, by processes that have imported torch already: one for even
ranks and one for odd, so that the ranks of a world differ in their hash seeds, as in a user's job. A set of names that
is walked on the way to a collective would show. A test module whose ranks need more than torch, and slow to import,
names it in RANKS_IMPORT: the fork servers then import it once, for all ranks.

[Note: Two test processes] The fork servers serve the process that runs tests beside, too (tests/beside.py), which has
worlds of its own; one asks at a time. A rank has the priority of the process that asked for it.

Results and arguments are pickled by value. Warnings are errors in the ranks. A call that overruns its limit kills the
ranks of its world; the next call starts new ones.
"""

import faulthandler
import fcntl
import gc
import importlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

MAX_WORLD = 4
START_S = 300.0  # imports of torch and of frameworks on a busy machine
LIMIT_S = 600.0  # of a call: kernels of a GPU are compiled at first use, and hosts take machines away for minutes
GRACE_S = 2.0  # how long the others may still answer once a rank has failed
END_S = 20.0  # for a rank to end by itself
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
IMPORTED = ("thinwire", "torch.distributed.tensor", "torch.distributed.checkpoint", "hypothesis", "pytest")  # at first
# DDP's and FSDP's; with them comes Triton, and a GPU that was looked for is lost after a fork.
WITHOUT_CUDA = ("torch._dynamo", "thinwire.integrations.fsdp")


# The test process's side.


class RankPool:
    """ranks(world): the ranks of that world, started at their first call."""

    def __init__(self) -> None:
        """Start the fork servers; the first call waits for them."""
        self._worlds: dict[int, World] = {}
        self._servers = (ForkServer(), ForkServer())

    def imports(self, names: Iterable[str]) -> None:
        """Name further modules for the fork servers to import; once, before the first call."""
        for server in self._servers:
            server.imports(names)

    def __call__(self, world: int) -> "World":
        if not 1 <= world <= MAX_WORLD:
            raise ValueError(f"world must be 1..{MAX_WORLD}, got {world}; raise MAX_WORLD in tests/ranks.py for more")
        return self._worlds.setdefault(world, World(world, self._servers))

    def fresh(self, world: int) -> "World":
        """New ranks, for a call that loses one (`lost`), after which all of them end."""
        return World(world, self._servers)

    def end(self) -> None:
        """End the ranks of this process."""
        for world in self._worlds.values():
            world.close()

    def close(self) -> None:
        """End the ranks and the fork servers."""
        self.end()
        for server in self._servers:
            server.close()


class ForkServer:
    """A process that has imported torch and forks ranks."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair()
        self._channel.settimeout(START_S)
        self._turn = tempfile.TemporaryFile()  # noqa: SIM115, whoever has locked it may ask
        alone = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # no pool of compilers in every rank
        environment = {"GLOO_SOCKET_IFNAME": LOOPBACK, **os.environ, **alone}
        with theirs:
            handle = theirs.fileno()
            command = [sys.executable, __file__, str(handle)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, pass_fds=[handle])

    def imports(self, names: Iterable[str] = ()) -> None:
        """Name the modules it imports beyond torch; then it starts to fork."""
        told = self._process.stdin
        if told is not None and not told.closed:
            with suppress(BrokenPipeError), told:
                told.write(" ".join(names).encode())

    def fork(self, number: int, size: int, folder: Path) -> "_Rank":
        """Rank `number` of `size`, which find each other by a file in `folder`."""
        self.imports()
        ours, theirs = Pipe()
        log = folder / f"rank{number}.log"
        with theirs, log.open("wb") as out:
            pid = self._ask([number, size, str(folder / "store"), os.nice(0)], theirs.fileno(), out.fileno())
        return _Rank(number, pid, ours, log, self)

    def status(self, pid: int) -> int | None:
        """The exit status of a rank that was forked here, or None after END_S."""
        return self._ask(pid)

    def close(self) -> None:
        """End the process; its ranks have ended."""
        self._channel.close()
        self._process.kill()
        self._process.communicate()

    def _ask(self, question: Any, *handles: int) -> Any:
        fcntl.lockf(self._turn, fcntl.LOCK_EX)
        try:
            socket.send_fds(self._channel, [json.dumps(question).encode()], handles)
            answer = self._channel.recv(64)
        finally:
            fcntl.lockf(self._turn, fcntl.LOCK_UN)
        if not answer:
            raise RuntimeError(f"a process that forks ranks died with exit status {self._process.wait()}")
        return json.loads(answer)


class World:
    """`size` ranks, started at the first call and again after a call that had to be cut off."""

    def __init__(self, size: int, servers: Sequence[ForkServer]) -> None:
        self.size = size
        self._servers = servers
        self._ranks: list[_Rank] = []
        self._dir: tempfile.TemporaryDirectory[str] | None = None

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = LIMIT_S, lost: int | None = None) -> list[Any]:
        """[fn(group, *args) on rank 0, on rank 1, ...]; RuntimeError naming every rank that raised, died or hung.

        `lost`: a rank that dies or stops on the way, whose answer nobody waits for; all ranks are ended afterwards.
        """
        call = pickle.dumps((sys.path, pickle.dumps((fn, args))))
        try:
            if not self._ranks:
                self._start()
            for rank in self._ranks:
                rank.send(call)
            awaited = [rank for rank in self._ranks if rank.number != lost]
            found = self._collect(getattr(fn, "__qualname__", repr(fn)), timeout, awaited)
            if lost is not None:
                self.close(kill=True)
            return found
        except BaseException as error:
            if not isinstance(error, RankError) or error.fatal or lost is not None:
                self.close(kill=True)
            raise

    def close(self, *, kill: bool = False) -> None:
        """End the ranks: by closing their pipes, or at once."""
        for rank in self._ranks:
            rank.end(kill=kill)
        self._ranks = []
        if self._dir is not None:
            self._dir.cleanup()
            self._dir = None

    def _start(self) -> None:
        self._dir = tempfile.TemporaryDirectory(prefix="thinwire-ranks-")
        for number in range(self.size):
            server = self._servers[number % len(self._servers)]
            self._ranks.append(server.fork(number, self.size, Path(self._dir.name)))
        self._collect("the start of the ranks", START_S, self._ranks)

    def _collect(self, name: str, timeout: float, ranks: list["_Rank"]) -> list[Any]:
        answers: dict[int, _Answer] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < len(ranks) and (left := deadline - time.monotonic()) > 0:
            silent = {rank.pipe: rank for rank in ranks if rank.number not in answers}
            for pipe in wait(list(silent), left):
                rank = silent[pipe]
                answers[rank.number] = rank.receive()
                if not answers[rank.number].ok:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if len(answers) < len(ranks) or not all(answer.ok for answer in answers.values()):
            raise RankError.of(name, timeout, ranks, answers)
        return [answers[rank.number].value for rank in ranks]


class RankError(RuntimeError):
    """One or more ranks raised, died, or did not answer in time; fatal when the ranks cannot be used again."""

    def __init__(self, message: str, *, fatal: bool) -> None:
        super().__init__(message)
        self.fatal = fatal

    @classmethod
    def of(cls, name: str, timeout: float, ranks: list["_Rank"], answers: dict[int, "_Answer"]) -> "RankError":
        failed = {number: answer for number, answer in sorted(answers.items()) if not answer.ok}
        stuck = [rank for rank in ranks if rank.number not in answers]
        heads, parts = [], []
        if failed:
            heads.append(f"failed on {_names(failed)}")
            parts += [f"--- rank {number} {answer.value}" for number, answer in failed.items()]
        if stuck:
            limit = f"{GRACE_S:g} s of that" if failed else f"{timeout:g} s"
            heads.append(f"got no answer from {_names(rank.number for rank in stuck)} within {limit}")
            parts += [f"--- rank {rank.number} was here:\n{rank.stack()}" for rank in stuck]
        message = f"{name} (world {len(ranks)}) {' and '.join(heads)}"
        return cls("\n".join([message, *parts]), fatal=bool(stuck) or any(answer.died for answer in failed.values()))


def _names(ranks: Iterable[int]) -> str:
    numbers = list(ranks)
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))


class _Answer(NamedTuple):
    ok: bool
    value: Any
    died: bool = False


@dataclass
class _Rank:
    number: int
    pid: int
    pipe: Connection
    log: Path
    server: ForkServer
    status: int | None = None  # once it is known to have ended

    def send(self, call: bytes) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it died between calls: receive() reports it
            self.pipe.send_bytes(call)

    def receive(self) -> _Answer:
        try:
            return _Answer(*pickle.loads(self.pipe.recv_bytes()))
        except (EOFError, ConnectionResetError):
            self._wait()
            return _Answer(ok=False, value=f"died with exit status {self.status}:\n{self._tail(0)}", died=True)

    def stack(self) -> str:
        """Where the rank's threads are now."""
        start = self.log.stat().st_size
        os.kill(self.pid, signal.SIGUSR1)
        time.sleep(0.3)  # faulthandler writes from the signal handler, whatever the rank is stuck in
        return self._tail(start)

    def end(self, *, kill: bool) -> None:
        self.pipe.close()
        if not kill:
            self._wait()
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            self._wait()

    def _wait(self) -> None:
        self.status = self.server.status(self.pid) if self.status is None else self.status

    def _tail(self, start: int) -> str:
        return self.log.read_bytes()[start:][-8000:].decode(errors="replace").rstrip()


# The fork servers' side.


def serve_forks(channel: socket.socket) -> None:
    """Import what ranks need; then fork ranks and report their exit statuses on request, until the channel closes."""
    import torch

    without_cuda = torch.version.cuda is None
    _import((*IMPORTED, *(WITHOUT_CUDA if without_cuda else ())))
    told = sys.stdin.read().split()
    _import(told if without_cuda else ())
    gc.freeze()  # ranks share these pages, as long as nobody looks at them
    while True:
        question, handles, _, _ = socket.recv_fds(channel, 4096, 2)
        if not question:
            os._exit(0)
        answer = _fork(channel, *json.loads(question), *handles) if handles else _status(json.loads(question))
        channel.sendall(json.dumps(answer).encode())


def _import(names: Iterable[str]) -> None:
    for name in names:
        with suppress(ImportError):  # the test that needs it fails or skips
            importlib.import_module(name)


def _fork(channel: socket.socket, number: int, size: int, store: str, niceness: int, pipe: int, log: int) -> int:
    pid = os.fork()
    if pid == 0:
        os.nice(niceness - os.nice(0))
        channel.close()
        for stream in (1, 2):
            os.dup2(log, stream)
        serve_calls(number, size, Connection(pipe), store)
    for handle in (pipe, log):
        os.close(handle)
    return pid


def _status(pid: int) -> int | None:
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    return None


# The ranks' side.


def serve_calls(number: int, size: int, pipe: Connection, store: str) -> None:
    """Join the group, say so, then answer one call after another until the pipe closes."""
    calls: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, calls), daemon=True).start()
    group = _join(number, size, store)
    from torch.backends import mkldnn

    with_mkldnn = mkldnn.enabled
    warnings.simplefilter("error")
    pipe.send_bytes(pickle.dumps((True, None)))
    while True:
        call = calls.get()
        _end_groups(group)  # now, when all ranks have answered the call before
        _tell_of_signals()
        mkldnn.set_flags(with_mkldnn)  # torch switches it off for good at bf16 on some CPUs: other bits
        pipe.send_bytes(_answer(call, group))


def _tell_of_signals() -> None:
    """Register faulthandler again before every call: frameworks replace its signal handlers."""
    faulthandler.disable()
    faulthandler.enable()
    faulthandler.unregister(signal.SIGUSR1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def _listen(pipe: Connection, calls: SimpleQueue[bytes]) -> None:
    # A thread of its own: the test process may go away while this rank hangs in a collective.
    try:
        while True:
            calls.put(pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        os._exit(0)


def _join(number: int, size: int, store: str) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=number, world_size=size)
    return dist.group.WORLD


def _end_groups(group: Any) -> None:
    """Destroy the gloo groups of earlier calls: each has a thread that wakes a hundred times a second."""
    from torch.distributed.distributed_c10d import _world, destroy_process_group, get_backend
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    made = [other for other in _world.pg_map if other is not group and get_backend(other) == "gloo"]
    for other in made:
        destroy_process_group(other)
    if made:
        _clear_sharding_prop_cache()  # a mesh of the next call may equal one of these groups'
        gc.collect()


def _answer(call: bytes, group: Any) -> bytes:
    try:
        path, body = pickle.loads(call)
        sys.path[:] = path
        fn, args = pickle.loads(body)
        return pickle.dumps((True, fn(group, *args)))
    except BaseException:  # pytest's own outcomes are no Exceptions
        return pickle.dumps((False, f"raised:\n{traceback.format_exc()}"))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the test process decides
    serve_forks(socket.socket(fileno=int(sys.argv[1])))
