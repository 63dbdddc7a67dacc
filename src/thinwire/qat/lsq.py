"""Quantisers whose step is learned: LSQ (Esser et al., 2020) and LSQ+ (Bhalgat et al., 2020).

Shape suffixes: C channels (whatever has a scale of its own: the tensor, an index of the axis, a group), N their
elements, K candidates.

[Note: The start] A scale that starts badly stays bad, so the papers say where to start: for weights from the weights
themselves (`initialise`), for activations from the first batches that come by (`init_batches`; a batch that is empty,
all zero or not finite is let through untouched and not counted). Where torch.distributed runs, statistics are those of
all ranks, so that every rank starts with the same bits.

[Note: One truth, one cache] Whether the start is over stands in the buffer `init_left`, which is saved, loaded and
broadcast with the model; `quant_range` beside it holds the integers in use. Reading a buffer on a GPU makes the host
wait, so `_ready` remembers once the buffers have said it, and nothing is read any more.

[Note: Parameters that are lent] Inside a forward, FSDP2 and torch.func.functional_call show a module other parameters
than its own: what is written to them is lost. `_own` knows the module's own, and a start in lent ones is refused.
"""

import math
from functools import partial
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from thinwire.qat.agreement import Agreement, Ranks, double
from thinwire.qat.ops import fake_quantize

BITS = range(2, 9)
_SHARES = [0.9**k for k in range(32)]  # of a range, tried as its new length by LSQ+
_SAMPLE = 1 << 18  # elements of a rank on which they are tried


class Start(NamedTuple):
    """Where a quantiser begins: scale and offset of every channel, and whether its integers go below zero."""

    scale_C: Tensor
    offset_C: Tensor | None
    signed: bool


class LSQ(nn.Module):
    """Fake quantisation with a learned scale, by the rule of the LSQ paper.

    `symmetric=True`: integers from -2**(bits - 1) to 2**(bits - 1) - 1, for weights and for activations of both signs.
    `symmetric=False`: from 0 to 2**bits - 1, for what is never negative, as after a ReLU. "auto": as the first batches
    are. There is no zero point in either; `LSQPlus` has one.

    One scale for all, for every index of `axis` (negative ones count from the end), or for every `group` elements of a
    row (weights only). Scales are fp32 parameters of shape (C,) whatever the model is cast to, fp64 after `.double()`.
    Every scale's gradient is multiplied by 1 / sqrt(n * quant_max), n being the elements it serves.
    """

    scale_gradient = True  # the paper's factor; a subclass may do without
    scale: nn.Parameter
    offset: nn.Parameter | None
    init_left: Tensor
    quant_range: Tensor

    def __init__(
        self,
        bits: int = 4,  # fewer => smaller, coarser
        *,
        symmetric: bool | Literal["auto"] = True,
        axis: int | None = None,
        group: int = 0,
        init_batches: int = 1,  # more => a calmer start for activations; each is a synchronisation of the ranks
        process_group: Ranks = None,  # whose statistics count: None => the world's, "local" => this process's alone
    ) -> None:
        super().__init__()
        _check(bits, group, axis, init_batches)
        self.bits, self.axis, self.group, self.init_batches = bits, axis, group, init_batches
        self.symmetric = self._judged(symmetric)
        self._agreement = Agreement(process_group)
        self._ready = False
        self.quant_min, self.quant_max = self._range(signed=symmetric is True)
        self.scale = self._parameter(1.0)
        self.register_parameter("offset", self._parameter(0.0) if self._shifts else None)
        self.register_buffer("init_left", torch.tensor(init_batches))
        self.register_buffer("quant_range", torch.tensor([self.quant_min, self.quant_max]))
        self._hold()

    # --- what it does ------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """x on the grid. With `rows`, x holds those rows of the tensor whose first axis has the scales."""
        if not self._ready and not self._started(x):
            return self._untouched(x)
        if rows is not None:
            return self._quantise_rows(x, rows)
        return self._quantise(x, self.scale, self.offset, self.axis)

    def _quantise(self, x: Tensor, scale: Tensor, offset: Tensor | None, axis: int | None) -> Tensor:
        return fake_quantize(
            x,
            scale,
            quant_min=self.quant_min,
            quant_max=self.quant_max,
            offset=offset,
            axis=axis,
            group=self.group,
            gradient="lsq",
            scale_gradient=self.scale_gradient,
        )

    def _quantise_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """As if the whole table had been quantised and these rows taken: the elements under one scale are the same."""
        scale, offset = (None if p is None else p.view(-1, self._per_row(x))[rows] for p in (self.scale, self.offset))
        assert scale is not None
        axis = None if self.group else 0
        return self._quantise(x.flatten(0, -2), scale, offset, axis).view(x.shape)

    def _per_row(self, x: Tensor) -> int:
        if not self.group and self.axis != 0:
            raise ValueError(
                f"rows can be taken where each has its own scales: axis=0 or a group, got axis={self.axis}"
            )
        return x.shape[-1] // self.group if self.group else 1

    def _untouched(self, x: Tensor) -> Tensor:
        # The parameters stay in the graph: DDP waits for a gradient of each.
        used = sum(p.sum() for p in self.parameters() if not nn.parameter.is_lazy(p))
        return x + (0 * used).to(x.dtype) if isinstance(used, Tensor) else x

    # --- how it starts: [Note: The start] ----------------------------------------------------------------------------

    @property
    def initialised(self) -> bool:
        """Whether the start is over and the scale is the optimiser's."""
        if not self._ready and not self.init_left.is_meta and not int(self.init_left):
            self.quant_min, self.quant_max = self.quant_range.tolist()
            self._ready = True
        return self._ready

    @torch.no_grad()
    def initialise(self, x: Tensor) -> Self:
        """Start from x alone, a weight. Every rank of the process group must call.

        A weight on the meta device only gives the number of scales: the start is then made by the first forward.
        """
        self._refuse_lent()
        if x.is_meta:
            self._size(len(self._by_channel(x)))
            return self
        start = self.estimate(x)
        if start is None:
            start = self._blind(x)
        self._write(start, 1.0)
        self.init_left.zero_()
        self._ready = True
        return self

    def reset_parameters(self) -> None:
        """Forget the scale: the next `init_batches` batches make a new start."""
        self._ready = False
        self.init_left.fill_(self.init_batches)

    def _started(self, x: Tensor) -> bool:
        """Make the start, or a part of it, from a batch. Whether there is a grid by now."""
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "this quantiser has no scale yet, and a compiled graph cannot give it one: "
                "run qat.calibrate(model, batches), or one forward, before torch.compile"
            )
        if self.initialised:
            return True
        self._refuse_lent()
        with torch.inference_mode(False), torch.no_grad():
            start, left = self.estimate(x), int(self.init_left)
            if start is None:
                return left < self.init_batches
            fresh = left == self.init_batches or start.signed != (self.quant_min < 0)
            self._write(start, 1.0 if fresh else 1 / (self.init_batches - left + 1))
            self.init_left.sub_(1)
        self._ready = left == 1
        return True

    def estimate(self, x: Tensor) -> Start | None:
        """The paper's start for x, of all ranks together: 2 * mean|x| / sqrt(quant_max). None where x says nothing."""
        x_CN = self._by_channel(x)
        sums = self._sums(x_CN, x_CN.abs(), x_CN < 0)
        if sums is None or not sums[0].any():
            return None
        magnitude_C, negative_C, count_C = sums
        signed = bool(negative_C.any()) if self.symmetric == "auto" else self.symmetric
        signed = signed or (self.symmetric == "auto" and self.quant_min < 0)
        scale_C = 2 * magnitude_C / count_C / math.sqrt(self._range(signed)[1])
        return Start(_living(scale_C, magnitude_C > 0), None, signed)

    def _sums(self, x_CN: Tensor, *terms: Tensor) -> list[Tensor] | None:
        """The sum of each term and the number of elements, a channel and over ranks; None where nobody has any.

        A rank whose x is not finite, or empty, adds nothing.
        """
        rows = [term_CN.sum(1, dtype=double(x_CN)) for term_CN in terms]
        sums_TC = torch.stack([*rows, torch.full_like(rows[0], x_CN.shape[1])])
        usable = sums_TC.isfinite().all() & x_CN.abs().sum(dtype=double(x_CN)).isfinite()
        sums_TC = self._agreement.total(sums_TC.where(usable, torch.zeros_like(sums_TC)))
        return list(sums_TC) if sums_TC[-1].any() else None

    def _blind(self, x: Tensor) -> Start:
        """A start for a weight of zeros: as if its elements were as large as 1 / sqrt(n), n of them to a channel."""
        x_CN = self._by_channel(x)
        if not x_CN.isfinite().all():
            raise ValueError("a weight with NaN or Inf gives no scale; mend the weight, or skip its layer")
        signed = self.symmetric is not False
        reach = math.sqrt(max(x_CN.shape[1], 1) * self._range(signed)[1])
        scale_C = torch.full((len(x_CN),), 2 / reach, device=x.device)
        return Start(scale_C, torch.zeros_like(scale_C) if self._shifts else None, signed)

    def _write(self, start: Start, share: float) -> None:
        """Move scale and offset by `share` of the way to the start."""
        self._size(len(start.scale_C))
        self.quant_min, self.quant_max = self._range(start.signed)
        self.quant_range.copy_(torch.tensor([self.quant_min, self.quant_max]))
        limits = torch.finfo(torch.float32)
        self.scale.data.lerp_(start.scale_C.clamp(limits.tiny, limits.max).to(self.scale), share)
        if self.offset is not None and start.offset_C is not None:
            self.offset.data.lerp_(start.offset_C.to(self.offset), share)

    def _size(self, channels: int) -> None:
        for parameter in self.parameters():
            if isinstance(parameter, nn.UninitializedParameter):
                parameter.materialize((channels,))
                parameter.data.fill_(parameter is self.scale)
            elif len(parameter) != channels:
                raise ValueError(f"x has {channels} channels, the quantiser was sized for {len(parameter)}")

    def _refuse_lent(self) -> None:
        """[Note: Parameters that are lent]"""
        if any(own is not self._parameters[name] for name, own in self._own.items()):
            raise RuntimeError(
                "this quantiser has no scale yet, and its parameters are lent to it for one forward (FSDP2, "
                "functional_call), so a start would be lost: run qat.calibrate(model, batches) before fully_shard"
            )

    def _hold(self) -> None:
        self._own = dict(self._parameters)

    # --- its range and its channels ----------------------------------------------------------------------------------

    @property
    def _shifts(self) -> bool:
        """Whether there is an offset to learn."""
        return False

    def _parameter(self, value: float) -> nn.Parameter:
        """Of one element, or of as many as will turn out."""
        if self.axis is None and not self.group:
            return nn.Parameter(torch.full((1,), value, dtype=torch.float32))
        unsized: Any = nn.UninitializedParameter
        lazy: nn.Parameter = unsized(dtype=torch.float32)
        return lazy

    def _judged(self, symmetric: bool | Literal["auto"]) -> bool | Literal["auto"]:
        if symmetric not in (True, False, "auto"):
            raise ValueError(f"symmetric must be True, False or 'auto', got {symmetric!r}")
        return symmetric

    def _range(self, signed: bool) -> tuple[int, int]:
        low = -(1 << self.bits - 1) if signed else 0
        return low, low + (1 << self.bits) - 1

    def _by_channel(self, x: Tensor) -> Tensor:
        x = x.detach()
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.group:
            return x.reshape(-1, self.group)
        if self.axis is None:
            return x.reshape(1, -1)
        return x.movedim(self.axis, 0).unsqueeze(-1).flatten(1)

    def extra_repr(self) -> str:
        """What was chosen, and what came of it."""
        where = f"group={self.group}" if self.group else f"axis={self.axis}"
        state = "" if self._ready else ", not initialised"
        return f"bits={self.bits}, {self.quant_min}..{self.quant_max}, {where}{state}"

    # --- casts and checkpoints ---------------------------------------------------------------------------------------

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(partial(_never_narrow, fn), recurse)  # type: ignore[no-untyped-call]
        self._hold()
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        unsized = {name: p for name, p in self._parameters.items() if p is not None and nn.parameter.is_lazy(p)}
        for name in unsized:
            self._parameters[name] = nn.Parameter(torch.empty(0))
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self._parameters.update(unsized)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        errors: list[str] = rest[-1]
        sizes = [len(found) for name in self._parameters if (found := state_dict.get(prefix + name)) is not None]
        if any(sizes):
            unsized = [p for p in self.parameters() if isinstance(p, nn.UninitializedParameter)]
            for parameter in unsized:
                parameter.materialize((max(sizes),))
        self._check_range(state_dict.get(prefix + "quant_range"), prefix, errors)
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self._ready = False
        self._hold()

    def _check_range(self, saved: Tensor | None, prefix: str, errors: list[str]) -> None:
        if saved is None or saved.is_meta:
            return
        low, high = saved.tolist()
        allowed = [self._range(signed) for signed in (True, False) if self.symmetric in (signed, "auto")]
        if (low, high) not in allowed:
            errors.append(
                f"{prefix}quant_range is {low}..{high} in the checkpoint; this quantiser has "
                f"{' or '.join(f'{a}..{b}' for a, b in allowed)}: prepare the model with the bits it was saved with"
            )


class LSQPlus(LSQ):
    """LSQ with the start, and for activations the learned offset, of the LSQ+ paper.

    `symmetric=False` (activations): integers 0 to 2**bits - 1 and an offset b, learned like the scale, in units of x:
    y = s * integer + b. Both start where the squared error on the first batches is least.
    `symmetric=True` (weights): integers as in `LSQ`, no offset; the scale starts at
    max(|mean - 3 std|, |mean + 3 std|) / 2**(bits - 1).
    """

    def __init__(
        self,
        bits: int = 4,
        *,
        symmetric: bool | Literal["auto"] = False,
        axis: int | None = None,
        group: int = 0,
        init_batches: int = 1,
        process_group: Ranks = None,
    ) -> None:
        where: Any = {"axis": axis, "group": group, "init_batches": init_batches, "process_group": process_group}
        super().__init__(bits, symmetric=symmetric, **where)

    @property
    def _shifts(self) -> bool:
        return not self.symmetric

    def _judged(self, symmetric: bool | Literal["auto"]) -> bool | Literal["auto"]:
        # The offset serves both signs: nothing is left to be decided by the first batches.
        return False if symmetric == "auto" else super()._judged(symmetric)

    def estimate(self, x: Tensor) -> Start | None:
        """The paper's start for x, of all ranks together. None where x says nothing."""
        x_CN = self._by_channel(x)
        return self._spread(x_CN) if self.symmetric else self._least_error(x_CN)

    def _spread(self, x_CN: Tensor) -> Start | None:
        """Three standard deviations around the mean."""
        sums = self._sums(x_CN, x_CN, x_CN.to(double(x_CN)).square())
        if sums is None or not sums[1].any():
            return None
        mean_C, square_C = sums[0] / sums[2], sums[1] / sums[2]
        reach_C = mean_C.abs() + 3 * (square_C - mean_C.square()).clamp(min=0).sqrt()
        return Start(_living(reach_C / (1 << self.bits - 1), reach_C > 0), None, True)

    def _least_error(self, x_CN: Tensor) -> Start | None:
        """From the whole range, shorten it above, then below, to where the squared error is least."""
        x_CN = x_CN if x_CN.isfinite().all() else x_CN[:, :0]
        low_C, high_C = self._ends(x_CN)
        if not (high_C > low_C).any():
            return None
        sample_CN = x_CN[:, :: x_CN.numel() // _SAMPLE + 1]
        shares_K1 = torch.tensor(_SHARES, device=x_CN.device, dtype=x_CN.dtype).unsqueeze(1)
        high_C = self._best(sample_CN, low_C.expand(len(_SHARES), -1), low_C + shares_K1 * (high_C - low_C))[1]
        low_C = self._best(sample_CN, high_C - shares_K1 * (high_C - low_C), high_C.expand(len(_SHARES), -1))[0]
        return Start(_living((high_C - low_C) / self.quant_max, high_C > low_C), low_C, False)

    def _ends(self, x_CN: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the largest element of every channel, over ranks; a constant channel reaches to zero."""
        nothing_C = x_CN.new_full((len(x_CN),), -math.inf)
        ends = torch.stack([(-x_CN).amax(1), x_CN.amax(1)] if x_CN.numel() else [nothing_C, nothing_C])
        less_C, high_C = self._agreement.largest(ends)
        low_C, constant_C = -less_C, less_C == -high_C
        zero = torch.zeros_like(low_C)
        return low_C.minimum(zero).where(constant_C, low_C), high_C.maximum(zero).where(constant_C, high_C)

    def _best(self, x_CN: Tensor, low_KC: Tensor, high_KC: Tensor) -> tuple[Tensor, Tensor]:
        """Of the candidates for a channel's range, the one with the least squared error over ranks."""
        errors_KC = self._agreement.total(
            torch.stack([self._error(x_CN, low_C, high_C) for low_C, high_C in zip(low_KC, high_KC, strict=True)])
        )
        best_1C = errors_KC.argmin(0, keepdim=True)
        return low_KC.gather(0, best_1C)[0], high_KC.gather(0, best_1C)[0]

    def _error(self, x_CN: Tensor, low_C: Tensor, high_C: Tensor) -> Tensor:
        scale_C = ((high_C - low_C) / self.quant_max).clamp(min=torch.finfo(torch.float32).tiny)
        y_CN = fake_quantize(x_CN, scale_C, quant_min=0, quant_max=self.quant_max, offset=low_C, axis=0)
        return (y_CN - x_CN).square().sum(1, dtype=double(x_CN))


def _check(bits: int, group: int, axis: int | None, init_batches: int) -> None:
    if bits not in BITS:
        raise ValueError(f"bits must be {BITS[0]}..{BITS[-1]}, got {bits!r}")
    if not isinstance(group, int) or group < 0:
        raise ValueError(f"group must be a number of elements, or 0 for none, got {group!r}")
    if group and axis is not None:
        raise ValueError("give an axis or a group, not both")
    if not isinstance(init_batches, int) or init_batches < 1:
        raise ValueError(f"init_batches must be 1 or more, got {init_batches!r}")


def _living(scale_C: Tensor, alive_C: Tensor) -> Tensor:
    """Channels without a number of their own get the mean of the others."""
    mean = scale_C.where(alive_C, torch.zeros_like(scale_C)).sum() / alive_C.sum()
    return scale_C.where(alive_C, mean)


def _never_narrow(fn: Any, x: Tensor) -> Tensor:
    """fn(x), a move or a cast, but never to less than fp32."""
    moved: Tensor = fn(x)
    if moved.is_floating_point() and moved.dtype.itemsize < 4:
        return x.to(moved.device, torch.float32)
    return moved
