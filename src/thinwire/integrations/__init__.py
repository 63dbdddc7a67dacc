"""thinwire in the frameworks that people train with: DDP.

The road of a bucket: ddp (the hook) → restore (buckets of a resumed run) → averager (lanes, messages, feedback) →
collectives. Beside it: options (what was asked for), decisions, policy and auto (what travels how), names, lanes, stats
and checkpoint.

To add a framework: a function that takes its own object (`compress_ddp(model, ...)`), returns a handle with `stats`,
`state_dict`, `load_state_dict` and `close`, and averages `GradientSet`s with an `Averager`.
"""

from thinwire.integrations.ddp import DDPHandle, DDPState, compress_ddp, ddp_hook
from thinwire.integrations.stats import Stats

__all__ = ["DDPHandle", "DDPState", "Stats", "compress_ddp", "ddp_hook"]
