"""The instructions that kernels ask for by name, on numpy arrays: what ptxas and a GPU make of their PTX."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

Words = np.ndarray[Any, Any]  # of 32 bits, addresses of 64


def fused(x: Words, y: Words, z: Words) -> Words:
    """x * y + z of fp32 with one rounding.

    The product is exact in float64. Its sum with z is rounded to odd there, after which rounding to fp32 is right.
    """
    product = x.astype(np.float64) * y.astype(np.float64)
    added = z.astype(np.float64)
    total = product + added
    back = total - product
    lost = (product - (total - back)) + (added - back)
    inexact = np.isfinite(lost) & (lost != 0) & (total.view(np.int64) & 1 == 0)
    return np.where(inexact, np.nextafter(total, np.copysign(np.inf, lost)), total).astype(np.float32)


def prmt(a: Words, b: Words, select: Words) -> Words:
    """Each digit of `select` chooses a byte of b:a; its highest bit takes the byte's sign instead."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << 32
    chosen = np.uint64(0)
    for i in range(0, 16, 4):
        digit = select.astype(np.uint64) >> i & 15
        byte = both >> 8 * (digit & 7) & 255
        chosen = chosen | np.where(digit & 8, 255 * (byte >> 7), byte) << 2 * i
    return chosen.astype(np.uint32)


def dotted(width: int, first: int, count: int) -> Callable[[Words, Words, Words], Words]:
    """c + the sum of the `count` numbers of `width` bits in a times as many bytes of b, from the first one on."""

    def dot(a: Words, b: Words, c: Words) -> Words:
        pairs = [(a >> width * k & (1 << width) - 1) * (b >> 8 * (first + k) & 255) for k in range(count)]
        return sum(pairs, c)

    return dot


def lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    """Every bit of the result is that of the table at the number that the bits of a, b and c make."""
    terms = [(a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) for i in range(8)]
    kept = [np.where(table >> i & 1, term, 0) for i, term in enumerate(terms)]
    return np.bitwise_or.reduce(np.broadcast_arrays(*kept)).astype(np.uint32)


def saturated(a: Words, b: Words, c: Words) -> Words:
    total = fused(*(np.asarray(x).view(np.float32) for x in (a, b, c)))
    return np.fmin(np.fmax(total, 0), 1).astype(np.float32).view(np.uint32)


def rounded_pair(dtype: torch.dtype) -> Callable[[Words, Words], Words]:
    def pair(high: Words, low: Words) -> Words:
        halves = [torch.from_numpy(x.view(np.float32)).to(dtype).view(torch.int16).numpy() for x in (high, low)]
        return halves[0].view(np.uint16).astype(np.uint32) << 16 | halves[1].view(np.uint16)

    return pair


MEANING: dict[str, Callable[..., Any]] = {
    "prmt.b32": prmt,
    "dp2a.lo.u32.u32": dotted(16, 0, 2),
    "dp2a.hi.u32.u32": dotted(16, 2, 2),
    "dp4a.u32.u32": dotted(8, 0, 4),
    "popc.b32": np.bitwise_count,
    "clz.b32": lambda a: 32 - np.frexp(a.astype(np.float64))[1],
    "lop3.b32": lop3,
    "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "shr.u32": np.right_shift,
    "fma.rn.sat.f32": saturated,
    "neg.f32": lambda a: a ^ np.uint32(1 << 31),
    "setp.ne.b32": np.not_equal,
    "mov.b32": np.copy,
    "mov.b64": lambda low, high: low.astype(np.uint64) | high.astype(np.uint64) << 32,
    "cvt.u16.u32": lambda a: a & np.uint32(0xFFFF),
    "cvt.rn.bf16x2.f32": rounded_pair(torch.bfloat16),
    "cvt.rn.f16x2.f32": rounded_pair(torch.float16),
}
ARGUMENTS = re.compile(r"[^\s,{}\[\]]+")
KINDS = {"8": np.dtype("u1"), "16": np.dtype("u2"), "32": np.dtype("u4")}


def run(text: str, operands: Sequence[Words], results: int = 1, memory: Any = None) -> list[Words]:
    """What a text leaves in its results, the first operands. memory: the interpreter's, for loads and stores."""
    held: dict[str, Any] = {f"${results + i}": x.copy().view(f"u{x.itemsize}") for i, x in enumerate(operands)}

    def value(name: str) -> Words:
        if name in held:
            return held[name]
        return np.array(int(name[2:], 16) if name.startswith("0f") else int(name, 0) & 0xFFFFFFFF, np.uint32)

    for line in text.strip("{} ").split(";"):
        guard, op, rest = re.fullmatch(r"\s*(?:@(\w+) )?(\S*)(.*)", line, re.DOTALL).groups()  # type: ignore[union-attr]
        names = ARGUMENTS.findall(rest)
        if op[:3] in ("ld.", "st."):
            address = value(names[-1] if op.startswith("ld.") else names[0])
            inside = np.broadcast_to(value(guard) if guard else np.True_, address.shape)
            kind = KINDS[re.findall(r"\d+", op)[-1]]
            for i, name in enumerate(names[:-1] if op.startswith("ld.") else names[1:]):
                if op.startswith("ld."):
                    held[name] = memory.load(address + 4 * i, inside, np.zeros(address.shape, kind), kind).astype(
                        np.uint32
                    )
                else:
                    memory.store(address + 4 * i, value(name).astype(kind), inside)
        elif op and op != ".reg":
            target, *sources = names
            found = MEANING[op](*map(value, sources))
            held[target] = np.where(held[guard], found, held[target]) if guard else found
    return [np.asarray(held[f"${i}"]) for i in range(results)]
