"""qat.export: the ONNX file computes what the model does, in the integers that ONNX has for it.

Scales here are powers of two and biases multiples of a small one: then products and sums are exact in fp32, and the
order in which onnx's reference adds does not matter. Its rounding of x / scale is then that of x * (1 / scale), too.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import ModelProto, TensorProto
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn
from torch.ao.quantization import MinMaxObserver

from cases import assert_same, seeded, thorough
from thinwire import qat
from thinwire.qat.layers import quantize_layer
from thinwire.qat.lsq import LSQ, LSQPlus

BATCH = {0: torch.export.Dim.DYNAMIC}


class Net(nn.Module):
    """A convolution, an embedding and linear layers: one tied to the embedding, two that read one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1, stride=2)
        self.table = nn.Embedding(6, 8)
        self.up = nn.Linear(24, 8)
        self.head, self.side = nn.Linear(8, 6), nn.Linear(8, 6)
        self.head.weight = self.table.weight
        self.drop = nn.Dropout(0.5)

    def forward(self, image: Tensor, token: Tensor) -> Tensor:
        seen = torch.relu(self.conv(image)).flatten(1)
        both = self.drop(self.up(torch.cat([seen, self.table(token)], 1))).relu()
        return self.head(both) + self.side(both)


def inputs(batch: int = 3) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 1, 4, 4, generator=seeded(batch)), torch.arange(batch) % 6


def trained(**how: Any) -> Net:
    torch.manual_seed(0)
    model = qat.prepare(Net(), **how)
    qat.calibrate(model, [inputs()])
    return exact(model)


@torch.no_grad()
def exact(model: Any) -> Any:
    """Numbers whose products and sums fp32 holds."""
    for module in model.modules():
        if isinstance(module, LSQ):
            module.scale.copy_(torch.exp2(module.scale.log2().round()))
            if module.offset is not None:
                module.offset.copy_((module.offset * 64).round() / 64)
        elif getattr(module, "bias", None) is not None:
            module.bias.copy_((module.bias * 64).round() / 64)
    return model


def run(graph: ModelProto, *values: Tensor) -> Tensor:
    names = [found.name for found in graph.graph.input]
    (result,) = ReferenceEvaluator(graph).run(None, dict(zip(names, (v.numpy() for v in values), strict=True)))
    return torch.from_numpy(result)


def types(graph: ModelProto) -> dict[str, str]:
    return {found.name: TensorProto.DataType.Name(found.data_type) for found in graph.graph.initializer}


@pytest.mark.parametrize(
    ("how", "opset", "weight", "acts"),
    [
        ({"weight_bits": 3, "act_bits": 3, "quantizer": LSQPlus, "group": 4, "skip": "conv"}, 21, "INT4", {"UINT4"}),
        ({"weight_bits": 2, "act_bits": 2}, 19, "INT8", {"INT8", "UINT8"}),  # before opset 21 there is nothing narrower
        *thorough(({"weight_bits": 4, "act_bits": 8}, 21, "INT4", {"INT8", "UINT8"})),
    ],
    ids=["w3a3-offsets-groups", "w2a2-before-int4", "w4a8"],
)
def test_the_file_computes_what_the_model_does(
    tmp_path: Path, how: dict[str, Any], opset: int, weight: str, acts: set[str]
) -> None:
    model = trained(**how, first_last_bits=None)
    qat.export(model, inputs(), tmp_path / "net.onnx", opset=opset, dynamic_shapes=(BATCH, BATCH))
    assert model.training
    graph, converted = onnx.load(tmp_path / "net.onnx"), qat.convert(model).eval()
    for batch in (3, 5):
        assert_same(run(graph, *inputs(batch)), converted(*inputs(batch)).detach())
    found = types(graph)
    assert found["up.integer_weight.integers"] == weight
    zero_points = [node.input[2] for node in graph.graph.node if node.op_type == "QuantizeLinear"]
    assert len(zero_points) == (3 if "skip" in how else 4)
    assert {found[name] for name in zero_points} == acts
    assert ("table.integer_weight.integers" in found) != ("head.integer_weight.integers" in found)  # tied: stored once
    narrow = how["act_bits"] < (4 if opset >= 21 else 8)
    assert ("Min" in [node.op_type for node in graph.graph.node]) == narrow


def test_converted_models_in_half_precision_with_names(tmp_path: Path) -> None:
    layer = quantize_layer(
        nn.Linear(8, 4), weight_quantizer=LSQ(8, axis=1), act_quantizer=LSQ(5, axis=-1, symmetric=True)
    )
    x = torch.randn(3, 8, generator=seeded(1))
    layer(x)
    converted = qat.convert(exact(layer)).half().eval()
    names: Any = {"input_names": ["features"], "output_names": ["scores"]}
    qat.export(converted, {"input": x.half()}, str(tmp_path / "layer.onnx"), **names)
    graph = onnx.load(tmp_path / "layer.onnx")
    assert [graph.graph.input[0].name, graph.graph.output[0].name] == ["features", "scores"]
    assert graph.graph.output[0].type.tensor_type.elem_type == TensorProto.FLOAT16
    torch.testing.assert_close(run(graph, x.half()), converted(x.half()).detach(), rtol=2**-10, atol=0)
    assert isinstance(converted.act_quantizer, LSQ)


def learnable() -> nn.Module:
    model = trained()
    model.drop = qat.LearnableFakeQuantize(MinMaxObserver)  # type: ignore[assignment]
    return model


def in_groups() -> nn.Module:
    layer = quantize_layer(nn.Linear(8, 4), weight_quantizer=LSQ(axis=0), act_quantizer=LSQ(group=4))
    layer(torch.randn(3, 8, generator=seeded(1)))
    return nn.Sequential(layer)


@pytest.mark.parametrize(
    ("make", "opset", "message"),
    [
        (trained, 17, "opset must be 18 or more"),
        (lambda: nn.Linear(2, 2), 21, r"no quantized layers: run qat\.prepare"),
        (learnable, 21, "drop is a LearnableFakeQuantize"),
        (in_groups, 21, r"0\.act_quantizer quantizes an activation in groups"),
    ],
)
def test_what_onnx_cannot_say_is_refused(
    tmp_path: Path, make: Callable[[], nn.Module], opset: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        qat.export(make(), inputs(), tmp_path / "net.onnx", opset=opset)
    assert not list(tmp_path.iterdir())


def test_without_onnx_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(qat.export.__globals__, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs onnx and onnxscript.*thinwire\[export\]"):
        qat.export(trained(), inputs(), tmp_path / "net.onnx")
