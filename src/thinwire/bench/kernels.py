"""The kernel benchmark: what a kernel costs beside a plain copy, torch eager and torch.compile, interleaved in one run.

Every case measures a backend's own functions (`kernels.schema.Backend`), so the checks in front of them are not timed.
Inputs are Gaussian; the speed of the kernels does not hang on the values.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.bench import timing
from thinwire.bench.record import Progress, Record, Row, collect
from thinwire.bench.timing import Call
from thinwire.codecs import Codec, codec
from thinwire.kernels import Backend, Encoding, hashing, reference

OPS = ("encode", "encode_residual", "decode", "decode_sum", "recode")
SUMS = ("decode_sum", "recode")  # the ops that take the wires of WORLD ranks
WORLD = 4
CODECS = (
    *("none", "bf16", "fp16", "e4m3", "int8", "int8:mode=affine", "int4", "int2"),
    *("lloyd4", "lloyd4:block=256", "lloyd2", "lloyd1"),
)
BF16_CODECS = ("int8", "lloyd4")  # measured on bfloat16 tensors too, where no dtypes are asked for
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
QUICK_NUMEL = 1 << 20
_KEY = hashing.key(0, 0, hashing.ROTATION)


@dataclass(frozen=True)
class Effort:
    """How much a run measures."""

    rounds: int = 9  # more => steadier medians
    eager_rounds: int = 3  # the reference is slow: fewer rounds,
    eager_numel: int = 1 << 21  # and on at most this many elements, with the kernel beside it on as many
    compile: bool = False  # True => torch.compile of the reference too; the first call of each case takes seconds


FULL, QUICK = Effort(), Effort(rounds=3, eager_rounds=1, eager_numel=1 << 18)


@dataclass(frozen=True)
class Case:
    """One row to be measured."""

    op: str
    codec: Codec
    dtype: torch.dtype
    numel: int
    threads: int
    device: torch.device

    def __str__(self) -> str:
        return f"{self.op} {self.codec} {dtype_name(self.dtype)}, {self.threads} threads"

    @property
    def world(self) -> int:
        """Wires that the op reads."""
        return WORLD if self.op in SUMS else 1

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


def run(
    device: str | torch.device = "cpu",
    codecs: Sequence[str | Codec] = CODECS,
    numel: int | None = None,
    ops: Sequence[str] = OPS,
    dtypes: Sequence[str] | None = None,
    threads: Sequence[int] | None = None,
    quick: bool = False,
    compile: bool = False,
    progress: Progress = iter,
) -> Record:
    """A record of kind "kernels". dtypes None: float32, and bfloat16 for int8 and lloyd4. threads None: 1 and all."""
    device = torch.device(device)
    backend = kernels.select(device)
    numel = numel or default_numel(device, backend, quick)
    counts = threads or default_threads(device)
    chosen = [codec(spec) for spec in codecs]
    cases = [
        Case(op, chosen_codec, dtype, numel, count, device)
        for count in counts
        for chosen_codec in chosen
        for dtype in _dtypes(chosen_codec, dtypes)
        for op in ops
        if not _repeats(op, dtype, dtypes)
    ]
    effort = replace(QUICK if quick else FULL, compile=compile)
    return collect("kernels", device, _rows(cases, backend, effort, progress))


def default_numel(device: torch.device, backend: Backend, quick: bool) -> int:
    """Elements a tensor, where none are asked for. The reference gets few: at the full size it would take an hour."""
    if quick or backend is reference:
        return QUICK_NUMEL
    return 25_000_000 if device.type == "cpu" else 1 << 27


def default_threads(device: torch.device) -> list[int]:
    """1 and all on the CPU; on another device host threads do nothing."""
    every = torch.get_num_threads()
    return sorted({1, every}) if device.type == "cpu" else [every]


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" rather than "torch.float32"."""
    return str(dtype).removeprefix("torch.")


def _dtypes(chosen: Codec, asked: Sequence[str] | None) -> list[torch.dtype]:
    if asked is not None:
        return [DTYPES[name] for name in asked]
    return [torch.float32, torch.bfloat16] if str(chosen) in BF16_CODECS else [torch.float32]


def _repeats(op: str, dtype: torch.dtype, asked: Sequence[str] | None) -> bool:
    """A recode sees wires alone: where dtypes are ours to choose, it is measured once."""
    return asked is None and op == "recode" and dtype != torch.float32


def _rows(cases: Sequence[Case], backend: Backend, effort: Effort, progress: Progress) -> Iterator[Row]:
    inputs: dict[torch.dtype, Tensor] = {}
    for case in progress(cases):
        if case.dtype not in inputs:
            inputs[case.dtype] = _input(case)
        with timing.threads(case.threads), torch.no_grad():
            yield measure(case, backend, effort, inputs[case.dtype])


def measure(case: Case, backend: Backend, effort: Effort, x: Tensor) -> Row:
    """One row: the kernel beside a copy on the whole of x, then beside its rivals on a slice."""
    (p20, p50, p80), copy_ms = _beside_copy(case, backend, effort, x)
    return {
        "op": case.op,
        "codec": str(case.codec),
        "backend": timing.name_of(backend),
        "device": case.device.type,
        "dtype": dtype_name(case.dtype),
        "numel": case.numel,
        "world": case.world,
        "threads": case.threads,
        "ms_p50": p50,
        "ms_p20": p20,
        "ms_p80": p80,
        "copy_ms": copy_ms,
        "times_copy": p50 / copy_ms,
        "copy_share": copy_share(case, p50, copy_ms),
        **_rivals(case, backend, effort, x),
    }


def _beside_copy(case: Case, backend: Backend, effort: Effort, x: Tensor) -> tuple[tuple[float, float, float], float]:
    """p20, p50, p80 of the kernel, and the median of a copy of x."""
    target = torch.empty_like(x)
    calls: dict[str, Call] = {"copy": lambda: _copy(x, target), "ours": prepare(case, backend, x)}
    times = timing.interleave(calls, effort.rounds, case.device)
    return timing.percentiles(times["ours"]), timing.percentiles(times["copy"])[1]


def copy_share(case: Case, ms: float, copy_ms: float) -> float:
    """Bytes the op cannot avoid over its time, as a share of the copy's bytes over its own. 1: as fast as a copy."""
    copied = 2 * case.numel * case.dtype.itemsize
    return (case.minimal_bytes / ms) / (copied / copy_ms)


def prepare(case: Case, backend: Backend, x: Tensor) -> Call:
    """The op of `case` on x, with its other buffers made and filled."""
    how, numel = case.encoding, x.numel()
    wires_WN = x.new_empty(case.world, how.format.layout(numel).nbytes, dtype=torch.uint8)
    backend.encode(how, x, wires_WN[0], None, rotation=_KEY, dither=0)
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

    Measured on the first `eager_numel` elements, kernel and rival by turns; null where there is no rival.
    """
    row: Row = {"times_eager": None, "times_compile": None, "eager_numel": None}
    rivals: dict[str, Backend] = {} if backend is reference else {"times_eager": reference}
    if effort.compile:
        rivals["times_compile"] = _Compiled()
    if not rivals:
        return row
    small = replace(case, numel=min(case.numel, effort.eager_numel))
    part = x[: small.numel]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\._dynamo")  # what dynamo thinks of the code it compiles
        calls = {name: prepare(small, rival, part) for name, rival in [("ours", backend), *rivals.items()]}
        times = timing.interleave(calls, effort.eager_rounds, case.device)
    ms = {name: timing.percentiles(taken)[1] for name, taken in times.items()}
    return {**row, **{name: ms[name] / ms["ours"] for name in rivals}, "eager_numel": small.numel}


class _Compiled:
    """The reference through torch.compile, as a backend."""

    def __init__(self) -> None:
        # Past its limit of recompilations dynamo falls back to eager in silence, so every case starts afresh.
        torch._dynamo.reset()
        self.encode = torch.compile(reference.encode, dynamic=False)
        self.decode_sum = torch.compile(reference.decode_sum, dynamic=False)
        self.recode = torch.compile(reference.recode, dynamic=False)

    def serves(self, device: torch.device) -> bool:
        return reference.serves(device)

    def unavailable(self) -> str | None:
        return None


def _input(case: Case) -> Tensor:
    generator = torch.Generator(device=case.device).manual_seed(0)
    return torch.randn(case.numel, generator=generator, device=case.device).to(case.dtype)


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)
