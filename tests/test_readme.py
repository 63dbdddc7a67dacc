"""The Python of the README, docs/start and docs/howto runs as it is printed; the API page has every public name.

A block that calls init_process_group begins a script, and blocks below it go on with what it left. A script has two
ranks, or those of a comment above the block: `<!-- ranks: 4 -->`; without a group it has one. What a `text` block right
below says is what rank 0 prints. Two comments keep a block from being run. `<!-- lines of examples/NAME.py -->`: each
of its lines stands in that example, which other tests run. `<!-- not run: WHY -->`.
"""

import contextlib
import io
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch.distributed as dist

import thinwire
from ranks import RankPool

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *(page for room in ("", "start", "howto") for page in (ROOT / "docs" / room).glob("*.md"))]
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^>\n]+) -->\n\n)?^```python\n(?P<code>.*?)^```\n(?:^```text\n(?P<printed>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """One block of a page, and what it has to print, if the page says."""

    name: str  # page:line
    code: str
    printed: str | None


@dataclass
class Script:
    """Blocks that run one after the other on the same ranks."""

    world: int
    blocks: list[Block] = field(default_factory=list)


def read(page: Path, text: str) -> tuple[list[Script], list[tuple[str, str]]]:
    """The scripts of a page, and (example, block) of each excerpt."""
    scripts: list[Script] = []
    excerpts = []
    for found in BLOCK.finditer(text):
        kind, _, rest = (found["mark"] or "").partition(" ")
        if kind == "lines":
            excerpts.append((rest.removeprefix("of "), found["code"]))
        elif found["mark"] is None or kind == "ranks:":
            grouped = "init_process_group" in found["code"]
            if grouped or not scripts:
                scripts.append(Script(int(rest or 2) if grouped else 1))
            line = text.count("\n", 0, found.start("code")) + 1
            scripts[-1].blocks.append(Block(f"{page.stem}:{line}", found["code"], found["printed"]))
        else:
            assert re.fullmatch(r"not run: .+", found["mark"]), f"{page}: a block under {found['mark']!r}"
    return scripts, excerpts


READ = {page: read(page, page.read_text()) for page in PAGES}
SCRIPTS = [script for scripts, _ in READ.values() for script in scripts]
EXCERPTS = [excerpt for _, excerpts in READ.values() for excerpt in excerpts]


def test_every_block_is_read() -> None:
    for page in PAGES:
        text = page.read_text()
        assert len(re.findall(r"^ *```py", text, re.MULTILINE)) == len(BLOCK.findall(text)), page


def test_the_api_page_has_every_public_name() -> None:
    listed = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "reference" / "api.md").read_text(), re.MULTILINE)
    aliases = {"DDPHandle": "thinwire.DDPState"}
    for name in thinwire.__all__:
        found = getattr(thinwire, name)
        in_module = isinstance(found, type) and issubclass(found, Exception)  # the errors, all of them
        assert aliases.get(name, "thinwire.errors" if in_module else f"thinwire.{name}") in listed, name


def play(group: dist.ProcessGroup, blocks: Sequence[Block], port: int, folder: str) -> list[str]:
    """Run blocks as torchrun would a script, in `folder`; what each prints. The group stays for the blocks below."""
    os.environ |= {"RANK": str(group.rank()), "WORLD_SIZE": str(group.size())}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.chdir(folder)
    dist.destroy_process_group()
    names = {"__name__": "__main__"}
    printed = []
    with mock.patch.object(dist, "destroy_process_group"):
        for block in blocks:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(block.code, block.name, "exec"), names)
            printed.append(out.getvalue())
    return printed


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.blocks[0].name)
def test_a_script_runs_as_it_is_printed(ranks: RankPool, script: Script, tmp_path: Path) -> None:
    world = ranks(script.world)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    try:
        printed = world.run(play, script.blocks, port, str(tmp_path))[0]
    finally:
        world.close()  # these ranks have another group now, or none
    for block, out in zip(script.blocks, printed, strict=True):
        assert bool(out) == ("print(" in block.code or block.printed is not None), block.name
        assert block.printed in (None, out), block.name


@pytest.mark.parametrize(("example", "block"), EXCERPTS, ids=[example for example, _ in EXCERPTS])
def test_an_excerpt_stands_in_the_example_that_tests_run(example: str, block: str) -> None:
    lines, known = ({line.partition("  #")[0].strip() for line in text.splitlines()}
                    for text in (block, (ROOT / example).read_text()))  # fmt: skip
    assert lines <= known, f"not in {example}: {lines - known}"
