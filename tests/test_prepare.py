"""qat.prepare, calibrate, parameter_groups and summary: models of many kinds, one process and ranks."""

import copy
import math
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from cases import each_device, no_host_sync, on_ranks, seeded, worlds
from ranks import RankPool
from test_lsq import normal
from thinwire import qat
from thinwire.qat.layers import QuantizedLayer
from thinwire.qat.lsq import LSQ, LSQPlus

Group = dist.ProcessGroup


class Net(nn.Module):
    """An embedding, a convolution, a block of linear layers, a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(12, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1, groups=2)
        self.norm = nn.LayerNorm(8)
        self.block = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.conv(self.wte(tokens).transpose(1, 2)).transpose(1, 2)
        return self.head(self.block(self.norm(x)))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def tokens(seed: int = 0, batch: int = 3) -> Tensor:
    return torch.randint(0, 12, (batch, 5), generator=seeded(seed))


def layers_of(model: nn.Module) -> dict[str, QuantizedLayer]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLayer)}


def bits_of(model: nn.Module) -> dict[str, tuple[int, int | None]]:
    return {
        name: (layer.weight_quantizer.bits, layer.act_quantizer and layer.act_quantizer.bits)
        for name, layer in layers_of(model).items()
    }


# --- what becomes of a model ------------------------------------------------------------------------------------------
def test_layers_are_the_same_objects_with_the_same_parameters() -> None:
    model = net()
    modules, parameters, keys = dict(model.named_modules()), dict(model.named_parameters()), list(model.state_dict())
    called: list[str] = []
    model.conv.register_forward_hook(lambda *_: called.append("conv"))
    model.block.eval()
    assert qat.prepare(model) is model
    assert all(dict(model.named_modules())[name] is module for name, module in modules.items())
    assert all(dict(model.named_parameters())[name] is p for name, p in parameters.items())
    assert set(keys) < set(model.state_dict())
    extra = {key.rsplit(".", 2)[1] for key in model.state_dict() if key not in keys}
    assert extra == {"weight_quantizer", "act_quantizer"}
    model(tokens())
    assert called == ["conv"]
    assert [model.conv.act_quantizer.training, model.block[0].act_quantizer.training] == [True, False]
    assert isinstance(model.conv, nn.Conv1d)


def test_bits_of_first_last_and_tied_layers() -> None:
    assert bits_of(qat.prepare(net())) == {
        "wte": (8, None), "conv": (4, 8), "block.0": (4, 8), "block.2": (4, 8), "head": (8, 8)
    }  # fmt: skip
    alike = bits_of(qat.prepare(net(), weight_bits=3, act_bits=2, first_last_bits=None))
    assert set(alike.values()) == {(3, None), (3, 2)}
    assert {act for _, act in bits_of(qat.prepare(net(), act_bits=None)).values()} == {None}


def test_tied_weights_share_their_quantizer() -> None:
    model = qat.prepare(net(), weight_bits=2, skip="wte", first_last_bits=None)
    assert list(layers_of(model)) == ["conv", "block.0", "block.2", "head"]
    qat.prepare(model, weight_bits=8)
    assert model.wte.weight is model.head.weight
    assert model.wte.weight_quantizer is model.head.weight_quantizer
    assert model.wte.weight_quantizer.bits == 2
    names = [name for name, _ in model.named_parameters()]
    assert "wte.weight_quantizer.scale" in names
    assert "head.weight_quantizer.scale" not in names
    layers = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abc"})
    layers["b"].weight = layers["a"].weight
    assert bits_of(qat.prepare(layers, weight_bits=2)) == {"a": (8, 8), "b": (8, 8), "c": (8, 8)}, "the most of them"
    assert (layers["b"].note, layers["a"].note) == ("tied weight: 8 bits", "first layer: 8 bits")


def test_values_are_those_of_the_quantized_weight_and_input() -> None:
    layer = nn.Linear(6, 4)
    qat.prepare(layer, weight_bits=3, act_bits=3, first_last_bits=None)
    x = normal(5, 6)
    y, weight = layer(x), LSQ(3, axis=0)(layer.weight)
    assert torch.equal(y, nn.functional.linear(LSQ(3)(x), weight, layer.bias))
    y.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d])
@pytest.mark.parametrize("options", [{"stride": 2}, {"groups": 2, "dilation": 2, "bias": False}], ids=str)
def test_convolutions_of_every_padding(kind: type[nn.Conv1d], mode: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    conv = kind(4, 6, 3, padding=2, padding_mode=mode, **options)
    x = normal(*(2, 4, 9, 8)[: 4 if kind is nn.Conv2d else 3])
    plain = copy.deepcopy(conv)
    qat.prepare(conv, weight_bits=4, act_bits=4, first_last_bits=None)
    y = conv(x)
    with torch.no_grad():
        plain.weight.copy_(LSQ(4, axis=0)(plain.weight))
    assert torch.equal(y, plain(LSQ(4)(x)))


@pytest.mark.parametrize("options", [{}, {"padding_idx": 2}, {"max_norm": 1.0}, {"sparse": True}], ids=str)
def test_embeddings_keep_their_options(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer, index = nn.Embedding(7, 4, **options), torch.tensor([[2, 0, 2], [5, 5, 1]])
    plain = copy.deepcopy(layer)
    qat.prepare(layer, weight_bits=4, first_last_bits=None)
    y, before = layer(index), plain(index)
    scale = layer.weight_quantizer.scale[index].unsqueeze(-1)
    assert torch.equal(layer(torch.tensor(5)), y[1, 0])
    assert layer(index[:0]).shape == (0, 3, 4)
    inside = (before / scale).abs() < 7
    assert ((y - before).abs() <= 0.5001 * scale)[inside].all()
    y.sum().backward()
    assert layer.weight.grad.is_sparse == bool(options.get("sparse"))
    if "padding_idx" in options:
        assert not layer.weight.grad[2].any()


@pytest.mark.parametrize("quantizer", [LSQ, LSQPlus])
def test_groups_of_weights(quantizer: type[LSQ]) -> None:
    model = nn.Sequential(nn.Conv2d(2, 6, 2), nn.Flatten(), nn.Linear(24, 4), nn.Linear(4, 4))
    qat.prepare(model, group=4, quantizer=quantizer)
    sizes = [len(layer.weight_quantizer.scale) for layer in layers_of(model).values()]
    assert sizes == [6 * 2, 4 * 6, 4]
    model(normal(3, 2, 3, 3)).sum().backward()
    weight = model[0].weight.detach().reshape(-1, 4)
    once = quantizer(8, symmetric=True, axis=0)
    torch.testing.assert_close(model[0].quantized_weight().flatten(), once(weight).flatten(), rtol=1e-6, atol=1e-7)


@each_device
def test_devices(device: torch.device) -> None:
    """Once started, a step on a GPU never makes the host wait."""
    model, x = qat.prepare(net()).to(device), tokens().to(device)
    lazy, expected = LSQ(4, axis=0).to(device), qat.prepare(net())
    expected(tokens())
    model(x).sum().backward()
    for name, parameter in expected.named_parameters():
        if name.startswith(("wte", "conv")):  # before any product of matrices, which devices add up their own ways
            torch.testing.assert_close(dict(model.named_parameters())[name].cpu(), parameter, rtol=1e-6, atol=0.0)
    lazy(x.float())
    assert lazy.scale.device == device
    optimizer = torch.optim.SGD(qat.parameter_groups(model), lr=0.01)
    with nullcontext() if device.type == "cpu" else no_host_sync():
        model(x).sum().backward()
        optimizer.step()


# --- which layers -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("skip", "left"),
    [
        ("head", ["wte", "conv", "block.0", "block.2"]),
        (("block",), ["wte", "conv", "head"]),
        (("block.0", "wte"), ["conv", "block.2", "head"]),
        (("*.2", "c*"), ["wte", "block.0", "head"]),
        ((), ["wte", "conv", "block.0", "block.2", "head"]),
    ],
)
def test_skip(skip: Any, left: list[str]) -> None:
    assert list(layers_of(qat.prepare(net(), skip=skip))) == left


def test_subclasses_are_left_alone_and_said() -> None:
    class Special(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(4, 4), Special(4, 4), nn.LazyLinear(4), nn.Linear(4, 4))
    qat.prepare(model)
    assert list(layers_of(model)) == ["0", "3"]
    assert [row.note for row in qat.summary(model, quiet=True).rows[1:3]] == ["a subclass of Linear: left as it is"] * 2


def encoder(layers: int) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    return layer if not layers else nn.TransformerEncoder(layer, layers)


@pytest.mark.parametrize("layers", [0, 2])
def test_transformer_encoders_are_quantized_in_evaluation_too(layers: int) -> None:
    model, x = qat.prepare(encoder(layers), weight_bits=2, act_bits=2, first_last_bits=None), normal(2, 5, 8)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    y = model(x, src_key_padding_mask=padding)
    assert set(layers_of(model)) == {
        f"{p}linear{i}" for p in (("layers.0.", "layers.1.") if layers else ("",)) for i in (1, 2)
    }
    model.eval()
    with torch.no_grad():
        z = model(x, src_key_padding_mask=padding)
    torch.testing.assert_close(z[~padding], y[~padding], rtol=1e-5, atol=1e-5)
    notes = {row.kind: row.note for row in qat.summary(model, quiet=True).rows}
    assert notes["MultiheadAttention"] == "no quantized form"
    assert notes["NonDynamicallyQuantizableLinear"] == "its weight is read by the attention around it"


# --- what is refused --------------------------------------------------------------------------------------------------
NAMES = r"wte, conv, block\.0, block\.2, head"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_bits": 1}, r"weight_bits must be 2\.\.8, got 1"),
        *(({"act_bits": bits}, rf"act_bits must be 2\.\.8, got {bits}") for bits in (16, 4.0, 0)),
        ({"first_last_bits": 9}, r"first_last_bits must be 2\.\.8, got 9"),
        ({"init_batches": 0}, "init_batches must be 1 or more"),
        ({"process_group": "all"}, "process_group must be"),
        ({"group": 5}, f"group=5 does not divide .* {NAMES}"),
        *(
            ({"skip": (skip,)}, rf"skip='{skip}' names no layer.*{NAMES}")
            for skip in ("haed", "norm", "block.1", "blo")
        ),
        ({"skip": "haed"}, "did you mean head"),
    ],
)
def test_wrong_options_leave_the_model_as_it_was(options: dict[str, Any], message: str) -> None:
    model = net()
    with pytest.raises(ValueError, match=message):
        qat.prepare(model, **options)
    assert not layers_of(model)


def test_nothing_left_to_quantize() -> None:
    model = qat.prepare(net())
    with pytest.raises(ValueError, match=r"of 5 layers .* 0 are skipped and 5 are quantized already"):
        qat.prepare(model)
    with pytest.raises(ValueError, match="nothing to quantize in this ReLU"):
        qat.prepare(nn.ReLU())


# --- calibration and checkpoints --------------------------------------------------------------------------------------
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x,), lambda x: {"tokens": x}], ids=["one", "tuple", "dict"])
def test_calibrate(wrap: Callable[[Tensor], Any]) -> None:
    model, other = qat.prepare(net(), init_batches=2), qat.prepare(net(), init_batches=2)
    used = iter(wrap(tokens(seed)) for seed in range(9))
    qat.calibrate(model, used)
    assert len(list(used)) == 9 - 3, "one more is drawn than is used"
    assert all(q.initialized for q in model.modules() if isinstance(q, LSQ))
    assert all(p.grad is None for p in model.parameters())
    other(tokens(0))
    other(tokens(1))
    assert torch.equal(model.block[2].act_quantizer.scale, other.block[2].act_quantizer.scale)


def test_calibrate_names_what_no_batch_came_by() -> None:
    model = qat.prepare(nn.ModuleDict({"used": nn.Linear(3, 3), "idle": nn.Linear(3, 3)}))
    model.forward = lambda x: model["used"](x)
    with pytest.warns(UserWarning, match=r"idle\.act_quantizer"):
        qat.calibrate(model, [normal(2, 3)])
    with pytest.raises(TypeError, match="got int"):
        qat.calibrate(model, [3])


def test_a_trained_model_comes_back_from_its_checkpoint() -> None:
    model = qat.prepare(net())
    optimizer = torch.optim.SGD(qat.parameter_groups(model, lr=0.05), lr=1.0)
    for seed in range(3):
        model(tokens(seed)).square().mean().backward()
        optimizer.step()
    fresh = qat.prepare(Net())
    fresh.load_state_dict(model.state_dict())
    for other in (fresh, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(tokens(9)), model(tokens(9)))
        assert other.wte.weight is other.head.weight
        assert other.wte.weight_quantizer is other.head.weight_quantizer


def test_a_float_checkpoint_makes_a_new_start() -> None:
    model = qat.prepare(Net(), weight_bits=2)
    model(tokens())
    missing = model.load_state_dict({key: 3 * value for key, value in net().state_dict().items()}, strict=False)
    assert missing.missing_keys
    expected = qat.prepare(net(), weight_bits=2)
    model(tokens())
    torch.testing.assert_close(model.conv.weight_quantizer.scale, 3 * expected.conv.weight_quantizer.scale)
    assert all(q.initialized for q in model.modules() if isinstance(q, LSQ))


def test_a_model_on_the_meta_device_starts_when_it_is_real() -> None:
    trained = qat.prepare(net())
    trained(tokens())
    with torch.device("meta"):
        model = qat.prepare(Net())
    assert len(model.conv.weight_quantizer.scale) == 8
    assert not model.conv.weight_quantizer.initialized
    model.to_empty(device="cpu")
    model.head.weight = model.wte.weight
    model.load_state_dict(trained.state_dict())
    assert torch.equal(model(tokens(1)), trained(tokens(1)))
    loaded = qat.prepare(Net().to("meta")).to_empty(device="cpu")
    loaded.load_state_dict(net().state_dict(), strict=False)
    loaded.head.weight = loaded.wte.weight
    assert torch.equal(loaded(tokens()), qat.prepare(net())(tokens()))


def test_a_scale_that_fell_in_the_last_step_converts_and_compiles_as_it_is_used() -> None:
    model = qat.prepare(net())
    qat.calibrate(model, [tokens()])
    with torch.no_grad():
        model.conv.weight_quantizer.scale[2] = -1.0
    converted = qat.convert(copy.deepcopy(model))
    assert torch.equal(converted(tokens()), model.eval()(tokens()))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(tokens(1)), model(tokens(1)))


# --- optimizer groups -------------------------------------------------------------------------------------------------
def test_every_parameter_is_in_one_group() -> None:
    model = qat.prepare(net(), quantizer=LSQPlus)
    groups = {group["name"]: group for group in qat.parameter_groups(model, weight_decay=0.1, lr=1e-2, scale_lr=1e-3)}
    held = [p for group in groups.values() for p in group["params"]]
    assert (len(held), set(held)) == (len(set(held)), set(model.parameters()))
    scales = {p for name, p in model.named_parameters() if "quantizer" in name}
    assert set(groups["scales"]["params"]) == scales
    assert set(groups["weights"]["params"]) == {p for p in model.parameters() if p.dim() > 1}
    assert [groups[name]["weight_decay"] for name in ("weights", "vectors", "scales")] == [0.1, 0.0, 0.0]
    assert [groups[name]["lr"] for name in ("weights", "vectors", "scales")] == [1e-2, 1e-2, 1e-3]


# --- summary ----------------------------------------------------------------------------------------------------------
def test_summary_tells_what_quantization_does(capsys: pytest.CaptureFixture[str]) -> None:
    model = qat.prepare(net(), weight_bits=2, skip="block.0")
    summary, printed = qat.summary(model), capsys.readouterr().out
    assert printed.strip() == summary.text()
    assert "\x1b" not in printed
    lines = {line.split()[0]: line for line in printed.splitlines()}
    assert list(lines) == ["layer", "wte", "conv", "block.0", "block.2", "head"]
    assert "first layer: 8 bits" in lines["wte"]
    assert lines["block.0"].endswith("skipped")
    assert "activation: no batch yet" in lines["conv"]
    assert str(summary) == "4 layers quantized (2 and 8 bits), 1 in full precision"

    row = summary.rows[1]
    weight, scale = (t.detach().double() for t in (model.conv.weight, model.conv.weight_quantizer.scale.view(-1, 1, 1)))
    codes = (weight / scale).round().clamp(-2, 1)
    noise = (codes * scale - weight).square().sum()
    assert (row.weight_bits, row.act_bits) == (2, 8)
    assert row.scale == (scale.min().item(), scale.max().item())
    assert row.sqnr_db == pytest.approx(10 * math.log10(weight.square().sum() / noise), rel=1e-5)
    assert row.saturation == ((weight / scale <= -2) | (weight / scale >= 1)).double().mean()


def test_summary_of_dead_and_broken_scales() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    nn.init.zeros_(model[0].weight)
    qat.prepare(model)
    with torch.no_grad():
        model[1].weight_quantizer.scale[1] = -1.0
        model[2].weight_quantizer.scale[1] = math.nan
    rows = qat.summary(model, quiet=True).rows
    assert rows[0].sqnr_db is None
    assert rows[1].note == "activation: no batch yet; scales at their floor: 1"
    assert rows[2].note.endswith("activation: no batch yet; a scale is NaN or Inf")


# --- ranks ------------------------------------------------------------------------------------------------------------
def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).double()


def data(world: int) -> Tensor:
    return torch.randn(2, world * 4, 6, generator=seeded(3), dtype=torch.float64)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, shards: list[Tensor], weight: float) -> None:
    for x in shards:
        (weight * model(x).square().mean()).backward()
    optimizer.step()
    optimizer.zero_grad()


def train(group: Group, wrapper: str, when: str) -> dict[str, Tensor]:
    """Two steps; calibrated before, or by the first forward."""
    world, rank = group.size(), group.rank()
    batches = [x.chunk(world)[rank] for x in data(world)]
    model = qat.prepare(small(), weight_bits=3, act_bits=3)
    if when == "calibrated":
        qat.calibrate(model, batches)
    wrapped = DistributedDataParallel(model) if wrapper == "ddp" else fully_shard(model)
    optimizer = torch.optim.SGD(qat.parameter_groups(model), lr=0.05)
    for x in batches:
        step(wrapped, optimizer, [x], 1.0)
    table = qat.summary(model, quiet=True)
    assert len(table.rows) == 3
    whole = {name: p.full_tensor() if wrapper == "fsdp" else p for name, p in model.named_parameters()}
    return {name: p.detach().clone() for name, p in whole.items()}


def train_alone(world: int) -> dict[str, Tensor]:
    """The same on one process: gradients of all shards, of which each has its own factor by its own elements."""
    model = qat.prepare(small(), weight_bits=3, act_bits=3)
    qat.calibrate(model, [data(world)[0]])
    optimizer = torch.optim.SGD(qat.parameter_groups(model), lr=0.05)
    for x in data(world):
        step(model, optimizer, list(x.chunk(world)), 1 / world)
    return {name: p.detach() for name, p in model.named_parameters()}


@worlds(3, rare=[2])
@pytest.mark.parametrize(("wrapper", "when"), [("ddp", "calibrated"), ("ddp", "in training"), ("fsdp", "calibrated")])
def test_ranks_train_alike(ranks: RankPool, world: int, wrapper: str, when: str) -> None:
    found = ranks(world).run(train, wrapper, when)
    alone = train_alone(world)
    for rank in found[1:]:
        assert all(torch.equal(rank[name], found[0][name]) for name in alone)
    for name, value in alone.items():
        # Doubles, added over ranks in another order: two steps of a few roundings each.
        torch.testing.assert_close(found[0][name], value, rtol=1e-13, atol=1e-14)


@on_ranks(2)
def test_fsdp2_before_the_start(group: Group) -> None:
    model, plain = fully_shard(qat.prepare(small())), fully_shard(small())
    with pytest.raises((RuntimeError, ValueError), match=r"run qat.calibrate\(model, batches\) before fully_shard"):
        model(data(1)[0])
    with pytest.raises((RuntimeError, ValueError), match="sharded already"):
        qat.prepare(plain)
    with pytest.raises(ValueError, match=r"model\.module"):
        qat.prepare(DistributedDataParallel(small()))
