"""Fixtures of the integration tests."""

from collections.abc import Iterator

import pytest

from tests.conftest import Server
from tests.integration.rollout_kit import Stack
from tests.integration.trainer_kit import Ranks


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two trainer ranks in processes of their own, for the whole session."""
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def stack(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The session's server behind a router."""
    s = Stack(server, tmp_path_factory.mktemp("rollout"))
    try:
        s.fleet.probe()
        yield s
    finally:
        s.fleet.close()
        s.router.stop()
