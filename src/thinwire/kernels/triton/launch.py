"""From a request to a launch: tiles, grids and arguments. Only here, and for fake quantisation in
fake_launch.py, this room touches tensors."""

import struct
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from thinwire.kernels import reference
from thinwire.kernels.schema import LLOYD, Encoding, decoding
from thinwire.kernels.triton import INTERPRETED, blocks, plain
from thinwire.kernels.triton.tile import LONG_WARPS, Tile, tile
from thinwire.wire import Format, Kind, Layout

MOST_UNROLLED = 8  # wires; sums of more are loops
_PLAIN_BYTES: int = 16 * plain.COLUMNS.value * plain.GROUPS.value  # a program, of wires without blocks
_PLAIN_WARPS = 8
_SHORT = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_SMALL_NORM = 2.0**32  # a sum of usual scales times less stays far inside bfloat16


@dataclass(frozen=True)
class Config:
    """How a kernel is cut up. Changes no byte."""

    lanes: int = 1  # at least; more => fewer shuffles in the rotation, more registers
    warps: int = 2


# --- the three operations ---------------------------------------------------------------------------------------------


def encode(
    how: Encoding, x: Tensor, wire: Tensor, residual: Tensor | None, rotation: int, dither: int, config: Config
) -> None:
    """See schema.Backend."""
    layout = how.format.layout(x.numel())
    carried = x if residual is None else residual
    if not how.format.block:
        raw = residual is None and how.format.kind == Kind.IDENTITY and x.dtype == layout.plain_dtype
        _encode_plain(layout, x, wire, residual, raw=raw)
        return
    grouped = _grouped(x) and _grouped(carried)
    shape = _shape(how, layout, config, wire.data_ptr() % 16, 0, grouped)
    run(
        blocks.encode_kernel,
        shape.grid,
        (
            *(x, carried, wire, _cells(_table(how.format), x.device)),
            *(
                *_head(layout)[:3],
                *_halves(rotation if how.format.rotated else 0),
                *_head(layout)[6:],
                *_halves(dither),
            ),
            *(*shape.tail, *shape.frame, *shape.planes, *shape.ends, shape.root, shape.tail_root),
        ),
        {"T": shape.tile, "TAIL": shape.ragged, "RESIDUAL": residual is not None},
        shape.warps,
    )


def decode_sum(
    format: Format, wires_WN: Tensor, out: Tensor, scale: float, rotation: int | None, config: Config
) -> None:
    """See schema.Backend; with rotation None the kernel reads the headers."""
    layout = format.layout(out.numel())
    world, stride = wires_WN.shape[0], wires_WN.stride(0)
    check = rotation is None
    if not format.block:
        run(
            plain.decode_plain,
            _plain_grid(4 * layout.numel),
            (wires_WN, out, stride, world, *_plain_head(layout), layout.numel, layout.planes[0][1], float(scale)),
            {
                "SHORT": _SHORT[layout.plain_dtype],
                "GROUPED": _grouped(out) and (wires_WN.data_ptr() | stride) % 16 == 0,
                "CHECK": check,
            },
            _PLAIN_WARPS,
        )
        return
    shape = _shape(decoding(format), layout, config, wires_WN.data_ptr() % 16, stride % 16, _grouped(out))
    norm, tail_norm = reference.f32(scale), reference.f32(scale)
    if format.rotated:
        norm, tail_norm = norm * shape.root, tail_norm * shape.tail_root
    run(
        blocks.decode_kernel,
        shape.grid,
        (
            *(wires_WN, out, _levels(_table(format), out.device), stride, world),
            *(*_head(layout)[:3], *_halves(rotation or 0), *_head(layout)[6:]),
            *(*shape.tail, shape.frame[0], shape.frame[2], *shape.planes, norm, tail_norm),
        ),
        {
            "T": shape.tile,
            "TAIL": shape.ragged,
            "WORLD": world if world <= MOST_UNROLLED else 0,
            "CHECK": check,
            "CALM": abs(scale) * world < _SMALL_NORM,
        },
        shape.warps,
    )


def recode(
    how: Encoding,
    wires_WN: Tensor,
    wire: Tensor,
    numel: int,
    scale: float,
    rotation: int | None,
    dither: int,
    config: Config,
) -> None:
    """See schema.Backend; with rotation None the kernel reads the headers."""
    layout = how.format.layout(numel)
    world, stride = wires_WN.shape[0], wires_WN.stride(0)
    check = rotation is None
    if not how.format.block:
        run(
            plain.recode_plain,
            _plain_grid(4 * numel),
            (wires_WN, wire, stride, world, *_plain_head(layout), numel, *_plain_ends(layout), float(scale)),
            {
                "SHORT": _SHORT[layout.plain_dtype],
                "GROUPED": (wires_WN.data_ptr() | stride | wire.data_ptr()) % 16 == 0,
                "CHECK": check,
            },
            _PLAIN_WARPS,
        )
        return
    shape = _shape(how, layout, config, (wires_WN.data_ptr() | wire.data_ptr()) % 16, stride % 16)
    run(
        blocks.recode_kernel,
        shape.grid,
        (
            *(
                wires_WN,
                wire,
                _levels(_table(how.format), wire.device),
                _cells(_table(how.format), wire.device),
                stride,
                world,
            ),
            *(*_head(layout)[:3], *_halves(rotation or 0), *_head(layout)[6:], *_halves(dither)),
            *(*shape.tail, *shape.frame, *shape.planes, *shape.ends, float(scale)),
        ),
        {
            "T": shape.tile,
            "TAIL": shape.ragged,
            "WORLD": world if world <= MOST_UNROLLED else 0,
            "CHECK": check,
        },
        shape.warps,
    )


def _encode_plain(layout: Layout, x: Tensor, wire: Tensor, residual: Tensor | None, *, raw: bool) -> None:
    if raw:
        whole = (x.data_ptr() | wire.data_ptr()) % 16 == 0
        run(
            plain.encode_raw,
            _plain_grid(x.nbytes if whole else 16 * x.nbytes),
            (x, wire, *_plain_head(layout), x.nbytes, *_plain_ends(layout)),
            {"WHOLE": whole},
            _PLAIN_WARPS,
        )
        return
    carried = x if residual is None else residual
    grouped = _grouped(x) and _grouped(carried) and wire.data_ptr() % 16 == 0
    run(
        plain.encode_plain,
        _plain_grid(4 * layout.numel),
        (x, carried, wire, *_plain_head(layout), layout.numel, *_plain_ends(layout)),
        {"SHORT": _SHORT[layout.plain_dtype], "GROUPED": grouped, "RESIDUAL": residual is not None},
        _PLAIN_WARPS,
    )


# [Note: Launching again] Triton's own way from arguments to a compiled kernel takes tens of microseconds of the host,
# more than a small message takes of the GPU. So a kernel found that way is kept by what Triton distinguishes:
# dtypes, pointers on 16 bytes or not, integers that are 1, multiples of 16, or longer than 32 bits.
_found: dict[tuple[Any, ...], Any] = {}


def run(kernel: Any, grid: int, args: tuple[Any, ...], constants: dict[str, Any], warps: int, kind: Any = None) -> None:
    """Start a kernel on the device of its first argument; constants are in the order of its parameters.

    `kind` stands for constants and arguments, if the caller knows a shorter way to say what Triton distinguishes.
    """
    device = args[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            run(kernel, grid, args, constants, warps, kind)
        return
    key = (kernel, device, warps, kind or (*constants.values(), *map(_kind, args)))
    found = _found.get(key)
    if found is not None:
        found[grid, 1, 1](*args, *constants.values())
        return
    found = kernel[(grid,)](*args, **constants, num_warps=warps, enable_fp_fusion=False)
    if found is not None:  # the interpreter compiles nothing
        assert kernel.arg_names[len(args) :] == list(constants)
        _found[key] = found


def _kind(value: Any) -> Any:
    """What Triton distinguishes in an argument. [Note: Launching again]"""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return value == 1, value % 16 == 0, value.bit_length() < 32, value.bit_length() < 64
    return type(value)


class _Known:
    """A tile as Triton's compiler sees it: every attribute is a constant of the kernel."""

    def __init__(self, of: Tile) -> None:
        self._tile = of

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._tile, name)
        if isinstance(value, tuple):
            return tl.tuple([tl.constexpr(v) for v in value])
        return tl.constexpr(_Known(value) if isinstance(value, Tile) else value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Known) and self._tile == other._tile

    def __hash__(self) -> int:
        return hash(self._tile)

    def __repr__(self) -> str:
        return repr(self._tile)


# --- what a launch needs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Shape:
    """The arguments that follow from layout, alignment and configuration."""

    tile: Tile | _Known
    grid: int
    ragged: bool  # whether there is a short last block
    tail: tuple[int, int, int]  # full blocks; elements and span of the short one
    frame: tuple[int, int, int, int]  # scales, their end, minima, their end
    planes: tuple[int, int, int]
    ends: tuple[int, int]  # of codes and wire
    root: float  # 1 / sqrt(codes of a block)
    tail_root: float
    warps: int


@lru_cache(maxsize=4096)
def _shape(
    how: Encoding, layout: Layout, config: Config, wire_at: int, stride: int = 0, grouped: bool = False
) -> _Shape:
    aligned = wire_at % 4 == 0 and stride % 4 == 0
    words = tuple(aligned and at % 4 == 0 for _, at in layout.planes)
    if layout.format.bits == 16:
        words = (wire_at % 8 == 0 and stride % 8 == 0,)
    even = wire_at % 2 == 0 and stride % 2 == 0
    T = tile(how, lanes=config.lanes, threads=32 * config.warps, words=words, grouped=grouped, even=even)
    full, block = layout.numel // layout.format.block, layout.format.block
    ragged = full < layout.num_blocks
    scales_end = layout.scales_at + 2 * layout.num_blocks
    minima_end = layout.minima_at + 2 * layout.num_blocks if layout.affine else layout.minima_at
    offsets = [at for _, at in layout.planes]
    width, at = layout.planes[-1]
    lloyd = layout.format.kind == Kind.LLOYD
    return _Shape(
        tile=T if INTERPRETED else _Known(T),
        grid=max(1, -(-full // T.rows) + ragged),
        ragged=ragged,
        tail=(full, layout.numel - full * block, layout.tail // T.ragged.lanes),
        frame=(layout.scales_at, scales_end, layout.minima_at, minima_end),
        planes=(offsets[0], offsets[1] if len(offsets) > 1 else 0, offsets[2] if len(offsets) > 2 else 0),
        ends=(at + layout.num_codes * width // 8, layout.nbytes),
        root=reference.root(block) if lloyd else 1.0,
        tail_root=reference.root(layout.tail) if lloyd and layout.tail else 1.0,
        warps=LONG_WARPS if T.pieces else config.warps,
    )


def _grouped(x: Tensor) -> bool:
    """Whether four neighbours can be read at once."""
    return bool(x.data_ptr() % (4 * x.itemsize) == 0)


def _plain_grid(nbytes: int) -> int:
    return max(1, -(-nbytes // _PLAIN_BYTES))


def _plain_head(layout: Layout) -> tuple[int, ...]:
    """The header's words but those that are zero."""
    head = _head(layout)
    return *head[:3], *head[6:]


def _plain_ends(layout: Layout) -> tuple[int, int, int]:
    """Where the numbers start and end, and the wire."""
    width, at = layout.planes[0]
    return at, at + layout.numel * width // 8, layout.nbytes


@lru_cache(maxsize=4096)
def _head(layout: Layout) -> tuple[int, ...]:
    """The header's words, as signed numbers; the key's are zero."""
    return struct.unpack("<8i", layout.header())


def _halves(key: int) -> tuple[int, int]:
    """A 64-bit key as two signed numbers of 32 bits: Triton types an integer by its size, and these are alike."""
    low, high = key & 0xFFFFFFFF, key >> 32
    return low - ((low >> 31) << 32), high - ((high >> 31) << 32)


def _table(format: Format) -> int:
    """The width whose table a kernel looks into; 0 for none."""
    return format.bits if format.kind == Kind.LLOYD else 0


@cache  # never dropped: a CUDA graph may hold their addresses
def _levels(bits: int, device: torch.device) -> Tensor:
    """The signed levels of a Lloyd table, as the bits of floats; something where there is none."""
    levels = LLOYD[bits].signed_levels if bits in LLOYD else (0,)
    with torch.inference_mode(False):
        return torch.tensor(levels, dtype=torch.float32).view(torch.int32).to(device)


@cache
def _cells(bits: int, device: torch.device) -> Tensor:
    """Of every cell up to the last edge, the code of its size in the top bits, and its level."""
    entries = [0]
    if bits in LLOYD:
        table, half = LLOYD[bits], 1 << bits - 1
        ranks = [sum(cell >= edge for edge in table.edges) for cell in range(128)]
        entries = [(half + rank << 32 - bits | table.levels[rank]) - (1 << 32) for rank in ranks]
    with torch.inference_mode(False):
        return torch.tensor(entries, dtype=torch.int32).to(device)
