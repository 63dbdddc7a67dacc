"""The soak finds what it looks for; and, with --thorough, ranks hold no more after many calls, steps and groups."""

from collections.abc import Callable

import pytest
import torch.distributed as dist

import soak
from ranks import RankPool
from soak import Soak, Told, grown

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
