"""Agreement of ranks: the first call of a kind is compared over the group itself, before any data moves.

[Note: Handshake] A call is described in one line of text. At the first call of that line the ranks compare a hash of
it, in about log2(world) messages per rank; where hashes differ, they send each other the lines, every rank raises the
same error, and the group stays usable. Later calls of the same line are free: their messages carry tags made of the
line and the step, so that calls which differ never mix ([Note: Board] in board.py tells what follows).
THINWIRE_DEBUG=1 compares every call. What all calls of a rank have in common (the versions, THINWIRE_DEBUG,
checksums) is part of what is hashed.
"""

import hashlib
import os
import sys
from collections.abc import Sequence

from thinwire import wire
from thinwire.collectives.board import Board, Place, lengths_in, unfit
from thinwire.collectives.transport import Transport
from thinwire.errors import DisagreementError

_PART = "\x1e"  # between the parts of what a rank tells
_RANK = "\x1d"  # between ranks


class Handshake:
    def __init__(self, links: Sequence[Transport], board: Board) -> None:
        self.every_call = os.environ.get("THINWIRE_DEBUG", "0") not in ("", "0")
        self._links = [link for link in links if link.world > 1]
        self._mesh = "" if len(links) == 1 else f", on a mesh of {' x '.join(str(link.world) for link in links)}"
        self._board = board

    def check(self, place: Place) -> int:
        """Raise DisagreementError on every rank unless all make the same call.

        Of an exchange every rank must also expect what the others send: gives the most elements that one rank sends.
        """
        version = sys.modules["thinwire"].__version__  # of the package, which is above this room
        debug = f"THINWIRE_DEBUG={int(self.every_call)}, checksums={int(any(link.checked for link in self._links))}"
        settings = f"thinwire {version}, wire format {wire.VERSION}, {debug}{self._mesh}"
        own = _PART.join((place.text, settings, place.details))
        mark = int.from_bytes(hashlib.blake2b(f"{place.text}\n{settings}".encode(), digest_size=7).digest())
        alike, told = self._board.attend(place, lambda: self._compared(own, mark, bool(place.details)))
        if alike and not place.details:
            return 0
        calls, versions, details = zip(*(rank.split(_PART) for rank in told), strict=True)
        named = unfit(dict(enumerate(details))) if alike else _named(calls, versions)
        if named is not None:
            raise DisagreementError(f"the ranks disagree about operation {place.number} of this group: {named}")
        return max(sum(lengths_in(each)[0]) for each in details)

    def _compared(self, own: str, mark: int, details: bool) -> tuple[bool, list[str]]:
        """Whether all ranks have the same mark; if they have not, or have details, what every rank tells."""
        most = [mark, -mark, len(own.encode()), self._board.own_key]
        for link in self._links:  # of a mesh in turn: what the first group told goes on in the second
            most = link.agree(most)
        self._board.open(most[3])
        alike = most[0] == -most[1]
        return alike, [] if alike and not details else self._told(own, most[2])

    def _told(self, own: str, most: int) -> list[str]:
        """What every rank tells, none of which takes more than `most` bytes."""
        row = own.encode().ljust(most, b"\0")
        for link in self._links:
            row = _RANK.encode().join(link.share(row))
        return [text.rstrip("\0") for text in str(row, "utf-8").split(_RANK)]


def _named(calls: Sequence[str], versions: Sequence[str]) -> str:
    """Which ranks called what, or run what."""
    verb = "called" if len(set(calls)) > 1 else "runs"
    sides: dict[str, list[str]] = {}
    for rank, side in enumerate(calls if verb == "called" else versions):
        sides.setdefault(side, []).append(str(rank))
    return "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)} {verb} {side}" for side, ranks in sides.items()
    )
