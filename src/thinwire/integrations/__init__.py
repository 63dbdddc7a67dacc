"""thinwire in the frameworks that people train with: DDP, FSDP2, DiLoCo, Lightning, Accelerate, the Trainer.

The road of a bucket: ddp (the hook) → checkpoint (buckets of a resumed run) → averager (lanes, messages, feedback) →
collectives. That of a sharded model's gradients is in fsdp/, a room of its own. DiLoCo's rounds take the averager's
road too (diloco; fragments and rejoin are its parts). Beside them: options (what was asked for), decisions, policy,
auto and moments (what travels how), nonfinite (NaN and Inf), names (also of what a framework wraps), lanes and stats
(handles, logs). On top: lightning, accelerate and transformers, which call `compress_ddp` or `compress_fsdp` at the
right time, and put the handle's state into the framework's checkpoints.

To add a framework: do what those three do. To add another kind of parallelism: a `Handle` that averages `GradientSet`s
with an `Averager`.
"""

import importlib
import typing

from thinwire.integrations.ddp import DDPHandle, DDPState, compress_ddp, ddp_hook
from thinwire.integrations.stats import Stats

if typing.TYPE_CHECKING:
    from thinwire.integrations.diloco import DiLoCo
    from thinwire.integrations.fsdp import FSDPState, compress_fsdp

__all__ = ["DDPHandle", "DDPState", "DiLoCo", "FSDPState", "Stats", "compress_ddp", "compress_fsdp", "ddp_hook"]


def __getattr__(name: str) -> object:
    """Those with which much of torch comes, when they are first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "diloco" if name == "DiLoCo" else "fsdp"
    return getattr(importlib.import_module(f"thinwire.integrations.{module}"), name)
