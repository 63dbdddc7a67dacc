"""`thinwire bench`: run a benchmark, print its table, write its record."""

from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from typing import Annotated

import typer
from rich.console import Console

from thinwire.errors import AdviceError, CodecError
from thinwire.tools import report
from thinwire.tools.bench import collectives as collectives_bench, exchange, step as step_bench
from thinwire.tools.bench.models import MODELS
from thinwire.tools.bench.record import Interrupted, Record, write
from thinwire.tools.cli import flags, screen
from thinwire.tools.cli.flags import Json, LinkRate, Quick, Words, count, option
from thinwire.tools.local import link as links, torchrun
from thinwire.tools.local.launch import RankSetup
from thinwire.tools.local.link import BenchError
from thinwire.tools.local.torchrun import RankPlace

app = typer.Typer(
    help="Measure your link, collectives and training steps. A record holds every number with its conditions.",
    epilog="\b\nExample:\n  thinwire bench step --quick\n  thinwire bench collectives --json collectives.json",
    no_args_is_help=True,
    rich_markup_mode=None,
)
FLOATS = "Floats; default 25 million, 8 million below 1gbit, quick 2**18."
CALL_CODECS = f"Codecs, auto, plain; default {','.join(collectives_bench.CODECS)}."
STEP_CODECS = "Codecs, auto; with fsdp2 also pairs; default {}, with fsdp2 {}.".format(
    *map(",".join, step_bench.CODECS.values())
)
MODEL = f"Among {', '.join(MODELS)}; default mlp-25m, on GPUs gpt-124m, quick mlp-1m."
Parallel = StrEnum("Parallel", ["ddp", "fsdp2"])
Worlds = Annotated[Words, option("Numbers of ranks, each measured.", "N,M")]
Rounds = Annotated[int | None, count("Default: 5 or more, as time allows.")]


@app.command("link", short_help="What the link between ranks gives.")
def link_command(world: Worlds = None, link: LinkRate = None, json: Json = None, quick: Quick = False) -> None:
    """What the link between ranks gives: the time of messages of 1 kB to 16 MB, and their rate; by default 2 ranks.

    All ranks send at once, each to the next one. Under torchrun its ranks measure the link between them, on GPUs over
    NCCL; else ranks are started here, over loopback or a shaped link.

    \b
    Example:
      torchrun --nnodes 2 --node-rank 0 --nproc-per-node 1 --master-addr HOST -m thinwire bench link
      sudo thinwire bench link --link 1gbit
    """
    sizes = exchange.SIZES[:3] if quick else exchange.SIZES
    setups = setups_of(world, link, (2,))
    deliver(partial(exchange.run, setups, sizes), json, setups[0].place)


@app.command("collectives", short_help="Sums with codecs beside torch's own.")
def collectives_command(
    world: Worlds = None,
    link: LinkRate = None,
    numel: Annotated[Words, option(FLOATS, "N,M")] = None,
    codecs: Annotated[Words, option(CALL_CODECS)] = None,
    rounds: Rounds = None,
    json: Json = None,
    quick: Quick = False,
) -> None:
    """Sums with codecs beside torch's own in fp32 and bf16, interleaved in one run; by default 2 and 4 ranks.

    Times are medians of the slowest rank; host ms is the time until a call returns. auto is int8 where it is predicted
    to pay; plain is thinwire's uncompressed path. Ranks are those of torchrun, or started here, as in bench step.

    \b
    Example:
      thinwire bench collectives --world 2 --numel 1024,65536,4194304 --codecs auto
      sudo thinwire bench collectives --world 4 --link 100mbit --codecs int8,lloyd4
      torchrun --nproc-per-node 8 -m thinwire bench collectives --json nccl.json
    """
    names = flags.specs(codecs) or None
    with screen.usage_errors("--codecs", CodecError):
        collectives_bench.entries(names or (), 2)
    setups = setups_of(world, link, collectives_bench.WORLDS)
    run = partial(
        collectives_bench.run,
        setups,
        numels=flags.counts(numel, "--numel"),
        codecs=names,
        rounds=rounds,
        quick=quick,
    )
    deliver(run, json, setups[0].place)


@app.command("step", short_help="A training step with each codec beside plain torch.")
def step_command(
    model: Annotated[str | None, option(MODEL, "NAME")] = None,
    parallel: Annotated[Parallel, typer.Option(help="DDP's gradients; FSDP2's gradients and weights.")] = Parallel.ddp,
    world: Worlds = None,
    link: LinkRate = None,
    codecs: Annotated[Words, option(STEP_CODECS)] = None,
    rounds: Rounds = None,
    json: Json = None,
    quick: Quick = False,
) -> None:
    """The time of a training step with each codec, beside plain torch and torch's bf16, interleaved; default 2 ranks.

    A step is a forward pass, a backward pass and SGD. none is plain torch; bf16 is its DDP hook, or FSDP2's
    MixedPrecisionPolicy in bf16. For fsdp2 a name says how gradients and weights travel: lloyd4/int8, or
    lloyd4/lloyd4@replica (weights as differences to a copy on every rank).

    Under torchrun its ranks take the steps, on GPUs over NCCL; else ranks are started here, over loopback. With --link
    each has a network namespace whose link is held to that rate, and bytes are counted at its interface.

    \b
    Example:
      thinwire bench step --model mlp-25m --world 2 --codecs int8,lloyd4,auto
      sudo thinwire bench step --link 1gbit --parallel fsdp2 --json step.json
      torchrun --nnodes 2 --node-rank 0 --nproc-per-node 8 --master-addr HOST -m thinwire bench step
    """
    if model not in (None, *MODELS):
        raise typer.BadParameter(f"{model!r} is not one of {', '.join(MODELS)}", param_hint="--model")
    names = flags.specs(codecs) or None
    with screen.usage_errors("--codecs", CodecError):
        step_bench.lineup(names or (), parallel)
    setups = setups_of(world, link, (2,))
    run = partial(
        step_bench.run,
        setups,
        model=model,
        parallel=parallel.value,
        codecs=names,
        rounds=rounds,
        quick=quick,
    )
    deliver(run, json, setups[0].place)


def setups_of(world: Words, link: str | None, usual: Sequence[int]) -> list[RankSetup]:
    """The ranks that torchrun started, or those to start here."""
    with screen.usage_errors("environment", AdviceError):
        place = torchrun.place()
    if place is not None:
        flags.refuse("leave it out: torchrun started the ranks that measure", world=world, link=link)
        return [RankSetup(world=place.world, place=place)]
    worlds = flags.counts(world, "--world", 2, links.MOST_HOSTS) or usual
    return [RankSetup(world=ranks, link=flags.shaped(link)) for ranks in worlds]


@links.sigterm_as_ctrl_c()
def deliver(
    measure: Callable[..., Record],
    json: str | None,
    place: RankPlace | None = None,
    *,
    show: Callable[[Record, Console], None] = report.show,
) -> None:
    """Measure, write the record, print the table. After Ctrl-C the finished rows are kept, and the status is 130.

    Where a file could not be written the status is 1. Of the ranks of torchrun the first prints and writes.
    """
    flags.writable(json, "--json")
    status = 0
    try:
        with screen.plain_errors(), screen.usage_errors(None, BenchError), screen.progress() as shown:
            record = measure(progress=shown)
    except Interrupted as stop:
        typer.echo(f"interrupted: {len(stop.record.rows)} finished rows kept", err=True)
        record, status = stop.record, screen.INTERRUPTED
    if place is not None and place.rank > 0:
        raise typer.Exit(status)
    try:
        if json is not None:
            write(record, json)  # first: the table's reader may go away
    except OSError as error:
        if json == "-":
            raise
        typer.echo(f"Error: {json} cannot be written: {error.strerror or error}", err=True)
        status = 1
    if json != "-":
        show(record, screen.console())
    raise typer.Exit(status)
