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
        self._nodes = nodes
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
        self._codecs = [self._first_codec(spec) for spec in self.specs]
        pairs = zip(self.specs, self._codecs, strict=True)
        links = self.channel.transports
        self._cuts = [
            sum_cut(codec, spec.numel, self._encoded(spec, codec), links, self.algorithm) for spec, codec in pairs
        ]
        self._plans: dict[tuple[bool, ...], CallPlan] = {}  # by which lanes are scattered
        named = "; ".join(f"{spec.numel} {spec.codec} {spec.feedback}".strip() for spec in self.specs)
        where = "" if nodes is None else f" in {nodes.inside}"
        self.text = f"gradients({named}; {str(like.dtype).removeprefix('torch.')}, algorithm={self.algorithm}{where})"

    def _first_codec(self, spec: LaneSpec) -> Codec:
        """What a lane is encoded in first: its own codec, or inside a node, where bits are cheaper, one of no fewer."""
        if self._nodes is None:
            return spec.codec
        assert not spec.feedback  # a hierarchy has none
        inside = codec_for(self._nodes.inside, (spec.numel,))
        return max(inside, spec.codec, key=lambda codec: codec.wire_bytes(_MANY, torch.float32))

    def lane(
        self,
        index: int,
        tensors: Sequence[Tensor],
        carry: Carry | None = None,
        watch: Watch | None = None,
        checked: Callable[[Fine], None] | None = None,
    ) -> Lane:
        """Lane `index` of this message with the tensors of one step; `checked` is told whether a chunk is finite."""
        spec = self.specs[index]
        codec = self._codecs[index]
        flat = chunks.Flat(tensors)
        cut = self._cuts[index]
        if self._nodes is not None:
            return Lane(flat, cut, codec, codec, carry, watch, checked, across=(spec.codec, spec.first))
        exact_own = not isinstance(codec, Identity)
        return Lane(flat, cut, codec, spec.first, carry, watch, checked, exact_own)

    @functools.cached_property
    def program(self) -> Sum | None:
        """On a stream of a GPU: what averages lanes whose feedback, if any, is a tensor; None where `run` has to."""
        found = []
        for spec, codec in zip(self.specs, self._codecs, strict=True):
            lane = StreamLane(spec.numel, self.dtype, codec, spec.first, spec.feedback)
            if self._nodes is None:
                found.append(lane._replace(exact_own=not isinstance(codec, Identity)))
            else:
                found.append(lane._replace(first=codec, across=(spec.codec, spec.first)))
        return sum_program(self.channel.transports, self.algorithm, found, self._cuts, 1.0 / self.channel.world)

    def meet(self) -> None:
        """Compare the message with the other ranks' before its program runs for the first time."""
        channel = self.channel
        if self.text in channel.kinds and channel.failure is None and not channel.handshake.every_call:
            channel.next_call(self.text)
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
        return self.channel.run(operation, call.place)

    @functools.cached_property
    def sent_bytes(self) -> int:
        """Bytes of wires that this rank hands to the transport at one step."""
        return sum(
            self._reducer.sent_bytes(codec, cut.span(index).numel, self._encoded(spec, codec), spec.codec)
            for spec, codec, cut in zip(self.specs, self._codecs, self._cuts, strict=True)
            for index in range(cut.num_chunks)
        )

    @functools.cached_property
    def wire_bytes(self) -> int:
        """Bytes of the wires of all lanes, uncut; of several nodes those that cross between them."""
        alone = self.channel.transports[0].world == 1
        codecs = self._codecs if alone else [spec.codec for spec in self.specs]
        pairs = zip(self.specs, codecs, strict=True)
        return sum(codec.wire_bytes(spec.numel, self._encoded(spec, codec)) for spec, codec in pairs)

    def _encoded(self, spec: LaneSpec, codec: Codec) -> torch.dtype:
        return encoded_dtype(codec, self.dtype, fed_back=bool(spec.feedback))
