"""Integers of 2 to 8 bits under one scale per block."""

from dataclasses import dataclass
from typing import Literal

import torch

from thinwire.codecs.base import Codec
from thinwire.codecs.checks import check_bits, check_block, check_flag, check_seed
from thinwire.errors import CodecError
from thinwire.kernels.schema import Encoding
from thinwire.wire import Format, IntVariant, Kind


@dataclass(frozen=True)
class BlockInt(Codec):
    """Uniform quantization by the block's peak (symmetric) or by its minimum and maximum (affine).

    Error of an element <= scale / 2. Symmetric: scale = peak / (2**(bits-1) - 1), rounded to 16 bits. Affine: scale =
    (maximum - minimum) / (2**bits - 1), rounded up, the minimum rounded down to 16 bits first. With stochastic rounding
    the error is <= scale, and zero on average.
    """

    bits: int = 8  # fewer => smaller wire, larger error
    block: int = 128  # smaller => scales follow the data, 16 bits (affine 32) more for each
    mode: Literal["symmetric", "affine"] = "symmetric"
    rounding: Literal["nearest", "stochastic"] = "nearest"  # stochastic => unbiased, twice the squared error
    seed: int = 0
    aligned: bool = False  # True => collectives cut messages between blocks only: blocks are those of the whole tensor

    def __post_init__(self) -> None:
        check_bits(self.bits, 2, 8)
        check_block(self.block)
        check_seed(self.seed)
        if self.mode not in ("symmetric", "affine"):
            raise CodecError(f"mode must be 'symmetric' or 'affine', got {self.mode!r}")
        if self.rounding not in ("nearest", "stochastic"):
            raise CodecError(f"rounding must be 'nearest' or 'stochastic', got {self.rounding!r}")
        check_flag("aligned", self.aligned)

    @property
    def unit(self) -> int:
        """A block where `aligned` asks for it, else one element."""
        return self.block if self.aligned else 1

    def encoding(self, dtype: torch.dtype) -> Encoding:
        """Block integers, whatever the input's dtype."""
        variant = IntVariant.AFFINE if self.mode == "affine" else IntVariant.SYMMETRIC
        format = Format(Kind.BLOCK_INT, self.bits, variant, self.block)
        return Encoding(format, stochastic=self.rounding == "stochastic")

    def __str__(self) -> str:
        return self._spell(f"int{self.bits}", "block", "mode", "rounding", "seed", "aligned")
