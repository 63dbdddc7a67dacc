"""One self-contained HTML page: verdicts, charts, tables. No scripts, no fonts, nothing to fetch."""

import base64
import html
from collections import Counter
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from thinwire import __version__
from thinwire.tools.bench.record import Record
from thinwire.tools.recommend import Recommendation
from thinwire.tools.report import compare, draw, kinds, tables
from thinwire.tools.report.cells import TextGrid, text
from thinwire.tools.report.draw import BarChart

TITLE = "thinwire report"
INDEX = "index.html"
# Nothing may be fetched, whatever a record says.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(
    records: Sequence[Record],
    *,
    title: str = TITLE,
    names: Sequence[str] = (),
    verdict: tuple[str, Recommendation] | None = None,
    notes: Sequence[str] = (),
    grids: Sequence[TextGrid] = (),
    drawings: Sequence[BarChart] = (),
) -> str:
    """The text of the page. The verdict, with its heading, and notes stand under the title; then grids and drawings."""
    parts = [f"<h1>{_safe(title)}</h1>"]
    if verdict is not None:
        heading, choice = verdict
        lines = [f"<h2>{_safe(heading)}</h2>", f"<p class=use>{_safe(choice.use)}</p>"]
        lines += [f"<p>{_safe(line)}</p>" for line in (*choice.lines[1:], *choice.notes)]
        parts.append(f"<section class=card>{''.join(lines)}</section>")
    parts += [f"<p>{_safe(note)}</p>" for note in notes]
    parts += [*map(_figure, drawings), *map(_table, grids)]
    if compare.comparable(records):
        parts += ["<h2>Comparison</h2>", _table(compare.grid(compare.compare(*records)))]
    for record, name in zip(records, names or [""] * len(records), strict=True):
        parts += [f"<h2>{_safe(f'{record.kind} {name}')}</h2>", f"<p class=how>{_safe(tables.conditions(record))}</p>"]
        parts += [*map(_figure, draw.charts(record)), *map(_table, kinds.grids(record))]
    style = resources.files(__package__).joinpath("page.css").read_text()
    head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    head += '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
    head += f"<title>{_safe(title)}</title><style>{style}</style>"
    foot = f"<footer><p>Made by thinwire {_safe(__version__)} from benchmark records.</p></footer>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{"".join(parts)}{foot}</body></html>\n'


def save(content: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")


def write_pngs(charts: Sequence[BarChart], directory: Path) -> list[Path]:
    """Write loss.png, bytes.png and so on; where several charts have one name, loss-2.png and on."""
    directory.mkdir(parents=True, exist_ok=True)
    seen: Counter[str] = Counter()
    found = []
    for chart in charts:
        seen[chart.name] += 1
        count = f"-{seen[chart.name]}" if seen[chart.name] > 1 else ""
        found.append(directory / f"{chart.name}{count}.png")
        found[-1].write_bytes(draw.png(chart))
    return found


def _safe(words: str) -> str:
    return html.escape(text(words))


def _figure(chart: BarChart) -> str:
    data = base64.b64encode(draw.png(chart)).decode()
    return f'<figure><img src="data:image/png;base64,{data}" alt="{_safe(chart.title)}"></figure>'


def _table(grid: TextGrid) -> str:
    """A table in a box of its own, which scrolls where the screen is narrower."""
    what, how = grid.parts
    sides = ["" if at < grid.labels else " class=number" for at in range(len(grid.header))]
    heads = "".join(f"<th scope=col{side}>{_safe(name)}</th>" for side, name in zip(sides, grid.header, strict=True))
    rows = []
    for at, line in enumerate(grid.rows):
        cells = "".join(f"<td{side}>{_safe(cell)}</td>" for side, cell in zip(sides, line, strict=True))
        tone = f" class={grid.tones[at]}" if grid.tones and grid.tones[at] else ""
        rows.append(f"<tr{tone}>{cells}</tr>")
    caption = f"<caption><b>{_safe(what)}</b>{_safe(how)}</caption>"
    return f"<div class=scroll tabindex=0><table>{caption}<thead><tr>{heads}</tr></thead>{''.join(rows)}</table></div>"
