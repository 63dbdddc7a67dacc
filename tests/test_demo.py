"""`thinwire demo`: a whole run in a pipe, verdicts and flags."""

import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

import figures
from programs import Ended
from thinwire.tools.advise import cluster
from thinwire.tools.bench import record
from thinwire.tools.bench.record import Interrupted, Record
from thinwire.tools.cli import demo as cli, findings, training
from thinwire.tools.cli.app import app

OWN = cluster.recorded("cpu", "aarch64")


def call(*flags: str) -> Result:
    return CliRunner().invoke(app, ["demo", *flags], prog_name="thinwire")


@pytest.mark.program("-m", "thinwire", "demo", "--quick", "--steps", "3", "--codecs", "bf16,lloyd2", "--json", "x.json")
def test_in_a_pipe(program: Ended) -> None:
    assert program.status == 0, program.told
    assert "\x1b" not in program.out + program.err
    assert program.err == ""
    assert "Measured here: a GPT of 21408 weights, 2 ranks on" in program.out
    assert "No verdict: this run has 2 seeds; the seed-to-seed spread needs 3." in program.out
    assert "Use " not in program.out  # a quick run claims nothing
    rows = record.read(str(program.folder / "x.json")).rows
    found = [(row["codec"], row["feedback"], row["bytes_from"]) for row in rows]
    assert found == [("none", "none", "formula"), ("bf16", "none", "formula"), ("lloyd2", "none+moments", "transport")]
    none, bf16, lloyd2 = (float(str(row["bytes_per_step"])) for row in rows)
    assert (none, bf16) == (4 * 21408, 2 * 21408)  # a ring of two: each sends as much as it has
    assert 21408 * 2 / 8 < lloyd2 < 21408 * 4 / 8  # and vectors in 16 bits
    assert all(row["identical"] is True and row["loss_log_ratio"] is not None for row in rows)


# --- what a record means ----------------------------------------------------------------------------------------------


def test_the_verdict_changes_with_the_link() -> None:
    found = figures.recorded("demo.json")
    by_link = {one.link: one.choice for one in findings.outlooks(found, OWN)}
    assert list(by_link) == list(findings.LINKS)
    assert by_link["100mbit"].compress
    assert not by_link["100gbit"].compress
    assert by_link["100mbit"].basis == "predicted"


def test_on_a_link_that_was_measured_the_measured_steps_decide() -> None:
    found = figures.recorded("demo_1gbit.json")
    first, *others = findings.outlooks(found, OWN)
    link = str(found.rows[0]["link"])
    assert (first.link, first.choice.basis) == (link, f"measured over {link}")
    assert [way.step_s for way in first.ways] == [
        pytest.approx(1e-3 * float(str(row["step_ms"]))) for row in found.rows
    ]
    assert {one.choice.basis for one in others} == {"predicted"}


def test_few_seeds_and_fp32_alone_give_no_verdict() -> None:
    found = figures.recorded("demo.json")
    few = Record("train", found.conditions, [{**row, "seeds": 2} for row in found.rows])
    alone = Record("train", found.conditions, found.rows[:1])
    assert findings.outlooks(few, OWN) == findings.outlooks(alone, OWN) == []
    assert findings.sentences(few)[0].startswith("No verdict: this run has 2 seeds")


def test_what_was_measured_is_printed() -> None:
    console = Console(file=io.StringIO(), width=200)
    cli.show(figures.recorded("demo.json"), OWN, console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "Measured here: a GPT of 249792 weights, 2 ranks" in shown
    assert re.search(r"^lloyd4 .* × +\d+ kB +[\d.]+ ×$", shown, re.MULTILINE)
    assert "Verdict for this network at 100mbit:\nUse " in shown
    assert "By link: predicted by the cost model of thinwire advise" in shown


def test_a_rate_rises_and_falls() -> None:
    plan = training.DemoPlan(steps=600)
    rates = [plan.learning_rate(number) for number in range(600)]
    top = rates.index(max(rates))
    assert 10 < top < 30
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)


# --- flags --------------------------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run that takes no time, in a directory of its own."""
    found = figures.recorded("demo.json")
    monkeypatch.setattr(training, "run", lambda *arguments, **named: found)
    monkeypatch.chdir(tmp_path)


def test_ctrl_c_before_the_first_codec_is_finished(measured: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: Any, **named: Any) -> Record:
        raise Interrupted(Record("train", record.conditions(torch.device("cpu")), []))

    monkeypatch.setattr(training, "run", run)
    result = call("--json", "-")
    assert result.exit_code == 130
    assert record.loads(result.stdout).rows == []


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--codecs", "int9"], "unknown codec 'int9'"),
        (["--world", "1"], "Invalid value for '--world'"),
        (["--link", "fast"], "expected a rate such as 100mbit or 1gbit, got 'fast'"),
        (["--json", "no/such/x.json"], "cannot be written"),
        (["--steps", "0"], "Invalid value for '--steps'"),
    ],
)
def test_bad_flags(flags: list[str], complaint: str, measured: None) -> None:
    result = call(*flags)
    assert result.exit_code == 2
    assert complaint in " ".join(result.stderr.split())
