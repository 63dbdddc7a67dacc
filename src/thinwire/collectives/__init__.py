"""torch.distributed's verbs with a codec: same signatures, same places, 1 to 8 bits on the wire."""

from thinwire.collectives.auto_quantize import DQuantType, auto_quantize
from thinwire.collectives.channel import Traffic, traffic
from thinwire.collectives.cost import Choice
from thinwire.collectives.point_to_point import batch_isend_irecv, irecv, isend, recv, send
from thinwire.collectives.verbs import (
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
from thinwire.collectives.work import Work

__all__ = [
    "Choice",
    "DQuantType",
    "Traffic",
    "Work",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "auto_quantize",
    "batch_isend_irecv",
    "broadcast",
    "explain",
    "irecv",
    "isend",
    "measure",
    "recv",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "send",
    "traffic",
]
