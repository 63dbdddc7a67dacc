"""Charts of codec records: error against bits, and error on every distribution."""

import re

from thinwire.tools.bench.record import Record, Row
from thinwire.tools.report.cells import distinct, number, text
from thinwire.tools.report.charts.shapes import Axis, Bars, Chart, Curve, Lines, Values

NMSE = Axis("NMSE: squared error / squared norm", log=True)
LLOYD_MAX = {1: 0.36338, 2: 0.11748, 3: 0.03455, 4: 0.009501}  # of a Gaussian, by bits: the best scalar levels
MOST_BITS = 9  # casts to 16 bits would leave the others no room
_FAMILIES = {"int": "integers", "lloyd": "Lloyd-Max levels after rotation"}


def charts(record: Record) -> list[Chart]:
    """Error against bits on a Gaussian, or on the first distribution there is; error by codec and distribution."""
    names = distinct(record.rows, "distribution")
    return [_rate(record, "gaussian" if "gaussian" in names else names[0]), _by_distribution(record)] if names else []


def _rate(record: Record, distribution: str) -> Lines:
    rows = [row for row in record.rows if text(row["distribution"]) == distribution and _place(row)]
    families = list(dict.fromkeys(map(_family, rows)))
    found = [Curve(name, _points([row for row in rows if _family(row) == name]), joined=False) for name in families]
    most = max((x for curve in found for x, _ in curve.points), default=1.0)
    bound = Curve(
        "rate-distortion bound of a Gaussian", [(bits, 2.0 ** (-2 * bits)) for bits in (0.5, most)], known=True
    )
    levels = [(float(bits), lost) for bits, lost in LLOYD_MAX.items()]
    title = f"Error against bits on the wire, {distribution} data"
    return Lines("rate", title, Axis("bits an element, scales and header included"), NMSE,
                 [*found, Curve("Lloyd-Max quantiser of a Gaussian", levels, known=True), bound])  # fmt: skip


def _points(rows: list[Row]) -> list[tuple[float, float]]:
    return sorted(place for place in map(_place, rows) if place)


def _place(row: Row) -> tuple[float, float] | None:
    """(bits, NMSE) of a row that can be drawn on a logarithmic axis."""
    bits, lost = number(row["wire_bits"]), number(row["nmse"])
    return (bits, lost) if bits and lost and bits <= MOST_BITS and lost > 0 else None


def _family(row: Row) -> str:
    """int4:block=32 is one of the integers."""
    stem = re.match(r"[a-z]*", text(row["codec"]))
    return _FAMILIES.get(stem[0] if stem else "", "casts")


def _by_distribution(record: Record) -> Bars:
    at = {(text(row["codec"]), text(row["distribution"])): number(row["nmse"]) or None for row in record.rows}
    codecs, names = distinct(record.rows, "codec"), distinct(record.rows, "distribution")
    lossy = [codec for codec in codecs if any(at.get((codec, name)) for name in names)]
    series = [Values(name, [at.get((codec, name)) for codec in lossy]) for name in names]
    return Bars("distributions", "Error by distribution", NMSE, lossy, series)
