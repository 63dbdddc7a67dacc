"""DiLoCo: ranks train alone for many steps and average, compressed, what they learned.

    diloco = thinwire.DiLoCo(model, optimizer, every=30)     # the rest of the loop stays as it is

Every rank, or every site of several ranks, has a copy of the outer parameters. Every `every` optimizer steps the
difference between them and its own parameters, the outer gradient, is averaged over the ranks. The outer optimizer
steps with it, identically on every rank, and the rank continues from the result. Averages travel like DDP's gradients
(sync.py).
"""

import functools
import math
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from thinwire import schema
from thinwire.codecs.checks import is_int
from thinwire.collectives import broadcast, groups, torch_verbs
from thinwire.collectives.channel import channel_of, wait_in
from thinwire.collectives.work import done_future
from thinwire.errors import CodecError, CollectiveError
from thinwire.integrations import checkpoint
from thinwire.integrations.choice import Chooser
from thinwire.integrations.choice.options import (
    Auto,
    CodecChoice,
    CodecLike,
    DDPOptions,
    Exempt,
    Feedback,
    family,
    settings_of,
)
from thinwire.integrations.models import ParameterNames, bare_optimizer, is_sharded, plain_name
from thinwire.integrations.stats import Handle, Stats
from thinwire.integrations.sync import Future, GradientSet, GradientSync
from thinwire.log import announce

OuterOptimizer = Optimizer | Callable[[list[Tensor]], Optimizer] | None
_VERSION = 1
_open: "weakref.WeakSet[DiLoCo]" = weakref.WeakSet()


class _Fragment:
    """Parameters that are averaged together, and their outer copies in fp32 (fp64 if any of them is in fp64)."""

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        self.names = tuple(name for name, _ in named)
        self.parameters = [parameter for _, parameter in named]
        self.shapes = [_local(p).shape for p in self.parameters]
        self._dtype = torch.float64 if any(p.dtype == torch.float64 for p in self.parameters) else torch.float32
        self.values = self.flat()  # of the outer copies, one after the other
        self.outer = [nn.Parameter(values) for values in self.split(self.values)]

    def is_unchanged(self, at: int) -> bool:
        """Whether a parameter on this rank still equals its outer copy."""
        local = _local(self.parameters[at])
        return torch.equal(local, self.outer[at].to(local.dtype))

    @torch.no_grad()
    def put(self, buffer: Tensor) -> None:
        """Set this rank's parameters."""
        for parameter, values in zip(self.parameters, self.split(buffer), strict=True):
            _local(parameter).copy_(values)

    def flat(self) -> Tensor:
        """A copy of this rank's parameters, one after the other."""
        return torch.cat([_local(p).detach().to(self._dtype).reshape(-1) for p in self.parameters])

    def split(self, buffer: Tensor) -> list[Tensor]:
        parts = buffer.split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


@dataclass(eq=False)
class _Round:
    """An average of outer gradients in flight."""

    fragment: int
    due: int  # the inner step after which it is applied
    sent: Tensor  # this rank's parameters when it began
    average: Tensor
    future: "Future[Tensor]"  # of the average


class DiLoCo(Handle):
    """Training across sites, with `every` steps between messages.

    Create it after the model is wrapped or sharded, on all ranks. It counts the steps of `inner_optimizer` and needs
    nothing else in the loop; at the end `close()` averages once more, so that all ranks have the same model. As a
    context manager it closes itself. Example: with thinwire.DiLoCo(model, optimizer, every=30, codec="lloyd4"): ...

    model: any module; under DistributedDataParallel or fully_shard inside a site, pass `group`.
    inner_optimizer: what trains between rounds. None: call `step()` after every step yourself. Do so with a GradScaler:
        a step that it skips on one rank still counts as a step.
    outer_optimizer: what steps with averaged outer gradients: an optimizer over the model's parameters, which is moved
        to their outer copies, or a function of a list of tensors that makes one. None is SGD with Nesterov momentum 0.9
        and a learning rate of 0.7.
    every: steps between two averages of a parameter.
    codec: as for compress_ddp, without "auto"; "auto:2.5" without fragments.
    feedback: "auto" (none; for topk classic, EF21 before an outer Adam), "none", "classic" or "ef21".
    beta: the share of a residual that is kept after a round; 1 keeps all of it.
    fragments: number of groups of parameters, which are averaged in turn to spread the traffic evenly.
    overlap: number of steps that are trained while an average is in flight; it is applied after them.
    group: the ranks that average, one per site; None is the world. Inside a site DDP or FSDP2 works as usual.
    exempt, policy, residual_dtype: as for compress_ddp.
    """

    def __init__(
        self,
        model: nn.Module,
        inner_optimizer: Optimizer | None,
        outer_optimizer: OuterOptimizer = None,
        *,
        every: int,
        codec: CodecChoice = "lloyd4",
        feedback: Feedback = "auto",
        beta: float = 0.95,
        fragments: int = 1,
        overlap: int = 0,
        group: dist.ProcessGroup | None = None,
        exempt: Exempt = "auto",
        policy: Mapping[str, CodecLike] | None = None,
        residual_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.steps = 0  # of the inner optimizer
        self.rounds = 0  # averages of a fragment that have begun
        self.skipped = 0  # averages that were not finite
        self.every = every
        self.overlap = overlap
        self.beta = beta
        self._model = model
        self._group = groups.resolve(group)
        self._inner = _stepping(inner_optimizer, self._group)
        everything = [(plain_name(name), p) for name, p in _bare(model).named_parameters()]  # as on other ranks
        named = _trained(everything)
        _check(every, fragments, overlap, beta, len(named))
        _check_alone(named)
        _buffers_of(model)  # raises before anything is sent
        self._fragments = [_Fragment(part) for part in _split_evenly(named, fragments)]
        outer = [pair for part in self._fragments for pair in zip(part.names, part.outer, strict=True)]
        self._copies: dict[str, Tensor] = dict(outer)
        self._device = self._fragments[0].values.device
        self.outer_optimizer = self._outer_optimizer(outer_optimizer)
        options = DDPOptions(
            codec,
            feedback=feedback,
            exempt=exempt,
            policy=policy,
            optimizer=family(self.outer_optimizer),
            residual_dtype=residual_dtype,
            measure_every=fragments * 10 + 1,  # another fragment each time
        )
        _check_codec(options, fragments)
        options.rules.check_names([name for name, _ in everything])
        self._frozen = [(name, p) for name, p in everything if not p.requires_grad]
        self._names = ParameterNames()
        for name, parameter in named:
            self._names.put(_local(parameter), name)
        self._sync = GradientSync(Chooser(options, self._names, outer=True))
        self._in_flight: list[_Round] = []
        self._start(options)
        _open.add(self)
        self._hook = None if self._inner is None else self._inner.register_step_post_hook(lambda *_: self.step())

    def _start(self, options: DDPOptions) -> None:
        """Raise on all ranks unless they agree on everything; then all begin with the first rank's model."""
        shapes = [(name, *copy.shape) for name, copy in self._copies.items()]
        numel = sum(copy.numel() for copy in self._copies.values())
        model = f"{len(shapes)} parameters of {numel} elements, {zlib.crc32(repr(shapes).encode()):08x}"
        timing = f"every={self.every}, fragments={len(self._fragments)}, overlap={self.overlap}"
        how = f"{options.agreed}, beta={float(self.beta)}, outer_optimizer={settings_of(self.outer_optimizer)}"
        channel_of(self._group, self._device).issue(f"DiLoCo({model}, {timing}, {how})", anew=True)
        frozen = [p for p in self._model.parameters() if not p.requires_grad]
        self._share([*(fragment.values for fragment in self._fragments), *_buffers_of(self._model), *frozen])
        for fragment in self._fragments:
            fragment.put(fragment.values)

    def _share(self, tensors: Sequence[Tensor]) -> None:
        """Copy the first rank's tensors, of any dtype, to all ranks."""
        for tensor in tensors:
            local = _local(tensor).detach()
            if local.numel():
                buffer = local.contiguous().view(-1).view(torch.uint8)
                broadcast(buffer, group=self._group, group_src=0, algorithm="plain")
                local.copy_(buffer.view(local.dtype).view(local.shape))

    def _outer_optimizer(self, given: OuterOptimizer) -> Optimizer:
        """The optimizer of the outer copies."""
        copies = list(self._copies.values())
        if given is None:
            return torch.optim.SGD(copies, lr=0.7, momentum=0.9, nesterov=True)
        if isinstance(given, Optimizer):
            self._move(given)
        found: object = given(copies) if callable(given) else given
        if not isinstance(found, Optimizer):
            raise CollectiveError(
                "outer_optimizer: expected an optimizer, or a function that makes one from a list of tensors, got "
                + (f"one that makes {found!r}" if callable(given) else repr(given))
            )
        stepped = {id(copy) for settings in found.param_groups for copy in settings["params"]}
        left = [name for name, copy in self._copies.items() if id(copy) not in stepped]
        if left:
            raise CollectiveError(
                f"outer_optimizer: expected all of the model's parameters that learn, got one without {left[0]}, which "
                "every round would reset: add it, or freeze it (requires_grad=False)"
            )
        return found

    def _move(self, given: Optimizer) -> None:
        """Make an optimizer over the model's parameters step their outer copies."""
        if given is self._inner:
            raise CollectiveError(
                "outer_optimizer: expected another optimizer, got the inner optimizer, which would train the outer "
                "copies instead of the model"
            )
        known = {id(p) for p in self._model.parameters()}
        outer = {id(p): copy for part in self._fragments for p, copy in zip(part.parameters, part.outer, strict=True)}
        for settings in given.param_groups:
            unknown = any(id(p) not in known for p in settings["params"])
            if unknown or given.state:
                raise CollectiveError(
                    "outer_optimizer: expected a new optimizer over the model's parameters, got one "
                    + ("with others" if unknown else "that has stepped")
                )
            kept = [at for at, p in enumerate(settings["params"]) if id(p) in outer]
            settings["params"] = [outer[id(settings["params"][at])] for at in kept]
            if "param_names" in settings:
                settings["param_names"] = [settings["param_names"][at] for at in kept]

    def step(self) -> None:
        """A step of the inner optimizer is done: begin and apply the rounds that are due."""
        if self.closed:
            return
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise CollectiveError(
                    f"DiLoCo: {name} learns now, but did not when DiLoCo was created, so it is not averaged: close() "
                    "before you unfreeze layers, and create a new DiLoCo afterwards"
                )
        self.steps += 1
        self._apply(self.steps)
        for index, part in enumerate(self._fragments):
            if self.steps % self.every != index * self.every // len(self._fragments):
                continue
            for at, trained in enumerate(part.parameters):
                if not trained.requires_grad and part.is_unchanged(at):  # frozen before the last round, on all ranks
                    raise CollectiveError(
                        f"DiLoCo: {part.names[at]} no longer learns, but the momentum of the outer optimizer would "
                        "still move it: close() before you freeze layers, and create a new DiLoCo afterwards"
                    )
            self._begin(index, self.steps + self.overlap)
        self._apply(self.steps)

    def _wait(self) -> None:
        """Wait for the averages in flight."""
        for one in self._in_flight:
            wait_in(self._group, one.future, one.average)

    def _begin(self, index: int, due: int) -> None:
        self._wait()  # what rounds measured decides the next one
        fragment = self._fragments[index]
        sent = fragment.flat()
        gradient = fragment.values - sent
        if self.beta != 1:
            memories = self._sync.memories  # EF21's means must stay the sum of what was sent: they do not decay
            lost = [name for name in fragment.names if memories.kinds.get(name) == "classic"]
            memories.residuals.decay(lost, self.beta)
        self._sync.begin_step(self._group, self.rounds, gradient.device)
        if self._group.size() > 1:
            future = self._sync.average(GradientSet(fragment.names, fragment.shapes, gradient), gradient)
        else:
            future = done_future(gradient, gradient.device)
        self.rounds += 1
        self._in_flight.append(_Round(index, due, sent, gradient, future))
        self._write_logs(self.rounds, self._group.rank())

    @torch.no_grad()
    def _apply(self, steps: float = math.inf) -> None:
        """Apply the rounds that are due after so many steps.

        The outer parameters step; this rank's become those, plus what it has learned since it sent its own.
        """
        for done in [one for one in self._in_flight if one.due <= steps]:
            self._in_flight.remove(done)
            fragment = self._fragments[done.fragment]
            wait_in(self._group, done.future, done.average)
            if not schema.is_finite(done.average):
                self._drop(done.fragment)
                continue
            for copy, gradient in zip(fragment.outer, fragment.split(done.average), strict=True):
                copy.grad = gradient
            self.outer_optimizer.step()
            for part in self._fragments:
                for copy, values in zip(part.outer, part.split(part.values), strict=True):
                    copy.grad = None
                    if copy.data_ptr() != values.data_ptr():  # the optimizer has given it other data
                        values.copy_(copy)
                        copy.data = values
            trained = fragment.flat().sub_(done.sent)  # zero without overlap
            fragment.put(trained.add_(fragment.values))

    def _drop(self, index: int) -> None:
        """Drop a round whose average is not finite; all ranks see that, and continue from the outer parameters.

        The rank that caused it also resets its other fragments, and optimizer state that is not finite, which would
        cause the NaN again at the next step.
        """
        self.skipped += 1
        if self._group.rank() == 0:
            announce(f"DiLoCo: round {self.rounds} is not finite on some rank: dropped on all")
        for at, fragment in enumerate(self._fragments):
            if at == index or not schema.is_finite(fragment.flat()):
                fragment.put(fragment.values)
                for one in self._in_flight:
                    if one.fragment == at:
                        one.sent = fragment.flat()  # it has learned nothing since
        for state in () if self._inner is None else bare_optimizer(self._inner).state.values():
            if not all(schema.is_finite(_local(value)) for value in state.values() if isinstance(value, Tensor)):
                state.clear()

    def synchronize(self) -> None:
        """Average everything now, on all ranks; they then have the same parameters and the first rank's buffers."""
        self._apply()
        changed = [float(not all(map(part.is_unchanged, range(len(part.names))))) for part in self._fragments]
        learned = torch_verbs.agree("DiLoCo.synchronize", (self._group,), self._device, changed, dist.ReduceOp.MAX)
        for index, on_any_rank in enumerate(learned):
            if on_any_rank:  # otherwise momentum alone would move the outer parameters
                self._begin(index, self.steps)
                self._apply()
        self._share(_buffers_of(self._model))

    def close(self) -> None:
        """Average once more, on all ranks, and stop."""
        if self.closed:
            return
        self.synchronize()
        self.closed = True
        if self._hook is not None:
            self._hook.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self.close()
        else:  # other ranks may not come to average
            self.closed = True

    def stats(self) -> Stats:
        """What rounds have cost on this rank; `steps` counts averages of a fragment."""
        return self._sync.stats(self.rounds)

    def state_dict(self, *, gather: bool = False) -> dict[str, Any]:
        """What a checkpoint needs, besides the model and the inner optimizer, to resume bit-exactly.

        Every rank saves its own. gather: every rank calls it; the first gets one state of all ranks, which all
            ranks can load, the others an empty one. No round may be in flight.
        """
        self._wait()  # until then rounds change residuals
        if gather and self._in_flight:
            raise CollectiveError("gather=True: rounds are in flight and differ by rank: save one state per rank")
        if gather and any(isinstance(p, DTensor) for part in self._fragments for p in part.parameters):
            raise CollectiveError("gather=True: parameters are sharded and differ by rank: save one state per rank")
        compression = checkpoint.export(self._sync, [], self.rounds, self._group)
        if gather and not (compression := checkpoint.gather(compression, self._group)):
            return {}
        on_cpu = functools.partial(Tensor.to, device="cpu", copy=True)
        return {
            "version": _VERSION,
            "steps": self.steps,
            "skipped": self.skipped,
            "fragments": len(self._fragments),
            "outer": {name: on_cpu(values.detach()) for name, values in self._copies.items()},
            "outer_optimizer": deepcopy(self.outer_optimizer.state_dict()),
            "compression": compression,
            "under_way": [
                {"fragment": one.fragment, "due": one.due, "sent": on_cpu(one.sent), "average": on_cpu(one.average)}
                for one in self._in_flight
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state: this rank's own, or a gathered one.

        Load the model and the inner optimizer yourself, after DiLoCo is created. A gathered state may come from another
        number of ranks: what rank k remembered goes to rank k % world.
        """
        outer = self._copies
        count = len(self._fragments)
        advice = "load what this rank saved or, on another number of ranks, what state_dict(gather=True) gave"
        with schema.reading():
            schema.check_version(state, _VERSION)
            copies = schema.fields({name: schema.numbers(values.shape) for name, values in outer.items()})
            rules = {**dict.fromkeys(("steps", "skipped", "fragments"), schema.STEPS), "outer": copies}
            schema.fields({**rules, "under_way": schema.LIST, "compression": schema.MAPPING})("", state)
            schema.field(f"{len(outer)} parameters", lambda value: len(value) == len(outer))("outer", state["outer"])
            if state["under_way"] and state["fragments"] != count:
                raise CollectiveError(
                    f"load_state_dict: the state has rounds in flight of {state['fragments']} fragments, got {count} "
                    "here: use as many, or save while no round is in flight"
                )
            under_way = [self._resumed(f"under_way[{at}]", one) for at, one in enumerate(state["under_way"])]
            load = checkpoint.read([state["compression"]], self._group, self._names, self._sync, advice, "compression")
            self._wait()  # rounds must not write into what is loaded
            schema.load_optimizer("outer_optimizer", self.outer_optimizer, state["outer_optimizer"])
        self.rounds, _ = load()  # from here on nothing fails
        self.steps = state["steps"]
        self.skipped = state["skipped"]
        self._in_flight = under_way
        with torch.no_grad():
            for name, values in outer.items():
                values.copy_(state["outer"][name])

    def _resumed(self, field: str, saved: Any) -> _Round:
        of_fragment = schema.field("a fragment", lambda value: is_int(value) and 0 <= value < len(self._fragments))
        schema.fields({"fragment": of_fragment, "due": schema.STEPS})(field, saved)
        rule = schema.numbers(self._fragments[saved["fragment"]].values.shape, finite=False)  # NaN is dropped when due
        schema.fields({"sent": rule, "average": rule})(field, saved)
        sent, average = (saved[name].to(self._device) for name in ("sent", "average"))
        return _Round(saved["fragment"], saved["due"], sent, average, done_future(average, self._device))


def _stepping(given: Optimizer | None, group: dist.ProcessGroup) -> Optimizer | None:
    """The optimizer whose steps are counted, if any; ranks that average must train alone with it."""
    found = bare_optimizer(given, whole=True)
    if is_sharded(found):  # then some ranks exchange parameters
        both = set(dist.get_process_group_ranks(found.process_group)) & set(dist.get_process_group_ranks(group))
        if len(both) > 1:
            raise CollectiveError(
                f"inner_optimizer: ranks {sorted(both)} average, but a ZeroRedundancyOptimizer shares its step among "
                "them: give it a process_group inside a site, and DiLoCo a group with one rank per site"
            )
    if found is not None and not isinstance(found, Optimizer):
        raise CollectiveError(
            f"inner_optimizer: expected a torch optimizer, got {type(given).__name__}: of several pass the one that "
            "steps last, or pass None and call step() yourself"
        )
    return found


def _check_alone(named: Sequence[tuple[str, Tensor]]) -> None:
    mine = {id(parameter) for _, parameter in named}
    for other in _open:
        if not other.closed and not mine.isdisjoint(id(p) for part in other._fragments for p in part.parameters):
            raise CollectiveError("another DiLoCo averages this model already: close() it first")


def _buffers_of(model: nn.Module) -> list[Tensor]:
    """The model's present buffers (a forward pass may replace them), without repeats of expanded ones."""
    found = []
    for name, buffer in model.named_buffers():
        if buffer.layout != torch.strided:
            raise CollectiveError(
                f"DiLoCo copies the first rank's buffers, which must be dense, got {name} as {buffer.layout}: keep it "
                "in a plain attribute, or make it dense"
            )
        repeated = [dim for dim, stride in enumerate(buffer.stride()) if stride == 0 and buffer.numel()]
        found.append(functools.reduce(lambda kept, dim: kept.select(dim, 0), reversed(repeated), buffer))
    return found


def _check(every: int, fragments: int, overlap: int, beta: float, parameters: int) -> None:
    if not is_int(every) or every < 1:
        raise CollectiveError(f"every must be a number of steps above 0, got {every!r}")
    if not is_int(fragments) or not 1 <= fragments <= min(every, parameters):
        raise CollectiveError(
            f"fragments must be from 1 to {min(every, parameters)}, the least of every={every} and {parameters} "
            f"parameters, got {fragments!r}"
        )
    if not is_int(overlap) or not 0 <= overlap < every:
        raise CollectiveError(f"overlap must be a number of steps below every={every}, got {overlap!r}")
    if not isinstance(beta, float | int) or not 0 <= beta <= 1 or math.isnan(beta):
        raise CollectiveError(f"beta must be from 0 to 1, got {beta!r}")


def _check_codec(options: DDPOptions, fragments: int) -> None:
    choices = options.schedule.values()
    if Auto() in choices:
        raise CodecError("codec='auto' times steps of DDP; DiLoCo takes a codec, a schedule, or 'auto:2.5'")
    if fragments > 1 and any(isinstance(choice, Auto) for choice in choices):
        raise CodecError(
            f"codec={options.codec!r} deals bits over the whole model at once: it needs fragments=1, got {fragments}"
        )


def _local(tensor: Tensor) -> Tensor:
    """A tensor, or this rank's shard of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _trained(named: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Every parameter that learns; a sharded one, if this rank has elements of it."""
    learning = [(name, p) for name, p in named if p.requires_grad]
    found = [(name, p) for name, p in learning if not isinstance(p, DTensor) or _local(p).numel()]
    odd = [f"complex ones ({name})" for name, p in found if p.is_complex()]
    if odd or not found:
        raise CollectiveError(f"DiLoCo averages real parameters, got {odd[0] if odd else 'none that learns'}")
    return found


def _bare(model: nn.Module) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise CollectiveError(f"expected a model, got {type(model).__name__}: pass the nn.Module")
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def _split_evenly(named: Sequence[tuple[str, Tensor]], count: int) -> list[list[tuple[str, Tensor]]]:
    """`count` consecutive parts of about equal size, none of them empty."""
    total = sum(parameter.numel() for _, parameter in named)
    found: list[list[tuple[str, Tensor]]] = [[] for _ in range(count)]
    index = 0
    seen = 0
    for at, one in enumerate(named):
        numel = one[1].numel()
        left = len(named) - at  # every later part needs one
        full = seen + numel / 2 >= total * (index + 1) / count or left < count - index
        if found[index] and index + 1 < count and full:
            index += 1
        found[index].append(one)
        seen += numel
    return found
