"""The record and the plot of finished runs: loss against bits, by pairs of the same seed.

python -m benchmarks.loss.curve runs.jsonl --optimizer adamw --json loss_25m.json --plot loss.png
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
# From the last run, not from where the record is made.
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
        plain = losses[arms.FP32]
        gap = pairs.difference(mine, plain)
        optimizer = str(first["optimizer"])
        every, momentum = runs.rounds_of(optimizer) or (None, None)
        parallel = "fsdp2" if name.startswith(arms.WEIGHTS) else "diloco" if every else "ddp"
        found.append(
            {
                **{column: first[column] for column in GROUP},
                "optimizer": "adamw" if every else optimizer,
                "parallel": parallel,
                "every": every,
                "outer_momentum": momentum,
                "arm": name,
                "bits": first["bits"],
                "seeds": gap.seeds,
                "val_loss": math.fsum(mine.values()) / len(mine),
                "fp32_val_nats": math.fsum(plain.values()) / len(plain),
                **gap.columns,
                "tokens_more_percent": pairs.more_tokens(gap.gap, each),
                "none_seen": gap.none_seen,
                "params": first["weights"],
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

    shared = {name: found[-1][name] for name in FROM_RUNS}
    shared |= dict.fromkeys(("triton", "python", "cpu", "threads"))  # runs do not keep them
    shared["command"] = "python -m benchmarks.loss.curve benchmarks/loss/RUNS.jsonl --json FILE"
    rows = [row for group in groups(found) if any(o["arm"] == arms.FP32 for o in group) for row in rows_of(group)]
    return Record("loss", {**conditions(torch.device("cpu")), **shared}, rows)


def plot(record: Record, path: str) -> None:
    """Loss against bits with 95 % intervals, the margin and fp32's null arm; on the right the same in % more tokens.

    An arm with one pair of runs has no interval, and a hollow mark.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    known: list[dict[str, Any]] = [row for row in record.rows if row["parallel"] == "ddp"]
    rows = [row for row in known if row["arm"] not in (arms.FP32, arms.NULL)]
    figure, axis = plt.subplots(figsize=(8, 4))
    axis.axhline(0, lw=0.8, color="black")
    said = "no difference: an interval inside"
    axis.axhspan(-pairs.MARGIN, pairs.MARGIN, alpha=0.12, color="tab:green", label=said)
    for row in known:
        if row["arm"] == arms.NULL:
            _mark(axis, 32, row, "d", "tab:gray")
    place = 0.0
    for row in reversed(rows):
        place = max(row["bits"], 1.09 * place)  # what has as many bits is drawn beside it
        kind = ("x", "tab:red") if row["control"] else ("s", "tab:orange") if row["peer"] else ("o", "tab:blue")
        _mark(axis, place, row, *kind)
    axis.set_xscale("log", base=2)
    axis.set_xlim(0.25, 48)
    axis.set_xlabel("bits per element on the wire")
    axis.set_ylabel("validation loss above fp32's, nats")
    axis.grid(alpha=0.3)
    axis.legend(loc="upper right", fontsize=8)
    nats = (-0.003, 0, 0.003, 0.01, 0.02, 0.05, 0.1, 0.4)
    scales: list[tuple[Any, Sequence[float], Sequence[float]]] = [
        (axis.xaxis, (0.5, 1, 2, 3, 4, 8, 16, 32), (0.5, 1, 2, 3, 4, 8, 16, 32)),
        (axis.yaxis, nats, nats),
    ]
    axis.set_yscale("symlog", linthresh=0.02)  # what is shown is linear, but for bad controls
    axis.set_ylim(-0.008, 5)
    each = _slope(rows)
    if each is not None:
        twin = axis.twinx()
        twin.set_yscale("symlog", linthresh=0.02)
        twin.set_ylim(axis.get_ylim())
        twin.set_ylabel("more tokens for fp32's loss, %")
        percent = (-2, 0, 2, 4, 8, 16, 32)
        scales.append((twin.yaxis, [each * math.log2(1 + p / 100) for p in percent], percent))
    for side, places, labels in scales:
        side.set_major_locator(FixedLocator(places))
        side.set_major_formatter(FixedFormatter([f"{label:g}" for label in labels]))
        side.set_minor_locator(NullLocator())
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def _slope(rows: Sequence[Found]) -> float | None:
    """Nats per doubling of tokens, from the arm that differs most."""
    known = [row for row in rows if row["tokens_more_percent"]]
    if not known:
        return None
    most = max(known, key=lambda row: abs(row["delta_nats"]))
    return float(most["delta_nats"] / math.log2(1 + most["tokens_more_percent"] / 100))


def _mark(axis: Any, bits: float, row: Found, mark: str, color: str) -> None:
    value, half = row["delta_nats"], pairs.Difference.of(dict(row)).half
    inside = color if half is not None or mark == "x" else "white"
    axis.errorbar(bits, value, yerr=half, fmt=mark, color=color, mfc=inside, capsize=3, ms=5)
    above = (bits, value + (half or 0))
    axis.annotate(
        row["arm"], above, textcoords="offset points", xytext=(0, 6), fontsize=8, ha="center", va="bottom", rotation=90
    )


def main() -> None:
    """Read runs, print a verdict per arm, write the record and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--optimizer", help="take these runs alone")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE")
    options = parser.parse_args()
    found = [one for path in options.runs for one in runs.read(path)]
    found = [one for one in found if options.optimizer in (None, one["optimizer"])]
    record = recorded(found)
    rows: list[dict[str, Any]] = list(record.rows)
    for row in rows:
        gap = pairs.Difference.of(row)
        print(f"{row['size']:>5} {row['optimizer']} {row['bits']:5.2f} bits  {pairs.verdict(row['arm'], gap)}")
    if options.json:
        write(record, options.json)
    if options.plot:
        plot(record, options.plot)


if __name__ == "__main__":
    main()
