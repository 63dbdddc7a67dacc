"""Where quantizers begin: the statistics behind the papers' formulas, taken over all ranks.

Shape suffixes: C channels (whatever has a scale of its own), N elements of a channel on this rank, K candidates.

A rank whose x is empty or not finite adds nothing.
"""

import torch
from torch import Tensor

from thinwire.qat.agreement import Agreement, widest
from thinwire.qat.ops import fake_quantize
from thinwire.qat.ranges import range_of

_SHARES = [0.9**k for k in range(32)]  # of a range, tried as its new length
_SAMPLE = 1 << 18  # elements per rank on which they are tried
_LEAST = torch.finfo(torch.float32).tiny  # of scales with a finite inverse
_MOST = torch.finfo(torch.float32).max


def sums(ranks: Agreement, *terms_CN: Tensor) -> Tensor:
    """The sum of each term over a channel and over ranks, and last the number of elements."""
    rows = [term_CN.sum(1, dtype=widest(terms_CN[0])) for term_CN in terms_CN]
    sums_TC = torch.stack([*rows, torch.full_like(rows[0], terms_CN[0].shape[1])])
    return ranks.total(sums_TC.where(sums_TC.isfinite().all(), torch.zeros_like(sums_TC)))


def least_error(x_CN: Tensor, levels: int, ranks: Agreement) -> tuple[Tensor, Tensor] | None:
    """The range of every channel, from the whole one shortened above, then below, that a grid fits best.

    None where no rank has an x to add.
    """
    x_CN = x_CN if x_CN.isfinite().all() else x_CN[:, :0]
    low_C, high_C = ranks.range(*(end.to(widest(end)) for end in range_of(x_CN)))  # wide enough for any range's length
    constant_C = low_C == high_C  # such a channel's range reaches to zero
    low_C, high_C = low_C.clamp(max=0).where(constant_C, low_C), high_C.clamp(min=0).where(constant_C, high_C)
    if not (high_C > low_C).any():
        return None
    sample_CN = x_CN[:, :: x_CN.numel() // _SAMPLE + 1]
    shares_K1 = torch.tensor(_SHARES, device=x_CN.device, dtype=low_C.dtype).unsqueeze(1)
    highs_KC = low_C + shares_K1 * (high_C - low_C)
    high_C = _best(sample_CN, low_C.expand_as(highs_KC), highs_KC, levels, ranks)[1]
    lows_KC = high_C - shares_K1 * (high_C - low_C)
    return _best(sample_CN, lows_KC, high_C.expand_as(lows_KC), levels, ranks)


def usable(scale_C: Tensor) -> Tensor:
    """Scales that a grid can have: a channel of zeros gets the mean of the others, and all stay within fp32."""
    alive_C = scale_C > 0
    mean = scale_C.where(alive_C, torch.zeros_like(scale_C)).sum() / alive_C.sum()
    return scale_C.where(alive_C, mean).clamp(_LEAST, _MOST)


def _best(x_CN: Tensor, low_KC: Tensor, high_KC: Tensor, levels: int, ranks: Agreement) -> tuple[Tensor, Tensor]:
    """Of the candidates for a channel's range, the one with the least squared error."""
    errors = []
    for low_C, high_C in zip(low_KC, high_KC, strict=True):
        step_C = ((high_C - low_C) / levels).clamp(_LEAST, _MOST)
        y_CN = fake_quantize(x_CN, step_C, quant_min=0, quant_max=levels, offset=low_C, axis=0)
        errors.append((y_CN - x_CN).square().sum(1, dtype=widest(x_CN)))
    best_1C = ranks.total(torch.stack(errors)).argmin(0, keepdim=True)
    return low_KC.gather(0, best_1C)[0], high_KC.gather(0, best_1C)[0]
