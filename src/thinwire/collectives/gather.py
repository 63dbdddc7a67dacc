"""Copies to all ranks: all_gather_into_tensor, all_gather, broadcast."""

import functools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.collectives import calls, plain, steps
from thinwire.collectives.chunks import Flat
from thinwire.collectives.primitives import Group
from thinwire.collectives.schedule import Channel, Work, settle
from thinwire.errors import CollectiveError


def all_gather_into_tensor(
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: Group = None,
    async_op: bool = False,
    *,
    codec: str | Codec = "int8",
    algorithm: str = "auto",
    step: int = 0,
) -> Work | None:
    """output_tensor = every rank's input_tensor, one after the other, as decoded from its wire on every rank.

    Algorithms: "compressed", "plain" (torch's own, exact), "auto" (the one predicted faster).
    """
    kind = codec, algorithm
    if not async_op and plain.quick("all_gather", (output_tensor, input_tensor), group, *kind):
        return None
    output, input = calls.check_tensors((output_tensor, input_tensor), "all_gather_into_tensor")
    calls.check_outputs((output,), "all_gather_into_tensor")
    channel = calls.channel_of(group, output.device)
    world = channel.transport.world
    if output.numel() != world * input.numel():
        raise CollectiveError(
            f"all_gather_into_tensor: output must have {world} times the elements of input, "
            f"got {output.numel()} and {input.numel()}"
        )
    if world == 1:
        output.detach().copy_(input.detach().reshape(output.shape))
        return settle(Work([output_tensor]).finished(), async_op)
    whole = output.detach().contiguous()
    parts = [Flat([part]) for part in whole.view(world, -1).unbind()]
    text = f"all_gather_into_tensor(numel={input.numel()}, {calls.named(input, codec, algorithm)})"
    trial = functools.partial(_trial, "all_gather", channel, input.dtype)
    call, plan = calls.agree(channel, "all_gather", text, output, input.numel(), codec, algorithm, trial)
    if plan.codec is None:
        plain.remember(call, "all_gather", (output_tensor, input_tensor), *kind)
        return plain.all_gather(call, output, input, [output_tensor], async_op)
    operation = steps.Gather(plan.setting(channel, step), parts, Flat([input]), plan.cut)
    operation.copies_back((output_tensor,), () if output.is_contiguous() else ((output, whole),))
    return settle(call.run(operation), async_op)


all_gather_single = all_gather_into_tensor


def all_gather(
    tensor_list: Sequence[Tensor],
    tensor: Tensor,
    group: Group = None,
    async_op: bool = False,
    *,
    codec: str | Codec = "int8",
    algorithm: str = "auto",
    step: int = 0,
) -> Work | None:
    """tensor_list[r] = rank r's tensor, as decoded from its wire on every rank. Lengths may differ between ranks."""
    *outputs, input = calls.check_tensors((*tensor_list, tensor), "all_gather")
    calls.check_outputs(outputs, "all_gather")
    channel = calls.channel_of(group, input.device)
    sizes = [output.numel() for output in outputs]
    if len(sizes) != channel.transport.world or sizes[channel.transport.rank] != input.numel():
        raise CollectiveError(
            f"all_gather: tensor_list must hold one tensor a rank, {channel.transport.world} in all, the one of this "
            f"rank with {input.numel()} elements like `tensor`; got lengths {sizes}"
        )
    if len(sizes) == 1:
        outputs[0].detach().copy_(input.detach().reshape(outputs[0].shape))
        return settle(Work(list(tensor_list)).finished(), async_op)
    text = f"all_gather(lengths={sizes}, {calls.named(input, codec, algorithm)})"
    whole = torch.empty(sum(sizes), dtype=input.dtype, device="meta")
    trial = functools.partial(_trial, "all_gather", channel, input.dtype)
    call, plan = calls.agree(channel, "all_gather", text, whole, max(sizes), codec, algorithm, trial)
    if plan.codec is None:
        return plain.all_gather_list(call, outputs, input, list(tensor_list), async_op)
    operation = steps.Gather(
        plan.setting(channel, step), [Flat([output]) for output in outputs], Flat([input]), plan.cut
    )
    operation.outputs = list(tensor_list)
    return settle(call.run(operation), async_op)


def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    codec: str | Codec = "int8",
    algorithm: str = "auto",
    step: int = 0,
) -> Work | None:
    """tensor = the source's, as decoded from its wire on every rank, the source's own too, so that all agree bitwise.

    `src` is the source's rank in the world, `group_src` its rank in the group; one of them must be given.
    """
    extra = src, group_src
    if not async_op and plain.quick("broadcast", (tensor,), group, codec, algorithm, extra=extra):
        return None
    (part,) = calls.check_tensors((tensor,), "broadcast")
    calls.check_outputs((part,), "broadcast")
    channel = calls.channel_of(group, part.device)
    source = _source(channel, src, group_src)
    if channel.transport.world == 1:
        return settle(Work([tensor]).finished(), async_op)
    text = f"broadcast(numel={part.numel()}, from rank {source}, {calls.named(part, codec, algorithm)})"
    trial = functools.partial(_trial, "broadcast", channel, part.dtype)
    call, plan = calls.agree(channel, "broadcast", text, part, part.numel(), codec, algorithm, trial)
    if plan.codec is None:
        plain.remember(call, "broadcast", (tensor,), codec, algorithm, extra=extra)
        return plain.broadcast(call, part, source, [tensor], async_op)
    operation = steps.Broadcast(plan.setting(channel, step), Flat([part]), source, plan.cut)
    operation.outputs = [tensor]
    return settle(call.run(operation), async_op)


def _source(channel: Channel, src: int | None, group_src: int | None) -> int:
    group = channel.transport.group
    if (src is None) == (group_src is None):
        raise CollectiveError(f"broadcast needs either src or group_src, got src={src} and group_src={group_src}")
    source = dist.get_group_rank(group, src) if src is not None else group_src
    assert source is not None
    if not 0 <= source < channel.transport.world:
        raise CollectiveError(f"broadcast: group_src must be 0..{channel.transport.world - 1}, got {source}")
    return source


def _trial(
    verb: str, channel: Channel, dtype: torch.dtype, codec: Codec, algorithm: str, numel: int
) -> Callable[[], object]:
    link, device = channel.transport, channel.device
    if verb == "broadcast":
        tensor = torch.linspace(-1, 1, numel, device=device).to(dtype)
        return lambda: broadcast(tensor, group=link.group, group_src=0, codec=codec, algorithm=algorithm)
    part = -(-numel // link.world)
    output, input = (torch.linspace(-1, 1, size, device=device).to(dtype) for size in (part * link.world, part))
    return lambda: all_gather_into_tensor(output, input, link.group, codec=codec, algorithm=algorithm)
