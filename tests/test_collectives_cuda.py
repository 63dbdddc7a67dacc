"""Collectives of GPU tensors: on NCCL's stream without waiting for the host, and over gloo through the host."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import thinwire
from ranks import RankPool
from thinwire import kernels
from thinwire.codecs import Codec
from thinwire.collectives import calls, chunks, plain, reducers, schedule, steps
from thinwire.collectives.chunks import Flat
from thinwire.collectives.reducers import Lane, Size

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
N = 40_000


@contextmanager
def no_host_sync() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch says that this is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def hear_of_the_backend(device: torch.device) -> None:
    """A GPU without kernels of its own is announced once; warnings are errors in the ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        kernels.select(device)


def stream_operation(channel: schedule.Channel, codec: Codec, kind: type, x: Tensor) -> steps.AllReduce:
    """An all_reduce that goes all the way, though the group has one rank and the verb would take its shortcut."""
    reducer, cut = kind(channel.transport), chunks.Cut(x.numel(), 16_384)
    size = reducer.scratch_bytes([Size(codec, cut.chunk, x.dtype)])
    setting = calls.Plan(codec, cut, size, 3 * size).setting(channel, 7)
    return steps.AllReduce(setting, [Lane(Flat([x]), cut, codec, codec)], reducer, 1.0)


def on_nccl_stream(group: dist.ProcessGroup, spec: str, kind: str) -> dict[str, float]:
    torch.cuda.set_device(0)
    hear_of_the_backend(torch.device("cuda", 0))
    nccl = dist.new_group([0], backend="nccl")
    device = torch.device("cuda", 0)
    channel, codec = schedule.channel(nccl, device), thinwire.codec(spec)
    x = torch.randn(N, device=device)
    expected, y = x.clone(), x.clone()
    channel.run(stream_operation(channel, codec, getattr(reducers, kind), expected)).wait()  # warm
    with no_host_sync():
        work = channel.run(stream_operation(channel, codec, getattr(reducers, kind), y))
        work.wait()
        doubled = y * 2  # on the current stream, right after wait
    torch.cuda.synchronize()
    assert work.is_completed()
    assert torch.equal(doubled, 2 * expected)
    return {"error": float((y - x).norm() / x.norm())}


@pytest.mark.parametrize("kind", ["OneShot", "TwoPhase"])
@pytest.mark.parametrize(("spec", "bound"), [("none", 0.0), ("int8", 0.01), ("lloyd4", 0.15)])
def test_nothing_waits_for_the_host_on_a_stream(ranks: RankPool, spec: str, kind: str, bound: float) -> None:
    (found,) = ranks(1).run(on_nccl_stream, spec, kind)
    assert found["error"] <= bound


def over_gloo(group: dist.ProcessGroup, spec: str, algorithm: str) -> tuple[bytes, float, bool]:
    device = torch.device("cuda", 0)
    hear_of_the_backend(device)
    generator = torch.Generator().manual_seed(group.rank())
    x = torch.randn(N, generator=generator)
    exact = x.clone()
    dist.all_reduce(exact, group=group)
    y = x.to(device)
    thinwire.all_reduce(y, group=group, codec=spec, algorithm=algorithm)
    on_cpu = x.clone()
    thinwire.all_reduce(on_cpu, group=group, codec=spec, algorithm=algorithm)
    same = torch.equal(y.cpu(), on_cpu)
    return y.cpu().numpy().tobytes(), float((y.cpu() - exact).norm() / exact.norm()), same


@pytest.mark.parametrize("algorithm", ["one_shot", "two_phase"])
@pytest.mark.parametrize("spec", ["none", "int8", "lloyd4"])
def test_gpu_tensors_travel_over_gloo(ranks: RankPool, spec: str, algorithm: str) -> None:
    results = ranks(2).run(over_gloo, spec, algorithm, timeout=50.0)
    assert len({wire for wire, _, _ in results}) == 1
    assert all(same for _, _, same in results), "a GPU and a CPU compute the same bytes"
    assert all(error < 0.2 for _, error, _ in results)


def verbs_over_gloo(group: dist.ProcessGroup) -> list[float]:
    device, world, rank = torch.device("cuda", 0), group.size(), group.rank()
    hear_of_the_backend(device)
    how = {"group": group, "codec": "none", "algorithm": "compressed"}
    x = torch.arange(world * 1000.0, device=device) + rank
    out = torch.empty(1000, device=device)
    thinwire.reduce_scatter_tensor(out, x, **how)
    whole = torch.empty(world * 1000, device=device)
    thinwire.all_gather_into_tensor(whole, out, **how)
    thinwire.all_to_all_single(whole, whole.clone(), **how)
    thinwire.broadcast(whole, group_src=0, **how)
    return [float(whole.sum()), float(out.sum())]


def test_every_verb_takes_gpu_tensors_over_gloo(ranks: RankPool) -> None:
    first, second = ranks(2).run(verbs_over_gloo, timeout=50.0)
    assert first[0] == second[0]


def torch_on_a_stream(group: dist.ProcessGroup) -> bool:
    """torch's own all_gather, waited for on another stream than it was called on."""
    torch.cuda.set_device(0)
    device = torch.device("cuda", 0)
    hear_of_the_backend(device)
    channel = schedule.channel(dist.new_group([0], backend="nccl"), device)
    x = torch.ones(1 << 26, device=device)
    out, side = torch.zeros_like(x), torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)  # the collective cannot have run when `wait` returns
    call = calls.Call(channel, "all_gather", known=True)
    work = plain.all_gather(call, out, x, [out], async_op=True)
    assert work is not None
    with torch.cuda.stream(side):
        work.wait()
        total = out.sum()
    side.synchronize()
    return float(total) == x.numel()


def test_torchs_own_calls_are_ordered_by_streams_too(ranks: RankPool) -> None:
    assert ranks(1).run(torch_on_a_stream) == [True]
