"""Counter-based hash for rotation signs and stochastic rounding: the same on every backend, with no global RNG."""

from functools import lru_cache

_MASK64 = (1 << 64) - 1
# Streams: independent uses of one seed and step.
ROTATION = 1
DITHER = 2
DITHER_RECODE = 3
SHARD = 4


def mix64(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


@lru_cache(maxsize=256)
def key(seed: int, step: int, stream: int) -> int:
    """64-bit key of one use of the hash; kernels mix it with the element index."""
    return mix64(mix64(mix64(seed & _MASK64) ^ (step & _MASK64)) ^ stream)


def row_step(mixed: int, row: int) -> int:
    """The `step` of a row of wires: key(step, place ^ row, SHARD), where mixed = mix64(step) ^ place."""
    return mix64(mix64(mixed ^ row) ^ SHARD)
