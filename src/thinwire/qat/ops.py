"""Fake quantization as a differentiable torch op over the kernels: the only file of this room that knows layouts.

[Note: Layouts] A kernel sees a contiguous tensor with its channels in the middle: (outer, channels, inner). Which
dimension is the outermost in memory does not matter to the elements, so a dense tensor in any order of its dimensions,
channels_last for one, is taken as it lies, and its result lies the same way. Groups are runs of the rows of a
contiguous tensor: (1, all groups, group).

[Note: Entrances] Eager code enters by an autograd.Function. A torch.library op costs ten times as much per call, but
torch.compile and torch.export can put one into a graph whole, so they get one; so do dispatch modes and tensors of
other classes (make_fx, fake tensors, DTensors), which see ops only and may have no memory. torch.func's transforms take
neither and get a Function that keeps its context apart. All run the same two functions.
"""

import math
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.library import custom_op
from torch.nn import Parameter

from thinwire.errors import QatError, QatStateError, QatTypeError
from thinwire.kernels import FakeGradients, Grid, select

Gradient = Literal["torch", "lsq"]
MOST_LEVELS = 1 << 20  # of a range; kernels round in fp32
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def fake_quantize(
    x: Tensor,
    scale: Tensor,
    *,
    quant_min: int,
    quant_max: int,
    zero_point: Tensor | None = None,
    offset: Tensor | None = None,
    axis: int | None = None,
    group: int = 0,
    gradient: Gradient = "lsq",
    scale_gradient: bool = True,
) -> Tensor:
    """Round x to the grid of `scale`, with straight-through gradients for x, the scale and the shift.

    There is one scale in all, one per index of `axis`, or one per `group` elements of a row. A shift has as many
    elements as the scale: `zero_point` in steps (rounded), or `offset` in units of x (LSQ+). `gradient="lsq"` is the
    paper's rule, "torch" that of torch's learnable fake quantization. `scale_gradient` multiplies the gradients of
    scale and shift by 1 / sqrt(n * quant_max), where n counts the elements of a channel ("lsq") or of x ("torch").
    """
    check_grid(quant_min, quant_max, gradient)
    if zero_point is not None and offset is not None:
        raise QatError("give a zero_point or an offset, not both")
    shift = zero_point if offset is None else offset
    settings = _Settings(axis, group, quant_min, quant_max, offset is not None, gradient == "lsq", scale_gradient)
    y: Tensor
    compiling = torch.compiler.is_compiling()
    if not compiling and torch._C._are_functorch_transforms_active():
        y = _Transformed.apply(x, scale, shift, *settings)  # type: ignore[no-untyped-call]
    elif compiling or type(x) not in (Tensor, Parameter) or torch._C._len_torch_dispatch_stack() > 0:
        y = _op(x, scale, shift, *settings)
    else:
        y = _Function.apply(x, scale, shift, settings)  # type: ignore[no-untyped-call]
    return y


def check_grid(quant_min: int, quant_max: int, gradient: Gradient) -> None:
    """Reject ranges without two integers, those that fp32 cannot round in, and unknown rules for gradients."""
    if not (isinstance(quant_min, int) and isinstance(quant_max, int)):
        raise QatError(f"quant_min and quant_max must be integers, got {quant_min!r} and {quant_max!r}")
    if quant_min >= quant_max:
        raise QatError(f"quant_min must be below quant_max, got {quant_min} and {quant_max}")
    if max(-quant_min, quant_max, quant_max - quant_min) >= MOST_LEVELS:
        raise QatError(f"quant_min and quant_max must lie within 2**20, got {quant_min} and {quant_max}")
    if gradient not in get_args(Gradient):
        raise QatError(f"gradient must be one of {', '.join(get_args(Gradient))}, got {gradient!r}")


class Laid(NamedTuple):
    """How a tensor is handed to a kernel: its dimensions from the outermost in memory, and the shape with channels."""

    order: list[int] | None  # None => as they are
    shape: tuple[int, int, int]

    def view(self, x: Tensor) -> Tensor:
        """x, or a copy where it lies otherwise, as a kernel takes it."""
        if self.order is not None:
            x = x.permute(self.order)
        return x.contiguous().view(self.shape)


def lay_out(like: Tensor, channels: int, axis: int | None, group: int) -> Laid:
    """The layout of a dense tensor. [Note: Layouts]"""
    if group:
        return Laid(None, (1, channels, group))
    strides = like.stride()
    order = None if like.is_contiguous() else sorted(range(like.dim()), key=lambda d: -strides[d])
    if axis is None:
        return Laid(order, (1, 1, like.numel()))
    sizes = list(like.shape) if order is None else [like.shape[d] for d in order]
    at = axis % like.dim() if order is None else order.index(axis % like.dim())
    return Laid(order, (math.prod(sizes[:at]), sizes[at], math.prod(sizes[at + 1 :])))


def _empty(x: Tensor, group: int) -> Tensor:
    """Room for a result: as x lies where that is dense. [Note: Layouts]"""
    return torch.empty_like(x, memory_format=torch.contiguous_format if group else torch.preserve_format)


def check_dtype(x: Tensor) -> None:
    if x.dtype not in _DTYPES:
        raise QatTypeError(f"x must be floating point ({', '.join(map(str, _DTYPES))}), got {x.dtype}")


def _check(x: Tensor, scale: Tensor, shift: Tensor | None, axis: int | None, group: int) -> None:
    check_dtype(x)
    want = channels_of(x, axis, group)
    if scale.numel() != want:
        raise QatError(f"scale has {scale.numel()} elements, {want} expected for {tuple(x.shape)}, {axis=}, {group=}")
    if shift is not None and shift.numel() != scale.numel():
        raise QatError(f"zero point or offset has {shift.numel()} elements, the scale {scale.numel()}")


def channels_of(x: Tensor, axis: int | None, group: int) -> int:
    """How many scales x needs."""
    if group:
        if axis is not None:
            raise QatError("give an axis or a group, not both")
        if group < 0 or x.dim() == 0 or x.shape[-1] % group:
            raise QatError(f"group={group} does not divide the rows of a tensor of shape {tuple(x.shape)}")
        return x.numel() // group
    if axis is None:
        return 1
    if not -x.dim() <= axis < x.dim():
        raise QatError(
            f"axis must be within {-x.dim()}..{x.dim() - 1} for a tensor of shape {tuple(x.shape)}, got {axis}"
        )
    return x.shape[axis]


def check_scale(scale: Tensor) -> None:
    """Raise for a scale that no grid can have; on a GPU, where the host would wait, its channel becomes NaN."""
    if scale.device.type != "cpu":
        return
    good = (scale > 0) & (scale < math.inf) & (1 / scale < math.inf)
    if not good.all():
        at = int(good.flatten().logical_not().nonzero()[0])
        raise QatError(
            f"a scale and its inverse must be positive and finite, got {scale.flatten()[at].item():g} (channel {at}); "
            "lower the learning rate of the scales or start from a smaller one (qat.parameter_groups keeps them apart)"
        )


# --- the two functions, and their entrances: [Note: Entrances] -------------------------------------------------------


_grid = lru_cache(maxsize=256)(Grid)


class _Settings(NamedTuple):
    """What a call has besides its tensors."""

    axis: int | None
    group: int
    quant_min: int
    quant_max: int
    offset: bool
    paper: bool
    scale_gradient: bool

    @property
    def grid(self) -> Grid:
        return _grid(self.quant_min, self.quant_max, self.offset, self.paper)


def _forward(x: Tensor, scale: Tensor, shift: Tensor | None, *settings: Any) -> Tensor:
    how = _Settings(*settings)
    _check(x, scale, shift, how.axis, how.group)
    out = _empty(x, how.group)
    parameters = _parameters(x, scale, shift)
    good = False
    if x.numel():
        laid = lay_out(out, scale.numel(), how.axis, how.group)
        good = select(x.device, x.dtype).fake_quantize(how.grid, laid.view(x), *parameters, laid.view(out)) is not False
    if not good:
        check_scale(parameters[0])
    return out


def _gradients(
    x: Tensor, grad: Tensor, want_dx: bool, scale: Tensor, shift: Tensor | None, *settings: Any
) -> tuple[Tensor, Tensor]:
    """(dx or nothing, gradients of scale and shift as two rows)."""
    how = _Settings(*settings)
    dx = _empty(x, how.group)
    parameters = _parameters(x, scale, shift)
    sums_2C = parameters[0].new_empty(2, scale.numel())
    if not x.numel():
        sums_2C.zero_()
    else:
        laid = lay_out(dx, scale.numel(), how.axis, how.group)
        n = x.numel() / scale.numel() if how.paper else x.numel()
        reach = how.quant_max if how.quant_max > 0 else -how.quant_min
        factor = 1 / math.sqrt(max(n, 1) * reach) if how.scale_gradient else 1.0
        views = laid.view(x), laid.view(grad if grad.dtype == x.dtype else grad.to(x.dtype))
        dx_OCI = laid.view(dx) if want_dx else None
        select(x.device, x.dtype).fake_quantize_grad(
            how.grid, FakeGradients(*views, *parameters, dx_OCI, sums_2C), factor
        )
    return dx if want_dx else x.new_empty(0), sums_2C


def never_narrow(fn: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    """fn(t), a move or a cast of a quantizer's state, but never to less than fp32."""
    moved = fn(t)
    if moved.is_floating_point() and moved.itemsize < 4:
        return t.to(moved.device, torch.float32)
    return moved


def _parameters(x: Tensor, scale: Tensor, shift: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Scale and shift as kernels take them: flat, in the dtype of the computation, beside x."""
    if scale.device != x.device or (shift is not None and shift.device != x.device):
        others = scale.device if shift is None else f"{scale.device}, its shift on {shift.device}"
        raise QatError(f"x is on {x.device} and the scale on {others}; move the quantizer with the model")
    dtype = torch.promote_types(x.dtype, torch.float32)
    return _flat(scale, dtype), None if shift is None else _flat(shift, dtype)


def _flat(t: Tensor, dtype: torch.dtype) -> Tensor:
    if t.dtype == dtype and t.dim() == 1 and t.is_contiguous():  # three calls less, of microseconds each
        return t
    return t.to(dtype).reshape(-1).contiguous()


def _backward(
    gradients: Callable[..., tuple[Tensor, Tensor]], rest: int, ctx: Any, grad: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients of an entrance that takes `rest` arguments besides its three tensors."""
    x, scale, shift = ctx.saved_tensors
    wants = ctx.needs_input_grad
    dx, sums_2C = gradients(x, grad, wants[0], scale, shift, *ctx.settings)
    dscale = sums_2C[0].view_as(scale).to(scale.dtype) if wants[1] else None
    dshift = sums_2C[1].view_as(shift).to(shift.dtype) if wants[2] else None
    return dx if wants[0] else None, dscale, dshift, *[None] * rest


_eager_backward = partial(_backward, _gradients, 1)
_once = once_differentiable(_eager_backward)  # with create_graph: to differentiate the result raises, as it must


class _Function(torch.autograd.Function):
    # A setup_context of its own would cost 100 microseconds per call, and every argument a few.

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, shift: Tensor | None, settings: tuple[Any, ...]) -> Tensor:
        ctx.save_for_backward(x, scale, shift)
        ctx.settings = settings
        return _forward(x, scale, shift, *settings)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (_once if torch.is_grad_enabled() else _eager_backward)(ctx, grad)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, scale, shift, *ctx.settings = inputs
    ctx.save_for_backward(x, scale, shift)


_REST = (  # of what both ops take: scale, shift and the fields of _Settings
    "Tensor scale, Tensor? shift, int? axis, int group, int quant_min, int quant_max, bool offset, bool paper, "
    "bool scale_gradient"
)
_op = custom_op("thinwire::fake_quantize", _forward, mutates_args=(), schema=f"(Tensor x, {_REST}) -> Tensor")
_gradients_op = custom_op(
    "thinwire::fake_quantize_grad",
    _gradients,
    mutates_args=(),
    schema=f"(Tensor x, Tensor grad, bool want_dx, {_REST}) -> (Tensor, Tensor)",
)
_op.register_autograd(partial(_backward, _gradients_op, len(_Settings._fields)), setup_context=_keep)


@_op.register_fake
def _(x: Tensor, scale: Tensor, shift: Tensor | None, axis: int | None, group: int, *settings: int | bool) -> Tensor:
    _check(x, scale, shift, axis, group)
    return _empty(x, group)


@_gradients_op.register_fake
def _(
    x: Tensor, grad: Tensor, want_dx: bool, scale: Tensor, shift: Tensor | None, *settings: Any
) -> tuple[Tensor, Tensor]:
    sums_2C = x.new_empty((2, scale.numel()), dtype=torch.promote_types(x.dtype, torch.float32))
    return _empty(x, _Settings(*settings).group) if want_dx else x.new_empty(0), sums_2C


class _Transformed(torch.autograd.Function):
    forward = staticmethod(_forward)
    setup_context = staticmethod(_keep)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(_TransformedGradients.apply, len(ctx.settings), ctx, grad)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        return torch.stack(list(_one_by_one(_Transformed.apply, info.batch_size, in_dims, args))), 0


class _TransformedGradients(torch.autograd.Function):
    forward = staticmethod(_gradients)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None: ...

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise QatStateError("fake quantization has first derivatives only: its steps have no second one")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
        found = _one_by_one(_TransformedGradients.apply, info.batch_size, in_dims, args)
        return tuple(torch.stack(each) for each in zip(*found, strict=True)), (0, 0)


def _one_by_one(
    apply: Callable[..., Any], count: int, in_dims: tuple[int | None, ...], args: tuple[Any, ...]
) -> Iterator[Any]:
    """Every sample by itself: each is a tensor with gradients of its own."""
    for i in range(count):
        yield apply(*[arg if dim is None else arg.select(dim, i) for arg, dim in zip(args, in_dims, strict=True)])
