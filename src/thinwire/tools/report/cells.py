"""Tables before they have a look, and numbers as their cells."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from thinwire.tools.bench.record import Row, Value

ABSENT = "–"
Tone = Literal["", "good", "bad"]


@dataclass(frozen=True)
class Grid:
    """A table before it has a look: texts only, the first `labels` columns name the row, the others are numbers."""

    title: str
    header: list[str]
    rows: list[list[str]]
    labels: int = 1
    tones: list[Tone] = field(default_factory=list)  # of each row, where one is worse than it was

    @property
    def told(self) -> tuple[str, str]:
        """The title in two parts: what the table is, and how to read it."""
        end = re.search(r"(?=[.:;] )|$", self.title)
        assert end is not None
        return self.title[: end.start()], self.title[end.start() :]


def distinct(rows: Sequence[Row], column: str) -> list[str]:
    """The texts of a column, each once, in order."""
    return list(dict.fromkeys(text(row.get(column)) for row in rows))


def varying(rows: Sequence[Row], columns: Sequence[str]) -> list[str]:
    """The columns that tell the rows apart; of columns that are all the same, the first."""
    return [name for name in columns if len(distinct(rows, name)) > 1] or list(columns[:1])


def text(value: Value) -> str:
    """A value as it is, or a dash. Line breaks are spaces; what no screen can show, control codes say, is "\ufffd"."""
    shown = ABSENT if value is None else str(value)
    return shown if shown.isprintable() else "".join(map(_printable, shown))


def _printable(letter: str) -> str:
    return letter if letter.isprintable() else " " if letter.isspace() else "\ufffd"


def number(value: Value) -> float | None:
    """The value where it is a number, finite and not too large for one."""
    try:
        found = float(value) if isinstance(value, float | int) else math.nan
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def fixed(value: Value, decimals: int) -> str:
    """4.53."""
    found = number(value)
    return ABSENT if found is None else f"{found:.{decimals}f}"


def scientific(value: Value) -> str:
    """9.50e-3."""
    found = number(value)
    if found is None:
        return ABSENT
    mantissa, exponent = f"{found:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}" if found else "0"


def significant(value: Value) -> str:
    """Three digits: 0.0123, 1.23, 12.3, 1234."""
    found = number(value)
    if found is None:
        return ABSENT
    decimals = 2 - math.floor(math.log10(abs(found))) if found else 0
    return f"{found:.{max(0, decimals)}f}"


def signed(value: Value, decimals: int = 3) -> str:
    """+0.012."""
    found = number(value)
    return ABSENT if found is None else f"{found:+.{decimals}f}"


def percent(value: Value, decimals: int | None = None) -> str:
    """0.4%, 5.2%, 96%; or with as many decimals as asked for."""
    found = number(value)
    if found is None:
        return ABSENT
    return f"{100 * found:.{(0 if found >= 0.1 else 1) if decimals is None else decimals}f}%"


def counted(count: int | str, noun: str) -> str:
    """1 row, 2 rows."""
    return f"{count} {noun}" if str(count) == "1" else f"{count} {noun}s"
