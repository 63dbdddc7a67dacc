"""Which codec and feedback a parameter gets, what "auto" makes of measurements, and the statistics behind them."""

import dataclasses
import gc
import inspect
import itertools
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import cases
from cases import generated, over, seeded
from thinwire import BlockInt, ByName, Cast, Codec, CodecError, DDPState, Identity, Lloyd, codec as make, compress_ddp
from thinwire.feedback import Piece
from thinwire.integrations import choice
from thinwire.integrations.choice import Chooser, Policy, auto, options
from thinwire.integrations.choice.auto import CANDIDATES, GAIN, ROUNDS, SETTLE_STEPS, WIDTHS, Race, deal_bits
from thinwire.integrations.choice.options import Auto, DDPKeywords, DDPOptions, Rules, parse
from thinwire.integrations.models import ParameterNames, ParameterSize as Size
from thinwire.integrations.stats import Stats, Tally

CPU = torch.device("cpu")
FP32 = torch.float32
WIDE = Size(torch.Size((64, 64)), 4096, FP32)
THIN = Size(torch.Size((64,)), 64, FP32)


# --- what a user's codec names ----------------------------------------------------------------------------------------


@over("spec", ["auto:2.5", " auto:8 ", "auto:1.1", "auto: 8.2", "auto", " auto "])
def test_auto_is_a_trial_or_a_budget(spec: str) -> None:
    bits = spec.partition(":")[2]
    assert parse(spec) == parse(str(parse(spec))) == (Auto(float(bits)) if bits else Auto())


@generated(60)
@given(
    st.dictionaries(st.integers(0, 50), st.sampled_from(["none", "int8", "lloyd2", "auto", "auto:3"]), min_size=1),
    st.integers(0, 60),
)
def test_a_schedule_holds_from_each_step_on(spec: dict[int, str], step: int) -> None:
    begun = [start for start in spec if start <= step]
    want = parse(spec[max(begun)]) if begun else Identity()
    items = list(spec.items())
    random.Random(step).shuffle(items)
    assert DDPOptions(dict(items)).choice_at(step) == want


def test_warm_up_is_a_schedule_that_begins_with_nothing() -> None:
    options = DDPOptions("lloyd2", warmup_steps=5)
    assert [options.choice_at(step) for step in (0, 4, 5, 99)] == [Identity(), Identity(), Lloyd(2), Lloyd(2)]
    assert (options.asked, DDPOptions("lloyd2").asked) == ("{0: none, 5: lloyd2}", "lloyd2")
    assert (DDPOptions({3: "auto:2.5"}).asked, DDPOptions({0: "int8"}).asked) == ("{3: auto:2.5}", "int8")


# --- rules and exemptions ---------------------------------------------------------------------------------------------
SHAPES = {name: torch.Size(shape) for name, shape in {
    "embed.weight": (500, 16), "fc.weight": (64, 64), "fc.bias": (64,), "norm.weight": (4096,), "gate.weight": (3, 5),
    "scalar": (), "cube": (8, 8, 16), "short": (31, 33), "empty": (0, 40),
}.items()}  # fmt: skip
SMALL = {"fc.bias", "norm.weight", "gate.weight", "scalar", "short", "empty"}


def codecs_of(rules: Rules, base: str | Codec = "lloyd2", dtype: torch.dtype = FP32) -> dict[str, str]:
    return {name: str(rules.codec_of(name, shape, dtype, make(base))) for name, shape in SHAPES.items()}


def test_small_ones_are_exempt_by_themselves() -> None:
    """Of one dimension, or of fewer than 1024 elements: 31 x 33 is one short. fp16 keeps its digits."""
    got = codecs_of(Rules("auto", None))
    assert {name for name, chosen in got.items() if chosen == "bf16"} == SMALL
    assert {got[name] for name in set(SHAPES) - SMALL} == {"lloyd2"}
    assert 31 * 33 == options.TINY - 1 == 8 * 8 * 16 - 1
    for dtype, want in ((torch.float16, "fp16"), (torch.bfloat16, "bf16"), (torch.float64, "bf16"), (FP32, "bf16")):
        assert codecs_of(Rules("auto", None), dtype=dtype)["fc.bias"] == want
    for none in ("none", []):
        assert set(codecs_of(Rules(none, None)).values()) == {"lloyd2"}
    assert set(codecs_of(Rules("auto", {"*": "int8"}), "none").values()) == {"none"}, "such a step asks no rule"


def test_exemptions_by_pattern_and_by_function() -> None:
    got = codecs_of(Rules(["embed*", "FC.*", "?c.bias", "[en]orm.*", "cube"], None))  # shell style, and case counts
    assert {name for name, chosen in got.items() if chosen == "bf16"} == {
        *("embed.weight", "fc.bias", "norm.weight", "cube")
    }
    seen = []
    got = codecs_of(Rules(lambda name, shape: bool(seen.append((name, shape))) or name == "fc.weight", None))
    assert {name for name, chosen in got.items() if chosen == "bf16"} == {"fc.weight"}
    assert seen == list(SHAPES.items())


def test_rules_come_before_exemptions_and_a_star_after() -> None:
    rules = Rules("auto", {"fc.*": "int8", "*.weight": "lloyd3", "*": "lloyd4"})
    got = codecs_of(rules, "int5")
    assert got["fc.bias"] == got["fc.weight"] == "int8"
    assert got["norm.weight"] == got["gate.weight"] == got["embed.weight"] == "lloyd3"
    assert got["scalar"] == got["short"] == got["empty"] == "bf16"
    assert got["cube"] == "lloyd4"
    without = codecs_of(Rules("auto", {"fc.*": "int8"}), "int5")
    assert (without["cube"], without["scalar"]) == ("int5", "bf16")


def test_fixed_is_what_leaves_no_choice() -> None:
    rules = Rules("auto", {"fc.*": "int8"})
    fixed = {name: rules.fixed(name, shape, FP32) for name, shape in SHAPES.items()}
    assert {name for name, chosen in fixed.items() if chosen is None} == {"embed.weight", "cube"}
    assert fixed["fc.bias"] == BlockInt(8)
    everything = Rules("auto", {"*": "int8"})
    assert all(everything.fixed(name, shape, FP32) is not None for name, shape in SHAPES.items())
    by_name: list[tuple[Any, Any]] = [("auto", {"a": "int8"}), (["a"], None)]
    others: list[tuple[Any, Any]] = [("auto", None), ("none", {"*": "int8"}), ("auto", {}), ([], None)]
    assert all(Rules(*one).by_name for one in by_name), "which need to know the names of parameters"
    assert not any(Rules(*one).by_name for one in others)


def test_codecs_made_of_codecs_are_asked_for_theirs() -> None:
    got = codecs_of(
        Rules("none", {"fc.*": "bysize(small=int8; large=int4; min_numel=100)"}), ByName({"c*": "int6", "*": "bf16"})
    )
    assert (got["fc.bias"], got["fc.weight"], got["cube"], got["embed.weight"]) == ("int8", "int4", "int6", "bf16")


# --- feedback ---------------------------------------------------------------------------------------------------------
BITS = {
    "lloyd1": 1, "lloyd2": 2, "lloyd3": 3, "lloyd4": 4, "int2": 2, "int3": 3, "int4": 4, "int5": 5, "int8": 8,
    "e4m3": 8, "e5m2": 8, "fp16": 16, "bf16": 16, "none": 16, "topk": 1, "trellis2": 2,
}  # fmt: skip


@over("name", BITS)
def test_feedback_by_codec_and_optimizer(name: str) -> None:
    chosen, bits = make(name), BITS[name]
    assert choice.bits_of(chosen) == bits
    assert choice.feedback_of("auto", chosen, "linear") == ("classic" if bits < 4 else "")
    assert choice.feedback_of("auto", chosen, "muon") == ("classic" if bits < 8 else "")
    assert choice.feedback_of("auto", chosen, "adaptive") == ("ef21" if name == "topk" else "")
    assert choice.feedback_of("auto", chosen, None) == (None if bits < 4 else "")
    assert choice.feedback_of("auto", chosen, "linear", outer=True) == ("classic" if name == "topk" else "")
    for family, asked in itertools.product((None, "linear", "adaptive"), ("classic", "ef21")):
        assert choice.feedback_of(asked, chosen, family) == ("" if bits >= 16 else asked), "but to what is exact"
        assert choice.feedback_of("none", chosen, family) == ""


OTHERS = {"SGD": "linear", "ASGD": "linear", "Muon": "muon"}


def optimizers() -> list[type[torch.optim.Optimizer]]:
    found = [value for value in vars(torch.optim).values() if isinstance(value, type)]
    return [kind for kind in found if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer]


def test_the_family_of_every_optimizer_of_torch() -> None:
    known = {"Adam", "AdamW", "RMSprop", "Adagrad", "Adafactor", "LBFGS"}
    assert {kind.__name__ for kind in optimizers()} >= set(OTHERS) | known
    for kind in optimizers():  # some need much to be made, and the kind alone decides
        mine = type("Mine", (kind,), {})
        for made in (kind.__new__(kind), mine.__new__(mine)):
            assert options.family(made) == OTHERS.get(kind.__name__, "adaptive"), kind
    assert options.family(object()) == "adaptive", "what is not known may be Adam's kin"
    assert options.family(type("MuonWithAuxAdam", (), {})()) == "muon", "as Muon's own repository calls it"


NO_STEPS = "a schedule maps steps, 0 or more, to codecs"
NO_EXEMPTION = "exempt must be 'auto', 'none', a list of name patterns or a function, got"
NO_POLICY = "policy maps patterns of names to codecs, e.g. {'*.embed*': 'int8'}: got"
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({"codec": f"auto:{bits}"}, "expected bits per element from 1.1 to 8.2, such as 'auto:2.5'")
      for bits in ("", "x", "1", "0", "9", "-2", "nan", "inf")),
    *(({"codec": codec}, "") for codec in (3, None, ["int8"], "int9", "automatic", {"a": 1})),
    *(({"warmup_steps": n}, f"warmup_steps must be an integer, 0 or more, got {n}") for n in (-1, 1.5, True)),
    ({"codec": {0: "int8"}, "warmup_steps": 3}, "exclude each other: write {0: 'none', N: ...}"),
    *(({"codec": steps}, NO_STEPS) for steps in ({}, {-1: "int8"}, {"0": "int8"}, {0.5: "int8"})),
    ({"codec": {0: "int77"}}, "unknown codec 'int77'"),
    ({"codec": {0: {0: "int8"}}}, "expected a codec or a string"),
    *(({"exempt": exempt}, NO_EXEMPTION) for exempt in ("bias", "*.bias", 5, None, [1], ["a", None], [b"a"])),
    *(({"policy": policy}, NO_POLICY) for policy in (["int8"], "int8")),
    *(({"policy": policy}, "") for policy in ({"a": "int99"}, {"a": 8}, {1: "int8"}, {"": "int8"}, {"a=b": "int8"})),
    ({"policy": {"*": "int8", "a": "int4"}}, ""),
    *(({"feedback": feedback}, "feedback must be one of auto, none, classic, ef21, got")
      for feedback in ("", "Classic", "ef", None, 1, ["classic"])),
    ({"feedback": "ef21", "residual_dtype": torch.bfloat16}, "residual_dtype must be float32, got"),
    ({"residual_dtype": torch.int8}, "residuals are kept as float32 or bfloat16, got torch.int8"),
    *(({"optimizer": one}, "'linear', 'adaptive', 'muon', got") for one in ("adam", 3, torch.optim.SGD)),
    *(({"error_budget": budget}, "error_budget must be") for budget in (0, -1.0, math.nan, "0.1")),
    ({"replan_every": 0}, "replan_every must be a number of steps, got 0"),
    ({"replan_every": 2.0}, "replan_every must be a number of steps"),
    ({"measure_every": -1}, "measure_every must be a number of steps, got -1"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "says"), REFUSED)
def test_options_that_are_none_are_refused(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(CodecError) as raised:
        decisions(**asked)
    assert says in str(raised.value)


@pytest.mark.parametrize("chosen", cases.ONE_OF_EACH + cases.LLOYDS, ids=str)
@pytest.mark.parametrize("feedback", ["", "classic", "ef21"])
def test_the_first_phase_is_unbiased_where_nobody_remembers_its_error(chosen: Codec, feedback: str) -> None:
    first = choice.first_phase(chosen, feedback)
    unbiased = isinstance(chosen, Lloyd) and chosen.bits <= 3 and not feedback
    assert first == (dataclasses.replace(chosen, scale="unbiased") if unbiased else chosen)  # type: ignore[type-var]
    assert first.encoding(FP32).format == chosen.encoding(FP32).format, "what one writes the other reads"


# --- codec="auto" -----------------------------------------------------------------------------------------------------
def decided(seconds: Sequence[float], errors: Sequence[float] = (0, 0.002, 0.006, 0.1), budget: float = 0.15) -> str:
    return str(auto.decide([*seconds, *errors, 0, 0, 0, 0], budget)[0])


FAST = (1, 0.5, 0.25, 0.125)


@pytest.mark.parametrize(
    ("seconds", "more", "want"),
    [
        *((FAST, {}, "lloyd4"), ((1, 0.5, 0.25, 0.26), {}, "int8"), ((1, 0.5, 0.6, 0.7), {}, "bf16")),
        *(((1, 1.2, 1.1, 1.01), {}, "none"), ((1, 2, 2, 0.9), {}, "lloyd4"), ((0, 0, 0, 0), {}, "none")),
        ((1, 0.98, 0.975, 0.971), {}, "none"),  # noise
        ((1, 0.98, 0.96, 0.94), {}, "int8"),  # the last gains too little over int8
        *((FAST, {"budget": most}, want) for most, want in ((0.1, "lloyd4"), (0.09, "int8"), (1e-9, "none"))),
        (FAST, {"errors": (0, 0, 0, math.nan)}, "int8"),  # an error that is not known is over the budget
        (FAST, {"errors": (0, math.inf, math.nan, math.inf)}, "none"),
    ],
)
def test_the_fastest_that_gains_enough_within_the_error_budget_is_chosen(
    seconds: tuple[float, ...], more: dict[str, Any], want: str
) -> None:
    assert decided(seconds, **more) == want


@generated(80)
@given(
    st.lists(st.floats(1e-4, 10), min_size=4, max_size=4),
    st.lists(st.floats(0, 1), min_size=4, max_size=4),
    st.floats(1e-3, 1),
)
def test_the_choice_is_inside_the_budget_and_no_slower_than_nothing(
    seconds: list[float], errors: list[float], budget: float
) -> None:
    chosen, why = auto.decide([*seconds, *errors, 0, 0, 0, 0], budget)
    i = CANDIDATES.index(chosen)
    assert i == 0 or (errors[i] <= budget and seconds[i] < (1 - GAIN) * seconds[0])
    better = [k for k in range(4) if k > 0 and errors[k] <= budget and seconds[k] < (1 - GAIN) ** 3 * seconds[i]]
    assert not better, "nothing allowed is much faster"
    assert why.startswith("no compression; " if i == 0 else f"{chosen}; ")
    assert why.count("over the budget") >= sum(error > budget for error in errors[1:])


def test_a_race_gives_every_candidate_its_turns() -> None:
    race, turns, measured = Race(), [], []
    while not race.over:
        turns.append(race.candidate)
        measured.append(race.measures_error)
        race.ended(1.0 + race.candidate + 100 * race.measures_error, 0.01 * race.candidate)
    count = len(CANDIDATES)
    assert turns == [0] * SETTLE_STEPS + list(range(count)) * ROUNDS
    assert measured == [False] * SETTLE_STEPS + [False] + [True] * (count - 1) + [False] * (ROUNDS - 1) * count
    assert all(len(times) == ROUNDS - 1 for times in race.times.values()), "a measured step takes longer"
    assert race.result() == [1, 2, 3, 4, 0, 0.01, 0.02, 0.03, 0, 5, 5, 5]


def test_a_race_takes_the_median_and_only_measured_errors() -> None:
    race, step = Race(), 0
    while not race.over:
        race.ended(50.0 if step % 9 == 5 else 1.0, 0.5 if race.candidate == 1 and race.measures_error else None)
        step += 1
    assert race.result()[:8] == [1, 1, 1, 1, 0, 0.5, math.inf, math.inf]
    race = Race()  # what it cannot measure it measures later: a GradScaler's first steps are not finite
    while not race.over:
        race.ended(1.0 - 0.1 * race.candidate, None if race.steps < SETTLE_STEPS + 6 else 0.01)
    assert race.result()[4:8] == [0, 0.01, 0.01, 0.01]
    assert [len(times) for times in race.times.values()] == [ROUNDS - 1] * len(CANDIDATES)


def test_a_codec_that_is_faster_by_chance_is_not_chosen() -> None:
    """On a machine whose steps take 1 or 2 s at random, the median says nothing, the rounds do."""
    for lost, want in ((2, "none"), (auto.MAY_LOSE, "int8")):
        assert str(auto.decide([2, 2, 1, 2, 0, 0, 0, 0, 0, 3, lost, 2], 0.15)[0]) == want
    race = Race()
    for plain, eight in ((9, 9), (9, 9), (1, 2), (2, 1), (1, 2), (2, 1), (2, 1), (1, 2)):
        for seconds in (plain,) if race.steps < SETTLE_STEPS else (plain, 3, eight, 3):
            race.ended(seconds, 0.0)
    assert race.result()[-4:] == [0, 5, 2, 5]


# --- codec="auto:2.5" -------------------------------------------------------------------------------------------------
LOSS = dict(WIDTHS)


Layers = Mapping[str, tuple[int, float]]  # elements and their sum of squares


def named(rows: Sequence[tuple[int, float]]) -> Layers:
    return {f"p{i}": row for i, row in enumerate(rows)}


def bytes_of(layers: Layers, chosen: Mapping[str, Codec]) -> int:
    return sum(chosen[name].wire_bytes(numel) for name, (numel, _) in layers.items())


def lost_by(layers: Layers, chosen: Mapping[str, Codec]) -> float:
    return sum(squares * LOSS[chosen[name]] for name, (_, squares) in layers.items())


layers_of = st.lists(st.tuples(st.integers(1024, 60_000), st.floats(1e-6, 1e6)), min_size=1, max_size=8).map(named)


def test_widths_lose_less_the_more_bits_they_have() -> None:
    sizes = [width.wire_bytes(1 << 20) for width, _ in WIDTHS]
    losses = [loss for _, loss in WIDTHS]
    assert (sizes, losses) == (sorted(sizes), sorted(losses, reverse=True))
    drops = [
        (a - b) / (m - n) for (a, b), (n, m) in zip(itertools.pairwise(losses), itertools.pairwise(sizes), strict=True)
    ]
    assert drops == sorted(drops, reverse=True), "each byte buys less than the one before"


@pytest.mark.parametrize(("width", "loss"), WIDTHS, ids=str)
def test_the_losses_of_the_widths_are_those_of_gaussians(width: Codec, loss: float) -> None:
    x = torch.randn(1 << 16, generator=seeded(3))
    y = cases.decoded(width, cases.wire_of(width, x), x.numel())
    assert float((x - y).square().sum() / x.square().sum()) == pytest.approx(loss, rel=0.03)


@generated(60)
@given(layers_of, st.floats(1.1, 8.2), st.integers(0, 5000))
def test_bits_stay_inside_the_budget_and_leave_little_of_it(layers: Layers, bits: float, fixed: int) -> None:
    numels = {name: numel for name, (numel, _) in layers.items()}
    numel = fixed + sum(numels.values())
    budget = bits / 8 * numel
    try:
        chosen = deal_bits(layers, 2 * fixed, fixed, bits)
    except CodecError:
        least = sum(map(Lloyd(1).wire_bytes, numels.values())) + 2 * fixed
        assert least > budget
        return
    assert set(chosen) == set(layers)
    spent = 2 * fixed + bytes_of(layers, chosen)
    assert spent <= budget
    wider = [(name, w) for name in layers for (v, _), (w, _) in itertools.pairwise(WIDTHS) if v == chosen[name]]
    costs = [w.wire_bytes(numels[name]) - chosen[name].wire_bytes(numels[name]) for name, w in wider]
    assert all(spent + cost > budget for cost in costs)


def best(layers: Layers, budget: float) -> float:
    """The least loss of all assignments inside a budget."""
    found = math.inf
    for widths in itertools.product([w for w, _ in WIDTHS], repeat=len(layers)):
        chosen = dict(zip(layers, widths, strict=True))
        if bytes_of(layers, chosen) <= budget:
            found = min(found, lost_by(layers, chosen))
    return found


@generated(25)
@given(st.lists(st.tuples(st.integers(1024, 20_000), st.floats(1e-2, 1e2)), min_size=1, max_size=4), st.floats(1.5, 7))
def test_dealt_bits_are_the_best_up_to_one_upgrade(rows: list[tuple[int, float]], bits: float) -> None:
    layers = named(rows)
    chosen = deal_bits(layers, 0, 0, bits)
    optimum = best(layers, bits / 8 * sum(numel for numel, _ in rows))
    order = [w for w, _ in WIDTHS]
    upgrades = [
        squares * (LOSS[chosen[name]] - LOSS[order[order.index(chosen[name]) + 1]])
        for name, (_, squares) in layers.items()
        if chosen[name] != order[-1]
    ]
    assert optimum <= lost_by(layers, chosen) * (1 + 1e-9)
    assert lost_by(layers, chosen) <= optimum + max(upgrades, default=0.0) + 1e-9


def test_the_codec_in_which_an_error_was_measured_is_taken_into_account() -> None:
    """The same layer, measured at 1 bit or at 8, gets the same."""
    rows = [(4096, 1.0), (8192, 50.0), (2048, 3.0)]
    found = []
    for measured in (Lloyd(1), Lloyd(4), BlockInt(8)):
        seen = [(numel, auto.squares_of(measured, energy * LOSS[measured])) for numel, energy in rows]
        found.append(deal_bits(named(seen), 0, 0, 2.7))
    assert found[0] == found[1] == found[2]


def test_a_budget_that_is_impossible_says_what_is_needed() -> None:
    with pytest.raises(
        CodecError, match=r"1.2 bits per element are too few: exempt fewer parameters, or ask for "
    ) as raised:
        deal_bits({"p": (4096, 1.0)}, 4000, 2000, 1.2)
    least = float(str(raised.value).rsplit(" ", 1)[1])
    assert deal_bits({"p": (4096, 1.0)}, 4000, 2000, least + 0.01) == {"p": Lloyd(1)}
    with pytest.raises(CodecError, match="ask for 16"):
        deal_bits({}, 1600, 800, 2.5)
    assert deal_bits({}, 100, 800, 1.1) == deal_bits({}, 0, 0, 2) == {}, "nothing to choose is no error"


def test_layers_without_error_still_get_a_width() -> None:
    layers = {"a": (5000, 0.0), "b": (5000, 1.0)}
    chosen = deal_bits(layers, 0, 0, 2.5)
    assert bytes_of(layers, chosen) <= 2.5 / 8 * 10_000
    assert chosen["b"] != Lloyd(1)
    assert auto.counted({"a": Lloyd(2), "b": BlockInt(8), "c": Lloyd(2)}) == "1 x int8, 2 x lloyd2"
    assert auto.counted({}) == ""


# --- options ----------------------------------------------------------------------------------------------------------
def test_options_are_the_same_for_users_for_checkers_and_inside() -> None:
    own = {field.name: field for field in dataclasses.fields(DDPOptions)}
    assert get_type_hints(DDPKeywords) == {
        n: t for n, t in get_type_hints(DDPOptions).items() if n in own and n != "codec"
    }
    for function, before in ((compress_ddp, ["ddp_model"]), (DDPState, ["process_group"])):
        seen = dict(inspect.signature(function).parameters)
        others = [seen.pop(name) for name in (*before, "model") if name in seen]
        assert {name: p.default for name, p in seen.items()} == {name: field.default for name, field in own.items()}
        assert all(p.annotation is not p.empty for p in (*seen.values(), *others))
        assert all(p.kind is p.KEYWORD_ONLY for name, p in seen.items() if name != "codec")
    assert DDPOptions().codec == "int8"


# --- one place decides: a pure function of options, step and agreement ------------------------------------------------
def policy_of(codec: Any, *, outer: bool = False, whole: bool = True, **asked: Any) -> Policy:
    return Policy(options := DDPOptions(codec, **asked), options.choice_at(0), outer=outer, whole=whole)


BOTH = frozenset({"w", "v"})
ADAM = {"family": "adaptive", "keeps_moments": True}
DECIDED: list[tuple[Policy, int, dict[str, Any], tuple[str, str, bool]]] = [
    (policy_of("int8"), 0, {}, ("int8", "", False)),
    (policy_of("lloyd2"), 0, {}, ("int8", "", False)),  # until an optimizer is known
    (policy_of("lloyd2"), 9, {"family": "linear"}, ("lloyd2", "classic", False)),
    (policy_of("lloyd2"), 9, {"family": "muon"}, ("lloyd2", "classic", False)),
    (policy_of("lloyd2"), 9, {"family": "adaptive"}, ("lloyd2", "", False)),
    (policy_of("lloyd2"), 9, ADAM, ("lloyd2", "", False)),  # no moments yet
    (policy_of("lloyd2"), 9, {**ADAM, "shared": BOTH}, ("lloyd2", "", True)),
    (policy_of("lloyd2"), 9, {**ADAM, "shared": frozenset("v")}, ("lloyd2", "", False)),
    (policy_of("lloyd2"), 9, {**ADAM, "shared": None}, ("lloyd2", "", False)),
    (policy_of("lloyd2", whole=False), 9, {**ADAM, "shared": BOTH}, ("lloyd2", "", False)),
    (policy_of("lloyd2", weigh="none"), 9, {**ADAM, "shared": BOTH}, ("lloyd2", "", False)),
    (policy_of("lloyd2", feedback="ef21"), 9, {**ADAM, "shared": BOTH}, ("lloyd2", "ef21", False)),
    (policy_of("int8", weigh="moments"), 9, {"shared": BOTH}, ("int8", "", True)),
    (policy_of("topk"), 9, {**ADAM, "shared": BOTH}, ("topk", "ef21", False)),
    (policy_of("topk", outer=True), 9, {"family": "linear"}, ("topk", "classic", False)),
    (policy_of("lloyd1", outer=True), 9, {"family": "linear"}, ("lloyd1", "", False)),
    (policy_of("lloyd2", warmup_steps=5), 4, {"family": "linear"}, ("none", "", False)),
    (policy_of("lloyd2", warmup_steps=5), 5, {"family": "linear"}, ("lloyd2", "classic", False)),
    (policy_of("lloyd2", policy={"w": "int4"}), 0, {}, ("int4", "", False)),
    (policy_of("lloyd2", exempt=["w"]), 0, {}, ("bf16", "", False)),
    (policy_of("auto"), 0, {}, ("none", "", False)),
    (policy_of("auto"), 3, {"candidate": BlockInt(8)}, ("int8", "", False)),
    (policy_of("auto"), 99, {"fastest": Lloyd(4)}, ("lloyd4", "", False)),
    (policy_of("auto:2.5"), 0, {"family": "linear"}, ("lloyd2", "classic", False)),
    (policy_of("auto:2.5"), 7, {"family": "linear", "widths": {"w": BlockInt(8)}}, ("int8", "classic", False)),
    (policy_of("lloyd3"), 9, {"family": "linear"}, ("lloyd3", "classic", False)),
    (policy_of("auto:2.5"), 0, {"family": "adaptive"}, ("lloyd2", "", False)),
    (policy_of("auto:4"), 0, {"family": "adaptive"}, (str(auto.start_width(4)), "", False)),
    (policy_of("auto:5"), 7, {"family": "linear", "widths": {"w": Lloyd(1)}}, ("lloyd1", "", False)),
]


@pytest.mark.parametrize(("policy", "step", "agreed", "want"), DECIDED)
def test_a_decision_is_a_function_of_options_step_and_agreement(
    policy: Policy, step: int, agreed: dict[str, Any], want: tuple[str, str, bool]
) -> None:
    for _ in range(2):  # nothing is remembered in between
        then = dataclasses.replace(policy, choice=policy.options.choice_at(step), **agreed)
        chosen, feedback = then.travels("w", WIDE)
        assert (str(chosen), feedback, then.is_weighed("w", WIDE)) == want
        dataclasses.replace(policy, choice=Lloyd(2), **ADAM, shared=BOTH, candidate=Lloyd(1)).travels("v", WIDE)


# --- decisions from step to step --------------------------------------------------------------------------------------
def decisions(
    codec: Any = "lloyd2", *, optimizer: Any = "linear", names: Mapping[str, Tensor] | None = None, **options: Any
) -> Chooser:
    known = ParameterNames()
    for name, parameter in (names or {}).items():
        known.put(parameter, name)
    known.sizes.clear()  # until gradients come
    return Chooser(DDPOptions(codec, optimizer=optimizer, **options), known)


def alone(values: Sequence[float], op: object) -> list[float]:
    """The sum or maximum over one rank."""
    return list(values)


def begin(
    made: Chooser, step: int, seconds: float = 1.0, errors: Mapping[str, float] | None = None, error: Any = None
) -> str:
    return made.begin(step, seconds, errors or {}, error, alone)


def travels(made: Chooser, size: Size = WIDE, name: str = "p") -> tuple[str, str]:
    spec = made.spec(name, size)
    assert spec.first_phase == choice.first_phase(spec.codec, spec.feedback)
    return str(spec.codec), spec.feedback


def test_int8_travels_until_the_optimizer_of_every_parameter_is_known() -> None:
    """Muon steps matrices, AdamW the rest, perhaps later: what is right for one may hurt the other."""
    matrix, rest, stranger = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    for parameter in (matrix, rest, stranger):
        parameter.grad = torch.ones_like(parameter)
    made = decisions("lloyd2", optimizer=None, names={"m": matrix, "r": rest})
    for step, optimizer in enumerate((None, torch.optim.SGD([stranger]), torch.optim.AdamW([rest, stranger]))):
        if optimizer is not None:
            optimizer.step()
        begin(made, step)
        assert [travels(made, WIDE, name) for name in "mr"] == [("int8", "")] * 2
    torch.optim.Muon([matrix]).step()
    begin(made, 3)
    assert [travels(made, WIDE, name) for name in "mr"] == [("lloyd2", "classic")] * 2, "Muon's rule"
    both = [torch.optim.Muon([matrix]), torch.optim.AdamW([rest]), torch.optim.SGD([stranger])]
    four = decisions({0: "int8", 1: "lloyd4", 2: "auto:5"}, optimizer=both[0])
    for step, feedback in enumerate(("", "classic", "classic")):
        begin(four, step)
        assert travels(four)[1] == feedback, "4 bits before Muon"
    families = [decisions("lloyd2", optimizer=some).policy.family for some in (both, both[1:], both[2:])]
    assert families == ["muon", "adaptive", "linear"]


def test_bits_are_dealt_anew_only_when_they_are_due() -> None:
    made = decisions({0: "auto:2.5", 30: "auto:6"}, replan_every=20, measure_every=5)
    seen = []
    for step in range(35):
        begin(made, step, errors={"a": 1.0 + step, "b": 40.0 - step} if made.measuring and step else {})
        seen.append([travels(made, WIDE, name)[0] for name in "ab"])
    assert len({tuple(pair) for pair in seen[1:21]}) == 1
    assert choice.bits_of(make(seen[31][0])) >= 5, "another budget starts anew"


def test_a_race_that_a_schedule_leaves_is_over() -> None:
    made, settings = decisions({0: "auto", 5: "lloyd4"}, measure_every=10), []
    for step in range(12):
        begin(made, step)
        travels(made)
        settings.append(made.policy.setting)
        assert (made.race is not None) == (step < 5)
        assert made.measuring == (step in (5, 10) if step >= 5 else made.measuring)  # what begins is measured
    assert [a == b for a, b in itertools.pairwise(settings)][4:] == [False] + [True] * 6, "any other codec is another"


def test_what_another_rank_saw_of_the_optimizer_holds_here() -> None:
    made = decisions("lloyd2", optimizer=None)
    begin(made, 0)
    made.begin(1, 1.0, {}, None, lambda values, op: [1.0 + options.FAMILIES.index("linear"), 0.0, 0.0])
    assert travels(made) == ("lloyd2", "classic")


def test_an_optimizer_is_looked_for_only_where_it_matters() -> None:
    wanted: list[tuple[Any, dict[str, Any], bool]] = [
        ("lloyd2", {}, True),
        ("int8", {}, False),
        ("lloyd4", {}, False),
        ("auto", {}, False),
        ("auto:2.5", {}, True),
        ("auto:5", {}, False),
        ("lloyd2", {"feedback": "none"}, False),
        ("lloyd2", {"feedback": "ef21"}, False),
        ({0: "int8", 9: "lloyd1"}, {}, True),
        ("bysize(small=bf16; large=lloyd2)", {}, True),
        ("int8", {"policy": {"a*": "lloyd3"}}, True),
    ]
    gc.collect()
    hooks, made = _global_optimizer_pre_hooks, []
    begun = len(hooks)
    for codec, asked, looks in wanted:
        before = len(hooks)
        made.append(decisions(codec, optimizer=None, **asked))
        assert len(hooks) - before == looks, f"{codec} {asked}"
    made.clear()
    gc.collect()
    assert len(hooks) == begun, "what looked goes with the decisions"


@over("asked", [{}, {"optimizer": "muon"}, {"optimizer": "muon", "error_budget": 0.15}])
def test_a_trial_races_decides_and_stays(asked: dict[str, Any]) -> None:
    made = decisions("auto", **asked)
    error = 0.1 if asked == {"optimizer": "muon"} else 0.2  # of 4 bits
    seconds, codecs, news = {"none": 4.0, "bf16": 2.0, "int8": 1.0, "lloyd4": 0.5}, [], ""
    last = 1.0
    for step in range(SETTLE_STEPS + ROUNDS * len(CANDIDATES) + 3):
        told = begin(made, step, last, error=error if made.race and made.race.candidate == 3 else 0.01)
        news = news or told
        codecs.append(travels(made)[0])
        last = seconds[codecs[-1]]
    count = len(CANDIDATES)
    assert codecs[: SETTLE_STEPS + ROUNDS * count] == ["none"] * SETTLE_STEPS + list(seconds) * ROUNDS
    assert codecs[-3:] == ["int8"] * 3, "4 bits were over the budget"
    assert news.startswith("codec='auto' chose int8; ")
    assert made.why in news


def test_a_budget_is_dealt_after_the_first_step_and_again_by_plan() -> None:
    made = decisions("auto:2.5", optimizer="linear", replan_every=5, measure_every=0)
    names = ["a", "b", "c", "bias"]
    measured, seen = [], []
    for step in range(12):
        errors = {"a": 1.0 + 1e4 * (step > 5), "b": 5.0, "c": 1e-3, "bias": 9e9}
        begin(made, step, errors=errors if measured and measured[-1] else {})
        measured.append(made.measuring)
        seen.append({name: travels(made, THIN if name == "bias" else WIDE, name)[0] for name in names})
    assert [step for step, m in enumerate(measured) if m] == [0, 5, 10]
    assert all(one["bias"] == "bf16" for one in seen)
    assert {seen[0][name] for name in "abc"} == {str(auto.start_width(2.5))}
    bits = [{name: choice.bits_of(make(one[name])) for name in "abc"} for one in seen]
    assert bits[1]["b"] > bits[1]["c"]
    assert seen[1] == seen[5]
    assert bits[6]["a"] > bits[1]["a"]
    for one in seen[1:]:
        assert sum(make(one[name]).wire_bytes(4096) for name in "abc") + Cast("bf16").wire_bytes(64) <= 2.5 / 8 * (
            3 * 4096 + 64
        )
    assert made.why == auto.counted({name: make(seen[-1][name]) for name in "abc"})


@over("before", ["bf16", "int4", "int8:block=64", "e4m3", math.nan, math.inf])
def test_errors_of_another_codec_or_of_no_number_deal_no_bits(before: str | float) -> None:
    """A schedule that comes to a budget: what was measured before says nothing about its widths."""
    made = decisions({0: before, 1: "auto:2.5"} if isinstance(before, str) else "auto:2.5")
    begin(made, 0)
    travels(made, WIDE, "a")
    begin(made, 1, errors={"a": 1.0 if isinstance(before, str) else before})
    assert travels(made, WIDE, "a")[0] == "lloyd2"
    assert made.measuring, "looks again"


def test_what_will_be_remembered_is_known_before_it_begins() -> None:
    made = decisions({0: "none", 10: "lloyd2", 20: "int8"}, optimizer="linear")
    made.sizes.update({"w": WIDE, "b": THIN})
    assert made.policy.remembered(made.sizes) == {"w": (4096, "classic")}


# --- statistics -------------------------------------------------------------------------------------------------------
def stats(**values: Any) -> Stats:
    fields = dict.fromkeys((field.name for field in dataclasses.fields(Stats)), 0)
    return Stats(**(fields | values))


def test_statistics_print_as_a_table() -> None:
    asked = {"codec": "auto", "feedback": "none", "chosen": "int8; a step took: ..."}
    counted = {"steps": 1200, "bytes_sent": 2_500_000, "bytes_plain": 10_000_000, "nonfinite": 2, "scratch_bytes": 4096}
    unknown = dict.fromkeys(("encode_s", "decode_s", "reduce_s", "wire_s"))
    table = str(stats(**asked, **counted, **unknown, bits_per_element=8.1875, relative_error=0.0061))
    assert table.splitlines() == [
        "codec    auto, feedback none",
        "chosen   int8; a step took: ...",
        "steps    1200, 2 chunks not finite",
        "bytes    2,500,000 sent, 10,000,000 uncompressed: 4.00 times fewer",
        "bits     8.188 per element",
        "error    6.10e-03 relative",
        "memory   0 bytes of residuals, 4,096 of scratch",
    ]


def test_a_tally_counts_what_was_sent_and_what_was_not_finite() -> None:
    tally = Tally()
    tally.sent(10, 80)
    tally.sent(5, 20)
    assert (tally.bytes_sent, tally.bytes_plain) == (15, 100)
    for fine in (True, False, torch.tensor(True), torch.tensor(False), False, torch.tensor(True), True):
        tally.checked(fine)
    notes = [tally.note(program, torch.device("cpu"), chunks=2) for program in "aab"]
    notes[0].noted[1] = 2
    assert tally.all_nonfinite == 5
    assert [note.call for note in notes] == [1, 3, 1], "a program that is made anew goes on counting in one place"


Stage = tuple[int, float, float]


def wire_seconds(stages: Sequence[Stage]) -> Tally:
    tally = Tally()
    tally.worked(sorted(stages, key=lambda stage: stage[1]))
    return tally


def test_times_of_buckets_add_up() -> None:
    """The wire takes no time that was work, such as a second encoding between the first message and the last."""
    names = ("encode_s", "reduce_s", "decode_s", "wire_s")
    tally = wire_seconds([(0, 0.0, 1.0), (1, 4.0, 4.5), (-1, 10.0, 12.0)])
    assert [tally.seconds[name] for name in names] == [1.0, 0.5, 2.0, 10.0 - 1.0 - 0.5]
    tally = wire_seconds([(0, 0.0, 1.0), (0, 1.0, 2.0), (-1, 3.0, 4.0), (-1, 5.0, 6.0)])  # two chunks under way
    assert [tally.seconds[name] for name in names] == [2.0, 0.0, 2.0, (5.0 - 1.0) - 1.0 - 1.0]
    tally = Tally()
    for stages in (*[[(0, 0.0, 1.0), (-1, 3.0, 4.0)]] * 3, []):  # the last bucket never began
        tally.worked(stages)
    assert [tally.seconds[name] for name in names] == [3.0, 0.0, 3.0, 6.0]


def test_a_watch_sums_squares_by_parameter() -> None:
    pieces = [Piece("a", 3), Piece(None, 2), Piece("b", 5), Piece("nothing", 0), Piece("c", 1)]
    tally = Tally()
    watch = tally.watch(pieces, CPU)
    message, decoded = torch.randn(11, generator=seeded(1)), torch.randn(11, generator=seeded(2))
    for begin_, end in ((0, 4), (4, 7), (7, 11)):  # spans that cut parameters
        watch((begin_, end), message[begin_:end], decoded[begin_:end])
    squares = (message.double() - decoded.double()).square()
    parts = zip(pieces, squares.split([piece.numel for piece in pieces]), strict=True)
    want = {piece.name: float(part.sum()) for piece, part in parts if piece.name}
    assert tally.errors_by_name() == pytest.approx(want, rel=1e-12)
    assert tally.end_step() == pytest.approx(float((squares.sum() / message.double().square().sum()).sqrt()), rel=1e-12)


def measured(tally: Tally, *lanes: tuple[Codec, Tensor]) -> None:
    """A step that sends these."""
    for i, (codec, x) in enumerate(lanes):
        watch = tally.watch([Piece(f"p{i}", x.numel())], CPU)
        watch((0, x.numel()), x, cases.decoded(codec, cases.wire_of(codec, x), x.numel()))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_step_that_was_not_finite_is_not_called_exact(value: float) -> None:
    """An error of 0 would let codec="auto" take a codec that nobody has measured."""
    x = torch.randn(2000, generator=seeded(6))
    tally = Tally()
    measured(tally, (Lloyd(2), x))
    assert tally.end_step() == tally.relative_error == pytest.approx(math.sqrt(0.1175), rel=0.1)
    x[3] = value
    measured(tally, (Lloyd(2), x))
    assert tally.end_step() is None
    assert tally.relative_error == pytest.approx(math.sqrt(0.1175), rel=0.1), "of the last step that says anything"


def test_the_error_of_a_step_is_that_of_all_its_lanes() -> None:
    tally = Tally()
    x, y = torch.randn(4000, generator=seeded(7)), torch.randn(400, generator=seeded(8)) * 3
    measured(tally, (Lloyd(2), x), (BlockInt(8), y))
    by_name = tally.errors_by_name()
    assert by_name.keys() == {"p0", "p1"}
    assert tally.end_step() == pytest.approx(math.sqrt(sum(by_name.values()) / float((x @ x) + (y @ y))))
    assert tally.errors_by_name() == {}, "the next step is another"
    assert tally.end_step() is None
    measured(tally, (Lloyd(2), torch.zeros(100)))
    assert tally.end_step() == 0.0


@over("dtype", [torch.bfloat16, torch.float32])
def test_a_watch_takes_gradients_of_any_dtype(dtype: torch.dtype) -> None:
    """The squares of 1e-30 are zero in fp32."""
    tally = Tally()
    measured(tally, (Lloyd(4), (torch.randn(2000, generator=seeded(5)) * 1e-30).to(dtype)))
    assert tally.end_step() == pytest.approx(math.sqrt(0.0095), rel=0.1)
