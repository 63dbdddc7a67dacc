"""A switch that holds every frame back for a while, and loses some: what netem does, where a kernel lacks it.

    ip netns exec SWITCH python delay.py 0.05 0.01 port0 port1      # a program of its own: seconds, share that is lost

It ends with its standard input, which the process that started it holds: so it does not outlive that one.
Frames come and go through packet sockets, one per port; where a station is, is learnt from what it sends. It needs
nothing but Python. At some ten thousand frames per second it is at its end: that is 100 Mbit/s in frames of 1500 bytes.
What a host hands over as one piece, to be cut into frames later, is one frame here: so 1 Gbit/s gets through as well.
"""

import contextlib
import os
import random
import select
import socket
import sys
import time
from collections import deque
from typing import Any

ALL = 3  # ETH_P_ALL of if_ether.h
PACKET = 263  # SOL_PACKET of socket.h
WITH_HEADER = 15  # PACKET_VNET_HDR of if_packet.h: in front of a frame, how it is to be cut and summed
HEADER = 10  # bytes of it
LONGEST = 1 << 17
RECEIVED = 33  # SO_RCVBUFFORCE of socket.h
ROOM = 1 << 26  # bytes that wait in a socket, at most


def run(delay: float, lost: float, ports: list[str]) -> None:
    """Hand frames on, each `delay` seconds after it came, until standard input ends; a share is `lost`, by chance."""
    with contextlib.suppress(OSError):
        os.nice(-20)  # a switch does not wait for those whose frames it carries
    chance = random.Random(0)
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
            if chance.random() >= lost:
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
    run(float(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
