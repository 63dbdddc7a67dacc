"""Averages sets of gradients over ranks, step after step: lanes, messages, feedback, the layout of a resumed run.

[Note: Layout] DDP rebuilds its buckets after the first iteration (with a static graph after the second), and what a
codec makes of a number depends on the block it falls into. A run that is resumed starts with DDP's first buckets again,
where the run it continues had the rebuilt ones. So a checkpoint holds the layout, and until DDP has come to it a
resumed run waits for all gradients of a bucket of *that* layout, from whatever buckets of DDP's: the same bits.
"""

import contextlib
import functools
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import feedback
from thinwire.codecs import Identity
from thinwire.collectives import torch_verbs
from thinwire.collectives.lane import LaneSpec
from thinwire.collectives.message import Message, Nodes
from thinwire.errors import CodecError, CollectiveError
from thinwire.feedback import Ledger
from thinwire.integrations.decisions import Decisions, Size
from thinwire.integrations.layout import Arrangement
from thinwire.integrations.stats import BucketMeter, ErrorWatch, Tally

Names = tuple[str, ...]
_RESTORED_STEPS = 3  # after which DDP has its final buckets; a static graph takes two
Future = torch.futures.Future


@dataclass(frozen=True)
class Gradients:
    """What one message averages: gradients, flat, with their parameters' names and shapes."""

    names: Names
    shapes: tuple[torch.Size, ...]
    views: Sequence[Tensor]
    buffer: Tensor | None  # what the views are the parts of, in order; None if they are scattered


class _Bucket:
    """Everything that is the same at every step about one set of gradients."""

    def __init__(self, engine: "Engine", gradients: Gradients) -> None:
        like, group = gradients.views[0], engine.group
        sizes = [Size(s, v.numel(), like.dtype) for s, v in zip(gradients.shapes, gradients.views, strict=True)]
        slots = [engine.decisions.slot(name, size) for name, size in zip(gradients.names, sizes, strict=True)]
        self.arrangement = Arrangement(slots)
        self.kinds = self.arrangement.kinds
        self.numel = sum(size.numel for size in sizes)
        self.plain_bytes = 2 * (group.size() - 1) * self.numel * like.itemsize // group.size()
        exact = all(isinstance(kind.codec, Identity) for kind in self.kinds)
        self.message = None if exact else engine.message(gradients.names, self.kinds, like, gradients.buffer is None)
        pieces = [self.arrangement.pieces(i) for i in range(len(self.kinds))]
        kinds = zip(self.kinds, pieces, strict=True)
        self.carries = [engine.carry(kind.feedback, lane, like.device) for kind, lane in kinds]

    def watches(self, device: torch.device) -> list[ErrorWatch]:
        """One a lane."""
        return [ErrorWatch(self.arrangement.pieces(i), device) for i in range(len(self.kinds))]


class Engine:
    """Averages what it is given, as `decisions` say, and remembers what feedback has to."""

    def __init__(
        self, decisions: Decisions, residual_dtype: torch.dtype, algorithm: str, nodes: Nodes | None = None
    ) -> None:
        self.decisions, self.algorithm, self.nodes = decisions, algorithm, nodes
        self.residuals, self.means = Ledger(residual_dtype), Ledger(torch.float32)
        self.tally = Tally()
        self.group: dist.ProcessGroup = None  # type: ignore[assignment]  # of the present step
        self.buckets: dict[tuple[Names, torch.dtype, torch.device, bool], _Bucket] = {}
        self.layout: list[Names] = []  # of the last whole step
        self.restored: list[Names] | None = None  # of a checkpoint, until a step was made with it
        self.kinds: dict[str, str] = {}  # of the feedback that parameters' memories come from
        self._messages: dict[object, Message] = {}
        self._brought: list[Names] = []  # DDP's own buckets of this step, while there are restored ones
        self._brought_before: list[Names] | None = None
        self._restored_steps = 0
        self._setting: object = None  # the decisions that `buckets` were made with
        self._seen: list[Names] = []  # of this step
        self._watches: list[ErrorWatch] = []
        self._errors: dict[str, float] = {}  # by parameter, of a checkpoint
        self._held: dict[str, tuple[torch.Size, Tensor, _Held]] = {}
        self.error: float | None = None  # at the last measured step
        self.clipped: float | None = None

    # --- steps --------------------------------------------------------------------------------------------------------

    def begin_step(self, group: dist.ProcessGroup, step: int, seconds: float, device: torch.device) -> str:
        """Decide for `step`; all collectives of the last one are done. Gives what is to be told, if anything."""
        if group is not self.group:
            self.group = group
            self._messages.clear()
            self.buckets.clear()
        watches, self._watches = self._watches, []
        error = self._note_errors(watches) if watches else None
        errors, self._errors = self.errors(watches), {}
        agree = functools.partial(_agree, group, device)
        news = self.decisions.begin(step, seconds, errors, error, agree)
        if news:  # what the losers of a race remember is owed to nobody
            self.residuals.load({})
            self.means.load({})
            self.buckets.clear()
        if self.decisions.setting != self._setting:
            self._setting = self.decisions.setting
            self.buckets.clear()
        return news

    def end_step(self) -> None:
        """All gradients of a step were given."""
        if self._held:
            left = sorted(self._held)[:3]
            self._held.clear()
            raise CollectiveError(f"the loaded state is of another model: its buckets do not hold {', '.join(left)}")
        if self._seen:
            self.layout, self._seen = self._seen, []
        if self.restored is not None:
            self._let_go_of_restored()

    def _let_go_of_restored(self) -> None:
        """DDP has come to the restored buckets by itself, or to other ones for good."""
        brought, self._brought = self._brought, []
        own = set(brought) == set(self.restored or ())
        if own or self._brought_before not in (None, brought) or self._restored_steps == _RESTORED_STEPS:
            self.restored = self._brought_before = None
            self._restored_steps = 0
        else:
            self._brought_before = brought
            self._restored_steps += 1

    def errors(self, watches: Sequence[ErrorWatch] | None = None) -> dict[str, float]:
        """Squared errors by parameter that the next step decides from, if this one was measured."""
        summed = dict(self._errors)
        for watch in self._watches if watches is None else watches:
            for name, lost in watch.lost_by_name().items():
                summed[name] = summed.get(name, 0.0) + lost
        return summed

    def _note_errors(self, watches: Sequence[ErrorWatch]) -> float | None:
        """The relative error of a step; None if it was not finite, which says nothing, or nothing was rounded."""
        lost, sent = sum(w.total_lost for w in watches), sum(w.total_sent for w in watches)
        codes = sum(watch.codes for watch in watches)
        if not math.isfinite(lost + sent) or not any(watch.looked for watch in watches):
            return None
        self.error = (lost / sent) ** 0.5 if sent > 0 else 0.0
        self.clipped = sum(int(watch.outermost) for watch in watches) / codes if codes else None
        return self.error

    # --- averages -----------------------------------------------------------------------------------------------------

    def average(self, names: Names, shapes: Sequence[torch.Size], buffer: Tensor, step: int) -> "Future[Tensor]":
        """Start to average a buffer of gradients, in place, one parameter after the other."""
        real = torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer
        factor = real.numel() // max(1, sum(shape.numel() for shape in shapes))  # 2 for complex numbers
        views: Sequence[Tensor] = real.split([factor * shape.numel() for shape in shapes])
        if not all(view.numel() for view in views):
            filled = [i for i, view in enumerate(views) if view.numel()]
            names, shapes = tuple(names[i] for i in filled), tuple(shapes[i] for i in filled)
            views = tuple(views[i] for i in filled)
        if self.restored is not None:
            self._brought.append(names)
        if self.restored is None or names in self.restored:
            self._seen.append(names)
            return self._send(Gradients(names, tuple(shapes), views, real), buffer, step)
        return self._hold(names, shapes, views, buffer, step)

    def _send(self, gradients: Gradients, output: Tensor, step: int) -> "Future[Tensor]":
        bucket = self._bucket(gradients)
        if bucket.message is None:
            self.tally.sent(bucket.plain_bytes, bucket.plain_bytes)
            return _plainly(gradients, output, self.group)
        lanes, copies = bucket.arrangement.load(gradients.views, gradients.buffer)
        watches: Sequence[ErrorWatch | None] = [None] * len(lanes)
        if self.decisions.measuring:
            watches = found = bucket.watches(output.device)
            self._watches += found
        checks = [self.tally.checked, *[None] * (len(lanes) - 1)]
        loads = [
            bucket.message.lane(i, *load)
            for i, load in enumerate(zip(lanes, bucket.carries, watches, checks, strict=True))
        ]
        meter = BucketMeter(self.tally) if output.device.type == "cpu" else None
        work = bucket.message.run(loads, [output], step=step, copies=copies, meter=meter)
        self.tally.sent(bucket.message.sent_bytes, bucket.plain_bytes)
        return work.get_future().then(lambda done: _first(done, meter))

    def _bucket(self, gradients: Gradients) -> _Bucket:
        key = gradients.names, gradients.views[0].dtype, gradients.views[0].device, gradients.buffer is None
        if key not in self.buckets:
            self.buckets[key] = _Bucket(self, gradients)
        return self.buckets[key]

    def message(self, names: Names, kinds: Sequence[LaneSpec], like: Tensor, scattered: bool) -> Message:
        """The message of these lanes; codecs that come back find theirs, and need not agree on it again."""
        key = names, tuple(kinds), like.dtype, like.device, scattered
        if key not in self._messages:
            self._messages[key] = Message(kinds, like, group=self.group, algorithm=self.algorithm, nodes=self.nodes)
        return self._messages[key]

    def carry(self, kind: str, pieces: Sequence[feedback.Piece], device: torch.device) -> Any:
        """The feedback of a lane, with the memories of its parameters."""
        if not kind:
            return None
        self._forget_others(kind, [piece.name for piece in pieces if piece.name is not None])
        residual, gaps = self.residuals.lane(pieces, device), feedback.Gaps(pieces)
        if kind == "classic":
            return feedback.Classic(residual, self.group.size(), gaps)
        if self.residuals.dtype != torch.float32:
            raise CodecError(
                "this optimiser asks for feedback='ef21', which adds up what was sent, exactly: residual_dtype must be "
                f"float32, got {self.residuals.dtype}; or name another feedback"
            )
        return feedback.EF21(residual, self.means.lane(pieces, device), self.group.size(), gaps)

    def _forget_others(self, kind: str, names: Sequence[str]) -> None:
        """What another kind of feedback remembered says nothing to this one."""
        stale = [name for name in names if self.kinds.get(name, kind) != kind]
        self.residuals.drop(stale)
        self.means.drop(stale)
        self.kinds.update(dict.fromkeys(names, kind))

    # --- [Note: Layout] -----------------------------------------------------------------------------------------------

    @property
    def last_layout(self) -> list[Names]:
        """For a checkpoint: the buckets of the last step, or those that the next one has to restore."""
        return self.layout if self.restored is None else self.restored

    def _hold(
        self, names: Names, shapes: Sequence[torch.Size], views: Sequence[Tensor], buffer: Tensor, step: int
    ) -> "Future[Tensor]":
        """Keep gradients until those of a bucket of the restored layout are complete."""
        assert self.restored is not None
        owner = _Held(buffer, {wanted for wanted in self.restored if not set(wanted).isdisjoint(names)})
        for name, shape, view in zip(names, shapes, views, strict=True):
            self._held[name] = shape, view, owner
        for wanted in self.restored:
            if wanted not in self._seen and all(name in self._held for name in wanted):
                self._seen.append(wanted)
                self._send_held(wanted, step)
        return owner.future

    def _send_held(self, wanted: Names, step: int) -> None:
        shapes, views, owners = zip(*(self._held.pop(name) for name in wanted), strict=True)
        done = self._send(Gradients(wanted, shapes, views, None), views[0], step)
        for owner in set(owners):
            done.add_done_callback(functools.partial(owner.got, wanted))

    # --- memory -------------------------------------------------------------------------------------------------------

    @property
    def bits_per_element(self) -> float | None:
        """Of the wires of all buckets; None before there are any."""
        messages = [
            (bucket.message, bucket.numel) for bucket in list(self.buckets.values()) if bucket.message is not None
        ]
        numel = sum(count for _, count in messages)
        return 8 * sum(message.wire_bytes for message, _ in messages) / numel if numel else None

    @property
    def scratch_bytes(self) -> int:
        """Memory of wires under way."""
        channels = {
            id(b.message.channel): b.message.channel for b in list(self.buckets.values()) if b.message is not None
        }
        return sum(channel.scratch.nbytes for channel in channels.values())

    @property
    def feedback(self) -> str:
        """What is in use."""
        used = {kind.feedback for bucket in list(self.buckets.values()) for kind in bucket.kinds if kind.feedback}
        return "+".join(sorted(used)) or "none"

    def forget(
        self,
        residuals: Mapping[str, Tensor],
        means: Mapping[str, Tensor],
        kinds: Mapping[str, str] | None = None,
        errors: Mapping[str, float] | None = None,
    ) -> None:
        """Start anew from these."""
        self.kinds, self._errors = dict(kinds or {}), dict(errors or {})
        self.buckets.clear()
        self._seen.clear()
        self._held.clear()
        self._watches.clear()
        self._brought.clear()
        self.restored = self._brought_before = None
        self._restored_steps = 0
        self.residuals.load(residuals)
        self.means.load(means)


class _Held:
    """A bucket whose gradients travel in other buckets: its future is done when all of them are."""

    def __init__(self, buffer: Tensor, waits: set[Names]) -> None:
        self.future = new_future(buffer.device)
        self._buffer, self._waits = buffer, waits
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


def new_future(device: torch.device) -> "Future[Tensor]":
    """A future of a tensor on `device`."""
    devices: list[Any] = [device] if device.type == "cuda" else []
    return torch.futures.Future(devices=devices)


def _agree(group: dist.ProcessGroup, device: torch.device, values: Sequence[float], op: Any) -> list[float]:
    """The sum or maximum over ranks, the same everywhere."""
    tensor = torch.tensor(list(values), dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op, group=group)
    found: list[float] = tensor.tolist()
    return found


def _first(done: "Future[list[Tensor]]", meter: BucketMeter | None) -> Tensor:
    if meter is not None:
        meter.close()
    return done.value()[0]


def _plainly(gradients: Gradients, output: Tensor, group: dist.ProcessGroup) -> "Future[Tensor]":
    """As DDP does it without a hook."""
    buffer, views = gradients.buffer, gradients.views
    if buffer is output:
        return torch_verbs.average(buffer, group)
    whole = torch.cat(list(views)) if buffer is None else buffer
    return torch_verbs.average(whole, group).then(
        lambda done: _spread(done.value(), views if buffer is None else (), output)
    )


def _spread(whole: Tensor, views: Sequence[Tensor], output: Tensor) -> Tensor:
    if views:
        torch._foreach_copy_(list(views), list(whole.split([view.numel() for view in views])))
    return output
