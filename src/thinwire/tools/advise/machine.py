"""What a rank works with: seconds of kernels, copies and messages, from a record or measured.

`machines.json` holds what `from_record` makes of committed records; `python tests/figures.py` writes it.
"""

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from importlib import resources
from statistics import median
from typing import Any

from thinwire.codecs import BlockInt, Cast, Codec, Lloyd, Trellis
from thinwire.errors import RecordError
from thinwire.tools.bench.record import Record, Row

# Of gloo on a CPU, where torch and Python hand over every message (a send or a receive) and the system copies every
# byte: processor time of plain sums in collectives_1gbit.json, and what is left of collectives_100mbit.json's when
# kernels and bytes are taken away. On a GPU it is the host's time for one message of NCCL: an assumption, for where
# there is no NcclCalls.
BYTE_S = {"cpu": 0.65e-9, "cuda": 0.0}
MESSAGE_S = {"cpu": 0.15e-3, "cuda": 10e-6}
CALL_S = 30e-6  # of Python around one kernel on a CPU; a GPU's is in its record
# Kernels of ranks that share a memory, and of ranks that take turns on its cores as well, over the same kernels alone:
# processor times of collectives_loopback.json, with two and four ranks on two cores, beside kernels_cpu_aarch64.json.
CROWD = 1.1
TURNS = 1.4
_PARTS = ("codecs", "sizes")  # of a kernels record: the others time something else
_OPS = ("encode", "decode", "decode_sum", "recode")
_LAUNCHES = 3  # kernels in a replayed path: encode, recode, decode


@dataclass(frozen=True)
class CodecSpeed:
    """Seconds per element."""

    encode: float
    decode: float
    wire: float  # of every further wire in a sum
    recode: float  # of one wire

    @classmethod
    def of_ops(cls, wires: float, encode: float, decode: float, decode_sum: float, recode: float) -> "CodecSpeed":
        """From the seconds of each op, of which the last two read `wires` wires."""
        further = max(0.0, wires - 1)
        wire = max(0.0, (decode_sum - decode) / further) if further else 0.0
        return cls(encode, decode, wire, max(0.0, recode - wire * further))

    def decode_sum(self, wires: int) -> float:
        return self.decode + self.wire * (wires - 1)

    def slower(self, times: float) -> "CodecSpeed":
        return CodecSpeed(*(times * seconds for seconds in astuple(self)))


@dataclass(frozen=True)
class NcclCalls:
    """What calls on NCCL take of the host, until they return."""

    source: str
    plain_s: float  # torch's own all_reduce
    stage_s: float  # one stage of ours: its kernels, and the message after them


@dataclass(frozen=True)
class Machine:
    """What one rank has to itself."""

    device: str  # "cpu": ranks are processes on gloo; "cuda": each has a GPU, on NCCL
    source: str  # where the figures come from
    copy_s: float  # of one fp32 element: 8 bytes of memory traffic
    codecs: Mapping[str, CodecSpeed] = field(repr=False)  # on fp32 elements
    call_s: float = 0.0  # of the host, for one kernel; a CUDA graph takes a tenth of it
    message_s: float = 0.0  # of the host, for one message sent or received
    byte_s: float = 0.0  # of the processor, for one byte sent and another received
    cores: float = 1.0  # per rank; what the codec takes is then missed by the backward pass on one of them
    nccl: NcclCalls | None = None  # instead of call_s and message_s; None: nobody has measured it

    def speed(self, codec: Codec) -> CodecSpeed:
        """Of a codec, or of the one measured that is most like it."""
        like = str(codec) if str(codec) in self.codecs else _most_like(codec, list(self.codecs))
        if like is not None:
            return self.codecs[like]
        once = self.copy_s * (4 + codec.wire_bytes(1 << 20) / (1 << 20)) / 8  # it reads and writes and does little else
        return CodecSpeed(once, once, once, once)

    @property
    def spare(self) -> float:
        """Whether messages move on while a rank computes: 1, or 0 where its backward pass keeps its only core busy."""
        return 1.0 if self.device == "cuda" else min(1.0, self.cores - 1)

    def shared(self, ranks: int, cores: int) -> "Machine":
        """The same where `ranks` processes share `cores` cores and their memory; a GPU is not shared."""
        if self.device == "cuda" or ranks == 1:
            return replace(self, cores=max(1.0, cores / ranks))
        turns = max(1.0, ranks / cores)
        slower = turns * (CROWD if ranks <= cores else TURNS)
        return replace(
            self,
            copy_s=slower * self.copy_s,
            codecs={name: speed.slower(slower) for name, speed in self.codecs.items()},
            call_s=turns * self.call_s,
            message_s=turns * self.message_s,
            byte_s=turns * self.byte_s,
            cores=max(1.0, cores / ranks),
        )

    def work_s(self, kernels_s: float, calls: int, messages: int) -> float:
        """Seconds of a stage: on a GPU the host launches the next kernel while one runs."""
        launched = calls * self.call_s
        busy = max(kernels_s, launched) if self.device == "cuda" else kernels_s + launched
        return busy + messages * self.message_s

    def taken_s(self, kernels_s: float, calls: int, messages: int, nbytes: float) -> float:
        """What of it the backward pass misses: a GPU's kernels; on a CPU all work, on one of the rank's cores."""
        if self.device == "cuda":
            return kernels_s
        return (self.work_s(kernels_s, calls, messages) + nbytes * self.byte_s) / self.cores


def _most_like(codec: Codec, known: Sequence[str]) -> str | None:
    """The measured codec of the same kind with the nearest number of bits, the wider one of two."""
    stem = {BlockInt: "int", Lloyd: "lloyd", Trellis: "trellis"}.get(type(codec))
    if stem is None or not isinstance(codec, BlockInt | Lloyd):
        return "bf16" if isinstance(codec, Cast) and "bf16" in known else None
    widths = {int(name.removeprefix(stem)): name for name in known if name.removeprefix(stem).isdigit()}
    return widths[min(widths, key=lambda bits: (abs(bits - codec.bits), -bits))] if widths else None


def from_record(record: Record, source: str) -> Machine:
    """The machine that a record of `thinwire bench kernels` was measured on: its rank alone, with one thread."""
    if record.kind != "kernels":
        raise RecordError(f"expected a record of `thinwire bench kernels`, got one of kind {record.kind!r}")
    device = "cpu" if record.conditions["device"] == "cpu" else "cuda"
    rows = [row for row in record.rows if _counts(row, device)]
    names = list(dict.fromkeys(str(row["codec"]) for row in rows))
    speeds = {name: speed for name in names if (speed := _speed(rows, name)) is not None}
    if not speeds:
        raise RecordError(f"{source} has no codec with all of {', '.join(_OPS)} on float32, on one thread")
    launched = [column(row, "launched_ms") * 1e-3 / _LAUNCHES for row in record.rows if row.get("launched_ms")]
    return Machine(
        device,
        f"{record.conditions['device'] if device == 'cuda' else record.conditions['cpu']} ({source})",
        median(_slope([row], "copy_ms") for row in rows),
        speeds,
        call_s=median(launched) if launched else CALL_S,
        message_s=MESSAGE_S[device],
        byte_s=BYTE_S[device],
        nccl=recorded_calls(device),
    )


def _counts(row: Row, device: str) -> bool:
    """Whether a row times one of our kernels on fp32, on one thread where threads matter."""
    ours = row["backend"] not in ("reference", "torch") and row.get("part", "codecs") in _PARTS
    return ours and bool(row["ms_p50"]) and row["dtype"] == "float32" and (device == "cuda" or row["threads"] == 1)


def _speed(rows: Sequence[Row], codec: str) -> CodecSpeed | None:
    ops = {op: [row for row in rows if (row["codec"], row["op"]) == (codec, op)] for op in _OPS}
    if not all(ops.values()):
        return None
    return CodecSpeed.of_ops(column(ops["recode"][0], "world"), *(_slope(ops[op], "ms_p50") for op in _OPS))


def _slope(rows: Sequence[Row], time: str) -> float:
    """Seconds per element: between the shortest and the longest tensor, which leaves out what every call costs."""
    points = sorted((column(row, "numel"), 1e-3 * column(row, time)) for row in rows)
    (n0, s0), (n1, s1) = points[0], points[-1]
    if s1 < s0:
        told = f"{rows[0]['op']} of {rows[0]['codec']}: {1e3 * s0:g} ms for {n0:g} elements, {1e3 * s1:g} ms for {n1:g}"
        raise RecordError(f"expected longer tensors to take longer, got {told}: measure again on a quiet machine")
    return (s1 - s0) / (n1 - n0) if n1 > n0 else s1 / n1


def column(row: Row, name: str, least: float = 1e-18) -> float:
    """The number in a column, from `least` to 1e18."""
    value = row.get(name)
    if not isinstance(value, int | float) or not least <= value <= 1e18:
        raise RecordError(f"expected a number from {least:g} to 1e18 in column {name!r}, got {value!r}")
    return float(value)


def recorded(device: str, architecture: str | None = None) -> Machine:
    """The machine of the committed record that stands for a device; for a CPU of this one's architecture."""
    figures = _shipped()
    name = "cuda" if device == "cuda" else architecture or platform.machine()
    kept = figures.get(name, figures["x86_64"])
    speeds = {codec: CodecSpeed(*seconds) for codec, seconds in kept["codecs"].items()}
    times = {"call_s": kept["call_s"], "message_s": MESSAGE_S[device], "byte_s": BYTE_S[device]}
    return Machine(device, kept["source"], kept["copy_s"], speeds, **times, nccl=recorded_calls(device))


def recorded_calls(device: str) -> NcclCalls | None:
    """Those of the committed record, on a GPU; None where there is none."""
    kept = _shipped().get("nccl") if device == "cuda" else None
    return NcclCalls(**kept) if kept else None


def _shipped() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(resources.files(__package__).joinpath("machines.json").read_text())
    return found
