"""Figures of the README, the docs and the package, taken again from the records they name: a script, and its test.

`python tests/figures.py` writes them. A table stands between `<!-- table: FILES -->` and `<!-- end table -->`, with
`<!-- table: FILES; COLUMN=VALUE|VALUE, COLUMN=VALUE -->` only the rows that have one of the values in each column; what
`thinwire demo` prints between `<!-- demo: FILE -->` and `<!-- end demo -->`, what `thinwire advise` prints between
`<!-- advise: FLAGS -->` and `<!-- end advise -->`; `thinwire advise` ships MACHINES.
"""

import io
import json
import re
from dataclasses import astuple
from pathlib import Path

from rich.console import Console
from typer.testing import CliRunner

from thinwire.tools.advise import machine as machines
from thinwire.tools.bench import record
from thinwire.tools.cli import demo
from thinwire.tools.cli.app import app
from thinwire.tools.report import tables

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TABLE = re.compile(r"<!-- table: (?P<files>[^>]*) -->\n.*?<!-- end table -->", re.DOTALL)
DEMO = re.compile(r"<!-- demo: (?P<file>[^>]*) -->\n.*?<!-- end demo -->", re.DOTALL)
ADVICE = re.compile(r"<!-- advise: (?P<flags>[^>]*) -->\n.*?<!-- end advise -->", re.DOTALL)
MACHINES = ROOT / "src" / "thinwire" / "tools" / "advise" / "machines.json"
RECORDS = {
    "aarch64": "kernels_cpu_aarch64.json",
    "x86_64": "kernels_cpu_x86_64.json",
    "cuda": "kernels_h200_2026-11-15.json",
}
ON_NCCL = "collectives_nccl_h200_2*_2ranks.json"  # by date: the newest counts
COLUMNS = 108  # of the terminal


def printed(text: str) -> str:
    """The page with its tables as the records have them."""
    return ADVICE.sub(_advice, DEMO.sub(_demo, TABLE.sub(_table, text)))


def files(text: str) -> set[str]:
    """The records that a page shows."""
    listed = [file for found in TABLE.finditer(text) for file in found["files"].partition("; ")[0].split(", ")]
    return {*listed, *(found["file"] for found in DEMO.finditer(text))}


def shipped() -> str:
    """What machines.json holds: the machines of RECORDS and the calls of ON_NCCL, if there are any, to four digits."""
    found = {
        name: machines.from_record(record.read(str(ROOT / "benchmarks" / file)), file) for name, file in RECORDS.items()
    }
    figures = {name: _figures(machine) for name, machine in found.items()}
    for path in sorted((ROOT / "benchmarks").glob(ON_NCCL))[-1:]:
        calls = machines.calls_from_record(record.read(str(path)), path.name)
        times = {"plain_s": _rounded(calls.plain_s), "stage_s": _rounded(calls.stage_s)}
        figures["nccl"] = {"source": calls.source, **times}
    text = json.dumps(figures, indent=1)
    return re.sub(r"\[[^]]*\]", lambda speed: json.dumps(json.loads(speed[0])), text) + "\n"  # one codec per line


def _figures(machine: machines.Machine) -> dict[str, object]:
    speeds = {codec: list(map(_rounded, astuple(speed))) for codec, speed in machine.codecs.items()}
    times = {"copy_s": _rounded(machine.copy_s), "call_s": _rounded(machine.call_s)}
    return {"source": machine.source, **times, "codecs": speeds}


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def _table(found: re.Match[str]) -> str:
    files, _, chosen = found["files"].partition("; ")
    shown = "\n\n".join(tables.markdown(_rows(record.read(str(ROOT / file)), chosen)) for file in files.split(", "))
    return f"<!-- table: {found['files']} -->\n\n{shown}\n\n<!-- end table -->"


def _rows(whole: record.Record, chosen: str) -> record.Record:
    """The record with the rows that are chosen: all, or those of COLUMN=VALUE|VALUE."""
    wanted = [part.split("=") for part in chosen.split(", ") if part]
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


if __name__ == "__main__":
    MACHINES.write_text(shipped())
    for page in PAGES:
        page.write_text(printed(page.read_text()))
