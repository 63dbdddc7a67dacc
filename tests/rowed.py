"""A transport of rows (as collectives.transport.StreamTransport) between CPU tensors: programs without a GPU.

Rows travel over gloo, blocking. `with rowed(group)` the group's calls run as programs, as they do on NCCL.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives import channel, groups, transport

CPU = torch.device("cpu")


class RowedTransport(transport.PairTransport):
    """What StreamTransport does, by gloo; `log` has (verb, bytes) of every message."""

    on_stream = True

    def __init__(self, group: dist.ProcessGroup, sequences: Iterator[int], device: torch.device) -> None:
        super().__init__(group, sequences, device)
        self.log: list[tuple[str, int]] = []

    def all_to_all(self, received: Tensor, sent: Tensor, *_: Any) -> None:  # type: ignore[override]
        self.log.append(("all_to_all", sent.numel()))
        dist.all_to_all_single(received, sent, group=self.group)

    def all_gather(self, whole: Tensor, own: Tensor, *_: Any) -> None:  # type: ignore[override]
        self.log.append(("all_gather", whole.numel()))
        groups.all_gather_single(whole, own.clone(), group=self.group)

    def broadcast(self, whole: Tensor, _: Tensor, source: int) -> None:
        self.log.append(("broadcast", whole.numel()))
        dist.broadcast(whole, group=self.group, group_src=source)

    def exchange_rows(self, received: Tensor, sent: Tensor, received_R: Sequence[int], sent_R: Sequence[int]) -> None:
        self.log.append(("exchange", sent.numel()))
        dist.all_to_all_single(received, sent, list(received_R), list(sent_R), group=self.group)


@contextlib.contextmanager
def anew() -> Iterator[None]:
    """Nothing is known about any group, not what other tests, which change how messages are cut, have planned."""
    with mock.patch.object(channel, "_groups", type(channel._groups)()):
        yield


@contextlib.contextmanager
def rowed() -> Iterator[None]:
    """Nothing is known about any group, and calls run programs; what was known comes back at the end."""
    with anew(), mock.patch.object(transport, "transport", RowedTransport):
        yield
