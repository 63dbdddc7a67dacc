"""The tapes of a program ([Note: Tape] in kernels/tape.py): one per room, and per way in which its tensors lie."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from thinwire.collectives.nccl import check_started
from thinwire.collectives.rooms import Room
from thinwire.collectives.transport import StreamTransport
from thinwire.kernels import is_ahead
from thinwire.kernels.tape import Number, Tape, can_play, written
from thinwire.ranges import ranged

_MOST = 64  # tapes of a program; tensors that begin anywhere could have thousands
_Launch = Callable[[Number, Number], None]  # given the mixed step and the number of the call


class Tapes:
    """`whole`: all that the program does are launches and messages that a tape has."""

    def __init__(self, link: object, *, whole: bool) -> None:
        self._link: StreamTransport | None = None
        if whole and isinstance(link, StreamTransport) and link.direct is not None and can_play():
            self._link = link
        self._found: dict[tuple[object, ...], tuple[Tape, int, int]] = {}  # with the bytes sent and received

    def run(self, launch: _Launch, room: Room, inputs: Sequence[Tensor], mixed: int, call: int = 0) -> None:
        """Play the tape of these inputs, or launch and write it."""
        link = self._link
        if link is None or is_ahead():
            launch(mixed, call)
            return
        assert link.direct is not None
        addresses = [tensor.data_ptr() for tensor in inputs]
        key: tuple[object, ...] = (id(room), *[address & 15 for address in addresses])
        if len(addresses) > 1:
            key += _overlaps(inputs, addresses)
        room.reserve(0)  # on the current stream from here on
        found = self._found.get(key)
        communicator = link.direct.communicator()
        if found is not None and communicator:
            tape, sent, received = found
            stream = torch._C._cuda_getCurrentRawStream(link.device.index)
            check_started(_play(tape, communicator, addresses, mixed, call, stream))
            link.note()
            link.sent += sent
            link.received += received
            return
        before = link.sent, link.received
        with written(Tape(inputs, mixed, call)) as tape:
            launch(*tape.begin())
        if not tape.is_whole:
            self._link = None if communicator else link  # torch sent the messages of this call alone
        elif found is None:
            if len(self._found) >= _MOST:
                self._found.clear()
            self._found[key] = tape, link.sent - before[0], link.received - before[1]
            room.use(self)

    def forget(self, room: Room) -> None:
        """The room lets go of its scratch, which these tapes know."""
        for key in [key for key in self._found if key[0] == id(room)]:
            del self._found[key]


_play = ranged("thinwire::play")(Tape.play)


def _overlaps(inputs: Sequence[Tensor], addresses: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """Those that begin in another: which, in which, and how far. A tape that took them for one must not meet others."""
    return tuple(
        (i, j, b - a)
        for j, (a, x) in enumerate(zip(addresses, inputs, strict=True))
        for i, b in enumerate(addresses)
        if i != j and a <= b < a + x.nbytes
    )
