"""The benchmark of quantisation-aware training: what a run hands back, its formulas, its flags."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner, Result

from thinwire.bench import qat, qat_speed, record, timing
from thinwire.cli.app import app
from thinwire.kernels import BACKENDS, use_backend

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _served() -> Iterator[None]:
    """Where the C kernels were not built, ask for the reference rather than be warned of it."""
    with use_backend("auto" if BACKENDS["cpu"].unavailable() is None else "reference"):
        yield


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "qat", *arguments], prog_name="thinwire")


# --- speed ------------------------------------------------------------------------------------------------------------


def a_case(**changes: Any) -> qat_speed.Case:
    usual = qat_speed.Case("channel", torch.float32, "torch", 4096, 1, CPU, qat_speed.Effort(1))
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


@pytest.mark.parametrize(("numel", "shape"), [(1, (1, 1)), (4096, (64, 64)), (5000, (50, 100)), (13, (1, 13))])
def test_the_matrix_is_nearly_square(numel: int, shape: tuple[int, int]) -> None:
    assert a_case(numel=numel).shape == shape


@pytest.mark.parametrize("grain", qat_speed.GRAINS)
def test_both_do_the_same_work(grain: str) -> None:
    """By torch's rule the outputs are torch's; the parameters' gradients too, but for the order of their sums."""
    ours, theirs = qat_speed.subjects(a_case(grain=grain))
    torch.testing.assert_close(ours.apply(), theirs.apply(), rtol=0, atol=0)
    found, expected = (torch.autograd.grad(each.apply(), each.inputs, each.grad) for each in (ours, theirs))
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0)
    for mine, other in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=4096 * 2**-23 * expected[0].abs().max().item())


def test_the_peak_is_what_lies_there_beyond_inputs_and_output() -> None:
    """A product keeps its second factor until the backward, which makes one tensor more: two beyond x, y and dy."""
    x = torch.ones(1000, 1000, requires_grad=True)
    subject = qat_speed.Subject("ours", lambda: x * torch.ones(1000, 1000), [x], torch.ones(1000, 1000))
    assert qat_speed.peak_bytes(subject, CPU) == 2 * x.nbytes


def test_a_rival_that_fails_costs_its_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> Tensor:
        raise RuntimeError("internal assert\nat line 1")

    monkeypatch.setattr(torch, "_fake_quantize_learnable_per_channel_affine", broken)
    rows = list(a_case().rows())
    assert [row["op"] for row in rows] == list(qat_speed.OPS)
    for row in rows:
        assert (row["torch_note"], row["note"]) == ("RuntimeError: internal assert", None)
        assert row["times_torch"] is row["torch_ms"] is row["torch_peak_bytes_per_element"] is None
        assert row["times_floor"] is not None


def test_a_kernel_that_fails_is_a_row_without_times(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **options: Any) -> Tensor:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(qat_speed, "fake_quantize", broken)
    result = call("--parts", "speed", "--numel", "64", "--quick")
    assert result.exit_code == 1
    assert "forward float32, 64 elements: RuntimeError: no such kernel" in result.stderr


def test_times_are_held_against_floor_and_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {"floor forward": 2.0, "floor backward": 3.0, "ours forward_backward": 10.0, "torch forward_backward": 40.0}

    def interleave(calls: dict[str, timing.Call], *effort: object) -> dict[str, list[float]]:
        return {name: [taken.get(name, 1.0)] for name in calls}

    monkeypatch.setattr(timing, "interleave", interleave)
    forward, backward, both = a_case().rows()
    assert (forward["times_floor"], backward["times_floor"], both["times_floor"]) == (1 / 2, 1 / 3, 10 / 5)
    assert (both["times_torch"], both["torch_times_floor"]) == (4, 8)


def test_ctrl_c_keeps_the_finished_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    finished = list(a_case().rows())

    def third_is_interrupted(case: qat_speed.Case) -> Iterator[record.Row]:
        if case.gradient == "torch":
            raise KeyboardInterrupt
        yield from finished

    monkeypatch.setattr(qat_speed.Case, "rows", third_is_interrupted)
    with pytest.raises(record.Interrupted) as stop:
        qat.run(parts=["speed"], quick=True)
    assert len(stop.value.record.rows) == 2 * len(qat_speed.OPS)
    assert stop.value.record.conditions["interrupted"]


# --- flags ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--parts", "speed,nothing"], "'nothing' is not one of speed"),
        (["--numel", "0"], "greater than or equal to 1"),
        (["--threads", "0"], "greater than or equal to 1"),
        (["--device", "tpu"], "'cpu', 'cuda'"),
    ],
)
def test_bad_flags_say_what_is_allowed(arguments: list[str], said: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_is_refused_where_there_is_none() -> None:
    assert "use --device cpu" in call("--device", "cuda").stderr
