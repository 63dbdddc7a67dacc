"""Triton kernels for CUDA tensors. Triton itself is imported with the first tensor they serve.

tile.py describes how a program holds its blocks. encode_blocks.py, decode_blocks.py and plain.py are the
kernels of the codecs; launch.py starts them in the configuration that tuning.py chooses, and compiling.py compiles
several at once. fake.py and fake_launch.py do the same for fake quantization. Under Triton's interpreter
(TRITON_INTERPRET=1) they serve CPU tensors, slowly, for tests, which emulate the PTX in them (tests/interpreted.py).
"""

import importlib
import importlib.util
import os
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from thinwire.kernels.triton.exact import exact_decode as exact_decode, exact_encode as exact_encode
    from thinwire.kernels.triton.fake_launch import (
        fake_quantize as fake_quantize,
        fake_quantize_grad as fake_quantize_grad,
    )
    from thinwire.kernels.triton.launch import (
        decode_sum as decode_sum,
        encode as encode,
        recode as recode,
    )

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def serves(device: torch.device) -> bool:
    """Whether these kernels serve tensors on `device`: a CUDA device, or under the interpreter the CPU."""
    return device.type == ("cpu" if INTERPRETED else "cuda")


@lru_cache(maxsize=1)
def unavailable() -> str | None:
    """Why the kernels cannot run here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not importable; install a CUDA build of torch, which brings it"
    if INTERPRETED:
        return None
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if torch.version.hip is not None:
        return "the kernels support NVIDIA GPUs only, and this torch is built for ROCm"
    if torch.cuda.get_device_capability() < (8, 0):
        return "the kernels need a GPU of compute capability 8.0 (Ampere) or newer"
    return None


def fused_rows() -> ModuleType:
    """The launches of messages in rows (kernels/rows.py)."""
    return importlib.import_module("thinwire.kernels.triton.row_launch")


_HOMES = {
    "launch": "encode decode_sum recode",
    "fake_launch": "fake_quantize fake_quantize_grad",
    "exact": "exact_encode exact_decode",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """An operation of the backend, from the module that starts its kernels."""
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
        return found
