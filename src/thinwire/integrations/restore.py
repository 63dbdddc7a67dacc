"""The buckets of a resumed run: an object in front of the averager that passes DDP's buckets on, or holds them.

[Note: Layout] DDP rebuilds its buckets after the first iteration (with a static graph after the second), and what a
codec makes of a number depends on the block it falls into. A run that is resumed starts with DDP's first buckets again,
where the run it continues had the rebuilt ones. So a checkpoint holds the layout, and until DDP has come to it a
resumed run waits for all gradients of a bucket of *that* layout, from whatever buckets of DDP's: the same bits.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from thinwire.collectives.work import new_future
from thinwire.errors import CollectiveError
from thinwire.integrations.averager import Future, GradientSet
from thinwire.integrations.names import Names

_RESTORED_STEPS = 3  # after which DDP has its final buckets; a static graph takes two
Average = Callable[[GradientSet, Tensor], "Future[Tensor]"]


class Restorer:
    """Averages gradients in DDP's own buckets, or in those of a checkpoint until DDP has come to them."""

    def __init__(self, average: Average) -> None:
        self._average = average
        self._last: list[Names] = []  # buckets of the last whole step
        self._sent: list[Names] = []  # buckets of this step
        self.restore(None)

    @property
    def layout(self) -> list[Names]:
        """For a checkpoint: the buckets of the last step, or those that the next one has to restore."""
        return self._last if self._wanted is None else self._wanted

    def restore(self, layout: Sequence[Names] | None) -> None:
        """Begin anew, with these buckets or, if there are none, with DDP's own."""
        self._wanted = None if layout is None else list(layout)
        self._brought: list[Names] = []  # DDP's own buckets of this step
        self._brought_before: list[Names] | None = None
        self._steps = 0
        self._held: dict[str, tuple[torch.Size, Tensor, _Held]] = {}
        self._sent.clear()

    def average(self, gradients: GradientSet, output: Tensor) -> "Future[Tensor]":
        """Start to average a bucket of DDP's, or hold its gradients until the buckets they belong to are complete."""
        if self._wanted is not None:
            self._brought.append(gradients.names)
            if gradients.names not in self._wanted:
                return self._hold(self._wanted, gradients, output)
        self._sent.append(gradients.names)
        return self._average(gradients, output)

    def end_step(self) -> None:
        """All gradients of a step were given."""
        if self._held:
            left = sorted(self._held)[:3]
            self._held.clear()
            raise CollectiveError(f"the loaded state is of another model: its buckets do not hold {', '.join(left)}")
        if self._sent:
            self._last = self._sent
            self._sent = []
        if self._wanted is None:
            return
        # Stop restoring once DDP has come to the restored buckets by itself, or to other ones for good.
        settled = set(self._brought) == set(self._wanted) or self._brought_before not in (None, self._brought)
        if settled or self._steps == _RESTORED_STEPS:
            self.restore(None)
        else:
            self._brought_before = self._brought
            self._brought = []
            self._steps += 1

    def _hold(self, wanted: Sequence[Names], gradients: GradientSet, output: Tensor) -> "Future[Tensor]":
        owner = _Held(output, {names for names in wanted if not set(names).isdisjoint(gradients.names)})
        for name, shape, view in zip(gradients.names, gradients.shapes, gradients.views, strict=True):
            self._held[name] = shape, view, owner
        for names in wanted:
            if names not in self._sent and all(name in self._held for name in names):
                self._sent.append(names)
                shapes, views, owners = zip(*(self._held.pop(name) for name in names), strict=True)
                done = self._average(GradientSet(names, shapes, None, views), views[0])
                for waiting in set(owners):
                    done.add_done_callback(functools.partial(waiting.got, names))
        return owner.future


class _Held:
    """A bucket whose gradients travel in other buckets: its future is done when all of them are."""

    def __init__(self, buffer: Tensor, waits: set[Names]) -> None:
        self.future = new_future(buffer.device)
        self._buffer = buffer
        self._waits = waits
        self._lock = threading.Lock()  # messages may end on several threads

    def got(self, names: Names, done: "Future[Tensor]") -> None:
        """A message that held some of the gradients is done, or failed."""
        try:
            done.value()
        except Exception as error:
            with contextlib.suppress(RuntimeError):  # another message failed first
                self.future.set_exception(error)  # type: ignore[arg-type]
            return
        with self._lock:
            self._waits.discard(names)
            if not self._waits and not self.future.done():
                self.future.set_result(self._buffer)
