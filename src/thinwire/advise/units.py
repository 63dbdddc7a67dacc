"""Quantities as people write them: rates, times, counts and sizes, each with its unit."""

import math
import re

_NUMBER = r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?)"
_POWERS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_BINARY = {"ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0}
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}

RATES = "a rate such as 25gbit, 100mbit, 400GB/s or 900MB/s"
TIMES = "a time such as 1.2s, 350ms or 20us"
COUNTS = "a count such as 7e9, 125M or 7B"
SIZES = "a size such as 25MB or 512MiB"


def rate(text: str) -> float:
    """Bytes a second: bits are written gbit, Gbit/s, Gbps or Gb/s, bytes GB/s or GiB/s."""
    found = re.fullmatch(rf"{_NUMBER} *([kmgt]?)(?:bit(?:/s)?|bps)", text.strip(), re.IGNORECASE)
    if found:
        return _positive(float(found[1]) * _POWERS[found[2].lower()] / 8, text, RATES)
    found = re.fullmatch(rf"{_NUMBER} *([kKMGT]?)(i?)([bB])/s", text.strip())
    if found is None:
        raise ValueError(f"expected {RATES} (a small b is a bit, a capital B a byte), got {text!r}")
    size = _prefix(found[2], found[3]) / (8 if found[4] == "b" else 1)
    return _positive(float(found[1]) * size, text, RATES)


def seconds(text: str) -> float:
    """Seconds; 0 is allowed."""
    found = re.fullmatch(rf"{_NUMBER} *([a-zµ]+)", text.strip(), re.IGNORECASE)
    if found is None or found[2].lower() not in _SECONDS:
        raise ValueError(f"expected {TIMES}, got {text!r}")
    return float(found[1]) * _SECONDS[found[2].lower()]


def count(text: str) -> int:
    """A whole number from 1 on: 64, 7e9, 350M, 7B."""
    found = re.fullmatch(rf"{_NUMBER} *([kmbgt]?)", text.strip().replace("_", ""), re.IGNORECASE)
    if found is None:
        raise ValueError(f"expected {COUNTS}, got {text!r}")
    return round(_positive(float(found[1]) * _COUNTS[found[2].lower()], text, COUNTS, least=1))


def size(text: str) -> int:
    """Bytes."""
    found = re.fullmatch(rf"{_NUMBER} *([kKMGT]?)(i?)B", text.strip())
    if found is None:
        raise ValueError(f"expected {SIZES}, got {text!r}")
    return round(_positive(float(found[1]) * _prefix(found[2], found[3]), text, SIZES, least=1))


def share(text: str) -> float:
    """A number from 0 to 1, or per cent."""
    found = re.fullmatch(rf"{_NUMBER} *(%?)", text.strip())
    value = float(found[1]) / (100 if found[2] else 1) if found else math.nan
    if not 0 <= value <= 1:
        raise ValueError(f"expected a share such as 0.5 or 50%, got {text!r}")
    return value


def _prefix(letter: str, binary: str) -> float:
    return _BINARY[f"{letter.lower()}i"] if binary and letter else _POWERS[letter.lower()]


def _positive(value: float, text: str, what: str, least: float = 0.0) -> float:
    if not (least <= value < math.inf and value > 0):
        raise ValueError(f"expected {what}, got {text!r}")
    return value
