"""A rehearsal of compressed DDP in one process: micro-batches play the ranks.

    handle = thinwire.rehearse(model, "lloyd4", world=8, optimizer=optimizer)

The rest of the loop is gradient accumulation: `world` backward passes, whose losses are not divided, then a step.
After the last backward pass `.grad` holds what every one of `world` ranks would have got from DDP, bit for bit: buckets
as DDP makes them, chunks, codecs, feedback and stages as in `compress_ddp`.

[Note: Seats] In its turn, a rank encodes its gradients; then its stages wait for messages, as on a real group. All
ranks write their wires into shared memory (`_Shelf`), so all messages have arrived when the last rank has had its turn.
After encoding, a rank needs only the gradients of its own shard; all ranks' shards together are one gradient. With
feedback, each rank's gradients are kept until the end of the step.
"""

import functools
import json
import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from thinwire.codecs import Identity
from thinwire.codecs.checks import is_int
from thinwire.collectives.chunks import Flat, Lane, Scratch
from thinwire.collectives.plan import flat_lane, sum_plan
from thinwire.collectives.sums import SumProgram, flat_algorithm
from thinwire.collectives.transport import Moving, Stages, Transport
from thinwire.errors import CodecError, CollectiveError
from thinwire.feedback import Memories
from thinwire.integrations import lanes
from thinwire.integrations.choice import Chooser
from thinwire.integrations.choice.options import (
    Auto,
    CodecChoice,
    DDPKeywords,
    DDPOptions,
    check_known,
    check_stepped,
    spelled_out,
)
from thinwire.integrations.ddp import gradients_of
from thinwire.integrations.models import ParameterNames, ParameterSize, bare_optimizer, plain_name
from thinwire.integrations.stats import Handle, Stats, Tally
from thinwire.integrations.sync import NonfiniteGuard, after_backward, stats_of, sum_bytes
from thinwire.kernels.rows import Bad, is_fine

FIRST_BUCKET = 1 << 20  # bytes of DDP's first bucket, and of the others
BUCKET = 25 << 20
ENVIRONMENT = "THINWIRE_REHEARSAL"  # what `thinwire rehearse` tells a script: codec, world, noise, where losses go


class _Seat(Transport):
    """A rank's transport: all ranks share memory, so wires are copied once and nothing has to move."""

    def __init__(self, rank: int, world: int, device: torch.device) -> None:
        self.rank = rank
        self.world = world
        self.device = device
        self.on_stream = device.type == "cuda"  # type: ignore[misc]  # chunks are those of NCCL's messages
        self.shelf: _Shelf | None = None  # of the chunk that is being encoded

    def all_to_all(self, received: Tensor, sent: Tensor, *_: Any) -> Moving:
        assert self.shelf is not None
        self.shelf.received_WWS[:, self.rank] = sent.view(self.world, -1)
        return Moving()

    def all_gather(self, *_: Any) -> Moving:
        return Moving()


class _Shelf(NamedTuple):
    """The wires of one chunk, shared by all ranks; W: one per rank, S bytes of a row."""

    sent: Tensor  # of one rank to each rank in its turn; later every rank's own
    received_WWS: Tensor  # that each rank has from each rank


class RehearsedRanks:
    """The ranks' common decisions, each one's memories, and the cost of their sums."""

    def __init__(self, options: DDPOptions, names: ParameterNames, world: int, *, outer: bool = False) -> None:
        self.world = world
        self.chooser = Chooser(options, names, whole=not outer, outer=outer)
        self.memories = [Memories(options.residual_dtype) for _ in range(world)]
        self.tally = Tally(timed=False)
        self.names = names
        self.buckets: list[RehearsedBucket] = []
        self._made_of: object = None  # what fixes the buckets

    def begin_step(self, step: int, groups: Sequence[Sequence[nn.Parameter]]) -> "list[RehearsedSum]":
        """Decide for `step`, and begin a sum for each group of parameters."""
        tally = self.tally
        self.chooser.begin(step, 0.0, tally.errors_by_name(), tally.end_step(), lambda values, _: list(values))
        fixed = self.chooser.policy.setting, [[id(p) for p in group] for group in groups]
        if fixed != self._made_of:
            self._made_of = fixed
            self.buckets = [RehearsedBucket(group, self) for group in groups]
        return [RehearsedSum(bucket, self, step) for bucket in self.buckets]


class RehearsedBucket:
    """Parameters whose gradients travel together, under one setting of the chooser."""

    def __init__(self, parameters: Sequence[nn.Parameter], ranks: RehearsedRanks) -> None:
        world = ranks.world
        asked = ranks.chooser.policy.options.algorithm
        self.parameters = parameters
        self.names, _ = ranks.names.of(parameters)
        self.dtype, self.device = parameters[0].dtype, parameters[0].device
        sizes = [ParameterSize(p.shape, p.numel(), p.dtype) for p in parameters]
        pairs = zip(self.names, sizes, strict=True)
        self.lanes = lanes.lanes_of(self.names, [ranks.chooser.spec(name, size) for name, size in pairs])
        self.specs = [flat_lane(lane.spec, self.dtype) for lane in self.lanes]
        self.plain = world == 1 or all(isinstance(spec.codec, Identity) for spec in self.specs)
        self.algorithm = flat_algorithm(asked, [spec.codec for spec in self.specs], world)
        self.dtypes = [self.dtype if self.plain or spec.feedback else spec.encoded for spec in self.specs]
        self.seats = [_Seat(rank, world, self.device) for rank in range(world)]
        plan = sum_plan("", self.specs, self.seats[:1], self.algorithm, 1.0 / world)
        self.specs = list(plan.lanes)
        how = self.algorithm, self.specs, 1.0 / world
        self.programs = [SumProgram([seat], *how, fused=False) for seat in self.seats]
        self.numel = sum(size.numel for size in sizes)
        self.wire_bytes = sum(spec.codec.wire_bytes(spec.numel, spec.encoded) for spec in self.specs)
        self.plain_bytes = sum_bytes(self.numel, self.dtype, world)
        self.sent_bytes = self.plain_bytes if self.plain else plan.sent_bytes(world)


class RehearsedSum:
    """The sum of one bucket in one step, over ranks that come one after the other."""

    def __init__(self, bucket: RehearsedBucket, ranks: RehearsedRanks, step: int) -> None:
        self.bucket = bucket
        self._ranks = ranks
        self._world = ranks.world
        self._step = step
        self._rows = [
            torch.zeros(spec.numel, dtype=dtype, device=bucket.device)
            for spec, dtype in zip(bucket.specs, bucket.dtypes, strict=True)
        ]
        self._shelves: list[_Shelf] = []
        self._bad: list[Bad | None] = []  # where the first rank notes numbers that are not finite, by chunk
        self._stages: list[list[Stages]] = []  # by rank and chunk
        self._weighed = [] if bucket.plain else ranks.chooser.weighed(bucket.names)
        parameters = [bucket.parameters[i] for i in self._weighed]
        self._roots = ranks.chooser.moments.roots(parameters) if parameters else []

    def turn(self, buffer: Tensor) -> None:
        """Encode the next rank's gradients, which may be overwritten."""
        bucket, ranks = self.bucket, self._ranks
        if self._weighed:
            torch._foreach_div_(gradients_of(bucket.parameters, buffer, self._weighed), self._roots)
        parts_L, _ = lanes.load(bucket.lanes, buffer)
        rows = [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in parts_L]
        tensors = [x.to(dtype) for dtype, x in zip(bucket.dtypes, rows, strict=True)]
        if bucket.plain:
            torch._foreach_add_(self._rows, tensors)
            return
        rank = len(self._stages)
        loaded = []
        for at, (lane, spec, x) in enumerate(zip(bucket.lanes, bucket.specs, tensors, strict=True)):
            carry = ranks.memories[rank].carry(spec.feedback, lane.pieces, bucket.device)
            watch = ranks.tally.watch(lane.pieces, bucket.device) if ranks.chooser.measuring else None
            loaded.append(Lane(spec, Flat([x]), carry, watch))
            if spec.feedback and rank == 0:
                self._rows[at] = x  # will be overwritten by the sum
        self._stages.append([self._begin(loaded, index, rank) for index in range(bucket.programs[rank].count)])

    def _begin(self, loaded: Sequence[Lane], index: int, rank: int) -> Stages:
        program, seat = self.bucket.programs[rank], self.bucket.seats[rank]
        some, chunk = program.chunks[index]
        two_phase = self.bucket.algorithm == "two_phase"
        if rank == 0:
            sent_WS = torch.empty((self._world, chunk.stride), dtype=torch.uint8, device=seat.device)
            received_WWS = sent_WS.new_empty((self._world if two_phase else 0, self._world, chunk.stride))
            self._shelves.append(_Shelf(sent_WS.view(-1), received_WWS))
        seat.shelf = shelf = self._shelves[index]
        floats = [torch.empty(numel, dtype=dtype, device=seat.device) for numel, dtype in chunk.floats]
        parts = program.parts(index, loaded)
        xs = [lane.flat.read(span, Scratch(shelf.sent)) for lane, span in parts]
        received = shelf.received_WWS[rank].view(-1) if two_phase else shelf.sent
        views = chunk.views(shelf.sent, received, floats)
        stages, bad = program.begin(index, views, parts, xs, self._step, (0,), noted=rank == 0)
        next(stages)
        for at, (i, kernels) in enumerate(zip(some, chunk.kernels, strict=True)):
            if not kernels.lane.feedback:  # free a rank's gradients except its own shard's; see [Note: Seats]
                kept = self._rows[i][slice(*parts[at][1])]
                if two_phase:
                    own = slice(*kernels.job.rows.span(rank))
                    kept[own] = xs[at][own]
                xs[at] = kept
        if rank == 0:
            self._bad.append(bad)
        return stages

    def mean(self, buffer: Tensor) -> None:
        """buffer = the mean, once all ranks had their turns."""
        bucket = self.bucket
        if bucket.plain:
            torch._foreach_mul_(self._rows, 1.0 / self._world)
        else:
            self._finish()
        for lane, row in zip(bucket.lanes, self._rows, strict=True):
            lane.write(row, buffer)
        if self._weighed:
            torch._foreach_mul_(gradients_of(bucket.parameters, buffer, self._weighed), self._roots)
        self._ranks.tally.sent(bucket.sent_bytes, bucket.plain_bytes)

    def _finish(self) -> None:
        """Run the ranks' stages to their end: all with feedback, which each has to update, else the first rank's."""
        bucket = self.bucket
        readers = range(self._world) if any(spec.feedback for spec in bucket.specs) else range(1)
        for index in range(bucket.programs[0].count):
            if bucket.algorithm == "two_phase":  # every rank sums its shard
                for stages in self._stages:
                    next(stages[index])
            for rank in readers:
                next(self._stages[rank][index], None)
            self._ranks.tally.checked(is_fine(self._bad[index]))


class Rehearsal(Handle):
    """What `rehearse` returns."""

    def __init__(self, model: nn.Module, options: DDPOptions, world: int, accumulate: int, noise: float) -> None:
        super().__init__()
        if isinstance(model, nn.parallel.DistributedDataParallel) or not isinstance(model, nn.Module):
            raise CollectiveError(f"rehearse takes the model that DDP wraps, got {type(model).__name__}")
        if Auto() in options.schedule.values():
            raise CodecError("codec='auto' times codecs on a link, and a rehearsal has none: name a codec")
        if options.mesh is not None:
            raise CodecError("a rehearsal has no mesh: leave out mesh= and inside=")
        for name, value in (("world", world), ("accumulate", accumulate)):
            if not is_int(value) or value < 1:
                raise CodecError(f"{name} must be an integer, 1 or more, got {value!r}")
        self.world = world
        self.steps = 0
        self._names = ParameterNames()
        options.rules.check_names([plain_name(name) for name, _ in model.named_parameters()])
        self._names.take(model)
        self._parameters = [p for p in model.parameters() if p.requires_grad and p.numel()]
        if odd := [name for name, p in model.named_parameters() if p.is_complex()]:
            raise CollectiveError(f"rehearse takes real parameters, these are complex: {', '.join(odd)}")
        check_stepped(model, options.optimizer)
        if not self._parameters:
            raise CollectiveError(f"expected a model with parameters to train, {type(model).__name__} has none")
        self._ranks = RehearsedRanks(options, self._names, world)
        self._guards = [NonfiniteGuard() for _ in range(world)] if options.on_nonfinite == "raise" else []
        self._noise = noise
        self._generator = torch.Generator().manual_seed(0)
        self._most = world * accumulate  # micro-batches of a step
        self._micro = 0  # of the present step
        # Gradients by id of their parameter, of ranks that have had some of their micro-batches.
        self._held: list[dict[int, Tensor]] = [{} for _ in range(world)]
        self._busy = False  # whether a backward pass is running
        self._stepped = True  # whether the last step's gradients were used
        self._order: list[nn.Parameter] = []  # in which gradients arrive; empty once a backward pass lacked some
        self._sums: list[RehearsedSum] = []
        self._finite: list[Tensor] = []  # whether the means of every bucket are
        self._met: set[int] = set()  # parameters that had a gradient in this step
        hooks = [p.register_hook(functools.partial(self._before, p)) for p in self._parameters]
        hooks += [p.register_post_accumulate_grad_hook(self._arrived) for p in self._parameters]
        self._optimizers = [one for one in map(bare_optimizer, options.optimizers) if isinstance(one, Optimizer)]
        hooks += [one.register_step_pre_hook(self._check_step) for one in self._optimizers]
        hooks += [one.register_step_post_hook(self._after_step) for one in self._optimizers]
        self._hooks: list[Any] = hooks

    # --- what autograd and optimizers call ---

    def _before(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """A gradient is about to be added to `.grad`."""
        if self._busy or self.closed:
            return
        if self._micro == self._most:
            self._check_used()
            self._micro = 0
        if self._micro == 0 and parameter.grad is not None and bool(parameter.grad.any()):
            raise CollectiveError("gradients of the last step are left in .grad: call zero_grad() after each step")
        if not after_backward(self._turn):
            raise CollectiveError("a rehearsal needs loss.backward(): it ends a micro-batch")
        self._busy = True

    def _arrived(self, parameter: Tensor) -> None:
        if not self.steps and self._micro == self._most - self.world and not self.closed:  # DDP sums in its last one
            self._order.append(parameter)  # type: ignore[arg-type]

    def _check_used(self) -> None:
        """A new step begins: the last one's gradients were used, or were not finite and a GradScaler skipped them."""
        if not self._stepped and bool(torch.stack(self._finite).all()):
            how = "optimizer.step()" if self._optimizers else "handle.step()"
            raise CollectiveError(
                f"micro-batch {self._most + 1} of a step that has {self._most}: {how} was not called after the last"
            )

    def _check_step(self, *args: Any) -> None:
        if 0 < self._micro < self._most and not self.closed:
            raise CollectiveError(
                f"optimizer.step() after {self._micro} of {self._most} micro-batches: call backward() "
                f"{self._most} times per step, once per rank, or pass another world= or accumulate="
            )

    def _after_step(self, *args: Any) -> None:
        self._stepped = True

    def step(self) -> None:
        """End a step, where no optimizer was passed that does."""
        if self._optimizers:
            raise CollectiveError("the optimizer that was passed to rehearse() ends steps: leave out handle.step()")
        if self._micro != self._most:
            raise CollectiveError(f"handle.step() after {self._micro} of {self._most} micro-batches")
        self._stepped = True

    # --- a micro-batch ---

    def _turn(self) -> None:
        """A backward pass is over: the next rank has its gradients."""
        self._busy = False
        gradients = {id(p): p.grad for p in self._parameters if p.grad is not None}
        for parameter in self._parameters:
            parameter.grad = None
        rank, last = self._micro % self.world, self._micro >= self._most - self.world
        self._micro += 1
        if last and len(gradients) < len(self._parameters):
            self._order.clear()
        if self._most > self.world:
            held = self._held[rank]
            for key, gradient in gradients.items():
                held[key] = held[key].add_(gradient) if key in held else gradient
            if not last:
                return
            gradients, self._held[rank] = held, {}
        if rank == 0:
            self._begin_step()
        self._met |= gradients.keys()
        for total in self._sums:
            self._send(total, rank, [gradients.get(id(p)) for p in total.bucket.parameters])
        if self._micro == self._most:
            self._end_step()

    def _begin_step(self) -> None:
        self._stepped = False
        self._met.clear()
        if self._order:
            groups = buckets_of(self._order) if self.steps else buckets_of(self._parameters, first=True)
        else:
            groups = buckets_of(self._parameters)  # DDP needs find_unused_parameters=True, and never rebuilds buckets
        self._sums = self._ranks.begin_step(self.steps, groups)

    def _send(self, total: RehearsedSum, rank: int, gradients: Sequence[Tensor | None]) -> None:
        bucket = total.bucket
        buffer = torch.zeros(bucket.numel, dtype=bucket.dtype, device=bucket.device)
        views = gradients_of(bucket.parameters, buffer)
        pairs = [(view, grad) for view, grad in zip(views, gradients, strict=True) if grad is not None]
        if pairs:
            torch._foreach_copy_([view for view, _ in pairs], [grad for _, grad in pairs])
        if self._guards:
            self._guards[rank].look(bucket.names, views)
        total.turn(buffer)

    def _end_step(self) -> None:
        self._finite = []
        for total in self._sums:
            bucket = total.bucket
            buffer = torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device)
            total.mean(buffer)
            if self._noise:
                drawn = torch.randn(bucket.numel, generator=self._generator)  # the script's own numbers stay the same
                buffer *= 1 + self._noise * drawn.to(buffer)
            for parameter, view in zip(bucket.parameters, gradients_of(bucket.parameters, buffer), strict=True):
                parameter.grad = view if id(parameter) in self._met else None
            self._finite.append(buffer.isfinite().all())
        self._sums = []
        self.steps += 1
        self._write_logs(self.steps, 0)
        if self._guards:
            spoiled = not bool(torch.stack(self._finite).all())
            codes = [guard.code(rank, self.world, spoiled=spoiled) for rank, guard in enumerate(self._guards)]
            for guard in self._guards[1:]:
                guard.begin()
            self._guards[0].check(min(codes), self.world, self.steps - 1)

    def stats(self) -> Stats:
        """What compression has done: the bytes of one rank, errors of all."""
        ranks = self._ranks
        used = [spec.feedback for bucket in ranks.buckets for spec in bucket.specs]
        coded = [(bucket.numel, bucket.wire_bytes) for bucket in ranks.buckets if not bucket.plain]
        return stats_of(self.steps, ranks.chooser, ranks.tally, ranks.memories, used, coded)

    def close(self) -> None:
        """Leave gradients alone from now on."""
        self.closed = True
        self._ranks.chooser.moments.stop()
        for hook in self._hooks:
            hook.remove()


def buckets_of(parameters: Sequence[nn.Parameter], *, first: bool = False) -> list[list[nn.Parameter]]:
    """Parameters in buckets as DDP makes them, for each dtype and device.

    In the first step there is one bucket, in the order of the model. Later ones are in the order in which gradients
    arrive, with 1 MiB in the first bucket and 25 MiB in each other.
    """
    limits = [sys.maxsize] if first else [FIRST_BUCKET, BUCKET]
    buckets, _ = distributed._compute_bucket_assignment_by_size(list(parameters), limits)  # type: ignore[attr-defined]
    return [[parameters[i] for i in bucket] for bucket in buckets]


@spelled_out
def rehearse(
    model: nn.Module,
    codec: CodecChoice | None = None,
    *,
    world: int | None = None,
    accumulate: int = 1,
    **options: Unpack[DDPKeywords],
) -> Rehearsal:
    """Train in one process as `world` ranks of compressed DDP would: micro-batch i of a step plays rank i % world.

    A step is world * accumulate backward passes, then optimizer.step(). Losses are not divided by `world`: gradients
    are averaged as DDP averages them. After the last backward pass `.grad` holds what all ranks would have got, bit for
    bit. The result has `stats()`, `log_to()`, `step()` and `close()`; `step()` ends a step if no optimizer was passed.

    Memory: one gradient more, and the wires of all ranks (world * bits / 32 gradients). With feedback, or with
    `accumulate` above 1, as many gradients as there are ranks.

    model: the model itself, not wrapped in DDP.
    codec, options: as for `compress_ddp`, but for "auto" and mesh. Under `thinwire rehearse` the command chooses the
        codec and the world.
    world: ranks to play; 8 if nothing says otherwise.
    accumulate: micro-batches of every rank.

    Example::

        handle = thinwire.rehearse(model, "lloyd4", world=8, optimizer=optimizer)
        for step in range(steps):
            for micro_batch in range(8):
                loss_of(model, next(batches)).backward()
            optimizer.step()
            optimizer.zero_grad()
    """
    check_known("rehearse", DDPKeywords, options)
    asked = _asked()
    chosen = asked.get("codec", codec)
    if chosen is None:
        raise CodecError("rehearse needs a codec: rehearse(model, 'lloyd4'), or run the script by `thinwire rehearse`")
    ranks = asked.get("world", 8 if world is None else world)
    handle = Rehearsal(model, DDPOptions(chosen, **options), ranks, accumulate, asked.get("noise", 0.0))
    global _last
    _last = weakref.ref(handle)
    return handle


def report_loss(loss: float | Tensor) -> None:
    """Report a loss to `thinwire rehearse`, which compares the last one of each run; elsewhere it does nothing.

    Report the same losses in every run: a validation loss at the end, and as many on the way as you like.

    Example::

        thinwire.report_loss(validate(model))
    """
    out = _asked().get("out")
    if out:
        bits = None if _last is None or (handle := _last()) is None else handle.stats().bits_per_element
        with Path(out).open("a") as file:
            file.write(json.dumps({"loss": float(loss), "bits": bits}) + "\n")


_last: "weakref.ref[Rehearsal] | None" = None  # the last one that `rehearse` made


def _asked() -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(os.environ.get(ENVIRONMENT) or "{}")
    return found
