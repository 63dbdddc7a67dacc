"""`thinwire demo`: train a small GPT plainly and compressed, show what that did, and write a report of it."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from thinwire.errors import CodecError, RecordError
from thinwire.tools.advise import machine as machines
from thinwire.tools.advise.machine import Machine
from thinwire.tools.bench import demo, link as links, tasks
from thinwire.tools.bench.record import Record, read, write
from thinwire.tools.cli import findings, flags, screen
from thinwire.tools.report import charts, draw, page, tables

FOLDER = Path("thinwire-report")
RECORD = "demo.json"
TITLE = "thinwire demo: a small GPT, its gradients compressed"
CODECS = (
    f"Beside the uncompressed run; default {','.join(demo.CODECS)}. Also what bench train knows: auto, lloyd2@none. "
    "bf16 is torch's own hook."
)
STEPS = f"Per run; default {tasks.DEMO.steps}, quick {tasks.QUICK_DEMO.steps}."
LINK = (
    "Such as 100mbit or 1gbit: a shaped link for every rank, step times measured on it. Needs root, or a system that "
    "lets users make network namespaces."
)
OUT = f"Directory of the report; default {FOLDER}. New, empty, or that of an earlier demo."
JSON = 'Write the record there too; "-" is standard output, with no table.'


def command(
    world: Annotated[int, typer.Option(min=2, max=links.MOST_HOSTS, metavar="N", help="Ranks.")] = demo.WORLD,
    codecs: Annotated[list[str] | None, typer.Option(metavar="A,B", help=CODECS)] = None,
    steps: Annotated[int | None, typer.Option(min=1, metavar="N", help=STEPS)] = None,
    link: Annotated[str | None, typer.Option(metavar="RATE", help=LINK)] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help=OUT)] = None,
    json: Annotated[str | None, typer.Option(metavar="FILE", help=JSON)] = None,
    whole: screen.All = False,
    quick: Annotated[bool, typer.Option("--quick", help="A smaller network and few steps: seconds.")] = False,
) -> None:
    """See it work: ranks on this machine train a small GPT, plainly and once per codec.

    The network learns the text of Python's help pages. Nothing is downloaded, and no GPU is needed. Every codec trains
    from the same three seeds on the same batches. The demo prints the loss against fp32, the bytes and the time per
    step as measured here, and a verdict: the fastest codec whose loss stays within what another seed does, for links
    of 100mbit to 100gbit, by the rule and the cost model of thinwire advise. It takes two to four minutes on two cores.
    With --quick there are too few seeds for a verdict.

    The report is one page (index.html) with plots (PNG files) and the record (demo.json). In the directory of an
    earlier demo its files are replaced; others are left alone. Without matplotlib (the extra "report") the tables are
    printed, the record is written, and the page is left out; with --out that is an error.
    After Ctrl-C the codecs that were finished are printed and written, and the exit status is 130.

    \b
    Example:
      thinwire demo
      thinwire demo --codecs int8,lloyd4:block=256,bf16 --steps 300 --out report
      sudo thinwire demo --link 100mbit
      thinwire demo --quick --json - > demo.json
    """
    named = flags.specs(codecs) or None
    with screen.usage_errors("--codecs", CodecError):
        demo.lineup(named)
    shaped = flags.shaped(link)
    flags.writable(json, "--json")
    folder = out or FOLDER
    if folder.is_dir() and any(folder.iterdir()) and not (folder / RECORD).is_file():
        _refuse(f"{folder} holds files and no earlier demo ({RECORD}): name a new or an empty directory")
    with screen.plain_errors():
        if out is not None:
            draw.check()
        if shaped is not None and os.geteuid() != 0:
            _start_again_as_own_root()
        _make(folder)
        record, status = screen.measured(partial(demo.run, world, named, steps, shaped, quick))
        written = _deliver(record, folder, json)
    raise typer.Exit(status if written else 1)


def _start_again_as_own_root() -> NoReturn:
    """The same command, where this user may shape links."""
    again = links.as_own_root([sys.executable, "-m", "thinwire", *sys.argv[1:]])
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns that the network there has no name service
    os.execvp(again[0], again)


def _deliver(record: Record, folder: Path, json: str | None) -> bool:
    """Write the record and the report, print the tables and what they mean; whether all could be written."""
    own = machines.recorded("cpu")
    writes: dict[str, Callable[[], None]] = {} if json is None else {json: lambda: write(record, json)}
    if record.rows:
        writes[str(folder)] = lambda: _write(record, own, folder)
    written = screen.write_all(writes)  # before the tables, whose reader may go away
    if record.rows and json != "-":
        show(record, own, screen.console())
    return written


def show(record: Record, machine: Machine, console: Console) -> None:
    """Print what was measured, the verdict on every link, and its three lines for the first."""
    for grid in findings.grids(record, machine):
        console.print()
        tables.show_grid(grid, console)
    console.print()
    for outlook in findings.outlooks(record, machine)[:1]:
        screen.say(f"{outlook.heading}:", console)
        screen.say_choice(outlook.choice, console)
        screen.say_notes(outlook.choice.notes, console)
    for sentence in findings.sentences(record):
        screen.say(sentence, console)


def _write(record: Record, machine: Machine, folder: Path) -> None:
    kept = folder / RECORD
    with contextlib.suppress(RecordError):  # the plots of an earlier demo go: this one may draw fewer
        for name in (findings.CHART, *(chart.name for chart in charts.of(read(str(kept))))):
            (folder / f"{name}.png").unlink(missing_ok=True)
    write(record, str(kept))
    paths = []
    try:
        draw.check()
        cards = [page.Card(one.heading, one.choice) for one in findings.outlooks(record, machine)[:1]]
        laid = findings.links_grid(record, machine)
        drawn = findings.charts(record, machine)
        told = findings.sentences(record)
        index = folder / page.INDEX
        page.save(page.page([record], title=TITLE, notes=told, cards=cards, grids=laid, drawings=drawn), index)
        paths = [index, *page.write_pngs([record], folder, drawn)]
    except draw.PlotError as error:
        typer.echo(f"no page, no plots: {error}", err=True)
    typer.echo(f"wrote {', '.join(map(str, [*paths, kept]))}", err=True)


def _make(folder: Path) -> None:
    """Make the directory before anything is trained, or refuse it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        _refuse(f"{folder} cannot be written ({error.strerror}): name a directory that can be made")


def _refuse(why: str) -> NoReturn:
    raise typer.BadParameter(why, param_hint="--out")
