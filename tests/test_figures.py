"""Figures in the README and the docs come from committed records, and every record can be read."""

import re
from pathlib import Path

import pytest

import figures
from thinwire.tools.advise import verdict
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


def test_sentences_have_the_figures_of_records() -> None:
    front, readme = ((figures.ROOT / page).read_text() for page in ("docs/index.md", "README.md"))
    int8 = {row["codec"]: row for row in figures.recorded("ddp_steps_gpt124m_h200_2026-11-19.json").rows}["int8"]
    over = [f"{int8[column]:.1f}" for column in ("speedup_plain", "speedup_bf16")]
    assert re.findall(r"([\d.]+) times as\s+fast", front) == over
    known = verdict.shipped().losses
    losses = [*(known["ddp"][name] for name in ("lloyd4", "int8", "trellis2 + moments")), known["ddp muon"]["int8"]]
    shown = [str(loss).removesuffix(" nats").replace("-", "−") for loss in losses]
    assert re.findall(r"[+−][\d.]+ ± [\d.]+", readme) == shown
    page = (figures.ROOT / "docs" / "reference" / "cli.md").read_text()
    ends = [verdict.shipped().misses[kind] for kind in ("flat", "hierarchical", "sharded")]
    assert re.findall(r"([\d.]+) to ([\d.]+) times", page) == [(f"{low:.2f}", f"{high:.2f}") for low, high in ends]


def test_every_record_is_named_somewhere() -> None:
    shown = set().union(*(figures.files(page.read_text()) for page in figures.PAGES))
    assert shown == {f"benchmarks/{path.name}" for path in (figures.ROOT / "benchmarks").glob("*.json")}


@pytest.mark.parametrize("path", sorted((figures.ROOT / "benchmarks").glob("*.json")), ids=lambda path: path.name)
def test_records_can_be_read(path: Path) -> None:
    found = record.read(str(path))
    assert found.rows
    commit = str(found.conditions["commit"])
    assert re.fullmatch(r"[0-9a-f]{40}", commit), f"{path.name} is of commit {commit}: take it from a clean checkout"
