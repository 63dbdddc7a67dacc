"""What surrounds the codes of a wire: its header, where its sections start, and the gaps between them.

Offsets inside a tile are 32-bit numbers; where a tile starts is a 64-bit one.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from thinwire import wire as wire_format
from thinwire.kernels.triton.memory import store_words
from thinwire.kernels.triton.tiles import load_bytes

KEY_WORD = tl.constexpr(wire_format.KEY_AT // 4)  # of the header's words; the next one is its upper half
# Arguments that change from call to call: a kernel compiled for one value serves all.
CHANGING = (
    *("head0", "head1", "head2", "key_low", "key_high", "numel_low", "numel_high", "dither_low", "dither_high"),
    *("full", "length", "span", "stride", "world", "scales_at", "scales_end", "minima_at", "minima_end"),
    *("plane0", "plane1", "plane2", "codes_end", "nbytes", "numel", "nbytes_raw"),
)


class Sections(NamedTuple):
    """The sections of a wire: as offsets, or as pointers to what belongs to a tile."""

    scales: Any
    minima: Any
    planes: Any


@triton.jit
def sections(wire, offsets, first, T: tl.constexpr):
    """Where the scales, minima and codes of block `first` start."""
    planes = ()
    for p in tl.static_range(len(T.planes)):
        planes = planes + (wire + offsets.planes[p] + first * (T.block * T.planes[p] // 8),)
    return Sections(wire + offsets.scales + 2 * first, wire + offsets.minima + 2 * first, planes)


@triton.jit
def wide(number):
    """A number of 64 bits, for blocks that 32 do not count."""
    return tl.full((), 0, tl.int64) + number


@triton.jit
def write_frame(wire, header, gaps):
    """The header, and zeros in the gaps: between the sections and after the last, each from one offset to the next."""
    i = tl.arange(0, 32)
    word = tl.zeros((32,), tl.int32)
    for k in tl.static_range(8):
        word = tl.where(i // 4 == k, header[k], word)
    store_words(wire + i, ((word >> (8 * (i % 4))) & 0xFF,), i >= 0, 1)
    for gap in tl.static_range(0, len(gaps), 2):
        at = wide(gaps[gap]) + i
        store_words(wire + at, (tl.zeros((32,), tl.int32),), at < gaps[gap + 1], 1)


@triton.jit
def check_headers(wires, stride, world, header, ROTATED: tl.constexpr):
    """(key_low, key_high, fine): the key of wire 0, and whether every header is the expected one with that key."""
    i = tl.arange(0, 8)
    expected = tl.zeros((8,), tl.int32)
    for k in tl.static_range(8):
        expected = tl.where(i == k, header[k], expected)
    found = load_bytes(wires, i, i >= 0, False, 4)
    if ROTATED:
        expected = tl.where((i == KEY_WORD) | (i == KEY_WORD + 1), found, expected)
    wrong = tl.zeros((8,), tl.int32)
    for w in range(world):
        wrong = wrong | (load_bytes(wires + w * stride, i, i >= 0, False, 4) ^ expected)
    fine = tl.max((wrong != 0).to(tl.int32), axis=0) == 0
    key_low = tl.sum(tl.where(i == KEY_WORD, expected, 0), axis=0)
    key_high = tl.sum(tl.where(i == KEY_WORD + 1, expected, 0), axis=0)
    return key_low, key_high, fine
