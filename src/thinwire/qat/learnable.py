"""torch's learnable fake quantizer by its own names, over thinwire's op: `LearnableFakeQuantize`.

[Note: Modes] The flags are uint8 buffers, because checkpoints and scripts know them as such, but a forward that looked
at them would make the host wait for the device. It reads a copy in Python. Methods and load_state_dict keep the copy;
a script that writes a buffer itself is noticed by the buffer's version counter, which the host can see, and only then
are the flags read. Compiled code reads the copy alone.

[Note: Snapshots] The op is given clones of the parameters. The observer and the floor under the scale write parameters
in place, past autograd; a second call before the first one's backward would otherwise change what the first had saved.

[Note: Channels] Without `channel_len` a per-channel quantizer has one scale until it meets its first tensor or a
checkpoint. Then both parameters grow, and stay the objects they were: an optimizer made before holds the right ones.
"""

from collections.abc import Callable
from functools import partial, partialmethod
from typing import Any, NamedTuple, NoReturn, Self

import torch
from torch import Tensor
from torch.ao.quantization import FakeQuantizeBase
from torch.nn import Parameter

from thinwire.errors import QatError, QatTypeError
from thinwire.qat import ranges
from thinwire.qat.agreement import Ranks
from thinwire.qat.ops import Gradient, channels_of, check_dtype, check_grid, check_scale, fake_quantize, never_narrow


class _Modes(NamedTuple):
    """What a forward does. [Note: Modes]"""

    fake_quant: bool = True
    static: bool = True


class LearnableFakeQuantize(FakeQuantizeBase):
    """Fake quantization whose scale and zero point come from an observer, or are learned.

    `observer` is a torch.ao observer class, or what its `with_args` gives; keywords unknown here are for it. `gradient`
    is the rule for scale and zero point: "torch", or "lsq", the paper's, with `use_grad_scaling` by the elements of a
    channel. Starts in static estimation, with parameters that require no gradient. More in docs/howto/qat.md.
    """

    fake_quant_enabled: Tensor
    static_enabled: Tensor
    learning_enabled: Tensor
    eps: Tensor

    def __init__(
        self,
        observer: Callable[..., torch.nn.Module],
        quant_min: int = 0,
        quant_max: int = 255,
        scale: float = 1.0,
        zero_point: float = 0.0,
        channel_len: int = -1,
        use_grad_scaling: bool = False,
        *,
        gradient: Gradient = "torch",
        **observer_kwargs: Any,
    ) -> None:
        super().__init__()
        check_grid(quant_min, quant_max, gradient)
        self.quant_min = quant_min
        self.quant_max = quant_max
        self.bitwidth = (quant_max - quant_min + 1).bit_length() - 1
        self.use_grad_scaling = use_grad_scaling
        self.gradient = gradient
        self.activation_post_process: Any = observer(quant_min=quant_min, quant_max=quant_max, **observer_kwargs)
        self._copy_observer()
        self.channel_len = self._checked_length(channel_len)
        self._register(float(scale), float(zero_point), observer_kwargs.get("factory_kwargs"))

    def _copy_observer(self) -> None:
        """Take over the observer's attributes that are attributes here too."""
        observer = self.activation_post_process
        self.dtype: torch.dtype = observer.dtype
        self.qscheme: torch.qscheme = observer.qscheme
        self.ch_axis: int = getattr(observer, "ch_axis", -1)
        holds = torch.iinfo(self.dtype)
        if self.quant_min < holds.min or self.quant_max > holds.max:
            raise QatError(
                f"quant_min and quant_max must lie within {holds.min}..{holds.max} for {self.dtype}, "
                f"got {self.quant_min} and {self.quant_max}; give the observer another dtype"
            )

    def _checked_length(self, channel_len: int) -> int:
        if channel_len != -1 and (not isinstance(channel_len, int) or channel_len < 1):
            raise QatError(f"channel_len must be a positive integer, or -1 to infer it, got {channel_len!r}")
        if channel_len > 1 and self._axis is None:
            raise QatError(f"channel_len={channel_len} needs a per-channel observer; {self.qscheme} has one scale")
        return channel_len

    def _register(self, scale: float, zero_point: float, factory_kwargs: dict[str, Any] | None) -> None:
        """Parameters and buffers, by the names they have in torch's checkpoints."""
        full = partial(torch.full, dtype=torch.promote_types(torch.get_default_dtype(), torch.float32))
        self.scale = Parameter(full((max(self.channel_len, 1),), scale), requires_grad=False)
        self.zero_point = Parameter(full((max(self.channel_len, 1),), zero_point), requires_grad=False)
        check_scale(self.scale)
        self.register_buffer("static_enabled", torch.ones(1, dtype=torch.uint8))
        self.register_buffer("learning_enabled", torch.zeros(1, dtype=torch.uint8))
        self.register_buffer("eps", full((1,), torch.finfo(torch.float32).eps))
        self._enter(_Modes())
        # Also makes 32 bits of what an observer for a 16-bit model has made in 16: see _apply.
        self.to(torch.nn.factory_kwargs(factory_kwargs).get("device"))

    # --- modes --------------------------------------------------------------------------------------------------------

    def enable_param_learning(self) -> Self:
        """Learn scale and zero point; fake-quantize; the observer rests."""
        return self.toggle_qparam_learning(True).toggle_fake_quant(True).toggle_observer_update(False)

    def enable_static_estimate(self) -> Self:
        """The observer sets scale and zero point; fake-quantize; learn nothing."""
        return self.toggle_qparam_learning(False).toggle_fake_quant(True).toggle_observer_update(True)

    def enable_static_observation(self) -> Self:
        """The observer watches; inputs pass unchanged; scale and zero point stay as they are."""
        return self.toggle_qparam_learning(False).toggle_fake_quant(False).toggle_observer_update(True)

    def toggle_observer_update(self, enabled: bool = True) -> Self:
        """Whether the observer watches, and sets the parameters where the output is fake-quantized."""
        modes = self._seen_modes()._replace(static=bool(enabled))
        self.static_enabled.fill_(modes.static)
        return self._enter(modes)

    def toggle_fake_quant(self, enabled: bool = True) -> Self:
        """Whether the output is fake-quantized."""
        modes = self._seen_modes()._replace(fake_quant=bool(enabled))
        self.fake_quant_enabled.fill_(modes.fake_quant)
        return self._enter(modes)

    def toggle_qparam_learning(self, enabled: bool = True) -> Self:
        """Whether scale and zero point require a gradient."""
        self.learning_enabled.fill_(int(enabled))
        self.scale.requires_grad_(bool(enabled))
        self.zero_point.requires_grad_(bool(enabled))
        return self

    # The same switches by the names that torch's functions over models call.
    enable_observer = toggle_observer_update  # type: ignore[assignment]
    enable_fake_quant = toggle_fake_quant  # type: ignore[assignment]
    disable_observer = partialmethod(toggle_observer_update, False)
    disable_fake_quant = partialmethod(toggle_fake_quant, False)

    def _seen_modes(self) -> _Modes:
        """What the flags say. [Note: Modes]"""
        if not torch.compiler.is_compiling() and self._stamps != self._current_stamps():
            self._read_modes()
        return self._modes

    def _read_modes(self) -> None:
        if not self.static_enabled.is_meta:
            self._enter(_Modes(bool(self.fake_quant_enabled), bool(self.static_enabled)))

    def _enter(self, modes: _Modes) -> Self:
        self._modes = modes
        self._stamps = self._current_stamps()
        return self

    def _current_stamps(self) -> list[tuple[int, int]]:
        """They change when a flag is replaced or written to. Tensors made in inference mode count no writes."""
        flags = self.fake_quant_enabled, self.static_enabled
        return [(id(flag), 0 if flag.is_inference() else flag._version) for flag in flags]

    # --- forward ------------------------------------------------------------------------------------------------------

    def forward(self, X: Tensor) -> Tensor:
        """X on the grid, or X itself where fake quantization is off."""
        modes = self._seen_modes()
        if modes.fake_quant or (modes.static and X.is_complex()):
            check_dtype(X)  # before the observer sees it
        if modes.fake_quant:
            self._fit(X)
            if self._unfitted:
                return X  # it has no channels
        # While a backward runs, an activation checkpoint shows a batch again.
        if modes.static and (torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1):
            self._observe(X.detach(), adopt=modes.fake_quant)
        if modes.fake_quant or not modes.static:
            self._clamp()
        return self._quantized(X) if modes.fake_quant else X

    def _quantized(self, x: Tensor) -> Tensor:
        scale = self.scale.clone()  # [Note: Snapshots]
        zero_point = self.zero_point.clone()
        # A real zero point is an offset in steps; autograd turns the offset's gradients into its own.
        real = self.qscheme == ranges.FLOAT
        return fake_quantize(
            x,
            scale,
            quant_min=self.quant_min,
            quant_max=self.quant_max,
            zero_point=None if real else zero_point,
            offset=-zero_point * scale if real else None,
            axis=self._axis,
            gradient=self.gradient,
            scale_gradient=self.use_grad_scaling,
        )

    @torch.no_grad()
    def _observe(self, x: Tensor, *, adopt: bool) -> None:
        """Show x to the observer; `adopt` takes over its estimates, the same on all ranks."""
        observer = self.activation_post_process
        ranks = ranges.ranks_in_step()
        news = ranges.observe(observer, x, ranks)
        if adopt:
            parameters = self.scale, self.zero_point
            found = ranges.estimate(observer) if news else parameters
            fitted = [t.to(p).expand_as(p) for t, p in zip(found, parameters, strict=True)]
            self._adopt(*(fitted if ranges.is_min_max(observer) else ranges.mean(fitted, ranks)))

    def _adopt(self, scale: Tensor, zero_point: Tensor) -> None:
        """Take what the observer says, where it has seen anything."""
        seen = scale.isfinite()
        _write(self.scale, scale.where(seen, self.scale))
        _write(self.zero_point, zero_point.where(seen, self.zero_point))

    @torch.no_grad()
    def _clamp(self) -> None:
        """Keep scales at eps or above, whatever the optimizer did, and symmetric zero points in the middle."""
        _write(self.scale, torch.maximum(self.scale, self.eps))
        if self.qscheme in ranges.SYMMETRIC:
            # The middle: 0 where the range has both signs, else the integer that halves it.
            middle = 0 if self.quant_min < 0 < self.quant_max else (self.quant_min + self.quant_max + 1) // 2
            _write(self.zero_point, torch.full_like(self.zero_point, middle))

    @property
    def _axis(self) -> int | None:
        return self.ch_axis if self.qscheme in ranges.PER_CHANNEL else None

    @property
    def _unfitted(self) -> bool:
        return self._axis is not None and self.channel_len == -1

    def _fit(self, x: Tensor) -> None:
        """Take the number of channels from the first tensor that has any. [Note: Channels]"""
        length = channels_of(x, self._axis, 0)
        if length == self.scale.numel() and not self._unfitted:
            return
        if not self._unfitted:
            raise QatError(f"axis {self.ch_axis} of {tuple(x.shape)} must have {self.scale.numel()} channels")
        if torch.compiler.is_compiling() or ranges.ranks_in_step() != "local":
            raise QatError(
                "the number of channels must be known before the model is compiled or wrapped in DDP; "
                "give channel_len, or run one batch before"
            )
        if length:
            self._grow(length)

    def _grow(self, length: int) -> None:
        self.channel_len = length
        with torch.inference_mode(False):  # parameters made in inference mode could not be trained
            for parameter in (self.scale, self.zero_point):
                parameter.data = parameter.data.expand(length).clone()
                parameter.grad = None

    # --- parameters ---------------------------------------------------------------------------------------------------

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Scale, and zero point as an integer of the range (as it is for schemes with real zero points)."""
        self._clamp()
        scale = self.scale.detach().clone()
        zero_point = self.zero_point.detach().clone()
        check_scale(scale.cpu())
        if self.qscheme == ranges.FLOAT:
            return scale, zero_point
        return scale, zero_point.round().clamp(self.quant_min, self.quant_max).long()

    def observe_quant_params(self) -> None:
        """Print scale and zero point."""
        print(f"LearnableFakeQuantize Scale: {self.scale.detach()}")
        print(f"LearnableFakeQuantize Zero Point: {self.zero_point.detach()}")

    @torch.no_grad()
    def synchronize(self, group: Ranks = None) -> Self:
        """Give all ranks of `group` (None: the world) the mean of their parameters. All of them must call it.

        Inside DDP estimates are the same on all ranks without this; it is for data parallelism of other kinds.
        """
        self._adopt(*ranges.mean([self.scale, self.zero_point], group))
        return self

    def extra_repr(self) -> str:
        """Modes, range and the state of the parameters."""
        modes = self._seen_modes()
        return (
            f"fake_quant={modes.fake_quant}, static={modes.static}, learning={self.scale.requires_grad}, "
            f"quant_min={self.quant_min}, quant_max={self.quant_max}, dtype={self.dtype}, qscheme={self.qscheme}, "
            f"ch_axis={self.ch_axis}, gradient={self.gradient!r}, use_grad_scaling={self.use_grad_scaling}, "
            f"scale={self.scale.detach()}, zero_point={self.zero_point.detach()}"
        )

    # --- moving, saving, loading --------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        modes = self._seen_modes()
        super()._apply(partial(never_narrow, fn), recurse)  # type: ignore[no-untyped-call]
        return self._enter(modes)

    def __getstate__(self) -> object:
        self._seen_modes()  # so that a copy knows of flags written by hand
        return super().__getstate__()  # type: ignore[no-untyped-call]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._enter(self._modes)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        scale = state_dict.get(f"{prefix}scale")
        if self._unfitted and scale is not None and scale.numel() > 1:
            self._grow(scale.numel())
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self._read_modes()
        if f"{prefix}learning_enabled" in state_dict and not self.learning_enabled.is_meta:
            self.toggle_qparam_learning(bool(self.learning_enabled))

    def __prepare_scriptable__(self) -> NoReturn:
        raise QatTypeError(
            "LearnableFakeQuantize cannot be scripted (torch's own class cannot either); "
            "use torch.compile or torch.export, or convert the model first"
        )


def _write(parameter: Parameter, value: Tensor) -> None:
    """Past autograd's version counter, which would take it for damage to what was saved. [Note: Snapshots]"""
    (parameter if torch.compiler.is_compiling() else parameter.data).copy_(value)
