"""Checkpoints of compressed FSDP2 runs: the same bits on the same ranks, the same sum of residuals on others."""

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import thinwire
from cases import by_turns, on_ranks, thorough
from ranks import RankPool
from replicas import Group, mesh_of, message_of
from thinwire import FSDPState

Options = Mapping[str, Any]
SAVED_AT = 2
STEPS = 3
CLASSIC: Options = {"gradients": "lloyd2", "feedback": "classic"}
EF21: Options = {"gradients": "lloyd2", "feedback": "ef21"}
COPIES: Options = {"gradients": "lloyd4", "weights": "lloyd4", "replica": True}
EXACT: Options = {"gradients": "lloyd4", "weights": "exact"}
NARROW: Options = {**CLASSIC, "residual_dtype": torch.bfloat16}
AUTO: Options = {"gradients": "auto:3", "optimizer": "adaptive"}
OFTEN: Options = {**AUTO, "replan_every": 1}


class Net(nn.Module):
    """Sizes that ranks do not divide, and one weight that is cut along its second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 61), nn.GELU(), nn.Linear(61, 24))
        self.across = nn.Linear(24, 60, bias=False)
        self.head = nn.Linear(60, 53)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.across(x + self.block(x)))
        return out


class Run:
    def __init__(self, mesh: DeviceMesh, options: Options, frozen: Sequence[str] = ()) -> None:
        torch.manual_seed(1)
        self.model = Net()
        for name in frozen:
            self.model.get_parameter(name).requires_grad_(False)
        fully_shard(self.model.block, mesh=mesh)
        fully_shard(self.model.across, mesh=mesh, shard_placement_fn=lambda _: Shard(1))
        fully_shard(self.model, mesh=mesh)
        self.handle: FSDPState = thinwire.compress_fsdp(self.model, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.9)
        self.rank = mesh.get_rank()

    def train(self, begin: int, end: int) -> None:
        for step in range(begin, end):
            x = torch.randn(5, 24, generator=torch.Generator().manual_seed(100 * step + self.rank))
            self.model(x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def shards(self) -> list[Tensor]:
        return [parameter.to_local().detach().clone() for parameter in self.model.parameters()]  # type: ignore[attr-defined]

    def save(self, path: str) -> None:
        weights, states = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": weights, "optimizer": states, "thinwire": self.handle.state_dict()}, checkpoint_id=path)

    def load(self, path: str, world: int | None = None) -> None:
        weights, states = get_state_dict(self.model, self.optimizer)
        saved = {"model": weights, "optimizer": states, "thinwire": self.handle.blank_state_dict(world)}
        dcp.load(saved, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=weights, optim_state_dict=states)
        self.handle.load_state_dict(saved["thinwire"])


def resumed(group: Group, folder: str, shape: Sequence[int], runs: Sequence[Options]) -> list[str]:
    """Options with which a resumed run differs from one that was never interrupted."""
    mesh = mesh_of(*shape)
    wrong = []
    for at, options in enumerate(runs):
        first = Run(mesh, options)
        first.train(0, SAVED_AT)
        first.save(f"{folder}/{at}")
        first.train(SAVED_AT, STEPS)
        second = Run(mesh, options)
        second.load(f"{folder}/{at}")
        second.train(SAVED_AT, STEPS)
        if second.handle.step != STEPS or not all(map(torch.equal, first.shards(), second.shards())):
            wrong.append(str(options))
    return wrong


@on_ranks(2)
def test_a_rank_finds_its_own_among_the_states_of_all(group: Group) -> None:
    """Means and copies."""
    options = {**EF21, **COPIES, "gradients": "lloyd2"}
    run = Run(mesh_of(group.size()), options)
    run.train(0, SAVED_AT)
    buffer = io.BytesIO()
    torch.save(run.handle.state_dict(), buffer)
    saved: list[Any] = [None] * group.size()
    dist.all_gather_object(saved, buffer.getvalue(), group=group)
    again = Run(mesh_of(group.size()), options)
    again.handle.load_state_dict([torch.load(io.BytesIO(one), weights_only=False) for one in saved])
    kept = (one.handle.state_dict() for one in (run, again))
    mine, loaded = ([[t.to_local() for t in state[name].values()] for name in ("mean", "replica")] for state in kept)
    assert all(mine)
    assert all(all(map(torch.equal, *pair)) for pair in zip(mine, loaded, strict=True))


@pytest.mark.parametrize(
    ("shape", "runs"),
    [
        *(((3,), [CLASSIC, COPIES, NARROW, EXACT]), ((2, 2), [EF21, AUTO])),
        *thorough(((3,), [EF21, AUTO]), ((2, 2), [CLASSIC, COPIES, NARROW, EXACT])),
    ],
    ids=["shards", "replicas", "shards, the others", "replicas, the others"],
)
def test_a_resumed_run_has_the_same_bits(
    ranks: RankPool, tmp_path: Path, shape: tuple[int, ...], runs: list[Options]
) -> None:
    world = math.prod(shape)
    assert ranks(world).run(resumed, str(tmp_path), shape, runs) == [[]] * world


@pytest.mark.parametrize("gather", [False, True])
@on_ranks(2)
def test_a_resumed_run_may_freeze_a_layer(group: Group, gather: bool) -> None:
    """Runs with a frozen parameter go on from states with errors, by which bits are dealt, of all or of the others."""
    mesh = mesh_of(group.size())
    for before, after in (((), ["block.1.weight"]), (["block.1.weight"], ["block.1.weight"])):
        first, second = Run(mesh, OFTEN, before), Run(mesh, OFTEN, after)
        first.train(0, SAVED_AT)
        state = [first.handle.state_dict(gather=gather)]
        if gather:
            dist.broadcast_object_list(state)
        second.handle.load_state_dict(state[0])
        second.train(SAVED_AT, STEPS)


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def saved_by(group: Group, path: str, shape: Sequence[int], options: Options) -> dict[str, Tensor]:
    """What this rank remembers after some steps that it saved."""
    run = Run(mesh_of(*shape), options)
    run.train(0, SAVED_AT)
    run.save(path)
    (own,) = run.handle.state_dict()["ranks"].values()
    return {name: whole(value) for name, value in own.items()}


def loaded_by(group: Group, path: str, shape: Sequence[int], options: Options, world: int) -> dict[str, Tensor]:
    """What this rank remembers of what `world` ranks, or replicas, saved; one more step shows that it can go on."""
    run = Run(mesh_of(*shape), options)
    run.load(path, world)
    assert run.handle.step == SAVED_AT
    (own,) = run.handle.state_dict()["ranks"].values()
    run.train(SAVED_AT, SAVED_AT + 1)
    return {name: whole(value) for name, value in own.items()}


@by_turns("worlds, options", [(4, 2), (2, 3)], [CLASSIC, EF21])
def test_the_sum_of_residuals_is_kept(
    ranks: RankPool, tmp_path: Path, worlds: tuple[int, int], options: Options
) -> None:
    old, new = worlds
    saved = ranks(old).run(saved_by, str(tmp_path), (old,), options)
    loaded = ranks(new).run(loaded_by, str(tmp_path), (new,), options, old)
    assert set(saved[0]) == {"block.1.weight", "block.3.weight", "across.weight", "head.weight"}
    for name in saved[0]:
        total = torch.stack([part[name] for part in saved]).sum(0)
        assert total.norm() > 0
        torch.testing.assert_close(torch.stack([part[name] for part in loaded]).sum(0), total)


@on_ranks(4)
def test_a_list_of_replicas_states_is_refused(group: Group) -> None:
    """Both shards of a replica save under one key."""
    run = Run(mesh_of(2, 2), EF21)
    run.train(0, SAVED_AT)
    own = run.handle.state_dict()
    words = "ranks that share a replica, which cannot be told apart in it: pass this rank's own"
    assert words in message_of(lambda: run.handle.load_state_dict([own, own]))


def test_replicas_share_what_they_saved_among_fewer(ranks: RankPool, tmp_path: Path) -> None:
    saved = ranks(4).run(saved_by, str(tmp_path), (2, 2), CLASSIC)  # two replicas of two shards
    loaded = ranks(2).run(loaded_by, str(tmp_path), (2, 1), CLASSIC, 2)  # two replicas of one
    for name in saved[0]:
        for replica in range(2):
            torch.testing.assert_close(loaded[replica][name], saved[2 * replica][name])


@on_ranks(3)
def test_what_was_loaded_may_be_saved_at_once(group: Group) -> None:
    """Copies of weights: as a run has them, and as another that loaded them, and then rejected what does not fit."""
    mesh = mesh_of(group.size())
    first = Run(mesh, COPIES)
    first.train(0, SAVED_AT)
    second = Run(mesh, COPIES)
    state = first.handle.state_dict()
    second.handle.load_state_dict(state)
    for wrong, words in (({"replicated": True}, "replicas"), ({"world": 7, "ranks": {}}, "needs what ranks")):
        assert words in message_of(lambda wrong=wrong: second.handle.load_state_dict({**state, **wrong}))
    states = [run.handle.state_dict()["replica"] for run in (first, second)]
    has, loaded = (torch.cat([whole(copy).view(-1) for copy in state.values()]) for state in states)
    assert has.norm() > 0
    assert torch.equal(has, loaded)
