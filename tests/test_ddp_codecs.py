"""Which codec a parameter of a DDP model travels in: lanes of one message, codec="auto" and codec="auto:2.5".

tests/test_policy.py has the rules.
"""

import contextlib
import io
import itertools
from collections.abc import Iterator, Mapping
from typing import Any
from unittest.mock import patch

import pytest

import replicas
from cases import on_ranks
from replicas import Given, Group, Shapes, backward, draw, flat, mean_of, residuals, wrap
from thinwire import codec, compress_ddp
from thinwire.collectives import channel as channels, peers, torch_verbs, transport
from thinwire.integrations import sync
from thinwire.integrations.choice import auto
from thinwire.kernels import cpu
from thinwire.kernels.schema import Encoding
from thinwire.wire import Kind

LAYERS: Shapes = {"a": (40, 50), "b": (2000,), "c": (33, 61), "d": (9,), "f": (30, 30), "e": (64, 32)}
LEVELS = {"none": 1e-7, "bf16": 2.0**-8, "int8": 0.02, "lloyd4": 0.15, "lloyd2": 0.52, "lloyd1": 1.0}  # relative errors


def counted(owner: Any, name: str) -> Any:
    """A method that goes on as it is, and counts its calls."""
    return patch.object(owner, name, autospec=True, side_effect=getattr(owner, name))


@on_ranks(2, rare=[3])
def test_all_lanes_travel_in_one_message(group: Group) -> None:
    """Of a bucket that holds all parameters, and ranks shake hands once, not at every step."""
    for options in ({"codec": "lloyd1"}, {"codec": "int8", "policy": {"a": "lloyd2", "e": "int4"}, "feedback": "none"}):
        model = wrap(Given(LAYERS), group, 1024.0)
        compress_ddp(model, optimizer="linear", **options)
        messages, shakes = [], []
        with counted(transport.PairTransport, "exchange") as sent, counted(peers.Handshake, "check") as shaken:
            for step in range(4):
                backward(model, draw(group.rank(), step, LAYERS))
                messages.append(sent.call_count - sum(messages))
                shakes.append(shaken.call_count - sum(shakes))
        assert messages == [group.size() - 1] * 4
        assert shakes[0] == 2  # the options, and the message
        assert sum(shakes) <= 3  # DDP rebuilds its buckets


RACE = auto.SETTLE_STEPS + auto.ROUNDS * len(auto.CANDIDATES)  # steps; the next one knows
Costs = dict[str, float]  # seconds of a step, by codec


@contextlib.contextmanager
def clocked(costs: Costs) -> Iterator[None]:
    """A clock that goes on only when gradients are encoded, or averaged by torch."""
    clock = [0.0]

    def costing(inner: Any, names: Mapping[Any, str]) -> Any:
        def call(how: Any, *args: Any, **kwargs: Any) -> Any:
            kind = how.format.kind if isinstance(how, Encoding) else None
            clock[0] += costs[names[kind]]
            return inner(how, *args, **kwargs)

        return call

    kinds = {Kind.CAST: "bf16", Kind.BLOCK_INT: "int8", Kind.LLOYD: "lloyd4"}
    with (
        patch.object(sync, "perf_counter", lambda: clock[0]),
        patch.object(torch_verbs, "average", costing(torch_verbs.average, {None: "none"})),
        patch.object(cpu, "encode", costing(cpu.encode, kinds)),
    ):
        yield


def cost(none: float, bf16: float, int8: float, lloyd4: float) -> Costs:
    return {"none": none, "bf16": bf16, "int8": int8, "lloyd4": lloyd4}


@pytest.mark.parametrize(
    ("costs", "budget", "want"),
    [
        ([cost(4, 3, 2, 1)] * 2, 0.05, "int8"),
        ([cost(1, 2, 3, 4)] * 2, 0.15, "none"),
        ([cost(9, 8, 1, 3), cost(2, 8, 7, 3)], 0.15, "none"),  # nobody may be slower than without
    ],
)
@on_ranks(2)
def test_auto_keeps_the_fastest_codec_inside_the_budget(
    group: Group, costs: list[Costs], budget: float, want: str
) -> str:
    """Ranks choose alike, by the slowest of them, and one of them says so in one line. Errors tell codecs apart."""
    shapes = {"w": (40, 50)}
    model = wrap(Given(shapes), group)
    handle = compress_ddp(model, "auto", exempt="none", error_budget=budget)
    out, true = io.StringIO(), mean_of(group.size(), 0, shapes)
    with contextlib.redirect_stderr(out), clocked(costs[group.rank()]):
        for _ in range(RACE + 3):
            result = flat(backward(model, draw(group.rank(), 0, shapes)))
            assert replicas.same_everywhere(group, result)
    error = (result - true).norm() / true.norm()
    printed, chosen = out.getvalue(), handle.stats().chosen
    assert printed.count("\n") == (group.rank() == 0) == ("thinwire" in printed and chosen in printed)
    assert next(kind for kind, most in LEVELS.items() if error <= most) == want
    return chosen


@on_ranks(2)
def test_a_race_leaves_only_what_its_winner_remembers(group: Group) -> None:
    shapes = {"w": (40, 50)}
    for costs, nbytes in ((cost(4, 3, 2, 1), 4 * 2000), (cost(1, 2, 3, 4), 0)):
        model = wrap(Given(shapes), group)
        handle = compress_ddp(model, "auto", exempt="none", feedback="classic")
        with contextlib.redirect_stderr(io.StringIO()), clocked(costs):
            for step in range(RACE + 2):
                backward(model, draw(group.rank(), step, shapes))
        assert handle.stats().residual_bytes == nbytes
        assert (residuals(handle, shapes).abs().max() > 0) == (nbytes > 0)


@on_ranks(2)
def test_no_handshake_is_timed(group: Group) -> None:
    """Codecs meet every bucket in their first turn, whose time does not count."""
    model = wrap(Given(), group)
    compress_ddp(model, "auto")
    counts: list[int] = []
    with counted(peers.Handshake, "check") as shaken, contextlib.redirect_stderr(io.StringIO()):
        for step in range(RACE):
            backward(model, draw(group.rank(), step))
            counts.append(shaken.call_count - sum(counts))
    untimed = auto.SETTLE_STEPS + len(auto.CANDIDATES)
    assert sum(counts[:untimed]) > 0
    assert sum(counts[untimed:]) == 0


EQUAL: Shapes = {f"w{i}": (48, 64) for i in range(5)}


@pytest.mark.parametrize("bits", [1.7, 2.5, 4.5])
@on_ranks(3, rare=[2])
def test_bits_go_where_the_error_is(group: Group, bits: float) -> list[dict[str, str]]:
    """Never more than the budget on average; when gradients change, the next plan follows. Ranks deal alike."""
    up, down = (1.0, 2.0, 4.0, 8.0, 16.0), (16.0, 8.0, 4.0, 2.0, 1.0)
    model = wrap(Given(EQUAL), group)
    handle = compress_ddp(model, f"auto:{bits}", replan_every=3, optimizer="linear")
    found = []
    for step, factors in enumerate([up] * 3 + [down] * 3):
        gradients = [f * g for f, g in zip(factors, draw(group.rank(), step, EQUAL), strict=True)]
        assert replicas.same_everywhere(group, flat(backward(model, gradients)))
        stats = handle.stats()
        found.append(dict(handle.state_dict()["decisions"]["widths"]))
        if step > 0:
            assert bits - 1 < (stats.bits_per_element or 0.0) <= bits
            assert stats.chosen
            assert found[step].keys() == EQUAL.keys()
    for step, grows in ((2, True), (5, False)):
        dealt = [codec(found[step][name]).bits for name in EQUAL]  # type: ignore[attr-defined]
        assert dealt == sorted(dealt, reverse=not grows)
        assert dealt[0] != dealt[-1]
    return found


@on_ranks(2)
def test_bits_on_the_wire_stay_inside_the_budget(group: Group) -> None:
    """Exempt vectors that lie between the weights count, and so do the codes that bridge them."""
    layers = [(f"w{i}", (60, 64), f"b{i}", (240,)) for i in range(8)]
    between = {n: s for w, x, b, y in layers for n, s in ((w, x), (b, y))}
    apart = {**{w: x for w, x, _, _ in layers}, **{b: y for _, _, b, y in layers}}
    for shapes, bits in itertools.product((between, apart, EQUAL), (2.5, 3.0, 4.5, 6.0)):
        model = wrap(Given(shapes), group, 1024.0)
        handle = compress_ddp(model, f"auto:{bits}", optimizer="linear")
        for step in range(3):
            backward(model, draw(group.rank(), step, shapes, spread=1.3))
        assert 0 < (handle.stats().bits_per_element or 0) <= bits


@on_ranks(2, gives=True)
def test_widths_may_change_places(group: Group) -> bool:
    """Parameters of one size whose widths change places: the same lanes, of other stretches of the bucket.

    Only so many of their plans are kept.
    """
    shapes: Shapes = dict.fromkeys("abcd", (64, 64))
    model = wrap(Given(shapes), group, 1024.0)
    compress_ddp(model, "auto:5", feedback="none", exempt="none", replan_every=2, measure_every=1)
    with patch.object(channels, "MOST_KINDS", 2):
        for step in range(12):
            sizes = (1, 1, 50, 50) if step < 6 else (1, 50, 1, 50)
            means = backward(model, [size * g for size, g in zip(sizes, draw(group.rank(), step, shapes), strict=True)])
            assert len(channels.channel_of(group, means[0].device).known) <= 2
    return replicas.same_everywhere(group, flat(means))
