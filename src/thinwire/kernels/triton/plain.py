"""The kernels of wires without blocks: the numbers themselves, unchanged or as bfloat16.

A program takes GROUPS times COLUMNS groups of four numbers; the last one also the up to three that are left over.
"""

import triton
import triton.language as tl

from thinwire.kernels.triton.frame import check_headers, wide, write_frame
from thinwire.kernels.triton.memory import load_floats, load_words, narrowed, store_floats, store_words
from thinwire.kernels.triton.numbers import INF_BITS, float_of, size_bits
from thinwire.kernels.triton.tiles import added, load_bytes, store_bytes, times

COLUMNS = tl.constexpr(256)
GROUPS = tl.constexpr(4)


@triton.jit
def encode_plain(
    x, residual, wire, frame,
    SHORT: tl.constexpr, GROUPED: tl.constexpr, RESIDUAL: tl.constexpr, RAW: tl.constexpr,
):  # fmt: skip
    """wire = x + residual in the format SHORT (float32, bfloat16, float16); if RAW, the bytes of x."""
    program = tl.program_id(0)
    if program == 0:
        write_frame(wire, frame, (0, 0))
    plane = wire + frame.plane0
    for group in tl.static_range(GROUPS):
        at, inside = place(program, group, frame.numel)
        encode_group(x, residual, plane, at, inside, SHORT, 4, GROUPED, RESIDUAL, RAW)
    if program == tl.num_programs(0) - 1:
        rest, some = left_over(frame.numel)
        encode_group(x, residual, plane, rest, some, SHORT, 1, GROUPED, RESIDUAL, RAW)


@triton.jit
def encode_group(
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


@triton.jit
def decode_plain(
    wire, out, stack, scale, frame, SHORT: tl.constexpr, GROUPED: tl.constexpr, CHECK: tl.constexpr
):  # fmt: skip
    """out = scale * sum over ranks, in rank order in fp32. CHECK: where headers do not fit the sum is NaN."""
    program = tl.program_id(0)
    if CHECK:
        _key, fine = check_headers(wire, stack, frame, (0, 0), False)
        scale = tl.where(fine, scale, float("nan"))
    plane = wire + frame.plane0
    for group in tl.static_range(GROUPS):
        at, inside = place(program, group, frame.numel)
        total, _worst = sum_wires(plane, stack, -1, at, inside, SHORT, 4, GROUPED)
        store_floats(out, times(total, scale), at, inside, 4, GROUPED)
    if program == tl.num_programs(0) - 1:
        rest, some = left_over(frame.numel)
        last, _worst = sum_wires(plane, stack, -1, rest, some, SHORT, 1, GROUPED)
        store_floats(out, times(last, scale), rest, some, 1, False)


@triton.jit
def recode_plain(
    wire, out, stack, scale, frame, SHORT: tl.constexpr, GROUPED: tl.constexpr, CHECK: tl.constexpr
):  # fmt: skip
    """out = scale * sum over ranks, in the format of the wires. CHECK: as in decode_plain."""
    program = tl.program_id(0)
    if CHECK:
        _key, fine = check_headers(wire, stack, frame, (0, 0), False)
        scale = tl.where(fine, scale, float("nan"))
    if program == 0:
        write_frame(out, frame, (0, 0))
    plane = wire + frame.plane0
    for group in tl.static_range(GROUPS):
        at, inside = place(program, group, frame.numel)
        total, _worst = sum_wires(plane, stack, -1, at, inside, SHORT, 4, GROUPED)
        put(out + frame.plane0, times(total, scale), at, inside, SHORT, 4, GROUPED)
    if program == tl.num_programs(0) - 1:
        rest, some = left_over(frame.numel)
        last, _worst = sum_wires(plane, stack, -1, rest, some, SHORT, 1, GROUPED)
        put(out + frame.plane0, times(last, scale), rest, some, SHORT, 1, GROUPED)


@triton.jit
def place(program, group: tl.constexpr, numel):
    """First elements of the groups of four, and which are whole."""
    at = (program.to(tl.int64) * GROUPS + group) * (COLUMNS * 4) + tl.arange(0, COLUMNS) * 4
    return at, at + 4 <= numel


@triton.jit
def left_over(numel):
    """The last elements, fewer than four."""
    at = wide(numel) - numel % 4 + tl.arange(0, COLUMNS)
    return at, at < numel


@triton.jit
def sum_wires(
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
