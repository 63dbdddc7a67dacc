"""Charts of kernel records: speed as a share of a copy, by codec and by size; fixed costs; rivals."""

from collections.abc import Callable

from thinwire.tools.bench.record import Record, Row, Value
from thinwire.tools.report.cells import counted, distinct, number, text
from thinwire.tools.report.charts.shapes import Axis, Bars, Chart, Curve, Line, Lines, Values
from thinwire.tools.report.kernels import nbytes_of, part_of, short

SHARE = Axis("speed, % of a copy of the same bytes")
COPY = Line(100.0, "a copy")


def charts(record: Record) -> list[Chart]:
    """Of each part that the record has."""
    found: list[Chart] = []
    for part, make in _PARTS.items():
        found += make([{**row, "card": record.conditions["device"]} for row in record.rows if part_of(row) == part])
    return found


def _by_codec(rows: list[Row]) -> list[Chart]:
    """One chart for each size, dtype and number of threads."""
    places = list(dict.fromkeys(map(_place, rows)))
    return [_shares([row for row in rows if _place(row) == place]) for place in places]


def _place(row: Row) -> tuple[str, ...]:
    return tuple(text(row[name]) for name in ("backend", "device", "dtype", "numel", "threads"))


def _shares(rows: list[Row]) -> Bars:
    backend, device, dtype, numel, threads = _place(rows[0])
    where = counted(threads, "CPU thread") if device == "cpu" else text(rows[0]["card"])
    codecs, at = distinct(rows, "codec"), {(text(row["codec"]), text(row["op"])): _percent(row) for row in rows}
    series = [Values(op, [at.get((codec, op)) for codec in codecs]) for op in distinct(rows, "op")]
    title = f"Speed of the {backend} kernels: {where}, {numel} elements of {dtype}"
    return Bars("kernels", title, SHARE, codecs, series, [COPY], points=True)


def _percent(row: Row) -> float | None:
    share = number(row["copy_share"])
    return None if share is None else 100 * share


def _by_size(rows: list[Row]) -> list[Chart]:
    return [_sizes(op, [row for row in rows if text(row["op"]) == op]) for op in distinct(rows, "op")]


def _sizes(op: str, rows: list[Row]) -> Lines:
    names = list(dict.fromkeys(map(_codec_and_dtype, rows)))
    curves = [Curve(name, _curve([row for row in rows if _codec_and_dtype(row) == name])) for name in names]
    return Lines("sizes", f"Speed of {op} by size", Axis("tensor, MB", log=True), SHARE, curves, [COPY])


def _codec_and_dtype(row: Row) -> str:
    return f"{text(row['codec'])} {short(row)}"


def _curve(rows: list[Row]) -> list[tuple[float, float]]:
    at = [(nbytes_of(row) / 1e6, _percent(row)) for row in rows]
    return sorted((size, share) for size, share in at if size and share is not None)


def _replays(rows: list[Row]) -> list[Chart]:
    labels = [f"{text(row['codec'])}, {text(row['numel'])} elements" for row in rows]
    series = [Values(name, [_us(row[column]) for row in rows]) for name, column in _REPLAYED]
    title = "Fixed cost of a small message: encode, recode and decode as one CUDA graph"
    return [Bars("replay", title, Axis("time, µs"), labels, series)]


def _us(value: Value) -> float | None:
    found = number(value)
    return None if found is None else 1e3 * found


def _rivals(rows: list[Row]) -> list[Chart]:
    codecs, ops = distinct(rows, "codec"), distinct(rows, "op")
    at = {(text(row["codec"]), text(row["op"])): number(row["ms_p50"]) for row in rows}
    series = [Values(op, [at.get((codec, op)) for codec in codecs]) for op in ops]
    numel = ", ".join(distinct(rows, "numel"))
    title = f"Kernels beside torch's quantisation hooks, {numel} elements"
    return [Bars("rivals", title, Axis("time, ms", log=True), codecs, series)]


_REPLAYED = (("codec", "ms_p50"), ("a copy of the message", "copy_ms"))
_PARTS: dict[str, Callable[[list[Row]], list[Chart]]] = {
    "codecs": _by_codec,
    "sizes": _by_size,
    "replay": _replays,
    "rivals": _rivals,
}
