"""Where calls on a GPU's stream run: scratch that is kept from call to call, and the streams of asynchronous ones.

[Note: Workspaces] A blocking call runs on the caller's own stream, without an event; two streams have scratch of their
own. An asynchronous one runs on one of two streams of the group, by turns: while the wires of one call travel, the next
one encodes. Every stream has scratch of its own, so nobody waits for it. NCCL itself keeps the messages of a group in
the order in which they were started, on whatever stream.
"""

import functools
import weakref
from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor

from thinwire.errors import CollectiveError


class Workspace:
    """Scratch for one call at a time. It grows to the largest size that a call has needed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.dry_run = device.type == "meta"  # programs send nothing: they run only to have their kernels compiled
        self.buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._views: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def reserve(self, nbytes: int) -> Tensor:
        """A buffer of at least `nbytes`, used by the current stream."""
        if self.buffer.numel() < nbytes:
            self.release()
            self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return self.buffer

    def views(self, user: Any) -> Any:
        """What `user.split` makes of the first `user.nbytes`, kept while the buffer is."""
        buffer = self.reserve(user.nbytes)
        found = self._views.get(user)
        if found is None:
            found = self._views[user] = user.split(buffer[: user.nbytes])
        return found

    def release(self) -> None:
        """Release the buffer, and forget its views."""
        self._views.clear()
        self.buffer = torch.empty(0, dtype=torch.uint8, device=self.device)


class CallerWorkspace(Workspace):
    """A workspace of blocking calls, which come from any stream."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream: torch.cuda.Stream | None = None  # the one that used it last
        self.handle = -1  # of that

    def reserve(self, nbytes: int) -> Tensor:
        if self.device.type == "cuda" and torch._C._cuda_getCurrentRawStream(self.device.index) != self.handle:
            self._move()
        return self.buffer if self.buffer.numel() >= nbytes else super().reserve(nbytes)

    def _move(self) -> None:
        """Wait for the stream that used the scratch last."""
        current = current_stream(self.device.index)
        if self._stream is not None and self.buffer.numel():
            if torch.cuda.is_current_stream_capturing():
                raise CollectiveError(
                    "a CUDA graph cannot capture this call: its scratch was used on another stream before; warm up and "
                    "capture on one stream, or leave collectives out of the graph"
                )
            current.wait_stream(self._stream)
            self.buffer.record_stream(current)
        self._stream = current
        self.handle = current.cuda_stream


class StreamWorkspace(Workspace):
    """One of the workspaces of asynchronous calls, with a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.stream = torch.cuda.Stream(device)
        self._begun = torch.cuda.Event()
        self._before = self.stream  # the caller's stream,
        self._current_device = -1  # device
        self._memory: Iterable[Tensor] = ()  # and tensors, while it is entered

    def entered(self, memory: Iterable[Tensor]) -> Self:
        """Inside, its stream is the current one, and runs after everything queued on the caller's.

        A faster torch.cuda.stream(). The allocator does not reuse `memory`, should its owner free it, before the stream
        is done with it.
        """
        self._before = current_stream(self.device.index)
        self._begun.record(self._before)
        self.stream.wait_event(self._begun)
        self._memory = memory
        self._current_device = torch._C._cuda_getDevice()  # which changes with the stream
        return self

    def __enter__(self) -> torch.cuda.Stream:
        _set_stream(self.stream)
        return self.stream

    def __exit__(self, *error: object) -> None:
        memory, self._memory = self._memory, ()
        _set_stream(self._before)
        if self._current_device != self.stream.device_index:
            torch.cuda.set_device(self._current_device)
        for tensor in memory:
            tensor.record_stream(self.stream)


def current_stream(index: int) -> torch.cuda.Stream:
    """A faster torch.cuda.current_stream()."""
    return _stream_of(torch._C._cuda_getCurrentStream(index))


@functools.lru_cache(maxsize=64)
def _stream_of(triple: tuple[int, int, int]) -> torch.cuda.Stream:
    """The stream with this id on the device of this index and type."""
    number, index, kind = triple
    return torch.cuda.Stream(stream_id=number, device_index=index, device_type=kind)


def _set_stream(stream: torch.cuda.Stream) -> None:
    torch._C._cuda_setStream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )
