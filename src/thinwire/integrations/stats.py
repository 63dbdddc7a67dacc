"""What compression did: bytes, errors and times; handles and the logs they write to."""

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from thinwire.codecs.checks import is_int
from thinwire.errors import CollectiveError
from thinwire.feedback import Piece, Span
from thinwire.kernels.rows import Bad

Target = Any  # a path, a SummaryWriter, a W&B run, or a function of a dict
SECONDS = ("encode_s", "wire_s", "reduce_s", "decode_s")  # of Stats, as they are shown


@dataclass(frozen=True)
class Stats:
    """What one rank's gradients cost on the wire since compression was switched on."""

    steps: int  # backward passes that were synchronized
    codec: str  # that was asked for
    feedback: str  # what is in use, e.g. "ef21" or "none"
    chosen: str  # what "auto" chose, and why; "" where nothing was left to choose
    bytes_sent: int  # by this rank
    bytes_plain: int  # that a ring of the uncompressed gradients would have sent
    bits_per_element: float | None  # of the last message of every bucket, headers and scales included
    relative_error: float | None  # RMS of what one rounding loses, over RMS of what is sent, at the last measured step
    nonfinite: int  # chunks of buckets in which some rank had NaN or Inf
    encode_s: float | None  # work before messages; None on a GPU
    decode_s: float | None  # work after the last message
    reduce_s: float | None  # work between the two phases
    wire_s: float | None  # from a bucket's first message to its last, less the work meanwhile
    residual_bytes: int  # memory of the feedback
    scratch_bytes: int  # memory of wires in flight, shared by everything on this group
    replica_bytes: int = 0  # memory of the copies of weights that differences are sent to
    plain_weights: int = 0  # messages of weights="exact" of which the difference was not shorter than the weights

    @property
    def ratio(self) -> float:
        """Bytes of the uncompressed gradients per byte sent."""
        return self.bytes_plain / self.bytes_sent if self.bytes_sent else 1.0

    @property
    def bytes_saved(self) -> int:
        """Uncompressed bytes minus bytes sent."""
        return self.bytes_plain - self.bytes_sent

    def as_dict(self) -> dict[str, float | str]:
        """Every figure that is known, by name, for logs and trackers."""
        values = {item.name: getattr(self, item.name) for item in fields(self)} | {"ratio": self.ratio}
        return {name: value for name, value in values.items() if value is not None}

    def __str__(self) -> str:
        seconds = {name.removesuffix("_s"): getattr(self, name) for name in SECONDS}
        bad = f", {self.nonfinite} chunks not finite" if self.nonfinite else ""
        replicas = f", {self.replica_bytes:,} of copies of weights" if self.replica_bytes else ""
        lines = {
            "codec": f"{self.codec}, feedback {self.feedback}",
            "chosen": self.chosen,
            "steps": f"{self.steps}" + bad,
            "bytes": f"{self.bytes_sent:,} sent, {self.bytes_plain:,} uncompressed: {self.ratio:.2f} times fewer",
            "bits": "" if self.bits_per_element is None else f"{self.bits_per_element:.3f} per element",
            "error": "" if self.relative_error is None else f"{self.relative_error:.2e} relative",
            "seconds": ", ".join(f"{name} {took:.3f}" for name, took in seconds.items() if took is not None),
            "memory": f"{self.residual_bytes:,} bytes of residuals, {self.scratch_bytes:,} of scratch" + replicas,
        }
        return "\n".join(f"{name:8} {text}" for name, text in lines.items() if text)


@dataclass
class Tally:
    """The running sums behind `Stats`. Times, counts and errors come from the thread that runs the collectives."""

    bytes_sent: int = 0
    bytes_plain: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SECONDS, 0.0))
    plain_weights: int = 0
    timed: bool = True  # not on a GPU, where the host does not wait to know
    nonfinite: Tensor | int = 0
    notes: dict[object, Bad] = field(default_factory=dict)  # of each program: the last chunk that it began
    relative_error: float | None = None  # of the last measured step
    errors: Mapping[str, float] = field(default_factory=dict)  # squared ones by parameter, from a checkpoint
    watched: list[tuple[list[str | None], Tensor]] = field(default_factory=list)  # of this step: squares lost and sent
    rounded: bool = False  # whether this step has rounded anything that is watched

    def note(self, program: object, device: torch.device, chunks: int = 1) -> Bad:
        """Where a program counts those of its next chunks that are not finite; others may run at the same time."""
        noted, last = self.notes.get(program) or (torch.zeros(2, dtype=torch.int32, device=device), 0)
        begun = Bad(noted, last % (1 << 30) + 1)
        self.notes[program] = Bad(noted, last + chunks)
        return begun

    @property
    def all_nonfinite(self) -> int:
        """Chunks in which any rank had NaN or Inf."""
        return int(self.nonfinite) + sum(int(note.noted[1]) for note in self.notes.values())

    def checked(self, fine: bool | Tensor) -> None:
        """Count a chunk, unless all ranks' numbers in it are finite. On a GPU the count stays there."""
        self.nonfinite = self.nonfinite + (~fine).long() if isinstance(fine, Tensor) else self.nonfinite + (not fine)

    def sent(self, nbytes: int, plain: int | None = None) -> None:
        """`plain`: what would have been sent without compression; None: this was not compressed."""
        self.bytes_sent += nbytes
        self.bytes_plain += nbytes if plain is None else plain

    def worked(self, stages: Sequence[tuple[int, float, float]]) -> None:
        """Add up when a bucket's chunks worked: (stage, began, ended), 0 before a message, 1 between two, -1 after.

        The wire had the time from the first message to the last, less the work meanwhile.
        """
        if not stages:
            return
        for index, began, ended in stages:
            self.seconds[{0: "encode_s", -1: "decode_s"}.get(index, "reduce_s")] += ended - began
        sent = stages[0][2]
        last = max(began for _, began, _ in stages)
        work = sum(max(0.0, min(ended, last) - max(began, sent)) for _, began, ended in stages)
        self.seconds["wire_s"] += max(0.0, last - sent - work)

    def watch(self, pieces: Sequence[Piece], device: torch.device) -> Callable[[Span, Tensor, Tensor], None]:
        """A function that sums, by parameter, the squares of what is sent and lost (kernels.rows.Watch)."""
        edges = [0, *itertools.accumulate(piece.numel for piece in pieces)]
        sums_2P = torch.zeros(2, len(pieces), dtype=torch.float64, device=device)  # of what was lost, and sent
        self.watched.append(([piece.name for piece in pieces], sums_2P))

        def look(span: Span, message: Tensor, decoded: Tensor) -> None:
            self.rounded = True
            for i, (low, high) in enumerate(itertools.pairwise(edges)):
                part = slice(max(low, span[0]) - span[0], min(high, span[1]) - span[0])
                if part.start < part.stop:
                    sent = message[part].double()
                    sums_2P[0, i] += (sent - decoded[part]).square().sum()
                    sums_2P[1, i] += sent.square().sum()

        return look

    def errors_by_name(self) -> dict[str, float]:
        """Squared errors by parameter, for the next step's decisions; empty if this step was not measured."""
        summed = dict(self.errors)
        for names, sums_2P in self.watched:
            for name, lost in zip(names, sums_2P[0].tolist(), strict=True):
                if name is not None:
                    summed[name] = summed.get(name, 0.0) + lost
        return summed

    def end_step(self) -> float | None:
        """The relative error of the step; None if it was not measured, or not finite, or nothing was rounded."""
        rounded, (lost, sent) = self.rounded, [sum(float(sums[i].sum()) for _, sums in self.watched) for i in (0, 1)]
        self.load_errors({})
        if not rounded or not math.isfinite(lost + sent):
            return None
        self.relative_error = (lost / sent) ** 0.5 if sent > 0 else 0.0
        return self.relative_error

    def load_errors(self, errors: Mapping[str, float]) -> None:
        """Forget this step's errors, and continue with a checkpoint's."""
        self.watched, self.rounded, self.errors = [], False, errors


class Handle:
    """A model whose traffic is compressed."""

    def __init__(self) -> None:
        self.closed = False
        self._logs: list[tuple[Target, int]] = []  # and after how many steps each

    def stats(self) -> Stats:
        """What compression has done on this rank; `print` shows a table."""
        raise NotImplementedError

    def log_to(self, target: Target, *, every: int = 100) -> Self:
        """Write `stats()` to `target` after every `every` steps, on the group's first rank. Returns the handle.

        target: a path, to which lines of JSON are appended; TensorBoard's SummaryWriter, or anything with
            `add_scalar`; a Weights & Biases run, or anything with `log`; or a function, called with a dict.
        """
        if not is_int(every) or every < 1:
            raise CollectiveError(f"log_to: every must be a number of steps above 0, got {every!r}")
        methods = [callable(getattr(target, name, None)) for name in ("add_scalar", "log")]
        if not (isinstance(target, str | Path) or callable(target) or any(methods)):
            raise CollectiveError(
                "log_to: expected a path, a SummaryWriter, a Weights & Biases run or a function of a dict, got "
                f"{type(target).__name__}"
            )
        self._logs.append((target, every))
        return self

    def _write_logs(self, step: int, rank: int) -> None:
        """After `step` steps; `stats()` waits for a GPU, so it is called only where something is due."""
        if rank != 0 or not step:
            return
        for target, every in self._logs:
            if step % every == 0:
                _log(target, self.stats().as_dict() | {"steps": step})  # stats() may count one that has begun since

    def __repr__(self) -> str:
        stats = self.stats()
        closed = ", closed" if self.closed else ""
        said = f"codec={stats.codec!r}, feedback={stats.feedback!r}, steps={stats.steps}, ratio={stats.ratio:.2f}"
        return f"{type(self).__name__}({said}{closed})"


def _log(target: Target, values: dict[str, Any]) -> None:
    if isinstance(target, str | Path):
        with Path(target).open("a") as file:
            file.write(json.dumps(values) + "\n")
    elif callable(getattr(target, "add_scalar", None)):
        for name, value in values.items():
            if not isinstance(value, str):
                target.add_scalar(f"thinwire/{name}", value, values["steps"])
    elif callable(getattr(target, "log", None)):
        target.log({f"thinwire/{name}": value for name, value in values.items()})
    else:
        target(values)
