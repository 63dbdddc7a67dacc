"""Cuts the parameters of a bucket into lanes: those that share a codec and a feedback.

[Note: Bridges] The largest lane is usually one stretch of the bucket with a few small parameters of other lanes in it
(biases between weights). It then travels as that one stretch, in place, with zeros where the small ones were; these are
copied out first and back at the end. That costs a few codes of zeros and saves two copies of everything.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.collectives.lane import LaneSpec
from thinwire.feedback import Piece
from thinwire.integrations.models import PADDING

_BRIDGE = 16  # the largest lane bridges lanes that are this many times smaller


@dataclass(frozen=True)
class BucketLane:
    """Parameters of a bucket that travel as one lane of its message."""

    spec: LaneSpec
    members: tuple[int, ...]  # which parameters of the bucket, in order
    bridged: frozenset[int]  # those of them that belong to another lane
    pieces: tuple[Piece, ...]  # all of them by name, the bridged ones without
    stretches: tuple[tuple[int, int], ...]  # the fewest parts of the bucket that hold them
    aside: bool  # whether another lane bridges this one, so that its numbers are copied out of the bucket and back


def lanes_of(
    names: Sequence[str], specs: Sequence[LaneSpec], *, whole: bool = False, bridge: float = _BRIDGE
) -> list[BucketLane]:
    """The lanes of a bucket whose parameters have these `specs`, the largest lane first.

    It bridges lanes that are `bridge` times smaller; with `whole` also their parameters at the ends, so that it may be
    the whole bucket.
    """
    found: dict[tuple[object, ...], list[int]] = {}
    for i, spec in enumerate(specs):
        found.setdefault((spec.codec, spec.feedback), []).append(i)
    size = {i: _numel(specs, members) for members in found.values() for i in members}  # of its lane
    main, *rest = sorted(found.values(), key=lambda members: -size[members[0]])
    aside = {i for i in size if bridge * size[i] <= size[main[0]] and i not in main}
    bridged = frozenset(i for i in aside if whole or main[0] < i < main[-1])
    lanes = [_lane(names, specs, sorted({*main, *bridged}), bridged, aside=False)]
    return lanes + [_lane(names, specs, members, frozenset(), aside=members[0] in aside) for members in rest]


def _lane(
    names: Sequence[str], specs: Sequence[LaneSpec], members: Sequence[int], bridged: frozenset[int], *, aside: bool
) -> BucketLane:
    kept = next(i for i in members if i not in bridged)
    gaps = {i for i in members if i in bridged or names[i].startswith(PADDING)}
    pieces = tuple(Piece(None if i in gaps else names[i], specs[i].numel) for i in members)
    spec = specs[kept]._replace(numel=_numel(specs, members))
    return BucketLane(spec, tuple(members), bridged, pieces, _stretches(specs, members), aside)


def _numel(specs: Sequence[LaneSpec], members: Sequence[int]) -> int:
    return sum(specs[i].numel for i in members)


def _stretches(specs: Sequence[LaneSpec], members: Sequence[int]) -> tuple[tuple[int, int], ...]:
    edges = [0, *itertools.accumulate(spec.numel for spec in specs)]
    inside = set(members)
    starts = [i for i in members if i - 1 not in inside]
    ends = [i for i in members if i + 1 not in inside]
    return tuple((edges[start], edges[end + 1]) for start, end in zip(starts, ends, strict=True))


def load(
    lanes: Sequence[BucketLane], views: Sequence[Tensor], buffer: Tensor | None
) -> tuple[list[list[Tensor]], list[tuple[Tensor, Tensor]]]:
    """The tensors of every lane, and the (view, numbers) to copy back at the end; `buffer` holds all views, if any."""
    tensors: list[list[Tensor]] = []
    copies: list[tuple[Tensor, Tensor]] = []
    for lane in lanes:
        if lane.aside:
            parts = [views[i] for i in lane.members]
            numbers = torch.cat(parts)
            copies += zip(parts, numbers.split([part.numel() for part in parts]), strict=True)
            tensors.append([numbers])
        elif buffer is None:
            tensors.append([torch.zeros_like(views[i]) if i in lane.bridged else views[i] for i in lane.members])
        else:
            tensors.append([buffer[begin:end] for begin, end in lane.stretches])
    if lanes[0].bridged and buffer is not None:
        torch._foreach_zero_([views[i] for i in lanes[0].bridged])
    return tensors, copies
