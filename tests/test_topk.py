"""topk: wires read from their description, what is kept, bytes, sums over ranks, and where it is refused."""

import functools
import math
import struct
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import thinwire
from cases import decoded, on_ranks, wire_of, wires_of
from replicas import Group, message_of
from thinwire import CodecError, TopK, WireError

FRACTIONS = (1 / 256, 0.02, 0.03125, 0.25)


def numbers(numel: int, seed: int = 0) -> Tensor:
    """Both signs, a heavy tail."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) ** 3


def by_hand(wire: bytes, numel: int) -> list[float]:
    """The numbers of a wire, from docs/internals/wire-format.md alone."""
    magic, version, kind, bits, variant, zero, block, _, key, told = struct.unpack_from("<2sBBBBHIIQQ", wire)
    assert (magic, version, kind, bits, zero, block, key, told) == (b"TW", 1, 4, 2, 0, 4096, 0, numel)
    kept = 16 * variant
    low_bits = int(math.log2(block / kept))
    marks, blocks = kept + (block >> low_bits), -(-numel // block)
    aligned = -(-2 * blocks // 16) * 16
    at = 32 + 2 * aligned
    planes = {8: (8,), 7: (4, 2, 1), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,)}[low_bits]

    def plane(width: int, count: int) -> list[list[int]]:
        nonlocal at
        each = count * width // 8
        rows = [wire[at + b * each : at + (b + 1) * each] for b in range(blocks)]
        at += blocks * each
        return [[row[e % each] >> width * (e // each) & (1 << width) - 1 for e in range(count)] for row in rows]

    codes = plane(2, kept)
    lows = [[0] * kept for _ in range(blocks)]
    shift = 0
    for width in planes:
        found = plane(width, kept)
        lows = [[a | b << shift for a, b in zip(*pair, strict=True)] for pair in zip(lows, found, strict=True)]
        shift += width
    out = [0.0] * (blocks * block)
    for b, row in enumerate(plane(1, marks)):
        levels = [struct.unpack("<f", b"\0\0" + wire[s + 2 * b : s + 2 * b + 2])[0] for s in (32, 32 + aligned)]
        for i, mark in enumerate(m for m, bit in enumerate(row) if bit):
            code = codes[b][i]
            out[b * block + ((mark - i) << low_bits | lows[b][i])] = levels[code & 1] * (-1 if code & 2 else 1)
    assert -(-at // 16) * 16 == len(wire)
    return out[:numel]


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_a_wire_is_what_its_description_says(fraction: float) -> None:
    codec = TopK(fraction)
    for numel in (1, 4095, 4097):
        wire = wire_of(codec, numbers(numel))
        assert decoded(codec, wire, numel).tolist() == by_hand(bytes(wire.tolist()), numel)
    assert wire_of(codec, numbers(0)).numel() == codec.wire_bytes(0) == 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_are_kept_and_the_first_of_equals(dtype: torch.dtype) -> None:
    codec = TopK(1 / 256)
    x = numbers(2 * 4096 + 7).to(dtype)
    y = decoded(codec, wire_of(codec, x), x.numel())
    for part, got in zip(x.float().split(4096), y.split(4096), strict=True):
        order = part.abs().sort(descending=True, stable=True).indices[:16]
        assert set(got.nonzero().view(-1).tolist()) == set(order.tolist())
        kept = part[order].abs()
        upper = kept > kept.mean()
        means = torch.where(upper, kept[upper].mean(), kept[~upper].mean())
        assert torch.allclose(got[order], part[order].sign() * means, rtol=2**-8)
    flat = torch.ones(4096, dtype=dtype)
    assert decoded(codec, wire_of(codec, flat), 4096).nonzero().view(-1).tolist() == list(range(16))


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_no_block_loses_more_than_its_power_and_few_numbers_lose_nothing(fraction: float) -> None:
    codec = TopK(fraction)
    x = torch.cat([numbers(4096), torch.zeros(4096), numbers(100, 1) * 1e30, torch.full((3996,), 3e38)])
    lost = x - decoded(codec, wire_of(codec, x), x.numel())
    for part, of_part in zip(x.split(4096), lost.split(4096), strict=True):
        assert of_part.double().square().sum() <= part.double().square().sum() * (1 + 1e-6)
    few = torch.zeros(4096)
    few[1000] = -0.75
    assert torch.equal(decoded(codec, wire_of(codec, few), 4096), few)


def test_residuals_take_up_what_was_lost_and_all_is_sent_in_the_end() -> None:
    codec = TopK(0.125)
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    residual, total = torch.zeros(5000), torch.zeros(5000)
    for _ in range(60):
        total += decoded(codec, wire_of(codec, x, residual=residual), 5000)
    assert torch.allclose(total + residual, 60 * x, rtol=1e-4, atol=1e-4)
    alone = (decoded(codec, wire_of(codec, x), 5000) - x).square().sum()
    assert (total / 60 - x).square().sum() < alone / 20


def test_a_block_with_nan_is_nan_and_leaves_its_residual() -> None:
    codec, x = TopK(), numbers(3 * 4096)
    x[5000] = math.inf
    residual = torch.ones(x.numel())
    wire = wire_of(codec, x, residual=residual)
    y = decoded(codec, wire, x.numel())
    assert y[4096:8192].isnan().all()
    assert y[:4096].isfinite().all()
    assert y[8192:].isfinite().all()
    assert torch.equal(residual[4096:8192], torch.ones(4096))
    assert not torch.equal(residual[:4096], torch.ones(4096))
    assert not codec.all_finite(wire[None], x.numel())


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_bytes_are_those_of_the_formula_and_places_near_their_entropy(fraction: float) -> None:
    codec = TopK(fraction)
    kept = codec.kept
    low_bits = int(math.log2(4096 / kept))
    bits = kept * (2 + low_bits + 1) + (4096 >> low_bits) + 32  # codes, places, two levels
    blocks = 64  # sections of 64 blocks need no padding
    assert codec.wire_bytes(blocks * 4096) == 32 + blocks * bits // 8
    entropy = (math.lgamma(4097) - math.lgamma(kept + 1) - math.lgamma(4097 - kept)) / math.log(2)
    assert 1 <= (bits - 2 * kept - 32) / entropy < (1.1 if fraction < 0.05 else 1.25)


def test_damaged_wires_are_refused() -> None:
    codec = TopK()
    wire = wire_of(codec, numbers(8192))
    broken = wire.clone()
    broken[-1] ^= 1  # a mark
    with pytest.raises(WireError, match="does not mark 128 numbers"):
        decoded(codec, broken, 8192)
    with pytest.raises(WireError, match="expected topk bits=2 variant=8"):
        decoded(codec, wire_of(TopK(0.02), numbers(8192))[: wire.numel()].resize_(wire.numel()), 8192)
    with pytest.raises(CodecError, match="not encoded again"):
        codec.recode(wire[None], wire.clone(), 8192)


@pytest.mark.parametrize("world", [2, 3])
@on_ranks()
def test_sums_are_those_of_the_decoded_wires(group: Group, world: int) -> None:
    numel, codec = 3 * 4096 + 100, TopK()
    each, want = [numbers(numel, rank) for rank in range(world)], torch.empty(numel)
    codec.decode_sum(wires_of(codec, each), want)
    one_shot, auto, wrapped = (each[group.rank()].clone() for _ in range(3))
    rows = torch.empty(world * numel)
    thinwire.all_reduce(one_shot, codec="topk", algorithm="one_shot")
    thinwire.all_reduce(auto, codec="topk", algorithm="auto")
    thinwire.all_gather_single(rows, each[group.rank()], codec="topk", algorithm="compressed")
    thinwire.collectives.auto_quantize(dist.all_reduce, "topk")(wrapped)
    assert all(torch.equal(found, want) for found in (one_shot, wrapped))
    assert torch.equal(functools.reduce(torch.add, rows.view(world, numel)), want)
    assert torch.equal(auto, want) or torch.allclose(auto, sum(each), atol=1e-4)
    assert [one.algorithm for one in thinwire.measure(wrapped, codec="topk").estimates] == ["plain", "one_shot"]


def averaged(algorithm: str) -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    thinwire.compress_ddp(model, "topk", feedback="classic", algorithm=algorithm)  # type: ignore[arg-type]
    model(torch.randn(2, 64)).sum().backward()


@on_ranks(2)
def test_where_sums_would_be_encoded_again_it_is_refused(group: Group) -> None:
    x = numbers(8192)
    calls: list[tuple[Any, str]] = [
        (lambda: thinwire.all_reduce(x, codec="topk", algorithm="two_phase"), "algorithm='two_phase'"),
        (lambda: thinwire.broadcast(x, 0, codec="topk", algorithm="compressed"), "broadcast"),
        (lambda: thinwire.all_to_all_single(x.clone(), x, codec="topk", algorithm="compressed"), "all_to_all_single"),
        (lambda: averaged("two_phase"), "algorithm='two_phase'"),
        (lambda: thinwire.compress_fsdp(fully_shard(torch.nn.Linear(64, 64)), "int8", "topk"), "weights="),
    ]
    for call, place in calls:
        message = message_of(call)
        assert "codec topk sends only the largest numbers, which only one_shot sums support" in message, message
        assert place in message, message
