"""A weight as packed codes of its quantizer, and back: the numbers are exactly those of fake quantization.

A width is stored as planes of 8, 4, 2 or 1 bits, the low bits of a code first, as on the wire (thinwire.wire.PLANES).
Byte j of a plane holds the codes j, j + L, j + 2L, ... of the row, the first in its low bits, where L is the number of
the plane's bytes. A row is filled up to a multiple of eight codes.

Shape suffixes: R rows, N codes of a row, B bytes of a row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire.kernels import Grid, packing
from thinwire.kernels.fake_quantize import codes_of, values_of
from thinwire.qat.lsq import LSQ
from thinwire.qat.ops import lay_out
from thinwire.wire import PLANES


@dataclass(frozen=True)
class Coding:
    """The integers of a quantizer, and which elements of a weight share a scale.

    Codes count from the lowest integer of the range: code = integer - quant_min. Groups run through the flattened rows
    of a weight, so the shape of a row does not matter to them.
    """

    bits: int
    grid: Grid
    axis: int | None
    group: int

    @classmethod
    def of(cls, quantizer: LSQ) -> Self:
        """The coding of a quantizer whose start is over."""
        grid = Grid(quantizer.quant_min, quantizer.quant_max, offset=quantizer.offset is not None, paper=True)
        return cls(quantizer.bits, grid, quantizer.axis, quantizer.group)

    def codes(self, x: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
        """The codes of x in its shape, uint8; NaN has the code 0."""
        laid = lay_out(x, scale.numel(), self.axis, self.group)
        return codes_of(self.grid, laid.view(x), scale, offset).view(x.shape)

    def values(self, codes: Tensor, scale: Tensor, offset: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The numbers of these codes; where a channel's scale is NaN, so are its numbers."""
        out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
        laid = lay_out(out, scale.numel(), self.axis, self.group)
        values_of(self.grid, laid.view(codes), scale, offset, laid.view(out))
        return out


def pack(codes_RN: Tensor, bits: int) -> Tensor:
    """uint8 codes below 2**bits as bytes."""
    full_RN = pad(codes_RN, (0, -codes_RN.shape[1] % 8))
    return torch.cat([packing.pack(full_RN, shift, width) for shift, width in _planes(bits)], 1)


def unpack(packed_RB: Tensor, bits: int, numel: int) -> Tensor:
    """The codes of `pack`."""
    eighth = -(-numel // 8)
    codes_RN = packed_RB.new_zeros(len(packed_RB), 8 * eighth)
    for shift, width in _planes(bits):
        plane = packed_RB[:, shift * eighth : (shift + width) * eighth]
        codes_RN |= packing.unpack(plane, width) << shift
    return codes_RN[:, :numel]


def _planes(bits: int) -> Iterator[tuple[int, int]]:
    """The lowest bit of every plane, and how many it has."""
    return zip(accumulate(PLANES[bits], initial=0), PLANES[bits], strict=False)
