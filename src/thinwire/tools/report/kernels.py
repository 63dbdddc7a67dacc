"""The tables of kernel records: one of all rows for the CPU, one a part for a GPU and where parts were asked for."""

from collections.abc import Callable, Sequence

from thinwire.tools.bench.record import Record, Row, Value
from thinwire.tools.report.cells import Grid, counted, distinct, number, percent, significant, text

_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
Rows = Sequence[Row]


def grids(record: Record) -> list[Grid]:
    """The tables of a record that has rows."""
    if all(row["device"] == "cpu" and part_of(row) == "codecs" for row in record.rows):
        return [_every_row(record.rows)]
    found = []
    for part, make in _PARTS.items():
        if rows := [row for row in record.rows if part_of(row) == part]:
            found += make(rows)
    return found


def part_of(row: Row) -> str:
    """The part of the run that a row belongs to; records without parts have codecs alone."""
    return text(row.get("part", "codecs"))


def _every_row(rows: Rows) -> Grid:
    order = {value: place for place, value in enumerate(distinct(rows, "op") + distinct(rows, "codec"))}
    rows = sorted(rows, key=lambda row: (order[text(row["op"])], order[text(row["codec"])], text(row["dtype"])))
    more = [("×compile", "times_compile")] if any(row.get("times_compile") is not None for row in rows) else []
    more += [("numel", "numel")] if len(distinct(rows, "numel")) > 1 else []
    header = ["op", "codec", "dtype", "threads", "ms", "×copy", "share", "×eager", *(name for name, _ in more)]
    cells = [[*_kernel_cells(row), *(_number(row.get(column)) for _, column in more)] for row in rows]
    return Grid(_every_title(rows), header, cells, labels=3)


def _every_title(rows: Rows) -> str:
    backend, device, numel = (", ".join(distinct(rows, name)) for name in ("backend", "device", "numel"))
    return (
        f"Backend {backend} on {device}, {numel} elements. ×copy: time over a copy's; share: of the copy's bandwidth; "
        "×eager: torch eager's time over the kernel's"
    )


def _kernel_cells(row: Row) -> list[str]:
    labels = [text(row[name]) for name in ("op", "codec", "dtype", "threads")]
    numbers = [significant(row[name]) for name in ("ms_p50", "times_copy")]
    return [*labels, *numbers, percent(row["copy_share"]), significant(row["times_eager"])]


def _number(value: Value) -> str:
    return significant(value) if isinstance(value, float) else text(value)


def _by_codec(rows: Rows) -> list[Grid]:
    """Codecs against ops: one table for each size, dtype and number of threads."""

    def where(row: Row) -> tuple[Value, ...]:
        return row["numel"], row["dtype"], row["threads"]

    places = list(dict.fromkeys(map(where, rows)))
    return [_share_grid([row for row in rows if where(row) == place]) for place in places]


def _share_grid(rows: Rows) -> Grid:
    names = ("backend", "device", "dtype", "numel", "threads")
    backend, device, dtype, numel, threads = (distinct(rows, name)[0] for name in names)
    device = f"{device} with {counted(threads, 'thread')}" if device == "cpu" else device
    ops, at = distinct(rows, "op"), {(row["codec"], row["op"]): row for row in rows}
    cells = [
        [codec, *(percent(at.get((codec, op), {}).get("copy_share"), 1) for op in ops)]
        for codec in distinct(rows, "codec")
    ]
    title = (
        f"Backend {backend} on {device}, {numel} elements of {dtype}: speed as a share of copy_ of the same bytes"
        f"{_worlds(rows)}"
    )
    return Grid(title, ["codec", *ops], cells)


def _worlds(rows: Rows) -> str:
    sums = [world for world in distinct(rows, "world") if world != "1"]
    return f"; decode_sum and recode read {', '.join(sums)} wires" if sums else ""


def _by_size(rows: Rows) -> list[Grid]:
    """Ops and codecs against sizes and dtypes."""
    columns = list(dict.fromkeys((short(row), _size(row)) for row in rows))
    columns.sort(key=_dtype_place)
    at = {(row["op"], row["codec"], short(row), _size(row)): row for row in rows}
    names = [(op, codec) for op in distinct(rows, "op") for codec in distinct(rows, "codec")]
    cells = [
        [*name, *(percent(at.get((*name, *column), {}).get("copy_share")) for column in columns)] for name in names
    ]
    title = f"By bytes of the tensor: speed as a share of copy_ of the same bytes{_worlds(rows)}"
    return [Grid(title, ["op", "codec", *(f"{dtype} {size}" for dtype, size in columns)], cells, labels=2)]


def _dtype_place(column: tuple[str, str]) -> int:
    known = list(_SHORT.values())
    return known.index(column[0]) if column[0] in known else len(known)


def short(row: Row) -> str:
    """fp32."""
    return _SHORT.get(text(row["dtype"]), text(row["dtype"]))


def nbytes_of(row: Row) -> float:
    """Of the tensor; 0 where the record does not say."""
    return (number(row["numel"]) or 0) * _ITEM_BYTES.get(text(row["dtype"]), 0)


def _size(row: Row) -> str:
    """1 MB and 1 GB are 2**20 and 2**30 bytes here."""
    nbytes = nbytes_of(row)
    for unit, shift in (("GB", 30), ("MB", 20), ("kB", 10)):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):.3g} {unit}"
    return f"{nbytes:.0f} B"


def _replays(rows: Rows) -> list[Grid]:
    header = ["codec", "elements", "µs", "p20", "p80", "copy µs", "without a graph µs"]
    columns = ("ms_p50", "ms_p20", "ms_p80", "copy_ms", "launched_ms")
    cells = [
        [text(row["codec"]), text(row["numel"]), *(_microseconds(row.get(name)) for name in columns)] for row in rows
    ]
    world = ", ".join(distinct(rows, "world"))
    title = (
        f"Fixed cost of a small message in a CUDA graph: encode it, recode a shard of {world} ranks, decode it; a copy "
        "of the message is a graph too"
    )
    return [Grid(title, header, cells, labels=2)]


def _microseconds(value: Value) -> str:
    found = number(value)
    return significant(None if found is None else 1e3 * found)


def _rivals(rows: Rows) -> list[Grid]:
    ours = {text(row["op"]): row["ms_p50"] for row in rows if row["codec"] == "int8"}
    header = ["op", "codec", "backend", "ms", "share", "×eager", "×compile", "×int8"]
    order = {op: place for place, op in enumerate(distinct(rows, "op"))}
    found = sorted(rows, key=lambda row: (order[text(row["op"])], row["backend"] == "torch"))
    numel = ", ".join(distinct(rows, "numel"))
    title = (
        f"Rivals on {numel} elements of float32. ×eager, ×compile: the time of the torch reference, and of "
        "torch.compile of it, over the kernel's; ×int8: the time of torch's quantisation hook over that of int8"
    )
    return [Grid(title, header, [_rival_cells(row, ours) for row in found], labels=3)]


def _rival_cells(row: Row, ours: dict[str, Value]) -> list[str]:
    labels = [text(row[name]) for name in ("op", "codec", "backend")]
    peer = _ratio(row["ms_p50"], ours.get(text(row["op"]))) if row["backend"] == "torch" else None
    times = (row["times_eager"], row.get("times_compile"), peer)
    return [*labels, significant(row["ms_p50"]), percent(row["copy_share"]), *map(significant, times)]


def _ratio(value: Value, other: Value) -> float | None:
    ours, theirs = number(value), number(other)
    return ours / theirs if ours is not None and theirs else None


_PARTS: dict[str, Callable[[Rows], list[Grid]]] = {
    "codecs": _by_codec,
    "sizes": _by_size,
    "replay": _replays,
    "rivals": _rivals,
}
