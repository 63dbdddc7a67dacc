"""Shaped links: hosts on one machine, each a network namespace whose up- and downlink tbf holds to a rate.

A bridge joins them, in a namespace of its own: nothing is added to the machine's own network, and removing the
namespaces removes everything. Where the link has a delay, a process takes the bridge's place (delay.py). What a process
left that was killed (SIGKILL) is removed when the next one makes a link.
"""

import contextlib
import ctypes
import fcntl
import itertools
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from thinwire.errors import ThinwireError
from thinwire.tools.bench import delay as delays
from thinwire.tools.bench.record import BenchError

INTERFACE = "eth0"  # of every host
MOST_HOSTS = 254  # in 10.77.0.0/24
_MOST_DELAYED = 1e9  # bits per second through delay.py
_MOST_LOSSY = 1e8  # the same in frames of 1500 bytes, each of which may be lost
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_RUNTIME = Path("/run/netns")  # where `ip netns` keeps the names
_NEWNET = 0x40000000  # CLONE_NEWNET of sched.h
_ETHTOOL = 0x8946  # SIOCETHTOOL of sockios.h
_SET_CHECKSUMS = 0x17  # ETHTOOL_STXCSUM of ethtool.h; without it nothing is joined, either
# What follows is run by an ordinary user as root of a user namespace, with a network and a /run of its own.
_OWN_ROOT = ("unshare", "--user", "--map-root-user", "--mount", "--net", "sh", "-c")
_OWN_RUN = f'mount -t tmpfs tmpfs {_RUNTIME.parent} && ip link set lo up && exec "$@"'
_STOPS = (signal.SIGTERM, signal.SIGHUP)  # what ends a process that could clean up before
_numbers = itertools.count()
_prefixes: set[str] = set()  # of the names of hosts that this process has made


class LinkError(ThinwireError, RuntimeError):
    """A shaped link cannot be made here, or a command that makes it failed."""


@dataclass(frozen=True)
class ShapedLink:
    """The rate of every host's link, and how long it takes from one host to another."""

    text: str  # as it was written
    rate: float  # bits per second
    delay: float = 0.0  # seconds, one way
    lost: float = 0.0  # share of the frames

    def __str__(self) -> str:
        return self.text


def parse(text: str) -> ShapedLink:
    """ "1gbit", "2.5gbit": a number and the unit tc knows it by; "20mbit+50ms" with a delay, "20mbit+50ms+1%" lossy."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)(?:\+(\d+)ms(?:\+(\d+(?:\.\d+)?)%)?)?", text.strip().lower())
    if found is None or float(found[1]) == 0 or float(found[4] or 0) >= 100:
        raise BenchError(
            f"expected a rate such as 100mbit or 1gbit, got {text!r}; with a delay, 20mbit+50ms; with frames that are "
            "lost, too, 20mbit+50ms+1%"
        )
    rate = float(found[1]) * _UNITS[found[2]]
    for part, beside, most in ((found[3], "a delay", _MOST_DELAYED), (found[4], "a loss", _MOST_LOSSY)):
        if part and rate > most:
            raise BenchError(
                f"expected a rate of {most / 1e6:.0f}mbit or less beside {beside}, got {text!r}: a process hands "
                "frames on"
            )
    return ShapedLink(found[0], rate, float(found[3] or 0) / 1e3, float(found[4] or 0) / 100)


def check() -> None:
    lacking = [] if os.geteuid() == 0 else ["root (run it with sudo)"]
    lacking += [f"the command {name!r} (package iproute2)" for name in ("ip", "tc") if shutil.which(name) is None]
    if lacking:
        raise LinkError(
            f"--link puts every rank into a network namespace of its own and needs {' and '.join(lacking)}; "
            "without --link the ranks talk over loopback"
        )


def as_own_root(command: Sequence[str]) -> list[str]:
    """`command`, so run that an ordinary user can shape links in it; LinkError where this system does not allow it.

    Nothing outlives the command: its namespaces go with its last process.
    """
    wrapped = [*_OWN_ROOT, _OWN_RUN, "sh"]
    try:
        _run(*wrapped, "ip", "netns", "add", "trial")
    except (LinkError, OSError) as error:
        raise LinkError(
            f"--link needs root (run it with sudo), or user namespaces that may hold networks: {error}. "
            "Without --link the ranks talk over loopback"
        ) from None
    return [*wrapped, *command]


@contextlib.contextmanager
def hosts(count: int, link: ShapedLink) -> Iterator[list[str]]:
    """The names of `count` hosts, 10.77.0.1 and up; removed whatever ends the block, Ctrl-C and SIGTERM too."""
    check()
    prefix = f"tw{os.getpid()}n{next(_numbers)}"
    _prefixes.add(prefix)
    _clean_up()
    switch = f"{prefix}sw"
    names = [f"{prefix}r{number}" for number in range(count)]
    with sigterm_as_ctrl_c():
        try:
            _run("ip", "netns", "add", switch)
            _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
            _run("ip", "-n", switch, "link", "set", "bridge", "mtu", "1500", "up")
            for number, name in enumerate(names):
                _plug(name, number, switch, link)
            with _delayed(names, switch, link):
                yield names
        finally:
            with blocked(signal.SIGINT, *_STOPS):
                for name in (*names, switch):
                    _run("ip", "netns", "del", name, check=False)


def left(names: Sequence[str]) -> list[str]:
    """Those of these network namespaces that a process made which has ended since."""
    found = []
    for name in names:
        made = re.fullmatch(r"(tw(\d+)n\d+)(?:r\d+|sw)", name)
        if made is None or made[1] in _prefixes:
            continue
        if int(made[2]) == os.getpid() or not is_running(int(made[2])):  # ours: one before us had the same number
            found.append(name)
    return found


def is_running(pid: int) -> bool:
    """Whether there is such a process; one that has ended has no command line, even if nobody asked how it ended."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def _clean_up() -> None:
    """Remove the namespaces that ended processes have left, and end what still runs in them."""
    for name in left(os.listdir(_RUNTIME) if _RUNTIME.exists() else []):
        for pid in _run("ip", "netns", "pids", name, check=False).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
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
    """By default SIGTERM ends a process before it can clean up, and SIGHUP, which a terminal sends that is closed.

    Only the first one counts: `timeout` sends it to the process and then to its group, while what was measured is being
    written. What is ignored stays so: `nohup` does that.
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
    _run("ip", "-n", switch, "link", "set", port, *(() if link.delay else ("master", "bridge")), "up")
    _run("ip", "-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", INTERFACE)
    _run("ip", "-n", name, "link", "set", INTERFACE, "up")
    _run("ip", "-n", name, "link", "set", "lo", "up")
    for namespace, device in ((name, INTERFACE), (switch, port)):
        _shape(namespace, device, link)


def _shape(namespace: str, device: str, link: ShapedLink) -> None:
    # tbf sends in bursts: too small, and timers cannot keep up with the rate; too large, and small messages fly free,
    # and what follows a pause, so that sums which leave the link idle now and then look better than they are.
    burst = max(1 << 14, int(link.rate / 8 * 0.0021))
    limits = ("rate", link.text.partition("+")[0], "burst", f"{burst}b", "latency", "100ms")
    _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *limits)


@contextlib.contextmanager
def _delayed(names: Sequence[str], switch: str, link: ShapedLink) -> Iterator[None]:
    """While the block runs, frames between these hosts are held back; without a delay the bridge is enough."""
    if not link.delay:
        yield
        return
    for name in names if link.lost else ():
        entering = threading.Thread(target=_whole_frames, args=(name,))  # a thread stays in the network it enters
        entering.start()
        entering.join()
    ports = [f"port{number}" for number in range(len(names))]
    command = ["ip", "netns", "exec", switch, sys.executable, delays.__file__, str(link.delay), str(link.lost), *ports]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:  # which it loses if this process is killed
        try:
            yield
        finally:
            process.kill()


def _whole_frames(host: str) -> None:
    """Let a host send frames as they are on a cable: not several as one, checksums filled in."""
    enter(host)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        value = ctypes.create_string_buffer(struct.pack("II", _SET_CHECKSUMS, 0))
        fcntl.ioctl(control, _ETHTOOL, struct.pack("16sP8x", INTERFACE.encode(), ctypes.addressof(value)))


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
    """These signals wait until the block ends; in processes that are started in it, for ever."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
