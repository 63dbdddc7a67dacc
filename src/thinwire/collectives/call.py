"""One call of a verb: numbered, compared with the other ranks' if it is the first of its kind, its plan found.

[Note: Known calls] A small call takes so little time that some tens of microseconds of Python can be seen. So a call
like an earlier one is found by its raw arguments, before anything is checked or compared.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from thinwire.collectives.channel import Channel, IssuedCall, bounded, known_channel
from thinwire.collectives.checks import check_step
from thinwire.collectives.groups import Group
from thinwire.collectives.measuring import Trial, fastest
from thinwire.collectives.peers import CallSite, Lengths
from thinwire.collectives.pipeline import broken
from thinwire.collectives.plan import CallPlan, PlanKey, plan_call

_PLAIN = (Tensor, nn.Parameter)
_SHAPE = operator.attrgetter("shape")
_NO_PLAN = CallPlan("")  # of calls that are not planned here


def issue_call(
    channel: Channel,
    text: str,
    plan: CallPlan | None = None,
    *,
    outputs: Sequence[Tensor] = (),
    step: int | None = None,
    async_op: bool = False,
    lengths: Lengths | None = None,
    anew: bool = False,
) -> IssuedCall:
    """Count a call. Compare it with the other ranks' if it is the first of its kind, or `anew`."""
    with channel.lock:
        if channel.failure is not None:
            raise broken(channel.failure)
        known = text in channel.plans and not anew
        channel.calls += 1  # all ranks make their calls in the same order
        site = CallSite(channel.calls, text, known)
    most_sent = 0 if known and not channel.handshake.every_call else channel.compare(site, lengths)
    return IssuedCall(channel, site, plan or _NO_PLAN, outputs, step, async_op, most_sent)


class Arguments(NamedTuple):
    """What a verb was called with, as its caller gave it."""

    verb: str
    tensors: Sequence[Tensor]
    group: Group
    codec: Any
    algorithm: str
    how: tuple[Any, ...] = ()  # the op of a sum, or the two names of a broadcast's source


def issue_known(given: Arguments, step: int | None) -> IssuedCall | None:
    """Issue a call like one remembered for these arguments; None if there is none. See [Note: Known calls]."""
    verb, tensors, group, codec, algorithm, how = given
    members: Any = dist.group.WORLD if group is None else group
    try:
        channel = known_channel(members, tensors[0].device)
        kind = verb, codec, algorithm, how, tensors[0].dtype, *map(_SHAPE, tensors)
        plan = None if channel is None else channel.known.get(kind)
    except (TypeError, AttributeError, IndexError):  # wrong arguments: the checks raise for them
        return None
    if channel is None or plan is None:
        return None
    for tensor in tensors:
        if type(tensor) not in _PLAIN or tensor.dtype != tensors[0].dtype or tensor.device != channel.device:
            return None
        if tensor.requires_grad or not tensor.is_contiguous():
            return None
    if step is not None:
        check_step(step)  # before the call counts
    return issue_call(channel, plan.text, plan, step=step)


def remember(call: IssuedCall, given: Arguments) -> None:
    """From now on `issue_known` finds the plan of calls like this one, unless all calls are compared."""
    channel = call.channel
    verb, tensors, _, codec, algorithm, how = given
    if channel.handshake.every_call or len(channel.transports) > 1 or any(t.is_complex() for t in tensors):
        return
    if not any(type(part) is dist.ReduceOp for part in how):  # one with a factor, which is not compared
        bounded(channel.known)[verb, codec, algorithm, how, tensors[0].dtype, *map(_SHAPE, tensors)] = call.plan


def issue_planned(
    channel: Channel,
    key: PlanKey,
    step: int | None,
    trial: Trial,
    lengths: Lengths | None = None,
    mesh: DeviceMesh | None = None,
) -> IssuedCall:
    """Issue a call with its plan: compared and decided the first time, looked up afterwards.

    `trial`: what is timed where the fastest algorithm is asked for. Ranks may measure together to decide; if one fails,
    the others raise its error too. `mesh`: of nodes, for a sum.
    """
    text = str(key)
    plan = channel.plans.get(text)
    call = issue_call(channel, text, plan, step=step, lengths=lengths, anew=plan is None)
    if plan is not None:
        return call
    choose = fastest(channel, key.kind, key.dtype, call.most_sent or key.numel(channel.world), trial)
    decide = functools.partial(plan_call, key, channel.transports, mesh, call.most_sent, choose)
    call.plan = channel.plans[text] = channel.failures.guard(call.site, decide)
    return call
