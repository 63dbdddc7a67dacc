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
    if part == "ddp" and world == 3 and KEPT["machine"] != platform.machine():
        pytest.skip("means of three ranks may round differently on another kind of machine")
    found = golden.collect(ranks, world, part)
    differ = [name for name in kept if found.get(name) != kept[name]]
    assert not differ, f"{len(differ)} of {len(kept)} differ: {differ[:20]}"
    assert set(found) == set(kept), "there are other cases than in the file: write it anew"
