"""Exact differences in plain torch: what changed between a tensor and a base that both ends hold, without loss.

Bits are read as integers that sort like the numbers. A number then changes by some units in the last place. How many
depends on its size, so the exponent of the *base*, which both ends have, serves as context:

    ordered = bits, all but the sign inverted if negative               d = ordered(new) - ordered(base), which wraps
    u = 0, 1, 2, 3, ... for d = 0, -1, 1, -2, ...                      class = clamp(top - exponent(base), 0, 15)

A block of 4096 numbers is coded by class: all members of class 0 in their order, then those of class 1, and so on.
Every class has a gap parameter g and a value parameter v. A Rice code with parameter k of an integer x is x >> k zeros,
a one, and the k low bits of x. In a class with g = 15 every member's u is Rice coded with v. In other classes only
changed members are coded, each by the number of unchanged members since the last one (with g), then u - 1 (with v).
After the last changed member of a class, zeros pass the members that are left, each zero up to 2 ** g of them. A value
whose code would begin with 16 zeros or more is 16 zeros and then its plain bits. Bits fill bytes from the lowest up. A
block whose code would not be shorter than its plain numbers holds these instead; its length tells which.

Lengths are known after one pass, so that blocks can be written in parallel. `choose` takes the parameters from counts.

Shape suffixes: K blocks, B numbers of a block, C classes; E exponents, L lengths of u in bits, G and V parameters.
"""

import itertools
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire.wire import EXACT_BLOCK as BLOCK, EXACT_CLASSES, EXACT_DIRECT, EXACT_MOST_GAP, ExactTables, exact_lengths

MOST_ZEROS = 16  # at the start of a value's code
COUNTED = 64  # blocks to count: about so many, at most twice as many, or all if there are fewer
EXPONENTS = 256
MOST_BITS = 32  # of a number
LENGTHS = MOST_BITS + 1  # bit lengths of a difference: 0 to 32
BIT = 1 << 20  # what one bit adds to a cost
RARE = 1024  # `top` is the largest exponent that more than one in RARE numbers has or exceeds


class NumberFormat(NamedTuple):
    """Where the parts of a number lie in its bits."""

    bits: int
    mantissa: int
    exponents: int  # mask
    signed: torch.dtype


FORMATS = {
    torch.bfloat16: NumberFormat(16, 7, 0xFF, torch.int16),
    torch.float16: NumberFormat(16, 10, 0x1F, torch.int16),
    torch.float32: NumberFormat(32, 23, 0xFF, torch.int32),
}


def counted_stride(numel: int) -> int:
    """Only every n-th block is counted; this is n."""
    return max(1, numel // (BLOCK * COUNTED))


def exact_count(new: Tensor, base: Tensor) -> Tensor:
    """How many numbers of the counted blocks have each exponent and each length of u: (EXPONENTS, LENGTHS), int64."""
    starts = range(0, max(1, base.numel()), BLOCK * counted_stride(base.numel()))
    new, base = (torch.cat([x[at : at + BLOCK] for at in starts]) for x in (new, base))
    length = torch.frexp(differences(new, base).double()).exponent.long()
    return torch.bincount(exponents(base) * LENGTHS + length, minlength=EXPONENTS * LENGTHS).view(EXPONENTS, LENGTHS)


def exact_encode(new: Tensor, base: Tensor) -> tuple[ExactTables, Tensor, Tensor]:
    """The tables, the length of each block, and the bytes of all blocks, one after the other."""
    tables = choose(exact_count(new, base), FORMATS[base.dtype].bits)
    pairs = zip(new.split(BLOCK), base.split(BLOCK), strict=True)
    coded = [_encoded(tables, *pair) for pair in pairs if base.numel()]
    blocks = torch.frombuffer(bytearray(b"".join(coded)) or bytearray(1), dtype=torch.uint8)[: sum(map(len, coded))]
    return tables, exact_lengths(torch.tensor([*map(len, coded)])).to(base.device), blocks.to(base.device)


def exact_decode(tables: ExactTables, blocks: Tensor, starts: Tensor, base: Tensor, out: Tensor) -> bool:
    """out = the numbers that were encoded; False if the bytes are damaged."""
    code, spans = blocks.cpu().numpy().tobytes(), itertools.pairwise(starts.tolist())
    found = [_decoded(tables, code[a:b], old) for old, (a, b) in zip(base.split(BLOCK), spans, strict=False)]
    whole = [block for block in found if block is not None]
    out.copy_(torch.cat(whole) if len(whole) == len(found) > 0 else base)
    return len(whole) == len(found)


# --- numbers ----------------------------------------------------------------------------------------------------------


def ordered(x: Tensor) -> Tensor:
    """The bits of numbers, as integers that sort like the numbers."""
    return _mirrored(x.contiguous().view(FORMATS[x.dtype].signed))


def _mirrored(bits: Tensor) -> Tensor:
    """Negative integers with all bits but the sign inverted; doing it twice gives them back."""
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)


def differences(new: Tensor, base: Tensor) -> Tensor:
    """u of every number."""
    bits = FORMATS[base.dtype].bits
    d = ordered(new) - ordered(base)  # wraps
    return (d << 1 ^ d >> bits - 1).long() & (1 << bits) - 1


def exponents(base: Tensor) -> Tensor:
    """The exponent bits of every number."""
    format = FORMATS[base.dtype]
    return base.contiguous().view(format.signed).long() >> format.mantissa & format.exponents


def _undone(base: Tensor, u: Tensor) -> Tensor:
    """The numbers whose differences from the base are u."""
    d = (u >> 1 ^ -(u & 1)).to(FORMATS[base.dtype].signed)
    return _mirrored(ordered(base) + d).view(base.dtype)


# --- the choice of parameters -----------------------------------------------------------------------------------------


def choose(counts_EL: Tensor, bits: int) -> ExactTables:
    """The parameters that make the code of the counted numbers shortest, if the changes in a class are independent.

    Costs are integers, so that all backends agree. The low 5 bits of each are its parameter: in a tie the lowest wins.
    """
    counts_EL = counts_EL.cpu()
    above_E = counts_EL.sum(1).flip(0).cumsum(0).flip(0)  # numbers with this exponent or a larger one
    top = max(int((above_E * RARE > above_E[0]).sum()) - 1, 0)
    class_E = (top - torch.arange(EXPONENTS)).clamp(0, EXACT_CLASSES - 1)
    counts_CL = counts_EL.new_zeros(EXACT_CLASSES, LENGTHS).index_add_(0, class_E, counts_EL)
    costs = counts_CL.double() @ value_costs(bits, counts_CL.device).double()  # exact, and faster than in integers
    direct_C, change_C = (costs.long() << 5 | torch.arange(MOST_BITS)).min(2).values
    gap_costs_CG = _gap_costs(counts_CL.sum(1), counts_CL[:, 1:].sum(1))
    gap_C = (gap_costs_CG << 5 | torch.arange(EXACT_MOST_GAP + 1)).min(1).values
    is_direct = direct_C >> 5 < (gap_C >> 5) + (change_C >> 5)
    gaps = torch.where(is_direct, EXACT_DIRECT, gap_C & 31).tolist()
    return ExactTables(top, tuple(gaps), tuple((torch.where(is_direct, direct_C, change_C) & 31).tolist()))


def _gap_costs(members_C: Tensor, changed_C: Tensor) -> Tensor:
    """(C, G): the expected cost of the gaps in each class, for each gap parameter."""
    step = torch.arange(EXACT_MOST_GAP + 1)
    powers = [1 - changed_C.double() / members_C.clamp(min=1)]
    for _ in range(EXACT_MOST_GAP):  # its powers of 2 ** step, rounded alike on every machine
        powers.append(powers[-1] * powers[-1])
    stays = torch.stack(powers, 1)
    cost = changed_C[:, None] * (stays / (1 - stays).clamp(min=1e-12) + 1 + step)
    none = members_C[:, None].double() / (1 << step)  # only zeros, if nothing has changed
    return (torch.where(changed_C[:, None] > 0, cost, none) * BIT).long()


@lru_cache
def value_costs(bits: int, device: torch.device) -> Tensor:
    """(2, L, V): the mean cost of coding u, and u - 1, over a sample of the u of each length in bits."""
    costs = torch.zeros(2, LENGTHS, MOST_BITS, dtype=torch.int64)
    costs[:, :, bits:] = 1 << 30  # there are no such parameters
    for v in range(bits):
        costs[0, 0, v] = BIT * (1 + v)
        for length in range(1, bits + 1):
            some = range(1 << (length - 1), 1 << length, 1 << max(0, length - 8))
            for less in (0, 1):
                costs[less, length, v] = sum(_length(u - less, v, bits) for u in some) * (BIT // len(some))
    return costs.to(device)


def _length(value: int, v: int, bits: int) -> int:
    return (value >> v) + 1 + v if value >> v < MOST_ZEROS else MOST_ZEROS + bits


# --- blocks: their bits as digits, the lowest first -------------------------------------------------------------------


def _classes(tables: ExactTables, base: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """The gap parameter, the value parameter, and the places of the members of every class."""
    class_B = (tables.top - exponents(base)).clamp(0, EXACT_CLASSES - 1)
    for c in range(EXACT_CLASSES):
        yield tables.gaps[c], tables.values[c], (class_B == c).nonzero().flatten()


def _encoded(tables: ExactTables, new: Tensor, base: Tensor) -> bytes:
    bits, u_B, found = FORMATS[base.dtype].bits, differences(new, base), []
    for g, v, places in _classes(tables, base):
        u = u_B[places]
        if g == EXACT_DIRECT:
            found += [_value(x, v, bits) for x in u.tolist()]
            continue
        changed = pad(u.nonzero().flatten(), (1, 1), value=-1)
        changed[-1] = len(u)
        *gaps, left = (changed.diff() - 1).tolist()
        for gap, x in zip(gaps, u[u > 0].tolist(), strict=True):
            found += [_rice(gap, g), _value(x - 1, v, bits)]
        found.append("0" * -(-left >> g))
    text = "".join(found)
    code = int(text[::-1] or "0", 2).to_bytes(-(-len(text) // 8), "little")
    return code if len(code) < new.nbytes else new.view(torch.uint8).cpu().numpy().tobytes()


def _rice(x: int, k: int) -> str:
    return "0" * (x >> k) + _digits((x & (1 << k) - 1) << 1 | 1, k + 1)


def _value(x: int, v: int, bits: int) -> str:
    return _rice(x, v) if x >> v < MOST_ZEROS else "0" * MOST_ZEROS + _digits(x, bits)


def _digits(x: int, width: int) -> str:
    return f"{x:0{width}b}"[::-1]


def _decoded(tables: ExactTables, block: bytes, base: Tensor) -> Tensor | None:
    """The numbers of a block; None if the bytes are damaged. Past the end, digits read as zeros."""
    if len(block) == base.nbytes:
        return torch.frombuffer(bytearray(block), dtype=base.dtype).to(base.device)
    bits, text, at = FORMATS[base.dtype].bits, _digits(int.from_bytes(block, "little"), 8 * len(block)), 0
    u_B = torch.zeros(base.numel(), dtype=torch.int64)
    for g, v, places in _classes(tables, base):
        found = [0] * len(places)
        k = 0
        while k < len(found):
            if g != EXACT_DIRECT:
                zeros, gap, after = _read(text, at, g)
                needed = -(-(len(found) - k) >> g)
                if zeros >= needed:
                    at += needed
                    break
                k, at = k + gap, after
                if k >= len(found):
                    return None
            zeros, x, after = _read(text, at, v)
            if zeros >= MOST_ZEROS:
                after = at + MOST_ZEROS + bits
                x = _number(text[at + MOST_ZEROS : after])
            found[k] = x + (g != EXACT_DIRECT) & (1 << bits) - 1
            k, at = k + 1, after
        u_B[places.cpu()] = torch.tensor(found, dtype=torch.int64)
    return _undone(base, u_B.to(base.device)) if -(-at // 8) == len(block) else None


def _read(text: str, at: int, k: int) -> tuple[int, int, int]:
    """(zeros, x, end) of the Rice code with parameter k that starts at `at`."""
    one = text.find("1", at)
    one = one if one >= 0 else at + BLOCK
    return one - at, one - at << k | _number(text[one + 1 : one + 1 + k]), one + 1 + k


def _number(digits: str) -> int:
    return int(digits[::-1] or "0", 2)
