"""Charts of quantisation-aware training: loss and accuracy by method and bits; what the kernels cost."""

from thinwire.tools.bench.record import Record, Row
from thinwire.tools.report.cells import distinct, number, text, varying
from thinwire.tools.report.charts.shapes import Axis, Bars, Chart, Line, Values
from thinwire.tools.report.qat import SPEED_LABELS, bits, is_speed

LOSS, ACCURACY = Axis("training loss", log=True), Axis("test accuracy, %")
FLOOR = Axis("time / time of reading and writing each tensor once")
GAIN = Axis("speed-up: torch's time / thinwire's")


def charts(record: Record) -> list[Chart]:
    """Two for each task, two of speed."""
    trained = [row for row in record.rows if not is_speed(row)]
    speed = [row for row in record.rows if is_speed(row)]
    found: list[Chart] = []
    for task in distinct(trained, "task"):
        rows = [row for row in trained if text(row["task"]) == task]
        found += [
            _by_bits("qat_loss", f"Training loss by method and bits: {task}", LOSS, rows, "train_loss", 1),
            _by_bits("qat_accuracy", f"Test accuracy by method and bits: {task}", ACCURACY, rows, "accuracy", 100),
        ]
    return [*found, *(_speeds(speed) if speed else [])]


def _by_bits(name: str, title: str, axis: Axis, rows: list[Row], column: str, unit: float) -> Bars:
    at = {(_method(row), bits(row)): number(row[column]) for row in rows}
    labels, methods = list(dict.fromkeys(map(bits, rows))), list(dict.fromkeys(map(_method, rows)))
    series = [Values(method, [_scaled(at.get((method, label)), unit) for label in labels]) for method in methods]
    return Bars(name, title, axis, labels, series, points=True)


def _method(row: Row) -> str:
    return text(row["method"])


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else unit * value


def _speeds(rows: list[Row]) -> list[Chart]:
    names = varying(rows, SPEED_LABELS)
    labels = [" ".join(text(row.get(name)) for name in names) for row in rows]
    costs = [_values(name, rows, column) for name, column in _COSTS.items()]
    costs = [values for values in costs if any(value is not None for value in values.values)]
    gains = [_values(GAIN.label, rows, "times_torch")]
    return [
        Bars("qat_floor", "Cost of fake quantisation", FLOOR, labels, costs, [Line(1, "the floor")]),
        Bars("qat_speedup", "Fake quantisation beside torch's", GAIN, labels, gains, [Line(1, "as fast as torch")]),
    ]


_COSTS = {"thinwire": "times_floor", "torch": "torch_times_floor"}


def _values(name: str, rows: list[Row], column: str) -> Values:
    return Values(name, [number(row.get(column)) for row in rows])
