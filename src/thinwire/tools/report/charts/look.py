"""How charts look: two palettes, one for light and one for dark pages, a colour per codec, and matplotlib's settings.

Colours are Okabe and Ito's, which the colour-blind can tell apart, made darker or lighter until each stands out from
its page; markers differ too, so that no series is known by its colour alone.
"""

import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Palette:
    page: str
    ink: str
    grid: str
    series: tuple[str, ...]

    def names(self) -> dict[str, str]:
        """CSS names of the colours: --page, --ink, --grid, --s0 and so on."""
        numbered = {f"--s{number}": color for number, color in enumerate(self.series)}
        return {"--page": self.page, "--ink": self.ink, "--grid": self.grid, **numbered}


LIGHT = Palette(
    page="#ffffff",
    ink="#1b1f24",
    grid="#d5dae0",
    series=("#0072b2", "#c94f00", "#007f5f", "#a8488a", "#8f6400", "#5a6570", "#00707a", "#b0003a", "#7a4a21"),
)
DARK = Palette(
    page="#14171b",
    ink="#e4e8ec",
    grid="#3a424b",
    series=("#56b4e9", "#ff8f4d", "#35c79a", "#e6a0cb", "#e8c547", "#a9b3bd", "#4fd1dc", "#ff7a9c", "#d9a777"),
)
GREY = 5  # among the colours
# Of a codec, the same in every chart; fp32 is grey. Some that never meet share one.
CODECS = {
    **{"fp32": GREY, "none": GREY, "plain": GREY, "bf16": 4, "fp16": 8, "int8": 0, "int4": 6, "int2": 7},
    **{"lloyd4": 1, "lloyd3": 8, "lloyd2": 2, "lloyd1": 3, "powersgd": 7, "onebit": 6, "sign": 8, "topk": 8, "auto": 7},
}


def color_of(name: str) -> int | None:
    """The colour of the codec that a name begins with, as in "lloyd2 + EF21" or "powersgd4"; None: it has none."""
    found = re.match(r"([a-z]+)\d*", name)
    return None if found is None else CODECS.get(found[0], CODECS.get(found[1]))


MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
DASHES = ("-", "--", "-.", ":")
WIDTH = 4.8  # inches: a phone of 360 pixels then has about a pixel for a point
DPI = 180

SETTINGS: Any = {  # a dictionary; matplotlib types its keys one by one
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "text.parse_math": False,  # a "$" in a record is a "$"
    "text.color": LIGHT.ink,
    "axes.labelcolor": LIGHT.ink,
    "axes.edgecolor": LIGHT.ink,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.axisbelow": True,
    "grid.color": LIGHT.grid,
    "grid.linewidth": 0.7,
    "xtick.color": LIGHT.ink,
    "ytick.color": LIGHT.ink,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.5,
    "figure.facecolor": LIGHT.page,
    "figure.constrained_layout.use": True,
    "svg.fonttype": "none",  # words stay words: they can be found, copied and read aloud
    "svg.hashsalt": "thinwire",  # the same chart has the same bytes
}
