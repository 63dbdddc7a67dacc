"""`thinwire rehearse`: runs a training script once per codec and seed, and compares by pairs the losses it reports.

Every run is a process of its own, started as `python -m thinwire.tools.cli.rehearse SCRIPT ...`, which seeds Python,
NumPy and torch before the script begins.
"""

import json as json_format
import os
import random
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated

import torch
import typer
from rich.console import Console

from thinwire.errors import CodecError, ThinwireError
from thinwire.integrations.choice import options
from thinwire.rehearsal import ENVIRONMENT
from thinwire.tools import pairs, report
from thinwire.tools.bench.record import Progress, Record, Row, collect
from thinwire.tools.cli import flags, screen
from thinwire.tools.cli.bench import deliver
from thinwire.tools.cli.flags import Json, Words, count, option

CODECS = ("int8", "lloyd4")
SCRIPT = "A training script that calls thinwire.rehearse and report_loss."
NONE, NULL = "none", "null"
NOISE = 1e-6  # of the null arm, relative: what chance alone does to a run
_LINES = 15  # of a script's output that an error shows


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
    arms = list(dict.fromkeys([NONE, NULL, *(flags.specs(codecs) or CODECS)]))
    with screen.usage_errors("--codecs", CodecError):
        for name in arms[2:]:
            if options.parse(name) == options.Auto():
                raise CodecError("'auto' times codecs on a link, and a rehearsal has none: name codecs")
    deliver(partial(run, Plan(script, arguments or [], arms, world, seeds)), json, show=_show)


def _show(record: Record, console: Console) -> None:
    report.show(record, console)
    for row in record.rows:
        if row["arm"] != NONE:
            console.print(row["verdict"])


@dataclass(frozen=True)
class Plan:
    """What to run."""

    script: str
    arguments: Sequence[str]
    arms: Sequence[str]  # NONE, NULL and codecs
    world: int
    seeds: int


def run(plan: Plan, progress: Progress) -> Record:
    """A record of kind "loss"."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # where scripts usually train
    return collect("loss", device, _rows(plan, progress))


def _rows(plan: Plan, progress: Progress) -> Generator[Row]:
    """An arm is compared with the uncompressed one, which comes first."""
    cases = {f"{arm}, seed {seed}": (arm, seed) for arm in plan.arms for seed in range(1, plan.seeds + 1)}
    plain: dict[int, float] = {}
    losses: dict[int, float] = {}
    curves: list[list[float]] = []
    for case in progress(list(cases)):
        arm, seed = cases[case]
        curve, bits = train(plan, arm, seed)
        losses[seed] = curve[-1]
        if arm == NONE:
            plain[seed] = curve[-1]
            curves.append(curve)
        if seed < plan.seeds:
            continue
        gap, each = pairs.difference(losses, plain), per_doubling(curves)
        yield {
            "size": Path(plan.script).name,
            "optimizer": None,
            "parallel": "ddp",
            "arm": arm,
            "bits": bits,
            "params": None,
            "world": plan.world,
            "seeds": plan.seeds,
            "val_loss": fmean(losses.values()),
            "fp32_val_nats": fmean(plain.values()),
            **gap.columns,
            "tokens_more_percent": pairs.more_tokens(gap.gap, each),
            "verdict": pairs.verdict(arm, gap, each),
        }
        losses = {}


def per_doubling(curves: Sequence[Sequence[float]]) -> float | None:
    """Nats per doubling of the uncompressed runs' tokens, from the losses they reported on the way; None for few."""
    length = min(map(len, curves))
    if length < 4:
        return None
    return pairs.slope([[step + 1.0, fmean(curve[step] for curve in curves)] for step in range(length)])


def train(plan: Plan, arm: str, seed: int) -> tuple[list[float], float | None]:
    """The losses that one run reports, and its bits per element; ThinwireError where it fails or reports none."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "losses"
        asked = {
            "codec": NONE if arm == NULL else arm,
            "world": plan.world,
            "noise": NOISE if arm == NULL else 0.0,
            "seed": seed,
            "out": str(out),
        }
        environment = {**os.environ, ENVIRONMENT: json_format.dumps(asked)}
        command = [sys.executable, "-m", __name__, plan.script, *plan.arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        lines = [json_format.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-_LINES:])
        raise ThinwireError(f"{plan.script} ({arm}, seed {seed}) ended with status {done.returncode}:\n{tail}")
    if not lines:
        raise ThinwireError(
            f"{plan.script} ({arm}, seed {seed}) reported no loss: call thinwire.rehearse(model) before training, and "
            "thinwire.report_loss(loss) with the validation loss at its end"
        )
    return [line["loss"] for line in lines], lines[-1]["bits"]


def main() -> None:
    """Run a script with a seed, as `python SCRIPT ...` would without one."""
    seed = json_format.loads(os.environ[ENVIRONMENT])["seed"]
    random.seed(seed)
    torch.manual_seed(seed)
    with suppress(ImportError):
        import numpy as np

        np.random.seed(seed)
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
