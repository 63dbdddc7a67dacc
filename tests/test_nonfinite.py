"""on_nonfinite: gradients with NaN or Inf that raise on all ranks alike, and are counted."""

import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from cases import by_turns, on_ranks
from ranks import RankPool
from replicas import SHAPES, Given, Group, batch, draw, flat, join_buckets, mesh_of, network, same_everywhere, wrap
from thinwire import compress_ddp, compress_fsdp
from thinwire.errors import CodecError, CollectiveError, NonfiniteError
from thinwire.integrations.choice.options import DDPOptions
from thinwire.integrations.sync import NonfiniteGuard

Options = Mapping[str, Any]


# --- a bad step between good ones -------------------------------------------------------------------------------------


class Run(NamedTuple):
    """Five steps of Adam's, the third with a bad number."""

    error: str  # at that step
    gradients: list[Tensor | None]  # that Adam finds, of all steps
    moved: list[bool]  # whether each step moved the parameters
    end: Tensor  # all parameters


def whole(tensor: Any) -> Tensor | None:
    found = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return None if found is None else found.detach().clone()


def made(group: Group, kind: str, options: Options) -> tuple[nn.Module, Any]:
    net = Given(SHAPES)
    if kind == "fsdp":
        net = fully_shard(net, mesh=mesh_of(group.size()))
        return net, compress_fsdp(net, **options)
    if kind == "hsdp":
        net = fully_shard(net, mesh=mesh_of(2, 2))
        return net, compress_fsdp(net, **options)
    model = wrap(net, group, gradient_as_bucket_view=kind == "views", static_graph=kind == "static")
    return model, compress_ddp(model, **options)


def train(group: Group, kind: str, options: Options, bad: float) -> Run:
    """In the third step the last rank has a bad number in `c`; where nobody does, drop such gradients here."""
    model, _ = made(group, kind, options)
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
    return Run(" ".join(errors), gradients, moved, ends[-1])


KINDS = ["plain", "views", "static", "fsdp"]
CODECS: list[Options] = [  # with the codec lloyd2
    {"warmup_steps": 9},  # nothing is compressed
    {"exempt": "none"},  # int8 until Adam is known, then gradients in its units
    {"feedback": "classic"},
    {"feedback": "ef21"},
]


@by_turns("kind, bad, world, options", KINDS, [math.nan, math.inf, -math.inf], [2, 3], CODECS)
def test_a_bad_step_raises_on_all_ranks_and_the_next_is_as_ever(
    ranks: RankPool, kind: str, bad: float, world: int, options: Options
) -> None:
    chosen = {("gradients" if kind == "fsdp" else "codec"): "lloyd2", **options, "on_nonfinite": "raise"}
    check(ranks, world, kind, chosen, bad)


def check(ranks: RankPool, world: int, kind: str, options: Options, bad: float) -> None:
    """All steps are those of a run that propagates, and whose user drops the gradients of the third."""
    guarded = ranks(world).run(train, kind, options, bad)
    dropped = ranks(world).run(train, kind, {**options, "on_nonfinite": "propagate"}, bad)
    assert len({run.error for run in guarded}) == 1
    assert guarded[0].error.startswith(f"2: step 2: the gradient of c on rank {world - 1} holds NaN or Inf")
    for run, other in zip(guarded, dropped, strict=True):
        assert run.moved == other.moved == [True, True, False, True, True]
        assert [g is None for g in run.gradients] == [i // len(SHAPES) == 2 for i in range(5 * len(SHAPES))]
        assert torch.equal(flat(run.gradients), flat(other.gradients))
        assert torch.equal(run.end, other.end)


def test_replicas_of_shards_decide_together(ranks: RankPool) -> None:
    check(ranks, 4, "hsdp", {"gradients": "lloyd2", "on_nonfinite": "raise", "optimizer": "linear"}, math.nan)


# --- around it --------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_raise_holds_under_join(group: Group) -> None:
    """Rank 0 has no data any more when rank 1 meets a NaN."""
    model = wrap(network(), group, 0.01)
    join_buckets(compress_ddp(model, "int8", on_nonfinite="raise"), 4000)

    def train() -> None:
        with Join([model]):
            for step in range(1 + group.rank()):
                x, y = batch(group.rank(), step)
                ((model(x) - y).square().mean() * (math.nan if step else 1.0)).backward()

    with pytest.raises(NonfiniteError, match=r"^step 1: the gradient of 4\.bias on rank 1 holds NaN or Inf"):
        train()


@on_ranks(2)
def test_models_of_several_meshes_cannot_raise(group: Group) -> None:
    """Models whose ranks do not all look at the same parameters."""
    meshes = [mesh_of(2, 1), mesh_of(1, 2)]
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(net[0], mesh=meshes[0])
    fully_shard(net, mesh=meshes[1])
    with pytest.raises(CollectiveError, match="parameter groups on different meshes"):
        compress_fsdp(net, on_nonfinite="raise")
    compress_fsdp(net, on_nonfinite="propagate").close()


@on_ranks(1)
def test_one_rank_raises_too(group: Group) -> None:
    """One rank has nothing to send, and looks all the same."""
    model, _ = made(group, "plain", {"on_nonfinite": "raise"})
    with pytest.raises(NonfiniteError, match="step 0: the gradient of"):
        model(*[torch.full(shape, math.nan) for shape in SHAPES.values()]).backward()
    model.zero_grad()
    model(*draw(0)).backward()


@on_ranks(3)
def test_ranks_of_a_smaller_group_are_those_of_the_world(group: Group) -> None:
    member = dist.new_group([1, 2])
    if group.rank() == 0:
        return
    model = DistributedDataParallel(nn.Linear(30, 40), process_group=member)
    compress_ddp(model, on_nonfinite="raise")
    x = torch.full((2, 30), math.nan if group.rank() == 2 else 1.0)
    with pytest.raises(NonfiniteError, match="on rank 2 holds NaN"):
        model(x).sum().backward()


def test_what_it_may_be_is_said() -> None:
    with pytest.raises(CodecError, match="on_nonfinite must be one of propagate, raise, got 'skip'"):
        DDPOptions(on_nonfinite="skip")  # type: ignore[arg-type]


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
        guards = [NonfiniteGuard() for _ in rows]
        codes = []
        for rank, (guard, row) in enumerate(zip(guards, rows, strict=True)):
            guard.look(["nothing", "a"], [torch.empty(0), row[0]])
            guard.look("bc", row[1:])
            codes.append(guard.code(rank, len(rows), spoiled=spoiled))
        for guard in guards:
            try:
                guard.check(min(codes), len(rows), 7)
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
