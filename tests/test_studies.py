"""The studies of benchmarks/: inputs and formulas, kernels, training, links with a delay."""

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import typer
from typer.testing import CliRunner

from benchmarks import (
    codec as codec_bench,
    collectives_nccl,
    exact as exact_bench,
    kernels as kernels_bench,
    train as bench,
)
from ranks import RankPool, World
from thinwire.codecs import codec
from thinwire.tools.bench import record
from thinwire.tools.local import launch

pytestmark = pytest.mark.usefixtures("served")


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
