"""The reference pages name what there is: every command, every variable, and the bytes that the codecs write."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from typer.main import get_command

import figures
import thinwire
from thinwire.tools.cli.app import app

PAGES = figures.ROOT / "docs" / "reference"
NUMBERS = [0, 1, -2, 3, 7, -7, 4.4, -0.6, 0.5, -3.5]  # of the examples in wire-format.md


def commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[str]:
    """The words of every command that does something."""
    below = getattr(command, "commands", {})
    if not words or not below:
        yield " ".join(words)
    for name, inner in below.items():
        yield from commands(inner, (*words, name))


def test_every_command_has_its_options_on_the_page() -> None:
    shown = [found["command"].strip() for found in figures.OPTIONS.finditer((PAGES / "cli.md").read_text())]
    assert sorted(shown) == sorted(commands(get_command(app))), (
        "give each command `<!-- options: COMMAND -->` in cli.md"
    )


def test_every_variable_is_on_the_page() -> None:
    sources = [figures.ROOT / "setup.py", *(figures.ROOT / "src").rglob("*.py"), *(figures.ROOT / "native").iterdir()]
    read = {name for path in sources for name in re.findall(r"\bTHINWIRE_[A-Z_]+[A-Z]\b", path.read_text())}
    told = set(re.findall(r"`(THINWIRE_[A-Z_]+)`", (PAGES / "environment.md").read_text()))
    assert told == read


@pytest.mark.parametrize("spec", ["int4:block=8", "lloyd2:block=32"])
def test_the_examples_of_the_wire_format(spec: str) -> None:
    """Encoded here, they are the bytes on the page."""
    codec = thinwire.codec(spec)
    wire = torch.empty(codec.wire_bytes(len(NUMBERS)), dtype=torch.uint8)
    codec.encode(torch.tensor(NUMBERS), wire)
    _, _, example = (figures.ROOT / "docs" / "internals" / "wire-format.md").read_text().partition(f'`codec("{spec}")`')
    lines = re.findall(
        r"^ *\d+  ((?:[0-9a-f]{2} ?)+)$", example.partition("```\n")[2].partition("```")[0], re.MULTILINE
    )
    assert bytes(wire.tolist()) == bytes.fromhex(" ".join(lines))
