"""The largest numbers of every block: fractions of a bit per element, for what is summed up by error feedback."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from thinwire.codecs.base import Codec
from thinwire.errors import CodecError
from thinwire.kernels.schema import Encoding
from thinwire.wire import KEPT_UNIT, Format, Kind

BLOCK = 4096


@dataclass(frozen=True)
class TopK(Codec):
    """The numbers of largest magnitude of every block of 4096, each in 2 bits and the bits of its place.

    All others decode to 0, so it makes sense where what was lost is sent later: with error feedback. Sums of such wires
    are not encoded again.
    """

    fraction: float = 0.03125  # of the numbers, in steps of 1/256; smaller => smaller wire, larger error

    recodes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isinstance(self.fraction, float) or not 1 / 256 <= self.fraction <= 1 / 4:
            raise CodecError(f"fraction must be from 1/256 to 1/4, such as 0.02, got {self.fraction!r}")

    @property
    def kept(self) -> int:
        """Numbers that are kept of every block."""
        return KEPT_UNIT * round(self.fraction * BLOCK / KEPT_UNIT)

    @property
    def unit(self) -> int:
        """A block: a short one keeps as many numbers as a whole one."""
        return BLOCK

    def encoding(self, dtype: torch.dtype) -> Encoding:
        """Codes of 2 bits, whatever the input's dtype."""
        return Encoding(Format(Kind.TOPK, 2, self.kept // KEPT_UNIT, BLOCK))

    def __str__(self) -> str:
        return self._spell("topk", "fraction")
