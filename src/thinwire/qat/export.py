"""Quantized models as ONNX: weights as integers, activations through QuantizeLinear and DequantizeLinear.

torch's exporter writes the graph. Before it looks at the model, quantizers are exchanged for modules that put ONNX's
own operators there; after it, integers of four bits are packed, for which torch has no type.
"""

import copy
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from thinwire.errors import MissingPackageError, QatError
from thinwire.qat.codes import IntegerWeight
from thinwire.qat.convert import convert
from thinwire.qat.layers import arguments, quantized_layers
from thinwire.qat.learnable import LearnableFakeQuantize
from thinwire.qat.lsq import LSQ

OPSETS = 18, 21  # the oldest that torch's exporter writes; the oldest with integers of four bits


def export(
    model: nn.Module,
    example_inputs: Tensor | tuple[Any, ...] | Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    opset: int = OPSETS[1],  # from 21 => weights of up to 4 bits in INT4; below => INT8
    dynamic_shapes: Any = None,  # as torch.export takes them; None => the shapes of the example
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
) -> None:
    """Write a prepared or converted model as an ONNX file, in evaluation mode. The model itself is left as it is.

    Ranges narrower than their ONNX type are kept by Max and Min before QuantizeLinear, offsets of LSQ+ by a Sub before
    and an Add after the pair. The file passes onnx's checker. `example_inputs`: a tensor, a tuple or a dict.
    """
    _check(opset)
    import onnx

    ready = _exportable(model, opset)
    args, kwargs = arguments(example_inputs)
    with _quiet():
        program = torch.onnx.export(
            ready,
            args,
            kwargs=kwargs,
            dynamo=True,
            optimize=False,  # it would unite equal tensors, those of four bits with those of eight
            verbose=False,
            opset_version=opset,
            dynamic_shapes=dynamic_shapes,
            input_names=input_names,
            output_names=output_names,
        )
        assert program is not None
        _pack_nibbles(program.model.graph, ready)
        program.save(path)
    onnx.checker.check_model(os.fspath(path), full_check=True)


# --- quantizers in ONNX's own operators ------------------------------------------------------------------------------


class _Exported(nn.Module):
    """Integers in the narrowest type that ONNX has for them, and their scales. Computes in fp32."""

    integers: Tensor  # a weight's own, or the zero points, all 0, of an activation
    scale: Tensor
    offset: Tensor | None

    def __init__(self, of: IntegerWeight | LSQ, low: int, integers: Tensor, scale: Tensor, opset: int) -> None:
        super().__init__()
        self.signed = low < 0
        self.width = 4 if of.bits <= 4 and opset >= OPSETS[1] else 8
        self.axis = 0 if of.group else of.axis
        self.register_buffer("integers", integers.to(torch.int8 if self.signed else torch.uint8))
        self.register_buffer("scale", self._shaped(scale))
        self.register_buffer("offset", None if of.offset is None else self._shaped(of.offset))

    def onnx_type(self) -> Any:
        """INT8, UINT8, INT4 or UINT4."""
        from onnxscript import ir

        return ir.DataType[f"{'' if self.signed else 'U'}INT{self.width}"]

    def _shaped(self, x: Tensor) -> Tensor:
        """x in the shape ONNX takes: a list for an axis, otherwise a scalar."""
        return x.detach().float().reshape(() if self.axis is None else -1)

    def _broadcast(self, x: Tensor, like: Tensor) -> Tensor:
        """x, one number per channel, in a shape that fits `like`."""
        dim = like.dim()
        return x if self.axis is None else x.view([-1 if at == self.axis % dim else 1 for at in range(dim)])

    def _dequantized(self, q: Tensor, *zero: Tensor) -> Tensor:
        y = self._operator("DequantizeLinear", q, self.scale, *zero, dtype=torch.float32)
        return y if self.offset is None else y + self._broadcast(self.offset, y)

    def _operator(self, name: str, x: Tensor, *rest: Tensor, dtype: torch.dtype | int) -> Tensor:
        attributes: Any = {} if self.axis is None else {"axis": self.axis}
        return torch.onnx.ops.symbolic(name, (x, *rest), attributes, dtype=dtype, shape=x.shape)


class _ExportedWeight(_Exported):
    """A weight of integers through DequantizeLinear."""

    def __init__(self, weight: IntegerWeight, opset: int) -> None:
        shape = (-1, weight.group) if weight.group else weight.shape
        low = weight.grid.quant_min
        super().__init__(weight, low, weight.codes().view(shape).short() + low, weight.scale, opset)
        self.shape = weight.shape
        self.dtype = weight.dtype

    def forward(self) -> Tensor:
        return self._dequantized(self.integers).reshape(self.shape).to(self.dtype)

    def rows(self, index: Tensor) -> Tensor:
        return embedding(index, self())


class _ExportedInput(_Exported):
    """An activation through QuantizeLinear and DequantizeLinear."""

    low: Tensor
    high: Tensor

    def __init__(self, quantizer: LSQ, opset: int) -> None:
        scale = quantizer.floored()
        super().__init__(quantizer, quantizer.quant_min, torch.zeros_like(scale), scale, opset)
        self.integers = self.integers.reshape(self.scale.shape)
        self.narrow = quantizer.bits < self.width
        self.kind = int(self.onnx_type())
        self.register_buffer("low", quantizer.quant_min * self.scale)
        self.register_buffer("high", quantizer.quant_max * self.scale)

    def forward(self, x: Tensor) -> Tensor:
        y = x.float() if self.offset is None else x.float() - self._broadcast(self.offset, x)
        if self.narrow:
            y = y.clamp(self._broadcast(self.low, y), self._broadcast(self.high, y))
        q = self._operator("QuantizeLinear", y, self.scale, self.integers, dtype=self.kind)
        return self._dequantized(q, self.integers).to(x.dtype)


# --- before and after torch's exporter -------------------------------------------------------------------------------


def _exportable(model: nn.Module, opset: int) -> nn.Module:
    """A converted copy in evaluation mode, its quantizers exchanged for what ONNX has."""
    done = quantized_layers(model, converted=True) and not quantized_layers(model, converted=False)
    ready = copy.deepcopy(model) if done else convert(model)
    exchanged: dict[int, nn.Module] = {}
    for name, module in list(ready.named_modules(remove_duplicate=False)):
        parent, _, own = name.rpartition(".")
        if isinstance(module, IntegerWeight | LSQ | LearnableFakeQuantize):
            new = exchanged[id(module)] = exchanged.get(id(module)) or _in_onnx(name, module, opset)
            ready.get_submodule(parent).register_module(own, new)
    return ready.eval()


def _in_onnx(name: str, module: nn.Module, opset: int) -> nn.Module:
    if isinstance(module, IntegerWeight):
        return _ExportedWeight(module, opset)
    if isinstance(module, LSQ) and not module.group:
        return _ExportedInput(module, opset)
    if isinstance(module, LSQ):
        raise QatError(
            f"{name} quantizes an activation in groups, which QuantizeLinear cannot: give it an axis or none"
        )
    raise QatError(f"{name} is a {type(module).__name__}; only what qat.prepare makes can be exported: remove it first")


def _pack_nibbles(graph: Any, ready: nn.Module) -> None:
    """Turn the integers of four bits, written as bytes, into ONNX's own."""
    from onnxscript import ir

    for name, module in ready.named_modules(remove_duplicate=False):
        value = graph.initializers.get(f"{name}.integers")
        if isinstance(module, _Exported) and module.width == 4 and value is not None:
            kind = module.onnx_type()
            value.const_value = ir.Tensor(module.integers.cpu().numpy().astype(kind.numpy()), kind, name=value.name)
            value.dtype = kind


@contextmanager
def _quiet() -> Iterator[None]:
    """torch's exporter logs which packages it did not find, and warns of what it calls itself."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    ignored = warnings.catch_warnings
    try:
        with ignored(action="ignore", category=FutureWarning), ignored(action="ignore", category=DeprecationWarning):
            yield
    finally:
        logger.setLevel(level)


def _check(opset: int) -> None:
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise MissingPackageError(
            f"qat.export needs {' and '.join(missing)}, not installed here: pip install 'thinwire[export]'"
        )
    if opset < OPSETS[0]:
        raise QatError(f"opset must be {OPSETS[0]} or more ({OPSETS[1]} for integers of four bits), got {opset}")
