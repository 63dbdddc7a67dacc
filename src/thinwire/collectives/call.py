"""One call of a verb: numbered, compared with the other ranks' where it is the first of its kind, its plan found."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from thinwire.collectives import handshake
from thinwire.collectives.channel import Channel
from thinwire.collectives.checks import check_step
from thinwire.collectives.handshake import BrokenError
from thinwire.collectives.measuring import Trial, fastest
from thinwire.collectives.operations import TAGS, Setting, VerbOperation
from thinwire.collectives.pipeline import broken
from thinwire.collectives.plan import CallPlan, PlanKey, plan_verb
from thinwire.collectives.programs import Copying, Program
from thinwire.collectives.work import Work


class Call:
    def __init__(self, channel: Channel, text: str, *, known: bool, details: str = "") -> None:
        self.channel = channel
        self.text = text
        self.known = known  # whether one like it was made before
        with channel.lock:
            if channel.failure is not None:
                raise broken(channel.failure)
            channel.calls += 1
            self.number = channel.calls
        self.answers: list[str] = []  # the ranks' details, where they were compared
        self.free_next_time = not channel.handshakes[0].every_call
        if not known or not self.free_next_time:
            with _noting_failure(channel):
                self.answers = handshake.check(channel.handshakes, self.number, text, details=details)

    def setting(self, plan: CallPlan, step: int | None, scratch: tuple[int, int] | None = None) -> Setting:
        """What an operation of this call needs to know; `scratch` where the plan does not say it."""
        assert plan.codec is not None
        channel = self.channel
        tags = tuple(link.draw_tags(TAGS) for link in channel.transports)
        number = channel.next_step() if step is None else check_step(step)
        chunk_bytes, scratch_bytes = scratch or (plan.chunk_bytes, plan.scratch_bytes)
        return Setting(channel.transport, plan.codec, number, tags, chunk_bytes, scratch_bytes)

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
        first = not self.known
        rows = [tensor.detach() for tensor in tensors]
        if all(row.is_contiguous() for row in rows):
            return self.channel.start(program, rows, outputs, number, async_op=async_op, first=first)
        copying = Copying(program, written)
        return self.channel.start(copying, rows, outputs, number, async_op=async_op, first=first)

    def run(
        self,
        operation: VerbOperation,
        outputs: Sequence[Tensor],
        async_op: bool,
        copies: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> Work | None:
        """What a verb returns: the work of the operation, or None once it is done."""
        operation.copies_back(outputs, copies)
        work = self.channel.run(operation, self.look)
        if async_op:
            return work
        work.wait()
        return None

    def look(self) -> None:
        look(self.channel, self.number, self.text)


def look(channel: Channel, number: int, text: str) -> None:
    """Say where this rank waits, and raise if another is held up in a different call."""
    with _noting_failure(channel):
        for shake in channel.handshakes:
            shake.look(number, text)


@contextlib.contextmanager
def _noting_failure(channel: Channel) -> Iterator[None]:
    try:
        yield
    except BrokenError as error:
        channel.disagreed = str(error)
        raise


def planned(channel: Channel, key: PlanKey, decide: Callable[[], CallPlan]) -> tuple[Call, CallPlan]:
    """A call and its plan: compared and decided the first time, looked up afterwards."""
    plan = channel.plans.get(key)
    call = Call(channel, str(key) if plan is None else plan.text, known=plan is not None)
    if plan is None:
        plan = decide()
        channel.remember(key, plan)
    return call, plan


def planned_verb(
    channel: Channel, key: PlanKey, verb: str, part: int, numel: int, trial: Trial, shares: Sequence[int]
) -> tuple[Call, CallPlan]:
    """The same for a verb of one phase that moves `numel` elements, of which the largest part of a rank has `part`."""

    def decide() -> CallPlan:
        in_group = functools.partial(trial, group=channel.transport.group)
        choose = fastest(channel, verb, key.dtype, numel, in_group, shares)
        return plan_verb(key, verb, part, numel, channel.transport, choose)

    return planned(channel, key, decide)
