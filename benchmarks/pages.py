"""Records as one self-contained HTML page with charts: no scripts, no fonts, nothing to fetch. Needs matplotlib.

python -m benchmarks.pages benchmarks/train_gpt.json --html page.html --png plots
"""

import base64
import html as html_text
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import charts, compare
from benchmarks.charts import BarChart
from benchmarks.command import start
from thinwire import __version__
from thinwire.errors import RecordError
from thinwire.tools import report
from thinwire.tools.bench import record
from thinwire.tools.bench.record import Record
from thinwire.tools.cli import screen
from thinwire.tools.report import TextGrid, grids, text

TITLE = "thinwire report"
# Nothing may be fetched, whatever a record says.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def command(
    files: Annotated[list[str], typer.Argument(metavar="FILE", help="Records.")],
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the page there.")] = None,
    png: Annotated[Path | None, typer.Option(metavar="DIR", help="Write every chart to that directory.")] = None,
) -> None:
    """One HTML page of records, and their charts as PNG files; two records of one kind are compared."""
    with screen.usage_errors("FILE", RecordError):
        records = [record.read(path) for path in files]
    with screen.plain_errors():
        if html is not None:
            html.write_text(page(records, names=[Path(path).name for path in files]), encoding="utf-8")
        if png is not None:
            write_pngs([chart for found in records for chart in charts.of(found)], png)


def page(records: Sequence[Record], *, title: str = TITLE, names: Sequence[str] = ()) -> str:
    """The text of the page."""
    parts = [f"<h1>{_safe(title)}</h1>"]
    if compare.comparable(records):
        parts += ["<h2>Comparison</h2>", _table(compare.grid(compare.compare(*records)))]
    for found, name in zip(records, names or [""] * len(records), strict=True):
        parts += [f"<h2>{_safe(f'{found.kind} {name}')}</h2>", f"<p class=how>{_safe(report.conditions(found))}</p>"]
        parts += [*map(_figure, charts.of(found)), *map(_table, grids(found))]
    style = Path(__file__).with_name("page.css").read_text()
    head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    head += '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
    head += f"<title>{_safe(title)}</title><style>{style}</style>"
    foot = f"<footer><p>Made by thinwire {_safe(__version__)} from benchmark records.</p></footer>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{"".join(parts)}{foot}</body></html>\n'


def write_pngs(drawn: Sequence[BarChart], directory: Path) -> list[Path]:
    """Write loss.png, bytes.png and so on; where several charts have one name, loss-2.png and on."""
    directory.mkdir(parents=True, exist_ok=True)
    seen: Counter[str] = Counter()
    found = []
    for chart in drawn:
        seen[chart.name] += 1
        count = f"-{seen[chart.name]}" if seen[chart.name] > 1 else ""
        found.append(directory / f"{chart.name}{count}.png")
        found[-1].write_bytes(charts.png(chart))
    return found


def _safe(words: str) -> str:
    return html_text.escape(text(words))


def _figure(chart: BarChart) -> str:
    data = base64.b64encode(charts.png(chart)).decode()
    return f'<figure><img src="data:image/png;base64,{data}" alt="{_safe(chart.title)}"></figure>'


def _table(grid: TextGrid) -> str:
    """A table in a box of its own, which scrolls where the screen is narrower."""
    what, how = grid.parts
    sides = ["" if at < grid.labels else " class=number" for at in range(len(grid.header))]
    heads = "".join(f"<th scope=col{side}>{_safe(name)}</th>" for side, name in zip(sides, grid.header, strict=True))
    rows = []
    for line in grid.rows:
        cells = "".join(f"<td{side}>{_safe(cell)}</td>" for side, cell in zip(sides, line, strict=True))
        rows.append(f"<tr>{cells}</tr>")
    caption = f"<caption><b>{_safe(what)}</b>{_safe(how)}</caption>"
    return f"<div class=scroll tabindex=0><table>{caption}<thead><tr>{heads}</tr></thead>{''.join(rows)}</table></div>"


if __name__ == "__main__":
    start(command)
