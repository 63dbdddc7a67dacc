"""Numbers that lie here and there in a tensor: copied out, with zeros left in their place, and put back."""

import triton
import triton.language as tl

MOVED = tl.constexpr(1024)  # by one program


@triton.jit(do_not_specialize=("count", "blanks"))
def set_aside_kernel(x, index, out, memory, gaps, count, blanks):
    """out = x at `index`, where x becomes 0; so does the memory at `gaps`."""
    i = tl.program_id(0).to(tl.int64) * MOVED + tl.arange(0, MOVED)
    at = tl.load(index + i, mask=i < count, other=0)
    tl.store(out + i, tl.load(x + at, mask=i < count), mask=i < count)
    nothing = tl.zeros((MOVED,), tl.float32)
    tl.store(x + at, nothing.to(x.dtype.element_ty), mask=i < count)
    gap = tl.load(gaps + i, mask=i < blanks, other=0)
    tl.store(memory + gap, nothing.to(memory.dtype.element_ty), mask=i < blanks)


@triton.jit(do_not_specialize=("count",))
def put_back_kernel(x, index, values, count):
    """x at `index` = values."""
    i = tl.program_id(0).to(tl.int64) * MOVED + tl.arange(0, MOVED)
    at = tl.load(index + i, mask=i < count, other=0)
    tl.store(x + at, tl.load(values + i, mask=i < count), mask=i < count)
