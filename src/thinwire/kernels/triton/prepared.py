"""A kernel and its arguments, by name: some are known beforehand, the others given at a call.

[Note: Launching again] Triton takes tens of microseconds on the host to find a compiled kernel by its arguments, longer
than the GPU takes for a small message. So compiled kernels are cached here, by what Triton distinguishes: constants,
dtypes, whether pointers are aligned to 16 bytes, whether integers need 64 bits and, unless the kernel says
do_not_specialize, whether they are 1 or multiples of 16.

[Note: Structures] Arguments that belong together form a named tuple, which Triton passes as its members. Triton would
compile separate kernels for members that are 1 or multiples of 16. So that one kernel serves all values, it is compiled
for placeholders (`_typical`) of the same width that are neither, and launched directly.
"""

import functools
import importlib
import operator
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire.kernels.triton import INTERPRETED, compiling

_FLOATS = ("x", "out", "left", "memory", "mean")  # arguments of which four neighbors may be read at once
# Kernels, compiled or being compiled: by the arguments known beforehand, then by those of a call.
_found: dict[tuple[Any, ...], dict[tuple[Any, ...], Future[Any]]] = {}


class Prepared:
    """A kernel on one device, as `grid` programs of `warps` warps each, with the arguments that all calls share.

    `known` and `constants` may hold more than the kernel takes. registers: the most that a thread may use.
    """

    def __init__(
        self,
        kernel: Any,
        device: torch.device,
        grid: int | tuple[int, int],
        warps: int,
        known: dict[str, Any],
        constants: dict[str, Any],
        registers: int | None = None,
    ) -> None:
        known = {name: known[name] for name in kernel.arg_names if name in known}
        constants = {name: constants[name] for name in kernel.arg_names if name in constants}
        beforehand = {**known, **constants}
        self._kernel = kernel
        self.device = device
        self.grid = (grid, 1, 1) if isinstance(grid, int) else (*grid, 1)
        self._options = {"num_warps": warps, "enable_fp_fusion": False, "maxnreg": registers}
        self.args = [beforehand.get(name) for name in kernel.arg_names]
        self.places = {name: i for i, name in enumerate(kernel.arg_names) if name not in beforehand}
        alike = getattr(kernel, "do_not_specialize", ())  # the interpreter has none
        kinds = (*constants.values(), *(_kind(value, name in alike) for name, value in known.items()))
        self._name = f"{kernel.__name__} {warps} {registers} {kinds}"
        self._found = _found.setdefault((kernel, device, warps, registers, kinds), {})

    def __call__(self, **given: Any) -> Any:
        """Start the kernel with the other arguments, and return the compiled kernel; None under the interpreter.

        If a tensor has no memory, only begin to compile it, and return None. [Note: Compiled ahead]
        """
        if self.device.type == "cuda" and self.device.index != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                return self(**given)
        args = self.args.copy()
        ahead = False
        for name, value in given.items():
            args[self.places[name]] = value
            ahead = ahead or (isinstance(value, Tensor) and value.is_meta)
        if INTERPRETED:
            if not ahead:
                self._kernel[self.grid](*args)
            return None
        key = tuple([_kind(value, True) for value in given.values()])
        found = self._found.get(key) or self._begin(key, args, given)
        if ahead:
            return None
        if not found.done():
            with compiling.announcing("compiling GPU kernels as codecs are first used"):
                found.exception()
        kernel = found.result()
        kernel[self.grid](*args)
        return kernel

    def _begin(self, key: tuple[Any, ...], args: list[Any], given: dict[str, Any]) -> Future[Any]:
        assert given.keys() == self.places.keys(), f"expected {[*self.places]}, got {[*given]}"
        alike = self._kernel.do_not_specialize
        assert all(name in alike for name, value in given.items() if isinstance(value, int))
        found = self._found[key] = compiling.begin(f"{self._name} {key}", lambda: self._compile(args), self._load)
        found.add_done_callback(lambda done: done.exception() and self._found.pop(key, None))  # a later call retries
        return found

    def _compile(self, args: list[Any]) -> Any:
        """The kernel, compiled. In any thread."""
        with self._on_device():
            return self._kernel.warmup(*map(_typical, args), grid=self.grid, **self._options)

    def _load(self, made: Any) -> None:
        with self._on_device():
            _ = made.run  # the first access loads the kernel, and has a C compiler make its launcher

    def _on_device(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()


class _Start(NamedTuple):
    """A compiled kernel and all of its arguments but those of a call."""

    kernel: Any
    grid: tuple[int, int, int]
    args: list[Any]
    device: int


class Repeated:
    """A kernel that is launched many times, on tensors and then 32-bit numbers or structures of them, named in order.

    The compiled kernel depends on the tensors' dtypes (feedback may remember in fp32 or bf16) and on their addresses
    modulo 16, so it is cached by those. The first time `make` provides it; its argument says whether four neighbors of
    all float tensors can be read at once. If the first tensor has no memory, the kernel is only compiled.
    """

    def __init__(
        self,
        make: Callable[[bool], Prepared],
        tensors: tuple[str, ...],
        numbers: tuple[str, ...] = (),
        even: bool = True,
    ) -> None:
        self._make = functools.cache(make)
        self._names = (*tensors, *numbers)
        self._places: list[int] = []  # their places among the kernel's arguments
        self._even = even  # whether four neighbors can be read at once in every row
        self._starts: dict[tuple[Any, ...], _Start] = {}  # by the dtypes, and the addresses modulo 16

    def __call__(self, tensors: tuple[Tensor, ...], numbers: tuple[Any, ...] = ()) -> None:
        """Start it on the current stream. Launch hooks, which are slow, are called only if a profiler has set some."""
        values = [*map(_address, tensors)]
        where = (*map(_low, values), *map(_dtype, tensors))
        start = self._starts.get(where)
        if start is None or start.device != _device() or tensors[0].is_meta:
            self._by_name(tensors, numbers, where)
            return
        values += numbers
        kernel, grid, known, device = start
        args = known.copy()
        for place, value in zip(self._places, values, strict=True):
            args[place] = value
        if getattr(self._hooks.launch_enter_hook, "calls", 1) or getattr(self._hooks.launch_exit_hook, "calls", 1):
            kernel[grid](*args, stream=_stream(device))
        else:
            kernel.run(*grid, _stream(device), kernel.function, kernel.packed_metadata, None, None, None, *args)

    def _by_name(self, tensors: tuple[Tensor, ...], numbers: tuple[Any, ...], where: tuple[Any, ...]) -> None:
        given: dict[str, Any] = dict(zip(self._names, (*tensors, *numbers), strict=True))
        floats = [given[name] for name in _FLOATS if name in given and given[name].dtype != torch.uint8]
        prepared = self._make(self._even and all(x.data_ptr() % (4 * x.itemsize) == 0 for x in floats))
        found = prepared(**given)
        if found is not None:
            self._places = [prepared.places[name] for name in self._names]
            # Addresses in place of tensors: Triton would ask the driver about every pointer at every launch.
            args = [value.data_ptr() if isinstance(value, Tensor) else value for value in prepared.args]
            self._hooks = importlib.import_module("triton").knobs.runtime
            self._starts[where] = _Start(found, prepared.grid, args, prepared.device.index)


_low = (15).__and__
_address = Tensor.data_ptr
_dtype = operator.attrgetter("dtype")
_device: Any = getattr(torch._C, "_cuda_getDevice", lambda: None)  # a build without CUDA has neither
_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def _kind(value: Any, alike: bool) -> Any:
    """What Triton distinguishes in an argument; if `alike`, only the width of a number."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return _is_short(value), alike or (value == 1, value % 16 == 0)
    if isinstance(value, tuple):
        return tuple([_kind(member, True) for member in value])
    return type(value)


def _typical(value: Any, member: bool = False) -> Any:
    """The placeholder that a kernel is compiled for instead of `value`. [Note: Structures]"""
    if isinstance(value, tuple):
        members = [_typical(each, True) for each in value]
        return type(value)(*members) if hasattr(value, "_fields") else tuple(members)
    if member and isinstance(value, int):
        return 3 if _is_short(value) else (1 << 40) + 3
    return value


def _is_short(value: int) -> bool:
    return -(1 << 31) <= value < 1 << 31
