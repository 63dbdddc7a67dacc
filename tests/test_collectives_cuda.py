"""Collectives of GPU tensors: on NCCL's stream without waiting for the host, and over gloo through the host."""

import functools
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import thinwire
from cases import CUDA, needs_cuda, no_host_sync, on_ranks
from ranks import RankPool
from thinwire.codecs import Codec
from thinwire.collectives import chunks, torch_verbs
from thinwire.collectives.channel import Channel, channel_of
from thinwire.collectives.chunks import Flat, Lane, LaneSpec
from thinwire.collectives.operations import AllReduce
from thinwire.collectives.plan import CallPlan
from thinwire.collectives.sums import SumProgram

pytestmark = list(needs_cuda)
N = 40_000


def submit_sum(channel: Channel, codec: Codec, algorithm: str, x: Tensor) -> Any:
    """An all_reduce that goes all the way, though the group has one rank and the verb would take its shortcut."""
    lane = LaneSpec(x.numel(), codec, codec, dtype=x.dtype, chunking=chunks.Chunking(x.numel(), 16_384))
    program = SumProgram([channel.transport], algorithm, [lane], 1.0, fused=False)
    plan = CallPlan("all_reduce", [lane], program.scratch_bytes, sum=program)
    call = channel.issue(plan, outputs=[x], step=7, async_op=True)
    return channel.submit(AllReduce(call, [Lane(lane, Flat([x]))]), call)


def nccl_channel() -> Channel:
    """Of a group of this rank alone, in which everything is ordered by streams."""
    return channel_of(nccl_group(), CUDA)


@functools.lru_cache(maxsize=1)
def nccl_group() -> dist.ProcessGroup:
    """Made once per rank, as in a job."""
    torch.cuda.set_device(CUDA)
    group: dist.ProcessGroup = dist.new_group([0], backend="nccl")
    return group


def on_nccl_stream(group: dist.ProcessGroup, spec: str, kind: str, dtype: torch.dtype) -> float:
    """Its error, as a share; the second time without a host sync and with the same bytes."""
    channel, codec = nccl_channel(), thinwire.codec(spec)
    x = torch.randn(N, device=CUDA).to(dtype)
    expected, y = x.clone(), x.clone()
    submit_sum(channel, codec, kind, expected).wait()  # warm
    with no_host_sync():
        work = submit_sum(channel, codec, kind, y)
        work.wait()
        doubled = y * 2  # on the current stream, right after wait
    torch.cuda.synchronize()
    assert work.is_completed()
    assert torch.equal(doubled, 2 * expected)
    return float((y.double() - x.double()).norm() / x.double().norm())


BOUNDS = [("none", 0.0), ("int8", 0.01), ("lloyd4", 0.15)]
each_kind = pytest.mark.parametrize("kind", ["one_shot", "two_phase"])


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("spec", "bound"), BOUNDS)
def test_nothing_waits_for_the_host_on_a_stream(
    ranks: RankPool, spec: str, kind: str, bound: float, dtype: torch.dtype
) -> None:
    (error,) = ranks(1).run(on_nccl_stream, spec, kind, dtype)
    assert error <= bound


@each_kind
@pytest.mark.parametrize("spec", ["none", "int8", "lloyd4"])
@on_ranks(1, gives=[0.0] * 3)
def test_a_collective_is_captured_in_a_graph(group: dist.ProcessGroup, spec: str, kind: str) -> list[float]:
    """Errors of three replays against the same operation run eagerly."""
    channel, codec = nccl_channel(), thinwire.codec(spec)
    x, warm = torch.randn(N, device=CUDA), torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        submit_sum(channel, codec, kind, x.clone()).wait()
    torch.cuda.synchronize()
    time.sleep(0.5)  # NCCL's watchdog asks for finished works, which a capture would forbid
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch says that it waits for NCCL
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            submit_sum(channel, codec, kind, x).wait()
    errors = []
    for _ in range(3):
        numbers = torch.randn(N, device=CUDA)
        x.copy_(numbers)
        graph.replay()
        submit_sum(channel, codec, kind, numbers).wait()
        errors.append(float((x - numbers).abs().max()))
    return errors


@on_ranks(1, gives=[True] * 5)
def test_verbs_of_one_rank_are_exact_on_nccl(group: dist.ProcessGroup) -> list[bool]:
    """Every verb in a group of one rank, exact though its codec has one bit, and without a host sync."""
    x, y = torch.randn(3000, device=CUDA), torch.empty(3000, device=CUDA)
    how: Any = {"group": nccl_group(), "codec": "lloyd1"}

    def run() -> list[torch.Tensor]:
        z, outputs = x.clone(), []
        thinwire.all_reduce(z, algorithm="two_phase", **how)
        for verb in ("reduce_scatter_tensor", "all_gather_into_tensor", "all_to_all_single"):
            getattr(thinwire, verb)(y.fill_(0), x, algorithm="compressed", **how)
            outputs.append(y.clone())
        thinwire.broadcast(y, group_src=0, algorithm="compressed", **how)
        return [z, *outputs, y.clone()]

    run()  # ranks agree on calls they have not met
    with no_host_sync():
        found = run()
    return [torch.equal(output, x) for output in found]


def over_gloo(group: dist.ProcessGroup, spec: str, algorithm: str) -> tuple[bytes, float, bool]:
    generator = torch.Generator().manual_seed(group.rank())
    x = torch.randn(N, generator=generator)
    exact = x.clone()
    dist.all_reduce(exact, group=group)
    y = x.to(CUDA)
    thinwire.all_reduce(y, group=group, codec=spec, algorithm=algorithm, step=3)
    on_cpu = x.clone()
    thinwire.all_reduce(on_cpu, group=group, codec=spec, algorithm=algorithm, step=3)
    same = torch.equal(y.cpu(), on_cpu)
    return y.cpu().numpy().tobytes(), float((y.cpu() - exact).norm() / exact.norm()), same


@pytest.mark.parametrize("algorithm", ["one_shot", "two_phase"])
@pytest.mark.parametrize("spec", ["none", "int8", "lloyd4"])
def test_gpu_tensors_travel_over_gloo(ranks: RankPool, spec: str, algorithm: str) -> None:
    results = ranks(2).run(over_gloo, spec, algorithm)
    assert len({wire for wire, _, _ in results}) == 1
    assert all(same for _, _, same in results), "a GPU and a CPU compute the same bytes"
    assert all(error < 0.2 for _, error, _ in results)


@on_ranks(1, gives=True)
def test_torchs_own_calls_are_ordered_by_streams_too(group: dist.ProcessGroup) -> bool:
    """torch's own all_gather, waited for on another stream than it was called on."""
    channel = nccl_channel()
    x = torch.ones(1 << 26, device=CUDA)
    out, side = torch.zeros_like(x), torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)  # the collective cannot have run when `wait` returns
    call = channel.issue("all_gather", outputs=[out], async_op=True)
    work = torch_verbs.all_gather(call, (out, x))
    assert work is not None
    with torch.cuda.stream(side):
        work.wait()
        total = out.sum()
    side.synchronize()
    return float(total) == x.numel()
