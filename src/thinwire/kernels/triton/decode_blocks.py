"""decode_sum of wires with blocks: the sum over ranks, rotated back where it was rotated.

A program works on one tile of full blocks; the last one on the short last block, if there is one, and where a block is
longer than a tile, every program on one block, piece by piece. So do those of encode_blocks.py and recode_blocks.py.
"""

import triton
import triton.language as tl

from thinwire.kernels import schema
from thinwire.kernels.triton.frame import CHANGING, Sections, check_headers, wide
from thinwire.kernels.triton.numbers import LOWER, SIGN_BIT, bits_of, float_of
from thinwire.kernels.triton.rotation import flip, hadamard
from thinwire.kernels.triton.scaled import BF16_MAX, FLOAT_MAX
from thinwire.kernels.triton.sums import begin_sum, sum_any, usual_sum, wires_of
from thinwire.kernels.triton.tiles import anywhere, piece, position, store, times

LLOYD_REACH = tl.constexpr(schema.LLOYD_REACH)
OTHER_REACH = tl.constexpr(schema.OTHER_REACH)
FP16_MAX = tl.constexpr(65504.0)


@triton.jit(do_not_specialize=CHANGING)
def decode_kernel(
    wire, out, levels, stride, world,
    head0, head1, head2, key_low, key_high, numel_low, numel_high,
    full, length, span,
    scales_at, minima_at, plane0, plane1, plane2,
    norm, tail_norm,
    T: tl.constexpr, TAIL: tl.constexpr, WORLD: tl.constexpr, CHECK: tl.constexpr, CALM: tl.constexpr,
):  # fmt: skip
    """out = scale * sum over ranks, in rank order in fp32, of decode(wire). norm: scale, over sqrt(codes) if rotated.

    CHECK: the headers are compared on the device and the key is theirs; where they differ the sum is NaN. CALM: norm is
    so small that a usual sum stays inside the range of the output.
    """
    program = tl.program_id(0)
    stride = wide(stride)
    keys = (key_low, key_high)
    if CHECK:
        header = (head0, head1, head2, 0, key_low, key_high, numel_low, numel_high)
        key_low, key_high, fine = check_headers(wire, stride, world, header, T.rotated)
        keys = (key_low, key_high)
        norm = tl.where(fine, norm, float("nan"))
        tail_norm = tl.where(fine, tail_norm, float("nan"))
    offsets = Sections(scales_at, minima_at, (plane0, plane1, plane2))
    if program < tl.cdiv(full, T.rows):
        first = program.to(tl.int64) * T.rows
        wires = wires_of(wire, offsets, stride, world, levels, first, T)
        _decode(out, wires, keys, norm, first, full, T.block, T.span, T, WORLD, CALM)
    elif TAIL:
        first = wide(full)
        wires = wires_of(wire, offsets, stride, world, levels, first, T)
        _decode(out, wires, keys, tail_norm, first, full + 1, length, span, T.ragged, WORLD, CALM)


@triton.jit
def _decode(out, wires, keys, norm, first, end, length, span, T: tl.constexpr, WORLD: tl.constexpr, CALM: tl.constexpr):
    """The blocks from `first` on, before `end`."""
    if T.loose and not T.lloyd:
        span = wide(span)
        for start in range(0, span, T.columns):
            _decode_tile(out, wires, keys, norm, piece(first, length, span, start, T, end), T, WORLD, CALM)
    else:
        _decode_tile(out, wires, keys, norm, position(first, end, length, span, T), T, WORLD, CALM)


@triton.jit
def _decode_tile(out, wires, keys, norm, at, T: tl.constexpr, WORLD: tl.constexpr, CALM: tl.constexpr):
    target = out + at.first * T.block
    begun, odd = begin_sum(wires, at, T, WORLD)
    trouble = anywhere(odd)
    if not CALM:
        trouble = trouble | 1
    if trouble == 0:
        z = finish(usual_sum(begun, wires.levels, T, WORLD), keys, norm, at, T)
        store(target, _fitted(z, out, T, False), at, T)
    else:
        z, post = sum_any(wires, at, T)
        z = leave(finish(z, keys, norm, at, T), post, T)
        store(target, _fitted(z, out, T, True), at, T)


@triton.jit
def finish(z, keys, norm, at, T: tl.constexpr):
    """Rotate a sum back and multiply by `norm`."""
    if T.rotated:
        z = flip(hadamard(z, at, T), keys, at, T)
    return times(z, norm)


@triton.jit
def leave(z, post, T: tl.constexpr):
    """z out of the domain that `post` undoes."""
    return [tl.where(post > 1, _saturated(x, FLOAT_MAX * LOWER, T), x) * post for x in z]


@triton.jit
def _fitted(z, out, T: tl.constexpr, ANY: tl.constexpr):
    """z where it goes into a 16-bit output: values just past its largest number become that."""
    if out.dtype.element_ty == tl.float16:
        return [_saturated(x, FP16_MAX, T) for x in z]
    elif out.dtype.element_ty == tl.bfloat16 and ANY:
        return [_saturated(x, BF16_MAX, T) for x in z]
    else:
        return z


@triton.jit
def _saturated(x, MOST: tl.constexpr, T: tl.constexpr):
    """MOST in place of what the codes' error took past it. Further out is an overflow, and stays."""
    REACH: tl.constexpr = LLOYD_REACH if T.lloyd else OTHER_REACH
    size = tl.abs(x)
    cut = float_of(bits_of(tl.full(x.shape, MOST, tl.float32)) | (bits_of(x) & SIGN_BIT))
    return tl.where((size > MOST) & (size <= beyond(MOST, REACH)), cut, x)


@triton.constexpr_function
def beyond(most, reach):
    """The end of what is still the codes' error, in fp32."""
    import struct

    largest_float = 3.4028234663852886e38
    product = min(most * reach, largest_float)
    (rounded,) = struct.unpack("<f", struct.pack("<f", product))
    return rounded
