"""Ranks on this machine for benchmarks: started here, over loopback, shaped links or NCCL, or found under torchrun."""
