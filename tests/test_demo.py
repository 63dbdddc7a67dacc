"""`thinwire demo`: a whole run in a pipe, one on a terminal that is interrupted, files, sentences and flags."""

import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st
from typer.testing import CliRunner, Result

from programs import Ended
from ranks import RankPool
from thinwire.tools.advise import check, machine as machines
from thinwire.tools.advise.links import PAYLOAD
from thinwire.tools.bench import demo as bench, link as links, record, schemes, tasks, train
from thinwire.tools.bench.demo import Look, Tick
from thinwire.tools.bench.record import Interrupted, Record, Row
from thinwire.tools.bench.train import Trained, TrainingRun, TrainPlan
from thinwire.tools.cli import demo as cli, findings
from thinwire.tools.cli.app import app
from thinwire.tools.report.charts import Bars, draw

PLOTS = {"predicted.png", "loss.png", "loss_ratio.png", "loss_bytes.png", "bytes.png", "step_time.png"}
FILES = {"index.html", "demo.json", *PLOTS}
OWN = machines.recorded("cpu", "aarch64")


def call(*flags: str) -> Result:
    return CliRunner().invoke(app, ["demo", *flags], prog_name="thinwire")


def said(text: str) -> str:
    return " ".join(text.replace("│", "").split())


def a_plan(steps: int = 5) -> TrainPlan:
    task = replace(tasks.QUICK_DEMO, seeds=1, steps=steps)
    return TrainPlan(task, bench.lineup(["lloyd2"]), 2, None, "adam", train.QUICK)


def a_row(codec: str, ms: float = 60.0, ratio: float | None = 0.0, **others: Any) -> Row:
    """A row as a run over loopback gives it."""
    scheme = schemes.parse(codec)
    sent = {"none": 1e6, "int8": 2.6e5}.get(scheme.label, 1.3e5)
    row: Row = dict.fromkeys(record.COLUMNS["train"])
    return row | {
        "task": "gpt",
        "optimizer": "adam",
        "codec": scheme.label,
        "feedback": "ef21" if scheme.label == "lloyd2" else "none",
        "world": 2,
        "link": "loopback",
        "seeds": 2,
        "steps": 5,
        "loss": 2.0,
        "loss_log_ratio": ratio,
        "noise_floor": 0.02,
        "diverged": ratio is None,
        "step_ms": ms,
        "step_ms_p20": ms - 1,
        "step_ms_p80": ms + 1,
        "compute_ms": 50.0,
        "speedup_plain": 60.0 / ms,
        "bytes_per_step": sent,
        "bytes_from": "formula" if scheme.label == "none" else "transport",
        "peer": scheme.peer,
        "control": False,
        "params": 250_000,
        "cores": 2,
        "threads": 1,
        "curve": [[1, 4.0], [5, 2.0]],
        **others,
    }


def a_record(*rows: Row, **conditions: Any) -> Record:
    return Record("train", {**record.conditions(torch.device("cpu")), **conditions}, list(rows))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A run that takes no time, in a directory of its own; a whole run, above, has real plots."""
    found = a_record(a_row("none"), a_row("int8", 70.0), a_row("lloyd2", 75.0, 0.05))
    monkeypatch.setattr(bench, "run", lambda *arguments: found)
    monkeypatch.setattr(draw, "png", lambda chart: chart.title.encode())
    monkeypatch.setattr(draw, "svg", lambda chart, prefix: "<svg></svg>")
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- whole runs -------------------------------------------------------------------------------------------------------


@pytest.mark.program("-m", "thinwire", "demo", "--quick", "--steps", "3", "--codecs", "bf16,lloyd2", "--json", "x.json")
def test_in_a_pipe(program: Ended) -> None:
    assert program.status == 0, program.told
    assert program.alone
    assert "\x1b" not in program.out + program.err
    lines = program.err.splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == ["none", "bf16", "lloyd2"]
    assert all(re.search(r": 6 steps, batch loss \d\.\d{3}, \d\.\d MB sent, [\d.]+ s$", line) for line in lines[:3]), (
        lines
    )
    assert lines[3].startswith("wrote thinwire-report/index.html, ")
    assert len(lines) == 4
    assert "Measured here: a GPT of 21408 weights, 2 ranks on" in program.out
    assert "PREDICTED, not measured" in program.out
    assert re.search(r"^codec +100mbit +×none +1gbit +×none +10gbit +×none +100gbit +×none$", program.out, re.MULTILINE)
    assert re.search(
        r"^Predicted at .*100gbit: compression does not pay, .* Do not compress there\.$", program.out, re.M
    )
    folder = program.folder / "thinwire-report"
    assert {path.name for path in folder.iterdir()} == FILES
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in PLOTS)
    assert "PREDICTED, not measured" in (folder / "index.html").read_text()
    assert (folder / "demo.json").read_text() == (program.folder / "x.json").read_text()
    check_rows(record.read(str(folder / "demo.json")).rows)


def check_rows(rows: Sequence[Row]) -> None:
    assert [(row["codec"], row["feedback"]) for row in rows] == [
        ("none", "none"), ("bf16", "none"), ("lloyd2", "none+moments"),
    ]  # fmt: skip
    assert [row["bytes_from"] for row in rows] == ["formula", "formula", "transport"]
    none, bf16, lloyd2 = (row["bytes_per_step"] for row in rows)
    assert (none, bf16) == (4 * 21408, 2 * 21408)  # a ring of two: each sends as much as it has
    assert isinstance(lloyd2, int | float)
    assert 21408 * 2 / 8 < lloyd2 < 21408 * 4 / 8  # and vectors in 16 bits
    curves = [row["curve"] for row in rows]
    assert all(isinstance(curve, list) and [step for step, _ in curve] == [1, 2, 3] for curve in curves)
    assert curves[0][0] == curves[1][0] == curves[2][0]  # type: ignore[index]  # weights and first batches are the same
    assert all(row["identical"] is True and row["loss_log_ratio"] is not None for row in rows)


LONG = ("-m", "thinwire", "demo", "--quick", "--steps", "15", "--codecs", "int8,lloyd2")


@pytest.mark.program(Path(__file__).with_name("terminal.py"), r"int8[^\n]+loss", *LONG)
def test_on_a_terminal_there_are_bars_and_ctrl_c_keeps_what_was_finished(program: Ended) -> None:
    assert program.status == 130, program.told
    assert program.alone
    assert "timing steps" in program.out
    assert re.search(r"none[^\n]+\d+/30 .*loss \d\.\d+.*\d\.\d MB.*\d+ s left", program.out), program.told
    assert "\x1b[1mMeasured here" in program.out
    assert re.search(r"interrupted; kept: none(, int8)?$", program.out, re.MULTILINE), program.told
    found = record.read(str(program.folder / "thinwire-report" / "demo.json"))
    assert [row["codec"] for row in found.rows] in (["none"], ["none", "int8"])
    assert found.conditions["interrupted"] is True
    assert (program.folder / "thinwire-report" / "loss.png").is_file()


# --- the runs ---------------------------------------------------------------------------------------------------------


def watched(group: dist.ProcessGroup, plan: TrainPlan, cuts: Sequence[int]) -> tuple[list[Look], Trained]:
    """A run in pieces, as the parent asks for them."""
    bench.begin(plan, TrainingRun(plan.schemes[1], 0))
    looks = [bench.advance(count) for count in cuts]
    return looks, bench.finish()


def learned(group: dist.ProcessGroup, plan: TrainPlan) -> Trained:
    return train.train(plan, TrainingRun(plan.schemes[1], 0))


def test_looking_on_changes_nothing(ranks: RankPool) -> None:
    plan = a_plan()
    outcomes = ranks(2).run(learned, plan)
    for cuts in ([5], [2, 3], [1] * 5):
        seen = ranks(2).run(watched, plan, cuts)
        assert [outcome for _, outcome in seen] == outcomes
        for looks, _ in seen:
            assert len({look.sent for look in looks}) == len(cuts)
            assert looks[0].params == 21408


@given(st.integers(1, 5000))
def test_slices_cover_a_run(steps: int) -> None:
    cuts = list(bench._slices(steps))
    assert [step for first, last in cuts for step in range(first, last)] == list(range(steps))
    assert len(cuts) <= bench.LOOKS


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("codec", ["none", "bf16"])
def test_bytes_of_torch_are_those_the_cost_model_counts(world: int, codec: str) -> None:
    predicted = check.predicted(a_row(codec, world=world), "1gbit", OWN)
    assert predicted is not None
    assert bench.ring_bytes(schemes.parse(codec), 250_000, world) == pytest.approx(predicted.bytes, rel=1e-3)


def test_bytes_that_nobody_knows() -> None:
    for name in ("int8", "powersgd1", "onebit"):
        assert bench.ring_bytes(schemes.parse(name), 9, 2) is None


def test_bytes_are_counted_at_the_interface_of_a_shaped_link() -> None:
    plan = TrainPlan(tasks.DEMO, bench.lineup(None), 2, links.parse("1gbit"), "adam", train.QUICK)
    assert bench._bytes_columns(plan, plan.schemes[0], a_row("none")) == {"bytes_from": "interface"}


# --- what is said -----------------------------------------------------------------------------------------------------


def test_predictions_are_those_of_the_cost_model() -> None:
    rows = [a_row("none"), a_row("int8"), a_row("powersgd1", feedback="classic")]
    measured, predicted = findings.grids(rows, OWN)
    assert measured.title.endswith("bytes of none are computed from the ring formula, not counted")
    assert predicted.header == ["codec", "100mbit", "×none", "1gbit", "×none", "10gbit", "×none", "100gbit", "×none"]
    assert predicted.title.startswith("PREDICTED, not measured")
    assert OWN.source in predicted.title
    (none_ms, even), (int8_ms, gain) = (row[1:3] for row in predicted.rows[:2])
    # 50 ms of compute; 1 MB, and a bit more than a quarter of it, over 12.5 MB/s less headers; a few ms of handing over
    none, int8 = (float(text.removesuffix(" ms")) for text in (none_ms, int8_ms))
    assert 0 < none - (50 + 1e3 * 1e6 / (12.5e6 * PAYLOAD)) < 5
    assert 0 < int8 - (50 + 1e3 * 2.5e5 / (12.5e6 * PAYLOAD)) < 5
    assert even == "1.00"
    assert float(gain) == pytest.approx(none / int8, abs=0.01)
    assert predicted.rows[2][1:] == ["–"] * 8  # not modelled
    [chart] = findings.charts(rows, OWN)
    assert isinstance(chart, Bars)
    assert chart.title.startswith("PREDICTED, not measured")
    assert [values.name for values in chart.series] == ["none", "int8", "powersgd1@classic"]
    assert [values.values[0] for values in chart.series] == [pytest.approx(none, 0.01), pytest.approx(int8, 0.01), None]


@pytest.mark.parametrize("name", ["demo_1gbit.json", "demo_100mbit.json"])
def test_how_far_predictions_are_too_short(name: str) -> None:
    """The title says a number, which is that of the committed runs on shaped links."""
    found = check.compare(record.read(str(Path(__file__).parent.parent / "benchmarks" / name)), OWN)
    assert min(item.off for item in found) > -findings.TOO_SHORT
    assert f"up to {findings.TOO_SHORT:.0%} too short" in findings.grids([a_row("none")], OWN)[1].title


def test_what_was_measured_on_a_busy_machine_changes_no_prediction() -> None:
    calm, busy = ([a_row("none", none), a_row("int8", int8)] for none, int8 in ((60.0, 65.0), (200.0, 130.0)))
    assert findings.grids(calm, OWN)[1] == findings.grids(busy, OWN)[1]


def test_a_link_that_was_measured_is_not_predicted() -> None:
    rows = [a_row("none", 200.0, link="1gbit"), a_row("int8", 100.0, link="1gbit", bytes_from="interface")]
    _, predicted = findings.grids(rows, OWN)
    assert predicted.header[1::2] == ["100mbit", "10gbit", "100gbit"]
    told = findings.sentences(rows, OWN)
    assert "Measured over 1gbit: compression pays, a step in int8 is 2.00 times as fast as an uncompressed one." in told
    assert not any("Predicted at 1gbit" in sentence for sentence in told)


@pytest.mark.parametrize(
    ("ms", "spread", "expected"),
    [
        (80.0, 1.0, "compression does not pay, an uncompressed step takes 25% less than one in int8. Loopback is"),
        (59.5, 0.1, "compression does not pay, an uncompressed step takes about as long as one in int8. Loopback is"),
        (50.0, 20.0, "no clear difference"),
        (30.0, 1.0, "compression pays, a step in int8 is 2.00 times as fast as an uncompressed one."),
    ],
)
def test_what_is_said_of_measured_steps(ms: float, spread: float, expected: str) -> None:
    rows = [a_row("none"), a_row("int8", ms, step_ms_p20=ms - spread, step_ms_p80=ms + spread)]
    assert any(s.startswith(f"Measured over loopback: {expected}") for s in findings.sentences(rows, OWN))


@pytest.mark.parametrize(
    ("codecs", "speedup", "expected"),
    [
        (["int8"], 1.5, "an uncompressed one, and 1.50 times as fast as one in bf16 (torch's own hook)."),
        (["bf16", "int8"], 1.5, "int8 is 2.00 times as fast as an uncompressed one, and 1.50 times as fast as one in"),
        (["int8"], 1.01, "an uncompressed one, but bf16 (torch's own hook) does as well."),
        (["bf16"], 1.0, "a step in bf16 is 2.00 times as fast as an uncompressed one."),
    ],
)
def test_codecs_are_compared_with_bf16(codecs: list[str], speedup: float, expected: str) -> None:
    rows = [a_row("none"), *(a_row(codec, 30.0, speedup_bf16=speedup) for codec in codecs)]
    assert expected in findings.sentences(rows, OWN)[1]
    assert ("one in bf16" in findings.sentences(rows, OWN)[2]) == (codecs != ["bf16"])  # predicted, at 100mbit


def test_what_is_said_of_links() -> None:
    told = findings.sentences([a_row("none"), a_row("int8"), a_row("lloyd4")], OWN)
    assert re.search(r"^Predicted at 100mbit: compression pays, a step in lloyd4 is [1-3]\.\d\d times as fast", told[2])
    assert any(re.match(r"Predicted at .*100gbit: compression does not pay", sentence) for sentence in told)


def test_what_is_said_of_losses() -> None:
    rows = [a_row("none"), a_row("int8", 60, -0.01), a_row("lloyd4", 60, 0.02), a_row("lloyd2", 60, math.log(1.5))]
    first = findings.sentences(rows, OWN)[0]
    assert first == "Loss: int8 and lloyd4 within what another seed does to fp32; lloyd2@ef21 50.0% higher."
    assert findings.sentences([a_row("none"), a_row("int8", 60, None)], OWN)[0] == "Loss: int8 diverged."


def test_of_fp32_alone_nothing_is_said() -> None:
    assert findings.sentences([a_row("none")], OWN) == ["For your own model, ranks and links: thinwire advise."]
    assert findings.sentences([], OWN) == findings.grids([], OWN) == findings.charts([], OWN) == []


def test_a_tick_as_text() -> None:
    scheme = schemes.parse("int8")
    assert cli._shown(Tick(scheme, 30, 120, 2.5, 3.21e6, 10.0)) == {
        "steps": "30/120", "loss": "batch loss 2.500", "sent": "3.2 MB", "time": "30 s left",
    }  # fmt: skip
    last = cli._shown(Tick(scheme, 120, 120, math.nan, None, 40.26))
    assert (last["loss"], last["sent"], last["time"]) == ("batch loss nan", "bytes unknown", "40.3 s")


# --- files ------------------------------------------------------------------------------------------------------------


def test_an_earlier_report_is_replaced_and_other_files_are_left(
    measured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = measured / "thinwire-report"
    assert call().exit_code == 0
    assert {path.name for path in folder.iterdir()} == FILES
    (folder / "notes.txt").write_text("mine")
    monkeypatch.setattr(bench, "run", lambda *arguments: a_record(a_row("none")))
    result = call()
    assert result.exit_code == 0, result.output
    left = FILES - {"loss_ratio.png", "loss_bytes.png"} | {"notes.txt"}  # fp32 alone has nothing to compare
    assert {path.name for path in folder.iterdir()} == left
    assert len(record.read(str(folder / "demo.json")).rows) == 1


def test_a_directory_of_somebody_else_is_refused_before_anything_is_trained(measured: Path) -> None:
    (measured / "site").mkdir()
    (measured / "site" / "index.html").write_text("mine")
    result = call("--out", "site")
    assert result.exit_code == 2
    assert "site holds files and no earlier demo (demo.json): name a new or an empty directory" in said(result.stderr)
    assert (measured / "site" / "index.html").read_text() == "mine"


@pytest.mark.parametrize("path", ["taken", "taken/below", "/proc/nothing/below"])
def test_a_directory_that_cannot_be_made_is_refused_before_anything_is_trained(
    path: str, measured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even for root, of whom os.access says that everything can be written."""
    monkeypatch.setattr(bench, "run", lambda *arguments: pytest.fail("trained"))
    (measured / "taken").write_text("mine")
    result = call("--out", path)
    assert result.exit_code == 2
    assert f"{path} cannot be written" in said(result.stderr)
    assert (measured / "taken").read_text() == "mine"


def test_json_on_standard_output_is_json_alone(measured: Path) -> None:
    result = call("--json", "-", "--out", "deep/er")
    assert result.exit_code == 0, result.output
    assert len(record.loads(result.stdout).rows) == 3
    assert (measured / "deep" / "er" / "index.html").is_file()
    assert "wrote deep/er/index.html" in result.stderr


def test_without_matplotlib_the_tables_are_printed_and_the_record_is_kept(
    measured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draw, "find_spec", lambda name: None)
    result = call()
    assert result.exit_code == 0
    assert "PREDICTED, not measured" in result.stdout
    assert "no page, no plots: plots are drawn by matplotlib, which is not installed: pip install" in result.stderr
    assert [path.name for path in (measured / "thinwire-report").iterdir()] == ["demo.json"]
    result = call("--out", "asked-for")
    assert result.exit_code == 1
    assert "Error: plots are drawn by matplotlib" in result.stderr
    assert not (measured / "asked-for").exists()


def test_a_report_that_cannot_be_written(measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_write", lambda *arguments: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    result = call()
    assert result.exit_code == 1
    assert "PREDICTED, not measured" in result.stdout  # what was measured is not lost
    assert "Error: thinwire-report cannot be written: No space left on device" in result.stderr
    assert list(measured.iterdir()) == []


def test_a_record_that_cannot_be_written_costs_nothing_else(measured: Path) -> None:
    result = call("--json", "/dev/full")
    assert result.exit_code == 1
    assert "PREDICTED, not measured" in result.stdout
    assert "Error: /dev/full cannot be written: No space left on device" in result.stderr
    assert (measured / "thinwire-report" / "demo.json").is_file()


def test_ctrl_c_before_the_first_codec_is_finished(measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any) -> Record:
        raise Interrupted(a_record(interrupted=True))

    monkeypatch.setattr(bench, "run", interrupted)
    result = call()
    assert result.exit_code == 130
    assert result.stdout == ""
    assert "interrupted; no codec was finished, nothing is kept" in result.stderr
    assert list(measured.iterdir()) == []
    assert call("--out", "deep/er").exit_code == 130
    assert list(measured.iterdir()) == []


# --- flags ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--world", "1"], "--world"),
        (["--steps", "0"], "--steps"),
        (["--codecs", "int8,int9"], "unknown codec 'int9'; known: none, bf16"),
        (["--codecs", "lloyd2@maybe"], "feedback must be one of auto, none, classic, ef21"),
        (["--link", "fast"], "expected a rate such as 100mbit or 1gbit, got 'fast'"),
        (["--json", "/no/such/folder/x.json"], "cannot be written"),
        (["--turbo"], "No such option: --turbo (Possible options: --codecs, --json, --link, --out, --quick"),
    ],
)
def test_bad_flags(flags: list[str], complaint: str, measured: Path) -> None:
    result = call(*flags)
    assert result.exit_code == 2, result.output
    assert complaint in said(result.stderr)
    assert list(measured.iterdir()) == []


def test_what_a_run_is_asked_for(measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(bench, "run", lambda watch, *rest: asked.append(rest) or a_record(a_row("none")))  # type: ignore[func-returns-value]
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(cli, "_write", lambda *arguments: None)
    call()
    call("--world", "3", "--codecs", "int4:block=32,mode=affine,int8", "--codecs", "auto", "--steps", "7",
         "--link", "100mbit", "--quick")  # fmt: skip
    named = ["int4:block=32,mode=affine", "int8", "auto"]
    assert asked == [(2, None, None, None, False), (3, named, 7, links.parse("100mbit"), True)]


def test_a_user_shapes_links_as_root_of_a_namespace_of_his_own(measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, list[str]]] = []

    def start(name: str, arguments: list[str]) -> None:
        started.append((name, arguments))
        raise SystemExit(0)

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "execvp", start)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "")  # which the command sets, for what it starts
    monkeypatch.setattr(sys, "argv", ["thinwire", "demo", "--link", "1gbit"])
    monkeypatch.setattr(links, "_run", lambda *command, check=True: None)  # the trial succeeds
    assert call("--link", "1gbit").exit_code == 0
    [(name, arguments)] = started
    assert name == "unshare"
    assert arguments[-6:] == ["sh", sys.executable, "-m", "thinwire", "demo", "--link", "1gbit"][-6:]


def test_where_links_cannot_be_shaped_the_error_says_why(measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*command: str, check: bool = True) -> None:
        raise links.LinkError("`unshare ...` failed: Operation not permitted")

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(links, "_run", refused)
    result = call("--link", "1gbit")
    assert result.exit_code == 1
    told = said(result.stderr)
    assert (
        "--link needs root (run it with sudo), or user namespaces that may hold networks: `unshare ...` failed" in told
    )
    assert "Without --link the ranks talk over loopback" in told
