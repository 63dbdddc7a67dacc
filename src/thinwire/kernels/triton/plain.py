"""The kernels of wires without blocks: the numbers themselves, unchanged or as bfloat16.

A program takes GROUPS times COLUMNS groups of four numbers; the first program also takes the last one to three, if any.
Rows are those of row_blocks.py; a single wire is a message of one row.
"""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from thinwire.kernels.triton.decode_blocks import note
from thinwire.kernels.triton.frame import check_headers, write_frame
from thinwire.kernels.triton.memory import (
    load_floats,
    load_words,
    narrowed,
    store_bytes,
    store_floats,
    store_words,
    wide,
)
from thinwire.kernels.triton.numbers import INF_BITS, size_bits
from thinwire.kernels.triton.row_blocks import copy_row, picked
from thinwire.kernels.triton.tiles import added, fused, times

COLUMNS = tl.constexpr(256)
GROUPS = tl.constexpr(4)
PICKED = tl.constexpr(4096)  # scattered numbers (rows.Picked) per program


@dataclass(frozen=True)
class Plain:
    """What a kernel is compiled for."""

    kind: Any  # of a wire's numbers: tl.float32, tl.bfloat16 or tl.float16
    grouped: bool = False  # True => four neighbors are read and written at once
    raw: bool = False  # encode: True => the numbers are of this kind already, and their bytes are copied
    residual: bool = False  # encode: True => there is one
    copied: bool = False  # encode_picked: True => what is taken is also copied
    notes: bool = False  # decode: True => as in Tile
    own: bool = False  # recode: True => the own part did not travel
    check: bool = False  # decode, recode: True => where a header does not fit, the sum is NaN

    @property
    def size(self) -> int:
        """Bytes of a number."""
        return int(self.kind.primitive_bitwidth) // 8


@triton.jit
def encode_plain(x, residual, wire, rows, a, b, P: tl.constexpr):
    """Row r of wire = x_r + residual_r, all rows but `skip`. With a residual there is one row."""
    row = tl.program_id(1)
    if (row <= rows.short) & (row != rows.skip):
        frame = picked(a, b, row == rows.short)
        target = wire + row * wide(rows.stride)
        if tl.program_id(0) == 0:
            write_frame(target, frame, (0, 0))
        _in_fours(_encode, (x + row * wide(rows.each), residual, target + frame.plane0), frame.numel, P)


@triton.jit
def _in_fours(work: tl.constexpr, task, numel, P: tl.constexpr):
    """Call work(task, at, inside, P, COUNT) for COUNT neighbors from each of `at` on, where they are inside."""
    for group in tl.static_range(GROUPS):
        at = (tl.program_id(0).to(tl.int64) * GROUPS + group) * (COLUMNS * 4) + tl.arange(0, COLUMNS) * 4
        work(task, at, at + 4 <= numel, P, 4)
    if tl.program_id(0) == 0:
        rest = wide(numel) - numel % 4 + tl.arange(0, COLUMNS)
        work(task, rest, rest < numel, P, 1)


@triton.jit
def _encode(task, at, inside, P: tl.constexpr, COUNT: tl.constexpr):
    x, residual, plane = task
    if P.raw:
        source = x.to(tl.pointer_type(tl.uint8))
        if P.grouped and COUNT > 1:
            words = load_words(source + at * P.size, inside, COUNT * P.size)
            store_words(plane + at * P.size, words, inside, COUNT * P.size)
        else:
            for i in tl.static_range(COUNT * P.size):
                store_words(plane + at * P.size + i, load_words(source + at * P.size + i, inside, 1), inside, 1)
    else:
        total = load_floats(x, at, inside, COUNT, P.grouped)
        if P.residual:
            carried = load_floats(residual, at, inside, COUNT, P.grouped)
            total = added(total, carried)
        put(plane, total, at, inside, P, COUNT)
        if P.residual:
            left = ()
            for i in tl.static_range(COUNT):
                value = total[i].to(P.kind).to(tl.float32)
                left = left + (tl.where(size_bits(value) < INF_BITS, total[i] - value, carried[i]),)
            store_floats(residual, left, at, inside, COUNT, P.grouped)


@triton.jit(do_not_specialize=("call",))
def decode_plain(wire, out, source, bad, call, rows, scale, a, b, P: tl.constexpr):
    """out_r = scale * sum of the wires of row r, in order in fp32; row `skip` is copied from `source`."""
    row = tl.program_id(1)
    frame = picked(a, b, row == rows.short)
    target = out + row * wide(rows.each)
    if P.check:
        _key, fine = check_headers(wire, rows, frame, (0, 0), False)
        scale = tl.where(fine, scale, float("nan"))
    if (row <= rows.short) & (row != rows.skip):
        plane = wire + row * wide(rows.stride) + frame.plane0
        _in_fours(_decode, (plane, target, rows, bad, call, scale), frame.numel, P)
    if row == rows.skip:
        copy_row(source + row * wide(rows.each), target, frame.numel)


@triton.jit
def _decode(task, at, inside, P: tl.constexpr, COUNT: tl.constexpr):
    plane, target, rows, bad, call, scale = task
    total, worst = _sum(plane, rows, -1, at, inside, P, COUNT)
    store_floats(target, times(total, scale), at, inside, COUNT, P.grouped)
    if P.notes:
        note(bad, call, worst[None, :])


@triton.jit
def recode_plain(wire, out, x, stack, part, frame, P: tl.constexpr):
    """out = scale * (sum of the wires, plus x if P.own: the own part, which is exact)."""
    scale = part.scale
    if P.check:
        _key, fine = check_headers(wire, stack, frame, (0, 0), False)
        scale = tl.where(fine, scale, float("nan"))
    if tl.program_id(0) == 0:
        write_frame(out, frame, (0, 0))
    task = (wire + frame.plane0, x + wide(part.start), out + frame.plane0, stack, part.own, scale)
    _in_fours(_recode, task, frame.numel, P)


@triton.jit
def _recode(task, at, inside, P: tl.constexpr, COUNT: tl.constexpr):
    plane, x, target, stack, own, scale = task
    if P.own:
        total, _worst = _sum(plane, stack, own, at, inside, P, COUNT)
        total = fused(load_floats(x, at, inside, COUNT, P.grouped), scale, times(total, scale))
    else:
        total, _worst = _sum(plane, stack, -1, at, inside, P, COUNT)
        total = times(total, scale)
    put(target, total, at, inside, P, COUNT)


@triton.jit
def _sum(plane, stack, own, at, inside, P: tl.constexpr, COUNT: tl.constexpr):
    """(sum, worst): the first number, and the others added to it (-0 stays -0); the largest bits of all.

    own: as in sums.Wires.
    """
    stride = wide(stack.stride)
    first = plane + tl.where(own == 0, stack.world, 0) * stride
    total = load_floats(first.to(tl.pointer_type(P.kind)), at, inside, COUNT, P.grouped, P.grouped)
    worst = _largest(total, COUNT)
    for w in range(1, stack.world):
        other = plane + tl.where(w == own, stack.world, w) * stride
        more = load_floats(other.to(tl.pointer_type(P.kind)), at, inside, COUNT, P.grouped, P.grouped)
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
def put(plane, floats, at, inside, P: tl.constexpr, COUNT: tl.constexpr):
    """Write numbers to a wire, with the same bits for every NaN, whatever payload the hardware gives it."""
    NAN: tl.constexpr = 0x7FC00000 if P.size == 4 else (0x7FC0 if tl.bfloat16 == P.kind else 0x7E00)
    words = ()
    for i in tl.static_range(COUNT):
        words = words + (tl.where(floats[i] != floats[i], NAN, narrowed(floats[i], P.kind)),)
    if P.grouped and COUNT == 4 and P.size == 4:
        store_words(plane + at * 4, words, inside, 16)
    elif P.grouped and COUNT == 4:
        store_words(plane + at * 2, (words[0] | (words[1] << 16), words[2] | (words[3] << 16)), inside, 8)
    else:
        for i in tl.static_range(COUNT):
            store_bytes(plane, at + i, words[i], inside, False, P.size)


@triton.jit
def encode_picked(x, index, copy, wire, rows, a, b, P: tl.constexpr):
    """Row r of wire = x at index_r, all rows but `skip`; x becomes 0 there. If P.copied, all rows go to `copy` too."""
    row = tl.program_id(1)
    if row <= rows.short:
        frame = picked(a, b, row == rows.short)
        i = tl.program_id(0).to(tl.int64) * PICKED + tl.arange(0, PICKED)
        inside = i < frame.numel
        start = row * wide(rows.each)
        at = tl.load(index + start + i, mask=inside, other=0)
        number = tl.load(x + at, mask=inside)
        if P.copied:
            tl.store(copy + start + i, number, mask=inside)
        tl.store(x + at, tl.zeros((PICKED,), tl.float32).to(x.dtype.element_ty), mask=inside)
        if row != rows.skip:
            target = wire + row * wide(rows.stride)
            if tl.program_id(0) == 0:
                write_frame(target, frame, (0, 0))
            if P.raw:
                tl.store((target + frame.plane0).to(tl.pointer_type(P.kind)) + i, number, mask=inside)
            else:
                put(target + frame.plane0, (number.to(tl.float32),), i, inside, P, 1)


@triton.jit(do_not_specialize=("call",))
def decode_picked(wire, out, index, bad, call, rows, scale, a, b, P: tl.constexpr):
    """out at index_r = scale * sum of the wires of row r."""
    row = tl.program_id(1)
    if row <= rows.short:
        frame = picked(a, b, row == rows.short)
        i = tl.program_id(0).to(tl.int64) * PICKED + tl.arange(0, PICKED)
        inside = i < frame.numel
        total, worst = _sum(wire + row * wide(rows.stride) + frame.plane0, rows, -1, i, inside, P, 1)
        at = tl.load(index + row * wide(rows.each) + i, mask=inside, other=0)
        store_floats(out, times(total, scale), at, inside, 1, False)
        if P.notes:
            note(bad, call, worst[None, :])
