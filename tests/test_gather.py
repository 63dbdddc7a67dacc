"""Quantize before gather: wires of codes decode to the fake-quantized weight, gradients come back by LSQ's rule."""

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from cases import CUDA, GARBAGE, ROUND, assert_same, generated, needs_cuda, no_host_sync, over, seeded
from thinwire.qat import LSQ, LSQPlus, WeightCodes
from thinwire.qat.codes import packed_bytes

PLACES: list[dict[str, Any]] = [{"axis": 0}, {"axis": None}, {"axis": 1}, {"axis": -1}, {"group": 4}]


class Case(NamedTuple):
    """A weight and its quantizer."""

    weight: Tensor
    quantizer: LSQ

    def quantized(self) -> Tensor:
        """What a single process computes with."""
        rows = self.weight.flatten(1) if self.quantizer.group else self.weight
        return self.quantizer(rows).view_as(self.weight)


def case(
    shape: tuple[int, ...], bits: int, where: dict[str, Any], *, shifted: bool, dtype: torch.dtype = torch.float32
) -> Case:
    weight = torch.randn(shape, generator=seeded(*shape, bits), dtype=torch.float64).to(dtype)
    weight.view(-1)[::5] *= 50  # beyond the range
    quantizer = (LSQPlus if shifted else LSQ)(bits, symmetric=not shifted, process_group="local", **where).to(dtype)
    return Case(weight, quantizer.initialize(weight.flatten(1) if quantizer.group else weight))


def codecs(one: Case, world: int) -> list[WeightCodes]:
    return [WeightCodes(one.quantizer, one.weight.shape, rank=rank, world=world) for rank in range(world)]


def gathered(one: Case, world: int) -> Tensor:
    """The wires of all ranks, at odd addresses and over garbage."""
    all_codecs = codecs(one, world)
    length = all_codecs[0].wire_bytes
    wires = [torch.full((length + 1,), GARBAGE, dtype=torch.uint8)[1:] for _ in range(world)]
    for codec, wire in zip(all_codecs, wires, strict=True):
        codec.encode(one.weight[codec.rows(codec.rank)], wire)
    return torch.stack(wires)


def scales(one: Case) -> list[Tensor]:
    return [p for p in (one.quantizer.scale, one.quantizer.offset) if p is not None]


# --- one process in the place of all ranks: test_fsdp_codes.py has them -----------------------------------------------

each_case = given(
    shape=st.tuples(st.integers(1, 7), st.sampled_from([4, 12])) | st.tuples(st.integers(1, 4), st.just(2), st.just(6)),
    bits=st.integers(2, 8),
    where=st.sampled_from(PLACES),
    shifted=st.booleans(),
    world=st.integers(1, 5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
few = generated(25)


@each_case
@few
def test_wires_decode_to_the_fake_quantized_weight(
    shape: tuple[int, ...], bits: int, where: dict[str, Any], shifted: bool, world: int, dtype: torch.dtype
) -> None:
    one = case(shape, bits, where, shifted=shifted, dtype=dtype)
    wires_WN = gathered(one, world)
    out = torch.empty(shape, dtype=dtype)
    codecs(one, world)[0].decode_all(wires_WN, out)
    assert_same(out, one.quantized().detach())
    narrow = torch.empty(shape, dtype=torch.bfloat16)
    codecs(one, world)[-1].decode_all(wires_WN, narrow)  # as FSDP2's param_dtype asks for it
    assert_same(narrow, one.quantized().detach().to(torch.bfloat16))


@each_case
@few
def test_gradients_of_shards_are_those_of_the_whole(
    shape: tuple[int, ...], bits: int, where: dict[str, Any], shifted: bool, world: int, dtype: torch.dtype
) -> None:
    one = case(shape, bits, where, shifted=shifted, dtype=dtype)
    grad = torch.randn(shape, generator=seeded(9)).to(dtype)
    parts = [
        codec.gradients(one.weight[codec.rows(r)], grad[codec.rows(r)]) for r, codec in enumerate(codecs(one, world))
    ]
    check_gradients(one, grad, torch.cat([part.weight for part in parts]), *summed(parts))


def summed(parts: list[Any]) -> tuple[Tensor, Tensor | None]:
    offsets = [part.offset for part in parts if part.offset is not None]
    return torch.stack([part.scale for part in parts]).sum(0), torch.stack(offsets).sum(0) if offsets else None


def check_gradients(one: Case, grad: Tensor, weight: Tensor, scale: Tensor, offset: Tensor | None) -> None:
    """Against a single process: exactly for the weight, within the rounding of two sums for scale and offset.

    A sum of n products of at most |g| * reach in fp32, in any order and twice, differs by 2 * (n + 2) roundings.
    """
    whole = one.weight.clone().requires_grad_()
    Case(whole, one.quantizer).quantized().backward(grad)
    assert whole.grad is not None
    assert_same(weight, whole.grad)
    quantizer = one.quantizer
    n = one.weight.numel() // len(one.quantizer.scale)
    reach = max(-quantizer.quant_min, quantizer.quant_max)
    factor = 1 / (n * quantizer.quant_max) ** 0.5
    sizes = quantizer.by_channel(grad.flatten(1) if quantizer.group else grad).abs().sum(1)
    bound = 2 * (n + 2) * ROUND * reach * factor * sizes
    for got, parameter in ((scale, quantizer.scale), (offset, quantizer.offset)):
        assert (got is None) == (parameter is None)
        if got is not None and parameter is not None and parameter.grad is not None:
            assert got.dtype == parameter.dtype
            assert ((got - parameter.grad).abs() <= bound).all()
            parameter.grad = None


@pytest.mark.parametrize("where", [{"axis": 0}, {"group": 4}], ids=str)
def test_a_quantizer_may_hold_the_scales_of_its_rows_only(where: dict[str, Any]) -> None:
    one = case((5, 8), 4, where, shifted=True)
    world = 3
    wires_WN = gathered(one, world)
    grad = torch.randn(5, 8, generator=seeded(1))
    per_row = len(one.quantizer.scale) // 5
    for whole in codecs(one, world):
        rows = whole.rows(whole.rank)
        part = case((5, 8), 4, where, shifted=True).quantizer
        for name in ("scale", "offset"):
            held = getattr(one.quantizer, name).detach()[rows.start * per_row : rows.stop * per_row]
            setattr(part, name, nn.Parameter(held.clone()))
        own = WeightCodes(part, (5, 8), rank=whole.rank, world=world)
        wire = torch.empty(own.wire_bytes, dtype=torch.uint8)
        own.encode(one.weight[rows], wire)
        assert_same(wire, wires_WN[whole.rank])
        got, want = own.gradients(one.weight[rows], grad[rows]), whole.gradients(one.weight[rows], grad[rows])
        assert_same(got.scale, want.scale[rows.start * per_row : rows.stop * per_row])
        assert want.scale.count_nonzero() <= len(got.scale)


def test_the_bytes_of_a_wire_are_scales_and_bits() -> None:
    for (bits, shifted), (where, count) in itertools.product(
        [(2, False), (3, True), (4, False), (8, True)],
        [({"axis": 0}, 2), ({"axis": None}, 1), ({"axis": 1}, 40), ({"group": 8}, 10)],
    ):
        codec = codecs(case((5, 40), bits, where, shifted=shifted), 3)[0]  # two rows per rank, and one
        assert codec.wire_bytes == 4 * count * (1 + shifted) + 80 * bits // 8
    assert packed_bytes(4096 * 1024, 4) == 4096 * 1024 // 2


def test_what_a_short_shard_leaves_is_zero() -> None:
    wires_WN = gathered(case((4, 8), 4, {"axis": 0}, shifted=False), 3)  # two rows, two rows, none
    assert not wires_WN[2].any()
    assert [codec.rows(codec.rank) for codec in codecs(case((4, 8), 4, {"axis": 0}, shifted=False), 3)] == [
        slice(0, 2),
        slice(2, 4),
        slice(4, 4),
    ]


ALL = slice(None)
SHARD = slice(0, 2)
CHANNELS = [(1, ALL), (SHARD, ALL), (SHARD, 5), (SHARD, 5), (1, slice(4, 8))]  # of element (1, 5) in rank 0's shard


@over("bad", [torch.nan, torch.inf, -torch.inf])
@over("place", list(zip(PLACES, CHANNELS, strict=True)))
def test_what_is_not_finite_is_seen_in_its_channel_and_nowhere_else(
    place: tuple[dict[str, Any], tuple[Any, Any]], bad: float
) -> None:
    where, channel = place
    one = case((4, 8), 4, where, shifted=False)
    out = torch.empty(4, 8)
    want = one.quantized().detach()
    want[channel] = torch.nan
    one.weight[1, 5] = bad
    codecs(one, 2)[0].decode_all(gathered(one, 2), out)
    assert_same(out, want)


def test_a_scale_without_the_papers_factor() -> None:
    class Plain(LSQ):
        scale_gradient = False

    weight = torch.randn(3, 8, generator=seeded(2))
    grad = torch.randn(3, 8, generator=seeded(3))
    plain, usual = (kind(4, axis=0).initialize(weight) for kind in (Plain, LSQ))
    got, want = (WeightCodes(q, (3, 8), rank=0, world=1).gradients(weight, grad).scale for q in (plain, usual))
    torch.testing.assert_close(got / (8 * 7) ** 0.5, want, rtol=4 * ROUND, atol=0)


# --- what cannot be ---------------------------------------------------------------------------------------------------


def test_bad_arguments() -> None:
    quantizer = case((4, 8), 4, {"axis": 0}, shifted=False).quantizer
    with pytest.raises(ValueError, match=r"rank must be within 0\.\.1, got 2"):
        WeightCodes(quantizer, (4, 8), rank=2, world=2)
    with pytest.raises(ValueError, match=r"no scale yet: run qat\.calibrate"):
        WeightCodes(LSQ(4, axis=0), (4, 8), rank=0, world=2)
    with pytest.raises(ValueError, match=r"has 6 scales, 3 of them of rank 0; the quantizer holds 4"):
        WeightCodes(quantizer, (6, 8), rank=0, world=2)
    with pytest.raises(ValueError, match="nothing to send"):
        WeightCodes(quantizer, (4, 0), rank=0, world=2)
    codec = WeightCodes(quantizer, (4, 8), rank=0, world=2)
    wire = torch.empty(codec.wire_bytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"shard of rank 0 must be of shape \(2, 8\), got \(4, 8\)"):
        codec.encode(torch.zeros(4, 8), wire)
    with pytest.raises(ValueError, match=r"got \(2, 7\)"):
        codec.gradients(torch.zeros(2, 8), torch.zeros(2, 7))
    with pytest.raises(ValueError, match=rf"{codec.wire_bytes} bytes \(uint8\), got \(1,\)"):
        codec.encode(torch.zeros(2, 8), wire[:1])
    with pytest.raises(ValueError, match="uint8"):
        codec.decode(wire.view(torch.int8), torch.zeros(2, 8))
    with pytest.raises(ValueError, match=r"contiguous and of shape \(4, 8\)"):
        codec.decode_all(torch.stack([wire, wire]), torch.empty(8, 4).t())


@pytest.mark.cuda
@needs_cuda[1]
def test_no_host_sync_on_a_gpu() -> None:
    one = case((6, 16), 4, {"axis": 0}, shifted=True)
    weight = one.weight.to(CUDA)
    quantizer = one.quantizer.to(CUDA)
    codec = WeightCodes(quantizer, weight.shape, rank=0, world=1)
    wire = torch.empty(codec.wire_bytes, dtype=torch.uint8, device=CUDA)
    out = torch.empty_like(weight)
    codec.gradients(weight, weight)  # kernels are compiled
    with no_host_sync():
        codec.encode(weight, wire)
        codec.decode_all(wire.unsqueeze(0), out)
        codec.gradients(weight, out)
    assert_same(out.cpu(), case((6, 16), 4, {"axis": 0}, shifted=True).quantized().detach())
