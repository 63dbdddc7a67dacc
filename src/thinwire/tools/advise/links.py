"""What connects the ranks: a link, and the cluster of nodes that links make up."""

from dataclasses import dataclass

# Of a full Ethernet frame of 1514 bytes TCP leaves 1448 to the sender, and for every second frame that comes in, an
# acknowledgement of 66 bytes goes out. Measured: 0.96 at 1 Gbit with two ranks, 0.90 at 100 Mbit with four.
PAYLOAD = 1448 / (1514 + 66 / 2)
RDMA_FROM = 100e9 / 8  # bytes per second; a faster link on NCCL counts as InfiniBand, which has no headers of TCP
TRANSPORTS = {"cpu": "gloo", "cuda": "nccl"}  # by device
# Of one message, where none is given. gloo's is half of the smallest all_reduce of two ranks in collectives_auto.json,
# wake-ups included; NCCL's are assumptions: run under torchrun to measure.
LATENCY_S = {"gloo": 0.3e-3, "nccl": 10e-6}
INSIDE_LATENCY_S = {"gloo": 0.3e-3, "nccl": 3e-6}


@dataclass(frozen=True)
class LinkModel:
    """What a sender has, while it receives as much."""

    bytes_per_s: float  # of payload
    latency_s: float = 0.0  # from a message's last byte to the moment its receiver goes on

    @classmethod
    def of_rate(cls, bytes_per_s: float, latency_s: float = 0.0, *, payload: float = PAYLOAD) -> "LinkModel":
        """A link by the rate it is sold by, of which `payload` is left to the sender."""
        return cls(bytes_per_s * payload, latency_s)


def payload_of(bytes_per_s: float, transport: str, inside: bool) -> float:
    """Of a link's rate what is left to the sender. NVLink and InfiniBand have no headers of TCP."""
    without_tcp = transport == "nccl" and (inside or bytes_per_s >= RDMA_FROM)
    return 1.0 if without_tcp else PAYLOAD


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
    def links(self) -> list[LinkModel]:
        return [link for link in (self.across, self.inside) if link is not None]

    @property
    def latency_s(self) -> float:
        """Of the slowest link."""
        return max((link.latency_s for link in self.links), default=0.0)

    @property
    def ring_latency_s(self) -> float:
        """Of an all_reduce round a ring of all ranks, twice."""
        return 2 * (self.world - 1) * self.latency_s

    @property
    def tree_latency_s(self) -> float:
        """Of an all_reduce up and down a tree: along the ranks of a node, and in a binary tree over nodes."""
        across = self.levels * self.across.latency_s if self.across else 0.0
        inside = (self.per_node - 1) * self.inside.latency_s if self.inside else 0.0
        return 2 * (across + inside)

    @property
    def levels(self) -> int:
        """The height of a binary tree over nodes."""
        return (self.nodes - 1).bit_length()

    @property
    def sums_in_tree(self) -> bool:
        """Whether torch's own all_reduce runs in a tree: NCCL's does where that has fewer latencies than a ring."""
        return self.transport == "nccl" and self.tree_latency_s < self.ring_latency_s
