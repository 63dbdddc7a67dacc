"""trellis1 to trellis3: the search, wires read from their description, what is lost, sums.

That all backends give the same bytes is in tests/test_kernels.py.
"""

import itertools
import math
import struct
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cases
import thinwire
from benchmarks import data
from benchmarks.codec import lost_by
from cases import on_ranks
from replicas import Group
from thinwire import Lloyd, Trellis
from thinwire.kernels import trellis
from thinwire.kernels.schema import CELLS, TRELLIS


def index_of(bits_before: tuple[int, int], path: int, place: int) -> int:
    """The formula of docs/internals/wire-format.md."""
    return 4 * place + 2 * (path ^ bits_before[1]) + bits_before[0]


def by_hand(wire: bytes, numel: int) -> list[float]:
    """The numbers of a plain wire of 2 bits, from docs/internals/wire-format.md alone."""
    magic, version, kind, bits, variant, _, block, _, key, told = struct.unpack_from("<2sBBBBHIIQQ", wire)
    assert (magic, version, kind, bits, variant, key, told) == (b"TW", 1, 5, 2, 0, 0, numel)
    half = (11, 37, 62, 106)
    levels = (*(-level for level in reversed(half)), *half)
    blocks = -(-numel // block)
    at, out = 32 + -(-2 * blocks // 16) * 16, []
    for b in range(blocks):
        rest = numel - b * block
        codes = block if rest >= block else max(8, 1 << (rest - 1).bit_length())
        plane = wire[at : at + codes // 4]
        at += codes // 4
        code = [plane[e % (codes // 4)] >> 2 * (e // (codes // 4)) & 3 for e in range(codes)]
        strands = max(1, codes // 64)
        scale = struct.unpack("<f", b"\0\0" + wire[32 + 2 * b : 34 + 2 * b])[0]
        for e in range(codes):
            before = [code[e - k * strands] & 1 if e >= k * strands else 0 for k in (1, 2)]
            out.append(scale * levels[index_of((before[0], before[1]), code[e] & 1, code[e] >> 1)])
    return out[:numel]


@pytest.mark.parametrize("n", [1, 20, 256, 700])
def test_a_wire_is_what_its_description_says(n: int) -> None:
    codec = Trellis(2, 256, rotate=False)
    wire = cases.wire_of(codec, cases.content("gaussian", n))
    assert cases.decoded(codec, wire, n).tolist() == by_hand(bytes(wire.tolist()), n)


@pytest.mark.parametrize("bits", TRELLIS)
def test_the_search_finds_the_best_path(bits: int) -> None:
    """Of all paths through eight positions none has a lower cost, as costs are counted."""
    y = torch.randint(-CELLS // 2, CELLS // 2, (6, 8), generator=cases.seeded(bits))
    codes, found = trellis.choose(bits, y.int())
    table = TRELLIS[bits]
    cost = trellis.costs(table)
    for row, chosen, level in zip(y.tolist(), codes.tolist(), found.tolist(), strict=True):

        def total(path: tuple[int, ...], row: list[int] = row) -> int:
            states = itertools.pairwise((0, 0, *path))
            subsets = [index_of((one, two), p, 0) for (two, one), p in zip(states, path, strict=False)]
            return sum(int(cost[s, cell + CELLS // 2]) for s, cell in zip(subsets, row, strict=True))

        least = min(total(path) for path in itertools.product((0, 1), repeat=8))
        assert total(tuple(code & 1 for code in chosen)) == least
        assert level == [table.signed_levels[i] for i in trellis.indices(torch.tensor([chosen]))[0].tolist()]


@pytest.mark.parametrize(("bits", "nmse"), [(1, 0.3215), (2, 0.0902), (3, 0.0256)])
def test_error_on_a_gaussian(bits: int, nmse: float) -> None:
    """Below what any quantizer of single numbers can do: 0.3634, 0.1175 and 0.0345."""
    x = cases.content("gaussian", 1 << 18)
    assert lost_by(Trellis(bits), x) == pytest.approx(nmse, rel=0.01)


# Decibels below lloyd2. A block of `sparse` holds few non-zeros: rotated it is not Gaussian, and lloyd2 gains by that.
BELOW_LLOYD = {"gaussian": 1.1, "laplace": 1.1, "student3": 1.0, "hetero": 1.0, "sparse": 0.65}


@pytest.mark.parametrize("name", [*BELOW_LLOYD, *cases.thorough("gradient")])
def test_less_is_lost_than_by_lloyd(name: str) -> None:
    x = data.sample(name, 1 << 18)
    assert 10 * math.log10(lost_by(Lloyd(2), x) / lost_by(Trellis(2), x)) >= BELOW_LLOYD.get(name, 1.1)


def test_an_unbiased_scale_does_not_shrink() -> None:
    x = cases.content("gaussian", 1 << 16).double()
    slopes = []
    for scale in ("mmse", "unbiased"):
        codec = Trellis(2, scale=scale)
        slopes.append(float(cases.decoded(codec, cases.wire_of(codec, x.float()), x.numel()).double() @ x / (x @ x)))
    assert slopes[0] == pytest.approx(1 - 0.0902, abs=0.004)
    assert slopes[1] == pytest.approx(1, abs=0.004)


@pytest.mark.parametrize("algorithm", ["two_phase", "one_shot"])
@on_ranks(3)
def test_ranks_agree_on_sums(group: Group, algorithm: Any) -> list[float]:
    rows = [cases.content("gaussian", 3000, seed=rank) for rank in range(group.size())]
    x, mean = rows[group.rank()].clone(), torch.stack(rows).mean(0)
    thinwire.all_reduce(x, dist.ReduceOp.AVG, codec="trellis2", algorithm=algorithm, step=1)
    lost = (x - mean).square().sum() / mean.square().sum()
    assert lost < 0.25  # every part loses 0.09 of its power, as does the sum of the first phase
    return x.tolist()
