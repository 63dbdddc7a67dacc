"""Quantities as people write them and read them: rates, times, counts and sizes, each with its unit."""

import math
import re
from fractions import Fraction

from thinwire.errors import AdviceError

_NUMBER = r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?)"
_POWERS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_BYTES = {**_POWERS, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40, "i": 1.0}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0}
RATES = "a rate such as 25gbit, 100mbit, 400GB/s or 900MB/s"
TIMES = "a time such as 1.2s, 350ms or 20us"
COUNTS = "a count such as 7e9, 125M or 7B"
SHARES = "a share such as 0.5 or 50%"


def rate(text: str) -> float:
    """Bytes per second: bits are written gbit, Gbit/s, Gbps or Gb/s, bytes GB/s or GiB/s."""
    bits = re.fullmatch(rf"{_NUMBER} *([kmgt]?)(?:bit(?:/s)?|bps)", text.strip(), re.IGNORECASE)
    found = bits or re.fullmatch(rf"{_NUMBER} *([kKMGT]?i?)([bB])/s", text.strip())
    if found is None:
        raise AdviceError(f"expected {RATES} (a small b is a bit, a capital B a byte), got {text!r}")
    value = float(found[1]) * _BYTES[found[2].lower()] / (8 if bits or found[3] == "b" else 1)
    return _within(value, 1 / 8, 1e18, text, f"{RATES}, at least 1bit/s and at most 1e9GB/s")


def seconds(text: str) -> float:
    found = re.fullmatch(rf"{_NUMBER} *([a-zµ]+)", text.strip(), re.IGNORECASE)
    if found is None or found[2].lower() not in _SECONDS:
        raise AdviceError(f"expected {TIMES}, got {text!r}")
    return _within(float(found[1]) * _SECONDS[found[2].lower()], 0.0, 1e9, text, f"{TIMES}, at most 1e9s")


def count(text: str) -> int:
    """A whole number from 1 on: 64, 7e9, 350M, 7B."""
    found = re.fullmatch(rf"{_NUMBER} *([kmbgt]?)", text.strip().replace("_", ""), re.IGNORECASE)
    if found is None:
        raise AdviceError(f"expected {COUNTS}, got {text!r}")
    times = {**_POWERS, "b": 1e9}[found[2].lower()]
    _within(float(found[1]) * times, 1, 1e18, text, f"{COUNTS}, from 1 to 1e18")
    value = Fraction(found[1]) * int(times)  # exactly: 1.001k is whole, 1.5 is not
    if value.denominator != 1:
        raise AdviceError(f"expected a whole number, {COUNTS}, got {text!r}")
    return int(value)


def share(text: str) -> float:
    """A number from 0 to 1, or per cent."""
    found = re.fullmatch(rf"{_NUMBER} *(%?)", text.strip())
    value = float(found[1]) / (100 if found[2] else 1) if found else math.nan
    return _within(value, 0.0, 1.0, text, SHARES)


def _within(value: float, least: float, most: float, text: str, what: str) -> float:
    if not least <= value <= most:
        raise AdviceError(f"expected {what}, got {text!r}")
    return value


def duration(seconds: float) -> str:
    """3.2 us, 350 ms, 90 s, 20 min, 3 h."""
    return _scaled(seconds, {"h": 3600, "min": 60} if seconds >= 120 else {"s": 1, "ms": 1e-3, "us": 1e-6})


def nbytes(count: float) -> str:
    return _scaled(count, {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1})


def amount(count: float) -> str:
    """7 B, 124 M, 250 k, 52."""
    return _scaled(count, {"B": 1e9, "M": 1e6, "k": 1e3, "": 1}).strip()


def bits(bytes_per_s: float) -> str:
    """A rate in bits: 25 Gbit/s."""
    return _scaled(8 * bytes_per_s, {"Tbit/s": 1e12, "Gbit/s": 1e9, "Mbit/s": 1e6, "kbit/s": 1e3})


def _scaled(value: float, units: dict[str, float]) -> str:
    """Three digits of the first unit that the value reaches, or of the last."""
    unit, size = next(((name, size) for name, size in units.items() if value >= size), [*units.items()][-1])
    shown = value / size
    return f"{shown:,.0f} {unit}" if shown >= 1000 else f"{shown:.3g} {unit}"
