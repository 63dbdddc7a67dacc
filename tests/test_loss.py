"""The loss study: replicas that read what ranks read, runs that resume, pairs and their verdicts."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import thinwire
from benchmarks import simulated
from benchmarks.loss import arms, curve, runs, sites, task
from cases import on_ranks
from replicas import Group, draw
from thinwire.errors import RecordError
from thinwire.integrations.choice import Chooser
from thinwire.integrations.choice.options import DDPOptions
from thinwire.integrations.models import ParameterNames
from thinwire.integrations.sync import GradientSync, gradients_in
from thinwire.tools import pairs

SHAPES = {"a": (40, 50), "c": (33, 61), "e": (64, 32), "b": (70,), "d": (9,)}  # what travels in 16 bits comes last
STEPS = 3


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))


@pytest.mark.parametrize(("codec", "feedback"), [("lloyd2", "ef21"), ("lloyd2", "classic"), ("trellis2", "none")])
@on_ranks(3)
def test_replicas_read_the_bits_that_ranks_read(group: Group, codec: str, feedback: Any) -> None:
    """At every step of DDP."""
    options = DDPOptions(codec, feedback=feedback, optimizer="adaptive", measure_every=0)
    names = ParameterNames()
    names.take(Weights())
    sync = GradientSync(Chooser(options, names))
    averager = simulated.ReplicaAverager(Weights(), options, 3)
    rows_WN = averager.new_rows()
    for step in range(STEPS):
        for rank, row in enumerate(rows_WN):
            torch.cat([part.view(-1) for part in draw(rank, step, SHAPES)], out=row)
        own = rows_WN[group.rank()].clone()
        sync.begin_step(group, step, own.device)
        sync.average(gradients_in(own, tuple(SHAPES), [torch.Size(s) for s in SHAPES.values()]), own).wait()
        averager.average(rows_WN, step)
        assert torch.equal(rows_WN[0], own)
    assert averager.feedback == feedback


def learn(model: nn.Module, rank: int, step: int) -> None:
    for parameter, part in zip(model.parameters(), draw(rank, step, SHAPES), strict=True):
        parameter.data.add_(part)


@pytest.mark.parametrize("codec", ["none", "topk"])
@on_ranks(2)
def test_sites_average_the_bits_that_ranks_average(group: Group, codec: str) -> None:
    """After every round of DiLoCo."""
    model, *networks = (Weights() for _ in range(3))
    diloco = thinwire.DiLoCo(model, None, every=1, codec=codec)
    outer = sites.OuterAverage(networks[0], "fp32" if codec == "none" else codec, 2)
    for step in range(STEPS):
        learn(model, group.rank(), step)
        diloco.step()
        for rank, network in enumerate(networks):
            learn(network, rank, step)
        outer.round(networks)
        for network in networks:
            assert all(map(torch.equal, network.parameters(), model.parameters()))
    assert outer.bits == 32.0 if codec == "none" else outer.bits < 8


def matrices(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.dim() > 1]


@pytest.mark.parametrize("name", ["int8", "lloyd4@replica"])
@on_ranks(2)
def test_weights_are_those_that_ranks_gather(group: Group, name: str) -> None:
    """What an FSDP2 model computes with at two steps, between which weights move."""
    model, network = (task.network_of(task.SIZES["tiny"], 0) for _ in range(2))
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    codec, _, replica = name.partition("@")
    thinwire.compress_fsdp(model, "none", codec, replica=bool(replica))
    rounded = arms.RoundedWeights(network, name, 2)
    for step in range(2):
        exact = [p.clone() for p in network.parameters()]
        rounded.load(step)
        for block, mine in zip(model.blocks, network.blocks, strict=True):
            block.unshard()
            for got, want in zip(matrices(mine), matrices(block), strict=True):
                assert torch.equal(got.bfloat16(), want)
            block.reshard()
        rounded.restore()
        for p in model.parameters():
            p.detach().to_local().mul_(1.0 + 0.01 * (step + 1))
        for got, want in zip(network.parameters(), exact, strict=True):
            assert torch.equal(got, want)
            got.data.mul_(1.0 + 0.01 * (step + 1))
    assert 8 < rounded.bits < 9 or name.startswith("lloyd4")


def test_finished_runs_are_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = torch.arange(4000).mul(7).bitwise_and(127).to(torch.uint8)
    monkeypatch.setattr(task, "sources", lambda most: task.Text(text, text, "digest"))
    out = tmp_path / "runs.jsonl"
    flags = ["--size", "tiny", "--steps", "3", "--world", "2", "--out", str(out)]

    def train(names: str, *more: str) -> list[tuple[str, int]]:
        monkeypatch.setattr(sys, "argv", ["runs", *flags, "--arms", names, *more])
        runs.main()
        return [(one["arm"], one["seed"]) for one in runs.read(out)]

    first = [("fp32", 1), ("int8", 1)]
    assert train("fp32,int8", "--seeds", "1") == first
    assert train("fp32,int8", "--seeds", "1,2", "--minutes", "-1") == first  # there was no time
    assert train("fp32,int8,powersgd1,int2", "--seeds", "1") == [*first, ("powersgd1", 1), ("int2", 1)]
    by = {one["arm"]: one for one in runs.read(out)}
    assert (
        0 < abs(by["int8"]["val_loss"] - by["fp32"]["val_loss"]) < abs(by["int2"]["val_loss"] - by["fp32"]["val_loss"])
    )
    assert by["fp32"]["tokens"] == 3 * 2 * 2 * 64
    assert 8 < by["int8"]["bits"] < 9
    train("lloyd2;lloyd2+letters*=int4;lloyd2+letters*=int4+first9=int8", "--seeds", "1")
    plain, policy, first = (one["bits"] for one in runs.read(out)[-3:])
    assert plain < policy < first  # of three steps none was in lloyd2 at last
    assert 2 < plain < 3
    assert 6 < first < 9
    train("lloyd2;lloyd2+feedback=classic", "--seeds", "1", "--optimizer", "muon")
    train("lloyd2+feedback=none", "--seeds", "1", "--optimizer", "muon")
    default, classic, alone = (one["val_loss"] for one in runs.read(out)[-3:])
    assert default == classic != alone
    assert train("weights:int4", "--seeds", "1")[-1] == ("weights:int4", 1)
    assert train("lloyd4", "--seeds", "1", "--optimizer", "diloco30")[-1] == ("lloyd4", 1)
    *_, rounded, averaged = runs.read(out)
    assert rounded["val_loss"] != by["fp32"]["val_loss"] != averaged["val_loss"]
    assert 4 < rounded["bits"] < 5 > averaged["bits"] > 4
    record = curve.recorded(list(by.values()))
    assert {row["arm"]: row["delta_nats"] == 0 for row in record.rows} == {
        "fp32": True, "int8": False, "powersgd1": True, "int2": False}  # fmt: skip


def test_powersgd_sends_a_matrix_of_its_rank_exactly() -> None:
    generator = torch.Generator().manual_seed(0)
    network = nn.Linear(20, 30)
    left, right = (torch.randn(n, 2, generator=generator) for n in (30, 20))
    powersgd = arms.PowerSGD(list(network.parameters()), 2, 3)
    rows = torch.stack([torch.cat([(c * left @ right.T).view(-1), torch.full((30,), c)]) for c in (1.0, 2.0, 6.0)])
    for step in (arms.POWERSGD_START, arms.POWERSGD_START + 1):
        got = rows.clone()
        powersgd.average(got, step)
    assert torch.allclose(got[0], rows.mean(0), atol=1e-4)  # errors of the first step were paid in the second
    assert powersgd.bits == 32 * (2 * 50 + 30) / 630


# --- pairs ------------------------------------------------------------------------------------------------------------


def test_an_interval_is_students() -> None:
    plain = {1: 1.0, 2: 1.1, 3: 1.2}
    found = pairs.difference({1: 1.01, 2: 1.12, 3: 1.23, 4: 9.9}, plain)
    assert found.gap == pytest.approx(0.02)
    assert found.half == pytest.approx(4.303 * 0.01 / math.sqrt(3))  # standard deviation 0.01, two degrees of freedom
    assert (found.seeds, (found.low or 0.0) < 0, found.none_seen) == (3, True, False)
    assert pairs.difference({1: 1.5}, plain).half is None
    with pytest.raises(RecordError, match="no seed"):
        pairs.difference({7: 1.0}, plain)
    assert pairs.t95(15) == 2.131
    assert pairs.t95(30) == pytest.approx(2.042, abs=0.01)
    assert pairs.t95(10_000) == pytest.approx(1.96, abs=0.001)


@pytest.mark.parametrize(
    ("gaps", "said"),
    [
        ((0.0004, 0.0006, 0.0005), "no difference seen"),
        ((0.1, 0.11, 0.12), "a loss"),
        ((-0.1, -0.11, -0.12), "better than"),
        ((-0.1, 0.1, 0.0), "undecided"),
        ((0.1,), "one pair"),
    ],
)
def test_verdicts(gaps: tuple[float, ...], said: str) -> None:
    plain = {seed: 2.0 + seed for seed in range(len(gaps))}
    found = pairs.difference({seed: plain[seed] + gap for seed, gap in enumerate(gaps)}, plain)
    assert said in pairs.verdict("lloyd4", found, -0.1)
