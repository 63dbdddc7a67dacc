"""The one JSON schema of benchmark records: bench writes them, report and advise read them.

{"schema": 1, "kind": ..., "conditions": {...}, "rows": [{flat columns}]}

Flat: a column holds one value. The one exception is `curve`, [[step, loss], ...], which a training row may carry.
"""

import contextlib
import itertools
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire import __version__
from thinwire.errors import RecordError

if TYPE_CHECKING:
    import torch

SCHEMA = 1
TIMES = ("ms_p50", "ms_p20", "ms_p80")
# The columns every row of a kind has; a benchmark may add others, none is ever renamed. Studies add kinds of their own.
COLUMNS: dict[str, tuple[str, ...]] = {
    "collectives": (
        *("verb", "codec", "algorithm", "world", "link", "numel", *TIMES),
        *("plain_ms", "bf16_ms", "speedup_plain", "speedup_bf16", "bytes_per_rank", "bytes_formula"),
        *("wire_limit_share", "cpu_ms_per_rank", "rel_error", "identical"),
    ),
    "train": (
        *("task", "parallel", "optimizer", "codec", "feedback", "world", "link", "seeds"),
        *("loss_log_ratio", "noise_floor", "val_gap_nats", "step_ms", "compute_ms"),
        *("speedup_plain", "speedup_bf16", "bytes_per_step"),
    ),
    "loss": (
        *("size", "optimizer", "parallel", "arm", "bits", "params", "world", "seeds", "val_loss", "fp32_val_nats"),
        *("delta_nats", "delta_low", "delta_high", "tokens_more_percent"),
    ),
    "link": ("world", "link", "backend", "nbytes", *TIMES, "gbit_per_s"),
}
CONDITIONS = ("date", "thinwire", "torch", "triton", "python", "device", "cpu", "threads", "commit", "command")

CURVE = "curve"
Curve = list[list[float | None]]  # [step, value] of each point; None where the value is not finite
Value = str | int | float | bool | Curve | None
Row = dict[str, Value]
Progress = Callable[[Sequence[Any]], Iterable[Any]]  # hands the cases on, and shows how far the run has come


@dataclass(frozen=True)
class Record:
    kind: str
    conditions: dict[str, Value]
    rows: list[Row]


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a run; `record` holds the rows that were finished."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record


def collect(kind: str, device: "torch.device", rows: Generator[Row], threads: int | None = None) -> Record:
    """The record of `rows`, measured one by one as they are drawn. Ctrl-C raises Interrupted with those finished.

    threads: of torch where rows are measured; None: as here.
    """
    here = conditions(device)
    record = Record(kind, {**here, "threads": threads or here["threads"]}, [])
    try:
        with contextlib.closing(rows):
            for row in rows:
                record.rows.append(row)
    except KeyboardInterrupt:
        raise Interrupted(Record(kind, {**record.conditions, "interrupted": True}, record.rows)) from None
    return record


def conditions(device: "torch.device") -> dict[str, Value]:
    """Where, when and with what a run measures: one value for each of CONDITIONS."""
    import torch  # those who read records need none

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "thinwire": __version__,
        "torch": torch.__version__,
        "triton": next((one.version for one in metadata.distributions(name="triton")), None),
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
        "commit": _commit(),
        "command": _command(sys.argv),
    }


def dumps(record: Record) -> str:
    """The JSON text of a record, one row per line. JSON has no NaN or Inf: they become null."""
    rows = ",\n  ".join(_json(row) for row in record.rows)
    head = f'{{"schema": {SCHEMA}, "kind": {_json(record.kind)},\n "conditions": {_json(record.conditions)},\n '
    return f'{head}"rows": [\n  {rows}\n ]}}\n' if record.rows else f'{head}"rows": []}}\n'


def write(record: Record, path: str) -> None:
    if path == "-":
        sys.stdout.write(dumps(record))
    else:
        Path(path).write_text(dumps(record), encoding="utf-8")


def read(path: str) -> Record:
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
        return loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from None


def loads(text: str) -> Record:
    try:
        data = json.loads(text, parse_constant=_refuse)
    except RecordError:
        raise
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a ValueError
        raise RecordError(f"not JSON ({error}); expected what `thinwire bench ... --json FILE` writes") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise RecordError(f"expected a record of schema {SCHEMA}, got {found!r}: write it with this thinwire's bench")
    for part, kind in (("kind", str), ("conditions", dict), ("rows", list)):
        if not isinstance(data.get(part), kind):
            raise RecordError(f"expected {part!r} to be a {kind.__name__}, got {type(data.get(part)).__name__}")
    missing = [name for name in CONDITIONS if name not in data["conditions"]]
    if missing:
        raise RecordError(f"the conditions lack {', '.join(missing)}: a number travels with its conditions")
    record = Record(data["kind"], data["conditions"], data["rows"])
    for number, row in enumerate(record.rows):
        _check_row(record.kind, number, row)
    return record


def _refuse(constant: str) -> None:
    raise RecordError(f"{constant} is no JSON number; what is not finite is null")


def _check_row(kind: str, number: int, row: object) -> None:
    if not isinstance(row, dict):
        raise RecordError(f"row {number} is a {type(row).__name__}, expected an object of columns")
    missing = [name for name in COLUMNS.get(kind, ()) if name not in row]
    if missing:
        raise RecordError(f"row {number} of this {kind} record lacks {', '.join(missing)}")
    nested = [name for name, value in row.items() if isinstance(value, list | dict) and name != CURVE]
    if nested:
        raise RecordError(f"row {number}: expected one value in {', '.join(nested)}, got several")


def _json(value: Value | Row) -> str:
    finite = json.loads(json.dumps(value), parse_constant=lambda name: None)
    return json.dumps(finite, ensure_ascii=False)


def _cpu() -> str:
    """The processor's model name: Linux's, or macOS's."""
    found = re.search(r"^Model name:\s*(.+)$", _output("lscpu") or "", re.MULTILINE)
    return found[1] if found else _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()


def _commit() -> str | None:
    """The commit thinwire runs from, "-dirty" where tracked files differ from it; None when it is not a checkout."""
    git = ("git", "-C", str(Path(__file__).parent))
    tracked = _output(*git, "ls-files", "--error-unmatch", Path(__file__).name) is not None
    return _output(*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*") if tracked else None


def _output(*command: str) -> str | None:
    plain = {**os.environ, "LC_ALL": "C"}
    try:
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=20, env=plain).strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _command(argv: Sequence[str]) -> str:
    """The command line, with only the last part of every path: a record names nobody's directories.

    A slash in --codecs joins a pair of codecs and stays.
    """
    script = Path(argv[0])
    shown = ["python", "-m", f"benchmarks.{script.stem}"] if script.parent.name == "benchmarks" else ["thinwire"]
    for before, argument in itertools.pairwise(argv):
        pairs = "--codecs" in (before, argument.partition("=")[0])
        shown.append(argument if pairs else re.sub(r"[^=]*/", "", argument))
    return shlex.join(shown)
