"""A weight as packed codes of its quantizer, and back: the numbers are exactly those of fake quantization.

A width is stored as planes of 8, 4, 2 or 1 bits, the low bits of a code first, as on the wire (thinwire.wire.PLANES).
Byte j of a plane holds the codes j, j + L, j + 2L, ... of the row, the first in its low bits, where L is the number of
the plane's bytes. A row is filled up to a multiple of eight codes.

Shape suffixes: R rows, N codes of a row, B bytes of a row.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from thinwire.kernels import Grid, packing
from thinwire.kernels.fake_quantize import codes_of, values_of
from thinwire.qat.lsq import LSQ
from thinwire.qat.ops import lay_out, never_narrow
from thinwire.wire import PLANES


class IntegerWeight(nn.Module):
    """A weight as packed codes and the scales of its channels. Its numbers exist only while a layer uses them.

    Codes count from the lowest integer of the range: code = integer - quant_min. Buffers: `packed`, a row of bytes for
    every index of the first axis; `scale` and `offset` (or None) in fp32, fp64 after `.double()`; `quant_range`, the
    lowest and the highest integer. The numbers come in the floating-point type the model was last cast to.
    """

    packed: Tensor
    scale: Tensor
    offset: Tensor | None
    quant_range: Tensor

    def __init__(self, weight: Tensor, quantizer: LSQ) -> None:
        super().__init__()
        self.bits = quantizer.bits
        self.axis = quantizer.axis
        self.group = quantizer.group  # groups run through the flattened rows, whatever their shape
        self.grid = Grid(quantizer.quant_min, quantizer.quant_max, offset=quantizer.offset is not None, paper=True)
        self.shape = weight.shape
        self.dtype = weight.dtype
        plain = weight.is_contiguous() or not weight.is_contiguous(memory_format=torch.channels_last)
        self.memory_format = torch.contiguous_format if plain else torch.channels_last
        scale = quantizer.floored().detach().clone()
        offset = None if quantizer.offset is None else quantizer.offset.detach().clone()
        source = weight.detach().contiguous()
        laid = lay_out(source, scale.numel(), self.axis, self.group)
        codes = codes_of(self.grid, laid.view(source), scale, offset)
        self.register_buffer("packed", pack(codes.view(len(weight), -1), self.bits))
        self.register_buffer("scale", scale)
        self.register_buffer("offset", offset)
        self.register_buffer("quant_range", quantizer.quant_range.clone())

    def forward(self) -> Tensor:
        """The whole weight."""
        return self._values(self.codes(), self.scale, self.offset).contiguous(memory_format=self.memory_format)

    def codes(self) -> Tensor:
        """The codes of the whole weight, uint8."""
        return unpack(self.packed, self.bits, self.shape[1:].numel()).reshape(self.shape)

    def rows(self, index: Tensor) -> Tensor:
        """The rows of a table at these indices; no other is decoded."""
        flat = index.reshape(-1)
        scale = self.scale.view(len(self.packed), -1)[flat].flatten()
        offset = None if self.offset is None else self.offset.view(len(self.packed), -1)[flat].flatten()
        codes = unpack(self.packed.index_select(0, flat), self.bits, self.shape[1])
        return self._values(codes, scale, offset).view(*index.shape, self.shape[1])

    def _values(self, codes: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
        """The numbers of these codes; where a channel's scale is NaN, so are its numbers."""
        out = torch.empty(codes.shape, dtype=self.dtype, device=codes.device)
        laid = lay_out(out, scale.numel(), self.axis, self.group)
        values_of(self.grid, laid.view(codes), scale, offset, laid.view(out))
        return out

    def extra_repr(self) -> str:
        """The weight's shape, and the range of its integers."""
        return f"{tuple(self.shape)}, bits={self.bits}, {self.grid.quant_min}..{self.grid.quant_max}"

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(partial(never_narrow, fn), recurse)  # type: ignore[no-untyped-call]
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        saved = state_dict.get(prefix + "quant_range")
        if saved is not None and not saved.is_meta:
            low, high = saved.tolist()
            self.grid = replace(self.grid, quant_min=low, quant_max=high)
        super()._load_from_state_dict(state_dict, prefix, *rest)


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
