"""Averages gradients over ranks, step after step: lanes, messages, feedback, statistics, and the check for NaN."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from thinwire import feedback
from thinwire.codecs import Identity
from thinwire.collectives import torch_verbs
from thinwire.collectives.channel import channel_of
from thinwire.collectives.chunks import LaneSpec
from thinwire.collectives.message import Hooks, SumMessage
from thinwire.errors import NonfiniteError
from thinwire.integrations import lanes
from thinwire.integrations.choice import Chooser
from thinwire.integrations.choice.moments import Undo
from thinwire.integrations.models import PADDING, Names, ParameterSize
from thinwire.integrations.stats import SECONDS, Stats, Tally
from thinwire.log import announce

Future = torch.futures.Future
ByName = Mapping[str, Tensor]


@dataclass(frozen=True)
class GradientSet:
    """The gradients that one message averages, flat and real, with their parameters' names and shapes."""

    names: Names
    shapes: Sequence[torch.Size]
    buffer: Tensor  # that holds them all, consecutively
    numels: Sequence[int] | None = None  # elements of each in the buffer, if a rank has only parts of them
    weigh: Callable[[], Undo] | None = None  # converts some of them to Adam's units

    @functools.cached_property
    def views(self) -> Sequence[Tensor]:
        """Every gradient."""
        sizes = self.numels or [shape.numel() for shape in self.shapes]
        factor = self.buffer.numel() // max(1, sum(sizes))  # 2 for complex parameters
        return self.buffer.split([factor * size for size in sizes])  # type: ignore[no-any-return]


def gradients_in(buffer: Tensor, names: Names, shapes: Sequence[torch.Size], weigh: Any = None) -> GradientSet:
    """The gradients that lie in a buffer, one parameter after the other; those without elements are left out."""
    real = torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer
    if not all(map(torch.Size.numel, shapes)):
        filled = [i for i, shape in enumerate(shapes) if shape.numel()]
        names = tuple(names[i] for i in filled)
        shapes = [shapes[i] for i in filled]
    return GradientSet(names, shapes, real, weigh=weigh)


@dataclass(frozen=True)
class BucketPlan:
    """How one set of gradients is averaged, until codecs or feedback change."""

    lanes: Sequence[lanes.BucketLane]
    numel: int
    plain_bytes: int  # that a rank would send without compression
    message: Any = None  # None if nothing of it is compressed
    carries: Sequence[Any] = ()  # the feedback of each lane
    program: Any = None  # what averages it on a GPU, unless its errors are measured; of rows their Columns


class GradientSync:
    """Averages gradients over ranks. timed: measure how long the CPU works on chunks."""

    def __init__(self, chooser: Chooser, *, timed: bool = True) -> None:
        self._timed = timed
        self.chooser = chooser
        self._options = chooser.policy.options
        self.memories = feedback.Memories(self._options.residual_dtype)
        self.tally = Tally()
        self.group: dist.ProcessGroup | None = None  # of the present step
        self.peers: Sequence[dist.ProcessGroup] = ()  # groups of other shards, which must decide the same
        self.elsewhere: Iterable[str] = ()  # parameters of which peers may hold parts and this rank none
        self._step = 0
        self._began = 0.0  # time at which the step began
        self._buckets: dict[object, BucketPlan] = {}  # by all that a plan depends on
        self._setting: object = None  # the setting that `_buckets` were made with

    def begin_step(self, group: dist.ProcessGroup, step: int, device: torch.device) -> None:
        """Choose codecs and feedback for `step`, after the last step's collectives. The first rank logs news."""
        before = self._began
        self._began = perf_counter()
        if group is not self.group:
            self.group = group
            self._buckets.clear()
            channel_of(group, device).issue(f"gradients(from step {step}, {self.chooser.agreed})", anew=True)
        self._step = step
        self.tally.timed = self._timed and device.type == "cpu"
        by_name = self.tally.errors_by_name()
        if by_name:
            by_name = {**dict.fromkeys(self.elsewhere, 0.0), **by_name}
        agree = functools.partial(torch_verbs.agree, "decide", (group, *self.peers), device)
        news = self.chooser.begin(step, self._began - before, by_name, self.tally.end_step(), agree)
        if self.chooser.raced:  # drop what the codecs that lost remember
            self.memories.load({}, {}, self.memories.kinds)
        if self.chooser.raced or self.chooser.policy.setting != self._setting:
            self._setting = self.chooser.policy.setting
            self._buckets.clear()
        if news and group.rank() == 0:
            announce(news)

    def average(
        self, gradients: GradientSet, output: Tensor, group: dist.ProcessGroup | None = None
    ) -> "Future[Tensor]":
        """Start to average gradients over the step's group or another, in place; the future holds `output`."""
        group = group or self.group
        assert group is not None
        key = gradients.names, gradients.buffer.dtype, gradients.buffer.device
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = self._new_bucket(key, gradients, group)
        message, program = bucket.message, bucket.program
        if message is None:
            self.tally.sent(bucket.plain_bytes)
            plain = torch_verbs.average(gradients.buffer, group)  # as DDP averages without a hook
            return plain.then(lambda done: (done.value(), output)[1])  # raises what went wrong
        self.tally.sent(message.sent_bytes, bucket.plain_bytes)
        if program is not None and not self.chooser.measuring:
            program.weigh = gradients.weigh
            call = message.channel.issue(message.plan, step=self._step, async_op=True)
            return message.channel.launch(program, (gradients.buffer,), call, result=output)  # type: ignore[no-any-return]
        undo = gradients.weigh and gradients.weigh()
        tensors, copies = lanes.load(bucket.lanes, gradients.buffer)
        stages: list[tuple[int, float, float]] = []
        meter = (lambda *stage: stages.append(stage)) if output.device.type == "cpu" else None
        work = message.run(tensors, self._hooks(bucket, output.device), [output], self._step, copies, meter)

        def finish(done: "Future[list[Tensor]]") -> Tensor:
            self.tally.worked(stages)
            mean = done.value()[0]
            if undo is not None:
                undo()
            return mean

        return work.get_future().then(finish)  # type: ignore[no-any-return]

    def load(
        self, state: Mapping[str, Any], step: int, residuals: ByName, means: ByName, errors: Mapping[str, float]
    ) -> None:
        """Continue at `step` from a saved state with this rank's residuals, means and errors; a mesh has none."""
        self.chooser.load_state_dict(state["decisions"], step)
        if self._options.mesh is not None:
            residuals = means = {}
        self.clear()
        self.memories.load(residuals, means, dict(state["feedback"]))
        self.tally.load_errors(errors)

    def clear(self) -> None:
        """Forget everything."""
        self.memories.load({}, {}, {})
        self.tally.load_errors({})
        self._buckets.clear()

    def _new_bucket(self, key: object, gradients: GradientSet, group: dist.ProcessGroup) -> BucketPlan:
        world, like = group.size(), gradients.buffer
        numels = [view.numel() for view in gradients.views]
        sizes = [ParameterSize(shape, n, like.dtype) for shape, n in zip(gradients.shapes, numels, strict=True)]
        pairs = zip(gradients.names, sizes, strict=True)
        specs = [self._spec(name, size, whole=gradients.numels is None) for name, size in pairs]
        found = lanes.lanes_of(gradients.names, specs)
        plain_bytes = sum_bytes(sum(numels), like.dtype, world)
        if all(isinstance(lane.spec.codec, Identity) for lane in found):
            return BucketPlan(found, sum(numels), plain_bytes)
        laid = [lane.spec for lane in found]
        message = SumMessage(laid, like, group=group, algorithm=self._options.algorithm, nodes=self._options.nodes)
        carries = [self.memories.carry(lane.spec.feedback, lane.pieces, like.device) for lane in found]
        program = message.program and lanes.StreamedBucket(key, message, found, carries, self.tally)
        return BucketPlan(found, sum(numels), plain_bytes, message, carries, program)

    def _hooks(self, plan: BucketPlan, device: torch.device, rows: int = 1) -> Hooks:
        """What a message calls in this step, for every lane of so many rows."""
        watch = self.tally.watch if self.chooser.measuring else lambda *_: None
        watches = [watch([*lane.pieces] * rows, device) for lane in plan.lanes]
        return Hooks(plan.carries, watches, self.tally.checked)

    def _spec(self, name: str, size: ParameterSize, *, whole: bool) -> LaneSpec:
        """The lane of a parameter or, if not `whole`, of a part of it or of its padding."""
        full = size if whole else size._replace(numel=size.shape.numel())
        return self.chooser.spec(name.removeprefix(PADDING), full)._replace(numel=size.numel)

    def stats(self, step: int) -> Stats:
        """What compression has done in `step` steps on this rank."""
        buckets = self._buckets.values()
        messages = [(bucket.numel, bucket.message) for bucket in buckets if bucket.message is not None]
        used = [lane.spec.feedback for bucket in buckets for lane in bucket.lanes]
        coded = [(numel, message.wire_bytes) for numel, message in messages]
        scratch = sum(channel.scratch_bytes for channel in {message.channel for _, message in messages})
        return stats_of(step, self.chooser, self.tally, [self.memories], used, coded, scratch)


def stats_of(
    steps: int,
    chooser: Chooser,
    tally: Tally,
    memories: Iterable[feedback.Memories],
    used: Iterable[str],
    coded: Sequence[tuple[int, int]],
    scratch_bytes: int = 0,
) -> Stats:
    """`used`: the feedback of every lane; `coded`: the elements and bytes of every message that is compressed."""
    numel = sum(count for count, _ in coded)
    return Stats(
        steps=steps,
        codec=chooser.policy.options.asked,
        feedback=chooser.feedback_in_use(used),
        chosen=chooser.why,
        bytes_sent=tally.bytes_sent,
        bytes_plain=tally.bytes_plain,
        bits_per_element=8 * sum(nbytes for _, nbytes in coded) / numel if numel else None,
        relative_error=tally.relative_error,
        nonfinite=tally.all_nonfinite,
        **(tally.seconds if tally.timed else dict.fromkeys(SECONDS)),
        residual_bytes=sum(held.residuals.nbytes + held.means.nbytes for held in memories),
        scratch_bytes=scratch_bytes,
    )


def sum_bytes(numel: int, dtype: torch.dtype, world: int) -> int:
    """The bytes that a rank sends of an uncompressed sum."""
    return 2 * (world - 1) * numel * dtype.itemsize // world


# [Note: After backward] DDP and FSDP2 put the means into `.grad` in callbacks that autograd runs when a backward pass
# is over. A callback that such a callback queues runs after all of them. An error raised there comes out of
# `backward()` when nothing is half done: the next step works.


class NonfiniteGuard:
    """Looks at this rank's gradients before they are averaged, and compares with all ranks afterwards."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start a step."""
        self.names: list[str] = []  # of parameters with gradients in this step, in the order of the backward pass
        self._fine: list[Tensor] = []  # which of them have finite gradients on this rank

    def look(self, names: Sequence[str], gradients: Sequence[Tensor]) -> None:
        """Note which of this rank's gradients, all of one dtype, are finite before they are averaged."""
        self.names += [name for name, part in zip(names, gradients, strict=True) if part.numel()]
        self._fine.append(which_are_finite(gradients))

    def compare(self, step: int, groups: Sequence[dist.ProcessGroup], spoiled: bool, device: torch.device) -> None:
        """Raise on all ranks of these groups if any of them has a gradient that is not finite.

        spoiled: whether the means on this rank hold NaN or Inf. They may even if no gradient does: sums overflow.
        """
        world = dist.get_world_size()
        code = float(self.code(dist.get_rank(), world, spoiled=spoiled))
        (least,) = torch_verbs.agree("on_nonfinite", groups, device, [code], dist.ReduceOp.MIN)
        self.check(int(least), world, step)

    def code(self, rank: int, world: int, *, spoiled: bool) -> int:
        """Where this rank's first bad gradient is, as a number; the smallest of all ranks' is the first of all."""
        fine = torch.cat(self._fine).tolist()
        first = fine.index(False) if False in fine else len(fine) + (not spoiled)
        return first * world + rank

    def check(self, least: int, world: int, step: int) -> None:
        """Raise if the smallest code of all ranks says that something is not finite."""
        first, rank = divmod(least, world)
        names = self.names
        self.begin()
        if first > len(names):
            return
        what = "a sum over ranks overflowed"
        if first < len(names):
            what = f"the gradient of {names[first]} on rank {rank} holds NaN or Inf, the first that backward computed"
        raise NonfiniteError(
            f"step {step}: {what}. Look for its origin with torch.autograd.set_detect_anomaly(True), or pass "
            "on_nonfinite='propagate' and skip steps whose gradient norm is not finite"
        )


def which_are_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Whether each tensor is finite, as one tensor of booleans; empty ones are left out, and all have one dtype."""
    real = [torch.view_as_real(part) if part.is_complex() else part for part in tensors if part.numel()]
    if not real:
        return torch.ones(0, dtype=torch.bool, device=tensors[0].device if tensors else None)
    return torch.stack(torch._foreach_norm(real, math.inf)).isfinite()


def after_backward(check: Callable[[], None]) -> bool:
    """Call `check` once the means are in `.grad`, see [Note: After backward]; False if no backward pass is running."""
    queue = Variable._execution_engine.queue_callback
    try:
        queue(lambda: queue(check))
    except RuntimeError:
        return False
    return True
