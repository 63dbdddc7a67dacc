"""What a verb returns: collectives under way, as torch.distributed.Work."""

import contextlib
import copy
import functools
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.peers import Ended
from thinwire.collectives.transport import LostRankError, Moving
from thinwire.errors import CollectiveError, WireError

Futures = torch.futures.Future
serving = threading.local()  # .pipeline: a weak reference to the one that this thread serves


def new_future(device: torch.device) -> "Futures[Tensor]":
    """The future of a tensor on `device`."""
    devices: list[Any] = [device] if device.type == "cuda" else []
    return Futures(devices=devices)


def done_future(value: Any, device: torch.device) -> "Futures[Any]":
    """A future of tensors on `device`, done when everything queued on the current stream is."""
    future: Any = new_future(device)
    future.set_result(value)
    return future  # type: ignore[no-any-return]


class Work(dist.Work):
    """A collective under way. The outputs may be read after `wait`, or in the callbacks of its future."""

    pipeline: object = None  # that runs it
    limit: timedelta | None = None  # of the call itself: how long `wait` waits without a timeout

    def __init__(self, outputs: list[Tensor], pipeline: object = None) -> None:
        super().__init__()
        self._outputs = outputs
        self._done = threading.Event()
        devices: list[Any] = list({tensor.device for tensor in outputs if tensor.device.type == "cuda"})
        self._device = devices[0] if devices else None
        self._future: Futures[list[Tensor]] = Futures(devices=devices)
        self._error: BaseException | None = None
        self._ready: torch.cuda.Event | None = None
        self.pipeline = pipeline

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when the outputs may be read (on a GPU: by what the current stream runs next), or raise."""
        if not self._done.is_set():
            if self.pipeline is not None and self.pipeline is getattr(serving, "pipeline", lambda: None)():
                raise CollectiveError(
                    "a callback of a future waits for a collective of its own group, which cannot go on before the "
                    "callback returns: start it with async_op=True there, and wait elsewhere"
                )
            timeout = timeout or self.limit  # as for torch, 0 is no limit
            if not self._done.wait(timeout.total_seconds() if timeout else None):
                raise TimeoutError(f"the collective did not end within {timeout}")
        if self._error is not None:
            raise again(self._error)
        self._future.wait()  # another thread is about to fill it; callers may read its value next
        if self._ready is not None:
            self._ready.wait(torch.cuda.current_stream(self._device))
        return True

    def synchronize(self) -> None:
        """The same as `wait` without a limit: what the current stream runs next may read the outputs."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the outputs are final, without waiting."""
        if self._ready is not None:
            return bool(self._ready.query())
        return self._done.is_set()

    def is_success(self) -> bool:
        """Whether it is completed and did not fail."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """What went wrong, once it is completed; None if nothing did."""
        return self._error

    def result(self) -> list[Tensor]:
        """The outputs; waits for them."""
        self.wait()
        return self._outputs

    def get_future(self) -> Futures[list[Tensor]]:
        """A future of the list of outputs. Its callbacks must not wait for collectives of the same group."""
        return self._future

    def finished(self) -> "Work":
        """Mark as done; on a GPU, done when everything queued on the current stream is."""
        if self._device is not None:
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(self._device))
        self._done.set()
        self._future.set_result(self._outputs)
        return self

    def failed(self, error: BaseException) -> "Work":
        """Mark as failed: waiting raises `error`."""
        self._error = again(error)
        self._done.set()
        fail_future(self._future, error)
        return self


class StreamWork(Work):
    """A collective that a stream of a GPU has been given whole: nothing is left to the host."""

    def __init__(self, outputs: list[Tensor], stream: torch.cuda.Stream) -> None:
        dist.Work.__init__(self)  # the base class would make an event and a future that are seldom asked for
        self._outputs = outputs
        self._device = stream.device
        self._error = None
        self._stream = stream
        self._ready = torch.cuda.Event()
        self._ready.record(stream)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """What the current stream runs next may read the outputs; the host does not wait, so there is no timeout."""
        assert self._ready is not None
        self._ready.wait(torch.cuda.current_stream(self._device))
        return True

    def get_future(self) -> Futures[list[Tensor]]:
        with torch.cuda.stream(self._stream):
            return done_future(self._outputs, self._stream.device)


def again(error: BaseException) -> BaseException:
    """Copy an error without its traceback, whose frames hold tensors and groups. An error that is kept is never raised.

    A future's error is held by C++, which the garbage collector cannot look into.
    """
    try:
        found = copy.copy(error)
    except TypeError:  # its class takes other arguments
        found = CollectiveError(f"{type(error).__name__}: {error}")
    return found.with_traceback(None)


def fail_future(future: "Futures[Any]", error: BaseException) -> None:
    """Fail a future: whoever waits for it gets a new copy of `error`."""
    kept = again(error)

    def raise_again(_: object) -> NoReturn:
        raise again(kept)

    future._set_unwrap_func(raise_again)
    future.set_result(None)


def future_in_thread(run: Callable[[], Any]) -> "Futures[Any]":
    """A future of what `run` returns, or raises, in a thread of its own."""
    found: Futures[Any] = Futures()

    def serve() -> None:
        try:
            value = run()
        except BaseException as error:
            fail_future(found, error)
        else:
            found.set_result(value)

    threading.Thread(target=serve, daemon=True).start()
    return found


def wait_for_torch(work: Any, ended: Ended, timeout: timedelta | None = None) -> None:
    """Wait for a torch Work on gloo; raises PeerError, or TimeoutError if it takes longer than `timeout`."""
    began = time.monotonic()
    try:
        work.wait(*[timeout] if timeout else [])
        return
    except RuntimeError as error:
        waited = time.monotonic() - began
        if timeout and waited >= timeout.total_seconds() and not work.is_completed():
            raise TimeoutError(f"the collective did not end within {timeout}") from None
        lost = error if isinstance(error, LostRankError) else LostRankError(None, error, waited)
    raise ended(lost.with_traceback(None))


class TorchWork(Work):
    """A torch Work on gloo. `finish` runs once, in the thread that first learns that the work is completed."""

    def __init__(self, work: Any, outputs: list[Tensor], finish: Callable[[], None] | None, ended: Ended) -> None:
        dist.Work.__init__(self)  # the base class would make an event and a future that are not needed
        self._work = work
        self._outputs = outputs
        self._finish = finish  # brings the result to the outputs
        self._waited = False  # gloo's reduce_scatter never says that it is completed
        self._error = None
        self._ended = ended
        self._began = time.monotonic()
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._error is not None:
            raise again(self._error)
        if self._waited:  # known from its future, whose callbacks may wait again
            return True
        try:
            wait_for_torch(self._work, self._ended, timeout)
            self._end()
        except Exception as error:
            self._error = None if isinstance(error, TimeoutError) else again(error)
            raise
        return True

    def is_completed(self) -> bool:
        if not self._waited and not self._work.is_completed():
            return False
        with contextlib.suppress(Exception):  # `wait` and `exception` report what went wrong
            self.wait()
        return True

    def get_future(self) -> Futures[list[Tensor]]:
        try:
            arrived = self._work.get_future()
        except RuntimeError:  # gloo's reduce_scatter has none
            return self._waiting()
        found: Futures[list[Tensor]] = arrived.then(self._arrived)
        return found

    def _waiting(self) -> Futures[list[Tensor]]:
        return future_in_thread(self.wait).then(self._arrived)

    def _arrived(self, future: Futures[object]) -> list[Tensor]:
        try:
            future.value()  # raises what went wrong
            self._end()
        except RuntimeError as error:
            waited = time.monotonic() - self._began
            lost = error if isinstance(error, CollectiveError) else LostRankError(None, error, waited)
            self._error = again(self._ended(lost))
            raise again(self._error) from None
        return self._outputs

    def _end(self) -> None:
        with self._lock:
            if self._finish is not None:
                with torch.inference_mode():  # outputs may be inference tensors, and this may be gloo's thread
                    self._finish()
                self._finish = None
            self._waited = True


class MessageWork(TorchWork):
    """Messages between this rank and others. `finish` decodes those that came.

    On a GPU, on the stream that first waits: a stream of ours would hold up a message behind an earlier one that comes
    later.
    """

    def __init__(self, moving: Moving, outputs: list[Tensor], finish: Callable[[], None], ended: Ended) -> None:
        self._decoded: torch.cuda.Event | None = None
        self._place = outputs[0].device
        super().__init__(moving, outputs, functools.partial(self._decode, finish), ended)

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            super().wait(timeout)
        except WireError as error:  # damaged on its way
            raise self._ended(error) from None
        if self._decoded is not None:
            self._decoded.wait(torch.cuda.current_stream(self._place))
        return True

    def is_completed(self) -> bool:
        return super().is_completed() and (self._decoded is None or bool(self._decoded.query()))

    def get_future(self) -> Futures[list[Tensor]]:
        if self._place.type != "cuda":
            return self._waiting()  # gloo's messages have no futures
        with torch.cuda.stream(torch.cuda.Stream(self._place)):  # the caller's does not wait
            self.wait()
            return done_future(self._outputs, self._place)

    def source_rank(self) -> int:
        """The rank, in the group, that a message came from."""
        moving = self._work
        self.wait()
        found: int = moving[0]._source_rank() if moving.peers[0] is None else moving.peers[0]
        return found

    _source_rank = source_rank  # torch's name for it

    def _decode(self, finish: Callable[[], None]) -> None:
        finish()
        if self._place.type == "cuda":
            self._decoded = torch.cuda.Event()
            self._decoded.record(torch.cuda.current_stream(self._place))
