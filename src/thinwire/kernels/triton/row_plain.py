"""The kernels of messages in rows (schema.Rows), of wires without blocks; rows as in row_blocks.py."""

import triton
import triton.language as tl

from thinwire.kernels.triton.decode_blocks import note
from thinwire.kernels.triton.frame import wide, write_frame
from thinwire.kernels.triton.memory import load_floats, load_words, store_floats, store_words
from thinwire.kernels.triton.numbers import size_bits
from thinwire.kernels.triton.plain import GROUPS, get, left_over, place, put
from thinwire.kernels.triton.row_blocks import ROW_CHANGING, copy_row
from thinwire.kernels.triton.tiles import added, times


@triton.jit(do_not_specialize=ROW_CHANGING)
def encode_plain_rows(
    x, wire, each, stride, skip, short, head0, head1, head2,
    a_numel_low, a_numel_high, a_codes_end, a_nbytes, b_numel_low, b_numel_high, b_codes_end, b_nbytes, plane0,
    SHORT: tl.constexpr, GROUPED: tl.constexpr, RAW: tl.constexpr,
):  # fmt: skip
    """Write the wires of all rows but `skip`: the numbers in the format SHORT; if RAW, their bytes."""
    row = tl.program_id(1)
    if (row <= short) & (row != skip):
        second = row == short
        low = tl.where(second, b_numel_low, a_numel_low)
        high = tl.where(second, b_numel_high, a_numel_high)
        numel = _numel(low, high)
        target = wire + row * wide(stride)
        source = x + row * wide(each)
        if tl.program_id(0) == 0:
            header = (head0, head1, head2, 0, 0, 0, low, high)
            codes_end = tl.where(second, b_codes_end, a_codes_end)
            write_frame(target, header, (codes_end, tl.where(second, b_nbytes, a_nbytes)))
        for group in tl.static_range(GROUPS):
            at, inside = place(tl.program_id(0), group, numel)
            _encode(source, target + plane0, at, inside, SHORT, 4, GROUPED, RAW)
        if tl.program_id(0) == 0:
            rest, some = left_over(numel)
            _encode(source, target + plane0, rest, some, SHORT, 1, GROUPED, RAW)


@triton.jit
def _numel(low, high):
    return (wide(high) << 32) | low.to(tl.uint32).to(tl.int64)


@triton.jit
def _encode(
    source, plane, at, inside, SHORT: tl.constexpr, COUNT: tl.constexpr, GROUPED: tl.constexpr, RAW: tl.constexpr
):
    if RAW:
        SIZE: tl.constexpr = SHORT.primitive_bitwidth // 8
        origin = source.to(tl.pointer_type(tl.uint8))
        if GROUPED and COUNT > 1:
            words = load_words(origin + at * SIZE, inside, COUNT * SIZE)
            store_words(plane + at * SIZE, words, inside, COUNT * SIZE)
        else:
            for i in tl.static_range(COUNT * SIZE):
                store_words(plane + at * SIZE + i, load_words(origin + at * SIZE + i, inside, 1), inside, 1)
    else:
        put(plane, load_floats(source, at, inside, COUNT, GROUPED), at, inside, SHORT, COUNT, GROUPED)


@triton.jit(do_not_specialize=ROW_CHANGING)
def decode_plain_rows(
    wire, out, source, bad, each, stride, skip, short, call, world, scale,
    a_numel_low, a_numel_high, b_numel_low, b_numel_high, plane0,
    SHORT: tl.constexpr, GROUPED: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """out = every row's wire decoded, row `skip` copied from `source`; with `world` > 1 there is one row, their sum."""
    row = tl.program_id(1)
    second = row == short
    numel = _numel(tl.where(second, b_numel_low, a_numel_low), tl.where(second, b_numel_high, a_numel_high))
    if (row <= short) & (row != skip):
        first = wire + row * wide(stride) + plane0
        target = out + row * wide(each)
        for group in tl.static_range(GROUPS):
            at, inside = place(tl.program_id(0), group, numel)
            total, worst = _total(first, wide(stride), world, -1, at, inside, SHORT, 4, GROUPED)
            store_floats(target, times(total, scale), at, inside, 4, GROUPED)
            if COUNT:
                note(bad, call, worst[None, :])
        if tl.program_id(0) == 0:
            rest, some = left_over(numel)
            last, worst_last = _total(first, wide(stride), world, -1, rest, some, SHORT, 1, GROUPED)
            store_floats(target, times(last, scale), rest, some, 1, False)
            if COUNT:
                note(bad, call, worst_last[None, :])
    if row == skip:
        start = row * wide(each)
        copy_row(source + start, out + start, numel)


@triton.jit
def _total(
    plane, stride, world, own, at, inside, SHORT: tl.constexpr, COUNT: tl.constexpr, GROUPED: tl.constexpr
):  # fmt: skip
    """(sum, worst): the first number, and the others added to it; the largest bits of all."""
    first = tl.where(own == 0, world, 0)
    total = get(plane + first * stride, at, inside, SHORT, COUNT, GROUPED)
    worst = _largest(total, COUNT)
    for w in range(1, world):
        more = get(plane + tl.where(w == own, world, w) * stride, at, inside, SHORT, COUNT, GROUPED)
        total = added(total, more)
        worst = tl.maximum(worst, _largest(more, COUNT))
    return total, worst


@triton.jit
def _largest(floats, COUNT: tl.constexpr):
    worst = size_bits(floats[0])
    for i in tl.static_range(1, COUNT):
        worst = tl.maximum(worst, size_bits(floats[i]))
    return worst


@triton.jit(do_not_specialize=ROW_CHANGING)
def recode_plain_own(
    wire, out, x, start, stride, world, own, scale,
    head0, head1, head2, numel_low, numel_high, numel, plane0, codes_end, nbytes,
    SHORT: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """out = scale * (sum of the wires of others + x), where x, the own share, did not travel and is exact."""
    program = tl.program_id(0)
    if program == 0:
        write_frame(out, (head0, head1, head2, 0, 0, 0, numel_low, numel_high), (codes_end, nbytes))
    x += wide(start)
    for group in tl.static_range(GROUPS):
        at, inside = place(program, group, numel)
        _recode(wire + plane0, x, out + plane0, wide(stride), world, own, scale, at, inside, SHORT, 4, GROUPED)
    if program == tl.num_programs(0) - 1:
        rest, some = left_over(numel)
        _recode(wire + plane0, x, out + plane0, wide(stride), world, own, scale, rest, some, SHORT, 1, GROUPED)


@triton.jit
def _recode(
    wires, x, plane, stride, world, own, scale, at, inside,
    SHORT: tl.constexpr, COUNT: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    total, _worst = _total(wires, stride, world, own, at, inside, SHORT, COUNT, GROUPED)
    others = times(total, scale)
    share = load_floats(x, at, inside, COUNT, GROUPED)
    both = ()
    for i in tl.static_range(COUNT):
        both = both + (tl.fma(share[i], scale, others[i]),)
    put(plane, both, at, inside, SHORT, COUNT, GROUPED)
