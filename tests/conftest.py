from collections.abc import Callable, Iterator

import pytest

from tests.ranks import Ranks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the wide matrices too, as CI does")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is marked ``wide``, unless it was asked for."""
    if config.getoption("--all"):
        return
    wide = [item for item in items if item.get_closest_marker("wide")]
    config.hook.pytest_deselected(items=wide)
    items[:] = [item for item in items if not item.get_closest_marker("wide")]


@pytest.fixture(scope="session")
def _pools() -> Iterator[dict[int, Ranks]]:
    pools: dict[int, Ranks] = {}
    yield pools
    for ranks in pools.values():
        ranks.end()


@pytest.fixture
def ranks(_pools: dict[int, Ranks]) -> Callable[[int], Ranks]:
    """``ranks(world_size)``: gloo ranks, started once and shared by the tests."""

    def of_size(world_size: int) -> Ranks:
        if world_size not in _pools or not _pools[world_size].alive:
            _pools[world_size] = Ranks(world_size)
        return _pools[world_size]

    return of_size
