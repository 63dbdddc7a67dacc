"""auto_quantize: every collective, called as torch's own, and each fault of torch's version repaired.

Inputs are small integers, which fp16 and bf16 hold exactly, and so are their sums: results are compared bit for bit.
"""

import inspect
import itertools
import math
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms._quantization import quantization as torchs

from cases import assert_same, on_ranks, over, seeded
from thinwire import CodecError, Lloyd, collectives
from thinwire.collectives import Work
from thinwire.collectives.auto_quantize import DQuantType, _then_divide, auto_quantize
from thinwire.errors import CollectiveError

Group = dist.ProcessGroup
BOTH = (DQuantType.FP16, DQuantType.BFP16)
N = 7  # no world but 1 divides it


def numbers(rank: int, *shape: int) -> Tensor:
    """What a rank brings."""
    return torch.randint(-9, 10, shape, generator=seeded(rank, *shape)).float()


def blank(*shape: int) -> Tensor:
    return torch.full(shape, math.nan)


def rows(source: int, target: int) -> int:
    """How much goes from rank to rank where that may differ; nothing between some."""
    return (source + 2 * target) % 4


def total(world: int, *shape: int) -> Tensor:
    return torch.stack([numbers(rank, *shape) for rank in range(world)]).sum(0)


# Arguments, outputs among them, and what these must become. Lists are copies: torch's writes new tensors into them.
Case = tuple[dict[str, Any], list[Tensor], list[Tensor]]


def cases(rank: int, world: int) -> dict[str, Case]:
    ranks, last = range(world), world - 1
    each = [numbers(other, N) for other in ranks]
    came = [numbers(other, rows(other, rank), 3) for other in ranks]
    sent = [numbers(rank, rows(rank, other), 3) for other in ranks]
    parts, gathered, rooted = (
        [blank(*part.shape) for part in came],
        [blank(N) for _ in ranks],
        [blank(N) for _ in ranks],
    )
    x, y, z, *pair = numbers(rank, N), numbers(rank, N), numbers(rank, N), numbers(rank, N), numbers(rank, 3, 5)
    whole, single = blank(world * N), blank(sum(map(len, came)), 3)
    part, other, scattered = blank(N), blank(N), blank(N)
    splits = {"output_split_sizes": [*map(len, came)], "input_split_sizes": [*map(len, sent)]}
    at_last = rank == last
    found: dict[str, Case] = {
        "all_gather": ({"tensor_list": [*gathered], "tensor": each[rank]}, gathered, each),
        "all_gather_into_tensor": ({"output_tensor": whole, "input_tensor": each[rank]}, [whole], [torch.cat(each)]),
        "all_reduce": ({"tensor": x, "op": dist.ReduceOp.SUM}, [x], [total(world, N)]),
        "all_reduce_coalesced": ({"tensors": [*pair]}, pair, [total(world, N), total(world, 3, 5)]),
        "all_to_all": ({"output_tensor_list": [*parts], "input_tensor_list": sent}, parts, came),
        "all_to_all_single": ({"output": single, "input": torch.cat(sent), **splits}, [single], [torch.cat(came)]),
        "broadcast": ({"tensor": y, "src": last}, [y], [each[last]]),
        "gather": (
            {"tensor": each[rank], "gather_list": [*rooted] if at_last else None, "dst": last},
            *((rooted, each) if at_last else ([], [])),
        ),
        "reduce": ({"tensor": z, "dst": last}, *(([z], [total(world, N)]) if at_last else ([], []))),
        "reduce_scatter": (
            {"output": part, "input_list": list(numbers(rank, world, N))},
            *([part], [total(world, world, N)[rank]]),
        ),
        "reduce_scatter_tensor": (
            {"output": other, "input": numbers(rank, world * N)},
            *([other], [total(world, world * N).chunk(world)[rank]]),
        ),
        "scatter": (
            {"tensor": scattered, "scatter_list": list(numbers(rank, world, N)) if rank == 0 else None},
            *([scattered], [numbers(0, world, N)[rank]]),
        ),
    }
    newer = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}
    return found | {name: found[older] for name, older in newer.items()}


OLDER = {"output_split_sizes": "out_splits", "input_split_sizes": "in_splits"}
NAMES = [name for name in cases(0, 1) if hasattr(dist, name)]  # torch 2.13 is the first with *_single


def call(wrapped: Callable[..., Any], arguments: dict[str, Any], group: Group, how: str) -> Any:
    if how == "keywords":
        return wrapped(**arguments, group=group, async_op=False)
    bound = inspect.signature(wrapped).bind(**arguments, group=group, async_op=how.startswith("async"))
    bound.apply_defaults()
    return wrapped(*bound.args)  # every parameter that has a position


def finish(work: Any, how: str) -> None:
    """Wait for a Work in one of several ways; the result must not depend on which, nor on how often."""
    if how == "async future":
        work.get_future().wait()
    elif how == "async poll":
        while not work.is_completed():
            time.sleep(0.001)
    else:
        assert work.wait()
        assert work.wait()
        work.get_future().wait()
        assert work.is_completed()


@pytest.mark.parametrize(
    ("world", "how", "quant_loss"),
    [
        *((1, "keywords", None), (2, "positions", None), (3, "keywords", None)),
        *((2, "async wait", 4.0), (3, "async future", None), (2, "async poll", 4.0), (1, "async wait", 4.0)),
        (2, "keywords", 4.0),
    ],
)
@on_ranks(gives=[])
def test_every_collective_in_both_types_and_every_way_of_calling(
    group: Group, how: str, quant_loss: float | None
) -> list[str]:
    """torch's has three, bfp16 in two dimensions only, refuses async_op, and forgets quant_loss of lists and bfp16."""
    wrong = []
    for name, qtype, module in itertools.product(NAMES, BOTH, (dist, collectives)):  # torch's functions, and our verbs
        if callable(getattr(module, name, None)):
            arguments, outputs, expected = cases(group.rank(), group.size())[name]
            if how == "keywords":  # torch's refuses tuples, and the older names of splits
                arguments = {OLDER.get(k, k): tuple(x) if isinstance(x, list) else x for k, x in arguments.items()}
            wrapped = auto_quantize(getattr(module, name), qtype, quant_loss)
            work = call(wrapped, arguments, group, how)
            if how.startswith("async"):
                finish(work, how)
            elif work is not None:
                wrong.append(f"{name} returned {work}")
            expected = [tensor / (quant_loss or 1) for tensor in expected]
            if not all(map(torch.equal, outputs, expected)):
                wrong.append(f"{module.__name__}.{name} {qtype}: {outputs} instead of {expected}")
    return wrong


@on_ranks(3)
def test_a_positional_group_is_used_where_torchs_ignores_it(group: Group) -> None:
    """Ranks 0 and 1 talk in a group of their own, passed by position."""
    pair = dist.new_group([0, 1])
    if group.rank() < 2:
        outputs = [blank(1), blank(1)]
        auto_quantize(dist.all_gather, DQuantType.FP16)(outputs, torch.tensor([5.0 + group.rank()]), pair)
        assert [output.item() for output in outputs] == [5.0, 6.0]


@on_ranks(2)
def test_any_shape_where_torchs_bfp16_takes_two_dimensions(group: Group) -> None:
    for shape, qtype in itertools.product([(), (0,), (5,), (2, 3), (2, 3, 4), (1, 1, 1, 129)], BOTH):
        outputs = [blank(*shape) for _ in range(group.size())]
        auto_quantize(dist.all_gather, qtype)(outputs, numbers(group.rank(), *shape))
        assert all(torch.equal(output, numbers(rank, *shape)) for rank, output in enumerate(outputs)), shape


@on_ranks(2)
def test_numbers_arrive_as_a_cast_leaves_them_where_torchs_fp16_clamps_infinities(group: Group) -> None:
    """Infinities and NaN stay (torch's bf16 makes numbers of some); beyond 65504 float16 becomes infinite.

    The codec fp16 overflows nowhere: it has scales, which a cast has not.
    """
    x = SPECIAL.repeat(17)  # some 300, no multiple of a block
    large = torch.tensor([2.0**20, -(2.0**18), 2.0**10])
    fp16, bfp16 = BOTH
    for qtype, sent, want in ((fp16, x, x.half()), (bfp16, x, x.bfloat16()), ("fp16", large, large)):
        outputs = [blank(*sent.shape) for _ in range(group.size())]
        auto_quantize(dist.all_gather, qtype)(outputs, sent)
        assert_same(outputs[1 - group.rank()], want.float(), str(qtype))


NANS = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7FC00000, -0x7FFFFF, -1], dtype=torch.int32).view(torch.float32)
SIZES = (math.inf, -math.inf, 65504.0, 65519.0, 65520.0, -7e4, 1e38, 6e-8, -1e-9, 0.0, 1.0, -2.5, math.nan)
SPECIAL = torch.cat((torch.tensor(SIZES), NANS))


@on_ranks(4)
def test_sums_with_infinities_are_infinite_and_leave_the_others_alone(group: Group) -> None:
    """The sum of rank 0's numbers and the others' ones."""
    x = torch.arange(-150.0, 151.0)
    x[[0, 140]] = math.inf
    x[[7, 300]] = -math.inf
    y = x.clone() if group.rank() == 0 else torch.ones_like(x)
    auto_quantize(dist.all_reduce, DQuantType.FP16)(y)
    assert_same(y, x + 3)


@over("name", NAMES)
def test_the_signature_is_the_wrapped_functions_own(name: str) -> None:
    for func in filter(callable, (getattr(module, name, None) for module in (dist, collectives))):
        wrapped = auto_quantize(func, "int8")
        assert inspect.signature(wrapped) == inspect.signature(func)
        assert (wrapped.__name__, wrapped.__doc__) == (func.__name__, func.__doc__)
        assert name.split("_")[0] in repr(wrapped)
        assert inspect.signature(pickle.loads(pickle.dumps(wrapped))) == inspect.signature(func)


def test_misuse_is_refused() -> None:
    for qtype in (*BOTH, "fp16", "bfp16", "bf16", "int4:block=64", Lloyd(2)):
        auto_quantize(dist.all_reduce, qtype)
    for qtype in ("fp17", torch.float16, None, torchs.DQuantType.FP16):
        with pytest.raises(CodecError, match=r"qtype must be DQuantType\.FP16"):
            auto_quantize(dist.all_gather, qtype)  # type: ignore[arg-type]
    for name in ("send", "recv", "isend", "irecv", "barrier", "all_gather_object", "new_group"):
        with pytest.raises(CollectiveError, match=rf"all_to_all_single.*reduce_scatter_tensor.*got '{name}'"):
            auto_quantize(getattr(dist, name), DQuantType.FP16)
    for quant_loss in (0, 0.0, math.nan, math.inf):
        with pytest.raises(CollectiveError, match="quant_loss"):
            auto_quantize(dist.all_gather, DQuantType.FP16, quant_loss)
    functions = (dist.all_to_all_single, dist.all_gather, collectives.all_reduce)
    x, (single, gather, own) = blank(2), (auto_quantize(function, "fp16") for function in functions)
    calls: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: single(x, x, out_splits=[2], output_split_sizes=[2]), TypeError, "under both names"),
        (lambda: single(x, x, [2], out_splits=[2]), TypeError, "multiple values"),
        (lambda: gather([x], x, out_splits=[2]), TypeError, "out_splits"),
        (lambda: own(x, codec="int8"), TypeError, "codec is given twice"),
        (lambda: own(x, algorithm="plain"), CollectiveError, "plain"),
    ]
    for call, error, said in calls:
        with pytest.raises(error, match=said):
            call()
    assert [str(qtype) for qtype in BOTH] == ["fp16", "bfp16"]
    assert [DQuantType("fp16"), DQuantType("bfp16")] == list(BOTH)
    with pytest.raises(TypeError):
        str(torchs.DQuantType.FP16)


@on_ranks(2)
def test_misuse_of_the_rewritten_ones_is_refused(group: Group) -> None:
    misuse: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
        ("gather", (blank(1),), {"dst": 0, "group_dst": 0}, "dst: expected one rank"),
        ("reduce", (blank(1),), {"group_dst": 2}, "must be 0..1, got 2"),
        ("scatter", (blank(1),), {"src": -1}, "must be 0..1, got -1"),
        ("gather", (blank(1), [blank(1)]), {"dst": group.rank()}, "gather_list: expected 2 tensors on this rank, got"),
        ("scatter", (blank(1),), {"src": group.rank()}, "scatter_list: expected 2 tensors on this rank, got none"),
        ("reduce_scatter", (blank(2), [blank(2), blank(3)]), {}, "expected 2 elements"),
    ]
    for name, args, keywords, said in misuse:
        with pytest.raises(CollectiveError, match=said):
            auto_quantize(getattr(dist, name), "fp16")(*args, **keywords)


@on_ranks(3, gives=True)
def test_reduce_changes_the_roots_tensor_alone(group: Group) -> bool:
    x = numbers(group.rank(), N)
    auto_quantize(dist.reduce, DQuantType.FP16, 2.0)(x, 1)
    return torch.equal(x, numbers(group.rank(), N)) if group.rank() != 1 else torch.equal(x, total(3, N) / 2)


def test_a_failure_reaches_whoever_waits_for_the_divided_values() -> None:
    work, x = Work([torch.ones(2)]), torch.ones(2)
    divided = _then_divide(work, [x], 2.0)
    assert not divided.is_completed()
    work.failed(CollectiveError("the other rank is gone"))
    with pytest.raises(CollectiveError, match="the other rank is gone"):
        divided.wait()
    assert torch.equal(x, torch.ones(2))
