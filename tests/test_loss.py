"""The loss study: replicas that read what ranks read, runs that resume, pairs and their verdicts."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import thinwire
from benchmarks import simulated
from benchmarks.loss import arms, curve, runs, sites, task
from ranks import RankPool
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


def averaged_by_ranks(group: Group, options: DDPOptions) -> list[Tensor]:
    """What a rank of DDP reads at every step."""
    names = ParameterNames()
    names.take(Weights())
    sync = GradientSync(options, Chooser(options, names))
    found = []
    for step in range(STEPS):
        row = torch.cat([part.view(-1) for part in draw(group.rank(), step, SHAPES)])
        sync.begin_step(group, step, row.device)
        sync.average(gradients_in(row, tuple(SHAPES), [torch.Size(s) for s in SHAPES.values()]), row).wait()
        found.append(row)
    return found


@pytest.mark.parametrize(
    ("codec", "feedback"),
    [("lloyd2", "ef21"), ("lloyd2", "classic"), ("trellis2", "none")],
)
def test_replicas_read_the_bits_that_ranks_read(ranks: RankPool, codec: str, feedback: Any) -> None:
    options = DDPOptions(codec, feedback=feedback, optimizer="adaptive", measure_every=0)
    expected = ranks(3).run(averaged_by_ranks, options)[0]
    averager = simulated.ReplicaAverager(Weights(), options, 3)
    rows_WN = averager.new_rows()
    for step in range(STEPS):
        for rank, row in enumerate(rows_WN):
            torch.cat([part.view(-1) for part in draw(rank, step, SHAPES)], out=row)
        averager.average(rows_WN, step)
        assert torch.equal(rows_WN[0], expected[step])
    assert averager.feedback == feedback


def outer_of_ranks(group: Group, codec: str) -> list[Tensor]:
    """The outer parameters of DiLoCo after every round."""
    model = Weights()
    diloco = thinwire.DiLoCo(model, None, every=1, codec=codec)
    found = []
    for step in range(STEPS):
        learn(model, group.rank(), step)
        diloco.step()
        found.append(torch.cat([p.detach().view(-1) for p in model.parameters()]))
    return found


def learn(model: nn.Module, rank: int, step: int) -> None:
    for parameter, part in zip(model.parameters(), draw(rank, step, SHAPES), strict=True):
        parameter.data.add_(part)


@pytest.mark.parametrize("codec", ["none", "topk"])
def test_sites_average_the_bits_that_ranks_average(ranks: RankPool, codec: str) -> None:
    expected = ranks(2).run(outer_of_ranks, codec)[0]
    networks = [Weights(), Weights()]
    outer = sites.OuterAverage(networks[0], "fp32" if codec == "none" else codec, 2)
    for step in range(STEPS):
        for rank, network in enumerate(networks):
            learn(network, rank, step)
        outer.round(networks)
        for network in networks:
            assert torch.equal(torch.cat([p.detach().view(-1) for p in network.parameters()]), expected[step])
    assert outer.bits == 32.0 if codec == "none" else outer.bits < 8


def gathered_by_ranks(group: Group, name: str) -> list[Tensor]:
    """The matrices that an FSDP2 model computes with at two steps, between which they move."""
    network = task.network_of(task.SIZES["tiny"], 0)
    for module in (*network.blocks, network):
        fully_shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    codec, _, replica = name.partition("@")
    thinwire.compress_fsdp(network, "none", codec, replica=bool(replica))
    seen: list[Tensor] = []
    for step in range(2):
        for block in network.blocks:
            block.unshard()
            seen += [p.detach().clone() for p in matrices(block)]
            block.reshard()
        for p in network.parameters():
            p.detach().to_local().mul_(1.0 + 0.01 * (step + 1))
    return seen


def matrices(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.dim() > 1]


@pytest.mark.parametrize("name", ["int8", "lloyd4@replica"])
def test_weights_are_those_that_ranks_gather(ranks: RankPool, name: str) -> None:
    expected = ranks(2).run(gathered_by_ranks, name)[0]
    network = task.network_of(task.SIZES["tiny"], 0)
    rounded = arms.RoundedWeights(network, name, 2)
    seen: list[Tensor] = []
    for step in range(2):
        exact = [p.clone() for p in network.parameters()]
        rounded.load(step)
        seen += [p.detach().bfloat16() for block in network.blocks for p in matrices(block)]
        rounded.restore()
        for got, want in zip(network.parameters(), exact, strict=True):
            assert torch.equal(got, want)
            got.data.mul_(1.0 + 0.01 * (step + 1))
    assert len(seen) == len(expected) > 0
    for got, want in zip(seen, expected, strict=True):
        assert torch.equal(got, want)
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
