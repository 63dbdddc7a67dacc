"""Numbers that go to other ranks as they are: all_gather, all_gather_into_tensor, broadcast, all_to_all."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch.distributed as dist
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.collectives import checks, groups, operations, programs, torch_verbs
from thinwire.collectives.call import IssuedCall, issue_known, issue_planned, remember
from thinwire.collectives.channel import Channel, channel_of
from thinwire.collectives.chunks import Flat
from thinwire.collectives.lane import Lane
from thinwire.collectives.message import row_operation
from thinwire.collectives.plan import CallPlan, PlanKey, VerbAlgorithm, sized
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
        gather = functools.partial(all_gather_into_tensor, group=group, codec=codec, step=step)
        _gather_differences(gather, output_tensor, input_tensor, groups.resolve(group).rank(), algorithm, feedback)
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
        output, input = output.detach(), input.detach()
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


def _gather_differences(
    gather: Callable[..., object], output: Tensor, input: Tensor, rank: int, algorithm: VerbAlgorithm, feedback: RowCopy
) -> None:
    copy = feedback.tensor
    if copy is None or copy.shape != output.shape or copy.dtype != output.dtype:
        gather(output, input, algorithm="plain")
        feedback.begin(output)
        return
    difference = input.detach().reshape(-1) - copy.view(-1, input.numel())[rank]
    gather(output, difference, algorithm="compressed" if algorithm == "auto" else algorithm)
    feedback.add_to(output.detach())


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
    """tensor_list[r] = rank r's tensor, alike on all ranks, of any size: thinwire.all_gather(out, x, codec="int8")."""
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
        part = part.detach()
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
    even = output_split_sizes is None and input_split_sizes is None
    target, source = output, input
    call = issue_known("all_to_all", (output, input), group, step, codec, algorithm) if even else None
    if call is None:
        target, source = checks.check_tensors((output, input), "all_to_all_single", outputs=1, step=step)
        channel = channel_of(groups.resolve(group), target.device)
        out, sent = (
            [rows * math.prod(tensor.shape[1:]) for rows in _splits(sizes, tensor, channel.world, name)]
            for name, sizes, tensor in (("output", output_split_sizes, target), ("input", input_split_sizes, source))
        )
        row = tuple(source.shape[1:])
        key = PlanKey("all_to_all_single", (), source.dtype, checks.codecs_for(codec), algorithm, row=row)
        call = _issue_exchange(channel, key, group, out, sent)
        even = even and target.numel() == source.numel() > 0
        if even:
            call.plan = _even_plan(channel, call.plan, source.numel() // channel.world)
            remember(call, "all_to_all", (output, input), codec, algorithm)
        target, source = target.detach(), source.detach()
    if even:
        if call.plan.program is not None:
            return call.channel.launch(call.plan.program, (target, source), [output], step, call.site, async_op)
        out = sent = [source.numel() // call.channel.world] * call.channel.world
    if not call.plan.lanes:
        return torch_verbs.all_to_all(call, [target], [source], (out, sent), [output], async_op)
    whole = target.contiguous()
    read = source.contiguous()
    if out != sent or source.data_ptr() != whole.data_ptr():  # else a part goes where one as long was
        read = torch_verbs.apart(whole, read)
    copies = () if target.is_contiguous() else ((target, whole),)
    return _exchange(call, whole.view(-1).split(out), read.view(-1).split(sent), step, [output], copies, async_op)


def _even_plan(channel: Channel, plan: CallPlan, numel: int) -> CallPlan:
    """The plan of an exchange of equal parts of `numel` elements, which has launches of its own."""
    if not channel.transport.on_stream or plan.program is None:
        return plan
    key = plan.text, numel
    if key not in channel.known:
        lane = plan.lanes[0]._replace(numel=numel)
        channel.remember(key, replace(plan, lanes=[lane], program=programs.exchange_program(channel.transport, lane)))
    return channel.known[key]


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
    received, sent = ([part.numel() for part in parts] for parts in (outputs, inputs))
    call = _issue_exchange(channel, key, group, received, sent)
    if not call.plan.lanes:
        return torch_verbs.all_to_all(call, outputs, inputs, (received, sent), output_tensor_list, async_op)
    return _exchange(call, outputs, inputs, step, output_tensor_list, (), async_op)


def _splits(sizes: Sequence[int] | None, tensor: Tensor, world: int, name: str) -> list[int]:
    if tensor.dim() == 0:
        raise CollectiveError(f"all_to_all_single: {name} must have a dimension to cut, got a scalar")
    rows = tensor.shape[0]
    if sizes is None or len(sizes) == 0:
        if rows % world:
            raise CollectiveError(
                f"all_to_all_single: {rows} rows of {name} do not divide among {world} ranks: pass {name}_split_sizes"
            )
        return [rows // world] * world
    listed = [int(size) for size in sizes]
    if len(listed) != world or min(listed) < 0 or sum(listed) != rows:
        raise CollectiveError(
            f"all_to_all_single: {name}_split_sizes must be {world} sizes that add up to {rows} rows, got {listed}"
        )
    return listed


def _issue_exchange(
    channel: Channel, key: PlanKey, group: groups.Group, received: list[int], sent: list[int]
) -> IssuedCall:
    """Issue the call with its plan. Ranks compare lengths at the first call alone; they change from call to call."""
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
    copies: Sequence[tuple[Tensor, Tensor]],
    async_op: bool,
) -> Work | None:
    """Exchange parts of any lengths; `results` are the caller's own, of which the outputs are parts or copies."""
    plan = call.plan
    if plan.program is not None:
        tensors = [*(part.detach() for part in outputs), *(part.detach().contiguous() for part in inputs)]
        program = functools.partial(programs.copying, plan.program, 0, copies) if copies else plan.program
        return call.channel.launch(program, tensors, results, step, call.site, async_op, written=len(outputs))
    link = call.channel.transport
    flats_out = [Flat([part]) for part in outputs]
    flats_in = [Flat([part]) for part in inputs]
    others = [rank for rank in range(link.world) if rank != link.rank]
    lengths = [flats[rank].numel for flats in (flats_out, flats_in) for rank in others]
    context = call.context(sized(plan, lengths), step)
    operation = operations.Exchange(context, plan.lanes[0], flats_out, flats_in)
    return call.channel.submit(operation, call.site, results, async_op, copies)
