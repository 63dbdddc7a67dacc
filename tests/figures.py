"""Figures of the README, the docs and the package, taken again from the records they name: a script, and its test.

`python tests/figures.py` writes them. A table stands between `<!-- table: FILES -->` and `<!-- end table -->`, with
`<!-- table: FILES; COLUMN=VALUE|VALUE, COLUMN=VALUE -->` only the rows that have one of the values in each column, with
`; without: HEAD, HEAD` at the end no columns under these heads; what
`thinwire demo` prints between `<!-- demo: FILE -->` and `<!-- end demo -->`, what `thinwire advise` prints between
`<!-- advise: FLAGS -->` and `<!-- end advise -->`, the options of a command between `<!-- options: COMMAND -->` and
`<!-- end options -->`; `thinwire advise` ships MACHINES
and EVIDENCE.
"""

import functools
import io
import json
import re
from dataclasses import asdict, astuple
from pathlib import Path
from statistics import median

import typer
from rich.console import Console
from typer.main import get_command
from typer.testing import CliRunner

from compared import Checked, compare, misses
from thinwire.tools import rule
from thinwire.tools.advise import evidence, machine as machines, units
from thinwire.tools.advise.machine import column
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
FSDP_STEPS = "fsdp_steps_1gbit.json"
RECORDS = {
    "aarch64": "kernels_cpu_aarch64.json",
    "x86_64": "kernels_cpu_x86_64.json",
    "cuda": "kernels_h200_2026-11-15.json",
}
ON_NCCL = "collectives_nccl_h200_2*_2ranks.json"  # by date: the newest counts
COLUMNS = 108  # of the terminal


def printed(text: str) -> str:
    """The page with its tables as the records have them."""
    return OPTIONS.sub(_options, ADVICE.sub(_advice, DEMO.sub(_demo, TABLE.sub(_table, text))))


def files(text: str) -> set[str]:
    """The records that a page shows or names."""
    return set(re.findall(r"\bbenchmarks/\w[\w.-]*\.json\b", text))


def shipped() -> str:
    """What machines.json holds: the machines of RECORDS and the calls of ON_NCCL, if there are any, to four digits."""
    found = {
        name: machines.from_record(record.read(str(ROOT / "benchmarks" / file)), file) for name, file in RECORDS.items()
    }
    figures = {name: _figures(machine) for name, machine in found.items()}
    for path in sorted((ROOT / "benchmarks").glob(ON_NCCL))[-1:]:
        figures["nccl"] = _calls(record.read(str(path)), path.name)
    text = json.dumps(figures, indent=1)
    return re.sub(r"\[[^]]*\]", lambda speed: json.dumps(json.loads(speed[0])), text) + "\n"  # one codec per line


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
    own = machines.recorded("cpu", "aarch64")
    return [item for name in SHAPED for item in compare(recorded(f"{name}.json"), own)]


def proven() -> str:
    """What evidence.json holds: losses of all runs of three seeds, misses of the model, steps of FSDP2."""
    paths = sorted((ROOT / "benchmarks").glob("*.json"))
    trained = [(path.name, found) for path in paths if (found := recorded(path.name)).kind == "train"]
    asked = [(name, found) for name, found in trained if found.rows[0]["optimizer"] != "muon"]  # `advise` does not
    losses = [evidence.losses_of(found, name) for name, found in asked]
    rows = [row for name in SHAPED for row in recorded(f"{name}.json").rows]
    found = {
        "losses": [asdict(one) for one in _by_size(losses) if one.seeds >= rule.LEAST_SEEDS],
        "misses": misses(compared()),
        "most_ranks": max(row["world"] for row in rows),
        "fastest_bytes_per_s": max(units.rate(str(row["link"])) for row in rows),
        "fsdp": _steps_of(recorded(FSDP_STEPS), FSDP_STEPS),
    }
    short = json.loads(json.dumps(found), parse_float=lambda text: _rounded(float(text)))
    lines = (f'"{name}": {json.dumps(value)}'.replace("}, {", "},\n  {") for name, value in short.items())
    return "{\n " + ",\n ".join(lines) + "\n}\n"  # one record per line


def _steps_of(found: record.Record, source: str) -> dict[str, object]:
    """Where FSDP2 took its steps, and their seconds (p20, p50, p80) by scheme."""
    times = ("step_ms_p20", "step_ms", "step_ms_p80")
    seconds = {rule.scheme_of(row): [1e-3 * column(row, name) for name in times] for row in found.rows}
    return {"where": f"{found.rows[0]['world']} ranks over {found.rows[0]['link']}, {source}", "seconds": seconds}


def _by_size(found: list[evidence.Losses]) -> list[evidence.Losses]:
    """The largest model and world first, and more seeds before fewer: its word counts."""
    return sorted(found, key=lambda losses: (-losses.params, -losses.world, -losses.seeds, losses.source))


def _figures(machine: machines.Machine) -> dict[str, object]:
    speeds = {codec: list(map(_rounded, astuple(speed))) for codec, speed in machine.codecs.items()}
    times = {"copy_s": _rounded(machine.copy_s), "call_s": _rounded(machine.call_s)}
    return {"source": machine.source, **times, "codecs": speeds}


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
    """A table without the columns under `heads`; other text as it is."""
    if not block.startswith("|"):
        return block
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
    own = machines.recorded("cpu", "aarch64")  # on which the demo was recorded
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
