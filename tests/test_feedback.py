"""What ranks remember: memories, ledgers, classic feedback and EF21 over ranks simulated in one process.

The simulation runs the reducers of `thinwire.collectives` themselves; only the link between ranks is made up.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

import cases
from cases import CPU, assert_same, generated, over, seeded
from thinwire import BlockInt, Cast, Codec, CodecError, Identity, Lloyd
from thinwire.collectives import lane as lane_module, sums
from thinwire.collectives.chunks import Cut, Desk, Flat
from thinwire.collectives.lane import Lane, LaneSpec
from thinwire.collectives.operations import AllReduce, Setting
from thinwire.collectives.plan import CallPlan, with_scratch
from thinwire.collectives.sums import OneShot, TwoPhase
from thinwire.collectives.transport import Transport
from thinwire.feedback import EF21, Classic, Gaps, Ledger, Piece, deal

DTYPES = (torch.float32, torch.bfloat16)
each_dtype = over("dtype", DTYPES)
Bounds = tuple[int, int]


def normal(n: int, *seeds: int) -> Tensor:
    return torch.randn(n, generator=seeded(*seeds))


def dyadic(n: int, *seeds: int) -> Tensor:
    """Multiples of 1/64 up to 16: sums of a few hundred of them are exact in fp32."""
    return torch.randint(-1024, 1025, (n,), generator=seeded(*seeds)).float() / 64


# --- memories ---------------------------------------------------------------------------------------------------------
def kept(values: Tensor, dtype: torch.dtype) -> Tensor:
    """What a memory of `dtype` keeps of a span."""
    return values.to(dtype).float()


def spans_of(edges: Sequence[int]) -> list[Bounds]:
    return list(itertools.pairwise(edges))


# --- whether wires are finite, and codes at the ends ------------------------------------------------------------------
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
            at, expected = 0, []
            for piece in pieces:
                blank = torch.zeros(piece.numel)
                expected.append(blank if piece.name is None else model.get(piece.name, blank))
                at += piece.numel
            gaps = torch.cat([torch.full((p.numel,), p.name is None) for p in pieces])
            assert_same(memory.float()[~gaps], torch.cat(expected)[~gaps], "a lane")
            values = kept(normal(n, turn, i), dtype) if n else torch.zeros(0)
            memory.copy_(values)
            parts = values.split([piece.numel for piece in pieces])
            model |= {p.name: part.clone() for p, part in zip(pieces, parts, strict=True) if p.name is not None}
    for name, values in ledger.read().items():
        assert_same(values.float(), model.pop(name), f"{name} in the end")
    assert not model, "parameters were forgotten"


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
    values = {"p": kept(normal(200), dtype), "q": torch.zeros(3), "gone": torch.ones(2)}
    ledger.lane([Piece("old", 5)], CPU)
    ledger.load(values)
    assert (set(ledger.read()), ledger.nbytes) == (set(values), 4 * 205)
    for name, value in ledger.read().items():
        assert_same(value.float(), value.float() if name not in values else values[name])
    memory = ledger.lane([Piece("q", 3), Piece(None, 4), Piece("p", 200), Piece("new", 2)], CPU)
    assert_same(memory.float(), torch.cat([torch.zeros(7), values["p"], torch.zeros(2)]))
    assert set(ledger.read()) == {"p", "q", "new", "gone"}
    assert set(ledger.read(["p", "unheard of"])) == {"p"}
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
    Gaps(pieces).clear((begin, begin + part.numel()), message)
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


# --- feedback over ranks in one process -------------------------------------------------------------------------------
class Link(Transport):
    """One rank's end of a group that lives in one process."""

    def __init__(self, rank: int, world: int, post: dict[tuple[int, int, int], Tensor]) -> None:
        self.rank = rank
        self.world = world
        self.sent = 0
        self.received = 0
        self._post = post  # what is under way, by sender, receiver and tag

    def exchange(self, sends: Any, receives: Any, tag: int) -> Any:
        for peer, part in sends:
            assert (self.rank, peer, tag) not in self._post
            self._post[self.rank, peer, tag] = part.clone()
        return [_Arrival(self._post, (peer, self.rank, tag), part) for peer, part in receives]


@dataclass
class _Arrival:
    post: dict[tuple[int, int, int], Tensor]
    key: tuple[int, int, int]
    part: Tensor

    def wait(self) -> None:
        self.part.copy_(self.post.pop(self.key))


def together(steps: Sequence[Iterator[Any]]) -> None:
    """Run the ranks' coroutines side by side: a message arrives once all have sent theirs."""
    running = list(steps)
    while running:
        moving = [(rank, awaited) for rank in running if (awaited := next(rank, None)) is not None]
        for _, awaited in moving:
            for message in awaited:
                message.wait()
        running = [rank for rank, _ in moving]


class Grid:
    """A lossy codec by element: multiples of a step, towards zero. Exact arithmetic, and no rotation to hide behind."""

    inputs = (torch.float32,)
    unit = 1

    def __init__(self, step: float = 1.0) -> None:
        self.step = step

    def wire_bytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        return 16 + -(-4 * numel // 16) * 16

    def encode(self, x: Tensor, wire: Tensor, *, step: int = 0, residual: Tensor | None = None) -> None:
        assert x.dtype == torch.float32
        whole = x if residual is None else x + residual
        decoded = (whole / self.step).trunc() * self.step
        wire[: x.nbytes].view(torch.float32).copy_(decoded)
        if residual is not None:
            residual.copy_(torch.where(decoded.isfinite(), whole - decoded, residual))

    def decode(self, wire: Tensor, out: Tensor, *, scale: float = 1.0, step: int | None = None) -> None:
        self.decode_sum(wire[None], out, scale=scale)

    def decode_sum(self, wires_WN: Tensor, out: Tensor, *, scale: float = 1.0, step: int | None = None) -> None:
        total = sum(wire[: 4 * out.numel()].view(torch.float32) for wire in wires_WN)
        out.copy_(total * scale)

    def all_finite(self, wires_WN: Tensor, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return wires_WN[:, : 4 * numel].clone().view(torch.float32).isfinite().all()


class Ranks:
    """Ranks that average one lane again and again, with feedback."""

    def __init__(
        self,
        kind: str,
        world: int,
        codec: Any,
        reducer: str,
        pieces: Sequence[Piece],
        *,
        dtype: torch.dtype = torch.float32,
        chunk: int | None = None,
    ) -> None:
        self.world = world
        self.codec = codec
        self.numel = sum(piece.numel for piece in pieces)
        self.reducer = {"one_shot": OneShot, "two_phase": TwoPhase}[reducer]
        self.cut = Cut(self.numel, chunk or max(self.numel, 1))
        self.memories = [torch.zeros(self.numel, dtype=dtype) for _ in range(world)]
        self.means = [torch.zeros(self.numel) for _ in range(world)]
        gaps = Gaps(pieces)
        self.carries: list[Classic | EF21] = [
            Classic(memory, world, gaps) if kind == "classic" else EF21(memory, mean, world, gaps)
            for memory, mean in zip(self.memories, self.means, strict=True)
        ]
        self.finite: list[Any] = []
        self.step = 0

    @property
    def owed(self) -> Tensor:
        """The sum over ranks of what they remember."""
        return torch.stack([memory.float() for memory in self.memories]).sum(0)

    def average(self, xs: Sequence[Tensor]) -> Tensor:
        """The average of xs, one a rank, which all ranks agree on; xs stay as they are."""
        return message([self], [xs])[0]

    def lane(self, rank: int, out: Tensor) -> Lane:
        """One rank's lane of a message."""
        checked = self.finite.append if rank == 0 else None
        return Lane(Flat([out]), self.cut, self.codec, self.codec, self.carries[rank], None, checked)


def message(lanes: Sequence[Ranks], xs: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The averages of several lanes that travel as one message, in as many chunks as the longest has."""
    post: dict[tuple[int, int, int], Tensor] = {}
    world, reducer, step = lanes[0].world, lanes[0].reducer, lanes[0].step
    outs = [[x.clone() for x in row] for row in xs]
    operations = []
    for rank in range(world):
        reduce = reducer(Link(rank, world, post))  # type: ignore[arg-type]
        made = [lane.lane(rank, row[rank]) for lane, row in zip(lanes, outs, strict=True)]
        kinds = ["classic" if lane.carry else "" for lane in made]
        specs = [
            LaneSpec(x.cut.numel, x.codec, x.first, kind, x.flat.dtype) for x, kind in zip(made, kinds, strict=True)
        ]
        plan = CallPlan("", specs, [lane.cut for lane in made], reducer=reduce)
        nbytes = with_scratch(plan, [False] * len(made)).chunk_bytes
        setting = Setting(reduce.transport, made[0].codec, step, (0,), nbytes, nbytes)
        operations.append(AllReduce(setting, made, reduce, 1.0 / world))
    for index in range(operations[0].num_chunks):
        together([op.chunk(index, Desk(torch.empty(op.chunk_bytes, dtype=torch.uint8))) for op in operations])
    assert not post, "every message was taken"
    for row in outs:
        for out in row[1:]:
            assert_same(out, row[0], "another rank")
    for lane in lanes:
        lane.step += 1
    return [row[0] for row in outs]


def one(numel: int) -> list[Piece]:
    return [Piece("p", numel)]


each_reducer = pytest.mark.parametrize("reducer", ["one_shot", "two_phase"])
each_kind = pytest.mark.parametrize("kind", ["classic", "ef21"])
LOSSY: list[Any] = [Grid(0.25), Grid(4.0), Lloyd(1, 64), Lloyd(2, 64), BlockInt(3, 32), BlockInt(4, 40, "affine")]


@each_reducer
@pytest.mark.parametrize("world", [2, 4])
def test_classic_feedback_owes_exactly_what_was_not_received(reducer: str, world: int) -> None:
    """Numbers and codec are such that fp32 rounds nothing."""
    ranks = Ranks("classic", world, Grid(1.0), reducer, one(37), chunk=16)
    meant = received = torch.zeros(37)
    for turn in range(12):
        xs = [dyadic(37, turn, rank) for rank in range(world)]
        meant = meant + torch.stack(xs).sum(0) / world
        received = received + ranks.average(xs)
        assert torch.equal(received + ranks.owed, meant)
    assert ranks.owed.any(), "the codec loses something"
    assert (ranks.owed.abs() <= 2.0).all(), "what is owed does not grow"


@generated(25)
@given(
    world=st.integers(2, 5),
    reducer=st.sampled_from(["one_shot", "two_phase"]),
    kind=st.sampled_from(["classic", "ef21"]),
    codec=st.sampled_from(LOSSY),
    numel=st.sampled_from([1, 2, 3, 5, 64, 65, 300]),  # fewer than ranks: some have no shard
    chunk=st.sampled_from([None, 64, 100]),
)
def test_nothing_is_lost_for_good(
    world: int, reducer: str, kind: str, codec: Any, numel: int, chunk: int | None
) -> None:
    """Classic: received + owed = meant. EF21: what the ranks say they sent is what all received."""
    ranks = Ranks(kind, world, codec, reducer, one(numel), chunk=chunk)
    meant = received = torch.zeros(numel, dtype=torch.float64)
    size = torch.zeros(numel, dtype=torch.float64)
    turns = 5
    for turn in range(turns):
        xs = [normal(numel, turn, rank) for rank in range(world)]
        result = ranks.average(xs)
        meant = meant + torch.stack(xs).double().mean(0)
        received = received + result.double()
        remembered = torch.stack(ranks.memories).abs().sum(0).double()
        size = torch.maximum(size, world * remembered + torch.stack(xs).abs().sum(0) + result.abs())
    # A number goes through fewer than 16 roundings a step and rank, none of anything larger than `size`.
    bound = 16 * turns * world * cases.ROUND * size
    if kind == "classic":
        assert ((received + ranks.owed - meant).abs() <= bound).all()
    else:
        assert ((ranks.owed - ranks.means[0]).abs() <= bound).all()
        assert_same(result, ranks.means[0])
        for mean in ranks.means[1:]:
            assert_same(mean, ranks.means[0], "another rank's mean")


@each_kind
@each_reducer
@pytest.mark.parametrize(("world", "as_tensor"), [(2, True), (3, False)])
def test_a_chunk_that_is_not_finite_changes_no_memory(
    kind: str, reducer: str, world: int, as_tensor: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if as_tensor:  # as on a GPU, where nobody waits to know
        check = lane_module.check_finite
        for module in (lane_module, sums):
            monkeypatch.setattr(module, "check_finite", lambda *told: torch.tensor(bool(check(*told))))
    n, chunk = 200, 64
    for codec in (Lloyd(2, 32), Cast("bf16")):
        ranks = Ranks(kind, world, codec, reducer, one(n), chunk=chunk)
        ranks.average([normal(n, rank) for rank in range(world)])
        for turn, value in enumerate((math.nan, -math.inf)):
            before = [memory.clone() for memory in (*ranks.memories, *ranks.means)]
            xs = [normal(n, rank, turn) for rank in range(world)]
            place = 70 + 50 * turn
            xs[turn % world][place] = value
            ranks.finite.clear()
            result = ranks.average(xs)
            bad = torch.zeros(n, dtype=torch.bool)
            bad[place // chunk * chunk : (place // chunk + 1) * chunk] = True
            for memory, old in zip((*ranks.memories, *ranks.means), before, strict=True):
                assert_same(memory[bad], old[bad], "the chunk that is not finite")
                assert memory is ranks.means[0] or memory.isfinite().all()
            for memory, old in zip(ranks.memories, before, strict=False):
                assert not torch.equal(memory[~bad], old[~bad])
            assert not result[place].isfinite(), "whoever looks at the result sees it"
            assert result[~bad].isfinite().all()
            assert [bool(fine) for fine in ranks.finite] == [i != place // chunk for i in range(4)]
        after = ranks.average([normal(n, rank) for rank in range(world)])
        assert after.isfinite().all()


@each_reducer
def test_lanes_of_one_message_do_not_meet(reducer: str) -> None:
    """Each is what it would be alone, whatever the others' length, chunks and feedback."""
    world = 4
    kinds = [("classic", 300, 64), ("ef21", 70, 64), ("classic", 3, 10), ("ef21", 0, 10), ("ef21", 130, 200)]
    mixed, alone = ([Ranks(k, world, Grid(0.5), reducer, one(n), chunk=c) for k, n, c in kinds] for _ in range(2))
    for turn in range(3):
        xs = [[dyadic(lane.numel, turn, i, rank) for rank in range(world)] for i, lane in enumerate(mixed)]
        for got, lane, row in zip(message(mixed, xs), alone, xs, strict=True):
            assert_same(got, lane.average(row))
        for one_, other in zip(mixed, alone, strict=True):
            assert_same(one_.owed, other.owed)


@each_reducer
def test_a_chunk_is_fine_if_all_its_lanes_are(reducer: str) -> None:
    lanes = [Ranks("classic", 2, Grid(0.5), reducer, one(n), chunk=10) for n in (30, 10)]
    xs = [[normal(lane.numel, rank) for rank in range(2)] for lane in lanes]
    xs[1][1][3] = math.inf
    message(lanes, xs)
    assert [bool(fine) for fine in lanes[0].finite] == [False, True, True]
    assert not lanes[0].owed[:10].any()
    assert lanes[0].owed[10:].any()
    assert not lanes[1].owed.any()


@each_kind
@each_reducer
@pytest.mark.parametrize("world", [2, 5])
def test_gaps_change_nothing_for_the_others(kind: str, reducer: str, world: int) -> None:
    """Whatever stands in a gap is sent as zeros, and nothing that happened to it is remembered."""
    pieces = [Piece("a", 5), Piece(None, 7), Piece("b", 9), Piece(None, 1), Piece("c", 30)]
    named = torch.cat([torch.full((p.numel,), p.name is not None) for p in pieces])
    bridged = Ranks(kind, world, Grid(0.5), reducer, pieces)
    zeros = Ranks(kind, world, Grid(0.5), reducer, one(named.numel()))
    for turn in range(4):
        xs = [normal(named.numel(), turn, rank) for rank in range(world)]
        got, want = bridged.average(xs), zeros.average([x * named for x in xs])
        assert torch.equal(got[named], want[named])
        assert (got[~named] == 0).all()
        for memory in bridged.memories:
            memory.copy_(torch.where(named, memory, 1e9))  # as a rotation may leave


@each_kind
@each_reducer
@over("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_feedback_of_other_gradients_is_kept_in_fp32(kind: str, reducer: str, dtype: torch.dtype) -> None:
    """The result is rounded to the gradients' dtype, what is remembered is not."""
    world, n = 2, 96
    ranks, wide = (Ranks(kind, world, Lloyd(2, 32), reducer, one(n), chunk=40) for _ in range(2))
    for turn in range(3):
        xs = [normal(n, turn, rank).to(dtype) for rank in range(world)]
        assert_same(ranks.average(xs), wide.average([x.float() for x in xs]).to(dtype))
        for memory, other in zip(ranks.memories, wide.memories, strict=True):
            assert_same(memory, other)
