"""What a verb returns: collectives under way, as torch.distributed.Work."""

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Futures = torch.futures.Future
_LOOK_S = 1.0  # how often a waiting caller looks whether the ranks disagree


class Work(dist.Work):
    """A collective under way. The outputs may be read after `wait`, or in the callbacks of its future."""

    def __init__(self, outputs: list[Tensor], look: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._outputs = outputs
        self._done = threading.Event()
        devices: list[Any] = list({tensor.device for tensor in outputs if tensor.device.type == "cuda"})
        self._device = devices[0] if devices else None
        self._future: Futures[list[Tensor]] = Futures(devices=devices)
        self._error: BaseException | None = None
        self._ready: torch.cuda.Event | None = None
        self.look = look  # raises when the ranks turn out to disagree

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when the outputs may be read (on a GPU: by what the current stream runs next), or raise."""
        left = timeout.total_seconds() if timeout else float("inf")  # as for torch, 0 is no limit
        while not self._done.wait(min(left, _LOOK_S)):
            left -= _LOOK_S
            if left <= 0:
                raise TimeoutError(f"the collective did not end within {timeout}")
            if self.look is not None:
                self.look()
        if self._error is not None:
            raise self._error
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

    @property
    def is_ended(self) -> bool:
        """Whether `finished` or `failed` was called: on a GPU the outputs may still be on their way."""
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
        """Mark as done; on a GPU as done when what the current stream has so far is."""
        if self._device is not None:
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(self._device))
        self._done.set()
        self._future.set_result(self._outputs)
        return self

    def failed(self, error: BaseException) -> "Work":
        """Mark as failed: waiting raises `error`."""
        self._error = error
        self._done.set()
        self._future.set_exception(error)  # type: ignore[arg-type]
        return self


class StreamWork(Work):
    """A collective that a stream of a GPU has been given whole: nothing is left to the host."""

    def __init__(self, outputs: list[Tensor], stream: torch.cuda.Stream) -> None:
        dist.Work.__init__(self)  # the base class would make an event and a future that are seldom asked for
        self._outputs = outputs
        self._device = stream.device
        self._error = None
        self._ready = torch.cuda.Event()
        self._ready.record(stream)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """What the current stream runs next may read the outputs; the host does not wait, so there is no timeout."""
        assert self._ready is not None
        self._ready.wait(torch.cuda.current_stream(self._device))
        return True

    @property
    def is_ended(self) -> bool:
        return True

    def get_future(self) -> Futures[list[Tensor]]:
        assert self._ready is not None
        assert self._device is not None
        future: Futures[list[Tensor]] = Futures(devices=[self._device])
        side = torch.cuda.Stream(self._device)
        side.wait_event(self._ready)
        with torch.cuda.stream(side):  # a future is as far as the current stream
            future.set_result(self._outputs)
        return future


def wait_looking(work: Any, look: Callable[[], None], timeout: timedelta | None = None) -> None:
    """Wait for a work of torch's on gloo; while that takes long, `look` whether the ranks disagree."""
    left = timeout.total_seconds() if timeout else float("inf")
    while True:
        try:
            work.wait(timedelta(seconds=min(left, _LOOK_S)))
            return
        except RuntimeError:
            if work.is_completed():
                work.wait()  # raises what went wrong
                return
        left -= _LOOK_S
        if left <= 0:
            raise TimeoutError(f"the collective did not end within {timeout}") from None
        look()


class TorchWork(Work):
    """A work of torch's on gloo. What `finish` has to do is done once, by whoever learns first that it is completed."""

    def __init__(
        self, work: Any, outputs: list[Tensor], finish: Callable[[], None] | None, look: Callable[[], None]
    ) -> None:
        dist.Work.__init__(self)  # the base class would make an event and a future that are not needed
        self._work = work
        self._outputs = outputs
        self._finish = finish  # brings the result to the outputs
        self._waited = False  # gloo's reduce_scatter never says that it is completed
        self._error = None
        self.look = look
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._error is not None:
            raise self._error
        if self._waited:  # known from its future, whose callbacks may wait again
            return True
        assert self.look is not None
        try:
            wait_looking(self._work, self.look, timeout)
            self._end()
        except Exception as error:
            self._error = None if isinstance(error, TimeoutError) else error
            raise
        return True

    @property
    def is_ended(self) -> bool:
        return self._waited or bool(self._work.is_completed())

    def is_completed(self) -> bool:
        if not self.is_ended:
            return False
        with contextlib.suppress(Exception):  # what went wrong is told by `wait` and `exception`
            self.wait()
        return True

    def get_future(self) -> Futures[list[Tensor]]:
        try:
            arrived = self._work.get_future()
        except RuntimeError:  # gloo's reduce_scatter has none: a thread of its own waits
            arrived = Futures()
            threading.Thread(target=self._tell, args=(arrived,), daemon=True).start()
        found: Futures[list[Tensor]] = arrived.then(self._arrived)
        return found

    def _tell(self, future: Futures[None]) -> None:
        try:
            self.wait()
        except BaseException as error:
            future.set_exception(error)  # type: ignore[arg-type]
        else:
            future.set_result(None)

    def _arrived(self, future: Futures[object]) -> list[Tensor]:
        try:
            future.value()  # raises what went wrong
            self._end()
        except Exception as error:
            self._error = error
            raise
        return self._outputs

    def _end(self) -> None:
        with self._lock:
            if self._finish is not None:
                with torch.inference_mode():  # outputs may be inference tensors, and this may be gloo's thread
                    self._finish()
                self._finish = None
            self._waited = True
