"""Instructions on words of four bytes, the lowest first: permutations, and sums of products."""

import triton
import triton.language as tl

from thinwire.kernels.triton.memory import filled, instruction

PERMUTE = tl.constexpr("prmt.b32 $0, $1, $2, {};")


@triton.constexpr_function
def signed(value):
    """value modulo 2**32, as a signed number."""
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


@triton.constexpr_function
def in_bytes(value):
    """The same in all four bytes, as a signed number."""
    return signed(value * 0x01010101)


@triton.jit
def permuted(a, b, SELECT: tl.constexpr):
    """Four bytes of two words, each chosen by a hexadecimal digit: 0..3 of a, 4..7 of b; the last digit the lowest."""
    return instruction(filled(PERMUTE, SELECT), "=r,r,r", (a, b))


@triton.jit
def chosen(a, b, select):
    """Four bytes of two words, by digits known only at run time; one from 8 on gives 0 or 255 by the sign of a byte."""
    return instruction("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", (a, b, select))


@triton.jit
def dotted(pair, four, total, UPPER: tl.constexpr):
    """total + both 16-bit numbers of `pair` times the lower, or UPPER, two bytes of `four`."""
    TEXT: tl.constexpr = "dp2a.hi.u32.u32 $0, $1, $2, $3;" if UPPER else "dp2a.lo.u32.u32 $0, $1, $2, $3;"
    return instruction(TEXT, "=r,r,r,r", (pair, four, total))


@triton.jit
def squared(four, total):
    """total + the squares of the bytes of `four`."""
    return instruction("dp4a.u32.u32 $0, $1, $1, $2;", "=r,r,r", (four, total))


@triton.jit
def bits_set(word):
    """How many bits of a word are set."""
    return instruction("popc.b32 $0, $1;", "=r,r", (word,))


@triton.jit
def four_levels(START: tl.constexpr, T: tl.constexpr):
    """Four positive levels of a Lloyd table, from START on; if there are two, those of all four codes, in order."""
    WORD: tl.constexpr = word_of(T.levels, START)
    return tl.full((T.rows, T.columns), WORD, tl.int32)


@triton.constexpr_function
def word_of(levels, start):
    """Four levels as bytes."""
    levels = (*levels[::-1], *levels) * 2 if len(levels) == 2 else levels
    return sum(level << (8 * i) for i, level in enumerate(levels[start : start + 4]))
