"""`thinwire report`: cells and tables; and `benchmarks.compare`: what got worse between two records."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from hypothesis import given, strategies as st
from rich.console import Console
from typer.testing import CliRunner, Result

from benchmarks import compare
from cases import generated
from thinwire.tools import report
from thinwire.tools.bench import record
from thinwire.tools.bench.record import Record, Row
from thinwire.tools.cli.app import app

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
NAMES = sorted(path.stem for path in BENCHMARKS.glob("*.json"))


def recorded(name: str) -> Record:
    return record.read(str(BENCHMARKS / f"{name}.json"))


def a_record(kind: str, *rows: Row) -> Record:
    filled = [{**dict.fromkeys(record.COLUMNS[kind]), **row} for row in rows]
    return Record(kind, record.conditions(torch.device("cpu")), filled)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["report", *arguments], prog_name="thinwire")


# --- cells and tables -------------------------------------------------------------------------------------------------


@generated(30)
@given(st.text(max_size=20) | st.none() | st.booleans() | st.integers() | st.floats())
def test_what_is_printed_has_no_control_codes(value: record.Value) -> None:
    assert all(letter.isprintable() for letter in report.text(value))
    shown = [report.significant(value), report.scientific(value), report.percent(value), report.fixed(2)(value)]
    assert all("inf" not in text and "nan" not in text for text in shown)


def test_numbers() -> None:
    shown = [report.significant(x) for x in (0, 0.01234, 1.234, 12.34, 1234.4)]
    assert shown == ["0", "0.0123", "1.23", "12.3", "1234"]
    assert [report.percent(x) for x in (0.0042, 0.0521, 0.961)] == ["0.4%", "5.2%", "96%"]
    assert (report.scientific(0.0095), report.fixed(3, "+")(0.0124)) == ("9.50e-3", "+0.012")
    assert (report.counted(1, "row"), report.counted(2, "row")) == ("1 row", "2 rows")
    assert (report.significant(math.inf), report.percent(None), report.number(10**400)) == ("–", "–", None)


@pytest.mark.parametrize("name", NAMES)
def test_every_committed_record_has_tables(name: str) -> None:
    for grid in report.grids(recorded(name)):
        assert grid.rows
        assert len(set(grid.header)) == len(grid.header), "no two columns have one name"
        assert all(len(row) == len(grid.header) for row in grid.rows)
        assert any(cell != report.ABSENT for row in grid.rows for cell in row[grid.labels :])


def test_a_kind_without_a_table_of_its_own_has_a_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `thinwire report` shows the records of studies."""
    monkeypatch.setattr(report, "GRIDS", {})
    (grid,) = report.grids(recorded("codec_cpu"))
    assert {"distribution", "codec", "wire_bits", "nmse"} <= set(grid.header)
    assert (grid.header[0], len(grid.rows)) == ("distribution", len(recorded("codec_cpu").rows))


def test_labels_that_are_the_same_everywhere_stand_in_the_title() -> None:
    rows = [{"verb": "all_reduce", "codec": codec, "world": 2, "link": "1gbit", "ms_p50": 1.0} for codec in ("a", "b")]
    (grid,) = report.grids(a_record("collectives", *rows))
    assert grid.title == "verb all_reduce, world 2, link 1gbit. over fp32, over bf16: speedup over torch's own"
    assert (grid.header, grid.labels) == (["codec", "ms"], 1)


@pytest.mark.parametrize(("columns", "whole"), [(60, False), (200, True)])
def test_a_narrow_terminal_gets_fewer_columns_and_no_broken_number(columns: int, whole: bool) -> None:
    console = Console(width=columns, force_terminal=True, color_system=None, record=True)
    with console.capture() as shown:
        report.show(recorded("collectives_1gbit"), console)
    lines = shown.get().splitlines()
    assert max(map(len, lines)) <= columns
    assert ("Left out: " in shown.get()) is not whole


def test_markdown_shows_what_a_record_says_and_obeys_none_of_it(tmp_path: Path) -> None:
    row: Row = {"distribution": "gaussian", "codec": "a|b<i>`*", "wire_bits": 1.0, "nmse": 0.1}
    text = report.markdown(a_record("codec", row))
    assert r"| a\|b&lt;i&gt;\`\* |" in text


# --- comparisons ------------------------------------------------------------------------------------------------------


def timed(p50: float, control: float = 1.0, spread: float = 0.1) -> Row:
    times = {"ms_p50": p50, "ms_p20": p50 * (1 - spread), "ms_p80": p50 * (1 + spread), "plain_ms": control}
    return {"verb": "all_reduce", "codec": "int8", "world": 2, "link": "1gbit", "numel": 10, **times}


def trained(**columns: Any) -> Row:
    return {"task": "gpt", "parallel": "ddp", "codec": "int8", "loss_log_ratio_error": 0.01, **columns}


@pytest.mark.parametrize(
    ("kind", "old", "new", "verdict"),
    [
        ("collectives", timed(1.0), timed(1.1), compare.SAME),
        ("collectives", timed(1.0), timed(1.5), compare.REGRESSION),
        ("collectives", timed(1.5), timed(1.0), compare.BETTER),
        ("collectives", timed(1.0), timed(1.5, control=1.5), compare.SAME),  # the whole machine was slower
        ("collectives", timed(1.0), {**timed(1.0), "identical": None}, compare.SAME),
        ("collectives", {**timed(1.0), "identical": True}, {**timed(1.0), "identical": False}, compare.REGRESSION),
        ("train", trained(loss_log_ratio=0.0), trained(loss_log_ratio=0.04), compare.SAME),
        ("train", trained(loss_log_ratio=0.0), trained(loss_log_ratio=0.05), compare.REGRESSION),
        ("train", trained(loss_log_ratio=0.1), trained(loss_log_ratio=None), compare.REGRESSION),
        ("train", trained(diverged=True), trained(diverged=False), compare.BETTER),
        ("codec", {"codec": "a", "nmse": 0.1}, {"codec": "a", "nmse": 0.1 * (1 + 1e-8)}, compare.SAME),
        ("codec", {"codec": "a", "nmse": 0.1}, {"codec": "a", "nmse": 0.1001}, compare.REGRESSION),
    ],
)
def test_what_becomes_of_a_row(kind: str, old: Row, new: Row, verdict: str) -> None:
    found = compare.compare(a_record(kind, old), a_record(kind, new))
    verdicts = {change.verdict for change in found.changes}
    assert verdict in verdicts
    assert found.is_worse is (verdict == compare.REGRESSION)


def test_two_records_are_compared_and_a_regression_fails_when_asked(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("before.json", "after.json", "other.json")]
    records = (a_record("collectives", timed(1.0)), a_record("collectives", timed(2.0)), a_record("train", trained()))
    for path, found in zip(paths, records, strict=True):
        record.write(found, path)
    shown = call(*paths)
    assert (shown.exit_code, [line for line in shown.stdout.splitlines() if "json" in line]) == (0, NAMED)
    study = typer.Typer()
    study.command()(compare.command)
    runs = [(paths[:2], 0), ([*paths[:2], FAIL], 1), ([paths[1], paths[0], FAIL], 0), ([paths[0], paths[2]], 2)]
    found = [CliRunner().invoke(study, given) for given, _ in runs]
    assert [result.exit_code for result in found] == [status for _, status in runs]
    assert re.search(r"ms_p50 .* 2.000 .* REGRESSION", found[0].stdout)
    assert "a collectives and a train record share no row" in " ".join(found[3].stderr.split())


NAMED, FAIL = ["before.json", "after.json", "other.json"], "--fail-on-regression"
