"""`thinwire demo`: a whole run in a pipe, verdicts and flags."""

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

import figures
from thinwire.tools import report
from thinwire.tools.advise import verdict
from thinwire.tools.bench import record
from thinwire.tools.bench.record import Record
from thinwire.tools.cli import demo
from thinwire.tools.cli.app import app
from thinwire.tools.local import link as links


def call(*flags: str) -> Result:
    return CliRunner().invoke(app, ["demo", *flags], prog_name="thinwire")


@pytest.mark.usefixtures("forked")
def test_in_a_pipe(tmp_path: Path) -> None:
    path = str(tmp_path / "x.json")
    run = call("--quick", "--steps", "3", "--codecs", "bf16,lloyd2", "--link", "loopback", "--json", path)
    assert (run.exit_code, run.stderr) == (0, ""), run.output
    assert "\x1b" not in run.stdout
    assert run.stdout.startswith("task gpt, world 2, ")
    assert ", link loopback, params 21408, seeds 2, steps 3. over fp32, " in run.stdout
    assert "Loopback is faster than any network" in run.stdout
    rows = record.read(path).rows
    found = [(row["codec"], row["feedback"], row["bytes_from"]) for row in rows]
    assert found == [("none", "none", "formula"), ("bf16", "none", "formula"), ("lloyd2", "none+moments", "transport")]
    none, bf16, lloyd2 = (float(str(row["bytes_per_step"])) for row in rows)
    assert (none, bf16) == (4 * 21408, 2 * 21408)  # a ring of two: each sends as much as it has
    assert 21408 * 2 / 8 < lloyd2 < 21408 * 4 / 8  # and vectors in 16 bits
    assert all(row["identical"] is True and row["loss_log_ratio"] is not None for row in rows)


# --- what a record means ----------------------------------------------------------------------------------------------


def test_on_a_link_the_measured_steps_decide_with_the_losses_of_the_run() -> None:
    found = figures.recorded("demo_1gbit.json")
    choice = demo.measured(found.rows, verdict.losses_of(found, "this run"))
    assert choice.plain.step_s == pytest.approx(1e-3 * float(str(found.rows[0]["step_ms"])))
    shown = shown_by(found)
    assert "Verdict for this network over 1gbit, from this run's steps and losses:\n" in shown
    spoiled = [{**row, "val_gap_nats": 0.5} for row in found.rows]
    worse = demo.measured(spoiled, verdict.losses_of(Record("train", found.conditions, spoiled), "this run"))
    assert worse.safe.name in ("fp32", "bf16")
    assert worse.faster is None


def test_one_seed_and_fp32_alone_give_no_verdict() -> None:
    found = figures.recorded("demo.json")
    few = Record("train", found.conditions, [{**row, "seeds": 1} for row in found.rows])
    alone = Record("train", found.conditions, found.rows[:1])
    for record_ in (few, alone):
        assert "No verdict: it needs a codec beside fp32, and two seeds or more." in shown_by(record_)


def test_report_prints_the_same_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "GRIDS", {})  # without those of studies
    path = str(figures.ROOT / "benchmarks" / "demo_1gbit.json")
    _, *table = CliRunner().invoke(app, ["report", path]).stdout.splitlines()[:7]
    assert " ".join(table[0].split()) == "scheme loss gap ± step ms over fp32 over bf16 kB fewer ×"
    assert " ".join(table[4].split()) == "lloyd4 2.99 +0.0023 0.0073 46.0 1.09 0.987 132 7.6"
    assert set(table) <= set(shown_by(figures.recorded("demo_1gbit.json")).splitlines())


def shown_by(found: Record) -> str:
    file = io.StringIO()
    demo.show(found, Console(file=file, width=200))
    return file.getvalue()


def test_a_link_is_shaped_where_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    found = figures.recorded("demo.json")
    monkeypatch.setattr(demo, "run", lambda *given, **named: asked.append(given[3]) or found)
    monkeypatch.setattr(links, "become_root", lambda: None)
    monkeypatch.setattr(links, "hosts", lambda count, link: contextlib.nullcontext())
    assert call().exit_code == 0

    def refuse(count: int, link: Any) -> Any:
        raise links.LinkError("no namespaces")

    monkeypatch.setattr(links, "hosts", refuse)
    assert call().exit_code == call("--link", "loopback").exit_code == 0
    assert call("--codecs", "int9").exit_code == call("--link", "fast").exit_code == 2
    assert [link and str(link) for link in asked] == ["1gbit", None, None]
