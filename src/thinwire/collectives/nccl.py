"""NCCL's own functions, on the communicator of a torch group.

[Note: Direct] torch puts a work, two events and notes for its watchdog and flight recorder around every message, which
costs the host about as much as NCCL itself takes. So the messages of programs (programs.py) are given to NCCL directly,
on the group's own communicator and the current stream; NCCL keeps them in order with torch's. What torch's watchdog
would do for them is done by watchdog.py. Where torch is told to treat errors or communicators in another way than it
usually does, and where its library cannot be reached, torch sends them.
"""

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.errors import CollectiveError
from thinwire.kernels.tape import COMMUNICATOR, Entry, address_of, writing

_BYTES = 1  # NCCL's number for bytes without a sign
_IN_PROGRESS = 7  # and for what is no error
_VERB = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_SIGNATURES: dict[str, Any] = {
    "ncclAllGather": _VERB,
    "ncclAlltoAll": _VERB,
    "ncclCommGetAsyncError": (ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)),
}
_ENDS = ("", "1", "3")  # torch ends the process after an error
_OFF = ("", "0")
_BLOCKING = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
# What torch is told as a rule, also by names of old; with anything else it sends the messages.
_USUAL = {
    "TORCH_NCCL_USE_COMM_NONBLOCKING": _OFF,
    **dict.fromkeys(_BLOCKING, _OFF),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": _ENDS,
    "NCCL_ASYNC_ERROR_HANDLING": _ENDS,
}


class Direct:
    """The messages of one group on NCCL; each says whether NCCL took it, or torch has to send it."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, verbs: dict[str, Callable[..., int]]) -> None:
        self._communicator = group._get_backend(device)._comm_ptr  # type: ignore[attr-defined]
        self._index = device.index
        self._gather = verbs["ncclAllGather"]
        self._to_all = verbs["ncclAlltoAll"]
        self._ask_error = verbs["ncclCommGetAsyncError"]
        self.aborting = threading.Lock()  # held while the communicator is aborted, which frees it

    def all_gather(self, whole: Tensor, own: Tensor) -> bool:
        """See RowTransport."""
        return self._start(self._gather, own, whole, own.numel())

    def all_to_all(self, came: Tensor, sent: Tensor, world: int) -> bool:
        """See RowTransport."""
        return self._start(self._to_all, sent, came, sent.numel() // world)

    def error(self) -> int:
        """NCCL's number for what went wrong since, as when the connection to a rank that died was closed; 0: nothing.

        In any thread, as torch's watchdog asks for it.
        """
        code = 0
        if self.aborting.acquire(blocking=False):
            try:
                with torch.cuda.device(self._index), contextlib.suppress(RuntimeError):  # of a group that has ended
                    communicator = self._communicator()
                    code = self._state(communicator) if communicator else 0
            finally:
                self.aborting.release()
        return 0 if code == _IN_PROGRESS else code

    def _state(self, communicator: int) -> int:
        found = ctypes.c_int()
        self._ask_error(communicator, ctypes.byref(found))
        return found.value

    def communicator(self) -> int:
        """NCCL's for the current device; 0 where torch has to send, as from another than that of the tensors."""
        found: int = self._communicator() if torch._C._cuda_getDevice() == self._index else 0
        return found

    def _start(self, verb: Callable[..., int], source: Tensor, target: Tensor, nbytes: int) -> bool:
        communicator = self.communicator()
        if not communicator:
            return False
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        code = verb(source.data_ptr(), target.data_ptr(), nbytes, _BYTES, communicator, stream)
        while code == _IN_PROGRESS:  # torch may make communicators that do not block unasked: not on the stream yet
            code = self._state(communicator)
        check_started(code)
        tape = writing.get()
        if tape is not None:
            message = Entry(address_of(verb), 0, (0, 0), 0, 0, (0, 0, nbytes, 0, address_of(self._ask_error)))
            tape.write(message, [(0, source), (1, target), (3, COMMUNICATOR)])
        return True


def host_waits() -> bool:
    """Whether torch was told that the host waits in every call; it then ends no process."""
    return any(os.environ.get(name, "") not in _OFF for name in _BLOCKING)


def check_started(code: int) -> None:
    """Raise where NCCL took no message."""
    if code:
        raise dist.DistBackendError(f"NCCL could not start a message: error {code}; NCCL_DEBUG=WARN tells more")


def direct(group: dist.ProcessGroup, device: torch.device) -> Direct | None:
    """None where torch has to send the messages of this group."""
    sender = os.environ.get("THINWIRE_NCCL") or "direct"
    if sender not in ("direct", "torch"):
        raise CollectiveError(f"THINWIRE_NCCL must be direct or torch, got {sender!r}")
    config = getattr(getattr(group._get_backend(device), "options", None), "config", None)
    usual = all(os.environ.get(name, "") in values for name, values in _USUAL.items())
    if sender == "torch" or not usual or getattr(config, "blocking", None) == 0:
        return None
    if not hasattr(group._get_backend(device), "_comm_ptr"):
        return None
    verbs = _verbs()
    return None if verbs is None else Direct(group, device, verbs)


@functools.cache
def _verbs() -> dict[str, Any] | None:
    """Those of the NCCL that torch itself uses, from 2.28 on; None where they cannot be reached."""
    try:
        library = ctypes.CDLL("libtorch_cuda.so", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        found = {name: getattr(library, name) for name in _SIGNATURES}
    except (OSError, AttributeError):
        return None
    for name, verb in found.items():
        verb.argtypes = _SIGNATURES[name]
        verb.restype = ctypes.c_int
    return found
