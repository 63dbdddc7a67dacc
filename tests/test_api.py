"""What callers of verbs rely on: counted steps, explanations that communicate nothing, torch's kind of Work."""

import time
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import thinwire
from cases import digest, heard, on_ranks, seeded
from thinwire.collectives.channel import channel_of

Group = dist.ProcessGroup
N = 4096


def similar(rank: int) -> Tensor:
    return torch.randn(N, generator=seeded(3)) + 0.01 * torch.randn(N, generator=seeded(4, rank))


@on_ranks(3, rare=[2])
def test_errors_of_calls_that_name_no_step_average_out(group: Group) -> str:
    """Rotations are independent, so the error of a mean of 16 falls by about 4; a fixed one repeats its error."""
    exact = torch.stack([similar(rank) for rank in range(group.size())]).double().mean(0)
    errors, given = [], []
    for step in (0, None):
        results = []
        for _ in range(16):
            x = similar(group.rank())
            thinwire.all_reduce(x, dist.ReduceOp.AVG, group, codec="lloyd2", algorithm="two_phase", step=step)
            results.append(x)
        mean = torch.stack(results).double().mean(0)
        errors.append(float((mean - exact).norm() / exact.norm()))
        given += results
    assert errors[1] < 0.5 * errors[0]
    return digest(*given)


@on_ranks(2)
def test_measuring_does_not_change_what_later_calls_give(group: Group) -> None:
    """What two fresh groups give for calls without a step, of which one has measured before."""
    found = []
    for measures in (False, True):
        fresh = dist.new_group()
        if measures:
            thinwire.measure(torch.zeros(N), fresh, codec="lloyd2")
        x = similar(group.rank())
        thinwire.all_reduce(x, group=fresh, codec="lloyd2", algorithm="one_shot")
        found.append(digest(x))
    assert found[0] == found[1]


@on_ranks(2)
def test_one_rank_may_ask_for_an_explanation_alone(group: Group) -> None:
    fresh, began = dist.new_group(), time.monotonic()
    if group.rank() == 0:
        told = str(thinwire.explain(torch.zeros(1000), fresh, codec="int4"))
        assert "not measured yet" in told
        assert "thinwire.measure(" in told
    assert time.monotonic() - began < 60  # the group's timeout is half an hour
    dist.barrier(group)


@pytest.mark.parametrize("numel", [1, 300, 20_000])
@on_ranks(2)
def test_measuring_goes_up_to_the_size_asked_for_and_says_so_once(group: Group, numel: int) -> str:
    fresh = dist.new_group()
    with heard() as lines:
        measured = thinwire.measure(torch.zeros(numel), fresh, codec="int8")
    curves = channel_of(fresh, torch.device("cpu")).measured.curves.values()
    assert max(size for curve in curves for points in curve.values() for size, _ in points) <= max(numel, 256)
    told = thinwire.explain(torch.zeros(numel), fresh, codec="int8")
    assert str(told) == str(measured)
    assert told.algorithm in ("plain", "one_shot", "two_phase")
    assert "Gbit/s per rank" in str(told)
    assert len(lines) == (group.rank() == 0)
    assert all("measuring the link of this group" in line for line in lines)
    return str(told)


@on_ranks(2)
def test_a_larger_message_is_measured_when_it_comes(group: Group) -> None:
    fresh = dist.new_group()
    channel = channel_of(fresh, torch.device("cpu"))
    counts = []
    for numel in (300, 400, 300, 9_000):
        thinwire.measure(torch.zeros(numel), fresh)
        (curves,) = channel.measured.curves.values()
        counts.append(len(curves["plain"]))
    once, near, again, larger = counts
    assert once == near == again
    assert larger > once


@pytest.mark.parametrize("algorithm", ["plain", "one_shot", "two_phase"])
@on_ranks(2)
def test_a_work_is_torchs(group: Group, algorithm: Any) -> None:
    how: Any = {"group": group, "async_op": True}
    other: Any = how | {"algorithm": "plain" if algorithm == "plain" else "compressed"}
    x, y, z = (similar(group.rank()) for _ in range(3))
    part = torch.empty(N // group.size())
    works: list[Any] = [thinwire.all_reduce(x, algorithm=algorithm, **how), thinwire.broadcast(y, group_src=0, **other)]
    works.append(thinwire.reduce_scatter_tensor(part, z, **other))
    found = []
    for work, given in zip(works, (x, y, part), strict=True):
        work.synchronize()
        (result,) = work.result()
        facts = isinstance(work, dist.Work), result is given, work.is_completed(), work.is_success()
        found.append((*facts, work.exception() is None, work.get_future().wait()[0] is given))
    assert all(all(facts) for facts in found), found


@on_ranks(2, gives=1)
def test_a_plan_is_kept_for_what_ranks_agree_on(group: Group) -> int:
    """Neither another shape of as many elements nor another spelling of a codec is another call."""
    fresh = dist.new_group()
    codecs = ("int8", "int8:block=128", thinwire.codec("int8"))
    for shape in ((64, 64), (4096,)) if group.rank() else ((4096,), (64, 64)):
        for codec in codecs[:: 1 if group.rank() else -1]:
            thinwire.all_reduce(torch.ones(shape), group=fresh, codec=codec, algorithm="one_shot")
    return len(channel_of(fresh, torch.device("cpu")).plans)


@on_ranks(2)
def test_plans_of_ever_new_sizes_are_forgotten(group: Group) -> None:
    fresh = dist.new_group()
    with patch("thinwire.collectives.channel.MOST_KINDS", 8):
        for numel in range(1, 3 * 8):
            thinwire.all_reduce(torch.ones(numel), group=fresh, algorithm="one_shot")
    assert 0 < len(channel_of(fresh, torch.device("cpu")).plans) <= 8


@on_ranks(2)
def test_ranks_exchange_with_a_codec_that_depends_on_sizes(group: Group) -> None:
    fresh = dist.new_group()
    codec = "bysize(small=bf16; large=int8; min_numel=100)"
    found = []
    for rows in (10, 200 if group.rank() == 0 else 10):
        splits = [rows if rank == group.rank() else 10 for rank in range(group.size())]
        sent = [torch.ones(10) for _ in splits]
        sent[group.rank()] = torch.ones(splits[group.rank()])
        came = [torch.zeros(tensor.numel()) for tensor in sent]
        thinwire.all_to_all(came, sent, fresh, codec=codec, algorithm="compressed")
        found.append(str([float(tensor.mean()) for tensor in came]))
    assert found == ["[1.0, 1.0]"] * 2


@on_ranks(2)
def test_ranks_that_measure_different_things_are_told(group: Group) -> None:
    fresh = dist.new_group()
    with pytest.raises(thinwire.DisagreementError, match=r"measure\(numel=1000.*measure\(numel=2000"):
        thinwire.measure(torch.zeros(1000 * (1 + group.rank())), fresh)
    thinwire.measure(torch.zeros(10), fresh)  # the group stays usable


@on_ranks(2)
def test_a_timeout_of_zero_is_none(group: Group) -> None:
    """As in torch's own code."""
    for algorithm in ("plain", "two_phase"):
        x = torch.ones(100_000)
        work = thinwire.all_reduce(x, group=group, algorithm=algorithm, async_op=True)  # type: ignore[arg-type]
        work.wait(timedelta(0))
        assert (x - group.size()).abs().max() < 0.1


@on_ranks(1)
def test_one_rank_alone_takes_any_dtype(group: Group) -> None:
    for dtype in (torch.int16, torch.float8_e4m3fn):
        x, out = torch.arange(8).to(dtype), torch.zeros(8, dtype=dtype)
        thinwire.all_reduce(x, group=group)
        thinwire.all_gather_into_tensor(out, x, group)
        assert torch.equal(out.float(), torch.arange(8).float())
