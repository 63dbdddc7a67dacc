"""What a training record means: the measured table, the verdict on every link, and the chart of gains by link."""

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.codecs import Codec, codec
from thinwire.errors import CodecError
from thinwire.integrations import choice
from thinwire.tools import rule
from thinwire.tools.advise import evidence, schemes, verdict
from thinwire.tools.advise.evidence import Losses
from thinwire.tools.advise.machine import Machine
from thinwire.tools.bench.record import Record, Row
from thinwire.tools.report.cells import ABSENT, TextGrid, counted, fixed, number, significant, text
from thinwire.tools.report.charts import Axis, Bars, Chart, Mark, Values
from thinwire.tools.rule import Choice, Way

LINKS = ("100mbit", "1gbit", "10gbit", "100gbit")
CHART = "gain"  # the name of its file
LOOPBACK = "loopback"
HERE = "this run"


@dataclass(frozen=True)
class Outlook:
    """What the rule says of one link, and the ways it chose from."""

    link: str
    choice: Choice
    ways: Sequence[Way]

    @property
    def heading(self) -> str:
        return f"Verdict for this network at {self.link}"


def outlooks(record: Record, machine: Machine, source: str = HERE) -> list[Outlook]:
    """By link: as measured on the shaped link of the run, as predicted on the others. None where seeds are too few."""
    rows = record.rows
    if not is_judged(rows) or len(rows) < 2 or not _ours(rows):
        return []
    losses = evidence.losses_of(record, source)
    known = [parsed for row in rows if not row.get("peer") and (parsed := _codec(row)) is not None]
    measured = str(rows[0]["link"])
    found = [_measured(rows, losses)] if measured not in (LOOPBACK, *LINKS) else []
    for link in LINKS:
        found.append(_measured(rows, losses) if link == measured else predicted(rows[0], link, machine, known, losses))
    return sorted(found, key=lambda outlook: outlook.link != measured)


def predicted(row: Row, link: str, machine: Machine, codecs: Sequence[Codec], losses: Losses) -> Outlook:
    """What `thinwire advise` says of the same job, ranks and link."""
    job, cluster, own = evidence.described({**row, "link": link}, machine)
    found = verdict.judge(job, cluster, own, codecs=codecs, losses=[losses], buckets=(job.bucket_bytes,))
    return Outlook(link, found.choice, list(found.ways.values()))


def is_judged(rows: Sequence[Row]) -> bool:
    """Whether a run has seeds enough to know what another one does."""
    return bool(rows) and (number(rows[0]["seeds"]) or 0) >= rule.LEAST_SEEDS


def sentences(record: Record) -> list[str]:
    """What is to be said beside the verdict."""
    told = ["For your own model, ranks and links: thinwire advise."]
    if record.rows and not is_judged(record.rows):
        seeds = counted(text(record.rows[0]["seeds"]), "seed")
        least = f"it takes {rule.LEAST_SEEDS} to know what another seed does to the loss"
        told = [f"No verdict: this run has {seeds}, and {least}.", *told]
    return told if record.rows else []


def _measured(rows: Sequence[Row], losses: Losses) -> Outlook:
    """Ways as a run timed them. Where torch's bf16 hook is no row of its own, it was timed beside them."""
    known = [losses, *evidence.shipped().losses]
    ways = [_way(row, known) for row in sorted(_ours(rows), key=lambda row: -choice.bits_of(codec(str(row["codec"]))))]
    hook = number(rows[0]["speedup_bf16"])
    if hook and not any(way.name == "bf16" for way in ways):
        ways.insert(1, Way("bf16", schemes.BF16_HOOK, hook * ways[0].step_s, is_exact=True))
    return Outlook(str(rows[0]["link"]), rule.choose(ways, f"measured over {text(rows[0]['link'])}"), ways)


def _ours(rows: Sequence[Row]) -> list[Row]:
    """Those of codecs that the rule may choose."""
    return [row for row in rows if _codec(row) is not None and not row.get("control")]


def _way(row: Row, known: Sequence[Losses]) -> Way:
    found = rule.scheme_of(row)
    p20, p50, p80 = (1e-3 * (number(row.get(name)) or 0.0) for name in ("step_ms_p20", "step_ms", "step_ms_p80"))
    torchs = {"fp32": "plain DDP, no hook", "bf16": schemes.BF16_HOOK}
    code = torchs.get(found, f'thinwire.compress_ddp(model, "{row["codec"]}")')
    return Way(found, code, p50, p50 / (p80 or p50), p50 / (p20 or p50), evidence.find(found, known), found in torchs)


def _codec(row: Row) -> Codec | None:
    """None: no codec of ours, such as PowerSGD."""
    try:
        return codec(str(row["codec"]))
    except CodecError:
        return None


def grids(record: Record, machine: Machine) -> list[TextGrid]:
    """What was measured, and what the rule makes of every link."""
    return [_measured_grid(record.rows), *links_grid(record, machine)] if record.rows else []


def _measured_grid(rows: Sequence[Row]) -> TextGrid:
    first = rows[0]
    seeds, steps, cores = (counted(text(first[name]), name[:-1]) for name in ("seeds", "steps", "cores"))
    parts = [
        f"Measured here: a GPT of {text(first['params'])} weights, {text(first['world'])} ranks on {cores}, over "
        f"{text(first['link'])}, {seeds} of {steps}",
        "loss: of the whole text, and its change against fp32",
    ]
    if is_judged(rows):
        parts.append(f"another seed changes fp32's by {_percent(first['noise_floor']).removeprefix('+')}")
    computed = [rule.scheme_of(row) for row in rows if row.get("bytes_from") == "formula"]
    if computed:
        parts.append(f"bytes of {' and '.join(computed)} are computed from the ring formula, not counted")
    header = ["scheme", "loss", "change", "step", "over fp32", "sent per step", "fewer"]
    return TextGrid(". ".join(parts), header, [_measured_cells(row, first) for row in rows])


def _percent(ratio: object) -> str:
    """A log ratio as people read it: +1.3 %."""
    return ABSENT if not isinstance(ratio, int | float) else rule.Loss(ratio, None, 0, "").change


def _measured_cells(row: Row, plain: Row) -> list[str]:
    sent = number(row["bytes_per_step"])
    most = number(plain["bytes_per_step"])
    step = number(row["step_ms"], 1e-3)
    return [
        rule.scheme_of(row),
        "diverged" if row["diverged"] else significant(row["loss"]),
        _percent(row["loss_log_ratio"]),
        ABSENT if step is None else verdict.duration(step),
        f"{fixed(row['speedup_plain'], 2)} ×",
        ABSENT if sent is None else f"{sent / 1e3:.0f} kB",
        ABSENT if sent is None or most is None else f"{most / sent:.1f} ×",
    ]


def links_grid(record: Record, machine: Machine) -> list[TextGrid]:
    found = outlooks(record, machine)
    rows = []
    for one in found:
        pairs = {way.name: one.choice.chosen.range(way) for way in one.choice.others if one.choice.compress}
        gains = [pairs.get(name, ABSENT) for name in ("bf16", "fp32")]
        rows.append([one.link, one.choice.chosen.name if one.choice.compress else "do not compress", *gains])
    title = (
        "By link: predicted by the cost model of thinwire advise, if every rank had a link of that rate, unless it is "
        f"the link of this run. Compute as measured here, kernels of {machine.source}"
    )
    return [TextGrid(title, ["link", "use", "over bf16", "over fp32"], rows, labels=2)] if found else []


def charts(record: Record, machine: Machine) -> list[Chart]:
    """Gains over fp32 by link, each with its range."""
    found = outlooks(record, machine)
    names = list(dict.fromkeys(way.name for one in found for way in one.ways[1:]))
    series = []
    for name in names:
        ways = [next((way for way in one.ways if way.name == name), None) for one in found]
        gains = [way.gain(one.choice.plain) if way else None for way, one in zip(ways, found, strict=True)]
        pairs = zip(gains, ways, strict=True)
        spans = [(gain * way.low, gain * way.high) if gain and way else None for gain, way in pairs]
        series.append(Values(name, gains, spans=spans))
    axis = Axis("gain over fp32: time of a plain step / of this one")
    title = "Gain by link (predicted where the run did not measure it; lines: the range)"
    labels = [one.link for one in found]
    return [Bars(CHART, title, axis, labels, series, [Mark("fp32", 1.0)], points=True)] if found else []
