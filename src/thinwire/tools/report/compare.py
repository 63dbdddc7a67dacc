"""Two records of one kind, row by row: what changed, and whether by more than noise.

A change is new over old. With it goes the range that the rows' own spread leaves open; only a range that lies wholly on
one side of 1 is called a change. docs/reference/report.md says where the range of every kind of number comes from.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from thinwire.tools.bench.record import Record, Row, Value
from thinwire.tools.report.cells import ABSENT, TextGrid, Tone, commit, counted, fixed, number, significant, text
from thinwire.tools.report.kinds import SPEED_LABELS

SIGMAS = 3.0  # standard errors; more => fewer false alarms, larger changes go unseen
ROUNDING = 1e-6  # relative; sums in another order differ by less
FP32 = 2.0**-23  # relative error of one fp32 rounding
MOST_LOG = math.log(sys.float_info.max)
HEADERS = 66 / 1448  # bytes of headers per byte of payload: what a count at an interface may differ by

REGRESSION = "REGRESSION"
BETTER = "better"
SAME = "within noise"
UNKNOWN = "no spread"
_TONES: dict[str, Tone] = {REGRESSION: "bad", BETTER: "good"}


@dataclass(frozen=True)
class Range:
    """New over old, and between what its noise leaves it; None where the rows tell no spread."""

    ratio: float
    low: float | None = None
    high: float | None = None


# Of the old and the new number, and of their rows: upwards is worse. None: there is nothing to say.
Judge = Callable[[float, float, Row, Row], Range | None]


def _timed(p20: str, p80: str, control: str) -> Judge:
    """A median with the columns of its 20th and 80th percentile, and of a time that should not have changed."""

    def judge(before: float, after: float, old: Row, new: Row) -> Range:
        low = _ratio(new.get(p20), old.get(p80))
        high = _ratio(new.get(p80), old.get(p20))
        if low is None or high is None:
            return Range(_quotient(after, before))
        drift = _ratio(new.get(control), old.get(control)) or 1.0
        return Range(_quotient(after, before), low / max(1.0, drift), high / min(1.0, drift))

    return judge


def _mean(error: str, over: Callable[[float, float], float], least: float = 0.0) -> Judge:
    """A mean over seeds, with the column of its standard error; `over` says how much worse a number is than another."""

    def judge(before: float, after: float, old: Row, new: Row) -> Range:
        errors = [found for row in (old, new) if (found := number(row.get(error))) is not None]
        if len(errors) < 2:
            return Range(over(after, before))
        slack = SIGMAS * math.hypot(*errors)
        ends = [max(least, after - slack), after + slack]
        return Range(over(after, before), *sorted(over(end, before) for end in ends))

    return judge


def _computed(relative: float = ROUNDING, absolute: float = 0.0) -> Judge:
    """A number that a run computes rather than times."""

    def judge(before: float, after: float, old: Row, new: Row) -> Range:
        slack = relative * abs(before) + absolute
        return Range(*(_quotient(end, before) for end in (after, max(0.0, after - slack), after + slack)))

    return judge


def _promise(kept: bool) -> Judge:
    """Something that has to hold, true or false; that it no longer does is always a regression."""

    def judge(before: float, after: float, old: Row, new: Row) -> Range | None:
        change = 0.0 if after == kept else math.inf
        return None if before == after else Range(change, change, change)

    return judge


@dataclass(frozen=True)
class Change:
    labels: tuple[str, ...]
    column: str
    old: str
    new: str
    range: Range

    @property
    def verdict(self) -> str:
        """One of REGRESSION, BETTER, SAME, UNKNOWN."""
        if self.range.low is None or self.range.high is None:
            return UNKNOWN
        return REGRESSION if self.range.low > 1 else BETTER if self.range.high < 1 else SAME


@dataclass(frozen=True)
class Comparison:
    old: Record
    new: Record
    changes: list[Change]
    only_old: int
    only_new: int

    @property
    def is_worse(self) -> bool:
        """Whether something got worse by more than noise, or is no longer there."""
        return self.only_old > 0 or any(change.verdict == REGRESSION for change in self.changes)


def comparable(records: Sequence[Record]) -> bool:
    return len(records) == 2 and records[0].kind == records[1].kind and bool(_pairs(*records))


def compare(old: Record, new: Record) -> Comparison:
    pairs = _pairs(old, new)
    changes = [
        change for key, (before, after) in pairs.items() for change in _changes(old.kind, key[:-1], before, after)
    ]
    return Comparison(old, new, changes, len(old.rows) - len(pairs), len(new.rows) - len(pairs))


def summary(found: Comparison) -> str:
    """2 regressions, 1 better, 27 within noise."""
    counts = Counter(change.verdict for change in found.changes)
    parts = [counted(counts[REGRESSION], "regression")]
    parts += [f"{counts[verdict]} {verdict}" for verdict in (BETTER, SAME, UNKNOWN) if counts[verdict]]
    parts += [f"{counted(found.only_old, 'row')} only in the old record"] if found.only_old else []
    parts += [f"{counted(found.only_new, 'row')} only in the new one"] if found.only_new else []
    return ", ".join(parts)


def grid(found: Comparison) -> TextGrid:
    """The table: a line for each column of each pair of rows, labels that are the same everywhere left out."""
    names = LABELS[found.old.kind]
    kept = [at for at in range(len(names)) if len({change.labels[at] for change in found.changes}) > 1] or [0]
    header = [*(names[at] for at in kept), "column", "old", "new", "new/old", "noise", "verdict"]
    rows = [[*(change.labels[at] for at in kept), *_cells(change)] for change in found.changes]
    tones = [_TONES.get(change.verdict, "") for change in found.changes]
    title = f"New over old: {summary(found)}. noise: what the spread of the rows leaves open{_moved(found)}"
    return TextGrid(title, header, rows, labels=len(kept) + 1, tones=tones)


def _cells(change: Change) -> list[str]:
    ratio, low, high = (
        "∞" if value == math.inf else fixed(value, 3)
        for value in (change.range.ratio, change.range.low, change.range.high)
    )
    noise = ABSENT if change.range.low is None else f"{low} to {high}"
    return [change.column, change.old, change.new, ratio, noise, change.verdict]


def _moved(found: Comparison) -> str:
    """The conditions under which the two differ; when and by which command they were made goes without saying."""
    told = []
    for name in ("device", "cpu", "threads", "torch", "triton", "thinwire", "commit"):
        show = commit if name == "commit" else text
        before, after = (show(record.conditions.get(name)) for record in (found.old, found.new))
        if before != after:
            told.append(f"{name} {before} → {after}")
    return f". The records differ in {'; '.join(told)}" if told else ""


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
    for column, judge in METRICS[kind].items():
        before = number(old.get(column))
        after = number(new.get(column))
        found = None
        if before is not None and after is not None:
            found = judge(before, after, old, new)
        elif before is not None and column in new and new[column] is None:
            found = Range(math.inf, math.inf, math.inf)  # it is gone: the run diverged, or a kernel failed
        if found is not None:
            yield Change(labels, column, _shown(old.get(column)), _shown(new.get(column)), found)


def _shown(value: Value) -> str:
    return text(value) if isinstance(value, bool) else significant(value)


def _ratio(new: Value, old: Value) -> float | None:
    ours = number(new)
    theirs = number(old)
    return None if ours is None or theirs is None else _quotient(ours, theirs)


def _quotient(new: float, old: float) -> float:
    return 1.0 if new == old else new / old if old else math.inf


def _log_quotient(new: float, old: float) -> float:
    """Of numbers that are logarithms already."""
    return math.exp(new - old) if new - old < MOST_LOG else math.inf


LABELS: dict[str, tuple[str, ...]] = {
    "codec": ("distribution", "codec", "numel"),
    "kernels": ("part", "op", "codec", "backend", "device", "dtype", "numel", "world", "threads"),
    "collectives": ("verb", "codec", "asked", "world", "nodes", "link", "numel"),
    "train": ("task", "parallel", "optimizer", "codec", "every", "weights", "feedback", "world", "link", "steps"),
    "qat": ("task", "method", "weight_bits", "act_bits", *SPEED_LABELS),
    "soak": ("world",),
}
METRICS: dict[str, dict[str, Judge]] = {  # the columns to compare, and how
    "codec": {"wire_bits": _computed(), "nmse": _computed()},
    "kernels": {"ms_p50": _timed("ms_p20", "ms_p80", control="copy_ms")},
    "collectives": {
        "ms_p50": _timed("ms_p20", "ms_p80", control="plain_ms"),
        "bytes_formula": _computed(),
        "rel_error": _computed(absolute=FP32),
        "identical": _promise(kept=True),
    },
    "train": {
        "loss_log_ratio": _mean("loss_log_ratio_error", _log_quotient, -math.inf),
        "val_gap_nats": _mean("val_gap_error", _log_quotient, -math.inf),
        "step_ms": _timed("step_ms_p20", "step_ms_p80", control="compute_ms"),
        "bytes_per_step": _computed(relative=HEADERS),
        "diverged": _promise(kept=False),
        "identical": _promise(kept=True),
    },
    "qat": {
        "train_loss": _mean("train_loss_error", _quotient),
        "accuracy": _mean("accuracy_error", lambda new, old: _quotient(old, new)),
        "ms_p50": _timed("ms_p20", "ms_p80", control="floor_ms"),
        "peak_bytes_per_element": _computed(),
    },
    "soak": dict.fromkeys(("mismatches", "hangs", "leaks"), _computed()),
}
