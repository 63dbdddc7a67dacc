"""A bucket of gradients averaged by a program on a stream of the GPU: the same launches at every step.

[Note: Aside] The numbers of small lanes lie here and there in the bucket. One launch copies them out of it, puts zeros
in their place, and forgets what a lane that bridges them remembers there; one puts them back at the end.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.collectives.call import Call
from thinwire.collectives.message import Message
from thinwire.collectives.programs import SumProgram
from thinwire.collectives.workspaces import Region, Workspace
from thinwire.integrations.lanes import BucketLane
from thinwire.integrations.stats import Tally
from thinwire.kernels.rows import Bad, Memory

Future = torch.futures.Future


class StreamedBucket:
    """`sizes`: the elements of the bucket's parameters, in order."""

    def __init__(
        self,
        message: Message,
        program: SumProgram,
        lanes: Sequence[BucketLane],
        carries: Sequence[Any],
        sizes: Sequence[int],
    ) -> None:
        self._message = message
        self._program = program
        self._lanes = lanes
        self._carries = carries
        edges = [0, *itertools.accumulate(sizes)]
        places = [torch.arange(edges[i], edges[i + 1]) for lane in lanes if lane.aside for i in lane.members]
        device = message.channel.device
        self._index = torch.cat(places).to(device) if places else None
        starts = [0, *itertools.accumulate(piece.numel for piece in lanes[0].pieces)]
        gaps = [torch.arange(starts[i], starts[i + 1]) for i, p in enumerate(lanes[0].pieces) if p.name is None]
        self._gaps = torch.cat(gaps).to(device) if gaps and carries[0] is not None else None
        lengths = [lane.spec.numel for lane in lanes if lane.aside]
        cut = functools.partial(_cut, message.dtype, lengths)
        self._aside = Region(sum(lengths) * message.dtype.itemsize, cut, program.scratch_end)
        self._kernels: Any = kernels.select(device)
        self._first = True
        self._note = torch.empty(0)  # which chunks were not finite
        self._chunks = 0  # that were averaged
        self._number = 0  # of the call that runs

    def average(self, buffer: Tensor, output: Tensor, step: int, tally: Tally) -> "Future[Tensor]":
        """Average the bucket, whose numbers are `buffer`; the future holds `output`."""
        channel = self._message.channel
        site = Call(channel, self._message.text).site
        if self._first:
            self._note = tally.new_note(buffer.device)
        self._number = self._chunks % (1 << 30) + 1
        self._chunks += self._program.count
        work = channel.start(self, (buffer,), (), step, site, True, first=self._first)
        self._first = False
        assert work is not None
        return work.future_of(output)

    def __call__(self, space: Workspace, tensors: Sequence[Tensor], step: int) -> None:
        """See Program."""
        (buffer,) = tensors
        aside = self._aside.views(space) if self._index is not None else None
        if aside is not None:
            kept = None if self._gaps is None else self._carries[0].memories[0].tensor
            self._kernels.set_aside(buffer, self._index, aside.whole, kept, self._gaps)
        xs = self._numbers(buffer, aside)
        self._program(space, xs, step, self._memories(xs), Bad(self._note, self._number))
        for lane, x in zip(self._lanes, xs, strict=True):
            if not lane.aside and len(lane.stretches) > 1:
                parts = [buffer[begin:end] for begin, end in lane.stretches]
                torch._foreach_copy_(parts, x.split([part.numel() for part in parts]))
        if aside is not None:
            self._kernels.put_back(buffer, self._index, aside.whole)

    def _numbers(self, buffer: Tensor, aside: "_Aside | None") -> list[Tensor]:
        """The numbers of every lane, each in one piece."""
        found = []
        apart = iter(() if aside is None else aside.parts)
        for lane in self._lanes:
            if lane.aside:
                found.append(next(apart))
            elif len(lane.stretches) == 1:
                ((begin, end),) = lane.stretches
                found.append(buffer[begin:end])
            else:
                found.append(torch.cat([buffer[begin:end] for begin, end in lane.stretches]))
        return found

    def _memories(self, xs: Sequence[Tensor]) -> list[Memory | None] | None:
        if not any(self._carries):
            return None
        return [None if carry is None else _memory(carry, x) for carry, x in zip(self._carries, xs, strict=True)]


class _Aside(NamedTuple):
    """The numbers of small lanes, out of the bucket."""

    whole: Tensor
    parts: Sequence[Tensor]  # of each such lane


def _cut(dtype: torch.dtype, lengths: Sequence[int], scratch: Tensor) -> _Aside:
    whole = scratch.view(dtype)
    return _Aside(whole, whole.split(lengths))


def _kept(carries: Sequence[Any]) -> list[Any]:
    """The tensors of all memories; None of one that is no tensor."""
    memories = [memory for carry in carries if carry is not None for memory in carry.memories]
    return [memory.tensor for memory in memories if memory is not None]


def _memory(carry: Any, x: Tensor) -> Memory:
    kept, mean = carry.memories
    return Memory(kept.tensor, x, None if mean is None else mean.tensor)


def streamed(
    message: Message, lanes: Sequence[BucketLane], carries: Sequence[Any], sizes: Sequence[int]
) -> StreamedBucket | None:
    """The same launches at every step; None off a GPU's stream, and where something has none."""
    program = message.program
    if program is None or any(tensor is None for tensor in _kept(carries)):
        return None
    return StreamedBucket(message, program, lanes, carries, sizes)
