"""A kernel and its arguments, by name: those known beforehand, and at a call the others.

[Note: Launching again] Triton's own way from arguments to a compiled kernel takes tens of microseconds of the host,
more than a small message takes of the GPU. So a kernel found that way is kept by what Triton distinguishes: constants,
dtypes, pointers on 16 bytes or not, integers that are longer than 32 bits and, unless a kernel takes any alike, those
that are 1 or multiples of 16.
"""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from thinwire.kernels.triton.compiling import Noted, noted, telling

_found: dict[tuple[Any, ...], dict[tuple[Any, ...], Any]] = {}  # compiled kernels, by the arguments known beforehand


class Prepared:
    """A kernel on one device, cut into `grid` programs of `warps` warps each, with all but the arguments of a call.

    Both dictionaries may hold more than the kernel asks for. registers: at most, for a thread.
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
        self._args = [beforehand.get(name) for name in kernel.arg_names]
        self._places = {name: i for i, name in enumerate(kernel.arg_names) if name not in beforehand}
        alike = getattr(kernel, "do_not_specialize", ())  # the interpreter has none
        kinds = (*constants.values(), *(_kind(value, name in alike) for name, value in known.items()))
        self._found = _found.setdefault((kernel, device, warps, registers, kinds), {})

    def __call__(self, **given: Any) -> Any:
        """Start the kernel with the arguments that were not known; gives the compiled one, if it was started."""
        if self.device.type == "cuda" and self.device.index != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                return self(**given)
        args = self._args.copy()
        kinds: list[Any] = []  # of the given: their integers are not specialised, apart from their width
        for name, value in given.items():
            args[self._places[name]] = value
            if isinstance(value, int):
                kinds.append(value.bit_length() < 32)
            elif not isinstance(value, float):
                kinds += value.dtype, value.data_ptr() % 16 == 0
        key = tuple(kinds)
        found = self._found.get(key)
        ahead = noted.get()
        if ahead is not None:  # [Note: Compiled ahead]
            if found is None:
                ahead[id(self._found), key] = Noted(self._kernel.__name__, lambda: self._compile(args))
            return None
        if found is not None:
            found[self.grid](*args)
            return found
        assert given.keys() == self._places.keys(), f"expected {[*self._places]}, got {[*given]}"
        with telling("compiling GPU kernels as codecs are first used"):
            found = self._kernel[self.grid](*args, **self._options)
        if found is not None:  # the interpreter compiles nothing
            changing = self._kernel.do_not_specialize
            assert all(name in changing for name, value in given.items() if isinstance(value, int))
            self._found[key] = found
        return found

    def place(self, name: str) -> int:
        """Where an argument that is not known stands."""
        return self._places[name]

    def known(self) -> list[Any]:
        """All arguments, None in place of those that are not known."""
        return self._args.copy()

    def _compile(self, args: list[Any]) -> None:
        """Compile and load; Triton finds the kernel at the next launch. In any thread."""
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            made = self._kernel.warmup(*args, grid=self.grid, **self._options)
            _ = made.run  # on first sight loads the kernel, and has a C compiler make what launches it


class _Start(NamedTuple):
    """A compiled kernel, and how it is started by addresses."""

    launch: Any
    before: tuple[Any, ...]  # its arguments before the stream
    after: tuple[Any, ...]  # those after it, before the kernel's own
    args: list[Any]  # the kernel's own, as far as they are known
    places: list[int]  # of the others in them
    device: int


class Repeated:
    """A kernel that is started again and again, by the addresses of tensors and by numbers of 32 bits.

    [Note: By address] The way from tensors to a launch is most of what a small call costs. Which compiled kernel serves
    them depends on where they begin within 16 bytes alone, so it is kept by that, and started by their addresses at
    once. The first time `make` is asked for a kernel, for tensors of which four neighbours can be read at once or not.
    The order of the arguments is that of the names.
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
        self._floats = ("x", "out", "left", "memory", "mean")
        self._even = even  # whether rows too begin where four neighbours do
        self._starts: dict[tuple[int, ...], _Start] = {}  # by the addresses modulo 16; () if all are 0

    def __call__(self, tensors: tuple[Tensor, ...], numbers: tuple[Any, ...] = ()) -> None:
        """Start it on the current stream; numbers may stand in tensors. [Note: Later]"""
        if numbers and isinstance(numbers[0], Tensor):
            given = dict(zip(self._names, (*tensors, *numbers), strict=True))
            self._prepared(given)(**given)
            return
        values = [tensor.data_ptr() for tensor in tensors]
        odd = 0
        for address in values:
            odd |= address
        where = tuple([address & 15 for address in values]) if odd & 15 else ()
        start = self._starts.get(where)
        if start is None or start.device != _device() or noted.get() is not None:
            self._by_name(tensors, numbers, where)
            return
        values += numbers
        args = start.args.copy()
        for place, value in zip(start.places, values, strict=True):
            args[place] = value
        start.launch(*start.before, _stream(start.device), *start.after, *args)

    def _prepared(self, given: dict[str, Any]) -> Prepared:
        floats = [given[name] for name in self._floats if name in given and given[name].dtype != torch.uint8]
        return self._make(self._even and all(x.data_ptr() % (4 * x.itemsize) == 0 for x in floats))

    def _by_name(self, tensors: tuple[Tensor, ...], numbers: tuple[Any, ...], where: tuple[int, ...]) -> None:
        given: dict[str, Any] = dict(zip(self._names, (*tensors, *numbers), strict=True))
        prepared = self._prepared(given)
        found = prepared(**given)
        if found is None or not _DIRECT:
            return
        run = found.run
        if run.global_scratch_size or run.profile_scratch_size:
            return
        how = (found.function, run.launch_cooperative_grid, run.launch_pdl)
        no_scratch = (None, None)
        no_hooks = (None, None, None)
        self._starts[where] = _Start(
            launch=run.launch,
            before=prepared.grid,
            after=(*how, *no_scratch, found.packed_metadata, *no_hooks),
            args=prepared.known(),
            places=[prepared.place(name) for name in self._names],
            device=prepared.device.index,
        )


_DIRECT = triton.__version__.startswith("3.6.")  # whose compiled kernels are started as above; others by name
_device: Any = getattr(torch._C, "_cuda_getDevice", lambda: None)  # a build without CUDA has neither
_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def _kind(value: Any, alike: bool) -> Any:
    """What Triton distinguishes in an argument; alike: of numbers their width alone."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return value.bit_length() < 32, alike or (value == 1, value % 16 == 0)
    return type(value)
