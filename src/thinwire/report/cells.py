"""Tables before they have a look, and numbers as their cells."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.bench.record import Row, Value

ABSENT = "–"


@dataclass(frozen=True)
class Grid:
    """A table before it has a look: texts only, the first `labels` columns name the row, the others are numbers."""

    title: str
    header: list[str]
    rows: list[list[str]]
    labels: int = 1


def distinct(rows: Sequence[Row], column: str) -> list[str]:
    """The texts of a column, each once, in order."""
    return list(dict.fromkeys(text(row.get(column)) for row in rows))


def text(value: Value) -> str:
    """A value as it is, or a dash."""
    return ABSENT if value is None else str(value)


def fixed(value: Value, decimals: int) -> str:
    """4.53."""
    return f"{value:.{decimals}f}" if isinstance(value, float | int) else ABSENT


def scientific(value: Value) -> str:
    """9.50e-3."""
    if not isinstance(value, float | int):
        return ABSENT
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}" if value else "0"


def significant(value: Value) -> str:
    """Three digits: 0.0123, 1.23, 12.3, 1234."""
    if not isinstance(value, float | int):
        return ABSENT
    decimals = 2 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{max(0, decimals)}f}"


def signed(value: Value, decimals: int = 3) -> str:
    """+0.012."""
    return f"{value:+.{decimals}f}" if isinstance(value, float | int) else ABSENT


def percent(value: Value, decimals: int | None = None) -> str:
    """0.4%, 5.2%, 96%; or with as many decimals as asked for."""
    if not isinstance(value, float | int):
        return ABSENT
    return f"{100 * value:.{(0 if value >= 0.1 else 1) if decimals is None else decimals}f}%"
