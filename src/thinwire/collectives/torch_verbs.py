"""torch's own verbs behind the same signatures: what algorithm="plain" runs. Exact, any dtype torch takes.

They are called on the group itself: torch's functions would check the arguments again, and delay calls inside its
_coalescing_manager. gloo lacks AVG, PREMUL_SUM and lists of uneven lengths; they are built here on the calls it has.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from thinwire.collectives.channel import IssuedCall, channel_of
from thinwire.collectives.checks import SUM, Reduction
from thinwire.collectives.groups import group_all_gather, group_all_to_all, group_reduce_scatter
from thinwire.collectives.work import TorchWork, Work, wait_for_torch


def all_reduce(call: IssuedCall, parts: Sequence[Tensor]) -> Work | None:
    """torch's all_reduce, several tensors as one row; on a mesh inside its nodes, then across."""
    row = _row(parts)
    links = [link for link in reversed(call.channel.transports) if link.world > 1]
    whole = len(links) == 1 and links[0].on_stream  # NCCL averages; else a sum is multiplied afterwards
    reduction = call.plan.reduction
    options: Any = dist.AllreduceOptions()
    options.reduceOp = reduction.torch_op if whole else SUM
    work = None
    for link in links:
        if work is not None:
            wait(work, call)
        work = link.group.allreduce([row], options)
    finish = _finish(parts, row, None if whole else reduction, call.channel.world)
    return _end(call, work, finish, row)


def average(tensor: Tensor, group: dist.ProcessGroup) -> "torch.futures.Future[Tensor]":
    """The mean over the ranks of a group, in place, as DDP computes it without a hook: bit for bit the same."""
    text = f"average({tensor.numel()} of {tensor.dtype})"
    call = channel_of(group, tensor.device).issue(text, outputs=[tensor], async_op=True)
    tensor.mul_(1.0 / group.size())
    work = all_reduce(call, [tensor])
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


def agree(
    what: str, groups: Sequence[dist.ProcessGroup], device: torch.device, values: Sequence[float], op: Any
) -> list[float]:
    """Combine every rank's values by `op`, over one group after the other; `what`, in errors, is what they are for."""
    tensor = torch.tensor(list(values), dtype=torch.float64, device=device)
    for group in groups:
        combine(what, tensor, op, group)
    return [float(value) for value in tensor.tolist()]


def combine(what: str, tensor: Tensor, op: Any, group: dist.ProcessGroup) -> None:
    """Combine every rank's tensor by `op`, in place."""
    call = channel_of(group, tensor.device).issue(f"{what}({op.name.lower()}, {tensor.numel()} of {tensor.dtype})")
    options = dist.AllreduceOptions()
    options.reduceOp = op
    wait(group.allreduce([tensor], options), call)


def gather(what: str, tensor: Tensor, parts: list[Tensor], group: dist.ProcessGroup) -> None:
    """Gather every rank's tensor, all of one size, into `parts` on the group's first rank; others pass no parts."""
    call = channel_of(group, tensor.device).issue(f"{what}(gather of {tensor.numel()} of {tensor.dtype})")
    work = dist.gather(tensor, parts or None, group=group, group_dst=0, async_op=True)
    wait(work, call)


def reduce_scatter(call: IssuedCall, parts: Sequence[Tensor]) -> Work | None:
    """torch's reduce_scatter into one tensor."""
    output, input = parts
    link = call.channel.transport
    by_torch = link.on_stream and link.world > 1
    reduction = call.plan.reduction
    options: Any = dist.ReduceScatterOptions()
    options.reduceOp = reduction.torch_op if by_torch else SUM
    sent, left = _row([input]), None if by_torch else reduction
    return _start(call, group_reduce_scatter, [output], sent, options, reduction=left)


def all_gather(call: IssuedCall, parts: Sequence[Tensor]) -> Work | None:
    """torch's all_gather into one tensor."""
    output, input = parts
    return _start(call, group_all_gather, [output], _row([input]), c10d.AllgatherOptions())


def all_gather_list(call: IssuedCall, parts: Sequence[Tensor], input: Tensor) -> Work | None:
    """torch's all_gather; of uneven lengths as an exchange in which every rank sends the same to all."""
    sizes = [part.numel() for part in parts]
    sent = _row([input])
    if len(set(sizes)) > 1 or len(sizes) == 1:
        splits = sizes, [sent.numel()] * len(sizes)
        return all_to_all(call, parts, [sent.repeat(len(sizes))], splits)
    in_place = all(part.is_contiguous() for part in parts)  # which may differ between ranks
    whole = sent.new_empty(0 if in_place else sum(sizes))
    rows = [_row([part]) for part in parts] if in_place else list(whole.split(sizes))
    with _writing(parts):
        work = call.channel.transport.group.allgather([rows], [sent], c10d.AllgatherOptions())
    return _end(call, work, None if in_place else _finish(parts, whole), sent, whole)


def all_to_all(
    call: IssuedCall,
    parts: Sequence[Tensor],
    inputs: Sequence[Tensor],
    splits: Sequence[list[int]],  # of outputs and inputs, in elements
) -> Work | None:
    """torch's all_to_all_single of lists laid out one tensor after the other: gloo has no lists of uneven lengths."""
    sent = _row(inputs)
    if len(parts) == 1 and overlap(parts[0], sent):  # torch would overwrite what it has not sent yet
        sent = sent.clone()
    return _start(call, group_all_to_all, parts, sent, *splits, dist.AllToAllOptions())


def broadcast(call: IssuedCall, parts: Sequence[Tensor]) -> Work | None:
    """torch's broadcast from the source of the plan."""
    row = _row(parts)
    options: Any = dist.BroadcastOptions()
    options.rootRank = call.plan.source
    link = call.channel.transport
    work = link.group.broadcast([row], options) if link.world > 1 else None
    return _end(call, work, _finish(parts, row), row)


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether the address ranges of two tensors overlap."""
    (begin, end), (other_begin, other_end) = _extent(one), _extent(other)
    return begin < other_end and other_begin < end


def _extent(tensor: Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    if tensor.is_contiguous() or tensor.numel() == 0:
        return begin, begin + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.itemsize


def unstraddled(read: Tensor, whole: Tensor, part: Tensor) -> Tensor:
    """Return `read`, or a copy if `part` lies across rows of `whole`: chunks are written while others are read."""
    offset = part.data_ptr() - whole.data_ptr()
    return read.clone() if -part.nbytes < offset < whole.nbytes and offset % part.nbytes else read


def _start(
    call: IssuedCall,
    verb: Callable[..., Any],
    parts: Sequence[Tensor],
    sent: Tensor,
    *how: object,
    reduction: Reduction | None = None,
) -> Work | None:
    """Start a torch collective that fills `parts`. A rank alone only copies, whatever the dtype."""
    whole = _row(parts) if len(parts) == 1 else sent.new_empty(sum(part.numel() for part in parts))
    work = None
    if call.channel.world == 1:
        whole.copy_(sent)
    else:
        with _writing(parts):
            work = verb(call.channel.transport.group, whole, sent, *how)
    finish = _finish(parts, whole, reduction, call.channel.world)
    return _end(call, work, finish, whole, sent)


def _writing(parts: Sequence[Tensor]) -> torch.inference_mode:
    """In which `parts` may be written: inference tensors only in inference mode."""
    return torch.inference_mode(torch.is_inference_mode_enabled() or any(part.is_inference() for part in parts))


def wait(work: Any, call: IssuedCall) -> None:
    """Wait for a torch Work."""
    if call.channel.transport.on_stream:
        work.wait()
        if call.channel.transport.blocking:
            call.channel.settle(call.site)
    else:
        wait_for_torch(work, call.channel.failures.at(call.site))


def _row(tensors: Sequence[Tensor]) -> Tensor:
    """The numbers of tensors, flat, one after the other: a view of a single one where that is possible."""
    rows = [tensor.detach().contiguous().view(-1) for tensor in tensors]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _finish(
    parts: Sequence[Tensor], row: Tensor, reduction: Reduction | None = None, world: int = 1
) -> Callable[[], None] | None:
    """Return a function that scales a sum, where the backend did not, and copies the row to its tensors, or None."""
    in_place = len(parts) == 1 and parts[0].is_contiguous() and parts[0].data_ptr() == row.data_ptr()
    if in_place and (reduction is None or reduction.scale(world) == 1.0):
        return None

    def finish() -> None:
        with _writing(parts):
            if reduction is not None and reduction.name == "premul_sum":
                row.mul_(reduction.factor)
            elif reduction is not None and reduction.name == "avg":  # integers as NCCL averages them
                row.div_(world, rounding_mode=None if row.is_floating_point() else "trunc")
            if not in_place:
                for part, numbers in zip(parts, row.split([part.numel() for part in parts]), strict=True):
                    part.detach().copy_(numbers.view(part.shape))

    return finish


def _end(call: IssuedCall, work: Any, finish: Callable[[], None] | None, *temporaries: Tensor) -> Work | None:
    outputs = list(call.outputs)
    if work is None or not call.async_op:
        if work is not None:
            wait(work, call)
        if finish is not None:
            finish()
        return Work(outputs).finished() if call.async_op else None
    stream = call.channel.stream
    if stream is None:
        return TorchWork(work, outputs, finish, call.channel.failures.at(call.site))
    # Finish on the channel's stream, so that neither the host nor the caller's stream waits before `wait`.
    with torch.cuda.stream(stream), torch.inference_mode():
        work.wait()
        if finish is not None:
            finish()
        for tensor in (*outputs, *temporaries):
            tensor.record_stream(stream)
    with torch.cuda.stream(stream):
        return Work(outputs).finished()
