"""What a codec promises: error bounds, NaN and zero, sums, residuals, buffers, determinism, length of the wire."""

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import cases
from cases import ROUND, over
from thinwire import BlockInt, ByName, BySize, Cast, Codec, CodecError, Identity, Lloyd, codec as make
from thinwire.kernels.schema import LLOYD

pytestmark = pytest.mark.usefixtures("served")
LLOYD_MAX = {1: 0.36338, 2: 0.11748, 3: 0.03455, 4: 0.009501}  # NMSE of the optimal scalar quantizer of a Gaussian
each_codec = over("codec", cases.CODECS)
each_blocked = over("codec", cases.BLOCKED)
one_of_each = over("codec", cases.ONE_OF_EACH)


# --- error ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["PLAIN", "CASTS", "INTEGERS", "LLOYDS"])
def test_error_is_within_the_bound_of_the_definition(kind: str) -> None:
    """Every content of fp32, by turns of 16 bits at the ends of blocks; tests/test_properties.py mixes them further."""
    for codec in getattr(cases, kind):
        block = cases.block_of(codec)
        for i, name in enumerate(cases.CONTENTS):
            edge = (1, block - 1, block, block + 1, 3 * block + 5)[i % 5]
            assert_within_bound(codec, cases.content(name, 1003, seed=i), step=i)
            assert_within_bound(codec, cases.content(name, edge, cases.DTYPES[i % 3], seed=i), step=i)
        for dtype in cases.DTYPES:
            assert_within_bound(codec, extremes(dtype))


def assert_within_bound(codec: Codec, x: Tensor, step: int = 0) -> None:
    wire = cases.wire_of(codec, x, step=step)
    y = cases.decoded(codec, wire, x.numel(), x.dtype if codec == Identity() else torch.float32)
    cases.assert_within_bound(codec, x, y.float())


def extremes(dtype: torch.dtype) -> Tensor:
    info = torch.finfo(dtype)
    return torch.tensor([info.max, info.min, info.tiny, info.smallest_normal, info.max / 3, 0, -1], dtype=dtype)


@over("codec", cases.INTEGERS)
def test_integers_use_their_whole_range(codec: BlockInt) -> None:
    """Peak and minimum come back to half a step: the scale is not wider than the block needs."""
    x = torch.linspace(-1, 1, codec.block)
    y = cases.decoded(codec, cases.wire_of(codec, x), codec.block)
    levels = (1 << codec.bits) - (codec.mode == "symmetric")
    step = 2 / (levels - 1) * (1 + 2.0**-7) + (2.0**-7 if codec.mode == "affine" else 0)
    assert y.unique().numel() <= levels
    assert y.max() >= 1 - step
    assert y.min() <= -1 + step


@over("name", ["fp16", "e4m3", "e5m2"])
def test_casts_are_exact_on_numbers_of_their_format(name: str) -> None:
    dtype = {"fp16": torch.float16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[name]
    count = 1 << 8 * dtype.itemsize
    codes = torch.arange(count, dtype=torch.int32).to(torch.int16 if count > 256 else torch.uint8)
    x = codes.view(dtype).float()
    x = x[x.isfinite() & (x.abs() < 2.0 ** (8 if name == "e4m3" else 15))]  # the peak is brought to that top
    codec = make(f"{name}:block={-(-x.numel() // 8) * 8}")
    for factor in (1.0, 2.0**100, 2.0**-90):
        y = cases.decoded(codec, cases.wire_of(codec, x * factor), x.numel())
        assert torch.equal(y, x * factor)


# --- rounding and scale without bias ----------------------------------------------------------------------------------
@over("bits", range(2, 9))
@over("mode", ["symmetric", "affine"])
def test_stochastic_rounding_is_unbiased(bits: int, mode: str) -> None:
    """Mean error over steps and places within 5 standard errors; a fraction f of a step has variance f * (1 - f)."""
    codec = BlockInt(bits, 64, mode, "stochastic")
    steps, places, n = 50, 20, 256
    half = (1 << bits - 1) - 1
    fraction = torch.rand(n, generator=cases.seeded(bits)) * 0.8 + 0.1
    x = torch.randint(-half, half, (n,), generator=cases.seeded(bits, 1)) + fraction
    ends = (-half - 1.0, half) if mode == "affine" else (-half, half)
    x[0::64], x[1::64] = ends  # a step of exactly 1, so that the fractions are those above
    fraction[0::64] = fraction[1::64] = 0
    rows = torch.stack(_decoded_at_steps(codec, x.repeat(places), steps)).view(-1, n)
    errors = (rows - x).double()
    assert errors.abs().max() <= 1
    standard_error = (fraction * (1 - fraction) / len(rows)).sqrt().double()
    assert (errors.mean(0).abs() <= 5 * standard_error + 2.0**-20).all()
    for direction in (torch.ones(n), x.sign()):  # together: neither upwards nor toward zero
        assert (errors.mean(0) * direction).sum().abs() <= 5 * standard_error.norm() + n * 2.0**-20
    assert errors.std(0).sum() >= 0.9 * (fraction * (1 - fraction)).sqrt().sum()  # and it does vary


def test_recoding_rounds_without_bias_too() -> None:
    codec = BlockInt(3, 64, "affine", "stochastic")
    steps, n = 400, 256
    wires_WN = cases.wires_of(codec, [cases.content("gaussian", n, seed=s) for s in range(3)])
    target = cases.summed(codec, wires_WN, n, scale=1 / 3)
    means = torch.stack([cases.decoded(codec, cases.recoded(codec, wires_WN, n, 1 / 3, s), n) for s in range(steps)])
    step_K1 = cases.error_bound(codec, cases.blocks_of(target, 64))  # at least one step
    standard_error = (step_K1 / 2 / math.sqrt(steps)).reshape(-1)  # a fraction of 1/2 varies most
    assert ((means.double().mean(0) - target).abs() <= 5 * standard_error).all()


@over("rotate", [True, False])
@over("bits", LLOYD_MAX)
def test_lloyd_reaches_lloyd_max_on_a_gaussian(bits: int, rotate: bool) -> None:
    n = 1 << 20  # the sampling error of the NMSE is below 0.3 %
    x = cases.content("gaussian", n)
    y = cases.decoded(Lloyd(bits, rotate=rotate), cases.wire_of(Lloyd(bits, rotate=rotate), x), n)
    nmse = float((x - y).double().square().sum() / x.double().square().sum())
    assert nmse == pytest.approx(LLOYD_MAX[bits], rel=0.01)


@over("bits", LLOYD_MAX)
def test_unbiased_lloyd_is_unbiased(bits: int) -> None:
    """Over steps, hence rotations: decoded = slope * x + noise with slope 1, and the noise averages away."""
    x = cases.content("gaussian", 4096)
    steps = 200
    ys = {
        scale: torch.stack(_decoded_at_steps(Lloyd(bits, 256, scale=scale), x, steps)).double()  # type: ignore[arg-type]
        for scale in ("unbiased", "mmse")
    }
    slopes = {scale: ys[scale] @ x.double() / x.double().square().sum() for scale in ys}
    standard_error = {scale: float(s.std() / math.sqrt(steps)) for scale, s in slopes.items()}
    assert abs(slopes["unbiased"].mean() - 1) <= 5 * standard_error["unbiased"]
    # Least squares shrinks by its own error, near Lloyd-Max: that the test above can tell them apart.
    assert slopes["mmse"].mean() == pytest.approx(1 - LLOYD_MAX[bits], abs=0.02 * LLOYD_MAX[bits] + 0.001)
    errors = ys["unbiased"] - x
    chi_square = (errors.mean(0).square() / (errors.var(0) / steps)).mean()  # 1 without bias
    assert abs(chi_square - 1) <= 5 * math.sqrt(2 / 4096) + 2 / steps


def _decoded_at_steps(codec: Codec, x: Tensor, steps: int) -> list[Tensor]:
    return [cases.decoded(codec, cases.wire_of(codec, x, step=step), x.numel()) for step in range(steps)]


# --- NaN, Inf, zero ---------------------------------------------------------------------------------------------------
@each_blocked
def test_a_bad_block_is_nan_and_its_neighbors_unharmed(codec: Codec) -> None:
    """Every bad number at the start, in the middle and at the end of every other block, and in the short one."""
    block = cases.block_of(codec)
    n = 19 * block + max(1, block // 2 - 3)
    clean = cases.content("gaussian", n)
    want = cases.decoded(codec, cases.wire_of(codec, clean), n)
    bad = (math.nan, math.inf, -math.inf)
    spots = [(2 * i * block + (0, block // 2, block - 1)[i % 3], bad[i // 3]) for i in range(9)]
    for last in bad:
        x = clean.clone()
        hit = torch.zeros(n, dtype=torch.bool)
        for at, value in [*spots, (n - 1, last)]:
            x[at] = value
            hit[at // block * block : (at // block + 1) * block] = True
        y = cases.decoded(codec, cases.wire_of(codec, x), n)
        assert y[hit].isnan().all()
        cases.assert_same(y[~hit], want[~hit], "neighbors")


@each_codec
def test_zero_blocks_stay_zero(codec: Codec) -> None:
    block = cases.block_of(codec)
    x = torch.cat((cases.content("zeros", block), cases.content("gaussian", block), cases.content("zeros", block + 3)))
    x[-1] = -0.0
    wires_WN = cases.wires_of(codec, [x, -x, x], step=4)
    for y in (
        cases.decoded(codec, wires_WN[0], x.numel()),
        cases.summed(codec, wires_WN, x.numel(), scale=1 / 3),
        cases.decoded(codec, cases.recoded(codec, wires_WN, x.numel(), 1 / 3), x.numel()),
    ):
        assert (y[:block] == 0).all()
        assert (y[2 * block :] == 0).all()
        assert (y[block : 2 * block] != 0).any() or block == 1


@over("dtype", [torch.bfloat16, torch.float16])
@each_blocked
def test_what_fits_a_narrow_dtype_stays_finite_in_it(codec: Codec, dtype: torch.dtype) -> None:
    most, block = torch.finfo(dtype).max, cases.block_of(codec)
    lows = (torch.linspace(-1, 1, 200, dtype=torch.float64) * most).to(dtype)
    x = torch.stack((torch.full_like(lows, most), lows, lows), 1).repeat(1, -(-block // 3))[:, :block].reshape(-1)
    if codec == Lloyd(1, block=1024, scale="unbiased"):
        return  # one bit, stretched: its error goes past LLOYD_REACH
    assert cases.decoded(codec, cases.wire_of(codec, x), x.numel(), dtype).isfinite().all()


def test_a_sum_that_overflows_a_narrow_dtype_is_inf() -> None:
    wires_WN = cases.wires_of(BlockInt(8), [torch.full((9,), 65504.0, dtype=torch.float16)] * 2)
    assert cases.summed(BlockInt(8), wires_WN, 9, torch.float16).tolist() == [math.inf] * 9
    assert cases.summed(BlockInt(8), wires_WN, 9, torch.float16, scale=0.5).tolist() == [65504.0] * 9


@each_blocked
@over("name", ["1e-40", "subnormals", "1e-21"])
def test_tiny_blocks_are_quantized_like_any_other(codec: Codec, name: str) -> None:
    """A power of two does not change a code: a block keeps its relative error down to where fp32 has no more digits."""
    exponent = {"1e-40": 133, "subnormals": 149, "1e-21": 70}[name]
    x = cases.content(name, 600)
    y = cases.decoded(codec, cases.wire_of(codec, x), 600)
    z = cases.decoded(codec, cases.wire_of(codec, (x.double() * 2.0**exponent).float()), 600)
    assert ((y.double() * 2.0**exponent - z).abs() <= 2.0 ** (exponent - 150) + z.abs() * 16 * ROUND).all()


# --- sums and recoding ------------------------------------------------------------------------------------------------
@each_codec
def test_decode_sum_adds_in_rank_order(codec: Codec) -> None:
    n, block = 1003, cases.block_of(codec)
    wires_WN = cases.wires_of(codec, [cases.content("gaussian", n, seed=rank) for rank in range(5)])
    parts = [cases.decoded(codec, wire, n) for wire in wires_WN]
    manual = parts[0]
    for part in parts[1:]:
        manual = manual + part
    got = cases.summed(codec, wires_WN, n)
    rotated = isinstance(codec, Lloyd) and codec.rotate
    affine = isinstance(codec, BlockInt) and codec.mode == "affine"
    if not rotated and not affine:
        cases.assert_same(got, manual, "sum")
        return
    # Rotated blocks are added before they are rotated back, minima before codes: other roundings of the same numbers.
    # log2(block) of them in a rotation, one per rank in a sum, each of at most the norm of what is added (of its peak).
    magnitudes = sum(cases.blocks_of(part, block).norm(dim=1, keepdim=True) for part in parts)
    roundings = 2 * (math.log2(block) + 2 * len(parts) + 3)
    assert ((cases.blocks_of(got - manual, block)).abs() <= roundings * ROUND * magnitudes).all()


@each_codec
@over("scale", [1.0, 1 / 3])
def test_recode_is_encode_of_the_sum(codec: Codec, scale: float) -> None:
    n = 1024
    wires_WN = cases.wires_of(codec, [cases.content("gaussian", n, seed=rank) for rank in range(3)])
    total = cases.summed(codec, wires_WN, n, scale=scale)
    wire = cases.recoded(codec, wires_WN, n, scale)
    if isinstance(codec, (Identity, Cast)) or (isinstance(codec, BlockInt) and codec.rounding == "nearest"):
        cases.assert_same(wire, cases.wire_of(codec, total), "wire")
    y = cases.decoded(codec, wire, n)
    cases.assert_within_bound(codec, total, y)
    if isinstance(codec, Lloyd):
        assert_fitted(codec, total.double(), y.double())


def assert_fitted(codec: Lloyd, x: Tensor, y: Tensor) -> None:
    """y points the way of x, as long as its scale promises: <x, y> is <y, y> by least squares, unbiased <x, x>."""
    cosine_2 = float((x @ y) ** 2 / (x @ x) / (y @ y))
    assert x @ y > 0
    assert cosine_2 >= 1 - 2 * LLOYD_MAX[codec.bits]  # sums of few levels are not quite Gaussian
    slack = 2.0**-8 + 1 / (2 * LLOYD[codec.bits].grid)  # the scale's rounding, half a cell of the grid
    assert float(x @ y / (x @ x)) == pytest.approx(cosine_2 if codec.scale == "mmse" else 1, rel=slack)


@over("bits", LLOYD_MAX)
def test_recoding_a_rotated_wire_loses_nothing_twice(bits: int) -> None:
    """The wire of one wire's sum is that wire: its levels are a fixed point of the least-squares scale."""
    codec, n = Lloyd(bits, 256), 1024
    wire = cases.wire_of(codec, cases.content("gaussian", n), step=9)
    once, twice = (cases.decoded(codec, w, n) for w in (wire, cases.recoded(codec, wire[None], n)))
    cosine = torch.nn.functional.cosine_similarity(once.double(), twice.double(), dim=0)
    assert 1 - cosine.square() <= LLOYD_MAX[bits] / 4  # a fresh rotation would lose LLOYD_MAX


def test_sums_that_no_single_block_could_hold() -> None:
    """Huge wires that cancel, tiny ones that add up, and wires of unlike size in one sum."""
    n = 64
    huge, tiny, one = torch.full((n,), 3e38), torch.full((n,), 3e-41), torch.ones(n)
    for codec in (BlockInt(8), Cast("fp16"), Cast("e5m2"), Lloyd(4, rotate=False)):
        wires_WN = cases.wires_of(codec, [huge, huge, -huge, -huge, tiny, tiny, tiny, one, one])
        assert (cases.summed(codec, wires_WN[:4], n) == 0).all()
        average = cases.summed(codec, wires_WN[:2], n, scale=0.5)
        cases.assert_same(average, cases.decoded(codec, wires_WN[0], n), str(codec))
        thrice = 3 * cases.decoded(codec, wires_WN[4], n).double()
        assert ((cases.summed(codec, wires_WN[4:7], n) - thrice).abs() <= 3 * cases.SMALLEST).all()
        cases.assert_same(cases.summed(codec, wires_WN[6:], n), 2 * cases.decoded(codec, wires_WN[7], n), str(codec))


# --- residual ---------------------------------------------------------------------------------------------------------
@each_codec
def test_wire_and_residual_together_are_the_input(codec: Codec) -> None:
    for dtype in cases.DTYPES:
        n = 1003
        x = cases.mixed(n, cases.block_of(codec), dtype, 0, seed=11)
        before = cases.mixed(n, cases.block_of(codec), torch.float32, 0, seed=11).clamp(-1e30, 1e30) * 0.01
        residual = before.clone()
        wire = cases.wire_of(codec, x, step=2, residual=residual)
        carried = x + before
        out_dtype = dtype if codec == Identity() else torch.float32
        y = cases.decoded(codec, wire, n, out_dtype).float()
        want = torch.where(y.isfinite(), carried - y, before)
        cases.assert_same(residual, want, f"{dtype} residual")


@each_codec
def test_a_bad_block_leaves_its_residual_untouched(codec: Codec) -> None:
    block = cases.block_of(codec)
    n = 2 * block + 3
    for place, value in ((0, math.nan), (n - 1, math.inf)):
        for spoiled in ("x", "residual"):
            x, residual = cases.content("gaussian", n), cases.content("gaussian", n, seed=1)
            (x if spoiled == "x" else residual)[place] = value
            before = residual.clone()
            cases.wire_of(codec, x, residual=residual)
            hit = torch.arange(n) // block == place // block
            cases.assert_same(residual[hit], before[hit], f"{value} in {spoiled}")
            assert (residual[~hit] != before[~hit]).any()


# --- buffers ----------------------------------------------------------------------------------------------------------
@one_of_each
def test_strides_do_not_matter(codec: Codec) -> None:
    base = cases.content("gaussian", 2 * 30 * 17).view(30, 34)
    views = {"transposed": base.t(), "every other": base[:, ::2], "row": base[3], "repeated": base[:1].expand(5, 34)}
    for what, x in views.items():
        wire = cases.wire_of(codec, x)
        cases.assert_same(wire, cases.wire_of(codec, x.contiguous()), what)
        flat = cases.decoded(codec, wire, x.numel())
        room = torch.full((x.shape[0], 3 * x.shape[-1]) if x.dim() == 2 else (3 * x.shape[0],), 7.0)
        out = room[..., 1::3]
        codec.decode(wire, out)
        cases.assert_same(out, flat.view(x.shape), f"out, {what}")
        assert (room[..., ::3] == 7).all()
        assert (room[..., 2::3] == 7).all()
        residual, straight = torch.ones(x.shape), torch.ones(x.shape)
        cases.wire_of(codec, x, residual=residual)
        cases.wire_of(codec, x.contiguous(), residual=straight)
        cases.assert_same(residual, straight, f"residual, {what}")


@one_of_each
def test_negated_views_are_read_and_written_as_numbers(codec: Codec) -> None:
    x, out = torch._neg_view(cases.content("gaussian", 300)), torch._neg_view(torch.zeros(300))
    wire = cases.wire_of(codec, x)
    cases.assert_same(wire, cases.wire_of(codec, x.clone()))
    codec.decode(wire, out)
    cases.assert_same(out.clone(), cases.decoded(codec, wire, 300))


@one_of_each
def test_autograd_learns_of_what_was_written(codec: Codec) -> None:
    """A tensor saved for backward and then written into must be refused there, not read."""
    x = torch.ones(30)
    out = torch.ones(30, requires_grad=True).clone()
    residual, wire = torch.zeros(30), cases.wire_of(codec, x)
    versions = [t._version for t in (wire, residual)]
    codec.encode(x, wire, residual=residual)
    assert [t._version for t in (wire, residual)] > versions
    squared = out.square()
    codec.decode(wire, out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.sum().backward()


@over("codec", [c for c in cases.ONE_OF_EACH if c != Identity()])
def test_output_is_rounded_once_into_its_dtype(codec: Codec) -> None:
    wires_WN = cases.wires_of(codec, [cases.content("gaussian", 300, seed=rank) for rank in range(2)])
    want = cases.summed(codec, wires_WN, 300, scale=1 / 3)
    for dtype in (torch.bfloat16, torch.float16):
        cases.assert_same(cases.summed(codec, wires_WN, 300, dtype, 1 / 3), want.to(dtype), str(dtype))


def test_identity_is_exact_in_every_dtype() -> None:
    for dtype in (*cases.DTYPES, torch.float64):
        x = (torch.randn(1001, dtype=torch.float64, generator=cases.seeded(5)) * 1e3).to(dtype)
        x[:4] = torch.tensor([math.nan, -math.inf, -0.0, torch.finfo(dtype).max], dtype=dtype)
        wire = cases.wire_of(Identity(), x)
        cases.assert_same(cases.decoded(Identity(), wire, 1001, dtype), x, str(dtype))
        assert Identity().wire_bytes(1001, dtype) == 32 + -(-1001 * dtype.itemsize // 16) * 16
    xs = [torch.randn(500, dtype=torch.float64, generator=cases.seeded(rank)) for rank in range(3)]
    for scale in (1.0, 1 / 3):
        got = cases.summed(Identity(), cases.wires_of(Identity(), xs), 500, torch.float64, scale)
        cases.assert_same(got, (xs[0] + xs[1] + xs[2]) * scale, "doubles are added in double")
    residual = torch.full((500,), 2.0**-20)
    wire = cases.wire_of(Identity(), xs[0], residual=residual)
    cases.assert_same(cases.decoded(Identity(), wire, 500, torch.float64), xs[0] + 2.0**-20, "wire of x + residual")
    cases.assert_same(residual, torch.zeros(500), "nothing was lost")


@over("codec", [Cast("bf16"), *cases.CASTS])
def test_casts_take_doubles_through_fp32(codec: Codec) -> None:
    x = torch.randn(700, dtype=torch.float64, generator=cases.seeded(6))
    wire = cases.wire_of(codec, x)
    cases.assert_same(wire, cases.wire_of(codec, x.float()))
    out = cases.decoded(codec, wire, 700, torch.float64)
    cases.assert_same(out, cases.decoded(codec, wire, 700).double())


@over("codec", [BlockInt(8), Lloyd(4), Identity(), Cast("bf16"), Cast("e4m3")])
@over("dtype", [torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(codec: Codec, dtype: torch.dtype) -> None:
    said = r"float64, got"
    if isinstance(codec, BlockInt | Lloyd):
        other = "codec 'none'" if dtype == torch.float64 else "algorithm='plain'"
        said = f"takes float32, bfloat16, float16, got {dtype}: .* use {other}"
    elif dtype == torch.float64:
        return
    x, wire = torch.zeros(10, dtype=dtype), torch.zeros(codec.wire_bytes(10), dtype=torch.uint8)
    for act in (lambda: codec.encode(x, wire), lambda: codec.decode(wire, x), lambda: codec.wire_bytes(10, dtype)):
        with pytest.raises(CodecError, match=said):
            act()


def test_misuse_is_refused() -> None:
    int8, x, wire = BlockInt(8), torch.zeros(10), cases.wire_of(BlockInt(8), torch.ones(10))
    residuals = (
        (torch.zeros(10, dtype=torch.bfloat16), "float32 of shape"),
        (torch.zeros(11), "float32 of shape"),
        (torch.zeros(10, device="meta"), "on cpu"),
        (torch.zeros(20)[::2], "contiguous"),
    )
    calls: list[tuple[Callable[[], Any], type[Exception], str]] = [
        *((lambda r=r: cases.wire_of(int8, x, residual=r), CodecError, said) for r, said in residuals),
        *((lambda s=s: cases.recoded(int8, wire[None], 10, s), CodecError, "must be finite and not negative")
          for s in (-0.5, math.nan, math.inf)),
        *((lambda s=s: cases.wire_of(Lloyd(4), x, step=s), CodecError, "") for s in (-1, 2**64)),
        *((lambda s=s: cases.wire_of(Lloyd(4), x, step=s), TypeError, "") for s in (1.5, "1")),
        (lambda: int8.wire_bytes(-1), ValueError, "numel must be 0 or more, got -1"),
        (lambda: int8.wire_bytes(1e3), TypeError, "'float' object cannot be interpreted as an integer"),  # type: ignore[arg-type]
        *((lambda c=c: c.encoding(torch.float32), CodecError, "use pick") for c in (BySize(), ByName({"*": "int8"}))),
    ]  # fmt: skip

    for call, error, said in calls:
        with pytest.raises(error, match=said or None):
            call()
    assert isinstance(int8.wire_bytes(1000), int)  # as large as that float, and not found in its place


@one_of_each
def test_tensors_that_require_grad(codec: Codec) -> None:
    x = torch.nn.Parameter(cases.content("gaussian", 100))
    wire = cases.wire_of(codec, x)
    cases.assert_same(wire, cases.wire_of(codec, x.detach()))
    leaf = torch.nn.Parameter(torch.zeros(100))
    strided = torch.nn.Parameter(torch.zeros(10, 10).t())
    codec.decode(wire, leaf)
    codec.decode(wire, strided)
    cases.assert_same(leaf.detach(), cases.decoded(codec, wire, 100))
    cases.assert_same(strided.detach().reshape(-1), leaf.detach())
    assert leaf.grad is None
    assert leaf.is_leaf


# --- determinism ------------------------------------------------------------------------------------------------------
@one_of_each
def test_no_global_generator_is_touched(codec: Codec) -> None:
    x = cases.content("gaussian", 500)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()
    wire = cases.wire_of(codec, x, step=1)
    cases.recoded(codec, wire[None], 500, step=1)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


@pytest.mark.parametrize("make_codec", [Lloyd, lambda seed: BlockInt(rounding="stochastic", seed=seed)])
def test_seed_and_step_decide_everything(make_codec: type[Lloyd]) -> None:
    x = cases.content("gaussian", 600)
    wires = {
        (seed, step): cases.wire_of(make_codec(seed=seed), x, step=step)
        for seed in (0, 1, 2**64 - 1)
        for step in (0, 1, 2**40, 2**63 - 1)
    }
    bodies = {bytes(wire[32:].tolist()) for wire in wires.values()}
    assert len(bodies) == len(wires)
    for (seed, step), wire in wires.items():
        torch.manual_seed(step % 1000 + seed % 1000)
        cases.assert_same(cases.wire_of(make_codec(seed=seed), x, step=step), wire)


@over("codec", [c for c in cases.ONE_OF_EACH if "stochastic" not in str(c)])
def test_without_dither_or_rotation_the_step_is_idle(codec: Codec) -> None:
    x = cases.content("gaussian", 600)
    same = torch.equal(cases.wire_of(codec, x, step=0), cases.wire_of(codec, x, step=1))
    assert same != (isinstance(codec, Lloyd) and codec.rotate)


def test_signs_of_the_rotation_are_fair_and_change_with_the_step() -> None:
    """As many of one as of the other, and one step says nothing of the next."""
    n, steps = 32 * 64, 32
    x = torch.zeros(n)
    x[::32] = 1
    signs = torch.stack([_flips(x, step) for step in range(steps)])
    assert abs(signs.mean()) <= 5 / math.sqrt(signs.numel())
    agreement = (signs[1:] * signs[:-1]).mean(1)  # of one step with the next
    assert (agreement.abs() <= 5 / math.sqrt(signs.shape[1])).all()


def _flips(x: Tensor, step: int) -> Tensor:
    """The signs of the first elements of blocks: a spike there comes out of the Hadamard transform with one sign."""
    wire = cases.wire_of(Lloyd(1, 32), x, step=step)
    codes_at = Lloyd(1, 32).encoding(torch.float32).format.layout(x.numel()).planes[0][1]
    ones = wire[codes_at : codes_at + x.numel() // 8].view(-1, 4)  # 4 bytes per block
    assert ((ones == 0).all(1) | (ones == 255).all(1)).all()
    return (ones[:, 0] == 255).float() * 2 - 1


# --- units ------------------------------------------------------------------------------------------------------------
def test_collectives_may_cut_anywhere_unless_a_codec_is_aligned() -> None:
    assert {codec.unit for codec in cases.CODECS} == {1}
    assert BlockInt(8, 104, aligned=True).unit == 104
    assert BySize(large=BlockInt(4, aligned=True)).pick("w", (100, 100)).unit == 128


@pytest.mark.parametrize("mode", ["symmetric", "affine"])
def test_alignment_changes_no_byte(mode: Any) -> None:
    x = torch.linspace(-3, 2, 300)
    plain, aligned = (BlockInt(4, 104, mode, aligned=value) for value in (False, True))
    wire = cases.wire_of(aligned, x)
    cases.assert_same(wire, cases.wire_of(plain, x))
    cases.assert_same(cases.decoded(plain, wire, 300), cases.decoded(aligned, wire, 300))


# --- length of the wire -----------------------------------------------------------------------------------------------
def to_16(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


@each_blocked
def test_wire_bytes_are_those_of_the_layout(codec: Codec) -> None:
    how = codec.encoding(torch.float32).format
    sections = 2 if getattr(codec, "mode", "") == "affine" else 1
    for n in (0, 1, 7, 8, 9, how.block - 1, how.block, how.block + 1, 10 * how.block + 13):
        full, short = divmod(n, how.block)
        if isinstance(codec, Lloyd) and short:
            short = max(8, 1 << (short - 1).bit_length())
        elif isinstance(codec, BlockInt):
            short = -(-short // 8) * 8
        blocks, codes = full + bool(short), full * how.block + short
        assert codec.wire_bytes(n) == to_16(32 + sections * to_16(2 * blocks) + codes * how.bits // 8), n
        assert all(codec.wire_bytes(n, dtype) == codec.wire_bytes(n) for dtype in cases.DTYPES)


# --- codecs made of codecs --------------------------------------------------------------------------------------------
def test_by_size_encodes_through_the_codec_of_the_length() -> None:
    codec = BySize(small=Cast("fp16"), large=Lloyd(3, seed=5), min_numel=100)
    for n, leaf in ((0, Cast("fp16")), (99, Cast("fp16")), (100, Lloyd(3, seed=5)), (5000, Lloyd(3, seed=5))):
        assert (codec.pick(shape=(n,)), codec.wire_bytes(n)) == (leaf, leaf.wire_bytes(n))
        xs = [cases.content("gaussian", n, seed=rank) for rank in range(2)]
        wires_WN = cases.wires_of(codec, xs, step=3)
        cases.assert_same(wires_WN, cases.wires_of(leaf, xs, step=3), f"{n} wires")
        cases.assert_same(cases.summed(codec, wires_WN, n), cases.summed(leaf, wires_WN, n), f"{n} sum")
        cases.assert_same(cases.recoded(codec, wires_WN, n), cases.recoded(leaf, wires_WN, n), f"{n} recoded")


def test_by_size_picks_by_shape() -> None:
    codec = BySize(small=Cast("bf16"), large=BlockInt(4), min_numel=100, min_ndim=2)
    picked = {shape: str(codec.pick("w", shape)) for shape in [(1000,), (10, 10), (9, 11), (10, 10, 10), (), (1, 100)]}
    small = {(1000,): "bf16", (9, 11): "bf16", (): "bf16"}
    assert picked == {(10, 10): "int4", (10, 10, 10): "int4", (1, 100): "int4", **small}
    assert codec.wire_bytes(1000) == BlockInt(4).wire_bytes(1000)  # a flat buffer has no shape to judge


def test_by_name_picks_the_first_match_and_encodes_through_its_last_rule() -> None:
    codec = ByName({"*.bias": "bf16", "layer?.*": "int4", "*[0-9]": "none", "*": "lloyd2"})
    names = {"fc.bias": "bf16", "layer1.bias": "bf16", "layer1.w": "int4", "layer12.w": "lloyd2", "x7": "none"}
    assert {name: str(codec.pick(name, (10, 10))) for name in names} == names
    assert str(codec.pick("FC.BIAS")) == "lloyd2"  # case counts, on every platform
    assert all(codec.pick("any", (3, 3)) is codec for codec in cases.CODECS)
    codec, x = ByName([("*.bias", Cast("bf16")), ("*", BlockInt(4))]), cases.content("gaussian", 300)
    wire = cases.wire_of(codec, x)
    cases.assert_same(wire, cases.wire_of(BlockInt(4), x))
    cases.assert_same(cases.decoded(codec, wire, 300), cases.decoded(BlockInt(4), wire, 300))


def test_composites_take_what_the_picked_codec_takes() -> None:
    codec = BySize(small=Cast("bf16"), large=BlockInt(8), min_numel=100)
    x = torch.ones(99, dtype=torch.float64)
    assert (cases.decoded(codec, cases.wire_of(codec, x), 99, torch.float64) == 1).all()
    with pytest.raises(CodecError, match="codec int8 takes"):
        cases.wire_of(codec, torch.ones(100, dtype=torch.float64))
