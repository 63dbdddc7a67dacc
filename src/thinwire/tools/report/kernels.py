"""The tables of kernel records: one of all rows for the CPU, one per part for a GPU and where parts were asked for."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from thinwire.tools.bench.record import Record, Row
from thinwire.tools.report import cells
from thinwire.tools.report.cells import Column, TextGrid, distinct, listed, percent, significant, text

_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_SIZES = (("GB", 30), ("MB", 20), ("kB", 10))  # 1 MB and 1 GB are 2**20 and 2**30 bytes here
Rows = Sequence[Row]
T = TypeVar("T")


def grids(record: Record) -> list[TextGrid]:
    if all(row["device"] == "cpu" and part_of(row) == "codecs" for row in record.rows):
        return [_every_row(record.rows)]
    return by_part(record.rows, _PARTS)


def by_part(rows: Rows, makers: Mapping[str, Callable[[list[Row]], list[T]]]) -> list[T]:
    """What each maker makes of the rows of its part, where there are any."""
    parts = [(make, [row for row in rows if part_of(row) == part]) for part, make in makers.items()]
    return [made for make, found in parts if found for made in make(found)]


def part_of(row: Row) -> str:
    """The part of the run that a row belongs to; records without parts have codecs alone."""
    return text(row.get("part", "codecs"))


def _every_row(rows: Rows) -> TextGrid:
    backend, device, numel = listed(rows, "backend", "device", "numel")
    title = (
        f"Backend {backend} on {device}, {numel} elements. ×copy: time over a copy's; share: of the copy's bandwidth; "
        "×eager: torch eager's time over the kernel's"
    )
    order = distinct(rows, "op") + distinct(rows, "codec")
    rows = sorted(rows, key=lambda r: (order.index(text(r["op"])), order.index(text(r["codec"])), text(r["dtype"])))
    more = cells.filled([Column.of("×compile", "times_compile", significant)], rows)
    more += [Column.of("numel", "numel", text)] if len(distinct(rows, "numel")) > 1 else []
    labels = [Column.of(name, name, text) for name in ("op", "codec", "dtype", "threads")]
    return cells.grid(
        title, rows, [*labels, _MS, Column.of("×copy", "times_copy", significant), _SHARE, _EAGER, *more], 3
    )


_MS = Column.of("ms", "ms_p50", significant)
_SHARE = Column.of("share", "copy_share", percent)
_EAGER = Column.of("×eager", "times_eager", significant)


def _by_codec(rows: Rows) -> list[TextGrid]:
    """Codecs against ops: one table for each size, dtype and number of threads."""
    return [_shares(group) for group in cells.alike(rows, "numel", "dtype", "threads")]


def _shares(rows: Rows) -> TextGrid:
    names = ("backend", "device", "dtype", "numel", "threads")
    backend, device, dtype, numel, threads = (distinct(rows, name)[0] for name in names)
    device = f"{device} with {cells.counted(threads, 'thread')}" if device == "cpu" else device
    ops = distinct(rows, "op")
    at = {(text(row["codec"]), text(row["op"])): row["copy_share"] for row in rows}
    shown = [[codec, *(percent(at.get((codec, op)), 1) for op in ops)] for codec in distinct(rows, "codec")]
    title = f"Backend {backend} on {device}, {numel} elements of {dtype}: speed as a share of copy_ of the same bytes"
    return TextGrid(f"{title}{_worlds(rows)}", ["codec", *ops], shown)


def _worlds(rows: Rows) -> str:
    sums = [world for world in distinct(rows, "world") if world != "1"]
    return f"; decode_sum and recode read {', '.join(sums)} wires" if sums else ""


def _by_size(rows: Rows) -> list[TextGrid]:
    """Ops and codecs against sizes and dtypes."""
    at = {(text(row["op"]), text(row["codec"]), short(row), _size(row)): row["copy_share"] for row in rows}
    known = list(_SHORT.values())
    columns = list(dict.fromkeys(key[2:] for key in at))
    columns.sort(key=lambda column: known.index(column[0]) if column[0] in known else len(known))
    names = [(op, codec) for op in distinct(rows, "op") for codec in distinct(rows, "codec")]
    shown = [[*name, *(percent(at.get((*name, *column))) for column in columns)] for name in names]
    title = f"By bytes of the tensor: speed as a share of copy_ of the same bytes{_worlds(rows)}"
    return [TextGrid(title, ["op", "codec", *(f"{dtype} {size}" for dtype, size in columns)], shown, labels=2)]


def short(row: Row) -> str:
    """fp32."""
    return _SHORT.get(text(row["dtype"]), text(row["dtype"]))


def nbytes_of(row: Row) -> float:
    """The bytes of the tensor; 0 where the record does not say."""
    return (cells.number(row["numel"]) or 0) * _ITEM_BYTES.get(text(row["dtype"]), 0)


def _size(row: Row) -> str:
    nbytes = nbytes_of(row)
    for unit, shift in _SIZES:
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):.3g} {unit}"
    return f"{nbytes:.0f} B"


def _replays(rows: Rows) -> list[TextGrid]:
    times = {
        "µs": "ms_p50",
        "p20": "ms_p20",
        "p80": "ms_p80",
        "copy µs": "copy_ms",
        "without a graph µs": "launched_ms",
    }
    labels = [Column.of("codec", "codec", text), Column.of("elements", "numel", text)]
    columns = [Column.of(header, name, lambda ms: significant(ms, 1e3)) for header, name in times.items()]
    title = (
        f"Fixed cost of a small message in a CUDA graph: encode it, recode a shard of {listed(rows, 'world')[0]} "
        "ranks, decode it; a copy of the message is a graph too"
    )
    return [cells.grid(title, rows, [*labels, *columns], 2)]


def _rivals(rows: Rows) -> list[TextGrid]:
    ours = {text(row["op"]): cells.number(row["ms_p50"]) for row in rows if row["codec"] == "int8"}

    def over_int8(row: Row) -> str:
        theirs = cells.number(row["ms_p50"]) if row["backend"] == "torch" else None
        mine = ours.get(text(row["op"]))
        return significant(theirs / mine if theirs is not None and mine else None)

    order = distinct(rows, "op")
    found = sorted(rows, key=lambda row: (order.index(text(row["op"])), row["backend"] == "torch"))
    title = (
        f"Rivals on {listed(rows, 'numel')[0]} elements of float32. ×eager, ×compile: the time of the torch reference, "
        "and of torch.compile of it, over the kernel's; ×int8: the time of torch's quantisation hook over that of int8"
    )
    labels = [Column.of(name, name, text) for name in ("op", "codec", "backend")]
    compiled = Column.of("×compile", "times_compile", significant)
    return [cells.grid(title, found, [*labels, _MS, _SHARE, _EAGER, compiled, Column("×int8", over_int8)], 3)]


_PARTS = {"codecs": _by_codec, "sizes": _by_size, "replay": _replays, "rivals": _rivals}
