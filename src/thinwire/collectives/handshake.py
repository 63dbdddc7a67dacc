"""Agreement of ranks: the first call of a kind is compared over the group's store, before any data moves.

[Note: Handshake] A call is described in one line of text. On the first call of that line every rank puts its line
into the group's store and reads the others'; where they differ, every rank raises the same error and the group stays
usable. Later calls of the same line are free, so two ranks that mix up calls they have both made before are not
compared; THINWIRE_DEBUG=1 compares every call. A rank that waits long for a message says in the store where it is and
looks where the others are, so that it too raises when one of them is held up in a handshake about something else.
"""

import os
import time
from collections.abc import Sequence
from typing import NoReturn

import torch.distributed as dist

from thinwire.collectives import transport
from thinwire.errors import CollectiveError, DisagreementError

_LOOK_S = 1.0
_JOIN = "\x1e"  # between the answers of several ranks


class BrokenError(DisagreementError):
    """A disagreement found when messages were under way: the group cannot be used any more."""


class Handshake:
    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        self.rank = group.rank()
        self.world = group.size()
        self.every_call = os.environ.get("THINWIRE_DEBUG", "0") not in ("", "0")
        self._store = group.get_group_store()
        self._name = f"thinwire/{name}"
        self._patience_s = transport.timeout_s(group)

    def compare(self, number: int, call: str) -> list[str]:
        """The calls of all ranks at operation `number` of the group; raises where one waits in another call."""
        key = f"{self._name}/{number}"
        self._store.set(f"{key}/{self.rank}", call)
        calls = [call if rank == self.rank else self._await(key, number, rank, call) for rank in range(self.world)]
        if self._store.add(f"{key}/read", 1) == self.world:  # the last reader leaves nothing behind
            for last in (*range(self.world), "read"):
                self._store.delete_key(f"{key}/{last}")
        return calls

    def look(self, number: int, call: str) -> None:
        """Say that this rank waits in `call`, and raise if another is held up in a different one of that number."""
        self._store.set(f"{self._name}/at/{self.rank}", f"{number}\n{call}")
        for rank in range(self.world):
            theirs = self._read(f"{self._name}/{number}/{rank}")
            if rank != self.rank and theirs is not None and _first(theirs) != call:
                _raise_pair(number, {self.rank: call, rank: _first(theirs)})

    def _await(self, key: str, number: int, rank: int, call: str) -> str:
        """What a rank wrote, polled for: the store's own wait would log a warning at every look."""
        start = time.monotonic()
        looked = start
        pause = 1e-4
        while (now := time.monotonic()) - start < self._patience_s:
            answer = self._read(f"{key}/{rank}")
            if answer is not None:
                return answer
            if now - looked > _LOOK_S:
                looked = now
                # A rank that takes the call for an old one does not shake hands: it waits for messages, and says where.
                at, theirs = (self._read(f"{self._name}/at/{rank}") or "0\n").split("\n", 1)
                if int(at) == number and theirs != _first(call):
                    _raise_pair(number, {self.rank: _first(call), rank: theirs})
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        raise CollectiveError(
            f"rank {rank} did not come to operation {number} of this group ({_first(call)}) within its timeout of "
            f"{self._patience_s:g} s: see whether that rank still runs"
        )

    def _read(self, key: str) -> str | None:
        return str(self._store.get(key), "utf-8") if self._store.check([key]) else None


def check(shakes: Sequence[Handshake], number: int, call: str, *, details: str = "") -> list[str]:
    """Raise DisagreementError on every rank unless all make the same call; the ranks' details if they do.

    Over the groups of a mesh in turn: what the first told each rank goes on to all of the second.
    """
    answers = [f"{call}\n{details}"]
    for shake in shakes:
        told = shake.compare(number, f"{call}\n{_JOIN.join(answers)}")
        answers = [answer for text in told for answer in text.split("\n", 1)[1].split(_JOIN)]
    calls, found = zip(*(answer.split("\n", 1) for answer in answers), strict=True)
    if any(other != call for other in calls):
        sides = {made: [str(rank) for rank, other in enumerate(calls) if other == made] for made in calls}
        named = "; ".join(
            f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)} called {made}" for made, ranks in sides.items()
        )
        raise DisagreementError(f"the ranks disagree about operation {number} of this group: {named}")
    return list(found)


def _first(call: str) -> str:
    return call.split("\n", 1)[0]


def _raise_pair(number: int, calls: dict[int, str]) -> NoReturn:
    named = "; ".join(f"rank {rank} called {call}" for rank, call in sorted(calls.items()))
    raise BrokenError(
        f"the ranks disagree about operation {number} of this group: {named}. Messages are under way: make a new group"
    )
