"""The contract every codec keeps, and the checks in front of the kernels.

docs/internals/architecture.md lists what a new codec touches.
"""

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache, partial
from typing import ClassVar, Literal, get_args, get_origin

import torch
from torch import Tensor

from thinwire import kernels, wire
from thinwire.codecs.checks import is_int
from thinwire.errors import CodecError, WireError
from thinwire.kernels import hashing
from thinwire.kernels.schema import Encoding
from thinwire.ranges import ranged

_MOST_RECIPES = 1024  # as many kinds of calls as a group remembers


class Codec(ABC):
    """Turns a float tensor into one uint8 buffer, the wire, and back.

    Codecs are frozen, hashable and compare by value. `thinwire.codec(str(codec))` makes an equal one.
    """

    inputs: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16, torch.float16)
    recodes: ClassVar[bool] = True  # False => sums of its wires are not encoded again, so they travel one_shot
    seed: int = 0  # of rotation signs and stochastic rounding; ranks that add their wires must share it

    def __post_init__(self) -> None:
        """Check the seed, and the fields whose type is a Literal or bool."""
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            words = get_args(field.type) if get_origin(field.type) is Literal else ()
            if words and value not in words:
                raise CodecError(f"{field.name} must be {' or '.join(map(repr, words))}, got {value!r}")
            if field.type is bool and not isinstance(value, bool):
                raise CodecError(f"{field.name} must be True or False, got {value!r}")
        if not is_int(self.seed) or not 0 <= self.seed < 1 << 64:  # it must fit the hash
            raise CodecError(f"seed must be 0 .. 2**64 - 1, got {self.seed!r}")

    @property
    def unit(self) -> int:
        """How many elements collectives keep together when they cut a message. Ask the codec that `pick` returns."""
        return 1

    @abstractmethod
    def encoding(self, dtype: torch.dtype) -> Encoding:
        """How tensors of `dtype` are encoded: the wire format and the encoder's choices."""

    def pick(self, name: str = "", shape: Sequence[int] = ()) -> "Codec":
        """The codec that serves the tensor called `name` of `shape`; codecs made of codecs choose here."""
        return self

    def wire_bytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        """Length of the wire of `numel` elements. Only `none` depends on `dtype`."""
        return self._recipe(numel, dtype).layout.nbytes

    @ranged("thinwire::encode")
    def encode(self, x: Tensor, wire: Tensor, *, step: int = 0, residual: Tensor | None = None) -> None:
        """Write the wire of x. With a residual (fp32, x's shape): encode x + residual, and store in it what was lost.

        `step` varies rotation and stochastic rounding from call to call; ranks that add their wires must share it.
        A block that holds NaN or Inf decodes to NaN and leaves its part of the residual untouched.
        """
        recipe = self._recipe(x.numel(), x.dtype)
        _check_wire(recipe.layout, wire, x.device)
        if residual is not None:
            _check_residual(x, residual)
        source = kernels.flat(x)
        _check_memory(source, wire)
        if x.dtype == torch.float64 and not recipe.keeps_doubles:
            source = source.float()
        carried = None if residual is None else residual.view(-1)
        rotation, dither = recipe.keys(step, hashing.DITHER)
        backend = kernels.select(x.device, recipe.how.format)
        backend.encode(recipe.how, source, wire, carried, rotation=rotation, dither=dither)
        _mark_written(wire, *(() if residual is None else (residual,)))

    def decode(self, wire: Tensor, out: Tensor, *, scale: float = 1.0, step: int | None = None) -> None:
        """Decode the wire into `out`, of any strides and a dtype that the codec takes (for `none` the encoded one)."""
        self.decode_sum(wire.unsqueeze(0), out, scale=scale, step=step)

    @ranged("thinwire::decode")
    def decode_sum(self, wires_WN: Tensor, out: Tensor, *, scale: float = 1.0, step: int | None = None) -> None:
        """out = scale * sum over ranks of decode(wire). Ranks are added in rank order, so all ranks agree bitwise.

        Pass the `step` that the wires were encoded with if it is known: then the CPU raises WireError for wires of
        another step, and a GPU does not read headers. Wires of another codec or length raise WireError. On a GPU, where
        the host does not wait for headers, a header that does not match makes the sum NaN instead.
        """
        recipe = self._recipe(out.numel(), out.dtype)
        rotation = _key_of(recipe, wires_WN, out.device, step)
        direct = out.is_contiguous() and not out.is_neg()
        flat = out.detach().view(-1) if direct else torch.empty(out.numel(), dtype=out.dtype, device=out.device)
        _check_memory(flat, wires_WN)
        target = flat.float() if out.dtype == torch.float64 and not recipe.keeps_doubles else flat
        backend = kernels.select(out.device, recipe.how.format)
        backend.decode_sum(recipe.how.format, wires_WN, target, scale=scale, rotation=rotation)
        if target is not flat:
            flat.copy_(target)
        if not direct:
            out.detach().copy_(flat.view(out.shape))
        _mark_written(out)

    @ranged("thinwire::recode")
    def recode(
        self,
        wires_WN: Tensor,
        wire: Tensor,
        numel: int,
        *,
        scale: float = 1.0,
        step: int = 0,
        dtype: torch.dtype = torch.float32,
        trusted: bool = False,
    ) -> None:
        """wire = encode(scale * sum over ranks of decode(wires)), fused: no full-size temporary, no second rotation.

        `trusted` says that the wires were encoded with this `step`; a GPU then does not read headers. Wires that do not
        match raise WireError, or on a GPU give a wire that decodes to NaN.
        """
        if not self.recodes:
            raise CodecError(f"codec {self}: sums of its wires are not encoded again; decode_sum them")
        if not (math.isfinite(scale) and scale >= 0):
            raise CodecError(f"the scale of a recoded sum must be finite and not negative, got {scale!r}")
        recipe = self._recipe(numel, dtype)
        _check_wire(recipe.layout, wire, wires_WN.device)
        rotation = _key_of(recipe, wires_WN, wires_WN.device, step if trusted else None)
        dither = recipe.keys(step, hashing.DITHER_RECODE)[1]
        backend = kernels.select(wire.device, recipe.how.format)
        backend.recode(recipe.how, wires_WN, wire, numel, scale=scale, rotation=rotation, dither=dither)
        _mark_written(wire)

    def all_finite(self, wires_WN: Tensor, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Whether every number of these wires is finite, as a scalar bool tensor. Reads only the scales, if any."""
        layout = self._recipe(numel, dtype).layout
        wire.check_wires(layout, wires_WN, wires_WN.device)
        return wire.all_finite(layout, wires_WN)

    @cached_property
    def _recipe(self) -> "Callable[[int, torch.dtype], _Recipe]":
        return lru_cache(_MOST_RECIPES)(partial(_recipe, self))

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_recipe"}

    def _spell(self, name: str, *options: str) -> str:
        """name:option=value,... for the options that differ from their default."""
        defaults = {f.name: f.default for f in fields(self)}  # type: ignore[arg-type]
        changed = [f"{o}={_text(getattr(self, o))}" for o in options if getattr(self, o) != defaults[o]]
        return ":".join([name, ",".join(changed)] if changed else [name])

    def _sized(self, numel: int) -> "Codec":
        return self.pick(shape=(numel,))


@dataclass(frozen=True)
class _Recipe:
    """What one codec does with tensors of one length and dtype."""

    codec: Codec  # the one that encodes: a codec made of codecs only picks it
    how: Encoding
    layout: wire.Layout

    @cached_property
    def keeps_doubles(self) -> bool:
        return self.how.format.bits == 64

    def keys(self, step: int, dither: int) -> tuple[int, int]:
        """The keys of rotation and dither; 0 for what the encoding does not use."""
        step = operator.index(step)
        if not 0 <= step < 1 << 64:
            raise CodecError(f"step must be 0 .. 2**64 - 1, got {step}")
        return self.how.keys(self.codec.seed, step, dither)


def _recipe(codec: Codec, numel: int, dtype: torch.dtype) -> _Recipe:
    chosen = codec._sized(numel)
    if dtype not in chosen.inputs:
        known = ", ".join(str(d).removeprefix("torch.") for d in chosen.inputs)
        other = "codec 'none'" if dtype == torch.float64 else "algorithm='plain', which sends it as it is"
        raise CodecError(f"codec {chosen} takes {known}, got {dtype}: convert the tensor, or use {other}")
    how = chosen.encoding(dtype)
    return _Recipe(chosen, how, how.format.layout(operator.index(numel)))


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check_wire(layout: wire.Layout, buffer: Tensor, device: torch.device) -> None:
    if buffer.dim() != 1:
        raise WireError(f"a wire is a 1-D uint8 tensor, got shape {tuple(buffer.shape)}")
    if (
        buffer.numel() != layout.nbytes
        or buffer.dtype != torch.uint8
        or buffer.device != device
        or buffer.stride(0) != 1
    ):
        wire.check_wires(layout, buffer.unsqueeze(0), device)


def _key_of(recipe: _Recipe, wires_WN: Tensor, device: torch.device, step: int | None) -> int | None:
    """Check the wires and return the key of their rotation, or None for kernels to take it from the headers."""
    wire.check_wires(recipe.layout, wires_WN, device)
    if step is None:
        return None
    key = recipe.keys(step, 0)[0]
    if device.type == "cpu":  # reading headers costs nothing here, and a bit of the key may have flipped
        wire.read_key(recipe.layout, wires_WN, key)
    return key


def _check_memory(*tensors: Tensor) -> None:
    """Kernels read memory, which a wrapper (a DTensor, a fake tensor) does not have."""
    for tensor in tensors:
        offset = tensor.storage_offset() * tensor.itemsize  # part of data_ptr() even where there is no memory
        if tensor.device.type != "meta" and tensor.numel() and tensor.data_ptr() <= offset:
            raise CodecError(
                f"expected a plain tensor, got {type(tensor).__name__} without memory: use its local tensor"
            )


def _mark_written(*tensors: Tensor) -> None:
    """Tell autograd, which cannot see what a kernel writes through a pointer."""
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def _check_residual(x: Tensor, residual: Tensor) -> None:
    if residual.dtype != torch.float32 or residual.shape != x.shape or residual.device != x.device:
        raise CodecError(
            f"the residual must be float32 of shape {tuple(x.shape)} on {x.device}, "
            f"got {residual.dtype} {tuple(residual.shape)} on {residual.device}"
        )
    if not residual.is_contiguous():
        raise CodecError("the residual must be contiguous, it is updated in place")
