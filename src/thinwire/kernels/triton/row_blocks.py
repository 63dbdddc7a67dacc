"""The kernels of messages in rows (schema.Rows), of wires with blocks: every wire of a matrix in one launch.

Row r holds shard r of the tensor. Rows before `short` have the sections of layout a, row `short` those of b, and there
is nothing in rows after it. A second axis of programs counts the rows.
"""

import triton
import triton.language as tl

from thinwire.kernels import hashing
from thinwire.kernels.triton.decode_blocks import Sink, decode_blocks, finish, leave, note
from thinwire.kernels.triton.encode_blocks import Source, carried, encode_blocks, put_tile
from thinwire.kernels.triton.frame import CHANGING, KEY_WORD, Sections, sections, wide, write_frame
from thinwire.kernels.triton.memory import load_words, store_words
from thinwire.kernels.triton.numbers import INF_BITS
from thinwire.kernels.triton.sums import Wires, begin_sum, sum_any, usual_sum, wires_from
from thinwire.kernels.triton.tiles import ALONE, CHANGE, OWED, anywhere, load, load_bytes, position, store, times

ROTATION = tl.constexpr(hashing.ROTATION)
DITHER = tl.constexpr(hashing.DITHER)
SHARD = tl.constexpr(hashing.SHARD)
COPIED = tl.constexpr(1024)  # numbers at once
SCANNED = tl.constexpr(4096)  # scales that a program looks at
_SECTIONS = (
    *("full", "length", "span", "numel_low", "numel_high", "scales_at", "scales_end", "minima_at", "minima_end"),
    *("plane0", "plane1", "plane2", "codes_end", "nbytes", "blocks", "numel"),
)
ROW_CHANGING = (
    *CHANGING,
    *(f"{layout}_{name}" for layout in "ab" for name in _SECTIONS),
    *(
        "each",
        "start",
        "short",
        "skip",
        "own",
        "call",
        "by_row",
        "first_row",
        "step_low",
        "step_high",
        "seed_low",
        "seed_high",
    ),
)


@triton.jit
def _picked(a, b, second):
    """The numbers of b where `second`, else those of a."""
    found = ()
    for i in tl.static_range(len(a)):
        found = found + (tl.where(second, b[i], a[i]),)
    return found


@triton.jit(do_not_specialize=ROW_CHANGING)
def encode_rows(
    x, memory, left, wire, cells, each, stride, skip, short, factor,
    head0, head1, head2, step_low, step_high, seed_low, seed_high, by_row, first_row,
    a_full, a_length, a_span, a_numel_low, a_numel_high, a_scales_at, a_scales_end, a_minima_at, a_minima_end,
    a_plane0, a_plane1, a_plane2, a_codes_end, a_nbytes, a_tail_root,
    b_full, b_length, b_span, b_numel_low, b_numel_high, b_scales_at, b_scales_end, b_minima_at, b_minima_end,
    b_plane0, b_plane1, b_plane2, b_codes_end, b_nbytes, b_tail_root,
    root,
    T: tl.constexpr, TAIL: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Write the wires of all rows but `skip`; what is encoded and what is left says MODE (tiles.py).

    The key of a row is that of its number times `by_row` and `first_row` under the step and the seed, both mixed.
    """
    row = tl.program_id(1)
    if (row <= short) & (row != skip):
        a = (a_full, a_length, a_span, a_numel_low, a_numel_high, a_scales_at, a_scales_end, a_minima_at,
             a_minima_end, a_plane0, a_plane1, a_plane2, a_codes_end, a_nbytes, a_tail_root)  # fmt: skip
        b = (b_full, b_length, b_span, b_numel_low, b_numel_high, b_scales_at, b_scales_end, b_minima_at,
             b_minima_end, b_plane0, b_plane1, b_plane2, b_codes_end, b_nbytes, b_tail_root)  # fmt: skip
        f = _picked(a, b, row == short)
        step = (step_low, step_high)
        rotation, dither = _row_keys(row * by_row + first_row, step, (seed_low, seed_high), T.rotated, T.stochastic)
        target = wire + row * wide(stride)
        if tl.program_id(0) == 0:
            header = (head0, head1, head2, 0, rotation[0], rotation[1], f[3], f[4])
            write_frame(target, header, (f[6], f[7], f[8], f[9], f[12], f[13]))
        start = row * wide(each)
        source = Source(x + start, memory + start, left + start, factor)
        offsets = Sections(f[5], f[7], (f[9], f[10], f[11]))
        encode_blocks(
            source, target, cells, (rotation, dither), (root, f[14]), offsets, f[0], f[1], f[2], T, TAIL, MODE
        )


@triton.jit
def _row_keys(row, step, seed, ROTATED: tl.constexpr, STOCHASTIC: tl.constexpr):
    """The keys of rotation and dither of a row (hashing.row_step), each as two halves; zeros where not needed."""
    rotation = (0, 0)
    dither = (0, 0)
    if ROTATED or STOCHASTIC:
        mixed = _mix(_mix(_joined(step[0], step[1]) ^ row.to(tl.uint64)) ^ SHARD)
        base = _mix(_joined(seed[0], seed[1]) ^ mixed)
        if ROTATED:
            rotation = _halves(_mix(base ^ ROTATION))
        if STOCHASTIC:
            dither = _halves(_mix(base ^ DITHER))
    return rotation, dither


@triton.jit
def _mix(z):
    """hashing's mix of 64 bits."""
    z = z + tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    z = (z ^ (z >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return z ^ (z >> 31)


@triton.jit
def _joined(low, high):
    return low.to(tl.uint32).to(tl.uint64) | (high.to(tl.uint32).to(tl.uint64) << 32)


@triton.jit
def _halves(key):
    return key.to(tl.uint32).to(tl.int32, bitcast=True), (key >> 32).to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit
def _key_in(wire):
    """The key in a wire's header, as two halves."""
    i = tl.arange(0, 8)
    words = load_bytes(wire, i, i >= 0, False, 4)
    low = tl.sum(tl.where(i == KEY_WORD, words, 0), axis=0)
    return low, tl.sum(tl.where(i == KEY_WORD + 1, words, 0), axis=0)


@triton.jit(do_not_specialize=ROW_CHANGING)
def decode_rows(
    wire, out, source, left, memory, mean, bad, levels, each, stride, skip, short, own, call, world, factor,
    a_full, a_length, a_span, a_scales_at, a_minima_at, a_plane0, a_plane1, a_plane2, a_tail_norm, a_numel,
    b_full, b_length, b_span, b_scales_at, b_minima_at, b_plane0, b_plane1, b_plane2, b_tail_norm, b_numel,
    norm,
    T: tl.constexpr, TAIL: tl.constexpr, WORLD: tl.constexpr, CALM: tl.constexpr, MODE: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """out = every row's wire decoded, row `skip` copied from `source`; with `world` > 1 there is one row, their sum.

    `left` is remembered as MODE says, unless a wire of this call was found not to be finite. Keys are in the headers.
    """
    row = tl.program_id(1)
    if (row <= short) & (row != skip):
        a = (a_full, a_length, a_span, a_scales_at, a_minima_at, a_plane0, a_plane1, a_plane2, a_tail_norm)
        b = (b_full, b_length, b_span, b_scales_at, b_minima_at, b_plane0, b_plane1, b_plane2, b_tail_norm)
        f = _picked(a, b, row == short)
        first = wire + row * wide(stride)
        keys = (0, 0)
        if T.rotated:
            keys = _key_in(first)
        fine = True
        if MODE != ALONE:
            fine = tl.load(bad) != call
        start = row * wide(each)
        share = tl.where(row == own, 1.0, factor)
        sink = Sink(out + start, left + start, memory + start, mean + start, share, row == own, fine, bad, call)
        wires = Wires(f[3], f[4], (f[5], f[6], f[7]), wide(stride), world, levels, -1)
        norms = (norm, f[8])
        decode_blocks(sink, first, wires, keys, norms, f[0], f[1], f[2], T, TAIL, WORLD, CALM, MODE, COUNT)

    if row == skip:
        start = row * wide(each)
        copy_row(source + start, out + start, tl.where(row == short, b_numel, a_numel))


@triton.jit
def copy_row(source, out, numel):
    """The programs' share of a row of numbers that does not travel."""
    SIZE: tl.constexpr = out.dtype.element_ty.primitive_bitwidth // 8
    each = tl.cdiv(wide(numel), tl.num_programs(0))
    begin = tl.program_id(0) * each
    end = tl.minimum(begin + each, numel)
    for at in range(begin, end, COPIED):
        i = at + tl.arange(0, COPIED)
        words = load_words(source.to(tl.pointer_type(tl.uint8)) + i * SIZE, i < end, SIZE)
        store_words(out.to(tl.pointer_type(tl.uint8)) + i * SIZE, words, i < end, SIZE)


@triton.jit(do_not_specialize=ROW_CHANGING)
def recode_own(
    wire, out, x, memory, left, levels, cells, start, stride, world, own, factor, scale,
    head0, head1, head2, key_low, key_high, numel_low, numel_high, dither_low, dither_high,
    full, length, span,
    scales_at, scales_end, minima_at, minima_end, plane0, plane1, plane2, codes_end, nbytes,
    root, tail_root, norm, tail_norm,
    T: tl.constexpr, TAIL: tl.constexpr, WORLD: tl.constexpr, CALM: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """out = encode(scale * (sum of the wires of others + x)), where x, the own share, did not travel and is exact.

    x from element `start` on stands for the own message, as MODE says; `left` is what the result will tell the rest of.
    """
    program = tl.program_id(0)
    keys = ((key_low, key_high), (dither_low, dither_high))
    if program == 0:
        header = (head0, head1, head2, 0, key_low, key_high, numel_low, numel_high)
        write_frame(out, header, (scales_end, minima_at, minima_end, plane0, codes_end, nbytes))
    offsets = Sections(scales_at, minima_at, (plane0, plane1, plane2))
    wires = Wires(scales_at, minima_at, (plane0, plane1, plane2), wide(stride), world, levels, own)
    begin = wide(start)
    source = Source(x + begin, memory + begin, left + begin, factor)
    if program < tl.cdiv(full, T.rows):
        first = program.to(tl.int64) * T.rows
        tile_at = position(first, full, T.block, T.span, T)
        there = wires_from(wire, wires, first, T)
        target = sections(out, offsets, first, T)
        _recode_own(there, source, target, cells, keys, root, norm, scale, tile_at, T, WORLD, CALM, MODE)
    elif TAIL:
        is_short = length > 0
        if is_short:
            first = wide(full)
            tail_at = position(first, full + 1, length, span, T.ragged)
            there = wires_from(wire, wires, first, T)
            target = sections(out, offsets, first, T)
            norms = (tail_root, tail_norm)
            _recode_own(there, source, target, cells, keys, *norms, scale, tail_at, T.ragged, WORLD, CALM, MODE)


@triton.jit
def _recode_own(
    wires, source, target, cells, keys, root, norm, scale, at,
    T: tl.constexpr, WORLD: tl.constexpr, CALM: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    start = at.first * T.block
    others = _sum_of_others(wires, keys[0], norm, at, T, WORLD, CALM)
    own = load(source.x + start, at, T)
    if MODE != ALONE:
        own = carried(own, load(source.memory + start, at, T), source.factor, MODE)
    total, left = _totals(others, own, scale, at, T, MODE)
    if T.loose and MODE != ALONE:
        tl.debug_barrier()  # `left` may be where x is
    read = put_tile(total, target, cells, keys, root, at, T, MODE == OWED)
    if MODE == OWED:
        left = ()
        for i in tl.static_range(T.size):
            left = left + (total[i] - read[i],)
    if MODE != ALONE:
        store(source.left + start, left, at, T)


@triton.jit
def _sum_of_others(wires, keys, norm, at, T: tl.constexpr, WORLD: tl.constexpr, CALM: tl.constexpr):
    """In two branches to the end: one behind them takes more registers (lloyd4 on sm_90: 96, not 80)."""
    if T.rare:
        others, post = sum_any(wires, at, T)
        others = leave(finish(others, keys, norm, at, T), post, T)
    else:
        begun, odd = begin_sum(wires, at, T, WORLD)
        trouble = anywhere(odd)
        if not CALM:
            trouble = trouble | 1
        if trouble == 0:
            others, unit = usual_sum(begun, wires.levels, T, WORLD)
            others = finish(times(others, unit), keys, norm, at, T)
        else:
            others, post = sum_any(wires, at, T)
            others = leave(finish(others, keys, norm, at, T), post, T)
    return others


@triton.jit
def _totals(others, own, scale, at, T: tl.constexpr, MODE: tl.constexpr):
    """(others + scale * own, and of CHANGE minus what others gave to it); zeros past the end of a short block."""
    total = ()
    left = ()
    for i in tl.static_range(T.size):
        if MODE == CHANGE:
            share = own[i] * scale
            both = others[i] + share
            left = left + (share - both,)
        else:
            both = tl.fma(own[i], scale, others[i])
            left = left + (both,)
        if T.loose:
            both = tl.where(i * at.span + at.column < at.length, both, 0.0)
        total = total + (both,)
    return total, left


@triton.jit(do_not_specialize=ROW_CHANGING)
def scan_rows(wire, bad, stride, short, call, a_blocks, b_blocks, a_scales_at):
    """Note the call in `bad` (decode_blocks.Sink) if a scale of any row is not finite."""
    row = tl.program_id(1)
    if row <= short:
        blocks = tl.where(row == short, b_blocks, a_blocks)
        block = tl.program_id(0) * SCANNED + tl.arange(0, SCANNED)[None, :]
        scales = wire + row * wide(stride) + a_scales_at
        bits = load_bytes(scales, wide(0) + block, block < blocks, True, 2) & 0x7FFF
        note(bad, call, tl.where(bits << 16 >= INF_BITS, bits << 16, 0))
