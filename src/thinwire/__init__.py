"""thinwire: everything a PyTorch training job puts on the wire, in 1 to 8 bits.

The public surface and nothing else.
"""

import importlib
import types

from thinwire import functional, hooks, optim
from thinwire.codecs import BlockInt, ByName, BySize, Cast, Codec, Identity, Lloyd, codec
from thinwire.collectives import (
    Work,
    all_gather,
    all_gather_into_tensor,
    all_gather_single,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    all_to_all_single,
    broadcast,
    explain,
    measure,
    reduce_scatter_single,
    reduce_scatter_tensor,
)
from thinwire.errors import BackendError, CodecError, CollectiveError, DisagreementError, ThinwireError, WireError
from thinwire.integrations import DDPHandle, DDPState, Stats, compress_ddp, ddp_hook
from thinwire.kernels import use_backend

__all__ = [
    "BackendError",
    "BlockInt",
    "ByName",
    "BySize",
    "Cast",
    "Codec",
    "CodecError",
    "CollectiveError",
    "DDPHandle",
    "DDPState",
    "DisagreementError",
    "Identity",
    "Lloyd",
    "Stats",
    "ThinwireError",
    "WireError",
    "Work",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "codec",
    "compress_ddp",
    "ddp_hook",
    "explain",
    "functional",
    "hooks",
    "measure",
    "optim",
    "qat",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "use_backend",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> types.ModuleType:
    """thinwire.qat: imported when it is asked for, since torch.ao takes its time."""
    if name == "qat":
        return importlib.import_module("thinwire.qat")
    raise AttributeError(f"module 'thinwire' has no attribute {name!r}")
