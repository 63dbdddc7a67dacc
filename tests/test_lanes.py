"""How the parameters of a bucket fall into lanes, and how their numbers come back from them."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from cases import assert_same, generated
from thinwire import BlockInt, Cast, Codec, Lloyd
from thinwire.collectives.chunks import LaneSpec
from thinwire.integrations.choice import first_phase
from thinwire.integrations.lanes import BucketLane, lanes_of, load

KINDS: list[tuple[Codec, str]] = [
    *((Lloyd(2), "classic"), (Lloyd(2), ""), (Cast("bf16"), ""), (BlockInt(8), "ef21"), (Lloyd(1), "classic"))
]
BRIDGE = 16  # a lane that is bridged is so many times smaller


def specs_of(rows: Sequence[tuple[int, int]]) -> list[LaneSpec]:
    """How parameters of (numel, kind) travel."""
    return [LaneSpec(numel, KINDS[k][0], first_phase(*KINDS[k]), KINDS[k][1]) for numel, k in rows]


def lanes_from(specs: Sequence[LaneSpec]) -> list[BucketLane]:
    return lanes_of([f"p{i}" for i in range(len(specs))], specs)


# Mostly one kind with small ones between, as buckets are; sometimes anything.
numels = st.sampled_from([0, 1, 2, 5, 16, 40, 160, 700])
buckets = st.one_of(
    st.lists(st.tuples(numels, st.integers(0, len(KINDS) - 1)), min_size=1, max_size=12),
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from([160, 300, 700]), st.just(0)),
            st.tuples(st.sampled_from([0, 1, 3, 9]), st.integers(0, len(KINDS) - 1)),
        ),
        min_size=1,
        max_size=14,
    ),
)


def gradients_of(specs: Sequence[LaneSpec], dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[Tensor]]:
    """A buffer of different numbers, and its parts."""
    buffer = torch.arange(1, 1 + sum(spec.numel for spec in specs)).to(dtype)
    return buffer, list(buffer.split([spec.numel for spec in specs]))


def put_back(copies: Sequence[tuple[Tensor, Tensor]]) -> None:
    for view, numbers in copies:
        view.copy_(numbers)


def whole(lane: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(lane))


@generated(70)
@given(buckets)
def test_every_number_goes_into_its_lane_and_back_to_its_place(rows: list[tuple[int, int]]) -> None:
    specs = specs_of(rows)
    arranged = lanes_from(specs)
    buffer, views = gradients_of(specs)
    given_numbers = [view.clone() for view in views]
    lanes, copies = load(arranged, buffer)
    results: dict[str, Tensor] = {}
    for i, (shape, lane) in enumerate(zip(arranged, lanes, strict=True)):
        spec, pieces = shape.spec, shape.pieces
        numbers = whole(lane)
        assert numbers.numel() == spec.numel == sum(piece.numel for piece in pieces)
        assert all(tensor.dim() == 1 and tensor.is_contiguous() for tensor in lane)
        for piece, part in zip(pieces, numbers.split([piece.numel for piece in pieces]), strict=True):
            if piece.name is None:
                assert not part.any(), "a bridge is zeros"
                continue
            assert specs[int(piece.name[1:])]._replace(numel=spec.numel, scattered=len(lane) > 1) == spec
            assert_same(part, given_numbers[int(piece.name[1:])], "what is sent")
        result = -1000.0 * (i + 1) - torch.arange(numbers.numel())
        for tensor, part in zip(lane, result.split([tensor.numel() for tensor in lane]), strict=True):
            tensor.copy_(part)
        for piece, part in zip(pieces, result.split([piece.numel for piece in pieces]), strict=True):
            if piece.name is not None:
                assert piece.name not in results, "in one lane only"
                results[piece.name] = part
    put_back(copies)
    assert len(results) == len(specs)
    for i, view in enumerate(views):
        assert_same(view, results[f"p{i}"], f"p{i}")


@generated(50)
@given(buckets)
def test_there_is_one_lane_per_kind_the_largest_first(rows: list[tuple[int, int]]) -> None:
    lanes = lanes_from(specs_of(rows))
    kinds = [(lane.spec.codec, lane.spec.feedback) for lane in lanes]
    assert sorted(kinds, key=str) == sorted({KINDS[kind] for _, kind in rows}, key=str)
    named = [sum(p.numel for p in lane.pieces if p.name is not None) for lane in lanes]
    assert named == sorted(named, reverse=True)
    assert all(piece.name for lane in lanes[1:] for piece in lane.pieces), "one lane bridges"
    assert all(lane.spec.first_phase == first_phase(lane.spec.codec, lane.spec.feedback) for lane in lanes)


@generated(50)
@given(buckets)
def test_only_much_smaller_lanes_are_bridged(rows: list[tuple[int, int]]) -> None:
    main = lanes_from(specs_of(rows))[0]
    own = [int(piece.name[1:]) for piece in main.pieces if piece.name]
    kinds = [KINDS[kind] for _, kind in rows]
    sizes = {kind: sum(numel for (numel, _), other in zip(rows, kinds, strict=True) if other == kind) for kind in kinds}
    small = {kind for kind, numel in sizes.items() if BRIDGE * numel <= sizes[kinds[own[0]]]}
    between = [i for i in range(own[0], own[-1]) if i not in own and kinds[i] in small]
    assert [piece.name for piece in main.pieces] == [
        None if i in between else f"p{i}" for i in sorted([*own, *between])
    ]


def test_biases_between_weights_are_bridged_in_place() -> None:
    """The weights travel as one stretch of the bucket itself; the biases are set aside, zeroed, and put back."""
    specs = specs_of([(3, 2), (700, 0), (2, 2), (700, 0), (1, 2)])
    buffer, views = gradients_of(specs)
    lanes, copies = load(lanes_from(specs), buffer)
    (stretch,), (biases,) = lanes
    assert (stretch.data_ptr(), stretch.numel()) == (views[1].data_ptr(), 1402)
    assert biases.tolist() == [1, 2, 3, 704, 705, 1406]
    assert [view.data_ptr() for view, _ in copies] == [views[0].data_ptr(), views[2].data_ptr(), views[4].data_ptr()]
    assert not any(view.any() for view, _ in copies)


@pytest.mark.parametrize(
    ("rows", "want"),
    [
        ([(100, 0), (50, 2), (100, 0), (60, 2), (70, 2)], [[100, 100], [50, 130]]),
        ([(5, 0), (0, 0), (7, 0)], [[12]]),  # one kind is the whole bucket
    ],
)
def test_lanes_of_like_sizes_share_the_bucket_without_copies(rows: Any, want: list[list[int]]) -> None:
    specs = specs_of(rows)
    buffer, _ = gradients_of(specs)
    lanes, copies = load(lanes_from(specs), buffer)
    assert not copies
    assert [[tensor.numel() for tensor in lane] for lane in lanes] == want
    assert {tensor.untyped_storage().data_ptr() for lane in lanes for tensor in lane} == {buffer.data_ptr()}
    assert_same(buffer, torch.arange(1.0, 1 + buffer.numel()))


def test_loading_again_is_loading_anew() -> None:
    """Lanes are kept for all steps: nothing of one step is left in them for the next."""
    specs = specs_of([(700, 0), (2, 2), (700, 0)])
    arranged = lanes_from(specs)
    for factor in (1.0, -3.0):
        buffer, _ = gradients_of(specs)
        buffer.mul_(factor)
        lanes, copies = load(arranged, buffer)
        assert whole(lanes[1]).tolist() == [factor * 701, factor * 702]
        put_back(copies)
        assert_same(buffer, factor * torch.arange(1.0, 1403))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_lanes_have_the_dtype_of_the_bucket(dtype: torch.dtype) -> None:
    specs = specs_of([(70, 0), (1, 2), (70, 0), (2, 3)])
    buffer, views = gradients_of(specs, dtype)
    lanes, copies = load(lanes_from(specs), buffer)
    assert {tensor.dtype for lane in lanes for tensor in lane} == {dtype}
    put_back(copies)
    assert_same(torch.cat(views), torch.arange(1, 144).to(dtype))
