"""Shaped links: hosts on one machine, each a network namespace whose up- and downlink tbf holds to a rate.

A bridge joins them, in a namespace of its own: nothing is added to the machine's own network, and removing the
namespaces removes everything: `ip netns del NAME` where a process was killed (SIGKILL) before it could.
"""

import contextlib
import ctypes
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from thinwire.errors import ThinwireError

INTERFACE = "eth0"  # of every host
MOST_HOSTS = 254  # in 10.77.0.0/24
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_RUNTIME = Path("/run/netns")  # where `ip netns` keeps the names
_NEWNET = 0x40000000  # CLONE_NEWNET of sched.h
_STOPS = (signal.SIGTERM, signal.SIGHUP)  # what ends a process that could clean up before
_numbers = itertools.count()


class BenchError(ThinwireError, ValueError):
    """A benchmark was asked for something unknown, or that it cannot measure here."""


class LinkError(ThinwireError, RuntimeError):
    """A shaped link cannot be made here, or a command that makes it failed."""


@dataclass(frozen=True)
class ShapedLink:
    """The rate of every host's link."""

    text: str  # as it was written
    rate: float  # bits per second

    def __str__(self) -> str:
        return self.text

    def join(self, names: Sequence[str], switch: str) -> contextlib.AbstractContextManager[None]:
        """What forwards frames between the hosts while they exist: a bridge, unless a subclass knows better."""
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "mtu", "1500", "up")
        for number in range(len(names)):
            _run("ip", "-n", switch, "link", "set", f"port{number}", "master", "bridge")
        return contextlib.nullcontext()


def parse(text: str) -> ShapedLink:
    """ "1gbit", "2.5gbit": a number and the unit tc knows it by."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text.strip().lower())
    if found is None or float(found[1]) == 0:
        raise BenchError(f"expected a rate such as 100mbit or 1gbit, got {text!r}")
    return ShapedLink(found[0], float(found[1]) * _UNITS[found[2]])


def check() -> None:
    lacking = [] if os.geteuid() == 0 else ["root (run it with sudo)"]
    lacking += [f"the command {name!r} (package iproute2)" for name in ("ip", "tc") if shutil.which(name) is None]
    if lacking:
        raise LinkError(
            f"--link puts every rank into a network namespace of its own and needs {' and '.join(lacking)}; "
            "without --link the ranks talk over loopback"
        )


def become_root() -> None:
    """Run this command again as root of a user namespace, where this user is not root but may create one."""
    inside = 'mount -t tmpfs tmpfs /run && mkdir -p /run/netns && exec "$@"'
    enter = ["unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-c", inside, "sh"]
    if os.geteuid() == 0 or shutil.which("unshare") is None or shutil.which("ip") is None:
        return
    if subprocess.run([*enter, "true"], capture_output=True, timeout=30).returncode == 0:
        os.execvp("unshare", [*enter, sys.executable, "-m", "thinwire", *sys.argv[1:]])


@contextlib.contextmanager
def hosts(count: int, link: ShapedLink) -> Iterator[list[str]]:
    """The names of `count` hosts, 10.77.0.1 and up; removed whatever ends the block, Ctrl-C and SIGTERM too."""
    check()
    prefix = f"tw{os.getpid()}n{next(_numbers)}"
    switch = f"{prefix}sw"
    names = [f"{prefix}r{number}" for number in range(count)]
    with sigterm_as_ctrl_c():
        try:
            _run("ip", "netns", "add", switch)
            for number, name in enumerate(names):
                _plug(name, number, switch, link)
            with link.join(names, switch):
                yield names
        finally:
            with blocked(signal.SIGINT, *_STOPS):
                for name in (*names, switch):
                    _run("ip", "netns", "del", name, check=False)


def enter(host: str) -> None:
    """Move this thread, and the threads it will start, to a host."""
    libc = ctypes.CDLL(None, use_errno=True)
    with (_RUNTIME / host).open() as namespace:
        if libc.setns(namespace.fileno(), _NEWNET) != 0:
            raise LinkError(f"cannot enter the network namespace {host}: {os.strerror(ctypes.get_errno())}")


def sent() -> int:
    """Bytes that the interface of this thread's host has sent; headers, acknowledgements and retries included."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[8])
    raise LinkError(f"no interface {INTERFACE} here: this thread has entered no host")


@contextlib.contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP (a closed terminal) into KeyboardInterrupt, so that the process can clean up.

    Only the first signal counts: `timeout` sends one to the process and another to its group, while the record is being
    written. A signal that is ignored, as under `nohup`, stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = [number for number in _STOPS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _stop_once) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop_once(number: int, frame: FrameType | None) -> None:
    for other in _STOPS:
        signal.signal(other, signal.SIG_IGN)
    raise KeyboardInterrupt


def _plug(name: str, number: int, switch: str, link: ShapedLink) -> None:
    port = f"port{number}"
    _run("ip", "netns", "add", name)
    _run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name)
    _run("ip", "-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", INTERFACE)
    for namespace, device in ((switch, port), (name, INTERFACE), (name, "lo")):
        _run("ip", "-n", namespace, "link", "set", device, "up")
        if device != "lo":
            _shape(namespace, device, link)


def _shape(namespace: str, device: str, link: ShapedLink) -> None:
    # tbf sends in bursts: too small, and timers cannot keep up with the rate; too large, and small messages fly free,
    # and what follows a pause, so that sums which leave the link idle now and then look better than they are.
    burst = max(1 << 14, int(link.rate / 8 * 0.0021))
    limits = ("rate", link.text.partition("+")[0], "burst", f"{burst}b", "latency", "100ms")
    _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *limits)


def _run(*command: str, check: bool = True) -> str:
    """What a command prints."""
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=30)
    if check and done.returncode != 0:
        raise LinkError(
            f"`{' '.join(command)}` failed: {done.stderr.strip()}; network namespaces need root with CAP_NET_ADMIN "
            "and CAP_SYS_ADMIN, and a kernel with veth, bridge and sch_tbf"
        )
    return done.stdout


@contextlib.contextmanager
def blocked(*signals: signal.Signals) -> Iterator[None]:
    """Block these signals until the block ends; processes started inside it keep them blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
