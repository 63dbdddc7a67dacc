"""The cost model: lines through measured points, the choice they lead to, and one answer on all ranks."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given as forall, strategies as st

import thinwire
from cases import generated, on_ranks, over
from thinwire.collectives import cost
from thinwire.collectives.channel import channel_of
from thinwire.collectives.cost import Choice, CurveKey, Estimate, Measured, Points

Group = dist.ProcessGroup
LINK: Points = ((256, 1e-4), (1 << 20, 1e-2))


# --- lines ------------------------------------------------------------------------------------------------------------


def test_between_and_beyond_points_times_lie_on_lines() -> None:
    points: Points = ((100, 1.0), (200, 2.0), (400, 8.0))
    times = {0: 1.0, 100: 1.0, 150: 1.5, 200: 2.0, 300: 5.0, 800: 20.0}
    assert {size: cost.at(points, size) for size in times} == times
    # One point is enough, beyond which time is in proportion: a slow link is measured at one size only.
    assert [cost.at(((100, 1.0),), size) for size in (50, 100, 300)] == [1.0, 1.0, 3.0]


@generated(60)
@forall(
    st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 10)), min_size=1, max_size=5, unique_by=lambda p: p[0]),
    st.lists(st.integers(0, 10**8), min_size=2, max_size=9),
)
def test_a_larger_message_never_takes_less(points: list[tuple[int, float]], sizes: list[int]) -> None:
    sizes_of, seconds = zip(*sorted(points), strict=True)
    rising = tuple(zip(sizes_of, sorted(seconds), strict=True))
    times = [cost.at(rising, size) for size in sorted(sizes)]
    assert all(math.isfinite(t) for t in times)
    assert all(a <= b + 1e-9 * abs(b) for a, b in itertools.pairwise(times))


# --- choices ----------------------------------------------------------------------------------------------------------


def choice(plain: float, *others: tuple[str, float]) -> Choice:
    estimates = (Estimate("plain", plain, 100), *(Estimate(name, seconds, 25) for name, seconds in others))
    return Choice("all_reduce", "int8", 1000, 4, LINK, estimates)


def test_the_fastest_is_chosen_where_it_is_clearly_faster_than_plain() -> None:
    assert choice(1.0, ("one_shot", 0.5), ("two_phase", 0.3)).algorithm == "two_phase"
    assert choice(1.0, ("one_shot", 0.2), ("two_phase", 0.3)).algorithm == "one_shot"
    assert choice(1.0, ("two_phase", 0.89)).algorithm == "two_phase"
    assert choice(1.0, ("one_shot", 0.95), ("two_phase", 0.91)).algorithm == "plain", "too little to be sure"
    assert choice(1.0).algorithm == "plain"


def measured(world: int, bytes_per_s: float, codec: str = "int8") -> tuple[Measured, int]:
    """A link of that speed, 0.2 ms a plain call and twice that a compressed one, a codec of 1 ns an element."""
    coder = thinwire.codec(codec)
    sizes = (256, 1 << 22)

    def points(base: float, wire: float, codec_s: float) -> Points:
        return tuple((n, base + n * wire / bytes_per_s + n * codec_s) for n in sizes)

    per_element = coder.wire_bytes(1 << 20) / (1 << 20)
    share = 2 * (world - 1) / world
    curves = {
        "plain": points(2e-4, 4 * share, 0.0),
        "one_shot": points(3e-4, per_element * (world - 1), 1e-9 * world),
        "two_phase": points(4e-4, per_element * share, 2e-9),
    }
    return Measured(LINK, {CurveKey("all_reduce", torch.float32, (coder,)): curves}), world


def recalled(found: tuple[Measured, int], numel: int, codec: str = "int8") -> Choice:
    key = CurveKey("all_reduce", torch.float32, (thinwire.codec(codec),))
    return cost.choice(found[0], key, numel, found[1])


@over("world", [2, 3, 4, 8, 16, 64])
def test_slow_links_compress_and_fast_ones_or_small_messages_do_not(world: int) -> None:
    slow = recalled(measured(world, 1e8), 1 << 22).algorithm
    assert slow != "plain"
    assert slow == "two_phase" or world < 4
    assert recalled(measured(world, 1e13), 1 << 22).algorithm == "plain"
    for bytes_per_s in (1e8, 1e10, 1e12):
        assert recalled(measured(world, bytes_per_s), 10).algorithm == "plain"


def test_two_ranks_send_as_much_either_way_and_save_a_message() -> None:
    assert recalled(measured(2, 1e9), 1 << 20).algorithm == "one_shot"


@over("world", [2, 3, 64])
@over("codec", ["int8", "lloyd1"])
def test_the_bytes_of_an_estimate_are_those_of_the_formula(world: int, codec: str) -> None:
    numel = 1 << 20
    coder = thinwire.codec(codec)
    found = recalled(measured(world, 1e9, codec), numel, codec)
    sent = {estimate.algorithm: estimate.sent for estimate in found.estimates}
    wire = coder.wire_bytes(numel)
    share = (world - 1) / world
    assert sent["plain"] == pytest.approx(2 * share * 4 * numel, abs=2)
    assert sent["two_phase"] == pytest.approx(2 * share * wire, abs=2)
    assert sent["one_shot"] == (world - 1) * wire


def test_before_anything_was_measured_there_is_no_choice() -> None:
    found = recalled((Measured(), 2), 10)
    assert found.algorithm == ""
    assert "not measured yet" in str(found)
    with pytest.raises(thinwire.CodecError, match="int8 takes float32"):
        cost.choice(Measured(), CurveKey("all_reduce", torch.int64, (thinwire.codec("int8"),)), 10, 2)
    assert "thinwire.measure(tensor, group, codec='int8') on all of its ranks" in str(found)


@over("case", [(1, 10, "int8"), (2, 0, "int8"), (2, 10, "none")])
def test_where_there_is_nothing_to_choose_nothing_is_measured(case: tuple[int, int, str]) -> None:
    world, numel, codec = case
    key = CurveKey("all_reduce", torch.float32, (thinwire.codec(codec),))
    found = cost.choice(Measured(), key, numel, world)
    assert found.algorithm == "plain"
    assert "nothing to choose" in str(found)


def test_the_choice_tells_itself() -> None:
    text = str(choice(1e-3, ("one_shot", 5e-4), ("two_phase", 3e-4)))
    assert text.splitlines()[0] == "all_reduce of 1000 elements over 4 ranks, codec int8: two_phase"
    assert "Gbit/s" in text
    assert [line.split()[0] for line in text.splitlines()[2:5]] == ["plain", "one_shot", "two_phase"]
    assert "link: 2.52 Gbit/s per rank, 100 us per message" in text
    assert text.count("<- chosen") == 1
    assert "two_phase        0.300 ms predicted, 25 bytes sent per rank  <- chosen" in text


# --- in a group -------------------------------------------------------------------------------------------------------


@on_ranks(1, 2, rare=[4])
def test_all_ranks_explain_alike(group: Group) -> list[str]:
    numels, world = (1, 1000, 3 << 20), group.size()
    for numel in numels:
        thinwire.measure(torch.ones(numel), codec="int8")
    texts = [str(thinwire.explain(torch.ones(numel), codec="int8")) for numel in numels]
    for numel, text in zip(numels, texts, strict=True):
        assert text.startswith(f"all_reduce of {numel} elements over {world} ranks, codec int8: ")
        assert text.count("<- chosen") == (world > 1)
    return texts


@on_ranks(3, rare=[2])
def test_auto_does_what_explain_says(group: Group) -> None:
    """What explain says is what auto does: as many bytes go through the codec as it said, or none."""
    member = dist.new_group()
    for numel in (10, 5000, 1 << 19):
        x = torch.ones(numel)
        said = thinwire.measure(x, member, codec="lloyd4")
        before = thinwire.collectives.traffic(member).sent
        thinwire.all_reduce(x, group=member, codec="lloyd4", algorithm="auto")
        sent = thinwire.collectives.traffic(member).sent - before
        want = {e.algorithm: e.sent for e in said.estimates}[said.algorithm] if said.algorithm != "plain" else 0
        assert abs(sent - want) <= 0.02 * want + 128 * group.size()


@on_ranks(2)
def test_a_group_is_measured_once_for_all_lengths(group: Group) -> None:
    """A first auto call makes more calls of the group than one of another length later."""
    member = dist.new_group()
    counts = []
    channel = channel_of(member, torch.device("cpu"))
    for numel in (100, 200, 300):
        thinwire.all_reduce(torch.ones(numel), group=member, codec="int8", algorithm="auto")
        counts.append(channel.calls)
    assert [b - a for a, b in itertools.pairwise(counts)] == [1, 1]
