"""The fixed cost of small messages: the codec's part of a two-phase all_reduce, replayed as one CUDA graph."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire.codecs import codec
from thinwire.kernels import Backend
from thinwire.tools.bench import copies, timing
from thinwire.tools.bench.copies import KernelCase
from thinwire.tools.bench.record import Row
from thinwire.tools.bench.timing import Call, Effort

CODECS = ("int8", "int4", "lloyd4")
NUMELS = (4096, 65536, 262144)
REPLAYS = 50  # of a graph in a row


@dataclass(frozen=True, kw_only=True)
class PathCase(KernelCase):
    """Encode a message, recode a shard of it from all ranks, decode a message."""

    part: str = "replay"
    op: str = "codec_path"

    @property
    def shard(self) -> int:
        """Elements of the longest shard."""
        return -(-self.numel // self.world)

    @property
    def minimal_bytes(self) -> int:
        message, shard = (codec(self.name).wire_bytes(numel, self.dtype) for numel in (self.numel, self.shard))
        return 2 * (self.numel * self.dtype.itemsize + message) + (self.world + 1) * shard

    def measure(self, backend: Backend, effort: Effort, x: Tensor) -> Row:
        """The time of a replay; `launched_ms` is the same without a graph."""
        launched = timing.launched_ms(self.prepare(x), REPLAYS, self.device)
        replays = replace(effort, launches=REPLAYS)
        columns = copies.beside(x, self.prepare, self.minimal_bytes, replays, cold=False, wrap=timing.captured)
        return {**columns, "launched_ms": launched}

    def prepare(self, x: Tensor) -> Call:
        """The three calls on x, with their other buffers made and filled. The step is known: no header is read."""
        chosen = codec(self.name)
        wire = x.new_empty(chosen.wire_bytes(x.numel(), x.dtype), dtype=torch.uint8)
        wires_WN = x.new_empty(self.world, chosen.wire_bytes(self.shard, x.dtype), dtype=torch.uint8)
        reduced = torch.empty_like(wires_WN[0])
        out = torch.empty_like(x)
        for own in wires_WN:
            chosen.encode(x[: self.shard], own, step=0)

        def path() -> None:
            chosen.encode(x, wire, step=0)
            chosen.recode(wires_WN, reduced, self.shard, scale=1 / self.world, step=0, dtype=x.dtype, trusted=True)
            chosen.decode(wire, out, step=0)

        path()  # compiles what is compiled late
        return path
