"""How much memory a rank needs under DDP, by rule of thumb."""

from thinwire.tools.advise.model import TrainingJob

GPU_BYTES = 80 * 10**9  # of an A100 or an H100, where nothing else is said
STATE_BYTES = {"adaptive": 8, "linear": 4}  # of the optimizer, per parameter: Adam's two moments, SGD's momentum
MASTER_BYTES = 4  # of the fp32 copy of a parameter that trains in 16 bits
ACTIVATIONS = 0.25  # of all the rest, with activation checkpointing


def needed(job: TrainingJob) -> dict[str, float]:
    """Bytes per rank, by what holds them. DDP copies gradients into its buckets."""
    width = job.dtype.itemsize
    state = STATE_BYTES[job.family] + (MASTER_BYTES if width < MASTER_BYTES else 0)
    parts = {"weights": width, "gradients and DDP's buckets": 2 * width, "optimizer": state}
    found = {name: float(job.params * size) for name, size in parts.items()}
    return {**found, "activations": ACTIVATIONS * sum(found.values())}
