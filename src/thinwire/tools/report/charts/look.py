"""How charts look: two palettes, one for light and one for dark pages, and matplotlib's settings.

Colours are Okabe and Ito's, which the colour-blind can tell apart, made darker or lighter until each stands out from
its page; markers differ too, so that no series is known by its colour alone.
"""

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
    series=("#0072b2", "#c94f00", "#007f5f", "#a8488a", "#8f6400", "#5a6570"),
)
DARK = Palette(
    page="#14171b",
    ink="#e4e8ec",
    grid="#3a424b",
    series=("#56b4e9", "#ff8f4d", "#35c79a", "#e6a0cb", "#e8c547", "#a9b3bd"),
)
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
