"""The link benchmark: messages of several sizes that all ranks send at once, each to the next rank."""

from collections.abc import Generator, Sequence
from statistics import median

import torch
import torch.distributed as dist

from thinwire.tools.bench import timing
from thinwire.tools.bench.record import Progress, Record, Row, collect
from thinwire.tools.local import launch, link as links, torchrun
from thinwire.tools.local.launch import RankSetup
from thinwire.tools.local.link import ShapedLink

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 21, 1 << 24)  # bytes


def run(
    world: int = 2, link: ShapedLink | None = None, sizes: Sequence[int] = SIZES, progress: Progress = iter
) -> Record:
    """A record of kind "link", of gloo ranks that are started here."""
    if link is not None:
        links.check()

    def rows() -> Generator[Row]:
        with launch.ranks(RankSetup(world=world, link=link)) as started:
            for size in progress(sizes):
                yield row_of(started.run(torchrun.exchange_s, size, timing.CPU), size, str(link or "loopback"), "gloo")

    return collect("link", timing.CPU, rows())


def run_here(device: torch.device, sizes: Sequence[int] = SIZES, progress: Progress = iter) -> Record:
    """The same by the ranks that torchrun started; every rank has all rows."""

    def rows() -> Generator[Row]:
        for size in progress(sizes):
            taken = torchrun.exchange_s(size, device)
            parts = [taken] * dist.get_world_size()
            dist.all_gather_object(parts, taken)
            yield row_of(parts, size, "torchrun", torchrun.BACKENDS[device.type])

    with torchrun.job(device):
        return collect("link", device, rows())


def row_of(parts: Sequence[Sequence[float]], size: int, link: str, backend: str) -> Row:
    """The time of each round is that of its slowest rank."""
    times = [1e3 * max(of_ranks) for of_ranks in zip(*parts, strict=True)]
    rate = 8e-6 * size / max(median(times), 1e-9)
    where: Row = {"world": len(parts), "link": link, "backend": backend, "nbytes": size}
    return {**where, **timing.columns(times), "gbit_per_s": rate}
