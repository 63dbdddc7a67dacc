"""Simulated replicas: the same bits as real ranks, runs that are kept and gone on with, and the text of `bytes`."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from ranks import RankPool
from replicas import Group, draw
from thinwire.integrations.choice import Chooser
from thinwire.integrations.choice.options import DDPOptions
from thinwire.integrations.models import ParameterNames
from thinwire.integrations.sync import GradientSync, gradients_in
from thinwire.tools.bench import simulated, tasks
from thinwire.tools.cli.app import app

SHAPES = {"a": (40, 50), "c": (33, 61), "e": (64, 32), "b": (70,), "d": (9,)}  # what travels in 16 bits comes last
STEPS = 3


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))


def averaged_by_ranks(group: Group, options: DDPOptions) -> list[Tensor]:
    """What a rank of DDP reads at every step."""
    names = ParameterNames()
    names.take(Weights())
    averager = GradientSync(options, Chooser(options, names))
    found = []
    for step in range(STEPS):
        row = torch.cat([part.view(-1) for part in draw(group.rank(), step, SHAPES)])
        averager.begin_step(group, step, row.device)
        averager.average(gradients_in(row, tuple(SHAPES), [torch.Size(s) for s in SHAPES.values()]), row).wait()
        found.append(row)
    return found


@pytest.mark.parametrize(
    ("codec", "feedback"),
    [("lloyd2", "ef21"), ("lloyd2", "classic"), ("lloyd2", "none"), ("int8", "none"), ("none", "none")],
)
def test_replicas_read_the_bits_that_ranks_do(ranks: RankPool, codec: str, feedback: Any) -> None:
    options = DDPOptions(codec, feedback=feedback, optimizer="adaptive", measure_every=0)
    expected = ranks(3).run(averaged_by_ranks, options)[0]
    averager = simulated.ReplicaAverager(Weights(), options, 3)
    rows_WN = averager.new_rows()
    for step in range(STEPS):
        for rank, row in enumerate(rows_WN):
            torch.cat([part.view(-1) for part in draw(rank, step, SHAPES)], out=row)
        averager.average(rows_WN, step)
        if codec == "none":
            assert torch.allclose(rows_WN[0], expected[step], atol=1e-6)  # gloo adds in another order
        else:
            assert torch.equal(rows_WN[0], expected[step])
    assert averager.feedback == feedback


def test_bits_are_dealt_out_by_the_errors_of_all_replicas() -> None:
    averager = simulated.ReplicaAverager(Weights(), DDPOptions("auto:3", feedback="none", measure_every=0), 2)
    rows_WN = averager.new_rows()
    for step in range(2):
        torch.manual_seed(step)
        rows_WN.normal_()
        averager.views(rows_WN[1])[1].mul_(100.0)  # the second weight of one replica
        averager.average(rows_WN, step)
    widths = {name: str(codec) for name, codec in (averager.chooser.agreed.widths or {}).items()}
    assert widths["c"] > max(widths["a"], widths["e"])


def invoke(*flags: str) -> Any:
    return CliRunner().invoke(app, ["bench", "train", "--task", "bytes", "--quick", "--world", "2", *flags])


def test_a_run_goes_on_where_the_last_one_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = torch.arange(4000, dtype=torch.uint8)
    monkeypatch.setattr(tasks, "sources", lambda: (text, text))
    monkeypatch.setattr(tasks, "QUICK_BYTES", replace(tasks.QUICK_BYTES, steps=3))
    shelf, record = tmp_path / "runs.jsonl", tmp_path / "record.json"
    flags = ["--codecs", "lloyd2@none,bf16", "--resume", str(shelf), "--json", str(record)]
    first = invoke(*flags, "--seeds", "1")
    assert first.exit_code == 0, first.output
    kept = shelf.read_text().splitlines()
    assert [json.loads(line)["run"]["scheme"] for line in kept] == ["none", "lloyd2@none", "bf16"]
    again = invoke(*flags, "--seeds", "2", "--minutes", "0")
    assert shelf.read_text().splitlines() == kept  # there was no time for the second seed
    assert json.loads(record.read_text())["rows"] == []
    assert invoke(*flags, "--seeds", "1", "--minutes", "0").exit_code == again.exit_code == 0
    plain, lloyd, bf16 = json.loads(record.read_text())["rows"]
    assert plain["loss_log_ratio"] == 0 != lloyd["loss_log_ratio"]
    assert bf16["bytes_over_plain"] == 0.5 > lloyd["bytes_over_plain"] > 2 / 32
    assert plain["curve"][-1][0] == 3
    assert len(plain["text"]) == 16


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--parallel", "ddp"], "bytes is trained by simulated replicas"),
        (["--link", "1gbit"], "simulated replicas have no link"),
        (["--codecs", "powersgd1"], "simulated replicas have no powersgd1"),
        (["--optimizer", "sgd"], "is trained with adamw or muon, got 'sgd'"),
        (["--resume", "no/such/folder/runs"], "cannot be written: name a file in a folder that exists"),
        (["--task", "gpt", "--size", "3m"], "goes with --parallel simulated"),
        (["--task", "gpt", "--parallel", "simulated", "--size", "3m"], "goes with --task bytes"),
    ],
)
def test_bad_flags(flags: list[str], complaint: str) -> None:
    result = invoke(*flags)
    assert result.exit_code == 2, result.output
    assert complaint in " ".join(result.stderr.replace("│", "").split())


@pytest.mark.parametrize("held", [b"{}\n", b"\xff\xfe"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, held: bytes) -> None:
    (tmp_path / "x").write_bytes(held)
    result = invoke("--resume", str(tmp_path / "x"))
    assert (result.exit_code, "does not hold runs" in result.stderr) == (2, True)


def test_whole_packages_are_held_out() -> None:
    named = dict(tasks._files())
    assert {"torch/nn/__init__.py", "pydoc_data/topics.py", "asyncio/__init__.py"} <= set(named)
    assert not any("site-packages" in name for name in named)


@pytest.mark.parametrize(("size", "weights"), [("250k", 273_024), ("3m", 3_290_624), ("30m", 28_634_624)])
def test_sizes(size: str, weights: int) -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in tasks.SIZES[size].network().parameters()) == weights
