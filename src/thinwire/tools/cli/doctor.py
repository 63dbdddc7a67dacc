"""`thinwire doctor`: what works on this machine, and what to do about the rest."""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from thinwire.tools.cli import screen

if TYPE_CHECKING:
    from thinwire.tools.cli.checkup import Finding

MARKS = {True: "✓", False: "✗", None: "–"}
ASCII_MARKS = {True: "ok  ", False: "FAIL", None: "-   "}
STYLES = {True: "green", False: "bold red", None: "dim"}


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Compare every kernel of a GPU, which takes minutes.")] = False,
) -> None:
    """Say what works on this machine, and what to do about the rest.

    Each line starts with ✓ (works), ✗ (broken) or – (optional, not here). The exit status is 1 only where something
    is broken: python or torch is too old, the reference fails its self-test, an installed kernel backend does not
    load or gives other bytes than the reference, or the environment names a network interface that is not there. A
    missing optional part, a compiler or a GPU say, leaves it at 0.

    As root, a network namespace with a shaped link is made and removed again. On a machine with a GPU a few kernels
    are compiled and compared, some seconds when it is done for the first time.

    \b
    Example:
      thinwire doctor
      thinwire doctor --full
      thinwire doctor --json
    """
    from thinwire.tools.cli import checkup  # with torch, which --help does without

    findings = []
    for finding in checkup.examine(_followed, full=full):
        findings.append(finding)
        if not as_json:
            _show(finding)
    works = all(finding.works is not False for finding in findings)
    if as_json:
        typer.echo(json.dumps({"works": works, "findings": [asdict(finding) for finding in findings]}, indent=1))
    raise typer.Exit(int(not works))


def _followed(kernels: Sequence[Any]) -> Iterable[Any]:
    """With a bar that is gone before the next line is printed."""
    with screen.progress() as follow:
        yield from follow(kernels)


def _show(finding: "Finding") -> None:
    """One line, in marks the stream can show, coloured on a terminal."""
    marks = MARKS if (sys.stdout.encoding or "").lower().startswith("utf") else ASCII_MARKS
    todo = f"; {finding.todo}" if finding.todo else ""
    line = f" {finding.name:<20} {finding.detail}{todo}"
    screen.console().print(Text.assemble((marks[finding.works], STYLES[finding.works]), line), soft_wrap=True)
