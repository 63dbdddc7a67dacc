"""`thinwire doctor`: what works on this machine, or between the ranks of a job, and what to do about the rest."""

import json
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.text import Text

from thinwire.tools.cli import screen

if TYPE_CHECKING:
    from thinwire.tools.cli.peers import Found

MARKS = {True: "✓", False: "✗", None: "–"}
ASCII_MARKS = {True: "ok  ", False: "FAIL", None: "-   "}
STYLES = {True: "green", False: "bold red", None: "dim"}
PEERS = "Between the ranks that torchrun started: do they see each other, agree, and how fast do they exchange?"
TIMEOUT = "With --peers: how long to wait for a rank; default 60."
TORCHRUN = (
    "torchrun --nnodes 2 --node-rank 0 --nproc-per-node 1 --master-addr HOST --master-port 29500 "
    "-m thinwire doctor --peers"
)


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    peers: Annotated[bool, typer.Option("--peers", help=PEERS)] = False,
    timeout: Annotated[float | None, typer.Option(min=1.0, metavar="SECONDS", help=TIMEOUT)] = None,
) -> None:
    """Report what works on this machine, or between the ranks of a job, and how to fix the rest.

    Each line starts with ✓ (works), ✗ (broken) or – (optional, not here). The exit status is 1 only where something
    is broken: python or torch is too old, an installed kernel backend does not load or gives other bytes than the
    reference, or the environment names a network interface or a backend that is not there. A missing optional part, a
    compiler or a GPU say, leaves it at 0.

    As root, a network namespace with a shaped link is made and removed again. On a machine with a GPU a few kernels
    are compiled and compared, some seconds when it is done for the first time.

    With --peers it runs on every machine under torchrun, or with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set,
    and looks at nothing else. Rank 0 prints one table. The exit status is 1 where ranks are missing, differ in
    versions, or cannot exchange.

    \b
    Example:
      thinwire doctor
      thinwire doctor --json
      torchrun --nnodes 2 --node-rank 0 --master-addr HOST --master-port 29500 -m thinwire doctor --peers
    """
    if peers:
        _between_ranks(60.0 if timeout is None else timeout, as_json)
    if timeout is not None:
        raise typer.BadParameter("goes with --peers", param_hint="--timeout")
    from thinwire.tools.cli import checkup  # with torch, which --help does without

    findings = []
    for finding in checkup.examine():
        findings.append(finding)
        if not as_json:
            todo = f"; {finding.todo}" if finding.todo else ""
            _say(finding.works, f"{finding.name:<20} {finding.detail}{todo}")
    works = all(finding.works is not False for finding in findings)
    if as_json:
        typer.echo(json.dumps({"works": works, "findings": [asdict(finding) for finding in findings]}, indent=1))
    raise typer.Exit(int(not works))


def _say(works: bool | None, line: str) -> None:
    """One line, in marks the stream can show, colored on a terminal."""
    marks = MARKS if (sys.stdout.encoding or "").lower().startswith("utf") else ASCII_MARKS
    screen.console().print(Text.assemble((marks[works], STYLES[works]), f" {line}"), soft_wrap=True)


def _between_ranks(timeout: float, as_json: bool) -> NoReturn:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # what torch warns of is in the findings
    from thinwire.errors import AdviceError
    from thinwire.tools.cli import peers
    from thinwire.tools.local import torchrun

    with screen.usage_errors("environment", AdviceError):
        place = torchrun.place()
    if place is None:
        absent = [name for name in torchrun.ENVIRONMENT if name not in os.environ]
        hint = f"expected {', '.join(absent)} in the environment: run it on every machine as `{TORCHRUN}`"
        raise typer.BadParameter(hint, param_hint="--peers")
    with screen.plain_errors():
        found = peers.examine(place, timeout)
    if place.rank == 0:
        (_print_json if as_json else _print_table)(found)
    raise typer.Exit(int(bool(found.problems)))


def _print_json(found: "Found") -> None:
    ranks = [{"rank": rank, **said} for rank, said in found.ranks.items()]
    answer = {"works": not found.problems, "world": found.world, "problems": found.problems, "ranks": ranks}
    typer.echo(json.dumps(answer, indent=1))


def _print_table(found: "Found") -> None:
    from thinwire.tools.report import TextGrid, show_grid, significant

    header = ["rank", "host", "interface", "device", "thinwire", "torch", "python", "wire"]
    rows = [
        [str(rank), *(str(said.get(name, "?")) for name in header[1:]), significant(said.get("gbit_per_s"))]
        for rank, said in found.ranks.items()
    ]
    title = f"{len(rows)} of {found.world} ranks. Gbit/s: what comes from the rank before, while all send"
    show_grid(TextGrid(title, [*header, "Gbit/s"], rows, labels=8), screen.console())
    for problem in found.problems:
        _say(False, problem)
    if not found.problems:
        _say(True, "all ranks see each other and agree")
