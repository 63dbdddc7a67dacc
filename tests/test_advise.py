"""`thinwire advise`: units, the formula beside committed records, the rule, the command."""

import ast
import inspect
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from typer.testing import CliRunner, Result

import compared
import thinwire
from cases import generated
from compared import Checked, everything, speedups
from thinwire.codecs import BlockInt, Lloyd, codec
from thinwire.errors import AdviceError, RecordError
from thinwire.tools import pairs, recommend
from thinwire.tools.advise import cluster as clusters, model, units, verdict
from thinwire.tools.advise.cluster import PAYLOAD, Cluster, LinkModel, Machine
from thinwire.tools.advise.model import BF16, PLAIN, Scheme, TrainingJob
from thinwire.tools.bench import record
from thinwire.tools.bench.record import Record
from thinwire.tools.cli.app import app
from thinwire.tools.recommend import BF16_HOOK, Loss, Way

GPU = clusters.recorded("cuda")
RECORDED_ON = clusters.recorded("cpu", "aarch64")  # the processor that the shaped links were measured on

# --- units ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (units.rate, "25gbit", 25e9 / 8),
        (units.rate, "100Mbps", 12.5e6),
        (units.rate, "10Gb/s", 1.25e9),
        (units.rate, "400GB/s", 4e11),
        (units.rate, "2GiB/s", 2**31),
        (units.seconds, "1.2s", 1.2),
        (units.seconds, "20us", 2e-5),
        (units.seconds, "2min", 120.0),
        (units.count, "7e9", 7_000_000_000),
        (units.count, "7B", 7_000_000_000),
        (units.count, "125M", 125_000_000),
        (units.count, "1.5B", 1_500_000_000),
        (units.count, "1.001k", 1001),  # 1000.9999999999999 in floats
        (units.share, "50%", 0.5),
    ],
)
def test_units(parse: Any, text: str, value: float) -> None:
    assert parse(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("parse", "text", "said"),
    [
        *((units.rate, text, "a rate such as 25gbit, 100mbit, 400GB/s") for text in ("fast", "25", "25gb/s", "0mbit")),
        (units.seconds, "1.2", "a time such as 1.2s, 350ms or 20us, got '1.2'"),
        (units.count, "0", "a count such as 7e9, 125M or 7B, from 1 to 1e18, got '0'"),
        (units.count, "2.7", "a whole number, a count such as 7e9, 125M or 7B, got '2.7'"),
    ],
)
def test_what_is_no_unit(parse: Any, text: str, said: str) -> None:
    with pytest.raises(AdviceError, match=re.escape(said)):
        parse(text)


# --- machines and clusters --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "name", "further"), [(RECORDED_ON, "aarch64", 3), (GPU, "h200_2026-11-17", 7)], ids=["cpu", "cuda"]
)
def test_trellis_codes_take_the_time_that_was_measured(machine: Machine, name: str, further: int) -> None:
    rows = compared.read(f"kernels_trellis_{name}").rows
    measured = {row["op"]: 1e-3 * verdict.column(row, "ms_p50") for row in rows if row["codec"] == "trellis2"}
    numel, found = int(verdict.column(rows[0], "numel")), machine.speed(codec("trellis2"))
    recode = found.recode + further * found.wire
    for op, each in (("encode", found.encode), ("decode", found.decode), ("recode", recode)):
        assert each == pytest.approx(measured[op] / numel, rel=0.07), op


def test_only_tcp_has_headers_of_tcp() -> None:
    rate = units.rate("25gbit")
    assert LinkModel.of_rate(rate, 0.0, "nccl").bytes_per_s == pytest.approx(PAYLOAD * rate)
    assert LinkModel.of_rate(4 * rate, 0.0, "nccl").bytes_per_s == 4 * rate  # RDMA
    assert LinkModel.of_rate(rate, 0.0, "nccl", inside=True).bytes_per_s == rate


def test_nccl_sums_in_a_tree_where_that_is_sooner() -> None:
    slow, fast = LinkModel(1e9, 1e-5), LinkModel(1e11, 3e-6)
    assert Cluster(64, 8, slow, fast).sum_latency_s == pytest.approx(2 * (3 * 1e-5 + 7 * 3e-6))
    assert Cluster(64, 8, slow, fast, "gloo").sum_latency_s == pytest.approx(126 * 1e-5)
    assert Cluster(2, 1, slow).sum_latency_s == pytest.approx(2e-5)
    assert Cluster(64, 8, slow, fast).ring_s == pytest.approx(7 * 1e-5 + 56 * 3e-6)


def test_quantities_are_shown_with_units() -> None:
    shown = [units.amount(124_475_904), units.duration(1.2), units.nbytes(20), units.nbytes(2e19), units.bits(25e9 / 8)]
    assert shown == ["124 M", "1.2 s", "20 B", "20,000,000 TB", "25 Gbit/s"]


# --- the formula and the records --------------------------------------------------------------------------------------

MEASURED = everything(RECORDED_ON, GPU)
# By what part a prediction may be off, at most. Narrow codecs, whose messages are short, are off by more than wide
# ones; of steps on a GPU that ranks share, compute and rates come from other records.
WITHIN = {"ring": 0.10, "wide": 0.21, "narrow": 0.39, "gpu": 0.41, "fsdp2 step": 0.15}


def kind_of(item: Checked) -> str:
    if "NCCL" in item.what:
        return "gpu"
    if item.scheme.kind == "sharded" or item.what.startswith("fsdp2"):
        return "fsdp2 step"
    return "ring" if item.scheme.algorithm == "ring" else "wide" if model.bits_of(item.scheme.codec) > 4.5 else "narrow"


@pytest.mark.parametrize("item", MEASURED, ids=lambda item: f"{item.what}, {item.scheme}")
def test_predictions_are_near_what_was_measured(item: Checked) -> None:
    assert abs(item.off) < WITHIN[kind_of(item)], (
        f"{item.predicted_s:.4g} s predicted, {item.measured_s:.4g} s measured"
    )


def test_every_record_of_steps_on_a_link_is_predicted() -> None:
    """Files that hold steps and are not loopback or one host's alone appear in what is compared."""
    assert len(MEASURED) > 90
    off = sorted(abs(item.off) for item in MEASURED)
    assert off[len(off) // 2] < 0.09
    named = {"ddp step of 124475904", "fsdp2 step of 124475904", "fsdp2 step of 25051850", "diloco step", "all_reduce"}
    assert all(any(item.what.startswith(name) for item in MEASURED) for name in named)
    shaped = [p.stem for p in compared.ROOT.glob("*steps*.json") if not p.stem.endswith("mb")]
    assert set(shaped) <= {*compared.STEPS, *compared.ON_GPUS}


def test_the_ranges_that_are_shown_hold_every_measured_speedup() -> None:
    known = verdict.shipped().misses
    for item, plain in speedups(MEASURED):
        low, high = known[item.kind]
        ratio = plain.measured_s / item.measured_s / (plain.predicted_s / item.predicted_s)
        assert 0.999 * low < ratio < 1.001 * high, (item, plain)
    assert all(0.6 < low <= 1 <= high < 1.25 for low, high in known.values())


def test_where_compression_lost_it_is_predicted_to_lose() -> None:
    """Two and four ranks on one host: every codec was slower than plain torch."""
    found = [(item, plain) for item, plain in speedups(MEASURED) if "on 1 hosts" in item.what]
    assert len(found) == 12
    assert all(item.measured_s > plain.measured_s and item.predicted_s > plain.predicted_s for item, plain in found)


def test_bytes_are_those_that_were_sent() -> None:
    rows = [row for name in ("collectives_1gbit", "collectives_100mbit") for row in compared.read(name).rows]
    for row in rows:
        cluster, own = compared.placed(row, RECORDED_ON)
        numel = int(row["numel"])
        scheme = Scheme(str(row["algorithm"]), codec(str(row["codec"]).replace("auto", "int8")))
        sent = model.piece(numel, scheme, cluster, own, TrainingJob(numel, 0.0)).sent
        assert sent == pytest.approx(row["bytes_formula"], rel=1e-3)


@pytest.mark.parametrize("codecs", [("int8", "int8"), ("lloyd4", "int8"), ("none", "none")])
def test_fsdp2_bytes_are_those_that_were_sent(codecs: tuple[str, str]) -> None:
    row = next(row for row in compared.read("fsdp_steps_1gbit").rows if (row["codec"], row["weights"]) == codecs)
    where = compared.placed(row, RECORDED_ON)
    job = TrainingJob(25_051_850, 0.2, parallel="fsdp2", gathered=torch.float32, units=4)
    scheme = PLAIN if codecs[0] == "none" else Scheme("sharded", codec(codecs[0]), None, codec(codecs[1]))
    sent = model.predict(job, scheme, *where).bytes
    assert sent == pytest.approx(float(str(row["bytes_per_step"])), rel=0.02)


def test_a_hierarchy_sends_a_share_of_its_node_across() -> None:
    cluster = Cluster(8, 4, LinkModel(1e9), LinkModel(1e10))
    job = TrainingJob(1 << 20, 0.0)
    found = model.piece(1 << 20, Scheme("hierarchical", Lloyd(4), BlockInt(8)), cluster, GPU, job)
    assert found.crossed == Lloyd(4).wire_bytes(1 << 18)
    assert found.across_s == pytest.approx(4 * found.crossed / 1e9)
    flat = model.piece(1 << 20, Scheme("two_phase", Lloyd(4)), cluster, GPU, job)
    assert flat.across_s > found.across_s


def test_waiting_hides_behind_the_backward_pass_and_work_does_not() -> None:
    cluster = Cluster(2, 1, LinkModel(1e9), transport="gloo")
    job = TrainingJob(100_000_000, 10.0)
    hidden, bare = (model.predict(replace(job, overlap=share), PLAIN, cluster, RECORDED_ON) for share in (1.0, 0.0))
    each = model.times(model.piece(6_250_000, PLAIN, cluster, RECORDED_ON, job), 6_250_000, cluster, RECORDED_ON)
    assert bare.exposed_s > 0.39  # 400 MB at 1 GB/s
    assert hidden.exposed_s == pytest.approx(max(each.alone_s, 16 * each.taken_s), rel=0.05)


# --- properties -------------------------------------------------------------------------------------------------------

SCHEMES = {
    "ddp": [
        *(PLAIN, BF16, Scheme("two_phase", BlockInt(8)), Scheme("one_shot", Lloyd(4)), Scheme("two_phase", Lloyd(2))),
        Scheme("hierarchical", Lloyd(4), BlockInt(8)),
    ],
    "fsdp2": [PLAIN, BF16, Scheme("sharded", BlockInt(8)), Scheme("sharded", Lloyd(4), None, BlockInt(8))],
    "diloco": [PLAIN, Scheme("two_phase", Lloyd(4))],
}
worlds = st.sampled_from([(2, 1), (3, 1), (8, 8), (16, 4), (64, 8)])
jobs = st.builds(
    TrainingJob,
    st.integers(1, 10**9),
    st.floats(0.0, 10.0),
    st.sampled_from(list(model.DTYPES.values())),
    st.integers(1 << 20, 1 << 28),
    st.none() | st.floats(0.0, 1.0),
    parallel=st.sampled_from(list(SCHEMES)),
)
own_machines = st.sampled_from([GPU, RECORDED_ON, RECORDED_ON.shared(4, 2), RECORDED_ON.shared(2, 16)])


def cluster_of(world: tuple[int, int], own: Machine, across: LinkModel, inside: LinkModel) -> Cluster:
    ranks, node = world
    transport = "nccl" if own.device == "cuda" else "gloo"
    return Cluster(ranks, node, across if ranks > node else None, inside if node > 1 else None, transport)


links_ = st.builds(LinkModel, st.floats(1e6, 1e12), st.floats(0.0, 1e-2))


@generated(90)
@given(jobs, worlds, own_machines, links_, links_, st.floats(1.0, 100.0), st.integers(0, 5))
def test_less_of_everything_never_makes_a_step_longer(
    job: TrainingJob, world: tuple[int, int], own: Machine, slow: LinkModel, fast: LinkModel, times: float, which: int
) -> None:
    cluster = cluster_of(world, own, slow, fast)
    scheme = SCHEMES[job.parallel][which % len(SCHEMES[job.parallel])]
    if not (cluster.has_levels or scheme.inside is None):
        return
    found = model.predict(job, scheme, cluster, own)
    most = (1 + 1e-9) * found.step_s
    for rate, wait in ((times, 1.0), (1.0, 1 / times)):
        better = (LinkModel(rate * link.bytes_per_s, wait * link.latency_s) for link in (slow, fast))
        assert model.predict(job, scheme, cluster_of(world, own, *better), own).step_s <= most
    assert model.predict(replace(job, step_s=job.step_s / times), scheme, cluster, own).step_s <= most
    hidden, bare = (model.predict(replace(job, overlap=share), scheme, cluster, own).step_s for share in (1.0, 0.0))
    assert job.step_s <= hidden <= most
    assert found.step_s <= (1 + 1e-9) * bare < math.inf
    assert found.bytes >= 0.999 * found.bytes_across >= 0


# --- cases worked by hand -----------------------------------------------------------------------------------------

NODES = "--gpus-per-node 8 --intra 400GB/s"
CASES = {
    # 10.2 GB per rank and step at 25 Gbit/s (2.9 GB/s of payload) take 3.5 s; 0.6 s of 1.2 s hide. int8: a quarter.
    "DDP, 25 Gbit": (f"--params 1.3B --world 64 {NODES} --inter 25gbit --step 1.2s", True),
    # The same over RDMA at 400 Gbit/s: 10.2 GB / 50 GB/s = 0.2 s, all of it hidden behind the backward pass.
    "DDP, RDMA": (f"--params 1.3B --world 64 {NODES} --inter 400gbit --step 1.2s", False),
    # One host with NVLink: 9.1 GB / 400 GB/s = 23 ms, hidden.
    "DDP, NVLink": (f"--params 1.3B --world 8 {NODES} --step 300ms", False),
    # Eight gaming cards on PCIe: 9.1 GB / 12 GB/s = 0.76 s, 0.15 s of it hidden.
    "DDP, PCIe": ("--params 1.3B --world 8 --gpus-per-node 8 --intra 12GB/s --step 300ms", True),
    # LoRA: 84 MB of gradients; 147 MB at 12 GB/s are 12 ms of 900.
    "LoRA": ("--params 8B --trainable 21M --world 8 --gpus-per-node 8 --intra 12GB/s --step 900ms", False),
    # Two CPU ranks, 100 MB at 1 Gbit/s: 0.85 s against 0.2 s of compute.
    "two machines": ("--params 25M --world 2 --inter 1gbit --step 200ms --device cpu", True),
    # 40 kB of gradients: a message's latency decides.
    "tiny model": ("--params 10k --world 2 --inter 1gbit --step 5ms --device cpu", False),
    # FSDP2 at 3.2 Tbit/s: 55 GB / 400 GB/s = 0.14 s of 2 s, hidden.
    "FSDP2, 3.2 Tbit": (f"--parallel fsdp2 --params 7B --world 64 {NODES} --inter 3200gbit --step 2s", False),
    # FSDP2 on two machines with a GPU each: 1.3 B · (2 · 2 + 4) / 2 = 5.2 GB at 10 Gbit/s are 4.4 s.
    "FSDP2, 10 Gbit": ("--parallel fsdp2 --params 1.3B --world 2 --inter 10gbit --step 1s", True),
}


@pytest.mark.parametrize(("line", "compress"), CASES.values(), ids=CASES)
def test_cases(line: str, compress: bool) -> None:
    found = json.loads(call(f"{line} --json").stdout)["advice"]
    assert found["compress"] is compress, found["lines"]
    assert (found["lines"][0] == "Do not compress.") is not compress


def test_fsdp2_times_by_hand() -> None:
    """Two ranks, 10 Gbit/s: (2 + 2 + 4) bytes of 1.3 B weights, half of them sent."""
    found = json.loads(call(f"{CASES['FSDP2, 10 Gbit'][0]} --json").stdout)
    plain = next(one for one in found["schemes"] if one["scheme"] == "none")
    assert plain["bytes"] == pytest.approx(5.2e9, rel=1e-3)
    assert plain["step_s"] == pytest.approx(1 + 5.2 / (1.25 * PAYLOAD) - 0.75, rel=0.05)
    both = next(one for one in found["schemes"] if one["scheme"] == "int8/int8")
    assert both["bytes"] == pytest.approx(3 / 2 * 1.3e9 * 8.125 / 8, rel=1e-2)


def test_diloco_counts_sites() -> None:
    """14 GB of shards cross at 1 Gbit/s: 7 B weights in bf16, two sites of eight."""
    line = "--parallel diloco --params 7B --world 16 --gpus-per-node 8 --inter 1gbit --intra 400GB/s --step 2s --json"
    found = json.loads(call(line).stdout)
    bf16 = next(one for one in found["schemes"] if one["scheme"] == "bf16")
    assert bf16["round_s"] == pytest.approx(14 / (0.125 * PAYLOAD), rel=0.02)
    assert "A round between 2 sites, every 30 steps" in " ".join(found["advice"]["lines"])
    halved = json.loads(call(f"{line} --every 60").stdout)
    assert next(one for one in halved["schemes"] if one["scheme"] == "bf16")["step_s"] < bf16["step_s"]
    assert halved["advice"]["faster"] is None  # no loss was measured at 60


# --- verdicts ---------------------------------------------------------------------------------------------------------


def judged(inter: str, world: int = 64, node: int = 8, params: int = 1_300_000_000, **kwargs: Any) -> verdict.Verdict:
    inside = LinkModel.of_rate(units.rate("400GB/s"), 3e-6) if node > 1 else None
    cluster = Cluster(world, node, LinkModel.of_rate(units.rate(inter), 1e-5, "nccl"), inside)
    return verdict.judge(TrainingJob(params, 1.2), cluster, GPU, **kwargs)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2", "diloco"])
def test_the_advice_flips_once_and_names_nothing_whose_loss_was_not_measured(parallel: str) -> None:
    def compress(inter: str) -> bool:
        line = f"--parallel {parallel} --params 1.3B --world 64 {NODES} --inter {inter} --step 1.2s --json"
        found = json.loads(call(line).stdout)
        rows = {one["scheme"]: one for one in found["schemes"]}
        for way in (found["advice"]["safe"], found["advice"]["faster"]):
            assert way is None or way["scheme"] in ("bf16", "fp32") or rows[way["scheme"]]["loss"] is not None
        return bool(found["advice"]["compress"])

    found = [compress(rate) for rate in ("10mbit", "1gbit", "25gbit", "400gbit", "3200gbit", "100000gbit")]
    assert found == sorted(found, reverse=True)
    assert (found[0], found[-1]) == (True, False)


def test_one_rank_has_nothing_to_send() -> None:
    found = verdict.judge(TrainingJob(1000, 1.0), Cluster(1), GPU)
    assert found.lines == ("Do not compress.", "Why: there is no other rank to send to.")
    assert {prediction.step_s for prediction in found.ranked.values()} == {1.0}


@pytest.mark.parametrize(
    ("gap", "half", "safe", "faster"),
    [(0.0004, 0.002, True, False), (0.002, 0.002, False, True), (0.01, 0.01, False, True), (0.02, 0.02, False, False)],
)
def test_loss_decides_between_safe_faster_and_neither(gap: float, half: float, safe: bool, faster: bool) -> None:
    losses = {"int8": Loss(gap, half, 5, 25_436_672, "x.json")}
    choice = judged("10gbit", world=8, node=1, codecs=[BlockInt(8)], losses=losses).choice
    assert (choice.safe.name == "int8") is safe
    assert (choice.faster is not None) is faster


def test_the_rule_needs_a_clear_gain() -> None:
    plain = Way("fp32", "", 1.0, is_exact=True)

    def chosen(**way: Any) -> bool:
        return recommend.choose([plain, Way("int8", "x", loss=Loss(0.0, 0.001, 3, None, "r"), **way)]).compress

    assert chosen(step_s=0.5)
    assert not chosen(step_s=0.98)  # within noise
    assert not chosen(step_s=0.8, low=0.7)  # the range reaches below 1
    assert chosen(step_s=0.8, low=0.9)


def test_the_answers() -> None:
    plain, bf16 = Way("fp32", "nothing", 2.0, is_exact=True), Way("bf16", "hook", 1.5, is_exact=True)
    int8 = Way("int8", "compress", 1.0, 0.9, 1.1, Loss(0.0004, 0.002, 5, 25_000_000, "a.json"))
    lossy = Way("lloyd2", "narrow", 0.5, loss=Loss(0.0098, 0.002, 5, 25_000_000, "a.json"))
    job = TrainingJob(1_250_000_000, 1.0)
    assert list(verdict.answers(job, recommend.choose([plain, bf16, int8, lossy]))) == [
        "Safe: int8, 1.8–2.2 × over fp32, 1.4–1.7 × over bf16. Loss: +0.0004 ± 0.0020 nats (a.json, 5 seeds) on 25 M "
        "weights; yours is 50 × larger.",
        "    compress",
        "Faster: lloyd2, 4.0 × over fp32, 3.0 × over bf16; check the loss. Loss: +0.0098 ± 0.0020 nats (a.json, 5 "
        "seeds) on 25 M weights; yours is 50 × larger.",
        "    narrow",
    ]
    assert list(verdict.answers(job, recommend.choose([plain, replace(int8, step_s=3.0)]))) == ["Do not compress."]
    only = recommend.choose([plain, lossy])
    assert next(verdict.answers(job, only)).startswith("Safe: no compression")


def test_what_is_advised_can_be_called() -> None:
    cluster = Cluster(64, 8, across=LinkModel(1e9), inside=LinkModel(1e11))
    functions = {"ddp": "compress_ddp", "fsdp2": "compress_fsdp", "diloco": "DiLoCo"}
    for parallel, name in functions.items():
        job = TrainingJob(10**9, 1.0, parallel=parallel)
        lines = [s.how(job, cluster) for s in model.candidates(job, cluster, [BlockInt(8), Lloyd(4)])[1:]]
        calls = [line for line in lines if line.startswith(f"thinwire.{name}(")]
        assert len(calls) >= 2
        for text in calls:
            parsed = ast.parse(text, mode="eval").body
            assert isinstance(parsed, ast.Call)
            given = {keyword.arg: None for keyword in parsed.keywords if keyword.arg}
            inspect.signature(getattr(thinwire, name)).bind(*parsed.args, **given)
    compile(BF16_HOOK, "", "exec")


@pytest.mark.parametrize(
    ("spec", "optimizer", "parallel", "added"),
    [
        ("lloyd2", "adam", "ddp", "none+moments"),
        ("lloyd2", "sgd", "ddp", "classic"),
        ("lloyd4", "adam", "ddp", "none"),
        ("lloyd4", "muon", "ddp", "classic"),
        ("int8", "muon", "ddp", "none"),
        ("topk", "adam", "ddp", "ef21"),
        ("topk", "adam", "diloco", "classic"),
        ("lloyd1", "muon", "diloco", "none"),
        ("lloyd2", "sgd", "fsdp2", "none"),
    ],
)
def test_feedback_is_what_is_added(spec: str, optimizer: str, parallel: str, added: str) -> None:
    job = TrainingJob(1000, 1.0, optimizer=optimizer, parallel=parallel)
    assert Scheme("two_phase", codec(spec)).feedback(job) == added
    assert Scheme("hierarchical", codec(spec), BlockInt(8)).feedback(job) == "none"


# --- losses -----------------------------------------------------------------------------------------------------------


def of_arms(*rows: dict[str, Any]) -> Record:
    first = {"size": "25m", "optimizer": "adamw", "bits": 8.1, "world": 8, "seeds": 5, "val_loss": 0.74}
    first |= {"parallel": "ddp", "fp32_val_nats": 0.74, "tokens_more_percent": None, "params": 25_436_672}
    return Record("loss", {}, [{**first, **row} for row in rows])


def test_losses_of_the_study_are_read() -> None:
    arms = [("int8", 0.0004, 0.002), ("lloyd2", 0.0098, 0.002), ("fp32", 0.0, 0.0), ("null", 0.001, 0.001)]
    found = verdict.losses_of(of_arms(*({"arm": a, **pairs.Difference(g, h, 5).columns} for a, g, h in arms)), "x")
    assert found["int8"] == Loss(0.0004, pytest.approx(0.002), 5, 25_436_672, "x")
    assert set(found) == {"int8", "lloyd2 + moments"}  # which compress_ddp adds
    between = {"arm": "lloyd2", "parallel": "diloco", "every": 30, **pairs.Difference(0.01, 0.002, 5).columns}
    weights = {**between, "arm": "weights:int8", "parallel": "fsdp2", "every": None}
    assert set(verdict.losses_of(of_arms(between, weights), "x")) == {"lloyd2 every 30"}


def test_losses_are_those_of_the_optimizer() -> None:
    """Of the two arms of lloyd4 with Muon the one with feedback counts, which compress_ddp has."""
    muon = compared.read("loss_25m_muon_h200_2026-11-18")
    assert set(verdict.losses_of(muon, "x", "muon")) == {"int8", "lloyd4 + classic"}
    with pytest.raises(RecordError, match="trained with adam and two seeds or more"):
        verdict.losses_of(muon, "x")
    line = "--params 124M --world 2 --inter 10gbit --step 20ms --optimizer"
    assert call(f"{line} muon").stdout.splitlines()[1].startswith("Safe: int8")  # 4 bits lose 0.012 nats
    assert "the committed losses are of Adam" in call(f"{line} sgd").stdout
    assert "the committed losses are of Adam" not in call(f"{line} adam").stdout


def test_losses_that_cannot_be_used_raise(tmp_path: Path) -> None:
    one_seed = of_arms({"arm": "int8", **pairs.Difference(0.1, None, 1).columns})
    with pytest.raises(RecordError, match="two seeds or more"):
        verdict.losses_of(one_seed, "x")
    result = call(f"{SMALL} --losses {compared.ROOT / 'codec_cpu.json'}")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "expected losses (a record of kind loss or train), got one of kind codec" in " ".join(result.stderr.split())
    assert call(f"{SMALL} --losses {tmp_path / 'absent.json'}").exit_code == 2


def test_own_losses_count_first(tmp_path: Path) -> None:
    gap = pairs.Difference(0.0, 0.001, 5)
    own = of_arms({"arm": "lloyd4", **gap.columns, "size": "train.py", "params": None})
    conditions = dict.fromkeys(record.CONDITIONS, "x")
    record.write(Record("loss", conditions, own.rows), str(tmp_path / "own.json"))
    shown = call(f"{SMALL} --losses {tmp_path / 'own.json'}").stdout
    assert "Safe: lloyd4" in shown
    assert "Loss: +0.0000 ± 0.0010 nats (own.json, 5 seeds)." in shown


# --- the command ------------------------------------------------------------------------------------------------------

LARGE = f"--params 1.3e9 --world 64 {NODES} --inter 25gbit --step 1.2s"
SMALL = "--params 25M --world 2 --inter 1gbit --step 200ms --device cpu"


def call(line: str) -> Result:
    return CliRunner().invoke(app, ["advise", *line.split()], prog_name="thinwire")


def test_two_answers_come_first_and_the_table_behind_all() -> None:
    result = call("--params 1.3e9 --world 8 --inter 1gbit --step 1.2s")
    assert (result.exit_code, result.stderr) == (0, "")
    _, safe, _, faster, *_ = result.stdout.splitlines()
    assert safe.startswith("Safe: lloyd4")
    assert faster.startswith("Faster: trellis2")  # as fast as lloyd2, and it loses less
    assert "Predicted, the fastest first" not in result.stdout
    assert "Predicted, the fastest first" in call(f"{LARGE} --all").stdout
    assert "0.26 % of the weights learn" in call(CASES["LoRA"][0]).stdout


def test_flags_change_the_prediction() -> None:
    def step(more: str, scheme: str = "lloyd2") -> float:
        rows = json.loads(call(f"{SMALL} --json {more}").stdout)["schemes"]
        return float(next(row["step_s"] for row in rows if row["scheme"] == scheme))

    assert step("--optimizer sgd") > step("")  # which has classic feedback, that passes over memory
    assert step("--latency 10ms") > step("")
    assert step("--overlap 0.9", "int8") < step("", "int8")
    assert step("--trainable 1M") < step("")
    assert step("--dtype bfloat16", "none") < step("", "none")
    assert step("--codecs lloyd2:block=256", "lloyd2:block=256") > 0


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2", "diloco"])
def test_the_largest_and_smallest_are_predicted_too(parallel: str) -> None:
    for line in ("1 --world 2 --inter 1bit/s --step 0s", "1e18 --world 1e9 --inter 1e9GB/s --step 1e9s"):
        assert call(f"--params {line} --parallel {parallel}").exit_code == 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "Missing: --params, --step, --world, --inter; see thinwire advise --help"),
        (LARGE.replace("node 8", "node 7"), "expected a divisor of --world 64, got 7"),
        (f"{LARGE} --codecs int9", "unknown codec 'int9'"),
        *(
            (f"{LARGE} {gone} 4", f"No such option: {gone}")
            for gone in ("--cores", "--memory", "--activations", "--bucket")
        ),
        (f"{LARGE} --every 10", "Invalid value for --every: goes with --parallel diloco"),
        (f"{LARGE} --parallel diloco --losses x.json", "Invalid value for --losses: holds no losses of DiLoCo"),
        (f"{LARGE} --parallel hsdp", "'hsdp' is not one of 'ddp', 'fsdp2', 'diloco'"),
        (f"{SMALL} --intra 1GB/s", "Invalid value for --intra: no other rank uses that link"),
    ],
)
def test_bad_flags_say_what_is_allowed(line: str, said: str) -> None:
    result = call(line)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in " ".join(result.stderr.split())
