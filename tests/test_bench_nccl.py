"""The collectives benchmark on NCCL, as far as a machine without a GPU shows it: plans, counts, rows, refusals.

The ranks' side runs on gloo here, with a card that is the CPU; what only a GPU has is what synchronising does.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from typer.testing import CliRunner

from ranks import RankPool
from test_bench_train import Pooled
from thinwire.tools.bench import collectives as bench, ddp_steps, launch, record, tasks, turns
from thinwire.tools.bench.collectives import CallSample, CollectiveCase
from thinwire.tools.bench.ddp_steps import StepCase
from thinwire.tools.bench.launch import NcclRanks
from thinwire.tools.bench.schemes import StepSample
from thinwire.tools.bench.timing import Effort
from thinwire.tools.bench.turns import GpuCount
from thinwire.tools.cli.app import app
from thinwire.tools.report import charts, compare, kinds

GPU_COLUMNS = {"backend", "host_ms", "gpu_busy_ms", "launches"}


def a_gpu(monkeypatch: pytest.MonkeyPatch, cards: int = 1, version: tuple[int, ...] = (2, 31, 2)) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    monkeypatch.setattr(launch.dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(launch, "nccl_version", lambda: version)
    for name in list(os.environ):
        if name.startswith("NCCL_"):
            monkeypatch.delenv(name)


def test_ranks_on_a_gpu_are_started_anew_for_every_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once profiled, a process is slower, whatever it is timed at next."""
    started: list[Any] = []

    @contextlib.contextmanager
    def ranks(*given: Any) -> Iterator[Any]:
        started.append(given)
        yield given

    monkeypatch.setattr(launch, "ranks", ranks)
    for cards, count in ((None, 1), (NcclRanks(2, 1, 1), 3)):
        case: Any = SimpleNamespace(
            world=2, cards=cards, link=None, nodes=None, rows=lambda world, effort: [{"on": world}]
        )
        started.clear()
        assert len(list(bench._rows([case] * 3, Effort(1), iter))) == 3
        assert len(started) == count


# --- where ranks are --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "cards", "hosts", "link", "nodes"),
    [
        (2, 1, 1, "memory", None),
        (2, 2, 1, "cards", None),
        (2, 1, 2, "tcp", None),
        (4, 1, 2, "tcp", 2),
        (4, 4, 4, "tcp", None),
    ],
)
def test_what_connects_ranks(world: int, cards: int, hosts: int, link: str, nodes: int | None) -> None:
    found = NcclRanks(world, cards, hosts)
    assert (found.link, found.nodes) == (link, nodes)


def test_ranks_in_pairs_on_one_card(monkeypatch: pytest.MonkeyPatch) -> None:
    a_gpu(monkeypatch)
    ranks = NcclRanks(4, 1, 2)
    told = [ranks.environment(rank) for rank in range(4)]
    assert [env["NCCL_HOSTID"] for env in told] == ["thinwire0", "thinwire0", "thinwire1", "thinwire1"]
    shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "8", "NCCL_SOCKET_IFNAME": "lo"}
    assert all(env.items() >= shared.items() for env in told)
    assert [ranks.card(rank).index for rank in range(4)] == [0] * 4
    monkeypatch.setenv("NCCL_MAX_CTAS", "4")
    assert "NCCL_MAX_CTAS" not in ranks.environment(0)  # the user's stays


def test_a_card_each_needs_nothing() -> None:
    ranks = NcclRanks(2, 2)
    assert ranks.environment(1) == {}
    assert [ranks.card(rank).index for rank in range(2)] == [0, 1]


def test_worlds_and_the_hosts_they_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    a_gpu(monkeypatch)
    found = launch.nccl_ranks([2, 4], [1, 2, 4])
    assert [(ranks.world, ranks.hosts) for ranks in found] == [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]
    with pytest.raises(record.BenchError, match="expected hosts that ranks fill evenly, got 3 for 2, 4 ranks"):
        launch.nccl_ranks([2, 4], [1, 3])


def test_sharing_a_card_needs_a_new_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    a_gpu(monkeypatch, version=(2, 28, 9))
    with pytest.raises(
        record.BenchError, match=r"2 ranks on 1 GPU .* needs NCCL 2\.30\.0 or newer, got 2\.28\.9: name"
    ):
        launch.nccl_ranks([2], [1])
    a_gpu(monkeypatch, cards=2, version=(2, 28, 9))
    assert len(launch.nccl_ranks([2], [1])) == 1
    a_gpu(monkeypatch)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "0")
    with pytest.raises(record.BenchError, match="needs NCCL_MULTI_RANK_GPU_ENABLE=1, got '0': unset it"):
        launch.nccl_ranks([2], [1])


# --- the command line -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--backend nccl", "expected a GPU and NCCL, got no CUDA device that torch sees: run it on a GPU, or on gloo"),
        ("--backend nccl --link 1gbit", "with --backend nccl take --hosts"),
        ("--backend nccl --nodes 2", "with --backend nccl take --hosts"),
        ("--hosts 2", "without --backend nccl take --link and --nodes"),
        ("--verbs ddp_step", "'ddp_step' is not one of all_reduce"),
        ("--backend mpi", "'mpi' is not one of 'gloo', 'nccl'"),
        ("--backend nccl --hosts 0", "expected integers from 1 on such as 1,2, got '0'"),
    ],
)
def test_what_is_refused(line: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["bench", "collectives", *line.split()])
    assert result.exit_code == 2, result.output
    assert told in " ".join(result.stderr.replace("│", " ").split())
    assert result.stdout == ""


def test_what_a_run_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def run(*given: Any, progress: Any, **named: Any) -> record.Record:
        asked.append((*given, named))
        return record.Record("collectives", dict.fromkeys(record.CONDITIONS, "x"), [])

    monkeypatch.setattr(bench, "run_on_nccl", run)
    for line in ("", "--world 4 --hosts 1,2 --numel 10 --verbs ddp_step --codecs lloyd2 --rounds 3 --quick"):
        result = CliRunner().invoke(app, ["bench", "collectives", "--backend", "nccl", *line.split()])
        assert result.exit_code == 0, result.output
    usual = {"codecs": list(bench.NCCL_CODECS), "verbs": bench.NCCL_VERBS, "rounds": None, "quick": False}
    assert asked == [
        ([2, 4], [1], None, usual),
        ([4], [1, 2], [10], {"codecs": ["lloyd2"], "verbs": ["ddp_step"], "rounds": 3, "quick": True}),
    ]


# --- cases ------------------------------------------------------------------------------------------------------------


def test_every_codec_runs_in_both_algorithms() -> None:
    cases = list(bench.nccl_cases(NcclRanks(4, 1), [1000, 10], bench.NCCL_VERBS, bench.NCCL_CODECS))
    sums = [case for case in cases if isinstance(case, CollectiveCase)]
    assert [case.numel for case in sums] == [1000, 10]
    ways = [(entry.name, entry.algorithm) for entry in sums[0].entries]
    both = [(name, way) for name in ("bf16", "int8", "lloyd4", "lloyd2") for way in ("one_shot", "two_phase")]
    assert ways == [("plain", "plain"), *both]
    assert len({entry.key for entry in sums[0].entries}) == len(ways)
    (steps,) = (case for case in cases if isinstance(case, StepCase))
    names = [str(scheme) for scheme in steps.schemes]
    assert names == ["none", "bf16", "int8", "lloyd4", "lloyd2@classic", "lloyd2@ef21"]


def test_pairs_of_codecs_need_hosts_of_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def entries(ranks: NcclRanks) -> list[str]:
        (case,) = bench.nccl_cases(ranks, [10], ["all_reduce"], ["int8/lloyd4", "plain"])
        assert isinstance(case, CollectiveCase)
        return [entry.key for entry in case.entries]

    assert entries(NcclRanks(4, 1, 2)) == ["int8/lloyd4 hierarchical", "plain plain"]
    assert entries(NcclRanks(4, 1, 4)) == ["plain plain"]
    a_gpu(monkeypatch)
    with pytest.raises(record.BenchError, match="say how many nodes"):
        bench.run_on_nccl([2], [2], verbs=["all_reduce"], codecs=["int8/lloyd4"])


# --- counts -----------------------------------------------------------------------------------------------------------


def event(cat: str, name: str, ts: float, dur: float, correlation: int | None = None) -> dict[str, Any]:
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def test_launches_are_those_of_the_call_and_kernels_those_of_the_launches() -> None:
    events = [
        event("user_annotation", f"{turns.MARK}int8", 100, 50),
        event("gpu_user_annotation", f"{turns.MARK}int8", 100, 50),
        event("cpu_op", "aten::empty", 101, 1),
        event("cpu_op", "c10d::allreduce_", 102, 9),
        event("cuda_driver", "cuLaunchKernelEx", 105, 2, 7),
        event("cuda_driver", "cuLaunchKernel", 106, 1, 5),  # inside the other, and not one more
        event("cuda_runtime", "cudaEventRecord", 107, 1, 8),
        event("cuda_runtime", "cudaMemcpyAsync", 110, 2, 9),
        event("kernel", "encode", 160, 30, 7),  # after the call has returned
        event("gpu_memcpy", "DtoD", 190, 10, 9),
        event("cuda_runtime", "cudaLaunchKernel", 99, 1, 6),  # before it
        event("kernel", "barrier", 120, 99, 6),
        event("user_annotation", f"{turns.MARK}plain", 300, 10),
        {"ph": "M", "name": "process_name"},
    ]
    assert turns.launches_in(events) == {"int8": [GpuCount(2, 0.04)], "plain": [GpuCount(0, 0.0)]}


def test_torchs_own_trace_can_be_counted() -> None:
    x = torch.ones(4)
    met: list[str] = []
    found = turns.profiled({"one": lambda: x.add_(x), "two": lambda: x.add_(x).mul_(x)}, list, lambda: met.append(""))
    assert found == {"one": [GpuCount(0, 0.0)] * 3, "two": [GpuCount(0, 0.0)] * 3}
    assert len(met) == 3 * 2 + 1


def test_counts_of_ranks_in_one_row() -> None:
    found = turns.gpu_columns([[GpuCount(9, 0.5), GpuCount(5, 0.4)], [GpuCount(5, 0.2)]])
    assert found == {"gpu_busy_ms": 0.2, "launches": 5}
    assert set(turns.gpu_columns([[], []]).values()) == {None}


# --- rows -------------------------------------------------------------------------------------------------------------


def timed(kind: Any, ms: float, **more: Any) -> Any:
    counted = [GpuCount(5, 0.1 * ms)]
    host = {"host_ms": [ms / 2] * 3, "steady_ms": [ms / 4] * 3}
    return kind([ms] * 3, [1.0] * 3, [0] * 3, [64] * 3, gpu=counted, **host, **more)


def a_record(monkeypatch: pytest.MonkeyPatch) -> record.Record:
    """Of faked times, as a run on one card writes it."""
    monkeypatch.setattr(launch, "nccl_version", lambda: (2, 31, 2))
    rows: list[record.Row] = []
    for ranks in (NcclRanks(2, 1), NcclRanks(4, 1, 2), NcclRanks(4, 1, 4)):
        for case in bench.nccl_cases(ranks, [1000, 4000], ("all_reduce", *bench.STEPS), bench.NCCL_CODECS):
            if isinstance(case, StepCase):
                part = {str(scheme): timed(StepSample, 4.0, params=99, digest="a") for scheme in case.schemes}
                rows += ddp_steps.rows_of(case, [{**part, "nothing": timed(StepSample, 0.1)}] * ranks.world)
            else:
                ways = {entry.key: timed(CallSample, 2.0, algorithm=entry.algorithm) for entry in case.entries}
                beside = {bench.FP32: timed(CallSample, 1.0), bench.BF16: timed(CallSample, 3.0)}
                rows += bench.rows_of(case, [{**ways, **beside, "nothing": timed(CallSample, 0.1)}] * ranks.world)
    return record.Record("collectives", dict.fromkeys(record.CONDITIONS, "x"), rows)


def test_rows_have_the_columns_of_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    found = a_record(monkeypatch)
    for row in record.loads(record.dumps(found)).rows:  # reading checks the columns that every kind has
        assert set(row) >= GPU_COLUMNS | {"nccl", "cards", "mps", "plain_host_ms", "plain_launches"}
        usual = 1.0 if row["verb"] == "all_reduce" else 2.0
        assert (row["backend"], row["host_ms"], row["launches"]) == ("nccl", usual, 5)
    sums = [row for row in found.rows if row["verb"] == "all_reduce"]
    assert {row["link"] for row in sums} == {"memory", "tcp"}
    assert {(row["ms_p50"], row["plain_ms"], row["bf16_ms"], row["plain_host_ms"]) for row in sums} == {(2, 1, 3, 0.5)}
    assert {row["gpu_busy_ms"] for row in sums} == {0.2}
    assert {(row["host_steady_ms"], row["plain_host_steady_ms"]) for row in sums} == {(0.5, 0.25)}
    sharded = [row["codec"] for row in found.rows if row["verb"] == "fsdp_step" and row["world"] == 2]
    assert sharded == ["none", "mixed", "int8/int8", "lloyd4/int8", "lloyd2/int8"]


def test_a_report_tells_rows_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    found = a_record(monkeypatch)
    (table,) = kinds.grids(found)
    assert table.header[6:10] == ["ms", "host ms", "steady ms", "GPU ms"]
    labels = [tuple(row.get(name) for name in compare.LABELS["collectives"]) for row in found.rows]
    assert len(set(labels)) == len(labels)
    titles = [chart.title for chart in charts.of(found)]
    assert len(set(titles)) == len(titles)
    assert "Speed-up by size: all_reduce of 4 ranks on 2 nodes, tcp" in titles


def test_rows_of_gloo_leave_what_a_gpu_does_empty() -> None:
    case = CollectiveCase("all_reduce", 2, None, 1000, bench.entries(["int8"], "all_reduce", 2))
    part = {name: CallSample([1.0], [1.0]) for name in (bench.FP32, bench.BF16, "int8 one_shot", "nothing")}
    (row,) = bench.rows_of(case, [part, part])
    assert {name: row[name] for name in GPU_COLUMNS} == {**dict.fromkeys(GPU_COLUMNS), "backend": "gloo"}
    assert "asked" not in row


# --- the ranks' side --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CpuRanks(NcclRanks):
    """Ranks whose card is the CPU."""

    def card(self, rank: int) -> torch.device:
        return torch.device("cpu")


def test_averages_and_steps_of_ranks(ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "nccl_version", lambda: (2, 31, 2))
    verbs = ("all_reduce", *bench.STEPS)
    sums, *steps = bench.nccl_cases(CpuRanks(2, 2), [4000], verbs, ["plain", "int8", "lloyd2"])
    task = replace(tasks.QUICK_TASKS["mlp"], rows=4)  # on a CPU bf16 takes its time
    whole, sharded = (replace(cast(StepCase, case), task=task) for case in steps)
    world = cast(launch.World, Pooled(ranks(2)))
    rows = [*sums.rows(world, Effort(2)), *whole.rows(world, Effort(2))]
    cut = list(sharded.rows(world, Effort(2)))
    assert all(row["identical"] for row in [*rows, *cut])
    assert [row["codec"] for row in cut] == ["none", "mixed", "int8/int8", "lloyd2/int8"]
    plain = 3 * 4 * float(str(cut[0]["numel"])) / 2  # fp32 gathered twice and reduced once, half of each sent
    shares = [float(str(row["bytes_per_rank"])) / plain for row in cut[2:]]
    assert shares == pytest.approx([8.25 / 32, (2 * 8.25 + 2.25) / 3 / 32], rel=0.1)
    assert [(row["codec"], row["algorithm"]) for row in rows] == [
        ("plain", "plain"),
        *((name, way) for name in ("int8", "lloyd2") for way in ("one_shot", "two_phase")),
        *(("none", "plain"), ("bf16", "plain"), ("int8", "one_shot")),
        *(("lloyd2@classic", "one_shot"), ("lloyd2@ef21", "one_shot")),
    ]
    errors = [float(str(row["rel_error"])) for row in rows[:5]]
    assert errors[0] < 1e-6 < errors[1] < 0.05 < errors[3] < 1  # against the mean
    assert [row["feedback"] for row in rows[5:]] == ["none", "none", "none", "classic", "ef21"]
    assert {row["numel"] for row in rows[5:]} == {sum(p.numel() for p in task.model(0).parameters())}
    assert [row["bytes_per_rank"] is None for row in rows[5:]] == [True, True, False, False, False]
