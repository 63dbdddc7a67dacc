"""Codecs: identity, casts, block integers, rotated Lloyd-Max, trellis, the largest numbers, codecs made of codecs."""

from thinwire.codecs.base import Codec
from thinwire.codecs.leaves import BlockInt, Cast, Identity, Lloyd, TopK, Trellis
from thinwire.codecs.registry import codec, names
from thinwire.codecs.select import ByName, BySize

__all__ = ["BlockInt", "ByName", "BySize", "Cast", "Codec", "Identity", "Lloyd", "TopK", "Trellis", "codec", "names"]
