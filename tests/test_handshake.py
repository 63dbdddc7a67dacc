"""Ranks that call different things: one error on every rank that names both sides, instead of a hang or garbage."""

import math
import os
import re
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import thinwire
from cases import in_time, on_ranks
from thinwire.collectives import peers, transport
from thinwire.collectives.channel import channel_of
from thinwire.collectives.peers import Handshake
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


BASE: dict[str, Any] = {"codec": "int8", "algorithm": "two_phase"}


def sides(group: Group, member: Group) -> dict[tuple[str, str], Callable[[], Any]]:
    """The calls that a rank makes, rank 0 others than the rest, by what the error says of both."""
    odd, world = group.rank() == 0, group.size()
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
        ("scatter(", "reduce_scatter_tensor("): lambda: thinwire.reduce_scatter_tensor(
            torch.empty(96 // world), x, **verb, feedback=thinwire.RowFeedback() if odd else None
        ),
        ("sends", "expects"): lambda: thinwire.all_to_all_single(x, x + 1, even, late if odd else even, **verb),
    }


@pytest.mark.parametrize("world", [2, 3])
@in_time
@on_ranks()
def test_every_rank_is_told_both_sides_and_the_group_stays_usable(group: Group) -> list[str]:
    found = []
    for both in sides(group, group):
        member = dist.new_group()
        dist.barrier(member)
        start = time.monotonic()
        text = said(sides(group, member)[both])
        assert time.monotonic() - start < 60, both  # the groups' timeout is half an hour
        assert text.startswith("DisagreementError: the ranks disagree about operation 1 of this group"), text
        assert all(side in text for side in both), text
        thinwire.all_reduce(x := torch.ones(96), group=member, **BASE)
        assert (x > 1).all(), both
        found.append(text)
    return found


@on_ranks(4)
def test_the_error_says_which_ranks_called_what(group: Group) -> None:
    text = said(lambda: thinwire.all_reduce(torch.ones(70 + (group.rank() == 1)), **BASE))
    assert "ranks 0, 2, 3 called all_reduce(numel=70" in text
    assert "rank 1 called all_reduce(numel=71" in text


@on_ranks(3)
def test_errors_name_ranks_of_a_part_by_both_numbers(group: Group) -> None:
    """Of calls of different lengths, and of connections that the last rank closes."""
    own, other = "rank 0 of the group (global rank 1)", "rank 1 of the group (global rank 2)"
    member: Any = dist.new_group([1, 2])
    if group.rank() == 0:
        return
    first = said(lambda: thinwire.all_reduce(torch.ones(70 + group.rank()), group=member, **BASE))
    assert f"{own} called all_reduce(numel=71" in first
    assert f"{other} called all_reduce(numel=72" in first
    if group.rank() == 2:
        channel_of(member, torch.device("cpu")).transport.close()
    then = said(lambda: thinwire.all_reduce(torch.ones(70), group=member, **BASE))
    assert f"{own} lost {other} in all_reduce" in then or f"{other} lost {own} in all_reduce" in then, then


@on_ranks(2)
def test_a_rank_that_waits_for_long_in_a_first_call_says_so(group: Group) -> None:
    """Rank 1 comes late where ranks gather a state."""
    model = DistributedDataParallel(torch.nn.Linear(30, 30), process_group=dist.new_group())
    handle = thinwire.compress_ddp(model, "int8")
    logged: list[str] = []
    with patch.object(peers, "QUIET_S", 0.2), patch.object(peers, "announce", logged.append):
        time.sleep(group.rank())
        handle.state_dict(gather=True)
    waited = r"rank 0 has waited 0.2 s for the others in state_dict\(max, .*: all ranks have to call"
    assert group.rank() or re.match(waited, logged[0])


@on_ranks(4)
def test_ranks_of_a_mesh_are_told_where_their_own_groups_disagree(group: Group) -> None:
    """All ranks of one node differ from the other's, then one rank from all.

    A rank compares with those in its row and its column; rank 0 shares neither with rank 3.
    """
    mesh = init_device_mesh("cpu", (2, 2))
    for odd, told in ((group.rank() < 2, True), (group.rank() == 3, group.rank() > 0)):
        x = torch.ones(64 if odd else 65)
        text = said(lambda x=x: thinwire.all_reduce(x, group=mesh, codec="int8", algorithm="hierarchical"))
        assert text.startswith("DisagreementError") or not told


@on_ranks(2)
def test_ranks_may_spell_one_call_differently(group: Group) -> None:
    """One rank names the codec, the other makes it; one has a row, the other a matrix."""
    member = dist.new_group()
    for turn in range(3):
        odd = (group.rank() + turn) % 2
        x = torch.ones(60) if odd else torch.ones(6, 10)
        codec = "int8" if odd else thinwire.codec("int8")
        work = thinwire.all_reduce(x, group=member, async_op=True, codec=codec, algorithm="two_phase")
        work.wait()


@on_ranks(2)
def test_the_debug_mode_compares_every_call(group: Group) -> None:
    """Both calls are known by the time they are mixed up."""
    with patch.dict(os.environ, {"THINWIRE_DEBUG": "1"}):
        how: Any = {"group": dist.new_group(), "codec": "int8", "algorithm": "two_phase"}
        plain, verb = (how | {"algorithm": algorithm} for algorithm in ("plain", "compressed"))
        sizes, rows = (100, 200), 4 + group.rank()
        for numel in sizes:
            thinwire.all_reduce(torch.ones(numel), **how)
            thinwire.all_reduce(torch.ones(numel), **plain)
        thinwire.all_to_all_single(torch.ones(8), torch.ones(8), **verb)
        x, y = torch.ones(8), torch.ones(8)
        lengths = said(lambda: thinwire.all_reduce(torch.ones(sizes[group.rank()]), **how))
        splits = said(lambda: thinwire.all_to_all_single(x, y, None, [rows, 8 - rows], **verb))
        exact = said(lambda: thinwire.all_reduce(torch.ones(sizes[group.rank()]), **plain))
        thinwire.all_reduce(torch.ones(100), **how)
    for text in (lengths, exact):
        assert "rank 0 called all_reduce(numel=100" in text
        assert "rank 1 called all_reduce(numel=200" in text
    assert "sends" in splits
    assert "expects" in splits


@on_ranks(2)
def test_ranks_of_different_settings_or_versions_are_told_so(group: Group) -> None:
    with patch.dict(os.environ, {"THINWIRE_DEBUG": str(group.rank())}):
        text = said(lambda: thinwire.all_reduce(torch.ones(10), group=dist.new_group(), **BASE))
    assert "rank 0 runs thinwire" in text
    assert "wire format 1, THINWIRE_DEBUG=0, checksums=0; rank 1 runs" in text
    with patch.object(peers, "__version__", f"0.{group.rank()}"):
        text = said(lambda: thinwire.all_reduce(torch.ones(10), group=dist.new_group(), **BASE))
    assert "rank 0 runs thinwire 0.0, wire format 1" in text
    assert "rank 1 runs thinwire 0.1, wire format 1" in text


@pytest.mark.parametrize(
    ("step", "options", "both"),
    [
        (0, {"warmup_steps": 5}, ("codec=int8)", "codec={0: none, 5: int8}")),
        (0, {"exempt": ["bias"]}, ("codec=int8)", "codec=int8, exempt=['bias']")),
        (7, {}, ("from step 0", "from step 7")),
    ],
)
@on_ranks(2)
def test_ranks_that_compress_gradients_in_different_ways_are_told_so(
    group: Group, step: int, options: dict[str, Any], both: tuple[str, str]
) -> str:
    """Rank 1 has these options besides, or is at another step."""
    model = DistributedDataParallel(torch.nn.Linear(30, 30), process_group=dist.new_group())
    handle = thinwire.compress_ddp(model, "int8", **options if group.rank() else {})
    handle.step = step * group.rank()
    with pytest.raises(Exception, match="disagree") as raised:
        model(torch.ones(2, 30)).sum().backward()
    assert all(side in str(raised.value) for side in both)
    return str(raised.value)


@pytest.mark.parametrize("world", [2, 3, 4, 7, 1024])
def test_all_ranks_hear_of_all_in_few_rounds(world: int) -> None:
    """What PairTransport.agree sends, between as many ranks: one message per rank and round."""
    heard = [{rank} for rank in range(world)]
    rounds = transport.hops(world)
    for hop in rounds:
        heard = [heard[rank] | heard[(rank - hop) % world] for rank in range(world)]
    assert all(len(known) == world for known in heard)
    assert len(rounds) == math.ceil(math.log2(world))


@pytest.mark.parametrize("mode", ["0", "1"])
@on_ranks(2)
def test_handshakes_leave_nothing_in_the_store(group: Group, mode: str) -> None:
    """Not even those that fail."""
    with patch.dict(os.environ, {"THINWIRE_DEBUG": mode}):
        member = dist.new_group()
        store = member.get_group_store()
        dist.barrier(member)
        before = int(store.num_keys())
        for numel in (5, 6, 7, 5, 6, 7):
            thinwire.all_reduce(torch.ones(numel), group=member, codec="int8", algorithm="two_phase")
        said(lambda: thinwire.all_reduce(torch.ones(8 + group.rank()), group=member, **BASE))
        assert int(store.num_keys()) == before


@on_ranks(2, gives=(1, 2, 2))
def test_only_the_first_call_of_a_kind_shakes_hands(group: Group) -> tuple[int, int, int]:
    """How often the ranks compared: in four calls of one kind, then in one of another, then in its repetition."""
    member = dist.new_group()

    def after(numel: int, times: int) -> int:
        for _ in range(times):
            thinwire.all_reduce(torch.ones(numel), group=member, **BASE)
        return spy.call_count

    with patch.object(Handshake, "check", autospec=True, side_effect=Handshake.check) as spy:
        return after(50, 4), after(60, 1), after(60, 3)
