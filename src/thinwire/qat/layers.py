"""Layers that see their weight, and what comes in, through quantizers.

[Note: The same module] `quantize_layer` gives a layer another class and two submodules; it stays the same object with
the same parameters. So hooks, names, ties, devices and other holders of the layer notice nothing, and
`isinstance(layer, nn.Linear)` is still true.

To add a layer: subclass it with `QuantizedLayer` first, write its forward, enter it in `FORMS`.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear

from thinwire.errors import QatError, QatTypeError
from thinwire.qat.agreement import is_sharded
from thinwire.qat.codes import IntegerWeight
from thinwire.qat.lsq import LSQ


class QuantizedLayer(nn.Module):
    """What quantized layers share. They are made by `quantize_layer` from a layer that exists."""

    weight: Tensor
    weight_quantizer: LSQ
    integer_weight: IntegerWeight  # once converted, in place of the two above
    act_quantizer: LSQ | None  # None => what comes in is left as it is
    note: str  # what is special about it, for the summary

    @property
    def converted(self) -> bool:
        """Whether it holds integers instead of a weight and its quantizer."""
        return "integer_weight" in self._modules

    def weight_rows(self) -> Tensor:
        """The weight as its quantizer takes it: with groups, all weights of an output in one row."""
        return self.weight.flatten(1) if self.weight_quantizer.group else self.weight

    def quantized_weight(self) -> Tensor:
        """The weight as the layer uses it."""
        if self.converted:
            whole: Tensor = self.integer_weight()
            return whole
        quantized: Tensor = self.weight_quantizer(self.weight_rows())
        return quantized.view_as(self.weight)

    def quantized_input(self, x: Tensor) -> Tensor:
        """What comes in as the layer uses it."""
        return x if self.act_quantizer is None else self.act_quantizer(x)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        fresh = prefix + "weight" in state_dict and prefix + "weight_quantizer.scale" not in state_dict
        if fresh and not self.converted:
            # A checkpoint of the float model, loaded with strict=False: these are other weights.
            for quantizer in filter(None, (self.weight_quantizer, self.act_quantizer)):
                quantizer.reset_parameters()


class QuantizedLinear(QuantizedLayer, nn.Linear):
    """nn.Linear through quantizers."""

    def forward(self, input: Tensor) -> Tensor:
        """As nn.Linear."""
        return linear(self.quantized_input(input), self.quantized_weight(), self.bias)


class QuantizedConv1d(QuantizedLayer, nn.Conv1d):
    """nn.Conv1d through quantizers. It pads its input after quantizing it."""

    def forward(self, input: Tensor) -> Tensor:
        """As the layer without quantizers."""
        convolved: Tensor = self._conv_forward(self.quantized_input(input), self.quantized_weight(), self.bias)
        return convolved


class QuantizedConv2d(QuantizedLayer, nn.Conv2d):
    """nn.Conv2d through quantizers."""

    forward = QuantizedConv1d.forward


class QuantizedEmbedding(QuantizedLayer, nn.Embedding):
    """nn.Embedding of a quantized table. Only the rows looked up are quantized, so sparse gradients stay sparse."""

    def forward(self, input: Tensor) -> Tensor:
        """As nn.Embedding."""
        if self.converted:
            return self.integer_weight.rows(input)
        if not self.weight_quantizer.initialized:
            self.weight_quantizer.initialize(self.weight)
        found = super().forward(input)
        quantized: Tensor = self.weight_quantizer(found.view(-1, self.embedding_dim), rows=input.reshape(-1))
        return quantized.view_as(found)


FORMS: dict[type[nn.Module], type[QuantizedLayer]] = {
    nn.Linear: QuantizedLinear,
    nn.Conv1d: QuantizedConv1d,
    nn.Conv2d: QuantizedConv2d,
    nn.Embedding: QuantizedEmbedding,
}
KINDS = ", ".join(kind.__name__ for kind in FORMS)


def quantize_layer(
    layer: nn.Module, *, weight_quantizer: LSQ, act_quantizer: LSQ | None = None, note: str = ""
) -> QuantizedLayer:
    """Make the layer a quantized one, in place. A weight quantizer that is not initialized starts from the weight."""
    form = FORMS.get(type(layer))
    if form is None:
        raise QatTypeError(f"expected a layer that is exactly one of {KINDS}, got {type(layer).__name__}")
    if act_quantizer is not None and form is QuantizedEmbedding:
        raise QatError("an embedding takes indices: it has a weight_quantizer only")
    if form is QuantizedEmbedding and not (weight_quantizer.group or weight_quantizer.axis == 0):
        raise QatError("the rows of an embedding need scales of their own: axis=0 or a group")
    layer.__class__ = form
    assert isinstance(layer, QuantizedLayer)
    layer.note = note
    layer.register_module("weight_quantizer", weight_quantizer)
    layer.register_module("act_quantizer", act_quantizer)
    for quantizer in filter(None, (weight_quantizer, act_quantizer)):
        quantizer.to(layer.weight.device, layer.weight.dtype).train(layer.training)
    if not weight_quantizer.initialized:
        weight_quantizer.initialize(layer.weight_rows())
    return layer


def quantized_layers(model: nn.Module, *, converted: bool) -> dict[str, QuantizedLayer]:
    """The quantized layers of a model by name, those that `qat.convert` has converted or the others."""
    found = ((name, module) for name, module in model.named_modules() if isinstance(module, QuantizedLayer))
    return {name: layer for name, layer in found if layer.converted == converted}


def check_model(model: nn.Module, verb: str, sharded: str) -> None:
    """Reject what is no module, or is wrapped already; `sharded` is the error text for sharded parameters."""
    if not isinstance(model, nn.Module):
        raise QatTypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise QatError(f"{verb} the model itself (model.module), not the {type(model).__name__} around it")
    if any(is_sharded(parameter) for parameter in model.parameters()):
        raise QatError(sharded)


def without_scale(model: nn.Module) -> dict[str, LSQ]:
    """The quantizers that have no scale yet, by name."""
    found = ((name, module) for name, module in model.named_modules() if isinstance(module, LSQ))
    return {name: quantizer for name, quantizer in found if not quantizer.initialized}


def arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a model is called with for a batch: a tensor, a tuple of positional arguments or a mapping of named ones."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, tuple | list):
        return tuple(batch), {}
    if isinstance(batch, Tensor):
        return (batch,), {}
    raise QatTypeError(f"a batch must be a tensor, a tuple or a mapping, got {type(batch).__name__}")
