"""The command line, end to end: flags, tables, records, Ctrl-C and what goes to which stream."""

import itertools
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner, Result

import thinwire
from programs import Ended
from thinwire.kernels import cpu, dispatch, reference
from thinwire.tools.bench import exchange, record
from thinwire.tools.cli import checkup
from thinwire.tools.cli.app import app, start
from thinwire.tools.cli.flags import specs as split

pytestmark = pytest.mark.usefixtures("served")
RECORD = str(Path(__file__).parent.parent / "benchmarks" / "collectives_1gbit.json")
SMALL = ["report", RECORD]


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), prog_name="thinwire")


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["doctor", "--help"], ["report", "--help"]], ids=" ".join)
def test_questions_about_the_command_itself_are_answered_without_torch(words: list[str]) -> None:
    """It takes seconds to import."""
    asked = f"import sys; sys.argv = {['thinwire', *words]}; import thinwire.__main__ as command; command.main()"
    watched = f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); {asked}"
    run = subprocess.run([sys.executable, "-c", watched], capture_output=True, text=True, timeout=600)
    assert (run.returncode, run.stderr) == (0, "")
    assert "thinwire" in run.stdout
    assert run.stdout.splitlines()[-1] == "False"


def every_command(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command and group of commands."""
    yield words
    for name, below in getattr(command, "commands", {}).items():
        yield from every_command(below, (*words, name))


@pytest.mark.parametrize(
    "words", list(every_command(get_command(app))), ids=lambda words: " ".join(words) or "thinwire"
)
def test_help_has_examples_of_flags_that_exist(words: tuple[str, ...]) -> None:
    text = call(*words, "--help").output
    cut = [line for line in text.splitlines() if line.endswith(("...", "…")) and "Usage" not in line]
    assert not cut, cut
    examples = re.findall(r"^ +.*\bthinwire ((?:[a-z]|--).*)$", text.partition("Example")[2], re.MULTILINE)
    assert examples, text
    for example in examples:
        command, rest = get_command(app), shlex.split(example)
        while rest and rest[0] in getattr(command, "commands", {}):
            command = command.commands[rest.pop(0)]  # type: ignore[attr-defined]
        known = {name for flag in command.params for name in flag.opts}
        own = itertools.takewhile(lambda word: word != "--", rest)  # what follows is the script's
        assert {word for word in own if word.startswith("--")} <= known, example


def test_the_exit_statuses_are_documented() -> None:
    text = call("--help").output
    assert re.findall(r"^ +(\d+) +\w", text.partition("Exit status:")[2], re.MULTILINE) == ["0", "1", "2", "130", "141"]


@pytest.mark.parametrize(
    ("text", "specs"),
    [
        ("int8", ["int8"]),
        ("int8,int4", ["int8", "int4"]),
        ("int4:block=32,mode=affine,int8", ["int4:block=32,mode=affine", "int8"]),
        ("none, int4:block=32, seed=3, lloyd1", ["none", "int4:block=32, seed=3", "lloyd1"]),
        (
            "bysize(small=bf16; large=int4:block=32,mode=affine),int8:mode=affine",
            ["bysize(small=bf16; large=int4:block=32,mode=affine)", "int8:mode=affine"],
        ),
    ],
)
def test_codecs_are_split_between_codecs_only(text: str, specs: list[str]) -> None:
    assert split([text]) == specs
    assert [thinwire.codec(spec) for spec in split([text])] == [thinwire.codec(spec) for spec in specs]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """`bench link` takes no time."""
    rows = [exchange.row_of([[1e-3] * 3] * 2, size, "loopback", "gloo") for size in (1000, 2000)]

    def run(*arguments: Any, progress: Any) -> record.Record:
        return record.collect("link", torch.device("cpu"), (row for row in progress(rows)))

    monkeypatch.setattr(exchange, "run", run)


@pytest.mark.usefixtures("measured")
def test_a_run_prints_a_plain_table_or_json_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "link.json")
    table = call("bench", "link", "--json", path)
    assert (table.exit_code, table.stderr) == (0, "")
    assert "\x1b" not in table.stdout
    assert table.stdout.splitlines()[1].split() == ["nbytes", "ms", "p20", "p80", "Gbit/s"]
    assert call("report", path).stdout == table.stdout
    alone = call("bench", "link", "--json", "-").stdout
    assert [row["nbytes"] for row in record.loads(alone).rows] == [1000, 2000]
    read = CliRunner().invoke(app, ["report", "-"], input=alone)
    assert (read.exit_code, read.stdout.splitlines()[:3]) == (0, table.stdout.splitlines()[:3])
    full = call("bench", "link", "--json", "/dev/full")
    assert (full.exit_code, "1000" in full.stdout) == (1, True)
    assert "Error: /dev/full cannot be written: No space left on device" in full.stderr


def test_ctrl_c_is_an_interruption_whatever_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "read", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
    result = call("report", "codec.json")
    assert result.exit_code == 130
    assert result.stderr.endswith("interrupted\n")


# --- doctor -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def few_codecs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "codecs", lambda: [thinwire.codec("int8"), thinwire.codec("lloyd2")])


@pytest.mark.usefixtures("few_codecs")
def test_doctor() -> None:
    result = call("doctor")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert all(line[0] in "✓–" for line in lines)
    found = json.loads(call("doctor", "--json").stdout)
    assert found["works"] is True
    names = [finding["name"] for finding in found["findings"]]
    assert [line[2:].startswith(name) for line, name in zip(lines, names, strict=True)] == [True] * len(lines)
    assert {"python", "torch", "C kernels", "triton", "CUDA", "gloo", "nccl", "host name",
            "shaped links"} <= set(names)  # fmt: skip
    assert all(finding["todo"] for finding in found["findings"] if finding["works"] is None)


@pytest.mark.usefixtures("few_codecs")
@pytest.mark.parametrize(("asked", "mark"), [("fast", "✗"), ("reference", "✓")])
def test_doctor_tells_the_backend_that_the_environment_asks_for(
    monkeypatch: pytest.MonkeyPatch, asked: str, mark: str
) -> None:
    monkeypatch.setenv("THINWIRE_BACKEND", asked)
    monkeypatch.setattr(dispatch, "_requested", asked)  # what the variable does when thinwire is imported
    result = call("doctor")
    lines = result.stdout.splitlines()
    assert [line[0] for line in lines if "THINWIRE_BACKEND" in line] == [mark]
    assert ("unknown backend 'fast'" in result.stdout) == (mark == "✗") == bool(result.exit_code)
    assert [line[0] for line in lines if line[0] == "✗"] == ["✗"] * (mark == "✗")  # the kernels are not to blame


@pytest.mark.usefixtures("few_codecs")
@pytest.mark.skipif(cpu.unavailable() is not None, reason="the C kernels were not built")
def test_doctor_fails_on_a_kernel_with_other_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "differences", lambda *request: (40, ["recode int8"]))
    result = call("doctor")
    assert result.exit_code == 1
    line = next(line for line in result.stdout.splitlines() if line.startswith("✗"))
    assert "1 of 40 results differ from the reference, the first: recode int8; set THINWIRE_BACKEND=reference" in line


def test_doctor_compares_few_kernels_that_have_to_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "names", lambda: ("int2",))
    monkeypatch.setattr(checkup, "OPTIONS", ())
    monkeypatch.setattr(checkup, "BACKENDS", {"card": reference})
    monkeypatch.setattr(checkup, "_native", lambda: iter(()))
    monkeypatch.setattr(checkup, "_shaping", lambda: checkup.Finding("shaped links", None, "not here", "not now"))
    line = next(line for line in call("doctor").stdout.splitlines() if "card self-test" in line)
    compared, _ = checkup.differences(reference, torch.device("cpu"), few=True)
    assert line.split(maxsplit=3)[-1] == f"{compared} results have the bytes of the reference (of int8 and lloyd4)"


@pytest.mark.usefixtures("few_codecs")
@pytest.mark.parametrize(("there", "status", "mark"), [(False, 0, "–"), (True, 1, "✗")])
def test_doctor_tells_unbuilt_kernels_from_broken_ones(
    there: bool, status: int, mark: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = tmp_path / "_native.so"
    if there:
        library.touch()
    monkeypatch.setattr(cpu, "LIBRARY", library)
    monkeypatch.setattr(cpu, "unavailable", lambda: "install a compiler")
    result = call("doctor")
    assert result.exit_code == status
    assert f"{mark} C kernels            install a compiler" in result.stdout.splitlines()


@pytest.mark.usefixtures("few_codecs")
def test_doctor_fails_on_an_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "_shaping", lambda: checkup.Finding("shaped links", None, "not here", "not now"))
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "somewhere0")])
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nowhere0")
    result = call("doctor")
    assert result.exit_code == 1
    (broken,) = (line for line in result.stdout.splitlines() if line.startswith("✗"))
    assert broken.endswith("there is no nowhere0 here: unset it, or name one of lo, somewhere0")


# --- completion -------------------------------------------------------------------------------------------------------


def completed(shell: str, line: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the command tells a shell that asks how to go on; the shells' own scripts set the same variables."""
    words = line.split(" ")
    monkeypatch.setenv("_THINWIRE_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("COMP_WORDS", "\n".join(words))
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    return call().output


@pytest.mark.parametrize(
    ("shell", "line", "expected"),
    [("bash", "thinwire be", "bench"), ("fish", "thinwire report --mark", "--markdown")],
)
def test_shells_can_complete(shell: str, line: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    output = completed(shell, line, monkeypatch)
    assert re.search(rf"(^|\W){expected}(\W|$)", output), output
    assert "doctor" not in output  # which begins otherwise


# --- the process ------------------------------------------------------------------------------------------------------


def started(output: TextIO, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    """The exit status of the command with that standard output."""
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # which the command sets
    monkeypatch.setattr(sys, "argv", ["thinwire", *arguments])
    monkeypatch.setattr(sys, "stdout", output)
    with pytest.raises(SystemExit) as end:
        start()
    return end.value.code


@pytest.mark.parametrize("arguments", [SMALL, [*SMALL, "--markdown"], ["--version"], ["bench", "--help"]])
def test_an_output_that_takes_nothing(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as broken, open("/dev/full", "w") as full:
        assert started(broken, arguments, monkeypatch) == 141
        assert capsys.readouterr().err == ""
        assert started(full, arguments, monkeypatch) == 1
        assert capsys.readouterr().err == "Error: standard output cannot be written: No space left on device\n"


DEMO = ("-m", "thinwire", "demo", "--quick", "--link", "loopback", "--json", "part.json")


@pytest.mark.program(Path(__file__).with_name("terminal.py"), "3/11", *DEMO)
def test_on_a_terminal_there_are_colors_and_a_bar_and_ctrl_c_keeps_rows(program: Ended) -> None:
    assert program.status == 130, program.told
    assert "left" in program.out
    assert re.search(r"\x1b\[[0-9;]*m", program.out)  # the bar's colors
    assert "finished rows kept" in program.out
    kept = record.read(str(program.folder / "part.json"))
    assert 1 <= len(kept.rows) < 5
    assert kept.conditions["interrupted"] is True
    assert str(kept.conditions["command"]).startswith("thinwire demo --quick")


# --- self-test --------------------------------------------------------------------------------------------------------


def test_the_self_test_finds_a_wrong_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode_sum(format: Any, wires_WN: Any, out: Any, **keys: Any) -> None:
        reference.decode_sum(format, wires_WN, out, **keys)
        if len(wires_WN) > 1:
            out[-1] = out[-1] + 1

    wrong: Any = SimpleNamespace(**vars(reference) | {"decode_sum": decode_sum})
    monkeypatch.setattr(checkup, "codecs", lambda: [thinwire.codec("int8"), thinwire.codec("lloyd2")])
    compared, differing = checkup.differences(wrong, torch.device("cpu"))
    wires = 2 * len(checkup.CASES)
    assert compared == 5 * wires
    assert len(differing) == wires
    assert differing[0] == "decode_sum int8 torch.float32 numel=385"
    assert checkup.differences(reference, torch.device("cpu")) == (compared, [])
