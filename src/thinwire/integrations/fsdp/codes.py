"""Weights of quantised layers in FSDP2: they are gathered as the integers that the layers compute with.

[Note: Codes] Every rank quantises its own rows, and what the others get is exactly what their quantisers would have
made of the gathered weight. So these let it pass. The straight-through rule, which they leave out, is linear in the
gradient: it runs on the shard once the gradients are reduced, see qat/codes.py. Meanwhile scales have gradients of
zero, so that FSDP2 has a place for them in the same buffer.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from thinwire.integrations.fsdp.private import ParameterGroup, ShardedParameter
from thinwire.qat.codes import WeightCodes
from thinwire.qat.layers import QuantizedLayer


class CodedWeight:
    """The weight of a quantised layer that a parameter group holds in shards, like the scales of its rows.

    While what was gathered last is on the quantiser's grid, `quantizer.on_grid` lets it pass.
    """

    def __init__(self, layer: QuantizedLayer, weight: ShardedParameter, scales: Sequence[ShardedParameter]) -> None:
        self.weight = weight
        self.quantizer = layer.weight_quantizer
        self._scales = scales  # and offsets

    @cached_property
    def _codes(self) -> WeightCodes:
        shape = self.weight.shape
        if self.quantizer.group:
            shape = torch.Size((shape[0], shape[1:].numel()))
        return WeightCodes(self.quantizer, shape, rank=self.weight.shard_rank, world=self.weight.shard_world)

    @property
    def wire_bytes(self) -> int:
        """Of every rank's codes and scales."""
        return self._codes.wire_bytes

    def encode(self, wire: Tensor) -> None:
        """wire = the codes of the own rows."""
        self._codes.encode(self._rows(self.weight.local), wire)

    def decode(self, wires_WN: Tensor, parts: Tensor) -> None:
        """parts = the numbers of all ranks' rows, one rank's each, with zeros behind them."""
        for rank, wire in enumerate(wires_WN):
            held = self.weight.held_by(rank)
            self._codes.decode(wire, self._rows(parts[rank, :held]))
            parts[rank, held:] = 0

    def apply_rule(self, gradients: Mapping[str, Tensor]) -> None:
        """From the gradient of the quantised weight's own rows make those of the weight, the scales and the offsets."""
        grad = gradients.get(self.weight.name)
        if grad is None or not self.quantizer.on_grid:
            return
        found = self._codes.gradients(self._rows(self.weight.local), self._rows(grad))
        grad.copy_(found.weight.view(-1))
        for parameter, value in zip(self._scales, found[1:], strict=False):
            if parameter.name in gradients and value is not None:
                gradients[parameter.name].copy_(value)

    def _rows(self, part: Tensor) -> Tensor:
        return part.view(-1, *self._codes.shape[1:])


def coded_weights(group: ParameterGroup) -> tuple[list[CodedWeight], dict[str, str]]:
    """The quantised weights of a group that can travel as codes; why the others cannot, by name."""
    by_name = {parameter.name: parameter for parameter in group.parameters()}
    found = []
    reasons = {}
    for weight in group.parameters():
        layer = weight.module
        if not isinstance(layer, QuantizedLayer) or layer.weight_quantizer is None or weight.attribute != "weight":
            continue
        wanted = ["scale"] if layer.weight_quantizer.offset is None else ["scale", "offset"]
        prefix = f"{weight.name.removesuffix('weight')}weight_quantizer."
        scales = [by_name[prefix + name] for name in wanted if prefix + name in by_name]
        if len(scales) < len(wanted):
            reasons[weight.name] = "its scales are not sharded with it"
        elif why := _why_not(layer, weight, scales):
            reasons[weight.name] = why
        else:
            found.append(CodedWeight(layer, weight, scales))
    return found, reasons


def _why_not(layer: QuantizedLayer, weight: ShardedParameter, scales: Sequence[ShardedParameter]) -> str:
    """What keeps a weight from travelling as codes, the same on every rank; "" if nothing does."""
    quantizer = layer.weight_quantizer
    per_row = weight.shape[1:].numel() // quantizer.group if quantizer.group else 1
    rows = -(-weight.shape[0] // weight.shard_world)
    if not quantizer.group and (quantizer.axis is None or quantizer.axis % len(weight.shape)):
        return "its scales do not belong to rows"
    if any(scale.numel != rows * per_row for scale in scales):
        return "its groups of scales are not cut like its rows"
    if not all(parameter.is_plain for parameter in (weight, *scales)):
        return "it is tied, offloaded to the CPU, or cut in another dimension or by tensor parallelism too"
    if not weight.source.sharded_param.requires_grad and any(s.source.sharded_param.requires_grad for s in scales):
        return "it is frozen and its scales are not"
    return ""
