"""Numbers that go to other ranks as they are: all_gather, all_gather_into_tensor, broadcast, all_to_all."""

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.collectives import checks, groups, operations, torch_verbs
from thinwire.collectives.call import IssuedCall, issue_known, issue_planned, remember
from thinwire.collectives.channel import Channel, channel_of
from thinwire.collectives.chunks import Flat
from thinwire.collectives.lane import Lane
from thinwire.collectives.message import row_operation
from thinwire.collectives.plan import PlanKey, VerbAlgorithm, sized
from thinwire.collectives.work import Work
from thinwire.errors import CollectiveError
from thinwire.feedback import RowCopy


def all_gather_into_tensor(
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: groups.Group = None,
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
    given = (output_tensor, input_tensor)
    call = issue_known("all_gather", given, group, step, codec, algorithm)
    output, input = given
    if call is None:
        output, input = checks.check_tensors(given, "all_gather_into_tensor", outputs=1, step=step)
        channel = channel_of(groups.resolve(group), output.device)
        world = channel.world
        if output.numel() != world * input.numel():
            raise CollectiveError(
                f"all_gather_into_tensor: output must have {world} times the elements of input, "
                f"got {output.numel()} and {input.numel()}"
            )
        codecs = checks.codecs_for(codec, output.shape)
        key = PlanKey("all_gather_into_tensor", (input.numel(),), input.dtype, codecs, algorithm)
        call = issue_planned(channel, key, functools.partial(all_gather_into_tensor, group=group), (world, 1))
        remember(call, "all_gather", given, codec, algorithm)
    plan = call.plan
    if plan.program is not None:
        return call.channel.launch(plan.program, (output, input), [output_tensor], step, call.site, async_op)
    if not plan.lanes:
        return torch_verbs.all_gather(call, output, input, [output_tensor], async_op)
    input = torch_verbs.unstraddled(input, output, input)
    whole = output.contiguous()
    operation = row_operation(call, plan, [whole], [input], step, None)
    copies = () if output.is_contiguous() else ((output, whole),)
    return call.channel.submit(operation, call.site, [output_tensor], async_op, copies)


all_gather_single = all_gather_into_tensor


def all_gather(
    tensor_list: Sequence[Tensor],
    tensor: Tensor,
    group: groups.Group = None,
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
            f"all_gather: tensor_list must hold one tensor per rank, {channel.transport.world} in all, the one of "
            f"this rank with {input.numel()} elements like `tensor`; got lengths {sizes}"
        )
    key = PlanKey("all_gather", tuple(sizes), input.dtype, checks.codecs_for(codec, (sum(sizes),)), algorithm)
    call = issue_planned(channel, key, functools.partial(all_gather_into_tensor, group=group), (len(sizes), 1))
    plan = call.plan
    if not plan.lanes:
        return torch_verbs.all_gather_list(call, outputs, input, tensor_list, async_op)
    lane = Lane(plan.lanes[0], Flat([input]))
    operation = operations.Gather(call.context(plan, step), [lane], [[Flat([output]) for output in outputs]])
    return call.channel.submit(operation, call.site, tensor_list, async_op)


def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: groups.Group = None,
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
    part = tensor
    call = issue_known("broadcast", (tensor,), group, step, codec, algorithm, src, group_src)
    if call is None:
        (part,) = checks.check_tensors((tensor,), "broadcast", outputs=1, step=step)
        channel = channel_of(groups.resolve(group), part.device)
        source = _source(channel, src, group_src)
        codecs = checks.codecs_for(codec, part.shape)
        key = PlanKey("broadcast", (part.numel(),), part.dtype, codecs, algorithm, source=source)
        call = issue_planned(channel, key, functools.partial(broadcast, group=group, group_src=0), (channel.world,))
        remember(call, "broadcast", (tensor,), codec, algorithm, src, group_src)
    plan = call.plan
    assert plan.source is not None
    if plan.program is not None:
        return call.channel.launch(plan.program, (part,), [tensor], step, call.site, async_op)
    if not plan.lanes:
        return torch_verbs.broadcast(call, part, plan.source, [tensor], async_op)
    operation = operations.Broadcast(call.context(plan, step), Lane(plan.lanes[0], Flat([part])), plan.source)
    return call.channel.submit(operation, call.site, [tensor], async_op)


def _source(channel: Channel, src: int | None, group_src: int | None) -> int:
    group = channel.transport.group
    if (src is None) == (group_src is None):
        raise CollectiveError(f"broadcast needs either src or group_src, got src={src} and group_src={group_src}")
    source = dist.get_group_rank(group, src) if src is not None else group_src
    assert source is not None
    if not 0 <= source < channel.transport.world:
        raise CollectiveError(f"broadcast: group_src must be 0..{channel.transport.world - 1}, got {source}")
    return source


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: groups.Group = None,
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
    target, source = output, input
    outputs: Sequence[Tensor] = ()
    inputs: Sequence[Tensor] = ()
    call = issue_known("all_to_all", (output, input), group, step, codec, algorithm) if is_even else None
    if call is None:
        target, source = checks.check_tensors((output, input), "all_to_all_single", outputs=1, step=step)
        channel = channel_of(groups.resolve(group), target.device)
        outputs = _parts(target, output_split_sizes, channel.world, "output")
        inputs = _parts(source, input_split_sizes, channel.world, "input")
        row = tuple(source.shape[1:])
        key = PlanKey("all_to_all_single", (), source.dtype, checks.codecs_for(codec), algorithm, row=row)
        call = _issue_exchange(channel, key, group, outputs, inputs)
        if is_even and source.numel():
            if call.plan.even is not None:
                call.plan = replace(call.plan, program=call.plan.even(source.numel() // channel.world))
            remember(call, "all_to_all", (output, input), codec, algorithm)
    plan = call.plan
    if plan.program is not None and is_even and source.numel():
        return call.channel.launch(plan.program, (target, source), [output], step, call.site, async_op)
    outputs = outputs or _parts(target, None, call.channel.world, "output")
    inputs = inputs or _parts(source, None, call.channel.world, "input")
    if not plan.lanes:
        return torch_verbs.all_to_all(call, [target], [source], _numels(outputs, inputs), [output], async_op)
    if torch_verbs.overlap(target, source):
        places = [[(part.data_ptr(), part.shape, part.stride()) for part in parts] for parts in (outputs, inputs)]
        if places[0] != places[1]:  # else a part goes where one as long was
            inputs = [part.clone() for part in inputs]
    return _exchange(call, outputs, inputs, step, [output], async_op)


def all_to_all(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: groups.Group = None,
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
    call = _issue_exchange(channel, key, group, outputs, inputs)
    if not call.plan.lanes:
        return torch_verbs.all_to_all(call, outputs, inputs, _numels(outputs, inputs), output_tensor_list, async_op)
    return _exchange(call, outputs, inputs, step, output_tensor_list, async_op)


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
    found: Sequence[Tensor] = tensor.split(listed)
    return found


def _numels(*lists: Sequence[Tensor]) -> list[list[int]]:
    return [[part.numel() for part in parts] for parts in lists]


def _issue_exchange(
    channel: Channel, key: PlanKey, group: groups.Group, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
) -> IssuedCall:
    """Issue the call with its plan. Ranks compare lengths at the first call alone; they change from call to call."""
    received, sent = _numels(outputs, inputs)
    rank = channel.transport.rank
    if sent[rank] != received[rank] and channel.plans.get(str(key)) and not channel.handshake.every_call:
        this_rank = channel.failures.this_rank
        raise CollectiveError(f"{this_rank} would send itself {sent[rank]} elements and expects {received[rank]}")
    trial = functools.partial(all_to_all_single, group=group)
    return issue_planned(channel, key, trial, (channel.world, channel.world), (sent, received))


def _exchange(
    call: IssuedCall,
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    step: int | None,
    results: Sequence[Tensor],
    async_op: bool,
) -> Work | None:
    """Exchange parts of any lengths; `results` are the caller's own, of which the outputs are parts."""
    plan = call.plan
    if plan.program is not None:
        tensors = (*outputs, *inputs)
        return call.channel.launch(plan.program, tensors, results, step, call.site, async_op, written=len(outputs))
    link = call.channel.transport
    flats_out = [Flat([part]) for part in outputs]
    flats_in = [Flat([part]) for part in inputs]
    others = [rank for rank in range(link.world) if rank != link.rank]
    lengths = [flats[rank].numel for flats in (flats_out, flats_in) for rank in others]
    context = call.context(sized(plan, lengths), step)
    operation = operations.Exchange(context, plan.lanes[0], flats_out, flats_in)
    return call.channel.submit(operation, call.site, results, async_op)
