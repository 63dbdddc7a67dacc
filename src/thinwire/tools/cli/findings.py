"""What the demo found: the measured table, the predicted one and its chart, and what they mean in sentences."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.integrations.auto import GAIN
from thinwire.tools.advise import check
from thinwire.tools.advise.machine import Machine
from thinwire.tools.advise.verdict import duration
from thinwire.tools.bench.record import Row
from thinwire.tools.bench.schemes import BF16, NONE
from thinwire.tools.report.cells import ABSENT, TextGrid, counted, fixed, number, signed, significant, text
from thinwire.tools.report.charts import Axis, Bars, Chart, Values

LINKS = ("100mbit", "1gbit", "10gbit", "100gbit")
CHART = "predicted"  # the name of its file
TOO_SHORT = 0.12  # at most, of a compressed step of this network: advise --check of benchmarks/demo_*.json


def grids(rows: Sequence[Row], machine: Machine) -> list[TextGrid]:
    return [_measured(rows), _predicted(rows, machine)] if rows else []


def charts(rows: Sequence[Row], machine: Machine) -> list[Chart]:
    outlooks = _outlooks(rows, machine) if rows else []
    series = [Values(name, [number(outlook.steps[name], 1e3) for outlook in outlooks]) for name in map(_label, rows)]
    title = "PREDICTED, not measured: time per step, by link"
    return [Bars(CHART, title, Axis("time, ms"), [outlook.link for outlook in outlooks], series)] if rows else []


def sentences(rows: Sequence[Row], machine: Machine) -> list[str]:
    """What the tables mean, for a person who has to decide."""
    others = [row for row in rows if row["codec"] != NONE]
    told = [_of_loss(others), _of_steps(rows[0], others), *_of_links(_outlooks(rows, machine))] if others else []
    return [*told, "For your own model, ranks and links: thinwire advise."] if rows else []


def _measured(rows: Sequence[Row]) -> TextGrid:
    first = rows[0]
    seeds, steps, cores = (counted(text(first[name]), name[:-1]) for name in ("seeds", "steps", "cores"))
    parts = [
        f"Measured here: a GPT of {text(first['params'])} weights, {text(first['world'])} ranks on {cores}, over "
        f"{text(first['link'])}, {seeds} of {steps}",
        f"log ratio: ln(loss / fp32's); another seed changes fp32's by {fixed(first['noise_floor'], 3)}",
    ]
    if computed := [text(row["codec"]) for row in rows if row["bytes_from"] == "formula"]:
        parts.append(f"bytes of {_listed(computed)} are computed from the ring formula, not counted")
    header = ["codec", "feedback", "loss", "log ratio", "bytes per step", "fewer", "step", "×none"]
    return TextGrid(". ".join(parts), header, [_measured_cells(row, first) for row in rows], labels=2)


def _measured_cells(row: Row, plain: Row) -> list[str]:
    sent = number(row["bytes_per_step"])
    most = number(plain["bytes_per_step"])
    step = number(row["step_ms"], 1e-3)
    return [
        text(row["codec"]),
        text(row["feedback"]),
        "diverged" if row["diverged"] else significant(row["loss"]),
        signed(row["loss_log_ratio"]),
        ABSENT if sent is None else f"{sent / 1e3:.0f} kB",
        ABSENT if sent is None or most is None else f"{most / sent:.1f}×",
        ABSENT if step is None else duration(step),
        fixed(row["speedup_plain"], 2),
    ]


@dataclass(frozen=True)
class _Outlook:
    """Steps predicted on one link, in seconds; None where the model does not know the scheme."""

    link: str
    steps: dict[str, float | None]  # by codec as named in the tables, the uncompressed one first
    plain: float
    bf16: float | None  # with torch's own hook

    @property
    def best(self) -> tuple[str, float] | None:
        """The fastest codec, or bf16 where that is all; None where there is none, or none that the model knows."""
        found = [(name, step) for name, step in self.steps.items() if name != NONE and step is not None]
        known = [(name, step) for name, step in found if name != BF16] or found
        return min(known, key=lambda found: found[1], default=None)


def _outlooks(rows: Sequence[Row], machine: Machine) -> list[_Outlook]:
    """On all links but the one that was measured, from what the rows say a step computes."""

    def step_s(row: Row, link: str) -> float | None:
        found = check.predicted(row, link, machine)
        return None if found is None else found.step_s

    outlooks = []
    for link in LINKS:
        steps = {_label(row): step_s(row, link) for row in rows}
        plain = steps[NONE]
        assert plain is not None
        if link != rows[0]["link"]:
            outlooks.append(_Outlook(link, steps, plain, step_s({**rows[0], "codec": BF16, "peer": True}, link)))
    return outlooks


def _predicted(rows: Sequence[Row], machine: Machine) -> TextGrid:
    header = ["codec"]
    cells = {_label(row): [_label(row)] for row in rows}
    for outlook in _outlooks(rows, machine):
        header += [outlook.link, "×none"]
        for name, step in outlook.steps.items():
            cells[name] += [ABSENT] * 2 if step is None else [duration(step), f"{outlook.plain / step:.2f}"]
    title = (
        "PREDICTED, not measured: the same step, were every rank behind a link of that rate, and how many times as "
        f"fast as none. Cost model of thinwire advise: compute as measured here, kernels of {machine.source}. "
        f"Compressed steps of so small a network are predicted up to {TOO_SHORT:.0%} too short"
    )
    return TextGrid(title, header, list(cells.values()))


def _label(row: Row) -> str:
    """lloyd2@ef21: two rows may share a codec."""
    feedback = text(row["feedback"])
    return text(row["codec"]) if feedback == "none" else f"{text(row['codec'])}@{feedback}"


def _of_loss(others: Sequence[Row]) -> str:
    floor = number(others[0]["noise_floor"])
    within = []
    told = []
    for row in others:
        ratio = number(row["loss_log_ratio"])
        if ratio is not None and floor is not None and abs(ratio) <= floor:
            within.append(_label(row))
        elif ratio is None:
            told.append(f"{_label(row)} diverged")
        else:
            told.append(f"{_label(row)} {abs(math.expm1(ratio)):.1%} {'higher' if ratio > 0 else 'lower'}")
    same = [f"{_listed(within)} within what another seed does to fp32"] if within else []
    return f"Loss: {'; '.join([*same, *told])}."


def _of_steps(plain: Row, others: Sequence[Row]) -> str:
    best = min([row for row in others if row["codec"] != BF16] or others, key=lambda row: _ms(row, "step_ms"))
    where = f"Measured over {text(plain['link'])}"
    gain = _ms(plain, "step_ms") / _ms(best, "step_ms")
    if gain * (1 - GAIN) <= 1:
        share = "about as long as" if 1 - gain < GAIN else f"{1 - gain:.0%} less than"
        told = f"{where}: compression does not pay, an uncompressed step takes {share} one in {_label(best)}."
        loopback = " Loopback is about as fast as memory, there is little to gain."
        return told + loopback if plain["link"] == "loopback" else told
    if _ms(best, "step_ms_p80") >= _ms(plain, "step_ms_p20"):
        return f"{where}: no clear difference, the steps of one codec scatter as far as codecs differ."
    return f"{where}: compression pays, {_faster(_label(best), gain, number(best['speedup_bf16']))}."


def _faster(name: str, times: float, bf16: float | None) -> str:
    """Beside an uncompressed step, and beside torch's own hook, where it is known."""
    told = f"a step in {name} is {times:.2f} times as fast as an uncompressed one"
    if bf16 is None or name == BF16:
        return told
    if bf16 * (1 - GAIN) <= 1:
        return f"{told}, but bf16 (torch's own hook) does as well"
    return f"{told}, and {bf16:.2f} times as fast as one in bf16 (torch's own hook)"


def _of_links(outlooks: Sequence[_Outlook]) -> list[str]:
    told = []
    idle = []
    for outlook in outlooks:
        if outlook.best is None:
            continue
        name, step = outlook.best
        if step < (1 - GAIN) * outlook.plain:
            faster = _faster(name, outlook.plain / step, outlook.bf16 and outlook.bf16 / step)
            told.append(f"Predicted at {outlook.link}: compression pays, {faster}.")
        else:
            idle.append(outlook.link)
    loses = f"compression does not pay, it wins less than {GAIN:.0%} or loses. Do not compress there."
    return [*told, f"Predicted at {_listed(idle)}: {loses}"] if idle else told


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _ms(row: Row, column: str) -> float:
    found = number(row[column])
    assert found is not None, column  # every scheme of a run was timed
    return found
