"""Sums and gathers of rows in lanes (collectives/message.py): within their error, and programs as operations."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import thinwire
from cases import ROUND, Range, blocks_of, by_turns, digest, given, on_ranks, seeded, small_chunks, worlds
from ranks import RankPool
from replicas import Group, message_of
from test_nccl import OWN, Outputs, Place
from test_programs import check_both
from thinwire import codec, feedback
from thinwire.collectives.chunks import LaneSpec
from thinwire.collectives.message import Hooks, RowMessage
from thinwire.integrations.fsdp.rows import Columns
from thinwire.integrations.lanes import lanes_of


class Kind(NamedTuple):
    """A message: elements of a row and codec of every lane, and what a sum is multiplied by."""

    lanes: tuple[tuple[int, str], ...]
    dtype: torch.dtype = torch.float32
    scale: float = 1.0

    @property
    def specs(self) -> list[LaneSpec]:
        return [LaneSpec(numel, codec(name), codec(name)) for numel, name in self.lanes]


BF16 = torch.bfloat16
KINDS = [
    Kind(((1001, "int8"),), scale=0.25),
    Kind(((513, "lloyd4:block=64"), (7, "bf16"), (129, "none")), scale=-1.5),
    Kind(((300, "none"), (1, "int8")), BF16),
    Kind(((257, "int4:block=32"), (40, "e4m3:block=8")), torch.float16, 0.5),
    Kind(((700, "int8:rounding=stochastic"), (33, "int3:mode=affine"), (65, "none")), BF16, 1 / 3),
]


def row(kind: Kind, lane: int, source: int, target: int) -> Tensor:
    """What a rank has for another; a gather's is for rank 0."""
    return given(kind.lanes[lane][0], 16 * lane + 4 * target + source, kind.dtype)


def scattered(group: Group, kind: Kind, steps: int = 1) -> list[Tensor]:
    message = RowMessage(kind.specs, torch.empty(0, dtype=kind.dtype), group, kind.scale)
    world = group.size()
    for step in range(steps):
        inputs = [torch.stack([row(kind, i, group.rank(), r) for r in range(world)]) for i in range(len(kind.lanes))]
        outputs = [torch.full((numel,), math.nan, dtype=kind.dtype) for numel, _ in kind.lanes]
        message.run(outputs, inputs, step)
    return outputs


def gathered(group: Group, kind: Kind, steps: int = 1) -> list[Tensor]:
    message = RowMessage(kind.specs, torch.empty(0, dtype=kind.dtype), group)
    for step in range(steps):
        outputs = [torch.full((group.size(), numel), math.nan, dtype=kind.dtype) for numel, _ in kind.lanes]
        message.run(outputs, [row(kind, i, group.rank(), 0) for i in range(len(kind.lanes))], step)
    return outputs


def both(group: Group, kinds: Sequence[Kind], cut: bool) -> list[tuple[list[Tensor], list[Tensor]]]:
    with small_chunks() if cut else nullcontext():
        return [(scattered(group, kind, 2), gathered(group, kind, 2)) for kind in kinds]


def sum_range(kind: Kind, lane: int, target: int, world: int) -> Range:
    chosen = codec(kind.lanes[lane][1])
    parts = [Range.of(row(kind, lane, source, target)).coded(chosen) for source in range(world)]
    return Range.total(parts, kind.scale).written(kind.dtype)


def check_values(kind: Kind, world: int, answers: Sequence[tuple[list[Tensor], list[Tensor]]]) -> None:
    for lane, (_, name) in enumerate(kind.lanes):
        for rank, (sums, _) in enumerate(answers):
            sum_range(kind, lane, rank, world).assert_holds(sums[lane], f"{kind}, lane {lane}, sum on rank {rank}")
        assert len({digest(rows[lane]) for _, rows in answers}) == 1, f"{kind}, lane {lane}: ranks differ"
        for rank, got in enumerate(answers[0][1][lane]):
            want = Range.of(row(kind, lane, rank, 0)).coded(codec(name)).written(kind.dtype)
            want.assert_holds(got, f"{kind}, lane {lane}, row {rank}")


@by_turns("world, cut", [2, 3, 4], [False, True])
def test_every_lane_is_within_the_error_of_its_codec(ranks: RankPool, world: int, cut: bool) -> None:
    for kind, *answers in zip(KINDS, *ranks(world).run(both, KINDS, cut), strict=True):
        check_values(kind, world, answers)


LONG = Kind((((1 << 19) + 128, "int8:block=128"), (5, "none")), scale=0.5)  # chunks begin on whole blocks


@on_ranks(2)
def test_long_rows_are_cut_and_short_lanes_travel_with_the_first_chunk(group: Group) -> None:
    message = RowMessage(LONG.specs, torch.empty(0), group, LONG.scale)
    numels = [numel for numel, _ in LONG.lanes]
    inputs = [torch.stack([drawn(n, group.rank(), target) for target in range(2)]) for n in numels]
    outputs = [torch.empty(numel) for numel in numels]
    message.run(outputs, inputs, 0)
    mine = [[drawn(n, source, group.rank()) for source in range(2)] for n in numels]
    step = sum(blocks_of(x, 128).abs().amax(1, keepdim=True) for x in mine[0]) / 127 * LONG.scale
    off = blocks_of(outputs[0] - LONG.scale * (mine[0][0] + mine[0][1]), 128).abs() / step
    chunks = message.plan.lanes[0].chunking.num_chunks
    assert chunks > 2
    assert 0 < message.sent_bytes - numels[0] * (1 + 2 / 128) < 64 * (chunks + 1)
    assert 0.3 < off.max() <= 0.5 * (1 + 2.0**-8) + 127 * 8 * ROUND
    assert torch.equal(outputs[1], LONG.scale * (mine[1][0] + mine[1][1]))


def drawn(numel: int, source: int, target: int) -> Tensor:
    return torch.randn(numel, generator=seeded(numel, source, target))


def rows_of(place: Place, kinds: Sequence[Kind]) -> Outputs:
    """Sums and gathers, at two steps."""
    found: Outputs = {}
    for kind in kinds:
        for lane, x in enumerate(scattered(place.group, kind, 2)):
            found[f"{OWN}sum of {kind}, lane {lane}"] = x
        for lane, x in enumerate(gathered(place.group, kind, 2)):
            found[f"gather of {kind}, lane {lane}"] = x
    return found


@worlds(3, rare=[2, 4])
def test_programs_have_the_bytes_of_operations(ranks: RankPool, world: int) -> None:
    rows, pairs = check_both(ranks, world, 2, rows_of, KINDS)
    assert rows == 2 * len(KINDS) * 2 * 2  # a message for a sum, and one for a gather, at each of two steps
    assert pairs == 0


def test_what_has_no_program_has_the_bytes_of_operations(ranks: RankPool) -> None:
    """A lane of nothing, and a codec that no kernel of rows serves."""
    kinds = [Kind(((0, "int8"), (40, "bf16"))), Kind(((40, "none"), (0, "bf16")), BF16)]
    rows, pairs = check_both(ranks, 3, 1, rows_of, kinds)
    assert rows == 0
    assert pairs > 0


def in_columns(place: Place) -> Outputs:
    """A sum and a gather of rows with small lanes between parts of a large one."""
    world, numels, found = place.group.size(), (1500, 7, 600, 31), Outputs()
    codecs = [codec("int8"), codec("bf16")] * 2
    lanes = lanes_of("abcd", [LaneSpec(n, c, c) for n, c in zip(numels, codecs, strict=True)], whole=True)
    for scale, sent, came in ((None, 1, world), (0.5, world, 1)):
        message = RowMessage([lane.spec for lane in lanes], torch.empty(0), place.group, scale)
        columns = Columns(lanes, sum(numels), torch.empty(0), message)
        for step in range(2):
            given_rows, out = drawn(sent * sum(numels), place.group.rank(), step), torch.empty(came, sum(numels))
            columns.send(out, given_rows.view(sent, -1), step)
            found[f"{OWN if scale else ''}{step} {scale}"] = out
    return found


@worlds(2, rare=[3])
def test_columns_have_the_bytes_of_operations(ranks: RankPool, world: int) -> None:
    rows, pairs = check_both(ranks, world, 1, in_columns)
    assert (rows, pairs) == (4, 0)


FED: tuple[tuple[int, str], ...] = ((500, "lloyd2:block=64"), (90, "int4:block=32"))


def fed_rows(group: Group, bad_step: int, cut: bool = False) -> tuple[list[Tensor], list[Tensor], list[bool], bool]:
    """What a rank got in four steps in all, what it owes others, what `checked` heard, and whether NaN left memories.

    At `bad_step` rank 1 has a NaN in the first lane, for rank 0; nothing of that step is added up.
    """
    world = group.size()
    specs = [LaneSpec(numel, codec(name), codec(name), "classic") for numel, name in FED]
    residuals = [torch.zeros(world * numel) for numel, _ in FED]
    heard: list[bool] = []
    watched = Hooks([feedback.Carry(memory) for memory in residuals], [None, None], heard.append)
    message = RowMessage(specs, torch.empty(0), group, 1 / world)
    totals = [torch.zeros(numel, dtype=torch.float64) for numel, _ in FED]
    kept = True
    for step in range(4):
        inputs = [torch.stack([drawn(n, group.rank(), 4 * step + r) for r in range(world)]) for n, _ in FED]
        outputs = [torch.empty(numel) for numel, _ in FED]
        before = [memory.clone() for memory in residuals]
        if step == bad_step and group.rank() == 1:
            inputs[0][0, 300] = math.nan
        with small_chunks() if cut else nullcontext():
            message.run(outputs, inputs, step, watched)
        if step == bad_step:
            kept = all(torch.equal(b, m) for b, m in zip(before, residuals, strict=True))
            assert bool(outputs[0][300].isnan()) == (group.rank() == 0)
        else:
            totals = [total + output for total, output in zip(totals, outputs, strict=True)]
    return totals, [memory.view(world, -1) for memory in residuals], heard, kept


@worlds(2, rare=[3, 4])
def test_feedback_of_rows_owes_what_was_not_sent(ranks: RankPool, world: int) -> None:
    """Results and residuals add up to the true means, lane by lane."""
    for cut in (False, True):
        check_owed(ranks(world).run(fed_rows, -1, cut), range(4))


@worlds(4, rare=[2, 3])
def test_a_bad_number_on_one_rank_leaves_the_memories_of_all(ranks: RankPool, world: int) -> None:
    answers = ranks(world).run(fed_rows, 1)
    check_owed(answers, (0, 2, 3))
    assert all(kept for *_, kept in answers)
    assert [heard.count(False) for *_, heard, _ in answers] == [1] + [0] * (world - 1)  # rank 0 alone has its sum


def check_owed(answers: Sequence[tuple[list[Tensor], list[Tensor], list[bool], bool]], steps: Sequence[int]) -> None:
    """Messages of up to 10 round in fp32 a few times, the rotation of a block of 64 six times in its norm."""
    world = len(answers)
    slack = 4 * 16 * ROUND * math.sqrt(64) * 10
    for lane, (numel, _) in enumerate(FED):
        for rank, (totals, *_) in enumerate(answers):
            owed = torch.stack([residuals[lane][rank].double() for _, residuals, *_ in answers]).sum(0)
            drawings = [drawn(numel, s, 4 * step + rank).double() for s in range(world) for step in steps]
            assert owed.abs().max() > 50 * slack
            assert (totals[lane] + owed - torch.stack(drawings).sum(0) / world).abs().max() < slack


@on_ranks(3, rare=[2, 4])
def test_a_copy_comes_closer_and_keeps_no_nan(group: Group) -> None:
    """How far from everybody's numbers all_gather_into_tensor is with a copy: at first, with a NaN, and thereafter."""
    known, found = thinwire.RowCopy(), []
    for step in range(5):
        own = drawn(300, group.rank(), min(step, 1))
        if step == 2 and group.rank() == 1:
            own[7] = math.nan
        out = torch.empty(group.size() * 300)
        thinwire.all_gather_into_tensor(out, own, group, codec="int4:block=40", feedback=known, step=step)
        want = torch.cat([drawn(300, rank, min(step, 1)) for rank in range(group.size())])
        found.append(float((out - want).norm() / want.norm()))
    first, second, bad, again, last = found
    assert first == 0
    assert math.isnan(bad)
    assert again < second / 2
    assert last < again / 2


@pytest.mark.parametrize("kind", ["classic", "ef21"])
@on_ranks(3, rare=[2])
def test_feedback_of_the_verb_makes_good_what_calls_lose(group: Group, kind: str) -> None:
    """Errors, relative to the mean over ranks: of the last call, of the mean of all calls, and after a reload."""
    world, steps = group.size(), 30
    x = torch.randn(world * 301, generator=torch.Generator().manual_seed(group.rank()))
    mean = x.clone()
    dist.all_reduce(mean, dist.ReduceOp.SUM)
    mean = mean.view(world, -1)[group.rank()] / world
    memory, other, total = thinwire.RowFeedback(kind), thinwire.RowFeedback(kind), torch.zeros(301)

    def averaged(feedback: thinwire.RowFeedback, step: int) -> Tensor:
        out = torch.empty(301)
        thinwire.reduce_scatter_tensor(out, x.clone(), dist.ReduceOp.AVG, codec="lloyd2", feedback=feedback, step=step)
        return out

    for step in range(steps):
        total += averaged(memory, step)
    other.load_state_dict(memory.state_dict())
    last = averaged(memory, steps)
    assert torch.equal(averaged(other, steps), last)
    if kind == "classic":
        assert off(last, mean) > 0.1  # one call of two bits
        assert off(total / steps, mean) < 1.5 / steps  # all that is owed is what the last lost, divided by their number
    else:
        assert off(last, mean) < 1e-3  # differences shrink


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@on_ranks(2)
def test_feedback_of_the_verbs_refuses_what_it_cannot_do(group: Group) -> None:
    memory, out, x = thinwire.RowFeedback(), torch.empty(64), torch.ones(64 * group.size())
    thinwire.reduce_scatter_tensor(out, x.clone(), feedback=memory)
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: thinwire.RowFeedback("none"), "one of"),
        (lambda: thinwire.RowFeedback("ef21", torch.bfloat16), "float32"),
        (lambda: thinwire.reduce_scatter_tensor(out, x, async_op=True, feedback=memory), "blocking"),
        (lambda: thinwire.reduce_scatter_tensor(out, x, algorithm="plain", feedback=memory), "compressed"),
        (lambda: thinwire.reduce_scatter_tensor(out[:1], x[: group.size()], feedback=memory), "per buffer"),
        (lambda: thinwire.all_gather_into_tensor(x, out, async_op=True, feedback=thinwire.RowCopy()), "blocking"),
    ]
    for call, said in calls:
        assert said in message_of(call)
