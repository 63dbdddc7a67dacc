"""compress_ddp on a mesh: gradients summed inside nodes, then across them, within derived bounds, replicas alike."""

import contextlib
import io
import math
import os
from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import replicas
from cases import Range, digest, each_device, given, on_ranks, small_chunks
from ranks import RankPool
from replicas import Given, Group, Shapes, backward, draw, flat, learn, mean_of, message_of, network, wrap
from thinwire import Lloyd, codec, compress_ddp
from thinwire.collectives import traffic
from thinwire.log import announce_once

Shape = tuple[int, int]
MESHES: list[Shape] = [(2, 1), (1, 3), (3, 1), (2, 2)]
CODECS = [("bf16", "lloyd4:block=64"), ("int8", "int4"), ("none", "int8"), ("int4", "int8")]
CODECS.append(("int8", "lloyd2:block=64"))
NUMEL = 2003


def mesh_of(shape: Shape) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("node", "rank"))


def first_means(group: Group, shape: Shape, dtype: torch.dtype, device: torch.device) -> list[tuple[str, Tensor]]:
    mesh, found = mesh_of(shape), []
    for inside, across in CODECS:
        model = wrap(Given({"w": (NUMEL,)}, dtype), group, device=device)
        with small_chunks():
            compress_ddp(model, across, mesh=mesh, inside=inside, feedback="none", exempt="none")
            (mean,) = backward(model, [given(NUMEL, group.rank(), dtype)])
        assert mean.dtype == dtype
        found.append((digest(mean), mean if group.rank() == 0 else torch.empty(0)))
    return found


def mean_range(shape: Shape, inside: str, across: str, dtype: torch.dtype) -> Range:
    nodes, size = shape
    inner, outer = codec(inside), codec(across)
    if outer.wire_bytes(NUMEL, torch.float32) > inner.wire_bytes(NUMEL, torch.float32):
        inner = outer
    rough = isinstance(outer, Lloyd) and outer.bits < 4
    first = Lloyd(outer.bits, outer.block, scale="unbiased") if rough and nodes > 2 else outer
    gradients = [[given(NUMEL, node * size + i, dtype) for i in range(size)] for node in range(nodes)]
    sums = [Range.total([Range.of(x).coded(inner) for x in xs]) for xs in gradients]
    if nodes > 1:
        sums = [total.coded(first) for total in sums]
    total = Range.total(sums, 1 / (nodes * size))
    total = total.coded(outer) if nodes > 2 else total
    if dtype not in (torch.float32, torch.float64):  # what a node passes on has the dtype of the gradients
        total = total.written(dtype)
    return total.coded(inner).written(dtype)


@each_device
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_the_first_mean_is_within_its_error_and_the_same_on_all_ranks(
    ranks: RankPool, shape: Shape, device: torch.device
) -> None:
    for dtype in (torch.float32, torch.bfloat16) if shape == (2, 2) else (torch.float32,):
        told = ranks(math.prod(shape)).run(first_means, shape, dtype, device)
        for (inside, across), *answers in zip(CODECS, *told, strict=True):
            assert len({answer for answer, _ in answers}) == 1, f"ranks differ: {inside} {across}"
            mean_range(shape, inside, across, dtype).assert_holds(answers[0][1], f"{shape} {inside} {across} {dtype}")


def off(group: Group, shape: Shape, options: Mapping[str, Any], shapes: Shapes) -> tuple[float, bool]:
    """The relative error of a mean, and whether the ranks have the same."""
    model = wrap(Given(shapes), group, 1024.0)
    compress_ddp(model, mesh=mesh_of(shape), **options)
    got, want = flat(backward(model, draw(group.rank(), 0, shapes))).double(), mean_of(group.size(), 0, shapes)
    return float((got - want).norm() / want.norm()), replicas.same_everywhere(group, got)


def test_bits_count_across_nodes(ranks: RankPool) -> None:
    """Four times the bits across are an error of a sixteenth, whatever travels inside; and the other way round."""
    shapes = {"w": (300, 100)}
    errors = {
        (inside, across): max(e for e, _ in ranks(4).run(off, (2, 2), {"codec": across, "inside": inside}, shapes))
        for inside, across in (("bf16", "int8"), ("bf16", "int4"), ("int8", "int4"))
    }
    assert 8 < errors["bf16", "int4"] / errors["bf16", "int8"] < 24
    assert errors["int8", "int4"] == pytest.approx(errors["bf16", "int4"], rel=0.1)


def test_exempt_parameters_and_few_numbers_keep_their_bits(ranks: RankPool) -> None:
    """Norms and biases travel in 16 bits across, so inside they do too, whatever `inside` says.

    Three numbers take more bytes in lloyd4 than in fp32, for its header; inside they travel as asked even so.
    """
    few = {"codec": "lloyd4", "inside": "none", "exempt": "none"}
    for shape, options, shapes, most in (
        (
            (2, 2),
            {"codec": "int8", "inside": "int4"},
            {"b": (700,), "d": (9,)},
            4 * 2**-9,
        ),  # four roundings to bfloat16
        ((1, 3), few, {"w": (3,)}, 1e-6),
    ):
        for error, same in ranks(math.prod(shape)).run(off, shape, options, shapes):
            assert same
            assert error < most


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.complex64, torch.complex128], ids=str)
@on_ranks(4)
def test_gradients_of_any_dtype(group: Group, dtype: torch.dtype) -> None:
    """Some go across in lloyd4, some are exempt, one travels as it is; each is measured."""
    shapes: Shapes = {"w": (70, 40), "b": (30,), "v": (50, 60)}
    model = wrap(Given(shapes, dtype), group, 1024.0)
    compress_ddp(model, "lloyd4", mesh=mesh_of((2, 2)), policy={"v": "none"}, measure_every=1)
    got = flat(backward(model, draw(group.rank(), 0, shapes, dtype))).to(torch.complex128)
    everyones = [flat(draw(rank, 0, shapes, dtype)).to(torch.complex128) for rank in range(group.size())]
    want = torch.stack(everyones).mean(0)
    assert replicas.same_everywhere(group, torch.view_as_real(got))
    assert (got - want).norm() < 0.13 * want.norm()  # lloyd4 loses 0.097 of a Gaussian


TRAINED: list[Any] = ["none", "lloyd4", {0: "none", 5: "int8", 10: "lloyd4"}, "auto", "auto:4.5"]


@on_ranks(4)
def test_models_learn_and_replicas_stay_alike(group: Group) -> None:
    mesh, found = mesh_of((2, 2)), []
    for given_codec in TRAINED:
        model = wrap(network(), group)
        handle = compress_ddp(model, given_codec, mesh=mesh, inside="int8")
        losses = learn(model, torch.optim.Adam(model.parameters(), 3e-2), group.rank(), range(16))
        same = replicas.same_everywhere(group, *[p.data for p in model.parameters()])
        found.append((losses, same, handle.stats().feedback))
    (exact, *_), *others = found
    for losses, same, feedback in others:
        assert same
        assert feedback == "none"
        assert sum(losses[-5:]) < 1.5 * sum(exact[-5:]) < 0.5 * sum(losses[:5])


@on_ranks(4, gives=True)
def test_a_checkpoint_goes_on_with_the_same_bits(group: Group) -> bool:
    """Ten steps are five, a checkpoint, and five."""
    mesh, weights = mesh_of((2, 2)), []
    for broken in (False, True):
        model = wrap(network(), group)
        optimizer = torch.optim.SGD(model.parameters(), 0.03)
        handle = compress_ddp(model, "lloyd4", mesh=mesh)
        learn(model, optimizer, group.rank(), range(5))
        if broken:
            saved, kept = handle.state_dict(), model.module.state_dict()
            model = wrap(network(), group)
            model.module.load_state_dict(kept)
            optimizer = torch.optim.SGD(model.parameters(), 0.03)
            compress_ddp(model, "lloyd4", mesh=mesh).load_state_dict(saved)
        learn(model, optimizer, group.rank(), range(5, 10))
        weights.append(digest(*[p.data for p in model.parameters()]))
    return weights[0] == weights[1]


@pytest.mark.parametrize(("world", "shape"), [(4, (2, 2)), (3, (3, 1)), (3, (1, 3))], ids=str)
@on_ranks()
def test_statistics_are_those_of_the_transport_and_of_the_link_across(group: Group, shape: Shape) -> None:
    mesh, shapes = mesh_of(shape), {"w": (300, 200), "b": (300,)}
    model = wrap(Given(shapes), group, 1024.0)
    handle = compress_ddp(model, "lloyd4", mesh=mesh, inside="int8", measure_every=1)
    groups = [mesh.get_group(0), mesh.get_group(1)]
    before = sum(traffic(one).sent for one in groups)
    for step in range(3):
        backward(model, draw(group.rank(), step, shapes))
    stats, sent = handle.stats(), sum(traffic(one).sent for one in groups) - before
    assert sent <= stats.bytes_sent <= 1.03 * sent + 64
    assert (stats.feedback, stats.nonfinite, stats.residual_bytes) == ("none", 0, 0)
    wires = codec("int8" if shape[0] == 1 else "lloyd4").wire_bytes(60000) + codec("bf16").wire_bytes(300)
    assert stats.bits_per_element == 8 * wires / 60300
    if shape[0] == 1:
        assert stats.relative_error is None  # nothing went across
    else:
        assert 0.08 < stats.relative_error < 0.11  # lloyd4 loses 0.0095 of a Gaussian's squares


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
@on_ranks(4)
def test_a_bad_number_spoils_its_block_and_is_counted_on_every_rank(group: Group, bad: float) -> None:
    model = wrap(Given({"w": (60, 40)}), group, 1024.0)
    handle = compress_ddp(model, "int8:block=64", mesh=mesh_of((2, 2)), inside="int8:block=64")
    (gradient,) = draw(group.rank(), 0, {"w": (60, 40)})
    if group.rank() == 1:
        gradient.view(-1)[700] = bad
    got, begin = flat(backward(model, [gradient])), 700 // 64 * 64
    after = flat(backward(model, draw(group.rank(), 1, {"w": (60, 40)})))
    assert handle.stats().nonfinite == 1
    assert not got[begin : begin + 64].isfinite().any()
    assert got[:begin].isfinite().all()
    assert got[begin + 64 :].isfinite().all()
    assert after.isfinite().all()


@pytest.mark.parametrize("options", [{}, {"mesh": True}, {"feedback": "classic"}], ids=str)
@on_ranks(4)
def test_hints_for_ranks_on_nccl(group: Group, options: Mapping[str, Any]) -> None:
    announce_once.cache_clear()
    told = []
    for inside, backend in (("2", "nccl"), ("4", "nccl"), ("1", "nccl"), ("3", "nccl"), ("", "nccl"), ("2", "gloo")):
        asked = {"mesh": mesh_of((2, 2))} if options.get("mesh") else options
        models = [wrap(Given(), group) for _ in range(2)]
        with (
            mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": inside}),
            mock.patch("thinwire.collectives.groups.on_nccl", lambda group, backend=backend: backend == "nccl"),
            contextlib.redirect_stderr(io.StringIO()) as said,
        ):
            for model in models:
                compress_ddp(model, **asked)
        told.append(said.getvalue())
    assert told[0].count('mesh=init_device_mesh("cuda", (2, 2))') == (group.rank() == 0 and not options)
    assert [bool(text) for text in told] == [group.rank() == 0 and not options] + [False] * 5


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no mesh": ({"mesh": 3}, "mesh must be a DeviceMesh of two dimensions, nodes and ranks inside, got int"),
    "a line": ({"mesh": "line"}, "mesh must be a DeviceMesh of two dimensions, nodes and ranks inside, got a mesh"),
    "inside alone": ({"mesh": None, "inside": "int8"}, "inside='int8' requires a mesh of nodes"),
    "an algorithm": ({"algorithm": "two_phase"}, "with mesh= the algorithm is 'hierarchical'"),
    "feedback": ({"feedback": "classic"}, "have no error feedback: leave out feedback='classic'"),
    "rows": ({"mesh": "rows"}, "must list its ranks in the same order, got [[3, 1], [0, 2]]: sort each row"),
    "other ranks": ({"mesh": "half"}, "the mesh must hold the ranks of DDP's group, [0, 1, 2, 3], got one of [0, 1]"),
    "no codec": ({"inside": "int99"}, "int99"),
}  # fmt: skip


class _Half(DeviceMesh):
    """A mesh of other ranks than DDP's."""

    ndim = 2
    mesh = torch.tensor([[0], [1]])

    def __init__(self) -> None:  # makes no groups
        pass


@on_ranks(4)
def test_misuse_is_refused_by_name(group: Group) -> None:
    """And the ranks go on afterwards."""
    meshes: dict[Any, Any] = {"line": init_device_mesh("cpu", (4,)), "whole": mesh_of((2, 2)), "half": _Half()}
    meshes["rows"] = DeviceMesh("cpu", [[3, 1], [0, 2]])
    for name, (options, message) in REFUSED.items():
        asked = {"codec": "int8", "mesh": "whole", **options}
        asked["mesh"] = meshes.get(asked["mesh"], asked["mesh"]) if isinstance(asked["mesh"], str) else asked["mesh"]
        model = wrap(Given(), group)
        told = message_of(lambda a=asked, m=model: (compress_ddp(m, **a), backward(m, draw(group.rank()))))
        assert message in told, (name, told)
