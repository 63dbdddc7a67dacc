"""compress_fsdp(weights="exact"): the bits of plain FSDP2 whatever changed, and the bytes that really travel."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from cases import digest, thorough, worlds
from ranks import RankPool
from replicas import Group, mesh_of, message_of, through_file
from rowed import rowed
from thinwire import FSDPState, compress_fsdp
from thinwire.collectives import traffic
from thinwire.collectives.channel import channel_of
from thinwire.errors import CollectiveError, WireError
from thinwire.integrations.choice.options import framework_options
from thinwire.integrations.fsdp import rows

BF16, F16 = torch.bfloat16, torch.float16
STEPS = 3
LENGTH = 8  # bytes of a message that tells the length of another
Compress = Callable[[nn.Module], FSDPState | None]


class Net(nn.Module):
    """Two groups of sizes that ranks do not divide; the second, the root, comes first. The block has two pieces."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.block = nn.Sequential(nn.LayerNorm(61), nn.Linear(61, 211), nn.GELU(), nn.Linear(211, 61))
        self.head = nn.Linear(61, 7)
        self.seen: list[Tensor] = []
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x + self.block(x))
        return out


def shard(mesh: DeviceMesh, dtype: torch.dtype = torch.float32, **options: Any) -> Net:
    model = Net(dtype)
    fully_shard(model.block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    for i in (1, 3):
        keep = model.block[i].register_forward_pre_hook
        keep(lambda layer, _: model.seen.append(layer.weight.detach().clone()))
    return model


def local(model: nn.Module) -> list[Tensor]:
    return [p.to_local().detach() for p in model.parameters()]  # type: ignore[attr-defined]


class Run:
    """Training whose every bit is kept: losses, what layers see, shards."""

    def __init__(self, model: Net, group: Group) -> None:
        self.model = model
        self.rank = group.rank()
        self.kept: list[Tensor] = []

    def backward(self, number: int) -> None:
        x = torch.randn(4, 61, generator=torch.Generator().manual_seed(100 * number + self.rank))
        loss = self.model(x.to(self.model.head.weight.dtype)).float().square().mean()
        loss.backward()
        self.kept.append(loss.detach())

    def step(self, number: int) -> None:
        self.backward(number)
        self.update()

    def update(self) -> None:
        """Every weight moves by about as much, as with Adam; on the shards, since operations on DTensors take long."""
        with torch.no_grad():
            for p in self.model.parameters():
                assert p.grad is not None
                p.to_local().sub_(p.grad.to_local().sign(), alpha=1e-3)  # type: ignore[attr-defined]
        self.model.zero_grad()

    def digest(self) -> str:
        return digest(*self.kept, *[x.view(torch.uint8) for x in self.model.seen], *local(self.model))


# --- bits -------------------------------------------------------------------------------------------------------------


class Setup(NamedTuple):
    """How a model is sharded and trained."""

    param: torch.dtype | None = None  # what is gathered
    stored: torch.dtype = torch.float32
    reshard: bool = True
    replicated: bool = False
    passes: int = 1  # of a step
    gradients: str = "none"


def trained(group: Group, setup: Setup, weights: str) -> tuple[str, float]:
    policy = MixedPrecisionPolicy(param_dtype=setup.param, reduce_dtype=torch.float32)
    mesh = mesh_of(2, 2) if setup.replicated else mesh_of(group.size())
    model = shard(mesh, setup.stored, mp_policy=policy, reshard_after_forward=setup.reshard)
    handle = compress_fsdp(model, setup.gradients, weights)
    run = Run(model, group)
    for step in range(STEPS):
        for at in range(setup.passes):
            model.set_requires_gradient_sync(at == setup.passes - 1)
            if at < setup.passes - 1:
                run.backward(10 * step + at)
        run.step(10 * step + 9)
    return run.digest(), handle.stats().ratio


def compared(group: Group, setups: list[Setup]) -> list[tuple[bool, bool]]:
    """Of each: whether bits are those of plain weights, and whether fewer bytes travelled."""
    found = []
    for setup in setups:
        plain, exact = (trained(group, setup, weights) for weights in ("none", "exact"))
        found.append((plain[0] == exact[0], exact[1] > plain[1]))
    return found


FEW = [Setup(BF16), Setup(BF16, reshard=False, passes=2)]
MANY = [
    *(Setup(F16), Setup(), Setup(stored=BF16), Setup(BF16, passes=2)),
    *(Setup(BF16, gradients="lloyd4"), Setup(BF16, gradients="int8", reshard=False)),
]
REPLICATED = [Setup(BF16, replicated=True, gradients=gradients) for gradients in ("none", "int8")]


@pytest.mark.parametrize(
    ("world", "setups"),
    [*((2, FEW + MANY), (3, FEW), (4, FEW + REPLICATED)), *thorough((3, MANY), (4, MANY))],
)
def test_weights_have_the_bits_of_plain_fsdp(ranks: RankPool, world: int, setups: list[Setup]) -> None:
    for found in ranks(world).run(compared, setups):
        for setup, (same, fewer) in zip(setups, found, strict=True):
            assert same, setup
            assert fewer, setup


@worlds(2, 4, rare=[3])
def test_rows_travel_exactly_on_a_stream(ranks: RankPool, world: int) -> None:
    """In one piece, as on a GPU: changed a little, not at all, or all over."""
    assert all(ranks(world).run(exchanged))


def exchanged(group: Group) -> bool:
    rank, world = group.rank(), group.size()
    rows_W = torch.randn(world, 9001, generator=torch.Generator().manual_seed(1)).to(BF16)
    kept_W, same = rows_W.clone(), True
    with rowed():
        channel = channel_of(group, rows_W.device)
        for turn in range(3):
            rows_W[turn % world] *= 1 + 2.0**-7
            rows_W[-1] = torch.randn(9001, generator=torch.Generator().manual_seed(turn // 2)).to(BF16)
            call = channel.issue("gather", outputs=[kept_W], step=turn)
            operation = rows.ExactGather(call, rows_W[rank], kept_W, [9001])
            channel.submit(operation, call)
            same &= torch.equal(kept_W, rows_W) and operation.sent_bytes <= (world - 1) * (LENGTH + 2 * 9001)
    return same


def changed(group: Group, compressed: bool) -> str:
    """Weights that are loaded, drawn anew, or no numbers; on one rank or all, also between the passes of a step."""
    model = shard(mesh_of(group.size()), mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    if compressed:
        compress_fsdp(model, "none", "exact")
    run = Run(model, group)
    saved = {name: p.detach().clone() for name, p in model.state_dict().items()}
    first = local(model)[2].view(-1)
    run.step(0)
    with torch.no_grad():
        if group.rank() == 0:
            first.normal_(generator=torch.Generator().manual_seed(1))
            first[:4] = torch.tensor([math.nan, math.inf, -0.0, 0.0])
        model(torch.ones(4, 61))
        first[:4] = torch.tensor([-0.0, -math.inf, 0.0, math.nan])
        model(torch.ones(4, 61))
        first.fill_(0.01)
    run.step(1)
    model.load_state_dict(saved)
    run.step(2)
    loss = model(torch.ones(4, 61)).square().mean()
    first.mul_(-1.5)  # the backward pass gathers them
    loss.backward()
    run.update()
    run.step(3)
    return run.digest()


@worlds(2, rare=[3])
def test_whoever_changes_weights_they_stay_exact(ranks: RankPool, world: int) -> None:
    assert ranks(world).run(changed, True) == ranks(world).run(changed, False)


# --- bytes ------------------------------------------------------------------------------------------------------------


class Sent(NamedTuple):
    """Bytes that a rank sent for weights, by the statistics and by the transport, and pieces that did not shrink."""

    told: int
    moved: int
    plain_weights: int


def counted(group: Group) -> tuple[list[Sent], list[int], list[int]]:
    """Of a first gather, one of unchanged weights, one after a small change, and one of a weight drawn anew."""
    model = shard(mesh_of(group.size()), mp_policy=MixedPrecisionPolicy(param_dtype=BF16), reshard_after_forward=True)
    handle = compress_fsdp(model, "none", "exact")
    weights = local(model)
    generator = torch.Generator().manual_seed(group.rank())
    found = []

    def forward() -> None:
        before = handle.stats(), traffic(group).sent
        model(torch.ones(4, 61))
        after = handle.stats(), traffic(group).sent
        told = after[0].bytes_sent - before[0].bytes_sent
        found.append(Sent(told, after[1] - before[1], after[0].plain_weights - before[0].plain_weights))

    with torch.no_grad():
        forward()
        forward()
        for weight in weights:
            weight.mul_(1 + 1e-3 * torch.randn(weight.shape, generator=generator))
        forward()
        weights[2].normal_(generator=generator)
        forward()
        forward()
    held = [0 if g.copy.tensor is None else g.copy.tensor.nbytes for g in handle._gatherers]
    assert handle.stats().replica_bytes == sum(held)
    assert set(handle.state_dict()["replica"]) == set()  # a plain gather brings it
    pieces = [numel for g in handle._gatherers for numel in g._pieces]
    handle.close()
    return found, pieces, held


@worlds(2, rare=[3])
def test_bytes_are_those_that_travel(ranks: RankPool, world: int) -> None:
    answers = ranks(world).run(counted)
    for rank, ((first, same, small, anew, again), pieces, held) in enumerate(answers):
        plain = (world - 1) * sum(held) // world
        assert sum(pieces) * 2 * world == sum(held)
        assert first == (plain, 0, 0)  # torch's own gather
        assert same == again == ((world - 1) * LENGTH * len(pieces), same.told, 0)
        assert small.told == small.moved < plain / 2
        assert small.plain_weights == 0
        most = (world - 1) * (LENGTH * len(pieces) + 2 * pieces[1])  # the piece as it is
        assert 0.95 * most < anew.told == anew.moved <= most
        assert anew.plain_weights == (anew.told == most) >= (rank == 0)  # the last rank has padding, which stays


def test_pieces_are_parameters_with_small_neighbors() -> None:
    least = rows.EXACT_BLOCK
    assert rows._pieces([5, 3]) == [8]
    assert rows._pieces([5, least, 7, least, 9]) == [least + 5, least + 16]
    assert rows._pieces([3 * least, least - 1, 1, least]) == [3 * least, least, least]
    assert rows._pieces([0]) == [0]


def damaged(group: Group) -> str:
    """What a rank raises that gets a wire with other bytes."""
    model = shard(mesh_of(group.size()))
    compress_fsdp(model, "none", "exact")
    difference, weights = rows._difference, local(model)

    def other(new: Tensor, old: Tensor) -> Tensor:
        wire = difference(new, old)
        return wire.bitwise_not() if group.rank() == 0 else wire

    with torch.no_grad(), mock.patch.object(rows, "_difference", other):
        model(torch.ones(4, 61))
        for weight in weights:
            weight.mul_(1.001)
        try:
            model(torch.ones(4, 61))
        except (WireError, CollectiveError) as error:
            return f"{type(error).__name__}: {error}"
    return "accepted!"


def test_a_damaged_wire_raises(ranks: RankPool) -> None:
    world = ranks.fresh(2)
    told = world.run(damaged)
    world.close()
    assert told[1].startswith("WireError: gather(2 pieces of ")
    assert "no wire of exact differences" in told[1]


# --- checkpoints and misuse -------------------------------------------------------------------------------------------


def resumed(group: Group) -> bool:
    """Whether a run that was interrupted, and one that never was compressed, end with the same bits."""
    found = []
    for interrupted in (False, True):
        model = shard(mesh_of(group.size()), mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
        handle = compress_fsdp(model, "none", "exact" if interrupted else "none")
        run = Run(model, group)
        for step in range(3):
            run.step(step)
        if interrupted:
            saved = through_file([model.state_dict(), handle.state_dict()], weights_only=False)
            kept, seen = run.kept, model.seen
            model = shard(mesh_of(group.size()), mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
            handle = compress_fsdp(model, "none", "exact")
            run = Run(model, group)
            run.step(7)
            model.load_state_dict(saved[0])
            handle.load_state_dict(saved[1])
            run.kept, model.seen = kept, seen
        for step in range(3, 6):
            run.step(step)
        found.append(run.digest())
    return found[0] == found[1]


def test_a_resumed_run_has_the_bits_of_plain_fsdp(ranks: RankPool) -> None:
    assert all(ranks(3).run(resumed))


def refusals(group: Group) -> list[str]:
    model = shard(mesh_of(group.size()))
    told = [
        message_of(lambda: compress_fsdp(model, weights="exact", replica=False)),
        message_of(lambda: compress_fsdp(model, weights="exact:block=64")),
        message_of(lambda: compress_fsdp(model, "exact")),
        message_of(lambda: compress_fsdp(model, inside="exact")),
        message_of(lambda: compress_fsdp(model, weights="exact" if group.rank() else "none")),
    ]
    framework_options("int8", {}, weights="exact")  # of Lightning, Accelerate, transformers
    handle = compress_fsdp(model, weights=" exact", replica=True)
    told.append(str(handle.stats().codec))
    return told


def test_misuse_is_refused(ranks: RankPool) -> None:
    words = [
        "weights='exact' sends differences to copies on all ranks: leave out replica=False",
        *["unknown codec 'exact"] * 3,
        "the ranks disagree",
        "int8, weights exact",
    ]
    for told in ranks(2).run(refusals):
        for want, got in zip(words, told, strict=True):
            assert want in got
