"""A weight as packed codes of its quantizer, and back: the numbers are exactly those of fake quantization.

A width is stored as planes of 8, 4, 2 or 1 bits, the low bits of a code first, as on the wire (thinwire.wire.PLANES).
Byte j of a plane holds the codes j, j + L, j + 2L, ... of the row, the first in its low bits, where L is the number of
the plane's bytes. A row is filled up to a multiple of eight codes.

[Note: Quantize before gather] A sharded weight travels an all-gather as such codes. It is cut along its first axis as
FSDP2 cuts it: every rank has ceil(rows / world) rows, the last ones fewer or none. All wires of a gather are equally
long:

    scales of the shard's channels | their offsets, where there are any | codes at `bits`, packed as one row

There is room for a whole shard; what a shorter one leaves is zero. Nothing in a wire is aligned.

[Note: Gradients after the scatter] The straight-through rule is linear in the gradient of the quantized weight, so it
runs once, on the shard, after the reduce-scatter, instead of on every rank before it. The factor of a scale's gradient
counts the elements of the whole weight under that scale, of which a shard may hold a part only.

Shape suffixes: R rows, N codes of a row or bytes of a wire, B bytes of a row, W ranks, C channels of a shard.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire.errors import QatError
from thinwire.kernels import FakeGradients, Grid, packing, select
from thinwire.kernels.fake_quantize import codes_of, values_of
from thinwire.qat.agreement import is_sharded
from thinwire.qat.lsq import LSQ
from thinwire.qat.ops import Laid, gradient_factor, lay_out
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

    def lay_out(self, x: Tensor, scale: Tensor) -> Laid:
        """How kernels see x, which is contiguous."""
        assert x.is_contiguous()
        return lay_out(x, scale.numel(), self.axis, self.group)

    def codes(self, x: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
        """The codes of x in its shape, uint8; NaN has the code 0."""
        laid = self.lay_out(x, scale)
        return codes_of(self.grid, laid.view(x), scale, offset).view(x.shape)

    def values(self, codes: Tensor, scale: Tensor, offset: Tensor | None, out: Tensor) -> None:
        """out = the numbers of these codes; where a channel's scale is NaN, so are its numbers."""
        laid = self.lay_out(out, scale)
        values_of(self.grid, laid.view(codes), scale, offset, laid.view(out))


def packed_bytes(numel: int, bits: int) -> int:
    """Bytes of a row of `numel` codes."""
    return -(-numel // 8) * bits


def pack(codes_RN: Tensor, bits: int) -> Tensor:
    """uint8 codes below 2**bits as bytes."""
    full_RN = pad(codes_RN, (0, -codes_RN.shape[1] % 8))
    planes = []
    shift = 0
    for width in PLANES[bits]:
        planes.append(packing.pack(full_RN, shift, width))
        shift += width
    return torch.cat(planes, 1)


def unpack(packed_RB: Tensor, bits: int, numel: int) -> Tensor:
    """The codes of `pack`."""
    eighth = -(-numel // 8)
    codes_RN = packed_RB.new_zeros(len(packed_RB), 8 * eighth)
    shift = 0
    for width in PLANES[bits]:
        plane = packed_RB[:, shift * eighth : (shift + width) * eighth]
        codes_RN |= packing.unpack(plane, width) << shift
        shift += width
    return codes_RN[:, :numel]


class ShardGradients(NamedTuple):
    """Gradients of a weight's shard, and of scale and offset in the shape in which the quantizer holds them."""

    weight: Tensor
    scale: Tensor
    offset: Tensor | None


class WeightCodes:
    """How one rank's shard of a weight travels, and what comes back as gradients. Makes no collective call itself.

    The quantizer holds all scales on every rank. Those that belong to rows (`axis=0` and groups) may also be cut like
    the rows, so that a rank holds its own only: that is what `fully_shard` makes of `axis=0`.
    """

    def __init__(self, quantizer: LSQ, shape: Sequence[int], *, rank: int, world: int) -> None:
        if not 0 <= rank < world:
            raise QatError(f"rank must be within 0..{world - 1}, got {rank}")
        if not quantizer.initialized:
            raise QatError("the quantizer has no scale yet: run qat.calibrate(model, batches) before sharding")
        if not math.prod(shape):
            raise QatError(f"a weight of shape {tuple(shape)} has nothing to send")
        self.quantizer = quantizer
        self.shape = torch.Size(shape)
        self.rank = rank
        self.world = world
        self._row = self.shape[1:].numel()
        self._most = -(-self.shape[0] // world)  # rows of a full shard
        self._per_row = self._scales_per_row()
        self._every = self._scales_of(self.shape[0])
        self._check_scales()

    @property
    def wire_bytes(self) -> int:
        """Bytes of every wire of the gather."""
        return self._codes_at + packed_bytes(self._most * self._row, self.quantizer.bits)

    def rows(self, rank: int) -> slice:
        """The rows of the whole weight that rank `rank` holds."""
        return slice(*(min(at * self._most, self.shape[0]) for at in (rank, rank + 1)))

    @torch.no_grad()
    def encode(self, shard: Tensor, wire: Tensor) -> None:
        """wire = the shard's scales and codes. A channel in which a weight is not finite gets a scale of NaN."""
        self._check_shard(shard)
        self._check_wire(wire)
        shard = shard.contiguous()
        coding = Coding.of(self.quantizer)
        scale, offset = self._own(self.quantizer.scale.dtype)
        codes = coding.codes(shard, scale, offset)
        finite_C = coding.lay_out(shard, scale).view(shard).isfinite().all(2).all(0)
        heads = [scale.where(finite_C, torch.nan), *([] if offset is None else [offset])]
        heads = [pad(head, (0, self._scales_of(self._most) - len(head))).view(torch.uint8) for head in heads]
        full_1N = pad(codes.view(1, -1), (0, self._most * self._row - codes.numel()))
        wire.copy_(torch.cat([*heads, pack(full_1N, coding.bits)[0]]))

    @torch.no_grad()
    def decode(self, wire: Tensor, out: Tensor) -> None:
        """out = the numbers of a wire: those of fake quantization, in out's type. out has the rows of that rank."""
        self._check_wire(wire)
        head = wire[: self._codes_at].clone()  # a wire may lie at any address
        heads = head.view(self.quantizer.scale.dtype).view(-1, self._scales_of(self._most))
        scale, *offset = heads[:, : self._scales_of(len(out))]
        codes = unpack(wire[self._codes_at :].view(1, -1), self.quantizer.bits, self._most * self._row)
        Coding.of(self.quantizer).values(codes[0, : out.numel()], scale, offset[0] if offset else None, out)

    def decode_all(self, wires_WN: Tensor, out: Tensor) -> None:
        """out = the whole weight, of the wires of all ranks."""
        if out.shape != self.shape or not out.is_contiguous():
            raise QatError(f"out must be contiguous and of shape {tuple(self.shape)}, got {tuple(out.shape)}")
        for rank, wire in enumerate(wires_WN.reshape(self.world, self.wire_bytes)):
            self.decode(wire, out[self.rows(rank)])

    @torch.no_grad()
    def gradients(self, shard: Tensor, grad: Tensor) -> ShardGradients:
        """LSQ's rule for the shard, given the reduce-scattered gradient of the quantized weight's rows.

        [Note: Gradients after the scatter] Where the quantizer holds all scales, their gradients are this shard's part
        of them, and the sum over the ranks (a plain all-reduce, the caller's) is the whole. Where it holds those of its
        own rows, they are complete.
        """
        self._check_shard(shard)
        self._check_shard(grad)
        shard = shard.contiguous()
        coding = Coding.of(self.quantizer)
        scale, offset = self._own(torch.promote_types(shard.dtype, torch.float32))
        dx = torch.empty_like(shard)
        sums_2C = scale.new_zeros(2, len(scale))
        if shard.numel():
            laid = coding.lay_out(shard, scale)
            views = laid.view(shard), laid.view(grad.to(shard.dtype))
            factor = gradient_factor(self.shape.numel(), self._every, coding.grid, self.quantizer.scale_gradient)
            of = FakeGradients(*views, scale, offset, laid.view(dx), sums_2C)
            select(shard.device).fake_quantize_grad(coding.grid, of, factor)
        dscale, doffset = map(self._held, sums_2C)
        return ShardGradients(dx, dscale, None if offset is None else doffset)

    def _scales_per_row(self) -> int:
        """0 where scales do not belong to rows: every wire then carries all of them."""
        if self.quantizer.group:
            return self._row // self.quantizer.group
        return int(self.quantizer.axis is not None and self.quantizer.axis % len(self.shape) == 0)

    def _scales_of(self, rows: int) -> int:
        if self._per_row:
            return rows * self._per_row
        return 1 if self.quantizer.axis is None else self.shape[self.quantizer.axis]

    def _own(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Scale and offset of this rank's rows."""
        scale = self._part(_local(self.quantizer.floored().detach())).to(dtype)
        offset = self.quantizer.offset
        return scale, None if offset is None else self._part(_local(offset.detach())).to(dtype)

    def _part(self, held: Tensor) -> Tensor:
        """The part, a view, for this rank's rows of what the quantizer holds, one element for each scale."""
        rows = self.rows(self.rank)
        apart = self._per_row and len(held) == self._every
        return held[self._scales_of(rows.start) : self._scales_of(rows.stop)] if apart else held

    def _held(self, sums_C: Tensor) -> Tensor:
        """Gradients of this rank's scales in the shape in which the quantizer holds them."""
        grad = torch.zeros_like(_local(self.quantizer.scale))
        self._part(grad).copy_(sums_C)
        return grad

    @property
    def _codes_at(self) -> int:
        sections = 1 if self.quantizer.offset is None else 2
        return sections * self._scales_of(self._most) * self.quantizer.scale.itemsize

    def _check_scales(self) -> None:
        held = len(_local(self.quantizer.scale))
        rows = self.rows(self.rank)
        own = self._scales_of(rows.stop - rows.start)
        if held not in (self._every, own):
            raise QatError(
                f"a weight of shape {tuple(self.shape)} has {self._every} scales, {own} of them of rank {self.rank}; "
                f"the quantizer holds {held}"
            )

    def _check_shard(self, shard: Tensor) -> None:
        rows = self.rows(self.rank)
        want = (rows.stop - rows.start, *self.shape[1:])
        if shard.shape != want:
            raise QatError(f"the shard of rank {self.rank} must be of shape {want}, got {tuple(shard.shape)}")

    def _check_wire(self, wire: Tensor) -> None:
        if wire.dtype != torch.uint8 or wire.shape != (self.wire_bytes,):
            raise QatError(f"a wire must be {self.wire_bytes} bytes (uint8), got {tuple(wire.shape)} of {wire.dtype}")


def _local(parameter: Tensor) -> Tensor:
    """What this rank holds of a parameter."""
    held: Tensor = parameter.to_local() if is_sharded(parameter) else parameter  # type: ignore[attr-defined]
    return held
