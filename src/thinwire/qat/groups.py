"""Parameters sorted for an optimiser: what decays, what does not, and the quantisers' own."""

from typing import Any

from torch import nn

from thinwire.errors import QatError
from thinwire.qat.learnable import LearnableFakeQuantize
from thinwire.qat.lsq import LSQ

_QUANTIZERS = (LSQ, LearnableFakeQuantize)


def parameter_groups(
    model: nn.Module, *, weight_decay: float = 0.0, lr: float | None = None, scale_lr: float | None = None
) -> list[dict[str, Any]]:
    """Groups for any optimiser, every parameter of the model in exactly one: "weights", "vectors" and "scales".

    Only weights decay. Vectors (parameters of one dimension, such as biases and norms) do not. Nor do the scales and
    offsets of quantisers: decay would pull them to zero, where a quantiser dies. `lr` is the rate of all groups (None:
    the optimiser's own), `scale_lr` that of the scales (None: as the others).
    """
    for name, value in (("weight_decay", weight_decay), ("lr", lr), ("scale_lr", scale_lr)):
        if value is not None and not value >= 0:
            raise QatError(f"{name} must be 0 or more, got {value!r}")
    scales = {p for module in model.modules() if isinstance(module, _QUANTIZERS) for p in module.parameters()}
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
