"""The tables of every kind of record. To add those of a kind: write a function Record -> list[TextGrid]; list it."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from thinwire.tools import rule
from thinwire.tools.bench.record import COLUMNS, Record, Row, Value
from thinwire.tools.report import cells
from thinwire.tools.report.cells import ABSENT, Column, TextGrid, distinct, fixed, listed, percent, significant, text

Rows = Sequence[Row]
T = TypeVar("T")


def grids(record: Record) -> list[TextGrid]:
    return _KINDS[record.kind](record) if record.rows else [TextGrid(f"{record.kind}: no rows", [], [])]


def _codec_grids(record: Record) -> list[TextGrid]:
    names = distinct(record.rows, "distribution")
    at = {(text(row["codec"]), text(row["distribution"])): row for row in record.rows}
    scored = "gaussian" if "gaussian" in names else names[0]
    rows = []
    for codec in distinct(record.rows, "codec"):
        found: list[Row] = [at.get((codec, name), {}) for name in names]
        bits = next(row["wire_bits"] for row in found if row)
        lost = (cells.scientific(row.get("nmse")) for row in found)
        rows.append([codec, fixed(bits, 2), *lost, fixed(at.get((codec, scored), {}).get("db_above_rd"), 2)])
    title = f"NMSE by distribution. bits: all bytes of the wire; dB: above the Gaussian bound at those bits ({scored})"
    return [TextGrid(title, ["codec", "bits", *names, "dB"], rows)]


def _collectives_grids(record: Record) -> list[TextGrid]:
    threads, cores = listed(record.rows, "threads", "cores")
    title = (
        f"Ranks of {cells.counted(threads, 'thread')} on {cells.counted(cores, 'core')}. over fp32, over bf16: torch's "
        "time over thinwire's; kB: sent per rank; limit: share of the link's rate; CPU ms: per rank"
    )
    on_gpu = cells.filled(_ON_GPU, record.rows)
    if on_gpu:
        title += "; host ms: until a call returns; GPU ms: of its kernels and copies, NCCL's waiting included"
    several = len({row.get("connections") or 1 for row in record.rows}) > 1  # others, and older records, have one
    spread = [Column.of("connections", "connections", text)] if several else []
    columns = [*_CALLED, *spread, *_TIMED, *on_gpu, *_RATED]
    return [cells.grid(title, record.rows, columns, 5)]


def _world(row: Row) -> str:
    return f"{text(row['world'])} on {text(row['nodes'])} nodes" if row.get("nodes") else text(row["world"])


def _train_grids(record: Record) -> list[TextGrid]:
    rows = record.rows
    task, optimizer, world, link, seeds, steps = listed(rows, "task", "optimizer", "world", "link", "seeds", "steps")
    shards = " in shards (FSDP2)" if any(row["parallel"] == "fsdp2" for row in rows) else ""
    outer = any(row["parallel"] == "diloco" for row in rows)
    shards = ", DiLoCo" if outer else shards
    floors = [f"{fixed(rows[0]['noise_floor'], 3)} in ln(loss)"] if rows[0]["noise_floor"] is not None else []
    floors += [f"{fixed(rows[0]['val_noise_floor'], 3)} nats"] if rows[0].get("val_noise_floor") is not None else []
    parts = ["log ratio: ln(loss / fp32's), ± its standard error"]
    parts += ["every: steps between two messages, of which fp32 has as many; /DDP's: ln(loss / DDP's)"] if outer else []
    if any(row.get("reached_s") is not None for row in rows):
        parts += ["both reach: the lowest loss that this scheme and DDP came to, and the seconds that each trained"]
    parts += [f"two fp32 seeds differ by {' and '.join(floors)}"] if floors else []
    parts += ["over fp32, bf16, PowerSGD: torch's time per step over this one's"]
    shaped = any(row.get("over_limit") is not None for row in rows)
    parts += ["limit: compute plus bytes over the link's rate"] if shaped else []
    run = f"{task} with {optimizer}{shards}, {world} ranks, {link}, {cells.counted(seeds, 'seed')} of {steps} steps"
    columns = [Column("scheme", _marked), *cells.filled(_TRAIN, rows)]
    return [cells.grid(f"{run}. {'; '.join(parts)}", rows, columns, 1)]


def _marked(row: Row) -> str:
    return f"{scheme_of(row)}{' (control)' if row.get('control') else ' (peer)' if row.get('peer') else ''}"


def scheme_of(row: Row) -> str:
    """fp32, lloyd2 + EF21, or lloyd4/int8 where weights travel compressed too."""
    return text(rule.scheme_of(row))


def _verdict(value: Value) -> str:
    return ABSENT if value is None else "yes" if value else "NO"


_SPEEDUPS = (Column.of("over fp32", "speedup_plain", significant), Column.of("over bf16", "speedup_bf16", significant))
_IDENTICAL = Column.of("identical", "identical", _verdict)
_MS = Column.of("ms", "ms_p50", significant)
_CALLED = (
    *(Column.of(name, name, text) for name in ("verb", "codec")),
    Column("algorithm", lambda row: f"{'auto: ' if row.get('auto') else ''}{text(row['algorithm'])}"),
)
_TIMED = (Column("world", _world), *(Column.of(name, name, text) for name in ("link", "numel")), _MS)
_RATED = (
    *_SPEEDUPS,
    Column.of("kB", "bytes_per_rank", lambda value: significant(value, 1e-3)),
    Column.of("limit", "wire_limit_share", percent),
    Column.of("CPU ms", "cpu_ms_per_rank", significant),
    Column.of("rel. error", "rel_error", cells.scientific),
    _IDENTICAL,
)
_ON_GPU = (
    Column.of("host ms", "host_ms", significant),
    Column.of("steady ms", "host_steady_ms", significant),
    Column.of("GPU ms", "gpu_busy_ms", significant),
    Column.of("launches", "launches", text),
)
_TRAIN = (
    Column.of("every", "every", text),
    Column.of("loss", "loss", significant),
    Column("log ratio", lambda row: "diverged" if row.get("diverged") else cells.signed(row.get("loss_log_ratio"))),
    Column.of("± (loss)", "loss_log_ratio_error", lambda value: fixed(value, 3)),
    Column.of("/DDP's", "ddp_log_ratio", cells.signed),
    Column.of("both reach", "reached_loss", significant),
    Column.of("after s", "reached_s", significant),
    Column.of("DDP after s", "ddp_reached_s", significant),
    Column.of("sooner ×", "sooner_than_ddp", significant),
    Column.of("val. gap", "val_gap_nats", lambda value: cells.signed(value, 4)),
    Column.of("± (val.)", "val_gap_error", lambda value: fixed(value, 4)),
    Column.of("ms", "step_ms", significant),
    *_SPEEDUPS,
    Column.of("over PowerSGD", "speedup_powersgd", significant),
    Column.of("kB", "bytes_per_step", lambda value: significant(value, 1e-3)),
    Column.of("of fp32's", "bytes_over_plain", lambda value: fixed(value, 3)),
    Column.of("over limit", "over_limit", percent),
    Column.of("CPU ms", "cpu_ms_per_rank", significant),
    Column.of("extra MB", "extra_bytes", lambda value: significant(value, 1e-6)),
    _IDENTICAL,
)


_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_SIZES = (("GB", 30), ("MB", 20), ("kB", 10))  # 1 MB and 1 GB are 2**20 and 2**30 bytes here


def _kernels_grids(record: Record) -> list[TextGrid]:
    if all(row["device"] == "cpu" and part_of(row) == "codecs" for row in record.rows):
        return [_every_row(record.rows)]
    return by_part(record.rows, _PARTS)


def by_part(rows: Rows, makers: Mapping[str, Callable[[list[Row]], list[T]]]) -> list[T]:
    """What each maker makes of the rows of its part, where there are any."""
    parts = [(make, [row for row in rows if part_of(row) == part]) for part, make in makers.items()]
    return [made for make, found in parts if found for made in make(found)]


def part_of(row: Row) -> str:
    """The part of the run that a row belongs to; records without parts have codecs alone."""
    return text(row.get("part", "codecs"))


def _every_row(rows: Rows) -> TextGrid:
    backend, device, numel = listed(rows, "backend", "device", "numel")
    title = (
        f"Backend {backend} on {device}, {numel} elements. ×copy: time over a copy's; share: of the copy's bandwidth; "
        "×eager: torch eager's time over the kernel's"
    )
    order = distinct(rows, "op") + distinct(rows, "codec")
    rows = sorted(rows, key=lambda r: (order.index(text(r["op"])), order.index(text(r["codec"])), text(r["dtype"])))
    more = cells.filled([Column.of("×compile", "times_compile", significant)], rows)
    more += [Column.of("numel", "numel", text)] if len(distinct(rows, "numel")) > 1 else []
    labels = [Column.of(name, name, text) for name in ("op", "codec", "dtype", "threads")]
    return cells.grid(
        title, rows, [*labels, _MS, Column.of("×copy", "times_copy", significant), _SHARE, _EAGER, *more], 3
    )


_SHARE = Column.of("share", "copy_share", percent)
_EAGER = Column.of("×eager", "times_eager", significant)


def _shares(rows: Rows) -> TextGrid:
    """Codecs against ops."""
    names = ("backend", "device", "dtype", "numel", "threads")
    backend, device, dtype, numel, threads = (distinct(rows, name)[0] for name in names)
    device = f"{device} with {cells.counted(threads, 'thread')}" if device == "cpu" else device
    ops = distinct(rows, "op")
    at = {(text(row["codec"]), text(row["op"])): row["copy_share"] for row in rows}
    shown = [[codec, *(percent(at.get((codec, op)), 1) for op in ops)] for codec in distinct(rows, "codec")]
    title = f"Backend {backend} on {device}, {numel} elements of {dtype}: speed as a share of copy_ of the same bytes"
    return TextGrid(f"{title}{_worlds(rows)}", ["codec", *ops], shown)


def _worlds(rows: Rows) -> str:
    sums = [world for world in distinct(rows, "world") if world != "1"]
    return f"; decode_sum and recode read {', '.join(sums)} wires" if sums else ""


def _by_size(rows: Rows) -> list[TextGrid]:
    """Ops and codecs against sizes and dtypes."""
    at = {(text(row["op"]), text(row["codec"]), short(row), _size(row)): row["copy_share"] for row in rows}
    known = list(_SHORT.values())
    columns = list(dict.fromkeys(key[2:] for key in at))
    columns.sort(key=lambda column: known.index(column[0]) if column[0] in known else len(known))
    names = [(op, codec) for op in distinct(rows, "op") for codec in distinct(rows, "codec")]
    shown = [[*name, *(percent(at.get((*name, *column))) for column in columns)] for name in names]
    title = f"By bytes of the tensor: speed as a share of copy_ of the same bytes{_worlds(rows)}"
    return [TextGrid(title, ["op", "codec", *(f"{dtype} {size}" for dtype, size in columns)], shown, labels=2)]


def short(row: Row) -> str:
    """fp32."""
    return _SHORT.get(text(row["dtype"]), text(row["dtype"]))


def nbytes_of(row: Row) -> float:
    """The bytes of the tensor; 0 where the record does not say."""
    return (cells.number(row["numel"]) or 0) * _ITEM_BYTES.get(text(row["dtype"]), 0)


def _size(row: Row) -> str:
    nbytes = nbytes_of(row)
    for unit, shift in _SIZES:
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):.3g} {unit}"
    return f"{nbytes:.0f} B"


def _replays(rows: Rows) -> list[TextGrid]:
    headers = ("µs", "p20", "p80", "copy µs", "without a graph µs")
    times = zip(headers, ("ms_p50", "ms_p20", "ms_p80", "copy_ms", "launched_ms"), strict=True)
    labels = [Column.of("codec", "codec", text), Column.of("elements", "numel", text)]
    columns = [Column.of(header, name, lambda ms: significant(ms, 1e3)) for header, name in times]
    title = (
        f"Fixed cost of a small message in a CUDA graph: encode it, recode a shard of {listed(rows, 'world')[0]} "
        "ranks, decode it; a copy of the message is a graph too"
    )
    return [cells.grid(title, rows, [*labels, *columns], 2)]


def _rivals(rows: Rows) -> list[TextGrid]:
    ours = {text(row["op"]): cells.number(row["ms_p50"]) for row in rows if row["codec"] == "int8"}

    def over_int8(row: Row) -> str:
        theirs = cells.number(row["ms_p50"]) if row["backend"] == "torch" else None
        mine = ours.get(text(row["op"]))
        return significant(theirs / mine if theirs is not None and mine else None)

    order = distinct(rows, "op")
    found = sorted(rows, key=lambda row: (order.index(text(row["op"])), row["backend"] == "torch"))
    title = (
        f"Rivals on {listed(rows, 'numel')[0]} elements of float32. ×eager, ×compile: the time of the torch reference, "
        "and of torch.compile of it, over the kernel's; ×int8: the time of torch's quantisation hook over that of int8"
    )
    labels = [Column.of(name, name, text) for name in ("op", "codec", "backend")]
    compiled = Column.of("×compile", "times_compile", significant)
    return [cells.grid(title, found, [*labels, _MS, _SHARE, _EAGER, compiled, Column("×int8", over_int8)], 3)]


_PARTS: dict[str, Callable[[list[Row]], list[TextGrid]]] = {
    "codecs": lambda rows: list(map(_shares, cells.alike(rows, "numel", "dtype", "threads"))),
    "sizes": _by_size,
    "replay": _replays,
    "rivals": _rivals,
}


SPEED_LABELS = ("op", "gradient", "granularity", "dtype", "backend", "device", "numel", "threads")
_LABELS = ("task", "method", "weight_bits", "act_bits")
_LETTERS = {"weight_bits": "W", "act_bits": "A"}
_TRAINED = (
    Column.of("seeds", "seeds", text),
    Column.of("train loss", "train_loss", cells.scientific),
    Column.of("± (loss)", "train_loss_error", cells.scientific),
    Column.of("accuracy", "accuracy", lambda value: percent(value, 2)),
    Column.of("± (acc.)", "accuracy_error", lambda value: percent(value, 2)),
    Column.of("diverged", "diverged", text),
)
_SPEED = (
    _MS,
    Column.of("×floor", "times_floor", significant),
    Column.of("torch's ×floor", "torch_times_floor", significant),
    Column.of("×torch", "times_torch", significant),
    Column.of("bytes", "peak_bytes_per_element", significant),
    Column.of("torch's bytes", "torch_peak_bytes_per_element", significant),
)


def is_speed(row: Row) -> bool:
    """Whether a row is of a kernel; the others are of training."""
    return row.get("op") is not None


def bits(row: Row) -> str:
    """W4A8."""
    return f"W{text(row['weight_bits'])}A{text(row['act_bits'])}"


def _qat_grids(record: Record) -> list[TextGrid]:
    trained = [row for row in record.rows if not is_speed(row)]
    speed = [row for row in record.rows if is_speed(row)]
    told = "Trained at W bits of weights and A bits of activations; means over seeds"
    costs = (
        "Forward and backward. ×floor: time over that of reading and writing each tensor once; ×torch: torch's time "
        "over this one's; bytes: extra at the peak, per element"
    )
    tables = ((told, trained, _LABELS, _TRAINED), (costs, speed, SPEED_LABELS, _SPEED))
    return [_qat_grid(*table) for table in tables if table[1]]


def _qat_grid(title: str, rows: list[Row], labels: Sequence[str], columns: Sequence[Column]) -> TextGrid:
    """Labels that are the same in every row stand in the title."""
    kept = [name for name in labels if len(distinct(rows, name)) > 1] or list(labels[:1])
    same = [f"{name} {distinct(rows, name)[0]}" for name in labels if name not in kept]
    told = ", ".join(part for part in same if not part.endswith(ABSENT))
    names = [Column.of(_LETTERS.get(name, name), name, text) for name in kept]
    return cells.grid(f"{title} ({told})" if told else title, rows, [*names, *cells.filled(columns, rows)], len(kept))


def _soak_grids(record: Record) -> list[TextGrid]:
    seed, seconds = listed(record.rows, "seed", "seconds")
    title = f"Random calls and faults for {seconds} s, seed {seed}"
    names = [name for name in COLUMNS["soak"] if name not in ("seed", "seconds")]
    return [cells.grid(title, record.rows, [Column.of(name, name, text) for name in names], 1)]


_KINDS: dict[str, Callable[[Record], list[TextGrid]]] = {
    "codec": _codec_grids,
    "kernels": _kernels_grids,
    "collectives": _collectives_grids,
    "train": _train_grids,
    "qat": _qat_grids,
    "soak": _soak_grids,
}
