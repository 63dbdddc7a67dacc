"""The link benchmark: messages of several sizes that all ranks send at once, each to the next rank."""

from collections.abc import Generator, Sequence
from statistics import median

from thinwire.tools.bench import timing
from thinwire.tools.bench.record import Progress, Record, Row, collect
from thinwire.tools.local import launch, torchrun
from thinwire.tools.local.launch import RankSetup

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 21, 1 << 24)  # bytes


def run(setups: Sequence[RankSetup], sizes: Sequence[int] = SIZES, progress: Progress = iter) -> Record:
    """A record of kind "link". Of the ranks of torchrun every one has all rows."""
    device = setups[0].device(0)

    def rows() -> Generator[Row]:
        for setup in setups:
            with launch.ranks(setup) as ranks:
                for size in progress(sizes):
                    yield row_of(ranks.run(torchrun.exchange_s, size, device), size, setup.link_name, setup.backend)

    return collect("link", device, rows())


def row_of(parts: Sequence[Sequence[float]], size: int, link: str, backend: str) -> Row:
    """The time of each round is that of its slowest rank."""
    times = [1e3 * max(of_ranks) for of_ranks in zip(*parts, strict=True)]
    where: Row = {"world": len(parts), "link": link, "backend": backend, "nbytes": size}
    return {**where, **timing.columns(times), "gbit_per_s": 8e-6 * size / max(median(times), 1e-9)}
