"""A kernel and its arguments, by name: those known beforehand, and at a call the others.

[Note: Launching again] Triton's own way from arguments to a compiled kernel takes tens of microseconds of the host,
more than a small message takes of the GPU. So a kernel found that way is kept by what Triton distinguishes: constants,
dtypes, pointers on 16 bytes or not, integers that are 1, multiples of 16, or longer than 32 bits.
"""

from typing import Any

import torch
from torch import Tensor

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
        kinds = (*constants.values(), *map(_kind, known.values()))
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
        if found is not None:
            found[self._grid](*args)
            return
        assert given.keys() == self._places.keys(), f"expected {[*self._places]}, got {[*given]}"
        found = self._kernel[self._grid](*args, num_warps=self._warps, enable_fp_fusion=False)
        if found is not None:  # the interpreter compiles nothing
            changing = self._kernel.do_not_specialize
            assert all(name in changing for name, value in given.items() if isinstance(value, int))
            self._found[key] = found


def _kind(value: Any) -> Any:
    """What Triton distinguishes in an argument."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return value == 1, value % 16 == 0, value.bit_length() < 32
    return type(value)
