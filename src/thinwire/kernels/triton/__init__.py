"""Triton kernels for CUDA tensors. Triton itself is imported with the first tensor they serve.

tile.py describes how a program holds its blocks. encode_blocks.py, decode_blocks.py, recode_blocks.py and plain.py are
the kernels of the codecs; launch.py starts them in the configuration that tuning.py chooses, and compiling.py compiles
several at once. fake.py and fake_launch.py are the same for fake quantization. Under Triton's interpreter
(TRITON_INTERPRET=1) they serve CPU tensors, slowly, for tests of their logic.
"""

import importlib.util
import os
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

from thinwire.kernels import reference
from thinwire.kernels.exact import (
    exact_count as exact_count,
    exact_decode as exact_decode,
    exact_encode as exact_encode,
)
from thinwire.kernels.schema import Encoding, FakeGradients, Grid, decoding
from thinwire.wire import CastVariant, Format, Kind

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def serves(device: torch.device) -> bool:
    """Whether a tensor on `device` is one for these kernels: CUDA tensors, under the interpreter those of the CPU."""
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


def encode(how: Encoding, x: Tensor, wire: Tensor, residual: Tensor | None, *, rotation: int, dither: int) -> None:
    """wire = encode(x + residual); residual = x + residual - decode(wire), non-finite blocks left as they were."""
    if not _has(how.format, x.device):
        reference.encode(how, x, wire, residual, rotation=rotation, dither=dither)
        return
    launch, _, tuning = _modules()
    op = "encode" if residual is None else "encode_residual"
    config = tuning.choose(op, how, x.dtype, x.device, x.numel())
    launch.encode(how, x, wire, residual, rotation, dither, config)


def decode_sum(format: Format, wires_WN: Tensor, out: Tensor, *, scale: float, rotation: int | None) -> None:
    """out = scale * sum over ranks, in rank order in fp32, of decode(wire)."""
    if not _has(format, out.device):
        reference.decode_sum(format, wires_WN, out, scale=scale, rotation=rotation)
        return
    launch, _, tuning = _modules()
    config = tuning.choose("decode_sum", decoding(format), out.dtype, out.device, out.numel())
    launch.decode_sum(format, wires_WN, out, scale, rotation, config)


def recode(
    how: Encoding, wires_WN: Tensor, wire: Tensor, numel: int, *, scale: float, rotation: int | None, dither: int
) -> None:
    """wire = encode(scale * sum of decode(wires)), without leaving the rotated domain."""
    if not _has(how.format, wire.device):
        reference.recode(how, wires_WN, wire, numel, scale=scale, rotation=rotation, dither=dither)
        return
    launch, _, tuning = _modules()
    config = tuning.choose("recode", how, torch.float32, wire.device, numel)
    launch.recode(how, wires_WN, wire, numel, scale, rotation, dither, config)


def set_aside(x: Tensor, index: Tensor, out: Tensor, memory: Tensor | None, gaps: Tensor | None) -> None:
    """out = x at `index`, where x becomes 0; so does the memory at `gaps`. Doubles are left to the reference."""
    if x.dtype == torch.float64:
        reference.set_aside(x, index, out, memory, gaps)
    else:
        _modules()[0].set_aside(x, index, out, memory, gaps)


def put_back(x: Tensor, index: Tensor, values: Tensor) -> None:
    """x at `index` = values."""
    if x.dtype == torch.float64:
        reference.put_back(x, index, values)
    else:
        _modules()[0].put_back(x, index, values)


def fake_quantize(grid: Grid, x_OCI: Tensor, scale_C: Tensor, shift_C: Tensor | None, out_OCI: Tensor) -> None:
    """out = y of `Grid`. Doubles are left to the reference."""
    if x_OCI.dtype == torch.float64:
        reference.fake_quantize(grid, x_OCI, scale_C, shift_C, out_OCI)
    else:
        _modules()[1].fake_quantize(grid, x_OCI, scale_C, shift_C, out_OCI)


def fake_quantize_grad(grid: Grid, of: FakeGradients, factor: float) -> None:
    """dx and the parameters' gradients of `Grid`. Doubles are left to the reference."""
    if of.x_OCI.dtype == torch.float64:
        reference.fake_quantize_grad(grid, of, factor)
    else:
        _modules()[1].fake_quantize_grad(grid, of, factor)


def fused_rows(format: Format, device: torch.device) -> ModuleType | None:
    """The launches of messages in rows (kernels/rows.py), where the format has kernels."""
    if not _has(format, device):
        return None
    from thinwire.kernels.triton import row_launch

    return row_launch


def _has(format: Format, device: torch.device) -> bool:
    """Whether a format has kernels here: all but plain doubles, and e4m3 on GPUs that lack it."""
    if format.kind == Kind.CAST and format.variant == CastVariant.E4M3 and device.type == "cuda":
        return _capability(device) >= (8, 9)
    return format.bits != 64


@lru_cache(maxsize=64)
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@lru_cache(maxsize=1)
def _modules() -> tuple[ModuleType, ModuleType, ModuleType]:
    from thinwire.kernels.triton import fake_launch, launch, tuning

    return launch, fake_launch, tuning
