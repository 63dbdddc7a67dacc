"""Charts with matplotlib: PNG files, and SVG whose colours a page may change. The only module that imports it.

A codec has one colour everywhere. Colours are Okabe and Ito's, which the colour-blind can tell apart, made darker or
lighter until each stands out from its page; markers differ too, so that no series is known by its colour alone.
"""

import contextlib
import io
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal
from xml.etree import ElementTree

from thinwire.errors import ThinwireError
from thinwire.tools.report.cells import significant
from thinwire.tools.report.charts import Axis, Bars, Chart, Curve, Lines, Mark, Values

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, FigureBase

MANY = 24  # bars; more of them are not written beside
MARGIN = 0.75  # inches, as the next two
LEGEND_LINE = 0.2
LEAST = 2.2
# Of a logarithmic axis, by its ends' ratio: which digits are written between the powers of ten.
BETWEEN = ((10.0, "12357"), (30.0, "1235"), (500.0, "125"), (math.inf, "1"))
SHORT = 4.0  # ratio of the ends of an axis that may hold too few of these
LETTERS = 58  # of a line of title or legend
PALE = (1.0, 0.55, 0.3)  # bars of the first, second and third series of a codec
THICK = 0.76  # of a row: what its bars or points take
LABEL = 32  # letters of a label; one as long as the chart is wide would leave it no room
_SVG = "{http://www.w3.org/2000/svg}"
_LEFT_OUT = {f"{_SVG}{name}" for name in ("metadata", "style", "title")}  # a style sheet would reach the whole page
_LINK = "{http://www.w3.org/1999/xlink}href"


@dataclass(frozen=True)
class Palette:
    page: str
    ink: str
    grid: str
    series: tuple[str, ...]

    def names(self) -> dict[str, str]:
        """CSS names of the colours: --page, --ink, --grid, --s0 and so on."""
        numbered = {f"--s{number}": color for number, color in enumerate(self.series)}
        return {"--page": self.page, "--ink": self.ink, "--grid": self.grid, **numbered}


LIGHT = Palette(
    page="#ffffff",
    ink="#1b1f24",
    grid="#d5dae0",
    series=("#0072b2", "#c94f00", "#007f5f", "#a8488a", "#8f6400", "#5a6570", "#00707a", "#b0003a", "#7a4a21"),
)
DARK = Palette(
    page="#14171b",
    ink="#e4e8ec",
    grid="#3a424b",
    series=("#56b4e9", "#ff8f4d", "#35c79a", "#e6a0cb", "#e8c547", "#a9b3bd", "#4fd1dc", "#ff7a9c", "#d9a777"),
)
GREY = 5  # among the colours
# Of a codec, the same in every chart; fp32 is grey. Some that never meet share one.
CODECS = {
    **{"fp32": GREY, "none": GREY, "plain": GREY, "bf16": 4, "fp16": 8, "int8": 0, "int4": 6, "int2": 7},
    **{"lloyd4": 1, "lloyd3": 8, "lloyd2": 2, "lloyd1": 3, "powersgd": 7, "onebit": 6, "sign": 8, "topk": 8, "auto": 7},
}


def color_of(name: str) -> int | None:
    """The colour of the codec that a name begins with, as in "lloyd2 + EF21" or "powersgd4"; None: it has none."""
    found = re.match(r"([a-z]+)\d*", name)
    return None if found is None else CODECS.get(found[0], CODECS.get(found[1]))


MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
DASHES = ("-", "--", "-.", ":")
WIDTH = 4.8  # inches: a phone of 360 pixels then has about a pixel for a point
DPI = 180

SETTINGS: Any = {  # a dictionary; matplotlib types its keys one by one
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "text.parse_math": False,  # a "$" in a record is a "$"
    "text.color": LIGHT.ink,
    "axes.labelcolor": LIGHT.ink,
    "axes.edgecolor": LIGHT.ink,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.axisbelow": True,
    "grid.color": LIGHT.grid,
    "grid.linewidth": 0.7,
    "xtick.color": LIGHT.ink,
    "ytick.color": LIGHT.ink,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.5,
    "figure.facecolor": LIGHT.page,
    "figure.constrained_layout.use": True,
    "svg.fonttype": "none",  # words stay words: they can be found, copied and read aloud
    "svg.hashsalt": "thinwire",  # the same chart has the same bytes
}


class PlotError(ThinwireError, RuntimeError):
    """Charts were asked for and cannot be drawn here."""


def check() -> None:
    if find_spec("matplotlib") is None:
        raise PlotError("plots are drawn by matplotlib, which is not installed: pip install 'thinwire[report]'")


def png(*charts: Chart) -> bytes:
    """Charts side by side on white, each under its title."""
    return _save(charts, "png", title=True, dpi=DPI)


def svg(chart: Chart, prefix: str) -> str:
    """The chart as an element of an HTML page, which names its colours (Palette.names) and writes its title.

    Identifiers begin with `prefix`, so that several charts can share a page.
    """
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    root = ElementTree.fromstring(_save([chart], "svg", title=False, transparent=True, metadata=nothing))
    for parent in list(root.iter()):
        for child in [child for child in parent if child.tag in _LEFT_OUT]:
            parent.remove(child)
    for element in root.iter():
        _as_html(element, prefix)
    root.set("role", "img")
    root.set("aria-label", chart.title)
    for size in ("width", "height"):  # the page decides; the viewBox keeps the proportions
        root.attrib.pop(size, None)
    text = ElementTree.tostring(root, encoding="unicode")
    for name, color in LIGHT.names().items():  # the page's names for its colours
        text = re.sub(rf"(?<=: ){color}\b", f"var({name})", text)
    return text


def _save(charts: Sequence[Chart], form: str, *, title: bool, **options: Any) -> bytes:
    with _settings() as figure_of:
        figure = figure_of(figsize=(WIDTH * len(charts), max(_height(chart, title) for chart in charts)))
        parts = figure.subfigures(1, len(charts), squeeze=False)[0] if len(charts) > 1 else [figure]
        for part, chart in zip(parts, charts, strict=True):
            _fill(part, chart, title)
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
    body = 2.3
    if isinstance(chart, Bars):
        thick = 0.065 if _as_points(chart) else 0.17  # a marker, a bar with its number
        body = len(chart.labels) * max(0.25, 0.06 + thick * len(chart.series))
    words = _legend_lines(chart) + (len(textwrap.wrap(chart.title, LETTERS)) if title else 0)
    return max(LEAST, MARGIN + body) + LEGEND_LINE * words


def _legend(chart: Chart) -> list[str]:
    """The names in the legend; a single series without marks is named by its axis."""
    series = chart.series if isinstance(chart, Bars) else chart.curves
    names = [*(part.name for part in series), *(mark.name for mark in chart.marks)]
    return names if len(names) > 1 else []


def _short(name: str, letters: int) -> str:
    return name if len(name) <= letters else f"{name[: letters - 1]}…"


def _legend_lines(chart: Chart) -> int:
    longest = min(LETTERS, max(map(len, _legend(chart)), default=1)) + 6  # a sample is as wide as some letters
    return math.ceil(len(_legend(chart)) / max(1, LETTERS // longest))


def _fill(figure: "FigureBase", chart: Chart, title: bool) -> None:
    axes = figure.add_subplot()
    if isinstance(chart, Bars):
        _fill_bars(axes, chart)
    else:
        _fill_lines(axes, chart)
    if names := _legend(chart):
        columns = math.ceil(len(names) / _legend_lines(chart))  # as few as its lines need
        figure.legend(loc="outside lower left", ncols=columns, borderaxespad=0.2, columnspacing=1.2)
    if title:
        figure.suptitle(textwrap.fill(chart.title, LETTERS), x=0.01, ha="left", fontsize=10, fontweight="bold")


def _fill_bars(axes: "Axes", chart: Bars) -> None:
    places = range(len(chart.labels))
    _scale(axes, chart.axis, "x")
    for number, values in enumerate(chart.series):
        (_points if _as_points(chart) else _bars)(axes, chart, values, number)
    for mark in chart.marks:
        _mark(mark, axes.axvline, axes.axvspan)
    axes.set_yticks(places, [_short(label, LABEL) for label in chart.labels])
    axes.set_yticks([place + 0.5 for place in places[:-1]], minor=True)
    axes.set_ylim(len(chart.labels) - 0.5, -0.5)  # the first on top
    axes.tick_params(axis="y", which="both", length=0)
    axes.grid(axis="x")
    if _as_points(chart):  # of one series a line through its points, of several one between their rows
        axes.grid(axis="y", which="major" if len(chart.series) == 1 else "minor")
    _tick(axes, chart.axis, "x")


def _as_points(chart: Bars) -> bool:
    return chart.points or chart.axis.log


def _by_label(chart: Bars) -> bool:
    """Whether labels are codecs: then each has its colour, and series differ in marker or paleness."""
    return all(color_of(label) is not None for label in chart.labels)


def _colors(chart: Bars, values: Values, number: int) -> list[str]:
    """One for each label."""
    if _by_label(chart):
        return [_color(label, number) for label in chart.labels]
    return [_color(values.name, number)] * len(chart.labels)


def _points(axes: "Axes", chart: Bars, values: Values, number: int) -> None:
    widths = values.widths()
    look: dict[str, Any] = {
        "fmt": MARKERS[number % len(MARKERS)],
        "markersize": None if len(chart.series) == 1 else 4.5,
        "elinewidth": 1.2,
        "alpha": 0.9,
    }
    colors = _colors(chart, values, number)
    for at, (y, x) in enumerate(zip(_places(chart, number), values.values, strict=True)):
        if x is not None:
            reach = None if widths is None else [[side] for side in widths[at]]
            axes.errorbar([x], [y], xerr=reach, color=colors[at], **look)
    axes.errorbar([], [], color=_named_color(chart, values, number), label=_short(values.name, LETTERS), **look)


def _named_color(chart: Bars, values: Values, number: int) -> str:
    """Of a series in the legend: grey where its bars have colours of their own."""
    return LIGHT.series[GREY] if _by_label(chart) else _color(values.name, number)


def _places(chart: Bars, number: int) -> list[float]:
    """Where a series stands beside each label: the first above, the last below."""
    step = THICK / len(chart.series)
    return [place + step * (number - (len(chart.series) - 1) / 2) for place in range(len(chart.labels))]


def _bars(axes: "Axes", chart: Bars, values: Values, number: int) -> None:
    thick = 0.9 * THICK / len(chart.series)
    lengths = [value or 0.0 for value in values.values]
    look: dict[str, Any] = {"alpha": PALE[number % len(PALE)] if _by_label(chart) else 1.0}
    widths = values.widths()
    drawn = axes.barh(
        _places(chart, number),
        lengths,
        thick,
        color=_colors(chart, values, number),
        xerr=None if widths is None else list(zip(*widths, strict=True)),
        error_kw={"elinewidth": 1.2, "ecolor": LIGHT.ink},
        **look,
    )
    axes.barh([0], [0], color=_named_color(chart, values, number), label=_short(values.name, LETTERS), **look)
    if len(chart.series) * len(chart.labels) <= MANY:
        axes.bar_label(drawn, [significant(value) for value in values.values], padding=3, fontsize=8)
        axes.margins(x=0.12)


def _fill_lines(axes: "Axes", chart: Lines) -> None:
    _scale(axes, chart.across, "x")
    _scale(axes, chart.axis, "y")
    for number, curve in enumerate(chart.curves):
        alike = [other for other in chart.curves[:number] if _looks(other) == _looks(curve)]
        _curve(axes, curve, number, len(alike))
    for mark in chart.marks:
        _mark(mark, axes.axhline, axes.axhspan)
    axes.grid()
    _tick(axes, chart.across, "x")
    _tick(axes, chart.axis, "y")


def _looks(curve: Curve) -> tuple[bool, int | None]:
    """What two curves share that only their dashes tell apart."""
    return curve.known, None if curve.known else color_of(curve.name)


def _curve(axes: "Axes", curve: Curve, number: int, place: int) -> None:
    """The curve of that number, and of that place among those of its sort. Dashes tell apart what markers do not."""
    dash = DASHES[(1 + place % (len(DASHES) - 1)) if curve.known else place % len(DASHES)]
    errors = [max(0.0, error or 0.0) for error in curve.errors] if curve.errors and any(curve.errors) else None
    axes.errorbar(
        [x for x, _ in curve.points],
        [y for _, y in curve.points],
        yerr=errors,
        marker=MARKERS[number % len(MARKERS)] if curve.dots and not curve.known else "",
        linestyle=dash if curve.joined else "none",
        color=LIGHT.ink if curve.known else _color(curve.name, number),
        label=_short(curve.name, LETTERS),
        linewidth=1.1 if curve.known else None,
        elinewidth=1.2,
    )


def _mark(mark: Mark, line: Callable[..., object], span: Callable[..., object]) -> None:
    if mark.high is None:
        line(mark.low, color=LIGHT.ink, linestyle="--", linewidth=1.0, label=mark.name)
    else:
        span(mark.low, mark.high, color=LIGHT.series[GREY], alpha=0.2, linewidth=0, label=mark.name)


def _scale(axes: "Axes", axis: Axis, which: str) -> None:
    axes.set(**{f"{which}label": axis.label, f"{which}scale": "log" if axis.log else "linear"})


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
    ticks.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))  # 0.001 and 1e-05, without formulas
    ticks.set_minor_formatter(FuncFormatter(lambda value, place: f"{value:g}" if f"{value:.0e}"[0] in digits else ""))
    axes.tick_params(axis=which, which="both", length=3, pad=3.5)  # all numbers at one height


def _color(name: str, number: int) -> str:
    """Of a codec its own, of others by their number."""
    own = color_of(name)
    return LIGHT.series[(number if own is None else own) % len(LIGHT.series)]


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
