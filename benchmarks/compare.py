"""Two records of one kind, row by row: what changed, and whether by more than noise.

A change is new over old, upwards is worse. With it goes the range that the rows' own spread leaves open; only a range
that lies wholly on one side of 1 is called a change.

python -m benchmarks.compare before.json after.json --fail-on-regression
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from benchmarks.command import start
from thinwire.errors import RecordError
from thinwire.tools import report
from thinwire.tools.bench import record
from thinwire.tools.bench.record import Record, Row
from thinwire.tools.cli import screen
from thinwire.tools.report import ABSENT, TextGrid, counted, fixed, number, significant, text

SIGMAS = 3.0  # standard errors; more => fewer false alarms, larger changes go unseen
ROUNDING = 1e-6  # relative; sums in another order differ by less
HEADERS = 66 / 1448  # bytes of headers per byte of payload: what a count at an interface may differ by
REGRESSION, BETTER, SAME, UNKNOWN = "REGRESSION", "better", "within noise", "no spread"
_TIMED = ("ms_p50", "ms_p20", "ms_p80")
LABELS: dict[str, tuple[str, ...]] = {  # rows of two records with the same labels are compared
    "codec": ("distribution", "codec", "numel"),
    "kernels": ("part", "op", "codec", "backend", "device", "dtype", "numel", "world", "threads"),
    "collectives": ("verb", "model", "codec", "asked", "world", "nodes", "link", "numel"),
    "train": ("task", "parallel", "optimizer", "codec", "every", "weights", "feedback", "world", "link", "steps"),
    "qat": (
        *("task", "method", "weight_bits", "act_bits"),
        *("op", "gradient", "granularity", "dtype", "backend", "device", "numel", "threads"),
    ),
    "loss": ("size", "optimizer", "parallel", "arm", "every", "world", "steps"),
    "exact": ("optimizer", "rate", "step", "numel", "backend"),
    "group": ("client", "network", "rules", "world", "link", "numel"),
    "link": ("world", "link", "backend", "nbytes"),
    "soak": ("world",),
}
# The columns that are compared. A time: its percentiles, and a time beside it that should not have changed.
TIMES: dict[str, tuple[str, str, str, str]] = {
    "kernels": (*_TIMED, "copy_ms"),
    "collectives": (*_TIMED, "plain_ms"),
    "train": ("step_ms", "step_ms_p20", "step_ms_p80", "compute_ms"),
    "qat": (*_TIMED, "floor_ms"),
    "group": (*_TIMED, "plain_ms"),
    "link": (*_TIMED, ""),
}
MEANS = {  # over seeds: the column of the standard error, and whether the number is a logarithm already
    "loss_log_ratio": ("loss_log_ratio_error", True),
    "val_gap_nats": ("val_gap_error", True),
    "train_loss": ("train_loss_error", False),
}
COMPUTED = {  # by how much a number that is not timed may differ, relatively
    **dict.fromkeys(("wire_bits", "bits", "nmse", "bytes_formula", "peak_bytes_per_element"), ROUNDING),
    **{"rel_error": 1e-3, "bytes_per_step": HEADERS, "mismatches": 0.0, "hangs": 0.0, "leaks": 0.0},
}
PROMISES = {"identical": True, "diverged": False}  # what has to hold


@dataclass(frozen=True)
class Change:
    labels: tuple[str, ...]
    column: str
    old: str
    new: str
    ratio: float
    low: float | None = None  # what noise leaves open; None where the rows have no spread
    high: float | None = None

    @property
    def verdict(self) -> str:
        """One of REGRESSION, BETTER, SAME, UNKNOWN."""
        if self.low is None or self.high is None:
            return UNKNOWN
        return REGRESSION if self.low > 1 else BETTER if self.high < 1 else SAME


@dataclass(frozen=True)
class Comparison:
    kind: str
    changes: list[Change]
    only_old: int
    only_new: int

    @property
    def is_worse(self) -> bool:
        """Whether something got worse by more than noise, or is no longer there."""
        return self.only_old > 0 or any(change.verdict == REGRESSION for change in self.changes)

    def __str__(self) -> str:
        """2 regressions, 1 better, 27 within noise."""
        counts = Counter(change.verdict for change in self.changes)
        parts = [counted(counts[REGRESSION], "regression")]
        parts += [f"{counts[verdict]} {verdict}" for verdict in (BETTER, SAME, UNKNOWN) if counts[verdict]]
        parts += [f"{counted(self.only_old, 'row')} only in the old record"] if self.only_old else []
        parts += [f"{counted(self.only_new, 'row')} only in the new one"] if self.only_new else []
        return ", ".join(parts)


def command(
    old: Annotated[str, typer.Argument(metavar="OLD", help="A record.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="A later one of the same kind.")],
    fail_on_regression: Annotated[
        bool, typer.Option("--fail-on-regression", help="Exit with 1 where NEW is worse by more than noise.")
    ] = False,
) -> None:
    """Compare two records of one kind, row by row. A row of OLD that NEW lacks counts as worse."""
    with screen.usage_errors("OLD NEW", RecordError):
        records = [record.read(path) for path in (old, new)]
    if not comparable(records):
        kinds = " and a ".join(found.kind for found in records)
        raise typer.BadParameter(f"a {kinds} record share no row", param_hint="OLD NEW")
    found = compare(*records)
    report.show_grid(grid(found), screen.console())
    raise typer.Exit(int(fail_on_regression and found.is_worse))


def comparable(records: Sequence[Record]) -> bool:
    return len(records) == 2 and records[0].kind == records[1].kind and bool(_pairs(*records))


def compare(old: Record, new: Record) -> Comparison:
    pairs = _pairs(old, new)
    changes = [change for key, both in pairs.items() for change in _changes(old.kind, key[:-1], *both)]
    return Comparison(old.kind, changes, len(old.rows) - len(pairs), len(new.rows) - len(pairs))


def grid(found: Comparison) -> TextGrid:
    """A line for each column of each pair of rows, labels that are the same everywhere left out."""
    names = LABELS[found.kind]
    kept = [at for at in range(len(names)) if len({change.labels[at] for change in found.changes}) > 1] or [0]
    header = [*(names[at] for at in kept), "column", "old", "new", "new/old", "noise", "verdict"]
    rows = []
    for change in found.changes:
        ratio, low, high = (
            "∞" if value == math.inf else fixed(3)(value) for value in (change.ratio, change.low, change.high)
        )
        noise = ABSENT if change.low is None else f"{low} to {high}"
        rows.append(
            [*(change.labels[at] for at in kept), change.column, change.old, change.new, ratio, noise, change.verdict]
        )
    title = f"New over old: {found}. noise: what the spread of the rows leaves open"
    return TextGrid(title, header, rows, labels=len(kept) + 1)


def _pairs(old: Record, new: Record) -> dict[tuple[str, ...], tuple[Row, Row]]:
    """Rows with the same labels; of several with the same ones, the first and the first, the second and the second."""
    before = dict(_keyed(old))
    return {key: (before[key], row) for key, row in _keyed(new) if key in before}


def _keyed(record: Record) -> Iterator[tuple[tuple[str, ...], Row]]:
    seen: Counter[tuple[str, ...]] = Counter()
    for row in record.rows:
        labels = tuple(text(row.get(name)) for name in LABELS[record.kind])
        seen[labels] += 1
        yield (*labels, str(seen[labels])), row


def _changes(kind: str, labels: tuple[str, ...], old: Row, new: Row) -> Iterator[Change]:
    time = TIMES.get(kind, ("",))[0]
    for column in (time, *MEANS, *COMPUTED, *PROMISES):
        before, after = number(old.get(column)), number(new.get(column))
        if before is None:
            continue
        if after is not None:
            found = _judged(kind, column, before, after, old, new)
        elif column in new and new[column] is None:
            found = (math.inf, math.inf, math.inf)  # it is gone: the run diverged, or a kernel failed
        else:
            continue
        if found is not None:
            show = text if column in PROMISES else significant
            yield Change(labels, column, show(old[column]), show(new[column]), *found)


def _judged(kind: str, column: str, before: float, after: float, old: Row, new: Row) -> tuple[float, ...] | None:
    """New over old, and the range that noise leaves it; None where a promise holds as before."""
    if column in PROMISES:
        return None if before == after else (0.0,) * 3 if after == PROMISES[column] else (math.inf,) * 3
    if column in MEANS:
        error, is_log = MEANS[column]
        errors = [number(row.get(error)) for row in (old, new)]
        slack = SIGMAS * math.hypot(*(value or 0.0 for value in errors))
        ends = [after] if None in errors else [after, after - slack, after + slack]
        return tuple(math.exp(min(end - before, 700)) if is_log else _quotient(end, before) for end in ends)
    if column in COMPUTED:
        slack = COMPUTED[column] * abs(before)
        return tuple(_quotient(end, before) for end in (after, max(0.0, after - slack), after + slack))
    _, p20, p80, control = TIMES[kind]
    low, high, drift = (_ratio(new, above, old, below) for above, below in ((p20, p80), (p80, p20), (control, control)))
    if low is None or high is None:
        return (_quotient(after, before),)
    return _quotient(after, before), low / max(1.0, drift or 1.0), high / min(1.0, drift or 1.0)


def _ratio(new: Row, above: str, old: Row, below: str) -> float | None:
    ours, theirs = number(new.get(above)), number(old.get(below))
    return None if ours is None or theirs is None else _quotient(ours, theirs)


def _quotient(new: float, old: float) -> float:
    return 1.0 if new == old else new / old if old else math.inf


if __name__ == "__main__":
    start(command)
