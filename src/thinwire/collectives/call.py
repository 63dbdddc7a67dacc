"""One call of a verb: numbered, compared with the other ranks' where it is the first of its kind, its plan found."""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from thinwire.collectives import handshake, transport
from thinwire.collectives.channel import Channel, group_transports
from thinwire.collectives.checks import check_step
from thinwire.collectives.handshake import BrokenError
from thinwire.collectives.measuring import Trial, fastest
from thinwire.collectives.operations import TAGS, Setting
from thinwire.collectives.plan import CallPlan, PlanKey, plan_verb
from thinwire.collectives.transport import Group


class Traffic(NamedTuple):
    """Bytes of wires that this rank handed to the transport and took from it."""

    sent: int
    received: int


def traffic(group: Group = None) -> Traffic:
    """What thinwire's compressed collectives moved in a group so far. Calls served by torch itself are not counted."""
    links = group_transports(transport.resolve(group))
    return Traffic(sum(link.sent for link in links), sum(link.received for link in links))


class Call:
    """One call of a verb on a channel."""

    def __init__(self, channel: Channel, text: str, *, known: bool, details: str = "") -> None:
        self.channel = channel
        self.text = text
        with channel.lock:
            channel.check_usable()
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

    def look(self) -> None:
        """Raise if another rank is held up in a different call."""
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
    channel: Channel, key: PlanKey, verb: str, part: int, numel: int, trial: Trial
) -> tuple[Call, CallPlan]:
    """The same for a verb of one phase that moves `numel` elements, of which the largest part of a rank has `part`."""
    choose = fastest(channel, verb, key.dtype, numel, trial)
    return planned(channel, key, lambda: plan_verb(key, verb, part, numel, channel.world, choose))
