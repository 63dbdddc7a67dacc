"""What is compared: the ways gradients can travel on a cluster, and what each loses.

Errors are those of Gaussian numbers, independent on all ranks. Real gradients have longer tails, which rotated codecs
(lloyd) do not feel and int8 does: docs/reference/codecs.md has both.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thinwire.codecs import BlockInt, Cast, Codec, Identity
from thinwire.collectives.hierarchical import fewest_roundings
from thinwire.integrations import choice
from thinwire.tools.advise.links import Cluster

CODECS = ("bf16", "int8", "lloyd4", "lloyd2", "lloyd1")
INSIDE: tuple[Codec, ...] = (Cast("bf16"), BlockInt(8))  # of a node, where the link is fast
NARROW = {torch.bfloat16: Cast("bf16"), torch.float16: Cast("fp16"), torch.float32: Identity()}
BF16_HOOK = (
    "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks; "
    "model.register_comm_hook(None, default_hooks.bf16_compress_hook)"
)
_SMALL = 8  # ranks; beyond, one_shot sends far too much
_FEW = 4  # bits; from there on nothing is added to a codec
_NUMEL = 1 << 16  # of the numbers that are encoded: the error is known to about 1 %


@functools.lru_cache(maxsize=256)
def omega(codec: Codec) -> float:
    """The share of its squares that one rounding of a Gaussian loses, by the codec itself."""
    if isinstance(codec, Identity):
        return 0.0
    x = torch.randn(_NUMEL, generator=torch.Generator().manual_seed(0))
    wire = torch.empty(codec.wire_bytes(_NUMEL), dtype=torch.uint8)
    back = torch.empty(_NUMEL)
    codec.encode(x, wire)
    codec.decode(wire, back)
    return float((back - x).square().sum() / x.square().sum())


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
        return choice.feedback_of("auto", self.codec, family) or ""

    def weighs(self, family: str) -> bool:
        """Whether compress_ddp weighs gradients by Adam's moments: below 4 bits."""
        return self.across is None and family == "adaptive" and choice.bits_of(self.codec) < _FEW

    def error(self, cluster: Cluster, dtype: torch.dtype) -> float:
        """RMS of what a sum loses over RMS of the sum: its roundings, each of which loses omega of the squares."""
        if cluster.world == 1:
            return 0.0
        if self.algorithm == "ring":
            kept = self.codec if self.compresses else NARROW[dtype]
            return math.sqrt(omega(kept) * (self._additions(cluster) + self.compresses))
        if self.across is not None:  # a rounding inside, those of the sum across, and another inside
            sums = _roundings(fewest_roundings(cluster.nodes)) * omega(self.across)
            return math.sqrt(2 * omega(self.codec) + sums)
        return math.sqrt(_roundings(self.algorithm) * omega(self.codec))

    def _additions(self, cluster: Cluster) -> float:
        """Sums in a narrow dtype are rounded at every addition: that of k ranks holds k/W of the squares.

        Round a ring all ranks are added one after the other; in a tree those of a node are, and every level adds all.
        """
        chain = cluster.per_node if cluster.sums_in_tree else cluster.world
        return (chain + 1) / 2 - 1 / chain + (cluster.levels if cluster.sums_in_tree else 0)

    def how(self, cluster: Cluster) -> str:
        """The line of code that does it."""
        if self.algorithm == "ring":
            return BF16_HOOK if self.compresses else "plain DDP, no hook"
        if self.algorithm == "hierarchical":
            device = "cuda" if cluster.transport == "nccl" else "cpu"
            mesh = f'torch.distributed.init_device_mesh("{device}", ({cluster.nodes}, {cluster.per_node}))'
            return f'thinwire.compress_ddp(model, "{self.across}", mesh={mesh}, inside="{self.codec}")'
        usual = self.algorithm == fewest_roundings(cluster.world)
        other = "" if usual else f', algorithm="{self.algorithm}"'
        return f'thinwire.compress_ddp(model, "{self.codec}"{other})'

    def __str__(self) -> str:
        if self.algorithm == "hierarchical":
            return f"{self.codec} inside / {self.across} across (hierarchical)"
        return f"{self.codec} (ring)" if self.algorithm == "ring" else f"{self.codec} {self.algorithm}"


def _roundings(algorithm: str) -> int:
    """Of a sum over ranks: one, or two whatever the world."""
    return 1 if algorithm == "one_shot" else 2


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
        if cluster.has_levels and choice.bits_of(across) <= choice.bits_of(inside)
    ]
    return [PLAIN, *narrow, *flat, *levels]
