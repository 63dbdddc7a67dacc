"""What a demo's record means: the measured table, and the recommendation for every link."""

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.codecs import codec
from thinwire.tools import recommend
from thinwire.tools.advise import units, verdict
from thinwire.tools.advise.cluster import Machine
from thinwire.tools.bench.record import Record, Row
from thinwire.tools.recommend import BF16_HOOK, Recommendation, Way
from thinwire.tools.report.cells import ABSENT, TextGrid, counted, fixed, number, significant, text

LINKS = ("100mbit", "1gbit", "10gbit", "100gbit")


@dataclass(frozen=True)
class Outlook:
    """What the rule says of one link, and the ways it chose from."""

    link: str
    choice: Recommendation
    ways: Sequence[Way]

    @property
    def heading(self) -> str:
        return f"Verdict for this network at {self.link}"


def outlooks(record: Record, machine: Machine) -> list[Outlook]:
    """By link: as measured on the shaped link of the run, as predicted on the others. None where seeds are too few."""
    rows = record.rows
    if not has_seeds(rows) or len(rows) < 2:
        return []
    losses = verdict.losses_of(record, "this run")
    measured = str(rows[0]["link"])
    codecs = [codec(str(row["codec"])) for row in rows if not row.get("peer") and row["codec"] != "auto"]
    found = []
    for link in LINKS if measured in ("loopback", *LINKS) else (measured, *LINKS):
        if link == measured:
            found.append(_measured(rows, losses))
            continue
        job, cluster, own = verdict.described({**rows[0], "link": link}, machine)
        judged = verdict.judge(job, cluster, own, codecs=codecs, losses=losses, buckets=(job.bucket_bytes,))
        found.append(Outlook(link, judged.choice, list(judged.ways.values())))
    return sorted(found, key=lambda outlook: outlook.link != measured)


def has_seeds(rows: Sequence[Row]) -> bool:
    """Whether a run has enough seeds for a seed-to-seed spread."""
    return bool(rows) and (number(rows[0]["seeds"]) or 0) >= recommend.LEAST_SEEDS


def sentences(record: Record) -> list[str]:
    """What goes beside the verdict."""
    found = ["For your own model, ranks and links: thinwire advise."]
    if record.rows and not has_seeds(record.rows):
        seeds = counted(text(record.rows[0]["seeds"]), "seed")
        found.insert(0, f"No verdict: this run has {seeds}; the seed-to-seed spread needs {recommend.LEAST_SEEDS}.")
    return found if record.rows else []


def _measured(rows: Sequence[Row], losses: verdict.Losses) -> Outlook:
    """Ways as the run timed them, from the most to the least exact."""
    torchs = {"fp32": "plain DDP, no hook", "bf16": BF16_HOOK}
    ways = []
    for row in rows:
        name = recommend.scheme_of(row)
        p20, p50, p80 = (1e-3 * (number(row.get(key)) or 0.0) for key in ("step_ms_p20", "step_ms", "step_ms_p80"))
        code = torchs.get(name, f'thinwire.compress_ddp(model, "{row["codec"]}")')
        ways.append(Way(name, code, p50, p50 / p80, p50 / p20, losses.get(name), name in torchs))
    link = text(rows[0]["link"])
    return Outlook(link, recommend.choose(ways, f"measured over {link}"), ways)


def grids(record: Record, machine: Machine) -> list[TextGrid]:
    """What was measured, and what the rule makes of every link."""
    return [_measured_grid(record.rows), *links_grid(record, machine)] if record.rows else []


def _measured_grid(rows: Sequence[Row]) -> TextGrid:
    first = rows[0]
    seeds, steps, cores = (counted(text(first[name]), name[:-1]) for name in ("seeds", "steps", "cores"))
    parts = [
        f"Measured here: a GPT of {text(first['params'])} weights, {text(first['world'])} ranks on {cores}, over "
        f"{text(first['link'])}, {seeds} of {steps}",
        "loss: of the training text, and its change against fp32",
    ]
    if has_seeds(rows):
        parts.append(f"seed-to-seed spread of fp32's loss {_percent(first['noise_floor']).removeprefix('+')}")
    computed = [recommend.scheme_of(row) for row in rows if row.get("bytes_from") == "formula"]
    if computed:
        parts.append(f"bytes of {' and '.join(computed)} are computed from the ring formula, not counted")
    header = ["scheme", "loss", "change", "step", "over fp32", "sent per step", "fewer"]
    return TextGrid(". ".join(parts), header, [_measured_cells(row, first) for row in rows])


def _percent(ratio: object) -> str:
    """A log ratio as people read it: +1.3 %."""
    return ABSENT if not isinstance(ratio, int | float) else recommend.Loss(ratio, None, 0, "").change


def _measured_cells(row: Row, plain: Row) -> list[str]:
    sent, most, step = number(row["bytes_per_step"]), number(plain["bytes_per_step"]), number(row["step_ms"], 1e-3)
    return [
        recommend.scheme_of(row),
        "diverged" if row["diverged"] else significant(row["loss"]),
        _percent(row["loss_log_ratio"]),
        ABSENT if step is None else units.duration(step),
        f"{fixed(2)(row['speedup_plain'])} ×",
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
