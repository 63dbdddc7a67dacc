"""Figures of the README, the docs and the package, taken again from the records they name: a script, and its test.

`python tests/figures.py` writes them. A table stands between `<!-- table: FILES -->` and `<!-- end table -->`, with
`<!-- table: FILES; COLUMN=VALUE|VALUE, COLUMN=VALUE -->` only the rows that have one of the values in each column, with
`; without: HEAD, HEAD` at the end no columns under these heads, and without `legend` no explanation of columns; what
`thinwire demo` prints between `<!-- demo: FILE -->` and `<!-- end demo -->`, what `thinwire advise` prints between
`<!-- advise: FLAGS -->` and `<!-- end advise -->`, the options of a command between `<!-- options: COMMAND -->` and
`<!-- end options -->`; `thinwire advise` ships MACHINES
and EVIDENCE.
"""

import functools
import io
import json
import re
from dataclasses import astuple
from pathlib import Path
from statistics import median

import typer
from rich.console import Console
from typer.main import get_command
from typer.testing import CliRunner

import benchmarks.kinds  # noqa: F401, the tables of studies
from benchmarks import banner, scale
from compared import LAYERS, Checked, everything, misses
from thinwire.errors import RecordError
from thinwire.tools import recommend, report
from thinwire.tools.advise import cluster as clusters, model, verdict
from thinwire.tools.advise.cluster import CodecSpeed
from thinwire.tools.advise.verdict import column
from thinwire.tools.bench import record
from thinwire.tools.cli import demo
from thinwire.tools.cli.app import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TABLE = re.compile(r"<!-- table: (?P<files>[^>]*) -->\n.*?<!-- end table -->", re.DOTALL)
DEMO = re.compile(r"<!-- demo: (?P<file>[^>]*) -->\n.*?<!-- end demo -->", re.DOTALL)
SCALE = re.compile(r"<!-- scale: predicted -->\n.*?<!-- end scale -->", re.DOTALL)
GAINS = re.compile(r"<!-- (?P<how>gains|steps): (?P<files>[^>]*) -->\n.*?<!-- end (?P=how) -->", re.DOTALL)
ADVICE = re.compile(r"<!-- advise: (?P<flags>[^>]*) -->\n.*?<!-- end advise -->", re.DOTALL)
OPTIONS = re.compile(r"<!-- options: (?P<command>[^>]*)-->\n.*?<!-- end options -->", re.DOTALL)
MACHINES = ROOT / "src" / "thinwire" / "tools" / "advise" / "machines.json"
EVIDENCE = MACHINES.with_name("evidence.json")
RECORDS = {
    "aarch64": "kernels_cpu_aarch64.json",
    "x86_64": "kernels_cpu_x86_64.json",
    "cuda": "kernels_h200_2026-11-15.json",
}
ON_ONE_HOST = "*_steps_gpt124m_h200_*_1host_*ranks.json"
GPT = 124_475_904  # weights
NEITHER_MOMENTS = {"int8", "lloyd4", "int8/int8", "lloyd4/int8"}  # codecs without more passes
COLUMNS = 108  # of the terminal
LEGEND = "legend"  # a head that stands for what a caption says about columns


def printed(text: str) -> str:
    """The page with its tables as the records have them."""
    for pattern, show in ((TABLE, _table), (GAINS, _gains), (DEMO, _demo), (ADVICE, _advice), (OPTIONS, _options)):
        text = pattern.sub(show, text)
    return SCALE.sub(f"<!-- scale: predicted -->\n\n{scale.predicted()}\n\n<!-- end scale -->", text)


def files(text: str) -> set[str]:
    """The records that a page shows or names."""
    return set(re.findall(r"\bbenchmarks/\w[\w.-]*\.json\b", text))


def shipped() -> str:
    """What machines.json holds: the kernels of RECORDS and the time of sums in ON_ONE_HOST, to four digits."""
    figures = {name: _machine(recorded(file), file) for name, file in RECORDS.items()}
    figures["nccl"] = _sums()
    text = json.dumps(figures, indent=1)
    return re.sub(r"\[[^]]*\]", lambda speed: json.dumps(json.loads(speed[0])), text) + "\n"  # one codec per line


OPS = ("encode", "decode", "decode_sum", "recode")
# How many times as long as lloyd2 trellis2 takes to encode, decode, add a wire, and recode:
# kernels_trellis_aarch64.json, kernels_trellis_h200_2026-11-17.json. The same is assumed of other widths.
TRELLIS = {"cpu": (1.6, 1.1, 1.0, 3.2), "cuda": (3.0, 1.75, 1.85, 4.3)}
LAUNCHES = 3  # kernels in a replayed path: encode, recode, decode
CALL_S = 30e-6  # of Python around one kernel on a CPU; a GPU's is in its record


def _machine(found: record.Record, source: str) -> dict[str, object]:
    """What a rank has alone, with one thread: seconds per element of copies and of every codec that has all OPS."""
    device = str(found.conditions["device"])
    rows = [row for row in found.rows if _counts(row, device)]
    names = dict.fromkeys(str(row["codec"]) for row in rows)
    speeds = {name: speed for name in names if (speed := _speed(rows, name)) is not None}
    times = TRELLIS["cpu" if device == "cpu" else "cuda"]
    for lloyd in (name for name in list(speeds) if re.fullmatch(r"lloyd[123]", name)):
        like_it = zip(times, astuple(speeds[lloyd]), strict=True)
        speeds[lloyd.replace("lloyd", "trellis")] = CodecSpeed(*(factor * s for factor, s in like_it))
    launched = [column(row, "launched_ms") * 1e-3 / LAUNCHES for row in found.rows if row.get("launched_ms")]
    return {
        "source": f"{found.conditions['cpu'] if device == 'cpu' else device} ({source})",
        "copy_s": _rounded(median(_slope([row], "copy_ms") for row in rows)),
        "call_s": _rounded(median(launched) if launched else CALL_S),
        "codecs": {codec: list(map(_rounded, astuple(speed))) for codec, speed in speeds.items()},
    }


def _counts(row: record.Row, device: str) -> bool:
    """Whether a row times one of our kernels on fp32, on one thread where threads matter."""
    ours = row["backend"] not in ("reference", "torch") and row.get("part", "codecs") in ("codecs", "sizes")
    return ours and bool(row["ms_p50"]) and row["dtype"] == "float32" and (device != "cpu" or row["threads"] == 1)


def _speed(rows: list[record.Row], codec: str) -> CodecSpeed | None:
    ops = {op: [row for row in rows if (row["codec"], row["op"]) == (codec, op)] for op in OPS}
    if not all(ops.values()):
        return None
    encode, decode, decode_sum, recode = (_slope(ops[op], "ms_p50") for op in OPS)
    further = column(ops["recode"][0], "world") - 1  # wires that the last two read
    wire = max(0.0, (decode_sum - decode) / further)
    return CodecSpeed(encode, decode, wire, max(0.0, recode - wire * further))


def _slope(rows: list[record.Row], time: str) -> float:
    """Seconds per element: between the shortest and the longest tensor, which leaves out what every call costs."""
    points = sorted((column(row, "numel"), 1e-3 * column(row, time)) for row in rows)
    (n0, s0), (n1, s1) = points[0], points[-1]
    if s1 < s0:
        raise RecordError(f"{rows[0]['op']} of {rows[0]['codec']}: longer tensors take less time; measure again")
    return (s1 - s0) / (n1 - n0) if n1 > n0 else s1 / n1


def _sums() -> dict[str, object]:
    """What one of thinwire's collectives adds to a step on one host, where messages cost next to nothing."""
    found = []
    for path in sorted((ROOT / "benchmarks").glob(ON_ONE_HOST)):
        ms = {row["codec"]: column(row, "ms_p50") for row in recorded(path.name).rows}
        for name in NEITHER_MOMENTS & set(ms):
            sums = 3 * LAYERS[GPT] if "/" in str(name) else model.TrainingJob(GPT, 0.0).pieces
            found.append(1e-3 * (ms[name] - ms["none"]) / sums)
    return {"source": ON_ONE_HOST, "sum_s": _rounded(median(found))}


def recorded(name: str) -> record.Record:
    return record.read(str(ROOT / "benchmarks" / name))


def compared() -> list[Checked]:
    """Every measurement on a link beside its prediction, on the machine that it was measured on."""
    return everything(clusters.recorded("cpu", "aarch64"), clusters.recorded("cuda"))


def proven() -> str:
    """What evidence.json holds: losses by scheme, of the largest model that has it, and the misses of the formula."""
    losses: dict[str, dict[str, recommend.Loss]] = {}
    for path in sorted((ROOT / "benchmarks").glob("*.json")):
        found = recorded(path.name)
        if found.kind not in ("loss", "train") or not _is_evidence(found.rows[-1]):
            continue
        muon = ["muon"] if found.rows[-1]["optimizer"] == "muon" else []
        try:
            mine = verdict.losses_of(found, path.name, *muon)
        except RecordError:  # of one seed
            continue
        kept = losses.setdefault(" ".join([str(found.rows[-1].get("parallel") or model.DDP), *muon]), {})
        for name, loss in mine.items():
            if name not in kept or (loss.params or 0, loss.seeds) > (kept[name].params or 0, kept[name].seeds):
                kept[name] = loss
    steps = compared()
    found_misses = {kind: (min(1.0, low), max(1.0, high)) for kind, (low, high) in misses(steps).items()}
    shown = {
        "losses": {how: {name: astuple(loss) for name, loss in kept.items()} for how, kept in losses.items()},
        "misses": found_misses,
        "most_ranks": max(item.ranks for item in steps),
    }
    short = json.loads(json.dumps(shown), parse_float=lambda text: _rounded(float(text)))
    lines = (f'"{name}": {json.dumps(value)}'.replace("], ", "],\n  ") for name, value in short.items())
    return "{\n " + ",\n ".join(lines) + "\n}\n"


def _is_evidence(row: record.Row) -> bool:
    """Not of activations, classifiers (they have no validation loss), rehearsals, or DiLoCo with another momentum."""
    asked = row.get("params", 0) is not None and row.get("parallel") not in ("tp", "pp")
    return asked and row.get("task") not in ("digits", "mlp", "wide") and row.get("outer_momentum") in (None, 0.9)


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def _table(found: re.Match[str]) -> str:
    asked, _, heads = found["files"].partition("; without: ")
    files, _, chosen = asked.partition("; ")
    shown = "\n\n".join(report.markdown(_rows(record.read(str(ROOT / file)), chosen)) for file in files.split(", "))
    if heads:
        shown = "\n\n".join(_without(block, heads.split(", ")) for block in shown.split("\n\n"))
    return f"<!-- table: {found['files']} -->\n\n{shown}\n\n<!-- end table -->"


def _without(block: str, heads: list[str]) -> str:
    """A table without the columns under `heads`; other text as it is, or without what explains columns."""
    if not block.startswith("|"):
        return block.partition(". ")[0] if LEGEND in heads else block
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in block.splitlines()]
    kept = [i for i, head in enumerate(cells[0]) if head not in heads]
    return "\n".join(f"| {' | '.join(line[i] for i in kept)} |" for line in cells)


def _rows(whole: record.Record, chosen: str) -> record.Record:
    """The record with the rows that are chosen: all, or those of COLUMN=VALUE|VALUE."""
    wanted = [part.split("=", 1) for part in chosen.split(", ") if part]
    kept = [row for row in whole.rows if all(str(row[name]) in values.split("|") for name, values in wanted)]
    if not kept:
        raise ValueError(f"expected rows of {chosen}, got none: choose among the record's columns and values")
    return record.Record(whole.kind, whole.conditions, kept)


def _gains(found: re.Match[str]) -> str:
    lines = banner.gains(found["files"], linked=found["how"] == "gains")
    return "\n".join([found[0].partition("\n")[0], "", *lines, "", f"<!-- end {found['how']} -->"])


def _demo(found: re.Match[str]) -> str:
    terminal = Console(file=io.StringIO(), width=COLUMNS, force_terminal=True, color_system=None, legacy_windows=False)
    demo.show(record.read(str(ROOT / found["file"])), terminal)
    lines = [line.rstrip() for line in terminal.file.getvalue().strip().splitlines()]
    return "\n".join([f"<!-- demo: {found['file']} -->", "", "```text", *lines, "```", "", "<!-- end demo -->"])


def _advice(found: re.Match[str]) -> str:
    lines = CliRunner().invoke(app, ["advise", *found["flags"].split()], prog_name="thinwire").stdout
    return f"<!-- advise: {found['flags']} -->\n\n```text\n{lines}```\n\n<!-- end advise -->"


def _options(found: re.Match[str]) -> str:
    words = found["command"].split()
    command = functools.reduce(lambda above, word: above.commands[word], words, get_command(app))  # type: ignore[attr-defined]
    told = (param.get_help_record(typer.Context(command)) for param in command.params if "--help" not in param.opts)
    rows = [
        (option.replace("|", r"\|"), re.sub(r"\s+", " ", meaning).replace("*", r"\*"))
        for option, meaning in filter(None, told)
    ]
    listed = "\n".join(f"| `{option}` | {meaning} |" for option, meaning in rows)
    return f"<!-- options: {found['command']}-->\n\n| option | meaning |\n|---|---|\n{listed}\n\n<!-- end options -->"


if __name__ == "__main__":
    MACHINES.write_text(shipped())  # before what is predicted with it
    EVIDENCE.write_text(proven())
    for page in PAGES:
        page.write_text(printed(page.read_text()))
