"""Floats as bits, exact roundings and the hash, for Triton kernels.

Products, quotients and roots must round once, as IEEE 754 says: kernels are compiled without fusing multiply and add,
`tl.div_rn` and `tl.sqrt_rn` round correctly, and `tl.fma` is used only if one rounding is intended or none happens.
"""

import struct

import triton
import triton.language as tl

from thinwire.kernels import schema
from thinwire.kernels.schema import HUGE_PEAK, TINY_PEAK

LIFT = tl.constexpr(schema.LIFT)
LOWER = tl.constexpr(schema.LOWER)
UNLIFT = tl.constexpr(1 / schema.LIFT)
UNLOWER = tl.constexpr(1 / schema.LOWER)
TINY_BITS, HUGE_BITS = (tl.constexpr(struct.unpack("<i", struct.pack("<f", p))[0]) for p in (TINY_PEAK, HUGE_PEAK))
SIGN_BIT = tl.constexpr(-(1 << 31))
ONE_BITS = tl.constexpr(0x3F800000)
INF_BITS = tl.constexpr(0x7F800000)
NORMAL_BITS = tl.constexpr(1 << 23)  # of the smallest scale that encoders write
BF16_MAX_BITS = tl.constexpr(0x7F7F0000)
BF16_NAN = tl.constexpr(0x7FC0)
ROUNDER = tl.constexpr(1.5 * 2**23)  # x + ROUNDER holds round(x) in its low bits, for |x| < 2**22
ROUNDER_BITS = tl.constexpr(0x4B400000)
WIDENER = tl.constexpr(2.0**23)  # its bits | n, for 0 <= n < 2**23, are those of 2**23 + n
WIDENER_BITS = tl.constexpr(0x4B000000)


@triton.jit
def bits_of(x):
    """The bits of fp32 numbers."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    """The fp32 numbers of these bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def shifted(word, COUNT: tl.constexpr):
    """The bits of an int32 some places down, with zeros above them."""
    return (word.to(tl.uint32, bitcast=True) >> COUNT).to(tl.int32, bitcast=True)


@triton.jit
def size_bits(x):
    """The bits of |x|, which sort like |x|, with NaN at the top."""
    return bits_of(x) & 0x7FFFFFFF


@triton.jit
def round_bf16(bits):
    """The upper 16 bits of a finite number, rounded to nearest even."""
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


@triton.jit
def floor_bf16(x):
    """The largest bfloat16 that is not above x."""
    down = bits_of(x) & -65536
    return float_of(tl.where(float_of(down) > x, down + 65536, down))


@triton.jit
def inverse(scale):
    """1 / scale, and 0 for 0."""
    return tl.where(scale > 0, tl.div_rn(1.0, tl.where(scale > 0, scale, 1.0)), 0.0)


@triton.jit
def hash32(low, high, keys):
    """32 hashed bits of a 64-bit counter, under the two halves of a key."""
    key_low, key_high = keys
    h = low.to(tl.uint32) ^ key_low.to(tl.uint32) ^ (high.to(tl.uint32) * 0x9E3779B9)
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) + key_high.to(tl.uint32)
    h = h * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def dither(start, offset, keys):
    """Uniform in [-1/2, 1/2), 24 bits, of element start (64 bits) + offset."""
    index = start + offset.to(tl.int64)
    h = hash32(index.to(tl.uint32), (index >> 32).to(tl.uint32), keys)
    return ((h >> 8).to(tl.int32) - (1 << 23)).to(tl.float32) * (2.0**-24)


# --- domains: [Note: Three domains] in schema.py ----------------------------------------------------------------------


@triton.jit
def domain_factor(peak_bits):
    """2**64, 1 or 2**-32 by the size of a block's peak."""
    tiny = (peak_bits < TINY_BITS) & (peak_bits > 0)
    return tl.where(tiny, LIFT, tl.where(peak_bits >= HUGE_BITS, LOWER, 1.0))


@triton.jit
def undo(factor):
    """The factor that undoes a domain's."""
    return tl.where(factor > 1, UNLIFT, tl.where(factor < 1, UNLOWER, 1.0))


@triton.jit
def stored_scale(scale, post, bad):
    """A scale as bfloat16: times 2**32 if lowered, with its sign bit set if lifted, NaN for a bad block."""
    value = tl.where(post < 1, scale, scale * post)
    bits = round_bf16(tl.minimum(size_bits(value), BF16_MAX_BITS))
    return tl.where(bad, BF16_NAN, bits | tl.where(post < 1, 0x8000, 0))
