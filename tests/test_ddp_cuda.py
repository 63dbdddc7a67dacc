"""DDP with parameters on a GPU: NaN over gloo, world 1 on NCCL, and feedback on its stream without a host sync.

What DDP does on any device is in tests/test_ddp.py.
"""

import hashlib
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from cases import CUDA, assert_same, needs_cuda, no_host_sync
from ranks import RankPool
from replicas import READY, Given, backward, draw, flat, wrap
from test_collectives_cuda import nccl_channel
from thinwire import feedback
from thinwire.collectives import chunks
from thinwire.collectives.chunks import Flat, Lane, LaneSpec
from thinwire.collectives.operations import AllReduce
from thinwire.collectives.plan import CallPlan
from thinwire.collectives.sums import SumProgram
from thinwire.kernels.rows import Fine

pytestmark = list(needs_cuda)
N = 40_000


def small_model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 200), nn.ReLU(), nn.LayerNorm(200), nn.Linear(200, 10)).to(device)


def train(group: dist.ProcessGroup, device: torch.device, codec: str, feedback: str, poison: int) -> dict[str, object]:
    """Losses, a digest of the parameters, and how residuals looked around a step in which rank 1 had NaN."""
    model = DistributedDataParallel(small_model(device), process_group=group, bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = thinwire.compress_ddp(model, codec, feedback=feedback, algorithm="two_phase")
    generator = torch.Generator().manual_seed(group.rank())
    losses, untouched = [], True
    for step in range(8):
        x = torch.randn(16, 40, generator=generator)
        y = (x[:, :10] > 0).float().argmax(1).to(device)
        before = handle.state_dict()["ranks"][str(group.rank())]
        loss = nn.functional.cross_entropy(model(x.to(device)), y)
        optimizer.zero_grad()
        (loss * (math.nan if step == poison and group.rank() == 1 else 1.0)).backward()
        if step == poison:
            after = handle.state_dict()["ranks"][str(group.rank())]
            untouched = all(torch.equal(before[name], after[name]) for name in before)
            assert all(p.grad is not None and p.grad.isnan().any() for p in model.parameters())
        else:
            optimizer.step()
            losses.append(loss.item())
    parameters = torch.cat([p.detach().cpu().view(-1) for p in model.parameters()])
    digest = hashlib.sha256(parameters.numpy().tobytes()).hexdigest()
    return {"digest": digest, "loss": losses[-1], "untouched": untouched, "nonfinite": handle.stats().nonfinite}


def train_on_gpu(group: dist.ProcessGroup, codec: str, feedback: str) -> dict[str, object]:
    return train(group, CUDA, codec, feedback, poison=5)


@pytest.mark.parametrize(("codec", "kind"), [("int8", "none"), ("lloyd2", "classic"), ("lloyd2", "ef21")])
def test_parameters_on_a_gpu_train_over_gloo(ranks: RankPool, codec: str, kind: str) -> None:
    results = ranks(2).run(train_on_gpu, codec, kind)
    assert len({result["digest"] for result in results}) == 1
    for result in results:
        assert result["untouched"]
        assert result["nonfinite"] > 0  # type: ignore[operator]
        assert result["loss"] < 2.6  # type: ignore[operator]  # ln 10 = 2.3 at the start: nothing blew up


def feedback_on_nccl_stream(group: dist.ProcessGroup, kind: str) -> dict[str, float]:
    channel, device = nccl_channel(), CUDA
    memories = [torch.zeros(N, device=device) for _ in range(2)]
    carry = feedback.Carry(memories[0], None if kind == "classic" else memories[1])
    spec = LaneSpec(N, *[thinwire.codec("lloyd2")] * 2, kind, chunking=chunks.Chunking(N, 16_384))
    program = SumProgram([channel.transport], "one_shot", [spec], 1.0, fused=False)
    told: list[Fine] = []

    def average(x: torch.Tensor, step: int) -> None:
        plan = CallPlan("all_reduce", [spec], program.scratch_bytes, sum=program)
        call = channel.issue(plan, outputs=[x], step=step, async_op=True)
        lane = Lane(spec, Flat([x]), carry)
        channel.submit(AllReduce(call, [lane], told.append), call).wait()

    x = torch.randn(N, device=device)
    average(x.clone(), 0)  # warm
    total, last = torch.zeros_like(x), x.clone()
    for memory in memories:
        memory.zero_()
    poisoned = x.clone()
    poisoned[7] = torch.nan
    with no_host_sync():
        for step in range(1, 9):
            last = x.clone()
            average(last, step)
            total += last
        kept = memories[0].clone()
        average(poisoned, 9)
    torch.cuda.synchronize()
    assert all(isinstance(fine, torch.Tensor) for fine in told)
    chunk = slice(0, 16_384)
    return {
        "owed": float((8 * x - total - kept).norm() / x.norm()),
        "last": float((last - x).norm() / x.norm()),
        "moved": float((memories[0][chunk] - kept[chunk]).abs().max()),
    }


def test_classic_feedback_owes_what_it_remembers_on_a_stream(ranks: RankPool) -> None:
    (found,) = ranks(1).run(feedback_on_nccl_stream, "classic")
    assert found["owed"] < 1e-5  # 8 x = everything that arrived + the residual, up to the rounding of fp32
    assert found["moved"] == 0.0


def test_ef21_converges_on_a_stream(ranks: RankPool) -> None:
    (found,) = ranks(1).run(feedback_on_nccl_stream, "ef21")
    assert found["last"] < 0.1175**4 * 2  # eight steps, each leaves sqrt(0.1175) of the difference
    assert found["moved"] == 0.0


def ddp_on_nccl(group: dist.ProcessGroup, codec: str, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What a DDP of one rank makes of its gradients, and the gradients."""
    torch.cuda.set_device(CUDA)
    members = dist.new_group([0], backend="nccl")
    model = wrap(Given(ready=READY), members, device=CUDA)
    thinwire.compress_ddp(model, codec, feedback=kind, exempt="none")
    got = [flat(backward(model, draw(0, step))) for step in range(3)]
    dist.destroy_process_group(members)
    return torch.cat(got), torch.cat([flat(draw(0, step)) for step in range(3)])


@pytest.mark.parametrize("kind", ["none", "classic", "ef21"])
@pytest.mark.parametrize("codec", ["none", "int8", "lloyd2"])
def test_one_rank_on_nccl_keeps_its_gradients(ranks: RankPool, codec: str, kind: str) -> None:
    ((got, want),) = ranks(1).run(ddp_on_nccl, codec, kind)
    assert_same(got, want)
