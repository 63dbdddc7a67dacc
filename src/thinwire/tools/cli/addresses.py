"""The interface and the address that the messages of a rank leave by, as far as that can be told."""

import fcntl
import os
import socket
import struct

_SIOCGIFADDR = 0x8915  # of Linux: the address of an interface


def way_out(backend: str) -> tuple[str, str]:
    """The interface and the address that this rank's messages leave by.

    gloo takes the interface it is told, else the address of the host's name. NCCL chooses by itself where it is not
    told, as a rule what leads to the others.
    """
    wanted = os.environ.get(f"{backend.upper()}_SOCKET_IFNAME", "")
    if wanted and not wanted.startswith("^"):
        start = wanted.removeprefix("=").split(",")[0]
        named = [name for name in _by_interface() if name == start or (backend == "nccl" and name.startswith(start))]
        return (named[0], _by_interface()[named[0]]) if named else (start, "")
    address = route() if backend == "nccl" else _host_address()
    return interface_of(address), address


def _by_interface() -> dict[str, str]:
    """Of every interface that has one, its IPv4 address; Linux tells."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                told = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue
            found[name] = socket.inet_ntoa(told[20:24])
    return found


def interface_of(address: str) -> str:
    by_address = {other: name for name, other in _by_interface().items()}
    return by_address.get(address) or (by_address.get("127.0.0.1", "") if address.startswith("127.") else "")


def _host_address() -> str:
    """What the host's name stands for; without an address gloo stays on this machine."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def route() -> str:
    """The address from which this machine would reach MASTER_ADDR; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            asked.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
            return str(asked.getsockname()[0])
    except OSError:
        return ""
