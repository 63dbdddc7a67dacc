"""FSDP2 and HSDP, from torch to the wire and back.

private (torch's private names) → state (the handle) → rows (of a flat buffer, in lanes) → collectives;
between replicas of shards, DDP's averager again. Beside them: codes (weights of quantised layers) and checkpoint.
"""

from thinwire.integrations.fsdp.state import FSDPState, compress_fsdp

__all__ = ["FSDPState", "compress_fsdp"]
