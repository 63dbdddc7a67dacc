"""Tables before they have a look, and numbers as their cells."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from thinwire.tools.bench.record import Row, Value

ABSENT = "–"


@dataclass(frozen=True)
class TextGrid:
    """A table before it has a look: texts only; the first `labels` columns name the row, the others are numbers."""

    title: str
    header: list[str]
    rows: list[list[str]]
    labels: int = 1

    def first(self, columns: int) -> "TextGrid":
        """The same with so many columns."""
        return replace(self, header=self.header[:columns], rows=[row[:columns] for row in self.rows])

    @property
    def parts(self) -> tuple[str, str]:
        """The title in two parts: what the table is, and how to read it."""
        what = re.split(r"(?=[.:;] )", self.title, maxsplit=1)[0]
        return what, self.title.removeprefix(what)


@dataclass(frozen=True)
class Column:
    """A column of a table: its header, the column of the record, how a value is written, and what it means."""

    header: str
    name: str
    show: Callable[[Value], str]
    means: str = ""

    def cell(self, row: Row) -> str:
        return self.show(row.get(self.name))


def grid(what: str, rows: Sequence[Row], columns: Sequence[Column], labels: int, how: str = "") -> TextGrid:
    """A line per row, without empty columns. Labels that all rows share go into the title, and what columns mean."""
    named = columns[:labels]
    same = [one for one in named if len(rows) > 1 and len(distinct(rows, one.name)) == 1]
    shared = ", ".join(f"{one.header} {one.cell(rows[0])}" for one in same if rows[0].get(one.name) is not None)
    kept = [one for one in columns if one not in same and any(one.cell(row) != ABSENT for row in rows)]
    cells = [[one.cell(row) for one in kept] for row in rows]
    meanings = "; ".join([how] * bool(how) + [f"{one.header}: {one.means}" for one in kept if one.means])
    title = ". ".join(filter(None, (what, shared, meanings)))
    return TextGrid(title, [one.header for one in kept], cells, sum(one in named for one in kept))


def distinct(rows: Sequence[Row], column: str) -> list[str]:
    """The texts of a column, each once, in order."""
    return list(dict.fromkeys(text(row.get(column)) for row in rows))


def text(value: Value) -> str:
    """A value as it is, or a dash. Line breaks become spaces; control codes and the like become "\ufffd"."""
    shown = ABSENT if value is None else str(value)
    return "".join(letter if letter.isprintable() else " " if letter.isspace() else "\ufffd" for letter in shown)


def number(value: Value, times: float = 1) -> float | None:
    """The value, `times` as large, where it is a finite number."""
    try:
        found = times * float(value) if isinstance(value, float | int) else math.nan
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def fixed(decimals: int, sign: str = "") -> Callable[[Value], str]:
    """4.53, or +0.012 with a sign; never -0.00."""

    def show(value: Value) -> str:
        found = number(value)
        return ABSENT if found is None else f"{found:{sign}z.{decimals}f}"

    return show


def scientific(value: Value) -> str:
    """9.50e-3."""
    found = number(value)
    if found is None:
        return ABSENT
    mantissa, exponent = f"{found:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}" if found else "0"


def significant(value: Value, times: float = 1) -> str:
    """Three digits: 0.0123, 1.23, 12.3, 1234."""
    found = number(value, times)
    if found is None:
        return ABSENT
    decimals = 2 - math.floor(math.log10(abs(found))) if found else 0
    return f"{found:.{max(0, decimals)}f}"


def scaled(times: float) -> Callable[[Value], str]:
    return lambda value: significant(value, times)


def percent(value: Value) -> str:
    """0.4%, 5.2%, 96%."""
    found = number(value)
    return ABSENT if found is None else f"{100 * found:.{0 if found >= 0.1 else 1}f}%"


def counted(count: int | str, noun: str) -> str:
    """1 row, 2 rows."""
    return f"{count} {noun}" if str(count) == "1" else f"{count} {noun}s"
