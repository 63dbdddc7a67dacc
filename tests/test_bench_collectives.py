"""The collectives benchmark: shaped links, ranks, the formulas, and whole runs of two ranks."""

import math
import multiprocessing
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from thinwire.codecs import codec
from thinwire.tools.bench import collectives as bench, link as links, record
from thinwire.tools.bench.collectives import CallSample, CollectiveCase
from thinwire.tools.cli.app import app
from thinwire.tools.report import kinds, tables

MBIT = links.parse("100mbit")
EVERYTHING = ",".join(bench.VERBS)


def a_case(
    verb: str = "all_reduce", world: int = 2, numel: int = 1000, names: tuple[str, ...] = ("int8",)
) -> CollectiveCase:
    return CollectiveCase(verb, world, None, numel, bench.entries(names, verb, world))


# --- links ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "rate"), [("1gbit", 1e9), ("100mbit", 1e8), (" 2.5Gbit ", 2.5e9), ("56kbit", 56e3)])
def test_rates(text: str, rate: float) -> None:
    found = links.parse(text)
    assert found.rate == rate
    assert str(found) == text.strip().lower()


@pytest.mark.parametrize("text", ["fast", "1", "1gb", "-1gbit", "0mbit", "1gbit 2gbit", ""])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(ValueError, match="expected a rate such as 100mbit or 1gbit, got"):
        links.parse(text)


def test_without_root_or_tools_the_message_says_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(links.shutil, "which", lambda name: None)
    result = CliRunner().invoke(app, ["bench", "collectives", "--link", "1gbit"])
    assert result.exit_code == 1
    assert "needs root (run it with sudo) and the command 'ip' (package iproute2) and the command 'tc'" in result.stderr
    assert "without --link the ranks talk over loopback" in result.stderr
    assert result.stdout == ""


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The commands that would make and remove a link, none of which is run."""
    made: list[str] = []
    monkeypatch.setattr(links, "check", lambda: None)
    monkeypatch.setattr(links, "_RUNTIME", tmp_path)
    monkeypatch.setattr(links, "_run", lambda *command, check=True: made.append(" ".join(command)))
    return made


def removed(commands: list[str]) -> set[str]:
    return {command.split()[-1] for command in commands if command.startswith("ip netns del")}


def added(commands: list[str]) -> set[str]:
    return {command.split()[-1] for command in commands if command.startswith("ip netns add")}


def test_hosts_are_removed_and_their_names_are_never_the_same(commands: list[str]) -> None:
    with links.hosts(2, MBIT) as first, links.hosts(2, MBIT) as second:
        assert not set(first) & set(second)
        assert removed(commands) == set()
    assert removed(commands) == added(commands) > {*first, *second}
    assert sum("tbf rate 100mbit burst 26250b" in command for command in commands) == 8  # both ends of four


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_and_sighup_remove_hosts_too(commands: list[str], number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_DFL)
    with pytest.raises(KeyboardInterrupt), links.hosts(2, MBIT):
        signal.raise_signal(number)
    assert removed(commands) == added(commands)
    assert signal.signal(number, before) is signal.SIG_DFL


def test_a_second_sigterm_does_not_stop_the_cleaning_up() -> None:
    before, done = signal.getsignal(signal.SIGTERM), []
    with links.sigterm_as_ctrl_c():
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            signal.raise_signal(signal.SIGTERM)
            done.append("written")
    assert done == ["written"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_link_that_cannot_be_made_leaves_nothing(commands: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: Any) -> None:
        raise links.LinkError("no sch_tbf")

    monkeypatch.setattr(links, "_shape", refused)
    with pytest.raises(links.LinkError, match="no sch_tbf"), links.hosts(3, MBIT):
        pytest.fail("it was refused")
    assert removed(commands) >= added(commands)


def test_a_failed_command_is_named() -> None:
    with pytest.raises(links.LinkError, match=r"`sh -c echo no veth >&2; exit 2` failed: no veth; network namespaces"):
        links._run("sh", "-c", "echo no veth >&2; exit 2")


# --- formulas ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "algorithm", "world", "wires"),
    [
        ("all_reduce", "two_phase", 4, 1.5),
        ("all_reduce", "one_shot", 4, 3),
        ("all_reduce", "one_shot", 2, 1),
        ("reduce_scatter_tensor", "compressed", 4, 0.75),
        ("all_gather_into_tensor", "compressed", 2, 0.5),
        ("all_to_all_single", "compressed", 4, 0.75),
        ("broadcast", "compressed", 4, 1),
    ],
)
def test_bytes_formula(verb: str, algorithm: str, world: int, wires: float) -> None:
    int8 = codec("int8")
    assert bench.bytes_formula(verb, algorithm, world, int8, 1280) == wires * int8.wire_bytes(1280)
    if algorithm != "one_shot":
        assert bench.bytes_formula(verb, "plain", world, int8, 1280) == wires * 4 * 1280


def test_codecs_always_compress() -> None:
    def found(*arguments: Any) -> list[tuple[str, str, str]]:
        return [(e.name, str(e.codec), e.algorithm) for e in bench.entries(["int4", "auto", "plain"], *arguments)]

    beside = [("auto", "int8", "auto"), ("plain", "none", "plain")]
    assert found("all_reduce", 2) == [("int4", "int4", "one_shot"), *beside]
    assert found("all_reduce", 4) == [("int4", "int4", "two_phase"), *beside]
    assert found("broadcast", 4) == [("int4", "int4", "compressed"), *beside]


def test_sizes() -> None:
    assert bench.default_numel(None, False) == bench.default_numel(links.parse("1gbit"), False) == 25_000_000
    assert bench.default_numel(MBIT, False) == 8_000_000
    assert bench.default_numel(MBIT, True) == bench.QUICK_NUMEL
    assert bench.divisible("all_reduce", 3, 1000) == 1000
    assert bench.divisible("all_to_all_single", 3, 1000) == 999
    assert bench.divisible("reduce_scatter_tensor", 4, 1) == 4


@pytest.mark.parametrize("verb", bench.VERBS)
def test_the_exact_result_is_what_the_verb_means(verb: str) -> None:
    case = a_case(verb, world=3, numel=12)
    given = [bench.inputs(rank, case).double() for rank in range(3)]
    for rank in range(3):
        part = slice(4 * rank, 4 * rank + 4)
        expected = {
            "all_reduce": lambda: given[0] + given[1] + given[2],
            "reduce_scatter_tensor": lambda part=part: (given[0] + given[1] + given[2])[part],
            "all_gather_into_tensor": lambda: torch.cat(given),
            "all_to_all_single": lambda part=part: torch.cat([x[part] for x in given]),
            "broadcast": lambda: given[0],
        }[verb]()
        assert torch.equal(bench.exact(rank, case), expected)
        assert len(expected) == bench.output_numel(case)


KEY = "int8 one_shot"  # of the entry


def samples(ms: float, digest: str = "a") -> CallSample:
    sent = 100 if ms else 0
    return CallSample([ms, 3 * ms, 2 * ms], [1.0] * 3, [110] * 3, [sent] * 3, 4e-4, digest, True, "two_phase")


def test_a_row_is_of_the_slowest_rank_and_the_one_that_sends_most() -> None:
    parts = [{"torch fp32": samples(8), "torch bf16": samples(4), KEY: samples(1), "nothing": samples(0)}
             for _ in range(2)]  # fmt: skip
    parts[1][KEY] = CallSample([5, 1, 1], [3.0] * 3, [310] * 3, [300] * 3, 9e-4, "b", True, "two_phase")
    (row,) = bench.rows_of(a_case(), parts)
    assert set(row) >= set(record.COLUMNS["collectives"])
    assert (row["ms_p50"], row["plain_ms"], row["bf16_ms"]) == (3, 16, 8)  # rounds take 5, 3 and 2
    assert row["speedup_plain"] == pytest.approx(16 / 3)
    assert (row["bytes_per_rank"], row["wire_limit_share"]) == (300, None)
    assert (row["cpu_ms_per_rank"], row["rel_error"]) == (2, math.sqrt(9e-4))
    assert row["identical"] is False
    shaped = CollectiveCase("all_reduce", 2, MBIT, 1000, bench.entries(["int8"], "all_reduce", 2))
    (row,) = bench.rows_of(shaped, parts)
    assert row["bytes_per_rank"] == 310 - 110  # what the barrier sends is not the call's
    assert row["wire_limit_share"] == pytest.approx(8 * codec("int8").wire_bytes(1000) / 1e8 / 3e-3)


# --- whole runs -------------------------------------------------------------------------------------------------------


SMALL = ["--quick", "--world", "2", "--numel", "20000", "--rounds", "2", "--codecs", "int8,auto,plain"]


@pytest.mark.usefixtures("forked")
def test_a_quick_run_over_loopback(tmp_path: Path) -> None:
    path = str(tmp_path / "found.json")
    run = CliRunner().invoke(app, ["bench", "collectives", *SMALL, "--verbs", EVERYTHING, "--json", path])
    assert (run.exit_code, run.stderr) == (0, ""), run.output
    assert multiprocessing.active_children() == []
    found = record.read(path)
    assert found.conditions["threads"] == 1
    assert [(row["verb"], row["codec"]) for row in found.rows] == [
        (verb, name) for verb in bench.VERBS for name in ("int8", "auto", "plain")
    ]
    for row in found.rows:
        assert row["identical"] is True, row
        assert row["link"] == "loopback"
        assert row["rounds"] == 2
        assert 0 < float(str(row["ms_p20"])) <= float(str(row["ms_p50"])) <= float(str(row["ms_p80"]))
        assert (row["codec"] == "auto") == row["auto"]
        assert row["algorithm"] in ("two_phase", "one_shot", "compressed", "plain")
        compressed = row["algorithm"] != "plain"
        # Two quantisations of half a step, with a step of at most 2/254 of a block's largest, which is below 6 sigma.
        assert float(str(row["rel_error"])) < (6 * 2 / 254 if compressed else 1e-6), row
        assert row["bytes_sent"] is not None or not compressed
    table = kinds.grids(found)[0]
    assert table.header[:3] == ["verb", "codec", "algorithm"]
    assert [cells[-1] for cells in table.rows] == ["yes"] * 15
    assert "| all_reduce | int8 | one_shot | 2 | loopback | 20000 |" in tables.markdown(found)


def shapes_links() -> bool:
    try:
        with links.hosts(1, MBIT):
            return True
    except links.LinkError:
        return False


@pytest.mark.usefixtures("forked")
def test_a_shaped_link_counts_bytes_and_ctrl_c_leaves_nothing() -> None:
    if not shapes_links():
        pytest.skip("links cannot be shaped here: not root, or no ip and tc, or no tbf")

    def interrupted(cases: Any) -> Iterator[Any]:
        yield cases[0]
        signal.raise_signal(signal.SIGINT)
        yield cases[1]

    with pytest.raises(record.Interrupted) as stop:
        bench.run([2], MBIT, [250_000, 8_000_000], codecs=["int8"], rounds=3, progress=interrupted)
    (row,) = stop.value.record.rows
    payload, counted = float(str(row["bytes_formula"])), float(str(row["bytes_per_rank"]))
    assert payload <= float(str(row["bytes_sent"])) < counted
    assert counted < payload * (1 + 2 * 66 / 1448) + 10_000  # a header and an acknowledgement a segment; retries
    assert 0.1 < float(str(row["wire_limit_share"])) < 1 + 2 * 26250 / payload  # bursts of both ends fly free
    assert row["identical"] is True
    assert multiprocessing.active_children() == []
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"tw{os.getpid()}n" not in listed


def make_and_die(pipe: Connection) -> None:
    """A process that is killed when it has two hosts with a delay between them, and something that runs on one."""
    with links.hosts(2, links.parse("20mbit+50ms")) as names:
        subprocess.Popen(["ip", "netns", "exec", names[0], "sleep", "600"])
        switch = names[0].removesuffix("r0") + "sw"
        found = [links._run("ip", "netns", "pids", name) for name in (switch, names[0])]
        while not all(found):  # they have yet to enter
            found = [links._run("ip", "netns", "pids", name) for name in (switch, names[0])]
        pipe.send((switch, names, *map(int, found)))
        os.kill(os.getpid(), signal.SIGKILL)


def ends(pid: int) -> bool:
    for _ in range(1000):
        if not links.is_running(pid):
            return True
        time.sleep(0.01)
    return False


@pytest.mark.usefixtures("forked")
def test_what_a_killed_process_left_is_removed_at_the_next_start() -> None:
    if not shapes_links():
        pytest.skip("links cannot be shaped here: not root, or no ip and tc, or no tbf")
    interfaces = socket.if_nameindex()
    near, far = multiprocessing.Pipe()
    process = multiprocessing.get_context("forkserver").Process(target=make_and_die, args=(far,))
    process.start()
    far.close()
    switch, names, delaying, sleeping = near.recv()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert {switch, *names} <= set(os.listdir("/run/netns"))
    assert ends(delaying)  # by itself
    assert links.is_running(sleeping)
    with links.hosts(1, MBIT) as kept, links.hosts(1, MBIT):
        now = os.listdir("/run/netns")
    assert kept[0] in now
    assert not {switch, *names} & set(now)
    assert ends(sleeping)
    assert socket.if_nameindex() == interfaces


def test_what_is_in_use_is_not_removed() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    gone = [f"tw{ended.pid}n0sw", f"tw{ended.pid}n3r12", f"tw{os.getpid()}n999r0"]
    assert links.left([*gone, "tw1n0sw", "twelve", "tw5", f"x{gone[0]}"]) == gone


# --- nodes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "world", "link", "codecs", "verbs", "told"),
    [
        (None, 4, MBIT, ["int8/lloyd4"], ["all_reduce"], "say how many nodes"),
        (2, 4, MBIT, ["int8/int8/int8"], ["all_reduce"], "expected pairs of codecs"),
        (2, 4, MBIT, ["int8/int8"], ["all_reduce", "broadcast"], "only all_reduce takes one"),
        (3, 4, MBIT, ["int8"], ["all_reduce"], "4 ranks do not make 3 nodes"),
        (4, 4, MBIT, ["int8"], ["all_reduce"], "4 ranks do not make 4 nodes"),
        (1, 4, MBIT, ["int8"], ["all_reduce"], "4 ranks do not make 1 nodes"),
        (2, 4, None, ["int8"], ["all_reduce"], "what their link carries: name one"),
    ],
)
def test_nodes_that_cannot_be_are_refused(
    nodes: int | None, world: int, link: links.ShapedLink | None, codecs: list[str], verbs: list[str], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        bench.run([world], link, codecs=codecs, verbs=verbs, nodes=nodes)


@pytest.mark.parametrize(("world", "nodes"), [(4, 2), (6, 3), (6, 2), (64, 8)])
def test_bytes_across_are_those_of_messages_that_leave_a_node(world: int, nodes: int) -> None:
    """Counted message by message; a wire of N floats in int8 takes as many bytes as W of N / W, but for headers."""
    size, int8, numel = world // nodes, codec("int8"), 1 << 20
    wire = int8.wire_bytes(numel)
    node_of = [rank // size for rank in range(world)]
    leaving = sum(node_of[a] == 0 != node_of[b] for a in range(world) for b in range(world))
    assert bench.bytes_across("one_shot", world, nodes, int8, numel) == leaving * wire
    assert bench.bytes_across("two_phase", world, nodes, int8, numel) == pytest.approx(2 * leaving * wire / world)
    outer = (nodes - 1) * wire if nodes == 2 else 2 * (nodes - 1) / nodes * wire
    assert bench.bytes_across("hierarchical", world, nodes, int8, numel) == pytest.approx(outer)
    around = sum(node_of[rank] == 0 != node_of[(rank + 1) % world] for rank in range(world))
    assert bench.bytes_across("plain", world, nodes, int8, numel) == around * 2 * (world - 1) / world * 4 * numel


def test_a_link_with_a_delay() -> None:
    link = links.parse("20mbit+50ms")
    assert (link.rate, link.delay, str(link), MBIT.delay) == (2e7, 0.05, "20mbit+50ms", 0)
    lossy = links.parse("20mbit+50ms+1.5%")
    assert (lossy.rate, lossy.delay, lossy.lost, link.lost) == (2e7, 0.05, 0.015, 0)
    for text in ("10gbit+50ms", "1gbit+50ms+1%", "20mbit+1%", "20mbit+5ms+100%", "20mbit+", "20mbit+50", "+50ms"):
        with pytest.raises(record.BenchError, match="expected a rate"):
            links.parse(text)
    if not shapes_links():
        pytest.skip("links cannot be shaped here: not root, or no ip and tc, or no tbf")
    for shaped, most in ((link, 2), (links.parse("20mbit+50ms+5%"), 20)):
        with links.hosts(2, shaped) as names, ThreadPoolExecutor(2) as threads:
            listening = threading.Event()
            answered = threads.submit(answer, names[1], listening)
            took, payload = threads.submit(ask, names[0], listening).result(timeout=20), answered.result(timeout=20)
            resent = threads.submit(retransmitted, names[0]).result(timeout=20)
        assert payload == 100_000
        assert 0.2 <= took < most  # there and back to connect, there with the last byte, back with the answer
        assert (resent > 0) == (shaped.lost > 0)


def retransmitted(host: str) -> int:
    """Segments that TCP has sent again from a host."""
    links.enter(host)
    heads, values = (
        line.split() for line in Path("/proc/thread-self/net/snmp").read_text().splitlines() if "Tcp" in line
    )
    return int(values[heads.index("RetransSegs")])


def answer(host: str, listening: threading.Event) -> int:
    """Read until the other has no more, and answer with one byte."""
    links.enter(host)
    with socket.create_server(("10.77.0.2", 5000)) as server:
        listening.set()
        connection, _ = server.accept()
        with connection:
            found = sum(len(part) for part in iter(lambda: connection.recv(1 << 16), b""))
            connection.send(b"!")
            return found


def ask(host: str, listening: threading.Event) -> float:
    links.enter(host)
    listening.wait(10)
    begun = time.monotonic()
    with socket.create_connection(("10.77.0.2", 5000), timeout=10) as connection:
        connection.sendall(bytes(100_000))
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b"!"
    return time.monotonic() - begun


@pytest.mark.usefixtures("forked")
def test_ranks_of_a_node_share_its_link() -> None:
    if not shapes_links():
        pytest.skip("links cannot be shaped here: not root, or no ip and tc, or no tbf")
    found = bench.run([4], MBIT, [250_000], codecs=["int8", "int8/int8"], rounds=2, nodes=2)
    flat, nested = found.rows
    assert (flat["codec"], flat["algorithm"], flat["nodes"]) == ("int8", "two_phase", 2)
    assert (nested["codec"], nested["algorithm"], nested["nodes"]) == ("int8/int8", "hierarchical", 2)
    for row in found.rows:
        payload, counted = float(str(row["bytes_formula"])), float(str(row["bytes_per_rank"]))
        assert payload < counted < payload * (1 + 2 * 66 / 1448) + 20_000
        assert row["identical"] is True
    assert float(str(nested["bytes_formula"])) == pytest.approx(0.5 * float(str(flat["bytes_formula"])), rel=0.01)
