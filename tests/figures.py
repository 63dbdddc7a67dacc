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
from compared import Checked, compare, misses
from thinwire.errors import RecordError
from thinwire.tools import recommend
from thinwire.tools.advise import cluster as clusters, units, verdict
from thinwire.tools.advise.cluster import CodecSpeed
from thinwire.tools.advise.verdict import column
from thinwire.tools.bench import record
from thinwire.tools.cli import demo
from thinwire.tools.cli.app import app
from thinwire.tools.report import tables

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TABLE = re.compile(r"<!-- table: (?P<files>[^>]*) -->\n.*?<!-- end table -->", re.DOTALL)
DEMO = re.compile(r"<!-- demo: (?P<file>[^>]*) -->\n.*?<!-- end demo -->", re.DOTALL)
ADVICE = re.compile(r"<!-- advise: (?P<flags>[^>]*) -->\n.*?<!-- end advise -->", re.DOTALL)
OPTIONS = re.compile(r"<!-- options: (?P<command>[^>]*)-->\n.*?<!-- end options -->", re.DOTALL)
MACHINES = ROOT / "src" / "thinwire" / "tools" / "advise" / "machines.json"
EVIDENCE = MACHINES.with_name("evidence.json")
SHAPED = (
    *("collectives_1gbit", "collectives_100mbit", "train_mlp_1gbit", "train_mlp_100mbit"),
    *("collectives_nodes_100mbit", "demo_1gbit", "demo_100mbit"),  # measured when the model was done
)
RECORDS = {
    "aarch64": "kernels_cpu_aarch64.json",
    "x86_64": "kernels_cpu_x86_64.json",
    "cuda": "kernels_h200_2026-11-15.json",
}
ON_NCCL = "collectives_nccl_h200_2*_2ranks.json"  # by date: the newest counts
COLUMNS = 108  # of the terminal
LEGEND = "legend"  # a head that stands for what a caption says about columns


def printed(text: str) -> str:
    """The page with its tables as the records have them."""
    return OPTIONS.sub(_options, ADVICE.sub(_advice, DEMO.sub(_demo, TABLE.sub(_table, text))))


def files(text: str) -> set[str]:
    """The records that a page shows or names."""
    return set(re.findall(r"\bbenchmarks/\w[\w.-]*\.json\b", text))


def shipped() -> str:
    """What machines.json holds: the kernels of RECORDS and the host's time of calls in ON_NCCL, to four digits."""
    figures = {name: _machine(recorded(file), file) for name, file in RECORDS.items()}
    path = max((ROOT / "benchmarks").glob(ON_NCCL))
    figures["nccl"] = _calls(recorded(path.name), path.name)
    text = json.dumps(figures, indent=1)
    return re.sub(r"\[[^]]*\]", lambda speed: json.dumps(json.loads(speed[0])), text) + "\n"  # one codec per line


OPS = ("encode", "decode", "decode_sum", "recode")
LAUNCHES = 3  # kernels in a replayed path: encode, recode, decode
CALL_S = 30e-6  # of Python around one kernel on a CPU; a GPU's is in its record


def _machine(found: record.Record, source: str) -> dict[str, object]:
    """What a rank has alone, with one thread: seconds per element of copies and of every codec that has all OPS."""
    device = str(found.conditions["device"])
    rows = [row for row in found.rows if _counts(row, device)]
    names = dict.fromkeys(str(row["codec"]) for row in rows)
    speeds = {name: speed for name in names if (speed := _speed(rows, name)) is not None}
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


def _calls(found: record.Record, source: str) -> dict[str, object]:
    """What calls on NCCL take of the host: torch's own, and a stage of ours; from the smallest sums on one host."""
    stages = {"one_shot": 2, "two_phase": 3}  # of a sum: kernels before, between and after its messages
    sums = [row for row in found.rows if row["verb"] == "all_reduce" and row["link"] != "tcp"]
    rows = [row for row in sums if row["algorithm"] in stages]
    world, numel = min((column(row, "world"), column(row, "numel")) for row in rows)
    least = [row for row in rows if (row["world"], row["numel"]) == (world, numel)]
    plain_s = 1e-3 * median(column(row, "plain_host_ms") for row in least)
    stage_s = 1e-3 * median(column(row, "host_ms") / stages[str(row["algorithm"])] for row in least)
    told = f"{found.conditions['device']}, {world:g} ranks, {str(found.conditions['date'])[:10]} ({source})"
    return {"source": told, "plain_s": _rounded(plain_s), "stage_s": _rounded(stage_s)}


def recorded(name: str) -> record.Record:
    return record.read(str(ROOT / "benchmarks" / name))


def compared() -> list[Checked]:
    """Every measurement on a shaped link beside its prediction, on the machine that they were measured on."""
    own = clusters.recorded("cpu", "aarch64")
    return [item for name in SHAPED for item in compare(recorded(f"{name}.json"), own)]


def proven() -> str:
    """What evidence.json holds: losses by scheme, of the largest model that has it, and the misses of the model."""
    trained = [(path.name, recorded(path.name)) for path in sorted((ROOT / "benchmarks").glob("*.json"))]
    asked = [(name, found) for name, found in trained if found.kind == "train" and _is_evidence(found.rows[0])]
    asked.sort(key=lambda pair: tuple(-column(pair[1].rows[0], name) for name in ("params", "world", "seeds")))
    losses: dict[str, recommend.Loss] = {}
    for name, found in asked:
        losses = {**verdict.losses_of(found, name), **losses}
    rows = [row for name in SHAPED for row in recorded(f"{name}.json").rows]
    found = {
        "losses": {name: astuple(loss) for name, loss in losses.items()},
        "misses": misses(compared()),
        "most_ranks": max(row["world"] for row in rows),
        "fastest_bytes_per_s": max(units.rate(str(row["link"])) for row in rows),
    }
    short = json.loads(json.dumps(found), parse_float=lambda text: _rounded(float(text)))
    lines = (f'"{name}": {json.dumps(value)}'.replace("], ", "],\n  ") for name, value in short.items())
    return "{\n " + ",\n ".join(lines) + "\n}\n"


def _is_evidence(row: record.Row) -> bool:
    """Gradients of DDP with enough seeds; `advise` does not ask about Muon."""
    known = column(row, "seeds") >= recommend.LEAST_SEEDS
    return known and row["parallel"] == "ddp" and row["optimizer"] != "muon" and not row.get("every")


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def _table(found: re.Match[str]) -> str:
    asked, _, heads = found["files"].partition("; without: ")
    files, _, chosen = asked.partition("; ")
    shown = "\n\n".join(tables.markdown(_rows(record.read(str(ROOT / file)), chosen)) for file in files.split(", "))
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


def _demo(found: re.Match[str]) -> str:
    terminal = Console(file=io.StringIO(), width=COLUMNS, force_terminal=True, color_system=None, legacy_windows=False)
    own = clusters.recorded("cpu", "aarch64")  # on which the demo was recorded
    demo.show(record.read(str(ROOT / found["file"])), own, terminal)
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
    MACHINES.write_text(shipped())
    EVIDENCE.write_text(proven())
    for page in PAGES:
        page.write_text(printed(page.read_text()))
