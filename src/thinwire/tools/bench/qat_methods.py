"""The methods that `bench qat` compares: thinwire's quantisers, torch's, and controls that ought to fail.

All quantise the same layers of the same network, weights by output channel and activations by tensor. To add one: write
a function that quantises a network in place and enter it in `METHODS`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.ao.quantization._learnable_fake_quantize import _LearnableFakeQuantize
from torch.ao.quantization.observer import MovingAverageMinMaxObserver, MovingAveragePerChannelMinMaxObserver

from thinwire.qat import LSQ, LearnableFakeQuantize, LSQPlus, fake_quantize, prepare
from thinwire.qat.layers import QuantizedLayer
from thinwire.qat.lsq import Start

FP32 = "fp32"


@dataclass(frozen=True)
class Method:
    """How all layers of a network are quantised in place, given the bits of weights and activations."""

    name: str
    quantize: Callable[[nn.Module, int], None]
    control: bool = False  # ought to fail
    peer: bool = False  # torch's own
    at_all_bits: bool = True  # False => unless asked for, trained at the fewest bits alone: at more it tells nothing

    def start(self, model: nn.Module, images: Tensor, bits: int) -> None:
        """Quantise a trained network, let its quantisers take their ranges from some images, and let them learn."""
        self.quantize(model, bits)
        with torch.no_grad():
            model.eval()(images)
        for module in model.modules():
            if isinstance(module, LearnableFakeQuantize | _LearnableFakeQuantize):
                module.enable_param_learning()


class NoFloor(LSQ):
    """LSQ as the paper has it: nothing catches a scale on its way past zero."""

    floor_share = 0.0


class NoGradientScale(NoFloor):
    """The paper's LSQ without the factor of its scales' gradients."""

    scale_gradient = False


class FloorAlone(LSQ):
    """LSQ without that factor, but with thinwire's floor under its scales."""

    scale_gradient = False


class AbsmaxStart(LSQ):
    """LSQ whose scales start where nothing is clipped: at max|x| / quant_max."""

    def estimate(self, x: Tensor) -> Start | None:
        start = super().estimate(x)
        if start is None:
            return None
        rows = x.detach().flatten(1) if self.axis == 0 else x.detach().reshape(1, -1)
        largest = rows.abs().amax(1) / self._range(start.signed)[1]
        return start._replace(scale_C=largest.where(largest > 0, start.scale_C.to(largest)))


class AbsmaxAlways(AbsmaxStart):
    """Nothing is learned: every tensor is rounded on the grid of its own largest element, straight through."""

    def forward(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        start = self.estimate(x)
        if start is None:
            return x
        low, high = self._range(start.signed)
        return fake_quantize(x, start.scale_C, quant_min=low, quant_max=high, axis=self.axis, gradient="torch")


class FakeQuantAdapter(nn.Sequential):
    """A quantiser by torch's names in the place of one of thinwire's."""

    group = 0


def _by_lsq(kind: type[LSQ], model: nn.Module, bits: int) -> None:
    prepare(model, weight_bits=bits, act_bits=bits, first_last_bits=None, quantizer=kind)


def _by_fake_quant(kind: Callable[..., nn.Module], model: nn.Module, bits: int) -> None:
    """As torch's module is meant: observers give the first ranges, symmetric for weights, affine for activations."""
    _by_lsq(LSQ, model, bits)
    for layer in [module for module in model.modules() if isinstance(module, QuantizedLayer)]:
        layer.register_module("weight_quantizer", FakeQuantAdapter(_weights(kind, bits, len(layer.weight))))
        layer.register_module("act_quantizer", FakeQuantAdapter(_activations(kind, bits)))


def _weights(kind: Callable[..., nn.Module], bits: int, channels: int) -> nn.Module:
    return kind(
        MovingAveragePerChannelMinMaxObserver,
        quant_min=-(1 << bits - 1),
        quant_max=(1 << bits - 1) - 1,
        channel_len=channels,
        use_grad_scaling=True,
        dtype=torch.qint8,
        qscheme=torch.per_channel_symmetric,
        ch_axis=0,
    )


def _activations(kind: Callable[..., nn.Module], bits: int) -> nn.Module:
    return kind(MovingAverageMinMaxObserver, quant_min=0, quant_max=(1 << bits) - 1, use_grad_scaling=True)


_ALL = (
    Method(FP32, lambda model, bits: None),
    Method("lsq", partial(_by_lsq, LSQ)),
    Method("lsqplus", partial(_by_lsq, LSQPlus)),
    Method("learnable", partial(_by_fake_quant, LearnableFakeQuantize)),
    Method("torch_learnable", partial(_by_fake_quant, _LearnableFakeQuantize), peer=True),
    Method("absmax_ste", partial(_by_lsq, AbsmaxAlways), control=True),
    Method("lsq_absmax_init", partial(_by_lsq, AbsmaxStart), control=True, at_all_bits=False),
    Method("lsq_no_grad_scale", partial(_by_lsq, NoGradientScale), control=True, at_all_bits=False),
    Method("lsq_floor_alone", partial(_by_lsq, FloorAlone), at_all_bits=False),
    Method("lsq_no_floor", partial(_by_lsq, NoFloor), at_all_bits=False),
)
METHODS: dict[str, Method] = {method.name: method for method in _ALL}
