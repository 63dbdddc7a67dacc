"""thinwire in the frameworks that people train with: DDP, FSDP2, DiLoCo.

The road of a bucket: ddp (the hook) → restore (buckets of a resumed run) → averager (lanes, messages, feedback) →
collectives. That of a sharded model's gradients: fsdp_torch (torch's private names) → fsdp (the handle) → sharded and
columns (rows in lanes) → collectives; between replicas of shards the averager again. Beside them: options (what was
asked for), decisions, policy and auto (what travels how), names, lanes, stats and checkpoint.

To add a framework: a function that takes its own object (`compress_ddp(model, ...)`), returns a handle with `stats`,
`state_dict`, `load_state_dict` and `close`, and averages `GradientSet`s with an `Averager`.
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
