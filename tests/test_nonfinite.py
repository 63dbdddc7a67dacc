"""on_nonfinite: gradients with NaN or Inf that raise or are skipped, alike on all ranks; and feedback that drifts."""

import itertools
import math
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from cases import CPU, by_turns, thorough
from ranks import RankPool
from replicas import OPTIMIZERS, SHAPES, Given, Group, batch, draw, flat, network, same_everywhere, wrap
from thinwire import TopK, codec, compress_ddp, compress_fsdp
from thinwire.errors import CodecError, CollectiveError, NonfiniteError
from thinwire.feedback import Piece
from thinwire.integrations.nonfinite import Guard, Place
from thinwire.integrations.options import DDPOptions
from thinwire.integrations.stats import Drift, ErrorWatch, Tally, residual_bound

Options = Mapping[str, Any]


# --- a bad step between good ones -------------------------------------------------------------------------------------


class Run(NamedTuple):
    """Five steps of Adam's, the third with a bad number."""

    error: str  # at that step
    gradients: list[Tensor | None]  # that Adam finds, of all steps
    moved: list[bool]  # whether each step moved the parameters
    end: Tensor  # all parameters
    skipped: int


def whole(tensor: Any) -> Tensor | None:
    found = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return None if found is None else found.detach().clone()


def made(group: Group, kind: str, options: Options) -> tuple[nn.Module, Any]:
    net = Given(SHAPES)
    if kind == "fsdp":
        net = fully_shard(net, mesh=init_device_mesh("cpu", (group.size(),)))
        return net, compress_fsdp(net, **options)
    if kind == "hsdp":
        net = fully_shard(net, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))
        return net, compress_fsdp(net, **options)
    model = wrap(net, group, gradient_as_bucket_view=kind == "views", static_graph=kind == "static")
    return model, compress_ddp(model, **options)


def train(group: Group, kind: str, options: Options, bad: float) -> Run:
    """In the third step the last rank has a bad number in `c`; where nobody does, drop such gradients here."""
    model, handle = made(group, kind, options)
    optimizer = torch.optim.Adam(model.parameters(), 0.1, weight_decay=0.1)
    errors = []
    gradients: list[Tensor | None] = []
    ends = [flat([whole(p) for p in model.parameters()])]
    for step in range(5):
        given = draw(group.rank(), step)
        if step == 2 and group.rank() == group.size() - 1:
            given[2].view(-1)[700] = bad
        optimizer.zero_grad()
        try:
            model(*given).backward()
        except NonfiniteError as error:
            errors.append(f"{step}: {error}")
        found = [whole(p.grad) for p in model.parameters()]
        if any(not g.isfinite().all() for g in found if g is not None):
            optimizer.zero_grad()
        gradients += [whole(p.grad) for p in model.parameters()]
        optimizer.step()
        ends.append(flat([whole(p) for p in model.parameters()]))
    assert same_everywhere(group, ends[-1])
    moved = [not torch.equal(one, other) for one, other in itertools.pairwise(ends)]
    return Run(" ".join(errors), gradients, moved, ends[-1], handle.stats().skipped)


KINDS = ["plain", "views", "static", "fsdp"]
CODECS: list[Options] = [  # with the codec lloyd2
    {"warmup_steps": 9},  # nothing is compressed
    {"exempt": "none"},  # int8 until Adam is known, then gradients in its units
    {"feedback": "classic"},
    {"feedback": "ef21"},
]


@by_turns("kind, choice, world, options", KINDS, ["raise", "skip", "skip"], [2, 3], CODECS)
def test_a_bad_step_raises_or_is_left_out_on_all_ranks_and_the_next_is_as_ever(
    ranks: RankPool, kind: str, choice: str, world: int, options: Options
) -> None:
    chosen = {("gradients" if kind == "fsdp" else "codec"): "lloyd2", **options, "on_nonfinite": choice}
    check(ranks, world, kind, chosen, math.nan if choice == "raise" else math.inf)


def check(ranks: RankPool, world: int, kind: str, options: Options, bad: float) -> None:
    """All steps are those of a run that propagates, and whose user drops the gradients of the third."""
    guarded = ranks(world).run(train, kind, options, bad)
    dropped = ranks(world).run(train, kind, {**options, "on_nonfinite": "propagate"}, bad)
    raises = options["on_nonfinite"] == "raise"
    assert len({run.error for run in guarded}) == 1
    told = f"2: step 2: the gradient of c on rank {world - 1} holds NaN or Inf"
    assert guarded[0].error.startswith(told) if raises else not guarded[0].error
    for run, other in zip(guarded, dropped, strict=True):
        assert (run.skipped, other.skipped) == (0 if raises else 1, 0)
        assert run.moved == other.moved == [True, True, False, True, True]
        assert [g is None for g in run.gradients] == [i // len(SHAPES) == 2 for i in range(5 * len(SHAPES))]
        assert torch.equal(flat(run.gradients), flat(other.gradients))
        assert torch.equal(run.end, other.end)


@pytest.mark.parametrize("choice", ["skip", *thorough("raise")])
def test_replicas_of_shards_decide_together(ranks: RankPool, choice: str) -> None:
    check(ranks, 4, "hsdp", {"gradients": "lloyd2", "on_nonfinite": choice, "optimizer": "linear"}, math.nan)


# --- around it --------------------------------------------------------------------------------------------------------


def meet_the_scaler(group: Group) -> str:
    """What GradScaler says to a step that "skip" left it nothing of."""
    model = wrap(network(), group)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    compress_ddp(model, "int8", on_nonfinite="skip")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    x, y = batch(group.rank(), 0)
    scaler.scale((model(x) - y).square().mean() * (math.inf if group.rank() else 1.0)).backward()
    try:
        scaler.step(optimizer)
    except AssertionError as error:
        return str(error)
    return "stepped"


def join_late(group: Group) -> str:
    """Rank 0 has no data any more when rank 1 meets a NaN."""
    model = wrap(network(), group)
    compress_ddp(model, "int8", on_nonfinite="raise")
    try:
        with Join([model]):
            for step in range(1 + group.rank()):
                x, y = batch(group.rank(), step)
                ((model(x) - y).square().mean() * (math.nan if step else 1.0)).backward()
    except NonfiniteError as error:
        return str(error)
    return "nothing"


def refused(group: Group) -> list[str]:
    """Models whose ranks do not all look at the same parameters."""
    meshes = [init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")) for shape in ((2, 1), (1, 2))]
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(net[0], mesh=meshes[0])
    fully_shard(net, mesh=meshes[1])
    found = []
    for choice in ("raise", "skip"):
        with pytest.raises(CollectiveError, match="parameter groups on different meshes") as error:
            compress_fsdp(net, on_nonfinite=choice)  # type: ignore[arg-type]
        found.append(str(error.value))
    compress_fsdp(net, on_nonfinite="propagate").close()
    return found


def alone(group: Group) -> tuple[str, int]:
    """One rank has nothing to send, and looks all the same."""
    model, handle = made(group, "plain", {"on_nonfinite": "skip"})
    model(*[torch.full(shape, math.nan) for shape in SHAPES.values()]).backward()
    gone = all(p.grad is None for p in model.parameters())
    model(*draw(0)).backward()
    return f"{gone}, {all(p.grad is not None for p in model.parameters())}", handle.stats().skipped


def test_skip_and_raise_hold_at_the_edges(ranks: RankPool) -> None:
    assert ranks(2).run(meet_the_scaler) == ["No inf checks were recorded for this optimizer."] * 2
    told = ranks(2).run(join_late)
    assert told[0] == told[1]
    assert told[0].startswith("step 1: the gradient of 4.bias on rank 1 holds NaN or Inf")
    assert len(ranks(2).run(refused)[0]) == 2
    assert ranks(1).run(alone) == [("True, True", 1)]
    with pytest.raises(CodecError, match="on_nonfinite must be one of propagate, raise, skip, got 'stop'"):
        DDPOptions(on_nonfinite="stop")  # type: ignore[arg-type]


def test_the_first_bad_gradient_of_all_ranks_is_named() -> None:
    """Ranks look at the same parameters; sums may overflow where no gradient is bad."""
    fine, bad = torch.ones(3), torch.tensor([1.0, math.nan])
    ranks: list[list[Tensor]] = [[fine, fine, bad], [fine, bad, fine], [fine, bad, bad]]
    for rows, spoiled, text in (
        (ranks, True, "step 7: the gradient of b on rank 1 "),
        (ranks[:1], True, "step 7: the gradient of c on rank 0 "),
        ([[fine] * 3] * 2, True, "step 7: a sum over ranks overflowed"),
        ([[fine] * 3] * 2, False, ""),
    ):
        guards = [Guard("raise", Tally()) for _ in rows]
        codes = []
        for rank, (guard, row) in enumerate(zip(guards, rows, strict=True)):
            guard.look(["nothing", "a"], [torch.empty(0), row[0]])
            guard.look("bc", row[1:])
            codes.append(guard.code(Place(rank, len(rows)), spoiled=spoiled))
        for rank, guard in enumerate(guards):
            try:
                guard.judge(min(codes), Place(rank, len(rows)), 7, [])
                found = ""
            except NonfiniteError as error:
                found = str(error)
            assert found.startswith(text)
            assert bool(found) == bool(text)


# --- every lane is counted --------------------------------------------------------------------------------------------


def count(group: Group, kind: str, at: int) -> int:
    """Chunks that are not finite, where one number of the parameter `at` is not."""
    options = {("gradients" if kind == "fsdp" else "codec"): "int4"}
    model, handle = made(group, kind, options)
    gradients = draw(group.rank())
    if group.rank() == 1:
        gradients[at].view(-1)[0] = math.nan
    model(*gradients).backward()
    return int(handle.stats().nonfinite)


@pytest.mark.parametrize("kind", ["plain", "fsdp"])
def test_a_bad_number_is_counted_in_whatever_lane_it_travels(ranks: RankPool, kind: str) -> None:
    """Weights in 4 bits, and those in 16 that travel in the same message; shards are counted where they are summed."""
    for at in range(len(SHAPES)):
        found = ranks(2).run(count, kind, at)
        assert sum(found) == (1 if kind == "fsdp" else 2), (at, found)


# --- feedback that drifts ---------------------------------------------------------------------------------------------


def test_the_bound_is_that_of_a_geometric_series() -> None:
    """lloyd1 loses 0.363 of the squares of Gaussian numbers, lloyd2 0.1175; where that is less than half, 1 holds."""
    root = 0.363**0.5
    assert residual_bound(codec("lloyd1"), "classic", CPU) == pytest.approx(root / (1 - root), rel=0.05)
    assert residual_bound(codec("lloyd1"), "ef21", CPU) == pytest.approx(2 * root / (1 - root), rel=0.05)
    assert residual_bound(codec("lloyd2"), "classic", CPU) == residual_bound(codec("int8"), "ef21", CPU) == 1.0
    assert residual_bound(TopK(0.01), "classic", CPU) > 10


def seen(lost: float, given: float) -> list[ErrorWatch]:
    """A measured step of one parameter, by the squares of its residual and of its gradient."""
    watch = ErrorWatch([Piece("w", 4)], CPU, "classic")
    watch.codec = codec("lloyd2")
    watch.lost_P += lost
    watch.given_P += given
    return [watch]


def test_a_residual_that_stays_too_large_is_told_once() -> None:
    """Not one that a burst left, nor one that sinks, nor one of a gradient that is zero or NaN."""
    for steps, told in (
        ([(4.0, 1.0), (4.0, 1.0), (4.0, 1.0)], [False, True, False]),
        ([(0.5, 1.0), (4.0, 1.0), (0.5, 1.0)], [False, False, False]),
        ([(4.0, 1.0), (1.5, 1.0), (0.6, 0.1)], [False, False, False]),
        ([(4.0, 1.0), (8.0, 0.0), (4.0, 1.0)], [False, False, False]),
        ([(4.0, 1.0), (math.nan, 1.0), (4.0, 1.0)], [False, False, False]),
    ):
        drift = Drift()
        found = [drift.look(seen(*step)) for step in steps]
        assert [bool(text) for text in found] == told, steps
        for text in filter(None, found):
            assert "gradients of w (2.0 times, at most 1.0 expected)" in text
            assert "policy={'w': 'int4'}" in text
    assert Drift().look([]) == ""


def feed(group: Group, name: str, feedback: str, spike: float) -> list[str]:
    """The warnings of forty steps on gradients of ones, with one large number each."""
    model = wrap(Given({"w": (40, 50), "v": (40, 50)}), group)
    compress_ddp(model, name, feedback=feedback, measure_every=1, optimizer="linear", policy={"v": "int8"})
    gradient = torch.ones(40, 50)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(40):
            gradient.view(-1)[::1000] = spike
            noise = draw(group.rank(), step, {"w": (40, 50)})[0]
            model.zero_grad()
            model(gradient + 0.1 * noise, gradient).backward()
    return [str(warning.message) for warning in caught]


def test_a_codec_that_loses_most_of_a_gradient_warns_with_its_name(ranks: RankPool) -> None:
    """int2 sends the largest number of a block and nothing else, until what it owes is half of that."""
    for rank, found in enumerate(ranks(2).run(feed, "int2:block=1000", "classic", 60.0)):
        assert len(found) == 1, found
        assert found[0].startswith(f"rank {rank}: error feedback remembers many times the present gradients of w (")
    for name, feedback in (("int2:block=1000", "classic"), ("lloyd1", "classic"), ("lloyd1", "ef21")):
        assert ranks(2).run(feed, name, feedback, 60.0 if name == "lloyd1" else 1.0) == [[], []]
