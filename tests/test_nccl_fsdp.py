"""FSDP2 on NCCL: rows of gradients and weights by programs on FSDP's own streams, with the bytes of the CPU."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import thinwire
from cases import no_host_sync, on_ranks
from ranks import RankPool
from replicas import Group
from test_nccl import Place, each_world, on_nccl, on_worlds, two_nodes
from thinwire.collectives.chunks import LaneSpec
from thinwire.collectives.message import RowMessage

Options = Mapping[str, Any]
STEPS = 4
WIDTH = 48


class Net(nn.Module):
    """Blocks whose sizes ranks do not divide."""

    def __init__(self, device: str | torch.device = "cpu") -> None:
        super().__init__()
        parts = (nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 101), nn.GELU(), nn.Linear(101, WIDTH))
        self.blocks = nn.ModuleList(nn.Sequential(*parts).to(device) for _ in range(1))
        self.blocks.append(nn.Sequential(nn.Linear(WIDTH, 77), nn.GELU(), nn.Linear(77, WIDTH)).to(device))
        self.head = nn.Linear(WIDTH, 7, device=device)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x)
        return out


def sharded(mesh: Any, device: torch.device, **options: Any) -> Net:
    torch.manual_seed(3)
    model = Net(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def train(model: Net, rank: int, steps: int = STEPS) -> list[Tensor]:
    """The shards after some steps."""
    device = next(model.parameters()).device
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank)).to(device)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return [parameter.to_local().detach().cpu() for parameter in model.parameters()]  # type: ignore[attr-defined]


def messages(place: Place, codecs: list[str], numels: list[int], dtype: torch.dtype) -> list[Tensor]:
    """What a scatter and a gather of lanes give, on the CPU."""
    generator = torch.Generator().manual_seed(7 * place.rank + 1)
    specs = [LaneSpec(n, thinwire.codec(c), thinwire.codec(c)) for c, n in zip(codecs, numels, strict=True)]
    rows = [torch.randn(place.world, n, generator=generator).to(place.device, dtype) for n in numels]
    outputs = [torch.empty(1, n, device=place.device, dtype=dtype) for n in numels]
    wholes = [torch.empty(place.world, n, device=place.device, dtype=dtype) for n in numels]
    RowMessage(specs, rows[0], place.group, 1 / place.world).run(outputs, rows, 5)
    RowMessage(specs, rows[0], place.group).run(wholes, [row[:1].contiguous() for row in rows], 6)
    return [tensor.cpu() for tensor in (*outputs, *wholes)]


@each_world
@on_ranks(gives=[])
def test_rows_have_the_bytes_of_the_cpu(group: Group) -> list[str]:
    """Messages that differ from the CPU's."""
    place = on_nccl(group)
    wrong = []
    for codecs in (["int8"], ["lloyd4", "bf16"], ["int4", "lloyd2", "bf16"]):
        for dtype in (torch.float32, torch.bfloat16):
            numels = [3000, 1001, 17][: len(codecs)]
            there = messages(place, codecs, numels, dtype)
            here = messages(Place(group, torch.device("cpu")), codecs, numels, dtype)
            same = all(torch.equal(a, b) for a, b in zip(there, here, strict=True))
            wrong += [] if same else [f"{codecs} {dtype}"]
    return wrong


def mesh_of(place: Place) -> DeviceMesh:
    return DeviceMesh.from_group(place.group, "cuda", mesh_dim_names=("shards",))


def trained(group: Group, replicated: bool) -> list[str]:
    """Ways of compressing that go wrong against plain FSDP2 on the same GPUs."""
    place = on_nccl(group)
    mesh = two_nodes(place) if replicated else mesh_of(place)
    plain = train(sharded(mesh, place.device), place.rank)
    exact: list[Options] = [{"gradients": "none", **({"inside": "none"} if replicated else {})}]
    rounded: list[Options] = [
        {"gradients": "int8", "weights": "int8"},
        {"gradients": "lloyd4", "weights": "lloyd4", "replica": True},
        {"gradients": "lloyd2", "feedback": "classic"},
        {"gradients": "lloyd2", "feedback": "ef21"},
    ]
    wrong = []
    for options in (*exact, *rounded):
        model = sharded(mesh, place.device)
        handle = thinwire.compress_fsdp(model, **options)
        found = train(model, place.rank)
        if options in exact:
            fine = all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
        else:
            # A step moves a weight by what its gradient says; what one rounding changes of that is a share of it.
            fine = all(
                float((a - b).norm()) <= 0.1 * max(float(a.norm()), 0.3) for a, b in zip(plain, found, strict=True)
            )
        if not fine or handle.step != STEPS or handle.stats().nonfinite:
            wrong.append(f"{options}: {handle}")
    return wrong


@each_world
def test_fsdp_trains_as_without_compression(ranks: RankPool, world: int) -> None:
    assert ranks(world).run(trained, False) == [[]] * world


@on_worlds(4)
def test_hsdp_trains_as_without_compression(ranks: RankPool, world: int) -> None:
    assert ranks(world).run(trained, True) == [[]] * world


@each_world
@on_ranks(gives=[])
def test_exact_weights_have_the_bits_of_plain_fsdp(group: Group) -> list[str]:
    """Dtypes of gathered weights whose training differs."""
    place = on_nccl(group)
    wrong = []
    for dtype in (None, torch.bfloat16, torch.float16):
        found = []
        for weights in ("none", "exact"):
            model = sharded(mesh_of(place), place.device, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
            handle = thinwire.compress_fsdp(model, "none", weights)
            found.append(train(model, place.rank))
        if not all(torch.equal(a, b) for a, b in zip(*found, strict=True)) or handle.stats().ratio <= 1:
            wrong.append(f"{dtype}: {handle.stats()}")
    return wrong


@each_world
@on_ranks()
def test_no_step_of_fsdp_waits_for_the_gpu(group: Group) -> None:
    place = on_nccl(group)
    mesh = mesh_of(place)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wrong = []
    x = torch.randn(5, WIDTH, device=place.device)
    for options in (None, {"gradients": "int8", "weights": "int8", "measure_every": 0}):
        model = sharded(mesh, place.device, mp_policy=policy)
        if options is not None:
            thinwire.compress_fsdp(model, **options)

        def step(model: Net = model) -> None:
            model(x).float().square().mean().backward()

        for _ in range(3):
            step()
        torch.cuda.synchronize()
        try:
            with no_host_sync():
                step()
        except RuntimeError as error:
            wrong.append(f"{options}: {error}")
    assert wrong == []


@each_world
@on_ranks()
def test_nan_of_one_rank_is_seen_by_all(group: Group) -> None:
    """Calls that were not finite, and whether this rank's shard of the head's gradient is."""
    place = on_nccl(group)
    model = sharded(mesh_of(place), place.device)
    handle = thinwire.compress_fsdp(model, "int8", measure_every=0)
    x = torch.randn(5, WIDTH, device=place.device)
    model(x).sum().backward()
    loss = model(x).sum() * (float("nan") if place.rank == 0 else 1.0)
    loss.backward()
    gradient: Any = model.head.weight.grad
    assert handle.stats().nonfinite > 0
    assert not gradient.to_local().isfinite().all()
