"""Layers that see their weight, and what comes in, through quantisers.

[Note: The same module] `quantise_layer` gives a layer another class and two submodules; it stays the same object with
the same parameters. So hooks, names, ties, devices and whoever else holds the layer know nothing of it, and
`isinstance(layer, nn.Linear)` is still true.

To add a layer: subclass it with `QuantisedLayer` first, write its forward, enter it in `FORMS`.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear

from thinwire.qat.lsq import LSQ


class QuantisedLayer(nn.Module):
    """What quantised layers share. They are made by `quantise_layer` from a layer that exists."""

    weight: Tensor
    weight_quantiser: LSQ
    act_quantiser: LSQ | None  # None => what comes in is left as it is
    note: str  # what is special about it, for the summary

    def weight_rows(self) -> Tensor:
        """The weight as its quantiser takes it: groups run through all that one output is made of."""
        return self.weight.flatten(1) if self.weight_quantiser.group else self.weight

    def quantised_weight(self) -> Tensor:
        """The weight as the layer uses it."""
        quantised: Tensor = self.weight_quantiser(self.weight_rows())
        return quantised.view_as(self.weight)

    def quantised_input(self, x: Tensor) -> Tensor:
        """What comes in as the layer uses it."""
        return x if self.act_quantiser is None else self.act_quantiser(x)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        fresh = prefix + "weight" in state_dict and prefix + "weight_quantiser.scale" not in state_dict
        if fresh:  # a checkpoint of the float model, loaded with strict=False: these are other weights
            for quantiser in filter(None, (self.weight_quantiser, self.act_quantiser)):
                quantiser.reset_parameters()


class QuantisedLinear(QuantisedLayer, nn.Linear):
    """nn.Linear through quantisers."""

    def forward(self, input: Tensor) -> Tensor:
        """As nn.Linear."""
        return linear(self.quantised_input(input), self.quantised_weight(), self.bias)


class _QuantisedConvolution(QuantisedLayer):
    """Padding is added to the quantised input."""

    bias: Tensor | None
    _conv_forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]

    def forward(self, input: Tensor) -> Tensor:
        """As the convolution it is made of."""
        return self._conv_forward(self.quantised_input(input), self.quantised_weight(), self.bias)


class QuantisedConv1d(_QuantisedConvolution, nn.Conv1d):
    """nn.Conv1d through quantisers."""


class QuantisedConv2d(_QuantisedConvolution, nn.Conv2d):
    """nn.Conv2d through quantisers."""


class QuantisedEmbedding(QuantisedLayer, nn.Embedding):
    """nn.Embedding of a quantised table. Only the rows looked up are quantised, so sparse gradients stay sparse."""

    def forward(self, input: Tensor) -> Tensor:
        """As nn.Embedding."""
        if not self.weight_quantiser.initialised:
            self.weight_quantiser.initialise(self.weight)
        found = super().forward(input)
        quantised: Tensor = self.weight_quantiser(found.view(-1, self.embedding_dim), rows=input.reshape(-1))
        return quantised.view_as(found)


FORMS: dict[type[nn.Module], type[QuantisedLayer]] = {
    nn.Linear: QuantisedLinear,
    nn.Conv1d: QuantisedConv1d,
    nn.Conv2d: QuantisedConv2d,
    nn.Embedding: QuantisedEmbedding,
}


def quantise_layer(
    layer: nn.Module, *, weight_quantiser: LSQ, act_quantiser: LSQ | None = None, note: str = ""
) -> QuantisedLayer:
    """Make the layer a quantised one, in place. A weight quantiser that is not initialised starts from the weight."""
    form = FORMS.get(type(layer))
    if form is None:
        kinds = ", ".join(kind.__name__ for kind in FORMS)
        raise TypeError(f"expected a layer that is exactly one of {kinds}, got {type(layer).__name__}")
    if act_quantiser is not None and form is QuantisedEmbedding:
        raise ValueError("an embedding takes indices: it has a weight_quantiser only")
    if form is QuantisedEmbedding and not (weight_quantiser.group or weight_quantiser.axis == 0):
        raise ValueError("the rows of an embedding need scales of their own: axis=0 or a group")
    layer.__class__ = form
    assert isinstance(layer, QuantisedLayer)
    layer.note = note
    layer.register_module("weight_quantiser", weight_quantiser)
    layer.register_module("act_quantiser", act_quantiser)
    for quantiser in filter(None, (weight_quantiser, act_quantiser)):
        quantiser.to(layer.weight.device, layer.weight.dtype).train(layer.training)
    if not weight_quantiser.initialised:
        weight_quantiser.initialise(layer.weight_rows())
    return layer
