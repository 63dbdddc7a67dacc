"""Kernel dispatch: which backend serves a tensor.

Triton serves CUDA tensors, C serves CPU tensors, and the reference in plain torch serves any. To add a backend: write
the functions of `schema.Backend`, including `unavailable()` and `serves(device)`, in a module or a package, and add it
to `BACKENDS`, fastest first. tests/test_kernels.py then compares it with the reference byte for byte.
"""

import contextlib
import os
import warnings
from collections.abc import Iterator
from functools import lru_cache

import torch

from thinwire.errors import BackendError
from thinwire.kernels import cpu, reference, triton
from thinwire.kernels.schema import Backend
from thinwire.wire import CastVariant, Format, Kind

BACKENDS: dict[str, Backend] = {"triton": triton, "cpu": cpu, "reference": reference}
_requested = os.environ.get("THINWIRE_BACKEND") or "auto"  # an empty variable counts as unset
_said: set[str] = set()  # device types whose fallback to the reference was announced


def select(device: torch.device, what: Format | torch.dtype | None = None) -> Backend:
    """The backend for tensors on `device`: the requested one, or for "auto" the fastest that can run.

    what: a wire format, or a dtype. If only the reference supports it, the reference serves it, whatever was requested.
    """
    if what is not None and _needs_reference(what, device):
        return reference
    if _requested != "auto":
        return _named(_requested, device)
    for name, backend in BACKENDS.items():
        if backend.serves(device) and backend.unavailable() is None:
            if name == "reference":
                _say_once(device)
            return backend
    raise BackendError(f"no backend serves {device}: {_reasons(device)}")


@lru_cache(maxsize=1024)
def _needs_reference(what: Format | torch.dtype, device: torch.device) -> bool:
    """Whether only the reference supports it: doubles, topk wires, long Lloyd blocks, and e4m3 on GPUs that lack it."""
    if isinstance(what, torch.dtype):
        return what == torch.float64
    if what.kind == Kind.CAST and what.variant == CastVariant.E4M3 and device.type == "cuda":
        return torch.cuda.get_device_capability(device) < (8, 9)
    is_long = what.kind in (Kind.LLOYD, Kind.TRELLIS) and what.block > 1024  # C has no room for it on its stack
    return is_long or what.kind == Kind.TOPK or what.bits == 64


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Inside the `with` block, every kernel of this process runs on the backend `name`, or raises.

    On NCCL, calls of a kind that was made before keep the kernels of the first one.
    The names are those of `BACKENDS` ("triton", "cpu", "reference"), and "auto" for the fastest that can run. The
    environment variable THINWIRE_BACKEND sets the default. Example: with thinwire.use_backend("cpu"): ...
    """
    global _requested
    _check_name(name)
    before, _requested = _requested, name
    try:
        yield
    finally:
        _requested = before


def _named(name: str, device: torch.device) -> Backend:
    _check_name(name)
    why = _why_not(BACKENDS[name], device)
    if why is not None:
        raise BackendError(f"backend={name!r} was requested but {why}; use backend='auto' to take what runs here")
    return BACKENDS[name]


def _check_name(name: str) -> None:
    if name != "auto" and name not in BACKENDS:
        raise BackendError(f"unknown backend {name!r}; known: auto, {', '.join(BACKENDS)}")


def _why_not(backend: Backend, device: torch.device) -> str | None:
    if not backend.serves(device):
        return f"it does not serve {device.type} tensors"
    return backend.unavailable()


def _reasons(device: torch.device) -> str:
    whys = {name: _why_not(backend, device) for name, backend in BACKENDS.items()}
    return "; ".join(f"{name}: {why}" for name, why in whys.items() if why is not None)


def _say_once(device: torch.device) -> None:
    if device.type not in _said:
        _said.add(device.type)
        served = f"thinwire: {device.type} tensors are served by the plain torch reference, which is slow"
        warnings.warn(f"{served} ({_reasons(device)})", RuntimeWarning, stacklevel=4)


def flat(x: torch.Tensor) -> torch.Tensor:
    """x as one contiguous row, as kernels expect it; copied only if it is not contiguous."""
    if x.is_contiguous() and not x.is_neg():
        return x if x.dim() == 1 else x.detach().view(-1)
    return x.detach().resolve_neg().contiguous().view(-1)
