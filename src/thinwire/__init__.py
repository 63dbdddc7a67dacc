"""thinwire: everything a PyTorch training job puts on the wire, in 1 to 8 bits.

The public surface and nothing else.
"""

from thinwire.codecs import BlockInt, ByName, BySize, Cast, Codec, Identity, Lloyd, codec
from thinwire.errors import BackendError, CodecError, ThinwireError, WireError
from thinwire.kernels import use_backend

__all__ = [
    "BackendError",
    "BlockInt",
    "ByName",
    "BySize",
    "Cast",
    "Codec",
    "CodecError",
    "Identity",
    "Lloyd",
    "ThinwireError",
    "WireError",
    "codec",
    "use_backend",
]
__version__ = "0.1.0"
