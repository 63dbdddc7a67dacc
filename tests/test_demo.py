"""`thinwire demo`: a whole run in a pipe, one on a terminal that is interrupted, files, sentences and flags."""

import html
import io
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

from programs import Ended
from thinwire.codecs import Cast, codec
from thinwire.tools.advise import evidence, machine as machines, model, verdict
from thinwire.tools.advise.schemes import PLAIN, SumScheme
from thinwire.tools.bench import demo as bench, link as links, record, schemes, tasks, train
from thinwire.tools.bench.record import Interrupted, Record, Row
from thinwire.tools.bench.train import TrainPlan
from thinwire.tools.cli import advise, demo as cli, findings
from thinwire.tools.cli.app import app
from thinwire.tools.report import draw
from thinwire.tools.report.charts import Bars

PLOTS = {"gain.png", "loss.png", "loss_ratio.png", "loss_bytes.png", "bytes.png", "step_time.png"}
FILES = {"index.html", "demo.json", *PLOTS}
OWN = machines.recorded("cpu", "aarch64")


def call(*flags: str) -> Result:
    return CliRunner().invoke(app, ["demo", *flags], prog_name="thinwire")


def said(text: str) -> str:
    return " ".join(text.replace("│", "").split())


def a_row(codec: str, ms: float = 60.0, ratio: float | None = 0.0, **others: Any) -> Row:
    """A row as a run over loopback gives it."""
    scheme = schemes.parse(codec)
    sent = {"none": 1e6, "int8": 2.6e5}.get(scheme.label, 1.3e5)
    row: Row = dict.fromkeys(record.COLUMNS["train"])
    row |= {"task": "gpt", "optimizer": "adam", "world": 2, "link": "loopback", "parallel": "ddp", "seeds": 3}
    row |= {"params": 250_000, "steps": 5, "cores": 2, "threads": 1, "curve": [[1, 4.0], [5, 2.0]], "control": False}
    row |= {"peer": scheme.peer, "codec": scheme.label, "feedback": "ef21" if scheme.label == "lloyd2" else "none"}
    row |= {"loss": 2.0, "loss_log_ratio": ratio, "noise_floor": 0.02, "diverged": ratio is None, "compute_ms": 50.0}
    row |= {"step_ms": ms, "step_ms_p20": ms - 1, "step_ms_p80": ms + 1}
    row |= {"speedup_plain": 60.0 / ms, "speedup_bf16": 59.5 / ms}
    row |= {"bytes_per_step": sent, "bytes_from": "formula" if scheme.label == "none" else "transport"}
    return row | others


def a_record(*rows: Row, **conditions: Any) -> Record:
    return Record("train", {**record.conditions(torch.device("cpu")), **conditions}, list(rows))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A run that takes no time, in a directory of its own; a whole run, above, has real plots."""
    found = a_record(a_row("none"), a_row("int8", 70.0), a_row("lloyd2", 75.0, 0.05))
    monkeypatch.setattr(bench, "run", lambda *arguments, **named: found)
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
    (line,) = program.err.splitlines()
    assert line.startswith("wrote thinwire-report/index.html, ")
    assert "Measured here: a GPT of 21408 weights, 2 ranks on" in program.out
    assert "No verdict: this run has 2 seeds, and it takes 3 to know what another seed does" in program.out
    assert "Use " not in program.out  # a quick run claims nothing
    folder = program.folder / "thinwire-report"
    assert {path.name for path in folder.iterdir()} == FILES - {"gain.png"}
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in PLOTS - {"gain.png"})
    assert "No verdict: this run has 2 seeds" in (folder / "index.html").read_text()
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


@pytest.mark.program(Path(__file__).with_name("terminal.py"), "int8, seed 0", *LONG)
def test_on_a_terminal_there_is_a_bar_and_ctrl_c_keeps_what_was_finished(program: Ended) -> None:
    assert program.status == 130, program.told
    assert program.alone
    assert re.search(r"step times .*0/7", program.out), program.told  # two seeds of three schemes follow
    assert "\x1b[1mMeasured here" in program.out
    assert re.search(r"interrupted: [12] finished rows kept$", program.out, re.MULTILINE), program.told
    found = record.read(str(program.folder / "thinwire-report" / "demo.json"))
    assert [row["codec"] for row in found.rows] in (["none"], ["none", "int8"])
    assert found.conditions["interrupted"] is True
    assert (program.folder / "thinwire-report" / "bytes.png").is_file()


# --- the runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("codec", ["none", "bf16"])
def test_bytes_of_torch_are_those_the_cost_model_counts(world: int, codec: str) -> None:
    job, cluster, own = evidence.described(a_row(codec, world=world, link="1gbit"), OWN)
    predicted = model.predict(job, PLAIN if codec == "none" else SumScheme("ring", Cast("bf16")), cluster, own)
    assert bench.ring_bytes(schemes.parse(codec), 250_000, world) == pytest.approx(predicted.bytes, rel=1e-3)


def test_bytes_are_counted_at_the_interface_of_a_shaped_link() -> None:
    plan = TrainPlan(tasks.DEMO, bench.lineup(None), 2, links.parse("1gbit"), "adam", train.QUICK)
    assert bench._bytes_columns(plan, plan.schemes[0], a_row("none")) == {"bytes_from": "interface"}


# --- what is said -----------------------------------------------------------------------------------------------------


def trained(*others: Row, **columns: Any) -> Record:
    """A run of fp32 and a few codecs, of which lloyd2 costs too much."""
    usual = [a_row("bf16", 59.0), a_row("int8", 62.0), a_row("lloyd4", 63.0, 0.01), a_row("lloyd2", 64.0, 0.05)]
    return a_record(*({**row, **columns} for row in (a_row("none"), *(others or usual))))


def printed(found: Record) -> list[str]:
    console = Console(file=io.StringIO(), width=240)
    cli.show(found, OWN, console)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


def advised(found: Record, link: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What `thinwire advise` prints of the same job, ranks, link and losses."""
    job, cluster, own = evidence.described({**found.rows[0], "link": link}, OWN)
    losses = [evidence.losses_of(found, findings.HERE)]
    codecs = [codec(str(row["codec"])) for row in found.rows if not row["peer"]]
    judged = verdict.judge(job, cluster, own, codecs=codecs, losses=losses, buckets=(job.bucket_bytes,))
    capsys.readouterr()
    advise.print_verdict(job, cluster, own, judged)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("link", findings.LINKS)
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_demo_page_and_advise_give_one_verdict(
    link: str, world: int, measured: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same three lines, in the same order: in the terminal, on the page and in advise."""
    monkeypatch.setattr(findings, "LINKS", (link,))
    found = trained(world=world)
    cli._write(found, OWN, measured)
    shown = re.sub(r"<[^>]*>", "\n", (measured / "index.html").read_text())
    page_lines = [line.strip() for line in html.unescape(shown).splitlines() if line.strip()]
    in_terminal = three_lines(printed(found))
    assert in_terminal == three_lines(advised(found, link, capsys))
    use, *others = in_terminal
    assert "lloyd2" not in use  # the fastest on slow links, and its loss is not kept
    at = page_lines.index(others[0])
    assert page_lines[at : at + 2] == others
    assert " ".join(page_lines[at - 2 : at]) == use
    assert page_lines[at - 3] == f"Verdict for this network at {link}"


def three_lines(lines: list[str]) -> list[str]:
    (at,) = (place for place, line in enumerate(lines) if line.startswith("Gain: "))
    assert re.match(r"Use [a-z]+\d|Do not compress: ", lines[at - 1])
    assert lines[at + 1].startswith("Loss: ")
    return lines[at - 1 : at + 2]


def test_the_verdict_changes_with_the_link() -> None:
    found = trained()
    outlooks = {one.link: one.choice for one in findings.outlooks(found, OWN)}
    assert list(outlooks) == list(findings.LINKS)
    assert outlooks["100mbit"].chosen.name == "lloyd4"
    assert not outlooks["100gbit"].compress
    (grid,) = findings.links_grid(found, OWN)
    assert grid.rows[0][:2] == ["100mbit", "lloyd4"]
    assert grid.rows[-1] == ["100gbit", "do not compress", "–", "–"]
    [chart] = findings.charts(found, OWN)
    assert isinstance(chart, Bars)
    assert [values.name for values in chart.series][:2] == ["bf16", "int8"]
    for values in chart.series:
        assert all(span and span[0] <= gain <= span[1] for gain, span in zip(values.values, values.spans, strict=True))


@pytest.mark.parametrize(
    ("ms", "spread", "use"),
    [
        (80.0, 1.0, "Do not compress: "),
        (59.5, 0.1, "Do not compress: "),  # less than 3 %
        (50.0, 20.0, "Do not compress: "),  # within the scatter of the steps
        (30.0, 1.0, 'Use int8: thinwire.compress_ddp(model, "int8")'),
    ],
)
def test_on_a_link_that_was_measured_the_measured_steps_decide(ms: float, spread: float, use: str) -> None:
    int8 = a_row("int8", ms, step_ms_p20=ms - spread, step_ms_p80=ms + spread)
    first = findings.outlooks(trained(int8, link="1gbit"), OWN)[0]
    assert (first.link, first.choice.basis) == ("1gbit", "measured over 1gbit")
    assert first.choice.use.startswith(use)
    if first.choice.compress:  # torch's bf16 was timed beside them
        assert first.choice.gain == "1.9–2.1 × over bf16, 1.9–2.1 × over fp32"


def test_what_has_no_line_of_code_is_not_advised() -> None:
    peers = [a_row(name, 1.0, feedback="classic") for name in ("powersgd1", "onebit")]
    first = findings.outlooks(trained(*peers, link="1gbit"), OWN)[0]
    assert [way.name for way in first.ways] == ["fp32", "bf16"]


def test_few_seeds_and_fp32_alone_give_no_verdict() -> None:
    assert findings.outlooks(a_record(a_row("none")), OWN) == []
    few = trained(seeds=2)
    assert findings.outlooks(few, OWN) == findings.links_grid(few, OWN) == findings.charts(few, OWN) == []
    assert findings.sentences(few)[0].startswith("No verdict: this run has 2 seeds")
    assert findings.sentences(a_record()) == findings.grids(a_record(), OWN) == []


def test_what_was_measured_is_printed() -> None:
    measured = findings.grids(trained(), OWN)[0]
    assert measured.title.endswith("bytes of fp32 are computed from the ring formula, not counted")
    assert measured.rows[0] == ["fp32", "2.00", "+0.0 %", "60 ms", "1.00 ×", "1000 kB", "1.0 ×"]
    assert measured.rows[-1][:3] == ["lloyd2 + EF21", "2.00", "+5.1 %"]
    assert findings.grids(trained(a_row("int8", 60, None)), OWN)[0].rows[-1][1:3] == ["diverged", "–"]


# --- files ------------------------------------------------------------------------------------------------------------


def test_an_earlier_report_is_replaced_and_other_files_are_left(
    measured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = measured / "thinwire-report"
    assert call().exit_code == 0
    assert {path.name for path in folder.iterdir()} == FILES
    (folder / "notes.txt").write_text("mine")
    monkeypatch.setattr(bench, "run", lambda *arguments, **named: a_record(a_row("none")))
    result = call()
    assert result.exit_code == 0, result.output
    left = FILES - {"gain.png", "loss.png", "loss_ratio.png", "loss_bytes.png"} | {
        "notes.txt"
    }  # fp32 alone has nothing to compare
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
    monkeypatch.setattr(bench, "run", lambda *arguments, **named: pytest.fail("trained"))
    (measured / "taken").write_text("mine")
    result = call("--out", path)
    assert result.exit_code == 2
    assert f"{path} cannot be written" in said(result.stderr)
    assert (measured / "taken").read_text() == "mine"


def test_without_matplotlib_the_tables_are_printed_and_the_record_is_kept(
    measured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draw, "find_spec", lambda name: None)
    result = call()
    assert result.exit_code == 0
    assert "Measured here: a GPT" in result.stdout
    assert "no page, no plots: plots are drawn by matplotlib, which is not installed: pip install" in result.stderr
    assert [path.name for path in (measured / "thinwire-report").iterdir()] == ["demo.json"]
    result = call("--out", "asked-for")
    assert result.exit_code == 1
    assert "Error: plots are drawn by matplotlib" in result.stderr
    assert not (measured / "asked-for").exists()


def test_a_record_that_cannot_be_written_costs_nothing_else(measured: Path) -> None:
    result = call("--json", "/dev/full")
    assert result.exit_code == 1
    assert "Measured here: a GPT" in result.stdout
    assert "Error: /dev/full cannot be written: No space left on device" in result.stderr
    assert (measured / "thinwire-report" / "demo.json").is_file()


def test_ctrl_c_before_the_first_codec_is_finished(measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any, **named: Any) -> Record:
        raise Interrupted(a_record(interrupted=True))

    monkeypatch.setattr(bench, "run", interrupted)
    result = call()
    assert result.exit_code == 130
    assert result.stdout == ""
    assert "interrupted: 0 finished rows kept" in result.stderr
    assert list((measured / "thinwire-report").iterdir()) == []


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
        (["--turbo"], "No such option: --turbo (Possible options: --all, --codecs, --json, --link, --out, --quick"),
    ],
)
def test_bad_flags(flags: list[str], complaint: str, measured: Path) -> None:
    result = call(*flags)
    assert result.exit_code == 2, result.output
    assert complaint in said(result.stderr)
    assert list(measured.iterdir()) == []


def test_what_a_run_is_asked_for(measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(bench, "run", lambda *rest, progress: asked.append(rest) or a_record(a_row("none")))  # type: ignore[func-returns-value]
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


def test_a_record_of_peers_alone_has_no_verdict() -> None:
    found = record.read(str(Path(__file__).parent.parent / "benchmarks" / "train_mlp_1gbit.json"))
    rows: list[Row] = [
        {**row, "codec": "powersgd1", "seeds": 3, "loss_log_ratio": 0.0, "noise_floor": 0.1} for row in found.rows
    ]
    assert findings.outlooks(Record("train", found.conditions, rows), machines.recorded("cpu")) == []
