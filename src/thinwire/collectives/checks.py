"""Checks of what a verb gets, and one form for it: tensors, codecs, ops, steps."""

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.codecs import Codec, registry
from thinwire.errors import CodecError, CollectiveError

Op = dist.ReduceOp | dist.ReduceOp.RedOpType
SUM: Op = dist.ReduceOp.SUM
Codecs = str | Codec | tuple[str | Codec, str | Codec]  # two: inside a node, across nodes


class Reduction(NamedTuple):
    """A sum times a factor; AVG's factor depends on the world."""

    name: str
    factor: float = 1.0

    def scale(self, world: int) -> float:
        return 1.0 / world if self.name == "avg" else self.factor

    @property
    def torch_op(self) -> Any:
        if self.name == "premul_sum":
            return dist._make_nccl_premul_sum(self.factor)  # type: ignore[attr-defined]
        return dist.ReduceOp.AVG if self.name == "avg" else dist.ReduceOp.SUM

    def __str__(self) -> str:
        return f"premul_sum*{self.factor!r}" if self.name == "premul_sum" else self.name


def reduction(op: Any) -> Reduction:
    if op == SUM or op == dist.ReduceOp.AVG:
        return Reduction("sum" if op == SUM else "avg")
    if op != dist.ReduceOp.PREMUL_SUM:
        raise CollectiveError(f"op must be SUM, AVG or PREMUL_SUM, got {op!r}: use torch.distributed for others")
    factor = op.__getstate__()[1] if hasattr(op, "__getstate__") else None
    if isinstance(factor, Tensor) and factor.numel() == 1:
        factor = factor.item()
    if not isinstance(factor, float | int) or not math.isfinite(factor):
        raise CollectiveError(f"PREMUL_SUM needs a finite factor, got {factor!r}")
    return Reduction("premul_sum", float(factor))


@functools.lru_cache(maxsize=1024)
def codec_named(spec: str) -> Codec:
    """The codec a string names, parsed once."""
    return registry.codec(spec)


def codec_for(spec: str | Codec, shape: Sequence[int] | None) -> Codec:
    """The codec that a call names or, given a shape, the one that serves tensors of it."""
    found = codec_named(spec) if isinstance(spec, str) else registry.codec(spec)
    return found if shape is None else found.pick(shape=shape)


def codecs_for(specs: Codecs, shape: Sequence[int] | None = None) -> tuple[Codec | str, ...]:
    """The codecs that a call names, one or two; those that serve a tensor of `shape`, where all ranks have the same.

    A string that names no codec is kept: the plan of the call raises for it, after the ranks have compared it.
    """
    found: list[Codec | str] = []
    for spec in specs if isinstance(specs, tuple) and 1 <= len(specs) <= 2 else (specs,):
        if not isinstance(spec, str | Codec):
            raise CodecError(f"expected a codec or a string such as 'int4:block=128', got {spec!r}")
        try:
            found.append(codec_for(spec, shape))
        except CodecError:
            found.append(str(spec))
    return tuple(found)


def check_tensors(tensors: Sequence[Any], what: str, outputs: int = 0, step: int | None = None) -> list[Tensor]:
    """`tensors` as a list of dense tensors of one dtype and device, detached; complex ones as pairs of reals.

    The first `outputs` of them must be writable element by element. A `step`, if given, must be a valid one.
    """
    if step is not None:
        check_step(step)
    listed = list(tensors)
    if not listed:
        raise CollectiveError(f"{what}: expected at least one tensor, got none")
    for tensor in listed:
        if not isinstance(tensor, Tensor):
            raise CollectiveError(f"{what}: expected tensors, got {type(tensor).__name__}")
        if hasattr(tensor, "__tensor_flatten__"):
            raise CollectiveError(
                f"{what}: expected plain tensors, got {type(tensor).__name__}: use its local tensor, e.g. to_local(), "
                "or wait() for the result of a functional collective"
            )
        if tensor.is_meta or hasattr(tensor, "fake_mode"):
            kind = "a meta tensor" if tensor.is_meta else "FakeTensor"
            raise CollectiveError(f"{what}: expected plain tensors, got {kind}, which has no numbers to send")
        if tensor.layout != torch.strided or tensor.is_nested:
            kind = "a nested one: use its values()" if tensor.is_nested else f"{tensor.layout}: convert with to_dense()"
            raise CollectiveError(f"{what}: expected dense tensors, got {kind}")
    first = listed[0]
    for tensor in listed[1:]:
        if tensor.dtype != first.dtype or tensor.device != first.device:
            raise CollectiveError(
                f"{what}: expected one dtype and device, got {first.dtype} on {first.device} "
                f"and {tensor.dtype} on {tensor.device}"
            )
    for tensor in listed[:outputs]:
        if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise CollectiveError(f"{what}: elements of an expanded tensor share memory: call contiguous() on it first")
    if first.is_complex():
        if any(tensor.is_conj() for tensor in listed):
            raise CollectiveError(f"{what}: a conjugated view shares its memory: call resolve_conj() on it first")
        return [torch.view_as_real(tensor.detach()) for tensor in listed]
    return [tensor.detach() for tensor in listed]


def check_gradient(grad: Tensor) -> None:
    """Raise unless DDP's gradients are dense."""
    if grad.layout != torch.strided:
        raise CollectiveError(
            f"thinwire's hooks take dense gradients, got {grad.layout}: "
            "make the layer's gradients dense (Embedding(sparse=False)), or leave this model without a hook"
        )


def check_step(step: int) -> int:
    """`step` as an int that codecs take."""
    if not 0 <= (number := operator.index(step)) < 1 << 64:
        raise CollectiveError(f"step must be 0 .. 2**64 - 1, got {step}")
    return number


def check_recodes(codecs: Sequence[Codec], what: str) -> None:
    """Raise if a codec cannot encode sums again, which `what` requires."""
    for codec in codecs:
        if not codec.recodes:
            raise CollectiveError(
                f"codec {codec} sends only the largest numbers, which only one_shot sums support: {what} needs another "
                "codec, such as lloyd2"
            )


def check_algorithm(algorithm: str, known: Sequence[str]) -> None:
    if algorithm not in known:
        raise CollectiveError(f"algorithm must be one of {', '.join(known)}, got {algorithm!r}")
