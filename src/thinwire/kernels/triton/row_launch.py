"""The launches of messages in rows (kernels/rows.py): what is known when they are made, and the rest at every call."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels import hashing, reference
from thinwire.kernels.rows import Bad, Decode, Encode, Feedback, Memory, Recode, Scan
from thinwire.kernels.schema import RowJob, decoding
from thinwire.kernels.triton import INTERPRETED, launch, row_blocks, row_plain, tuning
from thinwire.kernels.triton.launch import Config
from thinwire.kernels.triton.prepared import Prepared, Repeated
from thinwire.kernels.triton.tile import LONG_WARPS, MOST_CODES, Tile
from thinwire.wire import Kind, Layout

_MODES = {"": 0, "classic": 2, "ef21": 3}  # tiles.OWED, tiles.CHANGE
_UNKEYED = (0, 0, 0, 0)  # the keys of formats that need none
_ROWS = {"encode": row_blocks.encode_rows, "decode": row_blocks.decode_rows, "recode": row_blocks.recode_own}


def encoder(job: RowJob, skip: int, by_row: int, first_row: int, feedback: Feedback | None) -> Encode:
    """See rows.encoder."""
    known: dict[str, Any] = {"each": job.rows.each, "stride": job.stride, "skip": skip, "short": job.rows.short}
    seed = launch.halves("seed", hashing.mix64(job.seed))
    known |= {**seed, "by_row": by_row, "first_row": first_row, "factor": feedback.factor if feedback else 1.0}
    mode = _MODES[feedback.mode if feedback else ""]
    even = job.rows.each % 4 == 0
    if not job.how.format.block:
        raw = job.how.format.kind == Kind.IDENTITY and job.dtype == job.layout(0).plain_dtype
        plain = Repeated(
            lambda grouped: _plain(row_plain.encode_plain_rows, job, known, grouped, RAW=raw), ("x", "wire"), (), even
        )
        return lambda x, wires, mixed, memory: plain((x, wires))
    tensors = ("x", "wire", "memory", "left")
    op = "encode_residual" if mode else "encode"
    config = tuning.choose(op, job.how, job.dtype, job.device, job.rows.numel)
    blocks = Repeated(
        lambda grouped: _blocks("encode", job, config, known, grouped, MODE=mode),
        tensors,
        ("step_low", "step_high"),
        even,
    )
    keyed = job.how.keyed

    def encode(x: Tensor, wires: Tensor, mixed: int, memory: Memory | None) -> None:
        kept, left = (x, x) if memory is None else memory[:2]
        blocks((x, wires, kept, left), launch.split(mixed) if keyed else (0, 0))

    return encode


def recoder(job: RowJob, row: int, world: int, scale: float, own: int, feedback: Feedback | None) -> Recode:
    """See rows.recoder."""
    layout = job.layout(row)
    op = "recode" if own < 0 else "recode_own"
    config = tuning.choose(op, job.how, torch.float32, job.device, layout.numel, world)
    even = job.rows.each % 4 == 0
    keys = _row_keys(job, row, hashing.DITHER_RECODE if own < 0 else hashing.DITHER)
    keyed = job.how.keyed
    key_names = ("key_low", "key_high", "dither_low", "dither_high")
    if own >= 0:
        make = functools.partial(_own, job, row, world, own, scale, feedback, config=config)
        tensors = ("wire", "out", "x", "memory", "left") if layout.format.block else ("wire", "out", "x")
        names = key_names if layout.format.block else ()
        adding = Repeated(lambda grouped: make(grouped=grouped), tensors, names, even)
        if not layout.format.block:
            return lambda wires, wire, mixed, x, memory: adding((wires, wire, x))  # type: ignore[arg-type]

        def recode_own(wires: Tensor, wire: Tensor, mixed: int, x: Tensor | None, memory: Memory | None) -> None:
            assert x is not None
            kept, left = (x, x) if memory is None else memory[:2]
            adding((wires, wire, x, kept, left), keys(mixed) if keyed else _UNKEYED)

        return recode_own
    known = (("stride", job.stride), ("world", world), ("scale", float(scale)))
    if not layout.format.block:
        work = 4 * layout.numel
        summing = launch.plain_wires("recode_plain", layout, job.device, work, known, GROUPED=True, CHECK=False)
        plain = Repeated(lambda _: summing, ("wire", "out"))
        return lambda wires, wire, mixed, x, memory: plain((wires, wire))
    constants = {"WORLD": launch.unrolled(world, layout.format), "CHECK": False}
    made = launch.blocks("recode", job.how, layout, config, job.device, 0, 0, False, known, **constants)
    blocks = Repeated(lambda _: made, ("wire", "out"), key_names)
    return lambda wires, wire, mixed, x, memory: blocks((wires, wire), keys(mixed) if keyed else _UNKEYED)


def _row_keys(job: RowJob, row: int, stream: int) -> Callable[[int], tuple[int, int, int, int]]:
    """The halves of a row's keys of rotation and dither, of a mixed step."""
    seed = hashing.mix64(job.seed)

    def keys(mixed: int) -> tuple[int, int, int, int]:
        base = hashing.mix64(seed ^ hashing.row_step(mixed, row))
        rotation = launch.split(hashing.mix64(base ^ hashing.ROTATION)) if job.how.format.rotated else (0, 0)
        return (*rotation, *(launch.split(hashing.mix64(base ^ stream)) if job.how.stochastic else (0, 0)))

    return keys


def decoder(
    job: RowJob, world: int, scale: float, skip: int, own: int, share: float, feedback: Feedback | None
) -> Decode:
    """See rows.decoder."""
    known: dict[str, Any] = {"each": job.rows.each, "stride": job.stride, "skip": skip, "short": job.rows.short}
    known |= {"own": own, "world": world, "factor": share, "scale": float(scale)}
    mode = _MODES[feedback.mode if feedback else ""]
    even = job.rows.each % 4 == 0
    norm = reference.f32(scale)
    how = decoding(job.how.format)
    calm = abs(scale) * world < launch.SMALL_NORM
    constants = {"WORLD": launch.unrolled(world, how.format), "CALM": calm, "MODE": mode}
    config = tuning.choose("decode_sum", how, job.dtype, job.device, job.rows.numel, world)

    def make(grouped: bool, counted: bool) -> Prepared:
        if not job.how.format.block:
            return _plain(row_plain.decode_plain_rows, job, known, grouped, COUNT=counted)
        return _blocks("decode", job, config, known, grouped, norm, COUNT=counted and not mode, **constants)

    plain = not job.how.format.block
    tensors = ("wire", "out", "source", "bad", *(() if plain else ("left", "memory", "mean")))
    launches = [
        Repeated(functools.partial(make, counted=counted), tensors, ("call",), even) for counted in (False, True)
    ]

    def decode(
        wires: Tensor, out: Tensor, memory: Memory | None, bad: Bad | None, source: Tensor | None = None
    ) -> None:
        noted, call = (wires, 0) if bad is None else bad
        copied = out if source is None else source
        start = launches[bad is not None]
        if plain:
            start((wires, out, copied, noted), (call,))
            return
        kept, left, mean = (out, out, out) if memory is None else memory
        start((wires, out, copied, noted, left, kept, out if mean is None else mean), (call,))

    return decode


def scanner(job: RowJob, world: int) -> Scan:
    """See rows.scanner."""
    short = world - 1 if world > 1 else job.rows.short
    last = job.layout(job.rows.short)
    first = job.layout(0)
    known = {"stride": job.stride, "short": short, "a_scales_at": first.scales_at}
    known |= {"a_blocks": first.num_blocks, "b_blocks": last.num_blocks}
    grid = (-(-first.num_blocks // row_blocks.SCANNED.value), short + 1)
    prepared = Prepared(row_blocks.scan_rows, job.device, grid, 4, known, {})
    made = Repeated(lambda _: prepared, ("wire", "bad"), ("call",))
    return lambda wires, bad: made((wires, bad.noted), (bad.call,))


def adds_own(job: RowJob) -> bool:
    """Whether there is one launch that adds the own part: not where blocks have minima or are longer than a tile."""
    format = job.how.format
    if not format.block:
        return True
    tile = _tile(job, Config(), False)
    return format.block <= MOST_CODES and not tile.affine and not tile.ragged.pieces


# --- arguments known beforehand ---------------------------------------------------------------------------------------


def _blocks(
    op: str, job: RowJob, config: Config, known: dict[str, Any], grouped: bool, norm: float = 1.0, **constants: Any
) -> Prepared:
    """encode_rows or decode_rows. norm: the scale of a decoded sum."""
    rows = job.rows
    T = _tile(job, config, grouped)
    layouts = {"a": job.layout(0), "b": job.layout(rows.short)}
    arguments = {**known, **_shared(layouts["a"], job.device)}
    arguments["norm"] = norm * launch.roots(layouts["a"])[0] if job.how.format.rotated else norm
    tail = False
    programs = 1
    for letter, layout in layouts.items():
        numbers = _numbers(layout, T, norm)
        arguments |= {f"{letter}_{name}": value for name, value in numbers.items()}
        tail = tail or launch.has_tail(layout)
        programs = max(programs, -(-numbers["full"] // T.rows) + bool(numbers["length"]))
    constants = {"T": T if INTERPRETED else launch.Known(T), "TAIL": tail, **constants}
    warps = LONG_WARPS if T.pieces else config.warps
    grid = (programs, rows.short + 1)
    return Prepared(_ROWS[op], job.device, grid, warps, arguments, constants, config.registers)


def _own(
    job: RowJob,
    row: int,
    world: int,
    own: int,
    scale: float,
    feedback: Feedback | None,
    *,
    grouped: bool,
    config: Config,
) -> Prepared:
    layout = job.layout(row)
    known: dict[str, Any] = {"stride": job.stride, "world": world - 1, "own": own, "scale": float(scale)}
    known |= {"factor": feedback.factor if feedback else 1.0, "numel": layout.numel, **launch.frame(layout)}
    known["start"] = job.rows.span(row)[0]
    if not layout.format.block:
        known |= _shared(layout, job.device)
        grid = max(1, -(-4 * layout.numel // launch.PLAIN_BYTES))
        constants = {"SHORT": launch.SHORT_KINDS[layout.plain_dtype], "GROUPED": grouped}
        return Prepared(row_plain.recode_plain_own, job.device, grid, launch.PLAIN_WARPS, known, constants)
    T = _tile(job, config, grouped)
    norm = reference.f32(scale)
    numbers = _numbers(layout, T, norm)
    known |= {**_shared(layout, job.device), **numbers}
    known["norm"] = norm * launch.roots(layout)[0] if layout.format.rotated else norm
    constants = {
        "T": T if INTERPRETED else launch.Known(T),
        "TAIL": launch.has_tail(layout),
        "WORLD": launch.unrolled(world - 1, layout.format),
        "CALM": abs(scale) * world < launch.SMALL_NORM,
        "MODE": _MODES[feedback.mode if feedback else ""],
    }
    grid = max(1, -(-numbers["full"] // T.rows) + bool(numbers["length"]))
    return Prepared(row_blocks.recode_own, job.device, grid, config.warps, known, constants, config.registers)


def _plain(kernel: Any, job: RowJob, known: dict[str, Any], grouped: bool, **constants: bool) -> Prepared:
    rows = job.rows
    layouts = {"a": job.layout(0), "b": job.layout(rows.short)}
    arguments = {**known, **_shared(layouts["a"], job.device)}
    for letter, layout in layouts.items():
        arguments |= {f"{letter}_{name}": value for name, value in launch.frame(layout).items()}
    programs = max(1, -(-4 * layouts["a"].numel // launch.PLAIN_BYTES))
    kind = {"SHORT": launch.SHORT_KINDS[layouts["a"].plain_dtype], "GROUPED": grouped}
    return Prepared(
        kernel, job.device, (programs, rows.short + 1), launch.PLAIN_WARPS, arguments, {**kind, **constants}
    )


def _shared(layout: Layout, device: torch.device) -> dict[str, Any]:
    """What both layouts have alike."""
    frame = launch.frame(layout)
    table = (layout.format.kind, layout.format.bits, device)
    heads = {name: frame[name] for name in ("head0", "head1", "head2", "plane0")}
    tables = {"levels": launch.levels(*table), "cells": launch.cells(*table)}
    return {**heads, **tables, "root": launch.roots(layout)[0]}


def _numbers(layout: Layout, T: Tile, norm: float) -> dict[str, Any]:
    """The numbers of a layout that kernels ask for."""
    full = layout.numel // layout.format.block
    tail_root = launch.roots(layout)[1]
    return {
        **launch.frame(layout),
        "numel": layout.numel,
        "full": full,
        "length": layout.numel - full * layout.format.block,
        "span": layout.tail // T.ragged.lanes,
        "tail_root": tail_root,
        "tail_norm": norm * tail_root if layout.format.rotated else norm,
    }


def _tile(job: RowJob, config: Config, grouped: bool) -> Tile:
    """The tile that serves both layouts."""
    first = launch.tile_of(job.how, job.layout(0), config, 0, 0, grouped)
    last = launch.tile_of(job.how, job.layout(job.rows.short), config, 0, 0, grouped)
    return replace(first, words=tuple(a and b for a, b in zip(first.words, last.words, strict=True)))
