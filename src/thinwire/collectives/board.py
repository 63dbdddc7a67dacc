"""What ranks tell each other when something is wrong: where they wait, and why a group has ended.

[Note: Board] Nobody who waits for a message can look around. So one thread of the process, the lookout, looks for all:
a rank that waits long writes into the group's store in which call it waits, and finds what others wrote. Where two wait
in different calls, the one that finds it writes the sentence that all ranks raise, and closes the connections of the
group, which wakes everybody who waits for one of them. A rank that fails by itself, or loses another, does the same. No
other thread touches the store, so that a store that hangs or is gone holds up nobody: then every rank says what it
knows itself, and a call that is merely late goes on.

[Note: Trail] On NCCL the host waits for nothing, and messages have no tags: calls that differ would mix, or hold up the
GPU until torch's watchdog comes. So every few seconds the lookout writes the last calls of the rank into the store,
and compares its neighbour's with what this rank called under the same numbers. Two new calls are not compared here:
ranks do that before they make them.
"""

import contextlib
import itertools
import json
import math
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

from torch._C import _distributed_c10d as c10d

from thinwire.collectives.transport import LostRankError, Transport, timeout_s
from thinwire.errors import CollectiveError, DisagreementError, PeerError

FIRST_TIME = " for the first time"  # ends the name of a call that is new
LOOK_S = 1.0  # how long a rank waits before it looks where the others are; then twice as long, and so on
_TELL_S = 0.5  # how long a rank that fails waits for the store
_TELLS = 10  # in so many parts: a machine that stands still for seconds uses up one of them, not all
_PAUSE_S = 0.2  # and where it has none, before it closes its connections
_FOLLOW_S = 5.0  # between two looks at a neighbour's trail
_LOOKS_PER_S = 200  # of all ranks together, nearly: very many ranks look less often
_KEPT = 4096  # calls of a trail that are kept; ranks are not further apart
_SHOWN = 8  # that are shown to the neighbour
Found = TypeVar("Found")
Asked = TypeVar("Asked")
_FIRST = "thinwire/first"  # of refusals, before ranks have found a key that no group had before
_DISAGREED = "disagreed"  # what a sentence in the store begins with, or with the other
_FAILED = "failed"


@dataclass
class Place:
    """Where a rank is in the order of a group's calls."""

    number: int
    text: str
    known: bool  # whether the ranks had compared a call like it before
    step: int | None = None  # where it is known
    details: str = ""  # of an exchange: the lengths that this rank sends and expects

    def differs(self, other: "Place") -> bool:
        """Whether two ranks that wait at the same number make different calls."""
        steps = {self.step, other.step} - {None}
        return self.text != other.text or self.known != other.known or len(steps) > 1

    def __str__(self) -> str:
        step = "" if self.step is None else f" at step {self.step}"
        return f"{self.text}{step}{'' if self.known else FIRST_TIME}"


class Trail:
    """The last calls of a rank, by number."""

    def __init__(self) -> None:
        self._calls: list[tuple[int, str]] = [(-1, "")] * _KEPT

    def add(self, number: int, text: str) -> None:
        self._calls[number % _KEPT] = number, text

    def at(self, number: int) -> str | None:
        """The call of that number; None where it was not noted, or is forgotten."""
        found, text = self._calls[number % _KEPT]
        return text if found == number else None

    def last(self, number: int) -> list[tuple[int, str]]:
        """The last few up to that number."""
        some = [self._calls[n % _KEPT] for n in range(max(0, number - _SHOWN + 1), number + 1)]
        return [call for call in some if 0 <= call[0] <= number]


@dataclass
class _Wait:
    place: Place
    look_at: float
    pause: float


class Line(Protocol):
    """What is known of a line of operations."""

    turn: int  # changes with everything it does
    place: Place | None  # of the operation whose messages it waits for


class Board:
    """What is known about the end of a group, or of the groups of a mesh: `over` is the sentence that ended it."""

    def __init__(self, links: Sequence[Transport]) -> None:
        self.rank = links[0].rank if len(links) == 1 else links[0].rank * links[1].world + links[1].rank
        self.names = "/".join(link.group.group_name for link in links)
        self.timeout_s = min(timeout_s(link.group) for link in links)
        self.over: str | None = None
        self.line: Line | None = None
        self._links = links
        store: Any = links[0].group.get_group_store()
        self._store = store if len(links) == 1 else _bottom(store)  # of a mesh the one that all of its ranks have
        self._seen = b""  # what stood there at the last look
        self.own_key = secrets.randbits(62)
        self.refused = False  # the last call of this rank raised before it sent anything, and the others were told
        self._prefix = ""  # of what stands in the store; nothing does before ranks have found a common one
        self._waits: dict[int, _Wait] = {}
        self._turn = -1  # of the line, at the last scan
        self._lock = threading.Lock()
        self._ranks = math.prod(link.world for link in links)
        in_file = isinstance(_bottom(self._store), c10d.FileStore)
        self._follow_at = math.inf if in_file else 0.0  # a file would grow with every look

    def open(self, key: int) -> None:
        """From now on tell the other ranks where this one waits, under a key that all have, and no group had before."""
        self._prefix = self._prefix or f"thinwire/{key:x}"

    def refuse(self, number: int, error: BaseException | None) -> None:
        """Tell those who wait in a call that this rank raised before it sent anything; None takes that back."""
        self.refused = error is not None
        where = f"(operation {number} of group {self.names!r})"
        what = f"rank {self.rank} could not make its call {where}: {type(error).__name__}: {error}"
        told = "" if error is None else f"{number}\n{_FAILED}: {what}. Make a new group to go on"
        lookout.ask(lambda: self._store.set(f"{self._prefix or _FIRST}/refused", told))

    def key(self, number: int) -> str:
        """What belongs to a call that ranks have compared: a key for the group's store, the same on all ranks."""
        return f"{self._prefix}/{number}"

    @contextlib.contextmanager
    def waiting(self, place: Place) -> Iterator[None]:
        """Inside, the lookout looks for a thread that waits in `place`."""
        self.begin_wait(place)
        try:
            yield
        finally:
            self.end_wait(place)

    @property
    def has_waits(self) -> bool:
        return bool(self._waits)

    def begin_wait(self, place: Place) -> None:
        self._waits[place.number] = _Wait(place, time.monotonic() + LOOK_S, LOOK_S)

    def end_wait(self, place: Place) -> None:
        self._waits.pop(place.number, None)

    def attend(self, place: Place, run: Callable[[], Found]) -> Found:
        """What `run` gives, which waits for messages of the call in `place`."""
        try:
            with self.waiting(place):
                return run()
        except LostRankError as error:
            lost = error.with_traceback(None)
        raise self.ended(lost, place)  # not above: it would hold on to the other, whose frames hold tensors and groups

    def ended(self, error: BaseException, place: Place) -> BaseException:
        """A call failed half-way: tell the other ranks, and give what this one raises."""
        lost = error if isinstance(error, LostRankError) else None
        with self._lock:
            if self.over is None:
                late = lost is not None and lost.late and lost.rank is None  # for nobody knows whom
                others = lookout.ask(lambda: self._missing(place.number)) if late else None
                told = f"{_FAILED}: {self._sentence(error, place, others or 'another rank')}"
                number = 0 if lost is None else place.number  # of what a rank may have refused
                posted = lookout.ask(lambda: self._post(self._refusal(number) or told))
                if posted is None:  # others find out who is lost, before this rank seems to be
                    time.sleep(_PAUSE_S)
                self._end(posted or told)
        return error if lost is None else self.raised()

    def raised(self) -> CollectiveError:
        """The error of a group that has ended."""
        kind, _, told = (self.over or "").partition(": ")
        return DisagreementError(told) if kind == _DISAGREED else PeerError(told)

    def scan(self, now: float) -> None:
        """Look for everybody who has waited long. In the lookout's thread, as is all that follows."""
        line = self.line
        if line is not None and line.place is not None and line.turn == self._turn:
            self._waits.setdefault(-1, _Wait(line.place, now, LOOK_S))
        else:
            self._waits.pop(-1, None)
        self._turn = -1 if line is None else line.turn
        for wait in list(self._waits.values()):
            if now >= wait.look_at and self.over is None:
                wait.pause *= 2
                wait.look_at = now + wait.pause
                with contextlib.suppress(Exception):  # of a store that is gone: the wait goes on without it
                    self._look(wait.place)

    def _look(self, place: Place) -> None:
        """Write where this rank waits, unless another has; end the group if that one waits in a different call.

        So does a rank that could not make this call.
        """
        refusal = self._refusal(place.number)
        if refusal:
            self._end(self._post(refusal))
        if refusal or not self._prefix:
            return
        mine = _packed(self.rank, place)
        self._store.set(f"{self._prefix}/at/{self.rank}", mine)
        found = self._store.compare_set(f"{self._prefix}/at", self._seen, mine)
        if found != mine and _unpacked(found)[1].number < place.number:
            found = self._store.compare_set(f"{self._prefix}/at", found, mine)
        self._seen = found
        rank, theirs = _unpacked(found)
        if theirs.number == place.number and theirs.differs(place):
            self._clash(place.number, _called({self.rank: place, rank: theirs}))
        elif place.known and place.details:
            here = place.number, place.text
            if named := unfit({r: at.details for r, at in self._places().items() if (at.number, at.text) == here}):
                self._clash(place.number, named)

    def follow(self, trail: Trail, number: int, now: float) -> None:
        """Show the calls up to `number` to a neighbour, and look at another's. [Note: Trail]"""
        if now < self._follow_at or not self._prefix or self.over is not None:
            return
        self._follow_at = now + _FOLLOW_S + self._ranks / _LOOKS_PER_S
        told = f"{self._prefix}/over"
        neighbour = (self.rank + 1) % self._ranks
        theirs = f"{self._prefix}/trail/{neighbour}"
        try:
            if self._store.check([told]):
                self._end(str(self._store.get(told), "utf-8"))
                return
            self._store.set(f"{self._prefix}/trail/{self.rank}", json.dumps(trail.last(number)))
            shown = json.loads(self._store.get(theirs)) if self._store.check([theirs]) else []
        except Exception:  # of a store that is gone, as when the rank that has it has ended
            self._follow_at = math.inf
            return
        for at, text in shown:
            own = trail.at(at)
            if own not in (None, text) and not (str(own).endswith(FIRST_TIME) and text.endswith(FIRST_TIME)):
                with contextlib.suppress(Exception):
                    self._clash(at, _called({self.rank: own, neighbour: text}))
                return

    def _places(self) -> dict[int, Place]:
        """Where each rank of a group waited last, as far as the store knows."""
        keys = [f"{self._prefix}/at/{rank}" for rank in range(self._links[0].world)]
        return dict(_unpacked(self._store.get(key)) for key in keys if self._store.check([key]))

    def _clash(self, number: int, named: str) -> None:
        told = f"{_DISAGREED}: the ranks disagree about operation {number} of this group: {named}. "
        self._end(self._post(f"{told}Messages are under way: make a new group"))

    def _end(self, told: str | None) -> None:
        self.over = told
        for link in self._links:
            link.close()

    def _post(self, told: str) -> str | None:
        """The sentence that stands in the store, which is the first that came."""
        if not self._prefix:
            return self._refusal(1)
        return str(self._store.compare_set(f"{self._prefix}/over", "", told), "utf-8")

    def _refusal(self, number: int) -> str | None:
        """What a rank told that could not make this call; see `refuse`."""
        store = self._store
        key = f"{self._prefix or _FIRST}/refused"
        at, _, told = str(store.get(key), "utf-8").partition("\n") if store.check([key]) else ("", "", "")
        return told if at == str(number) else None

    def _missing(self, number: int) -> str | None:
        """The ranks that do not wait in this call, as far as the store knows; for what does not tell, such as NCCL."""
        if len(self._links) > 1 or not self._prefix:
            return None
        here = [rank for rank, place in self._places().items() if place.number >= number]
        found = [str(rank) for rank in range(self._links[0].world) if rank not in (self.rank, *here)]
        return f"rank{'s' if len(found) > 1 else ''} {', '.join(found)}" if found else None

    def _sentence(self, error: BaseException, place: Place, others: str) -> str:
        where = f"{place} (operation {place.number} of group {self.names!r})"
        if not isinstance(error, LostRankError):
            return f"rank {self.rank} failed in {where}: {type(error).__name__}: {error}. Make a new group to go on"
        if error.rank is not None:
            others = f"rank {error.rank}"
        if error.late:
            what = (
                f"rank {self.rank} waited for {others} in {where} for the group's timeout of {self.timeout_s:g} s: see "
                "whether that rank still runs, and makes the same calls"
            )
        else:
            what = f"rank {self.rank} lost {others} in {where}: {error}"
        return f"{what}. Make a new group to go on"


def _bottom(store: Any) -> Any:
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    return store


def _called(calls: Mapping[int, object]) -> str:
    """Who called what, by rank."""
    return "; ".join(f"rank {rank} called {call}" for rank, call in sorted(calls.items()))


def _packed(rank: int, place: Place) -> bytes:
    step = "" if place.step is None else place.step
    return f"{rank}\n{place.number}\n{int(place.known)}\n{step}\n{place.details}\n{place.text}".encode()


def _unpacked(found: bytes) -> tuple[int, Place]:
    rank, number, known, step, details, text = str(found, "utf-8").split("\n", 5)
    return int(rank), Place(int(number), text, known == "1", int(step) if step else None, details)


def lengths_in(details: str) -> tuple[list[int], list[int]]:
    """What a rank sends to each, and what it expects of each: two lists with a slash between them."""
    sent, expected = ([int(n) for n in side[1:-1].split(",")] for side in details.split("/"))
    return sent, expected


def unfit(details: Mapping[int, str]) -> str | None:
    """Which rank sends another what that one does not expect, if one does."""
    told = {rank: lengths_in(text) for rank, text in details.items()}
    for source, target in itertools.product(told, told):
        numel = told[source][0][target]
        expected = told[target][1][source]
        if numel != expected:
            return f"rank {source} sends {numel} elements to rank {target}, which expects {expected}"
    return None


class Scanned(Protocol):
    """What the lookout looks after."""

    def scan(self, now: float) -> bool:
        """Look for everybody who has waited long; False where there will be nobody any more."""


class Lookout:
    """The thread of [Note: Board]: it runs while there are groups to look after."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """As new: a forked child has no such thread."""
        self._groups: weakref.WeakSet[Scanned] = weakref.WeakSet()
        self._asked: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self.leaving = False  # the process ends

    def add(self, group: Scanned) -> None:
        """Scan what is known of a group every now and then, as long as somebody else holds it."""
        self._groups.add(group)
        self._start()

    def ask(self, question: Callable[[], Asked | None]) -> Asked | None:
        """What `question` gives in the lookout's thread; None if it raises, or does not within _TELL_S."""
        if self.leaving:
            return None
        answers: SimpleQueue[Asked | None] = SimpleQueue()

        def answer() -> None:
            try:
                answers.put(question())
            except Exception:  # of a store that is gone
                answers.put(None)

        self._start()
        self._asked.put(answer)
        for _ in range(_TELLS):
            with contextlib.suppress(Empty):
                return answers.get(timeout=_TELL_S / _TELLS)
        return None

    def end(self, seconds: float) -> None:
        """End the thread, at the end of the process."""
        self.leaving = True
        thread = self._thread
        if thread is not None:
            self._asked.put(None)
            thread.join(seconds)

    def _start(self) -> None:
        with self._lock:
            if self.leaving or (self._thread is not None and self._thread.is_alive()):
                return
            self._thread = threading.Thread(target=self._run, name="thinwire-lookout", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                asked = self._asked.get(timeout=LOOK_S / 2)
            except Empty:
                for group in list(self._groups):
                    if not group.scan(time.monotonic()):
                        self._groups.discard(group)
                    del group
                with self._lock:
                    if not self._groups and self._asked.empty():
                        self._thread = None
                        return
                continue
            if asked is None:
                return
            asked()
            del asked


lookout = Lookout()
os.register_at_fork(after_in_child=lookout.reset)
