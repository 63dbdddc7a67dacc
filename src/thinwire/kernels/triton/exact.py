"""Exact differences on a GPU: the bytes of kernels/exact.py, which defines them and the names used here.

A program encodes a block: members of one class after the other find their places by prefix sums, in their order, so
that nothing is sorted. Codes are a few bits each, which programs add to words of zeros. Decoding is serial within a
block, so there a lane of a program reads one block, in turns of one code each; another kernel has written which number
every member is. Long tensors have many blocks: a segment of WeightPublisher has a thousand and more.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.exact import FORMATS, MOST_ZEROS
from thinwire.kernels.triton.prepared import Prepared
from thinwire.wire import EXACT_BLOCK, EXACT_CLASSES, EXACT_DIRECT, ExactTables

BLOCK = tl.constexpr(EXACT_BLOCK)
CLASSES = tl.constexpr(EXACT_CLASSES)
DIRECT = tl.constexpr(EXACT_DIRECT)
ESCAPE = tl.constexpr(MOST_ZEROS)
LANES = tl.constexpr(32)  # blocks that a program reads
MOST_SKIPPED = tl.constexpr(20)  # zeros of a gap that are passed at once
COPIED = tl.constexpr(1024)  # bytes at once
_WARPS = 8


def exact_encode(tables: ExactTables, new: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    """The bytes of all blocks, one after the other, and the length of each."""
    count = -(-base.numel() // EXACT_BLOCK)
    rows = torch.zeros(count, _room(base.itemsize), dtype=torch.int32, device=base.device)
    lengths_K = torch.empty(count, dtype=torch.int64, device=base.device)
    if count:
        launch(exact_encode_kernel, tables, base, count)(new=_bits(new), base=_bits(base), rows=rows, lengths=lengths_K)
    starts = torch.nn.functional.pad(lengths_K.cumsum(0), (1, 0))
    out = torch.empty(int(starts[-1]), dtype=torch.uint8, device=base.device)
    if count:
        launch(exact_pack_kernel, tables, base, count, 4)(rows=rows.view(torch.uint8), starts=starts, out=out)
    return out, lengths_K


def exact_decode(tables: ExactTables, blocks: Tensor, starts: Tensor, base: Tensor, out: Tensor) -> bool:
    """out = the numbers that were encoded; False if the bytes are damaged."""
    count = len(starts) - 1
    if not count:
        return True
    words = torch.nn.functional.pad(blocks, (0, 16 - blocks.numel() % 4)).view(torch.int32)
    order = torch.empty(count * EXACT_BLOCK, dtype=torch.int16, device=base.device)
    ends = torch.empty(count * EXACT_CLASSES, dtype=torch.int32, device=base.device)
    bad = torch.zeros(1, dtype=torch.int32, device=base.device)
    places = {"base": _bits(base), "out": _bits(out), "starts": starts.to(base.device), "order": order, "ends": ends}
    launch(exact_sort_kernel, tables, base, count)(blocks=words.view(torch.uint8), **places)
    programs = -(-count // LANES.value)
    launch(exact_read_kernel, tables, base, programs, 1)(words=words, last=words.numel() - 3, bad=bad, **places)
    return not bool(bad)


def _room(size: int) -> int:
    """Words of a row: a code may end beyond what is kept."""
    return EXACT_BLOCK * size // 4 + 2


def launch(kernel: Any, tables: ExactTables, base: Tensor, grid: int, warps: int = _WARPS) -> Prepared:
    """A kernel with all that depends on the tables and the base."""
    format = FORMATS[base.dtype]
    known: dict[str, Any] = {"top": tables.top, "numel": base.numel()}
    if "tables" in kernel.arg_names:
        known["tables"] = torch.tensor([*tables.gaps, *tables.values], dtype=torch.int32, device=base.device)
    constants = {"WIDE": format.bits == 32, "MANTISSA": format.mantissa, "EXPONENTS": format.exponents}
    constants["ROOM"] = _room(base.itemsize)
    return Prepared(kernel, base.device, grid, warps, known, constants)


def _bits(x: Tensor) -> Tensor:
    return x.view(FORMATS[x.dtype].signed)


# --- numbers ----------------------------------------------------------------------------------------------------------


@triton.jit
def _ordered(bits, WIDE: tl.constexpr):
    if WIDE:
        found = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    else:
        found = bits ^ ((bits >> 31) & 0x7FFF)
    return found


@triton.jit
def _difference(new, base, WIDE: tl.constexpr):
    """u."""
    d = _ordered(new, WIDE) - _ordered(base, WIDE)
    if not WIDE:
        d = ((d + 0x8000) & 0xFFFF) - 0x8000
    u = (d << 1) ^ (d >> 31)
    if not WIDE:
        u = u & 0xFFFF
    return u.to(tl.uint32, bitcast=True)


@triton.jit
def _undone(base, u, WIDE: tl.constexpr):
    """The bits of the number whose difference to the base is u."""
    u = u.to(tl.int32, bitcast=True)
    d = ((u >> 1) & 0x7FFFFFFF) ^ -(u & 1)
    found = _ordered(base, WIDE) + d
    if not WIDE:
        found = ((found + 0x8000) & 0xFFFF) - 0x8000
    return _ordered(found, WIDE)


@triton.jit
def _classes(base, top, MANTISSA: tl.constexpr, EXPONENTS: tl.constexpr):
    return tl.minimum(tl.maximum(top - ((base >> MANTISSA) & EXPONENTS), 0), CLASSES - 1)


@triton.jit
def _zeros(word):
    """How many of a word's 32 bits are zeros below the lowest one."""
    lowest = (word & (0 - word)).to(tl.float32)
    exponent = (lowest.to(tl.int32, bitcast=True) >> 23) - 127
    return tl.where(word == 0, 32, exponent)


# --- encode -----------------------------------------------------------------------------------------------------------


@triton.jit
def _last_two(a, b):
    """Of members that are coded: the place of the last one, and below it that of the one before; 0 where is none."""
    one = (b & 0xFFFF0000) | (a >> 16)
    return tl.where(b >> 16 == 0, a, tl.where(b & 0xFFFF == 0, one, b))


@triton.jit(do_not_specialize=("top", "numel"))
def exact_encode_kernel(
    new, base, rows, lengths,
    tables, top, numel,
    WIDE: tl.constexpr, MANTISSA: tl.constexpr, EXPONENTS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """A row = the code of a block, or its plain numbers where they are no longer; and its length in bytes."""
    SIZE: tl.constexpr = 4 if WIDE else 2
    block = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    count = tl.minimum(numel - block * BLOCK, BLOCK).to(tl.int32)
    inside = i < count
    fresh = tl.load(new + block * BLOCK + i, mask=inside, other=0).to(tl.int32)
    old = tl.load(base + block * BLOCK + i, mask=inside, other=0).to(tl.int32)
    u = _difference(fresh, old, WIDE)
    own = tl.where(inside, _classes(old, top, MANTISSA, EXPONENTS), CLASSES)
    g = tl.load(tables + own, mask=inside, other=0)
    v = tl.load(tables + CLASSES + own, mask=inside, other=0).to(tl.uint32)
    coded = inside & ((g == DIRECT) | (u != 0))
    value = tl.where(g == DIRECT, u, u - 1)
    steps = tl.minimum(value >> v, ESCAPE)
    escaped = steps == ESCAPE
    width = tl.where(escaped, 8 * SIZE, v + 1)
    value_bits = tl.where(coded, steps + width, 0).to(tl.int32)
    gap = tl.zeros((BLOCK,), tl.int32)
    begin = tl.zeros((BLOCK,), tl.int32)
    total = tl.sum(tl.zeros((BLOCK,), tl.int32), 0)  # bits
    for c in range(CLASSES):
        member = own == c
        shift = tl.load(tables + c)
        length = tl.where(member, value_bits, 0)
        left = 0
        if shift != DIRECT:
            place = tl.cumsum(member.to(tl.int32), 0)
            taken = tl.where(member & coded, place, 0)
            before = tl.associative_scan((taken << 16).to(tl.uint32, bitcast=True), 0, _last_two) & 0xFFFF
            passed = place - 1 - before.to(tl.int32)
            gap = tl.where(member & coded, passed, gap)
            length = tl.where(member & coded, length + (passed >> shift) + 1 + shift, 0)
            left = tl.sum(member.to(tl.int32), 0) - tl.max(taken, 0)
            left = (left + (1 << shift) - 1) >> shift
        begin = tl.where(member, total + tl.cumsum(length, 0) - length, begin)
        total += tl.sum(length, 0) + left
    nbytes = (total + 7) // 8
    fits = nbytes < count * SIZE
    tl.store(lengths + block, tl.where(fits, nbytes, count * SIZE).to(tl.int64))
    row = rows + block * ROOM
    has_gap = coded & (g != DIRECT)
    first = (gap >> g).to(tl.int32)
    _add_bits(row, begin + first, ((gap << 1) | 1) & ((2 << g) - 1), has_gap & fits)
    after = begin + tl.where(has_gap, first + 1 + g, 0) + steps.to(tl.int32)
    plain = ((value.to(tl.uint64) << 1) | 1) & ((2 << v.to(tl.uint64)) - 1)
    _add_bits(row, after, tl.where(escaped, value.to(tl.uint64), plain), coded & fits)
    if not fits:
        to = row.to(tl.pointer_type(new.dtype.element_ty), bitcast=True)
        tl.store(to + i, fresh.to(new.dtype.element_ty), mask=inside)


@triton.jit
def _add_bits(row, at, x, mask):
    """Add up to 33 bits to a row of zeros."""
    shifted = x.to(tl.uint64) << (at & 31).to(tl.uint64)
    low, high = (shifted & 0xFFFFFFFF).to(tl.uint32), (shifted >> 32).to(tl.uint32)
    tl.atomic_or(row + (at >> 5), low.to(tl.int32, bitcast=True), mask=mask & (low != 0), sem="relaxed")
    tl.atomic_or(row + (at >> 5) + 1, high.to(tl.int32, bitcast=True), mask=mask & (high != 0), sem="relaxed")


@triton.jit
def exact_pack_kernel(rows, starts, out, ROOM: tl.constexpr):
    """The first bytes of every row, one row after the other."""
    block = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(starts + block), tl.load(starts + block + 1)
    for at in range(0, (end - begin).to(tl.int32), COPIED):
        i = at + tl.arange(0, COPIED)
        mask = i < end - begin
        tl.store(out + begin + i, tl.load(rows + block * (4 * ROOM) + i, mask=mask, other=0), mask=mask)


# --- decode -----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=("top", "numel"))
def exact_sort_kernel(
    blocks, base, out, starts, order, ends,
    top, numel,
    WIDE: tl.constexpr, MANTISSA: tl.constexpr, EXPONENTS: tl.constexpr,
):  # fmt: skip
    """out = base, or the plain numbers of a block; which number every member of a class is, and where classes end."""
    SIZE: tl.constexpr = 4 if WIDE else 2
    block = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    count = tl.minimum(numel - block * BLOCK, BLOCK).to(tl.int32)
    inside = i < count
    start, stop = tl.load(starts + block), tl.load(starts + block + 1)
    old = tl.load(base + block * BLOCK + i, mask=inside, other=0).to(tl.int32)
    found = old
    if stop - start == count * SIZE:
        found = tl.zeros((BLOCK,), tl.int32)
        for byte in tl.static_range(SIZE):
            found |= tl.load(blocks + start + i * SIZE + byte, mask=inside, other=0).to(tl.int32) << (8 * byte)
    tl.store(out + block * BLOCK + i, found.to(out.dtype.element_ty), mask=inside)
    own = tl.where(inside, _classes(old, top, MANTISSA, EXPONENTS), CLASSES)
    end = tl.sum(tl.zeros((BLOCK,), tl.int32), 0)
    for c in range(CLASSES):
        member = (own == c).to(tl.int32)
        place = end + tl.cumsum(member, 0) - 1
        tl.store(order + block * BLOCK + place, i.to(tl.int16), mask=member != 0)
        end += tl.sum(member, 0)
        tl.store(ends + block * CLASSES + c, end)


@triton.jit
def _peek(words, bit, last):
    """The next 64 bits, or those up to the second next word."""
    at = tl.minimum(bit >> 5, last)
    shift = (bit & 31).to(tl.uint64)
    one = tl.load(words + at).to(tl.uint32, bitcast=True).to(tl.uint64)
    two = tl.load(words + at + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    three = tl.load(words + at + 2).to(tl.uint32, bitcast=True).to(tl.uint64)
    return ((one | (two << 32)) >> shift) | ((three << 1) << (63 - shift))


@triton.jit(do_not_specialize=("numel", "last"))
def exact_read_kernel(
    words, base, out, starts, order, ends, bad,
    tables, numel, last,
    WIDE: tl.constexpr, MANTISSA: tl.constexpr, EXPONENTS: tl.constexpr,
):  # fmt: skip
    """out = the numbers of blocks, a lane each: one gap or one value per turn. bad: whether a block is damaged."""
    BITS: tl.constexpr = 32 if WIDE else 16
    block = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    count = tl.minimum(numel - block * BLOCK, BLOCK).to(tl.int32)  # none or less beyond the last block
    begin = tl.load(starts + block, mask=count > 0, other=0)
    length = tl.load(starts + block + 1, mask=count > 0, other=0) - begin
    bit = begin * 8
    place = tl.where(length == count * (BITS // 8), count, 0)
    is_plain = place == count
    c = tl.full((LANES,), -1, tl.int32)
    end = tl.zeros((LANES,), tl.int32)
    g = tl.zeros((LANES,), tl.int32)
    v = tl.zeros((LANES,), tl.uint64)
    after_gap = tl.zeros((LANES,), tl.int1)  # a value follows the gap that was read
    good = tl.full((LANES,), 1, tl.int1)
    going = good & (place < count)
    while tl.max(going.to(tl.int32), 0) > 0:
        # the next class
        enters = going & (place >= end)
        c += enters.to(tl.int32)
        end = tl.load(ends + block * CLASSES + c, mask=enters, other=0) + tl.where(enters, 0, end)
        g = tl.load(tables + c, mask=enters, other=0) + tl.where(enters, 0, g)
        v = tl.load(tables + CLASSES + c, mask=enters, other=0).to(tl.uint64) + tl.where(enters, 0, v)
        reads = going & (place < end)
        held = _peek(words, bit, last)
        zeros = _zeros((held & 0xFFFFFFFF).to(tl.uint32))
        # a gap
        in_gap = reads & (g != DIRECT) & (after_gap == 0)
        needed = (end - place + (1 << g) - 1) >> g
        passed = tl.minimum(zeros, MOST_SKIPPED)
        ended = in_gap & (passed >= needed)
        skips = in_gap & (passed < needed) & (zeros >= MOST_SKIPPED)
        low = (held >> (passed + 1).to(tl.uint64)).to(tl.int32) & ((1 << g) - 1)
        jump = (passed << g) + tl.where(skips, 0, low)
        used = tl.where(ended, needed, passed + tl.where(skips, 0, 1 + g))
        # a value
        has_value = reads & (in_gap == 0)
        steps = tl.minimum(zeros, ESCAPE)
        escaped = steps == ESCAPE
        width = tl.where(escaped, BITS, v.to(tl.int32))
        rest = held >> (steps + tl.where(escaped, 0, 1)).to(tl.uint64)
        tail = rest & ((tl.full((LANES,), 1, tl.uint64) << width.to(tl.uint64)) - 1)
        value = tl.where(escaped, tail, (steps.to(tl.uint64) << v) + tail) + tl.where(g == DIRECT, 0, 1).to(tl.uint64)
        to = tl.load(order + block * BLOCK + place, mask=has_value, other=0).to(tl.int64) + block * BLOCK
        old = tl.load(base + to, mask=has_value, other=0).to(tl.int32)
        if not WIDE:
            value = value & 0xFFFF
        number = _undone(old, (value & 0xFFFFFFFF).to(tl.uint32), WIDE)
        tl.store(out + to, number.to(out.dtype.element_ty), mask=has_value)
        # onwards
        bit += tl.where(in_gap, used, tl.where(has_value, steps + tl.where(escaped, 0, 1) + width, 0)).to(tl.int64)
        place = tl.where(ended, end, place + tl.where(in_gap, jump, 0) + has_value.to(tl.int32))
        after_gap = in_gap & (ended == 0) & (skips == 0)
        good = good & ((after_gap == 0) | (place < end))
        going = good & (place < count)
    good = good & (is_plain | (((bit - begin * 8 + 7) // 8) == length))
    tl.store(bad + tl.zeros((LANES,), tl.int32), tl.full((LANES,), 1, tl.int32), mask=(good == 0) & (count > 0))
