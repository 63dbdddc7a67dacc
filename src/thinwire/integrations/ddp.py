"""DistributedDataParallel: gradients that travel compressed.

    handle = thinwire.compress_ddp(ddp_model, "lloyd4")             # one line; the rest of the script stays
    ddp_model.register_comm_hook(thinwire.DDPState(None, "int8"), thinwire.ddp_hook)   # the same by hand

[Note: Layout] DDP rebuilds its buckets after the first iteration, and what a codec makes of a number depends on the
block it falls into. A run that is resumed starts with DDP's first buckets again, where the run it continues had the
rebuilt ones. So a checkpoint holds the layout, and in its first iteration a resumed run waits until all gradients of a
bucket *of that layout* are there, from whatever buckets of DDP's, and sends those. Its results are then the same bits.
"""

import contextlib
import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from thinwire import feedback as feedbacks
from thinwire.codecs import BlockInt, Codec, Identity, registry
from thinwire.collectives import plain, primitives
from thinwire.collectives.reduce import LaneLoad, Message
from thinwire.errors import CodecError, CollectiveError
from thinwire.feedback import Ledger
from thinwire.integrations import auto
from thinwire.integrations import policy as policies
from thinwire.integrations.layout import Arrangement, Slot
from thinwire.integrations.policy import Budget, CodecLike, Exempt, Trial
from thinwire.integrations.stats import BucketMeter, ErrorWatch, Stats, Tally, now
from thinwire.optim import OneBitAdam

CodecChoice = CodecLike | Mapping[int, CodecLike]
Names = tuple[str, ...]
_MEANWHILE = BlockInt(8)  # travels while the feedback depends on an optimiser that was not seen yet
_PATIENCE = 3  # steps to wait for it
_VERSION = 1


@dataclass(frozen=True)
class Gradients:
    """What one message averages: gradients, flat, with their parameters' names and shapes."""

    names: Names
    shapes: tuple[torch.Size, ...]
    views: Sequence[Tensor]
    buffer: Tensor | None  # what the views are the parts of, in order; None if they are scattered


class _Bucket:
    """Everything that is the same at every step about one set of gradients."""

    def __init__(self, state: "DDPState", gradients: Gradients) -> None:
        like = gradients.views[0]
        slots = [
            state._slot(name, shape, view.numel(), like.dtype)
            for name, shape, view in zip(gradients.names, gradients.shapes, gradients.views, strict=True)
        ]
        self.arrangement = Arrangement(slots)
        self.kinds = self.arrangement.kinds
        self.plain = all(isinstance(kind.codec, Identity) for kind in self.kinds)
        self.plain_bytes = 2 * (state.world - 1) * sum(view.nbytes for view in gradients.views) // state.world
        self.numel = sum(view.numel() for view in gradients.views)
        self.message = None
        if not self.plain:
            self.message = Message(self.kinds, like, group=state.process_group, algorithm=state._algorithm)
        self.carries = [
            state._carry(kind.feedback, self.arrangement.pieces(i), like.device) for i, kind in enumerate(self.kinds)
        ]

    def watches(self, device: torch.device) -> list[ErrorWatch]:
        """One a lane."""
        return [ErrorWatch(self.arrangement.pieces(i), device) for i in range(len(self.kinds))]


class DDPState:
    """The state of `ddp_hook`: how gradients are compressed, and what is remembered of them.

    `process_group` is DDP's group (None: the world). `model` gives parameters their names, for rules by name and for
    checkpoints; without it they are numbered in the order in which DDP brings them. The other arguments are those of
    `compress_ddp`. A state pickles without its group, as torch's PowerSGDState does, and then stands for the world.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        codec: CodecChoice = "lloyd4",
        *,
        feedback: str = "auto",
        exempt: Exempt = "auto",
        policy: Mapping[str, CodecLike] | None = None,
        warmup_steps: int = 0,
        optimizer: Optimizer | str | None = None,
        residual_dtype: torch.dtype = torch.float32,
        error_budget: float = 0.15,
        replan_every: int = 100,
        measure_every: int = 100,
        algorithm: str = "auto",
        model: nn.Module | None = None,
    ) -> None:
        policies.check_feedback(feedback, residual_dtype)
        _check_counts(replan_every=replan_every, measure_every=measure_every)
        if not error_budget > 0:
            raise CodecError(f"error_budget must be above 0, got {error_budget!r}")
        self.process_group = process_group
        self._options: dict[str, Any] = {
            "codec": codec, "feedback": feedback, "exempt": exempt, "policy": policy, "warmup_steps": warmup_steps,
            "residual_dtype": residual_dtype, "error_budget": error_budget, "replan_every": replan_every,
            "measure_every": measure_every, "algorithm": algorithm,
        }  # fmt: skip
        self._schedule = policies.Schedule(codec, warmup_steps)
        self._rules = policies.Rules(exempt, policy)
        self._feedback, self._algorithm = feedback, algorithm
        self._error_budget, self._replan_every, self._measure_every = error_budget, replan_every, measure_every
        self._residuals, self._means = Ledger(residual_dtype), Ledger(torch.float32)
        self._family: str | None = None
        self._onebit: OneBitAdam | None = None
        self._scout: Any = None
        self._set_optimizer(optimizer)
        self._names: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._sizes: dict[str, tuple[torch.Size, int, torch.dtype]] = {}
        if model is not None:
            self._learn_names(model)
        elif self._rules.by_name:
            raise CodecError("rules by name need names: pass model=, or use thinwire.compress_ddp(ddp_model, ...)")
        self._reset()

    def _reset(self) -> None:
        """Everything that changes from step to step."""
        self.step = 0
        self.closed = False
        self._ended = True  # whether the next bucket is the first of a step
        self._began = 0.0
        self._buckets: dict[tuple[Names, torch.dtype, torch.device], _Bucket] = {}
        self._setting: object = None  # the decisions that `_buckets` were made with
        self._base: Codec = Identity()
        self._widths: Mapping[str, Codec] = {}
        self._race: auto.Race | None = None
        self._chosen: Codec | None = None
        self._why = ""
        self._watches: list[ErrorWatch] = []
        self._measured: dict[str, float | None] = {"error": None, "clipped": None}
        self._seen: list[Names] = []  # of this step
        self._layout: list[Names] = []  # of the last whole step
        self._restored: list[Names] | None = None  # of a checkpoint, until a step was made with it
        self._held: dict[str, tuple[torch.Size, Tensor, _Held]] = {}
        self._tally = Tally()
        self._device = torch.device("cpu")

    # --- the hook -----------------------------------------------------------------------------------------------------

    def reduce(self, bucket: "dist.GradBucket") -> "torch.futures.Future[Tensor]":  # type: ignore[name-defined]
        """Start to average a bucket; the future holds its buffer."""
        buffer = bucket.buffer()
        if buffer.layout != torch.strided:
            raise CollectiveError(
                f"gradients must be dense, got {buffer.layout}: use dense gradients, e.g. nn.Embedding(sparse=False)"
            )
        self._device = buffer.device
        if self._ended:
            self._begin_step()
        last = bucket.is_last()
        try:
            return self._average(buffer, bucket.parameters())
        finally:
            if last:
                self._end_step()

    def _average(self, buffer: Tensor, parameters: Sequence[Tensor]) -> "torch.futures.Future[Tensor]":
        if self.closed or self.world == 1 or not buffer.numel():
            return _done(buffer) if self.world == 1 or not buffer.numel() else plain.average(buffer, self._group)
        if self._onebit is not None and self._onebit.frozen:
            self._onebit.put_momentum(parameters, buffer)
        real = torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer
        factor = real.numel() // buffer.numel()
        names = tuple(self._name(parameter) for parameter in parameters)
        shapes = tuple(parameter.shape for parameter in parameters)
        views = real.split([factor * parameter.numel() for parameter in parameters])
        if self._restored is None or names in self._restored:
            self._seen.append(names)
            return self._send(Gradients(names, shapes, views, real), buffer)
        return self._hold(names, shapes, views, buffer)

    def _send(self, gradients: Gradients, output: Tensor) -> "torch.futures.Future[Tensor]":
        bucket = self._bucket(gradients)
        if bucket.message is None:
            self._tally.sent(bucket.plain_bytes, bucket.plain_bytes)
            if gradients.buffer is not None:
                return _instead(plain.average(gradients.buffer, self._group), output)
            whole = torch.cat(list(gradients.views))
            return plain.average(whole, self._group).then(lambda done: _spread(gradients.views, done.value(), output))
        lanes, copies = bucket.arrangement.load(gradients.views, gradients.buffer)
        watches: Sequence[ErrorWatch | None] = [None] * len(lanes)
        if self._measuring:
            watches = found = bucket.watches(output.device)
            self._watches += found
        checks = [self._tally.checked, *[None] * (len(lanes) - 1)]
        loads = [LaneLoad(*load) for load in zip(lanes, bucket.carries, watches, checks, strict=True)]
        meter = BucketMeter(self._tally) if output.device.type == "cpu" else None
        work = bucket.message.run(loads, [output], step=self.step, copies=copies, meter=meter)
        self._tally.sent(bucket.message.sent_bytes, bucket.plain_bytes)
        return work.get_future().then(lambda done: _first(done, meter))

    def _bucket(self, gradients: Gradients) -> _Bucket:
        key = gradients.names, gradients.views[0].dtype, gradients.views[0].device
        if key not in self._buckets:
            self._buckets[key] = _Bucket(self, gradients)
        return self._buckets[key]

    def _hold(
        self, names: Names, shapes: Sequence[torch.Size], views: Sequence[Tensor], buffer: Tensor
    ) -> "torch.futures.Future[Tensor]":
        """Keep a bucket's gradients until those of a bucket of the restored layout are complete."""
        assert self._restored is not None
        owner = _Held(buffer, {wanted for wanted in self._restored if not set(wanted).isdisjoint(names)})
        for name, shape, view in zip(names, shapes, views, strict=True):
            self._held[name] = shape, view, owner
        for wanted in self._restored:
            if wanted not in self._seen and all(name in self._held for name in wanted):
                self._seen.append(wanted)
                self._send_held(wanted)
        return owner.future

    def _send_held(self, wanted: Names) -> None:
        shapes, views, owners = zip(*(self._held.pop(name) for name in wanted), strict=True)
        done = self._send(Gradients(wanted, shapes, views, None), views[0])
        for owner in set(owners):
            done.add_done_callback(functools.partial(owner.got, wanted))

    # --- steps --------------------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        self._ended = False
        seconds, self._began = now() - self._began, now()
        if self.world == 1 or self.closed:
            return
        self._take_measures(seconds)
        if self._family is None and self._scout is not None and self.step >= _PATIENCE:
            self._set_family("adaptive")
        self._choose(self._schedule.at(self.step))
        setting = (self._base, tuple(self._widths.items()), self._family, self._onebit and self._onebit.frozen)
        if setting != self._setting:
            self._setting = setting
            self._buckets.clear()

    def _end_step(self) -> None:
        self._ended = True
        if self._held:
            left = sorted(self._held)
            self._held.clear()
            raise CollectiveError(
                f"the loaded state was saved for other parameters: {left[:3]} are in none of its buckets"
            )
        if self._seen:
            self._layout, self._seen = self._seen, []
        self._restored = None
        self.step += 1

    def _choose(self, choice: policies.Choice) -> None:
        """Settle what most parameters travel in at this step."""
        self._widths = self._widths if isinstance(choice, Budget) else {}
        if self._onebit is not None and not self._onebit.frozen:
            self._base = Identity()
        elif isinstance(choice, Trial):
            self._base = self._try_codecs()
        elif isinstance(choice, Budget):
            self._base = auto.start_width(choice.bits)
        else:
            self._base = choice

    def _try_codecs(self) -> Codec:
        if self._chosen is not None:
            return self._chosen
        if self._race is None:
            self._race = auto.Race(self._error_budget)
        if not self._race.over:
            return auto.CANDIDATES[self._race.turn]
        result = self._agree(self._race.result(), dist.ReduceOp.MAX)
        self._chosen, self._why = auto.decide(result, self._error_budget)
        self._race = None
        if self.rank == 0:
            print(f"thinwire: codec='auto' chose {self._why}", flush=True)
        return self._chosen

    @property
    def _measuring(self) -> bool:
        if self._race is not None:
            return self._race.measures_error
        if isinstance(self._schedule.at(self.step), Budget) and (
            not self._widths or self.step % self._replan_every == 0
        ):
            return True
        return self._measure_every > 0 and self.step % self._measure_every == 0

    def _take_measures(self, seconds: float) -> None:
        """What the last step showed; its collectives are done."""
        watches, self._watches = self._watches, []
        error = self._note_errors(watches) if watches else None
        if self._race is not None:
            self._race.ended(seconds, error)
        choice = self._schedule.at(self.step)
        if watches and isinstance(choice, Budget):
            self._deal_bits(watches, choice.bits)

    def _note_errors(self, watches: Sequence[ErrorWatch]) -> float:
        lost, sent = (sum(float(getattr(w, which).sum()) for w in watches) for which in ("lost_P", "sent_P"))
        error = (lost / sent) ** 0.5 if sent > 0 else 0.0
        codes = sum(watch.codes for watch in watches)
        clipped = sum(int(watch.outermost) for watch in watches) / codes if codes else None
        self._measured = {"error": error, "clipped": clipped}
        return error

    def _deal_bits(self, watches: Sequence[ErrorWatch], bits: float) -> None:
        """Give every layer its width anew, by the errors of all ranks."""
        errors: dict[str, float] = {}
        for watch in watches:
            for name, lost in zip(watch.names, watch.lost_P.tolist(), strict=True):
                if name is not None:
                    errors[name] = errors.get(name, 0.0) + lost
        names = sorted(errors)
        agreed = self._agree([errors[name] for name in names], dist.ReduceOp.SUM)
        if not all(value < float("inf") for value in agreed):
            return  # a step with NaN or Inf says nothing about errors
        layers, fixed_bytes, fixed_numel = [], 0, 0
        for name, lost in zip(names, agreed, strict=True):
            shape, numel, dtype = self._sizes[name]
            rule = self._rules.fixed(name, shape, dtype)
            if rule is not None:
                fixed_bytes += rule.pick(name, shape).wire_bytes(numel)
                fixed_numel += numel
            else:
                layers.append(auto.Layer(name, numel, self._codec_of(name), lost))
        self._widths = auto.deal_bits(layers, fixed_bytes, fixed_numel, bits)
        counts: dict[str, int] = {}
        for chosen in self._widths.values():
            counts[str(chosen)] = counts.get(str(chosen), 0) + 1
        self._why = ", ".join(f"{count} x {name}" for name, count in sorted(counts.items()))

    def _agree(self, values: Sequence[float], op: Any) -> list[float]:
        """The sum or maximum over ranks, the same everywhere."""
        tensor = torch.tensor(list(values), dtype=torch.float64, device=self._device)
        dist.all_reduce(tensor, op, group=self._group)
        found: list[float] = tensor.tolist()
        return found

    # --- what a parameter gets ----------------------------------------------------------------------------------------

    def _slot(self, name: str, shape: torch.Size, numel: int, dtype: torch.dtype) -> Slot:
        self._sizes[name] = shape, numel, dtype
        chosen = self._codec_of(name)
        feedback = self._feedback_of(chosen)
        if feedback is None:
            chosen, feedback = _MEANWHILE, ""
        return Slot(name, numel, chosen, policies.first_phase(chosen, feedback), feedback)

    def _codec_of(self, name: str) -> Codec:
        shape, _, dtype = self._sizes[name]
        return self._rules.codec_of(name, shape, dtype, self._widths.get(name, self._base))

    def _feedback_of(self, chosen: Codec) -> str | None:
        if self._feedback == "auto" and self._onebit is not None:
            return "classic" if policies.bits_of(chosen) < 4 else ""
        choice = self._schedule.at(self.step)
        if self._feedback == "auto" and isinstance(choice, Budget) and policies.bits_of(chosen) < 16:
            # Widths change under way, and what is remembered should not be left behind: one rule for all of them.
            return (
                policies.feedback_of("auto", auto.start_width(min(choice.bits, 2.2)), self._family)
                if choice.bits < 4
                else ""
            )
        return policies.feedback_of(self._feedback, chosen, self._family)

    def _carry(self, kind: str, pieces: Sequence[feedbacks.Piece], device: torch.device) -> Any:
        if not kind:
            return None
        residual, gaps = self._residuals.lane(pieces, device), feedbacks.Gaps(pieces)
        if kind == "classic":
            return feedbacks.Classic(residual, self.world, gaps)
        if self._residuals.dtype != torch.float32:
            raise CodecError(
                "this optimiser asks for feedback='ef21', which adds up what was sent, exactly: residual_dtype must be "
                f"float32, got {self._residuals.dtype}; or name another feedback"
            )
        return feedbacks.EF21(residual, self._means.lane(pieces, device), self.world, gaps)

    # --- names and optimiser ------------------------------------------------------------------------------------------

    def _learn_names(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self._names[parameter] = name
                numel = parameter.numel() * (2 if parameter.is_complex() else 1)
                dtype = parameter.dtype.to_real() if parameter.is_complex() else parameter.dtype
                self._sizes[name] = parameter.shape, numel, dtype

    def _name(self, parameter: Tensor) -> str:
        name: str | None = self._names.get(parameter)
        if name is None:
            name = self._names[parameter] = f"parameter {len(self._names)}"
        return name

    def _set_optimizer(self, optimizer: Optimizer | str | None) -> None:
        if isinstance(optimizer, str):
            if optimizer not in ("linear", "adaptive"):
                raise CodecError(f"optimizer must be an optimiser, 'linear' or 'adaptive', got {optimizer!r}")
            self._family = optimizer
        elif isinstance(optimizer, OneBitAdam):
            self._family, self._onebit = "linear", optimizer  # momentum travels, and is linear in the gradients
        elif optimizer is not None:
            self._family = policies.family(optimizer)
        elif self._feedback == "auto":
            self._scout = _Scout(self)

    def _set_family(self, family: str) -> None:
        self._family = family
        if self._scout is not None:
            self._scout.remove()
            self._scout = None

    # --- state --------------------------------------------------------------------------------------------------------

    @property
    def _group(self) -> dist.ProcessGroup:
        return primitives.resolve(self.process_group)

    @property
    def world(self) -> int:
        """Ranks of the group."""
        return self._group.size()

    @property
    def rank(self) -> int:
        """This one's place among them."""
        return self._group.rank()

    def stats(self) -> Stats:
        """What compression did so far on this rank."""
        tally, cpu = self._tally, all(device.type == "cpu" for _, _, device in self._buckets)
        messages = [(b.message, b.numel) for b in self._buckets.values() if b.message is not None]
        used = {kind.feedback for bucket in self._buckets.values() for kind in bucket.kinds if kind.feedback}
        numel = sum(count for _, count in messages)
        bits = 8 * sum(message.wire_bytes for message, _ in messages) / numel if numel else None
        scratch = {id(m.channel): m.channel.scratch.nbytes for m, _ in messages}
        return Stats(
            steps=self.step,
            codec=str(self._schedule),
            feedback="+".join(sorted(used)) or "none",
            chosen=self._why,
            bytes_sent=tally.bytes_sent,
            bytes_plain=tally.bytes_plain,
            bits_per_element=bits,
            relative_error=self._measured["error"],
            clipped=self._measured["clipped"],
            nonfinite=int(tally.nonfinite),
            encode_s=tally.encode_s if cpu else None,
            decode_s=tally.decode_s if cpu else None,
            reduce_s=tally.reduce_s if cpu else None,
            wire_s=tally.wire_s if cpu else None,
            residual_bytes=self._residuals.nbytes + self._means.nbytes,
            scratch_bytes=sum(scratch.values()),
        )

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to go on with the same bits. Every rank saves its own: they differ in `ranks`."""
        return self._export({self.rank: self._residuals.read()}, self._means.read(), self.world)

    def blank_state_dict(self, world: int | None = None) -> dict[str, Any]:
        """A state of zeros, for loaders that fill one in place: what this rank needs of what `world` ranks saved."""
        old = self.world if world is None else world
        return self._export({k: {} for k in range(self.rank, old, self.world)}, {}, old)

    def _export(
        self, ranks: Mapping[int, Mapping[str, Tensor]], means: Mapping[str, Tensor], world: int
    ) -> dict[str, Any]:
        remembered = self._remembered()
        dtype = torch.bfloat16 if self._residuals.dtype == torch.bfloat16 else torch.float32
        return {
            "version": _VERSION,
            "step": self.step,
            "world": world,
            "layout": [list(names) for names in self._layout],
            "optimizer": self._family or "",
            "chosen": {"codec": "" if self._chosen is None else str(self._chosen), "why": self._why},
            "widths": {name: str(chosen) for name, chosen in self._widths.items()},
            "ranks": {str(k): _complete(part, remembered, dtype) for k, part in ranks.items()},
            "mean": _complete(means, {n: size for n, size in remembered.items() if size[1] == "ef21"}, torch.float32),
        }

    def _remembered(self) -> dict[str, tuple[int, str]]:
        """Elements and feedback of every parameter that has one, now or in the end."""
        found = {}
        for name, (shape, numel, dtype) in self._sizes.items():
            choice = self._schedule.last
            base = auto.start_width(choice.bits) if isinstance(choice, Budget) else choice
            if isinstance(base, Trial):
                continue
            kind = self._feedback_of(self._rules.codec_of(name, shape, dtype, base))
            if kind:
                found[name] = numel, kind
        return found

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on from a saved state: this rank's own, or, if the world's size changed, the states of all ranks.

        Another world size: what rank k remembered goes to rank k % world, so that the sum over ranks is kept.
        """
        states = [state] if isinstance(state, Mapping) else list(state)
        head = _check_states(states)
        parts = {int(k): part for one in states for k, part in one["ranks"].items()}
        wanted = list(range(self.rank, head["world"], self.world))
        if any(k not in parts for k in wanted):
            raise CollectiveError(
                f"rank {self.rank} of {self.world} needs the states that ranks {wanted} of {head['world']} saved, got "
                f"{sorted(parts)}: load_state_dict([torch.load(f) for f in files]) with the files of all ranks"
            )
        self._check_sizes(parts[k] for k in wanted)
        tally = self._tally
        self._reset()
        self._tally = tally
        self.step = int(head["step"])
        self._residuals.load(feedbacks.deal(parts, head["world"], self.rank, self.world))
        self._means.load(head["mean"])
        if head["world"] == self.world and head["layout"]:
            self._restored = [tuple(names) for names in head["layout"]]
        if head["optimizer"]:
            self._set_family(head["optimizer"])
        if head["chosen"]["codec"]:
            self._chosen = registry.codec(head["chosen"]["codec"])
        self._why = head["chosen"]["why"]
        self._widths = {name: registry.codec(spec) for name, spec in head["widths"].items()}

    def _check_sizes(self, parts: Iterator[Mapping[str, Tensor]]) -> None:
        for part in parts:
            for name, values in part.items():
                if name in self._sizes and self._sizes[name][1] != values.numel():
                    raise CollectiveError(
                        f"the state was saved for another model: {name} has {self._sizes[name][1]} elements, "
                        f"the state {values.numel()}"
                    )

    def close(self) -> None:
        """Compress no more: gradients travel as without a hook, and nothing is remembered."""
        self.closed = True
        self._set_family(self._family or "adaptive")
        self._buckets.clear()
        self._residuals.load({})
        self._means.load({})

    def __getstate__(self) -> dict[str, Any]:
        return {
            "options": {**self._options, "optimizer": self._family},
            "state": self.state_dict(),
            "sizes": self._sizes,
        }

    def __setstate__(self, saved: dict[str, Any]) -> None:
        rules = saved["options"]
        self.__init__(None, **{**rules, "exempt": "none", "policy": None})  # type: ignore[misc]
        self._rules = policies.Rules(rules["exempt"], rules["policy"])
        self._options = {key: value for key, value in rules.items() if key != "optimizer"}
        self._sizes = saved["sizes"]
        self.load_state_dict(
            {**saved["state"], "ranks": {str(self.rank): next(iter(saved["state"]["ranks"].values()))}}
        )


def ddp_hook(state: DDPState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """A communication hook of DistributedDataParallel: the mean of the bucket over ranks, compressed as `state` says."""
    return state.reduce(bucket)


class _Switch:
    """What DDP holds: a hook cannot be taken out, but the state behind it can change."""

    def __init__(self, state: DDPState) -> None:
        self.state = state

    def reduce(self, bucket: "dist.GradBucket") -> "torch.futures.Future[Tensor]":  # type: ignore[name-defined]
        """As the present state does."""
        return self.state.reduce(bucket)


class DDPHandle:
    """Compression of one DDP model: its statistics, its checkpoint, its end."""

    def __init__(self, state: DDPState) -> None:
        self.state = state

    def stats(self) -> Stats:
        """What compression did so far on this rank."""
        return self.state.stats()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to go on with the same bits; every rank saves its own."""
        return self.state.state_dict()

    def blank_state_dict(self, world: int | None = None) -> dict[str, Any]:
        """A state of zeros, for loaders that fill one in place (torch.distributed.checkpoint)."""
        return self.state.blank_state_dict(world)

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on from a saved state; if the world's size changed, from the states of all ranks."""
        self.state.load_state_dict(state)

    def close(self) -> None:
        """Compress no more: gradients travel as without a hook. `compress_ddp` may be called again."""
        self.state.close()


_switches: "weakref.WeakKeyDictionary[DistributedDataParallel, _Switch]" = weakref.WeakKeyDictionary()


def compress_ddp(
    ddp_model: DistributedDataParallel,
    codec: CodecChoice = "lloyd4",
    *,
    feedback: str = "auto",
    exempt: Exempt = "auto",
    policy: Mapping[str, CodecLike] | None = None,
    warmup_steps: int = 0,
    optimizer: Optimizer | str | None = None,
    residual_dtype: torch.dtype = torch.float32,
    error_budget: float = 0.15,
    replan_every: int = 100,
    measure_every: int = 100,
    algorithm: str = "auto",
) -> DDPHandle:
    """Let the gradients of a DDP model travel compressed.

    codec: a codec ("int8", "lloyd4", ...); a schedule ({0: "none", 100: "int8", 500: "lloyd2"}); "auto", which times
        uncompressed, bf16, int8 and 4 bit on real steps and keeps the fastest inside `error_budget`; or "auto:2.5", which
        deals out 2.5 bits an element on average by measured error, anew every `replan_every` steps.
    feedback: "auto" (by codec and optimiser), "none", "classic" or "ef21". Kept as `residual_dtype` (float32, bfloat16,
        int8).
    exempt: what travels in 16 bits, in the same message: "auto" (parameters of one dimension or under 1024 elements),
        "none", name patterns, or a function of name and shape.
    policy: codecs by name pattern, {"*.embed*": "int8"}; the first that matches, before exemptions. A last "*" stands
        for `codec`.
    warmup_steps: so many steps travel uncompressed.
    optimizer: for feedback="auto" below 4 bits; without it the first optimiser that steps a parameter of the model
        decides, and int8 travels until then. A thinwire.optim.OneBitAdam sends its momentum.
    error_budget: the relative error of one rounding that codec="auto" may accept.
    measure_every: how often `stats()` measures errors; 0 is never.
    algorithm: "one_shot", "two_phase" or "auto": one_shot for two ranks.
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        raise CollectiveError(
            f"expected a torch.nn.parallel.DistributedDataParallel, got {type(ddp_model).__name__}: wrap the model first"
        )
    state = DDPState(
        ddp_model.process_group,
        codec,
        feedback=feedback,
        exempt=exempt,
        policy=policy,
        warmup_steps=warmup_steps,
        optimizer=optimizer,
        residual_dtype=residual_dtype,
        error_budget=error_budget,
        replan_every=replan_every,
        measure_every=measure_every,
        algorithm=algorithm,
        model=ddp_model.module,
    )
    switch = _switches.get(ddp_model)
    if switch is None:
        _switches[ddp_model] = switch = _Switch(state)
        ddp_model.register_comm_hook(switch, ddp_hook)
    elif not switch.state.closed:
        raise CollectiveError("this model is compressed already: close() the handle that compress_ddp gave first")
    switch.state = state
    return DDPHandle(state)


# --- small parts ------------------------------------------------------------------------------------------------------


class _Held:
    """A bucket of DDP's whose gradients travel in other buckets: its future is done when all of them are."""

    def __init__(self, buffer: Tensor, waits: set[Names]) -> None:
        devices: list[Any] = [buffer.device] if buffer.device.type == "cuda" else []
        self.future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        self._buffer, self._waits = buffer, waits

    def got(self, names: Names, done: "torch.futures.Future[Tensor]") -> None:
        """A message that held some of the gradients is done, or failed."""
        try:
            done.value()
        except Exception as error:
            with contextlib.suppress(RuntimeError):  # another message failed first
                self.future.set_exception(error)  # type: ignore[arg-type]
            return
        self._waits.discard(names)
        if not self._waits:
            self.future.set_result(self._buffer)


class _Scout:
    """Sees which optimiser steps the parameters of a state, then goes."""

    def __init__(self, state: DDPState) -> None:
        self._state = weakref.ref(state)
        self._handle = register_optimizer_step_pre_hook(self._saw)

    def _saw(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        state = self._state()
        if state is None:
            self.remove()
        elif any(p in state._names for group in optimizer.param_groups for p in group["params"]):
            state._set_family(policies.family(optimizer))

    def remove(self) -> None:
        """Look no more."""
        self._handle.remove()


def _done(buffer: Tensor) -> "torch.futures.Future[Tensor]":
    devices: list[Any] = [buffer.device] if buffer.device.type == "cuda" else []
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
    future.set_result(buffer)
    return future


def _first(done: "torch.futures.Future[list[Tensor]]", meter: BucketMeter | None) -> Tensor:
    if meter is not None:
        meter.close()
    return done.value()[0]


def _instead(future: "torch.futures.Future[Tensor]", output: Tensor) -> "torch.futures.Future[Tensor]":
    """The future of `output`, which shares its memory with what `future` holds."""
    if not output.is_complex():
        return future
    return future.then(lambda done: (done.value(), output)[1])


def _spread(views: Sequence[Tensor], whole: Tensor, output: Tensor) -> Tensor:
    torch._foreach_copy_(list(views), list(whole.split([view.numel() for view in views])))
    return output


def _complete(
    values: Mapping[str, Tensor], remembered: Mapping[str, tuple[int, str]], dtype: torch.dtype
) -> dict[str, Tensor]:
    """`values`, with zeros for what has nothing to remember yet: a checkpoint always has the same keys."""
    zeros = {name: torch.zeros(numel, dtype=dtype) for name, (numel, _) in remembered.items() if name not in values}
    return {**zeros, **{name: value.to(dtype) for name, value in values.items()}}


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if not isinstance(count, int) or count < (name == "replan_every"):
            raise CodecError(f"{name} must be a number of steps, got {count!r}")


def _check_states(states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    if not states:
        raise CollectiveError("load_state_dict: expected a state or a list of all ranks' states, got an empty list")
    for state in states:
        if not isinstance(state, Mapping) or state.get("version") != _VERSION:
            raise CollectiveError("load_state_dict: expected what state_dict() of this version of thinwire gave")
        if (state["step"], state["world"]) != (states[0]["step"], states[0]["world"]):
            raise CollectiveError(
                "load_state_dict: the states are of different steps or worlds: "
                f"{[(state['step'], state['world']) for state in states]}"
            )
    return states[0]
