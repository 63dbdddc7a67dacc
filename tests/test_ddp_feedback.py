"""Feedback in DDP: what is not sent is owed, EF21 comes closer, the optimizer decides, NaN spoils no memory."""

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join
from torch.optim.optimizer import _global_optimizer_pre_hooks

import replicas
from cases import CPU, ROUND, assert_same, by_turns, each_device, on_ranks, small_chunks, thorough
from ranks import RankPool
from replicas import CODED, OPTIMIZERS, Device, Given, Group, backward, draw, flat, mean_of, residuals, wrap
from thinwire import Lloyd, compress_ddp
from thinwire.collectives import chunks


# --- classic feedback -------------------------------------------------------------------------------------------------
def conserve(
    group: Group, options: Mapping[str, Any], steps: int, constant: bool = False, device: Device = CPU
) -> tuple[Tensor, Tensor]:
    """The sum of all results, and what this rank still remembers."""
    model = wrap(Given(ready=replicas.READY), group, device=device)
    handle = compress_ddp(model, feedback="classic", exempt="none", **options)
    total = torch.zeros(sum(math.prod(shape) for shape in replicas.SHAPES.values()), dtype=torch.float64)
    for step in range(steps):
        mean = flat(backward(model, draw(group.rank(), 0 if constant else step)))
        assert replicas.same_everywhere(group, mean)
        total += mean
    return total, residuals(handle)


def check_conserved(answers: list[tuple[Tensor, Tensor]], steps: int, lost: Callable[[float], float]) -> None:
    """Results and residuals of all ranks add up to the true means.

    `lost(most)` is what a memory of numbers up to `most` loses at a step. Everything else rounds in fp32: message,
    residual and factor once each, the rotations of a block of 64 six times, in numbers of the size of its norm.
    """
    world, (total, _) = len(answers), answers[0]
    owed = torch.stack([kept for _, kept in answers]).sum(0)
    true = torch.stack([mean_of(world, step) for step in range(steps)]).sum(0)
    most = max(float(kept.abs().max()) for _, kept in answers)
    message = 5.0 + world * most
    slack = steps * (16 * ROUND * math.sqrt(64) * message + world * lost(most))
    assert most > 0.05
    assert (total + owed - true).abs().max() <= slack
    assert slack < most / 4  # so a residual that is lost or taken twice would show


@each_device
@by_turns("world, algorithm", replicas.WORLDS, CODED)
def test_what_is_not_sent_is_owed(ranks: RankPool, world: int, algorithm: str, device: Device) -> None:
    for name in ("lloyd2:block=64", "lloyd1:block=64", "int3:block=64", "byname(a=lloyd1:block=64; *=int2:block=64)"):
        answers = ranks(world).run(conserve, {"codec": name, "algorithm": algorithm}, 5, False, device)
        check_conserved(answers, 5, lambda most: 0.0)


@each_device
@pytest.mark.parametrize("algorithm", CODED)
def test_shorter_residuals_lose_their_own_rounding_only(ranks: RankPool, algorithm: str, device: Device) -> None:
    """Half a step of the memory's own grid."""
    options = {"codec": "lloyd2:block=64", "algorithm": algorithm, "residual_dtype": torch.bfloat16}
    check_conserved(ranks(3).run(conserve, options, 4, False, device), 4, lambda most: 2.0**-9 * most)


def conserve_in_chunks(group: Group, options: Mapping[str, Any], steps: int) -> tuple[Tensor, Tensor]:
    with small_chunks():
        return conserve(group, options, steps)


@by_turns("world, algorithm", [2, 3], CODED)
def test_chunks_owe_what_they_lose(ranks: RankPool, world: int, algorithm: str) -> None:
    """Lanes of one message may differ in how many chunks they have."""
    for name in ("lloyd2:block=64", "byname(a=lloyd1:block=64; b=int4:block=64; *=int2:block=64)"):
        answers = ranks(world).run(conserve_in_chunks, {"codec": name, "algorithm": algorithm}, 4)
        check_conserved(answers, 4, lambda most: 0.0)


SCHEDULES: list[dict[int, str]] = [
    {0: "lloyd2:block=64", 2: "byname(a=int3:block=64; *=lloyd2:block=64)", 4: "lloyd2:block=64"},
    {0: "lloyd1:block=64", 3: "int4:block=64"},
    {0: "none", 1: "lloyd2:block=64"},
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_residuals_move_with_their_parameters(ranks: RankPool, schedule: dict[int, str]) -> None:
    """Buckets are rebuilt after the first step, lanes change with the codecs."""
    check_conserved(ranks(3).run(conserve, {"codec": schedule}, 7), 7, lambda most: 0.0)


# --- EF21 -------------------------------------------------------------------------------------------------------------
def track(
    group: Group, options: Mapping[str, Any], steps: int, device: Device = CPU
) -> tuple[list[float], bool, float, bool]:
    """Distances to a constant mean; whether the result is the mean that is kept, by all ranks alike; its deviation
    from the sum over ranks of what was sent."""
    model = wrap(Given(ready=replicas.READY), group, device=device)
    handle = compress_ddp(model, feedback="ef21", exempt="none", **options)
    true, errors = mean_of(group.size()), []
    for _ in range(steps):
        result = flat(backward(model, draw(group.rank())))
        errors.append(float((result - true).norm() / true.norm()))
    state = handle.state_dict()
    kept = flat([state["mean"][name] for name in replicas.SHAPES]).cpu()
    sent = residuals(handle)
    dist.all_reduce(sent, group=group)
    alike = replicas.same_everywhere(group, result, kept)
    return errors, torch.equal(kept, result), float((sent - kept).abs().max()), alike


@each_device
@by_turns("world, algorithm", replicas.WORLDS, CODED[::-1])
def test_ef21_comes_closer_at_every_step(ranks: RankPool, world: int, algorithm: str, device: Device) -> None:
    """A step leaves sqrt(0.1175) = 0.343 of a distance at 2 bits, 0.603 at 1 bit; two phases add another's rounding."""
    for name, rate, steps in (("lloyd2:block=64", 0.36, 8), ("lloyd1:block=64", 0.63, 10)):
        options = {"codec": name, "algorithm": algorithm}
        for errors, is_mean, gap, alike in ranks(world).run(track, options, steps, device):
            assert is_mean
            assert alike
            assert gap < steps * 16 * ROUND * math.sqrt(64) * 5
            factor = rate if algorithm == "one_shot" else 1.35 * rate
            assert errors[-1] <= factor ** (steps - 1) * errors[0] + 1e-6
            assert errors[0] > 0.2


def test_ef21_moves_with_its_parameters(ranks: RankPool) -> None:
    schedule = {0: "lloyd2:block=64", 3: "byname(a=lloyd1:block=64; *=lloyd3:block=64)", 6: "lloyd2:block=64"}
    for errors, is_mean, gap, alike in ranks(3).run(track, {"codec": schedule}, 9):
        assert is_mean
        assert alike
        assert gap < 1e-4
        assert errors[-1] < 0.01


# --- which feedback ---------------------------------------------------------------------------------------------------
FEEDBACKS = {  # by codec: after SGD, after Adam
    **dict.fromkeys(("lloyd1", "lloyd2", "int2", "lloyd3", "auto:2.5"), ("classic", "none+moments")),
    **dict.fromkeys(("lloyd4", "int8", "bf16"), ("none", "none")),
}


@pytest.mark.parametrize("passed", [True, False], ids=["passed", "seen"])
@on_ranks(2)
def test_auto_chooses_feedback_by_codec_and_optimizer(group: Group, passed: bool) -> None:
    """An optimizer that is not passed is seen at its first step; nobody looks out after that."""
    before = len(_global_optimizer_pre_hooks)
    rows = [(name, *row) for name, kinds in FEEDBACKS.items() for row in zip(("sgd", "adam"), kinds, strict=True)]
    for name, optimizer, want in rows:
        model = wrap(replicas.network(), group)
        stepper = OPTIMIZERS[optimizer](model.parameters())
        handle = compress_ddp(model, name, optimizer=stepper if passed else None)
        first = want if passed and want == "classic" else "none"  # moments come with the first step
        for step, feedback in enumerate((first, want, want)):
            replicas.learn(model, stepper, group.rank(), range(step, step + 1))
            assert handle.stats().feedback == feedback, (name, optimizer, step)
        assert len(_global_optimizer_pre_hooks) == before
        assert replicas.same_everywhere(group, *model.parameters())


@on_ranks(2)
def test_ranks_agree_on_the_optimizer(group: Group) -> None:
    """A rank without any input sees no optimizer step."""
    model = wrap(Given(), group)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    compress_ddp(model, "lloyd2")
    with Join([model]):
        for step in range(0 if group.rank() == 1 else 4):
            optimizer.zero_grad()
            model(*draw(group.rank(), step)).backward()
            optimizer.step()


BY_RANK: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"optimizer": "adam"}, {"optimizer": "adam", "weigh": "none"}),
    ({"optimizer": "adam"}, {"optimizer": "sgd"}),
    ({"optimizer": "adam"}, {"optimizer": "adaptive"}),  # of which nobody knows moments
    ({"optimizer": "adam"}, {}),
    ({"residual_dtype": torch.float32}, {"residual_dtype": torch.bfloat16}),
    ({"error_budget": 0.1}, {"error_budget": 0.2}),
    ({"measure_every": 3}, {"warmup_steps": 3}),
]


@on_ranks(2)
def test_options_that_differ_by_rank_raise_on_all(group: Group) -> None:
    for options in BY_RANK:
        model = wrap(Given(), group)
        optimizers = {name: OPTIMIZERS[name](model.parameters()) for name in ("adam", "sgd")}
        compress_ddp(model, "lloyd2", **{k: optimizers.get(v, v) for k, v in options[group.rank()].items()})
        told = replicas.message_of(lambda model=model: model(*draw(group.rank())).backward())
        assert "the ranks disagree about operation" in told, (options, told)


# --- NaN and infinities -----------------------------------------------------------------------------------------------
class Broken(NamedTuple):
    """What one bad number on rank 1 does."""

    got: Tensor
    want: Tensor  # from the same state, without it
    unchanged: bool  # whether nothing remembered changed
    counted: int
    after: Tensor  # the next step


def states_equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    pairs = [(one["mean"], other["mean"]), *((one["ranks"][k], other["ranks"][k]) for k in one["ranks"])]
    return all(x.keys() == y.keys() and all(torch.equal(x[n], y[n]) for n in x) for x, y in pairs)


def break_one(
    group: Group,
    options: Mapping[str, Any],
    at: int,
    bad: float,
    shapes: replicas.Shapes = replicas.WHOLE,
    device: Device = CPU,
) -> Broken:
    model = wrap(Given(shapes), group, 1024.0, device=device)
    handle = compress_ddp(model, **options)
    for step in range(3):
        backward(model, draw(group.rank(), step, shapes))
    before, counted = copy.deepcopy(handle.state_dict()), handle.stats().nonfinite
    gradients = draw(group.rank(), 3, shapes)
    broken = [g.clone() for g in gradients]
    if group.rank() == 1:
        for g in broken:
            if 0 <= at < g.numel():
                g.view(-1)[at] = bad
            at -= g.numel()
    got = flat(backward(model, broken))
    unchanged, counted = states_equal(before, handle.state_dict()), handle.stats().nonfinite - counted
    assert replicas.same_everywhere(group, got.nan_to_num())
    after = flat(backward(model, draw(group.rank(), 4, shapes)))
    handle.load_state_dict(before)
    return Broken(got, flat(backward(model, gradients)), unchanged, counted, after)


FEEDBACK_KINDS = ("none", "classic", "ef21")
BROKEN = [(2 + (i + j) % 2, a, f) for i, a in enumerate(CODED) for j, f in enumerate(FEEDBACK_KINDS)]


@each_device
@pytest.mark.parametrize(
    ("world", "algorithm", "feedback"), [*BROKEN, *thorough(*((5 - world, *rest) for world, *rest in BROKEN))]
)
def test_a_bad_number_spoils_its_block_and_nothing_that_is_remembered(
    ranks: RankPool, world: int, algorithm: str, feedback: str, device: Device
) -> None:
    n, at, block = 2013, 1100, 64
    shard = n if algorithm == "one_shot" else -(-n // world)
    begin = at // shard * shard + at % shard // block * block
    kinds = (math.nan, -math.inf) if (world == 2) == (algorithm == "one_shot") else (-math.inf, math.nan)
    for name, bad in zip(("lloyd2:block=64", "int4:block=64"), kinds, strict=True):
        options = {"codec": name, "feedback": feedback, "algorithm": algorithm, "exempt": "none"}
        for found in ranks(world).run(break_one, options, at, bad, replicas.WHOLE, device):
            want = found.want.clone()
            want[begin : begin + block] = math.nan
            assert_same(found.got, want, name)
            assert found.unchanged
            assert found.counted == 1
            assert found.after.isfinite().all()


@by_turns("feedback, world", FEEDBACK_KINDS, [2, 3])
def test_a_bad_exempt_number_spoils_itself_only(ranks: RankPool, feedback: str, world: int) -> None:
    """It lies between weights and travels in their message; their residuals wait as well."""
    options = {"codec": "lloyd2", "feedback": feedback}
    for found in ranks(world).run(break_one, options, 2000 + 5, math.inf, replicas.SHAPES):
        want = found.want.clone()
        want[2005] = math.nan
        assert_same(torch.where(found.got.isinf(), math.nan, found.got), want)
        assert not found.got[2005].isfinite()
        assert found.unchanged
        assert found.counted == 1


@by_turns("world, feedback", [2, 3], ["classic", "ef21"])
@on_ranks()
def test_other_chunks_remember_as_ever(group: Group, feedback: str) -> None:
    """A bad number spoils its block of the results, and no residual of its chunk changes on any rank."""
    shapes, coder = {"w": (4000,)}, Lloyd(2, 32)
    with small_chunks():
        chunking = chunks.choose_chunking(4000, coder.wire_bytes(4000), group.size(), group.size())
        span = next(span for i in range(chunking.num_chunks) if (span := chunking.span(i)).begin <= 1234 < span.end)
        model = wrap(Given(shapes), group, 1024.0)
        handle = compress_ddp(model, coder, feedback=feedback, exempt="none")
        for step in range(2):
            backward(model, draw(group.rank(), step, shapes))
        before = residuals(handle, shapes)
        (gradient,) = draw(group.rank(), 2, shapes)
        if group.rank() == 0:
            gradient[1234] = math.nan
        got = flat(backward(model, [gradient]))
    changed = (residuals(handle, shapes) != before).double()
    dist.all_reduce(changed, dist.ReduceOp.MAX, group=group)
    begin, end, bad = span.begin, span.end, got.isnan()
    assert 0 < begin < end < 4000
    assert bad[1234]
    assert bad.sum() <= 32
    assert handle.stats().nonfinite == 1
    assert not changed[begin:end].any()
    assert changed[:begin].mean() > 0.99
    assert changed[end:].mean() > 0.99


SCALED: list[dict[str, Any]] = [
    *({"codec": codec} for codec in ("none", "lloyd2", "auto:2.5")),
    {"codec": "int8", "exempt": "none"},
    {"codec": "lloyd2", "feedback": "classic"},
    {"codec": "lloyd1:block=64", "feedback": "ef21"},
]


@pytest.mark.parametrize("options", SCALED, ids=str)
@on_ranks(2)
def test_a_gradient_scaler_skips_the_step_on_every_rank(group: Group, options: Mapping[str, Any]) -> None:
    """Whether each of five steps moved the parameters, where the third has an Inf; the scales."""
    model = wrap(replicas.network(), group)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    compress_ddp(model, **options)
    moved, scales = [], []
    for step in range(5):
        x, y = replicas.batch(group.rank(), step)
        before = flat(list(model.parameters()))
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        if step == 2 and group.rank() == 1:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        moved.append(not torch.equal(before, flat(list(model.parameters()))))
        scales.append(scaler.get_scale())
    assert (moved, scales) == ([True, True, False, True, True], [8.0, 8.0, 4.0, 4.0, 4.0])
    assert all(p.isfinite().all() for p in model.parameters())
    assert replicas.same_everywhere(group, *model.parameters())
