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
from thinwire.kernels.exact import exact_count as exact_count
from thinwire.kernels.schema import Encoding, FakeGradients, Grid
from thinwire.wire import CastVariant, ExactTables, Format, Kind

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
    _served(how.format, x.device).encode(how, x, wire, residual, rotation=rotation, dither=dither)


def decode_sum(format: Format, wires_WN: Tensor, out: Tensor, *, scale: float, rotation: int | None) -> None:
    """out = scale * sum over ranks, in rank order in fp32, of decode(wire)."""
    _served(format, out.device).decode_sum(format, wires_WN, out, scale=scale, rotation=rotation)


def recode(
    how: Encoding, wires_WN: Tensor, wire: Tensor, numel: int, *, scale: float, rotation: int | None, dither: int
) -> None:
    """wire = encode(scale * sum of decode(wires)), without leaving the rotated domain."""
    keys = {"rotation": rotation, "dither": dither}
    _served(how.format, wire.device).recode(how, wires_WN, wire, numel, scale=scale, **keys)


def set_aside(x: Tensor, index: Tensor, out: Tensor, memory: Tensor | None, gaps: Tensor | None) -> None:
    """out = x at `index`, where x becomes 0; so does the memory at `gaps`."""
    _unless_doubles(x, "launch").set_aside(x, index, out, memory, gaps)


def put_back(x: Tensor, index: Tensor, values: Tensor) -> None:
    """x at `index` = values."""
    _unless_doubles(x, "launch").put_back(x, index, values)


def fake_quantize(grid: Grid, x_OCI: Tensor, scale_C: Tensor, shift_C: Tensor | None, out_OCI: Tensor) -> None:
    """out = y of `Grid`."""
    _unless_doubles(x_OCI, "fake_launch").fake_quantize(grid, x_OCI, scale_C, shift_C, out_OCI)


def fake_quantize_grad(grid: Grid, of: FakeGradients, factor: float) -> None:
    """dx and the parameters' gradients of `Grid`."""
    _unless_doubles(of.x_OCI, "fake_launch").fake_quantize_grad(grid, of, factor)


def exact_encode(tables: ExactTables, new: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    """The bytes of all blocks of exact differences, one after the other, and the length of each."""
    found: tuple[Tensor, Tensor] = _module("exact").exact_encode(tables, new, base)
    return found


def exact_decode(tables: ExactTables, blocks: Tensor, starts: Tensor, base: Tensor, out: Tensor) -> bool:
    """out = the numbers that were encoded; False if the bytes are damaged."""
    return bool(_module("exact").exact_decode(tables, blocks, starts, base, out))


def fused_rows(format: Format, device: torch.device) -> ModuleType | None:
    """The launches of messages in rows (kernels/rows.py), where the format has kernels."""
    return _module("row_launch") if _has(format, device) else None


def _served(format: Format, device: torch.device) -> ModuleType:
    """The launches, or the reference for a format that has no kernels here."""
    return _module("launch") if _has(format, device) else reference


def _unless_doubles(x: Tensor, module: str) -> ModuleType:
    """The launches, or the reference for doubles."""
    return reference if x.dtype == torch.float64 else _module(module)


def _has(format: Format, device: torch.device) -> bool:
    """Whether a format has kernels here: all but e4m3 on GPUs that lack it."""
    is_e4m3 = format.kind == Kind.CAST and format.variant == CastVariant.E4M3
    return not is_e4m3 or device.type != "cuda" or _capability(device) >= (8, 9)


@lru_cache(maxsize=64)
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@lru_cache
def _module(name: str) -> ModuleType:
    return importlib.import_module(f"thinwire.kernels.triton.{name}")
