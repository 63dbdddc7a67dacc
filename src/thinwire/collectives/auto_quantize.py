"""auto_quantize: a collective of torch.distributed, same signature, its data through a codec.

    all_gather = auto_quantize(dist.all_gather, DQuantType.FP16)
    all_gather(tensor_list, tensor, group, async_op=True).wait()

Thin over thinwire's verbs, which have torch's parameter names: most calls are passed on as they are. The four that have
no verb are built on one that has:

    gather, scatter       all_to_all, in which only one rank receives or sends
    reduce                all_reduce, kept by one rank; the others' tensors stay as they are
    reduce_scatter        reduce_scatter_tensor of the list's tensors laid side by side

To add one: its name in `_AS_IS` if a verb has the same parameters, else a function in `_CALLS`.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial, update_wrapper
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.codecs import Codec, codec
from thinwire.collectives import groups, verbs
from thinwire.collectives.sums import flat_algorithm
from thinwire.collectives.work import Work
from thinwire.errors import CodecError, CollectiveError


class DQuantType(Enum):
    """The two types of torch's own auto_quantize; every codec of thinwire may stand in their place."""

    FP16 = "fp16"
    BFP16 = "bfp16"

    def __str__(self) -> str:
        return str(self.value)


# Plain casts: NaN and Inf stay where they are. The codec "fp16" has scales, so that nothing overflows.
_CASTS: dict[object, str] = {DQuantType.FP16: "fp16:block=0", DQuantType.BFP16: "bf16", "bfp16": "bf16"}


def auto_quantize(
    func: Callable[..., Any], qtype: DQuantType | str | Codec, quant_loss: float | None = None
) -> Callable[..., Work | None]:
    """Wrap `func`, a collective of torch.distributed or of thinwire, so that its data travels as `qtype`.

    The result takes the arguments of `func`, writes in place, and returns a Work when async_op is true. It always uses
    the codec, even where sending plain would be faster. all_to_all_single also takes out_splits and in_splits, as other
    names of output_split_sizes and input_split_sizes.

    qtype: DQuantType.FP16 and DQuantType.BFP16 are casts, which keep NaN and Inf. In float16 numbers beyond 65504
        become infinite. The codec "fp16" has scales: nothing overflows, and a block with NaN or Inf becomes NaN.
    quant_loss: a number by which every value that arrives is divided.
    """
    named: Any = _CASTS.get(qtype, qtype) if isinstance(qtype, DQuantType | str) else qtype
    try:
        chosen = codec(named)
    except CodecError as error:
        raise CodecError(f"qtype must be DQuantType.FP16, DQuantType.BFP16 or a codec: {error}") from None
    return _AutoQuantized(func, chosen, quant_loss)


Arguments = dict[str, Any]  # of a call, by parameter name
Verb = Callable[..., Work | None]
_Call = tuple[Verb, Arguments, Sequence[Tensor]]  # about to be made, and the tensors the caller will look at
_ALIASES = {"out_splits": "output_split_sizes", "in_splits": "input_split_sizes"}


def _as_is(arguments: Arguments, verb: Verb) -> _Call:
    first = next(iter(arguments.values()))
    return verb, arguments, [first] if isinstance(first, Tensor) else list(first)


def _rooted(arguments: Arguments, listed: str, root: str) -> _Call:
    """gather and scatter: an exchange between the root's list, one tensor per rank, and the one tensor of each rank."""
    tensor = arguments.pop("tensor")
    group = groups.resolve(arguments.get("group"))
    source = _root(arguments, group, root)
    many = list(arguments.pop(listed, None) or ())
    expected = group.size() if group.rank() == source else 0
    if len(many) != expected:
        raise CollectiveError(f"{listed}: expected {expected} tensors on this rank, got {len(many) or 'none'}")
    one = [tensor if rank == source else tensor.new_empty(0) for rank in range(group.size())]
    outputs = many if listed == "gather_list" else [tensor]
    many = many or [tensor.new_empty(0) for _ in one]
    receives, sends = (many, one) if listed == "gather_list" else (one, many)
    return verbs.all_to_all, arguments | {"output_tensor_list": receives, "input_tensor_list": sends}, outputs


def _reduce(arguments: Arguments) -> _Call:
    group = groups.resolve(arguments.get("group"))
    if group.rank() != _root(arguments, group, "dst"):
        arguments["tensor"] = arguments["tensor"].clone()
    return verbs.all_reduce, arguments, [arguments["tensor"]]


def _reduce_scatter(arguments: Arguments) -> _Call:
    output = arguments["output"]
    listed = list(arguments.pop("input_list"))
    if any(tensor.numel() != output.numel() for tensor in listed):
        lengths = [tensor.numel() for tensor in listed]
        raise CollectiveError(f"reduce_scatter: expected {output.numel()} elements, the output's, got {lengths}")
    arguments["input"] = torch.cat([tensor.reshape(-1) for tensor in listed])
    return verbs.reduce_scatter_tensor, arguments, [output]


def _root(arguments: Arguments, group: dist.ProcessGroup, name: str) -> int:
    """Take the root out of the arguments: its rank in the group, by default rank 0 of the world's."""
    found = groups.rank_in(group, name, arguments.pop(name, None), arguments.pop(f"group_{name}", None))
    return dist.get_group_rank(group, 0) if found is None else found


_AS_IS = (
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "all_reduce", "all_reduce_coalesced", "all_to_all"),
    *("all_to_all_single", "broadcast", "reduce_scatter_single", "reduce_scatter_tensor"),
)
_CALLS: dict[str, Callable[[Arguments], _Call]] = {
    **{name: partial(_as_is, verb=getattr(verbs, name)) for name in _AS_IS},
    "gather": partial(_rooted, listed="gather_list", root="dst"),
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "scatter": partial(_rooted, listed="scatter_list", root="src"),
}


def _name_of(func: Callable[..., Any]) -> str:
    """The collective's name; aliases of one function have one name."""
    for name in _CALLS:
        if func is getattr(dist, name, None) or func is getattr(verbs, name, None):
            return name
    raise CollectiveError(
        f"auto_quantize wraps the collectives of torch.distributed that move tensors ({', '.join(sorted(_CALLS))}) "
        f"and thinwire's own; got {getattr(func, '__name__', func)!r}"
    )


class _AutoQuantized:
    def __init__(self, func: Callable[..., Any], codec: Codec, quant_loss: float | None) -> None:
        if quant_loss is not None and not (math.isfinite(quant_loss) and quant_loss != 0):
            raise CollectiveError(f"quant_loss must be a finite number other than 0, got {quant_loss!r}")
        self._name = _name_of(func)
        self._signature = inspect.signature(func)
        self._codec = codec
        self._quant_loss = quant_loss
        update_wrapper(self, func)

    def __call__(self, *args: Any, **kwargs: Any) -> Work | None:
        verb, arguments, outputs = _CALLS[self._name](self._bind(args, kwargs))
        arguments["algorithm"] = _algorithm(verb, arguments, self._codec, outputs)
        work = verb(**arguments, codec=self._codec)
        if self._quant_loss is None:
            return work
        if work is None:
            _divide(outputs, self._quant_loss)
            return None
        return _then_divide(work, outputs, self._quant_loss)

    def __repr__(self) -> str:
        return f"auto_quantize({self._name}, {str(self._codec)!r}, quant_loss={self._quant_loss})"

    def _bind(self, args: tuple[Any, ...], kwargs: Arguments) -> Arguments:
        """The call's arguments by the names of the wrapped function."""
        if self._name == "all_to_all_single":
            renamed = {_ALIASES.get(name, name): value for name, value in kwargs.items()}
            if len(renamed) < len(kwargs):
                pairs = ", ".join(f"{old} = {new}" for old, new in _ALIASES.items())
                raise TypeError(f"all_to_all_single: the same splits were given under both names ({pairs})")
            kwargs = renamed
        arguments = self._signature.bind(*args, **kwargs).arguments
        if "codec" in arguments:
            raise TypeError(f"codec is given twice: auto_quantize wrapped {self._name} with {self._codec}")
        return arguments


def _algorithm(verb: Verb, arguments: Arguments, codec: Codec, outputs: Sequence[Tensor]) -> str:
    """The algorithm that was asked for; for "auto", one that compresses."""
    asked: str = arguments.get("algorithm", "auto")
    if asked == "plain":
        raise CollectiveError("algorithm='plain' sends nothing through a codec: call it without auto_quantize")
    if asked != "auto":
        return asked
    if verb not in (verbs.all_reduce, verbs.all_reduce_coalesced):
        return "compressed"
    shape = outputs[0].shape if len(outputs) == 1 else (sum(output.numel() for output in outputs),)
    return flat_algorithm("auto", [codec.pick(shape=shape)], groups.resolve(arguments.get("group")).size())


def _divide(outputs: Sequence[Tensor], by: float) -> None:
    with torch.inference_mode():  # outputs may be inference tensors, and this may be another thread
        for output in outputs:
            output.detach().div_(by)


def _then_divide(work: Work, outputs: Sequence[Tensor], by: float) -> Work:
    """A Work that is done once the outputs of `work` have arrived and were divided, in whatever thread."""
    divided = Work(list(outputs), work.pipeline)

    def arrived(done: "torch.futures.Future[list[Tensor]]") -> None:
        # On a GPU the collective is under way on a stream still: divide on one that follows it, not on the caller's.
        stream = torch.cuda.Stream(outputs[0].device) if outputs and outputs[0].is_cuda else None
        try:
            done.value()  # raises what went wrong
            with torch.cuda.stream(stream):  # no stream, no effect; a future is done when the stream of that moment is
                if stream is not None:  # gloo's thread, which runs this, would wait for itself
                    work.wait()
                _divide(outputs, by)
                divided.finished()
            if stream is not None:
                for output in outputs:
                    output.record_stream(stream)
        except BaseException as error:  # of the collective: `divided.wait` raises it
            divided.failed(error)

    work.get_future().add_done_callback(arrived)
    return divided
