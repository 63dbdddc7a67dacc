"""The studies of benchmarks/: inputs and formulas, kernels, training, links with a delay."""

import contextlib
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import typer
from typer.testing import CliRunner

from benchmarks import (
    clock,
    codec as codec_bench,
    collectives_nccl,
    exact as exact_bench,
    kernels as kernels_bench,
    qat,
    tasks,
    train as bench,
)
from benchmarks.schemes import TrainSample
from benchmarks.tasks import Total
from benchmarks.train import Trained, TrainPlan
from ranks import RankPool, World
from thinwire.codecs import codec
from thinwire.tools.bench import record
from thinwire.tools.local import launch, link as links

pytestmark = pytest.mark.usefixtures("served")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FEW = clock.KernelEffort(rounds=2, launches=2, slow_rounds=1, slow_numel=1 << 10)


def invoke(command: Any, *flags: str) -> Any:
    app = typer.Typer(rich_markup_mode=None)
    app.command()(command)
    return CliRunner().invoke(app, list(flags))


def number(row: record.Row, name: str) -> float:
    value = row[name]
    assert isinstance(value, float | int), (name, value)
    return value


def test_a_codec_run(tmp_path: Path) -> None:
    path = str(tmp_path / "codec.json")
    small = ("--numel", "10000", "--distributions", "gaussian,sparse", "--codecs", "none,int8,lloyd4", "--json", path)
    result = invoke(codec_bench.command, *small)
    assert result.exit_code == 0, result.output
    found = record.read(path)
    expected = [(name, spec) for name in ("gaussian", "sparse") for spec in ("none", "int8", "lloyd4")]
    assert [(row["distribution"], row["codec"]) for row in found.rows] == expected
    exact, int8, lloyd4 = found.rows[:3]
    assert (exact["nmse"], exact["db_above_rd"], exact["lloyd_max_nmse"]) == (0, None, None)
    assert int8["wire_bits"] == 8 * codec("int8").wire_bytes(10_000) / 10_000 > 8.125
    assert lloyd4["lloyd_max_nmse"] == codec_bench.lloyd_max_nmse(4)
    assert 0 < number(int8, "nmse") < number(lloyd4, "nmse")


def a_case(op: str, spec: str = "int8", numel: int = 1280) -> kernels_bench.OpCase:
    world = 4 if op in kernels_bench.SUMS else 1
    how: dict[str, Any] = {"part": "codecs", "dtype": torch.float32, "threads": 1, "device": CPU}
    return kernels_bench.OpCase(op=op, name=spec, numel=numel, world=world, **how)


def test_a_kernels_run() -> None:
    before = torch.get_num_threads()
    found = kernels_bench.run("cpu", codecs=["int8", "lloyd1"], numels=[4096], threads=[2], quick=True)
    assert torch.get_num_threads() == before
    assert len(found.rows) == len(kernels_bench.OPS) * 3 - 1  # int8 on bfloat16 too, but for the recode
    for row in found.rows:
        numbers = [number(row, name) for name in ("ms_p20", "ms_p50", "ms_p80", "copy_ms", "copy_same_ms")]
        assert numbers[:3] == sorted(numbers[:3])
        assert row["times_copy"] == pytest.approx(numbers[1] / numbers[3])
        assert row["copy_share"] == pytest.approx(numbers[4] / numbers[1])
        assert row["world"] == (4 if row["op"] in ("decode_sum", "recode") else 1)
        assert (row["part"], row["note"], row["cold"], row["times_compile"]) == ("codecs", None, False, None)


def a_plan(*names: str, task: str = "gpt", seeds: int = 2, link: Any = None, parallel: str = "ddp") -> TrainPlan:
    small = replace(tasks.find(task, quick=True), seeds=seeds, steps=3)
    return TrainPlan(small, bench.lineup(task, names, parallel), 2, link, "adam", bench.QUICK, parallel)


def outcomes(*losses: float, val: float | None = None, digests: str = "aa") -> list[list[Trained]]:
    """By seed, then by rank: the second rank has three times as much to judge."""
    return [
        [
            Trained(Total(count * loss, count), val and Total(count * val * loss, count), digest, "ef21", 9)
            for count, digest in zip((1, 3), digests, strict=True)
        ]
        for loss in losses
    ]


def a_sample(ms: list[float], interface: int, transport: int | None = None, extra: int | None = None) -> TrainSample:
    sent = [] if transport is None else [transport] * 3
    return TrainSample(ms, [ms[0] / 2] * 3, interface_bytes=[interface] * 3, transport_bytes=sent, extra_bytes=extra)


def samples(plan: TrainPlan, **ms: float) -> list[dict[str, TrainSample]]:
    part = {scheme.name: a_sample([1.0, 3.0, 2.0], 1100, 900, 5) for scheme in plan.timed}
    part |= {bench.COMPUTE: a_sample([1.0] * 3, 100), bench.NOTHING: a_sample([0.0] * 3, 100)}
    part |= {name: a_sample([value] * 3, 2100) for name, value in ms.items()}
    return [part, {**part, "int8": a_sample([5.0, 1.0, 1.0], 600, 400, 7)}]


def test_a_row_compares_with_fp32_and_is_of_the_slowest_rank() -> None:
    plan = a_plan("int8", "powersgd1")
    none, int8, power = plan.schemes
    trained = {none: outcomes(1.0, 2.0), int8: outcomes(1.1, 1.8), power: []}
    row = bench.row_of(plan, int8, trained, samples(plan, none=12.0, bf16=6.0, powersgd1=9.0))
    assert set(row) >= set(record.COLUMNS["train"])
    assert number(row, "loss_log_ratio") == pytest.approx((math.log(1.1) + math.log(0.9)) / 2)
    assert number(row, "loss_log_ratio_error") == pytest.approx(math.log(1.1 / 0.9) / 2)
    assert number(row, "noise_floor") == pytest.approx(math.log(2))
    assert (row["step_ms"], row["compute_ms"]) == (3, 1)  # rounds take 5, 3 and 2
    assert (row["speedup_plain"], row["speedup_bf16"], row["speedup_powersgd"]) == (4, 2, 3)
    assert (row["bytes_per_step"], row["extra_bytes"], row["over_limit"]) == (900, 7, None)
    assert (row["identical"], row["feedback"], row["diverged"], row["val_gap_nats"]) == (True, "ef21", False, None)
    shaped = a_plan("int8", link=links.parse("100mbit"))
    trained = {none: outcomes(1.0, 2.0, val=2.0), int8: outcomes(math.nan, 2.5, val=2.0, digests="ab")}
    row = bench.row_of(shaped, int8, trained, samples(shaped))
    assert (row["bytes_per_step"], row["bytes_over_plain"]) == (1100 - 100, 1)  # the barrier's are not the step's
    assert number(row, "over_limit") == pytest.approx(3 / (1 + 1e3 * 8 * 1000 / 1e8) - 1)
    assert (row["identical"], row["diverged"], row["val_noise_floor"]) == (False, True, 2.0)


@dataclass
class Pooled:
    """A world of a benchmark (launch.World) whose ranks are those of the tests."""

    world: World

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        return self.world.run(called, fn, args)


def called(group: dist.ProcessGroup, fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, which the ranks of a benchmark write to a log
        return fn(*args)


@pytest.fixture
def quick_run(ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., record.Record]:
    """The command with these flags, by ranks that exist already."""
    monkeypatch.setattr(launch, "ranks", lambda setup: contextlib.nullcontext(Pooled(ranks(setup.world))))

    def run(*flags: str) -> record.Record:
        path = str(tmp_path / "found.json")
        result = invoke(bench.command, "--quick", "--world", "2", "--task", "gpt", "--json", path, *flags)
        assert result.exit_code == 0, (result.output, result.exception)
        return record.read(path)

    return run


def test_a_quick_run_of_ddp(quick_run: Callable[..., record.Record]) -> None:
    found = quick_run("--codecs", "int8,sign,powersgd1", "--steps", "2", "--seeds", "2")
    none, int8, sign, power = found.rows
    assert (none["loss_log_ratio"], sign["control"], power["peer"]) == (0, True, True)
    assert all(row["identical"] and number(row, "step_ms") > 0 for row in found.rows)
    assert number(sign, "bytes_per_step") < number(int8, "bytes_per_step") / 4
    assert number(int8, "val_gap_nats") != 0


def test_a_quick_run_of_diloco(quick_run: Callable[..., record.Record]) -> None:
    small = ("--steps", "2", "--batch", "1", "--seeds", "1", "--optimizer", "adamw")
    ddp, *outer = quick_run("--parallel", "diloco", "--codecs", "topk", "--every", "1,2", *small).rows
    of = ("parallel", "codec", "every", "ddp_log_ratio", "peer")
    assert [ddp[name] for name in of] == ["ddp", "none", 1, 0, True]
    ways = (("none", "none"), ("topk", "classic"))
    shown = [(row["parallel"], row["codec"], row["feedback"], row["every"]) for row in outer]
    assert shown == [("diloco", *way, every) for every in (1, 2) for way in ways]
    for one, two in zip(outer[:2], outer[2:], strict=True):
        assert number(one, "bytes_per_step") == 2 * number(two, "bytes_per_step")
    assert number(outer[1], "bytes_per_step") < number(outer[0], "bytes_per_step") / 4


@pytest.mark.parametrize(
    ("command", "flags", "complaint"),
    [
        (bench.command, ["--task", "cifar"], "'cifar' is not one of"),
        (bench.command, ["--codecs", "int8,int9"], "besides codecs there are auto, sign"),
        (bench.command, ["--codecs", "lloyd4/int8"], "gradients/weights goes with --parallel fsdp2"),
        (bench.command, ["--every", "10"], "is for --parallel diloco"),
        (bench.command, ["--link", "fast"], "expected a rate such as 100mbit"),
        (bench.command, ["--json", "no/such/folder/x.json"], "cannot be written"),
        (codec_bench.command, ["--distributions", "gaussian,cauchy"], "'cauchy' is not one of gaussian, laplace"),
        (kernels_bench.command, ["--device", "cpu", "--threads", "1,0"], "expected integers of 1 or more, got '0'"),
        (qat.command, ["--parts", "speed,nothing"], "'nothing' is not one of speed, train"),
        (qat.command, ["--methods", "lsq,adam"], "'adam' is not one of fp32, lsq, lsqplus"),
        (qat.command, ["--bits", "2,9"], "from 2 to 8, got"),
        (qat.command, ["--parts", "speed", "--methods", "lsq"], "is of the part train"),
    ],
)
def test_bad_flags(command: Any, flags: list[str], complaint: str) -> None:
    result = invoke(command, "--quick", *flags)
    assert result.exit_code == 2, result.output
    assert complaint in " ".join(result.stderr.replace("│", "").split())


# --- exact differences ------------------------------------------------------------------------------------------------


def test_an_exact_run(tmp_path: Path) -> None:
    path = str(tmp_path / "exact.json")
    result = invoke(exact_bench.command, "--quick", "--json", path)
    assert result.exit_code == 0, result.output
    rows = record.read(path).rows
    assert [(row["optimizer"], row["rate"]) for row in rows] == list(product(("adamw", "sgd"), (1e-6, 3e-5, 1e-3)))
    for row in rows:
        changed, least, bits = (row[name] for name in ("changed_share", "entropy_bits", "bits"))
        assert 0 < changed < 1
        assert least < bits < row["bits_index_value"]
        assert row["decode_gb_s"] > 0
    adamw = [row["bits"] for row in rows[:3]]
    assert adamw == sorted(adamw)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_quick_runs_on_nccl() -> None:
    sums = collectives_nccl.run([2], [2], numels=[1000], codecs=["plain", "int8"], quick=True).rows
    assert [row["asked"] for row in sums] == [row["algorithm"] for row in sums] == ["plain", "one_shot", "two_phase"]
    for row in sums:
        assert (row["identical"], row["backend"], row["link"]) == (True, "nccl", "tcp")
        assert number(row, "host_ms") > 0
