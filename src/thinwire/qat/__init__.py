"""Learnable fake quantisation: quantisers whose scales are trained, for weights and activations."""

from thinwire.qat.ops import fake_quantize

__all__ = ["fake_quantize"]
