"""torch's own verbs behind the same signatures: what `plain` runs. Exact, any dtype torch takes.

gloo lacks averages, sums that are multiplied first, and lists of uneven lengths: they are made of what it has.
"""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives import calls, primitives, schedule
from thinwire.collectives.calls import Call, Reduction
from thinwire.collectives.schedule import Channel, Work
from thinwire.errors import CollectiveError

Finish = Callable[[], None]


def native(channel: Channel) -> bool:
    """Whether the group's backend knows every op and verb (NCCL), or only the common ones (gloo)."""
    return isinstance(channel.transport, primitives.StreamTransport)


def all_reduce(
    call: Call, parts: Sequence[Tensor], outputs: list[Tensor], reduction: Reduction, async_op: bool
) -> Work | None:
    """torch's all_reduce, several tensors as one row; on a mesh inside its nodes, then across.

    Where the backend has no AVG or PREMUL_SUM, and on a mesh, it is a sum multiplied afterwards.
    """
    channel = call.channel
    row = _row(parts[0]) if len(parts) == 1 else torch.cat([_row(part) for part in parts])
    transports = [link for link in reversed(channel.transports) if link.world > 1]
    whole = native(channel) and len(transports) == 1
    op = reduction.torch_op if whole else dist.ReduceOp.SUM
    for transport in transports[:-1]:
        dist.all_reduce(row, op, group=transport.group)
    work = dist.all_reduce(row, op, group=transports[-1].group, async_op=True)
    world = calls.world_of(channel)

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
    channel = call.channel
    whole, sent, group = _row(output), _row(input), channel.transport.group
    op = reduction.torch_op if native(channel) else dist.ReduceOp.SUM
    work = primitives.reduce_scatter_single(whole, sent, op, group=group, async_op=True)

    def finish() -> None:
        if not native(channel):
            _multiply(whole, reduction, channel.transport.world)
        _put_parts([output], whole)

    return _end(call, work, outputs, finish, async_op, whole, sent)


def all_gather(call: Call, output: Tensor, input: Tensor, outputs: list[Tensor], async_op: bool) -> Work | None:
    """torch's all_gather into one tensor."""
    whole, sent, group = _row(output), _row(input), call.channel.transport.group
    work = primitives.all_gather_single(whole, sent, group=group, async_op=True)
    return _end(call, work, outputs, _putting([output], whole), async_op, whole, sent)


def all_gather_list(
    call: Call, parts: Sequence[Tensor], input: Tensor, outputs: list[Tensor], async_op: bool
) -> Work | None:
    """torch's all_gather; of uneven lengths as an exchange in which every rank sends the same to all."""
    sizes, sent, group = [part.numel() for part in parts], _row(input), call.channel.transport.group
    if len(set(sizes)) == 1 and all(part.is_contiguous() for part in parts):
        rows = [_row(part) for part in parts]
        return _end(call, dist.all_gather(rows, sent, group=group, async_op=True), outputs, None, async_op, sent)
    whole, copies = sent.new_empty(sum(sizes)), sent.repeat(len(sizes))
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
    whole, sent, group = _row(output), _row(input), call.channel.transport.group
    work = dist.all_to_all_single(whole, sent, *splits, group=group, async_op=True)
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
    "all_reduce": primitives.start_sum,
    "reduce_scatter": lambda g, out, x: primitives.reduce_scatter_single(
        out.view(-1), x.view(-1), group=g, async_op=True
    ),
    "all_gather": lambda g, out, x: primitives.all_gather_single(out.view(-1), x.view(-1), group=g, async_op=True),
    "all_to_all": lambda g, out, x: dist.all_to_all_single(out.view(-1), x.view(-1), group=g, async_op=True),
    "broadcast": lambda g, x, src, group_src: dist.broadcast(x, src, g, True, group_src),
}


def remember(call: Call, verb: str, tensors: Sequence[Tensor], *kind: object, extra: tuple[object, ...] = ()) -> None:
    """From now on `quick` serves blocking calls like this one, unless every call has to be compared."""
    if call.free_next_time and not tensors[0].is_complex() and len(call.channel.transports) == 1:
        key = ("quick", verb, *(tensor.shape for tensor in tensors), tensors[0].dtype, *kind, *extra)
        call.channel.settled[key] = call.text


def quick(
    verb: str, tensors: Sequence[Tensor], group: primitives.Group, *kind: object, extra: tuple[object, ...] = ()
) -> bool:
    """Run torch's own verb where that was decided on before; False where it was not. See [Note: Quick calls]."""
    try:
        members = dist.group.WORLD if group is None else group
        channel = schedule.known(members, tensors[0].device)
        text = channel.settled["quick", verb, *(tensor.shape for tensor in tensors), tensors[0].dtype, *kind, *extra]
    except (KeyError, TypeError, AttributeError):  # new, or not what it should be: the long way says so
        return False
    if channel.failure or not all(tensor.is_contiguous() and tensor.dtype == tensors[0].dtype for tensor in tensors):
        return False
    with channel.lock:
        channel.calls += 1
        number = channel.calls
    _wait(_NOW[verb](members, *tensors, *extra), channel, number, text)
    return True


def _wait(work: Any, channel: Channel, number: int, text: str) -> None:
    """Wait for a work of torch's; one that takes long looks whether the ranks disagree."""
    if native(channel):
        work.wait()
        return
    while True:
        try:
            work.wait(_LOOK)
            return
        except RuntimeError:
            if work.is_completed():
                work.wait()  # raises what went wrong
                return
        calls.look(channel, number, text)


_LOOK = timedelta(seconds=1)


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
    if len(parts) == 1 and parts[0].is_contiguous():
        return None
    return lambda: _put_parts(parts, whole)


def _put_parts(parts: Sequence[Tensor], whole: Tensor) -> None:
    if len(parts) == 1 and parts[0].is_contiguous():
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
    if native(call.channel):
        return _on_stream(call.channel, work, outputs, finish, temporaries)
    if finish is None and _has_future(work):
        return _Direct(call, work, outputs)
    return (_Torch if _has_future(work) else _Waited)(call, work, outputs, finish or _nothing)


def _nothing() -> None:
    pass


def _has_future(work: Any) -> bool:
    """gloo's reduce_scatter has none."""
    try:
        return work.get_future() is not None
    except RuntimeError:
        return False


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


class _Direct(Work):
    """A work of torch's that leaves nothing to do."""

    def __init__(self, call: Call, work: Any, outputs: list[Tensor]) -> None:  # the base's makes what is not needed
        self._call, self._work, self._outputs = call, work, outputs

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when the outputs may be read, or raise."""
        if timeout is not None:
            _poll(self._work.is_completed, timeout)
        _wait(self._work, self._call.channel, self._call.number, self._call.text)
        return True

    def is_completed(self) -> bool:
        """Whether the outputs are final, without waiting."""
        return bool(self._work.is_completed())

    def get_future(self) -> "torch.futures.Future[list[Tensor]]":
        """A future of the list of outputs."""
        outputs = self._outputs

        def value(future: "torch.futures.Future[object]") -> list[Tensor]:
            future.value()
            return outputs

        future: torch.futures.Future[list[Tensor]] = self._work.get_future().then(value)
        return future


class _Torch(Work):
    """A work of torch's as one of ours; what remains to be done is done once, in its future's callback."""

    def __init__(self, call: Call, work: Any, outputs: list[Tensor], finish: Finish) -> None:
        super().__init__(outputs)
        self.look = call.look

        def end(future: "torch.futures.Future[object]") -> list[Tensor]:
            try:
                future.value()
                with torch.inference_mode():  # outputs may be inference tensors, and this is gloo's thread
                    finish()
            except BaseException as error:
                self._error = error
                raise
            finally:
                self._done.set()
            return outputs

        self._future = work.get_future().then(end)


class _Waited(Work):
    """A work of torch's that has no future: whoever waits first finishes it."""

    def __init__(self, call: Call, work: Any, outputs: list[Tensor], finish: Finish) -> None:
        super().__init__(outputs)
        self._call, self._work, self._finish = call, work, finish
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when the outputs may be read, or raise."""
        if timeout is not None:
            _poll(lambda: self._done.is_set() or self._work.is_completed(), timeout)
        with self._lock:
            if not self._done.is_set():
                try:
                    _wait(self._work, self._call.channel, self._call.number, self._call.text)
                    with torch.inference_mode():
                        self._finish()
                except (RuntimeError, CollectiveError) as error:
                    self.failed(error)
                else:
                    self.finished()
        return super().wait()

    def is_completed(self) -> bool:
        """Whether the outputs are final, without waiting."""
        return self._done.is_set() or (self._work.is_completed() and self.wait())

    def get_future(self) -> "torch.futures.Future[list[Tensor]]":
        """A future of the outputs; a thread of its own waits for them."""
        threading.Thread(target=self.wait, daemon=True).start()
        return super().get_future()


def _poll(done: Callable[[], bool], timeout: timedelta) -> None:
    end = time.monotonic() + timeout.total_seconds()
    while not done():
        if time.monotonic() > end:
            raise TimeoutError(f"the collective did not end within {timeout}")
        time.sleep(1e-3)
