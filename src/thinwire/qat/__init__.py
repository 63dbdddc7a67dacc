"""Learnable fake quantization: quantizers whose scales are trained, for weights and activations."""

from thinwire.qat.convert import convert, weight_bytes
from thinwire.qat.export import export
from thinwire.qat.learnable import LearnableFakeQuantize
from thinwire.qat.lsq import LSQ, LSQPlus
from thinwire.qat.ops import fake_quantize
from thinwire.qat.prepare import calibrate, parameter_groups, prepare
from thinwire.qat.summary import Summary, summary

__all__ = [
    "LSQ",
    "LSQPlus",
    "LearnableFakeQuantize",
    "Summary",
    "calibrate",
    "convert",
    "export",
    "fake_quantize",
    "parameter_groups",
    "prepare",
    "summary",
    "weight_bytes",
]
