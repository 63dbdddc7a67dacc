"""The columns and tables of the records that studies write: import this module before reading and drawing them."""

from collections.abc import Sequence

from thinwire.tools import recommend, report
from thinwire.tools.bench.record import COLUMNS, TIMES, Row
from thinwire.tools.report import (
    ABSENT,
    MS,
    SPEEDUPS,
    Column,
    TextGrid,
    counted,
    distinct,
    fixed,
    percent,
    scaled,
    scientific,
    significant,
    table,
    text,
    texts,
)

COLUMNS |= {
    "codec": ("distribution", "codec", "wire_bits", "nmse", "db_above_rd", "lloyd_max_nmse"),
    "kernels": (
        *("op", "codec", "backend", "device", "dtype", "numel", "world", "threads", *TIMES),
        *("copy_ms", "times_copy", "copy_share", "times_eager"),
    ),
    "qat": (),  # QAT, or of a row that has an `op` QAT_SPEED
    "exact": (
        *("optimizer", "rate", "step", "changed_share", "entropy_bits", "bits", "bits_index_value", "bits_zstd"),
        *("bits_xor_zstd", "encode_gb_s", "decode_gb_s", "backend", "threads"),
    ),
    "group": (
        *("client", "rules", "world", "link", "ms_p50", "plain_ms", "speedup_plain"),
        *("bytes_per_step", "plain_bytes_per_step"),
    ),
    "soak": ("world", "operations", "faults", "mismatches", "hangs", "leaks", "seed", "seconds"),  # tests/soak.py
}
QAT = ("task", "method", "weight_bits", "act_bits", "seeds", "train_loss", "accuracy")
QAT_SPEED = ("op", "backend", "device", "numel", "ms_p50", "times_floor", "times_torch", "peak_bytes_per_element")
_SHARE = Column("share", "copy_share", percent)
report.TABLES |= {
    "train": (
        "log ratio: ln(loss / fp32's), mean over seeds; val. gap: validation loss less fp32's, in nats; over fp32, "
        "over bf16: speedup over torch's own; kB: sent per rank and step; limit: compute plus bytes at the link's rate",
        (
            *(*texts("scheme", "every"), Column("loss", "loss", significant)),
            Column("log ratio", "loss_log_ratio", fixed(3, "+")),
            Column("± (loss)", "loss_log_ratio_error", fixed(3)),
            Column("/DDP's", "ddp_log_ratio", fixed(3, "+")),
            Column("both reach", "reached_loss", significant),
            Column("after s", "reached_s", significant),
            Column("DDP after s", "ddp_reached_s", significant),
            Column("sooner ×", "sooner_than_ddp", significant),
            Column("val. gap", "val_gap_nats", fixed(4, "+")),
            Column("± (val.)", "val_gap_error", fixed(4)),
            *(Column("ms", "step_ms", significant), *SPEEDUPS),
            Column("over PowerSGD", "speedup_powersgd", significant),
            Column("kB", "bytes_per_step", scaled(1e-3)),
            Column("of fp32's", "bytes_over_plain", fixed(3)),
            Column("over limit", "over_limit", percent),
            Column("CPU ms", "cpu_ms_per_rank", significant),
            Column("extra MB", "extra_bytes", scaled(1e-6)),
            *texts("identical"),
        ),
        1,
    ),
    "kernels": (
        "×copy: time over a copy's; share: of the copy's bandwidth; ×eager, ×compile: torch's time over the kernel's",
        (
            *(*texts("op", "codec", "backend", "dtype", "numel", "threads"), *MS),
            *(Column("×copy", "times_copy", significant), _SHARE, Column("×eager", "times_eager", significant)),
            Column("×compile", "times_compile", significant),
            Column("without a graph ms", "launched_ms", significant),
        ),
        6,
    ),
    "qat": (
        "Trained at W bits of weights and A bits of activations; means over seeds",
        (
            *(*texts("task", "method"), Column("W", "weight_bits", text), Column("A", "act_bits", text)),
            *(*texts("seeds"), Column("train loss", "train_loss", scientific)),
            Column("± (loss)", "train_loss_error", scientific),
            Column("accuracy", "accuracy", percent),
            Column("± (acc.)", "accuracy_error", percent),
            *texts("diverged"),
        ),
        4,
    ),
    "speed": (
        "Forward and backward. ×floor: time over that of reading and writing each tensor once; ×torch: torch's time "
        "over this one's; bytes: extra at the peak, per element",
        (
            *(*texts("op", "gradient", "granularity", "dtype", "backend", "device", "numel", "threads"), MS[0]),
            Column("×floor", "times_floor", significant),
            Column("torch's ×floor", "torch_times_floor", significant),
            Column("×torch", "times_torch", significant),
            Column("bytes", "peak_bytes_per_element", significant),
            Column("torch's bytes", "torch_peak_bytes_per_element", significant),
        ),
        8,
    ),
    "exact": (
        "Bits per bf16 weight from one step to the next; GB of weights per second on one core",
        (
            *(*texts("optimizer"), Column("rate", "rate", text), Column("changed", "changed_share", percent)),
            *(Column("entropy", "entropy_bits", significant), Column("bits", "bits", significant)),
            *(
                Column("×entropy", "times_entropy", significant),
                Column("index + value", "bits_index_value", significant),
            ),
            *(Column("zstd", "bits_zstd", significant), Column("XOR + zstd", "bits_xor_zstd", significant)),
            *(Column("encode GB/s", "encode_gb_s", significant), Column("decode", "decode_gb_s", significant)),
            Column("zstd's", "zstd_encode_gb_s", significant),
            Column("zstd's decode", "zstd_decode_gb_s", significant),
        ),
        2,
    ),
    "group": (
        "Calls and steps through a group that compresses, beside gloo's own; faster: median of the rounds' ratios, "
        "p20: of the fast rounds; kB: sent per rank",
        (
            *(*texts("client", "network", "rules", "numel", "link"), Column("ms", "ms_p50", significant)),
            *(Column("plain ms", "plain_ms", significant), Column("faster ×", "speedup_plain", significant)),
            Column("p20", "speedup_p20", significant),
            Column("kB", "bytes_per_step", scaled(1e-3)),
            Column("plain kB", "plain_bytes_per_step", scaled(1e-3)),
        ),
        5,
    ),
    "soak": (
        "Random calls and faults",
        texts("world", "operations", "faults", "mismatches", "hangs", "leaks", "seed", "seconds"),
        1,
    ),
}


def listed(rows: Sequence[Row], *columns: str) -> list[str]:
    """What the rows have in each column, in one text: "2, 4"."""
    return [", ".join(distinct(rows, column)) for column in columns]


def pivot(title: str, rows: Sequence[Row], label: str, across: str, value: Column) -> TextGrid:
    """A line per value of column `label`, a column per value of column `across`."""
    at = {(text(row[label]), text(row[across])): value.cell(row) for row in rows}
    heads = distinct(rows, across)
    lines = [[name, *(at.get((name, head), ABSENT) for head in heads)] for name in distinct(rows, label)]
    return TextGrid(title, [label, *heads], lines)


def alike(rows: Sequence[Row], *columns: str) -> list[list[Row]]:
    """The rows in groups that have the same texts in these columns, in order."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(text(row.get(name)) for name in columns), []).append(row)
    return list(found.values())


def _qat_grids(rows: Sequence[Row]) -> list[TextGrid]:
    trained, speed = ([row for row in rows if (row.get("op") is None) is is_trained] for is_trained in (True, False))
    return [table(kind, found) for kind, found in (("qat", trained), ("speed", speed)) if found]


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
        return [table("kernels", rows)]
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
            found.append(table("kernels", group, where))
    return found


def _train_grid(rows: Sequence[Row]) -> list[TextGrid]:
    names = ("task", "parallel", "optimizer", "world", "link", "seeds", "steps")
    task, parallel, optimizer, world, link, seeds, steps = listed(rows, *names)
    spread = fixed(3)(rows[0].get("noise_floor"))
    how = (
        f"{task}, {parallel}, {optimizer}, {counted(world, 'rank')}, {link}, {counted(seeds, 'seed')} of {steps} steps"
    )
    named: list[Row] = [{**row, "scheme": recommend.scheme_of({**row, "every": None})} for row in rows]
    return [table("train", named, f"{how}; seed-to-seed spread of ln(loss) {spread}")]


report.GRIDS |= {"train": _train_grid, "codec": _codec_grids, "kernels": _kernels_grids, "qat": _qat_grids}
