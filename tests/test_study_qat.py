"""The benchmark of quantization-aware training: what a run hands back, its formulas, its flags."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import Result

from benchmarks import clock, data, qat, qat_speed
from benchmarks.qat import METHODS
from test_studies import invoke
from thinwire.qat import LSQ
from thinwire.qat.layers import QuantizedLayer
from thinwire.tools.bench import record
from thinwire.tools.bench.timing import Call

pytestmark = pytest.mark.usefixtures("served")
CPU = torch.device("cpu")


def call(*arguments: str) -> Result:
    found: Result = invoke(qat.command, *arguments)
    return found


# --- speed ------------------------------------------------------------------------------------------------------------


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

    def interleave(calls: dict[str, Call], *effort: object) -> dict[str, list[float]]:
        return {name: [taken.get(name, 1.0)] for name in calls}

    monkeypatch.setattr(clock, "interleave", interleave)
    forward, backward, both = a_case().rows()
    assert (forward["times_floor"], backward["times_floor"], both["times_floor"]) == (1 / 2, 1 / 3, 10 / 5)
    assert (both["times_torch"], both["torch_times_floor"]) == (4, 8)


# --- training ---------------------------------------------------------------------------------------------------------

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


def test_what_tells_nothing_at_more_bits_is_trained_at_the_fewest() -> None:
    usual = [(run.bits, run.method) for run in qat.runs(TINY, None, (4, 2), 1, CPU)]
    assert [method for bits, method in usual if bits in (2, 32)] == list(METHODS)
    assert [method for bits, method in usual if bits == 4] == [*list(METHODS)[1:5], "absmax_ste"]
    asked = [(run.bits, run.method) for run in qat.runs(TINY, ("lsq_no_floor",), (4, 2), 1, CPU)]
    assert asked == [(4, "lsq_no_floor"), (2, "lsq_no_floor")]


@pytest.mark.usefixtures("_tiny")
def test_a_seed_fixes_a_training_and_fp32_is_trained_once_per_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[tuple[int, int]] = []
    train = qat.train

    def counted(model: nn.Module, seen: qat.Split, epochs: int, rate: float, seed: int) -> bool:
        trained.append((epochs, seed))
        return train(model, seen, epochs, rate, seed)

    monkeypatch.setattr(qat, "train", counted)
    first, again = (qat.run(parts=["train"], methods=["fp32", "lsq"], bits=[2], quick=True) for _ in range(2))
    timeless = [[{**row, "seconds": None} for row in each.rows] for each in (first, again)]
    assert timeless[0] == timeless[1]
    before, after, later = TINY.before, TINY.after, 1 + qat.LATER
    assert trained[:4] == [(before, 0), (after, qat.LATER), (before, 1), (after, later)]
    assert trained[4:] == 3 * [(after, qat.LATER), (after, later)]


@pytest.mark.usefixtures("_tiny")
def test_a_scale_that_dies_is_a_row_without_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(self: LSQ, x: Tensor, rows: Tensor | None = None) -> Tensor:
        if torch.is_grad_enabled():
            raise ValueError("a scale must be positive")
        return x

    monkeypatch.setattr(qat.NoGradientScale, "forward", dies)
    (row,) = qat.run(parts=["train"], methods=["lsq_no_grad_scale"], quick=True).rows
    assert (row["diverged"], row["train_loss"], row["accuracy"]) == (2, None, None)


def test_other_splits_for_other_seeds_and_no_image_in_both_parts() -> None:
    first, second = (qat.split(seed, CPU) for seed in (0, 1))
    assert not torch.equal(first.test_images, second.test_images)
    assert len(first.labels) + len(first.test_labels) == 1797
    together = torch.cat([first.images, first.test_images]).flatten(1).sum(0)
    assert torch.equal(together, torch.cat([second.images, second.test_images]).flatten(1).sum(0))


def started(name: str, bits: int = 2) -> nn.Module:
    model = qat.network(TINY, 0)
    METHODS[name].start(model, qat.split(0, CPU).images[:64], bits)
    return model


def layers(model: nn.Module) -> list[QuantizedLayer]:
    return [module for module in model.modules() if isinstance(module, QuantizedLayer)]


@pytest.mark.parametrize("name", [name for name in METHODS if name != "fp32"])
def test_all_methods_quantise_the_same_places(name: str) -> None:
    quantised = layers(started(name))
    assert [type(layer).__name__ for layer in quantised] == ["QuantizedConv2d"] * 3 + ["QuantizedLinear"]
    for layer in quantised:
        assert all(len(row.unique()) <= 4 for row in layer.quantized_weight().detach().flatten(1))
        x = torch.linspace(0, 2, 1000).expand(1, 1, -1)
        assert len(layer.quantized_input(x).detach().unique()) <= 4


def test_absmax_starts_clip_nothing() -> None:
    for layer in layers(started("lsq_absmax_init")):
        weight = layer.weight.detach().flatten(1)
        assert torch.equal(layer.weight_quantizer.scale.detach(), weight.abs().amax(1) / 1)
    first = layers(started("lsq_absmax_init"))[0].act_quantizer
    assert first is not None
    assert first.scale.item() == pytest.approx(1 / 3, rel=1e-6)  # images reach from 0 to 1, on the integers 0 to 3


def test_what_holds_a_scale_up_and_what_does_not() -> None:
    x = torch.linspace(-1, 1, 100)
    for kind in (LSQ, qat.FloorAlone, qat.NoFloor, qat.NoGradientScale):
        quantizer = kind(2).initialize(x)
        quantizer.scale.data.fill_(-1)
        held = not issubclass(kind, qat.NoFloor)
        with (
            contextlib.nullcontext()
            if held
            else pytest.raises(ValueError, match="a scale and its inverse must be positive")
        ):
            assert torch.isfinite(quantizer(x)).all()


def test_torchs_module_and_ours_by_its_names_start_alike() -> None:
    """The same network and images: every output agrees but for a value on the very edge of a step, here none."""
    images = qat.split(0, CPU).images[:64]
    ours, theirs = started("learnable"), started("torch_learnable")
    torch.testing.assert_close(ours.eval()(images), theirs.eval()(images), rtol=1e-5, atol=1e-5)
    learned = [sum(p.requires_grad for p in model.parameters()) for model in (ours, theirs)]
    assert learned[0] == learned[1] > 2 * 2 * 4


# --- flags ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--parts", "speed,nothing"], "'nothing' is not one of speed, train"),
        (["--methods", "lsq,adam"], "'adam' is not one of fp32, lsq, lsqplus"),
        (["--bits", "1"], "from 2 to 8, got"),
        (["--bits", "2,9"], "from 2 to 8, got"),
        (["--bits", "two"], "got 'two'"),
        (["--parts", "speed", "--methods", "lsq"], "is of the part train"),
        (["--parts", "train", "--numel", "64"], "is of the part speed"),
        (["--seeds", "0"], "greater than or equal to 1"),
        (["--numel", "0"], "greater than or equal to 1"),
        (["--device", "tpu"], "'cpu', 'cuda'"),
    ],
)
def test_bad_flags_say_what_is_allowed(arguments: list[str], said: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_is_refused_where_there_is_none() -> None:
    assert "use --device cpu" in call("--device", "cuda").stderr


def test_without_scikit_learn_training_is_an_error_before_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "find_spec", lambda name: None)
    monkeypatch.setattr(qat_speed, "cases", lambda *arguments: pytest.fail("measured"))
    result = call("--parts", "train")
    assert result.exit_code == 1
    assert "pip install 'thinwire[bench]'" in result.stderr


def test_parts_that_are_not_asked_for_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "check_digits", lambda *told: pytest.fail("trained"))
    monkeypatch.setattr(qat_speed, "cases", lambda *arguments: [])
    assert qat.run(parts=["speed"]).rows == []
