"""compress_fsdp where it rounds: gradients and weights within derived bounds, feedback, copies, NaN, statistics."""

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from cases import Range, by_turns, digest, on_ranks, seeded, thorough, worlds
from ranks import RankPool
from replicas import SHAPES, Given, Group, Shapes, draw, flat, learn, mesh_of, network, same_everywhere
from thinwire import codec, compress_fsdp
from thinwire.collectives.chunks import LaneSpec
from thinwire.integrations.fsdp.rows import Columns
from thinwire.integrations.lanes import lanes_of

BF16 = torch.bfloat16
WORLDS = [2, 3, 4]
Options = Mapping[str, Any]
EVEN: Shapes = {"w": (12, 100), "v": (24, 50)}
NUMEL = 2400


class Seeing(Given):
    """Keeps the weights that its last forward pass saw."""

    def forward(self, *gradients: Tensor | None) -> Tensor:
        self.seen = [p.detach().clone() for p in self.parameters()]
        return super().forward(*gradients)


def wrap(group: Group, shapes: Shapes = SHAPES, mesh: DeviceMesh | None = None, **options: Any) -> Any:
    return fully_shard(Seeing(shapes), mesh=mesh or mesh_of(group.size()), **options)


def backward(model: Any, gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """What FSDP makes of a rank's gradients: those of all ranks, of all shards."""
    model.zero_grad()
    model(*gradients).backward()
    return whole([p.grad for p in model.parameters()])


def whole(tensors: Sequence[Any]) -> list[Tensor]:
    return [tensor.full_tensor().detach() for tensor in tensors if tensor is not None]


def rows_of(tensors: Sequence[Tensor], world: int) -> list[Tensor]:
    """What every rank owns of them: parts one after the other, padded to the length of the first rank's."""
    rows: list[list[Tensor]] = [[] for _ in range(world)]
    for tensor in tensors:
        parts = tensor.chunk(world)
        longest = parts[0].numel()
        for rank, row in enumerate(rows):
            part = parts[rank].reshape(-1) if rank < len(parts) else tensor.new_zeros(0)
            row.append(torch.cat((part, part.new_zeros(longest - part.numel()))))
    return [torch.cat(row) for row in rows]


# --- gradients --------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """Options of compress_fsdp, and by codec the parameters that travel in it."""

    options: Options
    lanes: Mapping[str, str]


AUTO = {"bf16": "bd"}
CASES = [
    Case({"gradients": "int8"}, {"int8": "ace", **AUTO}),
    Case({"gradients": "lloyd4:block=32"}, {"lloyd4:block=32": "ace", **AUTO}),
    Case({"gradients": "int4:block=32,mode=affine", "exempt": "none"}, {"int4:block=32,mode=affine": "abcde"}),
    Case({"gradients": "int8", "exempt": ["c"]}, {"int8": "abde", "bf16": "c"}),
    Case({"gradients": "int8", "policy": {"a": "int4", "[bd]": "none"}}, {"int8": "ce", "int4": "a", "none": "bd"}),
    Case({"gradients": {0: "none"}}, {"none": "abcde"}),
]
SCALES = {"avg": None, "sum": 1.0, "premul": 5.0}  # what sums are divided by


def given(rank: int) -> list[Tensor]:
    """Gradients of a rank; those that are exempt by default are large, and may not be part of others' blocks."""
    return [1000 * g if g.ndim == 1 else g for g in draw(rank)]


def means(group: Group, table: Sequence[tuple[Case, str]]) -> list[list[Tensor]]:
    found = []
    mesh = mesh_of(group.size())
    for case, op in table:
        model = wrap(group, mesh=mesh)
        if (factor := SCALES[op]) is not None:
            model.set_gradient_divide_factor(factor)
        model.set_force_sum_reduction_for_comms(op == "sum")
        handle = compress_fsdp(model, **case.options)
        found.append(backward(model, given(group.rank())))
        handle.close()
    return found


@pytest.mark.parametrize(
    ("world", "turn"),
    [
        *((world, world % 3) for world in WORLDS),
        *thorough(*((w, turn) for w in WORLDS for turn in range(3) if turn != w % 3)),
    ],
)
def test_gradients_are_within_the_error_of_their_codecs(ranks: RankPool, world: int, turn: int) -> None:
    """Every case with every scale, by turns in one world."""
    pairs = [(case, list(SCALES)[(i + turn) % 3]) for i, case in enumerate(CASES)]
    table = [pair for pair in pairs if pair != (CASES[-1], "premul")]  # gloo has no such sum
    answers = ranks(world).run(means, table)
    places = {name: i for i, name in enumerate(SHAPES)}
    for (case, op), *found in zip(table, *answers, strict=True):
        assert len({digest(*each) for each in found}) == 1
        for name, letters in case.lanes.items():
            chosen = [places[letter] for letter in letters]
            rows_W = [rows_of([given(rank)[i] for i in chosen], world) for rank in range(world)]
            scale = 1 / (SCALES[op] or world)
            for row, got in enumerate(rows_of([found[0][i] for i in chosen], world)):
                parts = [Range.of(rows[row]).coded(codec(name)) for rows in rows_W]
                want = Range.total(parts, scale).written(torch.float32)
                want.assert_holds(got, f"{case}, {op}, {name}, row {row}")


@on_ranks(3, rare=[2, 4])
def test_the_error_is_that_of_one_rounding(group: Group) -> None:
    """Of a Gaussian, lloyd4 loses 0.0095 and lloyd2 0.1175 of its squares; int8 a 12th of its squared step."""
    shapes: Shapes = {"w": (301, 101)}
    mesh = mesh_of(group.size())
    exact = torch.stack([draw(rank, 0, shapes)[0].double() for rank in range(group.size())]).mean(0)
    for name, want in (("int8:block=128", 0.0062), ("lloyd4", 0.0975), ("lloyd2", 0.343)):
        model = wrap(group, shapes, mesh)
        handle = compress_fsdp(model, name, measure_every=1)
        (got,) = backward(model, draw(group.rank(), 0, shapes))
        backward(model, draw(group.rank(), 1, shapes))
        assert float((got - exact).norm() / exact.norm()) == pytest.approx(want, rel=0.15)
        assert handle.stats().relative_error == pytest.approx(want, rel=0.15)


REPLICATED: list[tuple[MixedPrecisionPolicy, float | None, bool]] = [
    (MixedPrecisionPolicy(), None, False),
    (MixedPrecisionPolicy(), None, True),
    (MixedPrecisionPolicy(), 3.0, True),
    (MixedPrecisionPolicy(), 3.0, False),
    (MixedPrecisionPolicy(reduce_dtype=BF16), None, False),
]


@pytest.mark.parametrize(("policy", "factor", "in_sums"), REPLICATED)
@on_ranks(4)
def test_sums_over_shards_then_replicas_are_within_their_errors(
    group: Group, policy: MixedPrecisionPolicy, factor: float | None, in_sums: bool
) -> None:
    """Averaged, summed, in bf16 and by a factor of one's own; replicas have the same."""
    mesh = mesh_of(2, 2)
    model = wrap(group, mesh=mesh, mp_policy=policy)
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    model.set_force_sum_reduction_for_comms(in_sums)
    compress_fsdp(model, "int8")
    found = backward(model, draw(group.rank()))
    assert same_everywhere(mesh.get_group(0), *[p.grad.to_local() for p in model.parameters()])
    big, dtype = [0, 2, 4], policy.reduce_dtype or torch.float32
    rows_W = [rows_of([draw(rank)[i] for i in big], 2) for rank in range(4)]
    for row, got in enumerate(rows_of([found[i] for i in big], 2)):
        sums = []
        for replica in range(2):
            inside = [Range.of(rows_W[rank][row]).written(dtype) for rank in (2 * replica, 2 * replica + 1)]
            total = Range.total([part.coded(codec("bf16")) for part in inside], 0.5).written(dtype)
            sums.append(total.coded(codec("int8")))
        want = Range.total(sums, 2 / (factor or 4)).written(dtype)
        want.coded(codec("int8")).written(dtype).assert_holds(got, f"row {row}")  # in two phases


# --- weights ----------------------------------------------------------------------------------------------------------


def gathered(group: Group, options: Options, dtype: torch.dtype | None) -> tuple[list[Tensor], bool, list[Tensor]]:
    """The weights that a forward pass saw, whether all ranks saw the same, and those that shards hold."""
    model = wrap(group, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    compress_fsdp(model, "none", **options)
    backward(model, draw(group.rank()))
    return model.seen, same_everywhere(group, *model.seen), whole(list(model.parameters()))


@by_turns("world, dtype", WORLDS, [None, BF16])
def test_gathered_weights_are_within_the_error_and_the_same_on_all_ranks(
    ranks: RankPool, world: int, dtype: torch.dtype | None
) -> None:
    for name in ("int8", "e4m3:block=32"):
        seen, same, kept = ranks(world).run(gathered, {"weights": name}, dtype)[0]
        assert same
        for letters, used in (("ace", name), ("bd", "bf16")):
            places = ["abcde".index(letter) for letter in letters]
            pairs = zip(*(rows_of([ts[i] for i in places], world) for ts in (kept, seen)), strict=True)
            for row, (own, got) in enumerate(pairs):
                assert got.dtype == (dtype or torch.float32)
                want = Range.of(own).written(got.dtype).coded(codec(used)).written(got.dtype)
                want.assert_holds(got, f"{name}, row {row}")
        assert not torch.equal(flat(seen).float(), flat(kept))


class Copies(NamedTuple):
    errors: list[float]  # of the weights that each of several forward passes saw
    same: bool
    sent: list[int]  # bytes of: the first gather, one of differences, the backward pass
    plain: list[int]
    held: int  # bytes of copies
    numel: int  # of a padded row


def copies(group: Group, options: Options, dtype: torch.dtype | None) -> Copies:
    """Weights that move once, and then stand still."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    model = wrap(group, mp_policy=policy, reshard_after_forward=True)
    handle = compress_fsdp(model, "none", exempt="none", **options)
    gradients = draw(group.rank())
    off, same, sent, plain = [], True, [0], [0]

    def note() -> None:
        sent.append(handle.stats().bytes_sent - sum(sent))
        plain.append(handle.stats().bytes_plain - sum(plain))

    with torch.no_grad():
        model(*gradients)
        note()
        for i, p in enumerate(model.parameters()):
            p.to_local().add_(torch.randn(p.to_local().shape, generator=seeded(i, group.rank())))
    loss = model(*gradients)
    note()
    want = flat(whole(list(model.parameters())))
    for again in range(4):
        off.append(float((flat(model.seen) - want).norm() / want.norm()))
        same = same and same_everywhere(group, *model.seen)
        if again < 3:
            with torch.no_grad():
                model(*gradients)
    before = handle.stats()
    loss.backward()
    sent.append(handle.stats().bytes_sent - before.bytes_sent)
    plain.append(handle.stats().bytes_plain - before.bytes_plain)
    numel = sum(p.to_local().shape.numel() for p in model.parameters()) if group.rank() == 0 else 0
    return Copies(off, same, sent[1:], plain[1:], handle.stats().replica_bytes, numel)


@by_turns("world, dtype", WORLDS, [BF16, None])
def test_differences_come_closer_and_a_backward_pass_sends_nothing(
    ranks: RankPool, world: int, dtype: torch.dtype | None
) -> None:
    """lloyd4 loses a tenth of what it sends: what is left shrinks tenfold from gather to gather, down to rounding."""
    answers = ranks(world).run(copies, {"weights": "lloyd4:block=64", "replica": True}, dtype)
    numel = answers[0].numel
    size = 2 if dtype == BF16 else 4
    for answer in answers:
        assert answer.same
        least = 2.0**-8 if dtype == BF16 else 1e-6
        assert 0.02 < answer.errors[0] < 0.11
        for previous, error in zip(answer.errors, answer.errors[1:], strict=False):
            assert error < 0.2 * previous + least
        plain = (world - 1) * numel * size
        gradients = (world - 1) * numel * size
        assert answer.sent[0] == answer.plain[0] == plain  # exact
        assert plain / 9 < answer.sent[1] < plain / (3.3 if dtype == BF16 else 6.6)
        assert (answer.sent[2], answer.plain[2]) == (gradients, plain + gradients)  # weights: nothing
        assert answer.held == world * numel * size


def test_without_copies_the_error_stays_and_plain_bytes_are_those_of_any_codec(ranks: RankPool) -> None:
    rounded, plain = (ranks(2).run(copies, {"weights": name, "replica": False}, None) for name in ("int8", "none"))
    for answer, other in zip(rounded, plain, strict=True):
        assert answer.same
        assert answer.held == 0
        assert answer.errors[-1] == pytest.approx(answer.errors[0], rel=0.05)
        assert answer.sent[0] == answer.sent[1] < answer.plain[1] / 3.5
        assert other.sent == other.plain == answer.plain  # so that ratios can be compared
        assert other.plain[0] == 4 * rounded[0].numel  # a gather of two ranks


@by_turns("bad, at", [math.nan, math.inf], [0, 2])
@on_ranks(2)
def test_a_bad_weight_is_seen_and_not_kept(group: Group, bad: float, at: int) -> None:
    """In one of five forward passes a weight of rank 0's is bad."""
    model = wrap(group, EVEN, reshard_after_forward=True)
    model(*draw(0, 0, EVEN))  # torch's own buffers, too, cannot begin in inference mode
    compress_fsdp(model, "none", "int4:block=40", replica=True, exempt="none")
    first = next(iter(model.parameters())).to_local().detach()
    for step in range(5):
        good = first[0, 0].item()
        with torch.inference_mode(step == 0), torch.no_grad():
            if step == at and group.rank() == 0:
                first[0, 0] = bad
            model(*draw(0, 0, EVEN))
            first[0, 0] = good
        seen = flat(model.seen)
        assert bool(seen.isfinite().all()) == (step != at)
        assert bool(seen[0].isfinite()) == (step != at)
    assert off(seen, flat(whole(list(model.parameters())))) < 0.02


@on_ranks(4)
def test_shards_of_another_size_are_gathered_as_they_are(group: Group) -> None:
    """Before the backward pass two ranks hold all weights: what the forward pass had, rounded once."""
    model = wrap(group, EVEN, reshard_after_forward=2)
    handle = compress_fsdp(model, "none", "int8:block=128", exempt="none")
    loss = model(*draw(group.rank(), 0, EVEN))
    forward = handle.stats().bytes_sent
    loss.backward()
    gradients = 3 * NUMEL // 4 * 4
    assert forward == 3 * codec("int8:block=128").wire_bytes(NUMEL // 4)
    assert handle.stats().bytes_sent - forward - gradients == NUMEL // 2 * 4


# --- feedback ---------------------------------------------------------------------------------------------------------


def results(group: Group, options: Options, steps: int, factor: float | None, mesh: tuple[int, ...]) -> Any:
    """Results of constant gradients, the exact one, and the bytes that are remembered."""
    shapes = EVEN if mesh else SHAPES
    model = wrap(group, shapes, mesh_of(*mesh) if mesh else None)
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    handle = compress_fsdp(model, exempt="none", **options)
    found = [flat(backward(model, draw(group.rank(), 0, shapes))) for _ in range(steps)]
    exact = torch.stack([flat(draw(rank, 0, shapes)) for rank in range(group.size())]).double().sum(0)
    return found, exact / (factor or group.size()), handle.stats().residual_bytes


def off(got: Tensor, exact: Tensor) -> float:
    return float((got - exact).norm() / exact.norm())


@pytest.mark.parametrize(("world", "factor"), [(3, 5.0), *thorough((2, None), (4, 5.0))])
def test_means_of_classic_feedback_come_to_the_exact_one(ranks: RankPool, world: int, factor: float | None) -> None:
    """lloyd2 loses the share s of a message; what is owed stays below s / (1 - s) of a gradient, and is divided."""
    options = {"gradients": "lloyd2:block=64", "feedback": "classic"}
    share = math.sqrt(0.13)
    steps = 12
    for found, exact, _ in ranks(world).run(results, options, steps, factor, ()):
        assert off(found[0], exact) > 0.3
        assert off(torch.stack(found).double().mean(0), exact) < 1.1 * share / (1 - share) / steps * 1.5
        none = [off(torch.stack(found[:n]).double().mean(0), exact) for n in (1, 4, 12)]
        assert none[0] > 2 * none[1] > 4 * none[2]


@pytest.mark.parametrize(("world", "factor"), [(2, 5.0), *thorough((3, None), (4, 5.0))])
def test_results_of_ef21_come_to_the_exact_one(ranks: RankPool, world: int, factor: float | None) -> None:
    options = {"gradients": "lloyd2:block=64", "feedback": "ef21"}
    for found, exact, _ in ranks(world).run(results, options, 10, factor, ()):
        for step in range(0, 9, 3):
            assert off(found[step + 1], exact) < 0.5 * off(found[step], exact)
        assert off(found[9], exact) < 0.4**9


@pytest.mark.parametrize("feedback", ["classic", "ef21"])
def test_feedback_between_replicas(ranks: RankPool, feedback: str) -> None:
    options = {"gradients": "lloyd2:block=64", "feedback": feedback, "inside": "none"}
    for found, exact, held in ranks(4).run(results, options, 10, None, (2, 2)):
        close = torch.stack(found).double().mean(0) if feedback == "classic" else found[-1]
        assert off(found[0], exact) > 0.3
        assert off(close, exact) < 0.1
        assert held == 4 * NUMEL // 2 * (1 if feedback == "classic" else 2)  # of a shard


@pytest.mark.parametrize("gradients", ["lloyd2", "auto:2.2"])
@on_ranks(4)
def test_frozen_parameters_are_not_waited_for_and_have_no_memory(group: Group, gradients: str) -> None:
    """Feedback is found by the optimizer, after two steps, for all parameters but the frozen one."""
    model = Seeing(EVEN)
    first = next(iter(model.parameters()))
    first.requires_grad_(False)
    fully_shard(model, mesh=mesh_of(2, 2))
    handle = compress_fsdp(model, gradients, exempt="none")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    for step in range(2):
        backward(model, draw(group.rank(), step, EVEN))
        optimizer.step()
    backward(model, draw(group.rank(), 2, EVEN))
    (own,) = handle.state_dict()["ranks"].values()
    names = sorted(name for name, _ in Seeing(EVEN).named_parameters())
    assert (handle.stats().feedback, sorted(own)) == ("classic", names[:1])


@worlds(2, rare=[3, 4])
def test_what_is_remembered_is_as_large_as_the_unsharded_gradients(ranks: RankPool, world: int) -> None:
    """EF21 keeps the means of its own shard besides."""
    for feedback, size, shard in (("classic", 4, 0), ("ef21", 4, 4), ("none", 0, 0)):
        for *_, held in ranks(world).run(results, {"gradients": "int4", "feedback": feedback}, 2, None, (world,)):
            assert held == size * NUMEL + shard * NUMEL // world
    options = {"gradients": "int4", "feedback": "classic", "residual_dtype": BF16}
    assert [held for *_, held in ranks(world).run(results, options, 2, None, (world,))] == [2 * NUMEL] * world


def break_one(group: Group, options: Options, bad: float) -> tuple[list[Tensor], list[Tensor], int]:
    """Results with and without a step in between at which rank 1 has a bad number."""
    found = []
    for steps in ((0, -1, 1, 2), (0, 1, 2)):
        model = wrap(group, EVEN)
        handle = compress_fsdp(model, exempt="none", **options)
        for step in steps:
            gradients = draw(group.rank(), max(step, 0), EVEN)
            if step < 0 and group.rank() == 1:
                gradients[0].view(-1)[700] = bad
            found.append(flat(backward(model, gradients)))
        if -1 in steps:
            count = handle.stats().nonfinite
    return found[:4], found[4:], count


@by_turns("world, bad", WORLDS, [math.nan, math.inf])
def test_a_bad_number_spoils_its_block_and_no_memory(ranks: RankPool, world: int, bad: float) -> None:
    owner = 700 // (1200 // world)
    for feedback in ("none", "classic", "ef21"):
        options = {"gradients": "int4:block=40", "feedback": feedback}
        answers = ranks(world).run(break_one, options, bad)
        for broken, whole_run, _ in answers:
            spoiled = ~broken[1].isfinite()
            assert spoiled[700]
            assert 1 <= int(spoiled.sum()) <= 40
            for got, want in zip([broken[0], *broken[2:]], whole_run, strict=True):
                assert torch.equal(got, want)
        assert [count for *_, count in answers] == [int(rank == owner) for rank in range(world)]


def test_a_lane_in_place_takes_no_memory() -> None:
    """The places of the small ones are kept, those of the large one are all."""
    numels = {"w": 2000, "b": 3}
    specs = [LaneSpec(n, codec(name), codec(name)) for n, name in zip(numels.values(), ("int8", "bf16"), strict=True)]
    message: Any = SimpleNamespace(program=None)
    columns = Columns(lanes_of(list(numels), specs, whole=True), 2003, torch.zeros(2, 2003), message)
    kept = [t for value in vars(columns).values() for t in (value if isinstance(value, list) else [value])]
    assert sum(t.numel() for t in kept if isinstance(t, Tensor)) == 2 * 3


# --- training ---------------------------------------------------------------------------------------------------------

LEARNING: dict[str, Options | None] = {
    "plain": None,
    "int8": {"gradients": "int8", "weights": "int8"},
    "lloyd4 with copies": {"gradients": {0: "none", 3: "lloyd4"}, "weights": "lloyd4", "replica": True},
    "what is owed": {"gradients": "lloyd2", "feedback": "classic", "warmup_steps": 2},
    "bits dealt out": {"gradients": "auto:4.2", "replan_every": 5},
    "the fastest codec": {"gradients": "auto"},
}


@on_ranks(2)
def test_models_learn(group: Group) -> None:
    plain = 0.0
    mesh = mesh_of(group.size())
    for name, options in LEARNING.items():
        model = fully_shard(network(), mesh=mesh)
        if options is not None:
            compress_fsdp(model, **options)
        losses = learn(model, torch.optim.SGD(model.parameters(), 0.06), group.rank(), range(20))
        first, last = sum(losses[:3]), sum(losses[-3:])
        plain = plain or last
        assert last < 0.1 * first, name
        assert last < 1.5 * plain + 0.01 * first, name
