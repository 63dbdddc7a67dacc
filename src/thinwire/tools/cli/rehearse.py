"""`thinwire rehearse`: what compression would do to the loss of your own training script."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from thinwire.errors import CodecError
from thinwire.integrations.choice import options
from thinwire.tools import rehearsal, report
from thinwire.tools.bench.record import Record
from thinwire.tools.cli import flags, screen
from thinwire.tools.cli.bench import deliver
from thinwire.tools.cli.flags import Json, Words, count, option

CODECS = ("int8", "lloyd4")
SCRIPT = "A training script that calls thinwire.rehearse and report_loss."


def command(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help=SCRIPT)],
    arguments: Annotated[Words, typer.Argument(metavar="ARGUMENT", help="Arguments of the script, after --.")] = None,
    codecs: Annotated[Words, option("As for compress_ddp; default int8,lloyd4. none and null are added.")] = None,
    world: Annotated[int, count("Ranks to play.", least=2)] = 8,
    seeds: Annotated[int, count("Runs of each codec; an interval needs 2, 3 are better.")] = 3,
    json: Json = None,
) -> None:
    """Run your training script with each codec and seed, in one process each, and compare its losses by pairs.

    The script calls `thinwire.rehearse(model, optimizer=optimizer)` before its loop, takes one backward pass per rank
    and step, and calls `thinwire.report_loss(loss)` with its validation loss at the end (and as often on the way as you
    like: from those, a difference is given in tokens, too). The command sets codec, ranks and seed. `null` is the
    uncompressed run with a relative noise of 1e-6: what chance alone does.

    \b
    Example:
      thinwire rehearse train.py --codecs int8,lloyd4,lloyd2 --world 8 --seeds 3
      thinwire rehearse train.py --json rehearsal.json -- --epochs 1
    """
    if not Path(script).is_file():
        raise typer.BadParameter(f"{script} is not a file: name a Python script", param_hint="SCRIPT")
    arms = list(dict.fromkeys([rehearsal.NONE, rehearsal.NULL, *(flags.specs(codecs) or CODECS)]))
    with screen.usage_errors("--codecs", CodecError):
        for name in arms[2:]:
            if options.parse(name) == options.Auto():
                raise CodecError("'auto' times codecs on a link, and a rehearsal has none: name codecs")
    deliver(partial(rehearsal.run, rehearsal.Plan(script, arguments or [], arms, world, seeds)), json, show=_show)


def _show(record: Record, console: Console) -> None:
    report.show(record, console)
    for row in record.rows:
        if row["arm"] != rehearsal.NONE:
            console.print(row["verdict"])
