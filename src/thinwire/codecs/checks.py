"""Checks that several codecs share when they are made."""

from thinwire.errors import CodecError


def is_int(value: object) -> bool:
    """Whether it is an integer; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_block(block: int) -> None:
    """Raise unless a block is a multiple of 8, so that a plane of one bit fills whole bytes."""
    if not is_int(block) or block < 8 or block % 8 or block >= 1 << 32:
        raise CodecError(f"block must be a multiple of 8 from 8 to 2**32 - 8, got {block!r}")


def check_bits(bits: int, low: int, high: int) -> None:
    """Raise unless low <= bits <= high."""
    if not is_int(bits) or not low <= bits <= high:
        raise CodecError(f"bits must be {low}..{high}, got {bits!r}")
