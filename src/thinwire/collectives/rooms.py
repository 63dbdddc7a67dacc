"""Where calls on a GPU's stream run: scratch that is kept from call to call, and the streams of asynchronous ones.

[Note: Rooms] A blocking call runs on the caller's own stream, without an event. An asynchronous one runs on a stream of
the group's, and there are two of these, by turns: while the wires of one call travel, the next one encodes. Every
stream has scratch of its own, so that nobody waits for it. NCCL itself keeps the messages of a group in the order in
which they were started, on whatever stream.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


class Room:
    """Scratch for one call at a time. It grows to the largest need it has met."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffer = torch.empty(0, dtype=torch.uint8, device=device)

    def reserve(self, nbytes: int) -> Tensor:
        """A buffer of at least `nbytes`; the current stream is the one that uses it."""
        if self.buffer.numel() < nbytes:
            self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return self.buffer


class CallersRoom(Room):
    """The room of blocking calls, which come from any stream."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = 0  # the one that used it last
        self._has_streams = device.type == "cuda"

    def reserve(self, nbytes: int) -> Tensor:
        if self._has_streams:
            stream = torch._C._cuda_getCurrentRawStream(self.device.index)
            if stream != self._stream:
                self._move(stream)
        return self.buffer if self.buffer.numel() >= nbytes else super().reserve(nbytes)

    def _move(self, stream: int) -> None:
        """Wait for the stream that used the scratch last."""
        current = torch.cuda.current_stream(self.device)
        if self.buffer.numel():
            current.wait_stream(torch.cuda.ExternalStream(self._stream, self.device))
            self.buffer.record_stream(current)
        self._stream = stream


class TurnRoom(Room):
    """One of the rooms of asynchronous calls, with a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.stream = torch.cuda.Stream(device)
        self._begun = torch.cuda.Event()

    def entered(self, memory: Iterable[Tensor]) -> "_Entered":
        """Inside, its stream is the current one, and runs after what the caller's has so far.

        `memory` is not given to others before the stream is done with it, should its owner let go of it.
        """
        self._begun.record(torch.cuda.current_stream(self.device))
        self.stream.wait_event(self._begun)
        return _Entered(self.stream, memory)


class _Entered:
    def __init__(self, stream: torch.cuda.Stream, memory: Iterable[Tensor]) -> None:
        self._stream = stream
        self._memory = memory
        self._before: torch.cuda.Stream | None = None

    def __enter__(self) -> torch.cuda.Stream:
        self._before = torch.cuda.current_stream(self._stream.device)
        torch.cuda.set_stream(self._stream)
        return self._stream

    def __exit__(self, *error: object) -> None:
        assert self._before is not None
        torch.cuda.set_stream(self._before)
        for tensor in self._memory:
            tensor.record_stream(self._stream)


class Rooms:
    """The rooms of a group."""

    def __init__(self, device: torch.device) -> None:
        self.here = CallersRoom(device)
        self._turns = (TurnRoom(device), TurnRoom(device)) if device.type == "cuda" else None
        self._turn = 0

    def next(self) -> TurnRoom | None:
        """The room of the next asynchronous call; None where there are no streams."""
        self._turn ^= 1
        return self._turns[self._turn] if self._turns else None

    @property
    def nbytes(self) -> int:
        """Scratch held."""
        return sum(room.buffer.numel() for room in (self.here, *(self._turns or ())))
