"""The ranges of torch.ao observers: updated without making the host wait, and the same on all ranks.

torch's four min/max observers look at their own state on the host in every call. Here they are only the place where a
range is kept: it is updated, and turned into a scale and a zero point, by tensor operations alone, with torch's
formulas. Any other observer is called as it is.

[Note: Nothing seen] is the range from +inf to -inf, which min and max leave out by themselves. A batch that is empty or
holds a NaN or an Inf counts as nothing (for one channel where ranges are by channel), so it changes no statistics.
"""

from typing import Any

import torch
from torch import Tensor
from torch.ao.quantization import observer as observers
from torch.nn.parallel import DistributedDataParallel

from thinwire.errors import QatError
from thinwire.qat.agreement import Agreement, Ranks

_MIN_MAX = (
    observers.MinMaxObserver,
    observers.MovingAverageMinMaxObserver,
    observers.MovingAveragePerChannelMinMaxObserver,
    observers.PerChannelMinMaxObserver,
)
FLOAT = torch.per_channel_affine_float_qparams  # the scheme whose zero points are real numbers
PER_CHANNEL = (torch.per_channel_affine, torch.per_channel_symmetric, FLOAT)
SYMMETRIC = (torch.per_tensor_symmetric, torch.per_channel_symmetric)  # the zero point is the middle of the range


def is_min_max(observer: Any) -> bool:
    """Whether an observer is one of torch's own whose state is a range; a subclass may mean anything by it."""
    return type(observer) in _MIN_MAX


def observe(observer: Any, x: Tensor, ranks: Ranks) -> bool:
    """Show a batch to an observer; False if it was kept from it. Min/max observers see the batches of all `ranks`.

    Any other observer must not meet a NaN, and only the host can keep it from being called.
    """
    if is_min_max(observer):
        rows = x.reshape(1, -1)
        if observer.qscheme in PER_CHANNEL:
            rows = x.movedim(observer.ch_axis, 0).unsqueeze(-1).flatten(1)
        dtype = torch.promote_types(x.dtype, torch.float32)  # gloo has no 16-bit maximum
        _remember(observer, *Agreement(ranks).range(*(end.to(dtype) for end in range_of(rows))))
        return True
    if good := bool(x.isfinite().all()) and x.numel() > 0:
        observer(x)
    return good


def estimate(observer: Any) -> tuple[Tensor, Tensor]:
    """Scale and zero point for what was seen; the scale is not finite where that is nothing."""
    if not is_min_max(observer):
        scale, zero_point = observer.calculate_qparams()
        return scale.reshape(-1), zero_point.reshape(-1)
    low = observer.min_val.reshape(-1)
    high = observer.max_val.reshape(-1)
    seen = low <= high
    # A tensor, since torch multiplies by the inverse of a number on GPUs: there the last bit would be another.
    steps = torch.full_like(low, observer.quant_max - observer.quant_min)
    if observer.qscheme == FLOAT:
        scale = (high - low) / steps
        scale = scale.where(scale > observer.eps, 1.0)
        return scale.where(seen, torch.nan), observer.quant_min - low / scale
    low = low.clamp(max=0)
    high = high.clamp(min=0)
    if observer.qscheme in SYMMETRIC:
        scale = torch.maximum(torch.maximum(-low, high) / (steps / 2), observer.eps)
        return scale.where(seen, torch.nan), torch.zeros_like(low)
    scale = torch.maximum((high - low) / steps, observer.eps)
    zero_point = observer.quant_min - (low / scale).round()
    return scale.where(seen, torch.nan), zero_point.clamp(observer.quant_min, observer.quant_max)


def range_of(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Lowest and highest element of every row. [Note: Nothing seen]"""
    if rows.shape[1] == 0:
        return rows.new_full(rows.shape[:1], torch.inf), rows.new_full(rows.shape[:1], -torch.inf)
    low, high = torch.aminmax(rows, dim=1)
    good = low.isfinite() & high.isfinite()
    return low.where(good, torch.inf), high.where(good, -torch.inf)


def _remember(observer: Any, low: Tensor, high: Tensor) -> None:
    if observer.min_val.numel() == 0:
        observer.min_val.resize_(low.shape).fill_(torch.inf)
        observer.max_val.resize_(high.shape).fill_(-torch.inf)
    if observer.min_val.numel() != low.numel():
        raise QatError(f"the observer has seen {observer.min_val.numel()} channels before, now {low.numel()}")
    constant = getattr(observer, "averaging_constant", None)
    for kept, now, wider in ((observer.min_val, low, torch.minimum), (observer.max_val, high, torch.maximum)):
        now = now.to(kept).view_as(kept)
        if constant is None:
            kept.copy_(wider(kept, now))
        else:
            moved = torch.where(kept.isfinite(), kept + constant * (now - kept), now)
            kept.copy_(moved.where(now.isfinite(), kept))


def ranks_in_step() -> Ranks:
    """Who is certain to be in this forward too: the ranks of the DDP that is running it, or nobody.

    All of them are, since DDP itself broadcasts buffers at its start. Elsewhere nothing says which ranks call.
    """
    ddp = DistributedDataParallel._get_active_ddp_module()
    return "local" if ddp is None else ddp.process_group


def mean(tensors: list[Tensor], ranks: Ranks) -> list[Tensor]:
    """Flat tensors averaged over ranks, to the same bytes on all of them."""
    count = tensors[0].new_ones(1)
    *totals, world = Agreement(ranks).total(torch.cat([*tensors, count])).split([t.numel() for t in [*tensors, count]])
    return [total / world for total in totals]
