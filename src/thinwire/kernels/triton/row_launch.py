"""The launches of messages in rows (kernels/rows.py): made once, with what is known then, and called at every step."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels import hashing
from thinwire.kernels.rows import Bad, Decode, Encode, Feedback, Memory, Picked, Recode, Scan
from thinwire.kernels.schema import RowJob, decoding
from thinwire.kernels.triton import launch, plain, row_blocks, tuning
from thinwire.kernels.triton.encode_blocks import recode_kernel
from thinwire.kernels.triton.frame import Keys, Stack
from thinwire.kernels.triton.prepared import Prepared, Repeated
from thinwire.kernels.triton.row_blocks import Matrix, Part, RowNorms, Seeds, Share
from thinwire.kernels.triton.tile import MOST_CODES
from thinwire.kernels.triton.tuning import Config
from thinwire.wire import Kind, Layout

_MODES = {"classic": 2, "ef21": 3}  # tiles.OWED and CHANGE
_UNKEYED = Keys((0, 0), (0, 0))  # of formats that need no keys


def encoder(job: RowJob, skip: int, by_row: int, first_row: int, feedback: Feedback | None) -> Encode:
    """See rows.encoder."""
    seeds = Seeds(launch.split(hashing.mix64(job.seed)), by_row, first_row)
    factor = feedback.factor if feedback else 1.0
    known: dict[str, Any] = {"rows": _matrix(job, skip=skip), "seeds": seeds, "factor": factor}
    mode = _mode(feedback)
    even = job.rows.each % 4 == 0
    if not job.how.format.block:
        raw = job.how.format.kind == Kind.IDENTITY and job.dtype == job.layout(0).plain_dtype
        make = functools.partial(_plain, plain.encode_plain, job, known, raw=raw)
        copy = Repeated(make, ("wire", "x", "residual"), even=even)
        make = functools.partial(_plain, plain.encode_picked, job, known, raw=raw, copied=skip >= 0)
        pick: Any = Repeated(make, ("wire", "x", "index", "copy"))
        return lambda x, wires, mixed, memory: (
            pick((wires, *x[:2], x[2 if skip >= 0 else 0])) if isinstance(x, Picked) else copy((wires, x, x))
        )
    op = "encode_residual" if mode else "encode"
    config = tuning.choose(op, job.how, job.dtype, job.device, job.rows.numel)
    make = functools.partial(_blocks, row_blocks.encode_rows, job, config, known, mode=mode)
    blocks = Repeated(make, ("wire", "x", "memory", "left"), ("step",), even)
    keyed = job.how.keyed

    def encode(x: Any, wires: Tensor, mixed: int, memory: Memory | None) -> None:
        kept, left = (x, x) if memory is None else memory[:2]
        blocks((wires, x, kept, left), (launch.split(mixed) if keyed else (0, 0),))

    return encode


def recoder(job: RowJob, row: int, world: int, scale: float, own: int, feedback: Feedback | None) -> Recode:
    """See rows.recoder."""
    layout = job.layout(row)
    even = job.rows.each % 4 == 0
    if not layout.format.block:
        plainly = functools.partial(_recode_plain, job, row, world, scale, own)
        summing = Repeated(plainly, ("wire", "out", "x"), even=own < 0 or even)
        return lambda wires, wire, mixed, x, memory: summing((wires, wire, wire if own < 0 or x is None else x))
    op = "recode" if own < 0 else "recode_own"
    config = tuning.choose(op, job.how, torch.float32, job.device, layout.numel)
    keys = _row_keys(job, row, hashing.DITHER_RECODE if own < 0 else hashing.DITHER)
    if own < 0:
        known = (("stack", Stack(job.stride, world)), ("scale", float(scale)))
        wires = launch.unrolled(world, layout.format)
        made = launch.blocks(recode_kernel, job.how, (layout,), config, job.device, known=known, world=wires, calm=True)
        blocks = Repeated(lambda grouped: made, ("wire", "out"), ("keys",))
        return lambda wires, wire, mixed, x, memory: blocks((wires, wire), (keys(mixed),))
    part = Part(job.rows.span(row)[0], own, feedback.factor if feedback else 1.0, float(scale))
    more = (("stack", Stack(job.stride, world - 1)), ("part", part), ("norms", launch.norms(layout, scale)))
    task = {"mode": _mode(feedback), "world": launch.unrolled(world - 1, layout.format)}
    task["calm"] = abs(scale) * world < launch.SMALL_NORM

    def make(grouped: bool) -> Prepared:
        of = job.how, (layout,), config, job.device, 0, grouped, more
        return launch.blocks(row_blocks.recode_own, *of, **task)

    adding = Repeated(make, ("wire", "out", "x", "memory", "left"), ("keys",), even)

    def recode_own(wires: Tensor, wire: Tensor, mixed: int, x: Tensor | None, memory: Memory | None) -> None:
        assert x is not None
        kept, left = (x, x) if memory is None else memory[:2]
        adding((wires, wire, x, kept, left), (keys(mixed),))

    return recode_own


def _row_keys(job: RowJob, row: int, stream: int) -> Callable[[int], Keys]:
    """A function that gives the keys of a row for a mixed step."""
    if not job.how.keyed:
        return lambda mixed: _UNKEYED
    seed = hashing.mix64(job.seed)

    def keys(mixed: int) -> Keys:
        base = hashing.mix64(seed ^ hashing.row_step(mixed, row))
        rotation = launch.split(hashing.mix64(base ^ hashing.ROTATION)) if job.how.format.rotated else (0, 0)
        return Keys(rotation, launch.split(hashing.mix64(base ^ stream)) if job.how.stochastic else (0, 0))

    return keys


def decoder(
    job: RowJob, world: int, scale: float, skip: int, own: int, share: float, feedback: Feedback | None
) -> Decode:
    """See rows.decoder."""
    format = job.how.format
    rows = _matrix(job, skip=skip, world=world)
    known: dict[str, Any] = {"rows": rows, "share": Share(own, share), "scale": float(scale)}
    mode = _mode(feedback)
    even = job.rows.each % 4 == 0
    is_plain = not format.block
    config = tuning.choose("decode_sum", decoding(format), job.dtype, job.device, job.rows.numel)

    def make(grouped: bool, noted: bool) -> Prepared:
        if is_plain:
            return _plain(plain.decode_plain, job, known, grouped, notes=noted)
        full, tail = launch.norms(job.layout(0), scale)
        arguments = known | {"norms": RowNorms(full, tail, launch.norms(job.layout(job.rows.short), scale).tail)}
        task = {"world": launch.unrolled(world, format), "calm": abs(scale) * world < launch.SMALL_NORM}
        task |= {"mode": mode, "notes": noted and not mode}
        return _blocks(row_blocks.decode_rows, job, config, arguments, grouped, **task)

    tensors = ("wire", "out", "source", "bad", *(() if is_plain else ("left", "memory", "mean")))
    launches = [Repeated(functools.partial(make, noted=noted), tensors, ("call",), even) for noted in (False, True)]
    scattered = [functools.partial(_plain, plain.decode_picked, job, known, notes=noted) for noted in (False, True)]
    puts = [Repeated(put, ("wire", "out", "index", "bad"), ("call",)) for put in scattered]

    def decode(wires: Tensor, out: Any, memory: Memory | None, bad: Bad | None, source: Any = None, **_: int) -> None:
        noted, call = (wires, 0) if bad is None else bad
        if isinstance(out, Picked):
            puts[bad is not None]((wires, *out[:2], noted), (call,))
            return
        copied = out if source is None else source
        start = launches[bad is not None]
        if is_plain:
            start((wires, out, copied, noted), (call,))
            return
        kept, left, mean = (out, out, out) if memory is None else memory
        start((wires, out, copied, noted, left, kept, out if mean is None else mean), (call,))

    return decode


def scanner(job: RowJob, world: int) -> Scan:
    """See rows.scanner."""
    short = world - 1 if world > 1 else job.rows.short
    layout = job.layout(0)
    grid = (-(-layout.num_blocks // row_blocks.SCANNED.value), short + 1)
    known = {"rows": _matrix(job)._replace(short=short), **launch.frames(_layouts(job))}
    prepared = Prepared(row_blocks.scan_rows, job.device, grid, 4, known, {})
    made = Repeated(lambda grouped: prepared, ("wire", "bad"), ("call",))
    return lambda wires, bad: made((wires, bad.noted), (bad.call,))


def adds_own(job: RowJob) -> bool:
    """Whether one launch can also add the own part: not if blocks have minima or are longer than a tile."""
    format = job.how.format
    if not format.block:
        return True
    tile = launch.tile_of(job.how, _layouts(job), Config(), 0, False)
    return format.block <= MOST_CODES and not tile.affine and not tile.ragged.pieces


# --- arguments known beforehand ---------------------------------------------------------------------------------------


def _mode(feedback: Feedback | None) -> int:
    return _MODES[feedback.mode] if feedback else 0


def _matrix(job: RowJob, skip: int = -1, world: int = 1) -> Matrix:
    return Matrix(job.rows.each, job.stride, world, job.rows.short, skip)


def _blocks(kernel: Any, job: RowJob, config: Config, known: dict[str, Any], grouped: bool, **task: Any) -> Prepared:
    """encode_rows or decode_rows. task: as in Tile."""
    of = job.how, _layouts(job), config, job.device, 0, grouped, tuple(known.items()), job.rows.short + 1
    return launch.blocks(kernel, *of, **task)


def _recode_plain(job: RowJob, row: int, world: int, scale: float, own: int, grouped: bool) -> Prepared:
    has_own = own >= 0
    part = Part(job.rows.span(row)[0] if has_own else 0, own, 1.0, float(scale))
    known = (("stack", Stack(job.stride, world - has_own)), ("part", part))
    layouts = (job.layout(row),)
    return launch.plain_wires(plain.recode_plain, layouts, job.device, known, grouped=grouped, own=has_own)


def _plain(kernel: Any, job: RowJob, known: dict[str, Any], grouped: bool, **flags: bool) -> Prepared:
    """encode_plain, decode_plain, encode_picked or decode_picked. flags: as in Plain."""
    of = _layouts(job), job.device, tuple(known.items()), job.rows.short + 1
    return launch.plain_wires(kernel, *of, grouped=grouped, **flags)


def _layouts(job: RowJob) -> tuple[Layout, Layout]:
    """The layouts of the rows before the last, and of the last."""
    return job.layout(0), job.layout(job.rows.short)
