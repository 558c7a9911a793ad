"""Fixtures of the integration tests."""

from collections.abc import Iterator

import pytest

from tests.integration.trainer_kit import Ranks


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two trainer ranks in processes of their own, for the whole session."""
    ranks = Ranks(2)
    yield ranks
    ranks.close()
