"""Numbers that launches read from memory, for CUDA graphs.

[Note: Later] A CUDA graph starts its kernels with the arguments they were captured with. What changes from step to
step, the keys of rotation and dither and the number of a call, therefore stands in memory, and such a kernel is given
its address. `Memo.write` puts the numbers of the next replay there, in the order of the stream.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels.triton.compiling import is_ahead

_MOST = 4096  # numbers of one program
_Made = Callable[[int, int], tuple[int, ...]]  # numbers of 32 bits, of a mixed step and the number of a call


class Later:
    """A number that stands for every step's own."""

    def __init__(self, memo: Any, of: Callable[[int, int], int]) -> None:
        self.memo = memo
        self.of = of

    def __xor__(self, other: int) -> "Later":
        return Later(self.memo, lambda mixed, call: self.of(mixed, call) ^ other)

    def __add__(self, other: int) -> "Later":
        return Later(self.memo, lambda mixed, call: self.of(mixed, call) + other)


Number = int | Later


def numbers(make: Callable[[int], tuple[int, ...]], number: Number) -> tuple[int, ...] | tuple[Tensor, ...]:
    """The numbers of 32 bits that `make` makes of a number, or where they stand."""
    if isinstance(number, int):
        return make(number)
    of = number.of
    found: tuple[int, ...] | tuple[Tensor, ...] = number.memo.place(lambda mixed, call: make(of(mixed, call)))
    return found


class Memo:
    """Where the launches of a program find their numbers."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.zeros(_MOST, dtype=torch.int32, device=device)
        self._made: list[_Made] = []
        self._used = 0
        self._now: tuple[int, int] | None = None

    def begin(self, mixed: int, call: int, *, captured: bool = False) -> tuple[Later, Later]:
        """The mixed step and the number of the call for launches that follow, which run at once or are captured."""
        self._made = []
        self._used = 0
        self._now = None if captured else (mixed, call)
        return Later(self, lambda mixed, _: mixed), Later(self, lambda _, call: call)

    def place(self, made: _Made) -> tuple[Tensor, ...]:
        """Where a launch finds the numbers that are made."""
        count = len(made(0, 0))
        found = self._memory[self._used : self._used + count]
        assert found.numel() == count, f"launches of a program have at most {_MOST} numbers"
        self._made.append(made)
        self._used += count
        if self._now is not None and not is_ahead():
            self._put(found, made(*self._now))
        return tuple(found.split(1))

    def write(self, mixed: int, call: int) -> None:
        """Put a step's numbers where the captured launches find them."""
        self._put(self._memory[: self._used], [number for made in self._made for number in made(mixed, call)])

    def _put(self, target: Tensor, values: Sequence[int]) -> None:
        """In the order of the stream; the host goes on, for which a GPU has to read from pinned memory."""
        source = torch.tensor(values, dtype=torch.int32, pin_memory=target.is_cuda)
        target.copy_(source, non_blocking=True)  # torch gives the memory to nobody else before it was read
