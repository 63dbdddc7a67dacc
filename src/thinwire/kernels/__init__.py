"""Kernels: three operations, defined in plain torch, served by the fastest backend that can run."""

from thinwire.kernels.dispatch import BACKENDS, select, use_backend
from thinwire.kernels.schema import Backend, Encoding

__all__ = ["BACKENDS", "Backend", "Encoding", "select", "use_backend"]
