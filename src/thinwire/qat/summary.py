"""A table of a model's layers: bits, scales, and what quantization does to the weights."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from thinwire.qat.agreement import whole, widest
from thinwire.qat.convert import weight_bytes
from thinwire.qat.layers import FORMS, QuantizedLayer
from thinwire.qat.ops import fake_quantize

_HEADER = ("layer", "kind", "weight bits", "act bits", "scale", "saturated", "SQNR dB", "act scale", "notes")
_NUMBERS = ("weight bits", "act bits", "saturated", "SQNR dB")


@dataclass(frozen=True)
class Row:
    """One layer of a model. What it does not have is None."""

    layer: str
    kind: str
    weight_bits: int | None = None
    act_bits: int | None = None
    scale: tuple[float, float] | None = None  # least and largest of the weight's
    saturation: float | None = None  # share of the weights at or beyond an end of the range; no gradient reaches them
    sqnr_db: float | None = None  # of the weight: 10 log10(its energy / that of what quantization changes)
    act_scale: float | None = None
    act_range: tuple[int, int] | None = None  # of its integers
    note: str = ""


class Summary:
    """The rows of `summary`; `str()` is one line about them, `text()` the table."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows

    def __str__(self) -> str:
        quantized = [row for row in self.rows if row.weight_bits is not None]
        widths = sorted({row.weight_bits for row in quantized if row.weight_bits is not None})
        bits = " and ".join(map(str, widths)) or "no"
        return f"{len(quantized)} layers quantized ({bits} bits), {len(self.rows) - len(quantized)} in full precision"

    def text(self) -> str:
        """The table, in aligned columns."""
        columns = []
        for name, *cells in zip(_HEADER, *map(_cells, self.rows), strict=True):
            justify = str.rjust if name in _NUMBERS else str.ljust
            columns.append([justify(cell, max(map(len, (name, *cells)))) for cell in (name, *cells)])
        return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


@torch.no_grad()
def summary(model: nn.Module, *, quiet: bool = False) -> Summary:
    """Print a table of the model's layers, and return it. `quiet` returns it only.

    Sharded weights (FSDP2) are gathered for it: then all ranks must call.
    """
    prepared = any(isinstance(module, QuantizedLayer) for module in model.modules())
    rows = []
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLayer):
            rows.append(_quantized(name, module))
        elif any(nn.parameter.is_lazy(p) or p.dim() > 1 for p in module.parameters(recurse=False)):
            rows.append(Row(name, type(module).__name__, note=_why_not(module, prepared)))
    found = Summary(rows)
    if not quiet:
        print(found.text())
    return found


def _why_not(module: nn.Module, prepared: bool) -> str:
    """Why a layer is in full precision."""
    if type(module) in FORMS:
        return "skipped" if prepared else "not prepared"
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "its weight is read by the attention around it"
    base = next((kind.__name__ for kind in FORMS if isinstance(module, kind)), None)
    return f"a subclass of {base}: left as it is" if base else "no quantized form"


def _quantized(name: str, layer: QuantizedLayer) -> Row:
    notes = [layer.note]
    if layer.converted:
        weight = layer.integer_weight
        notes.append(f"integers, {weight_bytes(layer)} bytes")
        scale = None if weight.scale.is_meta else (float(weight.scale.min()), float(weight.scale.max()))
        found: dict[str, Any] = {"weight_bits": weight.bits, "scale": scale}
    else:
        found = _trained(layer, notes)
    act = layer.act_quantizer
    if act is not None:
        found["act_bits"] = act.bits
        if act.initialized:
            found |= {"act_scale": float(whole(act.scale)), "act_range": (act.quant_min, act.quant_max)}
    return Row(name, type(layer).__name__.removeprefix("Quantized"), note="; ".join(filter(None, notes)), **found)


def _trained(layer: QuantizedLayer, notes: list[str]) -> dict[str, Any]:
    """The scales of the weight, and what quantization does to it."""
    quantizer = layer.weight_quantizer
    found: dict[str, Any] = {"weight_bits": quantizer.bits}
    both = (("weight", quantizer), ("activation", layer.act_quantizer))
    notes += [f"{name}: no batch yet" for name, one in both if one is not None and not one.initialized]
    if not quantizer.initialized or layer.weight.is_meta:
        return found
    floor = float(quantizer.scale_floor)
    scale_C = whole(quantizer.scale).clamp(min=floor)
    if not scale_C.isfinite().all():
        notes.append("a scale is NaN or Inf")
        return found
    if fallen := int((scale_C <= floor).sum()):
        notes.append(f"scales at their floor: {fallen}")
    w_CN = quantizer.by_channel(whole(layer.weight_rows()))
    low, high = quantizer.quant_min, quantizer.quant_max
    offset_C = torch.zeros_like(scale_C) if quantizer.offset is None else whole(quantizer.offset)
    v_CN = (w_CN - offset_C.unsqueeze(1)) / scale_C.unsqueeze(1)
    y_CN = fake_quantize(w_CN, scale_C, quant_min=low, quant_max=high, offset=offset_C, axis=0)
    signal, noise = (x_CN.square().sum(dtype=widest(w_CN)) for x_CN in (w_CN, y_CN - w_CN))
    return found | {
        "scale": (float(scale_C.min()), float(scale_C.max())),
        "saturation": float(((v_CN <= low) | (v_CN >= high)).double().mean()),
        "sqnr_db": float(10 * (signal / noise).log10()) if signal else None,
    }


def _cells(row: Row) -> list[str]:
    scale = "" if row.scale is None else _span(*row.scale)
    act = "" if row.act_scale is None or row.act_range is None else f"{row.act_scale:.3g} ({_span(*row.act_range)})"
    numbers = [
        "-" if row.weight_bits is None else str(row.weight_bits),
        "-" if row.act_bits is None else str(row.act_bits),
        scale,
        "" if row.saturation is None else f"{row.saturation:.1%}",
        "" if row.sqnr_db is None else f"{row.sqnr_db:.1f}",
    ]
    return [row.layer or "(the model)", row.kind, *numbers, act, row.note]


def _span(low: float, high: float) -> str:
    return f"{low:.3g}" if low == high else f"{low:.3g}..{high:.3g}"
