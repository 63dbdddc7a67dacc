"""`thinwire demo`: train a small GPT plainly and compressed, and show what that did."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated

import typer
from rich.console import Console

from thinwire.errors import CodecError, RecordError
from thinwire.tools import pairs, recommend
from thinwire.tools.advise import verdict
from thinwire.tools.advise.model import TrainingJob
from thinwire.tools.bench import step
from thinwire.tools.bench.record import Record, Row
from thinwire.tools.cli import flags, screen, training
from thinwire.tools.cli.bench import deliver
from thinwire.tools.local import link as links
from thinwire.tools.local.link import LinkError, ShapedLink
from thinwire.tools.recommend import BF16_HOOK, Recommendation, Way
from thinwire.tools.report import tables
from thinwire.tools.report.cells import Column, TextGrid, fixed, grid, number, scaled, significant, text
from thinwire.tools.report.kinds import SPEEDUPS, texts

CODECS = f"Beside the uncompressed run; default {','.join(training.CODECS)}. Also auto. bf16 is torch's hook."
STEPS = f"Per run; default {training.DemoPlan.steps}, quick {training.QUICK.steps}."
LINK = "A shaped link for every rank, or loopback; default 1gbit where network namespaces work, else loopback."
LOOPBACK = "loopback"
USUAL = "1gbit"
LABELS = texts("task", "world", "cores", "link", "params", "seeds", "steps", "scheme")
COLUMNS = (
    *(*LABELS, Column("loss", "loss", lambda value: value if isinstance(value, str) else significant(value))),
    Column("gap", "val_gap_nats", fixed(4, "+"), "loss less fp32's of the same seed, in nats"),
    Column("±", "half", fixed(4), "half of its 95 % interval"),
    *(Column("step ms", "step_ms", significant), *SPEEDUPS),
    Column("kB", "bytes_per_step", scaled(1e-3), "sent per rank and step, torch's own on loopback by formula"),
    Column("fewer ×", "fewer", fixed(1)),
)


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
    from the same three seeds on the same batches. As root, or where users may create network namespaces, ranks talk
    over a link shaped to 1 Gbit/s, else over loopback, where bytes cost nothing. The demo prints loss, bytes and time
    per step as measured here, and a verdict from this run's own losses. It takes about two minutes on two cores. After
    Ctrl-C the codecs that were finished are printed and written, and the exit status is 130.

    \b
    Example:
      thinwire demo
      thinwire demo --codecs int8,lloyd4:block=256,bf16 --steps 300 --json demo.json
      thinwire demo --link 100mbit
      thinwire demo --quick --link loopback --json - > demo.json
    """
    named = flags.specs(codecs) or None
    with screen.usage_errors("--codecs", CodecError):
        step.lineup(named or ())
    shaped = _usual_link() if link is None else None if link == LOOPBACK else flags.shaped(link)
    run = partial(training.run, world, named, steps, shaped, quick)
    deliver(run, json, show=show)


def _usual_link() -> ShapedLink | None:
    """A gigabit, where a link can be shaped."""
    links.become_root()
    try:
        with links.hosts(1, links.parse(USUAL)):
            return links.parse(USUAL)
    except LinkError:
        return None


def show(record: Record, console: Console) -> None:
    """Print what was measured, and the verdict."""
    if not record.rows:
        return
    for laid in grids(record.rows):
        tables.show_grid(laid, console)
    for line in _verdict(record):
        console.print(line)
    console.print("For your own model, ranks and links: thinwire advise.")


def grids(rows: Sequence[Row]) -> list[TextGrid]:
    """The table of a record of kind "train"."""
    sent = number(rows[0]["bytes_per_step"])
    shown: list[Row] = []
    for row in rows:
        seeds, own = (number(row[name]) for name in ("seeds", "bytes_per_step"))
        half = number(row.get("val_gap_error"), pairs.t95(int(seeds) - 1)) if seeds and seeds > 1 else None
        fewer = sent / own if sent and own else None
        loss = "diverged" if row.get("diverged") else row["loss"]
        shown.append({**row, "scheme": recommend.scheme_of(row), "loss": loss, "half": half or None, "fewer": fewer})
    return [grid("", shown, COLUMNS, len(LABELS), "over fp32, over bf16: speedup over torch's own")]


def _verdict(record: Record) -> Iterator[str]:
    """By the rule of thinwire advise, from this run's steps and losses."""
    first = record.rows[0]
    link = text(first["link"])
    try:
        own = verdict.losses_of(record, "this run")
    except RecordError:
        yield "No verdict: it needs a codec beside fp32, and two seeds or more."
        return
    yield f"Verdict for this network over {link}, from this run's steps and losses:"
    job = TrainingJob(int(verdict.column(first, "params", 1)), 0.0)
    yield from verdict.answers(job, measured(record.rows, own))
    if link == LOOPBACK:
        yield (
            "Loopback is faster than any network: bytes cost nothing here, so compression cannot pay. As root, or "
            "where users may create network namespaces, the demo runs over a link shaped to 1gbit."
        )


def measured(rows: Sequence[Row], losses: verdict.Losses) -> Recommendation:
    """What the rule says of steps as the run timed them."""
    torchs = {"fp32": "nothing to add", "bf16": BF16_HOOK}
    ways = []
    for row in rows:
        name = recommend.scheme_of(row)
        p20, p50, p80 = (1e-3 * (number(row.get(key)) or 0.0) for key in ("step_ms_p20", "step_ms", "step_ms_p80"))
        code = torchs.get(name, f'thinwire.compress_ddp(model, "{row["codec"]}")')
        ways.append(Way(name, code, p50, p50 / p80, p50 / p20, losses.get(name), name in torchs))
    return recommend.choose(ways)
