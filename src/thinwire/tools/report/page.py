"""One self-contained HTML page: verdicts, charts as inline SVG, tables. No scripts, no fonts, nothing to fetch."""

import html
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from thinwire.tools.bench.record import Record, Value, version
from thinwire.tools.report import charts, compare, draw, kinds, tables
from thinwire.tools.report.cells import ABSENT, TextGrid, commit, distinct, text
from thinwire.tools.report.charts import Chart
from thinwire.tools.report.draw import DARK, LIGHT
from thinwire.tools.rule import Choice

TITLE = "thinwire report"
INDEX = "index.html"
# Nothing may be fetched, whatever a record says; a browser that finds an icon here does not ask a server for one.
_EMPTY = {"meta", "link", "br"}  # elements without an end
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_NOUNS = {
    "codec": "Codecs",
    "kernels": "Kernels",
    "collectives": "Collectives",
    "train": "Training",
    "qat": "Quantisation-aware training",
    "soak": "Soak",
}
_SUBJECTS = {"collectives": ("link",), "train": ("task", "link"), "qat": ("task",)}


class Html(str):
    """Text that is HTML: what is not is escaped when it becomes part of an element."""

    __slots__ = ()


def element(name: str, /, *children: str | Iterable[str], **attributes: str | None) -> Html:
    """<name attributes>children</name>; an attribute's "_" is a "-", a last one is dropped: class_="x"."""
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    start = "".join((name, *(f' {key}="{_escaped(value)}"' for key, value in given.items())))
    return Html(f"<{start}>" if name in _EMPTY else f"<{start}>{join(children)}</{name}>")


def join(children: Iterable[str | Iterable[str]]) -> Html:
    return Html("".join(_escaped(child) if isinstance(child, str) else join(child) for child in children))


def _escaped(child: str) -> str:
    return child if isinstance(child, Html) else html.escape(text(child))


@dataclass(frozen=True)
class Section:
    heading: str
    told: str = ""
    charts: Sequence[Chart] = ()
    grids: Sequence[TextGrid] = ()
    conditions: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class Card:
    """A verdict, on top of the page."""

    heading: str
    choice: Choice


def write(
    records: Sequence[Record], directory: str | Path, *, title: str = TITLE, notes: Sequence[str] = ()
) -> list[Path]:
    """Write index.html and a PNG file of every chart to a directory, made if need be; the paths, the page first."""
    index = Path(directory) / INDEX
    save(page(records, title=title, notes=notes), index)
    return [index, *write_pngs(records, directory)]


def save(text_of_page: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text_of_page, encoding="utf-8")


def write_pngs(records: Sequence[Record], directory: str | Path, drawings: Sequence[Chart] = ()) -> list[Path]:
    """Write loss.png, bytes.png and so on; where several charts have one name, loss-2.png and on."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    seen: Counter[str] = Counter()
    found = []
    for chart in (*drawings, *(chart for record in records for chart in charts.of(record))):
        seen[chart.name] += 1
        name = chart.name if seen[chart.name] == 1 else f"{chart.name}-{seen[chart.name]}"
        found.append(Path(directory) / f"{name}.png")
        found[-1].write_bytes(draw.png(chart))
    return found


def page(
    records: Sequence[Record],
    *,
    title: str = TITLE,
    notes: Sequence[str] = (),
    cards: Sequence[Card] = (),
    grids: Sequence[TextGrid] = (),
    drawings: Sequence[Chart] = (),
    names: Sequence[str] = (),
) -> str:
    """The text of the page. `cards` and `notes` stand under the title; `names` in the headings of the records.

    `grids` and `drawings` come before the records' own: predictions, say.
    """
    sections = [Section("By link", charts=drawings, grids=grids)] if grids or drawings else []
    if compare.comparable(records):
        found = compare.compare(*records)
        sections += [Section(f"Comparison: {compare.summary(found)}", grids=[compare.grid(found)])]
    for record, name in zip(records, names or [""] * len(records), strict=True):
        heading = f"{_heading(record)} ({name})" if name else _heading(record)
        told = tables.conditions(record)
        sections += [Section(heading, told, charts.of(record), kinds.grids(record), record.conditions)]
    placed = {f"part{number}": section for number, section in enumerate(sections, 1)}
    footer = element("footer", element("p", f"Made by thinwire {version()} from benchmark records."))
    main = element("main", [_drawn(place, section) for place, section in placed.items()])
    top = element("header", element("h1", title), map(_card, cards), [element("p", note) for note in notes])
    body = element("body", top, _overview(placed), main, footer)
    return f"<!doctype html>\n{element('html', _head(title), body, lang='en')}\n"


def _heading(record: Record) -> str:
    """Training: digits, 1gbit."""
    subjects = [value for name in _SUBJECTS.get(record.kind, ()) for value in distinct(record.rows, name)]
    if record.kind == "kernels":
        subjects = [text(record.conditions["cpu" if record.conditions["device"] == "cpu" else "device"])]
    told = ", ".join(subject for subject in subjects if subject != ABSENT)
    return f"{_NOUNS[record.kind]}: {told}" if told else _NOUNS[record.kind]


def _head(title: str) -> Html:
    rules = resources.files(__package__).joinpath("page.css").read_text()
    light, dark = ("".join(f"{name}:{color};" for name, color in look.names().items()) for look in (LIGHT, DARK))
    style = f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}\n{rules}"
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("link", rel="icon", href="data:,"),
        element("title", title),
        element("style", Html(style)),
    )


def _card(card: Card) -> Html:
    """The three lines of a verdict; one click selects the line of code."""
    choice = card.choice
    before, _, _ = choice.use.partition(choice.chosen.code)
    return element(
        "section",
        element("h2", card.heading),
        element("p", before, element("code", choice.chosen.code), class_="use"),
        [element("p", line) for line in choice.lines[1:]],
        [element("p", f"Note: {note}.", class_="told") for note in choice.notes],
        class_="card",
        aria_label=card.heading,
    )


def _overview(placed: Mapping[str, Section]) -> Html | str:
    """Where there are several sections: what each shows, from what machine, when and from which commit."""
    if len(placed) < 2:
        return ""
    heads = [element("th", name, scope="col") for name in ("section", "measured on", "date", "commit")]
    rows = []
    for place, section in placed.items():
        have = section.conditions
        device = have.get("device") if have.get("device") != "cpu" else have.get("cpu")
        told = [text(device), text(have.get("date"))[:10], commit(have.get("commit"))]
        link = element("th", element("a", section.heading, href=f"#{place}"), scope="row")
        rows.append(element("tr", link, [element("td", cell) for cell in told]))
    table = element("table", element("thead", element("tr", heads)), element("tbody", rows))
    return element("nav", element("div", table, class_="scroll", tabindex="0"), aria_label="Overview")


def _drawn(place: str, section: Section) -> Html:
    figures = [
        element("figure", element("figcaption", chart.title), Html(draw.svg(chart, f"{place}c{number}")))
        for number, chart in enumerate(section.charts)
    ]
    terms = [join([element("dt", name), element("dd", text(value))]) for name, value in section.conditions.items()]
    return element(
        "section",
        element("h2", section.heading, id=place),
        element("p", section.told, class_="told") if section.told else "",
        element("div", figures, class_="charts") if figures else "",
        [_table(grid, f"{place}t{number}") for number, grid in enumerate(section.grids)],
        element("details", element("summary", "Conditions"), element("dl", terms)) if terms else "",
        aria_labelledby=place,
    )


def _table(grid: TextGrid, place: str) -> Html:
    """A table in a box of its own, which scrolls where the screen is narrower."""
    if not grid.rows:
        return element("p", grid.title)
    what, how = grid.told
    heads = [element("th", name, scope="col", class_=_side(at, grid)) for at, name in enumerate(grid.header)]
    table = element(
        "table",
        element("caption", element("span", element("b", what), how), id=place),
        element("thead", element("tr", heads)),
        element("tbody", (_row(cells, grid, at) for at, cells in enumerate(grid.rows))),
    )
    return element("div", table, class_="scroll", role="region", tabindex="0", aria_labelledby=place)


def _row(cells: Sequence[str], grid: TextGrid, at: int) -> Html:
    first, *others = cells
    rest = [element("td", cell, class_=_side(column, grid)) for column, cell in enumerate(others, 1)]
    return element("tr", element("th", first, scope="row"), rest, class_=grid.tones[at] or None if grid.tones else None)


def _side(column: int, grid: TextGrid) -> str | None:
    """Numbers stand on the right."""
    return None if column < grid.labels else "number"
