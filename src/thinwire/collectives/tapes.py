"""The tapes of a program ([Note: Tape] in kernels/tape.py): one per room, and per way in which its tensors lie."""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from thinwire.collectives.nccl import check_started
from thinwire.collectives.rooms import Room
from thinwire.collectives.transport import StreamTransport
from thinwire.kernels import is_ahead
from thinwire.kernels.tape import Number, Tape, can_play, written

_MOST = 64  # tapes of a program; tensors that begin anywhere could have thousands
_Launch = Callable[[Number, Number], None]  # given the mixed step and the number of the call


class Tapes:
    """Those of a program on `link`; None where it does more than a tape has."""

    def __init__(self, link: object) -> None:
        self._link: StreamTransport | None = None
        if isinstance(link, StreamTransport) and link.direct is not None and can_play():
            self._link = link
        self._found: dict[tuple[object, ...], Tape] = {}

    def run(self, launch: _Launch, room: Room, inputs: Sequence[Tensor], mixed: int, call: int = 0) -> None:
        """Play the tape of these inputs, or launch and write it."""
        link = self._link
        communicator = 0 if link is None or link.direct is None or is_ahead() else link.direct.communicator()
        if link is None or not communicator:
            launch(mixed, call)
            return
        addresses = [tensor.data_ptr() for tensor in inputs]
        key: tuple[object, ...] = (id(room), *[address & 15 for address in addresses])
        if len(addresses) > 1:
            key += _overlaps(inputs, addresses)
        room.reserve(0)  # on the current stream from here on
        tape = self._found.get(key)
        if tape is not None:
            stream = torch._C._cuda_getCurrentRawStream(link.device.index)
            check_started(tape.play(communicator, addresses, mixed, call, stream))
            link.played(tape)
            return
        with written(Tape(inputs, mixed, call)) as tape:
            launch(*tape.begin())
        if not tape.is_whole:
            self._link = None
            return
        if len(self._found) >= _MOST:
            self._found.clear()
        self._found[key] = tape
        room.use(self)

    def forget(self, room: Room) -> None:
        """The room lets go of its scratch, which these tapes know."""
        for key in [key for key in self._found if key[0] == id(room)]:
            del self._found[key]


def _overlaps(inputs: Sequence[Tensor], addresses: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """Those that begin in another: which, in which, and how far. A tape that took them for one must not meet others."""
    spans = sorted([(a, a + x.nbytes) for a, x in zip(addresses, inputs, strict=True)])
    if all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans)):
        return ()
    return tuple(
        (i, j, b - a)
        for j, (a, x) in enumerate(zip(addresses, inputs, strict=True))
        for i, b in enumerate(addresses)
        if i != j and a <= b < a + x.nbytes
    )
