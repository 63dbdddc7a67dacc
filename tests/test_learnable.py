"""LearnableFakeQuantize: torch's private class where that is right, the op of thinwire where it is not."""

import copy
import math
import pickle
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st
from torch import Tensor
from torch.ao import quantization
from torch.ao.quantization import MinMaxObserver, MovingAverageMinMaxObserver, PerChannelMinMaxObserver
from torch.ao.quantization._learnable_fake_quantize import _LearnableFakeQuantize
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from cases import CUDA, ROUND, by_turns, generated, needs_cuda, no_host_sync, on_ranks, over, thorough
from ranks import RankPool
from replicas import through_file
from thinwire.qat import LearnableFakeQuantize, fake_quantize, ops

EPS = torch.finfo(torch.float32).eps
PER_TENSOR = (MinMaxObserver, MovingAverageMinMaxObserver)
PER_CHANNEL = (PerChannelMinMaxObserver, quantization.MovingAveragePerChannelMinMaxObserver)
FLAGS = ("fake_quant_enabled", "static_enabled", "learning_enabled")


class OwnObserver(MovingAverageMinMaxObserver):
    """An observer of a user's own, which is called as it is; of torch's, HistogramObserver is, but slowly."""


def int8(observer: Any = MinMaxObserver, low: int = -128, high: int = 127, **more: Any) -> LearnableFakeQuantize:
    return LearnableFakeQuantize(observer, low, high, dtype=torch.qint8, **more)


def both(*args: Any, **kwargs: Any) -> tuple[LearnableFakeQuantize, Any]:
    """Ours and torch's, made alike."""
    return LearnableFakeQuantize(*args, **kwargs), _LearnableFakeQuantize(*args, **kwargs)


def by_channel(x: Tensor, axis: int | None) -> Tensor:
    """(channels, elements of one)"""
    return x.reshape(1, -1) if axis is None else x.movedim(axis, 0).unsqueeze(-1).flatten(1)


# --- learning is the op -----------------------------------------------------------------------------------------------
def bounds(quantizer: LearnableFakeQuantize, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """How far off gradients of scale and zero point may be: two roundings of x / s, and any order of adding in fp32."""
    v, g = (by_channel(t.detach().double(), quantizer._axis) for t in (x, grad))
    s = quantizer.scale.detach().double().unsqueeze(1)
    reach = quantizer.quant_max - quantizer.quant_min
    n = x.numel() / len(s) if quantizer.gradient == "lsq" else x.numel()
    factor = 1 / math.sqrt(n * (quantizer.quant_max or -quantizer.quant_min)) if quantizer.use_grad_scaling else 1.0
    roundings = (v.shape[1] + 8) * ROUND * factor
    return roundings * (g.abs() * (reach + (v / s).abs())).sum(1), roundings * (g * s).abs().sum(1)


def check_against_op(quantizer: LearnableFakeQuantize, x: Tensor) -> None:
    """Values and gradients are those of `fake_quantize`, which test_fake_quantize.py compares with the formula."""
    mine = [x.detach().requires_grad_(), quantizer.scale, quantizer.zero_point]
    given = [t.detach().clone().requires_grad_() for t in mine]
    settings: dict[str, Any] = {"axis": quantizer._axis, "gradient": quantizer.gradient}
    integers = {"quant_min": quantizer.quant_min, "quant_max": quantizer.quant_max}
    want = fake_quantize(
        *given[:2], zero_point=given[2], scale_gradient=quantizer.use_grad_scaling, **integers, **settings
    )
    y = quantizer(mine[0])
    grad = torch.linspace(-1, 2, x.numel()).view(x.shape).to(x.dtype)
    y.backward(grad)
    want.backward(grad)
    assert y.dtype == x.dtype
    assert torch.equal(y, want)
    for one, other in zip(mine, given, strict=True):
        assert one.grad.dtype == one.dtype
        assert torch.equal(one.grad, other.grad)


def off_grid(quantizer: LearnableFakeQuantize, shape: tuple[int, ...], seed: int) -> Tensor:
    """Elements inside the range and beyond it, none within 0.03 steps of where rounding or clamping decides."""
    make = torch.Generator().manual_seed(seed)
    low, high, axis = quantizer.quant_min, quantizer.quant_max, quantizer._axis
    steps = torch.randint(low - high - 3, high - low + 4, shape, generator=make)
    side = torch.randint(0, 2, shape, generator=make) * 2 - 1
    v = steps + side * (0.05 + 0.4 * torch.rand(shape, generator=make))
    scale = quantizer.scale.detach()
    if axis is None:
        return v * scale
    return (v.movedim(axis, -1) * scale).movedim(-1, axis)


@pytest.mark.parametrize("gradient", ["torch", "lsq"])
@pytest.mark.parametrize("axis", [None, 0, -1])
@over("scaled", [False, True])
@over("dtype", [torch.float32, torch.float16, torch.bfloat16])
@over("zero_point", [-2.6, -100.0, 100.0])
def test_learning_is_the_op(
    gradient: str, axis: int | None, scaled: bool, dtype: torch.dtype, zero_point: float
) -> None:
    """Of 16 bits too, for which torch's class raises; with zero points that are negative or beyond the range."""
    more: dict[str, Any] = {} if axis is None else {"ch_axis": axis}
    observer = MinMaxObserver if axis is None else PerChannelMinMaxObserver
    quantizer = int8(observer, -8, 7, use_grad_scaling=scaled, gradient=gradient, **more).enable_param_learning()
    quantizer._fit(torch.empty(3, 4))
    for at in range(quantizer.scale.numel()):
        quantizer.scale.data[at] = 0.25 * (1 + 0.37 * at)
        quantizer.zero_point.data[at] = zero_point + at
    x = torch.linspace(-9, 7, 12).view(3, 4).to(dtype)
    check_against_op(quantizer, x)
    quantizer.zero_grad()
    check_against_op(quantizer, x.t().contiguous().t())
    assert quantizer.scale.dtype == quantizer.zero_point.dtype == torch.float32
    integers = quantizer.calculate_qparams()[1].tolist()
    assert integers == [max(-8, min(7, round(zero_point + at))) for at in range(len(integers))]


# --- torch's class, where it is right ---------------------------------------------------------------------------------
@st.composite
def twins(draw: st.DrawFn) -> tuple[LearnableFakeQuantize, Any, tuple[int, ...]]:
    """Ours and torch's, and a shape for them, where torch has no fault: fp32, axes and zero points from 0 up."""
    channels, shape = draw(st.booleans()), draw(st.lists(st.integers(1, 5), min_size=2, max_size=4).map(tuple))
    axis, signed = draw(st.integers(0, len(shape) - 1)), draw(st.booleans())
    bits, symmetric = draw(st.integers(2, 8)), signed and draw(st.booleans())
    low = -(1 << bits - 1) if signed else 0
    kind = ("per_channel_" if channels else "per_tensor_") + ("symmetric" if symmetric else "affine")
    made: Any = both(
        draw(st.sampled_from(PER_CHANNEL if channels else PER_TENSOR)),
        *(low, low + (1 << bits) - 1),
        dtype=torch.qint8 if signed else torch.quint8,
        qscheme=getattr(torch, kind),
        use_grad_scaling=draw(st.booleans()),
        **({"channel_len": shape[axis], "ch_axis": axis} if channels else {}),
    )
    return *made, shape


@generated(40)
@given(twins(), st.integers(0, 99))
def test_static_estimates_are_torchs_to_the_bit(case: tuple[LearnableFakeQuantize, Any, Any], seed: int) -> None:
    ours, theirs, shape = case
    make = torch.Generator().manual_seed(seed)
    for batch in range(3):
        x = torch.randn(shape, generator=make) * 2**batch + 0.5
        assert torch.equal(ours(x), theirs(x))
        assert torch.equal(ours.scale, theirs.scale)
        assert torch.equal(ours.zero_point, theirs.zero_point)
    for mine, other in zip(ours.calculate_qparams(), theirs.calculate_qparams(), strict=True):
        assert torch.equal(mine, other)
        assert mine.dtype == other.dtype
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name


@generated(40)
@given(twins(), st.integers(0, 99))
def test_learning_is_torchs(case: tuple[LearnableFakeQuantize, Any, Any], seed: int) -> None:
    """Outputs and dx to the bit; gradients of the parameters as far apart as two sums in fp32 may be."""
    ours, theirs, shape = case
    start = torch.linspace(0.2, 1.7, ours.scale.numel())
    for quantizer in case[:2]:
        quantizer.enable_param_learning()
        quantizer.scale.data.copy_(start)
        quantizer.zero_point.data.fill_(max(0, ours.quant_max // 2))
    x = off_grid(ours, shape, seed).requires_grad_()
    other = x.detach().clone().requires_grad_()
    grad = torch.linspace(-1, 2, x.numel()).view(shape)
    y, expected = ours(x), theirs(other)
    y.backward(grad), expected.backward(grad)
    assert torch.equal(y, expected)
    assert torch.equal(x.grad, other.grad)  # type: ignore[arg-type]
    for name, bound in zip(("scale", "zero_point"), bounds(ours, x, grad), strict=True):
        mine, their = getattr(ours, name).grad, getattr(theirs, name).grad
        assert ((mine - their).abs() <= 2 * bound + 2 * ROUND * their.abs()).all(), name


def test_a_fresh_module_learns_nothing_until_it_is_told_to() -> None:
    """torch's parameters require gradients although its flag says that learning is off."""
    ours, theirs = both(PerChannelMinMaxObserver, 0, 15, channel_len=3)
    assert not ours.learning_enabled
    assert not theirs.learning_enabled
    assert [p.requires_grad for p in ours.parameters()] == [False, False]
    assert [p.requires_grad for p in theirs.parameters()] == [True, True]
    x = torch.linspace(-1, 1, 12, requires_grad=True)
    ours(x.view(3, 4)).sum().backward()
    assert x.grad is not None
    assert ours.scale.grad is ours.zero_point.grad is None
    assert all(p.requires_grad for p in ours.enable_param_learning().parameters())


# --- modes ------------------------------------------------------------------------------------------------------------
def flags(quantizer: Any) -> list[int]:
    return [int(getattr(quantizer, name)) for name in FLAGS]


SETTERS = [
    ("enable_param_learning", [1, 0, 1]),
    ("enable_static_estimate", [1, 1, 0]),
    ("enable_static_observation", [0, 1, 0]),
]


@pytest.mark.parametrize(("name", "want"), SETTERS)
def test_modes(name: str, want: list[int]) -> None:
    quantizer = LearnableFakeQuantize(MinMaxObserver)
    assert getattr(quantizer, name)() is quantizer
    assert flags(quantizer) == want
    assert quantizer.scale.requires_grad == quantizer.zero_point.requires_grad == bool(want[2])
    x = torch.tensor([0.3, -2.0])
    y = quantizer(x)
    assert (y is x) == (want[0] == 0)
    assert bool(quantizer.activation_post_process.max_val == 0.3) == (want[1] == 1)


def test_torchs_switches_over_a_model() -> None:
    model = torch.nn.Sequential(int8(), torch.nn.Linear(2, 2))
    for switch, want in (("disable_fake_quant", [0, 1]), ("disable_observer", [0, 0]), ("enable_fake_quant", [1, 0])):
        model.apply(getattr(quantization, switch))
        assert flags(model[0])[:2] == want
        assert list(model[0]._seen_modes()) == [bool(f) for f in want]
    model.apply(quantization.enable_observer)
    assert list(model[0]._seen_modes()) == [True, True]


def test_a_flag_written_by_hand_counts() -> None:
    quantizer, x = LearnableFakeQuantize(MinMaxObserver), torch.tensor([0.3, 1.0])
    quantizer.fake_quant_enabled[0] = 0
    assert quantizer(x) is x
    quantizer.fake_quant_enabled = torch.tensor([1], dtype=torch.uint8)
    assert quantizer(x) is not x
    quantizer.static_enabled[0] = 0
    quantizer.double()  # a flag written before a cast counts after it
    scale = quantizer.scale.item()
    quantizer(100 * x.double())
    assert quantizer.scale.item() == scale


def test_observation_leaves_the_parameters_alone() -> None:
    ours, theirs = both(PerChannelMinMaxObserver, ch_axis=0, channel_len=2, scale=0.5, zero_point=3.0)
    x = torch.randn(2, 50)
    for quantizer in (ours, theirs):
        quantizer.enable_static_observation()
        assert quantizer(x) is x
    assert torch.equal(ours.scale, torch.tensor([0.5, 0.5]))
    assert torch.equal(ours.zero_point, torch.tensor([3.0, 3.0]))
    assert not torch.equal(theirs.scale, torch.tensor([0.5, 0.5]))  # torch's fault
    assert torch.equal(ours.activation_post_process.max_val, x.amax(1))
    ours.enable_static_estimate()(x)
    assert torch.equal(ours.scale, theirs.scale)


class HostReads(TorchDispatchMode):
    """Counts what would make the host wait, were the tensors on a device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [name for name, _ in SETTERS])
@pytest.mark.parametrize("observer", [*PER_TENSOR, *PER_CHANNEL])
def test_the_host_never_waits(name: str, observer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "check_scale", lambda scale: None)  # made for tensors that are on the host
    quantizer = getattr(LearnableFakeQuantize(observer), name)()
    x = torch.randn(3, 5, requires_grad=True)
    with HostReads() as reads:
        for _ in range(2):
            quantizer(x).sum().backward()
        quantizer.toggle_fake_quant(True).toggle_observer_update(False)
        quantizer(x)
        assert reads.count == 0
        quantizer.fake_quant_enabled[0] = 0
        quantizer(x)
        assert reads.count == 2  # the two flags, once
        quantizer(x)
        assert reads.count == 2


# --- repairs ----------------------------------------------------------------------------------------------------------
@over("axis", [-1, -2, -3])
def test_negative_axes(axis: int) -> None:
    x = torch.randn(2, 3, 4)
    first, second = (LearnableFakeQuantize(PerChannelMinMaxObserver, ch_axis=a) for a in (axis, axis + 3))
    assert torch.equal(first(x), second(x))
    assert torch.equal(first.scale, second.scale)
    assert first.scale.numel() == x.shape[axis]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("observer", [*PER_TENSOR, OwnObserver])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_bad_batch_changes_no_estimate(poison: float, observer: Any, at: int) -> None:
    """It is as if it had not come, whether it comes first, between good ones, or last."""
    batches = [torch.linspace(-k, 2 * k, 50) for k in (1, 2)]
    clean = LearnableFakeQuantize(observer)
    for batch in batches:
        clean(batch)
    quantizer = LearnableFakeQuantize(observer)
    bad = torch.full((50,), 1000.0)
    bad[3] = poison
    for batch in [*batches[:at], bad, *batches[at:]]:
        quantizer(batch)
    for name, value in clean.state_dict().items():
        assert torch.equal(quantizer.state_dict()[name], value), name


@pytest.mark.parametrize("observer", PER_CHANNEL)
def test_a_bad_batch_is_left_out_of_its_channel_only(observer: Any) -> None:
    more = {"averaging_constant": 0.5} if "Moving" in observer.__name__ else {}
    quantizer = LearnableFakeQuantize(observer, **more)
    quantizer(torch.tensor([[math.nan, 5.0], [0.0, 255.0]]))
    assert torch.equal(quantizer.scale, torch.tensor([1.0, 1.0]))  # what it began with, and the estimate
    quantizer(torch.tensor([[0.0, 510.0], [0.0, math.inf]]))
    assert torch.equal(quantizer.scale, torch.tensor([2.0, 1.0]))


@pytest.mark.parametrize("observer", [MovingAverageMinMaxObserver, OwnObserver])
def test_a_shared_quantizer_has_the_gradients_of_each_call(observer: Any) -> None:
    """Two calls before one backward, in static mode: each by the scale of its own call."""

    def gradients(together: bool) -> list[Tensor]:
        quantizer, losses = LearnableFakeQuantize(observer, 0, 15, averaging_constant=1.0), []
        inputs = [(torch.linspace(-1, 1, 41) * k).requires_grad_() for k in (8, 1)]
        for x in inputs:
            losses.append(quantizer(x).sum())
            if not together:
                losses.pop().backward()
        if together:
            sum(losses).backward()
        return [x.grad for x in inputs if x.grad is not None]

    for mine, alone in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(mine, alone)


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize(
    ("low", "high", "middle"), [(-8, 7, 0), (-127, 127, 0), (0, 255, 128), (0, 15, 8), (-15, 0, -7)]
)
def test_symmetric_schemes_hold_the_middle(low: int, high: int, middle: int, channels: bool) -> None:
    quantizer = LearnableFakeQuantize(
        PerChannelMinMaxObserver if channels else MinMaxObserver,
        *(low, high),
        dtype=torch.qint32,
        qscheme=torch.per_channel_symmetric if channels else torch.per_tensor_symmetric,
        zero_point=3.0,
    )
    x = torch.linspace(-1, 1, 101).repeat(2, 1)
    y = quantizer(x)
    half = quantizer.scale.max().item() / 2
    assert (quantizer.zero_point == middle).all()
    # All but the outermost step on one side, which a range of an even number of integers does not have.
    assert ((y - x).abs() <= 2 * half * (1 + 8 * ROUND)).all()
    assert ((y - x).abs()[x.abs() < 1 - 2 * half] <= half * (1 + 512 * ROUND)).all()
    quantizer.zero_point.data.fill_(5.0)
    assert (quantizer.calculate_qparams()[1] == middle).all()
    quantizer.zero_point.data.fill_(5.0)
    assert torch.equal(quantizer.enable_param_learning()(x), y)


@pytest.mark.parametrize(("low", "dtype"), [(0, torch.quint8), (-128, torch.qint8)])
@pytest.mark.parametrize("observer", PER_CHANNEL)
def test_real_zero_points(observer: Any, low: int, dtype: torch.dtype) -> None:
    """per_channel_affine_float_qparams: every channel has its own range, which need not hold zero."""
    scheme = torch.per_channel_affine_float_qparams
    quantizer = LearnableFakeQuantize(observer, low, low + 255, qscheme=scheme, dtype=dtype, ch_axis=0)
    x = torch.tensor([[1.0, 1.26, 1.71, 2.0], [100.0, 121.0, 222.0, 300.0], [-5.0, -4.53, -4.12, -4.0]])
    y = quantizer(x)
    scale, zero_point = quantizer.calculate_qparams()
    theirs = torch.fake_quantize_per_channel_affine(x, scale, zero_point, 0, low, low + 255)
    assert torch.equal(scale, (x.amax(1) - x.amin(1)) / 255)
    assert zero_point.is_floating_point()
    # y = code * s + b here, (code - z) * s there: three roundings of numbers up to |x| + 255 s each.
    assert ((y - theirs).abs() <= 8 * ROUND * (x.abs() + 256 * scale.unsqueeze(1))).all()
    assert ((y - x).abs() <= scale.unsqueeze(1) / 2 + 8 * ROUND * (x.abs() + 256 * scale.unsqueeze(1))).all()


@pytest.mark.parametrize("name", [name for name, _ in SETTERS])
@pytest.mark.parametrize("observer", [*PER_TENSOR, *PER_CHANNEL, OwnObserver])
@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0, 3)])
def test_empty_batches(name: str, observer: Any, shape: tuple[int, ...]) -> None:
    quantizer = LearnableFakeQuantize(observer, 0, 15, scale=0.5, use_grad_scaling=True)
    x = torch.empty(shape, requires_grad=True)
    y = getattr(quantizer, name)()(x)
    assert y.shape == shape
    y.sum().backward()
    assert x.grad.shape == shape
    assert (quantizer.scale == 0.5).all()


@pytest.mark.parametrize("scale", [math.nan, math.inf])
def test_a_scale_that_cannot_be_is_reported(scale: float) -> None:
    quantizer = LearnableFakeQuantize(MinMaxObserver).enable_param_learning()
    quantizer.scale.data.fill_(scale)
    for use in (lambda: quantizer(torch.ones(2)), quantizer.calculate_qparams):
        with pytest.raises(ValueError, match="a scale and its inverse must be positive and finite, got"):
            use()
    assert torch.equal(quantizer.scale.data, torch.tensor([scale])) or math.isnan(scale)
    with pytest.raises(ValueError, match="a scale and its inverse must be positive and finite, got"):
        LearnableFakeQuantize(MinMaxObserver, scale=scale)


@pytest.mark.parametrize("scale", [-1.0, -1e-12, 0.0, 1e-12, EPS / 2])
@pytest.mark.parametrize("observer", [MinMaxObserver, PerChannelMinMaxObserver])
@pytest.mark.parametrize("mode", ["train", "eval", "no_grad"])
def test_a_scale_below_eps_is_brought_back_as_torch_does(scale: float, observer: Any, mode: str) -> None:
    channels = {} if observer is MinMaxObserver else {"channel_len": 3}
    pair = both(observer, -8, 7, scale=0.5, dtype=torch.qint8, **channels)
    results = []
    for quantizer in pair:
        quantizer.enable_param_learning()
        quantizer.train(mode == "train").scale.data[-1] = scale
        x = torch.linspace(-2, 2, 12).view(3, 4).requires_grad_()
        with torch.set_grad_enabled(mode != "no_grad"):
            y = quantizer(x)
        assert quantizer.scale[-1].item() == EPS
        if mode != "no_grad":
            y.backward(torch.linspace(-1, 2, 12).view(3, 4))
            assert quantizer.scale.grad.isfinite().all()
        results.append([y, x.grad, quantizer.scale, *quantizer.calculate_qparams()])
    for mine, theirs in zip(*results, strict=True):
        assert mine is theirs is None or torch.equal(mine, theirs)


def test_an_activation_checkpoint_shows_a_batch_once() -> None:
    quantizer, x = LearnableFakeQuantize(MovingAverageMinMaxObserver), torch.linspace(-1, 1, 9, requires_grad=True)
    quantizer(torch.ones(2))
    y = checkpoint(lambda t: quantizer(t).sin(), x, use_reentrant=False)
    seen = quantizer.activation_post_process.min_val.clone()
    y.sum().backward()
    assert torch.equal(quantizer.activation_post_process.min_val, seen)


# --- channels ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["enable_param_learning", "enable_static_estimate"])
def test_the_number_of_channels_is_inferred(mode: str) -> None:
    quantizer = LearnableFakeQuantize(PerChannelMinMaxObserver, ch_axis=1, scale=0.25, zero_point=2.0)
    given = LearnableFakeQuantize(PerChannelMinMaxObserver, ch_axis=1, scale=0.25, zero_point=2.0, channel_len=3)
    scale, zero_point = quantizer.scale, quantizer.zero_point
    optimizer = torch.optim.Adam(quantizer.parameters(), lr=0.1)
    x = torch.randn(2, 3, 4)
    y = getattr(quantizer, mode)()(x)
    assert torch.equal(y, getattr(given, mode)()(x))
    assert quantizer.scale is scale
    assert quantizer.zero_point is zero_point
    assert quantizer.channel_len == len(scale) == 3
    quantizer.enable_param_learning()(x).sum().backward()
    before = scale.detach().clone()
    optimizer.step()
    assert ((scale - before).abs() > 0).all()
    with pytest.raises(ValueError, match=r"axis 1 of \(2, 4\) must have 3 channels"):
        quantizer(torch.ones(2, 4))


def test_a_checkpoint_gives_the_number_of_channels() -> None:
    theirs = _LearnableFakeQuantize(PerChannelMinMaxObserver, channel_len=4)
    x = torch.randn(4, 5)
    theirs(x)
    theirs.enable_param_learning()
    ours = LearnableFakeQuantize(PerChannelMinMaxObserver)
    scale = ours.scale
    ours.load_state_dict(theirs.state_dict())
    assert ours.scale is scale
    assert torch.equal(ours(x), theirs(x))
    with pytest.raises(RuntimeError, match="size mismatch for scale"):
        ours.load_state_dict(LearnableFakeQuantize(PerChannelMinMaxObserver, channel_len=3).state_dict())


@pytest.mark.parametrize(("mode", "want"), SETTERS)
@over("observer", [*PER_TENSOR, *PER_CHANNEL, OwnObserver])
def test_checkpoints_go_both_ways(observer: Any, mode: str, want: list[int]) -> None:
    """With the mode, and in our class with what is trainable."""
    channels = {"channel_len": 4} if observer in PER_CHANNEL else {}
    x = torch.randn(4, 5)
    kinds = (_LearnableFakeQuantize, LearnableFakeQuantize)
    for first, second in (kinds, kinds[::-1]):
        source, target = first(observer, 0, 15, **channels), second(observer, 0, 15, **channels)
        source(x)
        getattr(source, mode)()
        target.toggle_qparam_learning(not want[2])
        target.load_state_dict(source.state_dict(), strict=True)
        assert flags(target) == want
        assert torch.equal(target(x), source(x))
        trained = target.scale.requires_grad, target.zero_point.requires_grad
        assert second is _LearnableFakeQuantize or trained == (bool(want[2]),) * 2


# --- casts, copies, compilation, torch.ao -----------------------------------------------------------------------------
@pytest.mark.parametrize("observer", [MinMaxObserver, quantization.MovingAveragePerChannelMinMaxObserver])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_casts_of_the_whole_module(observer: Any, dtype: torch.dtype) -> None:
    model = torch.nn.Sequential(int8(observer, -8, 7, scale=0.1234567))
    quantizer, scale, kept = model[0], model[0].scale, torch.promote_types(dtype, torch.float32)
    quantizer.scale.grad = torch.ones(1)
    model.to(dtype)
    assert quantizer.scale is scale
    floats = [t for t in (*quantizer.parameters(), *quantizer.buffers()) if t.is_floating_point()]
    assert all(t.dtype == kept for t in floats)
    assert quantizer.scale.grad.dtype == kept
    assert torch.equal(quantizer.scale.float(), torch.tensor([0.1234567]))  # not rounded on the way
    x = torch.linspace(-1, 1, 12).view(3, 4).to(dtype)
    y = model(x)
    assert y.dtype == dtype
    exact = torch.nn.Sequential(int8(observer, -8, 7)).to(kept)(x.to(kept))
    assert torch.equal(y, exact.to(dtype))
    quantizer.enable_param_learning()
    quantizer.scale.grad = None
    check_against_op(quantizer, x)
    assert quantizer.double().half().scale.dtype == torch.float32


SAVED = partial(through_file, weights_only=False)


@over("copied", [copy.deepcopy, lambda quantizer: pickle.loads(pickle.dumps(quantizer)), SAVED])
def test_copies_are_equal_and_apart(copied: Callable[[LearnableFakeQuantize], Any]) -> None:
    quantizer, x = LearnableFakeQuantize(PerChannelMinMaxObserver, gradient="lsq"), torch.randn(3, 4)
    quantizer(x)
    quantizer.fake_quant_enabled[0] = 0
    made = copied(quantizer)
    assert flags(made) == [0, 1, 0]
    assert made(x) is x
    assert torch.equal(made.enable_param_learning()(x), quantizer.enable_param_learning()(x))
    made.scale.data.mul_(2)
    made.fake_quant_enabled[0] = made.static_enabled[0] = 0
    assert torch.equal(torch.compile(copied(made), backend="eager")(x), x)
    assert made(x) is x
    assert quantizer(x) is not x


@pytest.fixture
def compiled() -> Iterator[Callable[[torch.nn.Module], Any]]:
    torch._dynamo.reset()
    yield lambda module: torch.compile(module, fullgraph=True, backend="aot_eager")
    torch._dynamo.reset()


@pytest.mark.parametrize("observer", [MinMaxObserver, *thorough(quantization.MovingAveragePerChannelMinMaxObserver)])
def test_compiled_whole_in_every_mode(observer: Any, compiled: Callable[[torch.nn.Module], Any]) -> None:
    """Switches are seen: each costs one compilation. Two calls before one backward, as when weights are shared."""
    eager, whole = (
        int8(observer, -8, 7, channel_len=3 if observer in PER_CHANNEL else -1, qscheme=qscheme)
        for qscheme in 2 * [torch.per_channel_affine if observer in PER_CHANNEL else torch.per_tensor_symmetric]
    )
    whole(torch.ones(3, 4)), eager(torch.ones(3, 4))
    run = compiled(whole)
    for name, _ in SETTERS:
        results = []
        for quantizer, call in ((eager, eager), (whole, run)):
            getattr(quantizer, name)()
            quantizer.zero_grad()
            x = torch.linspace(-2, 3, 12).view(3, 4).requires_grad_()
            y = call(x) + call(3 * x)
            y.sum().backward()
            results.append([y, x.grad, *quantizer.state_dict().values(), quantizer.scale.grad])
        for mine, other in zip(*results, strict=True):
            assert mine is other is None or torch.equal(mine, other), name


def test_compiling_before_the_channels_are_known_says_so(compiled: Callable[[torch.nn.Module], Any]) -> None:
    run = compiled(LearnableFakeQuantize(PerChannelMinMaxObserver))
    with pytest.raises(Exception, match="number of channels must be known before the model is compiled"):
        run(torch.ones(3, 4))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_scripting_is_refused_in_words() -> None:
    with pytest.raises(TypeError, match="cannot be scripted"):
        torch.jit.script(torch.nn.Sequential(LearnableFakeQuantize(MinMaxObserver)))
    with pytest.raises(RuntimeError):
        torch.jit.script(_LearnableFakeQuantize(MinMaxObserver))


def small_model() -> torch.nn.Sequential:
    first, last = torch.ao.quantization.QuantStub(), torch.ao.quantization.DeQuantStub()
    inner = [torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(16, 3)]
    return torch.nn.Sequential(first, *inner, last)


def learnable_qconfig() -> quantization.QConfig:
    grid = {"quant_min": -128, "quant_max": 127, "dtype": torch.qint8, "qscheme": torch.per_channel_symmetric}
    rule = {"use_grad_scaling": True, "gradient": "lsq"}
    weight = LearnableFakeQuantize.with_args(observer=PerChannelMinMaxObserver, **grid, **rule)
    activation = LearnableFakeQuantize.with_args(observer=MovingAverageMinMaxObserver)
    return quantization.QConfig(activation=activation, weight=weight)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_in_a_qconfig_from_preparation_to_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's integer kernels, whichever this machine has."""
    kernels = torch.backends.quantized
    monkeypatch.setattr(kernels, "engine", next(e for e in kernels.supported_engines if e != "none"))
    torch.manual_seed(0)
    model: Any = small_model().train()
    model.qconfig = learnable_qconfig()
    prepared = quantization.prepare_qat(model)
    quantizers = [m for m in prepared.modules() if isinstance(m, LearnableFakeQuantize)]
    assert len(quantizers) == 5  # the input, and weight and output of two layers
    x, target = torch.randn(8, 1, 4, 4), torch.randint(0, 3, (8,))
    prepared(x)
    for quantizer in quantizers:
        quantizer.enable_param_learning()
    layers = [p for name, p in prepared.named_parameters() if name.endswith(("weight", "bias"))]
    steps = [p for quantizer in quantizers for p in quantizer.parameters()]
    optimizer = torch.optim.SGD([{"params": layers}, {"params": steps, "lr": 1e-4}], lr=0.05)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(prepared(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    fake = prepared.eval()(x)
    real = quantization.convert(prepared)(x)
    step = quantizers[-1].scale.item()
    assert ((real - fake).abs() <= 2 * step).all()  # a rounding of each layer's output


# --- ranks ------------------------------------------------------------------------------------------------------------
def settle(group: dist.ProcessGroup, observer: Any, hostile: str) -> list[bytes]:
    """Calibrate on data of this rank alone, then learn; the bytes of every quantizer after each part."""
    warnings.simplefilter("error")
    rank = group.rank()
    torch.manual_seed(7)
    made: dict[str, Any] = {} if observer not in PER_CHANNEL else {"channel_len": 4, "ch_axis": 1}
    model = torch.nn.Sequential(LearnableFakeQuantize(observer, 0, 15, **made), torch.nn.Linear(4, 2))
    model[0].toggle_qparam_learning(True)  # DDP keeps the parameters that require gradients when it is made
    ddp = DistributedDataParallel(model)
    batches = [torch.randn(5, 4) * (rank + 1) for _ in range(3)]
    if rank == 0 and hostile == "nan":
        batches[1][2] = math.nan
    if rank == 0 and hostile == "empty":
        batches[1] = torch.empty(0, 4)
    for batch in batches:
        ddp(batch).sum().backward()
    after = [state_bytes(model)]
    model[0].enable_param_learning()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for batch in batches[::2]:
        optimizer.zero_grad()
        ddp(batch).square().sum().backward()
        optimizer.step()
    after.append(state_bytes(model))
    model[0].scale.data.fill_(-1)  # as an optimizer may leave it
    ddp(batches[0]).sum().backward()
    assert (model[0].scale == EPS).all()
    return [*after, state_bytes(model)]


def state_bytes(model: torch.nn.Module) -> bytes:
    quantizer: Any = model[0]  # type: ignore[index]
    assert quantizer.scale.isfinite().all()
    return torch.cat([quantizer.scale, quantizer.zero_point]).detach().numpy().tobytes()


@by_turns(
    "observer, hostile, world",
    [MovingAverageMinMaxObserver, PerChannelMinMaxObserver, OwnObserver],
    ["", "nan", "empty"],
    [3, 2],
)
def test_ranks_of_ddp_agree(ranks: RankPool, world: int, observer: Any, hostile: str) -> None:
    results = ranks(world).run(settle, observer, hostile)
    assert all(result == results[0] for result in results[1:])
    assert results[0][0] != results[0][1]


@on_ranks(3)
def test_outside_ddp_ranks_only_meet_when_asked_to(group: dist.ProcessGroup) -> None:
    quantizer = LearnableFakeQuantize(MinMaxObserver)
    for _ in range(group.rank() + 1):  # no rank waits for another: they call it a different number of times
        quantizer(torch.tensor([0.0, 255.0 * (group.rank() + 1)]))
    assert quantizer.scale.item() == group.rank() + 1
    assert quantizer.synchronize() is quantizer
    assert quantizer.scale.item() == 2


@on_ranks(2)
def test_channels_must_be_known_before_ddp(group: dist.ProcessGroup) -> str:
    model = torch.nn.Sequential(LearnableFakeQuantize(PerChannelMinMaxObserver, ch_axis=1), torch.nn.Linear(4, 2))
    ddp = DistributedDataParallel(model)
    with pytest.raises(ValueError, match="known before the model is compiled or wrapped in DDP") as raised:
        ddp(torch.ones(3, 4))
    return str(raised.value)


@pytest.mark.thorough
@on_ranks(2, gives=True)
def test_ranks_agree_when_compiled(group: dist.ProcessGroup) -> bool:
    quantizer = LearnableFakeQuantize(MinMaxObserver)
    model = torch.nn.Sequential(quantizer, torch.nn.Linear(1, 1))
    run = torch.compile(model, backend="eager", fullgraph=True)
    run(torch.ones(2, 1))  # compiled once without DDP
    DistributedDataParallel(run)(torch.tensor([[-1.0 - group.rank()], [2.0]]))
    return quantizer.activation_post_process.min_val.item() == -2


# --- bad input --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"quant_min": 5, "quant_max": 5}, "quant_min must be below quant_max"),
        ({"quant_min": 0, "quant_max": 256}, r"within 0\.\.255 for torch.quint8, got 0 and 256"),
        ({"quant_min": -1, "quant_max": 100}, r"within 0\.\.255"),
        ({"gradient": "paper"}, "gradient must be one of torch, lsq, got 'paper'"),
        ({"channel_len": 0}, "channel_len must be a positive integer, or -1"),
        ({"channel_len": 2.0}, "channel_len must be a positive integer, or -1"),
        ({"channel_len": 3}, "channel_len=3 needs a per-channel observer"),
        ({"scale": -0.5}, "a scale and its inverse must be positive and finite, got -0.5"),
    ],
)
def test_what_cannot_be_made(kwargs: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        LearnableFakeQuantize(MinMaxObserver, **kwargs)


def test_inputs_that_do_not_fit() -> None:
    quantizer = LearnableFakeQuantize(PerChannelMinMaxObserver, ch_axis=2)
    with pytest.raises(ValueError, match=r"axis must be within -2..1"):
        quantizer(torch.ones(2, 3))
    with pytest.raises(TypeError, match="floating point"):
        LearnableFakeQuantize(MinMaxObserver).enable_param_learning()(torch.ones(2, dtype=torch.int64))
    quantizer.enable_static_observation()(torch.ones(2, 3, 4))
    with pytest.raises(ValueError, match="seen 4 channels before, now 5"):
        quantizer(torch.ones(2, 3, 5))


# --- CUDA -------------------------------------------------------------------------------------------------------------
@needs_cuda[0]
@needs_cuda[1]
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("observer", [*PER_TENSOR, *PER_CHANNEL])
def test_devices_agree_and_the_host_never_waits(observer: Any, dtype: torch.dtype) -> None:
    host, card = (LearnableFakeQuantize(observer, 0, 7, use_grad_scaling=True) for _ in range(2))
    card.to(CUDA)
    x = torch.linspace(-1, 2, 3 * 700).view(3, 700).to(dtype)
    host(x), card(x.to(CUDA).requires_grad_()).sum().backward()  # kernels are compiled here
    card.zero_grad()
    for name in ("enable_static_estimate", "enable_param_learning"):
        a, b = x.clone().requires_grad_(), x.to(CUDA).requires_grad_()
        getattr(host, name)()(a).sum().backward()
        with no_host_sync():
            getattr(card, name)()(b).sum().backward()
        assert torch.equal(host.scale.data, card.scale.data.cpu())
        assert torch.equal(a.grad, b.grad.cpu())  # type: ignore[arg-type, union-attr]
    bound, _ = bounds(host, x, torch.ones_like(x))
    assert host.scale.grad is not None
    gap = (host.scale.grad - card.scale.grad.cpu()).abs()
    assert (gap <= 2 * bound + 2 * ROUND * host.scale.grad.abs()).all()


def test_channels_that_grow_in_inference_mode_can_be_trained() -> None:
    quantizer = LearnableFakeQuantize(PerChannelMinMaxObserver, 0, 7)
    with torch.inference_mode():
        quantizer(torch.linspace(-1, 1, 12).view(3, 4))
    quantizer.enable_param_learning()(torch.linspace(-1, 1, 12).view(3, 4)).sum().backward()
    assert quantizer.scale.grad is not None
