"""handle.stats(): bytes, errors, times and memory, and how it prints."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cases import on_ranks, small_chunks, worlds
from ranks import RankPool
from replicas import CODED, SHAPES, Given, Group, Shapes, backward, draw, wrap
from thinwire import codec, compress_ddp
from thinwire.collectives import chunks, traffic


def measure(group: Group, options: Mapping[str, Any], shapes: Shapes, steps: int) -> tuple[Any, int]:
    """The statistics, and what the transport counted."""
    model = wrap(Given(shapes), group)
    handle, before = compress_ddp(model, **options), traffic(group).sent
    for step in range(steps):
        backward(model, draw(group.rank(), step, shapes))
    return handle.stats(), traffic(group).sent - before


@pytest.mark.parametrize("algorithm", CODED)
@worlds(3, rare=[2, 4])
def test_bytes_are_those_of_the_transport(ranks: RankPool, world: int, algorithm: str) -> None:
    for name, shapes in (("int8", SHAPES), ("lloyd1", SHAPES), ("lloyd2", {"w": (300, 200), "v": (100, 301)})):
        options = {"codec": name, "algorithm": algorithm, "feedback": "none"}
        for stats, sent in ranks(world).run(measure, options, shapes, 3):
            assert sent <= stats.bytes_sent <= 1.03 * sent + 64
            elements = sum(math.prod(shape) for shape in shapes.values())
            assert stats.bytes_plain <= 3 * 2 * (world - 1) * 4 * elements / world
            assert stats.bytes_plain >= 3 * 2 * (world - 1) * 4 * elements / world - 3 * len(shapes)
            assert stats.ratio == stats.bytes_plain / stats.bytes_sent
            assert stats.bytes_saved == stats.bytes_plain - stats.bytes_sent


def test_statistics_make_sense(ranks: RankPool) -> None:
    shapes = {"w": (300, 200)}
    wire = codec("lloyd2").wire_bytes(60000)
    for world in (2, 3):
        options = {"codec": "lloyd2", "feedback": "none", "measure_every": 1}
        for stats, _ in ranks(world).run(measure, options, shapes, 4):
            assert (stats.codec, stats.feedback, stats.chosen) == ("lloyd2", "none", "")
            assert (stats.steps, stats.nonfinite) == (4, 0)
            assert stats.bits_per_element == 8 * wire / 60000
            # lloyd2 loses 0.1175 of a Gaussian's squares, unbiased 0.1331
            assert 0.33 < stats.relative_error < 0.38
            assert "clipped" not in f"{stats} {stats.as_dict()}"  # a third has the outer codes, as is meant
            assert min(stats.encode_s, stats.decode_s, stats.wire_s) > 0
            assert (stats.reduce_s > 0, stats.residual_bytes) == (world > 2, 0)
            assert 15.5 < stats.ratio < 16
    for stats, sent in ranks(2).run(measure, {"codec": "none"}, shapes, 2):
        assert (stats.ratio, stats.bits_per_element, stats.relative_error, sent) == (1.0, None, None, 0)
    (stats, _) = ranks(1).run(measure, {"codec": "lloyd2"}, shapes, 2)[0]
    assert (stats.steps, stats.bytes_sent, stats.ratio, stats.residual_bytes) == (2, 0, 1.0, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@on_ranks(3, rare=[2])
def test_exact_lanes_of_any_dtype_are_measured(group: Group, dtype: torch.dtype) -> None:
    """The error at a step in which some parameters travel as they are."""
    model = wrap(Given({"w": (60, 50), "v": (50, 60)}, dtype), group, 1024.0)
    handle = compress_ddp(model, "lloyd4", policy={"v": "none"}, measure_every=1)
    for step in range(2):
        backward(model, draw(group.rank(), step, {"w": (60, 50), "v": (50, 60)}, dtype))
    error = handle.stats().relative_error
    assert 0.05 < error < 0.1  # half of the squares lose 0.0095


@on_ranks(2)
def test_errors_are_measured_as_often_as_asked(group: Group) -> None:
    """Gradients are zero from the third step on; what is measured is known one step later."""
    found: dict[int, list[float | None]] = {1: [], 3: [], 0: []}
    for every, errors in found.items():
        model = wrap(Given(), group)
        handle = compress_ddp(model, "int8", exempt="none", measure_every=every)
        for step in range(5):
            backward(model, [(1.0 if step < 2 else 0.0) * g for g in draw(group.rank(), step)])
            errors.append(handle.stats().relative_error)
    assert found[0] == [None] * 5
    assert (found[1][2] or 0) > 0
    assert found[1][4] == 0
    assert found[3][2] == found[3][3] == found[1][1]


RESIDUALS = {torch.float32: 4.0, torch.bfloat16: 2.0}


@pytest.mark.parametrize("dtype", RESIDUALS)
def test_residuals_take_what_their_dtype_takes(ranks: RankPool, dtype: torch.dtype) -> None:
    shapes = {"w": (300, 200), "v": (100, 301)}
    for world, feedback in ((2, "classic"), (3, "classic"), (2, "ef21")):
        if feedback == "ef21" and dtype != torch.float32:
            continue
        options = {"codec": "lloyd2", "feedback": feedback, "residual_dtype": dtype}
        for stats, _ in ranks(world).run(measure, options, shapes, 3):
            numbers = 90100 * (2 if feedback == "ef21" else 1)
            assert stats.residual_bytes == RESIDUALS[dtype] * numbers


@pytest.mark.parametrize(("world", "algorithm"), [(2, "one_shot"), (2, "two_phase"), (3, "two_phase")])
@on_ranks()
def test_scratch_is_a_wire_and_two_chunks(group: Group, algorithm: str) -> None:
    for name in ("int8", "lloyd2"):
        numel, coder, own = 300_000, codec(name), dist.new_group()
        model = wrap(Given({"w": (numel,)}), own, 1024.0 * 100)
        with small_chunks(20_000):
            handle = compress_ddp(model, name, algorithm=algorithm, feedback="none", exempt="none")
            for step in range(2):
                backward(model, [torch.full((numel,), 1.0 + step + group.rank())])
            chunking = chunks.choose_chunking(numel, coder.wire_bytes(numel), group.size(), group.size())
        assert chunking.num_chunks > 2
        chunk = coder.wire_bytes(chunking.chunk)
        alone = group.size() * chunk if algorithm == "one_shot" else 2 * chunk + 4096
        dist.barrier(own)
        assert 0 < handle.stats().scratch_bytes <= max(coder.wire_bytes(numel) + 2 * chunk, alone) + 4096


@on_ranks(2)
def test_a_handle_and_its_statistics_print(group: Group) -> None:
    """A handle and its statistics in print, before, after and at the end; and the ratio."""
    model = wrap(Given(), group)
    handle = compress_ddp(model, "lloyd2", feedback="classic", measure_every=1)
    fresh = str(handle)
    for step in range(3):
        backward(model, draw(group.rank(), step))
    table, ratio, used = str(handle.stats()), handle.stats().ratio, str(handle)
    handle.close()
    assert fresh == "DDPState(codec='lloyd2', feedback='none', steps=0, ratio=1.00)"
    assert used == f"DDPState(codec='lloyd2', feedback='classic', steps=3, ratio={ratio:.2f})"
    assert str(handle).endswith(", closed)")
    rows = {line.split()[0]: line for line in table.splitlines()}
    assert list(rows) == ["codec", "steps", "bytes", "bits", "error", "seconds", "memory"]
    assert "lloyd2, feedback classic" in rows["codec"]
    assert f"{ratio:.2f} times fewer" in rows["bytes"]
    assert "wire 0." in rows["seconds"]
