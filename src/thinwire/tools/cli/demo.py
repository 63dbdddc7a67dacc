"""`thinwire demo`: train a small GPT plainly and compressed, and show what that did."""

from functools import partial
from typing import Annotated

import typer
from rich.console import Console

from thinwire.errors import CodecError
from thinwire.tools.advise import cluster
from thinwire.tools.advise.cluster import Machine
from thinwire.tools.bench import step
from thinwire.tools.bench.record import Record
from thinwire.tools.cli import findings, flags, screen, training
from thinwire.tools.cli.bench import deliver
from thinwire.tools.local import link as links
from thinwire.tools.report import tables

CODECS = (
    f"Beside the uncompressed run; default {','.join(training.CODECS)}. Also auto, lloyd2@ef21. bf16 is torch's hook."
)
STEPS = f"Per run; default {training.DemoPlan.steps}, quick {training.QUICK.steps}."
LINK = "Such as 100mbit or 1gbit: a shaped link for every rank, step times measured on it. Needs root."


def command(
    world: Annotated[int, typer.Option(min=2, max=links.MOST_HOSTS, metavar="N", help="Ranks.")] = 2,
    codecs: Annotated[list[str] | None, typer.Option(metavar="A,B", help=CODECS)] = None,
    steps: Annotated[int | None, typer.Option(min=1, metavar="N", help=STEPS)] = None,
    link: Annotated[str | None, typer.Option(metavar="RATE", help=LINK)] = None,
    json: flags.Json = None,
    quick: Annotated[bool, typer.Option("--quick", help="A smaller network and few steps: seconds.")] = False,
) -> None:
    """See it work: ranks on this machine train a small GPT, plainly and once per codec.

    The network learns the text of Python's help pages. Nothing is downloaded, and no GPU is needed. Every codec trains
    from the same three seeds on the same batches. The demo prints the loss against fp32, the bytes and the time per
    step as measured here, and a verdict: the fastest codec whose loss stays within the seed-to-seed spread, for links
    of 100mbit to 100gbit, by the rule and the cost model of thinwire advise. It takes about a minute on two cores. With
    --quick there are too few seeds for a verdict. After Ctrl-C the codecs that were finished are printed and written,
    and the exit status is 130.

    \b
    Example:
      thinwire demo
      thinwire demo --codecs int8,lloyd4:block=256,bf16 --steps 300 --json demo.json
      sudo thinwire demo --link 100mbit
      thinwire demo --quick --json - > demo.json
    """
    named = flags.specs(codecs) or None
    with screen.usage_errors("--codecs", CodecError):
        step.lineup(named or ())
    shaped = flags.shaped(link)
    run = partial(training.run, world, named, steps, shaped, quick)
    deliver(run, json, show=lambda record, console: show(record, cluster.recorded("cpu"), console))


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
