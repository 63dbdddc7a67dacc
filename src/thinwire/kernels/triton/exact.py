"""Exact differences on a GPU: the bytes of kernels/exact.py, which defines them and the names used here.

Each word of 32 numbers has a mask of its members for every class, so that prefix sums of the masks' bits give numbers
their places. Programs share the blocks of a tensor: few enough that their tables stay in the cache. Coded numbers are
listed by class, and codes are a few bits that are added to words of zeros. Reading is serial, so a lane reads a block,
two codes per turn, as long for few blocks as for thousands; then differences are brought to their numbers.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.exact import FORMATS, MOST_ZEROS
from thinwire.kernels.triton.memory import instruction
from thinwire.kernels.triton.prepared import Prepared
from thinwire.wire import EXACT_BLOCK, EXACT_CLASSES, EXACT_DIRECT, ExactTables

BLOCK = tl.constexpr(EXACT_BLOCK)
WORDS = tl.constexpr(EXACT_BLOCK // 32)
CLASSES = tl.constexpr(EXACT_CLASSES)
DIRECT = tl.constexpr(EXACT_DIRECT)
ESCAPE = tl.constexpr(MOST_ZEROS)
PART = tl.constexpr(1024)  # numbers, or bytes, at once
SCRATCH = tl.constexpr((2 * EXACT_BLOCK // 32 + 1) * EXACT_CLASSES + EXACT_BLOCK)  # of a program
LANES = tl.constexpr(32)  # blocks that a program reads
SHARED = 8, 128  # warps and registers of those that share the blocks of a tensor
LONGEST = 1 << 15  # more bytes than a damaged block is read
PROGRAMS = 528  # that share the blocks of a tensor, and the memory for their tables
TURNS = tl.constexpr(8)  # between two looks at whether all lanes are done


def exact_encode(tables: ExactTables, new: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    """The bytes of all blocks, one after the other, and the length of each."""
    count = -(-base.numel() // EXACT_BLOCK)
    lengths_K = torch.zeros(count, dtype=torch.int64, device=base.device)
    rows = torch.zeros(count, EXACT_BLOCK * base.itemsize // 8 + 1, dtype=torch.int64, device=base.device)
    if count:
        launch(exact_encode_kernel, tables, base, count)(new=_bits(new), base=_bits(base), rows=rows, lengths=lengths_K)
    starts = torch.nn.functional.pad(lengths_K.cumsum(0), (1, 0))
    lengths = lengths_K.cpu()
    out = torch.empty(int(lengths.sum()), dtype=torch.uint8, device=base.device)
    if count:
        launch(exact_pack_kernel, tables, base, count)(
            rows=rows.view(torch.uint8), new=new.view(torch.uint8), starts=starts, out=out
        )
    return out, lengths


def exact_decode(tables: ExactTables, blocks: Tensor, starts: Tensor, base: Tensor, out: Tensor) -> bool:
    """out = the numbers that were encoded; False if the bytes are damaged."""
    count = len(starts) - 1
    if not count:
        return True
    words = torch.nn.functional.pad(blocks, (0, LONGEST - blocks.numel() % 4)).view(torch.int32)
    by_class = torch.zeros(count * EXACT_BLOCK, dtype=FORMATS[base.dtype].signed, device=base.device)
    ends = torch.empty(count, EXACT_CLASSES, dtype=torch.int16, device=base.device)
    bad = torch.zeros(1, dtype=torch.int32, device=base.device)
    places = {"by_class": by_class, "starts": starts.to(base.device)}
    launch(exact_ends_kernel, tables, base, count)(base=_bits(base), ends=ends)
    launch(exact_read_kernel, tables, base, -(-count // LANES.value), 1)(words=words, ends=ends, bad=bad, **places)
    launch(exact_undo_kernel, tables, base, count)(
        blocks=words.view(torch.uint8), base=_bits(base), out=_bits(out), **places
    )
    return not bool(bad)


def launch(kernel: Any, tables: ExactTables, base: Tensor, grid: int, warps: int = 4) -> Prepared:
    """A kernel with all that depends on the tables and the base; fewer programs than `grid` may share its blocks."""
    format = FORMATS[base.dtype]
    known: dict[str, Any] = {"top": tables.top, "numel": base.numel()}
    registers = None
    if "scratch" in kernel.arg_names:
        known["count"], grid, (warps, registers) = grid, min(grid, PROGRAMS), SHARED
        known["scratch"] = torch.empty(grid * SCRATCH.value, dtype=torch.int64, device=base.device)
    if "tables" in kernel.arg_names:
        known["tables"] = torch.tensor([*tables.gaps, *tables.values], dtype=torch.int32, device=base.device)
    constants = {"WIDE": format.bits == 32, "MANTISSA": format.mantissa, "EXPONENTS": format.exponents}
    return Prepared(kernel, base.device, grid, warps, known, constants, registers)


def _bits(x: Tensor) -> Tensor:
    return x.view(FORMATS[x.dtype].signed)


# --- numbers ----------------------------------------------------------------------------------------------------------


@triton.jit
def _ordered(bits, WIDE: tl.constexpr):
    return bits ^ ((bits >> 31) & (0x7FFFFFFF if WIDE else 0x7FFF))


@triton.jit
def _difference(new, base, WIDE: tl.constexpr):
    """u."""
    d = _ordered(new, WIDE) - _ordered(base, WIDE)
    return (d << 1) ^ (d >> 31) if WIDE else ((d << 1) ^ ((d << 16) >> 31)) & 0xFFFF


@triton.jit
def _undone(base, u, WIDE: tl.constexpr):
    """The bits of the number whose difference to the base is u."""
    found = _ordered(base, WIDE) + (((u >> 1) & 0x7FFFFFFF) ^ -(u & 1))
    return _ordered(found if WIDE else (found << 16) >> 16, WIDE)


# --- classes ----------------------------------------------------------------------------------------------------------


@triton.jit
def _load(numbers, i, count):
    """Numbers of a block, several at once where it is a whole one."""
    if count == BLOCK:
        found = tl.load(numbers + i)
    else:
        found = tl.load(numbers + i, mask=i < count, other=0)
    return found.to(tl.int32)


@triton.jit
def _class_of(old, top, MANTISSA: tl.constexpr, EXPONENTS: tl.constexpr):
    return tl.minimum(tl.maximum(top - ((old >> MANTISSA) & EXPONENTS), 0), CLASSES - 1)


@triton.jit
def _ones(x):
    """How many bits of each word are set."""
    return instruction("popc.b32 $0, $1;", "=r,r", (x,))


@triton.jit
def _members(base, left, top, MANTISSA: tl.constexpr, EXPONENTS: tl.constexpr):
    """Of every word of 32 numbers and every class: which numbers are members. `left` numbers are there."""
    i = tl.arange(0, WORDS)[:, None, None] * 32 + tl.arange(0, 4)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    own = _class_of(_load(base, i, left), top, MANTISSA, EXPONENTS)
    planes = tl.sum(((own * 0x00204081) & 0x01010101) << (i & 7), 2)  # a bit of eight classes in each byte
    room = tl.minimum(tl.maximum(left - tl.arange(0, WORDS)[:, None] * 32, 0), 32)
    found = tl.where(room == 32, -1, (1 << room) - 1)
    c = tl.arange(0, CLASSES)[None, :]
    for k in tl.static_range(4):
        plane = tl.sum(((planes >> (8 * k)) & 0xFF) << (tl.arange(0, 4)[None, :] * 8), 1)
        found &= plane[:, None] ^ (((c >> k) & 1) - 1)
    return found


@triton.jit
def _changed(new, base, left):
    """Of every word of 32 numbers: which have changed."""
    i = tl.arange(0, WORDS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    return tl.sum((_load(new, i, left) != _load(base, i, left)).to(tl.int32) << (i & 31), 1)


@triton.jit
def _words_of(table):
    """Where a word and a class have their place in a table."""
    return table + tl.arange(0, WORDS)[:, None] * CLASSES + tl.arange(0, CLASSES)[None, :]


@triton.jit
def _unsigned(x):
    return x.to(tl.int64) & 0xFFFFFFFF


@triton.jit
def _before(word, i):
    """How many bits of the word are set below that of number i."""
    return _ones(word & ((1 << (i & 31)) - 1))


# --- encode -----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=("top", "numel", "count"))
def exact_encode_kernel(
    new, base, scratch, rows, lengths,
    tables, top, numel, count,
    WIDE: tl.constexpr, MANTISSA: tl.constexpr, EXPONENTS: tl.constexpr,
):  # fmt: skip
    """A row = the code of a block; and its length in bytes, or that of its plain numbers where they are no longer.

    Coded numbers are listed by class, each with its place among all numbers by class.
    """
    SIZE: tl.constexpr = 4 if WIDE else 2
    table = scratch + tl.program_id(0).to(tl.int64) * SCRATCH  # of words and classes: members, and coded ones
    firsts = table + WORDS * CLASSES  # the place of the first member, and 16 bits higher that of the first coded one
    about = firsts + WORDS * CLASSES  # of classes: start, zeros before it, gap and value parameters, 16 bits each
    listed = about + CLASSES  # differences, places 32 bits higher, and classes another 16
    c = tl.arange(0, CLASSES)
    g_C, v_C = tl.load(tables + c), tl.load(tables + CLASSES + c)
    block = tl.program_id(0).to(tl.int64)
    while block < count:
        first = block * BLOCK
        n = tl.minimum(numel - first, BLOCK).to(tl.int32)
        members = _members(base + first, n, top, MANTISSA, EXPONENTS)
        coded = members & (_changed(new + first, base + first, n)[:, None] | tl.where(g_C == DIRECT, -1, 0)[None, :])
        both = _ones(members) | (_ones(coded) << 16)
        total_C = tl.sum(both, 0)
        end_C = tl.cumsum(total_C, 0)
        tl.store(_words_of(table), _unsigned(members) | (coded.to(tl.int64) << 32))
        tl.store(_words_of(firsts), (tl.cumsum(both, 0) - both + (end_C - total_C)[None, :]).to(tl.int64))
        tl.debug_barrier()
        for at in range(0, BLOCK, PART):
            i = tl.max_contiguous(at + tl.arange(0, PART), 1)
            old = _load(base + first, i, n)
            own = _class_of(old, top, MANTISSA, EXPONENTS)
            cell = (i >> 5) * CLASSES + own
            which, place = tl.load(table + cell), tl.load(firsts + cell).to(tl.int32)
            within, chosen = which.to(tl.int32), (which >> 32).to(tl.int32)
            u = _unsigned(_difference(_load(new + first, i, n), old, WIDE))
            u |= ((place & 0xFFFF) + _before(within, i) + (own << 16)).to(tl.int64) << 32
            tl.store(listed + (place >> 16) + _before(chosen, i), u, mask=(chosen >> (i & 31)) & 1 > 0)
        tl.debug_barrier()
        start_C, last_C = (end_C - total_C) & 0xFFFF, end_C >> 16
        passed_C = (tl.load(listed + last_C - 1, mask=total_C >> 16 > 0, other=0) >> 32).to(tl.int32) & 0xFFFF
        passed_C = tl.where(total_C >> 16 > 0, passed_C + 1, start_C)
        zeros_C = tl.where(g_C == DIRECT, 0, ((end_C & 0xFFFF) - passed_C + (1 << g_C) - 1) >> g_C)
        early_C = tl.cumsum(zeros_C, 0) - zeros_C
        tl.store(about + c, (start_C | (early_C << 16)).to(tl.int64) | ((g_C | (v_C << 16)).to(tl.int64) << 32))
        tl.debug_barrier()
        used = 0  # bits, but zeros at the ends of classes
        row = rows + block * (BLOCK * SIZE // 8 + 1)
        listed_here = tl.max(last_C, 0)
        for at in range(0, listed_here, PART):
            i = at + tl.arange(0, PART)
            inside = i < listed_here
            entry = tl.load(listed + i, mask=inside, other=0)
            higher = (listed + i).to(tl.pointer_type(tl.int32), bitcast=True) - 1  # half of the entry before
            earlier = tl.load(higher, mask=inside & (i > 0), other=-1)
            code = (entry >> 32).to(tl.int32)  # place and class
            of = tl.load(about + (code >> 16))
            start, g = of.to(tl.int32), (of >> 32).to(tl.int32) & 0xFFFF
            v = (of >> 48).to(tl.uint32)
            is_direct = g == DIRECT
            gap = code - tl.maximum(earlier + 1, (code & ~0xFFFF) | (start & 0xFFFF))
            zeros = tl.where(is_direct, 0, gap >> g)
            gap_bits = tl.where(is_direct, 0, 1 + g)
            value = entry.to(tl.uint32) - tl.where(is_direct, 0, 1).to(tl.uint32)
            steps = tl.minimum(value >> v, ESCAPE)
            escaped = steps == ESCAPE
            width = tl.where(escaped, 8 * SIZE, v + 1)
            low = tl.where(escaped, value, ((value << 1) | 1) & ((tl.full((PART,), 2, tl.uint32) << v) - 1))
            length = tl.where(inside, zeros + gap_bits + (steps + width).to(tl.int32), 0)
            bit = used + tl.cumsum(length, 0) - length + zeros + ((start >> 16) & 0xFFFF)
            used += tl.sum(length, 0)
            x = low.to(tl.uint64) << (gap_bits.to(tl.uint64) + steps)
            x |= tl.where(is_direct, 0, ((gap << 1) | 1) & ((2 << g) - 1)).to(tl.uint64)
            word, shift = row + (bit >> 6), (bit & 63).to(tl.uint64)
            high = ((x >> 1) >> (63 - shift)).to(tl.int64, bitcast=True)
            inside &= bit < BLOCK * SIZE * 8
            tl.atomic_or(word, (x << shift).to(tl.int64, bitcast=True), mask=inside, sem="relaxed")
            tl.atomic_or(word + 1, high, mask=inside & (high != 0), sem="relaxed")
        tl.store(lengths + block, tl.minimum((used + tl.sum(zeros_C, 0) + 7) // 8, n * SIZE).to(tl.int64))
        tl.debug_barrier()  # the next block's tables come where these are
        block += tl.num_programs(0)


@triton.jit(do_not_specialize=("numel",))
def exact_pack_kernel(rows, new, starts, out, numel, WIDE: tl.constexpr):
    """The first bytes of every row, or the plain numbers of a block, one block after the other."""
    SIZE: tl.constexpr = 4 if WIDE else 2
    block = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(starts + block), tl.load(starts + block + 1)
    row = rows + block * (BLOCK * SIZE + 8)
    if end - begin == tl.minimum(numel - block * BLOCK, BLOCK) * SIZE:
        row = new + block * (BLOCK * SIZE)
    for at in range(0, (end - begin).to(tl.int32), PART):
        i = at + tl.arange(0, PART)
        mask = i < end - begin
        tl.store(out + begin + i, tl.load(row + i, mask=mask, other=0), mask=mask)


# --- decode -----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=("top", "numel"))
def exact_ends_kernel(base, ends, top, numel, MANTISSA: tl.constexpr, EXPONENTS: tl.constexpr):
    """ends: where every class of a block ends."""
    block = tl.program_id(0).to(tl.int64)
    left = tl.minimum(numel - block * BLOCK, BLOCK).to(tl.int32)
    total = tl.sum(_ones(_members(base + block * BLOCK, left, top, MANTISSA, EXPONENTS)), 0)
    tl.store(ends + block * CLASSES + tl.arange(0, CLASSES), tl.cumsum(total, 0).to(tl.int16))


@triton.jit
def _take(held, k, plain, WIDE: tl.constexpr):
    """A code with parameter k: its first zeros, what it says, and how many bits it has.

    After as many zeros come `plain` bits: those of a value, none of a gap.
    """
    word = held.to(tl.int32)
    zeros = tl.minimum(_ones((word - 1) & ~word), ESCAPE)
    stops = zeros == ESCAPE
    width = tl.where(stops, plain, k)
    begin = zeros + tl.where(stops, 0, 1)
    low = held >> begin.to(tl.uint64)
    if WIDE:
        low = (low & ((tl.full((LANES,), 1, tl.uint64) << width.to(tl.uint64)) - 1)).to(tl.int32)
    else:
        low = low.to(tl.int32) & ((1 << width) - 1)
    return zeros, low + tl.where(stops & (plain > 0), 0, zeros << k), begin + width


@triton.jit(do_not_specialize=("numel",))
def exact_read_kernel(
    words, starts, ends, by_class, bad,
    tables, numel,
    WIDE: tl.constexpr,
):  # fmt: skip
    """by_class = the differences of blocks, a lane each; it was zero. bad: whether a block is damaged."""
    BITS: tl.constexpr = 32 if WIDE else 16
    block = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    count = tl.minimum(numel - block * BLOCK, BLOCK).to(tl.int32)  # none or less beyond the last block
    begin = tl.load(starts + block, mask=count > 0, other=0)
    length = (tl.load(starts + block + 1, mask=count > 0, other=0) - begin).to(tl.int32)
    source = words + (begin >> 2)
    start = ((begin & 3) * 8).to(tl.int32)
    bit = start
    is_plain = length == count * (BITS // 8)
    place = tl.where(is_plain, count, 0)
    by_class += block * BLOCK
    c = tl.full((LANES,), -1, tl.int32)
    end = tl.zeros((LANES,), tl.int32)
    g = tl.zeros((LANES,), tl.int32)
    v = tl.zeros((LANES,), tl.int32)
    after_gap = tl.zeros((LANES,), tl.int1)  # a value follows the gap that was read
    good = tl.full((LANES,), 1, tl.int1)
    while tl.max((good & (place < count)).to(tl.int32), 0) > 0:
        for _ in range(TURNS):
            going = good & (place < count)
            enters = going & (place >= end)
            c += enters.to(tl.int32)
            end = tl.where(enters, tl.load(ends + block * CLASSES + c, mask=enters, other=0).to(tl.int32), end)
            g = tl.where(enters, tl.load(tables + c, mask=enters, other=0), g)
            v = tl.where(enters, tl.load(tables + CLASSES + c, mask=enters, other=0), v)
            reads = going & (place < end)
            word = source + (bit >> 5)
            shift = (bit & 31).to(tl.uint64)
            held = (_unsigned(tl.load(word)) | (_unsigned(tl.load(word + 1)) << 32)).to(
                tl.uint64, bitcast=True
            ) >> shift
            held |= (_unsigned(tl.load(word + 2)) << 1).to(tl.uint64, bitcast=True) << (63 - shift)
            # a gap, or a value
            is_direct = g == DIRECT
            in_gap = (is_direct | after_gap) == 0
            zeros, x, used = _take(held, tl.where(in_gap, g, v), tl.where(in_gap, 0, BITS), WIDE)
            needed = (end - place + (1 << g) - 1) >> g
            ended = in_gap & (zeros >= needed)
            used = tl.where(ended, needed, used)
            one = tl.where(is_direct, 0, 1)
            tl.store(by_class + place, (x + one).to(by_class.dtype.element_ty), mask=reads & (in_gap == 0))
            after = tl.where(ended, end, place + tl.where(in_gap, x, 1))
            # a value
            follows = in_gap & (zeros < ESCAPE) & (ended == 0)
            good = good & ((reads & follows & (after >= end)) == 0)
            takes = reads & good & (follows | is_direct) & (after < end)
            _, x, more = _take(held >> used.to(tl.uint64), v, tl.full((LANES,), BITS, tl.int32), WIDE)
            if WIDE:
                takes = takes & (used + more <= 64)
            tl.store(by_class + after, (x + one).to(by_class.dtype.element_ty), mask=takes)
            after_gap = tl.where(reads, follows & (takes == 0), after_gap)
            bit += tl.where(reads, used + tl.where(takes, more, 0), 0)
            place = tl.where(reads, after + takes.to(tl.int32), place)
    good = good & (is_plain | (((bit - start + 7) // 8) == length))
    tl.store(bad + tl.zeros((LANES,), tl.int32), tl.full((LANES,), 1, tl.int32), mask=(good == 0) & (count > 0))


@triton.jit(do_not_specialize=("top", "numel", "count"))
def exact_undo_kernel(
    blocks, base, out, starts, by_class, scratch,
    top, numel, count,
    WIDE: tl.constexpr, MANTISSA: tl.constexpr, EXPONENTS: tl.constexpr,
):  # fmt: skip
    """out = base and its differences, or the plain numbers of a block."""
    SIZE: tl.constexpr = 4 if WIDE else 2
    table = scratch + tl.program_id(0).to(tl.int64) * SCRATCH
    block = tl.program_id(0).to(tl.int64)
    while block < count:
        first = block * BLOCK
        n = tl.minimum(numel - first, BLOCK).to(tl.int32)
        start = tl.load(starts + block)
        is_plain = tl.load(starts + block + 1) - start == n * SIZE
        members = _members(base + first, n, top, MANTISSA, EXPONENTS)
        count_C = _ones(members)
        total_C = tl.sum(count_C, 0)
        places = tl.cumsum(count_C, 0) - count_C + (tl.cumsum(total_C, 0) - total_C)[None, :]
        tl.store(_words_of(table), _unsigned(members) | (places.to(tl.int64) << 32))
        tl.debug_barrier()
        for at in range(0, BLOCK, PART):
            i = at + tl.arange(0, PART)
            inside = i < n
            if is_plain:
                x = tl.zeros((PART,), tl.int32)
                for byte in tl.static_range(SIZE):
                    x |= tl.load(blocks + start + i * SIZE + byte, mask=inside, other=0).to(tl.int32) << (8 * byte)
            else:
                old = _load(base + first, i, n)
                entry = tl.load(table + (i >> 5) * CLASSES + _class_of(old, top, MANTISSA, EXPONENTS))
                place = (entry >> 32).to(tl.int32) + _before(entry.to(tl.int32), i)
                u = tl.load(by_class + first + place, mask=inside, other=0).to(tl.int32)
                if not WIDE:
                    u = u & 0xFFFF
                x = _undone(old, u, WIDE)
            x = x.to(out.dtype.element_ty)
            if n == BLOCK:
                tl.store(out + first + i, x)
            else:
                tl.store(out + first + i, x, mask=inside)
        tl.debug_barrier()
        block += tl.num_programs(0)
