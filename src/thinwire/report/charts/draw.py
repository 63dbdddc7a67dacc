"""Charts with matplotlib: PNG files, and SVG whose colours a page may change. The only module that imports it."""

import contextlib
import functools
import io
import math
import re
import textwrap
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from thinwire.errors import ThinwireError
from thinwire.report.cells import significant
from thinwire.report.charts.look import DASHES, DPI, LIGHT, MARKERS, SETTINGS, WIDTH
from thinwire.report.charts.shapes import Axis, Band, Bars, Chart, Curve, Line, Lines, Values

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import XAxis, YAxis
    from matplotlib.figure import Figure

MANY = 24  # bars; more of them are not written beside
MARGIN, LEGEND_LINE, LEAST = 0.75, 0.2, 2.2  # inches
FEW_TENS = 200.0  # from end to end of a logarithmic axis
LETTERS = 58  # of a line of title or legend
LABEL = 32  # letters of a label; one as long as the chart is wide would leave it no room
_SVG = "{http://www.w3.org/2000/svg}"
_LEFT_OUT = {f"{_SVG}{name}" for name in ("metadata", "style", "title")}  # a style sheet would reach the whole page
_LINK = "{http://www.w3.org/1999/xlink}href"


class PlotError(ThinwireError, RuntimeError):
    """Charts were asked for and cannot be drawn here."""


def check() -> None:
    """Raise PlotError unless charts can be drawn."""
    if find_spec("matplotlib") is None:
        raise PlotError("plots are drawn by matplotlib, which is not installed: pip install 'thinwire[report]'")


def png(chart: Chart) -> bytes:
    """The chart on white, its title above it."""
    return _save(chart, "png", title=True, dpi=DPI)


def svg(chart: Chart, prefix: str) -> str:
    """The chart as an element of an HTML page, which names its colours (look.Palette.names) and writes its title.

    Identifiers begin with `prefix`, so that several charts can share a page.
    """
    root = ElementTree.fromstring(_save(chart, "svg", title=False, transparent=True, metadata=_NOTHING))
    for parent in list(root.iter()):
        for child in [child for child in parent if child.tag in _LEFT_OUT]:
            parent.remove(child)
    for element in root.iter():
        _as_html(element, prefix)
    root.set("role", "img")
    root.set("aria-label", chart.title)
    for size in ("width", "height"):  # the page decides; the viewBox keeps the proportions
        root.attrib.pop(size, None)
    return _named(ElementTree.tostring(root, encoding="unicode"))


_NOTHING = dict.fromkeys(("Date", "Creator", "Format", "Type"))


def _save(chart: Chart, form: str, *, title: bool, **options: Any) -> bytes:
    with _settings() as figure_of:
        figure = figure_of(figsize=(WIDTH, _height(chart, title)))
        _fill(figure, chart, title)
        data = io.BytesIO()
        figure.savefig(data, format=form, **options)
    return data.getvalue()


@contextlib.contextmanager
def _settings() -> "Iterator[type[Figure]]":
    """matplotlib's figures, under our settings and no one else's. pyplot, which keeps figures alive, is not used."""
    check()
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(SETTINGS)
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # a browser has more fonts
        warnings.filterwarnings("ignore", message="constrained_layout not applied")  # labels too long: they are cropped
        yield Figure


def _height(chart: Chart, title: bool) -> float:
    """In inches: as high as its labels and its legend need."""
    body = 2.3 if isinstance(chart, Lines) else len(chart.labels) * _row_height(chart)
    words = _legend_lines(chart) + (len(_title_lines(chart)) if title else 0)
    return max(LEAST, MARGIN + body) + LEGEND_LINE * words


def _row_height(chart: Bars) -> float:
    return 0.25 if _as_points(chart) else max(0.25, 0.06 + 0.17 * len(chart.series))


def _title_lines(chart: Chart) -> list[str]:
    return textwrap.wrap(chart.title, LETTERS)


def _legend(chart: Chart) -> list[str]:
    """The names in the legend; a single series without marks is named by its axis."""
    series = chart.series if isinstance(chart, Bars) else chart.curves
    names = [*(part.name for part in series), *(mark.name for mark in chart.marks)]
    return names if len(names) > 1 else []


def _short(name: str, letters: int) -> str:
    return name if len(name) <= letters else f"{name[: letters - 1]}…"


def _legend_columns(chart: Chart) -> int:
    longest = min(LETTERS, max(map(len, _legend(chart)), default=1)) + 6  # a sample is as wide as some letters
    return max(1, LETTERS // longest)


def _legend_lines(chart: Chart) -> int:
    return math.ceil(len(_legend(chart)) / _legend_columns(chart))


def _fill(figure: "Figure", chart: Chart, title: bool) -> None:
    axes = figure.add_subplot()
    if isinstance(chart, Bars):
        _fill_bars(axes, chart)
    else:
        _fill_lines(axes, chart)
    if _legend(chart):
        figure.legend(loc="outside lower left", ncols=_legend_columns(chart), borderaxespad=0.2, columnspacing=1.2)
    if title:
        figure.suptitle("\n".join(_title_lines(chart)), x=0.01, ha="left", fontsize=10, fontweight="bold")


def _fill_bars(axes: "Axes", chart: Bars) -> None:
    places = range(len(chart.labels))
    _scale(axes, chart.axis, "x")
    for number, values in enumerate(chart.series):
        (_points if _as_points(chart) else _bars)(axes, chart, values, number)
    for mark in chart.marks:
        _mark(axes, mark, "x")
    axes.set_yticks(places, [_short(label, LABEL) for label in chart.labels])
    axes.set_ylim(len(chart.labels) - 0.5, -0.5)  # the first on top
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(chart.axis.label)
    axes.grid(axis="x" if not _as_points(chart) else "both")


def _as_points(chart: Bars) -> bool:
    return chart.points or chart.axis.log


def _points(axes: "Axes", chart: Bars, values: Values, number: int) -> None:
    errors = values.errors or [None] * len(values.values)
    there = [
        (x, y, _width_of(error))
        for y, (x, error) in enumerate(zip(values.values, errors, strict=True))
        if x is not None
    ]
    axes.errorbar(
        [x for x, _, _ in there],
        [y for _, y, _ in there],
        xerr=[error for *_, error in there] if values.errors else None,
        fmt=MARKERS[number % len(MARKERS)],
        color=_colour(number),
        label=_short(values.name, LETTERS),
        elinewidth=1.2,
        alpha=0.9,
    )


def _width_of(error: float | None) -> float:
    """Of an error bar; a record may say that an error is negative, which none is."""
    return max(0.0, error or 0.0)


def _bars(axes: "Axes", chart: Bars, values: Values, number: int) -> None:
    count = len(chart.series)
    thick = 0.76 / count
    places = [place + thick * (number - (count - 1) / 2) for place in range(len(chart.labels))]
    lengths = [0.0 if value is None else value for value in values.values]
    drawn = axes.barh(places, lengths, thick * 0.9, color=_colour(number), label=_short(values.name, LETTERS))
    if count * len(chart.labels) <= MANY:
        axes.bar_label(drawn, [significant(value) for value in values.values], padding=3, fontsize=8)
        axes.margins(x=0.12)


def _fill_lines(axes: "Axes", chart: Lines) -> None:
    _scale(axes, chart.across, "x")
    _scale(axes, chart.axis, "y")
    known = 0
    for number, curve in enumerate(chart.curves):
        _curve(axes, curve, number if not curve.known else known)
        known += curve.known
    for mark in chart.marks:
        _mark(axes, mark, "y")
    axes.set_xlabel(chart.across.label)
    axes.set_ylabel(chart.axis.label)
    axes.grid()


def _curve(axes: "Axes", curve: Curve, number: int) -> None:
    dash = _dash(curve, number)
    marker = MARKERS[number % len(MARKERS)] if curve.dots and not curve.known else ""
    errors = [_width_of(error) for error in curve.errors] if curve.errors and any(curve.errors) else None
    axes.errorbar(
        [x for x, _ in curve.points],
        [y for _, y in curve.points],
        yerr=errors,
        marker=marker,
        linestyle=dash if curve.joined else "none",
        color=LIGHT.ink if curve.known else _colour(number),
        label=_short(curve.name, LETTERS),
        linewidth=1.1 if curve.known else None,
        elinewidth=1.2,
    )


def _dash(curve: Curve, number: int) -> str:
    """Where markers do not, dashes tell curves apart, in any colour."""
    if curve.known:
        return DASHES[1 + number % (len(DASHES) - 1)]
    return DASHES[(number // len(LIGHT.series) if curve.dots else number) % len(DASHES)]


def _mark(axes: "Axes", mark: Line | Band, across: str) -> None:
    """A line or band at a value of the axis `across`."""
    if isinstance(mark, Line):
        draw = axes.axvline if across == "x" else axes.axhline
        draw(mark.at, color=LIGHT.ink, linestyle="--", linewidth=1.0, label=mark.name)
    else:
        fill = axes.axvspan if across == "x" else axes.axhspan
        fill(mark.low, mark.high, color=LIGHT.series[-1], alpha=0.2, linewidth=0, label=mark.name)


def _scale(axes: "Axes", axis: Axis, which: str) -> None:
    if not axis.log:
        return
    from matplotlib.ticker import FuncFormatter

    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    ticks = axes.xaxis if which == "x" else axes.yaxis
    ticks.set_major_formatter(FuncFormatter(_plain))
    ticks.set_minor_formatter(FuncFormatter(functools.partial(_between, ticks)))


def _plain(value: float, place: int | None) -> str:
    """0.001 and 1e-05, as text without formulas."""
    return f"{value:g}"


def _between(ticks: "XAxis | YAxis", value: float, place: int | None) -> str:
    """2 and 5 have their numbers too where powers of ten are few."""
    low, high = ticks.get_view_interval()
    few = high < FEW_TENS * low
    return _plain(value, place) if few and f"{value:e}"[0] in "25" else ""


def _colour(number: int) -> str:
    return LIGHT.series[number % len(LIGHT.series)]


def _as_html(element: ElementTree.Element, prefix: str) -> None:
    """An SVG element as HTML has it: no namespaces, identifiers of its own, none that nobody refers to."""
    element.tag = element.tag.removeprefix(_SVG)
    if element.tag == "g":
        element.attrib.pop("id", None)
    if "id" in element.attrib:
        element.set("id", f"{prefix}-{element.attrib['id']}")
    if _LINK in element.attrib:
        element.set("href", element.attrib.pop(_LINK).replace("#", f"#{prefix}-"))
    for name, value in element.attrib.items():
        element.set(name, value.replace("url(#", f"url(#{prefix}-"))


def _named(text: str) -> str:
    """The SVG with the page's names for its colours."""
    for name, colour in LIGHT.names().items():
        text = re.sub(rf"(?<=: ){colour}\b", f"var({name})", text)
    return text
