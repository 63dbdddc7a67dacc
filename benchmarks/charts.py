"""Bar charts of records, as PNG files."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from benchmarks.kinds import alike, listed
from thinwire.errors import ThinwireError
from thinwire.tools import recommend
from thinwire.tools.bench.record import Record, Row
from thinwire.tools.report import number, significant, text

MOST_BARS = 40  # of a chart; a record with more rows is read as a table
COLORS = ("#0072b2", "#c94f00", "#007f5f", "#a8488a")  # distinct for the color-blind, too
# By kind: the name of the file, the axis, and the columns that are drawn beside each other.
_CHARTS: dict[str, Sequence[tuple[str, str, dict[str, str]]]] = {
    "codec": [("nmse", "NMSE: squared error / squared norm", {"nmse": "NMSE"})],
    "kernels": [("share", "speed, share of a copy of the same bytes", {"copy_share": "share"})],
    "collectives": [
        ("speedup", "speedup over torch's own", {"speedup_plain": "over fp32", "speedup_bf16": "over bf16"}),
    ],
    "train": [
        ("loss", "ln(loss / fp32's loss)", {"loss_log_ratio": "log ratio"}),
        ("step_time", "time per step, ms", {"step_ms": "ms"}),
        ("bytes", "bytes sent per rank and step", {"bytes_per_step": "bytes"}),
    ],
    "qat": [("accuracy", "accuracy", {"accuracy": "accuracy"})],
    "link": [("rate", "Gbit/s", {"gbit_per_s": "Gbit/s"})],
}
_LABELS = {"codec": ("distribution",), "kernels": ("op", "dtype", "numel"), "collectives": ("verb", "numel", "link")}


class PlotError(ThinwireError, RuntimeError):
    """Charts were asked for and cannot be drawn here."""


@dataclass(frozen=True)
class BarChart:
    """Values by label, a bar for each series; None draws nothing."""

    name: str  # of its file
    title: str
    axis: str
    labels: Sequence[str]
    series: dict[str, list[float | None]]
    mark: float | None = None  # a line to compare with


def check() -> None:
    if find_spec("matplotlib") is None:
        raise PlotError("plots are drawn by matplotlib, which is not installed: pip install 'thinwire[bench]'")


def of(record: Record) -> list[BarChart]:
    """What can be drawn of a record: a chart per group of rows that belong together."""
    found = []
    for rows in alike(record.rows, *_LABELS.get(record.kind, ()), "world"):
        where = ", ".join(part for part in listed(rows, "task", "verb", "distribution", "op", "link") if len(part) > 1)
        for name, axis, columns in _CHARTS.get(record.kind, ()):
            series = {label: [number(row.get(column)) for row in rows] for column, label in columns.items()}
            if len(rows) <= MOST_BARS and any(value is not None for values in series.values() for value in values):
                mark = 1.0 if name == "speedup" else None
                found.append(BarChart(name, f"{where}: {axis}", axis, list(map(_label, rows)), series, mark))
    return found


def _label(row: Row) -> str:
    if "feedback" in row and "task" in row:
        return recommend.scheme_of(row)
    return " ".join(
        text(row[name]) for name in ("codec", "method", "weight_bits", "algorithm", "nbytes") if row.get(name)
    )


def png(chart: BarChart) -> bytes:
    """The chart on white, under its title. pyplot, which keeps figures alive, is not used."""
    check()
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"text.parse_math": False, "font.size": 9.5, "axes.axisbelow": True}):
        thick = 0.8 / len(chart.series)
        height = 1.2 + 0.25 * len(chart.labels) * max(1.0, 0.7 * len(chart.series))
        figure = Figure(figsize=(6.4, height), layout="constrained", facecolor="white")
        axes = figure.add_subplot()
        for number_, (name, values) in enumerate(chart.series.items()):
            places = [place + thick * (number_ - (len(chart.series) - 1) / 2) for place in range(len(chart.labels))]
            bars = axes.barh(
                places, [value or 0.0 for value in values], 0.9 * thick, color=COLORS[number_ % 4], label=name
            )
            axes.bar_label(bars, [significant(value) for value in values], padding=3, fontsize=8)
        if chart.mark is not None:
            axes.axvline(chart.mark, color="black", linestyle="--", linewidth=1)
        axes.set_yticks(range(len(chart.labels)), [label[:40] for label in chart.labels])
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_xlabel(chart.axis)
        axes.grid(axis="x", color="#d5dae0")
        axes.spines[["top", "right"]].set_visible(False)
        if len(chart.series) > 1:
            axes.legend(frameon=False)
        figure.suptitle(chart.title[:90], x=0.01, ha="left", fontsize=10, fontweight="bold")
        data = io.BytesIO()
        figure.savefig(data, format="png", dpi=150, metadata={"Software": None})
    return data.getvalue()
