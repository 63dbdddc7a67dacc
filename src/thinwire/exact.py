"""Exact differences between a tensor and a base that both ends hold: bit for bit, whatever changed.

`decode(encode(new, base), base)` has the bits of `new`, including those of NaNs and the signs of zeros. The wire is as
long as the change requires: a fraction of a bit per number if little changed, and at most 64 bytes, plus 2 bytes per
4096 numbers, longer than the numbers themselves. kernels/exact.py defines the code.
"""

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.errors import CodecError, WireError
from thinwire.wire import EXACT_DTYPES, exact_head, read_exact_head

__all__ = ["decode", "encode"]


def encode(new: Tensor, base: Tensor) -> Tensor:
    """The difference between two tensors of one shape, dtype (fp32, bf16 or fp16) and device, as a uint8 tensor."""
    _check(new, base)
    new, base = kernels.flat(new), kernels.flat(base)
    tables, lengths, blocks = kernels.select(base.device).exact_encode(new, base)
    head = exact_head(tables, base.dtype, lengths.itemsize, base.numel())
    return torch.cat([head.to(base.device, non_blocking=True), lengths.view(torch.uint8), blocks])


def decode(wire: Tensor, base: Tensor) -> Tensor:
    """The tensor that was encoded against `base`, bit for bit. WireError if the wire is damaged or does not fit `base`.

    A wire has no checksum: damage that leaves a valid wire, or a wrong base that fits it, gives wrong numbers.
    """
    _check(base, base)
    if wire.dtype != torch.uint8 or wire.dim() != 1 or wire.device != base.device:
        raise WireError(
            f"a wire is a torch.uint8 tensor of one dimension on {base.device}, where the base is, got {wire.dtype} of "
            f"shape {tuple(wire.shape)} on {wire.device}"
        )
    flat = kernels.flat(base)
    tables, starts, blocks_at = read_exact_head(wire, base.dtype, base.numel())
    out = torch.empty_like(flat)
    if not kernels.select(base.device).exact_decode(tables, wire[blocks_at:].contiguous(), starts, flat, out):
        raise WireError("a block of a wire of exact differences is damaged, or was encoded against another base")
    return out.view(base.shape)


def _check(new: Tensor, base: Tensor) -> None:
    if base.dtype not in EXACT_DTYPES:
        known = ", ".join(str(dtype) for dtype in EXACT_DTYPES)
        raise CodecError(f"exact differences are of {known}, got {base.dtype}: send other tensors as they are")
    if (new.shape, new.dtype, new.device) != (base.shape, base.dtype, base.device):
        raise CodecError(
            f"a tensor and its base have one shape, dtype and device, got {tuple(new.shape)} {new.dtype} on "
            f"{new.device} and {tuple(base.shape)} {base.dtype} on {base.device}"
        )
