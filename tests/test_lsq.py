"""thinwire.qat.LSQ and LSQPlus: where they start, what they learn, and what they live through."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn

from cases import on_ranks, seeded, thorough, worlds
from ranks import RankPool
from thinwire.qat import LSQ, LSQPlus, fake_quantize

Group = dist.ProcessGroup
HALF_ULP = 2.0**-24  # of fp32: what is computed in doubles is rounded once
SHAPE = (6, 4, 8)
PLACES: list[dict[str, Any]] = [{}, {"axis": 0}, {"axis": 1}, {"axis": -1}, {"axis": -3}, {"group": 4}]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=seeded(seed)).to(dtype)


def rows_of(x: Tensor, axis: int | None = None, group: int = 0) -> Tensor:
    """A channel a row, written another way than the library's."""
    if group:
        return torch.stack(x.flatten().split(group))
    return x.reshape(1, -1) if axis is None else torch.stack([part.flatten() for part in x.unbind(axis)])


def started(x: Tensor, **options: Any) -> LSQ:
    return LSQ(**options).initialize(x)


# --- the start of weights ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_weights_start_at_the_papers_scale(bits: int, place: dict[str, Any]) -> None:
    weight = normal(*SHAPE)
    quantizer, lazy = started(weight, bits=bits, **place), LSQ(bits, **place)
    expected = 2 * rows_of(weight.double(), **place).abs().mean(1) / math.sqrt(2 ** (bits - 1) - 1)
    torch.testing.assert_close(quantizer.scale.double(), expected, rtol=2 * HALF_ULP, atol=0.0)
    assert (quantizer.quant_min, quantizer.quant_max) == (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    assert torch.equal(lazy(weight), quantizer(weight)), "a first forward is a start, too"
    assert torch.equal(lazy.scale, quantizer.scale)


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_lsq_plus_weights_start_at_three_sigmas(place: dict[str, Any]) -> None:
    weight = normal(*SHAPE) + 0.5
    quantizer = LSQPlus(3, symmetric=True, **place).initialize(weight)
    rows = rows_of(weight.double(), **place)
    mean, std = rows.mean(1), rows.std(1, correction=0)
    expected = torch.maximum((mean - 3 * std).abs(), (mean + 3 * std).abs()) / 4
    torch.testing.assert_close(quantizer.scale.double(), expected, rtol=2 * HALF_ULP, atol=0.0)
    assert quantizer.offset is None


def test_a_channel_of_zeros_gets_the_mean_of_the_others() -> None:
    weight = normal(4, 9)
    weight[2] = 0
    for kind in (LSQ, LSQPlus):
        scale = kind(4, symmetric=True, axis=0).initialize(weight).scale
        torch.testing.assert_close(scale[2], scale[[0, 1, 3]].mean())
    offset = LSQPlus(4, axis=0).initialize(weight)
    assert (offset.scale > 0).all()
    assert torch.equal(offset(weight)[2], torch.zeros(9))


@pytest.mark.parametrize("kind", [LSQ, LSQPlus])
def test_a_weight_of_zeros_starts_as_if_it_were_of_usual_size(kind: type[LSQ]) -> None:
    quantizer = kind(4, symmetric=True, axis=0).initialize(torch.zeros(3, 25))
    torch.testing.assert_close(quantizer.scale, torch.full((3,), 2 / math.sqrt(25 * 7)))


@pytest.mark.parametrize("size", [1e-42, 1e-38, 1e30, 3e38])
@pytest.mark.parametrize("quantizer", [LSQ(2), LSQ(8), LSQPlus(2), LSQPlus(8, symmetric=True)], ids=str)
def test_scales_of_extreme_tensors_are_numbers(quantizer: LSQ, size: float) -> None:
    x = size * torch.tensor([-1.0, -0.5, 0.25, 1.0])
    quantizer = copy.deepcopy(quantizer)
    y = quantizer(x)
    assert quantizer.scale.isfinite().all()
    assert (1 / quantizer.scale).isfinite().all()
    assert not y.isnan().any()


# --- the start of activations -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("batches", "low"), [([1.0, 1.0], 0), ([-1.0, 1.0], -8), ([1.0, -1.0], -8), ([0.0, 1.0, -1.0], -8)]
)
def test_auto_takes_the_sign_of_the_first_batches(batches: list[float], low: int) -> None:
    quantizer = LSQ(4, symmetric="auto", init_batches=2)
    for batch in batches:
        quantizer(torch.tensor([batch, 0.5 * abs(batch)]))
    assert quantizer.initialized
    assert (quantizer.quant_min, quantizer.quant_max) == (low, low + 15)
    assert quantizer.quant_range.tolist() == [low, low + 15]
    if low:
        assert quantizer.scale.item() == pytest.approx(2 * 0.75 / math.sqrt(7))


@pytest.mark.parametrize(
    "batch", [torch.tensor([1.0, math.nan]), torch.tensor([math.inf, 1.0]), torch.zeros(3)], ids=str
)
@pytest.mark.parametrize("kind", [LSQ, LSQPlus])
def test_a_batch_that_says_nothing_passes_untouched(kind: type[LSQ], batch: Tensor) -> None:
    quantizer = kind(4, symmetric=False)
    for x in (batch, torch.empty(0, 5)):
        y = quantizer(x)
        torch.testing.assert_close(y.detach(), x, rtol=0, atol=0, equal_nan=True)
        y.nansum().backward()
    assert not quantizer.initialized
    assert all(p.grad is not None for p in quantizer.parameters()), "DDP would wait for it"
    quantizer(normal(9).abs())
    assert quantizer.initialized
    assert all(p.isfinite().all() for p in quantizer.parameters())


def test_activations_start_at_the_mean_of_the_first_batches_that_say_anything() -> None:
    quantizer = LSQ(4, init_batches=2)
    good = [normal(9, seed=1), normal(9, seed=2)]
    for batch in (good[0], torch.tensor([math.nan]), torch.empty(0), good[1], 9 * good[0]):
        quantizer(batch)
    expected = (good[0].abs().mean() + good[1].abs().mean()) / math.sqrt(7)
    torch.testing.assert_close(quantizer.scale[0], expected, rtol=6 * HALF_ULP, atol=0.0)
    assert quantizer.initialized


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_lsq_plus_finds_less_error_than_the_whole_range_has(bits: int) -> None:
    x = torch.cat([normal(2, 500), torch.tensor([[30.0], [-40.0]])], 1) + 5
    quantizer = LSQPlus(bits, axis=0)
    error = (quantizer(x) - x).square().sum(1)
    low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    whole = (((x - low) / step).round() * step + low - x).square().sum(1)
    assert (error <= whole * (1 + 1e-5)).all()
    assert bits == 8 or (error < 0.7 * whole).all(), "the one far element should be cut off"


# --- values and gradients ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("kind", [LSQ, LSQPlus])
def test_values_and_gradients_are_the_ops(kind: type[LSQ], place: dict[str, Any]) -> None:
    """test_fake_quantize.py compares the op with the written rule."""
    quantizer = kind(3, symmetric=False, **place)
    quantizer(normal(*SHAPE))
    mine = [normal(*SHAPE, seed=2).requires_grad_(), *quantizer.parameters()]
    given = [t.detach().clone().requires_grad_() for t in mine]
    want = fake_quantize(*given[:2], offset=given[2] if given[2:] else None, quant_min=0, quant_max=7, **place)
    y, grad = quantizer(mine[0]), normal(*SHAPE, seed=1)
    y.backward(grad)
    want.backward(grad)
    assert torch.equal(y, want)
    for one, other in zip(mine, given, strict=True):
        assert one.grad is not None
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("group", [0, 4])
def test_rows_of_a_table_as_if_all_of_it_were_quantized(group: int) -> None:
    table, rows = normal(10, 8), torch.tensor([1, 3, 3, 0])
    place = {"group": 4} if group else {"axis": 0}
    results = []
    for whole in (True, False):
        weight = table.clone().requires_grad_()
        quantizer = started(table, bits=3, **place)
        y = quantizer(weight)[rows] if whole else quantizer(weight[rows], rows=rows)
        y.square().sum().backward()
        results.append((y, weight.grad, quantizer.scale.grad))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert quantizer(table[rows[:0]], rows=rows[:0]).shape == (0, 8)


# --- the floor --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["eager", *thorough("compiled"), "lent"])
def test_a_scale_below_its_floor_is_raised_and_still_learns(how: str) -> None:
    quantizer, x = started(normal(3, 8), bits=4, axis=0), normal(3, 8, seed=1)
    start = quantizer.scale.detach().clone()
    with torch.no_grad():
        quantizer.scale[1] = -1.0
    call = torch.compile(quantizer, fullgraph=True, backend="eager") if how == "compiled" else quantizer
    lent = quantizer.scale.detach().clone().requires_grad_()
    y = torch.func.functional_call(quantizer, {"scale": lent}, x) if how == "lent" else call(x)
    floor = start.min() / 64
    assert quantizer.scale_floor == floor
    torch.testing.assert_close(y[1], fake_quantize(x, floor, quant_min=-8, quant_max=7)[1])
    y.backward(-x.sign())
    grad = lent.grad if how == "lent" else quantizer.scale.grad
    assert grad[1] < 0, "all of x is far outside: only a larger scale brings it back"
    assert quantizer.scale[1] == (floor if how == "eager" else -1.0)


# --- dtypes -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_cast_of_the_model_leaves_scales_as_they_are(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(3, 3), LSQPlus(4))
    model(normal(5, 3))
    before = [p.clone() for p in model[1].parameters()]
    model.to(dtype)
    assert model[0].weight.dtype == dtype
    for old, new in zip(before, model[1].parameters(), strict=True):
        assert new.dtype == torch.float32
        assert torch.equal(old, new)
    y = model(normal(5, 3, dtype=dtype))
    y.float().square().sum().backward()
    assert y.dtype == dtype
    assert all(p.grad.dtype == torch.float32 for p in model[1].parameters())


# --- copies and checkpoints -------------------------------------------------------------------------------------------
def forms() -> list[LSQ]:
    return [LSQ(4), LSQ(2, axis=-1), LSQ(8, symmetric="auto"), LSQ(3, group=4), LSQPlus(4), LSQPlus(4, axis=0)]


def copied(quantizer: LSQ, how: str) -> LSQ:
    if how == "deepcopy":
        return copy.deepcopy(quantizer)
    if how == "pickle":
        return pickle.loads(pickle.dumps(quantizer))
    options = {name: getattr(quantizer, name) for name in ("bits", "symmetric", "axis", "group")}
    other = next(form for form in forms() if str(form) == str(type(quantizer)(**options)))
    other.load_state_dict(copy.deepcopy(quantizer.state_dict()), assign=how == "assign")
    return other


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "load", "assign"])
@pytest.mark.parametrize("quantizer", forms(), ids=str)
def test_copies_are_alike_before_and_after_the_start(quantizer: LSQ, how: str) -> None:
    quantizer, x = copy.deepcopy(quantizer), normal(*SHAPE)
    before = copied(quantizer, how)
    assert not before.initialized
    assert torch.equal(before(x), quantizer(x))
    after = copied(quantizer, how)
    assert after.initialized
    assert torch.equal(after(-2 * x), quantizer(-2 * x))
    after(x).sum().backward()
    assert after.scale.grad is not None
    assert quantizer.scale.grad is None


def test_a_start_that_is_half_done_is_continued() -> None:
    whole, first = LSQ(4, symmetric="auto", init_batches=3), LSQ(4, symmetric="auto", init_batches=3)
    batches = [normal(9, seed=seed) for seed in range(4)]
    whole(batches[0])
    first(batches[0])
    second = LSQ(4, symmetric="auto", init_batches=3)
    second.load_state_dict(first.state_dict())
    assert torch.equal(second(torch.empty(0)), torch.empty(0))
    for batch in batches[1:]:
        assert torch.equal(whole(batch), second(batch))
    assert torch.equal(whole.scale, second.scale)
    with torch.no_grad():
        second.scale.fill_(0.5)
    second(100 * normal(8))
    assert second.scale.item() == 0.5, "it belongs to the optimizer then"
    second.reset_parameters()
    assert not second.initialized
    assert torch.equal(second(batches[0].abs()), LSQ(4, symmetric="auto", init_batches=3)(batches[0].abs()))


def test_a_checkpoint_of_other_bits_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"quant_range is -8\.\.7 in the checkpoint; this quantizer has -128\.\.127"):
        LSQ(8).load_state_dict(LSQ(4).state_dict())
    with pytest.raises(RuntimeError, match=r"0\.\.15"):
        LSQ(4).load_state_dict(LSQ(4, symmetric=False).state_dict())
    LSQ(4, symmetric="auto").load_state_dict(LSQ(4).state_dict())


# --- torch.compile, inference mode, lent parameters -------------------------------------------------------------------
def test_compiled_after_the_start() -> None:
    """Its own, or that of a state."""
    first, second, x = LSQ(4, axis=-1), LSQ(4, axis=-1), normal(5, 6)
    y = first(x)
    second.load_state_dict(first.state_dict())
    assert "not initialized" not in repr(second)
    for quantizer in (first, second):
        compiled = torch.compile(quantizer, fullgraph=True, backend="eager")
        assert torch.equal(compiled(x), y)
    compiled(x).sum().backward()
    first(x).sum().backward()
    torch.testing.assert_close(first.scale.grad, second.scale.grad)


@pytest.mark.parametrize("quantizer", forms(), ids=str)
def test_a_start_in_inference_mode_can_be_trained(quantizer: LSQ) -> None:
    quantizer, x = copy.deepcopy(quantizer), normal(*SHAPE)
    with torch.inference_mode():
        y = quantizer(x)
    z = quantizer(x)
    assert torch.equal(y, z)
    z.sum().backward()
    assert quantizer.scale.grad is not None


@pytest.mark.parametrize("quantizer", forms(), ids=str)
def test_functional_gradients_are_those_of_backward(quantizer: LSQ) -> None:
    x = torch.randn(6, 16, generator=seeded(11)).requires_grad_()
    quantizer.initialize(x.detach())
    of = dict(quantizer.named_parameters())

    def loss(of: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(quantizer, of, (x,)).square().sum()

    quantizer(x).square().sum().backward()
    by_parameter, by_x = torch.func.grad(loss, argnums=(0, 1))(of, x.detach())
    assert torch.equal(by_x, x.grad)
    assert all(torch.equal(by_parameter[name], parameter.grad) for name, parameter in of.items())
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.func.grad(lambda x: torch.func.grad(loss, argnums=1)(of, x).sum())(x.detach())


def test_a_start_in_lent_parameters_is_refused() -> None:
    quantizer = LSQ(4)
    with pytest.raises(RuntimeError, match="calibrate"):
        torch.func.functional_call(quantizer, {"scale": torch.ones(1)}, normal(3))
    quantizer(normal(3))
    y = torch.func.functional_call(quantizer, {"scale": torch.ones(1)}, torch.tensor([2.2]))
    assert y.item() == 2.0


def test_an_activation_checkpoint_shows_its_batch_once() -> None:
    plain, checked = LSQ(4, init_batches=2), LSQ(4, init_batches=2)
    for seed in range(2):
        x = normal(9, seed=seed).requires_grad_()
        plain(x).sum().backward()
        torch.utils.checkpoint.checkpoint(checked, x, use_reentrant=False).sum().backward()
        assert checked.initialized == bool(seed)
    assert torch.equal(plain.scale, checked.scale)
    assert torch.equal(plain.scale.grad, checked.scale.grad)


# --- what is refused --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 1}, r"bits must be 2\.\.8, got 1"),
        ({"bits": 4.0}, "bits must be"),
        ({"axis": "0"}, "axis must be"),
        ({"bits": 9}, r"bits must be 2\.\.8, got 9"),
        ({"symmetric": "maybe"}, "True, False or 'auto', got 'maybe'"),
        ({"group": -1}, "group must be"),
        ({"group": 4, "axis": 0}, "an axis or a group"),
        ({"init_batches": 0}, "init_batches must be 1 or more, got 0"),
        ({"process_group": "world"}, "ProcessGroup of this rank, None .* or 'local', got 'world'"),
    ],
)
@pytest.mark.parametrize("kind", [LSQ, LSQPlus])
def test_wrong_options(kind: type[LSQ], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**options)


def test_tensors_that_do_not_fit() -> None:
    quantizer = LSQ(4, axis=0)
    quantizer(normal(3, 2))
    calls: list[tuple[Callable[[Tensor], Any], Tensor, str]] = [
        (quantizer, normal(5, 2), "3 elements, 5 expected"),
        (quantizer.initialize, normal(5, 2), "5 channels, the quantizer was sized for 3"),
        (LSQ(4, axis=2), normal(5, 2), "axis must be within"),
        (LSQ(4, group=4), normal(5, 6), "group=4 does not divide"),
        *((LSQ(4, axis=0).initialize, torch.tensor([[1.0, bad]]), "NaN or Inf") for bad in (math.nan, math.inf)),
    ]
    for call, x, message in calls:
        with pytest.raises(ValueError, match=message):
            call(x)
    for bad in (math.nan, math.inf):
        with torch.no_grad():
            quantizer.scale[1] = bad
        with pytest.raises(ValueError, match=rf"got {bad} \(channel 1\)"):
            quantizer(normal(3, 2))


# --- ranks ------------------------------------------------------------------------------------------------------------
def ranks_forms() -> list[LSQ]:
    auto = LSQ(4, symmetric="auto", init_batches=2)
    return [LSQ(4), auto, LSQ(2, axis=-1), LSQPlus(2, symmetric=True), LSQPlus(2, axis=0)]


def batch_of(rank: int, batch: int, world: int) -> Tensor:
    """Other data on every rank, of other sizes; rank 1 begins with nothing or with a NaN."""
    x = (1 + rank) * normal(4, 3 + rank, 5, seed=10 * rank + batch) + rank
    if rank == 1 and batch == 0:
        return x[:, :0] if world == 2 else x * math.nan
    return x


def start_on_a_rank(group: Group, batches: int) -> list[list[bytes]]:
    quantizers = ranks_forms()
    for quantizer in quantizers:
        for batch in range(batches):
            quantizer(batch_of(group.rank(), batch, group.size()))
        assert quantizer.initialized
    return [[bytes(p.detach().numpy()) for p in quantizer.parameters()] for quantizer in quantizers]


@worlds(3, rare=[2])
def test_ranks_start_alike_and_from_the_data_of_all(ranks: RankPool, world: int) -> None:
    found = ranks(world).run(start_on_a_rank, 2)
    assert all(one == found[0] for one in found)
    for quantizer, values in zip(ranks_forms(), found[0], strict=True):
        for batch in range(2):
            parts = [batch_of(rank, batch, world) for rank in range(world)]
            quantizer(torch.cat([x for x in parts if x.isfinite().all()], 1))
        for parameter, value in zip(quantizer.parameters(), values, strict=True):
            theirs = torch.frombuffer(bytearray(value), dtype=torch.float32)
            torch.testing.assert_close(theirs, parameter.detach(), rtol=4 * HALF_ULP, atol=0.0)


@on_ranks(2)
def test_ddp_wants_the_number_of_channels_first(group: Group) -> None:
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(3, 2), LSQ(axis=-1)), process_group=group)
    with pytest.raises(RuntimeError, match="before DDP"):
        model(normal(4, 3))


@on_ranks(2)
def test_a_start_of_this_process_alone(group: Group) -> None:
    alone, quantizer = LSQ(4, process_group="local"), LSQ(4, process_group="local")
    alone(normal(5))
    subgroup = dist.new_group([0])
    if group.rank() == 0:
        quantizer(normal(5))
        LSQ(4, process_group=subgroup)(normal(5))
        assert copy.deepcopy(LSQ(4, process_group=subgroup))(normal(5)) is not None
    assert quantizer.scale.item() == (1.0 if group.rank() else alone.scale.item())
