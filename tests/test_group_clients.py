"""Unmodified clients of torch.distributed in a group that compresses: their traffic, and how close they stay to gloo.

The functions take a group and a device, so that test_group_nccl.py runs them on NCCL.
"""

import contextlib
import copy
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.algorithms import Join
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import thinwire
from cases import on_ranks, seeded
from ranks import RankPool
from thinwire.collectives import groups, traffic
from thinwire.group.rules import OPERATIONS

Device = torch.device
CPU = torch.device("cpu")
WIDTH = 64
STEPS = 3
RANKS_IMPORT = ("torch.distributed.pipelining", "torch.distributed.fsdp")
ALL = "; ".join(f"{name}=int8" for name in OPERATIONS)
CLOSE = 0.03  # relative: a few roundings of int8, each with a root mean square of about 0.6 % on such numbers


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(x)))  # smooth: a small error stays one
        return out


def network(device: Device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Net(), Net()).to(device)


def batch(step: int, rank: int, device: Device, rows: int = 8) -> Tensor:
    return torch.randn(rows, WIDTH, generator=seeded(step, rank)).to(device)


def trained(model: Any, rank: int, device: Device) -> list[Tensor]:
    """The parameters after some steps on a rank's own batches."""
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(step, rank, device)).square().mean().backward()
        optimizer.step()
    return [whole(parameter) for parameter in parameters]


def whole(parameter: Any) -> Tensor:
    found = parameter.detach()
    return (found.full_tensor() if hasattr(found, "full_tensor") else found).cpu()


def ddp(group: Any, device: Device) -> list[Tensor]:
    model = DistributedDataParallel(network(device), process_group=group)
    return trained(model, group.rank(), device)


def joined(group: Any, device: Device) -> list[Tensor]:
    """Ranks with different numbers of batches."""
    model = DistributedDataParallel(network(device), process_group=group)
    with Join([model]):
        for step in range(STEPS + group.rank()):
            model(batch(step, group.rank(), device)).square().mean().backward()
    return [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]


def mesh_of(group: Any, device: Device) -> DeviceMesh:
    """Named by its group: DTensor takes meshes of one name and the same ranks for one."""
    return DeviceMesh.from_group(group, device.type, mesh_dim_names=(f"of{group.group_name}",))


def fsdp2(group: Any, device: Device) -> list[Tensor]:
    model, mesh = network(device), mesh_of(group, device)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return trained(model, group.rank(), device)


def fsdp1(group: Any, device: Device) -> list[Tensor]:
    model = FullyShardedDataParallel(network(device), process_group=group, device_id=device, use_orig_params=False)
    trained(model, group.rank(), device)
    with FullyShardedDataParallel.summon_full_params(model):
        return [parameter.detach().cpu().clone() for parameter in model.parameters()]


def tensor_parallel(group: Any, device: Device) -> list[Tensor]:
    model, mesh = network(device), mesh_of(group, device)
    for layer in model:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return trained(model, 0, device)  # all ranks have one batch


def pipelined(group: Any, device: Device, kind: Any = ScheduleGPipe) -> list[Tensor]:
    """The gradients of this rank's stage."""
    rank, world = group.rank(), group.size()
    torch.manual_seed(0)
    stages = [Net() for _ in range(world)]
    part = stages[rank].to(device)
    stage = PipelineStage(part, rank, world, device, group=group)
    schedule = kind(stage, n_microbatches=world + 1, loss_fn=lambda y, t: (y - t).square().mean())
    x, target = (batch(step, 0, device, rows=4 * (world + 1)) for step in (0, 1))
    if rank == 0:
        schedule.step(x)
    elif rank == world - 1:
        schedule.step(target=target)
    else:
        schedule.step()
    return [parameter.grad.cpu() for parameter in part.parameters() if parameter.grad is not None]


def one_forward_one_backward(group: Any, device: Device) -> list[Tensor]:
    return pipelined(group, device, Schedule1F1B)


def experts(group: Any, device: Device) -> list[Tensor]:
    """Uneven all_to_all to experts and back, as a mixture of experts does it."""
    rank, world = group.rank(), group.size()
    tokens = batch(0, rank, device, rows=16)
    expert = (torch.arange(16) * (rank + 1) % world).sort().values
    sent = expert.bincount(minlength=world)
    there = sent.to(device, copy=True)
    dist.all_to_all_single(there, sent.to(device), group=group)
    counts = there.tolist()
    came = tokens.new_zeros(sum(counts), WIDTH)
    dist.all_to_all_single(came, tokens, counts, sent.tolist(), group=group)
    back = torch.zeros_like(tokens)
    dist.all_to_all_single(back, came * (rank + 1), sent.tolist(), counts, group=group)
    return [came.cpu(), back.cpu()]


def compiled(group: Any, device: Device) -> list[Tensor]:
    """Functional collectives inside a compiled function."""
    import torch.distributed._functional_collectives as funcol

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        total = funcol.all_reduce(x * 2, "sum", group)
        return total + 1, funcol.all_to_all_single(x, None, None, group)

    return [found.cpu() for found in run(batch(0, group.rank(), device, rows=8 * group.size()))]


def saved(group: Any, device: Device) -> list[Tensor]:
    """A distributed checkpoint of a sharded model, read back: exact under the default rules."""
    model, mesh = network(device), mesh_of(group, device)
    fully_shard(model, mesh=mesh)
    expected = copy.deepcopy([whole(parameter) for parameter in model.parameters()])
    folder = [tempfile.mkdtemp() if group.rank() == 0 else None]
    dist.broadcast_object_list(folder, group=group, group_src=0, device=device)
    checkpoint.save(model.state_dict(), checkpoint_id=folder[0], process_group=group)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = model.state_dict()
    checkpoint.load(state, checkpoint_id=folder[0], process_group=group)
    found = [whole(parameter) for parameter in model.parameters()]
    assert all(map(torch.equal, found, expected))
    return found


Client = Callable[[Any, Device], list[Tensor]]
CLIENTS: list[tuple[Client, str]] = [  # and the rules that suit them
    (ddp, "all_reduce=int8"),
    (joined, "all_reduce=int8"),
    (fsdp2, "reduce_scatter=int8"),
    (fsdp1, "reduce_scatter=int8"),
    (tensor_parallel, "all_reduce=int8"),
    (pipelined, "send=int8"),
    (one_forward_one_backward, "send=int8"),
    (experts, "all_to_all=int8"),
    (compiled, ALL),
]


def compared(plain: Any, mine: Any, client: Client, device: Device) -> None:
    """A client stays close to its numbers on a plain group, and its traffic is compressed."""
    expected = client(plain, device)
    before = traffic(mine).sent
    found = client(mine, device)
    assert traffic(mine).sent > before, "nothing was compressed"
    pairs = zip(found, expected, strict=True)
    errors = [((one - other).norm() / other.norm().clamp(min=1e-30)).item() for one, other in pairs]
    assert 0 < max(errors) <= CLOSE, (client.__name__, errors)


def on_gloo(group: Any, client: Client, rules: str) -> None:
    with contextlib.suppress(KeyError):
        torch._dynamo.reset()
    mine = dist.new_group(backend="cpu:thinwire", pg_options=thinwire.GroupOptions(rules))
    compared(group, mine, client, CPU)


@pytest.mark.parametrize(("client", "rules"), CLIENTS, ids=[client.__name__ for client, _ in CLIENTS])
def test_clients_run_unmodified(ranks: RankPool, client: Client, rules: str) -> None:
    ranks(2).run(on_gloo, client, rules)
    if client in (ddp, fsdp2, tensor_parallel, one_forward_one_backward, experts):
        ranks(3 if client is not tensor_parallel else 4).run(on_gloo, client, rules)


@on_ranks(2)
def test_the_default_rules_leave_weights_and_checkpoints_exact(group: Any) -> None:
    """Under the default rules weights, checkpoints and first broadcasts are exact."""
    mine: Any = dist.new_group(backend="cpu:thinwire")
    saved(mine, CPU)
    expected = [whole(parameter) for parameter in network(CPU).parameters()]
    model = DistributedDataParallel(network(CPU), process_group=mine)
    assert all(map(torch.equal, [whole(parameter) for parameter in model.parameters()], expected))
    assert traffic(mine).sent == 0
    assert groups.resolve(mine) is mine.inner
