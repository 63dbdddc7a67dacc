"""DistributedDataParallel: compressed gradient communication.

handle = thinwire.compress_ddp(ddp_model)                       # one line; the rest of the script is unchanged
ddp_model.register_comm_hook(thinwire.DDPState(None, "int8"), thinwire.ddp_hook)   # the same by hand

[Note: Joined buckets] On NCCL inside one host bytes are cheap, and a step takes as long as its launches. There, buckets
of DDP's default size are joined: copied into one buffer, averaged in one message, copied back. A bucket size of the
user's own is kept. Between hosts that made int8 slower; we do not know why (docs/benchmarks.md). The first step of a
static graph does not say which bucket is the last, so these are not joined.
"""

import functools
import itertools
import math
import os
import platform
import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.collectives import checks, groups, torch_verbs
from thinwire.collectives.channel import wait_in
from thinwire.collectives.work import done_future, new_future
from thinwire.errors import CodecError, CollectiveError
from thinwire.integrations import checkpoint, sync
from thinwire.integrations.choice import Chooser
from thinwire.integrations.choice.options import (
    CodecChoice,
    DDPKeywords,
    DDPOptions,
    check_known,
    check_stepped,
    spelled_out,
)
from thinwire.integrations.models import ParameterNames, find_ddp, live_objects, plain_name
from thinwire.integrations.stats import Handle, Stats
from thinwire.log import announce_once

Future = torch.futures.Future
_JOINED_BYTES = 100_000_000  # of gradients from which on joined buckets are sent
_JOINED_SHARE = 4  # or from a fourth of all gradients on, so that messages overlap with the backward pass
_Held = tuple[Sequence[Tensor], Tensor, Any]  # a bucket: its parameters, its buffer, the future DDP waits for
_NO_BUCKETS = (
    "DDP's compiled path (optimize_ddp='python_reducer') passes gradients one by one, without buckets: use the hooks "
    "of thinwire.hooks there, or another optimize_ddp mode before DistributedDataParallel is called"
)


class DDPState(Handle):
    """Compression of one DDP model: the result of `compress_ddp` and the state of `ddp_hook`.

    `process_group` is DDP's group (None: the world). `model` gives parameters their names, for rules by name and for
    checkpoints; without it they are numbered in the order in which DDP passes them. The other arguments are those of
    `compress_ddp`. A state does not pickle: save its `state_dict()`.
    """

    @spelled_out
    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        codec: CodecChoice = "int8",
        *,
        model: nn.Module | None = None,
        **options: Unpack[DDPKeywords],
    ) -> None:
        super().__init__()
        check_known("compress_ddp", DDPKeywords, options)
        asked = DDPOptions(codec, **options)
        self.process_group = process_group
        self.step = 0
        self._names = ParameterNames()
        self._chooser = Chooser(asked, self._names, whole=True)
        self.options = self._chooser.policy.options
        if model is not None:
            self.name_parameters(model)
        elif asked.rules.by_name:
            raise CodecError("rules by name need names: pass model=, or use thinwire.compress_ddp(ddp_model, ...)")
        self._sync = sync.GradientSync(self._chooser)
        self._restorer = checkpoint.Restorer(self._sync.average)
        self._guard = sync.NonfiniteGuard() if asked.on_nonfinite == "raise" else None
        # The models with this hook; None until they are searched for.
        self._models: Sequence[weakref.ref[DistributedDataParallel]] | None = None
        self._means: list[tuple[Tensor, Future[Tensor]]] = []  # buckets of the step, for the guard
        self._joined_bytes = 0  # from which on joined buckets are sent; 0: they are not joined
        self._held: list[_Held] = []  # buckets to join with the next
        self._ended = True  # whether the next bucket is the first of a step

    def name_parameters(self, model: nn.Module) -> None:
        """Take parameter names, for rules and checkpoints, from `model`: what `model=` does."""
        self.options.rules.check_names([plain_name(name) for name, _ in model.named_parameters()])
        self._names.take(model)

    def reduce(self, bucket: "dist.GradBucket") -> "Future[Tensor]":  # type: ignore[name-defined]
        """Start to average a bucket; the future holds its buffer."""
        if isinstance(bucket, tuple):
            raise CollectiveError(_NO_BUCKETS)
        buffer = bucket.buffer()
        checks.check_gradient(buffer)
        if self._ended:
            self._group = groups.resolve(self.process_group)
            self._begin_step(self._group, buffer.device)
        group, last = self._group, bucket.is_last()
        try:
            if bucket.index() == 0:
                self._held = []  # of a backward pass that failed
            due, promised = self._due(bucket.parameters(), buffer, last=last)
            future = promised and promised.then(Future.value)  # DDP, in C++, sees an error only of a callback
            for held in due:
                parameters = [parameter for some, _, _ in held for parameter in some]
                whole = held[0][1] if len(held) == 1 else torch.cat([part for _, part, _ in held])
                gradients = None if self.closed else self._gradients(parameters, whole)
                if gradients is None:
                    mean = torch_verbs.average(whole, group)
                elif group.size() == 1 or not whole.numel():
                    mean = done_future(whole, whole.device)
                else:
                    mean = self._restorer.hold(gradients, whole) or self._sync.average(gradients, whole)
                if held[0][2] is None:
                    future = mean
                else:
                    mean.add_done_callback(functools.partial(_put_back, held))
        finally:
            if last:
                self._ended = True
                self.step += 1
                self._restorer.end_step()
        if self._guard is not None and not self.closed:
            self._means.append((buffer, future))
            if last:
                self._check_later(self._guard, group)
        return future  # type: ignore[no-any-return]

    def _due(self, parameters: Sequence[Tensor], buffer: Tensor, *, last: bool) -> tuple[list[list[_Held]], Any]:
        """The buckets to average now, those of a list in one message, and a future of this one unless it is alone.

        See [Note: Joined buckets].
        """
        most = 0 if self.closed else self._joined_bytes
        fits = buffer.nbytes < most
        joins = fits and any((x.dtype, x.device) == (buffer.dtype, buffer.device) for _, x, _ in self._held[:1])
        is_alone = not fits or (last and not joins)
        promised = None if is_alone else new_future(buffer.device)
        bucket = parameters, buffer, promised
        due, self._held = ([], [*self._held, bucket]) if joins or not self._held else ([self._held], [bucket])
        if is_alone or last or sum(held.nbytes for _, held, _ in self._held) >= most:
            due, self._held = [*due, self._held], []
        return due, promised

    def _gradients(self, parameters: Sequence[Tensor], buffer: Tensor) -> sync.GradientSet:
        """The gradients of parameters that lie in a buffer. The guard looks at them."""
        names, shapes = self._names.of(parameters)
        weigh = None
        if weighed := self._chooser.weighed(names):
            views = gradients_of(parameters, buffer, weighed)
            weigh = functools.partial(self._chooser.moments.weigh, [parameters[i] for i in weighed], views)
        gradients = sync.gradients_in(buffer, names, shapes, weigh)
        if self._guard is not None:
            self._guard.look(gradients.names, gradients.views)
        return gradients

    def _check_later(self, guard: sync.NonfiniteGuard, group: dist.ProcessGroup) -> None:
        """Check the means at the end of the backward pass."""
        step, means, self._means = self.step - 1, self._means, []

        def check() -> None:
            found = torch.cat([sync.which_are_finite([buffer]) for buffer, _ in means])
            if not bool(found.all()):  # as on all ranks, which have the same means
                guard.compare(step, (group,), True, found.device)

        if not sync.after_backward(check):  # under Join, a rank without data averages zeros outside a backward pass
            for buffer, future in means:
                wait_in(group, future, buffer)
            check()

    def _begin_step(self, group: dist.ProcessGroup, device: torch.device) -> None:
        if self.options.mesh is not None and group is not self._sync.group:
            ranks = sorted(self.options.mesh.mesh.flatten().tolist())
            members = sorted(dist.get_process_group_ranks(group))
            if ranks != members:
                raise CollectiveError(f"the mesh must hold the ranks of DDP's group, {members}, got one of {ranks}")
        self._ended = False
        self._means.clear()
        if self._guard is not None:
            self._guard.begin()
        if self._chooser.race is not None and device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # the host must not run ahead of the steps that it times
        if self.closed:
            return
        if group.size() == 1:
            self._write_logs(self.step, 0)
            return
        if self.process_group is None and self._sync.group is None:
            self._check_world()
        if self._chooser.policy.weighs and self.step > 0:
            # In or after a Join, ranks may have taken different numbers of steps.
            self._chooser.moments.uneven = any(model._join_config.enable for model in self._models_hooked())
        is_new = group is not self._sync.group
        self._sync.begin_step(group, self.step, device)
        if is_new:
            self._joined_bytes = self._size_to_join(group, device)
        self._write_logs(self.step, group.rank())

    def _size_to_join(self, group: dist.ProcessGroup, device: torch.device) -> int:
        """The bytes from which on joined buckets are sent, 0 to send each by itself. See [Note: Joined buckets]."""
        if groups.backend(group, device) != "nccl" or self.options.asked == "none":
            return 0
        models = self._models_hooked()
        gradients = (p.nbytes for model in models for p in model._module_parameters if p.requires_grad)
        most = min(_JOINED_BYTES, sum(gradients) // _JOINED_SHARE)
        for one in models:
            is_default = getattr(one, "bucket_bytes_cap_default", False)
            if not is_default or one.static_graph or most < 2 * one.bucket_bytes_cap:  # too few would be joined
                most = 0
        host = float(zlib.crc32((os.environ.get("NCCL_HOSTID") or platform.node()).encode()))  # as NCCL names it
        last, first, least = torch_verbs.agree("join", (group,), device, [host, -host, -most], dist.ReduceOp.MAX)
        return int(-least) if last == -first else 0

    def _models_hooked(self) -> list[DistributedDataParallel]:
        """The models that this state is registered on, by compress_ddp or by hand."""
        if self._models is None:
            every = live_objects(DistributedDataParallel)
            self._models = [weakref.ref(one) for one in every if any(held is self for _, held in one._comm_hooks)]
        return [model for found in self._models if (model := found()) is not None]

    def _check_world(self) -> None:
        """Raise if this state, made for the world, is on a model with a smaller group: other ranks would never join."""
        for model in self._models_hooked():
            ranks = dist.get_process_group_ranks(model.process_group)
            if len(ranks) < dist.get_world_size():
                raise CollectiveError(
                    f"DDP's group has the ranks {ranks} of {dist.get_world_size()}, but this state is of the "
                    "world: pass the model's group, DDPState(process_group, ...)"
                )

    @property
    def world(self) -> int:
        """Ranks of the group."""
        return groups.resolve(self.process_group).size()

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return groups.resolve(self.process_group).rank()

    def stats(self) -> Stats:
        """What compression has done on this rank; `print` shows a table."""
        return self._sync.stats(self.step)

    def close(self) -> None:
        """Return to plain DDP and drop all residuals. `compress_ddp` may be called again."""
        self.closed = True
        self._chooser.moments.stop()
        self._sync.clear()
        self._restorer.restore(None)

    def state_dict(self, *, gather: bool = False) -> dict[str, Any]:
        """What a checkpoint needs to resume bit-exactly. Every rank saves its own: they differ in `ranks`.

        gather: every rank calls it; the first gets one state of all ranks, which all ranks can load, the others an
            empty one.
        """
        group = groups.resolve(self.process_group)
        own = checkpoint.export(self._sync, self._restorer.layout, self.step, group)
        return checkpoint.gather(own, group) if gather else own

    def blank_state_dict(self, world: int | None = None) -> dict[str, Any]:
        """A state of zeros for loaders that fill it in place (torch.distributed.checkpoint).

        It holds what this rank needs of what `world` ranks saved.
        """
        self._chooser.check_family("compress_ddp")
        group = groups.resolve(self.process_group)
        return checkpoint.export(self._sync, self._restorer.layout, self.step, group, world or group.size())

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Load a saved state: this rank's own, a gathered one, or a list of the states of all ranks.

        In another world, what rank k remembered goes to rank k % world, so that the sum over ranks is kept.
        """
        states = list(state) if isinstance(state, Sequence) else [state]
        group = groups.resolve(self.process_group)
        self.step, layout = checkpoint.read(states, group, self._names, self._sync)()
        self._restorer.restore(layout, named=self._names.from_model)
        self._ended = True

    def __reduce__(self) -> Any:
        raise CollectiveError(
            "a DDPState does not pickle: save its state_dict(), and load it into a new one. Models can be copied and "
            "pickled if compress_ddp registered it"
        )


DDPHandle = DDPState


def _put_back(held: Sequence[_Held], done: "Future[Tensor]") -> None:
    """Copy the mean of joined buckets to each of them."""
    buffers = [buffer for _, buffer, _ in held]
    awaiting = [(buffer, future, None) for _, buffer, future in held]
    checkpoint.settle(awaiting, done.value if len(held) == 1 else lambda: checkpoint.put_back(buffers, done))


def ddp_hook(state: DDPState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """A hook for DDP: ddp_model.register_comm_hook(thinwire.DDPState(None, "int8"), thinwire.ddp_hook)."""
    present = state.state if isinstance(state, _HookState) else state
    if not isinstance(present, DDPState):
        raise CollectiveError(
            f"ddp_hook needs a thinwire.DDPState as its state, got {type(state).__name__}: "
            "register_comm_hook(thinwire.DDPState(process_group, 'int8'), thinwire.ddp_hook)"
        )
    return present.reduce(bucket)


@dataclass
class _HookState:
    """The hook state that DDP holds: a hook cannot be removed, but the state behind it can change.

    A copied or unpickled DDP model lists its hooks but does not run them: its hook state is empty.
    """

    state: DDPState | None

    def __reduce__(self) -> tuple[Any, ...]:
        return _HookState, (None,)


@spelled_out
def compress_ddp(model: nn.Module, codec: CodecChoice = "int8", **options: Unpack[DDPKeywords]) -> DDPState:
    """Compress a DDP model's gradient communication.

    The result has `stats()`, `log_to()`, `state_dict()`, `load_state_dict()` and `close()`.

        handle = thinwire.compress_ddp(DistributedDataParallel(net), "lloyd4", optimizer=optimizer)

    model: a DistributedDataParallel model, or one wrapped by torch.compile, Fabric or Accelerate.
    codec: a codec ("int8", "lloyd4", ...); a schedule ({0: "none", 100: "int8", 500: "lloyd2"}); "auto", which times
        uncompressed, bf16, int8 and lloyd4 on real steps and keeps the fastest within `error_budget`; or "auto:2.5",
        which deals out 2.5 bits per element on average, more to layers that lose more, every `replan_every` steps.
    feedback: "auto" (by codec and optimizer), "none", "classic" or "ef21".
    residual_dtype: of what feedback remembers, float32 or bfloat16 ("ef21": float32).
    exempt: what travels in 16 bits, in the same message: "auto" (parameters of one dimension or under 1024 elements),
        "none", name patterns, or a function of name and shape.
    policy: codecs by name pattern, {"*.embed*": "int8"}. The first match wins, before exemptions. A
        last "*" replaces `codec`.
    warmup_steps: number of first steps that are not compressed.
    optimizer: one or several, for feedback="auto" below 4 bits. Without it thinwire notes which optimizers step the
        model's parameters, and sends int8 until it has seen them.
    error_budget: the largest relative error of one rounding that codec="auto" accepts.
    measure_every: how often `stats()` measures errors; 0 is never.
    on_nonfinite: what a gradient with NaN or Inf does: "propagate" (all ranks get NaN) or "raise" (all ranks raise the
        same NonfiniteError at the end of backward). With a GradScaler, "propagate".
    weigh: "moments" sends gradients in Adam's units, divided by the root of its second moment. "auto" does so below 4
        bits where an Adam or RMSprop of whole parameters is known. Gradients with feedback are not weighed.
    algorithm: "one_shot", "two_phase" or "auto": one_shot for two ranks.
    mesh: a DeviceMesh of nodes and the ranks inside them, init_device_mesh("cuda", (nodes, gpus)). Gradients are then
        summed inside every node first, and `codec` is used across nodes, with 1/gpus of the bytes per rank. There is no
        feedback.
    inside: the codec inside a node. A parameter that has more bits across nodes has them inside, too.
    """
    ddp_model = find_ddp(model)
    if ddp_model.mixed_precision is not None:
        raise CollectiveError(
            "DDP(mixed_precision=...) has a communication hook of its own: use torch.autocast or bfloat16 parameters"
        )
    if ddp_model._use_python_reducer:
        raise CollectiveError(_NO_BUCKETS)
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in ddp_model._module_parameters):
        raise CollectiveError(
            "DDP has a communication hook of its own for optimizers that step in backward: do not use "
            "_apply_optimizer_in_backward, but call the optimizer's step()"
        )
    check_stepped(ddp_model.module, options.get("optimizer"))
    state = DDPState(ddp_model.process_group, codec, model=ddp_model.module, **options)
    # DDP still passes gradients of parameters that were frozen after the model was wrapped.
    passed = ddp_model._get_ddp_logging_data().get("num_parameter_tensors", math.inf)
    state._names.frozen_travel = passed > len(state._names.sizes)
    _install(ddp_model, state)
    state._models = [weakref.ref(ddp_model)]
    if state.rank == 0 and state.world > 1 and groups.on_nccl(groups.resolve(state.process_group)):
        _suggest_a_mesh(state)
    return state


def _suggest_a_mesh(state: DDPState) -> None:
    """A hint where ranks share hosts without a mesh, so that each sends all gradients to other hosts."""
    inside = int(os.environ.get("LOCAL_WORLD_SIZE") or 0)  # torchrun's; without it there is no hint
    hosts, rest = divmod(state.world, max(1, inside))
    in_hosts = inside > 1 and hosts > 1 and not rest and state.world == dist.get_world_size()
    if in_hosts and state.options.mesh is None and state.options.feedback in ("auto", "none"):  # a mesh has no feedback
        announce_once(
            f'{inside} ranks share a host: mesh=init_device_mesh("cuda", ({hosts}, {inside})) sums gradients inside '
            f"each host first, and sends 1/{inside} of the bytes to other hosts (docs/howto/ddp.md)"
        )


def _install(ddp_model: DistributedDataParallel, state: DDPState) -> None:
    """Put `state` behind DDP's only hook, which cannot be removed. A copied model lists its original's hook."""
    listed = ddp_model._comm_hooks
    listed[:] = [(hook, held) for hook, held in listed if not isinstance(held, _HookState) or held.state is not None]
    if not listed:
        ddp_model.register_comm_hook(_HookState(state), ddp_hook)
        return
    hook, present = listed[0]
    if not isinstance(present, _HookState):
        name = getattr(hook, "__qualname__", type(hook).__name__)
        raise CollectiveError(
            f"this model already has the communication hook {name}, and DDP takes one: leave out its "
            "register_comm_hook (or the framework's option that calls it), or wrap the model again"
        )
    if present.state is not None and not present.state.closed:
        raise CollectiveError("this model is already compressed: close() the handle that compress_ddp returned first")
    present.state = state


def gradients_of(parameters: Sequence[Tensor], buffer: Tensor, some: Sequence[int] | None = None) -> list[Tensor]:
    """The gradients of a bucket's parameters, or of some, as DDP lays them out: dense ones in their memory order."""
    starts = [*itertools.accumulate(map(Tensor.numel, parameters), initial=int(buffer.storage_offset()))]
    found = [(parameters[i], starts[i]) for i in (range(len(parameters)) if some is None else some)]
    return [buffer.as_strided(p.shape, _strides_of(p.shape, p.stride()), at) for p, at in found]


@functools.lru_cache(maxsize=4096)
def _strides_of(shape: torch.Size, stride: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a parameter's gradient in a bucket."""
    dense = torch.empty_like(torch.empty_strided(shape, stride, device="meta")).stride() == stride
    return stride if dense else torch.empty(shape, device="meta").stride()
