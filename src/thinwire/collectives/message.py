"""Lanes that are averaged over ranks again and again, all in one message: decided once, run at every step."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from thinwire.codecs import Codec, Identity
from thinwire.collectives import chunks, operations
from thinwire.collectives.call import Call
from thinwire.collectives.channel import channel_of
from thinwire.collectives.checks import check_recodes, codec_for
from thinwire.collectives.hierarchical import Hierarchical, Reducer, check_order, fewest_roundings, flat_reducer
from thinwire.collectives.lane import Carry, Fine, Lane, LaneSpec, Watch, encoded_dtype
from thinwire.collectives.plan import CallPlan, lanes_scratch, sum_cut, sum_program
from thinwire.collectives.programs import StreamLane, Sum
from thinwire.collectives.transport import Group
from thinwire.collectives.work import Work

ALGORITHMS = ("auto", "one_shot", "two_phase")
_MANY = 1 << 20  # elements, by which codecs are compared: few ones are all headers


class Nodes(NamedTuple):
    """Ranks in nodes, for sums inside each node and then across them."""

    mesh: DeviceMesh  # of nodes and the ranks inside them
    inside: Codec  # inside a node, where a lane's own has not more bits


class Message:
    """Lanes that travel together, in codecs that do not change.

    Algorithm "auto" is "one_shot" for two ranks and "two_phase" for more, whatever the link: the numbers that come out
    depend on it, and a run must be repeatable. Where a lane's sums are not encoded again it is "one_shot". With `nodes`
    it is "hierarchical": a lane's codec travels across them.
    """

    def __init__(
        self,
        specs: Sequence[LaneSpec],
        like: Tensor,
        *,
        group: Group = None,
        algorithm: str = "auto",
        nodes: Nodes | None = None,
    ) -> None:
        self.specs = tuple(specs)
        self.dtype = like.dtype
        self._reducer: Reducer
        self.channel = channel_of(group if nodes is None else nodes.mesh, like.device)
        codecs = [spec.codec for spec in self.specs]
        if nodes is not None or algorithm == "two_phase":
            check_recodes(codecs, "a sum in two phases or by nodes")
        if nodes is None:
            usual = fewest_roundings(self.channel.world) if all(codec.recodes for codec in codecs) else "one_shot"
            self.algorithm = usual if algorithm == "auto" else algorithm
            self._reducer = flat_reducer(self.channel.transport, self.algorithm)
        else:
            check_order(nodes.mesh)
            self.algorithm = "hierarchical"
            self._reducer = Hierarchical(*self.channel.transports)
        self._lanes = [self._described(spec, nodes) for spec in self.specs]
        links = self.channel.transports
        self._cuts = [
            sum_cut(lane.codec, lane.numel, self._encoded(lane), links, self.algorithm) for lane in self._lanes
        ]
        self._plans: dict[tuple[bool, ...], CallPlan] = {}  # by which lanes are scattered
        named = "; ".join(f"{spec.numel} {spec.codec} {spec.feedback}".strip() for spec in self.specs)
        where = "" if nodes is None else f" in {nodes.inside}"
        self.text = f"gradients({named}; {str(like.dtype).removeprefix('torch.')}, algorithm={self.algorithm}{where})"

    def _described(self, spec: LaneSpec, nodes: Nodes | None) -> StreamLane:
        """A lane as it is encoded first: in its codec; inside a node, where bits are cheaper, in one of no fewer."""
        lane = StreamLane(spec.numel, self.dtype, spec.codec, spec.first, spec.feedback)
        if nodes is None:
            return lane._replace(exact_own=not isinstance(spec.codec, Identity))
        assert not spec.feedback  # a hierarchy has none
        inside = codec_for(nodes.inside, (spec.numel,))
        codec = max(inside, spec.codec, key=lambda codec: codec.wire_bytes(_MANY, torch.float32))
        return lane._replace(codec=codec, first=codec, across=(spec.codec, spec.first))

    def lane(
        self,
        index: int,
        tensors: Sequence[Tensor],
        carry: Carry | None = None,
        watch: Watch | None = None,
        checked: Callable[[Fine], None] | None = None,
    ) -> Lane:
        """Lane `index` of this message with the tensors of one step; `checked` is told whether a chunk is finite."""
        lane = self._lanes[index]
        flat = chunks.Flat(tensors)
        cut = self._cuts[index]
        return Lane(flat, cut, lane.codec, lane.first, carry, watch, checked, lane.exact_own, lane.across)

    @functools.cached_property
    def program(self) -> Sum | None:
        """On a stream of a GPU: what averages lanes whose feedback, if any, is a tensor; None where `run` has to."""
        scale = 1.0 / self.channel.world
        return sum_program(self.channel.transports, self.algorithm, self._lanes, self._cuts, scale)

    def meet(self) -> None:
        """Compare the message with the other ranks' before its program runs for the first time."""
        channel = self.channel
        if self.text in channel.kinds and channel.failure is None and not channel.handshake.every_call:
            channel.next_call()
        else:
            Call(channel, self.text)

    def run(
        self,
        lanes: Sequence[Lane],
        outputs: Sequence[Tensor],
        *,
        step: int,
        copies: Sequence[tuple[Tensor, Tensor]] = (),
        meter: operations.Meter | None = None,
    ) -> Work:
        """Average the lanes over the ranks, in place; then tensor = numbers for the (tensor, numbers) of `copies`."""
        call = Call(self.channel, self.text)
        scattered = tuple(lane.flat.scattered for lane in lanes)
        plan = self._plans.get(scattered)
        if plan is None:
            plan = CallPlan(self.text, lanes[0].codec, lanes[0].cut, *lanes_scratch(lanes, self._reducer))
            self._plans[scattered] = plan
        scale = 1.0 / self.channel.world
        operation = operations.AllReduce(call.setting(plan, step), lanes, self._reducer, scale, meter)
        operation.copies_back(outputs, copies)
        return self.channel.run(operation, call.site)

    @functools.cached_property
    def sent_bytes(self) -> int:
        """Bytes of wires that this rank hands to the transport at one step."""
        return sum(
            self._reducer.sent_bytes(lane.codec, cut.span(index).numel, self._encoded(lane), spec.codec)
            for spec, lane, cut in zip(self.specs, self._lanes, self._cuts, strict=True)
            for index in range(cut.num_chunks)
        )

    @functools.cached_property
    def wire_bytes(self) -> int:
        """Bytes of the wires of all lanes, uncut; of several nodes those that cross between them."""
        alone = self.channel.transports[0].world == 1
        pairs = zip(self._lanes, self.specs, strict=True)
        lanes = self._lanes if alone else [lane._replace(codec=spec.codec) for lane, spec in pairs]
        return sum(lane.codec.wire_bytes(lane.numel, self._encoded(lane)) for lane in lanes)

    def _encoded(self, lane: StreamLane) -> torch.dtype:
        return encoded_dtype(lane.codec, self.dtype, fed_back=bool(lane.feedback))
