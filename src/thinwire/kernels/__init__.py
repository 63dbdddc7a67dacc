"""Kernels of codecs and fake quantization: defined in plain torch, and run on the fastest backend available."""

from thinwire.kernels.dispatch import BACKENDS, flat, select, use_backend
from thinwire.kernels.schema import Backend, Encoding, FakeGradients, Grid
from thinwire.kernels.triton.compiling import compiled

__all__ = ["BACKENDS", "Backend", "Encoding", "FakeGradients", "Grid", "compiled", "flat", "select", "use_backend"]
