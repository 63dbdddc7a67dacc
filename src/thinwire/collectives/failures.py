"""How a group ends: one sentence in its store, which all ranks raise.

[Note: Failures] A rank that fails in the middle of a call, or loses another rank, writes one sentence into the group's
store and closes the group's connections. This wakes every rank that waits for a message; each looks into the store and
raises the sentence that came first. A store that hangs or is gone delays nobody for long: each rank then raises what it
knows itself.
"""

import contextlib
import math
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from torch._C import _distributed_c10d as c10d

from thinwire.collectives.transport import LostRankError, Transport, timeout_s
from thinwire.errors import PeerError

ASK_S = 0.5  # how long a rank that fails waits for the store
_ASKS = 10  # in as many parts: a machine that stands still for seconds uses up one of them, not all
_PAUSE_S = 0.2  # if the store does not answer, a rank waits this long before it closes its connections
_LATE = 0.9  # of the group's timeout: a rank that waited longer ran into it
Found = TypeVar("Found")


@dataclass
class CallSite:
    """A call in the order of a group's calls."""

    number: int
    text: str
    known: bool = True  # the ranks have compared a call like it before
    step: int | None = None

    def __str__(self) -> str:
        step = "" if self.step is None else f" at step {self.step}"
        return f"{self.text}{step}{'' if self.known else ' for the first time'}"


class Failures:
    """What ended a group, or the groups of a mesh: `over` is None while nothing did."""

    def __init__(self, links: Sequence[Transport]) -> None:
        self.rank = links[0].rank if len(links) == 1 else links[0].rank * links[1].world + links[1].rank
        self.names = "/".join(link.group.group_name for link in links)
        self.timeout_s = min(timeout_s(link.group) for link in links)
        self.over: str | None = None
        self.own_key = secrets.randbits(62)
        self._links = links
        world = math.prod(link.world for link in links)
        self._others = f"rank {1 - self.rank}" if world == 2 else "another rank"
        store: Any = links[0].group.get_group_store()
        while len(links) > 1 and isinstance(store, c10d.PrefixStore):
            store = store.underlying_store  # which all ranks of a mesh have
        self._store = store
        self._key = ""  # in the store, once the ranks have agreed on one
        self._lock = threading.Lock()

    def open(self, key: int) -> None:
        """From now on use the store, under a key that all ranks have and no group had before."""
        self._key = self._key or f"thinwire/{key:x}/over"

    def attend(self, site: CallSite, run: Callable[[], Found]) -> Found:
        """Return the result of `run`, which waits for messages of this call."""
        try:
            return run()
        except LostRankError as error:
            lost = error.with_traceback(None)
        raise self.ended(lost, site)  # not above: the new error would hold the old one, whose frames hold tensors

    def ended(self, error: BaseException, site: CallSite) -> BaseException:
        """End the group after a call failed half-way, and return what this rank raises."""
        with self._lock:
            if self.over is None:
                sentence = self._sentence(error, site)
                first = _within(ASK_S, lambda: str(self._store.compare_set(self._key, "", sentence), "utf-8"))
                if first is None:  # other ranks find out who is lost before this one closes its connections
                    time.sleep(_PAUSE_S)
                self.over = first or sentence
                for link in self._links:
                    link.close()
        return PeerError(self.over) if isinstance(error, LostRankError) else error

    def _sentence(self, error: BaseException, site: CallSite) -> str:
        where = f"{site} (operation {site.number} of group {self.names!r})"
        if not isinstance(error, LostRankError):
            what = f"rank {self.rank} failed in {where}: {type(error).__name__}: {error}"
        elif error.waited < _LATE * self.timeout_s:
            what = f"rank {self.rank} lost {self._named(error)} in {where}: {error}"
        else:
            what = (
                f"rank {self.rank} waited for {self._named(error)} in {where} for the group's timeout of "
                f"{self.timeout_s:g} s: see whether that rank still runs and makes the same calls (THINWIRE_DEBUG=1 "
                "compares all calls)"
            )
        return f"{what}. Make a new group to go on"

    def _named(self, lost: LostRankError) -> str:
        return self._others if lost.rank is None else f"rank {lost.rank}"


def _within(seconds: float, question: Callable[[], Found]) -> Found | None:
    """The answer of a store that may hang; None if it raises or takes longer."""
    answers: SimpleQueue[Found] = SimpleQueue()

    def ask() -> None:
        with contextlib.suppress(Exception):  # of a store that is gone
            answers.put(question())

    thread = threading.Thread(target=ask, name="thinwire-store", daemon=True)
    thread.start()
    for _ in range(_ASKS):
        with contextlib.suppress(Empty):
            return answers.get(timeout=seconds / _ASKS)
        if not thread.is_alive():
            break
    return None
