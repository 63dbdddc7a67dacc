"""Tables of the README and the docs, printed again from the records they name: a script, and what its test uses.

`python tests/figures.py` writes them. A table stands between `<!-- table: FILES -->` and `<!-- end table -->`.
"""

import re
from pathlib import Path

from thinwire.bench import record
from thinwire.report import tables

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TABLE = re.compile(r"<!-- table: (?P<files>[^>]*) -->\n.*?<!-- end table -->", re.DOTALL)


def printed(text: str) -> str:
    """The page with its tables as the records have them."""
    return TABLE.sub(_table, text)


def _table(found: re.Match[str]) -> str:
    files = found["files"].split(", ")
    shown = "\n\n".join(tables.markdown(record.read(str(ROOT / file))) for file in files)
    return f"<!-- table: {found['files']} -->\n\n{shown}\n\n<!-- end table -->"


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(printed(page.read_text()))
