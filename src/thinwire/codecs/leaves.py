"""The codecs that encode: plain numbers, block integers, rotated Lloyd-Max and trellis codes, the largest numbers."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from thinwire.codecs.base import Codec
from thinwire.codecs.checks import check_bits, check_block, is_int
from thinwire.errors import CodecError
from thinwire.kernels.schema import Encoding
from thinwire.wire import IDENTITY_DTYPES, KEPT_UNIT, CastVariant, Format, IntVariant, Kind, LloydVariant

FloatFormat = Literal["bf16", "fp16", "e4m3", "e5m2"]
_BITS = {"bf16": 16, "fp16": 16, "e4m3": 8, "e5m2": 8}
_TOPK_BLOCK = 4096


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
    """A shorter float. fp16 and the 8-bit formats have a power-of-two scale per block: no block over- or underflows.

    bf16 has the range of fp32, needs no scale and keeps every NaN and Inf in its element. fp16 with block=0 is a plain
    cast too; numbers beyond 65504 become infinite in it.
    """

    format: FloatFormat = "bf16"
    block: int = 128  # larger => fewer scale bytes, more numbers of a block underflow; 0 (fp16 only) => no scales

    inputs = IDENTITY_DTYPES

    def __post_init__(self) -> None:
        super().__post_init__()
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


@dataclass(frozen=True)
class BlockInt(Codec):
    """Uniform quantization by the block's peak (symmetric) or by its minimum and maximum (affine).

    Error of an element <= scale / 2. Symmetric: scale = peak / (2**(bits-1) - 1), rounded to 16 bits. Affine: scale =
    (maximum - minimum) / (2**bits - 1), rounded up, the minimum rounded down to 16 bits first. With stochastic rounding
    the error is <= scale, and zero on average.
    """

    bits: int = 8  # fewer => smaller wire, larger error
    block: int = 128  # smaller => scales fit the data better; each takes 16 bits (affine: 32)
    mode: Literal["symmetric", "affine"] = "symmetric"
    rounding: Literal["nearest", "stochastic"] = "nearest"  # stochastic => unbiased, twice the squared error
    seed: int = 0
    aligned: bool = False  # True => collectives cut messages only between blocks, which are then the whole tensor's

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bits(self.bits, 2, 8)
        check_block(self.block)

    @property
    def unit(self) -> int:
        """A block if `aligned`, else one element."""
        return self.block if self.aligned else 1

    def encoding(self, dtype: torch.dtype) -> Encoding:
        """Block integers, whatever the input's dtype."""
        variant = IntVariant.AFFINE if self.mode == "affine" else IntVariant.SYMMETRIC
        format = Format(Kind.BLOCK_INT, self.bits, variant, self.block)
        return Encoding(format, stochastic=self.rounding == "stochastic")

    def __str__(self) -> str:
        return self._spell(f"int{self.bits}", "block", "mode", "rounding", "seed", "aligned")


@dataclass(frozen=True)
class Lloyd(Codec):
    """Randomized Hadamard rotation inside the block, then the Lloyd-Max quantizer of a Gaussian.

    Its NMSE is 0.363, 0.117, 0.0345, 0.0095 at 1, 2, 3, 4 bits. All ranks of a sum must share seed and step, because
    rotated wires are added before the rotation is undone.
    """

    bits: int = 4  # fewer => smaller wire, larger error
    block: int = 512  # larger => fewer scale bytes and a better Gaussian, more work in the rotation
    rotate: bool = True  # False only for data that is Gaussian already
    scale: Literal["mmse", "unbiased"] = "mmse"  # unbiased => no shrinkage on average over steps, larger error
    seed: int = 0

    kind: ClassVar[Kind] = Kind.LLOYD
    most_bits: ClassVar[int] = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bits(self.bits, 1, self.most_bits)
        if not is_int(self.block) or self.block not in (32, 64, 128, 256, 512, 1024):
            raise CodecError(f"block must be a power of two from 32 to 1024, got {self.block!r}")

    def encoding(self, dtype: torch.dtype) -> Encoding:
        """Codes of `bits` bits, whatever the input's dtype."""
        variant = LloydVariant.ROTATED if self.rotate else LloydVariant.PLAIN
        return Encoding(Format(self.kind, self.bits, variant, self.block), unbiased=self.scale == "unbiased")

    def __str__(self) -> str:
        return self._spell(f"{self.kind.name.lower()}{self.bits}", "block", "rotate", "scale", "seed")


@dataclass(frozen=True)
class Trellis(Lloyd):
    """The rotation and scale of `Lloyd`; but the codes of 64 numbers are chosen together.

    Its wire is as long as Lloyd's with the same bits and block. Encoding takes longer.
    """

    bits: int = 2  # fewer => smaller wire, larger error

    kind: ClassVar[Kind] = Kind.TRELLIS
    most_bits: ClassVar[int] = 3


@dataclass(frozen=True)
class TopK(Codec):
    """The numbers of largest magnitude in every block of 4096, each in 2 bits plus the bits of its place.

    All others decode to 0, so use it with error feedback, which sends what was lost later. Sums of such wires are not
    encoded again.
    """

    fraction: float = 0.03125  # of the numbers, in steps of 1/256; smaller => smaller wire, larger error

    recodes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isinstance(self.fraction, float) or not 1 / 256 <= self.fraction <= 1 / 4:
            raise CodecError(f"fraction must be from 1/256 to 1/4, such as 0.02, got {self.fraction!r}")

    @property
    def kept(self) -> int:
        """How many numbers of every block are kept."""
        return KEPT_UNIT * round(self.fraction * _TOPK_BLOCK / KEPT_UNIT)

    @property
    def unit(self) -> int:
        """A block: a short one keeps as many numbers as a whole one."""
        return _TOPK_BLOCK

    def encoding(self, dtype: torch.dtype) -> Encoding:
        """Codes of 2 bits, whatever the input's dtype."""
        return Encoding(Format(Kind.TOPK, 2, self.kept // KEPT_UNIT, _TOPK_BLOCK))

    def __str__(self) -> str:
        return self._spell("topk", "fraction")
