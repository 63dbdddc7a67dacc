"""thinwire in the frameworks that people train with. One module a framework, thin over collectives and feedback.

To add one: a function that takes the framework's own object (`compress_ddp(model, ...)`), returns a handle with
`stats`, `state_dict`, `load_state_dict` and `close`, and decides codecs and feedback by `policy`.
"""

from thinwire.integrations.ddp import DDPHandle, DDPState, compress_ddp, ddp_hook
from thinwire.integrations.stats import Stats

__all__ = ["DDPHandle", "DDPState", "Stats", "compress_ddp", "ddp_hook"]
