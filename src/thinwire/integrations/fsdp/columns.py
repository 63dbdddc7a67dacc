"""Rows of a flat buffer, one per rank and all laid out alike, as lanes: columns that share a codec and a feedback.

The largest lane is the buffer itself, with zeros where small lanes were set aside ([Note: Bridges] in lanes.py).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from thinwire.feedback import Piece
from thinwire.integrations.lanes import BucketLane


class Columns:
    """`width`: elements of a row."""

    def __init__(self, lanes: Sequence[BucketLane], width: int, device: torch.device) -> None:
        self.lanes = lanes
        self._in_place = lanes[0].stretches == ((0, width),)
        copied = lanes[int(self._in_place) :]  # a lane in place has all columns
        self._index = [_index(lane).to(device) for lane in copied]  # which columns each of the others has
        inside = [index for lane, index in zip(copied, self._index, strict=True) if lane.aside]
        self._bridged = torch.cat(inside) if inside else None

    def split(self, rows: Tensor) -> list[Tensor]:
        """Every lane's columns of a matrix, which changes."""
        first = 1 - int(self._in_place)  # the largest lane, if it is copied, without what was set aside
        others = [rows.index_select(1, index) for index in self._index[first:]]
        if self._bridged is not None:
            rows.index_fill_(1, self._bridged, 0)
        return [rows if self._in_place else rows.index_select(1, self._index[0]), *others]

    def blank(self, rows: Tensor) -> list[Tensor]:
        """Places for every lane's columns of a matrix, which `join` puts together."""
        blanks = [rows.new_empty((rows.shape[0], index.numel())) for index in self._index]
        return [rows, *blanks] if self._in_place else blanks

    def join(self, parts: Sequence[Tensor], rows: Tensor) -> None:
        """rows = what `split` would have split into `parts`."""
        for part, index in zip(parts[int(self._in_place) :], self._index, strict=True):
            rows.index_copy_(1, index, part)

    def pieces(self, at: int, held: Sequence[Mapping[str, int]]) -> tuple[Piece, ...]:
        """The elements of a lane's rows, by parameter and row; what is no parameter's is padding."""
        found = []
        for row, numels in enumerate(held):
            for piece in self.lanes[at].pieces:
                numel = 0 if piece.name is None else numels[piece.name]
                found.append(Piece(piece.name and row_name(piece.name, row), numel))
                found.append(Piece(None, piece.numel - numel))
        return tuple(piece for piece in found if piece.numel)


def row_name(name: str, row: int) -> str:
    """What a parameter's part in the row of a rank is called."""
    return f"{name}#{row}"


def _index(lane: BucketLane) -> Tensor:
    return torch.cat([torch.arange(begin, end) for begin, end in lane.stretches])
