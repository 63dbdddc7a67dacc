"""`thinwire demo`: train a small GPT plainly and compressed, show what that did, and write a report of it."""

import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from thinwire.errors import CodecError
from thinwire.tools.advise import cluster
from thinwire.tools.advise.cluster import Machine
from thinwire.tools.bench import step
from thinwire.tools.bench.record import Record, write
from thinwire.tools.cli import findings, flags, screen, training
from thinwire.tools.local import link as links
from thinwire.tools.report import draw, page, tables

FOLDER = Path("thinwire-report")
RECORD = "demo.json"
TITLE = "thinwire demo: a small GPT, its gradients compressed"
CODECS = (
    f"Beside the uncompressed run; default {','.join(training.CODECS)}. Also auto, lloyd2@ef21. bf16 is torch's hook."
)
STEPS = f"Per run; default {training.DemoPlan.steps}, quick {training.QUICK.steps}."
LINK = (
    "Such as 100mbit or 1gbit: a shaped link for every rank, step times measured on it. Needs root, or a system that "
    "lets users make network namespaces."
)
OUT = f"Directory of the report; default {FOLDER}. New, empty, or that of an earlier demo."


def command(
    world: Annotated[int, typer.Option(min=2, max=links.MOST_HOSTS, metavar="N", help="Ranks.")] = 2,
    codecs: Annotated[list[str] | None, typer.Option(metavar="A,B", help=CODECS)] = None,
    steps: Annotated[int | None, typer.Option(min=1, metavar="N", help=STEPS)] = None,
    link: Annotated[str | None, typer.Option(metavar="RATE", help=LINK)] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help=OUT)] = None,
    json: flags.Json = None,
    whole: screen.All = False,
    quick: Annotated[bool, typer.Option("--quick", help="A smaller network and few steps: seconds.")] = False,
) -> None:
    """See it work: ranks on this machine train a small GPT, plainly and once per codec.

    The network learns the text of Python's help pages. Nothing is downloaded, and no GPU is needed. Every codec trains
    from the same three seeds on the same batches. The demo prints the loss against fp32, the bytes and the time per
    step as measured here, and a verdict: the fastest codec whose loss stays within the seed-to-seed spread, for links
    of 100mbit to 100gbit, by the rule and the cost model of thinwire advise. It takes about a minute on two cores. With
    --quick there are too few seeds for a verdict.

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
        step.lineup(named or ())
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
        record, status = screen.measured(partial(training.run, world, named, steps, shaped, quick))
        written = _deliver(record, folder, json)
    raise typer.Exit(status if written else 1)


def _start_again_as_own_root() -> NoReturn:
    """The same command, where this user may shape links."""
    again = links.as_own_root([sys.executable, "-m", "thinwire", *sys.argv[1:]])
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns that the network there has no name service
    os.execvp(again[0], again)


def _deliver(record: Record, folder: Path, json: str | None) -> bool:
    """Write the record and the report, print the tables and what they mean; whether all could be written."""
    own = cluster.recorded("cpu")
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
    write(record, str(folder / RECORD))
    paths = [folder / RECORD]
    try:
        draw.check()
        drawn = findings.charts(record, machine)
        verdict = next(((one.heading, one.choice) for one in findings.outlooks(record, machine)), None)
        more = {"notes": findings.sentences(record), "grids": findings.links_grid(record, machine), "drawings": drawn}
        page.save(page.page([record], title=TITLE, verdict=verdict, **more), folder / page.INDEX)
        paths = [folder / page.INDEX, *page.write_pngs([*drawn, *draw.charts(record)], folder), *paths]
    except draw.PlotError as error:
        typer.echo(f"no page, no plots: {error}", err=True)
    typer.echo(f"wrote {', '.join(map(str, paths))}", err=True)


def _make(folder: Path) -> None:
    """Make the directory before anything is trained, or refuse it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        _refuse(f"{folder} cannot be written ({error.strerror}): name a directory that can be made")


def _refuse(why: str) -> NoReturn:
    raise typer.BadParameter(why, param_hint="--out")
