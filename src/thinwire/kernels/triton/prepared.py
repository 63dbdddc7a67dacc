"""A kernel and its arguments, by name: those known beforehand, and at a call the others.

[Note: Launching again] Triton's own way from arguments to a compiled kernel takes tens of microseconds of the host,
more than a small message takes of the GPU. So a kernel found that way is kept by what Triton distinguishes: constants,
dtypes, pointers on 16 bytes or not, integers that are longer than 32 bits and, unless a kernel takes any alike, those
that are 1 or multiples of 16.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels.triton.compiling import Noted, noted, telling

_found: dict[tuple[Any, ...], dict[tuple[Any, ...], Any]] = {}  # compiled kernels, by the arguments known beforehand


class Prepared:
    """A kernel on one device, cut into `grid` programs of `warps` warps each, with all but the arguments of a call.

    Both dictionaries may hold more than the kernel asks for.
    """

    def __init__(
        self,
        kernel: Any,
        device: torch.device,
        grid: int | tuple[int, int],
        warps: int,
        known: dict[str, Any],
        constants: dict[str, Any],
    ) -> None:
        known = {name: known[name] for name in kernel.arg_names if name in known}
        constants = {name: constants[name] for name in kernel.arg_names if name in constants}
        beforehand = {**known, **constants}
        self._kernel = kernel
        self._device = device
        self._grid = (grid, 1, 1) if isinstance(grid, int) else (*grid, 1)
        self._warps = warps
        self._args = [beforehand.get(name) for name in kernel.arg_names]
        self._places = {name: i for i, name in enumerate(kernel.arg_names) if name not in beforehand}
        alike = getattr(kernel, "do_not_specialize", ())  # the interpreter has none
        kinds = (*constants.values(), *(_kind(value, name in alike) for name, value in known.items()))
        self._found = _found.setdefault((kernel, device, warps, kinds), {})

    def __call__(self, **given: Any) -> None:
        """Start the kernel with the arguments that were not known."""
        if self._device.type == "cuda" and self._device.index != torch.cuda.current_device():
            with torch.cuda.device(self._device):
                self(**given)
            return
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
            return
        if found is not None:
            found[self._grid](*args)
            return
        assert given.keys() == self._places.keys(), f"expected {[*self._places]}, got {[*given]}"
        with telling("compiling GPU kernels as codecs are first used"):
            found = self._kernel[self._grid](*args, num_warps=self._warps, enable_fp_fusion=False)
        if found is not None:  # the interpreter compiles nothing
            changing = self._kernel.do_not_specialize
            assert all(name in changing for name, value in given.items() if isinstance(value, int))
            self._found[key] = found

    def _compile(self, args: list[Any]) -> None:
        """Compile and load; Triton finds the kernel at the next launch. In any thread."""
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            made = self._kernel.warmup(*args, grid=self._grid, num_warps=self._warps, enable_fp_fusion=False)
            _ = made.run  # on first sight loads the kernel, and has a C compiler make what launches it


def _kind(value: Any, alike: bool) -> Any:
    """What Triton distinguishes in an argument; alike: of numbers their width alone."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return value.bit_length() < 32, alike or (value == 1, value % 16 == 0)
    return type(value)
