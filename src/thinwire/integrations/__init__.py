"""thinwire in training frameworks: DDP, FSDP2, DiLoCo, Lightning, Accelerate, transformers' Trainer.

The path of a bucket: ddp (the hook) → checkpoint (buckets of a resumed run) → sync (lanes, messages, feedback) →
collectives. Sharded gradients and weights: fsdp/. DiLoCo's rounds take sync's path, too. Weights for workers: weights.
Beside them: choice/ (which codec and feedback a parameter has at a step), models (what is inside what a user passes,
and parameters' names), lanes, stats (what was sent and lost; handles and logs). On top: lightning, accelerate and
transformers, which call `compress_ddp` or `compress_fsdp` at the right time and put the handle's state into the
framework's checkpoints.

To add a framework: do what those three do. To add another kind of parallelism: a `Handle` that averages `GradientSet`s
with a `GradientSync`.
"""

import importlib
import typing

from thinwire.integrations.ddp import DDPHandle, DDPState, compress_ddp, ddp_hook
from thinwire.integrations.stats import Stats
from thinwire.integrations.weights import WeightPublisher, WeightSubscriber

if typing.TYPE_CHECKING:
    from thinwire.integrations.diloco import DiLoCo
    from thinwire.integrations.fsdp import FSDPState, compress_fsdp

__all__ = [
    "DDPHandle",
    "DDPState",
    "DiLoCo",
    "FSDPState",
    "Stats",
    "WeightPublisher",
    "WeightSubscriber",
    "compress_ddp",
    "compress_fsdp",
    "ddp_hook",
]


def __getattr__(name: str) -> object:
    """Names whose modules import much of torch, when they are first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "diloco" if name == "DiLoCo" else "fsdp"
    return getattr(importlib.import_module(f"thinwire.integrations.{module}"), name)
