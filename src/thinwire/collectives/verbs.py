"""The verbs, with torch's signatures: sums, and numbers that go to other ranks as they are.

A verb issues its call, which finds or makes its plan, and carries the plan out (`_call`): as a program on a GPU's
stream, by torch's own verb (torch_verbs.py), or as an operation in the group's pipeline (operations.py).

[Note: Known calls] A small call takes so little time that some tens of microseconds of Python can be seen. So a call
like an earlier one is found by its raw arguments, before anything is checked or compared.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from thinwire.codecs import Codec
from thinwire.collectives import checks, cost, groups, operations, torch_verbs
from thinwire.collectives.channel import Channel, IssuedCall, bounded, channel_of, known_channel
from thinwire.collectives.checks import SUM, Codecs, Op
from thinwire.collectives.chunks import Flat, Lane, LaneSpec
from thinwire.collectives.cost import Choice, Trial
from thinwire.collectives.groups import Group
from thinwire.collectives.message import Hooks, RowMessage, row_operation
from thinwire.collectives.peers import Lengths
from thinwire.collectives.pipeline import Operation
from thinwire.collectives.plan import PlanKey, SumAlgorithm, VerbAlgorithm, plan_call, to_choose_from
from thinwire.collectives.work import Work
from thinwire.errors import CollectiveError
from thinwire.feedback import RowCopy, RowFeedback

_PLAIN = (Tensor, nn.Parameter)
_SHAPE = operator.attrgetter("shape")


class Arguments(NamedTuple):
    """What a verb was called with, as its caller gave it."""

    verb: str
    tensors: Sequence[Tensor]
    group: Group
    codec: Any
    algorithm: str
    how: tuple[Any, ...] = ()  # the op of a sum; a broadcast's source, by its rank in the world or in the group


def issue_known(given: Arguments, step: int | None) -> IssuedCall | None:
    """Issue a call like one remembered for these arguments; None if there is none. See [Note: Known calls]."""
    verb, tensors, group, codec, algorithm, how = given
    members: Any = dist.group.WORLD if group is None else group
    try:
        channel = known_channel(members, tensors[0].device)
        kind = verb, codec, algorithm, how, tensors[0].dtype, *map(_SHAPE, tensors)
        plan = None if channel is None else channel.known.get(kind)
    except (TypeError, AttributeError, IndexError):  # wrong arguments: the checks raise for them
        return None
    if channel is None or plan is None:
        return None
    for tensor in tensors:
        if type(tensor) not in _PLAIN or tensor.dtype != tensors[0].dtype or tensor.device != channel.device:
            return None
        if tensor.requires_grad or not tensor.is_contiguous():
            return None
    if step is not None:
        checks.check_step(step)  # before the call counts
    return channel.issue(plan, step=step)


def remember(call: IssuedCall, given: Arguments) -> None:
    """From now on `issue_known` finds the plan of calls like this one, unless all calls are compared."""
    channel = call.channel
    verb, tensors, _, codec, algorithm, how = given
    if channel.handshake.every_call or len(channel.transports) > 1 or any(t.is_complex() for t in tensors):
        return
    if not any(type(part) is dist.ReduceOp for part in how):  # one with a factor, which is not compared
        bounded(channel.known)[verb, codec, algorithm, how, tensors[0].dtype, *map(_SHAPE, tensors)] = call.plan


def issue_planned(
    channel: Channel,
    key: PlanKey,
    step: int | None,
    trial: Trial,
    lengths: Lengths | None = None,
    mesh: DeviceMesh | None = None,
) -> IssuedCall:
    """Issue a call with its plan: compared and decided the first time, looked up afterwards.

    `trial`: what is timed where the fastest algorithm is asked for. Ranks may measure together to decide; if one fails,
    the others raise its error too. `mesh`: of nodes, for a sum.
    """
    text = str(key)
    plan = channel.plans.get(text)
    call = channel.issue(plan or text, step=step, lengths=lengths, anew=plan is None)
    if plan is not None:
        return call
    choose = cost.fastest(channel, key.kind, key.dtype, call.most_sent or key.numel(channel.world), trial)
    decide = functools.partial(plan_call, key, channel.transports, mesh, call.most_sent, choose)
    call.plan = channel.plans[text] = channel.failures.guard(call.site, decide)
    return call


def _call(
    verb: Callable[..., Any],
    plain: Callable[..., Work | None],
    operation: Callable[..., Operation],
    given: Arguments,
    step: int | None,
    async_op: bool,
) -> Work | None:
    """Issue and carry out a call of a verb whose tensors have fixed shares of its message.

    `plain` and `operation`: torch's own verb, and what makes the operation.
    """
    tensors = given.tensors
    call, parts = issue_known(given, step), tensors
    if call is None:
        call, parts = _first_call(verb, given, step)
    call.outputs = tensors[:1] if len(tensors) == 2 and verb is not all_reduce_coalesced else tensors
    call.async_op = async_op
    if call.plan.program is not None:
        return call.channel.launch(call.plan.program, parts, call, written=len(call.outputs))
    if not call.plan.lanes:
        return plain(call, parts)
    return call.channel.submit(operation(call, parts), call)


def _first_call(verb: Callable[..., Any], given: Arguments, step: int | None) -> tuple[IssuedCall, Sequence[Tensor]]:
    """Check and issue a call that is not known by its arguments; return it with views of its tensors."""
    name, tensors, group, codec, algorithm, how = given
    is_sum = verb in (all_reduce, all_reduce_coalesced)
    whole = 1 if verb is reduce_scatter_tensor else 0  # the tensor with all ranks' parts; the other one has one part
    parts = checks.check_tensors(tensors, name, outputs=len(tensors) if is_sum else 1, step=step)
    channel = channel_of(group if is_sum else groups.resolve(group), parts[0].device)
    lengths = tuple(part.numel() for part in parts)
    codecs = checks.codecs_for(codec, (sum(lengths),) if is_sum and len(parts) > 1 else parts[whole].shape)
    key = PlanKey(name, lengths if is_sum else lengths[-1:], parts[0].dtype, codecs, algorithm)
    trial: Callable[..., Any] = functools.partial(all_reduce if is_sum else verb, group=group)
    if verb is broadcast:
        source = groups.rank_in(channel.transport.group, name, *how)
        if source is None:
            raise CollectiveError("broadcast: expected src or group_src, got neither")
        key = key._replace(source=source)
        trial = functools.partial(broadcast, group=group, group_src=0)
    elif how:
        key = key._replace(reduction=checks.reduction(*how))
    if not is_sum and len(parts) == 2 and lengths[whole] != channel.world * lengths[1 - whole]:
        large, small = ("output", "input")[:: 1 - 2 * whole]
        raise CollectiveError(
            f"{name}: {large} must have {channel.world} times the elements of {small}, "
            f"got {lengths[whole]} and {lengths[1 - whole]}"
        )
    call = issue_planned(channel, key, step, trial, mesh=groups.mesh_of_nodes(group) if is_sum else None)
    remember(call, given)
    return call, parts


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
    given = Arguments("all_reduce", (tensor,), group, codec, algorithm, (op,))
    return _call(all_reduce, torch_verbs.all_reduce, _sum, given, step, async_op)


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
    given = Arguments("all_reduce_coalesced", list(tensors), group, codec, algorithm, (op,))
    return _call(all_reduce_coalesced, torch_verbs.all_reduce, _sum, given, step, async_op)


def _sum(call: IssuedCall, parts: Sequence[Tensor]) -> Operation:
    return operations.AllReduce(call, [Lane(call.plan.lanes[0], Flat(parts))])


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
    name = "reduce_scatter_tensor"
    if feedback is None:
        given = Arguments(name, (output, input), group, codec, algorithm, (op,))
        return _call(reduce_scatter_tensor, torch_verbs.reduce_scatter, _scatter, given, step, async_op)
    if async_op or algorithm == "plain":
        raise CollectiveError(f"{name}: calls with feedback are compressed and blocking")
    target, source = checks.check_tensors((output, input), name, outputs=1, step=step)
    world, numel = groups.resolve(group).size(), target.numel()
    if source.numel() != world * numel or not (source.is_contiguous() and target.is_contiguous()):
        raise CollectiveError(
            f"{name}: with feedback input and output must be contiguous, and input {world} times as long, got "
            f"{source.numel()} and {numel} elements"
        )
    chosen = checks.codec_for(codec, source.shape)
    spec = LaneSpec(numel, chosen, chosen, feedback.kind)
    message = RowMessage([spec], source, group, checks.reduction(op).scale(world))
    carry = feedback.carry(source.numel(), numel, source.device)
    message.run([target.view(1, -1)], [source.view(world, -1)], step, Hooks([carry], [None]))
    return None


reduce_scatter_single = reduce_scatter_tensor


def _scatter(call: IssuedCall, parts: Sequence[Tensor]) -> Operation:
    target, source = parts
    source = torch_verbs.unstraddled(source, source, target)
    return row_operation(call, [target], [source])


def all_gather_into_tensor(
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: Group = None,
    async_op: bool = False,
    *,
    codec: str | Codec = "int8",
    algorithm: VerbAlgorithm = "auto",
    step: int | None = None,
    feedback: RowCopy | None = None,
) -> Work | None:
    """output_tensor = the input_tensors of all ranks in rank order. All ranks decode them to the same bits.

    Algorithms: "compressed", "plain" (torch's own, exact), "auto" (the one predicted to be faster).
    `feedback`: a thinwire.RowCopy of this buffer. Ranks then send the difference to what they sent last. The first call
    is exact. Such calls are blocking. Example: thinwire.all_gather_into_tensor(weights, shard, codec="int8")
    """
    if feedback is not None:
        if async_op:
            raise CollectiveError("all_gather_into_tensor: calls with feedback are blocking")
        gather = functools.partial(all_gather_into_tensor, output_tensor, group=group, codec=codec, step=step)
        copy = feedback.tensor
        if copy is None or copy.shape != output_tensor.shape or copy.dtype != output_tensor.dtype:
            gather(input_tensor, algorithm="plain")
            feedback.begin(output_tensor)
        else:
            last = copy.view(-1, input_tensor.numel())[groups.resolve(group).rank()]
            difference = input_tensor.detach().reshape(-1) - last
            gather(difference, algorithm="compressed" if algorithm == "auto" else algorithm)
            feedback.add_to(output_tensor.detach())
        return None
    given = Arguments("all_gather_into_tensor", (output_tensor, input_tensor), group, codec, algorithm)
    return _call(all_gather_into_tensor, torch_verbs.all_gather, _gather, given, step, async_op)


all_gather_single = all_gather_into_tensor


def _gather(call: IssuedCall, parts: Sequence[Tensor]) -> Operation:
    output, input = parts
    whole = output.contiguous()
    operation = row_operation(call, [whole], [torch_verbs.unstraddled(input, output, input)])
    operation.copies = () if whole is output else ((output, whole),)
    return operation


def all_gather(
    tensor_list: Sequence[Tensor],
    tensor: Tensor,
    group: Group = None,
    async_op: bool = False,
    *,
    codec: str | Codec = "int8",
    algorithm: VerbAlgorithm = "auto",
    step: int | None = None,
) -> Work | None:
    """tensor_list[r] = rank r's tensor, of any size, alike on all ranks: thinwire.all_gather(out, x, codec="int8")."""
    given = (*tensor_list, tensor)
    *outputs, input = checks.check_tensors(given, "all_gather", outputs=len(tensor_list), step=step)
    channel = channel_of(groups.resolve(group), input.device)
    sizes = [output.numel() for output in outputs]
    if len(sizes) != channel.transport.world or sizes[channel.transport.rank] != input.numel():
        raise CollectiveError(
            f"all_gather: tensor_list must hold one tensor per rank, {channel.transport.world} in all, and this rank's "
            f"must have {input.numel()} elements like `tensor`; got lengths {sizes}"
        )
    key = PlanKey("all_gather", tuple(sizes), input.dtype, checks.codecs_for(codec, (sum(sizes),)), algorithm)
    call = issue_planned(channel, key, step, functools.partial(all_gather_into_tensor, group=group))
    call.outputs, call.async_op = tensor_list, async_op
    if not call.plan.lanes:
        return torch_verbs.all_gather_list(call, outputs, input)
    lane = Lane(call.plan.lanes[0], Flat([input]))
    operation = operations.AllGather(call, [lane], [[Flat([output]) for output in outputs]])
    return channel.submit(operation, call)


def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    codec: str | Codec = "int8",
    algorithm: VerbAlgorithm = "auto",
    step: int | None = None,
) -> Work | None:
    """tensor = the tensor of the source. Every rank decodes the same wire, the source too, so all hold the same bits.

    `src` is the source's rank in the world, `group_src` its rank in the group; one of them must be given.
    Example: thinwire.broadcast(weights, src=0, codec="bf16")
    """
    given = Arguments("broadcast", (tensor,), group, codec, algorithm, (src, group_src))
    return _call(broadcast, torch_verbs.broadcast, _broadcast, given, step, async_op)


def _broadcast(call: IssuedCall, parts: Sequence[Tensor]) -> Operation:
    return operations.Broadcast(call, Lane(call.plan.lanes[0], Flat(parts)))


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = False,
    *,
    codec: str | Codec = "int8",
    algorithm: VerbAlgorithm = "auto",
    step: int | None = None,
) -> Work | None:
    """Send a part of `input`, cut along dimension 0, to every rank. `output` holds their parts, in rank order.

    Without sizes the parts are equal; sizes may differ and be zero. What a rank keeps for itself is copied exactly.
    Algorithms: "compressed", "plain" (torch's own, exact), "auto" (the one predicted to be faster; see `all_to_all`).
    Example: thinwire.all_to_all_single(received, tokens, codec="int8")
    """
    is_even = output_split_sizes is None and input_split_sizes is None
    target, source, parts = output, input, None
    given = Arguments("all_to_all", (output, input), group, codec, algorithm)
    call = issue_known(given, step) if is_even else None
    if call is None:
        target, source = checks.check_tensors((output, input), "all_to_all_single", outputs=1, step=step)
        channel = channel_of(groups.resolve(group), target.device)
        outputs = _parts(target, output_split_sizes, channel.world, "output")
        parts = outputs, _parts(source, input_split_sizes, channel.world, "input")
        key = PlanKey("all_to_all_single", (), source.dtype, checks.codecs_for(codec), algorithm)
        call = _issue_exchange(channel, key._replace(row=tuple(source.shape[1:])), group, step, *parts)
        if is_even and source.numel():
            if call.plan.even is not None:
                call.plan = replace(call.plan, program=call.plan.even(source.numel() // channel.world))
            remember(call, given)
    call.outputs, call.async_op = [output], async_op
    if call.plan.program is not None and is_even and source.numel():
        return call.channel.launch(call.plan.program, (target, source), call)
    outputs, inputs = parts or [_parts(tensor, None, call.channel.world, "") for tensor in (target, source)]
    if not call.plan.lanes:
        return torch_verbs.all_to_all(call, [target], [source], _numels(outputs, inputs))
    if torch_verbs.overlap(target, source):
        places = [[(part.data_ptr(), part.shape, part.stride()) for part in parts] for parts in (outputs, inputs)]
        if places[0] != places[1]:  # else every part is written where one of the same shape was read
            inputs = [part.clone() for part in inputs]
    return _exchange(call, outputs, inputs)


def all_to_all(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: Group = None,
    async_op: bool = False,
    *,
    codec: str | Codec = "int8",
    algorithm: VerbAlgorithm = "auto",
    step: int | None = None,
) -> Work | None:
    """output_tensor_list[r] = what rank r's input_tensor_list holds for this rank. Lengths may differ and be zero.

    Algorithms: "compressed", "plain" (exact), "auto". "auto" decides at the first call of a dtype, codec and group,
    from the sizes of that call, and keeps the decision: no rank knows the later sizes of the others.
    Example: thinwire.all_to_all(received, sent, codec="int8")
    """
    world = len(output_tensor_list)
    given = (*output_tensor_list, *input_tensor_list)
    tensors = checks.check_tensors(given, "all_to_all", outputs=world, step=step)
    outputs = tensors[:world]
    inputs = tensors[world:]
    channel = channel_of(groups.resolve(group), tensors[0].device)
    if len(outputs) != channel.transport.world or len(inputs) != channel.transport.world:
        raise CollectiveError(
            f"all_to_all: expected one tensor per rank in both lists, {channel.transport.world} in all, "
            f"got {len(outputs)} outputs and {len(inputs)} inputs"
        )
    key = PlanKey("all_to_all", (), tensors[0].dtype, checks.codecs_for(codec), algorithm)
    call = _issue_exchange(channel, key, group, step, outputs, inputs)
    call.outputs, call.async_op = output_tensor_list, async_op
    if not call.plan.lanes:
        return torch_verbs.all_to_all(call, outputs, inputs, _numels(outputs, inputs))
    return _exchange(call, outputs, inputs)


def _parts(tensor: Tensor, sizes: Sequence[int] | None, world: int, name: str) -> Sequence[Tensor]:
    """Cut a tensor of all_to_all_single into the parts for, or from, every rank."""
    if tensor.dim() == 0:
        raise CollectiveError(f"all_to_all_single: {name} must have a dimension to cut, got a scalar")
    rows = tensor.shape[0]
    listed = [] if sizes is None else [int(size) for size in sizes]
    if not listed and rows % world:
        raise CollectiveError(
            f"all_to_all_single: {rows} rows of {name} do not divide among {world} ranks: pass {name}_split_sizes"
        )
    listed = listed or [rows // world] * world
    if len(listed) != world or min(listed) < 0 or sum(listed) != rows:
        raise CollectiveError(
            f"all_to_all_single: {name}_split_sizes must be {world} sizes that add up to {rows} rows, got {listed}"
        )
    return tensor.split(listed)  # type: ignore[no-any-return]


def _numels(*lists: Sequence[Tensor]) -> list[list[int]]:
    return [[part.numel() for part in parts] for parts in lists]


def _issue_exchange(
    channel: Channel, key: PlanKey, group: Group, step: int | None, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
) -> IssuedCall:
    """Issue the call with its plan. Ranks compare lengths at the first call alone; they change from call to call."""
    received, sent = _numels(outputs, inputs)
    rank = channel.transport.rank
    if sent[rank] != received[rank] and channel.plans.get(str(key)) and not channel.handshake.every_call:
        this_rank = channel.failures.this_rank
        raise CollectiveError(f"{this_rank} would send itself {sent[rank]} elements and expects {received[rank]}")
    trial = functools.partial(all_to_all_single, group=group)
    return issue_planned(channel, key, step, trial, (sent, received))


def _exchange(call: IssuedCall, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work | None:
    """Exchange parts of any lengths, which are the call's tensors or parts of them."""
    channel = call.channel
    if call.plan.program is not None:
        return channel.launch(call.plan.program, (*outputs, *inputs), call, written=len(outputs))
    flats = ([Flat([part]) for part in parts] for parts in (outputs, inputs))
    return channel.submit(operations.Exchange(call, *flats), call)


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
    return cost.choice(measured, curve, part.numel(), members.size())


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
        channel.issue(str(PlanKey("measure", (part.numel(),), part.dtype, codecs, "auto")), anew=True)
        trial = functools.partial(all_reduce, group=members)
        choose = cost.fastest(channel, "all_reduce", part.dtype, part.numel(), trial)
        choose(codecs, to_choose_from(codecs))
    return explain(tensor, members, codec=codec)
