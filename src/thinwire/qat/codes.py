"""A weight as the codes of its quantiser, and back: the numbers are exactly those of fake quantisation."""

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from thinwire.kernels import Grid
from thinwire.kernels.fake_quantize import codes_of, values_of
from thinwire.qat.lsq import LSQ
from thinwire.qat.ops import Laid, lay_out


@dataclass(frozen=True)
class Coding:
    """The integers of a quantiser, and which elements of a weight share a scale.

    Codes count from the lowest integer of the range: code = integer - quant_min. Groups run through the flattened rows
    of a weight, so the shape of a row does not matter to them.
    """

    bits: int
    grid: Grid
    axis: int | None
    group: int

    @classmethod
    def of(cls, quantizer: LSQ) -> Self:
        """That of a quantiser whose start is over."""
        grid = Grid(quantizer.quant_min, quantizer.quant_max, offset=quantizer.offset is not None, paper=True)
        return cls(quantizer.bits, grid, quantizer.axis, quantizer.group)

    def lay_out(self, x: Tensor, scale: Tensor) -> Laid:
        """How kernels see x, which is contiguous."""
        assert x.is_contiguous()
        return lay_out(x, scale.numel(), self.axis, self.group)

    def codes(self, x: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
        """The codes of x in its shape, uint8; NaN has the code 0."""
        laid = self.lay_out(x, scale)
        return codes_of(self.grid, laid.view(x), scale, offset).view(x.shape)

    def values(self, codes: Tensor, scale: Tensor, offset: Tensor | None, out: Tensor) -> None:
        """out = the numbers of these codes; of a channel whose scale is NaN they are NaN."""
        laid = self.lay_out(out, scale)
        values_of(self.grid, laid.view(codes), scale, offset, laid.view(out))
