"""The codec benchmark: how many bits a codec puts on the wire, and what they lose, on six distributions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from statistics import NormalDist
from typing import Annotated

import torch
from torch import Tensor

from benchmarks import clock, data
from benchmarks.command import MOST, Codecs, start, words
from thinwire import kernels
from thinwire.codecs import Codec, Lloyd, codec
from thinwire.tools.bench.record import Progress, Record, Row, collect
from thinwire.tools.cli import flags
from thinwire.tools.cli.bench import deliver
from thinwire.tools.cli.flags import Json, Quick, Words, count, option

CODECS = (
    *("none", "bf16", "fp16", "e4m3", "e5m2", "int8", "int6", "int5", "int4", "int4:block=32", "int3", "int2"),
    *("lloyd4", "lloyd4:block=256", "lloyd3", "lloyd2", "lloyd1", "lloyd1:block=1024"),
    *("trellis3", "trellis2", "trellis1"),
)
NUMEL = 1 << 22
QUICK_NUMEL = 1 << 18


@dataclass(frozen=True)
class CodecCase:
    distribution: str
    codec: Codec
    numel: int

    def __str__(self) -> str:
        return f"{self.distribution} {self.codec}"


def run(
    codecs: Sequence[str | Codec] = CODECS,
    distributions: Sequence[str] = tuple(data.DISTRIBUTIONS),
    numel: int = NUMEL,
    progress: Progress = iter,
) -> Record:
    """A record of kind "codec": wire bits and error of every codec on every distribution, on the CPU."""
    data.check(distributions)
    device = torch.device("cpu")
    backend = clock.name_of(kernels.select(device))
    cases = [CodecCase(name, codec(spec), numel) for name in distributions for spec in codecs]
    return collect("codec", device, ({**measure(case), "backend": backend} for case in progress(cases)))


def measure(case: CodecCase) -> Row:
    x = data.sample(case.distribution, case.numel)
    wire_bits = 8 * case.codec.wire_bytes(x.numel()) / x.numel()
    lost = lost_by(case.codec, x)
    return {
        "distribution": case.distribution,
        "codec": str(case.codec),
        "wire_bits": wire_bits,
        "nmse": lost,
        "db_above_rd": db_above_rd(lost, wire_bits),
        "lloyd_max_nmse": lloyd_max_nmse(case.codec.bits) if isinstance(case.codec, Lloyd) else None,
        "numel": x.numel(),
    }


def lost_by(chosen: Codec, x: Tensor) -> float:
    """NMSE of x encoded and decoded."""
    wire = torch.empty(chosen.wire_bytes(x.numel()), dtype=torch.uint8)
    out = torch.empty_like(x)
    chosen.encode(x, wire)
    chosen.decode(wire, out)
    return nmse(x, out)


def nmse(x: Tensor, decoded: Tensor) -> float:
    """sum (x - decoded)² / sum x², in fp64."""
    error = x.double() - decoded.double()
    return (error.square().sum() / x.double().square().sum()).item()


def db_above_rd(lost: float, wire_bits: float) -> float | None:
    """10 log10(nmse / 2**(-2 wire_bits)): the distance to the best any code can do at that rate on a Gaussian.

    The Gaussian's bound is used for every distribution. It is the hardest source of its variance, so on others the
    distance can be negative. None where nothing was lost.
    """
    return 10 * math.log10(lost) + 20 * math.log10(2) * wire_bits if lost > 0 else None


@lru_cache(maxsize=8)
def lloyd_max_nmse(bits: int, rounds: int = 1000) -> float:
    """NMSE of the best scalar quantizer of a Gaussian. Lloyd's rounds: edges halfway, levels at the means between."""
    normal = NormalDist()
    levels = [(2 * i + 1) / 2**bits - 1 for i in range(2**bits)]
    for _ in range(rounds):
        edges = [-math.inf, *((a + b) / 2 for a, b in pairwise(levels)), math.inf]
        bins = list(pairwise(edges))
        mass = [normal.cdf(high) - normal.cdf(low) for low, high in bins]
        levels = [(normal.pdf(low) - normal.pdf(high)) / m for (low, high), m in zip(bins, mass, strict=True)]
    return 1 - math.fsum(m * level**2 for m, level in zip(mass, levels, strict=True))


def command(
    codecs: Codecs = None,
    distributions: Annotated[Words, option(f"Among {', '.join(data.DISTRIBUTIONS)}; default all.")] = None,
    numel: Annotated[int | None, count("Elements; default 2**22, quick 2**18.", most=MOST)] = None,
    json: Json = None,
    quick: Quick = False,
) -> None:
    """Bits on the wire and what they lose (NMSE), on six distributions.

    dB is the distance to the rate-distortion bound of a Gaussian at all bits of the wire, headers and scales included.
    The gradient is that of a small network on scikit-learn's digits and has its own length.
    """
    chosen = flags.codecs(codecs, CODECS)
    names = words(distributions, data.DISTRIBUTIONS, "--distributions") or list(data.DISTRIBUTIONS)
    deliver(partial(run, chosen, names, numel or (QUICK_NUMEL if quick else NUMEL)), json)


if __name__ == "__main__":
    from benchmarks import codec as study  # under its own name, by which ranks find its functions

    start(study.command)
