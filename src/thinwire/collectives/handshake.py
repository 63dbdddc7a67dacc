"""Agreement between ranks: they compare the first call of every kind over the group itself, before any data moves.

[Note: Handshake] One line of text describes a call. At the first call with that line the ranks compare a hash of it, in
about log2(world) messages per rank. If hashes differ, they send each other the lines, every rank raises the same error,
and the group stays usable. Later calls with the same line are free: their messages carry tags made of the line and the
step, so calls that differ never mix; ranks that make them wait for each other until the group's timeout.
THINWIRE_DEBUG=1 compares every call. The hash covers what all calls of a rank have in common: versions, THINWIRE_DEBUG,
checksums.
"""

import hashlib
import itertools
import os
from collections.abc import Sequence

from thinwire import wire
from thinwire.collectives.failures import CallSite, Failures
from thinwire.collectives.transport import Transport
from thinwire.errors import DisagreementError
from thinwire.version import __version__

_PART = "\x1e"  # between the parts of a rank's line
_RANK = "\x1d"  # between ranks
Lengths = tuple[Sequence[int], Sequence[int]]  # what a rank sends to each rank, and what it expects from each


class Handshake:
    def __init__(self, links: Sequence[Transport], failures: Failures) -> None:
        self.every_call = os.environ.get("THINWIRE_DEBUG", "0") not in ("", "0")
        self._links = [link for link in links if link.world > 1]
        self._mesh = "" if len(links) == 1 else f", on a mesh of {' x '.join(str(link.world) for link in links)}"
        self._failures = failures

    def check(self, site: CallSite, lengths: Lengths | None = None) -> int:
        """Raise DisagreementError on every rank unless all make the same call.

        With `lengths`, of an exchange, every rank must also expect what the others send: returns the most elements that
        one rank sends.
        """
        debug = f"THINWIRE_DEBUG={int(self.every_call)}, checksums={int(any(link.checked for link in self._links))}"
        settings = f"thinwire {__version__}, wire format {wire.VERSION}, {debug}{self._mesh}"
        details = "" if lengths is None else "/".join(",".join(map(str, side)) for side in lengths)
        own = _PART.join((site.text, settings, details))
        mark = int.from_bytes(hashlib.blake2b(f"{site.text}\n{settings}".encode(), digest_size=7).digest())
        alike, lines = self._failures.attend(site, lambda: self._compared(own, mark, lengths is not None))
        if alike and lengths is None:
            return 0
        calls, versions, texts = zip(*(line.split(_PART) for line in lines), strict=True)
        sent_R, expected_R = zip(*(_parsed(text) for text in texts), strict=True) if alike else ((), ())
        named = _unfit(sent_R, expected_R) if alike else _named(calls, versions)
        if named is not None:
            raise DisagreementError(f"the ranks disagree about operation {site.number} of this group: {named}")
        return max(map(sum, sent_R))

    def _compared(self, own: str, mark: int, to_all: bool) -> tuple[bool, list[str]]:
        """Whether all ranks have the same mark; if they have not, or if lines go `to_all`, the line of every rank."""
        most = [mark, -mark, len(own.encode()), self._failures.own_key]
        for link in self._links:  # on a mesh in turn: what ranks learn in the first group goes on in the second
            most = link.agree(most)
        self._failures.open(most[3])
        alike = most[0] == -most[1]
        if alike and not to_all:
            return True, []
        row = own.encode().ljust(most[2], b"\0")
        for link in self._links:
            row = _RANK.encode().join(link.share(row))
        return alike, [text.rstrip("\0") for text in str(row, "utf-8").split(_RANK)]


def _parsed(details: str) -> Lengths:
    sent, expected = ([int(numel) for numel in side.split(",")] for side in details.split("/"))
    return sent, expected


def _unfit(sent_R: Sequence[Sequence[int]], expected_R: Sequence[Sequence[int]]) -> str | None:
    """Which rank sends another one what that one does not expect, if one does."""
    for source, target in itertools.product(range(len(sent_R)), repeat=2):
        numel, expected = sent_R[source][target], expected_R[target][source]
        if numel != expected:
            return f"rank {source} sends {numel} elements to rank {target}, which expects {expected}"
    return None


def _named(calls: Sequence[str], versions: Sequence[str]) -> str:
    """Which ranks called what, or run what."""
    verb = "called" if len(set(calls)) > 1 else "runs"
    sides: dict[str, list[str]] = {}
    for rank, side in enumerate(calls if verb == "called" else versions):
        sides.setdefault(side, []).append(str(rank))
    return "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)} {verb} {side}" for side, ranks in sides.items()
    )
