"""From a request to a launch: tiles, grids and arguments. Only here, in prepared.py, and for fake quantisation in
fake_launch.py, this room touches tensors."""

import struct
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from thinwire.kernels import reference, trellis
from thinwire.kernels.schema import CELLS, LLOYD, TRELLIS, Encoding, TrellisTable, decoding
from thinwire.kernels.triton import INTERPRETED, aside, plain
from thinwire.kernels.triton.decode_blocks import decode_kernel
from thinwire.kernels.triton.encode_blocks import encode_kernel
from thinwire.kernels.triton.prepared import Prepared, Repeated
from thinwire.kernels.triton.recode_blocks import recode_kernel
from thinwire.kernels.triton.tile import LONG_WARPS, Tile, tile
from thinwire.wire import Format, Kind, Layout

MOST_UNROLLED = 8  # wires; sums of more are loops
PLAIN_BYTES: int = 16 * plain.COLUMNS.value * plain.GROUPS.value  # per program, of wires without blocks
PLAIN_WARPS = 8
SHORT_KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_BLOCK_KERNELS = {"encode": encode_kernel, "decode": decode_kernel, "recode": recode_kernel}
SMALL_NORM = 2.0**32  # a sum of usual scales times less stays far inside bfloat16


@dataclass(frozen=True)
class Config:
    """How a kernel is cut up. Changes no byte."""

    lanes: int = 1  # at least; more => fewer shuffles in the rotation, more registers
    warps: int = 2
    registers: int | None = None  # at most, for a thread; fewer => more programs at a time. None: ptxas decides


# --- the three operations ---------------------------------------------------------------------------------------------


def encode(
    how: Encoding, x: Tensor, wire: Tensor, residual: Tensor | None, rotation: int, dither: int, config: Config
) -> None:
    """See schema.Backend."""
    layout = how.format.layout(x.numel())
    if not how.format.block:
        _encode_plain(layout, x, wire, residual)
        return
    carried = x if residual is None else residual
    grouped = _grouped(x) and _grouped(carried)
    wire_at = wire.data_ptr() % 16
    launch = blocks("encode", how, layout, config, x.device, wire_at, 0, grouped, MODE=int(residual is not None))
    key = rotation if how.format.rotated else 0
    launch(x=x, residual=carried, wire=wire, **halves("key", key), **halves("dither", dither))


def decode_sum(
    format: Format, wires_WN: Tensor, out: Tensor, scale: float, rotation: int | None, config: Config
) -> None:
    """See schema.Backend; with rotation None the kernel reads the headers."""
    layout = format.layout(out.numel())
    world = wires_WN.shape[0]
    stride = wires_WN.stride(0)
    wires = {"wire": wires_WN, "stride": stride, "world": world}
    at = (wires_WN.data_ptr() % 16, stride % 16)
    check = rotation is None
    if not format.block:
        grouped = _grouped(out) and at == (0, 0)
        launch = plain_wires("decode_plain", layout, out.device, 4 * layout.numel, GROUPED=grouped, CHECK=check)
        launch(**wires, out=out, scale=float(scale))
        return
    constants = {"WORLD": unrolled(world, format), "CHECK": check, "CALM": abs(scale) * world < SMALL_NORM}
    launch = blocks("decode", decoding(format), layout, config, out.device, *at, _grouped(out), **constants)
    norm = reference.f32(scale)
    norms = {"norm": norm, "tail_norm": norm}
    if format.rotated:
        root, tail_root = roots(layout)
        norms = {"norm": norm * root, "tail_norm": norm * tail_root}
    launch(**wires, out=out, **halves("key", rotation or 0), **norms)


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
    world = wires_WN.shape[0]
    stride = wires_WN.stride(0)
    wires = {"wire": wires_WN, "stride": stride, "world": world}
    at = ((wires_WN.data_ptr() | wire.data_ptr()) % 16, stride % 16)
    check = rotation is None
    if not how.format.block:
        launch = plain_wires("recode_plain", layout, wire.device, 4 * numel, GROUPED=at == (0, 0), CHECK=check)
        launch(**wires, out=wire, scale=float(scale))
        return
    constants = {"WORLD": unrolled(world, how.format), "CHECK": check}
    launch = blocks("recode", how, layout, config, wire.device, *at, **constants)
    keys = {**halves("key", rotation or 0), **halves("dither", dither)}
    launch(**wires, out=wire, **keys, scale=float(scale))


def set_aside(x: Tensor, index: Tensor, out: Tensor, memory: Tensor | None, gaps: Tensor | None) -> None:
    """See schema.Backend."""
    kept = x if memory is None else memory
    start = _setting_aside(index.numel(), 0 if gaps is None else gaps.numel(), x.device, x.dtype, kept.dtype)
    start((x, index, out, kept, index if gaps is None else gaps))


def put_back(x: Tensor, index: Tensor, values: Tensor) -> None:
    """See schema.Backend."""
    _putting_back(index.numel(), x.device, x.dtype)((x, index, values))


@lru_cache(maxsize=1024)
def _setting_aside(count: int, blanks: int, device: torch.device, *dtypes: torch.dtype) -> Repeated:
    """By dtypes too: a launch that was started before knows its kernel by them."""
    grid = -(-count // aside.MOVED.value)
    made = Prepared(aside.set_aside_kernel, device, grid, 4, {"count": count, "blanks": blanks}, {})
    return Repeated(lambda _: made, ("x", "index", "out", "memory", "gaps"))


@lru_cache(maxsize=1024)
def _putting_back(count: int, device: torch.device, dtype: torch.dtype) -> Repeated:
    made = Prepared(aside.put_back_kernel, device, -(-count // aside.MOVED.value), 4, {"count": count}, {})
    return Repeated(lambda _: made, ("x", "index", "values"))


def unrolled(world: int, format: Format) -> int:
    """The wires a kernel is compiled for; 0 for any number, as always of trellis codes."""
    return world if world <= MOST_UNROLLED and format.kind != Kind.TRELLIS else 0


def _encode_plain(layout: Layout, x: Tensor, wire: Tensor, residual: Tensor | None) -> None:
    if residual is None and layout.format.kind == Kind.IDENTITY and x.dtype == layout.plain_dtype:
        whole = (x.data_ptr() | wire.data_ptr()) % 16 == 0
        launch = plain_wires("encode_raw", layout, x.device, x.nbytes if whole else 16 * x.nbytes, WHOLE=whole)
        launch(x=x, wire=wire)
        return
    carried = x if residual is None else residual
    grouped = _grouped(x) and _grouped(carried) and wire.data_ptr() % 16 == 0
    constants = {"GROUPED": grouped, "RESIDUAL": residual is not None}
    launch = plain_wires("encode_plain", layout, x.device, 4 * layout.numel, **constants)
    launch(x=x, residual=carried, wire=wire)


# --- arguments that do not change from call to call -------------------------------------------------------------------


@lru_cache(maxsize=4096)
def blocks(
    kernel: str,
    how: Encoding,
    layout: Layout,
    config: Config,
    device: torch.device,
    wire_at: int,
    stride: int,
    grouped: bool = False,
    more: tuple[tuple[str, Any], ...] = (),
    **constants: Any,
) -> Prepared:
    """A kernel of wires with blocks that start at `wire_at` and every `stride` bytes, both modulo 16.

    more: other arguments that are known beforehand.
    """
    T = tile_of(how, layout, config, wire_at, stride, grouped)
    full = layout.numel // layout.format.block
    ragged = full < layout.num_blocks
    root, tail_root = roots(layout)
    known = {
        **frame(layout),
        "full": full,
        "length": layout.numel - full * layout.format.block,
        "span": layout.tail // T.ragged.lanes,
        "root": root,
        "tail_root": tail_root,
        "levels": levels(layout.format.kind, layout.format.bits, device),
        "cells": cells(layout.format.kind, layout.format.bits, device),
        **dict(more),
    }
    constants = {"T": T if INTERPRETED else Known(T), "TAIL": has_tail(layout), **constants}
    grid = max(1, -(-full // T.rows) + ragged)
    warps = LONG_WARPS if T.pieces else config.warps
    return Prepared(_BLOCK_KERNELS[kernel], device, grid, warps, known, constants, config.registers)


def has_tail(layout: Layout) -> bool:
    """Whether a kernel can work on a short last block. Those of levels always can: they take long to compile, and no
    more registers than without; others would take some that full blocks can do without.
    """
    return layout.format.gaussian or layout.numel % layout.format.block > 0


def tile_of(how: Encoding, layout: Layout, config: Config, wire_at: int, stride: int, grouped: bool) -> Tile:
    aligned = wire_at % 4 == 0 and stride % 4 == 0
    words = tuple(aligned and at % 4 == 0 for _, at in layout.planes)
    if layout.format.bits == 16:
        words = (wire_at % 8 == 0 and stride % 8 == 0,)
    even = wire_at % 2 == 0 and stride % 2 == 0
    return tile(how, lanes=config.lanes, threads=32 * config.warps, words=words, grouped=grouped, even=even)


@lru_cache(maxsize=4096)
def plain_wires(
    kernel: str,
    layout: Layout,
    device: torch.device,
    work: int,
    more: tuple[tuple[str, Any], ...] = (),
    **constants: bool,
) -> Prepared:
    """A kernel of wires without blocks that has `work` bytes to do. more: as of `blocks`."""
    known = {**frame(layout), "numel": layout.numel, "nbytes_raw": layout.numel * layout.format.bits // 8}
    known.update(more)
    constants = {"SHORT": SHORT_KINDS[layout.plain_dtype], **constants}
    return Prepared(getattr(plain, kernel), device, max(1, -(-work // PLAIN_BYTES)), PLAIN_WARPS, known, constants)


def frame(layout: Layout) -> dict[str, int]:
    """The header's words but those of the key, as signed numbers, and where sections start and end."""
    head0, head1, head2, _, _, _, numel_low, numel_high = struct.unpack("<8i", layout.header())
    offsets = [at for _, at in layout.planes]
    width, last = layout.planes[-1]
    return {
        "head0": head0,
        "head1": head1,
        "head2": head2,
        "numel_low": numel_low,
        "numel_high": numel_high,
        "scales_at": layout.scales_at,
        "scales_end": layout.scales_at + 2 * layout.num_blocks,
        "minima_at": layout.minima_at,
        "minima_end": layout.minima_at + (2 * layout.num_blocks if layout.affine else 0),
        **{f"plane{p}": offsets[p] if p < len(offsets) else 0 for p in range(3)},
        "codes_end": last + layout.num_codes * width // 8,
        "nbytes": layout.nbytes,
    }


@lru_cache(maxsize=4096)
def roots(layout: Layout) -> tuple[float, float]:
    """1 / sqrt(codes) of a full block and of the short last one; 1 where codes are not levels."""
    if not layout.format.gaussian:
        return 1.0, 1.0
    return reference.root(layout.format.block), reference.root(layout.tail) if layout.tail else 1.0


class Known:
    """A tile as Triton's compiler sees it: every attribute is a constant of the kernel."""

    def __init__(self, of: Tile) -> None:
        self._tile = of

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._tile, name)
        if isinstance(value, tuple):
            return tl.tuple([tl.constexpr(v) for v in value])
        return tl.constexpr(Known(value) if isinstance(value, Tile) else value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Known) and self._tile == other._tile

    def __hash__(self) -> int:
        return hash(self._tile)

    def __repr__(self) -> str:
        return repr(self._tile)


def _grouped(x: Tensor) -> bool:
    """Whether four neighbours can be read at once."""
    return bool(x.data_ptr() % (4 * x.itemsize) == 0)


@lru_cache(maxsize=1024)
def halves(name: str, key: int) -> dict[str, int]:
    """The two halves of a key, by name."""
    low, high = split(key)
    return {f"{name}_low": low, f"{name}_high": high}


def split(key: int) -> tuple[int, int]:
    """A 64-bit key as two signed numbers of 32 bits: Triton types an integer by its size, and these are alike."""
    low = key & 0xFFFFFFFF
    high = key >> 32
    return low - ((low >> 31) << 32), high - ((high >> 31) << 32)


@cache  # never dropped: a CUDA graph may hold their addresses
def levels(kind: Kind, bits: int, device: torch.device) -> Tensor:
    """The signed levels of a table, as the bits of floats; something where there is none.

    After them follow the bytes that exact_sums.py permutes: ptxas would keep such constants outside the registers, and
    move one in for every use.
    """
    table = TRELLIS[bits] if kind == Kind.TRELLIS else LLOYD[bits] if kind == Kind.LLOYD else LLOYD[1]
    count = len(table.levels)
    floats = struct.pack(f"<{2 * count}f", *table.signed_levels)
    shorts = [*(255 + level for level in table.signed_levels[:count]), *table.levels]
    if count == 2:
        shorts = [128 + level for level in table.signed_levels]
    words = bytes(shorts).ljust(16, b"\0")
    with torch.inference_mode(False):
        return torch.frombuffer(bytearray(floats + words), dtype=torch.int32).to(device)


@cache
def cells(kind: Kind, bits: int, device: torch.device) -> Tensor:
    """Of every cell up to the last edge, the code of its size in the top bits, and its level."""
    entries = [0]
    if kind == Kind.TRELLIS:
        entries = _trellis_cells(TRELLIS[bits])
    if kind == Kind.LLOYD:
        table = LLOYD[bits]
        half = 1 << bits - 1
        ranks = [sum(cell >= edge for edge in table.edges) for cell in range(128)]
        entries = [(half + rank << 32 - bits | table.levels[rank]) - (1 << 32) for rank in ranks]
    with torch.inference_mode(False):
        return torch.tensor(entries, dtype=torch.int32).to(device)


def _trellis_cells(table: TrellisTable) -> list[int]:
    """Of every cell with costs of its own four bytes, by subset: the costs, and the lowest index bits above them.

    After those of all cells four bytes of each again, the levels.
    """
    costs = []
    levels = []
    for cell, cost in zip(range(-CELLS // 2, CELLS // 2), trellis.costs(table).T.tolist(), strict=True):
        subsets = [table.signed_levels[subset::4] for subset in range(4)]
        places = [sum(8 * cell > low + high for low, high in pairwise(subset)) for subset in subsets]
        costs.append(bytes(c | (q & 1) << 7 for c, q in zip(cost, places, strict=True)))
        levels.append(bytes(subset[q] & 255 for subset, q in zip(subsets, places, strict=True)))
    return list(struct.unpack(f"<{2 * CELLS}i", b"".join((*costs, *levels))))
