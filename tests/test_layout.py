"""How the parameters of a bucket fall into lanes, and how their numbers come back from them."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor

from cases import assert_same
from thinwire import BlockInt, Cast, Codec, Lloyd
from thinwire.integrations.layout import Arrangement, Slot
from thinwire.integrations.policy import first_phase

KINDS: list[tuple[Codec, str]] = [
    (Lloyd(2), "classic"),
    (Lloyd(2), ""),
    (Cast("bf16"), ""),
    (BlockInt(8), "ef21"),
    (Lloyd(1), "classic"),
]
BRIDGE = 16  # a lane that is bridged is so many times smaller


def generated(count: int) -> settings:
    """The same cases in every run."""
    return settings(
        max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )


def slots_of(rows: Sequence[tuple[int, int]]) -> list[Slot]:
    """Slots of (numel, kind)."""
    made = []
    for i, (numel, kind) in enumerate(rows):
        codec, feedback = KINDS[kind]
        made.append(Slot(f"p{i}", numel, codec, first_phase(codec, feedback), feedback))
    return made


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


def gradients_of(slots: Sequence[Slot], dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[Tensor]]:
    """A buffer of different numbers, and its parts."""
    buffer = torch.arange(1, 1 + sum(slot.numel for slot in slots)).to(dtype)
    return buffer, list(buffer.split([slot.numel for slot in slots]))


def put_back(copies: Sequence[tuple[Tensor, Tensor]]) -> None:
    for view, numbers in copies:
        view.copy_(numbers)


def whole(lane: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(lane))


@generated(70)
@given(buckets, st.booleans())
def test_every_number_goes_into_its_lane_and_back_to_its_place(rows: list[tuple[int, int]], scattered: bool) -> None:
    slots = slots_of(rows)
    arrangement = Arrangement(slots)
    buffer, views = gradients_of(slots)
    given_numbers = [view.clone() for view in views]
    if scattered:
        views = [view.clone() for view in views]
    lanes, copies = arrangement.load(views, None if scattered else buffer)
    assert len(lanes) == len(arrangement.kinds)
    results: dict[str, Tensor] = {}
    for i, (kind, lane) in enumerate(zip(arrangement.kinds, lanes, strict=True)):
        pieces = arrangement.pieces(i)
        numbers = whole(lane)
        assert numbers.numel() == kind.numel == sum(piece.numel for piece in pieces)
        assert all(tensor.dim() == 1 and tensor.is_contiguous() for tensor in lane)
        for piece, part in zip(pieces, numbers.split([piece.numel for piece in pieces]), strict=True):
            if piece.name is None:
                assert not part.any(), "a bridge is zeros"
                continue
            slot = slots[int(piece.name[1:])]
            assert (slot.codec, slot.first, slot.feedback) == (kind.codec, kind.first, kind.feedback)
            assert_same(part, given_numbers[int(piece.name[1:])], "what is sent")
        result = -1000.0 * (i + 1) - torch.arange(numbers.numel())
        for tensor, part in zip(lane, result.split([tensor.numel() for tensor in lane]), strict=True):
            tensor.copy_(part)
        for piece, part in zip(pieces, result.split([piece.numel for piece in pieces]), strict=True):
            if piece.name is not None:
                assert piece.name not in results, "in one lane only"
                results[piece.name] = part
    put_back(copies)
    assert set(results) == {slot.name for slot in slots}
    for slot, view in zip(slots, views, strict=True):
        assert_same(view, results[slot.name], slot.name)


@generated(50)
@given(buckets)
def test_scattered_gradients_fill_the_same_lanes(rows: list[tuple[int, int]]) -> None:
    """A resumed run gathers the buckets of the run it goes on with: its lanes must be the same numbers."""
    slots = slots_of(rows)
    buffer, views = gradients_of(slots)
    apart = [view.clone() for view in views]
    scattered, _ = Arrangement(slots).load(apart, None)
    together, _ = Arrangement(slots).load(views, buffer)
    for one, other in zip(scattered, together, strict=True):
        assert_same(whole(one), whole(other))


@generated(50)
@given(buckets)
def test_lanes_are_one_a_kind_the_largest_first(rows: list[tuple[int, int]]) -> None:
    arrangement = Arrangement(slots_of(rows))
    kinds = [(kind.codec, kind.feedback) for kind in arrangement.kinds]
    assert sorted(kinds, key=str) == sorted({KINDS[kind] for _, kind in rows}, key=str)
    named = [sum(p.numel for p in arrangement.pieces(i) if p.name is not None) for i in range(len(kinds))]
    assert named == sorted(named, reverse=True)
    assert all(p.name is not None for i in range(1, len(kinds)) for p in arrangement.pieces(i)), "one lane bridges"


@generated(50)
@given(buckets)
def test_only_much_smaller_lanes_are_bridged(rows: list[tuple[int, int]]) -> None:
    slots = slots_of(rows)
    arrangement = Arrangement(slots)
    main = arrangement.pieces(0)
    own = [slots.index(slot) for slot in slots if slot.name in {piece.name for piece in main}]
    sizes = {
        (kind.codec, kind.feedback): sum(s.numel for s in slots if (s.codec, s.feedback) == (kind.codec, kind.feedback))
        for kind in arrangement.kinds
    }
    largest = sum(slots[i].numel for i in own)
    small = {kind for kind, numel in sizes.items() if BRIDGE * numel <= largest}
    between = [i for i in range(own[0], own[-1]) if i not in own and (slots[i].codec, slots[i].feedback) in small]
    want = [slots[i].numel if i in between else slots[i].name for i in sorted([*own, *between])]
    assert [piece.numel if piece.name is None else piece.name for piece in main] == want


def test_biases_between_weights_are_bridged_in_place() -> None:
    """The weights travel as one stretch of the bucket itself; the biases are set aside, zeroed, and put back."""
    slots = slots_of([(3, 2), (700, 0), (2, 2), (700, 0), (1, 2)])
    buffer, views = gradients_of(slots)
    lanes, copies = Arrangement(slots).load(views, buffer)
    (stretch,), (biases,) = lanes
    assert stretch.data_ptr() == views[1].data_ptr()
    assert stretch.numel() == 1402
    assert not views[2].any()
    assert biases.tolist() == [1, 2, 3, 704, 705, 1406]
    assert [view.data_ptr() for view, _ in copies] == [views[0].data_ptr(), views[2].data_ptr(), views[4].data_ptr()]
    assert views[0].tolist() == [1, 2, 3], "outside the stretch nothing is touched"


def test_lanes_of_like_sizes_share_the_bucket_without_copies() -> None:
    slots = slots_of([(100, 0), (50, 2), (100, 0), (60, 2), (70, 2)])
    buffer, views = gradients_of(slots)
    lanes, copies = Arrangement(slots).load(views, buffer)
    assert not copies
    assert [[tensor.numel() for tensor in lane] for lane in lanes] == [[100, 100], [50, 130]]
    assert all(
        tensor.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr() for lane in lanes for tensor in lane
    )
    assert_same(buffer, torch.arange(1.0, 381))


def test_one_kind_is_the_whole_bucket() -> None:
    slots = slots_of([(5, 0), (0, 0), (7, 0)])
    buffer, views = gradients_of(slots)
    (lane,), copies = Arrangement(slots).load(views, buffer)
    assert not copies
    assert [tensor.numel() for tensor in lane] == [12]
    assert lane[0].data_ptr() == buffer.data_ptr()


def test_loading_again_is_loading_anew() -> None:
    """An arrangement is kept for all steps: nothing of one step is left in it for the next."""
    slots = slots_of([(700, 0), (2, 2), (700, 0)])
    arrangement = Arrangement(slots)
    for factor in (1.0, -3.0):
        buffer, views = gradients_of(slots)
        buffer.mul_(factor)
        lanes, copies = arrangement.load(views, buffer)
        assert whole(lanes[1]).tolist() == [factor * 701, factor * 702]
        put_back(copies)
        assert_same(buffer, factor * torch.arange(1.0, 1403))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_lanes_have_the_dtype_of_the_bucket(dtype: torch.dtype) -> None:
    slots = slots_of([(70, 0), (1, 2), (70, 0), (2, 3)])
    for scattered in (False, True):
        buffer, views = gradients_of(slots, dtype)
        lanes, copies = Arrangement(slots).load(views, None if scattered else buffer)
        assert {tensor.dtype for lane in lanes for tensor in lane} == {dtype}
        put_back(copies)
        assert_same(torch.cat(views), torch.arange(1, 144).to(dtype))


def test_the_first_phase_of_a_lane_is_that_of_its_slots() -> None:
    slots = slots_of([(2000, 1), (10, 2), (2000, 1)])
    kinds = Arrangement(slots).kinds
    assert [kind.first for kind in kinds] == [Lloyd(2, scale="unbiased"), Cast("bf16")]
    assert [kind.numel for kind in kinds] == [4010, 10]
