"""OneBitAdam on one rank: AdamW while it warms up, momentum with a frozen variance after, and momentum that travels."""

import copy
import io
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases import assert_same, seeded, wire_of
from thinwire import Lloyd
from thinwire.optim import OneBitAdam

SHAPES = ((), (1,), (7,), (5, 6), (2, 3, 4, 5), (0, 3))


def parameters(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[nn.Parameter]:
    made = [torch.randn(shape, generator=seeded(seed, i), dtype=torch.float64) for i, shape in enumerate(SHAPES)]
    made[4] = made[4].to(memory_format=torch.channels_last)
    return [nn.Parameter(one.to(dtype)) for one in made]


def set_gradients(params: Sequence[Tensor], turn: int, skip: Callable[[int], bool] = lambda i: False) -> None:
    """Gradients of very different sizes, the same for parameters of the same place."""
    for i, p in enumerate(params):
        g = torch.randn(p.shape, generator=seeded(turn, i, 7), dtype=torch.float64) * 10.0 ** (i - 3)
        p.grad = None if skip(i) else g.to(p.dtype)


def copies_of(params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().clone(memory_format=torch.preserve_format)) for p in params]


def assert_close(got: Sequence[Tensor], want: Sequence[Tensor], tolerance: float) -> None:
    for i, (one, other) in enumerate(zip(got, want, strict=True)):
        gap = (one.double() - other.double()).abs()
        assert (gap <= tolerance * other.double().abs().clamp(min=1)).all(), f"parameter {i}: {gap.max()}"


def run(optimizer: torch.optim.Optimizer, turns: Sequence[int]) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for turn in turns:
        set_gradients(params, turn)
        optimizer.step()


# --- warm-up ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-13)], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"lr": 0.1, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.3}, {"betas": (0.0, 0.0)}], ids=str
)
def test_it_is_adamw_while_it_warms_up(dtype: torch.dtype, tolerance: float, options: dict[str, Any]) -> None:
    """A step moves by about lr; every step rounds a handful of times."""
    params = parameters(dtype)
    others = copies_of(params)
    run(OneBitAdam(params, **options, warmup_steps=100), range(30))
    run(torch.optim.AdamW(others, **{"weight_decay": 0.0, **options}), range(30))
    assert_close(params, others, tolerance)


def test_groups_have_their_own_settings() -> None:
    params = parameters(torch.float64)
    others = copies_of(params)

    def groups(of: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [
            {"params": of[:3], "lr": 0.01, "weight_decay": 0.1},
            {"params": of[3:], "betas": (0.8, 0.9), "eps": 1e-4},
        ]

    run(OneBitAdam(groups(params), lr=0.003, warmup_steps=50), range(30))
    run(torch.optim.AdamW(groups(others), lr=0.003, weight_decay=0.0), range(30))
    assert_close(params, others, 1e-13)


def test_parameters_that_miss_gradients_are_adamws_too() -> None:
    """Each has as many steps behind it as it had gradients."""
    params = parameters(torch.float64)
    others = copies_of(params)
    pair = OneBitAdam(params, lr=0.01, warmup_steps=50), torch.optim.AdamW(others, lr=0.01, weight_decay=0.0)
    for turn in range(20):
        for optimizer, of in zip(pair, (params, others), strict=True):
            set_gradients(of, turn, lambda i, turn=turn: (turn + i) % 3 == 0 or (i == 2 and turn < 15))  # type: ignore[misc]
            optimizer.step()
    assert_close(params, others, 1e-13)


def test_parameters_without_gradients_stay() -> None:
    params = parameters()
    before = copies_of(params)
    optimizer = OneBitAdam(params, weight_decay=0.1, warmup_steps=2)
    for _ in range(4):
        optimizer.step()
    assert_close(params, before, 0.0)


@pytest.mark.parametrize("warmup_steps", [1, 2, 5])
def test_it_is_frozen_after_so_many_steps(warmup_steps: int) -> None:
    params = parameters()
    optimizer = OneBitAdam(params, warmup_steps=warmup_steps)
    frozen = []
    for turn in range(7):
        frozen.append(optimizer.frozen)
        run(optimizer, [turn])
    assert frozen == [turn >= warmup_steps for turn in range(7)]


# --- after ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("floor", [0.0, 0.1, 1.0])
def test_the_variance_is_frozen_without_bias_above_its_floor(floor: float) -> None:
    params = parameters(torch.float64)
    others = copies_of(params)
    optimizer, adam = OneBitAdam(params, warmup_steps=9, floor=floor), torch.optim.AdamW(others)
    run(optimizer, range(9))
    run(adam, range(9))
    for p, other in zip(params, others, strict=True):
        unbiased = adam.state[other]["exp_avg_sq"] / (1 - 0.999**9)
        want = unbiased.clamp(min=max(floor, 1e-6) * float(unbiased.mean())) if unbiased.numel() else unbiased
        assert_close([optimizer.state[p]["exp_avg_sq"]], [want], 1e-12)
    frozen = [optimizer.state[p]["exp_avg_sq"].clone() for p in params]
    run(optimizer, range(9, 15))
    for p, square in zip(params, frozen, strict=True):
        assert_same(optimizer.state[p]["exp_avg_sq"], square, "it stays")


def test_frozen_steps_are_momentum_over_the_root_of_the_variance_up_to_one() -> None:
    params = parameters(torch.float64)
    lr, decay, eps, (beta, _) = 0.01, 0.2, 1e-6, (0.9, 0.99)
    optimizer = OneBitAdam(params, lr, (beta, 0.99), eps, decay, warmup_steps=3)
    run(optimizer, range(3))
    momenta = [optimizer.state[p]["exp_avg"].clone() for p in params]
    want = [p.detach().clone() for p in params]
    most = 0.0
    for turn in range(3, 10):
        run(optimizer, [turn])
        for i, p in enumerate(params):
            momenta[i] = beta * momenta[i] + (1 - beta) * p.grad  # type: ignore[operator]
            root = optimizer.state[p]["exp_avg_sq"].sqrt() + eps
            update = momenta[i] / (1 - beta ** (turn + 1)) / root
            most = max(most, *update.abs().flatten().tolist(), 0.0)
            want[i] = want[i] * (1 - lr * decay) - lr * update.clamp(-1, 1)
    assert_close(params, want, 1e-12)
    assert most > 1


def test_a_small_variance_takes_no_enormous_steps() -> None:
    """Numbers that had hardly a gradient while it warmed up, and have one later, move by lr at most."""
    p = nn.Parameter(torch.zeros(100))
    optimizer = OneBitAdam([p], lr=0.01, warmup_steps=5)
    for turn in range(30):
        p.grad = torch.ones(100)
        p.grad[50:] = 1e-12 if turn < 5 else 1.0
        before = p.detach().clone()
        optimizer.step()
        assert (p - before).abs().max() <= 0.01001


@pytest.mark.parametrize("grouped", [False, True])
def test_a_parameter_that_had_no_gradient_while_it_warmed_up_takes_no_enormous_steps(grouped: bool) -> None:
    """Layers that are thawed later, perhaps in a group of their own."""
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = OneBitAdam([{"params": [p]}, {"params": [q]}] if grouped else [p, q], warmup_steps=2)
    for turn in range(6):
        p.grad = torch.ones(3)
        q.grad = torch.ones(3) if turn >= 2 else None
        optimizer.step()
    assert (q - 1).abs().max() < 0.1


def test_looking_at_states_changes_nothing() -> None:
    """torch makes an empty state for whoever asks."""
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = OneBitAdam([p, q], warmup_steps=1)
    assert not optimizer.state[q]
    p.grad = torch.ones(2)
    for _ in range(3):
        optimizer.step()
    assert optimizer.frozen


def test_a_group_that_comes_late_takes_no_enormous_steps() -> None:
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = OneBitAdam([p], warmup_steps=2)
    run(optimizer, range(4))
    optimizer.add_param_group({"params": [q]})
    assert optimizer.frozen
    for _ in range(5):
        p.grad, q.grad = torch.ones(3), torch.ones(3)
        optimizer.step()
    scale = float(optimizer.state[p]["exp_avg_sq"].mean().sqrt())
    assert (1 - q).min() > 0
    assert (1 - q).max() < 5 * 2e-3 / scale


def test_groups_of_nothing_are_frozen_like_others() -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer = OneBitAdam([{"params": [nn.Parameter(torch.ones(0))]}, {"params": [p]}], warmup_steps=1)
    run(optimizer, range(3))
    assert optimizer.frozen


# --- momentum that travels --------------------------------------------------------------------------------------------


def test_gradients_become_momentum_in_place() -> None:
    params = parameters(torch.float64)
    optimizer = OneBitAdam(params, betas=(0.8, 0.99), warmup_steps=2)
    run(optimizer, range(2))
    momenta = [optimizer.state[p]["exp_avg"].clone() for p in params]
    set_gradients(params, 5)
    gradients = [p.grad.clone(memory_format=torch.preserve_format) for p in params]  # type: ignore[union-attr]
    optimizer.put_momentum(params, gradients)
    want = [0.8 * m + 0.2 * p.grad for m, p in zip(momenta, params, strict=True)]  # type: ignore[operator]
    assert_close(gradients, want, 1e-14)
    for p, momentum in zip(params, momenta, strict=True):
        assert_same(optimizer.state[p]["exp_avg"], momentum, "the state waits for the step")


def test_after_a_step_gradients_are_gradients_again() -> None:
    params = parameters(torch.float64)
    optimizer = OneBitAdam(params, warmup_steps=1)
    run(optimizer, [0])
    set_gradients(params, 1)
    optimizer.put_momentum(params, [p.grad for p in params])  # type: ignore[misc]
    sent = [p.grad.clone() for p in params]  # type: ignore[union-attr]
    optimizer.step()
    for p, momentum in zip(params, sent, strict=True):
        assert_close([optimizer.state[p]["exp_avg"]], [momentum], 1e-15)
    set_gradients(params, 2)
    gradients = [p.grad.clone() for p in params]  # type: ignore[union-attr]
    optimizer.step()
    for p, momentum, g in zip(params, sent, gradients, strict=True):
        assert_close([optimizer.state[p]["exp_avg"]], [0.9 * momentum + 0.1 * g], 1e-13)


def test_a_parameter_it_does_not_own_is_refused() -> None:
    optimizer = OneBitAdam([nn.Parameter(torch.ones(2))], warmup_steps=1)
    with pytest.raises(ValueError, match="OneBitAdam has to own every parameter of the model"):
        optimizer.put_momentum([nn.Parameter(torch.ones(2))], [torch.ones(2)])


def test_momentum_in_one_bit_reaches_the_bottom_of_a_bowl() -> None:
    """Four ranks, each with a bowl of its own; the momentum travels in one bit, and what is lost is carried over."""
    world, n, turns, codec = 4, 64, 400, Lloyd(1, 64)
    curvature = torch.logspace(-1, 1, n)
    targets = [torch.randn(n, generator=seeded(rank)) for rank in range(world)]
    bottom = torch.stack(targets).mean(0)
    ranks = [OneBitAdam([nn.Parameter(torch.full((n,), 3.0))], lr=0.1, warmup_steps=40) for _ in range(world)]
    residuals, noise = [torch.zeros(n) for _ in range(world)], seeded(99)
    for turn in range(turns):
        sent = []
        for rank, optimizer in enumerate(ranks):
            (p,) = owned(optimizer)
            optimizer.param_groups[0]["lr"] = 0.1 * (1 - turn / turns)
            p.grad = curvature * (p.detach() - targets[rank]) + 0.1 * torch.randn(n, generator=noise)
            if optimizer.frozen:
                optimizer.put_momentum([p], [p.grad])
                wire = wire_of(codec, p.grad, step=turn, residual=residuals[rank])
                codec.decode(wire, p.grad)
            sent.append(p.grad)
        mean = torch.stack(sent).mean(0)
        for optimizer in ranks:
            owned(optimizer)[0].grad = mean.clone()
            optimizer.step()
    ends = [owned(optimizer)[0] for optimizer in ranks]
    for end in ends[1:]:
        assert_same(end.detach(), ends[0].detach(), "another rank")
    assert (ends[0] - bottom).norm() < 0.05 * (3.0 - bottom).norm()


# --- being saved, copied, scheduled -----------------------------------------------------------------------------------


def owned(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def copy_of(optimizer: OneBitAdam) -> OneBitAdam:
    """Another optimiser of parameters of its own that goes on from a state_dict."""
    fresh = OneBitAdam(copies_of(owned(optimizer)), warmup_steps=999)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    return fresh


COPIES: dict[str, Callable[[OneBitAdam], OneBitAdam]] = {
    "state_dict": copy_of,
    "deepcopy": copy.deepcopy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("turns", [0, 2, 4, 7])
def test_it_goes_on_from_a_copy_with_the_same_bits(how: str, turns: int) -> None:
    """Before, in the middle of, at the end of and after the warm-up."""
    params = parameters()
    first = OneBitAdam(params, lr=0.01, weight_decay=0.1, warmup_steps=4, floor=0.3)
    run(first, range(turns))
    second = COPIES[how](first)
    assert second.frozen == first.frozen
    for optimizer in (first, second):
        run(optimizer, range(turns, turns + 5))
    assert second.frozen
    for one, other in zip(owned(first), owned(second), strict=True):
        assert_same(other.detach(), one.detach())
    set_gradients(owned(second), 9)
    second.put_momentum(owned(second), [p.grad for p in owned(second)])  # type: ignore[misc]
    second.step()


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=30),  # of betas too
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    ],
)
def test_schedulers_turn_its_knobs(schedule: Callable[[torch.optim.Optimizer], Any]) -> None:
    params = parameters(torch.float64)
    others = copies_of(params)
    pair = OneBitAdam(params, lr=0.02, warmup_steps=100), torch.optim.AdamW(others, lr=0.02, weight_decay=0.0)
    for optimizer in pair:
        scheduler = schedule(optimizer)
        for turn in range(12):
            run(optimizer, [turn])
            scheduler.step()
    assert_close(params, others, 1e-12)


def test_a_closure_is_called_once_with_gradients_on() -> None:
    p = nn.Parameter(torch.full((3,), 2.0))
    optimizer = OneBitAdam([p], lr=0.1, warmup_steps=2)
    calls = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    losses = [optimizer.step(closure).item() for _ in range(5)]
    assert calls == [True] * 5
    assert losses == sorted(losses, reverse=True)
    assert losses[0] == 12
    assert optimizer.step() is None


def test_steps_leave_no_graph_and_touch_no_gradient() -> None:
    params = parameters()
    optimizer = OneBitAdam(params, warmup_steps=2)
    for turn in range(4):
        set_gradients(params, turn)
        before = [p.grad.clone() for p in params]  # type: ignore[union-attr]
        optimizer.step()
        for p, gradient in zip(params, before, strict=True):
            assert p.grad_fn is None
            assert p.requires_grad
            assert_same(p.grad, gradient)  # type: ignore[arg-type]
    optimizer.zero_grad()
    assert all(p.grad is None for p in params)


def test_memory_formats_are_kept() -> None:
    params = parameters()
    optimizer = OneBitAdam(params, warmup_steps=2)
    run(optimizer, range(4))
    assert params[4].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_short_parameters_follow_their_own_adamw(dtype: torch.dtype) -> None:
    """States have the parameters' dtype, as torch's have."""
    params = [p for p in parameters(dtype) if p.dim() == 2]
    others = copies_of(params)
    for optimizer in (OneBitAdam(params, 0.01, warmup_steps=50), torch.optim.AdamW(others, 0.01, weight_decay=0.0)):
        for turn in range(10):
            for p in owned(optimizer):
                p.grad = torch.randn(p.shape, generator=seeded(turn)).to(dtype)
            optimizer.step()
    assert_close(params, others, 0.05)
    states = [state for p in params for state in OneBitAdam(params)._state(p).values() if isinstance(state, Tensor)]
    assert {state.dtype for state in states} == {dtype}


# --- misuse -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lr": -1.0}, "lr must be 0 or more, got -1.0"),
        ({"lr": math.nan}, "lr must be 0 or more, got nan"),
        ({"eps": -1e-9}, "eps must be 0 or more"),
        ({"weight_decay": -0.1}, "weight_decay must be 0 or more"),
        ({"floor": -0.1}, "floor must be 0 or more"),
        ({"betas": (1.0, 0.9)}, "betas must be from 0 up to, not including, 1, got"),
        ({"betas": (0.9, -0.1)}, "betas must be from 0 up to, not including, 1, got"),
        ({"warmup_steps": 0}, "warmup_steps must be 1 or more: the variance comes from them; got 0"),
        ({"warmup_steps": 2.5}, "warmup_steps must be 1 or more"),
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match="must be") as raised:
        OneBitAdam([nn.Parameter(torch.ones(2))], **options)
    assert says in str(raised.value)


def test_sparse_and_complex_are_refused() -> None:
    p = nn.Parameter(torch.ones(4, 2))
    with torch.sparse.check_sparse_tensor_invariants(True):  # torch warns where nobody says so
        p.grad = torch.sparse_coo_tensor([[1]], [[1.0, 1.0]], (4, 2))
    with pytest.raises(ValueError, match="OneBitAdam takes real parameters and dense gradients"):
        OneBitAdam([p]).step()
    q = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    q.grad = torch.ones(2, dtype=torch.complex64)
    with pytest.raises(ValueError, match="OneBitAdam takes real parameters and dense gradients"):
        OneBitAdam([q]).step()
