"""Native C kernels for CPU tensors, loaded through ctypes: the GIL is released while they run."""

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import BackendError
from thinwire.kernels import exact
from thinwire.kernels.schema import Encoding, FakeGradients, Grid, LloydTable, TrellisTable, decoding, table_of
from thinwire.wire import EXACT_BLOCK, EXACT_CLASSES, HEADER_BYTES, ExactTables, Format, Layout, exact_lengths, read_key

LIBRARY = Path(__file__).with_name("_native.so")
_ABI = 8  # of native/thinwire.h
_ELEMENTS_PER_THREAD = 1 << 18  # fewer => starting a thread costs more than it saves
_MOST_PARTS = 64  # of a fake quantization; more threads find no work
_WIDE_ROW = 1024  # elements of a row that a part should at least hold; fewer => slower access to memory
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # the reference serves doubles


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class _Job(ctypes.Structure):
    """Mirror of tw_job in native/thinwire.h."""

    _fields_ = (
        *_fields(ctypes.c_int32, "kind bits variant stochastic unbiased dtype threads num_planes"),
        ("plane_width", ctypes.c_int32 * 3),
        ("scale", ctypes.c_float),
        ("plane_at", ctypes.c_int64 * 3),
        *_fields(ctypes.c_int64, "numel block num_blocks tail scales_at minima_at nbytes world wire_stride"),
        *_fields(ctypes.c_uint64, "rotation dither"),
        ("header", ctypes.c_uint8 * HEADER_BYTES),
        *_fields(ctypes.c_int32, "grid num_levels shift"),
        *_fields(ctypes.c_uint8 * 8, "edges levels"),
    )


class _Fake(ctypes.Structure):
    """Mirror of tw_fake in native/thinwire.h."""

    _fields_ = (
        *_fields(ctypes.c_int32, "dtype threads quant_min quant_max offset paper"),
        *_fields(ctypes.c_int64, "outer channels inner cuts_o cuts_c cuts_i"),
    )


class _Exact(ctypes.Structure):
    """Mirror of tw_exact in native/thinwire.h."""

    _fields_ = (
        *_fields(ctypes.c_int32, "bits mantissa exponents top threads"),
        ("numel", ctypes.c_int64),
        *_fields(ctypes.c_uint8 * EXACT_CLASSES, "gaps values"),
    )


def serves(device: torch.device) -> bool:
    """Whether the tensors are on the CPU."""
    return device.type == "cpu"


def unavailable() -> str | None:
    """Why the native library cannot be used here, or None."""
    return _load()[1]


def variant() -> str:
    """The instruction set the library chose on this machine, e.g. "neon" or "avx2"."""
    name: bytes = _library().tw_variant()
    return name.decode()


def encode(how: Encoding, x: Tensor, wire: Tensor, residual: Tensor | None, *, rotation: int, dither: int) -> None:
    """wire = encode(x + residual); residual = x + residual - decode(wire), unchanged in non-finite blocks."""
    job = _job(how, how.format.layout(x.numel()), _DTYPES[x.dtype], rotation, dither)
    updates = None if residual is None else residual.data_ptr()
    _library().tw_encode(job, x.data_ptr(), updates, None, wire.data_ptr())


def decode_sum(format: Format, wires_WN: Tensor, out: Tensor, *, scale: float, rotation: int | None) -> None:
    """out = scale * sum over ranks, in rank order in fp32, of decode(wire)."""
    layout = format.layout(out.numel())
    key = read_key(layout, wires_WN) if rotation is None else rotation
    job = _job(decoding(format), layout, _DTYPES[out.dtype], key, 0)
    _take_wires(job, wires_WN, scale)
    _library().tw_decode_sum(job, wires_WN.data_ptr(), out.data_ptr())


def recode(
    how: Encoding, wires_WN: Tensor, wire: Tensor, numel: int, *, scale: float, rotation: int | None, dither: int
) -> None:
    """wire = encode(scale * sum of decode(wires)), without leaving the rotated domain."""
    layout = how.format.layout(numel)
    key = read_key(layout, wires_WN) if rotation is None else rotation
    job = _job(how, layout, 0, key, dither)
    _take_wires(job, wires_WN, scale)
    _library().tw_encode(job, None, None, wires_WN.data_ptr(), wire.data_ptr())


def fake_quantize(grid: Grid, x_OCI: Tensor, scale_C: Tensor, shift_C: Tensor | None, out_OCI: Tensor) -> bool:
    """out = y of `Grid`."""
    job = _fake(grid, x_OCI.shape, x_OCI.dtype, torch.get_num_threads())
    shift = None if shift_C is None else shift_C.data_ptr()
    tensors = x_OCI.data_ptr(), scale_C.data_ptr(), shift, out_OCI.data_ptr()
    return not _library().tw_fake_quantize(job, *tensors)


def fake_quantize_grad(grid: Grid, of: FakeGradients, factor: float) -> None:
    """dx and the parameters' gradients of `Grid`. The sums do not depend on the number of threads."""
    job = _fake(grid, of.x_OCI.shape, of.x_OCI.dtype, torch.get_num_threads())
    slices = job.cuts_o * job.cuts_i
    partials = None if slices == 1 else torch.empty(slices, *of.scale_C.shape, 2, dtype=torch.float64)
    _library().tw_fake_quantize_grad(job, *[None if t is None else t.data_ptr() for t in (*of, partials)], factor)


def exact_encode(new: Tensor, base: Tensor) -> tuple[ExactTables, Tensor, Tensor]:
    """The tables, the length of each block, and the bytes of all blocks, one after the other."""
    counts = torch.zeros(exact.EXPONENTS, exact.LENGTHS, dtype=torch.int64)
    pointers = new.data_ptr(), base.data_ptr()
    stride = exact.counted_stride(base.numel())
    _library().tw_exact_count(_exact(ExactTables(0, (), ()), base), *pointers, stride, counts.data_ptr())
    tables = exact.choose(counts, 8 * base.itemsize)
    room = torch.empty(base.nbytes, dtype=torch.uint8)
    lengths = torch.empty(-(-base.numel() // EXACT_BLOCK), dtype=torch.int16)  # at most 4 * EXACT_BLOCK
    used = _library().tw_exact_encode(_exact(tables, base), *pointers, room.data_ptr(), lengths.data_ptr())
    return tables, exact_lengths(lengths), room[:used]


def exact_decode(tables: ExactTables, blocks: Tensor, starts: Tensor, base: Tensor, out: Tensor) -> bool:
    """out = the numbers that were encoded; False if the bytes are damaged."""
    pointers = blocks.data_ptr(), starts.data_ptr(), base.data_ptr(), out.data_ptr()
    return not _library().tw_exact_decode(_exact(tables, base), *pointers)


def _exact(tables: ExactTables, base: Tensor) -> _Exact:
    bits, mantissa, exponents, _ = exact.FORMATS[base.dtype]
    threads = max(1, min(torch.get_num_threads(), base.numel() // _ELEMENTS_PER_THREAD))
    return _Exact(bits, mantissa, exponents, tables.top, threads, base.numel(), tables.gaps, tables.values)


@lru_cache(maxsize=1024)
def _fake(grid: Grid, shape: torch.Size, dtype: torch.dtype, threads: int) -> _Fake:
    parts = max(1, min(_MOST_PARTS, shape.numel() // _ELEMENTS_PER_THREAD))
    numbers = grid.quant_min, grid.quant_max, grid.offset, grid.paper
    return _Fake(_DTYPES[dtype], min(threads, parts), *numbers, *shape, *_cuts(shape, parts))


def _cuts(shape: torch.Size, parts: int) -> tuple[int, int, int]:
    """How many parts each dimension is cut into, about `parts` in all. Channels come first: they share no sums."""
    outer, channels, inner = shape
    by_channel = min(parts, channels, max(1, channels * inner // _WIDE_ROW))
    by_outer = min(outer, -(-parts // by_channel))
    return by_outer, by_channel, -(-parts // (by_channel * by_outer))


def _job(how: Encoding, layout: Layout, dtype: int, rotation: int, dither: int) -> _Job:
    job = _Job.from_buffer_copy(_template(how, layout))
    job.dtype = dtype
    if layout.numel >= 2 * _ELEMENTS_PER_THREAD:
        job.threads = max(1, min(torch.get_num_threads(), layout.numel // _ELEMENTS_PER_THREAD))
    job.dither = dither
    if layout.format.rotated:
        job.rotation = rotation
        job.header[:] = layout.header(rotation)
    return job


def _take_wires(job: _Job, wires_WN: Tensor, scale: float) -> None:
    job.world = wires_WN.shape[0]
    job.wire_stride = wires_WN.stride(0)
    job.scale = scale


@lru_cache(maxsize=1024)
def _template(how: Encoding, layout: Layout) -> bytes:
    """The part of a job that depends on codec and length alone."""
    format = layout.format
    job = _Job(
        kind=format.kind,
        bits=format.bits,
        variant=format.variant,
        stochastic=how.stochastic,
        unbiased=how.unbiased,
        num_planes=len(layout.planes),
        threads=1,
        world=1,
        scale=1.0,
        numel=layout.numel,
        block=format.block,
        num_blocks=layout.num_blocks,
        tail=layout.tail,
        scales_at=layout.scales_at,
        minima_at=layout.minima_at,
        nbytes=layout.nbytes,
    )
    for i, (width, at) in enumerate(layout.planes):
        job.plane_width[i] = width
        job.plane_at[i] = at
    job.header[:] = layout.header()
    if format.gaussian:
        table = table_of(format)
        job.grid = table.grid
        job.num_levels = len(table.levels)
        job.levels[: len(table.levels)] = table.levels
        if isinstance(table, LloydTable):
            job.edges[: len(table.edges)] = table.edges
        elif isinstance(table, TrellisTable):
            job.shift = table.shift
    return bytes(job)


def _library() -> ctypes.CDLL:
    library, why = _load()
    if library is None:
        raise BackendError(f"backend='cpu' cannot run: {why}")
    return library


@lru_cache(maxsize=1)
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    if not LIBRARY.exists():
        return None, "the C kernels were not built (no compiler at install); install one and reinstall thinwire"
    try:
        library = ctypes.CDLL(str(LIBRARY))
        found: int = library.tw_abi()
    except (OSError, AttributeError) as error:
        return None, f"the C kernels do not load ({error}); reinstall thinwire on this machine"
    if found != _ABI:
        return None, f"the C kernels have ABI {found}, expected {_ABI}; reinstall thinwire"
    _declare(library)
    return library, None


def _declare(library: ctypes.CDLL) -> None:
    pointer = ctypes.c_void_p
    job = ctypes.POINTER(_Job)
    library.tw_encode.argtypes = [job, *[pointer] * 4]
    library.tw_decode_sum.argtypes = [job, pointer, pointer]
    fake = ctypes.POINTER(_Fake)
    library.tw_fake_quantize.argtypes = [fake, *[pointer] * 4]
    library.tw_fake_quantize_grad.argtypes = [fake, *[pointer] * 7, ctypes.c_double]
    coded = ctypes.POINTER(_Exact)
    library.tw_exact_encode.argtypes = [coded, *[pointer] * 4]
    library.tw_exact_encode.restype = ctypes.c_int64
    library.tw_exact_decode.argtypes = [coded, *[pointer] * 4]
    library.tw_exact_count.argtypes = [coded, pointer, pointer, ctypes.c_int64, pointer]
    library.tw_variant.restype = ctypes.c_char_p
