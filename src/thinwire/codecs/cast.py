"""Wires that hold the numbers themselves: unchanged, or in a shorter float format."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from thinwire.codecs.base import Codec
from thinwire.codecs.checks import check_block
from thinwire.errors import CodecError
from thinwire.kernels.schema import Encoding
from thinwire.wire import IDENTITY_DTYPES, CastVariant, Format, Kind

FloatFormat = Literal["bf16", "fp16", "e4m3", "e5m2"]
_BITS = {"bf16": 16, "fp16": 16, "e4m3": 8, "e5m2": 8}


@dataclass(frozen=True)
class Identity(Codec):
    """No compression: the tensor's own bytes. Exact, sums in fp32 (fp64 for double tensors)."""

    inputs = IDENTITY_DTYPES

    def encoding(self, dtype: torch.dtype) -> Encoding:
        """Raw numbers of `dtype`."""
        return Encoding(Format(Kind.IDENTITY, 8 * dtype.itemsize, IDENTITY_DTYPES.index(dtype), 0))

    def __str__(self) -> str:
        return "none"


@dataclass(frozen=True)
class Cast(Codec):
    """A shorter float. fp16 and the 8-bit formats carry a power-of-two scale per block: nothing over- or underflows.

    bf16 has the range of fp32, needs no scale and keeps every NaN and Inf in its element. fp16 with block=0 is a plain
    cast too; numbers beyond 65504 become infinite in it.
    """

    format: FloatFormat = "bf16"
    block: int = 128  # larger => fewer scale bytes, more numbers of a block underflow; 0 (fp16 only) => no scales

    inputs = IDENTITY_DTYPES

    def __post_init__(self) -> None:
        if self.format not in get_args(FloatFormat):
            raise CodecError(f"format must be one of {', '.join(get_args(FloatFormat))}, got {self.format!r}")
        if not self._plain_half:
            check_block(self.block)
        if self.format == "bf16" and self.block != 128:
            raise CodecError("bf16 has no blocks: it keeps the range of fp32 and needs no scale")

    def encoding(self, dtype: torch.dtype) -> Encoding:
        """Numbers of self.format, whatever the input's dtype."""
        if self._plain_half:
            return Identity().encoding(torch.float16)
        block = 0 if self.format == "bf16" else self.block
        return Encoding(Format(Kind.CAST, _BITS[self.format], CastVariant[self.format.upper()], block))

    @property
    def _plain_half(self) -> bool:
        return self.format == "fp16" and self.block == 0

    def __str__(self) -> str:
        return self._spell(self.format, "block")
