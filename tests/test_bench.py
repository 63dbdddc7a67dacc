"""The benchmarks and their records: the schema, the inputs, the formulas, and what a run hands back."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from thinwire.bench import codec as codec_bench, data, kernels as kernels_bench, record, selftest, timing
from thinwire.codecs import codec
from thinwire.kernels import BACKENDS, reference, use_backend

CPU = torch.device("cpu")
CODEC_ROW: record.Row = {
    "distribution": "gaussian",
    "codec": "int8",
    "wire_bits": 8.125,
    "nmse": 4.2e-5,
    "db_above_rd": 5.1,
    "lloyd_max_nmse": None,
}


@pytest.fixture(autouse=True)
def _served() -> Iterator[None]:
    """Where the C kernels were not built, ask for the reference rather than be warned of it."""
    with use_backend("auto" if BACKENDS["cpu"].unavailable() is None else "reference"):
        yield


def a_record(**changes: Any) -> record.Record:
    return replace(record.Record("codec", record.conditions(CPU), [CODEC_ROW]), **changes)


# --- the schema -------------------------------------------------------------------------------------------------------


def test_the_columns_scripts_rely_on() -> None:
    kernels = "op codec backend device dtype numel world threads ms_p50 ms_p20 ms_p80"
    shares = "copy_ms times_copy copy_share times_eager"
    assert set(record.COLUMNS) == {"codec", "kernels", "collectives", "train", "qat"}
    assert set(record.COLUMNS["codec"]) == set(CODEC_ROW)
    assert set(record.COLUMNS["kernels"]) == {*kernels.split(), *shares.split()}


def test_a_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = str(tmp_path / "record.json")
    written = a_record(rows=[CODEC_ROW, {**CODEC_ROW, "extra": "é"}])
    record.write(written, path)
    assert record.read(path) == written
    assert json.loads(Path(path).read_text())["schema"] == 1


def test_a_record_without_rows_comes_back() -> None:
    assert record.loads(record.dumps(a_record(rows=[]))) == a_record(rows=[])


def test_dash_is_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    record.write(a_record(), "-")
    assert record.loads(capsys.readouterr().out) == a_record()


def test_json_has_no_nan() -> None:
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


def test_a_speed_row_of_qat_has_its_own_columns() -> None:
    speed: record.Row = dict.fromkeys(record.QAT_SPEED)
    assert record.columns("qat", speed) == record.QAT_SPEED
    assert "accuracy" in record.columns("qat", {})


def test_conditions_are_complete_and_name_no_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sys.argv", ["/home/me/bin/thinwire", "bench", "--json=/home/me/a.json", "--json", "b/c d.json"]
    )
    found = record.conditions(CPU)
    assert tuple(found) == record.CONDITIONS
    assert found["command"] == "thinwire bench --json=a.json --json 'c d.json'"
    assert found["device"] == "cpu"
    assert found["cpu"]


def test_commit_is_that_of_the_checkout() -> None:
    commit = record.conditions(CPU)["commit"]
    assert commit is None or len(str(commit).removesuffix("-dirty")) == 40


def test_ctrl_c_keeps_the_finished_rows() -> None:
    def rows() -> Iterator[record.Row]:
        yield CODEC_ROW
        raise KeyboardInterrupt

    with pytest.raises(record.Interrupted) as stop:
        record.collect("codec", CPU, rows())
    assert stop.value.record.rows == [CODEC_ROW]
    assert stop.value.record.conditions["interrupted"] is True


# --- the inputs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", data.DISTRIBUTIONS)
def test_inputs_repeat_and_leave_the_global_generator_alone(name: str) -> None:
    before = torch.get_rng_state()
    first = data.sample(name, 5000)
    data.sample.cache_clear()
    again = data.sample(name, 5000)
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


def test_nmse_is_the_lost_share_of_the_energy() -> None:
    x = torch.tensor([3.0, 4.0])
    assert codec_bench.nmse(x, torch.zeros(2)) == 1
    assert codec_bench.nmse(x, torch.tensor([3.0, 3.0])) == pytest.approx(1 / 25)


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


def a_case(op: str, spec: str = "int8", dtype: torch.dtype = torch.float32, numel: int = 1280) -> kernels_bench.Case:
    return kernels_bench.Case(op, codec(spec), dtype, numel, 1, CPU)


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


def test_copy_share() -> None:
    case = a_case("encode", dtype=torch.bfloat16)
    moved, copied = 2 * 1280 + 1344, 2 * 2 * 1280
    assert kernels_bench.copy_share(case, ms=moved, copy_ms=copied) == pytest.approx(1)  # the same bytes a second
    assert kernels_bench.copy_share(case, ms=2 * moved, copy_ms=copied) == pytest.approx(0.5)


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


def test_a_kernels_run() -> None:
    before = torch.get_num_threads()
    found = kernels_bench.run("cpu", ["int8", "lloyd1"], 4096, threads=[1, before + 1], quick=True)
    assert torch.get_num_threads() == before
    assert record.loads(record.dumps(found)) == found
    per_count = len(kernels_bench.OPS) * 2 + len(kernels_bench.OPS) - 1  # int8 on bfloat16 too, but for the recode
    assert len(found.rows) == 2 * per_count
    for row in found.rows:
        numbers = [float(str(row[name])) for name in ("ms_p20", "ms_p50", "ms_p80", "copy_ms")]
        assert numbers[:3] == sorted(numbers[:3])
        assert min(numbers) > 0
        assert row["times_copy"] == pytest.approx(numbers[1] / numbers[3])
        assert row["world"] == (4 if row["op"] in ("decode_sum", "recode") else 1)
        assert row["times_compile"] is None
        assert (row["times_eager"] is None) == (row["backend"] == "reference")


def test_the_reference_is_not_compared_with_itself() -> None:
    with use_backend("reference"):
        found = kernels_bench.run("cpu", ["int8"], 1000, ["decode"], ["float32"], [1], quick=True)
    assert [(row["backend"], row["times_eager"], row["eager_numel"]) for row in found.rows] == [
        ("reference", None, None)
    ]


def test_calls_are_interleaved_and_the_first_round_is_not_counted() -> None:
    made: list[str] = []
    times = timing.interleave({"a": lambda: made.append("a"), "b": lambda: made.append("b")}, 3, CPU)
    assert made == ["a", "b"] * 4
    assert [len(taken) for taken in times.values()] == [3, 3]


def test_percentiles() -> None:
    assert timing.percentiles([float(i) for i in range(11)]) == (2, 5, 8)


# --- self-test --------------------------------------------------------------------------------------------------------


def test_the_self_test_finds_a_wrong_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode_sum(format: Any, wires_WN: Any, out: Any, **keys: Any) -> None:
        reference.decode_sum(format, wires_WN, out, **keys)
        if len(wires_WN) > 1:
            out[-1] = out[-1] + 1

    wrong: Any = SimpleNamespace(encode=reference.encode, decode_sum=decode_sum, recode=reference.recode)
    monkeypatch.setattr(selftest, "codecs", lambda: [codec("int8"), codec("lloyd2")])
    compared, differing = selftest.differences(wrong, CPU)
    assert compared == 2 * len(selftest.SIZES) * len(selftest.DTYPES) * 5
    assert len(differing) == compared // 5
    assert differing[0] == "decode_sum int8 torch.float32 numel=1"
    assert selftest.differences(reference, CPU) == (compared, [])


def test_the_self_test_finds_a_reference_that_loses_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    assert selftest.broken_reference() == []
    monkeypatch.setattr(selftest.reference, "decode_sum", lambda format, wires, out, **keys: out.fill_(torch.nan))
    assert len(selftest.broken_reference()) == len(selftest.codecs())
