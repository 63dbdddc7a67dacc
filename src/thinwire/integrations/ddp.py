"""DistributedDataParallel: gradients that travel compressed.

handle = thinwire.compress_ddp(ddp_model, "lloyd4")             # one line; the rest of the script stays
ddp_model.register_comm_hook(thinwire.DDPState(None, "int8"), thinwire.ddp_hook)   # the same by hand
"""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from thinwire import feedback as feedbacks
from thinwire.codecs import Cast, registry
from thinwire.collectives import checks, torch_verbs, transport
from thinwire.collectives.message import ALGORITHMS, Nodes
from thinwire.errors import CodecError, CollectiveError
from thinwire.integrations import policy as policies
from thinwire.integrations.decisions import CodecChoice, Decisions, Optimizers, Size
from thinwire.integrations.engine import Engine, Future, Names, new_future
from thinwire.integrations.policy import CodecLike, Exempt
from thinwire.integrations.stats import Stats, now

_VERSION = 1


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
        optimizer: Optimizers = None,
        residual_dtype: torch.dtype = torch.float32,
        error_budget: float = 0.15,
        replan_every: int = 100,
        measure_every: int = 100,
        algorithm: str = "auto",
        mesh: Any = None,
        inside: CodecLike = "bf16",
        model: nn.Module | None = None,
    ) -> None:
        self.process_group = process_group
        self._options: dict[str, Any] = {
            "codec": codec, "feedback": feedback, "exempt": exempt, "policy": policy, "warmup_steps": warmup_steps,
            "residual_dtype": residual_dtype, "error_budget": error_budget, "replan_every": replan_every,
            "measure_every": measure_every, "algorithm": algorithm,
        }  # fmt: skip
        nodes = _nodes(mesh, inside, algorithm, feedback)
        self._decisions = Decisions(
            codec,
            feedback="none" if nodes is not None else feedback,
            exempt=exempt,
            policy_rules=policy,
            warmup_steps=warmup_steps,
            residual_dtype=residual_dtype,
            error_budget=error_budget,
            replan_every=replan_every,
            measure_every=measure_every,
        )
        if algorithm not in ALGORITHMS:
            raise CollectiveError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
        self._engine = Engine(self._decisions, residual_dtype, algorithm, nodes)
        self._names: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._named = False  # by a model
        self._order: list[str] = []  # in which DDP brought them first
        self._awaited: list[str] = []  # the order of a pickled state
        self._known: dict[tuple[int, ...], tuple[weakref.ref[Tensor], Names, list[torch.Size]]] = {}
        if model is not None:
            self.name_parameters(model)
        elif self._decisions.rules.by_name:
            raise CodecError("rules by name need names: pass model=, or use thinwire.compress_ddp(ddp_model, ...)")
        self._decisions.set_optimizer(optimizer, self._names.get)
        if nodes is not None and self._decisions.onebit is not None:
            raise CollectiveError(
                "OneBitAdam needs error feedback, which sums on a mesh do not have: leave the mesh out"
            )
        self.step = 0
        self.closed = False
        self._ended = True  # whether the next bucket is the first of a step
        self._began = 0.0

    # --- the hook -----------------------------------------------------------------------------------------------------

    def reduce(self, bucket: "dist.GradBucket") -> "Future[Tensor]":  # type: ignore[name-defined]
        """Start to average a bucket; the future holds its buffer."""
        if isinstance(bucket, tuple):
            raise CollectiveError(
                "DDP's compiled path (optimize_ddp='python_reducer') hands over gradients one by one, without buckets: "
                "use the hooks of thinwire.hooks there, or another optimize_ddp mode"
            )
        buffer = bucket.buffer()
        checks.check_gradient(buffer)
        group = transport.resolve(self.process_group)
        if self._ended:
            self._begin_step(group, buffer.device)
        try:
            return self._average(bucket, buffer, group)
        finally:
            if bucket.is_last():
                self._end_step()

    def _average(self, bucket: Any, buffer: Tensor, group: dist.ProcessGroup) -> "Future[Tensor]":
        if group.size() == 1 or not buffer.numel():
            future = new_future(buffer.device)
            future.set_result(buffer)
            return future
        if self.closed:
            return torch_verbs.average(buffer, group)
        parameters, onebit = bucket.parameters(), self._decisions.onebit
        if onebit is not None and onebit.frozen:
            onebit.put_momentum(parameters, _gradients(parameters, buffer))
        names, shapes = self._names_of(parameters)
        return self._engine.average(names, shapes, buffer, self.step)

    def _begin_step(self, group: dist.ProcessGroup, device: torch.device) -> None:
        if self._engine.nodes is not None and group is not self._engine.group:
            _check_ranks(self._engine.nodes.mesh, group)
        self._ended = False
        if self._decisions.racing and device.type == "cuda":
            torch.cuda.synchronize(device)  # the host is ahead of the steps that are timed
        seconds, self._began = now() - self._began, now()
        if group.size() == 1 or self.closed:
            return
        news = self._engine.begin_step(group, self.step, seconds, device)
        if news and group.rank() == 0:
            print(f"thinwire: {news}", flush=True)

    def _end_step(self) -> None:
        self._ended = True
        self.step += 1
        self._engine.end_step()

    # --- names --------------------------------------------------------------------------------------------------------

    def name_parameters(self, model: nn.Module) -> None:
        """Call parameters as `model` does, in rules and checkpoints. A state that was unpickled may need it again."""
        self._named = True
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self._names[parameter] = name
                real = (2, parameter.dtype.to_real()) if parameter.is_complex() else (1, parameter.dtype)
                self._decisions.sizes[name] = Size(parameter.shape, real[0] * parameter.numel(), real[1])

    def _names_of(self, parameters: Sequence[Tensor]) -> tuple[Names, list[torch.Size]]:
        """Looked up once a bucket: DDP brings the same ones at every step."""
        key = tuple(map(id, parameters))
        found = self._known.get(key)
        if found is None or found[0]() is not parameters[0]:
            names = tuple(self._name(parameter) for parameter in parameters)
            found = self._known[key] = weakref.ref(parameters[0]), names, [p.shape for p in parameters]
        return found[1:]

    def _name(self, parameter: Tensor) -> str:
        name: str | None = self._names.get(parameter)
        if name is None:
            name = self._names[parameter] = self._next_name(parameter)
        if name not in self._order:
            self._order.append(name)
        return name

    def _next_name(self, parameter: Tensor) -> str:
        """DDP brings the same parameters in the same order at the first step of every run."""
        index = len(self._names)
        if self._decisions.rules.by_name and not self._awaited:
            raise CollectiveError("this state has rules by name, and no names: call state.name_parameters(model)")
        if not self._awaited:
            return f"parameter {index}"
        name = self._awaited[index] if index < len(self._awaited) else ""
        if not name or self._decisions.sizes[name].shape != parameter.shape:
            raise CollectiveError(
                f"this state was pickled for other parameters: {name or 'none'} comes next, got one of shape "
                f"{tuple(parameter.shape)}: name them with state.name_parameters(model)"
            )
        return name

    # --- state --------------------------------------------------------------------------------------------------------

    @property
    def world(self) -> int:
        """Ranks of the group."""
        return transport.resolve(self.process_group).size()

    @property
    def rank(self) -> int:
        """This one's place among them."""
        return transport.resolve(self.process_group).rank()

    def stats(self) -> Stats:
        """What compression did so far on this rank."""
        engine, tally = self._engine, self._engine.tally
        timed = all(device.type == "cpu" for _, _, device, _ in list(engine.buckets))
        return Stats(
            steps=self.step,
            codec=str(self._decisions.schedule),
            feedback=engine.feedback,
            chosen=self._decisions.why,
            bytes_sent=tally.bytes_sent,
            bytes_plain=tally.bytes_plain,
            bits_per_element=engine.bits_per_element,
            relative_error=engine.error,
            clipped=engine.clipped,
            nonfinite=int(tally.nonfinite),
            encode_s=tally.encode_s if timed else None,
            decode_s=tally.decode_s if timed else None,
            reduce_s=tally.reduce_s if timed else None,
            wire_s=tally.wire_s if timed else None,
            residual_bytes=engine.residuals.nbytes + engine.means.nbytes,
            scratch_bytes=engine.scratch_bytes,
        )

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to go on with the same bits. Every rank saves its own: they differ in `ranks`."""
        return self._export({self.rank: self._engine.residuals.read()}, self._engine.means.read(), self.world)

    def blank_state_dict(self, world: int | None = None) -> dict[str, Any]:
        """A state of zeros, for loaders that fill one in place: what this rank needs of what `world` ranks saved."""
        if self._decisions.needs_family:
            raise CollectiveError(
                "which feedback there is to load depends on the optimiser, and none was seen yet: "
                "pass optimizer= to compress_ddp, or name the feedback"
            )
        old = self.world if world is None else world
        return self._export({k: {} for k in range(self.rank, old, self.world)}, {}, old)

    def _export(
        self, ranks: Mapping[int, Mapping[str, Tensor]], means: Mapping[str, Tensor], world: int
    ) -> dict[str, Any]:
        remembered, errors = self._decisions.remembered(), self._engine.errors()
        meant = {name: size for name, size in remembered.items() if size[1] == "ef21"}
        dtype = torch.bfloat16 if self._options["residual_dtype"] == torch.bfloat16 else torch.float32
        return {
            "version": _VERSION,
            "step": self.step,
            "world": world,
            "layout": [list(names) for names in self._engine.last_layout],
            "feedback": [[name, kind] for name, kind in self._engine.kinds.items()],
            "decisions": self._decisions.state_dict(),
            "errors": {str(k): sorted(errors.items()) for k in ranks},
            "ranks": {str(k): _complete(part, remembered, dtype) for k, part in ranks.items()},
            "mean": _complete(means, meant, torch.float32),
        }

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
        self._ended, self.step = True, int(head["step"])
        residuals = feedbacks.deal(parts, head["world"], self.rank, self.world)
        resized = head["world"] != self.world
        errors = {} if resized else {k: v for one in states for k, v in one["errors"].items()}[str(self.rank)]
        means = head["mean"]
        if self._engine.nodes is not None:  # nobody would use them
            residuals, means = {}, {}
        self._engine.forget(residuals, means, dict(head["feedback"]), dict(errors))
        if head["layout"] and not resized:
            self._engine.restored = [tuple(names) for names in head["layout"]]
        self._decisions.load_state_dict(head["decisions"], self.step)

    def _check_sizes(self, parts: Iterable[Mapping[str, Tensor]]) -> None:
        sizes = self._decisions.sizes
        for name, values in (item for part in parts for item in part.items()):
            if self._named and name not in sizes:
                raise CollectiveError(f"the state is of another model: it has {name}, which this one has not")
            if name in sizes and sizes[name].numel != values.numel():
                raise CollectiveError(
                    f"the state is of another model: {name} has {sizes[name].numel} elements, there {values.numel()}"
                )

    def close(self) -> None:
        """Compress no more: gradients travel as without a hook, and nothing is remembered."""
        self.closed = True
        self._decisions.end_scout()
        self._engine.forget({}, {})

    def __getstate__(self) -> dict[str, Any]:
        if self._engine.nodes is not None:
            raise CollectiveError("a DDPState with a mesh does not pickle: save state_dict(), and make it anew")
        options = {**self._options, "optimizer": self._decisions.family}
        return {
            "options": options,
            "state": self.state_dict(),
            "sizes": self._decisions.sizes,
            "order": self._order or self._awaited,
        }

    def __setstate__(self, saved: dict[str, Any]) -> None:
        options, state = dict(saved["options"]), saved["state"]
        rules = policies.Rules(options.pop("exempt"), options.pop("policy"))  # its names come with the sizes
        self.__init__(None, **options)  # type: ignore[misc]
        self._options = {**options, "exempt": saved["options"]["exempt"], "policy": saved["options"]["policy"]}
        self._options.pop("optimizer")
        self._decisions.rules, self._decisions.sizes = rules, dict(saved["sizes"])
        self._awaited = saved["order"]
        (own,) = state["ranks"].values()
        (errors,) = state["errors"].values()
        rank = str(self.rank)
        self.load_state_dict({**state, "world": self.world, "ranks": {rank: own}, "errors": {rank: errors}})


def ddp_hook(state: DDPState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """A communication hook of DDP: the mean of the bucket over ranks, compressed as `state` says."""
    if not isinstance(state, DDPState | _Switch):
        raise CollectiveError(
            f"ddp_hook needs a thinwire.DDPState as its state, got {type(state).__name__}: "
            "register_comm_hook(thinwire.DDPState(process_group, 'lloyd4'), thinwire.ddp_hook)"
        )
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
    optimizer: Optimizers = None,
    residual_dtype: torch.dtype = torch.float32,
    error_budget: float = 0.15,
    replan_every: int = 100,
    measure_every: int = 100,
    algorithm: str = "auto",
    mesh: Any = None,
    inside: CodecLike = "bf16",
) -> DDPHandle:
    """Let the gradients of a DDP model travel compressed.

    codec: a codec ("int8", "lloyd4", ...); a schedule ({0: "none", 100: "int8", 500: "lloyd2"}); "auto", which times
        uncompressed, bf16, int8 and 4 bit on real steps and keeps the fastest inside `error_budget`; or "auto:2.5",
        which deals out 2.5 bits an element on average by measured error, anew every `replan_every` steps.
    feedback: "auto" (by codec and optimiser), "none", "classic" or "ef21". Kept as `residual_dtype` (float32, bfloat16,
        int8).
    exempt: what travels in 16 bits, in the same message: "auto" (parameters of one dimension or under 1024 elements),
        "none", name patterns, or a function of name and shape.
    policy: codecs by name pattern, {"*.embed*": "int8"}; the first that matches, before exemptions. A last "*" stands
        for `codec`.
    warmup_steps: so many steps travel uncompressed.
    optimizer: one or several, for feedback="auto" below 4 bits; without it those that step the model's parameters
        decide, and int8 travels until they were seen. A thinwire.optim.OneBitAdam sends its momentum.
    error_budget: the relative error of one rounding that codec="auto" may accept.
    measure_every: how often `stats()` measures errors; 0 is never.
    algorithm: "one_shot", "two_phase" or "auto": one_shot for two ranks.
    mesh: a DeviceMesh of nodes and the ranks inside them, init_device_mesh("cuda", (nodes, gpus)). Gradients are then
        summed inside every node first, and `codec` is what travels across nodes, 1/gpus of the bytes a rank. There is
        no feedback: feedback="auto" is "none".
    inside: what travels inside a node; a parameter that has more bits across keeps them.
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        raise CollectiveError(
            f"expected a torch.nn.parallel.DistributedDataParallel, got {type(ddp_model).__name__}: wrap the model"
        )
    if ddp_model.mixed_precision is not None:
        raise CollectiveError(
            "DDP(mixed_precision=...) has a communication hook of its own: use torch.autocast or bfloat16 parameters"
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
        mesh=mesh,
        inside=inside,
        model=ddp_model.module,
    )
    switch = _switches.get(ddp_model)
    if switch is None:
        switch = _Switch(state)
        ddp_model.register_comm_hook(switch, ddp_hook)
        _switches[ddp_model] = switch
    elif not switch.state.closed:
        raise CollectiveError("this model is compressed already: close() the handle that compress_ddp gave first")
    switch.state = state
    return DDPHandle(state)


# --- small parts ------------------------------------------------------------------------------------------------------


def _nodes(mesh: Any, inside: CodecLike, algorithm: str, feedback: str) -> Nodes | None:
    """What was asked for, or an error that says why it cannot be."""
    chosen = registry.codec(inside)
    if mesh is None:
        if chosen != Cast("bf16"):
            raise CollectiveError(
                f"inside={str(chosen)!r} goes with a mesh of nodes and the ranks inside them: pass mesh="
            )
        return None
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 2:
        what = f"a mesh of {mesh.ndim}" if isinstance(mesh, DeviceMesh) else type(mesh).__name__
        raise CollectiveError(f"mesh must be a DeviceMesh of two dimensions, nodes and the ranks inside, got {what}")
    if algorithm != "auto":
        raise CollectiveError(f"with a mesh the algorithm is 'hierarchical': leave out algorithm={algorithm!r}")
    if feedback not in ("auto", "none"):
        raise CollectiveError(
            f"sums inside nodes and then across have no error feedback: leave out feedback={feedback!r}, or the mesh"
        )
    return Nodes(mesh, chosen)


def _check_ranks(mesh: Any, group: dist.ProcessGroup) -> None:
    ranks, own = sorted(mesh.mesh.flatten().tolist()), sorted(dist.get_process_group_ranks(group))
    if ranks != own:
        raise CollectiveError(f"the mesh must hold the ranks of DDP's group, {own}, got one of {ranks}")


def _gradients(parameters: Sequence[Tensor], buffer: Tensor) -> list[Tensor]:
    """The bucket's parts as DDP lays them out: in the order of memory of dense parameters, which may be permuted."""
    found = []
    for parameter, row in zip(parameters, buffer.split([p.numel() for p in parameters]), strict=True):
        dense = torch.empty_like(parameter, device="meta").stride() == parameter.stride()
        found.append(row.as_strided(parameter.shape, parameter.stride()) if dense else row.view(parameter.shape))
    return found


def _complete(
    values: Mapping[str, Tensor], remembered: Mapping[str, tuple[int, str]], dtype: torch.dtype
) -> dict[str, Tensor]:
    """`values`, with zeros for what has nothing to remember yet: a checkpoint always has the same keys."""
    zeros = {name: torch.zeros(numel, dtype=dtype) for name, (numel, _) in remembered.items() if name not in values}
    return {**zeros, **{name: value.to("cpu", dtype) for name, value in values.items()}}


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
