"""Bytes and results are what they were: see tests/golden.py."""

import json
import platform

import pytest

import golden
from ranks import RankPool

KEPT = json.loads(golden.FILE.read_text())


def test_codecs_write_what_they_wrote() -> None:
    assert dict(golden.wires()) == KEPT["wires"]


@pytest.mark.parametrize("world", golden.WORLDS)
@pytest.mark.parametrize("part", golden.PARTS)
def test_verbs_and_ddp_give_what_they_gave(ranks: RankPool, world: int, part: str, pytestconfig: pytest.Config) -> None:
    """A third of the codecs and runs in each world; all of them with --thorough."""
    kept = KEPT["worlds"][str(world)][part]
    found = golden.collect(ranks, world, part, pytestconfig.option.thorough)
    here = KEPT["machine"] == platform.machine() or part != "ddp"
    portable = [name for name in found if here or (world != 3 and name != "budget")]  # see golden.py
    differ = [name for name in portable if found[name] != kept.get(name)]
    assert not differ, f"{len(differ)} of {len(found)} differ: {differ[:20]}"
    missing = set(kept) - set(found) if pytestconfig.option.thorough else set()
    assert not missing, "there are other cases in the file: write it anew"
