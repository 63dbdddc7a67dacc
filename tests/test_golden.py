"""Bytes and results are what they were: see tests/golden.py."""

import json
import platform

import golden
from ranks import RankPool


def test_codecs_write_what_they_wrote() -> None:
    kept = json.loads(golden.FILE.read_text())["wires"]
    assert dict(golden.wires()) == kept


def test_verbs_and_ddp_give_what_they_gave(ranks: RankPool) -> None:
    kept = json.loads(golden.FILE.read_text())
    found = golden.collect(ranks)
    same_machine = kept["machine"] == platform.machine()
    for world, hashes in kept["worlds"].items():
        portable = {name for name in hashes if same_machine or world != "3" or not name.startswith("ddp ")}
        now = found["worlds"][world]
        differ = [name for name in sorted(portable) if now.get(name) != hashes[name]]
        assert not differ, f"world {world}: {len(differ)} of {len(portable)} differ: {differ[:20]}"
        assert set(now) == set(hashes), f"world {world} has other cases than the file: write it anew"
