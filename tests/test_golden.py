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
def test_verbs_and_ddp_give_what_they_gave(ranks: RankPool, world: int, part: str) -> None:
    kept = KEPT["worlds"][str(world)][part]
    found = golden.collect(ranks, world, part)
    here = KEPT["machine"] == platform.machine() or part != "ddp"
    portable = [name for name in kept if here or (world != 3 and name != "budget")]  # see golden.py
    differ = [name for name in portable if found.get(name) != kept[name]]
    assert not differ, f"{len(differ)} of {len(kept)} differ: {differ[:20]}"
    assert set(found) == set(kept), "there are other cases than in the file: write it anew"
