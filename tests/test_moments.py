"""Gradients in Adam's units: which moments are used, what becomes of the gradients, and that ranks agree."""

import gc
import math
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import thinwire
from cases import assert_same, on_ranks
from replicas import Given, Group, backward, draw, flat, learn, message_of, network, same_everywhere, wrap
from thinwire.collectives import torch_verbs
from thinwire.integrations.choice import moments
from thinwire.integrations.choice.moments import Moments

SHAPES = {"a": (40, 50), "c": (40, 60)}
WHOLE = 1 << 10  # kilobytes: one bucket


def alone(values: Any, op: Any) -> list[float]:
    return list(values)


def stepped(optimizer: Any, parameter: Tensor, gradient: Tensor) -> None:
    parameter.grad = gradient
    optimizer.step()


def test_roots_are_those_of_the_moments_and_no_number_is_endless() -> None:
    weights = {"weight": nn.Parameter(torch.zeros(3)), "complex": nn.Parameter(torch.zeros(3, dtype=torch.complex64))}
    optimizer = torch.optim.AdamW(weights.values(), 1e-3, betas=(0.9, 0.0))
    weights["complex"].grad = torch.ones(3, dtype=torch.complex64)
    stepped(optimizer, weights["weight"], torch.tensor([4.0, -0.5, 0.0]))
    found = Moments([optimizer])
    found.look(weights, alone)
    assert found.shared == {"weight"}, "complex parameters are not weighed"
    (roots,) = found.roots([weights["weight"]])
    floor = 16.0 * moments.FLOOR
    torch.testing.assert_close(roots, torch.tensor([16.0 + floor, 0.25 + floor, floor]).sqrt())


def test_moments_of_zeros_or_inf_are_no_unit_and_gradients_stay_finite() -> None:
    weight = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.RMSprop([weight], alpha=0.0)
    found = Moments([optimizer])
    for gradient, shared in ((0.0, set()), (math.inf, set()), (1e-30, set()), (1e-30, {"weight"})):  # tries 1, 2, 4
        stepped(optimizer, weight, torch.full((3,), gradient))
        optimizer.state[weight]["square_avg"].fill_(gradient)
        found.look({"weight": weight}, alone)
        assert found.shared == shared
    optimizer.state[weight]["square_avg"].zero_()
    assert (torch.full((3,), 1e19) / found.roots([weight])[0]).isfinite().all()


def test_moments_that_are_gone_are_looked_for_again() -> None:
    weight = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.Adam([weight])
    stepped(optimizer, weight, torch.ones(3))
    found, seen = Moments([optimizer]), []
    for step in range(4):
        if step == 1:
            optimizer = torch.optim.Adam([weight])  # the other is forgotten
        if step == 2:
            stepped(optimizer, weight, torch.ones(3))
        found.look({"weight": weight}, alone)
        seen.append(found.shared)
    assert seen == [{"weight"}, set(), {"weight"}, {"weight"}]


def test_ranks_stop_looking_for_what_does_not_come() -> None:
    weight, asked = nn.Parameter(torch.zeros(3)), []
    found = Moments([torch.optim.Adam([weight])])  # it never steps
    for _ in range(40):
        found.look({"weight": weight}, lambda values, op: asked.append(1) or list(values))  # type: ignore[func-returns-value]
    assert (found.settled, found.shared, len(asked)) == (True, frozenset(), 5)


def test_which_optimizers_have_moments() -> None:
    class Mine(torch.optim.AdamW): ...

    weights = [nn.Parameter(torch.zeros(2, 2))]
    for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.NAdam, Mine):
        assert Moments([kind(weights)]).expected
    for kind in (torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adamax, torch.optim.Muon):
        assert not Moments([kind(weights)]).expected


@pytest.mark.parametrize(
    ("world", "spoil", "weigh"), [(2, False, "auto"), (3, False, "auto"), (2, True, "moments"), (2, False, "none")]
)
@on_ranks()
def test_gradients_travel_in_adams_units(group: Group, spoil: bool, weigh: str) -> None:
    """Those of a second step, and what the same codec makes of them in these units; not where ranks' moments differ."""
    model, other = (wrap(Given(SHAPES), group, WHOLE) for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.9, 0.0))
    options: Any = {"optimizer": optimizer, "weigh": weigh, "exempt": "none"}
    handle = thinwire.compress_ddp(model, "lloyd2", **options)
    plain = thinwire.compress_ddp(other, "lloyd2", feedback="none", weigh="none", exempt="none")
    for made in (model, other):
        backward(made, draw(group.rank(), 0, SHAPES, spread=1000.0))
    optimizer.step()
    if spoil and group.rank() == 0:
        optimizer.state[next(model.parameters())]["exp_avg_sq"].mul_(2.0)
    roots = Moments([optimizer]).roots(list(model.parameters()))
    given = draw(group.rank(), 1, SHAPES, spread=1000.0)
    found = [g for g in backward(model, given) if g is not None]
    expected = [g for g in backward(other, [g / r for g, r in zip(given, roots, strict=True)]) if g is not None]
    assert plain.stats().feedback == "none"
    assert handle.stats().feedback == ("none" if weigh == "none" else "none+moments")
    assert same_everywhere(group, *found)
    wanted = [theirs * root for theirs, root in zip(expected, roots, strict=True)]
    if spoil:  # the second weight is as it was; its first blocks hold nothing else
        assert_same(found[1].view(-1)[:2048], wanted[1].view(-1)[:2048])
        assert not torch.equal(found[0], wanted[0])
    elif weigh != "none":
        for mine, theirs in zip(found, wanted, strict=True):
            assert_same(mine, theirs)


@on_ranks(2, gives=(["none", "none+moments", "none+moments"], True, True))
def test_a_replaced_optimizer_is_let_go_of_and_the_new_one_found(group: Group) -> tuple[list[str], bool, bool]:
    """An optimizer is replaced under way: what travels before and after, and whether the old one is gone."""
    model = wrap(network(), group, WHOLE)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    handle = thinwire.compress_ddp(model, "lloyd2", optimizer=optimizer)
    learn(model, optimizer, group.rank(), range(3))
    old = weakref.ref(optimizer)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    gc.collect()
    kinds = []
    for step in range(3, 6):
        learn(model, optimizer, group.rank(), range(step, step + 1))
        kinds.append(handle.stats().feedback)
    return kinds, old() is None, same_everywhere(group, flat(list(model.parameters())))


@on_ranks(2, gives=["none", "none+moments"])
def test_a_run_begins_again_without_the_moments_it_had(group: Group) -> list[str]:
    model = wrap(network(), group, WHOLE)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    handle, kinds = thinwire.compress_ddp(model, "lloyd2", optimizer=optimizer), []
    begun = handle.state_dict()
    learn(model, optimizer, group.rank(), range(3))
    handle.load_state_dict(begun)
    optimizer.state.clear()
    for step in range(2):
        learn(model, optimizer, group.rank(), range(step, step + 1))
        kinds.append(handle.stats().feedback)
    return kinds


@pytest.mark.parametrize("by_hand", [False, True], ids=["compress_ddp", "by hand"])
@on_ranks(2)
def test_moments_that_differ_after_a_join_are_not_used(group: Group, by_hand: bool) -> None:
    """Whether ranks have the same gradients before, and after, they have taken different numbers of steps."""
    model = wrap(network(), group, WHOLE)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    if by_hand:
        state = thinwire.DDPState(group, "lloyd2", optimizer=optimizer)
        model.register_comm_hook(state, thinwire.ddp_hook)
    else:
        state = thinwire.compress_ddp(model, "lloyd2", optimizer=optimizer)
    found = []
    learn(model, optimizer, group.rank(), range(3))
    found.append(state.stats().feedback == "none+moments")
    for epoch in range(2):
        with Join([model]):
            learn(model, optimizer, group.rank(), range(10 * epoch, 10 * epoch + 2 + 2 * group.rank()))
    learn(model, optimizer, group.rank(), range(30, 32))
    found.append(same_everywhere(group, *(p.grad for p in model.parameters() if p.grad is not None)))
    assert [*found, state.stats().feedback] == [True, True, "none"]


REMEMBERED: list[dict[str, Any]] = [
    {"codec": "topk"},
    {"codec": "lloyd1", "feedback": "classic"},
    {"codec": "lloyd2", "feedback": "ef21"},
    {"codec": "lloyd2", "policy": {"0.weight": "topk"}},
]


@on_ranks(2)
def test_what_is_remembered_is_in_no_units(group: Group) -> None:
    """Feedback in units that grow with what it sends would have no end: gradients a million times as large in 6 steps.

    In units, the second gradient of Adam's is some times too large: its moments are those of one step.
    """
    found = []
    for options in [{"codec": "none"}, *REMEMBERED]:
        model = wrap(network(), group, WHOLE)
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        handle = thinwire.compress_ddp(model, optimizer=optimizer, **options)
        most = 0.0
        for step in range(6):
            learn(model, optimizer, group.rank(), range(step, step + 1))
            most = max(most, *(float(p.grad.norm()) for p in model.parameters() if p.grad is not None))
        found.append((handle.stats().feedback, most))
    (_, exact), *rest = found
    assert [feedback for feedback, _ in rest] == ["ef21", "classic", "ef21", "ef21+moments"]
    assert max(most for _, most in rest) < 10 * exact


@pytest.mark.parametrize(("feedback", "times"), [("classic", 0), ("ef21", 0), ("none", 3), ("auto", 3)])
@on_ranks(2)
def test_ranks_look_for_an_optimizer_only_where_it_matters(group: Group, feedback: Any, times: int) -> None:
    """They wait for each other's answers, and on a GPU the host for what it was given before. It never steps here."""
    model = wrap(Given(SHAPES), group, WHOLE)
    thinwire.compress_ddp(model, "lloyd2", feedback=feedback, measure_every=0)
    with mock.patch.object(torch_verbs, "agree", side_effect=torch_verbs.agree) as spy:
        for step in range(4):
            backward(model, draw(group.rank(), step, SHAPES))
    assert spy.call_count == times


def test_what_cannot_be_weighed_is_refused() -> None:
    def options(**given: Any) -> str:
        return message_of(lambda: thinwire.DDPState(None, "lloyd2", **given))

    assert "excludes feedback" in options(weigh="moments", feedback="classic")
    assert options(weigh="maybe") == "weigh must be one of auto, none, moments, got 'maybe'"
