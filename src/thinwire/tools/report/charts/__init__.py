"""Records as charts: what is drawn, before it has a look. Only `draw` knows matplotlib.

To add the charts of a kind: write a function Record -> list[Chart] in a module here and enter it in `_CHARTS`.
"""

from collections.abc import Callable

from thinwire.tools.bench.record import Record
from thinwire.tools.report.charts import codec, collectives, kernels, qat, train
from thinwire.tools.report.charts.shapes import Axis, Bars, Chart, Curve, Lines, Mark, Values

__all__ = ["Axis", "Bars", "Chart", "Curve", "Lines", "Mark", "Values", "of"]

_CHARTS: dict[str, Callable[[Record], list[Chart]]] = {
    "codec": codec.charts,
    "kernels": kernels.charts,
    "collectives": collectives.charts,
    "train": train.charts,
    "qat": qat.charts,
}


def of(record: Record) -> list[Chart]:
    """The charts of a record, those with nothing to show left out."""
    return [chart for chart in _CHARTS[record.kind](record) if chart]
