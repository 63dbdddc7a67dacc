"""Sums over ranks: all_reduce, all_reduce_coalesced, reduce_scatter_tensor; what `auto` does with them."""

import functools
from collections.abc import Sequence

from torch import Tensor

from thinwire.codecs import Codec
from thinwire.collectives import checks, cost, groups, measuring, operations, torch_verbs
from thinwire.collectives.call import IssuedCall, issue_call, issue_known, issue_planned, remember
from thinwire.collectives.channel import channel_of, known_channel
from thinwire.collectives.checks import SUM, Codecs, Op
from thinwire.collectives.chunks import Flat
from thinwire.collectives.cost import Choice
from thinwire.collectives.groups import Group
from thinwire.collectives.lane import Lane, LaneSpec
from thinwire.collectives.message import RowMessage, row_operation
from thinwire.collectives.plan import PlanKey, SumAlgorithm, VerbAlgorithm, plan_sum, to_choose_from
from thinwire.collectives.programs import coalesced
from thinwire.collectives.work import Work
from thinwire.errors import CollectiveError
from thinwire.feedback import RowFeedback


def all_reduce(
    tensor: Tensor,
    op: Op = SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    codec: Codecs = "int8",
    algorithm: SumAlgorithm = "auto",
    step: int | None = None,
) -> Work | None:
    """Sum (or average) `tensor` over the ranks of `group`, in place, sent in `codec`. All ranks get the same bits.

    Algorithms: "two_phase" (every rank sums a shard), "one_shot" (every rank sends all to all others), "plain"
    (torch's own, exact), "auto" (the one predicted to be fastest; see `explain`). On a 2-D DeviceMesh of nodes and the
    ranks inside them there is "hierarchical", where codec may be a pair: inside a node, across nodes.
    `step` varies rotation and stochastic rounding, so that errors of successive calls average out. None counts the
    calls of the group. Pass the iteration, the same on all ranks, where a run must repeat itself from a checkpoint.
    Example: thinwire.all_reduce(grad, dist.ReduceOp.AVG, codec="lloyd4")
    """
    call = issue_known("all_reduce", (tensor,), group, step, codec, algorithm, op)
    if call is None:
        return _all_reduce("all_reduce", (tensor,), op, group, async_op, codec, algorithm, step)
    return _sum(call, (tensor,), (tensor,), async_op, step)


def all_reduce_coalesced(
    tensors: Sequence[Tensor],
    op: Op = SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    codec: Codecs = "int8",
    algorithm: SumAlgorithm = "auto",
    step: int | None = None,
) -> Work | None:
    """Sum several tensors of one dtype in one message: thinwire.all_reduce_coalesced([a, b], codec="int8")."""
    return _all_reduce("all_reduce_coalesced", list(tensors), op, group, async_op, codec, algorithm, step)


def _all_reduce(
    verb: str,
    tensors: Sequence[Tensor],
    op: Op,
    group: Group,
    async_op: bool,
    codec: Codecs,
    algorithm: str,
    step: int | None,
) -> Work | None:
    parts = checks.check_tensors(tensors, verb, outputs=len(tensors), step=step)
    lengths = tuple(part.numel() for part in parts)
    codecs = checks.codecs_for(codec, parts[0].shape if len(parts) == 1 else (sum(lengths),))
    channel = channel_of(group, parts[0].device)
    key = PlanKey(verb, lengths, parts[0].dtype, codecs, algorithm, checks.reduction(op))

    decide = functools.partial(plan_sum, key, channel.transports, groups.mesh_of_nodes(group))
    call = issue_planned(channel, key, functools.partial(all_reduce, group=group), (channel.world,), None, decide)
    if len(tensors) == 1:
        remember(call, verb, tensors, codec, algorithm, op)
    return _sum(call, parts, tensors, async_op, step)


def _sum(
    call: IssuedCall, parts: Sequence[Tensor], outputs: Sequence[Tensor], async_op: bool, step: int | None
) -> Work | None:
    """Sum `parts`, which are the outputs or views of them."""
    plan = call.plan
    assert plan.reduction is not None
    if plan.program is not None:
        program = plan.program if len(parts) == 1 else functools.partial(coalesced, plan.program)
        return call.channel.launch(program, parts, outputs, step, call.site, async_op, written=len(parts))
    if plan.reducer is None:
        return torch_verbs.all_reduce(call, parts, outputs, plan.reduction, async_op)
    lane = Lane(plan.lanes[0], Flat(parts))
    scale = plan.reduction.scale(call.channel.world)
    operation = operations.AllReduce(call.context(plan, step), [lane], plan.reducer, scale)
    return call.channel.submit(operation, call.site, outputs, async_op)


def reduce_scatter_tensor(
    output: Tensor,
    input: Tensor,
    op: Op = SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    codec: str | Codec = "int8",
    algorithm: VerbAlgorithm = "auto",
    step: int | None = None,
    feedback: RowFeedback | None = None,
) -> Work | None:
    """output = this rank's part of the sum of `input` over ranks: one message in `codec`, one rounding.

    `input` holds world times as many elements as `output`. Algorithms: "compressed", "plain" (exact), "auto".
    `feedback`: a thinwire.RowFeedback of this buffer. Later calls then send what this one loses. Such calls are
    compressed and blocking, and overwrite `input`.
    Example: thinwire.reduce_scatter_tensor(shard, grad, dist.ReduceOp.AVG, codec="int8")
    """
    if feedback is not None:
        if async_op or algorithm == "plain":
            raise CollectiveError("reduce_scatter_tensor: calls with feedback are compressed and blocking")
        _scatter_fed_back(output, input, op, group, codec, step, feedback)
        return None
    given = (output, input)
    call = issue_known("reduce_scatter", given, group, step, codec, algorithm, op)
    target, source = given
    if call is None:
        target, source = checks.check_tensors(given, "reduce_scatter_tensor", outputs=1, step=step)
        channel = channel_of(groups.resolve(group), target.device)
        reduction = checks.reduction(op)
        world = channel.world
        if source.numel() != world * target.numel():
            raise CollectiveError(
                f"reduce_scatter_tensor: input must have {world} times the elements of output, "
                f"got {source.numel()} and {target.numel()}"
            )
        codecs = checks.codecs_for(codec, source.shape)
        key = PlanKey("reduce_scatter_tensor", (source.numel(),), source.dtype, codecs, algorithm, reduction)
        call = issue_planned(channel, key, functools.partial(reduce_scatter_tensor, group=group), (1, world))
        remember(call, "reduce_scatter", given, codec, algorithm, op)
    plan = call.plan
    assert plan.reduction is not None
    if plan.program is not None:
        return call.channel.launch(plan.program, (target, source), [output], step, call.site, async_op)
    if not plan.lanes:
        return torch_verbs.reduce_scatter(call, target, source, [output], plan.reduction, async_op)
    source = torch_verbs.unstraddled(source, source, target)
    operation = row_operation(call, plan, [target], [source], step, plan.reduction.scale(call.channel.world))
    return call.channel.submit(operation, call.site, [output], async_op)


reduce_scatter_single = reduce_scatter_tensor


def _scatter_fed_back(
    output: Tensor, input: Tensor, op: Op, group: Group, codec: str | Codec, step: int | None, feedback: RowFeedback
) -> None:
    target, source = checks.check_tensors((output, input), "reduce_scatter_tensor", outputs=1, step=step)
    channel = channel_of(groups.resolve(group), target.device)
    if source.numel() != channel.world * target.numel() or not (source.is_contiguous() and target.is_contiguous()):
        raise CollectiveError(
            f"reduce_scatter_tensor: expected contiguous tensors, the input with {channel.world} times the elements of "
            f"the output, got {source.numel()} and {target.numel()}"
        )
    scale = checks.reduction(op).scale(channel.world)
    chosen = checks.codec_for(codec, source.shape)
    spec = LaneSpec(target.numel(), chosen, chosen, feedback.kind)
    message = RowMessage([spec], source, group, scale)
    carry = feedback.carry(source.numel(), target.numel(), scale, source.device)
    message.run([target.view(1, -1)], [source.view(channel.world, -1)], step, [(carry, None, None)])


def explain(tensor: Tensor, group: Group = None, *, codec: str | Codec = "int8") -> Choice:
    """What all_reduce(tensor, group=group, codec=codec) does by default, and why, by the measurements there are.

    `print(thinwire.explain(tensor))` shows the measured link and every algorithm's predicted time and bytes, or how to
    measure. It never communicates, so one rank may call it alone.
    """
    part = checks.check_tensors((tensor,), "explain")[0]
    members = groups.resolve(group)
    channel = known_channel(members, part.device)
    measured = cost.Measured() if channel is None else channel.measured
    curve = cost.CurveKey("all_reduce", part.dtype, (checks.codec_for(codec, part.shape),))
    return cost.explained(measured, curve, part.numel(), members.size())


def measure(tensor: Tensor, group: Group = None, *, codec: str | Codec = "int8") -> Choice:
    """Measure what each algorithm takes for all_reduce(tensor, group=group, codec=codec), now, and explain.

    All ranks of the group must call it. `algorithm="auto"` does the same at its first call of a kind; what was measured
    is kept for the life of the group. Example: print(thinwire.measure(grad, codec="lloyd4"))
    """
    part = checks.check_tensors((tensor,), "measure")[0]
    members = groups.resolve(group)
    if members.size() > 1 and part.numel():
        channel = channel_of(members, part.device)
        codecs = (checks.codec_for(codec, part.shape),)
        issue_call(channel, str(PlanKey("measure", (part.numel(),), part.dtype, codecs, "auto")), anew=True)
        trial = functools.partial(all_reduce, group=members)
        choose = measuring.fastest(channel, "all_reduce", part.dtype, part.numel(), trial, (channel.world,))
        choose(codecs, to_choose_from(codecs))
    return explain(tensor, members, codec=codec)
