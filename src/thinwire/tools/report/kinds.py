"""The tables of every kind of record. To add those of a kind: list its columns in `_TABLES`."""

from collections.abc import Sequence

from thinwire.tools import recommend
from thinwire.tools.bench.record import Record, Row
from thinwire.tools.report.cells import (
    Column,
    TextGrid,
    alike,
    counted,
    distinct,
    fixed,
    grid,
    listed,
    percent,
    pivot,
    scaled,
    scientific,
    significant,
    text,
)

_MS = (Column("ms", "ms_p50", significant), Column("p20", "ms_p20", significant), Column("p80", "ms_p80", significant))
_SPEEDUPS = (Column("over fp32", "speedup_plain", significant), Column("over bf16", "speedup_bf16", significant))
_SHARE = Column("share", "copy_share", percent)


def _texts(*names: str) -> tuple[Column, ...]:
    return tuple(Column(name, name, text) for name in names)


# By kind: the title, the columns, and how many of them are labels. A column that no row fills is left out.
_TABLES: dict[str, tuple[str, tuple[Column, ...], int]] = {
    "collectives": (
        "over fp32, over bf16: speedup over torch's own; kB: sent per rank; limit: share of the link's rate; host ms: "
        "until a call returns",
        (
            *(
                *_texts(
                    "verb", "model", "codec", "algorithm", "connections", "feedback", "world", "nodes", "link", "numel"
                ),
            ),
            *(_MS[0], *_SPEEDUPS, Column("kB", "bytes_per_rank", scaled(1e-3))),
            Column("limit", "wire_limit_share", percent),
            Column("CPU ms", "cpu_ms_per_rank", significant),
            Column("host ms", "host_ms", significant),
            Column("steady ms", "host_steady_ms", significant),
            Column("GPU ms", "gpu_busy_ms", significant),
            *_texts("launches"),
            Column("rel. error", "rel_error", scientific),
            *_texts("identical"),
        ),
        10,
    ),
    "train": (
        "log ratio: ln(loss / fp32's), mean over seeds; val. gap: validation loss less fp32's, in nats; over fp32, "
        "over bf16: speedup over torch's own; kB: sent per rank and step; limit: compute plus bytes at the link's rate",
        (
            *(*_texts("scheme", "every"), Column("loss", "loss", significant)),
            Column("log ratio", "loss_log_ratio", fixed(3, "+")),
            Column("± (loss)", "loss_log_ratio_error", fixed(3)),
            Column("/DDP's", "ddp_log_ratio", fixed(3, "+")),
            Column("both reach", "reached_loss", significant),
            Column("after s", "reached_s", significant),
            Column("DDP after s", "ddp_reached_s", significant),
            Column("sooner ×", "sooner_than_ddp", significant),
            Column("val. gap", "val_gap_nats", fixed(4, "+")),
            Column("± (val.)", "val_gap_error", fixed(4)),
            *(Column("ms", "step_ms", significant), *_SPEEDUPS),
            Column("over PowerSGD", "speedup_powersgd", significant),
            Column("kB", "bytes_per_step", scaled(1e-3)),
            Column("of fp32's", "bytes_over_plain", fixed(3)),
            Column("over limit", "over_limit", percent),
            Column("CPU ms", "cpu_ms_per_rank", significant),
            Column("extra MB", "extra_bytes", scaled(1e-6)),
            *_texts("identical"),
        ),
        1,
    ),
    "loss": (
        "gap: validation loss less fp32's of the same seed, in nats, and half of its 95 % interval; more tokens: what "
        "fp32 would save for the same loss; null: fp32 with a relative noise of 1e-6",
        (
            *_texts("size", "optimizer", "weights", "tokens", "world", "seeds", "arm"),
            Column("bits", "bits", fixed(2)),
            Column("val. loss", "val_loss", fixed(4)),
            Column("gap", "gap_nats", fixed(4, "+")),
            Column("±", "gap_half", fixed(4)),
            Column("more tokens", "more_tokens", percent),
        ),
        7,
    ),
    "kernels": (
        "×copy: time over a copy's; share: of the copy's bandwidth; ×eager, ×compile: torch's time over the kernel's",
        (
            *(*_texts("op", "codec", "backend", "dtype", "numel", "threads"), *_MS),
            *(Column("×copy", "times_copy", significant), _SHARE, Column("×eager", "times_eager", significant)),
            Column("×compile", "times_compile", significant),
            Column("without a graph ms", "launched_ms", significant),
        ),
        6,
    ),
    "qat": (
        "Trained at W bits of weights and A bits of activations; means over seeds",
        (
            *(*_texts("task", "method"), Column("W", "weight_bits", text), Column("A", "act_bits", text)),
            *(*_texts("seeds"), Column("train loss", "train_loss", scientific)),
            Column("± (loss)", "train_loss_error", scientific),
            Column("accuracy", "accuracy", percent),
            Column("± (acc.)", "accuracy_error", percent),
            *_texts("diverged"),
        ),
        4,
    ),
    "speed": (
        "Forward and backward. ×floor: time over that of reading and writing each tensor once; ×torch: torch's time "
        "over this one's; bytes: extra at the peak, per element",
        (
            *(*_texts("op", "gradient", "granularity", "dtype", "backend", "device", "numel", "threads"), _MS[0]),
            Column("×floor", "times_floor", significant),
            Column("torch's ×floor", "torch_times_floor", significant),
            Column("×torch", "times_torch", significant),
            Column("bytes", "peak_bytes_per_element", significant),
            Column("torch's bytes", "torch_peak_bytes_per_element", significant),
        ),
        8,
    ),
    "link": (
        "Messages that all ranks send at once, each to the next rank; p20, p80: percentiles of the rounds",
        (*_texts("world", "link", "backend", "nbytes"), *_MS, Column("Gbit/s", "gbit_per_s", significant)),
        4,
    ),
    "soak": (
        "Random calls and faults",
        _texts("world", "operations", "faults", "mismatches", "hangs", "leaks", "seed", "seconds"),
        1,
    ),
}


def grids(record: Record) -> list[TextGrid]:
    rows = record.rows
    if not rows:
        return [TextGrid(f"{record.kind}: no rows", [], [])]
    if record.kind == "codec":
        return _codec_grids(rows)
    if record.kind == "kernels":
        return _kernels_grids(rows)
    if record.kind == "train":
        return [_train_grid(rows)]
    if record.kind == "qat":
        trained, speed = ([row for row in rows if (row.get("op") is None) is told] for told in (True, False))
        return [_table(kind, found) for kind, found in (("qat", trained), ("speed", speed)) if found]
    return [_table(record.kind, rows)]


def _table(kind: str, rows: Sequence[Row], prefix: str = "") -> TextGrid:
    """Labels that are the same in every row stand in the title."""
    title, columns, labels = _TABLES[kind]
    same = [] if len(rows) == 1 else [one for one in columns[:labels] if len(distinct(rows, one.name)) == 1]
    told = ", ".join(f"{one.header} {one.cell(rows[0])}" for one in same if rows[0].get(one.name) is not None)
    kept = [one for one in columns if one not in same]
    head = ". ".join(part for part in (prefix, told, title) if part)
    return grid(head, rows, kept, labels - len(same))


def _train_grid(rows: Sequence[Row]) -> TextGrid:
    names = ("task", "parallel", "optimizer", "world", "link", "seeds", "steps")
    task, parallel, optimizer, world, link, seeds, steps = listed(rows, *names)
    spread = fixed(3)(rows[0].get("noise_floor"))
    how = (
        f"{task}, {parallel}, {optimizer}, {counted(world, 'rank')}, {link}, {counted(seeds, 'seed')} of {steps} steps"
    )
    named: list[Row] = [{**row, "scheme": recommend.scheme_of({**row, "every": None})} for row in rows]
    return _table("train", named, f"{how}; seed-to-seed spread of ln(loss) {spread}")


def _codec_grids(rows: Sequence[Row]) -> list[TextGrid]:
    scored = "gaussian" if "gaussian" in distinct(rows, "distribution") else distinct(rows, "distribution")[0]
    title = f"NMSE by distribution. bits: all bytes of the wire; dB: above the Gaussian bound at those bits ({scored})"
    laid = pivot(title, rows, "codec", "distribution", Column("nmse", "nmse", scientific))
    at = {text(row["codec"]): row for row in rows if text(row["distribution"]) == scored}
    lines = [
        [
            line[0],
            fixed(2)(at.get(line[0], {}).get("wire_bits")),
            *line[1:],
            fixed(2)(at.get(line[0], {}).get("db_above_rd")),
        ]
        for line in laid.rows
    ]
    return [TextGrid(title, ["codec", "bits", *laid.header[1:], "dB"], lines)]


def _kernels_grids(rows: Sequence[Row]) -> list[TextGrid]:
    """Every row of a short record; of a long one, for each part and size, the shares by codec and op."""
    if len(rows) <= 40:
        return [_table("kernels", rows)]
    found = []
    for group in alike(rows, "part", "backend", "device", "dtype", "numel", "threads"):
        backend, device, dtype, numel, part = (
            text(group[0].get(name)) for name in ("backend", "device", "dtype", "numel", "part")
        )
        where = f"Part {part}: backend {backend} on {device}, {numel} elements of {dtype}"
        if part in ("codecs", "sizes"):
            title = f"{where}: speed as a share of copy_ of the same bytes"
            found.append(pivot(title, group, "codec", "op", _SHARE))
        else:
            found.append(_table("kernels", group, where))
    return found
