"""What sums lose: the error of one rounding, taken from the codec itself, and how many of them an algorithm makes.

Errors are squared and relative: of Gaussian numbers, independent on all ranks. Real gradients have longer tails, which
rotated codecs (lloyd) do not feel and int8 does: docs/codecs.md has both.
"""

import functools

import torch

from thinwire.codecs import Codec, Identity
from thinwire.collectives.reducers import fewest_roundings
from thinwire.tools.advise.links import Cluster

_NUMEL = 1 << 16  # of the numbers that are encoded: the error is known to about 1 %


@functools.lru_cache(maxsize=256)
def omega(codec: Codec) -> float:
    """The share of its squares that one rounding of a Gaussian loses."""
    if isinstance(codec, Identity):
        return 0.0
    x = torch.randn(_NUMEL, generator=torch.Generator().manual_seed(0))
    wire = torch.empty(codec.wire_bytes(_NUMEL), dtype=torch.uint8)
    back = torch.empty(_NUMEL)
    codec.encode(x, wire)
    codec.decode(wire, back)
    return float((back - x).square().sum() / x.square().sum())


def of_sum(codec: Codec, algorithm: str) -> float:
    """Of a sum over ranks: one rounding, or two whatever the world."""
    return omega(codec) * (1 if algorithm == "one_shot" else 2)


def of_hierarchy(inside: Codec, across: Codec, nodes: int) -> float:
    """A rounding inside, those of the sum across, and another inside."""
    return 2 * omega(inside) + of_sum(across, fewest_roundings(nodes))


def of_plain(codec: Codec, cluster: Cluster, *, cast: bool) -> float:
    """Sums in a narrow dtype, rounded at every addition: that of k ranks holds k/W of the squares. Casts come first.

    Round a ring all ranks are added one after the other; in a tree those of a node are, and every level adds all.
    """
    chain = cluster.per_node if cluster.sums_in_tree else cluster.world
    levels = cluster.levels if cluster.sums_in_tree else 0
    return omega(codec) * ((chain + 1) / 2 - 1 / chain + levels + cast)
