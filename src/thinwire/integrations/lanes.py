"""Cuts the parameters of a bucket into lanes: those that share a codec and a feedback.

[Note: Bridges] The largest lane is usually one stretch of the bucket with a few small parameters of other lanes in it
(biases between weights). It then travels as that one stretch, in place, with zeros where the small ones were; these are
copied out first and back at the end. That costs a few codes of zeros and saves two copies of everything.

[Note: Aside] A program encodes small lanes without blocks straight from the bucket, where it leaves zeros, and decodes
them into it (rows.Picked). Others are copied out and back; what the lane that bridges them remembers there is zeroed.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.collectives.chunks import LaneSpec
from thinwire.collectives.message import SumMessage
from thinwire.collectives.programs import Workspace
from thinwire.feedback import Piece
from thinwire.integrations.choice.moments import Undo
from thinwire.integrations.models import PADDING
from thinwire.integrations.stats import Tally
from thinwire.kernels.rows import Memory, Picked, taken

_BRIDGE = 16  # the largest lane bridges lanes that are this many times smaller


@dataclass(frozen=True)
class BucketLane:
    """Parameters of a bucket that travel as one lane of its message."""

    spec: LaneSpec
    pieces: tuple[Piece, ...]  # the name and size of each; those that belong to another lane have no name
    stretches: tuple[tuple[int, int], ...]  # (begin, end) of the parts of the bucket that hold them
    aside: bool  # whether another lane bridges this one, so that its numbers are copied out of the bucket and back

    def parts_of(self, buffer: Tensor) -> list[Tensor]:
        """Its stretches of a bucket."""
        return [buffer[begin:end] for begin, end in self.stretches]

    def read(self, buffer: Tensor) -> Tensor:
        """Its numbers as one tensor: a view of a single stretch, or a copy."""
        parts = self.parts_of(buffer)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def write(self, numbers: Tensor, buffer: Tensor) -> None:
        """Copy its numbers to where they belong."""
        parts = self.parts_of(buffer)
        torch._foreach_copy_(parts, numbers.split([part.numel() for part in parts]))


def lanes_of(
    names: Sequence[str], specs: Sequence[LaneSpec], *, whole: bool = False, bridge: float = _BRIDGE
) -> list[BucketLane]:
    """The lanes of a bucket whose parameters have these `specs`, the largest lane first.

    It bridges lanes that are `bridge` times smaller; with `whole` also their parameters at the ends of the bucket.
    """
    found: dict[tuple[object, ...], list[int]] = {}
    for i, spec in enumerate(specs):
        found.setdefault((spec.codec, spec.feedback), []).append(i)
    size = {kind: sum(specs[i].numel for i in members) for kind, members in found.items()}
    kinds = sorted(found, key=lambda kind: -size[kind])
    main = found[kinds[0]]
    aside = {kind for kind in kinds[1:] if bridge * size[kind] <= size[kinds[0]]}
    bridged = {i for kind in aside for i in found[kind] if whole or main[0] < i < main[-1]}
    edges = [0, *itertools.accumulate(spec.numel for spec in specs)]
    lanes = []
    for kind in kinds:
        named = {i for i in found[kind] if not names[i].startswith(PADDING)}
        inside = {*found[kind], *(bridged if kind == kinds[0] else ())}
        pieces = tuple(Piece(names[i] if i in named else None, specs[i].numel) for i in sorted(inside))
        starts = [edges[i] for i in sorted(inside) if i - 1 not in inside]
        ends = [edges[i + 1] for i in sorted(inside) if i + 1 not in inside]
        scattered = len(starts) > 1 and kind not in aside
        spec = specs[found[kind][0]]._replace(numel=sum(piece.numel for piece in pieces), scattered=scattered)
        lanes.append(BucketLane(spec, pieces, tuple(zip(starts, ends, strict=True)), kind in aside))
    return lanes


def load(lanes: Sequence[BucketLane], buffer: Tensor) -> tuple[list[list[Tensor]], list[tuple[Tensor, Tensor]]]:
    """The tensors of every lane, and the (part of the buffer, numbers) to copy back at the end: zeros until then."""
    tensors: list[list[Tensor]] = []
    copies: list[tuple[Tensor, Tensor]] = []
    for lane in lanes:
        parts = lane.parts_of(buffer)
        if lane.aside:
            numbers = torch.cat(parts)
            copies += zip(parts, numbers.split([part.numel() for part in parts]), strict=True)
            parts = [numbers]
        tensors.append(parts)
    if copies:
        torch._foreach_zero_([part for part, _ in copies])
    return tensors, copies


def can_pick(lanes: Sequence[BucketLane], dtype: torch.dtype) -> bool:
    """Whether a program may pick the lanes that are aside out of the others' numbers (rows.Picked)."""
    plain = [not lane.spec.codec.encoding(dtype).format.block for lane in lanes]
    fits = [p if lane.aside else len(lane.stretches) == 1 for p, lane in zip(plain, lanes, strict=True)]
    return all(fits) and not any(lane.spec.feedback for lane in lanes)


class StreamedBucket:
    """A program (collectives.programs) on a bucket's buffer: the same launches at every step."""

    def __init__(
        self, key: object, message: SumMessage, lanes: Sequence[BucketLane], carries: Sequence[Any], tally: Tally
    ) -> None:
        self.is_new = True  # until it has run
        self.weigh: Callable[[], Undo] | None = None  # the next call's numbers
        self._program = message.program
        self._picks = self._program.count == 1 and can_pick(lanes, message.dtype)
        self._copied = message.algorithm != "one_shot"  # a rank adds its own numbers as they are
        device = message.channel.device
        # Of lanes that are aside: where their numbers lie in the bucket.
        spans_L = [[torch.arange(*span) for span in lane.stretches if lane.aside] for lane in lanes]
        self._lanes = [(n, torch.cat(s).to(device) if s else None) for n, s in zip(lanes, spans_L, strict=True)]
        kept = [carry and Memory(carry.kept, carry.kept, carry.mean) for carry in carries]
        self._memories = kept if any(carries) else None  # programs find a place for what is left
        # What the first lane remembers, and where other lanes lie in it.
        gaps = [torch.arange(*gap) for gap in carries[0].gaps] if carries[0] else []
        self._forgets = (kept[0][0], torch.cat(gaps).to(device)) if gaps else None
        self._note = functools.partial(tally.note, key, device, self._program.count)

    def __call__(self, space: Workspace, tensors: Sequence[Tensor], step: int) -> None:
        """See Program."""
        (buffer,) = tensors
        undo = None
        if self.weigh is not None and not space.dry_run:
            undo, self.weigh = self.weigh(), None
        if self._forgets is not None:
            memory, gaps = self._forgets
            memory.index_fill_(0, gaps, 0)
        xs = [self._load(*lane, buffer) for lane in self._lanes[::-1]][::-1]  # first those that the first one bridges
        self._program(space, xs, step, self._memories, self._note())
        if not self._picks:
            self._store(xs, buffer)
        if undo is not None:
            undo(moved=False)
        self.is_new = False

    def _load(self, lane: BucketLane, index: Tensor | None, buffer: Tensor) -> Any:
        """A lane's numbers in the bucket: its stretch of it, a copy, or what the program picks."""
        if index is None:
            return lane.read(buffer)
        picked = Picked(buffer, index, buffer.new_empty(len(index)) if self._copied else None)
        return picked if self._picks else taken(picked)

    def _store(self, xs: Sequence[Tensor], buffer: Tensor) -> None:
        """Copy to the bucket what `_load` copied."""
        for (lane, index), x in zip(self._lanes, xs, strict=True):
            if index is not None:
                buffer.index_copy_(0, index, x)
            elif len(lane.stretches) > 1:
                lane.write(x, buffer)
