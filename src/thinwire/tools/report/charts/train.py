"""Charts of training: loss curves, what compression did to the loss, what it sends, what a step takes."""

from dataclasses import replace

from thinwire.tools.bench.record import CURVE, Record, Row
from thinwire.tools.report.cells import listed, number, text
from thinwire.tools.report.charts.shapes import Axis, Bars, Chart, Curve, Lines, Mark, Values, in_bytes

SENT = "sent per rank, {} per step"
RATIO = Axis("ln(loss / fp32's loss)")
SPARE = 1.2  # room beyond the largest value
WIDE = 20.0  # the loss of a run that falls by more is drawn on a logarithmic axis


def charts(record: Record) -> list[Chart]:
    """Five, less those with nothing to show."""
    rows = record.rows
    return [_curves(rows), _ratios(rows), _against_bytes(rows), _bytes(rows), _step_time(rows)] if rows else []


def label(row: Row) -> str:
    """lloyd2 @ ef21: the codec, and its feedback where it has one."""
    feedback = text(row["feedback"])
    return text(row["codec"]) if feedback == "none" else f"{text(row['codec'])} @ {feedback}"


def _is_plain(row: Row) -> bool:
    return row["codec"] == "none"


def _titled(title: str, rows: list[Row]) -> str:
    task, world, link = listed(rows, "task", "world", "link")
    return f"{title}: {task}, {world} ranks, {link}"


def _curves(rows: list[Row]) -> Lines:
    curves = [Curve(label(row), _points(row), dots=False, under=_is_plain(row)) for row in rows]
    losses = [loss for curve in curves for _, loss in curve.points]
    log = bool(losses) and min(losses) > 0 and max(losses) > WIDE * min(losses)
    return Lines("loss", _titled("Training loss", rows), Axis("step"), Axis("loss", log), curves)


def _points(row: Row) -> list[tuple[float, float]]:
    curve = row.get(CURVE)
    places = [(number(step), number(loss)) for step, loss in curve] if isinstance(curve, list) else []
    return [(step, loss) for step, loss in places if step is not None and loss is not None]


def _marks(rows: list[Row]) -> list[Mark]:
    """fp32, and what another seed does to it."""
    floor = number(rows[0]["noise_floor"])
    return [Mark("fp32", 0.0), *([] if floor is None else [Mark("noise of fp32's seeds", -floor, floor)])]


def _ratios(rows: list[Row]) -> Bars:
    kept = [row for row in rows if not _is_plain(row)]
    ratios = [number(row["loss_log_ratio"]) for row in kept]
    errors = [number(row.get("loss_log_ratio_error")) for row in kept]
    series = [Values("mean ± standard error", ratios, errors)]
    axis = replace(RATIO, most=_room(kept))
    title = _titled("Loss against fp32", rows)
    return Bars("loss_ratio", title, axis, list(map(label, kept)), series, _marks(rows), points=True)


def _room(rows: list[Row]) -> float | None:
    """What the axis needs for all but the controls, which ought to fail; None where that is as much as all need."""
    ends = {True: [0.0], False: [number(row["noise_floor"]) or 0.0 for row in rows]}
    for row in rows:
        ends[bool(row.get("control"))].append(number(row["loss_log_ratio"]) or 0.0)
    most = SPARE * max(ends[False], default=0.0)
    return most if 0 < most < max(ends[True]) else None


def _against_bytes(rows: list[Row]) -> Lines:
    """Without the controls, which ought to fail and would leave the others no room."""
    placed = [row for row in rows if not row.get("control") and number(row["bytes_per_step"])]
    placed = [] if all(map(_is_plain, placed)) else placed
    across, sent = in_bytes(SENT, [number(row["bytes_per_step"]) for row in placed], log=True)
    curves = [
        Curve(label(row), [(x, y)], [number(row.get("loss_log_ratio_error"))], joined=False)
        for row, x in zip(placed, sent, strict=True)
        if x is not None and (y := number(row["loss_log_ratio"])) is not None
    ]
    return Lines("loss_bytes", _titled("Loss against bytes", rows), across, RATIO, curves, _marks(rows))


def _bytes(rows: list[Row]) -> Bars:
    axis, sent = in_bytes(SENT, [number(row["bytes_per_step"]) for row in rows])
    return Bars("bytes", _titled("Bytes", rows), axis, list(map(label, rows)), [Values("sent", sent)])


def _step_time(rows: list[Row]) -> Bars:
    series = [Values("step", [number(row["step_ms"]) for row in rows])]
    limits = [number(row.get("limit_ms")) for row in rows]
    series += [Values("compute + bytes / link rate", limits)] if any(limits) else []
    compute = number(rows[0]["compute_ms"])
    marks = [] if compute is None else [Mark("compute alone", compute)]
    title = _titled("Time per step", rows)
    return Bars("step_time", title, Axis("time, ms"), list(map(label, rows)), series, marks)
