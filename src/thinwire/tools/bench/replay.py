"""The fixed cost of small messages: the codec's part of a two-phase all_reduce, replayed as one CUDA graph."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.kernels import Backend
from thinwire.tools.bench import copies, timing
from thinwire.tools.bench.copies import Effort
from thinwire.tools.bench.record import Row
from thinwire.tools.bench.timing import Call

OP = "codec_path"
CODECS = ("int8", "int4", "lloyd4")
NUMELS = (4096, 65536, 262144)


@dataclass(frozen=True)
class PathCase:
    """One row to be measured: encode a message, recode a shard of it from all ranks, decode a message."""

    codec: Codec
    numel: int
    ranks: int
    threads: int
    device: torch.device
    dtype: torch.dtype = torch.float32
    part: str = "replay"

    op = OP

    def __str__(self) -> str:
        return f"{self.op} {self.codec}, {self.numel} elements"

    @property
    def name(self) -> str:
        """In the column `codec`."""
        return str(self.codec)

    @property
    def world(self) -> int:
        """Wires that the recode reads."""
        return self.ranks

    @property
    def shard(self) -> int:
        """Elements of the longest shard."""
        return -(-self.numel // self.ranks)

    @property
    def minimal_bytes(self) -> int:
        """Each input byte read once, each output byte written once, by each of the three."""
        message, shard = (self.codec.wire_bytes(numel, self.dtype) for numel in (self.numel, self.shard))
        return 2 * (self.numel * self.dtype.itemsize + message) + (self.ranks + 1) * shard

    def backend(self, backend: Backend) -> str:
        """In the column `backend`."""
        return timing.name_of(backend)

    def measure(self, backend: Backend, effort: Effort, x: Tensor) -> Row:
        """Time columns: of a replay; `launched_ms` is the same without a graph."""
        few = replace(effort, launches=effort.replays, footprint=0)
        launched = timing.launched_ms(self.prepare(x), effort.replays, self.device)
        columns = copies.beside(x, self.prepare, self.minimal_bytes, few, wrap=timing.captured)
        return {**columns, "times_eager": None, "launched_ms": launched}

    def prepare(self, x: Tensor) -> Call:
        """The three calls on x, with their other buffers made and filled. The step is known: no header is read."""
        codec, shard, dtype = self.codec, self.shard, x.dtype
        wire = x.new_empty(codec.wire_bytes(x.numel(), dtype), dtype=torch.uint8)
        wires_WN = x.new_empty(self.ranks, codec.wire_bytes(shard, dtype), dtype=torch.uint8)
        reduced, out = torch.empty_like(wires_WN[0]), torch.empty_like(x)
        for own in wires_WN:
            codec.encode(x[:shard], own, step=0)

        def path() -> None:
            codec.encode(x, wire, step=0)
            codec.recode(wires_WN, reduced, shard, scale=1 / self.ranks, step=0, dtype=dtype, trusted=True)
            codec.decode(wire, out, step=0)

        path()  # compiles what is compiled late
        return path
