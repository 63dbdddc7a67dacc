"""torch's own verbs behind the same signatures: what `plain` runs. Exact, any dtype torch takes.

gloo lacks some of them: averages, sums that are multiplied first, a reduce_scatter that moves less than an all_reduce,
lists of uneven lengths. Those run as thinwire's own messages with the identity codec.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives import primitives
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


def _multiply(row: Tensor, reduction: Reduction, world: int) -> None:
    if reduction.name != "avg":
        row.mul_(reduction.factor)
    elif row.is_floating_point():
        row.div_(world)
    else:
        row.div_(world, rounding_mode="trunc")  # as NCCL averages integers


def all_gather(channel: Channel, output: Tensor, input: Tensor, async_op: bool) -> Work | None:
    """torch's all_gather into one tensor."""
    whole = (
        output.detach() if output.is_contiguous() else torch.empty_like(output, memory_format=torch.contiguous_format)
    )
    work = primitives.all_gather_single(
        whole, input.detach().contiguous(), group=channel.transport.group, async_op=async_op
    )
    return _end([work], [output], lambda: _put(output, whole), async_op)


def reduce_scatter(
    channel: Channel, output: Tensor, input: Tensor, reduction: Reduction, async_op: bool
) -> Work | None:
    """torch's reduce_scatter into one tensor, on a backend that has it."""
    whole = (
        output.detach() if output.is_contiguous() else torch.empty_like(output, memory_format=torch.contiguous_format)
    )
    work = primitives.reduce_scatter_single(
        whole, input.detach().contiguous(), reduction.torch_op, group=channel.transport.group, async_op=async_op
    )
    return _end([work], [output], lambda: _put(output, whole), async_op)


def all_to_all_single(
    channel: Channel,
    output: Tensor,
    input: Tensor,
    output_splits: list[int] | None,
    input_splits: list[int] | None,
    async_op: bool,
) -> Work | None:
    """torch's all_to_all_single."""
    whole = (
        output.detach() if output.is_contiguous() else torch.empty_like(output, memory_format=torch.contiguous_format)
    )
    group = channel.transport.group
    work = dist.all_to_all_single(
        whole, input.detach().contiguous(), output_splits, input_splits, group=group, async_op=async_op
    )
    return _end([work], [output], lambda: _put(output, whole), async_op)


def broadcast(channel: Channel, tensor: Tensor, source: int, async_op: bool) -> Work | None:
    """torch's broadcast from the group's rank `source`."""
    row = tensor.detach() if tensor.is_contiguous() else tensor.detach().contiguous()
    work = dist.broadcast(row, group=channel.transport.group, group_src=source, async_op=async_op)
    return _end([work], [tensor], lambda: _put(tensor, row), async_op)


def _put(target: Tensor, row: Tensor) -> None:
    if not target.is_contiguous():
        target.detach().copy_(row.view(target.shape))


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
        self._works = works
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
        return self._future.done() and all(work.is_completed() for work in self._works)
