"""The kernels of messages in rows (schema.Rows), of wires with blocks: every wire of a matrix in one launch.

Row r holds shard r of the tensor. Rows before `short` have frame a, row `short` has frame b, and there is nothing in
rows after it. A second axis of programs counts the rows.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from thinwire.kernels import hashing
from thinwire.kernels.triton.decode_blocks import Sink, decode_blocks, finish, leave, note
from thinwire.kernels.triton.encode_blocks import Source, carried, encode_blocks, put_tile
from thinwire.kernels.triton.frame import Frame, Keys, Norms, key_in, on_blocks, sections, write_frame
from thinwire.kernels.triton.memory import load_bytes, load_words, store_words, wide
from thinwire.kernels.triton.numbers import INF_BITS
from thinwire.kernels.triton.sums import summed, wires_from
from thinwire.kernels.triton.tiles import (
    ALONE,
    CHANGE,
    OWED,
    added,
    fused,
    load,
    minus,
    position,
    store,
    times,
)

ROTATION = tl.constexpr(hashing.ROTATION)
DITHER = tl.constexpr(hashing.DITHER)
SHARD = tl.constexpr(hashing.SHARD)
COPIED = tl.constexpr(1024)  # numbers copied at once
SCANNED = tl.constexpr(4096)  # scales that a program checks


class Matrix(NamedTuple):
    """The rows of a message: an argument of kernels."""

    each: Any  # elements of a row
    stride: Any  # as in Stack
    world: Any  # as in Stack; if it is more than 1, there is one row
    short: Any  # the last row that holds anything
    skip: Any  # the row that does not travel, or -1


class Seeds(NamedTuple):
    """Row r has the key of row r * by_row + first, under the step and the seed, both mixed."""

    seed: Any  # two halves
    by_row: Any
    first: Any


class Share(NamedTuple):
    """The factor of `left` in the memory, in all rows but the own one (-1: there is none)."""

    own: Any
    factor: Any


class Part(NamedTuple):
    """The own part of a sum, which did not travel and is added exactly."""

    start: Any  # its first element
    own: Any  # the wire that it replaces: see sums.Wires
    factor: Any  # of the memory
    scale: Any  # of the sum


@triton.jit
def picked(a, b, second):
    """Frame b where `second`, else a."""
    found = ()
    for i in tl.static_range(len(a)):
        found = found + (tl.where(second, b[i], a[i]),)
    return Frame(*found)


@triton.jit
def encode_rows(x, memory, left, wire, cells, step, factor, rows, seeds, a, b, T: tl.constexpr):
    """Row r of wire = encode(x_r + factor * memory_r), all rows but `skip`; T.mode says what is left (tiles.py)."""
    row = tl.program_id(1)
    if (row <= rows.short) & (row != rows.skip):
        frame = picked(a, b, row == rows.short)
        keys = _row_keys(row * seeds.by_row + seeds.first, step, seeds.seed, T.rotated, T.stochastic)
        target = wire + row * wide(rows.stride)
        if tl.program_id(0) == 0:
            write_frame(target, frame, keys.rotation)
        start = row * wide(rows.each)
        source = Source(x + start, memory + start, left + start, factor)
        on_blocks(encode_blocks, (source, target, cells, keys), frame, T)


@triton.jit
def _row_keys(row, step, seed, ROTATED: tl.constexpr, STOCHASTIC: tl.constexpr):
    """The keys of rotation and dither of a row (hashing.row_step), each as two halves; zeros where not needed."""
    rotation = (0, 0)
    dither = (0, 0)
    if ROTATED or STOCHASTIC:
        mixed = _mix(_mix(_joined(step) ^ row.to(tl.uint64)) ^ SHARD)
        base = _mix(_joined(seed) ^ mixed)
        if ROTATED:
            rotation = _halves(_mix(base ^ ROTATION))
        if STOCHASTIC:
            dither = _halves(_mix(base ^ DITHER))
    return Keys(rotation, dither)


@triton.jit
def _mix(z):
    """hashing's mix of 64 bits."""
    z = z + tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    z = (z ^ (z >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return z ^ (z >> 31)


@triton.jit
def _joined(halves):
    low, high = halves
    return low.to(tl.uint32).to(tl.uint64) | (high.to(tl.uint32).to(tl.uint64) << 32)


@triton.jit
def _halves(key):
    return key.to(tl.uint32).to(tl.int32, bitcast=True), (key >> 32).to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit(do_not_specialize=("call",))
def decode_rows(wire, out, source, left, memory, mean, bad, levels, call, rows, share, norms, a, b, T: tl.constexpr):
    """out = scale * every row's wire decoded, row `skip` copied from `source`; with `world` > 1 the sum of the wires.

    `left` is remembered as T.mode says, unless a wire of this call was found not to be finite. Keys are in the headers.
    """
    row = tl.program_id(1)
    start = row * wide(rows.each)
    frame = picked(a, b, row == rows.short)
    if (row <= rows.short) & (row != rows.skip):
        first = wire + row * wide(rows.stride)
        rotation = (0, 0)
        if T.rotated:
            rotation = key_in(first)
        fine = True
        if T.mode != ALONE:
            fine = tl.load(bad) != call
        is_own = row == share.own
        factor = tl.where(is_own, 1.0, share.factor)
        sink = Sink(out + start, left + start, memory + start, mean + start, factor, is_own, fine, bad, call)
        norm = Norms(norms.full, tl.where(row == rows.short, norms.last_tail, norms.tail))
        on_blocks(decode_blocks, (sink, first, rows, levels, rotation, norm), frame, T)
    if row == rows.skip:
        copy_row(source + start, out + start, frame.numel)


class RowNorms(NamedTuple):
    """Norms of frames a and b, whose full blocks are alike."""

    full: Any
    tail: Any
    last_tail: Any


@triton.jit
def copy_row(source, out, numel):
    """Copy this program's share of a row that does not travel."""
    SIZE: tl.constexpr = out.dtype.element_ty.primitive_bitwidth // 8
    each = tl.cdiv(wide(numel), tl.num_programs(0))
    begin = tl.program_id(0) * each
    end = tl.minimum(begin + each, numel)
    for at in range(begin, end, COPIED):
        i = at + tl.arange(0, COPIED)
        words = load_words(source.to(tl.pointer_type(tl.uint8)) + i * SIZE, i < end, SIZE)
        store_words(out.to(tl.pointer_type(tl.uint8)) + i * SIZE, words, i < end, SIZE)


@triton.jit
def recode_own(wire, out, x, memory, left, levels, cells, keys, stack, part, norms, frame, T: tl.constexpr):
    """out = encode(scale * (sum of the wires of others + x)), where x, the own part, did not travel and is exact.

    With feedback x is x + factor * memory, and `left` is what the result does not carry, as T.mode says.
    """
    if tl.program_id(0) == 0:
        write_frame(out, frame, keys.rotation)
    begin = wide(part.start)
    source = Source(x + begin, memory + begin, left + begin, part.factor)
    on_blocks(_recode_own, (wire, out, source, levels, cells, keys, stack, part, norms), frame, T)


@triton.jit
def _recode_own(task, frame, blocks, T: tl.constexpr):
    wire, out, source, levels, cells, keys, stack, part, norms = task
    at = position(blocks, T)
    start = at.first * T.block
    wires = wires_from(wire, stack, frame, levels, part.own, at.first, T)
    target = sections(out, frame, at.first, T)
    others, post, unusual = summed(wires, at, T)
    others = finish(others, keys.rotation, norms.tail if T.loose else norms.full, at, T)
    if unusual:
        others = leave(others, post, T)
    own = load(source.x + start, at, T)
    if T.mode != ALONE:
        own = carried(own, load(source.memory + start, at, T), source.factor, T.mode)
    total, left = _totals(others, own, part.scale, at, T)
    if T.loose and T.mode != ALONE:
        tl.debug_barrier()  # `left` may be where x is
    one = tl.full((T.rows, T.columns), 1.0, tl.float32)
    root = frame.tail_root if T.loose else frame.root
    read = put_tile(total, one, target, cells, keys, root, at, T, T.mode == OWED, False)
    if T.mode == OWED:
        left = minus(total, read)
    if T.mode != ALONE:
        store(source.left + start, left, at, T)


@triton.jit
def _totals(others, own, scale, at, T: tl.constexpr):
    """(total, left): others + scale * own, zeros past the end of a short block; in mode CHANGE, scale * own - total."""
    if T.mode == CHANGE:
        share = times(own, scale)
        total = added(others, share)
        left = minus(share, total)
    else:
        total = fused(own, scale, others)
        left = total
    if T.loose:
        total = [tl.where(i * at.span + at.column < at.length, total[i], 0.0) for i in T.each]
    return total, left


@triton.jit(do_not_specialize=("call",))
def scan_rows(wire, bad, call, rows, a, b):
    """Note the call in `bad` (decode_blocks.Sink) if a scale of any row is not finite."""
    row = tl.program_id(1)
    if row <= rows.short:
        frame = picked(a, b, row == rows.short)
        block = tl.program_id(0) * SCANNED + tl.arange(0, SCANNED)[None, :]
        scales = wire + row * wide(rows.stride) + frame.scales_at
        inside = block < (frame.scales_end - frame.scales_at) // 2
        bits = load_bytes(scales, wide(0) + block, inside, True, 2) & 0x7FFF
        note(bad, call, tl.where(bits << 16 >= INF_BITS, bits << 16, 0))
