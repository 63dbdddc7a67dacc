"""Cuts the parameters of a bucket into lanes: those that share a codec and a feedback.

[Note: Bridges] The largest lane is usually one stretch of the bucket with a few small parameters of other lanes in it
(biases between weights). It then travels as that one stretch, in place, with zeros where the small ones were; these are
copied out first and back at the end. That costs a few codes of zeros and saves two copies of everything.

[Note: Aside] On a GPU one launch copies the numbers of all small lanes out of the bucket, writes zeros in their place
and zeroes what the lane that bridges them remembers there. Another launch copies them back at the end.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.collectives.lane import LaneSpec
from thinwire.collectives.message import Message
from thinwire.collectives.workspaces import Region, Workspace
from thinwire.feedback import Piece
from thinwire.integrations.models import PADDING
from thinwire.integrations.stats import Tally
from thinwire.kernels.rows import Bad, Memory

_BRIDGE = 16  # the largest lane bridges lanes that are this many times smaller


@dataclass(frozen=True)
class BucketLane:
    """Parameters of a bucket that travel as one lane of its message."""

    spec: LaneSpec
    members: tuple[int, ...]  # which parameters of the bucket, in order
    bridged: frozenset[int]  # those of them that belong to another lane
    pieces: tuple[Piece, ...]  # the name and size of each; bridged ones have no name
    stretches: tuple[tuple[int, int], ...]  # (begin, end) of the parts of the bucket that hold them
    aside: bool  # whether another lane bridges this one, so that its numbers are copied out of the bucket and back


def lanes_of(
    names: Sequence[str], specs: Sequence[LaneSpec], *, whole: bool = False, bridge: float = _BRIDGE
) -> list[BucketLane]:
    """The lanes of a bucket whose parameters have these `specs`, the largest lane first.

    It bridges lanes that are `bridge` times smaller; with `whole` also their parameters at the ends of the bucket.
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


class StreamedBucket:
    """A program (collectives.programs) on a bucket's buffer: the same launches at every step.

    `sizes`: the elements of the bucket's parameters, in order.
    """

    def __init__(
        self, message: Message, lanes: Sequence[BucketLane], carries: Sequence[Any], sizes: Sequence[int]
    ) -> None:
        self._program = message.program
        self._lanes = lanes
        self._carries = carries
        edges = [0, *itertools.accumulate(sizes)]
        places = [torch.arange(edges[i], edges[i + 1]) for lane in lanes if lane.aside for i in lane.members]
        device = message.channel.device
        self._index = torch.cat(places).to(device) if places else None
        starts = [0, *itertools.accumulate(piece.numel for piece in lanes[0].pieces)]
        gaps = [torch.arange(starts[i], starts[i + 1]) for i, p in enumerate(lanes[0].pieces) if p.name is None]
        self._gaps = torch.cat(gaps).to(device) if gaps and carries[0] is not None else None
        lengths = [lane.spec.numel for lane in lanes if lane.aside]
        # Copies of the small lanes' numbers: all in one tensor, and each lane's part of it.
        self._aside: Region[tuple[Tensor, Sequence[Tensor]]] = Region(
            sum(lengths) * message.dtype.itemsize,
            lambda scratch: ((whole := scratch.view(message.dtype)), whole.split(lengths)),
            self._program.scratch_end,
        )
        self._kernels: Any = kernels.select(device)
        self._note = torch.empty(0, device=device)  # which chunks were not finite
        self._chunks = 0  # that were averaged
        self._number = 0  # of the call that runs
        self.is_new = True  # until it has run

    def begin(self, tally: Tally) -> None:
        """Prepare the next call; `tally` counts its chunks that are not finite."""
        if self.is_new:
            self._note = tally.new_note(self._note.device)
        self._number = self._chunks % (1 << 30) + 1
        self._chunks += self._program.count

    def __call__(self, space: Workspace, tensors: Sequence[Tensor], step: int) -> None:
        """See Program."""
        (buffer,) = tensors
        whole, parts = (None, ()) if self._index is None else self._aside.views(space)
        if whole is not None:
            kept = None if self._gaps is None else self._carries[0].memories[0]
            self._kernels.set_aside(buffer, self._index, whole, kept, self._gaps)
        xs = self._numbers(buffer, parts)
        self._program(space, xs, step, self._memories(xs), Bad(self._note, self._number))
        for lane, x in zip(self._lanes, xs, strict=True):
            if not lane.aside and len(lane.stretches) > 1:
                parts = [buffer[begin:end] for begin, end in lane.stretches]
                torch._foreach_copy_(parts, x.split([part.numel() for part in parts]))
        if whole is not None:
            self._kernels.put_back(buffer, self._index, whole)

    def _numbers(self, buffer: Tensor, aside: Sequence[Tensor]) -> list[Tensor]:
        """Every lane's numbers, as one tensor."""
        found = []
        apart = iter(aside)
        for lane in self._lanes:
            if lane.aside:
                found.append(next(apart))
            elif len(lane.stretches) == 1:
                ((begin, end),) = lane.stretches
                found.append(buffer[begin:end])
            else:
                found.append(torch.cat([buffer[begin:end] for begin, end in lane.stretches]))
        return found

    def _memories(self, xs: Sequence[Tensor]) -> list[Memory | None] | None:
        if not any(self._carries):
            return None
        pairs = zip(self._carries, xs, strict=True)
        return [None if carry is None else Memory(carry.memories[0], x, carry.memories[1]) for carry, x in pairs]
