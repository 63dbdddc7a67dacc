"""Differentiable collectives: they give a new tensor, and their gradient travels through a codec of its own.

    y = thinwire.functional.all_reduce(x, codec="int4", backward_codec="bf16")

Each is a custom op of torch (thinwire::all_reduce and so on) with a fake and a gradient, so that
torch.compile(fullgraph=True) traces it in both directions. An op's schema holds plain values: a group travels as its
name, a codec as its string, and `step` is an int that becomes symbolic once it changes from call to call, or None.

| forward                | backward                                             |
|------------------------|------------------------------------------------------|
| all_reduce, sum or avg | all_reduce of the gradients with the same op         |
| all_gather             | reduce_scatter, sum                                  |
| reduce_scatter         | all_gather; divided by the world where op is avg     |
| all_to_all_single      | all_to_all_single with the two lists of splits swapped |

[Note: Backward codec] A gradient is sent with `backward_codec`, and the gradient of that again with `codec`.

To add one: an op whose arguments end in `group, codec, backward_codec, algorithm, step`, its fake (same checks, same
shape), its backward in terms of the other ops, and a public function that turns objects into strings.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.library import custom_op

from thinwire import collectives
from thinwire.codecs import Codec
from thinwire.collectives import transport
from thinwire.collectives.checks import codec_named
from thinwire.collectives.plan import SumAlgorithm, VerbAlgorithm
from thinwire.errors import CollectiveError

__all__ = ["all_gather", "all_reduce", "all_to_all_single", "reduce_scatter"]

_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}


def all_reduce(
    x: Tensor,
    op: str | dist.ReduceOp = "sum",
    group: transport.Group = None,
    *,
    codec: str | Codec = "int8",
    backward_codec: str | Codec | None = None,
    algorithm: SumAlgorithm = "auto",
    step: int | None = None,
) -> Tensor:
    """The sum ("sum") or mean ("avg") of every rank's x, the same bits on every rank.

    `backward_codec` sends the gradient; None takes `codec`. `step` varies rotation and dither from call to call; None
    counts the calls of the group. Pass it under activation checkpointing, where a call is made again.
    """
    forth = _spell(codec)
    back = forth if backward_codec is None else _spell(backward_codec)
    out: Tensor = _all_reduce(x, _op_name(op), _group_name(group), forth, back, algorithm, step)
    return out


def all_gather(
    x: Tensor,
    group: transport.Group = None,
    *,
    dim: int = 0,
    codec: str | Codec = "int8",
    backward_codec: str | Codec | None = None,
    algorithm: VerbAlgorithm = "auto",
    step: int | None = None,
) -> Tensor:
    """The x of all ranks, in rank order along `dim`. All ranks pass the same shape."""
    forth = _spell(codec)
    back = forth if backward_codec is None else _spell(backward_codec)
    out: Tensor = _all_gather(x, dim, _group_name(group), forth, back, algorithm, step)
    return out


def reduce_scatter(
    x: Tensor,
    op: str | dist.ReduceOp = "sum",
    group: transport.Group = None,
    *,
    dim: int = 0,
    codec: str | Codec = "int8",
    backward_codec: str | Codec | None = None,
    algorithm: VerbAlgorithm = "auto",
    step: int | None = None,
) -> Tensor:
    """This rank's part of the sum or mean of all ranks' x, cut into equal parts along `dim`."""
    forth = _spell(codec)
    back = forth if backward_codec is None else _spell(backward_codec)
    out: Tensor = _reduce_scatter(x, _op_name(op), dim, _group_name(group), forth, back, algorithm, step)
    return out


def all_to_all_single(
    x: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: transport.Group = None,
    *,
    codec: str | Codec = "int8",
    backward_codec: str | Codec | None = None,
    algorithm: VerbAlgorithm = "auto",
    step: int | None = None,
) -> Tensor:
    """Send rows of x to each rank, and return the rows that each rank sent here, in rank order.

    The lists say how many rows come from (`output_split_sizes`) and go to (`input_split_sizes`) each rank; zeros are
    fine, and None is equal parts.
    """
    forth = _spell(codec)
    back = forth if backward_codec is None else _spell(backward_codec)
    out_rows = None if output_split_sizes is None else list(output_split_sizes)
    in_rows = None if input_split_sizes is None else list(input_split_sizes)
    out: Tensor = _all_to_all_single(x, out_rows, in_rows, _group_name(group), forth, back, algorithm, step)
    return out


# Objects to strings, and back inside the ops. torch.compile traces the way there.


def _spell(codec: str | Codec) -> str:
    return codec if isinstance(codec, str) else _text(codec)


def _text(thing: object) -> str:
    return str(thing)


# What torch.compiler.assume_constant_result sets; that function would import the compiler. Dynamo then calls _text
# while it traces, and guards on a codec's fields, rather than tracing string formatting it does not know.
_text._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _op_name(op: object) -> str:
    if isinstance(op, str):
        return op
    for name, known in _OPS.items():
        if known == op:
            return name
    return _text(op)


def _group_name(group: transport.Group) -> str:
    name: str = transport.resolve(group).group_name
    return name


def _group(name: str) -> dist.ProcessGroup:
    """The group of that name, by a private function of torch that its own functional collectives go by too."""
    return distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined,arg-type]


# Checks: in the real op before anything is sent, in the fake one while a graph is traced.


def _check(op: str, codec: str, backward_codec: str) -> None:
    if op not in _OPS:
        raise CollectiveError(f"op must be one of {', '.join(_OPS)} (or ReduceOp.SUM, ReduceOp.AVG), got {op!r}")
    codec_named(codec)
    codec_named(backward_codec)


def _check_dim(x: Tensor, dim: int) -> int:
    """`dim` counted from the front."""
    if not -x.dim() <= dim < x.dim():
        shape = tuple(x.shape)
        raise CollectiveError(f"dim must be {-x.dim()} .. {x.dim() - 1} for a tensor of shape {shape}, got {dim}")
    return dim % x.dim()


def _check_divides(length: int, dim: int, world: int) -> int:
    """The length of one rank's part."""
    if _known(length % world != 0):
        raise CollectiveError(f"dimension {dim} of length {length} is not divisible by the world, {world} ranks")
    return length // world


def _check_rows(name: str, splits: Sequence[int] | None, world: int) -> None:
    if splits is not None and len(splits) != world:
        raise CollectiveError(f"{name} must have one entry for each of {world} ranks, got {len(splits)}")


def _rows(x: Tensor, out_rows: Sequence[int] | None, in_rows: Sequence[int] | None, world: int) -> int:
    """How many rows all_to_all_single gives. Numbers not known yet while tracing are judged when the op runs."""
    if x.dim() == 0:
        raise CollectiveError("all_to_all_single exchanges rows: expected one dimension or more, got a scalar")
    _check_rows("output_split_sizes", out_rows, world)
    _check_rows("input_split_sizes", in_rows, world)
    if in_rows is None or out_rows is None:
        _check_divides(x.shape[0], 0, world)
    if in_rows is not None and _known(sum(in_rows) != x.shape[0]):
        raise CollectiveError(f"input_split_sizes add up to {sum(in_rows)} rows, the tensor has {x.shape[0]}")
    if any(_known(rows < 0) for rows in (*(out_rows or ()), *(in_rows or ()))):
        raise CollectiveError(f"split sizes must not be negative, got {out_rows} and {in_rows}")
    return x.shape[0] if out_rows is None else sum(out_rows)


def _known(truth: bool | torch.SymBool) -> bool:
    """Whether it is certainly true."""
    if isinstance(truth, bool):
        return truth
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # loaded whenever numbers are symbolic

    return statically_known_true(truth)


def _settings(codec: str, algorithm: str, step: int | None) -> dict[str, Any]:
    """What the ops pass on to the verbs."""
    return {"codec": codec_named(codec), "algorithm": algorithm, "step": step}


# The ops. Their settings, all that follows the tensor, are kept for the backward.


@custom_op("thinwire::all_reduce", mutates_args=())
def _all_reduce(
    x: Tensor, op: str, group: str, codec: str, backward_codec: str, algorithm: str, step: int | None
) -> Tensor:
    _check(op, codec, backward_codec)
    out = x.clone(memory_format=torch.contiguous_format)
    settings = _settings(codec, algorithm, step)
    collectives.all_reduce(out, _OPS[op], _group(group), **settings)
    return out


@_all_reduce.register_fake
def _(x: Tensor, op: str, group: str, codec: str, backward_codec: str, algorithm: str, step: int | None) -> Tensor:
    _check(op, codec, backward_codec)
    return x.new_empty(x.shape)


def _all_reduce_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    op, group, codec, backward_codec, algorithm, step = ctx.settings
    return _only(ctx, _all_reduce(grad, op, group, backward_codec, codec, algorithm, step))


@custom_op("thinwire::all_gather", mutates_args=())
def _all_gather(
    x: Tensor, dim: int, group: str, codec: str, backward_codec: str, algorithm: str, step: int | None
) -> Tensor:
    _check("sum", codec, backward_codec)
    dim = _check_dim(x, dim)
    ranks = _group(group)
    out = x.new_empty((ranks.size() * x.shape[0], *x.shape[1:]))
    collectives.all_gather_into_tensor(out, x.contiguous(), ranks, **_settings(codec, algorithm, step))
    return out if dim == 0 else torch.cat(out.view(ranks.size(), *x.shape).unbind(), dim).contiguous()


@_all_gather.register_fake
def _(x: Tensor, dim: int, group: str, codec: str, backward_codec: str, algorithm: str, step: int | None) -> Tensor:
    _check("sum", codec, backward_codec)
    shape = list(x.shape)
    shape[_check_dim(x, dim)] *= _group(group).size()
    return x.new_empty(shape)


def _all_gather_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    dim, group, codec, backward_codec, algorithm, step = ctx.settings
    return _only(ctx, _reduce_scatter(grad, "sum", dim, group, backward_codec, codec, algorithm, step))


@custom_op("thinwire::reduce_scatter", mutates_args=())
def _reduce_scatter(
    x: Tensor, op: str, dim: int, group: str, codec: str, backward_codec: str, algorithm: str, step: int | None
) -> Tensor:
    _check(op, codec, backward_codec)
    dim = _check_dim(x, dim)
    ranks = _group(group)
    out = x.new_empty(_part(x, dim, ranks))
    parts = x.contiguous() if dim == 0 or x.numel() == 0 else torch.cat(x.split(out.shape[dim], dim))
    collectives.reduce_scatter_tensor(out, parts, _OPS[op], ranks, **_settings(codec, algorithm, step))
    return out


@_reduce_scatter.register_fake
def _(
    x: Tensor, op: str, dim: int, group: str, codec: str, backward_codec: str, algorithm: str, step: int | None
) -> Tensor:
    _check(op, codec, backward_codec)
    return x.new_empty(_part(x, _check_dim(x, dim), _group(group)))


def _part(x: Tensor, dim: int, group: dist.ProcessGroup) -> list[int]:
    """The shape of one rank's part of x."""
    shape = list(x.shape)
    shape[dim] = _check_divides(shape[dim], dim, group.size())
    return shape


def _reduce_scatter_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    op, dim, group, codec, backward_codec, algorithm, step = ctx.settings
    whole = _all_gather(grad, dim, group, backward_codec, codec, algorithm, step)
    return _only(ctx, whole / _group(group).size() if op == "avg" else whole)


@custom_op("thinwire::all_to_all_single", mutates_args=())
def _all_to_all_single(
    x: Tensor,
    out_rows: Sequence[int] | None,
    in_rows: Sequence[int] | None,
    group: str,
    codec: str,
    backward_codec: str,
    algorithm: str,
    step: int | None,
) -> Tensor:
    _check("sum", codec, backward_codec)
    ranks = _group(group)
    out = x.new_empty((_rows(x, out_rows, in_rows, ranks.size()), *x.shape[1:]))
    settings = _settings(codec, algorithm, step)
    collectives.all_to_all_single(out, x.contiguous(), out_rows, in_rows, ranks, **settings)
    return out


@_all_to_all_single.register_fake
def _(
    x: Tensor,
    out_rows: Sequence[int] | None,
    in_rows: Sequence[int] | None,
    group: str,
    codec: str,
    backward_codec: str,
    algorithm: str,
    step: int | None,
) -> Tensor:
    _check("sum", codec, backward_codec)
    return x.new_empty((_rows(x, out_rows, in_rows, _group(group).size()), *x.shape[1:]))


def _all_to_all_single_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    out_rows, in_rows, group, codec, backward_codec, algorithm, step = ctx.settings
    return _only(ctx, _all_to_all_single(grad, in_rows, out_rows, group, backward_codec, codec, algorithm, step))


def _keep_settings(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.settings = inputs[1:]


def _only(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The tensor's gradient; the settings have none."""
    return (grad, *[None] * len(ctx.settings))


_all_reduce.register_autograd(_all_reduce_backward, setup_context=_keep_settings)
_all_gather.register_autograd(_all_gather_backward, setup_context=_keep_settings)
_reduce_scatter.register_autograd(_reduce_scatter_backward, setup_context=_keep_settings)
_all_to_all_single.register_autograd(_all_to_all_single_backward, setup_context=_keep_settings)
