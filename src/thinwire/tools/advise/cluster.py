"""What ranks work with: the links between them, and the kernels, copies and messages of one rank.

`machines.json` holds kernel times of committed records; `python tests/figures.py` writes it.
"""

import json
import platform
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from importlib import resources
from typing import Any

from thinwire.codecs import BlockInt, Cast, Codec, Lloyd, Trellis

# Of a full Ethernet frame of 1514 bytes TCP leaves 1448 to the sender, and for every second frame that comes in, an
# acknowledgement of 66 bytes goes out. Measured: 0.96 at 1 Gbit with two ranks, 0.90 at 100 Mbit with four.
PAYLOAD = 1448 / (1514 + 66 / 2)
RDMA_FROM = 100e9 / 8  # bytes per second; a faster link on NCCL counts as InfiniBand, which has no TCP headers
# Of one message. gloo's is half of the smallest all_reduce of two ranks in collectives_auto.json, wake-ups included;
# NCCL's are assumptions: run under torchrun to measure.
LATENCY_S = {"gloo": 0.3e-3, "nccl": 10e-6}
INSIDE_LATENCY_S = {"gloo": 0.3e-3, "nccl": 3e-6}
# gloo: torch and Python handle every message, and the system copies every byte (processor times of
# collectives_1gbit.json and collectives_100mbit.json).
BYTE_S = {"cpu": 0.65e-9, "cuda": 0.0}
MESSAGE_S = {"cpu": 0.15e-3, "cuda": 0.0}  # on a GPU they are part of sum_s
# Kernels of ranks that share a memory, and of ranks that take turns on its cores as well, over the same kernels alone:
# collectives_loopback.json, with two and four ranks on two cores, beside kernels_cpu_aarch64.json.
CROWD = 1.1
TURNS = 1.4
_STEMS = {BlockInt: "int", Lloyd: "lloyd", Trellis: "trellis"}  # of codecs' names, before their bits


@dataclass(frozen=True)
class LinkModel:
    """What a sender has, while it receives as much."""

    bytes_per_s: float  # of payload
    latency_s: float = 0.0  # from a message's last byte to the moment its receiver continues

    @classmethod
    def of_rate(
        cls, bytes_per_s: float, latency_s: float = 0.0, transport: str = "gloo", *, inside: bool = False
    ) -> "LinkModel":
        """A link by its nominal rate. NVLink and InfiniBand have no TCP headers."""
        without_tcp = transport == "nccl" and (inside or bytes_per_s >= RDMA_FROM)
        return cls(bytes_per_s * (1.0 if without_tcp else PAYLOAD), latency_s)


@dataclass(frozen=True)
class Cluster:
    """Ranks in nodes of `per_node`."""

    world: int
    per_node: int = 1
    across: LinkModel | None = None  # from a node to all others, shared by its ranks; None: there is one node
    inside: LinkModel | None = None  # from a rank to the others of its node; None: it is alone there
    transport: str = "nccl"

    @property
    def nodes(self) -> int:
        return self.world // self.per_node

    @property
    def has_levels(self) -> bool:
        """Whether there are several nodes of several ranks."""
        return 1 < self.nodes < self.world

    @property
    def node(self) -> "Cluster":
        return Cluster(self.per_node, self.per_node, inside=self.inside, transport=self.transport)

    @property
    def rail(self) -> "Cluster":
        """One rank of every node, while the others of its node send as much over the same link."""
        across = self.across and LinkModel(self.across.bytes_per_s / self.per_node, self.across.latency_s)
        return Cluster(self.nodes, 1, across=across, transport=self.transport)

    @property
    def ring_s(self) -> float:
        """The latency once around a ring, which enters every node once."""
        across = (self.nodes - 1) * self.across.latency_s if self.across else 0.0
        return across + ((self.world - self.nodes) * self.inside.latency_s if self.inside else 0.0)

    @property
    def latency_s(self) -> float:
        """The latency of the slowest link."""
        return max(link.latency_s if link else 0.0 for link in (self.across, self.inside))

    @property
    def sum_latency_s(self) -> float:
        """The latency of torch's all_reduce: twice around a ring, or up and down NCCL's tree where that is sooner."""
        if self.transport == "gloo":
            return 2 * (self.world - 1) * self.latency_s
        across = (self.nodes - 1).bit_length() * self.across.latency_s if self.across else 0.0
        inside = (self.per_node - 1) * self.inside.latency_s if self.inside else 0.0
        return 2 * min(self.ring_s, across + inside)


@dataclass(frozen=True)
class CodecSpeed:
    """Seconds per element."""

    encode: float
    decode: float
    wire: float  # of every further wire in a sum
    recode: float  # of one wire


@dataclass(frozen=True)
class Machine:
    """What one rank has to itself."""

    device: str  # "cpu": ranks are processes on gloo; "cuda": each has a GPU, on NCCL
    source: str  # where the figures come from
    copy_s: float  # of one fp32 element: 8 bytes of memory traffic
    codecs: Mapping[str, CodecSpeed] = field(repr=False)  # on fp32 elements
    call_s: float = 0.0  # the host's time per kernel of gloo
    message_s: float = 0.0  # the host's time per message sent or received
    byte_s: float = 0.0  # the processor's time for one byte sent and another received
    sum_s: float = 0.0  # on NCCL: what one of our collectives takes of the host in a step

    def speed(self, codec: Codec) -> CodecSpeed:
        """Of a codec, or of the measured one of its kind with the nearest number of bits."""
        like = str(codec)
        stem = _STEMS.get(type(codec), like)
        widths = {int(name.removeprefix(stem)): name for name in self.codecs if name.removeprefix(stem).isdigit()}
        if like not in self.codecs and isinstance(codec, BlockInt | Lloyd | Trellis) and widths:
            like = widths[min(widths, key=lambda bits: (abs(bits - codec.bits), -bits))]
        if like not in self.codecs and isinstance(codec, Cast):
            like = "bf16"
        if like in self.codecs:
            return self.codecs[like]
        once = self.copy_s * (4 + codec.wire_bytes(1 << 20) / (1 << 20)) / 8  # it reads and writes and does little else
        return CodecSpeed(once, once, once, once)

    def shared(self, ranks: int, cores: int) -> "Machine":
        """The same where `ranks` processes share `cores` cores and their memory; a GPU is not shared."""
        if self.device == "cuda" or ranks == 1:
            return self
        turns = max(1.0, ranks / cores)
        slower = turns * (CROWD if ranks <= cores else TURNS)
        speeds = {name: CodecSpeed(*(slower * s for s in astuple(speed))) for name, speed in self.codecs.items()}
        hosts = {name: turns * getattr(self, name) for name in ("call_s", "message_s", "byte_s")}
        return replace(self, copy_s=slower * self.copy_s, codecs=speeds, **hosts)


def recorded(device: str, architecture: str | None = None) -> Machine:
    """The machine of the committed record that stands for a device; for a CPU, of this one's architecture."""
    figures: dict[str, Any] = json.loads(resources.files(__package__).joinpath("machines.json").read_text())
    name = "cuda" if device == "cuda" else architecture or platform.machine()
    kept = figures.get(name, figures["x86_64"])
    speeds = {codec: CodecSpeed(*seconds) for codec, seconds in kept["codecs"].items()}
    sum_s = figures["nccl"]["sum_s"] if device == "cuda" else 0.0
    times = {"call_s": kept["call_s"], "message_s": MESSAGE_S[device], "byte_s": BYTE_S[device]}
    return Machine(device, kept["source"], kept["copy_s"], speeds, **times, sum_s=sum_s)
