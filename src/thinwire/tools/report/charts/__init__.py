"""Records as charts: what is drawn, before it has a look. Only `draw` knows matplotlib."""

from thinwire.tools.report.charts.kinds import banner, of
from thinwire.tools.report.charts.shapes import Axis, Bars, Chart, Curve, Lines, Mark, Values

__all__ = ["Axis", "Bars", "Chart", "Curve", "Lines", "Mark", "Values", "banner", "of"]
