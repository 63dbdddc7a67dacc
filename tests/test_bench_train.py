"""The training benchmark: tasks and their shards, schemes by name, the formulas, and whole runs of two ranks."""

import contextlib
import math
import multiprocessing
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from ranks import RankPool, World
from test_bench_collectives import shapes_links
from thinwire.errors import CodecError
from thinwire.tools.bench import launch, link as links, record, schemes, tasks, train as bench, turns
from thinwire.tools.bench.schemes import StepSample, TrainScheme
from thinwire.tools.bench.tasks import Task, Total
from thinwire.tools.bench.train import Trained, TrainingRun, TrainPlan
from thinwire.tools.cli.app import app
from thinwire.tools.report import kinds, tables

MBIT = links.parse("100mbit")


def invoke(*flags: str) -> Any:
    return CliRunner().invoke(app, ["bench", "train", *flags])


def a_plan(
    *names: str,
    task: str = "gpt",
    seeds: int = 2,
    steps: int = 3,
    link: links.ShapedLink | None = None,
    parallel: str = "ddp",
) -> TrainPlan:
    small = replace(tasks.find(task, quick=True), seeds=seeds, steps=steps)
    return TrainPlan(small, bench.lineup(task, names, parallel), 2, link, "adam", bench.QUICK, parallel)


def number(row: record.Row, name: str) -> float:
    value = row[name]
    assert isinstance(value, float | int), (name, value)
    return value


# --- tasks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_shards_cover_all_digits_once_and_are_sorted_by_label(world: int) -> None:
    shards = [tasks.shard(rank, world) for rank in range(world)]
    labels = torch.cat([labels for _, labels in shards])
    images, whole = tasks.shard(0, 1)
    assert torch.equal(labels, whole)
    assert torch.equal(torch.cat([images for images, _ in shards]), images)
    assert torch.equal(labels, labels.sort().values)
    assert labels.bincount().min() > 100
    assert max(len(part) for _, part in shards) - min(len(part) for _, part in shards) <= 1


def test_the_text_is_cut_into_shards_and_a_tenth_is_held_out() -> None:
    letters, text, rest = tasks.help_pages()
    assert torch.equal(torch.cat([tasks._part(text, rank, 3) for rank in range(3)]), text)
    assert len(rest) == pytest.approx((len(text) + len(rest)) / 10, abs=1)
    assert torch.cat([text, rest]).unique().tolist() == list(range(len(letters)))


@pytest.mark.parametrize("task", tasks.QUICK_TASKS.values(), ids=str)
def test_a_seed_makes_the_network_and_the_batches(task: Task) -> None:
    before = torch.random.get_rng_state()
    networks = [turns.digest(task.model(seed).parameters()) for seed in (1, 1, 2)]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert networks[0] == networks[1] != networks[2]
    same, again = task.batch(5, 1, 0, 2), task.batch(5, 1, 0, 2)
    assert all(torch.equal(a, b) for a, b in zip(same, again, strict=True))
    for other in (task.batch(6, 1, 0, 2), task.batch(5, 2, 0, 2), task.batch(5, 1, 1, 2)):
        assert not torch.equal(same[0], other[0])


def test_attention_does_not_look_ahead() -> None:
    network = tasks.TASKS["gpt"].model(0)
    codes = torch.randint(0, 50, (1, 16), generator=torch.Generator().manual_seed(0))
    changed = codes.clone()
    changed[0, 9:] += 1
    with torch.no_grad():
        assert torch.equal(network(codes)[0, :9], network(changed)[0, :9])
        assert not torch.equal(network(codes)[0, 9:], network(changed)[0, 9:])


def test_losses_of_parts_are_the_loss_of_the_whole() -> None:
    task = tasks.TASKS["digits"]
    network = task.model(0)
    with torch.no_grad():
        parts = [task.train_loss(network, rank, 3) for rank in range(3)]
        whole = task.loss(network, tasks.shard(0, 1)).item()
    assert tasks.mean(parts) == pytest.approx(whole, rel=1e-5)
    assert sum(part.count for part in parts) == 1797


def test_the_rate_rises_and_falls() -> None:
    rates = [tasks.TASKS["digits"].rate("adam", step, 600) for step in range(600)]
    top = rates.index(max(rates))
    assert 10 < top < 30
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert 0.99e-3 < max(rates) < 1e-3
    assert 0 < rates[-1] < 1e-6


def test_without_scikit_learn_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks.data, "find_spec", lambda name: None)
    result = invoke("--quick")
    assert result.exit_code == 1
    assert "task 'digits' needs scikit-learn, which is not installed: pip install 'thinwire[bench]'" in result.stderr
    assert tasks.find("gpt") is tasks.TASKS["gpt"]
    with pytest.raises(ValueError, match="unknown task 'cifar'; known: digits, gpt, mlp"):
        tasks.find("cifar")


# --- schemes ----------------------------------------------------------------------------------------------------------


def test_names() -> None:
    assert schemes.parse("int8") == TrainScheme("int8", "int8", "auto", weigh="auto")
    assert schemes.parse("lloyd2@none+moments") == TrainScheme("lloyd2@none+moments", "lloyd2", "none", weigh="moments")
    assert schemes.parse(" lloyd4:block=256@ef21 ") == TrainScheme("lloyd4:block=256@ef21", "lloyd4:block=256", "ef21")
    assert schemes.parse("lloyd2@classic").feedback == "classic"
    assert schemes.parse("lloyd2@none").label == "lloyd2"
    assert schemes.parse("auto:2.5").codec == "auto:2.5"
    assert schemes.parse("none") == TrainScheme("none", None, "none")
    assert schemes.parse("bf16") == TrainScheme("bf16", None, "none", peer=True)
    assert schemes.parse("bf16@none").codec == "bf16"  # thinwire's
    assert schemes.parse("powersgd2").peer
    assert schemes.parse("sign") == TrainScheme("sign", schemes.CONTROLS["sign"], "none", "none", control=True)
    assert not schemes.parse("int2@ef21").control


@pytest.mark.parametrize("name", ["int9", "powersgd3", "powersgd1@none", "lloyd2@maybe", "auto:x", ""])
def test_what_is_no_scheme(name: str) -> None:
    with pytest.raises(CodecError):
        schemes.parse(name)


def test_names_of_gradients_and_weights() -> None:
    assert schemes.parse_sharded("int8") == TrainScheme("int8", "int8", "auto", weights="none")
    assert schemes.parse_sharded(" lloyd4/int8 ") == TrainScheme("lloyd4/int8", "lloyd4", "auto", weights="int8")
    differences = schemes.parse_sharded("lloyd2@ef21/lloyd4@replica")
    assert differences == TrainScheme(
        "lloyd2@ef21/lloyd4@replica", "lloyd2", "ef21", weights="lloyd4@replica"
    )  # fmt: skip
    assert differences.label == "lloyd2"
    assert schemes.parse_sharded("int8/lloyd4").control
    assert schemes.parse_sharded("none/int8").codec == "none"  # thinwire's
    assert schemes.parse_sharded("none") == TrainScheme("none", None, weights="none")
    assert schemes.parse_sharded("mixed") == TrainScheme("mixed", None, peer=True, weights="bf16")


@pytest.mark.parametrize("name", ["", "int8/", "/int8", "powersgd1", "int8/int9", "int8/int8@ef21"])
def test_what_is_no_scheme_of_fsdp2(name: str) -> None:
    with pytest.raises(CodecError):
        schemes.parse_sharded(name)


def test_a_run_begins_with_fp32_and_has_everything_once() -> None:
    assert [s.name for s in bench.lineup("gpt", ["int8", "none", "int8", "lloyd2@none"])] == [
        "none", "int8", "lloyd2@none",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--task", "cifar"], "'cifar' is not one of"),
        (["--codecs", "int8,int9"], "besides codecs there are auto, sign"),
        (["--codecs", "lloyd2@maybe"], "feedback must be one of auto, none, classic, ef21, got 'maybe'"),
        (["--codecs", "lloyd4/int8"], "gradients/weights goes with --parallel fsdp2"),
        (["--parallel", "fsdp2", "--codecs", "powersgd1"], "besides codecs there are auto, none, bf16, mixed"),
        (["--parallel", "fsdp2", "--codecs", "int8/int8@ef21"], "as differences with @replica, got @ef21"),
        (["--parallel", "diloco", "--codecs", "bf16/int8"], "besides codecs there are auto, none"),
        (["--parallel", "diloco", "--every", "0"], "expected integers from 1 on"),
        (["--every", "10"], "is for --parallel diloco"),
        (["--parallel", "fsdp2", "--codecs", "lloyd2@none+moments"], "of its own shards alone: leave out +moments"),
        (["--codecs", "lloyd2@none+mean"], "may be weighed by their moments, lloyd2@none+moments, got 'mean'"),
        (["--batch", "0"], "Input should be greater than or equal to 1"),
        (["--world", "1"], "Input should be greater than or equal to 2"),
        (["--seeds", "0"], "Input should be greater than or equal to 1"),
        (["--link", "fast"], "expected a rate such as 100mbit"),
        (["--json", "no/such/folder/x.json"], "cannot be written"),
    ],
)
def test_bad_flags(flags: list[str], complaint: str) -> None:
    result = invoke("--quick", *flags)
    assert result.exit_code == 2, result.output
    assert complaint in " ".join(result.stderr.replace("│", "").split())


# --- formulas ---------------------------------------------------------------------------------------------------------


def test_ratios_are_paired_by_seed() -> None:
    assert bench.log_ratios([2.0, 3.0], [1.0, 3.0]) == [math.log(2), 0]
    assert all(map(math.isnan, bench.log_ratios([math.inf, math.nan, 0.0, 1.0], [1.0, 1.0, 1.0, math.nan])))
    assert bench.noise_floor([1.0, math.e, math.e**3]) == pytest.approx((1 + 3 + 2) / 3)
    assert bench.noise_floor([1.0]) is None


def outcomes(*losses: float, val: float | None = None, digests: str = "aa") -> list[list[Trained]]:
    """By seed, then by rank: the second rank has three times as much to judge."""
    return [
        [
            Trained(
                Total(count * loss, count), None if val is None else Total(count * val * loss, count), digest, "ef21", 9
            )
            for count, digest in zip((1, 3), digests, strict=True)
        ]
        for loss in losses
    ]


def a_sample(ms: list[float], interface: int, transport: int | None = None, extra: int | None = None) -> StepSample:
    sent = [] if transport is None else [transport] * 3
    return StepSample(ms, [ms[0] / 2] * 3, interface_bytes=[interface] * 3, transport_bytes=sent, extra_bytes=extra)


def samples(plan: TrainPlan, **ms: float) -> list[dict[str, StepSample]]:
    part = {scheme.name: a_sample([1.0, 3.0, 2.0], 1100, 900, 5) for scheme in plan.timed}
    part |= {bench.COMPUTE: a_sample([1.0] * 3, 100), bench.NOTHING: a_sample([0.0] * 3, 100)}
    part |= {name: a_sample([value] * 3, 2100) for name, value in ms.items()}
    return [part, {**part, "int8": a_sample([5.0, 1.0, 1.0], 600, 400, 7)}]


def test_a_row_compares_with_fp32_and_is_of_the_slowest_rank() -> None:
    plan = a_plan("int8", "powersgd1")
    none, int8, power = plan.schemes
    trained = {none: outcomes(1.0, 2.0), int8: outcomes(1.1, 1.8), power: []}
    row = bench.row_of(plan, int8, trained, samples(plan, none=12.0, bf16=6.0, powersgd1=9.0))
    assert set(row) >= set(record.COLUMNS["train"])
    assert number(row, "loss_log_ratio") == pytest.approx((math.log(1.1) + math.log(0.9)) / 2)
    assert number(row, "loss_log_ratio_error") == pytest.approx(math.log(1.1 / 0.9) / 2)
    assert number(row, "noise_floor") == pytest.approx(math.log(2))
    assert (row["step_ms"], row["compute_ms"]) == (3, 1)  # rounds take 5, 3 and 2
    assert row["cpu_ms_per_rank"] == (0.5 + 2.5) / 2
    assert (row["speedup_plain"], row["speedup_bf16"], row["speedup_powersgd"]) == (4, 2, 3)
    assert (row["bytes_per_step"], row["extra_bytes"], row["over_limit"]) == (900, 7, None)
    assert (row["identical"], row["feedback"], row["diverged"]) == (True, "ef21", False)
    assert row["val_gap_nats"] is None


def test_on_a_shaped_link_the_interface_counts_and_there_is_a_limit() -> None:
    plan = a_plan("int8", link=MBIT)
    none, int8 = plan.schemes
    trained = {none: outcomes(1.0, 2.0), int8: outcomes(1.0, 2.0)}
    row = bench.row_of(plan, int8, trained, samples(plan))
    assert row["bytes_per_step"] == 1100 - 100  # what the barrier sends is not the step's
    assert row["bytes_over_plain"] == 1
    assert number(row, "limit_ms") == pytest.approx(1 + 1e3 * 8 * 1000 / 1e8)
    assert number(row, "over_limit") == pytest.approx(3 / 1.08 - 1)


def test_validation_gaps_divergence_and_ranks_that_differ() -> None:
    plan = a_plan("int8", task="gpt")
    none, int8 = plan.schemes
    trained = {none: outcomes(1.0, 2.0, val=2.0), int8: outcomes(1.0, 2.5, val=2.0, digests="ab")}
    row = bench.row_of(plan, int8, trained, samples(plan))
    assert (row["val_gap_nats"], row["val_noise_floor"], row["identical"]) == (0.5, 2.0, False)
    trained[int8] = outcomes(math.nan, 2.0, val=1.0)
    row = bench.row_of(plan, int8, trained, samples(plan))
    assert row["diverged"] is True
    found = record.Record("train", record.conditions(torch.device("cpu")), [row])
    assert kinds.grids(found)[0].rows[0][1] == "diverged"
    assert '"loss_log_ratio": null' in record.dumps(found)


# --- whole runs -------------------------------------------------------------------------------------------------------


@dataclass
class Pooled:
    """A world of a benchmark (launch.World) whose ranks are those of the tests."""

    world: World

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        return self.world.run(called, fn, args)


def called(group: dist.ProcessGroup, fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, which the ranks of a benchmark write to a log
        return fn(*args)


@pytest.fixture
def quick_run(ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., record.Record]:
    """The command with these flags, by ranks that exist already; test_demo.py has whole programs of such runs."""
    monkeypatch.setattr(launch, "ranks", lambda size, link: contextlib.nullcontext(Pooled(ranks(size))))

    def run(*flags: str) -> record.Record:
        path = str(tmp_path / "found.json")
        result = invoke("--quick", "--world", "2", "--task", "gpt", "--json", path, *flags)
        assert result.exit_code == 0, (result.output, result.exception)
        return record.read(path)

    return run


NAMES = "bf16,int8,lloyd2,lloyd2@none,powersgd1,auto:2.5,sign,int2"


def test_a_quick_run_and_the_same_losses_again(quick_run: Callable[..., record.Record], ranks: RankPool) -> None:
    found = quick_run("--codecs", NAMES, "--steps", "6", "--seeds", "1")
    assert [row["codec"] for row in found.rows] == ["none", *(name.partition("@")[0] for name in NAMES.split(","))]
    feedbacks = {(row["codec"], row["feedback"]) for row in found.rows}
    assert {("lloyd2", "none+moments"), ("lloyd2", "none"), ("int8", "none")} <= feedbacks
    assert [row["codec"] for row in found.rows if row["control"]] == ["sign", "int2"]
    assert [row["codec"] for row in found.rows if row["peer"]] == ["bf16", "powersgd1"]
    for row in found.rows:
        assert row["identical"] is True, row
        assert row["diverged"] is False
        assert (row["seeds"], row["steps"], row["world"], row["link"]) == (1, 6, 2, "loopback")
        assert number(row, "step_ms") > 0 < number(row, "compute_ms")
        assert (row["bytes_per_step"] is None) == (row["codec"] in schemes.PEERS)
        assert abs(number(row, "loss_log_ratio")) < 0.1  # six steps do not take it far
        assert [step for step, _ in row["curve"]] == [1, 2, 3, 4, 5, 6]  # type: ignore[union-attr, misc]
    by_codec = {row["codec"]: row for row in found.rows}
    assert by_codec["none"]["loss_log_ratio"] == 0
    assert number(by_codec["lloyd2"], "bytes_per_step") < number(by_codec["int8"], "bytes_per_step") / 3
    table = tables.markdown(found)
    assert "gpt with adam, 2 ranks, loopback, 1 seed of 6 steps" in table
    assert "| sign (control) |" in table
    assert "| powersgd1 + classic (peer) |" in table
    assert "over limit" not in table
    assert "val. gap" in table
    plan = a_plan("lloyd2", seeds=1, steps=6)
    trained = list(zip(*ranks(2).run(train, plan, plan.schemes[1]), strict=True))  # by seed, then by rank
    lloyd2 = ("lloyd2", "none+moments")
    (told,) = ((row["loss"], row["val_loss"]) for row in found.rows if (row["codec"], row["feedback"]) == lloyd2)
    assert (fmean(bench.losses(trained)), fmean(bench.val_losses(trained))) == told


def train(group: dist.ProcessGroup, plan: TrainPlan, scheme: TrainScheme) -> list[Trained]:
    return [bench.train(plan, TrainingRun(scheme, seed)) for seed in range(plan.task.seeds)]


NAMES_SHARDED = "int8,int8/int8,lloyd4/lloyd4@replica,int8/lloyd4,mixed"


@pytest.mark.thorough
def test_a_quick_run_of_fsdp2_on_text(quick_run: Callable[..., record.Record]) -> None:
    small = ("--steps", "3", "--batch", "1", "--optimizer", "sgd")
    found = quick_run("--parallel", "fsdp2", "--codecs", NAMES_SHARDED, *small)
    none, int8, *paired, mixed = found.rows
    names = [(row["codec"], row["weights"], row["control"]) for row in paired]
    assert names == [("int8", "int8", False), ("lloyd4", "lloyd4@replica", False), ("int8", "lloyd4", True)]
    assert (mixed["codec"], mixed["peer"], none["val_gap_nats"]) == ("mixed", True, 0)
    for row in found.rows:
        assert (row["parallel"], row["identical"], row["diverged"], row["batch"]) == ("fsdp2", True, False, 1), row
        assert min(number(row, "compute_ms"), number(row, "step_ms")) > 0
        assert abs(number(row, "val_gap_nats")) < 0.1
        assert number(row, "noise_floor") > 0 < number(row, "val_noise_floor")
    assert all(number(row, "val_gap_nats") != 0 for row in (int8, *paired, mixed))
    assert "val. gap" in kinds.grids(found)[0].header
    assert int8["bytes_per_step"] is None  # torch gathers the weights
    eight, differences, direct = (number(row, "bytes_per_step") for row in paired)
    assert differences < eight / 2 < direct < eight  # weights are gathered twice, differences once
    table = tables.markdown(found)
    assert "gpt with sgd in shards (FSDP2), 2 ranks" in table
    assert all(f"| {name} |" in table for name in ("int8", "int8/int8", "int8/lloyd4 (control)", "mixed (peer)"))


def test_a_quick_run_of_diloco(quick_run: Callable[..., record.Record]) -> None:
    small = ("--steps", "2", "--batch", "1", "--seeds", "1", "--optimizer", "adamw")
    found = quick_run("--parallel", "diloco", "--codecs", "topk", "--every", "1,2", *small)
    ddp, *outer = found.rows
    told = (ddp["parallel"], ddp["codec"], ddp["every"], ddp["ddp_log_ratio"], ddp["peer"])
    assert told == ("ddp", "none", 1, 0, True)
    names = [(row["parallel"], row["codec"], row["feedback"], row["every"]) for row in outer]
    ways = (("none", "none"), ("topk", "classic"))
    assert names == [("diloco", *way, every) for every in (1, 2) for way in ways]
    assert all(row["identical"] and not row["diverged"] for row in found.rows)
    for fp32, topk in (outer[:2], outer[2:]):
        assert fp32["loss_log_ratio"] == 0
        assert number(fp32, "ddp_log_ratio") != 0
        assert number(topk, "fp32_loss") == number(fp32, "loss") != number(topk, "loss")
        assert number(topk, "bytes_per_step") < number(fp32, "bytes_per_step") / 4
    for one, two in zip(outer[:2], outer[2:], strict=True):
        assert number(one, "bytes_per_step") == 2 * number(two, "bytes_per_step")
    assert number(outer[0], "bytes_per_step") == number(ddp, "bytes_per_step")  # a ring of fp32 numbers, both
    assert (outer[0]["bytes_over_plain"], outer[2]["bytes_over_plain"]) == (1, 0.5)
    assert "gpt with adamw, DiLoCo, 2 ranks" in tables.markdown(found)


def test_muon_steps_matrices_and_adamw_the_rest() -> None:
    layer = torch.nn.Linear(8, 8)
    before = [parameter.detach().clone() for parameter in layer.parameters()]
    optimizer = schemes.MuonAndAdamW(layer.parameters(), lr=0.0)
    for rate, moves in ((0.0, False), (1e-2, True)):
        for group in optimizer.param_groups:
            group["lr"] = rate
        layer(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
        pairs = zip(before, layer.parameters(), strict=True)
        assert [not torch.equal(old, new) for old, new in pairs] == [moves, moves]


def test_fsdp2_trains_as_ddp_does(ranks: RankPool) -> None:
    ddp, plain, bf16, narrow = (
        list(zip(*ranks(2).run(train, a_plan(name, parallel=parallel), scheme), strict=True))
        for parallel, name in (("ddp", "none"), ("fsdp2", "none"), ("fsdp2", "bf16"), ("fsdp2", "lloyd4/int8"))
        for scheme in a_plan(name, parallel=parallel).schemes[-1:]
    )
    expected = bench.losses(ddp)
    assert bench.losses(plain) == pytest.approx(expected, rel=1e-6)
    for near in (bf16, narrow):
        assert bench.losses(near) == pytest.approx(expected, rel=2e-2)
        assert bench.losses(near) != bench.losses(plain)


def weights_and_shards(group: dist.ProcessGroup, name: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The weights that a replica computes with, and those that ranks hold, after a step."""
    plan = a_plan(name, parallel="fsdp2")
    replica = schemes.replica_of(plan.task, plan.schemes[-1], plan.task.model(0), "adam")
    replica.step(plan.task, plan.task.batch(0, 0, group.rank(), 2), 1e-3)
    held = {key: parameter.full_tensor().detach() for key, parameter in replica.model.named_parameters()}
    return {key: (weight, held[key]) for key, weight in replica.weights().items()}


def test_a_network_is_judged_by_the_weights_as_they_are_gathered(ranks: RankPool) -> None:
    for used, held in ranks(2).run(weights_and_shards, "none")[0].values():
        assert torch.equal(used, held)
    first, second = ranks(2).run(weights_and_shards, "int8/int8")
    for name, (used, held) in first.items():
        assert torch.equal(used, second[name][0])
        assert not torch.equal(used, held)
        assert (used - held).abs().max() <= held.abs().max() / 127  # half a step of a block's largest


def steps_alone(group: dist.ProcessGroup) -> float | None:
    """Only rank 0 steps: it would wait for ever if it sent anything."""
    plan = a_plan(parallel="fsdp2")
    replica = schemes.replica_of(plan.task, schemes.ALONE, plan.task.model(0), "adam")
    if group.rank():
        return None
    return replica.step(plan.task, plan.task.batch(0, 0, 0, 2), 0.0).item()


def test_the_step_that_is_timed_alone_sends_nothing(ranks: RankPool) -> None:
    loss, _ = ranks(2).run(steps_alone)
    assert loss == pytest.approx(math.log(len(tasks.help_pages()[0])), rel=0.2)


@pytest.mark.thorough
@pytest.mark.usefixtures("forked")
def test_fsdp2_on_a_shaped_link_sends_less() -> None:
    if not shapes_links():
        pytest.skip("links cannot be shaped here: not root, or no ip and tc, or no tbf")
    found = bench.run("mlp", 2, ["lloyd4/int8", "bf16"], link=MBIT, steps=1, batch=1, quick=True, parallel="fsdp2")
    none, ours, bf16 = found.rows
    gathered = 4 * number(none, "params")  # half of the weights, forth and back
    assert number(none, "bytes_per_step") > 1.3 * gathered  # and half of the gradients at least
    assert 0.45 < number(bf16, "bytes_over_plain") < 0.6
    assert number(ours, "bytes_over_plain") < 0.30


@pytest.mark.usefixtures("forked")
def test_a_shaped_link_counts_bytes_and_ctrl_c_keeps_finished_rows() -> None:
    if not shapes_links():
        pytest.skip("links cannot be shaped here: not root, or no ip and tc, or no tbf")

    def interrupted(jobs: Any) -> Iterator[Any]:
        yield from jobs[:3]  # times, none, int8
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(record.Interrupted) as stop:
        bench.run("mlp", 2, ["int8", "lloyd2"], link=MBIT, seeds=1, steps=2, quick=True, progress=interrupted)
    none, int8 = stop.value.record.rows
    assert (none["codec"], int8["codec"]) == ("none", "int8")
    least = number(int8, "params")  # a byte each, and two ranks exchange all of them
    assert least < number(int8, "bytes_per_step") < 1.2 * least
    assert 3.5 * least < number(none, "bytes_per_step") < 4.4 * least
    assert number(int8, "limit_ms") > number(int8, "compute_ms") + 8e3 * least / MBIT.rate
    assert number(int8, "speedup_plain") > 1
    assert multiprocessing.active_children() == []
