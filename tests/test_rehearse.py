"""Rehearsals: micro-batches in one process get the bits that real DDP ranks get; wrong use; the command."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner

import thinwire
from ranks import RankPool
from replicas import Group
from thinwire import CodecError, CollectiveError, NonfiniteError
from thinwire.rehearsal import buckets_of
from thinwire.tools import rehearsal
from thinwire.tools.bench import record
from thinwire.tools.cli.app import app

STEPS = 4


def network(wide: int = 300) -> nn.Module:
    """Several buckets of DDP: 300 * 900 floats are more than its first."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, wide), nn.Tanh(), nn.Linear(wide, 900), nn.LayerNorm(900), nn.Linear(900, 7))


class Experts(nn.Module):
    """The input picks one of them; nothing picks the last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(40, 8000)  # more than the first bucket
        self.experts = nn.ModuleList([nn.Linear(8000, 7) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[int(x[0, 0] > 0) + int(x[0, 0] > 0.8)](self.first(x))


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "adam":
        return torch.optim.AdamW(model.parameters(), 1e-3)
    return torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return model(torch.randn(5, 40, generator=generator)).square().mean() * (1 + rank)


def trained_by_ranks(group: Group, kind: str, options: dict[str, Any], accumulate: int) -> list[Tensor]:
    model = network() if kind != "experts" else Experts()
    ddp = DistributedDataParallel(model, process_group=group, find_unused_parameters=kind == "experts")
    optimizer = optimizer_of(kind, model)
    handle = thinwire.compress_ddp(ddp, optimizer=optimizer, **options)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(accumulate - 1):
            with ddp.no_sync():
                loss_of(ddp, step, group.rank() + part * group.size()).backward()
        loss_of(ddp, step, group.rank() + (accumulate - 1) * group.size()).backward()
        found.append(torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]))
        optimizer.step()
    assert handle.stats().steps == STEPS
    return found


def rehearsed(world: int, kind: str, options: dict[str, Any], accumulate: int) -> tuple[list[Tensor], Any]:
    model = network() if kind != "experts" else Experts()
    optimizer = optimizer_of(kind, model)
    handle = thinwire.rehearse(model, world=world, accumulate=accumulate, optimizer=optimizer, **options)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for micro in range(world * accumulate):
            loss_of(model, step, micro).backward()
        found.append(torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]))
        optimizer.step()
    return found, handle


@pytest.mark.parametrize(
    ("world", "kind", "options", "accumulate"),
    [
        (4, "adam", {"codec": "int8"}, 1),
        (3, "adam", {"codec": "lloyd2"}, 1),  # in Adam's units
        (4, "adam", {"codec": "trellis2", "exempt": "none"}, 1),
        (2, "adam", {"codec": "lloyd4"}, 1),  # one shot
        (3, "sgd", {"codec": "lloyd2"}, 1),  # classic feedback
        (2, "sgd", {"codec": "lloyd2", "feedback": "ef21"}, 1),
        (3, "adam", {"codec": "topk:fraction=0.05"}, 1),
        (4, "adam", {"codec": "auto:2.5", "replan_every": 2}, 1),
        (3, "adam", {"codec": {0: "int8", 2: "lloyd4"}, "policy": {"2.*": "int4"}}, 1),
        (2, "adam", {"codec": "int8", "algorithm": "two_phase"}, 2),
        (3, "experts", {"codec": "lloyd4"}, 1),
    ],
)
def test_gradients_have_the_bits_of_real_ranks(
    ranks: RankPool, world: int, kind: str, options: dict[str, Any], accumulate: int
) -> None:
    expected = ranks(world).run(trained_by_ranks, kind, options, accumulate)[0]
    found, handle = rehearsed(world, kind, options, accumulate)
    assert [torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True)] == [True] * STEPS
    assert handle.stats().steps == STEPS


def test_a_parameter_learns_that_only_the_first_micro_batch_left_out() -> None:
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    handle = thinwire.rehearse(model, "int8", world=2, accumulate=2)
    for step in range(2):
        model.zero_grad()
        for micro in range(4):
            torch.stack([layer(torch.ones(4)).sum() for layer in model[step + micro == 0 :]]).sum().backward()
        assert all(p.grad is not None and bool(p.grad.any()) for p in model.parameters())
        handle.step()


def stats_of_ranks(group: Group) -> Any:
    model = network()
    ddp = DistributedDataParallel(model, process_group=group)
    handle = thinwire.compress_ddp(ddp, "lloyd4")
    for step in range(2):
        loss_of(ddp, step, group.rank()).backward()
    return handle.stats()


def test_stats_are_those_of_a_rank(ranks: RankPool) -> None:
    expected = ranks(4).run(stats_of_ranks)[0]
    model = network()
    handle = thinwire.rehearse(model, "lloyd4", world=4)
    for step in range(2):
        for micro in range(4):
            loss_of(model, step, micro).backward()
        handle.step()
        model.zero_grad()
    found = handle.stats()
    for name in ("steps", "codec", "feedback", "bytes_sent", "bytes_plain"):
        assert getattr(found, name) == getattr(expected, name), name
    assert found.bits_per_element == pytest.approx(expected.bits_per_element, rel=1e-3)  # a rank counts old buckets
    assert found.relative_error == pytest.approx(expected.relative_error, rel=0.1)
    handle.close()
    loss_of(model, 0, 0).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_memory_without_feedback_is_little_more_than_a_gradient() -> None:
    """Live numbers between two turns: one row and the wires of ranks that had theirs."""
    before = large_storages()
    model = nn.Linear(1000, 1000, bias=False)
    thinwire.rehearse(model, "int8", world=8, measure_every=0)
    for _ in range(7):
        model(torch.randn(3, 1000)).sum().backward()
    weights = 4_000_000
    wires = 8 * 1.05e6 + 1.05e6  # of eight ranks, and of the sums: eight bits and scales
    live = sum(nbytes for place, nbytes in large_storages().items() if place not in before)
    assert weights + weights < live < weights + weights + wires  # the model, one gradient, wires


def large_storages() -> dict[int, int]:
    """Bytes by address."""
    gc.collect()
    found = [one for one in gc.get_objects() if isinstance(one, Tensor) and one.numel() > 10_000]
    return {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in found}


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda model, sgd: (loss_of(model, 0, 0).backward(), sgd.step()), "after 1 of 2 micro-batches"),
        (lambda model, sgd: [loss_of(model, 0, 0).backward() for _ in range(3)], "micro-batch 3 of a step that has 2"),
        (
            lambda model, sgd: (
                [f() for f in [loss_of(model, 0, 0).backward, loss_of(model, 0, 0).backward, sgd.step]]
                + [loss_of(model, 0, 0).backward()]
            ),
            r"call zero_grad\(\) after each step",
        ),
    ],
)
def test_wrong_use_raises(use: Callable[..., Any], said: str) -> None:
    model = network(8)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    thinwire.rehearse(model, "int8", world=2, optimizer=sgd)
    with pytest.raises(CollectiveError, match=said):
        use(model, sgd)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "needs a codec"),
        ({"codec": "auto"}, "name a codec"),
        ({"codec": "int8", "world": 0}, "world must be an integer"),
        ({"codec": "int8", "world": True}, "world must be an integer"),
        ({"codec": "int8", "accumulate": 1.5}, "accumulate must be an integer"),
        ({"codec": "int8", "policy": {"nobody*": "int4"}}, "matches none"),
    ],
)
def test_bad_options(options: dict[str, Any], said: str) -> None:
    with pytest.raises(CodecError, match=said):
        thinwire.rehearse(network(8), **options)
    with pytest.raises(TypeError):
        thinwire.rehearse(network(8), "int8", connections=3)  # type: ignore[call-arg]


def test_rules_name_parameters_as_compress_ddp_does() -> None:
    """Without the names of wrappers, such as torch.compile's."""
    wrapped = nn.Module()
    wrapped._orig_mod = nn.Linear(4, 4)
    thinwire.rehearse(wrapped, "int8", policy={"weight": "int4"})


def test_models_it_does_not_take() -> None:
    for given in (object.__new__(DistributedDataParallel), None):
        with pytest.raises(CollectiveError, match="the model that DDP wraps"):
            thinwire.rehearse(given, "int8")  # type: ignore[arg-type]
    with pytest.raises(CollectiveError, match="steps none of them"):
        thinwire.rehearse(network(8), "lloyd2", optimizer=torch.optim.SGD(network(8).parameters(), 0.1))
    model = network(8)
    model.register_parameter("phase", torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64)))
    with pytest.raises(CollectiveError, match="these are complex"):
        thinwire.rehearse(model, "int8")
    with pytest.raises(CollectiveError, match="only one_shot sums"):
        thinwire.rehearse(network(8), "topk", world=3, algorithm="two_phase")


@pytest.mark.parametrize("algorithm", ["auto", "two_phase"])
def test_one_rank_rounds_nothing(algorithm: str) -> None:
    model, plain = network(8), network(8)
    adam = torch.optim.Adam(model.parameters(), 0.1)
    handle = thinwire.rehearse(model, "lloyd2", world=1, optimizer=adam, algorithm=algorithm)
    for step in range(3):
        plain.load_state_dict(model.state_dict())
        plain.zero_grad()
        loss_of(plain, step, 0).backward()
        loss_of(model, step, 0).backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)
        adam.step()
        adam.zero_grad()
    assert handle.stats().bytes_sent == 0


def test_nan_of_one_rank_is_named() -> None:
    model = network(8)
    thinwire.rehearse(model, "int8", world=3, on_nonfinite="raise")
    loss_of(model, 0, 0).backward()
    (loss_of(model, 0, 1) * float("nan")).backward()
    with pytest.raises(NonfiniteError, match=r"on rank 1 holds NaN"):
        loss_of(model, 0, 2).backward()


def test_a_skipped_step_of_a_scaler_is_not_wrong_use() -> None:
    model = network(8)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    thinwire.rehearse(model, "int8", world=2, optimizer=sgd)
    for factor in (float("inf"), 1.0):
        for micro in range(2):
            (loss_of(model, 0, micro) * factor).backward()
        if factor == 1.0:
            sgd.step()
        sgd.zero_grad()


def test_buckets_by_size() -> None:
    sizes = [100_000, 200_000, 3_000_000, 5_000_000, 10]
    parameters = [nn.Parameter(torch.empty(n, device="meta")) for n in sizes]
    assert [[p.numel() for p in bucket] for bucket in buckets_of(parameters)] == [sizes[:2], sizes[2:4], sizes[4:]]
    assert [len(bucket) for bucket in buckets_of(parameters, first=True)] == [5]


# --- the command ------------------------------------------------------------------------------------------------------

EXAMPLE = Path(__file__).parent.parent / "examples" / "rehearse.py"
SCRIPT = """
import torch, thinwire
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
handle = thinwire.rehearse(model, world=4)
for step in range(40):
    for _ in range(4):
        x = torch.randn(8, 16)
        loss = (model(x).squeeze() - x[:, 0].sin() * x[:, 1]).square().mean()
        loss.backward()
    handle.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * (1 - step / 40) * parameter.grad
            parameter.grad = None
    if step % 10 == 9:
        with torch.no_grad():
            x = torch.randn(2048, 16, generator=torch.Generator().manual_seed(7))
            thinwire.report_loss((model(x).squeeze() - x[:, 0].sin() * x[:, 1]).square().mean())
"""


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts run here, where torch is imported; test_a_script_that_fails has a process of its own."""

    def run(command: list[str], env: dict[str, str], **how: Any) -> subprocess.CompletedProcess[str]:
        with monkeypatch.context() as patch:
            patch.setattr(os, "environ", env)
            patch.setattr(sys, "argv", command[2:])
            patch.setattr(sys, "path", [*sys.path])
            rehearsal.main()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(rehearsal, "subprocess", SimpleNamespace(run=run))


@pytest.mark.usefixtures("in_this_process")
def test_the_verdict_tells_int2_from_int8(tmp_path: Path) -> None:
    script, written = (tmp_path / name for name in ("train.py", "record.json"))
    script.write_text(SCRIPT)
    flags = ["--codecs", "int8,int2", "--world", "4", "--seeds", "2", "--json", str(written)]
    result = CliRunner().invoke(app, ["rehearse", str(script), *flags])
    assert result.exit_code == 0, result.output
    rows: dict[Any, Any] = {row["arm"]: row for row in record.read(str(written)).rows}
    assert list(rows) == ["none", "null", "int8", "int2"]
    assert rows["none"]["delta_nats"] == 0
    assert abs(rows["null"]["delta_nats"]) < 1e-4  # chance alone; the script draws the same numbers
    assert abs(rows["int8"]["delta_nats"]) < 0.2 * rows["int2"]["delta_nats"]
    assert 8 < rows["int8"]["bits"] < 9
    assert {rows[arm]["verdict"] for arm in ("null", "int8", "int2")} <= set(result.stdout.splitlines())


@pytest.mark.usefixtures("in_this_process")
def test_the_example_is_rehearsed() -> None:
    flags = ["--codecs", "int8", "--world", "4", "--seeds", "1", "--", "--steps", "10"]
    result = CliRunner().invoke(app, ["rehearse", str(EXAMPLE), *flags])
    assert (result.exit_code, "int8: " in result.stdout) == (0, True), result.output


def test_a_script_that_fails(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('out of coffee')")
    result = CliRunner().invoke(app, ["rehearse", str(script), "--seeds", "1"])
    assert (result.exit_code, "out of coffee" in result.stderr) == (1, True)


@pytest.mark.usefixtures("in_this_process")
def test_a_script_that_reports_nothing(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    result = CliRunner().invoke(app, ["rehearse", str(script), "--seeds", "1"])
    assert (result.exit_code, "reported no loss" in result.stderr) == (1, True)


def test_bad_flags(tmp_path: Path) -> None:
    assert "not a file" in CliRunner().invoke(app, ["rehearse", "no_such.py"]).stderr
    (tmp_path / "x.py").touch()
    for flags, said in ((["--codecs", "auto"], "name codecs"), (["--codecs", "int9"], "int9")):
        result = CliRunner().invoke(app, ["rehearse", str(tmp_path / "x.py"), *flags])
        assert (result.exit_code, said in result.stderr) == (2, True), result.stderr
