"""A kernel and its arguments, by name: those known beforehand, and at a call the others.

[Note: Launching again] Triton's own way from arguments to a compiled kernel takes tens of microseconds of the host,
more than a small message takes of the GPU. So a kernel found that way is kept by what Triton distinguishes: constants,
dtypes, pointers on 16 bytes or not, integers that are longer than 32 bits and, unless a kernel takes any alike, those
that are 1 or multiples of 16.
"""

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire.kernels.tape import Entry, Player, Value, can_play, launch_address, takes, tear, writing
from thinwire.kernels.triton.compiling import Noted, noted, telling

_SIZES = {"i32": 4, "i64": 8, "fp32": 4}  # bytes of arguments, as Triton calls them
_NO_SCRATCH = (0, 0)  # Triton's kernels end with the addresses of two kinds of scratch
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

    def __call__(self, **given: Any) -> None:
        """Start the kernel with the arguments that were not known."""
        tear()
        self.launch(**given)

    def launch(self, **given: Any) -> Any:
        """The same; gives the compiled one, if it was started."""
        if self.device.type == "cuda" and self.device.index != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                return self.launch(**given)
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

    def entry(self, found: Any, names: Sequence[str]) -> tuple[Entry, list[int]] | None:
        """A compiled kernel as C starts it, without the arguments of these names, and where those stand.

        None where Triton made something else of it than a kernel that takes its arguments as they are.
        """
        how = found.metadata
        unusual = ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")
        if getattr(how, "num_ctas", 0) != 1 or 0 in self.grid or any(getattr(how, name, 0) for name in unusual):
            return None
        signature = found.src.signature  # the types of arguments, by name
        if list(signature) != list(self._kernel.arg_names):
            return None
        args: list[int] = []
        sizes: list[int] = []
        places: dict[str, int] = {}
        for (name, kind), value in zip(signature.items(), self._args, strict=True):
            if kind == "constexpr":
                continue
            size = 8 if kind.startswith("*") else _SIZES.get(kind)
            if size is None:
                return None
            places[name] = len(args)
            args.append(_word(kind, value))
            sizes.append(size)
        args += _NO_SCRATCH
        sizes += [8] * len(_NO_SCRATCH)
        if not takes(found.function, sizes) or not all(name in places for name in names):
            return None
        grid = self.grid[0], self.grid[1]
        entry = Entry(launch_address(), found.function, grid, 32 * how.num_warps, how.shared, args)
        return entry, [places[name] for name in names]

    def _compile(self, args: list[Any]) -> None:
        """Compile and load; Triton finds the kernel at the next launch. In any thread."""
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            made = self._kernel.warmup(*args, grid=self.grid, **self._options)
            _ = made.run  # on first sight loads the kernel, and has a C compiler make what launches it


class _Start(NamedTuple):
    """A compiled kernel that is started by addresses."""

    entry: Entry
    places: list[int]  # of the arguments that are given
    alone: Player  # on a tape of its own
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
        """Start it on the current stream, and write it on a tape that is written."""
        values = [tensor.data_ptr() for tensor in tensors]
        odd = 0
        for address in values:
            odd |= address
        where = tuple([address & 15 for address in values]) if odd & 15 else ()
        start = self._starts.get(where)
        tape = writing.get()
        now = numbers if tape is None else tuple([n.now if isinstance(n, Value) else n for n in numbers])
        if start is None or start.device != _device() or noted.get() is not None:
            self._by_name(tensors, now, where)
        else:
            start.alone.play([*values, *now], _stream(start.device))
        if tape is not None:
            start = self._starts.get(where)
            if start is None:
                tape.is_whole = False
            else:
                tape.write(start.entry, list(zip(start.places, (*tensors, *numbers), strict=True)))

    def _prepared(self, given: dict[str, Any]) -> Prepared:
        floats = [given[name] for name in self._floats if name in given and given[name].dtype != torch.uint8]
        return self._make(self._even and all(x.data_ptr() % (4 * x.itemsize) == 0 for x in floats))

    def _by_name(self, tensors: tuple[Tensor, ...], numbers: tuple[Any, ...], where: tuple[int, ...]) -> None:
        given: dict[str, Any] = dict(zip(self._names, (*tensors, *numbers), strict=True))
        prepared = self._prepared(given)
        found = prepared.launch(**given)
        made = None if found is None or not can_play() else prepared.entry(found, self._names)
        if made is not None:
            entry, places = made
            changes = list(zip(places, range(len(places)), strict=True))
            player = Player(entry.words(changes), 1, len(places))
            self._starts[where] = _Start(entry, places, player, prepared.device.index)


_device: Any = getattr(torch._C, "_cuda_getDevice", lambda: None)  # a build without CUDA has neither
_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def _word(kind: str, value: Any) -> int:
    """An argument of a kernel in a word of 64 bits; 0 where it is not known."""
    if value is None:
        return 0
    if isinstance(value, Tensor):
        return value.data_ptr()
    return struct.unpack("<i", bytes(ctypes.c_float(value)))[0] if kind == "fp32" else int(value)


def _kind(value: Any, alike: bool) -> Any:
    """What Triton distinguishes in an argument; alike: of numbers their width alone."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return value.bit_length() < 32, alike or (value == 1, value % 16 == 0)
    return type(value)
