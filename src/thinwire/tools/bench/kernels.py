"""The kernel benchmark: what a kernel costs beside a plain copy, torch eager and torch.compile, interleaved in one run.

Every case measures a backend's own functions (`kernels.schema.Backend`), so the checks in front of them are not timed.
Inputs are Gaussian; the speed of the kernels does not hang on the values. A run has parts:

    codecs   every codec and op at one size
    sizes    a few codecs, by the bytes of the tensor
    replay   the codec's part of a small all_reduce as one CUDA graph (bench/replay.py)
    rivals   torch.compile of the reference and torch's quantisation hooks (bench/rivals.py)
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.codecs import Codec, codec
from thinwire.kernels import Backend, Encoding, hashing, reference
from thinwire.tools.bench import copies, replay, rivals, timing
from thinwire.tools.bench.copies import Effort
from thinwire.tools.bench.record import Progress, Record, Row, collect
from thinwire.tools.bench.replay import PathCase
from thinwire.tools.bench.rivals import HookCase
from thinwire.tools.bench.timing import Call

OPS = ("encode", "encode_residual", "decode", "decode_sum", "recode")
SUMS = ("decode_sum", "recode")  # the ops that take the wires of several ranks
PARTS = ("codecs", "sizes", "replay", "rivals")  # what compiles for long comes last
CODECS = (
    *("none", "bf16", "fp16", "e4m3", "int8", "int8:mode=affine", "int4", "int2"),
    *("lloyd4", "lloyd4:block=256", "lloyd2", "lloyd1"),
)
HEADLINES = ("int8", "int4", "int2", "lloyd4", "lloyd2", "lloyd1")
COMPILED = ("int8", "int4", "lloyd4")  # the codecs compared with torch.compile where nothing is asked for
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MOST_RANKS = 64
EAGER, COMPILE = "times_eager", "times_compile"
QUICK_NUMEL = 1 << 20
_KEY = hashing.key(0, 0, hashing.ROTATION)


@dataclass(frozen=True)
class Defaults:
    """What a run measures where nothing else is asked for."""

    parts: tuple[str, ...] = ("codecs",)
    codecs: tuple[str, ...] = CODECS
    bf16_codecs: tuple[str, ...] | None = ("int8", "lloyd4")  # measured on bfloat16 tensors too; None: all
    numel: int = 25_000_000
    ranks: int = 4  # whose wires are summed
    swept: tuple[str, ...] = HEADLINES  # measured by size
    size_bytes: tuple[int, ...] = (1 << 20, 1 << 24, 1 << 28, 1 << 30)
    rival_numel: int = 1 << 24
    path_numels: tuple[int, ...] = replay.NUMELS
    compile: bool = True  # in the rivals


CPU = Defaults()
CPU_QUICK = replace(CPU, numel=QUICK_NUMEL, size_bytes=(1 << 18, 1 << 20), rival_numel=1 << 16, compile=False)
CUDA = replace(CPU, parts=PARTS, bf16_codecs=None, numel=1 << 27, ranks=8)
FEW = ("int8", "lloyd4")  # Triton compiles every kernel at its first use, for seconds
CUDA_QUICK = replace(
    CPU_QUICK, parts=PARTS, codecs=FEW, bf16_codecs=(), ranks=8, swept=FEW, path_numels=replay.NUMELS[:1]
)
EFFORTS = {
    ("cpu", False): Effort(),
    ("cpu", True): Effort(rounds=3, eager_rounds=1, eager_numel=1 << 18),
    ("cuda", False): Effort(rounds=20, launches=5, footprint=1 << 28, eager_numel=1 << 24),
    ("cuda", True): Effort(rounds=5, launches=3, footprint=1 << 28, eager_rounds=1, eager_numel=1 << 18),
}


class Job(Protocol):
    """One row to be measured, of any part."""

    @property
    def part(self) -> str: ...
    @property
    def op(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def numel(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    def backend(self, backend: Backend) -> str: ...
    def measure(self, backend: Backend, effort: Effort, x: Tensor) -> Row: ...


@dataclass(frozen=True)
class Case:
    """One op of a backend."""

    op: str
    codec: Codec
    dtype: torch.dtype
    numel: int
    threads: int
    device: torch.device
    ranks: int = CPU.ranks
    part: str = "codecs"
    rivals: tuple[str, ...] = (EAGER,)  # EAGER, COMPILE: what it is compared with beside the copies

    def __str__(self) -> str:
        size = f"{self.threads} threads" if self.device.type == "cpu" else f"{self.numel} elements"
        return f"{self.op} {self.codec} {dtype_name(self.dtype)}, {size}"

    @property
    def name(self) -> str:
        """In the column `codec`."""
        return str(self.codec)

    @property
    def world(self) -> int:
        """Wires that the op reads."""
        return self.ranks if self.op in SUMS else 1

    @property
    def encoding(self) -> Encoding:
        """What the kernel is asked to do."""
        return self.codec.pick(shape=(self.numel,)).encoding(self.dtype)

    @property
    def minimal_bytes(self) -> int:
        """Each input byte read once, each output byte written once."""
        wire, plain = self.encoding.format.layout(self.numel).nbytes, self.numel * self.dtype.itemsize
        return {
            "encode": plain + wire,
            "encode_residual": plain + wire + 2 * 4 * self.numel,  # the residual is fp32, read and written
            "decode": wire + plain,
            "decode_sum": self.world * wire + plain,
            "recode": self.world * wire + wire,
        }[self.op]

    def backend(self, backend: Backend) -> str:
        """In the column `backend`."""
        return timing.name_of(backend)

    def measure(self, backend: Backend, effort: Effort, x: Tensor) -> Row:
        """Time columns: the kernel beside copies on the whole of x, then beside its rivals on a slice."""
        columns = copies.beside(x, lambda each: prepare(self, backend, each), self.minimal_bytes, effort)
        return {**columns, **_rivals(self, backend, effort, x)}


@dataclass(frozen=True)
class Plan:
    """What a run measures: what was asked for, the rest by the defaults."""

    device: torch.device
    usual: Defaults
    codecs: tuple[Codec, ...] = ()
    numels: tuple[int, ...] = ()
    ops: tuple[str, ...] = OPS
    dtypes: tuple[str, ...] = ()
    threads: tuple[int, ...] = ()
    parts: tuple[str, ...] = ()
    ranks: int = 0
    compile: bool = False  # True => torch.compile beside every case of the codecs; seconds a case more

    def jobs(self) -> list[Job]:
        """The cases of the parts, in order."""
        makers: dict[str, Callable[[], Iterator[Job]]] = {
            "codecs": self._by_codec,
            "sizes": self._by_size,
            "replay": self._replays,
            "rivals": self._rivals,
        }
        return [job for part in self._parts for job in makers[part]()]

    def _by_codec(self) -> Iterator[Job]:
        beside = (EAGER, COMPILE) if self.compile else (EAGER,)
        for numel, count in itertools.product(self.numels or (self.usual.numel,), self._threads):
            for chosen in self._codecs(self.usual.codecs):
                for dtype in self._dtypes(chosen):
                    yield from self._ops("codecs", chosen, dtype, numel, count, beside)

    def _by_size(self) -> Iterator[Job]:
        sizes = self.numels or self.usual.size_bytes
        for size, dtype in itertools.product(sizes, DTYPES.values()):
            numel, count = size if self.numels else size // dtype.itemsize, self._threads[-1]
            for chosen in self._codecs(self.usual.swept):
                if dtype in self._dtypes(chosen):
                    yield from self._ops("sizes", chosen, dtype, numel, count, ())

    def _ops(
        self, part: str, chosen: Codec, dtype: torch.dtype, numel: int, count: int, beside: tuple[str, ...]
    ) -> Iterator[Job]:
        for op in self.ops:
            # A recode sees wires alone: where dtypes are ours to choose, it is measured once.
            if self.dtypes or op != "recode" or dtype == torch.float32:
                yield Case(op, chosen, dtype, numel, count, self.device, self._ranks, part, beside)

    def _replays(self) -> Iterator[Job]:
        for chosen, numel in itertools.product(self._codecs(replay.CODECS), self.numels or self.usual.path_numels):
            yield PathCase(chosen, numel, self._ranks, self._threads[-1], self.device)

    def _rivals(self) -> Iterator[Job]:
        numel, count = min(self.numels or (self.usual.rival_numel,)), self._threads[-1]
        ops = [op for op in self.ops if op in rivals.OPS]
        for name, op in itertools.product(rivals.HOOKS, ops):
            yield HookCase(name, op, numel, count, self.device)
        beside = (EAGER, COMPILE) if self.usual.compile or self.compile else (EAGER,)
        for chosen, op in itertools.product(self._codecs(COMPILED), ops):
            yield Case(op, chosen, torch.float32, numel, count, self.device, self._ranks, "rivals", beside)

    def _codecs(self, default: Sequence[str]) -> tuple[Codec, ...]:
        return self.codecs or tuple(codec(spec) for spec in default)

    def _dtypes(self, chosen: Codec) -> list[torch.dtype]:
        if self.dtypes:
            return [DTYPES[name] for name in self.dtypes]
        both = self.usual.bf16_codecs is None or str(chosen) in self.usual.bf16_codecs
        return [torch.float32, torch.bfloat16] if both else [torch.float32]

    @property
    def _parts(self) -> tuple[str, ...]:
        """A size that is asked for is the codecs' alone; codecs and ops that are asked for, theirs and the sizes'."""
        for part in self.parts:
            check(part, self.device)
        kept = ("codecs",) if self.numels else ("codecs", "sizes") if self.codecs or self.ops != OPS else PARTS
        return self.parts or tuple(part for part in self.usual.parts if part in kept)

    @property
    def _threads(self) -> tuple[int, ...]:
        return self.threads or default_threads(self.device)

    @property
    def _ranks(self) -> int:
        return self.ranks or self.usual.ranks


def run(
    device: str | torch.device = "cpu",
    codecs: Sequence[str | Codec] = (),
    numel: int | Sequence[int] | None = None,
    ops: Sequence[str] = OPS,
    dtypes: Sequence[str] | None = None,
    threads: Sequence[int] | None = None,
    quick: bool = False,
    compile: bool = False,
    progress: Progress = iter,
    *,
    parts: Sequence[str] | None = None,
    ranks: int | None = None,
) -> Record:
    """A record of kind "kernels". What is empty or None is that of `defaults`; `ranks` is the world of sums."""
    device = torch.device(device)
    backend = kernels.select(device)
    plan = Plan(
        device=device,
        usual=defaults(device, backend, quick),
        codecs=tuple(codec(spec) for spec in codecs),
        numels=(numel,) if isinstance(numel, int) else tuple(numel or ()),
        ops=tuple(ops),
        dtypes=tuple(dtypes or ()),
        threads=tuple(threads or ()),
        parts=tuple(parts or ()),
        ranks=ranks or 0,
        compile=compile,
    )
    effort = EFFORTS["cuda" if device.type == "cuda" else "cpu", quick]
    return collect("kernels", device, _rows(plan.jobs(), backend, effort, progress))


def check(part: str, device: torch.device) -> None:
    """Raise ValueError where a part cannot be measured on `device`."""
    if part == "replay" and device.type != "cuda":
        raise ValueError(f"replay measures CUDA graphs, which {device.type} tensors have not: use --device cuda")


def defaults(device: torch.device, backend: Backend, quick: bool) -> Defaults:
    """What is measured on a device. The reference gets few elements: at the full size it would take an hour."""
    small = quick or backend is reference
    if device.type == "cpu":
        return CPU_QUICK if small else CPU
    return CUDA_QUICK if small else CUDA


def default_threads(device: torch.device) -> tuple[int, ...]:
    """1 and all on the CPU; on another device host threads do nothing."""
    every = torch.get_num_threads()
    return tuple(sorted({1, every})) if device.type == "cpu" else (every,)


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" rather than "torch.float32"."""
    return str(dtype).removeprefix("torch.")


def _rows(jobs: Sequence[Job], backend: Backend, effort: Effort, progress: Progress) -> Iterator[Row]:
    inputs = _Inputs()
    for job in progress(jobs):
        with timing.threads(job.threads), torch.no_grad():
            yield row_of(job, backend, effort, inputs)


def row_of(job: Job, backend: Backend, effort: Effort, inputs: "_Inputs") -> Row:
    """One row. A case that fails has no times and says why in `note`: the others are still worth having."""
    labels: Row = {
        "op": job.op,
        "codec": job.name,
        "backend": job.backend(backend),
        "device": job.device.type,
        "dtype": dtype_name(job.dtype),
        "numel": job.numel,
        "world": job.world,
        "threads": job.threads,
    }
    nothing: Row = dict.fromkeys((*copies.COLUMNS, EAGER, COMPILE, "eager_numel", "note"))
    try:
        measured = job.measure(backend, effort, inputs.of(job))
    except Exception as error:  # of a compiler, a driver or an allocator: any kind
        measured = {"note": _note(error)}
    return {**labels, **nothing, **measured, "part": job.part}


class _Inputs:
    """The tensors that cases read, of one size at a time."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, torch.dtype], Tensor] = {}

    def of(self, job: Job) -> Tensor:
        """Gaussian numbers, the same for all cases of a size and dtype."""
        key = (job.numel, job.dtype)
        if not any(numel == job.numel for numel, _ in self._kept):
            self._clear(job.device)
        if key not in self._kept:
            generator = torch.Generator(device=job.device).manual_seed(0)
            x = torch.randn(job.numel, generator=generator, device=job.device)
            self._kept[key] = x.to(job.dtype)
        return self._kept[key]

    def _clear(self, device: torch.device) -> None:
        self._kept.clear()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def prepare(case: Case, backend: Backend, x: Tensor, filler: Backend | None = None) -> Call:
    """The op of `case` on x, with its other buffers made, and filled by `filler` where the op is slow to prepare."""
    how, numel = case.encoding, x.numel()
    wires_WN = x.new_empty(case.world, how.format.layout(numel).nbytes, dtype=torch.uint8)
    (filler or backend).encode(how, x, wires_WN[0], None, rotation=_KEY, dither=0)
    if case.op == "encode":
        return lambda: backend.encode(how, x, wires_WN[0], None, rotation=_KEY, dither=0)
    if case.op == "encode_residual":
        residual = torch.zeros_like(x, dtype=torch.float32)
        return lambda: backend.encode(how, x, wires_WN[0], residual, rotation=_KEY, dither=0)
    wires_WN[1:] = wires_WN[0]
    scale = 1 / case.world
    if case.op == "recode":
        wire = torch.empty_like(wires_WN[0])
        return lambda: backend.recode(how, wires_WN, wire, numel, scale=scale, rotation=_KEY, dither=0)
    out = torch.empty_like(x)
    return lambda: backend.decode_sum(how.format, wires_WN, out, scale=scale, rotation=_KEY)


def _rivals(case: Case, backend: Backend, effort: Effort, x: Tensor) -> Row:
    """How many times longer than the kernel the same op takes in torch: above 1, the kernel is faster.

    Measured on the first `eager_numel` elements, kernel and rival by turns; null where there is no rival, and where
    the reference cannot be compiled.
    """
    row: Row = {}
    small = replace(case, numel=min(case.numel, effort.eager_numel))
    part = x[: small.numel]
    if EAGER in case.rivals and backend is not reference:
        row = {EAGER: _times(small, backend, reference, effort, part), "eager_numel": small.numel}
    if COMPILE in case.rivals:
        try:
            row |= {COMPILE: _times(small, backend, rivals.Compiled(), effort, part), "eager_numel": small.numel}
        except Exception as error:  # a compiler may raise anything
            row |= {"note": f"torch.compile of the reference: {_note(error)}"}
    return row


def _times(case: Case, backend: Backend, rival: Backend, effort: Effort, x: Tensor) -> float:
    with rivals.quiet():
        calls = {"ours": prepare(case, backend, x), "rival": prepare(case, rival, x, reference)}
        times = timing.interleave(calls, effort.eager_rounds, case.device)
    ours, theirs = (timing.percentiles(times[name])[1] for name in ("ours", "rival"))
    return theirs / ours


def _note(error: Exception) -> str:
    """The kind of an error and the first line of its text."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first[:200]}"
