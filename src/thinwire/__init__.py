"""thinwire: everything a PyTorch training job puts on the wire, in 1 to 8 bits.

The public surface and nothing else. A name is imported when it is first used, so that `thinwire --help` needs no torch.
To add one: a line in `__all__`, the same in `_NAMES`, and the import that type checkers read.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from thinwire import functional, hooks, optim, qat
    from thinwire.codecs import BlockInt, ByName, BySize, Cast, Codec, Identity, Lloyd, TopK, Trellis, codec
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
        use_checksums,
    )
    from thinwire.errors import (
        BackendError,
        CodecError,
        CollectiveError,
        DisagreementError,
        MissingPackageError,
        NonfiniteError,
        OptimizerError,
        PeerError,
        QatError,
        QatStateError,
        QatTypeError,
        ThinwireError,
        WireError,
    )
    from thinwire.feedback import RowCopy, RowFeedback
    from thinwire.integrations import (
        DDPHandle,
        DDPState,
        DiLoCo,
        FSDPState,
        Stats,
        compress_ddp,
        compress_fsdp,
        ddp_hook,
    )
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
    "DiLoCo",
    "DisagreementError",
    "FSDPState",
    "Identity",
    "Lloyd",
    "MissingPackageError",
    "NonfiniteError",
    "OptimizerError",
    "PeerError",
    "QatError",
    "QatStateError",
    "QatTypeError",
    "RowCopy",
    "RowFeedback",
    "Stats",
    "ThinwireError",
    "TopK",
    "Trellis",
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
    "compress_fsdp",
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
    "use_checksums",
]
__version__ = "0.1.0"  # pyproject.toml reads it from here

_NAMES = {
    "thinwire.codecs": "BlockInt ByName BySize Cast Codec Identity Lloyd TopK Trellis codec",
    "thinwire.collectives": "Work all_gather all_gather_into_tensor all_gather_single all_reduce all_reduce_coalesced "
    "all_to_all all_to_all_single broadcast explain measure reduce_scatter_single reduce_scatter_tensor use_checksums",
    "thinwire.errors": "BackendError CodecError CollectiveError DisagreementError MissingPackageError "
    "NonfiniteError OptimizerError PeerError QatError QatStateError QatTypeError ThinwireError WireError",
    "thinwire.feedback": "RowCopy RowFeedback",
    "thinwire.integrations": "DDPHandle DDPState DiLoCo FSDPState Stats compress_ddp compress_fsdp ddp_hook",
    "thinwire.kernels": "use_backend",
}
_ROOMS = ("codecs", "collectives", "errors", "feedback", "integrations", "kernels", "wire")  # thinwire.errors and so on
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

if not typing.TYPE_CHECKING:  # which would let a checker take any name

    def __getattr__(name: str) -> object:
        """A public name, from its module; `functional`, `hooks`, `optim` and `qat` are modules themselves."""
        if name not in __all__ and name not in _ROOMS:
            raise AttributeError(f"module 'thinwire' has no attribute {name!r}")
        if name in _MODULE_OF:
            value = getattr(importlib.import_module(_MODULE_OF[name]), name)
        else:
            value = importlib.import_module(f"thinwire.{name}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return list(__all__)
