"""What is compared: the ways gradients can travel on a cluster."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thinwire.codecs import BlockInt, Cast, Codec, Identity
from thinwire.collectives.reducers import fewest_roundings
from thinwire.integrations import policy
from thinwire.tools.advise import loss
from thinwire.tools.advise.links import Cluster

CODECS = ("bf16", "int8", "lloyd4", "lloyd2", "lloyd1")
INSIDE: tuple[Codec, ...] = (Cast("bf16"), BlockInt(8))  # of a node, where the link is fast
NARROW = {torch.bfloat16: Cast("bf16"), torch.float16: Cast("fp16"), torch.float32: Identity()}
_SMALL = 8  # ranks; beyond, one_shot sends far too much


@dataclass(frozen=True)
class SumScheme:
    """A codec and an algorithm; in a hierarchy `codec` serves inside a node, `across` between nodes."""

    algorithm: str  # "ring" is torch's own all_reduce (NCCL's may be a tree), in `codec`, which is "none" or a cast
    codec: Codec
    across: Codec | None = None

    @property
    def compresses(self) -> bool:
        """Whether anything is rounded on the way."""
        return not isinstance(self.codec, Identity)

    @property
    def narrowest(self) -> Codec:
        return self.across or self.codec

    def feedback(self, family: str) -> str:
        """What compress_ddp adds by itself for optimisers of a family; sums over a mesh have none."""
        if self.algorithm in ("ring", "hierarchical"):
            return ""
        return policy.feedback_of("auto", self.codec, family) or ""

    def error(self, cluster: Cluster, dtype: torch.dtype) -> float:
        """RMS of what a sum loses over RMS of the sum, for Gaussian gradients."""
        if cluster.world == 1:
            return 0.0
        if self.algorithm == "ring":
            kept = self.codec if self.compresses else NARROW[dtype]
            return math.sqrt(loss.of_plain(kept, cluster, cast=self.compresses))
        if self.across is not None:
            return math.sqrt(loss.of_hierarchy(self.codec, self.across, cluster.nodes))
        return math.sqrt(loss.of_sum(self.codec, self.algorithm))

    def how(self, cluster: Cluster) -> str:
        """The line of code that does it."""
        if self.algorithm == "ring":
            hook = "model.register_comm_hook(None, default_hooks.bf16_compress_hook)"
            return f"{hook}, torch's own" if self.compresses else "plain DDP, no hook"
        if self.algorithm == "hierarchical":
            device = "cuda" if cluster.transport == "nccl" else "cpu"
            mesh = f'mesh = init_device_mesh("{device}", ({cluster.nodes}, {cluster.per_node})): nodes, ranks of a node'
            return f'thinwire.compress_ddp(model, "{self.across}", mesh=mesh, inside="{self.codec}"), with {mesh}'
        return f'thinwire.compress_ddp(model, "{self.codec}", algorithm="{self.algorithm}")'

    def __str__(self) -> str:
        if self.algorithm == "hierarchical":
            return f"{self.codec} inside / {self.across} across (hierarchical)"
        return f"{self.codec} (ring)" if self.algorithm == "ring" else f"{self.codec} {self.algorithm}"


PLAIN = SumScheme("ring", Identity())


def candidates(cluster: Cluster, codecs: Sequence[Codec], dtype: torch.dtype) -> list[SumScheme]:
    """No compression, torch's bf16, thinwire's codecs: flat, and in a hierarchy where there are levels."""
    narrow = [SumScheme("ring", Cast("bf16"))] if dtype == torch.float32 else []
    used = [codec for codec in codecs if not isinstance(codec, Identity)]
    algorithms = [fewest_roundings(cluster.world)]  # what compress_ddp takes by itself
    if "one_shot" not in algorithms and cluster.world <= _SMALL:
        algorithms.append("one_shot")
    flat = [SumScheme(algorithm, codec) for codec in used for algorithm in algorithms]
    levels = [
        SumScheme("hierarchical", inside, across)
        for inside in INSIDE
        for across in used
        if cluster.has_levels and policy.bits_of(across) <= policy.bits_of(inside)
    ]
    return [PLAIN, *narrow, *flat, *levels]
