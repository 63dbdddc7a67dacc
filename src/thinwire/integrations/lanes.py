"""How the parameters of a bucket fall into lanes: those that share a codec and a feedback.

[Note: Bridges] The largest lane is mostly one stretch of the bucket, with a few small parameters of other lanes in it
(biases between weights). It then travels as that one stretch, in place, with zeros where the small ones were; these are
set aside first and put back at the end. That costs a few codes of zeros and saves two copies of everything.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.collectives.reduce import LaneKind
from thinwire.feedback import Piece

_BRIDGE = 16  # the largest lane bridges lanes that are so many times smaller


@dataclass(frozen=True)
class BucketLane:
    """Parameters of a bucket that travel as one lane of its message."""

    spec: LaneKind
    members: tuple[int, ...]  # which parameters of the bucket, in order
    pieces: tuple[Piece, ...]  # these by name; no name where the lane bridges a parameter of another lane
    aside: bool  # whether the first lane bridges it, so that its numbers are copied out of the bucket, and back

    @property
    def bridged(self) -> list[int]:
        """Which parameters of the bucket are only bridged."""
        return [i for i, piece in zip(self.members, self.pieces, strict=True) if piece.name is None]


def lanes_of(names: Sequence[str], specs: Sequence[LaneKind]) -> list[BucketLane]:
    """The lanes of a bucket whose parameters travel as `specs` say, the largest lane first."""
    found: dict[tuple[object, ...], list[int]] = {}
    for i, spec in enumerate(specs):
        found.setdefault((spec.codec, spec.feedback), []).append(i)
    numel = [spec.numel for spec in specs]
    main, *rest = sorted(found.values(), key=lambda members: -sum(numel[i] for i in members))
    largest = sum(numel[i] for i in main)
    aside = {i for members in rest if _BRIDGE * sum(numel[j] for j in members) <= largest for i in members}
    bridged = {i for i in aside if main[0] < i < main[-1]}

    def lane(members: Sequence[int], bridged: set[int]) -> BucketLane:
        pieces = tuple(Piece(None if i in bridged else names[i], numel[i]) for i in members)
        own = next(i for i in members if i not in bridged)
        spec = specs[own]._replace(numel=sum(numel[i] for i in members))
        return BucketLane(spec, tuple(members), pieces, aside=own in aside)

    return [lane(sorted({*main, *bridged}), bridged), *(lane(members, set()) for members in rest)]


def load(
    lanes: Sequence[BucketLane], views: Sequence[Tensor], buffer: Tensor | None
) -> tuple[list[list[Tensor]], list[tuple[Tensor, Tensor]]]:
    """The tensors of every lane, and the (view, numbers) to put back at the end.

    `views` are the gradients of the bucket, flat; `buffer` is what they are the parts of, if they are.
    """
    tensors: list[list[Tensor]] = []
    copies: list[tuple[Tensor, Tensor]] = []
    for lane in lanes:
        parts = [views[i] for i in lane.members]
        if lane.aside:
            numbers = torch.cat(parts)
            copies += zip(parts, numbers.split([part.numel() for part in parts]), strict=True)
            tensors.append([numbers])
        elif buffer is None:
            zeroed = set(lane.bridged)
            tensors.append([torch.zeros_like(views[i]) if i in zeroed else views[i] for i in lane.members])
        else:
            tensors.append(_stretches(lane.members, views, buffer))
    bridged = [views[i] for i in lanes[0].bridged]
    if bridged and buffer is not None:
        torch._foreach_zero_(bridged)
    return tensors, copies


def _stretches(members: Sequence[int], views: Sequence[Tensor], buffer: Tensor) -> list[Tensor]:
    """The fewest stretches of the buffer that hold these of its parts."""
    edges = [0, *itertools.accumulate(view.numel() for view in views)]
    found: list[Tensor] = []
    start = previous = members[0]
    for i in (*members[1:], len(views) + 1):
        if i != previous + 1:
            found.append(buffer[edges[start] : edges[previous + 1]])
            start = i
        previous = i
    return found
