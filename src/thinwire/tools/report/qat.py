"""The tables of quantisation-aware training: what a method reaches at given bits, and what its kernels cost."""

from collections.abc import Sequence

from thinwire.tools.bench.record import Record, Row
from thinwire.tools.report import cells
from thinwire.tools.report.cells import ABSENT, Column, TextGrid, distinct, percent, scientific, significant, text

SPEED_LABELS = ("op", "gradient", "granularity", "dtype", "backend", "device", "numel", "threads")
_LABELS = ("task", "method", "weight_bits", "act_bits")
_SHORT = {"weight_bits": "W", "act_bits": "A"}
_TRAINED = (
    Column.of("seeds", "seeds", text),
    Column.of("train loss", "train_loss", scientific),
    Column.of("± (loss)", "train_loss_error", scientific),
    Column.of("accuracy", "accuracy", lambda value: percent(value, 2)),
    Column.of("± (acc.)", "accuracy_error", lambda value: percent(value, 2)),
    Column.of("diverged", "diverged", text),
)
_SPEED = (
    Column.of("ms", "ms_p50", significant),
    Column.of("×floor", "times_floor", significant),
    Column.of("torch's ×floor", "torch_times_floor", significant),
    Column.of("×torch", "times_torch", significant),
    Column.of("bytes", "peak_bytes_per_element", significant),
    Column.of("torch's bytes", "torch_peak_bytes_per_element", significant),
)


def is_speed(row: Row) -> bool:
    """Whether a row is of a kernel; the others are of training."""
    return row.get("op") is not None


def bits(row: Row) -> str:
    """W4A8."""
    return f"W{text(row['weight_bits'])}A{text(row['act_bits'])}"


def grids(record: Record) -> list[TextGrid]:
    trained = [row for row in record.rows if not is_speed(row)]
    speed = [row for row in record.rows if is_speed(row)]
    told = "Trained at W bits of weights and A bits of activations; means over seeds"
    found = [_grid(told, trained, _LABELS, _TRAINED)] if trained else []
    told = (
        "Forward and backward. ×floor: time over that of reading and writing each tensor once; ×torch: torch's time "
        "over this one's; bytes: extra at the peak, per element"
    )
    return [*found, _grid(told, speed, SPEED_LABELS, _SPEED)] if speed else found


def _grid(title: str, rows: list[Row], labels: Sequence[str], columns: Sequence[Column]) -> TextGrid:
    """Labels that are the same in every row stand in the title."""
    kept = cells.varying(rows, labels)
    same = [f"{name} {distinct(rows, name)[0]}" for name in labels if name not in kept]
    told = ", ".join(part for part in same if not part.endswith(ABSENT))
    names = [Column.of(_SHORT.get(name, name), name, text) for name in kept]
    return cells.grid(f"{title} ({told})" if told else title, rows, [*names, *cells.filled(columns, rows)], len(kept))
