"""Copies to all ranks: all_gather_into_tensor, all_gather, broadcast."""

import functools
from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.collectives import checks, operations, torch_verbs, transport
from thinwire.collectives.call import planned_verb
from thinwire.collectives.channel import Channel, channel_of
from thinwire.collectives.chunks import Flat
from thinwire.collectives.plan import PlanKey, VerbAlgorithm
from thinwire.collectives.quick import UNKNOWN, quick, remember
from thinwire.collectives.work import Work
from thinwire.errors import CollectiveError


class RowCopies(Protocol):
    """What thinwire.RowCopy is to a call."""

    tensor: Tensor | None

    def begin(self, gathered: Tensor) -> None:
        """Remember what was gathered exactly."""

    def add_to(self, gathered: Tensor) -> None:
        """Make weights of differences, and remember them."""


def all_gather_into_tensor(
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: transport.Group = None,
    async_op: bool = False,
    *,
    codec: str | Codec = "int8",
    algorithm: VerbAlgorithm = "auto",
    step: int | None = None,
    feedback: RowCopies | None = None,
) -> Work | None:
    """output_tensor = the input_tensors of all ranks in rank order. All ranks decode them to the same bits.

    Algorithms: "compressed", "plain" (torch's own, exact), "auto" (the one predicted to be faster).
    `feedback`: a thinwire.RowCopy of this buffer. Ranks then send the difference to what they sent last. The first call
    is exact. Such calls are blocking.
    """
    if feedback is not None:
        _gather_differences(output_tensor, input_tensor, group, async_op, codec, algorithm, step, feedback)
        return None
    given = (output_tensor, input_tensor)
    done = quick("all_gather", given, group, codec, algorithm, step=step, async_op=async_op)
    if done is not UNKNOWN:
        return done
    output, input = checks.check_tensors(given, "all_gather_into_tensor", outputs=1, step=step)
    channel = channel_of(transport.resolve(group), output.device)
    world = channel.world
    if output.numel() != world * input.numel():
        raise CollectiveError(
            f"all_gather_into_tensor: output must have {world} times the elements of input, "
            f"got {output.numel()} and {input.numel()}"
        )
    codecs = checks.codecs_for(codec, output.shape)
    key = PlanKey("all_gather_into_tensor", (input.numel(),), input.dtype, codecs, algorithm)
    call, plan = planned_verb(
        channel, key, "all_gather", input.numel(), output.numel(), all_gather_into_tensor, (world, 1)
    )
    if plan.codec is None or plan.program is not None:
        remember(call, plan.program, "all_gather", given, codec, algorithm)
    if plan.codec is None:
        return torch_verbs.all_gather(call, output, input, [output_tensor], async_op)
    if plan.program is not None:
        return call.start(plan.program, (output, input), [output_tensor], step, async_op)
    input = torch_verbs.unstraddled(input, output, input)
    whole = output.detach().contiguous()
    parts = [Flat([part]) for part in whole.view(world, -1).unbind()]
    lane = operations.GatherLane(parts, Flat([input]), plan.cut, plan.codec)
    operation = operations.Gather(call.setting(plan, step), [lane])
    copies = () if output.is_contiguous() else ((output, whole),)
    return call.run(operation, [output_tensor], async_op, copies)


all_gather_single = all_gather_into_tensor


def _gather_differences(
    output: Tensor,
    input: Tensor,
    group: transport.Group,
    async_op: bool,
    codec: str | Codec,
    algorithm: VerbAlgorithm,
    step: int | None,
    feedback: RowCopies,
) -> None:
    if async_op:
        raise CollectiveError("all_gather_into_tensor: calls with feedback are blocking")
    copy = feedback.tensor
    if copy is None or copy.shape != output.shape or copy.dtype != output.dtype:
        all_gather_into_tensor(output, input, group, codec=codec, algorithm="plain", step=step)
        feedback.begin(output)
        return
    own = copy.view(-1, input.numel())[transport.resolve(group).rank()]
    difference = input.detach().reshape(-1) - own
    way: VerbAlgorithm = "compressed" if algorithm == "auto" else algorithm
    all_gather_into_tensor(output, difference, group, codec=codec, algorithm=way, step=step)
    feedback.add_to(output.detach())


def all_gather(
    tensor_list: Sequence[Tensor],
    tensor: Tensor,
    group: transport.Group = None,
    async_op: bool = False,
    *,
    codec: str | Codec = "int8",
    algorithm: VerbAlgorithm = "auto",
    step: int | None = None,
) -> Work | None:
    """tensor_list[r] = rank r's tensor, decoded to the same bits on all ranks. Lengths may differ between ranks."""
    given = (*tensor_list, tensor)
    *outputs, input = checks.check_tensors(given, "all_gather", outputs=len(tensor_list), step=step)
    channel = channel_of(transport.resolve(group), input.device)
    sizes = [output.numel() for output in outputs]
    if len(sizes) != channel.transport.world or sizes[channel.transport.rank] != input.numel():
        raise CollectiveError(
            f"all_gather: tensor_list must hold one tensor per rank, {channel.transport.world} in all, the one of "
            f"this rank with {input.numel()} elements like `tensor`; got lengths {sizes}"
        )
    key = PlanKey("all_gather", tuple(sizes), input.dtype, checks.codecs_for(codec, (sum(sizes),)), algorithm)
    trial = all_gather_into_tensor
    call, plan = planned_verb(channel, key, "all_gather", max(sizes), sum(sizes), trial, (len(sizes), 1))
    if plan.codec is None:
        return torch_verbs.all_gather_list(call, outputs, input, list(tensor_list), async_op)
    parts = [Flat([output]) for output in outputs]
    lane = operations.GatherLane(parts, Flat([input]), plan.cut, plan.codec)
    operation = operations.Gather(call.setting(plan, step), [lane])
    return call.run(operation, tensor_list, async_op)


def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: transport.Group = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    codec: str | Codec = "int8",
    algorithm: VerbAlgorithm = "auto",
    step: int | None = None,
) -> Work | None:
    """tensor = the tensor of the source. Every rank decodes the same wire, the source too, so all hold the same bits.

    `src` is the source's rank in the world, `group_src` its rank in the group; one of them must be given.
    """
    done = quick("broadcast", (tensor,), group, codec, algorithm, src, group_src, step=step, async_op=async_op)
    if done is not UNKNOWN:
        return done
    (part,) = checks.check_tensors((tensor,), "broadcast", outputs=1, step=step)
    channel = channel_of(transport.resolve(group), part.device)
    source = _source(channel, src, group_src)
    numel = part.numel()
    codecs = checks.codecs_for(codec, part.shape)
    key = PlanKey("broadcast", (numel,), part.dtype, codecs, algorithm, source=source)
    trial = functools.partial(broadcast, group_src=0)
    call, plan = planned_verb(channel, key, "broadcast", numel, numel, trial, (channel.world,))
    if plan.codec is None or plan.program is not None:
        remember(call, plan.program, "broadcast", (tensor,), codec, algorithm, src, group_src)
    if plan.program is not None:
        return call.start(plan.program, (part,), [tensor], step, async_op)
    if plan.codec is None:
        return torch_verbs.broadcast(call, part, source, [tensor], async_op)
    operation = operations.Broadcast(call.setting(plan, step), Flat([part]), source, plan.cut)
    return call.run(operation, [tensor], async_op)


def _source(channel: Channel, src: int | None, group_src: int | None) -> int:
    group = channel.transport.group
    if (src is None) == (group_src is None):
        raise CollectiveError(f"broadcast needs either src or group_src, got src={src} and group_src={group_src}")
    source = dist.get_group_rank(group, src) if src is not None else group_src
    assert source is not None
    if not 0 <= source < channel.transport.world:
        raise CollectiveError(f"broadcast: group_src must be 0..{channel.transport.world - 1}, got {source}")
    return source
