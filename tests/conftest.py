"""Fixtures every test can use."""

from collections.abc import Iterator

import pytest

from ranks import RankPool

GPU_TEST_S = 300  # kernels are compiled when they are first used


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests on a GPU may take longer, where pytest-timeout watches them."""
    if config.pluginmanager.hasplugin("timeout"):
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.timeout(GPU_TEST_S))


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """ranks(world).run(fn, *args) -> [fn(group, *args) on each rank]; see tests/ranks.py."""
    pool = RankPool()
    yield pool
    pool.close()
