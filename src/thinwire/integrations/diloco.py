"""DiLoCo: ranks train alone for many steps, and average what they learnt, compressed.

    diloco = thinwire.DiLoCo(model, optimizer, every=30)     # the rest of the loop stays

Every rank, or every site of several, has a copy of the outer parameters. Each `every` optimizer steps the difference
between them and its own parameters, the outer gradient, is averaged over the ranks. The outer optimizer steps with it,
on every rank alike, and the rank goes on from the result. The average takes the road of DDP's gradients (averager).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from thinwire.codecs.checks import is_int
from thinwire.collectives import transport
from thinwire.errors import CodecError, CollectiveError
from thinwire.integrations import checkpoint, policy as policies
from thinwire.integrations.averager import Averager, Future, GradientSet
from thinwire.integrations.decisions import Decisions
from thinwire.integrations.handle import Handle
from thinwire.integrations.names import ParameterNames, plain_name
from thinwire.integrations.options import CodecChoice, DDPOptions, Feedback
from thinwire.integrations.policy import CodecLike, Exempt
from thinwire.integrations.restore import Restorer
from thinwire.integrations.stats import Stats
from thinwire.integrations.wrapped import bare_optimizer
from thinwire.log import announce

OuterOptimizer = Optimizer | Callable[[list[Tensor]], Optimizer] | None
_VERSION = 1
_LR = 0.7
_MOMENTUM = 0.9


class _Fragment:
    """Parameters that are averaged together, and their outer copies, in fp32, one after the other in one buffer."""

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        self.names = tuple(name for name, _ in named)
        self.parameters = [parameter for _, parameter in named]
        self.shapes = [tensor.shape for tensor in self.own()]
        self.outer = [nn.Parameter(tensor.detach().float().clone()) for tensor in self.own()]

    def own(self) -> list[Tensor]:
        """This rank's parameters; of a sharded one, its shard."""
        return [p.to_local() if isinstance(p, DTensor) else p.detach() for p in self.parameters]

    def flat(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([tensor.detach().float().reshape(-1) for tensor in tensors])

    def split(self, buffer: Tensor) -> list[Tensor]:
        parts = buffer.split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


@dataclass
class _Round:
    """An average of outer gradients under way."""

    fragment: int
    due: int  # the inner step after which it is applied
    sent: Tensor  # this rank's parameters when it began
    average: Tensor
    future: "Future[Tensor] | None"

    def wait(self) -> Tensor:
        if self.future is not None:
            self.future.wait()
            self.future = None
        return self.average


class DiLoCo(Handle):
    """Training across sites, with `every` steps between messages.

    Call it after the model is wrapped or sharded, on all ranks. It counts the steps of `inner_optimizer`, and needs
    nothing else in the loop; at the end, `close()` averages once more, so that all ranks have the same model. As a
    context manager it closes itself.

    model: any module; under DistributedDataParallel or fully_shard inside a site, pass `group`.
    inner_optimizer: what trains between rounds. None: call `step()` after every step yourself. With a GradScaler do so,
        since a step that it skips on one rank alone is a step all the same.
    outer_optimizer: what steps with averaged outer gradients: an optimizer over the model's parameters, which is moved
        to their outer copies, or a function of a list of tensors that makes one. None is SGD with Nesterov momentum 0.9
        and a rate of 0.7.
    every: steps between two averages of a parameter.
    codec: as for compress_ddp, without "auto".
    feedback: "auto" (none from 4 bits up, classic below, EF21 before an outer Adam), "none", "classic" or "ef21".
    beta: what is left of a residual after a round; 1 forgets nothing.
    fragments: parameters in so many groups, which are averaged by turns, so that traffic comes evenly.
    overlap: so many steps are trained while an average is under way; it is applied after them.
    group: ranks that average, one per site; None is the world. Inside a site DDP or FSDP2 does what it does.
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
        named = _trained(model)
        _check(every, fragments, overlap, beta, len(named))
        self.every = every
        self.overlap = overlap
        self.beta = beta
        self.steps = 0  # of the inner optimizer
        self.rounds = 0  # averages of a fragment, begun
        self.skipped = 0  # averages that were not finite
        self._group = transport.resolve(group)
        self._fragments = [_Fragment(part) for part in _cut(named, fragments)]
        self.outer_optimizer = self._outer_optimizer(outer_optimizer)
        options = DDPOptions(
            codec,
            feedback=feedback,
            exempt=exempt,
            policy=policy,
            optimizer=policies.family(self.outer_optimizer),
            residual_dtype=residual_dtype,
            measure_every=len(self._fragments) * 10,
        )
        if any(isinstance(choice, policies.Trial) for choice in options.schedule.choices):
            raise CodecError("codec='auto' times steps of DDP; DiLoCo takes a codec, a schedule, or 'auto:2.5'")
        self._names = ParameterNames()
        self._names.from_model = True
        for name, parameter in named:
            self._names.put(parameter.to_local() if isinstance(parameter, DTensor) else parameter, name)
        options.rules.check_names([name for name, _ in named])
        self._averager = Averager(options, Decisions(options, self._names))
        self._restorer = Restorer(self._averager.average)  # a checkpoint's part; rounds are never held
        self._under_way: list[_Round] = []
        self._share()
        self._hook: Any = None
        if inner_optimizer is not None:
            self._hook = bare_optimizer(inner_optimizer).register_step_post_hook(lambda *_: self.step())

    def _outer_optimizer(self, given: OuterOptimizer) -> Optimizer:
        copies: list[Tensor] = [copy for fragment in self._fragments for copy in fragment.outer]
        if given is None:
            return torch.optim.SGD(copies, lr=_LR, momentum=_MOMENTUM, nesterov=True)
        if not isinstance(given, Optimizer):
            return given(copies)
        own = [parameter for fragment in self._fragments for parameter in fragment.parameters]
        outer = {id(parameter): copy for parameter, copy in zip(own, copies, strict=True)}
        for settings in given.param_groups:
            unknown = [p for p in settings["params"] if id(p) not in outer]
            if unknown or given.state:
                raise CollectiveError(
                    "outer_optimizer: expected a new optimizer over the model's parameters, got one "
                    + ("with others" if unknown else "that has stepped")
                )
            settings["params"] = [outer[id(p)] for p in settings["params"]]
        return given

    def _share(self) -> None:
        """All ranks begin with the first one's parameters."""
        for fragment in self._fragments:
            buffer = fragment.flat(fragment.outer)
            dist.broadcast(buffer, group=self._group, group_src=0)
            self._put(fragment, buffer)

    def _put(self, fragment: _Fragment, buffer: Tensor) -> None:
        """Outer copies and own parameters = these."""
        with torch.no_grad():
            for copy, own, values in zip(fragment.outer, fragment.own(), fragment.split(buffer), strict=True):
                copy.copy_(values)
                own.copy_(values)

    def step(self) -> None:
        """A step of the inner optimizer is done: begin and apply the rounds that are due."""
        if self.closed:
            return
        self.steps += 1
        self._apply_due()
        count = len(self._fragments)
        for index in range(count):
            if self.steps % self.every == index * self.every // count % self.every:
                self._begin(index, self.steps + self.overlap)
        self._apply_due()

    def _begin(self, index: int, due: int) -> None:
        for earlier in self._under_way:
            earlier.wait()  # before new decisions are made from what it measured
        fragment = self._fragments[index]
        sent = fragment.flat(fragment.own())
        gradient = fragment.flat(fragment.outer).sub_(sent)
        if self.beta != 1:
            self._averager.memories.residuals.decay(fragment.names, self.beta)
        news = self._averager.begin_step(self._group, self.rounds, 0.0, gradient.device)
        if news and self._group.rank() == 0:
            announce(news)
        future = None
        if self._group.size() > 1:
            future = self._averager.average(GradientSet(fragment.names, fragment.shapes, gradient), gradient)
        self.rounds += 1
        self._under_way.append(_Round(index, due, sent, gradient, future))
        self._write_logs(self.rounds, self._group.rank())

    def _apply_due(self) -> None:
        for done in [one for one in self._under_way if one.due <= self.steps]:
            self._under_way.remove(done)
            self._apply(done)

    @torch.no_grad()
    def _apply(self, done: _Round) -> None:
        """Step with the average, and move this rank's parameters by as much as the outer ones differ from what it sent.

        An average that is not finite, which every rank sees alike, is dropped: all go on from the outer parameters.
        """
        fragment = self._fragments[done.fragment]
        average = done.wait()
        if not bool(torch.isfinite(average).all()):
            self.skipped += 1
            if self._group.rank() == 0:
                announce(f"DiLoCo: round {self.rounds} is not finite on some rank, and is dropped on all")
            self._put(fragment, fragment.flat(fragment.outer))
            return
        for copy, gradient in zip(fragment.outer, fragment.split(average), strict=True):
            copy.grad = gradient
        self.outer_optimizer.step()
        for copy in fragment.outer:
            copy.grad = None
        trained = fragment.flat(fragment.own()).sub_(done.sent)  # since it was sent; nothing without overlap
        outer = fragment.flat(fragment.outer).add_(trained)
        for own, values in zip(fragment.own(), fragment.split(outer), strict=True):
            own.copy_(values)

    def synchronize(self) -> None:
        """Average everything now, on all ranks; they then have the same parameters."""
        self._finish()
        for index in range(len(self._fragments)):
            self._begin(index, self.steps)
            self._finish()

    def _finish(self) -> None:
        """Apply every round that is under way."""
        for done in self._under_way:
            self._apply(done)
        self._under_way.clear()

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
        else:  # other ranks may not come
            self.closed = True

    def stats(self) -> Stats:
        """What rounds cost so far on this rank; `steps` counts averages of a fragment."""
        return self._averager.stats(self.rounds)

    def state_dict(self, *, gather: bool = False) -> dict[str, Any]:
        """What a checkpoint needs besides the model and the inner optimizer to go on with the same bits.

        Every rank saves its own. gather: every rank calls it, the first rank gets one state with what all remember, the
            others an empty one; all load that one. It has no rounds under way: save where there are none.
        """
        memories = self._averager.memories
        rank = self._group.rank()
        ranks = {rank: memories.residuals.read()}
        means = memories.means.read()
        own = checkpoint.export(self._averager, self._restorer, self.rounds, self._group.size(), ranks, means)
        if gather and self._under_way:
            raise CollectiveError("gather=True: rounds are under way, and differ by rank: save one state per rank")
        compression = checkpoint.gather_state(own, rank, self._group) if gather else own
        if not compression:
            return {}
        copies = {name: copy for part in self._fragments for name, copy in zip(part.names, part.outer, strict=True)}
        return {
            "version": _VERSION,
            "steps": self.steps,
            "skipped": self.skipped,
            "outer": {name: copy.detach().cpu().clone() for name, copy in copies.items()},
            "outer_optimizer": self.outer_optimizer.state_dict(),
            "compression": compression,
            "under_way": [
                {"fragment": one.fragment, "due": one.due, "sent": one.sent.cpu(), "average": one.wait().cpu()}
                for one in self._under_way
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state: this rank's own, or a gathered one. The model and its optimizer are loaded by you.

        A gathered state may come from another number of ranks: what rank k remembered goes to rank k % world.
        """
        if not isinstance(state, Mapping) or state.get("version") != _VERSION:
            raise CollectiveError("load_state_dict: expected what state_dict() of this version's DiLoCo gave")
        copies = {name: copy for part in self._fragments for name, copy in zip(part.names, part.outer, strict=True)}
        if {name: copy.shape for name, copy in copies.items()} != {k: v.shape for k, v in state["outer"].items()}:
            raise CollectiveError("load_state_dict: the state is of another model, or sharded in another way")
        rank = self._group.rank()
        self.rounds = checkpoint.load(
            [state["compression"]], rank, self._group.size(), self._names, self._averager, self._restorer
        )
        self.steps = int(state["steps"])
        self.skipped = int(state["skipped"])
        self.outer_optimizer.load_state_dict(state["outer_optimizer"])
        with torch.no_grad():
            for name, copy in copies.items():
                copy.copy_(state["outer"][name])
        self._under_way = [self._resumed(one) for one in state["under_way"]]

    def _resumed(self, saved: Mapping[str, Any]) -> _Round:
        device = self._fragments[saved["fragment"]].outer[0].device
        return _Round(saved["fragment"], saved["due"], saved["sent"].to(device), saved["average"].to(device), None)


def _trained(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Every parameter that learns, by its name without wrappers; a sharded one, if this rank has elements of it."""
    if not isinstance(model, nn.Module):
        raise CollectiveError(f"expected a model, got {type(model).__name__}: pass the nn.Module")
    inner = getattr(model, "module", model) if isinstance(model, nn.parallel.DistributedDataParallel) else model
    named = [(plain_name(name), p) for name, p in inner.named_parameters() if p.requires_grad]
    found = [(name, p) for name, p in named if not isinstance(p, DTensor) or p.to_local().numel()]
    complex_ones = [name for name, p in found if p.is_complex()]
    if complex_ones or not found:
        what = f"complex ones ({complex_ones[0]})" if complex_ones else "none that learns"
        raise CollectiveError(f"DiLoCo averages real parameters, got {what}")
    return found


def _cut(named: Sequence[tuple[str, Tensor]], count: int) -> list[list[tuple[str, Tensor]]]:
    """`count` parts one after the other, about equally large, none of them empty."""
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
