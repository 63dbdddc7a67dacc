"""From a request to a launch: tiles, grids and arguments.

Of this folder, only this module, prepared.py, row_launch.py, fake_launch.py and exact.py touch tensors.
"""

import struct
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from thinwire.kernels import reference, trellis
from thinwire.kernels.schema import CELLS, LLOYD, TRELLIS, Encoding, TrellisTable, decoding
from thinwire.kernels.triton import INTERPRETED, plain, tuning
from thinwire.kernels.triton.decode_blocks import decode_kernel
from thinwire.kernels.triton.encode_blocks import encode_kernel, recode_kernel
from thinwire.kernels.triton.frame import Frame, Keys, Norms, Stack
from thinwire.kernels.triton.prepared import Prepared
from thinwire.kernels.triton.row_blocks import Matrix, Part
from thinwire.kernels.triton.tile import LONG_WARPS, Tile, ragged_lanes, tile
from thinwire.kernels.triton.tuning import Config
from thinwire.wire import Format, Kind, Layout

MOST_UNROLLED = 8  # sums of more wires are loops
PLAIN_BYTES: int = 16 * plain.COLUMNS.value * plain.GROUPS.value  # per program, of wires without blocks
PLAIN_WARPS = 8
KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
SMALL_NORM = 2.0**32  # a factor up to which a sum with usual scales stays far inside bfloat16's range
Known = tuple[tuple[str, Any], ...]  # arguments of a kernel that do not change from call to call, by name


# --- the three operations ---------------------------------------------------------------------------------------------


def encode(how: Encoding, x: Tensor, wire: Tensor, residual: Tensor | None, *, rotation: int, dither: int) -> None:
    """See schema.Backend."""
    layout = how.format.layout(x.numel())
    carried = x if residual is None else residual
    grouped = _grouped(x) and _grouped(carried)
    at = wire.data_ptr() % 16
    if not how.format.block:
        raw = residual is None and how.format.kind == Kind.IDENTITY and x.dtype == layout.plain_dtype
        flags = {"grouped": grouped and at == 0, "residual": residual is not None, "raw": raw}
        launch = plain_wires(plain.encode_plain, (layout,), x.device, **flags)
        launch(x=x, residual=carried, wire=wire, rows=Matrix(0, 0, 1, 0, -1))
        return
    op = "encode" if residual is None else "encode_residual"
    config = tuning.choose(op, how, x.dtype, x.device, x.numel())
    launch = blocks(encode_kernel, how, (layout,), config, x.device, at, grouped, mode=int(residual is not None))
    launch(x=x, residual=carried, wire=wire, keys=_keys(how, rotation, dither))


def decode_sum(format: Format, wires_WN: Tensor, out: Tensor, *, scale: float, rotation: int | None) -> None:
    """See schema.Backend; with rotation None the kernel reads the headers."""
    layout = format.layout(out.numel())
    stack = Stack(wires_WN.stride(0), wires_WN.shape[0])
    at = (wires_WN.data_ptr() | stack.stride) % 16
    check = rotation is None
    if not format.block:
        grouped = _grouped(out) and at == 0
        launch = plain_wires(plain.decode_plain, (layout,), out.device, grouped=grouped, check=check)
        rows = Matrix(0, *stack, short=0, skip=-1)
        launch(wire=wires_WN, rows=rows, out=out, source=out, bad=out, call=0, scale=float(scale))
        return
    task = {"world": unrolled(stack.world, format), "check": check, "calm": abs(scale) * stack.world < SMALL_NORM}
    config = tuning.choose("decode_sum", decoding(format), out.dtype, out.device, out.numel())
    launch = blocks(decode_kernel, decoding(format), (layout,), config, out.device, at, _grouped(out), **task)
    launch(wire=wires_WN, stack=stack, out=out, rotation=split(rotation or 0), norms=norms(layout, scale))


def recode(
    how: Encoding, wires_WN: Tensor, wire: Tensor, numel: int, *, scale: float, rotation: int | None, dither: int
) -> None:
    """See schema.Backend; with rotation None the kernel reads the headers."""
    layout = how.format.layout(numel)
    stack = Stack(wires_WN.stride(0), wires_WN.shape[0])
    at = (wires_WN.data_ptr() | wire.data_ptr() | stack.stride) % 16
    check = rotation is None
    given = {"wire": wires_WN, "stack": stack, "out": wire}
    if not how.format.block:
        launch = plain_wires(plain.recode_plain, (layout,), wire.device, grouped=at == 0, check=check)
        launch(**given, x=wire, part=Part(0, -1, 1.0, float(scale)))
        return
    config = tuning.choose("recode", how, torch.float32, wire.device, numel)
    world = unrolled(stack.world, how.format)
    launch = blocks(recode_kernel, how, (layout,), config, wire.device, at, world=world, check=check, calm=True)
    launch(**given, scale=float(scale), keys=_keys(how, rotation or 0, dither))


def unrolled(world: int, format: Format) -> int:
    """How many wires a kernel is compiled for; 0: any number. Narrow codes get 0, as unrolling would take registers."""
    return world if world <= MOST_UNROLLED and format.bits >= 8 else 0


# --- arguments that do not change from call to call -------------------------------------------------------------------


@lru_cache(maxsize=4096)
def blocks(
    kernel: Any,
    how: Encoding,
    layouts: tuple[Layout, ...],
    config: Config,
    device: torch.device,
    at: int = 0,
    grouped: bool = False,
    known: Known = (),
    rows: int = 1,
    **task: Any,
) -> Prepared:
    """A kernel of wires with blocks. layouts: one, or two: of all rows but the last, and of the last.

    at: the wires' addresses modulo 16, combined by "or". grouped, task: as in Tile.
    """
    T = replace(tile_of(how, layouts, config, at, grouped), tail=any(map(_has_tail, layouts)), **task)
    grid = max(_programs(layout, T) for layout in layouts), rows
    beforehand = frames(layouts) | tables(how.format.kind, how.format.bits, device) | dict(known)
    warps = LONG_WARPS if T.pieces else config.warps
    constants = {"T": T if INTERPRETED else Constants(T)}
    return Prepared(kernel, device, grid, warps, beforehand, constants, config.registers)


@lru_cache(maxsize=4096)
def plain_wires(
    kernel: Any, layouts: tuple[Layout, ...], device: torch.device, known: Known = (), rows: int = 1, **flags: bool
) -> Prepared:
    """A kernel of wires without blocks; layouts and rows as in `blocks`."""
    grid = max(1, -(-4 * layouts[0].numel // PLAIN_BYTES)), rows
    P = plain.Plain(KINDS[layouts[0].plain_dtype], **flags)
    constants = {"P": P if INTERPRETED else Constants(P)}
    return Prepared(kernel, device, grid, PLAIN_WARPS, frames(layouts) | dict(known), constants)


def _programs(layout: Layout, T: Tile) -> int:
    """The tiles of a wire, with one for a short last block."""
    full = layout.numel // layout.format.block
    return max(1, -(-full // T.rows) + (full < layout.num_blocks))


def _has_tail(layout: Layout) -> bool:
    """Whether a kernel can work on a short last block. Kernels of Lloyd and trellis codes always can: they take long
    to compile, and it costs them no registers, as it would others.
    """
    return layout.format.gaussian or layout.numel % layout.format.block > 0


def tile_of(how: Encoding, layouts: Sequence[Layout], config: Config, at: int, grouped: bool) -> Tile:
    """The tile that serves all layouts of a format."""
    planes = zip(*(layout.planes for layout in layouts), strict=True)
    words = tuple(all((at | start) % 4 == 0 for _, start in plane) for plane in planes)
    if how.format.bits == 16:
        words = (at % 8 == 0,)
    return tile(how, lanes=config.lanes, threads=32 * config.warps, words=words, grouped=grouped, even=at % 2 == 0)


def frames(layouts: Sequence[Layout]) -> dict[str, Any]:
    """The layout of a wire, or those of rows, by the names that kernels have for them."""
    return {"frame": frame(layouts[0]), "a": frame(layouts[0]), "b": frame(layouts[-1])}


@lru_cache(maxsize=4096)
def frame(layout: Layout) -> Frame:
    """The layout as kernels see it."""
    head0, head1, head2, _, _, _, numel_low, numel_high = struct.unpack("<8i", layout.header())
    block = layout.format.block
    full = layout.numel // block if block else 0
    offsets = [at for _, at in layout.planes]
    width, last = layout.planes[-1]
    root, tail_root = roots(layout)
    return Frame(
        head0=head0,
        head1=head1,
        head2=head2,
        numel_low=numel_low,
        numel_high=numel_high,
        numel=layout.numel,
        full=full,
        length=layout.numel - full * block,
        span=layout.tail // ragged_lanes(layout.format.kind),
        scales_at=layout.scales_at,
        scales_end=layout.scales_at + 2 * layout.num_blocks,
        minima_at=layout.minima_at,
        minima_end=layout.minima_at + (2 * layout.num_blocks if layout.affine else 0),
        **{f"plane{p}": offsets[p] if p < len(offsets) else 0 for p in range(3)},
        codes_end=last + layout.num_codes * width // 8,
        nbytes=layout.nbytes,
        root=root,
        tail_root=tail_root,
    )


def norms(layout: Layout, scale: float) -> Norms:
    """What a decoded sum is multiplied by; in doubles, products of 24-bit numbers are exact."""
    norm = reference.f32(scale)
    root, tail_root = roots(layout)
    return Norms(norm * root, norm * tail_root)


@lru_cache(maxsize=4096)
def roots(layout: Layout) -> tuple[float, float]:
    """1 / sqrt(codes) of a full block and of the short last one; 1 if they are not rotated."""
    if not layout.format.rotated:
        return 1.0, 1.0
    return reference.root(layout.format.block), reference.root(layout.tail) if layout.tail else 1.0


class Constants:
    """A Tile or Plain as Triton's compiler sees it: every attribute is a constant of the kernel."""

    def __init__(self, of: Tile | plain.Plain) -> None:
        self._of = of

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._of, name)
        if isinstance(value, tuple):
            return tl.tuple([tl.constexpr(v) for v in value])
        return tl.constexpr(Constants(value) if isinstance(value, Tile) else value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constants) and self._of == other._of

    def __hash__(self) -> int:
        return hash(self._of)

    def __repr__(self) -> str:
        return repr(self._of)


def _grouped(x: Tensor) -> bool:
    """Whether four neighbors can be read at once."""
    return bool(x.data_ptr() % (4 * x.itemsize) == 0)


@lru_cache(maxsize=1024)
def _keys(how: Encoding, rotation: int, dither: int) -> Keys:
    return Keys(split(rotation if how.format.rotated else 0), split(dither))


def split(key: int) -> tuple[int, int]:
    """A 64-bit key as two signed 32-bit numbers, as Triton types an integer by its value: these have one type."""
    low = key & 0xFFFFFFFF
    high = key >> 32
    return low - ((low >> 31) << 32), high - ((high >> 31) << 32)


@cache  # never dropped: a CUDA graph may hold their addresses
def tables(kind: Kind, bits: int, device: torch.device) -> dict[str, Tensor]:
    """The tables of a format in the memory of a device; placeholders if it has none.

    levels: the signed levels, as the bits of floats.
    cells: for every cell from 0 to 127, the code of its size in the top bits, and its level; for trellis codes see
    _trellis_cells.
    """
    table = TRELLIS[bits] if kind == Kind.TRELLIS else LLOYD[bits if kind == Kind.LLOYD else 1]
    floats = struct.pack(f"<{2 * len(table.levels)}f", *table.signed_levels)
    entries = [0]
    if isinstance(table, TrellisTable):
        entries = _trellis_cells(table)
    elif kind == Kind.LLOYD:
        half = 1 << bits - 1
        ranks = [sum(cell >= edge for edge in LLOYD[bits].edges) for cell in range(128)]
        entries = [(half + rank << 32 - bits | table.levels[rank]) - (1 << 32) for rank in ranks]
    with torch.inference_mode(False):
        levels = torch.frombuffer(bytearray(floats), dtype=torch.int32).to(device)
        return {"levels": levels, "cells": torch.tensor(entries, dtype=torch.int32).to(device)}


def _trellis_cells(table: TrellisTable) -> list[int]:
    """A byte per cell and subset: seven bits of cost, and above them the level's lowest index bit. Then the levels."""
    costs = []
    levels = []
    for cell, cost in zip(range(-CELLS // 2, CELLS // 2), trellis.costs(table).T.tolist(), strict=True):
        subsets = [table.signed_levels[subset::4] for subset in range(4)]
        places = [sum(8 * cell > low + high for low, high in pairwise(subset)) for subset in subsets]
        costs.append(bytes(c | (q & 1) << 7 for c, q in zip(cost, places, strict=True)))
        levels.append(bytes(subset[q] & 255 for subset, q in zip(subsets, places, strict=True)))
    return list(struct.unpack(f"<{2 * CELLS}i", b"".join((*costs, *levels))))
