"""thinwire.functional: values, gradients, codecs of both directions, torch.compile, and what is refused."""

import shutil
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import thinwire
from cases import on_ranks, seeded
from ranks import RankPool
from thinwire import functional as F  # noqa: N812
from thinwire.errors import CollectiveError

Group = dist.ProcessGroup
Verb = Callable[[Tensor], Tensor]
NOTHING = {"codec": "none"}
LLOYD = {"codec": "lloyd4", "algorithm": "compressed"}


def rows_to(rank: int, world: int) -> list[int]:
    """How many rows a rank sends to each: uneven, and none at all to some."""
    return [(2 * rank + 3 * other) % 4 for other in range(world)]


def splits(group: Group) -> tuple[list[int], list[int]]:
    """(rows from each rank, rows to each rank)."""
    rank, world = group.rank(), group.size()
    return [rows_to(other, world)[rank] for other in range(world)], rows_to(rank, world)


def shape_of(name: str, group: Group) -> tuple[int, ...]:
    world = group.size()
    if name == "all_to_all_single uneven":
        return (sum(rows_to(group.rank(), world)), 2)
    return {
        "reduce_scatter avg dim -1": (2, 1, world),
        "reduce_scatter": (2 * world, 2),
        "all_to_all_single": (2 * world, 2),
    }.get(name, (2, 1, 2))


# Dynamo of torch 2.11 makes no constants of codecs and ReduceOps: there a compiled function takes them as strings.
OLD = torch.__version__ < "2.12"
SPELLED: Callable[[thinwire.Codec], thinwire.Codec | str] = str if OLD else lambda codec: codec
AVG: Any = "avg" if OLD else dist.ReduceOp.AVG


def verbs(group: Group, **how: Any) -> dict[str, Verb]:
    """Every verb, by a name that says what is special."""
    out_rows, in_rows = splits(group)
    reduce = {"algorithm": "two_phase"} if how.get("algorithm") == "compressed" else {}
    return {
        "all_reduce": partial(F.all_reduce, **how | reduce),
        "all_reduce avg": partial(F.all_reduce, op="avg", **how | reduce),
        "all_gather": partial(F.all_gather, **how),
        "all_gather dim 1": partial(F.all_gather, dim=1, **how),
        "all_gather dim -1": partial(F.all_gather, dim=-1, **how),
        "reduce_scatter": partial(F.reduce_scatter, **how),
        "reduce_scatter avg dim -1": partial(F.reduce_scatter, op=AVG, dim=-1, **how),
        "all_to_all_single": partial(F.all_to_all_single, **how),
        "all_to_all_single uneven": partial(
            F.all_to_all_single, output_split_sizes=out_rows, input_split_sizes=in_rows, **how
        ),
    }


NAMES = [
    *("all_reduce", "all_reduce avg", "all_gather", "all_gather dim 1", "all_gather dim -1", "reduce_scatter"),
    *("reduce_scatter avg dim -1", "all_to_all_single", "all_to_all_single uneven"),
]


def random_input(name: str, group: Group, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape_of(name, group), generator=seeded(group.rank(), 7)).to(dtype)


def everyone(group: Group, x: Any) -> list[Any]:
    """What every rank brought, without thinwire."""
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, x, group=group)
    return found


# --- values and gradients against plain torch -------------------------------------------------------------------------
def expected(name: str, rank: int, inputs: list[Tensor]) -> Tensor:
    """What a verb gives on a rank, from every rank's input."""
    world = len(inputs)
    if name.startswith("all_reduce"):
        return sum(inputs[1:], inputs[0]) / (world if "avg" in name else 1)
    if name.startswith("all_gather"):
        return torch.cat(inputs, int(name.split()[-1]) if "dim" in name else 0)
    if name.startswith("reduce_scatter"):
        total = sum(inputs[1:], inputs[0]) / (world if "avg" in name else 1)
        return total.chunk(world, -1 if "dim" in name else 0)[rank]
    rows = [rows_to(other, world) if "uneven" in name else [2] * world for other in range(world)]
    return torch.cat([x.split(rows[other])[rank] for other, x in enumerate(inputs)])


def close(y: Tensor, expected: Tensor) -> bool:
    """Sums of integers are exact; a mean is multiplied by 1 / world, two roundings, where torch divides, one."""
    return y.shape == expected.shape and bool(((y - expected).abs() <= expected.abs() * 3 * 2.0**-53).all())


@on_ranks(1, 2, 3)
def test_values_are_those_of_torch_and_inputs_stay(group: Group) -> None:
    for name, verb in verbs(group, **NOTHING).items():
        x = torch.randint(-9, 10, shape_of(name, group), generator=seeded(group.rank())).double()
        before, y = x.clone(), verb(x)
        assert close(y, expected(name, group.rank(), everyone(group, x))), name
        assert y.is_contiguous(), name
        y.fill_(7)
        assert torch.equal(x, before), name


@on_ranks(1, 3, rare=[2])
def test_gradients_are_those_of_one_process_with_all_inputs(group: Group) -> None:
    """Of what all ranks give, by what this rank brings; slopes are integers, so that only means are rounded."""
    rank = group.rank()
    for name, verb in verbs(group, **NOTHING).items():
        x = random_input(name, group, torch.float64).requires_grad_()
        inputs = [other.requires_grad_() for other in everyone(group, x.detach())]
        outputs = [expected(name, other, inputs) for other in range(group.size())]
        y = verb(x)
        slope = torch.randint(-9, 10, y.shape, generator=seeded(rank, 3)).double()
        y.backward(slope)
        (wanted,) = torch.autograd.grad(outputs, inputs[rank], everyone(group, slope))
        assert x.grad is not None
        assert x.grad.shape == wanted.shape, name
        assert ((x.grad - wanted).abs() <= 9 * group.size() * 4 * 2.0**-53).all(), name


@on_ranks(2)
def test_a_gradient_has_a_gradient(group: Group) -> None:
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    (first,) = torch.autograd.grad(F.all_reduce(x**3, **NOTHING).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(second, torch.tensor([12.0, -24.0]))  # 2 ranks * 6x


# --- two codecs -------------------------------------------------------------------------------------------------------
def gradient(verb: Verb, x: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(output, gradient of the input, gradient that came in)."""
    x = x.detach().requires_grad_()
    y = verb(x)
    grad = torch.randn(y.shape, generator=seeded(seed)).to(y.dtype)
    y.backward(grad)
    assert x.grad is not None
    return y.detach(), x.grad, grad


@on_ranks(3, rare=[2])
def test_each_direction_has_its_own_codec(group: Group) -> None:
    """Forward and backward each with int4 and exact: which of the two changes, and to what."""
    exact, lossy = ({"codec": codec, "algorithm": "compressed"} for codec in ("none", "int4"))
    for name in NAMES:
        x, seed = random_input(name, group), group.rank() + 50
        found = {
            (forth, back): gradient(verbs(group, **lossy | {"codec": forth, "backward_codec": back})[name], x, seed)
            for forth in ("none", "int4")
            for back in ("none", "int4")
        }
        plain = gradient(verbs(group, **exact)[name], x, seed)
        alike = gradient(verbs(group, **lossy)[name], x, seed)
        for (forth, back), (y, grad, _) in found.items():
            like_y = (plain if forth == "none" else alike)[0]
            like_grad = (plain if back == "none" else alike)[1]
            assert torch.equal(y, like_y), f"{name}: {forth} forward, {back} backward"
            assert torch.equal(grad, like_grad), f"{name}: {forth} forward, {back} backward"
        assert not torch.equal(plain[0], alike[0]), name
        assert not torch.equal(plain[1], alike[1]), name


@on_ranks(3, rare=[2])
def test_both_directions_are_the_verbs_bytes_and_the_same_on_every_rank(group: Group) -> bytes:
    x, how = torch.randn(1000, generator=seeded(group.rank())), {"codec": "lloyd4", "algorithm": "two_phase", "step": 5}
    y, grad, incoming = gradient(partial(F.all_reduce, **how), x, group.rank())
    thinwire.collectives.all_reduce(x, **how)
    thinwire.collectives.all_reduce(incoming, **how)
    assert torch.equal(y, x)
    assert torch.equal(grad, incoming)
    return bytes(grad.numpy())


@on_ranks(1, 2)
def test_bfloat16_strides_and_no_gradient(group: Group) -> None:
    for name, verb in verbs(group, **LLOYD).items():
        x = random_input(name, group)
        assert not verb(x).requires_grad, name
        y, grad, _ = gradient(verb, x.bfloat16(), 1)
        assert y.dtype == grad.dtype == torch.bfloat16, name
        strided = x.mT.contiguous().mT
        assert torch.equal(verb(strided, step=5), verb(x, step=5)), name
        x.requires_grad_()
        verb(x).sum().backward()  # its gradient is an expanded scalar
        assert x.grad is not None, name
        assert x.grad.isfinite().all(), name


@on_ranks(2, gives=[3.0, 3.0, 3.0, 1.0, 1.0])
def test_groups_and_meshes(group: Group) -> list[float]:
    """Sums over the world named in every way, then over this rank alone."""
    mesh = init_device_mesh("cpu", (group.size(), 1), mesh_dim_names=("all", "self"))
    alone = [dist.new_group([rank]) for rank in range(group.size())][group.rank()]
    x = torch.tensor([1.0 + group.rank()])
    found = [F.all_reduce(x, group=g, **NOTHING).item() for g in (None, group, mesh["all"])]
    return found + [F.all_reduce(x, group=g, **NOTHING).item() - group.rank() for g in (alone, mesh["self"])]


@on_ranks(2, gives=[(0, 3), (0, 3), (0, 6), (0, 3), (0, 3)])
def test_empty_tensors(group: Group) -> list[tuple[int, ...]]:
    x = torch.zeros(0, 3)
    results = [F.all_reduce(x), F.all_gather(x), F.all_gather(x, dim=1), F.reduce_scatter(x)]
    results.append(F.all_to_all_single(x, [0] * group.size(), [0] * group.size()))
    return [tuple(y.shape) for y in results]


# --- torch.compile ----------------------------------------------------------------------------------------------------
def opcheck(group: Group, names: list[str], checks: list[str]) -> list[str]:
    failed = []
    named = verbs(group, codec="int8", backward_codec="bf16")
    for name in names:
        arguments, op = recorded(named[name], random_input(name, group).requires_grad_())
        with warnings.catch_warnings():
            # torch 2.15 reads .grad of its own intermediate results here, whatever the op.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            results = torch.library.opcheck(op, arguments, test_utils=checks, raise_exception=False)
        failed += [f"{name}: {check}: {result}" for check, result in results.items() if result != "SUCCESS"]
    return failed


def recorded(verb: Verb, x: Tensor) -> tuple[tuple[Any, ...], Any]:
    """The arguments with which a verb calls its op, and the op."""

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[tuple[Any, ...]] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "thinwire":
                self.calls.append((func, args))
            return func(*args, **kwargs or {})

    with Recorder() as recorder:
        verb(x.detach())
    op, arguments = recorder.calls[0]
    return (x, *arguments[1:]), op


OPS = ["all_reduce", "all_gather dim 1", "reduce_scatter avg dim -1", "all_to_all_single uneven"]  # one per verb


def test_opcheck(ranks: RankPool) -> None:
    """Of one rank alone only that no output is an input: its verbs take shortcuts, but are the same ops.

    Of tracing with shapes that vary, uneven splits: the tests below compare all that is traced.
    """
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    for world, names, some in ((1, OPS, checks[:1]), (2, OPS, checks[:3]), (2, OPS[3:], checks[3:])):
        assert ranks(world).run(opcheck, names, some) == [[]] * world


def compiled(verb: Verb, backend: str = "aot_eager") -> Verb:
    torch._dynamo.reset()
    compiled_verb: Verb = torch.compile(lambda x: verb(x * 2) + 1, fullgraph=True, backend=backend)
    return compiled_verb


def compare_compiled(group: Group, backend: str, names: list[str]) -> None:
    for name in names:
        how = {"codec": SPELLED(thinwire.Lloyd(4)), "backward_codec": "int8", "algorithm": "compressed", "step": 0}
        verb, x = verbs(group, **how)[name], random_input(name, group)
        eager = gradient(lambda x, verb=verb: verb(x * 2) + 1, x, 3)
        traced = gradient(compiled(verb, backend), x, 3)
        assert all(map(torch.equal, eager, traced)), name


@on_ranks(2)
def test_compiled_is_eager_byte_for_byte(group: Group) -> None:
    compare_compiled(group, "aot_eager", [*OPS, "all_to_all_single"])


@pytest.mark.thorough  # it compiles for ten seconds
@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@on_ranks(1)
def test_inductor_is_eager_byte_for_byte(group: Group) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # inductor's own imports
        compare_compiled(group, "inductor", ["all_reduce"])


@on_ranks(2)
def test_compiled_with_meshes_ops_and_codec_objects(group: Group) -> None:
    mesh = init_device_mesh("cpu", (group.size(),), mesh_dim_names=("all",))
    mixed = thinwire.BySize(thinwire.Cast("bf16"), thinwire.BlockInt(4), min_numel=2)
    block = thinwire.BlockInt(4, 64)
    for how in ({"group": mesh}, {"codec": SPELLED(mixed)}, {"op": AVG}, {"codec": SPELLED(block)}):
        x = torch.randn(9, generator=seeded(group.rank()))
        verb = partial(F.all_reduce, **how)
        assert torch.equal(compiled(verb)(x), verb(x * 2) + 1), how


@on_ranks(2)
def test_compiled_follows_a_changing_step_and_codec(group: Group) -> None:
    """A codec object that changes is seen; a step that changes compiles no more than three times (0, 1, any)."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    x, how = torch.randn(64, generator=seeded(group.rank())), {"algorithm": "two_phase"}
    by_step = torch.compile(
        lambda x, step: F.all_reduce(x, codec="lloyd1", step=step, **how), backend=backend, fullgraph=True
    )
    for step in range(6):
        assert torch.equal(by_step(x, step), F.all_reduce(x, codec="lloyd1", step=step, **how)), step
    assert len(graphs) <= 3
    by_codec = torch.compile(lambda x, codec: F.all_reduce(x, codec=codec, **how), backend=backend, fullgraph=True)
    for codec in (*map(SPELLED, (thinwire.BlockInt(4), thinwire.BlockInt(3), thinwire.BlockInt(4, 64))), "int2"):
        assert torch.equal(by_codec(x, codec), F.all_reduce(x, codec=codec, **how)), codec


@on_ranks(2, gives=True)
def test_compiled_with_splits_from_a_tensor(group: Group) -> bool:
    """MoE dispatch: how many rows go where is in a tensor, so no graph knows it."""
    torch._dynamo.reset()
    out_rows, in_rows = splits(group)
    x = torch.randn(sum(in_rows), 4, generator=seeded(group.rank())).requires_grad_()

    def dispatch(x: Tensor, rows: Tensor) -> Tensor:
        there, here = rows.tolist()
        return F.all_to_all_single(x, there, here, codec="int8", algorithm="compressed")

    rows = torch.tensor([out_rows, in_rows])
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        y = torch.compile(dispatch, fullgraph=True, backend="aot_eager")(x, rows)
    y.sum().backward()
    return torch.equal(y, dispatch(x, rows)) and x.grad is not None


# --- what is refused --------------------------------------------------------------------------------------------------
REFUSED: list[tuple[Callable[[Tensor], Tensor], str]] = [
    (lambda x: F.all_reduce(x, "max"), "op must be one of sum, avg"),
    (lambda x: F.reduce_scatter(x, dist.ReduceOp.MAX), "op must be one of sum, avg"),
    (lambda x: F.all_reduce(x, codec="int9"), "unknown codec 'int9'"),
    (lambda x: F.all_gather(x, backward_codec="nine"), "unknown codec 'nine'"),
    (lambda x: F.all_gather(x, dim=2), r"dim must be -2 .. 1 .*got 2"),
    (lambda x: F.all_gather(x.sum()), "a tensor of shape"),
    (lambda x: F.reduce_scatter(x), "dimension 0 of length 3 is not divisible by the world, 2 ranks"),
    (lambda x: F.all_to_all_single(x), "dimension 0 of length 3 is not divisible"),
    (lambda x: F.all_to_all_single(x, None, [1, 2]), "dimension 0 of length 3 is not divisible"),
    (lambda x: F.all_to_all_single(x.sum()), "got a scalar"),
    (lambda x: F.all_to_all_single(x, [3]), "output_split_sizes must have one entry .* got 1"),
    (lambda x: F.all_to_all_single(x, [1, 1], [1, 1]), "add up to 2 rows, the tensor has 3"),
    (lambda x: F.all_to_all_single(x, [1, 1], [4, -1]), "must not be negative"),
]


@pytest.mark.parametrize("trace", [False, True], ids=["eager", "traced"])
@on_ranks(2)
def test_misuse_is_refused_before_anything_is_sent(group: Group, trace: bool) -> None:
    mesh = init_device_mesh("cpu", (1, group.size()))
    with pytest.raises(CollectiveError, match="one dimension"):
        F.all_reduce(torch.ones(2), group=mesh)
    for call, message in REFUSED:
        torch._dynamo.reset()
        act = torch.compile(call, fullgraph=True, backend="eager") if trace else call
        with pytest.raises((CollectiveError, thinwire.CodecError, RuntimeError), match=message):  # the compiler quotes
            act(torch.ones(3, 2))
