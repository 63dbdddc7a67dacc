"""torch's own verbs behind the same signatures: what algorithm="plain" runs. Exact, any dtype torch takes.

gloo lacks averages, sums that are multiplied first, and lists of uneven lengths: they are made of what it has.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives import call as calls, transport
from thinwire.collectives.call import Call
from thinwire.collectives.channel import Channel, known_channel
from thinwire.collectives.checks import Reduction
from thinwire.collectives.plan import CallPlan, QuickKey
from thinwire.collectives.transport import Group
from thinwire.collectives.work import TorchWork, Work, wait_looking

Finish = Callable[[], None]


def all_reduce(
    call: Call, parts: Sequence[Tensor], outputs: list[Tensor], reduction: Reduction, async_op: bool
) -> Work | None:
    """torch's all_reduce, several tensors as one row; on a mesh inside its nodes, then across.

    Where the backend has no AVG or PREMUL_SUM, and on a mesh, it is a sum multiplied afterwards.
    """
    world = call.channel.world
    row = _row(parts[0]) if len(parts) == 1 else torch.cat([_row(part) for part in parts])
    links = [link for link in reversed(call.channel.transports) if link.world > 1] or [call.channel.transport]
    whole = links[0].has_all_ops and len(links) == 1
    op = reduction.torch_op if whole else dist.ReduceOp.SUM
    for link in links[:-1]:
        dist.all_reduce(row, op, group=link.group)
    work = dist.all_reduce(row, op, group=links[-1].group, async_op=True)

    def finish() -> None:
        if not whole:
            _multiply(row, reduction, world)
        _put_parts(parts, row)

    unchanged = (whole or reduction.scale(world) == 1.0) and len(parts) == 1 and parts[0].is_contiguous()
    return _end(call, work, outputs, None if unchanged else finish, async_op, row)


def average(tensor: Tensor, group: dist.ProcessGroup) -> "torch.futures.Future[Tensor]":
    """The mean over the ranks of a group, in place, as DDP computes it without a hook: bit for bit the same."""
    tensor.mul_(1.0 / group.size())
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    future: torch.futures.Future[Tensor] = work.get_future().then(lambda done: (done.value(), tensor)[1])
    return future


def reduce_scatter(
    call: Call, output: Tensor, input: Tensor, outputs: list[Tensor], reduction: Reduction, async_op: bool
) -> Work | None:
    """torch's reduce_scatter into one tensor."""
    link = call.channel.transport
    whole = _row(output)
    sent = _row(input)
    op = reduction.torch_op if link.has_all_ops else dist.ReduceOp.SUM
    work = transport.reduce_scatter_single(whole, sent, op, group=link.group, async_op=True)

    def finish() -> None:
        if not link.has_all_ops:
            _multiply(whole, reduction, link.world)
        _put_parts([output], whole)

    return _end(call, work, outputs, finish, async_op, whole, sent)


def all_gather(call: Call, output: Tensor, input: Tensor, outputs: list[Tensor], async_op: bool) -> Work | None:
    """torch's all_gather into one tensor."""
    whole = _row(output)
    sent = _row(input)
    work = transport.all_gather_single(whole, sent, group=call.channel.transport.group, async_op=True)
    return _end(call, work, outputs, _putting([output], whole), async_op, whole, sent)


def all_gather_list(
    call: Call, parts: Sequence[Tensor], input: Tensor, outputs: list[Tensor], async_op: bool
) -> Work | None:
    """torch's all_gather; of uneven lengths as an exchange in which every rank sends the same to all."""
    sizes = [part.numel() for part in parts]
    sent = _row(input)
    group = call.channel.transport.group
    if len(set(sizes)) == 1 and all(part.is_contiguous() for part in parts):
        rows = [_row(part) for part in parts]
        return _end(call, dist.all_gather(rows, sent, group=group, async_op=True), outputs, None, async_op, sent)
    whole = sent.new_empty(sum(sizes))
    copies = sent.repeat(len(sizes))
    own = [sent.numel()] * len(sizes)
    work = dist.all_to_all_single(whole, copies, sizes, own, group=group, async_op=True)
    return _end(call, work, outputs, _putting(parts, whole), async_op, whole, copies)


def all_to_all_single(
    call: Call,
    output: Tensor,
    input: Tensor,
    splits: tuple[list[int], list[int]],
    outputs: list[Tensor],
    async_op: bool,
) -> Work | None:
    """torch's all_to_all_single; splits are of outputs and inputs, in elements."""
    whole = _row(output)
    sent = _row(input)
    work = dist.all_to_all_single(whole, sent, *splits, group=call.channel.transport.group, async_op=True)
    return _end(call, work, outputs, _putting([output], whole), async_op, whole, sent)


def all_to_all(
    call: Call, parts: Sequence[Tensor], inputs: Sequence[Tensor], outputs: list[Tensor], async_op: bool
) -> Work | None:
    """torch's all_to_all_single of the lists, one tensor after the other: gloo has no lists of uneven lengths."""
    splits = [part.numel() for part in parts], [part.numel() for part in inputs]
    sent = torch.cat([_row(part) for part in inputs])
    whole = sent.new_empty(sum(splits[0]))
    work = dist.all_to_all_single(whole, sent, *splits, group=call.channel.transport.group, async_op=True)
    return _end(call, work, outputs, _putting(parts, whole), async_op, whole, sent)


def broadcast(call: Call, tensor: Tensor, source: int, outputs: list[Tensor], async_op: bool) -> Work | None:
    """torch's broadcast from the group's rank `source`."""
    row = _row(tensor)
    work = dist.broadcast(row, group=call.channel.transport.group, group_src=source, async_op=True)
    return _end(call, work, outputs, _putting([tensor], row), async_op, row)


# [Note: Quick calls] Small messages end here, and there some tens of microseconds of Python can be seen. A blocking
# call of a kind that was decided to be torch's own is looked up first thing and handed on with nothing around it.
_NOW: dict[str, Callable[..., Any]] = {
    "all_reduce": transport.start_sum,
    "reduce_scatter": lambda g, out, x: transport.reduce_scatter_single(
        out.view(-1), x.view(-1), group=g, async_op=True
    ),
    "all_gather": lambda g, out, x: transport.all_gather_single(out.view(-1), x.view(-1), group=g, async_op=True),
    "all_to_all": lambda g, out, x: dist.all_to_all_single(out.view(-1), x.view(-1), group=g, async_op=True),
    "broadcast": lambda g, x, src, group_src: dist.broadcast(x, src, g, True, group_src),
}


def remember(
    call: Call, plan: CallPlan, verb: str, tensors: Sequence[Tensor], codec: object, algorithm: str, *source: int | None
) -> None:
    """From now on `quick` serves blocking calls like this one, unless every call has to be compared."""
    if call.free_next_time and not tensors[0].is_complex() and len(call.channel.transports) == 1:
        shapes = tuple(tensor.shape for tensor in tensors)
        call.channel.quick[QuickKey(verb, shapes, tensors[0].dtype, codec, algorithm, source)] = plan


def quick(
    verb: str, tensors: Sequence[Tensor], group: Group, codec: object, algorithm: str, *source: int | None
) -> bool:
    """Run torch's own verb where that was decided on before; False where it was not. See [Note: Quick calls]."""
    try:
        members: Any = dist.group.WORLD if group is None else group
        channel = known_channel(members, tensors[0].device)
        if channel is None:
            return False
        shapes = tuple(tensor.shape for tensor in tensors)
        plan = channel.quick[QuickKey(verb, shapes, tensors[0].dtype, codec, algorithm, source)]
    except (KeyError, TypeError, AttributeError):  # new, or not what it should be: the long way says so
        return False
    if channel.failure or not all(tensor.is_contiguous() and tensor.dtype == tensors[0].dtype for tensor in tensors):
        return False
    with channel.lock:
        channel.calls += 1
        number = channel.calls
    _wait(_NOW[verb](members, *tensors, *source), channel, number, plan.text)
    return True


def _wait(work: Any, channel: Channel, number: int, text: str) -> None:
    """Wait for a work of torch's; one that takes long looks whether the ranks disagree."""
    if channel.transport.on_stream:
        work.wait()
    else:
        wait_looking(work, lambda: calls.look(channel, number, text))


def _multiply(row: Tensor, reduction: Reduction, world: int) -> None:
    if reduction.name == "premul_sum":
        row.mul_(reduction.factor)
    elif reduction.name == "avg" and row.is_floating_point():
        row.div_(world)
    elif reduction.name == "avg":
        row.div_(world, rounding_mode="trunc")  # as NCCL averages integers


def _row(tensor: Tensor) -> Tensor:
    """The numbers of a tensor, flat: a view of it where that is possible."""
    return tensor.detach().contiguous().view(-1)


def _putting(parts: Sequence[Tensor], whole: Tensor) -> Finish | None:
    """What brings a row to its tensors, if it is not theirs already."""
    return None if _is_row_of(parts, whole) else lambda: _put_parts(parts, whole)


def _is_row_of(parts: Sequence[Tensor], whole: Tensor) -> bool:
    return len(parts) == 1 and parts[0].is_contiguous() and parts[0].data_ptr() == whole.data_ptr()


def _put_parts(parts: Sequence[Tensor], whole: Tensor) -> None:
    if _is_row_of(parts, whole):
        return
    for part, row in zip(parts, whole.split([part.numel() for part in parts]), strict=True):
        part.detach().copy_(row.view(part.shape))


def _end(
    call: Call, work: Any, outputs: list[Tensor], finish: Finish | None, async_op: bool, *temporaries: Tensor
) -> Work | None:
    if not async_op:
        _wait(work, call.channel, call.number, call.text)
        if finish is not None:
            finish()
        return None
    if call.channel.transport.on_stream:
        return _on_stream(call.channel, work, outputs, finish, temporaries)
    return TorchWork(work, outputs, finish, call.look)


def _on_stream(
    channel: Channel, work: Any, outputs: list[Tensor], finish: Finish | None, temporaries: Sequence[Tensor]
) -> Work:
    """Finish on the channel's stream, so that neither the host nor the caller's stream waits before `wait`."""
    assert channel.stream is not None
    with torch.cuda.stream(channel.stream), torch.inference_mode():
        work.wait()
        if finish is not None:
            finish()
        for tensor in (*outputs, *temporaries):
            tensor.record_stream(channel.stream)
    with torch.cuda.stream(channel.stream):
        return Work(outputs).finished()
