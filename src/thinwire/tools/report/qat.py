"""The tables of quantisation-aware training: what a method reaches at given bits, and what its kernels cost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from thinwire.tools.bench.record import COLUMNS, Record, Row, Value
from thinwire.tools.report.cells import ABSENT, Grid, distinct, percent, scientific, significant, text, varying

_SHOWN: dict[str, tuple[str, Callable[[Value], str]]] = {
    "weight_bits": ("W", text),
    "act_bits": ("A", text),
    "train_loss": ("train loss", scientific),
    "train_loss_error": ("± (loss)", scientific),
    "accuracy": ("accuracy", lambda value: percent(value, 2)),
    "accuracy_error": ("± (acc.)", lambda value: percent(value, 2)),
    "ms_p50": ("ms", significant),
    "times_floor": ("×floor", significant),
    "torch_times_floor": ("torch's ×floor", significant),
    "times_torch": ("×torch", significant),
    "peak_bytes_per_element": ("bytes", significant),
    "torch_peak_bytes_per_element": ("torch's bytes", significant),
}
SPEED_LABELS = ("op", "gradient", "granularity", "dtype", "backend", "device", "numel", "threads")


@dataclass(frozen=True)
class _Part:
    """The rows of one table, its columns and its words."""

    title: str
    columns: tuple[str, ...]
    labels: int


_TRAINED = _Part(
    "Trained at W bits of weights and A bits of activations; means over seeds", (*COLUMNS["qat"], "diverged"), 4
)
_SPEED = _Part(
    "Forward and backward. ×floor: time over that of reading and writing each tensor once; ×torch: torch's time over "
    "this one's; bytes: extra at the peak, an element",
    (*SPEED_LABELS, "ms_p50", "times_floor", "torch_times_floor", "times_torch", "peak_bytes_per_element",
     "torch_peak_bytes_per_element"),
    len(SPEED_LABELS),
)  # fmt: skip


def is_speed(row: Row) -> bool:
    """Whether a row is of a kernel; the others are of training."""
    return row.get("op") is not None


def bits(row: Row) -> str:
    """W4A8."""
    return f"W{text(row['weight_bits'])}A{text(row['act_bits'])}"


def grids(record: Record) -> list[Grid]:
    """The tables of a record that has rows: of training, of speed."""
    parts = [(_TRAINED, [row for row in record.rows if not is_speed(row)])]
    parts += [(_SPEED, [row for row in record.rows if is_speed(row)])]
    return [_grid(part, rows) for part, rows in parts if rows]


def _grid(part: _Part, rows: list[Row]) -> Grid:
    """Labels that are the same in every row stand in the title."""
    labels, numbers = part.columns[: part.labels], part.columns[part.labels :]
    kept = varying(rows, labels)
    names = [*kept, *(name for name in _order(numbers) if distinct(rows, name) != [ABSENT])]
    header = [_SHOWN[name][0] if name in _SHOWN else name for name in names]
    same = [f"{name} {distinct(rows, name)[0]}" for name in labels if name not in kept]
    told = [part for part in same if not part.endswith(ABSENT)]
    title = f"{part.title} ({', '.join(told)})" if told else part.title
    return Grid(title, header, [[_cell(row, name) for name in names] for row in rows], labels=len(kept))


def _order(columns: Sequence[str]) -> list[str]:
    """An error stands beside what it is the error of."""
    return [name for column in columns for name in (column, f"{column}_error")]


def _cell(row: Row, name: str) -> str:
    return _SHOWN.get(name, ("", text))[1](row.get(name))
