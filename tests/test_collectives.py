"""The verbs: values within derived bounds, the same bytes on all ranks, torch's signatures, and what is refused.

Rank functions run many cases per call. Tests that take a device run with the tensors there: all ranks on one GPU, over
gloo.
"""

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import thinwire
from cases import (
    CPU,
    CUDA,
    Range,
    assert_same,
    block_of,
    digest,
    each_device,
    given,
    needs_cuda,
    on_ranks,
    small_chunks,
    thorough,
    worlds,
)
from ranks import RankPool
from thinwire.collectives import Work, traffic
from thinwire.collectives.checks import check_tensors
from thinwire.errors import CodecError, CollectiveError, ThinwireError

Group = dist.ProcessGroup
Device = torch.device
EVERY_LENGTH = ("none", "int8", "int3:block=40,mode=affine", "lloyd2:block=128")
SOME_LENGTHS = (
    *("bf16", "fp16", "e4m3:block=64", "e5m2", "int4:block=32"),
    *("int5:block=64,rounding=stochastic", "lloyd4:block=64", "lloyd1:block=32,scale=unbiased"),
)
VERB_CODECS = ("none", "int8", "int4:block=32,mode=affine", "lloyd2:block=64")
SHARED = ("two_phase", "one_shot")  # all_reduce through the codec
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
AVG, SUM = dist.ReduceOp.AVG, dist.ReduceOp.SUM


def lengths(codec: str) -> tuple[int, ...]:
    """Nothing, one, around a block, and several chunks that no world divides."""
    block = block_of(thinwire.codec(codec))
    return tuple(sorted({0, 1, max(1, block - 1), block, block + 1, 2003}))[0 if codec in EVERY_LENGTH else -2 :]


def op_of(factor: float | str) -> Any:
    """SUM, AVG or PREMUL_SUM of a factor."""
    return {"sum": SUM, "avg": AVG}.get(factor) or dist._make_nccl_premul_sum(factor)


def scale_of(factor: float | str, world: int) -> float:
    return {"sum": 1.0, "avg": 1 / world}.get(factor, factor)  # type: ignore[arg-type, return-value]


BY_DEVICE = [  # torch's own verbs are torch's affair on a GPU
    *(pytest.param(algorithm, CPU, id=f"{algorithm}-cpu") for algorithm in ("compressed", "plain")),
    pytest.param("compressed", CUDA, id="compressed-cuda", marks=needs_cuda),
]


# --- all_reduce -------------------------------------------------------------------------------------------------------
class Case(NamedTuple):
    """One all_reduce."""

    codec: str
    numel: int
    algorithm: str
    factor: float | str = "sum"
    dtype: torch.dtype = torch.float32
    broken: bool = False


def reduce_cases(group: Group, cases: Sequence[Case], device: Device = CPU) -> tuple[list[str], list[Tensor]]:
    """Digests of all outputs, and rank 0's outputs."""
    outputs = []
    with small_chunks():
        for case in cases:
            x = given(case.numel, group.rank(), case.dtype, broken=case.broken).to(device)
            place = x.data_ptr()
            assert thinwire.all_reduce(x, op_of(case.factor), codec=case.codec, algorithm=case.algorithm) is None
            assert x.data_ptr() == place
            outputs.append(x.cpu())
    return [digest(x) for x in outputs], outputs if group.rank() == 0 else []


@functools.cache
def sent(codec: str, numel: int, rank: int, dtype: torch.dtype = torch.float32, broken: bool = False) -> Range:
    """What others may read of a rank's numbers."""
    return Range.of(given(numel, rank, dtype, broken=broken)).coded(thinwire.codec(codec))


def reduced_range(case: Case, world: int) -> Range:
    """What a sum may come to: every rank's rounding, and that of the sum where it travels too."""
    codec = "none" if case.algorithm == "plain" else case.codec
    inputs = [sent(codec, case.numel, rank, case.dtype, case.broken) for rank in range(world)]
    by_torch = case.algorithm == "plain"  # whose sums round to the dtype at every addition
    total = Range.total(inputs, scale_of(case.factor, world), case.dtype if by_torch else torch.float32)
    return (total if case.algorithm == "one_shot" else total.coded(thinwire.codec(codec))).written(case.dtype)


def check_reduce(ranks: RankPool, world: int, cases: Sequence[Case], device: Device) -> None:
    answers = ranks(world).run(reduce_cases, cases, device)
    for case, got, *digests in zip(cases, answers[0][1], *(answer[0] for answer in answers), strict=True):
        assert len(set(digests)) == 1, f"ranks differ: {case}"
        reduced_range(case, world).assert_holds(got, str(case))


PARTED = (EVERY_LENGTH[:2] + SOME_LENGTHS[:4], EVERY_LENGTH[2:], SOME_LENGTHS[4:])  # by turns each in one world


@each_device
@pytest.mark.parametrize(
    ("world", "codecs"),
    [
        *((2 + turn, PARTED[turn]) for turn in range(3)),
        *thorough(*((2 + i, codecs) for i in range(3) for turn, codecs in enumerate(PARTED) if i != turn)),
    ],
    ids=lambda value: value if isinstance(value, int) else value[0],
)
def test_all_reduce_is_within_its_error_and_the_same_on_all_ranks(
    ranks: RankPool, world: int, codecs: Sequence[str], device: Device
) -> None:
    check_reduce(ranks, world, [Case(c, n, a) for c in codecs for a in SHARED for n in lengths(c)], device)


@each_device
@worlds(3, rare=[2])
def test_all_reduce_averages_and_multiplies(ranks: RankPool, world: int, device: Device) -> None:
    pairs = [(c, a) for c in ("none", "int8", "lloyd4:block=64") for a in SHARED] + [("int8", "plain")]
    factors = ("avg", 0.5, -3.0, 0.0)
    check_reduce(ranks, world, [Case(c, n, a, f) for c, a in pairs for f in factors for n in (1, 511)], device)


@each_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_reduce_takes_sixteen_bits(ranks: RankPool, dtype: torch.dtype, device: Device) -> None:
    codecs = ("none", "bf16", "int8", "int4:block=32,mode=affine", "lloyd2:block=64", "e4m3")
    pairs = [(c, a) for c in codecs for a in SHARED] + [("none", "plain")]
    check_reduce(ranks, 3, [Case(c, n, a, f, dtype) for c, a in pairs for f, n in (("sum", 7), ("avg", 700))], device)


@each_device
@worlds(2, rare=[3])
def test_a_block_that_is_not_finite_stays_visible_and_alone(ranks: RankPool, world: int, device: Device) -> None:
    codecs = ("none", "bf16", "int8", "int3:block=40,mode=affine", "lloyd4:block=64", "e5m2")
    pairs = [(c, a) for c in codecs for a in SHARED] + [("none", "plain")]
    check_reduce(ranks, world, [Case(c, n, a, broken=True) for c, a in pairs for n in (5, 129, 1777)], device)


@pytest.mark.parametrize("world", [3, *thorough(2, 4)])
def test_auto_is_one_of_the_others(ranks: RankPool, world: int) -> None:
    kinds = [(0, "sum"), (1, "avg"), (300, "sum"), (300, -2.0), (5000, "avg")]
    cases = [Case("int8", n, a, f) for n, f in kinds for a in ("auto", *SHARED, "plain")]
    for digests, _ in ranks(world).run(reduce_cases, cases):
        for i in range(0, len(digests), 4):
            assert digests[i] in digests[i + 1 : i + 4], cases[i]


@each_device
@worlds(3, rare=[2, 4])
def test_the_identity_adds_in_rank_order_exactly(ranks: RankPool, world: int, device: Device) -> None:
    cases = [Case("none", n, a, dtype=d) for n in (1, 777) for a in SHARED for d in (*DTYPES, torch.float64)]
    outputs = ranks(world).run(reduce_cases, cases, device)[0][1]
    for case, got in zip(cases, outputs, strict=True):
        wide = torch.float64 if case.dtype == torch.float64 else torch.float32
        total = torch.zeros(case.numel, dtype=wide)
        for rank in range(world):
            total += given(case.numel, rank, case.dtype)
        assert_same(got, total.to(case.dtype), str(case))


@each_device
@on_ranks(1)
def test_one_rank_alone_is_exact(group: Group, device: Device) -> None:
    """Every verb in a world of one rank, with a codec that would show, on rows and on transposed matrices."""
    for x in (given(300, 0).to(device), given(300, 0).view(20, 15).t().to(device)):
        for algorithm, op, factor in ((SHARED[0], AVG, 1), (SHARED[1], AVG, 1), (SHARED[0], op_of(-2.0), -2)):
            z = x.clone()
            thinwire.all_reduce(z, op, codec="lloyd1", algorithm=algorithm)
            assert torch.equal(z, factor * x), algorithm
        z = x.clone()
        thinwire.all_reduce_coalesced([z[:7], z[7:]], codec="lloyd1", algorithm="one_shot")
        assert torch.equal(z, x)
        for algorithm in ("auto", "compressed", "plain"):
            how: Any = {"algorithm": algorithm, "codec": "lloyd1"}
            for verb, factor, *args in (
                ("reduce_scatter_tensor", 1, x),
                ("reduce_scatter_tensor", 1, x, AVG),
                ("all_gather_into_tensor", 1, x),
                ("all_to_all_single", 1, x, [len(x)], [len(x)]),
                *([("reduce_scatter_tensor", 3, x, op_of(3.0))] if algorithm == "compressed" else []),
            ):
                y = torch.full_like(x, math.nan)
                getattr(thinwire, verb)(y, *args, **how)
                assert torch.equal(y, factor * x), f"{verb} {algorithm}"
            y, z = torch.full_like(x, math.nan), torch.full_like(x, math.nan)
            thinwire.all_gather([y], x, **how)
            thinwire.all_to_all([z], [x], **how)
            assert torch.equal(y, x)
            assert torch.equal(z, x)
            thinwire.broadcast(y, 0, **how)
            assert torch.equal(y, x)
    x = given(8, 0)
    for algorithm in ("auto", "plain"):  # a codec is named where nothing travels, too
        for verb, *args in (("all_reduce", x), ("broadcast", x, 0), ("all_to_all_single", x.clone(), x)):
            with pytest.raises(CodecError, match="unknown codec 'int9'"):
                getattr(thinwire, verb)(*args, codec="int9", algorithm=algorithm)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.view(30, 40).t(),
    "every other": lambda x: x[::2],
    "columns": lambda x: x.view(2, 30, 20)[:, 3:9],
    "channels last": lambda x: x.view(4, 3, 10, 10).to(memory_format=torch.channels_last),
}


@each_device
@on_ranks(3)
def test_strided_tensors_get_what_contiguous_ones_get(group: Group, device: Device) -> None:
    for algorithm, (name, lay) in itertools.product((*SHARED, "plain"), LAYOUTS.items()):
        x = lay(given(1200, group.rank()).to(device))
        y = x.clone(memory_format=torch.contiguous_format)
        with small_chunks():
            thinwire.all_reduce(x, codec="int8", algorithm=algorithm)
            thinwire.all_reduce(y, codec="int8", algorithm=algorithm)
        assert_same(x.contiguous().cpu(), y.cpu(), f"{algorithm} {name}")


def view(group: Group) -> None:
    """A view is written and its neighbors are not."""
    whole = torch.ones(100, 4)
    thinwire.all_reduce(whole[:, 1:3], codec="int8", algorithm="two_phase")
    assert (whole[:, [0, 3]] == 1).all()
    assert (whole[:, 1:3] != 1).all()


def complex_numbers(group: Group) -> None:
    """They are pairs of reals."""
    for algorithm in (*SHARED, "plain", "auto"):
        x = torch.complex(given(333, group.rank()), given(333, group.rank() + 7))
        y = torch.view_as_real(x).clone()
        thinwire.all_reduce(x, codec="int8", algorithm=algorithm)
        thinwire.all_reduce(y, codec="int8", algorithm=algorithm)
        assert_same(torch.view_as_real(x), y, algorithm)


def negated_view(group: Group) -> None:
    for algorithm in (*SHARED, "plain"):
        base = torch.complex(torch.zeros(8), torch.arange(8.0))
        view = base.conj().imag
        assert view.is_neg()
        thinwire.all_reduce(view, codec="none", algorithm=algorithm)
        assert_same(base.imag.contiguous(), 2 * torch.arange(8.0), algorithm)


def leaves(group: Group) -> None:
    """Leaves that require a gradient are reduced in place."""
    for algorithm in (*SHARED, "plain"):
        x = torch.full((50,), 2.0, requires_grad=True)
        before = x._version
        thinwire.all_reduce(x, codec="int8", algorithm=algorithm)
        assert (x.requires_grad, x.is_leaf, x.grad_fn) == (True, True, None)
        assert (x > 3).all()
        assert x._version > before or algorithm == "plain"  # torch's own leaves it
    y = torch.nn.Parameter(torch.ones(9))
    thinwire.broadcast(y, 0, codec="none", algorithm="compressed")
    thinwire.all_reduce_coalesced([y, torch.nn.Parameter(torch.ones(3))], codec="none", algorithm="two_phase")
    assert (y == 2).all()


def inference_tensors(group: Group) -> None:
    with torch.inference_mode():
        x, y = torch.ones(40), torch.ones(8, 10).t()
        z = [torch.ones(5), torch.ones(6)]
        thinwire.all_reduce(x, codec="none", algorithm="two_phase")
        thinwire.all_reduce(y, codec="none", algorithm="two_phase")
        thinwire.all_reduce_coalesced(z, codec="none", algorithm="two_phase")
        out = torch.empty(6)
        thinwire.all_to_all_single(out, torch.ones(6), codec="none", algorithm="compressed")
    assert [float(t.sum()) for t in (x, y, *z, out)] == [80, 160, 10, 12, 6]
    for whole in (x, y):  # outside inference mode
        half = torch.full((whole.numel() // 2,), 2.0)
        thinwire.all_reduce(whole, AVG, algorithm="plain")
        thinwire.all_gather_into_tensor(whole, half, algorithm="plain")
        thinwire.all_gather([*whole.split(len(whole) // 2)], half, algorithm="plain")
        assert (whole == 2).all()


def scalars(group: Group) -> None:
    """A tensor without dimensions is one number; a scale of one number has one bfloat16 rounding."""
    x = torch.tensor(float(group.rank() + 1))
    thinwire.all_reduce(x, codec="int8", algorithm="two_phase")
    assert abs(x.item() - 3) <= 3 * 2 * (2**-8 + 2**-7)
    y = torch.tensor(float(group.rank() + 1))
    thinwire.broadcast(y, 1, codec="bf16", algorithm="compressed")
    assert y.item() == 2


def arguments_by_position(group: Group) -> None:
    """As in torch."""
    x = torch.full((6,), 1.0)
    work = thinwire.all_reduce(x, AVG, group, True, codec="none", algorithm="two_phase")
    assert work.wait()
    assert (x == 1).all()
    y, z = torch.empty(3 * group.size()), torch.ones(3)
    how: Any = {"algorithm": "plain"}
    thinwire.all_gather_into_tensor(y, z, group, False, **how)
    thinwire.reduce_scatter_tensor(z, y, SUM, group, False, **how)
    thinwire.all_gather(list(y.split(3)), z, group, False, **how)
    thinwire.all_to_all(list(y.split(3)), list(y.clone().split(3)), group, False, **how)
    thinwire.all_to_all_single(y, y.clone(), None, None, group, False, **how)
    thinwire.broadcast(z, 0, group, False, **how)
    thinwire.broadcast(z, None, group, False, 0, **how)
    thinwire.all_reduce_coalesced([y, z], SUM, group, False, **how)


def steps_and_rotations(group: Group) -> None:
    """A step varies the rotation, and zero repeats it."""
    digests = []
    for step in (0, 0, 1, 2**63):
        x = given(600, group.rank())
        thinwire.all_reduce(x, codec="lloyd2", algorithm="two_phase", step=step)
        digests.append(digest(x))
    assert (digests[0], len(set(digests))) == (digests[1], 3)


def traffic_of_torch(group: Group) -> None:
    """What torch itself moves is not counted."""
    before = traffic()
    thinwire.all_reduce(torch.ones(5000), algorithm="plain")
    thinwire.broadcast(torch.ones(5000), 0, algorithm="plain")
    assert traffic() == before


def wrapped_tensors(group: Group) -> None:
    """They are refused before anything moves."""
    member = dist.new_group()
    wrapped = DTensor.from_local(torch.ones(10), init_device_mesh("cpu", (group.size(),)), [Replicate()])
    with pytest.raises(CollectiveError, match=r"to_local\(\)"):
        thinwire.all_reduce(wrapped, group=member, algorithm="two_phase")
    with pytest.raises(CollectiveError, match=r"or wait\(\) for the result of a functional collective"):
        thinwire.all_reduce(AsyncCollectiveTensor(torch.ones(10)), group=member)
    x = torch.ones(10)
    thinwire.all_reduce(x, group=member, codec="none", algorithm="two_phase")
    assert x.sum() == 20


def coalescing_of_torch(group: Group) -> None:
    """Inside torch's _coalescing_manager calls run at once, those that torch serves too."""
    whole, x = torch.empty(20), torch.ones(10)
    for _ in range(2):
        with dist._coalescing_manager():
            thinwire.all_reduce(x, algorithm="plain")
            thinwire.all_gather_into_tensor(whole, x, algorithm="plain")
            thinwire.reduce_scatter_tensor(x, whole, algorithm="plain", async_op=True).wait()  # type: ignore[union-attr]
    assert x.unique().tolist() == [16.0]


SPECIAL = [view, complex_numbers, negated_view, leaves, inference_tensors, scalars, arguments_by_position]
SPECIAL += [steps_and_rotations, traffic_of_torch, wrapped_tensors, coalescing_of_torch]


@pytest.mark.parametrize("check", SPECIAL, ids=lambda check: check.__name__)
def test_two_ranks_with(ranks: RankPool, check: Callable[[Group], None]) -> None:
    ranks(2).run(check)


# --- groups -----------------------------------------------------------------------------------------------------------
@on_ranks(3)
def test_groups_and_meshes_are_served(group: Group) -> None:
    """A group of all, one of some, a mesh, a mesh's dimension."""
    rank, world = group.rank(), group.size()
    found, everyone, some = [], dist.new_group(), dist.new_group([world - 1, 0])
    mesh = init_device_mesh("cpu", (world,))
    named = init_device_mesh("cpu", (1, world), mesh_dim_names=("pp", "dp"))
    for member in (everyone, mesh, named["dp"], named["pp"]):
        x = torch.full((200,), float(rank + 1))
        thinwire.all_reduce(x, group=member, codec="none", algorithm="two_phase")
        found.append(float(x[7]))
    if rank in (0, world - 1):
        x = torch.full((200,), float(rank + 1))
        thinwire.all_reduce(x, group=some, codec="none", algorithm="one_shot")
        thinwire.broadcast(y := torch.tensor([float(rank)]), world - 1, some, codec="none", algorithm="compressed")
        found += [float(x[7]), float(y)]
    assert found == [6.0, 6.0, 6.0, rank + 1.0, *([] if rank == 1 else [4.0, 2.0])]


PAIRS = (("int8", "lloyd4:block=64"), ("none", "int4"), ("int8", "int8"))  # codecs inside a node and across nodes
ON_A_MESH = ((0, "sum"), (1, "sum"), (3, "avg"), (1511, "avg"), (2003, -2.0))  # lengths and factors


def hierarchical(group: Group, shape: tuple[int, int], device: Device) -> list[tuple[str, Tensor]]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("node", "gpu"))
    found = []
    with small_chunks():
        for inside, across in PAIRS:
            for numel, factor in ON_A_MESH:
                x = given(numel, group.rank()).to(device)
                codec = (inside, across) if inside != across else inside
                thinwire.all_reduce(x, op_of(factor), mesh, codec=codec, algorithm="hierarchical")
                found.append((digest(x), x.cpu()))
    return found


def hierarchical_range(shape: tuple[int, int], pair: tuple[str, str], numel: int, factor: float | str) -> Range:
    nodes, size = shape
    inside, across = pair
    sums = [Range.total([sent(inside, numel, node * size + i) for i in range(size)]) for node in range(nodes)]
    if nodes > 1:
        sums = [total.coded(thinwire.codec(across)) for total in sums]
    total = Range.total(sums, scale_of(factor, nodes * size))
    total = total.coded(thinwire.codec(across)) if nodes > 2 else total
    return total.coded(thinwire.codec(inside)).written(torch.float32)


@each_device
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), *thorough(((1, 4),))])
def test_hierarchical_sums_inside_and_across(ranks: RankPool, shape: tuple[int, int], device: Device) -> None:
    told = ranks(4).run(hierarchical, shape, device)
    kinds = [(pair, *kind) for pair in PAIRS for kind in ON_A_MESH]
    for kind, *answers in zip(kinds, *told, strict=True):
        assert len({answer[0] for answer in answers}) == 1, f"ranks differ: {shape} {kind}"
        hierarchical_range(shape, *kind).assert_holds(answers[0][1], f"{shape} {kind}")


@on_ranks(4)
def test_an_error_past_the_largest_number_is_none(group: Group) -> None:
    """As in a flat sum: lloyd4 takes some of 60000 past 65504, the largest of fp16, which would be infinite."""
    mesh = init_device_mesh("cpu", (2, 2))
    for pair in (("int8", "lloyd4"), ("bf16", "lloyd4"), ("bf16", "int4")):
        for value in (60000.0, -60000.0, math.inf):
            x = torch.full((2000,), value, dtype=torch.float16)
            thinwire.all_reduce(x, AVG, mesh, codec=pair, algorithm="hierarchical")
            most = x.float().abs().max().item()
            assert 50000 < most <= 65504 or (math.isinf(value) and not math.isfinite(most)), (pair, value)


# --- works ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("algorithm", "device"), BY_DEVICE)
@on_ranks()
def test_async_calls_return_a_work_whose_future_holds_the_outputs(group: Group, algorithm: str, device: Device) -> None:
    for verb, call in async_calls(group, algorithm, device).items():
        work, outputs = call()
        assert isinstance(work, Work), verb
        assert work.wait() is True, verb
        assert work.is_completed() is True, verb
        value = work.get_future().wait()
        assert len(value) == len(outputs), verb
        assert all(a is b for a, b in zip(value, outputs, strict=True)), verb


def async_calls(group: Group, algorithm: str, device: Device) -> dict[str, Callable[[], tuple[Work, list[Tensor]]]]:
    """Every verb, started; each gives its work and its outputs."""
    world = group.size()
    x, y, parts = (torch.ones(shape, device=device) for shape in (40, 40 * world, (world, 40)))
    parts = list(parts.unbind())
    how: Any = {"async_op": True, "codec": "int8", "algorithm": algorithm}
    sums: Any = {**how, "algorithm": {"compressed": "two_phase"}.get(algorithm, algorithm)}
    return {
        "all_reduce": lambda: (thinwire.all_reduce(x, **sums), [x]),
        "all_reduce_coalesced": lambda: (thinwire.all_reduce_coalesced([x, y], **sums), [x, y]),
        "reduce_scatter_tensor": lambda: (thinwire.reduce_scatter_tensor(x, y, **how), [x]),
        "all_gather_into_tensor": lambda: (thinwire.all_gather_into_tensor(y, x, **how), [y]),
        "all_gather": lambda: (thinwire.all_gather(parts, x, **how), parts),
        "all_to_all": lambda: (thinwire.all_to_all(parts, list(y.split(40)), **how), parts),
        "all_to_all_single": lambda: (thinwire.all_to_all_single(y, y.clone(), **how), [y]),
        "broadcast": lambda: (thinwire.broadcast(x, 0, **how), [x]),
    }  # type: ignore[dict-item]


@pytest.mark.parametrize("algorithm", ["compressed", "plain"])
@on_ranks(2, gives=[True] * 5)
def test_the_future_of_complex_outputs_holds_the_tensors_that_were_passed(group: Group, algorithm: str) -> list[bool]:
    world, found = group.size(), []
    x, y = torch.ones(4, dtype=torch.complex64), torch.ones(4 * world, dtype=torch.complex64)
    for verb, output, *args in (
        ("all_reduce", x, x),
        ("all_gather_into_tensor", y, y, x),
        ("reduce_scatter_tensor", x, x, y),
        ("all_to_all_single", y, y, y.clone()),
        ("broadcast", x, x, 0),
    ):
        chosen = "one_shot" if verb == "all_reduce" and algorithm == "compressed" else algorithm
        work = getattr(thinwire, verb)(*args, async_op=True, codec="none", algorithm=chosen)
        found.append(work.get_future().wait()[0] is output)
    return found


# --- coalesced --------------------------------------------------------------------------------------------------------
def coalesced(
    group: Group, codec: str, algorithm: str, sizes: Sequence[int], device: Device
) -> tuple[str, list[Tensor], list[Tensor]]:
    xs = [given(n, group.rank()).to(device) for n in sizes]
    xs[-1] = xs[-1].view(2, -1).t()
    joined = torch.cat([x.reshape(-1) for x in xs])
    with small_chunks():
        thinwire.all_reduce_coalesced(xs, AVG, codec=codec, algorithm=algorithm, step=0)
        thinwire.all_reduce(joined, AVG, codec=codec, algorithm=algorithm, step=0)
    return digest(*xs), [x.contiguous().cpu() for x in xs], list(joined.cpu().split([x.numel() for x in xs]))


@each_device
@worlds(3, rare=[2])
def test_coalesced_tensors_are_reduced_as_one_row(ranks: RankPool, world: int, device: Device) -> None:
    pairs = [(c, a) for c in ("none", "int8", "lloyd4:block=64") for a in SHARED] + [("none", "plain")]
    for codec, algorithm in pairs:
        answers = ranks(world).run(coalesced, codec, algorithm, (700, 0, 1, 33, 1290), device)
        assert len({answer[0] for answer in answers}) == 1, f"ranks differ: {codec} {algorithm}"
        for got, want in zip(*answers[0][1:], strict=True):
            if algorithm != "plain":
                assert_same(got.reshape(-1), want, f"{codec} {algorithm}")
            elif world == 2:  # torch adds the parts of a tensor in an order that depends on its length
                Range.total([Range.of(want)] * 2, 0.5).written(torch.float32).assert_holds(got)


# --- the other verbs --------------------------------------------------------------------------------------------------
PARTS = (0, 1, 63, 129, 1511)  # elements per rank
UNEVEN = ((5, 0, 130, 1), (0, 2000, 1, 7), (0, 0, 0, 0), (64, 64, 64, 64))  # of four ranks
Outputs = dict[str, list[Tensor]]  # by verb


def run_verbs(group: Group, codec: str, algorithm: str, device: Device) -> Outputs:
    """The outputs of every verb, of every length."""
    how: Any = {"codec": codec, "algorithm": algorithm}
    with small_chunks():
        return {
            "reduce_scatter": scatter_cases(group, "avg", device, how),
            "reduce_scatter times -2": scatter_cases(group, -2.0, device, how) if algorithm == "compressed" else [],
            "all_gather": gather_cases(group, device, how),
            "all_gather of lists": gather_lists(group, device, how),
            "broadcast": broadcast_cases(group, device, how),
            "all_to_all_single": exchange_single(group, device, how),
            "all_to_all": exchange_lists(group, device, how),
        }


def scatter_cases(group: Group, factor: float | str, device: Device, how: Any) -> list[Tensor]:
    outputs = []
    for n in PARTS:
        output = torch.full((n,), math.nan, device=device)
        thinwire.reduce_scatter_tensor(output, given(n * group.size(), group.rank()).to(device), op_of(factor), **how)
        outputs.append(output.cpu())
    return outputs


def gather_cases(group: Group, device: Device, how: Any) -> list[Tensor]:
    outputs = []
    for n in PARTS:
        output = torch.full((n * group.size(),), math.nan, device=device)
        thinwire.all_gather_into_tensor(output, given(n, group.rank()).to(device), **how)
        outputs += output.cpu().split([n] * group.size())
    return outputs


def gather_lists(group: Group, device: Device, how: Any) -> list[Tensor]:
    outputs = []
    for row in UNEVEN:
        sizes = row[: group.size()]
        parts = [torch.full((n,), math.nan, device=device) for n in sizes]
        thinwire.all_gather(parts, given(sizes[group.rank()], group.rank()).to(device), **how)
        outputs += [part.cpu() for part in parts]
    return outputs


def broadcast_cases(group: Group, device: Device, how: Any) -> list[Tensor]:
    outputs = []
    for n in (0, 1, 2, 63, 1511):
        for source in (0, group.size() - 1):
            x = given(n, group.rank()).to(device)
            thinwire.broadcast(x, source, **how)
            outputs.append(x.cpu())
    return outputs


def rows(source: int, target: int, i: int) -> int:
    """How many rows one rank sends another in case i: several chunks, one, none, all the same."""
    return ((source * 7 + target * 3) % 5, 0 if source == target else 700, int(source < target), 64, 0)[i]


def exchange_single(group: Group, device: Device, how: Any) -> list[Tensor]:
    rank, world, outputs = group.rank(), group.size(), []
    for i in range(5):
        sizes = [rows(rank, other, i) for other in range(world)]
        came = [rows(other, rank, i) for other in range(world)]
        output = torch.full((sum(came), 3), math.nan, device=device)
        input = given(3 * sum(sizes), rank).view(-1, 3).to(device)
        splits = (None, None) if i > 2 else (came, sizes)
        thinwire.all_to_all_single(output, input, *splits, **how)
        outputs += [part.reshape(-1) for part in output.cpu().split(came)]
    return outputs


def exchange_lists(group: Group, device: Device, how: Any) -> list[Tensor]:
    rank, world, outputs = group.rank(), group.size(), []
    for i in range(5):
        parts = [torch.full((3 * rows(other, rank, i),), math.nan, device=device) for other in range(world)]
        thinwire.all_to_all(parts, [sent_to(rank, other, world, i).to(device) for other in range(world)], **how)
        outputs += [part.cpu() for part in parts]
    return outputs


def sent_to(source: int, target: int, world: int, i: int) -> Tensor:
    sizes = [3 * rows(source, other, i) for other in range(world)]
    return given(sum(sizes), source).split(sizes)[target]


def verb_ranges(codec: str, rank: int, world: int) -> dict[str, list[Range]]:
    """What the outputs of a rank may be: within one rounding, exact where nothing travels."""
    coder = thinwire.codec(codec)

    def scattered(n: int, factor: float | str) -> Range:
        parts = [given(n * world, other)[rank * n : (rank + 1) * n] for other in range(world)]
        return Range.total([Range.of(part).coded(coder) for part in parts], scale_of(factor, world))

    def exchanged(source: int, i: int) -> Range:
        part = Range.of(sent_to(source, rank, world, i))
        return part if source == rank else part.coded(coder)

    others = range(world)
    swapped = [exchanged(source, i) for i in range(5) for source in others]
    return {
        "reduce_scatter": [scattered(n, "avg") for n in PARTS],
        "reduce_scatter times -2": [scattered(n, -2.0) for n in PARTS],
        "all_gather": [sent(codec, n, other) for n in PARTS for other in others],
        "all_gather of lists": [sent(codec, row[other], other) for row in UNEVEN for other in others],
        "broadcast": [sent(codec, n, source) for n in (0, 1, 2, 63, 1511) for source in (0, world - 1)],
        "all_to_all_single": swapped,
        "all_to_all": swapped,
    }


ALGORITHMS = {("int8", 2): "auto", ("none", 2): "plain", ("int8", 3): "plain", ("lloyd2:block=64", 4): "plain"}


def algorithms(codec: str, world: int, device: Device) -> tuple[str, ...]:
    """plain, once in each world, has no codec; auto, which takes a while to measure, is one of the two."""
    more = ALGORITHMS.get((codec, world))
    return ("compressed", more) if more and device == CPU else ("compressed",)


@each_device
@pytest.mark.parametrize(
    ("world", "codec"),
    [
        *((2 + i % 2, codec) for i, codec in enumerate(VERB_CODECS)),
        *thorough((2, "int8"), (4, "lloyd2:block=64"), (4, "none")),
        *thorough((2, VERB_CODECS[3]), *((3, codec) for codec in VERB_CODECS[::2])),
    ],
)
def test_every_verb_is_within_one_rounding_for_any_length_and_split(
    ranks: RankPool, world: int, codec: str, device: Device
) -> None:
    want = [verb_ranges(codec, rank, world) for rank in range(world)]
    for algorithm in algorithms(codec, world, device):
        answers: list[Outputs] = ranks(world).run(run_verbs, codec, algorithm, device)
        for rank, outputs in enumerate(answers):
            for verb, got in outputs.items():
                for i, output in enumerate(got):
                    want[rank][verb][i].assert_holds(output, f"{verb} by {algorithm}, rank {rank}, output {i}")
        for verb in ("all_gather", "all_gather of lists", "broadcast"):
            assert len({digest(*outputs[verb]) for outputs in answers}) == 1, f"ranks differ: {verb} by {algorithm}"


def every_dtype(group: Group, algorithm: str, dtype: torch.dtype, device: Device) -> list[Tensor]:
    """All verbs with the identity on small whole numbers: exact in every dtype."""
    world, rank = group.size(), group.rank()
    whole, part = (torch.arange(n).to(device, dtype) + rank for n in (8 * world, 8))
    how: Any = {"codec": "none", "algorithm": algorithm}
    summed = whole.clone()
    thinwire.all_reduce(summed, codec="none", algorithm="plain" if algorithm == "plain" else "two_phase")
    scattered, gathered = part.clone(), torch.zeros_like(whole)
    exchanged = torch.zeros_like(whole)
    thinwire.reduce_scatter_tensor(scattered, whole, **how)
    thinwire.all_gather_into_tensor(gathered, part, **how)
    thinwire.all_to_all_single(exchanged, whole, **how)
    listed, swapped = (list(torch.zeros_like(whole).split(8)) for _ in range(2))
    thinwire.all_gather(listed, part, **how)
    thinwire.all_to_all(swapped, list(whole.split(8)), **how)
    thinwire.broadcast(part, 1, **how)
    found = (summed, scattered, gathered, torch.cat(listed), exchanged, torch.cat(swapped), part)
    return [output.cpu() for output in found]


NUMBERS = (torch.bfloat16, torch.float16, torch.float64, torch.complex64)


@pytest.mark.parametrize(
    ("algorithm", "dtype", "device"),
    [
        *(("compressed", dtype, CPU) for dtype in NUMBERS),
        *(pytest.param("compressed", dtype, CUDA, marks=needs_cuda) for dtype in NUMBERS),
        *(("plain", dtype, CPU) for dtype in (torch.float64, torch.int64, torch.uint8, torch.complex64)),
    ],
)
def test_exact_calls_take_every_dtype(ranks: RankPool, algorithm: str, dtype: torch.dtype, device: Device) -> None:
    whole = [(torch.arange(16) + rank) for rank in range(2)]
    for rank, got in enumerate(ranks(2).run(every_dtype, algorithm, dtype, device)):
        total = whole[0] + whole[1]
        exchanged = torch.cat([w.split(8)[rank] for w in whole])
        gathered = torch.cat([w[:8] for w in whole])
        want = (total, total.split(8)[rank], gathered, gathered, exchanged, exchanged, whole[1][:8])
        for name, mine, expected in zip(
            ["reduce", "scatter", "gather", "list", "exchange", "swap", "cast"], got, want, strict=True
        ):
            assert torch.equal(mine, expected.to(dtype)), f"{name}: {mine}"


@pytest.mark.parametrize(("algorithm", "device"), BY_DEVICE)
@on_ranks(2, rare=[3])
def test_strided_inputs_and_outputs_work_in_every_verb(group: Group, algorithm: str, device: Device) -> None:
    world, rank = group.size(), group.rank()
    how: Any = {"codec": "int8", "algorithm": algorithm}
    whole = given(60 * world, rank).view(20, 3 * world).to(device)
    part = given(60, rank).view(6, 10).to(device)
    found = []
    for verb, out_shape, input in (
        ("reduce_scatter_tensor", (6, 10), whole),
        ("all_gather_into_tensor", (10, 6 * world), part),
        ("all_to_all_single", (20, 3 * world), whole),
    ):
        rows_out = out_shape[0] - out_shape[0] % world if verb == "all_to_all_single" else out_shape[0]
        source = input[: input.shape[0] - input.shape[0] % world] if verb == "all_to_all_single" else input
        want = torch.empty(rows_out, out_shape[1], device=device)
        got = torch.empty(out_shape[1], rows_out, device=device).t()
        lying = source.t().contiguous().t()
        assert not got.is_contiguous()
        assert not lying.is_contiguous()
        getattr(thinwire, verb)(want, source.contiguous(), **how)
        getattr(thinwire, verb)(got, lying, **how)
        found.append(torch.equal(got, want))
    cast, straight = part.t(), part.t().contiguous()
    thinwire.broadcast(cast, 0, **how)
    thinwire.broadcast(straight, 0, **how)
    lying, standing = (torch.empty(shape, device=device) for shape in ((10, 6), (6, 10)))
    lists = [[lying.clone().t() if t else standing.clone() for _ in range(world)] for t in (0, 1, 0, 1)]
    thinwire.all_gather(lists[0], part, **how)
    thinwire.all_gather(lists[1], part.t().contiguous().t(), **how)
    thinwire.all_to_all(lists[2], [part] * world, **how)
    thinwire.all_to_all(lists[3], [part.t().contiguous().t()] * world, **how)
    pairs = ((0, 1), (2, 3))
    same = [torch.equal(a, b) for i, j in pairs for a, b in zip(lists[i], lists[j], strict=True)]
    found = [*found, torch.equal(cast, straight), *same]
    assert all(found), found


@pytest.mark.parametrize("numel", [5, 900])
@pytest.mark.parametrize(("algorithm", "device"), BY_DEVICE)
@on_ranks(3, rare=[2], gives=[True] * 9)
def test_outputs_may_lie_in_inputs(group: Group, algorithm: str, numel: int, device: Device) -> list[bool]:
    """The own part of the whole is output of one and input of the other, as sharded training does it."""
    rank, world = group.rank(), group.size()
    how: Any = {"codec": "int8", "algorithm": algorithm}
    found = []
    own = slice(rank * numel, (rank + 1) * numel)
    with small_chunks():
        for part in (own, slice(3, 3 + numel)):  # the other lies in two rows, which torch's own cannot
            cannot = part is not own and algorithm == "plain"
            want = torch.empty(numel, device=device)
            whole = given(numel * world, rank).to(device)
            thinwire.reduce_scatter_tensor(want, whole.clone(), **how)
            thinwire.reduce_scatter_tensor(whole[part], whole, **how)
            found.append(cannot or torch.equal(whole[part], want))
            want = torch.empty(numel * world, device=device)
            whole = given(numel * world, rank).to(device)
            thinwire.all_gather_into_tensor(want, whole[part].clone(), **how)
            thinwire.all_gather_into_tensor(whole, whole[part], **how)
            found.append(cannot or torch.equal(whole, want))
        for async_op in (False, False, True):  # the second is looked up
            x = given(numel * world, rank).to(device)
            thinwire.all_to_all_single(want, x.clone(), **how)
            work = thinwire.all_to_all_single(x, x, async_op=async_op, **how)
            if work is not None:
                work.wait()
            found.append(torch.equal(x, want))
        sent, received = ([numel * (1 + sign * (r - rank) % world) for r in range(world)] for sign in (1, -1))
        for shift in (0, 3):  # parts that go to where others lie
            x = given(sum(sent) + shift, rank).to(device)
            want = torch.empty(sum(sent), device=device)
            thinwire.all_to_all_single(want, x[shift:].clone(), received, sent, **how)
            thinwire.all_to_all_single(x[: sum(sent)], x[shift:], received, sent, **how)
            found.append(torch.equal(x[: sum(sent)], want))
    return found


def test_nested_tensors_are_refused() -> None:
    with pytest.warns(UserWarning, match="prototype"):
        nested = torch.nested.nested_tensor([torch.ones(3), torch.ones(2)])
    with pytest.raises(CollectiveError, match="expected dense tensors, got a nested one"):
        check_tensors([nested], "all_reduce")


def test_fake_tensors_are_refused() -> None:
    with FakeTensorMode():
        fake = torch.empty(40)
    with pytest.raises(CollectiveError, match="expected plain tensors, got FakeTensor"):
        check_tensors([fake], "all_reduce")
    codec = thinwire.codec("int8")
    for x in (fake, fake[8:]):  # which has an address
        with pytest.raises(CodecError, match="FakeTensor without memory"), warnings.catch_warnings(action="ignore"):
            codec.encode(x, torch.empty(codec.wire_bytes(x.numel()), dtype=torch.uint8))


def test_the_single_names_are_the_same_functions() -> None:
    assert thinwire.all_gather_single is thinwire.all_gather_into_tensor
    assert thinwire.reduce_scatter_single is thinwire.reduce_scatter_tensor


@on_ranks(4)
def test_codecs_made_of_codecs_choose_by_the_whole_tensor(group: Group) -> None:
    spec = "bysize(small=none; large=int2; min_numel=100)"
    small, large = given(50, group.rank()), given(200, group.rank())  # shards of 50: small, had the shard decided
    for x in (small, large):
        thinwire.all_reduce(x, codec=spec, algorithm="two_phase")
    total = torch.zeros(50)
    for rank in range(4):
        total += given(50, rank)
    assert_same(small, total)
    assert not torch.equal(large, torch.stack([given(200, r) for r in range(4)]).sum(0))


# --- what is refused --------------------------------------------------------------------------------------------------
@each_device
@on_ranks(2)
def test_misuse_is_refused_by_name_and_leaves_the_group_usable(group: Group, device: Device) -> None:
    """Pairs of a misuse and how what is said begins. All ranks make the same mistakes."""
    world = group.size()
    x, y, *parts = (torch.ones(n, device=device) for n in (6, 6 * world, *[2] * world))
    odd, one = torch.ones(2 * world + 1), torch.tensor(1.0)
    mesh = init_device_mesh("cpu", (1, world))
    reduce, scatter = thinwire.all_reduce, thinwire.reduce_scatter_tensor
    gather = thinwire.all_gather_into_tensor
    coalesced, swap = thinwire.all_reduce_coalesced, thinwire.all_to_all_single
    cast = thinwire.broadcast
    by_codec = functools.partial(reduce, algorithm="two_phase")
    hierarchical = "'hierarchical' needs a DeviceMesh of two dimensions"
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: reduce(x, dist.ReduceOp.MAX), "op must be SUM, AVG or PREMUL_SUM"),
        (lambda: scatter(x, y, dist.ReduceOp.PRODUCT), "op must be SUM, AVG or PREMUL_SUM"),
        (lambda: reduce(x, "sum"), "op must be SUM, AVG or PREMUL_SUM"),
        (lambda: reduce(x, op_of(math.inf)), "PREMUL_SUM needs a finite factor"),
        (lambda: reduce(torch.eye(3).to_sparse()), "all_reduce: expected dense tensors"),
        (lambda: reduce([1.0]), "all_reduce: expected tensors, got list"),
        (lambda: coalesced([x, x.half()]), "all_reduce_coalesced: expected one dtype"),
        (lambda: gather(y.half(), x), "all_gather_into_tensor: expected one dtype"),
        (lambda: coalesced([]), "all_reduce_coalesced: expected at least one tensor"),
        (lambda: reduce(x, algorithm="ring"), "algorithm must be one of auto, two_phase, one_shot, hier"),
        (lambda: gather(y, x, algorithm="two_phase"), "algorithm must be one of auto, compressed, plain"),
        (lambda: by_codec(x, codec="int9"), "CodecError: unknown codec 'int9'"),
        (lambda: by_codec(x, codec=8), "CodecError: expected a codec"),
        (lambda: by_codec(x, codec=()), "CodecError: expected a codec"),
        (lambda: by_codec(x, codec=("int8", "int4", "int2")), "CodecError: expected a codec"),
        (lambda: by_codec(x, codec=("int8", "int4")), "a pair of codecs requires algorithm='hierarchical'"),
        (lambda: by_codec(x.double(), codec="int8"), "CodecError: codec int8 takes float32, bfloat16, float16, got"),
        (lambda: gather(y.long(), x.long(), codec="int8", algorithm="compressed"), "CodecError: codec int8 takes"),
        (lambda: reduce(x, algorithm="hierarchical"), hierarchical),
        (lambda: by_codec(x, group=mesh), hierarchical),
        (lambda: cast(x, 0, mesh), "expected a DeviceMesh of one dimension"),
        (lambda: reduce(x, group=3), "expected a ProcessGroup, a DeviceMesh or None, got 3"),
        (lambda: scatter(x, y[1:]), "reduce_scatter_tensor: input must have 2 times"),
        (lambda: gather(y[1:], x), "all_gather_into_tensor: output must have 2 times"),
        (lambda: thinwire.all_gather(parts[1:], parts[0]), "all_gather: tensor_list must hold one tensor"),
        (lambda: thinwire.all_gather(parts, x), "all_gather: tensor_list must hold one tensor"),
        (lambda: thinwire.all_to_all(parts, parts[1:]), "all_to_all: expected one tensor"),
        (lambda: swap(y, y + 1, [1] * world), "all_to_all_single: output_split_sizes must be 2 sizes"),
        (lambda: swap(y, y + 1, None, [-1, 6 * world + 1]), "all_to_all_single: input_split_sizes must be"),
        (lambda: swap(odd, odd + 1), "all_to_all_single: 5 rows of output do not divide"),
        (lambda: swap(one, one + 1), "all_to_all_single: output must have a dimension"),
        (lambda: cast(x), "broadcast: expected src or group_src"),
        (lambda: cast(x, 0, group_src=0), "broadcast: expected one rank"),
        (lambda: cast(x, group_src=world), "broadcast: the rank in the group must be 0..1"),
        (lambda: cast(x, world), ""),
        (lambda: by_codec(x, codec="lloyd4", step=-1), "step must be"),
        (lambda: by_codec(x, codec="lloyd4", step=0.5), "TypeError"),
        (lambda: reduce(torch.ones(3, dtype=torch.complex64).conj()), "all_reduce: a conjugated view"),
        (lambda: reduce(torch.ones(1).expand(6)), "all_reduce: elements of an expanded tensor share memory"),
        (lambda: gather(one.expand(6 * world), x), "all_gather_into_tensor: elements of an expanded"),
        (lambda: reduce(torch.ones(4, device="meta")), "all_reduce: expected plain tensors, got a meta tensor"),
        (lambda: reduce(x.short(), algorithm="plain"), "gloo takes float32"),
        (lambda: gather(y.short(), x.short(), algorithm="plain"), "gloo takes float32"),
        (lambda: swap(y.short(), y.short(), algorithm="plain"), "gloo takes float32"),
    ]
    for call, begins in calls:
        said = _refused(call)
        assert said.startswith(begins if "Error" in begins else f"CollectiveError: {begins}"), said
    z = torch.ones(30)
    thinwire.all_reduce(z, codec="none", algorithm="two_phase")
    assert z[0] == 2


def _refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        kinds = (CollectiveError, CodecError, ThinwireError, ValueError, TypeError, Exception)
        kind = next(kind for kind in kinds if isinstance(error, kind))
        return f"{kind.__name__}: {error}"
    return "accepted"


@on_ranks(2)
def test_a_rank_outside_the_group_is_told(group: Group) -> None:
    some = dist.new_group([0])
    if group.rank():
        with pytest.raises(CollectiveError, match="this rank is not a member"):
            thinwire.all_reduce(torch.ones(3), group=some)


def test_a_job_without_groups_is_told() -> None:
    with pytest.raises(CollectiveError, match="init_process_group"):
        thinwire.all_reduce(torch.ones(3))


# --- bytes ------------------------------------------------------------------------------------------------------------
def counted(group: Group, codec: str, numel: int) -> dict[str, tuple[int, int]]:
    """Bytes sent and received by every verb."""
    world, found, member = group.size(), {}, dist.new_group()
    x, part = torch.randn(numel), torch.randn(numel // world)
    how: Any = {"group": member, "codec": codec, "algorithm": "compressed"}
    for name, call in {
        "two_phase": lambda: thinwire.all_reduce(x, **how | {"algorithm": "two_phase"}),
        "one_shot": lambda: thinwire.all_reduce(x, **how | {"algorithm": "one_shot"}),
        "reduce_scatter": lambda: thinwire.reduce_scatter_tensor(part, x, **how),
        "all_gather": lambda: thinwire.all_gather_into_tensor(x, part, **how),
        "all_to_all": lambda: thinwire.all_to_all_single(x, x.clone(), **how),
        "broadcast": lambda: thinwire.broadcast(x, 0, **how),
    }.items():
        before = traffic(member)
        call()
        after = traffic(member)
        found[name] = (after.sent - before.sent, after.received - before.received)
    return found


@pytest.mark.parametrize(("world", "codec"), [(2, "lloyd2"), (3, "int8"), (4, "lloyd2")])
def test_bytes_are_those_of_the_formula(ranks: RankPool, world: int, codec: str) -> None:
    numel = 1 << 20
    numel -= numel % world
    wire = thinwire.codec(codec).wire_bytes(numel)
    shares = {"two_phase": 2 * (world - 1) / world, "one_shot": world - 1}
    shares |= dict.fromkeys(("reduce_scatter", "all_gather", "all_to_all"), (world - 1) / world)
    answers = ranks(world).run(counted, codec, numel)
    for found in answers:
        for name, share in shares.items():
            assert found[name] == pytest.approx((share * wire, share * wire), rel=0.02), name
    sent, received = zip(*(found["broadcast"] for found in answers), strict=True)
    assert sum(sent) == sum(received) == pytest.approx((world - 1) * wire, rel=0.02)
    assert max(sent + received) <= 1.02 * wire


# --- on a mesh, exactly -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(2, 2), (1, 4), (4, 1)])
@on_ranks(4)
def test_a_mesh_is_summed_by_torch_where_that_is_asked_for(group: Group, shape: tuple[int, int]) -> None:
    mesh = init_device_mesh("cpu", shape)
    for algorithm in ("plain", "auto"):
        for op, factor in ((SUM, 1.0), (AVG, 1 / group.size())):
            x = torch.arange(50.0) + group.rank()
            work = thinwire.all_reduce(x, op, mesh, async_op=op == AVG, codec="none", algorithm=algorithm)
            if work is not None:
                work.wait()
            total = sum(torch.arange(50.0) + rank for rank in range(group.size()))
            assert torch.allclose(x, total * factor, rtol=1e-6), (algorithm, op)
