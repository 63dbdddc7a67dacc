"""Reports: CSV, charts, the page (in a real browser where there is one), and two records compared."""

import contextlib
import csv
import dataclasses
import functools
import html
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, strategies as st
from rich.console import Console
from typer.testing import CliRunner, Result

from cases import LETTERS, generated
from thinwire.errors import RecordError
from thinwire.tools import rule
from thinwire.tools.bench import record
from thinwire.tools.bench.record import Record, Row
from thinwire.tools.cli.app import app
from thinwire.tools.report import cells, charts, compare, draw, kinds, page, tables
from thinwire.tools.report.charts import Bars, Lines
from thinwire.tools.report.draw import DARK, LIGHT, Palette

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
HOSTILE = "</style><script>document.title='broken'</script>\" onload=\"x' &amp; $\\frac{1}$ \x1b[31m\x00\ud800 é 漢"


def committed(name: str) -> Record:
    return record.read(str(BENCHMARKS / name))


@functools.cache
def here() -> dict[str, record.Value]:
    return record.conditions(torch.device("cpu"))


def made(kind: str, rows: list[Row], **conditions: record.Value) -> Record:
    return Record(kind, {**here(), **conditions}, rows)


def train_row(codec: str, **columns: record.Value) -> Row:
    row: Row = dict.fromkeys(record.COLUMNS["train"])
    labels: Row = {"task": "gpt", "codec": codec, "feedback": "none", "world": 2, "link": "1gbit", "seeds": 3}
    return {**row, **labels, **columns}


def qat_record() -> Record:
    trained: list[Row] = [
        {"task": "digits", "method": method, "weight_bits": bits, "act_bits": bits, "seeds": 5,
         "train_loss": loss / bits, "train_loss_error": 0.001, "accuracy": 0.98 - loss / 10}
        for method, loss in (("lsq", 0.01), ("absmax", 0.4)) for bits in (2, 4)
    ]  # fmt: skip
    speed: Row = {"op": "forward_backward", "backend": "cpu", "device": "cpu", "numel": 1024, "ms_p50": 0.5,
                  "times_floor": 1.2, "times_torch": 3.5, "peak_bytes_per_element": 4.0}  # fmt: skip
    return made("qat", [*trained, speed])


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), prog_name="thinwire")


# --- records as CSV, and their curves ---------------------------------------------------------------------------------


TEXTS = st.text(LETTERS)
VALUES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS


@generated(40)
@given(st.lists(st.dictionaries(st.text(LETTERS, min_size=1), VALUES, max_size=4), max_size=4))
def test_csv_holds_what_the_rows_hold(rows: list[Row]) -> None:
    written = record.as_csv(Record("codec", {"date": "today"}, rows))
    header, *lines = csv.reader(io.StringIO(written, newline=""))
    assert written.count("\n") == len(lines) + 1 == len(rows) + 1
    assert header[-1] == "conditions.date"
    names = list(dict.fromkeys(name for row in rows for name in row))
    for row, line in zip(rows, lines, strict=True):
        assert line[-1] == "today"
        for name, told in zip(names, line, strict=False):
            value = row.get(name)
            same = told == " ".join((value or "").splitlines()) if isinstance(value, str | None) else None
            assert json.loads(told) == value if same is None else same


def test_a_curve_survives_json_and_csv() -> None:
    row = {**dict.fromkeys(record.COLUMNS["train"]), "curve": [[0, 2.5], [10, math.inf]]}
    written = made("train", [row])
    kept = [[0, 2.5], [10, None]]  # JSON has no infinity
    assert record.loads(record.dumps(written)).rows[0]["curve"] == kept
    (line,) = csv.DictReader(io.StringIO(record.as_csv(written)))
    assert json.loads(line["curve"]) == kept


@pytest.mark.parametrize(
    ("column", "value", "complaint"),
    [
        ("note", [1], "row 0: expected 'note' to be one text, number, true, false or null, got a list"),
        ("note", {"a": 1}, "got a dict"),
        ("curve", [[1, 2, 3]], "row 0: expected 'curve' to be a list of [step, value], got a list"),
        ("curve", 3.5, "got a float"),
        ("loss", math.nan, "NaN is no JSON number; what is not finite is null"),
    ],
)
def test_columns_that_are_not_flat_are_refused(column: str, value: Any, complaint: str) -> None:
    data = json.loads(record.dumps(made("train", [train_row("int8")])))
    data["rows"][0][column] = value
    with pytest.raises(RecordError, match=re.escape(complaint)):
        record.loads(json.dumps(data))


# --- cells ------------------------------------------------------------------------------------------------------------


@generated(40)
@given(TEXTS | st.floats() | st.integers() | st.none() | st.booleans())
def test_what_is_printed_has_no_control_codes(value: record.Value) -> None:
    shown = cells.text(value)
    assert shown.isprintable()
    shown.encode()


@generated(40)
@given(st.floats() | st.sampled_from([10**400, -(10**400)]))
def test_numbers_that_are_not_finite_are_dashes(value: float) -> None:
    for show in (cells.significant, cells.scientific, cells.signed, cells.percent, lambda x: cells.fixed(x, 2)):
        assert (show(value) == cells.ABSENT) == (not abs(value) <= sys.float_info.max)


@pytest.mark.parametrize("columns", [60, 80, 100, 240])
@pytest.mark.parametrize("whole", [True, False])
def test_a_narrow_terminal_gets_fewer_columns_and_no_broken_number(columns: int, whole: bool) -> None:
    grid = dataclasses.replace(kinds.grids(committed("collectives_1gbit.json"))[0], title="title")
    screen = Console(file=io.StringIO(), width=columns, force_terminal=True, color_system=None)
    screen.shows_all = whole  # type: ignore[attr-defined]
    tables.show_grid(grid, screen)
    shown = screen.file.getvalue().splitlines()[1:]  # type: ignore[attr-defined]
    kept = len(grid.header)
    if not whole and columns < 240:
        assert max(map(len, shown)) <= columns
        told = " ".join(" ".join(shown).split())
        left = re.search(r"Left out: (.*)\. --all shows them\.", told)
        assert left is not None
        kept -= len(left[1].split(", "))
        assert grid.labels < kept < len(grid.header)
    rows = [line.split() for line in shown if "─" not in line][1:][: len(grid.rows)]
    assert rows == [" ".join(row[:kept]).split() for row in grid.rows]


def test_markdown_shows_what_a_record_says_and_obeys_none_of_it() -> None:
    row = train_row("<img src=x onerror=alert(1)>", task="[x](javascript:y)", feedback="`*a*`")
    told = tables.markdown(made("train", [row], cpu="<script>", commit="<b>"))
    assert not re.search(r"<(img|script|b)|(?<!\\)\[|(?<!\\)[`*]", told)
    assert "&lt;img src=x onerror=alert(1)&gt;" in told
    assert "\\[x\\](javascript:y)" in told


def test_markdown_shows_the_names_of_files_as_they_are(tmp_path: Path) -> None:
    paths = [written(tmp_path / name, made("kernels", [kernel(1.0)])) for name in ("<i>*.json", "b.json")]
    assert call("report", *paths, "--markdown").stdout.startswith("old: &lt;i&gt;\\*.json\n\n")


def test_qat_tables_are_of_training_and_of_speed() -> None:
    trained, speed = kinds.grids(qat_record())
    assert trained.header == ["method", "W", "A", "seeds", "train loss", "± (loss)", "accuracy"]
    assert trained.title.endswith("(task digits)")
    assert trained.rows[0] == ["lsq", "2", "2", "5", "5.00e-3", "1.00e-3", "97.90%"]
    assert speed.header == ["op", "ms", "×floor", "×torch", "bytes"]
    assert speed.title.endswith("(backend cpu, device cpu, numel 1024)")
    assert speed.rows == [["forward_backward", "0.500", "1.20", "3.50", "4.00"]]


@pytest.mark.parametrize("name", sorted(path.name for path in BENCHMARKS.glob("*.json")))
def test_no_two_columns_have_one_name(name: str) -> None:
    for grid in kinds.grids(committed(name)):
        assert len(set(grid.header)) == len(grid.header)
        assert 0 < len(grid.told[0]) < 80
        assert "".join(grid.told) == grid.title
    assert "1 threads" not in tables.markdown(committed(name))


# --- charts -----------------------------------------------------------------------------------------------------------


RECORDS = ("codec_cpu", "kernels_cpu_aarch64", "collectives_1gbit", "train_digits")


def every_kind() -> list[Record]:
    return [*(committed(f"{name}.json") for name in RECORDS), qat_record()]


@functools.cache
def whole_page() -> str:
    """A page of every kind: drawn once for all tests."""
    cards = [page.Card("Verdict", a_choice("use(it)"))]
    grids = [cells.TextGrid("told", ["a"], [["b"]])]
    return page.page(every_kind(), title="All kinds", notes=["A note."], cards=cards, grids=grids)


def a_choice(code: str, name: str = "int8") -> rule.Choice:
    plain = rule.Way("fp32", "none", 1.0, is_exact=True)
    loss = rule.Loss(0.0, 0.1, 3, name)
    return rule.choose([plain, rule.Way(name, code, 0.5, loss=loss)], "measured")


def drawn() -> list[tuple[charts.Chart, str]]:
    """The charts on that page, and their SVG."""
    found = [chart for made_of in every_kind() for chart in charts.of(made_of)]
    return list(zip(found, re.findall(r"<svg.*?</svg>", whole_page(), re.DOTALL), strict=True))


def test_every_chart_says_what_it_shows() -> None:
    """Title, both axes with their words, every label and every name of a legend are there to read."""
    assert len({chart.title for chart, _ in drawn()}) == len(drawn()) > 10
    for chart, picture in drawn():
        root = ElementTree.fromstring(picture)
        words = {"".join(text.itertext()).strip() for text in root.iter("text")}
        assert root.get("aria-label") == chart.title
        assert chart.axis.label in words
        series = chart.series if isinstance(chart, Bars) else chart.curves
        legend = {part.name for part in (*series, *chart.marks)}
        assert words >= (legend if len(legend) > 1 else set())
        assert words >= set(chart.labels if isinstance(chart, Bars) else [chart.across.label])


def test_a_chart_takes_its_colours_from_the_page_and_nothing_from_elsewhere() -> None:
    for _, picture in drawn():
        assert not re.findall(r"#[0-9a-f]{6}\b", picture)  # every colour has a name
        assert set(re.findall(r"var\((--\w+)\)", picture)) <= set(LIGHT.names())
        assert "http" not in picture
        identifiers = set(re.findall(r'id="([^"]*)"', picture))
        assert set(re.findall(r'(?:href="#|url\(#)([^")]*)', picture)) == identifiers


def test_a_png_has_the_chart_on_white() -> None:
    import matplotlib.image

    pixels = matplotlib.image.imread(
        io.BytesIO(draw.png(charts.of(committed("collectives_1gbit.json"))[0])), format="png"
    )
    assert pixels.shape[1] > 800
    assert pixels[0, 0, :3].tolist() == [1, 1, 1]
    for name in ("int8", "lloyd4", "lloyd2"):
        colour = LIGHT.series[draw.color_of(name) or 0]
        own = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        assert (abs(pixels[..., :3] - own).max(axis=2) < 0.01).mean() > 0.003  # its bar


def test_charts_show_the_numbers_of_the_record() -> None:
    rows = committed("train_mlp_1gbit.json").rows
    bars = {chart.name: chart for chart in charts.of(committed("train_mlp_1gbit.json")) if isinstance(chart, Bars)}
    assert list(bars["step_time"].series[0].values) == [row["step_ms"] for row in rows]
    known = [(row.get("step_ms_p20"), row.get("step_ms_p80")) for row in rows]
    assert list(bars["step_time"].series[0].spans or ()) == [None if None in span else span for span in known]
    assert bars["bytes"].axis.label == "sent per rank, MB per step"
    sent = [float(str(row["bytes_per_step"])) / 1e6 for row in rows]
    assert list(bars["bytes"].series[0].values) == pytest.approx(sent)
    rate = charts.of(committed("codec_cpu.json"))[0]
    assert isinstance(rate, Lines)
    by_name = {curve.name: list(curve.points) for curve in rate.curves}
    assert all(lost == 2 ** (-2 * bits) for bits, lost in by_name["rate-distortion bound of a Gaussian"])
    measured = [row for row in committed("codec_cpu.json").rows if row["distribution"] == "gaussian"]
    lloyd = [(row["wire_bits"], row["nmse"]) for row in measured if str(row["codec"]).startswith("lloyd")]
    assert by_name["Lloyd-Max levels after rotation"] == sorted(lloyd)
    known = {row["lloyd_max_nmse"] for row in measured if row["lloyd_max_nmse"]}  # to four digits in the chart
    drawn_levels = [lost for _, lost in by_name["Lloyd-Max quantiser of a Gaussian"]]
    assert drawn_levels == pytest.approx(sorted(known, reverse=True), rel=1e-3)


def test_losses_are_drawn_against_bytes_and_by_the_size_of_the_network() -> None:
    rows = [train_row("none"), train_row("int8", bytes_per_step=2e6, loss_log_ratio=math.log(1.1), params=1000)]
    chart = next(chart for chart in charts.of(made("train", rows)) if chart.name == "loss_bytes")
    assert isinstance(chart, Lines)
    assert [(curve.name, list(curve.points)) for curve in chart.curves] == [("int8", [(2.0, pytest.approx(10))])]
    small = [{**row, "task": "bytes-1k"} for row in rows]
    large = [{**row, "task": "bytes-9k", "params": 9000, "loss_log_ratio": 0.0} for row in rows]
    (chart,) = charts.banner([made("train", large), made("train", small)])
    assert isinstance(chart, Lines)
    assert [(curve.name, list(curve.points)) for curve in chart.curves] == [
        ("int8", [(1000, pytest.approx(10)), (9000, 0)])
    ]
    other = [{**row, "task": "gpt"} for row in small]
    assert "by_size" not in [chart.name for chart in charts.banner([made("train", large), made("train", other)])]


def test_losses_are_drawn_as_differences_to_fp32() -> None:
    rows = [train_row("none", curve=[[0, 4.0], [10, 2.0]], noise_floor=0.1),
            train_row("int8", curve=[[0, 4.0], [10, 2.2], [20, 1.5]])]  # fmt: skip
    (chart,) = charts.of(made("train", rows))
    assert isinstance(chart, Lines)
    assert (chart.name, chart.axis.label) == ("loss", "loss against fp32, %")
    assert [(curve.name, list(curve.points)) for curve in chart.curves] == [("int8", [(0, 0), (10, pytest.approx(10))])]
    assert [(mark.name, mark.low) for mark in chart.marks] == [
        ("fp32", 0),
        ("what another seed does", pytest.approx(-10.517, rel=1e-3)),
    ]
    few = [{**row, "seeds": 2} for row in rows]
    assert [mark.name for mark in charts.of(made("train", few))[0].marks] == ["fp32"]  # two seeds know no spread


@pytest.mark.parametrize("name", ["train_digits.json", "train_mlp_1gbit.json", "collectives_1gbit.json"])
def test_a_codec_has_one_colour_everywhere_and_fp32_is_grey(name: str) -> None:
    assert draw.color_of("fp32") == draw.GREY
    assert len({draw.color_of(one) for one in ("fp32", "bf16", "int8", "lloyd4", "lloyd2", "lloyd1")}) == 6
    for chart in (chart for chart in charts.of(committed(name)) if isinstance(chart, Bars)):
        assert draw._by_label(chart)
        for number, values in enumerate(chart.series):
            expected = [LIGHT.series[draw.color_of(label) or 0] for label in chart.labels]
            assert draw._colors(chart, values, number) == expected


def test_the_banner_shows_gains_by_link_and_losses(tmp_path: Path) -> None:
    gain, loss = charts.banner([committed(f"train_{name}.json") for name in ("mlp_100mbit", "mlp_1gbit", "gpt")])
    assert isinstance(gain, Bars)
    assert isinstance(loss, Bars)
    assert list(gain.labels) == ["100mbit, 4 ranks", "1gbit, 2 ranks"]
    rows = committed("train_mlp_100mbit.json").rows
    shown = {values.name: values.values[0] for values in gain.series}
    assert shown["lloyd4"] == rows[2]["speedup_plain"]
    assert shown["bf16"] == pytest.approx(1 / float(str(rows[0]["speedup_bf16"])))
    assert "sign" not in loss.labels
    path = tmp_path / "banner.png"
    files = [str(BENCHMARKS / f"train_{name}.json") for name in ("mlp_1gbit", "gpt")]
    assert call("report", *files, "--png", str(path)).stderr.endswith(f"wrote {path}\n")
    assert path.read_bytes().startswith(b"\x89PNG")


def words(chart: charts.Chart) -> list[str]:
    """What can be read on a chart."""
    return ["".join(part.itertext()).strip() for part in ElementTree.fromstring(draw.svg(chart, "x")).iter("text")]


@pytest.mark.parametrize(
    "ends", [(1.1, 1.15), (1.1, 2.5), (4, 9), (70, 260), (3.2, 9.9), (60, 1000), (2, 300), (1e-8, 1)]
)
def test_a_logarithmic_axis_has_numbers_whatever_it_holds(ends: tuple[float, float]) -> None:
    bars = Bars("x", "title", charts.Axis("axis", log=True), ["from", "to"], [charts.Values("ends", ends)])
    numbers = [float(word) for word in words(bars) if word not in ("axis", "from", "to")]
    assert len([number for number in numbers if 0.9 * ends[0] < number < 1.1 * ends[1]]) in range(3, 10)


def test_charts_of_what_no_run_measures() -> None:
    """Negative errors, labels that are numbers, numbers that are labels or beyond all axes: drawn, or left out."""
    ratios = {"loss_log_ratio": 0.1, "loss_log_ratio_error": -1.0, "bytes_per_step": 9, "noise_floor": 1e308}
    far = [[0, 1e308], [1e308, 1], [1, 2], [2, -1e308]]
    train = [
        train_row("int8", **ratios, step_ms="long", curve=far),
        train_row("int4", step_ms=1e308, compute_ms=-1e308),
    ]
    sent = [{**row, "verb": 3, "codec": 4, "numel": size} for size, row in enumerate(collectives())]
    for odd in (made("train", train), made("collectives", sent)):
        assert [draw.svg(chart, "x") for chart in charts.of(odd)]


def collectives() -> list[Row]:
    return committed("collectives_1gbit.json").rows


def test_a_record_without_rows_has_no_charts() -> None:
    assert [charts.of(made(kind, [])) for kind in record.COLUMNS] == [[]] * len(record.COLUMNS)


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("palette", [LIGHT, DARK])
def test_colours_stand_out_from_their_page(palette: Palette) -> None:
    """WCAG 2: 4.5 for text, of which coloured rows and links are too."""
    assert contrast(palette.ink, palette.page) > 7
    assert min(contrast(colour, palette.page) for colour in palette.series) > 4.5


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(draw, "find_spec", lambda name: None)
    path = str(BENCHMARKS / "collectives_1gbit.json")
    for flag in ("--png", "--html"):
        result = call("report", path, flag, str(tmp_path / "out"))
        assert result.exit_code == 1
        assert "pip install 'thinwire[report]'" in result.stderr
        assert result.stdout == ""  # before anything is printed
    assert call("report", path).exit_code == 0


# --- the page ---------------------------------------------------------------------------------------------------------


class Outline(HTMLParser):
    """The elements of a page, and faults in how they are nested."""

    VOID = ("meta", "link", "br", "path", "use")  # of SVG: ElementTree closes them itself

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def test_the_page_has_a_structure() -> None:
    outline = Outline(whole_page())
    assert whole_page().startswith("<!doctype html>")
    assert outline.all("html") == [{"lang": "en"}]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in outline.all("meta")
    assert [len(outline.all(tag)) for tag in ("h1", "main", "title", "header", "footer")] == [1] * 5
    assert len(outline.all("h2")) == len(outline.all("section")) == len(every_kind()) + 2  # By link, and a card
    pictures = sum(len(charts.of(found)) for found in every_kind())
    assert len(outline.all("svg")) == len(outline.all("figure")) == len(outline.all("figcaption")) == pictures
    count = len(outline.all("table")) - 1  # the overview, which comes first
    assert count == len(outline.all("caption")) == len(outline.all("thead")) - 1 == 1 + len(every_kind()) + 1
    assert whole_page().index("<nav") < whole_page().index("<figure")
    assert {head.get("scope") for head in outline.all("th")} == {"col", "row"}


def test_the_page_refers_to_itself_alone() -> None:
    outline = Outline(whole_page())
    identifiers = [found["id"] for _, found in outline.elements if "id" in found]
    assert len(set(identifiers)) == len(identifiers)
    for tag, found in outline.elements:
        assert tag not in ("script", "iframe", "object", "embed", "img")
        assert not any(name.startswith("on") or name == "src" for name in found)
        for name in ("href", "aria-labelledby"):
            target = str(found.get(name, "data:,"))
            assert target == "data:," or target.removeprefix("#") in identifiers, target
    assert "http" not in whole_page().replace("http-equiv", "")
    assert "@import" not in whole_page()
    assert not re.search(r"url\((?!#)", whole_page())


def test_every_string_is_escaped() -> None:
    """A record may say anything: in cells, labels, legends, headings, conditions, notes and titles."""
    row: Row = {**committed("collectives_1gbit.json").rows[0], "codec": HOSTILE, "link": HOSTILE, "verb": HOSTILE}
    trained = [train_row(name, task=HOSTILE, step_ms=3.0, curve=[[0, 1.0], [1, 0.5]]) for name in ("none", HOSTILE)]
    records = [made(kind, found, cpu=HOSTILE, device=HOSTILE, commit=HOSTILE)
               for kind, found in (("collectives", [row]), ("train", trained))]  # fmt: skip
    grid = cells.TextGrid(HOSTILE, [HOSTILE], [[HOSTILE]])
    cards = [page.Card(HOSTILE, a_choice(HOSTILE, HOSTILE))]
    text = page.page(records, title=HOSTILE, notes=[HOSTILE], cards=cards, grids=[grid], names=[HOSTILE, HOSTILE])
    text.encode()
    outline = Outline(text)
    assert outline.all("script") == []
    assert len(outline.all("style")) == 1
    assert not any(name.startswith("on") for _, found in outline.elements for name in found)
    assert "document.title='broken'" in "".join(outline.words)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\ud800]", text)


def test_write_gives_a_page_and_a_png_of_every_chart(tmp_path: Path) -> None:
    first = train_row("none", step_ms=4.0, bytes_per_step=4000, curve=[[0, 2.0], [5, 1.0]])
    other = train_row("int8", step_ms=2.0, curve=[[0, 2.0], [5, 1.1]])
    records = [made("train", [first, other]), made("train", [train_row("int8", step_ms=2.0)])]
    paths = page.write(records, tmp_path / "new" / "report", title="Demo", notes=["Two ranks."])
    names = ["index.html", "loss.png", "bytes.png", "step_time.png", "step_time-2.png"]
    assert [path.name for path in paths] == names
    assert "<h1>Demo</h1><p>Two ranks.</p>" in paths[0].read_text(encoding="utf-8")
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths[1:])
    assert sorted(path.name for path in paths) == sorted(path.name for path in paths[0].parent.iterdir())


def test_report_writes_to_a_file_or_a_directory(tmp_path: Path) -> None:
    path = str(BENCHMARKS / "kernels_cpu_aarch64.json")
    targets = (("one.html", "one.html"), ("TWO.HTM", "TWO.HTM"), ("folder", "folder/index.html"))
    for target, written in targets:
        result = call("report", path, "--html", str(tmp_path / target), "--markdown")
        assert result.exit_code == 0, result.output
        assert result.stderr == f"wrote {tmp_path / written}\n"
        assert result.stdout.startswith("Backend cpu")
        assert "<figure>" in (tmp_path / written).read_text(encoding="utf-8")
    assert call("report", path, "--png", str(tmp_path / "plots")).exit_code == 0
    assert [found.name for found in (tmp_path / "plots").iterdir()] == ["kernels.png"]


@pytest.mark.parametrize("flag", ["--html", "--png"])
@pytest.mark.parametrize("path", ["", "-"])
def test_pages_and_plots_need_a_path(flag: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = call("report", str(BENCHMARKS / "kernels_cpu_aarch64.json"), flag, path)
    assert result.exit_code == 2
    assert f"expected a path, got {path!r}" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_or_drawn_is_said(tmp_path: Path) -> None:
    path, taken = str(BENCHMARKS / "kernels_cpu_aarch64.json"), tmp_path / "file"
    taken.touch()
    for flag in ("--png", "--html"):
        other, there = {"--png": "--html", "--html": "--png"}[flag], tmp_path / flag
        result = call("report", path, flag, str(taken), other, str(there))
        assert result.exit_code == 1
        assert re.search(rf"Error: {taken}\S* cannot be written: (File exists|Not a directory)", result.stderr)
        assert list(there.iterdir())  # what can be written is
    result = call("report", path, "--png", str(tmp_path / "x.png"))
    assert "x.png shows gains by link and losses of training records; a directory gets every plot" in result.stderr
    empty = written(tmp_path / "empty.json", made("codec", []))
    result = call("report", empty, "--png", str(tmp_path / "plots"), "--html", str(tmp_path / "empty.html"))
    assert result.exit_code == 0
    assert result.stderr.endswith("no plots: the records hold nothing to draw\n")
    assert "<p>codec: no rows</p>" in (tmp_path / "empty.html").read_text(encoding="utf-8")


# --- the page in a browser --------------------------------------------------------------------------------------------


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Frames of the same origin, so that this page may look into them; a frame's page prefers the colours of its frame.
# What it finds is read from its own document.
PROBE = """<!doctype html><title>probe</title><style>iframe{border:0}</style>
<iframe id=360-light src=/page style="width:360px;height:700px;color-scheme:light"></iframe>
<iframe id=360-dark src=/page style="width:360px;height:700px;color-scheme:dark"></iframe>
<iframe id=1200-light src=/page style="width:1200px;height:700px;color-scheme:light"></iframe>
<iframe id=1200-dark src=/page style="width:1200px;height:700px;color-scheme:dark"></iframe>
<pre id=found></pre>
<script>
function look(frame) {
  const page = frame.contentDocument, root = page.documentElement;
  const style = frame.contentWindow.getComputedStyle(page.body);
  const all = (selector) => [...page.querySelectorAll(selector)];
  const box = (element) => element.getBoundingClientRect();
  const text = page.querySelector('svg text');
  return {
    title: page.title, wide: root.scrollWidth, view: root.clientWidth, tables: all('table').length,
    scrolled: all('.scroll').filter(part => part.scrollWidth > part.clientWidth).length,
    outside: all('svg, p, h1, h2, figcaption, .scroll, .card, code').filter(
      part => box(part).right > root.clientWidth + 1).length,
    flat: all('svg').filter(part => box(part).height < 50).length, pictures: all('svg').length,
    page: style.backgroundColor, ink: style.color, words: frame.contentWindow.getComputedStyle(text).fill,
    high: Math.min(...all('svg text').map(part => box(part).height).filter(high => high)),
    lost: all('.scroll').filter(part => {
      part.scrollLeft = 1e6;
      return Math.abs(box(part.querySelector('tbody th')).left - box(part).left) > 1;
    }).length,
  };
}
addEventListener('load', () => {
  const found = Object.fromEntries([...document.querySelectorAll('iframe')].map(frame => [frame.id, look(frame)]));
  document.getElementById('found').textContent = JSON.stringify(found);
});
</script>"""


@contextlib.contextmanager
def served(pages: dict[str, str]) -> Iterator[tuple[str, list[str]]]:
    """(address, paths asked for) of a server on loopback."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            body = pages.get(self.path, "").encode()
            self.send_response(200 if self.path in pages else 404)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def browse(address: str, profile: Path) -> tuple[str, list[str]]:
    """(the document as the browser leaves it, what its console said)."""
    quiet = ["--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update",
             "--disable-sync", "--disable-extensions", "--disable-quic"]  # fmt: skip
    quiet += ["--no-sandbox"] if os.geteuid() == 0 else []
    command = [str(BROWSER), "--headless", *quiet, f"--user-data-dir={profile}", "--enable-logging=stderr",
               "--virtual-time-budget=5000", "--window-size=1280,1600", "--dump-dom", address]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    return run.stdout, [line for line in run.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_a_browser_shows_the_page(tmp_path: Path) -> None:
    """At the width of a phone and of a desk, light and dark: nothing fetched, no complaint, nothing beyond the edge."""
    pages = {"/probe": PROBE, "/page": whole_page()}
    with served(pages) as (address, asked):
        document, console = browse(f"{address}/probe", tmp_path)
    assert console == []
    assert set(asked) - {"/favicon.ico"} == set(pages)  # the icon is that of the probe, which has none
    shown = re.search(r'<pre id="found">(.*?)</pre>', document)
    assert shown is not None
    assert shown[1], document[:2000]
    found = json.loads(html.unescape(shown[1]))
    assert len(found) == 4
    for name, seen in found.items():
        width, palette = int(name.split("-")[0]), LIGHT if name.endswith("light") else DARK
        assert seen["title"] == "All kinds"
        assert seen["wide"] == seen["view"] <= width  # no sideways scrolling of the page
        assert seen["outside"] == seen["flat"] == seen["lost"] == 0  # the first column stays when others are scrolled
        assert seen["pictures"] == len(Outline(whole_page()).all("svg"))
        assert seen["page"] == rgb(palette.page)
        assert seen["ink"] == seen["words"] == rgb(palette.ink)  # the words in charts too
        assert seen["high"] >= 8  # pixels of the smallest of them
        assert width > 360 or seen["scrolled"] > 0  # wide tables, in boxes of their own


def rgb(colour: str) -> str:
    return f"rgb({', '.join(str(int(colour[at : at + 2], 16)) for at in (1, 3, 5))})"


# --- two records compared ---------------------------------------------------------------------------------------------


def kernel(ms: float, spread: float = 0.02, copy: float = 1.0, **columns: record.Value) -> Row:
    """A row whose rounds lie within ±spread of their median."""
    labels: Row = {"op": "encode", "codec": "int8", "backend": "cpu", "device": "cpu", "dtype": "float32",
                   "numel": 1000, "world": 1, "threads": 1}  # fmt: skip
    times: Row = {"ms_p50": ms, "ms_p20": ms * (1 - spread), "ms_p80": ms * (1 + spread), "copy_ms": copy}
    return {**dict.fromkeys(record.COLUMNS["kernels"]), **labels, **times, **columns}


def verdicts(kind: str, old: Row, new: Row) -> dict[str, str]:
    found = compare.compare(made(kind, [old]), made(kind, [new]))
    return {change.column: change.verdict for change in found.changes}


@pytest.mark.parametrize("name", sorted(path.name for path in BENCHMARKS.glob("*.json")))
def test_a_record_is_as_good_as_itself(name: str) -> None:
    found = compare.compare(committed(name), committed(name))
    assert found.only_old == found.only_new == 0
    assert found.changes
    assert {change.verdict for change in found.changes} <= {compare.SAME, compare.UNKNOWN}
    assert all(change.range.ratio == 1 for change in found.changes)


@pytest.mark.parametrize("kind", ["codec", "collectives", "train", "qat"])
@pytest.mark.parametrize("error", [0, 0.1, 10**400])
def test_nothing_is_as_good_as_nothing(kind: str, error: float) -> None:
    """A number may be 0 in both records, or none that a computer can hold."""
    columns = set(compare.METRICS[kind]) - {"identical", "diverged"}
    names = {"ms_p20", "ms_p80", "step_ms_p20", "step_ms_p80"}
    errors = {f"{column}_error" for column in columns} | {"val_gap_error"}
    row: Row = {
        **dict.fromkeys(record.COLUMNS[kind]),
        **dict.fromkeys(columns | names, 0),
        **dict.fromkeys(errors, error),
    }
    assert set(verdicts(kind, row, row).values()) <= {compare.SAME, compare.UNKNOWN}


@generated(40)
@given(st.floats(0.2, 5), st.floats(0, 0.2), st.floats(0.5, 2))
def test_a_time_is_worse_where_it_lies_beyond_both_spreads_and_the_drift(
    factor: float, spread: float, drift: float
) -> None:
    verdict = verdicts("kernels", kernel(1.0, spread), kernel(factor, spread, copy=drift))["ms_p50"]
    low, high = factor * (1 - spread) / (1 + spread), factor * (1 + spread) / (1 - spread)
    if low > max(1, drift) * (1 + 1e-9):
        assert verdict == compare.REGRESSION
    elif high < min(1, drift) * (1 - 1e-9):
        assert verdict == compare.BETTER
    elif low < max(1, drift) * (1 - 1e-9) and high > min(1, drift) * (1 + 1e-9):
        assert verdict == compare.SAME


@generated(40)
@given(st.floats(-1, 1), st.floats(0.001, 0.1), st.floats(0.001, 0.1))
def test_a_loss_is_worse_beyond_three_standard_errors(change: float, before: float, after: float) -> None:
    old = train_row("int8", loss_log_ratio=0.0, loss_log_ratio_error=before)
    new = train_row("int8", loss_log_ratio=change, loss_log_ratio_error=after)
    limit = 3 * math.hypot(before, after)
    expected = compare.REGRESSION if change > limit else compare.BETTER if change < -limit else compare.SAME
    assert abs(abs(change) - limit) < 1e-9 or verdicts("train", old, new)["loss_log_ratio"] == expected


@pytest.mark.parametrize(
    ("old", "new", "column", "verdict"),
    [
        ({"diverged": False}, {"diverged": True}, "diverged", compare.REGRESSION),
        ({"identical": True}, {"identical": False}, "identical", compare.REGRESSION),
        ({"identical": False}, {"identical": True}, "identical", compare.BETTER),
        ({"loss_log_ratio": 0.1}, {"loss_log_ratio": None}, "loss_log_ratio", compare.REGRESSION),
        ({"loss_log_ratio": 0.1}, {"loss_log_ratio": 0.4}, "loss_log_ratio", compare.UNKNOWN),
        ({"step_ms": 1.0}, {"step_ms": 9.0}, "step_ms", compare.UNKNOWN),
        ({"bytes_per_step": 1000}, {"bytes_per_step": 1040}, "bytes_per_step", compare.SAME),
        ({"bytes_per_step": 1000}, {"bytes_per_step": 1100}, "bytes_per_step", compare.REGRESSION),
    ],
)
def test_what_becomes_of_a_training_row(old: Row, new: Row, column: str, verdict: str) -> None:
    assert verdicts("train", train_row("int8", **old), train_row("int8", **new))[column] == verdict


def test_errors_are_compared_to_the_last_digit_that_is_not_rounding() -> None:
    old = committed("codec_cpu.json").rows[5]
    lost = float(str(old["nmse"]))
    assert verdicts("codec", old, {**old, "nmse": lost * (1 + 1e-8)})["nmse"] == compare.SAME
    assert verdicts("codec", old, {**old, "nmse": lost * (1 + 1e-4)})["nmse"] == compare.REGRESSION
    assert verdicts("codec", {**old, "nmse": 0.0}, old)["nmse"] == compare.REGRESSION


def test_rows_are_matched_by_their_labels_not_by_their_place() -> None:
    old = made("kernels", [kernel(1.0), kernel(2.0, codec="int4"), kernel(9.0, op="decode")])
    new = made("kernels", [kernel(2.0, codec="int4"), kernel(1.0), kernel(5.0, op="recode")], torch="9.9")
    found = compare.compare(old, new)
    assert [(change.labels[2], change.range.ratio) for change in found.changes] == [("int4", 1), ("int8", 1)]
    assert (found.only_old, found.only_new) == (1, 1)
    grid = compare.grid(found)
    assert grid.header == ["codec", "column", "old", "new", "new/old", "noise", "verdict"]
    assert "0 regressions, 2 within noise, 1 row only in the old record, 1 row only in the new one" in grid.title
    assert f"The records differ in torch {torch.__version__} → 9.9" in grid.title


def written(path: Path, found: Record) -> str:
    record.write(found, str(path))
    return str(path)


def test_report_compares_two_records_and_fails_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = written(tmp_path / "old.json", made("kernels", [kernel(1.0), kernel(1.0, codec="int4")]))
    new = written(tmp_path / "new.json", made("kernels", [kernel(1.5), kernel(1.0, codec="int4")]))
    result = call("report", old, new)
    assert result.exit_code == 0
    assert "New over old: 1 regression, 1 within noise." in result.stdout
    assert re.search(r"^int8 +ms_p50 +1.00 +1.50 +1.500 +1.441 to 1.561 +REGRESSION$", result.stdout, re.MULTILINE)
    assert "| int8 | ms_p50 | 1.00 | 1.50 | 1.500 |" in call("report", old, new, "--markdown").stdout
    assert call("report", old, new, "--fail-on-regression").exit_code == 1
    assert call("report", new, old, "--fail-on-regression").exit_code == 0
    less = written(tmp_path / "less.json", made("kernels", [kernel(1.0)]))
    assert call("report", old, less, "--fail-on-regression").exit_code == 1  # a row that is missing may be a failure
    assert call("report", less, old, "--fail-on-regression").exit_code == 0
    monkeypatch.setattr(draw, "svg", lambda chart, prefix: "")
    text = page.page([record.read(old), record.read(new)])
    assert "Comparison: 1 regression, 1 within noise" in text
    assert '<tr class="bad"><th scope="row">int8</th>' in text
    assert "<b>New over old</b>: 1 regression, " in text


def test_several_records_are_told_apart_by_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "svg", lambda chart, prefix: "")
    (tmp_path / "later").mkdir()
    rows = [kernel(1.0)], [kernel(1.0)], [kernel(1.0, codec="int4")]
    places = (tmp_path / name for name in ("a.json", "later/a.json", "b.json"))
    old, new, other = (written(place, made("kernels", found)) for place, found in zip(places, rows, strict=True))
    for first, second, told in (
        (old, new, [f"old: {old}", f"new: {new}"]),
        (old, other, ["a.json", "b.json"]),
        (new, new, [f"old: {new}", f"new: {new}"]),
    ):
        result = call("report", first, second, "--html", str(tmp_path / "page.html"))
        assert [line for line in result.stdout.splitlines() if line.endswith(".json")] == told
        assert all(f"{name}\n\nBackend" in call("report", first, second, "--markdown").stdout for name in told)
        headings = re.findall(r"<h2[^>]*>Kernels: (.*?)</h2>", (tmp_path / "page.html").read_text(encoding="utf-8"))
        assert [heading.endswith(f" ({name})") for heading, name in zip(headings, told, strict=True)] == [True] * 2


def test_records_that_cannot_be_compared_are_printed_and_say_why(tmp_path: Path) -> None:
    old = written(tmp_path / "old.json", made("kernels", [kernel(1.0)]))
    new = written(tmp_path / "new.json", made("kernels", [kernel(1.0, codec="int4")]))
    other = str(BENCHMARKS / "train_gpt.json")
    result = call("report", old, new)
    assert result.exit_code == 0
    assert "not compared: the two kernels records share no row: none has the same part, op, codec" in result.stderr
    assert result.stdout.count("Backend cpu") == 2
    result = call("report", old, other, "--fail-on-regression")
    assert result.exit_code == 2
    assert "a kernels and a train record measure different things" in " ".join(result.stderr.split())
    result = call("report", old, "--fail-on-regression")
    assert "expected two records to compare, got 1" in " ".join(result.stderr.split())


def test_every_kind_has_labels_and_metrics_of_its_schema() -> None:
    for kind, known in record.COLUMNS.items():
        mine = (*known, *(record.QAT_SPEED if kind == "qat" else ()))
        extra = {"every", "numel", "part", "steps", "nodes", "asked", "weights"}  # added, not required
        extra |= {"gradient", "granularity", "dtype", "threads"}
        assert set(compare.LABELS[kind]) <= set(mine) | extra
        assert set(compare.METRICS[kind]) <= set(mine) | {"diverged", "identical"}
