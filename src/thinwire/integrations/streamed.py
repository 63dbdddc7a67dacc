"""A bucket of gradients averaged by a program on a stream of the GPU: the same launches at every step.

[Note: Aside] The numbers of small lanes lie here and there in the bucket. One launch copies them out of it, puts zeros
in their place, and forgets what a lane that bridges them remembers there; one puts them back at the end.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.collectives.message import Message
from thinwire.collectives.workspaces import Region, Workspace
from thinwire.integrations.lanes import BucketLane
from thinwire.integrations.stats import Tally
from thinwire.kernels.rows import Bad, Memory


class StreamedBucket:
    """A program (collectives.programs) on the bucket's buffer. `sizes`: the elements of its parameters, in order."""

    def __init__(
        self, message: Message, lanes: Sequence[BucketLane], carries: Sequence[Any], sizes: Sequence[int]
    ) -> None:
        self._program = message.program
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
        # The numbers of small lanes, out of the bucket: all of them, and each lane's.
        self._aside: Region[tuple[Tensor, Sequence[Tensor]]] = Region(
            sum(lengths) * message.dtype.itemsize,
            lambda scratch: ((whole := scratch.view(message.dtype)), whole.split(lengths)),
            self._program.scratch_end,
        )
        self._kernels: Any = kernels.select(device)
        self._note = torch.empty(0, device=device)  # which chunks were not finite
        self._chunks = 0  # that were averaged
        self._number = 0  # of the call that runs
        self.is_new = True  # until it has run

    def begin(self, tally: Tally) -> None:
        """A call of it comes next, whose chunks that are not finite `tally` counts."""
        if self.is_new:
            self._note = tally.new_note(self._note.device)
        self._number = self._chunks % (1 << 30) + 1
        self._chunks += self._program.count

    def __call__(self, space: Workspace, tensors: Sequence[Tensor], step: int) -> None:
        """See Program."""
        (buffer,) = tensors
        whole, parts = (None, ()) if self._index is None else self._aside.views(space)
        if whole is not None:
            kept = None if self._gaps is None else self._carries[0].memories[0]
            self._kernels.set_aside(buffer, self._index, whole, kept, self._gaps)
        xs = self._numbers(buffer, parts)
        self._program(space, xs, step, self._memories(xs), Bad(self._note, self._number))
        for lane, x in zip(self._lanes, xs, strict=True):
            if not lane.aside and len(lane.stretches) > 1:
                parts = [buffer[begin:end] for begin, end in lane.stretches]
                torch._foreach_copy_(parts, x.split([part.numel() for part in parts]))
        if whole is not None:
            self._kernels.put_back(buffer, self._index, whole)

    def _numbers(self, buffer: Tensor, aside: Sequence[Tensor]) -> list[Tensor]:
        """The numbers of every lane, each in one piece."""
        found = []
        apart = iter(aside)
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
        pairs = zip(self._carries, xs, strict=True)
        return [None if carry is None else Memory(carry.memories[0], x, carry.memories[1]) for carry, x in pairs]
