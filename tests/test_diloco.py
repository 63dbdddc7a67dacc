"""DiLoCo: rounds against a plain reference, codecs, feedback, fragments, overlap, sites, checkpoints, faults."""

import copy
import io
import time
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from cases import assert_same, in_time, on_ranks, worlds
from ranks import RankPool
from replicas import Group, batch, flat, learn, message_of, network, same_everywhere
from thinwire import CollectiveError, DiLoCo
from thinwire.errors import DisagreementError

STEPS = 13
RATE = 0.05


def inner(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), RATE, momentum=0.5)


# Against a reference of a few lines, all ranks in one process.


def reference(world: int, every: int, fragments: list[list[int]], overlap: int) -> list[Tensor]:
    """Parameters of every rank after STEPS steps: averages are exact, the outer optimizer is SGD with Nesterov."""
    models = [network() for _ in range(world)]
    optimizers = [inner(model) for model in models]
    outer = [p.detach().clone().requires_grad_() for p in models[0].parameters()]
    stepper = torch.optim.SGD(outer, lr=0.7, momentum=0.9, nesterov=True)
    waiting: list[tuple[int, list[int], list[list[Tensor]]]] = []
    for step in range(STEPS):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            learn(model, optimizer, rank, range(step, step + 1))
        for at, part in enumerate(fragments):
            if (step + 1) % every == at * every // len(fragments) % every:
                sent = [[list(model.parameters())[i].detach().clone() for i in part] for model in models]
                waiting.append((step + 1 + overlap, part, sent))
        for due, part, sent in [one for one in waiting if one[0] == step + 1]:
            with torch.no_grad():
                for k, i in enumerate(part):
                    outer[i].grad = outer[i] - torch.stack([of_rank[k] for of_rank in sent]).mean(0)
                stepper.step()
                for k, i in enumerate(part):
                    outer[i].grad = None
                    for model, of_rank in zip(models, sent, strict=True):
                        own = list(model.parameters())[i]
                        own.copy_(outer[i] + (own - of_rank[k]))
            waiting = [one for one in waiting if one[0] != due or one[1] is not part]
    return [flat(list(model.parameters())) for model in models]


class Elsewhere(torch.optim.SGD):
    """Leaves its results in new tensors."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for parameter in self.param_groups[0]["params"]:
            parameter.data = parameter.data.clone()


def ours(group: Group, options: Mapping[str, Any], own: bool = False) -> Tensor:
    """own: with an outer optimizer over the model's parameters, as other libraries take it."""
    model = network()
    optimizer = inner(model)
    outer = {"outer_optimizer": Elsewhere(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)} if own else {}
    DiLoCo(model, optimizer, codec="none", **outer, **options)
    learn(model, optimizer, group.rank(), range(STEPS))
    return flat(list(model.parameters()))


WAYS: dict[str, tuple[dict[str, Any], list[list[int]]]] = {
    "every 4": ({"every": 4}, [[0, 1, 2, 3, 4, 5]]),
    "fragments": ({"every": 6, "fragments": 2}, [[0, 1], [2, 3, 4, 5]]),
    "overlap": ({"every": 5, "overlap": 2}, [[0, 1, 2, 3, 4, 5]]),
    "both": ({"every": 6, "fragments": 2, "overlap": 4}, [[0, 1], [2, 3, 4, 5]]),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", [2, 3])
def test_rounds_are_those_of_the_reference(ranks: RankPool, world: int, way: str) -> None:
    options, fragments = WAYS[way]
    expected = reference(world, options["every"], fragments, options.get("overlap", 0))
    found = ranks(world).run(ours, options)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)  # sums in another order
    assert not torch.equal(expected[0], flat(list(network().parameters())))


@on_ranks(2)
def test_a_model_in_fp64_stays_exact(group: Group) -> None:
    model = nn.Linear(40, 40).double()
    torch.manual_seed(3)
    begun = torch.randn(40, 40, dtype=torch.float64)
    model.weight.data.copy_(begun)
    diloco = DiLoCo(model, None, lambda outer: torch.optim.SGD(outer, lr=1.0), every=1, codec="none")
    assert torch.equal(model.weight, begun)
    model.weight.data.add_(group.rank() / 3)
    diloco.step()
    assert (model.weight.detach() - begun - 1 / 6).abs().max() < 1e-14  # a few roundings of numbers below 5


# Codecs and feedback.


def compressed(group: Group, name: str) -> tuple[list[float], float, str, bool]:
    model = network()
    optimizer = inner(model)
    with DiLoCo(model, optimizer, every=4, **CODECS[name][0]) as diloco:
        losses = learn(model, optimizer, group.rank(), range(40))
    assert diloco.closed
    stats = diloco.stats()
    return losses, stats.ratio, stats.feedback, same_everywhere(group, flat(list(model.parameters())))


CODECS: dict[str, tuple[dict[str, Any], float, str]] = {
    "lloyd4": ({}, 5.5, "none"),
    "int8": ({"codec": "int8"}, 3.2, "none"),
    "lloyd2": ({"codec": "lloyd2"}, 8.0, "none"),
    "lloyd1": ({"codec": "lloyd1", "fragments": 2, "feedback": "classic"}, 10.0, "classic"),
    "topk": ({"codec": "topk"}, 10.0, "classic"),
    "adam outside": ({"codec": "topk", "outer_optimizer": lambda outer: torch.optim.Adam(outer, 0.01)}, 10.0, "ef21"),
    "budget": ({"codec": "auto:3", "feedback": "none"}, 5.0, "none"),
}


@worlds(2, 3, rare=[4])
def test_compressed_rounds_train_and_agree(ranks: RankPool, world: int) -> None:
    names = list(CODECS)[world % 2 :: 2]
    for name in names:
        options, least, feedback = CODECS[name]
        for losses, ratio, used, same in ranks(world).run(compressed, name):
            assert same, name
            assert ratio > least * (0.6 if world > 2 else 1.0), name
            assert used == feedback, name
            assert sum(losses[-5:]) < 0.5 * sum(losses[:5]), (name, options)


@pytest.mark.parametrize(("codec", "beta"), [("lloyd1", 0.9), ("topk", 1.0)])
@on_ranks(3)
def test_what_was_lost_is_remembered(group: Group, codec: str, beta: float) -> None:
    """What ranks remember together, and how far that is from beta times what they did, plus the mean, less the step."""
    model = nn.Linear(64, 64, bias=False)
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    diloco = DiLoCo(model, None, plain, every=1, codec=codec, feedback="classic", beta=beta)
    expected = torch.zeros(64, 64)
    for seed in range(group.rank(), 30, 10):
        before = model.weight.detach().clone()
        learned = torch.randn(64, 64, generator=torch.Generator().manual_seed(seed))
        model.weight.data.sub_(learned)
        diloco.step()
        (residual,) = diloco.state_dict()["compression"]["ranks"][str(group.rank())].values()
        dist.all_reduce(learned)
        dist.all_reduce(residual)
        expected = beta * expected + learned / group.size() - (before - model.weight.detach())
        assert (residual.view(64, 64) - expected).abs().max() < 1e-5  # a few roundings of numbers below 10
    assert expected.norm() > 10


@pytest.mark.parametrize("feedback", ["none", "classic", "ef21"])
@on_ranks(2)
def test_feedback_that_forgets_keeps_the_size_of_a_step(group: Group, feedback: str) -> None:
    """All ranks always move by one, and the outer rate is 1."""
    model = nn.Linear(64, 64, bias=False)
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    diloco = DiLoCo(model, None, plain, every=1, codec="int8", feedback=feedback)  # type: ignore[arg-type]
    for _ in range(8):
        before = model.weight.detach().clone()
        model.weight.data.sub_(1.0)
        diloco.step()
        assert float((before - model.weight.detach()).mean()) == pytest.approx(1.0, abs=1 / 127)  # a step of int8


# Checkpoints.


RESUMED: dict[str, dict[str, Any]] = {
    "classic": {"every": 3, "codec": "lloyd2", "feedback": "classic"},
    "under way": {"every": 5, "codec": "lloyd2", "feedback": "classic", "overlap": 4, "fragments": 2},
    "ef21": {"every": 2, "codec": "lloyd4", "feedback": "ef21"},
    "budget": {"every": 2, "codec": "auto:2.5"},
}


def resumed(group: Group, name: str, saved: list[bytes], gather: bool = False) -> tuple[Tensor, bytes]:
    model = network()
    optimizer = inner(model)
    diloco = DiLoCo(model, optimizer, **RESUMED[name])
    begin = 0
    file = io.BytesIO()
    if saved:
        state = torch.load(io.BytesIO(saved[group.rank()]), weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        diloco.load_state_dict(state["diloco"])
        begin = 7
    for step in range(begin, STEPS):
        if step == 7:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "diloco": diloco.state_dict(gather=gather)}, file)
        learn(model, optimizer, group.rank(), range(step, step + 1))
    assert diloco.steps == STEPS
    return flat(list(model.parameters())), file.getvalue()


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_has_the_same_bits(ranks: RankPool, name: str) -> None:
    straight = ranks(2).run(resumed, name, [])
    again = ranks(2).run(resumed, name, [file for _, file in straight])
    for (expected, _), (got, _) in zip(straight, again, strict=True):
        assert_same(got, expected)


@on_ranks(2)
def test_a_state_waits_for_rounds_under_way(group: Group) -> None:
    """One that is saved while another rank is late has what a later one of the same step has."""
    model = network()
    diloco = DiLoCo(model, None, every=2, codec="lloyd2", feedback="classic", overlap=1)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(group.rank())))
    diloco.synchronize()  # ranks have met in messages of this kind
    for parameter in model.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(group.rank())))
    time.sleep(0.5 * group.rank())
    diloco.step()
    diloco.step()
    (early,) = diloco.state_dict()["compression"]["ranks"].values()
    (late,) = diloco.state_dict()["compression"]["ranks"].values()
    assert all(torch.equal(early[name], late[name]) for name in late)


@on_ranks(2)
def test_states_share_no_memory_with_the_run(group: Group) -> None:
    """Rounds change neither a state that was saved before, nor one that was loaded."""
    model = network()
    optimizer = inner(model)
    diloco = DiLoCo(model, optimizer, every=2, codec="lloyd4", overlap=1)
    learn(model, optimizer, group.rank(), range(5))
    for load in (False, True):
        state = diloco.state_dict()
        if load:
            diloco.load_state_dict(state)
        before = copy.deepcopy(state)
        learn(model, optimizer, group.rank(), range(5))
        for one, other in zip(*map(tree_leaves, (state, before)), strict=True):
            assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


def joined(group: Group, saved: bytes) -> tuple[int, float, Tensor]:
    """A gathered state on another number of ranks: rounds so far, what all still owe, and the outer parameters."""
    diloco = DiLoCo(network(), None, **RESUMED["classic"])
    diloco.load_state_dict(torch.load(io.BytesIO(saved), weights_only=True)["diloco"])
    (own,) = diloco.state_dict()["compression"]["ranks"].values()
    total = torch.cat([own[name] for name in sorted(own)])
    dist.all_reduce(total)
    return diloco.rounds, float(total.sum()), flat(list(diloco.state_dict()["outer"].values()))


def test_a_gathered_state_serves_another_world(ranks: RankPool) -> None:
    saved = ranks(3).run(resumed, "classic", [], True)[0][1]
    state = torch.load(io.BytesIO(saved), weights_only=True)["diloco"]
    owed = sum(
        float(value.double().sum()) for part in state["compression"]["ranks"].values() for value in part.values()
    )
    for rounds, total, outer in ranks(2).run(joined, saved):
        assert rounds == 2
        assert total == pytest.approx(owed, rel=1e-3, abs=1e-3)
        assert_same(outer, flat(list(state["outer"].values())))


@on_ranks(4)
def test_states_that_do_not_fit_are_refused(group: Group) -> None:
    first = DiLoCo(network(), None, every=4, fragments=2, overlap=3, codec="lloyd2", feedback="classic")
    for _ in range(3):
        first.step()
    state = first.state_dict()
    sharded = network()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "inside"))
    fully_shard(sharded, mesh=mesh["inside"])
    parts = DiLoCo(sharded, None, every=2, group=mesh.get_group("site"))
    states: list[Any] = [None] * group.size()
    dist.all_gather_object(states, state, group=group)
    rank, other = group.rank(), DiLoCo(network(), None, every=4)
    told = f"rank {rank} of 4 needs what ranks [{rank}] of 4 saved, got that of [{(rank - 1) % 4}]"
    assert "rounds in flight of 2 fragments, got 1" in message_of(lambda: other.load_state_dict(state))
    assert told in message_of(lambda: first.load_state_dict(states[rank - 1]))
    assert "gather=True: parameters are sharded" in message_of(lambda: parts.state_dict(gather=True))
    assert message_of(lambda: first.load_state_dict(state)) == "accepted!"


# Sites of several ranks, ranks that differ, and faults.


@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
@on_ranks(4)
def test_sites_of_several_ranks(group: Group, sharded: bool) -> None:
    """Two sites of two ranks, which train together."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "inside"))
    model = network()
    if sharded:
        fully_shard(model, mesh=mesh["inside"])
        wrapped = model
    else:
        wrapped = DistributedDataParallel(model, process_group=mesh.get_group("inside"))
    optimizer = inner(wrapped)
    with DiLoCo(wrapped, optimizer, every=3, codec="int8", group=mesh.get_group("site")) as diloco:
        learn(wrapped, optimizer, group.rank(), range(9))
    whole = [p.full_tensor() if sharded else p for p in model.parameters()]  # type: ignore[operator]
    assert diloco.stats().ratio > 2.5
    assert same_everywhere(group, *whole)
    assert not torch.equal(flat(whole), flat(list(network().parameters())))


@on_ranks(4)
def test_an_optimizer_sharded_inside_sites(group: Group) -> None:
    """Sites of two ranks whose optimizer each rank has a part of, and has all of; one over sites is refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own
        from torch.distributed.optim import ZeroRedundancyOptimizer
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "inside"))
    inside = mesh.get_group("inside")
    found, told = [], []
    for sharded in (True, False):
        model = network()
        wrapped = DistributedDataParallel(model, process_group=inside)
        optimizer = inner(wrapped)
        if sharded:
            kind = torch.optim.SGD
            everywhere = ZeroRedundancyOptimizer(model.parameters(), kind, lr=RATE)
            told.append(message_of(lambda m=model, o=everywhere: DiLoCo(m, o, every=3)))
            optimizer = ZeroRedundancyOptimizer(model.parameters(), kind, inside, lr=RATE, momentum=0.5)
        with DiLoCo(wrapped, optimizer, every=3, group=mesh.get_group("site")) as diloco:
            learn(wrapped, optimizer, group.rank(), range(9))
            told.append(message_of(lambda m=model: DiLoCo(m, None, every=3)))  # without its wrapper
        assert diloco.rounds == 3
        found.append(flat(list(model.parameters())))
    assert_same(*found)
    assert "ranks [0, 1, 2, 3] average" in told[0]
    assert all("close() it first" in one for one in told[1:])


@on_ranks(4)
def test_a_rank_without_elements_of_a_parameter_knows_its_name(group: Group) -> None:
    """The last layer has one row, which one rank of a site holds: what all ranks are told of rules by its name."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "inside"))
    model = network()
    fully_shard(model, mesh=mesh["inside"])
    options: dict[str, Any] = {"every": 2, "group": mesh.get_group("site")}
    outer = torch.optim.SGD(model.parameters(), 0.7)
    DiLoCo(model, None, policy={"4.*": "int8"}, exempt=["4.bias"], **options)
    DiLoCo(model, None, outer, **options)


@on_ranks(2)
def test_ranks_that_differ_are_told_so(group: Group) -> None:
    first = group.rank() == 0
    model = network()
    models = [network(), nn.Linear(20, 3)]
    *told, fine = [
        message_of(lambda: DiLoCo(model, None, every=2 if first else 3)),
        message_of(lambda: DiLoCo(model, None, every=4, fragments=1 if first else 2)),
        message_of(lambda: DiLoCo(model, None, every=4, overlap=0 if first else 2)),
        message_of(lambda: DiLoCo(models[group.rank()], None, every=4)),
        message_of(lambda: DiLoCo(model, None, every=4, beta=0.5 if first else 0.9)),
        message_of(lambda: DiLoCo(model, None, partial(torch.optim.SGD, lr=0.5 if first else 0.7), every=4)),
        message_of(lambda: DiLoCo(model, None, (torch.optim.SGD if first else torch.optim.Adam), every=4)),
        message_of(lambda: DiLoCo(model, None, every=4, residual_dtype=torch.float32 if first else torch.bfloat16)),
        message_of(lambda: DiLoCo(model, None, every=4)),
    ]
    assert all("the ranks disagree" in message for message in told), told
    assert "every=2" in told[0]
    assert "every=3" in told[0]
    assert fine == "accepted!"


@pytest.mark.parametrize("codec", ["lloyd4", "none"])
@in_time
@on_ranks(2)
def test_unequal_steps_raise_one_sentence_on_all_ranks(group: Group, codec: str) -> str:
    """A rank that takes fewer steps than the other averages once more, and closes."""
    model = network()
    member = dist.new_group()
    with (
        pytest.raises(DisagreementError, match=r"^the ranks disagree about operation .*DiLoCo\.synchronize") as told,
        DiLoCo(model, optimizer := inner(model), every=3, codec=codec, group=member),
    ):
        learn(model, optimizer, group.rank(), range(3 - group.rank()))
    return str(told.value)


@on_ranks(3)
def test_all_ranks_begin_with_the_first_ones_parameters(group: Group) -> None:
    model = network()
    for parameter in model.parameters():
        parameter.data.add_(group.rank())
    DiLoCo(model, inner(model), every=2)
    assert torch.equal(flat(list(model.parameters())), flat(list(network().parameters())))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(2)
def test_an_end_right_after_a_round_changes_nothing(group: Group, dtype: torch.dtype) -> None:
    model = network().to(dtype)
    optimizer = inner(model)
    diloco = DiLoCo(model, optimizer, every=4)
    for _ in range(8):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1.0 + group.rank())
        optimizer.step()
    before = flat(list(model.parameters())).clone()
    diloco.synchronize()
    diloco.close()
    assert torch.equal(flat(list(model.parameters())), before)
    assert diloco.rounds == 2


@on_ranks(2)
def test_ranks_share_buffers_and_what_is_frozen(group: Group) -> None:
    """Ranks whose models differ in frozen parameters and buffers are alike at first and in the end."""
    model = network(norm=True)
    model.register_buffer("phase", torch.full((2, 3), 1j * group.rank()).T)
    model.register_buffer("mask", torch.tensor([group.rank() == 0, False]))
    model.register_buffer("expanded", torch.full((1, 3), float(group.rank())).expand(2, 3))
    model.register_buffer("seen", torch.zeros(()))
    model.register_forward_hook(lambda module, given, _: setattr(module, "seen", module.seen + given[0].mean()))
    frozen = next(model.parameters())
    frozen.requires_grad = False
    frozen.add_(group.rank())
    optimizer = inner(model)
    with DiLoCo(model, optimizer, every=2):
        assert same_everywhere(group, *model.state_dict().values())
        learn(model, optimizer, group.rank(), range(3))
        assert not same_everywhere(group, *model.buffers())
    assert same_everywhere(group, *model.state_dict().values())


@on_ranks(2)
def test_a_round_that_is_not_finite_is_dropped_on_all(group: Group) -> None:
    model = network()
    diloco = DiLoCo(model, None, every=1, codec="lloyd4")
    before = flat(list(model.parameters()))
    if group.rank() == 1:
        next(model.parameters()).data[0, 0] = float("nan")
    diloco.step()
    assert_same(flat(list(model.parameters())), before)
    for parameter in model.parameters():
        parameter.data.add_(0.01)
    diloco.step()
    assert diloco.skipped == 1
    assert same_everywhere(group, flat(list(model.parameters())))


@pytest.mark.parametrize(("ways", "most"), [({"fragments": 2}, 1), ({"fragments": 2, "overlap": 3}, 2), ({}, 1)])
@on_ranks(2)
def test_one_nan_does_not_come_back(group: Group, ways: dict[str, Any], most: int) -> None:
    """At most so many rounds are skipped after one loss was NaN on one rank."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    with DiLoCo(model, optimizer, every=4, **ways) as diloco:
        for step in range(24):
            x, y = batch(group.rank(), step)
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            (loss * float("nan") if (step, group.rank()) == (5, 1) else loss).backward()
            optimizer.step()
    values = flat(list(model.parameters()))
    assert 1 <= diloco.skipped <= most
    assert values.isfinite().all()
    assert same_everywhere(group, values)


def test_an_outer_optimizer_over_the_model_steps_the_copies(ranks: RankPool) -> None:
    options, _ = WAYS["both"]
    for got, want in zip(ranks(2).run(ours, options, True), ranks(2).run(ours, options), strict=True):
        assert_same(got, want)


@on_ranks(2)
def test_an_outer_optimizer_may_hold_parameters_that_do_not_learn(group: Group) -> None:
    """An optimizer over all parameters, named, of a model that has one without gradient; copies that it steps."""
    model = network()
    next(model.parameters()).requires_grad = False
    outer = torch.optim.SGD(model.named_parameters(), lr=0.7)  # type: ignore[arg-type]
    optimizer = inner(model)
    with DiLoCo(model, optimizer, outer, every=2) as diloco:
        learn(model, optimizer, group.rank(), range(4))
        state = diloco.state_dict()
        diloco.load_state_dict(state)
    (settings,) = outer.param_groups
    assert len(settings["param_names"]) == len(settings["params"]) == 5
    assert same_everywhere(group, flat(list(model.parameters())))


@on_ranks(2)
def test_a_layer_that_is_unfrozen_under_way_raises(group: Group) -> None:
    model = network()
    first = next(model.parameters())
    first.requires_grad = False
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    diloco = DiLoCo(model, optimizer, every=4)
    learn(model, optimizer, group.rank(), range(1))
    first.requires_grad = True
    found = message_of(lambda: learn(model, optimizer, group.rank(), range(1, 2)))
    first.requires_grad = False
    diloco.close()
    assert "0.weight learns now" in found
    assert "close() before" in found


@on_ranks(2)
def test_a_layer_that_is_frozen_under_way_raises_before_its_momentum_moves_it(group: Group) -> None:
    model = network()
    first = next(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    DiLoCo(model, optimizer, every=4, fragments=2, overlap=1)
    learn(model, optimizer, group.rank(), range(6))
    first.requires_grad = False
    first.grad = None
    learn(model, optimizer, group.rank(), range(6, 10))  # what it learned before is averaged
    kept = first.detach().clone()
    found = message_of(lambda: learn(model, optimizer, group.rank(), range(10, 14)))
    assert "0.weight no longer learns" in found
    assert torch.equal(first, kept)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"every": 0}, "every must be"),
    ({"every": 4, "fragments": 5}, "fragments must be from 1 to 4"),
    ({"every": 40, "fragments": 7}, "6 parameters"),
    ({"every": 4, "overlap": 4}, "overlap must be"),
    ({"every": 4, "beta": 1.5}, "beta must be"),
    ({"every": 4, "codec": "auto"}, "times steps of DDP"),
    ({"every": 4, "codec": "auto:3", "fragments": 3}, "needs fragments=1, got 3"),
    ({"every": 4, "codec": {0: "int8", 2: "auto:3"}, "fragments": 2}, "needs fragments=1, got 2"),
    ({"every": 4, "policy": {"nope": "int8"}}, "matches none"),
]


@on_ranks(2)
def test_misuse_is_refused(group: Group) -> None:
    model, sparse, twice = network(), network(), network()

    def check(words: str, *given: Any, **options: Any) -> None:
        assert words in message_of(lambda: DiLoCo(*given, **{"every": 2, **options})), words

    for options, words in REFUSED:
        check(words, model, None, **options)
    check("with others", model, None, torch.optim.SGD(network().parameters(), 0.1))
    check("without 2.weight", model, None, torch.optim.SGD(list(model.parameters())[:2], 0.7))
    check("without 0.weight", model, None, lambda outer: torch.optim.SGD(outer[1:]))
    check("got list: of several pass the one that steps last", model, [inner(model)])
    check("got the inner optimizer", model, own := inner(model), own)
    check("makes one from a list of tensors, got 'sgd'", model, None, "sgd")
    check("got one that makes None", model, None, lambda outer: None)
    check("pass the nn.Module", 3, None)
    sparse.register_buffer("edges", torch.eye(3).to_sparse())
    check("got edges as torch.sparse_coo", sparse, None)
    kept = DiLoCo(network(), None, every=2)
    first = DiLoCo(twice, None, every=2)
    check("close() it first", twice, None)
    first.close()
    DiLoCo(twice, None, every=2)
    assert not kept.closed
    assert "expected what state_dict()" in message_of(lambda: DiLoCo(model, None, every=2).load_state_dict({}))
    assert issubclass(CollectiveError, ValueError)
