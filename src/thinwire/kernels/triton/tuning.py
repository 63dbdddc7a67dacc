"""How kernels are cut into programs: a table of what was fastest on an H200.

GPUs with less memory bandwidth per multiprocessor use small tiles. No configuration changes a byte.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from thinwire.kernels.schema import Encoding
from thinwire.kernels.triton.tile import MOST_CODES
from thinwire.wire import Format, Kind


@dataclass(frozen=True)
class Config:
    """How a kernel is cut up. Changes no byte."""

    lanes: int = 1  # at least; more => fewer shuffles in the rotation, more registers
    warps: int = 2
    registers: int | None = None  # at most, for a thread; fewer => more programs at a time. None: ptxas decides


SMALL = 1 << 20  # elements; fewer do not fill the GPU, so a thread should have little to do
SHORT = Config(4, 1)
STARVED = Config(4, 2)  # few registers, quickly compiled; two warps, as such GPUs hold few programs at a time
FED_BYTES = 13e9  # of memory bandwidth per multiprocessor: A100 14 to 19, H100 25, H200 36; RTX, L40S, A10 5 to 12


def choose(op: str, how: Encoding, dtype: torch.dtype, device: torch.device, numel: int) -> Config:
    """The configuration of `op` for tensors of `dtype` on `device`.

    op: encode, encode_residual, decode_sum, recode, or recode_own, whose own part is a tensor.
    All sizes share one configuration, so that a kernel is compiled once, except in Lloyd encodes and recodes: their 64
    numbers per thread would make a small tensor wait.
    """
    if not how.format.block:
        return Config()
    if how.format.block > MOST_CODES:  # one program per block, whatever the configuration
        return SHORT
    if numel < SMALL and op in ("encode", "recode") and how.format.kind == Kind.LLOYD:
        return SHORT
    if device.type == "cuda" and starved(device):
        return STARVED
    return fastest(op, how.format, dtype)


def fastest(op: str, format: Format, dtype: torch.dtype) -> Config:
    """The fastest configuration on an H200."""
    if format.kind == Kind.TRELLIS:  # whose strands fix the lanes
        return SHORT
    if format.kind != Kind.LLOYD:
        wide = (op.startswith("recode") and format.bits < 8) or (op.startswith("encode") and dtype.itemsize == 2)
        return Config(8, 2) if wide else Config(4, 2)
    if op == "encode_residual":  # ptxas would take up to 160 registers, for a short last block
        return Config(4, 1, {1: 128, 2: 96, 4: 96}.get(format.bits) if format.block <= 512 else None)
    if op == "encode":
        return Config(16, 2)
    if op == "recode" and format.bits != 3:  # ptxas would take up to 255 registers, for sums of unusual scales
        return Config(16, 1, 112)
    return Config(8, 1)


@lru_cache(maxsize=64)
def starved(device: torch.device) -> bool:
    """Whether memory bandwidth, not arithmetic, limits every kernel on this GPU."""
    gpu: Any = torch.cuda.get_device_properties(device)
    bandwidth = 2 * 1e3 * gpu.memory_clock_rate * gpu.memory_bus_width / 8  # kHz, twice a cycle; bits
    return bool(0 < bandwidth < FED_BYTES * gpu.multi_processor_count)
