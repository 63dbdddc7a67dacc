"""The kernel benchmark: what a kernel costs beside a plain copy, torch eager and torch.compile, interleaved in one run.

Every case measures a backend's own functions (`kernels.schema.Backend`), so the checks in front of them are not timed.
Inputs are Gaussian; the speed of the kernels does not hang on the values. On a GPU every call goes round sets of
buffers that together are several times its cache, so that small tensors come from memory as large ones do, kernel and
copies alike. Torch's own ways to the same end are the functions of its quantization hooks, and torch.compile of the
reference. `python -m benchmarks.kernels --help` lists the parts of a run.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from types import SimpleNamespace
from typing import Annotated, Any, cast

import torch
import typer
from torch import Tensor
from torch.ao.quantization import MinMaxObserver, PerChannelMinMaxObserver
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks

from benchmarks import clock
from benchmarks.clock import KernelEffort as Effort
from benchmarks.command import Codecs, check_device, show_with_notes, start, words
from thinwire import kernels
from thinwire.codecs import Codec, codec
from thinwire.collectives import transport
from thinwire.kernels import Backend, Encoding, hashing, reference
from thinwire.tools.bench import timing
from thinwire.tools.bench.record import TIMES, Progress, Record, Row, collect
from thinwire.tools.bench.timing import Call
from thinwire.tools.cli import flags
from thinwire.tools.cli.bench import deliver
from thinwire.tools.cli.flags import Device, Json, Quick, Words, option
from thinwire.tools.local.link import BenchError

OPS = ("encode", "encode_residual", "decode", "decode_sum", "recode")
ASKED = (*OPS, "checksum")  # the last of a wire, where it is asked for
SUMS = ("decode_sum", "recode")  # the ops that take the wires of several ranks
PARTS = ("codecs", "sizes", "replay", "rivals")  # what compiles for long comes last
CODECS = (
    *("none", "bf16", "fp16", "e4m3", "int8", "int8:mode=affine", "int4", "int2"),
    *("lloyd4", "lloyd4:block=256", "lloyd2", "lloyd1", "trellis2"),
)
HEADLINES = ("int8", "int4", "int2", "lloyd4", "lloyd2", "lloyd1")
COMPILED = ("int8", "int4", "lloyd4")  # the codecs compared with torch.compile where nothing is asked for
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PATH_CODECS = ("int8", "int4", "lloyd4")
PATH_NUMELS = (4096, 65536, 262144)
HOOK_OPS = ("encode", "decode")
QUICK_NUMEL = 1 << 20
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
        return f"{self.op} {self.name} {clock.dtype_name(self.dtype)}, {size}"

    @abstractmethod
    def measure(self, backend: Backend, effort: Effort, x: Tensor) -> Row:
        """The time columns, of x or of a part of it."""

    def served_by(self, backend: Backend) -> Backend:
        """What runs it where `backend` serves the device."""
        return backend


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
    times = clock.interleave(calls, effort.rounds, x.device, effort.launches)
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
    return clock.rotate([wrap(make(each)) for each in sources])


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
        return reference if kernels.select(self.device, self.encoding.format) is reference else backend

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
        return lambda: transport.checksums_of(wires_WN[0])
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
            row |= {"note": f"torch.compile of the reference: {clock.note_of(error)}"}
    return row


def _times(case: OpCase, backend: Backend, rival: Backend, effort: Effort, x: Tensor) -> float:
    with quiet():
        calls = {"ours": prepare(case, backend, x), "rival": prepare(case, rival, x, reference)}
        times = clock.interleave(calls, effort.slow_rounds, case.device)
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

    def measure(self, backend: Backend, effort: Effort, x: Tensor) -> Row:
        """The time of a replay; `launched_ms` is the same without a graph."""
        message, shard = (codec(self.name).wire_bytes(numel, self.dtype) for numel in (self.numel, self.shard))
        moved = 2 * (self.numel * self.dtype.itemsize + message) + (self.world + 1) * shard
        launched = clock.launched_ms(self.prepare(x), REPLAYS, self.device)
        replays = replace(effort, launches=REPLAYS)
        columns = beside(x, self.prepare, moved, replays, cold=False, wrap=clock.captured)
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
    """What torch's quantization hook does to a bucket before or after its messages; `name` is one of HOOKS."""

    part: str = "rivals"

    def measure(self, backend: Backend, effort: Effort, x: Tensor) -> Row:
        """The slow hook gets few rounds. One set of buffers: its own temporaries fill any cache."""
        hook = HOOKS[self.name]
        few = replace(effort, rounds=effort.slow_rounds, launches=1) if hook.slow else effort
        moved = self.numel * (self.dtype.itemsize + 1) + 8 * hook.scales(self.numel)  # a scale and its zero point: 8
        with quiet():
            return beside(x, self.prepare, moved, few, sets=1)

    def prepare(self, x: Tensor) -> Call:
        hook = HOOKS[self.name]
        if self.op == "encode":
            return lambda: hook.encode(x)
        quantized = hook.encode(x)
        return lambda: hook.decode(*quantized)


@dataclass(frozen=True)
class TorchHook:
    """What a quantization hook of torch does before and after its messages, and its scales per so many elements."""

    encode: Callable[[Tensor], Quantized]
    decode: Callable[[Tensor, Tensor, Tensor], Tensor]
    scales: Callable[[int], int]
    slow: bool = False  # a loop over channels: over a second for 2**24 elements


def _per_tensor_encode(x: Tensor) -> Quantized:
    """As in `quantization_pertensor_hook`: observe, bring scale and zero point to the device, quantize."""
    observer = MinMaxObserver().to(x.device)
    observer(x)
    scale, zero = torch.FloatTensor([*observer.calculate_qparams()]).to(x.device)
    return _torch._quantize_per_tensor_backend(x, scale, zero), scale, zero


def _per_channel_encode(x: Tensor) -> Quantized:
    """As in `quantization_perchannel_hook`: pad to channels, observe, quantize channel by channel."""
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


@dataclass(frozen=True)
class Defaults:
    parts: tuple[str, ...] = ("codecs",)
    codecs: tuple[str, ...] = CODECS
    bf16_codecs: tuple[str, ...] | None = ("int8", "lloyd4")  # measured on bfloat16 tensors too; None: all
    numel: int = 25_000_000
    ranks: int = 4  # whose wires are summed
    swept: tuple[str, ...] = HEADLINES  # measured by size
    size_bytes: tuple[int, ...] = (1 << 20, 1 << 24, 1 << 28, 1 << 30)
    rival_numel: int = 1 << 24
    path_numels: tuple[int, ...] = PATH_NUMELS
    compile: bool = True  # in the rivals


CPU = Defaults()
CPU_QUICK = replace(CPU, numel=QUICK_NUMEL, size_bytes=(1 << 18, 1 << 20), rival_numel=1 << 16, compile=False)
CUDA = replace(CPU, parts=PARTS, bf16_codecs=None, numel=1 << 27, ranks=8)
FEW = ("int8", "lloyd4")  # Triton compiles every kernel at its first use, for seconds
CUDA_QUICK = replace(
    CPU_QUICK, parts=PARTS, codecs=FEW, bf16_codecs=(), ranks=8, swept=FEW, path_numels=PATH_NUMELS[:1]
)


@dataclass(frozen=True)
class KernelPlan:
    device: torch.device
    usual: Defaults
    codecs: Sequence[str | Codec] = ()
    numels: Sequence[int] = ()
    ops: Sequence[str] = ()
    dtypes: Sequence[str] = ()
    threads: Sequence[int] = ()
    parts: Sequence[str] = ()

    def cases(self) -> list[KernelCase]:
        """A size that is asked for is the codecs' alone; codecs and ops that are asked for, theirs and the sizes'."""
        if "replay" in self.parts and self.device.type != "cuda":
            raise BenchError(f"replay measures CUDA graphs, which {self.device} tensors have not: use --device cuda")
        kept = ("codecs",) if self.numels else ("codecs", "sizes") if self.codecs or self.ops else PARTS
        makers: dict[str, Callable[[], Iterator[KernelCase]]] = {
            "codecs": self._by_codec,
            "sizes": self._by_size,
            "replay": self._replays,
            "rivals": self._rivals,
        }
        parts = self.parts or [part for part in self.usual.parts if part in kept]
        return [case for part in parts for case in makers[part]()]

    def _by_codec(self) -> Iterator[KernelCase]:
        for numel, count in product(self.numels or (self.usual.numel,), self._threads):
            for name in self._codecs(self.usual.codecs):
                for dtype, op in product(self._dtypes(name), self.ops or OPS):
                    if self._tells(name, op, dtype):
                        yield replace(self._op("codecs", name, op, numel, (EAGER,)), dtype=dtype, threads=count)

    def _by_size(self) -> Iterator[KernelCase]:
        for size, dtype in product(self.numels or self.usual.size_bytes, DTYPES.values()):
            numel = size if self.numels else size // dtype.itemsize
            for name, op in product(self._codecs(self.usual.swept), self.ops or OPS):
                if dtype in self._dtypes(name) and self._tells(name, op, dtype):
                    yield replace(self._op("sizes", name, op, numel, ()), dtype=dtype)

    def _replays(self) -> Iterator[KernelCase]:
        for name, numel in product(self._codecs(PATH_CODECS), self.numels or self.usual.path_numels):
            yield PathCase(
                name=name, numel=numel, world=self.usual.ranks, threads=self._threads[-1], device=self.device
            )

    def _rivals(self) -> Iterator[KernelCase]:
        numel = min(self.numels or (self.usual.rival_numel,))
        ops = [op for op in self.ops or OPS if op in HOOK_OPS]
        for name, op in product(HOOKS, ops):
            yield HookCase(op=op, name=name, numel=numel, threads=self._threads[-1], device=self.device)
        beside = (EAGER, COMPILE) if self.usual.compile else (EAGER,)
        for name, op in product(self._codecs(COMPILED), ops):
            yield self._op("rivals", name, op, numel, beside)

    def _op(self, part: str, name: str, op: str, numel: int, beside: tuple[str, ...]) -> OpCase:
        world = self.usual.ranks if op in SUMS else 1
        threads = self._threads[-1]
        beside = beside if op in OPS else ()
        return OpCase(
            part=part, op=op, name=name, numel=numel, world=world, threads=threads, device=self.device, rivals=beside
        )

    def _tells(self, name: str, op: str, dtype: torch.dtype) -> bool:
        """A recode sees wires alone: where dtypes are ours to choose, it is measured once. Not all codecs have it."""
        once = bool(self.dtypes) or dtype == torch.float32
        return op != "recode" or (once and (bool(self.ops) or codec(name).recodes))

    def _codecs(self, default: Sequence[str]) -> list[str]:
        return [str(codec(spec)) for spec in self.codecs or default]

    def _dtypes(self, name: str) -> list[torch.dtype]:
        both = self.usual.bf16_codecs is None or name in self.usual.bf16_codecs
        usual = ("float32", "bfloat16") if both else ("float32",)
        return [DTYPES[dtype] for dtype in self.dtypes or usual]

    @property
    def _threads(self) -> Sequence[int]:
        """1 and all on the CPU; on another device host threads do nothing."""
        every = torch.get_num_threads()
        return self.threads or (sorted({1, every}) if self.device.type == "cpu" else [every])


def run(device: str | torch.device = "cpu", *, quick: bool = False, progress: Progress = iter, **asked: Any) -> Record:
    """A record of kind "kernels"; what is asked for are fields of KernelPlan."""
    device = torch.device(device)
    backend = kernels.select(device)
    plan = KernelPlan(device, defaults(device, backend, quick), **asked)
    return collect("kernels", device, _rows(plan.cases(), backend, clock.effort_on(device, quick), progress))


def defaults(device: torch.device, backend: Backend, quick: bool) -> Defaults:
    """What is measured on a device. The reference gets few elements: at the full size it would take an hour."""
    small = quick or backend is reference
    if device.type == "cpu":
        return CPU_QUICK if small else CPU
    return CUDA_QUICK if small else CUDA


def _rows(cases: Sequence[KernelCase], backend: Backend, effort: Effort, progress: Progress) -> Generator[Row]:
    for case in progress(cases):
        with clock.threads(case.threads), torch.no_grad():
            yield row_of(case, case.served_by(backend), effort)


def row_of(case: KernelCase, backend: Backend, effort: Effort) -> Row:
    """One row. A case that fails has no times and says why in `note`: the others are still worth having."""
    labels: Row = {
        "op": case.op,
        "codec": case.name,
        "backend": "torch" if isinstance(case, HookCase) else clock.name_of(backend),
        "device": case.device.type,
        "dtype": clock.dtype_name(case.dtype),
        "numel": case.numel,
        "world": case.world,
        "threads": case.threads,
    }
    nothing: Row = dict.fromkeys((*COLUMNS, EAGER, COMPILE, "eager_numel", "note"))
    try:
        measured = case.measure(backend, effort, _input(case.numel, case.dtype, case.device))
    except Exception as error:  # of a compiler, a driver or an allocator: any kind
        measured = {"note": clock.note_of(error)}
    return {**labels, **nothing, **measured, "part": case.part}


@lru_cache(maxsize=2)  # a size may have two dtypes
def _input(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Gaussian numbers, the same for all cases of a size and dtype."""
    generator = torch.Generator(device=device).manual_seed(0)
    return torch.randn(numel, generator=generator, device=device).to(dtype)


def command(
    device: Annotated[Device, typer.Option(help="Where the tensors are.")],
    codecs: Codecs = None,
    numel: Annotated[Words, option("Default 25 million, GPU 2**27; quick, or the reference, 2**20.", "N,M")] = None,
    ops: Annotated[Words, option(f"Among {', '.join(ASKED)}; default all but the last.")] = None,
    dtypes: Annotated[Words, option(f"Among {', '.join(DTYPES)}; default the first two.")] = None,
    threads: Annotated[Words, option("CPU threads, each measured; default 1 and all.", "N,M")] = None,
    parts: Annotated[Words, option(f"Among {', '.join(PARTS)}; default codecs, on a GPU all.")] = None,
    json: Json = None,
    quick: Quick = False,
) -> None:
    """What the kernels cost beside a plain copy and torch eager, timed by turns in one run.

    ×copy is the kernel's time over that of copying a tensor of the same size and dtype; share is that of a copy of as
    many bytes as the kernel cannot avoid, over the kernel's; ×eager is torch eager's time over the kernel's, on at most
    2**21 elements (GPU: 2**24). decode_sum and recode read the wires of 4 ranks, on a GPU of 8. On the CPU bfloat16 is
    measured for int8 and lloyd4 only; with --numel a GPU measures the first part only, with --codecs or --ops the first
    two.

    \b
    Parts:
      codecs   every codec and op at one size
      sizes    a few codecs on tensors of 1 MB to 1 GB
      replay   encode, recode and decode of a small message, as one CUDA graph
      rivals   torch.compile of the reference, and the functions of torch's quantization hooks
    """
    check_device(device)
    study = partial(
        run,
        device.value,
        codecs=flags.codecs(codecs, ()),
        numels=flags.counts(numel, "--numel") or (),
        ops=words(ops, ASKED, "--ops") or (),
        dtypes=words(dtypes, DTYPES, "--dtypes") or (),
        threads=flags.counts(threads, "--threads") or (),
        parts=words(parts, PARTS, "--parts") or (),
        quick=quick,
    )
    deliver(study, json, show=show_with_notes)


if __name__ == "__main__":
    from benchmarks import kernels as study  # under its own name, by which ranks find its functions

    start(study.command)
