"""Figures in the README and the docs come from committed records, and every record can be read."""

import re
from pathlib import Path

import pytest

import figures
from thinwire.tools.bench import record


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.name)
def test_tables_are_printed_from_records(page: Path) -> None:
    text = page.read_text()
    assert figures.printed(text) == text, (
        f"run `python tests/figures.py`: {page.name} has other tables than the records"
    )
    assert text.count("<!-- table:") == len(figures.TABLE.findall(text)), f"a table of {page.name} has no end"
    assert text.count("<!-- advise:") == len(figures.ADVICE.findall(text)), f"advice of {page.name} has no end"
    assert text.count("<!-- demo:") == len(figures.DEMO.findall(text)), f"a demo of {page.name} has no end"


def test_what_is_shipped_is_what_the_records_say() -> None:
    assert figures.MACHINES.read_text() == figures.shipped(), "run `python tests/figures.py`"
    assert figures.EVIDENCE.read_text() == figures.proven(), "run `python tests/figures.py`"


def test_every_record_is_named_somewhere() -> None:
    shown = set().union(*(figures.files(page.read_text()) for page in figures.PAGES))
    assert shown == {f"benchmarks/{path.name}" for path in (figures.ROOT / "benchmarks").glob("*.json")}


@pytest.mark.parametrize("path", sorted((figures.ROOT / "benchmarks").glob("*.json")), ids=lambda path: path.name)
def test_records_can_be_read(path: Path) -> None:
    found = record.read(str(path))
    assert found.rows
    commit = str(found.conditions["commit"])
    assert re.fullmatch(r"[0-9a-f]{40}", commit), f"{path.name} is of commit {commit}: take it from a clean checkout"
