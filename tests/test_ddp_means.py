"""What compress_ddp makes of gradients: means within derived bounds, replicas alike, networks that learn."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import replicas
from cases import Range, assert_same, by_turns, digest, each_device, given, on_ranks, thorough
from ranks import RankPool
from replicas import CODED, OPTIMIZERS, READY, WHOLE, WORLDS, Device, Given, Group, backward, draw, flat, learn, wrap
from thinwire import BlockInt, ByName, BySize, Cast, Identity, Lloyd, codec, compress_ddp


class Mean(NamedTuple):
    """One average of one parameter, from the first step of a model."""

    codec: Any
    algorithm: str = "auto"
    feedback: str = "none"
    dtype: torch.dtype = torch.float32
    numel: int = 700


def first_means(group: Group, cases: Sequence[Mean], device: Device) -> list[tuple[str, Tensor]]:
    found = []
    for case in cases:
        model = wrap(Given({"w": (case.numel,)}, case.dtype), group, device=device)
        compress_ddp(model, case.codec, algorithm=case.algorithm, feedback=case.feedback, exempt="none")
        (mean,) = backward(model, [given(case.numel, group.rank(), case.dtype)])
        assert mean.dtype == case.dtype
        found.append((digest(mean), mean if group.rank() == 0 else torch.empty(0)))
    return found


def mean_range(case: Mean, world: int) -> Range:
    """A rounding a rank, and one of the sum unless two ranks tell all; without feedback the first is unbiased."""
    coder = codec(case.codec).pick("w", (case.numel,))
    inputs = [given(case.numel, rank, case.dtype) for rank in range(world)]
    if world == 1:
        return Range.of(inputs[0])
    if case.dtype == torch.float64 and not isinstance(coder, Identity):
        inputs = [x.float() for x in inputs]
    one_shot = case.algorithm == "one_shot" or (case.algorithm == "auto" and world == 2)
    first = coder
    if isinstance(coder, Lloyd) and coder.bits < 4 and not one_shot and case.feedback == "none":
        first = Lloyd(coder.bits, coder.block, scale="unbiased")
    total = Range.total([Range.of(x).coded(first) for x in inputs], 1 / world)
    by_torch = isinstance(coder, Identity)  # whose sum rounds to the dtype at every addition
    if by_torch:
        total = Range.total([Range.of(x * (1 / world)).written(case.dtype) for x in inputs], 1.0, case.dtype)
    return (total if one_shot or by_torch else total.coded(coder)).written(case.dtype)


def check_means(ranks: RankPool, world: int, cases: Sequence[Mean], device: Device) -> None:
    for case, *answers in zip(cases, *ranks(world).run(first_means, cases, device), strict=True):
        assert len({told for told, _ in answers}) == 1, f"ranks differ: {case}"
        mean_range(case, world).assert_holds(answers[0][1], str(case))


CODECS: dict[str, Any] = {
    **{name: name for name in ("none", "bf16", "fp16", "e4m3", "int8", "int4:block=32", "int3:block=40,mode=affine")},
    **{name: f"{name}:block=64" for name in ("lloyd4", "lloyd3", "lloyd2", "lloyd1")},
    "int5, stochastic": BlockInt(5, 64, rounding="stochastic"),
    "an object": Lloyd(4, 32),
    "bysize": "bysize(small=lloyd1; large=int8; min_numel=50)",
    "byname": ByName({"w": BySize(Cast("bf16"), Lloyd(4, 64), min_numel=50), "*": Identity()}),
}


USUAL = [(WORLDS[i % 3], n) for i, n in enumerate(CODECS)]


@each_device
@pytest.mark.parametrize(
    ("world", "name"), [*USUAL, *thorough(*((w, n) for w in WORLDS for n in CODECS if (w, n) not in USUAL))]
)
def test_the_first_mean_is_within_its_error_and_the_same_on_all_ranks(
    ranks: RankPool, world: int, name: str, device: Device
) -> None:
    kinds = ("none", "classic", "ef21") if "lloyd" in name or name == "int8" else ("none",)
    cases = [Mean(CODECS[name], algorithm, kind) for algorithm in CODED for kind in kinds]
    check_means(ranks, world, [*cases, *(Mean(CODECS[name], numel=n) for n in (1, 60, 700))], device)


@each_device
def test_one_rank_alone_is_exact(ranks: RankPool, device: Device) -> None:
    cases = [Mean(name, feedback=kind) for name in CODECS.values() for kind in ("none", "classic", "ef21")]
    check_means(ranks, 1, cases, device)


@each_device
@by_turns("dtype, world", [torch.bfloat16, torch.float16, torch.float64], [3, 2])
def test_means_come_back_in_their_dtype(ranks: RankPool, world: int, dtype: torch.dtype, device: Device) -> None:
    names = ("none", "bf16", "int8", "lloyd4:block=64", "lloyd2:block=64")
    cases = [Mean(name, a, f, dtype) for name in names for a in CODED for f in ("none", "classic")]
    check_means(ranks, world, cases, device)


@on_ranks(3, rare=[2])
def test_every_step_rotates_and_rounds_anew(group: Group) -> None:
    """Errors of constant gradients average out over steps, except where nothing is drawn."""
    for name, different in (("lloyd2", 4), ("int4:rounding=stochastic", 4), ("int8", 1)):
        model = wrap(Given(WHOLE), group)
        compress_ddp(model, name, feedback="none")
        found = {digest(flat(backward(model, draw(group.rank(), 0, WHOLE)))) for _ in range(4)}
        assert len(found) == different, name


TRAINED = ["int8", "lloyd2:block=64", CODECS["byname"], "auto:4", {0: "none", 3: "int8", 6: "lloyd2"}]
TRAINED.append("topk:fraction=0.1")


@each_device
@pytest.mark.parametrize(("world", "at"), [(2 + at % 2, at) for at in range(len(TRAINED))])
@on_ranks()
def test_every_codec_trains_and_keeps_replicas_alike(group: Group, at: int, device: Device) -> None:
    """By turns with every optimizer. DDP sends buffers around too."""
    model = wrap(replicas.network(norm=True), group, device=device)
    optimizer = [*OPTIMIZERS.values()][at % 3](model.parameters())
    compress_ddp(model, TRAINED[at])
    losses = torch.tensor(learn(model, optimizer, group.rank(), range(10)))
    dist.all_reduce(losses, group=group)
    assert replicas.same_everywhere(group, *model.parameters())
    assert losses[-3:].mean() < losses[:3].mean()


@on_ranks(2)
def test_compression_may_begin_under_way(group: Group) -> None:
    model, whole = wrap(Given(ready=READY), group), wrap(Given(ready=READY), group)
    for step in range(3):
        backward(model, draw(group.rank(), step))
    compress_ddp(whole, {0: "none", 3: "int8"}, exempt="none", feedback="none")
    for step in range(3):
        backward(whole, draw(group.rank(), step))
    compress_ddp(model, "int8", exempt="none", feedback="none")
    gradients = draw(group.rank(), 3)
    assert_same(flat(backward(model, gradients)), flat(backward(whole, gradients)))
