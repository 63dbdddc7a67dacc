"""Charts of collectives: speed-up over torch, and what a rank sends."""

from thinwire.tools.bench.record import Record, Row
from thinwire.tools.report.cells import alike, distinct, number, text
from thinwire.tools.report.charts.shapes import Axis, Bars, Chart, Lines, Mark, Values, by_name, in_bytes

SPEEDUP = Axis("speed-up: torch's time / thinwire's")
EVEN = Mark("as fast as torch", 1.0)
_RIVALS = {"torch fp32": "speedup_plain", "torch bf16": "speedup_bf16"}


def charts(record: Record) -> list[Chart]:
    """Two for each world and link; where messages of several sizes were sent, one of speed-up by size for each verb."""
    found: list[Chart] = []
    for rows in alike(record.rows, "world", "link"):
        if len(distinct(rows, "numel")) > 1:
            found += map(_by_size, alike(rows, "verb"))
        else:
            found += [_speedups(rows), _bytes(rows)]
    return found


def _where(rows: list[Row]) -> str:
    return f"{', '.join(distinct(rows, 'verb'))} of {text(rows[0]['world'])} ranks, {text(rows[0]['link'])}"


def _speedups(rows: list[Row]) -> Bars:
    series = [Values(f"over {rival}", [number(row[column]) for row in rows]) for rival, column in _RIVALS.items()]
    return Bars("speedup", f"Speed-up: {_where(rows)}", SPEEDUP, _labels(rows), series, [EVEN])


def _bytes(rows: list[Row]) -> Bars:
    """What was counted, else what the schedule says."""
    counted = [(number(row["bytes_per_rank"]), number(row["bytes_formula"])) for row in rows]
    axis, sent = in_bytes("sent per rank, {}", [said if found is None else found for found, said in counted])
    return Bars("sent", f"Sent per rank: {_where(rows)}", axis, _labels(rows), [Values("sent", sent)])


def _labels(rows: list[Row]) -> list[str]:
    """Codecs, after their verbs where there are several; of an automatic choice, the algorithm it took."""
    codecs = [f"auto: {text(row['algorithm'])}" if row.get("auto") else text(row["codec"]) for row in rows]
    several = len(distinct(rows, "verb")) > 1
    return [f"{text(row['verb'])} {codec}" if several else codec for row, codec in zip(rows, codecs, strict=True)]


def _by_size(rows: list[Row]) -> Lines:
    doubled = [{**row, "rival": rival, "gain": row[column]} for row in rows for rival, column in _RIVALS.items()]
    doubled.sort(key=lambda row: distinct(rows, "codec").index(text(row["codec"])))
    curves = by_name(
        doubled,
        lambda row: f"{text(row['codec'])} over {row['rival']}",
        lambda row: (number(row["numel"]), number(row["gain"])),
    )
    across = Axis("message, elements", log=True)
    return Lines("speedup", f"Speed-up by size: {_where(rows)}", across, SPEEDUP, curves, [EVEN])
