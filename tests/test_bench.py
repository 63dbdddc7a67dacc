"""Benchmarks: records, shaped links, ranks, and whole runs of link, collectives and step."""

import json
import math
import multiprocessing
import os
import signal
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from benchmarks import kinds
from cases import on_ranks
from ranks import RankPool
from thinwire.codecs import codec
from thinwire.errors import CodecError
from thinwire.tools.bench import collectives, exchange, models, record, step, timing
from thinwire.tools.bench.collectives import CallSample, CollectiveCase
from thinwire.tools.cli.app import app
from thinwire.tools.local import link as links
from thinwire.tools.local.launch import RankSetup
from thinwire.tools.local.torchrun import RankPlace

MBIT = links.parse("100mbit")
CODEC_ROW: record.Row = {
    **{"distribution": "gaussian", "codec": "int8", "wire_bits": 8.125},
    **{"nmse": 4.2e-5, "db_above_rd": 5.1, "lloyd_max_nmse": None},
}


def a_record(**changes: Any) -> record.Record:
    return replace(record.Record("codec", record.conditions(timing.CPU), [CODEC_ROW]), **changes)


def bench(*flags: str) -> Any:
    return CliRunner().invoke(app, ["bench", *flags], prog_name="thinwire")


def test_the_columns_scripts_rely_on() -> None:
    names = {"codec", "kernels", "collectives", "train", "loss", "exact", "qat", "group", "link", "soak"}
    assert (set(record.COLUMNS), set(record.COLUMNS["codec"])) == (names, set(CODEC_ROW))
    kernels = "op codec backend device dtype numel world threads ms_p50 ms_p20 ms_p80 copy_ms times_copy copy_share"
    assert set(record.COLUMNS["kernels"]) == {*kernels.split(), "times_eager"}
    for path in sorted((Path(__file__).parent.parent / "benchmarks").glob("qat_*.json")):
        rows = record.read(str(path)).rows
        assert all(set(row) >= set(kinds.QAT_SPEED if row.get("op") else kinds.QAT) for row in rows)


def test_a_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = str(tmp_path / "record.json")
    for written in (a_record(rows=[CODEC_ROW, {**CODEC_ROW, "extra": "é"}]), a_record(rows=[])):
        record.write(written, path)
        assert record.read(path) == written
    text = record.dumps(a_record(rows=[{**CODEC_ROW, "nmse": math.nan, "db_above_rd": math.inf}]))
    row = json.loads(text, parse_constant=pytest.fail)["rows"][0]
    assert (row["nmse"], row["db_above_rd"]) == (None, None)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"schema": 2}, "expected a record of schema 1, got 2"),
    ({"kind": None}, "expected 'kind' to be a str"),
    ({"rows": {}}, "expected 'rows' to be a list"),
    ({"rows": [3]}, "row 0 is a int"),
    ({"rows": [CODEC_ROW, {"codec": "int8"}]}, "row 1 of this codec record lacks distribution, wire_bits"),
    ({"rows": [{**CODEC_ROW, "nmse": [1]}]}, "row 0: expected one value in nmse, got several"),
    ({"conditions": {"date": ""}}, "the conditions lack thinwire, torch"),
]


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    for change, complaint in WRONG:
        text = json.dumps({**json.loads(record.dumps(a_record())), **change})
        with pytest.raises(record.RecordError, match=complaint):
            record.loads(text)
    for text in ("codec", "[" * 100_000, "9" * 6000, '{"schema": ' + "9" * 6000 + "}"):
        with pytest.raises(record.RecordError, match="not JSON"):
            record.loads(text)
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(record.RecordError, match=r"list\.json: expected a record of schema 1, got 'list'"):
        record.read(str(tmp_path / "list.json"))
    with pytest.raises(record.RecordError, match="No such file"):
        record.read(str(tmp_path / "absent.json"))


def test_conditions_are_complete_and_name_no_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--codecs", "lloyd4/int8,int8/int8", "--codecs=int8/none", "--json=/home/a.json", "--json", "b/c d.json"]
    shown = "--codecs lloyd4/int8,int8/int8 --codecs=int8/none --json=a.json --json 'c d.json'"
    monkeypatch.setattr("sys.argv", ["/home/me/bin/thinwire", "bench", *flags])
    found = record.conditions(timing.CPU)
    assert tuple(found) == record.CONDITIONS
    assert (found["command"], found["device"], bool(found["cpu"])) == (f"thinwire bench {shown}", "cpu", True)
    monkeypatch.setattr("sys.argv", ["/home/me/thinwire/benchmarks/train.py", *flags])
    assert record.conditions(timing.CPU)["command"] == f"python -m benchmarks.train {shown}"


def test_rates() -> None:
    for text, rate in (("1gbit", 1e9), (" 2.5Gbit ", 2.5e9), ("56kbit", 56e3)):
        assert (links.parse(text).rate, str(links.parse(text))) == (rate, text.strip().lower())
    for text in ("fast", "1", "1gb", "-1gbit", "0mbit", "1gbit 2gbit", "", "20mbit+50ms"):
        with pytest.raises(links.BenchError, match="expected a rate such as 100mbit or 1gbit, got"):
            links.parse(text)


def test_without_root_or_tools_the_message_says_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(links.shutil, "which", lambda name: None)
    result = bench("collectives", "--link", "1gbit")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "needs root (run it with sudo) and the command 'ip' (package iproute2) and the command 'tc'" in result.stderr
    assert "without --link the ranks talk over loopback" in result.stderr


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The commands that would make and remove a link, none of which is run."""
    made: list[str] = []
    monkeypatch.setattr(links, "check", lambda: None)
    monkeypatch.setattr(links, "_RUNTIME", tmp_path)
    monkeypatch.setattr(links, "_run", lambda *command, check=True: made.append(" ".join(command)))
    return made


def named(commands: list[str], verb: str) -> set[str]:
    return {command.split()[-1] for command in commands if command.startswith(f"ip netns {verb}")}


def test_hosts_are_removed_and_their_names_are_never_the_same(commands: list[str]) -> None:
    with links.hosts(2, MBIT) as first, links.hosts(2, MBIT) as second:
        assert not set(first) & set(second)
        assert named(commands, "del") == set()
    assert named(commands, "del") == named(commands, "add") > {*first, *second}
    assert sum("tbf rate 100mbit burst 26250b" in command for command in commands) == 8  # both ends of four


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_and_sighup_remove_hosts_too(commands: list[str], number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_DFL)
    with pytest.raises(KeyboardInterrupt), links.hosts(2, MBIT):
        signal.raise_signal(number)
    assert named(commands, "del") == named(commands, "add")
    assert signal.signal(number, before) is signal.SIG_DFL


def test_a_link_that_cannot_be_made_leaves_nothing(commands: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: Any) -> None:
        raise links.LinkError("no sch_tbf")

    monkeypatch.setattr(links, "_shape", refused)
    with pytest.raises(links.LinkError, match="no sch_tbf"), links.hosts(3, MBIT):
        pytest.fail("it was refused")
    assert named(commands, "del") >= named(commands, "add")


def test_a_failed_command_is_named() -> None:
    with pytest.raises(links.LinkError, match=r"`sh -c echo no veth >&2; exit 2` failed: no veth; network namespaces"):
        links._run("sh", "-c", "echo no veth >&2; exit 2")


@pytest.mark.parametrize(
    ("algorithm", "world", "wires"), [("two_phase", 4, 1.5), ("one_shot", 4, 3), ("one_shot", 2, 1), ("plain", 2, 1)]
)
def test_bytes_formula(algorithm: str, world: int, wires: float) -> None:
    nbytes = 4 * 1280 if algorithm == "plain" else codec("int8").wire_bytes(1280)
    assert collectives.bytes_formula(algorithm, world, codec("int8"), 1280) == wires * nbytes


def a_case(link: Any = None) -> CollectiveCase:
    return CollectiveCase(RankSetup(world=2, link=link), 1000, tuple(collectives.entries(["int8"], 2)))


KEY = "int8 one_shot"  # of the entry


def samples(ms: float, digest: str = "a") -> CallSample:
    times, sent = [ms, 3 * ms, 2 * ms], 100 if ms else 0
    return CallSample(times, [1.0] * 3, [110] * 3, [sent] * 3, 4e-4, digest, "two_phase", host_ms=times)


def test_a_row_is_of_the_slowest_rank_and_the_one_that_sends_most() -> None:
    parts = [{"torch fp32": samples(8), "torch bf16": samples(4), KEY: samples(1), "nothing": samples(0)}
             for _ in range(2)]  # fmt: skip
    times = [5.0, 1.0, 1.0]
    parts[1][KEY] = CallSample(times, [3.0] * 3, [310] * 3, [300] * 3, 9e-4, "b", "two_phase", host_ms=times)
    (row,) = collectives.rows_of(a_case(), parts)
    assert set(row) >= set(record.COLUMNS["collectives"])
    assert (row["ms_p50"], row["plain_ms"], row["bf16_ms"]) == (3, 16, 8)  # rounds take 5, 3 and 2
    assert row["speedup_plain"] == pytest.approx(16 / 3)
    assert (row["bytes_per_rank"], row["wire_limit_share"]) == (300, None)
    assert (row["cpu_ms_per_rank"], row["rel_error"]) == (2, math.sqrt(9e-4))
    assert row["identical"] is False
    (row,) = collectives.rows_of(a_case(link=MBIT), parts)
    assert row["bytes_per_rank"] == 310 - 110  # what the barrier sends is not the call's
    wires = collectives.bytes_formula("two_phase", 2, codec("int8"), 1000)
    assert row["wire_limit_share"] == pytest.approx(8 * wires / 1e8 / 3e-3)


@pytest.mark.usefixtures("forked")
def test_a_quick_run(tmp_path: Path) -> None:
    path = str(tmp_path / "found.json")
    small = ["--quick", "--world", "2", "--numel", "20000", "--rounds", "2", "--codecs", "int8,auto,plain"]
    run = bench("collectives", *small, "--json", path)
    assert (run.exit_code, run.stderr) == (0, ""), run.output
    assert multiprocessing.active_children() == []
    found = record.read(path)
    assert [(row["verb"], row["codec"]) for row in found.rows] == [("all_reduce", c) for c in ("int8", "auto", "plain")]
    for row in found.rows:
        assert (row["identical"], row["link"], row["rounds"]) == (True, "loopback", 2), row
        assert 0 < float(str(row["ms_p20"])) <= float(str(row["ms_p50"])) <= float(str(row["ms_p80"]))
        exact = row["algorithm"] == "plain" or row["rel_error"] == 0.0
        # Two quantizations of half a step, with a step of at most 2/254 of a block's largest, which is below 6 sigma.
        assert float(str(row["rel_error"])) < (1e-6 if exact else 6 * 2 / 254), row
        assert row["bytes_per_rank"] is not None or row["codec"] != "int8"


@pytest.mark.usefixtures("forked")
def test_a_shaped_link_counts_bytes_and_ctrl_c_leaves_nothing() -> None:
    try:
        with links.hosts(1, MBIT):
            pass
    except links.LinkError:
        pytest.skip("links cannot be shaped here: not root, or no ip and tc, or no tbf")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it

    def interrupted(cases: Any) -> Iterator[Any]:
        yield cases[0]
        signal.raise_signal(signal.SIGINT)
        yield cases[1]

    how: dict[str, Any] = {"numels": [250_000, 8_000_000], "codecs": ["int8"], "rounds": 3}
    with pytest.raises(record.Interrupted) as stop:
        collectives.run([RankSetup(world=2, link=MBIT)], progress=interrupted, **how)
    (row,) = stop.value.record.rows
    payload, counted = float(str(row["bytes_formula"])), float(str(row["bytes_per_rank"]))
    # A header and an acknowledgement per segment; retries.
    assert payload < counted < payload * (1 + 2 * 66 / 1448) + 10_000
    assert 0.1 < float(str(row["wire_limit_share"])) < 1 + 2 * 26250 / payload  # bursts of both ends fly free
    assert row["identical"] is True
    assert multiprocessing.active_children() == []
    assert f"tw{os.getpid()}n" not in links._run("ip", "netns", "list")


def test_a_rate_is_that_of_the_slowest_rank() -> None:
    row = exchange.row_of([[1e-3, 3e-3, 2e-3], [2e-3, 1e-3, 1e-3]], 1 << 20, "1gbit", "gloo")
    assert (row["world"], row["nbytes"], row["ms_p50"]) == (2, 1 << 20, 2)
    assert row["gbit_per_s"] == pytest.approx(8e-9 * (1 << 20) / 2e-3)


@on_ranks(3)
def test_the_ranks_of_a_job_measure_their_link(group: dist.ProcessGroup) -> list[float]:
    """All ranks know the slowest one's times."""
    place = RankPlace(group.rank(), group.size(), 0, group.size())
    rows = exchange.run([RankSetup(world=group.size(), place=place)], [1000, 2000]).rows
    assert group.rank() or [(row["world"], row["nbytes"]) for row in rows] == [(3, 1000), (3, 2000)]
    assert all(float(str(row["ms_p50"])) > 0 for row in rows)
    return [float(str(row["ms_p50"])) for row in rows]


def test_names_of_schemes() -> None:
    assert step.parse("none") == step.StepScheme("none")
    assert step.parse("auto").settled > step.parse("int8").settled
    pair = step.parse(" lloyd4:block=256/lloyd4@replica ", "fsdp2")
    assert pair == step.StepScheme("lloyd4:block=256/lloyd4@replica", "lloyd4:block=256", "lloyd4", True)
    assert [one.name for one in step.lineup(["int8", "bf16", "int8"])] == ["none", "bf16", "int8"]
    wrong = {"ddp": ("int9", "lloyd2@ef21", "int8/int8"), "fsdp2": ("int8/int8@ef21", "auto")}
    for parallel, name in ((parallel, name) for parallel, names in wrong.items() for name in names):
        with pytest.raises(CodecError):
            step.parse(name, parallel)


@pytest.mark.parametrize(("name", "params"), [("mlp-1m", 1_088_522), ("gpt-3m", 3_421_696), ("gpt-124m", 124_475_904)])
def test_models(name: str, params: int) -> None:
    with torch.device("meta"):
        network = models.MODELS[name].network()
    assert sum(parameter.numel() for parameter in network.parameters()) == params
    assert models.MODELS[name].blocks(network)
    inputs, targets = models.MODELS[name].batch(0)
    assert len(inputs) == len(targets)


def check_steps(rows: list[record.Row], parallel: str, codecs: str) -> None:
    assert [row["codec"] for row in rows] == ["none", "bf16", *codecs.split(",")]
    for row in rows:
        assert (row["verb"], row["identical"]) == (step.VERBS[parallel], True), row
        assert (row["bytes_per_rank"] is None) == (row["codec"] in ("none", "bf16"))
    assert rows[0]["speedup_plain"] == rows[1]["speedup_bf16"] == 1
    compressed = [float(str(row["bytes_per_rank"])) for row in rows[2:]]
    most = 1.1 if parallel == "ddp" else 3.2 / 2  # per parameter: gradients; half of gradients and twice of weights
    assert all(0.2 < nbytes / int(str(rows[0]["numel"])) < most for nbytes in compressed)


def in_a_job(group: dist.ProcessGroup, *flags: str) -> tuple[int, str]:
    """On a smaller network: some processors take a hundred times as long for products in bf16 as in fp32."""
    small = replace(models.MODELS["mlp-1m"], network=lambda: models.mlp(64, 200, 10), inputs=(2, 64))
    place = {"RANK": str(group.rank()), "WORLD_SIZE": str(group.size()), "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    with patch.dict(os.environ, place), patch.dict(models.MODELS, {"mlp-1m": small}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "mkldnn_matmul failed")
        run = bench(*flags, "--quick", "--rounds", "2")
    return run.exit_code, run.stdout or run.stderr


@pytest.mark.parametrize(("parallel", "codecs"), [("ddp", "int8"), ("fsdp2", "int8/int8")])
def test_the_ranks_of_torchrun_take_steps(ranks: RankPool, parallel: str, codecs: str, tmp_path: Path) -> None:
    path = str(tmp_path / "step.json")
    (status, out), other = ranks(2).run(in_a_job, "step", "--parallel", parallel, "--codecs", codecs, "--json", path)
    assert (status, out.count("int8") > 0, other) == (0, True, (0, ""))  # rank 0 prints
    rows = record.read(path).rows
    assert all((row["numel"], row["world"], row["link"]) == (15_010, 2, "torchrun") for row in rows)
    check_steps(rows, parallel, codecs)


def test_the_ranks_of_torchrun_measure_collectives(ranks: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "calls.json")
    (status, _), *others = ranks(3).run(
        in_a_job, "collectives", "--numel", "1000", "--codecs", "int8,plain", "--json", path
    )
    assert (status, others) == (0, [(0, "")] * 2)
    facts = [(row["codec"], row["algorithm"], row["world"], row["link"]) for row in record.read(path).rows]
    assert facts == [("int8", "two_phase", 3, "torchrun"), ("plain", "plain", 3, "torchrun")]
    for status, told in ranks(2).run(in_a_job, "collectives", "--world", "2"):
        assert (status, "torchrun started the ranks that measure" in " ".join(told.split())) == (2, True)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["collectives", "--link", "fast"], "expected a rate such as 100mbit or 1gbit, got 'fast'"),
        (["collectives", "--verbs", "broadcast"], "No such option: --verbs"),
        (["collectives", "--codecs", "auto,int9"], "unknown codec 'int9'"),
        (["collectives", "--json", "/no/such/folder/x.json"], "cannot be written"),
        (["step", "--model", "resnet"], "'resnet' is not one of mlp-1m, mlp-25m"),
        (["step", "--codecs", "int8/int8"], "gradients/weights goes with --parallel fsdp2"),
        (["link", "--world", "1,2"], "expected integers from 2 to 254, got '1'"),
        (["step", "--rounds", "0"], "Invalid value for '--rounds'"),
    ],
)
def test_bad_flags_say_what_is_allowed(flags: list[str], complaint: str) -> None:
    result = bench(*flags)
    assert (result.exit_code, result.stdout) == (2, "")
    assert complaint in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
