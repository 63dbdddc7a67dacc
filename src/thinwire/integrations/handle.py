"""What the handles of compress_ddp and compress_fsdp have in common: closing, printing and logging."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from thinwire.errors import CollectiveError
from thinwire.integrations.stats import Stats

Target = Any  # a path, a SummaryWriter, a W&B run, or a function of a dict


class Handle:
    """A model whose traffic is compressed."""

    def __init__(self) -> None:
        self.closed = False
        self._logs: list[_Log] = []

    def stats(self) -> Stats:
        """What compression did so far on this rank; `print` shows it as a table."""
        raise NotImplementedError

    def log_to(self, target: Target, *, every: int = 100) -> Self:
        """Write `stats()` to `target` after every `every` steps, on the group's first rank. Returns the handle.

        target: a path, to which lines of JSON are appended; TensorBoard's SummaryWriter, or anything with
            `add_scalar`; a Weights & Biases run, or anything with `log`; or a function, called with a dict.
        """
        if not isinstance(every, int) or every < 1:
            raise CollectiveError(f"log_to: every must be a number of steps above 0, got {every!r}")
        self._logs.append(_Log(_writer(target), every))
        return self

    def _write_logs(self, step: int, rank: int) -> None:
        """After `step` steps; `stats()` waits for a GPU, so it is called only where something is due."""
        if rank != 0 or not step:
            return
        for log in self._logs:
            if step % log.every == 0 and step > log.last:
                log.last = step
                log.write(self.stats().as_dict())

    def __repr__(self) -> str:
        stats = self.stats()
        closed = ", closed" if self.closed else ""
        said = f"codec={stats.codec!r}, feedback={stats.feedback!r}, steps={stats.steps}, ratio={stats.ratio:.2f}"
        return f"{type(self).__name__}({said}{closed})"


@dataclass
class _Log:
    write: Callable[[dict[str, Any]], object]
    every: int
    last: int = 0  # step that was written last


def _writer(target: Target) -> Callable[[dict[str, Any]], object]:
    if isinstance(target, str | Path):
        path = Path(target)
        return lambda values: _append(path, values)
    if callable(getattr(target, "add_scalar", None)):
        return lambda values: _add_scalars(target, values)
    if callable(getattr(target, "log", None)):
        return lambda values: target.log({f"thinwire/{name}": value for name, value in values.items()})
    if callable(target):
        write: Callable[[dict[str, Any]], object] = target
        return write
    raise CollectiveError(
        "log_to: expected a path, a SummaryWriter, a Weights & Biases run or a function of a dict, got "
        f"{type(target).__name__}"
    )


def _append(path: Path, values: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(values) + "\n")


def _add_scalars(writer: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if not isinstance(value, str):
            writer.add_scalar(f"thinwire/{name}", value, values["steps"])
