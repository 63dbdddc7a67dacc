"""Exact differences on a GPU: the bytes of kernels/exact.py, which defines them and the names used here.

For every class, a word marks which of 32 numbers are members; prefix sums of the set bits give the numbers their
places. A few programs share the blocks of a tensor, so that their tables stay in the cache. To encode, numbers are
listed by class, and the bits of their codes set in words of zeros. Decoding a block is serial: one lane reads it, two
codes per turn, so thousands of blocks take as long as a few. Another kernel then adds the differences to the base.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from thinwire.kernels import exact as definition
from thinwire.kernels.exact import BIT, EXPONENTS, FORMATS, LENGTHS, MOST_ZEROS, RARE
from thinwire.kernels.triton.four_bytes import bits_set
from thinwire.kernels.triton.memory import instruction, opaque
from thinwire.kernels.triton.prepared import Prepared
from thinwire.wire import EXACT_BLOCK, EXACT_CLASSES, EXACT_DIRECT, EXACT_MOST_GAP, ExactTables, exact_lengths

BLOCK, WORDS, CLASSES = map(tl.constexpr, (EXACT_BLOCK, EXACT_BLOCK // 32, EXACT_CLASSES))
DIRECT, MOST_GAP, ESCAPE = map(tl.constexpr, (EXACT_DIRECT, EXACT_MOST_GAP, MOST_ZEROS))
ALL_EXPONENTS, ALL_LENGTHS, SOME, UNIT = map(tl.constexpr, (EXPONENTS, LENGTHS, RARE, float(BIT)))
PART = tl.constexpr(1024)  # numbers, or bytes, that a program works on at once
UNDONE = tl.constexpr(2048)  # numbers that are added to the base at once: more loads that wait at the same time
SCRATCH = tl.constexpr((2 * EXACT_BLOCK // 32 + 1) * EXACT_CLASSES + EXACT_BLOCK)  # int64 per program
LANES = tl.constexpr(32)  # blocks that a program reads
SHARED = 8, 128  # warps, and registers per thread, of programs that share the blocks of a tensor
LONGEST = 1 << 15  # bytes of padding: more than are ever read of a damaged block
PROGRAMS = 528  # at most so many share the blocks of a tensor, which limits the memory for their tables
TURNS = tl.constexpr(8)  # between two checks whether all lanes are done


def exact_encode(new: Tensor, base: Tensor) -> tuple[ExactTables, Tensor, Tensor]:
    """The tables, the length of each block, and the bytes of all blocks, one after the other."""
    count = -(-base.numel() // EXACT_BLOCK)
    if not count:
        return definition.exact_encode(new, base)
    kind, room, stride = (base.dtype, base.device), base.new_zeros, definition.counted_stride(base.numel())
    counts = room(-(-count // stride), EXPONENTS, LENGTHS, dtype=torch.int32)
    tables, lengths_K = room(1 + 2 * EXACT_CLASSES, dtype=torch.int64), room(count, dtype=torch.int64)
    rows = room(count, EXACT_BLOCK * base.itemsize // 8 + 1, dtype=torch.int64)
    pair = {"new": _bits(new), "base": _bits(base), "numel": base.numel()}
    launch(exact_count_kernel, *kind, len(counts), 8)(counts=counts, stride=stride, **pair)
    costs, summed = definition.value_costs(8 * base.itemsize, base.device), counts.sum(0, dtype=torch.int32)
    launch(exact_choose_kernel, *kind, EXACT_CLASSES, 16)(counts=summed, costs=costs, tables=tables)
    scratch = torch.empty(min(count, PROGRAMS), SCRATCH.value, dtype=torch.int64, device=base.device)
    launch(exact_encode_kernel, *kind, count)(
        scratch=scratch, rows=rows, lengths=lengths_K, tables=tables, count=count, **pair
    )
    starts = pad(lengths_K.cumsum(0), (1, 0))
    top, *both, total, longest = torch.cat([tables, starts[-1:], lengths_K.max().view(1)]).tolist()  # waits
    out = torch.empty(total, dtype=torch.uint8, device=base.device)
    given = {"rows": rows.view(torch.uint8), "new": new.view(torch.uint8), "starts": starts}
    launch(exact_pack_kernel, *kind, count)(out=out, numel=base.numel(), **given)
    found = ExactTables(top, tuple(both[:EXACT_CLASSES]), tuple(both[EXACT_CLASSES:]))
    return found, exact_lengths(lengths_K, longest), out


def exact_decode(tables: ExactTables, blocks: Tensor, starts: Tensor, base: Tensor, out: Tensor) -> bool:
    """out = the numbers that were encoded; False if the bytes are damaged."""
    count, kind = len(starts) - 1, (base.dtype, base.device)
    if not count:
        return True
    words = pad(blocks, (0, LONGEST - blocks.numel() % 4)).view(torch.int32)
    by_class = torch.zeros(count * EXACT_BLOCK, dtype=FORMATS[base.dtype].signed, device=base.device)
    classes = torch.empty(count, EXACT_CLASSES, dtype=torch.int32, device=base.device)
    bad = torch.zeros(1, dtype=torch.int32, device=base.device)
    params = torch.tensor([tables.top, *tables.gaps, *tables.values]).to(base.device, non_blocking=True)
    places = {"by_class": by_class, "starts": starts, "numel": base.numel()}
    scratch = torch.empty(min(count, PROGRAMS), SCRATCH.value, dtype=torch.int64, device=base.device)
    given = {"base": _bits(base), "tables": params}
    launch(exact_classes_kernel, *kind, count)(classes=classes, numel=base.numel(), **given)
    launch(exact_read_kernel, *kind, -(-count // LANES.value), 1)(words=words, classes=classes, bad=bad, **places)
    launch(exact_undo_kernel, *kind, count)(
        blocks=words.view(torch.uint8), out=_bits(out), scratch=scratch, count=count, **given, **places
    )
    return not bool(bad)


@lru_cache(maxsize=256)
def launch(kernel: Any, dtype: torch.dtype, device: torch.device, grid: int, warps: int = 4) -> Prepared:
    """A kernel with its constants. If it takes scratch memory, at most PROGRAMS programs share its blocks."""
    constants = {"MANTISSA": FORMATS[dtype].mantissa}
    if "scratch" in kernel.arg_names:
        return Prepared(kernel, device, min(grid, PROGRAMS), SHARED[0], {}, constants, SHARED[1])
    return Prepared(kernel, device, grid, warps, {}, constants)


def _bits(x: Tensor) -> Tensor:
    return x.view(FORMATS[x.dtype].signed)


# --- numbers ----------------------------------------------------------------------------------------------------------


@triton.jit
def _ordered(bits, MANTISSA: tl.constexpr):
    return bits ^ ((bits >> 31) & (0x7FFFFFFF if MANTISSA == 23 else 0x7FFF))


@triton.jit
def _difference(new, base, MANTISSA: tl.constexpr):
    """u of kernels/exact.py."""
    d = _ordered(new, MANTISSA) - _ordered(base, MANTISSA)
    return (d << 1) ^ (d >> 31) if MANTISSA == 23 else ((d << 1) ^ ((d << 16) >> 31)) & 0xFFFF


@triton.jit
def _undone(base, u, MANTISSA: tl.constexpr):
    """The bits of the number whose difference from the base is u."""
    found = _ordered(base, MANTISSA) + (((u >> 1) & 0x7FFFFFFF) ^ -(u & 1))
    return _ordered(found if MANTISSA == 23 else (found << 16) >> 16, MANTISSA)


# --- classes ----------------------------------------------------------------------------------------------------------


@triton.jit
def _load(numbers, i, count):
    """Numbers of a block of `count`; without a mask, and so several at once, if it is whole."""
    if count == BLOCK:
        found = tl.load(numbers + i)
    else:
        found = tl.load(numbers + i, mask=i < count, other=0)
    return found.to(tl.int32)


@triton.jit
def _exponent(old, MANTISSA: tl.constexpr):
    return (old >> MANTISSA) & (0x1F if MANTISSA == 10 else 0xFF)


@triton.jit
def _class_of(old, top, MANTISSA: tl.constexpr):
    return tl.minimum(tl.maximum(top - _exponent(old, MANTISSA), 0), CLASSES - 1)


@triton.jit
def _members(base, left, top, MANTISSA: tl.constexpr):
    """(CLASSES, WORDS): which of 32 numbers are members of a class, a bit for each. The block has `left` numbers."""
    i = tl.arange(0, WORDS)[:, None, None] * 32 + tl.arange(0, 4)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    own = _class_of(_load(base, i, left), top, MANTISSA)
    planes = tl.sum(((own * 0x00204081) & 0x01010101) << (i & 7), 2)  # a bit of eight classes in each byte
    room = tl.minimum(tl.maximum(left - tl.arange(0, WORDS)[None, :] * 32, 0), 32)
    found = tl.where(room == 32, -1, (1 << room) - 1)
    c = tl.arange(0, CLASSES)[:, None]
    j = 8 * tl.arange(0, 4)[None, :]
    for k in tl.static_range(0, 4, 2):  # two planes at once
        low, high = ((planes >> (8 * k)) & 0xFF) << j, ((planes >> (8 * k + 8)) & 0xFF) << j
        both = tl.sum(_unsigned(low) | (high.to(tl.int64) << 32), 1)[None, :]
        found &= both.to(tl.int32) ^ (((c >> k) & 1) - 1)
        found &= (both >> 32).to(tl.int32) ^ (((c >> (k + 1)) & 1) - 1)
    return found


@triton.jit
def _changed(new, base, left):
    """(WORDS,): which of 32 numbers have changed, a bit for each."""
    i = tl.arange(0, WORDS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    return tl.sum((_load(new, i, left) != _load(base, i, left)).to(tl.int32) << (i & 31), 1)


@triton.jit
def _words_of(table):
    """Pointers to the entries of a table, one for each class and word."""
    return table + tl.arange(0, CLASSES)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]


@triton.jit
def _unsigned(x):
    return x.to(tl.int64) & 0xFFFFFFFF


@triton.jit
def _before(word, i):
    """How many bits of the word are set below that of number i."""
    return bits_set(word & ((1 << (i & 31)) - 1))


# --- the choice of parameters -----------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=("numel", "stride"))
def exact_count_kernel(new, base, counts, numel, stride, MANTISSA: tl.constexpr):
    """Every program counts the exponents and lengths of a block in its own table, which is zero before."""
    first = tl.program_id(0).to(tl.int64) * stride * BLOCK
    n = tl.minimum(numel - first, BLOCK).to(tl.int32)
    counts += tl.program_id(0) * (ALL_EXPONENTS * ALL_LENGTHS)
    for at in range(0, BLOCK, PART):
        i = at + tl.arange(0, PART)
        old = _load(base + first, i, n)
        u = _difference(_load(new + first, i, n), old, MANTISSA)
        length = 32 - instruction("clz.b32 $0, $1;", "=r,r", (u,))
        cell = _exponent(old, MANTISSA) * ALL_LENGTHS + length
        tl.atomic_add(counts + cell, 1, mask=i < n, sem="relaxed")


@triton.jit
def exact_choose_kernel(counts, costs, tables):
    """tables = top, the gap parameters and the value parameters; each program chooses those of one class."""
    c = tl.program_id(0)
    e, size = tl.arange(0, ALL_EXPONENTS), tl.arange(0, 64)
    counts_EL = tl.load(counts + e[:, None] * ALL_LENGTHS + size[None, :], mask=size[None, :] < ALL_LENGTHS, other=0)
    above_E = tl.cumsum(tl.sum(counts_EL, 1), 0, reverse=True)
    top = tl.maximum(tl.sum((above_E * SOME > tl.max(above_E, 0)).to(tl.int32), 0) - 1, 0)
    is_member = tl.minimum(tl.maximum(top - e, 0), CLASSES - 1) == c
    counts_L = tl.sum(tl.where(is_member[:, None], counts_EL, 0), 0)
    members = tl.sum(counts_L, 0)
    changed = tl.sum(tl.where(size > 0, counts_L, 0), 0)
    direct = _cheapest(counts_L, costs)
    change = _cheapest(counts_L, costs + ALL_LENGTHS * 32)
    step = tl.arange(0, 16)
    stays = tl.zeros((16,), tl.float64) + (1 - changed.to(tl.float64) / tl.maximum(members, 1).to(tl.float64))
    for k in tl.static_range(MOST_GAP):
        stays = tl.where(step > k, stays * stays, stays)
    cost = changed.to(tl.float64) * (stays / tl.maximum(1 - stays, 1e-12) + 1 + step.to(tl.float64))
    none = members.to(tl.float64) / (1 << step).to(tl.float64)
    cost = (tl.where(changed > 0, cost, none) * UNIT).to(tl.int64)
    gap = tl.min(tl.where(step <= MOST_GAP, (cost << 5) | step, 1 << 62), 0)
    is_direct = (direct >> 5) < (gap >> 5) + (change >> 5)
    tl.store(tables, top.to(tl.int64))
    tl.store(tables + 1 + c, tl.where(is_direct, DIRECT, gap & 31))
    tl.store(tables + 1 + CLASSES + c, tl.where(is_direct, direct, change) & 31)


@triton.jit
def _cheapest(counts_L, costs):
    """The least cost of the counted lengths, with its parameter in the low 5 bits."""
    length, v = tl.arange(0, 64), tl.arange(0, 32)
    costs_LV = tl.load(costs + length[:, None] * 32 + v[None, :], mask=length[:, None] < ALL_LENGTHS, other=0)
    return tl.min((tl.sum(counts_L[:, None].to(tl.int64) * costs_LV, 0) << 5) | v, 0)


# --- encode -----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=("numel", "count"))
def exact_encode_kernel(new, base, scratch, rows, lengths, tables, numel, count, MANTISSA: tl.constexpr):
    """rows = the codes of blocks; lengths = their bytes, or those of the plain numbers if these are not longer.

    Coded numbers are listed by class, each with its place among all numbers by class.
    """
    SIZE: tl.constexpr = 4 if MANTISSA == 23 else 2
    table = scratch + tl.program_id(0).to(tl.int64) * SCRATCH  # by class and word: members, 32 bits higher coded ones
    firsts = table + WORDS * CLASSES  # the place of the first member, and 16 bits higher that of the first coded one
    about = firsts + WORDS * CLASSES  # of classes: start, zeros before it, gap and value parameters, 16 bits each
    listed = about + CLASSES  # differences, places 32 bits higher, and classes another 16
    c = tl.arange(0, CLASSES)
    top = tl.load(tables).to(tl.int32)
    g_C, v_C = tl.load(tables + 1 + c).to(tl.int32), tl.load(tables + 1 + CLASSES + c).to(tl.int32)
    block = tl.program_id(0).to(tl.int64)
    while block < count:
        first = block * BLOCK
        n = tl.minimum(numel - first, BLOCK).to(tl.int32)
        members = _members(base + first, n, top, MANTISSA)
        coded = members & (_changed(new + first, base + first, n)[None, :] | tl.where(g_C == DIRECT, -1, 0)[:, None])
        both = bits_set(members) | (bits_set(coded) << 16)
        total_C = tl.sum(both, 1)
        end_C = tl.cumsum(total_C, 0)
        tl.store(_words_of(table), _unsigned(members) | (coded.to(tl.int64) << 32))
        tl.store(_words_of(firsts), (tl.cumsum(both, 1) - both + (end_C - total_C)[:, None]).to(tl.int64))
        tl.debug_barrier()
        for at in range(0, BLOCK, PART):
            i = opaque(at + tl.arange(0, PART))
            old = _load(base + first, i, n)
            own = _class_of(old, top, MANTISSA)
            cell = own * WORDS + (i >> 5)
            which, place = tl.load(table + cell), tl.load(firsts + cell).to(tl.int32)
            within, chosen = which.to(tl.int32), (which >> 32).to(tl.int32)
            u = _unsigned(_difference(_load(new + first, i, n), old, MANTISSA))
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
        used = 0  # bits, without the zeros at the ends of classes
        row = rows + block * (BLOCK * SIZE // 8 + 1)
        listed_here = tl.max(last_C, 0)
        for at in range(0, listed_here, PART):
            i = opaque(at + tl.arange(0, PART))
            inside = i < listed_here
            entry = tl.load(listed + i, mask=inside, other=0)
            higher = (listed + i).to(tl.pointer_type(tl.int32), bitcast=True) - 1  # upper half of entry i - 1
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
        tl.debug_barrier()  # the next block's tables overwrite these
        block += tl.num_programs(0)


@triton.jit(do_not_specialize=("numel",))
def exact_pack_kernel(rows, new, starts, out, numel, MANTISSA: tl.constexpr):
    """out = the blocks, one after the other: each the first bytes of its row, or its plain numbers."""
    SIZE: tl.constexpr = 4 if MANTISSA == 23 else 2
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


@triton.jit(do_not_specialize=("numel",))
def exact_classes_kernel(base, classes, tables, numel, MANTISSA: tl.constexpr):
    """classes: where every class of a block ends, and from bits 16 and 24 on its gap and value parameters."""
    block = tl.program_id(0).to(tl.int64)
    left = tl.minimum(numel - block * BLOCK, BLOCK).to(tl.int32)
    c = tl.arange(0, CLASSES)
    top = tl.load(tables).to(tl.int32)
    total = tl.sum(bits_set(_members(base + block * BLOCK, left, top, MANTISSA)), 1)
    g, v = tl.load(tables + 1 + c).to(tl.int32), tl.load(tables + 1 + CLASSES + c).to(tl.int32)
    tl.store(classes + block * CLASSES + c, tl.cumsum(total, 0) | (g << 16) | (v << 24))


@triton.jit
def _take(held, k, plain, BITS: tl.constexpr):
    """(zeros, number, bits) of the code with parameter k that `held` starts with.

    At most ESCAPE zeros are taken. After ESCAPE zeros come `plain` bits: those of a value, or none for a gap.
    """
    word = held.to(tl.int32)
    first = bits_set(word ^ (word - 1))  # the zeros and the one after them
    stops = first > ESCAPE
    zeros = tl.minimum(first - 1, ESCAPE)
    begin = tl.minimum(first, ESCAPE)
    width = tl.where(stops, plain, k)
    low = held >> begin.to(tl.uint64)
    if BITS == 32:
        low = (low & ((tl.full((LANES,), 1, tl.uint64) << width.to(tl.uint64)) - 1)).to(tl.int32)
    else:
        low = low.to(tl.int32) & ((1 << width) - 1)
    return zeros, low + tl.where(stops & (plain > 0), 0, zeros << k), begin + width


@triton.jit
def _pair(low, high):
    return (_unsigned(low) | (_unsigned(high) << 32)).to(tl.uint64, bitcast=True)


@triton.jit(do_not_specialize=("numel",))
def exact_read_kernel(words, starts, classes, by_class, bad, numel, MANTISSA: tl.constexpr):
    """by_class, zero before, = the differences of blocks, one lane per block. bad = 1 if a block is damaged."""
    BITS: tl.constexpr = 32 if MANTISSA == 23 else 16
    block = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    count = tl.minimum(numel - block * BLOCK, BLOCK).to(tl.int32)  # 0 or less beyond the last block
    begin = tl.load(starts + block, mask=count > 0, other=0)
    length = (tl.load(starts + block + 1, mask=count > 0, other=0) - begin).to(tl.int32)
    source = words + (begin >> 2)
    bit = ((begin & 3) * 8).to(tl.int32)  # of `word`
    # Lanes read far apart, which is slow, so each loads a word when it has passed one, before it needs the loaded one.
    word, word_1, word_2, word_3 = tl.load(source), tl.load(source + 1), tl.load(source + 2), tl.load(source + 3)
    is_plain = length == count * (BITS // 8)
    place = tl.where(is_plain, count, 0)
    by_class += block * BLOCK
    classes += block * CLASSES
    own = tl.zeros((LANES,), tl.int32)  # of the class that is read
    after_gap = tl.zeros((LANES,), tl.int1)  # a value follows the gap that was read
    good = tl.full((LANES,), 1, tl.int1)
    while tl.max((good & (place < count)).to(tl.int32), 0) > 0:
        for _ in range(TURNS):
            going = good & (place < count)
            enters = going & (place >= (own & 0xFFFF))
            own = tl.load(classes, mask=enters, other=own)
            classes += enters.to(tl.int32)
            end, g, v = own & 0xFFFF, (own >> 16) & 0xFF, own >> 24
            reads = going & (place < end) & (bit < 32)
            shift = (bit & 31).to(tl.uint64)
            held = _pair((_pair(word, word_1) >> shift).to(tl.int32), (_pair(word_1, word_2) >> shift).to(tl.int32))
            # a gap, or a value
            is_direct = g == DIRECT
            in_gap = (is_direct | after_gap) == 0
            zeros, x, used = _take(held, tl.where(in_gap, g, v), tl.where(in_gap, 0, BITS), BITS)
            needed = (end - place + (1 << g) - 1) >> g
            ended = in_gap & (zeros >= needed)
            used = tl.where(ended, needed, used)
            one = tl.where(is_direct, 0, 1)
            _put(by_class + place, x + one, reads & (in_gap == 0))
            after = tl.where(ended, end, place + tl.where(in_gap, x, 1))
            # a value
            follows = in_gap & (zeros < ESCAPE) & (ended == 0)
            good = good & ((reads & follows & (after >= end)) == 0)
            takes = reads & good & (follows | is_direct) & (after < end)
            _, x, more = _take(held >> used.to(tl.uint64), v, tl.full((LANES,), BITS, tl.int32), BITS)
            if BITS == 32:
                takes = takes & (used + more <= 64)
            _put(by_class + after, x + one, takes)
            after_gap = tl.where(reads, follows & (takes == 0), after_gap)
            bit += tl.where(reads, used + tl.where(takes, more, 0), 0)
            place = tl.where(reads, after + takes.to(tl.int32), place)
            moves = bit >= 32
            bit -= tl.where(moves, 32, 0)
            source += moves.to(tl.int32)
            word, word_1 = tl.where(moves, word_1, word), tl.where(moves, word_2, word_1)
            word_2 = tl.where(moves, word_3, word_2)
            word_3 = tl.load(source + 3, mask=moves, other=word_3)
    end = (source.to(tl.int64) - words.to(tl.int64)) * 8 + bit  # bits from the start of `words`
    good = good & (is_plain | ((end + 7) // 8 == begin + length))
    tl.store(bad + tl.zeros((LANES,), tl.int32), tl.full((LANES,), 1, tl.int32), mask=(good == 0) & (count > 0))


@triton.jit
def _put(place, u, mask):
    """Store differences but zeros, which are there."""
    tl.store(place, u.to(place.dtype.element_ty), mask=mask & (u != 0))


@triton.jit(do_not_specialize=("numel", "count"))
def exact_undo_kernel(blocks, base, out, starts, by_class, scratch, tables, numel, count, MANTISSA: tl.constexpr):
    """out = the base plus the differences, or the plain numbers of a block."""
    SIZE: tl.constexpr = 4 if MANTISSA == 23 else 2
    table = scratch + tl.program_id(0).to(tl.int64) * SCRATCH
    top = tl.load(tables).to(tl.int32)
    block = tl.program_id(0).to(tl.int64)
    while block < count:
        first = block * BLOCK
        n = tl.minimum(numel - first, BLOCK).to(tl.int32)
        start = tl.load(starts + block)
        is_plain = tl.load(starts + block + 1) - start == n * SIZE
        members = _members(base + first, n, top, MANTISSA)
        count_C = bits_set(members)
        total_C = tl.sum(count_C, 1)
        places = tl.cumsum(count_C, 1) - count_C + (tl.cumsum(total_C, 0) - total_C)[:, None]
        tl.store(_words_of(table), _unsigned(members) | (places.to(tl.int64) << 32))
        tl.debug_barrier()
        for at in range(0, BLOCK, UNDONE):
            i = at + tl.arange(0, UNDONE)
            inside = i < n
            if is_plain:
                x = tl.zeros((UNDONE,), tl.int32)
                for byte in tl.static_range(SIZE):
                    x |= tl.load(blocks + start + i * SIZE + byte, mask=inside, other=0).to(tl.int32) << (8 * byte)
            else:
                old = _load(base + first, i, n)
                entry = tl.load(table + _class_of(old, top, MANTISSA) * WORDS + (i >> 5))
                place = (entry >> 32).to(tl.int32) + _before(entry.to(tl.int32), i)
                u = tl.load(by_class + first + place, mask=inside, other=0).to(tl.int32)
                u &= 0xFFFF if SIZE == 2 else -1
                x = _undone(old, u, MANTISSA)
            if n == BLOCK:
                tl.store(out + first + i, x.to(out.dtype.element_ty))
            else:
                tl.store(out + first + i, x.to(out.dtype.element_ty), mask=inside)
        tl.debug_barrier()
        block += tl.num_programs(0)
