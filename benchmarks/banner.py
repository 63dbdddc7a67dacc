"""README's table of gains, and its banner: by codec, a GPU step over torch's bf16 hook, and the loss above fp32.

python -m benchmarks.banner docs/images/banner.png

Only codecs that have both: a step of the GPT with 124 M weights, and a loss with Adam in what `thinwire advise` ships.
"""

import sys
from pathlib import Path

from thinwire.tools.advise import units, verdict
from thinwire.tools.bench import record
from thinwire.tools.recommend import Loss

STEPS = "ddp_steps_gpt124m_h200_2026-11-19.json"
PEERS = {"bf16": "bf16", "powersgd4": "powersgd4 + classic"}
NAMES = {**PEERS, "int8": "int8", "lloyd4": "lloyd4", "lloyd2": "lloyd2 + moments"}


def shown() -> dict[str, tuple[float, Loss]]:
    """By codec, its speedup and its loss."""
    rows = {str(row["codec"]): row for row in record.read(str(Path(__file__).parent / STEPS)).rows}
    losses = verdict.shipped().losses["ddp"]
    both = [name for name, known in NAMES.items() if name in rows and known in losses]
    return {name: (verdict.column(rows[name], "speedup_bf16"), losses[NAMES[name]]) for name in both}


def gains(asked: str, *, linked: bool) -> list[str]:
    """A Markdown table with a line per record, `FILE = LABEL; ...`: plain torch's step, and speedups over it."""
    lines = ["| job and link | plain | bf16 | PowerSGD | int8 | lloyd4 | record |", "|---|--:|--:|--:|--:|--:|---|"]
    for part in asked.split("; "):
        file, label = part.split(" = ")
        found = record.read(str(Path(__file__).parent / f"{file}.json")).rows
        rows = {str(row["codec"]).partition("/")[0]: row for row in reversed(found)}  # the first of each
        ms = verdict.column(rows["none"], "ms_p50" if "ms_p50" in rows["none"] else "step_ms")
        over = {name: verdict.column(row, "speedup_plain") for name, row in rows.items()}
        if rows["none"].get("speedup_bf16"):
            over.setdefault("bf16", 1 / verdict.column(rows["none"], "speedup_bf16"))
        names = ("bf16", "powersgd4", "int8", "lloyd4")
        cells = [f"{over[name]:.{2 if over[name] < 1 else 1}f} ×" if name in over else "–" for name in names]
        where = f"[record](benchmarks/{file}.json)" if linked else f"`benchmarks/{file}.json`"
        lines.append(f"| {label} | {ms:,.0f} ms | {' | '.join(cells)} | {where} |")
    return lines


def main(path: str) -> None:
    """Draw it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    found = shown()
    figure, (gains, costs) = plt.subplots(1, 2, figsize=(9, 2.8), sharey=True)
    for place, (over, loss) in enumerate(found.values()):
        gains.barh(place, over, color="#8c96a8" if place < len(PEERS) else "#3f51b5", height=0.6)
        gains.text(over + 0.03, place, f"{over:.2f} ×", va="center", color="#555")
        costs.errorbar(loss.gap, place, xerr=loss.half, fmt="o", color="#3f51b5", capsize=3)
        said = f"  {units.amount(loss.params or 0)} weights, {loss.seeds} seeds"
        costs.text(loss.high, place, said, va="center", color="#555", fontsize=8)
    gain = "step, speedup over torch's bf16 hook\nGPT of 124 M weights, 2 ranks on one H200, local TCP"
    cost = "validation loss above fp32, nats, 95 % interval\nband: an interval inside counts as no difference"
    for axis, title in ((gains, gain), (costs, cost)):
        axis.set_title(title, fontsize=9)
    gains.set_yticks(range(len(found)), list(found))
    gains.set_xlim(0, 1.2 * max(gain for gain, _ in found.values()))
    gains.invert_yaxis()
    costs.axvspan(-0.003, 0.003, alpha=0.2, color="#2e9f6b")
    costs.axvline(0, lw=0.6, color="#555")
    places = (-0.01, 0, 0.01, 0.1)
    costs.set_xscale("symlog", linthresh=0.02)
    costs.set_xticks(places, [f"{place:g}" for place in places], minor=False)
    costs.minorticks_off()
    costs.set_xlim(-0.02, 2)
    for axis in (gains, costs):
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main(sys.argv[1])
