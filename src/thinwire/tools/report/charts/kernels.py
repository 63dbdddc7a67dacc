"""Charts of kernel records: speed as a share of a copy, by codec and by size; fixed costs; rivals."""

from thinwire.tools.bench.record import Record, Row
from thinwire.tools.report.cells import alike, counted, listed, number, text
from thinwire.tools.report.charts.shapes import Axis, Bars, Chart, Lines, Mark, Values, by_label, by_name, named
from thinwire.tools.report.kernels import by_part, nbytes_of, short

SHARE = Axis("speed, % of a copy of the same bytes")
COPY = Mark("a copy", 100.0)
CODEC = named("codec")
OP = named("op")


def charts(record: Record) -> list[Chart]:
    """Of each part that the record has."""
    return by_part([{**row, "card": record.conditions["device"]} for row in record.rows], _PARTS)


def _by_codec(rows: list[Row]) -> list[Chart]:
    """One chart for each size, dtype and number of threads."""
    return [_shares(group) for group in alike(rows, "backend", "device", "dtype", "numel", "threads")]


def _shares(rows: list[Row]) -> Bars:
    backend, device, dtype, numel, threads, card = (
        text(rows[0][name]) for name in ("backend", "device", "dtype", "numel", "threads", "card")
    )
    where = counted(threads, "CPU thread") if device == "cpu" else card
    title = f"Speed of the {backend} kernels: {where}, {numel} elements of {dtype}"
    return Bars("kernels", title, SHARE, *by_label(rows, CODEC, OP, _percent), [COPY], points=True)


def _percent(row: Row) -> float | None:
    return number(row["copy_share"], 100)


def _by_size(rows: list[Row]) -> list[Chart]:
    return [_sizes(group) for group in alike(rows, "op")]


def _sizes(rows: list[Row]) -> Lines:
    curves = by_name(rows, lambda row: f"{CODEC(row)} {short(row)}", lambda row: (nbytes_of(row) / 1e6, _percent(row)))
    return Lines("sizes", f"Speed of {OP(rows[0])} by size", Axis("tensor, MB", log=True), SHARE, curves, [COPY])


def _replays(rows: list[Row]) -> list[Chart]:
    labels = [f"{CODEC(row)}, {text(row['numel'])} elements" for row in rows]
    times = {"codec": "ms_p50", "a copy of the message": "copy_ms"}
    series = [Values(name, [number(row[column], 1e3) for row in rows]) for name, column in times.items()]
    title = "Fixed cost of a small message: encode, recode and decode as one CUDA graph"
    return [Bars("replay", title, Axis("time, µs"), labels, series)]


def _rivals(rows: list[Row]) -> list[Chart]:
    title = f"Kernels beside torch's quantisation hooks, {listed(rows, 'numel')[0]} elements"
    values = by_label(rows, CODEC, OP, lambda row: number(row["ms_p50"]))
    return [Bars("rivals", title, Axis("time, ms", log=True), *values)]


_PARTS = {"codecs": _by_codec, "sizes": _by_size, "replay": _replays, "rivals": _rivals}
