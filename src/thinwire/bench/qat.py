"""The benchmark of quantisation-aware training. A run has parts:

speed   what fake quantisation costs beside plain copies and torch's own op (bench/qat_speed.py)
"""

from collections.abc import Iterator, Sequence

import torch

from thinwire.bench import qat_speed
from thinwire.bench.record import Progress, Record, Row, collect

PARTS = ("speed",)


def run(
    device: str | torch.device = "cpu",
    parts: Sequence[str] | None = None,
    numel: int | None = None,
    threads: int = 1,
    quick: bool = False,
    progress: Progress = iter,
) -> Record:
    """A record of kind "qat"; what is None is the usual. `threads` are the CPU's."""
    device = torch.device(device)
    jobs = qat_speed.cases(device, numel, threads, quick) if "speed" in (parts or PARTS) else []
    return collect("qat", device, _rows(jobs, progress))


def _rows(jobs: Sequence[qat_speed.Case], progress: Progress) -> Iterator[Row]:
    for job in progress(jobs):
        yield from job.rows()
