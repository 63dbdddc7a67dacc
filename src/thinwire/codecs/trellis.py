"""Trellis-coded quantization: 1 to 3 bits at a smaller error than any quantizer of one number at a time."""

from dataclasses import dataclass
from typing import ClassVar

from thinwire.codecs.lloyd import Lloyd
from thinwire.wire import Kind


@dataclass(frozen=True)
class Trellis(Lloyd):
    """Lloyd's rotation and scale, and codes of 64 numbers that are chosen together.

    Its wire is as long as that of `Lloyd` with the same bits and block. Encoding takes longer.
    """

    bits: int = 2  # fewer => smaller wire, larger error

    kind: ClassVar[Kind] = Kind.TRELLIS
    most_bits: ClassVar[int] = 3
