"""`thinwire doctor --peers`: under torchrun, and between ranks that differ, are missing, or cannot exchange."""

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import thinwire
from programs import Ended
from ranks import RankPool
from thinwire.errors import ThinwireError
from thinwire.tools.cli import peers
from thinwire.tools.cli.app import app
from thinwire.tools.local import torchrun
from thinwire.tools.local.torchrun import RankPlace

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "thinwire", "doctor")
ROOT = Path(__file__).parent.parent
CARD = {"host": "a", "interface": "eth0", "backend": "gloo", "world": 2, "torch": "2.13.0"}


@pytest.mark.program(*TORCHRUN, "--peers", OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
def test_under_torchrun_rank_0_prints_one_table(program: Ended) -> None:
    assert program.status == 0, program.told
    title, header, *rows, verdict = program.out.splitlines()
    assert title.startswith("2 of 2 ranks.")
    assert " ".join(header.split()) == "rank host interface device thinwire torch python wire Gbit/s"
    for page in ("clusters", "two-machines"):
        shown = (ROOT / "docs" / "start" / f"{page}.md").read_text()
        assert header.split() in map(str.split, shown.splitlines()), page
    for rank, row in enumerate(rows):
        assert re.match(rf"{rank} +\S+ +lo +cpu +{re.escape(thinwire.__version__)} ", row), row
        assert 0.01 < float(row.split()[-1]) < 1000  # loopback: between a slow disk's rate and memory's
    assert (len(rows), verdict) == (2, "✓ all ranks see each other and agree")


def doctor(group: dist.ProcessGroup, absent: int, patches: dict[int, tuple[str, Any]], *flags: str) -> Any:
    """The command on every rank but the one that is absent, as if started by hand; patches: by rank, what differs."""
    rank, port = group.rank(), [free_port()]
    dist.broadcast_object_list(port, src=0)
    with pytest.MonkeyPatch.context() as patch:
        values = {"RANK": rank, "WORLD_SIZE": group.size(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port[0]}
        for name, value in values.items():
            patch.setenv(name, str(value))
        if rank in patches:
            patch.setattr(*patches[rank])
        result = None if rank == absent else CliRunner().invoke(app, ["doctor", "--peers", *flags])
    return result and (result.exit_code, result.stdout, result.stderr)


def free_port() -> int:
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return int(asked.getsockname()[1])


NOBODY = -1


def test_three_ranks_as_json(ranks: RankPool) -> None:
    (status, out, _), *others = ranks(3).run(doctor, NOBODY, {}, "--json")
    assert (status, others) == (0, [(0, "", "")] * 2)
    found = json.loads(out)
    assert (found["works"], found["world"], found["problems"]) == (True, 3, [])
    assert [rank["rank"] for rank in found["ranks"] if rank["gbit_per_s"] > 0.01] == [0, 1, 2]


def test_ranks_of_different_versions(ranks: RankPool) -> None:
    patches = {1: ("thinwire.__version__", "9.9"), 2: ("thinwire.wire.VERSION", 7)}
    (status, out, _), *others = ranks(3).run(doctor, NOBODY, patches)
    assert (status, others) == (1, [(1, "", "")] * 2)
    title, *_, version, wire = out.splitlines()
    assert title.startswith("3 of 3 ranks.")
    assert version.startswith(
        f"✗ thinwire differs: {thinwire.__version__} on ranks 0, 2; 9.9 on rank 1. Install the same"
    )
    assert wire.startswith("✗ the wire format differs: 1 on ranks 0, 1; 7 on rank 2. Install the same")


def test_a_missing_rank_is_named(ranks: RankPool) -> None:
    (status, out, _), other, absent = ranks(3).run(doctor, 2, {}, "--timeout", "1.5")
    assert (status, other, absent) == (1, (1, "", ""), None)
    assert out.splitlines()[0].startswith("2 of 3 ranks.")
    told = r"✗ rank 2 of 3 did not come within 1.5 s: start every rank, and let each reach 127.0.0.1:\d+"
    assert re.fullmatch(told, out.splitlines()[-1])


def test_without_rank_0_the_others_say_so(ranks: RankPool) -> None:
    _, (status, out, err) = ranks(2).run(doctor, 0, {}, "--timeout", "1")
    assert (status, out) == (1, "")
    assert "Error: rank 1 did not reach 127.0.0.1:" in err
    assert "start rank 0 there" in err


def refuse(size: int, device: object) -> Any:
    raise RuntimeError("[/somewhere/gloo/pair.cc:152] timed out connecting\nand more")


def test_an_exchange_that_fails(ranks: RankPool) -> None:
    patch = ("thinwire.tools.local.torchrun.exchange_s", refuse)
    (status, out, _), (other, _, err) = ranks(2).run(doctor, NOBODY, {0: patch, 1: patch})
    assert (status, other) == (1, 1)
    assert out.splitlines()[-1].startswith("✗ rank 0 could not exchange: timed out connecting; see whether the")
    assert err.startswith("Error: rank 1 could not exchange: timed out connecting; see whether the")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"torch": "2.12.0"}, ["torch differs: 2.13.0 on rank 0; 2.12.0 on rank 1. Install the same everywhere"]),
        ({"python": "3.12"}, ["python differs: ? on rank 0; 3.12 on rank 1. Install the same everywhere"]),
        ({"world": 3}, ["WORLD_SIZE differs: 2 on rank 0; 3 on rank 1. Start all ranks with the same number"]),
    ],
)
def test_what_ranks_have_to_agree_on(changes: dict[str, Any], said: list[str]) -> None:
    assert peers.disagreements({0: CARD, 1: {**CARD, "host": "b", **changes}}) == said


def test_loopback_between_machines_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")  # where a distribution has it so
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    trapped = {**CARD, "host": "b", "interface": peers.interface_of("gloo")}
    (told,) = peers.unreachable({0: CARD, 1: trapped})
    assert told.startswith("rank 1 on b uses 127.0.1.1, which no other machine reaches: set GLOO_SOCKET_IFNAME there")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    first = {**CARD, "interface": peers.interface_of("gloo")}
    assert len(peers.unreachable({0: first, 1: {**CARD, "host": "b"}})) == 1
    assert peers.unreachable({0: first, 1: first}) == []


NO_RANK = "RANK must be a whole number, 0 .. 1, got"


@pytest.mark.parametrize(
    ("flags", "place", "said"),
    [
        (["--peers"], (), "run it on every machine as `torchrun --nnodes 2 --node-rank 0"),
        (["--timeout", "3"], (), "--timeout: goes with --peers"),
        (["--peers"], ("first", "2"), f"{NO_RANK} 'first'"),
        (["--peers"], ("2", "2"), f"{NO_RANK} '2'"),
        (["--peers"], ("0", "two"), "WORLD_SIZE must be a whole number, 1 or more, got 'two'"),
    ],
)
def test_misuse_is_refused(flags: list[str], place: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    for name, value in zip(torchrun.ENVIRONMENT, (*place, "localhost", "1") if place else (), strict=False):
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, ["doctor", *flags])
    assert (result.exit_code, said in " ".join(result.stderr.split())) == (2, True)


def test_ranks_that_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(backend: str, timeout: None) -> None:
        raise ValueError(f"no {backend} here")

    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", fail)
    with pytest.raises(ThinwireError, match=r"the ranks did not find each other .no gloo here.; start them all with"):
        torchrun.job(torch.device("cpu")).__enter__()
    for address, port, place, said in (
        ("127.0.0.1", "first", RankPlace(0, 1, 0, 1), "MASTER_PORT must be a number such as 29500, got 'first'"),
        ("localhost", str(free_port()), RankPlace(1, 2, 0, 1), "1 did not reach localhost:.* has --master-addr and"),
    ):
        monkeypatch.setenv("MASTER_ADDR", address)
        monkeypatch.setenv("MASTER_PORT", port)
        with pytest.raises(ThinwireError, match=said):
            peers.meet(place, 0.1)
