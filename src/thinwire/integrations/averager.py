"""Averages sets of gradients over ranks, step after step: lanes, messages and the memories of feedback."""

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import feedback
from thinwire.codecs import Identity
from thinwire.collectives import torch_verbs
from thinwire.collectives.call import Call
from thinwire.collectives.channel import bounded, channel_of
from thinwire.collectives.lane import LaneSpec
from thinwire.collectives.message import Message
from thinwire.errors import CodecError
from thinwire.integrations import lanes
from thinwire.integrations.decisions import Decisions
from thinwire.integrations.names import PADDING, ROW, Names, ParameterSize
from thinwire.integrations.options import DDPOptions
from thinwire.integrations.stats import SECONDS, BucketMeter, Stats, StepErrors, Tally
from thinwire.integrations.streamed import StreamedBucket, streamed
from thinwire.log import announce

Future = torch.futures.Future
ByName = Mapping[str, Tensor]


@dataclass(frozen=True)
class GradientSet:
    """What one message averages: gradients, flat and real, with their parameters' names and shapes."""

    names: Names
    shapes: Sequence[torch.Size]
    buffer: Tensor | None  # what holds them all, one after the other; None if they are scattered
    scattered: Sequence[Tensor] = ()
    numels: Sequence[int] | None = None  # of their elements in the buffer, where a rank has a part of each

    @property
    def like(self) -> Tensor:
        """A tensor of their dtype and device."""
        return self.scattered[0] if self.buffer is None else self.buffer

    @functools.cached_property
    def views(self) -> Sequence[Tensor]:
        """Every gradient."""
        if self.buffer is None:
            return self.scattered
        sizes = self.numels or [shape.numel() for shape in self.shapes]
        factor = self.buffer.numel() // max(1, sum(sizes))  # 2 for complex parameters
        found: Sequence[Tensor] = self.buffer.split([factor * size for size in sizes])
        return found


def gradients_in(buffer: Tensor, names: Names, shapes: Sequence[torch.Size]) -> GradientSet:
    """The gradients that lie in a buffer, one parameter after the other; those without elements are left out."""
    real = torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer
    if any(0 in shape for shape in shapes):
        filled = [i for i, shape in enumerate(shapes) if shape.numel()]
        names = tuple(names[i] for i in filled)
        shapes = [shapes[i] for i in filled]
    return GradientSet(names, shapes, real)


class Memories:
    """What feedback remembers, by parameter, and which kind of feedback that comes from."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.residuals = feedback.Ledger(dtype)
        self.means = feedback.Ledger(torch.float32)
        self.kinds: dict[str, str] = {}

    def load(self, residuals: ByName, means: ByName, kinds: Mapping[str, str]) -> None:
        self.residuals.load(residuals)
        self.means.load(means)
        self.kinds = dict(kinds)

    def carry(
        self, lane: lanes.BucketLane, world: float, device: torch.device, rows: Sequence[feedback.Piece] = ()
    ) -> Any:
        """The feedback of a lane, with the memories of its parameters; None where it has none.

        `rows`: where a lane has a row per rank, the pieces of all rows, named by parameter and row.
        """
        kind = lane.spec.feedback
        if not kind:
            return None
        names = [piece.name for piece in lane.pieces if piece.name is not None]
        stale = {name for name in names if self.kinds.get(name, kind) != kind}  # another kind remembered something
        self.kinds.update(dict.fromkeys(names, kind))
        self.means.drop(stale)
        self.residuals.drop([p.name for p in rows if p.name and p.name.rpartition(ROW)[0] in stale] if rows else stale)
        residual = self.residuals.lane(rows or lane.pieces, device)
        gaps = feedback.Gaps(rows or lane.pieces)
        if kind == "classic":
            return feedback.Classic(residual, world, gaps)
        if self.residuals.dtype != torch.float32:
            raise CodecError(
                "this optimiser asks for feedback='ef21', which adds up what was sent, exactly: residual_dtype must be "
                f"float32, got {self.residuals.dtype}; or name another feedback"
            )
        return feedback.EF21(residual, self.means.lane(lane.pieces, device), world, gaps)


@dataclass(frozen=True)
class _Bucket:
    """Everything that is the same at every step about one set of gradients."""

    lanes: list[lanes.BucketLane]
    message: Message | None  # None if nothing of it is compressed
    carries: list[Any]  # the feedback of each lane
    streamed: StreamedBucket | None  # on a stream of a GPU: what averages it, unless its errors are measured
    numel: int
    plain_bytes: int  # that a rank sends of it without compression


class Averager:
    _timed = True  # whether the work of chunks on the CPU is timed

    def __init__(self, options: DDPOptions, decisions: Decisions) -> None:
        self.decisions = decisions
        self.memories = Memories(options.residual_dtype)
        self.errors = StepErrors()
        self.tally = Tally()
        self.group: dist.ProcessGroup | None = None  # of the present step
        self.peers: Sequence[dist.ProcessGroup] = ()  # groups that decide alike, besides: those of other shards
        self.elsewhere: Iterable[str] = ()  # parameters of which they may have a part where this rank has none
        self._agreed = options.agreed
        self._algorithm = options.algorithm
        self._nodes = options.nodes
        self._step = 0
        self._began = 0.0  # when it did
        self._buckets: dict[object, Any] = {}  # by what fixes them: a _Bucket each, or what a subclass makes of rows
        self._messages: dict[object, Any] = {}
        self._setting: object = None  # the decisions that `_buckets` were made with

    def begin_step(self, group: dist.ProcessGroup, step: int, device: torch.device) -> None:
        """Decide for `step`; all collectives of the last one are done. The group's first rank tells what is new."""
        before = self._began
        self._began = perf_counter()
        if group is not self.group:
            self.group = group
            self._messages.clear()
            self._buckets.clear()
            Call(channel_of(group, device), f"gradients(from step {step}, {self._agreed})", anew=True)
        self._step = step
        self.tally.timed = self._timed and device.type == "cpu"
        by_name = self.errors.by_name()
        if by_name:
            by_name = {**dict.fromkeys(self.elsewhere, 0.0), **by_name}
        agree = functools.partial(over_groups, "decide", (group, *self.peers), device)
        news = self.decisions.begin(step, self._began - before, by_name, self.errors.end_step(), agree)
        if self.decisions.raced:  # what the losers of a race remember is owed to nobody
            self.memories.load({}, {}, self.memories.kinds)
        if self.decisions.raced or self.decisions.setting != self._setting:
            self._setting = self.decisions.setting
            self._buckets.clear()
        if news and group.rank() == 0:
            announce(news)

    def average(
        self, gradients: GradientSet, output: Tensor, group: dist.ProcessGroup | None = None
    ) -> "Future[Tensor]":
        """Start to average gradients over the step's group or another, in place; the future holds `output`."""
        group = group or self.group
        assert group is not None
        like = gradients.like
        key = gradients.names, like.dtype, like.device, gradients.buffer is None
        if key not in self._buckets:
            self._buckets[key] = self._new_bucket(gradients, like, group)
        bucket: _Bucket = self._buckets[key]
        if bucket.message is None:
            self.tally.sent(bucket.plain_bytes, bucket.plain_bytes)
            return _plainly(gradients, output, group)
        if bucket.streamed is not None and gradients.buffer is not None and not self.decisions.measuring:
            self.tally.sent(bucket.message.sent_bytes, bucket.plain_bytes)
            return bucket.streamed.average(gradients.buffer, output, self._step, self.tally)
        tensors, copies = lanes.load(bucket.lanes, gradients.views, gradients.buffer)
        watches: Sequence[Any] = [None] * len(tensors)
        if self.decisions.measuring:
            watches = [self.errors.watch(n.pieces, output.device).lost for n in bucket.lanes]
        parts = zip(tensors, bucket.carries, watches, strict=True)
        loaded = [bucket.message.lane(i, *part, self.tally.checked) for i, part in enumerate(parts)]
        meter = BucketMeter(self.tally) if output.device.type == "cpu" else None
        stage = None if meter is None else meter.stage
        work = bucket.message.run(loaded, [output], step=self._step, copies=copies, meter=stage)
        self.tally.sent(bucket.message.sent_bytes, bucket.plain_bytes)

        def finish(done: "Future[list[Tensor]]") -> Tensor:
            if meter is not None:
                meter.close()
            return done.value()[0]

        return work.get_future().then(finish)

    def go_on(self, residuals: ByName, means: ByName, kinds: Mapping[str, str], errors: Mapping[str, float]) -> None:
        """Forget what is remembered of gradients and go on from these; on a mesh nobody would use them."""
        self.memories.load(residuals if self._nodes is None else {}, means if self._nodes is None else {}, kinds)
        self.errors.load(errors)
        self._buckets.clear()

    def forget(self, gone: Collection[str]) -> None:
        """Drop what is remembered of parameters whose gradients do not come any more, and say so."""
        for ledger in (self.memories.residuals, self.memories.means):
            ledger.drop(gone)
        for name in gone:
            self.memories.kinds.pop(name, None)
            self.decisions.sizes.pop(name, None)
        if self.group is not None and self.group.rank() == 0:
            some = ", ".join(sorted(gone)[:3])
            more = f" and {len(gone) - 3} more" if len(gone) > 3 else ""
            announce(f"no gradients come of {some}{more} in this run: what the loaded state remembers of it is dropped")

    def _new_bucket(self, gradients: GradientSet, like: Tensor, group: dist.ProcessGroup) -> _Bucket:
        world = group.size()
        numels = [view.numel() for view in gradients.views]
        sizes = [ParameterSize(shape, n, like.dtype) for shape, n in zip(gradients.shapes, numels, strict=True)]
        pairs = zip(gradients.names, sizes, strict=True)
        specs = [self._spec(name, size, whole=gradients.numels is None) for name, size in pairs]
        found = lanes.lanes_of(gradients.names, specs)
        laid = tuple(lane.spec for lane in found)
        key = gradients.names, laid, like.dtype, like.device, gradients.buffer is None
        exact = all(isinstance(spec.codec, Identity) for spec in laid)
        if not exact and key not in self._messages:  # codecs that come back need not agree on theirs again
            made = Message(laid, like, group=group, algorithm=self._algorithm, nodes=self._nodes)
            bounded(self._messages)[key] = made  # widths that are dealt anew for ever make them by the thousand
        message: Message | None = None if exact else self._messages[key]
        carries = [self.memories.carry(lane, world, like.device) for lane in found]
        return _Bucket(
            lanes=found,
            message=message,
            carries=carries,
            streamed=None if message is None else streamed(message, found, carries, numels),
            numel=sum(numels),
            plain_bytes=sum_bytes(sum(numels), like.dtype, world),
        )

    def _spec(self, name: str, size: ParameterSize, *, whole: bool) -> LaneSpec:
        """How a parameter travels or, if not all of it is here, a part of it or its padding."""
        full = size if whole else size._replace(numel=size.shape.numel())
        return self.decisions.spec(name.removeprefix(PADDING), full)._replace(numel=size.numel)

    def stats(self, step: int) -> Stats:
        """What compression did in `step` steps on this rank."""
        tally = self.tally
        coded = [bucket for bucket in list(self._buckets.values()) if bucket.message is not None]
        numel = sum(bucket.numel for bucket in coded)
        channels = {bucket.message.channel for bucket in coded}
        return Stats(
            steps=step,
            codec=str(self.decisions.schedule),
            feedback=self.feedback,
            chosen=self.decisions.why,
            bytes_sent=tally.bytes_sent,
            bytes_plain=tally.bytes_plain,
            bits_per_element=8 * sum(bucket.message.wire_bytes for bucket in coded) / numel if numel else None,
            relative_error=self.errors.relative,
            nonfinite=tally.all_nonfinite,
            **(tally.seconds if tally.timed else dict.fromkeys(SECONDS)),
            residual_bytes=self.memories.residuals.nbytes + self.memories.means.nbytes,
            scratch_bytes=sum(c.scratch.nbytes + (c.workspaces.nbytes if c.workspaces else 0) for c in channels),
        )

    @property
    def feedback(self) -> str:
        """The kinds that are in use, or "none"."""
        used = {lane.spec.feedback for bucket in list(self._buckets.values()) for lane in bucket.lanes}
        found = "+".join(sorted(used - {""})) or "none"
        return f"{found}+moments" if self.decisions.weighs and self.decisions.in_units else found


def sum_bytes(numel: int, dtype: torch.dtype, world: int) -> int:
    """What a rank sends of a sum without compression."""
    return 2 * (world - 1) * numel * dtype.itemsize // world


def over_groups(
    what: str, groups: Sequence[dist.ProcessGroup], device: torch.device, values: Sequence[float], op: Any
) -> list[float]:
    """The sum, or whatever `op` is, of every rank's values over these groups, one after the other."""
    for group in groups:
        values = torch_verbs.agree(what, values, op, group, device)
    return list(values)


def _plainly(gradients: GradientSet, output: Tensor, group: dist.ProcessGroup) -> "Future[Tensor]":
    """As DDP does it without a hook."""
    views = list(gradients.views)
    whole = torch.cat(views) if gradients.buffer is None else gradients.buffer

    def finish(done: "Future[Tensor]") -> Tensor:
        done.value()  # raises what went wrong
        if gradients.buffer is None:
            torch._foreach_copy_(views, whole.split([view.numel() for view in views]))
        return output

    return torch_verbs.average(whole, group).then(finish)
