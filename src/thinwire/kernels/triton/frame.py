"""What surrounds the codes of a wire: its header, where its sections start, and the gaps between them.

Offsets inside a tile are 32-bit numbers; where a tile starts is a 64-bit one.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from thinwire import wire as wire_format
from thinwire.kernels.triton.memory import load_bytes, store_words, wide
from thinwire.kernels.triton.tiles import Blocks

KEY_WORD = tl.constexpr(wire_format.KEY_AT // 4)  # the header's word with the key's lower half; the upper one follows


class Frame(NamedTuple):
    """The layout of a wire: an argument of kernels. Offsets are in bytes."""

    head0: Any  # words of the header
    head1: Any
    head2: Any
    numel_low: Any
    numel_high: Any
    numel: Any
    full: Any  # how many full blocks
    length: Any  # elements of a short last block, 0 if there is none
    span: Any  # codes per lane of that block
    scales_at: Any
    scales_end: Any
    minima_at: Any
    minima_end: Any
    plane0: Any
    plane1: Any
    plane2: Any
    codes_end: Any
    nbytes: Any
    root: Any  # 1 / sqrt(codes) of a full block
    tail_root: Any  # 1 / sqrt(codes) of a short last block


class Keys(NamedTuple):
    """The keys of a wire: an argument of kernels. Each is a pair of 32-bit halves, the lower one first."""

    rotation: Any
    dither: Any


class Stack(NamedTuple):
    """Wires of one layout that are added: an argument of kernels."""

    stride: Any  # bytes from one to the next
    world: Any  # how many


class Norms(NamedTuple):
    """What decoded sums are multiplied by, an argument of kernels: a scale, over sqrt(codes) if rotated."""

    full: Any
    tail: Any  # of a short last block


class Sections(NamedTuple):
    """Where a tile's part of every section of a wire starts."""

    scales: Any
    minima: Any
    planes: Any


@triton.jit
def sections(wire, frame, first, T: tl.constexpr):
    """Where the scales, minima and codes of block `first` start."""
    offsets = (frame.plane0, frame.plane1, frame.plane2)
    planes = ()
    for p in tl.static_range(len(T.planes)):
        planes = planes + (wire + offsets[p] + first * (T.block * T.planes[p] // 8),)
    return Sections(wire + frame.scales_at + 2 * first, wire + frame.minima_at + 2 * first, planes)


@triton.jit
def on_blocks(work: tl.constexpr, task, frame, T: tl.constexpr):
    """Call work(task, frame, blocks, T) for the program's blocks: a tile of full ones, or a short last one.

    Where a block is longer than a tile, the program has one block, and works on it piece by piece.
    """
    program = tl.program_id(0)
    if program < tl.cdiv(frame.full, T.rows):
        work(task, frame, Blocks(program.to(tl.int64) * T.rows, frame.full, T.block, T.span), T)
    elif T.tail:
        is_last = (frame.length > 0) & (program == tl.cdiv(frame.full, T.rows))
        if is_last:
            work(task, frame, Blocks(wide(frame.full), frame.full + 1, frame.length, frame.span), T.ragged)


@triton.jit
def write_frame(wire, frame, rotation):
    """The header, and zeros in the gaps: between the sections and after the last."""
    i = tl.arange(0, 32)
    word = tl.zeros((32,), tl.int32)
    header = _header(frame, rotation)
    for k in tl.static_range(8):
        word = tl.where(i // 4 == k, header[k], word)
    store_words(wire + i, ((word >> (8 * (i % 4))) & 0xFF,), i >= 0, 1)
    _clear(wire, frame.scales_end, frame.minima_at)
    _clear(wire, frame.minima_end, frame.plane0)
    _clear(wire, frame.codes_end, frame.nbytes)


@triton.jit
def _header(frame, rotation):
    """The eight words of a header."""
    low, high = rotation
    return (frame.head0, frame.head1, frame.head2, 0, low, high, frame.numel_low, frame.numel_high)


@triton.jit
def _clear(wire, start, end):
    """Zeros from one offset to another, which is fewer than 32 bytes further."""
    i = tl.arange(0, 32)
    at = wide(start) + i
    store_words(wire + at, (tl.zeros((32,), tl.int32),), at < end, 1)


@triton.jit
def key_in(wire):
    """The key in a wire's header, as two halves."""
    i = tl.arange(0, 8)
    return _key_of(load_bytes(wire, i, i >= 0, False, 4))


@triton.jit
def _key_of(words):
    i = tl.arange(0, 8)
    low = tl.sum(tl.where(i == KEY_WORD, words, 0), axis=0)
    return low, tl.sum(tl.where(i == KEY_WORD + 1, words, 0), axis=0)


@triton.jit
def check_headers(wires, stack, frame, rotation, ROTATED: tl.constexpr):
    """(key, fine): the key of wire 0, and whether every header is the expected one with that key."""
    i = tl.arange(0, 8)
    expected = tl.zeros((8,), tl.int32)
    header = _header(frame, rotation)
    for k in tl.static_range(8):
        expected = tl.where(i == k, header[k], expected)
    found = load_bytes(wires, i, i >= 0, False, 4)
    if ROTATED:
        expected = tl.where((i == KEY_WORD) | (i == KEY_WORD + 1), found, expected)
    wrong = tl.zeros((8,), tl.int32)
    for w in range(stack.world):
        wrong = wrong | (load_bytes(wires + w * wide(stack.stride), i, i >= 0, False, 4) ^ expected)
    return _key_of(expected), tl.max((wrong != 0).to(tl.int32), axis=0) == 0
