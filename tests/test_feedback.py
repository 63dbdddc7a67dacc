"""What ranks remember: ledgers, whether wires are finite, and what classic feedback and EF21 send and keep.

tests/test_ddp_feedback.py and tests/test_fsdp_values.py follow what real ranks owe each other.
"""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

import cases
from cases import CPU, assert_same, by_turns, generated, on_ranks, over, seeded
from replicas import PAIR, Given, Group, backward, draw, flat, residuals, wrap
from thinwire import Codec, CodecError, Identity, compress_ddp
from thinwire.feedback import Carry, Ledger, Piece, deal, gaps_of
from thinwire.kernels.rows import Feedback, Memory, message, remember

DTYPES = (torch.float32, torch.bfloat16)
each_dtype = over("dtype", DTYPES)


def normal(n: int, *seeds: int) -> Tensor:
    return torch.randn(n, generator=seeded(*seeds))


def dyadic(n: int, *seeds: int) -> Tensor:
    """Multiples of 1/64 up to 16: sums of a few hundred of them are exact in fp32."""
    return torch.randint(-1024, 1025, (n,), generator=seeded(*seeds)).float() / 64


# --- whether wires are finite -----------------------------------------------------------------------------------------
@generated(70)
@given(
    codec=st.sampled_from(cases.CODECS),
    dtype=st.sampled_from([*cases.DTYPES, torch.float64]),
    n=st.one_of(st.integers(0, 40), st.integers(41, 1300)),
    world=st.integers(1, 4),
    kind=st.sampled_from(["gaussian", "huge", "zeros", "1e-40", "spike", "decades"]),
    bad=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5000), st.sampled_from([math.nan, math.inf, -math.inf]))),
    apart=st.booleans(),
)
def test_all_finite_is_what_decoding_says(
    codec: Codec, dtype: torch.dtype, n: int, world: int, kind: str, bad: list[tuple[int, int, float]], apart: bool
) -> None:
    if dtype not in codec.inputs:
        dtype = torch.float32
    narrow = torch.float32 if dtype == torch.float64 else dtype
    xs = [cases.content(kind, n, narrow, rank).to(dtype) for rank in range(world)]
    for rank, i, value in bad if n else []:
        xs[rank % world][i % n] = value
    if dtype == torch.float64 and kind == "huge" and n:
        xs[0][n // 2] = 1e300  # finite, for the identity alone
    wires_WN = cases.wires_of(codec, xs)
    if apart:  # rows of a wider matrix, as lanes are, at any address
        wide = torch.full((world, wires_WN.shape[1] + 48), cases.GARBAGE, dtype=torch.uint8)
        wide[:, 17:-31] = wires_WN
        wires_WN = wide[:, 17:-31]
    out = dtype if isinstance(codec, Identity) else torch.float32
    decoded = torch.stack([cases.decoded(codec, wire, n, out) for wire in wires_WN])
    got = codec.all_finite(wires_WN, n, dtype)
    assert (got.shape, got.dtype, bool(got)) == ((), torch.bool, bool(decoded.isfinite().all()))


@over("codec", cases.BLOCKED)
def test_all_finite_sees_the_sums_that_are_not(codec: Codec) -> None:
    """What one rank sends shows in the recoded sum: the second phase alone is looked at."""
    n = 3 * cases.block_of(codec) + 5
    xs = [normal(n, rank) for rank in range(3)]
    assert codec.all_finite(cases.recoded(codec, cases.wires_of(codec, xs), n, 1 / 3)[None], n)
    for i in (0, n // 2, n - 1):
        broken = [xs[0], xs[1].clone(), xs[2]]
        broken[1][i] = math.inf
        assert not codec.all_finite(cases.recoded(codec, cases.wires_of(codec, broken), n, 1 / 3)[None], n)


# --- ledgers ----------------------------------------------------------------------------------------------------------
SIZES = {"a": 3, "b": 0, "c": 129, "d": 1, "e": 40, "f": 300}


@st.composite
def arrangements(draw: st.DrawFn) -> list[list[Piece]]:
    """Lanes of some parameters, in any order, with gaps between."""
    lanes: list[list[Piece]] = [[]]
    for name in draw(st.permutations(sorted(SIZES)))[: draw(st.integers(1, len(SIZES)))]:
        if lanes[-1] and draw(st.booleans()):
            lanes.append([])
        if lanes[-1] and draw(st.booleans()):
            lanes[-1].append(Piece(None, draw(st.sampled_from([0, 5, 130]))))
        lanes[-1].append(Piece(name, SIZES[name]))
    return lanes


orders = st.lists(arrangements(), min_size=1, max_size=3).flatmap(
    lambda some: st.lists(st.sampled_from(some), max_size=6)
)


@generated(60)
@given(dtype=st.sampled_from(DTYPES), steps=orders)
def test_a_ledger_moves_what_parameters_remember_when_lanes_change(
    dtype: torch.dtype, steps: list[list[list[Piece]]]
) -> None:
    """Lanes come back, and parameters that have no feedback for some steps; every lane of every step is written."""
    ledger, model = Ledger(dtype), dict[str, Tensor]()
    for turn, lanes in enumerate(steps):
        memories = [ledger.lane(pieces, CPU) for pieces in lanes]
        for name, values in ledger.read().items():
            want = model.get(name, torch.zeros(SIZES[name]))
            assert_same(values.float(), want, f"{name} after it moved in turn {turn}")
        for i, (pieces, memory) in enumerate(zip(lanes, memories, strict=True)):
            n = sum(piece.numel for piece in pieces)
            expected = [model.get(piece.name or "", torch.zeros(piece.numel)) for piece in pieces]
            gaps = torch.cat([torch.full((p.numel,), p.name is None) for p in pieces])
            assert_same(memory.float()[~gaps], torch.cat(expected)[~gaps], "a lane")
            values = normal(n, turn, i).to(dtype).float() if n else torch.zeros(0)
            memory.copy_(values)
            parts = values.split([piece.numel for piece in pieces])
            model |= {p.name: part.clone() for p, part in zip(pieces, parts, strict=True) if p.name is not None}
    for name, values in ledger.read().items():
        assert_same(values.float(), model.pop(name), f"{name} in the end")
    assert not model, "parameters were forgotten"


def test_a_ledger_refuses_a_memory_of_another_size() -> None:
    """One number would fill any parameter."""
    ledger = Ledger()
    ledger.load({"p": torch.ones(1)})
    with pytest.raises(RuntimeError, match="invalid for input of size 1"):
        ledger.lane([Piece("p", 8)], torch.device("cpu"))


def test_a_lane_that_is_asked_for_again_is_up_to_date() -> None:
    ledger, both = Ledger(), [Piece("p", 2), Piece("q", 2)]
    ledger.lane(both, CPU).copy_(torch.ones(4))
    ledger.lane([Piece("q", 2)], CPU).copy_(torch.full((2,), 5.0))
    again = ledger.lane(both, CPU)
    assert again is ledger.lane(list(both), CPU), "made once"
    assert ledger.nbytes == 4 * 4, "old lanes are let go"
    assert again.tolist() == [1, 1, 5, 5]
    again.copy_(torch.full((4,), 7.0))
    ledger.read()["p"].zero_()  # a copy
    assert {name: values.tolist() for name, values in ledger.read().items()} == {"p": [7, 7], "q": [7, 7]}
    for dtype in (torch.float64, torch.float16, torch.uint8, None):
        with pytest.raises(CodecError, match=r"float32 or bfloat16, got"):
            Ledger(dtype)  # type: ignore[arg-type]


@each_dtype
def test_what_is_loaded_is_read_again_and_waits_for_its_lane(dtype: torch.dtype) -> None:
    ledger = Ledger(dtype)
    values = {"p": normal(200).to(dtype).float(), "q": torch.zeros(3), "gone": torch.ones(2)}
    ledger.lane([Piece("old", 5)], CPU)
    ledger.load(values)
    assert (set(ledger.read()), ledger.nbytes) == (set(values), 4 * 205)
    for name, value in ledger.read().items():
        assert_same(value.float(), values[name])
    memory = ledger.lane([Piece("q", 3), Piece(None, 4), Piece("p", 200), Piece("new", 2)], CPU)
    assert_same(memory.float(), torch.cat([torch.zeros(7), values["p"], torch.zeros(2)]))
    assert set(ledger.read()) == {"p", "q", "new", "gone"}
    values["gone"].zero_()
    assert ledger.read()["gone"].tolist() == [1, 1], "what was loaded is a copy"
    ledger.load({})
    assert (ledger.read(), ledger.nbytes) == ({}, 0)


@each_dtype
def test_dropping_forgets_some_and_leaves_the_others(dtype: torch.dtype) -> None:
    ledger = Ledger(dtype)
    pieces = [Piece("p", 130), Piece(None, 3), Piece("q", 20), Piece("r", 0)]
    memory = ledger.lane(pieces, CPU)
    memory.copy_(normal(153))
    ledger.lane([Piece("s", 4)], CPU).copy_(torch.ones(4))
    ledger.load({**ledger.read(), "loose": torch.ones(2)})
    memory = ledger.lane(pieces, CPU)
    ledger.lane([Piece("s", 4)], CPU)
    kept_before = ledger.read()
    ledger.drop(["p", "loose", "s", "unheard of"])
    assert set(ledger.read()) == {"q", "r"}
    assert_same(ledger.read()["q"], kept_before["q"])
    again = ledger.lane(pieces, CPU)
    assert_same(again.float(), torch.cat([torch.zeros(133), kept_before["q"].float()]))
    assert set(ledger.read()) == {"p", "q", "r"}
    ledger.drop(["p", "q", "r"])
    assert ledger.nbytes == 0


@generated(40)
@given(
    sizes=st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=6),
    begin=st.integers(0, 20),
    length=st.integers(0, 30),
)
def test_gaps_are_cleared_and_nothing_else(sizes: list[tuple[bool, int]], begin: int, length: int) -> None:
    pieces = [Piece("p" if named else None, numel) for named, numel in sizes]
    whole = torch.tensor([named for named, numel in sizes for _ in range(numel)] or [True], dtype=torch.float32)
    part = whole[begin : begin + length]
    message = torch.ones_like(part)
    Carry(torch.ones_like(whole), gaps=gaps_of(pieces)).part((begin, begin + part.numel()), message, None)
    assert_same(message, part.clone())


@over("world", range(1, 7))
@over("new_world", range(1, 7))
def test_deal_gives_everything_to_somebody_once(world: int, new_world: int) -> None:
    names = ("p", "q", "r")
    parts = {k: {name: dyadic(9, k, i) for i, name in enumerate(names) if (k + i) % 3} for k in range(world)}
    dealt = [deal(parts, world, rank, new_world) for rank in range(new_world)]
    zeros = torch.zeros(9)
    for name in names:
        before = sum((part[name] for part in parts.values() if name in part), zeros)
        assert_same(sum((part[name] for part in dealt if name in part), zeros), before)
    if world == new_world:
        assert all(set(dealt[k]) == set(parts[k]) for k in range(world))
    assert all(not part for part in dealt[world:])
    small = {0: {"p": torch.tensor([1.0], dtype=torch.bfloat16)}, 1: {"p": torch.tensor([2.0**-9]).to(torch.bfloat16)}}
    assert deal(small, 2, 0, 1)["p"].item() == 1 + 2.0**-9, "added in fp32"
    assert small[0]["p"].item() == 1, "what was given stays as it was"


# --- classic feedback and EF21 ----------------------------------------------------------------------------------------
KEPT = torch.arange(1.0, 10.0)
PIECES = [Piece("a", 2), Piece(None, 3), Piece("b", 4)]
NAMED = torch.tensor([piece.name is not None for piece in PIECES for _ in range(piece.numel)])


FEEDBACKS = {"classic": Feedback("classic", 2.0), "ef21": Feedback("ef21", -2.0)}


def carried(kind: str) -> Carry:
    return Carry(KEPT.clone(), KEPT.clone() if kind == "ef21" else None, gaps_of(PIECES))


@over("span", [(0, 9), (1, 4), (3, 8), (5, 9)])
def test_a_message_has_what_is_owed_and_nothing_of_a_gap(span: tuple[int, int]) -> None:
    part = slice(*span)
    for kind, feedback in FEEDBACKS.items():
        x = torch.full((span[1] - span[0],), 5.0)
        memory = carried(kind).part(span, x, span)
        assert_same(message(x, memory._replace(left=x), feedback, 0, len(x)), x)  # in place
        assert_same(x, torch.where(NAMED, 5 + feedback.factor * KEPT, 0)[part])


@over("fine", [True, False, torch.tensor(True), torch.tensor(False)])
def test_memories_change_with_chunks_that_are_finite(fine: bool | Tensor) -> None:
    """On a GPU that is a tensor: nobody waits to know."""
    after = {"classic": [3.0, 3.0, 3.0, 5.0, 5.0], "ef21": [4.0, 5.0, 6.0, 13.0, 14.0]}  # errors; sums of what was read
    for kind, feedback in FEEDBACKS.items():
        carry, result = carried(kind), torch.full((9,), 4.0)
        left = torch.tensor([6.0] * 3 + [5.0] * 2)
        memory = Memory(carry.kept[:5], left, None if carry.mean is None else carry.mean[:5])
        remember(memory, feedback, 0, 3, result[:3], False, 0.5, fine)
        remember(memory, feedback, 3, 5, result[3:5], True, 0.5, fine)
        assert_same(carry.kept, torch.cat((torch.tensor(after[kind]), KEPT[5:])) if fine else KEPT)
        if carry.mean is not None:
            assert_same(result[:5], KEPT[:5] + 4)
            assert_same(carry.mean, torch.cat((result[:5], KEPT[5:])) if fine else KEPT)


@by_turns("dtype, feedback, world", [torch.bfloat16, torch.float16, torch.float64], ["classic", "ef21"], [2, 3])
@on_ranks()
def test_feedback_of_other_gradients_is_kept_in_fp32(group: Group, dtype: torch.dtype, feedback: Any) -> None:
    """The result is rounded to the gradients' dtype, what is remembered is not."""
    narrow, wide = (wrap(Given(PAIR, each), group, 1 << 10) for each in (dtype, torch.float32))  # one bucket
    handles = [compress_ddp(model, "lloyd2", feedback=feedback, algorithm="two_phase") for model in (narrow, wide)]
    for step in range(3):
        given_ = draw(group.rank(), step, PAIR, dtype)
        got, want = backward(narrow, given_), backward(wide, [g.float() for g in given_])
        assert_same(flat(got), flat(want).to(dtype))
        assert_same(*(residuals(handle, PAIR) for handle in handles))
