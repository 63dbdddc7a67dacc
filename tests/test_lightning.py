"""Lightning's Trainer and Fabric, as they are installed, with compressed gradients and weights."""

import csv
import importlib
import io
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cases import ROUND, assert_same, half_ulp
from ranks import RankPool, World
from replicas import gradients_saved
from thinwire import MissingPackageError, Stats

pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="needs lightning")
RANKS_IMPORT = ("lightning_runs",)
LR = 0.03  # of SGD in replicas.py
BATCHES = 4  # of an epoch
Options = Mapping[str, Any]


class Way(NamedTuple):
    """A way of using Lightning: what its Trainer, its strategy and the module (lightning_runs.Net) are told."""

    trainer: Options = {}  # noqa: RUF012
    strategy: Options = {}  # noqa: RUF012
    module: Options = {}  # noqa: RUF012


class Fitted(NamedTuple):
    """What a rank has after `fit`."""

    parameters: Tensor  # whole, in a row
    peak: float  # the largest elements of this rank's gradients, added up over batches
    stats: Stats | None


FSDP2 = Way(module={"sharded": True})


def rank(group: dist.ProcessGroup, name: str, *args: Any) -> Any:
    """A function of lightning_runs, which this process does not import."""
    return importlib.import_module("lightning_runs").play(group, name, *args)


@pytest.fixture
def pair(ranks: RankPool) -> World:
    return ranks(2)


class Case(NamedTuple):
    """A way of using Lightning, and what to expect of it."""

    way: Way
    accumulated: int = 1  # batches of a step
    travels: int = 1  # how often its gradients do
    ratio: float = 3.5
    bounded: bool = True  # whether parameters follow gradients by the learning rate


CASES = {
    "accumulation, bf16-mixed": Case(Way({"accumulate_grad_batches": 2, "precision": "bf16-mixed"}), accumulated=2),
    "manual optimization": Case(Way(module={"manual": True})),
    "fsdp2, accumulation": Case(
        FSDP2._replace(trainer={"accumulate_grad_batches": 2}), accumulated=2, travels=2, ratio=3.2
    ),
    "fsdp2, bf16-mixed, clipping": Case(
        FSDP2._replace(trainer={"precision": "bf16-mixed", "gradient_clip_val": 0.1}), ratio=3.2, bounded=False
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_none_is_plain_lightning_and_int8_is_near(pair: World, name: str) -> None:
    case = CASES[name]
    one = {"limit_train_batches": case.accumulated}
    runs = [(None, {}), ({"codec": "none"}, {}), (None, one), ({}, one)]
    found = pair.run(rank, "fits", case.way, *runs)
    peaks = [first.peak for *_, first, _ in found]
    if case.bounded and case.way.module.get("sharded"):  # where gradients of ranks are not seen by themselves
        peaks = [first.peak for (first,) in pair.run(rank, "fits", case.way._replace(module={}), (None, one))]
    for plain, none, first, int8 in found:
        assert_same(none.parameters, plain.parameters)
        assert_same(int8.parameters, found[0][3].parameters, "on the other rank")
        assert not torch.equal(int8.parameters, first.parameters)
        assert none.stats.steps == BATCHES * case.travels // case.accumulated
        assert int8.stats.steps == case.travels
        if case.way.module.get("sharded"):
            assert gradients_saved(int8.stats, int8.parameters.numel()) > 1 - 1 / case.ratio
        else:
            assert int8.stats.bytes_plain > case.ratio * int8.stats.bytes_sent > 0
        if case.bounded:
            bound = LR * max(peaks) * (1.02 / 127 + 4 * half_ulp(torch.float32)) + 2 * ROUND
            assert (int8.parameters - first.parameters).abs().max() <= bound


def test_weights_travel_compressed(pair: World) -> None:
    for plain, both in pair.run(rank, "fits", FSDP2, ({}, {}), ({"codec": "lloyd4", "weights": "int8"}, {})):
        assert both.stats.codec == "lloyd4, weights int8"
        assert both.stats.bytes_plain == plain.stats.bytes_plain > plain.stats.bytes_sent
        assert both.stats.bytes_plain > 3.5 * both.stats.bytes_sent > 0


LLOYD2 = {"codec": "lloyd2"}
RESUMED = {
    "ddp, ef21": (Way(module={"optimizer": "adam"}), {**LLOYD2, "feedback": "ef21"}),
    "fsdp2": (FSDP2._replace(strategy={"save_distributed_checkpoint": False}), {**LLOYD2, "feedback": "classic"}),
    "fsdp2, sharded file": (FSDP2, {**LLOYD2, "feedback": "classic", "weights": "lloyd4", "replica": True}),
}


@pytest.mark.parametrize(("way", "compress"), RESUMED.values(), ids=RESUMED)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(
    pair: World, way: Way, compress: Options, tmp_path: Path
) -> None:
    for found in pair.run(rank, "resume", way, compress, tmp_path):
        assert_same(found["resumed"], found["at once"])
        first, second = (found["state"]["ranks"][k]["net.0.weight"] for k in "01")
        assert first.any()
        assert not torch.equal(first, second)


def test_three_ranks_save_and_two_go_on(ranks: RankPool, pair: World, tmp_path: Path) -> None:
    ((before, told), *_) = ranks(3).run(rank, "save", Way(), LLOYD2, tmp_path / "three.ckpt")
    assert told == []
    loaded, other = pair.run(rank, "owed", Way(), LLOYD2, tmp_path / "three.ckpt")
    assert other == {}
    assert loaded["step"] == before["step"] == BATCHES
    for name in before["ranks"]["0"]:
        first, second, third = (before["ranks"][k][name] for k in "012")
        assert_same(loaded["ranks"]["0"][name], first + third, name)
        assert_same(loaded["ranks"]["1"][name], second, name)
    assert before["ranks"]["0"]["net.0.weight"].any()


WITHOUT = "a checkpoint is saved without the state of compression: "


def test_a_run_that_fails_saves_no_state_and_can_be_resumed(pair: World, tmp_path: Path) -> None:
    first, second = pair.run(rank, "fail", LLOYD2, tmp_path)
    for said, _, state, parameters in (first, second):
        assert said == "as asked"
        assert state is None
        assert parameters.isfinite().all()
    assert first[1] == [WITHOUT + "the run failed, and other ranks may not answer"]
    assert second[1] == []


def test_a_state_that_cannot_be_gathered_does_not_stop_a_checkpoint(pair: World, tmp_path: Path) -> None:
    sizes = {"data_parallel_size": 1, "tensor_parallel_size": 2}
    split = Way(strategy=sizes, module={"sharded": True, "split": True})
    (state, told), (_, silent) = pair.run(rank, "save", split, {}, tmp_path / "split.ckpt")
    assert state is None
    assert len(told) == 1
    assert told[0].startswith(WITHOUT + "gather=True does not support tensor parallelism")
    assert silent == []


def test_fit_after_fit(pair: World) -> None:
    """Twice by one Trainer, then by another."""
    for plain, none in zip(pair.run(rank, "again", False), pair.run(rank, "again", True), strict=True):
        for (want, _), (got, stats) in zip(plain, none, strict=True):
            assert_same(got, want)
            assert stats.steps == BATCHES


def test_stats_go_to_the_loggers(pair: World, tmp_path: Path) -> None:
    """Eight batches, two a step, every second step is logged: under the steps that Lightning counts from 0."""
    (text, stats), (other, _) = pair.run(rank, "log", tmp_path)
    assert other == ""
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["step"] for row in rows] == ["1", "3"]
    assert [int(row["thinwire/steps"]) for row in rows] == [2, 4]
    assert int(rows[1]["thinwire/bytes_sent"]) == stats.bytes_sent == 2 * int(rows[0]["thinwire/bytes_sent"])
    assert float(rows[1]["thinwire/ratio"]) == pytest.approx(stats.ratio)
    assert 0.05 < float(rows[1]["thinwire/relative_error"]) < 0.2


@pytest.mark.parametrize("per_node", [1, 2])
def test_nodes_are_those_of_the_trainer(pair: World, per_node: int) -> None:
    for shape, stats in pair.run(rank, "nodes", per_node):
        assert (shape, stats.steps) == ((2 // per_node, per_node), BATCHES)
        assert stats.bytes_sent > 0


def test_a_trainer_of_the_other_package(pair: World) -> None:
    for stats in pair.run(rank, "other_package"):
        assert stats.steps == BATCHES
        assert stats.ratio > 3


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_fabric(pair: World, sharded: bool, tmp_path: Path) -> None:
    codecs = (None, "none", "lloyd2")
    runs = [pair.run(rank, "in_fabric", codec, sharded, tmp_path / f"{codec}.ckpt") for codec in codecs]
    for (plain, _, _), (none, _, _), (_, stats, _) in zip(*runs, strict=True):
        assert_same(none, plain)
        assert stats.steps == BATCHES // (1 if sharded else 2)
        assert (gradients_saved(stats, plain.numel()) if sharded else stats.bytes_saved / stats.bytes_plain) > 2 / 3
    saved, loaded = runs[2][0][2]
    assert saved.keys() == loaded.keys()
    for k in "01":
        for name, values in saved["ranks"][k].items():
            assert_same(loaded["ranks"][k][name], values)
    assert sharded or saved["ranks"].keys() == {"0", "1"}


def test_one_device_sends_nothing_and_says_so_once(pair: World) -> None:
    for lines, with_it, without in pair.run(rank, "alone"):
        assert lines == ["SingleDeviceStrategy has only one rank: there is nothing to compress"]
        assert_same(with_it, without)


REFUSED = (
    "int9",
    "int9",
    "int9",
    "mesh must be 'nodes' or a DeviceMesh of nodes and the ranks inside, got 'hosts'",
    "weights= requires ModelParallelStrategy, with fully_shard called in configure_model(); got DDPStrategy",
    "algorithm= requires strategy='ddp'; got ModelParallelStrategy",
    "got ModelParallelStrategy with Net: use strategy='ddp', or ModelParallelStrategy, with fully_shard",
)


def test_errors_say_what_to_do(pair: World) -> None:
    for said in pair.run(rank, "refusals"):
        assert len(said) == len(REFUSED)
        for got, want in zip(said, REFUSED, strict=True):
            assert want in got


def test_without_lightning_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "thinwire.integrations.lightning", raising=False)
    with pytest.raises(MissingPackageError, match=r"needs lightning.*pip install 'thinwire\[lightning\]'"):
        importlib.import_module("thinwire.integrations.lightning")
