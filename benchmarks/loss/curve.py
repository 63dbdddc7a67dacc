"""The record and the plot of finished runs: loss against bits, by pairs of the same seed.

python -m benchmarks.loss.curve runs.jsonl --json loss_25m.json --plot loss.svg
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.loss import arms, runs
from benchmarks.schemes import CONTROLS
from thinwire.tools import pairs
from thinwire.tools.bench.record import Record, conditions, write

Found = Mapping[str, Any]
GROUP = ("size", "optimizer", "world", "text")
# What the runs of every row share, from the runs themselves.
FROM_RUNS = ("device", "torch", "commit")


def groups(found: Sequence[Found]) -> list[list[Found]]:
    """Runs that may be compared: one size, optimizer, world and text."""
    by: dict[tuple[object, ...], list[Found]] = {}
    for one in found:
        by.setdefault(tuple(one[name] for name in GROUP), []).append(one)
    return list(by.values())


def per_doubling(group: Sequence[Found]) -> float | None:
    """Nats per doubling of fp32's tokens, from pairs of its runs with fewer and with all steps."""
    plain = [one for one in group if one["arm"] == arms.FP32]
    full = max((one["steps"] for one in plain), default=0)
    slopes = [
        (one["val_loss"] - short["val_loss"]) / math.log2(one["steps"] / short["steps"])
        for one in plain
        for short in plain
        if one["steps"] == full > short["steps"] and one["seed"] == short["seed"]
    ]
    return math.fsum(slopes) / len(slopes) if slopes else None


def rows_of(group: Sequence[Found]) -> list[dict[str, Any]]:
    """One row per arm, compared with fp32's runs of the same seeds and steps."""
    full = max(one["steps"] for one in group if one["arm"] == arms.FP32)
    whole = [one for one in group if one["steps"] == full]
    losses: dict[str, dict[int, float]] = {}
    for one in whole:
        losses.setdefault(one["arm"], {})[one["seed"]] = one["val_loss"]
    each = per_doubling(group)
    found: list[dict[str, Any]] = []
    for name, mine in losses.items():
        if not mine.keys() & losses[arms.FP32].keys():
            continue
        first = next(one for one in whole if one["arm"] == name)
        gap = pairs.difference(mine, losses[arms.FP32])
        tokens = None if each is None else pairs.more_tokens(gap.mean, each)
        found.append(
            {
                **{column: first[column] for column in GROUP},
                "arm": name,
                "bits": first["bits"],
                "seeds": gap.pairs,
                "val_loss": math.fsum(mine.values()) / len(mine),
                "gap_nats": gap.mean,
                "gap_half": gap.half,
                "more_tokens": tokens,
                "none_seen": gap.none_seen,
                "weights": first["weights"],
                "tokens": first["tokens"],
                "steps": full,
                "step_ms": first["step_ms"],
                "control": name in CONTROLS,
                "peer": name in arms.PEERS or name.startswith("powersgd"),
            }
        )
    return sorted(found, key=lambda row: (-row["bits"], str(row["arm"])))


def recorded(found: Sequence[Found]) -> Record:
    """A record of kind "loss"; its conditions are those of the runs."""
    import torch

    shared = {name: "+".join(sorted({str(one[name]) for one in found})) for name in FROM_RUNS}
    rows = [row for group in groups(found) if any(o["arm"] == arms.FP32 for o in group) for row in rows_of(group)]
    return Record("loss", {**conditions(torch.device("cpu")), **shared}, rows)


def plot(record: Record, path: str) -> None:
    """Loss against bits with intervals, fp32's null band, and its twin in % more tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows: list[dict[str, Any]] = [row for row in record.rows if row["gap_half"] is not None and row["arm"] != arms.FP32]
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharex=True)
    null = next((row for row in rows if row["arm"] == arms.NULL), None)
    for axis, column, label in zip(
        axes, ("gap_nats", "more_tokens"), ("loss above fp32, nats", "more tokens, %"), strict=True
    ):
        for row in rows:
            if row["arm"] == arms.NULL or row[column] is None:
                continue
            value, half = row[column], row["gap_half"]
            if column == "more_tokens":
                value, half = 100 * value, 0.0
            mark = "x" if row["control"] else "s" if row["peer"] else "o"
            axis.errorbar(row["bits"], value, yerr=half or None, fmt=mark, capsize=3)
            axis.annotate(str(row["arm"]), (row["bits"], value), textcoords="offset points", xytext=(5, 4))
        if null is not None and column == "gap_nats":
            middle, half = null["gap_nats"], null["gap_half"]
            axis.axhspan(middle - half, middle + half, alpha=0.2, label="fp32 with 1e-6 noise")
            axis.legend()
        axis.set_xscale("log", base=2)
        axis.set_yscale("symlog", linthresh=0.003 if column == "gap_nats" else 0.3)
        axis.set_xlabel("bits per element on the wire")
        axis.set_ylabel(label)
        axis.axhline(0, lw=0.5)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Read runs, print a verdict per arm, write the record and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE")
    options = parser.parse_args()
    found = [one for path in options.runs for one in runs.read(path)]
    record = recorded(found)
    rows: list[dict[str, Any]] = list(record.rows)
    for row in rows:
        gap = pairs.Difference(row["gap_nats"], row["gap_half"], row["seeds"])
        print(f"{row['size']:>5} {row['optimizer']} {row['bits']:5.2f} bits  {pairs.verdict(row['arm'], gap)}")
    if options.json:
        write(record, options.json)
    if options.plot:
        plot(record, options.plot)


if __name__ == "__main__":
    main()
