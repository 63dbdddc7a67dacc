"""From fake quantization to integers: layers that keep their weight as packed codes.

[Note: Exactly the trained numbers] The numbers a converted layer computes with are those of its fake quantizer, bit for
bit, and the same kernels of torch work on them, so outputs are the same bits too. `convert` compares every weight.

To add a layer: subclass it with `IntegerLayer` first, take over the forward of its quantized form, enter it in `FORMS`.
"""

import copy
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from thinwire.errors import QatError, QatTypeError
from thinwire.qat import layers
from thinwire.qat.codes import Coding, pack, unpack
from thinwire.qat.layers import QuantizedLayer, check_model, without_scale
from thinwire.qat.lsq import LSQ
from thinwire.qat.ops import never_narrow

Model = TypeVar("Model", bound=nn.Module)


class IntegerWeight(nn.Module):
    """A weight as packed codes and the scales of its channels. Its numbers exist only while a layer uses them.

    Buffers: `packed`, a row of bytes for every index of the first axis (`thinwire.qat.codes`); `scale` and `offset`
    (or None) in fp32, fp64 after `.double()`; `quant_range`, the lowest and the highest integer. The numbers come in
    the floating-point type the model was last cast to.
    """

    packed: Tensor
    scale: Tensor
    offset: Tensor | None
    quant_range: Tensor

    def __init__(self, weight: Tensor, quantizer: LSQ) -> None:
        super().__init__()
        self.coding = Coding.of(quantizer)
        self.shape = weight.shape
        self.dtype = weight.dtype
        plain = weight.is_contiguous() or not weight.is_contiguous(memory_format=torch.channels_last)
        self.memory_format = torch.contiguous_format if plain else torch.channels_last
        scale = quantizer.floored().detach().clone()
        offset = None if quantizer.offset is None else quantizer.offset.detach().clone()
        codes = self.coding.codes(weight.detach().contiguous(), scale, offset)
        self.register_buffer("packed", pack(codes.flatten(1), self.coding.bits))
        self.register_buffer("scale", scale)
        self.register_buffer("offset", offset)
        self.register_buffer("quant_range", quantizer.quant_range.clone())

    def forward(self) -> Tensor:
        """The whole weight."""
        weight = self.coding.values(self.codes(), self.scale, self.offset, self.dtype)
        return weight.contiguous(memory_format=self.memory_format)

    def codes(self) -> Tensor:
        """The codes of the whole weight, uint8."""
        return unpack(self.packed, self.coding.bits, self.shape[1:].numel()).reshape(self.shape)

    def rows(self, index: Tensor) -> Tensor:
        """The rows of a table at these indices; no other is decoded."""
        flat = index.reshape(-1)
        scale = self.scale.view(len(self.packed), -1)[flat].flatten()
        offset = None if self.offset is None else self.offset.view(len(self.packed), -1)[flat].flatten()
        codes = unpack(self.packed.index_select(0, flat), self.coding.bits, self.shape[1])
        return self.coding.values(codes, scale, offset, self.dtype).view(*index.shape, self.shape[1])

    def extra_repr(self) -> str:
        """The weight's shape, and the range of its integers."""
        grid = self.coding.grid
        return f"{tuple(self.shape)}, bits={self.coding.bits}, {grid.quant_min}..{grid.quant_max}"

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(partial(never_narrow, fn), recurse)  # type: ignore[no-untyped-call]
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        saved = state_dict.get(prefix + "quant_range")
        if saved is not None and not saved.is_meta:
            low, high = saved.tolist()
            self.coding = replace(self.coding, grid=replace(self.coding.grid, quant_min=low, quant_max=high))
        super()._load_from_state_dict(state_dict, prefix, *rest)


class IntegerLayer(nn.Module):
    """What converted layers share. They have no `weight`; `quantized_weight()` gives the numbers, as before."""

    integer_weight: IntegerWeight
    act_quantizer: LSQ | None
    note: str

    quantized_input = QuantizedLayer.quantized_input

    def quantized_weight(self) -> Tensor:
        """The weight as the layer uses it."""
        weight: Tensor = self.integer_weight()
        return weight


class IntegerLinear(IntegerLayer, nn.Linear):
    """nn.Linear of an integer weight."""

    forward = layers.QuantizedLinear.forward


class IntegerConv1d(IntegerLayer, nn.Conv1d):
    """nn.Conv1d of an integer weight."""

    forward = layers.QuantizedConv1d.forward


class IntegerConv2d(IntegerLayer, nn.Conv2d):
    """nn.Conv2d of an integer weight."""

    forward = layers.QuantizedConv2d.forward


class IntegerEmbedding(IntegerLayer, nn.Embedding):
    """nn.Embedding of an integer table. Only the rows looked up are decoded."""

    def forward(self, input: Tensor) -> Tensor:
        """As nn.Embedding."""
        return self.integer_weight.rows(input)


FORMS: dict[type[nn.Module], type[IntegerLayer]] = {
    layers.QuantizedLinear: IntegerLinear,
    layers.QuantizedConv1d: IntegerConv1d,
    layers.QuantizedConv2d: IntegerConv2d,
    layers.QuantizedEmbedding: IntegerEmbedding,
}


@torch.no_grad()
def convert(model: Model, *, inplace: bool = False) -> Model:
    """A copy of a prepared model whose quantized layers hold integers instead of floating-point weights.

    Weights become packed codes, decoded whenever a layer runs; activations are quantized as in training. The scales of
    both are frozen, all other parameters are as they were. Outputs are the prepared model's, bit for bit. Layers that
    shared a weight and its quantizer share its integers.

    `inplace=True` changes the model itself, which then holds no floating-point weights any more. A model on the meta
    device becomes the skeleton that the state_dict of a converted model is loaded into with `assign=True`.
    """
    _check(model)
    model = model if inplace else copy.deepcopy(model)
    trained = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLayer)}
    ties: dict[tuple[int, int], IntegerWeight] = {}
    held = {}
    for name, layer in trained.items():
        tie = id(layer.weight), id(layer.weight_quantizer)
        held[name] = ties[tie] = ties.get(tie) or _integers(name, layer)
    for name, layer in trained.items():
        form = FORMS[type(layer)]
        del layer.weight, layer.weight_quantizer
        layer.__class__ = form  # type: ignore[assignment]
        layer.register_module("integer_weight", held[name])
    for module in model.modules():
        if isinstance(module, LSQ):
            module.requires_grad_(False)
    return model


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the weights of a model's Linear, Conv1d, Conv2d and Embedding layers, prepared, converted or neither.

    Every tensor counts once, however many layers share it. Converted weights count with their scales and offsets.
    """
    found = {id(tensor): tensor.nbytes for module in model.modules() for tensor in _weight_of(module)}
    return sum(found.values())


def _weight_of(module: nn.Module) -> list[Tensor]:
    if isinstance(module, IntegerLayer):
        weight = module.integer_weight
        return [weight.packed, weight.scale, *([] if weight.offset is None else [weight.offset])]
    trained: Any = module
    return [trained.weight] if isinstance(module, tuple(layers.FORMS)) else []


def _integers(name: str, layer: QuantizedLayer) -> IntegerWeight:
    """The layer's weight as integers. [Note: Exactly the trained numbers]"""
    if type(layer) not in FORMS:
        raise QatTypeError(f"{name} is a {type(layer).__name__}; remove parametrisations from it, then convert")
    if getattr(layer, "max_norm", None) is not None:
        raise QatError(f"{name} rescales rows when they are looked up, which integers cannot: set its max_norm to None")
    found = IntegerWeight(layer.weight, layer.weight_quantizer).train(layer.training)
    if layer.weight.is_meta:
        return found
    wanted = layer.quantized_weight()
    if wanted.isnan().any():
        raise QatError(f"the weight of {name} is not a number in places, and no integer is: fix it before converting")
    if not torch.equal(found(), wanted):
        kind = type(layer.weight_quantizer).__name__
        raise QatTypeError(
            f"{name} has a {kind}, whose numbers are not those of its scales; convert knows LSQ and LSQPlus"
        )
    return found


def _check(model: nn.Module) -> None:
    sharded = "parameters are sharded: load a full state_dict into a prepared model, and convert that"
    check_model(model, "convert", sharded)
    if not any(isinstance(module, QuantizedLayer) for module in model.modules()):
        done = any(isinstance(module, IntegerLayer) for module in model.modules())
        why = "it is converted already" if done else "run qat.prepare(model) and train it first"
        raise QatError(f"this {type(model).__name__} has no quantized layers: {why}")
    # On the meta device no quantizer has a scale, and none is needed.
    late = [name for name, quantizer in without_scale(model).items() if not quantizer.init_left.is_meta]
    if late:
        raise QatError(
            f"these quantizers have no scale yet: {', '.join(late)}; "
            "run qat.calibrate(model, batches), or train the model, before converting it. Layers that meet nothing but "
            "zeros never have one: leave them out with qat.prepare(model, skip=...)"
        )
