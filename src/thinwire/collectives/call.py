"""One call of a verb: numbered, compared with the other ranks' where it is the first of its kind, its plan found."""

import functools
import zlib
from collections.abc import Callable, Sequence

from torch import Tensor

from thinwire.collectives.channel import Channel, bounded
from thinwire.collectives.checks import check_step
from thinwire.collectives.failures import CallSite
from thinwire.collectives.handshake import Lengths
from thinwire.collectives.measuring import Trial, fastest
from thinwire.collectives.operations import Setting, VerbOperation
from thinwire.collectives.pipeline import broken
from thinwire.collectives.plan import CallPlan, PlanKey, plan_verb
from thinwire.collectives.programs import Copying, Program
from thinwire.collectives.transport import lost_in
from thinwire.collectives.work import Work
from thinwire.errors import ThinwireError


class Call:
    """Compared with the other ranks' unless one like it was before; `anew`: in any case."""

    def __init__(self, channel: Channel, text: str, *, lengths: Lengths | None = None, anew: bool = False) -> None:
        self.channel = channel
        with channel.lock:
            if channel.failure is not None:
                raise broken(channel.failure)
            known = text in channel.kinds and not anew
            self.site = CallSite(channel.next_call(), text, known)
        self.free_next_time = not channel.handshake.every_call
        if not (self.site.known and self.free_next_time):
            channel.compare(self.site, lengths)

    def setting(self, plan: CallPlan, step: int | None) -> Setting:
        """What an operation of this call needs to know."""
        assert plan.codec is not None
        channel = self.channel
        number = channel.next_step() if step is None else check_step(step)
        self.site.step = number
        mark = _hash(self.site.text) ^ number & 0xFFFFFFFF
        tags = tuple(link.draw_tags(mark) for link in channel.transports)
        return Setting(channel.transport, plan.codec, number, tags, plan.chunk_bytes, plan.scratch_bytes)

    def start(
        self,
        program: Program,
        tensors: Sequence[Tensor],
        outputs: Sequence[Tensor],
        step: int | None,
        async_op: bool,
        written: int = 1,
    ) -> Work | None:
        """Run a program that writes the first `written` tensors; where one is not contiguous, on copies.

        `outputs` are the caller's own, of which they are parts or other views.
        """
        number = self.channel.next_step() if step is None else check_step(step)
        first = not self.site.known
        rows = [tensor.detach() for tensor in tensors]
        run = program if all(row.is_contiguous() for row in rows) else Copying(program, written)
        text = self.site.text
        return self.channel.start(run, rows, outputs, number, text=text, async_op=async_op, first=first)

    def run(
        self,
        operation: VerbOperation,
        outputs: Sequence[Tensor],
        async_op: bool,
        copies: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> Work | None:
        """What a verb returns: the work of the operation, or None once it is done."""
        operation.copies_back(outputs, copies)
        work = self.channel.run(operation, self.site)
        if async_op:
            return work
        work.wait()
        return None


@functools.lru_cache(maxsize=4096)
def _hash(text: str) -> int:
    """Not Python's own, which differs between processes."""
    return zlib.crc32(text.encode())


def planned(
    channel: Channel, key: PlanKey, decide: Callable[[], CallPlan], lengths: Lengths | None = None
) -> tuple[Call, CallPlan]:
    """A call and its plan: compared and decided the first time, looked up afterwards.

    Ranks may measure together to decide: one that fails tells the others.
    """
    plan = channel.plans.get(key)
    call = Call(channel, str(key) if plan is None else plan.text, lengths=lengths)
    if plan is not None:
        return call, plan
    try:
        plan = bounded(channel.plans)[key] = decide()
        return call, plan
    except ThinwireError:  # of all ranks alike, or told already
        raise
    except BaseException as error:
        lost = lost_in(error)
        if lost is None:
            channel.failures.ended(error, call.site)
            raise
    raise channel.failures.ended(lost, call.site)


def planned_verb(
    channel: Channel, key: PlanKey, verb: str, part: int, numel: int, trial: Trial, shares: Sequence[int]
) -> tuple[Call, CallPlan]:
    """The same for a verb of one phase that moves `numel` elements, of which the largest part of a rank has `part`."""

    def decide() -> CallPlan:
        in_group = functools.partial(trial, group=channel.transport.group)
        choose = fastest(channel, verb, key.dtype, numel, in_group, shares)
        return plan_verb(key, verb, part, numel, channel.transport, choose)

    return planned(channel, key, decide)
