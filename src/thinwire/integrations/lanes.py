"""Cuts the parameters of a bucket into lanes: those that share a codec and a feedback.

[Note: Bridges] The largest lane is usually one stretch of the bucket with a few small parameters of other lanes in it
(biases between weights). It then travels as that one stretch, in place, with zeros where the small ones were; these are
copied out first and back at the end. That costs a few codes of zeros and saves two copies of everything.

[Note: Aside] A program encodes small lanes without blocks straight from the bucket, where it leaves zeros, and decodes
them into it (rows.Picked). Others are copied out and back; what the lane that bridges them remembers there is zeroed.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.collectives.lane import LaneSpec
from thinwire.collectives.message import Message
from thinwire.collectives.workspaces import Workspace
from thinwire.feedback import Piece
from thinwire.integrations.choice.moments import Undo
from thinwire.integrations.models import PADDING
from thinwire.integrations.stats import Tally
from thinwire.kernels.rows import Bad, Memory, Picked, taken

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

    def part_of(self, buffer: Tensor) -> Tensor:
        """Its numbers, as one tensor: a view or a copy."""
        parts = [buffer[begin:end] for begin, end in self.stretches]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


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
    edges = [0, *itertools.accumulate(spec.numel for spec in specs)]
    inside = set(members)
    starts = [edges[i] for i in members if i - 1 not in inside]
    ends = [edges[i + 1] for i in members if i + 1 not in inside]
    spec = specs[kept]._replace(numel=_numel(specs, members))
    return BucketLane(spec, tuple(members), bridged, pieces, tuple(zip(starts, ends, strict=True)), aside)


def _numel(specs: Sequence[LaneSpec], members: Sequence[int]) -> int:
    return sum(specs[i].numel for i in members)


def load(
    lanes: Sequence[BucketLane], views: Sequence[Tensor], buffer: Tensor
) -> tuple[list[list[Tensor]], list[tuple[Tensor, Tensor]]]:
    """The tensors of every lane, and the (view, numbers) to copy back at the end; `buffer` holds all views."""
    tensors: list[list[Tensor]] = []
    copies: list[tuple[Tensor, Tensor]] = []
    for lane in lanes:
        if lane.aside:
            parts = [views[i] for i in lane.members]
            numbers = torch.cat(parts)
            copies += zip(parts, numbers.split([part.numel() for part in parts]), strict=True)
            tensors.append([numbers])
        else:
            tensors.append([buffer[begin:end] for begin, end in lane.stretches])
    if lanes[0].bridged:
        torch._foreach_zero_([views[i] for i in lanes[0].bridged])
    return tensors, copies


def can_pick(lanes: Sequence[BucketLane], dtype: torch.dtype) -> bool:
    """Whether a program may pick the lanes that are aside out of the others' numbers (rows.Picked)."""
    plain = [not lane.spec.codec.encoding(dtype).format.block for lane in lanes]
    fits = [p if lane.aside else len(lane.stretches) == 1 for p, lane in zip(plain, lanes, strict=True)]
    return all(fits) and not any(lane.spec.feedback for lane in lanes)


class StreamedBucket:
    """A program (collectives.programs) on a bucket's buffer: the same launches at every step."""

    def __init__(self, message: Message, lanes: Sequence[BucketLane], carries: Sequence[Any], tally: Tally) -> None:
        self.is_new = True  # until it has run
        self.weigh: Callable[[], Undo] | None = None  # the next call's numbers
        self._program = message.program
        self._picks = self._program.count == 1 and can_pick(lanes, message.dtype)
        self._copied = message.algorithm != "one_shot"  # a rank adds its own numbers as they are
        device = message.channel.device
        spans_L = [[torch.arange(*span) for span in lane.stretches if lane.aside] for lane in lanes]
        indices = [torch.cat(spans).to(device) if spans else None for spans in spans_L]  # of lanes that are aside
        self._lanes = [*zip(lanes, indices, strict=True)]
        kept = [carry and carry.memories for carry in carries]  # programs find a place for what is left
        self._memories = [pair and Memory(pair[0], pair[0], pair[1]) for pair in kept] if any(carries) else None
        starts = [0, *itertools.accumulate(piece.numel for piece in lanes[0].pieces)]
        gaps = [torch.arange(starts[i], starts[i + 1]) for i, p in enumerate(lanes[0].pieces) if p.name is None]
        self._gaps = torch.cat(gaps).to(device) if gaps and carries[0] is not None else None
        self._note = tally.new_note(device)  # which chunks were not finite
        self._chunks = 0  # that were averaged

    def __call__(self, space: Workspace, tensors: Sequence[Tensor], step: int) -> None:
        """See Program."""
        (buffer,) = tensors
        undo = None
        if self.weigh is not None and not space.dry_run:
            undo, self.weigh = self.weigh(), None
        if self._gaps is not None and self._memories is not None:
            self._memories[0].kept.index_fill_(0, self._gaps, 0)
        xs = [self._load(*lane, buffer) for lane in self._lanes[::-1]][::-1]  # first those that the first one bridges
        self._program(space, xs, step, self._memories, Bad(self._note, self._chunks % (1 << 30) + 1))
        self._chunks += self._program.count
        for (lane, index), x in () if self._picks else zip(self._lanes, xs, strict=True):
            if index is not None:
                buffer.index_copy_(0, index, x)
            elif len(lane.stretches) > 1:
                parts = [buffer[begin:end] for begin, end in lane.stretches]
                torch._foreach_copy_(parts, x.split([part.numel() for part in parts]))
        if undo is not None:
            undo(moved=False)
        self.is_new = False

    def _load(self, lane: BucketLane, index: Tensor | None, buffer: Tensor) -> Any:
        """A lane's numbers in the bucket: its stretch of it, a copy, or what the program picks."""
        if index is None:
            return lane.part_of(buffer)
        picked = Picked(buffer, index, buffer.new_empty(len(index)) if self._copied else None)
        return picked if self._picks else taken(picked)
