"""decode_sum of wires with blocks: the sum over ranks, rotated back if it is rotated."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from thinwire.kernels import schema
from thinwire.kernels.triton.frame import Norms, check_headers, on_blocks
from thinwire.kernels.triton.memory import wide
from thinwire.kernels.triton.numbers import INF_BITS, LOWER, SIGN_BIT, bits_of, float_of
from thinwire.kernels.triton.rotation import flip, hadamard
from thinwire.kernels.triton.scaled import BF16_MAX, FLOAT_MAX
from thinwire.kernels.triton.sums import summed, wires_from, worst_scale
from thinwire.kernels.triton.tiles import ALONE, CHANGE, OWED, added, anywhere, load, piece, position, store, times

LLOYD_REACH = tl.constexpr(schema.LLOYD_REACH)
OTHER_REACH = tl.constexpr(schema.OTHER_REACH)
FP16_MAX = tl.constexpr(65504.0)


@triton.jit
def decode_kernel(wire, out, levels, stack, rotation, norms, frame, T: tl.constexpr):
    """out = scale * sum over ranks, in rank order in fp32, of decode(wire).

    If headers are checked, the key is taken from them, and if one does not match, the sum is NaN.
    """
    if T.check:
        rotation, fine = check_headers(wire, stack, frame, rotation, T.rotated)
        norms = Norms(tl.where(fine, norms.full, float("nan")), tl.where(fine, norms.tail, float("nan")))
    sink = Sink(out, out, out, out, 1.0, False, True, out, 0)
    on_blocks(decode_blocks, (sink, wire, stack, levels, rotation, norms), frame, T)


class Sink(NamedTuple):
    """Where a sum goes, and with feedback (the modes of tiles.py) what was left and what is remembered."""

    out: Any
    left: Any
    memory: Any
    mean: Any  # in mode CHANGE
    factor: Any  # of `left` in the memory
    own: Any  # whether the row is this rank's own, so that `left` belongs to the sum itself
    fine: Any  # whether the memory is to be updated
    bad: Any  # (call, count): the last call that met a number that is not finite, and how many did
    call: Any


@triton.jit
def decode_blocks(task, frame, blocks, T: tl.constexpr):
    """Decode blocks of a stack of wires into the sink."""
    sink, wire, stack, levels, rotation, norms = task
    wires = wires_from(wire, stack, frame, levels, -1, blocks.first, T)
    norm = norms.tail if T.loose else norms.full
    if T.loose and not T.gaussian:
        for start in range(0, wide(blocks.span), T.columns):
            _decode_tile(sink, wires, rotation, norm, piece(blocks, start, T, True), T)
    else:
        _decode_tile(sink, wires, rotation, norm, position(blocks, T), T)


@triton.jit
def _decode_tile(sink, wires, keys, norm, at, T: tl.constexpr):
    z, post, unusual = summed(wires, at, T)
    z = finish(z, keys, norm, at, T)
    if unusual:
        if T.notes:
            note(sink.bad, sink.call, worst_scale(wires, at, T))
        z = leave(z, post, T)
        if T.mode == ALONE:
            z = _fitted(z, sink.out, tl.bfloat16, BF16_MAX, T)
    _put(sink, z, at, T)


@triton.jit
def note(bad, call, worst):
    """Count a call once if `worst`, the bits of its largest number, are those of Inf or NaN."""
    if anywhere(worst) >= INF_BITS:
        before = tl.atomic_xchg(bad, call)
        if before != call:
            tl.atomic_add(bad + 1, 1)


@triton.jit
def _put(sink, z, at, T: tl.constexpr):
    """Write the sum z. With feedback also update the memory, and in mode CHANGE add the mean."""
    start = at.first * T.block
    if T.mode == ALONE:
        store(sink.out + start, _fitted(z, sink.out, tl.float16, FP16_MAX, T), at, T)
    else:
        left = load(sink.left + start, at, T)
        if T.loose:
            tl.debug_barrier()  # `left` may be where the result goes
        if T.mode == OWED:
            kept = times(left, sink.factor)
        else:
            memory = load(sink.memory + start, at, T)
            kept = [memory[i] + tl.where(sink.own, left[i] + z[i], left[i] * sink.factor) for i in T.each]
            z = added(load(sink.mean + start, at, T), z)
        if sink.fine:
            store(sink.memory + start, kept, at, T)
            if T.mode == CHANGE:
                store(sink.mean + start, z, at, T)
        store(sink.out + start, z, at, T)


@triton.jit
def finish(z, keys, norm, at, T: tl.constexpr):
    """Rotate a sum back and multiply by `norm`."""
    if T.rotated:
        z = flip(hadamard(z, at, T), keys, at, T)
    return times(z, norm)


@triton.jit
def leave(z, post, T: tl.constexpr):
    """Take z out of the domain that `post` undoes."""
    return [tl.where(post > 1, _saturated(x, FLOAT_MAX * LOWER, T), x) * post for x in z]


@triton.jit
def _fitted(z, out, KIND: tl.constexpr, MOST: tl.constexpr, T: tl.constexpr):
    """z for an output of the 16-bit KIND: values just past its largest number become that number."""
    if out.dtype.element_ty == KIND:
        return [_saturated(x, MOST, T) for x in z]
    else:
        return z


@triton.jit
def _saturated(x, MOST: tl.constexpr, T: tl.constexpr):
    """Clamp to MOST the values that quantization error took past it. Larger ones are overflows, and stay."""
    REACH: tl.constexpr = LLOYD_REACH if T.gaussian else OTHER_REACH
    BEYOND: tl.constexpr = min(MOST * REACH, FLOAT_MAX)
    size = tl.abs(x)
    cut = float_of(bits_of(tl.full(x.shape, MOST, tl.float32)) | (bits_of(x) & SIGN_BIT))
    return tl.where((size > MOST) & (size <= BEYOND), cut, x)
