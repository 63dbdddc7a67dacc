"""The kernels of wires without blocks: the numbers themselves, unchanged or as bfloat16.

A program takes GROUPS times COLUMNS groups of four numbers; the first one also the up to three that are left over. Rows
are those of row_blocks.py; a single wire is a message of one row.
"""

import triton
import triton.language as tl

from thinwire.kernels.triton.decode_blocks import note
from thinwire.kernels.triton.frame import check_headers, wide, write_frame
from thinwire.kernels.triton.memory import load_floats, load_words, narrowed, store_floats, store_words
from thinwire.kernels.triton.numbers import INF_BITS, float_of, size_bits
from thinwire.kernels.triton.row_blocks import copy_row, picked
from thinwire.kernels.triton.tiles import added, fused, load_bytes, store_bytes, times

COLUMNS = tl.constexpr(256)
GROUPS = tl.constexpr(4)
PICKED = tl.constexpr(4096)  # numbers here and there in a tensor (rows.Picked), as many by one program


@triton.jit
def encode_plain(
    x, residual, wire, rows, a, b,
    SHORT: tl.constexpr, GROUPED: tl.constexpr, RESIDUAL: tl.constexpr, RAW: tl.constexpr,
):  # fmt: skip
    """Row r of wire = x_r + residual_r in the format SHORT, all rows but `skip`; if RAW, the bytes of x.

    SHORT: float32, bfloat16, float16. With a residual there is one row.
    """
    row = tl.program_id(1)
    if (row <= rows.short) & (row != rows.skip):
        frame = picked(a, b, row == rows.short)
        target = wire + row * wide(rows.stride)
        source = x + row * wide(rows.each)
        if tl.program_id(0) == 0:
            write_frame(target, frame, (0, 0))
        plane = target + frame.plane0
        for group in tl.static_range(GROUPS):
            at, inside = place(group, frame.numel)
            _encode(source, residual, plane, at, inside, SHORT, 4, GROUPED, RESIDUAL, RAW)
        if tl.program_id(0) == 0:
            rest, some = left_over(frame.numel)
            _encode(source, residual, plane, rest, some, SHORT, 1, GROUPED, RESIDUAL, RAW)


@triton.jit
def _encode(
    x, residual, plane, at, inside,
    SHORT: tl.constexpr, COUNT: tl.constexpr, GROUPED: tl.constexpr, RESIDUAL: tl.constexpr, RAW: tl.constexpr,
):  # fmt: skip
    """COUNT neighbors from each of `at` on, where they are inside."""
    if RAW:
        SIZE: tl.constexpr = SHORT.primitive_bitwidth // 8
        source = x.to(tl.pointer_type(tl.uint8))
        if GROUPED and COUNT > 1:
            words = load_words(source + at * SIZE, inside, COUNT * SIZE)
            store_words(plane + at * SIZE, words, inside, COUNT * SIZE)
        else:
            for i in tl.static_range(COUNT * SIZE):
                store_words(plane + at * SIZE + i, load_words(source + at * SIZE + i, inside, 1), inside, 1)
    else:
        total = load_floats(x, at, inside, COUNT, GROUPED)
        if RESIDUAL:
            carried = load_floats(residual, at, inside, COUNT, GROUPED)
            total = added(total, carried)
        put(plane, total, at, inside, SHORT, COUNT, GROUPED)
        if RESIDUAL:
            left = ()
            for i in tl.static_range(COUNT):
                value = total[i].to(SHORT).to(tl.float32)
                left = left + (tl.where(size_bits(value) < INF_BITS, total[i] - value, carried[i]),)
            store_floats(residual, left, at, inside, COUNT, GROUPED)


@triton.jit(do_not_specialize=("call",))
def decode_plain(
    wire, out, source, bad, call, rows, scale, a, b,
    SHORT: tl.constexpr, GROUPED: tl.constexpr, COUNT: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """out_r = scale * sum of the wires of row r, in order in fp32; row `skip` is copied from `source`.

    COUNT: note the call where a number is not finite (decode_blocks.Sink). CHECK: where a header of the only row does
    not fit, the sum is NaN.
    """
    row = tl.program_id(1)
    frame = picked(a, b, row == rows.short)
    target = out + row * wide(rows.each)
    if CHECK:
        _key, fine = check_headers(wire, rows, frame, (0, 0), False)
        scale = tl.where(fine, scale, float("nan"))
    if (row <= rows.short) & (row != rows.skip):
        plane = wire + row * wide(rows.stride) + frame.plane0
        for group in tl.static_range(GROUPS):
            at, inside = place(group, frame.numel)
            total, worst = _sum(plane, rows, -1, at, inside, SHORT, 4, GROUPED)
            store_floats(target, times(total, scale), at, inside, 4, GROUPED)
            if COUNT:
                note(bad, call, worst[None, :])
        if tl.program_id(0) == 0:
            rest, some = left_over(frame.numel)
            last, worst_last = _sum(plane, rows, -1, rest, some, SHORT, 1, GROUPED)
            store_floats(target, times(last, scale), rest, some, 1, False)
            if COUNT:
                note(bad, call, worst_last[None, :])
    if row == rows.skip:
        copy_row(source + row * wide(rows.each), target, frame.numel)


@triton.jit
def recode_plain(
    wire, out, x, stack, part, frame,
    SHORT: tl.constexpr, GROUPED: tl.constexpr, OWN: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """out = scale * (sum of the wires, and if OWN of x, which did not travel and is exact). CHECK: see decode_plain."""
    scale = part.scale
    if CHECK:
        _key, fine = check_headers(wire, stack, frame, (0, 0), False)
        scale = tl.where(fine, scale, float("nan"))
    if tl.program_id(0) == 0:
        write_frame(out, frame, (0, 0))
    x += wide(part.start)
    plane = wire + frame.plane0
    target = out + frame.plane0
    for group in tl.static_range(GROUPS):
        at, inside = place(group, frame.numel)
        _recode(plane, x, target, stack, part.own, scale, at, inside, SHORT, 4, GROUPED, OWN)
    if tl.program_id(0) == 0:
        rest, some = left_over(frame.numel)
        _recode(plane, x, target, stack, part.own, scale, rest, some, SHORT, 1, GROUPED, OWN)


@triton.jit
def _recode(
    plane, x, target, stack, own, scale, at, inside,
    SHORT: tl.constexpr, COUNT: tl.constexpr, GROUPED: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    if OWN:
        total, _worst = _sum(plane, stack, own, at, inside, SHORT, COUNT, GROUPED)
        total = fused(load_floats(x, at, inside, COUNT, GROUPED), scale, times(total, scale))
    else:
        total, _worst = _sum(plane, stack, -1, at, inside, SHORT, COUNT, GROUPED)
        total = times(total, scale)
    put(target, total, at, inside, SHORT, COUNT, GROUPED)


@triton.jit
def place(group: tl.constexpr, numel):
    """First elements of the groups of four, and which are whole."""
    at = (tl.program_id(0).to(tl.int64) * GROUPS + group) * (COLUMNS * 4) + tl.arange(0, COLUMNS) * 4
    return at, at + 4 <= numel


@triton.jit
def left_over(numel):
    """The last elements, fewer than four."""
    at = wide(numel) - numel % 4 + tl.arange(0, COLUMNS)
    return at, at < numel


@triton.jit
def _sum(
    plane, stack, own, at, inside, SHORT: tl.constexpr, COUNT: tl.constexpr, GROUPED: tl.constexpr
):  # fmt: skip
    """(sum, worst): the first number, and the others added to it (-0 stays -0); the largest bits of all.

    own: as in sums.Wires.
    """
    stride = wide(stack.stride)
    first = tl.where(own == 0, stack.world, 0)
    total = get(plane + first * stride, at, inside, SHORT, COUNT, GROUPED)
    worst = _largest(total, COUNT)
    for w in range(1, stack.world):
        more = get(plane + tl.where(w == own, stack.world, w) * stride, at, inside, SHORT, COUNT, GROUPED)
        total = added(total, more)
        worst = tl.maximum(worst, _largest(more, COUNT))
    return total, worst


@triton.jit
def _largest(floats, COUNT: tl.constexpr):
    worst = size_bits(floats[0])
    for i in tl.static_range(1, COUNT):
        worst = tl.maximum(worst, size_bits(floats[i]))
    return worst


@triton.jit
def get(plane, at, inside, SHORT: tl.constexpr, COUNT: tl.constexpr, GROUPED: tl.constexpr):
    """Numbers of a wire; byte by byte where it may lie odd."""
    if GROUPED:
        return load_floats(plane.to(tl.pointer_type(SHORT)), at, inside, COUNT, True)
    else:
        SIZE: tl.constexpr = SHORT.primitive_bitwidth // 8
        floats = ()
        for i in tl.static_range(COUNT):
            word = load_bytes(plane, at + i, inside, False, SIZE)
            if SIZE == 4:
                floats = floats + (float_of(word),)
            else:
                floats = floats + (word.to(tl.int16).to(SHORT, bitcast=True).to(tl.float32),)
        return floats


@triton.jit
def put(plane, floats, at, inside, SHORT: tl.constexpr, COUNT: tl.constexpr, GROUPED: tl.constexpr):
    """Numbers to a wire, with one NaN whatever the hardware makes of its payload."""
    SIZE: tl.constexpr = SHORT.primitive_bitwidth // 8
    NAN: tl.constexpr = 0x7FC00000 if SIZE == 4 else (0x7FC0 if tl.bfloat16 == SHORT else 0x7E00)
    words = ()
    for i in tl.static_range(COUNT):
        words = words + (tl.where(floats[i] != floats[i], NAN, narrowed(floats[i], SHORT)),)
    if GROUPED and COUNT == 4 and SIZE == 4:
        store_words(plane + at * 4, words, inside, 16)
    elif GROUPED and COUNT == 4:
        store_words(plane + at * 2, (words[0] | (words[1] << 16), words[2] | (words[3] << 16)), inside, 8)
    else:
        for i in tl.static_range(COUNT):
            store_bytes(plane, at + i, words[i], inside, False, SIZE)


@triton.jit
def encode_picked(x, index, copy, wire, rows, a, b, SHORT: tl.constexpr, RAW: tl.constexpr, COPIED: tl.constexpr):
    """Row r of wire = x at index_r, all rows but `skip`; x becomes 0 there, and if COPIED copy_r is x, in all rows."""
    row = tl.program_id(1)
    if row <= rows.short:
        frame = picked(a, b, row == rows.short)
        i = tl.program_id(0).to(tl.int64) * PICKED + tl.arange(0, PICKED)
        inside = i < frame.numel
        start = row * wide(rows.each)
        at = tl.load(index + start + i, mask=inside, other=0)
        number = tl.load(x + at, mask=inside)
        if COPIED:
            tl.store(copy + start + i, number, mask=inside)
        tl.store(x + at, tl.zeros((PICKED,), tl.float32).to(x.dtype.element_ty), mask=inside)
        if row != rows.skip:
            target = wire + row * wide(rows.stride)
            if tl.program_id(0) == 0:
                write_frame(target, frame, (0, 0))
            if RAW:
                tl.store((target + frame.plane0).to(tl.pointer_type(SHORT)) + i, number, mask=inside)
            else:
                put(target + frame.plane0, (number.to(tl.float32),), i, inside, SHORT, 1, False)


@triton.jit(do_not_specialize=("call",))
def decode_picked(wire, out, index, bad, call, rows, scale, a, b, SHORT: tl.constexpr, COUNT: tl.constexpr):
    """out at index_r = scale * sum of the wires of row r; COUNT as in decode_plain."""
    row = tl.program_id(1)
    if row <= rows.short:
        frame = picked(a, b, row == rows.short)
        i = tl.program_id(0).to(tl.int64) * PICKED + tl.arange(0, PICKED)
        inside = i < frame.numel
        total, worst = _sum(wire + row * wide(rows.stride) + frame.plane0, rows, -1, i, inside, SHORT, 1, False)
        at = tl.load(index + row * wide(rows.each) + i, mask=inside, other=0)
        store_floats(out, times(total, scale), at, inside, 1, False)
        if COUNT:
            note(bad, call, worst[None, :])
