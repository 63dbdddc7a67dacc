"""The definition of topk wires, in plain torch: the largest numbers of every block. It serves every device.

A block of 4096 numbers keeps the k of largest magnitude; of equal ones, the first. Those above the mean of the kept
magnitudes get the block's upper level, the others its lower one; a level is the mean of the magnitudes that get it.
Places are coded as by Elias and Fano: their low bits one after the other, their high bits as marks, where mark
(place >> low_bits) + i is set for the i-th kept number. A number that is not kept decodes to 0. Since levels are
means, the error of a block has no more power than the block.

Shape suffixes: K blocks, B numbers of a block, S kept numbers of a block, M marks of a block.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire.errors import WireError
from thinwire.kernels.packing import BF16_MAX, pack, put, read, tree_sum, unpack, write_header
from thinwire.wire import Layout


def encode(layout: Layout, x: Tensor, wire: Tensor) -> None:
    """Write the wire of x."""
    write_header(layout, wire, 0)
    if not layout.numel:
        return
    x_KB = pad(x.float(), (0, -x.numel() % layout.format.block)).view(layout.num_blocks, -1)
    fine_K1 = x_KB.isfinite().all(1, keepdim=True)
    x_KB = torch.where(fine_K1, x_KB, 0)
    place_KS = _largest(x_KB.abs(), layout.kept)
    kept_KS = x_KB.gather(1, place_KS)
    first_K1 = torch.arange(0, x_KB.numel(), x_KB.shape[1], device=x.device)[:, None]
    upper_KS, levels_K2 = _levels(kept_KS.abs(), first_K1 + place_KS < layout.numel)
    put(wire, layout.scales_at, torch.where(fine_K1, levels_K2[:, :1], torch.nan).bfloat16())
    put(wire, layout.minima_at, torch.where(fine_K1, levels_K2[:, 1:], torch.nan).bfloat16())
    codes_KS = upper_KS.byte() | kept_KS.signbit().byte() << 1
    (width, at), *low_planes, (_, marks_at) = layout.planes
    put(wire, at, pack(codes_KS, 0, width))
    low_KS = (place_KS & (1 << layout.low_bits) - 1).byte()
    shift = 0
    for width, at in low_planes:
        put(wire, at, pack(low_KS, shift, width))
        shift += width
    marks_KM = torch.zeros(layout.num_blocks, layout.marks, dtype=torch.uint8, device=wire.device)
    order_S = torch.arange(layout.kept, device=wire.device)
    marks_KM.scatter_(1, (place_KS >> layout.low_bits) + order_S, 1)
    put(wire, marks_at, pack(marks_KM, 0, 1))


def decode_sum(layout: Layout, wires_WN: Tensor) -> Tensor:
    """The sum over ranks of their numbers, in rank order, in fp32."""
    z_KB = torch.zeros(layout.num_blocks, layout.format.block, dtype=torch.float32, device=wires_WN.device)
    for wire in wires_WN if layout.numel else ():
        place_KS, value_KS, fine_K1 = _read(layout, wire)
        z_KB.scatter_add_(1, place_KS, value_KS).masked_fill_(~fine_K1, torch.nan)
    return z_KB.view(-1)[: layout.numel]


def _largest(size_KB: Tensor, count: int) -> Tensor:
    """The places of the `count` largest numbers of every row, in ascending order; of equal ones, the first."""
    least_K1 = size_KB.topk(count, dim=1).values[:, -1:]
    above_KB = size_KB > least_K1
    equal_KB = size_KB == least_K1
    room_K1 = count - above_KB.sum(1, keepdim=True)
    above_KB |= equal_KB & (equal_KB.cumsum(1, dtype=torch.int16) <= room_K1)
    return above_KB.nonzero()[:, 1].view(-1, count)


def _levels(size_KS: Tensor, real_KS: Tensor) -> tuple[Tensor, Tensor]:
    """Which kept magnitudes are above their mean; and the means of (those that are not, those that are).

    Numbers that are not real stand past the end of the last block, and count for no mean.
    """
    exact_KS = size_KS.double()  # sums of large numbers stay finite
    upper_KS = exact_KS > _mean(exact_KS, real_KS)
    means = [_mean(exact_KS, part_KS & real_KS) for part_KS in (~upper_KS, upper_KS)]
    return upper_KS, torch.cat(means, 1).float().clamp(max=BF16_MAX)


def _mean(x_KS: Tensor, part_KS: Tensor) -> Tensor:
    """Mean of a part of every row, 0 if it is empty; summed by a fixed tree, so that all devices agree."""
    length = 1 << (x_KS.shape[1] - 1).bit_length()
    total_K1 = tree_sum(pad(torch.where(part_KS, x_KS, 0), (0, length - x_KS.shape[1])))
    return total_K1 / part_KS.sum(1, keepdim=True).clamp(min=1)


def _read(layout: Layout, wire: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Places and values of the kept numbers, and which blocks are finite."""
    num_blocks = layout.num_blocks
    sections = (layout.scales_at, layout.minima_at)
    levels_K2 = torch.stack([read(wire, at, num_blocks, torch.bfloat16).float() for at in sections], 1)
    (width, at), *low_planes, (_, marks_at) = layout.planes
    codes_KS = _plane(layout, wire, at, width, layout.kept)
    low_KS = torch.zeros_like(codes_KS)
    shift = 0
    for width, at in low_planes:
        low_KS |= _plane(layout, wire, at, width, layout.kept) << shift
        shift += width
    marks_KM = _plane(layout, wire, marks_at, 1, layout.marks)
    if not bool((marks_KM.sum(1) == layout.kept).all()):
        raise WireError(f"a block of a topk wire does not mark {layout.kept} numbers: its bytes were damaged")
    order_S = torch.arange(layout.kept, device=wire.device)
    high_KS = marks_KM.nonzero()[:, 1].view(num_blocks, -1) - order_S
    place_KS = (high_KS << layout.low_bits | low_KS.long()).clamp_(max=layout.format.block - 1)
    size_KS = levels_K2.gather(1, (codes_KS & 1).long())
    return place_KS, torch.where(codes_KS > 1, -size_KS, size_KS), levels_K2.isfinite().all(1, keepdim=True)


def _plane(layout: Layout, wire: Tensor, at: int, width: int, count: int) -> Tensor:
    """The numbers of a plane, `count` of every block."""
    return unpack(wire[at : at + layout.num_blocks * count * width // 8].view(layout.num_blocks, -1), width)
