"""Byte layout of one encoded shard. The only module that knows an offset.

    header (32 bytes) | scales, 2 bytes per block | minima, 2 bytes per block (affine only) | code planes | pad to 16

A topk wire has the upper levels of its blocks where an affine one has minima, and planes of three kinds: codes, the low
bits of places, and marks. A wire of exact differences has a length of its own:

    header (32 bytes) | gap parameters, 16 bytes | value parameters, 16 bytes | length of every block | blocks

docs/internals/wire-format.md describes every byte, with a worked example.
"""

import ctypes
import struct
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import WireError

MAGIC = b"TW"
VERSION = 1
HEADER_BYTES = 32
ALIGN = 16  # scales, minima and the first plane start, and a wire ends, on a multiple of it
KEY_AT = 16  # offset in the header of the rotation's key, 8 bytes
_HEADER = struct.Struct("<2sBBBBHIIQQ")  # magic version kind bits variant 0 block 0 key numel

# A width is stored as planes of 8, 4, 2 or 1 bits, the low bits of a code first.
PLANES = {8: (8,), 7: (4, 2, 1), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,), 1: (1,)}


class Kind(IntEnum):
    """What the codes mean; byte 3 of the header."""

    IDENTITY = 0
    CAST = 1
    BLOCK_INT = 2
    LLOYD = 3
    TOPK = 4
    TRELLIS = 5
    EXACT = 6


class CastVariant(IntEnum):
    """Number format of a cast wire; byte 5 of the header."""

    BF16 = 0
    FP16 = 1
    E4M3 = 2
    E5M2 = 3


class IntVariant(IntEnum):
    """Meaning of a block integer's code; byte 5 of the header."""

    SYMMETRIC = 0
    AFFINE = 1


class LloydVariant(IntEnum):
    """Whether the block of a Lloyd or trellis wire was rotated before it was quantized; byte 5 of the header."""

    PLAIN = 0
    ROTATED = 1


KEPT_UNIT = 16  # byte 5 of a topk header is the number of kept numbers per block, divided by this

IDENTITY_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def hash_once(self: Any) -> int:
    """`__hash__` of a frozen dataclass, computed once per object: objects are looked up in caches at every call."""
    try:
        found: int = self._hash
    except AttributeError:
        found = hash(tuple(getattr(self, field.name) for field in fields(self)))
        object.__setattr__(self, "_hash", found)
    return found


@dataclass(frozen=True)
class Format:
    """Everything that fixes the meaning of a wire's bytes, apart from its length and rotation key."""

    kind: Kind
    bits: int
    variant: int
    block: int  # elements under one scale; 0 where there are no scales

    __hash__ = hash_once

    @cached_property
    def gaussian(self) -> bool:
        """Whether codes stand for levels of a normal distribution, in units of the block's scale."""
        return self.kind in (Kind.LLOYD, Kind.TRELLIS)

    @cached_property
    def rotated(self) -> bool:
        """Whether wires of this format carry the key of a rotation."""
        return self.gaussian and self.variant == LloydVariant.ROTATED

    def layout(self, numel: int) -> "Layout":
        """The layout of a wire of `numel` elements."""
        return _layout(self, numel)


@dataclass(frozen=True)
class Layout:
    """Where each section of one wire lies."""

    format: Format
    numel: int

    scales_at = HEADER_BYTES  # byte offset of the scales
    __hash__ = hash_once

    @cached_property
    def num_blocks(self) -> int:
        """Blocks under a scale; the last may be short. 0 where there are no scales."""
        return -(-self.numel // self.format.block) if self.format.block else 0

    @cached_property
    def tail(self) -> int:
        """Codes stored for the last block: its length, padded so that planes fill whole bytes.

        The padded length of a Lloyd or trellis block is a power of two, that of an integer block a multiple of 8.
        """
        if not self.num_blocks:
            return 0
        length = self.numel - (self.num_blocks - 1) * self.format.block
        if self.format.gaussian:
            return max(8, 1 << (length - 1).bit_length())
        if self.format.kind == Kind.BLOCK_INT:
            return -(-length // 8) * 8
        return self.format.block if self.format.kind == Kind.TOPK else length

    @cached_property
    def num_codes(self) -> int:
        """Codes on the wire, padding of the last block included."""
        if not self.num_blocks:
            return self.numel
        return (self.num_blocks - 1) * self.format.block + self.tail

    @cached_property
    def affine(self) -> bool:
        """Whether every block stores its minimum beside its scale."""
        return self.format.kind == Kind.BLOCK_INT and self.format.variant == IntVariant.AFFINE

    @cached_property
    def kept(self) -> int:
        """Kept numbers of a topk block."""
        assert self.format.kind == Kind.TOPK
        return KEPT_UNIT * self.format.variant

    @cached_property
    def low_bits(self) -> int:
        """How many low bits of a kept number's place a topk wire stores as they are; marks encode the others."""
        return (self.format.block // self.kept).bit_length() - 1

    @cached_property
    def marks(self) -> int:
        """Length in bits of a topk block's marks."""
        return self.kept + (self.format.block >> self.low_bits)

    @cached_property
    def minima_at(self) -> int:
        """Byte offset of the minima; where there are none, the end of the scales."""
        return self.scales_at + _aligned(2 * self.num_blocks)

    @cached_property
    def planes(self) -> tuple[tuple[int, int], ...]:
        """(width, byte offset) of every code plane. Widths over 8 are plain little-endian numbers."""
        is_topk = self.format.kind == Kind.TOPK
        at = self.minima_at + (_aligned(2 * self.num_blocks) if self.affine or is_topk else 0)
        widths = PLANES.get(self.format.bits, (self.format.bits,))
        if is_topk:
            widths = (self.format.bits, *PLANES[self.low_bits], 1)
        placed = []
        for width in widths:
            placed.append((width, at))
            at += (self.num_blocks * self.kept if is_topk else self.num_codes) * width // 8
        return tuple(placed)

    @cached_property
    def nbytes(self) -> int:
        """Length of the whole wire."""
        width, at = self.planes[-1]
        if self.format.kind == Kind.TOPK:
            return _aligned(at + self.num_blocks * self.marks // 8)
        return _aligned(at + self.num_codes * width // 8)

    @cached_property
    def plain_dtype(self) -> torch.dtype:
        """The dtype of the numbers of a wire without scales."""
        return torch.bfloat16 if self.format.kind == Kind.CAST else IDENTITY_DTYPES[self.format.variant]

    def header(self, key: int = 0) -> bytes:
        """The 32 bytes a wire of this layout starts with."""
        f = self.format
        return _HEADER.pack(MAGIC, VERSION, f.kind, f.bits, f.variant, 0, f.block, 0, key, self.numel)


@lru_cache(maxsize=4096)
def _layout(format: Format, numel: int) -> Layout:
    if numel < 0:
        raise WireError(f"numel must be 0 or more, got {numel}")
    return Layout(format, numel)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def read_key(layout: Layout, wires_WN: Tensor, known: int | None = None) -> int:
    """Check the header of every wire (one per row) and return their rotation key: `known`, or that of wire 0.

    Reads 32 bytes per wire on the host, so it is meant for CPU wires; on another device it would wait for the stream.
    """
    heads = _heads(wires_WN)
    shared: int = _HEADER.unpack(heads[0])[8] if layout.format.rotated else 0
    key = shared if known is None else known
    expected = layout.header(key)
    for rank, head in enumerate(heads):
        if head != expected:
            raise WireError(_mismatch(layout, rank, head, key, "wire 0 with" if known is None else "expected"))
    return key


def _heads(wires_WN: Tensor) -> list[bytes]:
    if wires_WN.device.type == "cpu":
        start = wires_WN.data_ptr()
        stride = wires_WN.stride(0)
        return [ctypes.string_at(start + rank * stride, HEADER_BYTES) for rank in range(wires_WN.shape[0])]
    return [bytes(row) for row in wires_WN[:, :HEADER_BYTES].tolist()]


def _mismatch(layout: Layout, rank: int, head: bytes, key: int, against: str) -> str:
    magic, version, kind, bits, variant, _, block, _, head_key, numel = _HEADER.unpack(head)
    if magic != MAGIC:
        return f"wire {rank} does not start with {MAGIC!r} (got {magic!r}): these bytes are not a thinwire wire"
    if version != VERSION:
        return f"wire {rank} has version {version}, this thinwire reads version {VERSION}: use one version on all ranks"
    want = layout.format
    if (want.kind, want.bits, want.variant, want.block, layout.numel) != (kind, bits, variant, block, numel):
        name = Kind(kind).name.lower() if kind in set(Kind) else f"kind {kind}"
        return (
            f"wire {rank} was encoded as {name} bits={bits} variant={variant} block={block} numel={numel}, "
            f"expected {want.kind.name.lower()} bits={want.bits} variant={want.variant} block={want.block} "
            f"numel={layout.numel}: encode and decode with the same codec and length"
        )
    if head_key != key:
        return (
            f"wire {rank} was rotated with key {head_key:#x}, {against} {key:#x}: "
            "all ranks must encode with the same seed and step"
        )
    return f"wire {rank} has non-zero reserved bytes in its header"


def check_wires(layout: Layout, wires_WN: Tensor, device: torch.device) -> None:
    """Raise WireError unless `wires_WN` is a (world, layout.nbytes) uint8 matrix on `device` with contiguous rows."""
    if wires_WN.dtype != torch.uint8:
        raise WireError(f"a wire is a torch.uint8 tensor, got {wires_WN.dtype}")
    if wires_WN.device != device:
        raise WireError(f"wire and tensor must be on one device, got {wires_WN.device} and {device}")
    if wires_WN.dim() != 2 or wires_WN.shape[0] < 1 or wires_WN.shape[1] != layout.nbytes:
        raise WireError(
            f"expected wires of {layout.nbytes} bytes for {layout.numel} elements, one per rank, got shape "
            f"{tuple(wires_WN.shape)}: size them with codec.wire_bytes(numel)"
        )
    if wires_WN.stride(1) != 1:
        raise WireError(f"the bytes of a wire must be contiguous, got strides {wires_WN.stride()}")


def all_finite(layout: Layout, wires_WN: Tensor) -> Tensor:
    """Whether the wires hold only finite numbers. A block with NaN or Inf has a scale that is not finite."""
    if not layout.numel:
        return torch.ones((), dtype=torch.bool, device=wires_WN.device)
    at, count, dtype = layout.scales_at, layout.num_blocks, torch.bfloat16
    if not layout.format.block:
        at, count, dtype = layout.planes[0][1], layout.numel, layout.plain_dtype
    values = wires_WN[:, at : at + count * dtype.itemsize].clone(memory_format=torch.contiguous_format).view(dtype)
    return values.isfinite().all()


EXACT_BLOCK = 4096  # numbers in a block of exact differences
EXACT_CLASSES = 16
EXACT_DIRECT = 15  # the gap parameter of a class whose members are all coded
EXACT_MOST_GAP = 12  # the largest gap parameter of other classes
EXACT_TABLES_AT = HEADER_BYTES + 2 * EXACT_CLASSES  # end of the tables of both parameters
EXACT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class ExactTables:
    """How the differences of one tensor are coded; kernels/exact.py says what the parameters mean."""

    top: int  # the exponent of class 0
    gaps: tuple[int, ...]
    values: tuple[int, ...]


def exact_lengths(lengths_K: Tensor, longest: int | None = None) -> Tensor:
    """The lengths of blocks in the dtype of a wire: one byte each, or two if one of them needs it."""
    longest = max(lengths_K.tolist(), default=0) if longest is None else longest
    return lengths_K.to(torch.uint8 if longest <= 0xFF else torch.int16)


def exact_head(tables: ExactTables, dtype: torch.dtype, width: int, numel: int) -> Tensor:
    """The first bytes of a wire of exact differences; block lengths of `width` bytes follow, then the blocks."""
    bits, variant = 8 * dtype.itemsize, EXACT_DTYPES.index(dtype)
    header = _HEADER.pack(MAGIC, VERSION, Kind.EXACT, bits, variant, width, EXACT_BLOCK, tables.top, 0, numel)
    return torch.frombuffer(bytearray(header + bytes(tables.gaps) + bytes(tables.values)), dtype=torch.uint8)


def read_exact_head(wire: Tensor, dtype: torch.dtype, numel: int) -> tuple[ExactTables, Tensor, int]:
    """(tables, starts, blocks_at): `starts` of the blocks, and the last one's end, count from `blocks_at` in the wire.

    Everything is checked: decoding with these reads nothing outside the wire. The host waits for a GPU twice, for a few
    bytes; the lengths of the blocks stay where they are.
    """
    if wire.numel() < EXACT_TABLES_AT:
        raise WireError(f"a wire of exact differences has {EXACT_TABLES_AT} bytes or more, got {wire.numel()}")
    head = wire[:EXACT_TABLES_AT].cpu().numpy().tobytes()
    magic, version, kind, bits, variant, width, block, top, key, count = _HEADER.unpack(head[:HEADER_BYTES])
    expected = MAGIC, VERSION, Kind.EXACT, 8 * dtype.itemsize, EXACT_DTYPES.index(dtype), EXACT_BLOCK, 0
    if (magic, version, kind, bits, variant, block, key) != expected or width not in (1, 2):
        raise WireError(f"these bytes are no wire of exact differences of {dtype} numbers: {head[:HEADER_BYTES].hex()}")
    if count != numel:
        raise WireError(
            f"the wire has differences of {count} numbers, the base has {numel}: decode with the base of the encoder"
        )
    values_at = HEADER_BYTES + EXACT_CLASSES
    tables = ExactTables(top, tuple(head[HEADER_BYTES:values_at]), tuple(head[values_at:]))
    gaps = all(gap == EXACT_DIRECT or gap <= EXACT_MOST_GAP for gap in tables.gaps)
    if top > 0xFF or not gaps or max(tables.values) >= bits:
        raise WireError("the tables of a wire of exact differences are damaged")
    blocks = -(-numel // EXACT_BLOCK)
    blocks_at = EXACT_TABLES_AT + width * blocks
    lengths = torch.zeros(1 + blocks, dtype=torch.int64, device=wire.device)
    if wire.numel() >= blocks_at:
        lengths[1:] = wire[EXACT_TABLES_AT:blocks_at].clone().view(torch.int16 if width == 2 else torch.uint8)
    starts = lengths.cumsum(0)
    least, longest, last, total = torch.stack([*lengths.aminmax(), lengths[-1], starts[-1]]).tolist()
    plain, rest = EXACT_BLOCK * dtype.itemsize, (numel - EXACT_BLOCK * (blocks - 1)) * dtype.itemsize
    if wire.numel() != blocks_at + total or least < 0 or longest > plain or last > rest:
        raise WireError(
            f"the blocks of a wire of exact differences have {total} bytes, {wire.numel() - blocks_at} came: "
            "the wire was cut short or damaged"
        )
    return tables, starts, blocks_at
