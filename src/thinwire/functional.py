"""Differentiable collectives: they return a new tensor, and send its gradient through a codec of its own.

    y = thinwire.functional.all_reduce(x, codec="int4", backward_codec="bf16")

Each is a custom op of torch (thinwire::all_reduce and so on) with a fake implementation and a gradient, so that
torch.compile(fullgraph=True) traces it in both directions. An op's schema holds plain values: a group is passed by its
name and a codec by its string; `step` is None, or an int that becomes symbolic once it changes from call to call.

| forward                | backward                                             |
|------------------------|------------------------------------------------------|
| all_reduce, sum or avg | all_reduce of the gradients with the same op         |
| all_gather             | reduce_scatter, sum                                  |
| reduce_scatter         | all_gather; divided by the world size if op is avg   |
| all_to_all_single      | all_to_all_single with the two lists of splits swapped |

[Note: Backward codec] The gradient is sent with `backward_codec`, and the gradient of the gradient with `codec`.

To add one: an `_op` whose last arguments are those of `_Way`, from the shape of its result, a function that fills it,
and its backward in terms of the other ops; and a public function that turns objects into strings.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.library import custom_op

from thinwire import collectives
from thinwire.codecs import Codec
from thinwire.collectives import groups
from thinwire.collectives.checks import codec_named
from thinwire.collectives.plan import SumAlgorithm, VerbAlgorithm
from thinwire.errors import CollectiveError

__all__ = ["all_gather", "all_reduce", "all_to_all_single", "reduce_scatter"]

_Op = Callable[..., Tensor]
_Splits = Sequence[int] | None
OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}


def all_reduce(
    x: Tensor,
    op: str | dist.ReduceOp = "sum",
    group: groups.Group = None,
    *,
    codec: str | Codec = "int8",
    backward_codec: str | Codec | None = None,
    algorithm: SumAlgorithm = "auto",
    step: int | None = None,
) -> Tensor:
    """The sum ("sum") or mean ("avg") of every rank's x, the same bits on every rank.

    `backward_codec` (default: `codec`) sends the gradient. `step` varies rotation and dither from call to call; its
    default is the number of calls on this group. Pass it under activation checkpointing, which repeats calls.
    """
    return _all_reduce(x, _op_name(op), *_spelled(group, codec, backward_codec), algorithm, step)


def all_gather(
    x: Tensor,
    group: groups.Group = None,
    *,
    dim: int = 0,
    codec: str | Codec = "int8",
    backward_codec: str | Codec | None = None,
    algorithm: VerbAlgorithm = "auto",
    step: int | None = None,
) -> Tensor:
    """The x of all ranks, concatenated in rank order along `dim`. All ranks pass the same shape."""
    return _all_gather(x, dim, *_spelled(group, codec, backward_codec), algorithm, step)


def reduce_scatter(
    x: Tensor,
    op: str | dist.ReduceOp = "sum",
    group: groups.Group = None,
    *,
    dim: int = 0,
    codec: str | Codec = "int8",
    backward_codec: str | Codec | None = None,
    algorithm: VerbAlgorithm = "auto",
    step: int | None = None,
) -> Tensor:
    """This rank's part of the sum or mean of all ranks' x, cut into equal parts along `dim`."""
    return _reduce_scatter(x, _op_name(op), dim, *_spelled(group, codec, backward_codec), algorithm, step)


def all_to_all_single(
    x: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: groups.Group = None,
    *,
    codec: str | Codec = "int8",
    backward_codec: str | Codec | None = None,
    algorithm: VerbAlgorithm = "auto",
    step: int | None = None,
) -> Tensor:
    """Send rows of x to each rank, and return the rows that each rank sent here, in rank order.

    The lists say how many rows come from (`output_split_sizes`) and go to (`input_split_sizes`) each rank; 0 is
    allowed, and None means equal parts.
    """
    out_rows = None if output_split_sizes is None else list(output_split_sizes)
    in_rows = None if input_split_sizes is None else list(input_split_sizes)
    return _all_to_all_single(x, out_rows, in_rows, *_spelled(group, codec, backward_codec), algorithm, step)


# Here objects become strings, which torch.compile traces; the ops turn them back into objects.


def _spelled(group: groups.Group, codec: str | Codec, backward_codec: str | Codec | None) -> tuple[str, str, str]:
    name: str = groups.resolve(group).group_name
    forth = codec if isinstance(codec, str) else _text(codec)
    if backward_codec is None:
        return name, forth, forth
    return name, forth, backward_codec if isinstance(backward_codec, str) else _text(backward_codec)


def _text(thing: object) -> str:
    return str(thing)


# torch.compiler.assume_constant_result sets this too, but imports the compiler. Dynamo then calls _text while it
# traces, and guards on a codec's fields, instead of tracing string formatting, which it does not support.
_text._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _op_name(op: object) -> str:
    if isinstance(op, str):
        return op
    for name, known in OPS.items():
        if known == op:
            return name
    return _text(op)


class _Way(NamedTuple):
    """How an op's numbers travel: the last arguments of every op."""

    group: str
    codec: str
    backward_codec: str
    algorithm: str
    step: int | None

    @property
    def ranks(self) -> dist.ProcessGroup:
        """The group of that name, by the private function that torch's own functional collectives use."""
        return distributed_c10d._resolve_process_group(self.group)  # type: ignore[attr-defined,arg-type]

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments for the collectives."""
        return {"codec": codec_named(self.codec), "algorithm": self.algorithm, "step": self.step}

    @property
    def back(self) -> "_Way":
        """How the gradient travels. [Note: Backward codec]"""
        return self._replace(codec=self.backward_codec, backward_codec=self.codec)


# Checks: in the real op before anything is sent, in the fake one while a graph is traced.


def _check(way: _Way, op: str = "sum") -> None:
    if op not in OPS:
        raise CollectiveError(f"op must be one of {', '.join(OPS)} (or ReduceOp.SUM, ReduceOp.AVG), got {op!r}")
    codec_named(way.codec)
    codec_named(way.backward_codec)


def _check_dim(x: Tensor, dim: int) -> int:
    """`dim` without its negative form."""
    if not -x.dim() <= dim < x.dim():
        shape = tuple(x.shape)
        raise CollectiveError(f"dim must be {-x.dim()} .. {x.dim() - 1} for a tensor of shape {shape}, got {dim}")
    return dim % x.dim()


def _check_divides(length: int, dim: int, world: int) -> int:
    """The length of one rank's part."""
    if _known(length % world != 0):
        raise CollectiveError(f"dimension {dim} of length {length} is not divisible by the world, {world} ranks")
    return length // world


def _rows(x: Tensor, out_rows: Sequence[int] | None, in_rows: Sequence[int] | None, world: int) -> int:
    """How many rows all_to_all_single returns. Sizes that are unknown while tracing are checked when the op runs."""
    if x.dim() == 0:
        raise CollectiveError("all_to_all_single exchanges rows: expected one dimension or more, got a scalar")
    for name, splits in (("output_split_sizes", out_rows), ("input_split_sizes", in_rows)):
        if splits is not None and len(splits) != world:
            raise CollectiveError(f"{name} must have one entry for each of {world} ranks, got {len(splits)}")
    if in_rows is None or out_rows is None:
        _check_divides(x.shape[0], 0, world)
    if in_rows is not None and _known(sum(in_rows) != x.shape[0]):
        raise CollectiveError(f"input_split_sizes add up to {sum(in_rows)} rows, the tensor has {x.shape[0]}")
    if any(_known(rows < 0) for rows in (*(out_rows or ()), *(in_rows or ()))):
        raise CollectiveError(f"split sizes must not be negative, got {out_rows} and {in_rows}")
    return x.shape[0] if out_rows is None else sum(out_rows)


def _known(truth: bool | torch.SymBool) -> bool:
    """Whether `truth` is true for certain; a symbolic one may be undecided while tracing."""
    if isinstance(truth, bool):
        return truth
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # loaded already if it is symbolic

    return statically_known_true(truth)


# The ops. Their settings (all arguments but the tensor) are saved for the backward.


def _op(name: str, arguments: str, shape: Any, fill: Any, backward: Any) -> _Op:
    """A custom op whose result has the shape `shape(x, ...)` and is filled by `fill(out, x, ...)`."""

    def read(settings: Sequence[Any]) -> tuple[Any, ...]:
        own = len(settings) - len(_Way._fields)
        return *settings[:own], _Way(*settings[own:])

    def run(x: Tensor, *settings: Any) -> Tensor:
        out = x.new_empty(shape(x, *read(settings)))
        fill(out, x, *read(settings))
        return out

    def keep_settings(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.settings = inputs[1:]

    def gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return backward(grad, *read(ctx.settings)), *[None] * len(ctx.settings)

    way = "str group, str codec, str backward_codec, str algorithm, SymInt? step"
    op = custom_op(f"thinwire::{name}", run, mutates_args=(), schema=f"(Tensor x, {arguments}{way}) -> Tensor")
    op.register_fake(lambda x, *settings: x.new_empty(shape(x, *read(settings))))
    op.register_autograd(gradients, setup_context=keep_settings)
    return op


def _reduced_shape(x: Tensor, op: str, way: _Way) -> torch.Size:
    _check(way, op)
    return x.shape


def _reduce(out: Tensor, x: Tensor, op: str, way: _Way) -> None:
    out.copy_(x)
    collectives.all_reduce(out, OPS[op], way.ranks, **way.settings)


_all_reduce: _Op = _op(
    "all_reduce", "str op, ", _reduced_shape, _reduce, lambda grad, op, way: _all_reduce(grad, op, *way.back)
)


def _gathered_shape(x: Tensor, dim: int, way: _Way) -> list[int]:
    _check(way)
    shape = list(x.shape)
    shape[_check_dim(x, dim)] *= way.ranks.size()
    return shape


def _gather(out: Tensor, x: Tensor, dim: int, way: _Way) -> None:
    world = way.ranks.size()
    along_rows = dim % x.dim() == 0
    rows = out if along_rows else x.new_empty((world * x.shape[0], *x.shape[1:]))
    collectives.all_gather_into_tensor(rows, x.contiguous(), way.ranks, **way.settings)
    if not along_rows:
        torch.cat(rows.view(world, *x.shape).unbind(), dim, out=out)


_all_gather: _Op = _op(
    "all_gather",
    "SymInt dim, ",
    _gathered_shape,
    _gather,
    lambda grad, dim, way: _reduce_scatter(grad, "sum", dim, *way.back),
)


def _scattered_shape(x: Tensor, op: str, dim: int, way: _Way) -> list[int]:
    _check(way, op)
    dim = _check_dim(x, dim)
    shape = list(x.shape)
    shape[dim] = _check_divides(shape[dim], dim, way.ranks.size())
    return shape


def _scatter(out: Tensor, x: Tensor, op: str, dim: int, way: _Way) -> None:
    in_rows = dim % x.dim() == 0 or x.numel() == 0
    parts = x.contiguous() if in_rows else torch.cat(x.split(out.shape[dim], dim))
    collectives.reduce_scatter_tensor(out, parts, OPS[op], way.ranks, **way.settings)


def _scatter_backward(grad: Tensor, op: str, dim: int, way: _Way) -> Tensor:
    whole = _all_gather(grad, dim, *way.back)
    return whole / way.ranks.size() if op == "avg" else whole


_reduce_scatter: _Op = _op("reduce_scatter", "str op, SymInt dim, ", _scattered_shape, _scatter, _scatter_backward)


def _exchanged_shape(x: Tensor, out_rows: _Splits, in_rows: _Splits, way: _Way) -> tuple[int, ...]:
    _check(way)
    return _rows(x, out_rows, in_rows, way.ranks.size()), *x.shape[1:]


def _exchange(out: Tensor, x: Tensor, out_rows: _Splits, in_rows: _Splits, way: _Way) -> None:
    collectives.all_to_all_single(out, x.contiguous(), out_rows, in_rows, way.ranks, **way.settings)


_all_to_all_single: _Op = _op(
    "all_to_all_single",
    "SymInt[]? out_rows, SymInt[]? in_rows, ",
    _exchanged_shape,
    _exchange,
    lambda grad, out_rows, in_rows, way: _all_to_all_single(grad, in_rows, out_rows, *way.back),
)
