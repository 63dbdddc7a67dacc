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
    """What was measured, and what is predicted; nothing for no rows."""
    return [_measured(rows), _predicted(rows, machine)] if rows else []


def charts(rows: Sequence[Row], machine: Machine) -> list[Chart]:
    """What is predicted; nothing for no rows."""
    outlooks = _outlooks(rows, machine) if rows else []
    if not outlooks:
        return []
    series = [
        Values(name, [None if step is None else 1e3 * step for step in (outlook.steps[name] for outlook in outlooks)])
        for name in outlooks[0].steps
    ]
    title = "PREDICTED, not measured: time of a step by link"
    return [Bars(CHART, title, Axis("time, ms"), [outlook.link for outlook in outlooks], series)]


def sentences(rows: Sequence[Row], machine: Machine) -> list[str]:
    """What the tables mean, for a person who has to decide."""
    if not rows:
        return []
    others = [row for row in rows if row["codec"] != NONE]
    told = [_of_loss(others), _of_steps(rows[0], others), *_of_links(_outlooks(rows, machine))] if others else []
    return [*told, "For your own model, ranks and links: thinwire advise."]


# --- tables -----------------------------------------------------------------------------------------------------------


def _measured(rows: Sequence[Row]) -> TextGrid:
    header = ["codec", "feedback", "loss", "log ratio", "bytes a step", "fewer", "step", "×none"]
    return TextGrid(_measured_title(rows), header, [_measured_cells(row, rows[0]) for row in rows], labels=2)


def _measured_title(rows: Sequence[Row]) -> str:
    first = rows[0]
    runs = f"{counted(_whole(first, 'seeds'), 'seed')} of {counted(_whole(first, 'steps'), 'step')}"
    ranks = f"{text(first['world'])} ranks on {counted(_whole(first, 'cores'), 'core')}, over {text(first['link'])}"
    parts = [
        f"Measured here: a GPT of {text(first['params'])} weights, {ranks}, {runs}",
        f"log ratio: ln(loss / fp32's); another seed changes fp32's by {fixed(first['noise_floor'], 3)}",
    ]
    if computed := [text(row["codec"]) for row in rows if row["bytes_from"] == "formula"]:
        parts.append(f"bytes of {_listed(computed)} are computed from the ring formula, not counted")
    return ". ".join(parts)


def _measured_cells(row: Row, plain: Row) -> list[str]:
    sent, most, ms = number(row["bytes_per_step"]), number(plain["bytes_per_step"]), number(row["step_ms"])
    return [
        text(row["codec"]),
        text(row["feedback"]),
        "diverged" if row["diverged"] else significant(row["loss"]),
        signed(row["loss_log_ratio"]),
        ABSENT if sent is None else f"{sent / 1e3:.0f} kB",
        ABSENT if sent is None or most is None else f"{most / sent:.1f}×",
        ABSENT if ms is None else duration(1e-3 * ms),
        fixed(row["speedup_plain"], 2),
    ]


@dataclass(frozen=True)
class _Outlook:
    """Steps predicted on one link."""

    link: str
    steps: dict[str, float | None]  # seconds by codec as named in the tables, the uncompressed one first
    bf16: float | None  # seconds with torch's own hook

    @property
    def plain(self) -> float:
        """The uncompressed step."""
        found = self.steps[NONE]
        assert found is not None
        return found

    @property
    def best(self) -> tuple[str, float] | None:
        """The fastest codec, or bf16 where that is all; None where there is none, or none that the model knows."""
        found = [(name, step) for name, step in self.steps.items() if name != NONE and step is not None]
        known = [(name, step) for name, step in found if name != BF16] or found
        return min(known, key=lambda found: found[1], default=None)

    @property
    def pays(self) -> bool:
        """Whether the fastest wins more than noise may pretend."""
        return self.best is not None and self.best[1] < (1 - GAIN) * self.plain


def _outlooks(rows: Sequence[Row], machine: Machine) -> list[_Outlook]:
    """On all links but the one that was measured."""
    links = [link for link in LINKS if link != rows[0]["link"]]
    bf16 = {**rows[0], "codec": BF16, "peer": True}
    return [
        _Outlook(link, {_label(row): _step_s(row, link, machine) for row in rows}, _step_s(bf16, link, machine))
        for link in links
    ]


def _step_s(row: Row, link: str, machine: Machine) -> float | None:
    """From what the row says a step computes; None where the model does not know its scheme."""
    found = check.predicted(row, link, machine)
    return None if found is None else found.step_s


def _predicted(rows: Sequence[Row], machine: Machine) -> TextGrid:
    outlooks = _outlooks(rows, machine)
    cells = [[name, *(cell for outlook in outlooks for cell in _outlook_cells(outlook, name))]
             for name in map(_label, rows)]  # fmt: skip
    title = (
        "PREDICTED, not measured: the same step, were every rank behind a link of that rate, and how many times as "
        f"fast as none. Cost model of thinwire advise: compute as measured here, kernels of {machine.source}. "
        f"Compressed steps of so small a network are predicted up to {TOO_SHORT:.0%} too short"
    )
    return TextGrid(title, ["codec", *(name for outlook in outlooks for name in (outlook.link, "×none"))], cells)


def _outlook_cells(outlook: _Outlook, name: str) -> tuple[str, str]:
    step = outlook.steps[name]
    return (ABSENT, ABSENT) if step is None else (duration(step), f"{outlook.plain / step:.2f}")


def _label(row: Row) -> str:
    """lloyd2@ef21: two rows may share a codec."""
    feedback = text(row["feedback"])
    return text(row["codec"]) if feedback == "none" else f"{text(row['codec'])}@{feedback}"


# --- sentences --------------------------------------------------------------------------------------------------------


def _of_loss(others: Sequence[Row]) -> str:
    floor = number(others[0]["noise_floor"])
    within = [_label(row) for row in others if _within(row, floor)]
    beyond = [f"{_label(row)} {_change(row)}" for row in others if not _within(row, floor)]
    told = [f"{_listed(within)} within what another seed does to fp32"] if within else []
    return f"Loss: {'; '.join([*told, *beyond])}."


def _within(row: Row, floor: float | None) -> bool:
    ratio = number(row["loss_log_ratio"])
    return ratio is not None and floor is not None and abs(ratio) <= floor


def _change(row: Row) -> str:
    ratio = number(row["loss_log_ratio"])
    return "diverged" if ratio is None else f"{abs(math.expm1(ratio)):.1%} {'higher' if ratio > 0 else 'lower'}"


def _of_steps(plain: Row, others: Sequence[Row]) -> str:
    codecs = [row for row in others if row["codec"] != BF16] or others
    best = min(codecs, key=lambda row: _ms(row, "step_ms"))
    where = f"Measured over {text(plain['link'])}"
    gain = _ms(plain, "step_ms") / _ms(best, "step_ms")
    if gain * (1 - GAIN) <= 1:
        told = f"{where}: compression does not pay, an uncompressed step takes {_against(best, gain)}."
        return f"{told} Loopback is about as fast as memory, there is little to gain." if _is_loopback(plain) else told
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


def _against(best: Row, gain: float) -> str:
    """How an uncompressed step stands beside the best of the others."""
    share = 1 - gain
    return f"about as long as one in {_label(best)}" if share < GAIN else f"{share:.0%} less than one in {_label(best)}"


def _is_loopback(row: Row) -> bool:
    return row["link"] == "loopback"


def _of_links(outlooks: Sequence[_Outlook]) -> list[str]:
    told = [_gain(outlook, *outlook.best) for outlook in outlooks if outlook.best and outlook.pays]
    idle = [outlook for outlook in outlooks if outlook.best and not outlook.pays]
    return [*told, _no_gain(idle)] if idle else told


def _gain(outlook: _Outlook, name: str, step: float) -> str:
    bf16 = None if outlook.bf16 is None else outlook.bf16 / step
    return f"Predicted at {outlook.link}: compression pays, {_faster(name, outlook.plain / step, bf16)}."


def _no_gain(idle: Sequence[_Outlook]) -> str:
    links = _listed([outlook.link for outlook in idle])
    return (
        f"Predicted at {links}: compression does not pay, it wins less than {GAIN:.0%} or loses. Do not compress there."
    )


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _ms(row: Row, column: str) -> float:
    found = number(row[column])
    assert found is not None, column  # every scheme of a run was timed
    return found


def _whole(row: Row, column: str) -> int:
    return int(number(row[column]) or 0)
