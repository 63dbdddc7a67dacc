"""Quantised weights that FSDP2 gathers as codes: numbers and gradients are those of plain FSDP2."""

import contextlib
import io
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from cases import assert_same, thorough
from ranks import RankPool
from replicas import Group
from thinwire import compress_fsdp, qat
from thinwire.qat.layers import QuantizedLayer

BATCH = 4  # of every rank
ROUNDING = 1e-5  # of a scale's gradient: fp32 sums of at most 60 numbers, in another order


class Net(nn.Module):
    """Nothing but quantised weights and their scales."""

    def __init__(self, table: int, up: int, down: int) -> None:
        super().__init__()
        self.table = nn.Embedding(table, 12)
        self.up = nn.Linear(12, up, bias=False)
        self.filter = nn.Conv1d(1, 3, 3, bias=False)
        self.down = nn.Linear(3 * (up - 2), down, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.up(self.table(tokens).mean(1)).relu()
        return self.down(self.filter(x[:, None]).flatten(1))  # type: ignore[no-any-return]


def network(group: int = 0) -> nn.Module:
    torch.manual_seed(3)
    rows = (15, 6, 3) if group else (13, 5, 2)  # 3 ranks divide those, which groups need; these no world does
    return qat.prepare(Net(*rows), weight_bits=3, act_bits=None, group=group, first_last_bits=4)


class Found(NamedTuple):
    losses: list[Tensor]
    weights: list[Tensor]  # gradients, in the own shards
    scales: list[Tensor]
    sent: int
    plain: int


def shard(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    for layer in (model.up, model.filter):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def backward(model: nn.Module, group: Group, round: int = 0) -> Tensor:
    tokens = torch.randint(13, (BATCH, 6), generator=torch.Generator().manual_seed(group.rank() + 10 * round))
    loss: Tensor = model(tokens).square().mean()
    loss.backward()
    return loss.detach()


def found(model: nn.Module, losses: list[Tensor], handle: Any) -> Found:
    by_name = {name: p.grad.to_local() for name, p in model.named_parameters() if isinstance(p.grad, DTensor)}
    scales = [grad for name, grad in by_name.items() if name.endswith("scale")]
    stats = None if handle is None else handle.stats()
    sent = (0, 0) if stats is None else (stats.bytes_sent, stats.bytes_plain)
    return Found(losses, [grad for name, grad in by_name.items() if not name.endswith("scale")], scales, *sent)


Way = Callable[[Group, bool], Found]


def whole(group: Group, coded: bool, scales: int = 0, mesh: DeviceMesh | None = None, **options: Any) -> Found:
    """A step, and another that adds to its gradients."""
    model = shard(network(scales), mesh or init_device_mesh("cpu", (group.size(),)), **options)
    handle = compress_fsdp(model, "none", "int8", inside="none") if coded and mesh else None
    if coded and not mesh:
        handle = compress_fsdp(model, "none", "int8")
    return found(model, [backward(model, group), backward(model, group, 1)], handle)


def on_a_grid(group: Group, coded: bool) -> Found:
    return whole(group, coded, mesh=init_device_mesh("cpu", (2, group.size() // 2), mesh_dim_names=("over", "in")))


def accumulated(group: Group, coded: bool) -> Found:
    model = shard(network(), init_device_mesh("cpu", (group.size(),)))
    handle = compress_fsdp(model, "none", "int8") if coded else None
    model.set_requires_gradient_sync(False)  # type: ignore[operator]
    losses = [backward(model, group)]
    model.set_requires_gradient_sync(True)  # type: ignore[operator]
    return found(model, [*losses, backward(model, group, 1)], handle)


def with_copies(group: Group, coded: bool) -> Found:
    """Of all weights: differences of the others travel, of which there are none."""
    model = shard(network(), init_device_mesh("cpu", (group.size(),)))
    handle = compress_fsdp(model, "none", "int8", replica=True) if coded else None
    return found(model, [backward(model, group, round) for round in range(3)], handle)


WAYS: dict[str, tuple[Way, int]] = {
    "2 ranks": (whole, 2),
    "3 ranks": (whole, 3),
    "groups of scales": (partial(whole, scales=3), 3),
    "kept": (partial(whole, reshard_after_forward=False), 2),
    "larger shards": (partial(whole, reshard_after_forward=2), 4),
    "replicas": (on_a_grid, 4),
    "accumulated": (accumulated, 3),
    "copies": (with_copies, 2),
    "4 ranks": (whole, 4),
}


def both(group: Group, name: str) -> tuple[Found, Found]:
    way = WAYS[name][0]
    with contextlib.redirect_stderr(io.StringIO()):
        return way(group, False), way(group, True)


@pytest.mark.parametrize("name", [*list(WAYS)[2:-1], *thorough("2 ranks", "3 ranks", "4 ranks")])
def test_numbers_and_gradients_are_those_of_plain_fsdp(ranks: RankPool, name: str) -> None:
    for plain, coded in ranks(WAYS[name][1]).run(both, name):
        for wanted, loss in zip(plain.losses, coded.losses, strict=True):
            assert_same(loss, wanted)
        for wanted, grad in zip(plain.weights, coded.weights, strict=True):
            assert_same(grad, wanted)
        for wanted, grad in zip(plain.scales, coded.scales, strict=True):
            torch.testing.assert_close(grad, wanted, rtol=ROUNDING, atol=ROUNDING * float(wanted.abs().sum() or 1))


def test_a_gather_sends_codes_and_scales_only(ranks: RankPool) -> None:
    """Per rank: of every layer the codes of a full shard's rows and their scales; and the scales by themselves."""
    world = 3
    gathers = {"table": 1, "up": 2, "filter": 2, "down": 1}  # in a step: the root keeps what it gathered
    layers = {"table": (13, 12, 4), "up": (5, 12, 3), "filter": (3, 3, 3), "down": (2, 9, 4)}
    sent = plain = 0
    for name, (rows, width, bits) in layers.items():
        most = -(-rows // world)
        numbers = 4 * most * (width + 1)
        codes = 4 * most + -(-most * width // 8) * bits
        sent += gathers[name] * (codes + 2 * most) + numbers  # gradients travel as they are
        plain += gathers[name] * numbers + numbers
    for _, coded in ranks(world).run(both, "3 ranks"):
        assert coded.plain == 2 * (world - 1) * plain
        headers = 64 * 5  # at most, of a step's messages of scales
        assert 2 * (world - 1) * sent <= coded.sent <= 2 * (world - 1) * (sent + headers)
        assert 2 * (world - 1) * (sent + headers) < coded.plain  # which numbers alone would reach


def in_bf16(group: Group) -> tuple[float, float]:
    """The loss of plain fp32, and that of bf16 with codes: made of fp32 weights, they are the same numbers, rounded."""
    mesh = init_device_mesh("cpu", (group.size(),))
    plain = shard(network(), mesh)
    mixed = shard(network(), mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    handle = compress_fsdp(mixed, "int8", "int8")
    losses = float(backward(plain, group)), float(backward(mixed, group))
    handle.close()
    assert not any(layer.weight_quantizer.on_grid for layer in mixed.modules() if isinstance(layer, QuantizedLayer))
    backward(mixed, group)
    return losses


def test_mixed_precision_and_close(ranks: RankPool) -> None:
    for plain, mixed in ranks(2).run(in_bf16):
        assert mixed == pytest.approx(plain, rel=4 * 2**-8)  # four layers, each of them rounded
        assert mixed != plain


def trained(group: Group) -> list[float]:
    model = shard(network(), init_device_mesh("cpu", (group.size(),)))
    handle = compress_fsdp(model, "int8", "int8")
    optimizer = torch.optim.AdamW(qat.parameter_groups(model, lr=0.02), lr=0.02)
    losses = []
    for _ in range(12):
        losses.append(float(backward(model, group)))
        optimizer.step()
        optimizer.zero_grad()
    assert handle.stats().steps == len(losses)
    return losses


def test_a_model_learns(ranks: RankPool) -> None:
    for losses in ranks(2).run(trained):
        assert losses[-1] < 0.5 * losses[0]


def told(group: Group) -> list[str]:
    """What is said of weights that cannot travel as codes, which then train as they did."""
    found = []
    for change in ("one scale", "frozen"):
        torch.manual_seed(3)
        layer = nn.Sequential(nn.Linear(4, 6, bias=False))
        model = qat.prepare(layer, act_bits=None)
        if change == "one scale":
            model[0].weight_quantizer = qat.LSQ(4).initialize(model[0].weight)
        else:
            model[0].weight.requires_grad_(False)
        fully_shard(model)
        with contextlib.redirect_stderr(io.StringIO()) as said:
            compress_fsdp(model, "none", "int8")
        model(torch.ones(2, 4)).sum().backward()
        found.append(said.getvalue())
    return found


def test_weights_that_cannot_are_named(ranks: RankPool) -> None:
    first, _ = ranks(2).run(told)
    assert "0.weight travels as numbers" in first[0]
    assert "its scales do not belong to rows" in first[0]
    assert "it is frozen and its scales are not" in first[1]
