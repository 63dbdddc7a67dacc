"""Quantizers whose step is learned: LSQ (Esser et al., 2020) and LSQ+ (Bhalgat et al., 2020).

[Note: The start] A scale that starts badly stays bad, so the papers say where to start: weights from the weights
themselves (`initialize`), activations from the first batches that come by (`init_batches`). A batch that is empty, all
zero or not finite passes unchanged and does not count. Where torch.distributed runs, statistics are those of
all ranks, so that every rank starts with the same bits.

[Note: One truth, one cache] How much of the start is left stands in the buffer `init_left`, the integers in use in
`quant_range`; they are saved, loaded and broadcast with the model. Reading them on a GPU makes the host wait, so once
nothing is left `_ready` says so, and they are not read again.

[Note: The floor] An optimizer that divides by the size of gradients, as Adam does, moves a scale of 0.004 by its whole
learning rate per step, past zero within a few. A scale is therefore not let below `scale_floor`, a small share of where
the start left it: it is raised to that before it is used, and gradients reach it there as anywhere.

[Note: Empty] With an axis or groups, the parameters are empty until the number of channels is known. They are then
filled in place: an optimizer made before holds the right ones.

[Note: Parameters that are lent] Inside a forward, FSDP2 and torch.func.functional_call show a module other parameters
than its own: what is written to them is lost. `_own` knows the module's own, and a start in lent ones is refused.
"""

import math
from functools import partial
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from thinwire.errors import QatError, QatStateError
from thinwire.qat import starts
from thinwire.qat.agreement import Agreement, Ranks, widest
from thinwire.qat.ops import channels_of, fake_quantize, never_narrow
from thinwire.qat.ranges import ranks_in_step

BITS = range(2, 9)
_BEFORE_COMPILE = (
    "this quantizer has no scale yet, and a compiled graph cannot give it one: "
    "run qat.calibrate(model, batches), or one forward, before torch.compile"
)


class Start(NamedTuple):
    """Where a quantizer begins: scale and offset of every channel, and whether its integers go below zero."""

    scale_C: Tensor
    offset_C: Tensor | None
    signed: bool


class LSQ(nn.Module):
    """Fake quantization with a learned scale, by the rule of the LSQ paper.

    `symmetric=True`: integers from -2**(bits - 1) to 2**(bits - 1) - 1, for weights and for activations of both signs.
    `symmetric=False`: from 0 to 2**bits - 1, for what is never negative, as after a ReLU. "auto": as the first batches
    are. There is no zero point in either; `LSQPlus` has an offset.

    There is one scale in all, one per index of `axis` (negative ones count from the end), or one per `group` elements
    of a row (weights only). Scales are one-dimensional fp32 parameters whatever the model is cast to (fp64 after
    `.double()`). A scale's gradient is multiplied by 1 / sqrt(n * quant_max), where n counts the elements under it. No
    scale is used below 1/64 of the smallest one at the start, whatever the optimizer does; NaN and Inf are reported.
    """

    scale_gradient = True  # the paper's factor; a subclass may do without
    learns_offset = False  # whether there is an offset where integers are not symmetric
    floor_share = 1 / 64  # of the least scale at the start, below which none falls; in a subclass 0 => no floor
    scale: nn.Parameter
    offset: nn.Parameter | None
    init_left: Tensor
    quant_range: Tensor
    scale_floor: Tensor

    def __init__(
        self,
        bits: int = 4,  # fewer => smaller, coarser
        *,
        symmetric: bool | Literal["auto"] | None = None,  # None => the class's own: LSQ True, LSQPlus False
        axis: int | None = None,
        group: int = 0,
        init_batches: int = 1,  # more => a calmer start of activations; at each the ranks wait for each other
        process_group: Ranks = None,  # whose statistics count: None => the world's, "local" => this process's alone
    ) -> None:
        super().__init__()
        _check(bits, symmetric, group, axis, init_batches)
        if symmetric is None:
            symmetric = not self.learns_offset
        elif symmetric == "auto" and self.learns_offset:
            symmetric = False  # an offset serves both signs: nothing is left for the first batches to decide
        self.bits = bits
        self.symmetric = symmetric
        self.axis = axis
        self.group = group
        self.init_batches = init_batches
        self._agreement = Agreement(process_group)
        self._ready = False
        self.quant_min, self.quant_max = self._range(signed=symmetric is True)
        channels = 1 if axis is None and not group else 0  # [Note: Empty]
        self.scale = nn.Parameter(torch.ones(channels, dtype=torch.float32))
        offset = nn.Parameter(torch.zeros(channels, dtype=torch.float32))
        self.register_parameter("offset", offset if self.learns_offset and not symmetric else None)
        self.register_buffer("init_left", torch.tensor(init_batches))
        self.register_buffer("quant_range", torch.tensor([self.quant_min, self.quant_max]))
        self.register_buffer("scale_floor", torch.zeros((), dtype=torch.float32))
        self._note_own()

    # --- what it does ------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """x on the grid. With `rows`, x holds those rows, one each, of the table whose scales these are."""
        if not (self._ready or self._started(x)):
            for parameter in self.parameters() if self.scale.numel() else ():
                x = x + (0 * parameter.sum()).to(x.dtype)  # stays in the graph: DDP waits for each gradient
            return x
        scale = self.floored()
        offset: Tensor | None = self.offset
        if rows is not None:  # as if all had been quantized, then looked up: as many elements are under a scale
            per_row = x.shape[-1] // self.group if self.group else 1
            scale = scale.view(-1, per_row)[rows]
            offset = None if offset is None else offset.view(-1, per_row)[rows]
        return fake_quantize(
            x,
            scale,
            quant_min=self.quant_min,
            quant_max=self.quant_max,
            offset=offset,
            axis=self.axis,
            group=self.group,
            scale_gradient=self.scale_gradient,
        )

    def floored(self) -> Tensor:
        """The scale, nowhere below its floor. [Note: The floor]"""
        if not self.floor_share:
            return self.scale
        if torch.compiler.is_compiling() or self._lent():
            return self.scale + (self.scale_floor - self.scale.detach()).relu()
        self.scale.data.clamp_(min=self.scale_floor)
        return self.scale

    # --- how it starts: [Note: The start] ----------------------------------------------------------------------------

    @property
    def initialized(self) -> bool:
        """Whether the start is over and the scale is the optimizer's."""
        return self._ready or self._left() == 0

    def _left(self) -> int:
        """[Note: One truth, one cache]"""
        if self.init_left.is_meta:
            return self.init_batches
        left = int(self.init_left)
        self.quant_min, self.quant_max = self.quant_range.tolist()
        self._ready = left == 0
        return left

    @torch.no_grad()
    def initialize(self, weight: Tensor) -> Self:
        """Start from a weight. Every rank of the process group must call.

        One on the meta device only gives the number of scales; the first forward with a real one makes the start.
        """
        self._refuse_lent()
        self._size(channels_of(weight, self.axis, self.group))
        if not weight.is_meta:
            found = self.estimate(weight)
            self._write(self._blind(weight) if found is None else found, 1.0)
            self.init_left.zero_()
            self._ready = True
        return self

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Forget the scale: the next `init_batches` batches make a new start."""
        self._ready = False
        self.init_left.fill_(self.init_batches)
        for parameter in self.parameters():
            parameter.fill_(parameter is self.scale)
        self._set_range(signed=self.symmetric is True)
        self.scale_floor.zero_()

    def _started(self, x: Tensor) -> bool:
        """Make the start, or a part of it, from a batch. Whether there is a grid by now."""
        if torch.compiler.is_compiling():  # no start in a graph: an error where it must be whole, else run beside it
            torch._dynamo.graph_break(msg=_BEFORE_COMPILE)
            return bool(torch.compiler.disable(self._start_from)(x))
        return self._start_from(x)

    def _start_from(self, x: Tensor) -> bool:
        left = self._left()
        if not left:
            return True
        if torch._C._current_graph_task_id() != -1:  # an activation checkpoint shows its batch again, in the backward
            return left < self.init_batches
        self._refuse_lent()
        with torch.inference_mode(False), torch.no_grad():
            found = self.estimate(x)
            if found is None:
                return left < self.init_batches
            fresh = left == self.init_batches or found.signed != (self.quant_min < 0)
            self._size(len(found.scale_C))
            self._write(found, 1.0 if fresh else 1 / (self.init_batches - left + 1))
            self.init_left.sub_(1)
            self._ready = left == 1
        return True

    def estimate(self, x: Tensor) -> Start | None:
        """The paper's start for x, of all ranks together: 2 * mean|x| / sqrt(quant_max). None where x says nothing."""
        x_CN = self.by_channel(x)
        magnitude_C, negative_C, count_C = starts.sums(self._agreement, x_CN.abs(), x_CN < 0)
        if not magnitude_C.any():
            return None
        signed = (bool(negative_C.any()) or self.quant_min < 0) if self.symmetric == "auto" else self.symmetric
        return Start(starts.usable(2 * magnitude_C / count_C / math.sqrt(self._range(signed)[1])), None, signed)

    def _blind(self, weight: Tensor) -> Start:
        """A start for a weight of zeros: as if its elements were as large as 1 / sqrt(n), n of them to a channel."""
        w_CN = self.by_channel(weight)
        if not w_CN.isfinite().all():
            raise QatError("a weight with NaN or Inf gives no scale; fix the weight, or skip its layer")
        signed = self.symmetric is not False
        scale_C = w_CN.new_full((len(w_CN),), 2 / math.sqrt(max(w_CN.shape[1], 1) * self._range(signed)[1]))
        return Start(scale_C, None if self.offset is None else torch.zeros_like(scale_C), signed)

    def _write(self, start: Start, share: float) -> None:
        """Move scale and offset by `share` of the way to the start."""
        self._set_range(start.signed)
        for parameter, target_C in ((self.scale, start.scale_C), (self.offset, start.offset_C)):
            if parameter is not None and target_C is not None:
                target_C = target_C.to(parameter)
                parameter.data.copy_(target_C if share == 1.0 else parameter.lerp(target_C, share))
        self.scale_floor.copy_(self.floor_share * self.scale.min())

    def _set_range(self, signed: bool) -> None:
        self.quant_min, self.quant_max = self._range(signed)
        self.quant_range.copy_(torch.tensor([self.quant_min, self.quant_max]))

    def _size(self, channels: int) -> None:
        if not len(self.scale):
            if ranks_in_step() != "local":
                raise QatStateError(
                    "this quantizer does not know its number of channels, and DDP holds its parameters already: "
                    "run qat.calibrate(model, batches) before DDP"
                )
            for parameter in self.parameters():
                parameter.data = parameter.data.new_full((channels,), parameter is self.scale)
        if len(self.scale) != channels:
            raise QatError(f"x has {channels} channels, the quantizer was sized for {len(self.scale)}")

    def _refuse_lent(self) -> None:
        if self._lent():
            raise QatStateError(
                "this quantizer has no scale yet, and its parameters are lent to it for one forward (FSDP2, "
                "functional_call), so that a start would be lost: run qat.calibrate(model, batches) before fully_shard"
            )

    def _lent(self) -> bool:
        """[Note: Parameters that are lent]"""
        return self._own["scale"] is not self._parameters.get("scale")

    def _note_own(self) -> None:
        self._own = dict(self._parameters)

    # --- its range and its channels ----------------------------------------------------------------------------------

    def _range(self, signed: bool) -> tuple[int, int]:
        low = -(1 << self.bits - 1) if signed else 0
        return low, low + (1 << self.bits) - 1

    def by_channel(self, x: Tensor) -> Tensor:
        """x in fp32 or more, one row per channel."""
        channels = channels_of(x, self.axis, self.group)
        x = x.detach().to(torch.promote_types(x.dtype, torch.float32))
        if self.axis is not None:
            x = x.movedim(self.axis, 0)
        return x.reshape(channels, x.numel() // max(channels, 1))

    def extra_repr(self) -> str:
        """The bits, the integers in use, where scales lie, and whether the start is over."""
        where = f"group={self.group}" if self.group else f"axis={self.axis}"
        state = "" if self._ready else ", not initialized"
        return f"bits={self.bits}, {self.quant_min}..{self.quant_max}, {where}{state}"

    # --- casts and checkpoints ---------------------------------------------------------------------------------------

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(partial(never_narrow, fn), recurse)  # type: ignore[no-untyped-call]
        self._note_own()
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if not len(self.scale):
            self._size(len(state_dict.get(prefix + "scale", ())))
        saved = state_dict.get(prefix + "quant_range")
        allowed = [self._range(signed) for signed in (True, False) if self.symmetric in (signed, "auto")]
        if not (saved is None or saved.is_meta or tuple(saved.tolist()) in allowed):
            low, high = saved.tolist()
            errors: list[str] = rest[-1]
            errors.append(
                f"{prefix}quant_range is {low}..{high} in the checkpoint; this quantizer has "
                f"{' or '.join(f'{a}..{b}' for a, b in allowed)}: prepare the model with the bits it was saved with"
            )
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self._ready = False
        self._left()  # torch.compile must find the cache filled
        self._note_own()


class LSQPlus(LSQ):
    """LSQ with the start, and for activations the learned offset, of the LSQ+ paper.

    `symmetric=False` or "auto" (activations): integers 0 to 2**bits - 1 and an offset b, learned like the scale, in
    units of x: y = s * integer + b. Both start where the squared error on the first batches is least.
    `symmetric=True` (weights): integers as in `LSQ`, no offset; the scale starts at
    max(|mean - 3 std|, |mean + 3 std|) / 2**(bits - 1).
    """

    learns_offset = True

    def estimate(self, x: Tensor) -> Start | None:
        """The paper's start for x, of all ranks together. None where x says nothing."""
        x_CN = self.by_channel(x)
        if self.symmetric:
            x_CN = x_CN.to(widest(x_CN))
            sum_C, square_C, count_C = starts.sums(self._agreement, x_CN, x_CN.square())
            mean_C = sum_C / count_C
            reach_C = mean_C.abs() + 3 * (square_C / count_C - mean_C.square()).clamp(min=0).sqrt()
            return Start(starts.usable(reach_C / (1 << self.bits - 1)), None, True) if square_C.any() else None
        ends = starts.least_error(x_CN, self.quant_max, self._agreement)
        return None if ends is None else Start(starts.usable((ends[1] - ends[0]) / self.quant_max), ends[0], False)


def _check(bits: int, symmetric: bool | str | None, group: int, axis: int | None, init_batches: int) -> None:
    if not isinstance(bits, int) or bits not in BITS:
        raise QatError(f"bits must be {BITS[0]}..{BITS[-1]}, got {bits!r}")
    if symmetric not in (True, False, "auto", None):
        raise QatError(f"symmetric must be True, False or 'auto', got {symmetric!r}")
    if not isinstance(group, int) or group < 0:
        raise QatError(f"group must be a number of elements, or 0 for none, got {group!r}")
    if not isinstance(axis, int | None):
        raise QatError(f"axis must be a dimension's number or None, got {axis!r}")
    if group and axis is not None:
        raise QatError("give an axis or a group, not both")
    if not isinstance(init_batches, int) or init_batches < 1:
        raise QatError(f"init_batches must be 1 or more, got {init_batches!r}")
