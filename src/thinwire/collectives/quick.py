"""Calls of a kind that was decided on before: looked up first thing, and started with nothing around them.

[Note: Quick calls] Where a call takes little of the wire or the GPU, some tens of microseconds of Python can be seen.
So a call whose like was made before is found by what it was given, before anything is checked or compared: torch's own
verb on a group (blocking calls), or a program of a GPU's stream.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn

from thinwire.collectives import torch_verbs, transport
from thinwire.collectives.call import Call
from thinwire.collectives.channel import bounded, known_channel
from thinwire.collectives.checks import check_step
from thinwire.collectives.failures import CallSite
from thinwire.collectives.programs import Program
from thinwire.collectives.work import Work

UNKNOWN = cast(Work, object())  # in place of a result: nothing of this kind was remembered
_PLAIN = (Tensor, nn.Parameter)
_NOW: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda g, x, op: g.allreduce([x], _OPTIONS[op]),  # without the checks of torch's Python side
    "reduce_scatter": lambda g, out, x, op: transport.reduce_scatter_single(
        out.view(-1), x.view(-1), group=g, async_op=True
    ),
    "all_gather": lambda g, out, x: transport.all_gather_single(out.view(-1), x.view(-1), group=g, async_op=True),
    "all_to_all": lambda g, out, x: dist.all_to_all_single(
        out.view(-1), torch_verbs.apart(out, x).view(-1), group=g, async_op=True
    ),
    "broadcast": lambda g, x, src, group_src: dist.broadcast(x, src, g, True, group_src),
}
_OPTIONS: dict[Any, Any] = {op: dist.AllreduceOptions() for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)}
for _op, _options in _OPTIONS.items():
    _options.reduceOp = _op
    _options.asyncOp = True


def remember(
    call: Call,
    program: Program | None,
    verb: str,
    tensors: Sequence[Tensor],
    codec: object,
    algorithm: str,
    *how: object,
) -> None:
    """From now on `quick` serves calls like this one, by torch's own verb or a program, unless all are compared."""
    channel = call.channel
    if not call.free_next_time or channel.world == 1 or any(t.is_complex() for t in tensors):
        return
    if any(type(part) is dist.ReduceOp for part in how):  # one with a factor, which is not compared
        return
    if program is not None or len(channel.transports) == 1:
        key = (verb, codec, algorithm, how, tensors[0].dtype, *[t.shape for t in tensors])
        bounded(channel.quick)[key] = call.site.text, program


def quick(
    verb: str,
    tensors: Sequence[Tensor],
    group: transport.Group,
    codec: object,
    algorithm: str,
    *how: object,
    step: int | None = None,
    async_op: bool = False,
) -> Work | None:
    """Run a call whose like was remembered; UNKNOWN where it was not. `how`: the op of a sum, or a broadcast's source.

    The first of the tensors is written.
    """
    try:
        members: Any = dist.group.WORLD if group is None else group
        channel = known_channel(members, tensors[0].device)
        if channel is None:
            return UNKNOWN
        dtype = tensors[0].dtype
        text, program = channel.quick[verb, codec, algorithm, how, dtype, *[t.shape for t in tensors]]
    except (KeyError, TypeError, AttributeError):  # new, or not what it should be: the long way says so
        return UNKNOWN
    for tensor in tensors:
        if type(tensor) not in _PLAIN or not tensor.is_contiguous():
            return UNKNOWN
        if tensor.dtype != dtype or tensor.device != channel.device or tensor.requires_grad:
            return UNKNOWN
    if channel.failure or (program is None and (async_op or transport.is_coalescing(members))):
        return UNKNOWN
    if step is not None:
        check_step(step)  # before the call counts
    number = channel.next_call()
    if program is None:
        torch_verbs.wait(_NOW[verb](members, *tensors, *how), channel, CallSite(number, text))
        return None
    at = channel.next_step() if step is None else step
    return channel.start(program, tensors, tensors[:1], at, text=text, async_op=async_op)
