"""Charts with matplotlib: PNG files, and SVG whose colours a page may change. The only module that imports it."""

import contextlib
import functools
import io
import math
import re
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal
from xml.etree import ElementTree

from thinwire.errors import ThinwireError
from thinwire.tools.report.cells import significant
from thinwire.tools.report.charts.look import DASHES, DPI, LIGHT, MARKERS, SETTINGS, WIDTH
from thinwire.tools.report.charts.shapes import Axis, Band, Bars, Chart, Curve, Line, Lines, Values

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MANY = 24  # bars; more of them are not written beside
FARTHEST = 1e100  # from zero, on an axis
MARGIN, LEGEND_LINE, LEAST = 0.75, 0.2, 2.2  # inches
# Of a logarithmic axis, by its ends' ratio: which digits are written between the powers of ten.
BETWEEN = ((10.0, "12357"), (30.0, "1235"), (500.0, "125"), (math.inf, "1"))
SHORT = 4.0  # ratio of the ends of an axis that may hold too few of these
LETTERS = 58  # of a line of title or legend
THICK = 0.76  # of a row: what its bars or points take
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
    chart = _drawable(chart)
    with _settings() as figure_of:
        figure = figure_of(figsize=(WIDTH, _height(chart, title)))
        _fill(figure, chart, title)
        data = io.BytesIO()
        figure.savefig(data, format=form, **options)
    return data.getvalue()


def _drawable(chart: Chart) -> Chart:
    """The chart without what is farther than any axis can show: matplotlib computes with the ends of an axis."""
    marks = [mark for mark in chart.marks if all(map(_is_near, _ends(mark)))]
    if isinstance(chart, Lines):
        return replace(chart, curves=list(map(_near, chart.curves)), marks=marks)
    series = [replace(part, values=[value if value is not None and _is_near(value) else None for value in part.values])
              for part in chart.series]  # fmt: skip
    return replace(chart, series=series, marks=marks)


def _near(curve: Curve) -> Curve:
    errors = curve.errors or [None] * len(curve.points)
    kept = [(x, y, error) for (x, y), error in zip(curve.points, errors, strict=True) if _is_near(x) and _is_near(y)]
    return replace(curve, points=[(x, y) for x, y, _ in kept], errors=[error for *_, error in kept])


def _is_near(value: float) -> bool:
    return abs(value) < FARTHEST


def _ends(mark: Line | Band) -> tuple[float, ...]:
    return (mark.at,) if isinstance(mark, Line) else (mark.low, mark.high)


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
    thick = 0.065 if _as_points(chart) else 0.17  # a marker, a bar with its number
    return max(0.25, 0.06 + thick * len(chart.series))


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
    """As few as its lines need: no name stands alone on the last one where it need not."""
    return math.ceil(len(_legend(chart)) / max(1, _legend_lines(chart)))


def _legend_lines(chart: Chart) -> int:
    longest = min(LETTERS, max(map(len, _legend(chart)), default=1)) + 6  # a sample is as wide as some letters
    return math.ceil(len(_legend(chart)) / max(1, LETTERS // longest))


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
    places, count = range(len(chart.labels)), len(chart.series)
    _scale(axes, chart.axis, "x")
    for number, values in enumerate(chart.series):
        (_points if _as_points(chart) else _bars)(axes, chart, values, number)
    for mark in chart.marks:
        _mark(axes, mark, "x")
    axes.set_yticks(places, [_short(label, LABEL) for label in chart.labels])
    axes.set_yticks([place + 0.5 for place in places[:-1]], minor=True)
    axes.set_ylim(len(chart.labels) - 0.5, -0.5)  # the first on top
    axes.tick_params(axis="y", which="both", length=0)
    axes.set_xlabel(chart.axis.label)
    axes.grid(axis="x")
    if _as_points(chart):  # of one series a line through its points, of several one between their rows
        axes.grid(axis="y", which="major" if count == 1 else "minor")
    _cut(axes, chart)
    _tick(axes, chart.axis, "x")


def _as_points(chart: Bars) -> bool:
    return chart.points or chart.axis.log


def _points(axes: "Axes", chart: Bars, values: Values, number: int) -> None:
    errors = values.errors or [None] * len(values.values)
    there = [
        (x, y, _width_of(error))
        for y, x, error in zip(_places(chart, number), values.values, errors, strict=True)
        if x is not None and not _is_beyond(chart, x)
    ]
    axes.errorbar(
        [x for x, _, _ in there],
        [y for _, y, _ in there],
        xerr=[error for *_, error in there] if values.errors else None,
        fmt=MARKERS[number % len(MARKERS)],
        color=_colour(number),
        label=_short(values.name, LETTERS),
        markersize=None if len(chart.series) == 1 else 4.5,
        elinewidth=1.2,
        alpha=0.9,
    )


def _places(chart: Bars, number: int) -> list[float]:
    """Where a series stands beside each label: the first above, the last below."""
    step = THICK / len(chart.series)
    return [place + step * (number - (len(chart.series) - 1) / 2) for place in range(len(chart.labels))]


def _is_beyond(chart: Bars, value: float) -> bool:
    return chart.axis.most is not None and value > chart.axis.most


def _cut(axes: "Axes", chart: Bars) -> None:
    """End the axis where it says; what lies beyond is written there."""
    if chart.axis.most is None:
        return
    axes.set_xlim(right=chart.axis.most)
    for number, values in enumerate(chart.series):
        for place, value in zip(_places(chart, number), values.values, strict=True):
            if value is not None and _is_beyond(chart, value):
                text = f"{significant(value)} →"
                axes.text(chart.axis.most, place, text, ha="right", va="center", fontsize=8, color=_colour(number))


def _width_of(error: float | None) -> float:
    """Of an error bar; a record may say that an error is negative, which none is."""
    return min(max(0.0, error or 0.0), FARTHEST)


def _bars(axes: "Axes", chart: Bars, values: Values, number: int) -> None:
    places, thick = _places(chart, number), 0.9 * THICK / len(chart.series)
    lengths = [0.0 if value is None else value for value in values.values]
    drawn = axes.barh(places, lengths, thick, color=_colour(number), label=_short(values.name, LETTERS))
    if len(chart.series) * len(chart.labels) <= MANY:
        axes.bar_label(drawn, [significant(value) for value in values.values], padding=3, fontsize=8)
        axes.margins(x=0.12)


def _fill_lines(axes: "Axes", chart: Lines) -> None:
    _scale(axes, chart.across, "x")
    _scale(axes, chart.axis, "y")
    for number, curve in enumerate(chart.curves):
        alike = [other for other in chart.curves[:number] if (other.known, other.under) == (curve.known, curve.under)]
        _curve(axes, curve, number, len(alike))
    for mark in chart.marks:
        _mark(axes, mark, "y")
    axes.set_xlabel(chart.across.label)
    axes.set_ylabel(chart.axis.label)
    axes.grid()
    _tick(axes, chart.across, "x")
    _tick(axes, chart.axis, "y")


def _curve(axes: "Axes", curve: Curve, number: int, place: int) -> None:
    """The curve of that number, and of that place among those of its sort."""
    dash = _dash(curve, number, place)
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
        linewidth=1.1 if curve.known else 6.0 if curve.under else None,
        alpha=0.35 if curve.under else None,
        elinewidth=1.2,
    )


def _dash(curve: Curve, number: int, place: int) -> str:
    """Where markers do not, dashes tell curves apart, in any colour."""
    if curve.known:
        return DASHES[1 + place % (len(DASHES) - 1)]
    return DASHES[(number // len(LIGHT.series) if curve.dots else place) % len(DASHES)]


def _mark(axes: "Axes", mark: Line | Band, across: str) -> None:
    """A line or band at a value of the axis `across`."""
    if isinstance(mark, Line):
        draw = axes.axvline if across == "x" else axes.axhline
        draw(mark.at, color=LIGHT.ink, linestyle="--", linewidth=1.0, label=mark.name)
    else:
        fill = axes.axvspan if across == "x" else axes.axhspan
        fill(mark.low, mark.high, color=LIGHT.series[-1], alpha=0.2, linewidth=0, label=mark.name)


def _scale(axes: "Axes", axis: Axis, which: str) -> None:
    if axis.log:
        (axes.set_xscale if which == "x" else axes.set_yscale)("log")


def _tick(axes: "Axes", axis: Axis, which: Literal["x", "y"]) -> None:
    """Numbers along a logarithmic axis, once it is known what it holds: more of them where powers of ten are few."""
    if not axis.log:
        return
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

    low, high = axes.get_xlim() if which == "x" else axes.get_ylim()
    ticks = axes.xaxis if which == "x" else axes.yaxis
    if high < SHORT * low:
        ticks.set_major_locator(MaxNLocator(4))
        ticks.set_minor_locator(NullLocator())
    digits = next(digits for ratio, digits in BETWEEN if high <= ratio * low)
    ticks.set_major_formatter(FuncFormatter(_plain))
    ticks.set_minor_formatter(FuncFormatter(functools.partial(_between, digits)))
    axes.tick_params(axis=which, which="both", length=3, pad=3.5)  # all numbers at one height


def _plain(value: float, place: int | None) -> str:
    """0.001 and 1e-05, as text without formulas."""
    return f"{value:g}"


def _between(digits: str, value: float, place: int | None) -> str:
    return _plain(value, place) if f"{value:.0e}"[0] in digits else ""


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
