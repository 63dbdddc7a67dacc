"""Kernels: what codecs and fake quantization compute, defined in plain torch, on the fastest backend that runs."""

from thinwire.kernels.dispatch import BACKENDS, flat, select, use_backend
from thinwire.kernels.schema import Backend, Encoding, FakeGradients, Grid
from thinwire.kernels.triton.compiling import compiled

__all__ = ["BACKENDS", "Backend", "Encoding", "FakeGradients", "Grid", "compiled", "flat", "select", "use_backend"]
