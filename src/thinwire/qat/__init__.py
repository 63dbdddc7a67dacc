"""Learnable fake quantisation: quantisers whose scales are trained, for weights and activations."""

from thinwire.qat.learnable import LearnableFakeQuantize
from thinwire.qat.lsq import LSQ, LSQPlus
from thinwire.qat.ops import fake_quantize
from thinwire.qat.prepare import calibrate, prepare

__all__ = ["LSQ", "LSQPlus", "LearnableFakeQuantize", "calibrate", "fake_quantize", "prepare"]
