"""The cases of the kernel benchmark, each one row, measured by turns with copies of as many bytes.

On a GPU every call goes round sets of buffers that together are several times its cache, so that small tensors come
from memory as large ones do, kernel and copies alike. Torch's own ways to the same end are the functions of its
quantisation hooks, and torch.compile of the reference.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from torch.ao.quantization import MinMaxObserver, PerChannelMinMaxObserver
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks

from thinwire.codecs import codec
from thinwire.collectives import checksums
from thinwire.kernels import Backend, Encoding, hashing, reference, select
from thinwire.tools.bench import timing
from thinwire.tools.bench.record import TIMES, BenchError, Row
from thinwire.tools.bench.timing import Call, Effort

COLUMNS = (*TIMES, "copy_ms", "times_copy", "copy_share", "copy_same_ms", "minimal_bytes", "cold", "rounds")
FOOTPRINT = 1 << 28  # bytes that a call goes round on a GPU
MOST_SETS = 256  # of buffers
EAGER, COMPILE = "times_eager", "times_compile"  # columns, and the rivals they tell of
CHANNEL = 512  # elements: the default of torch's per-channel hook
REPLAYS = 50  # of a graph in a row
_KEY = hashing.key(0, 0, hashing.ROTATION)
_torch: Any = quantization_hooks  # untyped
Quantized = tuple[Tensor, Tensor, Tensor]  # codes, scales, zero points


@dataclass(frozen=True, kw_only=True)
class KernelCase(ABC):
    part: str
    op: str
    name: str  # in the column `codec`
    numel: int
    dtype: torch.dtype = torch.float32
    world: int = 1  # wires that the op reads
    threads: int
    device: torch.device

    def __str__(self) -> str:
        size = f"{self.threads} threads" if self.device.type == "cpu" else f"{self.numel} elements"
        return f"{self.op} {self.name} {timing.dtype_name(self.dtype)}, {size}"

    @abstractmethod
    def measure(self, backend: Backend, effort: Effort, x: Tensor) -> Row:
        """The time columns, of x or of a part of it."""

    def served_by(self, backend: Backend) -> Backend:
        """What runs it where `backend` serves the device."""
        return backend

    def backend_name(self, backend: Backend) -> str:
        """What the column `backend` says where `backend` serves the device."""
        return timing.name_of(backend)


def beside(
    x: Tensor,
    make: Callable[[Tensor], Call],
    moved: int,
    effort: Effort,
    *,
    cold: bool = True,
    sets: int | None = None,
    wrap: Callable[[Call], Call] = lambda call: call,
) -> Row:
    """The time columns of what `make` prepares on x, which moves at least `moved` bytes.

    `cold`: on a GPU, from memory rather than from its cache. `sets` of buffers, by default as many as fill the
    footprint; `wrap` is put around all calls that are compared.
    """
    cold = cold and x.device.type == "cuda"
    footprint = FOOTPRINT if cold else 0
    half = _bytes(x, -(-moved // 32) * 16)  # whole vectors: a copy that ends in odd bytes may go by bytes
    calls = {
        "copy": _ring(x, _copy, wrap, sets_for(2 * x.numel() * x.itemsize, footprint)),
        "same": _ring(half, _copy, wrap, sets_for(moved, footprint)),
        "ours": _ring(x, make, wrap, sets or sets_for(moved, footprint)),
    }
    times = timing.interleave(calls, effort.rounds, x.device, effort.launches)
    copy_ms, same_ms, ours_ms = (timing.percentiles(taken)[1] for taken in times.values())
    return {
        **timing.columns(times["ours"]),
        "copy_ms": copy_ms,
        "times_copy": ours_ms / copy_ms,
        "copy_share": same_ms / ours_ms,
        "copy_same_ms": same_ms,
        "minimal_bytes": moved,
        "cold": cold,
        "rounds": effort.rounds,
    }


def sets_for(nbytes: int, footprint: int) -> int:
    """Sets of buffers of `nbytes` that fill the footprint: at least one, and not too many to make."""
    return min(MOST_SETS, max(1, -(-footprint // nbytes)))


def _ring(source: Tensor, make: Callable[[Tensor], Call], wrap: Callable[[Call], Call], sets: int) -> Call:
    sources = [source, *(source.clone() for _ in range(sets - 1))]
    return timing.rotate([wrap(make(each)) for each in sources])


def _copy(source: Tensor) -> Call:
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _bytes(x: Tensor, count: int) -> Tensor:
    """`count` bytes: those of x, over and over."""
    content = x.view(torch.uint8)
    return content.repeat(-(-count // content.numel()))[:count]


@dataclass(frozen=True, kw_only=True)
class OpCase(KernelCase):
    rivals: tuple[str, ...] = (EAGER,)  # EAGER, COMPILE: what it is compared with beside the copies

    @property
    def encoding(self) -> Encoding:
        return codec(self.name).pick(shape=(self.numel,)).encoding(self.dtype)

    @property
    def minimal_bytes(self) -> int:
        """Each input byte read once, each output byte written once."""
        wire = self.encoding.format.layout(self.numel).nbytes
        plain = self.numel * self.dtype.itemsize
        return {
            "encode": plain + wire,
            "encode_residual": plain + wire + 2 * 4 * self.numel,  # the residual is fp32, read and written
            "decode": wire + plain,
            "decode_sum": self.world * wire + plain,
            "recode": self.world * wire + wire,
            "checksum": wire,
        }[self.op]

    def served_by(self, backend: Backend) -> Backend:
        """The reference, for formats that it alone knows."""
        return reference if select(self.device, self.encoding.format) is reference else backend

    def measure(self, backend: Backend, effort: Effort, x: Tensor) -> Row:
        """The kernel beside copies on the whole of x, then beside its rivals on a slice."""
        columns = beside(x, lambda each: prepare(self, backend, each), self.minimal_bytes, effort)
        return {**columns, **_rivals(self, backend, effort, x)}


def prepare(case: OpCase, backend: Backend, x: Tensor, filler: Backend | None = None) -> Call:
    """The op of `case` on x, with its other buffers made, and filled by `filler` where the op is slow to prepare."""
    how = case.encoding
    numel = x.numel()
    wires_WN = x.new_empty(case.world, how.format.layout(numel).nbytes, dtype=torch.uint8)
    (filler or backend).encode(how, x, wires_WN[0], None, rotation=_KEY, dither=0)
    if case.op == "encode":
        return lambda: backend.encode(how, x, wires_WN[0], None, rotation=_KEY, dither=0)
    if case.op == "checksum":
        return lambda: checksums.sums_of(wires_WN[0])
    if case.op == "encode_residual":
        residual = torch.zeros_like(x, dtype=torch.float32)
        return lambda: backend.encode(how, x, wires_WN[0], residual, rotation=_KEY, dither=0)
    wires_WN[1:] = wires_WN[0]
    scale = 1 / case.world
    if case.op == "recode":
        if not codec(case.name).recodes:
            raise BenchError(f"sums of wires of {case.name} are not encoded again")
        wire = torch.empty_like(wires_WN[0])
        return lambda: backend.recode(how, wires_WN, wire, numel, scale=scale, rotation=_KEY, dither=0)
    out = torch.empty_like(x)
    return lambda: backend.decode_sum(how.format, wires_WN, out, scale=scale, rotation=_KEY)


def _rivals(case: OpCase, backend: Backend, effort: Effort, x: Tensor) -> Row:
    """How many times longer than the kernel the same op takes in torch: above 1, the kernel is faster.

    Measured on the first `slow_numel` elements, kernel and rival by turns; null where there is no rival, and where
    the reference cannot be compiled.
    """
    row: Row = {}
    small = replace(case, numel=min(case.numel, effort.slow_numel))
    part = x[: small.numel]
    if EAGER in case.rivals and backend is not reference:
        row = {EAGER: _times(small, backend, reference, effort, part), "eager_numel": small.numel}
    if COMPILE in case.rivals:
        try:
            row |= {COMPILE: _times(small, backend, compiled(), effort, part), "eager_numel": small.numel}
        except Exception as error:  # a compiler may raise anything
            row |= {"note": f"torch.compile of the reference: {timing.note_of(error)}"}
    return row


def _times(case: OpCase, backend: Backend, rival: Backend, effort: Effort, x: Tensor) -> float:
    with quiet():
        calls = {"ours": prepare(case, backend, x), "rival": prepare(case, rival, x, reference)}
        times = timing.interleave(calls, effort.slow_rounds, case.device)
    ours, theirs = (timing.percentiles(taken)[1] for taken in times.values())
    return theirs / ours


@dataclass(frozen=True, kw_only=True)
class PathCase(KernelCase):
    """Encode a message, recode a shard of it from all ranks, decode a message."""

    part: str = "replay"
    op: str = "codec_path"

    @property
    def shard(self) -> int:
        """Elements of the longest shard."""
        return -(-self.numel // self.world)

    @property
    def minimal_bytes(self) -> int:
        message, shard = (codec(self.name).wire_bytes(numel, self.dtype) for numel in (self.numel, self.shard))
        return 2 * (self.numel * self.dtype.itemsize + message) + (self.world + 1) * shard

    def measure(self, backend: Backend, effort: Effort, x: Tensor) -> Row:
        """The time of a replay; `launched_ms` is the same without a graph."""
        launched = timing.launched_ms(self.prepare(x), REPLAYS, self.device)
        replays = replace(effort, launches=REPLAYS)
        columns = beside(x, self.prepare, self.minimal_bytes, replays, cold=False, wrap=timing.captured)
        return {**columns, "launched_ms": launched}

    def prepare(self, x: Tensor) -> Call:
        """The three calls on x, with their other buffers made and filled. The step is known: no header is read."""
        chosen = codec(self.name)
        wire = x.new_empty(chosen.wire_bytes(x.numel(), x.dtype), dtype=torch.uint8)
        wires_WN = x.new_empty(self.world, chosen.wire_bytes(self.shard, x.dtype), dtype=torch.uint8)
        reduced = torch.empty_like(wires_WN[0])
        out = torch.empty_like(x)
        for own in wires_WN:
            chosen.encode(x[: self.shard], own, step=0)

        def path() -> None:
            chosen.encode(x, wire, step=0)
            chosen.recode(wires_WN, reduced, self.shard, scale=1 / self.world, step=0, dtype=x.dtype, trusted=True)
            chosen.decode(wire, out, step=0)

        path()  # compiles what is compiled late
        return path


def compiled() -> Backend:
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
            return beside(x, self.prepare, self.minimal_bytes, few, sets=1)

    def prepare(self, x: Tensor) -> Call:
        hook = HOOKS[self.name]
        if self.op == "encode":
            return lambda: hook.encode(x)
        quantized = hook.encode(x)
        return lambda: hook.decode(*quantized)


@dataclass(frozen=True)
class TorchHook:
    """What a quantisation hook of torch does before and after its messages, and its scales per so many elements."""

    encode: Callable[[Tensor], Quantized]
    decode: Callable[[Tensor, Tensor, Tensor], Tensor]
    scales: Callable[[int], int]
    slow: bool = False  # a loop over channels: over a second for 2**24 elements


def _per_tensor_encode(x: Tensor) -> Quantized:
    """As in `quantization_pertensor_hook`: observe, bring scale and zero point to the device, quantise."""
    observer = MinMaxObserver().to(x.device)
    observer(x)
    scale, zero = torch.FloatTensor([*observer.calculate_qparams()]).to(x.device)
    return _torch._quantize_per_tensor_backend(x, scale, zero), scale, zero


def _per_channel_encode(x: Tensor) -> Quantized:
    """As in `quantization_perchannel_hook`: pad to channels, observe, quantise channel by channel."""
    padded = torch.nn.functional.pad(x, (0, CHANNEL - len(x) % CHANNEL), mode="constant", value=0)
    x_CB = padded.view(-1, CHANNEL).to(x.device)
    observer = PerChannelMinMaxObserver().to(x.device)
    observer(x_CB)
    scale_C, zero_C = torch.stack(observer.calculate_qparams()).to(x.device)
    return _torch._quantize_per_channel_backend(x_CB, scale_C, zero_C), scale_C, zero_C


HOOKS = {
    "torch:per_tensor": TorchHook(
        encode=_per_tensor_encode,
        decode=lambda *quantized: _torch._dequantize_per_tensor_backend(*quantized),
        scales=lambda numel: 1,
    ),
    "torch:per_channel": TorchHook(
        encode=_per_channel_encode,
        decode=lambda *quantized: _torch._dequantize_per_channel_backend(*quantized).flatten(),
        scales=lambda numel: numel // CHANNEL + 1,
        slow=True,
    ),
}
