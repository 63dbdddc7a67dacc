"""Trellis-coded quantization: 1 to 3 bits at a smaller error than any quantizer of one number at a time."""

from dataclasses import dataclass

import torch

from thinwire.codecs.checks import check_bits
from thinwire.codecs.lloyd import Lloyd
from thinwire.kernels.schema import Encoding
from thinwire.wire import Format, Kind, LloydVariant


@dataclass(frozen=True)
class Trellis(Lloyd):
    """Lloyd's rotation and scale, and codes of 64 numbers that are chosen together.

    Its wire is as long as that of `Lloyd` with the same bits and block. Encoding takes longer.
    """

    bits: int = 2  # fewer => smaller wire, larger error

    def __post_init__(self) -> None:
        check_bits(self.bits, 1, 3)
        super().__post_init__()

    def encoding(self, dtype: torch.dtype) -> Encoding:
        """Trellis codes, whatever the input's dtype."""
        variant = LloydVariant.ROTATED if self.rotate else LloydVariant.PLAIN
        return Encoding(Format(Kind.TRELLIS, self.bits, variant, self.block), unbiased=self.scale == "unbiased")

    def __str__(self) -> str:
        return self._spell(f"trellis{self.bits}", "block", "rotate", "scale", "seed")
