"""The kernel benchmark: what a kernel costs beside a plain copy, torch eager and torch.compile, interleaved in one run.

Every case measures a backend's own functions (`kernels.schema.Backend`), so the checks in front of them are not timed.
Inputs are Gaussian; the speed of the kernels does not hang on the values. A run has parts:

    codecs   every codec and op at one size
    sizes    a few codecs, by the bytes of the tensor
    replay   the codec's part of a small all_reduce as one CUDA graph
    rivals   torch.compile of the reference and torch's quantisation hooks
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.codecs import Codec, codec
from thinwire.kernels import Backend, reference
from thinwire.tools.bench import kernel_cases, timing
from thinwire.tools.bench.kernel_cases import COMPILE, EAGER, HOOKS, HookCase, KernelCase, OpCase, PathCase
from thinwire.tools.bench.record import BenchError, Progress, Record, Row, collect
from thinwire.tools.bench.timing import Effort

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
    return collect("kernels", device, _rows(plan.cases(), backend, timing.effort_on(device, quick), progress))


def defaults(device: torch.device, backend: Backend, quick: bool) -> Defaults:
    """What is measured on a device. The reference gets few elements: at the full size it would take an hour."""
    small = quick or backend is reference
    if device.type == "cpu":
        return CPU_QUICK if small else CPU
    return CUDA_QUICK if small else CUDA


def _rows(cases: Sequence[KernelCase], backend: Backend, effort: Effort, progress: Progress) -> Generator[Row]:
    for case in progress(cases):
        with timing.threads(case.threads), torch.no_grad():
            yield row_of(case, case.served_by(backend), effort)


def row_of(case: KernelCase, backend: Backend, effort: Effort) -> Row:
    """One row. A case that fails has no times and says why in `note`: the others are still worth having."""
    labels: Row = {
        "op": case.op,
        "codec": case.name,
        "backend": case.backend_name(backend),
        "device": case.device.type,
        "dtype": timing.dtype_name(case.dtype),
        "numel": case.numel,
        "world": case.world,
        "threads": case.threads,
    }
    nothing: Row = dict.fromkeys((*kernel_cases.COLUMNS, EAGER, COMPILE, "eager_numel", "note"))
    try:
        measured = case.measure(backend, effort, _input(case.numel, case.dtype, case.device))
    except Exception as error:  # of a compiler, a driver or an allocator: any kind
        measured = {"note": timing.note_of(error)}
    return {**labels, **nothing, **measured, "part": case.part}


@lru_cache(maxsize=2)  # a size may have two dtypes
def _input(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Gaussian numbers, the same for all cases of a size and dtype."""
    generator = torch.Generator(device=device).manual_seed(0)
    return torch.randn(numel, generator=generator, device=device).to(dtype)
