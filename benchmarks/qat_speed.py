"""What fake quantization costs: forward and backward beside plain copies and torch's own learnable op, interleaved.

[Note: Floor] The least that any implementation moves, measured in the same run. Forward: a copy of x. Backward: an add
that reads x and the gradient of y and writes that of x. Together: the sum of the two.

[Note: Peak] Bytes that are allocated at the peak of a forward and a backward beyond those before it (x, the gradient of
y, the parameters) and beyond y, over the elements of x; the gradient of x is counted. On a GPU torch's allocator tells
it, on the CPU torch's profiler: what C code takes for itself there is not seen.

Times are those of the device: it is kept waiting until the host has queued all calls of a measurement, as it does where
a model keeps it busy.
"""

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from benchmarks import clock
from benchmarks.clock import KernelEffort as Effort
from thinwire import kernels
from thinwire.qat import fake_quantize
from thinwire.qat.ops import Gradient
from thinwire.tools.bench import timing
from thinwire.tools.bench.record import TIMES, Row
from thinwire.tools.bench.timing import Call

OPS = ("forward", "backward", "forward_backward")
GRAINS = ("tensor", "channel")
# A scale alone by the paper's rule; scale and zero point by torch's, as torch's op has.
GRADIENTS: tuple[Gradient, ...] = ("lsq", "torch")
DTYPES = (torch.float32, torch.bfloat16)
NUMEL = {"cpu": 1 << 22, "cuda": 1 << 25}
QUICK_NUMEL = {"cpu": 1 << 18, "cuda": 1 << 22}
BITS = 4  # the work does not hang on it
THREADS = 1  # of the CPU
_AHEAD_MS = 8.0  # longer than the host takes to queue the launches of a measurement
_LO = -(1 << (BITS - 1))
_HI = (1 << (BITS - 1)) - 1


@dataclass(frozen=True)
class SpeedCase:
    """One op on one kind of tensor: a row for each of OPS."""

    grain: str
    dtype: torch.dtype
    gradient: Gradient
    numel: int
    device: torch.device
    effort: Effort

    def __str__(self) -> str:
        return f"speed, {self.gradient} per {self.grain}, {clock.dtype_name(self.dtype)}, {self.numel} elements"

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns, as near to a square as whole numbers come, more columns than rows."""
        rows = next(rows for rows in range(math.isqrt(self.numel), 0, -1) if self.numel % rows == 0)
        return rows, self.numel // rows

    def rows(self) -> Iterator[Row]:
        """One of each op. An implementation that fails has no times: the row says why, ours in `note`."""
        with torch.enable_grad():
            measured = _measure(self)
        for op in OPS:
            yield {
                "op": op,
                "backend": clock.name_of(kernels.select(self.device)),
                "device": self.device.type,
                "numel": self.numel,
                "dtype": clock.dtype_name(self.dtype),
                "granularity": self.grain,
                "channels": 1 if self.grain == "tensor" else self.shape[0],
                "gradient": self.gradient,
                "bits": BITS,
                "threads": THREADS,
                "rounds": self.effort.rounds,
                **measured[op],
            }


def cases(device: torch.device, numel: int | None, quick: bool) -> list[SpeedCase]:
    size = numel or (QUICK_NUMEL if quick else NUMEL)["cuda" if device.type == "cuda" else "cpu"]
    effort = clock.effort_on(device, quick)
    return [
        SpeedCase(grain, dtype, gradient, size, device, effort)
        for dtype in DTYPES
        for gradient in GRADIENTS
        for grain in GRAINS
    ]


@dataclass(frozen=True)
class Subject:
    """An implementation on its input: its name, what it applies, what it differentiates by, and the gradient of y."""

    name: str
    apply: Callable[[], Tensor]
    inputs: Sequence[Tensor]
    grad: Tensor

    def forward_backward(self) -> None:
        torch.autograd.grad(self.apply(), self.inputs, self.grad)

    def calls(self) -> dict[str, Call]:
        """By op. The forward of the backward is done beforehand, once."""
        backward = partial(torch.autograd.grad, self.apply(), self.inputs, self.grad, retain_graph=True)
        return dict(zip(OPS, (self.apply, backward, self.forward_backward), strict=True))


def subjects(case: SpeedCase) -> tuple[Subject, Subject]:
    """thinwire's and torch's, on the same Gaussian numbers and the same scales, those LSQ starts from."""
    generator = torch.Generator(device=case.device).manual_seed(0)
    x, grad = (torch.randn(case.shape, generator=generator, device=case.device).to(case.dtype) for _ in range(2))
    per_channel = case.grain == "channel"
    spread = x.float().abs().mean(1) if per_channel else x.float().abs().mean().reshape(1)
    scale = (2 * spread / math.sqrt(_HI)).requires_grad_()
    zero_point = torch.zeros_like(scale).requires_grad_()
    shift = zero_point if case.gradient == "torch" else None
    axis = 0 if per_channel else None
    x.requires_grad_()

    def ours() -> Tensor:
        return fake_quantize(
            x, scale, quant_min=_LO, quant_max=_HI, zero_point=shift, axis=axis, gradient=case.gradient
        )

    def theirs() -> Tensor:
        factor = 1 / math.sqrt(x.numel() * _HI)
        if per_channel:
            return torch._fake_quantize_learnable_per_channel_affine(x, scale, zero_point, 0, _LO, _HI, factor)
        return torch._fake_quantize_learnable_per_tensor_affine(x, scale, zero_point, _LO, _HI, factor)

    own = [x, scale] if shift is None else [x, scale, shift]
    return Subject("ours", ours, own, grad), Subject("torch", theirs, [x, scale, zero_point], grad)


def _measure(case: SpeedCase) -> dict[str, Row]:
    ours, theirs = subjects(case)
    calls: dict[str, Call] = _floors(ours)
    peaks: dict[str, float] = {}
    notes: Row = {"note": None, "torch_note": None}
    for subject, note in ((ours, "note"), (theirs, "torch_note")):
        try:  # what fails is noted in a column, and the others are still measured
            peaks[subject.name] = peak_bytes(subject, case.device) / case.numel
            calls |= {f"{subject.name} {op}": call for op, call in subject.calls().items()}
        except Exception as error:  # of a compiler, a driver or an allocator: any kind
            notes[note] = clock.note_of(error)
    times = clock.interleave(calls, case.effort.rounds, case.device, case.effort.launches, _AHEAD_MS)
    return {op: {**_times(op, times, peaks), **notes} for op in OPS}


def _floors(subject: Subject) -> dict[str, Call]:
    """[Note: Floor]; as integers, since not every CPU adds 16-bit floats at the speed of memory."""
    whole = {4: torch.int32, 2: torch.int16}[subject.grad.itemsize]
    x, grad = (tensor.detach().view(whole) for tensor in (subject.inputs[0], subject.grad))
    out = torch.empty_like(x)
    return {"floor forward": lambda: out.copy_(x), "floor backward": lambda: torch.add(x, grad, out=out)}


def _times(op: str, times: dict[str, list[float]], peaks: dict[str, float]) -> Row:
    medians = {name: timing.percentiles(taken)[1] for name, taken in times.items()}
    floor = math.fsum(medians[f"floor {part}"] for part in ("forward", "backward") if part in op)
    ours = medians.get(f"ours {op}")
    theirs = medians.get(f"torch {op}")
    held = peaks if op == "forward_backward" else {}  # one alone has no such figure
    return {
        **(timing.columns(times[f"ours {op}"]) if ours else dict.fromkeys(TIMES)),
        "times_floor": ours / floor if ours else None,
        "times_torch": theirs / ours if ours and theirs else None,
        "floor_ms": floor,
        "torch_ms": theirs,
        "torch_times_floor": theirs / floor if theirs else None,
        "peak_bytes_per_element": held.get("ours"),
        "torch_peak_bytes_per_element": held.get("torch"),
    }


def peak_bytes(subject: Subject, device: torch.device) -> float:
    """[Note: Peak]; NaN where torch cannot tell."""
    subject.forward_backward()  # what is made once is not counted
    peak = _cuda_peak if device.type == "cuda" else _cpu_peak
    return peak(subject.forward_backward) - subject.inputs[0].nbytes


def _cuda_peak(call: Call) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _cpu_peak(call: Call) -> float:
    if not torch.profiler.kineto_available():
        return math.nan
    with _silent(), torch.autograd.profiler.profile(profile_memory=True) as profile:
        call()
    assert profile.kineto_results is not None
    found = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    found.sort(key=lambda event: event.start_ns())
    changes: list[int] = [event.nbytes() for event in found]
    return max(accumulate(changes, initial=0))


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Some builds of torch's profiler announce themselves on standard error, past sys.stderr."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
