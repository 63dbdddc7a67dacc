"""Launches and messages on a GPU's stream that were made from Python once, and are made by C from then on.

[Note: Tape] What a small call costs is mostly Python: to find kernels, to put their arguments together, to start one
after the other. From call to call little of that changes: where the tensors of the call lie, and the numbers of its
step. So a tape is written while the launches of a program are made for the first time, and native/tape.c plays it at
every later call, given those addresses and numbers.
"""

import array
import ctypes
import functools
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.errors import BackendError
from thinwire.kernels import cpu
from thinwire.ranges import ranged

_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_MOST_ARGS = 128  # TW_MOST_ARGS in native/thinwire.h
_Made = Callable[[int, int], tuple[int, ...]]  # numbers of 32 bits, of a mixed step and the number of a call


class Later:
    """What is made of the mixed step and the number of a call, at every call anew."""

    def __init__(self, tape: "Tape", of: Callable[[int, int], int]) -> None:
        self.tape = tape
        self.of = of

    def __xor__(self, other: int) -> "Later":
        of = self.of  # not self, whose tape keeps what is made here
        return Later(self.tape, lambda mixed, call: of(mixed, call) ^ other)

    def __add__(self, other: int) -> "Later":
        of = self.of
        return Later(self.tape, lambda mixed, call: of(mixed, call) + other)


Number = int | Later


def numbers(make: Callable[[int], tuple[int, ...]], number: Number) -> "tuple[int, ...] | tuple[Value, ...]":
    """The numbers of 32 bits that `make` makes of a number; where a tape is written, those of every call."""
    if isinstance(number, int):
        return make(number)
    of = number.of
    return number.tape.place(lambda mixed, call: make(of(mixed, call)))


class Value(NamedTuple):
    """A number that every call has its own of."""

    now: int
    at: int  # among the values that a tape is played with


COMMUNICATOR = Value(0, 0)  # the first of them


class Entry(NamedTuple):
    """A kernel or a message, as native/tape.c starts it."""

    start: int  # the address of the function that does
    kernel: int  # 0: a message
    grid: tuple[int, int]
    threads: int
    shared: int
    args: Sequence[int]  # in place of those that change what is added to them

    def words(self, changes: Sequence[tuple[int, int]]) -> list[int]:
        """changes: places of arguments, and which of the values are added there."""
        head = (self.start, self.kernel, *self.grid, self.threads, self.shared, len(self.args), len(changes))
        return [*head, *self.args, *(number for change in changes for number in change)]


class Player:
    """Entries that are started one after the other."""

    def __init__(self, words: Sequence[int], count: int, num_values: int) -> None:
        self._words = array.array("q", words)  # held as long as its address
        self._at = self._words.buffer_info()[0]
        self._count = count
        self._pack = struct.Struct(f"<{num_values}q").pack
        self._play = _play()

    def play(self, values: Sequence[int], stream: int) -> int:
        """Start them; gives the number of NCCL's error where a message could not be started."""
        packed = self._pack(*values)
        code = self._play(self._at, self._count, packed, stream)
        if code == _NO_CONTEXT:  # the driver's first call in a thread; nothing was started
            torch.cuda.is_current_stream_capturing()  # torch makes the context of the device current
            code = self._play(self._at, self._count, packed, stream)
        if code > 0:
            raise BackendError(f"CUDA could not start a kernel: {_error_name(code)}; CUDA_LAUNCH_BLOCKING=1 tells more")
        return -code


class Tape:
    """What a program starts on tensors that it was given, `inputs`; elsewhere it reads and writes what stays.

    The values that it is played with: the communicator of messages, the addresses of the inputs, then numbers.
    """

    def __init__(self, inputs: Sequence[Tensor], mixed: int, call: int) -> None:
        self.is_whole = True  # False: something was done that no tape has
        self.nbytes = 0  # of its messages
        self._spans = [(tensor.data_ptr(), tensor.nbytes) for tensor in inputs]
        self._now = mixed, call
        self._words: list[int] = []
        self._count = 0
        self._made: list[_Made] = []
        self._num_values = 1 + len(inputs)
        self._held: list[Tensor] = []  # what is read and written elsewhere
        self._player: Player | None = None

    def begin(self) -> tuple[Later, Later]:
        """The mixed step and the number of the call, for the launches that follow."""
        return Later(self, lambda mixed, _: mixed), Later(self, lambda _, call: call)

    def place(self, made: _Made) -> tuple[Value, ...]:
        """The numbers that are made for every call."""
        self._made.append(made)
        found = tuple(Value(now, self._num_values + i) for i, now in enumerate(made(*self._now)))
        self._num_values += len(found)
        return found

    def write(self, entry: Entry, given: Sequence[tuple[int, Tensor | Value | int]]) -> None:
        """One more entry, with what is given for some of its arguments, by their places."""
        args = list(entry.args)
        changes = []
        for place, value in given:
            if isinstance(value, Tensor):
                args[place], index = self._where(value)
            elif isinstance(value, Value):
                args[place], index = 0, value.at
            else:
                args[place], index = value, -1
            if index >= 0:
                changes.append((place, index))
        self._words += entry._replace(args=args).words(changes)
        self._count += 1

    def _where(self, tensor: Tensor) -> tuple[int, int]:
        """How far behind which value a tensor begins; -1 where it does not move."""
        at = tensor.data_ptr()
        for i, (begin, nbytes) in enumerate(self._spans):
            if begin <= at < begin + nbytes:
                return at - begin, 1 + i
        self._held.append(tensor)
        return at, -1

    @ranged("thinwire::play")
    def play(self, communicator: int, addresses: Sequence[int], mixed: int, call: int, stream: int) -> int:
        """Start all of it, on other inputs and for another step; see Player."""
        if self._player is None:
            self._player = Player(self._words, self._count, self._num_values)
        values = [communicator, *addresses]
        for made in self._made:
            values += made(mixed, call)
        return self._player.play(values, stream)


writing: ContextVar[Tape | None] = ContextVar("writing", default=None)  # the tape that launches are written on


@contextmanager
def written(tape: Tape) -> Iterator[Tape]:
    """Launches and messages inside are made, and written on the tape."""
    token = writing.set(tape)
    try:
        yield tape
    finally:
        writing.reset(token)


def tear() -> None:
    """What is done here no tape has."""
    tape = writing.get()
    if tape is not None:
        tape.is_whole = False


def can_play() -> bool:
    """Whether there are the C library and a driver of GPUs."""
    return cpu.library() is not None and launch_address() != 0


def launch_address() -> int:
    """Of the driver's function that launches kernels; 0 where there is none."""
    driver = _driver()
    return 0 if driver is None else address_of(driver.cuLaunchKernel)


def takes(kernel: int, sizes: Sequence[int]) -> bool:
    """Whether a kernel's parameters have these sizes, in bytes; the last two it may do without."""
    driver = _driver()
    if driver is None or len(sizes) > _MOST_ARGS:
        return False
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    found: list[int] = []
    while not driver.cuFuncGetParamInfo(
        ctypes.c_void_p(kernel), ctypes.c_size_t(len(found)), ctypes.byref(offset), ctypes.byref(size)
    ):
        found.append(size.value)
    return len(found) >= len(sizes) - 2 and found == list(sizes[: len(found)])


@functools.cache
def _driver() -> ctypes.CDLL | None:
    """CUDA's, from 12.4 on."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuFuncGetParamInfo  # noqa: B018
    except (OSError, AttributeError):
        return None
    return driver


def _error_name(code: int) -> str:
    driver = _driver()
    name = ctypes.c_char_p()
    if driver is not None:
        driver.cuGetErrorName(code, ctypes.byref(name))
    return name.value.decode() if name.value else f"error {code}"


def address_of(function: object) -> int:
    """Where a function of ctypes lies."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


@functools.cache
def _play() -> Callable[..., int]:
    library = cpu.library()
    assert library is not None  # can_play
    play: Callable[..., int] = library.tw_play
    return play
