"""Figures of committed records, in seconds: what `machine.from_record` makes of them, to four digits.

benchmarks/ is not part of the package. When a record is replaced, tests/test_advise.py says what has changed.
"""

from thinwire.tools.advise.machine import BYTE_S, CALL_S, MESSAGE_S, CodecSpeed, Machine

MACHINES = {
    "aarch64": Machine(
        "cpu",
        "Neoverse-N1 (kernels_cpu_aarch64.json)",
        copy_s=2.683e-10,
        codecs={
            "int8": CodecSpeed(4.512e-10, 3.449e-10, 3.249e-10, 7.078e-10),
            "int4": CodecSpeed(5.223e-10, 4.296e-10, 4.353e-10, 9.414e-10),
            "lloyd4": CodecSpeed(1.842e-09, 1.548e-09, 3.317e-10, 1.284e-09),
            "lloyd2": CodecSpeed(1.85e-09, 1.551e-09, 3.532e-10, 1.211e-09),
            "bf16": CodecSpeed(5.12e-10, 3.632e-10, 2.575e-10, 1.058e-09),
        },
        call_s=CALL_S,
        message_s=MESSAGE_S["cpu"],
        byte_s=BYTE_S["cpu"],
    ),
    "x86_64": Machine(
        "cpu",
        "Intel(R) Xeon(R) Processor (kernels_cpu_x86_64.json)",
        copy_s=6.041e-10,
        codecs={
            "int8": CodecSpeed(5.224e-10, 5.022e-10, 7.963e-11, 4.996e-10),
            "int4": CodecSpeed(5.309e-10, 4.926e-10, 1.514e-10, 5.133e-10),
            "lloyd4": CodecSpeed(2.551e-09, 1.061e-09, 1.579e-10, 7.606e-10),
            "lloyd2": CodecSpeed(2.301e-09, 1.069e-09, 1.622e-10, 9.429e-10),
            "bf16": CodecSpeed(6.304e-10, 5.668e-10, 2.229e-10, 9.1e-10),
        },
        call_s=CALL_S,
        message_s=MESSAGE_S["cpu"],
        byte_s=BYTE_S["cpu"],
    ),
    "gpu": Machine(
        "gpu",
        "NVIDIA H200 (kernels_h200_2026-11-15.json)",
        copy_s=1.918e-12,
        codecs={
            "none": CodecSpeed(1.937e-12, 1.929e-12, 9.08e-13, 1.943e-12),
            "bf16": CodecSpeed(1.392e-12, 1.523e-12, 4.641e-13, 1.455e-12),
            "int8": CodecSpeed(1.127e-12, 1.254e-12, 2.209e-13, 5.42e-13),
            "int4": CodecSpeed(1.006e-12, 1.15e-12, 1.231e-13, 7.991e-13),
            "lloyd4": CodecSpeed(1.255e-12, 1.124e-12, 2.359e-13, 1.06e-12),
            "lloyd2": CodecSpeed(1.22e-12, 1.091e-12, 2.662e-13, 9.336e-13),
            "lloyd1": CodecSpeed(9.675e-13, 1.086e-12, 1.582e-13, 6.488e-13),
        },
        call_s=6.766e-05,
        message_s=MESSAGE_S["gpu"],
        byte_s=BYTE_S["gpu"],
    ),
}
