"""OneBitAdam in DDP: momentum that travels in one bit."""

import contextlib
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cases import assert_same, worlds
from ranks import RankPool
from replicas import PAIR, Given, Group, backward, batch, draw, flat, learn, message_of, network, same_everywhere, wrap
from thinwire import compress_ddp
from thinwire.optim import OneBitAdam


def onebit(group: Group, given_codec: Any, warmup: int, steps: int) -> dict[str, Any]:
    """Train; parameters, variances before and after the freeze, last gradients and momenta."""
    model = wrap(network(), group)
    stepper = OneBitAdam(model.parameters(), lr=3e-3, warmup_steps=warmup)
    handle = None if given_codec is None else compress_ddp(model, given_codec, optimizer=stepper)
    learn(model, stepper, group.rank(), range(warmup))
    early = [stepper.state[p]["exp_avg_sq"].clone() for p in model.parameters()]
    early_params = flat(list(model.parameters())).clone()
    learn(model, stepper, group.rank(), range(warmup, steps))
    states = [stepper.state[p] for p in model.parameters()]
    return {
        "parameters": flat(list(model.parameters())),
        "early": early_params,
        "frozen": all(torch.equal(v, s["exp_avg_sq"]) for v, s in zip(early, states, strict=True)),
        "floored": all(bool((s["exp_avg_sq"] >= 0.9e-3 * s["exp_avg_sq"].mean()).all()) for s in states),
        "momentum": torch.equal(flat([p.grad for p in model.parameters()]), flat([s["exp_avg"] for s in states])),
        "alike": same_everywhere(group, *model.parameters(), *(s["exp_avg"] for s in states)),
        "feedback": "" if handle is None else handle.stats().feedback,
    }


@worlds(3, rare=[2, 4])
def test_momentum_travels_in_one_bit(ranks: RankPool, world: int) -> None:
    plainly = ranks(world).run(onebit, None, 6, 16)
    for found, bare in zip(ranks(world).run(onebit, "lloyd1", 6, 16), plainly, strict=True):
        assert_same(found["early"], bare["early"], "warm-up")
        assert found["frozen"]
        assert found["floored"]
        assert found["momentum"]
        assert found["alike"]
        assert found["feedback"] == "classic"
        assert not torch.equal(found["parameters"], bare["parameters"])


@worlds(3, rare=[2])
def test_an_exact_momentum_is_that_of_the_mean_gradient(ranks: RankPool, world: int) -> None:
    """Momentum is linear: the mean of momenta is the momentum of means, up to rounding."""
    for found, bare in zip(ranks(world).run(onebit, "none", 4, 10), ranks(world).run(onebit, None, 4, 10), strict=True):
        assert found["momentum"]
        assert not bare["momentum"]
        gap = (found["parameters"] - bare["parameters"]).abs().max()
        moved = (bare["parameters"] - bare["early"]).abs().max()
        assert gap < 1e-3 * moved


def in_units(group: Group) -> tuple[list[Tensor], list[Tensor], bool]:
    """Means of momenta after a warm-up, and what the same codec and feedback make of momenta over the roots."""
    model = wrap(Given(PAIR), group)
    parameters = list(model.parameters())
    stepper = OneBitAdam(parameters, warmup_steps=1)
    compress_ddp(model, "lloyd1", optimizer=stepper)
    other = wrap(Given(PAIR), group)
    compress_ddp(other, {0: "none", 1: "lloyd1"}, feedback="classic", weigh="none")
    found: list[Any] = []
    expected: list[Any] = []
    for step in range(4):
        given = draw(group.rank(), step, PAIR, spread=1000.0)
        if stepper.frozen:
            roots = stepper.roots(parameters)
            pairs = zip(given, parameters, strict=True)
            momenta = [(1 - 0.9) * gradient + 0.9 * stepper.state[p]["exp_avg"] for gradient, p in pairs]
            means: list[Any] = backward(other, [one / root for one, root in zip(momenta, roots, strict=True)])
            expected += [mean * root for mean, root in zip(means, roots, strict=True)]
        else:
            expected += backward(other, given)
        found += backward(model, given)
        stepper.step()
    return found, expected, same_everywhere(group, *parameters)


@worlds(3, rare=[2])
def test_momenta_travel_in_units_of_the_root_of_the_variance(ranks: RankPool, world: int) -> None:
    """Up to the last bit of a momentum, which is added up in another way."""
    for found, expected, alike in ranks(world).run(in_units):
        assert alike
        for mine, theirs in zip(found, expected, strict=True):
            assert (mine - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def onebit_conv(group: Group, given_codec: str) -> tuple[Tensor, Tensor]:
    """A convolution whose weight lies channels last, against one that does not."""
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        module = nn.Conv2d(8, 16, 3, bias=False).to(memory_format=layout)
        model = wrap(module, group)
        stepper = OneBitAdam(model.parameters(), lr=1e-3, warmup_steps=2)
        compress_ddp(model, given_codec, optimizer=stepper)
        for step in range(6):
            x = torch.randn(4, 8, 6, 6, generator=torch.Generator().manual_seed(step + 10 * group.rank()))
            stepper.zero_grad()
            model(x).square().mean().backward()
            stepper.step()
        results.append(module.weight.detach().clone(memory_format=torch.contiguous_format))
    return results[0], results[1]


def test_momentum_lies_as_its_parameter_does(ranks: RankPool) -> None:
    for rowwise, channels_last in ranks(2).run(onebit_conv, "none"):
        assert (rowwise - channels_last).abs().max() < 1e-6


def onebit_misuse(group: Group) -> tuple[list[str], str, float]:
    """Optimisers of half the model; two averages before a step; a parameter that is used after the warm-up only."""
    model = wrap(network(), group)
    first, *rest = model.parameters()
    mine = OneBitAdam([first], warmup_steps=1)
    others: list[Any] = [torch.optim.SGD(rest, lr=0.1), mine]
    half = [message_of(partial(compress_ddp, model, "lloyd1", optimizer=given)) for given in (mine, others)]
    model = wrap(network(), group)
    stepper = OneBitAdam(model.parameters(), warmup_steps=1)
    compress_ddp(model, "lloyd1", optimizer=stepper)
    learn(model, stepper, group.rank(), range(2))
    x, y = batch(group.rank(), 2)
    stepper.zero_grad()
    (model(x) - y).square().mean().backward()
    twice = message_of((model(x) - y).square().mean().backward)
    late = wrap(Given(PAIR), group, find_unused_parameters=True)
    stepper = OneBitAdam(late.parameters(), lr=1e-3, warmup_steps=2)
    compress_ddp(late, "lloyd1", optimizer=stepper)
    before = late.module.c.detach().clone()
    for step in range(4):
        gradients = draw(group.rank(), step, PAIR)
        stepper.zero_grad()
        late(gradients[0], None if step < 3 else gradients[1]).backward()
        stepper.step()
    return half, twice, float((late.module.c.detach() - before).abs().max())


def test_it_owns_every_parameter_and_takes_no_enormous_steps(ranks: RankPool) -> None:
    for half, twice, moved in ranks(2).run(onebit_misuse):
        assert all("own every parameter" in message for message in half)
        assert "no_sync" in twice
        assert moved < 1.0


def forgotten(group: Group) -> str:
    """An optimiser that compress_ddp was not given."""
    model = wrap(network(), group)
    stepper = OneBitAdam(model.parameters(), warmup_steps=1)
    compress_ddp(model, "lloyd1")
    return message_of(lambda: learn(model, stepper, group.rank(), range(3)))


def test_it_has_to_be_passed(ranks: RankPool) -> None:
    assert all("optimizer=" in message for message in ranks(2).run(forgotten))


def skip_onebit(group: Group) -> bool:
    """Steps that are thrown away after the warm-up."""
    model = wrap(network(), group)
    stepper = OneBitAdam(model.parameters(), lr=3e-3, warmup_steps=2)
    compress_ddp(model, "lloyd1", optimizer=stepper)
    for step in range(8):
        x, y = batch(group.rank(), step)
        stepper.zero_grad()
        (model(x) - y).square().mean().backward()
        if step % 3:
            stepper.step()
    return same_everywhere(group, *model.parameters())


def test_its_steps_may_be_skipped(ranks: RankPool) -> None:
    assert all(ranks(2).run(skip_onebit))


def accumulate_onebit(group: Group) -> float:
    """Gradients of two batches inside no_sync, against a mean of means: how far the parameters are apart."""
    results = []
    for given_codec in ("none", None):
        model = wrap(network(), group)
        stepper = OneBitAdam(model.parameters(), lr=1e-2, warmup_steps=2)
        if given_codec is not None:
            compress_ddp(model, given_codec, optimizer=stepper)
        for step in range(6):
            stepper.zero_grad()
            for half in range(2):
                x, y = batch(group.rank(), 2 * step + half)
                with contextlib.nullcontext() if half else model.no_sync():
                    (model(x) - y).square().mean().backward()
            stepper.step()
        results.append(flat(list(model.parameters())))
    return float((results[0] - results[1]).abs().max())


def test_its_gradients_may_be_accumulated(ranks: RankPool) -> None:
    assert max(ranks(2).run(accumulate_onebit)) < 1e-4
