"""Messages that ranks send again and again: lanes that travel together, decided once and run at every step.

A sum serves the buckets of DDP. Rows, one per rank, serve FSDP2 and other sharded trainers: a scatter sums over ranks
what they have for each rank; a gather gives every rank what all have. A row is whatever a rank owns of a flat buffer.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from thinwire.codecs import Codec
from thinwire.collectives import operations
from thinwire.collectives.channel import Channel, IssuedCall, bounded, channel_of
from thinwire.collectives.checks import check_recodes, codec_for
from thinwire.collectives.chunks import Flat, Lane, LaneSpec
from thinwire.collectives.groups import Group
from thinwire.collectives.pipeline import Operation
from thinwire.collectives.plan import CallPlan, flat_lane, rows_plan, sum_plan
from thinwire.collectives.sums import check_order, flat_algorithm
from thinwire.collectives.work import Work
from thinwire.feedback import Carry
from thinwire.kernels.rows import Bad, Watch

_MANY = 1 << 20  # elements, by which codecs are compared: few ones are all headers


class Nodes(NamedTuple):
    """Ranks in nodes, for sums inside each node and then across them."""

    mesh: DeviceMesh  # of nodes and the ranks inside them
    inside: Codec  # inside a node, where a lane's own has not more bits


class Hooks(NamedTuple):
    """What a message remembers and calls at one step."""

    carries: Sequence[Carry | None]  # the feedback of each lane
    watches: Sequence[Watch | None]  # what looks at the errors of each
    on_finite: operations.OnFinite | None = None


class _LaneMessage:
    """What sums and rows have in common: a plan, which the channel keeps for messages like this one."""

    def __init__(
        self, channel: Channel, text: str, lanes: Sequence[LaneSpec], scale: float | None, plan: Callable[..., CallPlan]
    ) -> None:
        self.channel = channel
        key = text, tuple(lanes), scale
        if key not in channel.known:
            bounded(channel.known)[key] = plan(text, lanes, scale=scale)
        self.plan = channel.known[key]
        self.program: Any = self.plan.program  # on a stream of a GPU: what runs it unless lanes have hooks, or None

    @functools.cached_property
    def wire_bytes(self) -> int:
        """Bytes of the wires of all lanes, uncut; of one row; of several nodes those that cross between them."""
        lanes = self.plan.lanes
        if self.channel.transport.world > 1:
            lanes = [lane if lane.across is None else lane._replace(codec=lane.across[0]) for lane in lanes]
        return sum(lane.codec.wire_bytes(lane.numel, lane.encoded) for lane in lanes)

    @functools.cached_property
    def sent_bytes(self) -> int:
        """Bytes of wires that this rank hands to the transport at one step."""
        return self.plan.sent_bytes(self.channel.world)


def _loaded(plan: CallPlan, flats: Iterable[Flat], hooks: Hooks) -> list[Lane]:
    """The lanes of a plan, with their numbers at one step."""
    return [Lane(*each) for each in zip(plan.lanes, flats, hooks.carries, hooks.watches, strict=True)]


def _described(specs: Sequence[LaneSpec], dtype: torch.dtype) -> str:
    named = "; ".join(f"{spec.numel} {spec.codec} {spec.feedback}".strip() for spec in specs)
    return f"{named}; {str(dtype).removeprefix('torch.')}"


class SumMessage(_LaneMessage):
    """A sum of lanes that travel together, in codecs that do not change.

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
        channel = channel_of(group if nodes is None else nodes.mesh, like.device)
        codecs = [spec.codec for spec in specs]
        if nodes is None:
            self.algorithm = flat_algorithm(algorithm, codecs, channel.world)
        else:
            check_recodes(codecs, "a sum by nodes")
            check_order(nodes.mesh)
            self.algorithm = "hierarchical"
        self.dtype = like.dtype
        where = "" if nodes is None else f" in {nodes.inside}"
        text = f"gradients({_described(specs, like.dtype)}, algorithm={self.algorithm}{where})"
        lanes = [_laid(spec, like.dtype, nodes) for spec in specs]
        plan = functools.partial(sum_plan, links=channel.transports, algorithm=self.algorithm)
        super().__init__(channel, text, lanes, 1.0 / channel.world, plan)

    def run(
        self,
        tensors_L: Sequence[Sequence[Tensor]],
        hooks: Hooks,
        outputs: Sequence[Tensor],
        step: int,
        copies: Sequence[tuple[Tensor, Tensor]] = (),
        meter: operations.Meter | None = None,
    ) -> Work:
        """Average the tensors of every lane over the ranks, in place; then tensor = numbers for each of `copies`."""
        call = self.channel.issue(self.plan, outputs=outputs, step=step, async_op=True)
        lanes = _loaded(self.plan, map(Flat, tensors_L), hooks)
        operation = operations.AllReduce(call, lanes, hooks.on_finite, meter)
        operation.copies = copies
        work = self.channel.submit(operation, call)
        assert work is not None
        return work


def _laid(spec: LaneSpec, dtype: torch.dtype, nodes: Nodes | None) -> LaneSpec:
    """A lane as it is first encoded: in its codec or, inside a node, where bits are cheap, in one of no fewer bits."""
    if nodes is None:
        return flat_lane(spec, dtype)
    assert not spec.feedback  # a hierarchy has none
    inside = codec_for(nodes.inside, (spec.numel,))
    codec = max(inside, spec.codec, key=lambda codec: codec.wire_bytes(_MANY, torch.float32))
    return spec._replace(dtype=dtype, codec=codec, first_phase=codec, across=(spec.codec, spec.first_phase))


class RowMessage(_LaneMessage):
    """Rows, of which `numel` of a spec is the length, the same for every rank.

    With a `scale` every rank gets scale * the sum over ranks of their rows for it; without one, every rank's row, as
    decoded from its wire.
    """

    def __init__(self, specs: Sequence[LaneSpec], like: Tensor, group: Group, scale: float | None = None) -> None:
        channel = channel_of(group, like.device)
        lanes = _described(specs, like.dtype)
        text = f"gather({lanes})" if scale is None else f"scatter({lanes}, scale={scale:g})"
        typed = [spec._replace(dtype=like.dtype) for spec in specs]
        super().__init__(channel, text, typed, scale, functools.partial(rows_plan, link=channel.transport))

    def run(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        step: int | None,
        hooks: Hooks | None = None,
        note: Bad | None = None,
    ) -> None:
        """Run the message; return when the outputs are final (on a GPU: for what the current stream runs next).

        Scatter: per lane, `outputs` is the row of the sum, `inputs` the rows for all ranks, overwritten if there is
        feedback. Gather: `outputs` is the rows of all ranks, `inputs` the own row, which may be a part of them.
        `note`: where a program notes numbers that are not finite.
        """
        if self.program is not None and hooks is None:
            self.launch(self.program, (*outputs, *inputs), step, note)
        else:
            call = self.channel.issue(self.plan, outputs=outputs, step=step)
            self.channel.submit(row_operation(call, outputs, inputs, hooks), call)

    def launch(self, program: Any, tensors: Sequence[Tensor], step: int | None, note: Bad | None) -> None:
        """Run a program of this message on outputs and as many inputs."""
        written = len(tensors) // 2
        call = self.channel.issue(self.plan, outputs=tensors[:written], step=step)
        program = program if note is None else functools.partial(program, bad=note)
        self.channel.launch(program, [tensor.detach() for tensor in tensors], call, written=written)


def row_operation(
    call: IssuedCall, outputs: Sequence[Tensor], inputs: Sequence[Tensor], hooks: Hooks | None = None
) -> Operation:
    """The operation of a RowMessage, or of a verb with one lane."""
    hooks = hooks or Hooks([None] * len(inputs), [None] * len(inputs))
    lanes = _loaded(call.plan, [Flat([x]) for x in inputs], hooks)
    if call.plan.scale is not None:
        return operations.ReduceScatter(call, lanes, [Flat([output]) for output in outputs], hooks.on_finite)
    rows_LW = [[Flat([row]) for row in output.view(call.channel.world, -1).unbind()] for output in outputs]
    return operations.AllGather(call, lanes, rows_LW)
