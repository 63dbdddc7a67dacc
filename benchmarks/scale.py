"""What grows with the number of ranks: predicted by `thinwire advise`, and measured with gloo ranks on one machine.

python -m benchmarks.scale --json benchmarks/scale_gloo.json measures: joining the group, the first and later sums, and
how long the others wait after a rank has died, beside plain torch. All ranks share this machine's cores: only ratios
count. `predicted` makes the tables of docs/scale.md.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist

import thinwire
from benchmarks.command import start
from thinwire.codecs import codec
from thinwire.tools.advise import cluster as clusters, model, units
from thinwire.tools.advise.cluster import Cluster, LinkModel
from thinwire.tools.advise.model import PLAIN, Scheme, TrainingJob
from thinwire.tools.bench.record import COLUMNS, Progress, Record, Row, collect
from thinwire.tools.cli import flags
from thinwire.tools.cli.bench import deliver
from thinwire.tools.cli.flags import Json, Words, option

WORLDS = (16, 32, 64)
NUMEL = 1 << 18
ROUNDS = 5
PATIENCE = timedelta(seconds=60)
STAGES = ("join", "first sum", "later sum", "failure")
Sum = Callable[[torch.Tensor], object]
SUMS: dict[str, Sum] = {
    "plain": lambda x: dist.all_reduce(x),
    "int8": lambda x: thinwire.all_reduce(x, codec="int8", algorithm="two_phase"),
}


def measured(world: int, name: str) -> dict[str, Any]:
    """Seconds of STAGES, of the slowest rank, and what the first survivor says; ranks are forked from this process."""
    with tempfile.TemporaryDirectory() as folder:
        children = [_forked(rank, world, name, folder) for rank in range(world)]
        for child in children:
            os.waitpid(child, 0)
        parts = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    if len(parts) != world - 1:
        raise RuntimeError(f"expected {world - 1} survivors, got {len(parts)}")
    return {**{stage: max(part[stage] for part in parts) for stage in STAGES}, "says": parts[0]["says"]}


def _forked(rank: int, world: int, name: str, folder: str) -> int:
    child = os.fork()
    if child:
        return child
    try:
        found = _rank(rank, world, SUMS[name], folder)
        Path(folder, f"{rank}.json").write_text(json.dumps(found))
    finally:
        os._exit(0)


def _rank(rank: int, world: int, add: Sum, folder: str) -> dict[str, Any]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    times = [time.perf_counter()]
    store = dist.FileStore(f"{folder}/store", world)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=PATIENCE)
    dist.barrier()
    times.append(time.perf_counter())
    x = torch.ones(NUMEL)
    add(x)
    times.append(time.perf_counter())
    later = []
    for _ in range(ROUNDS):
        dist.barrier()
        begun = time.perf_counter()
        add(x.fill_(1.0))
        later.append(time.perf_counter() - begun)
    dist.barrier()
    if rank == world - 1:
        os._exit(0)
    begun = time.perf_counter()
    try:
        add(x)
        says = "nothing"
    except Exception as error:
        says = str(error).splitlines()[0][:160]
    found = [times[1] - times[0], times[2] - times[1], median(later), time.perf_counter() - begun]
    return {**dict(zip(STAGES, found, strict=True)), "says": says}


def rows(worlds: list[int], progress: Progress) -> Iterator[Row]:
    """One per world and stage."""
    for world in progress(worlds):
        ours, plain = measured(world, "int8"), measured(world, "plain")
        for stage in STAGES:
            ms, beside = 1e3 * ours[stage], 1e3 * plain[stage]
            known: Row = {"verb": stage, "codec": "int8", "algorithm": "two_phase", "world": world, "numel": NUMEL}
            known |= {"link": "loopback", "ms_p50": ms, "plain_ms": beside, "speedup_plain": beside / ms}
            known |= {"threads": 1, "cores": os.cpu_count(), "backend": "gloo"}
            if stage == "failure":
                known |= {"says": ours["says"], "plain_says": plain["says"]}
            yield {**dict.fromkeys(COLUMNS["collectives"]), **known}


def command(
    worlds: Annotated[Words, option("Numbers of ranks; default 16,32,64.", "N,M")] = None, json: Json = None
) -> None:
    """What joining, sums and a failure take with many gloo ranks on this machine, beside plain torch."""
    torch.set_num_threads(1)
    counts = flags.counts(worlds, "--worlds", 2) or list(WORLDS)

    def run(progress: Progress) -> Record:
        return collect("collectives", torch.device("cpu"), rows(counts, progress))  # type: ignore[arg-type]

    deliver(run, json)


# Predictions.

RANKS = (2, 64, 4096)
RATES = ("1gbit", "25gbit", "100gbit", "400gbit")
JOBS = {
    "DDP, 1.3 B": TrainingJob(1_300_000_000, 1.2, bucket_bytes=100 << 20),
    "FSDP2, 7 B": TrainingJob(7_000_000_000, 2.0, parallel=model.FSDP2),
    "DiLoCo, 7 B, every 30": TrainingJob(7_000_000_000, 2.0, parallel=model.DILOCO),
}


def placed(ranks: int, rate: str) -> Cluster:
    """Nodes of eight GPUs with NVLink; two ranks have a node each."""
    node = 8 if ranks > 8 else 1
    inside = LinkModel.of_rate(units.rate("400GB/s"), clusters.INSIDE_LATENCY_S["nccl"], "nccl", inside=True)
    across = LinkModel.of_rate(units.rate(rate), clusters.LATENCY_S["nccl"], "nccl")
    return Cluster(ranks, node, across, inside if node > 1 else None)


def scheme_of(job: TrainingJob, cluster: Cluster) -> Scheme:
    """int8, in levels where there are some."""
    int8, bf16 = codec("int8"), codec("bf16")
    if job.parallel == model.DDP:
        return Scheme("hierarchical", int8, bf16) if cluster.has_levels else Scheme(model.usual(cluster.world), int8)
    return Scheme("sharded", int8, None, int8) if job.parallel == model.FSDP2 else Scheme("two_phase", codec("lloyd4"))


def predicted() -> str:
    """A Markdown table."""
    gpu = clusters.recorded("cuda")
    rates = [rate.removesuffix("gbit") for rate in RATES]
    head = ["job", "ranks", f"{rates[0]} Gbit/s", *rates[1:], "sent", "messages", "host", "source"]
    lines = [f"| {' | '.join(head)} |", f"|---|{'--:|' * (len(head) - 1)}"]
    for name, job in JOBS.items():
        for ranks in RANKS:
            if job.parallel == model.DILOCO and not placed(ranks, RATES[0]).has_levels:
                continue  # a GPU holds no more than a shard of it
            steps = []
            for rate in RATES:
                where = placed(ranks, rate)
                both = [model.predict(job, one, where, gpu) for one in (PLAIN, scheme_of(job, where))]
                steps.append(" → ".join(units.duration(one.step_s) for one in both))
            last = both[1]
            cells = [units.nbytes(last.bytes), f"{last.messages:,}", units.duration(last.host_s)]
            cells.append("predicted")
            lines.append(f"| {name} | {ranks:,} | {' | '.join([*steps, *cells])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    from benchmarks import scale as study  # under its own name

    start(study.command)
