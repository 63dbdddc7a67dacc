"""What ranks tell each other of their calls: that they agree before data moves, and why a group has ended.

[Note: Handshake] A text describes a call. At the first call with that description the ranks compare its fingerprint, a
hash, in about log2(world) messages per rank. If fingerprints differ, they send each other the descriptions, every rank
raises the same error, and the group stays usable. Later calls with the same description are free: their messages carry
tags made of the description and the step, so calls that differ never mix; ranks that make them wait for each other
until the group's timeout. THINWIRE_DEBUG=1 compares every call. The fingerprint covers what all calls of a rank have in
common: versions, THINWIRE_DEBUG, checksums.

[Note: Failures] A rank that fails in the middle of a call, or loses another rank, writes one sentence into the group's
store and closes the group's connections. This wakes every rank that waits for a message; each looks into the store and
raises the sentence that came first. A store that hangs or is gone delays nobody for long: each rank then raises what it
knows itself.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from torch._C import _distributed_c10d as c10d

from thinwire import wire
from thinwire.collectives import groups
from thinwire.collectives.transport import LostRankError, Transport, lost_in
from thinwire.errors import DisagreementError, PeerError, ThinwireError, WireError
from thinwire.log import announce
from thinwire.version import __version__

ASK_S = 0.5  # how long a rank that fails waits for the store
_ASKS = 10  # in as many parts: a machine that stands still for seconds uses up one of them, not all
_PAUSE_S = 0.2  # if the store does not answer, a rank waits this long before it closes its connections
QUIET_S = 10.0  # a rank that waits longer for others to make a first call logs it
_LATE = 0.9  # of the group's timeout: a rank that waited longer ran into it
Found = TypeVar("Found")
Name = Callable[..., str]  # ranks in errors
_PART = "\x1e"  # between the parts of a rank's description
_RANK = "\x1d"  # between ranks
Ended = Callable[[BaseException], BaseException]  # ends a group, and returns what this rank raises
Lengths = tuple[Sequence[int], Sequence[int]]  # what a rank sends to each rank, and what it expects from each


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
        rank = links[0].rank if len(links) == 1 else links[0].rank * links[1].world + links[1].rank
        self.named = links[0].named if len(links) == 1 else functools.partial(groups.named, {})  # ranks, in errors
        self.this_rank = self.named(rank)
        self.names = "/".join(link.group.group_name for link in links)
        self.over: str | None = None
        self.store_nonce = secrets.randbits(62)
        self._links = links
        world = math.prod(link.world for link in links)
        self._others = self.named(1 - rank) if world == 2 else "another rank"
        store: Any = links[0].group.get_group_store()
        while len(links) > 1 and isinstance(store, c10d.PrefixStore):
            store = store.underlying_store  # which all ranks of a mesh have
        self._store = store
        self._key = ""  # in the store, once the ranks have agreed on one
        self._lock = threading.Lock()

    def open(self, key: int) -> None:
        """From now on use the store, under a key that all ranks of this group know and no other group has used."""
        self._key = self._key or f"thinwire/{key:x}/over"

    def guard(self, site: CallSite, run: Callable[[], Found]) -> Found:
        """Return the result of `run`, which waits for messages of this call. Ctrl-C ends the wait, and the group."""
        try:
            return run()
        except ThinwireError:  # the same on all ranks, or reported already
            raise
        except BaseException as error:
            lost = lost_in(error)
            if lost is None:
                self.ended(error, site)
                raise
            lost = lost.with_traceback(None)
        raise self.ended(lost, site)  # not above: the new error would hold the old one, whose frames hold tensors

    def at(self, site: CallSite) -> Ended:
        """What to call when this call fails half-way: `ended`."""
        return functools.partial(self.ended, site=site)

    def ended(self, error: BaseException, site: CallSite) -> BaseException:
        """End the group after a call failed half-way, and return what this rank raises."""
        with self._lock:
            if self.over is None:
                sentence = self._sentence(error, site)
                first = self._key and _within(ASK_S, lambda: self._store.compare_set(self._key, "", sentence).decode())
                if not first:  # other ranks find out who is lost before this one closes its connections
                    time.sleep(_PAUSE_S)
                self.over = first or sentence
                for link in self._links:
                    link.close()
        if isinstance(error, WireError):  # a codec knows neither call nor group
            return WireError(f"{self.where(site)}: {error}")
        return PeerError(self.over) if isinstance(error, LostRankError) else error

    def where(self, site: CallSite) -> str:
        """A call, in errors."""
        return f"{site} (operation {site.number} of group {self.names!r})"

    def _sentence(self, error: BaseException, site: CallSite) -> str:
        where = self.where(site)
        timeout_s = min(groups.timeout_s(link.group) for link in self._links)  # as it is now: it may have changed
        rank = error.rank if isinstance(error, LostRankError) else None
        whom = self._others if rank is None else self.named(rank)
        if not isinstance(error, LostRankError):
            what = f"{self.this_rank} failed in {where}: {type(error).__name__}: {error}"
        elif error.waited < _LATE * timeout_s:
            what = f"{self.this_rank} lost {whom} in {where}: {error}"
        else:
            what = (
                f"{self.this_rank} waited for {whom} in {where} for the group's timeout of "
                f"{timeout_s:g} s: see whether that rank still runs and makes the same calls (THINWIRE_DEBUG=1 "
                "compares all calls)"
            )
        return f"{what}. Create a new group to continue"


def _within(seconds: float, question: Callable[[], Found]) -> Found | None:
    """The answer of a store that may hang; None if it raises or takes longer."""
    answers = []

    def ask() -> None:
        with contextlib.suppress(Exception):  # of a store that is gone
            answers.append(question())

    thread = threading.Thread(target=ask, name="thinwire-store", daemon=True)
    thread.start()
    for _ in range(_ASKS):
        thread.join(seconds / _ASKS)
    return answers[0] if answers else None


class Handshake:
    """Compares what the ranks of a group call before data moves: the first call of every kind, or all calls."""

    def __init__(self, links: Sequence[Transport], failures: Failures) -> None:
        # One thread compares all first calls: torch never frees what it keeps for each thread that has sent something.
        self._name = f"thinwire-agree-{failures.names}"
        self._aside = ThreadPoolExecutor(thread_name_prefix=self._name)
        self._comparing = False
        self.every_call = os.environ.get("THINWIRE_DEBUG", "0") not in ("", "0")
        self._links = [link for link in links if link.world > 1]
        self._mesh = "" if len(links) == 1 else f", on a mesh of {' x '.join(str(link.world) for link in links)}"
        self._failures = failures

    def check(self, site: CallSite, lengths: Lengths | None = None) -> int:
        """Raise DisagreementError on every rank unless all make the same call.

        With `lengths`, of an exchange, every rank must also expect what the others send: returns the most elements that
        one rank sends.
        """
        checksums = any(link.has_checksums for link in self._links)
        debug = f"THINWIRE_DEBUG={int(self.every_call)}, checksums={int(checksums)}"
        settings = f"thinwire {__version__}, wire format {wire.VERSION}, {debug}{self._mesh}"
        description = _PART.join((site.text, settings, json.dumps(lengths)))
        fingerprint = int.from_bytes(hashlib.blake2b(f"{site.text}\n{settings}".encode(), digest_size=7).digest())
        compare = functools.partial(self._compared, description, fingerprint, lengths is not None)
        on_stream = any(link.on_stream for link in self._links)
        ours = self._failures
        waited = f"{ours.this_rank} has waited {QUIET_S:g} s for the others in {ours.where(site)}"
        note = threading.Timer(QUIET_S, announce, [f"{waited}: all ranks have to call it"])
        note.start()
        try:
            # Signals reach Python while another thread waits inside gloo.
            self._comparing = True
            alike, described = ours.guard(site, compare if on_stream else self._aside.submit(compare).result)
            self._comparing = False
        finally:
            note.cancel()
        if alike and lengths is None:
            return 0
        calls, versions, lengths_R = zip(*(text.split(_PART) for text in described), strict=True)
        sent_R, expected_R = zip(*map(json.loads, lengths_R), strict=True) if alike else ((), ())
        both = _unfit(sent_R, expected_R, ours.named) if alike else _differing(calls, versions, ours.named)
        if both is not None:
            raise DisagreementError(f"the ranks disagree about operation {site.number} of this group: {both}")
        return max(map(sum, sent_R))

    def close(self, *, wait: bool = True) -> None:
        """End the thread, which a later call starts anew. If `wait`, it has ended now, unless it waits for others."""
        aside, self._aside = self._aside, ThreadPoolExecutor(thread_name_prefix=self._name)
        aside.shutdown(wait=wait and not self._comparing and not threading.current_thread().name.startswith(self._name))

    def _compared(self, description: str, fingerprint: int, to_all: bool) -> tuple[bool, list[str]]:
        """Whether all ranks have the same fingerprint; if not, or `to_all`, the description of every rank."""
        most = [fingerprint, -fingerprint, len(description.encode()), self._failures.store_nonce]
        for link in self._links:  # on a mesh in turn: what ranks learn in the first group goes on in the second
            most = link.agree(most)
        self._failures.open(most[3])
        alike = most[0] == -most[1]
        if alike and not to_all:
            return True, []
        row = description.encode().ljust(most[2], b"\0")
        for link in self._links:
            row = _RANK.encode().join(link.share(row))
        return alike, [text.rstrip("\0") for text in str(row, "utf-8").split(_RANK)]


def _unfit(sent_R: Sequence[Sequence[int]], expected_R: Sequence[Sequence[int]], name: Name) -> str | None:
    """Say which rank sends another one what that one does not expect; None if all fit."""
    for source, target in itertools.product(range(len(sent_R)), repeat=2):
        numel, expected = sent_R[source][target], expected_R[target][source]
        if numel != expected:
            return f"{name(source)} sends {numel} elements to {name(target)}, which expects {expected}"
    return None


def _differing(calls: Sequence[str], versions: Sequence[str], name: Name) -> str:
    """Say which ranks made which call or, if all made the same, which ranks run which version."""
    verb = "called" if len(set(calls)) > 1 else "runs"
    sides: dict[str, list[int]] = {}
    for rank, side in enumerate(calls if verb == "called" else versions):
        sides.setdefault(side, []).append(rank)
    return "; ".join(f"{name(*ranks)} {verb} {side}" for side, ranks in sides.items())
