"""The kernels of messages in rows (schema.Rows), of wires without blocks; rows as in row_blocks.py."""

import triton
import triton.language as tl

from thinwire.kernels.triton.decode_blocks import note
from thinwire.kernels.triton.frame import wide, write_frame
from thinwire.kernels.triton.memory import load_floats, store_floats
from thinwire.kernels.triton.plain import GROUPS, encode_group, left_over, place, put, sum_wires
from thinwire.kernels.triton.row_blocks import copy_row, picked
from thinwire.kernels.triton.tiles import times


@triton.jit
def encode_plain_rows(
    x, wire, rows, a, b, SHORT: tl.constexpr, GROUPED: tl.constexpr, RAW: tl.constexpr
):  # fmt: skip
    """Write the wires of all rows but `skip`: the numbers in the format SHORT; if RAW, their bytes."""
    row = tl.program_id(1)
    if (row <= rows.short) & (row != rows.skip):
        frame = picked(a, b, row == rows.short)
        target = wire + row * wide(rows.stride)
        source = x + row * wide(rows.each)
        if tl.program_id(0) == 0:
            write_frame(target, frame, (0, 0))
        plane = target + frame.plane0
        for group in tl.static_range(GROUPS):
            at, inside = place(tl.program_id(0), group, frame.numel)
            encode_group(source, source, plane, at, inside, SHORT, 4, GROUPED, False, RAW)
        if tl.program_id(0) == 0:
            rest, some = left_over(frame.numel)
            encode_group(source, source, plane, rest, some, SHORT, 1, GROUPED, False, RAW)


@triton.jit(do_not_specialize=("call",))
def decode_plain_rows(
    wire, out, source, bad, call, rows, scale, a, b,
    SHORT: tl.constexpr, GROUPED: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """out = scale * every row's wire decoded, row `skip` copied from `source`; see decode_rows."""
    row = tl.program_id(1)
    frame = picked(a, b, row == rows.short)
    target = out + row * wide(rows.each)
    if (row <= rows.short) & (row != rows.skip):
        plane = wire + row * wide(rows.stride) + frame.plane0
        for group in tl.static_range(GROUPS):
            at, inside = place(tl.program_id(0), group, frame.numel)
            total, worst = sum_wires(plane, rows, -1, at, inside, SHORT, 4, GROUPED)
            store_floats(target, times(total, scale), at, inside, 4, GROUPED)
            if COUNT:
                note(bad, call, worst[None, :])
        if tl.program_id(0) == 0:
            rest, some = left_over(frame.numel)
            last, worst_last = sum_wires(plane, rows, -1, rest, some, SHORT, 1, GROUPED)
            store_floats(target, times(last, scale), rest, some, 1, False)
            if COUNT:
                note(bad, call, worst_last[None, :])
    if row == rows.skip:
        copy_row(source + row * wide(rows.each), target, frame.numel)


@triton.jit
def recode_plain_own(wire, out, x, stack, part, frame, SHORT: tl.constexpr, GROUPED: tl.constexpr):
    """out = scale * (sum of the wires of others + x), where x, the own share, did not travel and is exact."""
    program = tl.program_id(0)
    if program == 0:
        write_frame(out, frame, (0, 0))
    x += wide(part.start)
    plane = wire + frame.plane0
    target = out + frame.plane0
    for group in tl.static_range(GROUPS):
        at, inside = place(program, group, frame.numel)
        _recode(plane, x, target, stack, part, at, inside, SHORT, 4, GROUPED)
    if program == tl.num_programs(0) - 1:
        rest, some = left_over(frame.numel)
        _recode(plane, x, target, stack, part, rest, some, SHORT, 1, GROUPED)


@triton.jit
def _recode(
    plane, x, target, stack, part, at, inside, SHORT: tl.constexpr, COUNT: tl.constexpr, GROUPED: tl.constexpr
):  # fmt: skip
    total, _worst = sum_wires(plane, stack, part.own, at, inside, SHORT, COUNT, GROUPED)
    others = times(total, part.scale)
    share = load_floats(x, at, inside, COUNT, GROUPED)
    both = ()
    for i in tl.static_range(COUNT):
        both = both + (tl.fma(share[i], part.scale, others[i]),)
    put(target, both, at, inside, SHORT, COUNT, GROUPED)
