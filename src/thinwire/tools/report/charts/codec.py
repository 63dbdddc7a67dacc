"""Charts of codec records: error against bits, and error on every distribution."""

import re

from thinwire.tools.bench.record import Record, Row
from thinwire.tools.report.cells import distinct, number, text
from thinwire.tools.report.charts.shapes import Axis, Bars, Chart, Curve, Lines, Number, by_label, by_name, named

NMSE = Axis("NMSE: squared error / squared norm", log=True)
LLOYD_MAX = {1: 0.36338, 2: 0.11748, 3: 0.03455, 4: 0.009501}  # of a Gaussian, by bits: the best scalar levels
MOST_BITS = 9  # casts to 16 bits would leave the others no room
_FAMILIES = {"int": "integers", "lloyd": "Lloyd-Max levels after rotation"}


def charts(record: Record) -> list[Chart]:
    """Error against bits on a Gaussian, or on the first distribution there is; error by codec and distribution."""
    names = distinct(record.rows, "distribution")
    return [_rate(record, "gaussian" if "gaussian" in names else names[0]), _by_distribution(record)] if names else []


def _rate(record: Record, distribution: str) -> Lines:
    rows = [row for row in record.rows if text(row["distribution"]) == distribution and _place(row)[0]]
    found = by_name(rows, _family, _place, joined=False)
    most = max((x for curve in found for x, _ in curve.points), default=1.0)
    bound = [(bits, 2.0 ** (-2 * bits)) for bits in (0.5, most)]
    levels = [(float(bits), lost) for bits, lost in LLOYD_MAX.items()]
    known = {"Lloyd-Max quantiser of a Gaussian": levels, "rate-distortion bound of a Gaussian": bound}
    curves = [*found, *(Curve(name, points, known=True) for name, points in known.items())]
    across = Axis("bits per element, scales and header included")
    return Lines("rate", f"Error against bits on the wire, {distribution} data", across, NMSE, curves)


def _place(row: Row) -> tuple[Number, Number]:
    """(bits, NMSE) of a row that can be drawn on a logarithmic axis."""
    bits = number(row["wire_bits"])
    lost = number(row["nmse"])
    return (bits, lost) if bits and lost and bits <= MOST_BITS and lost > 0 else (None, None)


def _family(row: Row) -> str:
    """int4:block=32 is one of the integers."""
    stem = re.match(r"[a-z]*", text(row["codec"]))
    return _FAMILIES.get(stem[0] if stem else "", "casts")


def _by_distribution(record: Record) -> Bars:
    lossy = {text(row["codec"]) for row in record.rows if number(row["nmse"])}
    rows = [row for row in record.rows if text(row["codec"]) in lossy]
    values = by_label(rows, named("codec"), named("distribution"), lambda row: number(row["nmse"]) or None)
    return Bars("distributions", "Error by distribution", NMSE, *values)
