"""What all formats share: numbers to and from the bytes of a wire, and sums in a fixed order."""

import torch
from torch import Tensor

from thinwire.wire import HEADER_BYTES, Layout

BF16_MAX = torch.finfo(torch.bfloat16).max


def write_header(layout: Layout, wire: Tensor, rotation: int) -> None:
    wire.zero_()
    header = torch.frombuffer(bytearray(layout.header(rotation)), dtype=torch.uint8)
    if wire.device.type == "cuda":
        header = header.pin_memory()  # copied when the stream comes to it, without waiting
    wire[:HEADER_BYTES].copy_(header, non_blocking=True)


def put(wire: Tensor, at: int, values: Tensor) -> None:
    values = values.contiguous().view(torch.uint8).view(-1)
    wire[at : at + values.numel()] = values


def read(wires: Tensor, at: int, count: int, dtype: torch.dtype) -> Tensor:
    """The numbers of a section that begins at byte `at`, of one wire or of every row."""
    section = wires[..., at : at + count * dtype.itemsize]
    return section.clone(memory_format=torch.contiguous_format).view(dtype)


def pack(codes_KB: Tensor, shift: int, width: int) -> Tensor:
    """Byte j of a block's plane holds codes j, j+L, j+2L, ..., the first in the low bits; L = codes * width / 8."""
    if width >= 8:
        return codes_KB
    lanes = codes_KB.view(codes_KB.shape[0], 8 // width, -1) >> shift & (1 << width) - 1
    packed = lanes[:, 0]
    for k in range(1, 8 // width):
        packed = packed | lanes[:, k] << k * width
    return packed


def unpack(plane_KB: Tensor, width: int) -> Tensor:
    """The bits of every code that `pack` put into a plane, shifted down."""
    return torch.cat([plane_KB >> k * width & (1 << width) - 1 for k in range(8 // width)], 1)


def tree_sum(x_KB: Tensor) -> Tensor:
    """Sum of a block by a fixed binary tree: halves are added until one number is left."""
    while x_KB.shape[1] > 1:
        half = x_KB.shape[1] // 2
        x_KB = x_KB[:, :half] + x_KB[:, half:]
    return x_KB
