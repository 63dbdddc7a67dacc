"""torch's DDP hooks as drop-ins: change the import, keep the script. They live in integrations/torch_hooks.py."""

from thinwire.integrations.torch_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
    perchannel_hook,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)

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
