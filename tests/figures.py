"""Tables of the README and the docs, printed again from the records they name: a script, and what its test uses.

`python tests/figures.py` writes them. A table stands between `<!-- table: FILES -->` and `<!-- end table -->`, what
`thinwire demo` prints between `<!-- demo: FILE -->` and `<!-- end demo -->`.
"""

import io
import re
from pathlib import Path

from rich.console import Console

from thinwire.tools.advise import machine as machines
from thinwire.tools.bench import record
from thinwire.tools.cli import demo
from thinwire.tools.report import tables

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TABLE = re.compile(r"<!-- table: (?P<files>[^>]*) -->\n.*?<!-- end table -->", re.DOTALL)
DEMO = re.compile(r"<!-- demo: (?P<file>[^>]*) -->\n.*?<!-- end demo -->", re.DOTALL)
MACHINE = machines.recorded("cpu", "aarch64")  # on which the demo was recorded
COLUMNS = 108  # of the terminal


def printed(text: str) -> str:
    """The page with its tables as the records have them."""
    return DEMO.sub(_demo, TABLE.sub(_table, text))


def files(text: str) -> set[str]:
    """The records that a page shows."""
    listed = [file for found in TABLE.finditer(text) for file in found["files"].split(", ")]
    return {*listed, *(found["file"] for found in DEMO.finditer(text))}


def _table(found: re.Match[str]) -> str:
    files = found["files"].split(", ")
    shown = "\n\n".join(tables.markdown(record.read(str(ROOT / file))) for file in files)
    return f"<!-- table: {found['files']} -->\n\n{shown}\n\n<!-- end table -->"


def _demo(found: re.Match[str]) -> str:
    terminal = Console(file=io.StringIO(), width=COLUMNS, force_terminal=True, color_system=None, legacy_windows=False)
    demo.show(record.read(str(ROOT / found["file"])), MACHINE, terminal)
    lines = [line.rstrip() for line in terminal.file.getvalue().strip().splitlines()]
    return "\n".join([f"<!-- demo: {found['file']} -->", "", "```text", *lines, "```", "", "<!-- end demo -->"])


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(printed(page.read_text()))
