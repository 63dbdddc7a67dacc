"""torch's own verbs behind the same signatures: what `plain` runs. Exact, any dtype torch takes.

gloo lacks averages, sums that are multiplied first, and lists of uneven lengths: they are made of what it has.
"""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

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


# [Note: Quick calls] Small messages end here, and there some tens of microseconds of Python can be seen. A blocking
# call of a kind that was decided to be torch's own is looked up first thing and handed on with nothing around it.
_NOW: dict[str, Callable[..., object]] = {
    "all_reduce": primitives.sum_now,
    "reduce_scatter": lambda g, out, x: primitives.reduce_scatter_single(out.view(-1), x.view(-1), group=g),
    "all_gather": lambda g, out, x: primitives.all_gather_single(out.view(-1), x.view(-1), group=g),
    "all_to_all": lambda g, out, x: dist.all_to_all_single(out.view(-1), x.view(-1), group=g),
    "broadcast": lambda g, x, src, group_src: dist.broadcast(x, src, g, False, group_src),
}


def remember(
    channel: Channel, verb: str, tensors: Sequence[Tensor], *kind: object, extra: tuple[object, ...] = ()
) -> None:
    """From now on `quick` serves blocking calls like this one."""
    if not tensors[0].is_complex():
        channel.settled[("quick", verb, *(tensor.shape for tensor in tensors), tensors[0].dtype, *kind, *extra)] = True


def quick(
    verb: str, tensors: Sequence[Tensor], group: primitives.Group, *kind: object, extra: tuple[object, ...] = ()
) -> bool:
    """Run torch's own verb where that was decided on before; False where it was not. See [Note: Quick calls]."""
    try:
        members = dist.group.WORLD if group is None else group
        channel = schedule.known(members, tensors[0].device)
        key = ("quick", verb, *(tensor.shape for tensor in tensors), tensors[0].dtype, *kind, *extra)
        if key not in channel.settled or channel.failure is not None:
            return False
    except (KeyError, TypeError, AttributeError):  # new, or not what it should be: the long way says so
        return False
    if not all(tensor.is_contiguous() and tensor.dtype == tensors[0].dtype for tensor in tensors):
        return False
    with channel.lock:
        channel.calls += 1
    _NOW[verb](members, *tensors, *extra)
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
    """torch's reduce_scatter into one tensor."""
    whole, group = _row(output), channel.transport.group
    op = reduction.torch_op if native(channel) else dist.ReduceOp.SUM
    work = primitives.reduce_scatter_single(whole, _row(input), op, group=group, async_op=async_op)

    def finish() -> None:
        if not native(channel) and reduction.scale(channel.transport.world) != 1.0:
            _multiply(whole, reduction, channel.transport.world)
        _put(output, whole)

    if async_op and not native(channel):
        return _Waited(work, outputs, finish)
    return _end([work], outputs, finish, async_op)


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
            try:
                for future in gathered.value():
                    future.value()
                finish()
            except BaseException as error:
                self._error = error
                raise
            finally:
                self._done.set()
            return outputs

        self._future = futures.then(end)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when the outputs may be read (on a GPU: by what the current stream runs next), or raise."""
        super().wait(timeout)
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        """Whether the outputs are final, without waiting."""
        return self._future.done()


class _Waited(Work):
    """A work of torch's that has no future (gloo's reduce_scatter): whoever waits first finishes it."""

    def __init__(self, work: dist.Work, outputs: list[Tensor], finish: Callable[[], None]) -> None:
        super().__init__(outputs)
        self._work, self._finish = work, finish
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when the outputs may be read, or raise."""
        if timeout is not None:
            self._poll(timeout)
        with self._lock:
            if not self._done.is_set():
                try:
                    self._work.wait()
                    self._finish()
                except RuntimeError as error:
                    self.failed(error)
                else:
                    self.finished()
        return super().wait()

    def _poll(self, timeout: timedelta) -> None:
        """torch's own wait with a limit would break the group."""
        end = time.monotonic() + timeout.total_seconds()
        while not (self._done.is_set() or self._work.is_completed()):
            if time.monotonic() > end:
                raise TimeoutError(f"the collective did not end within {timeout}")
            time.sleep(1e-3)

    def is_completed(self) -> bool:
        """Whether the outputs are final, without waiting."""
        return self._done.is_set() or (self._work.is_completed() and self.wait())

    def get_future(self) -> "torch.futures.Future[list[Tensor]]":
        """A future of the outputs; a thread of its own waits for them."""
        threading.Thread(target=self.wait, daemon=True).start()
        return super().get_future()
