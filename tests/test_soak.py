"""The soak finds what it looks for; and, with --thorough, ranks hold no more after many calls, steps and groups."""

import random
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import soak
import thinwire
from ranks import RankPool
from soak import Soak, Told, counted, ddp_model, grown, step

Group = dist.ProcessGroup
Readings = list[dict[str, int]]
READINGS = 40  # of a run
LONG_S = 2400.0


# --- the soak ---------------------------------------------------------------------------------------------------------


def wrong(group: Group) -> list[str]:
    """What is said of results of which every other one has a wrong number."""
    told = Told()
    member = dist.new_group()
    for at, call in enumerate(soak.calls_of(3, group.size())):
        work, outputs = call.start(member)
        work.wait()
        filled = [x for x in outputs if x.numel()]
        if at % 2 and filled:
            filled[-1][0] = 1.0 if filled[-1][0] != 1.0 else 2.0
        before = len(told.wrong)
        soak.check(call, group.rank(), outputs, told)
        assert len(told.wrong) - before == bool(at % 2 and filled), call
    return told.wrong


def test_one_wrong_number_is_found(ranks: RankPool) -> None:
    for found in ranks(2).run(wrong):
        assert len(found) > soak.CALLS // 4
        assert "differ, first [" in found[0]


def test_a_leak_is_what_grows_on(capsys: pytest.CaptureFixture[str]) -> None:
    def readings(kilobytes: Callable[[int], float]) -> Readings:
        return [{"files": 9, "threads": 4, "kB": int(kilobytes(i))} for i in range(READINGS)]

    assert not grown(readings(lambda i: 90_000 + 4 * (i % 3)))
    assert not grown(readings(lambda i: 90_000 + min(i, 8) * 1000))  # caches that fill up
    assert grown(readings(lambda i: 90_000 + 200 * i))[0].startswith("kB: [90000, 90200,")
    files = readings(lambda i: 90_000)
    for row in files[25:]:
        row["files"] += 1
    found = Soak(pool=None, held={(3, 77): files})  # type: ignore[arg-type]
    found.find_leaks()
    assert found.counts[3, "leaks"] == 1
    assert "process 77 holds more files: [9, 9" in capsys.readouterr().out


# --- what ranks hold --------------------------------------------------------------------------------------------------


def calls(group: Group, count: int) -> Readings:
    """Sums of random lengths, sixteen in flight; many are new, so that all kinds are forgotten again and again."""
    rng = random.Random(1)
    found = []
    works = []
    for i in range(count):
        x = torch.ones(int(10 ** rng.uniform(0, 3.5)))
        codec = rng.choice(("int8", "lloyd4"))
        algorithm = "one_shot" if i % 10 else "two_phase"
        works.append(thinwire.all_reduce(x, async_op=True, codec=codec, algorithm=algorithm))
        if len(works) == 16:
            while works:
                works.pop().wait()
        if i % (count // READINGS) == 0:
            found.append(counted())
    while works:
        works.pop().wait()
    return found


def steps(group: Group, count: int) -> Readings:
    """Steps of DDP, with a model and buckets of other sizes every hundred."""
    rng = random.Random(1)
    found = []
    for i in range(count):
        if i % 100 == 0:
            model = ddp_model(group, rng)
        step(model, i + group.rank())
        if i % (count // READINGS) == 0:
            found.append(counted())
    return found


def groups(group: Group, count: int) -> Readings:
    """Groups that are made, used and destroyed."""
    found = []
    for i in range(count):
        member = dist.new_group()
        thinwire.all_reduce(torch.ones(1000 + i), group=member, codec="int8", algorithm="two_phase")
        dist.barrier(member)
        dist.destroy_process_group(member)
        del member
        if i % (count // READINGS) == 0:
            found.append(soak.held())
    return found


@pytest.mark.thorough
@pytest.mark.timeout(LONG_S)
@pytest.mark.parametrize(("run", "count"), [(calls, 100_000), (steps, 10_000), (groups, 200)])
def test_ranks_hold_no_more_after(ranks: RankPool, run: Callable[[Group, int], Readings], count: int) -> None:
    for readings in ranks(2).run(run, count, timeout=LONG_S):
        assert len(readings) >= READINGS
        assert not grown(readings)
