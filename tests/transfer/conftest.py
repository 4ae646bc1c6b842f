"""A store for objects on their way."""

import pytest

from tests.transfer.standin import StandinStore


@pytest.fixture
def store():
    """Return a store that is emptied afterwards."""
    store = StandinStore()
    yield store
    store.close()
