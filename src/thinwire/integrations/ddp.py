"""DistributedDataParallel: gradients that travel compressed.

handle = thinwire.compress_ddp(ddp_model)                       # one line; the rest of the script stays
ddp_model.register_comm_hook(thinwire.DDPState(None, "int8"), thinwire.ddp_hook)   # the same by hand
"""

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.collectives import checks, groups, torch_verbs
from thinwire.collectives.channel import wait_in
from thinwire.collectives.work import new_future
from thinwire.errors import CodecError, CollectiveError
from thinwire.integrations import checkpoint
from thinwire.integrations.averager import Averager, Future, gradients_in, over_groups
from thinwire.integrations.checkpoint import Restorer
from thinwire.integrations.decisions import Decisions
from thinwire.integrations.names import Names, ParameterNames, find_ddp, living, plain_name
from thinwire.integrations.nonfinite import NonfiniteGuard, after_backward, which_are_finite
from thinwire.integrations.options import CodecChoice, DDPKeywords, DDPOptions, check_known, spelled_out
from thinwire.integrations.stats import Handle, Stats
from thinwire.log import announce_once

_WEIGHED = (torch.float32, torch.bfloat16)  # gradients that may become larger by a factor without an overflow
_Undo = Callable[["Future[Tensor]"], Tensor]


class DDPState(Handle):
    """Compression of one DDP model: what `compress_ddp` returns, and the state of `ddp_hook`.

    `process_group` is DDP's group (None: the world). `model` gives parameters their names, for rules by name and for
    checkpoints; without it they are numbered in the order in which DDP brings them. The other arguments are those of
    `compress_ddp`. A state pickles without its group, as torch's PowerSGDState does, and then stands for the world.
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
        check_known("compress_ddp", DDPKeywords, options)
        self._begin(process_group, DDPOptions(codec, **options), ParameterNames())
        if model is not None:
            self.name_parameters(model)
        elif self._names.needs_model:
            raise CodecError("rules by name need names: pass model=, or use thinwire.compress_ddp(ddp_model, ...)")

    def _begin(self, process_group: dist.ProcessGroup | None, options: DDPOptions, names: ParameterNames) -> None:
        super().__init__()
        self.process_group = process_group
        # An optimiser may hold the model, which must not hold itself alive.
        self.options = replace(options, optimizer=options.family)
        self.step = 0
        self._names = names
        self._names.needs_model = options.rules.by_name
        self._decisions = Decisions(options, names, whole=True)
        self._averager = Averager(options, self._decisions)
        self._restorer = Restorer(self._averager.average)
        self._guard = NonfiniteGuard() if options.on_nonfinite == "raise" else None
        self._models: Sequence[weakref.ref[DistributedDataParallel]] | None = None  # with this hook; once looked for
        self._means: list[tuple[Tensor, Future[Tensor]]] = []  # buckets of the step, for the guard
        self._ended = True  # whether the next bucket is the first of a step

    def name_parameters(self, model: nn.Module) -> None:
        """Call parameters as `model` does, in rules and checkpoints. A state that was unpickled may need it again."""
        self._decisions.rules.check_names([plain_name(name) for name, _ in model.named_parameters()])
        self._names.take(model)

    def reduce(self, bucket: "dist.GradBucket") -> "Future[Tensor]":  # type: ignore[name-defined]
        """Start to average a bucket; the future holds its buffer."""
        if isinstance(bucket, tuple):
            raise CollectiveError(
                "DDP's compiled path (optimize_ddp='python_reducer') hands over gradients one by one, without buckets: "
                "use the hooks of thinwire.hooks there, or another optimize_ddp mode"
            )
        buffer = bucket.buffer()
        checks.check_gradient(buffer)
        group = groups.resolve(self.process_group)
        if self._ended:
            self._begin_step(group, buffer.device)
        try:
            if self.closed:
                return torch_verbs.average(buffer, group)
            future = self._average(bucket.parameters(), buffer, alone=group.size() == 1)
        finally:
            if bucket.is_last():
                self._ended = True
                self.step += 1
                if gone := self._restorer.end_step():
                    self._averager.forget(gone)
        if self._guard is not None:
            self._means.append((buffer, future))
            if bucket.is_last():
                self._check_later(self._guard, group)
        return future

    def _average(self, parameters: Sequence[Tensor], buffer: Tensor, *, alone: bool) -> "Future[Tensor]":
        if self._guard is not None:
            own = gradients_in(buffer, *self._names.of(parameters))
            self._guard.look(own.names, own.views)
        if alone or not buffer.numel():
            future = new_future(buffer.device)
            future.set_result(buffer)
            return future
        names, shapes = self._names.of(parameters)
        undo = self._weigh(parameters, names, buffer)
        future = self._restorer.average(gradients_in(buffer, names, shapes), buffer)
        return future if undo is None else future.then(undo)

    def _check_later(self, guard: NonfiniteGuard, group: dist.ProcessGroup) -> None:
        """At the end of the backward pass, when all means are there."""
        step = self.step - 1
        means = self._means
        self._means = []

        def check() -> None:
            found = torch.cat([which_are_finite([buffer]) for buffer, _ in means])
            if bool(found.all()):  # all ranks have the same means, and see the same
                return
            own = guard.code(group.rank(), group.size(), spoiled=True)
            (least,) = over_groups("on_nonfinite", (group,), found.device, [float(own)], dist.ReduceOp.MIN)
            guard.check(int(least), group.size(), step)

        if not after_backward(check):  # a rank that has no more data, under Join: it meets the others' gradients
            for buffer, future in means:
                wait_in(group, future, buffer)
            check()

    def _weigh(self, parameters: Sequence[Tensor], names: Names, buffer: Tensor) -> "_Undo | None":
        """Bring gradients into Adam's units, see [Note: Moments]; what brings the means back, if there are any."""
        weighed = self._decisions.weighed(names) if buffer.dtype in _WEIGHED else []
        if not weighed:
            return None
        gradients = _gradients(parameters, buffer)
        views = [gradients[i] for i in weighed]
        roots = self._decisions.roots([parameters[i] for i in weighed])
        torch._foreach_div_(views, roots)

        def undo(done: "Future[Tensor]") -> Tensor:
            output = done.value()
            torch._foreach_mul_(views, roots)
            if output.is_cuda:  # the stream of this callback reads what another one's memory holds
                for root in roots:
                    root.record_stream(torch.cuda.current_stream(output.device))
            return output

        return undo

    def _begin_step(self, group: dist.ProcessGroup, device: torch.device) -> None:
        if self.options.mesh is not None and group is not self._averager.group:
            ranks = sorted(self.options.mesh.mesh.flatten().tolist())
            own = sorted(dist.get_process_group_ranks(group))
            if ranks != own:
                raise CollectiveError(f"the mesh must hold the ranks of DDP's group, {own}, got one of {ranks}")
        self._ended = False
        self._means.clear()
        if self._guard is not None:
            self._guard.begin()
        if self._decisions.race is not None and device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # the host is ahead of the steps that are timed
        if self.closed:
            return
        if group.size() == 1:
            self._write_logs(self.step, 0)
            return
        if self.process_group is None and self._averager.group is None:
            self._check_world()
        if self._decisions.weighs and self.step > 0:
            # In a Join, or after one, ranks may have taken different numbers of steps.
            self._decisions.moments.uneven = any(model._join_config.enable for model in self._hooked())
        self._averager.begin_step(group, self.step, device)
        self._write_logs(self.step, group.rank())

    def _hooked(self) -> list[DistributedDataParallel]:
        """The models that this state was registered on: by compress_ddp, which says so, or by hand."""
        if self._models is None:
            every = living(DistributedDataParallel)
            self._models = [weakref.ref(one) for one in every if any(held is self for _, held in one._comm_hooks)]
        return [model for found in self._models if (model := found()) is not None]

    def _check_world(self) -> None:
        """Raise if a state for the world was registered on a model whose group is smaller: others would never come."""
        for model in self._hooked():
            ranks = dist.get_process_group_ranks(model.process_group)
            if len(ranks) < dist.get_world_size():
                raise CollectiveError(
                    f"DDP's group has the ranks {ranks} of {dist.get_world_size()}, and this state stands for the "
                    "world: pass DDPState(process_group, ...) the group that the model has"
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
        """What compression did so far on this rank; `print` shows it as a table."""
        return self._averager.stats(self.step)

    def close(self) -> None:
        """Go back to plain DDP and forget all residuals. `compress_ddp` may be called again."""
        self.closed = True
        self._decisions.end_scout()
        self._averager.go_on({}, {}, {}, {})
        self._restorer.restore(None)

    def state_dict(self, *, gather: bool = False) -> dict[str, Any]:
        """What a checkpoint needs to go on with the same bits. Every rank saves its own: they differ in `ranks`.

        gather: every rank calls it, the first rank gets one state with what all remember, the others an empty one.
            All load that one state.
        """
        group = groups.resolve(self.process_group)
        return checkpoint.save(self._averager, self._restorer.layout, self.step, group, gather=gather)

    def blank_state_dict(self, world: int | None = None) -> dict[str, Any]:
        """A state of zeros, for loaders that fill one in place (torch.distributed.checkpoint).

        It holds what this rank needs of what `world` ranks saved.
        """
        self._decisions.check_family("compress_ddp")
        group = groups.resolve(self.process_group)
        old = group.size() if world is None else world
        return checkpoint.blank(self._averager, self._restorer.layout, self.step, group, old)

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on from a saved state: this rank's own, a gathered one, or a list of the states of all ranks.

        Another world size: what rank k remembered goes to rank k % world, so that the sum over ranks is kept.
        """
        states = list(state) if isinstance(state, Sequence) else [state]
        group = groups.resolve(self.process_group)
        self.step, layout, loaded = checkpoint.load(states, group, self._names, self._averager)
        self._restorer.restore(layout, loaded)
        self._ended = True

    def __getstate__(self) -> dict[str, Any]:
        if self.options.mesh is not None:
            raise CollectiveError("a DDPState with a mesh does not pickle: save state_dict(), and make it anew")
        return {
            "options": replace(self.options, optimizer=self._decisions.family),
            "state": self.state_dict() if dist.is_initialized() else None,
            "sizes": self._names.sizes,
            "order": self._names.order,
        }

    def __setstate__(self, saved: dict[str, Any]) -> None:
        names = ParameterNames()
        names.sizes = dict(saved["sizes"])
        names.awaited = saved["order"]
        self._begin(None, saved["options"], names)
        state = saved["state"]
        if state is None:  # it was pickled before there was a group, and has nothing to remember
            return
        rank = str(self.rank)
        (own,) = state["ranks"].values()
        (errors,) = state["errors"].values()
        self.load_state_dict({**state, "world": self.world, "ranks": {rank: own}, "errors": {rank: errors}})


DDPHandle = DDPState


def ddp_hook(state: DDPState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """A communication hook of DDP: the mean of the bucket over ranks, compressed as `state` says."""
    present = state.state if isinstance(state, _Switch) else state
    if not isinstance(present, DDPState):
        raise CollectiveError(
            f"ddp_hook needs a thinwire.DDPState as its state, got {type(state).__name__}: "
            "register_comm_hook(thinwire.DDPState(process_group, 'int8'), thinwire.ddp_hook)"
        )
    return present.reduce(bucket)


@dataclass
class _Switch:
    """What DDP holds: a hook cannot be taken out, but the state behind it can change.

    A DDP model that is copied or unpickled lists its hooks and has none: its switch is an empty one.
    """

    state: DDPState | None

    def __reduce__(self) -> tuple[Any, ...]:
        return _Switch, (None,)


_switches: "weakref.WeakKeyDictionary[DistributedDataParallel, _Switch]" = weakref.WeakKeyDictionary()


@spelled_out
def compress_ddp(model: nn.Module, codec: CodecChoice = "int8", **options: Unpack[DDPKeywords]) -> DDPState:
    """Let the gradients of a DDP model travel compressed.

    The result has `stats()`, `log_to()`, `state_dict()`, `load_state_dict()` and `close()`.

    model: a DistributedDataParallel model, or what torch.compile, Fabric or Accelerate made of one.
    codec: a codec ("int8", "lloyd4", ...); a schedule ({0: "none", 100: "int8", 500: "lloyd2"}); "auto", which times
        uncompressed, bf16, int8 and lloyd4 on real steps and keeps the fastest within `error_budget`; or "auto:2.5",
        which gives 2.5 bits per element on average, more to layers that lose more, again every `replan_every` steps.
    feedback: "auto" (by codec and optimiser), "none", "classic" or "ef21".
    residual_dtype: what feedback remembers is kept as float32 or bfloat16 ("ef21": float32).
    exempt: what travels in 16 bits, in the same message: "auto" (parameters of one dimension or under 1024 elements),
        "none", name patterns, or a function of name and shape.
    policy: codecs by name pattern, {"*.embed*": "int8"}. The first pattern that matches holds, before exemptions. A
        last "*" stands for `codec`.
    warmup_steps: the first steps, uncompressed.
    optimizer: one or several, for feedback="auto" below 4 bits. Without it thinwire watches which optimisers step the
        model's parameters, and sends int8 until it has seen them.
    error_budget: the relative error of one rounding that codec="auto" may accept.
    measure_every: how often `stats()` measures errors; 0 is never.
    on_nonfinite: what a gradient with NaN or Inf does: "propagate" (all ranks get NaN) or "raise" (all ranks raise the
        same NonfiniteError at the end of backward). With a GradScaler, "propagate".
    weigh: "moments" brings gradients into Adam's units before they are encoded, and back: they are divided by the root
        of its second moment. "auto" does so below 4 bits where an Adam or RMSprop of whole parameters is known. What
        has feedback is not weighed.
    algorithm: "one_shot", "two_phase" or "auto": one_shot for two ranks.
    mesh: a DeviceMesh of nodes and the ranks inside them, init_device_mesh("cuda", (nodes, gpus)). Gradients are then
        summed inside every node first. `codec` travels across nodes, with 1/gpus of the bytes per rank. There is no
        feedback: feedback="auto" is "none".
    inside: the codec inside a node. A parameter with more bits across nodes keeps them inside too.
    """
    ddp_model = find_ddp(model)
    if ddp_model.mixed_precision is not None:
        raise CollectiveError(
            "DDP(mixed_precision=...) has a communication hook of its own: use torch.autocast or bfloat16 parameters"
        )
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in ddp_model._module_parameters):
        raise CollectiveError(
            "DDP has a communication hook of its own for optimizers that step in backward: leave out "
            "_apply_optimizer_in_backward, and call the optimizer's step()"
        )
    state = DDPState(ddp_model.process_group, codec, model=ddp_model.module, **options)
    switch = _switches.get(ddp_model)
    if switch is None:
        switch = _Switch(state)
        _check_hooks(ddp_model)
        ddp_model.register_comm_hook(switch, ddp_hook)
        _switches[ddp_model] = switch
    elif switch.state is not None and not switch.state.closed:
        raise CollectiveError("this model is compressed already: close() the handle that compress_ddp gave first")
    switch.state = state
    state._models = [weakref.ref(ddp_model)]
    if state.rank == 0 and (hint := _mesh_hint(state)):
        announce_once(hint)
    return state


def _mesh_hint(state: DDPState) -> str:
    """What to say where ranks on NCCL share hosts, and each sends all its bytes to other hosts; "" elsewhere."""
    options = state.options
    inside = int(os.environ.get("LOCAL_WORLD_SIZE") or 0)  # torchrun's; where it is not known, nothing is said
    hosts, rest = divmod(state.world, max(1, inside))
    group = groups.resolve(state.process_group)
    if inside < 2 or hosts < 2 or rest or state.world < dist.get_world_size() or not groups.on_nccl(group):
        return ""
    if options.mesh is not None or options.feedback not in ("auto", "none"):
        return ""  # a mesh has no feedback
    return (
        f'{inside} ranks share a host: mesh=init_device_mesh("cuda", ({hosts}, {inside})) sums gradients inside each '
        f"host first, and sends 1/{inside} of the bytes to other hosts (docs/howto/ddp.md)"
    )


def _check_hooks(ddp_model: DistributedDataParallel) -> None:
    """Raise if DDP has a communication hook: it takes one, for good. A copy only lists that of its original."""
    listed = ddp_model._comm_hooks
    listed[:] = [(hook, held) for hook, held in listed if not isinstance(held, _Switch) or held.state is not None]
    hooks = [hook for hook, _ in listed]
    if hooks:
        name = getattr(hooks[0], "__qualname__", type(hooks[0]).__name__)
        raise CollectiveError(
            f"this model has the communication hook {name} already, and DDP takes one: leave out its "
            "register_comm_hook (or the framework's option that calls it), or wrap the model anew"
        )


def _gradients(parameters: Sequence[Tensor], buffer: Tensor) -> list[Tensor]:
    """The bucket's parts as DDP lays them out: in the order of memory of dense parameters, which may be permuted."""
    found = []
    for parameter, row in zip(parameters, buffer.split([p.numel() for p in parameters]), strict=True):
        dense = torch.empty_like(parameter, device="meta").stride() == parameter.stride()
        found.append(row.as_strided(parameter.shape, parameter.stride()) if dense else row.view(parameter.shape))
    return found
