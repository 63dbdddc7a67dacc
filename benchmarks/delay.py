"""A switch that delays every frame, like netem, for kernels without netem.

    ip netns exec SWITCH python delay.py 0.05 port0 port1      # a program of its own: seconds, ports

It ends when its standard input closes, so it does not outlive the process that started it. Frames come and go through
packet sockets, one per port; the switch learns where a station is from what it sends. It handles about ten thousand
frames per second: 100 Mbit/s in frames of 1500 bytes, and 1 Gbit/s where hosts pass several frames as one piece.
"""

import contextlib
import os
import re
import select
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.tools.local import link as links
from thinwire.tools.local.link import BenchError, ShapedLink

ALL = 3  # ETH_P_ALL of if_ether.h
PACKET = 263  # SOL_PACKET of socket.h
WITH_HEADER = 15  # PACKET_VNET_HDR of if_packet.h: in front of a frame, how it is to be cut and summed
HEADER = 10  # bytes of it
LONGEST = 1 << 17
RECEIVED = 33  # SO_RCVBUFFORCE of socket.h
ROOM = 1 << 26  # bytes that wait in a socket, at most


@dataclass(frozen=True)
class DelayedLink(ShapedLink):
    """A shaped link whose frames take a while."""

    delay: float = 0.0  # seconds, one way

    @contextlib.contextmanager
    def join(self, names: Sequence[str], switch: str) -> Iterator[None]:
        """This program takes the bridge's place."""
        ports = [f"port{number}" for number in range(len(names))]
        command = ["ip", "netns", "exec", switch, sys.executable, __file__, str(self.delay), *ports]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as process:  # which it loses if we are killed
            try:
                yield
            finally:
                process.kill()


def parse(text: str) -> ShapedLink:
    """ "1gbit", or with a delay "20mbit+50ms", at most 1gbit."""
    found = re.fullmatch(r"(.+)\+(\d+)ms", text.strip().lower())
    plain = links.parse(found[1] if found else text)
    if found is None:
        return plain
    if plain.rate > 1e9:
        raise BenchError(f"expected at most 1gbit with a delay, got {text!r}")
    return DelayedLink(found[0], plain.rate, float(found[2]) / 1e3)


def run(delay: float, ports: list[str]) -> None:
    """Forward each frame `delay` seconds after it came, until standard input ends."""
    with contextlib.suppress(OSError):
        os.nice(-20)  # a switch does not wait for those whose frames it carries
    sockets = [_opened(port) for port in ports]
    watched: list[Any] = [sys.stdin, *sockets]
    known: dict[bytes, socket.socket] = {}  # by address, where a station is
    waiting: deque[tuple[float, socket.socket, bytes]] = deque()
    while True:
        left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select(watched, [], [], left)
        if sys.stdin in ready:
            return
        for one in ready:
            frame = one.recv(LONGEST)
            known[frame[HEADER + 6 : HEADER + 12]] = one
            waiting.append((time.monotonic() + delay, one, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, source, frame = waiting.popleft()
            to = known.get(frame[HEADER : HEADER + 6])
            for one in [to] if to is not None else sockets:
                if one is not source:
                    with contextlib.suppress(OSError):  # its queue is full: a switch loses the frame, too
                        one.send(frame)


def _opened(port: str) -> socket.socket:
    found = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL))
    found.setsockopt(PACKET, WITH_HEADER, 1)
    found.setsockopt(socket.SOL_SOCKET, RECEIVED, ROOM)
    found.bind((port, 0))
    return found


if __name__ == "__main__":
    run(float(sys.argv[1]), sys.argv[2:])
