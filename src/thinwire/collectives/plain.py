"""torch's own verbs behind the same signatures: what `plain` runs. Exact, any dtype torch takes.

gloo lacks averages, sums that are multiplied first, and lists of uneven lengths: they are made of what it has. Its
reduce_scatter moves as much as an all_reduce, so numbers that the identity codec takes go that way instead.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives import primitives, schedule
from thinwire.collectives.calls import Reduction
from thinwire.collectives.schedule import Channel, Work


def native(channel: Channel) -> bool:
    """Whether the group's backend knows every op and verb (NCCL), or only the common ones (gloo)."""
    return isinstance(channel.transport, primitives.StreamTransport)


def all_reduce(
    channel: Channel, parts: Sequence[Tensor], outputs: list[Tensor], reduction: Reduction, async_op: bool
) -> Work | None:
    """torch's all_reduce of each tensor; where the backend has no AVG or PREMUL_SUM, a sum multiplied afterwards."""
    group, scale = channel.transport.group, reduction.scale(channel.transport.world)
    op = reduction.torch_op if native(channel) else dist.ReduceOp.SUM
    rows = [part.detach() if part.is_contiguous() else part.detach().contiguous() for part in parts]
    works = [dist.all_reduce(row, op, group=group, async_op=async_op) for row in rows]

    def finish() -> None:
        for part, row in zip(parts, rows, strict=True):
            if not native(channel) and scale != 1.0:
                _multiply(row, reduction, channel.transport.world)
            if not part.is_contiguous():
                part.detach().copy_(row)

    return _end(works, outputs, finish, async_op)


def remember_sum(channel: Channel, tensor: Tensor, codec: object, algorithm: str) -> None:
    """From now on `quick_sum` serves blocking sums like this one."""
    if not tensor.is_complex():
        channel.settled["quick", tensor.shape, tensor.dtype, codec, algorithm] = primitives.sum_options()


def quick_sum(tensor: Tensor, group: primitives.Group, codec: object, algorithm: str) -> bool:
    """torch's sum where it was decided on before, with next to nothing around it; False where it was not.

    Small messages end here, and there a few microseconds of Python can be seen.
    """
    try:
        world = dist.group.WORLD if group is None else group
        channel = schedule.known(world, tensor.device)
        options = channel.settled["quick", tensor.shape, tensor.dtype, codec, algorithm]
    except (KeyError, TypeError, AttributeError):  # new, or not what it should be: the long way says so
        return False
    if channel.failure is not None or not tensor.is_contiguous():
        return False
    with channel.lock:
        channel.calls += 1
    primitives.sum_now(world, tensor, options)
    return True


def _multiply(row: Tensor, reduction: Reduction, world: int) -> None:
    if reduction.name != "avg":
        row.mul_(reduction.factor)
    elif row.is_floating_point():
        row.div_(world)
    else:
        row.div_(world, rounding_mode="trunc")  # as NCCL averages integers


def all_gather(channel: Channel, output: Tensor, input: Tensor, outputs: list[Tensor], async_op: bool) -> Work | None:
    """torch's all_gather into one tensor."""
    whole, group = _row(output), channel.transport.group
    work = primitives.all_gather_single(whole, _row(input), group=group, async_op=async_op)
    return _end([work], outputs, lambda: _put(output, whole), async_op)


def all_gather_list(
    channel: Channel, parts: Sequence[Tensor], input: Tensor, outputs: list[Tensor], async_op: bool
) -> Work | None:
    """torch's all_gather; of uneven lengths as an exchange in which every rank sends the same to all."""
    sizes = [part.numel() for part in parts]
    world, row, group = len(sizes), _row(input), channel.transport.group
    whole = torch.empty(sum(sizes), dtype=row.dtype, device=row.device)
    if len(set(sizes)) == 1:
        work = primitives.all_gather_single(whole, row, group=group, async_op=async_op)
    else:
        sent = row.repeat(world)
        work = dist.all_to_all_single(whole, sent, sizes, [row.numel()] * world, group=group, async_op=async_op)
    return _end([work], outputs, lambda: _put_parts(parts, whole), async_op)


def reduce_scatter(
    channel: Channel, output: Tensor, input: Tensor, outputs: list[Tensor], reduction: Reduction, async_op: bool
) -> Work | None:
    """torch's reduce_scatter into one tensor. gloo's has no future, so there the call ends before it returns."""
    whole, group = _row(output), channel.transport.group
    op = reduction.torch_op if native(channel) else dist.ReduceOp.SUM
    later = async_op and native(channel)
    work = primitives.reduce_scatter_single(whole, _row(input), op, group=group, async_op=later)
    if not native(channel) and reduction.scale(channel.transport.world) != 1.0:
        _multiply(whole, reduction, channel.transport.world)
    ended = _end([work], outputs, lambda: _put(output, whole), later)
    return Work(outputs).finished() if async_op and ended is None else ended


def all_to_all_single(
    channel: Channel,
    output: Tensor,
    input: Tensor,
    splits: tuple[list[int], list[int]],
    outputs: list[Tensor],
    async_op: bool,
) -> Work | None:
    """torch's all_to_all_single; splits are of outputs and inputs, in elements."""
    whole, group = _row(output), channel.transport.group
    work = dist.all_to_all_single(whole, _row(input), *splits, group=group, async_op=async_op)
    return _end([work], outputs, lambda: _put(output, whole), async_op)


def all_to_all(
    channel: Channel, parts: Sequence[Tensor], inputs: Sequence[Tensor], outputs: list[Tensor], async_op: bool
) -> Work | None:
    """torch's all_to_all_single of the lists, one tensor after the other: gloo has no lists of uneven lengths."""
    splits = [part.numel() for part in parts], [part.numel() for part in inputs]
    sent = torch.cat([_row(part) for part in inputs])
    whole = torch.empty(sum(splits[0]), dtype=sent.dtype, device=sent.device)
    work = dist.all_to_all_single(whole, sent, *splits, group=channel.transport.group, async_op=async_op)
    return _end([work], outputs, lambda: _put_parts(parts, whole), async_op)


def broadcast(channel: Channel, tensor: Tensor, source: int, outputs: list[Tensor], async_op: bool) -> Work | None:
    """torch's broadcast from the group's rank `source`."""
    row = _row(tensor)
    work = dist.broadcast(row, group=channel.transport.group, group_src=source, async_op=async_op)
    return _end([work], outputs, lambda: _put(tensor, row), async_op)


def _row(tensor: Tensor) -> Tensor:
    """The numbers of a tensor, flat: a view of it where that is possible."""
    return tensor.detach().contiguous().view(-1)


def _put(target: Tensor, row: Tensor) -> None:
    if not target.is_contiguous():
        target.detach().copy_(row.view(target.shape))


def _put_parts(parts: Sequence[Tensor], whole: Tensor) -> None:
    for part, row in zip(parts, whole.split([part.numel() for part in parts]), strict=True):
        part.detach().copy_(row.view(part.shape))


def _end(
    works: Sequence[dist.Work | None], outputs: list[Tensor], finish: Callable[[], None], async_op: bool
) -> Work | None:
    if not async_op:
        finish()
        return None
    return _Torch([work for work in works if work is not None], outputs, finish)


class _Torch(Work):
    """torch's works as one of ours; what remains to be done is done once, by whoever comes first."""

    def __init__(self, works: Sequence[dist.Work], outputs: list[Tensor], finish: Callable[[], None]) -> None:
        super().__init__(outputs)
        futures = torch.futures.collect_all([work.get_future() for work in works])

        def end(gathered: "torch.futures.Future[list[torch.futures.Future[object]]]") -> list[Tensor]:
            for future in gathered.value():
                future.value()
            finish()
            self._done.set()
            return outputs

        self._future = futures.then(end)

    def wait(self, timeout: object = None) -> bool:
        """Return True when the outputs may be read."""
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        """Whether the outputs are final, without waiting."""
        return self._future.done()
