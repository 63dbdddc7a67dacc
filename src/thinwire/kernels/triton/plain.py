"""The kernels of wires without blocks: the numbers themselves, unchanged or as bfloat16.

A program takes GROUPS times COLUMNS groups of four numbers; the last one also the up to three that are left over.
"""

import triton
import triton.language as tl

from thinwire.kernels.triton.frame import CHANGING, check_headers, wide, write_frame
from thinwire.kernels.triton.memory import load_floats, load_words, narrowed, store_floats, store_words
from thinwire.kernels.triton.numbers import INF_BITS, float_of, size_bits
from thinwire.kernels.triton.tiles import added, load_bytes, store_bytes, times

COLUMNS = tl.constexpr(256)
GROUPS = tl.constexpr(4)


@triton.jit(do_not_specialize=CHANGING)
def encode_raw(
    x, wire, head0, head1, head2, numel_low, numel_high, nbytes_raw, plane0, codes_end, nbytes, WHOLE: tl.constexpr
):
    """wire = the bytes of x."""
    program = tl.program_id(0)
    if program == 0:
        write_frame(wire, (head0, head1, head2, 0, 0, 0, numel_low, numel_high), (codes_end, nbytes))
    SIZE: tl.constexpr = 16 if WHOLE else 1
    source = x.to(tl.pointer_type(tl.uint8))
    column = tl.arange(0, COLUMNS)
    start = program.to(tl.int64) * (COLUMNS * GROUPS * SIZE)
    for group in tl.static_range(GROUPS):
        at = start + (group * COLUMNS + column) * SIZE
        inside = at + SIZE <= nbytes_raw
        store_words(wire + plane0 + at, load_words(source + at, inside, SIZE), inside, SIZE)
    if WHOLE and program == tl.num_programs(0) - 1:
        rest = wide(nbytes_raw) - nbytes_raw % 16 + column
        store_words(wire + plane0 + rest, load_words(source + rest, rest < nbytes_raw, 1), rest < nbytes_raw, 1)


@triton.jit(do_not_specialize=CHANGING)
def encode_plain(
    x, residual, wire,
    head0, head1, head2, numel_low, numel_high,
    numel, plane0, codes_end, nbytes,
    SHORT: tl.constexpr, GROUPED: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """wire = x + residual in the format SHORT (float32, bfloat16, float16)."""
    program = tl.program_id(0)
    if program == 0:
        write_frame(wire, (head0, head1, head2, 0, 0, 0, numel_low, numel_high), (codes_end, nbytes))
    for group in tl.static_range(GROUPS):
        at, inside = place(program, group, numel)
        _encode_group(x, residual, wire + plane0, at, inside, SHORT, 4, GROUPED, RESIDUAL)
    if program == tl.num_programs(0) - 1:
        rest, some = left_over(numel)
        _encode_group(x, residual, wire + plane0, rest, some, SHORT, 1, GROUPED, RESIDUAL)


@triton.jit
def _encode_group(
    x, residual, plane, at, inside,
    SHORT: tl.constexpr, COUNT: tl.constexpr, GROUPED: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
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


@triton.jit(do_not_specialize=CHANGING)
def decode_plain(
    wire, out, stride, world,
    head0, head1, head2, numel_low, numel_high,
    numel, plane0, scale,
    SHORT: tl.constexpr, GROUPED: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """out = scale * sum over ranks, in rank order in fp32."""
    program = tl.program_id(0)
    stride = wide(stride)
    if CHECK:
        header = (head0, head1, head2, 0, 0, 0, numel_low, numel_high)
        _low, _high, fine = check_headers(wire, stride, world, header, False)
        scale = tl.where(fine, scale, float("nan"))
    for group in tl.static_range(GROUPS):
        at, inside = place(program, group, numel)
        total = _sum(wire + plane0, stride, world, scale, at, inside, SHORT, 4, GROUPED)
        store_floats(out, total, at, inside, 4, GROUPED)
    if program == tl.num_programs(0) - 1:
        rest, some = left_over(numel)
        last = _sum(wire + plane0, stride, world, scale, rest, some, SHORT, 1, GROUPED)
        store_floats(out, last, rest, some, 1, False)


@triton.jit(do_not_specialize=CHANGING)
def recode_plain(
    wire, out, stride, world,
    head0, head1, head2, numel_low, numel_high,
    numel, plane0, codes_end, nbytes, scale,
    SHORT: tl.constexpr, GROUPED: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """out = scale * sum over ranks, in the format of the wires."""
    stride = wide(stride)
    header = (head0, head1, head2, 0, 0, 0, numel_low, numel_high)
    program = tl.program_id(0)
    if CHECK:
        _low, _high, fine = check_headers(wire, stride, world, header, False)
        scale = tl.where(fine, scale, float("nan"))
    if program == 0:
        write_frame(out, header, (codes_end, nbytes))
    for group in tl.static_range(GROUPS):
        at, inside = place(program, group, numel)
        total = _sum(wire + plane0, stride, world, scale, at, inside, SHORT, 4, GROUPED)
        put(out + plane0, total, at, inside, SHORT, 4, GROUPED)
    if program == tl.num_programs(0) - 1:
        rest, some = left_over(numel)
        last = _sum(wire + plane0, stride, world, scale, rest, some, SHORT, 1, GROUPED)
        put(out + plane0, last, rest, some, SHORT, 1, GROUPED)


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
def _sum(
    plane, stride, world, scale, at, inside, SHORT: tl.constexpr, COUNT: tl.constexpr, GROUPED: tl.constexpr
):  # fmt: skip
    """The first number, and the others added to it (-0 stays -0), times `scale`."""
    total = get(plane, at, inside, SHORT, COUNT, GROUPED)
    for w in range(1, world):
        total = added(total, get(plane + w * stride, at, inside, SHORT, COUNT, GROUPED))
    return times(total, scale)


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
