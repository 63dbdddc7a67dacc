"""Exact differences on a GPU: the bytes of kernels/exact.py, which defines them and the names used here.

A program takes a block. Numbers find their places by class with prefix sums of four classes at once, 16 bits each.
Codes are a few bits, which programs add to words of zeros. Reading is serial within a block, so a lane of a program
reads one block, a gap or a value per turn, and keeps the next words in registers; another kernel then brings the
differences to the numbers they belong to. Reading takes as long for a few blocks as for thousands.
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
ROWS = tl.constexpr(EXACT_BLOCK // 8)
CLASSES = tl.constexpr(EXACT_CLASSES)
DIRECT = tl.constexpr(EXACT_DIRECT)
ESCAPE = tl.constexpr(MOST_ZEROS)
ONES = tl.constexpr(0x0001000100010001)  # times four numbers of 16 bits: the sums of each and those before it
LANES = tl.constexpr(16)  # blocks that a program reads
TURNS = tl.constexpr(8)  # between two looks at whether all lanes are done
MOST_SKIPPED = tl.constexpr(20)  # zeros of a gap that are passed at once
COPIED = tl.constexpr(1024)  # bytes at once
ENCODE = 8, 128  # warps and registers


def exact_encode(tables: ExactTables, new: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    """The bytes of all blocks, one after the other, and the length of each."""
    count = -(-base.numel() // EXACT_BLOCK)
    lengths_K = torch.empty(count, dtype=torch.int64, device=base.device)
    if not count:
        return lengths_K.to(torch.uint8), lengths_K
    by_class = _new_differences(base, count)
    ends = torch.empty(count, 4, dtype=torch.int64, device=base.device)
    rows = torch.zeros(count, _room(base.itemsize), dtype=torch.int32, device=base.device)
    launch(exact_sort_kernel, tables, base, count)(new=_bits(new), base=_bits(base), by_class=by_class, ends=ends)
    places = {"by_class": by_class, "ends": ends.view(torch.int16), "rows": rows, "lengths": lengths_K}
    launch(exact_encode_kernel, tables, base, count, *ENCODE)(new=_bits(new), **places)
    starts = torch.nn.functional.pad(lengths_K.cumsum(0), (1, 0))
    out = torch.empty(int(starts[-1]), dtype=torch.uint8, device=base.device)
    launch(exact_pack_kernel, tables, base, count)(rows=rows.view(torch.uint8), starts=starts, out=out)
    return out, lengths_K


def exact_decode(tables: ExactTables, blocks: Tensor, starts: Tensor, base: Tensor, out: Tensor) -> bool:
    """out = the numbers that were encoded; False if the bytes are damaged."""
    count = len(starts) - 1
    if not count:
        return True
    words = torch.nn.functional.pad(blocks, (0, 16 - blocks.numel() % 4)).view(torch.int32)
    by_class = _new_differences(base, count).zero_()
    ends = torch.empty(count, 4, dtype=torch.int64, device=base.device)
    bad = torch.zeros(1, dtype=torch.int32, device=base.device)
    places = {"by_class": by_class, "starts": starts.to(base.device)}
    launch(exact_ends_kernel, tables, base, count)(base=_bits(base), ends=ends)
    programs = -(-count // LANES.value)
    launch(exact_read_kernel, tables, base, programs, 1)(
        words=words, ends=ends.view(torch.int16), last=words.numel() - 1, bad=bad, **places
    )
    launch(exact_undo_kernel, tables, base, count)(
        blocks=words.view(torch.uint8), base=_bits(base), out=_bits(out), **places
    )
    return not bool(bad)


def _new_differences(base: Tensor, count: int) -> Tensor:
    return torch.empty(count * EXACT_BLOCK, dtype=FORMATS[base.dtype].signed, device=base.device)


def _room(size: int) -> int:
    """Words of a row: a code may end beyond what is kept."""
    return EXACT_BLOCK * size // 4 + 2


def launch(
    kernel: Any, tables: ExactTables, base: Tensor, grid: int, warps: int = 4, registers: int | None = None
) -> Prepared:
    """A kernel with all that depends on the tables and the base."""
    format = FORMATS[base.dtype]
    known: dict[str, Any] = {"top": tables.top, "numel": base.numel()}
    if "tables" in kernel.arg_names:
        known["tables"] = torch.tensor([*tables.gaps, *tables.values], dtype=torch.int32, device=base.device)
    constants = {"WIDE": format.bits == 32, "MANTISSA": format.mantissa, "EXPONENTS": format.exponents}
    constants["ROOM"] = _room(base.itemsize)
    return Prepared(kernel, base.device, grid, warps, known, constants, registers)


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
    return u


@triton.jit
def _undone(base, u, WIDE: tl.constexpr):
    """The bits of the number whose difference to the base is u."""
    d = ((u >> 1) & 0x7FFFFFFF) ^ -(u & 1)
    found = _ordered(base, WIDE) + d
    if not WIDE:
        found = ((found + 0x8000) & 0xFFFF) - 0x8000
    return _ordered(found, WIDE)


@triton.jit
def _zeros(word):
    """How many of a word's 32 bits are zeros below the lowest one."""
    lowest = (word & (0 - word)).to(tl.float32)
    exponent = (lowest.to(tl.int32, bitcast=True) >> 23) - 127
    return tl.where(word == 0, 32, exponent)


# --- classes ----------------------------------------------------------------------------------------------------------


@triton.jit
def _load_base(base, top, numel, MANTISSA: tl.constexpr, EXPONENTS: tl.constexpr):
    """The numbers of a program's block, a row of eight in a thread, and their classes; CLASSES beyond its end."""
    block = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, ROWS)[:, None] * 8 + tl.arange(0, 8)[None, :]
    inside = i < numel - block * BLOCK
    old = tl.load(base + block * BLOCK + i, mask=inside, other=0).to(tl.int32)
    found = tl.minimum(tl.maximum(top - ((old >> MANTISSA) & EXPONENTS), 0), CLASSES - 1)
    return i, inside, old, tl.where(inside, found, CLASSES)


@triton.jit
def _ones(own):
    """1 for every number, in the four bits of its class."""
    one = tl.full((ROWS, 8), 1, tl.int64) << (own * 4).to(tl.int64)
    return tl.where(own < CLASSES, one, 0)


@triton.jit
def _spread(counts, FOUR: tl.constexpr):
    """The counts of four classes, in 16 bits each."""
    held = counts >> (16 * FOUR)
    return (held & 0xF) | ((held & 0xF0) << 12) | ((held & 0xF00) << 24) | ((held & 0xF000) << 36)


@triton.jit
def _add(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@triton.jit
def _ends(rows_R):
    """The numbers of rows by class, four words; how many there are, and where their classes end."""
    a, b, c, d = _spread(rows_R, 0), _spread(rows_R, 1), _spread(rows_R, 2), _spread(rows_R, 3)
    ta, tb, tc, td = tl.reduce((a, b, c, d), 0, _add)
    ea = ta * ONES
    eb = (tb + (ea >> 48 & 0xFFFF)) * ONES
    ec = (tc + (eb >> 48 & 0xFFFF)) * ONES
    ed = (td + (ec >> 48 & 0xFFFF)) * ONES
    return (a, b, c, d), (ta, tb, tc, td), (ea, eb, ec, ed)


@triton.jit
def _places(own):
    """The place of every number by class, and where classes end."""
    one = _ones(own)
    rows, totals, ends = _ends(tl.sum(one, 1))
    a, b, c, d = tl.associative_scan(rows, 0, _add)
    a, b = a - rows[0] + ends[0] - totals[0], b - rows[1] + ends[1] - totals[1]
    c, d = c - rows[2] + ends[2] - totals[2], d - rows[3] + ends[3] - totals[3]
    low = tl.where(own < 4, a[:, None], b[:, None])
    high = tl.where(own < 12, c[:, None], d[:, None])
    before = tl.where(own < 8, low, high) >> ((own & 3) * 16).to(tl.int64)
    rank = tl.cumsum(one, 1) >> (own * 4).to(tl.int64)
    return (before & 0xFFFF).to(tl.int32) + (rank & 0xF).to(tl.int32) - 1, ends


@triton.jit
def _store_ends(to, ends):
    block = tl.program_id(0).to(tl.int64)
    for four in tl.static_range(4):
        tl.store(to + block * 4 + four, ends[four])


@triton.jit(do_not_specialize=("top", "numel"))
def exact_ends_kernel(base, ends, top, numel, MANTISSA: tl.constexpr, EXPONENTS: tl.constexpr):
    """ends: where every class of a block ends."""
    _, _, _, own = _load_base(base, top, numel, MANTISSA, EXPONENTS)
    _, _, found = _ends(tl.sum(_ones(own), 1))
    _store_ends(ends, found)


@triton.jit(do_not_specialize=("top", "numel"))
def exact_sort_kernel(
    new, base, by_class, ends,
    top, numel,
    WIDE: tl.constexpr, MANTISSA: tl.constexpr, EXPONENTS: tl.constexpr,
):  # fmt: skip
    """by_class = the differences of a block, class by class; ends: where classes end."""
    block = tl.program_id(0).to(tl.int64)
    i, inside, old, own = _load_base(base, top, numel, MANTISSA, EXPONENTS)
    place, found = _places(own)
    _store_ends(ends, found)
    u = _difference(tl.load(new + block * BLOCK + i, mask=inside, other=0).to(tl.int32), old, WIDE)
    tl.store(by_class + block * BLOCK + place, u.to(by_class.dtype.element_ty), mask=inside)


# --- encode -----------------------------------------------------------------------------------------------------------


@triton.jit
def _last_two(a, b):
    """Of members that are coded: the place after the last one, and below it that after the one before; 0: none."""
    one = (b & 0xFFFF0000) | (a >> 16)
    return tl.where(b >> 16 == 0, a, tl.where(b & 0xFFFF == 0, one, b))


@triton.jit(do_not_specialize=("numel",))
def exact_encode_kernel(
    new, by_class, ends, rows, lengths,
    tables, numel,
    WIDE: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """A row = the code of a block, or its plain numbers where they are no longer; and its length in bytes."""
    SIZE: tl.constexpr = 4 if WIDE else 2
    block = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    count = tl.minimum(numel - block * BLOCK, BLOCK).to(tl.int32)
    inside = i < count
    u = tl.load(by_class + block * BLOCK + i, mask=inside, other=0).to(tl.int32)
    if not WIDE:
        u = u & 0xFFFF
    u = u.to(tl.uint32, bitcast=True)
    ends += block * CLASSES
    own = tl.zeros((BLOCK,), tl.int32)
    for half in tl.static_range(4):
        middle = own + (CLASSES >> (half + 1))
        own = tl.where(i >= tl.load(ends + middle - 1).to(tl.int32), middle, own)
    start = tl.load(ends + own - 1, mask=own > 0, other=0).to(tl.int32)
    end = tl.load(ends + own).to(tl.int32)
    g = tl.load(tables + own, mask=inside, other=0)
    v = tl.load(tables + CLASSES + own, mask=inside, other=0).to(tl.uint32)
    coded = inside & ((g == DIRECT) | (u != 0))
    has_gap = coded & (g != DIRECT)
    value = tl.where(g == DIRECT, u, u - 1)
    steps = tl.minimum(value >> v, ESCAPE)
    escaped = steps == ESCAPE
    last = tl.associative_scan(tl.where(coded, (i + 1) << 16, 0).to(tl.uint32, bitcast=True), 0, _last_two)
    gap = tl.where(has_gap, i - tl.maximum((last & 0xFFFF).to(tl.int32), start), 0)
    left = i + 1 - tl.maximum((last >> 16).to(tl.int32), start)
    is_end = inside & (coded == 0) & (i + 1 == end)
    first = gap >> g
    gap_bits = tl.where(has_gap, first + 1 + g, 0) + tl.where(is_end, (left + (1 << g) - 1) >> g, 0)
    value_bits = tl.where(coded, steps + tl.where(escaped, 8 * SIZE, v + 1), 0).to(tl.int32)
    begin = tl.cumsum(gap_bits + value_bits, 0) - gap_bits - value_bits
    nbytes = (tl.sum(gap_bits + value_bits, 0) + 7) // 8
    fits = nbytes < count * SIZE
    tl.store(lengths + block, tl.where(fits, nbytes, count * SIZE).to(tl.int64))
    row = rows + block * ROOM
    _add_bits(row, begin + first, ((gap << 1) | 1) & ((2 << g) - 1), has_gap & fits)
    plain = ((value.to(tl.uint64) << 1) | 1) & ((2 << v.to(tl.uint64)) - 1)
    after = begin + gap_bits + steps.to(tl.int32)
    _add_bits(row, after, tl.where(escaped, value.to(tl.uint64), plain), coded & fits)
    if not fits:
        to = row.to(tl.pointer_type(new.dtype.element_ty), bitcast=True)
        tl.store(to + i, tl.load(new + block * BLOCK + i, mask=inside, other=0), mask=inside)


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


@triton.jit(do_not_specialize=("numel", "last"))
def exact_read_kernel(
    words, starts, ends, by_class, bad,
    tables, numel, last,
    WIDE: tl.constexpr,
):  # fmt: skip
    """by_class = the differences of blocks, a lane each; it was zero. bad: whether a block is damaged."""
    BITS: tl.constexpr = 32 if WIDE else 16
    block = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    count = tl.minimum(numel - block * BLOCK, BLOCK).to(tl.int32)  # none or less beyond the last block
    begin = tl.load(starts + block, mask=count > 0, other=0)
    length = (tl.load(starts + block + 1, mask=count > 0, other=0) - begin).to(tl.int32)
    source = words + (begin >> 2)
    room = tl.minimum(last - (begin >> 2), 0xFFFF).to(tl.int32)  # the last word that is there
    first = ((begin & 3) * 8).to(tl.int32)
    bit = first
    at = tl.zeros((LANES,), tl.int32)
    one = tl.load(source)
    two = tl.load(source + tl.minimum(1, room))
    three = tl.load(source + tl.minimum(2, room))
    place = tl.where(length == count * (BITS // 8), count, 0)
    is_plain = place == count
    c = tl.full((LANES,), -1, tl.int32)
    end = tl.zeros((LANES,), tl.int32)
    g = tl.zeros((LANES,), tl.int32)
    v = tl.zeros((LANES,), tl.int32)
    after_gap = tl.zeros((LANES,), tl.int1)  # a value follows the gap that was read
    good = tl.full((LANES,), 1, tl.int1)
    while tl.max((good & (place < count)).to(tl.int32), 0) > 0:
        for _ in range(TURNS):
            going = good & (place < count)
            # the next class
            enters = going & (place >= end)
            c += enters.to(tl.int32)
            end = tl.where(enters, tl.load(ends + block * CLASSES + c, mask=enters, other=0).to(tl.int32), end)
            g = tl.where(enters, tl.load(tables + c, mask=enters, other=0), g)
            v = tl.where(enters, tl.load(tables + CLASSES + c, mask=enters, other=0), v)
            reads = going & (place < end)
            shift = (bit & 31).to(tl.uint64)
            held = (_wide(one) | (_wide(two) << 32)) >> shift
            held |= (_wide(three) << 1) << (63 - shift)
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
            width = tl.where(escaped, BITS, v)
            low = (held >> (steps + tl.where(escaped, 0, 1)).to(tl.uint64)) & (
                (tl.full((LANES,), 1, tl.uint64) << width.to(tl.uint64)) - 1
            )
            value = low.to(tl.int32) + tl.where(escaped, 0, steps << v) + tl.where(g == DIRECT, 0, 1)
            tl.store(by_class + block * BLOCK + place, value.to(by_class.dtype.element_ty), mask=has_value)
            # onwards
            bit += tl.where(in_gap, used, tl.where(has_value, steps + tl.where(escaped, 0, 1) + width, 0))
            place = tl.where(ended, end, place + tl.where(in_gap, jump, 0) + has_value.to(tl.int32))
            after_gap = in_gap & (ended == 0) & (skips == 0)
            good = good & ((after_gap == 0) | (place < end))
            moved = (bit >> 5) - at  # words: two at most
            at += moved
            second = tl.load(source + tl.minimum(at + 1, room), mask=moved > 1, other=0)
            third = tl.load(source + tl.minimum(at + 2, room), mask=moved > 0, other=0)
            one = tl.where(moved == 0, one, tl.where(moved == 1, two, three))
            two = tl.where(moved == 0, two, tl.where(moved == 1, three, second))
            three = tl.where(moved == 0, three, third)
    good = good & (is_plain | (((bit - first + 7) // 8) == length))
    tl.store(bad + tl.zeros((LANES,), tl.int32), tl.full((LANES,), 1, tl.int32), mask=(good == 0) & (count > 0))


@triton.jit
def _wide(word):
    return word.to(tl.uint32, bitcast=True).to(tl.uint64)


@triton.jit(do_not_specialize=("top", "numel"))
def exact_undo_kernel(
    blocks, base, out, starts, by_class,
    top, numel,
    WIDE: tl.constexpr, MANTISSA: tl.constexpr, EXPONENTS: tl.constexpr,
):  # fmt: skip
    """out = base and its differences, or the plain numbers of a block."""
    SIZE: tl.constexpr = 4 if WIDE else 2
    block = tl.program_id(0).to(tl.int64)
    i, inside, old, own = _load_base(base, top, numel, MANTISSA, EXPONENTS)
    start, stop = tl.load(starts + block), tl.load(starts + block + 1)
    if stop - start == tl.minimum(numel - block * BLOCK, BLOCK) * SIZE:
        found = tl.zeros((ROWS, 8), tl.int32)
        for byte in tl.static_range(SIZE):
            found |= tl.load(blocks + start + i * SIZE + byte, mask=inside, other=0).to(tl.int32) << (8 * byte)
    else:
        place, _ = _places(own)
        u = tl.load(by_class + block * BLOCK + place, mask=inside, other=0).to(tl.int32)
        if not WIDE:
            u = u & 0xFFFF
        found = _undone(old, u, WIDE)
    tl.store(out + block * BLOCK + i, found.to(out.dtype.element_ty), mask=inside)
