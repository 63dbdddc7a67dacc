"""Ranks that call different things: one error on every rank that names both sides, instead of a hang or garbage."""

import contextlib
import itertools
import math
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import thinwire
from cases import by_turns, in_time, looking_soon
from ranks import RankPool
from thinwire.collectives import channel as channels, transport
from thinwire.collectives.board import Board, Trail
from thinwire.collectives.channel import channel_of
from thinwire.collectives.handshake import Handshake
from thinwire.errors import CollectiveError, DisagreementError, WireError

Group = dist.ProcessGroup
SUM = dist.ReduceOp.SUM


def said(call: Callable[[], Any]) -> str:
    """What a call raises, or nothing."""
    try:
        call()
    except (CollectiveError, WireError) as error:
        return f"{type(error).__mro__[0].__name__}: {error}" if isinstance(error, DisagreementError) else f"?? {error}"
    return ""


# --- first calls ------------------------------------------------------------------------------------------------------

BASE: dict[str, Any] = {"codec": "int8", "algorithm": "two_phase"}


def sides(group: Group, member: Group) -> dict[tuple[str, str], Callable[[], Any]]:
    """The calls that a rank makes, rank 0 others than the rest, by what the error says of both."""
    odd = group.rank() == 0
    world = group.size()
    length = 3 if odd else 5
    x = torch.ones(96)
    lists = [torch.ones(length) for _ in range(world)]
    even = [96 // world] * world
    late = [96 // world - 1, *even[1:-1], 96 // world + 1]
    verb: Any = {"group": member, "codec": "int8", "algorithm": "compressed"}

    def reduce(x: Any, *op: Any, verb: Any = thinwire.all_reduce, **how: Any) -> Any:
        return verb(x, *op, **{"group": member, **BASE, **how})

    def factor() -> Any:
        return dist._make_nccl_premul_sum(2.0 if odd else 3.0)

    return {
        ("codec=int4", "codec=int8"): lambda: reduce(x, codec="int4" if odd else "int8"),
        ("codec=int99", "codec=int8,"): lambda: reduce(x, codec="int99" if odd else "int8"),
        ("int32", "float32"): lambda: reduce(x.int() if odd else x),
        ("numel=90", "numel=96"): lambda: reduce(x[: 90 if odd else 96]),
        ("bfloat16", "float32"): lambda: reduce(x.bfloat16() if odd else x),
        ("op=avg", "op=sum"): lambda: reduce(x, dist.ReduceOp.AVG if odd else dist.ReduceOp.SUM),
        ("premul_sum*2.0", "premul_sum*3.0"): lambda: reduce(x, factor()),
        ("one_shot", "two_phase"): lambda: reduce(x, algorithm="one_shot" if odd else "two_phase"),
        ("plain", "two_phase"): lambda: reduce(x, algorithm="plain" if odd else "two_phase"),
        ("broadcast(", "all_reduce("): lambda: thinwire.broadcast(x, 0, **verb) if odd else reduce(x),
        ("from rank 0", "from rank 1"): lambda: thinwire.broadcast(x, group_src=0 if odd else 1, **verb),
        ("numel=40+56", "numel=50+46"): lambda: reduce(
            x.split([40, 56] if odd else [50, 46]), verb=thinwire.all_reduce_coalesced
        ),
        ("lengths=[3, 3", "lengths=[5, 5"): lambda: thinwire.all_gather(lists, x[:length], **verb),
        ("sends", "expects"): lambda: thinwire.all_to_all_single(x, x + 1, even, late if odd else even, **verb),
    }


def disagree(group: Group) -> dict[tuple[str, str], tuple[str, float, str]]:
    """What was said, seconds until then, and what the same call of all ranks said afterwards."""
    found = {}
    for both in sides(group, group):
        member = dist.new_group()
        dist.barrier(member)
        start = time.monotonic()
        text = said(sides(group, member)[both])
        seconds = time.monotonic() - start
        x = torch.ones(96)
        again = said(lambda x=x, member=member: thinwire.all_reduce(x, group=member, **BASE))
        found[both] = text, seconds, again or ("" if bool((x > 1).all()) else "no sum")
    return found


@pytest.mark.parametrize("world", [2, 3])
@in_time
def test_every_rank_is_told_both_sides_and_the_group_stays_usable(ranks: RankPool, world: int) -> None:
    answers = ranks(world).run(disagree)
    for both in answers[0]:
        for text, seconds, again in (answer[both] for answer in answers):
            assert text.startswith("DisagreementError: the ranks disagree about operation 1 of this group"), text
            assert all(side in text for side in both), text
            assert seconds < 60, both  # the groups' timeout is half an hour
            assert again == "", both
        assert len({answer[both][0] for answer in answers}) == 1, both


def which_ranks(group: Group) -> str:
    return said(lambda: thinwire.all_reduce(torch.ones(70 + (group.rank() == 1)), **BASE))


def test_the_error_says_which_ranks_called_what(ranks: RankPool) -> None:
    for text in ranks(4).run(which_ranks):
        assert "ranks 0, 2, 3 called all_reduce(numel=70" in text
        assert "rank 1 called all_reduce(numel=71" in text


def on_a_mesh(group: Group) -> list[str]:
    """All ranks of one node differ from the other's, then one rank from all."""
    mesh = init_device_mesh("cpu", (2, 2))
    found = []
    for odd in (group.rank() < 2, group.rank() == 3):
        x = torch.ones(64 if odd else 65)
        found.append(said(lambda x=x: thinwire.all_reduce(x, group=mesh, codec="int8", algorithm="hierarchical")))
    return found


def test_ranks_of_a_mesh_are_told_where_their_own_groups_disagree(ranks: RankPool) -> None:
    """A rank compares with those in its row and its column; rank 0 shares neither with rank 3."""
    answers = ranks(4).run(on_a_mesh)
    assert all(first.startswith("DisagreementError") for first, _ in answers)
    assert all(second.startswith("DisagreementError") for _, second in answers[1:])


# --- later calls ------------------------------------------------------------------------------------------------------


def after(group: Group, prepare: str, calls: tuple[dict[str, Any], dict[str, Any]], async_op: bool = False) -> Any:
    """Rank 0 makes the first of two calls, the others the second, when all have made those that `prepare` names."""
    member: Any = init_device_mesh("cpu", (2, 2)) if group.size() == 4 else dist.new_group()
    made = {"none": (), "first": calls[:1], "both": calls}[prepare]
    for call in (*made, *made):
        call_as(call, member, False)
    dist.barrier()
    start = time.monotonic()
    with looking_soon():
        text = said(lambda: call_as(calls[group.rank() > 0], member, async_op))
    seconds = time.monotonic() - start
    return text, seconds, said(lambda: thinwire.all_reduce(torch.ones(200), group=member, **BASE))


def call_as(call: dict[str, Any], member: Any, async_op: bool) -> None:
    how = {"group": member, "codec": "int8", "numel": 240, "dtype": None, "verb": "all_reduce", "step": 3, **call}
    x = torch.ones(how.pop("numel"), dtype=how.pop("dtype"))
    verb = how.pop("verb")
    outputs = {"all_to_all_single": [x + 1], "reduce_scatter_tensor": [x[: x.numel() // member.size()] + 1]}
    if "factor" in how:
        how["op"] = dist._make_nccl_premul_sum(how.pop("factor"))
    work = getattr(thinwire, verb)(*outputs.get(verb, []), x, async_op=async_op, **how)
    if work is not None:
        work.wait()


TWO: dict[str, Any] = {"algorithm": "two_phase"}
PLAIN: dict[str, Any] = {"algorithm": "plain"}
SHORT: dict[str, Any] = {"codec": "lloyd4", "algorithm": "one_shot"}
BROADCAST: dict[str, Any] = {"verb": "broadcast", "algorithm": "compressed", "group_src": 0}
MIXED_UP: dict[str, Any] = {  # what all have made before, the two calls, what the error says of both
    "known-new": ("first", TWO, {**TWO, "numel": 300}, "numel=240", "numel=300"),
    "plain-new": ("first", PLAIN, {**PLAIN, "numel": 300}, "numel=240", "numel=300"),
    "sizes": ("both", TWO, {**TWO, "numel": 300}, "numel=240", "numel=300"),
    "op": ("both", TWO, {**TWO, "op": dist.ReduceOp.AVG}, "op=sum", "op=avg"),
    "codec": ("both", TWO, {**TWO, "codec": "int8:seed=1"}, "codec=int8,", "codec=int8:seed=1"),
    "plain op": ("both", PLAIN, {**PLAIN, "op": dist.ReduceOp.AVG}, "op=sum", "op=avg"),
    "plain dtype": ("both", PLAIN, {**PLAIN, "numel": 120, "dtype": torch.int64}, "float32", "int64"),
    "plain factor": ("both", {**PLAIN, "factor": 2.0}, {**PLAIN, "factor": 3.0}, "premul_sum*2.0", "premul_sum*3.0"),
    "plain sizes": ("both", PLAIN, {**PLAIN, "numel": 300}, "numel=240", "numel=300"),
    "plain scatter": ("both", PLAIN, {**PLAIN, "verb": "reduce_scatter_tensor"}, "all_reduce(", "reduce_scatter"),
    "plain exchange": (
        *("both", {**PLAIN, "verb": "all_to_all_single"}),
        *({**PLAIN, "verb": "all_to_all_single", "dtype": torch.int32}, "float32", "int32"),
    ),
    "plain broadcast": (
        *("both", {**PLAIN, "verb": "broadcast", "src": 0}),
        *({**PLAIN, "verb": "broadcast", "src": 0, "dtype": torch.int32}, "float32", "int32"),
    ),
    "plain-coded": ("both", PLAIN, TWO, "algorithm=plain", "algorithm=two_phase"),
    "verb": ("both", BROADCAST, TWO, "broadcast(", "all_reduce("),
    "source": ("both", BROADCAST, {**BROADCAST, "group_src": 1}, "from rank 0", "from rank 1"),
    "step": ("both", SHORT, {**SHORT, "step": 4}, "at step 3", "at step 4"),
    "first step": ("none", SHORT, {**SHORT, "step": 4}, "at step 3", "at step 4"),
}


@by_turns("name, world, async_op", list(MIXED_UP), [2, 3], [False, False, True, True])
@in_time
def test_later_calls_that_differ_raise_one_sentence_on_all_ranks(
    ranks: RankPool, name: str, world: int, async_op: bool
) -> None:
    check_mixed_up(ranks, world, MIXED_UP[name], async_op)


def check_mixed_up(ranks: RankPool, world: int, row: Any, async_op: bool = False) -> None:
    prepare, one, other, *both = row
    answers = ranks(world).run(after, prepare, (one, other), async_op)
    assert len({text for text, _, _ in answers}) == 1, answers
    for text, seconds, again in answers:
        assert text.startswith("DisagreementError: the ranks disagree about operation "), text
        assert all(side in text for side in both), text
        assert seconds < 60
        assert "make a new group" in again


MISFITS = {  # the codec, what rank 0 sends to rank 1, which expects the other
    "more": ("int8", 5, 4),
    "fewer": ("int8", 3, 4),
    "as many bytes": ("int4", 3, 4),
    "chunks": ("int8", 3_000_000, 4),
    "nothing sent": ("int8", 0, 4),
    "nothing expected": ("int8", 4, 0),
}


def misfit(group: Group, codec: str, sent: int, expected: int, async_op: bool) -> tuple[str, str]:
    """What is said of an exchange whose like was made before, and in the next call."""
    member = dist.new_group()
    how: Any = {"group": member, "codec": codec, "algorithm": "compressed"}

    def exchange(lengths: tuple[list[int], list[int]], async_op: bool) -> None:
        out, given = (torch.ones(sum(own), 1) for own in lengths)
        work = thinwire.all_to_all_single(out, given, *lengths, async_op=async_op, **how)
        if work is not None:
            work.wait()

    even = [4] * group.size()
    for _ in range(2):
        exchange((even, even), False)
    dist.barrier()
    lengths = {0: (even, [4, sent, *even[2:]]), 1: ([expected, *even[1:]], even)}.get(group.rank(), (even, even))
    with looking_soon():
        return said(lambda: exchange(lengths, async_op)), said(lambda: exchange((even, even), False))


@by_turns("name, world, async_op", list(MISFITS), [2, 3], [False, True, True, False])
@in_time
def test_lengths_of_a_known_exchange_that_do_not_fit_are_told(
    ranks: RankPool, name: str, world: int, async_op: bool
) -> None:
    codec, sent, expected = MISFITS[name]
    both = f"rank 0 sends {sent} elements to rank 1, which expects {expected}"
    for rank, (text, again) in enumerate(ranks(world).run(misfit, codec, sent, expected, async_op)):
        assert both in (text if rank < 2 else text + again), (text, again)  # a third rank may have got all it waits for
        assert text.startswith("DisagreementError: the ranks disagree about operation 3 ") or rank > 1, text
        assert "make a new group" in again, again


def send_itself(group: Group) -> str:
    member = dist.new_group()
    how: Any = {"group": member, "codec": "int8", "algorithm": "compressed"}
    x = torch.ones(8)
    thinwire.all_to_all_single(x, x.clone(), **how)
    with looking_soon():
        return said(
            lambda: thinwire.all_to_all_single(x, x.clone(), None, [3, 5] if group.rank() == 0 else None, **how)
        )


@in_time
def test_a_rank_that_would_send_itself_what_it_does_not_expect_tells_the_others(ranks: RankPool) -> None:
    for text in ranks(2).run(send_itself):
        assert "rank 0 would send itself 3 elements and expects 4" in text, text


HIERARCHY: dict[str, Any] = {"algorithm": "hierarchical"}
MIXED_UP_ON_A_MESH: dict[str, Any] = {
    "op": ("both", HIERARCHY, {**HIERARCHY, "op": dist.ReduceOp.AVG}, "op=sum", "op=avg"),
    "plain op": ("both", PLAIN, {**PLAIN, "op": dist.ReduceOp.AVG}, "op=sum", "op=avg"),
    "plain sizes": ("both", PLAIN, {**PLAIN, "numel": 300}, "numel=240", "numel=300"),
}


@pytest.mark.parametrize("name", MIXED_UP_ON_A_MESH)
@in_time
def test_later_calls_on_a_mesh_that_differ_raise_one_sentence_on_all_ranks(ranks: RankPool, name: str) -> None:
    check_mixed_up(ranks, 4, MIXED_UP_ON_A_MESH[name])


def test_calls_in_turn_skip_no_number() -> None:
    tags = transport.Tags()
    found = [tags.to_skip(text, ("sum", 8 if text == "c" else 4)) for text in "abcabcabcacabc"]
    assert found == [1, 2, 1, *(1, 0, 0), *(0, 0, 0), *(0, 1), *(0, 2, 0)]
    disorderly = [tags.to_skip(text, ("sum", 4)) for text in "aabb" * 4]
    assert disorderly[8:] == [0, 0, 1, 1] * 2


def of_as_many_bytes(group: Group) -> list[float]:
    """Sums, averages and gathers of torch's own, by turns and in flight, while kinds are forgotten now and then."""
    member = dist.new_group()
    how: Any = {"group": member, "algorithm": "plain", "async_op": True}
    found = []
    with patch.object(channels, "MOST_KINDS", 4), patch.object(transport, "_MOST_AFTER", 3):
        for dtype, op in 3 * list(itertools.product((torch.float32, torch.int32), (SUM, dist.ReduceOp.AVG))):
            x = torch.full((6,), 1 + 2.0 * group.rank(), dtype=dtype)
            whole = x.new_empty(6, group.size())
            parts = list(whole.T if group.rank() else x.new_empty(group.size(), 6))  # one rank's are not contiguous
            works = [thinwire.all_reduce(x, op, **how), thinwire.all_gather(parts, torch.ones_like(x), **how)]
            for work in works:
                assert work is not None
                work.wait()
            found += [float(x.sum()), float(sum(part.sum() for part in parts))]
    return found


def test_calls_of_as_many_bytes_do_not_wait_for_each_other(ranks: RankPool) -> None:
    assert ranks(2).run(of_as_many_bytes) == [[24.0, 12.0, 12.0, 12.0] * 6] * 2


def same_text_other_spelling(group: Group) -> bool:
    """One rank names the codec, the other makes it; one has a row, the other a matrix."""
    member = dist.new_group()
    for turn in range(3):
        odd = (group.rank() + turn) % 2
        x = torch.ones(60) if odd else torch.ones(6, 10)
        codec = "int8" if odd else thinwire.codec("int8")
        work = thinwire.all_reduce(x, group=member, async_op=True, codec=codec, algorithm="two_phase")
        assert work is not None
        work.wait()
    return True


def test_ranks_may_spell_one_call_differently(ranks: RankPool) -> None:
    assert all(ranks(2).run(same_text_other_spelling))


# --- the debug mode ---------------------------------------------------------------------------------------------------


def debugged(group: Group) -> list[str]:
    """Both calls are known by the time they are mixed up."""
    os.environ["THINWIRE_DEBUG"] = "1"
    try:
        member = dist.new_group()
        how: Any = {"group": member, "codec": "int8", "algorithm": "two_phase"}
        verb: Any = how | {"algorithm": "compressed"}
        sizes = (100, 200)
        for numel in sizes:
            thinwire.all_reduce(torch.ones(numel), **how)
            thinwire.all_reduce(torch.ones(numel), **how | {"algorithm": "plain"})
        thinwire.all_to_all_single(torch.ones(8), torch.ones(8), **verb)
        found = [said(lambda: thinwire.all_reduce(torch.ones(sizes[group.rank()]), **how))]
        rows = 4 + group.rank()
        found.append(
            said(lambda: thinwire.all_to_all_single(torch.ones(8), torch.ones(8), None, [rows, 8 - rows], **verb))
        )
        found.append(said(lambda: thinwire.all_reduce(torch.ones(sizes[group.rank()]), **how | {"algorithm": "plain"})))
        thinwire.all_reduce(torch.ones(100), **how)
    finally:
        del os.environ["THINWIRE_DEBUG"]
    return found


def test_the_debug_mode_compares_every_call(ranks: RankPool) -> None:
    for lengths, splits, plain in ranks(2).run(debugged):
        for text in (lengths, plain):
            assert "rank 0 called all_reduce(numel=100" in text
            assert "rank 1 called all_reduce(numel=200" in text
        assert "sends" in splits
        assert "expects" in splits


def half_debugged(group: Group) -> str:
    member = dist.new_group()
    with patch.dict(os.environ, {"THINWIRE_DEBUG": str(group.rank())}):
        return said(lambda: thinwire.all_reduce(torch.ones(10), group=member, **BASE))


def other_versions(group: Group) -> str:
    with patch.object(thinwire, "__version__", f"0.{group.rank()}"):
        return said(lambda: thinwire.all_reduce(torch.ones(10), group=dist.new_group(), **BASE))


def test_ranks_of_different_settings_or_versions_are_told_so(ranks: RankPool) -> None:
    for text in ranks(2).run(half_debugged):
        assert "rank 0 runs thinwire" in text
        assert "wire format 1, THINWIRE_DEBUG=0, checksums=0; rank 1 runs" in text
    for text in ranks(2).run(other_versions):
        assert "rank 0 runs thinwire 0.0, wire format 1" in text
        assert "rank 1 runs thinwire 0.1, wire format 1" in text


def other_options(group: Group, step: int, options: dict[str, Any]) -> str:
    """What the first backward pass says: rank 1 has these options besides, or is at another step."""
    model = DistributedDataParallel(torch.nn.Linear(30, 30), process_group=dist.new_group())
    handle = thinwire.compress_ddp(model, "int8", **options if group.rank() else {})
    handle.step = step * group.rank()
    try:
        model(torch.ones(2, 30)).sum().backward()
    except Exception as error:
        return str(error)
    return ""


def test_ranks_that_compress_gradients_in_different_ways_are_told_so(ranks: RankPool) -> None:
    cases = (
        (0, {"warmup_steps": 5}, "codec=int8)", "codec={0: none, 5: int8}"),
        (0, {"exempt": ["bias"]}, "codec=int8)", "codec=int8, exempt=['bias']"),
        (7, {}, "from step 0", "from step 7"),
    )
    for step, options, *both in cases:
        answers = ranks(2).run(other_options, step, options)
        assert len(set(answers)) == 1
        assert all(side in answers[0] for side in both), answers


# --- what it takes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3, 4, 7, 1024])
def test_all_ranks_hear_of_all_in_few_rounds(world: int) -> None:
    """What PairTransport.agree sends, between as many ranks: one message per rank and round."""
    heard = [{rank} for rank in range(world)]
    rounds = transport.hops(world)
    for hop in rounds:
        heard = [heard[rank] | heard[(rank - hop) % world] for rank in range(world)]
    assert all(len(known) == world for known in heard)
    assert len(rounds) == math.ceil(math.log2(world))


def keys(group: Group, mode: str) -> tuple[int, int]:
    """Keys of the store before and after many handshakes, some of which fail."""
    os.environ["THINWIRE_DEBUG"] = mode
    try:
        member = dist.new_group()
        store = member.get_group_store()
        dist.barrier(member)
        before = int(store.num_keys())
        for numel in (5, 6, 7, 5, 6, 7):
            thinwire.all_reduce(torch.ones(numel), group=member, codec="int8", algorithm="two_phase")
        said(lambda: thinwire.all_reduce(torch.ones(8 + group.rank()), group=member, **BASE))
        return before, int(store.num_keys())
    finally:
        del os.environ["THINWIRE_DEBUG"]


@pytest.mark.parametrize("mode", ["0", "1"])
def test_handshakes_leave_nothing_in_the_store(ranks: RankPool, mode: str) -> None:
    for before, after in ranks(2).run(keys, mode):
        assert after == before


def shakes(group: Group) -> tuple[int, int, int]:
    """How often the ranks compared: in four calls of one kind, then in one of another, then in its repetition."""
    member = dist.new_group()
    counts = [0]
    check = Handshake.check

    def counting(self: Handshake, *args: Any, **kwargs: Any) -> int:
        counts[0] += 1
        return check(self, *args, **kwargs)

    def after(numel: int, times: int) -> int:
        for _ in range(times):
            thinwire.all_reduce(torch.ones(numel), group=member, **BASE)
        return counts[0]

    with patch.object(Handshake, "check", counting):
        return after(50, 4), after(60, 1), after(60, 3)


def test_only_the_first_call_of_a_kind_shakes_hands(ranks: RankPool) -> None:
    assert ranks(2).run(shakes) == [(1, 2, 2)] * 2


class Link:
    """A rank's end of a group that has a store, and nothing else."""

    def __init__(self, rank: int, world: int, store: dist.Store) -> None:
        self.rank = rank
        self.world = world
        self.closed = False
        options = SimpleNamespace(_timeout=timedelta(seconds=5))
        backend = SimpleNamespace(options=options)
        self.group = SimpleNamespace(
            group_name="dp", get_group_store=lambda: store, _device_types=["cuda"], _get_backend=lambda device: backend
        )

    def close(self) -> None:
        self.closed = True


def followed(calls: Sequence[Sequence[str]]) -> tuple[list[Board], list[Link]]:
    """Boards after ranks, which wait for nothing, made these calls and looked at each other's three times."""
    store = dist.HashStore()
    links = [Link(rank, len(calls), store) for rank in range(len(calls))]
    made = [Board([cast(Any, link)]) for link in links]
    trails = [Trail() for _ in calls]
    for board, trail, own in zip(made, trails, calls, strict=True):
        board.open(12345)
        for number, text in enumerate(own):
            trail.add(number, text)
    for now in (100.0, 101.0, 200.0, 300.0):
        for board, trail, own in zip(made, trails, calls, strict=True):
            board.follow(trail, len(own) - 1, now)
    return made, links


def test_calls_that_nobody_waits_for_are_compared_by_their_trails() -> None:
    """As on NCCL: ranks that are ahead of others are fine, one that makes another call is told to all."""
    usual = [f"all_reduce({n % 7})" for n in range(9000)]
    found, links = followed([usual, usual[:-5000], usual[:-3], usual[:20]])
    assert [board.over for board in found] == [None] * 4
    assert not any(link.closed for link in links)
    found, links = followed([usual[:50], usual[:50], [*usual[:48], "broadcast(3)", usual[49]], usual[:48]])
    told = found[0].over
    assert told is not None
    assert [board.over for board in found] == [told] * 4
    assert all(link.closed for link in links)
    assert "operation 48 of this group: rank 1 called all_reduce(6); rank 2 called broadcast(3)" in told
    assert isinstance(found[3].raised(), DisagreementError)
    new = [*usual[:48], "broadcast(4) for the first time"]  # in which a rank waits for the others
    found, _ = followed([usual[:50], new])
    assert "rank 0 called all_reduce(6); rank 1 called broadcast(4) for the first time" in str(found[1].over)
    found, _ = followed([new, [*new[:-1], "broadcast(5) for the first time"], [*new, usual[49]]])
    assert [board.over for board in found] == [None] * 3  # ranks compare these before they make them


def trailed(group: Group) -> list[str | None]:
    """What a channel notes of calls: first ones, known ones by both ways, and one that ranks disagreed about."""
    channel = channel_of(group, torch.device("cpu"))
    channel.trail = Trail()
    first = channel.calls + 1
    how: Any = {"group": group, "codec": "int8", "algorithm": "plain"}
    for numel in (31, 32, 31, 31):
        thinwire.all_reduce(torch.ones(numel), **how)
    with contextlib.suppress(DisagreementError):
        thinwire.all_reduce(torch.ones(41 + group.rank()), **how)
    thinwire.all_reduce(torch.ones(31), **how)
    found = [channel.trail.at(number) for number in range(first, channel.calls + 1)]
    channel.trail = None
    return found


def test_a_trail_has_every_call_that_ranks_agreed_on(ranks: RankPool) -> None:
    for found in ranks(2).run(trailed):
        a, b, *known, odd, last = found
        assert "numel=31" in str(a)
        assert "numel=32" in str(b)
        assert "numel=4" in str(odd)
        assert all(str(new).endswith(" for the first time") for new in (a, b, odd))
        assert [f"{text} for the first time" for text in (*known, last)] == [a, a, a]
