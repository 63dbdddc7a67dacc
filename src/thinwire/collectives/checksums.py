"""Checksums of messages: a bit that flips on the way is an error that names the sender.

On gloo every message of wires is followed by one with a CRC-32 of each of its pieces, where
THINWIRE_CHECKSUM=1 or THINWIRE_DEBUG=1 asks for it.
"""

import os
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import WireError

_PIECE = 1 << 16  # bytes under one checksum


def wanted() -> bool:
    """Whether the environment asks for checksums."""
    return any(os.environ.get(name, "0") not in ("", "0") for name in ("THINWIRE_CHECKSUM", "THINWIRE_DEBUG"))


def sums_of(message: Tensor) -> Tensor:
    """The checksums of a message's pieces."""
    pieces = message.detach().contiguous().view(-1).view(torch.uint8).split(_PIECE)
    return torch.tensor([zlib.crc32(memoryview(piece.numpy())) for piece in pieces])


def room_for(message: Tensor) -> Tensor:
    """What takes the checksums of a message."""
    return torch.empty(max(1, -(-message.numel() * message.itemsize // _PIECE)), dtype=torch.int64)


@dataclass(frozen=True)
class Checked:
    """A message that is compared with its checksums when both have come."""

    works: tuple[Any, Any]  # of the message and of its checksums
    message: Tensor
    sums: Tensor
    sender: int

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        wrong = (sums_of(self.message) != self.sums).nonzero().flatten().tolist()
        if wrong:
            total = self.message.numel() * self.message.itemsize
            begin = wrong[0] * _PIECE
            raise WireError(
                f"a message of {total} bytes from rank {self.sender} was damaged on the way: bytes {begin} to "
                f"{min(begin + _PIECE, total)} do not have their checksum; see to that rank's memory and network"
            )
