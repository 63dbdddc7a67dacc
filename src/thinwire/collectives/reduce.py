"""Sums over ranks: all_reduce, all_reduce_coalesced, reduce_scatter_tensor."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.codecs import Codec, Identity
from thinwire.collectives import calls, chunks, cost, plain, primitives, reducers, schedule, steps
from thinwire.collectives.calls import Call, Plan, Reduction
from thinwire.collectives.chunks import Flat, Span
from thinwire.collectives.primitives import Group, Transport
from thinwire.collectives.reducers import Hierarchical, Lane, Reducer, Size
from thinwire.collectives.schedule import Channel, Work, settle
from thinwire.errors import CollectiveError

SUM: Any = dist.ReduceOp.SUM
_MANY = 1 << 20  # elements, by which codecs are compared: few ones are all headers
ALGORITHMS = ("auto", "two_phase", "one_shot", "hierarchical", "plain")
Codecs = str | Codec | tuple[str | Codec, str | Codec]


def all_reduce(
    tensor: Tensor,
    op: Any = SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    codec: Codecs = "int8",
    algorithm: str = "auto",
    step: int = 0,
) -> Work | None:
    """Sum (or average) `tensor` over the ranks of `group`, in place, its wire in `codec`. The same bits on every rank.

    Algorithms: "two_phase" (reduce-scatter and all-gather of wires), "one_shot" (all-gather of the wire), "plain"
    (torch's own, exact), "auto" (the one predicted fastest; see `explain`) and, on a 2-D DeviceMesh of nodes and the
    ranks inside them, "hierarchical", where codec may be a pair: inside a node, across nodes.
    `step` varies rotation and stochastic rounding; pass the iteration, the same on all ranks.
    """
    if op is SUM and not async_op and plain.quick("all_reduce", (tensor,), group, codec, algorithm):
        return None
    return _all_reduce("all_reduce", (tensor,), op, group, async_op, codec, algorithm, step)


def all_reduce_coalesced(
    tensors: Sequence[Tensor],
    op: Any = SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    codec: Codecs = "int8",
    algorithm: str = "auto",
    step: int = 0,
) -> Work | None:
    """all_reduce of several tensors of one dtype as one message."""
    return _all_reduce("all_reduce_coalesced", tensors, op, group, async_op, codec, algorithm, step)


class _Plan(NamedTuple):
    """What was decided for all_reduce calls of one kind; no reducer is torch's own all_reduce."""

    text: str
    reducer: Reducer | None = None
    sizes: Plan = Plan(None)
    across: tuple[Codec, Codec] | None = None  # of a hierarchy


def _all_reduce(
    verb: str,
    tensors: Sequence[Tensor],
    op: Any,
    group: Group,
    async_op: bool,
    codec: Codecs,
    algorithm: str,
    step: int,
) -> Work | None:
    mesh = primitives.is_mesh(group) and group.ndim == 2
    calls.check_codec(*codec) if isinstance(codec, tuple) else calls.check_codec(codec)
    parts = calls.check_tensors(tensors, verb)
    calls.check_outputs(parts, verb)
    channel = mesh_channel(group, parts[0].device) if mesh else calls.channel_of(group, parts[0].device)
    reduction, world = calls.reduction(op), calls.world_of(channel)
    if world == 1:
        return settle(_alone(parts, list(tensors), reduction), async_op)
    key = (verb, tuple(part.shape for part in parts), parts[0].dtype, reduction, codec, algorithm)
    plan: _Plan | None = channel.settled.get(key)
    text = plan.text if plan else _text(verb, parts, reduction, codec, algorithm)
    call = Call(channel, text, known=plan is not None)
    if plan is None:
        plan = channel.settled[key] = _plan(channel, text, parts, codec, algorithm, group if mesh else None)
    if plan.reducer is None:
        if verb == "all_reduce" and reduction.name == "sum":
            plain.remember(call, verb, tensors, codec, algorithm)
        return plain.all_reduce(call, parts, list(tensors), reduction, async_op)
    setting, scale = plan.sizes.setting(channel, step), reduction.scale(world)
    chosen, flat = setting.codec, Flat(parts)
    lane = Lane(flat, plan.sizes.cut, chosen, chosen, across=plan.across)
    operation = _operation(setting, [lane], plan.reducer, scale)
    operation.outputs = list(tensors)
    return settle(call.run(operation), async_op)


def _operation(
    setting: steps.Setting, lanes: Sequence[Lane], reducer: Reducer, scale: float, meter: steps.Meter | None = None
) -> steps.AllReduce:
    if isinstance(reducer, Hierarchical):
        return steps.AllReduceInStep(setting, lanes, reducer, scale, meter)
    return steps.AllReduce(setting, lanes, reducer, scale, meter)


def _alone(parts: Sequence[Tensor], outputs: list[Tensor], reduction: Reduction) -> Work:
    """The sum over one rank: nothing to do, but for a factor."""
    if reduction.name == "premul_sum":
        for part in parts:
            part.detach().mul_(reduction.factor)
    return Work(outputs).finished()


def _text(verb: str, parts: Sequence[Tensor], reduction: Reduction, codec: Codecs, algorithm: str) -> str:
    sizes = "+".join(str(part.numel()) for part in parts)
    named = "/".join(map(str, codec)) if isinstance(codec, tuple) else str(codec)
    return f"{verb}(numel={sizes}, op={_op(reduction)}, {calls.named(parts[0], named, algorithm)})"


def _op(reduction: Reduction) -> str:
    return f"premul_sum*{reduction.factor!r}" if reduction.name == "premul_sum" else reduction.name


def _plan(channel: Channel, text: str, parts: list[Tensor], codec: Codecs, algorithm: str, mesh_group: Any) -> _Plan:
    calls.check_algorithm(algorithm, ALGORITHMS)
    mesh = mesh_group is not None
    numel, dtype = sum(part.numel() for part in parts), parts[0].dtype
    if mesh != (algorithm == "hierarchical") and not (mesh and algorithm in ("auto", "plain")):
        raise CollectiveError(
            "algorithm='hierarchical' goes with a DeviceMesh of two dimensions, 'two_phase' and 'one_shot' with a group"
        )
    shape = parts[0].shape if len(parts) == 1 else (numel,)
    if mesh:
        pair = codec if isinstance(codec, tuple) else (codec, codec)
        inside, across = (calls.codec_for(spec, shape) for spec in pair)
        if algorithm != "plain":
            inside.wire_bytes(numel, dtype), across.wire_bytes(numel, dtype)  # say what is wrong with the dtype
        if algorithm == "plain" or (algorithm == "auto" and _is_plain(channel, mesh_group, numel, dtype, pair)):
            return _Plan(text)
        _check_order(mesh_group)
        reducer: Reducer = Hierarchical(*channel.transports)
        return _sized(text, inside, reducer, Flat(parts), channel.transports[1].world, calls.world_of(channel), across)
    if isinstance(codec, tuple):
        raise CollectiveError(f"a pair of codecs goes with algorithm='hierarchical', got {codec!r} for {algorithm!r}")
    chosen = calls.codec_for(codec, shape)
    if algorithm != "plain":
        chosen.wire_bytes(numel, dtype)  # says what is wrong with the dtype
    if algorithm == "auto":
        exact = isinstance(chosen, Identity) or numel == 0
        algorithm = "plain" if exact else _choose_in_group(channel, numel, dtype, chosen).algorithm
    if algorithm == "plain":
        return _Plan(text)
    world = channel.transport.world
    return _sized(text, chosen, reducers.reducer(channel.transport, algorithm), Flat(parts), world, world)


def _choose(
    channel: Channel, group: Group, numel: int, dtype: torch.dtype, codec: Codec, codecs: Codecs, *names: str
) -> cost.Choice:
    """The choice among the algorithms `names`, the calls on `group` in `codecs`, judged as `codec`."""

    def prepare(algorithm: str, size: int) -> Callable[[], object]:
        tensor = torch.linspace(-1, 1, size, device=channel.device).to(dtype)
        return lambda: all_reduce(tensor, group=group, codec=codecs, algorithm=algorithm)

    prepared = {name: functools.partial(prepare, name) for name in names}
    return cost.choose(channel, "all_reduce", numel, dtype, codec, prepared)


def _choose_in_group(channel: Channel, numel: int, dtype: torch.dtype, codec: Codec) -> cost.Choice:
    group = channel.transport.group
    return _choose(channel, group, numel, dtype, codec, codec, "plain", "one_shot", "two_phase")


def _is_plain(channel: Channel, mesh: Any, numel: int, dtype: torch.dtype, pair: tuple[Any, Any]) -> bool:
    """Whether sums inside nodes and then across them, by torch, are predicted faster than the hierarchy."""
    codec = calls.codec_for(pair[1], (numel,))
    return numel == 0 or _choose(channel, mesh, numel, dtype, codec, pair, "plain", "hierarchical").algorithm == "plain"


def _sized(
    text: str, codec: Codec, reducer: Reducer, flat: Flat, world: int, peers: int, across: Codec | None = None
) -> _Plan:
    cut = chunks.cut(flat.numel, codec.wire_bytes(flat.numel, flat.dtype), peers, world)
    pair = None if across is None else (across, across)
    return _Plan(text, reducer, _sizes([Lane(flat, cut, codec, codec, across=pair)], reducer), pair)


def _sizes(lanes: Sequence[Lane], reducer: Reducer) -> Plan:
    """The scratch that a message of these lanes takes."""
    firsts = [min(lane.cut.chunk, lane.cut.numel) for lane in lanes]
    parts = [
        Size(lane.codec, numel, lane.dtype, lane.across and lane.across[0])
        for lane, numel in zip(lanes, firsts, strict=True)
    ]
    rooms = sum(lane.room_bytes(numel) for lane, numel in zip(lanes, firsts, strict=True))
    chunk_bytes = reducer.scratch_bytes(parts) + rooms
    wire = sum(lane.codec.wire_bytes(lane.cut.numel, lane.dtype) for lane in lanes)
    chunk_wire = sum(part.codec.wire_bytes(part.numel, part.dtype) for part in parts)
    most = max(lane.cut.num_chunks for lane in lanes)
    limit = chunks.scratch_limit(wire, chunk_wire, chunk_bytes, most)
    return Plan(lanes[0].codec, lanes[0].cut, chunk_bytes, limit)


class LaneKind(NamedTuple):
    """What is the same of a lane at every step."""

    numel: int
    codec: Codec
    first: Codec  # of the first of two phases: the same wire format, perhaps another choice of scales
    feedback: str = ""


class LaneLoad(NamedTuple):
    """What a lane brings to one step."""

    tensors: Sequence[Tensor]
    carry: reducers.Carry | None = None
    watch: reducers.Watch | None = None
    checked: Callable[[reducers.Fine], None] | None = None  # is told of every chunk whether all of it was finite


class Nodes(NamedTuple):
    """Ranks in nodes, for sums inside each node and then across them."""

    mesh: Any  # a DeviceMesh of nodes and the ranks inside them
    inside: Codec  # inside a node, where a lane's own has not more bits


class Message:
    """Lanes that are averaged over ranks again and again, all in one message: decided once, run at every step.

    Algorithm "auto" is "one_shot" for two ranks and "two_phase" for more, whatever the link: the numbers that come out
    depend on it, and a run must be repeatable. With `nodes` it is "hierarchical": a lane's codec travels across them.
    """

    def __init__(
        self,
        kinds: Sequence[LaneKind],
        like: Tensor,
        *,
        group: Group = None,
        algorithm: str = "auto",
        nodes: Nodes | None = None,
    ) -> None:
        if algorithm not in MESSAGE_ALGORITHMS:
            raise CollectiveError(f"algorithm must be one of {', '.join(MESSAGE_ALGORITHMS)}, got {algorithm!r}")
        self._kinds, self._dtype, self._nodes = tuple(kinds), like.dtype, nodes
        self._reducer: Reducer
        if nodes is None:
            self.channel = calls.channel_of(group, like.device)
            world = self.channel.transport.world
            self.algorithm = reducers.fewest_roundings(world) if algorithm == "auto" else algorithm
            self._reducer = reducers.reducer(self.channel.transport, self.algorithm)
        else:
            _check_order(nodes.mesh)
            self.channel, self.algorithm = mesh_channel(nodes.mesh, like.device), "hierarchical"
            self._reducer = Hierarchical(*self.channel.transports)
        self._world, self._shards = calls.world_of(self.channel), self.channel.transports[-1].world
        self._codecs = [self._first_codec(kind) for kind in kinds]
        self._cuts = [self._cut(kind, codec) for kind, codec in zip(kinds, self._codecs, strict=True)]
        self._sizes: dict[tuple[bool, ...], Plan] = {}  # by which lanes are scattered
        named = "; ".join(f"{kind.numel} {kind.codec} {kind.feedback}".strip() for kind in kinds)
        where = "" if nodes is None else f" in {nodes.inside}"
        self._text = f"gradients({named}; {str(like.dtype).removeprefix('torch.')}, algorithm={self.algorithm}{where})"

    def _first_codec(self, kind: LaneKind) -> Codec:
        """What a lane is encoded in first: its own codec, or inside a node, where bits are cheaper, one of no fewer."""
        if self._nodes is None:
            return kind.codec
        assert not kind.feedback  # a hierarchy has none
        inside = calls.codec_for(self._nodes.inside, (kind.numel,))
        return max(inside, kind.codec, key=lambda codec: codec.wire_bytes(_MANY, torch.float32))

    def _cut(self, kind: LaneKind, codec: Codec) -> chunks.Cut:
        wire = codec.wire_bytes(kind.numel, self._encoded(kind, codec))
        return chunks.cut(kind.numel, wire, self._world, self._shards)

    def run(
        self,
        loads: Sequence[LaneLoad],
        outputs: Sequence[Tensor],
        *,
        step: int,
        copies: Sequence[tuple[Tensor, Tensor]] = (),
        meter: steps.Meter | None = None,
    ) -> Work:
        """Average the lanes over the ranks, in place; then tensor = numbers for the (tensor, numbers) of `copies`."""
        lanes = [
            self._lane(kind, codec, cut, load)
            for kind, codec, cut, load in zip(self._kinds, self._codecs, self._cuts, loads, strict=True)
        ]
        call = Call(self.channel, self._text, known=bool(self._sizes))
        scattered = tuple(lane.flat.scattered for lane in lanes)
        if scattered not in self._sizes:
            self._sizes[scattered] = _sizes(lanes, self._reducer)
        setting = self._sizes[scattered].setting(self.channel, step)
        operation = _operation(setting, lanes, self._reducer, 1.0 / self._world, meter)
        operation.copies_back(outputs, copies)
        return call.run(operation)

    def _lane(self, kind: LaneKind, codec: Codec, cut: chunks.Cut, load: LaneLoad) -> Lane:
        flat = Flat(load.tensors)
        if self._nodes is not None:
            return Lane(flat, cut, codec, codec, *load[1:], across=(kind.codec, kind.first))
        return Lane(flat, cut, codec, kind.first, *load[1:], exact_own=not isinstance(codec, Identity))

    @functools.cached_property
    def sent_bytes(self) -> int:
        """Bytes of wires that this rank hands to the transport at one step."""
        lanes = zip(self._kinds, self._codecs, self._cuts, strict=True)
        return sum(self._sent(*lane[:2], lane[2].span(i).numel) for lane in lanes for i in range(lane[2].num_chunks))

    def _sent(self, kind: LaneKind, codec: Codec, numel: int) -> int:
        """Of one chunk of a lane."""
        *across, link = self.channel.transports
        first, dtype = "one_shot" if self.algorithm == "one_shot" else "two_phase", self._encoded(kind, codec)
        sent = _sent(link, first, codec, numel, dtype)
        for outer in across:
            own, rounding = chunks.shards(Span(0, numel), link.world)[link.rank], reducers.fewest_roundings(outer.world)
            sent += _sent(outer, rounding, kind.codec, own.numel, reducers.total_dtype(kind.codec, dtype))
        return sent

    @functools.cached_property
    def wire_bytes(self) -> int:
        """Bytes of the wires of all lanes, uncut; of several nodes those that cross between them."""
        alone = self.channel.transports[0].world == 1
        codecs = self._codecs if alone else [kind.codec for kind in self._kinds]
        pairs = zip(self._kinds, codecs, strict=True)
        return sum(codec.wire_bytes(kind.numel, self._encoded(kind, codec)) for kind, codec in pairs)

    def _encoded(self, kind: LaneKind, codec: Codec) -> torch.dtype:
        """The dtype that a lane's numbers have when they are encoded."""
        return reducers.encoded_dtype(codec, self._dtype, fed_back=bool(kind.feedback))


def _sent(link: Transport, algorithm: str, codec: Codec, numel: int, dtype: torch.dtype) -> int:
    """Bytes that this rank sends for a sum of `numel` numbers."""
    if algorithm == "one_shot":
        return (link.world - 1) * chunks.wires_bytes(codec, [Span(0, numel)], dtype)
    sizes = [chunks.wires_bytes(codec, [shard], dtype) for shard in chunks.shards(Span(0, numel), link.world)]
    return sum(sizes) - sizes[link.rank] + (link.world - 1) * sizes[link.rank]


MESSAGE_ALGORITHMS = ("auto", "one_shot", "two_phase")


def _check_order(mesh: Any) -> None:
    """A group numbers its ranks by size: those that a rank meets across nodes must have its own number in theirs."""
    order = mesh.mesh.argsort(1)
    if not bool((order == order[0]).all()):
        raise CollectiveError(
            f"every row of the mesh, a node, must list its ranks in the same order, got {mesh.mesh.tolist()}: "
            "sort each row"
        )


def mesh_channel(mesh: Any, device: torch.device) -> Channel:
    """The channel of a 2-D mesh: nodes along dimension 0, the ranks of a node along dimension 1."""
    return schedule.channel(mesh.get_group(0), device, inside=mesh.get_group(1))


def reduce_scatter_tensor(
    output: Tensor,
    input: Tensor,
    op: Any = SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    codec: str | Codec = "int8",
    algorithm: str = "auto",
    step: int = 0,
) -> Work | None:
    """output = this rank's part of the sum of `input` over ranks: one message in `codec`, one rounding.

    `input` holds world times as many elements as `output`. Algorithms: "compressed", "plain" (exact), "auto".
    """
    if op is SUM and not async_op and plain.quick("reduce_scatter", (output, input), group, codec, algorithm):
        return None
    target, source = calls.check_tensors((output, input), "reduce_scatter_tensor")
    calls.check_outputs((target,), "reduce_scatter_tensor")
    channel, reduction = calls.channel_of(group, target.device), calls.reduction(op)
    world = channel.transport.world
    if source.numel() != world * target.numel():
        raise CollectiveError(
            f"reduce_scatter_tensor: input must have {world} times the elements of output, "
            f"got {source.numel()} and {target.numel()}"
        )
    if world == 1:
        target.detach().copy_(source.detach().reshape(target.shape))
        return settle(_alone((target,), [output], reduction), async_op)
    text = (
        f"reduce_scatter_tensor(numel={source.numel()}, op={_op(reduction)}, {calls.named(source, codec, algorithm)})"
    )
    trial = functools.partial(_trial, channel, source.dtype)
    call, plan = calls.agree(channel, "reduce_scatter", text, source, target.numel(), codec, algorithm, trial)
    if plan.codec is None:
        if reduction.name == "sum":
            plain.remember(call, "reduce_scatter", (output, input), codec, algorithm)
        return plain.reduce_scatter(call, target, source, [output], reduction, async_op)
    flats = Flat([target]), Flat([source])
    operation = steps.ReduceScatter(plan.setting(channel, step), *flats, plan.cut, reduction.scale(world))
    operation.outputs = [output]
    return settle(call.run(operation), async_op)


reduce_scatter_single = reduce_scatter_tensor


def _trial(channel: Channel, dtype: torch.dtype, codec: Codec, algorithm: str, numel: int) -> Callable[[], object]:
    link = channel.transport
    part = -(-numel // link.world)
    output, input = (torch.linspace(-1, 1, size, device=channel.device).to(dtype) for size in (part, part * link.world))
    return lambda: reduce_scatter_tensor(output, input, group=link.group, codec=codec, algorithm=algorithm)


def explain(tensor: Tensor, group: Group = None, *, codec: str | Codec = "int8") -> cost.Choice:
    """What all_reduce(tensor, group=group, codec=codec) does, and why; all ranks of the group must call it.

    `print(thinwire.explain(tensor))` shows the measured link and every algorithm's predicted time and bytes.
    """
    part = calls.check_tensors((tensor,), "explain")[0]
    channel = calls.channel_of(group, part.device)
    chosen = calls.codec_for(codec, part.shape)
    return _choose_in_group(channel, part.numel(), part.dtype, chosen)
