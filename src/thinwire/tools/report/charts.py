"""Records as charts: what is drawn, before it has a look. Only `draw` knows matplotlib.

First the shapes a chart can have, bars by name and curves over a number; then the charts of every kind of record. To
add those of a kind: write a function Record -> list[Chart], and list it.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from thinwire.tools.bench.record import CURVE, Record, Row, Value
from thinwire.tools.report import cells
from thinwire.tools.report.cells import alike, counted, distinct, listed, text
from thinwire.tools.report.kinds import bits, by_part, is_speed, nbytes_of, scheme_of, short
from thinwire.tools.rule import LEAST_SEEDS

Number = float | None
Span = tuple[float, float] | None
FARTHEST = 1e100  # from zero; matplotlib computes with the ends of an axis


def number(value: Value, times: float = 1) -> Number:
    """The value, `times` as large, where it is a number that an axis can show."""
    found = cells.number(value, times)
    return None if found is None or abs(found) > FARTHEST else found


@dataclass(frozen=True)
class Axis:
    label: str
    log: bool = False


def in_bytes(what: str, counts: Sequence[Number], *, log: bool = False) -> tuple[Axis, list[Number]]:
    """An axis of bytes, in the unit that suits the largest of `counts`, and the counts in that unit."""
    most = max((count for count in counts if count is not None), default=0.0)
    unit, size = next((entry for entry in _BYTES if most >= entry[1]), ("bytes", 1.0))
    return Axis(what.format(unit), log), [None if count is None else count / size for count in counts]


_BYTES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


@dataclass(frozen=True)
class Mark:
    """A value to compare with, across the chart; or a band of values that mean the same."""

    name: str
    low: float
    high: float | None = None  # of a band


@dataclass(frozen=True)
class Values:
    """One value for every label; None draws nothing."""

    name: str
    values: Sequence[Number]
    errors: Sequence[Number] | None = None
    spans: Sequence[Span] | None = None  # or from where to where each value scatters

    def __bool__(self) -> bool:
        return any(value is not None for value in self.values)

    def widths(self) -> list[tuple[float, float]] | None:
        """How far a line reaches to the left and to the right of each value; a record may say less than nothing."""
        if self.errors is not None:
            return [(max(0.0, error or 0.0), max(0.0, error or 0.0)) for error in self.errors]
        if self.spans is None:
            return None
        ends = [
            (value or 0.0, *(span or (value or 0.0,) * 2)) for value, span in zip(self.values, self.spans, strict=True)
        ]
        return [(max(0.0, value - low), max(0.0, high - value)) for value, low, high in ends]


@dataclass(frozen=True)
class Bars:
    """Values by name, one under the other. On a logarithmic axis, which has no zero to grow from, they are points."""

    name: str  # of its file
    title: str
    axis: Axis
    labels: Sequence[str]
    series: Sequence[Values]
    marks: Sequence[Mark] = ()
    points: bool = False  # even on an axis with a zero

    def __bool__(self) -> bool:
        return any(self.series)


@dataclass(frozen=True)
class Curve:
    """Points (x, y), in order."""

    name: str
    points: Sequence[tuple[float, float]]
    errors: Sequence[Number] | None = None
    joined: bool = True  # by a line
    dots: bool = True  # one at every point
    known: bool = False  # a limit or a theory, not a measurement


@dataclass(frozen=True)
class Lines:
    name: str  # of its file
    title: str
    across: Axis
    axis: Axis
    curves: Sequence[Curve]
    marks: Sequence[Mark] = ()

    def __bool__(self) -> bool:
        return any(curve.points for curve in self.curves if not curve.known)


Chart = Bars | Lines
Name = Callable[[Row], str]


def named(column: str) -> Name:
    return lambda row: text(row[column])


def by_label(
    rows: Sequence[Row], label: Name, series: Name, value: Callable[[Row], Number]
) -> tuple[list[str], list[Values]]:
    """The labels of the rows, and for each series of them its value at each label."""
    at = {(label(row), series(row)): value(row) for row in rows}
    labels = list(dict.fromkeys(map(label, rows)))
    names = dict.fromkeys(map(series, rows))
    return labels, [Values(name, [at.get((label, name)) for label in labels]) for name in names]


def by_name(
    rows: Sequence[Row], name: Name, place: Callable[[Row], tuple[Number, Number]], *, joined: bool = True
) -> list[Curve]:
    """A curve for each name of the rows, through the places that can be drawn."""
    points: dict[str, list[tuple[float, float]]] = {name(row): [] for row in rows}
    for row in rows:
        x, y = place(row)
        if x and y is not None:
            points[name(row)].append((x, y))
    return [Curve(name, sorted(found), joined=joined) for name, found in points.items()]


NMSE = Axis("NMSE: squared error / squared norm", log=True)
SHARE = Axis("speed, % of a copy of the same bytes")
GAIN = Axis("speed-up: torch's time / thinwire's")
CHANGE = Axis("loss against fp32, %")
COPY = Mark("a copy", 100.0)
EVEN = Mark("as fast as torch", 1.0)
SENT = "sent per rank, {} per step"
LLOYD_MAX = {1: 0.36338, 2: 0.11748, 3: 0.03455, 4: 0.009501}  # of a Gaussian, by bits: the best scalar levels
MOST_BITS = 9  # casts to 16 bits would leave the others no room
MOST_LOG = 50.0  # of a ratio of losses
CODEC = named("codec")
OP = named("op")
_FAMILIES = {"int": "integers", "lloyd": "Lloyd-Max levels after rotation", "trellis": "trellis codes after rotation"}
_RIVALS = {"torch fp32": "speedup_plain", "torch bf16": "speedup_bf16"}


def _codec(record: Record) -> list[Chart]:
    """Error against bits on a Gaussian, or on the first distribution there is; error by codec and distribution."""
    names = distinct(record.rows, "distribution")
    lossy = {CODEC(row) for row in record.rows if number(row["nmse"])}
    rows = [row for row in record.rows if CODEC(row) in lossy]
    values = by_label(rows, CODEC, named("distribution"), lambda row: number(row["nmse"]) or None)
    rate = _rate(record.rows, "gaussian" if "gaussian" in names else names[0])
    return [rate, Bars("distributions", "Error by distribution", NMSE, *values)]


def _rate(rows: list[Row], distribution: str) -> Lines:
    shown = [row for row in rows if text(row["distribution"]) == distribution and _place(row)[0]]
    found = by_name(shown, _family, _place, joined=False)
    most = max((x for curve in found for x, _ in curve.points), default=1.0)
    bound = [(bits, 2.0 ** (-2 * bits)) for bits in (0.5, most)]
    levels = [(float(bits), lost) for bits, lost in LLOYD_MAX.items()]
    known = {"Lloyd-Max quantiser of a Gaussian": levels, "rate-distortion bound of a Gaussian": bound}
    curves = [*found, *(Curve(name, points, known=True) for name, points in known.items())]
    across = Axis("bits per element, scales and header included")
    return Lines("rate", f"Error against bits on the wire, {distribution} data", across, NMSE, curves)


def _place(row: Row) -> tuple[Number, Number]:
    """(bits, NMSE) of a row that can be drawn on a logarithmic axis."""
    bits = number(row["wire_bits"])
    lost = number(row["nmse"])
    return (bits, lost) if bits and lost and bits <= MOST_BITS and lost > 0 else (None, None)


def _family(row: Row) -> str:
    """int4:block=32 is one of the integers."""
    stem = re.match(r"[a-z]*", CODEC(row))
    return _FAMILIES.get(stem[0] if stem else "", "casts")


def _kernels(record: Record) -> list[Chart]:
    return by_part([{**row, "card": record.conditions["device"]} for row in record.rows], _PARTS)


def _shares(rows: list[Row]) -> Bars:
    names = ("backend", "device", "dtype", "numel", "threads", "card")
    backend, device, dtype, numel, threads, card = (text(rows[0][name]) for name in names)
    where = counted(threads, "CPU thread") if device == "cpu" else card
    title = f"Speed of the {backend} kernels: {where}, {numel} elements of {dtype}"
    return Bars("kernels", title, SHARE, *by_label(rows, CODEC, OP, _percent), [COPY], points=True)


def _percent(row: Row) -> Number:
    return number(row["copy_share"], 100)


def _sizes(rows: list[Row]) -> Lines:
    curves = by_name(
        rows, lambda row: f"{CODEC(row)} {short(row)}", lambda row: (number(nbytes_of(row), 1e-6), _percent(row))
    )
    return Lines("sizes", f"Speed of {OP(rows[0])} by size", Axis("tensor, MB", log=True), SHARE, curves, [COPY])


_PARTS: dict[str, Callable[[list[Row]], list[Chart]]] = {
    "codecs": lambda rows: list(map(_shares, alike(rows, "backend", "device", "dtype", "numel", "threads"))),
    "sizes": lambda rows: list(map(_sizes, alike(rows, "op"))),
}


def _collectives(record: Record) -> list[Chart]:
    """Two for each world and link; where messages of several sizes were sent, one of speed-up by size for each verb."""
    found: list[Chart] = []
    for rows in alike(record.rows, "world", "nodes", "link"):
        if len(distinct(rows, "numel")) == 1:
            found += _by_codec(rows)
            continue
        for of_verb in alike(rows, "verb"):
            found += [_by_size(of_verb)] if len(distinct(of_verb, "numel")) > 1 else _by_codec(of_verb)
    return found


def _way(row: Row) -> str:
    """A codec, and its algorithm where a record has several of it."""
    return CODEC(row) if row.get("asked") in (None, "plain", "auto") else f"{CODEC(row)} {text(row['algorithm'])}"


def _where(rows: list[Row]) -> str:
    nodes = f" on {text(rows[0]['nodes'])} nodes" if rows[0].get("nodes") else ""
    return f"{', '.join(distinct(rows, 'verb'))} of {text(rows[0]['world'])} ranks{nodes}, {text(rows[0]['link'])}"


def _by_codec(rows: list[Row]) -> list[Chart]:
    """Codecs, after their verbs where there are several; of an automatic choice, the algorithm it took.

    Bytes are those counted, else what the schedule says.
    """
    labels = [f"auto: {text(row['algorithm'])}" if row.get("auto") else _way(row) for row in rows]
    if len(distinct(rows, "verb")) > 1:
        labels = [f"{text(row['verb'])} {label}" for row, label in zip(rows, labels, strict=True)]
    series = [Values(f"over {rival}", [number(row[name]) for row in rows]) for rival, name in _RIVALS.items()]
    counted = [(number(row["bytes_per_rank"]), number(row["bytes_formula"])) for row in rows]
    axis, sent = in_bytes("sent per rank, {}", [said if found is None else found for found, said in counted])
    return [
        Bars("speedup", f"Speed-up: {_where(rows)}", GAIN, labels, series, [EVEN]),
        Bars("sent", f"Sent per rank: {_where(rows)}", axis, labels, [Values("sent", sent)]),
    ]


def _by_size(rows: list[Row]) -> Lines:
    doubled = [{**row, "rival": rival, "gain": row[column]} for row in rows for rival, column in _RIVALS.items()]
    doubled.sort(key=lambda row: list(map(_way, rows)).index(_way(row)))
    curves = by_name(
        doubled,
        lambda row: f"{_way(row)} over {row['rival']}",
        lambda row: (number(row["numel"]), number(row["gain"])),
    )
    across = Axis("message, elements", log=True)
    return Lines("speedup", f"Speed-up by size: {_where(rows)}", across, GAIN, curves, [EVEN])


def _train(record: Record) -> list[Chart]:
    """What compression did to the loss, while training and at the end; what it sends; what a step takes."""
    rows = record.rows
    where = "{}, {} ranks, {}".format(*listed(rows, "task", "world", "link"))
    labels = list(map(scheme_of, rows))
    axis, sent = in_bytes(SENT, [number(row["bytes_per_step"]) for row in rows])
    ends = [(number(row.get("step_ms_p20")), number(row.get("step_ms_p80"))) for row in rows]
    spans = [None if low is None or high is None else (low, high) for low, high in ends]
    times = Values("step", [number(row.get("step_ms")) for row in rows], spans=spans)
    compute = number(rows[0]["compute_ms"])
    alone = [] if compute is None else [Mark("compute alone", compute)]
    raced = any(row.get("reached_s") is not None for row in rows)  # curves are over seconds
    return [
        _over_time(rows, where) if raced else _losses(rows, where),
        _changes(rows, f"Loss against fp32, at the end: {where}"),
        _exchange(rows, f"Loss against bytes, at the end: {where}"),
        Bars("bytes", f"Bytes: {where}", axis, labels, [Values("sent", sent)]),
        Bars("step_time", f"Time per step, median and p20 to p80: {where}", Axis("time, ms"), labels, [times], alone),
    ]


def _is_plain(row: Row) -> bool:
    return scheme_of(row) == "fp32"


def _losses(rows: list[Row], where: str) -> Lines:
    """Of every scheme with a curve, how far its loss is from that of fp32 at the same step, in per cent."""
    plain = dict(next((_points(row) for row in rows if _is_plain(row)), []))
    curves = []
    for row in _judged(rows):
        points = [(step, 100 * (loss / plain[step] - 1)) for step, loss in _points(row) if plain.get(step)]
        if points:
            curves.append(Curve(scheme_of(row), points, dots=False))
    title = f"Loss against fp32, while training: {where}"
    return Lines("loss", title, Axis("step"), CHANGE, curves, _marks(rows))


def _over_time(rows: list[Row], where: str) -> Lines:
    """Of every scheme the loss after so many seconds of training."""
    curves = [Curve(scheme_of(row), _points(row), dots=False) for row in rows]
    axes = (Axis("seconds of training", log=True), Axis("loss", log=True))
    return Lines("loss", f"Loss by time: {where}", *axes, curves)


def _points(row: Row) -> list[tuple[float, float]]:
    curve = row.get(CURVE)
    places = [(number(step), number(loss)) for step, loss in curve] if isinstance(curve, list) else []
    return [(step, loss) for step, loss in places if step is not None and loss is not None]


def _percent_of(ratio: Value) -> Number:
    """A log ratio in per cent."""
    found = number(ratio)
    return None if found is None else 100 * math.expm1(min(found, MOST_LOG))


def _marks(rows: list[Row]) -> list[Mark]:
    """fp32, and what another seed does to it, where there are seeds enough to know."""
    floor = _percent_of(rows[0]["noise_floor"])
    seeds = number(rows[0]["seeds"]) or 0
    band = [] if floor is None or seeds < LEAST_SEEDS else [Mark("what another seed does", -floor, floor)]
    return [Mark("fp32", 0.0), *band]


def _changes(rows: list[Row], title: str) -> Bars:
    kept = _judged(rows)
    errors = [_percent_of(row.get("loss_log_ratio_error")) for row in kept]
    series = [Values("mean ± standard error", [_percent_of(row["loss_log_ratio"]) for row in kept], errors=errors)]
    return Bars("loss_ratio", title, CHANGE, list(map(scheme_of, kept)), series, _marks(rows), points=True)


def _judged(rows: list[Row]) -> list[Row]:
    """All but fp32 itself and the controls, which ought to fail and would leave the others no room."""
    return [row for row in rows if not _is_plain(row) and not row.get("control")]


def _exchange(rows: list[Row], title: str) -> Lines:
    """A point for every scheme: the bytes that it sends, and what they cost in loss."""
    kept = _judged(rows)
    axis, sent = in_bytes(SENT, [number(row["bytes_per_step"]) for row in kept], log=True)
    curves = [
        Curve(scheme_of(row), [(count, change)], [_percent_of(row.get("loss_log_ratio_error"))], joined=False)
        for row, count in zip(kept, sent, strict=True)
        if count and (change := _percent_of(row["loss_log_ratio"])) is not None
    ]
    return Lines("loss_bytes", title, axis, CHANGE, curves, _marks(rows))


def _by_network(trained: Sequence[list[Row]]) -> list[Chart]:
    """What schemes cost in loss, by the number of weights, where records are of one task in several sizes."""
    tasks = [text(rows[0]["task"]) for rows in trained]
    if len(set(tasks)) < 2 or len({task.split("-")[0] for task in tasks}) > 1:
        return []
    found: dict[str, list[tuple[float, float, Number]]] = {}
    for row in (row for rows in trained for row in _judged(rows)):
        change = _percent_of(row["loss_log_ratio"])
        size = number(row["params"])
        if size and change is not None:
            error = _percent_of(row.get("loss_log_ratio_error"))
            found.setdefault(scheme_of(row), []).append((size, change, error))
    curves = [
        Curve(name, [place[:2] for place in sorted(places)], [place[2] for place in sorted(places)])
        for name, places in found.items()
        if len(places) > 1
    ]
    title = "Loss against fp32 after training, by the size of the network (mean ± standard error of seeds)"
    return [Lines("by_size", title, Axis("weights", log=True), CHANGE, curves, [Mark("fp32", 0.0)])]


def banner(records: Sequence[Record]) -> list[Chart]:
    """The gain over fp32 by link, and the loss against fp32, of the training records that hold either.

    Of records of one task in networks of several sizes, the loss by size.
    """
    trained = [record.rows for record in records if record.kind == "train" and record.rows]
    linked = [rows for rows in trained if rows[0]["link"] not in ("loopback", "none")]
    judged = [rows for rows in trained if (number(rows[0]["seeds"]) or 0) >= LEAST_SEEDS]
    found: list[Chart] = _by_network(trained)
    if found:
        return found
    if linked:
        where = [f"{text(rows[0]['link'])}, {text(rows[0]['world'])} ranks" for rows in linked]
        gains = [_gains(rows) for rows in linked]
        names = dict.fromkeys(name for of_link in gains for name in of_link)
        series = [Values(name, [of_link.get(name) for of_link in gains]) for name in names]
        title = "Gain by link: how many times as fast a training step is as in fp32"
        found.append(Bars("gain", title, Axis("gain over fp32"), where, series, [Mark("fp32", 1.0)]))
    for rows in judged[:1]:
        title = f"Loss against fp32 after training, with what another seed does ({text(rows[0]['task'])})"
        found.append(_changes(rows, title))
    return found


def _gains(rows: list[Row]) -> dict[str, Number]:
    """By scheme, torch's bf16 first; peers of other kinds left out."""
    first = number(rows[0]["speedup_bf16"])
    ours = [row for row in rows if not (row.get("peer") or row.get("control") or _is_plain(row))]
    return {"bf16": 1 / first if first else None} | {
        scheme_of(row): number(row["speedup_plain"]) for row in ours if row["codec"] != "auto"
    }


def _qat(record: Record) -> list[Chart]:
    """Loss and accuracy by method and bits, two for each task; what the kernels cost is in the table."""
    found: list[Chart] = []
    for rows in alike([row for row in record.rows if not is_speed(row)], "task"):
        task = text(rows[0]["task"])
        losses = by_label(rows, bits, named("method"), lambda row: number(row["train_loss"]))
        shares = by_label(rows, bits, named("method"), lambda row: number(row["accuracy"], 100))
        loss = Axis("training loss", log=True)
        right = Axis("test accuracy, %")
        found += [
            Bars("qat_loss", f"Training loss by method and bits: {task}", loss, *losses, points=True),
            Bars("qat_accuracy", f"Test accuracy by method and bits: {task}", right, *shares, points=True),
        ]
    return found


_KINDS: dict[str, Callable[[Record], list[Chart]]] = {
    "codec": _codec,
    "kernels": _kernels,
    "collectives": _collectives,
    "train": _train,
    "qat": _qat,
}


def of(record: Record) -> list[Chart]:
    """The charts of a record, those with nothing to show left out."""
    return [chart for chart in _KINDS[record.kind](record) if chart] if record.rows and record.kind in _KINDS else []
