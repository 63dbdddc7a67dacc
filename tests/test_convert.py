"""qat.convert: integers in place of floats, bit for bit; what they take, how they are saved, what is refused."""

import copy
import sys
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from cases import assert_same, generated, seeded
from replicas import through_file
from test_prepare import Net, net, tokens
from thinwire import qat
from thinwire.qat.codes import IntegerWeight, unpack
from thinwire.qat.layers import QuantizedEmbedding, QuantizedLinear, quantize_layer, quantized_layers as layers_of
from thinwire.qat.lsq import LSQ, LSQPlus

ROWS, WIDTH = 12, 8  # of the embedding


def packed_bytes(numel: int, bits: int) -> int:
    """Of a row of `numel` codes, which is filled up to a multiple of eight."""
    return -(-numel // 8) * bits


def prepared(dtype: torch.dtype = torch.float32, **how: Any) -> Net:
    """A model whose quantizers have started, its scales away from where they started."""
    model = qat.prepare(net().to(dtype), **how)
    qat.calibrate(model, [tokens()])
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, LSQ):
                module.scale.mul_(1.1)
    return model


integer_layers = partial(layers_of, converted=True)
quantized_layers = partial(layers_of, converted=False)


@given(
    st.data(),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]),
    st.sampled_from([{"axis": 0}, {"axis": None}, {"axis": 1}, {"axis": -1}, {"group": 4}]),
    st.booleans(),
)
@generated(25)
def test_an_integer_weight_is_the_fake_quantized_one(
    data: st.DataObject, dtype: torch.dtype, where: dict[str, Any], shifted: bool
) -> None:
    bits = data.draw(st.integers(2, 8))
    inner = data.draw(st.sampled_from([(4,), (12,), (3, 4), (2, 3, 2)]))
    shape = (data.draw(st.integers(1, 5)), *inner)
    weight = torch.randn(shape, generator=seeded(*shape, bits), dtype=torch.float64).to(dtype)
    weight.view(-1)[::3] *= 100  # far beyond the range
    rows = weight.flatten(1) if "group" in where else weight
    quantizer = (LSQPlus if shifted else LSQ)(bits, symmetric=not shifted, **where).to(dtype).initialize(rows)
    held = IntegerWeight(weight, quantizer)
    assert held.packed.shape == (shape[0], packed_bytes(weight[0].numel(), bits))
    assert_same(held(), quantizer(rows).detach().view(shape))


HOWS: list[dict[str, Any]] = [
    {"weight_bits": 4},
    {"weight_bits": 2, "act_bits": 2, "first_last_bits": None},
    {"weight_bits": 3, "act_bits": None},
    {"weight_bits": 5, "act_bits": 4, "quantizer": LSQPlus},
    {"weight_bits": 4, "group": 4},
    *({"dtype": dtype} for dtype in (torch.float16, torch.bfloat16, torch.float64)),
]


@pytest.mark.parametrize("how", HOWS, ids=lambda how: "-".join(map(str, how.values())))
def test_outputs_are_the_prepared_models_bit_for_bit(how: dict[str, Any]) -> None:
    model = prepared(**how)
    before = copy.deepcopy(model.state_dict())
    converted = qat.convert(model)
    assert not quantized_layers(converted)
    assert integer_layers(converted).keys() == quantized_layers(model).keys()
    for name, layer in integer_layers(converted).items():
        assert_same(layer.quantized_weight(), quantized_layers(model)[name].quantized_weight().detach())
    assert_same(converted(tokens()).detach(), model(tokens()).detach())
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    assert next(p for p in model.parameters() if p.dim() == 2).requires_grad


def test_nothing_of_a_weight_is_left_to_train() -> None:
    converted = qat.convert(prepared())
    left = {name for name, p in converted.named_parameters() if p.requires_grad}
    assert left == {"conv.bias", "norm.weight", "norm.bias", "block.0.bias", "block.2.bias"}
    converted(tokens()).sum().backward()
    assert converted.block[0].bias.grad is not None
    assert not any("weight_quantizer" in key or key.endswith("0.weight") for key in converted.state_dict())


def test_tied_weights_stay_one() -> None:
    converted = qat.convert(prepared())
    assert converted.wte.integer_weight is converted.head.integer_weight
    moved = copy.deepcopy(converted).to(torch.float64).float()
    assert moved.wte.integer_weight.packed.data_ptr() == moved.head.integer_weight.packed.data_ptr()


def test_a_weight_seen_through_two_quantizers_becomes_two() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    quantize_layer(model[0], weight_quantizer=LSQ(2, axis=0))
    quantize_layer(model[1], weight_quantizer=LSQ(8, axis=0))
    x = torch.randn(3, 4, generator=seeded(4))
    want = model(x).detach()
    assert_same(qat.convert(model)(x).detach(), want)


def test_bytes() -> None:
    model = prepared(weight_bits=2, first_last_bits=None)
    floats = 4 * (ROWS * WIDTH + WIDTH * WIDTH // 2 * 3 + 2 * 16 * WIDTH)
    codes = ROWS * packed_bytes(WIDTH, 2) + WIDTH * packed_bytes(12, 2) + 16 * packed_bytes(8, 2) + WIDTH * 4
    scales = 4 * (ROWS + WIDTH + 16 + WIDTH)
    assert qat.weight_bytes(model) == floats
    assert qat.weight_bytes(qat.convert(model)) == codes + scales
    assert qat.weight_bytes(nn.ReLU()) == 0


def test_the_summary_of_a_converted_model() -> None:
    model = prepared(skip="block.2")
    before, after = (qat.summary(one, quiet=True).rows for one in (model, qat.convert(model)))
    kept = ("layer", "kind", "weight_bits", "act_bits", "scale", "act_scale", "act_range")
    assert [[getattr(row, name) for name in kept] for row in after] == [
        [getattr(row, name) for name in kept] for row in before
    ]
    assert {row.layer: row.note for row in after} == {
        "wte": f"first layer: 8 bits; integers, {ROWS * (WIDTH + 4)} bytes",
        "conv": f"integers, {WIDTH * (8 + 4)} bytes",  # rows of 12 codes have room for 16
        "block.0": f"integers, {16 * (4 + 4)} bytes",
        "block.2": "skipped",
        "head": f"last layer: 8 bits; integers, {ROWS * (WIDTH + 4)} bytes",
    }


def test_in_place_the_floats_are_gone() -> None:
    model = prepared()
    want, up, weight = model(tokens()).detach(), model.block[0], weakref.ref(model.block[0].weight)
    called: list[str] = []
    up.register_forward_hook(lambda *_: called.append("up"))
    assert qat.convert(model, inplace=True) is model
    assert model.block[0] is up
    assert isinstance(up, QuantizedLinear)
    assert isinstance(up, nn.Linear)
    assert weight() is None
    assert_same(model(tokens()).detach(), want)
    assert called == ["up"]


def test_an_embedding_decodes_the_rows_looked_up_only(monkeypatch: pytest.MonkeyPatch) -> None:
    embedding = qat.convert(prepared(group=4)).wte
    seen: list[int] = []

    def spy(packed: Tensor, bits: int, numel: int) -> Tensor:
        seen.append(len(packed))
        return unpack(packed, bits, numel)

    monkeypatch.setattr(sys.modules[IntegerWeight.__module__], "unpack", spy)
    assert isinstance(embedding, QuantizedEmbedding)
    table = embedding.integer_weight()
    for index in (torch.tensor([[3, 1], [3, 0]]), torch.tensor(7), torch.empty(2, 0, dtype=torch.int32)):
        assert_same(embedding(index), table[index.long()])
    assert seen == [ROWS, 4, 1, 0]
    for wrong in (ROWS, -1):
        with pytest.raises(IndexError):
            embedding(torch.tensor([wrong]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_casts_change_the_numbers_type_and_lose_nothing(dtype: torch.dtype) -> None:
    converted = qat.convert(prepared())
    before = {name: layer.quantized_weight() for name, layer in integer_layers(converted).items()}
    converted.to(dtype)
    for name, layer in integer_layers(converted).items():
        got, wide = layer.quantized_weight(), torch.promote_types(dtype, torch.float32)
        assert (got.dtype, layer.integer_weight.scale.dtype) == (dtype, wide)
        off = (got.to(wide) - before[name].to(dtype).to(wide)).abs()
        assert (off <= 2**-23 * before[name].abs()).all()  # fp64: the product of code and scale is rounded later
    assert converted(tokens()).dtype == dtype
    converted.float()
    for name, layer in integer_layers(converted).items():
        assert_same(layer.quantized_weight(), before[name])


def test_a_state_dict_goes_round() -> None:
    converted = qat.convert(prepared())
    saved = through_file(converted.state_dict())
    torch.manual_seed(5)
    other = qat.prepare(Net())
    qat.calibrate(other, [tokens(1, 2)])
    other = qat.convert(other)
    assert not torch.equal(other(tokens()), converted(tokens()))
    other.load_state_dict(saved, strict=True)
    with torch.device("meta"):
        skeleton = qat.convert(qat.prepare(Net())).eval()
    skeleton.load_state_dict(converted.state_dict(), strict=True, assign=True)
    for one in (other, skeleton):
        assert_same(one(tokens()).detach(), converted(tokens()).detach())
    assert qat.weight_bytes(skeleton) == qat.weight_bytes(converted)
    with pytest.raises(RuntimeError, match=r"block\.0\.integer_weight\.packed"):
        converted.load_state_dict(qat.convert(prepared(weight_bits=2)).state_dict())


def test_a_compiled_model_is_one_graph_with_the_same_numbers() -> None:
    model = qat.prepare(nn.Sequential(nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, 3)), group=4)
    qat.calibrate(model, [tokens()])
    converted = qat.convert(model)
    compiled = torch.compile(converted, backend="eager", fullgraph=True)
    assert_same(compiled(tokens()).detach(), converted(tokens()).detach())


class Halved(LSQ):
    """A quantizer whose numbers are not those of its scales."""

    def forward(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        return super().forward(x, rows) / 2


def test_what_cannot_be_converted_is_refused_and_left_alone() -> None:
    sharded, rescaled, broken, normed, bare = prepared(), prepared(), prepared(), prepared(), qat.prepare(Net())
    sharded.block[0].weight.placements = sharded.block[0].weight.full_tensor = ()  # what a DTensor is known by
    rescaled.wte.max_norm = 1.0
    nn.utils.parametrizations.weight_norm(normed.block[2])
    with torch.no_grad():
        broken.block[2].weight[3, 2] = torch.nan
    misuse: list[tuple[Any, type[Exception], str]] = [
        (nn.Linear(2, 2), ValueError, r"Linear has no quantized layers: run qat\.prepare"),
        (qat.convert(prepared()), ValueError, "converted already"),
        ("model", TypeError, r"torch\.nn\.Module, got str"),
        (bare, ValueError, r"conv\.act_quantizer, block\.0\.act_quantizer.*qat\.calibrate"),
        (nn.DataParallel(prepared()), ValueError, r"model\.module.*DataParallel"),
        (sharded, ValueError, "full state_dict"),
        (broken, ValueError, r"the weight of block\.2 is not a number"),
        (prepared(quantizer=Halved), TypeError, r"has a Halved.*knows LSQ and LSQPlus"),
        (normed, TypeError, r"block\.2 is a Parametrized.*remove parametrisations"),
        (rescaled, ValueError, "wte rescales rows"),
    ]
    for model, error, said in misuse:
        with pytest.raises(error, match=said):
            qat.convert(model, inplace=True)
    assert len(quantized_layers(broken)) == len(quantized_layers(bare)) == 5
