"""How the parameters of a bucket fall into lanes: those that share a codec and a feedback.

[Note: Bridges] The largest lane is mostly one stretch of the bucket, with a few small parameters of other lanes in it
(biases between weights). It then travels as that one stretch, in place, with zeros where the small ones were; these are
set aside first and put back at the end. That costs a few codes of zeros and saves two copies of everything.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.collectives.lane import LaneSpec
from thinwire.feedback import Piece

_BRIDGE = 16  # the largest lane bridges lanes that are so many times smaller


class Slot(NamedTuple):
    """One parameter of a bucket and how it travels."""

    name: str
    numel: int
    codec: Codec
    first: Codec
    feedback: str


@dataclass(frozen=True)
class _Group:
    """A lane: which slots are in it, and which of others' it bridges."""

    kind: LaneSpec
    slots: tuple[int, ...]
    bridged: frozenset[int] = frozenset()
    aside: bool = False


class Arrangement:
    """The lanes of one bucket."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._groups = _groups(slots)
        self.kinds = [group.kind for group in self._groups]

    def pieces(self, lane: int) -> list[Piece]:
        """The parameters of a lane, in order; no name where it bridges."""
        group = self._groups[lane]
        return [Piece(None if i in group.bridged else self._slots[i].name, self._slots[i].numel) for i in group.slots]

    def load(
        self, views: Sequence[Tensor], buffer: Tensor | None
    ) -> tuple[list[list[Tensor]], list[tuple[Tensor, Tensor]]]:
        """The tensors of every lane, and the (view, numbers) to put back at the end.

        `views` are the gradients, flat, in the order of the slots; `buffer` is what they are the parts of, if they are.
        """
        copies: list[tuple[Tensor, Tensor]] = []
        lanes = []
        for group in self._groups:
            if group.aside:
                parts = [views[i] for i in group.slots]
                numbers = torch.cat(parts)
                copies += zip(parts, numbers.split([part.numel() for part in parts]), strict=True)
                lanes.append([numbers])
            elif buffer is None:
                lanes.append([torch.zeros_like(views[i]) if i in group.bridged else views[i] for i in group.slots])
            else:
                lanes.append(self._stretches(group, buffer))
        bridged = [views[i] for group in self._groups for i in group.bridged]
        if bridged and buffer is not None:
            torch._foreach_zero_(bridged)
        return lanes, copies

    def _stretches(self, group: _Group, buffer: Tensor) -> list[Tensor]:
        """The fewest stretches of the buffer that hold a lane's slots."""
        edges = [0, *itertools.accumulate(slot.numel for slot in self._slots)]
        found: list[Tensor] = []
        start = previous = group.slots[0]
        for i in (*group.slots[1:], len(self._slots) + 1):
            if i != previous + 1:
                found.append(buffer[edges[start] : edges[previous + 1]])
                start = i
            previous = i
        return found


def _groups(slots: Sequence[Slot]) -> list[_Group]:
    """Slots by codec and feedback, the largest group first."""
    found: dict[tuple[Codec, str], list[int]] = {}
    for i, slot in enumerate(slots):
        found.setdefault((slot.codec, slot.feedback), []).append(i)
    order = sorted(found.values(), key=lambda members: -sum(slots[i].numel for i in members))
    main, rest = order[0], order[1:]
    small = [members for members in rest if _BRIDGE * _numel(slots, members) <= _numel(slots, main)]
    aside = {i for members in small for i in members}
    bridged = frozenset(i for i in aside if main[0] < i < main[-1])
    whole = sorted({*main, *bridged})
    return [
        _group(slots, whole, bridged),
        *(_group(slots, members, aside=members[0] in aside) for members in rest),
    ]


def _numel(slots: Sequence[Slot], members: Sequence[int]) -> int:
    return sum(slots[i].numel for i in members)


def _group(
    slots: Sequence[Slot], members: Sequence[int], bridged: frozenset[int] = frozenset(), aside: bool = False
) -> _Group:
    slot = slots[next(i for i in members if i not in bridged)]
    kind = LaneSpec(_numel(slots, members), slot.codec, slot.first, slot.feedback)
    return _Group(kind, tuple(members), bridged, aside)
