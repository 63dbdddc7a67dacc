"""Runs a training script once per codec and seed, and compares by pairs the losses that it reports.

Every run is a process of its own, started as `python -m thinwire.tools.rehearsal SCRIPT ...`, which seeds Python, NumPy
and torch before the script begins.
"""

import json
import os
import random
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch

from thinwire.errors import ThinwireError
from thinwire.rehearsal import ENVIRONMENT
from thinwire.tools import pairs
from thinwire.tools.bench.record import Progress, Record, Row, collect

NONE, NULL = "none", "null"
NOISE = 1e-6  # of the null arm, relative: what chance alone does to a run
_LINES = 15  # of a script's output that an error shows


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
        environment = {**os.environ, ENVIRONMENT: json.dumps(asked)}
        command = [sys.executable, "-m", __name__, plan.script, *plan.arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
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
    seed = json.loads(os.environ[ENVIRONMENT])["seed"]
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
