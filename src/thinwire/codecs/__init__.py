"""Codecs: identity, casts, block integers, rotated Lloyd-Max, trellis, the largest numbers, codecs made of codecs."""

from thinwire.codecs.base import Codec
from thinwire.codecs.block_int import BlockInt
from thinwire.codecs.cast import Cast, Identity
from thinwire.codecs.lloyd import Lloyd
from thinwire.codecs.registry import codec, names
from thinwire.codecs.select import ByName, BySize
from thinwire.codecs.topk import TopK
from thinwire.codecs.trellis import Trellis

__all__ = ["BlockInt", "ByName", "BySize", "Cast", "Codec", "Identity", "Lloyd", "TopK", "Trellis", "codec", "names"]
