"""The tables of the records that commands write. To add that of a kind: list its columns in `TABLES`.

Kinds that are not listed, such as those of the studies in benchmarks/, get a plain table of all columns.
"""

from collections.abc import Callable, Sequence

from thinwire.tools.bench.record import CURVE, Record, Row, Value
from thinwire.tools.report.cells import (
    Column,
    TextGrid,
    distinct,
    fixed,
    grid,
    percent,
    scaled,
    scientific,
    significant,
    text,
)

MS = (Column("ms", "ms_p50", significant), Column("p20", "ms_p20", significant), Column("p80", "ms_p80", significant))
SPEEDUPS = (Column("over fp32", "speedup_plain", significant), Column("over bf16", "speedup_bf16", significant))


def texts(*names: str) -> tuple[Column, ...]:
    return tuple(Column(name, name, text) for name in names)


# By kind: the title, the columns, and how many of them are labels. A column that no row fills is left out.
TABLES: dict[str, tuple[str, tuple[Column, ...], int]] = {
    "collectives": (
        "over fp32, over bf16: speedup over torch's own",
        (
            *texts("verb", "model", "codec", "algorithm", "connections"),
            *texts("feedback", "world", "nodes", "link", "numel"),
            *(MS[0], *SPEEDUPS, Column("kB", "bytes_per_rank", scaled(1e-3), "sent per rank")),
            Column("limit", "wire_limit_share", percent, "share of the link's rate"),
            Column("CPU ms", "cpu_ms_per_rank", significant),
            Column("host ms", "host_ms", significant, "until a call returns"),
            Column("steady ms", "host_steady_ms", significant),
            Column("GPU ms", "gpu_busy_ms", significant),
            *texts("launches"),
            Column("rel. error", "rel_error", scientific),
            *texts("identical"),
        ),
        10,
    ),
    "loss": (
        "delta: validation loss less fp32's of the same seed, in nats; low, high: its 95 % interval; more tokens: what "
        "fp32 would save for the same loss; null: fp32 with a relative noise of 1e-6",
        (
            *texts("size", "optimizer", "parallel", "params", "tokens", "world", "seeds", "arm"),
            Column("bits", "bits", fixed(2)),
            Column("val. loss", "val_loss", fixed(4)),
            Column("delta", "delta_nats", fixed(4, "+")),
            *(Column(end, f"delta_{end}", fixed(4, "+")) for end in ("low", "high")),
            Column("more tokens, %", "tokens_more_percent", fixed(1)),
        ),
        8,
    ),
    "link": (
        "Messages that all ranks send at once, each to the next rank; p20, p80: percentiles of the rounds",
        (*texts("world", "link", "backend", "nbytes"), *MS, Column("Gbit/s", "gbit_per_s", significant)),
        4,
    ),
}


GRIDS: dict[str, Callable[[Sequence[Row]], list[TextGrid]]] = {}  # kinds whose tables are more than a list of columns


def grids(record: Record) -> list[TextGrid]:
    if not (rows := record.rows):
        return [TextGrid(f"{record.kind}: no rows", [], [])]
    if record.kind in GRIDS:
        return GRIDS[record.kind](rows)
    if record.kind in TABLES:
        return [table(record.kind, rows)]
    by_schema: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        by_schema.setdefault(tuple(name for name in row if name != CURVE), []).append(row)
    return [_plain_grid(record.kind, names, found) for names, found in by_schema.items()]


def _plain_grid(kind: str, names: Sequence[str], rows: Sequence[Row]) -> TextGrid:
    """Every column, numbers to three digits; what all rows have alike goes into the title."""
    labels = [n for n in names if isinstance(rows[0][n], str) or (len(rows) > 1 and len(distinct(rows, n)) == 1)]
    ordered = [*labels, *(name for name in names if name not in labels)]
    return grid(kind, rows, [Column(name, name, _plain) for name in ordered], len(labels))


def _plain(value: Value) -> str:
    return significant(value) if isinstance(value, float) else text(value)


def table(kind: str, rows: Sequence[Row], what: str = "") -> TextGrid:
    """The table of a kind; `what` begins its title."""
    title, columns, labels = TABLES[kind]
    return grid(what, rows, columns, labels, title)
