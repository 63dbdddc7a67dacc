"""Every Triton kernel, compiled for GPUs that are not there, with the Triton that is installed: a script of its own.

`python tests/compiled.py [everything] [times]`. The library's own launches say what they need, on tensors without
memory, as they do before a first call ([Note: Compiled ahead]); a driver that has nothing to drive stands in for
CUDA's. Prints a line for every kernel that fails, with `times` also the seconds that each takes, and ends with the
number of failures.
"""

import itertools
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import cases
from thinwire import codec as make
from thinwire.codecs.base import Codec
from thinwire.kernels import FakeGradients, Grid, triton as backend
from thinwire.kernels.rows import Bad, Feedback, Memory, Picked
from thinwire.kernels.schema import RowJob, Rows
from thinwire.kernels.triton import compiling, exact, row_launch, tuning

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
LARGE = tuning.SMALL  # elements from which kernels have their usual tiles
WORKERS = 2


class Case(NamedTuple):
    """A codec, the tensor it is for, and the flags of the kernels."""

    codec: str | Codec
    dtype: torch.dtype = F32
    numel: int = LARGE
    world: int = 2
    mode: str = ""  # of feedback, or "own": the own part of a sum is exact
    odd: bool = False  # tensors and wires off the start of their memory
    wires: bool = True  # single wires, too
    rows: bool = True  # messages in rows, too
    starved: bool = False  # the tiles of a GPU with little memory bandwidth


TAIL = LARGE + 1
CASES = [  # every kernel, and most families of codecs
    Case("int8", rows=False),
    Case("int8", BF16, TAIL, 4, "own", wires=False),
    Case("int2:rounding=stochastic", F16, 512, mode="ef21", wires=False, starved=True),
    Case("lloyd1:block=32", BF16, 64, 9, odd=True, rows=False, starved=True),
    Case("trellis2:block=32", numel=64, wires=False),
    Case("bf16", world=3, mode="own"),
    Case("none", BF16, wires=False),
]
OTHER_TARGETS = {80: "int8", 100: "int8"}  # the first case of a codec, in part
REST = [  # with `everything`: the other flags
    Case("none", odd=True, rows=False),
    Case("int5:block=40,mode=affine,rounding=stochastic", numel=120, world=9, rows=False),
    Case("int4:block=32", F16, 512, 3, rows=False, starved=True),
    Case("int3:block=20000,mode=affine", numel=9001, odd=True, rows=False),
    Case("lloyd4:block=32", world=3, mode="classic", wires=False, starved=True),
    Case("lloyd3:block=32,rotate=false,scale=unbiased", numel=64, mode="own", wires=False, starved=True),
    Case("lloyd2:block=32", F16, 40, mode="ef21", wires=False, starved=True),
    Case("fp16", numel=TAIL, rows=False),
    Case("e4m3:block=24", numel=40, odd=True, rows=False),
    Case("e5m2", BF16, mode="ef21", wires=False),
    Case("bf16", F16, TAIL, odd=True, rows=False),
]


def more_cases() -> Iterator[Case]:
    """Every codec of the tests of kernels, with flags by turns."""
    flags = itertools.cycle(itertools.product((F32, BF16, F16), ("", "own", "classic", "ef21"), (2, 3, 9)))
    for codec, length in itertools.product(cases.CODECS, (LARGE, TAIL, 130)):
        dtype, mode, world = next(flags)
        yield Case(codec, dtype, length, world, mode, odd=world == 3, starved=world == 9)


class Driver:
    """Stands in for CUDA's: kernels are loaded into nothing."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)
        self.utils = self
        self.launcher_cls = lambda source, metadata: None

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._target.arch  # Triton keeps kernels and targets by the number of the device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 101376}  # the least of all GPUs from compute capability 8.0 on

    def load_binary(self, *kernel: Any) -> tuple[Any, ...]:
        return None, None, 0, 0, 1024  # module, function, registers, spills, threads at most

    def unload_module(self, module: None) -> None:
        pass


# --- launches ---------------------------------------------------------------------------------------------------------
def placed(case: Case, *shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor, on 16 bytes or off them."""
    whole = torch.empty(torch.Size(shape).numel() + case.odd, dtype=dtype, device="meta")
    return whole[int(case.odd) :].view(shape)


def start_wires(case: Case) -> None:
    """What codecs do with single wires."""
    codec = make(case.codec) if isinstance(case.codec, str) else case.codec
    how = codec.encoding(case.dtype)
    nbytes = how.format.layout(case.numel).nbytes
    x = placed(case, case.numel, dtype=case.dtype)
    wire = placed(case, nbytes, dtype=torch.uint8)
    wires_WN = placed(case, case.world, nbytes + (not case.odd) * (-nbytes % 16), dtype=torch.uint8)[:, :nbytes]
    if not case.odd or "everything" in sys.argv:  # without a residual is a part of it with one
        backend.encode(how, x, wire, None, rotation=1, dither=1)
    backend.encode(how, x, wire, placed(case, case.numel, dtype=F32), rotation=1, dither=1)
    scale = 1e12 if case.world == 9 else 0.5  # large or small: sums that may leave the usual range, or not
    known = None if case.world == 3 else 1  # whether headers are checked
    backend.decode_sum(how.format, wires_WN, x, scale=scale, rotation=known)
    backend.recode(how, wires_WN, wire, case.numel, scale=scale, rotation=known, dither=1)


def start_rows(case: Case) -> None:
    """What collectives do with messages in rows: of two ranks in one phase, of more in two."""
    codec = make(case.codec) if isinstance(case.codec, str) else case.codec
    has_memory = case.mode in ("classic", "ef21") and codec.encoding(F32).format.block > 0
    how = codec.encoding(F32 if has_memory else case.dtype)
    two_phase = case.world > 2
    each = -(-case.numel // case.world // codec.unit) * codec.unit
    shape = Rows(case.numel, each, case.world) if two_phase else Rows(case.numel, case.numel, 1)
    feedback = Feedback(case.mode, case.world) if has_memory else None
    x = placed(case, case.numel, dtype=case.dtype)
    memory = Memory(*(placed(case, case.numel, dtype=F32) for _ in range(3))) if has_memory else None
    bad = Bad(torch.zeros(2, dtype=torch.int32), 5)
    stride = how.format.layout(shape.each).nbytes
    job = RowJob(how, codec.seed, shape, case.dtype, x.device, stride + -stride % 16)
    wires = torch.empty(case.world * job.stride, dtype=torch.uint8, device="meta")
    own = 0 if two_phase and case.mode and row_launch.adds_own(job) else -1
    row_launch.encoder(job, own, 1, 0, feedback)(x, wires, 1, memory)
    if two_phase and (own >= 0 or not has_memory):
        recode = row_launch.recoder(job, 0, case.world, 0.5, own, feedback)
        recode(wires, wires[: job.layout(0).nbytes], 1, x, memory)
    if has_memory:
        row_launch.scanner(job, 1 if two_phase else case.world)(wires, bad)
    decode = row_launch.decoder(job, 1 if two_phase else case.world, 0.5, -1, own, 0.5, feedback)
    decode(wires, x, memory, bad if case.mode else None, x)
    if not how.format.block:
        picked = Picked(x, torch.empty(case.numel, dtype=torch.int64, device="meta"), x)
        row_launch.encoder(job, own, 1, 0, None)(picked, wires, 1, None)
        decode(wires, picked, None, bad if case.mode else None)


def start_others() -> None:
    """Exact differences, and fake quantization."""
    for dtype in (F32, BF16, F16) if "everything" in sys.argv else ():
        start_exact(torch.empty(5000, dtype=dtype, device="meta"))
    start_exact(torch.empty(1 << 31, dtype=BF16, device="meta"))
    shapes = [(1, 1, 4096), (5, 3, 49), (200, 5, 1)]
    grids = [Grid(-8, 7), Grid(-8, 7, paper=True), Grid(0, 15, offset=True)]
    for i, (grid, shape) in enumerate(zip(itertools.cycle(grids), (*shapes, shapes[0], shapes[2]), strict=False)):
        x, scale = (
            torch.empty(n, dtype=t, device="meta") for n, t in ((shape, (F32, BF16, F16)[i % 3]), (shape[1], F32))
        )
        shift = scale if i % 2 else None
        backend.fake_quantize(grid, x, scale, shift, x.clone())
        wanted = x.clone() if i % 4 < 2 else None
        of = FakeGradients(x, x.clone(), scale, shift, wanted, scale.new_empty(2, shape[1]))
        backend.fake_quantize_grad(grid, of, 1.0)


def start_exact(base: torch.Tensor) -> None:
    """Exact differences: sizes are known from the numbers alone, so each kernel is asked for by itself."""
    words, longs = (torch.empty(64, dtype=dtype, device="meta") for dtype in (torch.int32, torch.int64))
    small = words.to(torch.uint8)
    bits = base.view(exact.FORMATS[base.dtype].signed)
    numel, places = base.numel(), {"by_class": bits, "starts": longs}
    launch, tables, kind = exact.launch, {"tables": longs}, (base.dtype, base.device)
    launch(exact.exact_count_kernel, *kind, 2, 8)(new=bits, base=bits, counts=words, numel=numel, stride=2)
    launch(exact.exact_choose_kernel, *kind, 2, 16)(counts=words, costs=longs, **tables)
    launch(exact.exact_encode_kernel, *kind, 2)(
        new=bits, base=bits, scratch=longs, rows=longs, lengths=longs, numel=numel, count=2, **tables
    )
    launch(exact.exact_pack_kernel, *kind, 2)(rows=small, new=small, starts=longs, out=small, numel=numel)
    launch(exact.exact_classes_kernel, *kind, 2)(base=bits, classes=words, numel=numel, **tables)
    launch(exact.exact_read_kernel, *kind, 1, 1)(words=words, classes=words, bad=words, numel=numel, **places)
    launch(exact.exact_undo_kernel, *kind, 2)(
        blocks=small, base=bits, out=bits, scratch=longs, numel=numel, count=2, **tables, **places
    )


# --- kernels ----------------------------------------------------------------------------------------------------------
class Wanted(NamedTuple):
    """A kernel to compile."""

    name: str
    label: str
    compile: Callable[[], None]
    capability: int = 90


def wanted_by(label: str, start: Callable[[], None], known: set[str]) -> list[Wanted]:
    """The kernels that some launches ask for, but those that are known."""
    found = []

    def begin(name: str, make: Callable[[], Any], load: object) -> Future[Any]:
        if name not in known:
            known.add(name)
            found.append(Wanted(name.split()[0], f"{name.split()[0]} of {label}", make))
        failed: Future[Any] = Future()
        failed.set_exception(NotImplementedError())  # so that it is asked for again
        return failed

    with mock.patch.object(compiling, "begin", begin):
        start()
    return found


def wanted_in(tried: Sequence[Case]) -> list[Wanted]:
    """Each kernel once."""
    known: set[str] = set()
    found = wanted_by("exact differences and fake quantization", start_others, known)
    for case in tried:
        choice = {"return_value": tuning.STARVED} if case.starved else {"side_effect": tuning.choose}
        with mock.patch.object(tuning, "choose", **choice):
            if case.wires:
                found += wanted_by(str(case), lambda case=case: start_wires(case), known)
            if case.rows:
                found += wanted_by(str(case), lambda case=case: start_rows(case), known)
    for capability, name in OTHER_TARGETS.items():
        case = next(case for case in CASES if case.codec == name)
        more = wanted_by(f"{case} for sm_{capability}", lambda case=case: start_wires(case), set())
        found += [kernel._replace(capability=capability) for kernel in more[-1:]]
    return found


KERNELS: list[Wanted] = []


def used() -> float:
    """Seconds of this process and its children on a processor."""
    return time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def compiled(number: int) -> tuple[str, float, str]:
    """A kernel's name, the seconds of a processor that it took, and why it failed, if it did."""
    kernel = KERNELS[number]
    driver.set_active(Driver(kernel.capability))
    start, why = used(), ""
    try:
        kernel.compile()
    except Exception as error:
        while error.__cause__ is not None:
            error = error.__cause__
        why = f"{type(error).__name__}: {str(error)[-500:]}"
    return kernel.label, used() - start, why


def main() -> int:
    """Compile all; how many fail."""
    torch.set_num_threads(1)
    tried = [*CASES, *REST, *more_cases()] if "everything" in sys.argv else CASES
    KERNELS.extend(wanted_in(tried))
    left_out = {kernel.name for kernel in wanted_in([*CASES, *REST])} - {kernel.name for kernel in KERNELS}
    bad = len(left_out)
    for name in sorted(left_out):
        print(f"{name} is compiled in no case")
    with (
        tempfile.TemporaryDirectory() as knobs.cache.dir,  # where nothing is found that was compiled before
        multiprocessing.get_context("fork").Pool(min(WORKERS, os.cpu_count() or 1)) as pool,
    ):
        for label, seconds, why in pool.imap_unordered(compiled, range(len(KERNELS))):
            bad += bool(why)
            if why or "times" in sys.argv:
                print(f"{seconds:6.2f} s, {label} {why}", flush=True)
    print(f"{bad} of {len(KERNELS)} fail")
    return bad


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
