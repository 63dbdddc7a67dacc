"""The benchmarks and their records: the schema, the inputs, the formulas, and what a run hands back."""

import json
import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from thinwire import kernels
from thinwire.codecs import codec
from thinwire.kernels import BACKENDS, reference, use_backend
from thinwire.tools.bench import codec as codec_bench, data, kernels as kernels_bench, record, selftest, timing
from thinwire.tools.cli.app import app
from thinwire.tools.report import kinds, tables

pytestmark = pytest.mark.usefixtures("served")
CPU = torch.device("cpu")
CODEC_ROW: record.Row = {
    "distribution": "gaussian",
    "codec": "int8",
    "wire_bits": 8.125,
    "nmse": 4.2e-5,
    "db_above_rd": 5.1,
    "lloyd_max_nmse": None,
}


def a_record(**changes: Any) -> record.Record:
    return replace(record.Record("codec", record.conditions(CPU), [CODEC_ROW]), **changes)


# --- the schema -------------------------------------------------------------------------------------------------------


def test_the_columns_scripts_rely_on() -> None:
    kernels = "op codec backend device dtype numel world threads ms_p50 ms_p20 ms_p80"
    shares = "copy_ms times_copy copy_share times_eager"
    assert set(record.COLUMNS) == {"codec", "kernels", "collectives", "train", "qat", "soak"}
    assert set(record.COLUMNS["codec"]) == set(CODEC_ROW)
    assert set(record.COLUMNS["kernels"]) == {*kernels.split(), *shares.split()}


def test_a_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = str(tmp_path / "record.json")
    written = a_record(rows=[CODEC_ROW, {**CODEC_ROW, "extra": "é"}])
    record.write(written, path)
    assert record.read(path) == written
    assert json.loads(Path(path).read_text())["schema"] == 1


def test_json_has_no_nan_and_may_have_no_rows() -> None:
    empty = a_record(rows=[])
    assert record.loads(record.dumps(empty)) == empty
    text = record.dumps(a_record(rows=[{**CODEC_ROW, "nmse": math.nan, "db_above_rd": math.inf}]))
    row = json.loads(text, parse_constant=pytest.fail)["rows"][0]
    assert (row["nmse"], row["db_above_rd"]) == (None, None)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"schema": 2}, "expected a record of schema 1, got 2"),
        ({"kind": "speed"}, "kind must be one of codec, kernels"),
        ({"kind": None}, "expected 'kind' to be a str"),
        ({"rows": {}}, "expected 'rows' to be a list"),
        ({"rows": [3]}, "row 0 is a int"),
        ({"rows": [CODEC_ROW, {"codec": "int8"}]}, "row 1 of this codec record lacks distribution, wire_bits"),
        ({"conditions": {"date": ""}}, "the conditions lack thinwire, torch"),
        (
            {"conditions": {**dict.fromkeys(record.CONDITIONS), "cpu": []}},
            "expected the condition 'cpu' to be one text",
        ),
    ],
)
def test_a_wrong_record_is_refused(change: dict[str, Any], complaint: str) -> None:
    text = json.dumps({**json.loads(record.dumps(a_record())), **change})
    with pytest.raises(record.RecordError, match=complaint):
        record.loads(text)


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "text.json").write_text("codec")
    with pytest.raises(record.RecordError, match=r"list\.json: expected a record of schema 1, got 'list'"):
        record.read(str(tmp_path / "list.json"))
    with pytest.raises(record.RecordError, match="not JSON"):
        record.read(str(tmp_path / "text.json"))
    with pytest.raises(record.RecordError, match="No such file"):
        record.read(str(tmp_path / "absent.json"))


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 6000, '{"schema": ' + "9" * 6000 + "}"])
def test_what_json_cannot_read_is_refused(text: str) -> None:
    with pytest.raises(record.RecordError, match="not JSON"):
        record.loads(text)


def test_a_speed_row_of_qat_has_its_own_columns() -> None:
    speed: record.Row = {**dict.fromkeys(record.QAT_SPEED), "op": "forward"}
    assert record.columns("qat", speed) == record.QAT_SPEED
    assert record.columns("qat", {**speed, "op": None}) == record.COLUMNS["qat"]  # no op, so no speed row
    assert "accuracy" in record.columns("qat", {})


def test_conditions_are_complete_and_name_no_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    files = ["--json=/home/me/a.json", "--json", "b/c d.json"]
    pairs = ["--codecs", "lloyd4/int8,int8/int8", "--codecs=int8/none"]
    monkeypatch.setattr("sys.argv", ["/home/me/bin/thinwire", "bench", *pairs, *files])
    found = record.conditions(CPU)
    assert tuple(found) == record.CONDITIONS
    assert found["command"] == f"thinwire bench {' '.join(pairs)} --json=a.json --json 'c d.json'"
    assert found["device"] == "cpu"
    assert found["cpu"]


# --- the inputs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", data.DISTRIBUTIONS)
def test_inputs_repeat_and_leave_the_global_generator_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "WIDTH", 32)  # of the network behind the gradient
    before = torch.get_rng_state()
    first = data.sample(name, 5000)
    data.sample.cache_clear()
    again = data.sample(name, 5000)
    data.sample.cache_clear()
    assert torch.equal(first, again)
    assert first is not again
    assert torch.equal(torch.get_rng_state(), before)
    assert first.dtype == torch.float32
    assert first.isfinite().all()


def test_the_random_inputs_are_what_they_say() -> None:
    n = 200_000
    share = 5 * math.sqrt(0.05 * 0.95 / n)  # five standard deviations of a share of 5 %
    for name, limit in (("gaussian", 1.95996), ("student3", 3.18245), ("laplace", -math.log(0.05))):
        beyond = (data.sample(name, n).abs() > limit).double().mean().item()
        assert abs(beyond - 0.05) < share, name
    sparse = data.sample("sparse", n)
    assert set(sparse.unique().tolist()) == {-1.0, 0.0, 1.0}
    assert abs(sparse.abs().mean().item() - 0.01) < 5 * math.sqrt(0.01 * 0.99 / n)


def test_the_scales_of_hetero_lie_far_apart_and_change_inside_blocks() -> None:
    rms = data.sample("hetero", 1 << 18).view(-1, 2, 64).square().mean(2).sqrt()
    assert rms.log().std() > 1  # sigma is 2; a Gaussian's would be 0.09
    assert ((rms[:, 0] / rms[:, 1]).log().abs() > 1).any()  # within one block of 128


def test_the_gradient_is_a_whole_real_one() -> None:
    found = data.sample("gradient", 100)
    assert found.numel() == 64 * data.WIDTH + data.WIDTH**2 + 10 * data.WIDTH >= 1_000_000
    assert 0 < found.abs().max() < 1
    rms = found[: found.numel() // 128 * 128].view(-1, 128).square().mean(1).sqrt()
    assert rms[rms > 0].log().std() > 0.3  # the scales of its blocks differ, as a Gaussian's do not


def test_what_cannot_be_drawn_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="unknown distribution 'cauchy'; known: gaussian, laplace"):
        data.sample("cauchy", 10)
    with pytest.raises(ValueError, match="numel must be 1 or more"):
        data.sample("gaussian", 0)
    monkeypatch.setattr(data, "find_spec", lambda name: None)
    with pytest.raises(Exception, match=r"pip install 'thinwire\[bench\]'"):
        codec_bench.run(["int8"], ["gaussian", "gradient"], 100)


# --- codec ------------------------------------------------------------------------------------------------------------


def test_lloyd_max_is_the_known_one() -> None:
    known = (0.36338, 0.11748, 0.03455, 0.009501)
    assert [float(f"{codec_bench.lloyd_max_nmse(bits):.4g}") for bits in (1, 2, 3, 4)] == pytest.approx(known, rel=1e-3)


def test_distance_to_the_bound() -> None:
    assert codec_bench.db_above_rd(0.25, 1.0) == pytest.approx(0, abs=1e-12)
    assert codec_bench.db_above_rd(0.5, 1.0) == pytest.approx(10 * math.log10(2))
    assert codec_bench.db_above_rd(2.0**-8, 4.0) == pytest.approx(0, abs=1e-12)
    assert codec_bench.db_above_rd(0.0, 32.0) is None


def test_a_codec_run() -> None:
    found = codec_bench.run(["none", "int8", "lloyd4", "lloyd1"], ["gaussian", "sparse"], 10_000)
    assert record.loads(record.dumps(found)) == found
    assert [(row["distribution"], row["codec"]) for row in found.rows] == [
        (name, spec) for name in ("gaussian", "sparse") for spec in ("none", "int8", "lloyd4", "lloyd1")
    ]
    exact, int8, lloyd4, lloyd1 = found.rows[:4]
    assert (exact["nmse"], exact["db_above_rd"], exact["lloyd_max_nmse"]) == (0, None, None)
    assert int8["wire_bits"] == 8 * codec("int8").wire_bytes(10_000) / 10_000 > 8.125
    assert lloyd4["lloyd_max_nmse"] == codec_bench.lloyd_max_nmse(4)
    assert int8["lloyd_max_nmse"] is None
    nmse = [float(str(row["nmse"])) for row in (exact, int8, lloyd4, lloyd1)]
    assert nmse == sorted(nmse)


def test_progress_sees_every_case_and_can_stop_the_run() -> None:
    def stopped(cases: Any) -> Iterator[Any]:
        assert [str(case) for case in cases] == ["gaussian int8", "gaussian int4"]
        yield cases[0]
        raise KeyboardInterrupt

    with pytest.raises(record.Interrupted) as stop:
        codec_bench.run(["int8", "int4"], ["gaussian"], 1000, stopped)
    assert [row["codec"] for row in stop.value.record.rows] == ["int8"]


# --- kernels ----------------------------------------------------------------------------------------------------------

CUDA = torch.device("cuda")
FEW = timing.Effort(rounds=2, launches=2, slow_rounds=1, slow_numel=1 << 10)


def a_case(op: str, spec: str = "int8", dtype: torch.dtype = torch.float32, numel: int = 1280) -> kernels_bench.OpCase:
    world = 4 if op in kernels_bench.SUMS else 1
    return kernels_bench.OpCase(
        part="codecs", op=op, name=spec, dtype=dtype, numel=numel, world=world, threads=1, device=CPU
    )


def planned(device: torch.device = CUDA, usual: Any = kernels_bench.CUDA, **asked: Any) -> list[Any]:
    return kernels_bench.KernelPlan(device, usual, **asked).cases()


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("encode", 4 * 1280 + 1344),
        ("encode_residual", 4 * 1280 + 1344 + 8 * 1280),
        ("decode", 1344 + 4 * 1280),
        ("decode_sum", 4 * 1344 + 4 * 1280),
        ("recode", 4 * 1344 + 1344),
    ],
)
def test_minimal_bytes(op: str, expected: int) -> None:
    wire = 32 + 32 + 1280  # header, ten scales padded to 16 bytes, codes
    assert wire == 1344 == codec("int8").wire_bytes(1280)
    assert a_case(op).minimal_bytes == expected


def test_shares_are_of_a_copy_of_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []

    def interleave(calls: Any, rounds: int, device: Any, launches: int) -> dict[str, list[float]]:
        assert (rounds, launches, list(calls)) == (2, 2, ["copy", "same", "ours"])
        for call in calls.values():
            call()
        return {"copy": [5.0, 5.0], "same": [3.0, 3.0], "ours": [4.0, 4.0]}

    real = kernels_bench._copy

    def copy(source: torch.Tensor) -> timing.Call:
        copied.append(source.numel() * source.itemsize)
        return real(source)

    monkeypatch.setattr(timing, "interleave", interleave)
    monkeypatch.setattr(kernels_bench, "_copy", copy)
    row = kernels_bench.beside(torch.ones(1000), lambda x: lambda: None, moved=12_345, effort=FEW)
    assert copied == [4000, 6176]  # a copy of n bytes moves twice as many; 16 bytes at a time
    assert (row["times_copy"], row["copy_share"], row["copy_same_ms"]) == (4 / 5, 3 / 4, 3)
    assert (row["minimal_bytes"], row["cold"], row["rounds"]) == (12_345, False, 2)
    assert set(row) == set(kernels_bench.COLUMNS)


def test_the_copy_of_the_same_bytes_reads_memory_that_was_written() -> None:
    x = torch.randn(5)
    assert kernels_bench._bytes(x, 47).tolist() == (3 * x.view(torch.uint8).tolist())[:47]
    assert kernels_bench._bytes(x, 7).tolist() == x.view(torch.uint8).tolist()[:7]


def test_small_tensors_go_round_many_buffers() -> None:
    assert kernels_bench.sets_for(1 << 20, footprint=1 << 28) == 256
    assert kernels_bench.sets_for(3 << 26, footprint=1 << 28) == 2
    assert kernels_bench.sets_for(1 << 30, footprint=1 << 28) == 1
    assert kernels_bench.sets_for(1, footprint=1 << 28) == kernels_bench.MOST_SETS
    assert kernels_bench.sets_for(1000, footprint=0) == 1
    made: list[str] = []
    call = timing.rotate([lambda: made.append("a"), lambda: made.append("b"), lambda: made.append("c")])
    for _ in range(5):
        call()
    assert made == ["a", "b", "c", "a", "b"]


def test_what_a_run_on_a_gpu_measures() -> None:
    jobs = planned()
    parts = {part: [job for job in jobs if job.part == part] for part in kernels_bench.PARTS}
    assert [len(found) for found in parts.values()] == [13 * 9, 6 * 9 * 4, 3 * 3, 2 * 2 + 3 * 2]
    assert {job.numel for job in parts["codecs"]} == {1 << 27}
    assert {job.name for job in parts["codecs"]} == {str(codec(spec)) for spec in kernels_bench.CODECS}
    assert {job.dtype for job in parts["codecs"]} == {torch.float32, torch.bfloat16}
    assert [job.dtype for job in jobs if job.op == "recode"].count(torch.bfloat16) == 0
    assert {job.world for job in jobs if job.op in ("decode_sum", "recode", "codec_path")} == {8}
    sizes = [1 << 20, 1 << 24, 1 << 28, 1 << 30]
    assert sorted({job.numel * job.dtype.itemsize for job in parts["sizes"]}) == sizes
    assert {job.numel for job in parts["sizes"] if job.dtype == torch.bfloat16} == {size // 2 for size in sizes}
    assert {job.rivals for job in parts["sizes"]} == {()}
    assert {job.numel for job in parts["replay"]} == {4096, 65536, 262144}
    assert {job.name for job in parts["rivals"]} == {
        *("torch:per_tensor", "torch:per_channel", "int8", "int4", "lloyd4")
    }
    assert {job.numel for job in parts["rivals"]} == {1 << 24}
    assert all(kernels_bench.COMPILE in job.rivals for job in parts["rivals"] if job.name == "int4")
    assert [kernels_bench.COMPILE in job.rivals for job in parts["codecs"]].count(True) == 0
    assert len({(*(getattr(job, name) for name in ("part", "op", "name", "dtype", "numel")),) for job in jobs}) == len(
        jobs
    )


def test_what_is_asked_for_narrows_a_run() -> None:
    def parts(**asked: Any) -> list[str]:
        return list(dict.fromkeys(job.part for job in planned(**asked)))

    assert parts(numels=(77, 99)) == ["codecs"]
    assert [job.numel for job in planned(numels=(77, 99), ops=("encode",), codecs=(codec("int8"),))] == [77, 77, 99, 99]
    assert parts(codecs=(codec("int3"),)) == parts(ops=("decode",)) == ["codecs", "sizes"]
    assert {job.name for job in planned(codecs=(codec("int3"),))} == {"int3"}
    assert parts(parts=("rivals", "replay"), codecs=(codec("int3"),)) == ["rivals", "replay"]
    assert {job.dtype for job in planned(dtypes=("float16",), ops=("recode",))} == {torch.float16}


def test_what_a_run_on_the_cpu_measures() -> None:
    every = torch.get_num_threads()
    jobs = planned(CPU, kernels_bench.CPU)
    assert {job.part for job in jobs} == {"codecs"}
    assert {job.numel for job in jobs} == {25_000_000}
    assert {job.world for job in jobs} == {1, 4}
    assert {job.name for job in jobs if job.dtype == torch.bfloat16} == {"int8", "lloyd4"}
    assert {job.threads for job in jobs} == {1, every}
    assert len(jobs) == len({1, every}) * (13 * 5 + 2 * 4)


def test_quick_and_the_reference_get_few_elements() -> None:
    ours: Any = SimpleNamespace()
    for device in (CPU, CUDA):
        full, quick, slow = (
            kernels_bench.defaults(device, *how) for how in ((ours, False), (ours, True), (reference, False))
        )
        assert quick == slow != full
        assert quick.parts == full.parts
        most = max(job.numel for job in planned(device, quick))
        assert most == kernels_bench.QUICK_NUMEL < max(job.numel for job in planned(device, full))
    assert not any(
        kernels_bench.COMPILE in getattr(job, "rivals", ()) for job in planned(CUDA, kernels_bench.CUDA_QUICK)
    )


def test_graphs_are_refused_on_the_cpu() -> None:
    with pytest.raises(ValueError, match="replay measures CUDA graphs, which cpu tensors have not: use --device cuda"):
        planned(CPU, kernels_bench.CPU, parts=("replay",))


@pytest.mark.parametrize("op", kernels_bench.OPS)
def test_prepared_ops_do_what_they_say(op: str) -> None:
    calls: list[str] = []
    spy: Any = SimpleNamespace(
        encode=lambda *a, **k: calls.append("encode" if a[3] is None else "encode_residual"),
        decode_sum=lambda *a, **k: calls.append("decode" if len(a[1]) == 1 else "decode_sum"),
        recode=lambda *a, **k: calls.append("recode"),
    )
    call = kernels_bench.prepare(a_case(op), spy, torch.zeros(1280))
    calls.clear()
    call()
    assert calls == [op]


def test_a_codec_that_the_reference_alone_serves() -> None:
    found = kernels_bench.run("cpu", codecs=["topk"], numels=[100], threads=[1], quick=True).rows
    assert [row["op"] for row in found] == [op for op in kernels_bench.OPS if op != "recode"]
    told = {(row["backend"], row["note"], row["times_eager"], row["ms_p50"] is None) for row in found}
    assert told == {("reference", None, None, False)}  # which is not compared with itself
    (asked,) = kernels_bench.run("cpu", codecs=["topk"], ops=["recode"], numels=[100], threads=[1], quick=True).rows
    assert asked["note"] == "BenchError: sums of wires of topk are not encoded again"


def test_a_kernels_run() -> None:
    before = torch.get_num_threads()
    found = kernels_bench.run("cpu", codecs=["int8", "lloyd1"], numels=[4096], threads=[1, before + 1], quick=True)
    assert torch.get_num_threads() == before
    assert record.loads(record.dumps(found)) == found
    per_count = len(kernels_bench.OPS) * 2 + len(kernels_bench.OPS) - 1  # int8 on bfloat16 too, but for the recode
    assert len(found.rows) == 2 * per_count
    for row in found.rows:
        numbers = [float(str(row[name])) for name in ("ms_p20", "ms_p50", "ms_p80", "copy_ms", "copy_same_ms")]
        assert numbers[:3] == sorted(numbers[:3])
        assert min(numbers) > 0
        assert row["times_copy"] == pytest.approx(numbers[1] / numbers[3])
        assert row["copy_share"] == pytest.approx(numbers[4] / numbers[1])
        assert row["world"] == (4 if row["op"] in ("decode_sum", "recode") else 1)
        assert (row["part"], row["note"], row["cold"], row["times_compile"]) == ("codecs", None, False, None)
        assert (row["times_eager"] is None) == (row["backend"] == "reference")


def test_a_case_that_fails_says_so_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any, **keys: Any) -> None:
        raise RuntimeError("out of memory\nand more")

    broken: Any = SimpleNamespace(encode=BACKENDS["reference"].encode, decode_sum=reference.decode_sum, recode=fails)
    monkeypatch.setattr(timing, "name_of", lambda backend: "broken")
    rows = [kernels_bench.row_of(a_case(op), broken, FEW) for op in ("recode", "decode", "encode")]
    assert [row["note"] for row in rows] == ["RuntimeError: out of memory", None, None]
    assert [row["ms_p50"] is None for row in rows] == [True, False, False]
    assert all(set(record.COLUMNS["kernels"]) <= set(row) for row in rows)
    for form in (tables.markdown, tables.grids):
        assert form(record.Record("kernels", record.conditions(CPU), rows))


def test_a_reference_that_does_not_compile_costs_one_column(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise TypeError("no")

    monkeypatch.setattr(kernels_bench, "compiled", fails)
    case = replace(a_case("encode"), rivals=(kernels_bench.EAGER, kernels_bench.COMPILE))
    with use_backend("reference"):
        row = kernels_bench.row_of(case, BACKENDS["reference"], FEW)
    assert row["note"] == "torch.compile of the reference: TypeError: no"
    assert row["times_compile"] is None
    assert row["ms_p50"] is not None


@pytest.mark.parametrize("name", kernels_bench.HOOKS)
@pytest.mark.parametrize("numel", [1000, 1024])
def test_the_hooks_of_torch_lose_no_more_than_half_a_step(name: str, numel: int) -> None:
    x = torch.randn(numel)
    with kernels_bench.quiet():
        codes, scale, zero = kernels_bench.HOOKS[name].encode(x)
        decoded = kernels_bench.HOOKS[name].decode(codes, scale, zero)[:numel]
    assert codes.dtype == torch.uint8
    assert scale.numel() == kernels_bench.HOOKS[name].scales(numel)
    half_step = scale.max().item() / 2
    rounding = 3 * 2.0**-24 * x.abs().max().item()  # quotient, difference, product
    assert (decoded - x).abs().max().item() <= half_step + rounding


@pytest.mark.parametrize("op", kernels_bench.HOOK_OPS)
def test_a_row_of_torchs_hooks(op: str) -> None:
    case = kernels_bench.HookCase(name="torch:per_channel", op=op, numel=1000, threads=1, device=CPU)
    row = kernels_bench.row_of(case, reference, FEW)
    assert row["note"] is None
    assert (row["backend"], row["codec"], row["part"], row["world"]) == ("torch", "torch:per_channel", "rivals", 1)
    assert row["minimal_bytes"] == 1000 * (4 + 1) + 8 * 2  # two channels of 512
    assert row["rounds"] == FEW.slow_rounds
    assert set(record.COLUMNS["kernels"]) <= set(row)


@pytest.mark.parametrize("spec", kernels_bench.PATH_CODECS)
def test_a_row_of_the_replayed_path(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped: list[timing.Call] = []

    def captured(call: timing.Call) -> timing.Call:
        wrapped.append(call)
        return call

    monkeypatch.setattr(timing, "captured", captured)
    monkeypatch.setattr(kernels_bench, "REPLAYS", 4)
    case = kernels_bench.PathCase(name=spec, numel=4096, world=8, threads=1, device=CPU)
    row = kernels_bench.row_of(case, kernels.select(CPU), FEW)
    assert row["note"] is None
    assert len(wrapped) == 3  # the path and both copies
    assert (row["op"], row["part"], row["world"], row["numel"]) == ("codec_path", "replay", 8, 4096)
    message, shard = codec(spec).wire_bytes(4096), codec(spec).wire_bytes(512)
    assert row["minimal_bytes"] == 2 * (4 * 4096 + message) + 9 * shard
    assert float(str(row["launched_ms"])) > 0


def test_calls_are_interleaved_and_the_first_round_is_not_counted() -> None:
    made: list[str] = []
    times = timing.interleave({"a": lambda: made.append("a"), "b": lambda: made.append("b")}, 3, CPU)
    assert made == ["a", "b"] * 4
    assert [len(taken) for taken in times.values()] == [3, 3]


def test_percentiles() -> None:
    assert timing.percentiles([float(i) for i in range(11)]) == (2, 5, 8)


def test_the_command_passes_on_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def run(*arguments: Any, **keys: Any) -> record.Record:
        del keys["progress"]
        asked.append((arguments, {name: value for name, value in keys.items() if value}))
        row = {**dict.fromkeys(record.COLUMNS["kernels"]), "device": "cpu", "note": "RuntimeError: no"}
        return record.Record("kernels", record.conditions(CPU), [row, row][: len(asked) - 1])

    monkeypatch.setattr(kernels_bench, "run", run)
    command = ["bench", "kernels", "--device", "cpu"]
    plain = CliRunner().invoke(app, command)
    full = CliRunner().invoke(app, [*command, "--numel", "7,9", "--parts", "sizes,codecs"])
    assert asked == [(("cpu",), {}), (("cpu",), {"numels": [7, 9], "parts": ["sizes", "codecs"]})]
    assert (plain.exit_code, plain.stderr) == (0, "")
    assert full.exit_code == 1  # a row without a time
    assert "RuntimeError: no" in full.stderr
    monkeypatch.undo()
    refused = CliRunner().invoke(app, [*command, "--parts", "replay"])
    assert refused.exit_code == 2
    assert "replay measures CUDA graphs" in " ".join(refused.stderr.split())


@pytest.mark.cuda
@pytest.mark.timeout(600)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_quick_run_on_a_gpu() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kernels.select(CUDA) is reference:
            pytest.skip("CUDA tensors are served by the reference here")
        found = kernels_bench.run("cuda", quick=True)
    assert record.loads(record.dumps(found)) == found
    assert [row["note"] for row in found.rows if row["note"]] == []
    assert {row["part"] for row in found.rows} == set(kernels_bench.PARTS)
    for row in found.rows:
        assert min(float(str(row[name])) for name in ("ms_p20", "copy_ms", "copy_same_ms", "copy_share")) > 0
        assert row["cold"] is (row["part"] != "replay")
    assert len(kinds.grids(found)) == 4


# --- self-test --------------------------------------------------------------------------------------------------------


def test_the_self_test_finds_a_wrong_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode_sum(format: Any, wires_WN: Any, out: Any, **keys: Any) -> None:
        reference.decode_sum(format, wires_WN, out, **keys)
        if len(wires_WN) > 1:
            out[-1] = out[-1] + 1

    def fake_quantize_grad(*args: Any, **keys: Any) -> None:
        reference.fake_quantize_grad(*args, **keys)
        sums_2C = args[-1]
        sums_2C[1] *= -1

    wrong: Any = SimpleNamespace(
        **vars(reference) | {"decode_sum": decode_sum, "fake_quantize_grad": fake_quantize_grad}
    )
    monkeypatch.setattr(selftest, "codecs", lambda: [codec("int8"), codec("lloyd2")])
    compared, differing = selftest.differences(wrong, CPU)
    wires = 2 * len(selftest.SIZES) * len(selftest.DTYPES)
    fakes = len(selftest.FAKES) * len(selftest.FAKE_SHAPES) * len(selftest.DTYPES)
    assert compared == 5 * wires + 3 * fakes
    assert len(differing) == wires + fakes
    assert differing[0] == "decode_sum int8 torch.float32 numel=1"
    assert differing[-1].startswith("fake_quantize_grad sums Grid(")
    assert selftest.differences(reference, CPU) == (compared, [])


def test_the_self_test_finds_a_reference_that_loses_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    assert selftest.broken_reference() == []
    monkeypatch.setattr(selftest.reference, "decode_sum", lambda format, wires, out, **keys: out.fill_(torch.nan))
    assert len(selftest.broken_reference()) == len(selftest.codecs())
