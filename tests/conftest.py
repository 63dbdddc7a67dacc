"""Fixtures every test can use."""

from collections.abc import Iterator

import pytest

from ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """ranks(world).run(fn, *args, timeout=30.0) -> [fn(group, *args) on each rank]; see tests/ranks.py."""
    pool = RankPool()
    yield pool
    pool.close()
