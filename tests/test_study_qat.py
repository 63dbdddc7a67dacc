"""The benchmark of quantization-aware training: what a run hands back, its formulas, its flags."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import Result

from benchmarks import clock, data, qat, qat_speed
from benchmarks.qat import METHODS
from test_studies import invoke
from thinwire.tools.bench import record

pytestmark = pytest.mark.usefixtures("served")
CPU = torch.device("cpu")


def call(*arguments: str) -> Result:
    found: Result = invoke(qat.command, *arguments)
    return found


def a_case(**changes: Any) -> qat_speed.SpeedCase:
    usual = qat_speed.SpeedCase("channel", torch.float32, "torch", 4096, CPU, clock.KernelEffort(1))
    return replace(usual, **changes)


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


@pytest.mark.parametrize("grain", qat_speed.GRAINS)
def test_both_do_the_same_work(grain: str) -> None:
    """By torch's rule the outputs are torch's; the parameters' gradients too, but for the order of their sums."""
    ours, theirs = qat_speed.subjects(a_case(grain=grain))
    torch.testing.assert_close(ours.apply(), theirs.apply(), rtol=0, atol=0)
    found, expected = (torch.autograd.grad(each.apply(), each.inputs, each.grad) for each in (ours, theirs))
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0)
    for mine, other in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=4096 * 2**-23 * expected[0].abs().max().item())


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
