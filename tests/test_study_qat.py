"""The benchmark of quantization-aware training: what a run hands back."""

from pathlib import Path

import pytest
from typer.testing import Result

from benchmarks import data, qat
from benchmarks.qat import METHODS
from test_studies import invoke
from thinwire.tools.bench import record

pytestmark = pytest.mark.usefixtures("served")


def call(*arguments: str) -> Result:
    found: Result = invoke(qat.command, *arguments)
    return found


def test_a_speed_run_end_to_end(tmp_path: Path) -> None:
    path = tmp_path / "qat.json"
    result = call("--parts", "speed", "--numel", "5000", "--quick", "--json", str(path))
    assert result.exit_code == 0, result.output
    rows = record.read(str(path)).rows
    labels = [(row["dtype"], row["gradient"], row["granularity"], row["op"]) for row in rows]
    assert len(labels) == len(set(labels)) == 2 * 2 * 2 * 3
    for row in rows:
        assert (row["numel"], row["threads"], row["note"], row["torch_note"]) == (5000, 1, None, None)
        assert row["ms_p50"] / row["floor_ms"] == row["times_floor"]  # type: ignore[operator]
        assert row["torch_ms"] / row["ms_p50"] == row["times_torch"]  # type: ignore[operator]
        assert (row["peak_bytes_per_element"] is None) == (row["op"] != "forward_backward")


TINY = qat.QATSchedule(1, 1, widths=(4, 4, 4))


@pytest.fixture
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = data.digits()
    monkeypatch.setattr(data, "digits", lambda: (images[:250], labels[:250]))
    monkeypatch.setattr(qat, "QUICK", TINY)
    qat._trained_in_fp32.cache_clear()


@pytest.mark.usefixtures("_tiny")
def test_a_training_run_end_to_end(tmp_path: Path) -> None:
    path = tmp_path / "qat.json"
    result = call("--parts", "train", "--bits", "8", "--seeds", "1", "--quick", "--json", str(path))
    assert result.exit_code == 0, result.output
    assert "torch_learnable" in result.output
    rows = record.read(str(path)).rows
    assert [(row["method"], row["weight_bits"]) for row in rows] == [
        (name, 32 if name == "fp32" else 8) for name in METHODS
    ]
    for row in rows:
        assert (row["seeds"], row["first_last_bits"], row["act_bits"]) == (1, row["weight_bits"], row["weight_bits"])
        assert row["rate"] == (0.005 if row["weight_bits"] == 8 else 0.05)
        assert row["diverged"] or 0 <= float(str(row["accuracy"])) <= 1
    assert {row["method"] for row in rows if row["control"]} == {"absmax_ste", "lsq_no_grad_scale", "lsq_absmax_init"}
    assert [row["method"] for row in rows if row["peer"]] == ["torch_learnable"]
