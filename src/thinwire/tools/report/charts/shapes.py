"""The shapes a chart can have: bars by name, and curves over a number; and rows of a record in these shapes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from thinwire.tools.bench.record import Row, Value
from thinwire.tools.report import cells
from thinwire.tools.report.cells import text

Number = float | None
Span = tuple[float, float] | None
FARTHEST = 1e100  # from zero; matplotlib computes with the ends of an axis


def number(value: Value, times: float = 1) -> Number:
    """The value, `times` as large, where it is a number that an axis can show."""
    found = cells.number(value, times)
    return None if found is None or abs(found) > FARTHEST else found


@dataclass(frozen=True)
class Axis:
    label: str
    log: bool = False


def in_bytes(what: str, counts: Sequence[Number], *, log: bool = False) -> tuple[Axis, list[Number]]:
    """An axis of bytes, in the unit that suits the largest of `counts`, and the counts in that unit."""
    most = max((count for count in counts if count is not None), default=0.0)
    unit, size = next((entry for entry in _BYTES if most >= entry[1]), ("bytes", 1.0))
    return Axis(what.format(unit), log), [None if count is None else count / size for count in counts]


_BYTES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


@dataclass(frozen=True)
class Mark:
    """A value to compare with, across the chart; or a band of values that mean the same."""

    name: str
    low: float
    high: float | None = None  # of a band


@dataclass(frozen=True)
class Values:
    """One value for every label; None draws nothing."""

    name: str
    values: Sequence[Number]
    errors: Sequence[Number] | None = None
    spans: Sequence[Span] | None = None  # or from where to where each value scatters

    def __bool__(self) -> bool:
        return any(value is not None for value in self.values)

    def widths(self) -> list[tuple[float, float]] | None:
        """How far a line reaches to the left and to the right of each value; a record may say less than nothing."""
        if self.errors is not None:
            return [(max(0.0, error or 0.0), max(0.0, error or 0.0)) for error in self.errors]
        if self.spans is None:
            return None
        ends = [
            (value or 0.0, *(span or (value or 0.0,) * 2)) for value, span in zip(self.values, self.spans, strict=True)
        ]
        return [(max(0.0, value - low), max(0.0, high - value)) for value, low, high in ends]


@dataclass(frozen=True)
class Bars:
    """Values by name, one under the other. On a logarithmic axis, which has no zero to grow from, they are points."""

    name: str  # of its file
    title: str
    axis: Axis
    labels: Sequence[str]
    series: Sequence[Values]
    marks: Sequence[Mark] = ()
    points: bool = False  # even on an axis with a zero

    def __bool__(self) -> bool:
        return any(self.series)


@dataclass(frozen=True)
class Curve:
    """Points (x, y), in order."""

    name: str
    points: Sequence[tuple[float, float]]
    errors: Sequence[Number] | None = None
    joined: bool = True  # by a line
    dots: bool = True  # one at every point
    known: bool = False  # a limit or a theory, not a measurement


@dataclass(frozen=True)
class Lines:
    name: str  # of its file
    title: str
    across: Axis
    axis: Axis
    curves: Sequence[Curve]
    marks: Sequence[Mark] = ()

    def __bool__(self) -> bool:
        return any(curve.points for curve in self.curves if not curve.known)


Chart = Bars | Lines
Name = Callable[[Row], str]


def named(column: str) -> Name:
    return lambda row: text(row[column])


def column(rows: Sequence[Row], name: str, column: str, times: float = 1) -> Values:
    """The values of a column, `times` as large; an older record may lack it."""
    return Values(name, [number(row.get(column), times) for row in rows])


def by_label(
    rows: Sequence[Row], label: Name, series: Name, value: Callable[[Row], Number]
) -> tuple[list[str], list[Values]]:
    """The labels of the rows, and for each series of them its value at each label."""
    at = {(label(row), series(row)): value(row) for row in rows}
    labels = list(dict.fromkeys(map(label, rows)))
    names = dict.fromkeys(map(series, rows))
    return labels, [Values(name, [at.get((label, name)) for label in labels]) for name in names]


def by_name(
    rows: Sequence[Row], name: Name, place: Callable[[Row], tuple[Number, Number]], *, joined: bool = True
) -> list[Curve]:
    """A curve for each name of the rows, through the places that can be drawn."""
    points: dict[str, list[tuple[float, float]]] = {name(row): [] for row in rows}
    for row in rows:
        x, y = place(row)
        if x and y is not None:
            points[name(row)].append((x, y))
    return [Curve(name, sorted(found), joined=joined) for name, found in points.items()]
