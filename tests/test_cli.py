"""The command line, end to end: flags, tables, records, Ctrl-C and what goes to which stream."""

import csv
import io
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
from typing import Any, TextIO

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner, Result

import thinwire
from programs import Ended
from thinwire.kernels import cpu, dispatch, reference
from thinwire.tools.bench import (
    codec as codec_bench,
    collectives as collectives_bench,
    data,
    link as links,
    record,
    selftest,
)
from thinwire.tools.cli import advise, checkup, screen
from thinwire.tools.cli.app import app, start
from thinwire.tools.cli.flags import specs as split

pytestmark = pytest.mark.usefixtures("served")
SMALL = ["bench", "codec", "--numel", "2000", "--distributions", "gaussian,sparse", "--codecs", "int8,lloyd2"]


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
        assert {word for word in rest if word.startswith("--")} <= known, example


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


def test_a_codec_run_prints_a_plain_table() -> None:
    result = call(*SMALL)
    assert result.exit_code == 0
    assert result.stderr == ""
    assert "\x1b" not in result.stdout
    header, int8, lloyd2 = result.stdout.splitlines()[1:4]
    assert header.split() == ["codec", "bits", "gaussian", "sparse", "dB"]
    assert int8.split()[:2] == ["int8", "8.26"]  # header, scales of 16 blocks padded, 2000 codes: 2064 bytes
    assert lloyd2.split()[0] == "lloyd2"


def test_json_on_standard_output_is_json_alone() -> None:
    result = call(*SMALL, "--json", "-")
    found = record.loads(result.stdout)
    assert result.stdout.startswith('{"schema": 1')
    assert len(found.rows) == 4


def test_csv_on_standard_output_is_csv_alone(tmp_path: Path) -> None:
    path = tmp_path / "codec.json"
    result = call(*SMALL, "--csv", "-", "--json", str(path))
    assert result.exit_code == 0, result.output
    written, found = record.read(str(path)), list(csv.DictReader(io.StringIO(result.stdout)))
    assert [float(row["nmse"]) for row in found] == [row["nmse"] for row in written.rows]
    assert {row["conditions.cpu"] for row in found} == {written.conditions["cpu"]}


@pytest.mark.parametrize(("json", "csv"), [("-", "-"), ("x.out", "./x.out"), ("x.out", "link.out")])
def test_json_and_csv_cannot_share_a_file(json: str, csv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.out").symlink_to("x.out")
    result = call(*SMALL, "--csv", csv, "--json", json)
    assert result.exit_code == 2
    assert f"--json writes to {json} already; name another file" in " ".join(result.stderr.split())


def test_a_file_that_cannot_be_written_costs_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "codec.csv"
    result = call(*SMALL, "--json", "/dev/full", "--csv", str(path))
    assert result.exit_code == 1
    assert "Error: /dev/full cannot be written: No space left on device" in result.stderr
    assert "lloyd2" in result.stdout
    assert "lloyd2" in path.read_text()


def test_too_little_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    result = call("bench", "codec", "--numel", str(10**15), "--codecs", "int8", "--distributions", "gaussian")
    assert result.exit_code == 1
    assert "Error: this needs more memory than there is" in result.stderr
    monkeypatch.setattr(codec_bench, "measure", lambda case: (_ for _ in ()).throw(RuntimeError("a mistake")))
    assert isinstance(call(*SMALL).exception, RuntimeError)  # which is for those who mend it


def test_every_benchmark_writes_json_and_csv_and_has_a_quick_run() -> None:
    bench = get_command(app).commands["bench"]  # type: ignore[attr-defined]
    for name, command in bench.commands.items():
        known = {name for flag in command.params for name in flag.opts}
        assert {"--json", "--csv", "--quick"} <= known, name


def test_repeated_flags_add_up() -> None:
    result = call("bench", "codec", "--numel", "500", "--distributions", "gaussian", "--distributions", "laplace",
                  "--codecs", "int8,int4:block=32,mode=affine", "--codecs", "none", "--json", "-")  # fmt: skip
    rows = record.loads(result.stdout).rows
    expected = ["int8", "int4:block=32,mode=affine", "none"]
    assert [row["codec"] for row in rows] == 2 * expected
    assert [row["distribution"] for row in rows] == ["gaussian"] * 3 + ["laplace"] * 3


def test_a_kernels_run_writes_its_record_and_prints_its_table(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    result = call("bench", "kernels", "--device", "cpu", "--quick", "--numel", "1000", "--codecs", "int4:block=32",
                  "--ops", "decode,recode", "--dtypes", "float16", "--threads", "1", "--json", str(path))  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = record.read(str(path)).rows
    assert [(row["op"], row["codec"], row["dtype"], row["threads"]) for row in rows] == [
        ("decode", "int4:block=32", "float16", 1),
        ("recode", "int4:block=32", "float16", 1),
    ]
    assert "×copy" in result.stdout
    assert re.search(r"^recode +int4:block=32 +float16 +1 ", result.stdout, re.MULTILINE)


def test_quick_runs_on_fewer_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def run(codecs: Any, names: Any, numel: int, progress: Any) -> record.Record:
        asked.append(numel)
        return record.Record("codec", record.conditions(torch.device("cpu")), [])

    monkeypatch.setattr(codec_bench, "run", run)
    call("bench", "codec")
    call("bench", "codec", "--quick")
    call("bench", "codec", "--quick", "--numel", "77")
    assert asked == [codec_bench.NUMEL, codec_bench.QUICK_NUMEL, 77]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["codec", "--codecs", "int9"], "unknown codec 'int9'; known: none, bf16"),
        (["codec", "--codecs", "int8:blok=3"], "codec 'int8' does not know the option 'blok=3'; options: block"),
        (["codec", "--distributions", "gaussian,cauchy"], "'cauchy' is not one of gaussian, laplace"),
        (["codec", "--numel", "0"], "Invalid value for '--numel'"),
        (["codec", "--numel", "9" * 30], "Invalid value for '--numel'"),
        (["codec", "--json", "/no/such/folder/x.json"], "cannot be written"),
        (["codec", "--csv", "/no/such/folder/x.csv"], "cannot be written"),
        (["codec", "--fast"], "No such option: --fast (Possible options: --all, --codecs, --csv, --distributions"),
        (["codek"], "No such command 'codek'. Did you mean 'codec'? The commands are codec, kernels, collectives"),
        (["kernels"], "Missing option '--device'"),
        (["kernels", "--device", "tpu"], "'cpu', 'cuda'"),
        (["kernels", "--device", "cpu", "--ops", "compress"], "'compress' is not one of encode"),
        (["kernels", "--device", "cpu", "--dtypes", "int8"], "'int8' is not one of float32"),
        (["kernels", "--device", "cpu", "--threads", "1,0"], "expected integers from 1 on such as 1,2, got '0'"),
        (["collectives", "--world", "1"], "a world has 2 to 254 ranks"),
        (["collectives", "--link", ""], "expected a rate such as 100mbit or 1gbit, got ''"),
        (["collectives", "--link", "fast"], "expected a rate such as 100mbit or 1gbit, got 'fast'"),
        (["collectives", "--verbs", "gossip"], "'gossip' is not one of all_reduce, reduce_scatter_tensor"),
        (["collectives", "--codecs", "auto,int9"], "unknown codec 'int9'"),
    ],
)
def test_bad_flags_say_what_is_allowed(arguments: list[str], complaint: str) -> None:
    result = call("bench", *arguments)
    assert result.exit_code == 2
    assert complaint in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_what_a_collectives_run_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def run(*arguments: Any, nodes: int | None, progress: Any) -> record.Record:
        asked.append((*arguments, nodes))
        return record.Record("collectives", record.conditions(torch.device("cpu")), [])

    monkeypatch.setattr(collectives_bench, "run", run)
    call("bench", "collectives")
    call("bench", "collectives", "--world", "3,4", "--world", "2", "--link", "1Gbit", "--numel", "1024,65536",
         "--verbs", "broadcast", "--codecs", "int4:block=32,mode=affine,auto,plain", "--rounds", "7",
         "--quick")  # fmt: skip
    call("bench", "collectives", "--world", "4", "--link", "1gbit", "--nodes", "2", "--codecs", "int8")
    names = ["int4:block=32,mode=affine", "auto", "plain"]
    assert asked == [
        ([2, 4], None, None, ["all_reduce"], list(collectives_bench.CODECS), None, False, None),
        ([3, 4, 2], links.ShapedLink("1gbit", 1e9), [1024, 65536], ["broadcast"], names, 7, True, None),
        ([4], links.ShapedLink("1gbit", 1e9), None, ["all_reduce"], ["int8"], None, False, 2),
    ]


def test_without_scikit_learn_the_gradient_is_an_error_before_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "find_spec", lambda name: None)
    result = call("bench", "codec", "--quick")
    assert result.exit_code == 1
    assert "pip install 'thinwire[bench]'" in result.stderr


def test_ctrl_c_writes_the_finished_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measure, path = codec_bench.measure, tmp_path / "part.json"

    def third_is_interrupted(case: codec_bench.CodecCase) -> record.Row:
        if (case.distribution, str(case.codec)) == ("sparse", "int8"):
            raise KeyboardInterrupt
        return measure(case)

    monkeypatch.setattr(codec_bench, "measure", third_is_interrupted)
    result = call(*SMALL, "--json", str(path))
    assert result.exit_code == 130
    assert "interrupted: 2 finished rows kept" in result.stderr
    kept = record.read(str(path))
    assert [row["codec"] for row in kept.rows] == ["int8", "lloyd2"]
    assert kept.conditions["interrupted"] is True
    assert "interrupted" in result.stdout.splitlines()[-1]


def test_report_prints_tables_and_markdown(tmp_path: Path) -> None:
    path = str(tmp_path / "codec.json")
    table = call(*SMALL, "--json", path).stdout
    assert call("report", path).stdout == table
    other = str(tmp_path / "other.json")
    record.write(record.Record("kernels", record.conditions(torch.device("cpu")), []), other)
    assert call("report", path, other).stdout.startswith(f"codec.json\n{table}\nother.json\nkernels: no rows\n")
    lines = call("report", "--markdown", path).stdout.splitlines()
    assert lines[2:4] == ["| codec | bits | gaussian | sparse | dB |", "| --- | --: | --: | --: | --: |"]
    assert [line.split(" | ")[0] for line in lines[4:6]] == ["| int8", "| lloyd2"]
    assert [len(line.split(" | ")) for line in lines[2:6]] == [5] * 4


def test_report_reads_standard_input() -> None:
    text = call(*SMALL, "--json", "-").stdout
    result = CliRunner().invoke(app, ["report", "-"], input=text)
    assert result.exit_code == 0
    assert "lloyd2" in result.stdout


def test_ctrl_c_at_a_question_is_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advise, "_somebody_listens", lambda: True)
    result = call("advise")  # nothing follows the question
    assert result.exit_code == 130
    assert result.stderr.endswith("interrupted\n")


def test_ctrl_c_is_an_interruption_whatever_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "read", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
    result = call("report", "codec.json")
    assert result.exit_code == 130
    assert result.stderr.endswith("interrupted\n")


# --- doctor -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def few_codecs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "codecs", lambda: [thinwire.codec("int8"), thinwire.codec("lloyd2")])


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
    assert {"python", "torch", "reference", "C kernels", "triton", "CUDA", "gloo", "nccl", "interfaces", "host name",
            "shaped links", "scikit-learn", "matplotlib"} <= set(names)  # fmt: skip
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
    monkeypatch.setattr(selftest, "differences", lambda *request: (40, ["recode int8"]))
    result = call("doctor")
    assert result.exit_code == 1
    line = next(line for line in result.stdout.splitlines() if line.startswith("✗"))
    assert "1 of 40 results differ from the reference, the first: recode int8; set THINWIRE_BACKEND=reference" in line


@pytest.mark.parametrize(("flags", "told"), [([], "(of int8 and lloyd4; all: doctor --full)"), (["--full"], "")])
def test_doctor_compares_few_kernels_that_have_to_be_compiled(
    flags: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selftest, "names", lambda: ("int2",))
    monkeypatch.setattr(selftest, "OPTIONS", ())
    monkeypatch.setattr(checkup, "BACKENDS", {"card": reference})
    monkeypatch.setattr(checkup, "_native", lambda: iter(()))
    monkeypatch.setattr(checkup, "_shaping", lambda: checkup.Finding("shaped links", None, "not here", "not now"))
    result = call("doctor", *flags)
    line = next(line for line in result.stdout.splitlines() if "card self-test" in line)
    compared, _ = selftest.differences(reference, torch.device("cpu"), few=not flags)
    assert line.split(maxsplit=3)[-1] == f"{compared} results have the bytes of the reference {told}".strip()


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


INTERFACES = [  # of a variable what it says, and whether that is there
    ("GLOO_SOCKET_IFNAME", {"lo": True, "lo,nowhere0": False, "nowhere": False, "=lo": False, "lo,": False}),
    ("NCCL_SOCKET_IFNAME", {"=lo": True, "some,lo": True, "^nowhere": None, "=nowhere": False, "l": None}),
]


@pytest.fixture
def three_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "somewhere0"), (3, "nowhere12")])
    for variable, _ in INTERFACES:
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.usefixtures("three_interfaces")
@pytest.mark.parametrize(("variable", "values"), INTERFACES)
def test_an_interface_that_is_not_there_is_named(
    variable: str, values: dict[str, bool | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL takes the beginning of a name, gloo the whole of it; of what is not to be used, nothing is said."""
    for value, there in values.items():
        monkeypatch.setenv(variable, value)
        found = list(checkup._chosen_interfaces())
        assert [(finding.name, finding.works, finding.detail) for finding in found] == (
            [] if there is None else [(variable, there, value)]
        )
        told = r"^there is no \S+ here: unset it, or name one of lo, somewhere0, nowhere12$"
        assert all(bool(re.search(told, finding.todo)) is not there for finding in found)


@pytest.mark.usefixtures("few_codecs", "three_interfaces")
def test_doctor_fails_on_an_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "_shaping", lambda: checkup.Finding("shaped links", None, "not here", "not now"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nowhere0")
    result = call("doctor")
    assert result.exit_code == 1
    (broken,) = (line for line in result.stdout.splitlines() if line.startswith("✗"))
    assert broken.endswith("there is no nowhere0 here: unset it, or name one of lo, somewhere0, nowhere12")


@pytest.mark.usefixtures("few_codecs")
def test_doctor_says_what_optional_parts_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    result = call("doctor")
    assert result.exit_code == 0
    assert "shaped links         not here; --link puts every rank into a network namespace" in result.stdout
    assert "matplotlib           not installed; `report --png` and `--html` need it: pip install" in result.stdout


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
    [
        ("bash", "thinwire be", "bench"),
        ("zsh", "thinwire bench col", "collectives"),
        ("fish", "thinwire report --fail", "--fail-on-regression"),
    ],
)
def test_shells_can_complete(shell: str, line: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    output = completed(shell, line, monkeypatch)
    assert re.search(rf"(^|\W){expected}(\W|$)", output), output
    assert "doctor" not in output  # which begins otherwise


# --- the process ------------------------------------------------------------------------------------------------------


def started(output: TextIO | None, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    """The exit status of the command with that standard output."""
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # which the command sets
    monkeypatch.setattr(sys, "argv", ["thinwire", *arguments])
    monkeypatch.setattr(sys, "stdout", output)
    with pytest.raises(SystemExit) as end:
        start()
    if output is None:
        sys.stdout.close()  # what stands for it
    return end.value.code


@pytest.mark.parametrize("arguments", [SMALL, [*SMALL, "--json", "-"], ["--version"], ["bench", "--help"]])
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
    assert started(None, arguments, monkeypatch) == 0  # closed, which nobody does by mistake


@pytest.mark.program("-m", "thinwire", *SMALL, COLUMNS="100", TERM="xterm-256color")
def test_in_a_pipe_there_are_no_colours_and_no_bar(program: Ended) -> None:
    assert (program.status, program.err) == (0, ""), program.told
    assert "\x1b" not in program.out
    assert "lloyd2" in program.out


KERNELS = ("-m", "thinwire", "bench", "kernels", "--device", "cpu", "--codecs", "lloyd4", "--numel", "1000000",
           "--threads", "1,2", "--json", "part.json")  # fmt: skip


@pytest.mark.program(Path(__file__).with_name("terminal.py"), "1/18", *KERNELS)
def test_on_a_terminal_there_are_colours_and_a_bar_and_ctrl_c_keeps_rows(program: Ended) -> None:
    assert program.status == 130, program.told
    assert "encode lloyd4 float32, 1 threads" in program.out
    assert "left" in program.out
    assert re.search(r"\x1b\[[0-9;]*m", program.out)  # the bar's colours
    assert "\x1b[1mBackend" in program.out  # the title of the table, in bold
    assert "finished rows kept" in program.out
    kept = record.read(str(program.folder / "part.json"))
    assert 1 <= len(kept.rows) < 18
    assert kept.conditions["interrupted"] is True
    assert str(kept.conditions["command"]).startswith("thinwire bench kernels --device cpu")


def test_a_narrow_terminal_shows_all_columns_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = screen.console

    def narrow(*, stderr: bool = False) -> Any:
        console = usual(stderr=stderr)
        if stderr:
            return console
        console.width = 80
        console._force_terminal = True
        return console

    monkeypatch.setattr(screen, "console", narrow)
    path = str(Path(__file__).parent.parent / "benchmarks" / "collectives_1gbit.json")
    for flags in ([], ["--all"], []):
        told = call("report", path, *flags).stdout
        assert ("Left out: " in told) == (not flags)
        assert ("identical" in told.partition("Left out")[0]) == bool(flags)
