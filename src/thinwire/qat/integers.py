"""Codes packed into bits: rows of small integers as rows of bytes.

A width is stored as planes of 8, 4, 2 or 1 bits, the low bits of a code first, as on the wire (thinwire.wire.PLANES).
Byte j of a plane holds the codes j, j + L, j + 2L, ... of the row, the first in its low bits, where L are the plane's
bytes. A row is filled up to a multiple of eight codes. Shape suffixes: R rows, N codes of a row, B bytes of a row.
"""

import torch
from torch import Tensor

from thinwire.wire import PLANES


def packed_bytes(numel: int, bits: int) -> int:
    """Bytes of a row of so many codes."""
    return -(-numel // 8) * bits


def pack(codes_RN: Tensor, bits: int) -> Tensor:
    """uint8 codes below 2**bits as bytes."""
    rows, numel = codes_RN.shape
    full_RN = torch.nn.functional.pad(codes_RN, (0, -numel % 8))
    planes, shift = [], 0
    for width in PLANES[bits]:
        lanes = (full_RN.view(rows, 8 // width, -1) >> shift) & ((1 << width) - 1)
        planes.append(sum((lanes[:, k] << k * width for k in range(1, 8 // width)), start=lanes[:, 0]))
        shift += width
    return torch.cat(planes, 1)


def unpack(packed_RB: Tensor, bits: int, numel: int) -> Tensor:
    """The codes of `pack`."""
    rows, groups = len(packed_RB), -(-numel // 8)
    codes_RN = packed_RB.new_zeros(rows, 8 * groups)
    at = shift = 0
    for width in PLANES[bits]:
        plane = packed_RB[:, at : at + groups * width]
        lanes = [(plane >> k * width) & ((1 << width) - 1) for k in range(8 // width)]
        codes_RN |= torch.cat(lanes, 1) << shift
        at, shift = at + groups * width, shift + width
    return codes_RN[:, :numel]
