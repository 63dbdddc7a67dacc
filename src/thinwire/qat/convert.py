"""From fake quantization to integers: layers that keep their weight as packed codes.

[Note: Exactly the trained numbers] The numbers a converted layer computes with are those of its fake quantizer, bit for
bit, and the same kernels of torch work on them, so outputs are the same bits too. `convert` compares every weight.
"""

import copy
from typing import Any, TypeVar

import torch
from torch import nn

from thinwire.errors import QatError, QatTypeError
from thinwire.qat.codes import IntegerWeight
from thinwire.qat.layers import FORMS, QuantizedLayer, check_model, quantized_layers, without_scale
from thinwire.qat.lsq import LSQ

Model = TypeVar("Model", bound=nn.Module)


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
    trained = quantized_layers(model, converted=False)
    ties: dict[tuple[int, int], IntegerWeight] = {}
    held = {}
    for name, layer in trained.items():
        tie = id(layer.weight), id(layer.weight_quantizer)
        held[name] = ties[tie] = ties.get(tie) or _integers(name, layer)
    for name, layer in trained.items():
        del layer.weight, layer.weight_quantizer
        layer.integer_weight = held[name]
    for module in model.modules():
        if isinstance(module, LSQ):
            module.requires_grad_(False)
    return model


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the weights of a model's Linear, Conv1d, Conv2d and Embedding layers, prepared, converted or neither.

    Every tensor counts once, however many layers share it. Converted weights count with their scales and offsets.
    """
    found: dict[int, int] = {}
    for module in model.modules():
        held: list[Any] = []
        if isinstance(module, QuantizedLayer) and module.converted:
            held = [module.integer_weight.packed, module.integer_weight.scale, module.integer_weight.offset]
        elif isinstance(module, tuple(FORMS)):
            held = [module.weight]
        found |= {id(tensor): tensor.nbytes for tensor in held if tensor is not None}
    return sum(found.values())


def _integers(name: str, layer: QuantizedLayer) -> IntegerWeight:
    """The layer's weight as integers. [Note: Exactly the trained numbers]"""
    if type(layer) not in FORMS.values():
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
    if not quantized_layers(model, converted=False):
        done = quantized_layers(model, converted=True)
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
