"""Drop-in communication hooks for DDP: torch's names and call shapes over thinwire's own collectives.

    ddp_model.register_comm_hook(process_group, thinwire.hooks.quantization_perchannel_hook)

A hook takes (state, bucket) and gives a future of the bucket's mean over the ranks, written into the bucket; the state
is a process group, or None for the world. For the (grad, param) pair that DDP's compiled path hands over it writes the
mean into grad and gives grad itself.

To add one: a function of (process_group, bucket) in `means.py` that names a codec and one of the two sums of
`engine.py`; annotate it as the others are (DDP looks), and export it here.
"""

from thinwire.hooks.means import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    perchannel_hook,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)
from thinwire.hooks.wrappers import bf16_compress_wrapper, fp16_compress_wrapper

__all__ = [
    "allreduce_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "perchannel_hook",
    "quantization_perchannel_hook",
    "quantization_pertensor_hook",
]
