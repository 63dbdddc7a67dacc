"""Instructions on words of four bytes, the lowest first: permutations, and sums of products."""

import triton
import triton.language as tl

from thinwire.kernels.triton.memory import INTERPRETED, filled, instruction

PERMUTE = tl.constexpr("prmt.b32 $0, $1, $2, {};")
MIX = tl.constexpr("lop3.b32 $0, $1, $2, {}, 0xE4;")  # a where c is set, else b
CHOOSE = tl.constexpr("prmt.b32 $0, $1, $2, $3;")
DOT_LOW = tl.constexpr("dp2a.lo.u32.u32 $0, $1, $2, $3;")
DOT_HIGH = tl.constexpr("dp2a.hi.u32.u32 $0, $1, $2, $3;")
SQUARE = tl.constexpr("dp4a.u32.u32 $0, $1, $1, $2;")
COUNT = tl.constexpr("popc.b32 $0, $1;")


@triton.constexpr_function
def in_bytes(value):
    """The same in all four bytes, as a signed number."""
    return (value * 0x01010101 + (1 << 31)) % (1 << 32) - (1 << 31)


@triton.jit
def permuted(a, b, SELECT: tl.constexpr):
    """Four bytes of two words, each chosen by a hexadecimal digit: 0..3 of a, 4..7 of b; the last digit the lowest."""
    if INTERPRETED:
        chosen = tl.zeros_like(a)
        for i in tl.static_range(4):
            byte = (b if (SELECT >> (4 * i)) & 4 else a) >> (8 * ((SELECT >> (4 * i)) & 3))
            chosen = chosen | ((byte & 0xFF) << (8 * i))
        return chosen
    else:
        return instruction(filled(PERMUTE, SELECT), "=r,r,r", (a, b))


@triton.jit
def mixed(a, b, MASK: tl.constexpr):
    """The bits of a that a mask has, and those of b that it has not: one instruction, which LLVM would make two."""
    if INTERPRETED:
        return (a & MASK) | (b & (MASK ^ -1))
    else:
        return instruction(filled(MIX, MASK), "=r,r,r", (a, b))


@triton.jit
def chosen(a, b, select):
    """Four bytes of two words, by digits that are not known beforehand; from 8 on, 0 or 255 by the sign of a byte."""
    if INTERPRETED:
        found = tl.zeros_like(select)
        for i in tl.static_range(4):
            digit = (select >> (4 * i)) & 15
            byte = (tl.where((digit & 4) == 0, a, b) >> (8 * (digit & 3))) & 0xFF
            found = found | (tl.where(digit < 8, byte, (byte >> 7) * 255) << (8 * i))
        return found
    else:
        return instruction(CHOOSE, "=r,r,r,r", (a, b, select))


@triton.jit
def dotted(pair, four, total, UPPER: tl.constexpr):
    """total + both 16-bit numbers of `pair` times the lower, or UPPER, two bytes of `four`."""
    if INTERPRETED:
        for k in tl.static_range(2):
            total = total + ((pair >> (16 * k)) & 0xFFFF) * ((four >> (16 * UPPER + 8 * k)) & 0xFF)
        return total
    else:
        return instruction(DOT_HIGH if UPPER else DOT_LOW, "=r,r,r,r", (pair, four, total))


@triton.jit
def squared(four, total):
    """total + the squares of the bytes of `four`."""
    if INTERPRETED:
        for k in tl.static_range(4):
            byte = (four >> (8 * k)) & 0xFF
            total = total + byte * byte
        return total
    else:
        return instruction(SQUARE, "=r,r,r", (four, total))


@triton.jit
def bits_set(word):
    """How many bits of a word are set."""
    if INTERPRETED:
        count = tl.zeros_like(word)
        for k in tl.static_range(32):
            count = count + ((word >> k) & 1)
        return count
    else:
        return instruction(COUNT, "=r,r", (word,))
