"""How deep calls are: thinwire's Python frames between a verb, or DDP's hook, and the message it sends."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest import mock

import pytest
import torch

import thinwire
from ranks import RankPool
from replicas import Given, Group, Shapes, backward, draw, wrap
from rowed import RowedTransport, anew, rowed
from thinwire.collectives import channel, transport
from thinwire.collectives.work import serving

PACKAGE = str(Path(thinwire.__file__).parent)
SHAPES: Shapes = {"w": (40, 50), "b": (40,)}
MOST_ON_GLOO = 12
MOST_AT_FIRST = 12  # on a stream
MOST_ON_STREAM = 8


def frames() -> int:
    """Thinwire's functions on this thread's stack."""
    count, frame = 0, sys._getframe()
    while frame is not None:
        count += frame.f_code.co_filename.startswith(PACKAGE)
        frame = frame.f_back
    return count


class Looked:
    """A process group that notes how deep its messages are; in a pipeline, with what put the operation there."""

    def __init__(self, group: Group, queued: list[int], sent: list[int]) -> None:
        self._group = group
        self._queued = queued
        self._sent = sent

    def send(self, *how: Any) -> Any:
        in_pipeline = hasattr(serving, "pipeline")
        self._sent.append(frames() + (self._queued[-1] if in_pipeline else 0))
        return self._group.send(*how)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


@contextlib.contextmanager
def looking() -> Iterator[list[int]]:
    """The frames of all sends."""
    queued: list[int] = []
    sent: list[int] = []
    group_of: Any = transport.Transport.group.fget
    looked = property(lambda link: Looked(group_of(link), queued, sent))

    class Inbox(SimpleQueue[Any]):
        def put(self, item: Any, *how: Any) -> None:
            queued.append(frames())
            super().put(item, *how)

    with (
        anew(),
        mock.patch.object(channel, "SimpleQueue", Inbox),
        mock.patch.object(transport.PairTransport, "group", looked),
    ):
        yield sent


def steps(group: Group, algorithm: str) -> Iterator[Callable[[], Any]]:
    """A call of all_reduce, and a step of a DDP model with one bucket."""
    how: Any = {"group": group, "codec": "int8", "algorithm": algorithm, "step": 0}
    yield partial(thinwire.all_reduce, torch.ones(1000), **how)
    model = wrap(Given(SHAPES), group, cap=4096)
    thinwire.compress_ddp(model, "lloyd2", feedback="classic", algorithm=algorithm, measure_every=0)
    yield lambda: backward(model, draw(group.rank(), 0, SHAPES))


def deepest(group: Group, algorithm: str, noted: list[int]) -> list[tuple[int, int]]:
    """The most frames of the first call or step, in which ranks compare calls, and of later ones."""
    found = []
    for step in steps(group, algorithm):
        depths = []
        for _ in range(3):
            noted.clear()
            step()
            depths.append(max(noted))
        found.append((depths[0], max(depths[1:])))
    return found


def on_gloo(group: Group, algorithm: str) -> list[tuple[int, int]]:
    with looking() as sent:
        return deepest(group, algorithm, sent)


def on_stream(group: Group, algorithm: str) -> list[tuple[int, int]]:
    """The same of programs; the transport's own function counts as one frame."""
    noted: list[int] = []

    def note(verb: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*how: Any) -> Any:
            noted.append(1 + frames())
            return verb(*how)

        return noting

    verbs = {name: note(getattr(RowedTransport, name)) for name in ("all_to_all", "all_gather", "agree")}
    with rowed(), mock.patch.multiple(RowedTransport, **verbs):
        return deepest(group, algorithm, noted)


@pytest.mark.parametrize("algorithm", ["one_shot", "two_phase"])
def test_few_frames_lead_to_a_message_on_gloo(ranks: RankPool, algorithm: str) -> None:
    for found in ranks(2).run(on_gloo, algorithm):
        assert all(max(first, later) <= MOST_ON_GLOO for first, later in found), found


@pytest.mark.parametrize("algorithm", ["one_shot", "two_phase"])
def test_few_frames_lead_to_a_message_on_a_stream(ranks: RankPool, algorithm: str) -> None:
    for found in ranks(2).run(on_stream, algorithm):
        assert all(first <= MOST_AT_FIRST and later <= MOST_ON_STREAM for first, later in found), found
