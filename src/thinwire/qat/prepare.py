"""From a float model to one that trains with quantized layers, the first look at its activations, its parameters."""

import difflib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import nn

from thinwire.errors import QatError
from thinwire.qat.agreement import Ranks
from thinwire.qat.layers import FORMS, KINDS, QuantizedLayer, arguments, check_model, quantize_layer, without_scale
from thinwire.qat.learnable import LearnableFakeQuantize
from thinwire.qat.lsq import BITS, LSQ

Model = TypeVar("Model", bound=nn.Module)
_LISTED = 30  # names that an error lists


def prepare(
    model: Model,
    *,
    weight_bits: int = 4,
    act_bits: int | None = 8,  # None => weights only
    skip: str | Sequence[str] = (),
    first_last_bits: int | None = 8,  # None => they are like the others
    group: int = 0,
    quantizer: type[LSQ] = LSQ,
    init_batches: int = 1,
    process_group: Ranks = None,
) -> Model:
    """Quantize the Linear, Conv1d, Conv2d and Embedding layers of a model, in place; returns the model.

    Layers stay the same objects with the same parameters. Each gets a `weight_quantizer`, with one scale per output
    channel or per `group` weights of a channel, and an `act_quantizer`, with one scale for its input. The first batches
    decide whether that input may be negative. Tied weights stay tied and share their quantizer.

    `skip` leaves layers in full precision: by name, by the name of a module around them, or by pattern ("*.fc1").
    The first and the last layer, in the order in which the model registers them, get `first_last_bits`. Layers of other
    classes, subclasses too, are left as they are, and so are layers that are quantized already: `qat.summary` says so.

    Load pretrained weights before this call, and wrap the model (DDP, fully_shard) after it. Where torch.distributed is
    initialized, all ranks of `process_group` must call it: they share their statistics ("local": each rank alone).
    """
    sharded = "parameters are sharded already: prepare the model, calibrate it, then call fully_shard"
    check_model(model, "prepare", sharded)
    for name, bits in (("weight_bits", weight_bits), ("act_bits", act_bits), ("first_last_bits", first_last_bits)):
        if bits is not None and not (isinstance(bits, int) and bits in BITS):
            raise QatError(f"{name} must be {BITS[0]}..{BITS[-1]}, got {bits!r}")
    found = list(_layers(model))
    chosen = _chosen(model, found, [skip] if isinstance(skip, str) else list(skip))
    _check_group(chosen, group)
    common: dict[str, Any] = {"init_batches": init_batches, "process_group": process_group}
    scales: dict[str, Any] = {"group": group} if group else {"axis": 0}
    ties = {id(one.layer.weight): one.layer.weight_quantizer for one in found if isinstance(one.layer, QuantizedLayer)}
    for tie, most in _bits_of_ties(chosen, weight_bits, first_last_bits).items():
        ties.setdefault(tie, quantizer(most, symmetric=True, **scales, **common))
    for one in chosen:
        act = None
        if act_bits is not None and not isinstance(one.layer, nn.Embedding):
            act = quantizer(one.bits(act_bits, first_last_bits), symmetric="auto", **common)
        tied = ties[id(one.layer.weight)]
        quantize_layer(one.layer, weight_quantizer=tied, act_quantizer=act, note=one.note(tied, weight_bits))
    _leave_fast_paths(model)
    return model


@torch.no_grad()
def calibrate(model: nn.Module, batches: Iterable[Any]) -> None:
    """Run forwards until every quantizer has made its start. Before DDP, fully_shard or torch.compile.

    A batch is a tensor, a tuple of positional arguments or a mapping of named ones; of a loader that yields pairs,
    `(x for x, _ in loader)`. The model stays in the mode it is in: in training, batch norms see these batches too.
    Where torch.distributed is initialized, all ranks must call it with equally many batches. It warns of quantizers
    that no batch reached; they start in the first forward that reaches them.
    """
    left = without_scale(model)
    for batch in batches:
        if not left:
            return
        args, kwargs = arguments(batch)
        model(*args, **kwargs)
        left = without_scale(model)
    if left:
        warnings.warn(f"no usable batch came by {', '.join(left)}", stacklevel=2)


def parameter_groups(
    model: nn.Module, *, weight_decay: float = 0.0, lr: float | None = None, scale_lr: float | None = None
) -> list[dict[str, Any]]:
    """Groups for any optimizer, every parameter of the model in exactly one: "weights", "vectors" and "scales".

    Only weights decay. Vectors (parameters of one dimension, such as biases and norms) do not. Nor do the scales and
    offsets of quantizers: decay would pull them to zero, where a quantizer dies. `lr` is the rate of all groups (None:
    the optimizer's own), `scale_lr` that of the scales (None: as the others).
    """
    for name, value in (("weight_decay", weight_decay), ("lr", lr), ("scale_lr", scale_lr)):
        if value is not None and not value >= 0:
            raise QatError(f"{name} must be 0 or more, got {value!r}")
    quantizers = [module for module in model.modules() if isinstance(module, LSQ | LearnableFakeQuantize)]
    scales = {parameter for quantizer in quantizers for parameter in quantizer.parameters()}
    named: dict[str, list[nn.Parameter]] = {"weights": [], "vectors": [], "scales": []}
    for parameter in model.parameters():
        kind = "scales" if parameter in scales else "weights" if parameter.dim() > 1 else "vectors"
        named[kind].append(parameter)
    rates = {"weights": lr, "vectors": lr, "scales": lr if scale_lr is None else scale_lr}
    groups = []
    for kind, held in named.items():
        if held:
            rate = {} if rates[kind] is None else {"lr": rates[kind]}
            decay = weight_decay if kind == "weights" else 0.0
            groups.append({"name": kind, "params": held, "weight_decay": decay, **rate})
    return groups


# --- which layers ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Found:
    """A layer that has a quantized form, or is one."""

    names: tuple[str, ...]  # every name that it is registered under
    layer: Any
    place: str  # "first", "last", "first and last", or ""

    def bits(self, usual: int, first_last: int | None) -> int:
        return first_last if self.place and first_last is not None else usual

    def note(self, tied: LSQ, usual: int) -> str:
        """What is special about it, for the summary."""
        if self.place:
            return f"{self.place} layer: {tied.bits} bits"
        return "" if tied.bits == usual else f"tied weight: {tied.bits} bits"


def _layers(model: nn.Module) -> Iterator[_Found]:
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    served = {child for module in names if isinstance(module, nn.MultiheadAttention) for child in module.modules()}
    open_to = (m for m in names if type(m) in FORMS or (isinstance(m, QuantizedLayer) and not m.converted))
    layers = [m for m in open_to if m not in served]
    for at, layer in enumerate(layers):
        places = [place for place, here in (("first", at == 0), ("last", at == len(layers) - 1)) if here]
        yield _Found(tuple(names[layer]), layer, " and ".join(places))


def _chosen(model: nn.Module, found: list[_Found], skip: list[str]) -> list[_Found]:
    """Those that are to be quantized. Every pattern must leave out one at least."""
    left = [one for one in found if not any(_matches(name, pattern) for name in one.names for pattern in skip)]
    for pattern in skip:
        if not any(_matches(name, pattern) for one in found for name in one.names):
            raise QatError(f"skip={pattern!r} names no layer that could be quantized; {_near(pattern, found)}")
    chosen = [one for one in left if not isinstance(one.layer, QuantizedLayer)]
    if not chosen:
        raise QatError(
            f"nothing to quantize in this {type(model).__name__}: of {len(found)} layers ({KINDS}) "
            f"{len(found) - len(left)} are skipped and {len(left)} are quantized already"
        )
    return chosen


def _matches(name: str, pattern: str) -> bool:
    """The name itself, a module around it, or a pattern for either."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def _near(pattern: str, found: list[_Found]) -> str:
    names = [name for one in found for name in one.names]
    near = difflib.get_close_matches(pattern, names, cutoff=0.5)
    rest = names[:_LISTED] + (["..."] if len(names) > _LISTED else [])
    return (f"did you mean {' or '.join(near)}? " if near else "") + f"the layers are {', '.join(rest)}"


def _bits_of_ties(chosen: list[_Found], usual: int, first_last: int | None) -> dict[int, int]:
    """The bits of every weight: where layers that share one differ, the most."""
    bits: dict[int, int] = {}
    for one in chosen:
        tie = id(one.layer.weight)
        bits[tie] = max(one.bits(usual, first_last), bits.get(tie, 0))
    return bits


# --- checks ----------------------------------------------------------------------------------------------------------


def _check_group(chosen: list[_Found], group: int) -> None:
    odd = [one.names[0] for one in chosen if group and one.layer.weight[0].numel() % group]
    if odd:
        raise QatError(
            f"group={group} does not divide the weights of an output channel of {', '.join(odd)}; skip them, "
            "and prepare them by a second call without a group"
        )


def _leave_fast_paths(model: nn.Module) -> None:
    """In evaluation torch's encoder layers read weights past their layers' forward, by flags that can be lowered."""
    for module in model.modules():
        if any(isinstance(inner, QuantizedLayer) for inner in module.modules()):
            if isinstance(module, nn.TransformerEncoderLayer):
                module.activation_relu_or_gelu = 0
            elif isinstance(module, nn.TransformerEncoder):
                module.use_nested_tensor = False
