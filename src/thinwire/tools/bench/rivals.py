"""Torch's own ways to the same end: the functions of its quantisation hooks, and torch.compile of the reference."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from thinwire.kernels import Backend, reference
from thinwire.tools.bench import copies
from thinwire.tools.bench.copies import KernelCase
from thinwire.tools.bench.record import Row
from thinwire.tools.bench.timing import Call, Effort

CHANNEL = 512  # elements: the default of torch's per-channel hook
OPS = ("encode", "decode")
Quantized = tuple[Tensor, Tensor, Tensor]  # codes, scales, zero points


def compiled() -> Backend:
    """The ops of the reference through torch.compile."""
    # Past its limit of recompilations dynamo falls back to eager in silence, so every case starts afresh.
    torch._dynamo.reset()
    ops = {op: torch.compile(getattr(reference, op), dynamic=False) for op in ("encode", "decode_sum", "recode")}
    return cast(Backend, SimpleNamespace(**ops))


@contextmanager
def quiet() -> Iterator[None]:
    """What torch thinks of the code it compiles, and of its own old code, is not for the user of a benchmark."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.")
        yield


@dataclass(frozen=True, kw_only=True)
class HookCase(KernelCase):
    """What torch's quantisation hook does to a bucket before or after its messages; `name` is one of HOOKS."""

    part: str = "rivals"

    @property
    def minimal_bytes(self) -> int:
        """The tensor, one byte per element, and 8 bytes per scale and zero point."""
        return self.numel * (self.dtype.itemsize + 1) + 8 * HOOKS[self.name].scales(self.numel)

    def backend_name(self, backend: Backend) -> str:
        return "torch"

    def measure(self, backend: Backend, effort: Effort, x: Tensor) -> Row:
        """The slow hook gets few rounds. One set of buffers: its own temporaries fill any cache."""
        few = replace(effort, rounds=effort.slow_rounds, launches=1) if HOOKS[self.name].slow else effort
        with quiet():
            return copies.beside(x, self.prepare, self.minimal_bytes, few, sets=1)

    def prepare(self, x: Tensor) -> Call:
        hook = HOOKS[self.name]
        if self.op == "encode":
            return lambda: _drop(hook.encode(x))
        quantized = hook.encode(x)
        return lambda: _drop(hook.decode(*quantized))


def _drop(result: object) -> None:
    """A timed call returns nothing."""


@dataclass(frozen=True)
class TorchHook:
    """What a quantisation hook of torch does before and after its messages, and its scales per so many elements."""

    encode: Callable[[Tensor], Quantized]
    decode: Callable[[Tensor, Tensor, Tensor], Tensor]
    scales: Callable[[int], int]
    slow: bool = False  # a loop over channels: over a second for 2**24 elements


def _torch_hooks() -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks

    return quantization_hooks


def _per_tensor_encode(x: Tensor) -> Quantized:
    """As in `quantization_pertensor_hook`: observe, bring scale and zero point to the device, quantise."""
    from torch.ao.quantization import MinMaxObserver

    observer = MinMaxObserver().to(x.device)
    observer(x)
    scale, zero = torch.FloatTensor([*observer.calculate_qparams()]).to(x.device)
    return _torch_hooks()._quantize_per_tensor_backend(x, scale, zero), scale, zero


def _per_channel_encode(x: Tensor) -> Quantized:
    """As in `quantization_perchannel_hook`: pad to channels, observe, quantise channel by channel."""
    from torch.ao.quantization import PerChannelMinMaxObserver

    padded = torch.nn.functional.pad(x, (0, CHANNEL - len(x) % CHANNEL), mode="constant", value=0)
    x_CB = padded.view(-1, CHANNEL).to(x.device)
    observer = PerChannelMinMaxObserver().to(x.device)
    observer(x_CB)
    scale_C, zero_C = torch.stack(observer.calculate_qparams()).to(x.device)
    return _torch_hooks()._quantize_per_channel_backend(x_CB, scale_C, zero_C), scale_C, zero_C


HOOKS = {
    "torch:per_tensor": TorchHook(
        encode=_per_tensor_encode,
        decode=lambda *quantized: _torch_hooks()._dequantize_per_tensor_backend(*quantized),
        scales=lambda numel: 1,
    ),
    "torch:per_channel": TorchHook(
        encode=_per_channel_encode,
        decode=lambda *quantized: _torch_hooks()._dequantize_per_channel_backend(*quantized).flatten(),
        scales=lambda numel: numel // CHANNEL + 1,
        slow=True,
    ),
}
