"""A switch that holds every frame back for a while: what netem does, where a kernel lacks it. A program of its own.

    ip netns exec SWITCH python delay.py 0.05 port0 port1

Frames come and go through packet sockets, one per port; where a station is, is learnt from what it sends. It needs
nothing but Python. At some ten thousand frames per second it is at its end: that is 100 Mbit/s in frames of 1500 bytes.
"""

import select
import socket
import sys
import time
from collections import deque

ALL = 3  # ETH_P_ALL of if_ether.h
LONGEST = 1 << 16
ROOM = 1 << 24  # bytes that wait in a socket, at most


def run(delay: float, ports: list[str]) -> None:
    """Hand frames on, each `delay` seconds after it came, until the process is ended."""
    sockets = [_opened(port) for port in ports]
    known: dict[bytes, socket.socket] = {}  # by address, where a station is
    waiting: deque[tuple[float, socket.socket, bytes]] = deque()
    while True:
        left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select(sockets, [], [], left)
        for one in ready:
            frame = one.recv(LONGEST)
            known[frame[6:12]] = one
            waiting.append((time.monotonic() + delay, one, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, source, frame = waiting.popleft()
            to = known.get(frame[:6])
            for one in [to] if to is not None else sockets:
                if one is not source:
                    _send(one, frame)


def _opened(port: str) -> socket.socket:
    found = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL))
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, ROOM)
    found.bind((port, 0))
    return found


def _send(to: socket.socket, frame: bytes) -> None:
    try:
        to.send(frame)
    except OSError:  # the port's queue is full: the frame is lost, as it would be in a switch
        return


if __name__ == "__main__":
    run(float(sys.argv[1]), sys.argv[2:])
