"""thinwire: everything a PyTorch training job puts on the wire, in 1 to 8 bits.

The public surface and nothing else. A name is imported when it is first used, so that `thinwire --help` needs no torch.
To add a name: list it in `_NAMES`, and import it for type checkers.
"""

import importlib
import sys
import typing

from thinwire.version import __version__ as __version__

if typing.TYPE_CHECKING:
    from thinwire import exact as exact, functional as functional, hooks as hooks, qat as qat
    from thinwire.codecs import (
        BlockInt as BlockInt,
        ByName as ByName,
        BySize as BySize,
        Cast as Cast,
        Codec as Codec,
        Identity as Identity,
        Lloyd as Lloyd,
        TopK as TopK,
        Trellis as Trellis,
        codec as codec,
    )
    from thinwire.collectives import (
        Work as Work,
        all_gather as all_gather,
        all_gather_into_tensor as all_gather_into_tensor,
        all_gather_single as all_gather_single,
        all_reduce as all_reduce,
        all_reduce_coalesced as all_reduce_coalesced,
        all_to_all as all_to_all,
        all_to_all_single as all_to_all_single,
        batch_isend_irecv as batch_isend_irecv,
        broadcast as broadcast,
        explain as explain,
        irecv as irecv,
        isend as isend,
        measure as measure,
        recv as recv,
        reduce_scatter_single as reduce_scatter_single,
        reduce_scatter_tensor as reduce_scatter_tensor,
        send as send,
    )
    from thinwire.errors import (
        BackendError as BackendError,
        CodecError as CodecError,
        CollectiveError as CollectiveError,
        DisagreementError as DisagreementError,
        MissingPackageError as MissingPackageError,
        NonfiniteError as NonfiniteError,
        PeerError as PeerError,
        QatError as QatError,
        QatStateError as QatStateError,
        QatTypeError as QatTypeError,
        ThinwireError as ThinwireError,
        WireError as WireError,
    )
    from thinwire.feedback import RowCopy as RowCopy, RowFeedback as RowFeedback
    from thinwire.group import GroupOptions as GroupOptions
    from thinwire.integrations.ddp import (
        DDPHandle as DDPHandle,
        DDPState as DDPState,
        compress_ddp as compress_ddp,
        ddp_hook as ddp_hook,
    )
    from thinwire.integrations.diloco import DiLoCo as DiLoCo
    from thinwire.integrations.fsdp import FSDPState as FSDPState, compress_fsdp as compress_fsdp
    from thinwire.integrations.stats import Stats as Stats
    from thinwire.integrations.weights import WeightPublisher as WeightPublisher, WeightSubscriber as WeightSubscriber
    from thinwire.kernels import use_backend as use_backend
    from thinwire.rehearsal import rehearse as rehearse, report_loss as report_loss

_NAMES = {
    "thinwire.codecs": "BlockInt ByName BySize Cast Codec Identity Lloyd TopK Trellis codec",
    "thinwire.collectives": "Work all_gather all_gather_into_tensor all_gather_single all_reduce all_reduce_coalesced "
    "all_to_all all_to_all_single batch_isend_irecv broadcast explain irecv isend measure recv reduce_scatter_single "
    "reduce_scatter_tensor send",
    "thinwire.errors": "BackendError CodecError CollectiveError DisagreementError MissingPackageError "
    "NonfiniteError PeerError QatError QatStateError QatTypeError ThinwireError WireError",
    "thinwire.feedback": "RowCopy RowFeedback",
    "thinwire.group": "GroupOptions",
    "thinwire.integrations.ddp": "DDPHandle DDPState compress_ddp ddp_hook",
    "thinwire.integrations.diloco": "DiLoCo",
    "thinwire.integrations.fsdp": "FSDPState compress_fsdp",
    "thinwire.integrations.stats": "Stats",
    "thinwire.integrations.weights": "WeightPublisher WeightSubscriber",
    "thinwire.kernels": "use_backend",
    "thinwire.rehearsal": "rehearse report_loss",
}
_ROOMS = ("codecs", "collectives", "errors", "feedback", "integrations", "kernels", "wire")  # thinwire.errors and so on
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(["exact", "functional", "hooks", "qat", *_MODULE_OF])

if not typing.TYPE_CHECKING:  # a type checker that sees __getattr__ accepts any name

    def __getattr__(name: str) -> object:
        """A public name, from its module; `exact`, `functional`, `hooks` and `qat` are modules themselves."""
        if name not in __all__ and name not in _ROOMS:
            raise AttributeError(f"module 'thinwire' has no attribute {name!r}")
        if name in _MODULE_OF:
            value = getattr(importlib.import_module(_MODULE_OF[name]), name)
        else:
            value = importlib.import_module(f"thinwire.{name}")
        globals()[name] = value
        _register_backend()
        return value


def _register_backend() -> None:
    """Register the backend "thinwire" if torch.distributed is imported."""
    if "torch.distributed" in sys.modules:
        importlib.import_module("thinwire.registration").register()


_register_backend()


def __dir__() -> list[str]:
    return list(__all__)
