"""Requests to kernels: the types shared by every backend, and the constants that define the codes."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from thinwire.kernels import hashing
from thinwire.wire import ExactTables, Format, Kind, Layout, hash_once


@dataclass(frozen=True)
class Encoding:
    """A wire format and the choices that only the encoder makes."""

    format: Format
    stochastic: bool = False  # True => unbiased rounding, twice the squared error
    unbiased: bool = False  # True => Lloyd scale <y,y>/<y,q> instead of the least-squares <y,q>/<q,q>

    __hash__ = hash_once

    @cached_property
    def keyed(self) -> bool:
        """Whether the bytes depend on the step: by a rotation or by stochastic rounding."""
        return self.stochastic or self.format.rotated

    def keys(self, seed: int, step: int, dither: int) -> tuple[int, int]:
        """The keys of rotation and stochastic rounding, 0 if not used. dither: the latter's stream in hashing.py."""
        rotation = hashing.key(seed, step, hashing.ROTATION) if self.format.rotated else 0
        return rotation, hashing.key(seed, step, dither) if self.stochastic else 0


@dataclass(frozen=True)
class Rows:
    """A message of `numel` elements as a matrix of `count` wires: shards of `each`, the last ones shorter or empty."""

    numel: int
    each: int
    count: int

    def span(self, row: int) -> tuple[int, int]:
        """(begin, end) of the elements of a row."""
        return min(row * self.each, self.numel), min((row + 1) * self.each, self.numel)

    @cached_property
    def short(self) -> int:
        """The last row that holds anything, which may be shorter than the others; -1 if none does."""
        return -(-self.numel // self.each) - 1 if self.numel else -1


@dataclass(frozen=True)
class RowJob:
    """What every encode, sum and decode of a message in rows has in common."""

    how: Encoding
    seed: int
    rows: Rows
    dtype: torch.dtype  # of the tensor
    device: torch.device
    stride: int  # bytes from one wire to the next, a multiple of 16
    fused: bool = True  # False => row by row, as kernels/rows.py defines it, on any backend

    def layout(self, row: int) -> Layout:
        """The layout of a row's wire."""
        begin, end = self.rows.span(row)
        return self.how.format.layout(end - begin)


@dataclass(frozen=True)
class Grid:
    """The integers of a fake quantizer, what it computes, and its gradients. A channel has a scale s and a shift.

    The shift is a real offset b (then z = 0), or a zero point (then b = 0): rounded and clamped to the range, it is z.

        lo = quant_min - z      v = (x - b) * (1 / s)      y = clamp(r, lo, hi) * s + b
        hi = quant_max - z      r = round(v), ties to even

    For a gradient g of y, where outside means r < lo or r > hi, or by the paper's rule v <= lo or v >= hi:

        dx = 0 outside, g inside
        ds = factor * sum of g * (clamp(r, lo, hi) outside, r - v inside)
        db = factor * sum of g outside      dz = -s * db

    Doubles are computed in doubles, all else in fp32. A channel is NaN if its shift is, or if s is not positive, not
    finite, or has no finite inverse. y is NaN where x is.
    """

    quant_min: int
    quant_max: int
    offset: bool = False  # True => the shift is b; False => it is a zero point
    paper: bool = False  # True => the outer half-steps are outside, as in the LSQ paper; False => inside, as in torch


class FakeGradients(NamedTuple):
    """The tensors of a fake quantizer's backward pass. dx is None if it is not needed."""

    x_OCI: Tensor
    grad_OCI: Tensor
    scale_C: Tensor
    shift_C: Tensor | None
    dx_OCI: Tensor | None  # output
    sums_2C: Tensor  # output: ds above db or dz


class Backend(Protocol):
    """The operations of a kernel backend, and whether it can run. Modules serve as backends.

    Arguments are checked before they get here: x and out are flat and contiguous, wires_WN has one wire per row.
    `rotation` is the key of the block rotation, `dither` the key of stochastic rounding. Each operation writes every
    byte of its output. Where wires are read, rotation None means that their headers are unchecked: the operation checks
    them, takes the key from there, and raises WireError on a mismatch. If the host would have to wait for a device to
    do so, the result is NaN instead.
    """

    def serves(self, device: torch.device) -> bool:
        """Whether this backend is made for tensors on `device`."""

    def unavailable(self) -> str | None:
        """Why it cannot run in this process, or None."""

    def encode(
        self, how: Encoding, x: Tensor, wire: Tensor, residual: Tensor | None, *, rotation: int, dither: int
    ) -> None:
        """wire = encode(x + residual); residual = x + residual - decode(wire), unchanged in non-finite blocks."""

    def decode_sum(self, format: Format, wires_WN: Tensor, out: Tensor, *, scale: float, rotation: int | None) -> None:
        """out = scale * sum over ranks, in rank order in fp32, of decode(wire)."""

    def recode(
        self,
        how: Encoding,
        wires_WN: Tensor,
        wire: Tensor,
        numel: int,
        *,
        scale: float,
        rotation: int | None,
        dither: int,
    ) -> None:
        """wire = encode(scale * sum of decode(wires)); a rotated format stays in its rotated domain throughout."""

    def fake_quantize(
        self, grid: Grid, x_OCI: Tensor, scale_C: Tensor, shift_C: Tensor | None, out_OCI: Tensor
    ) -> bool | None:
        """out = y of `Grid`; without a shift, b and z are 0. x and out are contiguous, channels in the middle.

        Returns whether all scales are valid, or None if the host would have to wait for a device to know.
        """

    def fake_quantize_grad(self, grid: Grid, of: FakeGradients, factor: float) -> None:
        """dx and the parameters' gradients of `Grid`.

        Every backend writes the same bytes of dx, but adds sums in its own order. The second row of `sums_2C` need be
        written only if there is a shift.
        """

    def exact_encode(self, new: Tensor, base: Tensor) -> tuple[ExactTables, Tensor, Tensor]:
        """The tables of exact differences, the length of each block, and the bytes of all, one after the other."""

    def exact_decode(self, tables: ExactTables, blocks: Tensor, starts: Tensor, base: Tensor, out: Tensor) -> bool:
        """out = the numbers that were encoded; False if the bytes are damaged. All `starts` lie inside `blocks`."""


@dataclass(frozen=True)
class LevelTable:
    """The integers that codes stand for. A value of y standard deviations is in cell round(grid * y)."""

    grid: int
    levels: tuple[int, ...]  # the positive ones

    @property
    def signed_levels(self) -> tuple[int, ...]:
        """All levels, from the most negative up."""
        return tuple(-q for q in reversed(self.levels)) + self.levels


@dataclass(frozen=True)
class LloydTable(LevelTable):
    """A Lloyd-Max quantizer of the unit Gaussian.

    The cells of |y| are grouped at `edges`, and a group decodes to a multiple of its level. Distortion is within 0.13 %
    of the real-valued optimum, and sums of products of cells and levels are exact in 32-bit integers, in any order.
    Edges are at least 8 apart.
    """

    edges: tuple[int, ...]


LLOYD = {
    1: LloydTable(32, (1,), ()),
    2: LloydTable(27, (6, 20), (27,)),
    3: LloydTable(49, (10, 31, 55, 88), (25, 52, 86)),
    4: LloydTable(47, (5, 15, 25, 36, 48, 62, 79, 104), (13, 25, 38, 52, 68, 87, 113)),
}


@dataclass(frozen=True)
class TrellisTable(LevelTable):
    """Levels of trellis codes, in quarters of a cell: kernels/trellis.py says how codes choose between them."""

    shift: int  # squared distances to levels are in units of 2 ** shift


STRAND = 64  # codes that are chosen together
CELLS = 64  # cells around 0 that have costs of their own; cells further out cost what the outermost ones do
TRELLIS = {
    1: TrellisTable(12, (19, 57), 8),
    2: TrellisTable(14, (11, 37, 62, 106), 6),
    3: TrellisTable(12, (6, 17, 29, 41, 55, 71, 91, 123), 4),
}


def table_of(format: Format) -> LevelTable:
    """The levels of a Lloyd or trellis code."""
    return TRELLIS[format.bits] if format.kind == Kind.TRELLIS else LLOYD[format.bits]


# Quantization error can take a value past the largest number of its output by these factors. Up to there the value
# becomes that number; larger ones are overflows and become Inf.
LLOYD_REACH = 4.0  # in a rotated block the errors of many codes can meet in one element
OTHER_REACH = 1 + 2.0**-5  # block integers and casts: half a step and the rounding of the scale

# [Note: Three domains]
# A block whose peak is tiny is multiplied by 2**64 before it is quantized, one whose peak is huge by 2**-32, so that
# scales, their inverses and sums neither overflow nor fall into subnormals. Powers of two are exact, so the codes are
# those of the block itself. A tiny block says so in the sign bit of its scale, which is otherwise unused. In the middle
# domain the squares of a block are safe as well; outside it, where squares are needed, its peak is brought to [1, 2).
LIFT = 2.0**64
LOWER = 2.0**-32
TINY_PEAK = 2.0**-40  # peak below it => lifted
HUGE_PEAK = 2.0**48  # peak, or a stored scale, from it on => lowered


@lru_cache(maxsize=256)
def decoding(format: Format) -> Encoding:
    """The encoding of a format that is only decoded, where the encoder's choices do not matter."""
    return Encoding(format)
