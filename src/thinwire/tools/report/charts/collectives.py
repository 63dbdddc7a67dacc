"""Charts of collectives: speed-up over torch, and what a rank sends."""

from thinwire.tools.bench.record import Record, Row
from thinwire.tools.report.cells import distinct, number, text
from thinwire.tools.report.charts.shapes import Axis, Bars, Chart, Curve, Line, Lines, Values, in_bytes

SPEEDUP = Axis("speed-up: torch's time / thinwire's")
EVEN = Line(1.0, "as fast as torch")
_RIVALS = {"torch fp32": "speedup_plain", "torch bf16": "speedup_bf16"}


def charts(record: Record) -> list[Chart]:
    """Two for each world and link; where messages of several sizes were sent, one of speed-up by size for each verb."""
    found: list[Chart] = []
    for place in dict.fromkeys(map(_place, record.rows)):
        rows = [row for row in record.rows if _place(row) == place]
        if len(distinct(rows, "numel")) > 1:
            found += [_by_size([row for row in rows if text(row["verb"]) == verb]) for verb in distinct(rows, "verb")]
        else:
            found += [_speedups(rows), _bytes(rows)]
    return found


def _place(row: Row) -> tuple[str, ...]:
    return tuple(text(row[name]) for name in ("world", "link"))


def _where(rows: list[Row]) -> str:
    world, link = _place(rows[0])
    return f"{', '.join(distinct(rows, 'verb'))} of {world} ranks, {link}"


def _speedups(rows: list[Row]) -> Bars:
    series = [Values(f"over {rival}", [number(row[column]) for row in rows]) for rival, column in _RIVALS.items()]
    return Bars("speedup", f"Speed-up: {_where(rows)}", SPEEDUP, _labels(rows), series, [EVEN])


def _bytes(rows: list[Row]) -> Bars:
    axis, sent = in_bytes("sent by a rank, {}", list(map(_sent, rows)))
    return Bars("sent", f"Sent by a rank: {_where(rows)}", axis, _labels(rows), [Values("sent", sent)])


def _sent(row: Row) -> float | None:
    """What was counted, else what the schedule says."""
    counted = number(row["bytes_per_rank"])
    return number(row["bytes_formula"]) if counted is None else counted


def _labels(rows: list[Row]) -> list[str]:
    """Codecs, after their verbs where there are several; of an automatic choice, the algorithm it took."""
    codecs = [f"auto: {text(row['algorithm'])}" if row.get("auto") else text(row["codec"]) for row in rows]
    several = len(distinct(rows, "verb")) > 1
    return [f"{text(row['verb'])} {codec}" if several else codec for row, codec in zip(rows, codecs, strict=True)]


def _by_size(rows: list[Row]) -> Lines:
    curves = [_curve(f"{codec} over {rival}", column, [row for row in rows if text(row["codec"]) == codec])
              for codec in distinct(rows, "codec") for rival, column in _RIVALS.items()]  # fmt: skip
    title = f"Speed-up by size: {_where(rows)}"
    return Lines("speedup", title, Axis("message, elements", log=True), SPEEDUP, curves, [EVEN])


def _curve(name: str, column: str, rows: list[Row]) -> Curve:
    at = [(number(row["numel"]), number(row[column])) for row in rows]
    return Curve(name, sorted((numel, gain) for numel, gain in at if numel and gain is not None))
