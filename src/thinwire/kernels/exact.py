"""Exact differences in plain torch: what changed between a tensor and a base that both ends hold, without loss.

The bits of a number, as an integer in the order of the numbers they stand for, change by some units of the last place.
How many depends on the size of the number, so the exponent of the *base* is context that costs nothing:

    ordered = bits, the other bits of a negative number inverted        d = ordered(new) - ordered(base), which wraps
    u = 0, 1, 2, 3, ... for d = 0, -1, 1, -2, ...                      class = clamp(top - exponent(base), 0, 15)

A block of 4096 numbers is coded by class: all members of class 0 in their order, then those of class 1, and so on.
Every class has a gap parameter g and a value parameter v. A Rice code with parameter k of an integer x is x >> k zeros,
a one, and the k low bits of x. In a class with g = 15 every member's u is Rice coded with v. In other classes changed
members alone are coded: the number of unchanged members before it (with g), then u - 1 (with v). Where no changed
member follows in a class, there are as many zeros as are needed to pass its last member, if each passes 2 ** g. A
value that would have 16 zeros or more has 16, and then its own bits. Bits fill bytes from the lowest on. A
block whose code is not shorter than its plain numbers consists of these, as its length shows.

Lengths are known after one pass, so that blocks can be written in parallel. `choose` takes the parameters from counts.

Shape suffixes: K blocks, B numbers of a block, C classes; E exponents, L lengths of u in bits, V value parameters.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire.wire import EXACT_BLOCK as BLOCK, EXACT_CLASSES, EXACT_DIRECT, EXACT_MOST_GAP, ExactTables

MOST_ZEROS = 16  # of a value
COUNTED = 64  # blocks whose numbers are counted, at most twice as many
EXPONENTS = 256
LENGTHS = 33  # bit lengths of a difference: 0 to 32
RARE = 1024  # a class of its own needs more than one in so many numbers above it
_CHUNK = 64  # blocks at once


class NumberFormat(NamedTuple):
    """Where the parts of a number lie in its bits."""

    bits: int
    mantissa: int
    exponents: int  # mask
    signed: torch.dtype


FORMATS = {
    torch.bfloat16: NumberFormat(16, 7, 0xFF, torch.int16),
    torch.float16: NumberFormat(16, 10, 0x1F, torch.int16),
    torch.float32: NumberFormat(32, 23, 0xFF, torch.int32),
}


def counted_stride(numel: int) -> int:
    """Every how manieth block is counted."""
    return max(1, numel // (BLOCK * COUNTED))


def exact_count(new: Tensor, base: Tensor) -> Tensor:
    """How many numbers of the counted blocks have each exponent and each length of u: (EXPONENTS, LENGTHS), int64."""
    new, base = _counted(new), _counted(base)
    length = torch.frexp(differences(new, base).double()).exponent.long()
    return torch.bincount(exponents(base) * LENGTHS + length, minlength=EXPONENTS * LENGTHS).view(EXPONENTS, LENGTHS)


def _counted(x: Tensor) -> Tensor:
    stride, full = counted_stride(x.numel()), x.numel() // BLOCK
    whole = x[: full * BLOCK].view(-1, BLOCK)[::stride].reshape(-1)
    return whole if full % stride else torch.cat([whole, x[full * BLOCK :]])


def exact_encode(tables: ExactTables, new: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    """The bytes of all blocks, one after the other, and the length of each."""
    none = base.new_empty(0, dtype=torch.uint8), base.new_empty(0, dtype=torch.int64)
    chunks = zip(new.split(BLOCK * _CHUNK), base.split(BLOCK * _CHUNK), strict=True)
    blocks, lengths = zip(none, *(_encode_chunk(tables, *chunk) for chunk in chunks if len(chunk[0])), strict=True)
    return torch.cat(blocks), torch.cat(lengths)


def exact_decode(tables: ExactTables, blocks: Tensor, starts: Tensor, base: Tensor, out: Tensor) -> bool:
    """out = the numbers that were encoded; False if the bytes are damaged."""
    good = True
    for k in range(0, len(starts) - 1, _CHUNK):
        span = slice(k * BLOCK, (k + _CHUNK) * BLOCK)
        good &= _decode_chunk(tables, blocks, starts[k : k + _CHUNK + 1].to(base.device), base[span], out[span])
    return good


# --- numbers ----------------------------------------------------------------------------------------------------------


def ordered(x: Tensor) -> Tensor:
    """The bits of numbers, as integers in the order of the numbers."""
    format = FORMATS[x.dtype]
    bits = x.contiguous().view(format.signed).long()
    return bits ^ ((bits >> 63) & ((1 << (format.bits - 1)) - 1))


def differences(new: Tensor, base: Tensor) -> Tensor:
    """u of every number."""
    bits = FORMATS[base.dtype].bits
    d = _wrapped(ordered(new) - ordered(base), bits)
    return (d << 1 ^ d >> 63) & ((1 << bits) - 1)


def exponents(base: Tensor) -> Tensor:
    """The exponent bits of every number."""
    format = FORMATS[base.dtype]
    return base.contiguous().view(format.signed).long() >> format.mantissa & format.exponents


def _wrapped(x: Tensor, bits: int) -> Tensor:
    return ((x + (1 << (bits - 1))) & ((1 << bits) - 1)) - (1 << (bits - 1))


def _undone(base: Tensor, u: Tensor) -> Tensor:
    """The numbers whose differences to the base are u."""
    format = FORMATS[base.dtype]
    bits = _wrapped(ordered(base) + (u >> 1 ^ -(u & 1)), format.bits)
    return (bits ^ ((bits >> 63) & ((1 << (format.bits - 1)) - 1))).to(format.signed).view(base.dtype)


# --- the choice of parameters -----------------------------------------------------------------------------------------


def choose(counts_EL: Tensor, bits: int) -> ExactTables:
    """The parameters that make the counted numbers shortest, if a class's changes come independently."""
    counts = counts_EL.double().cpu()
    above = counts.sum(1).flip(0).cumsum(0).flip(0)  # numbers with this exponent or a larger one
    common = (above * RARE > above[0]).nonzero()
    top = int(common[-1]) if len(common) else 0
    class_E = (top - torch.arange(EXPONENTS)).clamp(0, EXACT_CLASSES - 1)
    counts_CL = counts.new_zeros(EXACT_CLASSES, LENGTHS).index_add_(0, class_E, counts)
    direct_LV, changed_LV = _value_bits(bits)
    direct_C, value_C = (counts_CL @ direct_LV).min(1)
    after_C, change_C = (counts_CL @ changed_LV).min(1)
    gap_bits_C, gap_C = _gap_bits(counts_CL.sum(1), counts_CL[:, 1:].sum(1)).min(1)
    is_direct = direct_C < gap_bits_C + after_C
    gaps = torch.where(is_direct, EXACT_DIRECT, gap_C).tolist()
    return ExactTables(top, tuple(gaps), tuple(torch.where(is_direct, value_C, change_C).tolist()))


def _gap_bits(members_C: Tensor, changed_C: Tensor) -> Tensor:
    """Expected bits of the gaps of each class, by parameter."""
    stays_C1 = (1 - changed_C / members_C.clamp(min=1))[:, None]
    step = torch.arange(EXACT_MOST_GAP + 1, dtype=torch.float64)
    stays = stays_C1 ** (2**step)  # all of a step
    zeros = torch.where(stays < 1, stays / (1 - stays).clamp(min=1e-12), 0)
    none = members_C[:, None] / 2**step  # zeros alone, where nothing has changed
    return torch.where(changed_C[:, None] > 0, changed_C[:, None] * (zeros + 1 + step), none)


@lru_cache(maxsize=2)
def _value_bits(bits: int) -> tuple[Tensor, Tensor]:
    """The mean length of the code of u, and of that of u - 1, over all u of a length in bits, by parameter."""
    direct = torch.zeros(LENGTHS, bits, dtype=torch.float64)
    changed = torch.zeros(LENGTHS, bits, dtype=torch.float64)
    for v in range(bits):
        direct[0, v] = 1 + v
        for length in range(1, bits + 1):
            some = range(1 << (length - 1), 1 << length, 1 << max(0, length - 8))
            direct[length, v] = sum(_length(u, v, bits) for u in some) / len(some)
            changed[length, v] = sum(_length(u - 1, v, bits) for u in some) / len(some)
    return direct, changed


def _length(value: int, v: int, bits: int) -> int:
    return (value >> v) + 1 + v if value >> v < MOST_ZEROS else MOST_ZEROS + bits


# --- blocks -----------------------------------------------------------------------------------------------------------


class _Sorted(NamedTuple):
    """The numbers of blocks, by class and then in their order; the padding of the last block comes after class 15."""

    class_KB: Tensor
    place_KB: Tensor  # where each was
    gap_KB: Tensor  # the parameters of each one's class
    value_KB: Tensor
    end_KB: Tensor  # where its class ends


def _sorted(tables: ExactTables, base: Tensor) -> _Sorted:
    class_KB = _blocks(tables.top - exponents(base), 0).clamp(0, EXACT_CLASSES - 1)
    class_KB.view(-1)[base.numel() :] = EXACT_CLASSES
    class_KB, place_KB = class_KB.sort(dim=1, stable=True)
    padded = [torch.tensor([*table, 0], device=base.device) for table in (tables.gaps, tables.values)]
    end_KB = torch.searchsorted(class_KB, class_KB, right=True)
    return _Sorted(class_KB, place_KB, padded[0][class_KB], padded[1][class_KB], end_KB)


def _blocks(x: Tensor, fill: int) -> Tensor:
    return pad(x, (0, -x.numel() % BLOCK), value=fill).view(-1, BLOCK)


def _encode_chunk(tables: ExactTables, new: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    at = _sorted(tables, base)
    bits = FORMATS[base.dtype].bits
    u_KB = _blocks(differences(new, base), 0).gather(1, at.place_KB)
    is_direct = at.gap_KB == EXACT_DIRECT
    coded_KB = (at.class_KB < EXACT_CLASSES) & (is_direct | (u_KB > 0))
    place_KB = torch.arange(BLOCK, device=base.device).expand_as(u_KB)
    start_KB = torch.searchsorted(at.class_KB, at.class_KB)
    passed_KB = pad(torch.where(coded_KB, place_KB + 1, 0), (1, 0))[:, :-1].cummax(1).values.maximum(start_KB)
    has_gap = coded_KB & ~is_direct
    gap_KB = torch.where(has_gap, place_KB - passed_KB, 0)
    zeros_KB = gap_KB >> at.gap_KB
    gap_bits_KB = torch.where(has_gap, zeros_KB + 1 + at.gap_KB, 0)
    value_KB = torch.where(is_direct, u_KB, u_KB - 1)
    steps_KB = (value_KB >> at.value_KB).clamp(max=MOST_ZEROS)
    escaped = steps_KB == MOST_ZEROS
    width_KB = torch.where(escaped, bits, at.value_KB + 1)
    low_KB = torch.where(escaped, value_KB, (value_KB << 1 | 1) & ((2 << at.value_KB) - 1))
    value_bits_KB = torch.where(coded_KB, steps_KB + width_KB, 0)
    is_last = (at.end_KB == place_KB + 1) & (at.class_KB < EXACT_CLASSES) & ~is_direct & ~coded_KB
    left_KB = torch.where(is_last, place_KB + 1 - passed_KB, 0)
    length_KB = gap_bits_KB + value_bits_KB + (left_KB + (1 << at.gap_KB) - 1 >> at.gap_KB)
    begin_KB = length_KB.cumsum(1) - length_KB
    plain_K = torch.full((len(u_KB),), BLOCK * bits // 8, device=base.device)
    plain_K[-1] -= (u_KB.numel() - base.numel()) * bits // 8
    length_K = (length_KB.sum(1) + 7) // 8
    fits_K1 = (length_K < plain_K)[:, None]
    stream_KN = base.new_zeros((len(u_KB), BLOCK * bits), dtype=torch.uint8)
    low_gap_KB = (gap_KB << 1 | 1) & ((2 << at.gap_KB) - 1)
    _put(stream_KN, begin_KB + zeros_KB, low_gap_KB, at.gap_KB + 1, has_gap & fits_K1)
    _put(stream_KN, begin_KB + gap_bits_KB + steps_KB, low_KB, width_KB, coded_KB & fits_K1)
    bytes_KN = (stream_KN.view(len(u_KB), -1, 8) << torch.arange(8, device=base.device)).sum(2).to(torch.uint8)
    plain_KN = pad(new.contiguous().view(torch.uint8), (0, bytes_KN.numel() - new.nbytes)).view_as(bytes_KN)
    length_K = torch.where(fits_K1[:, 0], length_K, plain_K)
    inside = torch.arange(bytes_KN.shape[1], device=base.device) < length_K[:, None]
    return torch.where(fits_K1, bytes_KN, plain_KN)[inside], length_K


def _put(stream_KN: Tensor, at_KB: Tensor, x_KB: Tensor, width_KB: Tensor, where: Tensor) -> None:
    """Add the low bits of numbers, the lowest first, to rows of zeros."""
    for bit in range(int(width_KB.max())):
        inside = where & (width_KB > bit)
        ones = (inside & (x_KB >> bit & 1 > 0)).to(torch.uint8)
        stream_KN.scatter_add_(1, torch.where(inside, at_KB + bit, 0), ones)


def _decode_chunk(tables: ExactTables, blocks: Tensor, starts: Tensor, base: Tensor, out: Tensor) -> bool:
    """Every block in step: each turn of the loop reads one code of each that is not done."""
    bits, size = FORMATS[base.dtype].bits, base.dtype.itemsize
    at = _sorted(tables, base)
    count = len(starts) - 1
    rows = torch.arange(count, device=base.device)
    numel_K = torch.full((count,), BLOCK, device=base.device)
    numel_K[-1] = base.numel() - BLOCK * (count - 1)
    length_K = starts.diff()
    is_plain = length_K == numel_K * size
    u_KB = torch.zeros(count, BLOCK + 1, dtype=torch.int64, device=base.device)
    readable = pad(blocks, (0, 16)).long()
    bit_K = starts[:-1] * 8
    place_K = torch.where(is_plain, numel_K, 0)
    good = torch.ones(count, dtype=torch.bool, device=base.device)
    while bool((going := good & (place_K < numel_K)).any()):
        here = place_K.clamp(max=BLOCK - 1)
        g, v, end_K = at.gap_KB[rows, here], at.value_KB[rows, here], at.end_KB[rows, here]
        has_gap = g != EXACT_DIRECT
        needed = torch.where(has_gap, end_K - place_K + (1 << g) - 1 >> g, 1)
        zeros = torch.where(has_gap, _zeros(_peek(readable, bit_K)), 0)
        ends = has_gap & (zeros >= needed)
        skips = has_gap & ~ends & (zeros == 32)
        low = _peek(readable, bit_K + zeros + 1) & ((1 << g) - 1)
        gap = torch.where(has_gap, (zeros << g) + torch.where(skips, 0, low), 0)
        bit_K = bit_K + torch.where(going & has_gap, torch.where(ends, needed, zeros + torch.where(skips, 0, 1 + g)), 0)
        has_value = going & ~ends & ~skips
        good &= ~(has_value & (place_K + gap >= end_K))
        has_value &= good
        steps = _zeros(_peek(readable, bit_K)).clamp(max=MOST_ZEROS)
        escaped = steps == MOST_ZEROS
        width = torch.where(escaped, bits, v)
        low = _peek(readable, bit_K + steps + (~escaped).long()) & ((1 << width) - 1)
        value = torch.where(escaped, low, (steps << v) + low) + has_gap.long()
        bit_K = bit_K + torch.where(has_value, steps + (~escaped).long() + width, 0)
        place_K = torch.where(going, torch.where(ends, end_K, place_K + gap), place_K)
        to = torch.where(has_value, at.place_KB[rows, place_K.clamp(max=BLOCK - 1)], BLOCK)
        u_KB[rows, to] = value & ((1 << bits) - 1)
        place_K = place_K + has_value.long()
    good &= is_plain | ((bit_K - starts[:-1] * 8 + 7) // 8 == length_K)
    out.copy_(_undone(base, u_KB[:, :BLOCK].reshape(-1)[: base.numel()]))
    for k in is_plain.nonzero().flatten().tolist():
        out[k * BLOCK : k * BLOCK + int(numel_K[k])] = blocks[starts[k] : starts[k + 1]].clone().view(base.dtype)
    return bool(good.all())


def _peek(bytes_: Tensor, bit_K: Tensor) -> Tensor:
    """The next 32 bits; zeros past the end."""
    byte = (bit_K >> 3).clamp(max=bytes_.numel() - 8)[:, None] + torch.arange(5, device=bytes_.device)
    word = (bytes_[byte] << 8 * torch.arange(5, device=bytes_.device)).sum(1)
    return word >> (bit_K & 7) & 0xFFFFFFFF


def _zeros(word_K: Tensor) -> Tensor:
    """How many of 32 bits are zeros below the lowest one."""
    lowest = (word_K | 1 << 32) & -(word_K | 1 << 32)
    return torch.frexp(lowest.double()).exponent.long() - 1
