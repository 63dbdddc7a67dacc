"""Charts of quantisation-aware training: loss and accuracy by method and bits; what the kernels cost."""

from thinwire.tools.bench.record import Record, Row
from thinwire.tools.report.cells import alike, number, text, varying
from thinwire.tools.report.charts.shapes import Axis, Bars, Chart, Mark, Values, by_label, named
from thinwire.tools.report.qat import SPEED_LABELS, bits, is_speed

LOSS = Axis("training loss", log=True)
ACCURACY = Axis("test accuracy, %")
FLOOR = Axis("time / time of reading and writing each tensor once")
GAIN = Axis("speed-up: torch's time / thinwire's")


def charts(record: Record) -> list[Chart]:
    """Two for each task, two of speed."""
    found: list[Chart] = []
    for rows in alike([row for row in record.rows if not is_speed(row)], "task"):
        task = text(rows[0]["task"])
        found += [
            _by_bits("qat_loss", f"Training loss by method and bits: {task}", LOSS, rows, "train_loss", 1),
            _by_bits("qat_accuracy", f"Test accuracy by method and bits: {task}", ACCURACY, rows, "accuracy", 100),
        ]
    speed = [row for row in record.rows if is_speed(row)]
    return [*found, *_speeds(speed)] if speed else found


def _by_bits(name: str, title: str, axis: Axis, rows: list[Row], column: str, unit: float) -> Bars:
    values = by_label(rows, bits, named("method"), lambda row: number(row[column], unit))
    return Bars(name, title, axis, *values, points=True)


def _speeds(rows: list[Row]) -> list[Chart]:
    names = varying(rows, SPEED_LABELS)
    labels = [" ".join(text(row.get(name)) for name in names) for row in rows]
    columns = {"thinwire": "times_floor", "torch": "torch_times_floor", GAIN.label: "times_torch"}
    *costs, gain = (Values(name, [number(row.get(column)) for row in rows]) for name, column in columns.items())
    costs = [cost for cost in costs if any(value is not None for value in cost.values)]
    return [
        Bars("qat_floor", "Cost of fake quantisation", FLOOR, labels, costs, [Mark("the floor", 1)]),
        Bars("qat_speedup", "Fake quantisation beside torch's", GAIN, labels, [gain], [Mark("as fast as torch", 1)]),
    ]
